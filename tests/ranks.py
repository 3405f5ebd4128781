"""Two ways to run a test on the ranks of a device mesh.

Simulated: ``on_mesh(shape)`` in an ordinary test runs all ranks in this one process, with real
values, under torch's ``LocalTensorMode`` over a process group that communicates nothing. This is
cheap and serves tests of layouts, but ranks that disagree do not hang here.

Real: a test marked ``@pytest.mark.ranks(n)`` runs in n processes over gloo, started once for all
such tests of a session (see conftest.py), beside the tests of this process. There ``on_mesh`` gives
a mesh of these processes. ``ranks(1)`` is for tests that mostly wait for processes of their own.

``parts`` gives the local tensors of a tensor of either kind, by rank, as far as they are in this
process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

SIMULATED_RANKS = 16
COLLECTIVE_TIMEOUT = 30.0
"""Seconds that a real rank waits for its peers in a collective before the test fails."""
TEST_TIMEOUT = 300.0
"""Seconds without the end of a test after which the real ranks are killed."""


# ------------------------------------------------------------------ meshes


@contextlib.contextmanager
def on_mesh(shape: Sequence[int]) -> Iterator[DeviceMesh]:
    """A CPU mesh of this shape, over real ranks where there are any, else over simulated ones."""
    shape = tuple(shape)
    if World.current is not None:
        assert math.prod(shape) == World.current.size, f"no mesh {shape} on these ranks"
        yield _mesh(shape, World.current.generation)
        return
    _simulate()
    with LocalTensorMode(frozenset(range(math.prod(shape)))):
        yield _mesh(shape, 0)


@functools.cache
def _simulate() -> None:
    dist.init_process_group("fake", rank=0, world_size=SIMULATED_RANKS, store=FakeStore())


@functools.cache
def _mesh(shape: tuple[int, ...], generation: int) -> DeviceMesh:
    """One mesh per shape, since DTensor caches by equality of meshes, not of process groups."""
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape))


# ------------------------------------------------------------------ tensors on them


def part(
    full: Tensor, mesh_shape: Sequence[int], placements: Sequence[Placement], rank: int
) -> Tensor:
    """The view of ``full`` that ``rank`` holds by the rule of ``torch.chunk``."""
    for mesh_dim, placement in enumerate(placements):
        size = mesh_shape[mesh_dim]
        coordinate = rank // math.prod(mesh_shape[mesh_dim + 1 :]) % size
        if isinstance(placement, Shard):
            dim = placement.dim % full.dim()
            chunks = full.chunk(size, dim) if full.shape[dim] else ()
            empty = full.narrow(dim, 0, 0)
            full = chunks[coordinate] if coordinate < len(chunks) else empty
    return full


def distribute(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """``full`` as a DTensor, without communication. Parts of strided tensors stay strided."""
    parts = {}
    for rank in ranks_here(mesh):
        local = part(full, mesh.shape, placements, rank).detach()
        parts[rank] = local.contiguous() if full.is_contiguous() else local
    return from_parts(parts, mesh, placements, full.shape)


def from_parts(
    parts: dict[int, Tensor],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None = None,
) -> DTensor:
    """A DTensor of the local tensors. Without ``shape``, each rank infers it from its own."""
    local = LocalTensor(parts) if World.current is None else parts[World.current.rank]
    if shape is None:
        return DTensor.from_local(local, mesh, placements, run_check=False)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def parts(tensor: Tensor) -> dict[int, Tensor]:
    """The local tensors behind a tensor of either kind, by rank."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if isinstance(tensor, LocalTensor):
        return dict(sorted(tensor._local_tensors.items()))
    return {0 if World.current is None else World.current.rank: tensor.detach()}


def ranks_here(mesh: DeviceMesh) -> list[int]:
    """The ranks of the mesh that live in this process."""
    return list(range(mesh.size())) if World.current is None else [World.current.rank]


# ------------------------------------------------------------------ what they send


class Collective(NamedTuple):
    """One collective: its name, and the shape of the tensor that each rank in this process gave."""

    name: str
    payload: dict[int, tuple[int, ...]]


class Collectives(TorchDispatchMode):
    """Records the collectives that start inside."""

    NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor")
    NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls the op on local tensors, which come here.
        namespace, _, name = str(getattr(func, "_name", "")).partition(".")[0].partition("::")
        if namespace in self.NAMESPACES and name not in self.NO_COLLECTIVES:
            given = next(a for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, Tensor))
            shapes = {rank: tuple(local.shape) for rank, local in parts(given).items()}
            self.seen.append(Collective(name, shapes))
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------ real ranks


