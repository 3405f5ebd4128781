"""Softmax statistics: what a shard of the vocabulary tells of its rows, and how shards merge.

Over its own columns, a shard computes for each row, in one read of the logits x,

    m = max x_v,  s = Σ e^(x_v - m),  picked_k = x[index_k]

and where asked for w = Σ e^(x_v - m) (x_v - m) and t = Σ (x_v - m) over its n columns. With a
temperature, each difference of logits is divided by it. With M = max m_r over the shards r, the
whole vocabulary has

    S = Σ_r s_r e^(m_r - M),  W = Σ_r e^(m_r - M) (w_r + s_r (m_r - M)),
    T = Σ_r t_r + n_r (m_r - M)

so that log p_v = (x_v - M) - log S, the entropy is log S - W / S and the mean of log p_v over the
vocabulary is T / Σ n_r - log S. M and log S are kept apart: their sum would lose the digits of
log S where all logits are large. (The merge is that of online softmax, Milakov and Gimelshein,
https://arxiv.org/abs/1805.02867, with further sums.)

A function of these statistics has a gradient of one form, made in one read and one write:

    d/dx_v = p_v (a + b log p_v) + u + Σ_k c_k 1[v = index_k]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtensor_vocab.kernel import Rows, blocks, flat, in_blocks, kernel
from dtensor_vocab.operator import operator
from dtensor_vocab.rows import (
    coverage,
    fault,
    local_ids,
    math_dtype,
    merge_norm,
    pick,
    prepare,
    rebase,
    scaled,
    without_padding,
)

__all__ = [
    "Coefficients",
    "Softmax",
    "SoftmaxGradient",
    "empty_grad",
    "merge_softmax",
    "softmax_stats",
    "sum_equal",
]


# ---- statistics of a shard


@operator("logits, rows, rows, start -> stats")
def softmax_stats(
    logits: Tensor,
    index: Tensor | None,
    temperature: Tensor | None,
    vocab_start: Tensor,
    sizes: Sequence[int],
    ignore_index: int | None,
    weighted: bool = False,
    summed: bool = False,
) -> Tensor:
    """Statistics ``[1, *, S]`` of ``logits [*, V_local]``: m, s, coverage, (w), (t, n), picked.

    ``vocab_start [1]`` is the shard's first column, ``sizes`` a :class:`~dtensor_vocab.rows.Sizes`.
    ``index``, ``[*]`` or ``[*, K]``, holds ids of the whole vocabulary.
    """
    stats = _new_stats(logits, index, vocab_start, weighted, summed)
    rows = Rows(logits)
    if rows.count == 0:
        return stats
    values = rows(index), rows(temperature), vocab_start[0], logits.shape[-1], sizes
    shard = _shard_stats(*rows.logits, *values, ignore_index, weighted, summed)
    return shard.view(stats.shape)


@softmax_stats.register_fake
def _(logits, index, temperature, vocab_start, sizes, ignore_index, weighted=False, summed=False):
    return _new_stats(logits, index, vocab_start, weighted, summed)


def _new_stats(logits, index, vocab_start, weighted, summed) -> Tensor:
    k = 0 if index is None else index.shape[-1] if index.dim() == logits.dim() else 1
    shape = (vocab_start.shape[0], *logits.shape[:-1], 3 + weighted + 2 * summed + k)
    return logits.new_empty(shape, dtype=math_dtype(logits))


@kernel
def _shard_stats(logits, index, temperature, start, columns, sizes, ignore_index, weighted, summed):
    (logits,) = flat(logits)
    x = prepare(logits, start, sizes)
    maximum = x.amax(-1, keepdim=True)
    # Selecting after the sum leaves the form that Inductor makes one pass of on GPUs.
    shifted = scaled(x - maximum, temperature)
    mass = shifted.exp()
    total = torch.where(maximum == -torch.inf, 0, mass.sum(-1, keepdim=True)).squeeze(-1)
    maximum = maximum.squeeze(-1)
    sound = coverage(x, start, columns, sizes, index, ignore_index)
    stats = [maximum, total, sound]
    if weighted:
        stats.append(torch.where(x == -torch.inf, 0, mass * shifted).sum(-1))
    if summed:
        tokens = (sizes[2] - start).clamp(0, columns)
        column = torch.arange(x.shape[-1], device=x.device, dtype=torch.int32)
        shifted = rebase(x, maximum.unsqueeze(-1), temperature)
        stats.append(torch.where(column < tokens, shifted, 0).sum(-1))
        stats.append(tokens.to(x.dtype).expand(maximum.shape))
    stats = torch.stack(stats, -1)
    return stats if index is None else torch.cat([stats, pick(logits, index, start, columns)], -1)


# ---- merge of the shards


class Softmax(NamedTuple):
    """Statistics of rows over the whole vocabulary: ``[rows]``, ``log_p`` ``[rows, K]``."""

    maximum: Tensor
    log_sum: Tensor
    log_p: Tensor
    """At the ids."""
    fault: Tensor
    entropy: Tensor | None
    mean_log_p: Tensor | None


def merge_softmax(
    stats: Tensor, temperature: Tensor | None, weighted: bool = False, summed: bool = False
) -> Softmax:
    """Merges the shards' ``stats [rows, shards, S]``; for use inside a kernel."""
    m, s = stats[..., 0], stats[..., 1]
    maximum, total, shift = merge_norm(m, s, temperature)
    log_sum, entropy, mean_log_p = total.log(), None, None
    if weighted:
        w = torch.where(m == -torch.inf, 0, shift.exp() * (stats[..., 3] + s * shift)).sum(-1)
        entropy = (log_sum - w / total).clamp_min(0)
    if summed:
        t, n = stats[..., 3 + weighted], stats[..., 4 + weighted]
        mean_log_p = torch.where(n > 0, t + n * shift, 0).sum(-1) / n.sum(-1) - log_sum
    picked = stats[..., 3 + weighted + 2 * summed :].sum(-2)
    log_p = scaled(picked - maximum.unsqueeze(-1), temperature) - log_sum.unsqueeze(-1)
    return Softmax(maximum, log_sum, log_p, fault(stats[..., 2]), entropy, mean_log_p)


