"""The gradient of functions of the softmax statistics, in one read of the logits and one write of
the gradient.

For coefficients a, b, u and c_k of each row it has the form

    d/dx_v = p_v (a + b log p_v) + u + Σ_k c_k 1[v = index_k]

divided by the temperature, if there is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtensor_vocab._private import overload
from dtensor_vocab.autograd import empty_grad, is_functional, overwritten
from dtensor_vocab.ids import local_ids, sum_equal
from dtensor_vocab.kernel import kernel
from dtensor_vocab.layout import first_column
from dtensor_vocab.linear_blocks import (
    Block,
    Blocks,
    LocalLogits,
    LogitsGradient,
    empty_gradients,
)
from dtensor_vocab.linear_logits import LinearLogits, Logits, needed
from dtensor_vocab.numerics import (
    cap_slope,
    least_exponent,
    log_prob,
    scaled,
    to_math,
    without_padding,
)
from dtensor_vocab.operators import (
    linear_arguments,
    linear_signature,
    operator,
    with_signature,
)
from dtensor_vocab.row_blocks import ByRow, blocks, flat, in_blocks

__all__ = ["Coefficients", "SoftmaxGradient"]


class Coefficients(NamedTuple):
    """Coefficients of the gradient's formula: ``[rows, 1]`` each, ``c`` is ``[rows, K]``."""

    a: Tensor
    b: Tensor | None = None
    c: Tensor | None = None
    u: Tensor | None = None
    at_index: tuple[Tensor, Tensor, Tensor] | None = None
    """For an op with other coefficients in the columns of the ids: their ``a``, their (M, log S)
    ``[rows, 2]``, and a mask ``[rows, K]`` of the ids that count."""


