"""The bench runs, measures memory right and refuses to time wrong values."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir

from bench import naive
from bench.measure import cli, first_call, peak
from bench.measure.cases import Case, Run, gradient_bytes
from bench.measure.ops import GATHER, IN_PLACE, LOSS_PARALLEL, NAIVE, OPS, OURS, Op
from bench.measure.process import BenchError, Measured, measure
from bench.options import writable
from tests.ops import PUBLIC_OPS

pytestmark = pytest.mark.ranks(1)

MIB = 1 << 20
ROOT = Path(__file__).parents[1]


def test_quick_run_reports_every_provider(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, "-m", "bench", "--quick", "--op", "logprobs", "--device", "cpu"]
    command += ["--json", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())["results"]
    providers = [(row["op"], row["ranks"], row["provider"]) for row in results]
    assert providers == [
        ("logprobs", 1, OURS),
        ("logprobs", 1, IN_PLACE),
        ("logprobs", 1, NAIVE),
        ("logprobs", 1, "naive compiled"),
        ("logprobs", 2, OURS),
        ("logprobs", 2, GATHER),
        ("logprobs", 2, LOSS_PARALLEL),
    ]
    for row in results:
        assert (
            row["time (ms)"] > 0
            and row["floor (ms)"] > 0
            and row["floor to time"] > 0
            and row["to naive"] > 0
        )
        assert f"{row['time (ms)']:.2f}" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ranks 0", "--ranks: expected an integer, 1 or more, got 0"),
        ("--ranks -1", "--ranks: expected an integer, 1 or more, got -1"),
        ("--rows 0", "--rows: expected an integer, 1 or more, got 0"),
        ("--rows -5", "--rows: expected an integer, 1 or more, got -5"),
        ("--vocab 64", "--vocab: expected an integer, 65 or more, got 64"),
        ("--json no/such/file", "--json: expected a file to write, got no/such/file: No such file"),
        ("--json .", "--json: expected a file to write, got .: Is a directory"),
    ],
)
def test_unusable_options_are_refused_before_any_work(
    options: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(cli, "copy_bandwidth")  # Work begins with this call.
    with pytest.raises(SystemExit):
        cli.main(options.split())
    assert f"error: argument {message}" in capsys.readouterr().err.splitlines()[-1]


def test_checking_a_file_leaves_it_as_it_is(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("kept")
    assert writable(str(new)) == new and not new.exists()
    assert writable(str(old)) == old and old.read_text() == "kept"


def test_plot_is_refused_without_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        cli.main(["--plot", os.devnull])
    assert 'pip install -e ".[plot]"' in capsys.readouterr().err


def test_plot_draws_the_times(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.svg"
    assert cli.main(["--plot", str(file), "--device", "cpu", "--quick"]) == 0
    assert "time (ms)" in file.read_text()


def test_every_public_op_is_measured() -> None:
    assert {op.family for op in OPS.values()} == {*PUBLIC_OPS, "linear", "step"}


# ------------------------------------------------------------------ wrong values


def twice_the_gradient(logits: Tensor, index: Tensor) -> Tensor:
    log_p = naive.logprobs(logits, index)
    return 2 * log_p - log_p.detach()


def half_the_vocabulary(logits: Tensor, index: Tensor) -> Tensor:
    picked = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return picked - logits[:, : logits.shape[-1] // 2].logsumexp(-1)


def last_row_wrong(logits: Tensor, index: Tensor) -> Tensor:
    return naive.logprobs(logits, torch.cat([index[:-1], 9 - index[-1:]]))


@pytest.mark.parametrize(
    "provider, message",
    [
        (twice_the_gradient, "wrong gradient of logits"),
        (half_the_vocabulary, "wrong value"),
        (last_row_wrong, "wrong value"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_values_are_not_timed(
    provider: Callable[..., Tensor], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPS, "op", Op("op", provider, naive.logprobs, 3))
    case = Case("op", (8, 10), "float32")
    Measured(Run(case, NAIVE), None, torch.device("cpu"))
    with pytest.raises(AssertionError, match=message):
        Measured(Run(case, OURS), None, torch.device("cpu"))


def test_an_error_in_a_process_is_raised() -> None:
    run = Run(Case("logprobs", (8, 10), "float32", ranks=2), "no such provider")
    with pytest.raises(BenchError, match=r"logprobs 8 x 10 .*no such provider(.|\n)*KeyError"):
        measure((run,), "cpu", rounds=1)


# ------------------------------------------------------------------ memory


def allocate() -> None:
    """Allocates at most 96 MiB at a time."""
    first = torch.ones(16 * MIB)
    second = torch.ones(8 * MIB)
    del first, second
    third = torch.ones(4 * MIB)
    assert third.numel()


def measure_known_allocation() -> int:
    peak.return_freed_blocks()
    return peak.peak_above_inputs(allocate, torch.device("cpu"))


def test_peak_of_a_known_allocation() -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        grown = process.submit(measure_known_allocation).result()
    assert abs(grown / MIB - 96) < 2


def test_no_more_memory_than_the_gradient() -> None:
    run = Run(Case("logprobs", (1024, 32064), "bfloat16", ranks=2), OURS)
    (result,) = measure((run,), "cpu", rounds=1)
    assert -1 * MIB < result.peak - gradient_bytes(run) <= 2 * MIB


def test_first_call_compiles_the_kernels_of_an_op() -> None:
    """``logprobs`` has three kernels, forward and backward. The tests share one Inductor cache."""
    seconds, kernels = first_call.measure("logprobs", cache_dir())
    assert kernels == 3
    assert seconds > 0
