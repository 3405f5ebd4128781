"""Rows with -inf, NaN or extreme values, empty shards, and the precision of results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import dtensor_vocab as dv
from dtensor_vocab import checks
from dtensor_vocab.layout import Vocabulary, place_vocabulary
from tests.ops import (
    AT_IDS,
    OP,
    OPS,
    PAIRS,
    PATHS,
    ROW_BY_ROW,
    Inputs,
    Layout,
    Observed,
    Op,
    check,
    compare,
    draw,
    expect,
    named,
    observe,
    tp,
)
from tests.oracle import assert_bytes_equal, assert_gradient, assert_values
from tests.ranks import on_mesh, parts

eager = pytest.mark.usefixtures("eager_kernels")

INF, NAN = math.inf, math.nan

WHOLE_OR_SHARDED = pytest.mark.parametrize("layout", [None, tp(4)], ids=["plain", "4 ranks"])


ROWS = {
    "plain": [0.5, -1.25, 2, 0.75, -0.5, 1, 0.25, -2],
    "another": [-1, 0.25, 0.5, 1.5, 2.5, -0.75, 0, 1],
    "some -inf": [0, -INF, 1, -INF, 0.5, -INF, -1, 2],
    "more -inf": [0, -INF, -INF, -INF, 0.5, -INF, -INF, 2],
    "one token": [-INF, -INF, -INF, -INF, -INF, 3, -INF, -INF],
    "first half -inf": [-INF, -INF, -INF, -INF, 1, 2, 0, -1],
    "second half -inf": [1, 2, 0, -1, -INF, -INF, -INF, -INF],
    "underflow": [0, -200, 0, -200, 0, -200, -200, -200],
    "other underflow": [-200, 0, 0, -200, -200, -200, 0, -200],
    "far apart": [60000, -60000, 0, 0, 100, -100, 0, 0],
    "offset": [10001, 9999, 10000, 10002, 10000.5, 10000, 9998, 10000],
    "all -inf": [-INF] * 8,
    "NaN": [0, 1, NAN, 0.5, 2, -1, 0.25, 1],
    "+inf": [0, 1, INF, 0.5, 2, -1, 0.25, 1],
    "all NaN": [NAN] * 8,
    "little in the last shard": [0, 1, 0.5, 2, 0, -1, -200, -200],
    "nothing in the last shard": [0, 1, 0.5, 2, 0, -1, -INF, -INF],
}
NOT_A_NUMBER = ("NaN", "+inf", "all NaN")


def special(op: Op) -> Inputs:
    """Makes inputs of all rows, or of all pairs of rows for divergences.

    Pairs of NaN and -inf are left out, because no rule covers them.
    """
    if len(op.logits) == 1:
        logits = torch.tensor(list(ROWS.values()))
        others = draw(op, (len(ROWS),), vocab=8, seed=1)
        return {**others, op.logits[0]: logits}
    rows = [
        (mine, other)
        for first, mine in ROWS.items()
        for second, other in ROWS.items()
        if not (first in NOT_A_NUMBER and -INF in other)
        and not (second in NOT_A_NUMBER and -INF in mine)
    ]
    mine, others = zip(*rows, strict=True)
    return {
        **draw(op, (len(rows),), vocab=8),
        **dict(zip(op.logits, map(torch.tensor, (mine, others)), strict=True)),
    }


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("op", OPS, ids=str)
def test_special_rows(op: Op, layout: Layout | None) -> None:
    inputs = special(op)
    check(op, inputs, layout, quarter(op, inputs))


@pytest.mark.parametrize("op", {op.name: op for op in OPS}.values(), ids=str)
def test_special_rows_with_compiled_kernels(op: Op) -> None:
    inputs = special(op)
    check(op, inputs, None, quarter(op, inputs))


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("op", OPS, ids=str)
def test_special_rows_in_chunks_of_columns(
    op: Op, layout: Layout | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs compute the statistics of a row in chunks. The last chunk is shorter here."""
    for module in ("softmax", "pair", "ops.argmax", "ops.sample"):
        monkeypatch.setattr(f"dtensor_vocab.{module}.in_chunks", lambda x: True)
    for module in ("row_blocks", "ops.argmax"):
        monkeypatch.setattr(f"dtensor_vocab.{module}.CHUNK_COLUMNS", 3)
    inputs = special(op)
    check(op, inputs, layout, quarter(op, inputs))
    options = {"vocab_size": 7} if op.ids_name is None else {}
    if op.name != "argmax":
        options["temperature"] = torch.linspace(0.5, 2, len(inputs[op.logits[0]]))
    inputs = draw(op, (len(inputs[op.logits[0]]),), 8)
    check(op, inputs, layout, **options)


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("op", AT_IDS, ids=str)
def test_every_id_of_special_rows(op: Op, layout: Layout | None) -> None:
    """Some ids have the logit -inf in a row with finite logits."""
    rows = torch.tensor(list(ROWS.values()))
    inputs = draw(op, rows.shape, vocab=8)
    inputs["logits"] = rows.unsqueeze(1).expand(-1, 8, -1).contiguous()
    ids = torch.arange(8).expand(len(ROWS), 8)
    if op.ids:
        ids = (ids.unsqueeze(-1) + torch.arange(*op.ids)) % 8
    check(op, {**inputs, op.ids_name: ids.contiguous()}, layout)


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("op", OPS, ids=str)
def test_zero_upstream_gradient_gives_zero_for_any_row(op: Op, layout: Layout | None) -> None:
    inputs = special(op)
    grads = [None if grad is None else torch.zeros_like(grad) for grad in quarter(op, inputs)]
    observed = check(op, inputs, layout, grads)
    for grad in observed.gradients.values():
        assert all((local == 0).all() for local in parts(grad).values())


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("op", [*AT_IDS, OP["topk_kl_div(K=3)"]], ids=str)
def test_ignored_ids_give_zero_for_any_row(op: Op, layout: Layout | None) -> None:
    """Value and gradient are 0 in rows of NaN or -inf, even for an upstream gradient of NaN."""
    inputs = special(op)
    inputs[op.ids_name].fill_(-100)
    outputs = expect(op, inputs).outputs
    grads = [torch.full(out.shape, NAN) for out in outputs[:1]]
    grads += [torch.zeros(out.shape) for out in outputs[1:]]
    observed = check(op, inputs, layout, grads)
    assert all((local == 0).all() for local in parts(observed.outputs[0]).values())
    for grad in observed.gradients.values():
        assert all((local == 0).all() for local in parts(grad).values())


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("op", OPS, ids=str)
def test_rows_masked_by_the_caller_have_no_gradient(op: Op, layout: Layout | None) -> None:
    """No NaN or infinity of a masked row enters its gradient or that of other rows."""

    def fill(out: Tensor) -> Tensor:
        return out.masked_fill_(~(out.abs() < INF), 0)

    def select(out: Tensor) -> Tensor:
        return torch.where(out.abs() < INF, out, 0)

    inputs = special(op)
    for edit in (fill, select):
        observed = check(op, inputs, layout, quarter(op, inputs), edit=edit)
        for grad in observed.gradients.values():
            assert all(local.isfinite().all() for local in parts(grad).values())


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("op", ROW_BY_ROW, ids=str)
def test_large_negative_logits_act_as_masks(op: Op, layout: Layout | None) -> None:
    """Models mask tokens with large negative logits, and some temperatures make these overflow.

    The masks fill a whole shard, part of another one, or both.
    """
    inputs = draw(op, (24,), 8)
    value = torch.tensor([torch.finfo(torch.float32).min, -1e35]).repeat(12)
    temperature = torch.tensor([1.0, 1.0, 0.5, 0.5]).repeat(6)
    for name in op.logits:
        inputs[name][:, 4:] = value.unsqueeze(-1)
        if "teacher_ids" not in inputs:  # fp64 cannot resolve a tail of masks alone
            inputs[name][12:, 1] = value[12:]
    for name in ("index", "target", "teacher_ids"):
        if name in inputs:  # Tokens with these ids are not masked.
            ids = torch.tensor([2, 0, 3]) if op.ids else torch.tensor(2)
            inputs[name] = ids.expand(24, *op.ids)
    options = {} if op.name == "argmax" else {"temperature": temperature}
    if "label_smoothing" not in op.options:
        check(op, inputs, layout, **options)
        return
    # The loss is as large as the masks, and infinite where the masks overflow fp32.
    expected = expect(op, inputs, **options)
    observed = observe_in(op, inputs, layout, expected.grads, **options)
    overflow = value.double() / temperature < torch.finfo(torch.float32).min
    loss = torch.where(overflow, INF, expected.outputs[0])
    for local in parts(observed.outputs[0]).values():
        torch.testing.assert_close(local.detach().double(), loss, rtol=1e-5, atol=0)
    gradient = torch.cat(list(parts(observed.gradients["logits"]).values()), -1)
    assert_gradient(gradient, expected.gradients["logits"])


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", named("kl_div"), ids=str)
def test_finite_mask_where_the_other_has_mass_gives_a_finite_divergence(
    op: Op, dtype: torch.dtype, layout: Layout | None
) -> None:
    """The divergence is 1e37 or more, and the gradient of the masked logits is right."""
    inputs = draw(op, (6,), 24, dtype)
    a, b = op.logits if op.options.get("reverse") else op.logits[::-1]
    inputs[a][:, ::2] -= 3  # Little mass keeps the divergence from overflowing fp32.
    inputs[b][:, ::2] = torch.finfo(dtype).min
    options = {"temperature": torch.tensor([1.0, 0.5]).repeat(3)}
    expected = expect(op, inputs, [torch.ones(6)], **options)
    observed = observe_in(op, inputs, layout, **options)
    for local in parts(observed.outputs[0]).values():
        torch.testing.assert_close(local.detach().double(), expected.outputs[0], rtol=1e-5, atol=0)
    gradient = torch.cat(list(parts(observed.gradients[b]).values()), -1)
    assert_gradient(gradient, expected.gradients[b])


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("op", named("kl_div"), ids=str)
def test_large_logits_are_not_taken_for_masks(op: Op, layout: Layout | None) -> None:
    student, teacher = torch.tensor([[[0, -3e38, -1e38, -3e38]], [[3e38, 2e38, 0, -1e38]]])
    inputs = {"student": student, "teacher": teacher}
    for local in parts(observe_in(op, inputs, layout).outputs[0]).values():
        assert local.equal(torch.zeros(1))


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("masked", [0, 1], ids=["student", "teacher"])
@pytest.mark.parametrize("op", PAIRS, ids=str)
def test_masks_that_overflow_where_the_other_has_no_mass(
    op: Op, masked: int, layout: Layout | None
) -> None:
    inputs = draw(op, (6,), 8)
    mask, other = op.logits[masked], op.logits[1 - masked]
    inputs[mask][:, 5:] = torch.finfo(torch.float32).min
    inputs[other][:, 5:] = -200
    check(op, inputs, layout, temperature=0.5)


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("op", named("kl_div", "topk_kl_div"), ids=str)
def test_infinite_divergence_has_no_gradient(op: Op, layout: Layout | None) -> None:
    """The gradient stays 0 if the caller's arithmetic makes the upstream gradient NaN or inf."""
    reverse = op.options.get("reverse", False)
    inputs = draw(op, (4,), 8)
    if "teacher" in inputs:
        inputs["teacher" if reverse else "student"][:3, 1] = -INF
    elif reverse:
        inputs["teacher_logprobs"][:3, 1] = -INF
    else:
        inputs["student"][:3].scatter_(-1, inputs["teacher_ids"][:3, 1:2], -INF)
    observed = observe_in(op, inputs, layout, [torch.tensor([1.0, NAN, INF, 1.0])])
    for local in parts(observed.outputs[0]).values():
        assert (local[:3] == INF).all() and local[3].isfinite()
    for gradient in observed.gradients.values():
        assert all((local[:3] == 0).all() for local in parts(gradient).values())
        assert any((local[3] != 0).any() for local in parts(gradient).values())


