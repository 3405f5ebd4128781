"""The cases of a run, in groups that are timed in turns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.measure.ops import COMPILED, GATHER, IN_PLACE, LOSS_PARALLEL, NAIVE, OPS, OURS, Op

__all__ = ["Case", "Group", "Run", "gradient_bytes", "groups", "logits_bytes"]

GROWING = ("logprobs", "linear logprobs, H = 512")
LARGEST_TO_GROW = 1 << 28
"""Cases of more logits are not also measured at 4 times the rows and 4 times the vocabulary."""
SMALL = (8, 64)
"""A shape so small that a call takes no longer than its fixed cost."""


@dataclass(frozen=True)
class Case:
    """An op on logits of ``shape``, counted over all ranks."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    ranks: int = 1

    def __str__(self) -> str:
        ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.op} {' x '.join(map(str, self.shape))} {self.dtype}{ranks}"


@dataclass(frozen=True)
class Run:
    """A case, computed by one provider."""

    case: Case
    provider: str


Group = tuple[Run, ...]


def groups(rows: int, vocab: int, dtype: str, ranks: int) -> Iterator[Group]:
    """Every op on ``rows`` x ``vocab`` logits; on several ranks, the first form of each."""
    families = set()
    for op in OPS.values():
        if op.name != "step" and (ranks == 1 or op.family not in families):
            yield _group(op, rows, vocab, dtype, ranks)
        families.add(op.family)
    if ranks > 1:
        yield _with_compiled(Case("step", (rows, vocab), "float32", ranks))
    yield _with_compiled(Case("logprobs", SMALL, dtype, ranks))


def _group(op: Op, rows: int, vocab: int, dtype: str, ranks: int) -> Group:
    batch = math.gcd(rows, 8)
    shape = (batch, rows // batch, vocab) if op.sliced else (rows, vocab)
    case = Case(op.name, shape, dtype, ranks)
    if ranks > 1:
        providers = [OURS, GATHER] + [LOSS_PARALLEL] * (op.loss_parallel is not None)
        return tuple(Run(case, provider) for provider in providers)
    group = [Run(case, provider) for provider in (OURS, *op.others, NAIVE, NAIVE + COMPILED)]
    if op.name in GROWING and rows * vocab <= LARGEST_TO_GROW:
        larger = ((4 * rows, vocab), (rows, 4 * vocab))
        group += [Run(Case(op.name, shape, dtype), OURS) for shape in larger]
    return tuple(group)


def _with_compiled(case: Case) -> Group:
    other = NAIVE if case.ranks == 1 else LOSS_PARALLEL
    providers = (OURS, OURS + COMPILED, other, other + COMPILED)
    return tuple(Run(case, provider) for provider in providers)


def logits_bytes(case: Case) -> int:
    return math.prod(case.shape) * getattr(torch, case.dtype).itemsize


def gradient_bytes(run: Run) -> float:
    """Bytes of the gradients that a run makes on each rank."""
    if run.provider == IN_PLACE:
        return 0
    width = OPS[run.case.op].hidden
    if width is not None:
        rows, vocab = run.case.shape
        return (rows + vocab / run.case.ranks) * width * getattr(torch, run.case.dtype).itemsize
    return len(OPS[run.case.op].gradients) * logits_bytes(run.case) / run.case.ranks
