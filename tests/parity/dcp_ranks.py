"""What several ranks save with torch's own distributed checkpoint: run in processes of its own, by `test_dcp_directories`."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from holdfast.torch import versions

__all__ = ["WHOLE", "save_all"]

WHOLE = {
    "row": torch.arange(40.0).reshape(10, 4),
    "col": torch.arange(40.0).reshape(4, 10),
    "deep": torch.arange(2 * 5 * 3, dtype=torch.bfloat16).reshape(2, 5, 3),
    "tiny": torch.arange(4.0).reshape(1, 4),
    "rep": torch.arange(6.0),
    "plain": torch.arange(5),
}
"""What the sharded tensors are, in one piece. Ten rows on three ranks are 4, 4 and 2; one row leaves all others with none."""

PLACEMENTS = {
    "row": Shard(0),
    "col": Shard(1),
    "deep": Shard(1),
    "tiny": Shard(0),
    "rep": Replicate(),
}


def save_all(rank: int, ranks: int, folder: str) -> None:
    """Save one state in every way that torch has."""
    warnings.simplefilter("ignore")
    place = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{place}/init", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    state: dict[str, object] = {
        name: distribute_tensor(WHOLE[name], mesh, [how]) for name, how in PLACEMENTS.items()
    }
    state |= {"plain": WHOLE["plain"], "step": 3, f"rank{rank}": rank}
    dcp.save(state, checkpoint_id=place / "usual")
    dcp.save(state, storage_writer=FileSystemWriter(place / "threads", thread_count=2))
    dcp.save(state, storage_writer=FileSystemWriter(place / "items", single_file_per_rank=False))
    if versions.HUGGING_FACE:
        dcp.save(state, storage_writer=FileSystemWriter(place / "alone"), use_collectives=False)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not versions.HUGGING_FACE:
        # Not taken apart: with torch 2.6 a rank may wait in there for others that have gone, and never end.
        dist.barrier()
        os._exit(0)
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    dcp.save(
        tensors,
        storage_writer=HuggingFaceStorageWriter(path=str(place / "hf"), save_distributed=True),
    )
    narrow = _narrow(rank, mesh)
    dcp.save(
        narrow,
        storage_writer=HuggingFaceStorageWriter(
            path=str(place / "hf_narrow"), save_distributed=True
        ),
    )
    dcp.save(narrow, checkpoint_id=place / "narrow")
    floats = {name: value for name, value in tensors.items() if name != "plain"}
    dist.barrier()
    writer = HuggingFaceStorageWriter(
        path=str(place / "hf_whole"), save_distributed=True, enable_consolidation=True
    )
    dcp.save(floats, storage_writer=writer)
    dist.destroy_process_group()


def _narrow(rank: int, mesh: object) -> dict[str, torch.Tensor]:
    """Types of 8 and 4 bits, cut along either dimension. torch cannot scatter them, so they are put together from local parts."""

    def part(dtype: torch.dtype) -> torch.Tensor:
        return (torch.arange(4, dtype=torch.uint8) + 4 * rank).view(dtype).reshape(2, 2)

    return {
        "f4_row": DTensor.from_local(part(torch.float4_e2m1fn_x2), mesh, [Shard(0)]),
        "f4_col": DTensor.from_local(part(torch.float4_e2m1fn_x2), mesh, [Shard(1)]),
        "e8m0": DTensor.from_local(part(torch.float8_e8m0fnu), mesh, [Shard(1)]),
        "e4m3": DTensor.from_local(part(torch.float8_e4m3fn), mesh, [Shard(0)]),
    }
