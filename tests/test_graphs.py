"""The compiled graphs of a step contain only the op's operators and its collectives."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from tests.graphs import Graphs, calls, ours, short_name
from tests.ops import OP, OPS, Op
from tests.rank_zero import lone_rank, place_part
from tests.ranks import World, on_mesh
from tests.step import Batch, compiled, draw_batch, loss_of, run_step

pytestmark = pytest.mark.usefixtures("eager_kernels")

ROWS, VOCAB = 7, 37
COLUMNS = (19, 18)
"""Sizes of the ranks' shards. No dim of another tensor has one of these sizes."""

COLLECTIVES = ("all_gather_into_tensor", "wait_tensor")
VIEWS = ("t", "transpose", "permute", "view", "detach", "alias")
WAITS_FOR_THE_DEVICE = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal")


def graphs_of(op: Op, sharded: bool = True, constant_teacher: bool = False) -> Graphs:
    """Returns the graphs of a step with the op, on rank 0 of two if ``sharded``."""
    key = (str(op), sharded, constant_teacher)
    if key not in _SEEN:
        with lone_rank(2) if sharded else contextlib.nullcontext() as mesh:
            batch = draw(op, mesh=mesh, place=place_part)
            if constant_teacher:
                batch.heads[op.logits.index("teacher")].requires_grad_(False)
            _SEEN[key] = capture(op, batch)
    return _SEEN[key]


_SEEN: dict[Any, Graphs] = {}


def draw(op: Op, **options: Any) -> Batch:
    """Draws a batch whose bfloat16 logits differ in dtype from tensors computed in fp32."""
    return draw_batch(op, (ROWS,), VOCAB, torch.bfloat16, **options)


def capture(op: Op, batch: Batch) -> Graphs:
    graphs = Graphs()
    run_step(compiled(loss_of(op), backend=graphs.backend), batch)
    return graphs


# ------------------------------------------------------------------ each op


def snapshot(op: str, constant_teacher: bool = False) -> str:
    """Returns the text of the graphs of an op, sharded over two ranks."""
    return str(graphs_of(OP[op], constant_teacher=constant_teacher))


def test_logprobs_runs_only_these_operators() -> None:
    assert_expected_inline(
        snapshot("logprobs"),
        """\
forward:
  softmax_stats
  all_gather_into_tensor
  wait_tensor
  logprobs_merge
backward:
  logprobs_backward""",
    )


def test_logprobs_of_k_ids_runs_only_these_operators() -> None:
    assert_expected_inline(
        snapshot("logprobs(K=3)"),
        """\
forward:
  softmax_stats
  all_gather_into_tensor
  wait_tensor
  logprobs_merge
backward:
  logprobs_backward""",
    )


def test_entropy_runs_only_these_operators() -> None:
    assert_expected_inline(
        snapshot("entropy"),
        """\
forward:
  softmax_stats
  all_gather_into_tensor
  wait_tensor
  entropy_merge
backward:
  entropy_backward""",
    )


def test_logprobs_and_entropy_runs_only_these_operators() -> None:
    assert_expected_inline(
        snapshot("logprobs_and_entropy"),
        """\
forward:
  softmax_stats
  all_gather_into_tensor
  wait_tensor
  logprobs_and_entropy_merge
backward:
  logprobs_and_entropy_backward""",
    )


def test_kl_div_runs_only_these_operators() -> None:
    assert_expected_inline(
        snapshot("kl_div"),
        """\
forward:
  kl_div_stats
  all_gather_into_tensor
  wait_tensor
  kl_div_merge
backward:
  kl_div_backward_both""",
    )


def test_kl_div_to_a_constant_teacher_runs_only_these_operators() -> None:
    assert_expected_inline(
        snapshot("kl_div", constant_teacher=True),
        """\
forward:
  kl_div_stats
  all_gather_into_tensor
  wait_tensor
  kl_div_merge
backward:
  kl_div_backward""",
    )


def test_js_div_runs_only_these_operators() -> None:
    assert_expected_inline(
        snapshot("js_div(beta=0.3)"),
        """\
forward:
  kl_div_stats
  all_gather_into_tensor
  wait_tensor
  js_div_normalize
  js_div_stats
  all_gather_into_tensor
  wait_tensor
  js_div_merge
backward:
  js_div_backward_both""",
    )


def test_js_div_to_a_constant_teacher_runs_only_these_operators() -> None:
    assert_expected_inline(
        snapshot("js_div(beta=0.3)", constant_teacher=True),
        """\
forward:
  kl_div_stats
  all_gather_into_tensor
  wait_tensor
  js_div_normalize
  js_div_stats
  all_gather_into_tensor
  wait_tensor
  js_div_merge
backward:
  js_div_backward""",
    )


