"""The rules of a row, for every op alike: precision, padding, whose id it is, what is a fault.

Pure functions to be used inside kernels. ``x`` is ``[rows, V_local]``, ``index`` ``[rows, K]``
with ids of the whole vocabulary, ``start`` (0-d) the first column of the shard, ``sizes`` a
:class:`Sizes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_vocab._private import assert_async

__all__ = [
    "FAULTS",
    "Sizes",
    "assert_sound",
    "coverage",
    "fault",
    "least_exponent",
    "local_ids",
    "log_prob",
    "math_dtype",
    "merge_norm",
    "not_ignored",
    "pick",
    "prepare",
    "rebase",
    "scaled",
    "sum_columns",
    "sum_equal",
    "weigh",
    "weigh_shift",
    "without_padding",
]


class Sizes(NamedTuple):
    """Of the whole vocabulary; operators take it as a list."""

    columns: int
    """Columns of the logits, over all shards."""
    shard: int
    """Columns of a full shard."""
    vocab_size: int
    """Columns that are tokens; the rest is padding."""


def math_dtype(*logits: Tensor) -> torch.dtype:
    """The dtype that results for these logits are computed and returned in."""
    double = any(x.dtype == torch.float64 for x in logits)
    return torch.float64 if double else torch.float32


def prepare(
    x: Tensor,
    start: Tensor,
    sizes: Sequence[int],
    dtype: torch.dtype | None = None,
    column: Tensor | None = None,
) -> Tensor:
    """The logits in the dtype of the math, and -inf where they are padding.

    ``column`` says which columns ``x`` holds, if not all.
    """
    x = x.to(dtype or math_dtype(x))
    return without_padding(x, -torch.inf, start, sizes, column)


def without_padding(
    x: Tensor, filler: float, start: Tensor, sizes: Sequence[int], column: Tensor | None = None
) -> Tensor:
    """``x`` with ``filler`` in place of the columns from ``vocab_size`` on."""
    columns, _, vocab_size = sizes
    # Not "==": a guard that two sizes are equal makes one symbol of them, and Inductor then emits
    # code that still has the other.
    if not vocab_size < columns:
        return x
    if column is None:
        column = torch.arange(x.shape[-1], device=x.device, dtype=torch.int32)
    return torch.where(column < vocab_size - start, x, filler)


def scaled(x: Tensor, temperature: Tensor | None) -> Tensor:
    """``x / temperature``.

    For differences of logits only: dividing the logits themselves would round away the digits that
    a large common offset leaves them.
    """
    return x if temperature is None else x / temperature.to(x.dtype)


def rebase(x: Tensor, maximum: Tensor, temperature: Tensor | None) -> Tensor:
    """``(x - maximum) / temperature``, with -inf - (-inf) taken as -inf instead of NaN."""
    return scaled(x - torch.where(maximum == -torch.inf, 0, maximum), temperature)


def log_prob(x: Tensor, maximum: Tensor, log_sum: Tensor, temperature: Tensor | None) -> Tensor:
    """``log p = (x - M) / T - log S``."""
    return scaled(x - maximum, temperature) - log_sum


def merge_norm(m: Tensor, s: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """M and S of ``m, s [rows, shards]``, and (m - M) / T: -inf for a shard without mass."""
    maximum = m.amax(-1)
    shift = rebase(m, maximum.unsqueeze(-1), temperature)
    return maximum, (shift.exp() * s).sum(-1), shift


def weigh_shift(mass: Tensor, shift: Tensor) -> Tensor:
    """``mass * shift`` for ``mass = exp(shift)``, 0 where the shift is -inf or large enough to
    leave no mass. (One instruction less than :func:`weigh`.)
    """
    return mass * shift.clamp_min(least_exponent(shift.dtype))


def least_exponent(dtype: torch.dtype) -> float:
    """A number below which the exponential is 0."""
    finfo = torch.finfo(dtype)
    return math.log(finfo.tiny * finfo.eps) - 1


def weigh(weight: Tensor, x: Tensor) -> Tensor:
    """``weight * x``, 0 where the weight is, though ``x`` may be NaN or have overflowed."""
    return torch.where(weight == 0, 0, weight * x)


def sum_columns(terms: Tensor) -> Tensor:
    """The sum of each row in fp64: a loop over 1e5 terms in fp32 would lose a digit."""
    return terms.sum(-1, dtype=torch.float64).to(terms.dtype)


def not_ignored(index: Tensor, ignore_index: int | None) -> Tensor:
    if ignore_index is None:
        return torch.ones_like(index, dtype=torch.bool)
    return index.long() != ignore_index  # int32 ids would wrap the number


def local_ids(index: Tensor, start: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Ids as columns of the shard, clamped into it, and which of them the shard owns."""
    local = index.long() - start
    owned = (local >= 0) & (local < columns)
    return local.clamp(0, max(columns - 1, 0)), owned


