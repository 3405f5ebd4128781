"""Softmax statistics: what a shard of the vocabulary tells of its rows, and how shards merge.

Over its own columns, a shard computes for each row, in one read of the logits x,

    m = max x_v,  s = Σ e^(x_v - m),  w = Σ e^(x_v - m) (x_v - m),  picked_k = x[index_k]

and with M = max m_r over the shards r, the whole vocabulary has

    S = Σ_r s_r e^(m_r - M),  W = Σ_r e^(m_r - M) (w_r + s_r (m_r - M))

so that log p_v = (x_v - M) - log S and the entropy is log S - W / S. M and log S are kept apart:
their sum would lose the digits of log S where all logits are large. (The merge is that of online
softmax, Milakov and Gimelshein, https://arxiv.org/abs/1805.02867, with a weighted sum added.)

A function of these statistics has a gradient of one form, made in one read and one write:

    d/dx_v = p_v (a + b log p_v) + Σ_k c_k 1[v = index_k]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_vocab.kernel import as_rows, kernel, per_row
from dtensor_vocab.operator import operator
from dtensor_vocab.rows import coverage, fault, local_ids, math_dtype, pick, prepare, rebase

__all__ = ["Softmax", "merge_softmax", "softmax_grad", "softmax_stats"]


# ------------------------------------------------------------------ statistics of a shard


@operator("logits, rows, rows, start -> stats")
def softmax_stats(
    logits: Tensor,
    index: Tensor | None,
    temperature: Tensor | None,
    vocab_start: Tensor,
    vocab: int,
    shard_size: int,
    vocab_size: int,
    ignore_index: int | None,
    weighted: bool,
) -> Tensor:
    """Statistics ``[1, *, S]`` of a shard ``logits [*, V_local]``: m, s, coverage, (w), picked.

    ``vocab_start [1]`` is the shard's first column, of ``vocab`` in shards of ``shard_size``;
    columns from ``vocab_size`` on are padding. ``index [*]`` or ``[*, K]`` holds global ids.
    """
    columns = logits.shape[-1]
    stats = _empty_stats(logits, index, vocab_start, weighted)
    if stats.numel() == 0:
        return stats
    if columns == 0:  # an empty shard reads as one column without mass
        logits = logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    rows = _shard_stats(
        as_rows(logits),
        None if index is None else per_row(index, logits),
        None if temperature is None else per_row(temperature, logits),
        vocab_start[0],
        columns,
        vocab,
        shard_size,
        vocab_size,
        ignore_index,
        weighted,
        vocab_size < vocab,
    )
    return rows.view(stats.shape)


@softmax_stats.register_fake
def _(logits, index, temperature, vocab_start, vocab, shard_size, vocab_size, ignore_index, weighted):
    return _empty_stats(logits, index, vocab_start, weighted)


def _empty_stats(logits: Tensor, index: Tensor | None, start: Tensor, weighted: bool) -> Tensor:
    k = 0 if index is None else index.shape[-1] if index.dim() == logits.dim() else 1
    shape = (start.shape[0], *logits.shape[:-1], 3 + weighted + k)
    return logits.new_empty(shape, dtype=math_dtype(logits.dtype))


@kernel
def _shard_stats(
    logits, index, temperature, start, columns, vocab, shard_size, vocab_size, ignore_index, weighted, padded
):
    x = prepare(logits, temperature, start, vocab_size if padded else None)
    maximum = x.amax(-1)
    shifted = rebase(x, maximum.unsqueeze(-1))
    mass = shifted.exp()
    sound = coverage(x, start, columns, vocab, shard_size, index, vocab_size, ignore_index)
    stats = [maximum, mass.sum(-1), sound]
    if weighted:
        stats.append(torch.where(shifted == -torch.inf, 0, mass * shifted).sum(-1))
    stats = torch.stack(stats, -1)
    return stats if index is None else torch.cat([stats, pick(x, index, start, columns)], -1)


# ------------------------------------------------------------------ merge of the shards


class Softmax(NamedTuple):
    """Statistics of rows over the whole vocabulary: ``[rows]``, ``picked [rows, K]``."""

    maximum: Tensor
    log_sum: Tensor
    entropy: Tensor | None
    picked: Tensor
    fault: Tensor


def merge_softmax(stats: Tensor, weighted: bool) -> Softmax:
    """Merges ``stats [rows, shards, S]`` of the shards; for use inside a kernel."""
    m, s = stats[..., 0], stats[..., 1]
    maximum = m.amax(-1)
    shift = rebase(m, maximum.unsqueeze(-1))
    scale = shift.exp()
    total = (scale * s).sum(-1)
    log_sum = total.log()
    entropy = None
    if weighted:
        # a shard without mass has shift -inf and weights 0
        w = torch.where(m == -torch.inf, 0, scale * (stats[..., 3] + s * shift)).sum(-1)
        entropy = (log_sum - w / total).clamp_min(0)
    picked = stats[..., 3 + weighted :].sum(-2)
    return Softmax(maximum, log_sum, entropy, picked, fault(stats[..., 2]))


# ------------------------------------------------------------------ gradient


def softmax_grad(
    logits: Tensor,
    maximum: Tensor,
    log_sum: Tensor,
    a: Tensor,
    b: Tensor | None,
    index: Tensor | None,
    c: Tensor | None,
    temperature: Tensor | None,
    start: Tensor,
    vocab_size: int | None,
) -> Tensor:
    """``p_v (a + b log p_v) + Σ_k c_k 1[v = index_k]``, in the logits' dtype; inside a kernel.

    ``a``, ``b`` are ``[rows]``, ``c`` is ``[rows, K]``. Rows that are wholly -inf, or whose
    coefficients are all 0, get 0 whatever they hold.
    """
    live = a != 0
    if b is not None:
        live = live | (b != 0)
    if c is not None:
        live = live | (c != 0).any(-1)
    live = (live & (maximum != -torch.inf)).unsqueeze(-1)

    def smooth(x: Tensor) -> Tensor:
        log_p = (x - maximum.unsqueeze(-1)) - log_sum.unsqueeze(-1)
        slope = a.unsqueeze(-1) if b is None else a.unsqueeze(-1) + b.unsqueeze(-1) * log_p
        return torch.where(log_p == -torch.inf, 0, log_p.exp() * slope)

    def finish(gradient: Tensor) -> Tensor:
        if temperature is not None:
            gradient = gradient / temperature.to(gradient.dtype)
        return torch.where(live, gradient, 0).to(logits.dtype)

    x = prepare(logits, temperature, start, vocab_size)
    gradient = finish(smooth(x))
    if index is None:
        return gradient
    # The few entries at the ids are computed apart and overwritten: nothing of the logits' size
    # is made for them, and they are rounded once. An id of another shard rewrites what is there.
    local, owned = local_ids(index, start, x.shape[-1])
    at_ids = smooth(x.gather(-1, local)) + _sum_equal(local, torch.where(owned, c, 0))
    return gradient.scatter(-1, local, finish(at_ids))


def _sum_equal(keys: Tensor, values: Tensor) -> Tensor:
    """For each of the K entries of a row, the sum of ``values`` over the entries of equal key."""
    if keys.shape[-1] == 1:
        return values
    ordered, order = keys.sort(dim=-1, stable=True)
    sums = values.double().gather(-1, order).cumsum(-1)
    sums = torch.nn.functional.pad(sums, (1, 0))
    first = torch.searchsorted(ordered, keys)
    last = torch.searchsorted(ordered, keys, right=True)
    return (sums.gather(-1, last) - sums.gather(-1, first)).to(values.dtype)
