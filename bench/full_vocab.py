"""The ops that the training job uses, on the whole vocabulary and in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["kl_div", "logprobs", "logprobs_and_entropy"]


def logprobs(logits: Tensor, index: Tensor, ignore_index: int = -100) -> Tensor:
    loss = F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2),
        index.flatten(),
        ignore_index=ignore_index,
        reduction="none",
    )
    return -loss.view(index.shape)


def logprobs_and_entropy(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return logprobs(logits, index), -(log_p.exp() * log_p).sum(-1)


def kl_div(student: Tensor, teacher: Tensor, *, reverse: bool = False) -> Tensor:
    log_s, log_t = (
        logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        for logits in (student, teacher)
    )
    log_p, log_q = (log_s, log_t) if reverse else (log_t, log_s)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
