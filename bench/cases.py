"""The cases of a run, in groups of what is timed in turns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bench.ops import COMPILED, GATHER, LOSS_PARALLEL, NAIVE, OPS, OURS, Op

__all__ = ["Case", "Group", "Run", "groups", "quick_groups"]

GROWN = ("logprobs",)
"""Ops that are measured at four times the rows and at four times the vocabulary as well."""
GROWN_UP_TO = 1 << 28
"""Logits beyond which four times as many, and all that naive code makes of them, need not fit."""
SMALL = (8, 64)
"""Logits so small that the fixed cost of a call is all there is."""


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
    """A case as one provider does it."""

    case: Case
    provider: str


Group = tuple[Run, ...]


def groups(rows: int, vocab: int, dtype: str, ranks: int) -> Iterator[Group]:
    """Every op on ``rows`` x ``vocab`` logits; on several ranks, each in its first form."""
    families = set()
    for op in OPS.values():
        if op.name != "step" and (ranks == 1 or op.family not in families):
            yield _group(op, rows, vocab, dtype, ranks)
        families.add(op.family)
    if ranks > 1:
        yield _with_compiled(Case("step", (rows, vocab), "float32", ranks))
    yield _with_compiled(Case("logprobs", SMALL, dtype, ranks))


def quick_groups(rows: int, vocab: int, dtype: str, ranks: int) -> Iterator[Group]:
    """The first form of an op, without what only tells how it grows."""
    families = set()
    for group in groups(rows, vocab, dtype, ranks):
        case = group[0].case
        if OPS[case.op].family not in families:
            yield tuple(run for run in group if run.case == case)
        families.add(OPS[case.op].family)


def _group(op: Op, rows: int, vocab: int, dtype: str, ranks: int) -> Group:
    batch = math.gcd(rows, 8)
    shape = (batch, rows // batch, vocab) if op.sliced else (rows, vocab)
    case = Case(op.name, shape, dtype, ranks)
    if ranks > 1:
        providers = [OURS, GATHER] + [LOSS_PARALLEL] * (op.loss_parallel is not None)
        return tuple(Run(case, provider) for provider in providers)
    group = [Run(case, provider) for provider in (OURS, *op.others, NAIVE, NAIVE + COMPILED)]
    if op.name == "logprobs_and_entropy":
        group.append(Run(Case("logprobs", case.shape, dtype), OURS))
    if op.name in GROWN and rows * vocab <= GROWN_UP_TO:
        larger = ((4 * rows, vocab), (rows, 4 * vocab))
        group += [Run(Case(op.name, shape, dtype), OURS) for shape in larger]
    return tuple(group)


def _with_compiled(case: Case) -> Group:
    other = NAIVE if case.ranks == 1 else LOSS_PARALLEL
    providers = (OURS, OURS + COMPILED, other, other + COMPILED)
    return tuple(Run(case, provider) for provider in providers)
