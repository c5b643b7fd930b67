"""Storages that go from a file to a GPU, with the CPU in its place: when they are read, all at once or before code may look."""

from __future__ import annotations

import gc
import io
import weakref

import pytest
import torch
from torch.utils.serialization import config

from holdfast.errors import Corrupted, Refused
from holdfast.torch import load, save
from holdfast.torch.serialization import locations
from holdfast.torch.serialization import storages as storages_module
from holdfast.torch.serialization.locations import known_device
from tests.support import flip_bit


@pytest.fixture
def fills(monkeypatch):
    """Everything is said to go to a GPU, which is the CPU; what is filled together is noted."""
    seen: list[int] = []
    before = storages_module.load_rows

    def load_rows(groups, **more):
        seen.append(sum(len(rows.destinations) for rows in groups))
        return before(groups, **more)

    monkeypatch.setattr(
        storages_module, "known_device", lambda map_location, location: torch.device("cpu:0")
    )
    monkeypatch.setattr(storages_module, "load_rows", load_rows)
    return seen


def state() -> dict[str, torch.Tensor]:
    base = torch.arange(60.0).reshape(6, 10)
    return {
        "a": base,
        "b": base[2:4, ::3],
        "c": torch.ones(7, dtype=torch.bfloat16),
        "e": torch.zeros(0),
        "n": torch.tensor(3),
    }


def check(found) -> None:
    for name, tensor in state().items():
        assert torch.equal(found[name], tensor), name
        assert found[name].stride() == tensor.stride(), name
    assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr()


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_all_that_waits_is_read_together(tmp_path, fills, legacy):
    torch.save(state(), tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    check(load(tmp_path / "a.pt", map_location="cuda"))
    assert fills == [4]


def test_mapped_files_and_buffers_too(tmp_path, fills):
    torch.save(state(), tmp_path / "a.pt")
    check(load(tmp_path / "a.pt", map_location="cuda", mmap=True))
    check(load(io.BytesIO((tmp_path / "a.pt").read_bytes()), map_location="cuda"))
    assert fills == [4, 4]


def test_everything_is_there_before_code_may_look(tmp_path, fills):
    torch.save(state(), tmp_path / "a.pt")
    check(load(tmp_path / "a.pt", map_location="cuda", weights_only=False))
    assert fills == [4]


def test_where_tags_differ_each_is_read_when_it_is_asked_for(tmp_path, fills):
    torch.save(state(), tmp_path / "a.pt")
    check(load(tmp_path / "a.pt", map_location={"cpu": "cuda:0"}, weights_only=False))
    assert fills == [1, 1, 1, 1]


@pytest.mark.parametrize("mmap", [False, True])
def test_damage_is_found_unless_the_file_is_mapped(tmp_path, fills, mmap):
    torch.save({"a": torch.arange(1000)}, tmp_path / "a.pt")
    flip_bit(tmp_path / "a.pt", after=torch.arange(1000).numpy().tobytes()[8:64])
    if mmap:
        assert not torch.equal(
            load(tmp_path / "a.pt", map_location="cuda", mmap=True)["a"], torch.arange(1000)
        )
        return
    with pytest.raises(Corrupted, match="checksum"):
        load(tmp_path / "a.pt", map_location="cuda")
    assert load(tmp_path / "a.pt", map_location="cuda", verify=False)["a"].shape == (1000,)


def many(count: int = 700) -> dict[str, torch.Tensor]:
    """Of all widths and orders, with ties, views, what is long, and what is empty."""
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex128, torch.bool]
    made = {f"t{i}": torch.randint(0, 2, (2 + i % 3, 3)).to(dtypes[i % 6]) for i in range(count)}
    made |= {
        f"turned{i}": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
        for i in range(30)
    }
    made |= {
        "tied": made["t9"],
        "view": made["t11"][1:],
        "long": torch.randn(300, 300),
        "empty": torch.zeros(0, 2),
    }
    return made | {
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "wants": torch.ones(2, requires_grad=True),
    }


def check_many(found) -> None:
    for name, tensor in many().items():
        assert found[name].stride() == tensor.stride(), name
        assert type(found[name]) is type(tensor), name
    assert found["tied"].untyped_storage().data_ptr() == found["t9"].untyped_storage().data_ptr()
    assert found["view"].untyped_storage().data_ptr() == found["t11"].untyped_storage().data_ptr()


