"""What is handed on between GPUs: messages are made and taken apart on the device. Ranks that share a GPU send through the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from holdfast.torch import load_sharded, save_sharded
from holdfast.torch.ranks import replicas
from tests.processes import fork_server

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("most", [7, 64, 1 << 20])
def test_messages_are_made_and_taken_apart_on_the_device(device: str, most: int):
    sent = [torch.arange(n, dtype=torch.uint8, device=device) for n in (3, 40, 1, 200, 5)]
    got = [torch.zeros_like(view) for view in sent]
    for there, here in zip(replicas.pack(sent, most), replicas.pack(got, most), strict=True):
        message = replicas._message(there, there[0].device, sent=True)
        arrived = replicas._message(here, here[0].device, sent=False)
        assert message.device == arrived.device == sent[0].device
        assert message.numel() <= most
        assert (message is there[0]) == (arrived is here[0]) == (len(there) == 1), (
            "one piece is sent from where it lies"
        )
        arrived.copy_(message)
        replicas.unpack(here, arrived)
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


def load_on(rank: int, folder: str, device: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    from holdfast.torch.ranks import load_sharded as module

    module.PART_NBYTES = 1 << 20
    state = {
        "w": torch.zeros(3000, 1024, device=device),
        "b": torch.zeros(9, dtype=torch.bfloat16, device=device),
    }
    loaded = load_sharded(Path(folder, "step"), state, replicated="broadcast", deadline=30)
    assert torch.equal(state["w"].cpu(), torch.arange(3000.0)[:, None].expand(3000, 1024))
    assert bool((state["b"] == 2).all())
    read = torch.tensor([float(loaded.read_nbytes)])
    dist.all_reduce(read)
    assert float(read) <= 1.05 * loaded.needed_nbytes
    dist.destroy_process_group()


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_with_one_device(device: str, tmp_path: Path):
    state = {
        "w": torch.arange(3000.0)[:, None].expand(3000, 1024).contiguous(),
        "b": torch.full((9,), 2, dtype=torch.bfloat16),
    }
    save_sharded(state, tmp_path / "step", durable=False)
    fork_server()
    arguments = (str(tmp_path), device, 29500 + os.getpid() % 400)
    mp.start_processes(load_on, arguments, nprocs=2, start_method="forkserver")
