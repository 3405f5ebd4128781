"""The ops under recomputation, autocast, inference mode, tracing and function transforms."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import dtensor_vocab as dv
from tests.graphs import Graphs, ours
from tests.ops import GRADIENT_PATHS, LOGITS, OP, PATHS, Inputs, Op, draw, place, tp
from tests.oracle import assert_bytes_equal
from tests.rank_zero import lone_rank, place_part
from tests.ranks import Collectives, on_mesh, parts
from tests.step import ONE_EACH, Batch, compiled, draw_batch, loss_of, run_step

DIFFERENTIABLE = [op for op in ONE_EACH if not op.constant]
FEW = [op for op in GRADIENT_PATHS if op.name not in ("js_div", "topk_logprobs")]


def assert_identical(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Checks that tensors are equal to the bit on every rank of this process."""
    for got, wanted in zip(actual, expected, strict=True):
        for rank, local in parts(got).items():
            assert_bytes_equal(local.detach(), parts(wanted)[rank].detach())


# ------------------------------------------------------------------ activation checkpointing


def save_the_package(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if getattr(operator, "namespace", None) == "dtensor_vocab":
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS = {
    "full": {},
    "selective": {
        "context_fn": functools.partial(create_selective_checkpoint_contexts, save_the_package)
    },
}


def checkpointed(loss: Callable[..., Tensor], how: str) -> Callable[..., Tensor]:
    def recomputed(*batch: Any) -> Tensor:
        return checkpoint(loss, *batch, use_reentrant=False, **CONTEXTS[how])

    return recomputed


@pytest.mark.parametrize("how", CONTEXTS)
@pytest.mark.parametrize("op", GRADIENT_PATHS, ids=str)
def test_checkpoint_changes_no_bit(op: Op, how: str, eager_kernels: None) -> None:
    batch, loss = draw_batch(op), loss_of(op)
    expected = run_step(loss, batch)
    assert_identical(run_step(checkpointed(loss, how), batch), expected)
    actual = run_step(compiled(checkpointed(loss, how), backend="aot_eager"), batch)
    assert_identical(actual, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", CONTEXTS)
@pytest.mark.parametrize("op", [OP["logprobs(K=3)"], OP["js_div(beta=0.3)"]], ids=str)
def test_checkpoint_on_ranks_changes_no_bit(op: Op, how: str, eager_kernels: None) -> None:
    """A step communicates once where the op is saved, and twice where it is recomputed."""
    forward = len(op.numbers)
    with on_mesh((2,)) as mesh:
        batch, loss = draw_batch(op, mesh=mesh), loss_of(op)
        expected = run_step(loss, batch)
        with Collectives() as collectives:
            assert_identical(run_step(checkpointed(loss, how), batch), expected)
        assert len(collectives.seen) == (forward if how == "selective" else 2 * forward)

        graphs = Graphs()
        step = compiled(checkpointed(loss, how), backend=graphs.backend)
        assert_identical(run_step(step, batch), expected)
    gathers = [ours(graph).count("all_gather_into_tensor") for graph in graphs.both]
    saves = how == "selective" or torch.__version__ < "2.12"  # which saves all collectives
    assert gathers == [forward, 0 if saves else forward]


# ------------------------------------------------------------------ autocast

NOWHERE = contextlib.nullcontext
AUTOCAST = functools.partial(torch.autocast, "cpu", torch.bfloat16)
POSITIONS = {
    "forward": (AUTOCAST, NOWHERE),
    "backward": (NOWHERE, AUTOCAST),
    "both": (AUTOCAST, AUTOCAST),
}


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("op", ONE_EACH, ids=str)
def test_autocast_changes_no_bit(op: Op, position: str, eager_kernels: None) -> None:
    inputs = draw(op)
    round_forward, round_backward = POSITIONS[position]
    expected = call(op, inputs)
    assert_identical(call(op, inputs, round_forward, round_backward), expected)


@pytest.mark.parametrize("op", FEW, ids=str)
def test_autocast_in_compiled_code_changes_no_bit(op: Op, eager_kernels: None) -> None:
    def under_autocast(*inputs: Tensor) -> tuple[Tensor, ...]:
        with AUTOCAST():
            return op(*inputs)

    inputs = draw(op, dtype=torch.bfloat16)
    expected = call(op, inputs)
    inside = compiled(under_autocast, backend="aot_eager")
    assert_identical(call(inside, inputs), expected)
    outside = compiled(lambda *inputs: op(*inputs), backend="aot_eager")
    assert_identical(call(outside, inputs, AUTOCAST), expected)


@pytest.mark.parametrize("op", [OP["kl_div"]], ids=str)
def test_autocast_changes_no_compiled_kernel(op: Op) -> None:
    inputs = draw(op, dtype=torch.bfloat16)
    assert_identical(call(op, inputs, AUTOCAST, AUTOCAST), call(op, inputs))


def call(
    function: Callable[..., Any],
    inputs: Inputs,
    round_forward: Callable[[], Any] = NOWHERE,
    round_backward: Callable[[], Any] = NOWHERE,
) -> list[Tensor]:
    """Returns the results and any gradients of the logits."""
    logits = [x.detach().requires_grad_() if name in LOGITS else x for name, x in inputs.items()]
    with round_forward():
        outputs = function(*logits)
    wanted = [out for out in outputs if out.requires_grad]
    if not wanted:
        return list(outputs)
    leaves = [x for x in logits if x.requires_grad]
    with round_backward():
        gradients = torch.autograd.grad(wanted, leaves, [torch.ones_like(out) for out in wanted])
    return [*(out.detach() for out in outputs), *gradients]


# ------------------------------------------------------------------ inference and training


@pytest.mark.parametrize("op", PATHS, ids=str)
def test_inference_then_training(op: Op, eager_kernels: None) -> None:
    batch = draw_batch(op)
    check_inference_then_training(loss_of(op), batch)
    check_inference_then_training(compiled(loss_of(op), backend="aot_eager"), batch)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", FEW, ids=str)
def test_inference_then_training_on_ranks(op: Op, eager_kernels: None) -> None:
    """The whole step is compiled. Uncompiled it is the op alone, since DTensor has no views in
    inference mode.
    """
    with on_mesh((2,)) as mesh:
        batch = draw_batch(op, mesh=mesh)
        check_inference_then_training(compiled(loss_of(op), backend="aot_eager"), batch)

        hidden, heads, others, _ = batch
        inputs = [*(hidden.detach() @ head.detach().t() for head in heads), *others]
        with torch.inference_mode():
            values = list(op(*inputs))
        for x in inputs[: len(heads)]:
            x.requires_grad_()
        assert_identical(list(op(*inputs)), values)


def check_inference_then_training(step: Callable[..., Tensor], batch: Batch) -> None:
    """One callable gives values of the same bits in all modes, in whatever order they come."""
    with torch.inference_mode():
        value = step(*batch)
    training = run_step(step, batch)
    assert_identical(training[:1], [value])
    with torch.no_grad():
        assert_identical([step(*batch)], [value])
    with torch.inference_mode():
        assert_identical([step(*batch)], [value])
    assert_identical(run_step(step, batch), training)


CONSTANTS = [
    (op, name)
    for op in DIFFERENTIABLE
    for name in (*op.arguments, "temperature")
    if name != "logits"
]


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "DTensor"])
@pytest.mark.parametrize("op, constant", CONSTANTS, ids=str)
def test_inference_mode_inputs_allow_gradients_of_the_others(
    op: Op, constant: str, distributed: bool, eager_kernels: None
) -> None:
    """Inputs made under inference mode serve a call that is differentiated in the other inputs."""
    inputs = {**draw(op), "temperature": torch.full((6,), 0.5)}

    def call(where: contextlib.AbstractContextManager[Any], mesh: Any) -> list[Tensor]:
        placed = {}
        for name, x in inputs.items():
            with where if name == constant else NOWHERE():
                placed[name] = x.clone()
                if mesh is not None:
                    placement = Shard(-1) if name in LOGITS else Replicate()
                    placed[name] = place_part(placed[name], mesh, [placement])
        leaves = [placed[n].requires_grad_() for n in op.differentiable if n != constant]
        *arguments, temperature = placed.values()
        value = op(*arguments, temperature=temperature)[0]
        return [value.detach(), *(torch.autograd.grad(value.sum(), leaves) if leaves else ())]

    with lone_rank(1) if distributed else NOWHERE() as mesh:
        actual = call(torch.inference_mode(), mesh)
        assert not actual[0].is_inference()
        assert_identical(actual, call(NOWHERE(), mesh))


