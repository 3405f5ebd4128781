"""Whole steps under ``torch.compile``: one graph, the results of eager code, few recompilations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import dtensor_vocab as dv
from tests.ops import AT_IDS, LOGITS, OP, OPS, PAIRS, Op, draw, named
from tests.ranks import distribute, on_mesh
from tests.step import ONE_EACH, Batch, compiled, draw_batch, loss_of, run_step

BACKENDS = ["eager", "aot_eager", "inductor"]
INDUCTOR = [
    OP["logprobs(K=3)"],
    OP["kl_div"],
    OP["cross_entropy(reduction=mean,z_loss=0.1)"],
    OP["topk_logprobs(k=3)"],
]


@pytest.mark.parametrize("op", OPS, ids=str)
def test_compiled_step_equals_eager(op: Op, eager_kernels: None) -> None:
    check_step(op, "aot_eager", None)


@pytest.mark.parametrize("op", INDUCTOR, ids=str)
def test_inductor_step_equals_eager(op: Op, eager_kernels: None) -> None:
    check_step(op, "inductor", None)


@pytest.mark.parametrize("op", [OP["kl_div"]], ids=str)
def test_inductor_step_with_compiled_kernels_equals_eager(op: Op) -> None:
    check_step(op, "inductor", None)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", INDUCTOR, ids=str)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_compiled_step_on_ranks_equals_eager(op: Op, backend: str, eager_kernels: None) -> None:
    with on_mesh((2,)) as mesh:
        check_step(op, backend, mesh)


def check_step(op: Op, backend: str, mesh: DeviceMesh | None) -> None:
    batch, loss = draw_batch(op, mesh=mesh), loss_of(op)
    assert_same(run_step(compiled(loss, backend=backend), batch), run_step(loss, batch))


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        assert type(got) is type(wanted)
        if isinstance(wanted, DTensor):
            assert got.placements == wanted.placements
            got, wanted = got.to_local(), wanted.to_local()
        torch.testing.assert_close(got, wanted)


# ------------------------------------------------------------------ graphs for numbers of rows

ROWS = [2, 7, 8, 33, 64]
MORE_ROWS = [3, 16, 129]


@pytest.mark.parametrize("op", ONE_EACH, ids=str)
def test_two_graphs_for_all_numbers_of_rows(op: Op, eager_kernels: None) -> None:
    assert count_graphs(op, [draw_batch(op, (n,), seed=n) for n in ROWS + MORE_ROWS]) == 2


@pytest.mark.parametrize("op", ONE_EACH, ids=str)
def test_one_graph_for_rows_marked_dynamic(op: Op, eager_kernels: None) -> None:
    batches = [draw_batch(op, (n,), seed=n) for n in ROWS]
    for batch in batches:
        for tensor in (batch.hidden, *batch.others, batch.mask):
            torch._dynamo.mark_dynamic(tensor, 0)
    assert count_graphs(op, batches) == 1


ON_RANKS = [OP["js_div(beta=0.3)"], OP["cross_entropy(reduction=none)"], OP["topk_logprobs(k=3)"]]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ON_RANKS, ids=str)
def test_two_graphs_for_all_numbers_of_rows_on_ranks(op: Op, eager_kernels: None) -> None:
    with on_mesh((2,)) as mesh:
        batches = [draw_batch(op, (n,), mesh=mesh, seed=n) for n in ROWS + MORE_ROWS]
        assert count_graphs(op, batches) == 2


@pytest.mark.ranks(4)
def test_graphs_where_ranks_share_an_odd_number_of_rows(eager_kernels: None) -> None:
    op = OP["logprobs"]
    with on_mesh((2, 2)) as mesh:
        batches = [
            draw_batch(op, (n,), mesh=mesh, row_placements=[Shard(0)], seed=n)
            for n in (3, 7, 9, 33, 5, 129)
        ]
        assert count_graphs(op, batches) <= 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", [OP["logprobs(K=3)"], *named("kl_div")], ids=str)
def test_two_graphs_where_logits_come_from_outside(op: Op, eager_kernels: None) -> None:
    """DTensor logits and plain ids are inputs of the compiled region."""

    def loss(*inputs: Tensor) -> Tensor:
        return op(*inputs)[0].sum()

    counter = CompileCounterWithBackend("aot_eager")
    compiled_loss = compiled(loss, backend=counter)
    with on_mesh((2,)) as mesh:
        for n in ROWS + MORE_ROWS:
            logits, others = [], []
            for name, x in draw(op, (n,)).items():
                if name in LOGITS:
                    logits.append(distribute(x, mesh, [Shard(-1)]).requires_grad_())
                else:
                    others.append(x)
            actual, expected = (f(*logits, *others) for f in (compiled_loss, loss))
            assert_same(*(torch.autograd.grad(x, logits) for x in (actual, expected)))
    assert counter.frame_count == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("unused", ["left out", "detached"])
@pytest.mark.parametrize("used", [0, 1])
def test_gradient_where_one_of_two_results_is_used(
    used: int, unused: str, eager_kernels: None
) -> None:
    op = OP["logprobs_and_entropy"]
    inputs = draw(op)

    def loss(logits: Tensor, index: Tensor) -> Tensor:
        results = op(logits, index)
        other = results[1 - used].detach().sum() if unused == "detached" else 0
        return results[used].sum() + other

    compiled_loss = compiled(loss, backend="aot_eager")
    with on_mesh((2,)) as mesh:
        logits = distribute(inputs["logits"], mesh, [Shard(-1)]).requires_grad_()
        actual, expected = (f(logits, inputs["index"]) for f in (compiled_loss, loss))
        assert_same([actual], [expected])
        assert_same(*(torch.autograd.grad(x, [logits]) for x in (actual, expected)))


def count_graphs(op: Op, batches: Sequence[Batch]) -> int:
    """Checks a compiled step on all batches, and returns the number of graphs it took."""
    counter, loss = CompileCounterWithBackend("aot_eager"), loss_of(op)
    step = compiled(loss, backend=counter)
    for batch in batches:
        assert_same(run_step(step, batch), run_step(loss, batch))
    return counter.frame_count


# ------------------------------------------------------------------ graphs for kinds of inputs


@pytest.mark.parametrize("op", AT_IDS, ids=str)
def test_a_graph_for_each_dtype_of_ids(op: Op, eager_kernels: None) -> None:
    """The values of the ids, and how many are ignored, make no further graph."""
    batch = draw_batch(op)
    (ids,) = batch.others
    ignored = [ids.masked_fill(torch.rand(ids.shape) < share, -100) for share in (0, 0.5, 1)]
    kinds = [x.to(dtype) for x in ignored for dtype in (torch.int64, torch.int32)]
    assert count_graphs(op, [batch._replace(others=(x,)) for x in 2 * kinds]) == 2


@pytest.mark.parametrize("op", named("logprobs", "entropy"), ids=str)
def test_a_graph_for_each_dtype_of_masks(op: Op, eager_kernels: None) -> None:
    batch = draw_batch(op)
    masks = [batch.mask.to(dtype) for dtype in (torch.bool, torch.float32)]
    batches = [batch._replace(mask=mask) for mask in (*masks, ~masks[0], 1 - masks[1])]
    assert count_graphs(op, batches + batches) == 2


@pytest.mark.parametrize("op", PAIRS, ids=str)
def test_a_graph_for_each_choice_of_gradients(op: Op, eager_kernels: None) -> None:
    """The student, the teacher, both or neither need a gradient."""
    counter = CompileCounterWithBackend("aot_eager")

    def loss(student: Tensor, teacher: Tensor) -> Tensor:
        return op(student, teacher)[0].sum()

    compiled_loss = compiled(loss, backend=counter)
    for needs in 2 * [(True, True), (True, False), (False, True), (False, False)]:
        inputs = [x.requires_grad_(need) for x, need in zip(draw(op).values(), needs, strict=True)]
        actual, expected = compiled_loss(*inputs), loss(*inputs)
        assert_same([actual], [expected])
        leaves = [x for x in inputs if x.requires_grad]
        if leaves:
            assert_same(*(torch.autograd.grad(x, leaves) for x in (actual, expected)))
    assert counter.frame_count == 4


OPTIONS = {
    "temperature": (dv.logprobs, "index", [0.5, 0.75, 1.0, 1.25]),
    "z_loss": (dv.cross_entropy, "index", [0.0, 0.1, 0.2]),
    "label_smoothing": (dv.cross_entropy, "index", [0.0, 0.1, 0.2]),
    "beta": (dv.js_div, "teacher", [0.0, 0.1, 0.5, 1.0]),
    "vocab_size": (dv.logprobs, "index", [11, 10, 9, 8]),
    "ignore_index": (dv.logprobs, "index", [-100, -1, None, 2]),
    "k": (lambda x, k: dv.topk_logprobs(x, k)[0], None, [1, 2, 3, 4]),
}


KINDS = [*((option, None) for option in OPTIONS), *((o, True) for o in ("beta", "vocab_size", "k"))]


@pytest.mark.parametrize("option, dynamic", KINDS)
def test_options_that_change(option: str, dynamic: bool | None, eager_kernels: None) -> None:
    """Dynamo may make variables of numbers that a compiled function gets as arguments."""
    function, second, values = OPTIONS[option]
    logits = torch.randn(6, 11, requires_grad=True)
    others = {"index": [torch.randint(8, (6,))], "teacher": [torch.randn(6, 11)], None: []}[second]

    def loss(value: float) -> Tensor:
        return function(logits, *others, **{option: value}).sum()

    compiled_loss = compiled(loss, backend="aot_eager", dynamic=dynamic)
    for value in values:
        actual, expected = compiled_loss(value), loss(value)
        assert_same([actual], [expected])
        assert_same(*(torch.autograd.grad(x, [logits]) for x in (actual, expected)))


def test_a_graph_for_all_temperatures_in_tensors(eager_kernels: None) -> None:
    logits, index = torch.randn(6, 11), torch.randint(11, (6,))
    counter = CompileCounterWithBackend("aot_eager")
    logprobs = compiled(
        lambda temperature: dv.logprobs(logits, index, temperature=temperature), backend=counter
    )
    for temperature in torch.rand(5, 6) + 0.5:
        expected = dv.logprobs(logits, index, temperature=temperature)
        assert_same([logprobs(temperature)], [expected])
    assert counter.frame_count == 1


# ------------------------------------------------------------------ ids out of range

CHECKED = [OP["logprobs(K=3)"], OP["cross_entropy(reduction=none)"]]
BAD_IDS = {"V": 11, "-1": -1, "2**31": 2**31}


@pytest.mark.parametrize("training", [False, True], ids=["forward only", "training"])
@pytest.mark.parametrize("op", CHECKED, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_id_out_of_range_raises_in_compiled_code(
    op: Op, backend: str, training: bool, eager_kernels: None
) -> None:
    check_range(op, backend, training, draw_batch(op), True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("training", [False, True], ids=["forward only", "training"])
@pytest.mark.parametrize("op", CHECKED, ids=str)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_id_out_of_range_on_one_rank_raises_in_compiled_code(
    op: Op, backend: str, training: bool, eager_kernels: None
) -> None:
    with on_mesh((2,)) as mesh:
        batch = draw_batch(op, mesh=mesh)
        others = tuple(x.to_local() for x in batch.others)
        check_range(op, backend, training, batch._replace(others=others), mesh.get_rank() == 1)


def check_range(op: Op, backend: str, training: bool, batch: Batch, here: bool) -> None:
    """Checks that a bad id raises on every rank, even if only one rank has it (``here``)."""
    loss = loss_of(op)
    step = compiled(loss, backend=backend)
    *others, ids = batch.others
    with torch.set_grad_enabled(training):
        expected = run_step(loss, batch)
        for bad in BAD_IDS.values():
            wrong = ids.clone()
            if here:
                wrong.view(-1)[-1] = bad
            with pytest.raises(
                RuntimeError, match=f"{op.name}: expected ids in the range 0 <= id < 11"
            ):
                run_step(step, batch._replace(others=(*others, wrong)))
            assert_same(run_step(step, batch), expected)
