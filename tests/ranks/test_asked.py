"""A load is judged by what all ranks ask for together: stages of a pipeline, parts of a state, a prefix, tied weights."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import holdfast
from holdfast.errors import DoesNotFit, HoldfastError, NoSuchPath, RanksFailed
from holdfast.torch import load_into
from holdfast.torch.ranks.load_sharded import load_sharded
from holdfast.torch.ranks.save_sharded import save_sharded
from tests.ranks.pool import Pool, World, failures, good
from tests.ranks.states import sharded

pytestmark = pytest.mark.timeout(60)


def layers(ranks: range, *, blank: bool = False) -> dict[str, object]:
    return {f"layers.{i}": torch.full((3, 2), -1.0 if blank else float(i)) for i in ranks}


# All ranks together.


def stages(world: World, path: str, count: int, strict: bool) -> tuple[object, ...]:
    """Every rank asks for the layers of its stage; the last of all ranks for none."""
    each = -(-count // (world.size - 1))
    own = (
        range(world.rank * each, min((world.rank + 1) * each, count))
        if world.rank < world.size - 1
        else range(0)
    )
    state = {"model": layers(own, blank=True)}
    loaded = load_sharded(path, state, group=world.group, strict=strict)
    assert {name: tensor.unique().tolist() for name, tensor in state["model"].items()} == {
        f"layers.{i}": [i] for i in own
    }
    return loaded.missing, loaded.unexpected


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_stages_of_a_pipeline(pool: Pool, tmp_path: Path, format: str):
    save_sharded(tmp_path / "step", {"model": layers(range(5)), "step": 3}, format=format)
    assert good(pool.run(4, stages, str(tmp_path / "step"), 5, True)) == [((), ())] * 4


def test_what_no_rank_asks_for_and_what_one_does_not_find(pool: Pool, tmp_path: Path):
    save_sharded(tmp_path / "step", {"model": {**layers(range(5)), "head": torch.ones(1)}})
    for failure in failures(pool.run(3, stages, str(tmp_path / "step"), 5, True)):
        assert "ranks 0 to 2: DoesNotFit" in str(failure), "everybody says the same"
        assert "unexpected 'model.head'" in str(failure)
        assert "layers" not in str(failure).replace("head", "")
    for failure in failures(pool.run(3, stages, str(tmp_path / "step"), 6, True)):
        assert "rank 1: DoesNotFit" in str(failure)
        assert "missing 'model.layers.5" in str(failure)
        assert "unexpected 'model.head'" in str(failure)
    assert (
        good(pool.run(3, stages, str(tmp_path / "step"), 5, False)) == [((), ("model.head",))] * 3
    )


# A part of it.


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("name", "value", "said"), [
    ("w", torch.zeros(3, 2), "'w': [3, 2] here, [2, 3] in the checkpoint"),
    ("w", torch.zeros(2, 3, dtype=torch.float64), "'w': float64 here, float32 in the checkpoint"),
    ("step", torch.zeros(()), "'step': the checkpoint has no tensor here, but a int"),
    ("nest", torch.zeros(2), "'nest': the checkpoint has no tensor here, but a dict"),
    ("sparse", torch.zeros(3), "'sparse': sparse and quantised tensors are not loaded in place"),
    ("w", 3, "'w': the checkpoint has tensors here, and the state a int"),
    ("nest", 3, "'nest': the checkpoint has tensors here, and the state a int"),
])  # fmt: skip
def test_a_part_is_checked_as_well(
    tmp_path: Path, name: str, value: object, said: str, strict: bool
):
    state = {"w": torch.ones(2, 3), "v": torch.ones(2), "step": 3, "nest": {"t": torch.ones(2)}}
    holdfast.save({**state, "sparse": torch.eye(3)[0].to_sparse()}, tmp_path / "step")
    part = {"v": torch.zeros(2), name: value}
    with pytest.raises(DoesNotFit) as caught:
        load_sharded(tmp_path / "step", part, strict=strict)
    assert said in str(caught.value)
    assert "missing" not in str(caught.value)
    assert part["v"].tolist() == [0, 0], "nothing was changed"


def test_a_part_that_fits_and_more(tmp_path: Path):
    save_sharded(tmp_path / "step", {"a": torch.ones(2), "b": torch.ones(2)})
    part = {"a": torch.zeros(2), "c": torch.zeros(2)}
    loaded = load_sharded(tmp_path / "step", part, strict=False)
    assert (loaded.names, loaded.missing, loaded.unexpected) == (("a",), ("c",), ("b",))
    assert part["a"].tolist() == [1, 1]


# Below a prefix.


@pytest.mark.parametrize("format", ["native", "dcp", "safetensors"])
def test_a_prefix(tmp_path: Path, format: str):
    model = nn.Sequential(nn.Linear(2, 3))
    rest = {"step": 4} if format != "safetensors" else {}
    save_sharded(
        tmp_path / "step", {"net": {"model": model}, "w": torch.ones(2), **rest}, format=format
    )
    other = nn.Sequential(nn.Linear(2, 3))
    loaded = load_sharded(tmp_path / "step", other, prefix="net.model.")
    assert torch.equal(model[0].weight, other[0].weight)
    assert (
        loaded.names
        == load_into(nn.Sequential(nn.Linear(2, 3)), tmp_path / "step", prefix="net.model.").names
    )
    with pytest.raises(DoesNotFit, match=r"unexpected 'net\.model\.0\.bias'"):
        load_sharded(tmp_path / "step", {"0.weight": torch.zeros(3, 2)}, prefix="net.model.")
    with pytest.raises(DoesNotFit, match=r"missing '0\.weight'"):
        load_sharded(tmp_path / "step", nn.Sequential(nn.Linear(2, 3)), prefix="other.")


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_values_and_parts_of_names_below_a_prefix(tmp_path: Path, format: str):
    save_sharded(
        tmp_path / "step",
        {"a": {"lr": 0.5, "block": {"w": torch.ones(2), "n": 3}}, "b": 1},
        format=format,
    )
    state = {"lr": 0, "block": {"w": torch.zeros(2), "n": 0}}
    load_sharded(tmp_path / "step", state, prefix="a.")
    assert (state["lr"], state["block"]["n"], state["block"]["w"].tolist()) == (0.5, 3, [1, 1])
    state = {"ock": {"w": torch.zeros(2)}}
    load_sharded(tmp_path / "step", state, prefix="a.bl")
    assert state["ock"]["w"].tolist() == [1, 1]


# Tied weights.


def tied(*names: str, value: float = 0.0) -> nn.Module:
    model = nn.Module()
    parameter = nn.Parameter(torch.full((4, 2), value))
    for name in names:
        model.register_parameter(name, parameter)
    return model


@pytest.mark.parametrize("as_state", [False, True])
@pytest.mark.parametrize("stored", [("embed",), ("head",), ("embed", "head")])
def test_one_name_is_enough(tmp_path: Path, stored: tuple[str, ...], as_state: bool):
    holdfast.save({name: torch.ones(4, 2) for name in stored}, tmp_path / "m.safetensors")
    model = tied("embed", "head")
    loaded = load_sharded(tmp_path / "m.safetensors", model.state_dict() if as_state else model)
    assert (loaded.names, loaded.missing, loaded.unexpected) == (("embed", "head"), (), ())
    assert model.embed.unique().tolist() == [1]
    assert model.embed is model.head
    again = tied("embed", "head")
    report = load_into(again.state_dict() if as_state else again, tmp_path / "m.safetensors")
    assert (report.names, report.notes) == (loaded.names, loaded.notes), "as load_into has it"


def test_tied_here_and_different_there(tmp_path: Path):
    holdfast.save(
        {"embed": torch.ones(4, 2), "head": torch.zeros(4, 2)}, tmp_path / "m.safetensors"
    )
    model = tied("embed", "head", value=5.0)
    with pytest.raises(
        DoesNotFit,
        match="'embed': it is tied to 'head' here, and the checkpoint has other elements for that",
    ):
        load_sharded(tmp_path / "m.safetensors", model)
    assert model.embed.unique().tolist() == [5]
    loaded = load_sharded(tmp_path / "m.safetensors", model, strict=False)
    assert "those were taken" in loaded.notes[0]
    assert model.embed.unique().tolist() == [0]


def test_not_tied_here_and_one_there(tmp_path: Path):
    holdfast.save({"embed": torch.ones(4, 2)}, tmp_path / "m.safetensors")
    with pytest.raises(DoesNotFit, match="missing 'head'"):
        load_sharded(
            tmp_path / "m.safetensors", {"embed": torch.zeros(4, 2), "head": torch.zeros(4, 2)}
        )


def tied_shards(world: World, path: str, bad: bool) -> None:
    own = sharded(torch.zeros(4, 2), world.mesh(), (Shard(0),))
    state = {"embed": own, "head": own.detach()}
    if bad:
        with pytest.raises(RanksFailed, match=f"rank {world.size - 1}: DoesNotFit"):
            load_sharded(path, state, group=world.group)
        return
    load_sharded(path, state, group=world.group)
    assert torch.equal(own.full_tensor(), torch.arange(8.0).reshape(4, 2))


def test_tied_shards(pool: Pool, tmp_path: Path):
    """Of two copies, each rank compares the part that it has."""
    whole = np.arange(8, dtype=np.float32).reshape(4, 2)
    holdfast.save({"head": whole}, tmp_path / "one")
    good(pool.run(2, tied_shards, str(tmp_path / "one"), False))
    holdfast.save({"head": whole, "embed": whole.copy()}, tmp_path / "two")
    good(pool.run(2, tied_shards, str(tmp_path / "two"), False))
    other = whole.copy()
    other[3, 1] = 9
    holdfast.save({"head": whole, "embed": other}, tmp_path / "bad")
    good(pool.run(2, tied_shards, str(tmp_path / "bad"), True))


# Nothing at all.


def nothing_there(world: World, path: str, seen_by: int | None) -> None:
    own = path if world.rank == seen_by else f"{path}-away"
    with pytest.raises(RanksFailed, match="NoSuchPath") as caught:
        load_sharded(own, {"w": torch.zeros(2)}, group=world.group)
    assert isinstance(caught.value, FileNotFoundError) is (seen_by is None)
    assert len(caught.value.causes) == world.size - (seen_by is not None)


@pytest.mark.parametrize("seen_by", [None, 0, 1])
def test_nothing_at_the_path_is_so_where_every_rank_finds_nothing(
    pool: Pool, tmp_path: Path, seen_by: int | None
):
    """A program that begins anew on a FileNotFoundError does not do so where one machine lacks its disk."""
    holdfast.save({"w": np.ones(2, np.float32)}, tmp_path / "step")
    good(pool.run(2, nothing_there, str(tmp_path / "step"), seen_by))


@pytest.mark.parametrize("missing", ["missing", "memory://bucket/missing"])
def test_nothing_at_the_path_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="missing") as caught:
        load_sharded(missing, {"w": torch.zeros(2)})
    assert type(caught.value) is NoSuchPath
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename.endswith("missing")
    assert str(caught.value).count("missing") == 1


def test_a_file_that_is_missing_in_a_checkpoint_is_another_matter(tmp_path: Path):
    holdfast.save({"w": np.ones(2, np.float32)}, tmp_path / "step")
    next((tmp_path / "step").glob("data-*")).unlink()
    with pytest.raises(HoldfastError) as caught:
        load_sharded(tmp_path / "step", {"w": torch.zeros(2)})
    assert not isinstance(caught.value, FileNotFoundError)
