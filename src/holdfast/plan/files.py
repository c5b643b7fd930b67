"""`FileStorages`: storages that are ranges of files, as columns."""

from __future__ import annotations

import copy
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.chunk import Storage
from holdfast.core.crc import crc32_each
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.protocols import Store
from holdfast.core.table import ODD, Column, FileColumns, FilePlace, Kind, Table, is_inside
from holdfast.core.tensor import BEYOND, NO_CRC, FileRange, Layout, LazyTensor
from holdfast.core.value import Value
from holdfast.errors import Corrupted, HoldfastError, located
from holdfast.plan.coalesce import MEMORY, coalesce
from holdfast.plan.saves import Data

BYTES = next(row for row in DTYPES.rows if row.name == "uint8")


COLUMNS = ("kinds", "kind", "storage", "storages", "odd", "offsets")


class ViewTable(Table):
    """A table of lazy tensors that are there already. Its columns are made when one is asked for first.

    Tensors in one piece of one range of a file are rows over that; all others are odd.
    """

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        self.names, self._views = [*tensors], [*tensors.values()]
        self._rows = self._apart = self._single = self._kind_numbers = None

    def __getattr__(self, name: str) -> object:
        if name not in COLUMNS:
            raise AttributeError(f"a table has no {name!r}", name=name, obj=self)
        made = tabulate(self.names, self._views or ())
        # Whoever comes second makes the same.
        self.kinds, self.kind, self.storage, self.storages, self.odd = made.kinds, made.kind, made.storage, made.storages, made.odd
        self.offsets = made.offsets
        return getattr(made, name)

    def outline(self, name: str) -> tuple[DType, tuple[int, ...]]:
        view = self.view(self.rows[name])
        return view.dtype, view.shape


def tabulate(names: Sequence[str], views: Sequence[LazyTensor]) -> Table:
    """A table of lazy tensors under these names."""
    kinds: list[Kind] = []
    positions: dict[object, int] = {}
    kind: list[int] = []
    storage: list[int] = []
    parts: dict[FileStorages, int] = {}
    """Columns that rows are in, each with the number of its first storage."""
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
                kinds += (own if own.traits is traits else own.marked(traits),)
            if place.storages is not held:
                held = place.storages
                if held not in parts:
                    parts[held], count = count, count + len(held)
                first = parts[held]
            kind += (positions[like],)
            storage += (first + place.number,)
            if place.offset:
                offsets[row] = place.offset
        else:
            others += (row,)
            kind += (0,)
            storage += (ODD,)
    odd: dict[int, LazyTensor] = {}
    single: dict[object, tuple[int, Storage, LazyTensor]] = {}
    """Storages that are no row of a column yet. What has no bytes shares them with nobody."""
    for row in others:
        view = views[row]
        traits, found = view.traits, _one_range(view)
        if found is None:
            odd[row] = view
            like = id(view.dtype), view.shape, id(traits)
        else:
            one, offset, strides = found
            inside = is_inside(offset, view.nbytes, one.nbytes)
            like = id(view.dtype), view.shape, strides, inside, one.nbytes, one.byteorder, one.location, id(traits)
            if offset:
                offsets[row] = offset
            storage[row] = single.setdefault(one if one.nbytes else row, (count + len(single), one, view))[0]
        if like not in positions:
            positions[like] = len(kinds)
            kinds.append(Kind.of(view) if found else Kind(view.dtype, view.shape, traits, view.nbytes))
        kind[row] = positions[like]
    columns = [*parts]
    if single:
        columns.append(_storages_of([(one, view) for _, one, view in single.values()]))
    storages = columns[0] if len(columns) == 1 else JoinedStorages(columns) if columns else NO_FILES
    if single and isinstance(storages, JoinedStorages):
        numbers = storages.numbers_from(count)
        storage = [number if number < count else numbers[number - count] for number in storage]
    return Table(names, kinds, array("q", kind), array("q", storage), storages, odd, offsets=offsets, views=views)


def _one_range(view: LazyTensor) -> Layout | None:
    """Where a tensor lies in one range of a file; None where it has several pieces, is computed, or is yet to be found."""
    layout = view.layout()
    if layout is None or type(layout[0]) is not Storage:
        return None
    storage, offset, _ = layout
    inside = 0 <= storage.start < BEYOND and storage.nbytes < BEYOND and 0 <= offset <= 8 * storage.nbytes
    return layout if inside and view.nbytes < BEYOND else None


