"""Every layout that the contract has, on simulated ranks."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.ops import OPS, Layout, Op, check, draw, named, tp

pytestmark = pytest.mark.usefixtures("eager_kernels")


def over(*dims: tuple[int, Placement]) -> Layout:
    return Layout(tuple(size for size, _ in dims), tuple(placement for _, placement in dims))


R, S0, S1, V = Replicate(), Shard(0), Shard(1), Shard(-1)

LAYOUTS = [
    *(over((ranks, V)) for ranks in (1, 2, 3, 4, 8)),
    over((2, S0), (2, V)),
    over((2, V), (2, S0)),
    over((2, S1), (3, V)),
    over((2, R), (2, V)),
    over((2, R), (4, S0)),
    over((2, S0), (2, S1), (2, Shard(2))),
    over((2, Shard(-3)), (2, V), (2, Shard(-2))),
    over((2, R), (2, S0), (2, V)),
    over((2, S0), (2, S0), (2, V)),
    over((2, S0), (2, R), (2, V)),
    over((2, S0), (1, V)),
    over((4, S1)),
    over((2, R)),
]


LARGE_LAYOUTS = [
    over((2, S0), (2, S1), (4, V)),
    over((4, V), (2, S0), (2, S1)),
    over((4, S0), (4, V)),
    over((2, R), (2, S0), (4, V)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_meshes(op: Op, layout: Layout) -> None:
    check(op, draw(op, rows=(5, 3), vocab=11), layout)


@pytest.mark.parametrize("layout", LARGE_LAYOUTS, ids=str)
@pytest.mark.parametrize("op", named("logprobs", "js_div", "cross_entropy"), ids=str)
def test_meshes_of_sixteen(op: Op, layout: Layout) -> None:
    check(op, draw(op, rows=(5, 3), vocab=11), layout)


@pytest.mark.parametrize("vocab", [16, 9, 5, 2, 1])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("op", OPS, ids=str)
def test_shares_of_the_vocabulary(op: Op, ranks: int, vocab: int) -> None:
    op = op.within(vocab)
    check(op, draw(op, vocab=vocab), tp(ranks))


@pytest.mark.parametrize("rows", [(), (1,), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_leading_dims(op: Op, rows: tuple[int, ...]) -> None:
    check(op, draw(op, rows=rows), tp(2))
