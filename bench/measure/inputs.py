"""The inputs of a case: the same on every rank and in every process that measures it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from bench.measure.ops import OPS

if TYPE_CHECKING:
    from bench.measure.cases import Case

__all__ = ["local_part", "make", "place", "placement", "upstream", "vocab_dim"]

STEP_WIDTH = 64
"""Width of the hidden states of ``step``."""
ON_MESH = ("logits", "student", "teacher", "hidden", "weight", "mask")
"""The inputs that are DTensors on several ranks. The others are plain and equal on all ranks."""
NAMES = (*ON_MESH, "index", "target", "teacher_ids", "teacher_logprobs")


def make(case: Case, name: str, device: torch.device) -> Tensor:
    """An input over the whole vocabulary."""
    op = OPS[case.op]
    *rows, vocab = case.shape
    width = op.hidden or STEP_WIDTH
    random = torch.Generator(device).manual_seed(NAMES.index(name))

    def normal(*shape: int, std: float, dtype: str = case.dtype) -> Tensor:
        values = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        return values.normal_(0, std, generator=random)

    match name:
        case "index" | "target":
            shape = rows if op.k is None else [*rows, op.k]
            return torch.randint(vocab, shape, generator=random, device=device)
        case "teacher_ids":
            return _distinct_ids(rows, op.k, vocab, random)
        case "teacher_logprobs":  # The last log-probability is that of all other tokens.
            return normal(*rows, op.k + 1, std=1, dtype="float32").log_softmax(-1)[..., :-1]
        case "mask":
            return torch.rand(rows, generator=random, device=device).round()
        case "hidden":
            return normal(*rows, width, std=1)
        case "weight":
            return normal(vocab, width, std=3 * width**-0.5)
        case _:
            if op.sliced:
                return normal(rows[0], rows[1] + 1, vocab, std=3)[:, :-1]
            logits = normal(*rows, vocab, std=3)
            return _with_distinct_highest(logits, op.k or 1, random) if op.distinct else logits


def _distinct_ids(rows: list[int], k: int, vocab: int, random: torch.Generator) -> Tensor:
    first = torch.randint(vocab, (*rows, 1), generator=random, device=random.device)
    return (first + torch.arange(k, device=random.device) * (vocab // k)) % vocab


def _with_distinct_highest(logits: Tensor, k: int, random: torch.Generator) -> Tensor:
    """Makes the highest logits differ. In half precision some would be equal, so that providers may
    select different ones.
    """
    *rows, vocab = logits.shape
    highest = 8.5 + torch.arange(k, device=logits.device) / 16  # exact in bfloat16
    ids = _distinct_ids(rows, k, vocab, random)
    return logits.clamp_(max=8).scatter_(-1, ids, highest.to(logits.dtype).expand(ids.shape))


def place(name: str, full: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """An input as the ops take it: on several ranks, a DTensor that may shard the vocabulary."""
    if mesh is None or name not in ON_MESH:
        return full
    dim = vocab_dim(name, full)
    part = full if dim is None else local_part(full, dim, mesh).clone()
    return DTensor.from_local(
        part, mesh, [placement(dim)], run_check=False, shape=full.shape, stride=full.stride()
    )


def placement(dim: int | None) -> Placement:
    return Replicate() if dim is None else Shard(dim)


def vocab_dim(name: str, full: Tensor) -> int | None:
    """The dim of an input, and of its gradient, that is the vocabulary."""
    if name == "weight":
        return 0
    return full.dim() - 1 if name in ("logits", "student", "teacher") else None


def local_part(full: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This rank's part of a tensor that is sharded along ``dim``."""
    size = -(-full.shape[dim] // mesh.size())
    start = min(mesh.get_local_rank() * size, full.shape[dim])
    return full.narrow(dim, start, min(size, full.shape[dim] - start))


def upstream(outputs: Sequence[Tensor]) -> list[Tensor]:
    """A gradient for each output, with the placements of the output."""
    return [_like(output, seed) for seed, output in enumerate(outputs)]


def _like(output: Tensor, seed: int) -> Tensor:
    random = torch.Generator(output.device).manual_seed(seed)
    grad = torch.empty(output.shape, dtype=output.dtype, device=output.device)
    grad.normal_(generator=random)
    if isinstance(output, DTensor):
        return DTensor.from_local(grad, output.device_mesh, output.placements, run_check=False)
    return grad
