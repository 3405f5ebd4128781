"""The processes that measure: one checks the values of a run first, then does as it is told."""

from __future__ import annotations

import contextlib
import math
import statistics
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from bench.cases import Run
from bench.check import check, sample
from bench.inputs import make, place, upstream
from bench.ops import APART, IN_PLACE, LOSS_PARALLEL, OPS, OURS, as_tuple
from bench.peak import keep_freed_blocks, peak_above_inputs, return_freed_blocks
from bench.threads import threads

__all__ = ["serve", "serve_machine"]

MIB = 1 << 20
LARGE_COPY = {"cpu": 256 * MIB, "cuda": 2048 * MIB}
MOST_CALLS, MOST_LOGITS = 50, {"cpu": 1 << 20, "cuda": 1 << 34}
"""Bounds of how often a call is repeated to be timed, and of the logits in all of the calls."""


def serve(pipe: Connection, run: Run, rank: int, rendezvous: str, device: str) -> None:
    _set_compiler()
    with (
        _reported(pipe),
        _mesh(run.case.ranks, rank, rendezvous, device) as mesh,
        _context(run.provider),
    ):
        _obey(pipe, Measured(run, mesh, torch.device(device)))


def serve_machine(pipe: Connection, device: str) -> None:
    _set_compiler()
    with _reported(pipe):
        _obey(pipe, Machine(torch.device(device)))


def _set_compiler() -> None:
    warnings.filterwarnings("error", "dtensor_vocab")  # kernels that do not compile
    torch._inductor.config.compile_threads = 1  # or each process starts others to compile in
    # Its key knows no rank: a rank takes what another has left for its part of the vocabulary.
    torch._functorch.config.enable_autograd_cache = False


def _obey(pipe: Connection, subject: Any) -> None:
    """Says that it is ready, then answers names of methods with what these return."""
    pipe.send((True, 0))
    for command in iter(pipe.recv, "stop"):
        pipe.send((True, getattr(subject, command)()))


@contextlib.contextmanager
def _reported(pipe: Connection) -> Iterator[None]:
    """Has the other end raise an error. Answers are pairs: whether all went well, and what."""
    try:
        yield
    except Exception:
        pipe.send((False, traceback.format_exc()))


@contextlib.contextmanager
def _mesh(ranks: int, rank: int, rendezvous: str, device_type: str) -> Iterator[DeviceMesh | None]:
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(threads(ranks))
    if ranks == 1:
        yield None
        return
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=2),
    )
    yield init_device_mesh(device_type, (ranks,))
    dist.destroy_process_group()


def _context(provider: str) -> contextlib.AbstractContextManager[Any]:
    return loss_parallel() if provider.startswith(LOSS_PARALLEL) else contextlib.nullcontext()


class Machine:
    """What the measurements are held against."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = LARGE_COPY[device.type]
        self.source = torch.ones(size, dtype=torch.uint8, device=device)
        self.target = torch.empty_like(self.source)
        # Compiled first, and here: what all compilations share is then made once.
        torch.compile(torch.neg)(torch.ones(1 << 10, device=device))

    def copy_bandwidth(self) -> float:
        """Bytes a second, read and written."""
        self.copy()
        times = [_seconds(self.copy, 1, self.device) for _ in range(5)]
        self.check_peak()
        return 2 * self.source.numel() / statistics.median(times)

    def copy(self) -> None:
        self.target.copy_(self.source)

    def check_peak(self) -> None:
        for mebibytes in (4, 64):
            peak = peak_above_inputs(lambda size=mebibytes << 18: self.allocate(size), self.device)
            if abs(peak / MIB - mebibytes) > 1:
                raise RuntimeError(f"{mebibytes} MiB in use are measured as {peak / MIB:.1f} MiB")

    def allocate(self, size: int) -> None:
        torch.ones(size, device=self.device)


def _seconds(
    call: Callable[[], object],
    calls: int,
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> float:
    """The mean time of ``call``, without what is to be done before each."""
    if device.type == "cuda":
        return _seconds_on_gpu(call, calls, before)
    total = 0.0
    for _ in range(calls):
        before()
        start = perf_counter()
        call()
        total += perf_counter() - start
    return total / calls


def _seconds_on_gpu(call: Callable[[], object], calls: int, before: Callable[[], object]) -> float:
    before()
    call()  # has the caching allocator get its memory
    events = []
    for _ in range(calls):
        before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # for the other processes
    return sum(start.elapsed_time(end) for start, end in events) / 1e3 / calls


class Measured:
    """A run, warmed up and with its values checked."""

    def __init__(self, run: Run, mesh: DeviceMesh | None, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        return_freed_blocks()  # until the peak is known
        op, self.ours = OPS[run.case.op], run.provider.startswith(OURS)
        self.function = op.function(run.provider)
        self.inputs: dict[str, Tensor] = {}
        samples: dict[str, Tensor] = {}
        for name in op.inputs:
            full = make(run.case, name, device)
            samples[name] = sample(op, full)
            self.inputs[name] = place(name, full, mesh)
        self.leaves = [self.inputs[name].requires_grad_() for name in op.gradients]
        self.overwritten = self.leaves if run.provider == IN_PLACE else []
        self.originals = [leaf.detach().clone() for leaf in self.overwritten]
        self.upstream: list[Tensor] | None = None
        most = MOST_LOGITS[device.type] // math.prod(run.case.shape)
        self.calls = max(1, min(MOST_CALLS, most))
        check(op, samples, *self._call(), gradients_are_sums=run.provider == APART)
        self._restore()
        self._call()

    def seconds(self) -> float:
        """The mean time of a forward and backward; no peak is measured any more."""
        keep_freed_blocks()
        if self.mesh is not None:
            dist.barrier()
        return _seconds(self._call, self.calls, self.device, before=self._restore)

    def peak(self) -> int:
        """Bytes in use at the height of a forward and backward, above the inputs."""
        peaks = []
        for _ in range(3 if self.ours else 1):
            self._restore()
            peaks.append(peak_above_inputs(self._call, self.device))
        return min(peaks)  # what one call has for the first time is not the op's

    def _restore(self) -> None:
        """Undoes what a gradient has overwritten."""
        with torch.no_grad():
            for leaf, original in zip(self.overwritten, self.originals, strict=True):
                leaf.copy_(original)

    def _call(self) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Outputs, the gradients given to them, and those of the inputs."""
        outputs = as_tuple(self.function(**self.inputs))
        if not self.leaves:
            return outputs, (), ()
        differentiable = [output for output in outputs if output.requires_grad]
        if self.upstream is None:
            self.upstream = upstream(differentiable)
        gradients = torch.autograd.grad(differentiable, self.leaves, self.upstream)
        return outputs, self.upstream, gradients
