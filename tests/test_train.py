"""Short training jobs: a run on several ranks equals that of one rank, up to rounding."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import ProcessRaisedException

import dtensor_vocab as dv
from bench import naive
from bench.train import cli
from bench.train.job import Job, Outcome, Run, merge, train_one, train_ranks
from bench.train.launch import launch
from bench.train.text import UNKNOWN, text_ids, windows

pytestmark = pytest.mark.ranks(1)

# After fewer steps no guess is right, and there is nothing to reinforce.
TINY = Job(steps=6, policy_steps=2, batch=8, length=16, vocab=301, dim=64, layers=1)
TINY_OPTIONS = "--steps 6 --policy-steps 2 --batch 8 --length 16 --vocab 301 --dim 64 --layers 1"


# ------------------------------------------------------------------ the command


def test_default_run_passes(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*TINY_OPTIONS.split(), "--dp", "1"]) == 0
    out = capfd.readouterr().out
    assert out.count("  ok\n") == 3
    assert "one rank  step   2 of 2  policy loss" in out


@pytest.mark.parametrize("what", ["loss", "gradient norm", "weight"])
@pytest.mark.parametrize("value", [1e-3, torch.nan, torch.inf])
def test_large_differences_fail(what: str, value: float) -> None:
    found = dict.fromkeys(cli.FP32_ALLOWS, 0.0)
    assert cli.passes(found, cli.FP32_ALLOWS)
    assert not cli.passes({**found, what: value}, cli.FP32_ALLOWS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--batch 6 --dp 2 --accumulate 2", "--batch: expected a multiple of 4, got 6"),
        ("--tp 2 --length 15", "--length: expected a multiple of 2, got 15"),
        ("--tp 2 --dim 32", "--dim: expected a multiple of 64, got 32"),
        ("--tp 4 --dim 128 --vocab 5", "--vocab: expected words for each of 4 ranks, got 5"),
        ("--dp 0", "--dp: expected an integer, 1 or more, got 0"),
        ("--tp 0", "--tp: expected an integer, 1 or more, got 0"),
        ("--tp -2", "--tp: expected an integer, 1 or more, got -2"),
        ("--tp two", "--tp: expected an integer, 1 or more, got two"),
        ("--steps 0", "--steps: expected an integer, 1 or more, got 0"),
        ("--policy-steps -1", "--policy-steps: expected an integer, 0 or more, got -1"),
        ("--batch 0", "--batch: expected an integer, 1 or more, got 0"),
        ("--length 0", "--length: expected an integer, from 1 to "),
        ("--length 1000000", "--length: expected an integer, from 1 to "),
        ("--vocab 0", "--vocab: expected an integer, from 2 to "),
        ("--vocab 1000000", "--vocab: expected an integer, from 2 to "),
        ("--dim 0", "--dim: expected an integer, 32 or more, got 0"),
        ("--layers 0", "--layers: expected an integer, 1 or more, got 0"),
        ("--accumulate 0", "--accumulate: expected an integer, 1 or more, got 0"),
        ("--clip 0", "--clip: expected a number above 0, got 0"),
        ("--clip nan", "--clip: expected a number above 0, got nan"),
        ("--clip big", "--clip: expected a number above 0, got big"),
    ],
)
def test_unusable_options_are_refused(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.parse(options.split())
    assert f"error: argument {message}" in capsys.readouterr().err.splitlines()[-1]


# ------------------------------------------------------------------ FSDP2 with tensor parallelism


def _train_each(jobs: list[Job], dp: int, tp: int) -> list[Outcome]:
    return [train_ranks(job, "cpu", dp, tp) for job in jobs]


@pytest.fixture(scope="module")
def four_ranks() -> dict[str, tuple[Job, Outcome]]:
    """Runs the jobs on the same processes, which take longer to start than a job takes."""
    jobs = {
        "eager": replace(TINY, accumulate=2, clip=0.1),
        "compiled": replace(TINY, compile=True, clip=torch.inf),
        "linear": replace(TINY, linear=True, accumulate=2, clip=0.1),
    }
    with eager_kernels_on_ranks():
        outcomes = launch(_train_each, 4, "cpu", list(jobs.values()), 2, 2)
    return {
        kind: (job, merge(list(ranks), tp=2))
        for (kind, job), *ranks in zip(jobs.items(), *outcomes, strict=True)
    }


@contextlib.contextmanager
def eager_kernels_on_ranks() -> Iterator[None]:
    """Makes ranks that start meanwhile run eager kernels. The test of the command compiles them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTENSOR_VOCAB_KERNELS", "eager")
        yield


@pytest.mark.parametrize("kind", ["eager", "compiled", "linear"])
def test_fsdp_with_tensor_parallel_matches_one_rank(
    four_ranks: dict[str, tuple[Job, Outcome]], kind: str
) -> None:
    job, outcome = four_ranks[kind]
    found = cli.differences(outcome, train_one(job, "cpu", outcome))
    assert cli.passes(found, cli.FP32_ALLOWS)


