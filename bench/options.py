"""Types of command-line arguments: what cannot be used is an error before any work."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

__all__ = ["above_zero", "at_least", "writable"]


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """An integer of ``least`` or more, and of ``most`` or less."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least or (most is not None and value > most):
            bounds = f"{least} or more" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"expected an integer, {bounds}, got {text}")
        return value

    return integer


def above_zero(text: str) -> float:
    """A number above 0; it may be infinite."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:  # NaN neither
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def writable(text: str) -> Path:
    """A file that can be written; one that does not exist is not left behind."""
    path = Path(text)
    exists = path.exists()
    try:
        path.open("a").close()
        if not exists:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"expected a file to write, got {text}: {error.strerror}"
        ) from None
    return path
