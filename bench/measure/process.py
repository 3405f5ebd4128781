"""Measures the runs of a group in turns, each in new processes of its own.

The processes of a group get ready at the same time. While one run is timed the others wait. The
runs that are compared are therefore measured within the same minutes.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing as mp
import statistics
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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

from bench.measure.cases import Group, Run
from bench.measure.check import check, sample, upstream_of_sample
from bench.measure.inputs import make, place, upstream
from bench.measure.ops import APART, IN_PLACE, LOSS_PARALLEL, OPS, OURS, as_tuple
from bench.measure.peak import keep_freed_blocks, peak_above_inputs, return_freed_blocks

__all__ = ["BenchError", "Result", "copy_bandwidth", "measure"]

THREADS = torch.get_num_threads()
"""Threads of all ranks together: ``OMP_NUM_THREADS``, or the number of cores."""
ENOUGH_S, MIN_ROUNDS = 0.8, 3
"""A run that has been timed for this many seconds and rounds is not timed again."""
PATIENCE_S = 300
"""How long to wait for an answer of a process, which may have to compile."""
PRELOADED = ["bench.measure.process", "torch._inductor.compile_fx"]
MIB = 1 << 20
LARGE_COPY = {"cpu": 256 * MIB, "cuda": 2048 * MIB}
MOST_CALLS, MOST_LOGITS = 50, {"cpu": 1 << 20, "cuda": 1 << 34}
"""Upper bounds of the calls in one timing, and of the logits in all of these calls."""


class BenchError(RuntimeError):
    """A process that measures has failed, or its values are wrong."""


@dataclass(frozen=True)
class Result:
    run: Run
    seconds: float
    """Median time of a forward and backward."""
    peak: int
    """Bytes above the inputs, on the rank that used most."""

    def __str__(self) -> str:
        return (
            f"{self.run.provider:24} {self.seconds * 1e3:9.2f} ms {self.peak / MIB:8.1f} MiB"
            f"  {self.run.case}"
        )


def measure(group: Group, device: str, rounds: int) -> list[Result]:
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(_processes(run, device)) for run in group]
        for run in runs:
            run.answer()  # when it is ready
        peaks = [run.ask("peak") for run in runs]
        times: list[list[float]] = [[] for _ in group]
        for _ in range(rounds):
            for run, seconds in zip(runs, times, strict=True):
                if len(seconds) < MIN_ROUNDS or sum(seconds) < ENOUGH_S:
                    seconds.append(run.ask("seconds"))
    return [
        Result(run, statistics.median(seconds), peak)
        for run, seconds, peak in zip(group, times, peaks, strict=True)
    ]


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by a large copy with all threads."""
    with _processes(None, device) as machine:
        machine.answer()
        return machine.ask("copy_bandwidth")


# ---- this end of the pipes


class _Processes:
    """The processes of one run, one for each rank, each at the other end of a pipe."""

    def __init__(self, name: str, pipes: list[Connection]) -> None:
        self.name, self.pipes = name, pipes

    def ask(self, command: str) -> Any:
        for pipe in self.pipes:
            pipe.send(command)
        return self.answer()

    def answer(self) -> Any:
        """The highest answer of the ranks."""
        return max(map(self._answer, self.pipes))

    def _answer(self, pipe: Connection) -> Any:
        if not pipe.poll(PATIENCE_S):
            raise BenchError(f"{self.name}: no answer in {PATIENCE_S} s")
        try:
            succeeded, answer = pipe.recv()
        except EOFError:
            raise BenchError(f"{self.name}: its process ended, perhaps out of memory") from None
        if not succeeded:
            raise BenchError(f"{self.name}:\n{answer}")
        return answer


@contextlib.contextmanager
def _processes(run: Run | None, device: str) -> Iterator[_Processes]:
    # They are forked from a process that has imported torch and not touched a GPU.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *["bench.measure.warm"] * (device == "cpu")])
    processes, pipes = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(1 if run is None else run.case.ranks):
                ours, theirs = context.Pipe()
                args = theirs, run, rank, f"{folder}/rendezvous", device
                processes.append(context.Process(target=_serve, args=args, daemon=True))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
            name = "the machine" if run is None else f"{run.case}, {run.provider}"
            yield _Processes(name, pipes)
            for pipe in pipes:
                pipe.send("stop")
            for process in processes:
                process.join(PATIENCE_S)
        finally:
            for process in processes:
                process.kill()
                process.join()


# ---- the other end


