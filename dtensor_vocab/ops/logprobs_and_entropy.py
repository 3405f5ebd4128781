"""``logprobs_and_entropy``: both values from one read of the logits, the gradient in one write."""

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
from dtensor_vocab.ops.entropy import entropy_coefficients
from dtensor_vocab.softmax import merge_at_ids, softmax_stats
from dtensor_vocab.softmax_gradient import Coefficients, SoftmaxGradient

__all__ = ["logprobs_and_entropy"]


@operator("gathered, rows, rows -> rows, rows")
def logprobs_and_entropy_merge(
    stats: Tensor,
    index: Tensor,
    temperature: Tensor | None,
    vocab_size: int,
    ignore_index: int | None,
) -> tuple[Tensor, Tensor]:
    """``stats [shards, *, S]`` to (log p, H) ``[*, K + 1]`` and (M, log S, H) ``[*, 3]``.

    Both results are in one tensor: if the caller does not use one of several DTensor results,
    compiled code passes a plain tensor as its gradient (torch 2.11 to 2.14).
    """
    log_p, saved, passed = merge_at_ids(stats, index, temperature, ignore_index)
    assert_no_faults(
        "logprobs_and_entropy", passed, temperature is not None, vocab_size, ignore_index
    )
    both, lead = torch.cat([log_p, saved[..., 2:]], -1), stats.shape[1:-1]
    return both.view(*lead, both.shape[-1]), saved.view(*lead, 3)


@logprobs_and_entropy_merge.register_fake
def _(stats, index, *_):
    lead = stats.shape[1:-1]
    k = index.shape[-1] if index.dim() > len(lead) else 1
    return stats.new_empty((*lead, k + 1)), stats.new_empty((*lead, 3))


@SoftmaxGradient("logprobs_and_entropy")
def _gradient(
    grad: Tensor, saved: Tensor, index: Tensor, sizes: Sequence[int], ignore_index: int | None
) -> Coefficients:
    a, b, *_ = entropy_coefficients(grad[..., -1:], saved)
    c = torch.where(not_ignored(index, ignore_index), grad[..., :-1], 0)
    return Coefficients(a=a - c.sum(-1, keepdim=True), b=b, c=c)


class _LogprobsAndEntropy(PerToken):
    function, gradient = "logprobs_and_entropy", _gradient

    @staticmethod
    def forward(
        logits, index, temperature, vocab_start, sizes, ignore_index, softcap, inplace_backward
    ):
        args = logits, index, temperature, vocab_start, sizes, ignore_index
        stats = softmax_stats(*args, False, softcap)
        options = sizes[-1], ignore_index
        return gather_and_merge(logprobs_and_entropy_merge, stats, index, temperature, *options)


def logprobs_and_entropy(
    logits: Logits,
    index: Tensor,
    *,
    ignore_index: int | None = -100,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """``(logprobs(logits, index), entropy(logits))`` from one read of the logits.

    Backward reads the logits once and writes one gradient, whether one result is used or both.

    Args:
        logits: ``[*, V]``, fp16, bf16, fp32 or fp64, any strides; Tensor, DTensor or
            :class:`LinearLogits`.
        index: ids ``[*]`` or ``[*, K]``, int32 or int64, like those of :func:`logprobs`.
        ignore_index: ids equal to it give log-probability 0 and no gradient. The entropy of
            their rows is computed nevertheless.
        temperature, vocab_size, softcap, inplace_backward: like those of :func:`logprobs`.

    Returns:
        log-probabilities, shaped as ``index``, and entropies ``[*]``; dtype and placements like
        those of :func:`logprobs` and :func:`entropy`.

    Communication: forward one all-gather of 4 + K numbers per row over the vocabulary's mesh dim,
    or nothing where V is not sharded over several ranks. Backward communicates nothing.

    Rows and errors: as for :func:`logprobs` and :func:`entropy`.
    """
    name = "logprobs_and_entropy"
    logits, vocabulary = check_logits(name, logits, vocab_size)
    index = check_ids(name, index, logits)
    ignore_index = check_ignore_index(name, ignore_index)
    temperatures = check_temperature(name, temperature, logits)
    check_inplace_backward(name, inplace_backward, logits)
    index, temperatures = placed_by_row(logits, index, temperatures)
    options = ignore_index, check_softcap(name, softcap, logits), inplace_backward
    both, _ = _LogprobsAndEntropy.call(logits, index, temperatures, *vocabulary, *options)
    log_p = both[..., :-1] if index.dim() == logits.dim() else both[..., 0]
    results = log_p, both[..., -1]
    return tuple(x.clone(memory_format=torch.contiguous_format) for x in results)
