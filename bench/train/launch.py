"""Runs a function on several ranks of this machine."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["launch"]

TIMEOUT = timedelta(minutes=2)
"""How long a rank waits for its peers, which may have to compile kernels."""


def launch(fn: Callable[..., Any], ranks: int, device: str, *args: Any) -> list[Any]:
    """Runs ``fn(*args)`` in one process per rank and returns the results in the order of ranks.

    Ranks have a GPU each and NCCL if ``device`` is cuda, otherwise gloo. ``fn`` must be defined at
    the top level of a module. If a rank fails, the others are killed and its error is raised here.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (fn, ranks, device, folder, args), nprocs=ranks)
        return [torch.load(_result(folder, rank), weights_only=False) for rank in range(ranks)]


def _run(
    rank: int, fn: Callable[..., Any], ranks: int, device: str, folder: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Hide the advice on the order of the all-gathers that collect the final weights.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=TIMEOUT,
    )
    torch.save(fn(*args), _result(folder, rank))
    dist.destroy_process_group()


def _result(folder: str, rank: int) -> str:
    return os.path.join(folder, f"{rank}.pt")
