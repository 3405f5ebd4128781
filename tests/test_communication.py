"""How often and how much is sent, and that neither depends on what one rank alone knows."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import dtensor_vocab as dv
from tests.ops import OPS, PATHS, WITH_IDS, Layout, Op, check, draw, tp
from tests.rank_zero import lone_rank, place_part
from tests.ranks import Collective, Collectives

pytestmark = pytest.mark.usefixtures("eager_kernels")


V = Shard(-1)


def sent(op: Op, layout: Layout, vocab: int = 16, rows: tuple[int, ...] = (6,), **how: object):
    """The collectives of a forward; ``check`` asserts that backward has none."""
    return check(op, draw(op, rows, vocab), layout, **how).forward


@pytest.mark.parametrize("op", OPS, ids=str)
def test_numbers_per_row_do_not_depend_on_vocabulary_or_ranks(op: Op) -> None:
    assert len(op.numbers) == (2 if op.name == "js_div" else 1)
    for layout, vocab in [(tp(2), 1024), (tp(8), 16), (Layout((2, 2), (Replicate(), V)), 16)]:
        assert_numbers(op, layout, vocab)


def assert_numbers(op: Op, layout: Layout, vocab: int) -> None:
    assert numbers(sent(op, layout, vocab)) == [{6 * n} for n in op.numbers]


def numbers(collectives: list[Collective]) -> list[set[int]]:
    """How many numbers each rank gave to each collective."""
    return [{math.prod(shape) for shape in c.payload.values()} for c in collectives]


@pytest.mark.parametrize(
    "layout",
    [tp(1), Layout((2,), (Replicate(),)), Layout((2, 2), (Shard(0), Replicate()))],
    ids=str,
)
@pytest.mark.parametrize("op", [op for op in OPS if not op.reduces_rows], ids=str)
def test_nothing_is_sent_where_each_rank_has_the_vocabulary(op: Op, layout: Layout) -> None:
    assert sent(op, layout) == []


@pytest.mark.parametrize("op", OPS, ids=str)
def test_full_short_and_empty_shards_send_the_same_payload(op: Op) -> None:
    for collective in sent(op, tp(4), vocab=5):
        assert len(set(collective.payload.values())) == 1


@pytest.mark.parametrize("op", OPS, ids=str)
def test_payload_does_not_depend_on_gradients(op: Op) -> None:
    with_all = sent(op, tp(2))
    for needs in [(), *((name,) for name in op.differentiable)]:
        assert sent(op, tp(2), needs=needs) == with_all


@pytest.mark.parametrize("op", OPS, ids=str)
def test_payload_does_not_depend_on_values(op: Op) -> None:
    usual = sent(op, tp(2))
    inputs = draw(op, vocab=16)
    for name in op.logits:
        inputs[name][:3] = -torch.inf
    if op.ids_name:
        inputs[op.ids_name].fill_(-100)
    assert check(op, inputs, tp(2)).forward == usual


@pytest.mark.parametrize("op", WITH_IDS, ids=str)
def test_payload_does_not_depend_on_the_dtype_of_ids(op: Op) -> None:
    inputs = draw(op, vocab=16)
    inputs[op.ids_name] = inputs[op.ids_name].int()
    assert check(op, inputs, tp(2)).forward == sent(op, tp(2))


@pytest.mark.parametrize("op", OPS, ids=str)
def test_collectives_are_the_same_without_rows(op: Op) -> None:
    names = [collective.name for collective in sent(op, tp(2))]
    assert [collective.name for collective in sent(op, tp(2), rows=(0,))] == names


@pytest.mark.parametrize("placements", [(Shard(0), Shard(-1)), (Shard(0), Replicate())], ids=str)
@pytest.mark.parametrize("op", PATHS, ids=str)
def test_collectives_are_the_same_for_any_number_of_rows(
    op: Op, placements: tuple[Placement, ...]
) -> None:
    """A data-parallel rank may have no row."""
    layout = Layout((2, 2), placements)
    kinds = [[c.name for c in sent(op, layout, rows=(n,))] for n in (0, 1, 2, 3, 5)]
    assert kinds == [kinds[0]] * 5


@pytest.mark.parametrize("flatten", [False, True])
def test_sums_over_two_mesh_dims_of_rows_log_no_warning(
    flatten: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One all-reduce for each of them, or one alone if the caller has flattened them."""
    logits, target = torch.randn(4, 6, 8), torch.randint(8, (4, 6))
    names = ("rows", "more rows", "vocab") if flatten else ("dp", "cp", "tp")
    with lone_rank(2, 2, 2) as mesh:
        mesh = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=names)
        if flatten:
            mesh[names[:2]]._flatten("all rows")
        x = place_part(logits, mesh, [Shard(0), Shard(1), Shard(2)])
        y = place_part(target, mesh, [Shard(0), Shard(1), Replicate()])
        with Collectives() as collectives, caplog.at_level(logging.WARNING):
            dv.cross_entropy(x, y)
    reductions = [c for c in collectives.seen if c.name.startswith("all_reduce")]
    merged = flatten and torch.__version__ >= "2.13"
    assert len(reductions) == (1 if merged else 2)
    assert "sequential all_reduce" not in caplog.text
