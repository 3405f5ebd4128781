"""The expected results, from fp64 on the full vocabulary with ordinary autograd.

Nothing here uses the package.

The functions are called as the ops are. The rules for rows that hold -inf are explicit masks;
everything else is what autograd makes of the formula. Below them, the comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

INF = math.inf


# ------------------------------------------------------------------ the ops


def logprobs(logits, index, *, ignore_index=-100, temperature=1.0, vocab_size=None):
    x = _wide(logits)
    picked, ignored = _logprobs(x, index, ignore_index, temperature, vocab_size)
    _stop_at_zero(x, picked)
    return torch.where(ignored, 0, picked)


def entropy(logits, *, temperature=1.0, vocab_size=None):
    x = _wide(logits)
    value = _entropy(x, temperature, vocab_size)
    _stop_at_zero(x, value)
    return value


def logprobs_and_entropy(logits, index, *, ignore_index=-100, temperature=1.0, vocab_size=None):
    x = _wide(logits)
    picked, ignored = _logprobs(x, index, ignore_index, temperature, vocab_size)
    value = _entropy(x, temperature, vocab_size)
    _stop_at_zero(x, picked, value)
    return torch.where(ignored, 0, picked), value


def kl_div(student, teacher, *, reverse=False, temperature=1.0, vocab_size=None):
    x, y = _wide(student), _wide(teacher)
    (s, dead_s), (t, dead_t) = (_log_softmax(z, temperature, vocab_size) for z in (x, y))
    value = _divergence(*((s, t) if reverse else (t, s)), dead_s | dead_t)
    _stop_at_zero(x, value)
    _stop_at_zero(y, value)
    return value


def js_div(student, teacher, *, beta=0.5, temperature=1.0, vocab_size=None):
    if beta in (0, 1):
        options = {"temperature": temperature, "vocab_size": vocab_size}
        return kl_div(student, teacher, reverse=beta == 1, **options)
    x, y = _wide(student), _wide(teacher)
    (s, dead_s), (t, dead_t) = (_log_softmax(z, temperature, vocab_size) for z in (x, y))
    neither = (s == -INF) & (t == -INF)
    mixed = torch.logaddexp(
        torch.where(neither, 0, t) + math.log(beta), torch.where(neither, 0, s) + math.log1p(-beta)
    )
    mixed = torch.where(neither, -INF, mixed)
    dead = dead_s | dead_t
    value = beta * _divergence(t, mixed, dead) + (1 - beta) * _divergence(s, mixed, dead)
    _stop_at_zero(x, value)
    _stop_at_zero(y, value)
    return value


def cross_entropy(
    logits,
    target,
    *,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    temperature=1.0,
    vocab_size=None,
):
    x = _wide(logits)
    picked, ignored = _logprobs(x, target, ignore_index, temperature, vocab_size)
    loss = -picked
    if label_smoothing:
        log_p, dead = _log_softmax(x, temperature, vocab_size)
        smooth = torch.where(dead, math.nan, -log_p[..., :vocab_size].mean(-1))
        loss = (1 - label_smoothing) * loss + label_smoothing * smooth
    if z_loss:
        scaled, dead = _scaled(x, temperature, vocab_size)
        loss = loss + z_loss * torch.where(dead, math.nan, scaled.logsumexp(-1)) ** 2
    _stop_at_zero(x, loss)
    loss = torch.where(ignored, 0, loss)
    if reduction == "none":
        return loss
    return loss.sum() / (1 if reduction == "sum" else (~ignored).sum().clamp_min(1))


def topk_logprobs(logits, k, *, temperature=1.0, vocab_size=None):
    x = _wide(logits)
    log_p, dead = _log_softmax(x, temperature, vocab_size)
    ids = _ranked(x, vocab_size)[..., :k]
    value = torch.where(dead.unsqueeze(-1), math.nan, log_p.gather(-1, ids))
    _stop_at_zero(x, value)
    return value, ids


def argmax(logits, *, vocab_size=None):
    return _ranked(_wide(logits), vocab_size)[..., 0]


def sample(logits, seed, *, temperature=1.0, vocab_size=None):
    x = _wide(logits)
    log_p, dead = _log_softmax(x, temperature, vocab_size)
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    noise = torch.tensor([[_gumbel(seed, row, v) for v in range(columns)] for row in range(rows)])
    scores = _scaled(x, temperature, vocab_size)[0] + noise.double().view(x.shape)
    ids = scores.nan_to_num(nan=INF, posinf=INF).argmax(-1)
    value = log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return torch.where(dead, 0, ids), torch.where(dead, math.nan, value)


def topk_kl_div(
    student,
    teacher_logprobs,
    teacher_ids,
    *,
    reverse=False,
    tail=False,
    ignore_index=-100,
    temperature=1.0,
    vocab_size=None,
):
    x, t = _wide(student), _wide(teacher_logprobs)
    log_p, dead = _log_softmax(x, temperature, vocab_size)
    ignored = _ignored(teacher_ids, ignore_index)
    ids = torch.where(ignored, 0, teacher_ids).long()
    s, t = (z.masked_fill(ignored, -INF) for z in (log_p.gather(-1, ids), t))
    if tail:
        named = torch.zeros_like(log_p).scatter_add(-1, ids, (~ignored).to(log_p.dtype)) > 0
        rest = log_p.masked_fill(named, -INF)
    if tail:
        empty = (rest == -INF).all(-1, keepdim=True)
        rest = torch.where(empty, 0, rest).logsumexp(-1, keepdim=True)
        s = torch.cat([s, torch.where(empty, -INF, rest)], -1)
        rest = 1 - t.exp().sum(-1, keepdim=True)
        some = rest > 1e-6  # the precision of log-probabilities rounded to fp32
        t = torch.cat([t, torch.where(some, rest, 1).log().where(some, -INF)], -1)
    value = _divergence(*((s, t) if reverse else (t, s)), dead)
    _stop_at_zero(x, value)
    _stop_at_zero(t, value)
    return value if tail else torch.where(ignored.all(-1), 0, value)


# ------------------------------------------------------------------ what they share


def _wide(x: Tensor) -> Tensor:
    return x.double().view_as(x)


def _scaled(
    x: Tensor, temperature: float | Tensor, vocab_size: int | None
) -> tuple[Tensor, Tensor]:
    """Logits over temperature, -inf from ``vocab_size`` on, and which rows are -inf throughout.

    Those rows become zeros.
    """
    if isinstance(temperature, Tensor):
        temperature = temperature.double().unsqueeze(-1)
    x = x / temperature
    if vocab_size is not None:
        x = x.masked_fill(torch.arange(x.shape[-1]) >= vocab_size, -INF)
    dead = (x == -INF).all(-1)
    return torch.where(dead.unsqueeze(-1), 0, x), dead


def _log_softmax(
    x: Tensor, temperature: float | Tensor, vocab_size: int | None
) -> tuple[Tensor, Tensor]:
    scaled, dead = _scaled(x, temperature, vocab_size)
    return scaled.log_softmax(-1), dead


def _logprobs(
    x: Tensor,
    index: Tensor,
    ignore_index: int | None,
    temperature: float | Tensor,
    vocab_size: int | None,
) -> tuple[Tensor, Tensor]:
    log_p, dead = _log_softmax(x, temperature, vocab_size)
    one = index.dim() < x.dim()
    index = index.unsqueeze(-1) if one else index
    ignored = _ignored(index, ignore_index)
    picked = log_p.gather(-1, torch.where(ignored, 0, index).long())
    picked = torch.where(dead.unsqueeze(-1), math.nan, picked)
    return (picked.squeeze(-1), ignored.squeeze(-1)) if one else (picked, ignored)


def _ignored(index: Tensor, ignore_index: int | None) -> Tensor:
    if ignore_index is None:
        return torch.zeros_like(index, dtype=torch.bool)
    return index.long() == ignore_index


def _entropy(x: Tensor, temperature: float | Tensor, vocab_size: int | None) -> Tensor:
    log_p, dead = _log_softmax(x, temperature, vocab_size)
    log_p = log_p.masked_fill(log_p == -INF, -1e4)  # gives neither mass nor gradient
    return torch.where(dead, math.nan, -(log_p.exp() * log_p).sum(-1))


def _gumbel(seed: int, row: int, column: int) -> float:
    """Gumbel noise from the 64 bits of two streams of SplitMix64, one within the other."""
    state = splitmix64(splitmix64(seed, 0), row)
    return -math.log(-math.log1p(-min((splitmix64(state, column) // 2 + 0.5) / 2**63, 1 - 2**-24)))


def splitmix64(seed: int, i: int) -> int:
    """The number i, from 0 on, of the generator of https://doi.org/10.1145/2660193.2660195."""
    z = (seed + (i + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def _divergence(log_a: Tensor, log_b: Tensor, dead: Tensor) -> Tensor:
    """Returns Σ a (log a - log b).

    It is +inf where b has no mass and a has some, and NaN for dead rows, without a gradient.
    """
    infinite = ((log_a > -INF) & (log_b == -INF)).any(-1)
    used = (log_a != -INF) & ~(infinite | dead).unsqueeze(-1)
    a, b = (torch.where(used, z, 0) for z in (log_a, log_b))
    value = torch.where(used, a.exp() * (a - b), 0).sum(-1)
    return torch.where(dead, math.nan, torch.where(infinite, INF, value))


def _ranked(x: Tensor, vocab_size: int | None) -> Tensor:
    """Returns ids in descending order of logits, and in ascending order for equal logits."""
    x = _scaled(x.detach(), 1.0, vocab_size)[0]
    return x.sort(dim=-1, descending=True, stable=True).indices


def _stop_at_zero(x: Tensor, *values: Tensor) -> None:
    """Makes the gradient of a row of ``x`` 0 if those of all ``values`` are 0, even for NaN."""
    received: list[Tensor] = []

    def note(gradient: Tensor) -> None:
        some = gradient != 0
        received.append(some.any(-1) if some.dim() == x.dim() else some)

    if not x.requires_grad:
        return
    for value in values:
        value.register_hook(note)
    x.register_hook(
        lambda gradient: torch.where(sum(received).bool().unsqueeze(-1), gradient, 0)  # type: ignore[union-attr]
    )


# ------------------------------------------------------------------ comparisons

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def assert_values(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Checks that ids are equal and that numbers are within the tolerance of their dtype.

    Infinities and NaN must be in the same places.
    """
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if not actual.dtype.is_floating_point:
        assert actual.equal(expected), f"{actual}, expected {expected}"
        return
    if tolerance is None:
        tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


def assert_gradient(actual: Tensor | None, expected: Tensor, summed: bool = False) -> None:
    """Checks that a gradient is within tolerance, and exactly 0 where ``expected`` is 0.

    16-bit gradients may differ by one rounding. The tolerance of one that is ``summed`` over rows
    or columns is larger and relative to the largest entry.
    """
    assert actual is not None, "no gradient"
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if summed:
        largest = max([1.0, *expected.nan_to_num().abs().flatten().tolist()])
        assert_values(actual.double() / largest, expected / largest, 4 * TOLERANCE[actual.dtype])
    elif actual.dtype in TOLERANCE:
        assert_values(actual, expected)
    else:
        assert_rounded_once(actual, expected)
    strays = actual[(expected == 0) & (actual != 0)]
    assert strays.numel() == 0, f"expected exactly 0, got {strays}"


def assert_rounded_once(actual: Tensor, expected: Tensor) -> None:
    """Checks that a 16-bit tensor is ``expected``, computed in fp32 and rounded once to nearest."""
    slack = 1e-5 * expected.abs() + 1e-6
    low, high = (expected - slack).to(actual.dtype), (expected + slack).to(actual.dtype)
    sound = ((low <= actual) & (actual <= high)) | (expected.isnan() & actual.isnan())
    assert sound.all(), f"not one rounding away: {actual[~sound]}, expected {expected[~sound]}"


def assert_bytes_equal(actual: Tensor, expected: Tensor) -> None:
    """Checks that tensors are equal to the bit, including NaN and the sign of 0."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    same = _bytes(actual).equal(_bytes(expected))
    assert same, f"{actual}, expected the bytes of {expected}"


def _bytes(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).view(torch.uint8)


def assert_parts(
    parts: dict[int, Tensor],
    expected: dict[int, Tensor],
    check: Callable[[Tensor, Tensor], None] = assert_values,
) -> None:
    """Checks the local tensor of each rank against the expected one."""
    for rank, local in parts.items():
        try:
            check(local, expected[rank])
        except AssertionError as error:
            raise AssertionError(f"rank {rank}: {error}") from None


def assert_collectives(seen: Sequence[object], expected: int) -> None:
    assert len(seen) == expected, f"{len(seen)} collectives, expected {expected}: {seen}"
