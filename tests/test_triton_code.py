"""What Inductor's Triton code does to the logits, seen without a GPU (:mod:`tests.triton_code`)."""

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

from tests.triton_code import SHARDED, TESTED

CHUNKED = torch.__version__ >= "2.14"
"""Statistics are of chunks of columns there, which Inductor keeps in registers. Before, a second
loop reads the row again, of which the GPU's cache has a part."""
VECTORS = torch.__version__ >= "2.13"
"""On torch 2.11 Inductor does not learn from guards that rows are aligned."""
READS = {
    "kl_div": 2 if CHUNKED else 5,
    # The norms of either side, then the terms of both.
    "js_div": 4 if CHUNKED else 6,
    "argmax": 1,
    # The softmax, then the search.
    "topk_logprobs": 3 if CHUNKED else 4,
}
"""Of all logits forward, by name, where it is not that of one softmax."""
SOFTMAX_READS = 1 if CHUNKED else 2
LAUNCHES = {"logprobs": (8, 2), "topk_logprobs(k=3)": (14, 6)}
"""The most kernels that a call launches, forward and backward."""


@pytest.fixture(scope="module")
def reports() -> dict[str, list[dict[str, Any]]]:
    """For each op what a call with plain tensors launches, for some also one with DTensors."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-W", "ignore", "-m", "tests.triton_code", *map(str, TESTED)]
    env = {**os.environ, "PYTHONPATH": str(root)}
    result = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    found: dict[str, list[dict[str, Any]]] = {}
    for report in lines:
        found.setdefault(report["op"], []).append(report)
    return found


@pytest.mark.parametrize("op", TESTED, ids=str)
def test_kernels_read_vectors_and_write_gradients_alone(
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


@pytest.mark.parametrize("op", TESTED, ids=str)
def test_second_call_compiles_nothing(op: Op, reports: dict[str, list[dict[str, Any]]]) -> None:
    """Both calls run under a mode that refuses waits for the device and copies from the host."""
    assert len(reports[str(op)]) == 1 + (op in SHARDED)
    for report in reports[str(op)]:
        assert report["compiled by the second call"] == 0
        forward, backward = report["launches"]
        assert forward > 0 and (backward > 0 or op.constant)


@pytest.mark.parametrize("op", LAUNCHES)
def test_calls_launch_few_kernels(op: str, reports: dict[str, list[dict[str, Any]]]) -> None:
    plain, limits = reports[op][0], LAUNCHES[op]
    assert all(n <= limit for n, limit in zip(plain["launches"], limits, strict=True))
