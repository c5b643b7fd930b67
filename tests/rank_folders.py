"""Folders of rank files, written by torch in one process: DTensors of every rank, on a process group that only pretends.

What a rank has is cut here with `torch.chunk`, the way in which torch documents its placements: by tensors, and not by numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, placement_types

__all__ = ["Placed", "as_rank", "cut", "rank_file", "save_ranks", "sharded"]

StridedShard = placement_types._StridedShard

Placed = tuple[torch.Tensor, Sequence[Placement]]
"""A whole tensor, and how it is placed."""


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """A block in which this process is one of so many ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def pieces(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """`torch.chunk`, with empty tensors for those that it leaves out."""
    found = list(torch.chunk(tensor, count, dim)) if tensor.shape[dim] else [tensor]
    return [*found, *[tensor.narrow(dim, 0, 0)] * (count - len(found))]


def cut(
    whole: torch.Tensor, sizes: Sequence[int], at: Sequence[int], placements: Sequence[Placement]
) -> torch.Tensor:
    """What the rank at a place of a mesh has of a tensor."""
    local = whole
    for count, here, placement in zip(sizes, at, placements, strict=True):
        if isinstance(placement, StridedShard):
            each = [
                pieces(piece, count, placement.dim)[here]
                for piece in pieces(local, placement.split_factor, placement.dim)
            ]
            local = torch.cat(each, placement.dim)
        elif isinstance(placement, Shard):
            local = pieces(local, count, placement.dim)[here]
    return local.clone(memory_format=torch.contiguous_format)


def sharded(whole: torch.Tensor, mesh: object, placements: Sequence[Placement]) -> torch.Tensor:
    """The DTensor that this rank has of a whole tensor."""
    local = cut(whole, mesh.shape, mesh.get_coordinate(), placements)  # type: ignore[attr-defined]  # a DeviceMesh
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def rank_file(folder: Path, rank: int, world: int, what: str = "model") -> Path:
    return folder / f"{what}_world_size_{world}_rank_{rank}.pt"


def save_ranks(
    folder: Path,
    sizes: Sequence[int],
    state: Mapping[str, object] | Callable[[int, object], object],
    *,
    what: str = "model",
    ranks: Sequence[int] | None = None,
) -> Path:
    """Save a state as every rank of a mesh would: a `Placed` as a DTensor, anything else as it is.

    Or what a function of the rank and the mesh says. `ranks` are those that save.
    """
    folder.mkdir(exist_ok=True, parents=True)
    world = torch.Size(sizes).numel()
    names = tuple(f"dim{i}" for i in range(len(sizes)))
    for rank in range(world) if ranks is None else ranks:
        with as_rank(rank, world):
            mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=names)
            if callable(state):
                saved = state(rank, mesh)
            else:
                saved = {
                    name: sharded(v[0], mesh, v[1]) if isinstance(v, tuple) else v
                    for name, v in state.items()
                }
            torch.save(saved, rank_file(folder, rank, world, what))
    return folder
