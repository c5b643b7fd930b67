"""`FileStorages`: storages that are ranges of files, as columns; `StoredRanges`: which of them the rows of a table use.

A row of a table has the number of a storage, which is a range of a file. What is computed (inflated members) is a
range of a file that a store computes, and the ranges that it is computed from.

    range      0      1      2      3
    heads      0      1      3      4      5         the rows of range i are rows[heads[i]:heads[i + 1]], ascending
    rows       0      1  4   2      3                rows 1 and 4 are tied

Ranges stand in the order of the first row that uses them. A tensor without bytes has no range.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.chunk import Storage
from holdfast.core.crc import crc32_each
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.protocols import Source, Store
from holdfast.core.table import (
    IRREGULAR,
    Column,
    FileColumns,
    RowKind,
    StoredFile,
    Table,
    is_range_inside,
)
from holdfast.core.tensor import MAX_FILE_OFFSET, NO_CRC, FileRange, LazyTensor, StridedPosition
from holdfast.core.value import Value
from holdfast.engine.coalesce import MEMORY, Ranges, coalesce
from holdfast.errors import Corrupted, HoldfastError, error_context

if TYPE_CHECKING:
    from holdfast.engine.saves import Data

UINT8 = next(row for row in DTYPES.rows if row.name == "uint8")


COLUMNS = ("kinds", "kind_indices", "storage_indices", "storages", "irregular", "offsets")


class ViewTable(Table):
    """A table of lazy tensors that are there already. Its columns are made when one is asked for first. Tensors in one piece of one
    range of a file are rows over that; all others are irregular."""

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        self.names = [*tensors]
        self._lazy_tensors = [*tensors.values()]
        self._was_searched = False

    def __getattr__(self, name: str) -> object:
        if name not in COLUMNS:
            raise AttributeError(f"a table has no {name!r}", name=name, obj=self)
        made = tabulate(self.names, self._lazy_tensors or ())
        # Whoever comes second makes the same.
        self.kinds = made.kinds
        self.kind_indices = made.kind_indices
        self.storage_indices = made.storage_indices
        self.storages = made.storages
        self.irregular = made.irregular
        self.offsets = made.offsets
        return getattr(made, name)

    def dtype_and_shape(self, name: str) -> tuple[DType, tuple[int, ...]]:
        view = self.lazy_tensor(self.row_indices[name])
        return view.dtype, view.shape


def tabulate(names: Sequence[str], views: Sequence[LazyTensor]) -> Table:
    kinds: list[RowKind] = []
    positions: dict[object, int] = {}
    kind: list[int] = []
    storage: list[int] = []
    parts: dict[
        FileStorages, int
    ] = {}  # Columns that rows are in, each with the number of its first storage.
    others: list[int] = []
    offsets: dict[int, int] = {}
    count, first, held = 0, 0, NO_FILES
    # No function is called for a row of a column: this is done for each of a million.
    for row, view in enumerate(views):
        place, traits = view.position, view.traits
        if type(place) is FileRow and place.kind.storage_nbytes:
            own = place.kind
            like: object = own if own.traits is traits else (own, id(traits))
            if like not in positions:
                positions[like] = len(kinds)
                kinds += (own if own.traits is traits else own.with_traits(traits),)
            if place.storages is not held:
                held = place.storages
                if held not in parts:
                    parts[held], count = count, count + len(held.starts)
                first = parts[held]
            kind += (positions[like],)
            storage += (first + place.number,)
            if place.offset:
                offsets[row] = place.offset
        else:
            others += (row,)
            kind += (0,)
            storage += (IRREGULAR,)
    irregular: dict[int, LazyTensor] = {}
    single: dict[object, tuple[int, Storage, LazyTensor]] = {}
    """Storages that are no row of a column yet. What has no bytes shares them with nobody."""
    for row in others:
        view = views[row]
        traits, found = view.traits, _one_range(view)
        if found is None:
            irregular[row] = view
            like = id(view.dtype), view.shape, id(traits)
        else:
            one, offset, strides = found.storage, found.offset, found.strides
            inside = is_range_inside(offset, view.nbytes, one.nbytes)
            like = (
                id(view.dtype),
                view.shape,
                strides,
                inside,
                one.nbytes,
                one.byteorder,
                one.location,
                id(traits),
            )
            if offset:
                offsets[row] = offset
            storage[row] = single.setdefault(
                one if one.nbytes else row, (count + len(single), one, view)
            )[0]
        if like not in positions:
            positions[like] = len(kinds)
            kinds.append(
                RowKind.from_tensor(view)
                if found
                else RowKind(view.dtype, view.shape, traits, view.nbytes)
            )
        kind[row] = positions[like]
    columns = [*parts]
    if single:
        columns.append(_storages_of([(one, view) for _, one, view in single.values()]))
    storages = columns[0] if len(columns) == 1 else JoinedStorages(columns) if columns else NO_FILES
    if single and isinstance(storages, JoinedStorages):
        numbers = storages.numbers_from(count)
        storage = [number if number < count else numbers[number - count] for number in storage]
    return Table(
        names,
        kinds,
        array("q", kind),
        array("q", storage),
        storages,
        irregular,
        offsets=offsets,
        lazy_tensors=views,
    )


def _one_range(view: LazyTensor) -> StridedPosition | None:
    """Where a tensor lies in one range of a file; None where it has several pieces, is computed, or is yet to be found."""
    position = view.strided_position()
    if position is None or type(position.storage) is not Storage:
        return None
    storage, offset = position.storage, position.offset
    inside = (
        0 <= storage.start < MAX_FILE_OFFSET
        and storage.nbytes < MAX_FILE_OFFSET
        and 0 <= offset <= 8 * storage.nbytes
    )
    return position if inside and view.nbytes < MAX_FILE_OFFSET else None


def _storages_of(single: Sequence[tuple[Storage, LazyTensor]]) -> FileStorages:
    files: dict[tuple[int, int, str], int] = {}
    places: list[StoredFile] = []
    rows: list[tuple[int, int, int, int]] = []
    for storage, view in single:
        key = id(view.source), id(storage.home), storage.key
        if key not in files:
            files[key] = len(places)
            places.append(StoredFile(view.source, storage.key, storage.home))
        rows.append(
            (
                files[key],
                storage.start,
                storage.nbytes,
                NO_CRC if storage.crc32 is None else storage.crc32,
            )
        )
    names, labels = [view.name for _, view in single], [storage.label for storage, _ in single]
    return FileStorages(
        places, *np.array(rows, np.int64).reshape(-1, 4).T, names=names, labels=labels
    )


class FileRow(Value, frozen=True, eq=False):
    """The position of a tensor that is a row of a table over files."""

    storages: FileStorages
    number: int
    kind: RowKind
    offset: int = 0  # Bit of the storage where the first element lies.

    def strided_position(self) -> StridedPosition:
        storage = self.storages.storage(self.number, self.kind)
        return StridedPosition(storage, self.offset, self.kind.strides)

    def file_range(self, dtype: DType, shape: tuple[int, ...]) -> FileRange | None:
        kind, number, own = self.kind, self.number, self.storages
        if not kind.is_contiguous:
            return None
        start = own.start_of(number) + self.offset // 8
        crc32 = own.crcs.item(number) if kind.is_whole else NO_CRC
        return FileRange(own.files[own.file_of(number)].key, start, kind.nbytes, crc32)


class FileStorages(FileColumns):
    """Ranges of files, each with the checksum that its file records."""

    def __init__(
        self, files: Sequence[StoredFile], file: Column, start: Column, nbytes: Column, crc: Column, *, names: Sequence[str],
        labels: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self.files = files
        self.file_indices, self.starts = np.asarray(file, np.int64), np.asarray(start, np.int64)
        self.nbytes, self.crcs = np.asarray(nbytes, np.int64), np.asarray(crc, np.int64)
        self.names = names
        self._labels = names if labels is None else labels

    def __len__(self) -> int:
        return len(self.starts)

    def with_names(self, names: Sequence[str], rows: Ints, numbers: Ints) -> FileStorages:
        """Give storages the names of tensors: `rows` are their positions in `names`, `numbers` those of their storages."""
        copied = copy.copy(self)
        count = len(self.starts)
        if len(rows) == len(names) == count and (numbers == rows).all():
            copied.names = names
            return copied
        storage_names = [""] * count
        for row, number in zip(rows.tolist(), numbers.tolist(), strict=True):
            storage_names[number] = storage_names[number] or names[row]
        copied.names = storage_names
        return copied

    def file_of(self, number: int) -> int:
        return self.file_indices.item(number)

    def start_of(self, number: int) -> int:
        return self.starts.item(number)

    @property
    def stores(self) -> tuple[Store, ...]:
        return tuple(dict.fromkeys(place.source.store for place in self.files))

    def storage(self, number: int, kind: RowKind) -> Storage:
        place, crc = self.files[self.file_indices.item(number)], self.crcs.item(number)
        return Storage(
            place.key, self.starts.item(number), self.nbytes.item(number), kind.byteorder, None if crc == NO_CRC else crc,
            kind.location, self._labels[number], home=place.store,
        )  # fmt: skip

    def lazy_tensor(self, number: int, kind: RowKind, name: str, offset: int = 0) -> LazyTensor:
        source = self.files[self.file_indices.item(number)].source
        return LazyTensor(
            name,
            kind.dtype,
            kind.shape,
            (),
            source,
            kind.traits,
            FileRow(self, number, kind, offset),
        )

    can_read_ranges = True

    def read(self, numbers: Sequence[int]) -> list[memoryview]:
        wanted = np.array(numbers, np.int64)
        return self._pieces(wanted, self.starts[wanted], self.nbytes[wanted])

    def read_ranges(
        self, numbers: Sequence[int], starts: Sequence[int], nbytes: Sequence[int]
    ) -> list[memoryview]:
        wanted = np.array(numbers, np.int64)
        return self._pieces(
            wanted, self.starts[wanted] + np.array(starts, np.int64), np.array(nbytes, np.int64)
        )

    def _pieces(self, wanted: Ints, begins: Ints, nbytes: Ints) -> list[memoryview]:
        """So many bytes of storages of these numbers, from these bytes of files on; neighbours by one read."""
        pieces: list[memoryview] = [memoryview(b"")] * len(wanted)
        order = np.lexsort((begins, self.file_indices[wanted]))
        order = order[nbytes[order] > 0]
        for places in np.split(
            order, np.flatnonzero(np.diff(self.file_indices[wanted[order]])) + 1
        ):
            if not len(places):
                continue
            starts = begins[places]
            stops = starts + nbytes[places]
            heads = coalesce(starts, stops, MEMORY)
            for first, last in zip(heads.tolist(), [*heads[1:].tolist(), len(places)], strict=True):
                begin = int(starts[first])
                own = slice(first, last)
                place = self.files[self.file_indices[wanted[places[first]]]]
                data = np.empty(int(stops[own].max()) - begin, np.uint8).data
                try:
                    place.source.store.read(place.key, begin, data)
                except HoldfastError:
                    self._read_each(wanted[places[own]], starts[own], stops[own], data)
                cut = zip(
                    places[own].tolist(), starts[own].tolist(), stops[own].tolist(), strict=True
                )
                for number, start, stop in cut:
                    pieces[number] = data[start - begin : stop - begin]
        # The checksum of a storage says nothing about a part of it.
        recorded = np.where(nbytes == self.nbytes[wanted], self.crcs[wanted], NO_CRC)
        if (recorded != NO_CRC).any():
            for number, found, crc in zip(
                wanted.tolist(), crc32_each(pieces), recorded.tolist(), strict=True
            ):
                if found != crc != NO_CRC:
                    raise self._changed(number, crc, found)
        return pieces

    def _read_each(self, numbers: Ints, starts: Ints, stops: Ints, data: memoryview) -> None:
        """Read neighbouring storages one by one, so that the error names the one that cannot be read."""
        place, begin = self.files[self.file_indices[numbers[0]]], int(starts[0])
        for number, start, stop in zip(
            numbers.tolist(), starts.tolist(), stops.tolist(), strict=True
        ):
            with error_context(tensor=self.names[number]):
                place.source.store.read(place.key, start, data[start - begin : stop - begin])

    def _changed(self, number: int, expected: int, found: int) -> Corrupted:
        return Corrupted(
            "the source does not have the checksum that it records: it changed after it was written; get it again",
            file=self.files[self.file_indices[number]].key,
            tensor=self.names[number],
            offset=int(self.starts[number]),
            expected=expected,
            found=found,
        )

    def segment(self, number: int, label: str) -> Data | bytes:
        from holdfast.engine.saves import Data  # for saving

        nbytes = int(self.nbytes[number])
        return (
            Data(
                self.lazy_tensor(number, RowKind.from_shape(UINT8, (nbytes,)), self.names[number]),
                label,
            )
            if nbytes
            else b""
        )


class JoinedStorages(FileStorages):
    def __init__(self, parts: Sequence[FileStorages]) -> None:
        files: dict[tuple[int, int, str], tuple[int, StoredFile]] = {}
        file: list[Ints] = []
        for part in parts:
            own = [((id(place.source), id(place.store), place.key), place) for place in part.files]
            numbers = [files.setdefault(key, (len(files), place))[0] for key, place in own]
            file.append(
                np.array(numbers, np.int64)[part.file_indices] if len(part) else part.file_indices
            )
        columns = [
            np.concatenate(column)
            for column in zip(*((one.starts, one.nbytes, one.crcs) for one in parts), strict=True)
        ]
        names = [name for part in parts for name in part.names]
        labels = [label for part in parts for label in part._labels]
        places = [place for _, place in files.values()]
        super().__init__(places, np.concatenate(file), *columns, names=names, labels=labels)

    def numbers_from(self, first: int) -> list[int]:
        """The numbers from one on; in the place of one whose storage is there before it, that storage's number."""
        numbers, starts = [*range(first, len(self))], self.starts.tolist()
        alike = {*starts[first:]}
        before = [number for number, start in enumerate(starts[:first]) if start in alike]
        if before:
            columns = self.file_indices, self.starts, self.nbytes, self.crcs
            places = zip(*(column[before].tolist() for column in columns), strict=True)
            known = {
                place: number for place, number in zip(places, before, strict=True) if place[2]
            }
            later = zip(*(column[first:].tolist() for column in columns), strict=True)
            numbers = [
                known.get(place, number) for place, number in zip(later, numbers, strict=True)
            ]
        return numbers


