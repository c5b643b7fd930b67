"""Stores whose content is computed when it is read."""

from __future__ import annotations

import pickle
from functools import partial

import numpy as np
import pytest

import holdfast
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
from tests.stores.conformance import StoreConformance, read_range

BYTES = DTYPES.name("uint8")


def copy_content(content: bytes, start: int, out: memoryview) -> None:
    """Fill memory from an offset on, as the entry of a `Virtual` store does."""
    out[:] = content[start : start + out.nbytes]


def make_entry(content: bytes) -> VirtualFile:
    return VirtualFile(len(content), partial(copy_content, content))


def make_bytes_tensor(content: bytes):
    return MemoryTensors().wrap_array(np.frombuffer(content, np.uint8))


class TestVirtual(StoreConformance):
    @pytest.fixture
    def make_store(self):
        def make(content):
            store = Virtual("<computed>")
            for key, data in content.items():
                store.put(make_entry(data), key)
            return store

        return make


class TestVirtualWithComputedSizes(StoreConformance):
    @pytest.fixture
    def make_store(self):
        def make(content):
            store = Virtual("<computed>")
            for key, data in content.items():
                size = partial(len, data)
                store.put(VirtualFile(size, partial(copy_content, data)), key)
            return store

        return make


class TestVirtualOverMemory(StoreConformance):
    @pytest.fixture
    def make_store(self):
        return lambda content: Virtual(over=MemoryStore(content))


class TestVirtualOverFiles(StoreConformance):
    @pytest.fixture
    def make_store(self, tmp_path):
        def make(content):
            for key, data in content.items():
                (tmp_path / key).parent.mkdir(exist_ok=True)
                (tmp_path / key).write_bytes(data)
            return Virtual(over=LocalStore(tmp_path))

        return make


class TestEntriesOverAnotherStore(StoreConformance):
    lists_keys = False

    @pytest.fixture
    def make_store(self):
        def make(content):
            store = Virtual(over=MemoryStore({"file": b"file"}))
            for key, data in content.items():
                store.put(make_entry(data), key)
            return store

        return make


class TestComputed(StoreConformance):
    keys = ("0", "1", "2")

    @pytest.fixture
    def make_store(self):
        def make(content):
            store = ComputedTensors()
            for key, data in content.items():
                inverted = bytes(255 - byte for byte in data)
                tensor = store.make_computed_tensor(
                    make_bytes_tensor(inverted), BYTES, lambda elements: 255 - elements
                )
                assert tensor.chunks[0].storage.key == key
            return store

        return make


class TestAssembled(StoreConformance):
    keys = ("0", "1", "2")

    @pytest.fixture
    def make_store(self):
        def make(content):
            store = Assembled()
            for key, data in content.items():
                # Two copies of the halves, which overlap by one byte.
                middle = len(data) // 2
                copies = []
                for start, half in ((0, data[: middle + 1]), (middle, data[middle:])):
                    if half:
                        view = AliasView(0, len(data), start * 8, (8,))
                        copies.append(StoredCopy.of(make_bytes_tensor(half), view))
                assert store.storage(len(data), copies).key == key
            return store

        return make


def test_a_computed_file_costs_the_bytes_that_are_read_for_it():
    tensor = ComputedTensors().make_computed_tensor(
        make_bytes_tensor(bytes(80)),
        DTYPES.name("float64"),
        lambda elements: elements.astype(np.float64),
    )
    store = tensor.source.store
    key = tensor.chunks[0].storage.key
    assert store.size(key) == 640
    assert store.count_read_nbytes(key, 640) == 80
    assert store.count_read_nbytes(key, 8) == 1


