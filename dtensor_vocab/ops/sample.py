"""``sample``: draws a token of each row from the softmax, by the Gumbel trick.

    argmax_v x_v / T + g_v

has the distribution softmax(x / T) for independent Gumbel noise g. A shard sends its best candidate
beside m and s of its softmax (see :mod:`~dtensor_vocab.softmax`). (Gumbel, Statistical theory of
extreme values and some practical applications, 1954; Maddison, Tarlow and Minka,
https://arxiv.org/abs/1411.0030, section 2.)

Candidates are compared by integers that depend on x_v, T and g_v alone, so neither blocks nor
shards change the draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_vocab.checks import (
    check_logits,
    check_seed,
    check_softcap,
    check_temperature,
    placed_by_row,
)
from dtensor_vocab.faults import assert_no_faults, coverage, passed_checks
from dtensor_vocab.kernel import kernel, merge_kernel
from dtensor_vocab.layout import (
    Sizes,
    first_column,
    gather_and_merge,
    num_shards,
    row_numbers,
)
from dtensor_vocab.linear_logits import Logits
from dtensor_vocab.noise import gumbel, row_states
from dtensor_vocab.numerics import (
    capped_tokens,
    columns_before,
    log_prob,
    math_dtype,
    merge_norms,
    to_math,
)
from dtensor_vocab.operators import operator
from dtensor_vocab.row_blocks import ByRow, chunked, flat, in_chunks, stats_per_row
from dtensor_vocab.shard_stats import stats_operator
from dtensor_vocab.softmax import softmax_sums

__all__ = ["sample"]

COLUMN_BITS = 24
"""Columns of a shard fit in this many bits."""


def _combine(stats: Tensor, temperature: Tensor | None) -> list[Tensor]:
    """Merges the statistics ``[rows, blocks, 6]`` of blocks of a shard."""
    maximum, total, _ = merge_norms(stats[..., 0], stats[..., 1], temperature)
    best = _best(stats, temperature)
    return [maximum, total, *(stats[..., i].gather(-1, best).squeeze(-1) for i in range(2, 6))]


@stats_operator("logits, rows, rows, rows, start -> stats", _combine, covered=2)
def sample_stats(
    logits: Tensor,
    row: Tensor,
    seed: Tensor,
    temperature: Tensor | None,
    vocab_start: Tensor | None,
    sizes: Sequence[int],
    softcap: float | None = None,
) -> Tensor:
    """m, s and coverage of a shard, its candidate's logit, noise and id: ``[1, *, 6]``.

    ``row [*]`` holds the number of each row among the rows of all ranks.
    """
    stats = _new_stats(logits, vocab_start)
    by_row = ByRow(logits)
    if by_row.count == 0:
        return stats
    # A kernel of its own, since the next one would repeat it for each column.
    state = _row_states(by_row(row), by_row(seed))
    args = by_row(temperature), first_column(vocab_start), logits.shape[-1], sizes, softcap
    return _shard_stats(*by_row.logits, state, *args).view(stats.shape)


@sample_stats.register_fake
def _(logits, row, seed, temperature, vocab_start, *_):
    return _new_stats(logits, vocab_start)


def _new_stats(logits, vocab_start) -> Tensor:
    shape = (num_shards(vocab_start), *logits.shape[:-1], 6)
    return logits.new_empty(shape, dtype=math_dtype(logits))


_row_states = merge_kernel(row_states)


@kernel
def _shard_stats(logits, state, temperature, start, width, sizes, softcap):
    (logits,) = flat(logits)
    x = to_math(logits, start, sizes)
    covered = coverage(x, None, temperature, start, width, sizes)
    tokens = columns_before(Sizes(*sizes).vocab_size, start, width, x.device)
    m, s, *_ = softmax_sums(x, temperature, tokens, sizes, False, softcap)

    column = torch.arange(x.shape[-1], device=x.device)
    noise = gumbel(state, column + start)
    order = _order(capped_tokens(x, tokens, softcap, column), noise, temperature)
    keys = (order << COLUMN_BITS) | ((1 << COLUMN_BITS) - 1 - column)
    if in_chunks(x):
        keys = chunked(keys, torch.iinfo(keys.dtype).min).amax(-1)
    best = keys.amax(-1, keepdim=True)
    column = (1 << COLUMN_BITS) - 1 - (best & ((1 << COLUMN_BITS) - 1))
    candidate = capped_tokens(x.gather(-1, column), tokens, softcap, column)
    ids = column + start
    noise = gumbel(state, ids)
    columns = m.unsqueeze(-1), s.unsqueeze(-1), covered.unsqueeze(-1), candidate, noise, ids
    return torch.cat([value.to(x.dtype) for value in columns], -1)


def _order(x: Tensor, noise: Tensor, temperature: Tensor | None) -> Tensor:
    """Integers of 40 bits that sort as ``x / T + noise`` in fp64 does. NaN counts as +inf."""
    x = x.double()
    if temperature is not None:
        x = x * temperature.double().reciprocal()
    score = x + noise.double()
    bits = torch.where(score != score, torch.inf, score).view(torch.int64)
    bits = torch.where(bits < 0, bits ^ torch.iinfo(torch.int64).max, bits)
    return bits >> COLUMN_BITS


def _best(stats: Tensor, temperature: Tensor | None) -> Tensor:
    """The shard ``[rows, 1]`` with the best candidate, the first of equal ones."""
    return _order(stats[..., 3], stats[..., 4], temperature).argmax(-1, keepdim=True)


@operator("gathered, rows -> rows, rows")
def sample_merge(stats: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    """``stats [shards, *, 6]`` to ids and their log-probabilities, both ``[*]``."""
    ids, log_p, passed = _merged(stats_per_row(stats), ByRow(stats[0])(temperature))
    assert_no_faults("sample", passed, temperature is not None)
    lead = stats.shape[1:-1]
    return ids.view(lead), log_p.view(lead)


@sample_merge.register_fake
def _(stats, temperature):
    lead = stats.shape[1:-1]
    return stats.new_empty(lead, dtype=torch.int64), stats.new_empty(lead)


@merge_kernel
def _merged(stats, temperature):
    maximum, total, _ = merge_norms(stats[..., 0], stats[..., 1], temperature)
    best = _best(stats, temperature)
    x, ids = (stats[..., i].gather(-1, best) for i in (3, 5))
    log_p = log_prob(x, maximum.unsqueeze(-1), total.log().unsqueeze(-1), temperature)
    return ids.squeeze(-1).to(torch.int64), log_p.squeeze(-1), passed_checks(stats[..., 2])


def sample(
    logits: Logits,
    seed: int | Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws one token for each row, from the softmax of ``logits / temperature``.

    Formula: ``argmax_v x_v / T + g_v`` with Gumbel noise g_v, a function of the seed, the number of
    the row and the column alone. The same seed gives the same tokens on every rank, for any number
    of ranks, mesh and placements, in eager and in compiled code. The noise is never stored.

    Same distribution as ``torch.multinomial(torch.softmax(logits.float() / temperature, -1), 1)``
    on the full vocabulary. The results have no gradient.

    Source: the noise is made by SplitMix64, Steele, Lea and Flood,
    https://doi.org/10.1145/2660193.2660195; for the Gumbel trick see Maddison, Tarlow and Minka,
    https://arxiv.org/abs/1411.0030, section 2.

    Args:
        logits: ``[*, V]``, fp16, bf16, fp32 or fp64, any strides; Tensor, DTensor or
            :class:`LinearLogits`. A row's number is its position among all rows of the global
            tensor, in row-major order.
        seed: int of 64 bits, or an int64 tensor ``[]``, Tensor or DTensor, which must be the same
            on every rank. Use another seed for each call. A CUDA graph that captured the call draws
            again after a new seed is written into the tensor.
        temperature: positive float, or a floating-point tensor of positive values: ``[*]``, one per
            row, placed as the result, or 0-d, one for all rows.
        vocab_size: number of columns that are tokens. The columns after them are padding, which is
            never drawn. Default: V.
        softcap: like that of :func:`logprobs`.

    Returns:
        ids ``[*]``, int64, and their log-probabilities ``[*]`` by the distribution they are drawn
        from, fp32 (fp64 for fp64 logits); placed like the result of :func:`entropy`.

    Communication: one all-gather of 6 numbers per row over the vocabulary's mesh dim, or nothing
    where V is not sharded over several ranks.

    Rows: a token whose logit is -inf is never drawn, unless all are: such a row gives id 0 and NaN.
    A row that holds NaN or +inf gives NaN and the id of the first of these.

    Raises:
        TypeError: if an argument has an unsupported type or dtype.
        ValueError: if shapes, devices, meshes, placements or options are invalid, or if V > 2**24.
            All ranks raise the same TypeError or ValueError before any communication, if they agree
            on the global shapes.
        RuntimeError: if, on any rank, a temperature is not a positive normal number
            or the shards do not fit together.
            An asynchronous assertion on the device raises it, on every rank that takes part in the
            collective; the host does not wait for it.
    """
    logits, vocabulary = check_logits("sample", logits, vocab_size)
    if vocabulary.sizes.columns > 1 << COLUMN_BITS:
        raise ValueError(
            f"sample: expected logits of at most {1 << COLUMN_BITS} columns, "
            f"got {vocabulary.sizes.columns}"
        )
    seed = check_seed("sample", seed, logits)
    temperatures = check_temperature("sample", temperature, logits)
    softcap = check_softcap("sample", softcap, logits)
    rows = placed_by_row(logits, row_numbers(logits), seed, temperatures)
    stats = sample_stats(logits, *rows, *vocabulary, softcap)
    return gather_and_merge(sample_merge, stats, rows[-1])
