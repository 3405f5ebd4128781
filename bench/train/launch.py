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
"""How long a rank waits for its peers: they may have kernels to compile."""


def launch(fn: Callable[..., Any], ranks: int, device: str, *args: Any) -> list[Any]:
    """``fn(*args)`` of every rank, each a process: NCCL and a GPU each on cuda, else gloo.

    ``fn`` is a function of a module's top level. If a rank fails the others are killed, and its
    error is raised here.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (fn, ranks, device, folder, args), nprocs=ranks)
        return [torch.load(_result(folder, rank), weights_only=False) for rank in range(ranks)]


def _run(
    rank: int, fn: Callable[..., Any], ranks: int, device: str, folder: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # it advises on the order of the all-gathers with which weights are collected at the end
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