def test_teacher_of_inference_mode_on_simulated_ranks(eager_kernels: None) -> None:
    """The teacher's local tensors are of a subclass, whose storage is not their memory."""
    inputs = draw(OP["kl_div"])
    with on_mesh((2,)) as mesh:
        student = place("student", inputs["student"], mesh, tp(2), inputs)
        with torch.inference_mode():
            teacher = place("teacher", inputs["teacher"], mesh, tp(2), inputs)
        value = dv.kl_div(student.requires_grad_(), teacher)
        value.sum().backward()
    expected = dv.kl_div(*inputs.values())
    for local in parts(value).values():
        torch.testing.assert_close(local.detach(), expected)


def test_teacher_of_inference_mode_is_not_copied(eager_kernels: None) -> None:
    """The operators read the teacher's own memory."""
    seen = []
    student = torch.randn(6, 10)
    with torch.inference_mode():
        teacher = torch.randn(6, 10)

    class Teachers(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func.name() == "dtensor_vocab::kl_div_stats":
                seen.append(args[0].data_ptr())
            return func(*args, **(kwargs or {}))

    with Teachers():
        dv.kl_div(student.requires_grad_(), teacher)
    assert seen == [teacher.data_ptr()]


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["uncompiled", "compiled"])
@pytest.mark.parametrize("op", FEW, ids=str)
def test_gradients_accumulate(op: Op, backend: str | None, eager_kernels: None) -> None:
    loss = loss_of(op)
    step = loss if backend is None else compiled(loss, backend=backend)
    first, second = draw_batch(op, seed=1), draw_batch(op, seed=2)
    second = second._replace(hidden=first.hidden, heads=first.heads)
    step(*first).backward()
    step(*second).backward()
    singly = zip(run_step(loss, first)[1:], run_step(loss, second)[1:], strict=True)
    assert_identical([x.grad for x in first.leaves], [one + other for one, other in singly])


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["uncompiled", "compiled"])
@pytest.mark.parametrize("op", FEW, ids=str)
def test_backward_of_a_retained_graph_gives_the_same_bits_again(
    op: Op, backend: str | None, eager_kernels: None
) -> None:
    batch, loss = draw_batch(op), loss_of(op)
    step = loss if backend is None else compiled(loss, backend=backend)
    value = step(*batch)
    once, again = (torch.autograd.grad(value, batch.leaves, retain_graph=True) for _ in range(2))
    assert_identical(again, once)


