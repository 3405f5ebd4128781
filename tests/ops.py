"""The ops under test, how to call them, and one check of all that a call promises.

``check`` runs an op forward and backward on plain tensors or on a mesh and compares values,
gradients, dtypes, placements and the number of collectives with the oracle's. A new op is
covered by an entry in ``OPS``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import dtensor_vocab as dv
from tests import oracle
from tests.ranks import Collective, Collectives, distribute, on_mesh, part, parts

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Op:
    """A public function with some of its options."""

    name: str
    arguments: tuple[str, ...]
    """Names of the tensor arguments, in order. ``draw`` makes inputs by these names."""
    ids: tuple[int, ...] = ()
    """Trailing dims of the ids: () for one per position, (K,) for K."""
    options: Mapping[str, Any] = field(default_factory=dict)
    numbers: tuple[int, ...] = (5,)
    """Numbers per row that each forward collective carries where the vocabulary is sharded."""
    constant: bool = False
    """Whether the op has no gradients at all."""

    def __call__(self, *inputs: Tensor, **options: Any) -> tuple[Tensor, ...]:
        inputs = _joined(self.arguments, inputs, dv.LinearLogits)
        return _as_tuple(getattr(dv, self.name)(*inputs, **{**self.options, **options}))

    def oracle(self, *inputs: Tensor, **options: Any) -> tuple[Tensor, ...]:
        # The option changes the memory of the gradient, not its values.
        options.pop("inplace_backward", None)
        c = options.pop("softcap", None)
        inputs = _joined(self.arguments, inputs, F.linear)
        if c is not None:
            count = len(self.logits)  # They come first.
            inputs[:count] = [c * torch.tanh(x / c) for x in inputs[:count]]
        return _as_tuple(getattr(oracle, self.name)(*inputs, **{**self.options, **options}))

    def with_options(self, **options: Any) -> Op:
        return replace(self, options={**self.options, **options})

    def __str__(self) -> str:
        words = [f"{key}={value}" for key, value in self.options.items()]
        words += [f"K={k}" for k in self.ids]
        words += [f"linear {name}" for name in LOGITS if f"{name}.hidden" in self.arguments]
        return f"{self.name}({','.join(words)})" if words else self.name

    @property
    def logits(self) -> tuple[str, ...]:
        """The arguments whose leading dims are those of the logits and whose dtype is theirs."""
        return tuple(name for name in self.arguments if name in LOGITS or ".hidden" in name)

    @property
    def ids_name(self) -> str | None:
        """The name of the argument with ids, some of which may be ignored."""
        return next(
            (name for name in self.arguments if name in ("index", "target", "teacher_ids")), None
        )

    @property
    def differentiable(self) -> tuple[str, ...]:
        names = () if self.constant else (*LOGITS, "teacher_logprobs")
        return tuple(name for name in self.arguments if name.partition(".")[0] in names)

    @property
    def reduces_rows(self) -> bool:
        return self.name == "cross_entropy" and self.options.get("reduction", "mean") != "none"

    def linear(self, *names: str) -> Op:
        """Returns the op with operands in place of these logits, or of all."""
        names = names or self.logits
        operands = {name: [f"{name}.{x}" for x in ("hidden", "weight", "bias")] for name in names}
        arguments = [operands.get(name, [name]) for name in self.arguments]
        return replace(self, arguments=tuple(itertools.chain(*arguments)))

    def within(self, vocab: int) -> Op:
        """Returns the op with k lowered to the size of the vocabulary if that is smaller."""
        return self.with_options(k=min(self.options["k"], vocab)) if "k" in self.options else self


WIDTH = 4
"""H of hidden states and weights."""
LOGITS = ("logits", "student", "teacher")
TOP_TEACHER = ("student", "teacher_logprobs", "teacher_ids")

OPS = [
    Op("logprobs", ("logits", "index")),
    Op("logprobs", ("logits", "index"), ids=(3,), numbers=(7,)),
    Op("entropy", ("logits",), numbers=(4,)),
    Op("logprobs_and_entropy", ("logits", "index")),
    Op("kl_div", ("student", "teacher"), numbers=(6,)),
    Op("kl_div", ("student", "teacher"), options={"reverse": True}, numbers=(6,)),
    Op("js_div", ("student", "teacher"), options={"beta": 0.3}, numbers=(5, 2)),
    Op("cross_entropy", ("logits", "target"), options={"reduction": "none"}),
    Op(
        "cross_entropy",
        ("logits", "target"),
        options={"reduction": "none", "label_smoothing": 0.1},
        numbers=(7,),
    ),
    Op("cross_entropy", ("logits", "target"), options={"reduction": "mean", "z_loss": 0.1}),
    Op("topk_logprobs", ("logits",), options={"k": 3}, numbers=(10,)),
    Op("argmax", ("logits",), constant=True, numbers=(3,)),
    Op("sample", ("logits",), options={"seed": 11}, constant=True, numbers=(6,)),
    Op("topk_kl_div", TOP_TEACHER, ids=(3,), numbers=(7,)),
    Op("topk_kl_div", TOP_TEACHER, ids=(3,), options={"tail": True}, numbers=(9,)),
    Op("topk_kl_div", TOP_TEACHER, ids=(3,), options={"reverse": True, "tail": True}, numbers=(9,)),
]
PUBLIC_OPS = [name for name in dv.__all__ if name not in ("LinearLogits", "logits_from_local")]
OP = {str(op): op for op in OPS}
PAIRS = [op for op in OPS if len(op.logits) == 2]
WITH_IDS = [op for op in OPS if op.ids_name]
AT_IDS = [op for op in WITH_IDS if op.logits == ("logits",)]
"""Ops that return one value for each id."""
ROW_BY_ROW = [op for op in OPS if not op.reduces_rows]
PATHS = [
    OP["logprobs(K=3)"],  # computes one softmax, and takes ids
    OP["entropy"],  # computes one softmax, and takes no ids
    OP["logprobs_and_entropy"],  # returns two results
    OP["kl_div"],  # computes two softmaxes
    OP["js_div(beta=0.3)"],  # communicates twice
    OP["cross_entropy(reduction=mean,z_loss=0.1)"],  # sums over rows
    OP["topk_logprobs(k=3)"],  # returns ids
    OP["argmax"],  # has no gradient
    OP["sample(seed=11)"],  # depends on the numbers of rows and columns
    OP["topk_kl_div(tail=True,K=3)"],  # has a gradient of the teacher's log-probabilities
]
"""One op for each code path, for behaviour that does not depend on an op's formula."""
GRADIENT_PATHS = [op for op in PATHS if not op.constant and op.name != "entropy"]
"""One op for each code path of autograd, which does not distinguish ops with and without ids."""


