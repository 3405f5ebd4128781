"""Trains a language model whose head shards the vocabulary, and checks it against one rank.

    python -m bench.train                           two ranks, tensor parallel
    python -m bench.train --dp 2 --tp 2 --compile   four, with FSDP2 over dp
    python -m bench.train --linear                  logits that are never made

The first phase trains with cross-entropy on real text. The second is policy gradient with an
entropy bonus and reverse KL to the frozen model of the first phase: the model guesses the next word
and is rewarded if the guess is right. Then one rank repeats the whole run, with a model of plain
tensors and with losses in plain PyTorch on the whole vocabulary. The largest differences are
printed, and the exit status is 1 if rounding does not explain them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, fields

import torch

from bench.options import above_zero, at_least
from bench.train.job import Job, Outcome, merge, train_one, train_ranks
from bench.train.launch import launch
from bench.train.model import HEAD_DIM
from bench.train.text import text_words

FP32_ALLOWS = {"loss": 2e-5, "gradient norm": 5e-4, "weight": 2e-5}
"""The largest allowed differences, several times those of the default run. (The default run differs
less from the run on one rank than that run differs from the same in fp64.) That of the gradient
norm is relative, and larger because torch sums the norm less exactly."""

BF16_ALLOWS = {"loss": 1e-2, "gradient norm": 5e-2, "weight": 6e-2}
"""About four times the differences between fp32 and bf16 in the default run on one rank."""


def differences(outcome: Outcome, reference: Outcome) -> dict[str, float]:
    """The largest differences of two runs."""
    loss = torch.tensor(outcome.losses) - torch.tensor(reference.losses)
    norm = torch.tensor(outcome.gradient_norms) / torch.tensor(reference.gradient_norms) - 1
    weights = [(outcome.weights[name] - w).abs().max() for name, w in reference.weights.items()]
    return {
        "loss": loss.abs().max().item(),
        "gradient norm": norm.abs().max().item(),
        "weight": torch.stack(weights).max().item(),
    }


def passes(found: dict[str, float], allowed: dict[str, float]) -> bool:
    """Prints the differences and returns whether all are allowed."""
    good = {what: value <= allowed[what] for what, value in found.items()}  # False for NaN.
    for what, value in found.items():
        verdict = "ok" if good[what] else "TOO LARGE"
        print(f"largest difference of {what:<13}  {value:.1e}  of {allowed[what]:.0e}  {verdict}")
    return all(good.values())


def parse(argv: list[str] | None) -> tuple[Job, str, int, int]:
    """The job, its device, and the sizes of dp and tp."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.train", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    gpus = torch.cuda.device_count()
    text = text_words()
    add = parser.add_argument
    add("--dp", type=at_least(1), default=1, help="ranks that share the batch, by FSDP2")
    add("--tp", type=at_least(1), default=1 if gpus == 1 else 2, help="ranks that share the model")
    add("--steps", type=at_least(1), help="steps of cross-entropy")
    add("--policy-steps", type=at_least(0), help="steps of policy gradient")
    add("--batch", type=at_least(1), help="rows of a step, over all ranks")
    add("--length", type=at_least(1, len(text) - 1), help="words in a row")
    add("--vocab", type=at_least(2, len({*text})), help="words in the vocabulary")
    add("--dim", type=at_least(HEAD_DIM), help=f"width of the model, a multiple of {HEAD_DIM} * tp")
    add("--layers", type=at_least(1), help="layers of the model")
    add("--accumulate", type=at_least(1), help="micro-batches in a step")
    add("--clip", type=above_zero, help="largest norm of the gradients")
    add(
        "--bf16",
        action="store_true",
        help="compute in bf16, with parameters in fp32 (by FSDP2)",
    )
    add("--compile", action="store_true", help="compile the model's blocks and the losses")
    add("--linear", action="store_true", help="let the ops compute the logits, by LinearLogits")
    parser.set_defaults(**asdict(Job()))
    args = parser.parse_args(argv)
    for what, value, divisor in (
        ("--batch", args.batch, args.dp * args.accumulate),
        ("--length", args.length, args.tp),
        ("--dim", args.dim, HEAD_DIM * args.tp),
    ):
        if value % divisor:
            parser.error(f"argument {what}: expected a multiple of {divisor}, got {value}")
    if -(-args.vocab // args.tp) * (args.tp - 1) >= args.vocab:
        # torch cannot look up ids in an embedding if a rank holds no rows of it.
        words = f"words for each of {args.tp} ranks"
        parser.error(f"argument --vocab: expected {words}, got {args.vocab}")
    job = Job(**{field.name: getattr(args, field.name) for field in fields(Job)})
    return job, "cuda" if gpus >= args.dp * args.tp else "cpu", args.dp, args.tp


def main(argv: list[str] | None = None) -> int:
    job, device, dp, tp = parse(argv)
    print(f"torch {torch.__version__}, dp={dp} x tp={tp} on {device}, {job}", flush=True)
    outcome = merge(launch(train_ranks, dp * tp, device, job, device, dp, tp), tp)
    (reference,) = launch(train_one, 1, device, job, device, outcome)
    allowed = BF16_ALLOWS if job.bf16 else FP32_ALLOWS
    return 0 if passes(differences(outcome, reference), allowed) else 1


if __name__ == "__main__":
    sys.exit(main())
