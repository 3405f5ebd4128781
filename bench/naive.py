"""The ops in plain PyTorch on the full vocabulary, as a baseline and a reference.

The math is in fp32 for half-precision logits, as in most losses. On fp64 logits these functions are
the reference for the values of every provider. The training job on one rank uses them too.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def log_softmax(logits: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.log_softmax(wide, dim=-1)


def logprobs(logits: Tensor, index: Tensor, ignore_index: int = -100) -> Tensor:
    return _at(log_softmax(logits), index, ignore_index)


def capped_logprobs(logits: Tensor, index: Tensor, softcap: float) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return logprobs(softcap * torch.tanh(wide / softcap), index)


def _at(log_p: Tensor, index: Tensor, ignore_index: int) -> Tensor:
    ignored = index == ignore_index
    ids = index.masked_fill(ignored, 0)
    if index.dim() == log_p.dim():
        return log_p.gather(-1, ids).masked_fill(ignored, 0)
    return log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1).masked_fill(ignored, 0)


def entropy(logits: Tensor) -> Tensor:
    log_p = log_softmax(logits)
    return -(log_p.exp() * log_p).sum(-1)


def logprobs_and_entropy(
    logits: Tensor, index: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    log_p = log_softmax(logits)
    return _at(log_p, index, ignore_index), -(log_p.exp() * log_p).sum(-1)


def kl_div(student: Tensor, teacher: Tensor, *, reverse: bool = False) -> Tensor:
    log_s, log_t = log_softmax(student), log_softmax(teacher)
    return _kl(log_s, log_t) if reverse else _kl(log_t, log_s)


def js_div(student: Tensor, teacher: Tensor) -> Tensor:
    log_s, log_t = log_softmax(student), log_softmax(teacher)
    log_m = torch.logaddexp(log_s, log_t) - math.log(2)
    return (_kl(log_t, log_m) + _kl(log_s, log_m)) / 2


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, target, reduction="none")


def topk_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, ids = log_softmax(logits).topk(k, dim=-1)
    return values, ids


def argmax(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Draws a token by the Gumbel trick."""
    log_p = log_softmax(logits)
    ids = (log_p - torch.empty_like(log_p).exponential_().log()).argmax(-1)
    return ids, _at(log_p, ids, -1)


def topk_kl_div(student: Tensor, teacher_logprobs: Tensor, teacher_ids: Tensor) -> Tensor:
    """Forward KL, with a bucket for all other tokens."""
    log_s = log_softmax(student).gather(-1, teacher_ids)
    log_t = teacher_logprobs
    rest_s, rest_t = (torch.log1p(-log_p.exp().sum(-1)) for log_p in (log_s, log_t))
    return (log_t.exp() * (log_t - log_s)).sum(-1) + rest_t.exp() * (rest_t - rest_s)


def step(hidden: Tensor, weight: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    """The end of a training step: head, log-probabilities, masked mean."""
    return masked_mean(logprobs(head(hidden, weight), index), mask)


def head(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden @ weight.t()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()
