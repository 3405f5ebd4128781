"""A mesh of which only rank 0 exists, over a process group that communicates nothing.

It shows the graphs and operators that one rank runs, which simulated ranks cannot show. The results
of its collectives are meaningless, so tests do not check them.
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
    """Yields a mesh of this shape, outside of the simulation of its ranks."""
    with on_mesh(shape) as mesh:
        pass
    with mock.patch.object(torch, "_assert_async", lambda *_: None):
        yield mesh


def place_part(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Returns ``full`` as a DTensor, of which this process holds the part of rank 0."""
    local = part(full, mesh.shape, placements, 0).detach()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
