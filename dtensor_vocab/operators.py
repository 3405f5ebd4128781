"""Registers the custom operators with their DTensor placements and their ``torch.vmap`` rule.

An operator works on local tensors. A *signature* such as ``"logits, rows, start -> stats"`` names
the role of each tensor argument and output, and :mod:`~dtensor_vocab.layout` says how each role is
placed on a mesh. DTensor redistributes an argument that is placed otherwise.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_vocab._private import (
    non_view,
    register_placements,
    run_without_dynamo,
    tensor_arguments,
)
from dtensor_vocab.layout import has_all_lead_dims, num_shard_dims, placements_of

__all__ = ["linear_arguments", "linear_signature", "operator", "with_signature"]


def operator(
    signature: str, mutates: str = ""
) -> Callable[[Callable[..., Any]], torch.library.CustomOpDef]:
    """Registers a function as ``torch.ops.dtensor_vocab.<name>``, placed as ``signature`` says.

    ``mutates`` names an argument that the function writes to. Such a function returns nothing.

    Autograd treats the outputs as constants; the public functions implement the gradients. Under
    ``torch.vmap``, the batch is one more leading dim of the logits.
    """
    inputs, outputs = (re.findall(r"\w+", side) for side in signature.split("->"))

    def register(fn: Callable[..., Any]) -> torch.library.CustomOpDef:
        name, mutated = f"dtensor_vocab::{fn.__name__}", [mutates] if mutates else []
        op = torch.library.custom_op(name, _without_views(fn), mutates_args=mutated)
        run_without_dynamo(op)
        if mutates:
            op.register_fake(lambda *_: None)
        else:
            op.register_autograd(_no_backward, setup_context=_mark_constant)
            op.register_vmap(functools.partial(_vmap, op, inputs, outputs))
        register_placements(op, lambda specs: placements_of(inputs, specs, outputs))
        return op

    return register


def linear_signature(signature: str) -> str:
    """The signature of an operator's twin. In place of each of its logits it takes three tensors:
    the operands of ``LinearLogits``, or logits and twice None.
    """
    inputs, outputs = signature.split("->")
    inputs = inputs.replace("logits", "linear, weight, weight")
    return f"{inputs}->{outputs.replace('logits', 'linear_grad, weight_grad, weight_grad')}"


def linear_arguments(args: Mapping[str, Any], logits: Collection[str]) -> dict[str, Any]:
    """The arguments of that twin, from those of the operator and the names of its logits."""
    twin: dict[str, Any] = {}
    for name, kind in args.items():
        twin[name] = kind
        if name in logits:
            twin[f"{name}_weight"] = twin[f"{name}_bias"] = Tensor | None
    return twin


def with_signature(
    fn: Callable[..., Any],
    name: str,
    args: Mapping[str, Any],
    returns: Any,
    defaults: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """``fn`` under ``name``, with a signature from which ``torch.library`` infers the schema."""

    def run(*args: Any) -> Any:
        return fn(*args)

    named: Any = run
    named.__name__ = name
    named.__signature__ = inspect.Signature(
        [
            inspect.Parameter(
                arg,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                annotation=kind,
                default=(defaults or {}).get(arg, inspect.Parameter.empty),
            )
            for arg, kind in args.items()
        ],
        return_annotation=returns,
    )
    return named


def _without_views(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with results that are not views, because autograd forbids in-place edits of those."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        results = fn(*args, **kwargs)
        if isinstance(results, Tensor):
            return non_view(results)
        return results if results is None else tuple(map(non_view, results))

    return run


def _mark_constant(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))


def _no_backward(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("dtensor_vocab: the operators have no gradients; use the public functions")


# ---- torch.vmap


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
    if "weight" in inputs:
        raise NotImplementedError("dtensor_vocab: vmap takes logits, not LinearLogits")
    # torch omits trailing arguments that equal their defaults.
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
        batch_dim = num_shard_dims(role)
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
    out_dims = tuple(map(num_shard_dims, outputs))
    return results, out_dims if len(out_dims) > 1 else out_dims[0]


def _lead_shape(
    roles: Sequence[str | None], args: Sequence[Any], in_dims: Sequence[int | None]
) -> tuple[int, ...]:
    """The leading dims of the logits of one example."""
    for role, arg, dim in zip(roles, args, in_dims, strict=True):
        if has_all_lead_dims(role):
            shape = list(arg.shape)
            if dim is not None:
                del shape[dim]
            return tuple(shape[num_shard_dims(role) : -1])
    return ()
