"""Where tensors lie on a mesh: the vocabulary, the role of a tensor, the two collectives.

Each tensor of an operator has a role, and each mesh dim places all roles together:

================  ===================  ======================  =============================
role              tensor               mesh dim that shards V  mesh dim that shards dim ``d``
================  ===================  ======================  =============================
``logits``        ``[*, V]``           ``Shard(-1)``           ``Shard(d)``
``rows``          ``[*]``, ``[*, K]``  ``Replicate()``         ``Shard(d)``
``stats``         ``[shards, *, S]``   ``Shard(0)``            ``Shard(d + 1)``
``gathered``      ``[shards, *, S]``   ``Replicate()``         ``Shard(d + 1)``
``start``         ``[shards]``         ``Shard(0)``            ``Replicate()``
``sums``          ``[S]``              ``Replicate()``         ``Partial()``
``total``         ``[S]``, ``[]``      ``Replicate()``         ``Replicate()``
================  ===================  ======================  =============================

A mesh dim that shards nothing replicates all of them. Among the rows, a 0-d tensor is one value for
all rows. An operator that takes ``gathered`` is called by :func:`gather_and_merge`, one that takes
``total`` by :func:`all_reduce_and_finish`. The package communicates nowhere else, except to move
ids and temperatures that the caller has placed otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dtensor_vocab._private import DTensorSpec

__all__ = [
    "Sizes",
    "Vocabulary",
    "all_reduce_and_finish",
    "first_column",
    "gather_and_merge",
    "has_all_lead_dims",
    "local_tensor",
    "num_shard_dims",
    "num_shards",
    "place_vocabulary",
    "placements_of",
    "shards_vocab",
]


# ---- the vocabulary


class Sizes(NamedTuple):
    """Sizes of the whole vocabulary. Operators take it as a list."""

    columns: int
    """Columns of the logits, over all shards."""
    shard: int
    """Columns of a full shard."""
    vocab_size: int
    """Columns that are tokens; the rest is padding."""


class Vocabulary(NamedTuple):
    """How the columns of the logits lie. Operators take the two fields as arguments."""

    start: Tensor | None
    """``[shards]``, the first column of each shard; a DTensor where the logits are. None stands for
    0."""
    sizes: Sizes


def place_vocabulary(
    logits: Tensor, mesh_dim: int | None, columns: int, vocab_size: int
) -> Vocabulary:
    """The vocabulary of ``logits [*, columns]``, which ``mesh_dim`` shards, or no mesh dim."""
    if not isinstance(logits, DTensor):
        # On CPUs plain tensors and DTensors share kernels. On a GPU zeros are one more launch.
        on_cpu = logits.device.type == "cpu"
        start = torch.zeros(1, dtype=torch.int64) if on_cpu else None
        return Vocabulary(start, Sizes(columns, columns, vocab_size))
    mesh = logits.device_mesh
    shards = 1 if mesh_dim is None else mesh.size(mesh_dim)
    coordinate = mesh.get_coordinate()  # None on a rank outside of the mesh
    rank = 0 if mesh_dim is None or coordinate is None else coordinate[mesh_dim]
    shard_size = -(-columns // shards)
    start = torch.full((1,), rank * shard_size, dtype=torch.int64, device=logits.device)
    placements = [Shard(0) if i == mesh_dim else Replicate() for i in range(mesh.ndim)]
    start = DTensor.from_local(
        start, mesh, placements, run_check=False, shape=torch.Size((shards,)), stride=(1,)
    )
    return Vocabulary(start, Sizes(columns, shard_size, vocab_size))


def first_column(vocab_start: Tensor | None) -> Tensor | int:
    """The first column of this rank's shard: 0-d, or 0."""
    return 0 if vocab_start is None else vocab_start[0]


def num_shards(vocab_start: Tensor | None) -> int:
    """How many shards the ``stats`` have: 1 on each rank, all of them for a DTensor."""
    return 1 if vocab_start is None else vocab_start.shape[0]


