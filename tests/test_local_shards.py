"""``logits_from_local``: plain local shards as DTensor logits, of even and uneven widths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import dtensor_vocab as dv
from tests.oracle import assert_values
from tests.ranks import World, on_mesh
from tests.step import compiled

pytestmark = [pytest.mark.usefixtures("eager_kernels")]


def share(x: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    width = -(-x.shape[-1] // ranks)
    return x[..., rank * width : (rank + 1) * width].contiguous()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("columns", [8, 9, 1])
def test_shards_of_any_width_give_the_whole(columns: int, backend: str | None) -> None:
    logits, index = torch.randn(3, 4, columns), torch.randint(columns, (3, 4))
    whole = logits.clone().requires_grad_()
    expected = dv.logprobs(whole, index)
    expected.sum().backward()
    with on_mesh((2,)) as mesh:
        local = share(logits, 2, World.current.rank).requires_grad_()

        def loss(local: torch.Tensor) -> torch.Tensor:
            sharded = dv.logits_from_local(local, mesh, columns)
            assert sharded.shape == logits.shape and sharded.placements == (Shard(2),)
            return dv.logprobs(sharded, index).to_local()

        out = (loss if backend is None else compiled(loss, backend=backend))(local)
        out.sum().backward()
    assert_values(out.detach(), expected.detach().double())
    assert_values(local.grad, share(whole.grad, 2, World.current.rank).double())


@pytest.mark.ranks(2)
def test_share_of_another_width_raises_on_all_ranks() -> None:
    with on_mesh((2,)) as mesh:
        local = torch.randn(3, (5, 3)[World.current.rank])
        logits = dv.logits_from_local(local, mesh, 9)
        with pytest.raises(RuntimeError, match=r"entropy: expected each rank to hold the torch\."):
            dv.entropy(logits)


@pytest.mark.parametrize(
    "args, kind, text",
    [
        ({"local": 3}, TypeError, "local to be a plain Tensor, got int"),
        ({"local": torch.tensor(1.0)}, ValueError, r"local of shape \[\*, V_local\], got \[\]"),
        ({"mesh": "tp"}, TypeError, "mesh to be a DeviceMesh, got str"),
        ({"mesh": (2, 2)}, ValueError, "a 1-D mesh"),
        ({"columns": 9.0}, TypeError, "columns to be an int, got float"),
        ({"columns": 0}, ValueError, "columns > 0, got 0"),
    ],
    ids=str,
)
def test_invalid_arguments(args: dict[str, Any], kind: type[Exception], text: str) -> None:
    with on_mesh(args["mesh"] if args.get("mesh") == (2, 2) else (2,)) as mesh:
        given = {"local": torch.randn(3, 5), "columns": 9, **args}
        given["mesh"] = args["mesh"] if args.get("mesh") == "tp" else mesh
        with pytest.raises(kind, match=f"^logits_from_local: expected {text}"):
            dv.logits_from_local(**given)
