"""How tensors are placed on a mesh: the vocabulary, the roles of tensors, the two collectives.

Each tensor of an operator has a role. What a mesh dim shards decides its placement for every role:

================  ===================  ======================  =============================
role              tensor               mesh dim that shards V  mesh dim that shards dim ``d``
================  ===================  ======================  =============================
``logits``        ``[*, V]``           ``Shard(-1)``           ``Shard(d)``
``hidden``        ``[*, H]``           ``Replicate()``         ``Shard(d)``
``hidden_grad``   ``[*, H]``           ``Partial()``           ``Shard(d)``
``weight``        ``[V, H]``, ``[V]``  ``Shard(0)``            ``Replicate()``
``weight_grad``   ``[V, H]``, ``[V]``  ``Shard(0)``            ``Partial()``
``rows``          ``[*]``, ``[*, K]``  ``Replicate()``         ``Shard(d)``
``stats``         ``[shards, *, S]``   ``Shard(0)``            ``Shard(d + 1)``
``gathered``      ``[shards, *, S]``   ``Replicate()``         ``Shard(d + 1)``
``start``         ``[shards]``         ``Shard(0)``            ``Replicate()``
``sums``          ``[S]``              ``Replicate()``         ``Partial()``
``total``         ``[S]``, ``[]``      ``Replicate()``         ``Replicate()``
================  ===================  ======================  =============================

A mesh dim that shards nothing replicates all of them. A 0-d tensor with the role ``rows`` is one
value for all rows. Operators on ``LinearLogits`` have two more roles: ``linear`` is ``hidden`` if
the argument after it, the weight, is given, and ``logits`` otherwise; ``linear_grad`` is
``hidden_grad`` or ``logits`` likewise.

:func:`gather_and_merge` calls the operators that take ``gathered``, and
:func:`all_reduce_and_finish` those that take ``total``. These calls are the only ones that
communicate, except that the checks of arguments redistribute ids and temperatures that the caller
has placed otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dtensor_vocab._private import DTensorSpec, is_flattened
from dtensor_vocab.linear_logits import Logits, OnMesh, is_dtensor

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
    "replicated",
    "row_numbers",
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
    """Columns that are tokens. The columns after them are padding."""


class Vocabulary(NamedTuple):
    """How the columns are split over shards. Operators take the two fields as arguments."""

    start: Tensor | None
    """``[shards]``, the first column of each shard; a DTensor if the logits are one. None is 0."""
    sizes: Sizes


def place_vocabulary(
    logits: Logits, mesh_dim: int | None, columns: int, vocab_size: int
) -> Vocabulary:
    """The layout of the vocabulary of ``logits [*, columns]``.

    ``mesh_dim`` is the mesh dim that shards it, None if no mesh dim does.
    """
    if not is_dtensor(logits):
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
    """The size of the first dim of ``stats``: 1 for a local tensor, the number of shards for a
    DTensor."""
    return 1 if vocab_start is None else vocab_start.shape[0]


def shards_vocab(placement: Placement, logits: Logits | OnMesh) -> bool:
    return isinstance(placement, Shard) and placement.dim % logits.dim() == logits.dim() - 1


def local_tensor(x: Tensor) -> Tensor:
    """The local tensor of a DTensor, or ``x`` itself."""
    if not isinstance(x, DTensor):
        return x
    with torch.no_grad():
        return x.to_local()


def replicated(values: Tensor, logits: OnMesh) -> DTensor:
    """The same values on every rank of the logits' mesh, as a DTensor."""
    mesh = logits.device_mesh
    return DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)


def row_numbers(logits: Logits) -> Tensor:
    """The position of each row among all rows, ``[*]``, replicated if the logits are on a mesh."""
    lead = logits.shape[:-1]
    numbers = torch.arange(math.prod(lead), device=logits.device).view(lead)
    return replicated(numbers, logits) if is_dtensor(logits) else numbers


# ---- the collectives


def gather_and_merge(merge: Callable[..., Any], stats: Tensor, *args: Any) -> Any:
    """Calls the operator ``merge``, which takes ``stats [shards, *, S]`` in the role ``gathered``.

    DTensor therefore redistributes ``stats`` before the operator runs: by an all-gather over the
    vocabulary's mesh dim, or not at all if V is not sharded. Since the collective is part of the
    call, checkpointing that saves the operator's outputs does not repeat it.
    """
    return merge(stats, *args)


