"""Measures the runs of a group in turns, each in fresh processes of its own.

The processes of a group live side by side and get ready at the same time, but while one run is
timed, or its memory measured, the others wait: what is compared is of the same moment.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from bench.cases import Group, Run
from bench.worker import serve, serve_machine

__all__ = ["BenchError", "Result", "copy_bandwidth", "measure"]

ENOUGH = 0.8
"""A run that was timed three times is timed no more after this long (s)."""
PATIENCE = 300
"""How long an answer is waited for (s): getting ready includes compilation."""
PRELOADED = ["bench", "torch._inductor.compile_fx", "bench.worker"]
PRELOADED_FOR_CPU = [*PRELOADED, "bench.warm"]


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
            f"{self.run.provider:24} {self.seconds * 1e3:9.2f} ms {self.peak / 2**20:8.1f} MiB"
            f"  {self.run.case}"
        )


def measure(group: Group, device: str, rounds: int) -> list[Result]:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_run_workers(run, device)) for run in group]
        for worker in workers:
            worker.answer()  # when it is ready
        peaks = [worker.ask("peak") for worker in workers]
        times: list[list[float]] = [[] for _ in group]
        for _ in range(rounds):
            for worker, seconds in zip(workers, times, strict=True):
                if len(seconds) < 3 or sum(seconds) < ENOUGH:
                    seconds.append(worker.ask("seconds"))
    return [
        Result(run, statistics.median(seconds), peak)
        for run, seconds, peak in zip(group, times, peaks, strict=True)
    ]


def copy_bandwidth(device: str) -> float:
    """Bytes read and written a second by a large copy; checks the measure of memory as well."""
    with _workers(serve_machine, [(device,)], "the machine", device) as worker:
        worker.answer()
        return worker.ask("copy_bandwidth")


class Workers:
    """The processes of one run, one a rank, each at the other end of a pipe."""

    def __init__(self, name: str, processes: list[BaseProcess], pipes: list[Connection]) -> None:
        self.name, self.processes, self.pipes = name, processes, pipes

    def ask(self, command: str) -> Any:
        for pipe in self.pipes:
            pipe.send(command)
        return self.answer()

    def answer(self) -> Any:
        """The highest of what the ranks answer."""
        return max(self._answer(pipe) for pipe in self.pipes)

    def _answer(self, pipe: Connection) -> Any:
        if not pipe.poll(PATIENCE):
            raise BenchError(f"{self.name}: no answer in {PATIENCE} s")
        try:
            went_well, answer = pipe.recv()
        except EOFError:
            raise BenchError(
                f"{self.name}: its process ended, perhaps for want of memory"
            ) from None
        if not went_well:
            raise BenchError(f"{self.name}:\n{answer}")
        return answer


@contextlib.contextmanager
def _run_workers(run: Run, device: str) -> Iterator[Workers]:
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        ranks = [(run, rank, rendezvous, device) for rank in range(run.case.ranks)]
        with _workers(serve, ranks, f"{run.case}, {run.provider}", device) as workers:
            yield workers


@contextlib.contextmanager
def _workers(
    target: Callable[..., None], ranks: list[tuple[Any, ...]], name: str, device: str
) -> Iterator[Workers]:
    # Forked from a process that has torch imported, and that has not touched a GPU
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_FOR_CPU if device == "cpu" else PRELOADED)
    processes, pipes = [], []
    try:
        for args in ranks:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, *args), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        workers = Workers(name, processes, pipes)
        yield workers
        for pipe in pipes:
            pipe.send("stop")
        for process in processes:
            process.join(PATIENCE)
    finally:
        for process in processes:
            process.kill()
            process.join()
