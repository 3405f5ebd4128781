"""Tests of the tests: the oracle agrees with plain torch, and comparisons catch wrong ops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import dtensor_vocab as dv
from tests import oracle
from tests.ops import OP, check, draw, tp
from tests.ranks import Collectives, RealRanks, distribute, on_mesh, part
from tests.test_communication import assert_numbers

pytestmark = pytest.mark.usefixtures("eager_kernels")


# ------------------------------------------------------------------ the oracle and plain torch

LOGITS, TEACHER = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
INDEX = torch.tensor([0, 6, 3, 3, -100])


def categorical(logits: Tensor) -> torch.distributions.Categorical:
    return torch.distributions.Categorical(logits=logits)


def mixed_divergence(beta: float) -> Tensor:
    student, teacher = categorical(LOGITS).probs, categorical(TEACHER).probs
    mixed = torch.distributions.Categorical(probs=beta * teacher + (1 - beta) * student)
    kl = torch.distributions.kl_divergence
    return beta * kl(categorical(TEACHER), mixed) + (1 - beta) * kl(categorical(LOGITS), mixed)


def top_divergence() -> tuple[Tensor, Tensor]:
    top = TEACHER.detach().log_softmax(-1).topk(3)
    ours = oracle.topk_kl_div(LOGITS, *top, tail=True)
    s, t = LOGITS.softmax(-1).gather(-1, top.indices), top.values.exp()
    s, t = (torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1) for p in (s, t))
    return ours, (t * (t / s).log()).sum(-1)


PLAIN_TORCH: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "logprobs": lambda: (
        oracle.logprobs(LOGITS, INDEX),
        -F.cross_entropy(LOGITS, INDEX, reduction="none"),
    ),
    "logprobs, K": lambda: (
        oracle.logprobs(LOGITS, torch.tensor([[1, 5]] * 5), temperature=0.5),
        (LOGITS * 2).log_softmax(-1)[:, [1, 5]],
    ),
    "vocab_size": lambda: (
        oracle.logprobs(LOGITS, INDEX % 4, vocab_size=4),
        -F.cross_entropy(LOGITS[:, :4], INDEX % 4, reduction="none"),
    ),
    "entropy": lambda: (oracle.entropy(LOGITS), categorical(LOGITS).entropy()),
    "kl_div": lambda: (
        oracle.kl_div(LOGITS, TEACHER),
        F.kl_div(LOGITS.log_softmax(-1), TEACHER.softmax(-1), reduction="none").sum(-1),
    ),
    "kl_div, reverse": lambda: (
        oracle.kl_div(LOGITS, TEACHER, reverse=True),
        F.kl_div(TEACHER.log_softmax(-1), LOGITS.softmax(-1), reduction="none").sum(-1),
    ),
    "js_div": lambda: (oracle.js_div(LOGITS, TEACHER, beta=0.3), mixed_divergence(0.3)),
    "cross_entropy": lambda: (
        oracle.cross_entropy(LOGITS, INDEX, label_smoothing=0.1),
        F.cross_entropy(LOGITS, INDEX, label_smoothing=0.1),
    ),
    "z_loss": lambda: (
        oracle.cross_entropy(LOGITS, INDEX, reduction="sum", z_loss=0.1),
        F.cross_entropy(LOGITS, INDEX, reduction="sum")
        + 0.1 * LOGITS.logsumexp(-1)[:4].square().sum(),
    ),
    "topk_logprobs": lambda: (
        oracle.topk_logprobs(LOGITS, 3)[0],
        LOGITS.log_softmax(-1).topk(3).values,
    ),
    "topk_kl_div": top_divergence,
}


@pytest.mark.parametrize("name", PLAIN_TORCH)
def test_oracle_agrees_with_plain_torch(name: str) -> None:
    """Values agree, and so do the gradients by autograd."""
    ours, theirs = PLAIN_TORCH[name]()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    inputs = (LOGITS, TEACHER)
    for mine, other in zip(
        *(torch.autograd.grad(x.sum(), inputs, allow_unused=True) for x in (ours, theirs)),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------ wrong ops


class _Scale(torch.autograd.Function):
    """The identity, whose backward scales the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class _Sends(torch.autograd.Function):
    """The identity, whose backward communicates."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        grad.redistribute(placements=[Shard(0)]).full_tensor()
        return grad


class _NextRow(torch.autograd.Function):
    """The identity, whose backward gives each row the gradient of the next one."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return torch.cat([grad[1:], grad[:1]])  # DTensors have no roll on torch 2.11


def _local_softmax(logits: DTensor, index: Tensor) -> Tensor:
    """Each rank normalises over its own columns and ignores the mass of other shards."""
    out = dv.entropy(logits) * 0
    local = logits.to_local().log_softmax(-1).amax(-1)
    return out + DTensor.from_local(local, logits.device_mesh, [Replicate()], run_check=False)


