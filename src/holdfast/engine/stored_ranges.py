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
    """The rows of range `i` are `rows[row_edges[i]:row_edges[i + 1]]`."""
    rows: Ints
    """The rows of all ranges, one range after the other."""

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self.crcs)

    @property
    def range_indices(self) -> Ints:
        """For each entry of `rows`, the index of the range that it belongs to."""
        return np.arange(len(self)).repeat(np.diff(self.row_edges))

    def rows_of(self, range_index: int) -> list[int]:
        """Return the rows that use a range."""
        start = self.row_edges.item(range_index)
        stop = self.row_edges.item(range_index + 1)
        return cast("list[int]", self.rows[start:stop].tolist())

    def in_store(self, store: Store) -> Bools:
        """Return for each range whether it lies in a file of this store."""
        is_in_store = np.array([file_store is store for file_store in self.stores], np.bool_)
        return is_in_store[self.ranges.files]

    def select(self, is_selected: Bools) -> StoredRanges:
        """Return some of the ranges, with their rows.

        Args:
            is_selected: For each range whether it is in the result.
        """
        # Each range keeps its number of rows. The new edges are the running sum of these numbers.
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
        """Return all ranges, followed by ranges of one file that no row uses.

        An example are records of an archive that are not tensors, but have a checksum.

        Args:
            ranges: The first byte and the length of each unused range.
            crcs: The recorded CRC-32 of each unused range, or `NO_CRC`.
            store: The store of their file.
            key: The key of their file.
        """
        keys = [*self.ranges.keys]
        stores = [*self.stores]
        file_index = len(keys)
        for index, file_store in enumerate(stores):
            if file_store is store and keys[index] == key:
                file_index = index
                break
        if file_index == len(keys):
            # No range lies in this file yet.
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
        # A range without rows starts and ends at the same edge.
        row_edges = np.append(self.row_edges, np.full(len(starts), self.row_edges[-1]))
        all_crcs = np.append(self.crcs, np.array(crcs, np.int64))
        return StoredRanges(all_ranges, stores, all_crcs, row_edges, self.rows)

    def merge_into_hosts(self, is_host: Bools) -> tuple[StoredRanges, Bools]:
        """Remove ranges that lie in a host, and give their rows to the host.

        A host is a range with a checksum, such as a record of an archive. Other ranges may lie
        inside of a host, and have no checksum themselves. Whoever compares the checksum of the host
        also checks these ranges, so they need not be read for themselves.

        Args:
            is_host: For each range whether it is a host. Hosts of one file do not overlap.

        Returns:
            The ranges that remain, and for each range of this object whether it remains.
        """
        files, starts = self.ranges.files, self.ranges.starts
        stops = starts + self.ranges.nbytes
        # A place is one number that sorts like the pair of file and start. It has the rank of the
        # start among all starts instead of the start itself, so that it cannot overflow.
        distinct_starts = np.unique(starts)
        places = files * len(distinct_starts) + np.searchsorted(distinct_starts, starts)

        # A guest is a range without a checksum. Its candidate is the last host that does not start
        # after it. No other host can contain it, because hosts do not overlap.
        hosts = np.flatnonzero(is_host)
        hosts = hosts[np.argsort(places[hosts])]
        guests = np.flatnonzero(self.crcs == NO_CRC)
        host_positions = np.searchsorted(places[hosts], places[guests], side="right") - 1
        has_host_before = host_positions >= 0
        guests = guests[has_host_before]
        guest_hosts = hosts[host_positions[has_host_before]]
        is_same_file = files[guests] == files[guest_hosts]
        is_inside = is_same_file & (stops[guests] <= stops[guest_hosts])

        # Give each row the range that it belongs to from now on, and group the rows again.
        new_indices = np.arange(len(self))
        new_indices[guests[is_inside]] = guest_hosts[is_inside]
        remains = new_indices == np.arange(len(self))
        row_edges, rows = _group_rows(new_indices[self.range_indices], self.rows, len(self))
        merged = StoredRanges(self.ranges, self.stores, self.crcs, row_edges, rows)
        return merged.select(remains), remains


