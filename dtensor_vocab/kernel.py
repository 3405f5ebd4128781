"""Runs a pure function of rows as one kernel compiled by Inductor: C++ on CPUs, Triton on GPUs.

Where Inductor cannot generate code (no C++ compiler or no Triton, ``TORCH_COMPILE_DISABLE=1``,
``torch.compiler.set_stance("force_eager")``, no cache directory), the same function runs eagerly on
blocks of rows that fit the cache, with one warning. The environment variable
``DTENSOR_VOCAB_KERNELS=eager`` selects that without the warning; the default is ``inductor``. Every
call reads the variable.
"""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dtensor_vocab._private import (
    alike_to_guards,
    compile_errors,
    compiler_obstacle,
    compiles_nothing_new,
    is_traced_for_a_graph,
    options_that_exist,
)
from dtensor_vocab.row_blocks import ALIGNMENT, in_blocks, in_chunks

__all__ = ["kernel", "merge_kernel"]

EAGER_BLOCK = 1 << 18
"""How many logits the eager fallback processes at once, which take 1 MiB in fp32."""
INDUCTOR_OPTIONS: dict[str, Any] = {"realize_opcount_threshold": 1 << 10}
"""By default Inductor stores long expressions in buffers of the logits' size (two for the terms of
``js_div``, seen on torch 2.11)."""
GPU_OPTIONS: dict[str, Any] = {
    "use_fast_math": True,  # Exponentials then take fewer instructions.
    "reorder_for_locality": False,  # Otherwise kl_div reads its logits once more (torch 2.13).
    "split_reductions": False,  # Otherwise the first call's row count decides for all calls.
    # Otherwise each result that shares no input with the others is a launch, and so is their cat.
    "aggressive_fusion": True,
    "score_fusion_memory_threshold": 0,
    "max_pointwise_cat_inputs": 0,
    "max_complex_pointwise_cat_inputs": 0,
}
ELEMENTWISE_GPU_OPTIONS: dict[str, Any] = {
    "triton.prefer_nd_tiling": True,  # Otherwise threads divide positions by V to find their rows.
}
SEVERAL_ROWS_GPU_OPTIONS: dict[str, Any] = {
    # Otherwise a block of threads takes one row (torch 2.13). Not for chunks, which are then read
    # more than once (torch 2.14).
    "max_autotune_pointwise": True,
}
MANY_ROWS = 1 << 13
"""From this number of rows on, blocks of several rows fill a GPU. There are separate kernels for
fewer rows, because the first call chooses the tile sizes, which suit few rows or many."""

_numbers = itertools.count(1)
"""Line numbers for the code of compiled variants."""
_warned: list[str] = []
"""The reason of the warning that kernels run eagerly, once it has been given."""


