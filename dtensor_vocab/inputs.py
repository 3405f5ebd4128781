"""Checks what a user passes, from global metadata alone, and brings it into one form.

All ranks see the same metadata, so all raise the same error, before anything is communicated.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_vocab.rows import math_dtype

__all__ = ["Vocabulary", "check_ids", "check_ignore_index", "check_logits", "check_same_layout", "check_temperature"]

LOGITS_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Vocabulary(NamedTuple):
    """How the columns of the logits lie: arguments that the operators take together."""

    start: Tensor
    """``[shards]``, the first column of each shard; a DTensor where the logits are."""
    columns: int
    """Columns of the logits, over all shards."""
    shard_size: int
    """Columns of a full shard."""
    size: int
    """Columns that are tokens; the rest is padding."""


def check_logits(function: str, logits: Tensor, vocab_size: int | None, name: str = "logits") -> Vocabulary:
    """Checks logits and ``vocab_size``, and says where the vocabulary lies."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"{function}: expected {name} to be a Tensor or DTensor, got {type(logits).__name__}")
    if logits.dtype not in LOGITS_DTYPES:
        raise TypeError(
            f"{function}: expected {name} of dtype float16, bfloat16, float32 or float64, got {logits.dtype}"
        )
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"{function}: expected {name} of shape [*, V] with V > 0, got {tuple(logits.shape)}")
    columns = logits.shape[-1]
    if vocab_size is None:
        vocab_size = columns
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool):
        raise TypeError(f"{function}: expected vocab_size to be an int or None, got {type(vocab_size).__name__}")
    if not 0 < vocab_size <= columns:
        raise ValueError(f"{function}: expected 0 < vocab_size <= {columns} columns, got {vocab_size}")
    if not isinstance(logits, DTensor):
        start = torch.zeros(1, dtype=torch.int64, device=logits.device)
        return Vocabulary(start, columns, columns, vocab_size)

    mesh = logits.device_mesh
    vocab_dim = _vocab_mesh_dim(function, logits, name)
    shards = 1 if vocab_dim is None else mesh.size(vocab_dim)
    shard_size = -(-columns // shards)
    rank = 0 if vocab_dim is None else mesh.get_local_rank(vocab_dim)
    start = torch.full((1,), rank * shard_size, dtype=torch.int64, device=logits.device)
    placements = [Shard(0) if i == vocab_dim else Replicate() for i in range(mesh.ndim)]
    start = DTensor.from_local(start, mesh, placements, run_check=False, shape=torch.Size((shards,)), stride=(1,))
    return Vocabulary(start, columns, shard_size, vocab_size)


def _vocab_mesh_dim(function: str, logits: DTensor, name: str) -> int | None:
    """The mesh dim that shards the vocabulary, or None; an error for layouts that aren't supported."""
    found = None
    for mesh_dim, placement in enumerate(logits.placements):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            problem, cure = "are Partial", "redistribute them to Shard(-1) or Replicate()"
        elif type(placement) is not Shard:
            problem, cure = "are not plainly sharded", "redistribute them to Shard(-1)"
        elif placement.dim % logits.dim() != logits.dim() - 1:
            continue
        elif found is not None:
            problem, cure = "have the vocabulary on two mesh dims", "redistribute one to Replicate()"
        else:
            found = mesh_dim
            continue
        raise ValueError(
            f"{function}: expected {name} with the vocabulary as Shard(-1) on at most one mesh dim and "
            f"Replicate() or Shard(leading dim) on the others, got {tuple(logits.placements)} on "
            f"{logits.device_mesh}: they {problem}; {cure}"
        )
    return found


def check_ids(function: str, index: Tensor, logits: Tensor, name: str = "index", k_axis: bool = True) -> Tensor:
    """Checks ids ``[*]`` (or ``[*, K]``) for logits ``[*, V]``; a DTensor where the logits are."""
    if not isinstance(index, Tensor):
        raise TypeError(f"{function}: expected {name} to be a Tensor or DTensor, got {type(index).__name__}")
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{function}: expected {name} of dtype int32 or int64, got {index.dtype}")
    shape = tuple(index.shape)
    rows = tuple(logits.shape[:-1])
    if shape != rows and not (k_axis and shape[:-1] == rows and len(shape) == len(rows) + 1):
        either = f"{rows} or {rows} + (K,)" if k_axis else f"{rows}"
        raise ValueError(
            f"{function}: expected {name} of shape {either} for logits of shape {tuple(logits.shape)}, got {shape}"
        )
    return _beside(function, index, logits, name)


def check_ignore_index(function: str, ignore_index: int | None) -> None:
    if ignore_index is not None and (not isinstance(ignore_index, int) or isinstance(ignore_index, bool)):
        raise TypeError(f"{function}: expected ignore_index to be an int or None, got {type(ignore_index).__name__}")


def check_temperature(function: str, temperature: float | Tensor, logits: Tensor) -> Tensor | None:
    """A temperature as a tensor, 0-d or ``[*]``; None for 1."""
    if isinstance(temperature, Tensor):
        if not temperature.dtype.is_floating_point:
            raise TypeError(f"{function}: expected temperature of a floating dtype, got {temperature.dtype}")
        if tuple(temperature.shape) != tuple(logits.shape[:-1]):
            raise ValueError(
                f"{function}: expected temperature to be a float or of shape {tuple(logits.shape[:-1])}, "
                f"one per position, got {tuple(temperature.shape)}"
            )
        if temperature.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{function}: expected temperature to need no gradient, got requires_grad=True; detach it")
        return _beside(function, temperature, logits, "temperature")
    if not isinstance(temperature, (int, float)) or isinstance(temperature, bool):
        raise TypeError(f"{function}: expected temperature to be a float or a Tensor, got {type(temperature).__name__}")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"{function}: expected temperature > 0, got {temperature}")
    if temperature == 1:
        return None
    scalar = torch.full((), temperature, dtype=math_dtype(logits.dtype), device=logits.device)
    return _replicated(scalar, logits) if isinstance(logits, DTensor) else scalar


