"""``js_div``: the generalised Jensen-Shannon divergence of student s and teacher t,

    β KL(t || m) + (1 - β) KL(s || m),  m = β t + (1 - β) s

    d/ds-logits = (1 - β) s (log(s/m) - KL(s || m)),  d/dt-logits = β t (log(t/m) - KL(t || m))

The terms need both distributions normalised over the whole vocabulary, so there are two
collectives: one for the softmax statistics and one for the sums of the terms. (Agarwal et al.,
https://arxiv.org/abs/2306.13649, section 2.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtensor_vocab.autograd import PerToken
from dtensor_vocab.checks import (
    check_logits,
    check_softcap,
    check_teacher,
    check_temperature,
    check_weight,
    placed_by_row,
)
from dtensor_vocab.faults import assert_no_faults, passed_checks
from dtensor_vocab.kernel import kernel, merge_kernel
from dtensor_vocab.layout import first_column, gather_and_merge, num_shards
from dtensor_vocab.linear_logits import Logits
from dtensor_vocab.numerics import least_exponent, sum_in_fp64
from dtensor_vocab.operators import operator
from dtensor_vocab.ops.kl_div import KLDiv
from dtensor_vocab.pair import PairGradient, kl_div_stats, log_probs, merge_pair_sums
from dtensor_vocab.row_blocks import ByRow, stats_per_row
from dtensor_vocab.shard_stats import stats_operator

__all__ = ["js_div"]


@operator("gathered, rows -> rows")
def js_div_normalize(stats: Tensor, temperature: Tensor | None) -> Tensor:
    """``stats [shards, *, 5]`` of ``kl_div_stats`` to (M, log S) of both, ``[*, 4]``."""
    norms, passed = _norms(stats_per_row(stats), ByRow(stats[0])(temperature))
    assert_no_faults("js_div", passed, temperature is not None)
    return norms.view(*stats.shape[1:-1], 4)


@js_div_normalize.register_fake
def _(stats, temperature):
    return stats.new_empty((*stats.shape[1:-1], 4))


@merge_kernel
def _norms(stats, temperature):
    m_s, s_s, covered, m_t, s_t = stats.unbind(-1)
    maximum_s, total_s, maximum_t, total_t = merge_pair_sums(
        m_s, s_s, m_t, s_t, temperature=temperature
    )
    norms = torch.stack([maximum_s, total_s.log(), maximum_t, total_t.log()], -1)
    return norms, passed_checks(covered)


def _combine(stats: Tensor, temperature: Tensor | None, beta: float) -> list[Tensor]:
    """Merges the terms ``[rows, blocks, 2]`` of blocks of a shard."""
    return [stats.sum(1)]


@stats_operator("logits, logits, rows, rows, start -> stats", _combine, covered=None)
def js_div_stats(
    student: Tensor,
    teacher: Tensor,
    norms: Tensor,
    temperature: Tensor | None,
    vocab_start: Tensor | None,
    sizes: Sequence[int],
    beta: float,
    softcap: float | None = None,
) -> Tensor:
    """A shard's terms ``[1, *, 2]`` of KL(s || m) and KL(t || m)."""
    stats = _new_stats(student, norms, vocab_start)
    if student.numel() == 0:
        return stats.zero_()
    by_row = ByRow(student, teacher)
    args = by_row(norms), by_row(temperature), first_column(vocab_start), sizes, beta, softcap
    return _terms(*by_row.logits, *args).view(stats.shape)


@js_div_stats.register_fake
def _(student, teacher, norms, temperature, vocab_start, *_):
    return _new_stats(student, norms, vocab_start)


def _new_stats(student, norms, vocab_start) -> Tensor:
    return norms.new_empty((num_shards(vocab_start), *student.shape[:-1], 2))


@kernel
def _terms(student, teacher, norms, temperature, start, sizes, beta, softcap):
    logs = log_probs(student, teacher, norms, temperature, start, sizes, softcap)
    s, log_s_m, t, log_t_m = _ratios(*logs, beta)
    return torch.stack([sum_in_fp64(s * log_s_m), sum_in_fp64(t * log_t_m)], -1)


def _ratios(log_s: Tensor, log_t: Tensor, beta: Any) -> tuple[Tensor, ...]:
    """s, log(s/m), t, log(t/m) for β <= 1/2. The logarithms are finite even for s = 0 and t = 0.

        log(s/m) = -log(1 + z),  log(t/m) = log(t/s) - log(1 + z),  z = β (t/s - 1)

    Both keep their digits where t is near s, and log(s/m) also where β is near 0.
    """
    limits = torch.finfo(log_s.dtype)
    lowest, highest = 2 * least_exponent(log_s.dtype), math.log(limits.max) - 1
    log_s, log_t = (torch.where(x < lowest, lowest, x) for x in (log_s, log_t))
    log_ratio = log_t - log_s
    # Beyond the highest exponent s is 0 or denormal.
    log_ratio = torch.where(log_ratio > highest, highest, log_ratio)
    z = beta.to(log_s.dtype) * _expm1(log_ratio)
    m = 1 + z
    rounded_off = torch.where(z < 1, z - (m - 1), 0)
    log_m = m.log() + rounded_off
    return log_s.exp(), -log_m, log_t.exp(), log_ratio - log_m


