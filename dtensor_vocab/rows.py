"""The rules of a row, for every op alike: precision, padding, whose id it is, what is a fault.

Pure functions to be used inside kernels. ``x`` is ``[rows, V_local]``, ``index`` ``[rows, K]``
with ids of the whole vocabulary, ``start`` (0-d) the first column of the shard, ``sizes`` a
:class:`Sizes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_vocab._private import assert_async

__all__ = [
    "Sizes",
    "check",
    "counted",
    "coverage",
    "fault",
    "local_ids",
    "math_dtype",
    "merge_norm",
    "pick",
    "prepare",
    "rebase",
    "scaled",
    "sum_columns",
    "without_padding",
]

BAD_ID, BAD_LAYOUT = 1, 2


class Sizes(NamedTuple):
    """Of the whole vocabulary; operators take it as a list."""

    columns: int
    """Columns of the logits, over all shards."""
    shard: int
    """Columns of a full shard."""
    tokens: int
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
    columns, _, tokens = sizes
    if not tokens < columns:  # "==" would make one symbol of the two, which Inductor loses
        return x
    if column is None:
        column = torch.arange(x.shape[-1], device=x.device, dtype=torch.int32)
    return torch.where(column < tokens - start, x, filler)


def scaled(x: Tensor, temperature: Tensor | None) -> Tensor:
    """``x / temperature``, of differences of logits: of logits it would round what they share."""
    return x if temperature is None else x / temperature.to(x.dtype)


def rebase(x: Tensor, maximum: Tensor, temperature: Tensor | None) -> Tensor:
    """``(x - maximum) / temperature`` where nothing (-inf) less nothing is nothing, not NaN."""
    return scaled(x - torch.where(maximum == -torch.inf, 0, maximum), temperature)


def merge_norm(m: Tensor, s: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """M and S of ``m, s [rows, shards]``, and (m - M) / T: -inf for a shard without mass."""
    maximum = m.amax(-1)
    shift = rebase(m, maximum.unsqueeze(-1), temperature)
    return maximum, (shift.exp() * s).sum(-1), shift


def sum_columns(terms: Tensor) -> Tensor:
    """The sum of each row, in fp64: a plain loop over 1e5 terms in fp32 loses a digit."""
    return terms.sum(-1, dtype=torch.float64).to(terms.dtype)


def counted(index: Tensor, ignore_index: int | None) -> Tensor:
    """Which ids are not to be ignored."""
    return (
        torch.ones_like(index, dtype=torch.bool) if ignore_index is None else index != ignore_index
    )


def local_ids(index: Tensor, start: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Ids as columns of the shard, clamped into it, and which of them the shard owns."""
    local = index.long() - start
    owned = (local >= 0) & (local < columns)
    return local.clamp(0, max(columns - 1, 0)), owned


def pick(logits: Tensor, index: Tensor, start: Tensor, columns: int) -> Tensor:
    """The logits at ids that the shard owns, else 0: the shards' picks add up."""
    local, owned = local_ids(index, start, columns)
    return torch.where(owned, logits.gather(-1, local).to(math_dtype(logits)), 0)


def coverage(
    x: Tensor,
    start: Tensor,
    columns: int,
    sizes: Sequence[int],
    index: Tensor | None = None,
    ignore_index: int | None = None,
) -> Tensor:
    """One number a row that proves, merged, that the row of a shard of ``columns`` is sound.

    It is the number of columns of the whole vocabulary, as this shard knows it: shards that
    agree on it, and have the size that it gives them, cover the vocabulary exactly once. It is
    NaN where the size is another, and -inf where an id of the row is out of range.
    """
    total, shard_size, tokens = sizes
    expected = (total - start).clamp(0, shard_size)
    number = torch.where(expected == columns, total, torch.nan).to(x.dtype).expand(x.shape[:-1])
    if index is None:
        return number
    in_range = (index >= 0) & (index < tokens)
    bad = counted(index, ignore_index) & ~in_range
    return torch.where(bad.any(-1), -torch.inf, number)


def fault(covered: Tensor) -> Tensor:
    """What is wrong with each row, from the coverage ``[rows, shards]`` that the shards gave."""
    layout = torch.where((covered != covered[..., :1]).any(-1), BAD_LAYOUT, 0)
    return torch.where((covered == -torch.inf).any(-1), BAD_ID, layout).to(torch.int8)


def check(
    function: str, faults: Tensor, vocab_size: int | None = None, ignore_index: int | None = None
) -> None:
    """Raises, on the device and without waiting for it, where a row is at fault.

    ``faults [rows]`` comes from what the collective carried, so all ranks raise alike.
    ``vocab_size`` is for ops that take ids.
    """
    if vocab_size is not None:
        ignored = "" if ignore_index is None else f" or id == ignore_index ({ignore_index})"
        assert_async(
            (faults != BAD_ID).all(),
            f"{function}: expected ids in the range 0 <= id < {vocab_size}{ignored}, "
            "got one out of range on at least one rank",
        )
    assert_async(
        (faults != BAD_LAYOUT).all(),
        f"{function}: expected each rank to hold the torch.chunk share of one number of columns, "
        "got shards that do not fit together; where they are uneven, DTensor.from_local needs the "
        "global shape= and stride=",
    )