@WHOLE_OR_SHARDED
@pytest.mark.parametrize("op", [OP["logprobs"], OP["kl_div"]], ids=str)
def test_bytes_of_a_row_do_not_depend_on_others_with_compiled_kernels(
    op: Op, layout: Layout | None
) -> None:
    check_row_alone(op, layout)


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("op", ROW_BY_ROW, ids=str)
def test_bytes_of_a_row_do_not_depend_on_others(op: Op, layout: Layout | None) -> None:
    check_row_alone(op, layout)


def check_row_alone(op: Op, layout: Layout | None) -> None:
    inputs = draw(op, (3,), vocab=8)
    for name in op.logits:
        inputs[name][1:] = -INF
    grads = quarter(op, inputs)
    beside = check(op, inputs, layout, grads)
    inputs = {name: value[:1] for name, value in inputs.items()}
    alone = check(op, inputs, layout, [None if grad is None else grad[:1] for grad in grads])
    for one, other in zip(
        [*alone.outputs, *alone.gradients.values()],
        [*beside.outputs, *beside.gradients.values()],
        strict=True,
    ):
        for rank, local in parts(one).items():
            assert_bytes_equal(local, parts(other)[rank][:1])


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("tempered", [False, True], ids=["", "temperature"])
@pytest.mark.parametrize("op", [op for op in OPS if "z_loss" not in op.options], ids=str)
def test_common_offset_loses_no_precision(op: Op, tempered: bool, layout: Layout | None) -> None:
    inputs = draw(op, (12,), vocab=8)
    for name in op.logits:  # The steps between logits are exact at 1e4 too.
        inputs[name] = (inputs[name] * 64).round() / 64
    offset = torch.tensor([[1e4], [-1e4]]).repeat(6, 1)
    options = {"temperature": torch.rand(12) + 0.5} if tempered and op.name != "argmax" else {}
    expected = expect(op, inputs, **options)
    moved = {name: x + offset if name in op.logits else x for name, x in inputs.items()}
    observed = check(op, moved, layout, **options)
    for out, value in zip(observed.outputs, expected.outputs, strict=True):
        for local in parts(out).values():
            assert_values(local.detach(), value, tolerance=1e-6)


