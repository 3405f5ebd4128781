"""Statistics and gradients of two softmaxes that are compared row by row.

Over its own columns, a shard computes for each row, in one read of the logits a and b, the maximum
m and the sum s of each (see :mod:`~dtensor_vocab.softmax`) and, for a KL divergence, the cross term

    c = Σ_v e^(a_v - m_A) ((a_v - m_A) - (b_v - m_B))
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtensor_vocab._private import overload
from dtensor_vocab.autograd import empty_grad
from dtensor_vocab.faults import coverage
from dtensor_vocab.kernel import kernel
from dtensor_vocab.layout import Sizes, first_column, num_shards
from dtensor_vocab.linear_blocks import (
    Blocks,
    LocalLogits,
    LogitsGradient,
    empty_gradients,
)
from dtensor_vocab.linear_logits import LinearLogits, Logits, needed, separate
from dtensor_vocab.numerics import (
    cap_slope,
    capped,
    capped_tokens,
    columns_before,
    log_prob,
    masked_product,
    math_dtype,
    merge_norms,
    rebase,
    scaled,
    to_math,
)
from dtensor_vocab.operators import (
    linear_arguments,
    linear_signature,
    operator,
    with_signature,
)
from dtensor_vocab.row_blocks import ByRow, chunked, flat, in_chunks, tokens_by_chunk
from dtensor_vocab.shard_stats import stats_operator

__all__ = ["PairGradient", "cross_scale", "kl_div_stats", "log_probs", "merge_pair_sums"]


# ---- statistics of a shard


def _combine(stats: Tensor, temperature: Tensor | None, cross: bool) -> list[Tensor]:
    """Merges the statistics ``[rows, blocks, S]`` of blocks of a shard."""
    m_a, s_a, covered, m_b, s_b, *c = stats.unbind(-1)
    m_a, s_a, m_b, s_b, *c = merge_pair_sums(m_a, s_a, m_b, s_b, *c, temperature=temperature)
    return [m_a, s_a, covered[:, 0], m_b, s_b, *c]


@stats_operator("logits, logits, rows, start -> stats", _combine, covered=2)
def kl_div_stats(
    a: Tensor,
    b: Tensor,
    temperature: Tensor | None,
    vocab_start: Tensor | None,
    sizes: Sequence[int],
    cross: bool,
    softcap: float | None = None,
) -> Tensor:
    """Statistics ``[1, *, S]`` of ``a, b [*, V_local]``: m_A, s_A, coverage, m_B, s_B, (c)."""
    stats = _new_stats(a, b, vocab_start, cross)
    if b.shape != a.shape:  # The shards differ in width. A NaN coverage makes every rank raise.
        return stats.fill_(torch.nan)
    by_row = ByRow(a, b)
    if by_row.count == 0:
        return stats
    args = by_row(temperature), first_column(vocab_start), a.shape[-1], sizes, cross, softcap
    return _shard_stats(*by_row.logits, *args).view(stats.shape)


@kl_div_stats.register_fake
def _(a, b, temperature, vocab_start, sizes, cross, softcap=None):
    return _new_stats(a, b, vocab_start, cross)


def _new_stats(a, b, vocab_start, cross) -> Tensor:
    return a.new_empty((num_shards(vocab_start), *a.shape[:-1], 5 + cross), dtype=math_dtype(a, b))


def cross_scale() -> float:
    """The factor of the cross term as it is sent, since large finite masks would overflow it: one
    over the largest number of columns that fp32 logits may have.

    It is a function because a global float would be an input of the kernels, and each call would
    make a tensor on the CPU for it (seen on torch 2.13).
    """
    return 2.0**-24


@kernel
def _shard_stats(a, b, temperature, start, width, sizes, cross, softcap):
    dtype = math_dtype(a, b)
    a, b = (to_math(x, start, sizes, dtype) for x in flat(a, b))
    tokens = columns_before(Sizes(*sizes).vocab_size, start, width, a.device)
    covered = coverage(a, None, temperature, start, width, sizes)
    if in_chunks(a):
        a, b = chunked(a, -torch.inf), chunked(b, -torch.inf)
        by_chunk = None if temperature is None else temperature.unsqueeze(-1)
        sums = _sums(a, b, by_chunk, cross, a.dtype, tokens_by_chunk(tokens, a), softcap)
        sums = merge_pair_sums(*sums, temperature=temperature)
    else:
        sums = _sums(a, b, temperature, cross, torch.float64, tokens, softcap)
    m_a, s_a, m_b, s_b, *c = sums
    return torch.stack([m_a, s_a, covered, m_b, s_b, *c], -1)


def _sums(a, b, temperature, cross, sum_dtype, tokens, softcap) -> list[Tensor]:
    """m_A, s_A, m_B, s_B and, if ``cross``, c over the last dim, of which ``tokens`` are tokens."""
    # The maxima before the cap, because Inductor would store a tanh that two reductions use.
    maximum_a, maximum_b = (capped(x.amax(-1, keepdim=True), softcap) for x in (a, b))
    a, b = (capped_tokens(x, tokens, softcap) for x in (a, b))
    x, y = rebase(a, maximum_a, None), rebase(b, maximum_b, None)
    mass, mass_b = scaled(x, temperature).exp(), scaled(y, temperature).exp()
    sums = [maximum_a.squeeze(-1), mass.sum(-1), maximum_b.squeeze(-1), mass_b.sum(-1)]
    if not cross:
        return sums
    # Where the mass underflows to 0, c is infinite if b alone masks the token. Halving the logits
    # keeps the difference of two large finite masks from overflowing.
    gap = a / 2 - b / 2
    without_mass = torch.where(gap == torch.inf, gap, 0)
    if sum_dtype == torch.float64:
        terms = torch.where(mass > 0, mass * (x - y), without_mass)
        c = terms.sum(-1, dtype=torch.float64) * cross_scale()
    else:  # Scale before the sum, which might overflow.
        c = torch.where(mass > 0, mass * ((x - y) * cross_scale()), without_mass).sum(-1)
    return [*sums, c.to(a.dtype)]


def merge_pair_sums(
    m_a: Tensor,
    s_a: Tensor,
    m_b: Tensor,
    s_b: Tensor,
    c: Tensor | None = None,
    *,
    temperature: Tensor | None,
) -> tuple[Tensor, ...]:
    """Merges ``[rows, shards]`` into M_A, S_A, M_B, S_B and, if c is given, C, scaled as c is."""
    maximum_a, total_a, shift_a = merge_norms(m_a, s_a, temperature)
    maximum_b, total_b, _ = merge_norms(m_b, s_b, temperature)
    if c is None:
        return maximum_a, total_a, maximum_b, total_b
    shift = rebase(m_a, maximum_a.unsqueeze(-1), None) - rebase(m_b, maximum_b.unsqueeze(-1), None)
    # An infinite c does not survive the product, since the weight of its shard may be 0.
    cross = masked_product(shift_a.exp(), c + s_a * cross_scale() * shift)
    cross = torch.where(c == torch.inf, c, cross).sum(-1)
    return maximum_a, total_a, maximum_b, total_b, cross


def log_probs(
    a: Tensor,
    b: Tensor,
    norms: Tensor,
    temperature: Tensor | None,
    start: Tensor | int,
    sizes: Sequence[int],
    softcap: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """log p of both, inside a kernel. ``norms`` starts with M and log S of ``a``, then of ``b``."""
    maximum_a, log_sum_a, maximum_b, log_sum_b = norms[..., :4].split(1, dim=-1)
    dtype = math_dtype(a, b)
    x_a, x_b = (to_math(x, start, sizes, dtype, softcap=softcap) for x in flat(a, b))
    log_p_a = log_prob(x_a, maximum_a, log_sum_a, temperature)
    return log_p_a, log_prob(x_b, maximum_b, log_sum_b, temperature)


# ---- gradients: one read of both logits, one write for each gradient


_SIX_TENSORS = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class PairGradient:
    """The gradient operators of an op on two softmaxes, declared by its formula.

    As the decorator ``@PairGradient("name")`` of ``gradients(grad, saved, log_p_a, log_p_b,
    *options)``, which returns both gradients of capped logits for temperature 1, it registers
    three operators, of which ``name_backward_linear`` takes ``LinearLogits`` on either side:
    ``name_backward_both``, and ``name_backward`` for one of the gradients. They take ``(grad,
    saved, a, b, temperature, vocab_start, sizes, *options, softcap)``, and ``name_backward`` also
    ``to_a``.
    ``saved [*, 5+]`` starts with M and log S of ``a``, M and log S of ``b``, and a value that is
    +inf where there is no gradient.

    The formula is part of the kernel. The kernel for one gradient omits the terms of the other.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, gradients: Callable[..., tuple[Tensor, Tensor]]) -> PairGradient:
        self._make_kernels(gradients)
        options = list(inspect.signature(gradients, eval_str=True).parameters.values())[4:]
        args = {
            **dict.fromkeys(("grad", "saved", "a", "b"), Tensor),
            "temperature": Tensor | None,
            "vocab_start": Tensor | None,
            "sizes": Sequence[int],
            **{p.name: p.annotation for p in options},
            "softcap": float | None,
        }
        name, roles = f"{self._name}_backward", "rows, rows, logits, logits, rows, start"
        one = with_signature(self._new, name, {**args, "to_a": bool}, Tensor)
        both = with_signature(self._new_both, f"{name}_both", args, tuple[Tensor, Tensor])
        self.backward = operator(f"{roles} -> logits")(one)
        self.backward_both = operator(f"{roles} -> logits, logits")(both)
        linear_args = {**linear_arguments(args, ("a", "b")), "needs": Sequence[bool]}
        self.backward_linear = operator(linear_signature(f"{roles} -> logits, logits"))(
            with_signature(self._linear, f"{name}_linear", linear_args, _SIX_TENSORS)
        )
        self.backward_linear.register_fake(
            lambda grad, saved, *args: (
                *empty_gradients(args[:3], args[-1][:3]),
                *empty_gradients(args[3:6], args[-1][3:]),
            )
        )
        self.backward.register_fake(
            lambda grad, saved, a, b, *args: empty_grad(a if args[-1] else b)
        )
        self.backward_both.register_fake(
            lambda grad, saved, a, b, *_: (empty_grad(a), empty_grad(b))
        )
        self.keep, self.gradients = _in_autograd(
            self.backward, self.backward_both, self.backward_linear
        )
        return self

    def _make_kernels(self, gradients: Callable[..., tuple[Tensor, Tensor]]) -> None:
        def both(a, b, grad, saved, temperature, start, sizes, *options):
            *options, softcap = options
            logs = log_probs(a, b, saved, temperature, start, sizes, softcap)
            live = (grad != 0) & (saved[..., 4:5] != torch.inf)
            live = live & (saved[..., :1] != -torch.inf) & (saved[..., 2:3] != -torch.inf)
            results = []
            for x, gradient in zip((a, b), gradients(grad, saved, *logs, *options), strict=True):
                if softcap is not None:
                    (given,) = flat(x)
                    gradient = gradient * cap_slope(given.to(gradient.dtype), softcap)
                gradient = torch.where(live, scaled(gradient, temperature), 0)
                results.append(gradient.to(x.dtype))
            return tuple(results)

        def one(*args):
            *args, to_a = args
            return both(*args)[0 if to_a else 1]

        self._both = kernel(both, elementwise=True)
        self._one = kernel(one, elementwise=True)

    def _new(self, grad: Tensor, saved: Tensor, a: Tensor, b: Tensor, *args: Any) -> Tensor:
        """The gradient of ``a [*, V_local]`` or of ``b``, contiguous, in its dtype."""
        *others, to_a = args
        if a.numel() == 0:
            return empty_grad(a if to_a else b)
        return self._one(*_by_row(grad, saved, a, b, *others), to_a).view(a.shape)

    def _new_both(
        self, grad: Tensor, saved: Tensor, a: Tensor, b: Tensor, *args: Any
    ) -> tuple[Tensor, Tensor]:
        """Both gradients, in one pass."""
        if a.numel() == 0:
            return empty_grad(a), empty_grad(b)
        to_a, to_b = self._both(*_by_row(grad, saved, a, b, *args))
        return to_a.view(a.shape), to_b.view(b.shape)

    def _linear(self, grad: Tensor, saved: Tensor, *args: Any) -> tuple[Tensor, ...]:
        """The gradients of both sides, of which one or both are operands of ``LinearLogits``."""
        sides = [LocalLogits(*args[:3]), LocalLogits(*args[3:6])]
        temperature, vocab_start, *options, needs = args[6:]
        to_a, to_b = any(needs[:3]), any(needs[3:])
        buffers = sum(side.is_linear for side in sides) + to_a + to_b
        blocks = Blocks(sides, vocab_start, buffers)
        gradients = [
            LogitsGradient(side, blocks, needs[3 * i :][:3]) for i, side in enumerate(sides)
        ]
        for at in blocks:
            logits = [side.block(at) for side in sides]
            grad_at, saved_at, temperature_at = blocks.of_rows(at, grad, saved, temperature)
            by_row = _by_row(grad_at, saved_at, *logits, temperature_at, at.start, *options)
            both = self._both(*by_row) if to_a and to_b else [self._one(*by_row, to_a)]
            for gradient in gradients:
                if gradient.needed:
                    first, *both = both
                    gradient.add(at, first)
        return tuple(itertools.chain(*(gradient.finish() for gradient in gradients)))


