"""Row-level arithmetic that the kernels share: precision, padding, shifted exponents, sums.

These pure functions run inside kernels. ``x`` is ``[rows, V_local]``, ``start`` (0-d, or 0) is the
first column of the shard and ``sizes`` is a :class:`~dtensor_vocab.layout.Sizes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_vocab.linear_logits import Logits

__all__ = [
    "cap_slope",
    "capped",
    "capped_tokens",
    "columns_before",
    "least_exponent",
    "log_prob",
    "masked_product",
    "math_dtype",
    "merge_norms",
    "rebase",
    "scaled",
    "shift_times_mass",
    "sum_in_fp64",
    "to_math",
    "without_padding",
    "zero_safe_product",
]


def math_dtype(*logits: Logits) -> torch.dtype:
    """The dtype of the math and of the results for these logits."""
    double = any(x.dtype == torch.float64 for x in logits)
    return torch.float64 if double else torch.float32


def to_math(
    x: Tensor,
    start: Tensor | int,
    sizes: Sequence[int],
    dtype: torch.dtype | None = None,
    column: Tensor | None = None,
    softcap: Tensor | None = None,
) -> Tensor:
    """The logits in the dtype of the math, capped, with -inf in place of padding.

    ``column`` holds the columns of ``x`` within the shard. The default is all of them, in order.
    """
    x = capped(x.to(dtype or math_dtype(x)), softcap)
    return without_padding(x, -torch.inf, start, sizes, column)


def capped(x: Tensor, softcap: Tensor | None) -> Tensor:
    """``c tanh(x / c)`` for the soft cap c."""
    if softcap is None:
        return x
    softcap = softcap.to(x.dtype)
    return softcap * (x / softcap).tanh()


def capped_tokens(
    x: Tensor, tokens: Tensor, softcap: Tensor | None, column: Tensor | None = None
) -> Tensor:
    """Caps the logits of a shard's first ``tokens`` columns. The others stay -inf: padding, and the
    column that stands for an empty shard.
    """
    if softcap is None:
        return x
    if column is None:
        column = torch.arange(x.shape[-1], device=x.device, dtype=torch.int32)
    return torch.where(column < tokens, capped(x, softcap), -torch.inf)


def cap_slope(x: Tensor, softcap: Tensor) -> Tensor:
    """The derivative of :func:`capped`, ``1 - tanh² = 4 e / (1 + e)²`` with ``e = e^(-2 |x| / c)``.

    The difference would lose its digits where the tanh is near 1.
    """
    e = (-2 / softcap.to(x.dtype) * x.abs()).exp()
    return 4 * e / (1 + e).square()


def without_padding(
    x: Tensor,
    filler: float,
    start: Tensor | int,
    sizes: Sequence[int],
    column: Tensor | None = None,
) -> Tensor:
    """``x`` with ``filler`` in place of the columns from ``vocab_size`` on."""
    columns, _, vocab_size = sizes
    # Not "==": its guard would merge the symbols of two sizes, and Inductor then emits code that
    # uses the one that is gone (seen on torch 2.13).
    if not vocab_size < columns:
        return x
    if column is None:
        column = torch.arange(x.shape[-1], device=x.device, dtype=torch.int32)
    return torch.where(column < vocab_size - start, x, filler)


def columns_before(end: int, start: Tensor | int, width: int, device: torch.device) -> Tensor:
    """How many of the ``width`` columns from ``start`` on come before ``end``, 0-d."""
    if not isinstance(start, Tensor):
        start = torch.full((), start, dtype=torch.int64, device=device)
    return (end - start).clamp(0, width)


def scaled(x: Tensor, temperature: Tensor | None) -> Tensor:
    """``x / temperature``.

    Apply it to differences of logits. Dividing the logits themselves would round away the digits
    that are left beside a large common offset.
    """
    return x if temperature is None else x / temperature.to(x.dtype)


def rebase(x: Tensor, maximum: Tensor, temperature: Tensor | None) -> Tensor:
    """``(x - maximum) / temperature``, with -inf - (-inf) taken as -inf instead of NaN."""
    return scaled(x - torch.where(maximum == -torch.inf, 0, maximum), temperature)


def log_prob(x: Tensor, maximum: Tensor, log_sum: Tensor, temperature: Tensor | None) -> Tensor:
    """``log p = (x - M) / T - log S``."""
    return scaled(x - maximum, temperature) - log_sum


def merge_norms(m: Tensor, s: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """M and S of ``m, s [rows, shards]``, and (m - M) / T: -inf for a shard without mass."""
    maximum = m.amax(-1)
    shift = rebase(m, maximum.unsqueeze(-1), temperature)
    return maximum, (shift.exp() * s).sum(-1), shift


def shift_times_mass(shift: Tensor, mass: Tensor) -> Tensor:
    """``shift * mass`` for ``mass = exp(shift)``, 0 where the shift is too low to leave any mass.

    It takes one instruction fewer than :func:`masked_product`.
    """
    return mass * shift.clamp_min(least_exponent(shift.dtype))


def least_exponent(dtype: torch.dtype) -> float:
    """A number below which the exponential is 0."""
    finfo = torch.finfo(dtype)
    return math.log(finfo.tiny * finfo.eps) - 1


def masked_product(weight: Tensor, x: Tensor) -> Tensor:
    """``weight * x``, 0 where the weight is 0, though ``x`` may be NaN or have overflowed."""
    return torch.where(weight == 0, 0, weight * x)


def zero_safe_product(a: Tensor, b: Tensor) -> Tensor:
    """``a * b``, 0 where either factor is 0, even if the other is NaN or infinite."""
    return torch.where((a == 0) | (b == 0), 0, a * b)


def sum_in_fp64(terms: Tensor) -> Tensor:
    """The sum of each row, added up in fp64: a loop over 1e5 terms in fp32 would lose a digit."""
    return terms.sum(-1, dtype=torch.float64).to(terms.dtype)