def test_gradient_clipping_changes_the_losses(four_ranks: dict[str, tuple[Job, Outcome]]) -> None:
    (clipped_job, clipped), (_, free) = four_ranks["eager"], four_ranks["compiled"]
    assert clipped.losses[0] == pytest.approx(free.losses[0], abs=1e-5)
    assert clipped.gradient_norms[0] == pytest.approx(free.gradient_norms[0], rel=1e-4)
    assert min(clipped.gradient_norms[: clipped_job.steps]) > clipped_job.clip
    assert clipped.losses[5] > free.losses[5] + 0.1


# ------------------------------------------------------------------ two ranks, faults among them


@contextlib.contextmanager
def sound() -> Iterator[None]:
    yield


@contextlib.contextmanager
def gradient_too_large() -> Iterator[None]:
    logprobs = dv.logprobs

    def scaled(logits: Tensor, index: Tensor) -> Tensor:
        value = logprobs(logits, index)
        return 1.001 * value - 0.001 * value.detach()

    with mock.patch.object(dv, "logprobs", scaled):
        yield


@contextlib.contextmanager
def entropy_is_a_constant() -> Iterator[None]:
    both = dv.logprobs_and_entropy

    def detached(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        value, entropy = both(logits, index)
        return value, entropy.detach()

    with mock.patch.object(dv, "logprobs_and_entropy", detached):
        yield


@contextlib.contextmanager
def kl_of_own_columns() -> Iterator[None]:
    def kl_div(student: Tensor, teacher: Tensor, reverse: bool) -> Tensor:
        return naive.kl_div(student.to_local(), teacher.to_local(), reverse=reverse)

    with mock.patch.object(dv, "kl_div", kl_div):
        yield


@contextlib.contextmanager
def no_factor_of_dp() -> Iterator[None]:
    build = Run.build

    def forgetful(run: Run) -> torch.nn.Module:
        run.dp = 1
        run.share = lambda rows: [rows.chunk(2)[dist.get_rank()]]
        return build(run)

    with mock.patch.object(Run, "build", forgetful):
        yield


BF16 = replace(TINY, bf16=True)
CASES = {
    "bf16": (sound, BF16, 1, 2),
    "bf16 over dp": (sound, BF16, 2, 1),
    **{
        fault.__name__: (fault, TINY, dp, tp)
        for fault, dp, tp in (
            (gradient_too_large, 1, 2),
            (entropy_is_a_constant, 1, 2),
            (kl_of_own_columns, 1, 2),
            (no_factor_of_dp, 2, 1),
        )
    },
}


def _train_cases() -> dict[str, Outcome]:
    outcomes = {}
    for name, (fault, job, dp, tp) in CASES.items():
        with fault():
            outcomes[name] = train_ranks(job, "cpu", dp, tp)
    return outcomes


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Outcome]]:
    """The outcomes of ``CASES`` on each rank."""
    with eager_kernels_on_ranks():
        return launch(_train_cases, 2, "cpu")


@pytest.mark.parametrize("case", ["bf16", "bf16 over dp"])
def test_sharding_adds_at_most_twice_the_error_of_bf16(
    two_ranks: list[dict[str, Outcome]], case: str
) -> None:
    _, job, _, tp = CASES[case]
    outcome = merge([outcomes[case] for outcomes in two_ranks], tp)
    one = train_one(job, "cpu", outcome)
    bf16 = cli.differences(one, train_one(replace(job, bf16=False), "cpu", outcome))
    found = cli.differences(outcome, one)
    assert cli.passes(found, cli.BF16_ALLOWS)
    assert cli.passes(found, {what: 2 * value for what, value in bf16.items()})


@pytest.mark.parametrize(
    "fault", ["gradient_too_large", "entropy_is_a_constant", "no_factor_of_dp"]
)
def test_faults_are_found(two_ranks: list[dict[str, Outcome]], fault: str) -> None:
    _, job, _, tp = CASES[fault]
    outcome = merge([outcomes[fault] for outcomes in two_ranks], tp)
    found = cli.differences(outcome, train_one(job, "cpu", outcome))
    assert not cli.passes(found, cli.FP32_ALLOWS)


def test_ranks_that_disagree_are_found(two_ranks: list[dict[str, Outcome]]) -> None:
    with pytest.raises(RuntimeError, match="expected ranks that agree, got another run on rank 1"):
        merge([outcomes["kl_of_own_columns"] for outcomes in two_ranks], tp=2)


# ------------------------------------------------------------------ ranks and text


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("a fault of one rank")
    # Rank 0 waits outside of a collective, which could fail before rank 1 does.
    time.sleep(600)


def test_a_rank_that_fails_ends_the_others() -> None:
    with pytest.raises(ProcessRaisedException, match="a fault of one rank"):
        launch(_fail_on_rank_1, 2, "cpu")


def test_text_has_frequent_words_first() -> None:
    text = text_ids(301)
    counts = text.bincount(minlength=301)
    assert counts.shape == (301,) and counts.min() > 0
    assert counts[1:].equal(counts[1:].sort(descending=True).values)
    with pytest.raises(ValueError, match="expected a vocabulary of at most"):
        text_ids(10**6)
    wider = text_ids(302)
    assert text.equal(wider.masked_fill(wider == 301, UNKNOWN))


def test_windows_are_pieces_of_the_text() -> None:
    text = torch.arange(10)
    rows = windows(text, 200, 4, torch.Generator().manual_seed(0))
    assert rows.diff().eq(1).all()
    assert rows[:, 0].unique().equal(torch.arange(7))
