"""``argmax``: the id of the largest logit of each row, the lowest where several tie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_vocab.checks import check_logits, check_softcap
from dtensor_vocab.faults import assert_no_faults, coverage, passed_checks
from dtensor_vocab.kernel import kernel, merge_kernel
from dtensor_vocab.layout import first_column, gather_and_merge, num_shards
from dtensor_vocab.linear_logits import Logits
from dtensor_vocab.numerics import math_dtype, to_math
from dtensor_vocab.operators import operator
from dtensor_vocab.row_blocks import (
    CHUNK_COLUMNS,
    ByRow,
    chunked,
    flat,
    in_chunks,
    stats_per_row,
)
from dtensor_vocab.shard_stats import stats_operator

__all__ = ["argmax"]


def _combine(stats: Tensor, temperature: None) -> Sequence[Tensor]:
    """Merges the statistics ``[rows, blocks, 3]`` of blocks of a shard."""
    # argmax returns the first of equal values, and blocks are in the order of their ids.
    largest = stats[..., 0].argmax(-1, keepdim=True).unsqueeze(-1)
    return stats.gather(1, largest.expand(-1, -1, stats.shape[-1])).squeeze(1).unbind(-1)


@stats_operator("logits, start -> stats", _combine, covered=2)
def argmax_stats(logits: Tensor, vocab_start: Tensor | None, sizes: Sequence[int]) -> Tensor:
    """A shard's largest logit, its id, and coverage: ``[1, *, 3]``."""
    stats = _new_stats(logits, vocab_start)
    by_row = ByRow(logits)
    if by_row.count == 0:
        return stats
    shard = _shard_stats(*by_row.logits, first_column(vocab_start), logits.shape[-1], sizes)
    return shard.view(stats.shape)


@argmax_stats.register_fake
def _(logits, vocab_start, *_):
    return _new_stats(logits, vocab_start)


def _new_stats(logits, vocab_start) -> Tensor:
    shape = (num_shards(vocab_start), *logits.shape[:-1], 3)
    return logits.new_empty(shape, dtype=math_dtype(logits))


@kernel
def _shard_stats(logits, start, width, sizes):
    x = to_math(*flat(logits), start, sizes)
    covered = coverage(x, None, None, start, width, sizes)
    if in_chunks(x):
        x = chunked(x, -torch.inf)
        x, first = _first_of_largest(x)
        first = first + CHUNK_COLUMNS * torch.arange(x.shape[-1], device=x.device)
        maximum, chunk = _first_of_largest(x)
        first = first.gather(-1, chunk.long().unsqueeze(-1)).squeeze(-1)
    else:
        maximum, first = _first_of_largest(x)
    return torch.stack([maximum, (first + start).to(x.dtype), covered], -1)


def _first_of_largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum over the last dim and its first position. NaN counts as the maximum."""
    if x.device.type != "cpu" and not in_chunks(x):
        return x.amax(-1), x.argmax(-1)  # One read on GPUs; on CPUs this does not vectorize.
    maximum = x.amax(-1, keepdim=True)
    position = torch.arange(x.shape[-1], device=x.device, dtype=torch.int32)
    found = (x == maximum) | (x != x)  # x != x vectorizes, unlike isnan.
    return maximum.squeeze(-1), torch.where(found, position, x.shape[-1]).amin(-1)


@operator("gathered -> rows")
def argmax_merge(stats: Tensor) -> Tensor:
    """``stats [shards, *, 3]`` to ids ``[*]``."""
    ids, passed = _merged(stats_per_row(stats))
    assert_no_faults("argmax", passed)
    return ids.view(stats.shape[1:-1])


@argmax_merge.register_fake
def _(stats):
    return stats.new_empty(stats.shape[1:-1], dtype=torch.int64)


@merge_kernel
def _merged(stats):
    value, ids, covered = stats.unbind(-1)
    # argmax returns the first of equal values, and shards are in the order of their ids.
    ids = ids.gather(-1, value.argmax(-1, keepdim=True)).squeeze(-1)
    return ids.to(torch.int64), passed_checks(covered)


def argmax(
    logits: Logits, *, vocab_size: int | None = None, softcap: float | None = None
) -> Tensor:
    """The id of the largest logit of each row; the lowest where several tie.

    Same as ``logits.argmax(-1)`` on the full vocabulary, with ties resolved to the lowest id. The
    result has no gradient.

    Args:
        logits: ``[*, V]``, fp16, bf16, fp32 or fp64, any strides; Tensor, DTensor or
            :class:`LinearLogits`.
        vocab_size: number of columns that are tokens. The columns after them are padding, which is
            never chosen. Default: V.
        softcap: like that of :func:`logprobs`. It changes no id, since the tanh keeps the order.

    Returns:
        ids ``[*]``, int64; placed like the result of :func:`entropy`.

    Communication: forward one all-gather of 3 numbers per row over the vocabulary's mesh dim, or
    nothing where V is not sharded over several ranks.

    Rows: a row that is wholly -inf gives id 0, and a row that holds NaN the id of its first NaN.

    Raises:
        TypeError: if an argument has an unsupported type or dtype.
        ValueError: if shapes, devices, meshes, placements or options are invalid, or if V > 2**24
            unless the logits are fp64. All ranks raise the same TypeError or ValueError before any
            communication, if they agree on the global shapes.
        RuntimeError: if the shards do not fit together.
            An asynchronous assertion on the device raises it, on every rank that takes part in the
            collective; the host does not wait for it.
    """
    logits, vocabulary = check_logits("argmax", logits, vocab_size)
    check_softcap("argmax", softcap, logits)
    return gather_and_merge(argmax_merge, argmax_stats(logits, *vocabulary))
