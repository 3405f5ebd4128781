"""No less accurate than the same in plain fp32 torch, measured against fp64, at V = 131072."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dtensor_vocab as dv
from tests.ops import OPS, Layout, Op, expect, observe, place, tp
from tests.oracle import assert_bytes_equal
from tests.ranks import on_mesh, parts

ROWS, VOCAB = 16, 131072


def log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1)


def entropy(logits: Tensor) -> Tensor:
    log_p = log_softmax(logits)
    return -(log_p.exp() * log_p).sum(-1)


def kl_div(a: Tensor, b: Tensor) -> Tensor:
    a, b = log_softmax(a), log_softmax(b)
    return (a.exp() * (a - b)).sum(-1)


def js_div(student: Tensor, teacher: Tensor) -> Tensor:
    s, t = log_softmax(student), log_softmax(teacher)
    m = torch.logaddexp(t + torch.tensor(0.3).log(), s + torch.tensor(0.7).log())
    return 0.3 * (t.exp() * (t - m)).sum(-1) + 0.7 * (s.exp() * (s - m)).sum(-1)


def at(logits: Tensor, index: Tensor) -> Tensor:
    return log_softmax(logits).gather(-1, index.unsqueeze(-1)).squeeze(-1)


COMPOSITES: dict[str, Callable[..., Tensor]] = {
    "logprobs": at,
    "entropy": entropy,
    "kl_div": lambda student, teacher: kl_div(teacher, student),
    "kl_div(reverse=True)": kl_div,
    "js_div(beta=0.3)": js_div,
    "cross_entropy(reduction=none)": lambda logits, target: -at(logits, target),
}
MEASURED = [op for op in OPS if str(op) in COMPOSITES]


@pytest.mark.parametrize(
    "layout, offset", [(None, 0), (None, 1e4), (None, -1e4), (tp(2), 1e4)], ids=str
)
@pytest.mark.parametrize("op", MEASURED, ids=str)
def test_error_is_no_larger(op: Op, layout: Layout | None, offset: float) -> None:
    inputs = {
        name: 3 * torch.randn(ROWS, VOCAB) + offset
        if name in op.logits
        else torch.randint(VOCAB, (ROWS,))
        for name in op.arguments
    }
    ones = [torch.ones(ROWS)]
    expected = expect(op, inputs, ones)
    if layout is None:
        observed = observe(op, inputs, grads=ones)
    else:
        with on_mesh(layout.mesh) as mesh:
            observed = observe(op, inputs, mesh, layout, ones)
    leaves = {n: x.clone().requires_grad_() if n in op.logits else x for n, x in inputs.items()}
    composite = COMPOSITES[str(op)](*leaves.values())
    composite.sum().backward()

    value = parts(observed.outputs[0])[0]
    assert_no_less_accurate(value, composite, expected.outputs[0])
    for name in op.logits:
        grad = torch.cat(list(parts(observed.gradients[name]).values()), -1)
        assert_no_less_accurate(grad, leaves[name].grad, expected.gradients[name])


def assert_no_less_accurate(actual: Tensor, composite: Tensor, expected: Tensor) -> None:
    """By the root mean square of the errors, which two orders of one sum share within a tenth."""
    ours, theirs = (
        (x.detach().double() - expected).square().mean().sqrt() for x in (actual, composite)
    )
    assert ours <= 1.1 * theirs, f"error {ours:.2e}, that of plain torch {theirs:.2e}"


@pytest.mark.parametrize("k", [None, 3], ids=["one id", "3 ids"])
@pytest.mark.parametrize("layout", [None, tp(2)], ids=str)
@pytest.mark.parametrize(
    "dtype, options",
    [
        (torch.bfloat16, {}),
        (torch.float16, {"temperature": 0.7, "vocab_size": 4001}),
        (torch.float32, {}),
    ],
    ids=["bfloat16", "float16, temperature, padding", "float32"],
)
def test_three_ops_give_log_probabilities_of_the_same_bits(
    dtype: torch.dtype, options: dict[str, Any], layout: Layout | None, k: int | None
) -> None:
    """exp(new - old) is exactly 1 where the two came from different ops on the same logits."""
    inputs = {
        "logits": (2 * torch.randn(33, 4099)).to(dtype),
        "index": torch.randint(4001, (33, k) if k else (33,)),
    }

    def values(*placed: Tensor) -> list[dict[int, Tensor]]:
        results = [dv.logprobs(*placed, **options)]
        results.append(dv.logprobs_and_entropy(*placed, **options)[0])
        if k is None:
            results.append(-dv.cross_entropy(*placed, reduction="none", **options))
        return [parts(x) for x in results]

    if layout is None:
        first, *others = values(*inputs.values())
    else:
        with on_mesh(layout.mesh) as mesh:
            first, *others = values(
                *(place(name, x, mesh, layout, inputs) for name, x in inputs.items())
            )
    for other in others:
        for rank, local in first.items():
            assert_bytes_equal(other[rank], local)