def shards_vocab(placement: Placement, logits: Tensor) -> bool:
    return isinstance(placement, Shard) and placement.dim % logits.dim() == logits.dim() - 1


def local_tensor(x: Tensor) -> Tensor:
    """The local tensor of a DTensor, or ``x`` itself."""
    if not isinstance(x, DTensor):
        return x
    with torch.no_grad():
        return x.to_local()


# ---- the collectives


def gather_and_merge(merge: Callable[..., Any], stats: Tensor, *args: Any) -> Any:
    """``merge(stats, *args)`` of an operator that takes ``stats [shards, *, S]`` as ``gathered``.

    DTensor gathers them on the way in: an all-gather over the vocabulary's mesh dim, none where V
    is not sharded. Since the collective is part of the operator's call, checkpointing that saves
    the operator does not repeat it.
    """
    return merge(stats, *args)


def all_reduce_and_finish(finish: Callable[..., Any], sums: Tensor, *args: Any) -> Any:
    """``finish(sums, *args)`` of an operator that takes ``sums [S]`` over rows as their ``total``.

    DTensor adds them up on the way in: an all-reduce over the mesh dims that shard rows.
    """
    return finish(sums, *args)


# ---- roles and placements

_VOCAB = -1
"""Stands for the vocabulary where a mesh dim is said to shard dim ``d`` of the logits."""


def has_all_lead_dims(role: str | None) -> bool:
    """Whether a tensor of this role has all dims of the logits but the vocabulary."""
    return role in ("logits", "stats", "gathered")


def num_shard_dims(role: str | None) -> int:
    """How many dims a tensor of this role has before the leading dims of the logits."""
    return 1 if role in ("stats", "gathered") else 0


def placements_of(
    inputs: Sequence[str], specs: Sequence[DTensorSpec | None], outputs: Sequence[str]
) -> tuple[list[tuple[Placement, ...] | None], list[tuple[Placement, ...]]]:
    """The placements that an operator's inputs must have and that its outputs get.

    ``inputs`` and ``outputs`` are roles. ``specs`` say where the inputs lie now, None for one that
    is left out.
    """
    given = list(zip(inputs, specs, strict=True))
    there = [(role, spec) for role, spec in given if spec is not None]
    telling = next((pair for pair in there if has_all_lead_dims(pair[0])), there[0])
    dims, ndim = _sharded_dims(*telling)
    wanted = [
        None if spec is None else tuple(_placement(role, dim, spec.ndim) for dim in dims)
        for role, spec in given
    ]
    return wanted, [tuple(_placement(role, dim, ndim) for dim in dims) for role in outputs]


def _sharded_dims(role: str, spec: DTensorSpec) -> tuple[list[int | None], int]:
    """For each mesh dim the dim of the logits that it shards, or None; the logits' ``ndim``."""
    if role == "total":
        return [None] * len(spec.placements), 0
    shift = num_shard_dims(role)
    ndim = spec.ndim - shift
    # Shard(0) of "stats" becomes 0 - 1, which is _VOCAB.
    vocab = ndim - 1 if role == "logits" else _VOCAB
    dims = [p.dim - shift if isinstance(p, Shard) else None for p in spec.placements]
    return [_VOCAB if dim == vocab else dim for dim in dims], ndim


def _placement(role: str, dim: int | None, ndim: int) -> Placement:
    """Where a mesh dim that shards ``dim`` of the logits has a tensor of this role."""
    over_vocab = dim == _VOCAB
    if dim is None or role == "total":
        return Replicate()
    if role == "logits":
        return Shard(ndim - 1 if over_vocab else dim)
    if role == "stats" or (role == "gathered" and not over_vocab):
        return Shard(dim + 1)
    if role == "start":
        return Shard(0) if over_vocab else Replicate()
    if over_vocab or role == "gathered":
        return Replicate()
    if role == "sums":
        return Partial()
    return Replicate() if ndim == 0 else Shard(dim)
