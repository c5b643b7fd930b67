"""Stores whose content is made when it is read keep the promises of every store."""

from __future__ import annotations

import pickle
from functools import partial

import numpy as np
import pytest

from holdfast.core.dtype import DTYPES
from holdfast.core.protocols import ReadProfile
from holdfast.core.tensor import AliasView
from holdfast.engine.arrays import MemoryTensors
from holdfast.engine.computed import ComputedTensors
from holdfast.errors import StoreError, Unsupported
from holdfast.stores.local import LocalStore
from holdfast.stores.memory import MemoryStore
from holdfast.stores.virtual import ContentCache, Virtual, VirtualFile, tensor_stamp
from holdfast.verbs.shared.rejoin import Assembled, StoredCopy
from tests.stores.conformance import StoreConformance

BYTES = DTYPES.name("uint8")


def copied(content: bytes, start: int, out: memoryview) -> None:
    out[:] = content[start : start + out.nbytes]


def row(content: bytes):
    return MemoryTensors().wrap_array(np.frombuffer(content, np.uint8))


class TestVirtual(StoreConformance):
    @pytest.fixture
    def fill(self):
        def make(content):
            store = Virtual("<made>")
            for key, data in content.items():
                store.put(VirtualFile(len(data), partial(copied, data)), key)
            return store

        return make


class TestVirtualOfAnUnknownLength(StoreConformance):
    @pytest.fixture
    def fill(self):
        def make(content):
            store = Virtual("<made>")
            for key, data in content.items():
                store.put(VirtualFile(partial(len, data), partial(copied, data)), key)
            return store

        return make


class TestWhatIsBelow(StoreConformance):
    @pytest.fixture
    def fill(self):
        return lambda content: Virtual(over=MemoryStore(content))


class TestFilesBelow(StoreConformance):
    @pytest.fixture
    def fill(self, tmp_path):
        def make(content):
            for key, data in content.items():
                (tmp_path / key).parent.mkdir(exist_ok=True)
                (tmp_path / key).write_bytes(data)
            return Virtual(over=LocalStore(tmp_path))

        return make


class TestWhatIsAdded(StoreConformance):
    listed = False

    @pytest.fixture
    def fill(self):
        def make(content):
            store = Virtual(over=MemoryStore({"file": b"file"}))
            for key, data in content.items():
                store.put(VirtualFile(len(data), partial(copied, data)), key)
            return store

        return make


class TestComputed(StoreConformance):
    keys = ("0", "1", "2")

    @pytest.fixture
    def fill(self):
        def make(content):
            store = ComputedTensors()
            for key, data in content.items():
                made = store.make_tensor(
                    row(bytes(255 - b for b in data)), BYTES, lambda elements: 255 - elements
                )
                assert made.chunks[0].storage.key == key
            return store

        return make


class TestAssembled(StoreConformance):
    keys = ("0", "1", "2")

    @pytest.fixture
    def fill(self):
        def make(content):
            store = Assembled()
            for key, data in content.items():
                halves = [(0, data[: len(data) // 2 + 1]), (len(data) // 2, data[len(data) // 2 :])]
                copies = [
                    StoredCopy.of(row(half), AliasView(0, len(data), start * 8, (8,)))
                    for start, half in halves
                    if half
                ]
                assert store.storage(len(data), copies).key == key
            return store

        return make


def test_a_computed_store_says_what_it_reads(tmp_path):
    (tmp_path / "x").write_bytes(bytes(80))
    half = ComputedTensors().make_tensor(
        row(bytes(80)), DTYPES.name("float64"), lambda elements: elements.astype(np.float64)
    )
    store, key = half.source.store, half.chunks[0].storage.key
    assert (
        store.size(key),
        store.count_read_nbytes(key, 640),
        store.count_read_nbytes(key, 8),
    ) == (640, 80, 1)
    assert store.stamp(key)


def test_the_stamp_of_what_is_computed_is_that_of_its_file(tmp_path):
    from holdfast import open, save

    stamps = []
    for value in (0, 1, 1):
        save({"w": np.full(80 + value, 1, np.float32)}, tmp_path / "x.safetensors")
        with open(tmp_path / "x.safetensors") as source:
            tensor = source["w"][:80]
            made = ComputedTensors().make_tensor(
                tensor, DTYPES.name("float16"), lambda elements: elements.astype(np.float16)
            )
            stamps.append(tensor_stamp(made))
            assert tensor_stamp(made) == stamps[-1]
    assert stamps[0] != stamps[1] != stamps[2]


def test_entries_travel_with_the_store_below_and_not_alone(tmp_path):
    (tmp_path / "x").write_bytes(b"below")
    store = Virtual(over=LocalStore(tmp_path / "x"))
    store.put(VirtualFile(5, partial(copied, b"above")), "y")
    arrived = pickle.loads(pickle.dumps(store))
    for key, expected in (("x", b"below"), ("y", b"above")):
        out = bytearray(5)
        arrived.read(key, 0, memoryview(out))
        assert bytes(out) == expected
    with pytest.raises(Unsupported, match="save it"):
        pickle.dumps(Virtual())


def test_a_changed_file_shows_through(tmp_path):
    (tmp_path / "x").write_bytes(b"below")
    store = Virtual(over=LocalStore(tmp_path))
    assert store.size("x") == 5
    (tmp_path / "x").write_bytes(b"something else")
    assert store.find_changed() == ["x"]
    (tmp_path / "x").unlink()
    with pytest.raises(StoreError):
        Virtual(over=LocalStore(tmp_path)).size("x")


def test_two_stores_over_one_are_different_places():
    below = MemoryStore({"x": b"below"})
    one, other = Virtual(over=below), Virtual(over=below)
    for store in (one, other):
        store.put(VirtualFile(5, partial(copied, b"above")), "y")
    assert one.identity("x") == other.identity("x") == below.identity("x")
    assert one.identity("y") != other.identity("y")
    assert one.identity() != other.identity() != below.identity()


def test_what_was_made_last_is_kept_within_bounds():
    kept = ContentCache(100)
    for i in range(5):
        kept.put(i, np.full(40, i, np.uint8))
    assert (kept.get(2), kept.nbytes) == (None, 80)
    assert int(kept.get(3)[0]) == 3
    kept.put(5, np.zeros(40, np.uint8))
    assert kept.get(4) is None, "what was asked for last stays"
    kept.put("large", np.zeros(1000, np.uint8))
    assert (kept.get("large").nbytes, kept.nbytes) == (1000, 1000)
    assert pickle.loads(pickle.dumps(kept)).nbytes == 0
    kept.clear()
    assert kept.nbytes == 0


def test_a_store_over_another_is_read_as_that_one_is():
    """But for what is in memory or in order: computed bytes are neither."""
    below = MemoryStore({"a": b"x"})
    below.read_profile = ReadProfile(
        is_in_memory=True, is_sequential=True, is_exact=True, block_nbytes=4096, request_count=24
    )
    assert Virtual(over=below).read_profile == ReadProfile(
        is_exact=True, block_nbytes=4096, request_count=24
    )
    assert Virtual().read_profile == ReadProfile()
    assert Virtual().read_profile.is_file
    assert not Virtual(over=below).read_profile.is_file
