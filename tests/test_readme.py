"""The README's code runs as it stands, and its losses are those written on full logits."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from tests.ranks import on_mesh

README = Path(__file__).parent.parent / "README.md"

V, K = 37, 5
SHAPE = (3, 4)


@functools.cache
def namespace() -> dict[str, Any]:
    """What the code blocks leave behind, run one after the other as a reader would."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL):
        exec(compile(block, str(README), "exec"), names)
    return names


@pytest.mark.ranks(2)
def test_code_blocks() -> None:
    names = namespace()
    assert isinstance(names["logits"], DTensor) and names["logits"].placements == (Shard(2),)
    weight = names["model"].lm_head.weight
    assert weight.grad is not None and weight.grad.full_tensor().abs().sum() > 0


def full_policy(logits: Tensor, ids: Tensor, old: Tensor, gain: Tensor, mask: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    ratio = (log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - old).exp()
    entropy = -(log_p.exp() * log_p).sum(-1)
    gain = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain) + 0.01 * entropy
    return -(gain * mask).sum() / mask.sum()


def full_distillation(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    s, t = (student / 2).log_softmax(-1), (teacher / 2).log_softmax(-1)
    return ((s.exp() * (s - t)).sum(-1) * mask).sum() / mask.sum()


def full_topk(student: Tensor, log_q: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    log_p = student.log_softmax(-1)
    named = log_p.gather(-1, ids)
    rest_p = 1 - named.exp().sum(-1)
    rest_q = 1 - log_q.exp().sum(-1)
    kl = (log_q.exp() * (log_q - named)).sum(-1) + rest_q * (rest_q / rest_p).log()
    return (kl * mask).sum() / mask.sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loss", ["policy", "distillation", "topk_distillation"])
def test_losses(loss: str) -> None:
    logits, teacher = torch.randn(*SHAPE, V), torch.randn(*SHAPE, V)
    ids = torch.randint(0, V, SHAPE)
    mask = torch.ones(SHAPE)
    mask[0, :2] = 0
    old, advantages = torch.randn(SHAPE) - 3, torch.randn(SHAPE)
    log_q, named = (x[..., :K] for x in teacher.log_softmax(-1).sort(dim=-1, descending=True))
    named = named.contiguous()
    theirs = namespace()[f"{loss}_loss"]
    with on_mesh((2,)) as mesh:

        def shard(x: Tensor) -> DTensor:
            local = x.chunk(2, -1)[mesh.get_local_rank()]
            return DTensor.from_local(
                local, mesh, [Shard(-1)], run_check=False, shape=x.shape, stride=x.stride()
            )

        sharded = shard(logits).requires_grad_()
        full = logits.double().requires_grad_()
        if loss == "policy":
            value = theirs(sharded, ids, old, advantages, mask)
            expected = full_policy(full, ids, old, advantages, mask)
        elif loss == "distillation":
            value = theirs(sharded, shard(teacher), mask, temperature=2.0)
            expected = full_distillation(full, teacher.double(), mask)
        else:
            value = theirs(sharded, log_q, named, mask)
            expected = full_topk(full, log_q.double(), named, mask)
        value.backward()
        expected.backward()
        torch.testing.assert_close(value.double(), expected, atol=1e-5, rtol=1e-5)
        gradient = sharded.grad.full_tensor().double()
        torch.testing.assert_close(gradient, full.grad, atol=1e-6, rtol=1e-5)