# ------------------------------------------------------------------ tracing


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("op", FEW, ids=str)
def test_make_fx_graph_runs_on_other_values(op: Op, mode: str, eager_kernels: None) -> None:
    """A traced forward and backward runs on other values."""
    loss = loss_of(op)

    def step(hidden: Tensor, heads: Any, others: Any, mask: Tensor) -> list[Tensor]:
        hidden = hidden.detach().requires_grad_()
        heads = [head.detach().requires_grad_() for head in heads]
        return run_step(loss, Batch(hidden, tuple(heads), others, mask))

    traced = make_fx(step, tracing_mode=mode)(*draw_batch(op))
    rows = (9,) if mode == "symbolic" else (6,)
    batch = draw_batch(op, rows, seed=1)
    assert_identical(traced(*batch), step(*batch))


@pytest.mark.parametrize("op", ONE_EACH, ids=str)
def test_exported_program_runs_on_other_numbers_of_rows(op: Op, eager_kernels: None) -> None:
    class Model(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            return op(*inputs)

    inputs = tuple(draw(op).values())
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Model(), inputs, dynamic_shapes=[(({0: rows},) * len(inputs))])
    for n in (6, 9):
        inputs = tuple(draw(op, (n,), seed=n).values())
        assert_identical(program.module()(*inputs), op(*inputs))