def pick(logits: Tensor, index: Tensor, start: Tensor, columns: int) -> Tensor:
    """The logits at ids that the shard owns, else 0: the shards' picks add up."""
    local, owned = local_ids(index, start, columns)
    return torch.where(owned, logits.gather(-1, local).to(math_dtype(logits)), 0)


SORTED_FROM = 128
"""K from which on entries are sorted: to compare each with each takes K times their memory in eager
code. Where compiled, it takes none."""


def sum_equal(keys: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """For each of the K entries of a row, the sums of ``values`` over the entries of equal key."""
    if keys.shape[-1] == 1:
        return values
    if keys.shape[-1] < SORTED_FROM:
        equal = keys.unsqueeze(-1) == keys.unsqueeze(-2)
        return tuple(torch.where(equal, value.unsqueeze(-2), 0).sum(-1) for value in values)
    ordered, order = keys.sort(dim=-1, stable=True)
    first = torch.searchsorted(ordered, keys)
    last = torch.searchsorted(ordered, keys, right=True)
    sums = []
    for value in values:
        total = torch.nn.functional.pad(value.double().gather(-1, order).cumsum(-1), (1, 0))
        sums.append((total.gather(-1, last) - total.gather(-1, first)).to(value.dtype))
    return tuple(sums)


def coverage(
    x: Tensor,
    start: Tensor,
    columns: int,
    sizes: Sequence[int],
    temperature: Tensor | None = None,
    index: Tensor | None = None,
    ignore_index: int | None = None,
) -> Tensor:
    """A check value per row: how many columns this shard, of ``columns``, believes there are.

    Shards that agree on it, and have the size that it gives them, cover the vocabulary exactly
    once. It is NaN if the shard has another size, -inf if an id of the row is out of range, and
    +inf if its temperature is not positive and finite.
    """
    total, shard_size, vocab_size = sizes
    expected = (total - start).clamp(0, shard_size)
    number = torch.where(expected == columns, x.new_full((), total), torch.nan)
    number = number.expand(x.shape[:-1])
    if index is not None:
        in_range = (index >= 0) & (index < vocab_size)
        bad = not_ignored(index, ignore_index) & ~in_range
        number = torch.where(bad.any(-1), -torch.inf, number)
    if temperature is not None:
        bad = ~((temperature > 0) & (temperature < torch.inf))
        number = torch.where(bad.any(-1) if bad.dim() else bad, torch.inf, number)
    return number


FAULTS = 3
"""Kinds of faults of a row, as :func:`fault` lists them."""


def fault(covered: Tensor) -> Tensor:
    """Which faults the shards' ``coverage [rows, shards]`` shows in each row, ``[rows, 3]``: an id
    out of range, shards that do not fit together, a temperature that is not positive and finite.
    """
    bad_id = (covered == -torch.inf).any(-1)
    bad_temperature = (covered == torch.inf).any(-1)
    misfit = (covered != covered[..., :1]).any(-1) & ~bad_id & ~bad_temperature
    return torch.stack([bad_id, misfit, bad_temperature], -1)


def assert_sound(
    function: str,
    faults: Tensor,
    tempered: bool = False,
    vocab_size: int | None = None,
    ignore_index: int | None = None,
) -> None:
    """Asserts on the device, without the host waiting, that no row is at fault.

    ``faults [*, 3]``, of :func:`fault`, come from what the collective carried, so all ranks raise
    the same error. ``tempered`` says whether the rows have a temperature; ops that take ids give
    ``vocab_size``.
    """
    bad_id, misfit, bad_temperature = faults.flatten(0, -2).any(0).unbind()
    if vocab_size is not None:
        ignored = "" if ignore_index is None else f" or id == ignore_index ({ignore_index})"
        assert_async(
            ~bad_id,
            f"{function}: expected ids in the range 0 <= id < {vocab_size}{ignored}, "
            "got one out of range on at least one rank",
        )
    if tempered:
        assert_async(
            ~bad_temperature,
            f"{function}: expected 0 < temperature < inf in every row, got another on at least "
            "one rank",
        )
    assert_async(
        ~misfit,
        f"{function}: expected each rank to hold the torch.chunk share of one number of columns, "
        "got shards that do not fit together; where they are uneven, DTensor.from_local needs the "
        "global shape= and stride=",
    )