LINEAR = [
    *(op.linear() for op in OPS),
    *(op.linear(name) for op in PAIRS for name in op.logits),
]
"""The ops on ``LinearLogits``, for pairs also on one side alone."""
LINEAR_PATHS = [*(op.linear() for op in PATHS), OP["kl_div"].linear("student")]


def named(*names: str) -> list[Op]:
    return [op for op in OPS if op.name in names]


# ------------------------------------------------------------------ layouts


class Layout(NamedTuple):
    """The placements of logits: the shape of a mesh and a placement for each of its dims."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    def __str__(self) -> str:
        each = zip(self.mesh, self.placements, strict=True)
        return "-".join(f"{size}{f'S{p.dim}' if isinstance(p, Shard) else 'R'}" for size, p in each)

    def rows(self, ndim: int) -> tuple[Placement, ...]:
        """The placements of a tensor with one value per row, for logits with ``ndim`` dims."""
        return tuple(
            Shard(p.dim % ndim)
            if isinstance(p, Shard) and p.dim % ndim != ndim - 1
            else Replicate()
            for p in self.placements
        )

    def weight(self, ndim: int) -> tuple[Placement, ...]:
        """The placements of a weight ``[V, H]`` or a bias that makes logits with ``ndim`` dims."""
        return tuple(Shard(0) if self._is_vocab(p, ndim) else Replicate() for p in self.placements)

    def gradient(self, name: str, ndim: int) -> tuple[Placement, ...]:
        """The placements of the gradient of an input of an op."""
        if name in LOGITS:
            return self.placements
        rows = self.rows(ndim)
        vocab = [self._is_vocab(p, ndim) for p in self.placements]
        if name.endswith(".hidden"):
            return tuple(Partial() if v else row for v, row in zip(vocab, rows, strict=True))
        if "." in name:
            each = zip(self.weight(ndim), rows, strict=True)
            return tuple(Partial() if isinstance(row, Shard) else weight for weight, row in each)
        return rows

    @staticmethod
    def _is_vocab(placement: Placement, ndim: int) -> bool:
        return isinstance(placement, Shard) and placement.dim % ndim == ndim - 1

    @property
    def nowhere(self) -> tuple[Placement, ...]:
        """The placements of a tensor that is replicated on every mesh dim."""
        return (Replicate(),) * len(self.mesh)

    def shards_vocab(self, ndim: int) -> bool:
        """Whether more than one rank has a share of the vocabulary."""
        each = zip(self.mesh, self.placements, strict=True)
        return any(size > 1 and self._is_vocab(p, ndim) for size, p in each)


def tp(ranks: int) -> Layout:
    return Layout((ranks,), (Shard(-1),))


# ------------------------------------------------------------------ inputs


def draw(
    op: Op,
    rows: Sequence[int] = (6,),
    vocab: int = 10,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Inputs:
    """Random inputs over the whole vocabulary, in the order of the op's arguments."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for name in op.arguments:
        if name in LOGITS:
            logits = torch.randn(*rows, vocab, generator=generator, dtype=torch.float64)
            inputs[name] = (2 * logits).to(dtype)
        elif "." in name:
            operand = name.partition(".")[2]
            shape = {"hidden": (*rows, WIDTH), "weight": (vocab, WIDTH), "bias": (vocab,)}[operand]
            inputs[name] = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        elif name == "teacher_logprobs":
            logits = torch.randn(*rows, vocab, generator=generator, dtype=torch.float64)
            best = logits.log_softmax(-1).topk(min(op.ids[0], vocab))
            inputs[name] = best.values.to(dtype if dtype == torch.float64 else torch.float32)
        elif name == "teacher_ids":
            inputs[name] = best.indices
        else:
            inputs[name] = torch.randint(vocab, (*rows, *op.ids), generator=generator)
    return inputs


