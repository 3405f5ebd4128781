"""``LinearLogits``: every op on operands of a linear layer, by blocks of columns and of rows."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import dtensor_vocab as dv
from bench.measure.peak import peak_above_inputs, return_freed_blocks
from dtensor_vocab import linear_blocks
from tests.graphs import Graphs
from tests.ops import (
    LINEAR,
    LINEAR_PATHS,
    LOGITS,
    OP,
    PATHS,
    Inputs,
    Layout,
    Op,
    check,
    draw,
    place,
    tp,
)
from tests.oracle import assert_values
from tests.rank_zero import lone_rank, place_part
from tests.ranks import World, distribute, from_parts, on_mesh
from tests.step import compiled
from tests.test_operators import Calls

eager = pytest.mark.usefixtures("eager_kernels")

V = Shard(-1)
SHAPES = {"one block": (6, 10), "columns": (6, 50), "rows": (40, 10)}
"""Rows and vocabulary. Blocks of the smallest size have 16 columns, or 16 rows."""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_blocks, "BLOCK_BYTES", 1)


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    if request.param != "one block":
        monkeypatch.setattr(linear_blocks, "BLOCK_BYTES", 1)
    return SHAPES[request.param]


def options_of(op: Op, rows: int, vocab: int) -> dict[str, Any]:
    """Padding where all ids are tokens, and a temperature for each row where the op takes one."""
    options: dict[str, Any] = {} if "teacher_ids" in op.arguments else {"vocab_size": vocab}
    if op.name != "argmax":
        options["temperature"] = torch.linspace(0.5, 2, rows)
    return options


# ------------------------------------------------------------------ values and gradients


@eager
@pytest.mark.parametrize("op", LINEAR, ids=str)
def test_blocks_of_columns_and_of_rows(op: Op, shape: tuple[int, int]) -> None:
    rows, vocab = shape
    inputs = draw(op, (rows,), vocab)
    if op.ids_name:
        if op.ids_name != "teacher_ids":  # They must differ.
            inputs[op.ids_name].clamp_(max=vocab - 3)
        inputs[op.ids_name][::3] = -100
    check(op, inputs, **options_of(op, rows, vocab - 2))


COMPILED = [
    OP["logprobs(K=3)"].linear(),
    OP["kl_div"].linear("student"),
    OP["cross_entropy(reduction=none,label_smoothing=0.1)"].linear(),
    OP["topk_logprobs(k=3)"].linear(),
    OP["argmax"].linear(),
]


@pytest.mark.parametrize("op", COMPILED, ids=str)
def test_blocks_with_compiled_kernels(op: Op, small_blocks: None) -> None:
    for rows, vocab in (SHAPES["columns"], SHAPES["rows"]):
        check(op, draw(op, (rows,), vocab))


@eager
@pytest.mark.parametrize("rows", [(), (0,), (1,), (2, 0), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("op", LINEAR_PATHS, ids=str)
def test_leading_dims(op: Op, rows: tuple[int, ...], small_blocks: None) -> None:
    check(op, draw(op, rows, 33))


@eager
@pytest.mark.parametrize("op", LINEAR_PATHS, ids=str)
def test_sliced_hidden_states(op: Op, small_blocks: None) -> None:
    """The usual shift by one token gives hidden states, and logits beside them, without a view."""
    inputs = draw(op, (3, 5), 33)
    for name in op.logits:
        inputs[name] = torch.cat([inputs[name], inputs[name][:, :1]], 1)[:, :-1]
    check(op, inputs)


def test_logits_without_a_view_as_rows_are_divided_by_columns() -> None:
    """Blocks of their rows would be copies of all logits."""
    logits = torch.randn(10, 6, 20)
    for given, by_columns in ((logits, False), (logits[:, :-1], True)):
        blocks = linear_blocks.Blocks([linear_blocks.LocalLogits(given, None, None)], None, 1)
        assert blocks.by_columns == by_columns


def test_no_block_has_one_column() -> None:
    """Kernels would be compiled again for it."""
    for length in range(1, 200):
        bounds = linear_blocks._even_bounds(length, 4, 200)
        assert bounds[0] == 0 and bounds[-1] == length
        widths = [end - start for start, end in itertools.pairwise(bounds)]
        assert length == 1 or min(widths) > 1
        assert max(widths) <= 49


@eager
@pytest.mark.parametrize("rows", [0, 40])
def test_gradients_without_rows_are_zero(rows: int) -> None:
    op = OP["logprobs"].linear()
    inputs = draw(op, (rows,))
    if rows:
        inputs["index"][:] = -100
    for name in op.differentiable:
        assert check(op, inputs, needs=(name,)).gradients[name].eq(0).all()
        inputs[name].requires_grad_(False)


NEEDS = [OP["logprobs"], OP["kl_div"], OP["js_div(beta=0.3)"], OP["topk_kl_div(tail=True,K=3)"]]


@eager
@pytest.mark.parametrize("op", [op.linear() for op in NEEDS], ids=str)
def test_each_gradient_alone(op: Op, shape: tuple[int, int]) -> None:
    rows, vocab = shape
    for name in op.differentiable:
        check(op, draw(op, (rows,), vocab), needs=(name,))


@eager
def test_no_gradient_and_no_bias() -> None:
    inputs = draw(OP["logprobs"].linear())
    logits = dv.LinearLogits(inputs["logits.hidden"], inputs["logits.weight"])
    expected = dv.logprobs(F.linear(*logits[:2]), inputs["index"])
    assert_close(dv.logprobs(logits, inputs["index"]), expected)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@eager
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", PATHS, ids=str)
def test_results_are_those_on_f_linear(op: Op, dtype: torch.dtype, small_blocks: None) -> None:
    """Blocks are rounded to the dtype of ``F.linear``, so only the order of sums differs."""
    linear = op.linear()
    inputs = draw(linear, (6,), 50, dtype)
    logits = [F.linear(*(inputs[f"{name}.{x}"] for x in OPERANDS)) for name in op.logits]
    others = [value for name, value in inputs.items() if "." not in name]
    for out, expected in zip(linear(*inputs.values()), op(*logits, *others), strict=True):
        assert out.dtype == expected.dtype
        assert_values(out, expected)


OPERANDS = ("hidden", "weight", "bias")


ACCURATE = [OP["logprobs"], OP["logprobs(K=3)"], OP["entropy"], OP["kl_div"]]
"""One id per row, whose entry of the gradient is added apart; several ids; no ids; two logits."""


@eager
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("shape", [(64, 2048), (512, 128)], ids=["columns", "rows"])
@pytest.mark.parametrize("op", ACCURATE, ids=str)
def test_gradients_are_as_accurate_as_those_of_f_linear(
    op: Op, shape: tuple[int, int], dtype: torch.dtype, small_blocks: None
) -> None:
    compare_accuracy(op, *shape, dtype)


@pytest.mark.parametrize("op", ACCURATE[::2], ids=str)
def test_accuracy_with_a_large_vocabulary(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_blocks, "BLOCK_BYTES", 1 << 20)
    compare_accuracy(op, 32, 131072, torch.bfloat16)


def compare_accuracy(op: Op, rows: int, vocab: int, narrow: torch.dtype) -> None:
    """Compares the gradients of all operands with those through ``F.linear`` in the same dtype, by
    their errors against fp64.
    """
    linear = op.linear()
    inputs = draw(linear, (rows,), vocab, narrow)

    def gradients(dtype: torch.dtype, made: bool) -> list[Tensor]:
        given = {n: x.to(dtype) if x.dtype == narrow else x for n, x in inputs.items()}
        leaves = [given[name].requires_grad_() for name in linear.differentiable]
        if not made:
            out = linear(*given.values())
        else:
            logits = [F.linear(*(given[f"{name}.{x}"] for x in OPERANDS)) for name in op.logits]
            out = op(*logits, *(x for name, x in given.items() if "." not in name))
        return [*torch.autograd.grad(out[0].sum(), leaves)]

    exact = gradients(torch.float64, True)
    for ours, autograd, expected in zip(
        gradients(narrow, False), gradients(narrow, True), exact, strict=True
    ):
        assert error(ours, expected) <= 1.05 * error(autograd, expected)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_casts_operands_like_f_linear(dtype: torch.dtype, eager_kernels: None) -> None:
    op = OP["logprobs"].linear()
    hidden, weight, bias, index = draw(op, (6,), 50).values()
    leaves = [x.requires_grad_() for x in (hidden.to(dtype), weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        logits = dv.LinearLogits(*leaves)
        assert logits.dtype == torch.bfloat16
        ours, expected = (dv.logprobs(x, index) for x in (logits, F.linear(*leaves)))
    assert ours.dtype == torch.float32
    assert_close(ours, expected)
    for mine, other in zip(
        *(torch.autograd.grad(x.sum(), leaves) for x in (ours, expected)), strict=True
    ):
        assert mine.dtype == other.dtype
        assert_close(mine, other, rtol=2**-6, atol=1e-2)


@eager
def test_fp16_sums_do_not_overflow(small_blocks: None) -> None:
    """Terms of 80000 and -80000 have a small sum."""
    weight, target = torch.full((32, 4), 4.0, dtype=torch.float16), torch.tensor([0, 20])
    gradients = []
    for make in (dv.LinearLogits, F.linear):
        hidden = torch.zeros(2, 4, dtype=torch.float16, requires_grad=True)
        loss = dv.cross_entropy(make(hidden, weight), target, reduction="sum") * 40000
        gradients += torch.autograd.grad(loss, hidden)
    assert_close(*gradients, rtol=0, atol=16)


def test_meta_tensors() -> None:
    operands = torch.randn(6, 8, device="meta"), torch.randn(5, 8, device="meta")
    assert dv.LinearLogits(*operands).dtype == torch.float32
    with pytest.raises(ValueError, match="of the same device, got cpu and meta"):
        dv.entropy(dv.LinearLogits(torch.randn(6, 8), operands[1]))


@eager
def test_autocast_leaves_fp64_alone() -> None:
    hidden, weight, bias, index = draw(OP["logprobs"].linear(), dtype=torch.float64).values()
    logits = dv.LinearLogits(hidden, weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert logits.dtype == torch.float64
        value = dv.logprobs(logits, index)
    assert_close(value, dv.logprobs(F.linear(hidden, weight, bias), index))


@eager
def test_operators_ignore_autocast() -> None:
    """Backward may run under autocast, after a forward that did not."""
    inputs = draw(OP["logprobs"].linear())
    hidden, weight, bias, index = inputs.values()
    weight.requires_grad_()
    out = dv.logprobs(dv.LinearLogits(hidden, weight, bias), index).sum()
    (expected,) = torch.autograd.grad(out, weight, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        (actual,) = torch.autograd.grad(out, weight)
    assert actual.equal(expected)


# ------------------------------------------------------------------ edge rows


def edge(inputs: Inputs, row: str) -> Inputs:
    """Makes the logits special, by the bias for whole columns, by a hidden state for a row."""
    for name in [name for name in inputs if name.endswith(".bias")]:
        bias, hidden = inputs[name], inputs[name.replace("bias", "hidden")]
        if row == "some columns -inf":
            bias[::3] = -torch.inf
        elif row == "a whole block -inf":
            bias[16:32] = -torch.inf
        elif row == "a whole shard -inf":
            bias[25:] = -torch.inf
        elif row == "all -inf":
            bias[:] = -torch.inf
        elif row == "NaN":
            hidden[2] = torch.nan
        else:
            hidden *= 20  # Most probabilities are 0.
    return inputs


EDGES = [
    "some columns -inf",
    "a whole block -inf",
    "a whole shard -inf",
    "all -inf",
    "NaN",
    "large",
]


@eager
@pytest.mark.parametrize("layout", [None, tp(2)], ids=["plain", "tp=2"])
@pytest.mark.parametrize("row", EDGES)
@pytest.mark.parametrize("op", LINEAR_PATHS, ids=str)
def test_edge_rows(op: Op, row: str, layout: Layout | None, small_blocks: None) -> None:
    check(op, edge(draw(op, (6,), 50, torch.float64), row), layout)


@eager
def test_gradient_is_zero_where_the_upstream_gradient_is(small_blocks: None) -> None:
    op = OP["logprobs"].linear()
    inputs = edge(draw(op, (6,), 50), "NaN")
    grad = torch.ones(6)
    grad[2] = 0
    observed = check(op, inputs, grads=[grad], needs=("logits.hidden",))
    assert observed.gradients["logits.hidden"][2].eq(0).all()


# ------------------------------------------------------------------ layouts

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS = [
    Layout((2, 2), (V, S0)),
    Layout((2, 2), (R, S1)),
    Layout((2, 2, 2), (S0, V, S1)),
    Layout((2, 2), (V, R)),
]


@eager
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("op", LINEAR_PATHS, ids=str)
def test_meshes(op: Op, layout: Layout, small_blocks: None) -> None:
    check(op, draw(op, (5, 3), 41), layout)


@eager
@pytest.mark.parametrize("vocab, ranks", [(64, 2), (9, 8), (2, 4)])
@pytest.mark.parametrize("op", LINEAR, ids=str)
def test_even_uneven_and_empty_shards(op: Op, vocab: int, ranks: int, small_blocks: None) -> None:
    op = op.within(vocab)
    check(op, draw(op, (6,), vocab), tp(ranks))


@eager
@pytest.mark.parametrize("op", LINEAR_PATHS, ids=str)
def test_payload_is_that_of_logits(op: Op, small_blocks: None) -> None:
    """The number of blocks does not change what is sent."""
    sent = check(op, draw(op, (6,), 100), tp(2)).forward
    for collective, numbers in zip(sent, op.numbers, strict=False):
        assert {torch.Size(shape).numel() for shape in collective.payload.values()} == {6 * numbers}


@pytest.mark.ranks(2)
@eager
@pytest.mark.parametrize("op", LINEAR_PATHS, ids=str)
def test_two_ranks(op: Op) -> None:
    for vocab in (9, 2, 1):
        op = op.within(vocab)
        observed = check(op, draw(op, vocab=vocab), tp(2))
        mine = [(c.name, *c.payload.values()) for c in observed.forward + observed.backward]
        assert World.current.gather(mine) == [mine] * 2


@pytest.mark.ranks(2)
@eager
def test_bad_id_on_one_rank_raises_on_all() -> None:
    op = OP["logprobs"].linear()
    inputs = draw(op)
    with on_mesh((2,)) as mesh:
        placed = {name: place(name, x, mesh, tp(2), inputs) for name, x in inputs.items()}
        index = inputs["index"].clone()
        index[2] = 10 if World.current.rank == 1 else 0
        with pytest.raises(RuntimeError, match="logprobs: expected ids in the range 0 <= id < 10"):
            op(*list(placed.values())[:-1], index)
        assert op(*placed.values())[0].shape == (6,)


@pytest.mark.ranks(2)
@eager
def test_weights_that_do_not_fit_together_raise_on_all_ranks() -> None:
    """``from_local`` of uneven shards without ``shape=``: each rank infers a V of its own."""
    with on_mesh((2,)) as mesh:
        rows = 3 if World.current.rank == 0 else 2
        weight = DTensor.from_local(torch.randn(rows, 4), mesh, [S0], run_check=False)
        hidden = distribute(torch.randn(6, 4), mesh, [R])
        with pytest.raises(
            RuntimeError, match=r"entropy: expected each rank to hold the torch\.chunk"
        ):
            dv.entropy(dv.LinearLogits(hidden, weight))


@eager
@pytest.mark.parametrize("operand", ["weight", "bias"])
def test_operands_that_do_not_fit_raise_on_all_ranks(operand: str, small_blocks: None) -> None:
    """Each rank has several blocks, which would fit."""
    whole = {"weight": torch.randn(64, 8), "bias": torch.randn(64)}
    for shards, fit in (((47, 17), False), ((32, 32), True)):
        with on_mesh((2,)) as mesh:
            placed = {name: distribute(x, mesh, [S0]) for name, x in whole.items()}
            local = dict(enumerate(whole[operand].split(shards)))
            placed[operand] = from_parts(local, mesh, [S0], whole[operand].shape)
            logits = dv.LinearLogits(distribute(torch.randn(6, 8), mesh, [R]), **placed)
            text = "entropy: expected each rank to hold"
            with contextlib.nullcontext() if fit else pytest.raises(RuntimeError, match=text):
                dv.entropy(logits)


# ------------------------------------------------------------------ the object


def test_attributes_are_those_of_the_logits() -> None:
    hidden, weight = torch.randn(4, 6, 3, dtype=torch.float64), torch.randn(11, 3)
    with on_mesh((2, 2)) as mesh:
        logits = dv.LinearLogits(
            distribute(hidden, mesh, [S1, R]), distribute(weight.double(), mesh, [R, S0])
        )
        assert logits.device_mesh == mesh
        assert logits.placements == (S1, Shard(2))
    assert logits.shape == (4, 6, 11)
    assert logits.dim() == 3
    assert logits.dtype == torch.float64
    assert logits.device == torch.device("cpu")
    with pytest.raises(AttributeError, match="placements"):
        _ = dv.LinearLogits(hidden, weight).placements


def bad(name: str) -> tuple[type[Exception], str, Callable[[], object]]:
    hidden, weight, bias = torch.randn(6, 4), torch.randn(11, 4), torch.randn(11)
    index = torch.zeros(6, dtype=torch.int64)
    logprobs = dv.logprobs
    linear = dv.LinearLogits
    return {
        "weight of another width": (
            ValueError,
            r"logits.hidden of shape \[\*, H\] and logits.weight of shape \[V, H\], "
            r"got \[6, 4\] and \[11, 3\]",
            lambda: logprobs(linear(hidden, weight[:, :3]), index),
        ),
        "bias of another size": (
            ValueError,
            r"logits.bias of shape \[11\] for logits.weight of shape \[11, 4\], got \[10\]",
            lambda: logprobs(linear(hidden, weight, bias[:10]), index),
        ),
        "dtypes": (
            TypeError,
            "logits.hidden and logits.weight of the same dtype, got torch.bfloat16 and",
            lambda: logprobs(linear(hidden.bfloat16(), weight), index),
        ),
        "dtype of the bias": (
            TypeError,
            "logits.weight and logits.bias of the same dtype, got torch.float32 and torch.float64",
            lambda: logprobs(linear(hidden, weight, bias.double()), index),
        ),
        "integers": (
            TypeError,
            "logits.hidden of dtype float16, bfloat16, float32 or float64, got torch.int64",
            lambda: logprobs(linear(hidden.long(), weight.long()), index),
        ),
        "no tensor": (
            TypeError,
            "logits.weight to be a Tensor or DTensor, got Linear",
            lambda: logprobs(linear(hidden, nn.Linear(4, 11)), index),  # type: ignore[arg-type]
        ),
        "inplace_backward": (
            ValueError,
            "inplace_backward=False for LinearLogits",
            lambda: logprobs(linear(hidden, weight), index, inplace_backward=True),
        ),
        "another shape of the teacher": (
            ValueError,
            "student and teacher of the same shape",
            lambda: dv.kl_div(linear(hidden, weight), torch.randn(6, 10)),
        ),
        "no columns": (
            ValueError,
            r"logits of shape \[\*, V\] with V > 0",
            lambda: logprobs(linear(hidden, weight[:0]), index),
        ),
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        "weight of another width",
        "bias of another size",
        "dtypes",
        "dtype of the bias",
        "integers",
        "no tensor",
        "inplace_backward",
        "another shape of the teacher",
        "no columns",
    ],
)
def test_invalid_operands(name: str) -> None:
    kind, text, call = bad(name)
    with pytest.raises(kind, match=text):
        call()


P = Partial()
BAD_PLACEMENTS = {
    "hidden sharded like the vocabulary": ([S0], [S0], "redistribute logits.hidden to Replicate()"),
    "hidden sharded over H": ([S1], [R], "redistribute logits.hidden to Replicate() or Shard(d)"),
    "partial hidden": ([P], [R], "redistribute logits.hidden to Replicate() or Shard(d)"),
    "weight sharded over H": ([R], [S1], "redistribute logits.weight to Shard(0) or Replicate()"),
    "partial weight": ([R], [P], "redistribute logits.weight to Shard(0) or Replicate()"),
    "two mesh dims": ([R, R], [S0, S0], "redistribute logits.weight to Replicate() on one of two"),
}


@pytest.mark.parametrize("name", BAD_PLACEMENTS)
def test_refused_placements_name_the_cure(name: str) -> None:
    of_hidden, of_weight, cure = BAD_PLACEMENTS[name]
    with on_mesh((2,) * len(of_hidden)) as mesh:
        hidden = distribute(torch.randn(6, 4), mesh, of_hidden)
        weight = distribute(torch.randn(12, 4), mesh, of_weight)
        with pytest.raises(ValueError) as error:
            dv.entropy(dv.LinearLogits(hidden, weight))
    assert cure in str(error.value)
    assert str(tuple(of_hidden)) in str(error.value) and str(tuple(of_weight)) in str(error.value)


def test_operands_of_different_kinds() -> None:
    with on_mesh((2,)) as mesh:
        weight = distribute(torch.randn(12, 4), mesh, [S0])
        bias = distribute(torch.randn(12), mesh, [R])
        hidden = distribute(torch.randn(6, 4), mesh, [R])
        with pytest.raises(
            ValueError, match="of the same kind, got Tensor and DTensor; wrap a hid"
        ):
            dv.entropy(dv.LinearLogits(torch.randn(6, 4), weight))
        with pytest.raises(ValueError, match=r"logits\.bias placed like logits\.weight"):
            dv.entropy(dv.LinearLogits(hidden, weight, bias))


# ------------------------------------------------------------------ compiled steps

GRAPHS = {"logprobs": OP["logprobs"], "kl_div": OP["kl_div"], "js_div": OP["js_div(beta=0.3)"]}


def graphs_of(op: Op) -> str:
    """The graphs of a forward and backward on rank 0 of two, with the head in the graph."""
    graphs = Graphs()

    def loss(*inputs: Tensor) -> Tensor:
        return op(*inputs)[0].to_local().sum()

    inputs = draw(op, (7,), 37)
    sharded = [name for name in inputs if name.endswith((".weight", ".bias"))]
    with lone_rank(2) as mesh:
        placed = [
            place_part(x, mesh, [V] if name in LOGITS else [S0] if name in sharded else [R])
            for name, x in inputs.items()
        ]
        leaves = [x.requires_grad_() for x in placed if x.dtype.is_floating_point]
        torch.autograd.grad(compiled(loss, backend=graphs.backend)(*placed), leaves)
    return str(graphs)


@eager
def test_logprobs_runs_only_these_operators() -> None:
    assert_expected_inline(
        graphs_of(OP["logprobs"].linear()),
        """\
