"""Gumbel noise that is a function of a seed, a row and a column, from a counter-based generator.

The generator is SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators,
https://doi.org/10.1145/2660193.2660195, with the mixing constants of Stafford's variant 13). Its
i-th number is mix(s + i γ) for a state s. Here each row has a state of its own, which is the number
of the row from the state mix(seed + γ), and column v takes the number v + 1 from the row's state.

Arithmetic in int64 wraps around, as that of the unsigned integers of the source does.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gumbel", "row_states"]

GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
FACTORS = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def row_states(row: Tensor, seed: Tensor) -> Tensor:
    """The state of each row: int64, like ``row``."""
    return _mix(_mix(seed + GAMMA) + (row + 1) * GAMMA)


def gumbel(state: Tensor, column: Tensor) -> Tensor:
    """Gumbel noise -log(-log(1 - u)) in fp32, of rows by their state and of columns, int64.

    Large noise comes from a small u, which keeps the 24 digits of fp32 down to 2⁻⁶⁴.
    """
    # Inductor takes a product of a constant and an arange for an index, whose constants overflow.
    # It does not know that this value is constant.
    gamma = (state & 0) | GAMMA
    bits = _mix(state + (column + 1) * gamma)
    u = (_shifted(bits, 1).to(torch.float32) + 0.5) * 2.0**-63
    u = u.clamp_max(1 - 2.0**-24)
    return -(-torch.log1p(-u)).log()


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * FACTORS[0]
    z = (z ^ _shifted(z, 27)) * FACTORS[1]
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """``z >> bits`` of unsigned integers."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