def _without_last_shard(logits: DTensor, index: Tensor) -> Tensor:
    columns = torch.arange(logits.shape[-1])
    keep = distribute_mask(columns < logits.shape[-1] // 2, logits)
    return real(logits.masked_fill(~keep, -torch.inf), index % 5)


def distribute_mask(mask: Tensor, logits: DTensor) -> DTensor:
    return DTensor.from_local(
        mask, logits.device_mesh, [Replicate()] * logits.device_mesh.ndim, run_check=False
    )


real = dv.logprobs

WRONG: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gradient twice too large": lambda logits, index: _Scale.apply(real(logits, index), 2.0),
    "gradient slightly too large": lambda logits, index: _Scale.apply(real(logits, index), 1.0001),
    "no gradient": lambda logits, index: real(logits.detach(), index),
    "gradient of another row": lambda logits, index: real(_NextRow.apply(logits), index),
    "value slightly off": lambda logits, index: real(logits, index) + 1e-3,
    "value of another sign": lambda logits, index: -real(logits, index),
    "a dropped shard": _without_last_shard,
    "shards that are not merged": _local_softmax,
    "wrong placement": lambda logits, index: real(logits, index).redistribute(
        placements=[Shard(0)]
    ),
    "a plain tensor": lambda logits, index: real(logits, index).to_local(),
    "wrong dtype": lambda logits, index: real(logits, index).double(),
    "not contiguous": lambda logits, index: real(logits, index).unsqueeze(-1).repeat(1, 2)[:, 0],
    "an extra collective": lambda logits, index: (real(logits, index), logits.full_tensor())[0],
    "a collective backward": lambda logits, index: _Sends.apply(real(logits, index)),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_op_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = OP["logprobs"]
    check(op, draw(op), tp(2))
    monkeypatch.setattr(dv, "logprobs", WRONG[fault])
    with pytest.raises(AssertionError):
        check(op, draw(op), tp(2))


def test_gathered_logits_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is right except for the size of the payload."""

    def gather(logits: DTensor, index: Tensor) -> Tensor:
        return real(logits.redistribute(placements=[Replicate()]), index)

    assert_numbers(OP["logprobs"], tp(2), 16)
    monkeypatch.setattr(dv, "logprobs", gather)
    with pytest.raises(AssertionError):
        assert_numbers(OP["logprobs"], tp(2), 16)


@pytest.mark.parametrize("fault", ["value", "gradient", "exact zero"])
def test_wrong_row_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The faults are NaN for infinity, NaN for a gradient of 0, and 1e-9 for a gradient of 0."""
    op = OP["kl_div"]
    inputs = {"student": torch.zeros(2, 4), "teacher": torch.zeros(2, 4)}
    inputs["student"][0, 1] = -torch.inf
    wrong = {
        "value": lambda s, t: (lambda out: torch.where(out.isinf(), torch.nan, out))(right(s, t)),
        "gradient": lambda s, t: right(s, t) + 0 * s.sum(-1),
        "exact zero": lambda s, t: right(s, t) + 1e-9 * t.sum(-1),
    }[fault]
    right = dv.kl_div
    check(op, inputs)
    monkeypatch.setattr(dv, "kl_div", wrong)
    with pytest.raises(AssertionError):
        check(op, inputs)


def test_gradient_rounded_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OP["logprobs"]
    inputs = draw(op, (64,), 24, torch.bfloat16)
    check(op, inputs)
    monkeypatch.setattr(dv, "logprobs", lambda logits, index: real(logits * 1.5 / 1.5, index))
    with pytest.raises(AssertionError):
        check(op, inputs)


# ------------------------------------------------------------------ comparisons, one by one

X = torch.tensor([1.0, -2.0, 0.0, torch.inf, torch.nan], dtype=torch.float64)


@pytest.mark.parametrize(
    "change",
    [(0, 1.001), (1, 2.0), (2, 1e-4), (3, -torch.inf), (3, torch.nan), (4, 0.0)],
    ids=["slightly", "sign", "not 0", "-inf", "NaN", "not NaN"],
)
def test_assert_values(change: tuple[int, float]) -> None:
    oracle.assert_values(X.float(), X)
    wrong = X.float()
    wrong[change[0]] = change[1]
    with pytest.raises(AssertionError):
        oracle.assert_values(wrong, X)
    with pytest.raises(AssertionError):
        oracle.assert_values(X.float().unsqueeze(0), X)
    with pytest.raises(AssertionError):
        oracle.assert_values(torch.tensor([1, 2]), torch.tensor([2, 1]))


def test_assert_gradient() -> None:
    expected = torch.tensor([[0.0, 0.25, -0.25]], dtype=torch.float64)
    oracle.assert_gradient(expected.float(), expected)
    for wrong in (None, expected.float() * 2, expected.float() + 1e-7, expected.float()[:, :2]):
        with pytest.raises(AssertionError):
            oracle.assert_gradient(wrong, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_assert_rounded_once(dtype: torch.dtype) -> None:
    expected = torch.rand(4, 16, dtype=torch.float64) + 0.5
    once = expected.to(dtype)
    oracle.assert_rounded_once(once, expected)
    for next_to in (torch.nextafter(once, once + 1), torch.nextafter(once, once - 1)):
        with pytest.raises(AssertionError):
            oracle.assert_rounded_once(next_to, expected)


def test_assert_bytes_equal() -> None:
    oracle.assert_bytes_equal(X, X.clone())
    for wrong in (X.float(), X[:4], X.nan_to_num(), -X, X + 0 * -1e-300 - 1e-300):
        with pytest.raises(AssertionError):
            oracle.assert_bytes_equal(wrong, X)


def test_assert_parts_names_the_rank() -> None:
    right = {0: torch.zeros(2), 1: torch.ones(2)}
    oracle.assert_parts(right, right)
    with pytest.raises(AssertionError, match="rank 1"):
        oracle.assert_parts({**right, 1: torch.zeros(2)}, right)


def test_assert_collectives() -> None:
    with on_mesh((2,)) as mesh, Collectives() as collectives:
        sharded = distribute(X, mesh, [Shard(0)])
        sharded.full_tensor()
    (one,) = collectives.seen
    assert one.name == "all_gather_into_tensor"
    assert set(one.payload) == {0, 1}
    oracle.assert_collectives(collectives.seen, 1)
    for wrong in (0, 2):
        with pytest.raises(AssertionError):
            oracle.assert_collectives(collectives.seen, wrong)


def test_collectives_are_counted_as_torch_counts_them() -> None:
    pytest.importorskip("numpy", reason="torch.distributed.tensor.debug imports it")
    from torch.distributed.tensor.debug import CommDebugMode

    with on_mesh((2, 2)) as mesh, Collectives() as ours, CommDebugMode() as theirs:
        x = distribute(torch.ones(8, 8), mesh, [Shard(0), Shard(1)])
        x.redistribute(placements=[Shard(1), Shard(0)])
        x.sum().full_tensor()
        x.full_tensor()
    assert len(ours.seen) == theirs.get_total_counts() > 3


# ------------------------------------------------------------------ ranks


def test_parts_are_those_of_dtensor() -> None:
    full = torch.arange(7.0 * 5).view(7, 5)
    placements = [Shard(0), Replicate(), Shard(0)]
    with on_mesh((2, 2, 2)) as mesh:
        theirs = torch.distributed.tensor.distribute_tensor(
            full, mesh, placements, src_data_rank=None
        )
        locals_ = theirs.to_local()._local_tensors
    for rank in range(8):
        assert part(full, (2, 2, 2), placements, rank).equal(locals_[rank])


RANKED_TESTS = """
import os, time
import pytest, torch
import torch.distributed as dist
from tests.ranks import World

def test_passes():
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2

def test_same_seed():
    numbers = World.current.gather(torch.rand(4).tolist())
    assert len(numbers) == 2 and numbers[0] == numbers[1]

def test_exchanges_on_rank_0_alone():
    assert dist.get_rank() == 0, "gave nothing"
    World.current.gather(0)

def test_exchanges_again():
    assert World.current.gather(dist.get_rank()) == [0, 1]

def test_fails_on_rank_1():
    assert dist.get_rank() == 0, "a fault of one rank"

def test_hangs():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))

def test_passes_again():
    dist.all_reduce(torch.ones(1))

def test_skips():
    pytest.skip("not here")

def test_dies():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))

def test_never_reached():
    pass
"""


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> RealRanks:
    root = tmp_path_factory.mktemp("ranked")
    (root / "test_ranked.py").write_text(RANKED_TESTS)
    return RealRanks(2, [f"{root}/test_ranked.py"], root, collective_timeout=5)


@pytest.mark.parametrize(
    "name", ["test_passes", "test_same_seed", "test_exchanges_again", "test_passes_again"]
)
def test_pass_on_real_ranks(name: str, ranked: RealRanks) -> None:
    ranked.replay(f"test_ranked.py::{name}")


@pytest.mark.parametrize(
    "name, text",
    [
        ("test_fails_on_rank_1", "rank 1: .*a fault of one rank"),
        ("test_exchanges_on_rank_0_alone", "rank 0: .*(?i:time).*rank 1: .*gave nothing"),
        ("test_hangs", "rank 0: .*(?i:time)"),
        ("test_dies", "rank 1: never ended"),
        ("test_never_reached", "rank 0: never ended"),
    ],
)
def test_failure_on_real_ranks(name: str, text: str, ranked: RealRanks) -> None:
    with pytest.raises(pytest.fail.Exception, match=f"(?s){text}"):
        ranked.replay(f"test_ranked.py::{name}")


def test_skip_on_real_ranks(ranked: RealRanks) -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        ranked.replay("test_ranked.py::test_skips")
