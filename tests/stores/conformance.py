"""What every `Store` must do. Subclass `StoreConformance`, give it a `fill` fixture, and pytest runs all of it.

class TestMyStore(StoreConformance):
    @pytest.fixture
    def fill(self):
        return lambda content: MyStore(content)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.core.protocols import Store
from holdfast.errors import Closed, HoldfastError, StoreError, Truncated

__all__ = ["Fill", "StoreConformance"]

Fill = Callable[[Mapping[str, bytes]], Store]

CONTENT = bytes(i * 31 % 256 for i in range(5000))


class StoreConformance:
    """The contract of `holdfast.core.protocols.Store`, one promise a test."""

    keys: tuple[str, ...] = ("a.bin", "b.bin", "sub/c.bin")
    """Names to store under. A store that holds one object lists one."""

    listed = True
    """Whether the keys are listed. What a store adds to another is not."""

    @pytest.fixture
    def fill(self) -> Fill:
        """How to make a store that holds the given bytes under the given keys."""
        raise NotImplementedError("a subclass says how its store is filled")

    @pytest.fixture
    def store(self, fill: Fill) -> Store:
        return fill({key: bytes([i]) + CONTENT for i, key in enumerate(self.keys)})

    def read(self, store: Store, key: str, start: int, stop: int) -> bytes:
        out = bytearray(stop - start)
        store.read(key, start, memoryview(out))
        return bytes(out)

    def test_it_has_a_name(self, store):
        assert isinstance(store.name, str)
        assert store.name

    def test_keys_are_listed_in_order(self, store):
        if self.listed:
            assert list(store.list()) == sorted(self.keys)
        else:
            assert set(store.list()).isdisjoint(self.keys)

    def test_sizes(self, store):
        assert [store.size(key) for key in self.keys] == [len(CONTENT) + 1] * len(self.keys)

    def test_any_range_can_be_read(self, store):
        for i, key in enumerate(self.keys):
            whole = bytes([i]) + CONTENT
            for start, stop in ((0, 1), (0, len(whole)), (17, 4000), (len(whole) - 1, len(whole))):
                assert self.read(store, key, start, stop) == whole[start:stop]

    def test_reading_nothing_is_allowed_anywhere_up_to_the_end(self, store):
        for start in (0, 100, len(CONTENT) + 1):
            assert self.read(store, self.keys[0], start, start) == b""

    def test_reading_past_the_end_is_truncated_and_says_where(self, store):
        end = len(CONTENT) + 1
        for start, stop in ((0, end + 1), (end, end + 1), (end + 50, end + 60)):
            with pytest.raises(Truncated):
                self.read(store, self.keys[0], start, stop)
        with pytest.raises(HoldfastError):
            store.read(self.keys[0], -1, memoryview(bytearray(2)))

    def test_an_unknown_key_is_a_store_error(self, store):
        with pytest.raises(StoreError):
            store.size("nothing here")
        with pytest.raises(StoreError):
            self.read(store, "nothing here", 0, 1)

    def test_an_empty_object(self, fill):
        store = fill({self.keys[0]: b""})
        assert store.size(self.keys[0]) == 0
        assert self.read(store, self.keys[0], 0, 0) == b""
        with pytest.raises(Truncated):
            self.read(store, self.keys[0], 0, 1)

    def test_mapped_memory_is_what_reading_gives(self, store):
        for i, key in enumerate(self.keys):
            mapped = store.map(key)
            if mapped is not None:
                assert bytes(mapped) == bytes([i]) + CONTENT

    def test_writing_to_mapped_memory_changes_no_later_read(self, store):
        mapped = store.map(self.keys[0])
        if mapped is None or mapped.readonly:
            pytest.skip("this store gives no memory that could be written")
        before = self.read(store, self.keys[0], 0, 16)
        mapped[:16] = bytes(16)
        assert self.read(store, self.keys[0], 0, 16) == before

    def test_many_threads_read_at_once(self, store):
        whole = b"\0" + CONTENT
        places = [(n * 37 % 4000, n * 37 % 4000 + n % 900) for n in range(200)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda place: self.read(store, self.keys[0], *place), places))
        assert found == [whole[a:b] for a, b in places]

    def test_what_is_in_memory_is_mapped(self, store):
        assert isinstance(store.read_profile.is_in_memory, bool)
        if store.read_profile.is_in_memory:
            assert [bytes(store.map(key)) for key in self.keys] == [
                bytes([i]) + CONTENT for i in range(len(self.keys))
            ]

    def test_the_block_that_it_prefers_is_a_length(self, store):
        assert store.read_profile.block_nbytes >= 0

    def test_the_stamp_of_the_same_content_is_the_same_plain_value(self, store):
        stamps = [store.stamp(key) for key in self.keys]
        assert json.loads(json.dumps(stamps)) == json.loads(
            json.dumps([store.stamp(key) for key in self.keys])
        )
        assert all(isinstance(stamp, tuple) for stamp in stamps)

    def test_nothing_has_changed_or_gone(self, store):
        self.read(store, self.keys[0], 0, 4)
        assert list(store.find_changed()) == []
        assert store.is_gone is False

    def test_every_key_has_a_place_of_its_own(self, store):
        places = [store.identity(key) for key in self.keys]
        assert places == [store.identity(key) for key in self.keys]
        assert len(set(places)) == len(self.keys)
        assert store.identity() == store.identity()

    def test_what_is_passed_on_lies_below_as_it_is(self, store):
        for key in self.keys:
            below = store.get_underlying_store(key)
            if below is not None:
                assert self.read(below, key, 17, 400) == self.read(store, key, 17, 400)
                assert below.identity(key) == store.identity(key)

    def test_what_reading_costs(self, store):
        for key in self.keys:
            assert store.count_read_nbytes(key, 0) == 0
            assert (
                store.count_read_nbytes(key, store.size(key)) >= store.count_read_nbytes(key, 1) > 0
            )

    def test_after_closing_every_read_says_so(self, store):
        self.read(store, self.keys[0], 0, 4)
        store.close()
        with pytest.raises(Closed):
            self.read(store, self.keys[0], 0, 4)
        store.close()