@pytest.mark.parametrize("budget", [None, 2 << 20])
def test_many_are_filled_by_few_copies(tmp_path, fills, budget):
    state = many()
    torch.save(state, tmp_path / "a.pt")
    found = load(tmp_path / "a.pt", map_location="cuda", max_host_memory=budget)
    check_many(found)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name
    assert fills == [len(state) - 2], "each storage once"


@pytest.mark.parametrize("how", ["damaged", "unchecked"])
def test_damage_among_many_is_named(tmp_path, fills, how):
    state = {f"t{i}": torch.full((50,), i) for i in range(300)}
    torch.save(state, tmp_path / "a.pt")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    content[content.index(state["t200"].numpy().tobytes())] ^= 1
    (tmp_path / "a.pt").write_bytes(content)
    if how == "unchecked":
        assert not torch.equal(
            load(tmp_path / "a.pt", map_location="cuda", verify=False)["t200"], state["t200"]
        )
        return
    with pytest.raises(Corrupted, match="checksum") as raised:
        load(tmp_path / "a.pt", map_location="cuda")
    assert "data/200" in str(raised.value)
    assert raised.value.tensor == "t200"
    assert raised.value.offset == content.index(state["t200"].numpy().tobytes()[8:]) - 8


def test_which_device_a_tag_stands_for(monkeypatch):
    monkeypatch.setattr(
        locations, "present_device", lambda location, backend: torch.device(location)
    )
    assert known_device("cuda:1", "cpu") == torch.device("cuda:1")
    assert known_device(torch.device("cuda:0"), "cpu") == torch.device("cuda:0")
    assert known_device(None, "cuda:3") == torch.device("cuda:3")
    assert known_device({"cuda:0": "cuda:1"}, "cuda:0") == torch.device("cuda:1")
    assert known_device({"cuda:0": "cpu"}, "cuda:0") == torch.device("cpu")
    assert known_device(None, "cpu") == torch.device("cpu")
    assert known_device(lambda storage, location: storage, "cuda:0") is None


def test_a_package_of_somebody_else_comes_first(monkeypatch):
    monkeypatch.setattr(
        locations, "present_device", lambda location, backend: torch.device(location)
    )
    monkeypatch.setattr(locations, "PACKAGES", locations.Packages([locations.CPU, locations.CUDA]))
    assert known_device("cuda:1", "cpu") is not None
    locations.register_package(15, lambda storage: None, lambda storage, location: None)
    assert known_device("cuda:1", "cpu") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_given(tmp_path):
    torch.save(state(), tmp_path / "a.pt")
    with pytest.raises(Refused, match="is_available"):
        load(tmp_path / "a.pt", map_location="cuda")


# Many small ones.

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.uint8,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float16,
]


def bank(count: int = 300) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    state = {}
    for i in range(count):
        dtype = DTYPES[i % len(DTYPES)]
        raw = torch.randint(
            0, 2 if dtype is torch.bool else 256, (i % 9 + 1, 16), dtype=torch.uint8, generator=made
        )
        state[f"t{i}"] = raw.view(dtype)
    state["turned"] = torch.arange(6.0).reshape(2, 3).T
    state["number"] = torch.tensor(7.0)
    return state


def same(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(state)
    for name, tensor in state.items():
        other = found[name]
        assert (other.dtype, other.shape, other.stride()) == (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        ), name
        assert other.untyped_storage().tolist() == tensor.untyped_storage().tolist(), name
        assert not other._is_view(), name
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == len(state)


@pytest.mark.parametrize("alignment", [1, 64])
def test_many_are_spread_on_the_device(tmp_path, fills, alignment):
    before, config.save.storage_alignment = config.save.storage_alignment, alignment
    try:
        save(bank(), tmp_path / "a.pt")
    finally:
        config.save.storage_alignment = before
    same(load(tmp_path / "a.pt", map_location="cuda"), bank())
    assert fills == [len(bank())]


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_a_load_leaves_nothing_to_the_collector(tmp_path, where, monkeypatch):
    if where == "cuda":
        monkeypatch.setattr(
            storages_module, "known_device", lambda map_location, location: torch.device("cpu:0")
        )
    torch.save({f"t{i}": torch.full((5,), i) for i in range(300)}, tmp_path / "a.pt")
    gc.collect()
    gc.disable()
    try:
        found = load(tmp_path / "a.pt", map_location=where)
        gone = [weakref.ref(tensor.untyped_storage()) for tensor in found.values()]
        del found
        assert not any(one() is not None for one in gone)
    finally:
        gc.enable()
