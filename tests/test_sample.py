"""``sample``: the distribution of its draws, and that nothing but the seed changes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

import dtensor_vocab as dv
from dtensor_vocab import linear_blocks
from dtensor_vocab.noise import gumbel, row_states
from tests import oracle
from tests.oracle import assert_values
from tests.ranks import World, distribute, on_mesh, parts
from tests.step import compiled

eager = pytest.mark.usefixtures("eager_kernels")

V, S0, S1, R = Shard(-1), Shard(0), Shard(1), Replicate()
DRAWS = 40000


def rows_of(logits: Tensor, count: int = DRAWS) -> Tensor:
    return logits.expand(count, -1)


def noise_of(seed: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return gumbel(row_states(row, seed), column)


def assert_drawn_from(ids: Tensor, p: Tensor) -> None:
    """Compares the counts with ``p`` by Pearson's χ², which must be neither too large nor too
    small. Tokens that are expected less than five times count as one.
    """
    counts, expected = torch.bincount(ids, minlength=len(p)).double(), p * len(ids)
    assert len(counts) == len(p)
    assert counts[p == 0].eq(0).all()
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum().view(1)])
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    counts, expected = counts[expected > 0], expected[expected > 0]
    degrees = len(counts) - 1
    deviation = ((counts - expected).square() / expected).sum() - degrees
    assert deviation.abs() < 4.5 * (2 * degrees) ** 0.5


# ------------------------------------------------------------------ the distribution

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "low temperature": {"temperature": 0.5},
    "high temperature": {"temperature": 3.0},
    "temperature tensor": {"temperature": torch.tensor(0.7)},
    "softcap": {"softcap": 1.5, "temperature": 0.5},
    "padding": {"vocab_size": 80},
    "padding and softcap": {"vocab_size": 80, "softcap": 2.0},
}


@eager
@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345])
@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_softmax(case: str, seed: int) -> None:
    options = CASES[case]
    logits = 2 * torch.randn(97)
    ids, _ = dv.sample(rows_of(logits), seed, **options)
    c = options.get("softcap")
    x = logits.double() if c is None else c * torch.tanh(logits.double() / c)
    x[options.get("vocab_size", 97) :] = -torch.inf
    assert_drawn_from(ids, torch.softmax(x / options.get("temperature", 1.0), -1))


@eager
def test_draws_from_a_larger_vocabulary() -> None:
    logits = torch.randn(1000).bfloat16()
    ids, _ = dv.sample(rows_of(logits, 60000), 3)
    assert_drawn_from(ids, torch.softmax(logits.double(), -1))


@eager
def test_offset_of_all_logits_costs_nothing() -> None:
    logits = torch.randint(-4, 5, (97,)) / 2.0
    for offset in (1e4, -1e4):
        ids, _ = dv.sample(rows_of(logits + offset), 5)
        assert_drawn_from(ids, torch.softmax(logits.double(), -1))


@eager
def test_seeds_rows_and_columns_are_independent() -> None:
    """Pairs of draws with neighbouring seeds, or in neighbouring rows, hit all pairs of tokens, and
    noise of neighbours is not correlated.
    """
    logits = torch.zeros(8)
    draws = torch.stack([dv.sample(rows_of(logits), seed)[0] for seed in range(2)])
    pairs = {"seeds": draws[0] * 8 + draws[1], "rows": draws[0][::2] * 8 + draws[0][1::2]}
    for ids in pairs.values():
        assert_drawn_from(ids, torch.full((64,), 1 / 64).double())
    row, column = torch.arange(512).unsqueeze(-1), torch.arange(512)
    noise = torch.stack([noise_of(torch.tensor(s), row, column) for s in (7, 8)]).double()
    noise = (noise - noise.mean()) / noise.std()
    neighbours = {
        "seeds": (noise[0], noise[1]),
        "rows": (noise[:, 1:], noise[:, :-1]),
        "columns": (noise[..., 1:], noise[..., :-1]),
        "transposed": (noise[0], noise[0].t()),
    }
    for a, b in neighbours.values():
        assert (a * b).mean().abs() < 5 * a.numel() ** -0.5 or a.equal(b)


def test_noise_is_that_of_gumbel_with_long_tails() -> None:
    noise = noise_of(torch.tensor(1), torch.arange(2000).unsqueeze(-1), torch.arange(1000)).double()
    u = torch.exp(-torch.exp(-noise)).flatten().sort().values
    step = torch.arange(1, len(u) + 1) / len(u)
    assert (u - step).abs().max() < 2 * len(u) ** -0.5  # Kolmogorov and Smirnov's distance
    assert 11 < noise.max() < 20
    assert noise.isfinite().all()


def test_generator_is_splitmix64() -> None:
    """The numbers of the reference implementation from the state 1234567."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [oracle.splitmix64(1234567, i) for i in range(3)] == known
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    ours = noise_of(seeds.view(-1, 1, 1), torch.arange(3).view(-1, 1), torch.arange(4))
    theirs = [
        [[oracle._gumbel(seed, row, column) for column in range(4)] for row in range(3)]
        for seed in seeds.tolist()
    ]
    assert_values(ours, torch.tensor(theirs).double())


# ------------------------------------------------------------------ the same draw everywhere

LOGITS = 3 * torch.randn(6, 5, 50, generator=torch.Generator().manual_seed(0))
LAYOUTS = {
    "tp 1": ((1,), (V,)),
    "tp 2": ((2,), (V,)),
    "tp 4": ((4,), (V,)),
    "tp 3, uneven": ((3,), (V,)),
    "rows": ((4,), (S0,)),
    "dp x tp": ((2, 2), (S0, V)),
    "tp x dp": ((2, 2), (V, S1)),
    "dp x cp x tp": ((2, 2, 2), (S0, S1, V)),
    "rows over two dims": ((2, 2), (S0, S0)),
    "replicated": ((2,), (R,)),
}


