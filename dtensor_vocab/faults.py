"""Detects invalid values on the device: each shard flags them, all ranks assert after the gather.

A shard marks a faulty row in its *coverage*, one number per row that travels with the statistics.
After the collective every rank therefore finds the same faults and raises the same error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_vocab._private import assert_async
from dtensor_vocab.ids import not_ignored
from dtensor_vocab.numerics import columns_before

__all__ = ["NUM_CHECKS", "assert_no_faults", "coverage", "coverage_of_shard", "passed_checks"]


def coverage(
    x: Tensor,
    index: Tensor | None,
    temperature: Tensor | None,
    start: Tensor | int,
    width: int,
    sizes: Sequence[int],
    ignore_index: int | None = None,
) -> Tensor:
    """For each row of ``x``, the global number of columns, or the fault that this shard finds.

    If all shards report the same number of columns, and each has the ``width`` that torch.chunk
    gives it, together they cover the vocabulary exactly once. A fault replaces the number: NaN if
    this shard's width is wrong, -inf if an id of the row is out of range, and +inf if the row's
    temperature is not a positive normal number in the dtype of the math.
    """
    number = _columns_if_fitting(x, start, width, sizes).expand(x.shape[:-1])
    if index is not None:
        in_range = (index >= 0) & (index < sizes[2])
        bad = not_ignored(index, ignore_index) & ~in_range
        number = torch.where(bad.any(-1), -torch.inf, number)
    if temperature is not None:
        limits, value = torch.finfo(x.dtype), temperature.to(x.dtype)
        bad = ~((value >= limits.tiny) & (value <= limits.max))
        number = torch.where(bad.any(-1) if bad.dim() else bad, torch.inf, number)
    return number


def coverage_of_shard(
    covered: Tensor, start: Tensor | int, width: int, sizes: Sequence[int]
) -> Tensor:
    """The ``coverage`` of a shard from that of any of its blocks, which find the same faults in ids
    and temperatures. Only the whole shard has the width that torch.chunk gives.
    """
    number = _columns_if_fitting(covered, start, width, sizes)
    return torch.where(covered.abs() == torch.inf, covered, number)


def _columns_if_fitting(x: Tensor, start: Tensor | int, width: int, sizes: Sequence[int]) -> Tensor:
    columns, shard_size, _ = sizes
    expected = columns_before(columns, start, shard_size, x.device)
    return torch.where(expected == width, x.new_full((), columns), torch.nan)


NUM_CHECKS = 3
"""The number of checks in the result of :func:`passed_checks`."""


def passed_checks(covered: Tensor) -> Tensor:
    """Which checks each row passes by the ``coverage [rows, shards]``: a mask ``[rows, 3]``.

    Its columns are ids in range, shards that fit together, and a temperature in range.
    """
    bad_id = (covered == -torch.inf).any(-1)
    bad_temperature = (covered == torch.inf).any(-1)
    misfit = (covered != covered[..., :1]).any(-1) & ~bad_id & ~bad_temperature
    return torch.stack([~bad_id, ~misfit, ~bad_temperature], -1)


def assert_no_faults(
    function: str,
    passed: Tensor,
    tempered: bool = False,
    vocab_size: int | None = None,
    ignore_index: int | None = None,
) -> None:
    """Asserts on the device, without a host sync, that all rows have ``passed [*, 3]``.

    ``tempered`` tells whether the rows have a temperature. Ops that take ids give ``vocab_size``.
    """
    ids_in_range, fit, temperatures_valid = passed.flatten(0, -2).all(0).unbind()
    if vocab_size is not None:
        ignored = "" if ignore_index is None else f" or id == ignore_index ({ignore_index})"
        assert_async(
            ids_in_range,
            f"{function}: expected ids in the range 0 <= id < {vocab_size}{ignored}, "
            "got one out of range on at least one rank",
        )
    if tempered:
        assert_async(
            temperatures_valid,
            f"{function}: expected 0 < temperature < inf in every row, got another value on "
            "at least one rank",
        )
    assert_async(
        fit,
        f"{function}: expected each rank to hold the torch.chunk share of the same V columns, "
        "got shards that do not fit together; if they are uneven, DTensor.from_local needs the "
        "global shape= and stride=",
    )