forward:
  softmax_stats_linear
  all_gather_into_tensor
  wait_tensor
  logprobs_merge
backward:
  logprobs_backward_linear""",
    )


@eager
def test_kl_div_beside_logits_runs_only_these_operators() -> None:
    assert_expected_inline(
        graphs_of(OP["kl_div"].linear("student")),
        """\
forward:
  kl_div_stats_linear
  all_gather_into_tensor
  wait_tensor
  kl_div_merge
backward:
  kl_div_backward_linear""",
    )


@eager
def test_js_div_runs_only_these_operators() -> None:
    assert_expected_inline(
        graphs_of(OP["js_div(beta=0.3)"].linear()),
        """\
forward:
  kl_div_stats_linear
  all_gather_into_tensor
  wait_tensor
  js_div_normalize
  js_div_stats_linear
  all_gather_into_tensor
  wait_tensor
  js_div_merge
backward:
  js_div_backward_linear""",
    )


@eager
@pytest.mark.parametrize("op", LINEAR_PATHS, ids=str)
def test_two_graphs_for_all_numbers_of_rows(op: Op) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    step = compiled(lambda *inputs: total(op, inputs), backend=counter)
    for rows in (2, 7, 8, 33):
        inputs = draw(op, (rows,), 11)
        leaves = [inputs[name].requires_grad_() for name in op.differentiable]
        actual, expected = (f(*inputs.values()) for f in (step, lambda *x: total(op, x)))
        assert_close(actual, expected)
        if leaves:
            for mine, other in zip(
                *(torch.autograd.grad(x, leaves) for x in (actual, expected)), strict=True
            ):
                assert_close(mine, other)
    assert counter.frame_count == 2


def total(op: Op, inputs: Any) -> Tensor:
    return sum(out.sum() for out in op(*inputs))


@eager
def test_inductor_step_with_the_object_across_the_border() -> None:
    """A compiled region may return the object, and another one take it."""
    hidden, weight, bias, index = draw(OP["logprobs"].linear()).values()
    weight.requires_grad_()
    head = compiled(lambda x: dv.LinearLogits(2 * x, weight, bias), backend="inductor")
    loss = compiled(lambda x: dv.logprobs(x, index).sum(), backend="inductor")
    logits = head(hidden)
    assert isinstance(logits, dv.LinearLogits)
    (actual,) = torch.autograd.grad(loss(logits), weight)
    expected = dv.logprobs(F.linear(2 * hidden, weight, bias), index).sum()
    assert_close(actual, *torch.autograd.grad(expected, weight))


@eager
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["kl_div", "js_div"])
def test_compiled_student_and_teacher_may_share_operands(name: str, backend: str) -> None:
    """A frozen or tied head serves both sides."""
    divergence = getattr(dv, name)
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(33, 8, requires_grad=True)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        student = dv.LinearLogits(hidden, weight)
        return divergence(student, dv.LinearLogits(hidden.detach() * 2, weight)).sum()

    actual, expected = compiled(loss, backend=backend)(hidden, weight), loss(hidden, weight)
    assert_close(actual, expected)
    leaves = hidden, weight
    for mine, other in zip(
        *(torch.autograd.grad(x, leaves) for x in (actual, expected)), strict=True
    ):
        assert_close(mine, other)


# ------------------------------------------------------------------ autograd


@eager
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_head(reentrant: bool) -> None:
    inputs = draw(OP["logprobs"].linear(), (6,), 50)
    hidden, weight, bias, index = inputs.values()
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]

    def loss(*operands: Tensor) -> Tensor:
        return dv.logprobs(dv.LinearLogits(*operands), index).sum()

    actual = checkpoint(loss, *leaves, use_reentrant=reentrant)
    actual.backward()
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert_close(leaf.grad, gradient)


@eager
@pytest.mark.parametrize("operand", OPERANDS)
def test_operand_edited_before_backward_raises(operand: str) -> None:
    inputs = draw(OP["logprobs"].linear())
    logits = dv.LinearLogits(*(inputs[f"logits.{x}"].requires_grad_() for x in OPERANDS))
    out = dv.logprobs(logits, inputs["index"])
    with torch.no_grad():
        getattr(logits, operand).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@eager
def test_second_backward_names_the_op() -> None:
    inputs = draw(OP["logprobs"].linear())
    weight = inputs["logits.weight"].requires_grad_()
    out = dv.logprobs(dv.LinearLogits(inputs["logits.hidden"], weight), inputs["index"])
    (gradient,) = torch.autograd.grad(out.sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="logprobs: expected to be differentiated once"):
        gradient.sum().backward()


@eager
def test_gradient_operator_needs_a_weight() -> None:
    """It would overwrite the caller's logits."""
    calls = Calls()
    inputs = draw(OP["logprobs"].linear())
    inputs["logits.weight"].requires_grad_()
    with calls:
        OP["logprobs"].linear()(*inputs.values())[0].sum().backward()
    (args,) = (args for name, args in calls.seen if name == "logprobs_backward_linear")
    grad, saved, hidden, _, _, *others = args
    with pytest.raises(ValueError, match=r"^logprobs_backward_linear: expected a weight, got None"):
        torch.ops.dtensor_vocab.logprobs_backward_linear(grad, saved, hidden, None, None, *others)