def test_cross_entropy_runs_only_these_operators() -> None:
    assert_expected_inline(
        snapshot("cross_entropy(reduction=none)"),
        """\
forward:
  softmax_stats
  all_gather_into_tensor
  wait_tensor
  cross_entropy_merge
backward:
  cross_entropy_backward""",
    )


def test_cross_entropy_mean_runs_only_these_operators() -> None:
    assert_expected_inline(
        snapshot("cross_entropy(reduction=mean,z_loss=0.1)"),
        """\
forward:
  softmax_stats
  all_gather_into_tensor
  wait_tensor
  cross_entropy_merge
  cross_entropy_sum
  cross_entropy_reduce
backward:
  cross_entropy_backward""",
    )


def test_topk_logprobs_runs_only_these_operators() -> None:
    assert_expected_inline(
        snapshot("topk_logprobs(k=3)"),
        """\
forward:
  topk_logprobs_stats
  all_gather_into_tensor
  wait_tensor
  topk_logprobs_merge
backward:
  logprobs_backward""",
    )


def test_argmax_runs_only_these_operators() -> None:
    assert_expected_inline(
        snapshot("argmax"),
        """\
forward:
  argmax_stats
  all_gather_into_tensor
  wait_tensor
  argmax_merge
backward:""",
    )


def test_topk_kl_div_runs_only_these_operators() -> None:
    assert_expected_inline(
        snapshot("topk_kl_div(K=3)"),
        """\
forward:
  softmax_stats
  all_gather_into_tensor
  wait_tensor
  topk_kl_div_merge
backward:
  topk_kl_div_backward""",
    )


def test_topk_kl_div_with_tail_runs_only_these_operators() -> None:
    assert_expected_inline(
        snapshot("topk_kl_div(tail=True,K=3)"),
        """\
forward:
  topk_kl_div_stats
  all_gather_into_tensor
  wait_tensor
  topk_kl_div_merge
backward:
  topk_kl_div_backward""",
    )


# ------------------------------------------------------------------ all ops


@pytest.mark.parametrize("op", OPS, ids=str)
def test_logits_are_read_once_each_way(op: Op) -> None:
    graphs = graphs_of(op)
    heads = [node for node in calls(graphs.forward) if short_name(node) == "mm"]
    assert len(heads) == len(op.logits)
    for logits in heads:
        assert len(readers(logits)) == len(op.numbers)
    saved = [node for node in graphs.backward.nodes if node.op == "placeholder" and is_whole(node)]
    assert len(saved) == (0 if op.constant else len(op.logits))
    for logits in saved:
        assert len(readers(logits)) == 1


def readers(node: fx.Node) -> set[fx.Node]:
    """Returns the operators that read a tensor or a view of it."""
    users = {user for user in node.users if user.op == "call_function"}
    views = {user for user in users if short_name(user) in VIEWS}
    return (users - views).union(*map(readers, views))


def shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(getattr(node.meta.get("val"), "shape", ()))


def is_whole(node: fx.Node) -> bool:
    """Returns whether the tensor has the size of the local logits."""
    return ROWS in shape(node) and not {*COLUMNS, VOCAB}.isdisjoint(shape(node))


@pytest.mark.parametrize("op", OPS, ids=str)
def test_only_the_logits_and_their_gradients_have_their_size(op: Op) -> None:
    """The logits and their gradients are bfloat16, and no fp32 tensor has their size."""
    graphs = graphs_of(op)
    whole = [node for graph in graphs.both for node in graph.nodes if is_whole(node)]
    assert whole
    assert all(node.meta["val"].dtype == torch.bfloat16 for node in whole)
    made = [node for node in whole if node.op == "call_function" and short_name(node) not in VIEWS]
    gradients = 0 if op.constant else len(op.logits)
    assert len(made) == len(op.logits) + gradients


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("op", OPS, ids=str)
def test_nothing_waits_for_the_device(op: Op, sharded: bool) -> None:
    for graph in graphs_of(op, sharded).both:
        assert not [node for node in calls(graph) if short_name(node) in WAITS_FOR_THE_DEVICE]


@pytest.mark.parametrize("op", OPS, ids=str)
def test_sharding_adds_only_the_collectives(op: Op) -> None:
    pairs = zip(graphs_of(op, sharded=False).both, graphs_of(op).both, strict=True)
    for plain, sharded in pairs:
        assert ours(plain) == [name for name in ours(sharded) if name not in COLLECTIVES]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_all_ranks_have_the_same_graphs(op: Op) -> None:
    with on_mesh((2,)) as mesh:
        graphs = capture(op, draw(op, mesh=mesh))
    mine = [[str(node.target) for node in calls(graph)] for graph in graphs.both]
    assert World.current.gather(mine) == [mine, mine]
