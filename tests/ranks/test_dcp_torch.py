"""What torch's `dcp.save` and `dcp.load` do on several ranks, over our storage: kinds of shards, plans, ranks alone, failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast
from holdfast.integrations.dcp import Reader, Writer
from holdfast.torch import versions
from tests.ranks.pool import Pool, World, failures, good
from tests.ranks.states import sharded
from tests.ranks.test_interop import ROWS, TABLE, _old, _wrapped
from tests.ranks.test_kills import QUIET
from tests.support import element_bytes

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

WRITERS = {"stock": FileSystemWriter, "ours": Writer}
READERS = {"stock": FileSystemReader, "ours": Reader}
WAYS = pytest.mark.parametrize(
    ("saving", "loading"), [("ours", "ours"), ("ours", "stock"), ("stock", "ours")]
)


def quiet_save(
    world: World, state: dict[str, object], writer: str | Writer, kind: str = "", **more: object
) -> None:
    """With a writer, or with one of a kind at a path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = WRITERS[kind](writer) if isinstance(writer, str) else writer
        dcp.save(state, storage_writer=made, process_group=world.group, **more)


def quiet_load(
    world: World, state: dict[str, object], path: str, kind: str, **more: object
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=READERS[kind](path), process_group=world.group, **more)
    torch.distributed.barrier(world.group)


# Kinds of shards.


class Dealt(torch.Tensor):
    """A tensor of somebody's own with torch's protocol: its rows are dealt out to the ranks in turn."""

    @staticmethod
    def __new__(cls, whole: torch.Tensor, rank: int, size: int) -> Dealt:
        made = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)
        made.rows = list(range(rank, len(whole), size))
        made.parts = [whole[row : row + 1].clone() for row in made.rows]
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        raise AssertionError(f"nobody computes with it: {func}")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size((row, 0)), torch.Size((1, self.shape[1])))
            for row in self.rows
        ]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, at.offsets, i),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(at, properties, self.shape),
            )
            for i, at in enumerate(self.__create_chunk_list__())
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.parts[self.rows.index(index.offset[0])]


def kinds(world: World, *, blank: bool) -> dict[str, object]:
    rows, table = (torch.zeros_like(t) if blank else t for t in (ROWS, TABLE))
    state = {
        "old": _old(world, rows),
        "own": {"dealt": Dealt(rows, world.rank, world.size)},
        "wrapped": _wrapped(world, table),
    }
    if world.size == 4:
        both = world.mesh(2, 2)
        state["hsdp"] = sharded(rows, both, (Replicate(), Shard(0)))
        state["2d"] = sharded(table, both, (Shard(0), Shard(1)))
    return state


def save_kinds(world: World, path: str, kind: str) -> None:
    quiet_save(world, kinds(world, blank=False), path, kind)


def load_kinds(world: World, path: str, kind: str) -> None:
    state, expected = kinds(world, blank=True), kinds(world, blank=False)
    if world.size == 4:
        state.pop("hsdp"), state.pop("2d")
        state |= (
            {"hsdp": torch.zeros_like(ROWS), "2d": torch.zeros_like(TABLE)}
            if path.endswith("4")
            else {}
        )
    quiet_load(world, state, path, kind)
    for one, other in zip(expected["old"].local_shards(), state["old"].local_shards(), strict=True):
        assert element_bytes(one.tensor) == element_bytes(other.tensor)
    for one, other in zip(expected["own"]["dealt"].parts, state["own"]["dealt"].parts, strict=True):
        assert element_bytes(one) == element_bytes(other)
    mine, others = (value["wrapped"].to_local().local_shards() for value in (expected, state))
    for one, other in zip(mine, others, strict=True):
        assert element_bytes(one) == element_bytes(other)
    for name, whole in (("hsdp", ROWS), ("2d", TABLE)):
        assert name not in state or torch.equal(state[name], whole)


