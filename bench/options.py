"""Types of command-line arguments, which refuse an unusable value before any work."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

__all__ = ["above_zero", "at_least", "writable"]


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """An integer from ``least`` to ``most``."""

    def integer(text: str) -> int:
        value = int(text) if text.lstrip("-").isdecimal() else None
        if value is None or value < least or (most is not None and value > most):
            bounds = f"{least} or more" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"expected an integer, {bounds}, got {text}")
        return value

    return integer


def above_zero(text: str) -> float:
    """A number above 0, which may be infinite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:  # NaN is not above 0 either
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def writable(text: str) -> Path:
    """A file that can be written. The check does not create the file."""
    path = Path(text)
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        message = f"expected a file to write, got {text}: {error.strerror}"
        raise argparse.ArgumentTypeError(message) from None
    if not existed:
        path.unlink()
    return path
