"""``logits_from_local``: plain local shards of logits as a DTensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_vocab.checks import check_int

__all__ = ["logits_from_local"]


def logits_from_local(local: Tensor, mesh: DeviceMesh, columns: int) -> DTensor:
    """DTensor logits from each rank's share of the columns, a plain tensor.

    For heads that return plain local shards. Same as ``DTensor.from_local`` with the global shape,
    which it needs where V is not a multiple of the number of ranks.

    Args:
        local: ``[*, V_local]``, this rank's share of V as torch.chunk splits it: ceil(V / ranks)
            columns, and fewer or none on the last ranks. Leading dims are the same on all ranks.
        mesh: a 1-D mesh, such as ``mesh["tp"]``, over which the columns are sharded.
        columns: V, with padding if the shards have some.

    Returns:
        logits ``[*, V]``, placed ``Shard(-1)``, with the memory of ``local``. A gradient flows back
        to ``local``.

    Communication: none. A share of another width is an error of the op that takes the logits, on
    all ranks.

    Raises:
        TypeError, ValueError: if an argument has an unsupported type, or the mesh is not 1-D.
    """
    name = "logits_from_local"
    if not isinstance(local, Tensor) or isinstance(local, DTensor):
        got = type(local).__name__
        raise TypeError(f"{name}: expected local to be a plain Tensor, got {got}")
    if local.dim() == 0:
        raise ValueError(f"{name}: expected local of shape [*, V_local], got []")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{name}: expected mesh to be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f'{name}: expected a 1-D mesh, such as mesh["tp"], got {mesh}')
    columns = check_int(name, columns, "columns")
    if columns <= 0:
        raise ValueError(f"{name}: expected columns > 0, got {columns}")
    shape = torch.Size((*local.shape[:-1], columns))
    stride = torch.empty(shape, device="meta").stride()
    placements = [Shard(local.dim() - 1)]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
