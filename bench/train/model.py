"""A small decoder language model in plain PyTorch, and its layout over a dp × tp mesh."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dtensor_vocab as dv

__all__ = ["Decoder", "parallelize"]

HEAD_DIM = 32


class Decoder(nn.Module):
    """Token ids ``[B, S]`` to logits ``[B, S, V]`` of the tokens that follow, or to
    ``LinearLogits`` of that shape.
    """

    def __init__(self, vocab: int, dim: int, layers: int, linear: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = (LinearHead if linear else nn.Linear)(dim, vocab, bias=False)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        nn.init.normal_(self.head.weight, std=dim**-0.5 / 10)  # Probabilities start nearly uniform.

    def forward(self, tokens: Tensor) -> Tensor | dv.LinearLogits:
        # The usual scale of embeddings. It also waits for the embedding's collective: backward of
        # a compiled block returns no gradient for a tensor that is still in flight.
        x = self.embedding(tokens) * self.embedding.embedding_dim**0.5
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LinearHead(nn.Linear):
    """A head that leaves its product to the ops."""

    def forward(self, hidden: Tensor) -> dv.LinearLogits:
        # FSDP2 adds a hook to each tensor that the root returns, so return a new view of the weight
        # (torch 2.11 to 2.14). On the weight itself the hooks of all steps would stay.
        return dv.LinearLogits(hidden, self.weight.view_as(self.weight))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim)
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp = Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Each rank holds whole heads, since it holds columns of the projections.
        query, key, value = (
            project(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        x = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.output(x.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


def rotate(x: Tensor) -> Tensor:
    """Applies rotary position embeddings, which have no weights, to ``[B, heads, S, HEAD_DIM]``."""
    half = HEAD_DIM // 2
    position = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    frequency = 1e-3 ** (torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = position.unsqueeze(-1) * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def parallelize(model: Decoder, mesh: DeviceMesh, bf16: bool, compile: bool) -> Decoder:
    """Distributes the model over ``mesh`` (dp × tp), in place.

    tp shards columns or rows of the weight matrices, and the sequence between them. The head's
    output stays a DTensor that shards the vocabulary. FSDP2 shards over dp, and casts to bf16.
    """
    gathered = PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
    )
    block = {
        "attention_norm": SequenceParallel(),
        "attention": gathered,
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": gathered,
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        **{f"blocks.*.{name}": style for name, style in block.items()},
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if isinstance(
        model.head, LinearHead
    ):  # ColwiseParallel expects a module that returns a tensor.
        weight = distribute_tensor(model.head.weight, mesh["tp"], [Shard(0)])
        model.head.weight = nn.Parameter(weight)
        plan["head"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    parallelize_module(model, mesh["tp"], plan)
    if compile:
        for layer in model.blocks:
            layer.compile(fullgraph=True)
    if bf16 or mesh["dp"].size() > 1:
        policy = MixedPrecisionPolicy()
        if bf16:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
    return model
