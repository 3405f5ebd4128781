"""``topk_logprobs``: the K likeliest tokens of each row; ties go to the lower id.

Each shard sends its own K candidates beside its softmax statistics. Candidates are sent and sorted
as logits, because temperature and normalisation may round two of them to the same value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_vocab.autograd import PerToken
from dtensor_vocab.checks import (
    check_k,
    check_logits,
    check_softcap,
    check_temperature,
    placed_by_row,
)
from dtensor_vocab.faults import assert_no_faults
from dtensor_vocab.kernel import kernel, merge_kernel
from dtensor_vocab.layout import first_column, gather_and_merge
from dtensor_vocab.linear_logits import Logits
from dtensor_vocab.numerics import capped, log_prob, math_dtype, without_padding
from dtensor_vocab.operators import operator
from dtensor_vocab.ops.logprobs import logprobs_gradient
from dtensor_vocab.row_blocks import ByRow, flat, in_blocks, stats_per_row
from dtensor_vocab.shard_stats import stats_operator
from dtensor_vocab.softmax import combine_softmax, merge_softmax, softmax_stats

__all__ = ["topk_logprobs"]

SEARCH_BLOCK = 1 << 20
"""How many logits one block of the search holds on a CPU; on a GPU 2**30. For a small k, each takes
half a byte of scratch memory."""
CHUNK = 16
"""How many columns one chunk has. The first step of the search compares the maxima of chunks."""
LOW_BITS = 0x7FFFFFFF


def _combine(stats: Tensor, temperature: Tensor | None, k: int) -> list[Tensor]:
    """Merges the statistics ``[rows, blocks, 4 + 2 K]`` of blocks of a shard."""
    softmax = combine_softmax(stats[..., :4], temperature, None)
    values, ids = stats[..., 4 : 4 + k].flatten(1), stats[..., 4 + k :].flatten(1)
    return [*softmax, *(x[..., :k] for x in _ordered(values, ids))]


@stats_operator("logits, rows, start -> stats", _combine, covered=2)
def topk_logprobs_stats(
    logits: Tensor,
    temperature: Tensor | None,
    vocab_start: Tensor | None,
    sizes: Sequence[int],
    k: int,
    softcap: float | None = None,
) -> Tensor:
    """A shard's ``softmax_stats``, its K largest logits and their ids: ``[1, *, 4 + 2 K]``."""
    softmax = softmax_stats(logits, None, temperature, vocab_start, sizes, None, False, softcap)
    by_row = ByRow(logits)
    if by_row.count == 0 or k == 0:
        return softmax.new_empty((*softmax.shape[:-1], 4 + 2 * k)) if k > 0 else softmax
    args = *by_row.logits, first_column(vocab_start), sizes, k
    block = SEARCH_BLOCK if logits.device.type == "cpu" else 4 * SEARCH_BLOCK
    candidates = in_blocks(_candidates, args, block // by_row.logits[0].shape[-1])
    return torch.cat([softmax, candidates.view(*softmax.shape[:-1], 2 * k)], -1)


@topk_logprobs_stats.register_fake
def _(logits, temperature, vocab_start, sizes, k, softcap=None):
    softmax = softmax_stats(logits, None, temperature, vocab_start, sizes, None)
    return softmax.new_empty((*softmax.shape[:-1], 4 + 2 * k))


@kernel
def _candidates(x, start, sizes, k):
    """The k largest logits of each row and their ids, ``[rows, 2 K]``."""
    (x,) = flat(x)
    found = min(k, x.shape[-1])
    values, columns = _largest(without_padding(x, -torch.inf, start, sizes), found)
    dtype = math_dtype(x)
    values, ids = values.to(dtype), (columns + start).to(dtype)
    if found < k:
        values = torch.nn.functional.pad(values, (0, k - found), value=-torch.inf)
        # They sort after every real id, even where both are -inf.
        ids = torch.nn.functional.pad(ids, (0, k - found), value=sizes[0])
    return torch.cat([values, ids], -1)


def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row and their columns, by value, then by column."""
    n = x.shape[-1]
    column = torch.arange(n, device=x.device)
    if x.dtype == torch.float64:
        values, columns = x.sort(dim=-1, descending=True, stable=True)
        return values[..., :k], columns[..., :k]
    if n >= 2 * CHUNK * k:
        # The k largest lie in the k chunks with the largest maxima, because every logit of another
        # chunk sorts after these k maxima. Chunk c has the columns c, c + chunks, ..., so that the
        # maxima of all chunks are computed with vector instructions.
        chunks = n // CHUNK
        x_in = x[..., : chunks * CHUNK].unflatten(-1, (CHUNK, chunks))
        best = x_in.amax(-2)
        step = torch.arange(CHUNK, device=x.device, dtype=torch.int32).unsqueeze(-1)
        first = torch.where((x_in == best.unsqueeze(-2)) | (x_in != x_in), step, CHUNK).amin(-2)
        keys = _keys(best, first * chunks + column[:chunks])
        chunk = keys.topk(k, sorted=False).indices
        rest = column[chunks * CHUNK :].expand(len(x), -1)
        inside = (chunk.unsqueeze(-1) + step.squeeze(-1) * chunks).flatten(-2)
        column = torch.cat([inside, rest], -1)
        keys = _keys(x.gather(-1, column), column)
    else:
        keys = _keys(x, column)
    columns = _column(keys.topk(k).values)
    return x.gather(-1, columns), columns


def _keys(x: Tensor, column: Tensor) -> Tensor:
    """An integer for each logit that sorts by value, with NaN the largest, and then by column.

    The upper 32 bits are those of the value, mapped so that integers sort as the values do. The
    lower bits decide ties for the lower column; torch.topk of the values would decide them at will.
    """
    x = torch.where(x == 0, 0, x.float())  # -0 becomes 0; the next line maps every NaN to one.
    bits = torch.where(x != x, torch.nan, x).view(torch.int32)
    bits = torch.where(bits < 0, bits ^ LOW_BITS, bits)
    return (bits.long() << 32) | (LOW_BITS - column)


def _column(keys: Tensor) -> Tensor:
    return LOW_BITS - (keys & LOW_BITS)


def _ordered(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts by descending value, and equal values by ascending id."""
    ids, order = ids.sort(dim=-1)
    values, last = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, last)


