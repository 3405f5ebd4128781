"""Softmax statistics of each shard of the vocabulary, and their merge over shards.

Over its own columns, a shard computes for each row, in one read of the logits x,

    m = max x_v,  s = Σ e^(x_v - m),  w = Σ e^(x_v - m) (x_v - m),  picked_k = x[index_k]

and, for label smoothing, n / N if it holds n of all N tokens, and t = Σ (x_v - m) / N over these n.
A temperature divides each difference of logits. With M = max m_r over the shards r, the whole
vocabulary has

    S = Σ_r s_r e^(m_r - M),  W = Σ_r e^(m_r - M) (w_r + s_r (m_r - M)),
    T = Σ_r t_r + (n_r / N) (m_r - M)

so that log p_v = (x_v - M) - log S, the entropy is log S - W / S and the mean of log p_v over the
vocabulary is T - log S. M and log S are kept apart: their sum would lose the digits of log S where
all logits are large. (The merge is that of online softmax, Milakov and Gimelshein,
https://arxiv.org/abs/1805.02867, with further sums.)

``logprobs``, ``logprobs_and_entropy`` and ``cross_entropy`` without label smoothing run the same
two kernels, one on a shard and one for the merge, so their log-probabilities are bitwise equal.
This is why the statistics include w even where no entropy is wanted: a kernel that does not compute
w adds up s in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_vocab.faults import coverage, passed_checks
from dtensor_vocab.ids import not_ignored, pick
from dtensor_vocab.kernel import kernel, merge_kernel
from dtensor_vocab.layout import Sizes, first_column, num_shards
from dtensor_vocab.numerics import (
    capped,
    capped_tokens,
    columns_before,
    log_prob,
    masked_product,
    math_dtype,
    merge_norms,
    rebase,
    scaled,
    shift_times_mass,
    to_math,
)
from dtensor_vocab.row_blocks import (
    ByRow,
    chunked,
    flat,
    in_chunks,
    stats_per_row,
    tokens_by_chunk,
)
from dtensor_vocab.shard_stats import stats_operator

__all__ = [
    "Softmax",
    "combine_softmax",
    "merge_at_ids",
    "merge_softmax",
    "softmax_stats",
    "softmax_sums",
]


# ---- statistics of a shard


def combine_softmax(stats, temperature, ignore_index, summed=False) -> list[Tensor]:
    """Merges the statistics ``[rows, blocks, S]`` of blocks of a shard."""
    columns = [stats[..., i] for i in (0, 1, 3, *(4, 5)[: 2 * summed])]
    m, s, w, *t = merge_softmax_sums(*columns, temperature=temperature)
    first = 4 + 2 * summed
    share = [columns[-1].sum(-1)] if summed else []
    return [m, s, stats[:, 0, 2], w, *t, *share, stats[..., first:].sum(-2)]


@stats_operator("logits, rows, rows, start -> stats", combine_softmax, covered=2)
def softmax_stats(
    logits: Tensor,
    index: Tensor | None,
    temperature: Tensor | None,
    vocab_start: Tensor | None,
    sizes: Sequence[int],
    ignore_index: int | None,
    summed: bool = False,
    softcap: float | None = None,
) -> Tensor:
    """Statistics ``[1, *, S]`` of ``logits [*, V_local]``: m, s, coverage, w, (t, n / N), picked.

    ``vocab_start [1]`` is the shard's first column, None for 0, and ``sizes`` a
    :class:`~dtensor_vocab.layout.Sizes`. ``index``, ``[*]`` or ``[*, K]``, holds ids of the whole
    vocabulary.
    """
    stats = _new_stats(logits, index, vocab_start, summed)
    by_row = ByRow(logits)
    if by_row.count == 0:
        return stats
    args = by_row(index), by_row(temperature), first_column(vocab_start), logits.shape[-1], sizes
    shard = _shard_stats(*by_row.logits, *args, ignore_index, summed, softcap)
    return shard.view(stats.shape)


@softmax_stats.register_fake
def _(logits, index, temperature, vocab_start, sizes, ignore_index, summed=False, softcap=None):
    return _new_stats(logits, index, vocab_start, summed)


def _new_stats(logits, index, vocab_start, summed) -> Tensor:
    k = 0 if index is None else index.shape[-1] if index.dim() == logits.dim() else 1
    shape = (num_shards(vocab_start), *logits.shape[:-1], 4 + 2 * summed + k)
    return logits.new_empty(shape, dtype=math_dtype(logits))


@kernel
def _shard_stats(logits, index, temperature, start, width, sizes, ignore_index, summed, softcap):
    (logits,) = flat(logits)
    x = to_math(logits, start, sizes)
    covered = coverage(x, index, temperature, start, width, sizes, ignore_index)
    tokens = columns_before(Sizes(*sizes).vocab_size, start, width, x.device)
    m, s, w, *t = softmax_sums(x, temperature, tokens, sizes, summed, softcap)
    stats = [m, s, covered, w]
    if summed:
        share = tokens.to(x.dtype) / Sizes(*sizes).vocab_size
        stats += [t[0], share.expand(m.shape)]
    stats = [value.unsqueeze(-1) for value in stats]
    picked = [] if index is None else [pick(logits, index, start, width, softcap)]
    return torch.cat(stats + picked, -1)


def softmax_sums(x, temperature, tokens, sizes, summed, softcap) -> tuple[Tensor, ...]:
    """m, s, w and, if ``summed``, t of ``x [rows, V_local]``, of which ``tokens`` are tokens."""
    sums = _sums_by_chunks if in_chunks(x) else _sums
    return sums(x, temperature, tokens, sizes, summed, softcap)


def _sums(x, temperature, tokens, sizes, summed, softcap) -> tuple[Tensor, ...]:
    """m, s, w and, if ``summed``, t over the last dim of ``x``, of which ``tokens`` are tokens."""
    # The maximum before the cap, because Inductor would store a tanh that two reductions use.
    maximum = capped(x.amax(-1, keepdim=True), softcap)
    x = capped_tokens(x, tokens, softcap)
    # torch.where comes after the sum: Inductor then recognises the sum as that of a softmax.
    shifted = scaled(x - maximum, temperature)
    mass = shifted.exp()
    total = torch.where(maximum == -torch.inf, 0, mass.sum(-1, keepdim=True)).squeeze(-1)
    w = shift_times_mass(shifted, mass).sum(-1)
    if not summed:
        return maximum.squeeze(-1), total, w
    column = torch.arange(x.shape[-1], device=x.device, dtype=torch.int32)
    # Divide before the sum, which finite logits that stand for -inf would overflow.
    shifted = rebase(x, maximum, temperature) / Sizes(*sizes).vocab_size
    t = torch.where(column < tokens, shifted, 0).sum(-1)
    return maximum.squeeze(-1), total, w, t


def _sums_by_chunks(x, temperature, tokens, sizes, summed, softcap) -> tuple[Tensor, ...]:
    """The same as ``_sums``, by merging the sums of chunks of columns like those of shards."""
    x = chunked(x, -torch.inf)
    by_chunk = None if temperature is None else temperature.unsqueeze(-1)
    tokens = tokens_by_chunk(tokens, x)
    m, s, w, *t = _sums(x, by_chunk, tokens, sizes, summed, softcap)
    if summed:
        share = tokens.squeeze(-1).to(x.dtype) / Sizes(*sizes).vocab_size
        t.append(share.expand(m.shape))
    return merge_softmax_sums(m, s, w, *t, temperature=temperature)


# ---- merge of the shards


class Softmax(NamedTuple):
    """Statistics of rows over the whole vocabulary, ``[rows]`` unless stated otherwise."""

    maximum: Tensor
    log_sum: Tensor
    log_p: Tensor
    """At the ids, ``[rows, K]``."""
    passed: Tensor
    """``[rows, 3]``, from :func:`~dtensor_vocab.faults.passed_checks`."""
    entropy: Tensor
    mean_log_p: Tensor | None


def merge_softmax_sums(
    m: Tensor,
    s: Tensor,
    w: Tensor,
    t: Tensor | None = None,
    share: Tensor | None = None,
    *,
    temperature: Tensor | None,
) -> tuple[Tensor, ...]:
    """Merges ``[rows, shards]`` into M, S, W and, if given t and the ``share`` n / N, into T."""
    maximum, total, shift = merge_norms(m, s, temperature)
    w = masked_product(shift.exp(), w + s * shift).sum(-1)
    if t is None or share is None:
        return maximum, total, w
    return maximum, total, w, (t + masked_product(share, shift)).sum(-1)


def merge_softmax(stats: Tensor, temperature: Tensor | None, summed: bool = False) -> Softmax:
    """Merges the shards' ``stats [rows, shards, S]``; for use inside a kernel."""
    columns = [stats[..., i] for i in (0, 1, 3, *(4, 5)[: 2 * summed])]
    maximum, total, w, *t = merge_softmax_sums(*columns, temperature=temperature)
    log_sum = total.log()
    # S >= 1 and W <= 0, but a cap may round the maximum and the other logits differently.
    entropy = (log_sum - w / total).clamp_min(0)
    mean_log_p = t[0] - log_sum if summed else None
    picked = stats[..., 4 + 2 * summed :].sum(-2)
    log_p = log_prob(picked, maximum.unsqueeze(-1), log_sum.unsqueeze(-1), temperature)
    return Softmax(maximum, log_sum, log_p, passed_checks(stats[..., 2]), entropy, mean_log_p)


def merge_at_ids(
    stats: Tensor,
    index: Tensor,
    temperature: Tensor | None,
    ignore_index: int | None,
    summed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Merges ``stats [shards, *, S]`` for an operator.

    Returns log p at the ids ``[rows, K]``, 0 where ignored; M, log S, the entropy and, if
    ``summed``, the mean of log p, ``[rows, 3]`` or ``[rows, 4]``; and which checks the rows pass,
    ``[rows, 3]``.
    """
    by_row = ByRow(stats[0])
    args = by_row(index), by_row(temperature), ignore_index, summed
    return _merge_at_ids(stats_per_row(stats), *args)


@merge_kernel
def _merge_at_ids(stats, index, temperature, ignore_index, summed):
    softmax = merge_softmax(stats, temperature, summed)
    log_p = torch.where(not_ignored(index, ignore_index), softmax.log_p, 0)
    merged = [softmax.maximum, softmax.log_sum, softmax.entropy]
    if softmax.mean_log_p is not None:
        merged.append(softmax.mean_log_p)
    return log_p, torch.stack(merged, -1), softmax.passed