def quarter(op: Op, inputs: Inputs) -> list[Tensor | None]:
    """Returns small upstream gradients, since KLs reach hundreds and the tolerance is absolute."""
    return [
        torch.full(out.shape, 0.25) if out.dtype.is_floating_point else None
        for out in expect(op, inputs).outputs
    ]


# ------------------------------------------------------------------ empty and masked shards


@eager
@pytest.mark.parametrize("vocab, ranks", [(5, 4), (2, 4), (10, 8)])
@pytest.mark.parametrize("op", OPS, ids=str)
def test_empty_shards(op: Op, vocab: int, ranks: int) -> None:
    op = op.within(vocab)
    observed = check(op, draw(op, (4,), vocab), tp(ranks))
    for name in op.logits:
        if name in op.differentiable:
            assert parts(observed.gradients[name])[ranks - 1].shape == (4, 0)


@eager
@pytest.mark.parametrize("op", [*PATHS, *named("cross_entropy")], ids=str)
def test_operators_work_without_the_start_of_the_shard(
    op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain tensors on a GPU have no start tensor, which stands for a start of 0."""

    def place_without_start(*args: Any) -> Vocabulary:
        return place_vocabulary(*args)._replace(start=None)

    monkeypatch.setattr(checks, "place_vocabulary", place_without_start)
    inputs = draw(op, vocab=9)
    for name in op.logits:
        inputs[name] = torch.cat([inputs[name], torch.zeros(6, 2)], -1)
    check(op, inputs, vocab_size=9)


# ------------------------------------------------------------------ entropy and divergences


@eager
def test_entropy_of_masked_rows() -> None:
    logits = torch.tensor([[0, math.log(3), -INF, -INF]])
    observed = check(OP["entropy"], {"logits": logits}, tp(2), [torch.ones(1)])
    value = parts(observed.outputs[0])[0]
    torch.testing.assert_close(value.detach(), torch.tensor([0.5623351446]))
    gradient = torch.cat(list(parts(observed.gradients["logits"]).values()), -1)
    torch.testing.assert_close(gradient, torch.tensor([[0.2059898, -0.2059898, 0, 0]]))


@eager
def test_entropy_of_fp16_logits_far_apart() -> None:
    logits = torch.tensor([60000, -60000, 0, 0], dtype=torch.float16, requires_grad=True)
    value = dv.entropy(logits)
    value.backward()
    assert value == 0
    assert logits.grad.equal(torch.zeros_like(logits))


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", PAIRS, ids=str)
def test_divergence_of_underflowing_mass(op: Op, dtype: torch.dtype, layout: Layout | None) -> None:
    student = torch.tensor([[0, -200, 0, -200]] * 2, dtype=dtype)
    teacher = torch.tensor([[-200, 0, 0, -200]] * 2, dtype=dtype)
    check(op, {"student": student, "teacher": teacher}, layout, [torch.full((2,), 0.25)])


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", PAIRS, ids=str)
def test_divergence_of_equal_logits_is_exactly_zero(
    op: Op, dtype: torch.dtype, layout: Layout | None
) -> None:
    logits = draw(OP["entropy"], (64,), 24, dtype)["logits"]
    logits[:, 3] = -INF
    observed = observe_in(op, {"student": logits, "teacher": logits.clone()}, layout)
    for tensor in (*observed.outputs, *observed.gradients.values()):
        assert all((local == 0).all() for local in parts(tensor).values())


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("op", PAIRS, ids=str)
def test_divergence_is_never_negative(op: Op, layout: Layout | None) -> None:
    """The logits are equal up to rounding, so terms of both signs cancel."""
    student = torch.randn(2048, 24) * torch.logspace(-2, 1, 2048).unsqueeze(-1)
    teacher = student * (1 + 1e-7 * torch.randn(2048, 24))
    observed = observe_in(op, {"student": student, "teacher": teacher}, layout)
    assert all((local >= 0).all() for local in parts(observed.outputs[0]).values())


@eager
@pytest.mark.parametrize("beta", [0.5, 0.1, 0.9])
def test_jensen_shannon_at_any_distance(beta: float) -> None:
    gap = torch.linspace(-100, 100, 2000).unsqueeze(-1)
    student, teacher = torch.cat([gap, 0 * gap], -1), torch.cat([0 * gap, 0 * gap - 1], -1)
    check(OP["js_div(beta=0.3)"], {"student": student, "teacher": teacher}, beta=beta)


@eager
def test_jensen_shannon_of_a_denormal_probability() -> None:
    """The probability's share in the mixture underflows to 0."""
    op = OP["js_div(beta=0.3)"].with_options(beta=0.999)
    student, teacher = torch.tensor([[[0.0, -101.0]], [[0.0, -INF]]])
    check(op, {"student": student, "teacher": teacher})


@eager
@pytest.mark.parametrize("op", [OP["logprobs"], OP["entropy"]], ids=str)
def test_gradient_of_tiny_probabilities_keeps_its_digits(op: Op) -> None:
    inputs = draw(op, (1,), 4)
    inputs["logits"] = torch.tensor([[0.0, -30.0, -60.0, -80.0]])
    if op.ids_name:
        inputs[op.ids_name].zero_()
    expected = expect(op, inputs, [torch.ones(1)])
    gradient = observe(op, inputs, grads=[torch.ones(1)]).gradients["logits"].double()
    torch.testing.assert_close(
        gradient[:, 1:], expected.gradients["logits"][:, 1:], rtol=1e-5, atol=0
    )


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("beta", [1e-9, 1e-6, 1e-3, 1 - 1e-3, 1 - 1e-6, 1 - 1e-9])
def test_jensen_shannon_is_accurate_near_beta_0_and_1(beta: float, layout: Layout | None) -> None:
    """The divergence approaches β KL(t || s), or (1 - β) KL(s || t), and keeps its digits."""
    op = OP["js_div(beta=0.3)"].with_options(beta=beta)
    spread = torch.tensor([[0.5], [4.0]]).repeat(8, 1)
    inputs = {name: spread * torch.randn(16, 48) for name in op.logits}
    expected = expect(op, inputs, [torch.ones(16)])
    observed = observe_in(op, inputs, layout)
    for local in parts(observed.outputs[0]).values():
        torch.testing.assert_close(local.detach().double(), expected.outputs[0], rtol=1e-5, atol=0)
    for name, gradient in observed.gradients.items():
        whole = torch.cat(list(parts(gradient).values()), -1)
        wanted = expected.gradients[name]
        for rows in (slice(0, None, 2), slice(1, None, 2)):  # of the same spread
            assert (whole - wanted)[rows].abs().amax() <= 1e-5 * wanted[rows].abs().amax()


def observe_in(
    op: Op,
    inputs: Inputs,
    layout: Layout | None,
    grads: Sequence[Tensor | None] | None = None,
    **options: Any,
) -> Observed:
    grads = grads or [torch.ones(inputs[op.logits[0]].shape[:-1])]
    if layout is None:
        return observe(op, inputs, grads=grads, **options)
    with on_mesh(layout.mesh) as mesh:
        return observe(op, inputs, mesh, layout, grads, **options)


# ------------------------------------------------------------------ precision of the results


@eager
@WHOLE_OR_SHARDED
@pytest.mark.parametrize("default", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("op", PATHS, ids=str)
def test_result_ignores_default_dtype(op: Op, default: torch.dtype, layout: Layout | None) -> None:
    inputs = draw(op)
    expected = expect(op, inputs)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        observed = observe_in(op, inputs, layout, expected.grads)
    finally:
        torch.set_default_dtype(before)
    compare(op, inputs, layout, observed, expected)


@eager
@pytest.mark.parametrize("op", OPS, ids=str)
def test_bfloat16_matches_the_oracle(op: Op) -> None:
    check(op, draw(op, (64,), 24, torch.bfloat16))


@eager
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_fp16_and_fp64_match_the_oracle(op: Op, dtype: torch.dtype) -> None:
    check(op, draw(op, (64,), 24, dtype))
    check(op, draw(op, (64,), 24, dtype), tp(2))


@eager
@pytest.mark.parametrize(
    "dtypes",
    [("float32", "bfloat16"), ("float64", "float32"), ("bfloat16", "float64")],
    ids="-".join,
)
@pytest.mark.parametrize("op", PAIRS, ids=str)
def test_student_and_teacher_of_two_dtypes(op: Op, dtypes: tuple[str, str]) -> None:
    """Each gradient has the dtype of its input, and the math runs in the wider of the two."""
    inputs = draw(op)
    for name, dtype in zip(op.logits, dtypes, strict=True):
        inputs[name] = inputs[name].to(getattr(torch, dtype))
    check(op, inputs, temperature=0.7)
    check(op, inputs, tp(2))
