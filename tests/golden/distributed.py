"""A distributed checkpoint: what two ranks save together. Small, because tests flip every byte of it."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from recipe import golden
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing import start_processes

RANKS = 2
MEETING = "ranks.tmp"
"""The file by which the ranks find each other."""


def save_rank(rank: int, target: str) -> None:
    """One rank's part. The name of a save is random; here it is always the same."""
    uuid.uuid4 = lambda: uuid.UUID(int=0)
    dist.init_process_group(
        "gloo", init_method=f"file://{os.path.abspath(MEETING)}", rank=rank, world_size=RANKS
    )
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = (torch.arange(9, dtype=torch.float32) / 2).reshape(3, 3)
    dcp.save(
        {"model": {"w": distribute_tensor(whole, mesh, [Shard(1)])}, "steps": [3]},
        checkpoint_id=target,
    )
    dist.destroy_process_group()


@golden(
    "dcp",
    "dcp",
    "a distributed checkpoint of two ranks: a tensor cut into columns, two and one, and a value",
)
def _dcp(path: Path) -> object:
    target = os.path.relpath(path)  # it stands in the metadata
    start_processes(save_rank, (target,), nprocs=RANKS, start_method="spawn")
    Path(MEETING).unlink(missing_ok=True)
    dcp_to_torch_save(path, loaded := path.with_suffix(".tmp"))
    try:
        return torch.load(loaded)
    finally:
        os.remove(loaded)
