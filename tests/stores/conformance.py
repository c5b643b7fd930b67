"""The promises of every `Store`, as tests. Subclass `StoreConformance` and define the fixture `make_store`.

class TestMyStore(StoreConformance):
    @pytest.fixture
    def make_store(self):
        return MyStore
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.core.protocols import Store
from holdfast.errors import Closed, HoldfastError, StoreError, Truncated

__all__ = ["MakeStore", "StoreConformance", "read_range"]

MakeStore = Callable[[Mapping[str, bytes]], Store]

CONTENT = bytes(i * 31 % 256 for i in range(5000))


def read_range(store: Store, key: str, start: int, stop: int) -> bytes:
    """Return a range of a file of a store."""
    out = bytearray(stop - start)
    store.read(key, start, memoryview(out))
    return bytes(out)


class StoreConformance:
    """Tests the contract of `holdfast.core.protocols.Store`, one promise in each test."""

    keys: tuple[str, ...] = ("a.bin", "b.bin", "sub/c.bin")
    """The keys of the files. A store of one file has one key."""

    lists_keys = True
    """Whether `list` returns these keys. It does not return what a store adds to another one."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        """Return a function that makes a store with the given content under the given keys."""
        raise NotImplementedError("define the fixture make_store in the subclass")

    @pytest.fixture
    def content(self) -> dict[str, bytes]:
        """The content of each file. Every file begins with another byte."""
        return {key: bytes([index]) + CONTENT for index, key in enumerate(self.keys)}

    @pytest.fixture
    def store(self, make_store: MakeStore, content: dict[str, bytes]) -> Store:
        return make_store(content)

    def test_a_store_has_a_name(self, store):
        assert isinstance(store.name, str)
        assert store.name

    def test_list_returns_the_keys_in_order(self, store):
        listed_keys = list(store.list())
        if self.lists_keys:
            assert listed_keys == sorted(self.keys)
        else:
            assert set(listed_keys).isdisjoint(self.keys)

    def test_size_returns_the_length_of_each_file(self, store, content):
        for key in self.keys:
            assert store.size(key) == len(content[key])

    def test_read_fills_any_range(self, store, content):
        for key, data in content.items():
            last = len(data) - 1
            for start, stop in ((0, 1), (0, len(data)), (17, 4000), (last, len(data))):
                assert read_range(store, key, start, stop) == data[start:stop]

    def test_read_accepts_an_empty_range_up_to_the_end(self, store):
        key = self.keys[0]
        for offset in (0, 100, store.size(key)):
            assert read_range(store, key, offset, offset) == b""

    def test_read_past_the_end_raises_truncated(self, store):
        key = self.keys[0]
        nbytes = store.size(key)
        for start, stop in ((0, nbytes + 1), (nbytes, nbytes + 1), (nbytes + 50, nbytes + 60)):
            with pytest.raises(Truncated):
                read_range(store, key, start, stop)

    def test_read_from_a_negative_offset_raises(self, store):
        with pytest.raises(HoldfastError):
            store.read(self.keys[0], -1, memoryview(bytearray(2)))

    def test_an_unknown_key_raises_a_store_error(self, store):
        with pytest.raises(StoreError):
            store.size("nothing here")
        with pytest.raises(StoreError):
            read_range(store, "nothing here", 0, 1)

    def test_a_file_may_be_empty(self, make_store):
        key = self.keys[0]
        store = make_store({key: b""})
        assert store.size(key) == 0
        assert read_range(store, key, 0, 0) == b""
        with pytest.raises(Truncated):
            read_range(store, key, 0, 1)

    def test_mapped_memory_has_the_content(self, store, content):
        for key, data in content.items():
            memory = store.map(key)
            if memory is not None:
                assert bytes(memory) == data

    def test_writing_to_mapped_memory_does_not_change_the_file(self, store):
        key = self.keys[0]
        memory = store.map(key)
        if memory is None or memory.readonly:
            pytest.skip("this store has no writable memory")
        original = read_range(store, key, 0, 16)
        memory[:16] = bytes(16)
        assert read_range(store, key, 0, 16) == original

    def test_many_threads_can_read_at_once(self, store, content):
        key = self.keys[0]
        ranges = [(i * 37 % 4000, i * 37 % 4000 + i % 900) for i in range(200)]
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda bounds: read_range(store, key, *bounds), ranges))
        assert results == [content[key][start:stop] for start, stop in ranges]

    def test_files_in_memory_can_be_mapped(self, store, content):
        is_in_memory = store.read_profile.is_in_memory
        assert isinstance(is_in_memory, bool)
        if is_in_memory:
            for key, data in content.items():
                assert bytes(store.map(key)) == data

    def test_the_preferred_block_size_is_not_negative(self, store):
        assert store.read_profile.block_nbytes >= 0

    def test_a_stamp_is_a_plain_tuple_that_stays_the_same(self, store):
        stamps = [store.stamp(key) for key in self.keys]
        later_stamps = [store.stamp(key) for key in self.keys]
        assert json.dumps(stamps) == json.dumps(later_stamps)
        assert all(isinstance(stamp, tuple) for stamp in stamps)

    def test_an_untouched_store_has_no_changes(self, store):
        read_range(store, self.keys[0], 0, 4)
        assert list(store.find_changed()) == []
        assert store.is_gone is False

    def test_every_key_has_an_identity_that_stays_the_same(self, store):
        identities = [store.identity(key) for key in self.keys]
        assert identities == [store.identity(key) for key in self.keys]
        assert len(set(identities)) == len(self.keys)
        assert store.identity() == store.identity()

    def test_the_underlying_store_has_the_same_content_and_identity(self, store):
        for key in self.keys:
            underlying_store = store.get_underlying_store(key)
            if underlying_store is not None:
                assert read_range(underlying_store, key, 17, 400) == read_range(store, key, 17, 400)
                assert underlying_store.identity(key) == store.identity(key)

    def test_reading_more_costs_no_less(self, store):
        for key in self.keys:
            cost_of_one = store.count_read_nbytes(key, 1)
            cost_of_all = store.count_read_nbytes(key, store.size(key))
            assert store.count_read_nbytes(key, 0) == 0
            assert cost_of_all >= cost_of_one > 0

    def test_a_closed_store_cannot_be_read(self, store):
        read_range(store, self.keys[0], 0, 4)
        store.close()
        with pytest.raises(Closed):
            read_range(store, self.keys[0], 0, 4)

    def test_a_store_can_be_closed_twice(self, store):
        store.close()
        store.close()
