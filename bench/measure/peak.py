"""The peak of the memory in use during a call, above the memory in use before it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["keep_freed_blocks", "peak_above_inputs", "resident", "return_freed_blocks"]

PROCESS = Path("/proc/self")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def peak_above_inputs(call: Callable[[], object], device: torch.device) -> int:
    """The bytes in use at the peak of ``call``, less those in use before it.

    On a CPU they are the process's resident memory, whose peak Linux records.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    return_freed_blocks()
    (PROCESS / "clear_refs").write_text("5")  # Reset the recorded peak.
    before = resident("VmHWM")
    call()
    return resident("VmHWM") - before


def resident(field: str = "VmRSS") -> int:
    """Bytes of resident memory, ``VmRSS`` now or ``VmHWM`` at the peak."""
    lines = (PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


def return_freed_blocks() -> None:
    """Makes glibc return freed memory to the system, so that resident memory is memory in use.

    Call it before anything is allocated, because blocks freed earlier are reused. It slows
    allocation down: call :func:`keep_freed_blocks` before timing.
    """
    _set_malloc(mmap_from=1 << 16, trim_from=0)


def keep_freed_blocks() -> None:
    """Gives glibc the thresholds that it adapts to after large blocks have been freed."""
    _set_malloc(mmap_from=32 << 20, trim_from=64 << 20)


def _set_malloc(mmap_from: int, trim_from: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, mmap_from)
        libc.mallopt(M_TRIM_THRESHOLD, trim_from)
        libc.malloc_trim(0)
