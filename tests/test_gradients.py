"""Gradients for any loss, strides and choice of inputs, and the error of a second backward."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

import dtensor_vocab as dv
from dtensor_vocab.autograd import empty_grad
from tests.ops import (
    GRADIENT_PATHS,
    OP,
    OPS,
    PAIRS,
    PATHS,
    Inputs,
    Layout,
    Op,
    assert_placement,
    check,
    draw,
    expect,
    named,
    place,
)
from tests.oracle import assert_bytes_equal, assert_gradient, assert_parts, assert_values
from tests.ranks import distribute, on_mesh, part, parts

eager = pytest.mark.usefixtures("eager_kernels")

DP_TP = Layout((2, 2), (Shard(0), Shard(-1)))
DP_CP_TP = Layout((2, 2, 2), (Shard(0), Shard(1), Shard(2)))
PLAIN_OR_MESH = pytest.mark.parametrize("layout", [None, DP_TP], ids=str)
DIFFERENTIABLE = [op for op in OPS if not op.constant]
PATHS_BY_ROW = [op for op in GRADIENT_PATHS if not op.reduces_rows]
OF_TWO = [op for op in OPS if len(op.differentiable) == 2]


# ------------------------------------------------------------------ losses on DTensors


Loss = Callable[[Tensor, Tensor], Tensor]

LOSSES: dict[str, Loss] = {
    "sum": lambda out, weight: out.sum(),
    "mean": lambda out, weight: out.mean(),
    "weighted sum": lambda out, weight: (out * weight).sum(),
    "one row": lambda out, weight: out[0].sum(),
    "a slice": lambda out, weight: (out[1:] * 3).sum(),
    "squares": lambda out, weight: (out * out).mean(),
}
LOCAL_LOSSES: dict[str, Loss] = {
    "full_tensor": lambda out, weight: (out.full_tensor() * weight.full_tensor()).sum(),
    "to_local": lambda out, weight: (out.to_local() * weight.to_local()).sum(),
    "redistributed": lambda out, weight: (
        (out.redistribute(placements=weight.placements) * weight).sum().to_local()
    ),
    "loss.full_tensor": lambda out, weight: (out * weight).sum().full_tensor(),
}


@eager
@pytest.mark.parametrize("loss", [*LOSSES, *LOCAL_LOSSES])
@pytest.mark.parametrize("op", PATHS_BY_ROW, ids=str)
def test_loss_on_dtensors_gives_the_gradient_of_the_whole(op: Op, loss: str) -> None:
    check_loss(op, loss, DP_TP, (4,))


@eager
@pytest.mark.parametrize("loss", [*LOSSES, *LOCAL_LOSSES])
def test_loss_on_dtensors_with_context_parallel(loss: str) -> None:
    check_loss(OP["logprobs"], loss, DP_CP_TP, (4, 6))


def check_loss(op: Op, loss: str, layout: Layout, rows: tuple[int, ...]) -> None:
    """The gradient has no factor of any mesh dim."""
    inputs = draw(op, rows)
    expected = expect(op, inputs).outputs[0]
    weight = torch.arange(1.0, expected.numel() + 1).view(expected.shape) / 4
    leaves = {n: x.double() if n in op.differentiable else x for n, x in inputs.items()}
    for name in op.differentiable:
        leaves[name].requires_grad_()
    on_whole = LOSSES.get(loss, LOSSES["weighted sum"])
    on_whole(op.oracle(*leaves.values())[0], weight.double()).backward()

    by_row = layout.rows(len(rows) + 1)
    with on_mesh(layout.mesh) as mesh:
        placed = {n: place(n, x, mesh, layout, inputs) for n, x in inputs.items()}
        for name in op.differentiable:
            placed[name].requires_grad_()
        out = op(*placed.values())[0]
        weight = distribute(weight, mesh, by_row if loss == "to_local" else layout.nowhere)
        {**LOSSES, **LOCAL_LOSSES}[loss](out, weight).backward()
    for name in op.differentiable:
        at = layout if name in op.logits else Layout(layout.mesh, by_row)
        expected = leaves[name].grad
        assert_placement(placed[name].grad, at, at.placements, expected.shape)
        ranks = range(math.prod(layout.mesh))
        there = {rank: part(expected, at.mesh, at.placements, rank) for rank in ranks}
        assert_parts(parts(placed[name].grad), there, assert_gradient)


# ------------------------------------------------------------------ strides


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "all but the last position": lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "columns of more": lambda x: torch.cat([x[..., :2], x, x[..., :3]], -1)[..., 2:-3],
    "every other column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "columns first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "one row for all": lambda x: x[:1, :1].expand(x.shape),
}


def strided(op: Op, strides: str) -> Inputs:
    inputs = draw(op, (4, 3))
    made = {n: STRIDES[strides](x) if n in op.logits else x for n, x in inputs.items()}
    assert not made[op.logits[0]].is_contiguous()
    return made


@eager
@PLAIN_OR_MESH
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("op", PATHS, ids=str)
def test_strided_logits(op: Op, strides: str, layout: Layout | None) -> None:
    check(op, strided(op, strides), layout)


@pytest.mark.parametrize("op", [OP["kl_div"]], ids=str)
def test_strided_logits_with_compiled_kernels(op: Op) -> None:
    check(op, strided(op, "all but the last position"))


@eager
@pytest.mark.parametrize("op", [OP["logprobs"], OP["entropy"], OP["kl_div"]], ids=str)
def test_gradient_of_strided_logits_is_contiguous(op: Op) -> None:
    inputs = strided(op, "columns first")
    leaves = [inputs[name].requires_grad_() for name in op.differentiable]
    for grad in torch.autograd.grad(op(*inputs.values())[0].sum(), leaves):
        assert grad.is_contiguous()
    # The fakes of the operators promise it to compiled code.
    assert empty_grad(leaves[0]).is_contiguous()


UPSTREAM: dict[str, Callable[[Tensor], Tensor]] = {
    "stride 0": lambda grad: torch.full((), 0.75).expand(grad.shape),
    "transposed": lambda grad: grad.transpose(0, 1).contiguous().transpose(0, 1),
    "a slice of a cat": lambda grad: torch.cat([grad, grad], 1)[:, 1 : grad.shape[1] + 1],
}


@eager
@PLAIN_OR_MESH
@pytest.mark.parametrize("strides", UPSTREAM)
@pytest.mark.parametrize("op", PATHS_BY_ROW, ids=str)
def test_strided_upstream_gradient(op: Op, strides: str, layout: Layout | None) -> None:
    inputs = draw(op, (4, 3))
    grads = [
        UPSTREAM[strides](grad.float()) if grad is not None else None
        for grad in expect(op, inputs).grads
    ]
    check(op, inputs, layout, grads)


# ------------------------------------------------------------------ several ops, several times


@eager
@pytest.mark.parametrize("view", [False, True], ids=["logits", "a view"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_ops_on_the_same_logits(dtype: torch.dtype, view: bool) -> None:
    """One backward adds their gradients up and leaves the logits and their version unchanged."""
    ops = [*named("logprobs", "entropy", "kl_div")]
    inputs = draw(OP["logprobs"], (5, 3), dtype=dtype)
    teacher = draw(PAIRS[0], (5, 3), dtype=dtype)["teacher"]
    cut = slice(1, None) if view else slice(None)

    def loss(op: Op, call: Callable[..., tuple[Tensor, ...]], logits: Tensor) -> Tensor:
        logits = logits[:, cut]
        others = {"index": inputs["index"][:, cut], "teacher": teacher[:, cut]}
        index = others["index"].unsqueeze(-1).expand(-1, -1, *op.ids) if op.ids else others["index"]
        others["index"] = index
        return call(logits, *(others[name] for name in op.arguments[1:]))[0].sum()

    logits = inputs["logits"].requires_grad_()
    before, version = logits.detach().clone(), logits._version
    losses = [loss(op, op, logits) for op in ops]
    sum(losses).backward()
    whole = logits.detach().double().requires_grad_()
    sum(loss(op, op.oracle, whole) for op in ops).backward()
    # Each op and each sum rounds once.
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(logits.grad.double(), whole.grad, rtol=tolerance, atol=tolerance)
    assert_bytes_equal(logits.detach(), before)
    assert logits._version == version


@eager
@PLAIN_OR_MESH
@pytest.mark.parametrize("op", OPS, ids=str)
def test_inputs_are_not_modified(op: Op, layout: Layout | None) -> None:
    """The tensors that the op gets, and the local tensors of DTensors, keep bytes and version."""
    inputs = draw(op)
    if op.name != "argmax":
        inputs["temperature"] = torch.full((6,), 0.5)

    def call(given: Inputs) -> None:
        held = {
            (name, rank): local for name, x in given.items() for rank, local in parts(x).items()
        }
        before = {key: local.clone() for key, local in held.items()}
        versions = {key: local._version for key, local in held.items()}
        for name in op.differentiable:
            given[name].requires_grad_()
        *arguments, last = given.values()
        options = {} if op.name == "argmax" else {"temperature": last}
        out = op(*arguments, *(() if options else (last,)), **options)[0]
        if out.requires_grad:
            out.sum().backward()
        for key, local in held.items():
            assert_bytes_equal(local, before[key])
            assert local._version == versions[key]

    if layout is None:
        call(inputs)
        return
    with on_mesh(layout.mesh) as mesh:
        call({name: place(name, x, mesh, layout, inputs) for name, x in inputs.items()})


@eager
@PLAIN_OR_MESH
@pytest.mark.parametrize("op", GRADIENT_PATHS, ids=str)
def test_two_backwards_add_the_same_gradient(op: Op, layout: Layout | None) -> None:
    inputs = draw(op)

    def twice(placed: Inputs) -> None:
        leaves = [placed[name].requires_grad_() for name in op.differentiable]
        loss = op(*placed.values())[0].sum()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        for leaf, grad in zip(leaves, first, strict=True):
            for rank, local in parts(grad).items():
                assert_bytes_equal(parts(leaf.grad)[rank], 2 * local)

    if layout is None:
        twice(inputs)
        return
    with on_mesh(layout.mesh) as mesh:
        twice({name: place(name, x, mesh, layout, inputs) for name, x in inputs.items()})


@eager
@PLAIN_OR_MESH
@pytest.mark.parametrize("op", PATHS, ids=str)
def test_no_grad_gives_the_bytes_of_training(op: Op, layout: Layout | None) -> None:
    inputs = draw(op)
    training = check(op, inputs, layout)
    without = check(op, inputs, layout, needs=())
    for one, other in zip(training.outputs, without.outputs, strict=True):
        assert not other.requires_grad
        for rank, local in parts(one).items():
            assert_bytes_equal(local, parts(other)[rank])


# ------------------------------------------------------------------ editing the results


EDITS: dict[str, Callable[[Tensor], Tensor]] = {
    "mul_": lambda out: out.mul_(2),
    "masked_fill_": lambda out: out.masked_fill_(out < -1.5, 0),
    "zero_": lambda out: out.zero_(),
}


@eager
@PLAIN_OR_MESH
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("op", GRADIENT_PATHS, ids=str)
def test_results_may_be_edited_in_place(op: Op, edit: str, layout: Layout | None) -> None:
    check(op, draw(op), layout, edit=EDITS[edit])


@pytest.mark.parametrize("op", [OP["logprobs"], OP["kl_div"]], ids=str)
def test_results_of_compiled_kernels_may_be_edited_in_place(op: Op) -> None:
    check(op, draw(op), edit=EDITS["mul_"])


@eager
def test_ids_of_the_result_may_be_edited_in_place() -> None:
    logits = torch.randn(4, 8, requires_grad=True)
    value, ids = dv.topk_logprobs(logits, 3)
    ids.fill_(0)
    value.sum().backward()
    expected = expect(
        OP["topk_logprobs(k=3)"], {"logits": logits.detach()}, [torch.ones(4, 3), None]
    )
    assert_gradient(logits.grad, expected.gradients["logits"])


# ------------------------------------------------------------------ some inputs, some results


@eager
@PLAIN_OR_MESH
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("op", OF_TWO, ids=str)
def test_gradient_where_the_other_input_is_detached(
    op: Op, which: int, layout: Layout | None
) -> None:
    check(op, draw(op), layout, needs=(op.differentiable[which],))


@eager
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("op", OF_TWO, ids=str)
def test_gradient_of_one_of_two_inputs(op: Op, which: int) -> None:
    inputs = draw(op)
    leaves = [inputs[name].requires_grad_() for name in op.differentiable]
    expected = expect(op, inputs, [torch.ones(6)])
    (grad,) = torch.autograd.grad(op(*inputs.values())[0].sum(), leaves[which])
    assert_gradient(grad, expected.gradients[op.differentiable[which]])
    assert all(leaf.grad is None for leaf in leaves)


@eager
@PLAIN_OR_MESH
@pytest.mark.parametrize("used", [0, 1])
def test_gradient_where_one_of_two_results_is_used(used: int, layout: Layout | None) -> None:
    op = OP["logprobs_and_entropy"]
    inputs = draw(op)
    grads = list(expect(op, inputs).grads)
    grads[1 - used] = None
    check(op, inputs, layout, grads)


@eager
def test_gradient_of_either_result_in_turns() -> None:
    """Upstream gradients are replicated here. torch 2.11 confuses (grad, None) and (None, grad)."""
    op = OP["logprobs_and_entropy"]
    inputs = draw(op, (4,))
    for used in (0, 1, 0):
        leaf = inputs["logits"].double().requires_grad_()
        op.oracle(leaf, inputs["index"])[used].sum().backward()
        with on_mesh(DP_TP.mesh) as mesh:
            placed = [place(n, x, mesh, DP_TP, inputs) for n, x in inputs.items()]
            op(placed[0].requires_grad_(), placed[1])[used].sum().backward()
        for rank, local in parts(placed[0].grad).items():
            expected = part(leaf.grad, DP_TP.mesh, DP_TP.placements, rank)
            assert_values(local, expected)


# ------------------------------------------------------------------ numerically, and only once


def scattered(op: Op, inputs: Inputs) -> Callable[..., tuple[Tensor, ...]]:
    """The op as a function of its differentiable inputs."""

    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        given = {**inputs, **dict(zip(op.differentiable, leaves, strict=True))}
        outputs = op(*given.values(), temperature=torch.tensor([0.5, 2.0]), vocab_size=5)
        return tuple(out for out in outputs if out.dtype.is_floating_point)

    return call


@eager
@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=str)
def test_gradcheck(op: Op) -> None:
    inputs = draw(op, (2,), 5, torch.float64)
    for name in op.logits:
        inputs[name] = torch.nn.functional.pad(inputs[name], (0, 1))
    leaves = tuple(inputs[name].requires_grad_() for name in op.differentiable)
    assert torch.autograd.gradcheck(scattered(op, inputs), leaves)


@eager
@PLAIN_OR_MESH
@pytest.mark.parametrize("op", GRADIENT_PATHS, ids=str)
def test_second_backward_is_an_error(op: Op, layout: Layout | None) -> None:
    """Otherwise a gradient penalty would silently have no gradient."""
    inputs = draw(op)

    def penalise(placed: Inputs) -> None:
        leaves = [placed[name].requires_grad_() for name in op.differentiable]
        loss = op(*placed.values())[0].sum()
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        for grad in grads:
            with pytest.raises(RuntimeError, match=rf"^{op.name}: "):
                grad.square().sum().backward(retain_graph=True)
        assert all(leaf.grad is None for leaf in leaves)

    if layout is None:
        penalise(inputs)
        return
    with on_mesh(layout.mesh) as mesh:
        penalise({name: place(name, x, mesh, layout, inputs) for name, x in inputs.items()})


@eager
def test_gradient_is_of_the_logits_dtype_and_layout() -> None:
    with on_mesh((2,)) as mesh:
        logits = distribute(torch.zeros(2, 8, dtype=torch.bfloat16), mesh, [Shard(-1)])
        logits.requires_grad_()
        dv.entropy(logits).sum().backward()
        assert isinstance(logits.grad, DTensor)
        assert logits.grad.dtype == torch.bfloat16
        assert logits.grad.placements == logits.placements
