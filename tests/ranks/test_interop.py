"""Both ways with torch's own distributed checkpoint, and every kind of sharded tensor that torch has or lets others have."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as OldShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, placement_types
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from holdfast.torch import versions
from holdfast.torch.ranks.load_sharded import load_full, load_sharded
from holdfast.torch.ranks.local_shards import LocalShardsWrapper
from holdfast.torch.ranks.save_sharded import save_sharded
from tests.ranks.jobs import load, load_stock
from tests.ranks.pool import WORLDS, Pool, World, good
from tests.ranks.states import gather_values, sharded
from tests.support import element_bytes, needs

pytestmark = pytest.mark.timeout(120)


# The matrix, with torch at one end.

MATRIX = pytest.mark.parametrize(
    ("saving", "loading", "format"),
    [
        *((saving, loading, "dcp") for saving in WORLDS for loading in WORLDS),
        *(
            pytest.param(saving, loading, "safetensors", marks=needs(versions.HUGGING_FACE))
            for saving in (1, 3, 8)
            for loading in (1, 2, 4)
        ),
    ],
)


@MATRIX
def test_torch_loads_ours(pool: Pool, saved, saving: int, loading: int, format: str):
    good(pool.run(loading, load_stock, str(saved(format, saving)), format))


@MATRIX
def test_we_load_torchs(pool: Pool, saved, saving: int, loading: int, format: str):
    good(pool.run(loading, load, str(saved(f"stock-{format}", saving)), format == "dcp"))


# A model and its optimizer, through torch's own functions for state dicts.


class Tied(nn.Module):
    """Two layers, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.up(self.embed(tokens)))) * self.scale)


def _trained(world: World, seed: int, *, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    fully_shard(model, mesh=world.mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(6) + step).square().sum().backward()
        optimizer.step()
    return model, optimizer


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }


def train_and_save(world: World, path: str, format: str) -> dict[str, object]:
    model, optimizer = _trained(world, 1)
    state = _state(model, optimizer)
    save_sharded(path, state, group=world.group, format=format, durable=False)
    return gather_values(state)


def load_trained(world: World, path: str) -> dict[str, object]:
    model, optimizer = _trained(world, 2, steps=1)
    state = _state(model, optimizer)
    load_sharded(path, state, group=world.group)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    assert model.head.weight is model.embed.weight
    return gather_values(_state(model, optimizer))


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_a_model_and_its_optimizer(pool: Pool, tmp_path: Path, format: str):
    path = str(tmp_path / "step")
    wanted = good(pool.run(2, train_and_save, path, format))[0]
    for size in (1, 2, 3, 4):
        for found in good(pool.run(size, load_trained, path)):
            assert found == wanted


def test_tied_weights_are_stored_once(pool: Pool, tmp_path: Path):
    path = tmp_path / "step"
    good(pool.run(2, train_and_save, str(path), "native"))
    manifest = json.loads((path / "holdfast.json").read_text())
    assert manifest["aliases"] == {"model.head.weight": "model.embed.weight"}
    assert "model.head.weight" not in manifest["tensors"]
    whole = load_full(path)
    assert whole["model"]["head.weight"].data_ptr() == whole["model"]["embed.weight"].data_ptr()
    with holdfast.open(path) as ckpt:
        assert (
            ckpt["model.head.weight"].numpy().tobytes()
            == ckpt["model.embed.weight"].numpy().tobytes()
        )


def save_tied(world: World, path: str, format: str = "dcp") -> None:
    weight = sharded(torch.arange(60.0).reshape(10, 6), world.mesh(), (Shard(0),))
    save_sharded(
        path,
        {"embed": weight, "head": weight, "b": torch.ones(3)},
        group=world.group,
        format=format,
        durable=False,
    )