def _storages_of(single: Sequence[tuple[Storage, LazyTensor]]) -> FileStorages:
    """Storages one by one, each with a tensor over it, as columns."""
    files: dict[tuple[int, int, str], int] = {}
    places: list[FilePlace] = []
    rows: list[tuple[int, int, int, int]] = []
    for storage, view in single:
        key = id(view.source), id(storage.home), storage.key
        if key not in files:
            files[key] = len(places)
            places.append(FilePlace(view.source, storage.key, storage.home))
        rows.append((files[key], storage.start, storage.nbytes, NO_CRC if storage.crc32 is None else storage.crc32))
    names, labels = [view.name for _, view in single], [storage.label for storage, _ in single]
    return FileStorages(places, *np.array(rows, np.int64).reshape(-1, 4).T, names=names, labels=labels)


class FileRow(Value, frozen=True, eq=False):
    """The position of a tensor that is a row of a table over files."""

    storages: FileStorages
    number: int
    kind: Kind
    offset: int = 0
    """Bit of the storage where the first element lies."""

    def layout(self) -> Layout:
        return self.storages.storage(self.number, self.kind), self.offset, self.kind.strides

    def file_range(self, dtype: DType, shape: tuple[int, ...]) -> FileRange | None:
        kind, number, own = self.kind, self.number, self.storages
        if not kind.dense:
            return None
        start = own.start_of(number) + self.offset // 8
        return own.files[own.file_of(number)].key, start, kind.nbytes, own.crc_of(number) if kind.whole else NO_CRC


class FileStorages(FileColumns):
    """Ranges of files, each with the checksum that its file records."""

    def __init__(
        self,
        files: Sequence[FilePlace],
        file: Column,
        start: Column,
        nbytes: Column,
        crc: Column,
        *,
        names: Sequence[str],
        labels: Sequence[str] | None = None,
    ) -> None:
        super().__init__(files, file, start, nbytes, crc)
        self.names = names
        """Of a tensor of each, for messages."""
        self._labels = names if labels is None else labels
        """What the file calls each."""

    def __len__(self) -> int:
        return len(self._start)

    def named(self, names: Sequence[str]) -> FileStorages:
        """The same storages under other names of tensors."""
        made = copy.copy(self)
        made.names = names
        return made

    def file_of(self, number: int) -> int:
        return int(self._file[number])

    def start_of(self, number: int) -> int:
        return int(self._start[number])

    def crc_of(self, number: int) -> int:
        return int(self._crc[number])

    def label_of(self, number: int) -> str:
        """What the file calls one."""
        return self._labels[number]

    @property
    def stores(self) -> tuple[Store, ...]:
        return tuple(dict.fromkeys(place.source.store for place in self.files))

    def storage(self, number: int, kind: Kind) -> Storage:
        """One storage."""
        place, crc = self.files[self._file[number]], int(self._crc[number])
        return Storage(
            place.key, int(self._start[number]), int(self._nbytes[number]), kind.byteorder, None if crc == NO_CRC else crc,
            kind.location, self.label_of(number), home=place.home,
        )  # fmt: skip

    def view(self, number: int, kind: Kind, name: str, offset: int = 0) -> LazyTensor:
        source = self.files[self._file[number]].source
        return LazyTensor(name, kind.dtype, kind.shape, (), source, kind.traits, FileRow(self, number, kind, offset))

    divisible = True

    def read(self, numbers: Sequence[int]) -> list[memoryview]:
        wanted = np.array(numbers, np.int64)
        return self._pieces(wanted, self.start[wanted], self.nbytes[wanted])

    def read_parts(self, numbers: Sequence[int], starts: Sequence[int], nbytes: Sequence[int]) -> list[memoryview]:
        wanted = np.array(numbers, np.int64)
        return self._pieces(wanted, self.start[wanted] + np.array(starts, np.int64), np.array(nbytes, np.int64))

    def _pieces(self, wanted: Ints, begins: Ints, nbytes: Ints) -> list[memoryview]:
        """So many bytes of storages of these numbers, from these bytes of files on; neighbours by one read."""
        pieces: list[memoryview] = [memoryview(b"")] * len(wanted)
        order = np.lexsort((begins, self.file[wanted]))
        order = order[nbytes[order] > 0]
        for places in np.split(order, np.flatnonzero(np.diff(self.file[wanted[order]])) + 1):
            if not len(places):
                continue
            starts = begins[places]
            stops = starts + nbytes[places]
            heads = coalesce(starts, stops, MEMORY)
            for first, last in zip(heads.tolist(), [*heads[1:].tolist(), len(places)], strict=True):
                begin = int(starts[first])
                own = slice(first, last)
                data = self._span(wanted[places[own]], starts[own], stops[own])
                cut = zip(places[own].tolist(), starts[own].tolist(), stops[own].tolist(), strict=True)
                for place, start, stop in cut:
                    pieces[place] = data[start - begin : stop - begin]
        # The checksum of a storage says nothing about a part of it.
        recorded = np.where(nbytes == self.nbytes[wanted], self.crc[wanted], NO_CRC)
        if (recorded != NO_CRC).any():
            for number, found, crc in zip(wanted.tolist(), crc32_each(pieces), recorded.tolist(), strict=True):
                if found != crc != NO_CRC:
                    raise self._changed(number, crc, found)
        return pieces

    def _span(self, numbers: Ints, starts: Ints, stops: Ints) -> memoryview:
        """The range of a file in which these ranges of storages lie; the first of them begins there."""
        place, start = self.files[self.file[numbers[0]]], int(starts[0])
        data = np.empty(int(stops.max()) - start, np.uint8).data
        store = place.source.store
        try:
            store.read(place.key, start, data)
        except HoldfastError:
            # Each by itself, so that the error names the one that cannot be read.
            for number, begin, end in zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True):
                with located(tensor=self.names[number]):
                    store.read(place.key, begin, data[begin - start : end - start])
        return data

    def _changed(self, number: int, expected: int, found: int) -> Corrupted:
        return Corrupted(
            "the source does not have the checksum that it records: it changed after it was written; get it again",
            file=self.files[self.file[number]].key,
            tensor=self.names[number],
            offset=int(self.start[number]),
            expected=expected,
            found=found,
        )

    def alone(self, number: int, label: str) -> Data | bytes:
        """The bytes of a long one, a block at a time."""
        nbytes = int(self.nbytes[number])
        return Data(self.view(number, Kind.plain(BYTES, (nbytes,)), self.names[number]), label) if nbytes else b""


