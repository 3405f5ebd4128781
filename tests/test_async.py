"""Inputs that are the results of unfinished asynchronous collectives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.ops import LOGITS, OP, Op, draw, named
from tests.oracle import assert_bytes_equal
from tests.ranks import distribute, on_mesh
from tests.step import compiled

pytestmark = [pytest.mark.ranks(2), pytest.mark.usefixtures("eager_kernels")]

TIMES = 20
ROWS, VOCAB = 32, 256
"""Large enough that the op is called before the collective ends."""

FEW = [
    OP["logprobs(K=3)"],
    OP["js_div(beta=0.3)"],
    OP["topk_kl_div(reverse=True,tail=True,K=3)"],
]
MOVES = {
    "all-gather": (Shard(0), Replicate()),
    "reduce-scatter": (Partial(), Shard(1)),
    "all-reduce": (Partial(), Replicate()),
}


@pytest.mark.parametrize(
    "op, move",
    [*((FEW[0], move) for move in MOVES), *((op, "all-gather") for op in FEW[1:])],
    ids=str,
)
def test_unfinished_logits_give_the_same_bits(op: Op, move: str) -> None:
    """The op takes logits and ids straight from ``redistribute(async_op=True)``."""
    check_moved_logits(op, move, TIMES)


@pytest.mark.parametrize("op, move", [(FEW[0], "all-gather"), (FEW[1], "reduce-scatter")], ids=str)
def test_unfinished_logits_give_the_same_bits_in_compiled_code(op: Op, move: str) -> None:
    check_moved_logits(op, move, TIMES, compiled_with="inductor")


def check_moved_logits(op: Op, move: str, times: int, compiled_with: str | None = None) -> None:
    before, after = MOVES[move]
    by_row = Replicate() if isinstance(before, Partial) else Shard(0)

    def results(async_op: bool, logits: list[Tensor], others: list[Tensor]) -> list[Tensor]:
        logits = [x.redistribute(placements=[after], async_op=async_op) for x in logits]
        others = [x.redistribute(placements=[Replicate()], async_op=async_op) for x in others]
        return list(op(*logits, *others))

    step = results
    if compiled_with is not None:
        step = compiled(results, backend=compiled_with)
    with on_mesh((2,)) as mesh:
        for seed in range(times):
            inputs = draw(op, (ROWS,), VOCAB, seed=seed)
            logits = [_placed(inputs[name], mesh, before) for name in op.logits]
            others = [_placed(x, mesh, by_row) for name, x in inputs.items() if name not in LOGITS]
            assert all(
                _is_unfinished(x.redistribute(placements=[after], async_op=True)) for x in logits
            )
            actual, expected = step(True, logits, others), results(False, logits, others)
            assert_same_bits(actual, expected)
            if not op.constant:
                assert_same_bits(_gradients(actual, logits), _gradients(expected, logits))


def _is_unfinished(x: DTensor) -> bool:
    return isinstance(x._local_tensor, funcol.AsyncCollectiveTensor)


def _placed(full: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    if isinstance(placement, Partial):  # The first rank holds all of it, the others zeros.
        full = full if mesh.get_rank() == 0 else torch.zeros_like(full)
        placed = DTensor.from_local(full, mesh, [placement], run_check=False)
    else:
        placed = distribute(full, mesh, [placement])
    return placed.requires_grad_(placed.is_floating_point())


def _gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(sum(x.sum() for x in outputs if x.requires_grad), leaves))


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        assert got.placements == wanted.placements
        assert_bytes_equal(_local(got), _local(wanted))


def _local(x: Tensor) -> Tensor:
    local = x.detach().to_local() if isinstance(x, DTensor) else x
    return local.wait() if isinstance(local, funcol.AsyncCollectiveTensor) else local


@pytest.mark.parametrize("op", named("logprobs_and_entropy"), ids=str)
def test_unfinished_upstream_gradients_give_the_same_bits(op: Op) -> None:
    with on_mesh((2,)) as mesh:
        for seed in range(TIMES):
            inputs = draw(op, (ROWS,), VOCAB, seed=seed)
            logits = distribute(inputs.pop("logits"), mesh, [Shard(-1)]).requires_grad_()
            others = [distribute(x, mesh, [Replicate()]) for x in inputs.values()]
            outputs = op(logits, *others)
            grads = [distribute(torch.randn(out.shape), mesh, [Shard(0)]) for out in outputs]
            gathered = [
                [grad.redistribute(placements=[Replicate()], async_op=flag) for grad in grads]
                for flag in (True, False)
            ]
            assert all(map(_is_unfinished, gathered[0]))
            actual, expected = (
                torch.autograd.grad(outputs, [logits], each, retain_graph=True) for each in gathered
            )
            assert_same_bits(actual, expected)


@pytest.mark.parametrize("op", FEW, ids=str)
def test_unfinished_plain_tensors_give_the_same_bits(op: Op) -> None:
    with on_mesh((2,)) as mesh:
        for seed in range(TIMES):
            inputs = draw(op, (ROWS,), VOCAB, seed=seed)
            gathered = [
                funcol.all_gather_tensor(x.chunk(2)[mesh.get_rank()].contiguous(), 0, mesh)
                for x in inputs.values()
            ]
            assert all(isinstance(x, funcol.AsyncCollectiveTensor) for x in gathered)
            for got, wanted in zip(op(*gathered), op(*inputs.values()), strict=True):
                assert type(got) is Tensor
                assert_bytes_equal(got, wanted)
