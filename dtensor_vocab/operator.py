"""Declares the package's custom operators: the kernel, its placements, its place in autograd.

An operator works on local tensors. What it means on DTensors is said by a *signature*, a string
such as ``"logits, rows, start -> stats"`` that names the role of each tensor argument and
output. Each mesh dim places the roles together:

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

A mesh dim that shards nothing holds all of them as ``Replicate()``. An argument that is placed
otherwise is redistributed on the way in. In a call of this package there are two such steps: from
``stats`` to ``gathered``, an all-gather over the vocabulary's mesh dim, and from ``sums`` over rows
to their ``total``, an all-reduce over the mesh dims that shard rows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dtensor_vocab._private import (
    DTensorSpec,
    non_view,
    register_placements,
    run_without_dynamo,
    tensor_arguments,
)

__all__ = ["operator"]

WHOLE = ("logits", "stats", "gathered")
"""The roles that have all leading dims of the logits."""
VOCAB = -1
"""Stands for the vocabulary where a mesh dim is said to shard dim ``d`` of the logits."""


def operator(
    signature: str, mutates: str = ""
) -> Callable[[Callable[..., Any]], torch.library.CustomOpDef]:
    """Registers a function as ``torch.ops.dtensor_vocab.<name>``, placed as ``signature`` says.

    ``mutates`` names an argument that it writes to, in place of an output.

    The outputs are constants to autograd: gradients are the public functions' affair. Under
    ``torch.vmap``, the batch is one more leading dim of the logits.
    """
    inputs, outputs = (re.findall(r"\w+", side) for side in signature.split("->"))

    def placements(
        specs: Sequence[DTensorSpec | None],
    ) -> tuple[list[tuple[Placement, ...] | None], list[tuple[Placement, ...]]]:
        given = list(zip(inputs, specs, strict=True))
        there = [(role, spec) for role, spec in given if spec is not None]
        dims, ndim = next(
            (_sharded_dims(role, spec) for role, spec in there if role in WHOLE),
            _sharded_dims(*there[0]),
        )
        wanted = [
            None if spec is None else tuple(_placement(role, dim, spec.ndim) for dim in dims)
            for role, spec in given
        ]
        return wanted, [tuple(_placement(role, dim, ndim) for dim in dims) for role in outputs]

    def register(fn: Callable[..., Any]) -> torch.library.CustomOpDef:
        name, mutated = f"dtensor_vocab::{fn.__name__}", [mutates] if mutates else []
        op = torch.library.custom_op(name, _without_views(fn), mutates_args=mutated)
        run_without_dynamo(op)
        if not mutates:
            op.register_autograd(_no_backward, setup_context=_mark_constant)
            op.register_vmap(functools.partial(_vmap, op, inputs, outputs))
        register_placements(op, placements)
        return op

    return register


def _without_views(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with results that are not views, which autograd would not let the caller edit."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        results = fn(*args, **kwargs)
        if isinstance(results, Tensor):
            return non_view(results)
        return results if results is None else tuple(map(non_view, results))

    return run


def _sharded_dims(role: str, spec: DTensorSpec) -> tuple[list[int | None], int]:
    """For each mesh dim the dim of the logits that it shards, or None; the logits' ``ndim``."""
    if role == "total":
        return [None] * len(spec.placements), 0
    shift = 1 if role in ("stats", "gathered") else 0
    ndim = spec.ndim - shift
    vocab = ndim - 1 if role == "logits" else -1
    dims = [p.dim - shift if isinstance(p, Shard) else None for p in spec.placements]
    return [VOCAB if dim == vocab else dim for dim in dims], ndim


def _placement(role: str, dim: int | None, ndim: int) -> Placement:
    """Where a mesh dim that shards ``dim`` of the logits has a tensor of this role."""
    if dim is None or role == "total":
        return Replicate()
    if role == "sums":
        return Replicate() if dim == VOCAB else Partial()
    if role == "logits":
        return Shard(ndim - 1 if dim == VOCAB else dim)
    if role in ("stats", "gathered"):
        return Shard(dim + 1) if role == "stats" or dim != VOCAB else Replicate()
    if role == "start":
        return Shard(0) if dim == VOCAB else Replicate()
    # Among the rows, a 0-d tensor is one value for all of them.
    return Replicate() if dim == VOCAB or ndim == 0 else Shard(dim)


def _mark_constant(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))


def _no_backward(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("dtensor_vocab: the operators have no gradients, the public functions do")


def _vmap(
    op: torch.library.CustomOpDef,
    inputs: Sequence[str],
    outputs: Sequence[str],
    info: Any,
    in_dims: tuple[int | None, ...],
    *args: Any,
) -> tuple[Any, Any]:
    if any(isinstance(arg, DTensor) for arg in args):
        raise NotImplementedError("dtensor_vocab: vmap takes plain tensors, not DTensors")
    # torch leaves out arguments that have their default, the last ones
    names = iter(inputs)
    roles = [
        next(names) if wanted else None
        for _, wanted in zip(args, tensor_arguments(op), strict=False)
    ]
    batched: list[Any] = []
    lead = _lead_shape(roles, args, in_dims)
    for role, arg, dim in zip(roles, args, in_dims, strict=True):
        if not isinstance(arg, Tensor) or role == "start":
            batched.append(arg)
            continue
        batch_dim = _batch_dim(role)
        per_example = arg.dim() - (dim is not None)
        one_for_all_rows = role == "rows" and per_example == 0 and lead != ()
        if dim is not None:
            arg = arg.movedim(dim, batch_dim)
        elif not one_for_all_rows:
            arg = arg.unsqueeze(batch_dim)
            arg = arg.expand(*arg.shape[:batch_dim], info.batch_size, *arg.shape[batch_dim + 1 :])
        if one_for_all_rows and dim is not None:
            arg = arg.view(-1, *[1] * len(lead)).expand(-1, *lead)
        batched.append(arg)
    results = op(*batched)
    out_dims = tuple(map(_batch_dim, outputs))
    return results, out_dims if len(out_dims) > 1 else out_dims[0]


def _lead_shape(
    roles: Sequence[str | None], args: Sequence[Any], in_dims: Sequence[int | None]
) -> tuple[int, ...]:
    """The leading dims of the logits of one example."""
    for role, arg, dim in zip(roles, args, in_dims, strict=True):
        if role in WHOLE:
            shape = list(arg.shape)
            if dim is not None:
                del shape[dim]
            return tuple(shape[0 if role == "logits" else 1 : -1])
    return ()


def _batch_dim(role: str | None) -> int:
    return 1 if role in ("stats", "gathered") else 0
