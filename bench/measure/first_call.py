"""``python -m bench --first-call``: the time that compiling takes, op by op.

Each op runs forward and backward once in each of two new processes. The first starts with an empty
Inductor cache, the second with the cache of the first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

import torch
from tabulate import tabulate

from bench.measure.cases import Case
from bench.measure.inputs import make
from bench.measure.ops import DEFAULT_FORMS, OPS, as_tuple

__all__ = ["measure", "table"]

ROWS, VOCAB = 8, 1000


def table() -> str:
    lines: list[tuple[str | float, ...]] = []
    for name in DEFAULT_FORMS:
        with tempfile.TemporaryDirectory() as cache:
            (cold, kernels), (warm, _) = measure(name, cache), measure(name, cache)
        lines.append((name, kernels, cold, warm))
    lines.append(("all", *map(sum, list(zip(*lines, strict=True))[1:])))
    headers = ["op", "kernels", "empty cache (s)", "warm cache (s)"]
    return tabulate(lines, headers, tablefmt="github", floatfmt=".1f")


def measure(name: str, cache: str) -> tuple[float, int]:
    """The seconds of the first call in a new process, and the number of kernels compiled."""
    command = [sys.executable, "-m", "bench.measure.first_call", name]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds, kernels = json.loads(done.stdout)
    return seconds, kernels


def _call(name: str) -> tuple[float, int]:
    op, case = OPS[name], Case(name, (ROWS, VOCAB), "float32")
    inputs = {key: make(case, key, torch.device("cpu")) for key in op.inputs}
    for key in op.gradients:
        inputs[key].requires_grad_()
    start = time.perf_counter()
    outputs = [out for out in as_tuple(op.ours(**inputs)) if out.requires_grad]
    if outputs:
        torch.autograd.backward([out.sum() for out in outputs])
    seconds = time.perf_counter() - start
    return seconds, torch._dynamo.utils.counters["stats"]["unique_graphs"]


if __name__ == "__main__":
    print(json.dumps(_call(sys.argv[1])))