def upstream(outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns a gradient for each output of floating dtype, with values exact in every dtype."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(-8, 9, out.shape, generator=generator).to(out.dtype) / 4
        if out.dtype.is_floating_point
        else None
        for out in outputs
    ]


# ------------------------------------------------------------------ expected results


class Expected(NamedTuple):
    outputs: tuple[Tensor, ...]
    gradients: Inputs
    grads: Sequence[Tensor | None]
    """Upstream gradients, in the outputs' order."""


def expect(
    op: Op,
    inputs: Inputs,
    grads: Sequence[Tensor | None] | None = None,
    edit: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> Expected:
    """Returns the oracle's outputs and gradients in fp64.

    ``grads`` are the upstream gradients, None for random ones. ``edit`` changes each output before
    the backward pass.
    """
    leaves = {
        name: value.detach().double().requires_grad_() if name in op.differentiable else value
        for name, value in inputs.items()
    }
    outputs = _edited(op.oracle(*leaves.values(), **options), edit)
    grads = upstream(outputs) if grads is None else grads
    pairs = [
        (out, grad.double())
        for out, grad in zip(outputs, grads, strict=True)
        if grad is not None and out.requires_grad
    ]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))
    gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in leaves.items()
        if name in op.differentiable
    }
    return Expected(tuple(out.detach() for out in outputs), gradients, grads)


