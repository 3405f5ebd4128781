"""Checks a provider's results against fp64 on the full vocabulary, before they are timed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bench import naive
from bench.measure.inputs import local_part, placement, vocab_dim
from bench.measure.ops import Op, as_tuple

__all__ = ["check", "sample", "upstream_of_sample"]

CHECKED_ROWS = 64
VALUE = {"rtol": 1e-5, "atol": 1e-4}
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-4, torch.float64: 1e-9}
"""Relative tolerance of a gradient that was computed in fp32 and rounded to this dtype."""


def sample(op: Op, full: Tensor, name: str = "") -> Tensor:
    """A copy of the rows to check, evenly spaced from first to last, of an input or a result."""
    if op.couples_rows or name == "weight":
        return full.detach().clone()
    return full.detach()[_rows(op, full)]


def _rows(op: Op, full: Tensor) -> Tensor:
    count = 2 if op.sliced else min(CHECKED_ROWS, full.shape[0])
    rows = torch.linspace(0, full.shape[0] - 1, count, dtype=torch.float64).long()
    return rows.to(full.device)


def upstream_of_sample(op: Op, grad: Tensor) -> Tensor:
    """An upstream gradient that is 0 except in the rows to check. The gradient of a weight, which
    is a sum over rows, then depends on these rows alone.
    """
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    rows, kept = _rows(op, local), torch.zeros_like(local)
    kept[rows] = local[rows]
    if isinstance(grad, DTensor):
        return DTensor.from_local(kept, grad.device_mesh, grad.placements, run_check=False)
    return kept


def check(
    op: Op,
    samples: dict[str, Tensor],
    outputs: Sequence[Tensor],
    upstream: Sequence[Tensor],
    gradients: Sequence[Tensor],
    gradients_are_sums: bool = False,
) -> None:
    """Raises if outputs, or gradients for ``upstream``, are not those of ``op.naive``.

    ``gradients_are_sums`` tells that several rounded gradients were added up. The tolerance is then
    the rounding of the largest entry.
    """
    inputs = {name: _wide(values) for name, values in samples.items()}
    leaves = [inputs[name].requires_grad_() for name in op.gradients]
    if op.draws:
        drawn = [sample(op, _local(output)) for output in outputs]
        _compare("value", drawn[1], naive.logprobs(*inputs.values(), drawn[0]), **VALUE)
        return
    expected = as_tuple(op.naive(**inputs))
    tolerance = VALUE if op.hidden is None else {"rtol": 0, "atol": _made_tolerance(samples)}
    for output, value in zip(outputs, expected, strict=True):
        _compare("value", sample(op, _local(output)), value, **tolerance)
    if not leaves:
        return
    kept = [value for value in expected if value.requires_grad]
    grads = [_wide(sample(op, _local(grad))) for grad in upstream]
    for name, gradient, exact in zip(
        op.gradients, gradients, torch.autograd.grad(kept, leaves, grads), strict=True
    ):
        dim = vocab_dim(name, exact)
        if isinstance(gradient, DTensor):
            exact = exact if dim is None else local_part(exact, dim, gradient.device_mesh)
            gradient = gradient.redistribute(placements=[placement(dim)]).to_local()
        if op.hidden is not None:
            error = (sample(op, gradient, name).double() - exact).norm() / exact.norm()
            assert error < _made_tolerance(samples), f"wrong gradient of {name}: error {error}"
            continue
        rounding = ROUNDING[gradient.dtype]
        near_zero = (rounding if gradients_are_sums else 1e-5) * float(exact.abs().max())
        _compare(f"gradient of {name}", sample(op, gradient), exact, rtol=rounding, atol=near_zero)


def _made_tolerance(samples: dict[str, Tensor]) -> float:
    """The tolerance of log-probabilities, and the relative one of gradients, if logits up to 16 are
    rounded to the dtype of the operands.
    """
    return max(8 * torch.finfo(samples["hidden"].dtype).eps, 1e-4)


def _local(tensor: Tensor) -> Tensor:
    """A replicated tensor as a plain one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype.is_floating_point else tensor


def _compare(what: str, got: Tensor, expected: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(
        _wide(got), _wide(expected.detach()), **tolerance, msg=lambda text: f"wrong {what}: {text}"
    )