def kernel(
    fn: Callable[..., Any], mutates: bool = False, elementwise: bool = False
) -> Callable[..., Any]:
    """Wraps ``fn``, pure tensor code without data-dependent control, to run as one kernel.

    Its first arguments are logits from :class:`~dtensor_vocab.row_blocks.ByRow`, which it flattens
    by :func:`~dtensor_vocab.row_blocks.flat`. All other tensors and the results have the rows as
    their first dim, except for 0-d tensors. A float arrives as a 0-d tensor. A kernel that
    ``mutates`` writes to its first argument. One that is ``elementwise`` has results of the logits'
    shape and reduces nothing.
    """

    def eagerly(*args: Any) -> Any:
        return in_blocks(fn, args, EAGER_BLOCK // args[0].shape[-1])

    return _kernel(fn, eagerly, mutates, elementwise)


def merge_kernel(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Like :func:`kernel`, for a function of ``stats [rows, shards, S]``, which need no blocks."""
    return _kernel(fn, fn, merges=True)


def _kernel(
    fn: Callable[..., Any],
    eagerly: Callable[..., Any],
    mutates: bool = False,
    elementwise: bool = False,
    merges: bool = False,
) -> Callable[..., Any]:
    variants: dict[Any, Callable[..., Any]] = {}

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        args = tuple(_normalize(arg, args[0].device) for arg in args)
        with torch.no_grad(), torch.autocast(args[0].device.type, enabled=False):
            if args[0].numel() == 0:
                return fn(*args)
            if _backend() == "inductor" and not is_traced_for_a_graph():
                many_rows = not merges and _has_many_rows(args[0])
                try:
                    if not _is_lone_row(args[0]):
                        return _run_compiled(fn, variants, args, elementwise, many_rows)
                    twice = tuple(map(_twice, args))
                    results = _run_compiled(fn, variants, twice, elementwise, many_rows)
                    if mutates:
                        args[0].copy_(twice[0][:1])
                    return _first_row(results)
                except NotCompiled as error:
                    _warn_eager(str(error))
            return eagerly(*args)

    return run


def _is_lone_row(first: Tensor) -> bool:
    """Whether a kernel on CPUs has one row. It then runs on two copies of the row.

    Dynamo compiles a separate kernel for a size of 1, which takes seconds and may round
    differently. Two rows share the kernel of any other number. On GPUs, a row is not copied.
    """
    return first.shape[0] == 1 and first.device.type == "cpu"


def _twice(arg: Any) -> Any:
    """``arg [1, *]`` as ``[2, *]``, stats ``[1, shards, S]`` laid out as :func:`stats_per_row`."""
    if not isinstance(arg, Tensor) or arg.dim() == 0:
        return arg
    if arg.dim() == 3:
        return torch.cat([arg.transpose(0, 1)] * 2, 1).transpose(0, 1)
    return torch.cat([arg, arg])


def _first_row(results: Any) -> Any:
    if isinstance(results, Tensor):
        return results[:1].clone()
    return tuple(result[:1].clone() for result in results)


class NotCompiled(Exception):
    """Inductor has no code for this call. The message gives the reason."""


def _run_compiled(
    fn: Callable[..., Any],
    variants: dict[Any, Callable[..., Any]],
    args: tuple[Any, ...],
    elementwise: bool,
    many_rows: bool,
) -> Any:
    """Runs the compiled variant for these arguments, or raises :class:`NotCompiled`."""
    obstacle = compiler_obstacle()
    if obstacle is not None:
        raise NotCompiled(obstacle)
    key = tuple(map(_variant, args)), many_rows
    if key not in variants:
        if compiles_nothing_new():
            raise NotCompiled("torch.compiler.set_stance forbids further compilation")
        options = INDUCTOR_OPTIONS | _gpu_options(args[0], elementwise, many_rows)
        variants[key] = _compile(fn, options_that_exist(options))
    try:
        with alike_to_guards():
            return variants[key](*args)
    except compile_errors() as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]

    def refuse(*_: Any) -> Any:
        raise NotCompiled(reason)

    variants[key] = refuse
    return refuse()


def _has_many_rows(first: Tensor) -> bool:
    return first.device.type != "cpu" and first.shape[:-1].numel() >= MANY_ROWS


def _gpu_options(first: Tensor, elementwise: bool, many_rows: bool) -> dict[str, Any]:
    if first.device.type == "cpu":
        return {}
    if elementwise:
        return GPU_OPTIONS | ELEMENTWISE_GPU_OPTIONS
    several_rows = many_rows and not in_chunks(first)
    return GPU_OPTIONS | (SEVERAL_ROWS_GPU_OPTIONS if several_rows else {})


def _compile(fn: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """``fn`` compiled. The result raises :class:`NotCompiled` where it runs as plain Python.

    ``torch.compile`` may hand its function back at any call, for instance under
    ``torch.compiler.set_stance("force_eager")``. On whole logits that would take many times
    their memory.
    """

    def compiled(*args: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            raise NotCompiled("torch.compile hands them back uncompiled")
        return fn(*args)

    # Dynamo counts recompilations by code object and gives up after a few; some stances mix up the
    # arguments of functions of one file and line. So each variant gets a code object of its own,
    # with the kernel's name and a running number as its line. Logs show both.
    code = compiled.__code__.replace(co_name=fn.__name__, co_firstlineno=next(_numbers))
    compiled.__code__ = code
    return torch.compile(
        compiled, backend="inductor", dynamic=True, fullgraph=True, options=options
    )


def _backend() -> str:
    backend = os.environ.get("DTENSOR_VOCAB_KERNELS", "inductor")
    if backend not in ("inductor", "eager"):
        raise ValueError(f"DTENSOR_VOCAB_KERNELS: expected inductor or eager, got {backend!r}")
    return backend


def _normalize(arg: Any, device: torch.device) -> Any:
    """Converts a list to a tuple, and a float to a 0-d tensor, so that one kernel serves every
    value of an option.
    """
    if type(arg) is float:
        return torch.full((), arg, dtype=torch.float64, device=device)
    if isinstance(arg, list):
        return tuple(arg)
    return arg.detach() if isinstance(arg, Tensor) else arg


def _variant(arg: Any) -> Any:
    """The properties that a compiled kernel specialises on. Dynamo treats 0 and 1 as constants."""
    if isinstance(arg, Tensor):
        sizes = tuple(min(size, 2) for size in arg.shape)
        strides = tuple(min(stride, 2) for stride in arg.stride())
        return arg.dtype, arg.device, sizes, strides, _alignment(arg)
    if isinstance(arg, tuple):
        return tuple(map(_variant, arg))
    return int if type(arg) is int and not 0 <= arg <= 1 else arg


def _alignment(x: Tensor) -> tuple[Any, ...]:
    """Which of the numbers that vector loads on a GPU depend on are multiples of 16."""
    if x.device.type == "cpu" or x.dim() < 2:
        return ()
    offset = x.storage_offset() * x.element_size()
    return tuple(n % ALIGNMENT == 0 for n in (x.shape[-1], *x.stride()[:-1], offset))


def _warn_eager(reason: str) -> None:
    if not _warned:
        _warned.append(reason)
        warnings.warn(
            f"dtensor_vocab: kernels run eagerly, which is several times slower, because {reason}",
            stacklevel=2,
        )