@eager
def test_teacher_made_under_inference_mode() -> None:
    op = OP["kl_div"].linear()
    inputs = draw(op)
    with torch.inference_mode():
        teacher = {name: x.clone() for name, x in inputs.items() if name.startswith("teacher")}
    check(op, {**inputs, **teacher}, needs=("student.hidden", "student.weight"))


@eager
def test_vmap_says_that_it_takes_logits() -> None:
    weight = torch.randn(11, 4)
    with pytest.raises(NotImplementedError, match="vmap takes logits, not LinearLogits"):
        torch.vmap(lambda hidden: dv.entropy(dv.LinearLogits(hidden, weight)))(torch.randn(3, 6, 4))


# ------------------------------------------------------------------ memory

KINDS = {"no gradient": (), "hidden": (0,), "weight": (1,), "both": (0, 1)}


def peaks_above_gradients() -> dict[str, int]:
    """For each of ``KINDS``, the peak at 2048 x 16032, whose logits would take 63 MiB."""
    return_freed_blocks()
    index, found = torch.randint(16032, (2048,)), {}
    operands = torch.randn(2048, 512).bfloat16(), torch.randn(16032, 512).bfloat16()
    for kind, needed in KINDS.items():
        leaves = [operands[i].requires_grad_() for i in needed]

        def call(leaves: list[Tensor] = leaves) -> None:
            out = dv.logprobs(dv.LinearLogits(*operands), index)
            if leaves:
                torch.autograd.grad(out.sum(), leaves)

        call()
        peaks = [peak_above_inputs(call, torch.device("cpu")) for _ in range(2)]
        found[kind] = min(peaks) - sum(x.nbytes for x in leaves)
        for leaf in leaves:
            leaf.requires_grad_(False)
    return found


def test_memory_is_a_block_and_an_accumulator() -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        found = process.submit(peaks_above_gradients).result()
    accumulator = 2048 * 512 * 4
    for kind, needed in KINDS.items():
        most = linear_blocks.BLOCK_BYTES + (accumulator if 0 in needed else 0) + (3 << 20)
        assert found[kind] <= most <= 28 << 20, found