# ------------------------------------------------------------------ transforms


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=str)
def test_func_grad_equals_autograd(op: Op, eager_kernels: None) -> None:
    loss, (hidden, *rest) = loss_of(op), draw_batch(op)
    gradient = torch.func.grad(lambda x: loss(x, *rest))(hidden)
    assert_identical([gradient], torch.autograd.grad(loss(hidden, *rest), [hidden]))


@pytest.mark.parametrize("op", FEW, ids=str)
def test_jacrev_equals_autograd(op: Op, eager_kernels: None) -> None:
    logits, *others = draw(op, (3,)).values()

    def values(x: Tensor) -> Tensor:
        return op(x, *others)[0]

    jacobian = torch.func.jacrev(values)(logits)
    expected = torch.autograd.functional.jacobian(values, logits)
    torch.testing.assert_close(jacobian, expected)


@pytest.mark.parametrize("in_dim", [0, 1])
@pytest.mark.parametrize("op", ONE_EACH, ids=str)
def test_vmap_equals_a_loop_over_examples(op: Op, in_dim: int, eager_kernels: None) -> None:
    """The batch dim is on all inputs, only the logits or only the others; examples have 5 rows."""
    inputs = draw(op, (4, 5)).values()
    batched = [x.transpose(0, in_dim) for x in inputs]
    one = [x[0] for x in inputs]
    n = len(op.logits)
    for arguments, dims in [
        (batched, [in_dim] * len(one)),
        ([*batched[:n], *one[n:]], [in_dim] * n + [None] * (len(one) - n)),
        ([*one[:n], *batched[n:]], [None] * n + [in_dim] * (len(one) - n)),
    ]:
        if all(dim is None for dim in dims):
            continue
        actual = torch.vmap(lambda *inputs: op(*inputs), in_dims=tuple(dims))(*arguments)
        singly = [
            op(
                *(
                    x if dim is None else x.select(dim, i)
                    for x, dim in zip(arguments, dims, strict=True)
                )
            )
            for i in range(4)
        ]
        for got, wanted in zip(actual, zip(*singly, strict=True), strict=True):
            torch.testing.assert_close(got, torch.stack(wanted))


@pytest.mark.parametrize(
    "one_for_all", [False, True], ids=["temperature by row", "0-d temperature"]
)
@pytest.mark.parametrize("rows", [(), (5,)], ids=["one row", "5 rows"])
@pytest.mark.parametrize("op", [OP["logprobs"], OP["kl_div"]], ids=str)
def test_vmap_over_any_inputs(
    op: Op, rows: tuple[int, ...], one_for_all: bool, eager_kernels: None
) -> None:
    """Inputs may have no batch dim, or have it first or last, for values and for gradients."""
    inputs = {
        **draw(op, (3, *rows)),
        "temperature": torch.rand(3, *(() if one_for_all else rows)) + 1,
    }

    def values(*inputs: Tensor) -> Tensor:
        *arguments, temperature = inputs
        return op(*arguments, temperature=temperature)[0]

    def total(*inputs: Tensor) -> Tensor:
        return values(*inputs).sum()

    for dims in itertools.product((None, 0, -1), repeat=len(inputs)):
        if all(dim is None for dim in dims):
            continue
        batched = [
            x[0] if dim is None else x.movedim(0, dim)
            for x, dim in zip(inputs.values(), dims, strict=True)
        ]
        examples = [
            [x if dim is None else x.select(dim, i) for x, dim in zip(batched, dims, strict=True)]
            for i in range(3)
        ]
        for function in (values, torch.func.grad(total)):
            actual = torch.vmap(function, in_dims=dims)(*batched)
            expected = torch.stack([function(*example) for example in examples])
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=str)
def test_grad_for_each_example(op: Op, eager_kernels: None) -> None:
    inputs = draw(op, (3, 6)).values()

    def loss(*inputs: Tensor) -> Tensor:
        return op(*inputs)[0].sum()

    gradients = torch.vmap(torch.func.grad(loss))(*inputs)
    expected = [torch.func.grad(loss)(*example) for example in zip(*inputs, strict=True)]
    torch.testing.assert_close(gradients, torch.stack(expected))