class World:
    """The process group of a spawned rank, which is made anew after each failure."""

    current: World | None = None

    def __init__(self, rank: int, size: int, directory: Path, collective_timeout: float) -> None:
        self.rank, self.size, self.directory = rank, size, directory
        self.timeout = timedelta(seconds=collective_timeout)
        self.generation = self.exchanges = self.tests = 0
        self.store = dist.FileStore(str(directory / "outcomes"), size)
        self.store.set_timeout(timedelta(seconds=TEST_TIMEOUT))
        self._join()

    def _join(self) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.directory}/group{self.generation}",
            rank=self.rank,
            world_size=self.size,
            timeout=self.timeout,
        )

    def gather(self, value: Any) -> list[Any]:
        """Each rank's ``value``, exchanged through the store instead of the process group.

        ``all_gather_object`` needs numpy, and a process group that works.
        """
        self.exchanges += 1
        self.store.set(f"{self.exchanges}/{self.rank}", pickle.dumps(value))
        keys = [f"{self.exchanges}/{rank}" for rank in range(self.size)]
        self.store.wait(keys, self.timeout)
        return [pickle.loads(self.store.get(key)) for key in keys]

    def settle(self, name: str, passed: bool) -> None:
        """Waits until all ranks are done with a test, and makes a new process group if one failed.

        The count of exchanges starts anew, since a rank that failed may have made fewer.
        """
        self.store.set(f"{name}/{self.rank}", str(passed))
        outcomes = [self.store.get(f"{name}/{rank}") for rank in range(self.size)]
        self.tests += 1
        self.exchanges = self.tests << 16
        if all(outcome == b"True" for outcome in outcomes):
            return
        dist.destroy_process_group()
        torch.compiler.reset()  # Compiled code holds the old group.
        self.generation += 1
        self._join()


class RankOutcome(NamedTuple):
    """How a test ended on one rank."""

    passed: bool
    skipped: bool
    text: str


class RealRanks:
    """Runs the given tests once on ``size`` processes and keeps their outcomes.

    The processes work in the background. The first access to ``outcomes`` waits for them.
    """

    def __init__(
        self,
        size: int,
        node_ids: list[str],
        root: Path,
        collective_timeout: float = COLLECTIVE_TIMEOUT,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory()
        spawn = multiprocessing.get_context("spawn")
        args = size, node_ids, root, Path(self._directory.name), collective_timeout
        self._ranks = [spawn.Process(target=_run_rank, args=(rank, *args)) for rank in range(size)]
        for rank in self._ranks:
            rank.start()

    @property
    def working(self) -> bool:
        return any(rank.is_alive() for rank in self._ranks)

    @functools.cached_property
    def outcomes(self) -> list[dict[str, RankOutcome]]:
        """The outcomes by rank and test, once all are done. ``exits`` then holds the exit codes."""
        with self._directory as name:
            try:
                self._wait(Path(name))
            finally:
                self.exits = [rank.exitcode for rank in self._ranks]
                self.stop()
            return [self._read(Path(name), rank) for rank in range(len(self._ranks))]

    def stop(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):  # A rank leads a group with its children.
                os.killpg(rank.pid, signal.SIGKILL)
            rank.kill()
            rank.join()

    def _wait(self, directory: Path) -> None:
        """Waits until all are done, one has died, or none has finished a test for too long."""
        size, since = -1, time.monotonic()
        while self.working:
            if any(rank.exitcode for rank in self._ranks):
                time.sleep(1)  # The peers write their outcomes.
                return
            written = sum(file.stat().st_size for file in directory.glob("*.jsonl"))
            if written != size:
                size, since = written, time.monotonic()
            elif time.monotonic() - since > TEST_TIMEOUT:
                return
            time.sleep(0.05)

    def _read(self, directory: Path, rank: int) -> dict[str, RankOutcome]:
        file = directory / f"{rank}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return {name: RankOutcome(*outcome) for name, *outcome in map(json.loads, lines)}

    def replay(self, node_id: str) -> None:
        """Passes, fails or skips as the test did on the ranks."""
        outcomes = [by_name.get(node_id) for by_name in self.outcomes]
        failures = [
            f"rank {rank}: never ended (exit code {self.exits[rank]})"
            if outcome is None
            else f"rank {rank}: {outcome.text}"
            for rank, outcome in enumerate(outcomes)
            if outcome is None or not (outcome.passed or outcome.skipped)
        ]
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)
        for outcome in outcomes:
            if outcome is not None and outcome.skipped:
                pytest.skip(outcome.text)


def _run_rank(
    rank: int, size: int, node_ids: list[str], root: Path, directory: Path, timeout: float
) -> None:
    """A spawned rank runs an inner pytest session over the same tests in the same order."""
    os.setpgrp()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    os.chdir(root)
    World.current = World(rank, size, directory, timeout)
    with open(directory / f"{rank}.jsonl", "w", buffering=1) as report:
        code = pytest.main(
            ["-q", "-s", "-p", "no:cacheprovider", f"--rootdir={root}", *node_ids],
            plugins=[_Rank(World.current, report)],
        )
    os._exit(0 if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else 1)


class _Rank:
    """The plugin of the inner session, which synchronises the ranks and reports outcomes."""

    def __init__(self, world: World, report: Any) -> None:
        self.world, self.report = world, report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        self.reports: list[pytest.TestReport] = []
        torch.manual_seed(0)
        result = yield
        failed = [report for report in self.reports if report.failed]
        skipped = [report for report in self.reports if report.skipped]
        self.world.settle(item.nodeid, not failed)
        text = "\n".join(report.longreprtext for report in failed or skipped)
        outcome = (item.nodeid, not failed and not skipped, bool(skipped) and not failed, text)
        self.report.write(json.dumps(outcome) + "\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)