# ------------------------------------------------------------------ observed results


class Observed(NamedTuple):
    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]
    forward: list[Collective]
    backward: list[Collective]


def observe(
    op: Op,
    inputs: Inputs,
    mesh: DeviceMesh | None = None,
    layout: Layout | None = None,
    grads: Sequence[Tensor | None] = (),
    needs: Sequence[str] | None = None,
    edit: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> Observed:
    """Runs an op on plain tensors, or as DTensors on a mesh, forward and backward.

    ``grads`` are the upstream gradients and ``needs`` the names of the logits that require one.
    The caller draws all random values, which would differ by rank inside a simulated mesh.
    """
    placed = {name: place(name, value, mesh, layout, inputs) for name, value in inputs.items()}
    options = {
        name: place(name, value, mesh, layout, inputs) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    needs = op.differentiable if needs is None else needs
    for name in needs:
        placed[name].requires_grad_()
    with Collectives() as forward:
        outputs = op(*placed.values(), **options)
    assert all(isinstance(out, DTensor) == (mesh is not None) for out in outputs)
    if edit is not None:  # Autograd does not track views under the mode that counts collectives.
        outputs = _edited(op(*placed.values(), **options), edit)
    grads = [
        grad if grad is None else grad.to(out.dtype)
        for grad, out in zip(grads, outputs, strict=True)
    ]
    pairs = [
        (out, grad if mesh is None else distribute(grad, mesh, out.placements))
        for out, grad in zip(outputs, grads, strict=True)
        if grad is not None and out.requires_grad
    ]
    with Collectives() as backward:
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
    gradients = {name: placed[name].grad for name in needs}
    for name, grad in gradients.items():
        if mesh is not None and layout is not None and "." in name:
            gradients[name] = _reduced(name, grad, layout, inputs)
    return Observed(outputs, gradients, forward.seen, backward.seen)


def _reduced(name: str, grad: Tensor | None, layout: Layout, inputs: Inputs) -> Tensor:
    """Checks the placements of the gradient of an operand, and adds up its partial sums."""
    assert isinstance(grad, DTensor), f"no gradient of {name}"
    ndim = next(iter(inputs.values())).dim()
    assert_placement(grad, layout, layout.gradient(name, ndim), inputs[name].shape)
    whole = [Replicate() if p.is_partial() else p for p in grad.placements]
    return grad.redistribute(placements=whole)


def place(
    name: str, value: Tensor, mesh: DeviceMesh | None, layout: Layout | None, inputs: Inputs
) -> Tensor:
    """Returns an input as a new leaf, with per-row values placed like the rows of the logits."""
    if mesh is None or layout is None:
        return value.detach()
    if name in LOGITS:
        return distribute(value, mesh, layout.placements)
    ndim = next(iter(inputs.values())).dim()
    if name.endswith((".weight", ".bias")):
        return distribute(value, mesh, layout.weight(ndim))
    return distribute(value, mesh, layout.rows(ndim) if value.dim() else layout.nowhere)


# ------------------------------------------------------------------ the check


def check(
    op: Op,
    inputs: Inputs,
    layout: Layout | None = None,
    grads: Sequence[Tensor | None] | None = None,
    needs: Sequence[str] | None = None,
    edit: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> Observed:
    """Checks values, gradients, dtypes, placements and collectives against the oracle's."""
    expected = expect(op, inputs, grads, edit, **options)
    if layout is None:
        observed = observe(op, inputs, None, None, expected.grads, needs, edit, **options)
    else:
        with on_mesh(layout.mesh) as mesh:
            observed = observe(op, inputs, mesh, layout, expected.grads, needs, edit, **options)
    compare(op, inputs, layout, observed, expected)
    return observed


def compare(
    op: Op, inputs: Inputs, layout: Layout | None, observed: Observed, expected: Expected
) -> None:
    ndim = inputs[op.logits[0]].dim()
    wide = any(inputs[name].dtype == torch.float64 for name in op.logits)
    for out, value in zip(observed.outputs, expected.outputs, strict=True):
        if value.dtype.is_floating_point:
            assert out.dtype == (torch.float64 if wide else torch.float32)
        assert all(local.is_contiguous() for local in parts(out).values())
        placements = layout and (layout.rows(ndim) if value.dim() else layout.nowhere)
        _assert_placed(out, value, layout, placements)
    for name, grad in observed.gradients.items():
        assert grad is not None, f"no gradient of {name}"
        assert grad.dtype == inputs[name].dtype
        placements = layout and layout.gradient(name, ndim)
        if placements is not None:
            placements = [Replicate() if p.is_partial() else p for p in placements]
        equal = partial(oracle.assert_gradient, summed="." in name)
        _assert_placed(grad, expected.gradients[name], layout, placements, equal)
    sharded = layout is not None and layout.shards_vocab(ndim)
    forward = len(op.numbers) if sharded else 0
    if layout is not None and op.reduces_rows:  # sums over the rows of each mesh dim
        forward += sum(isinstance(p, Shard) for p in layout.rows(ndim))
    oracle.assert_collectives(observed.forward, forward)
    oracle.assert_collectives(observed.backward, 0)


def _assert_placed(
    actual: Tensor,
    expected: Tensor,
    layout: Layout | None,
    placements: Sequence[Placement] | None,
    equal: Callable[[Tensor, Tensor], None] = oracle.assert_values,
) -> None:
    """Compares a plain tensor with ``expected``, or each rank's part of a DTensor with its part."""
    if layout is None or placements is None:
        assert not isinstance(actual, DTensor)
        oracle.assert_parts({0: actual.detach()}, {0: expected}, equal)
        return
    assert_placement(actual, layout, placements, expected.shape)
    there = {
        rank: part(expected, layout.mesh, placements, rank)
        for rank in range(math.prod(layout.mesh))
    }
    oracle.assert_parts(parts(actual), there, equal)


def assert_placement(
    actual: Tensor, layout: Layout, placements: Sequence[Placement], shape: Sequence[int]
) -> None:
    """Checks the global shape, mesh and placements of a DTensor; ``Shard(-1)`` is the last dim."""
    assert isinstance(actual, DTensor), f"expected a DTensor, got {type(actual).__name__}"
    assert tuple(actual.shape) == tuple(shape), f"global shape {actual.shape}, expected {shape}"
    assert tuple(actual.device_mesh.shape) == layout.mesh
    wanted, got = (
        tuple(Shard(p.dim % actual.dim()) if isinstance(p, Shard) else p for p in each)
        for each in (placements, actual.placements)
    )
    assert got == wanted, f"placements {got}, expected {wanted}"


def _edited(
    outputs: tuple[Tensor, ...], edit: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, ...]:
    if edit is None:
        return outputs
    return tuple(edit(out) if out.dtype.is_floating_point else out for out in outputs)


def _joined(
    names: Sequence[str], inputs: Sequence[Tensor], linear: Callable[..., Any]
) -> list[Any]:
    """The arguments of an op, with ``linear`` of the operands in place of logits."""
    by_name = dict(zip(names, inputs, strict=True))
    joined: dict[str, Any] = {}
    for name, value in by_name.items():
        logits, _, operand = name.partition(".")
        if operand == "hidden":
            operands = (by_name.get(f"{logits}.{x}") for x in ("weight", "bias"))
            joined[logits] = linear(value, *operands)
        elif not operand:
            joined[name] = value
    return [*joined.values()]


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