NO_FILES = FileStorages([], (), (), (), (), names=())


StorageUse = tuple[
    int, Storage, Store
]  # A row, one of its storages, and the store that has the bytes of that.


class StoredRanges(Value, frozen=True, eq=False):
    """Ranges of files, each once, with the rows that use it."""

    ranges: Ranges
    stores: Sequence[Store]  # The store of each file in `ranges.keys`.
    crcs: Ints  # As they are recorded; `NO_CRC` where they are not.
    heads: Ints
    rows: Ints

    def __len__(self) -> int:
        return len(self.crcs)

    @property
    def range_indices(self) -> Ints:
        return np.arange(len(self)).repeat(self.heads[1:] - self.heads[:-1])

    def rows_of(self, number: int) -> list[int]:
        return self.rows[self.heads.item(number) : self.heads.item(number + 1)].tolist()  # type: ignore[no-any-return]  # of integers

    def in_store(self, store: Store) -> Bools:
        return np.array([one is store for one in self.stores], np.bool_)[self.ranges.files]

    def select(self, wanted: Bools) -> StoredRanges:
        counts, kept = np.diff(self.heads), wanted[self.range_indices]
        heads = np.append(0, np.cumsum(counts[wanted]))
        return StoredRanges(
            self.ranges.select(wanted), self.stores, self.crcs[wanted], heads, self.rows[kept]
        )

    def with_unused_ranges(
        self, ranges: Sequence[tuple[int, int]], crcs: Sequence[int], *, store: Store, key: str
    ) -> StoredRanges:
        """All ranges, and behind them ranges (start, length) of one file that no row uses."""
        keys, stores = [*self.ranges.keys], [*self.stores]
        file = next(
            (number for number, one in enumerate(stores) if one is store and keys[number] == key),
            len(keys),
        )
        if file == len(keys):
            keys.append(key)
            stores.append(store)
        starts, nbytes = np.array(ranges, np.int64).reshape(-1, 2).T
        own = self.ranges
        every = (own.files, np.full(len(starts), file)), (own.starts, starts), (own.nbytes, nbytes)
        heads = np.append(self.heads, np.full(len(starts), self.heads[-1]))
        joined = Ranges(keys, *(np.concatenate(pair) for pair in every))
        return StoredRanges(
            joined, stores, np.append(self.crcs, np.array(crcs, np.int64)), heads, self.rows
        )

    def merge_into_hosts(self, hosts: Bools) -> tuple[StoredRanges, Bools]:
        """Ranges without a checksum that lie in a host are left out, and their rows become rows of the host; and which are left.
        Hosts of one file do not overlap."""
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
        heads, rows = _grouped(inside[self.range_indices], self.rows, len(self))
        return StoredRanges(self.ranges, self.stores, self.crcs, heads, rows).select(left), left


