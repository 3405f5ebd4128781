"""What the ops' ``autograd.Function``s share: saving, ``vmap``, and the limit at one backward."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

__all__ = ["PerToken", "differentiable_once"]


class PerToken(torch.autograd.Function):
    """Base of functions of per-token tensors that return ``(output, statistics to save)``.

    Only the first output carries a gradient. ``save`` is for ``setup_context``.
    """

    def __init_subclass__(cls) -> None:
        cls.vmap = staticmethod(lambda info, in_dims, *args: _vmap(cls, info, in_dims, args))

    @staticmethod
    def save(ctx: Any, outputs: tuple[Tensor, ...], *tensors: Tensor | None) -> None:
        ctx.save_for_backward(*tensors, outputs[1])
        ctx.mark_non_differentiable(outputs[1])
        ctx.set_materialize_grads(False)


def _vmap(cls: type[PerToken], info: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> Any:
    """The batch is one more leading dim, which the functions have any number of."""
    names = inspect.signature(cls.forward).parameters
    lead = next(a.dim() - (d is not None) for a, d in zip(args, in_dims, strict=True)) - 1

    def batched(name: str, arg: Any, dim: int | None) -> Any:
        if not isinstance(arg, Tensor) or name == "vocab_start":
            return arg
        if dim is None:
            return arg.expand(info.batch_size, *arg.shape) if arg.dim() else arg
        arg = arg.movedim(dim, 0)
        if name == "temperature" and arg.dim() == 1 and lead:  # one temperature for all rows
            rows = args[0].movedim(in_dims[0], 0).shape[1:-1] if in_dims[0] is not None else args[0].shape[:-1]
            arg = arg.view(-1, *[1] * lead).expand(-1, *rows)
        return arg

    outputs = cls.apply(*map(batched, names, args, in_dims))
    return outputs, (0,) * len(outputs)


class _Once(torch.autograd.Function):
    """The identity on a gradient; an error for whoever differentiates through it."""

    @staticmethod
    def forward(name: str, gradient: Tensor, *depends_on: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(f"{ctx.name}: expected one backward, got a second through its gradient, "
                           "which is not differentiable")


def differentiable_once(name: str, gradient: Tensor, *depends_on: Tensor) -> Tensor:
    """``gradient`` with an error in place of its own gradient (never a silent zero)."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return gradient
    return _Once.apply(name, gradient, *depends_on)
