"""The functions to measure: each op, the same in plain PyTorch, and alternatives (providers)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import dtensor_vocab as dv
from bench import naive

__all__ = [
    "APART",
    "CHUNKS",
    "COMPILED",
    "DEFAULT_FORMS",
    "GATHER",
    "IN_PLACE",
    "LOSS_PARALLEL",
    "MADE",
    "NAIVE",
    "OPS",
    "OURS",
    "TORCH",
    "K",
    "Op",
    "as_tuple",
]

Function = Callable[..., Any]

K = 64
"""Ids per position, where there are several."""
OURS = "dtensor_vocab"
IN_PLACE = "dtensor_vocab in place"
NAIVE = "naive"
APART = "the two ops apart"
MADE = "dtensor_vocab, materialized"
CHUNKS = "checkpointed chunks"
TORCH = "F.linear_cross_entropy"
GATHER = "gather, naive"
LOSS_PARALLEL = "loss_parallel"
COMPILED = " compiled"
"""The suffix of a provider's name: that provider under ``torch.compile``."""


@dataclass(frozen=True)
class Op:
    """One op and its inputs, which are the arguments that ``naive`` takes, by name."""

    name: str
    ours: Function
    naive: Function
    passes: int = 0
    """The least number of reads and writes of tensors of the logits' size, over both passes."""
    gradients: tuple[str, ...] = ("logits",)
    """The inputs that require a gradient."""
    k: int | None = None
    """Ids per position."""
    distinct: bool = False
    """Whether the highest logits must differ, because the op selects them."""
    sliced: bool = False
    """Whether the logits are ``[:, :-1]`` of longer ones."""
    draws: bool = False
    """Whether the op returns tokens drawn at random, and their log-probabilities."""
    hidden: int | None = None
    """Width of the hidden states, for an op on operands of a linear layer."""
    loss_parallel: Function | None = None
    gathered: Function | None = None
    """The naive function on gathered logits, by default ``naive`` on gathered inputs."""
    others: dict[str, Function] = field(default_factory=dict)
    """Further providers."""

    @property
    def inputs(self) -> tuple[str, ...]:
        parameters = inspect.signature(self.naive).parameters.values()
        return tuple(p.name for p in parameters if p.default is p.empty)

    @property
    def family(self) -> str:
        """The public function whose form this is."""
        return self.name.partition(",")[0].partition(" ")[0]

    @property
    def couples_rows(self) -> bool:
        return "weight" in self.gradients and self.hidden is None

    def function(self, provider: str) -> Function:
        if provider.endswith(COMPILED):
            return torch.compile(self.function(provider.removesuffix(COMPILED)), fullgraph=True)
        if provider == LOSS_PARALLEL and self.loss_parallel is not None:
            return self.loss_parallel
        gathered = self.gathered or _gathered(self.naive)
        ways = {OURS: self.ours, NAIVE: self.naive, GATHER: gathered, **self.others}
        return ways[provider]


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _gathered(fn: Function) -> Function:
    def run(**inputs: Any) -> Any:
        return fn(
            **{k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in inputs.items()}
        )

    return run


def _step(logprobs: Function) -> Function:
    def run(hidden: Tensor, weight: Tensor, index: Tensor, mask: Tensor) -> Tensor:
        return naive.masked_mean(logprobs(naive.head(hidden, weight), index), mask)

    return run


def _parallel_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target, reduction="none")


def _parallel_logprobs(logits: Tensor, index: Tensor) -> Tensor:
    return -_parallel_cross_entropy(logits, index)


