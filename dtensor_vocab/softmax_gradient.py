"""The gradient of functions of the softmax statistics, in one read and one write of the logits.

For coefficients a, b, u and c_k of each row it has the form

    d/dx_v = p_v (a + b log p_v) + u + Σ_k c_k 1[v = index_k]

over the temperature, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtensor_vocab.autograd import empty_grad
from dtensor_vocab.kernel import Rows, blocks, flat, in_blocks, kernel
from dtensor_vocab.rows import (
    least_exponent,
    local_ids,
    log_prob,
    prepare,
    scaled,
    sum_equal,
    without_padding,
)

__all__ = ["Coefficients", "SoftmaxGradient"]


class Coefficients(NamedTuple):
    """What an op's gradient is made of: ``[rows, 1]`` each, ``c`` ``[rows, K]``."""

    a: Tensor
    b: Tensor | None = None
    c: Tensor | None = None
    u: Tensor | None = None
    at_index: tuple[Tensor, Tensor, Tensor] | None = None
    """``a`` and (M, log S) ``[rows, 2]`` of the columns in the index, where they are others, and
    which entries of the index count, ``[rows, K]``."""


class SoftmaxGradient:
    """Makes the gradient of an op from its ``coefficients(saved, index, *values)``.

    These are computed inside of the kernel. With several ids a row, the entries in the columns of
    the ids are made apart and written over the kernel's result, some rows at a time.
    """

    def __init__(self, coefficients: Callable[..., Coefficients]) -> None:
        def at_columns(logits, saved, index, temperature, start, sizes, *values):
            terms = coefficients(saved, index, *values)
            return _at_columns(terms, *flat(logits), saved, temperature, start, sizes)

        def at_ids(logits, saved, index, temperature, start, sizes, *values):
            terms = coefficients(saved, index, *values)
            return _at_ids(index, terms, *flat(logits), saved, temperature, start, sizes)

        def whole(logits, saved, index, *args):
            gradient = at_columns(logits, saved, index, *args)
            if _k(index) != 1:
                return gradient
            column, entry = at_ids(logits, saved, index, *args)
            return gradient.scatter(-1, column.long(), entry)

        def overwrite(logits, saved, *args):
            logits.copy_(at_columns(logits, saved, *args).view(logits.shape))
            return saved  # whatever has rows: a kernel returns something

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
        entries = in_blocks(self._at_ids, by_rows, BLOCK_IDS // k) if k > 0 else None
        self._overwrite(*by_rows)
        if entries is not None:
            _write(by_rows[0], blocks(entries, BLOCK_IDS // k))

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
    log_p = log_prob(x, saved[..., :1], saved[..., 1:2], temperature)
    gradient = _gradient(terms, terms.a, log_p, column, start, sizes)
    return _finish(terms, gradient, saved, temperature, logits.dtype)


def _at_ids(index, terms, logits, saved, temperature, start, sizes) -> tuple[Tensor, Tensor]:
    """The entries in the columns of the ids, and these columns, ``[rows, K]`` both.

    Made apart so that no ``[rows, V_local]`` buffer is needed for them, each is rounded once, and
    equal ids get the same. The id of another shard is clamped to a column of this one, whose entry
    it makes anew, without a ``c`` of its own.
    """
    local, owned = local_ids(index, start, logits.shape[-1])
    x = prepare(logits.gather(-1, local), start, sizes, column=local)
    slope, maximum, log_sum = terms.a, saved[..., :1], saved[..., 1:2]
    c = torch.where(owned, terms.c, 0)
    if terms.at_index is None:
        (c,) = sum_equal(local, c)
    else:
        slope_named, norm, counts = terms.at_index
        c, count = sum_equal(local, c, (owned & counts).to(x.dtype))
        named = count > 0
        slope = torch.where(named, slope_named, slope)
        maximum = torch.where(named, norm[..., :1], maximum)
        log_sum = torch.where(named, norm[..., 1:], log_sum)
    log_p = log_prob(x, maximum, log_sum, temperature)
    gradient = _gradient(terms, slope, log_p, local, start, sizes)
    values = _finish(terms, gradient + c, saved, temperature, logits.dtype)
    return local.to(torch.int32), values


def _gradient(terms, slope, log_p, column, start, sizes) -> Tensor:
    """``p_v (a + b log p_v) + u``, 0 where p_v is exactly 0 and where u meets padding."""
    if terms.b is not None:
        slope = slope + terms.b * log_p
    # Below it p is 0, and the slope may have overflowed. (p == 0 says the same, but then Inductor
    # keeps p apart, in MiBs of scratch at K = 64 ids.)
    gradient = torch.where(log_p < least_exponent(log_p.dtype), 0, log_p.exp() * slope)
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
        slope, norm, _ = terms.at_index
        live, maximum = live | (slope != 0), norm[..., :1]
    gradient = scaled(gradient, temperature)
    return torch.where(live & (maximum != -torch.inf), gradient, 0).to(dtype)
