"""``kl_div``: KL(A || B) = Σ p_A (log p_A - log p_B), forward (A the teacher) or reverse.

With m and s of both and the cross term c = Σ e^(a_v - m_A) ((a_v - m_A) - (b_v - m_B)) of each
shard r, and with M, S over the whole vocabulary,

    KL = C / S_A - log S_A + log S_B,
    C = Σ_r e^(m_Ar - M_A) (c_r + s_Ar ((m_Ar - M_A) - (m_Br - M_B)))

With a temperature, exponents and C are divided by it.

    dKL/da_v = p_A (log p_A - log p_B - KL),  dKL/db_v = p_B - p_A

c is +inf where A has mass on a token that B masks with -inf. It is sent as c / 2^24, or
finite masks would overflow it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_vocab.autograd import PerToken, differentiable_once, empty_grad
from dtensor_vocab.inputs import (
    check_bool,
    check_logits,
    check_teacher,
    check_temperature,
    saveable,
)
from dtensor_vocab.kernel import Rows, flat, kernel, merge_kernel, stats_per_row
from dtensor_vocab.operator import operator
from dtensor_vocab.pair_gradient import PairGradient, gradients_of_pair
from dtensor_vocab.rows import (
    assert_sound,
    coverage,
    fault,
    math_dtype,
    merge_norm,
    prepare,
    rebase,
    scaled,
    weigh,
)

__all__ = ["KLDiv", "kl_div", "kl_div_stats"]


@operator("logits, logits, rows, start -> stats")
def kl_div_stats(
    a: Tensor,
    b: Tensor,
    temperature: Tensor | None,
    vocab_start: Tensor,
    sizes: Sequence[int],
    cross: bool,
) -> Tensor:
    """Statistics ``[1, *, S]`` of ``a, b [*, V_local]``: m_A, s_A, coverage, m_B, s_B, (c)."""
    stats = _new_stats(a, b, vocab_start, cross)
    rows = Rows(a, b)
    if rows.count == 0:
        return stats
    if b.shape != a.shape:  # of a DTensor with other shards: no coverage, which all ranks see
        return stats.fill_(torch.nan)
    args = rows(temperature), vocab_start[0], a.shape[-1], sizes, cross
    return _shard_stats(*rows.logits, *args).view(stats.shape)


@kl_div_stats.register_fake
def _(a, b, temperature, vocab_start, sizes, cross):
    return _new_stats(a, b, vocab_start, cross)


def _new_stats(a, b, vocab_start, cross) -> Tensor:
    return a.new_empty((vocab_start.shape[0], *a.shape[:-1], 5 + cross), dtype=math_dtype(a, b))


@kernel
def _shard_stats(a, b, temperature, start, columns, sizes, cross):
    dtype = math_dtype(a, b)
    a, b = (prepare(x, start, sizes, dtype) for x in flat(a, b))
    maximum_a, maximum_b = a.amax(-1), b.amax(-1)
    x = rebase(a, maximum_a.unsqueeze(-1), None)
    y = rebase(b, maximum_b.unsqueeze(-1), None)
    mass = scaled(x, temperature).exp()
    sound = coverage(a, start, columns, sizes, temperature)
    stats = [maximum_a, mass.sum(-1), sound, maximum_b, scaled(y, temperature).exp().sum(-1)]
    if not cross:
        return torch.stack(stats, -1)
    # of mass that is 0 in fp32, infinite is what b alone masks
    gap = a / 2 - b / 2  # halved, it is infinite for nothing else
    nothing = torch.where(gap == torch.inf, gap, 0)
    terms = torch.where(mass > 0, mass * (x - y), nothing)
    c = terms.sum(-1, dtype=torch.float64) * SCALE
    return torch.stack([*stats, c.to(dtype)], -1)


SCALE = 2.0**-24
"""Of the cross term as it is sent: one over the most columns that there may be in fp32."""


@operator("gathered, rows -> rows, rows")
def kl_div_merge(stats: Tensor, temperature: Tensor | None, function: str) -> tuple[Tensor, Tensor]:
    """``stats [shards, *, 6]`` to KL ``[*]`` and (M_A, log S_A, M_B, log S_B, KL) ``[*, 5]``."""
    value, saved, faults = _merge(stats_per_row(stats), Rows(stats[0])(temperature))
    assert_sound(function, faults, temperature is not None)
    lead = stats.shape[1:-1]
    return value.view(lead), saved.view(*lead, 5)


@kl_div_merge.register_fake
def _(stats, *_):
    lead = stats.shape[1:-1]
    return stats.new_empty(lead), stats.new_empty((*lead, 5))


@merge_kernel
def _merge(stats, temperature):
    m_a, s_a, sound, m_b, s_b, c = stats.unbind(-1)
    maximum_a, total_a, shift_a = merge_norm(m_a, s_a, temperature)
    maximum_b, total_b, _ = merge_norm(m_b, s_b, temperature)
    log_sum_a, log_sum_b = total_a.log(), total_b.log()
    shift = rebase(m_a, maximum_a.unsqueeze(-1), None) - rebase(m_b, maximum_b.unsqueeze(-1), None)
    # "is infinite" does not pass through a product: the weight of the shard may be 0
    cross = weigh(shift_a.exp(), c + s_a * SCALE * shift)
    cross = torch.where(c == torch.inf, c, cross).sum(-1, keepdim=True)
    cross = scaled(cross / total_a.unsqueeze(-1) / SCALE, temperature).squeeze(-1)
    value = (cross - log_sum_a + log_sum_b).clamp_min(0)
    saved = torch.stack([maximum_a, log_sum_a, maximum_b, log_sum_b, value], -1)
    return value, saved, fault(sound)


@operator("rows, rows, logits, logits, rows, start -> logits")
def kl_div_backward(
    grad: Tensor,
    saved: Tensor,
    a: Tensor,
    b: Tensor,
    temperature: Tensor | None,
    vocab_start: Tensor,
    sizes: Sequence[int],
    to_a: bool,
) -> Tensor:
    """The gradient of ``a [*, V_local]`` or of ``b``, for ``grad [*]``."""
    return _gradient.one(a, b, to_a, grad, saved, temperature, vocab_start, sizes)


@kl_div_backward.register_fake
def _(grad, saved, a, b, temperature, vocab_start, sizes, to_a):
    return empty_grad(a if to_a else b)


@operator("rows, rows, logits, logits, rows, start -> logits, logits")
def kl_div_backward_both(
    grad: Tensor,
    saved: Tensor,
    a: Tensor,
    b: Tensor,
    temperature: Tensor | None,
    vocab_start: Tensor,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The gradients of ``a [*, V_local]`` and ``b``, for ``grad [*]``, in one pass."""
    return _gradient.both(a, b, grad, saved, temperature, vocab_start, sizes)


