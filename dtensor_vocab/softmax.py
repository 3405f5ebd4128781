"""Softmax statistics: what a shard of the vocabulary tells of its rows, and how shards merge.

Over its own columns, a shard computes for each row, in one read of the logits x,

    m = max x_v,  s = Σ e^(x_v - m),  picked_k = x[index_k]

and where asked for w = Σ e^(x_v - m) (x_v - m) and t = Σ (x_v - m) over its n columns. With
M = max m_r over the shards r, the whole vocabulary has

    S = Σ_r s_r e^(m_r - M),  W = Σ_r e^(m_r - M) (w_r + s_r (m_r - M)),  T = Σ_r t_r + n_r (m_r - M)

so that log p_v = (x_v - M) - log S, the entropy is log S - W / S and the mean of log p_v over the
vocabulary is T / Σ n_r - log S. M and log S are kept apart: their sum would lose the digits of
log S where all logits are large. (The merge is that of online softmax, Milakov and Gimelshein,
https://arxiv.org/abs/1805.02867, with further sums.)

A function of these statistics has a gradient of one form, made in one read and one write:

    d/dx_v = p_v (a + b log p_v) + u + Σ_k c_k 1[v = index_k]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_vocab.kernel import Rows, kernel
from dtensor_vocab.operator import operator
from dtensor_vocab.rows import (
    coverage,
    fault,
    local_ids,
    math_dtype,
    pick,
    prepare,
    rebase,
)

__all__ = ["Softmax", "empty_grad", "merge_softmax", "softmax_grad", "softmax_stats"]


# ---- statistics of a shard


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
    summed: bool,
) -> Tensor:
    """Statistics ``[1, *, S]`` of ``logits [*, V_local]``: m, s, coverage, (w), (t, n), picked.

    ``vocab_start [1]`` is the shard's first column, of ``vocab`` columns in shards of
    ``shard_size``, of which those from ``vocab_size`` on are padding. ``index``, ``[*]`` or
    ``[*, K]``, holds ids of the whole vocabulary.
    """
    stats = _new_stats(logits, index, vocab_start, weighted, summed)
    columns = logits.shape[-1]
    if columns == 0:  # an empty shard reads as one column without mass
        logits = logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    if logits.numel() == 0:
        return stats
    rows = Rows(logits)
    shard = _shard_stats(
        *rows.logits,
        rows(index),
        rows(temperature),
        vocab_start[0],
        columns,
        vocab,
        shard_size,
        vocab_size,
        ignore_index,
        weighted,
        summed,
    )
    return shard.view(stats.shape)


@softmax_stats.register_fake
def _(logits, index, temperature, vocab_start, *args):
    return _new_stats(logits, index, vocab_start, *args[-2:])


def _new_stats(logits, index, vocab_start, weighted, summed) -> Tensor:
    k = 0 if index is None else index.shape[-1] if index.dim() == logits.dim() else 1
    shape = (vocab_start.shape[0], *logits.shape[:-1], 3 + weighted + 2 * summed + k)
    return logits.new_empty(shape, dtype=math_dtype(logits))


@kernel
def _shard_stats(
    logits,
    index,
    temperature,
    start,
    columns,
    vocab,
    shard_size,
    vocab_size,
    ignore_index,
    weighted,
    summed,
):
    padded = vocab_size < vocab
    x = prepare(logits, temperature, start, vocab_size if padded else None)
    maximum = x.amax(-1)
    shifted = rebase(x, maximum.unsqueeze(-1))
    mass = shifted.exp()
    sound = coverage(x, start, columns, vocab, shard_size, index, vocab_size, ignore_index)
    stats = [maximum, mass.sum(-1), sound]
    if weighted:
        stats.append(torch.where(shifted == -torch.inf, 0, mass * shifted).sum(-1))
    if summed:
        tokens = (vocab_size - start).clamp(0, columns)
        column = torch.arange(x.shape[-1], device=x.device, dtype=torch.int32)
        stats.append(torch.where(column < tokens, shifted, 0).sum(-1))
        stats.append(tokens.to(x.dtype).expand(maximum.shape))
    stats = torch.stack(stats, -1)
    return stats if index is None else torch.cat([stats, pick(x, index, start, columns)], -1)


# ---- merge of the shards


class Softmax(NamedTuple):
    """Statistics of rows over the whole vocabulary: ``[rows]``, ``picked`` ``[rows, K]``."""

    maximum: Tensor
    log_sum: Tensor
    picked: Tensor
    fault: Tensor
    entropy: Tensor | None
    mean_log_p: Tensor | None


def merge_softmax(stats: Tensor, weighted: bool = False, summed: bool = False) -> Softmax:
    """Merges the shards' ``stats [rows, shards, S]``; for use inside a kernel."""
    m, s = stats[..., 0], stats[..., 1]
    maximum = m.amax(-1)
    shift = rebase(m, maximum.unsqueeze(-1))  # -inf for a shard without mass
    scale = shift.exp()
    total = (scale * s).sum(-1)
    log_sum = total.log()
    entropy = mean_log_p = None
    if weighted:
        w = torch.where(m == -torch.inf, 0, scale * (stats[..., 3] + s * shift)).sum(-1)
        entropy = (log_sum - w / total).clamp_min(0)
    if summed:
        t, n = stats[..., 3 + weighted], stats[..., 4 + weighted]
        mean_log_p = torch.where(n > 0, t + n * shift, 0).sum(-1) / n.sum(-1) - log_sum
    picked = stats[..., 3 + weighted + 2 * summed :].sum(-2)
    return Softmax(maximum, log_sum, picked, fault(stats[..., 2]), entropy, mean_log_p)


