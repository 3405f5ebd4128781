"""The highest use of memory during a call, above what is in use before it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

PROCESS = Path("/proc/self")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def peak_above_inputs(call: Callable[[], object], device: torch.device) -> int:
    """Bytes in use at the height of ``call``, less those in use before it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    return_freed_blocks()
    with _resident_peak() as peak:
        call()
    return peak()


def return_freed_blocks() -> None:
    """Has glibc hand freed memory back, now and from now on: resident is then what is in use.

    To be called first of all: blocks that were freed before are used again without that. It slows
    allocation down, so before anything is timed there is ``keep_freed_blocks``.
    """
    _set_malloc(mmap_from=1 << 16, trim_from=0)


def keep_freed_blocks() -> None:
    """What glibc comes to by itself, in a process that has freed large blocks."""
    _set_malloc(mmap_from=32 << 20, trim_from=64 << 20)


def _set_malloc(mmap_from: int, trim_from: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, mmap_from)
        libc.mallopt(M_TRIM_THRESHOLD, trim_from)
        libc.malloc_trim(0)


@contextlib.contextmanager
def _resident_peak() -> Iterator[Callable[[], int]]:
    """Yields what tells the growth of resident memory to its peak, once the block has ended."""
    try:
        (PROCESS / "clear_refs").write_text("5")  # the peak starts anew from here
    except OSError:
        with _sampled_peak() as peak:
            yield peak
        return
    before = _status("VmHWM")
    yield lambda: _status("VmHWM") - before


@contextlib.contextmanager
def _sampled_peak() -> Iterator[Callable[[], int]]:
    """The same where the kernel does not let its record be reset: by looking every 0.2 ms."""
    before = highest = _status("VmRSS")
    done = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.is_set():
            highest = max(highest, _status("VmRSS"))
            time.sleep(2e-4)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: highest - before
    finally:
        done.set()
        watcher.join()


def _status(field: str) -> int:
    lines = (PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))
