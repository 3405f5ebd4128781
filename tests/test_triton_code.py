"""How Inductor's Triton code accesses the logits (by :mod:`tests.triton_code`, without a GPU)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops import Op

pytest.importorskip("triton")

from tests.triton_code import BLOCKS, LINEAR, SHARDED, TESTED

CHUNKED = torch.__version__ >= "2.14"
"""Whether statistics are computed per chunk of columns, which Inductor keeps in registers.

On older torch a second loop reads each row again, partly from the GPU's cache.
"""
VECTORS = torch.__version__ >= "2.13"
"""Whether Inductor infers from guards that rows are aligned. On torch 2.11 it does not."""
# torch 2.11 cannot run addmm with out_dtype on fake tensors.
LOOKED_AT = [*TESTED, *([LINEAR] if torch.__version__ >= "2.13" else [])]
READS = {
    "kl_div": 2 if CHUNKED else 4,
    # Both inputs are read for their norms, then again for the terms.
    "js_div": 4 if CHUNKED else 6,
    "argmax": 1,
    # The softmax reads the logits, then the search reads them again.
    "topk_logprobs": 3 if CHUNKED else 4,
}
"""Forward reads of all logits, by op name; other ops have ``SOFTMAX_READS``."""
SOFTMAX_READS = 1 if CHUNKED else 2
"""Forward reads of all logits by an op that computes one softmax."""
LAUNCHES = {"logprobs": (8, 2), "topk_logprobs(k=3)": (14, 6)}
"""The largest number of kernels that a call may launch, forward and backward."""


@pytest.fixture(scope="module")
def reports() -> dict[str, list[dict[str, Any]]]:
    """Returns each op's report of a call with plain tensors, and for some also with DTensors."""
    root = Path(__file__).parents[1]
    ops = map(str, LOOKED_AT)
    command = [sys.executable, "-W", "ignore", "-m", "tests.triton_code", *ops]
    env = {**os.environ, "PYTHONPATH": str(root)}
    result = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    found: dict[str, list[dict[str, Any]]] = {}
    for report in lines:
        found.setdefault(report["op"], []).append(report)
    return found


@pytest.mark.parametrize("op", TESTED, ids=str)
def test_kernels_load_vectors_and_store_only_gradients(
    op: Op, reports: dict[str, list[dict[str, Any]]]
) -> None:
    plain = reports[str(op)][0]
    assert plain["kernels"]
    for kernel in plain["kernels"]:
        assert kernel["spilled"] == 0
        searches = op.name == "topk_logprobs" and kernel["forward"]
        assert kernel["widest"] >= 8 or searches or not VECTORS
    forward = [kernel for kernel in plain["kernels"] if kernel["forward"]]
    backward = [kernel for kernel in plain["kernels"] if not kernel["forward"]]
    assert sum(kernel["stores"] for kernel in forward) == 0
    assert sum(kernel["loads"] for kernel in forward) <= READS.get(op.name, SOFTMAX_READS)
    if not op.constant:
        assert [kernel["loads"] for kernel in backward] == [len(op.logits)]
        assert [kernel["stores"] for kernel in backward] == [len(op.logits)]


@pytest.mark.skipif(LINEAR not in LOOKED_AT, reason="needs torch 2.13")
def test_blocks_of_linear_logits_are_read_like_logits(
    reports: dict[str, list[dict[str, Any]]],
) -> None:
    """Only products, the ops' kernels and the entries at the ids access a block."""
    plain = reports[str(LINEAR)][0]
    forward = [kernel for kernel in plain["kernels"] if kernel["forward"]]
    backward = [kernel for kernel in plain["kernels"] if not kernel["forward"]]
    assert [(kernel["loads"], kernel["stores"]) for kernel in backward] == [(1, 1)] * BLOCKS
    assert len(forward) == BLOCKS
    assert all(kernel["loads"] <= SOFTMAX_READS and not kernel["stores"] for kernel in forward)
    for kernel in plain["kernels"]:
        assert kernel["spilled"] == 0
        assert kernel["widest"] >= 8 or not VECTORS
    on_rows = {"_assert_async", "all", "arange", "copy_", "new_ones", "new_zeros"}
    assert {*plain["operators"]} <= on_rows | {"addmm", "mm", "scatter_"}


@pytest.mark.parametrize("op", LOOKED_AT, ids=str)
def test_second_call_compiles_nothing(op: Op, reports: dict[str, list[dict[str, Any]]]) -> None:
    """During both calls a mode raises on waits for the device and on copies from the host."""
    assert len(reports[str(op)]) == 1 + (op in SHARDED)
    for report in reports[str(op)]:
        assert report["compiled by the second call"] == 0
        forward, backward = report["launches"]
        assert forward > 0 and (backward > 0 or op.constant)


@pytest.mark.parametrize("op", LAUNCHES)
def test_calls_launch_few_kernels(op: str, reports: dict[str, list[dict[str, Any]]]) -> None:
    plain, limits = reports[op][0], LAUNCHES[op]
    assert all(n <= limit for n, limit in zip(plain["launches"], limits, strict=True))