# ---- gradient


class Coefficients(NamedTuple):
    """What an op's gradient is made of: ``[rows, 1]`` each, ``c`` ``[rows, K]``."""

    a: Tensor
    b: Tensor | None = None
    c: Tensor | None = None
    u: Tensor | None = None
    at_index: tuple[Tensor, Tensor] | None = None
    """``a`` and (M, log S) ``[rows, 2]`` of the columns in the index, where they are others."""


class SoftmaxGradient:
    """``p_v (a + b log p_v) + u + Σ_k c_k 1[v = index_k]`` in one kernel: a read and a write.

    ``coefficients(saved, index, *values)``, an op's part of it, runs inside of the kernel. With
    several ids a row, their entries are written over the kernel's result, some rows at a time.
    """

    def __init__(self, coefficients: Callable[..., Coefficients]) -> None:
        def whole(logits, saved, index, temperature, start, sizes, *values):
            args = logits, saved, index, temperature, start, sizes, *values
            gradient = at_columns(*args)
            if _k(index) != 1:
                return gradient
            column, values = at_ids(*args)
            return gradient.scatter(-1, column.long(), values)

        def overwrite(logits, saved, *args):
            logits.copy_(at_columns(logits, saved, *args).view(logits.shape))
            return saved

        def at_columns(logits, saved, index, temperature, start, sizes, *values):
            terms = coefficients(saved, index, *values)
            return _at_columns(terms, *flat(logits), saved, temperature, start, sizes)

        def at_ids(logits, saved, index, temperature, start, sizes, *values):
            terms = coefficients(saved, index, *values)
            return _at_ids(index, terms, *flat(logits), saved, temperature, start, sizes)

        self._whole, self._at_ids, self._overwrite = map(kernel, (whole, at_ids, overwrite))

    def __call__(self, logits: Tensor, *args: Any) -> Tensor:
        """The gradient of ``logits [*, V_local]``, contiguous, in their dtype.

        ``args`` are ``saved [*, 2+]``, which starts with M and log S, ``index`` or None,
        ``temperature`` or None, ``vocab_start [1]``, ``sizes``, and the values that the
        coefficients take.
        """
        if logits.numel() == 0:
            return empty_grad(logits)
        by_rows = _by_rows(logits, *args)
        gradient = self._whole(*by_rows)
        if _k(by_rows[2]) > 1:
            _write(gradient, self._entries(by_rows))
        return gradient.view(logits.shape)

    def overwrite(self, logits: Tensor, *args: Any) -> None:
        """The same, in place of the logits."""
        if logits.numel() == 0:
            return
        by_rows = _by_rows(logits, *args)
        k = _k(by_rows[2])
        rows = max(1, BLOCK_IDS // max(1, k))
        entries = in_blocks(self._at_ids, by_rows, rows) if k > 0 else ()
        self._overwrite(*by_rows)
        _write(by_rows[0], zip(*(x.split(rows) for x in entries), strict=True))

    def _entries(self, by_rows: list[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """For some rows at a time, the columns of the ids and what is to be there."""
        for block in blocks(by_rows, BLOCK_IDS // _k(by_rows[2])):
            yield self._at_ids(*block)


BLOCK_IDS = 1 << 13
"""How many ids are worked on at once: a dozen tensors of 64 KiB."""


def _k(index: Tensor | None) -> int:
    return 0 if index is None else index.shape[-1]


def _write(x: Tensor, entries: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Writes ``(column, values)``, ``[n, K]`` each, for n rows of ``x [*, V]`` after others.

    (``x.scatter_`` makes an fp32 copy of bf16 on CPUs.)
    """
    first = 0
    for column, values in entries:
        row = torch.arange(first, first + len(column), device=x.device).unsqueeze(-1)
        at = [column.long()]
        for size in reversed(x.shape[:-1]):
            at.insert(0, row % size)
            row = row // size
        x.index_put_(tuple(at), values)
        first += len(column)


def _by_rows(logits, saved, index, temperature, vocab_start, sizes, *values) -> list[Any]:
    rows = Rows(logits)
    by_rows = [rows(value) if isinstance(value, Tensor) else value for value in values]
    args = rows(saved), rows(index), rows(temperature), vocab_start[0], sizes
    return [*rows.logits, *args, *by_rows]


def _at_columns(terms, logits, saved, temperature, start, sizes) -> Tensor:
    x = prepare(logits, start, sizes)
    column = torch.arange(x.shape[-1], device=x.device, dtype=torch.int32)
    log_p = scaled(x - saved[..., :1], temperature) - saved[..., 1:2]
    gradient = _gradient(terms, terms.a, log_p, column, start, sizes)
    return _finish(terms, gradient, saved, temperature, logits.dtype)


def _at_ids(index, terms, logits, saved, temperature, start, sizes) -> tuple[Tensor, Tensor]:
    """The few entries in the columns of the ids, formed apart to overwrite what is there.

    So nothing of the logits' size is made for them, they are rounded once, and equal ids agree.
    An id of another shard stands for the column it is clamped to, without a c of its own.
    """
    local, owned = local_ids(index, start, logits.shape[-1])
    x = prepare(logits.gather(-1, local), start, sizes, column=local)
    slope, maximum, log_sum = terms.a, saved[..., :1], saved[..., 1:2]
    c = torch.where(owned, terms.c, 0)
    if terms.at_index is None:
        (c,) = sum_equal(local, c)
    else:
        c, count = sum_equal(local, c, owned.to(x.dtype))
        named = count > 0
        slope_named, norm = terms.at_index
        slope = torch.where(named, slope_named, slope)
        maximum = torch.where(named, norm[..., :1], maximum)
        log_sum = torch.where(named, norm[..., 1:], log_sum)
    log_p = scaled(x - maximum, temperature) - log_sum
    gradient = _gradient(terms, slope, log_p, local, start, sizes)
    values = _finish(terms, gradient + c, saved, temperature, logits.dtype)
    return local.to(torch.int32), values


def _gradient(terms, slope, log_p, column, start, sizes) -> Tensor:
    """``p_v (a + b log p_v) + u``, 0 where p_v is exactly 0 and where u meets padding."""
    if terms.b is not None:
        slope = slope + terms.b * log_p
    gradient = torch.where(log_p == -torch.inf, 0, log_p.exp() * slope)
    if terms.u is None:
        return gradient
    return gradient + without_padding(terms.u, 0, start, sizes, column)


def _finish(terms, gradient, saved, temperature, dtype) -> Tensor:
    """Scaled and rounded; 0 for rows that are wholly -inf or that nothing is asked of."""
    live, maximum = terms.a != 0, saved[..., :1]
    for coefficient in (terms.b, terms.u):
        live = live if coefficient is None else live | (coefficient != 0)
    if terms.c is not None:
        live = live | (terms.c != 0).any(-1, keepdim=True)
    if terms.at_index is not None:
        slope, norm = terms.at_index
        live, maximum = live | (slope != 0), norm[..., :1]
    if temperature is not None:
        gradient = gradient / temperature.to(gradient.dtype)
    return torch.where(live & (maximum != -torch.inf), gradient, 0).to(dtype)


def sum_equal(keys: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """For each of the K entries of a row, the sums of ``values`` over the entries of equal key."""
    if keys.shape[-1] == 1:
        return values
    ordered, order = keys.sort(dim=-1, stable=True)
    first = torch.searchsorted(ordered, keys)
    last = torch.searchsorted(ordered, keys, right=True)
    sums = []
    for value in values:
        total = torch.nn.functional.pad(value.double().gather(-1, order).cumsum(-1), (1, 0))
        sums.append((total.gather(-1, last) - total.gather(-1, first)).to(value.dtype))
    return tuple(sums)


def empty_grad(logits: Tensor) -> Tensor:
    """The gradient's buffer: contiguous, whatever the strides of the logits."""
    return torch.empty_like(logits, memory_format=torch.contiguous_format)