def _apart(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    return dv.logprobs(logits, index), dv.entropy(logits)


def _in_place(fn: Function) -> dict[str, Function]:
    return {IN_PLACE: partial(fn, inplace_backward=True)}


# ---- logprobs of logits that are the product of hidden states and a weight


def _linear(hidden: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    return dv.logprobs(dv.LinearLogits(hidden, weight), index)


def _made(logprobs: Function) -> Function:
    def run(hidden: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        return logprobs(naive.head(hidden, weight), index)

    return run


def _linear_gathered(hidden: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    return naive.logprobs(naive.head(hidden, weight).full_tensor(), index)


def _in_chunks(hidden: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """Chunks of rows, whose logits are made again in backward."""
    chunks = zip(hidden.split(CHUNK_ROWS), index.split(CHUNK_ROWS), strict=True)
    made = _made(naive.logprobs)
    return torch.cat([checkpoint(made, h, weight, i, use_reentrant=False) for h, i in chunks])


CHUNK_ROWS = 256


def _linear_cross_entropy(hidden: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()  # Without options torch makes the logits.
    return -F.linear_cross_entropy(hidden, weight, index, reduction="none", options=options)


def _linear_op(width: int) -> Op:
    others = {MADE: _made(dv.logprobs), CHUNKS: _in_chunks}
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        others[TORCH] = _linear_cross_entropy
    return Op(
        f"linear logprobs, H = {width}",
        _linear,
        _made(naive.logprobs),
        gradients=("hidden", "weight"),
        hidden=width,
        loss_parallel=_made(_parallel_logprobs),
        gathered=_linear_gathered,
        others=others,
    )


STUDENT, BOTH, NONE = ("student",), ("student", "teacher"), ()
LOGPROBS = dv.logprobs, naive.logprobs
CAPPED = partial(dv.logprobs, softcap=30.0), partial(naive.capped_logprobs, softcap=30.0)
JOINT = dv.logprobs_and_entropy, naive.logprobs_and_entropy
KL = dv.kl_div, naive.kl_div
REVERSE_KL = [partial(op, reverse=True) for op in KL]
CROSS_ENTROPY = partial(dv.cross_entropy, reduction="none"), naive.cross_entropy
TOPK = partial(dv.topk_logprobs, k=K), partial(naive.topk_logprobs, k=K)
TOPK_KL = partial(dv.topk_kl_div, tail=True), naive.topk_kl_div
STEP = _step(dv.logprobs), _step(naive.logprobs)

OPS = {
    op.name: op
    for op in (
        Op(
            "logprobs",
            *LOGPROBS,
            passes=3,
            loss_parallel=_parallel_logprobs,
            others=_in_place(dv.logprobs),
        ),
        Op("logprobs, K = 64", *LOGPROBS, passes=3, k=K),
        Op("logprobs, logits[:, :-1]", *LOGPROBS, passes=3, sliced=True),
        Op("entropy", dv.entropy, naive.entropy, passes=3, others=_in_place(dv.entropy)),
        Op(
            "logprobs_and_entropy",
            *JOINT,
            passes=3,
            others={**_in_place(dv.logprobs_and_entropy), APART: _apart},
        ),
        Op("kl_div", *KL, passes=5, gradients=STUDENT),
        Op("kl_div, reverse", *REVERSE_KL, passes=5, gradients=STUDENT),
        Op("kl_div, both gradients", *KL, passes=6, gradients=BOTH),
        Op(
            "cross_entropy",
            *CROSS_ENTROPY,
            passes=3,
            loss_parallel=_parallel_cross_entropy,
            others=_in_place(CROSS_ENTROPY[0]),
        ),
        Op("js_div", dv.js_div, naive.js_div, passes=7, gradients=STUDENT),
        Op("topk_logprobs, K = 64", *TOPK, passes=3, k=K, distinct=True),
        Op("topk_kl_div, K = 64", *TOPK_KL, passes=3, gradients=STUDENT, k=K),
        Op("argmax", dv.argmax, naive.argmax, passes=1, gradients=NONE, distinct=True),
        Op(
            "sample", partial(dv.sample, seed=0), naive.sample, passes=1, gradients=NONE, draws=True
        ),
        Op("logprobs, softcap", *CAPPED, passes=3),
        _linear_op(512),
        _linear_op(2048),
        Op("step", *STEP, gradients=("hidden", "weight"), loss_parallel=_step(_parallel_logprobs)),
    )
}

_FAMILIES = dict.fromkeys(op.family for op in OPS.values() if "weight" not in op.gradients)
DEFAULT_FORMS = [next(op.name for op in OPS.values() if op.family == name) for name in _FAMILIES]
"""One form of each public function."""
