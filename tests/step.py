"""A training step around an op: LM heads compute the logits, a masked loss sums the results."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import dtensor_vocab as dv
from tests.ops import LOGITS, OPS, Op, draw
from tests.ranks import distribute

ONE_EACH = list({op.name: op for op in OPS}.values())
"""One op for each public function."""

WIDTH = 4


class Batch(NamedTuple):
    """Arguments of a loss."""

    hidden: Tensor
    """Hidden states ``[*, WIDTH]``, the input of the heads."""
    heads: tuple[Tensor, ...]
    """Weights ``[V, WIDTH]`` of one or two LM heads."""
    others: tuple[Tensor, ...]
    """The op's arguments other than logits, ``[*]`` or ``[*, K]``."""
    mask: Tensor
    """True for the rows that the loss counts, ``[*]``."""

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.hidden, *self.heads) if x.requires_grad)


def draw_batch(
    op: Op,
    rows: Sequence[int] = (6,),
    vocab: int = 11,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    mesh: DeviceMesh | None = None,
    row_placements: Sequence[Placement] = (),
    place: Callable[..., Tensor] = distribute,
    seed: int = 0,
) -> Batch:
    """Draws random arguments, with some ids ignored.

    On ``mesh``, the heads are sharded over the last mesh dim, and ``row_placements`` are the
    placements of the rows on the other mesh dims.
    """
    inputs = draw(op, rows, vocab, seed=seed)
    if op.ids_name:
        inputs[op.ids_name][1::4] = -100
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*rows, WIDTH, generator=generator).to(device, dtype)
    heads = [torch.randn(vocab, WIDTH, generator=generator).to(device, dtype) for _ in op.logits]
    others = [value.to(device) for name, value in inputs.items() if name not in LOGITS]
    mask = torch.arange(hidden[..., 0].numel(), device=device).view(*rows) % 3 > 0
    if mesh is not None:
        by_row = [*row_placements, Replicate()]
        by_column = [*[Replicate() for _ in row_placements], Shard(0)]
        hidden, mask, *others = (place(x, mesh, by_row) for x in (hidden, mask, *others))
        heads = [place(x, mesh, by_column) for x in heads]
    heads = [head.requires_grad_() for head in heads]
    return Batch(hidden.requires_grad_(), tuple(heads), tuple(others), mask)


def loss_of(op: Op) -> Callable[..., Tensor]:
    """Returns a function of a batch that computes logits, calls the op and sums unmasked results.

    The logits of a head that needs no gradient are constants.
    """
    function, options = getattr(dv, op.name), dict(op.options)

    def loss(
        hidden: Tensor, heads: Sequence[Tensor], others: Sequence[Tensor], mask: Tensor
    ) -> Tensor:
        logits = [(hidden if head.requires_grad else hidden.detach()) @ head.t() for head in heads]
        outputs = function(*logits, *others, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        losses = [_masked_sum(out, mask) for out in outputs if out.is_floating_point()]
        return sum(losses[1:], losses[0]) if losses else outputs[0]

    return loss


def _masked_sum(out: Tensor, mask: Tensor) -> Tensor:
    if out.dim() > mask.dim():
        mask = mask.unsqueeze(-1)
    return (out * mask).sum() if out.dim() else out


def run_step(loss: Callable[..., Tensor], batch: Batch) -> list[Tensor]:
    """Returns the loss and, if it has a gradient, the gradients of the leaves."""
    value = loss(*batch)
    if not value.requires_grad:
        return [value]
    return [value.detach(), *torch.autograd.grad(value, batch.leaves)]


_NUMBER = itertools.count()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiles a copy of a function in one graph, independently of earlier tests.

    Dynamo counts recompilations per code object, and identifies by the function's name and
    position in its file which sizes to make dynamic. So the copy has a name of its own.
    """
    name = f"{function.__name__}_{next(_NUMBER)}"
    code = function.__code__.replace(co_name=name)
    copy = types.FunctionType(code, function.__globals__, name, None, function.__closure__)
    return torch.compile(copy, fullgraph=True, **options)