def _by_row(
    grad: Tensor,
    saved: Tensor,
    a: Tensor,
    b: Tensor,
    temperature: Tensor | None,
    vocab_start: Tensor | None,
    *args: Any,
) -> list[Any]:
    """The operators' arguments as those of the kernels, which take the logits first."""
    by_row = ByRow(a, b)
    return [
        *by_row.logits,
        *map(by_row, (grad, saved, temperature)),
        first_column(vocab_start),
        *args,
    ]


def _in_autograd(
    backward: torch.library.CustomOpDef,
    backward_both: torch.library.CustomOpDef,
    backward_linear: torch.library.CustomOpDef,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``keep`` and ``gradients`` for a ``PerToken`` with ``forward(a, b, temperature, vocab_start,
    sizes, *options, softcap)``.
    """
    one, both, linear = map(overload, (backward, backward_both, backward_linear))

    def keep(ctx: Any, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[Any]:
        ctx.options = inputs[4:]
        return inputs[:4]

    def gradients(ctx: Any, grad: Tensor, saved: Tensor, a: Logits, b: Logits, *kept: Any) -> Any:
        needs = list(ctx.needs_input_grad[:6])
        if isinstance(a, LinearLogits) or isinstance(b, LinearLogits):
            args = *separate(a), *separate(b), *kept, *ctx.options
            to_operands = needed(linear(grad, saved, *args, needs), needs)
            return LinearLogits(*to_operands[:3]), LinearLogits(*to_operands[3:])
        to_a, to_b = needs[0], needs[3]
        args = grad, saved, a, b, *kept, *ctx.options
        if to_a and to_b:
            return both(*args)
        gradient = one(*args, to_a)
        return (gradient,) if to_a else (None, gradient)

    return keep, gradients
