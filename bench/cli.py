"""The command line of ``python -m bench``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tabulate import tabulate

from bench.cases import Group, groups, quick_groups
from bench.measure import BenchError, Result, copy_bandwidth, measure
from bench.ops import OPS, K
from bench.options import at_least, writable
from bench.report import Report, machine

__all__ = ["main"]

DTYPES = ("bfloat16", "float16", "float32", "float64")
SHAPES = {
    "cpu": {1: [(2048, 16032)], 2: [(1024, 32064)]},
    "cuda": {1: [(8192, 16032), (8192, 128256)], 2: [(8192, 128256)]},
}
"""Rows and vocabulary, by device and number of ranks."""
FAMILIES = list(dict.fromkeys(op.family for op in OPS.values()))
DEFAULT_OPS = [family for family in FAMILIES if family != "step"]
QUICK_OPS = ("logprobs", "kl_div")
QUICK = {1: [(64, 1002)], 2: [(64, 1002)]}
ROUNDS = 5
"""How often each run is timed."""
TESTS = Path(__file__).parents[1] / "tests"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    if options.device == "cuda" and (options.ranks or 1) > torch.cuda.device_count():
        parser.error(f"--ranks {options.ranks}: torch sees {torch.cuda.device_count()} GPUs")
    selected = _selected(options)
    if not selected:
        parser.error(f"--op {options.op}: is measured on several ranks")
    status = 0
    if options.device == "cuda" and not options.quick:
        status = subprocess.run([sys.executable, "-m", "pytest", "-m", "cuda", TESTS]).returncode
    try:
        report = _measured(selected, options.device, rounds=1 if options.quick else ROUNDS)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"\n{report.table()}")
    if not options.quick:
        print(f"\n{report.summary()}")
    if options.json:
        content = {**machine(options.device), **report.content()}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Times every op, forward and backward, and measures its memory, beside naive "
        "eager PyTorch, torch.compile of it and, on several ranks, a gather and loss_parallel. "
        "On a GPU the tests that need one run first.",
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--op", choices=FAMILIES, help="measure one op alone, in all its forms")
    parser.add_argument("--rows", type=at_least(1), help="in place of the rows of each case")
    parser.add_argument(
        "--vocab",
        type=at_least(K + 1),
        help=f"in place of the vocabulary of each case, above {K}, which is how many ids ops pick",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument(
        "--ranks", type=at_least(1), help="this number of processes alone, not 1 and 2"
    )
    parser.add_argument("--device", choices=SHAPES, default=default)
    parser.add_argument("--json", type=writable, metavar="FILE", help="write the results there too")
    parser.add_argument(
        "--quick", action="store_true", help="a few small cases, to see that it works"
    )
    return parser


def _selected(options: argparse.Namespace) -> list[Group]:
    shapes = QUICK if options.quick else SHAPES[options.device]
    make = quick_groups if options.quick else groups
    ops = [options.op] if options.op else QUICK_OPS if options.quick else DEFAULT_OPS
    if options.ranks is not None:
        counts = [options.ranks]
    elif options.device == "cuda":
        counts = [1, 2][: torch.cuda.device_count()]
    else:
        counts = [1, 2]
    selected = {}  # an ordered set: the smallest case is the same for all shapes
    for ranks in counts:
        for rows, vocab in shapes[min(ranks, 2)]:
            size = options.rows or rows, options.vocab or vocab
            for group in make(*size, options.dtype, ranks):
                if OPS[group[0].case.op].family in ops:
                    selected[group] = None
    return list(selected)


def _measured(selected: Sequence[Group], device: str, rounds: int) -> Report:
    start = time.perf_counter()
    print(tabulate(machine(device).items(), tablefmt="plain"), flush=True)
    bandwidth = copy_bandwidth(device)
    print(f"copy of a large tensor: {bandwidth / 1e9:.1f} GB/s, read and written", flush=True)
    results: list[list[Result]] = []
    for number, group in enumerate(selected, 1):
        elapsed = time.perf_counter() - start
        print(f"\n[{elapsed:3.0f} s, {number} of {len(selected)}] {group[0].case}", flush=True)
        results.append(measure(group, device, rounds))
        for result in results[-1]:
            print(f"    {result}", flush=True)
    return Report(results, bandwidth, device)
