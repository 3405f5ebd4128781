"""``python -m bench.breakdown``: where the time of two ops goes, part by part.

Of forward and of backward, each line has the parts of the one before it and one more; the last is
the op, which the parts of forward are checked against. All are compiled alike, and timed in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from tabulate import tabulate
from torch import Tensor

import dtensor_vocab as dv
from bench.peak import keep_freed_blocks
from bench.report import machine
from bench.threads import threads

__all__ = ["breakdown", "main"]

ROUNDS = 15


def maxima(*logits: Tensor) -> list[Tensor]:
    return [x.float().amax(-1, keepdim=True) for x in logits]


def sums(*logits: Tensor) -> list[Tensor]:
    pairs = zip(logits, maxima(*logits), strict=True)
    return [(x.float() - maximum).exp().sum(-1) for x, maximum in pairs]


def cross(a: Tensor, b: Tensor) -> list[Tensor]:
    x, y = (x.float() - maximum for x, maximum in zip((a, b), maxima(a, b), strict=True))
    return [*sums(a, b), (x.exp() * (x - y)).sum(-1)]


def new(*logits: Tensor) -> Tensor:
    return torch.ones_like(logits[0])


def read(*logits: Tensor) -> Tensor:
    return sum(x.float() for x in logits).to(logits[0].dtype)


def exponentials(*logits: Tensor) -> Tensor:
    return sum(x.float().exp() for x in logits).to(logits[0].dtype)


FORWARD = {"the maxima": maxima, "+ sums of exponentials": sums}
CROSS = {"+ cross term, in fp32, without regard to -inf": cross}
BACKWARD = {"a new tensor": new, "+ reading the logits": read, "+ exponentials": exponentials}


def breakdown(rows: int, vocab: int) -> list[tuple[str, str, str, float]]:
    """Op, pass, parts and median time (ms), for bf16 logits ``[rows, vocab]``."""
    generator = torch.Generator().manual_seed(0)
    teacher, student = 2 * torch.randn(2, rows, vocab, generator=generator).bfloat16()
    target = torch.randint(vocab, (rows,), generator=generator)
    leaf = student.clone().requires_grad_()
    ops = {
        "kl_div": (partial(dv.kl_div, leaf, teacher), (teacher, student), FORWARD | CROSS),
        "cross_entropy": (
            partial(dv.cross_entropy, leaf, target, reduction="none"),
            (student,),
            FORWARD,
        ),
    }
    s, t, c = cross(teacher, student)
    torch.testing.assert_close(c / s - s.log() + t.log(), dv.kl_div(student, teacher))
    results = []
    for op, (forward, logits, parts) in ops.items():
        value = forward()
        grad = torch.ones_like(value)
        backward = partial(torch.autograd.grad, value, leaf, grad, retain_graph=True)
        runs = {
            **{("forward", name): _compiled(fn, *logits) for name, fn in parts.items()},
            ("forward", "all"): forward,
            **{("backward", name): _compiled(fn, *logits) for name, fn in BACKWARD.items()},
            ("backward", "all"): backward,
        }
        results += [(op, *name, ms) for name, ms in _timed(runs).items()]
    return results


def _compiled(fn: Callable[..., object], *logits: Tensor) -> Callable[[], object]:
    return partial(torch.compile(fn, dynamic=True), *logits)


def _timed(runs: dict[tuple[str, str], Callable[[], object]]) -> dict[tuple[str, str], float]:
    times: dict[tuple[str, str], list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            result = run()
            times[name].append(time.perf_counter() - start)
            del result
    return {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(
        prog="python -m bench.breakdown",
        description="Prints where the time of kl_div and cross_entropy goes, part by part, on the "
        "CPU: each line has the parts of the line before it and one more.",
    ).parse_args(arguments)
    warnings.filterwarnings("error", "dtensor_vocab")  # kernels that do not compile
    torch.set_num_threads(threads())
    keep_freed_blocks()
    print(
        tabulate({**machine("cpu"), "logits": "2048 x 16032, bfloat16"}.items(), tablefmt="plain")
    )
    lines = breakdown(2048, 16032)
    print(tabulate(lines, ["op", "pass", "parts", "time (ms)"], floatfmt=".1f"))


if __name__ == "__main__":
    main()
