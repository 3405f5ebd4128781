"""Errors of the ops compared with those of plain fp32 torch, and results of equal bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dtensor_vocab as dv
from tests.ops import OP, OPS, Layout, Op, expect, named, observe, place, tp
from tests.oracle import assert_bytes_equal
from tests.ranks import on_mesh, parts

ROWS, VOCAB = 15, 131072


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
SHARDED = [(OP["kl_div"], tp(2))]


@pytest.mark.parametrize("op, layout", [(op, None) for op in MEASURED] + SHARDED, ids=str)
def test_error_is_at_most_that_of_plain_torch(op: Op, layout: Layout | None) -> None:
    offset = torch.tensor([[0.0], [1e4], [-1e4]]).repeat(ROWS // 3, 1)
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
    """Compares root mean square errors. Summing in another order changes them by up to a tenth."""
    ours, theirs = (
        (x.detach().double() - expected).square().mean().sqrt() for x in (actual, composite)
    )
    assert ours <= 1.1 * theirs, f"error {ours:.2e}, that of plain torch {theirs:.2e}"


def errors_of_small_divergences(op: Op, layout: Layout | None) -> tuple[Tensor, Tensor]:
    """Returns divergences of fp32 logits, from 1e-12 to 1e-3, and the errors of the op."""
    teacher = 3 * torch.randn(256, 1000)
    noise = torch.logspace(-5.7, -0.9, 256).unsqueeze(-1) * torch.randn(256, 1000)
    inputs = {"student": teacher + noise, "teacher": teacher}
    if layout is None:
        value = op(*inputs.values())[0]
    else:
        with on_mesh(layout.mesh) as mesh:
            value = op(*(place(name, x, mesh, layout, inputs) for name, x in inputs.items()))[0]
    expected = expect(op, inputs).outputs[0]
    assert expected.amin() < 1e-11 and expected.amax() > 1e-3
    return expected, (parts(value)[0].double() - expected).abs()


@pytest.mark.parametrize("layout", [None, tp(2)], ids=str)
@pytest.mark.parametrize("op", named("kl_div"), ids=str)
def test_small_kl_divergence_has_a_small_absolute_error(
    op: Op, layout: Layout | None, eager_kernels: None
) -> None:
    """The value is a difference of logarithms that are rounded to fp32, as in plain torch."""
    value, error = errors_of_small_divergences(op, layout)
    assert error.amax() < 6e-7
    assert (error < 2e-3 * value)[value > 3e-4].all()


@pytest.mark.parametrize("layout", [None, tp(2)], ids=str)
def test_small_jensen_shannon_divergence_has_a_small_relative_error(
    layout: Layout | None, eager_kernels: None
) -> None:
    """Rounding s - t to fp32 causes an error in proportion to the root of the divergence."""
    value, error = errors_of_small_divergences(OP["js_div(beta=0.3)"], layout)
    assert (error < 2e-7 * value.sqrt() + 1e-5 * value).all()


@pytest.mark.parametrize(
    "k, options, layout",
    [
        (None, {}, None),
        (3, {}, tp(2)),
        (None, {"temperature": 0.7, "vocab_size": 4001}, tp(2)),
    ],
    ids=["one id", "3 ids", "temperature and padding"],
)
def test_three_ops_give_log_probabilities_of_the_same_bits(
    k: int | None, options: dict[str, Any], layout: Layout | None
) -> None:
    """Then exp(new - old) is exactly 1 if two different ops return them for the same logits."""
    inputs = {
        "logits": (2 * torch.randn(33, 4099)).bfloat16(),
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
