"""Runs tests marked ``ranks(n)`` on n spawned gloo ranks, which are started once per n."""

from __future__ import annotations

import logging
import os

# Otherwise each process starts a pool of compile workers for the few small kernels it compiles.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch

from tests.ranks import RealRanks, World

# Otherwise the trace log fills the report of a failed test.
logging.getLogger("torch.__trace").propagate = False
# Compiled kernels depend on the number of threads. Ranks have one thread, so they can share the
# kernels of this process if it has one thread too.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(n): runs on n spawned processes, over gloo")
    config.addinivalue_line("markers", "cuda: needs a GPU")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def eager_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the kernels eagerly. Compiling them for tests of the code around them takes minutes."""
    monkeypatch.setenv("DTENSOR_VOCAB_KERNELS", "eager")


# ------------------------------------------------------------------ real ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on real ranks come last, since the ranks work in the background."""
    items.sort(key=_ranks)


def pytest_collection_finish(session: pytest.Session) -> None:
    waiting = session.stash[WAITING] = {}
    if World.current is None:
        for item in filter(_ranks, session.items):
            waiting.setdefault(_ranks(item), []).append(item.nodeid)
            item.fixturenames = []  # The ranks make the fixtures.


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Starts the ranks of one size after another, before fixtures change the environment.

    Two sizes work at once when this process has no more tests of its own.
    """
    runs, waiting = item.session.stash.setdefault(RUNS, {}), item.session.stash[WAITING]
    at_once = 2 if _ranks(item) else 1
    while waiting and sum(run.working for run in runs.values()) < at_once:
        size = next(iter(waiting))
        runs[size] = RealRanks(size, waiting.pop(size), item.config.rootpath)


def pytest_sessionfinish(session: pytest.Session) -> None:
    for run in session.stash.get(RUNS, {}).values():
        run.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if _ranks(pyfuncitem) == 0 or World.current is not None:
        return None
    pyfuncitem.session.stash[RUNS][_ranks(pyfuncitem)].replay(pyfuncitem.nodeid)
    return True


def _ranks(item: pytest.Item) -> int:
    marker = item.get_closest_marker("ranks")
    return 0 if marker is None else marker.args[0]


WAITING: pytest.StashKey[dict[int, list[str]]] = pytest.StashKey()
RUNS: pytest.StashKey[dict[int, RealRanks]] = pytest.StashKey()
