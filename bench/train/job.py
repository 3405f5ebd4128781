"""The training job: cross-entropy, then policy gradient, on a mesh of ranks or on one alone.

The loss is a sum over positions, divided by the number of positions that count in the *global*
batch, over all micro-batches and all dp ranks. FSDP2 averages gradients over dp, so every rank
multiplies its part of the loss by dp. All tp ranks hold the same loss and need no factor.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import dtensor_vocab as dv
from bench import naive
from bench.train.model import Decoder, parallelize
from bench.train.text import UNKNOWN, text_ids, windows

IGNORED = -100
SEED = 5000
ENTROPY_BONUS = 0.01
KL_PENALTY = 0.1
FOREACH = False
"""Whether clipping and the optimizer may use operators on lists of tensors.

The gradients of weights that are replicated between sequence-parallel activations are ``Partial``.
On torch 2.11.0, an in-place operator on a list (``torch._foreach_mul_``) scales a redistributed
copy of such a tensor and drops it: ``clip_grad_norm_`` leaves the gradient unclipped, and SGD never
decays the momentum, without an error. Operators on single tensors are right on torch 2.11.0, and
both kinds are right on torch 2.13.0 and 2.14.1. A similar report:
https://github.com/pytorch/pytorch/issues/163374.
"""


@dataclass(frozen=True)
class Job:
    """The model, data and options of a run, the same for any number of ranks."""

    steps: int = 40
    policy_steps: int = 10
    batch: int = 16
    length: int = 64
    vocab: int = 3001
    dim: int = 128
    layers: int = 2
    accumulate: int = 1
    clip: float = 1.0
    bf16: bool = False
    compile: bool = False
    linear: bool = False


@dataclass
class Outcome:
    """The results by which two runs are compared: an entry per step, and the final weights."""

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    guesses: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


# ------------------------------------------------------------------ objectives


def cross_entropy(ops: Any, logits: Tensor, target: Tensor) -> Tensor:
    return -local(ops.logprobs(logits, target)).sum()


def policy_gradient(
    ops: Any, logits: Tensor, frozen_logits: Tensor, sampled: Tensor, advantage: Tensor
) -> Tensor:
    log_p, entropy = map(local, ops.logprobs_and_entropy(logits, sampled))
    kl = local(ops.kl_div(logits, frozen_logits, reverse=True))
    loss = KL_PENALTY * kl - ENTROPY_BONUS * entropy - advantage * log_p
    return torch.where(sampled != IGNORED, loss, 0).sum()


def local(values: Tensor) -> Tensor:
    """This rank's rows: the results of the ops are replicated over tp."""
    return values.to_local() if isinstance(values, DTensor) else values


# ------------------------------------------------------------------ a run


