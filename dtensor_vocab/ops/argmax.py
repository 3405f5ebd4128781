"""``argmax``: the id of the largest logit of each row, the lowest where several tie."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_vocab.inputs import check_logits
from dtensor_vocab.kernel import Rows, kernel, stats_per_row
from dtensor_vocab.operator import operator
from dtensor_vocab.rows import check, coverage, fault, math_dtype, prepare

__all__ = ["argmax"]


@operator("logits, start -> stats")
def argmax_stats(
    logits: Tensor, vocab_start: Tensor, vocab: int, shard_size: int, vocab_size: int
) -> Tensor:
    """A shard's largest logit, its id, and coverage: ``[1, *, 3]``."""
    stats = _new_stats(logits, vocab_start)
    columns = logits.shape[-1]
    if columns == 0:  # an empty shard reads as one column without mass
        logits = logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    if logits.numel() == 0:
        return stats
    shard = _shard_stats(
        *Rows(logits).logits, vocab_start[0], columns, vocab, shard_size, vocab_size
    )
    return shard.view(stats.shape)


@argmax_stats.register_fake
def _(logits, vocab_start, *_):
    return _new_stats(logits, vocab_start)


def _new_stats(logits, vocab_start) -> Tensor:
    shape = (vocab_start.shape[0], *logits.shape[:-1], 3)
    return logits.new_empty(shape, dtype=math_dtype(logits))


@kernel
def _shard_stats(logits, start, columns, vocab, shard_size, vocab_size):
    x = prepare(logits, None, start, vocab_size if vocab_size < vocab else None)
    column = x.argmax(-1, keepdim=True)
    sound = coverage(x, start, columns, vocab, shard_size, None, vocab_size, None)
    value, first = x.gather(-1, column), (column + start).to(x.dtype)
    return torch.cat([value, first, sound.unsqueeze(-1)], -1)


@operator("gathered -> rows")
def argmax_merge(stats: Tensor) -> Tensor:
    """``stats [shards, *, 3]`` to ids ``[*]``."""
    ids, faults = _merge(stats_per_row(stats))
    check("argmax", faults)
    return ids.view(stats.shape[1:-1])


@argmax_merge.register_fake
def _(stats):
    return stats.new_empty(stats.shape[1:-1], dtype=torch.int64)


@kernel
def _merge(stats):
    value, ids, sound = stats.unbind(-1)
    # argmax gives the first of equals, and shards hold ascending ids
    ids = ids.gather(-1, value.argmax(-1, keepdim=True)).squeeze(-1)
    return ids.to(torch.int64), fault(sound)


def argmax(logits: Tensor, *, vocab_size: int | None = None) -> Tensor:
    """todo"""
    vocabulary = check_logits("argmax", logits, vocab_size)
    return argmax_merge(argmax_stats(logits.detach(), *vocabulary))
