"""Layouts of the logits: the placement rules as a function, and the ops on simulated meshes."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import dtensor_vocab as dv
from dtensor_vocab.layout import placements_of
from tests.ops import OPS, PATHS, Layout, Op, check, draw, tp
from tests.rank_zero import lone_rank

pytestmark = pytest.mark.usefixtures("eager_kernels")


def over(*dims: tuple[int, Placement]) -> Layout:
    return Layout(tuple(size for size, _ in dims), tuple(placement for _, placement in dims))


R, S0, S1, S2, V = Replicate(), Shard(0), Shard(1), Shard(2), Shard(-1)

LAYOUTS = [
    over((1, V)),
    over((2, V), (2, S0)),
    over((2, R), (2, S1)),
    over((2, Shard(-3)), (2, V), (2, Shard(-2))),
    over((2, S0), (2, S0), (2, V)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_ops_on_meshes(op: Op, layout: Layout) -> None:
    check(op, draw(op, rows=(5, 3), vocab=11), layout)


@pytest.mark.parametrize("layout", [over((4, V), (2, S0), (2, S1)), over((2, R), (2, S0), (4, V))])
def test_cross_entropy_on_meshes_of_sixteen_ranks(layout: Layout) -> None:
    (op,) = (op for op in PATHS if op.reduces_rows)
    check(op, draw(op, rows=(5, 3), vocab=11), layout)


@pytest.mark.parametrize("vocab, ranks", [(16, 4), (9, 8), (2, 4), (1, 2)])
@pytest.mark.parametrize("op", OPS, ids=str)
def test_even_uneven_and_empty_shards(op: Op, vocab: int, ranks: int) -> None:
    op = op.within(vocab)
    check(op, draw(op, vocab=vocab), tp(ranks))


@pytest.mark.parametrize("rows", [(), (1,), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_leading_dims(op: Op, rows: tuple[int, ...]) -> None:
    check(op, draw(op, rows=rows), tp(2))


def test_rank_outside_of_the_mesh_gets_empty_results() -> None:
    """Like torch's own ops, the functions accept calls on such a rank, which takes no part."""
    with lone_rank(2):
        mesh = DeviceMesh("cpu", torch.tensor([1, 2]))  # This process is rank 0.
        logits = DTensor.from_local(
            torch.empty(0),
            mesh,
            [Shard(1)],
            run_check=False,
            shape=torch.Size((6, 10)),
            stride=(10, 1),
        )
        for out in (dv.entropy(logits), dv.logprobs(logits, torch.zeros(6, dtype=torch.int64))):
            assert out.shape == (6,)
            assert out.to_local().numel() == 0


# ------------------------------------------------------------------ placement rules

P = Partial()
SHARDS = {
    # Each key is the placement of logits [B, S, V] on a mesh dim. Its value holds the placements
    # of the other roles on the same mesh dim.
    S0: {"rows": S0, "stats": S1, "gathered": S1, "start": R, "sums": P, "total": R},
    S1: {"rows": S1, "stats": S2, "gathered": S2, "start": R, "sums": P, "total": R},
    S2: {"rows": R, "stats": S0, "gathered": R, "start": S0, "sums": R, "total": R},
    R: {"rows": R, "stats": R, "gathered": R, "start": R, "sums": R, "total": R},
}
NDIM = {"logits": 3, "rows": 2, "stats": 4, "gathered": 4, "start": 1, "sums": 1, "total": 1}


class Spec(NamedTuple):
    """The part of a DTensorSpec that the rules read."""

    placements: tuple[Placement, ...]
    ndim: int


@pytest.mark.parametrize("first", SHARDS, ids=str)
@pytest.mark.parametrize("second", SHARDS, ids=str)
def test_logits_place_every_role(first: Placement, second: Placement) -> None:
    """Each of two mesh dims places a tensor by its role, without regard to the other."""
    roles = list(SHARDS[R])
    nowhere = [Spec((R, R), NDIM[role]) for role in roles]
    inputs, outputs = placements_of(
        ["logits", *roles], [Spec((first, second), 3), *nowhere], ["logits", *roles]
    )
    expected = [(SHARDS[first][role], SHARDS[second][role]) for role in roles]
    assert inputs == outputs == [(first, second), *expected]


@pytest.mark.parametrize("role", ["stats", "gathered", "rows"])
@pytest.mark.parametrize("placement", [S0, S1, R], ids=str)
def test_a_role_places_the_others_where_there_are_no_logits(
    role: str, placement: Placement
) -> None:
    given = SHARDS[placement][role]
    inputs, outputs = placements_of(
        [role, "rows"], [Spec((given,), NDIM[role]), Spec((R,), 2)], ["rows"]
    )
    assert inputs == [(given,), (SHARDS[placement]["rows"],)]
    assert outputs == [(SHARDS[placement]["rows"],)]


def test_gathered_stats_are_replicated_over_the_vocabulary() -> None:
    """Shard(0) of the statistics is the vocabulary's mesh dim, which the operator gathers."""
    inputs, outputs = placements_of(["gathered", "rows"], [Spec((S0, S1), 4), None], ["rows"])
    assert inputs == [(R, S1), None]
    assert outputs == [(R, S0)]


def test_one_value_for_all_rows_is_replicated() -> None:
    inputs, _ = placements_of(["logits", "rows"], [Spec((S0, S2), 3), Spec((R, R), 0)], [])
    assert inputs == [(S0, S2), (R, R)]


def test_sums_over_rows_are_all_reduced() -> None:
    assert placements_of(["total"], [Spec((P, R), 1)], ["total"]) == ([(R, R)], [(R, R)])
