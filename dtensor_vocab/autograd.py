"""What the ops' ``autograd.Function``s share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_vocab._private import in_func_transform

__all__ = ["PerToken", "differentiable_once", "empty_grad", "logits_gradient"]


class PerToken(torch.autograd.Function):
    """Base of functions of per-token tensors that return ``(*results, statistics to save)``."""

    generate_vmap_rule = True

    def __init_subclass__(cls) -> None:
        # `apply` asks for the signature at every call
        cls.forward.__signature__ = inspect.signature(cls.forward)

    @staticmethod
    def save(ctx: Any, function: str, outputs: tuple[Tensor, ...], *inputs: Tensor | None) -> None:
        """For ``setup_context``: what backward reads, and whose it is.

        The first output has a gradient, the last one is saved.
        """
        ctx.function = function
        saved = *inputs, outputs[-1]
        ctx.count = len(saved)
        ctx.save_for_backward(*saved, *_local_versions(inputs))
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)


def _local_versions(inputs: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Empty views of the local tensors of DTensors, for autograd to save.

    A DTensor does not see its local tensor edited in place, since it has a version counter of its
    own (torch 2.11 to 2.14). These views have that of the local tensor, so autograd raises. In
    compiled code it saves the local tensors themselves.
    """
    if torch.compiler.is_compiling():
        return []
    locals_ = [x.to_local() for x in inputs if isinstance(x, DTensor)]
    return [x.as_strided((0,), (1,)) for x in locals_ if not x.is_inference()]


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the gradients of a ``backward`` raise where they are differentiated again.

    Without it a gradient penalty, say, would silently get no gradient. ``backward(ctx, saved,
    *grads)`` gets the saved tensors, which checkpointing lets a node unpack once, and returns a
    tuple with the gradients of the first inputs; the others have none.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor | None) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors[: ctx.count]
        with torch.no_grad():
            gradients = backward(ctx, saved, *grads)
        gradients = (*gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients)))
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return gradients
        sources = [t for t in (*saved, *grads) if t is not None and t.requires_grad]
        return tuple(g if g is None else _Once.apply(ctx.function, g, *sources) for g in gradients)

    return once


def logits_gradient(
    ctx: Any,
    backward: Callable[..., Tensor],
    overwrite: Callable[..., None],
    grad: Tensor,
    saved: Tensor,
    logits: Tensor,
    *args: Any,
) -> Tensor:
    """The gradient of the logits by ``backward`` or, if ``ctx.inplace_backward``, in their place.

    Whoever still needs the logits then finds their version changed, and raises: also who has the
    local tensor of a DTensor, whose version is another.
    """
    functional = torch.compiler.is_compiling() or in_func_transform()
    if ctx.inplace_backward and not functional:
        overwrite(grad, saved, logits, *args)
        if isinstance(logits, DTensor):
            torch.autograd.graph.increment_version(logits.to_local())
        return logits.detach()
    return backward(grad, saved, logits, *args)


class _Once(torch.autograd.Function):
    """Identity whose backward raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.name}: expected to be differentiated once, got a second backward through its "
            "gradient, which has none"
        )


def empty_grad(logits: Tensor) -> Tensor:
    """The gradient's buffer: contiguous, whatever the strides of the logits."""
    return torch.empty_like(logits, memory_format=torch.contiguous_format)
