"""Hundreds of steps of changing shapes give right results and leave no memory behind."""

from __future__ import annotations

import gc
import math
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Shard

from bench.measure.peak import resident, return_freed_blocks
from tests.ops import Layout, check, draw, named

STEPS, WARM_UP = 150, 50
VOCAB = 32003
LEAST_ROWS = 4


def in_use() -> int:
    gc.collect()
    return_freed_blocks()
    return resident()


@pytest.mark.ranks(4)
def test_soak_of_ranks(eager_kernels: None) -> None:
    """In some steps there are no rows, or the first data-parallel rank has only ignored ids."""
    soak(Layout((2, 2), (Shard(0), Shard(-1))))


def test_soak_of_compiled_kernels() -> None:
    soak(None)


def soak(layout: Layout | None) -> None:
    (logprobs, _), (entropy,), (kl_div, _) = map(named, ("logprobs", "entropy", "kl_div"))
    generator = torch.Generator().manual_seed(0)
    steps_with_rows = 0
    for step in range(STEPS):
        if step == WARM_UP:
            before, steps_with_rows = in_use(), 0
        rows, k = (int(torch.randint(most, (), generator=generator)) for most in (8, 6))
        rows += (LEAST_ROWS - 1) * (rows > 0)
        steps_with_rows += rows > 0
        op = (entropy, kl_div)[step % 2] if step % 10 > 7 else logprobs
        if op is logprobs and k > 1:
            op = replace(op, ids=(k,))
        inputs = draw(op, (rows,), vocab=VOCAB, seed=step)
        if op.ids_name and step % 3 == 0:
            inputs[op.ids_name][: -(-rows // 2)] = -100  # The first rank has only ignored ids.
        check(op, inputs, layout)
    # If steps kept their local logits, memory would grow by at least twice this limit.
    ranks = 1 if layout is None else math.prod(layout.mesh)
    grown = in_use() - before
    assert grown < steps_with_rows * LEAST_ROWS * VOCAB * 4 / ranks / 2
