"""Runs tests marked ``ranks(n)`` on n spawned gloo ranks, all those of one n in one go."""

from __future__ import annotations

import logging
import os

# Each process would start a pool of compilers, for the few small kernels that it compiles.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch

from tests.ranks import RealRanks, World

logging.getLogger("torch.__trace").propagate = False  # pages of it in every failure
torch.set_num_threads(1)  # as ranks have: kernels know their number, and are compiled once for all


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(n): runs on n spawned processes, over gloo")
    config.addinivalue_line("markers", "cuda: needs a GPU")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def eager_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler for tests of what lies around the kernels: their cases would take minutes."""
    monkeypatch.setenv("DTENSOR_VOCAB_KERNELS", "eager")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    size = _ranks(pyfuncitem)
    if size is None or World.current is not None:
        return None
    _real_ranks(pyfuncitem.session, size).replay(pyfuncitem.nodeid)
    return True


def _ranks(item: pytest.Item) -> int | None:
    marker = item.get_closest_marker("ranks")
    return None if marker is None else marker.args[0]


def _real_ranks(session: pytest.Session, size: int) -> RealRanks:
    runs: dict[int, RealRanks] = session.stash.setdefault(RUNS, {})
    if size not in runs:
        node_ids = [item.nodeid for item in session.items if _ranks(item) == size]
        runs[size] = RealRanks(size, node_ids, session.config.rootpath)
    return runs[size]


RUNS: pytest.StashKey[dict[int, RealRanks]] = pytest.StashKey()
