"""Token ids inside kernels: which are ignored, which a shard owns, which are equal.

``index`` is ``[rows, K]`` with ids of the whole vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_vocab.numerics import capped, math_dtype

__all__ = ["local_ids", "not_ignored", "pick", "sum_equal"]


def not_ignored(index: Tensor, ignore_index: int | None) -> Tensor:
    if ignore_index is None:
        return torch.ones_like(index, dtype=torch.bool)
    return index.long() != ignore_index  # a comparison in int32 would wrap a larger ignore_index


def local_ids(index: Tensor, start: Tensor | int, width: int) -> tuple[Tensor, Tensor]:
    """Ids as columns of a shard of ``width``, clamped into it, and which of them it owns."""
    local = index.long() - start
    owned = (local >= 0) & (local < width)
    return local.clamp(0, max(width - 1, 0)), owned


def pick(
    logits: Tensor, index: Tensor, start: Tensor | int, width: int, softcap: Tensor | None
) -> Tensor:
    """The capped logits at ids that the shard owns, 0 at others, so that shards add up to all."""
    local, owned = local_ids(index, start, width)
    picked = logits.gather(-1, local).to(math_dtype(logits))
    return torch.where(owned, capped(picked, softcap), 0)


_SORT_FROM = 128
"""Sort from this K on; below it, compare all pairs. The comparison stores K² numbers per row in
eager code and nothing in compiled code."""


def sum_equal(keys: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """For each of a row's K entries, the sums of ``values`` over the entries with an equal key."""
    if keys.shape[-1] == 1:
        return values
    if keys.shape[-1] < _SORT_FROM:
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
