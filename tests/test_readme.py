"""The README's scripts run as it says, and its losses are those written on full logits in fp64."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import dtensor_vocab as dv
from tests.ops import PUBLIC_OPS
from tests.ranks import distribute, on_mesh, parts

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

V, K = 37, 5
SHAPE = (3, 4)


# ------------------------------------------------------------------ scripts


def test_every_block_says_how_it_is_run() -> None:
    first_lines = [block.partition("\n")[0] for block in BLOCKS]
    scripts = [line for line in first_lines if line != "# losses.py"]
    for line in scripts:
        assert re.fullmatch(r"# (\w+\.py): (python|torchrun --nproc-per-node \d) \1", line)
    assert len(scripts) == 4


@pytest.mark.ranks(1)
def test_plain_script_runs_as_it_says(tmp_path: Path) -> None:
    (block,) = (block for block in BLOCKS if block.startswith("# ops.py: python ops.py\n"))
    (tmp_path / "ops.py").write_text(block)
    done = subprocess.run([sys.executable, "ops.py"], cwd=tmp_path, env=shell(), text=True)
    assert done.returncode == 0
    assert set(re.findall(r"dv\.(\w+)\(", block)) == {*PUBLIC_OPS, "LinearLogits"}


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("script", "kernels"),
    [("example.py", "inductor"), ("train.py", "eager"), ("linear.py", "eager")],
)
def test_script_runs_as_it_says(script: str, kernels: str, tmp_path: Path) -> None:
    (block,) = (block for block in BLOCKS if block.startswith(f"# {script}: "))
    command = shlex.split(block.partition("\n")[0].partition(": ")[2])
    (tmp_path / script).write_text(block)
    env = {**shell(), "DTENSOR_VOCAB_KERNELS": kernels}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == int(command[2]) and len(set(losses)) == 1 and losses[0] > 1


def shell() -> dict[str, str]:
    """The environment of a shell in which the package is installed."""
    return {
        **os.environ,
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "PET_STANDALONE": "1",  # torchrun: on any free port
        "OMP_NUM_THREADS": "1",
        "DTENSOR_VOCAB_KERNELS": "eager",  # without waiting for a compiler
    }


# ------------------------------------------------------------------ losses


@functools.cache
def losses() -> dict[str, Any]:
    """The names that ``losses.py`` defines."""
    names: dict[str, Any] = {}
    module = "".join(block for block in BLOCKS if block.startswith("# losses.py\n"))
    exec(compile(module, "losses.py", "exec"), names)
    return names


def full_policy(logits: Tensor, ids: Tensor, old: Tensor, gain: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    ratio = (log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - old).exp()
    entropy = -(log_p.exp() * log_p).sum(-1)
    return -(torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain) + 0.01 * entropy)


def full_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    s, t = (student / 2).log_softmax(-1), (teacher / 2).log_softmax(-1)
    return (s.exp() * (s - t)).sum(-1)


def full_topk(student: Tensor, log_q: Tensor, ids: Tensor) -> Tensor:
    named = student.log_softmax(-1).gather(-1, ids)
    rest_p, rest_q = (1 - log_p.exp().sum(-1) for log_p in (named, log_q))
    return (log_q.exp() * (log_q - named)).sum(-1) + rest_q * (rest_q / rest_p).log()


FULL: dict[str, Callable[..., Tensor]] = {
    "policy": full_policy,
    "distillation": full_distillation,
    "topk_distillation": full_topk,
}


def arguments_of(loss: str, mask: Tensor, filler: float) -> list[Tensor]:
    """Returns all arguments except the mask, over the full vocabulary, with ``filler`` at masks."""
    logits, teacher = torch.randn(2, *SHAPE, V)
    if loss == "policy":
        ids = torch.randint(0, V, SHAPE)
        log_p = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        arguments = [logits, ids, log_p + 0.3 * torch.randn(SHAPE), torch.randn(SHAPE)]
    elif loss == "distillation":
        arguments = [logits, teacher]
    else:
        arguments = [logits, *teacher.log_softmax(-1).topk(K)]
    for x in arguments:
        if x.is_floating_point():
            x[~mask] = filler
    return arguments


PLAIN_AND_RANKS = pytest.mark.parametrize(
    "place",
    [
        pytest.param(contextlib.nullcontext, id="plain"),
        pytest.param(lambda: on_mesh((2,)), id="ranks", marks=pytest.mark.ranks(2)),
    ],
)


@pytest.mark.usefixtures("eager_kernels")
@pytest.mark.parametrize("filler", [-150.0, -torch.inf, torch.nan, torch.inf])
@pytest.mark.parametrize("counted", ["some", "none"])
@pytest.mark.parametrize("loss", FULL)
@PLAIN_AND_RANKS
def test_masked_tokens_change_neither_loss_nor_gradient(
    place: Callable[[], Any], loss: str, counted: str, filler: float
) -> None:
    mask = torch.zeros(SHAPE, dtype=torch.bool)
    mask[0, 2:], mask[1] = counted == "some", counted == "some"
    full = arguments_of(loss, mask, filler)
    options = {"temperature": 2.0} if loss == "distillation" else {}
    with place() as mesh:
        given = [x if mesh is None or x.shape[-1] != V else shard(x, mesh) for x in full]
        logits = given[0].requires_grad_()
        value = losses()[f"{loss}_loss"](*given, mask, **options)
        value.backward()
        gradient = logits.grad if mesh is None else logits.grad.full_tensor()

    leaf = full[0].detach().double().requires_grad_()
    others = [x.double() if x.is_floating_point() else x for x in full[1:]]
    rows = FULL[loss](leaf[mask], *(x[mask] for x in others))
    expected = rows.sum() / max(1, rows.numel())
    expected.backward()
    torch.testing.assert_close(value.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient.double(), leaf.grad, atol=1e-6, rtol=1e-5)
    assert gradient[~mask].count_nonzero() == 0


def shard(full: Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute(full, mesh, [Shard(-1)])


@pytest.mark.usefixtures("eager_kernels")
@pytest.mark.parametrize("loss", FULL)
def test_mask_may_be_of_numbers(loss: str) -> None:
    mask = torch.rand(SHAPE) > 0.5
    arguments, function = arguments_of(loss, mask, torch.nan), losses()[f"{loss}_loss"]
    assert function(*arguments, mask.float()).equal(function(*arguments, mask))


@pytest.mark.parametrize("ranks", [None, pytest.param(2, marks=pytest.mark.ranks(2))])
def test_teacher_that_is_padded_further(ranks: int | None) -> None:
    """Shards of 16 and 15 columns, the teacher's of 16 and 16."""
    student, teacher = torch.randn(6, 31), torch.randn(6, 32)
    expected = dv.kl_div(student, teacher[:, :31], vocab_size=30)
    cut = losses()["cut_teacher"]
    if ranks is None:
        values = {0: dv.kl_div(student, cut(teacher, student), vocab_size=30)}
    else:
        with on_mesh((ranks,)) as mesh:
            student, teacher = (distribute(x, mesh, [Shard(-1)]) for x in (student, teacher))
            values = parts(dv.kl_div(student, cut(teacher, student), vocab_size=30))
    for value in values.values():
        torch.testing.assert_close(value, expected)