@eager
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_draw(name: str) -> None:
    shape, placements = LAYOUTS[name]
    ids, log_p = dv.sample(LOGITS, 9, temperature=0.8)
    with on_mesh(shape) as mesh:
        logits = distribute(LOGITS, mesh, placements)
        sharded = dv.sample(logits, 9, temperature=0.8)
        again = dv.sample(logits, torch.tensor(9), temperature=0.8)
        first, second = (
            [parts(x.redistribute(placements=[R] * len(shape))) for x in results]
            for results in (sharded, again)
        )
    for rank in first[0]:
        assert first[0][rank].equal(ids)
        assert_values(first[1][rank], log_p.double())
        assert all(a[rank].equal(b[rank]) for a, b in zip(first, second, strict=True))


def test_compiled_steps_and_blocks_give_the_same_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call or several, and with several numbers of rows, dtypes and strides of logits."""
    hidden, weight = torch.randn(30, 8), torch.randn(500, 8)
    logits = dv.LinearLogits(hidden, weight)
    ids, log_p = dv.sample(logits, 4)
    monkeypatch.setattr(linear_blocks, "BLOCK_BYTES", 1)
    assert dv.sample(logits, 4)[0].equal(ids)
    made = hidden @ weight.t()
    for other in (made, made.double(), made.t().contiguous().t()):
        assert dv.sample(other, 4)[0].equal(ids)
    assert dv.sample(made[:7], 4)[0].equal(ids[:7])
    for backend in ("aot_eager", "inductor"):
        step = compiled(lambda x, seed: dv.sample(x * 1.0, seed), backend=backend)
        assert step(made, torch.tensor(4))[0].equal(ids)
        assert step(made, torch.tensor(5))[0].ne(ids).any()
        assert step(made, 4)[0].equal(ids)
    with torch.no_grad():
        assert (dv.logprobs(made, ids) - log_p).abs().max() < 1e-5


@pytest.mark.ranks(2)
@eager
def test_two_ranks_draw_what_one_draws() -> None:
    with on_mesh((2,)) as mesh:
        ids, log_p = dv.sample(distribute(LOGITS, mesh, [V]), 9)
    expected = dv.sample(LOGITS, 9)
    assert ids.to_local().equal(expected[0])
    assert_values(log_p.to_local(), expected[1].double())
    mine = ids.to_local().tolist()
    assert World.current.gather(mine) == [mine] * 2


@eager
def test_seed_written_into_a_tensor_is_used() -> None:
    seed = torch.tensor(1)
    first = dv.sample(LOGITS, seed)[0]
    seed.fill_(2)
    second = dv.sample(LOGITS, seed)[0]
    assert not first.equal(second)
    assert second.equal(dv.sample(LOGITS, 2)[0])


# ------------------------------------------------------------------ rows, errors


@eager
def test_masked_tokens_are_not_drawn() -> None:
    logits = torch.zeros(20000, 12)
    logits[:, ::2] = -torch.inf
    ids, log_p = dv.sample(logits, 0, vocab_size=10)
    assert ids.unique().tolist() == [1, 3, 5, 7, 9]
    assert_values(log_p, torch.full((20000,), 0.2).log().double())


@eager
def test_rows_without_any_token_give_id_0_and_nan() -> None:
    logits = torch.full((3, 8), -torch.inf)
    logits[1, 6:] = 0
    for layout in (None, (2,), (8,)):
        if layout is None:
            ids, log_p = dv.sample(logits, 0, vocab_size=6)
        else:
            with on_mesh(layout) as mesh:
                results = dv.sample(distribute(logits, mesh, [V]), 0, vocab_size=6)
            ids, log_p = (parts(x)[0] for x in results)
        assert ids.tolist() == [0, 0, 0]
        assert log_p.isnan().all()


@eager
def test_nan_of_either_sign_is_drawn() -> None:
    logits = torch.randn(2, 8)
    logits[0, 5], logits[1, 6] = (
        torch.nan,
        torch.copysign(torch.tensor(torch.nan), torch.tensor(-1.0)),
    )
    ids, log_p = dv.sample(logits, 0)
    assert ids.tolist() == [5, 6]
    assert log_p.isnan().all()


def test_results_are_constants() -> None:
    logits = LOGITS.clone().requires_grad_()
    assert not any(x.requires_grad for x in dv.sample(logits, 0))


BAD = [
    (1.0, TypeError, "seed to be an int or a Tensor, got float"),
    (True, TypeError, "seed to be an int or a Tensor, got bool"),
    (None, TypeError, "seed to be an int or a Tensor, got NoneType"),
    (2**63, ValueError, "seed to fit in 64 bits, got 9223372036854775808"),
    (torch.tensor(1, dtype=torch.int32), TypeError, "seed of dtype int64, got torch.int32"),
    (torch.tensor(1.0), TypeError, "seed of dtype int64, got torch.float32"),
    (torch.tensor([1]), ValueError, r"seed of shape \[\], got \[1\]"),
    (torch.zeros(6, 5, dtype=torch.int64), ValueError, r"seed of shape \[\], got \[6, 5\]"),
]


@pytest.mark.parametrize("seed, kind, text", BAD, ids=str)
def test_invalid_seeds_are_refused(seed: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"^sample: expected {text}"):
        dv.sample(LOGITS, seed)


def test_vocabularies_that_keys_cannot_hold_are_refused() -> None:
    logits = torch.zeros((), dtype=torch.float64).expand(1, 2**24 + 1)
    with pytest.raises(ValueError, match=r"^sample: expected logits of at most 16777216 columns"):
        dv.sample(logits, 0)
