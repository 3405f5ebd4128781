"""``LinearLogits`` block by block: the products, and the gradients of the operands.

A block holds some columns of all rows or, if there are more rows than columns, all columns of some
rows. A block of columns is one more shard: its statistics are merged with those of the others.
Blocks of columns give separate parts of the gradient of ``weight``, while that of ``hidden`` is
added up; for blocks of rows it is the reverse. So the sum is the smaller of the two, except where
logits beside ``LinearLogits`` have no view by row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Block",
    "Blocks",
    "LocalLogits",
    "LogitsGradient",
    "empty_gradients",
]

BLOCK_BYTES = 1 << 24
"""The size of a block on CPUs, most of which their cache keeps."""
ALL_BLOCKS_BYTES = 1 << 25
"""The size of all blocks that an operator holds."""
ALIGNMENT = 16
"""Sizes of blocks are multiples of it, if there are several."""


class LocalLogits:
    """A rank's logits ``[*, V_local]``, as a tensor or as operands of a linear layer, by block."""

    def __init__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
        self.x, self.weight, self.bias = x, weight, bias
        self.lead = x.shape[:-1]
        self.rows = math.prod(self.lead)
        self.columns = x.shape[-1] if weight is None else weight.shape[0]
        self.fits = bias is None or bias.shape[0] == self.columns
        self._buffer = x.new_empty(0)
        if weight is not None:
            self.hidden = x.reshape(self.rows, x.shape[-1])

    @property
    def is_linear(self) -> bool:
        return self.weight is not None

    def block(self, at: Block) -> Tensor:
        """Logits ``[rows, columns]``. For operands, the next call overwrites them."""
        if self.weight is None:
            columns = self.x[..., at.columns]
            return columns.reshape(self.rows, columns.shape[-1])[at.rows]
        hidden, weight = self.hidden[at.rows], self.weight[at.columns]
        shape = len(hidden), len(weight)
        if self._buffer.numel() < math.prod(shape):
            self._buffer = hidden.new_empty(math.prod(shape))
        out = self._buffer[: math.prod(shape)].view(shape)
        if self.bias is None:
            return torch.mm(hidden, weight.t(), out=out)
        return torch.addmm(self.bias[at.columns], hidden, weight.t(), out=out)


class Block(NamedTuple):
    """Rows and columns of a rank's logits."""

    rows: slice
    columns: slice
    start: Tensor | None
    """``[1]``, the first column within the whole vocabulary; None is 0."""


