"""A training step round an op: LM heads make the logits, a masked loss takes the results."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import dtensor_vocab as dv
from tests.ops import LOGITS, Op, draw
from tests.ranks import distribute

WIDTH = 4


class Batch(NamedTuple):
    """Arguments of a loss."""

    hidden: Tensor
    """``[*, WIDTH]``, that one or two heads ``[V, WIDTH]`` are applied to."""
    heads: tuple[Tensor, ...]
    others: tuple[Tensor, ...]
    """Ids and the like, ``[*]`` or ``[*, K]``."""
    mask: Tensor
    """``[*]``."""

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.hidden, *self.heads


def draw_batch(
    op: Op,
    rows: Sequence[int] = (6,),
    vocab: int = 11,
    mesh: DeviceMesh | None = None,
    row_placements: Sequence[Placement] = (),
    seed: int = 0,
) -> Batch:
    """Random arguments, on ``mesh`` with the heads sharded over its last dim.

    ``row_placements`` are those of the rows on the mesh dims before it.
    """
    others = draw(op, rows, vocab, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*rows, WIDTH, generator=generator)
    heads = [torch.randn(vocab, WIDTH, generator=generator) for _ in op.logits]
    others = [value for name, value in others.items() if name not in LOGITS]
    mask = torch.arange(hidden[..., 0].numel()).view(*rows) % 3 > 0
    if mesh is not None:
        everywhere = [Replicate()] * len(row_placements)
        by_row = [*row_placements, Replicate()]
        hidden, mask = (distribute(x, mesh, by_row) for x in (hidden, mask))
        others = [distribute(x, mesh, by_row) for x in others]
        heads = [distribute(x, mesh, [*everywhere, Shard(0)]) for x in heads]
    return Batch(
        hidden.requires_grad_(), tuple(x.requires_grad_() for x in heads), tuple(others), mask
    )


def loss_of(op: Op) -> Callable[..., Tensor]:
    """A function of a batch: the op on logits made inside of it, what is masked left out."""
    function, options = getattr(dv, op.name), dict(op.options)

    def loss(
        hidden: Tensor, heads: Sequence[Tensor], others: Sequence[Tensor], mask: Tensor
    ) -> Any:
        outputs = function(*(hidden @ head.t() for head in heads), *others, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        losses = [masked(out, mask) for out in outputs if out.is_floating_point()]
        return sum(losses) if losses else outputs[0]

    return loss


def masked(out: Tensor, mask: Tensor) -> Tensor:
    if out.dim() > mask.dim():
        mask = mask.unsqueeze(-1)
    return (out * mask).sum() if out.dim() else out


def train(loss: Callable[..., Tensor], batch: Batch) -> list[Tensor]:
    """The loss and, where it has them, the gradients of the leaves."""
    value = loss(*batch)
    if not value.requires_grad:
        return [value]
    return [value.detach(), *torch.autograd.grad(value, batch.leaves)]


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``torch.compile`` in one graph, with recompilations counted from zero.

    Dynamo counts them by code object, so that without a copy tests would use up each other's.
    """
    code = function.__code__.replace()
    copy = types.FunctionType(
        code, function.__globals__, function.__name__, None, function.__closure__
    )
    return torch.compile(copy, fullgraph=True, **options)
