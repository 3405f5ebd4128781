"""``python -m bench.first_call``: what compiling costs, op by op.

Each op runs forward and backward once in a process of its own, first with an empty Inductor cache,
then with the cache that this left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
from tabulate import tabulate

from bench.cases import Case
from bench.inputs import make
from bench.ops import DEFAULT_FORMS, OPS, as_tuple
from bench.report import machine

ROWS, VOCAB = 8, 1000


def first_call(name: str) -> tuple[float, int]:
    """Seconds of the first forward and backward in this process, and the kernels compiled."""
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


def measure(name: str, cache: str) -> tuple[float, int]:
    """:func:`first_call` in a new process that uses this Inductor cache."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.first_call", "--here", name],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, kernels = json.loads(done.stdout)
    return seconds, kernels


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.first_call", description=__doc__)
    parser.add_argument("--here", choices=DEFAULT_FORMS, help="time one op in this process")
    name = parser.parse_args().here
    if name is not None:
        print(json.dumps(first_call(name)))
        return
    lines = []
    for name in DEFAULT_FORMS:
        with tempfile.TemporaryDirectory() as cache:
            cold, kernels = measure(name, cache)
            warm, _ = measure(name, cache)
        lines.append((name, kernels, cold, warm))
    lines.append(("all", *(sum(column) for column in list(zip(*lines, strict=True))[1:])))
    print(tabulate(machine("cpu").items(), tablefmt="plain"))
    headers = ["op", "kernels", "empty cache (s)", "warm cache (s)"]
    print(f"\n{tabulate(lines, headers, tablefmt='github', floatfmt='.1f')}")


if __name__ == "__main__":
    main()
