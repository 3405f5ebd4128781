"""inplace_backward writes the gradient into the storage of the logits or raises an error."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

import dtensor_vocab as dv
from tests.ops import Inputs, Layout, Op, check, draw, named, place, tp
from tests.ranks import on_mesh, parts

pytestmark = pytest.mark.usefixtures("eager_kernels")

OPS = named("logprobs", "entropy", "logprobs_and_entropy", "cross_entropy")
DP_TP = Layout((2, 2), (Shard(0), Shard(-1)))
EVERYWHERE = pytest.mark.parametrize("layout", [None, DP_TP], ids=str)
FEW = named("logprobs", "entropy")

MODIFIED = "modified by an inplace operation"


@contextlib.contextmanager
def placed(op: Op, layout: Layout | None) -> Iterator[Inputs]:
    """Inputs in a layout, the logits as a leaf that requires a gradient."""
    inputs = draw(op)
    if layout is None:
        inputs["logits"].requires_grad_()
        yield inputs
        return
    with on_mesh(layout.mesh) as mesh:
        inputs = {name: place(name, x, mesh, layout, inputs) for name, x in inputs.items()}
        inputs["logits"].requires_grad_()
        yield inputs


@EVERYWHERE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_gradient_is_the_same(op: Op, dtype: torch.dtype, layout: Layout | None) -> None:
    check(op, draw(op, (4, 3), dtype=dtype), layout, inplace_backward=True)


@EVERYWHERE
@pytest.mark.parametrize("op", OPS, ids=str)
def test_gradient_lies_in_the_storage_of_the_logits(op: Op, layout: Layout | None) -> None:
    with placed(op, layout) as inputs:
        logits = inputs["logits"]
        where = {rank: local.data_ptr() for rank, local in parts(logits).items()}
        op(*inputs.values(), inplace_backward=True)[0].sum().backward()
    assert {rank: local.data_ptr() for rank, local in parts(logits.grad).items()} == where


OTHER_READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "the logits": dv.entropy,
    "a view of them": lambda logits: dv.entropy(logits.view_as(logits)),
    "a slice of them": lambda logits: dv.entropy(logits[2:]),
    "another package's op": lambda logits: logits.square(),
}


@EVERYWHERE
@pytest.mark.parametrize("reader", OTHER_READERS)
@pytest.mark.parametrize("op", FEW, ids=str)
def test_other_ops_that_saved_the_logits_raise(op: Op, reader: str, layout: Layout | None) -> None:
    with placed(op, layout) as inputs:
        other = OTHER_READERS[reader](inputs["logits"]).sum()
        loss = op(*inputs.values(), inplace_backward=True)[0].sum()
        with pytest.raises(RuntimeError, match=MODIFIED):
            (other + loss).backward()  # Autograd runs what was called last first.


@pytest.mark.parametrize("op", OPS, ids=str)
def test_op_that_saved_the_local_tensor_raises(op: Op) -> None:
    """``exp`` saves its result."""
    inputs = draw(op)
    with on_mesh((2,)) as mesh:
        local = place("logits", inputs["logits"], mesh, tp(2), inputs)._local_tensor
        source = local.detach().requires_grad_()
        logits = DTensor.from_local(source.exp(), mesh, [Shard(-1)], run_check=False)
        with pytest.raises(RuntimeError, match=MODIFIED):
            loss = op(logits, *[*inputs.values()][1:], inplace_backward=True)[0].sum()
            loss.backward()


@EVERYWHERE
@pytest.mark.parametrize("op", OPS, ids=str)
def test_op_that_saved_the_base_of_an_overwritten_view_raises(
    op: Op, layout: Layout | None
) -> None:
    with placed(op, layout) as inputs:
        logits = inputs["logits"]
        loss = op(*inputs.values())[0].sum()
        on_view = dv.entropy(logits.view_as(logits), inplace_backward=True).sum()
        with pytest.raises(RuntimeError, match=MODIFIED):
            (loss + on_view).backward()


@EVERYWHERE
@pytest.mark.parametrize("op", OPS, ids=str)
def test_logits_edited_before_backward_raise(op: Op, layout: Layout | None) -> None:
    with placed(op, layout) as inputs:
        loss = op(*inputs.values(), inplace_backward=True)[0].sum()
        with torch.no_grad():
            inputs["logits"].mul_(2)
        with pytest.raises(RuntimeError, match=MODIFIED):
            loss.backward()


@EVERYWHERE
@pytest.mark.parametrize("op", OPS, ids=str)
def test_second_backward_raises(op: Op, layout: Layout | None) -> None:
    with placed(op, layout) as inputs:
        loss = op(*inputs.values(), inplace_backward=True)[0].sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=MODIFIED):
            loss.backward()


@pytest.mark.parametrize("op", OPS, ids=str)
@pytest.mark.parametrize("way", ["expanded", "overlapping", "overlapping in three dims"])
def test_rows_that_share_memory_are_refused(op: Op, way: str) -> None:
    inputs = draw(op)
    whole = inputs["logits"]
    overlapping = whole.view(-1).unfold(0, 10, 9)[:6]
    if way == "overlapping in three dims":  # 0 + 1 + 2 * 2 is the first element of the next entry
        inputs = draw(op, (2, 3), 2)
        inputs["logits"] = torch.randn(11).as_strided((2, 3, 2), (5, 2, 1))
    else:
        inputs["logits"] = whole[:1].expand(6, 10) if way == "expanded" else overlapping
    with pytest.raises(
        ValueError, match=rf"^{op.name}: expected logits without overlapping memory"
    ):
        op(*inputs.values(), inplace_backward=True)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("op", FEW, ids=str)
def test_compiled_code_makes_a_new_gradient(op: Op, dynamic: bool) -> None:
    logits, *ids = draw(op).values()
    leaf = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(op(leaf, *ids)[0].sum(), leaf)
    before = logits.clone()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    def loss(logits: Tensor) -> Tensor:
        return op(logits, *ids, inplace_backward=True)[0].sum()

    (gradient,) = torch.autograd.grad(loss(logits.requires_grad_()), logits)
    torch.testing.assert_close(gradient, expected)
    assert logits.equal(before)


@pytest.mark.parametrize("op", OPS, ids=str)
def test_transforms_make_a_new_gradient(op: Op) -> None:
    """``torch.func`` needs pure functions."""
    logits, *ids = draw(op, (3, 4)).values()

    def loss(logits: Tensor, *ids: Tensor, inplace_backward: bool = True) -> Tensor:
        return op(logits, *ids, inplace_backward=inplace_backward)[0].sum()

    for transform in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))):
        before = logits.clone()
        gradient = transform(loss)(logits, *ids)
        expected = transform(functools.partial(loss, inplace_backward=False))(logits, *ids)
        assert gradient.equal(expected) and logits.equal(before)
