"""``topk_kl_div``: the terms of KL(t || s), or KL(s || t), of K tokens that the teacher names.

With p_k the student's and q_k the teacher's probabilities, P and Q their sums,

    forward  Σ_k q_k (log q_k - log p_k)  [+ (1 - Q) (log(1 - Q) - log(1 - P))]
    reverse  Σ_k p_k (log p_k - log q_k)  [+ (1 - P) (log(1 - P) - log(1 - Q))]

where the bracket is the tail. The mass of the tail is summed as such, since 1 - P would lose it
where P is near 1, and r_v is the softmax over it. With the slopes c_k of the divergence in log p_k
and d in log(1 - P),

    d/dx_v = Σ_k c_k (1[v = k] - p_v) + d (r_v - p_v)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_vocab.autograd import PerToken, differentiable_once
from dtensor_vocab.inputs import (
    check_bool,
    check_ids,
    check_logits,
    check_logprobs,
    check_temperature,
)
from dtensor_vocab.kernel import Rows, flat, in_blocks, kernel, merge_kernel, stats_per_row
from dtensor_vocab.operator import operator
from dtensor_vocab.rows import (
    check,
    coverage,
    local_ids,
    math_dtype,
    merge_norm,
    prepare,
    rebase,
    scaled,
)
from dtensor_vocab.softmax import (
    Coefficients,
    SoftmaxGradient,
    empty_grad,
    merge_softmax,
    softmax_stats,
    sum_equal,
)

__all__ = ["topk_kl_div"]


@operator("logits, rows, rows, start -> stats")
def topk_kl_div_stats(
    student: Tensor,
    ids: Tensor,
    temperature: Tensor | None,
    vocab_start: Tensor,
    vocab: int,
    shard_size: int,
    vocab_size: int,
) -> Tensor:
    """m and s over a shard's tail, then as of ``softmax_stats``: ``[1, *, 5 + K]``."""
    stats = _new_stats(student, ids, vocab_start)
    rows = Rows(student)
    if rows.count == 0:
        return stats
    sizes = student.shape[-1], vocab, shard_size, vocab_size
    args = *rows.logits, rows(ids), rows(temperature), vocab_start[0], *sizes
    shard = in_blocks(_shard_stats, args, BLOCK_LOGITS // args[0].shape[-1])
    return shard.view(stats.shape)


@topk_kl_div_stats.register_fake
def _(student, ids, temperature, vocab_start, *_):
    return _new_stats(student, ids, vocab_start)


def _new_stats(student, ids, vocab_start) -> Tensor:
    shape = (vocab_start.shape[0], *student.shape[:-1], 5 + ids.shape[-1])
    return student.new_empty(shape, dtype=math_dtype(student))


BLOCK_LOGITS = 1 << 19
"""How many logits are copied at once, for their tail to be summed."""


@kernel
def _shard_stats(x, ids, temperature, start, columns, vocab, shard_size, vocab_size):
    (x,), padding = flat(x), vocab_size if vocab_size < vocab else None
    local, owned = local_ids(ids, start, columns)
    (count,) = sum_equal(local, owned.to(math_dtype(x)))
    named = x.gather(-1, local)
    tail = x.scatter(-1, local, torch.where(count > 0, -torch.inf, named))
    tail = prepare(tail, start, padding)
    m_tail = tail.amax(-1)
    s_tail = rebase(tail, m_tail.unsqueeze(-1), temperature).exp().sum(-1)

    named = prepare(named, start, padding, column=local)
    named = torch.where(owned, named, -torch.inf)
    maximum = torch.cat([m_tail.unsqueeze(-1), named], -1).amax(-1)
    top = maximum.unsqueeze(-1)
    mass = rebase(named, top, temperature).exp() / count.clamp_min(1)  # each token once
    weight = rebase(m_tail.unsqueeze(-1), top, temperature).exp().squeeze(-1)
    total = mass.sum(-1) + weight * s_tail
    sound = coverage(named, start, columns, vocab, shard_size, ids, vocab_size, None)
    stats = torch.stack([m_tail, s_tail, maximum, total, sound], -1)
    return torch.cat([stats, torch.where(owned, named, 0)], -1)


@operator("gathered, rows, rows -> rows, rows, rows")
def topk_kl_div_merge(
    stats: Tensor,
    teacher_logprobs: Tensor,
    temperature: Tensor | None,
    vocab_size: int,
    reverse: bool,
    tail: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``stats [shards, *, S]`` to the divergence ``[*]``, its slopes in log q_k, ``[*, K]``, and
    what the student's gradient needs, ``[*, 6 + K]``: (M, log S) of the tail and of the vocabulary,
    the coefficient a for either, and c_k.
    """
    by_row = Rows(stats[0])
    values = by_row(teacher_logprobs), by_row(temperature)
    value, slopes, saved, faults = _merge(stats_per_row(stats), *values, reverse, tail)
    check("topk_kl_div", faults, vocab_size)
    rows = stats.shape[1:-1]
    slopes = slopes.view(teacher_logprobs.shape)
    return value.view(rows), slopes, saved.view(*rows, saved.shape[-1])


@topk_kl_div_merge.register_fake
def _(stats, teacher_logprobs, *_):
    rows, shape = stats.shape[1:-1], teacher_logprobs.shape
    return stats.new_empty(rows), stats.new_empty(shape), stats.new_empty((*rows, 6 + shape[-1]))


@merge_kernel
def _merge(stats, log_q, temperature, reverse, tail):
    softmax = merge_softmax(stats[..., 2:] if tail else stats, temperature)
    norm, log_p = torch.stack([softmax.maximum, softmax.log_sum], -1), softmax.log_p
    rounding = torch.finfo(log_q.dtype).eps
    log_q = log_q.to(log_p.dtype)

    value, slope_p, slope_q = _divergence(log_p, log_q, reverse)
    value, d = value.sum(-1, keepdim=True), torch.zeros_like(norm[..., :1])
    norm_tail, mass = norm, d
    if tail:
        maximum, total, _ = merge_norm(stats[..., 0], stats[..., 1], temperature)
        maximum, log_sum = maximum.unsqueeze(-1), total.log().unsqueeze(-1)
        empty = maximum == -torch.inf
        norm_tail = torch.where(empty, 0, torch.cat([maximum, log_sum], -1))
        log_rest_p = scaled(maximum - norm[..., :1], temperature) + (log_sum - norm[..., 1:])
        # the log q_k say no more of 1 - Q than their rounding lets them
        rest_q = -torch.expm1(log_q.double().logsumexp(-1, keepdim=True)).to(log_p.dtype)
        log_rest_q = rest_q.clamp_min(rounding / 16).log()
        rest, d, slope_rest_q = _divergence(log_rest_p, log_rest_q, reverse)
        if not reverse:  # the student has no tail: infinite if the teacher has, past its rounding
            rest = torch.where(empty, torch.where(rest_q > 8 * rounding, torch.inf, 0), rest)
        d = torch.where(empty, 0, d)
        mass = torch.where(empty, 0, log_rest_p.exp())
        slope_rest_q = torch.where(empty, 0, slope_rest_q)
        slope_q = slope_q - log_q.exp() * (slope_rest_q / log_rest_q.exp())
        value = (value + rest).clamp_min(0)
    a = -slope_p.sum(-1, keepdim=True) - d
    slopes = torch.cat([d + mass * a if tail else a, a, slope_p], -1)
    # an infinite row, or one without a student, has no gradient
    off = (value == torch.inf) | (norm[..., :1] == -torch.inf)
    slopes, slope_q = torch.where(off, 0, slopes), torch.where(off, 0, slope_q)
    saved = torch.cat([norm_tail, norm, slopes], -1)
    return value.squeeze(-1), slope_q, saved, softmax.fault


def _divergence(log_p: Tensor, log_q: Tensor, reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The terms of KL(q || p), or KL(p || q), and their slopes in log p and in log q."""
    a, b = (log_p, log_q) if reverse else (log_q, log_p)
    mass = a.exp()
    absent = a == -torch.inf
    value = torch.where(absent, 0, torch.where(b == -torch.inf, torch.inf, mass * (a - b)))
    slope_a = torch.where(absent, 0, value + mass)
    return (value, slope_a, -mass) if reverse else (value, -mass, slope_a)


@operator("rows, rows, logits, rows, rows, start -> logits")
def topk_kl_div_backward(
    grad: Tensor,
    saved: Tensor,
    student: Tensor,
    ids: Tensor,
    temperature: Tensor | None,
    vocab_start: Tensor,
    vocab_size: int | None,
) -> Tensor:
    """The gradient of ``student [*, V_local]`` for ``grad [*]``."""
    return _gradient(student, saved, ids, temperature, vocab_start, vocab_size, grad)


@topk_kl_div_backward.register_fake
def _(grad, saved, student, *_):
    return empty_grad(student)


@SoftmaxGradient
def _gradient(saved: Tensor, ids: Tensor, grad: Tensor) -> Coefficients:
    terms = torch.where(grad == 0, 0, grad * saved[..., 4:])
    at_index = terms[..., 1:2], saved[..., 2:4]
    return Coefficients(a=terms[..., :1], c=terms[..., 2:], at_index=at_index)


class _TopkKLDiv(PerToken):
    @staticmethod
    def forward(
        student,
        teacher_logprobs,
        ids,
        temperature,
        vocab_start,
        vocab,
        shard_size,
        vocab_size,
        reverse,
        tail,
    ):
        args = student, ids, temperature, vocab_start, vocab, shard_size, vocab_size
        stats = topk_kl_div_stats(*args) if tail else softmax_stats(*args, None, False, False)
        options = vocab_size, reverse, tail
        return topk_kl_div_merge(stats, teacher_logprobs, temperature, *options)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        student, teacher, ids, temperature, vocab_start, vocab, _, vocab_size, *_ = inputs
        ctx.vocab_size = vocab_size if vocab_size < vocab else None
        ctx.teacher_dtype = teacher.dtype
        slopes = outputs[1] if ctx.needs_input_grad[1] else None
        inputs = student, ids, temperature, vocab_start, slopes
        PerToken.save(ctx, "topk_kl_div", outputs, *inputs)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad, *_):
        *inputs, slopes, saved = ctx.saved_tensors
        to_student = to_teacher = None
        if ctx.needs_input_grad[0]:
            to_student = topk_kl_div_backward(grad, saved, *inputs, ctx.vocab_size)
        if ctx.needs_input_grad[1]:
            grad = grad.unsqueeze(-1)
            to_teacher = (slopes * grad).masked_fill(grad == 0, 0).to(ctx.teacher_dtype)
        return to_student, to_teacher


def topk_kl_div(
    student: Tensor,
    teacher_logprobs: Tensor,
    teacher_ids: Tensor,
    *,
    reverse: bool = False,
    tail: bool = False,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
) -> Tensor:
    """The part of a KL divergence that is on K tokens which the teacher names.

    Formula: with p_k = softmax(student)[ids_k], q_k = e^(teacher_logprobs_k), P = Σ p_k, Q = Σ q_k,
    forward ``Σ_k q_k (log q_k - log p_k)``, reverse ``Σ_k p_k (log p_k - log q_k)``. With ``tail``
    the rest of both is one more token, ``+ (1 - Q) log((1 - Q) / (1 - P))`` or
    ``+ (1 - P) log((1 - P) / (1 - Q))``, which makes a divergence of it. Temperature is the
    student's alone.

    Same as these sums on ``torch.log_softmax(student.float(), -1)`` of the full vocabulary.

    Args:
        student: ``[*, V]``, fp16, bf16, fp32 or fp64, any strides; Tensor or DTensor.
        teacher_logprobs: ``[*, K]``, floating, normalised over the teacher's full vocabulary; such
            as :func:`topk_logprobs` returns.
        teacher_ids: ``[*, K]``, int32 or int64, distinct in a row; both as ``index`` of
            :func:`logprobs`.
        reverse: KL(student || teacher) in place of KL(teacher || student).
        tail: add the bucket of all other tokens.
        temperature: a float > 0, or a floating tensor ``[*]``, one for each row, placed as
            the result. The softmax is of logits / temperature, gradients are for the logits.
        vocab_size: columns from it on are padding: probability and gradient 0.

    Returns:
        ``[*]``, fp32 (fp64 for fp64 logits), with ``tail`` never negative; placed as the result of
        :func:`entropy`. Gradients flow to ``student`` and ``teacher_logprobs``.

    Communication: one all-gather of 3 + K numbers a row (5 + K with ``tail``) over the vocabulary's
    mesh dim forward, none backward, none where V is not sharded over several ranks.

    Rows: +inf, with gradient 0 for both, where one has mass on a named token, or in the tail, that
    the other masks; NaN where the student's is wholly -inf (gradient 0) or holds NaN or +inf.
    1 - Q is known no better than to the rounding of ``teacher_logprobs``: it counts as at least
    1/16 of their eps.

    Raises:
        TypeError: for a wrong type or dtype; ValueError: for shapes, devices, meshes, placements
            or options out of bounds. Both before anything is communicated, alike on all ranks.
        RuntimeError: on every rank, for an id out of range on any of them or shards that do not fit
            together; by an assertion on the device, which does not wait for it.
    """
    name = "topk_kl_div"
    check_bool(name, reverse, "reverse")
    check_bool(name, tail, "tail")
    vocabulary = check_logits(name, student, vocab_size, "student")
    ids = check_ids(name, teacher_ids, student, "teacher_ids", (("K",),))
    teacher_logprobs = check_logprobs(name, teacher_logprobs, ids, student)
    temperature = check_temperature(name, temperature, student)
    return _TopkKLDiv.apply(
        student, teacher_logprobs, ids, temperature, *vocabulary, reverse, tail
    )[0]
