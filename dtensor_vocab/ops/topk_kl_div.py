"""``topk_kl_div``: the terms of KL(t || s), or KL(s || t), of K tokens that the teacher names.

With p_k the student's and q_k the teacher's probabilities, P and Q their sums,

    forward  Σ_k q_k (log q_k - log p_k)  [+ (1 - Q) (log(1 - Q) - log(1 - P))]
    reverse  Σ_k p_k (log p_k - log q_k)  [+ (1 - P) (log(1 - P) - log(1 - Q))]

where the bracket is the tail, all tokens that are not named. 1 - P is summed over these tokens,
since the difference would lose its digits where P is near 1. Let r be the softmax over the tail (0
at the K tokens), c_k the derivative of the divergence in log p_k, and d that in log(1 - P). Then

    d/dx_v = Σ_k c_k (1[v = k] - p_v) + d (r_v - p_v)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_vocab.autograd import PerToken
from dtensor_vocab.checks import (
    check_bool,
    check_ids,
    check_ignore_index,
    check_logits,
    check_logprobs,
    check_softcap,
    check_temperature,
    placed_by_row,
)
from dtensor_vocab.faults import assert_no_faults, coverage
from dtensor_vocab.ids import local_ids, not_ignored, sum_equal
from dtensor_vocab.kernel import kernel, merge_kernel
from dtensor_vocab.layout import Sizes, first_column, gather_and_merge, num_shards
from dtensor_vocab.linear_logits import Logits
from dtensor_vocab.numerics import (
    capped_tokens,
    columns_before,
    math_dtype,
    merge_norms,
    rebase,
    scaled,
    to_math,
    zero_safe_product,
)
from dtensor_vocab.operators import operator
from dtensor_vocab.row_blocks import ByRow, flat, in_blocks, stats_per_row
from dtensor_vocab.shard_stats import stats_operator
from dtensor_vocab.softmax import combine_softmax, merge_softmax, softmax_stats
from dtensor_vocab.softmax_gradient import Coefficients, SoftmaxGradient

__all__ = ["topk_kl_div"]


def _combine(stats: Tensor, temperature: Tensor | None, ignore_index: int | None) -> list[Tensor]:
    """Merges the statistics ``[rows, blocks, 6 + K]`` of blocks of a shard."""
    m_tail, s_tail, _ = merge_norms(stats[..., 0], stats[..., 1], temperature)
    return [m_tail, s_tail, *combine_softmax(stats[..., 2:], temperature, ignore_index)]


@stats_operator("logits, rows, rows, start -> stats", _combine, covered=4)
def topk_kl_div_stats(
    student: Tensor,
    ids: Tensor,
    temperature: Tensor | None,
    vocab_start: Tensor | None,
    sizes: Sequence[int],
    ignore_index: int | None,
    softcap: float | None = None,
) -> Tensor:
    """m and s over a shard's tail, then its ``softmax_stats``: ``[1, *, 6 + K]``."""
    stats = _new_stats(student, ids, vocab_start)
    by_row = ByRow(student)
    if by_row.count == 0:
        return stats
    (logits,) = by_row.logits
    args = (
        by_row(ids),
        by_row(temperature),
        first_column(vocab_start),
        student.shape[-1],
        sizes,
        ignore_index,
        softcap,
    )
    block = TAIL_BLOCK if logits.device.type == "cpu" else TAIL_BLOCK_ON_GPUS
    if softcap is not None:
        block //= 2  # The copy is in the dtype of the math.
    shard = in_blocks(_shard_stats, (logits, *args), block // logits.shape[-1])
    return shard.view(stats.shape)


@topk_kl_div_stats.register_fake
def _(student, ids, temperature, vocab_start, *_):
    return _new_stats(student, ids, vocab_start)


def _new_stats(student, ids, vocab_start) -> Tensor:
    shape = (num_shards(vocab_start), *student.shape[:-1], 6 + ids.shape[-1])
    return student.new_empty(shape, dtype=math_dtype(student))


TAIL_BLOCK = 1 << 21
"""How many logits one block of the sum over the tail holds. The kernel copies the block."""
TAIL_BLOCK_ON_GPUS = 1 << 17
"""The same on GPUs, which take 256 such blocks at once: 64 MiB of bf16 logits, most of which their
cache keeps."""


@kernel
def _shard_stats(x, ids, temperature, start, width, sizes, ignore_index, softcap):
    (x,) = flat(x)
    if softcap is not None:
        tokens = columns_before(Sizes(*sizes).vocab_size, start, width, x.device)
        x = capped_tokens(x.to(math_dtype(x)), tokens, softcap)
    local, owned = local_ids(ids, start, width)
    owned = owned & not_ignored(ids, ignore_index)
    (count,) = sum_equal(local, owned.to(math_dtype(x)))
    named = x.gather(-1, local)
    tail = x.scatter(-1, local, torch.where(count > 0, -torch.inf, named))
    tail = to_math(tail, start, sizes)
    m_tail = tail.amax(-1)
    s_tail = rebase(tail, m_tail.unsqueeze(-1), temperature).exp().sum(-1)

    named = to_math(named, start, sizes, column=local)
    named = torch.where(owned, named, -torch.inf)
    maximum = torch.cat([m_tail.unsqueeze(-1), named], -1).amax(-1)
    top = maximum.unsqueeze(-1)
    mass = rebase(named, top, temperature).exp() / count.clamp_min(1)  # Equal ids share the mass.
    weight = rebase(m_tail.unsqueeze(-1), top, temperature).exp().squeeze(-1)
    total = mass.sum(-1) + weight * s_tail
    covered = coverage(named, ids, temperature, start, width, sizes, ignore_index)
    unused = torch.zeros_like(total)  # in place of w, the sum for the entropy
    stats = torch.stack([m_tail, s_tail, maximum, total, covered, unused], -1)
    return torch.cat([stats, torch.where(owned, named, 0)], -1)


@operator("gathered, rows, rows, rows -> rows, rows, rows")
def topk_kl_div_merge(
    stats: Tensor,
    teacher_logprobs: Tensor,
    ids: Tensor,
    temperature: Tensor | None,
    vocab_size: int,
    ignore_index: int | None,
    reverse: bool,
    tail: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``stats [shards, *, S]`` to the divergence ``[*]``, its derivatives in log q_k ``[*, K]``,
    and the values for the student's gradient ``[*, 6 + K]``: (M, log S) of the tail and of the
    whole vocabulary, the coefficient a in the tail and at the ids, and c_k.
    """
    by_row = ByRow(stats[0])
    values = by_row(teacher_logprobs), by_row(ids), by_row(temperature)
    options = ignore_index, reverse, tail
    value, slopes, saved, passed = _merged(stats_per_row(stats), *values, *options)
    assert_no_faults("topk_kl_div", passed, temperature is not None, vocab_size, ignore_index)
    lead = stats.shape[1:-1]
    slopes = slopes.view(teacher_logprobs.shape)
    return value.view(lead), slopes, saved.view(*lead, saved.shape[-1])


@topk_kl_div_merge.register_fake
def _(stats, teacher_logprobs, *_):
    lead, shape = stats.shape[1:-1], teacher_logprobs.shape
    return stats.new_empty(lead), stats.new_empty(shape), stats.new_empty((*lead, 6 + shape[-1]))


@merge_kernel
def _merged(stats, log_q, ids, temperature, ignore_index, reverse, tail):
    softmax = merge_softmax(stats[..., 2:] if tail else stats, temperature)
    norm = torch.stack([softmax.maximum, softmax.log_sum], -1)
    named = not_ignored(ids, ignore_index)
    log_p, log_q = (torch.where(named, x, -torch.inf) for x in (softmax.log_p, log_q))
    value, slope_p, slope_q = _divergence(log_p, log_q.to(log_p.dtype), reverse)
    value, a = value.sum(-1, keepdim=True), -slope_p.sum(-1, keepdim=True)
    norm_tail, a_tail = norm, a
    if tail:
        rest = _tail(stats, norm, log_q, temperature, reverse)
        value, norm_tail = (value + rest.value).clamp_min(0), rest.norm
        a = a - rest.slope_p
        a_tail, slope_q = rest.slope_p + rest.mass * a, slope_q + rest.slope_q
    slopes = torch.cat([a_tail, a, slope_p], -1)
    # The gradient is 0 where the divergence is infinite or the student's row is wholly -inf.
    off = (value == torch.inf) | (norm[..., :1] == -torch.inf)
    slopes, slope_q = torch.where(off, 0, slopes), torch.where(off, 0, slope_q)
    saved = torch.cat([norm_tail, norm, slopes], -1)
    return value.squeeze(-1), slope_q, saved, softmax.passed


class _Tail(NamedTuple):
    """The bucket of all other tokens, ``[rows, 1]`` each. If the student has no mass there, all
    fields except the value are 0.
    """

    value: Tensor
    norm: Tensor
    """M and log S over it, ``[rows, 2]``."""
    mass: Tensor
    """1 - P."""
    slope_p: Tensor
    """The derivative of the value in log(1 - P)."""
    slope_q: Tensor
    """The derivatives of the value in each log q_k, ``[rows, K]``."""


TAIL_FLOOR = 16
"""1 - Q is clamped to at least eps over this, with the eps of the dtype of the log q_k, so that its
logarithm is finite. Rounding
of the log q_k changes 1 - Q by about as much."""
TAIL_NOISE = 8
"""A 1 - Q of up to this many eps of the log q_k may be their rounding error alone."""


def _tail(stats, norm, log_q, temperature, reverse) -> _Tail:
    maximum, total, _ = merge_norms(stats[..., 0], stats[..., 1], temperature)
    maximum, log_sum = maximum.unsqueeze(-1), total.log().unsqueeze(-1)
    log_p = scaled(maximum - norm[..., :1], temperature) + (log_sum - norm[..., 1:])

    eps = torch.finfo(log_q.dtype).eps
    q = -torch.expm1(log_q.double().logsumexp(-1, keepdim=True)).to(log_p.dtype)
    log_rest_q = q.clamp_min(eps / TAIL_FLOOR).log()
    value, slope_p, slope_q = _divergence(log_p, log_rest_q, reverse)

    empty = maximum == -torch.inf
    if not reverse:  # The value is infinite if the teacher has a tail and the student has none.
        value = torch.where(empty, 0, value)
        value = torch.where(empty & (q > eps * TAIL_NOISE), torch.inf, value)
    value = torch.where(norm[..., :1] == -torch.inf, torch.nan, value)
    tail_norm = torch.cat([maximum, log_sum], -1)
    mass = log_p.exp()
    tail_norm, mass, slope_p, slope_q = (
        torch.where(empty, 0, x) for x in (tail_norm, mass, slope_p, slope_q)
    )
    slope_q = -log_q.to(log_p.dtype).exp() * (slope_q / log_rest_q.exp())
    return _Tail(value, tail_norm, mass, slope_p, slope_q)


def _divergence(log_p: Tensor, log_q: Tensor, reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The terms of KL(q || p), or KL(p || q), and their derivatives in log p and in log q."""
    a, b = (log_p, log_q) if reverse else (log_q, log_p)
    mass = a.exp()
    absent = a == -torch.inf
    value = torch.where(absent, 0, torch.where(b == -torch.inf, torch.inf, mass * (a - b)))
    slope_a = torch.where(absent, 0, value + mass)
    return (value, slope_a, -mass) if reverse else (value, -mass, slope_a)


@SoftmaxGradient("topk_kl_div", inplace=False)
def _gradient(
    grad: Tensor, saved: Tensor, ids: Tensor, sizes: Sequence[int], ignore_index: int | None
) -> Coefficients:
    slopes = saved[..., 4:]
    terms = zero_safe_product(grad, slopes)
    at_index = terms[..., 1:2], saved[..., 2:4], not_ignored(ids, ignore_index)
    return Coefficients(a=terms[..., :1], c=terms[..., 2:], at_index=at_index)


class _TopkKLDiv(PerToken):
    function, gradient = "topk_kl_div", _gradient

    @staticmethod
    def forward(
        student,
        teacher_logprobs,
        ids,
        temperature,
        vocab_start,
        sizes,
        ignore_index,
        softcap,
        reverse,
        tail,
    ):
        args = student, ids, temperature, vocab_start, sizes, ignore_index
        stats = topk_kl_div_stats(*args, softcap) if tail else softmax_stats(*args, False, softcap)
        options = sizes[-1], ignore_index, reverse, tail
        values = teacher_logprobs, ids, temperature
        return gather_and_merge(topk_kl_div_merge, stats, *values, *options)

    @staticmethod
    def keep(ctx, inputs, outputs):
        student, teacher_logprobs, *inputs, _, _ = inputs
        ctx.teacher_dtype = teacher_logprobs.dtype
        slopes = outputs[1] if ctx.needs_input_grad[3] else None
        return slopes, *_gradient.keep(ctx, (student, *inputs, False), outputs)

    @staticmethod
    def gradients(ctx, grad, saved, slopes, *kept):
        to_student = to_teacher = None
        if any(ctx.needs_input_grad[:3]):
            (to_student,) = _gradient.gradients(ctx, grad, saved, *kept)
        if ctx.needs_input_grad[3]:
            to_teacher = zero_safe_product(grad.unsqueeze(-1), slopes).to(ctx.teacher_dtype)
        return to_student, to_teacher


def topk_kl_div(
    student: Logits,
    teacher_logprobs: Tensor,
    teacher_ids: Tensor,
    *,
    reverse: bool = False,
    tail: bool = False,
    ignore_index: int | None = -100,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The terms of a KL divergence on K tokens that the teacher selects.

    Formula: with p_k = softmax(student)[ids_k], q_k = e^(teacher_logprobs_k), P = Σ p_k, Q = Σ q_k,
    forward ``Σ_k q_k (log q_k - log p_k)``, reverse ``Σ_k p_k (log p_k - log q_k)``. With ``tail``
    all other tokens count as one more token, which adds ``(1 - Q) log((1 - Q) / (1 - P))`` or
    ``(1 - P) log((1 - P) / (1 - Q))`` and makes the sum a divergence. Temperature applies to the
    student only.

    Same as these sums on ``torch.log_softmax(student.float(), -1)`` of the full vocabulary.

    Args:
        student: ``[*, V]``, fp16, bf16, fp32 or fp64, any strides; Tensor, DTensor or
            :class:`LinearLogits`.
        teacher_logprobs: ``[*, K]``, floating, normalised over the teacher's full vocabulary, as
            :func:`topk_logprobs` returns them; placed like ``teacher_ids``.
        teacher_ids: ``[*, K]``, int32 or int64, distinct in each row; like ``index`` of
            :func:`logprobs`.
        reverse: KL(student || teacher) in place of KL(teacher || student).
        tail: add the bucket of all other tokens.
        ignore_index: entries whose id equals it are left out, whatever their log-probability. Use
            it to pad a shorter list of the teacher's to K. None leaves out nothing.
        temperature: positive float, or a floating-point tensor of positive values: ``[*]``, one per
            row, placed as the result, or 0-d, one for all rows. The softmax is of
            ``student / temperature``; gradients are with respect to ``student``, and none flows to
            the temperature.
        vocab_size: number of columns that are tokens. The columns after them are padding, with
            probability 0 and gradient 0, and ids of padding are out of range. Default: V.
        softcap: like that of :func:`logprobs`.

    Returns:
        ``[*]``, fp32 (fp64 for fp64 logits), never negative with ``tail``; placed like the result
        of :func:`entropy`. Gradients flow to ``student`` and ``teacher_logprobs``.

    Communication: forward one all-gather of 4 + K numbers per row, 6 + K with ``tail``, over the
    vocabulary's mesh dim, or nothing where V is not sharded over several ranks. Backward
    communicates nothing.

    Rows: in KL(A || B), A is the teacher, or the student for ``reverse``. The value is +inf, with
    gradient 0 for both inputs, where A has mass on a named token or in the tail and B has none
    there. It is NaN where the student's row is wholly -inf, with gradient 0, or holds NaN or +inf.
    Without ``tail`` it is 0 where all ids are ignored. 1 - Q is only as exact as
    ``teacher_logprobs``: it is clamped to at least 1/16 of their eps, and where the student has no
    tail, up to 8 eps count as 0.

    Raises:
        TypeError: if an argument has an unsupported type or dtype.
        ValueError: if shapes, devices, meshes, placements or options are invalid, or if V > 2**24
            unless the logits are fp64. All ranks raise the same TypeError or ValueError before any
            communication, if they agree on the global shapes.
        RuntimeError: if, on any rank, an id is out of range, a temperature is not a
            positive normal number, or the shards do not fit together.
            An asynchronous assertion on the device raises it, on every rank that takes part in the
            collective; the host does not wait for it.
    """
    name = "topk_kl_div"
    check_bool(name, reverse, "reverse")
    check_bool(name, tail, "tail")
    student, vocabulary = check_logits(name, student, vocab_size, "student")
    ids = check_ids(name, teacher_ids, student, "teacher_ids", (("K",),))
    teacher_logprobs = check_logprobs(name, teacher_logprobs, ids, student)
    ignore_index = check_ignore_index(name, ignore_index)
    temperatures = check_temperature(name, temperature, student)
    softcap = check_softcap(name, softcap, student)
    rows = placed_by_row(student, teacher_logprobs, ids, temperatures)
    options = ignore_index, softcap, reverse, tail
    return _TopkKLDiv.call(student, *rows, *vocabulary, *options)[0]