@pytest.mark.parametrize("op", FEW, ids=str)
def test_vmap_over_dtensors_is_refused(op: Op, eager_kernels: None) -> None:
    inputs = draw(op, (4, 5))
    with on_mesh((2,)) as mesh:
        placed = [place(name, x, mesh, tp(2), inputs) for name, x in inputs.items()]
        with pytest.raises(NotImplementedError, match="vmap takes plain tensors"):
            torch.vmap(lambda *inputs: op(*inputs))(*placed)


def test_vmap_checks_ids(eager_kernels: None) -> None:
    logits, index = torch.randn(3, 4, 5), torch.randint(5, (3, 4))
    index[2, 1] = 5
    with pytest.raises(RuntimeError, match="logprobs: expected ids in the range 0 <= id < 5"):
        torch.vmap(dv.logprobs)(logits, index)


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=str)
def test_second_derivatives_are_refused(op: Op, eager_kernels: None) -> None:
    logits, *others = draw(op).values()

    def slope(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: op(x, *others)[0].sum())(x).square().sum()

    with pytest.raises(RuntimeError, match=f"{op.name}: expected to be differentiated once"):
        torch.func.grad(slope)(logits)


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=str)
def test_forward_mode_is_refused(op: Op, eager_kernels: None) -> None:
    logits, *others = draw(op).values()
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda x: op(x, *others)[0], (logits,), (logits,))


# ------------------------------------------------------------------ saved tensors


def unpacks_once(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Saved tensors may be read once in a backward pass, as with some offloading hooks."""

    def wrapped(*inputs: Tensor) -> Tensor:
        unpacked: set[int] = set()
        kept: list[Tensor] = []

        def pack(x: Tensor) -> int:
            kept.append(x)
            return len(kept) - 1

        def unpack(i: int) -> Tensor:
            assert i not in unpacked
            unpacked.add(i)
            return kept[i]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return call(*inputs)

    return wrapped


WRAPPERS = {
    "checkpoint": lambda call: functools.partial(checkpoint, call, use_reentrant=False),
    "hooks": unpacks_once,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=str)
def test_gradients_with_create_graph_cannot_be_differentiated(
    op: Op, wrapper: str, eager_kernels: None
) -> None:
    """The gradients are right, and a backward through them raises."""
    inputs = draw(op)
    leaves = [inputs[name].requires_grad_() for name in op.differentiable]

    def loss(*inputs: Tensor) -> Tensor:
        return op(*inputs)[0].square().sum()

    expected = torch.autograd.grad(loss(*inputs.values()), leaves)
    value = WRAPPERS[wrapper](loss)(*inputs.values())
    gradients = torch.autograd.grad(value, leaves, create_graph=True)
    assert_identical([g.detach() for g in gradients], list(expected))
    with pytest.raises(RuntimeError, match=f"{op.name}: expected to be differentiated once"):
        sum(g.square().sum() for g in gradients).backward()


# ------------------------------------------------------------------ tracing with compiled kernels

WARM = [OP["logprobs"], OP["kl_div"]]


@pytest.mark.parametrize("op", WARM, ids=str)
def test_warm_kernels_are_traced(op: Op) -> None:
    """make_fx traces on real tensors, where Dynamo refuses to run its code."""
    loss, batch = loss_of(op), draw_batch(op)
    expected = run_step(loss, batch)
    traced = make_fx(lambda *batch: run_step(loss, Batch(*batch)))(*batch)
    assert_identical(traced(*batch), expected)


@pytest.mark.parametrize("op", WARM, ids=str)
def test_linearize_in_token_weights_works_with_warm_kernels(op: Op) -> None:
    """Linearizing in the logits would need forward-mode derivatives, which the ops lack."""
    inputs = draw(op).values()
    values = op(*inputs)[0]
    weights = torch.rand_like(values)
    loss, slope = torch.func.linearize(lambda w: (op(*inputs)[0] * w).sum(), weights)
    torch.testing.assert_close(loss, (values * weights).sum())
    torch.testing.assert_close(slope(torch.ones_like(weights)), values.sum())
