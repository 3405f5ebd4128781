"""``kl_div``: KL(A || B) = Σ p_A (log p_A - log p_B), forward (A the teacher) or reverse.

Each shard r gives m and s of A and of B and the cross term c (see :mod:`dtensor_vocab.pair`). With
M and S over the whole vocabulary,

    KL = C / S_A - log S_A + log S_B,
    C = Σ_r e^(m_Ar - M_A) (c_r + s_Ar ((m_Ar - M_A) - (m_Br - M_B)))

A temperature divides the exponents and C.

    dKL/da_v = p_A (log p_A - log p_B - KL),  dKL/db_v = p_B - p_A

c is +inf where A has mass on a token that B masks with -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_vocab.autograd import PerToken
from dtensor_vocab.checks import (
    check_bool,
    check_logits,
    check_softcap,
    check_teacher,
    check_temperature,
    placed_by_row,
)
from dtensor_vocab.faults import assert_no_faults, passed_checks
from dtensor_vocab.kernel import merge_kernel
from dtensor_vocab.layout import gather_and_merge
from dtensor_vocab.linear_logits import Logits
from dtensor_vocab.numerics import scaled
from dtensor_vocab.operators import operator
from dtensor_vocab.pair import PairGradient, cross_scale, kl_div_stats, merge_pair_sums
from dtensor_vocab.row_blocks import ByRow, stats_per_row

__all__ = ["KLDiv", "kl_div"]


@operator("gathered, rows -> rows, rows")
def kl_div_merge(stats: Tensor, temperature: Tensor | None, function: str) -> tuple[Tensor, Tensor]:
    """``stats [shards, *, 6]`` to KL ``[*]`` and (M_A, log S_A, M_B, log S_B, KL) ``[*, 5]``."""
    value, saved, passed = _merged(stats_per_row(stats), ByRow(stats[0])(temperature))
    assert_no_faults(function, passed, temperature is not None)
    lead = stats.shape[1:-1]
    return value.view(lead), saved.view(*lead, 5)


@kl_div_merge.register_fake
def _(stats, *_):
    lead = stats.shape[1:-1]
    return stats.new_empty(lead), stats.new_empty((*lead, 5))


@merge_kernel
def _merged(stats, temperature):
    m_a, s_a, covered, m_b, s_b, c = stats.unbind(-1)
    sums = merge_pair_sums(m_a, s_a, m_b, s_b, c, temperature=temperature)
    maximum_a, total_a, maximum_b, total_b, cross = sums
    log_sum_a, log_sum_b = total_a.log(), total_b.log()
    cross = (cross / total_a / cross_scale()).unsqueeze(-1)
    cross = scaled(cross, temperature).squeeze(-1)
    value = (cross - log_sum_a + log_sum_b).clamp_min(0)
    saved = torch.stack([maximum_a, log_sum_a, maximum_b, log_sum_b, value], -1)
    return value, saved, passed_checks(covered)


@PairGradient("kl_div")
def _gradient(
    grad: Tensor, saved: Tensor, log_p_a: Tensor, log_p_b: Tensor
) -> tuple[Tensor, Tensor]:
    p_a, value = log_p_a.exp(), saved[..., 4:5]
    # log p_b may have overflowed to -inf where p_a is 0. NaN fails the comparison and propagates.
    without_mass = (p_a == 0) & (value >= 0)
    slope = torch.where(without_mass, 0, p_a * (log_p_a - log_p_b - value))
    return grad * slope, grad * (log_p_b.exp() - p_a)


class KLDiv(PerToken):
    function, gradient, num_logits = "kl_div", _gradient, 2

    @staticmethod
    def forward(a, b, temperature, vocab_start, sizes, softcap, function):
        stats = kl_div_stats(a, b, temperature, vocab_start, sizes, True, softcap)
        return gather_and_merge(kl_div_merge, stats, temperature, function)

    @staticmethod
    def keep(ctx, inputs, outputs):
        *inputs, ctx.function = inputs
        return _gradient.keep(ctx, inputs, outputs)


def kl_div(
    student: Logits,
    teacher: Logits,
    *,
    reverse: bool = False,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
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
        student: ``[*, V]``, fp16, bf16, fp32 or fp64, any strides; Tensor, DTensor or
            :class:`LinearLogits`.
        teacher: of the shape, device, mesh and placements of ``student``. Its dtype may be another,
            and it may be a :class:`LinearLogits` beside a tensor, or the reverse.
        reverse: KL(s || t) in place of KL(t || s).
        temperature: positive float, or a floating-point tensor of positive values: ``[*]``, one per
            row, placed as the result, or 0-d, one for all rows. It
            divides the logits of both inputs. Gradients are those of the undivided logits, and none
            flows to the temperature.
        vocab_size: number of columns that are tokens. The columns after them are padding, with
            probability 0 and gradient 0. Default: V.
        softcap: like that of :func:`logprobs`.

    Returns:
        ``[*]``, fp32 (fp64 if either is), never negative, exactly 0 for equal logits. Each input
        that requires a gradient gets one in its own dtype. The result is a DTensor if the logits
        are, placed as in this table:

    ==================================  =====================================
    mesh dim that places the logits as  places ``temperature`` and the result as
    ==================================  =====================================
    ``Shard(-1)`` (at most one)         ``Replicate()``
    ``Shard(d)`` of a leading dim       ``Shard(d)``
    ``Replicate()``                     ``Replicate()``
    ==================================  =====================================

    Communication: forward one all-gather of 6 numbers per row over the vocabulary's mesh dim, or
    nothing where V is not sharded over several ranks. Backward communicates nothing.

    Rows: a token that is -inf in both contributes 0. The value is +inf, with gradient 0 for both
    inputs, where A is not -inf on a token that B masks with -inf. If either row is wholly -inf, the
    value is NaN and the gradient 0. If either holds NaN or +inf, both are NaN. The gradient is
    exactly 0 where the upstream gradient is 0.

    Raises:
        TypeError: if an argument has an unsupported type or dtype.
        ValueError: if shapes, devices, meshes, placements or options are invalid, or if V > 2**24
            unless the logits are fp64. All ranks raise the same TypeError or ValueError before any
            communication, if they agree on the global shapes.
        RuntimeError: if, on any rank, a temperature is not a positive normal number
            or the shards do not fit together.
            An asynchronous assertion on the device raises it, on every rank that takes part in the
            collective; the host does not wait for it.
    """
    check_bool("kl_div", reverse, "reverse")
    student, vocabulary = check_logits("kl_div", student, vocab_size, "student")
    teacher = check_teacher("kl_div", teacher, student)
    temperatures = check_temperature("kl_div", temperature, student)
    softcap = check_softcap("kl_div", softcap, student)
    (temperatures,) = placed_by_row(student, temperatures)
    a, b = (student, teacher) if reverse else (teacher, student)
    return KLDiv.call(a, b, temperatures, *vocabulary, softcap, "kl_div")[0]