def _expm1(x: Tensor) -> Tensor:
    """e^x - 1. In fp32, a series near 0 takes fewer instructions than ``torch.expm1``."""
    if x.dtype == torch.float64:
        return x.expm1()
    series = x / math.factorial(8) + 1 / math.factorial(7)
    for k in range(6, 0, -1):
        series = series * x + 1 / math.factorial(k)
    return torch.where(x.abs() < 0.5, series * x, x.exp() - 1)


@operator("gathered, rows -> rows, rows")
def js_div_merge(stats: Tensor, norms: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """``stats [shards, *, 2]`` to the divergence ``[*]`` and (norms, both KL) ``[*, 6]``."""
    value, saved = _merged(stats_per_row(stats), ByRow(stats[0])(norms), beta)
    lead = stats.shape[1:-1]
    return value.view(lead), saved.view(*lead, 6)


@js_div_merge.register_fake
def _(stats, norms, beta):
    lead = stats.shape[1:-1]
    return stats.new_empty(lead), stats.new_empty((*lead, 6))


@merge_kernel
def _merged(stats, norms, beta):
    terms = stats.sum(-2)
    saved = torch.cat([norms, terms], -1)
    return (beta * terms[..., 1] + (1 - beta) * terms[..., 0]).clamp_min(0), saved


@PairGradient("js_div")
def _gradient(
    grad: Tensor, saved: Tensor, log_s: Tensor, log_t: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    s, log_s_m, t, log_t_m = _ratios(log_s, log_t, beta)
    to_s = (1 - beta) * grad * s * (log_s_m - saved[..., 4:5])
    return to_s, beta * grad * t * (log_t_m - saved[..., 5:6])


class _JSDiv(PerToken):
    function, gradient, num_logits = "js_div", _gradient, 2

    @staticmethod
    def forward(student, teacher, temperature, vocab_start, sizes, beta, softcap):
        vocabulary = vocab_start, sizes
        stats = kl_div_stats(student, teacher, temperature, *vocabulary, False, softcap)
        norms = gather_and_merge(js_div_normalize, stats, temperature)
        terms = js_div_stats(student, teacher, norms, temperature, *vocabulary, beta, softcap)
        return gather_and_merge(js_div_merge, terms, norms, beta)


def js_div(
    student: Logits,
    teacher: Logits,
    *,
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Generalised Jensen-Shannon divergence of the softmaxes of two logits.

    Formula: with t, s the softmax of teacher and student and m = β t + (1 - β) s,
    ``β KL(t || m) + (1 - β) KL(s || m)`` for 0 < β < 1, with the gradients
    ``(1 - β) s (log(s/m) - KL(s || m))`` and ``β t (log(t/m) - KL(t || m))``. At β = 0 and
    β = 1, where the formula is 0, it is KL(t || s) and KL(s || t), the limits of ``js_div / β`` and
    ``js_div / (1 - β)``.

    Same as ``beta * (t * (t.log() - m.log())).sum(-1) + (1 - beta) * (s * (s.log() -
    m.log())).sum(-1)`` on the full vocabulary, except that a token of probability 0 contributes 0.

    Source: Agarwal et al., On-Policy Distillation of Language Models,
    https://arxiv.org/abs/2306.13649, section 2.

    Args:
        student: ``[*, V]``, fp16, bf16, fp32 or fp64, any strides; Tensor, DTensor or
            :class:`LinearLogits`.
        teacher: of the shape, device, mesh and placements of ``student``. Its dtype may be another,
            and it may be a :class:`LinearLogits` beside a tensor, or the reverse.
        beta: the weight β of the teacher, 0 <= β <= 1.
        temperature: positive float, or a floating-point tensor of positive values: ``[*]``, one per
            row, placed as the result, or 0-d, one for all rows. It
            divides the logits of both inputs. Gradients are those of the undivided logits, and none
            flows to the temperature.
        vocab_size: number of columns that are tokens. The columns after them are padding, with
            probability 0 and gradient 0. Default: V.
        softcap: like that of :func:`logprobs`.

    Returns:
        ``[*]``, fp32 (fp64 if either is), never negative, exactly 0 for equal logits; gradients,
        dtypes and placements like those of :func:`kl_div`.

    Communication: forward two all-gathers, of 5 and of 2 numbers per row (one of 6 at β = 0 and 1),
    over the vocabulary's mesh dim, or nothing where V is not sharded over several ranks. Backward
    communicates nothing.

    Rows: as for :func:`kl_div`, except that for 0 < β < 1 the value is finite where one input masks
    a token that the other does not.

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
    beta = check_weight("js_div", beta, "beta", 1)
    student, vocabulary = check_logits("js_div", student, vocab_size, "student")
    teacher = check_teacher("js_div", teacher, student)
    temperatures = check_temperature("js_div", temperature, student)
    softcap = check_softcap("js_div", softcap, student)
    (temperatures,) = placed_by_row(student, temperatures)
    if beta in (0, 1):  # The formula is 0 there; by convention the result is a KL divergence.
        a, b = (student, teacher) if beta == 1 else (teacher, student)
        return KLDiv.call(a, b, temperatures, *vocabulary, softcap, "js_div")[0]
    if beta > 0.5:  # Swap the two: the divergence is the same, and _ratios needs β <= 1/2.
        student, teacher, beta = teacher, student, 1 - beta
    return _JSDiv.call(student, teacher, temperatures, *vocabulary, beta, softcap)[0]
