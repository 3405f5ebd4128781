"""How many threads a process of the bench computes with."""

from __future__ import annotations

import os

__all__ = ["stated_threads", "threads"]


def threads(ranks: int = 1) -> int:
    """What ``OMP_NUM_THREADS`` states; without it, one for each core that a rank has."""
    return stated_threads() or max(1, len(os.sched_getaffinity(0)) // ranks)


def stated_threads() -> int | None:
    """The first number of ``OMP_NUM_THREADS``, which may be a list by nesting level."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) or None if first.isdecimal() else None
