"""Small models of Hugging Face's transformers, trained on two ranks as on one process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import dtensor_vocab as dv
from bench import naive
from tests.ranks import on_mesh

STEPS, VOCAB = 6, 101

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
    pytest.mark.usefixtures("eager_kernels"),
]

FAMILIES: dict[str, tuple[dict[str, Any], Callable[[Any], dict[str, Any]]]] = {
    "Llama": ({}, lambda config: {}),
    "Qwen2": ({"tie_word_embeddings": True}, lambda config: {}),
    "Phi": ({}, lambda config: {}),  # Its head has a bias.
    "Gemma2": (
        {"final_logit_softcapping": 2.0, "head_dim": 8},
        lambda config: {"softcap": config.final_logit_softcapping},
    ),
    "Cohere": ({"logit_scale": 0.25}, lambda config: {"temperature": 1 / config.logit_scale}),
    "Granite": ({"logits_scaling": 2.0}, lambda config: {"temperature": config.logits_scaling}),
}
"""For each family further settings of the model, and the options that stand for what it does to the
output of its head."""


def make(family: str, seed: int = 0) -> Any:
    import transformers

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    settings = FAMILIES[family][0]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB, **sizes, **heads, **special, **settings
    )
    return getattr(transformers, f"{family}ForCausalLM")(config)


def handed_over(model: Any, tokens: Tensor) -> Any:
    """The output of the head itself, of which the model would make further copies."""
    return model.lm_head(model.model(tokens).last_hidden_state)


def train(model: Any, loss_of: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (4, 13), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(tokens[:, :-1], tokens[:, 1:]).mean()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class LinearHead(nn.Linear):
    def forward(self, hidden: Tensor) -> Any:
        return dv.LinearLogits(hidden, self.weight, self.bias)


def with_sharded_logits(model: Any, mesh: DeviceMesh) -> Any:
    return ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)


def with_linear_logits(model: Any, mesh: DeviceMesh) -> Any:
    head = model.lm_head
    head.__class__ = LinearHead
    for name, value in head.named_parameters():
        setattr(head, name, nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])))
    return PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())


def parallelize(model: Any, mesh: DeviceMesh, prepare: Callable[[Any, DeviceMesh], Any]) -> Any:
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    plan = {"lm_head": prepare(model, mesh)}
    if tied:
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, plan)
    if tied:
        model.model.embed_tokens.weight = model.lm_head.weight
    return model


@pytest.mark.parametrize("prepare", [with_sharded_logits, with_linear_logits])
@pytest.mark.parametrize("family", FAMILIES)
def test_model_trains_as_on_one_process(
    family: str, prepare: Callable[[Any, DeviceMesh], Any]
) -> None:
    """The reference is the whole model, with the copies of the logits that it makes."""
    expected = make(family)
    expected_losses = train(
        expected, lambda tokens, labels: -naive.logprobs(expected(tokens).logits, labels)
    )
    assert expected_losses[-1] < expected_losses[0] - 0.02
    options = FAMILIES[family][1](expected.config)
    with on_mesh((2,)) as mesh:
        model = parallelize(make(family), mesh, prepare)
        logits = handed_over(model, torch.zeros(1, 1, dtype=torch.long))
        assert logits.placements == (Shard(2),)
        assert isinstance(logits, dv.LinearLogits) == (prepare is with_linear_logits)
        losses = train(
            model,
            lambda tokens, labels: -dv.logprobs(handed_over(model, tokens), labels, **options),
        )
        weights = {
            name: weight.full_tensor() if isinstance(weight, DTensor) else weight
            for name, weight in model.named_parameters()
        }
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-4)


def test_distillation_with_a_teacher() -> None:
    """Likelihood, entropy and reverse KL of a whole model that returns ``LinearLogits``."""

    def loss_of(ops: Any, student: Any, teacher: Any) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(tokens: Tensor, labels: Tensor) -> Tensor:
            logits = student(tokens).logits
            with torch.no_grad():
                reference = teacher(tokens).logits
            log_p, entropy = ops.logprobs_and_entropy(logits, labels)
            return ops.kl_div(logits, reference, reverse=True) - log_p - 0.1 * entropy

        return loss

    expected = make("Llama")
    expected_losses = train(expected, loss_of(naive, expected, make("Llama", seed=1)))
    with on_mesh((2,)) as mesh:
        student, teacher = (
            parallelize(make("Llama", seed), mesh, with_linear_logits) for seed in (0, 1)
        )
        losses = train(student, loss_of(dv, student, teacher))
    assert losses == pytest.approx(expected_losses, rel=1e-4)
