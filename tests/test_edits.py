"""An input edited between forward and backward raises, or the gradient is of the old values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dtensor_vocab as dv
from tests.ops import LOGITS, Op, draw
from tests.rank_zero import lone_rank
from tests.step import ONE_EACH, compiled

pytestmark = pytest.mark.usefixtures("eager_kernels")

CASES = [
    (op, name) for op in ONE_EACH if not op.constant for name in (*op.arguments, "temperature")
]
EACH = pytest.mark.parametrize("op, edited", CASES, ids=str)
COMPILED_TOO = pytest.mark.parametrize(
    "op, edited, compile_op",
    [
        *((*case, False) for case in CASES),
        *((*case, True) for case in CASES if case[0].name in ("logprobs", "kl_div")),
    ],
    ids=lambda x: ("eager", "compiled")[x] if isinstance(x, bool) else str(x),
)


def draw_all(op: Op) -> dict[str, Tensor]:
    return {**draw(op), "temperature": torch.full((6,), 0.5)}


def other_values(name: str, value: Tensor) -> Tensor:
    """Values of the same kind, all of them valid."""
    if not value.dtype.is_floating_point:
        return (value + 1) % 10
    return value - 1 if name == "teacher_logprobs" else value + 0.25


def wrap(name: str, value: Tensor, mesh: DeviceMesh) -> DTensor:
    placement = Shard(-1) if name in LOGITS else Replicate()
    return DTensor.from_local(value, mesh, [placement], run_check=False)


def check_edit(
    op: Op, inputs: dict[str, Tensor], edit: Callable[[], object], compile_op: bool = False
) -> None:
    """``edit`` changes one of the inputs in place."""
    leaves = [inputs[name].requires_grad_() for name in op.differentiable]

    def call(*inputs: Tensor) -> Tensor:
        *inputs, temperature = inputs
        return op(*inputs, temperature=temperature)[0]

    if compile_op:
        call = compiled(call, backend="aot_eager")
    expected = torch.autograd.grad(call(*inputs.values()).sum(), leaves)
    loss = call(*inputs.values()).sum()
    with torch.no_grad():
        edit()
    try:
        gradients = torch.autograd.grad(loss, leaves)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    for actual, wanted in zip(gradients, expected, strict=True):
        assert actual.equal(wanted)


@COMPILED_TOO
def test_tensor_is_edited(op: Op, edited: str, compile_op: bool) -> None:
    inputs = draw_all(op)
    value = inputs[edited]
    check_edit(op, inputs, lambda: value.copy_(other_values(edited, value)), compile_op)


@pytest.mark.parametrize("wrapped_by", ["caller", "op"])
@COMPILED_TOO
def test_local_tensor_is_edited(op: Op, edited: str, compile_op: bool, wrapped_by: str) -> None:
    """The caller may keep the plain tensor that a DTensor wraps, such as a static buffer."""
    with lone_rank(1) as mesh:
        plain = draw_all(op)
        inputs = {
            name: wrap(name, x, mesh) if name in LOGITS or wrapped_by == "caller" else x
            for name, x in plain.items()
        }
        value = plain[edited].detach()
        check_edit(op, inputs, lambda: value.copy_(other_values(edited, value)), compile_op)


@EACH
def test_dtensor_is_edited(op: Op, edited: str) -> None:
    """The ops are not compiled here, because compiled code detects no such edit: torch saves the
    local tensors there, and an in-place op on a DTensor does not change their versions (seen on
    torch 2.11 to 2.14).
    """
    with lone_rank(1) as mesh:
        inputs = {name: wrap(name, x, mesh) for name, x in draw_all(op).items()}
        value = inputs[edited]
        check_edit(op, inputs, lambda: value.copy_(other_values(edited, value)))


def test_one_temperature_for_all_rows_is_edited() -> None:
    logits, index = torch.randn(6, 10, requires_grad=True), torch.randint(10, (6,))
    temperature = torch.tensor(0.5)
    loss = dv.logprobs(logits, index, temperature=temperature).sum()
    temperature.fill_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
