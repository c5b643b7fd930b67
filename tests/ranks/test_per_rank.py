"""Ranks that have something else under one name are told, and may keep one each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast
from holdfast.engine.table import NO_TENSORS
from holdfast.ranks.merge import differing
from holdfast.ranks.per_rank import mark, marked, rank_key, size_in
from holdfast.torch.ranks import saving as sharded_save
from holdfast.torch.ranks.load_sharded import load_full, load_sharded
from holdfast.torch.ranks.replica_sums import byte_sums, replica_sums
from holdfast.torch.ranks.save_sharded import async_save_sharded, save_sharded
from tests.ranks.pool import Pool, World, failures, good
from tests.ranks.states import sharded

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

FORMATS = ["native", "dcp", "safetensors"]


def rng(rank: int) -> torch.Tensor:
    return torch.Generator().manual_seed(rank).get_state()


# Compared.


def save_different(world: World, path: str, format: str, block: bool, check: bool = True) -> object:
    state = {
        "w": torch.arange(8.0),
        "deep": {"rng": rng(min(world.rank, 1))},
        "turned": torch.arange(6.0).reshape(2, 3).T,
    }
    save = save_sharded if block else async_save_sharded
    saved = save(path, state, group=world.group, format=format, check_replicas=check)
    return None if block else saved.wait() and None


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_tensors_that_differ_are_an_error(pool: Pool, tmp_path: Path, format: str, block: bool):
    said = failures(pool.run(3, save_different, str(tmp_path / "step"), format, block))
    for failure in said:
        assert (
            "'deep.rng': its elements differ between rank 0, ranks 1 and 2; pass per_rank=['deep.rng']"
            in str(failure)
        )
        assert "check_replicas=False" in str(failure)
        assert "'w'" not in str(failure)
    assert not (tmp_path / "step").exists()


def test_unless_nobody_wants_to_know(pool: Pool, tmp_path: Path):
    good(pool.run(3, save_different, str(tmp_path / "step"), "native", True, False))
    with holdfast.open(tmp_path / "step") as ckpt:
        assert any(np.array_equal(ckpt["deep.rng"].numpy(), rng(rank).numpy()) for rank in (0, 1))


def save_kinds(world: World, path: str, name: str) -> None:
    """One kind of tensor in which the last rank has another last element."""
    last = world.rank == world.size - 1
    whole = torch.arange(24.0).reshape(4, 6) + 1
    if name == "strided":
        state: object = {"t": whole.clone().T}
        state["t"][5, 3] += last
    elif name == "expanded":
        state = {"t": torch.full((1,), 1.0 + last).expand(3000, 5000)}
    elif name == "replicated":
        state = {"t": distribute_tensor(whole, world.mesh(), [Replicate()])}
        state["t"]._local_tensor[3, 5] += last
    elif name == "array":
        state = {"t": np.arange(5) + last}
    elif name == "exchanged":
        state = {"t": torch.arange(1 << 16)}
        if last:
            state["t"][[3, 4]] = state["t"][[4, 3]]
    elif name == "nan":
        state = {"t": torch.tensor([float("nan"), 1.0])}
    elif name == "elsewhere":
        state = {"t": whole, **({"own": torch.ones(2)} if last else {})}
    else:
        state = {} if last else {"t": whole}
    save_sharded(path, state, group=world.group)


@pytest.mark.parametrize("name", ["strided", "expanded", "replicated", "array", "exchanged"])
def test_every_kind_is_compared(pool: Pool, tmp_path: Path, name: str):
    for failure in failures(pool.run(3, save_kinds, str(tmp_path / "step"), name)):
        assert "'t': its elements differ between ranks 0 and 1, rank 2" in str(failure)


@pytest.mark.parametrize("name", ["nan", "elsewhere", "nothing"])
def test_what_is_the_same_or_somebodys_alone_is_saved(pool: Pool, tmp_path: Path, name: str):
    good(pool.run(2, save_kinds, str(tmp_path / "step"), name))
    assert "t" in load_full(tmp_path / "step")


def other_form(world: World, path: str) -> None:
    save_sharded(path, {"t": torch.zeros(2 + world.rank)}, group=world.group)


def test_other_shapes_have_the_same_remedy(pool: Pool, tmp_path: Path):
    for failure in failures(pool.run(2, other_form, str(tmp_path / "step"))):
        assert "but float32 (3,) on rank 1; pass per_rank=['t'] where each rank has its own" in str(
            failure
        )


def change_behind(world: World, path: str, common: int) -> None:
    """What is compared is what was copied: the caller changes its own as soon as it may."""
    sharded_save.little_in_common = lambda _: bool(common)
    state = {
        "t": torch.arange(100.0),
        "cut": sharded(torch.arange(12.0).reshape(6, 2), world.mesh(), (Shard(0),)),
    }
    handle = async_save_sharded(path, state, group=world.group)
    state["t"] += world.rank
    handle.wait()


@pytest.mark.parametrize("common", [0, 1])
def test_changes_behind_the_copy_do_not_count(pool: Pool, tmp_path: Path, common: int):
    try:
        good(pool.run(2, change_behind, str(tmp_path / "step"), common))
    finally:
        good(pool.run(2, restore))
    assert load_full(tmp_path / "step")["t"].tolist() == list(range(100))


def restore(_: World) -> None:
    from holdfast.torch.ranks.staging import little_in_common

    sharded_save.little_in_common = little_in_common


# Kept.


def own_state(world: World, *, blank: bool = False, format: str = "native") -> dict[str, object]:
    here = world.rank + 1
    own = {"cpu": rng(here), "cuda.0": torch.ones(here)}
    state: dict[str, object] = {
        "model": {"w": torch.zeros(4) if blank else torch.arange(4.0)},
        "rng": {name: torch.zeros_like(tensor) for name, tensor in own.items()} if blank else own,
    }
    if format != "safetensors":
        values = {
            "epoch": here,
            "seen": [here, {"file": f"f{here}"}],
            "left": torch.full((2,), here),
        }
        state["loader"] = (
            {"epoch": 0, "seen": None, "left": torch.zeros(2, dtype=torch.int64)}
            if blank
            else values
        )
        state["step"] = 0 if blank else 7
    return state


PATTERNS = ["rng.*", "loader"]


def save_own(world: World, path: str, format: str, block: bool) -> None:
    patterns = PATTERNS if format != "safetensors" else "rng.*"
    save = save_sharded if block else async_save_sharded
    saved = save(
        path, own_state(world, format=format), group=world.group, format=format, per_rank=patterns
    )
    if not block:
        saved.wait()


def load_own(world: World, path: str, format: str, replicated: str = "auto") -> None:
    state = own_state(world, blank=True, format=format)
    load_sharded(path, state, group=world.group, replicated=replicated)
    expected = own_state(world, format=format)
    assert str(state) == str(expected)


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_each_rank_gets_its_own(pool: Pool, tmp_path: Path, format: str, block: bool):
    path = str(tmp_path / "step")
    good(pool.run(3, save_own, path, format, block))
    good(pool.run(3, load_own, path, format))
    good(pool.run(3, load_own, path, format, "broadcast"))
    with holdfast.open(path) as ckpt:
        assert np.array_equal(ckpt["rng.cpu.rank-1-of-3"].numpy(), rng(2).numpy())
    assert holdfast.verify(path).ok


def load_elsewhere(world: World, path: str, strict: bool, keep: bool) -> tuple[object, ...]:
    state = own_state(world, blank=True)
    loaded = load_sharded(
        path, state, group=world.group, strict=strict, per_rank="keep" if keep else "own"
    )
    assert state["model"]["w"].tolist() == [0, 1, 2, 3]
    assert state["loader"]["epoch"] == 0, "kept"
    assert state["step"] == 7
    return loaded.missing, loaded.unexpected, loaded.notes, str(loaded)


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_on_another_number_of_ranks(pool: Pool, tmp_path: Path, format: str):
    path = str(tmp_path / "step")
    good(pool.run(3, save_own, path, format, True))
    for failure in failures(pool.run(2, load_elsewhere, path, True, False)):
        said = "the checkpoint has one for each of 3 ranks, and these are 2; pass per_rank='keep' to keep what the state has"
        for name in ("rng.cpu", "loader.epoch", "loader.left"):
            assert f"{name!r}: {said}" in str(failure)
        assert "missing" not in str(failure)
        assert "unexpected" not in str(failure)
    for strict, keep in ((False, False), (True, True)):
        for missing, unexpected, notes, printed in good(
            pool.run(2, load_elsewhere, path, strict, keep)
        ):
            assert (missing, unexpected) == ((), ())
            assert any(
                note.startswith("rng.cpu: the checkpoint has one for each of 3 ranks")
                for note in notes
            )
            assert "what the state has was kept" in printed


def wrong_pattern(world: World, path: str) -> None:
    state = {"w": torch.ones(2), **({"rng": rng(1)} if world.rank else {})}
    save_sharded(path, state, group=world.group, per_rank=["rng", "rgn.*"])


def test_a_pattern_that_finds_nothing_anywhere(pool: Pool, tmp_path: Path):
    for failure in failures(pool.run(2, wrong_pattern, str(tmp_path / "step"))):
        assert "per_rank='rgn.*': nothing in the state of any rank has such a name" in str(failure)
        assert "per_rank='rng'" not in str(failure)


def test_torch_reads_them_by_the_names_of_the_ranks(tmp_path: Path):
    save_sharded(
        tmp_path / "step", {"rng": rng(3), "epoch": 5}, per_rank=["rng", "epoch"], format="dcp"
    )
    state = {"rng": {"rank-0-of-1": torch.zeros_like(rng(0))}, "epoch": {"rank-0-of-1": 0}}
    dcp.load(state, checkpoint_id=tmp_path / "step")
    assert torch.equal(state["rng"]["rank-0-of-1"], rng(3))
    assert state["epoch"]["rank-0-of-1"] == 5


def test_another_word(tmp_path: Path):
    with pytest.raises(ValueError, match="per_rank= takes 'own' or 'keep', not 'rng'"):
        load_sharded(tmp_path, {}, per_rank="rng")


# The parts.


def test_marks():
    assert size_in(rank_key(2, 5)) == 5
    assert [size_in(key) for key in ("rank-2-of-5x", "rank-a-of-5", 3, None)] == [None] * 4
    assert list(marked(("a", 0), "k")) == [("a.k.0", ("a", "k", 0)), ("a.0.k", ("a", 0, "k"))]
    state = {"a": {"b": 1, "c": [2, 3]}, "d": 4}
    assert mark(state, ["a.c.1", "d", "e"], "k") == (
        {"a": {"b": 1, "c": [2, {"k": 3}]}, "d": {"k": 4}},
        ["a.c.1", "d"],
    )
    assert state == {"a": {"b": 1, "c": [2, 3]}, "d": 4}, "the caller's own is not changed"
    assert mark(state, ["x"], "k")[0] is state


def test_sums_of_bytes_tell_apart_what_differs():
    for nbytes in (0, 1, 4095, 4096, 4097, 3 * 4096 + 5):
        one = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
        assert torch.equal(byte_sums(one), byte_sums(one.clone()))
        assert torch.equal(byte_sums(one), byte_sums(torch.cat([one[:1], one])[1:])), (
            "wherever it lies"
        )
        assert byte_sums(one).numel() == nbytes // 4096 * 8 + nbytes % 4096
        for at in {0, nbytes // 2, nbytes - 1} if nbytes else ():
            other = one.clone()
            other[at] ^= 1
            assert not torch.equal(byte_sums(one), byte_sums(other)), (nbytes, at)
    words = torch.arange(1024)
    other = words[[1, 0, *range(2, 1024)]]
    assert not torch.equal(byte_sums(words.view(torch.uint8)), byte_sums(other.view(torch.uint8)))


def test_who_differs():
    from msgspec.msgpack import encode

    assert differing([b"", encode({"a": [1]}), encode({"a": [1], "b": [2]}), b""]) == {}
    told = [encode({"a": [1]}), encode({"a": [2]}), encode({"a": [1]}), encode({})]
    assert differing(told) == {"a": [[0, 2], [1]]}
    assert differing([encode({"a": [1]}), encode({"a": [b"x"]})]) == {}, (
        "of two kinds: nothing is known"
    )
    assert replica_sums(NO_TENSORS, threads=1) == encode({})


class Loader:
    """Has a state of its own, that differs between ranks."""

    def __init__(self, place: int) -> None:
        self.place = torch.tensor(place)

    def state_dict(self) -> dict[str, object]:
        return {"place": self.place.clone(), "half": int(self.place) // 2}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert state["half"] == int(state["place"]) // 2
        self.place = state["place"]


def loaders(world: World, path: str, format: str) -> int:
    save_sharded(
        path,
        {"loader": Loader(10 + world.rank)},
        group=world.group,
        format=format,
        per_rank="loader",
    )
    loader = Loader(0)
    load_sharded(path, {"loader": loader}, group=world.group)
    return int(loader.place)


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_an_object_that_each_rank_has_for_itself(pool: Pool, tmp_path: Path, format: str):
    assert good(pool.run(3, loaders, str(tmp_path / "step"), format)) == [10, 11, 12]
