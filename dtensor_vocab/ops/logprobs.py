"""``logprobs``: log softmax at given ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtensor_vocab.autograd import PerToken, differentiable_once
from dtensor_vocab.inputs import check_ids, check_ignore_index, check_logits, check_temperature
from dtensor_vocab.kernel import as_rows, kernel, per_row, stats_per_row
from dtensor_vocab.operator import operator
from dtensor_vocab.rows import check, counted
from dtensor_vocab.softmax import merge_softmax, softmax_grad, softmax_stats


def logprobs(
    logits: Tensor,
    index: Tensor,
    *,
    ignore_index: int | None = -100,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
) -> Tensor:
    """todo"""
    vocabulary = check_logits("logprobs", logits, vocab_size)
    index = check_ids("logprobs", index, logits)
    check_ignore_index("logprobs", ignore_index)
    temperature = check_temperature("logprobs", temperature, logits)
    return _Logprobs.apply(logits, index, temperature, *vocabulary, ignore_index)[0]


class _Logprobs(PerToken):
    @staticmethod
    def forward(logits, index, temperature, vocab_start, vocab, shard_size, vocab_size, ignore_index):
        stats = softmax_stats(
            logits, index, temperature, vocab_start, vocab, shard_size, vocab_size, ignore_index, False
        )
        return logprobs_merge(stats, index, vocab_size, ignore_index)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        logits, index, temperature, vocab_start, vocab, _, vocab_size, ctx.ignore_index = inputs
        ctx.padding = vocab_size if vocab_size < vocab else None
        PerToken.save(ctx, outputs, logits, index, temperature, vocab_start)

    @staticmethod
    def backward(ctx, grad, _):
        logits, index, temperature, vocab_start, saved = ctx.saved_tensors
        grad_logits = logprobs_backward(
            grad, saved, logits, index, temperature, vocab_start, ctx.padding, ctx.ignore_index
        )
        return differentiable_once("logprobs", grad_logits, grad, logits), *(None,) * 7


@operator("gathered, rows -> rows, rows")
def logprobs_merge(
    stats: Tensor, index: Tensor, vocab_size: int, ignore_index: int | None
) -> tuple[Tensor, Tensor]:
    """``stats [shards, *, S]`` to log-probabilities, shaped as ``index``, and ``(M, log S) [*, 2]``."""
    out, saved, faults = _merge(stats_per_row(stats), per_row(index, stats[0]), ignore_index)
    check("logprobs", faults, vocab_size, ignore_index)
    return out.view(index.shape), saved.view(*stats.shape[1:-1], 2)


@logprobs_merge.register_fake
def _(stats, index, vocab_size, ignore_index):
    return stats.new_empty(index.shape), stats.new_empty((*stats.shape[1:-1], 2))


@kernel
def _merge(stats, index, ignore_index):
    softmax = merge_softmax(stats, weighted=False)
    log_p = (softmax.picked - softmax.maximum.unsqueeze(-1)) - softmax.log_sum.unsqueeze(-1)
    saved = torch.stack([softmax.maximum, softmax.log_sum], -1)
    return torch.where(counted(index, ignore_index), log_p, 0), saved, softmax.fault


@operator("rows, rows, logits, rows, rows, start -> logits")
def logprobs_backward(
    grad: Tensor,
    saved: Tensor,
    logits: Tensor,
    index: Tensor,
    temperature: Tensor | None,
    vocab_start: Tensor,
    vocab_size: int | None,
    ignore_index: int | None,
) -> Tensor:
    """Σ_k g_k (1[v = index_k] - p_v)."""
    if logits.numel() == 0:
        return torch.empty_like(logits, memory_format=torch.contiguous_format)
    rows = [per_row(values, logits) for values in (grad, saved, index, temperature)]
    return _gradient(as_rows(logits), *rows, vocab_start[0], vocab_size, ignore_index).view(logits.shape)


@logprobs_backward.register_fake
def _(grad, saved, logits, *_):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@kernel
def _gradient(logits, grad, saved, index, temperature, start, vocab_size, ignore_index):
    grad = torch.where(counted(index, ignore_index), grad, 0)
    a = -grad.sum(-1)
    return softmax_grad(
        logits, saved[..., 0], saved[..., 1], a, None, index, grad, temperature, start, vocab_size
    )
