"""``cross_entropy`` with label smoothing ε and z-loss ζ. For a vocabulary of n tokens,

loss = -(1 - ε) log p_y - ε/n Σ_v log p_v + ζ lse²,  lse = M + log S

dloss/dx_v = p_v (1 + 2 ζ lse) - (1 - ε) 1[v = y] - ε/n
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

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
    check_weight,
    placed_by_row,
)
from dtensor_vocab.faults import NUM_CHECKS, assert_no_faults
from dtensor_vocab.ids import not_ignored
from dtensor_vocab.kernel import merge_kernel
from dtensor_vocab.layout import all_reduce_and_finish, gather_and_merge
from dtensor_vocab.linear_logits import Logits
from dtensor_vocab.numerics import masked_product, scaled
from dtensor_vocab.operators import operator
from dtensor_vocab.row_blocks import ByRow
from dtensor_vocab.softmax import merge_at_ids, softmax_stats
from dtensor_vocab.softmax_gradient import Coefficients, SoftmaxGradient

__all__ = ["cross_entropy"]


@operator("gathered, rows, rows -> rows, rows, rows")
def cross_entropy_merge(
    stats: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    vocab_size: int,
    ignore_index: int | None,
    label_smoothing: float,
    z_loss: float,
    checked: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Merges ``stats [shards, *, S]``. Returns the losses ``[*]``, flags ``[*, 1 + NUM_CHECKS]``
    and (M, log S, lse) ``[*, 3]``. The first flag is 1 if the target is not ignored. The others are
    1 if the row fails that check.

    Faults raise here if ``checked``. Otherwise they raise in ``cross_entropy_reduce``.
    """
    log_p, merged, passed = merge_at_ids(
        stats, target, temperature, ignore_index, label_smoothing > 0
    )
    by_row = ByRow(stats[0])
    # Pass 0 as None: a float is a tensor inside a kernel, so its value cannot be tested there.
    loss, counts, saved = _loss(
        log_p,
        merged,
        passed,
        by_row(target),
        by_row(temperature),
        ignore_index,
        label_smoothing or None,
        z_loss or None,
    )
    if checked:
        tempered = temperature is not None
        assert_no_faults("cross_entropy", passed, tempered, vocab_size, ignore_index)
    shape = target.shape
    return loss.view(shape), counts.view(*shape, 1 + NUM_CHECKS), saved.view(*shape, 3)


@cross_entropy_merge.register_fake
def _(stats, target, *_):
    shape = target.shape
    counts = stats.new_empty((*shape, 1 + NUM_CHECKS))
    return stats.new_empty(shape), counts, stats.new_empty((*shape, 3))


@merge_kernel
def _loss(log_p, merged, passed, target, temperature, ignore_index, label_smoothing, z_loss):
    maximum, log_sum = merged[..., :1], merged[..., 1:2]
    lse = scaled(maximum, temperature) + log_sum
    valid = not_ignored(target, ignore_index)
    loss = -log_p
    if label_smoothing is not None:
        loss = (1 - label_smoothing) * loss - label_smoothing * merged[..., 3:]
    if z_loss is not None:
        loss = loss + z_loss * lse.square()
    loss = torch.where(valid, loss, 0).squeeze(-1)
    counts = torch.cat([valid, ~passed], -1).to(loss.dtype)
    return loss, counts, torch.cat([maximum, log_sum, lse], -1)


@operator("rows, rows -> sums")
def cross_entropy_sum(loss: Tensor, counts: Tensor, ndim: int) -> Tensor:
    """The sums of ``loss [*]`` and of ``counts [*, C]`` over this rank's rows: ``[1 + C]``.

    The last ``ndim`` dims of the loss are its rows. Dims before them are batch dims of
    ``torch.vmap``, which are not summed.
    """
    loss, counts = loss.unsqueeze(-1), counts.unsqueeze(-2)
    loss, counts = loss.flatten(-1 - ndim), counts.flatten(-2 - ndim, -2)
    return torch.cat([loss.sum(-1, keepdim=True), counts.sum(-2)], -1)


@cross_entropy_sum.register_fake
def _(loss, counts, ndim):
    return loss.new_empty((*loss.shape[: loss.dim() - ndim], 1 + counts.shape[-1]))


@operator("total -> total, total")
def cross_entropy_reduce(
    sums: Tensor, vocab_size: int, ignore_index: int | None, tempered: bool, mean: bool
) -> tuple[Tensor, Tensor]:
    """Returns the reduced loss and the weight of one row in it, from ``sums [1 + C]``.

    Faults raise here, because the sums include the failed checks of all ranks.
    """
    loss, count, failed = sums[..., 0], sums[..., 1], sums[..., 2:]
    passed = failed.reshape(-1, NUM_CHECKS) <= 0
    assert_no_faults("cross_entropy", passed, tempered, vocab_size, ignore_index)
    count = count.clamp_min(1) if mean else torch.ones_like(count)
    return loss / count, 1 / count


@cross_entropy_reduce.register_fake
def _(sums, *_):
    return sums.new_empty(sums.shape[:-1]), sums.new_empty(sums.shape[:-1])


@SoftmaxGradient("cross_entropy", ids_dominate=True)
def _gradient(
    grad: Tensor,
    saved: Tensor,
    target: Tensor,
    sizes: Sequence[int],
    ignore_index: int | None,
    label_smoothing: float,
    z_loss: float,
) -> Coefficients:
    c = torch.where(not_ignored(target, ignore_index), -grad, 0)
    a = -c
    if z_loss is not None:
        a = masked_product(a, 1 + 2 * z_loss * saved[..., 2:3])
    if label_smoothing is None:
        return Coefficients(a=a, c=c)
    smoothed = label_smoothing * c
    return Coefficients(a=a, c=c - smoothed, u=smoothed / sizes[-1])


