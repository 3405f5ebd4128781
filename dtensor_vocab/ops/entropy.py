"""``entropy``: H = -Σ p_v log p_v = log S - W / S of the softmax.

dH/dx_v = -p_v (log p_v + H)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_vocab.autograd import PerToken, differentiable_once, logits_gradient
from dtensor_vocab.inputs import check_inplace_backward, check_logits, check_temperature
from dtensor_vocab.kernel import Rows, merge_kernel, stats_per_row
from dtensor_vocab.operator import operator
from dtensor_vocab.rows import check
from dtensor_vocab.softmax import (
    Coefficients,
    SoftmaxGradient,
    empty_grad,
    merge_softmax,
    softmax_stats,
)

__all__ = ["entropy"]


@operator("gathered, rows -> rows, rows")
def entropy_merge(stats: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    """``stats [shards, *, S]`` to H ``[*]`` and (M, log S, H) ``[*, 3]``."""
    value, saved, faults = _merge(stats_per_row(stats), Rows(stats[0])(temperature))
    check("entropy", faults)
    rows = stats.shape[1:-1]
    return value.view(rows), saved.view(*rows, 3)


@entropy_merge.register_fake
def _(stats, temperature):
    rows = stats.shape[1:-1]
    return stats.new_empty(rows), stats.new_empty((*rows, 3))


@merge_kernel
def _merge(stats, temperature):
    softmax = merge_softmax(stats, temperature, weighted=True)
    saved = torch.stack([softmax.maximum, softmax.log_sum, softmax.entropy], -1)
    return softmax.entropy, saved, softmax.fault


@operator("rows, rows, logits, rows, start -> logits")
def entropy_backward(
    grad: Tensor,
    saved: Tensor,
    logits: Tensor,
    temperature: Tensor | None,
    vocab_start: Tensor,
    sizes: Sequence[int],
) -> Tensor:
    """The gradient of ``logits [*, V_local]`` for ``grad [*]``."""
    return _gradient(logits, saved, None, temperature, vocab_start, sizes, grad)


@entropy_backward.register_fake
def _(grad, saved, logits, *_):
    return empty_grad(logits)


@operator("rows, rows, logits, rows, start -> ", mutates="logits")
def entropy_backward_(
    grad: Tensor,
    saved: Tensor,
    logits: Tensor,
    temperature: Tensor | None,
    vocab_start: Tensor,
    sizes: Sequence[int],
) -> None:
    """The same, in place of the logits."""
    _gradient.overwrite(logits, saved, None, temperature, vocab_start, sizes, grad)


@entropy_backward_.register_fake
def _(*_):
    return None


@SoftmaxGradient
def _gradient(saved: Tensor, index: None, grad: Tensor) -> Coefficients:
    return entropy_coefficients(grad, saved)


def entropy_coefficients(grad: Tensor, saved: Tensor) -> Coefficients:
    """a and b of H; both 0 without an upstream gradient, even if H is NaN."""
    return Coefficients(a=torch.where(grad == 0, 0, -grad * saved[..., 2:3]), b=-grad)


class _Entropy(PerToken):
    @staticmethod
    def forward(logits, temperature, vocab_start, sizes, inplace_backward):
        stats = softmax_stats(logits, None, temperature, vocab_start, sizes, None, weighted=True)
        return entropy_merge(stats, temperature)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        *tensors, ctx.sizes, ctx.inplace_backward = inputs
        PerToken.save(ctx, "entropy", outputs, *tensors)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad, _):
        *inputs, saved = ctx.saved_tensors
        args = (grad,), saved, *inputs, ctx.sizes
        grad_logits = logits_gradient(ctx, entropy_backward, entropy_backward_, *args)
        return (grad_logits,)


def entropy(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    """Entropy of the softmax of ``logits``, in nats.

    Formula: ``H = -Σ_v p_v log p_v = log S - W / S`` with S = Σ_v e^(x_v - M) and W = Σ_v
    e^(x_v - M) (x_v - M); gradient ``-p_v (log p_v + H)``.

    Same as ``torch.distributions.Categorical(logits=logits.float()).entropy()`` on the full
    vocabulary, but for -inf logits, which contribute 0.

    Args:
        logits: ``[*, V]``, fp16, bf16, fp32 or fp64, any strides; Tensor or DTensor.
        temperature: a float > 0, or a floating tensor ``[*]``, one for each row, placed as
            the result. The softmax is of logits / temperature, gradients are for the logits.
        vocab_size: columns from it on are padding: probability and gradient 0.
        inplace_backward: let the gradient overwrite the logits. Whoever still needs them in
            backward raises (torch's "modified by an inplace operation"). Under
            ``torch.compile`` and in ``torch.func`` the gradient is a new tensor all the same.

    Returns:
        ``[*]``, fp32 (fp64 for fp64 logits), never negative; a DTensor where the logits are one:

    ==================================  =====================================
    mesh dim that places the logits as  places ``temperature`` and the result as
    ==================================  =====================================
    ``Shard(-1)`` (at most one)         ``Replicate()``
    ``Shard(d)`` of a leading dim       ``Shard(d)``
    ``Replicate()``                     ``Replicate()``
    ==================================  =====================================

    Communication: one all-gather of 4 numbers a row over the vocabulary's mesh dim forward, none
    backward, none where V is not sharded over several ranks.

    Rows: NaN for a row that is wholly -inf (its gradient is 0) or that holds NaN or +inf (its
    gradient is NaN). Gradient exactly 0 where the upstream one is 0, whatever the row holds.

    Raises:
        TypeError: for a wrong type or dtype; ValueError: for shapes, devices, meshes, placements
            or options out of bounds. Both before anything is communicated, alike on all ranks.
        RuntimeError: on every rank, for shards that do not fit together; by an assertion on the
            device, which does not wait for it.
    """
    vocabulary = check_logits("entropy", logits, vocab_size)
    temperature = check_temperature("entropy", temperature, logits)
    check_inplace_backward("entropy", inplace_backward, logits)
    return _Entropy.apply(logits, temperature, *vocabulary, inplace_backward)[0]