def _serve(pipe: Connection, run: Run | None, rank: int, rendezvous: str, device: str) -> None:
    """Reports that it is ready, then runs the methods whose names it receives.

    An answer is a pair: whether the method succeeded, and its result or the error.
    """
    warnings.filterwarnings("error", "dtensor_vocab")  # Fail if kernels run eagerly.
    torch._inductor.config.compile_threads = 1  # Otherwise each process starts compilers.
    # The key of this cache has no rank, so a rank would run code that was compiled for another.
    torch._functorch.config.enable_autograd_cache = False
    ranks = 1 if run is None else run.case.ranks
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, THREADS // ranks))
    try:
        with _mesh(ranks, rank, rendezvous, device) as mesh, _context(run):
            subject: Any = (
                Machine(torch.device(device))
                if run is None
                else Measured(run, mesh, torch.device(device))
            )
            pipe.send((True, 0))
            for command in iter(pipe.recv, "stop"):
                pipe.send((True, getattr(subject, command)()))
    except Exception:
        pipe.send((False, traceback.format_exc()))


@contextlib.contextmanager
def _mesh(ranks: int, rank: int, rendezvous: str, device: str) -> Iterator[DeviceMesh | None]:
    if ranks == 1:
        yield None
        return
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=2),
    )
    yield init_device_mesh(device, (ranks,))
    dist.destroy_process_group()


def _context(run: Run | None) -> contextlib.AbstractContextManager[Any]:
    parallel = run is not None and run.provider.startswith(LOSS_PARALLEL)
    return loss_parallel() if parallel else contextlib.nullcontext()


class Machine:
    """Measures the copy of a large tensor, and checks the measurement of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.source = torch.ones(LARGE_COPY[device.type], dtype=torch.uint8, device=device)
        self.target = torch.empty_like(self.source)

    def copy_bandwidth(self) -> float:
        self._copy()
        times = [_seconds(self._copy, 1, self.device) for _ in range(5)]
        for mebibytes in (4, 64):
            peak = peak_above_inputs(lambda n=mebibytes << 18: self._allocate(n), self.device)
            if abs(peak / MIB - mebibytes) > 1:
                raise RuntimeError(f"{mebibytes} MiB in use are measured as {peak / MIB:.1f} MiB")
        return 2 * self.source.numel() / statistics.median(times)

    def _copy(self) -> None:
        self.target.copy_(self.source)

    def _allocate(self, size: int) -> None:
        torch.ones(size, device=self.device)


class Measured:
    """A run, warmed up and with its values checked."""

    def __init__(self, run: Run, mesh: DeviceMesh | None, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        return_freed_blocks()
        op, self.ours = OPS[run.case.op], run.provider.startswith(OURS)
        self.function = op.function(run.provider)
        self.inputs: dict[str, Tensor] = {}
        samples: dict[str, Tensor] = {}
        for name in op.inputs:
            full = make(run.case, name, device)
            samples[name] = sample(op, full, name)
            self.inputs[name] = place(name, full, mesh)
        self.leaves = [self.inputs[name].requires_grad_() for name in op.gradients]
        self.overwritten = self.leaves if run.provider == IN_PLACE else []
        self.originals = [leaf.detach().clone() for leaf in self.overwritten]
        self.upstream: list[Tensor] | None = None
        most = MOST_LOGITS[device.type] // math.prod(run.case.shape)
        self.calls = max(1, min(MOST_CALLS, most))
        self.op, self.checking = op, True
        check(op, samples, *self._call(), gradients_are_sums=run.provider == APART)
        self.checking = False
        self._restore()
        self._call()

    def seconds(self) -> float:
        """The mean time of a forward and backward. Peaks cannot be measured after it."""
        keep_freed_blocks()
        if self.mesh is not None:
            dist.barrier()
        return _seconds(self._call, self.calls, self.device, before=self._restore)

    def peak(self) -> int:
        """Bytes in use at the peak of a forward and backward, above the inputs."""
        peaks = []
        for _ in range(3 if self.ours else 1):
            self._restore()
            peaks.append(peak_above_inputs(self._call, self.device))
        return min(peaks)  # The first call may allocate memory that later calls reuse.

    def _restore(self) -> None:
        """Puts back the logits that a gradient has overwritten."""
        with torch.no_grad():
            for leaf, original in zip(self.overwritten, self.originals, strict=True):
                leaf.copy_(original)

    def _call(self) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Outputs, their upstream gradients, and the gradients of the inputs."""
        outputs = as_tuple(self.function(**self.inputs))
        if not self.leaves:
            return outputs, (), ()
        differentiable = [output for output in outputs if output.requires_grad]
        if self.upstream is None:
            self.upstream = upstream(differentiable)
        grads = self.upstream
        if self.checking and self.op.hidden is not None:
            grads = [upstream_of_sample(self.op, grad) for grad in grads]
        gradients = torch.autograd.grad(differentiable, self.leaves, grads)
        return outputs, grads, gradients


def _seconds(
    call: Callable[[], object],
    calls: int,
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> float:
    """The mean time of ``call``, excluding that of ``before``, which runs before each call."""
    if device.type == "cpu":
        total = 0.0
        for _ in range(calls):
            before()
            start = perf_counter()
            call()
            total += perf_counter() - start
        return total / calls
    before()
    call()  # Let the caching allocator reserve memory.
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