def _grouped(owners: Ints, rows: Ints, count: int) -> tuple[Ints, Ints]:
    """Pairs of a range and a row by range: where the rows of each begin, and the rows, each once."""
    order = np.lexsort((rows, owners))
    owners, rows = owners[order], rows[order]
    fresh = np.ones(len(rows), np.bool_)
    fresh[1:] = (owners[1:] != owners[:-1]) | (rows[1:] != rows[:-1])
    owners, rows = owners[fresh], rows[fresh]
    return owners.searchsorted(np.arange(count + 1)), rows


def find_store(source: Source, key: str) -> Store:
    """Where the bytes of a key are: in the files, or in what inflates them."""
    return source.store.get_underlying_store(key) or source.store


def find_stored_ranges(table: Table, pieces: Iterable[StorageUse]) -> StoredRanges:
    """Return the ranges that the rows of a table use, those of irregular rows as they are given.

    Of one place the first checksum counts.
    """
    files: dict[tuple[int, str], int] = {}
    stores: list[Store] = []

    def file_of(store: Store, key: str) -> int:
        number = files.setdefault((id(store), key), len(stores))
        if number == len(stores):
            stores.append(store)
        return number

    held, numbers = table.storages, np.asarray(table.storage_indices, np.int64)
    (rows,) = (numbers != IRREGULAR).nonzero()
    columns = [np.zeros((5, 0), np.int64)]
    if isinstance(held, FileColumns) and len(rows):
        own = np.array(
            [file_of(find_store(place.source, place.key), place.key) for place in held.files],
            np.int64,
        )
        numbers = numbers[rows]
        columns.append(
            np.stack(
                (
                    own[held.file_indices[numbers]],
                    held.starts[numbers],
                    held.nbytes[numbers],
                    held.crcs[numbers],
                    rows,
                )
            )
        )
    more = [
        (
            file_of(store, one.key),
            one.start,
            one.nbytes,
            NO_CRC if one.crc32 is None else one.crc32,
            row,
        )
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