# ---- gradient


def softmax_grad(
    logits: Tensor,
    saved: Tensor,
    temperature: Tensor | None,
    start: Tensor,
    vocab_size: int | None,
    *,
    a: Tensor,
    b: Tensor | None = None,
    u: Tensor | None = None,
    index: Tensor | None = None,
    c: Tensor | None = None,
    a_at_index: Tensor | None = None,
) -> Tensor:
    """``p_v (a + b log p_v) + u + Σ_k c_k 1[v = index_k]`` in the logits' dtype; inside a kernel.

    ``saved [rows, 2+]`` starts with M and log S; ``a``, ``b``, ``u`` and ``a_at_index`` (in place
    of ``a`` for the columns in ``index``) are ``[rows]``, ``c`` is ``[rows, K]``. Rows that are
    wholly -inf and rows whose coefficients are all 0 get 0, whatever they hold.
    """
    maximum, log_sum = saved[..., :1], saved[..., 1:2]
    live = a != 0
    for coefficient in (b, u, a_at_index):
        live = live if coefficient is None else live | (coefficient != 0)
    live = live.unsqueeze(-1)
    if c is not None:
        live = live | (c != 0).any(-1, keepdim=True)
    live = live & (maximum != -torch.inf)

    def finish(x: Tensor, column: Tensor | None, slope: Tensor, extra: Tensor | None) -> Tensor:
        log_p = (x - maximum) - log_sum
        slope = slope.unsqueeze(-1)
        slope = slope if b is None else slope + b.unsqueeze(-1) * log_p
        gradient = torch.where(log_p == -torch.inf, 0, log_p.exp() * slope)
        if u is not None:
            uniform = u.unsqueeze(-1)
            if vocab_size is not None:
                uniform = torch.where(column < vocab_size - start, uniform, 0)
            gradient = gradient + uniform
        if extra is not None:
            gradient = gradient + extra
        if temperature is not None:
            gradient = gradient / temperature.to(gradient.dtype)
        return torch.where(live, gradient, 0).to(logits.dtype)

    x = prepare(logits, temperature, start, vocab_size)
    column = torch.arange(x.shape[-1], device=x.device, dtype=torch.int32)
    gradient = finish(x, column, a, None)
    if index is None or c is None:
        return gradient
    # The few entries at the ids are formed apart and overwritten: nothing of the logits' size is
    # made for them, and they are rounded once. An id of another shard rewrites what is there.
    local, owned = local_ids(index, start, x.shape[-1])
    extra = _sum_equal(local, torch.where(owned, c, 0))
    slope = a if a_at_index is None else a_at_index
    return gradient.scatter(-1, local, finish(x.gather(-1, local), local, slope, extra))


def _sum_equal(keys: Tensor, values: Tensor) -> Tensor:
    """For each of the K entries of a row, the sum of ``values`` over the entries of equal key."""
    if keys.shape[-1] == 1:
        return values
    ordered, order = keys.sort(dim=-1, stable=True)
    sums = torch.nn.functional.pad(values.double().gather(-1, order).cumsum(-1), (1, 0))
    first = torch.searchsorted(ordered, keys)
    last = torch.searchsorted(ordered, keys, right=True)
    return (sums.gather(-1, last) - sums.gather(-1, first)).to(values.dtype)


def empty_grad(logits: Tensor) -> Tensor:
    """The gradient's buffer: contiguous, whatever the strides of the logits."""
    return torch.empty_like(logits, memory_format=torch.contiguous_format)
