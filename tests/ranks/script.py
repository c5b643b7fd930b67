"""A small program for torchrun: `torchrun --standalone --nproc-per-node 2 tests/ranks/script.py FOLDER`.

Every rank saves rows of a table and a replicated tensor, in all formats, once in the background; then what they saved is loaded
again, by columns.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from holdfast.torch.ranks.load_sharded import load_sharded
from holdfast.torch.ranks.save_sharded import async_save_sharded, save_sharded


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    table, plain = torch.arange(35.0).reshape(7, 5), torch.arange(9)
    state = {"table": distribute_tensor(table, mesh, [Shard(0)]), "plain": plain.clone()}
    for format in ("native", "dcp", "safetensors"):
        save_sharded(f"{folder}/{format}", state, format=format)
        other = {
            "table": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)]),
            "plain": torch.zeros_like(plain),
        }
        load_sharded(f"{folder}/{format}", other)
        assert torch.equal(other["table"].full_tensor(), table)
        assert torch.equal(other["plain"], plain)
    async_save_sharded(f"{folder}/later", state)
    state["plain"].zero_()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
