"""Tests that need a GPU: no wait for the device, CUDA graphs, one NCCL rank."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.ops import Op, compare, draw, expect, observe
from tests.rank_zero import place_part
from tests.step import ONE_EACH, Batch, compiled, draw_batch, loss_of, run_step

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ROWS, VOCAB = 64, 1000


def on_gpu(op: Op, seed: int = 0, mesh: DeviceMesh | None = None) -> Batch:
    return draw_batch(op, (ROWS,), VOCAB, device="cuda", mesh=mesh, place=place_part, seed=seed)


def refill(batch: Batch, fresh: Batch) -> None:
    with torch.no_grad():
        for static, new in zip(tree_leaves(batch), tree_leaves(fresh), strict=True):
            static.copy_(new)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    actual, expected = (x.to_local() if isinstance(x, DTensor) else x for x in (actual, expected))
    torch.testing.assert_close(actual, expected)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------ as on the CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", ONE_EACH, ids=str)
def test_values_and_gradients_match_the_oracle(op: Op, dtype: torch.dtype) -> None:
    inputs = draw(op, (ROWS,), VOCAB, dtype)
    expected = expect(op, inputs)
    on_device, grads = tree_map_only(Tensor, lambda x: x.cuda(), (inputs, list(expected.grads)))
    observed = observe(op, on_device, grads=grads)
    observed = tree_map_only(Tensor, lambda x: x.detach().cpu(), observed)
    compare(op, inputs, None, observed, expected)


# ------------------------------------------------------------------ no wait, CUDA graphs


@pytest.mark.parametrize("op", ONE_EACH, ids=str)
def test_nothing_waits(op: Op) -> None:
    check_nothing_waits(loss_of(op), on_gpu(op))


@pytest.mark.parametrize("op", ONE_EACH, ids=str)
def test_nothing_waits_in_compiled_code(op: Op) -> None:
    check_nothing_waits(compiled(loss_of(op)), on_gpu(op))


def check_nothing_waits(step: Callable[..., Tensor], batch: Batch) -> None:
    run_step(step, batch)  # compiles
    with no_waiting():
        run_step(step, batch)


@pytest.mark.parametrize("op", ONE_EACH, ids=str)
def test_cuda_graph_replays_a_step(op: Op) -> None:
    check_cuda_graph(loss_of(op), on_gpu(op), [on_gpu(op, seed) for seed in (1, 2, 3)])


def check_cuda_graph(step: Callable[..., Tensor], batch: Batch, others: list[Batch]) -> None:
    """Checks that a captured step, replayed on new values, equals the step run on them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run_step(step, batch)
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_step(step, batch)
    for fresh in others:
        expected = run_step(step, fresh)
        refill(batch, fresh)
        graph.replay()
        for got, wanted in zip(captured, expected, strict=True):
            assert_close(got, wanted)


@pytest.mark.parametrize("op", ONE_EACH, ids=str)
def test_reduce_overhead_skips_no_cuda_graph(op: Op) -> None:
    counters.clear()
    loss = loss_of(op)
    step = compiled(loss, mode="reduce-overhead")
    for seed in range(5):
        batch = on_gpu(op, seed)
        torch.compiler.cudagraph_mark_step_begin()
        for got, wanted in zip(run_step(step, batch), run_step(loss, batch), strict=True):
            assert_close(got, wanted)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_id_out_of_range_is_a_device_side_assertion() -> None:
    """The assertion makes the GPU unusable for the process, so the call has its own process."""
    program = (
        "import torch, dtensor_vocab as dv\n"
        "dv.logprobs(torch.zeros(2, 4, device='cuda'), torch.tensor([0, 4], device='cuda'))\n"
        "torch.cuda.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    assert "device-side assert" in done.stderr


# ------------------------------------------------------------------ one NCCL rank


def test_one_nccl_rank_equals_plain_tensors(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_nccl_rank, (tmp_path / "group",), nprocs=1)


def _nccl_rank(rank: int, file: Path) -> None:
    dist.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=1)
    mesh = init_device_mesh("cuda", (1,))
    for op in ONE_EACH:
        loss, batches = loss_of(op), [on_gpu(op, seed, mesh) for seed in range(4)]
        step = compiled(loss)
        for got, wanted, plain in zip(
            run_step(step, batches[0]),
            run_step(loss, batches[0]),
            run_step(loss, on_gpu(op)),
            strict=True,
        ):
            assert_close(got, plain)
            assert_close(wanted, plain)
        check_nothing_waits(loss, batches[0])
        check_nothing_waits(step, batches[0])
        check_cuda_graph(loss, batches[0], batches[1:])
    dist.destroy_process_group()