def all_reduce_and_finish(finish: Callable[..., Any], sums: Tensor, *args: Any) -> Any:
    """Calls the operator ``finish``, which takes ``sums [S]`` over rows in the role ``total``.

    DTensor therefore adds them up before the operator runs, by an all-reduce over the mesh dims
    that shard rows: one for each of several mesh dims, unless the caller has flattened these into
    one (torch 2.13).
    """
    if isinstance(sums, DTensor):
        partial = [i for i, p in enumerate(sums.placements) if p.is_partial()]
        if len(partial) > 1 and not is_flattened(sums.device_mesh, tuple(partial)):
            # DTensor would log a warning if it was to add up all of them.
            for i in partial[:-1]:
                placements = list(sums.placements)
                placements[i] = Replicate()
                sums = sums.redistribute(placements=placements)
    return finish(sums, *args)


# ---- roles and placements

_VOCAB = -1
"""The vocabulary, where this module refers to a dim of the logits by its number."""


def has_all_lead_dims(role: str | None) -> bool:
    """Whether a tensor of this role has all dims of the logits but the vocabulary."""
    return role in ("logits", "hidden", "stats", "gathered")


def num_shard_dims(role: str | None) -> int:
    """How many dims a tensor of this role has before the leading dims of the logits."""
    return 1 if role in ("stats", "gathered") else 0


def placements_of(
    inputs: Sequence[str], specs: Sequence[DTensorSpec | None], outputs: Sequence[str]
) -> tuple[list[tuple[Placement, ...] | None], list[tuple[Placement, ...]]]:
    """The placements that an operator's inputs must have and that its outputs get.

    ``inputs`` and ``outputs`` are roles. ``specs`` are those of the inputs as they are now, None
    for one that is left out.
    """
    inputs, outputs = _resolved(inputs, specs, outputs)
    given = list(zip(inputs, specs, strict=True))
    there = [(role, spec) for role, spec in given if spec is not None]
    telling = next((pair for pair in there if has_all_lead_dims(pair[0])), there[0])
    dims, ndim = _sharded_dims(*telling)
    weight = next((spec for role, spec in there if role == "weight"), None)
    if weight is not None:
        shards = (isinstance(p, Shard) for p in weight.placements)
        dims = [_VOCAB if shard else dim for dim, shard in zip(dims, shards, strict=True)]
    wanted = [
        None if spec is None else tuple(_placement(role, dim, spec.ndim) for dim in dims)
        for role, spec in given
    ]
    return wanted, [tuple(_placement(role, dim, ndim) for dim in dims) for role in outputs]


def _resolved(
    inputs: Sequence[str], specs: Sequence[DTensorSpec | None], outputs: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The roles with ``hidden`` or ``logits`` in place of ``linear``, and so for the gradients."""
    roles, grads = list(inputs), []
    for i, role in enumerate(inputs):
        if role == "linear":
            roles[i] = "logits" if specs[i + 1] is None else "hidden"
            grads.append("logits" if specs[i + 1] is None else "hidden_grad")
    of_linear = iter(grads)
    return roles, [next(of_linear) if role == "linear_grad" else role for role in outputs]


def _sharded_dims(role: str, spec: DTensorSpec) -> tuple[list[int | None], int]:
    """For each mesh dim, the dim of the logits that it shards or None; and the logits' ``ndim``."""
    if role == "total":
        return [None] * len(spec.placements), 0
    shift = num_shard_dims(role)
    ndim = spec.ndim - shift
    # Shard(0) of "stats" becomes 0 - 1, which is _VOCAB.
    vocab = ndim - 1 if role == "logits" else _VOCAB
    dims = [p.dim - shift if isinstance(p, Shard) else None for p in spec.placements]
    return [_VOCAB if dim == vocab else dim for dim in dims], ndim


def _placement(role: str, dim: int | None, ndim: int) -> Placement:
    """How a mesh dim that shards ``dim`` of the logits places a tensor of this role."""
    if dim is None or (role == "rows" and ndim == 0):
        return Replicate()
    over_vocab, over_rows = {
        "logits": (Shard(ndim - 1), Shard(dim)),
        "hidden": (Replicate(), Shard(dim)),
        "hidden_grad": (Partial(), Shard(dim)),
        "weight": (Shard(0), Replicate()),
        "weight_grad": (Shard(0), Partial()),
        "rows": (Replicate(), Shard(dim)),
        "stats": (Shard(0), Shard(dim + 1)),
        "gathered": (Replicate(), Shard(dim + 1)),
        "start": (Shard(0), Replicate()),
        "sums": (Replicate(), Partial()),
        "total": (Replicate(), Replicate()),
    }[role]
    return over_vocab if dim == _VOCAB else over_rows
