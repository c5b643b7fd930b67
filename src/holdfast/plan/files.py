"""`FileStorages`: storages that are ranges of files, as columns."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.core.chunk import Storage
from holdfast.core.crc import crc32_each
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.protocols import Store
from holdfast.core.table import ODD, Column, FileColumns, FilePlace, Kind, Table
from holdfast.core.tensor import NO_CRC, FileRange, Layout, LazyTensor
from holdfast.core.value import Value
from holdfast.errors import Corrupted, HoldfastError, located
from holdfast.plan.coalesce import MEMORY, coalesce
from holdfast.plan.saves import Data

BYTES = next(row for row in DTYPES.rows if row.name == "uint8")


def tabulated(tensors: Mapping[str, LazyTensor]) -> Table:
    """A table of lazy tensors that are there already. Those that are rows of one file are rows; all others are odd."""
    views = [*tensors.values()]
    storages = next((view.position.storages for view in views if isinstance(view.position, FileRow)), NO_FILES)
    kinds: list[Kind] = []
    positions: dict[tuple[int, int], int] = {}
    kind, storage = array("q"), array("q")
    odd: dict[int, LazyTensor] = {}
    for row, view in enumerate(views):
        place, traits = view.position, view.traits
        if not isinstance(place, FileRow) or place.storages is not storages:
            odd[row] = view
            kind.append(len(kinds))
            storage.append(ODD)
            kinds.append(Kind(view.dtype, view.shape, traits, view.nbytes))
            continue
        like = id(place.kind), id(traits)
        found = positions.get(like)
        if found is None:
            found = positions[like] = len(kinds)
            kinds.append(place.kind if place.kind.traits is traits else place.kind.marked(traits))
        kind.append(found)
        storage.append(place.number)
    return Table([*tensors], kinds, kind, storage, storages, odd, views=views)


class FileRow(Value, frozen=True, eq=False):
    """The position of a tensor that is a row of a table over files."""

    storages: FileStorages
    number: int
    kind: Kind

    def layout(self) -> Layout:
        return self.storages.storage(self.number, self.kind), self.kind.offset, self.kind.strides

    def file_range(self, dtype: DType, shape: tuple[int, ...]) -> FileRange | None:
        kind, number, own = self.kind, self.number, self.storages
        if not kind.dense:
            return None
        start = own.start_of(number) + kind.offset // 8
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

    def view(self, number: int, kind: Kind, name: str) -> LazyTensor:
        source = self.files[self._file[number]].source
        return LazyTensor(name, kind.dtype, kind.shape, (), source, kind.traits, FileRow(self, number, kind))

    def read(self, numbers: Sequence[int]) -> list[memoryview]:
        """The bytes of these; neighbours by one read."""
        wanted = np.array(numbers, np.int64)
        pieces: list[memoryview] = [memoryview(b"")] * len(wanted)
        order = np.lexsort((self.start[wanted], self.file[wanted]))
        order = order[self.nbytes[wanted[order]] > 0]
        for places in np.split(order, np.flatnonzero(np.diff(self.file[wanted[order]])) + 1):
            if not len(places):
                continue
            rows = wanted[places]
            starts = self.start[rows]
            stops = starts + self.nbytes[rows]
            heads = coalesce(starts, stops, MEMORY)
            for first, last in zip(heads.tolist(), [*heads[1:].tolist(), len(places)], strict=True):
                begin = int(starts[first])
                data = self._span(rows[first:last].tolist(), begin, int(stops[last - 1]))
                cut = zip(places[first:last].tolist(), starts[first:last].tolist(), stops[first:last].tolist(), strict=True)
                for place, start, stop in cut:
                    pieces[place] = data[start - begin : stop - begin]
        recorded = self.crc[wanted]
        if (recorded != NO_CRC).any():
            for number, found, crc in zip(numbers, crc32_each(pieces), recorded.tolist(), strict=True):
                if found != crc != NO_CRC:
                    raise self._changed(number, crc, found)
        return pieces

    def _span(self, members: list[int], start: int, stop: int) -> memoryview:
        place = self.files[self.file[members[0]]]
        data = np.empty(stop - start, np.uint8).data
        store = place.source.store
        try:
            store.read(place.key, start, data)
        except HoldfastError:
            # Each by itself, so that the error names the one that cannot be read.
            for number in members:
                begin = int(self.start[number])
                with located(tensor=self.names[number]):
                    store.read(place.key, begin, data[begin - start : begin - start + int(self.nbytes[number])])
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


NO_FILES = FileStorages([], (), (), (), (), names=())