class SoftmaxGradient:
    """The gradient operators of an op, declared by its coefficients.

    As the decorator ``@SoftmaxGradient("name")`` of ``coefficients(grad, saved, [index,] sizes,
    *options) -> Coefficients`` it registers ``name_backward``, its form for ``LinearLogits``
    ``name_backward_linear`` and, if ``inplace``, ``name_backward_``, which writes in place of the
    logits. The first and last take ``(grad, saved, logits, [index,] temperature, vocab_start,
    sizes, *options, softcap)``, where ``saved [*, 2+]`` starts with M and log S.

    The coefficients are computed inside the kernel, where values per row are ``[rows, K]``. A float
    option arrives as None if it is 0, and otherwise as a 0-d tensor, so that one kernel serves all
    its values.

    ``ids_dominate`` says that, with one id per row, the gradient's entry at the id is as large as
    all others of its row together, as for cross-entropy.
    """

    def __init__(self, name: str, inplace: bool = True, ids_dominate: bool = False) -> None:
        self._name, self._inplace, self._ids_dominate = name, inplace, ids_dominate

    def __call__(self, coefficients: Callable[..., Coefficients]) -> SoftmaxGradient:
        parameters = list(inspect.signature(coefficients, eval_str=True).parameters.values())[2:]
        self._ids = [p for p in parameters if p.annotation is Tensor]
        self._make_kernels(coefficients)
        args = {
            **dict.fromkeys(("grad", "saved", "logits"), Tensor),
            **{p.name: Tensor for p in self._ids},
            "temperature": Tensor | None,
            "vocab_start": Tensor | None,
            "sizes": Sequence[int],
            **{p.name: p.annotation for p in parameters[len(self._ids) + 1 :]},
            "softcap": float | None,
        }
        roles = ", ".join(["rows, rows, logits", *["rows" for _ in self._ids], "rows, start"])
        name, signature = f"{self._name}_backward", f"{roles} -> logits"
        self.backward = operator(signature)(with_signature(self._new, name, args, Tensor))
        self.backward.register_fake(lambda grad, saved, logits, *_: empty_grad(logits))
        linear_args = {**linear_arguments(args, ("logits",)), "needs": Sequence[bool]}
        returns = tuple[Tensor, Tensor, Tensor]
        self.backward_linear = operator(linear_signature(signature))(
            with_signature(self._linear, f"{name}_linear", linear_args, returns)
        )
        self.backward_linear.register_fake(
            lambda grad, saved, *args: empty_gradients(args[:3], args[-1])
        )
        self.backward_ = None
        if self._inplace:
            fn = with_signature(self._overwrite, f"{name}_", args, None)
            self.backward_ = operator(f"{roles} ->", mutates="logits")(fn)
        self.keep, self.gradients = _in_autograd(
            len(self._ids), self.backward, self.backward_, self.backward_linear
        )
        return self

    def _make_kernels(self, coefficients: Callable[..., Coefficients]) -> None:
        def terms_of(grad, saved, index, sizes, *options):
            ids = () if index is None else (index,)
            return coefficients(grad, saved, *ids, sizes, *options)

        def at_columns(logits, grad, saved, index, temperature, start, sizes, *options):
            *options, softcap = options
            terms = terms_of(grad, saved, index, sizes, *options)
            return _at_columns(terms, *flat(logits), saved, temperature, start, sizes, softcap)

        def at_ids(logits, grad, saved, index, temperature, start, sizes, *options, dtype=None):
            *options, softcap = options
            terms = terms_of(grad, saved, index, sizes, *options)
            args = *flat(logits), saved, index, temperature, start, sizes, softcap
            return _at_ids(terms, *args, dtype or logits.dtype)

        def fp32_at_ids(logits, grad, saved, index, temperature, start, *args):
            args = logits, grad, saved, index, temperature, start, *args
            _, owned = local_ids(index, start, logits.shape[-1])
            return *at_ids(*args, dtype=torch.float32), owned

        def whole(logits, grad, saved, index, *args):
            gradient = at_columns(logits, grad, saved, index, *args)
            if _k(index) != 1:
                return gradient
            column, entry = at_ids(logits, grad, saved, index, *args)
            return gradient.scatter(-1, column.long(), entry)

        def whole_(logits, grad, saved, *args):
            logits.copy_(at_columns(logits, grad, saved, *args).view(logits.shape))
            return saved  # A kernel must return a tensor with the rows as its first dim.

        self._whole, self._at_ids = kernel(whole, elementwise=True), kernel(at_ids)
        self._fp32_at_ids = kernel(fp32_at_ids)
        self._whole_ = kernel(whole_, mutates=True, elementwise=True)

    def _new(self, grad: Tensor, saved: Tensor, logits: Tensor, *args: Any) -> Tensor:
        """The gradient of ``logits [*, V_local]``, contiguous, in their dtype.

        With several ids per row, a second kernel computes the entries in the columns of the ids,
        some rows at a time. They overwrite those of the first kernel.
        """
        if logits.numel() == 0:
            return empty_grad(logits)
        by_row = self._by_row(grad, saved, logits, *args)
        gradient, k = self._whole(*by_row), _k(by_row[3])
        if k > 1:
            _write(gradient, (self._at_ids(*block) for block in blocks(by_row, BLOCK_IDS // k)))
        return gradient.view(logits.shape)

    def _overwrite(self, grad: Tensor, saved: Tensor, logits: Tensor, *args: Any) -> None:
        if logits.numel() == 0:
            return
        by_row = self._by_row(grad, saved, logits, *args)
        k = _k(by_row[3])
        entries = in_blocks(self._at_ids, by_row, BLOCK_IDS // k) if k > 0 else None
        self._whole_(*by_row)
        if entries is not None:
            _write(by_row[0], blocks(entries, BLOCK_IDS // k))

    def _linear(self, grad: Tensor, saved: Tensor, *args: Any) -> tuple[Tensor, ...]:
        """The gradients of the operands of ``LinearLogits``, from recomputed blocks of logits."""
        if args[1] is None:  # It would overwrite the caller's logits.
            raise ValueError(f"{self._name}_backward_linear: expected a weight, got None")
        logits, ids = LocalLogits(*args[:3]), args[3:][: len(self._ids)]
        temperature, vocab_start, *options, needs = args[3 + len(self._ids) :]
        blocks = Blocks([logits], vocab_start, 1)
        gradient = LogitsGradient(logits, blocks, needs)
        one_id = len(ids) == 1 and ids[0].numel() == logits.rows
        apart = self._ids_dominate and one_id and gradient.rounds_terms_of_x
        for at in blocks:
            grad_at, saved_at, *rows = blocks.of_rows(at, grad, saved, *ids, temperature)
            block = logits.block(at)
            of_block = grad_at, saved_at, block, *rows, at.start, *options
            if apart:
                self._add_with_entries_apart(gradient, at, block, self._by_row(*of_block))
            else:
                self._overwrite(*of_block)
                gradient.add(at, block)
        return gradient.finish()

    def _add_with_entries_apart(
        self, gradient: LogitsGradient, at: Block, block: Tensor, by_row: Sequence[Any]
    ) -> None:
        """Adds the entries at the ids to the gradient of ``hidden`` in fp32.

        Without them the product of the block is small, and so is what is rounded off it.
        """
        column, entry, owned = self._fp32_at_ids(*by_row)
        self._whole_(*by_row)
        _write(block, [(column, entry.to(block.dtype))])
        gradient.add_to_weight(at, block)
        _write(block, [(column, torch.where(owned, 0, entry).to(block.dtype))])
        gradient.add_to_x(at, block, exact=False)
        gradient.add_entry_to_x(at, column, entry, owned)

    def _by_row(self, grad: Tensor, saved: Tensor, logits: Tensor, *args: Any) -> list[Any]:
        """The operator's arguments as those of the kernels, which take the logits first."""
        index = args[0] if self._ids else None
        temperature, vocab_start, sizes, *options = args[len(self._ids) :]
        by_row = ByRow(logits)
        options = [None if isinstance(x, float) and x == 0 else x for x in options]
        rows = map(by_row, (grad, saved, index, temperature))
        return [*by_row.logits, *rows, first_column(vocab_start), sizes, *options]


def _in_autograd(
    ids: int,
    backward: torch.library.CustomOpDef,
    backward_: torch.library.CustomOpDef | None,
    backward_linear: torch.library.CustomOpDef,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``keep`` and ``gradients`` for a ``PerToken`` with ``forward(logits, [index,] temperature,
    vocab_start, sizes, *options, softcap, inplace_backward)``.
    """
    tensors = 3 + ids
    new, linear = overload(backward), overload(backward_linear)
    overwrite = None if backward_ is None else overload(backward_)

    def keep(ctx: Any, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[Any]:
        *ctx.options, ctx.inplace_backward = inputs[tensors:]
        return inputs[:tensors]

    def gradients(ctx: Any, grad: Tensor, saved: Tensor, logits: Logits, *kept: Any) -> Any:
        if isinstance(logits, LinearLogits):
            needs = list(ctx.needs_input_grad[:3])
            to_operands = linear(grad, saved, *logits, *kept, *ctx.options, needs)
            return (LinearLogits(*needed(to_operands, needs)),)
        args = grad, saved, logits, *kept, *ctx.options
        if overwrite is None or not ctx.inplace_backward or is_functional():
            return (new(*args),)
        overwrite(*args)
        return (overwritten(logits),)

    return keep, gradients


BLOCK_IDS = 1 << 13
"""How many ids are processed at once: a dozen tensors of 64 KiB."""


def _k(index: Tensor | None) -> int:
    return 0 if index is None else index.shape[-1]


def _write(x: Tensor, entries: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Writes each ``(column, values)``, both ``[n, K]``, to the next n rows of ``x [*, V]``.

    On CPUs, ``x.scatter_`` would make an fp32 copy of bf16 (seen on torch 2.13).
    """
    first = 0
    for column, values in entries:
        if x.dim() == 2 and x.device.type != "cpu":
            x.narrow(0, first, len(column)).scatter_(-1, column, values)
            first += len(column)
            continue
        row = torch.arange(first, first + len(column), device=x.device).unsqueeze(-1)
        at = [column.long()]
        for size in reversed(x.shape[:-1]):
            at.insert(0, row % size)
            row = row // size
        x.index_put_(tuple(at), values)
        first += len(column)


def _at_columns(terms, logits, saved, temperature, start, sizes, softcap) -> Tensor:
    x = to_math(logits, start, sizes, softcap=softcap)
    column = torch.arange(x.shape[-1], device=x.device, dtype=torch.int32)
    log_p = log_prob(x, saved[..., :1], saved[..., 1:2], temperature)
    gradient = _entry(terms, terms.a, log_p, column, start, sizes)
    gradient = _before_softcap(gradient, logits, softcap)
    return _finish(terms, gradient, saved, temperature, logits.dtype)


def _at_ids(
    terms, logits, saved, index, temperature, start, sizes, softcap, dtype
) -> tuple[Tensor, Tensor]:
    """The columns of the ids and the entries there in ``dtype``, both ``[rows, K]``.

    Computing these entries separately needs no ``[rows, V_local]`` buffer, rounds each entry once
    and gives equal ids the same entry. An id of another shard is clamped to a column of this shard,
    with a ``c`` of 0, and so yields the entry that this column has anyway.
    """
    local, owned = local_ids(index, start, logits.shape[-1])
    picked = logits.gather(-1, local)
    x = to_math(picked, start, sizes, column=local, softcap=softcap)
    slope, maximum, log_sum = terms.a, saved[..., :1], saved[..., 1:2]
    c = torch.where(owned, terms.c, 0)
    if terms.at_index is None:
        (c,) = sum_equal(local, c)
    else:
        slope_named, norm, counts = terms.at_index
        c, count = sum_equal(local, c, (owned & counts).to(x.dtype))
        named = count > 0
        slope = torch.where(named, slope_named, slope)
        maximum = torch.where(named, norm[..., :1], maximum)
        log_sum = torch.where(named, norm[..., 1:], log_sum)
    log_p = log_prob(x, maximum, log_sum, temperature)
    gradient = _entry(terms, slope, log_p, local, start, sizes)
    gradient = _before_softcap(gradient + c, picked, softcap)
    values = _finish(terms, gradient, saved, temperature, dtype)
    return local if local.device.type != "cpu" else local.to(torch.int32), values


def _entry(terms, slope, log_p, column, start, sizes) -> Tensor:
    """``p_v (a + b log p_v) + u``. The first term is 0 where p_v is 0, and u is 0 in padding."""
    if terms.b is not None:
        slope = slope + terms.b * log_p
    # Below the least exponent p is 0, and the slope may have overflowed. A test of p == 0 would
    # make Inductor store p, which takes MiBs at K = 64 ids (seen on torch 2.13).
    gradient = torch.where(log_p < least_exponent(log_p.dtype), 0, log_p.exp() * slope)
    if terms.u is None:
        return gradient
    return gradient + without_padding(terms.u, 0, start, sizes, column)


def _before_softcap(gradient, logits, softcap) -> Tensor:
    """The gradient of the logits from that of the capped logits."""
    return gradient if softcap is None else gradient * cap_slope(logits.to(gradient.dtype), softcap)


def _finish(terms, gradient, saved, temperature, dtype) -> Tensor:
    """Divides by the temperature and rounds to ``dtype``. Rows that are wholly -inf, or whose
    upstream gradient is 0, get 0.
    """
    live, maximum = terms.a != 0, saved[..., :1]
    if terms.u is not None:
        live = live | (terms.u != 0)
    if terms.c is not None:
        live = live | (terms.c != 0).any(-1, keepdim=True)
    if terms.at_index is not None:
        slope, norm, _ = terms.at_index
        live, maximum = live | (slope != 0), norm[..., :1]
    gradient = scaled(gradient, temperature)
    return torch.where(live & (maximum != -torch.inf), gradient, 0).to(dtype)
