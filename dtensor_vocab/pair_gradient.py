"""The gradients of functions of two softmaxes: one read of both logits, one write for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtensor_vocab.autograd import empty_grad
from dtensor_vocab.kernel import Rows, flat, kernel
from dtensor_vocab.rows import log_prob, math_dtype, prepare, scaled

__all__ = ["PairGradient", "gradients_of_pair", "log_probs"]


class PairGradient:
    """Makes both gradients, or one, from an op's ``gradients(log_p_a, log_p_b, grad, saved, ...)``.

    It returns both, for temperature 1, and is part of the kernel: what it computes for the one that
    is not wanted is dropped there. ``saved [*, 5+]`` starts with M and log S of ``a`` and of ``b``
    and a value that is +inf where there is no gradient.
    """

    def __init__(self, gradients: Callable[..., tuple[Tensor, Tensor]]) -> None:
        def both(a, b, grad, saved, temperature, start, sizes, *values):
            logs = log_probs(a, b, saved, temperature, start, sizes)
            live = (grad != 0) & (saved[..., 4:5] != torch.inf)
            live = live & (saved[..., :1] != -torch.inf) & (saved[..., 2:3] != -torch.inf)
            return tuple(
                torch.where(live, scaled(gradient, temperature), 0).to(x.dtype)
                for gradient, x in zip(gradients(*logs, grad, saved, *values), (a, b), strict=True)
            )

        def one(a, b, to_a, *args):
            return both(a, b, *args)[0 if to_a else 1]

        self._both, self._one = kernel(both), kernel(one)

    def both(self, a: Tensor, b: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        """The gradients of ``a [*, V_local]`` and ``b``, contiguous, each in its dtype.

        ``args`` are ``grad [*]``, ``saved``, ``temperature`` or None, ``vocab_start [1]``,
        ``sizes``, and the values that the op's function takes.
        """
        if a.numel() == 0:
            return empty_grad(a), empty_grad(b)
        rows = Rows(a, b)
        to_a, to_b = self._both(*rows.logits, *_by_rows(rows, *args))
        return to_a.view(a.shape), to_b.view(b.shape)

    def one(self, a: Tensor, b: Tensor, to_a: bool, *args: Any) -> Tensor:
        """The gradient of ``a`` or of ``b`` alone."""
        if a.numel() == 0:
            return empty_grad(a if to_a else b)
        rows = Rows(a, b)
        return self._one(*rows.logits, to_a, *_by_rows(rows, *args)).view(a.shape)


def _by_rows(rows: Rows, grad, saved, temperature, vocab_start, *values) -> list[Any]:
    return [rows(grad), rows(saved), rows(temperature), vocab_start[0], *values]


def log_probs(
    a: Tensor,
    b: Tensor,
    norms: Tensor,
    temperature: Tensor | None,
    start: Tensor,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """log p of both, with (M, log S) of both at the start of ``norms``; for use in a kernel."""
    maximum_a, log_sum_a, maximum_b, log_sum_b = norms[..., :4].split(1, dim=-1)
    dtype = math_dtype(a, b)
    x_a, x_b = (prepare(x, start, sizes, dtype) for x in flat(a, b))
    log_p_a = log_prob(x_a, maximum_a, log_sum_a, temperature)
    return log_p_a, log_prob(x_b, maximum_b, log_sum_b, temperature)


def gradients_of_pair(
    ctx: Any, one: Callable[..., Tensor], both: Callable[..., tuple[Tensor, Tensor]], *args: Any
) -> tuple[Tensor | None, ...]:
    """For a ``backward``: the gradients of the first two inputs, of those that need one."""
    to_a, to_b = ctx.needs_input_grad[:2]
    if to_a and to_b:
        return both(*args)
    gradient = one(*args, to_a)
    return (gradient,) if to_a else (None, gradient)
