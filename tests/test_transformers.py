"""Training of a small Hugging Face Llama on two ranks, on logits and on ``LinearLogits``."""

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
    parallelize_module,
)

import dtensor_vocab as dv
from bench import naive
from tests.ranks import on_mesh

STEPS, VOCAB = 8, 101

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
    pytest.mark.usefixtures("eager_kernels"),
]


def llama(seed: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, tie_word_embeddings=False, **sizes, **heads)
    )


def train_llama(student: nn.Module, teacher: nn.Module, ops: Any) -> list[float]:
    """Trains on likelihood, entropy and reverse KL to a teacher, and returns the losses."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (4, 13), generator=generator)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        logits = student(tokens[:, :-1]).logits
        with torch.no_grad():
            reference = teacher(tokens[:, :-1]).logits
        log_p, entropy = ops.logprobs_and_entropy(logits, tokens[:, 1:])
        kl = ops.kl_div(logits, reference, reverse=True)
        loss = (kl - log_p - 0.1 * entropy).mean()
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
    style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(model, mesh, {"lm_head": style})


def with_linear_logits(model: Any, mesh: DeviceMesh) -> Any:
    model.lm_head.__class__ = LinearHead
    model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight, mesh, [Shard(0)]))
    hidden = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    return parallelize_module(model, mesh, {"lm_head": hidden})


@pytest.mark.parametrize("prepare", [with_sharded_logits, with_linear_logits])
def test_llama_trains_as_on_one_process(prepare: Callable[[Any, DeviceMesh], Any]) -> None:
    expected = llama(0)
    expected_losses = train_llama(expected, llama(1), naive)
    assert expected_losses[-1] < expected_losses[0] - 0.2
    with on_mesh((2,)) as mesh:
        student, teacher = (prepare(llama(seed), mesh) for seed in (0, 1))
        logits = student(torch.zeros(1, 1, dtype=torch.long)).logits
        assert logits.placements == (Shard(2),)
        assert isinstance(logits, dv.LinearLogits) == (prepare is with_linear_logits)
        losses = train_llama(student, teacher, dv)
        weights = {
            name: weight.full_tensor() if isinstance(weight, DTensor) else weight
            for name, weight in student.named_parameters()
        }
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)