class Blocks:
    """The blocks of logits that operators process together. ``buffers`` blocks fit in memory."""

    def __init__(
        self, logits: Sequence[LocalLogits], vocab_start: Tensor | None, buffers: int
    ) -> None:
        first = logits[0]
        self.lead, self.rows, self.columns = first.lead, first.rows, first.columns
        self._start = vocab_start
        given = [side.x for side in logits if not side.is_linear]
        self.by_columns = self.rows <= self.columns or not all(map(_has_flat_view, given))
        itemsize = max(side.x.dtype.itemsize for side in logits)
        self._device = first.x.device
        size = ALL_BLOCKS_BYTES // buffers
        if self._device.type == "cpu":
            size = min(size, BLOCK_BYTES)
        self._bounds = _even_bounds(*self._lengths(), size // itemsize)

    def _lengths(self) -> tuple[int, int]:
        """The lengths of the dim that is divided and of the other one."""
        return (self.columns, self.rows) if self.by_columns else (self.rows, self.columns)

    @property
    def is_empty(self) -> bool:
        return self.rows == 0 or self.columns == 0

    @property
    def several(self) -> bool:
        return len(self._bounds) > 2

    def __iter__(self) -> Iterator[Block]:
        if self.is_empty:
            return
        parts = [slice(*bounds) for bounds in itertools.pairwise(self._bounds)]
        everything = slice(None)
        if not self.by_columns:
            yield from (Block(part, everything, self._start) for part in parts)
        elif not self.several:
            yield Block(everything, everything, self._start)
        else:
            starts = torch.arange(0, self.columns, self._bounds[1], device=self._device)
            starts = starts if self._start is None else starts + self._start
            for i, part in enumerate(parts):
                yield Block(everything, part, starts[i : i + 1])

    def of_rows(self, at: Block, *values: Tensor | None) -> list[Any]:
        """The rows of each ``[*, ...]`` in a block. A 0-d tensor, one value for all, stays."""
        ndim = len(self.lead)

        def part(x: Tensor | None) -> Tensor | None:
            if x is None or (x.dim() == 0 and ndim > 0):
                return x
            return x.reshape(self.rows, *x.shape[ndim:])[at.rows]

        return list(map(part, values))


def _even_bounds(length: int, other: int, size: int) -> list[int]:
    """Bounds of parts of ``length`` of about ``size // other`` each, and of ``ALIGNMENT`` or more.

    A last part of length 1, for which kernels would be compiled again, joins the one before.
    """
    most = max(size // max(other, 1) // ALIGNMENT * ALIGNMENT, ALIGNMENT)
    parts = -(-length // most)
    if parts <= 1:
        return [0, length]
    step = -(-length // parts // ALIGNMENT) * ALIGNMENT
    return [*range(0, length - 1, step), length]


def _has_flat_view(x: Tensor) -> bool:
    """Whether ``x [*, V]`` can be viewed as ``[rows, V]``."""
    try:
        x.view(math.prod(x.shape[:-1]), x.shape[-1])
    except RuntimeError:
        return False
    return True


# ---- gradients of operands


def empty_gradients(operands: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor, ...]:
    """Contiguous buffers for the gradients of the three arguments of :class:`LocalLogits`.

    A gradient that is not needed has no elements, since operators can't return None.
    """
    like = next(x for x in operands if x is not None)

    def buffer(x: Tensor | None, wanted: bool) -> Tensor:
        if x is None or not wanted:
            return like.new_empty((0,) * (like if x is None else x).dim())
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    return tuple(map(buffer, operands, needs))


class LogitsGradient:
    """Collects the gradients of a :class:`LocalLogits` from the gradients of its blocks."""

    def __init__(self, logits: LocalLogits, blocks: Blocks, needs: Sequence[bool]) -> None:
        self._logits = logits
        self.needed = any(needs)
        self.results = empty_gradients((logits.x, logits.weight, logits.bias), needs)
        x, weight, bias = self.results
        self._x = self._weight = self._bias = None
        self._entries: tuple[Tensor, Tensor] | None = None
        if not logits.is_linear:
            self._gradient = x.view(logits.rows, logits.columns) if self.needed else x
            return
        written = not blocks.is_empty
        sum_of_x = blocks.several and blocks.by_columns
        sum_of_weight = blocks.several and not blocks.by_columns
        of_x, of_weight, of_bias = needs
        self._ones = x.new_empty(1, 0)
        self._x = _Products(x.view(logits.hidden.shape), sum_of_x, written) if of_x else None
        self._weight = _Products(weight, sum_of_weight, written) if of_weight else None
        self._bias = _Products(bias.unsqueeze(0), sum_of_weight, written) if of_bias else None

    @property
    def rounds_terms_of_x(self) -> bool:
        """Whether each block's term of the gradient of ``x`` is rounded before it is added."""
        return self._x is not None and self._x.rounds_terms

    def add(self, at: Block, gradient: Tensor) -> None:
        """Adds what follows from the gradient ``[rows, columns]`` of a block."""
        if not self._logits.is_linear:
            self._gradient[at.rows, at.columns] = gradient
            return
        self.add_to_weight(at, gradient)
        self.add_to_x(at, gradient)

    def add_to_weight(self, at: Block, gradient: Tensor) -> None:
        if self._weight is not None:
            self._weight.add((at.columns, ALL), gradient.t(), self._logits.hidden[at.rows])
        if self._bias is not None:
            if self._ones.shape[-1] != len(gradient):
                self._ones = gradient.new_ones(1, len(gradient))
            self._bias.add((ALL, at.columns), self._ones, gradient)

    def add_to_x(self, at: Block, gradient: Tensor, exact: bool = True) -> None:
        """With ``exact=False`` a term that is rounded stays so."""
        weight = self._logits.weight
        if self._x is not None and weight is not None:
            self._x.add((at.rows, ALL), gradient, weight[at.columns], exact)

    def add_entry_to_x(self, at: Block, column: Tensor, entry: Tensor, given: Tensor) -> None:
        """Adds one fp32 entry of the gradient in each row, in a column of the block, to that of
        ``x``. All are ``[rows, 1]``. Rows where ``given`` is false have none in this block.
        """
        if self._entries is None:
            self._entries = torch.zeros_like(entry), torch.zeros_like(column)
        entries, columns = self._entries
        self._entries = (
            torch.where(given, entry, entries),
            torch.where(given, column + at.columns.start, columns),
        )

    def finish(self) -> tuple[Tensor, ...]:
        """The gradients by the three arguments of :class:`LocalLogits`."""
        weight = self._logits.weight
        if self._x is not None and weight is not None and self._entries is not None:
            self._x.add_rows(*self._entries, weight)
        for products in (self._x, self._weight, self._bias):
            if products is not None:
                products.finish()
        return self.results


class _Products:
    """A matrix that is made of products: one for each of its parts, or all added up.

    The sum is in fp32 and rounded once. On CPUs torch has no product of 16-bit matrices with an
    fp32 result (2.11 to 2.14). There each product of bf16 matrices is rounded, and a second product
    gives what was rounded off. A product of fp16 matrices might overflow, so it is one of fp32
    matrices.
    """

    def __init__(self, result: Tensor, added: bool, written: bool) -> None:
        self._result, self._added = result, added
        if not written:
            result.zero_()
        if not added:
            return
        half = result.dtype.itemsize == 2
        self._sum = result.new_zeros(result.shape, dtype=torch.float32 if half else None)
        self._on_cpu = half and result.device.type == "cpu"
        self._term = result[:SUMMED_ROWS].clone() if self.rounds_terms else result

    @property
    def rounds_terms(self) -> bool:
        return self._added and self._on_cpu and self._result.dtype == torch.bfloat16

    def add(self, at: tuple[slice, slice], a: Tensor, b: Tensor, exact: bool = True) -> None:
        if not self._added:
            torch.mm(a, b, out=self._result[at])
        elif self.rounds_terms:
            self._add_rounded(a, b, exact)
        elif self._on_cpu:
            b = b.float()
            for total, some in zip(self._sum.split(SUMMED_ROWS), a.split(SUMMED_ROWS), strict=True):
                total.addmm_(some.float(), b)
        elif a.dtype == self._sum.dtype:
            self._sum.addmm_(a, b)
        else:
            torch.addmm(self._sum, a, b, out_dtype=self._sum.dtype, out=self._sum)

    def _add_rounded(self, a: Tensor, b: Tensor, exact: bool) -> None:
        # What is rounded off the terms of a sum is less for shorter terms.
        length = len(b) if exact else ROUNDED_LENGTH
        for total, some in zip(self._sum.split(SUMMED_ROWS), a.split(SUMMED_ROWS), strict=True):
            term = self._term[: len(some)]
            for x, y in zip(some.split(length, 1), b.split(length), strict=True):
                total.add_(torch.mm(x, y, out=term))
                if exact:
                    total.add_(term.addmm_(x, y, beta=-1))

    def add_rows(self, factors: Tensor, index: Tensor, rows: Tensor) -> None:
        """Adds ``factors [n, 1]`` times the ``rows`` at ``index [n, 1]``."""
        parts = (x.split(SUMMED_ROWS) for x in (self._sum, factors, index.squeeze(-1)))
        for total, factor, i in zip(*parts, strict=True):
            total.addcmul_(factor, rows.index_select(0, i).to(total.dtype))

    def finish(self) -> None:
        if self._added:
            self._result.copy_(self._sum)


ALL = slice(None)
SUMMED_ROWS = 1024
"""How many rows of a rounded product there are at once."""
ROUNDED_LENGTH = 2048
"""How many terms such a product adds up, if its rounding error stays."""