@kl_div_backward_both.register_fake
def _(grad, saved, a, b, *_):
    return empty_grad(a), empty_grad(b)


@PairGradient
def _gradient(
    log_p_a: Tensor, log_p_b: Tensor, grad: Tensor, saved: Tensor
) -> tuple[Tensor, Tensor]:
    p_a, value = log_p_a.exp(), saved[..., 4:5]
    # log p_b may have overflowed to -inf where there is no mass; a value of NaN is to be seen
    nothing = (p_a == 0) & (value >= 0)
    slope = torch.where(nothing, 0, p_a * (log_p_a - log_p_b - value))
    return grad * slope, grad * (log_p_b.exp() - p_a)


class KLDiv(PerToken):
    @staticmethod
    def forward(a, b, temperature, vocab_start, sizes, function):
        stats = kl_div_stats(a, b, temperature, vocab_start, sizes, True)
        return kl_div_merge(stats, temperature, function)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        *tensors, ctx.sizes, function = inputs
        PerToken.save(ctx, function, outputs, *tensors)

    @staticmethod
    @differentiable_once
    def backward(ctx, tensors, grad, _):
        a, b, temperature, vocab_start, saved = tensors
        args = grad, saved, a, b, temperature, vocab_start, ctx.sizes
        return gradients_of_pair(ctx, kl_div_backward, kl_div_backward_both, *args)


def kl_div(
    student: Tensor,
    teacher: Tensor,
    *,
    reverse: bool = False,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
) -> Tensor:
    """Kullback-Leibler divergence of the softmaxes of two logits, over the whole vocabulary.

    Formula: with t, s the softmax of teacher and student, forward
    ``KL(t || s) = Σ_v t_v (log t_v - log s_v)``, reverse ``KL(s || t)``. The gradient of KL(A || B)
    is ``p_A (log p_A - log p_B - KL)`` in A's logits and ``p_B - p_A`` in B's. No factor of
    temperature² is applied.

    Same as ``F.kl_div(log_softmax(student), log_softmax(teacher), log_target=True,
    reduction="none").sum(-1)`` on the full vocabulary, arguments swapped for reverse, except that
    a token whose logits are -inf in both contributes 0 instead of NaN.

    Args:
        student: ``[*, V]``, fp16, bf16, fp32 or fp64, any strides; Tensor or DTensor.
        teacher: like ``student`` in shape, mesh and placements; its dtype may be another.
        reverse: KL(s || t) in place of KL(t || s).
        temperature: positive float, or a floating-point tensor of positive values: ``[*]``, one per
            row, placed as the result, or 0-d, one for all rows. The softmax is of
            ``logits / temperature``; gradients are with respect to ``logits``, and none flows to
            the temperature.
        vocab_size: number of columns that are tokens. The columns after them are padding, with
            probability 0 and gradient 0. Default: V.

    Returns:
        ``[*]``, fp32 (fp64 if either is), never negative, exactly 0 for equal logits. Gradients
        flow to those of the two that need one, each in its own dtype; a DTensor where they are:

    ==================================  =====================================
    mesh dim that places the logits as  places ``temperature`` and the result as
    ==================================  =====================================
    ``Shard(-1)`` (at most one)         ``Replicate()``
    ``Shard(d)`` of a leading dim       ``Shard(d)``
    ``Replicate()``                     ``Replicate()``
    ==================================  =====================================

    Communication: one all-gather of 6 numbers per row over the vocabulary's mesh dim forward, none
    backward, none where V is not sharded over several ranks.

    Rows: a token that is -inf in both contributes 0. +inf, with gradient 0 for both, where A is
    not -inf on a token that B masks with -inf. NaN where either row is wholly -inf (gradient 0)
    or holds NaN or +inf (gradient NaN). Gradient exactly 0 where the upstream one is 0.

    Raises:
        TypeError: if an argument has an unsupported type or dtype.
        ValueError: if shapes, devices, meshes, placements or options are invalid, or if V > 2**24
            unless the logits are fp64. Like TypeError, on every rank before any communication.
        RuntimeError: if, on any rank, a value of a temperature tensor is not positive and finite
            or the shards do not fit together.
            An asynchronous assertion on the device raises it, on every rank that has a share of the
            row; the host does not wait for it.
    """
    check_bool("kl_div", reverse, "reverse")
    vocabulary = check_logits("kl_div", student, vocab_size, "student")
    student, teacher = saveable(student), check_teacher("kl_div", teacher, student)
    temperature = check_temperature("kl_div", temperature, student)
    a, b = (student, teacher) if reverse else (teacher, student)
    return KLDiv.apply(a, b, temperature, *vocabulary, "kl_div")[0]