def test_the_stamp_of_a_computed_tensor_changes_with_its_file(tmp_path):
    path = tmp_path / "x.safetensors"
    stamps = []
    for value in (0, 1, 1):
        holdfast.save({"w": np.full(80 + value, 1, np.float32)}, path)
        with holdfast.open(path) as checkpoint:
            tensor = ComputedTensors().make_computed_tensor(
                checkpoint["w"][:80],
                DTYPES.name("float16"),
                lambda elements: elements.astype(np.float16),
            )
            stamps.append(tensor_stamp(tensor))
            assert tensor_stamp(tensor) == stamps[-1]
    # The last file has equal content, and was written later.
    assert stamps[0] != stamps[1] != stamps[2]


def test_a_store_over_a_file_can_be_pickled_with_its_entries(tmp_path):
    (tmp_path / "x").write_bytes(b"file")
    store = Virtual(over=LocalStore(tmp_path / "x"))
    store.put(make_entry(b"entry"), "y")
    unpickled_store = pickle.loads(pickle.dumps(store))
    assert read_range(unpickled_store, "x", 0, 4) == b"file"
    assert read_range(unpickled_store, "y", 0, 5) == b"entry"


def test_a_store_of_computed_files_alone_cannot_be_pickled():
    with pytest.raises(Unsupported, match="save it"):
        pickle.dumps(Virtual())


def test_changes_of_the_store_below_are_found(tmp_path):
    (tmp_path / "x").write_bytes(b"file")
    store = Virtual(over=LocalStore(tmp_path))
    assert store.size("x") == 4
    (tmp_path / "x").write_bytes(b"something else")
    assert store.find_changed() == ["x"]


def test_a_missing_file_of_the_store_below_raises_a_store_error(tmp_path):
    with pytest.raises(StoreError):
        Virtual(over=LocalStore(tmp_path)).size("x")


def test_entries_of_two_stores_have_two_identities():
    memory_store = MemoryStore({"x": b"file"})
    store = Virtual(over=memory_store)
    store.put(make_entry(b"entry"), "y")
    other_store = Virtual(over=memory_store)
    other_store.put(make_entry(b"entry"), "y")

    assert store.identity("x") == other_store.identity("x") == memory_store.identity("x")
    assert store.identity("y") != other_store.identity("y")
    assert store.identity() != other_store.identity()
    assert store.identity() != memory_store.identity()


def test_a_cache_drops_the_content_that_was_used_least_recently():
    cache = ContentCache(100)
    for i in range(5):
        cache.put(i, np.full(40, i, np.uint8))
    assert cache.get(2) is None
    assert cache.nbytes == 80

    # After this, 4 is the least recently used content.
    assert int(cache.get(3)[0]) == 3
    cache.put(5, np.zeros(40, np.uint8))
    assert cache.get(4) is None
    assert cache.get(3) is not None


def test_a_cache_keeps_the_last_content_even_if_it_is_too_large():
    cache = ContentCache(100)
    cache.put("small", np.zeros(40, np.uint8))
    cache.put("large", np.zeros(1000, np.uint8))
    assert cache.get("large").nbytes == 1000
    assert cache.nbytes == 1000


def test_a_cleared_or_unpickled_cache_is_empty():
    cache = ContentCache(100)
    cache.put("small", np.zeros(40, np.uint8))
    assert pickle.loads(pickle.dumps(cache)).nbytes == 0
    cache.clear()
    assert cache.nbytes == 0


def test_a_store_is_read_as_the_one_below():
    memory_store = MemoryStore({"a": b"x"})
    memory_store.read_profile = ReadProfile(
        is_in_memory=True, is_sequential=True, is_exact=True, block_nbytes=4096, request_count=24
    )
    store = Virtual(over=memory_store)
    # Its entries are computed: they are not in memory, and can be read in any order.
    expected_profile = ReadProfile(is_exact=True, block_nbytes=4096, request_count=24)
    assert store.read_profile == expected_profile
    assert not store.read_profile.is_file


def test_a_store_of_computed_files_alone_is_read_like_a_file():
    assert Virtual().read_profile == ReadProfile()
    assert Virtual().read_profile.is_file