class Run:
    """One run of a job, on the ranks of ``mesh`` (dp × tp), or on one rank if it is None."""

    def __init__(
        self, job: Job, device: str, mesh: DeviceMesh | None, replayed: Outcome | None
    ) -> None:
        self.job, self.device, self.mesh, self.replayed = job, device, mesh, replayed
        self.dp = 1 if mesh is None else mesh["dp"].size()
        self.ops = naive if mesh is None else dv
        compile = torch.compile(fullgraph=True) if job.compile and mesh is not None else lambda f: f
        self.cross_entropy = functools.partial(compile(cross_entropy), self.ops)
        self.policy_gradient = functools.partial(compile(policy_gradient), self.ops)
        self.model = self.build()
        # Adam would hide a wrong factor in the gradients, and magnify their rounding near 0.
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.1, momentum=0.9, foreach=FOREACH
        )
        self.order = torch.Generator().manual_seed(0)
        self.text = text_ids(job.vocab)
        self.outcome = Outcome()

    def build(self) -> Decoder:
        torch.manual_seed(0)
        linear = self.job.linear and self.mesh is not None
        model = Decoder(self.job.vocab, self.job.dim, self.job.layers, linear).to(self.device)
        if self.mesh is None:
            return model
        return parallelize(model, self.mesh, self.job.bf16, self.job.compile)

    def logits(self, model: Decoder, tokens: Tensor) -> Tensor | dv.LinearLogits:
        if self.job.bf16 and self.mesh is None:  # as FSDP2's mixed precision does
            cast = {name: weight.bfloat16() for name, weight in model.named_parameters()}
            return functional_call(model, cast, tokens)
        return model(tokens)

    def share(self, rows: Tensor) -> tuple[Tensor, ...]:
        """This rank's micro-batches of ``rows``, a batch that is the same on every rank."""
        if self.mesh is not None:
            rows = rows.chunk(self.dp)[self.mesh["dp"].get_local_rank()]
        return rows.to(self.device).chunk(self.job.accumulate)

    def total(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over dp, in place."""
        if self.mesh is not None:
            dist.all_reduce(values, group=self.mesh["dp"].get_group())
        return values

    def batch(self) -> list[tuple[Tensor, Tensor]]:
        """Micro-batches of words and the words that follow them; unknown ones don't count."""
        rows = windows(self.text, self.job.batch, self.job.length + 1, self.order)
        target = rows[:, 1:].masked_fill(rows[:, 1:] == UNKNOWN, IGNORED)
        if (target == IGNORED).all():
            raise ValueError("batch: expected words of the vocabulary to predict, got none")
        return list(zip(self.share(rows[:, :-1]), self.share(target), strict=True))

    def update(self, losses: list[Callable[[], Tensor]], count: Tensor) -> None:
        """One optimizer step on the sum of the micro-batches' ``losses``, divided by ``count``."""
        total = torch.zeros((), device=self.device)
        for i, loss in enumerate(losses, start=1):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(i == len(losses))
            mean = loss() / count
            (mean * self.dp).backward()
            total += mean.detach()
        self.outcome.losses.append(self.total(total).item())
        self.outcome.gradient_norms.append(self.clip())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self) -> float:
        """Clips the norm of the gradients and returns the norm before clipping."""
        weights = list(self.model.parameters())
        if self.replayed is None:
            norm = torch.nn.utils.clip_grad_norm_(weights, self.job.clip, foreach=FOREACH)
            return whole(norm).item()
        norm = torch.nn.utils.get_total_norm([weight.grad.double() for weight in weights])
        replayed = torch.tensor(self.replayed.gradient_norms[len(self.outcome.gradient_norms)])
        torch.nn.utils.clip_grads_with_norm_(weights, self.job.clip, replayed, foreach=FOREACH)
        return norm.item()

    def cross_entropy_step(self) -> None:
        batch = self.batch()
        count = self.total(sum((target != IGNORED).sum() for _, target in batch))
        self.update(
            [
                lambda tokens=tokens, target=target: self.cross_entropy(
                    self.logits(self.model, tokens), target
                )
                for tokens, target in batch
            ],
            count,
        )

    def policy_step(self, frozen: Decoder) -> None:
        batch = self.batch()
        if self.replayed is None:
            guesses = self.sample(batch)
        else:
            guesses = self.share(self.replayed.guesses[len(self.outcome.guesses)])
        self.outcome.guesses.append(torch.cat(guesses).cpu())
        counted = [target != IGNORED for _, target in batch]
        rewards = [(ids == target).float() for ids, (_, target) in zip(guesses, batch, strict=True)]
        count = self.total(sum(mask.sum() for mask in counted))
        baseline = self.total(sum(reward.sum() for reward in rewards)) / count
        self.outcome.rewards.append(baseline.item())

        def loss(tokens: Tensor, mask: Tensor, ids: Tensor, reward: Tensor) -> Tensor:
            with torch.no_grad():
                frozen_logits = self.logits(frozen, tokens)
            ids = ids.masked_fill(~mask, IGNORED)
            logits = self.logits(self.model, tokens)
            return self.policy_gradient(logits, frozen_logits, ids, reward - baseline)

        self.update(
            [
                functools.partial(loss, tokens, *rest)
                for (tokens, _), *rest in zip(batch, counted, guesses, rewards, strict=True)
            ],
            count,
        )

    @torch.no_grad()
    def sample(self, batch: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Draws a word for each position, the same on all tp ranks, from a seed of its own for each
        micro-batch.
        """
        rank = 0 if self.mesh is None else self.mesh["dp"].get_local_rank()
        first = SEED + (len(self.outcome.guesses) * self.dp + rank) * len(batch)
        return [
            local(dv.sample(self.logits(self.model, tokens), first + i)[0])
            for i, (tokens, _) in enumerate(batch)
        ]


def whole(values: Tensor) -> Tensor:
    return values.full_tensor() if isinstance(values, DTensor) else values


def train(
    job: Job,
    device: str,
    mesh: DeviceMesh | None = None,
    replayed: Outcome | None = None,
    progress: str = "",
) -> Outcome:
    """Trains. Prints the progress, after the name ``progress``, if one is given.

    ``replayed`` is the outcome of a run to repeat. The guesses for the whole batch and the norm of
    the gradients come from it, because rounding could change them enough to make another run: a
    guess may flip, and torch sums the norm in fp32, on CPUs with errors of 1e-4.
    """
    run = Run(job, device, mesh, replayed)
    start = time.perf_counter()

    def report(step: int, steps: int, what: str) -> None:
        if progress and (step in (1, steps) or step % 10 == 0):
            norm = run.outcome.gradient_norms[-1]
            seconds = time.perf_counter() - start
            print(
                f"{progress}  step {step:>3} of {steps}  {what}  gradient norm {norm:.3f}  "
                f"{seconds:.1f} s",
                flush=True,
            )

    for step in range(1, job.steps + 1):
        run.cross_entropy_step()
        report(step, job.steps, f"cross-entropy {run.outcome.losses[-1]:.4f}")
    frozen = run.build()  # Used under no_grad only, like sampling, to share its compiled code.
    frozen.load_state_dict(run.model.state_dict())
    for step in range(1, job.policy_steps + 1):
        run.policy_step(frozen)
        what = f"policy loss {run.outcome.losses[-1]:.4f}  reward {run.outcome.rewards[-1]:.3f}"
        report(step, job.policy_steps, what)
    for name, weight in run.model.named_parameters():
        run.outcome.weights[name] = whole(weight.detach()).cpu()
    return run.outcome


def train_ranks(job: Job, device: str, dp: int, tp: int) -> Outcome:
    """Trains on the ranks of this process group."""
    mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"))
    progress = f"dp={dp} tp={tp}" if dist.get_rank() == 0 else ""
    return train(job, device, mesh, progress=progress)


def train_one(job: Job, device: str, replayed: Outcome) -> Outcome:
    """Repeats on one rank the run of several ranks."""
    return train(job, device, replayed=replayed, progress="one rank")


def merge(outcomes: list[Outcome], tp: int) -> Outcome:
    """The outcome of a run, from those of its dp × tp ranks."""
    for rank, outcome in enumerate(outcomes):
        twin = outcomes[rank - rank % tp]  # The first tp rank with the same rows.
        if outcome.losses != outcomes[0].losses or not all(
            map(torch.equal, outcome.guesses, twin.guesses)
        ):
            raise RuntimeError(f"merge: expected ranks that agree, got another run on rank {rank}")
    parts = zip(*(outcome.guesses for outcome in outcomes[::tp]), strict=True)
    return replace(outcomes[0], guesses=[torch.cat(rows) for rows in parts])