@operator("gathered, rows -> rows, rows, rows, rows")
def topk_logprobs_merge(
    stats: Tensor, temperature: Tensor | None, k: int, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``stats [shards, *, S]`` to log p and ids ``[*, K]``, a copy of the ids for backward, int32,
    since the caller may edit the others, and (M, log S) ``[*, 2]``.
    """
    temperatures = ByRow(stats[0])(temperature)
    *results, saved, passed = _merged(stats_per_row(stats), temperatures, k, softcap)
    assert_no_faults("topk_logprobs", passed, temperature is not None)
    lead = stats.shape[1:-1]
    log_p, ids, kept = (x.view(*lead, k) for x in results)
    return log_p, ids, kept, saved.view(*lead, 2)


@topk_logprobs_merge.register_fake
def _(stats, temperature, k, softcap=None):
    lead = stats.shape[1:-1]
    ids = stats.new_empty((*lead, k), dtype=torch.int64)
    return stats.new_empty((*lead, k)), ids, ids.int(), stats.new_empty((*lead, 2))


@merge_kernel
def _merged(stats, temperature, k, softcap):
    softmax = merge_softmax(stats[..., :4], temperature)
    saved = torch.stack([softmax.maximum, softmax.log_sum], -1)
    values, ids = stats[..., 4 : 4 + k], stats[..., 4 + k :]
    if stats.shape[1] == 1:
        values, ids = values.squeeze(1), ids.squeeze(1)
    else:
        values, ids = (x[..., :k] for x in _ordered(values.flatten(-2), ids.flatten(-2)))
    log_p = log_prob(capped(values, softcap), saved[..., :1], saved[..., 1:], temperature)
    return log_p, ids.to(torch.int64), ids.to(torch.int32), saved, softmax.passed


class _TopkLogprobs(PerToken):
    function, gradient = "topk_logprobs", logprobs_gradient

    @staticmethod
    def forward(logits, temperature, vocab_start, sizes, softcap, k):
        stats = topk_logprobs_stats(logits, temperature, vocab_start, sizes, k, softcap)
        return gather_and_merge(topk_logprobs_merge, stats, temperature, k, softcap)

    @staticmethod
    def keep(ctx, inputs, outputs):
        logits, *inputs, softcap, _ = inputs
        options = None, softcap, False  # ignore_index, softcap, inplace_backward
        return logprobs_gradient.keep(ctx, (logits, outputs[2], *inputs, *options), outputs)


def topk_logprobs(
    logits: Logits,
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of the ``k`` likeliest tokens of each row.

    Same as ``torch.log_softmax(logits.float(), -1).sort(dim=-1, descending=True, stable=True)``,
    cut to k: normalised over the whole vocabulary, with ties resolved to the lower id. The number
    of ranks does not change the selected tokens. The gradient is that of :func:`logprobs` at the
    ids.

    Args:
        logits: ``[*, V]``, fp16, bf16, fp32 or fp64, any strides; Tensor, DTensor or
            :class:`LinearLogits`.
        k: 0 <= k <= the size of the vocabulary; it may exceed a shard.
        temperature: positive float, or a floating-point tensor of positive values: ``[*]``, one per
            row, placed as the result, or 0-d, one for all rows. The softmax is of
            ``logits / temperature``; gradients are with respect to ``logits``, and none flows to
            the temperature.
        vocab_size: number of columns that are tokens. The columns after them are padding, with
            probability 0 and gradient 0. Default: V.
        softcap: like that of :func:`logprobs`.

    Returns:
        log-probabilities ``[*, k]``, fp32 (fp64 for fp64 logits), and ids ``[*, k]``, int64;
        placed like the result of :func:`logprobs`.

    Communication: forward one all-gather of 4 + 2 k numbers per row over the vocabulary's mesh dim,
    or nothing where V is not sharded over several ranks. Backward communicates nothing.

    Rows: as for :func:`logprobs`. NaN counts as the largest logit.

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
    logits, vocabulary = check_logits("topk_logprobs", logits, vocab_size)
    k = check_k("topk_logprobs", k, vocabulary)
    temperatures = check_temperature("topk_logprobs", temperature, logits)
    softcap = check_softcap("topk_logprobs", softcap, logits)
    (temperatures,) = placed_by_row(logits, temperatures)
    log_p, ids, *_ = _TopkLogprobs.call(logits, temperatures, *vocabulary, softcap, k)
    return log_p, ids
