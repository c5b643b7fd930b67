"""Which ranges of files the rows of a table use, each range once.

    range          0      1      2      3
    row_edges      0      1      3      4      5
    rows           0      1  4   2      3           rows 1 and 4 are tied: both use range 1

The rows of range `i` are `rows[row_edges[i]:row_edges[i + 1]]`, in ascending order. Ranges are in
the order of the first row that uses them. A tensor without bytes uses no range.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.chunk import Storage
from holdfast.core.protocols import Source, Store
from holdfast.core.table import IRREGULAR, FileColumns, Table
from holdfast.core.tensor import NO_CRC
from holdfast.core.value import Value
from holdfast.engine.coalesce import Ranges

StorageUse = tuple[int, Storage, Store]
"""A row, one of its storages, and the store that has the bytes of that storage."""


class StoredRanges(Value, frozen=True, eq=False):
    """Ranges of files, each once, with the rows of a table that use it."""

    ranges: Ranges
    stores: Sequence[Store]
    """The store of each file in `ranges.keys`."""
    crcs: Ints
    """The recorded CRC-32 of each range; `NO_CRC` if none is recorded."""
    row_edges: Ints
    rows: Ints

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self.crcs)

    @property
    def range_indices(self) -> Ints:
        """The range that each entry of `rows` belongs to."""
        return np.arange(len(self)).repeat(np.diff(self.row_edges))

    def rows_of(self, range_index: int) -> list[int]:
        """Return the rows that use a range."""
        start = self.row_edges.item(range_index)
        stop = self.row_edges.item(range_index + 1)
        return cast("list[int]", self.rows[start:stop].tolist())

    def in_store(self, store: Store) -> Bools:
        """Return for each range whether it lies in a store."""
        is_in_store = np.array([file_store is store for file_store in self.stores], np.bool_)
        return is_in_store[self.ranges.files]

    def select(self, is_selected: Bools) -> StoredRanges:
        """Return some of the ranges, with their rows."""
        row_counts = np.diff(self.row_edges)[is_selected]
        return StoredRanges(
            self.ranges.select(is_selected),
            self.stores,
            self.crcs[is_selected],
            np.append(0, np.cumsum(row_counts)),
            self.rows[is_selected[self.range_indices]],
        )

    def with_unused_ranges(
        self, ranges: Sequence[tuple[int, int]], crcs: Sequence[int], *, store: Store, key: str
    ) -> StoredRanges:
        """Return all ranges, and after them ranges that no row uses.

        Args:
            ranges: The first byte and the length of each unused range.
            crcs: The recorded CRC-32 of each unused range, or `NO_CRC`.
            store: The store of their file.
            key: The key of their file.
        """
        keys = [*self.ranges.keys]
        stores = [*self.stores]
        for index, file_store in enumerate(stores):
            if file_store is store and keys[index] == key:
                file_index = index
                break
        else:
            file_index = len(keys)
            keys.append(key)
            stores.append(store)

        starts, nbytes = np.array(ranges, np.int64).reshape(-1, 2).T
        used = self.ranges
        all_ranges = Ranges(
            keys,
            np.append(used.files, np.full(len(starts), file_index)),
            np.append(used.starts, starts),
            np.append(used.nbytes, nbytes),
        )
        row_edges = np.append(self.row_edges, np.full(len(starts), self.row_edges[-1]))
        all_crcs = np.append(self.crcs, np.array(crcs, np.int64))
        return StoredRanges(all_ranges, stores, all_crcs, row_edges, self.rows)

    def merge_into_hosts(self, is_host: Bools) -> tuple[StoredRanges, Bools]:
        """Give the rows of ranges without a checksum to the hosts that these ranges lie in.

        A host is a range with a checksum, such as a record of an archive. When its checksum is
        compared, that also checks the ranges inside of it.

        Args:
            is_host: Which ranges are hosts. Hosts of one file do not overlap.

        Returns:
            The ranges that remain, and for each of these ranges whether it remains.
        """
        files, starts = self.ranges.files, self.ranges.starts
        stops = starts + self.ranges.nbytes
        # One sortable number for file and start. The rank of a start, and not the start itself,
        # keeps the product small.
        distinct_starts = np.unique(starts)
        places = files * len(distinct_starts) + np.searchsorted(distinct_starts, starts)

        hosts = np.flatnonzero(is_host)
        hosts = hosts[np.argsort(places[hosts])]
        guests = np.flatnonzero(self.crcs == NO_CRC)
        host_positions = np.searchsorted(places[hosts], places[guests], side="right") - 1
        has_host_before = host_positions >= 0
        guests = guests[has_host_before]
        guest_hosts = hosts[host_positions[has_host_before]]
        is_inside = (files[guests] == files[guest_hosts]) & (stops[guests] <= stops[guest_hosts])

        new_indices = np.arange(len(self))
        new_indices[guests[is_inside]] = guest_hosts[is_inside]
        remains = new_indices == np.arange(len(self))
        row_edges, rows = _group_rows(new_indices[self.range_indices], self.rows, len(self))
        merged = StoredRanges(self.ranges, self.stores, self.crcs, row_edges, rows)
        return merged.select(remains), remains


def _group_rows(range_indices: Ints, rows: Ints, range_count: int) -> tuple[Ints, Ints]:
    """Group pairs of a range and a row by range.

    Returns:
        The row edges, and the rows of each range in ascending order, each once.
    """
    order = np.lexsort((rows, range_indices))
    range_indices = range_indices[order]
    rows = rows[order]
    is_new = np.ones(len(rows), np.bool_)
    is_new[1:] = (np.diff(range_indices) != 0) | (np.diff(rows) != 0)
    row_edges = range_indices[is_new].searchsorted(np.arange(range_count + 1))
    return row_edges, rows[is_new]


def find_store(source: Source, key: str) -> Store:
    """Return the store that has the content of a key.

    A virtual store adds computed files, such as the content of a compressed record, to the files of
    another store. For a computed file it is the virtual store, for all others the store under it.
    """
    return source.store.get_underlying_store(key) or source.store


def find_stored_ranges(table: Table, irregular_uses: Iterable[StorageUse]) -> StoredRanges:
    """Return the ranges of files that the rows of a table use.

    Args:
        table: The table.
        irregular_uses: The storages of its irregular rows.

    Returns:
        The ranges. If equal ranges have different checksums, that of the first row counts.
    """
    file_index: dict[tuple[int, str], int] = {}
    stores: list[Store] = []

    def add_file(store: Store, key: str) -> int:
        """Return the index of a file, which is added if it is new."""
        index = file_index.setdefault((id(store), key), len(stores))
        if index == len(stores):
            stores.append(store)
        return index

    # All uses as five rows of one array: the file, the start, the length, the checksum, the row.
    columns = [np.zeros((5, 0), np.int64)]
    storages = table.storages
    storage_indices = np.asarray(table.storage_indices, np.int64)
    rows = np.flatnonzero(storage_indices != IRREGULAR)
    if isinstance(storages, FileColumns) and len(rows):
        file_indices = np.array(
            [add_file(find_store(file.source, file.key), file.key) for file in storages.files],
            np.int64,
        )
        indices = storage_indices[rows]
        columns.append(
            np.stack(
                (
                    file_indices[storages.file_indices[indices]],
                    storages.starts[indices],
                    storages.nbytes[indices],
                    storages.crcs[indices],
                    rows,
                )
            )
        )
    tuples: list[tuple[int, ...]] = []
    for row, storage, store in irregular_uses:
        crc = NO_CRC if storage.crc32 is None else storage.crc32
        tuples.append((add_file(store, storage.key), storage.start, storage.nbytes, crc, row))
    columns.append(np.array(tuples, np.int64).reshape(-1, 5).T)

    uses = np.concatenate(columns, axis=1)
    uses = uses[:, uses[2] > 0]
    return _group_uses([key for _, key in file_index], stores, uses)


def _group_uses(keys: Sequence[str], stores: Sequence[Store], uses: Ints) -> StoredRanges:
    """Find the distinct ranges among uses, and the rows of each.

    Args:
        keys: The keys of the files.
        stores: The store of each file.
        uses: Five rows: the file, the start, the length, the checksum, and the row of each use.
    """
    files, starts, nbytes, crcs, rows = uses
    order = np.lexsort((rows, nbytes, starts, files))
    is_new_range = np.ones(len(order), np.bool_)
    is_new_range[1:] = (np.diff(uses[:3, order], axis=1) != 0).any(axis=0)
    first_uses = order[is_new_range]

    # Number the ranges by their first rows. Ranges of one row keep the order of its storages.
    range_order = np.lexsort((first_uses, rows[first_uses]))
    range_numbers = np.empty(len(first_uses), np.int64)
    range_numbers[range_order] = np.arange(len(first_uses))
    range_of_use = np.empty(len(order), np.int64)
    range_of_use[order] = range_numbers[is_new_range.cumsum() - 1]
    first_uses = first_uses[range_order]

    row_edges, range_rows = _group_rows(range_of_use, rows, len(first_uses))
    ranges = Ranges(keys, files[first_uses], starts[first_uses], nbytes[first_uses])
    return StoredRanges(ranges, stores, crcs[first_uses], row_edges, range_rows)
