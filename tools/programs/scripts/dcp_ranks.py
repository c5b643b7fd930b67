"""FSDP2, DTensor, FSDP1 and DDP on two ranks, with torch's own calls: save, load on two ranks, on one, and as one file."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from dcp import same, trained
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


def rank(index: int, port: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(index), WORLD_SIZE=str(RANKS)
    )
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))

    # FSDP2 with its optimizer.
    model, _ = trained()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    model(torch.ones(5, 8) + torch.arange(8)).square().mean().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="fsdp2")
    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if not index:
        torch.save(whole, "whole.pt")
    dcp.async_save(
        {"model": weights},
        checkpoint_id="fsdp2-background",
        process_group=dist.new_group(backend="gloo"),
    ).result()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    weights, moments = get_state_dict(model, optimizer)
    into = {"model": weights, "optimizer": moments}
    dcp.load(into, checkpoint_id="fsdp2")
    set_state_dict(
        model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"]
    )
    again = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if not index:
        same(dict(whole), dict(again))
    # One file, given to all ranks.
    loaded = torch.load("whole.pt", map_location="cpu", mmap=True) if not index else {}
    set_model_state_dict(
        model, loaded, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )

    # DTensors, saved in rows and loaded in columns and whole.
    data = torch.arange(35.0).reshape(5, 7)
    dcp.save({"x": distribute_tensor(data, mesh, [Shard(0)])}, checkpoint_id="rows")
    for placement in (Shard(1), Replicate()):
        x = distribute_tensor(torch.zeros(5, 7), mesh, [placement])
        dcp.load({"x": x}, checkpoint_id="rows")
        same(x.full_tensor(), data)
    # A rank's own DTensor through a file.
    torch.save(x, f"dtensor{index}.pt")
    same(torch.load(f"dtensor{index}.pt", weights_only=False).full_tensor(), data)

    # FSDP1: shards in a checkpoint, and each rank's own shards in a file of its own.
    model, _ = trained()
    old = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(old, StateDictType.SHARDED_STATE_DICT):
        shards = old.state_dict()
        dcp.save({"model": shards}, checkpoint_id="fsdp1")
        torch.save(shards, f"fsdp1-{index}.pt")
        into = {"model": old.state_dict()}
        dcp.load(into, checkpoint_id="fsdp1")
        old.load_state_dict(into["model"])
        old.load_state_dict(torch.load(f"fsdp1-{index}.pt", weights_only=False))

    # DDP: one rank saves, all load.
    model, optimizer = trained()
    parallel = DistributedDataParallel(model)
    if not index:
        torch.save(
            {"model": parallel.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3},
            "ddp.pt",
        )
    dist.barrier()
    found = torch.load("ddp.pt", map_location={"cuda:0": "cpu"}, weights_only=True)
    parallel.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    # What is sent between ranks is saved and loaded too.
    sent = [{"w": torch.ones(3), "rank": index}] if not index else [None]
    dist.broadcast_object_list(sent, src=0)
    same(sent[0], {"w": torch.ones(3), "rank": 0})
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    port = str(store.port)
    del store
    mp.spawn(rank, (port,), nprocs=RANKS)
    # On one rank: into a model, and as a file.
    model, _ = trained()
    weights = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    dcp.load({"model": weights}, checkpoint_id="fsdp2")
    whole = torch.load("whole.pt")
    same(dict(whole), weights)
    dcp_to_torch_save("fsdp2", "from-ranks.pt")
    same(dict(whole), dict(torch.load("from-ranks.pt", weights_only=False)["model"]))


if __name__ == "__main__":
    main()
