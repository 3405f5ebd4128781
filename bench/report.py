"""What is printed: the machine, a table of all results, and the ratios that they come down to."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import SEPARATING_LINE, tabulate

from bench.cases import SMALL, Case, Run
from bench.measure import Result
from bench.ops import COMPILED, GATHER, IN_PLACE, LOSS_PARALLEL, NAIVE, OPS, OURS
from bench.threads import stated_threads

__all__ = ["Report", "gradient_bytes", "machine"]

MIB = 1 << 20
TO_NAIVE = {
    "logprobs": 0.28,
    "entropy": 0.15,
    "kl_div": 0.15,
    "kl_div, reverse": 0.15,
    "cross_entropy": 0.30,
    "js_div": 0.25,
}
"""What is aimed at, as a ratio of times to naive eager code."""


def machine(device: str) -> dict[str, str | int]:
    return {
        "machine": torch.cuda.get_device_name() if device == "cuda" else _cpu_model(),
        "CPU cores": len(os.sched_getaffinity(0)),
        "threads": stated_threads() or "as many as cores, over all ranks",
        "torch": torch.__version__,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine


@dataclass(frozen=True)
class Report:
    """Groups of results, held against naive eager code and against the bandwidth of a copy."""

    groups: list[list[Result]]
    bandwidth: float
    """Of one device: bytes a second, read and written."""
    device: str

    def rows(self) -> list[list[dict[str, Any]]]:
        """By group, the rows of the table: column to value."""
        return [[self._row(result, group) for result in group] for group in self.groups]

    def content(self) -> dict[str, Any]:
        """The same, for machines."""
        rows = [row for group in self.rows() for row in group]
        return {"copy bandwidth (GB/s)": self.bandwidth / 1e9, "results": rows}

    def table(self) -> str:
        lines: list[Any] = []
        for group in self.rows():
            lines += [SEPARATING_LINE, *([*row.values()] for row in group)]
        columns = self.rows()[0][0]
        formats = ("", "", "", "", "", ".2f", ".1f", ".2f", ".2f")
        return tabulate(lines[1:], [*columns], floatfmt=formats, missingval="-")

    def _row(self, result: Result, group: Sequence[Result]) -> dict[str, Any]:
        case = result.run.case
        plain = Run(case, NAIVE if case.ranks == 1 else GATHER)
        naive = next((other for other in group if other.run == plain), None)
        bandwidth = self.bandwidth * (case.ranks if self.device == "cuda" else 1)
        moved = OPS[case.op].passes * _bytes(case)
        return {
            "op": case.op,
            "shape": " x ".join(map(str, case.shape)),
            "dtype": case.dtype,
            "ranks": case.ranks,
            "provider": result.run.provider,
            "time (ms)": result.seconds * 1e3,
            "peak (MiB)": result.peak / MIB,
            "of copy bandwidth": moved / result.seconds / bandwidth if moved else None,
            "to naive": result.seconds / naive.seconds if naive else None,
        }

    def summary(self) -> str:
        """The ratios that the package has aims for."""
        lines = [
            line for group in self.groups for other in group[1:] for line in _aimed(group[0], other)
        ]
        lines += _highest(
            "any op to torch.compile of the naive code",
            1.0,
            {
                str(group[0].run.case): group[0].seconds / other.seconds
                for group in self.groups
                for other in group
                if other.run == Run(group[0].run.case, NAIVE + COMPILED)
                and other.run.case.shape != SMALL
            },
        )
        lines += _highest(
            "peak of any op above inputs, gradients and results (MiB)",
            2.0,
            {
                f"{result.run.case}, {result.run.provider}": (
                    (result.peak - gradient_bytes(result.run) - _result_bytes(result.run)) / MIB
                )
                for group in self.groups
                for result in group
                if result.run.provider in (OURS, IN_PLACE) and OPS[result.run.case.op].passes
            },
        )
        return tabulate(lines, ["what", "measured", "aim: at most"], floatfmt=".2f", missingval="-")


def _aimed(ours: Result, other: Result) -> Iterator[tuple[str, float, float]]:
    """What there is to say of the first of a group and another that it was timed beside."""
    case, beside = ours.run.case, other.run.case
    small = case.shape == SMALL
    if beside.op != case.op:
        yield f"{case} to {beside.op}", ours.seconds / other.seconds, 1.3
    elif beside != case:
        growth = math.prod(beside.shape) / math.prod(case.shape)
        grown = f"{case} to {' x '.join(map(str, beside.shape))}"
        yield f"{grown}: time, by {growth:.0f}", other.seconds / ours.seconds / growth, 1.15
        more = gradient_bytes(other.run) - gradient_bytes(ours.run)
        yield f"{grown}: peak, less the gradient's (MiB)", (other.peak - ours.peak - more) / MIB, 0
    elif other.run.provider == NAIVE and case.op in TO_NAIVE and not small:
        yield f"{case} to naive", ours.seconds / other.seconds, TO_NAIVE[case.op]
    elif other.run.provider == LOSS_PARALLEL and case.op == "logprobs":
        yield f"{case} to loss_parallel", ours.seconds / other.seconds, 0.7 if small else 0.18


def _highest(what: str, aim: float, values: dict[str, float]) -> list[tuple[str, float, float]]:
    if not values:
        return []
    where = max(values, key=values.__getitem__)
    return [(f"{what}: {where}", values[where], aim)]


def _bytes(case: Case) -> int:
    return math.prod(case.shape) * getattr(torch, case.dtype).itemsize


def _result_bytes(run: Run) -> int:
    return OPS[run.case.op].results * math.prod(run.case.shape[:-1])


def gradient_bytes(run: Run) -> float:
    """Bytes of the gradients that a run makes, on each rank."""
    if run.provider == IN_PLACE:
        return 0
    return len(OPS[run.case.op].gradients) * _bytes(run.case) / run.case.ranks