class _CrossEntropy(PerToken):
    function, gradient = "cross_entropy", _gradient

    @staticmethod
    def forward(
        logits,
        target,
        temperature,
        vocab_start,
        sizes,
        ignore_index,
        label_smoothing,
        z_loss,
        softcap,
        reduction,
        inplace_backward,
    ):
        args = logits, target, temperature, vocab_start, sizes, ignore_index
        stats = softmax_stats(*args, label_smoothing > 0, softcap)
        options = sizes[-1], ignore_index, label_smoothing, z_loss, reduction == "none"
        loss, counts, saved = gather_and_merge(
            cross_entropy_merge, stats, target, temperature, *options
        )
        if reduction == "none":
            return loss, saved
        sums = cross_entropy_sum(loss, counts, loss.dim())
        options = sizes[-1], ignore_index, temperature is not None, reduction == "mean"
        return *all_reduce_and_finish(cross_entropy_reduce, sums, *options), saved

    @staticmethod
    def keep(ctx, inputs, outputs):
        *inputs, _, inplace_backward = inputs
        kept = _gradient.keep(ctx, (*inputs, inplace_backward), outputs)
        return (outputs[1] if len(outputs) == 3 else None, *kept)

    @staticmethod
    def gradients(ctx, grad, saved, weight, *kept):
        return _gradient.gradients(ctx, grad if weight is None else grad * weight, saved, *kept)


def cross_entropy(
    logits: Logits,
    target: Tensor,
    *,
    ignore_index: int | None = -100,
    reduction: Literal["none", "sum", "mean"] = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    """Cross-entropy with optional label smoothing and z-loss.

    Formula: with ε = ``label_smoothing``, ζ = ``z_loss``, n = ``vocab_size`` and lse =
    log Σ_v e^(x_v), ``-(1 - ε) log p_y - ε/n Σ_v log p_v + ζ lse²``; gradient
    ``p_v (1 + 2 ζ lse) - (1 - ε) 1[v = y] - ε/n``.

    Same as ``F.cross_entropy(logits.flatten(0, -2).float(), target.flatten(), ...)`` on the full
    vocabulary without its padding, plus the z-loss, except that the mean is 0 if every target is
    ignored. (z-loss: Chowdhery et al., https://arxiv.org/abs/2204.02311, section 5.)

    Args:
        logits: ``[*, V]``, fp16, bf16, fp32 or fp64, any strides; Tensor, DTensor or
            :class:`LinearLogits`.
        target: ids ``[*]``, int32 or int64, like ``index`` of :func:`logprobs`.
        ignore_index: targets equal to it give loss 0 and no gradient; None ignores nothing.
        reduction: ``"none"``, ``"sum"`` over all rows of all ranks, or ``"mean"`` over those whose
            target is not ignored.
        label_smoothing: 0 <= ε <= 1.
        z_loss: ζ >= 0.
        temperature, vocab_size, softcap, inplace_backward: like those of :func:`logprobs`.

    Returns:
        fp32 (fp64 for fp64 logits). ``"none"`` returns ``[*]``, placed like the result of
        :func:`logprobs`. The other two return a scalar, ``Replicate()`` on every mesh dim.

    Communication: forward one all-gather of 5 numbers per row (7 with label smoothing) over the
    vocabulary's mesh dim, or nothing where V is not sharded over several ranks. ``"sum"`` and
    ``"mean"`` all-reduce five numbers over each mesh dim that shards a leading dim. Backward
    communicates nothing.

    Rows: the loss is +inf if the target's logit is -inf. With label smoothing it is +inf if any
    logit is -inf, but NaN at ε = 1 if the target's own logit is, as in torch. Otherwise as for
    :func:`logprobs`.

    Raises:
        TypeError: if an argument has an unsupported type or dtype.
        ValueError: if shapes, devices, meshes, placements or options are invalid, or if V > 2**24
            unless the logits are fp64. All ranks raise the same TypeError or ValueError before any
            communication, if they agree on the global shapes.
        RuntimeError: if, on any rank, an id is out of range, a temperature is not a
            positive normal number, or the shards do not fit together.
            An asynchronous assertion on the device raises it, on every rank that takes part in one
            of the collectives; the host does not wait for it.
    """
    name = "cross_entropy"
    logits, vocabulary = check_logits(name, logits, vocab_size)
    target = check_ids(name, target, logits, "target", ((),))
    ignore_index = check_ignore_index(name, ignore_index)
    temperatures = check_temperature(name, temperature, logits)
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"{name}: expected reduction none, sum or mean, got {reduction!r}")
    check_inplace_backward(name, inplace_backward, logits)
    label_smoothing = check_weight(name, label_smoothing, "label_smoothing", 1)
    z_loss = check_weight(name, z_loss, "z_loss")
    softcap = check_softcap(name, softcap, logits)
    target, temperatures = placed_by_row(logits, target, temperatures)
    loss, *_ = _CrossEntropy.call(
        logits,
        target,
        temperatures,
        *vocabulary,
        ignore_index,
        label_smoothing,
        z_loss,
        softcap,
        reduction,
        inplace_backward,
    )
    return loss
