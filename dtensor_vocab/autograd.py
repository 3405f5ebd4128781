"""The ``autograd.Function`` of an op, made from its forward and its gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_vocab._private import in_func_transform
from dtensor_vocab.layout import local_tensor

__all__ = ["PerToken", "empty_grad", "is_functional", "overwritten"]


class PerToken(torch.autograd.Function):
    """Base class of the ops' autograd functions, which are differentiable once.

    A subclass defines a static ``forward``, whose first result is differentiable and whose last
    result is saved for backward. ``keep(ctx, inputs, outputs)`` stores options in ``ctx`` and
    returns further tensors to save. ``gradients(ctx, grad, saved, *kept)`` returns the gradients of
    the leading inputs. Both are static methods, by default those of ``gradient``. ``function``
    names the op in errors.
    """

    function: str
    gradient: Gradient
    generate_vmap_rule = True

    def __init_subclass__(cls) -> None:
        subclass: Any = cls
        # ``apply`` inspects the signature at every call.
        subclass.forward.__signature__ = inspect.signature(cls.forward)
        own = vars(cls)
        keep, gradients = (
            getattr(cls if name in own else cls.gradient, name) for name in ("keep", "gradients")
        )
        subclass.setup_context = staticmethod(_setup_context(cls.function, keep))
        subclass.backward = staticmethod(_differentiable_once(gradients))


class Gradient(Protocol):
    """Which tensors :class:`PerToken` keeps for backward, and the gradients from them."""

    keep: Callable[..., Sequence[Tensor | None]]
    gradients: Callable[..., tuple[Tensor | None, ...]]


def _setup_context(function: str, keep: Callable[..., Any]) -> Callable[..., None]:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        ctx.function = function
        tensors = outputs[-1], *keep(ctx, inputs, outputs)
        ctx.num_tensors = len(tensors)
        ctx.save_for_backward(*tensors, *_local_versions(tensors))
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)

    return setup_context


def _local_versions(tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Empty views of the local tensors of DTensors, for autograd to save.

    A DTensor does not see its local tensor edited in place, since it has a version counter of its
    own (torch 2.11 to 2.14). These views share the counter of the local tensor, so autograd raises.
    In compiled code autograd saves the local tensors themselves.
    """
    if torch.compiler.is_compiling():
        return []
    locals_ = [local_tensor(x) for x in tensors if isinstance(x, DTensor)]
    return [x.as_strided((0,), (1,)) for x in locals_ if not x.is_inference()]


def _differentiable_once(gradients_of: Callable[..., Any]) -> Callable[..., Any]:
    """A backward whose gradients raise when they are differentiated again.

    Otherwise a gradient penalty, for example, would silently get no gradient.
    """

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        num_inputs, grad = len(ctx.needs_input_grad), grads[0]
        if grad is None:
            return (None,) * num_inputs
        tensors = ctx.saved_tensors[: ctx.num_tensors]  # Read once: checkpointing forbids more.
        with torch.no_grad():
            gradients = gradients_of(ctx, grad, *tensors)
        gradients = (*gradients, *[None] * (num_inputs - len(gradients)))
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return gradients
        sources = [t for t in (*tensors, grad) if t is not None and t.requires_grad]
        return tuple(g if g is None else _Once.apply(ctx.function, g, *sources) for g in gradients)

    return backward


class _Once(torch.autograd.Function):
    """Identity whose backward raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: str, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.function = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.function}: expected to be differentiated once, got a second backward through "
            "its gradient, which has none"
        )


# ---- buffers of gradients


def empty_grad(logits: Tensor) -> Tensor:
    """The gradient's buffer: contiguous, whatever the strides of the logits."""
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def is_functional() -> bool:
    """Whether backward must not write in place. Under ``torch.compile`` Inductor plans memory, and
    ``torch.func`` transforms need pure functions.
    """
    return torch.compiler.is_compiling() or in_func_transform()


def overwritten(logits: Tensor) -> Tensor:
    """The gradient that was written in place of ``logits``.

    Any op that saved the logits, or the local tensor of a DTensor, sees a changed version counter.
    """
    if isinstance(logits, DTensor):
        torch.autograd.graph.increment_version(local_tensor(logits))
    return logits.detach()
