"""The command line of ``python -m bench``, and the tables that it prints."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import SEPARATING_LINE, tabulate

from bench.measure import first_call, plot
from bench.measure.cases import Group, Run, groups, logits_bytes
from bench.measure.ops import GATHER, NAIVE, OPS, K
from bench.measure.process import MIB, THREADS, BenchError, Result, copy_bandwidth, measure
from bench.options import at_least, writable

__all__ = ["main"]

DTYPES = ("bfloat16", "float16", "float32", "float64")
SHAPES = {
    "cpu": {1: [(2048, 16032)], 2: [(1024, 32064)]},
    "cuda": {1: [(8192, 16032), (8192, 128256)], 2: [(8192, 128256)]},
}
"""Rows and vocabulary, by device and number of ranks."""
FAMILIES = list(dict.fromkeys(op.family for op in OPS.values()))
QUICK_OPS, QUICK_SHAPE = ("logprobs", "kl_div"), (64, 1002)
ROUNDS = 5
"""How many times each run is timed at most."""
TESTS = Path(__file__).parents[2] / "tests"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    gpus = torch.cuda.device_count()
    if options.device == "cuda" and gpus < (options.ranks or 1):
        parser.error(f"--device cuda: torch sees {gpus} GPUs, expected {options.ranks or 1}")
    if options.first_call and options.device == "cuda":
        parser.error("--first-call: times kernels for CPUs, expected --device cpu")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error('--plot: needs matplotlib, install it with pip install -e ".[plot]"')
    print(tabulate(machine(options.device).items(), tablefmt="plain"), flush=True)
    try:
        if options.first_call:
            print(f"\n{first_call.table()}")
            return 0
        if options.plot:
            plot.plot(options.plot, options.device, machine(options.device), options.quick)
            return 0
        return _measure_all(parser, options)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measures time and memory of every op, forward and backward, of naive eager "
        "PyTorch, of the same under torch.compile and, on several ranks, of naive code on gathered "
        "logits and of loss_parallel. On a GPU, the tests that need one run first.",
    )
    add = parser.add_argument
    add("--op", choices=FAMILIES, help="measure only this op, in all its forms")
    add("--rows", type=at_least(1), help="number of rows, in place of that of each case")
    add(
        "--vocab",
        type=at_least(K + 1),
        help=f"vocabulary, in place of that of each case; more than {K}, the ids per row",
    )
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--ranks", type=at_least(1), help="measure on this many ranks only, instead of on 1 and 2")
    add("--device", choices=SHAPES, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--json", type=writable, metavar="FILE", help="also write the results to this file")
    add("--quick", action="store_true", help="measure a few small cases once")
    add(
        "--plot",
        type=writable,
        metavar="FILE.svg",
        help="instead, draw time and memory against the vocabulary",
    )
    add("--first-call", action="store_true", help="instead, time the first calls, which compile")
    return parser


def machine(device: str) -> dict[str, str | int]:
    return {
        "machine": torch.cuda.get_device_name() if device == "cuda" else _cpu_model(),
        "CPU cores": len(os.sched_getaffinity(0)),
        "threads": THREADS,
        "torch": torch.__version__,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine


def _measure_all(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    selected = _selected(options)
    if not selected:
        parser.error(f"--op {options.op}: expected several ranks, got {options.ranks or 1}")
    start, status = time.perf_counter(), 0
    if options.device == "cuda" and not options.quick:
        status = subprocess.run([sys.executable, "-m", "pytest", "-m", "cuda", TESTS]).returncode
    bandwidth = copy_bandwidth(options.device)
    print(f"copy of a large tensor: {bandwidth / 1e9:.1f} GB/s, read and written", flush=True)
    rows: list[list[dict[str, Any]]] = []
    for number, group in enumerate(selected, 1):
        elapsed = time.perf_counter() - start
        print(f"\n[{elapsed:3.0f} s, {number} of {len(selected)}] {group[0].case}", flush=True)
        results = measure(group, options.device, rounds=1 if options.quick else ROUNDS)
        for result in results:
            print(f"    {result}", flush=True)
        rows.append([_row(result, results, bandwidth, options.device) for result in results])
    lines = [line for group in rows for line in (SEPARATING_LINE, *([*r.values()] for r in group))]
    formats = ("", "", "", "", "", ".2f", ".2f", ".1f", ".2f", ".2f")
    table = tabulate(lines[1:], [*rows[0][0]], floatfmt=formats, missingval="-")
    print(f"\n{table}")
    if options.json:
        content = {
            **machine(options.device),
            "copy bandwidth (GB/s)": bandwidth / 1e9,
            "results": [row for group in rows for row in group],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return status


def _selected(options: argparse.Namespace) -> list[Group]:
    counts = [options.ranks] if options.ranks else [1, 2]
    if options.device == "cuda":
        counts = [count for count in counts if count <= torch.cuda.device_count()]
    ops = QUICK_OPS if options.quick else [name for name in FAMILIES if name != "step"]
    ops = [options.op] if options.op else ops
    selected = {}  # An ordered set: the smallest case is the same for all shapes.
    for ranks in counts:
        shapes = [QUICK_SHAPE] if options.quick else SHAPES[options.device][min(ranks, 2)]
        for rows, vocab in shapes:
            size = options.rows or rows, options.vocab or vocab
            for group in groups(*size, options.dtype, ranks):
                if OPS[group[0].case.op].family in ops:
                    selected[group] = None
    if not options.quick:
        return list(selected)
    first: dict[tuple[int, str], Group] = {}  # The first form of each op, in one shape.
    for group in selected:
        case = group[0].case
        same = tuple(run for run in group if run.case == case)
        first.setdefault((case.ranks, OPS[case.op].family), same)
    return list(first.values())


def _row(result: Result, group: Sequence[Result], bandwidth: float, device: str) -> dict[str, Any]:
    """The columns of one line of the table."""
    case = result.run.case
    plain = Run(case, NAIVE if case.ranks == 1 else GATHER)
    naive = next((other for other in group if other.run == plain), None)
    # The time to move what the op must read and write, at the speed of a copy. Ranks on CPUs
    # share that speed.
    floor = OPS[case.op].passes * logits_bytes(case) / bandwidth
    floor /= case.ranks if device == "cuda" else 1
    return {
        "op": case.op,
        "shape": " x ".join(map(str, case.shape)),
        "dtype": case.dtype,
        "ranks": case.ranks,
        "provider": result.run.provider,
        "time (ms)": result.seconds * 1e3,
        "floor (ms)": floor * 1e3 if floor else None,
        "peak (MiB)": result.peak / MIB,
        "floor to time": floor / result.seconds if floor else None,
        "to naive": result.seconds / naive.seconds if naive else None,
    }
