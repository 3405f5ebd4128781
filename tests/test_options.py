"""Temperature, padding of the vocabulary, and the options of single ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import dtensor_vocab as dv
from tests.ops import OPS, PATHS, Inputs, Layout, Op, check, draw, expect, named, place, tp
from tests.oracle import assert_values
from tests.ranks import distribute, on_mesh, part, parts

pytestmark = pytest.mark.usefixtures("eager_kernels")

DP_TP = Layout((2, 2), (Shard(0), Shard(-1)))
PLAIN_OR_MESH = pytest.mark.parametrize("layout", [None, DP_TP], ids=str)
WITH_TEMPERATURE = [op for op in OPS if op.name != "argmax"]
TEMPERED_PATHS = [op for op in PATHS if op.name != "argmax"]


# ------------------------------------------------------------------ temperature


@PLAIN_OR_MESH
@pytest.mark.parametrize("op", WITH_TEMPERATURE, ids=str)
def test_temperature_divides_all_logits(op: Op, layout: Layout | None) -> None:
    for temperature in (0.7, 2):
        check(op, draw(op), layout, temperature=temperature)


@PLAIN_OR_MESH
@pytest.mark.parametrize("op", WITH_TEMPERATURE, ids=str)
def test_temperature_tensor_divides_each_row(op: Op, layout: Layout | None) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        temperature = torch.logspace(-1, 2, 12).view(4, 3).to(dtype)
        check(op, draw(op, (4, 3)), layout, temperature=temperature)


@pytest.mark.parametrize("op", TEMPERED_PATHS, ids=str)
def test_plain_temperature_is_the_global_one_on_every_rank(op: Op) -> None:
    inputs = draw(op)
    temperature = torch.linspace(0.5, 2, 6)
    expected = expect(op, inputs, temperature=temperature)
    with on_mesh((2,)) as mesh:
        placed = [place(name, x, mesh, tp(2), inputs) for name, x in inputs.items()]
        outputs = op(*placed, temperature=distribute(temperature, mesh, [Replicate()]))
        again = op(*placed, temperature=temperature)
    for out in (outputs[0], again[0]):
        for local in parts(out).values():
            assert_values(local, expected.outputs[0])


@pytest.mark.parametrize("op", WITH_TEMPERATURE, ids=str)
def test_temperature_of_one_row(op: Op) -> None:
    """Logits [V] have a temperature of shape []."""
    check(op, draw(op, ()), temperature=torch.tensor(0.5))
    check(op, draw(op, ()), tp(2), temperature=torch.tensor(0.5))


@PLAIN_OR_MESH
@pytest.mark.parametrize("op", TEMPERED_PATHS, ids=str)
def test_one_temperature_for_all_rows(op: Op, layout: Layout | None) -> None:
    check(op, draw(op), layout, temperature=torch.tensor(0.7))


@pytest.mark.parametrize("op", TEMPERED_PATHS, ids=str)
def test_plain_temperature_for_all_rows_beside_sharded_rows(op: Op) -> None:
    """A 0-d tensor may be plain here, since it cannot be the local rows of one rank."""
    inputs = draw(op)
    expected = expect(op, inputs, temperature=0.7).outputs[0]
    with on_mesh((2, 2)) as mesh:
        placed = [place(name, x, mesh, DP_TP, inputs) for name, x in inputs.items()]
        out = op(*placed, temperature=torch.tensor(0.7))[0]
    placements = DP_TP.rows(2) if expected.dim() else DP_TP.nowhere
    for rank, local in parts(out).items():
        assert_values(local, part(expected, DP_TP.mesh, placements, rank))


BAD_TEMPERATURES = [0.0, -1.0, torch.nan, torch.inf, 1e-60]


@PLAIN_OR_MESH
@pytest.mark.parametrize("op", TEMPERED_PATHS, ids=str)
def test_temperature_tensor_out_of_range_is_an_error(op: Op, layout: Layout | None) -> None:
    """The error names the function and the range, and the next call works."""
    inputs = draw(op)
    for bad in BAD_TEMPERATURES:
        for temperature in (torch.ones(6).double(), torch.tensor(1.0).double()):
            temperature.view(-1)[-1] = bad
            with pytest.raises(RuntimeError, match=f"^{op.name}: expected 0 < temperature < inf"):
                observe_on(layout, op, inputs, temperature=temperature)
    check(op, inputs, layout, temperature=torch.ones(6))


def observe_on(layout: Layout | None, op: Op, inputs: Inputs, **options: Any) -> None:
    if layout is None:
        op(*inputs.values(), **options)
        return
    with on_mesh(layout.mesh) as mesh:
        placed = [place(name, x, mesh, layout, inputs) for name, x in inputs.items()]
        for name, x in options.items():
            options[name] = place(name, x, mesh, layout, inputs) if x.dim() else x
        op(*placed, **options)


# ------------------------------------------------------------------ a padded vocabulary


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("op", OPS, ids=str)
def test_padding_has_no_mass(op: Op, ranks: int) -> None:
    """The padding holds large logits, and fills whole shards of the four ranks."""
    inputs = draw(op, vocab=7)
    for name in op.logits:
        inputs[name] = torch.nn.functional.pad(inputs[name], (0, 9), value=1e4)
    check(op, inputs, None if ranks == 1 else tp(ranks), vocab_size=7)


@pytest.mark.parametrize("op", WITH_TEMPERATURE, ids=str)
def test_padding_and_temperature(op: Op) -> None:
    inputs = draw(op, vocab=7)
    for name in op.logits:
        inputs[name] = torch.nn.functional.pad(inputs[name], (0, 3), value=torch.nan)
    check(op, inputs, tp(2), vocab_size=7, temperature=torch.linspace(0.5, 2, 6))


@pytest.mark.parametrize("op", OPS, ids=str)
def test_vocab_size_of_all_columns(op: Op) -> None:
    check(op, draw(op), tp(2), vocab_size=10)


# ------------------------------------------------------------------ options of single ops


def options(name: str, **values: Any) -> Op:
    return replace(named(name)[0], options=values)


OPTIONS = [
    *(options("js_div", beta=beta) for beta in (0.5, 0.1, 0.999)),
    options("cross_entropy", reduction="sum"),
    options("cross_entropy"),
    *(
        options("cross_entropy", reduction=reduction, label_smoothing=0.1, z_loss=z_loss)
        for reduction in ("none", "mean")
        for z_loss in (0.0, 1e-2)
    ),
    options("cross_entropy", reduction="none", label_smoothing=1.0),
    *(options("topk_logprobs", k=k) for k in (0, 1, 10)),
    options("topk_kl_div", reverse=True),
]


@PLAIN_OR_MESH
@pytest.mark.parametrize("op", OPTIONS, ids=str)
def test_each_option_matches_the_oracle(op: Op, layout: Layout | None) -> None:
    inputs = draw(op)
    if op.ids_name:
        inputs[op.ids_name][1::3] = -100
    check(op, inputs, layout)


@PLAIN_OR_MESH
@pytest.mark.parametrize("op", [op for op in OPTIONS if op.name == "cross_entropy"], ids=str)
def test_label_smoothing_excludes_padding(op: Op, layout: Layout | None) -> None:
    inputs = draw(op, vocab=7)
    inputs["logits"] = torch.nn.functional.pad(inputs["logits"], (0, 3), value=50)
    check(op, inputs, layout, vocab_size=7, temperature=0.5)


@PLAIN_OR_MESH
@pytest.mark.parametrize("beta", [0, 1, 0.0, 1.0])
def test_jensen_shannon_at_beta_0_and_1_is_kl(beta: float, layout: Layout | None) -> None:
    op = replace(options("js_div", beta=beta), numbers=(6,))
    check(op, draw(op), layout)


@pytest.mark.parametrize("layout", [None, tp(2), tp(3), tp(8)], ids=str)
@pytest.mark.parametrize("op", named("topk_logprobs", "argmax"), ids=str)
def test_ties_go_to_the_lower_id(op: Op, layout: Layout | None) -> None:
    """The result is the same for every number of ranks."""
    logits = torch.tensor([0.0, 1, 1, 0, 2, 1, 2, 1, 0, 2]).repeat(3, 1)
    logits[1] = 0
    logits[2, ::2] = -torch.inf
    check(op.with_options(k=6) if "k" in op.options else op, {"logits": logits}, layout)


@pytest.mark.parametrize("vocab", [8, 200], ids=["all columns", "chunks of columns"])
def test_topk_orders_nan_and_both_zeros_by_id(vocab: int) -> None:
    """NaN counts as the largest, and -0.0 equals 0.0."""
    logits = torch.full((2, vocab), -1.0)
    logits[0, 1::2] = 0.0
    logits[0, 2::4] = -0.0
    # 200 columns are 12 chunks of every 12th column. Of those with NaN, the last has it first.
    logits[1, slice(0, None, 3) if vocab == 8 else slice(31, 109, 11)] = torch.nan
    ids = dv.topk_logprobs(logits, 6)[1]
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, :6]
    assert ids[:, :3].equal(expected[:, :3])
    if vocab > 8:
        assert ids.equal(expected)


def test_topk_finds_tokens_after_the_last_whole_chunk() -> None:
    """The search takes chunks of columns; 203 columns leave some over."""
    logits = torch.arange(203.0).expand(2, 203)
    assert dv.topk_logprobs(logits, 6)[1].equal(torch.arange(202, 196, -1).expand(2, 6))


def test_z_loss_that_cancels_the_softmax_leaves_the_smoothing() -> None:
    """The coefficient of the softmax is 1 + 2 ζ lse = 0."""
    check(
        options("cross_entropy", reduction="none", label_smoothing=1.0, z_loss=0.5),
        {"logits": torch.tensor([[-1.0]]), "target": torch.zeros(1, dtype=torch.int64)},
    )


def test_mean_is_over_the_valid_positions_of_all_ranks() -> None:
    """The data-parallel ranks have 3, 1, 0 and 2 valid positions."""
    op = options("cross_entropy")
    inputs = draw(op, (12,))
    for ignored in (3, 4, 6, 7, 8, 10):
        inputs["target"][ignored] = -100
    check(op, inputs, Layout((4, 2), (Shard(0), Shard(-1))))


def test_mean_over_no_position_is_zero() -> None:
    logits = torch.randn(3, 8, requires_grad=True)
    loss = dv.cross_entropy(logits, torch.full((3,), -100))
    loss.backward()
    assert loss == 0
    assert logits.grad.equal(torch.zeros(3, 8))


# ------------------------------------------------------------------ the teacher's top K


@PLAIN_OR_MESH
@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize("op", named("topk_kl_div"), ids=str)
def test_ignored_ids_pad_a_list_to_k(op: Op, ignore_index: int, layout: Layout | None) -> None:
    """Log-probabilities at ignored ids do not matter, and ignore_index may be a token."""
    inputs = draw(op)
    inputs["teacher_ids"][inputs["teacher_ids"] == ignore_index] = 7
    alone = expect(op, inputs)
    for padding in (-torch.inf, torch.nan, -1.0):
        padded = dict(inputs)
        ids = torch.full((6, 2), ignore_index)
        padded["teacher_ids"] = torch.cat([inputs["teacher_ids"], ids], -1)
        log_q = torch.full((6, 2), padding)
        padded["teacher_logprobs"] = torch.cat([inputs["teacher_logprobs"], log_q], -1)
        observed = check(op, padded, layout, ignore_index=ignore_index)
    if layout is None:
        assert_values(observed.outputs[0].detach(), alone.outputs[0])
        assert_values(observed.gradients["student"], alone.gradients["student"])


@pytest.mark.parametrize("layout", [None, tp(2)], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_tail_is_never_negative(reverse: bool, layout: Layout | None) -> None:
    """Student and teacher are nearly the same, with most of the mass or all of it in the top K."""
    spread = torch.logspace(-1, 2, 256).unsqueeze(-1)
    student = torch.randn(256, 16) * spread
    teacher = (student + 1e-5 * torch.randn(256, 16)).log_softmax(-1).topk(4)
    op = options("topk_kl_div", tail=True, reverse=reverse)
    inputs = {
        "student": student,
        "teacher_logprobs": teacher.values,
        "teacher_ids": teacher.indices,
    }
    if layout is None:
        inputs["student"].requires_grad_()
        value = op(*inputs.values())[0]
        value.sum().backward()
        values, grads = [value], [student.grad]
    else:
        with on_mesh((2,)) as mesh:
            placed = {n: place(n, x, mesh, layout, inputs) for n, x in inputs.items()}
            placed["student"].requires_grad_()
            value = op(*placed.values())[0]
            value.sum().backward()
        values, grads = parts(value).values(), parts(placed["student"].grad).values()
    assert all(((local >= 0) & (local < 1e-3)).all() for local in values)
    assert all((local.abs() < 1e-2).all() for local in grads)
