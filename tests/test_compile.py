"""Whole steps under ``torch.compile``: one graph, the results of eager code, few recompilations."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.ops import OPS, Op
from tests.ranks import on_mesh
from tests.step import compiled, draw_batch, loss_of, train

BACKENDS = ["eager", "aot_eager", "inductor"]


@pytest.mark.parametrize("op", OPS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_step(op: Op, backend: str) -> None:
    check_step(op, backend, None)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", OPS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_step_on_ranks(op: Op, backend: str, eager_kernels: None) -> None:
    with on_mesh((2,)) as mesh:
        check_step(op, backend, mesh)


def check_step(op: Op, backend: str, mesh: DeviceMesh | None) -> None:
    batch, loss = draw_batch(op, mesh=mesh), loss_of(op)
    expected = train(loss, batch)
    actual = train(compiled(loss, backend=backend), batch)
    for got, wanted in zip(actual, expected, strict=True):
        assert type(got) is type(wanted)
        if isinstance(wanted, DTensor):
            assert got.placements == wanted.placements
            got, wanted = got.to_local(), wanted.to_local()
        torch.testing.assert_close(got, wanted)
