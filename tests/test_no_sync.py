"""No operator of a forward or backward makes the host wait for the device.

The ops run under a mode that enters the custom operators and refuses every call that would wait:
on the CPU, on one rank of a mesh, and on fake tensors whose device is a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dtensor_vocab.autograd import PerToken
from tests.ops import LINEAR_PATHS, LOGITS, OPS, Inputs, Op, draw, upstream
from tests.rank_zero import lone_rank, place_part

pytestmark = pytest.mark.usefixtures("eager_kernels")

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense,
    aten.item,
    aten.is_nonzero,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten.unique_dim,
    aten._unique2,
    aten.repeat_interleave,
}


class NoWaiting(TorchDispatchMode):
    """Raises where the host would wait, inside of custom operators too."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []
        """Names of the package's operators."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls the op on local tensors, which come here.
        kwargs = kwargs or {}
        name = getattr(func, "_name", "").partition(".")[0]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name in OPDEFS and not any(map(_is_shape, given)):
            self.ran.append(name.partition("::")[2])
            with self, IndexInPython():
                return OPDEFS[name]._init_fn(*args, **kwargs)
        if func.overloadpacket in WAITING or _indexes_by_mask(func, args):
            raise AssertionError(f"{func} waits for the device")
        result = func(*args, **kwargs)
        devices = {x.device.type for x in given}
        made = {x.device.type for x in tree_leaves(result) if isinstance(x, Tensor)}
        if devices and not made <= devices:
            raise AssertionError(f"{func} copies from {devices} to {made}")
        return result


def _is_shape(x: Tensor) -> bool:
    """Returns whether DTensor made ``x`` to infer shapes, which it does once for all calls."""
    return isinstance(x, FakeTensor) and x.device.type == "cpu"


def _indexes_by_mask(func: Any, args: Any) -> bool:
    if func.overloadpacket not in (aten.index, aten.index_put, aten.index_put_):
        return False
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


# ------------------------------------------------------------------ on the CPU


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("op", OPS + LINEAR_PATHS, ids=str)
def test_nothing_waits_on_the_cpu(op: Op, sharded: bool) -> None:
    inputs, options, grads = draw_call(op)
    if not sharded:
        run(op, inputs, options, grads)
        return
    with lone_rank(2) as mesh:
        for name, value in inputs.items():
            placement = Shard(-1) if name in LOGITS else Replicate()
            placement = Shard(0) if name.endswith((".weight", ".bias")) else placement
            inputs[name] = place_part(value, mesh, [placement])
        grads = [grad if grad is None else place_part(grad, mesh, [Replicate()]) for grad in grads]
        run(op, inputs, options, grads)


def run(op: Op, inputs: Inputs, options: dict[str, Any], grads: list[Tensor | None]) -> None:
    for name in op.differentiable:
        inputs[name].requires_grad_()
    with NoWaiting() as mode:
        outputs = op(*inputs.values(), **options)
        if not op.constant:
            wanted = [
                (out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None
            ]
            torch.autograd.backward(*zip(*wanted, strict=True))
    assert_ran(mode, op)


def draw_call(op: Op) -> tuple[Inputs, dict[str, Any], list[Tensor | None]]:
    """Inputs, options and upstream gradients of a call that takes every step of the math."""
    inputs = draw(op, vocab=9)
    for name, value in inputs.items():
        if name in LOGITS:
            inputs[name] = torch.cat([value, torch.zeros(6, 2)], -1)
        elif name.endswith((".weight", ".bias")):
            inputs[name] = torch.cat([value, torch.zeros(2, *value.shape[1:])])
    options: dict[str, Any] = {"vocab_size": 9}
    if op.name != "argmax":
        options["temperature"] = torch.rand(6) + 0.5
    return inputs, options, upstream(op(*inputs.values()))


def assert_ran(mode: NoWaiting, op: Op) -> None:
    assert any(name.endswith("_merge") for name in mode.ran)
    assert op.constant or any("_backward" in name for name in mode.ran)


# ------------------------------------------------------------------ on a fake GPU


@pytest.mark.parametrize("op", OPS + LINEAR_PATHS, ids=str)
def test_nothing_waits_on_a_fake_gpu(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, options, _ = draw_call(op)
    applied = without_engine(monkeypatch)
    with FakeTensorMode(), IndexInPython(), NoWaiting() as mode:
        inputs, options = tree_map_only(
            Tensor,
            lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda"),
            (inputs, options),
        )
        results = list(op(*inputs.values(), **options))
        for function, context, outputs in applied:
            grads = [torch.ones_like(x) if x.dtype.is_floating_point else None for x in outputs]
            results += function.backward(context, *grads[:-1], None)
    assert all(x.device.type == "cuda" for x in results if x is not None)
    assert_ran(mode, op)


class IndexInPython(TorchFunctionMode):
    """Turns indexing, and writes to tensors on a GPU, into calls of other operators.

    The C++ code of both needs the tensor's device, which a build of torch without CUDA lacks.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            return _index(*args)
        if func is Tensor.__setitem__:
            x, key, value = args
            where = _index(x, key)
            # On a fake GPU there are no data to write, and the sum checks shapes and devices.
            return where.copy_(value) if x.device.type == "cpu" else where + value
        kwargs = kwargs or {}
        if func in (torch.mm, torch.addmm) and "out" in kwargs and kwargs["out"].is_cuda:
            out = kwargs.pop("out")
            result = func(*args, **kwargs)
            assert (result.shape, result.dtype) == (out.shape, out.dtype)
            return out
        if func is Tensor.copy_ and args[0].is_cuda:
            assert (args[0] + args[1]).shape == args[0].shape
            return args[0]
        if func is Tensor.__invert__:
            return aten.bitwise_not(*args)
        return func(*args, **kwargs)


