"""What is sent: how often, how much, and that neither depends on what a rank alone knows."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.ops import OPS, WITH_IDS, Layout, Op, check, draw, tp
from tests.ranks import Collective

pytestmark = pytest.mark.usefixtures("eager_kernels")


def sent(op: Op, layout: Layout, vocab: int = 16, rows: tuple[int, ...] = (6,), **how: object):
    """The collectives of a call; ``check`` has seen to it that there are none backward."""
    return check(op, draw(op, rows, vocab), layout, **how).forward


@pytest.mark.parametrize("vocab", [16, 1024])
@pytest.mark.parametrize("op", OPS, ids=str)
def test_so_many_numbers_a_row_and_no_more(op: Op, vocab: int) -> None:
    """In one collective, two for the op that takes both distributions normalised."""
    assert len(op.numbers) == (2 if op.name == "js_div" else 1)
    for layout in (tp(2), tp(8), Layout((2, 2), (Replicate(), Shard(-1)))):
        assert_numbers(op, layout, vocab)


def assert_numbers(op: Op, layout: Layout, vocab: int) -> None:
    assert numbers(sent(op, layout, vocab)) == [{6 * n} for n in op.numbers]


def numbers(collectives: list[Collective]) -> list[set[int]]:
    """How many numbers ranks gave to each collective."""
    return [{math.prod(shape) for shape in c.payload.values()} for c in collectives]


@pytest.mark.parametrize(
    "layout",
    [tp(1), Layout((2,), (Replicate(),)), Layout((2, 2), (Shard(0), Replicate()))],
    ids=str,
)
@pytest.mark.parametrize("op", [op for op in OPS if not op.reduces_rows], ids=str)
def test_none_where_each_rank_has_the_vocabulary(op: Op, layout: Layout) -> None:
    assert sent(op, layout) == []


@pytest.mark.parametrize("op", OPS, ids=str)
def test_one_payload_a_rank_whatever_its_shard(op: Op) -> None:
    """Of a full, a short and an empty shard."""
    for collective in sent(op, tp(4), vocab=5):
        assert len(set(collective.payload.values())) == 1


@pytest.mark.parametrize("op", OPS, ids=str)
def test_as_much_whoever_needs_a_gradient(op: Op) -> None:
    with_all = sent(op, tp(2))
    for needs in [(), *((name,) for name in op.differentiable)]:
        assert sent(op, tp(2), needs=needs) == with_all


@pytest.mark.parametrize("op", OPS, ids=str)
def test_as_much_whatever_the_values(op: Op) -> None:
    usual = sent(op, tp(2))
    inputs = draw(op, vocab=16)
    for name in op.logits:
        inputs[name][:3] = -torch.inf
    if op.ids_name:
        inputs[op.ids_name].fill_(-100)
    assert check(op, inputs, tp(2)).forward == usual


@pytest.mark.parametrize("op", WITH_IDS, ids=str)
def test_as_much_for_any_dtype_of_the_ids(op: Op) -> None:
    inputs = draw(op, vocab=16)
    inputs[op.ids_name] = inputs[op.ids_name].int()
    assert check(op, inputs, tp(2)).forward == sent(op, tp(2))


@pytest.mark.parametrize("op", OPS, ids=str)
def test_as_often_without_rows(op: Op) -> None:
    names = [collective.name for collective in sent(op, tp(2))]
    assert [collective.name for collective in sent(op, tp(2), rows=(0,))] == names


@pytest.mark.parametrize("placements", [(Shard(0), Shard(-1)), (Shard(0), Replicate())], ids=str)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_as_often_for_any_number_of_rows(op: Op, placements: tuple[Placement, ...]) -> None:
    """Also where a data-parallel rank has no row."""
    layout = Layout((2, 2), placements)
    kinds = [[c.name for c in sent(op, layout, rows=(n,))] for n in (0, 1, 2, 3, 5)]
    assert kinds == [kinds[0]] * 5