def check_same_layout(function: str, student: Tensor, teacher: Tensor) -> None:
    """Checks that two logits, each sound alone, are columns and rows of one layout."""
    for what, mine, other in (
        ("shape", tuple(student.shape), tuple(teacher.shape)),
        ("device", student.device, teacher.device),
        ("type", *("DTensor" if isinstance(t, DTensor) else "Tensor" for t in (student, teacher))),
    ):
        if mine != other:
            raise ValueError(
                f"{function}: expected student and teacher of the same {what}, got {mine} and {other}"
            )
    if isinstance(student, DTensor) and isinstance(teacher, DTensor):
        if student.device_mesh != teacher.device_mesh or student.placements != teacher.placements:
            raise ValueError(
                f"{function}: expected student and teacher on the same mesh with the same placements, got "
                f"{student.placements} on {student.device_mesh} and {teacher.placements} on "
                f"{teacher.device_mesh}; redistribute one of them"
            )


def _beside(function: str, values: Tensor, logits: Tensor, name: str) -> Tensor:
    """A per-row tensor on the logits' device and mesh."""
    if values.device != logits.device:
        raise ValueError(f"{function}: expected {name} on {logits.device} as the logits, got {values.device}")
    if not isinstance(logits, DTensor):
        if isinstance(values, DTensor):
            raise ValueError(
                f"{function}: expected {name} to be a Tensor as the logits are, got a DTensor on {values.device_mesh}"
            )
        return values
    if isinstance(values, DTensor):
        if values.device_mesh != logits.device_mesh:
            raise ValueError(
                f"{function}: expected {name} on the logits' {logits.device_mesh}, got it on {values.device_mesh}"
            )
        return values
    vocab = logits.dim() - 1
    for placement in logits.placements:
        if type(placement) is Shard and placement.dim % logits.dim() != vocab:
            raise ValueError(
                f"{function}: expected {name} to be a DTensor, since the logits shard a leading dim "
                f"({tuple(logits.placements)} on {logits.device_mesh}), got a Tensor, which could be "
                "the local or the global one; wrap it with DTensor.from_local or distribute_tensor"
            )
    return _replicated(values, logits)


def _replicated(values: Tensor, logits: DTensor) -> DTensor:
    mesh = logits.device_mesh
    return DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