def _index(x: Tensor, key: Any) -> Tensor:
    keys = key if isinstance(key, tuple) else (key,)
    dim, skipped = 0, x.dim() - sum(k is not None and k is not Ellipsis for k in keys)
    for k in keys:
        if isinstance(k, Tensor):
            raise AssertionError("a mask as an index waits for the device")
        elif isinstance(k, int):
            x = x.select(dim, k)
        elif k is Ellipsis:
            dim += skipped
        else:
            x = x.unsqueeze(dim) if k is None else aten.slice(x, dim, k.start, k.stop)
            dim += 1
    return x


def without_engine(monkeypatch: pytest.MonkeyPatch) -> list[tuple[type[PerToken], Any, Any]]:
    """Replaces autograd for the ops' autograd functions, and returns a list of their calls.

    Autograd refuses GPU tensors, fake ones included, in a build of torch without CUDA.
    """
    calls = []

    def apply(function: type[PerToken], *inputs: Any) -> Any:
        context = Context(inputs)
        outputs = function.forward(*inputs)
        function.setup_context(context, inputs, outputs)
        calls.append((function, context, outputs))
        return outputs

    monkeypatch.setattr(PerToken, "apply", classmethod(apply))
    return calls


class Context:
    """The context that backward of an autograd function gets, if every input needs a gradient."""

    saved_tensors: tuple[Tensor, ...]

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.needs_input_grad = [
            isinstance(x, Tensor) and x.dtype.is_floating_point for x in inputs
        ]

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


# ------------------------------------------------------------------ the mode itself

WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).any()),
    "nonzero": lambda x: x.nonzero(),
    "index by a mask": lambda x: x[x > 0],
    "assign by a mask": lambda x: x.__setitem__(x > 0, x),
}
COPIES = {"to the host": lambda x: x.cpu(), "from the host": lambda x: torch.ones(2).to(x.device)}


@pytest.mark.parametrize("wait", WAITS)
def test_the_mode_refuses_to_wait(wait: str) -> None:
    with pytest.raises(AssertionError, match="waits"), NoWaiting():
        WAITS[wait](torch.ones(1))


@pytest.mark.parametrize("copy", COPIES)
def test_the_mode_refuses_to_copy(copy: str) -> None:
    with pytest.raises(AssertionError, match="copies"), FakeTensorMode(), NoWaiting():
        COPIES[copy](torch.empty(2, device="cuda"))
