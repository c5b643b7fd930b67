"""Which ranges the rows of a table use, against the same found range by range."""

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

Place = tuple[str, int, int]

PLACES = st.tuples(st.sampled_from(KEYS), st.integers(0, 6), st.integers(0, 3))
SUMS = st.sampled_from([NO_CRC, 7])


def table_of(storages: list[tuple[Place, int]], numbers: list[int]) -> Table:
    """Rows with the storages of these numbers."""
    columns = (
        np.array(
            [(KEYS.index(key), start, nbytes, crc) for (key, start, nbytes), crc in storages],
            np.int64,
        )
        .reshape(-1, 4)
        .T
    )
    files = [StoredFile(SOURCE, key, STORE) for key in KEYS]
    names = [f"w{row}" for row in range(len(numbers))]
    held = FileStorages(files, *columns, names=[f"s{number}" for number in range(len(storages))])
    kinds = [RowKind.from_shape(UINT8, (nbytes,)) for (_, _, nbytes), _ in storages] or [
        RowKind.from_shape(UINT8, (0,))
    ]
    return Table(names, kinds, [max(number, 0) for number in numbers], numbers, held, {})


def plainly(found: StoredRanges) -> list[tuple[Place, int, list[int]]]:
    return [
        (found.ranges.locate(number), found.crcs.item(number), found.rows_of(number))
        for number in range(len(found))
    ]


@given(
    st.data(),
    st.lists(st.tuples(PLACES, SUMS), max_size=6),
    st.lists(st.tuples(st.integers(0, 7), PLACES, SUMS), max_size=4),
)
def test_each_range_is_there_once_with_its_rows(data, storages, pieces):
    number = st.integers(IRREGULAR, len(storages) - 1)
    numbers = data.draw(st.lists(number, min_size=8, max_size=8))
    own = [(row, storages[number]) for row, number in enumerate(numbers) if number != IRREGULAR]
    more = [
        (row, Storage(*place, crc32=None if crc == NO_CRC else crc, home=STORE), STORE)
        for row, place, crc in pieces
    ]
    expected: dict[Place, tuple[int, set[int]]] = {}
    for row, (place, crc) in [*own, *((row, (place, crc)) for row, place, crc in pieces)]:
        if place[2]:
            expected.setdefault(place, (crc, set()))[1].add(row)
    found = find_stored_ranges(table_of(storages, numbers), more)
    assert {place: rows for place, _, rows in plainly(found)} == {
        place: sorted(rows) for place, (_, rows) in expected.items()
    }
    firsts = [rows[0] for _, _, rows in plainly(found)]
    assert (firsts, len(firsts)) == (sorted(firsts), len(expected))
    recorded = {
        place: {
            crc
            for one, crc in [*(own for _, own in own), *(piece[1:] for piece in pieces)]
            if one == place
        }
        for place in expected
    }
    assert all(crc in recorded[place] for place, crc, _ in plainly(found))
    wanted = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(found), max_size=len(found))), np.bool_
    )
    assert plainly(found.select(wanted)) == [
        one for one, chosen in zip(plainly(found), wanted.tolist(), strict=True) if chosen
    ]


@given(st.lists(st.tuples(st.integers(1, 4), SUMS), max_size=6), st.lists(PLACES, max_size=6))
def test_ranges_without_a_checksum_are_folded_into_the_record_that_they_lie_in(records, others):
    """Records of file `a` follow each other, with a byte between them."""
    starts = np.cumsum([0, *(nbytes + 1 for nbytes, _ in records)]).tolist()
    hosts = [(start, nbytes) for start, (nbytes, _) in zip(starts, records, strict=False)]
    used = find_stored_ranges(
        table_of([(place, NO_CRC) for place in others], [*range(len(others))]), ()
    )
    found = used.with_unused_ranges(hosts, [7] * len(hosts), store=STORE, key="a")
    folded, left = found.merge_into_hosts(found.crcs != NO_CRC)
    expected: dict[Place, set[int]] = {("a", *host): set() for host in hosts}
    for place, _, rows in plainly(used):
        key, start, nbytes = place
        inside = [
            host
            for host in hosts
            if key == "a" and host[0] <= start and start + nbytes <= sum(host)
        ]
        expected.setdefault(("a", *inside[0]) if inside else place, set()).update(rows)
    assert {place: {*rows} for place, _, rows in plainly(folded)} == expected
    assert len(folded) == left.sum() == len(expected)