def load_tied(world: World, path: str) -> None:
    state = {name: torch.zeros(10, 6) for name in ("embed", "head")} | {"b": torch.zeros(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, process_group=world.group)
    assert all(
        torch.equal(state[name], torch.arange(60.0).reshape(10, 6)) for name in ("embed", "head")
    )


def test_tied_weights_are_one_item_in_dcp(pool: Pool, tmp_path: Path):
    path = tmp_path / "step"
    good(pool.run(3, save_tied, str(path)))
    good(pool.run(2, load_tied, str(path)))
    with holdfast.open(path) as ckpt:
        assert [alias.names for alias in ckpt.aliases] == [("embed", "head")] * 3, "three parts"
        assert ckpt["head"].numpy().reshape(-1).tolist() == list(range(60))
    assert holdfast.verify(path).ok


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_names_of_several_ranks_keep_their_order(format: str, pool: Pool, tmp_path: Path):
    good(pool.run(2, save_tied, str(tmp_path / "step"), format))
    with holdfast.open(tmp_path / "step") as ckpt:
        assert list(ckpt) == list(ckpt.tree) == ["embed", "head", "b"]


def stock_load_trained(world: World, path: str) -> dict[str, object]:
    model, optimizer = _trained(world, 2, steps=1)
    state = _state(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, process_group=world.group)
    return gather_values(state)


def test_torch_loads_the_optimizer(pool: Pool, tmp_path: Path):
    path = str(tmp_path / "step")
    wanted = good(pool.run(4, train_and_save, path, "dcp"))[0]
    for size in (1, 3):
        assert good(pool.run(size, stock_load_trained, path))[0] == wanted


# FSDP over tensor parallel: strided shards, on eight ranks with copies besides.


WIDTH = 18
"""Rows of a weight that is cut into four, unevenly."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, WIDTH)
        self.down = nn.Linear(WIDTH, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def _tensor_parallel(world: World, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Block()
    if world.size >= 4:
        mesh = (
            world.mesh(2, 2, names=("dp", "tp"))
            if world.size == 4
            else world.mesh(2, 2, 2, names=("copies", "dp", "tp"))
        )
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"] if world.size == 4 else mesh["copies", "dp"])
        assert any(isinstance(p, placement_types._StridedShard) for p in model.up.weight.placements)
    elif world.size > 1:
        fully_shard(model, mesh=world.mesh())
    return model


def parallel_save(world: World, path: str, format: str, stock: bool) -> dict[str, object]:
    model = _tensor_parallel(world, 5)
    torch.manual_seed(5)
    plain = Block()
    if stock:
        dcp.save(model.state_dict(), checkpoint_id=path, process_group=world.group)
    else:
        save_sharded(path, model, group=world.group, format=format, durable=False)
    return gather_values(dict(plain.state_dict()))


def parallel_load(world: World, path: str, stock: bool) -> dict[str, object]:
    model = _tensor_parallel(world, 6)
    if stock:
        state = model.state_dict()
        dcp.load(state, checkpoint_id=path, process_group=world.group)
    else:
        load_sharded(path, model, group=world.group)
    return gather_values(dict(model.state_dict()))


@pytest.mark.parametrize(
    ("format", "saving", "loading"),
    [
        ("native", "ours", "ours"),
        ("safetensors", "ours", "ours"),
        ("dcp", "ours", "torch"),
        ("dcp", "torch", "ours"),
    ],
)
def test_strided_shards(pool: Pool, tmp_path: Path, format: str, saving: str, loading: str):
    for size in (2, 4, 8):
        path = str(tmp_path / str(size))
        wanted = good(pool.run(size, parallel_save, path, format, saving == "torch"))[0]
        for other in (1, 2, 4, 8):
            for found in good(pool.run(other, parallel_load, path, loading == "torch")):
                assert found == wanted, (size, other)


# The kinds of sharded tensors, one by one.


class Pieces:
    """Any object with torch's protocol: here, every second row of a tensor."""

    def __init__(self, whole: torch.Tensor, rank: int, size: int) -> None:
        self.shape, self.dtype = whole.shape, whole.dtype
        self.rows = list(range(rank, len(whole), size))
        self.parts = [whole[row : row + 1].clone() for row in self.rows]

    def size(self) -> torch.Size:
        return self.shape

    def __create_chunk_list__(self) -> Sequence[ChunkStorageMetadata]:
        sizes = torch.Size((1, *self.shape[1:]))
        return [
            ChunkStorageMetadata(torch.Size((row, *(0 for _ in self.shape[1:]))), sizes)
            for row in self.rows
        ]

    def __create_write_items__(self, fqn: str, object: object) -> list[object]:
        raise AssertionError("that is torch's way to write")

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.parts[self.rows.index(index.offset[0])]


ROWS = torch.arange(44.0).reshape(11, 4)
TABLE = torch.arange(48.0, dtype=torch.float64).reshape(6, 8)


def _old(world: World, whole: torch.Tensor) -> ShardedTensor:
    pieces = whole.chunk(world.size)
    starts = [sum(len(p) for p in pieces[:i]) for i in range(len(pieces))]
    mine = []
    if world.rank < len(pieces):
        piece = pieces[world.rank].clone()
        mine = [OldShard.from_tensor_and_offsets(piece, [starts[world.rank], 0], world.rank)]
    return init_from_local_shards(mine, *whole.shape, process_group=world.group)


def _wrapped(world: World, whole: torch.Tensor) -> DTensor:
    """Columns, dealt out in turn; several on one rank."""
    width = whole.shape[1]
    cuts = [(c, min(c + 2, width)) for c in range(0, width, 2)][world.rank :: world.size]
    shards = [whole[:, a:b].clone() for a, b in cuts]
    local = LocalShardsWrapper(
        shards,
        [(0, a) for a, _ in cuts],
        *([torch.empty((0, 0), dtype=whole.dtype)] if not cuts else []),
    )
    return DTensor.from_local(
        local, world.mesh(), [Shard(1)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _kinds(world: World, *, blank: bool) -> dict[str, object]:
    rows, table = (torch.zeros_like(t) if blank else t for t in (ROWS, TABLE))
    return {
        "old": _old(world, rows),
        "wrapped": _wrapped(world, table),
        "pieces": Pieces(rows, world.rank, world.size),
    }


def save_kinds(world: World, path: str, format: str) -> None:
    save_sharded(path, _kinds(world, blank=False), group=world.group, format=format, durable=False)


def assert_same_shards(expected: dict[str, object], state: dict[str, object]) -> None:
    """Compare the shards that this rank has of the old kind, and of ours inside of a DTensor."""
    for one, other in zip(expected["old"].local_shards(), state["old"].local_shards(), strict=True):
        assert element_bytes(one.tensor) == element_bytes(other.tensor)
    for one, other in zip(
        expected["wrapped"].to_local().local_shards(),
        state["wrapped"].to_local().local_shards(),
        strict=True,
    ):
        assert element_bytes(one) == element_bytes(other)


def load_kinds(world: World, path: str) -> None:
    state = _kinds(world, blank=True)
    load_sharded(path, state, group=world.group)
    expected = _kinds(world, blank=False)
    assert_same_shards(expected, state)
    for one, other in zip(expected["pieces"].parts, state["pieces"].parts, strict=True):
        assert element_bytes(one) == element_bytes(other)


@pytest.mark.parametrize("format", ["native", "dcp", "safetensors"])
def test_every_kind_of_sharded_tensor(pool: Pool, tmp_path: Path, format: str):
    for size in (1, 3, 8):
        path = tmp_path / str(size)
        good(pool.run(size, save_kinds, str(path), format))
        with holdfast.open(path) as ckpt:
            arrays = ckpt.read()
        assert arrays["old"].tobytes() == arrays["pieces"].tobytes() == element_bytes(ROWS)
        assert arrays["wrapped"].tobytes() == element_bytes(TABLE)
        for other in (1, 2, 4):
            good(pool.run(other, load_kinds, str(path)))


def stock_load_kinds(world: World, path: str) -> None:
    """torch's own load of what it knows: the old kind, and ours inside of a DTensor."""
    state = {name: value for name, value in _kinds(world, blank=True).items() if name != "pieces"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, process_group=world.group)
    expected = _kinds(world, blank=False)
    assert_same_shards(expected, state)


def stock_save_kinds(world: World, path: str) -> None:
    state = {name: value for name, value in _kinds(world, blank=False).items() if name != "pieces"}
    dcp.save({**state, "pieces": ROWS}, checkpoint_id=path, process_group=world.group)


def test_every_kind_with_torch_at_one_end(pool: Pool, tmp_path: Path):
    good(pool.run(3, save_kinds, str(tmp_path / "ours"), "dcp"))
    good(pool.run(2, stock_save_kinds, str(tmp_path / "torchs")))
    for size in (1, 2, 4):
        good(pool.run(size, stock_load_kinds, str(tmp_path / "ours")))
        good(pool.run(size, load_kinds, str(tmp_path / "torchs")))


# What torch makes of distribute_tensor, and of a sum that was not made.


def distributed(world: World, path: str) -> None:
    mesh = world.mesh()
    state = {
        "rows": distribute_tensor(ROWS, mesh, [Shard(0)]),
        "table": distribute_tensor(TABLE, mesh, [Shard(1)]),
    }
    save_sharded(path, state, group=world.group, durable=False)
    other = {name: torch.zeros_like(value) for name, value in state.items()}
    loaded = load_sharded(path, other, group=world.group)
    assert element_bytes(other["rows"].full_tensor()) == element_bytes(ROWS)
    assert element_bytes(other["table"].full_tensor()) == element_bytes(TABLE)
    assert loaded.needed_nbytes == sum(value.to_local().nbytes for value in state.values())


def test_what_torch_distributes(pool: Pool, tmp_path: Path):
    for size in WORLDS:
        good(pool.run(size, distributed, str(tmp_path / str(size))))
