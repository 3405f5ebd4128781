"""The ``autograd.Function`` of an op, made from its forward and its gradients."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_vocab._private import in_func_transform
from dtensor_vocab.layout import local_tensor
from dtensor_vocab.linear_logits import LinearLogits, Logits, joined, separate

__all__ = ["PerToken", "empty_grad", "is_functional", "overwritten"]


class PerToken(torch.autograd.Function):
    """Base class of the ops' autograd functions, which are differentiable once.

    A subclass defines a static ``forward``, whose first result is differentiable and whose last
    result is saved for backward. ``keep(ctx, inputs, outputs)`` stores options in ``ctx`` and
    returns further tensors to save. ``gradients(ctx, grad, saved, *kept)`` returns the gradients of
    the leading inputs. Both are static methods, by default those of ``gradient``. ``function``
    names the op in errors. :meth:`call` takes the inputs of ``forward``, of which the first
    ``num_logits`` may be ``LinearLogits``. For these ``gradients`` returns a ``LinearLogits`` of
    the gradients of their operands.
    """

    function: str
    gradient: Gradient
    num_logits = 1
    call: Callable[..., Any]
    generate_vmap_rule = True

    def __init_subclass__(cls) -> None:
        subclass: Any = cls
        own = vars(cls)
        keep, gradients = (
            getattr(cls if name in own else cls.gradient, name) for name in ("keep", "gradients")
        )
        subclass.call = staticmethod(_on_logits(cls, cls.num_logits))
        subclass.forward = staticmethod(_on_operands(cls.forward, cls.num_logits))
        subclass.setup_context = staticmethod(_setup_context(cls.function, cls.num_logits, keep))
        subclass.backward = staticmethod(_differentiable_once(cls.num_logits, gradients))


def _on_logits(function: type[PerToken], num_logits: int) -> Callable[..., Any]:
    """``function.apply`` with the logits in place of their three inputs.

    Dynamo does not read a class attribute of an ``autograd.Function`` (torch 2.11 to 2.14).
    """

    def call(*args: Any) -> Any:
        logits, others = args[:num_logits], args[num_logits:]
        inputs = [*itertools.chain(*map(separate, logits)), *others]
        if torch.compiler.is_compiling():  # Dynamo refuses the same tensor twice (torch 2.13).
            for i, x in enumerate(inputs):
                if isinstance(x, Tensor) and any(x is other for other in inputs[:i]):
                    inputs[i] = x.view_as(x)
        return function.apply(*inputs)

    return call


def _on_operands(forward: Callable[..., Any], num_logits: int) -> Callable[..., Any]:
    """``forward`` with three inputs in place of each of its logits."""

    def run(*inputs: Any) -> Any:
        return forward(*_joined(inputs, num_logits))

    parameters: list[inspect.Parameter] = []
    for i, parameter in enumerate(inspect.signature(forward).parameters.values()):
        suffixes = ("", "_weight", "_bias") if i < num_logits else ("",)
        parameters += (parameter.replace(name=f"{parameter.name}{x}") for x in suffixes)
    # ``apply`` inspects the signature at every call, and Dynamo counts its parameters.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _joined(inputs: Sequence[Any], num_logits: int) -> tuple[Any, ...]:
    end = 3 * num_logits
    return *(joined(inputs[i : i + 3]) for i in range(0, end, 3)), *inputs[end:]


class Gradient(Protocol):
    """Which tensors :class:`PerToken` keeps for backward, and the gradients from them."""

    keep: Callable[..., Sequence[Tensor | None]]
    gradients: Callable[..., tuple[Tensor | None, ...]]


def _setup_context(function: str, num_logits: int, keep: Callable[..., Any]) -> Callable[..., None]:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        ctx.function = function
        kept = keep(ctx, _joined(inputs, num_logits), outputs)
        ctx.linear = tuple(isinstance(x, LinearLogits) for x in kept)
        tensors = outputs[-1], *itertools.chain(*map(_operands, kept))
        ctx.num_tensors = len(tensors)
        ctx.save_for_backward(*tensors, *_local_versions(tensors))
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)

    return setup_context


def _operands(x: Logits | None) -> tuple[Tensor | None, ...]:
    return tuple(x) if isinstance(x, LinearLogits) else (x,)


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


def _differentiable_once(num_logits: int, gradients_of: Callable[..., Any]) -> Callable[..., Any]:
    """A backward whose gradients raise when they are differentiated again.

    Otherwise a gradient penalty, for example, would silently get no gradient.
    """

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        num_inputs, grad = len(ctx.needs_input_grad), grads[0]
        if grad is None:
            return (None,) * num_inputs
        tensors = ctx.saved_tensors[: ctx.num_tensors]  # Read once: checkpointing forbids more.
        saved, *operands = tensors
        kept = []
        for linear in ctx.linear:
            if linear:
                kept.append(LinearLogits(*operands[:3]))
            else:
                kept.append(operands[0])
            operands = operands[3 if linear else 1 :]
        with torch.no_grad():
            gradients = gradients_of(ctx, grad, saved, *kept)
        to_logits = itertools.chain(*map(separate, gradients[:num_logits]))
        gradients = *to_logits, *gradients[num_logits:]
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