@WAYS
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_kind_of_shard(ranks: int, saving: str, loading: str, pool: Pool, tmp_path: Path):
    path = str(tmp_path / f"{ranks}")
    good(pool.run(ranks, save_kinds, path, saving))
    for others in {ranks, 3}:
        good(pool.run(others, load_kinds, path, loading))
    with holdfast.open(path) as found:
        assert torch.equal(found["own.dealt"].torch(), ROWS)


def train_hybrid(world: World, path: str, saving: str, loading: str) -> None:
    """Hybrid sharding: copies of shards, a model and its optimizer as objects with a state."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        fully_shard(model, mesh=world.mesh(2, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, _ = made(1)
    quiet_save(world, {"model": model, "step": 3}, path, saving)
    other, _ = made(2)
    state = {"model": other, "step": 0}
    quiet_load(world, state, path, loading)
    assert state["step"] == 3
    for name, value in model.state_dict().items():
        found = other.state_dict()[name]
        assert isinstance(found, DTensor)
        assert torch.equal(found.to_local(), value.to_local())


@WAYS
def test_hybrid_sharding(saving: str, loading: str, pool: Pool, tmp_path: Path):
    good(pool.run(4, train_hybrid, str(tmp_path / "step"), saving, loading))


# Plans.


class Cached(DefaultSavePlanner):
    """Plans of its own class, which is what torch keeps them by."""


def save_cached(world: World, path: str, lowest: bool) -> None:
    for step in (1, 2, 3):
        w = sharded(torch.full((8, 2), float(step)), world.mesh(), (Shard(0),))
        planner = Cached(enable_plan_caching=True, dedup_save_to_lowest_rank=lowest)
        state = {"w": w, "copy": torch.full((4,), float(step)), "step": step}
        for name in ("last", f"{step}"):
            quiet_save(world, state, f"{path}/{name}", "ours", planner=planner)
    Cached._cached_save_plan.clear()
    for kept in (
        "_cached_final_save_plan",
        "_cached_all_plans",
        "_cached_global_plan",
        "_cached_metadata",
    ):
        getattr(DefaultSavePlanner, kept).clear()


@pytest.mark.parametrize("lowest", [False, True])
def test_plans_that_are_cached(lowest: bool, pool: Pool, tmp_path: Path):
    """From the second save on a rank is handed its first plan, which names a folder that is gone."""
    if "enable_plan_caching" not in DefaultSavePlanner.__init__.__code__.co_varnames:
        pytest.skip("this torch does not cache plans")
    good(pool.run(2, save_cached, str(tmp_path), lowest))
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "3", "last"]
    for name, step in (("1", 1), ("2", 2), ("3", 3), ("last", 3)):
        with holdfast.open(tmp_path / name) as found:
            assert found["w"].numpy().tolist() == [[step] * 2] * 8
            assert found.tree["step"] == step


# Each rank for itself.


def own(world: World, step: int) -> dict[str, object]:
    shard = sharded(torch.arange(12.0).reshape(6, 2) * step, world.mesh(), (Shard(0),))
    return {
        "shard": shard,
        "mine": torch.full((2,), float(world.rank + 10 * step)),
        "rank": world.rank,
        "step": step,
    }


def save_alone(world: World, path: str, kind: str, step: int) -> None:
    quiet_save(world, own(world, step), path, kind, use_collectives=False)
    torch.distributed.barrier(world.group)


def load_alone(world: World, path: str, kind: str, step: int) -> None:
    state = own(world, 0)
    state["mine"].zero_()
    quiet_load(world, state, path, kind)
    assert state["mine"].tolist() == [world.rank + 10 * step] * 2
    assert (state["rank"], state["step"]) == (world.rank, step)
    assert torch.equal(state["shard"].full_tensor(), torch.arange(12.0).reshape(6, 2) * step)


def load_shard(world: World, path: str, step: int) -> None:
    state = {"shard": own(world, 0)["shard"]}
    quiet_load(world, state, path, "ours")
    assert torch.equal(state["shard"].full_tensor(), torch.arange(12.0).reshape(6, 2) * step)


alone = pytest.mark.skipif(not versions.HUGGING_FACE, reason=versions.HUGGING_FACE.reason)


@alone
@WAYS
def test_ranks_that_save_alone(saving: str, loading: str, pool: Pool, tmp_path: Path):
    path = str(tmp_path / "step")
    for step in (1, 2):  # the second time over the first
        good(pool.run(2, save_alone, path, saving, step))
        good(pool.run(2, load_alone, path, loading, step))
    if loading == "ours":
        for others in (1, 3):
            good(pool.run(others, load_shard, path, 2))
    if saving == "ours":
        names = sorted(os.listdir(path))
        assert [name for name in names if name.endswith(".metadata")] == [
            "__0.metadata",
            "__1.metadata",
        ]
        assert len(names) == 4, "what was saved before is gone"


def save_alone_and_fail(world: World, path: str) -> None:
    class Fails(Writer):
        def finish(self, **given: object) -> None:
            raise RuntimeError("no index")

    with pytest.raises(RuntimeError, match="no index"):
        quiet_save(world, own(world, 5), Fails(path), use_collectives=False)
    torch.distributed.barrier(world.group)


def refuse_alone(world: World, path: str, words: str, overwrite: bool) -> None:
    with pytest.raises(holdfast.errors.NotCommitted, match=words):
        quiet_save(world, own(world, 5), Writer(path, overwrite=overwrite), use_collectives=False)
    torch.distributed.barrier(world.group)


@alone
def test_a_rank_alone_that_fails_leaves_what_was_there(pool: Pool, tmp_path: Path):
    path = str(tmp_path / "step")
    good(pool.run(2, save_alone, path, "ours", 1))
    good(pool.run(2, save_alone_and_fail, path))
    good(pool.run(2, load_alone, path, "ours", 1))
    good(pool.run(2, refuse_alone, path, "Checkpoint already exists", False))
    good(pool.run(2, save_alone, path, "ours", 3))
    good(pool.run(2, load_alone, path, "stock", 3))
    assert len(os.listdir(path)) == 4
    good(pool.run(2, save_kinds, str(tmp_path / "together"), "ours"))
    good(pool.run(2, refuse_alone, str(tmp_path / "together"), "saved together", True))


# Failures.


class Dies(Writer):
    """Fails on one rank, when the others have written."""

    rank = -1

    def write_data(self, plan: object, planner: object) -> object:
        if torch.distributed.get_rank() == self.rank:
            raise OSError("the disk of this rank is gone")
        return super().write_data(plan, planner)


def save_and_die(world: World, path: str, rank: int) -> None:
    writer = Dies(path)
    writer.rank = rank
    try:
        quiet_save(world, {"w": torch.zeros(4), "n": world.rank}, writer)
    finally:
        torch.distributed.barrier(world.group)
        writer.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_leaves_what_was_there(rank: int, pool: Pool, tmp_path: Path):
    path = str(tmp_path / "step")
    good(pool.run(2, save_kinds, path, "ours"))
    before = {name: (tmp_path / "step" / name).read_bytes() for name in os.listdir(path)}
    failed = failures(pool.run(2, save_and_die, path, rank))
    assert len(failed) == 2
    assert all(
        CheckpointException.__name__ in str(one) and "the disk of this rank is gone" in str(one)
        for one in failed
    )
    assert os.listdir(tmp_path) == ["step"]
    assert {name: (tmp_path / "step" / name).read_bytes() for name in os.listdir(path)} == before


def test_a_rank_that_is_killed_leaves_what_was_there(tmp_path: Path):
    """Wherever it dies before the rename; and the next save cleans up behind it."""
    command = [sys.executable, "-m", "tests.ranks.dcp_kills", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=110, env=os.environ | QUIET, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout)
    assert len(rows) == 5
    for row in rows:
        assert (row["hung"], row["there"], row["later"], row["left"]) == (False, 1, 3, ["step"]), (
            row
        )