def _group_rows(range_indices: Ints, rows: Ints, range_count: int) -> tuple[Ints, Ints]:
    """Group pairs of a range and a row by range.

    Args:
        range_indices: The range of each pair.
        rows: The row of each pair.
        range_count: The number of all ranges. Some may be in no pair.

    Returns:
        The row edges and the rows of `StoredRanges`. The rows of a range are in ascending order,
        each once.
    """
    order = np.lexsort((rows, range_indices))
    range_indices = range_indices[order]
    rows = rows[order]
    # A pair that is equal to the one before it is a duplicate.
    is_new = np.ones(len(rows), np.bool_)
    is_new[1:] = (np.diff(range_indices) != 0) | (np.diff(rows) != 0)
    # A range starts at its first pair. The last edge is the number of all pairs.
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
        irregular_uses: The storages of its irregular rows, which are not in its columns.

    Returns:
        Each range once, with all rows that use it. If files record different checksums for equal
        ranges, the checksum is that of the first row.
    """
    # Stores are compared by identity. `stores` keeps them alive, so that their ids stay unique.
    file_index: dict[tuple[int, str], int] = {}
    stores: list[Store] = []

    def add_file(store: Store, key: str) -> int:
        """Return the index of a file, which is added if it is new."""
        index = file_index.setdefault((id(store), key), len(stores))
        if index == len(stores):
            stores.append(store)
        return index

    # Arrays of five rows with a column for each use of a range by a row of the table: the file, the
    # start, the length, the checksum and the row. The empty one is for a table without any use.
    use_columns = [np.zeros((5, 0), np.int64)]
    storages = table.storages
    storage_indices = np.asarray(table.storage_indices, np.int64)
    rows = np.flatnonzero(storage_indices != IRREGULAR)
    if isinstance(storages, FileColumns) and len(rows):
        new_file_indices: list[int] = []
        for file in storages.files:
            new_file_indices.append(add_file(find_store(file.source, file.key), file.key))
        file_indices = np.array(new_file_indices, np.int64)
        indices = storage_indices[rows]
        use_columns.append(
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

    irregular_rows: list[tuple[int, ...]] = []
    for row, storage, store in irregular_uses:
        crc = NO_CRC if storage.crc32 is None else storage.crc32
        storage_file_index = add_file(store, storage.key)
        irregular_rows.append((storage_file_index, storage.start, storage.nbytes, crc, row))
    use_columns.append(np.array(irregular_rows, np.int64).reshape(-1, 5).T)

    uses = np.concatenate(use_columns, axis=1)
    # A tensor without bytes uses no range.
    has_bytes = uses[2] > 0
    uses = uses[:, has_bytes]
    return _group_uses([key for _, key in file_index], stores, uses)


def _group_uses(keys: Sequence[str], stores: Sequence[Store], uses: Ints) -> StoredRanges:
    """Find the distinct ranges among uses, and the rows of each range.

    Args:
        keys: The keys of the files.
        stores: The store of each file.
        uses: An array with a column for each use of a range by a row of a table. Its five rows are
            the file, the start, the length, the checksum, and the row of the table.
    """
    # Sort the uses so that those of equal ranges are neighbors, the one of the first row first.
    files, starts, nbytes, crcs, rows = uses
    order = np.lexsort((rows, nbytes, starts, files))
    is_new_range = np.ones(len(order), np.bool_)
    is_new_range[1:] = (np.diff(uses[:3, order], axis=1) != 0).any(axis=0)
    first_uses = order[is_new_range]

    # Put the ranges in the order of their first rows. Ranges of one row keep the order in which its
    # storages are among the uses.
    range_order = np.lexsort((first_uses, rows[first_uses]))
    range_indices = np.empty(len(first_uses), np.int64)
    range_indices[range_order] = np.arange(len(first_uses))
    first_uses = first_uses[range_order]

    # Find the range of each use. The running sum counts the ranges that have begun.
    range_of_use = np.empty(len(order), np.int64)
    range_of_use[order] = range_indices[is_new_range.cumsum() - 1]

    row_edges, range_rows = _group_rows(range_of_use, rows, len(first_uses))
    ranges = Ranges(keys, files[first_uses], starts[first_uses], nbytes[first_uses])
    return StoredRanges(ranges, stores, crcs[first_uses], row_edges, range_rows)
