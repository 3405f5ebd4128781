"""``logprobs``: log softmax at given ids, log p = (x[index] - M) - log S.

d/dx_v Σ_k g_k log p[index_k] = Σ_k g_k (1[v = index_k] - p_v)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_vocab.autograd import PerToken
from dtensor_vocab.checks import (
    check_ids,
    check_ignore_index,
    check_inplace_backward,
    check_logits,
    check_softcap,
    check_temperature,
    placed_by_row,
)
from dtensor_vocab.faults import assert_no_faults
from dtensor_vocab.ids import not_ignored
from dtensor_vocab.layout import gather_and_merge
from dtensor_vocab.linear_logits import Logits
from dtensor_vocab.operators import operator
from dtensor_vocab.softmax import merge_at_ids, softmax_stats
from dtensor_vocab.softmax_gradient import Coefficients, SoftmaxGradient

__all__ = ["logprobs", "logprobs_gradient"]


@operator("gathered, rows, rows -> rows, rows")
def logprobs_merge(
    stats: Tensor,
    index: Tensor,
    temperature: Tensor | None,
    vocab_size: int,
    ignore_index: int | None,
) -> tuple[Tensor, Tensor]:
    """``stats [shards, *, S]`` to log p, shaped as ``index``, and (M, log S, H) ``[*, 3]``."""
    log_p, saved, passed = merge_at_ids(stats, index, temperature, ignore_index)
    assert_no_faults("logprobs", passed, temperature is not None, vocab_size, ignore_index)
    return log_p.view(index.shape), saved.view(*stats.shape[1:-1], 3)


@logprobs_merge.register_fake
def _(stats, index, *_):
    return stats.new_empty(index.shape), stats.new_empty((*stats.shape[1:-1], 3))


@SoftmaxGradient("logprobs", ids_dominate=True)
def logprobs_gradient(
    grad: Tensor, saved: Tensor, index: Tensor, sizes: Sequence[int], ignore_index: int | None
) -> Coefficients:
    grad = torch.where(not_ignored(index, ignore_index), grad, 0)
    return Coefficients(a=-grad.sum(-1, keepdim=True), c=grad)


class _Logprobs(PerToken):
    function, gradient = "logprobs", logprobs_gradient

    @staticmethod
    def forward(
        logits, index, temperature, vocab_start, sizes, ignore_index, softcap, inplace_backward
    ):
        args = logits, index, temperature, vocab_start, sizes, ignore_index
        stats = softmax_stats(*args, False, softcap)
        options = sizes[-1], ignore_index
        return gather_and_merge(logprobs_merge, stats, index, temperature, *options)


def logprobs(
    logits: Logits,
    index: Tensor,
    *,
    ignore_index: int | None = -100,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    """Log-probabilities of given tokens: log softmax of ``logits``, at ``index``.

    Formula: ``(x[index] - M) - log S`` with M the maximum and S = Σ_v e^(x_v - M) over the whole
    vocabulary; gradient ``Σ_k g_k (1[v = index_k] - p_v)``.

    Same as ``torch.log_softmax(logits.float(), -1).gather(-1, index)`` on the full vocabulary for
    ``index [*, K]``; ``index [*]`` takes one id per row.

    Args:
        logits: ``[*, V]``, fp16, bf16, fp32 or fp64, any strides; Tensor, DTensor or
            :class:`LinearLogits`.
        index: ids ``[*]`` or ``[*, K]``, int32 or int64, Tensor or DTensor. A plain tensor
            next to DTensor logits must be the same global tensor on every rank. A DTensor that is
            not placed as in the table below is redistributed once. Ids may repeat.
        ignore_index: ids equal to it give 0 and no gradient; None ignores nothing.
        temperature: positive float, or a floating-point tensor of positive values: ``[*]``, one per
            row, placed as ``index``, or 0-d, one for all rows. The softmax is of
            ``logits / temperature``; gradients are with respect to ``logits``, and none flows to
            the temperature.
        vocab_size: number of columns that are tokens. The columns after them are padding, with
            probability 0 and gradient 0, and ids of padding are out of range. Default: V.
        softcap: a positive float c puts ``c tanh(x / c)`` in place of every logit x, before the
            temperature. A logit of -inf then counts as -c; padding keeps probability 0. Default:
            no cap.
        inplace_backward: write the gradient into the storage of ``logits``. An op that saved them
            for its own backward then raises autograd's "modified by an inplace operation". Has no
            effect under ``torch.compile`` and ``torch.func``, where the gradient is a new tensor.
            An error for :class:`LinearLogits` and for logits whose elements share memory.

    Returns:
        fp32 (fp64 for fp64 logits), shaped as ``index``; a DTensor if the logits are one, placed as
        in this table:

    ==================================  =====================================
    mesh dim that places the logits as  places ``index`` and the result as
    ==================================  =====================================
    ``Shard(-1)`` (at most one)         ``Replicate()``
    ``Shard(d)`` of a leading dim       ``Shard(d)``
    ``Replicate()``                     ``Replicate()``
    ==================================  =====================================

    Communication: forward one all-gather of 4 + K numbers per row over the vocabulary's mesh dim,
    or nothing where V is not sharded over several ranks. Backward communicates nothing.

    Rows: the value is -inf for an id whose logit is -inf. A row that is wholly -inf has the value
    NaN and the gradient 0. A row that holds NaN or +inf has NaN for both. The gradient is exactly 0
    where the upstream gradient is 0 or the id is ignored, whatever the row holds.

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
    logits, vocabulary = check_logits("logprobs", logits, vocab_size)
    index = check_ids("logprobs", index, logits)
    ignore_index = check_ignore_index("logprobs", ignore_index)
    temperatures = check_temperature("logprobs", temperature, logits)
    check_inplace_backward("logprobs", inplace_backward, logits)
    index, temperatures = placed_by_row(logits, index, temperatures)
    options = ignore_index, check_softcap("logprobs", softcap, logits), inplace_backward
    return _Logprobs.call(logits, index, temperatures, *vocabulary, *options)[0]
