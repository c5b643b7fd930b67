"""Which ranges of files the rows of a table use, compared with a slow search range by range."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.table import IRREGULAR, RowKind, StoredFile, Table
from holdfast.core.tensor import NO_CRC
from holdfast.engine.files import FileStorages
from holdfast.engine.source import OpenSource
from holdfast.engine.stored_ranges import StoredRanges, find_stored_ranges
from holdfast.stores.memory import MemoryStore

KEYS = ("a", "b")
STORE = MemoryStore(dict.fromkeys(KEYS, b""), name="<test>")
SOURCE = OpenSource(STORE, threads=1)
UINT8 = DTYPES.name("uint8")
ROW_COUNT = 8

Place = tuple[str, int, int]
"""The file, the first byte and the length of a range."""

PLACES = st.tuples(st.sampled_from(KEYS), st.integers(0, 6), st.integers(0, 3))
CRCS = st.sampled_from([NO_CRC, 7])


def make_table(storages: list[tuple[Place, int]], storage_indices: list[int]) -> Table:
    """Make a table whose rows have these storages, each a place and a checksum."""
    columns = [(KEYS.index(key), start, nbytes, crc) for (key, start, nbytes), crc in storages]
    file_storages = FileStorages(
        [StoredFile(SOURCE, key, STORE) for key in KEYS],
        *np.array(columns, np.int64).reshape(-1, 4).T,
        names=[f"s{index}" for index in range(len(storages))],
    )
    # The kind of a row does not matter here, but each row must have one.
    kinds = [RowKind.from_shape(UINT8, (nbytes,)) for (_, _, nbytes), _ in storages]
    kinds.append(RowKind.from_shape(UINT8, (0,)))
    names = [f"w{row}" for row in range(len(storage_indices))]
    kind_indices = [max(index, 0) for index in storage_indices]
    return Table(names, kinds, kind_indices, storage_indices, file_storages, {})


def list_ranges(stored: StoredRanges) -> list[tuple[Place, int, list[int]]]:
    """Return the place, the checksum and the rows of each range."""
    return [
        (stored.ranges.locate(index), stored.crcs.item(index), stored.rows_of(index))
        for index in range(len(stored))
    ]


@given(
    st.data(),
    st.lists(st.tuples(PLACES, CRCS), max_size=6),
    st.lists(st.tuples(st.integers(0, ROW_COUNT - 1), PLACES, CRCS), max_size=4),
)
def test_each_range_is_there_once_with_its_rows(data, storages, irregular_uses):
    storage_index = st.integers(IRREGULAR, len(storages) - 1)
    storage_indices = data.draw(st.lists(storage_index, min_size=ROW_COUNT, max_size=ROW_COUNT))
    uses = []
    for row, index in enumerate(storage_indices):
        if index != IRREGULAR:
            place, crc = storages[index]
            uses.append((row, place, crc))
    uses += irregular_uses
    rows_of_place: dict[Place, set[int]] = {}
    crcs_of_place: dict[Place, set[int]] = {}
    for row, place, crc in uses:
        if place[2]:
            rows_of_place.setdefault(place, set()).add(row)
            crcs_of_place.setdefault(place, set()).add(crc)

    table = make_table(storages, storage_indices)
    irregular_storages = []
    for row, place, crc in irregular_uses:
        crc32 = None if crc == NO_CRC else crc
        irregular_storages.append((row, Storage(*place, crc32=crc32, home=STORE), STORE))
    ranges = list_ranges(find_stored_ranges(table, irregular_storages))

    assert len(ranges) == len(rows_of_place)
    assert {place: rows for place, _, rows in ranges} == {
        place: sorted(rows) for place, rows in rows_of_place.items()
    }
    assert all(crc in crcs_of_place[place] for place, crc, _ in ranges)
    first_rows = [rows[0] for _, _, rows in ranges]
    assert first_rows == sorted(first_rows)


@given(st.data(), st.lists(st.tuples(PLACES, CRCS), max_size=6))
def test_select_keeps_the_chosen_ranges_with_their_rows(data, storages):
    stored = find_stored_ranges(make_table(storages, [*range(len(storages))]), ())
    count = len(stored)
    is_selected = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))

    selected = stored.select(np.array(is_selected, np.bool_))

    pairs = zip(list_ranges(stored), is_selected, strict=True)
    assert list_ranges(selected) == [stored_range for stored_range, chosen in pairs if chosen]


@given(st.lists(st.integers(1, 4), max_size=6), st.lists(PLACES, max_size=6))
def test_ranges_without_a_checksum_are_merged_into_the_record_that_they_lie_in(
    record_nbytes, places
):
    # The records of file `a` follow each other, with one byte between them.
    records: list[tuple[int, int]] = []
    start = 0
    for nbytes in record_nbytes:
        records.append((start, nbytes))
        start += nbytes + 1
    storages = [(place, NO_CRC) for place in places]
    used = find_stored_ranges(make_table(storages, [*range(len(storages))]), ())
    crcs = [7] * len(records)
    with_records = used.with_unused_ranges(records, crcs, store=STORE, key="a")

    merged, remains = with_records.merge_into_hosts(with_records.crcs != NO_CRC)

    expected: dict[Place, set[int]] = {("a", *record): set() for record in records}
    for place, _, rows in list_ranges(used):
        key, start, nbytes = place
        host = place
        for record_start, length in records:
            if key == "a" and record_start <= start and start + nbytes <= record_start + length:
                host = ("a", record_start, length)
        expected.setdefault(host, set()).update(rows)
    assert {place: {*rows} for place, _, rows in list_ranges(merged)} == expected
    assert len(merged) == remains.sum() == len(expected)
