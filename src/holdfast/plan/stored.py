"""`StoredRanges`: the storages behind the rows of a table as ranges of files, each once, with the rows that use it.

A row of a table has the number of a storage, which is a range of a file. An odd row has several, or none that is known: what is
computed (packed chunks, inflated members) is a range of a file that a store computes, and the ranges that it is computed from.

    range      0      1      2      3
    heads      0      1      3      4      5         the rows of range i are rows[heads[i]:heads[i + 1]], ascending
    rows       0      1  4   2      3                rows 1 and 4 are tied

Ranges stand in the order of the first row that uses them. What has no bytes is no range: it shares with nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.chunk import Storage
from holdfast.core.protocols import Source, Store
from holdfast.core.sparse.storage import SparseStorage
from holdfast.core.table import ODD, FileColumns, Table
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.core.value import Value
from holdfast.plan.coalesce import Ranges

Piece = tuple[int, Storage, Store]
"""A row, one of its storages, and the store that has the bytes of that."""


class StoredRanges(Value, frozen=True, eq=False):
    """Ranges of files, each once, with the rows that use it."""

    ranges: Ranges
    stores: Sequence[Store]
    """The store of each file in `ranges.keys`."""
    crcs: Ints
    """As they are recorded; `NO_CRC` where they are not."""
    heads: Ints
    rows: Ints

    def __len__(self) -> int:
        return len(self.crcs)

    @property
    def owners(self) -> Ints:
        """The range of each entry of `rows`."""
        return np.arange(len(self)).repeat(self.heads[1:] - self.heads[:-1])

    def rows_of(self, number: int) -> list[int]:
        """The rows that use a range."""
        return self.rows[self.heads.item(number) : self.heads.item(number + 1)].tolist()  # type: ignore[no-any-return]  # of integers

    def in_store(self, store: Store) -> Bools:
        """Which ranges lie in the files of a store."""
        return np.array([one is store for one in self.stores], np.bool_)[self.ranges.files]

    def some(self, wanted: Bools) -> StoredRanges:
        """Those that are wanted."""
        counts, kept = np.diff(self.heads), wanted[self.owners]
        heads = np.append(0, np.cumsum(counts[wanted]))
        return StoredRanges(self.ranges.some(wanted), self.stores, self.crcs[wanted], heads, self.rows[kept])

    def with_unused(self, ranges: Sequence[tuple[int, int]], crcs: Sequence[int], *, store: Store, key: str) -> StoredRanges:
        """These, and behind them ranges (start, length) of one file that no row uses."""
        keys, stores = [*self.ranges.keys], [*self.stores]
        file = next((number for number, one in enumerate(stores) if one is store and keys[number] == key), len(keys))
        if file == len(keys):
            keys.append(key)
            stores.append(store)
        starts, nbytes = np.array(ranges, np.int64).reshape(-1, 2).T
        own = self.ranges
        every = (own.files, np.full(len(starts), file)), (own.starts, starts), (own.nbytes, nbytes)
        heads = np.append(self.heads, np.full(len(starts), self.heads[-1]))
        joined = Ranges(keys, *(np.concatenate(pair) for pair in every))
        return StoredRanges(joined, stores, np.append(self.crcs, np.array(crcs, np.int64)), heads, self.rows)

    def folded(self, hosts: Bools) -> tuple[StoredRanges, Bools]:
        """Ranges without a checksum that lie in a host are left out, and their rows become rows of the host; and which are left.

        Hosts of one file do not overlap.
        """
        files, starts = self.ranges.files, self.ranges.starts
        stops = starts + self.ranges.nbytes
        # Places of all files in one row of numbers: by their ranks, which are few enough for that.
        edges = np.unique(starts)
        places = files * len(edges) + np.searchsorted(edges, starts)
        order = np.flatnonzero(hosts)
        order = order[np.argsort(places[order])]
        inside = np.arange(len(self))
        single = np.flatnonzero(self.crcs == NO_CRC)
        before = np.searchsorted(places[order], places[single], side="right") - 1
        single, before = single[before >= 0], order[before[before >= 0]]
        held = (files[single] == files[before]) & (stops[single] <= stops[before])
        inside[single[held]] = before[held]
        left = inside == np.arange(len(self))
        heads, rows = _grouped(inside[self.owners], self.rows, len(self))
        return StoredRanges(self.ranges, self.stores, self.crcs, heads, rows).some(left), left


def _grouped(owners: Ints, rows: Ints, count: int) -> tuple[Ints, Ints]:
    """Pairs of a range and a row by range: where the rows of each begin, and the rows, each once."""
    order = np.lexsort((rows, owners))
    owners, rows = owners[order], rows[order]
    fresh = np.ones(len(rows), np.bool_)
    fresh[1:] = (owners[1:] != owners[:-1]) | (rows[1:] != rows[:-1])
    owners, rows = owners[fresh], rows[fresh]
    return owners.searchsorted(np.arange(count + 1)), rows


def store_of(source: Source, key: str) -> Store:
    """Where the bytes of a key are: in the files, or in what unpacks or inflates them."""
    return source.store.below(key) or source.store


def parts_of(tensor: LazyTensor) -> Iterator[Storage]:
    """The storages of a tensor that have bytes; of one that is stored packed, its parts as well."""
    for storage in tensor.storages:
        for one in (*storage.parts, storage) if isinstance(storage, SparseStorage) else (storage,):
            if one.nbytes:
                yield one


def stored_ranges(table: Table, pieces: Iterable[Piece]) -> StoredRanges:
    """The ranges that the rows of a table use, those of odd rows as they are given. Of one place the first checksum counts."""
    files: dict[tuple[int, str], int] = {}
    stores: list[Store] = []

    def file_of(store: Store, key: str) -> int:
        number = files.setdefault((id(store), key), len(stores))
        if number == len(stores):
            stores.append(store)
        return number

    held, numbers = table.storages, np.asarray(table.storage, np.int64)
    (rows,) = (numbers != ODD).nonzero()
    columns = [np.zeros((5, 0), np.int64)]
    if isinstance(held, FileColumns) and len(rows):
        own = np.array([file_of(store_of(place.source, place.key), place.key) for place in held.files], np.int64)
        numbers = numbers[rows]
        columns.append(np.stack((own[held.file[numbers]], held.start[numbers], held.nbytes[numbers], held.crc[numbers], rows)))
    more = [
        (file_of(store, one.key), one.start, one.nbytes, NO_CRC if one.crc32 is None else one.crc32, row)
        for row, one, store in pieces
    ]
    if more:
        columns.append(np.array(more, np.int64).T)
    every = np.concatenate(columns, axis=1)
    every = every[:, every[2] > 0]
    file, start, nbytes, crc, row = every
    order = np.lexsort((row, nbytes, start, file))
    new = np.ones(len(order), np.bool_)
    new[1:] = (np.diff(every[:3, order], axis=1) != 0).any(axis=0)
    first = order[new]
    # The place of each range in the order of first rows; of one row, in the order of its pieces.
    by_row = np.lexsort((first, row[first]))
    ranks = np.empty(len(first), np.int64)
    ranks[by_row] = np.arange(len(first))
    owners = np.empty(len(order), np.int64)
    owners[order] = ranks[new.cumsum() - 1]
    first = first[by_row]
    heads, users = _grouped(owners, row, len(first))
    ranges = Ranges([key for _, key in files], file[first], start[first], nbytes[first])
    return StoredRanges(ranges, stores, crc[first], heads, users)
