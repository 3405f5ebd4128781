"""Rank 0 of a mesh alone, in this process, over a process group that communicates nothing.

For what simulated ranks cannot show: the graphs and the operators that one rank runs. What its
collectives give is no result, and is not checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from tests.ranks import on_mesh, part


@contextlib.contextmanager
def lone_rank(*shape: int) -> Iterator[DeviceMesh]:
    """A mesh of this shape that outlives the simulation of its ranks."""
    with on_mesh(shape) as mesh:
        pass
    with mock.patch.object(torch, "_assert_async", lambda *_: None):
        yield mesh


def place_part(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """``full`` as a DTensor, of which this rank holds its part."""
    local = part(full, mesh.shape, placements, 0).detach()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
