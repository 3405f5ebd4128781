"""Runs a pure function of rows as one kernel compiled by Inductor: C++ on CPUs, Triton on GPUs.

Where nothing can be compiled (no C++ compiler or no Triton, ``TORCH_COMPILE_DISABLE=1``) the
same function runs eagerly, on blocks of rows that stay in cache. ``DTENSOR_VOCAB_KERNELS=eager``
in the environment asks for that, ``DTENSOR_VOCAB_KERNELS=inductor`` (the default) does not.
"""

from __future__ import annotations

import functools
import math
import os
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from dtensor_vocab._private import CompileError, compile_is_disabled

__all__ = ["Rows", "blocks", "kernel", "stats_per_row", "take"]

BLOCK_ELEMENTS = 1 << 18
"""How many logits the eager fallback works on at once: 1 MiB of them in fp32."""


def kernel(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``fn``, pure tensor code without data-dependent control, to run as one kernel.

    A function of rows takes and returns tensors that all have the rows as their first dims, 0-d
    tensors apart, and its first argument is the largest.
    """
    variants: dict[Any, Callable[..., Any]] = {}

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        args = tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in args)
        with torch.no_grad(), torch.autocast(args[0].device.type, enabled=False):
            if args[0].numel() == 0:
                return fn(*args)
            key = (torch.is_inference_mode_enabled(), *map(_variant, args))
            if key not in variants:
                variants[key] = _compile(fn)
            try:
                return variants[key](*args)
            except CompileError as error:
                _warn_eager(str(error).strip().partition("\n")[0])
                variants[key] = functools.partial(_in_blocks, fn)
                return variants[key](*args)

    return run


class Rows:
    """Tensors ``[*, V]`` as ``[rows, V]`` where all of their strides allow it: never a copy."""

    def __init__(self, *logits: Tensor) -> None:
        self.ndim = logits[0].dim()
        try:
            self.logits = tuple(x if self.ndim == 2 else x.view(-1, x.shape[-1]) for x in logits)
        except RuntimeError:  # e.g. [B, S + 1, V][:, :-1], which kernels take as it is
            self.logits = logits
        self.shape = self.logits[0].shape[:-1]

    def __call__(self, values: Tensor | None) -> Tensor | None:
        """``values [*]`` or ``[*, K]`` as ``[rows, K]``; one value for all rows (0-d) stays one."""
        if values is None or (values.dim() == 0 and self.ndim > 1):
            return values
        k = values.shape[-1] if values.dim() == self.ndim else 1
        return values.reshape(*self.shape, k)


def stats_per_row(stats: Tensor) -> Tensor:
    """``stats [shards, *, S]`` as ``[rows, shards, S]``."""
    rows = math.prod(stats.shape[1:-1])
    return stats.reshape(stats.shape[0], rows, stats.shape[-1]).transpose(0, 1)


def blocks(x: Tensor, elements: int) -> Iterator[slice]:
    """Slices of the first dim of ``x [rows, ..., n]`` with so many elements each.

    For steps that need scratch of their rows: little of it, so that it stays in a CPU's cache. A
    GPU is given more at once, to be filled.
    """
    elements *= 1 if x.device.type == "cpu" else 256
    step = max(1, elements // max(1, x[0].numel()))
    return (slice(first, first + step) for first in range(0, x.shape[0], step))


def take(args: Iterable[Any], rows: slice | int) -> tuple[Any, ...]:
    """These rows of the tensors among the arguments of a kernel, and the others as they are."""
    return tuple(a[rows] if isinstance(a, Tensor) and a.dim() > 0 else a for a in args)


def _compile(fn: Callable[..., Any]) -> Callable[..., Any]:
    choice = os.environ.get("DTENSOR_VOCAB_KERNELS", "inductor")
    if choice not in ("inductor", "eager"):
        raise ValueError(f"DTENSOR_VOCAB_KERNELS: expected inductor or eager, got {choice!r}")
    if choice == "eager":
        return functools.partial(_in_blocks, fn)
    if compile_is_disabled():
        _warn_eager("torch.compile is disabled")
        return functools.partial(_in_blocks, fn)
    # Dynamo counts recompilations by code object and gives up after a few: one for each variant.
    copy = types.FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, None, fn.__closure__
    )
    return torch.compile(copy, dynamic=True, fullgraph=True)


def _variant(arg: Any) -> Any:
    """What of an argument a compiled kernel is specialised to."""
    if isinstance(arg, Tensor):
        sizes = tuple(min(size, 2) for size in arg.shape)
        strides = tuple(min(stride, 2) for stride in arg.stride())
        return arg.dtype, arg.device, sizes, strides
    return int if type(arg) is int and not 0 <= arg <= 1 else arg


def _warn_eager(reason: str) -> None:
    if not _warned:
        _warned.append(reason)
        warnings.warn(
            f"dtensor_vocab: its kernels run eagerly, several times slower, because {reason}",
            stacklevel=2,
        )


_warned: list[str] = []
"""Why kernels run eagerly, once that has been said."""


def _in_blocks(fn: Callable[..., Any], *args: Any) -> Any:
    rows, width = args[0].shape[0], args[0][0].numel()

    outputs: list[Tensor] = []
    step = max(1, BLOCK_ELEMENTS // width)
    for first in range(0, rows, step):
        if width > BLOCK_ELEMENTS and args[0].dim() > 2:
            block = _in_blocks(fn, *take(args, first))
            block = tuple(b.unsqueeze(0) for b in _as_tuple(block))
        else:
            block = _as_tuple(fn(*take(args, slice(first, first + step))))
        outputs = outputs or [b.new_empty((rows, *b.shape[1:])) for b in block]
        for output, part in zip(outputs, block, strict=True):
            output[first : first + step] = part
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