class JoinedStorages(FileStorages):
    """Columns of several files, one behind the other."""

    def __init__(self, parts: Sequence[FileStorages]) -> None:
        files: dict[tuple[int, int, str], tuple[int, FilePlace]] = {}
        file: list[Ints] = []
        for part in parts:
            own = [((id(place.source), id(place.home), place.key), place) for place in part.files]
            numbers = [files.setdefault(key, (len(files), place))[0] for key, place in own]
            file.append(np.array(numbers, np.int64)[part.file] if len(part) else part.file)
        columns = [np.concatenate(column) for column in zip(*((one.start, one.nbytes, one.crc) for one in parts), strict=True)]
        names = [name for part in parts for name in part.names]
        super().__init__([place for _, place in files.values()], np.concatenate(file), *columns, names=names)
        self._parts = parts
        self._edges = [*accumulate(len(part) for part in parts)]

    def label_of(self, number: int) -> str:
        part = bisect_right(self._edges, number)
        return self._parts[part].label_of(number - (self._edges[part - 1] if part else 0))

    def numbers_from(self, first: int) -> list[int]:
        """The numbers from one on; in the place of one whose storage is there before it, that storage's number."""
        numbers, starts = [*range(first, len(self))], self.start.tolist()
        alike = {*starts[first:]}
        before = [number for number, start in enumerate(starts[:first]) if start in alike]
        if before:
            columns = self.file, self.start, self.nbytes, self.crc
            places = zip(*(column[before].tolist() for column in columns), strict=True)
            known = {place: number for place, number in zip(places, before, strict=True) if place[2]}
            later = zip(*(column[first:].tolist() for column in columns), strict=True)
            numbers = [known.get(place, number) for place, number in zip(later, numbers, strict=True)]
        return numbers


NO_FILES = FileStorages([], (), (), (), (), names=())
