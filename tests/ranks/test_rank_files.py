"""Rank files as FSDP2 writes them on real processes: saved as verl does, put together, bit-equal to what all ranks had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.torch.ranks.load_sharded import load_sharded
from tests.ranks.pool import Pool, World, good

pytestmark = pytest.mark.timeout(120)


class Model(nn.Module):
    """Lengths that eight ranks do not divide, a buffer, a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6, bias=False)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.5]))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.down(torch.relu(self.up(self.embed(tokens)))) * self.scale)


def train_and_save(world: World, folder: str, shape: tuple[int, ...]) -> None:
    """A step of training; then every rank saves what it has, and the first one what all have together."""
    torch.manual_seed(0)
    model = Model()
    mesh = world.mesh(*shape)
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.arange(12).reshape(2, 6)).square().mean().backward()
    optimizer.step()
    place = Path(folder)
    for what, state in (("model", model.state_dict()), ("optim", optimizer.state_dict())):
        torch.save(state, place / f"{what}_world_size_{world.size}_rank_{world.rank}.pt")
    whole = {
        name: t.full_tensor() if isinstance(t, DTensor) else t
        for name, t in model.state_dict().items()
    }
    moments = [state["exp_avg"].full_tensor() for state in optimizer.state_dict()["state"].values()]
    if world.rank == 0:
        torch.save({"model": whole, "moments": moments}, place.parent / "whole.pt")
    dist.barrier(world.group)


def load_on(world: World, folder: str, whole: str) -> None:
    """On so many ranks as there are now, whoever wrote the files."""
    from torch.distributed.tensor import Shard, distribute_tensor

    expected = torch.load(whole)["model"]
    mesh = world.mesh()
    state = {
        name: distribute_tensor(torch.zeros_like(t), mesh, [Shard(0)])
        if t.ndim == 2
        else torch.zeros_like(t)
        for name, t in expected.items()
    }
    load_sharded(folder, state, group=world.group)
    for name, tensor in state.items():
        found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(found, expected[name]), name


@pytest.mark.parametrize("shape", [(2,), (4,), (8,), (2, 2), (2, 4)], ids=str)
def test_what_fsdp_saves(pool: Pool, tmp_path: Path, shape: tuple[int, ...]):
    folder = tmp_path / "actor"
    folder.mkdir()
    world = torch.Size(shape).numel()
    good(pool.run(world, train_and_save, str(folder), shape))
    expected = torch.load(tmp_path / "whole.pt")
    with holdfast.open(folder) as ckpt:
        assert set(ckpt) == set(expected["model"])
        for name, tensor in expected["model"].items():
            assert torch.equal(ckpt[name].torch(), tensor), name
        assert ckpt["scale"].shape == (1,)
        assert ("embed.weight", "head.weight") in {alias.names for alias in ckpt.aliases}
    with holdfast.open(folder / f"optim_world_size_{world}_rank_*.pt") as ckpt:
        for number, tensor in enumerate(expected["moments"]):
            assert torch.equal(ckpt[f"state.{number}.exp_avg"].torch(), tensor)
    assert holdfast.verify(folder).ok
    good(pool.run(3, load_on, str(folder), str(tmp_path / "whole.pt")))
