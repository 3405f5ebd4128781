"""``LinearLogits``: logits given as the operands of a linear layer instead of as a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "LinearLogits",
    "Logits",
    "OnMesh",
    "cast_by_autocast",
    "is_dtensor",
    "joined",
    "needed",
    "separate",
]


class LinearLogits(NamedTuple):
    """Stands for ``F.linear(hidden, weight, bias)`` where an op takes logits.

    It holds its operands and computes nothing. An op computes a block of the logits at a time,
    forward and again backward, so that ``[*, V_local]`` is never held. Blocks are rounded to the
    dtype of ``F.linear``, so values agree with those on its result to rounding.

    Slice an operand, not this object, as in ``LinearLogits(hidden[:, :-1], weight)``. It is a
    tuple, and ``logits[:2]`` would be two of its operands.

    Args:
        hidden: ``[*, H]``, fp16, bf16, fp32 or fp64, any strides; Tensor or DTensor.
        weight: ``[V, H]``, such as ``lm_head.weight``; a DTensor if ``hidden`` is one.
        bias: ``[V]``, placed like ``weight``, or None. All operands have the same dtype. Under
            autocast, ops cast them as ``F.linear`` does.

    Placements, and those of the gradients:

    ==============================  =============  =============  =============  =============
    mesh dim                        ``hidden``     its gradient   ``weight``     its gradient
    ==============================  =============  =============  =============  =============
    shards V (at most one)          ``Replicate``  ``Partial``    ``Shard(0)``   ``Shard(0)``
    shards a leading dim ``d``      ``Shard(d)``   ``Shard(d)``   ``Replicate``  ``Partial``
    shards nothing                  ``Replicate``  ``Replicate``  ``Replicate``  ``Replicate``
    ==============================  =============  =============  =============  =============

    These are the placements that ``F.linear`` of DTensors gives. ``bias`` and its gradient are
    placed like ``weight``.

    Memory: beside operands, gradients and results, an op holds blocks of at most 32 MiB of logits
    altogether and, backward, one accumulator of ``[rows, H]``, or of ``[V_local, H]`` if there are
    more rows than columns, in fp32 (fp64 for fp64). On CPUs, sums of 16-bit products take buffers
    for parts of the operands and of the sum. An operand that needs no gradient costs neither time
    nor memory. Operands that autocast casts are copied, and so is a ``hidden`` that has no view as
    ``[rows, H]``.

    Rows: as for logits, except that gradients of operands are matrix products, in which 0 times NaN
    is NaN. ``hidden`` and ``weight`` must therefore be finite in ignored rows and in padding too.
    The bias may hold -inf.

    Communication: that of the op. Nothing adds up ``Partial`` gradients; the layer before the head
    does, as after ``F.linear``.

    With FSDP2, return it from the root module, or compute the loss in the module that holds the
    weight, since other modules free their weights after forward. Return a view of the weight
    (``weight.view_as(weight)``), because FSDP2 adds a hook to each tensor that its root returns.

    Raises:
        Nothing when it is made. An op raises TypeError or ValueError that names the operand,
        ValueError for ``inplace_backward=True``, and NotImplementedError under ``torch.vmap``.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """``[*, V]``."""
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that ``F.linear`` of the operands has in the current state of autocast."""
        return _autocast_dtype(self.hidden)

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def device_mesh(self) -> DeviceMesh:
        return self.hidden.device_mesh  # type: ignore[attr-defined]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements of the logits."""
        vocab = Shard(self.dim() - 1)
        placements = zip(self.hidden.placements, self.weight.placements, strict=True)  # type: ignore[attr-defined]
        return tuple(vocab if isinstance(w, Shard) else h for h, w in placements)

    def dim(self) -> int:
        return self.hidden.dim()


Logits: TypeAlias = Tensor | LinearLogits


class OnMesh(Protocol):
    """A DTensor of logits, or ``LinearLogits`` of DTensors."""

    @property
    def device(self) -> torch.device: ...
    @property
    def device_mesh(self) -> DeviceMesh: ...
    @property
    def placements(self) -> tuple[Placement, ...]: ...
    @property
    def shape(self) -> torch.Size: ...
    def dim(self) -> int: ...


def is_dtensor(logits: Logits) -> TypeGuard[OnMesh]:
    return isinstance(logits.hidden if isinstance(logits, LinearLogits) else logits, DTensor)


def separate(logits: Logits | None) -> tuple[Tensor | None, ...]:
    """Three arguments of an operator or of autograd: the operands, or (logits, None, None)."""
    return tuple(logits) if isinstance(logits, LinearLogits) else (logits, None, None)


def joined(args: Sequence[Any]) -> Logits:
    """The inverse of :func:`separate`."""
    return args[0] if args[1] is None else LinearLogits(*args)


def needed(gradients: Sequence[Tensor], needs: Sequence[bool]) -> list[Any]:
    """The gradients, with None for those that are not needed."""
    return [grad if need else None for grad, need in zip(gradients, needs, strict=True)]


def cast_by_autocast(logits: LinearLogits) -> LinearLogits:
    """The operands in the dtypes that ``F.linear`` would cast them to."""
    hidden, weight, bias = logits
    bias = bias if bias is None else bias.to(_autocast_dtype(bias))
    return LinearLogits(hidden.to(logits.dtype), weight.to(_autocast_dtype(weight)), bias)


def _autocast_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64:  # Autocast has no dtype for these.
        return x.dtype
    if not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)
