"""``entropy``: H = -Σ p_v log p_v = log S - W / S of the softmax.

dH/dx_v = -p_v (log p_v + H)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_vocab.autograd import PerToken
from dtensor_vocab.checks import (
    check_inplace_backward,
    check_logits,
    check_softcap,
    check_temperature,
    placed_by_row,
)
from dtensor_vocab.faults import assert_no_faults
from dtensor_vocab.kernel import merge_kernel
from dtensor_vocab.layout import gather_and_merge
from dtensor_vocab.linear_logits import Logits
from dtensor_vocab.numerics import masked_product
from dtensor_vocab.operators import operator
from dtensor_vocab.row_blocks import ByRow, stats_per_row
from dtensor_vocab.softmax import merge_softmax, softmax_stats
from dtensor_vocab.softmax_gradient import Coefficients, SoftmaxGradient

__all__ = ["entropy", "entropy_coefficients"]


@operator("gathered, rows -> rows, rows")
def entropy_merge(stats: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    """``stats [shards, *, S]`` to H ``[*]`` and (M, log S, H) ``[*, 3]``."""
    value, saved, passed = _merged(stats_per_row(stats), ByRow(stats[0])(temperature))
    assert_no_faults("entropy", passed, temperature is not None)
    lead = stats.shape[1:-1]
    return value.view(lead), saved.view(*lead, 3)


@entropy_merge.register_fake
def _(stats, temperature):
    lead = stats.shape[1:-1]
    return stats.new_empty(lead), stats.new_empty((*lead, 3))


@merge_kernel
def _merged(stats, temperature):
    softmax = merge_softmax(stats, temperature)
    saved = torch.stack([softmax.maximum, softmax.log_sum, softmax.entropy], -1)
    return softmax.entropy, saved, softmax.passed


@SoftmaxGradient("entropy")
def _gradient(grad: Tensor, saved: Tensor, sizes: Sequence[int]) -> Coefficients:
    return entropy_coefficients(grad, saved)


def entropy_coefficients(grad: Tensor, saved: Tensor) -> Coefficients:
    """The coefficients a and b of H. Both are 0 where ``grad`` is 0, even if H is NaN."""
    return Coefficients(a=-masked_product(grad, saved[..., 2:3]), b=-grad)


class _Entropy(PerToken):
    function, gradient = "entropy", _gradient

    @staticmethod
    def forward(logits, temperature, vocab_start, sizes, softcap, inplace_backward):
        args = logits, None, temperature, vocab_start, sizes, None
        stats = softmax_stats(*args, False, softcap)
        return gather_and_merge(entropy_merge, stats, temperature)


def entropy(
    logits: Logits,
    *,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    """Entropy of the softmax of ``logits``, in nats.

    Formula: ``H = -Σ_v p_v log p_v = log S - W / S`` with S = Σ_v e^(x_v - M) and W = Σ_v
    e^(x_v - M) (x_v - M); gradient ``-p_v (log p_v + H)``.

    Same as ``torch.distributions.Categorical(logits=logits.float()).entropy()`` on the full
    vocabulary.

    Args:
        logits: ``[*, V]``, fp16, bf16, fp32 or fp64, any strides; Tensor, DTensor or
            :class:`LinearLogits`.
        temperature: positive float, or a floating-point tensor of positive values: ``[*]``, one per
            row, placed as the result, or 0-d, one for all rows. The softmax is of
            ``logits / temperature``; gradients are with respect to ``logits``, and none flows to
            the temperature.
        vocab_size: number of columns that are tokens. The columns after them are padding, with
            probability 0 and gradient 0. Default: V.
        softcap: like that of :func:`logprobs`.
        inplace_backward: like that of :func:`logprobs`.

    Returns:
        ``[*]``, fp32 (fp64 for fp64 logits), never negative; a DTensor if the logits are one,
        placed as in this table:

    ==================================  =====================================
    mesh dim that places the logits as  places ``temperature`` and the result as
    ==================================  =====================================
    ``Shard(-1)`` (at most one)         ``Replicate()``
    ``Shard(d)`` of a leading dim       ``Shard(d)``
    ``Replicate()``                     ``Replicate()``
    ==================================  =====================================

    Communication: forward one all-gather of 4 numbers per row over the vocabulary's mesh dim, or
    nothing where V is not sharded over several ranks. Backward communicates nothing.

    Rows: a row that is wholly -inf has the value NaN and the gradient 0. A row that holds NaN or
    +inf has NaN for both. The gradient is exactly 0 where the upstream gradient is 0, whatever the
    row holds.

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
    logits, vocabulary = check_logits("entropy", logits, vocab_size)
    temperatures = check_temperature("entropy", temperature, logits)
    check_inplace_backward("entropy", inplace_backward, logits)
    (temperatures,) = placed_by_row(logits, temperatures)
    options = check_softcap("entropy", softcap, logits), inplace_backward
    return _Entropy.call(logits, temperatures, *vocabulary, *options)[0]
