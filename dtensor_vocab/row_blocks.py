"""Splits the arguments of kernels into rows and blocks of rows, and rows into chunks of columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ALIGNMENT",
    "CHUNK_COLUMNS",
    "ByRow",
    "blocks",
    "chunked",
    "flat",
    "in_blocks",
    "in_chunks",
    "stats_per_row",
    "tokens_by_chunk",
]

BLOCKS_TO_FILL_A_GPU = 256
"""A GPU processes this many blocks of a CPU's cache size at once."""


class ByRow:
    """Views the arguments of a kernel by row: logits ``[*, V]`` as ``[rows, V]`` if strides allow.

    If not, as for ``[B, S + 1, V][:, :-1]``, it merges as many leading dims as a view can, and the
    kernel flattens the rest. An empty shard becomes one column of -inf.
    """

    def __init__(self, *logits: Tensor) -> None:
        self.ndim, self.count = logits[0].dim(), math.prod(logits[0].shape[:-1])
        if logits[0].shape[-1] == 0:
            logits = tuple(x.new_full((*x.shape[:-1], 1), -torch.inf) for x in logits)
        rows = _merged_sizes(logits)
        self.logits = tuple(x.view(*rows, x.shape[-1]) for x in logits)

    def __call__(self, values: Tensor | None) -> Tensor | None:
        """``values [*]`` or ``[*, K]`` as ``[rows, K]``; one value for all rows (0-d) stays one.

        For K = 1 the result is contiguous on CPUs, because each pattern of strides, such as that of
        the gradient of ``sum()``, would compile a kernel. For larger K a copy would take more
        memory, and on GPUs it is one more launch.
        """
        if values is None or (values.dim() == 0 and self.ndim > 1):
            return values
        k = values.shape[-1] if values.dim() == self.ndim else 1
        values = values.reshape(self.count, k)
        return values.contiguous() if k == 1 and values.device.type == "cpu" else values


def _merged_sizes(logits: Sequence[Tensor]) -> list[int]:
    """Sizes of the leading dims after merging those that a view of every tensor can merge."""
    sizes: list[int] = []
    last: tuple[int, ...] = ()
    for dim, size in enumerate(logits[0].shape[:-1]):
        if size == 1:
            continue
        strides = tuple(x.stride(dim) for x in logits)
        if sizes and last == tuple(size * stride for stride in strides):
            sizes[-1] *= size
        else:
            sizes.append(size)
        last = strides
    return sizes or [1]


def flat(*logits: Tensor) -> tuple[Tensor, ...]:
    """``logits [*, V]`` as ``[rows, V]``. In compiled code this copies nothing for any strides."""
    for x in logits:
        _guard_alignment(x)
    # One number of rows for all tensors, since Inductor does not fuse loops of different ones.
    rows = logits[0].shape[:-1].numel()
    return tuple(x.reshape(rows, x.shape[-1]) for x in logits)


ALIGNMENT = 16
"""Triton loads vectors where the size and the strides of rows are multiples of it."""


def _guard_alignment(x: Tensor) -> None:
    """Tells Inductor which sizes and strides are multiples of ``ALIGNMENT``.

    Dynamo guards on the outcome of each comparison, although no code depends on it.
    """
    if x.device.type == "cpu":
        return
    for number in (x.shape[-1], *x.stride()[:-1]):
        if number % ALIGNMENT == 0:
            pass


CHUNK_COLUMNS = 1024
"""Columns that one GPU program processes. Inductor keeps this many in registers, so it reads each
column once and computes one exponential for it."""


def in_chunks(x: Tensor) -> bool:
    """Whether to compute statistics of ``x`` by chunks of columns, which are merged like shards.

    Inductor's Triton code then reads the logits once (seen on torch 2.14.1). On torch 2.13.0 it
    reads the chunks twice and takes more instructions than without chunks.
    """
    return x.device.type != "cpu" and torch.__version__ >= "2.14"


def chunked(x: Tensor, filler: float) -> Tensor:
    """``x [rows, V]`` as ``[rows, chunks, CHUNK_COLUMNS]``, the last padded with ``filler``."""
    chunks = -(-x.shape[-1] // CHUNK_COLUMNS)
    missing = chunks * CHUNK_COLUMNS - x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, missing), value=filler)
    return padded.view(x.shape[0], chunks, CHUNK_COLUMNS)


def tokens_by_chunk(tokens: Tensor, x: Tensor) -> Tensor:
    """How many of the first ``tokens`` columns lie in each chunk of ``x [rows, chunks, C]``:
    ``[chunks, 1]``.
    """
    first = torch.arange(x.shape[-2], device=x.device, dtype=torch.int32) * CHUNK_COLUMNS
    return (tokens - first).clamp(0, CHUNK_COLUMNS).unsqueeze(-1)


def stats_per_row(stats: Tensor) -> Tensor:
    """``stats [shards, *, S]`` as ``[rows, shards, S]``."""
    rows = math.prod(stats.shape[1:-1])
    return stats.reshape(stats.shape[0], rows, stats.shape[-1]).transpose(0, 1)


def in_blocks(fn: Callable[..., Any], args: Sequence[Any], rows: int) -> Any:
    """Runs ``fn`` on blocks of ``rows`` rows, and writes into results that are allocated once."""
    results: tuple[Tensor, ...] = ()
    done, count, several = 0, math.prod(args[0].shape[:-1]), False
    for block in blocks(args, rows):
        parts = fn(*block)
        several = isinstance(parts, tuple)
        parts = parts if several else (parts,)
        if len(parts[0]) == count and all(part.is_contiguous() for part in parts):
            return parts if several else parts[0]
        results = results or tuple(x.new_empty((count, *x.shape[1:])) for x in parts)
        for result, part in zip(results, parts, strict=True):
            result[done : done + len(part)] = part
        done += len(parts[0])
    return results if several else results[0]


def blocks(args: Sequence[Any], rows: int) -> Iterator[tuple[Any, ...]]:
    """Yields a kernel's arguments for ``rows`` rows at a time, which bounds its scratch memory."""
    if args[0].device.type != "cpu":
        rows *= BLOCKS_TO_FILL_A_GPU
    yield from _blocks(args, max(1, rows))


def _blocks(args: Sequence[Any], rows: int) -> Iterator[tuple[Any, ...]]:
    entries, inner = args[0].shape[0], math.prod(args[0].shape[1:-1])
    if inner > rows:
        for entry in range(entries):
            yield from _blocks(_take(args, entry, 1), rows)
        return
    step = rows // inner
    for first in range(0, entries, step):
        yield _take(args, first, min(step, entries - first))


def _take(args: Sequence[Any], first: int, entries: int) -> tuple[Any, ...]:
    """Some entries of the first argument's first dim, and the rows of the others that belong there.

    A single entry of ``[*, rows, V]`` loses that dim.
    """

    def part(arg: Any) -> Any:
        if not isinstance(arg, Tensor) or arg.dim() == 0:
            return arg
        rows = arg.shape[0] // args[0].shape[0]
        if entries == 1 and arg.dim() == args[0].dim() > 2:
            return arg[first]
        return arg[first * rows : (first + entries) * rows]

    return tuple(map(part, args))
