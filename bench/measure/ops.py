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

import dtensor_vocab as dv
from bench import naive

__all__ = [
    "APART",
    "COMPILED",
    "DEFAULT_FORMS",
    "GATHER",
    "IN_PLACE",
    "LOSS_PARALLEL",
    "NAIVE",
    "OPS",
    "OURS",
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
    loss_parallel: Function | None = None
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
        return "weight" in self.gradients

    def function(self, provider: str) -> Function:
        if provider.endswith(COMPILED):
            return torch.compile(self.function(provider.removesuffix(COMPILED)), fullgraph=True)
        if provider == LOSS_PARALLEL and self.loss_parallel is not None:
            return self.loss_parallel
        ways = {OURS: self.ours, NAIVE: self.naive, GATHER: _gathered(self.naive), **self.others}
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


STUDENT, BOTH, NONE = ("student",), ("student", "teacher"), ()
LOGPROBS = dv.logprobs, naive.logprobs
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
        Op("step", *STEP, gradients=("hidden", "weight"), loss_parallel=_step(_parallel_logprobs)),
    )
}

_FAMILIES = dict.fromkeys(op.family for op in OPS.values() if op.name != "step")
DEFAULT_FORMS = [next(op.name for op in OPS.values() if op.family == name) for name in _FAMILIES]
"""One form of each public function."""
