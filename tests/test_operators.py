"""opcheck of every operator, with the arguments that the public functions give it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.ops import LINEAR, OPS, Inputs, Op, draw, named, place, tp
from tests.oracle import assert_bytes_equal
from tests.ranks import distribute, on_mesh, parts

pytestmark = pytest.mark.usefixtures("eager_kernels")

NAMESPACE = "dtensor_vocab::"
OPERATORS = sorted(
    name.removeprefix(NAMESPACE)
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith(NAMESPACE)
)
INPLACE = named("logprobs", "entropy", "logprobs_and_entropy", "cross_entropy")
LAST_RANK = 3


class Calls(TorchDispatchMode):
    """Records the arguments of the package's operators, on the last rank if ranks are simulated."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func._schema.name
        if name.startswith(NAMESPACE):
            self.seen.append((name.removeprefix(NAMESPACE), tree_map(_copy, args)))
        return func(*args, **(kwargs or {}))


def _copy(value: Any) -> Any:
    """Copies a tensor, or the last rank's part of a simulated one, with its offset and strides."""
    if not isinstance(value, Tensor):
        return value
    value = value._local_tensors[LAST_RANK] if isinstance(value, LocalTensor) else value.detach()
    storage = value.untyped_storage().clone()
    copy = torch.empty(0, dtype=value.dtype)
    return copy.set_(storage, value.storage_offset(), value.shape, value.stride())


def with_gradients(
    op: Op, inputs: Inputs, needs: tuple[str, ...] | None = None, **options: Any
) -> None:
    for name in op.differentiable if needs is None else needs:
        inputs[name].requires_grad_()
    outputs = [out for out in op(*inputs.values(), **options) if out.requires_grad]
    if outputs:
        torch.autograd.backward([out.sum() for out in outputs])


def in_all_ways(op: Op, make: Callable[[], Inputs], **options: Any) -> None:
    """Calls the op with gradients of all inputs, of each one alone, and in place."""
    with_gradients(op, make(), **options)
    for name in op.differentiable:
        with_gradients(op, make(), (name,), **options)
    if op in INPLACE:
        with_gradients(op, make(), inplace_backward=True, **options)


def contiguous(op: Op) -> None:
    in_all_ways(op, lambda: draw(op))


def strided(op: Op) -> None:
    def make() -> Inputs:
        return {
            name: torch.cat([x, x[:, :1]], 1)[:, :-1] if name in op.logits else x
            for name, x in draw(op, (4, 3)).items()
        }

    options = {} if op.name == "argmax" else {"temperature": torch.ones(3, 4).t()}
    in_all_ways(op, make, **options)


def bfloat16(op: Op) -> None:
    options = {} if op.name == "argmax" else {"temperature": 0.5}
    if op.name in ("entropy", "kl_div"):
        options["vocab_size"] = 9
    else:
        options["softcap"] = 5.0
    in_all_ways(op, lambda: draw(op, dtype=torch.bfloat16), **options)


def without_rows(op: Op) -> None:
    in_all_ways(op, lambda: draw(op, (2, 0)))


def without_columns(op: Op) -> None:
    """The last of 4 ranks has an empty shard of V = 5."""
    inputs = draw(op, vocab=5)
    with on_mesh((4,)) as mesh:
        in_all_ways(op, lambda: {n: place(n, x, mesh, tp(4), inputs) for n, x in inputs.items()})


VARIATIONS: dict[str, Callable[[Op], None]] = {
    call.__name__: call for call in (contiguous, strided, bfloat16, without_rows, without_columns)
}


@functools.cache
def captured(variation: str) -> dict[str, list[tuple[Any, ...]]]:
    """Returns the arguments of each operator, one set for each combination of dims and options."""
    calls = Calls()
    for op in OPS + LINEAR:
        with calls:
            VARIATIONS[variation](op)
    patterns: dict[str, dict[Any, tuple[Any, ...]]] = defaultdict(dict)
    for name, args in calls.seen:
        patterns[name].setdefault(tuple(map(_pattern, args)), args)
    return {name: list(found.values()) for name, found in patterns.items()}


def _pattern(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return arg.dim()
    if isinstance(arg, list) and all(type(x) is bool for x in arg):
        return tuple(arg)
    return None if isinstance(arg, (int, list, tuple)) and type(arg) is not bool else arg


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str) -> None:
    assert name in captured("contiguous")
    for args in captured("contiguous")[name]:
        torch.library.opcheck(overload(name), args)


@pytest.mark.parametrize("variation", list(VARIATIONS)[1:])
@pytest.mark.parametrize("name", OPERATORS)
def test_schema_and_fake_hold_for_other_arguments(name: str, variation: str) -> None:
    """AOT autograd, the slowest part of opcheck, is left to the test with contiguous arguments."""
    assert name in captured(variation)
    for args in captured(variation)[name]:
        torch.library.opcheck(overload(name), args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", [name for name in OPERATORS if not name.endswith("_")])
def test_opcheck_of_inputs_that_require_grad(name: str) -> None:
    for args in captured("contiguous")[name]:
        torch.library.opcheck(overload(name), tree_map(_requires_grad, args))


def overload(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.dtensor_vocab, name).default


def _requires_grad(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.clone().requires_grad_()
    return value


# ------------------------------------------------------------------ called directly


def test_statistics_of_dtensors() -> None:
    """Each shard has its own statistics, which are sharded over the mesh dim of the vocabulary."""
    logits = torch.randn(4, 6, 10)
    with on_mesh((2, 2)) as mesh:
        placed = distribute(logits, mesh, [Shard(0), Shard(-1)])
        start = DTensor.from_local(
            torch.full((1,), mesh.get_local_rank(1) * 5),
            mesh,
            [Replicate(), Shard(0)],
            run_check=False,
        )
        stats = torch.ops.dtensor_vocab.softmax_stats(placed, None, None, start, [10, 5, 10], None)
        assert stats.placements == (Shard(1), Shard(0))
        assert stats.shape[:3] == (2, 4, 6)
    for rank, local in parts(stats).items():
        shard = logits.chunk(2)[rank // 2].chunk(2, -1)[rank % 2].contiguous()
        alone = torch.ops.dtensor_vocab.softmax_stats(
            shard, None, None, torch.tensor([rank % 2 * 5]), [10, 5, 10], None
        )
        assert_bytes_equal(local, alone)


def test_statistics_are_constants_to_autograd() -> None:
    """The public functions implement the gradients."""
    logits = torch.randn(4, 10, requires_grad=True)
    stats = torch.ops.dtensor_vocab.softmax_stats(
        logits, None, None, torch.zeros(1, dtype=torch.int64), [10, 10, 10], None
    )
    assert not stats.requires_grad
