"""What the ranks do: jobs for the pool that more than one module uses."""

from __future__ import annotations

import warnings

import torch
import torch.distributed.checkpoint as dcp

from holdfast.torch.ranks.load_sharded import load_sharded
from holdfast.torch.ranks.save_sharded import save_sharded
from tests.ranks.pool import World
from tests.ranks.states import check, state_of

__all__ = ["FORMATS", "load", "load_stock", "save", "save_stock"]

FORMATS = ("native", "dcp", "safetensors")


def save(world: World, path: str, format: str) -> tuple[tuple[str, ...], int]:
    """Save the whole state."""
    saved = save_sharded(
        path,
        state_of(world, nested=format != "safetensors"),
        group=world.group,
        format=format,
        durable=False,
    )
    return tuple(name for name, _ in saved.files), saved.nbytes


def load(world: World, path: str, nested: bool) -> tuple[int, int]:
    """Load it twice: cut as it was, and cut otherwise."""
    needed = read = 0
    for other in (False, True):
        state = state_of(world, nested=nested, blank=True, other=other)
        loaded = load_sharded(path, state, group=world.group)
        check(world, state, nested=nested, other=other)
        needed, read = needed + loaded.needed_nbytes, read + loaded.read_nbytes
    return needed, read


def save_stock(world: World, path: str, format: str) -> None:
    """The same with torch's own distributed checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if format == "dcp":
            dcp.save(state_of(world), checkpoint_id=path, process_group=world.group)
        else:
            state = state_of(world, nested=False)
            state["turned"] = state[
                "turned"
            ].contiguous()  # the safetensors library takes nothing else
            writer = dcp.HuggingFaceStorageWriter(path=path, save_distributed=True)
            dcp.save(state, storage_writer=writer, process_group=world.group)


def load_stock(world: World, path: str, format: str) -> None:
    """The same with torch's own distributed checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for other in (False, True):
            state = state_of(world, nested=format == "dcp", blank=True, other=other)
            if format == "dcp":
                dcp.load(state, checkpoint_id=path, process_group=world.group)
            else:
                dcp.load(
                    state,
                    storage_reader=dcp.HuggingFaceStorageReader(path=path),
                    process_group=world.group,
                )
            check(world, state, nested=format == "dcp", other=other)
    torch.distributed.barrier(world.group)
