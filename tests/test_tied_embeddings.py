"""A model that ties its head to its embedding, with the README's plan and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import dtensor_vocab as dv
from bench import naive
from tests.ranks import on_mesh

STEPS, VOCAB, WIDTH = 5, 101, 16

pytestmark = [pytest.mark.ranks(2), pytest.mark.usefixtures("eager_kernels")]


class Tied(nn.Module):
    """A model of an embedding, a layer and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.tie()

    def tie(self) -> None:
        self.embed.weight = self.lm_head.weight

    @property
    def is_tied(self) -> bool:
        return self.embed.weight is self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.layer(self.embed(tokens)).tanh())


def train_tied(model: Tied, ops: Any) -> list[float]:
    """Trains on the next token by gradient descent, and returns the loss of each step."""
    tokens = torch.randint(VOCAB, (4, 9), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    losses = []
    for _ in range(STEPS):
        loss = -ops.logprobs(model(tokens[:, :-1]), tokens[:, 1:]).mean()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(mesh: DeviceMesh, **plan: ParallelStyle) -> Tied:
    head = ColwiseParallel(use_local_output=False)
    return parallelize_module(Tied(), mesh, {"lm_head": head, **plan})


def test_tied_again_trains_as_on_one_process() -> None:
    one = Tied()
    expected = train_tied(one, naive)
    assert expected[-1] < expected[0] - 0.5
    with on_mesh((2,)) as mesh:
        model = sharded(mesh, embed=RowwiseParallel(input_layouts=Replicate()))
        assert not model.is_tied
        model.tie()
        losses = train_tied(model, dv)
        assert model.is_tied and model.embed.weight.placements == (Shard(0),)
        weight = model.embed.weight.full_tensor()
    assert losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(weight, one.embed.weight, rtol=1e-4, atol=1e-5)


def test_plan_without_the_embedding_unties_the_head() -> None:
    """The README warns of this. If it fails, torch keeps weights tied, and the warning can go."""
    expected = train_tied(Tied(), naive)
    with on_mesh((2,)) as mesh:
        model = sharded(mesh)
        assert not model.is_tied
        losses = train_tied(model, dv)
    assert losses[0] == pytest.approx(expected[0], rel=1e-5)
    assert abs(losses[-1] - expected[-1]) > 0.01
