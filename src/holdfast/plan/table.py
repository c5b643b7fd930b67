"""`Table`: the tensors of a state on their way to a file, as columns; a tensor a row.

Fifty thousand tensors are of a few kinds: a dtype, a shape, what they are beyond their elements. What they have in common is said
once (`Kind`). A row is a name, a kind and the number of a storage.

A row is *plain* where its elements are all bytes of its storage, in C order, and no other row shares that storage. Plain rows are
read many together (`TensorRows.read`), by whoever made them: memory, a GPU, a file. Every other row is *odd* and has a lazy tensor,
which says where its elements are: a view, a tensor in several pieces, one that is computed, one that is tied to another.

Every layout takes a table. Two functions make one: `rewrite.state.describe_state` of a caller's memory, `table_of` of lazy tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.columns import NO_CRC, place_of
from holdfast.core.crc import crc32, crc32_each
from holdfast.core.dtype import DType
from holdfast.core.protocols import State, Store
from holdfast.core.rows import RowTensor
from holdfast.core.tensor import PLAIN, LazyTensor, Traits
from holdfast.core.value import Value
from holdfast.errors import Corrupted, HoldfastError, located
from holdfast.plan.coalesce import MEMORY, coalesce
from holdfast.plan.rows import BLOCK_NBYTES, SMALL_NBYTES, Piece, TensorRows
from holdfast.plan.saves import HASH_KEY, HEAD_KEY, Data, Gathered, Hashing, Segment

ODD = -1
"""The number of the storage of an odd row."""


MEASURE = 1 << 20


class Kind(Value, frozen=True, eq=False):
    """What many rows have in common."""

    dtype: DType
    shape: tuple[int, ...]
    traits: Traits
    nbytes: int
    """Bytes of the elements."""

    @classmethod
    def of(cls, tensor: LazyTensor) -> Kind:
        return cls(tensor.dtype, tensor.shape, tensor.traits, tensor.nbytes)


class Table(Mapping[str, LazyTensor]):
    """Tensors by name, a row each. As a mapping it makes a lazy tensor when one is asked for."""

    def __init__(
        self,
        names: Sequence[str],
        kinds: Sequence[Kind],
        kind: Sequence[int],
        *,
        parts: Sequence[TensorRows] = (),
        storages: Sequence[int],
        odd: Mapping[int, LazyTensor],
        lazy: Callable[[int], LazyTensor],
        stores: tuple[Store, ...],
    ) -> None:
        self.names, self.kinds, self.kind = names, kinds, kind
        """`kind` of each row is a position in `kinds`."""
        self.storages = storages
        """Of each row: its number among all storages of `parts`, one part behind the other; `ODD` for an odd row."""
        self.odd = odd
        """The tensors of odd rows, by row."""
        self.stores = stores
        """What is read, beside this process's memory."""
        self._parts, self._lazy = parts, lazy
        self._rows: dict[str, int] | None = None
        self._edges = np.cumsum([0, *(len(part.nbytes) for part in parts)])

    def nbytes_of(self, rows: Sequence[int]) -> Ints:
        """Bytes of the elements of these rows."""
        lengths, kind = [kind.nbytes for kind in self.kinds], self.kind
        return np.fromiter((lengths[kind[row]] for row in rows), np.int64, len(rows))

    def read(self, rows: Sequence[int]) -> list[Piece]:
        """The bytes of plain rows, all together."""
        storages = self.storages
        numbers = [storages[row] for row in rows]
        if len(self._parts) == 1:
            return [*self._parts[0].read(numbers)]
        asked = np.array(numbers, np.int64)
        sides = np.searchsorted(self._edges, asked, side="right") - 1
        pieces: list[Piece] = [b""] * len(numbers)
        for side in np.unique(sides).tolist():
            here = np.flatnonzero(sides == side)
            found = self._parts[side].read((asked[here] - self._edges[side]).tolist())
            for place, piece in zip(here.tolist(), found, strict=True):
                pieces[place] = piece
        return pieces

    def alone(self, row: int, label: str, hashed: Hashing = "") -> Segment | None:
        """The bytes of one row where they lie, as a segment; None where there are none."""
        if not self.kinds[self.kind[row]].nbytes:
            return None
        if row in self.odd:
            return Data(self.odd[row], label, hashed)
        if hashed:
            return Data(self.lazy(row), label, hashed)
        number = self.storages[row]
        side = int(np.searchsorted(self._edges, number, side="right")) - 1
        made = self._parts[side].alone(number - int(self._edges[side]), label)
        return None if isinstance(made, bytes) else made

    def lazy(self, row: int) -> LazyTensor:
        """The row as a lazy tensor."""
        return self.odd[row] if row in self.odd else self._lazy(row)

    @property
    def rows(self) -> Mapping[str, int]:
        """The row of each name."""
        if self._rows is None:
            self._rows = {name: row for row, name in enumerate(self.names)}
        return self._rows

    def with_entries(self, rows: Sequence[int], entries: Mapping[int, Mapping[str, LazyTensor]]) -> Table:
        """These rows; in the place of some of them, what is given for these rows."""
        names: list[str] = []
        kinds, odd = [*self.kinds], dict[int, LazyTensor]()
        kind: list[int] = []
        storages: list[int] = []
        origin: list[int] = []
        for row in rows:
            given = entries.get(row)
            if given is None:
                if row in self.odd:
                    odd[len(names)] = self.odd[row]
                names.append(self.names[row])
                kind.append(self.kind[row])
                storages.append(self.storages[row])
                origin.append(row)
                continue
            for name, tensor in given.items():
                odd[len(names)] = tensor
                names.append(name)
                kind.append(len(kinds))
                kinds.append(Kind.of(tensor))
                storages.append(ODD)
                origin.append(-1)
        return Table(
            names, kinds, kind, parts=self._parts, storages=storages, odd=odd,
            lazy=lambda row: self.lazy(origin[row]), stores=self.stores,
        )  # fmt: skip

    def __getitem__(self, name: str) -> LazyTensor:
        return self.lazy(self.rows[name])

    def outline(self, name: str) -> tuple[DType, tuple[int, ...]]:
        kind = self.kinds[self.kind[self.rows[name]]]
        return kind.dtype, kind.shape

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def __repr__(self) -> str:
        return f"<{len(self):,} tensors>"


def table_of(state: State | Mapping[str, LazyTensor]) -> Table:
    """The tensors of a state as a table."""
    tensors = state.tensors if isinstance(state, State) else state
    return tensors if isinstance(tensors, Table) else lazy_table([*tensors], [*tensors.values()])


def lazy_table(names: Sequence[str], tensors: Sequence[LazyTensor]) -> Table:
    """A table of lazy tensors; rows whose bytes are one range of a file, and nobody else's, are plain."""
    kinds: list[Kind] = []
    positions: dict[object, int] = {}
    kind: list[int] = []
    for tensor in tensors:
        traits = tensor.traits
        key = tensor.dtype, tensor.shape, id(traits)
        number = positions.get(key)
        if number is None:
            number = positions[key] = len(kinds)
            kinds.append(Kind.of(tensor))
        kind.append(number)
    plain, ranges = _file_ranges(tensors)
    storages, odd = [ODD] * len(tensors), {}
    for number, row in enumerate(plain):
        storages[row] = number
    if len(plain) < len(tensors):
        odd = {row: tensors[row] for row, storage in enumerate(storages) if storage == ODD}
    parts = [ranges.as_rows()] if plain else []
    stores = tuple(dict.fromkeys(tensor.source.store for tensor in tensors))
    return Table(names, kinds, kind, parts=parts, storages=storages, odd=odd, lazy=tensors.__getitem__, stores=stores)


def _file_ranges(tensors: Sequence[LazyTensor]) -> tuple[list[int], FileRanges]:
    """The rows of tensors that are one range of a file and share their storage with no other, and those ranges."""
    files: dict[tuple[int, str], int] = {}
    stores: list[tuple[Store, str]] = []
    near: dict[int, bool] = {}
    rows: list[int] = []
    ranges: list[tuple[int, int, int, int]] = []
    spans: list[tuple[int, int, int]] = []
    others: list[LazyTensor] = []
    for row, tensor in enumerate(tensors):
        traits = tensor.traits
        store = tensor.source.store
        if id(store) not in near:
            near[id(store)] = not (store.requests or store.in_order or store.block_nbytes)
        place = place_of(tensor) if near[id(store)] and (traits is PLAIN or traits.alias is None) else None
        if place is None:
            others.append(tensor)
            continue
        key, start, nbytes, crc = place
        home = id(store if isinstance(tensor, RowTensor) else tensor.chunks[0].storage.home)
        file = files.get((home, key))
        if file is None:
            # What is computed costs other bytes than it has.
            file = len(stores) if store.cost(key, MEASURE) == MEASURE else ODD
            files[home, key] = file
            stores += [(store, key)] if file >= 0 else []
        if file == ODD:
            others.append(tensor)
            continue
        rows.append(row)
        ranges.append((file, start, nbytes, crc))
        spans.append((file, *_storage_span(tensor)))
    spans += [
        (files[id(storage.home), storage.key], storage.start, storage.nbytes)
        for tensor in others
        for storage in tensor.storages
        if files.get((id(storage.home), storage.key), ODD) != ODD
    ]
    own = np.flatnonzero(_alone(np.array(spans, np.int64).reshape(-1, 3))[: len(rows)])
    rows = [rows[at] for at in own.tolist()]
    return rows, FileRanges([tensors[row] for row in rows], stores, np.array(ranges, np.int64).reshape(-1, 4)[own])


def _storage_span(tensor: LazyTensor) -> tuple[int, int]:
    """First byte and length of the storage of a tensor in one piece."""
    if isinstance(tensor, RowTensor):
        return tensor.start, tensor.kind.nbytes
    storage = tensor.chunks[0].storage
    return storage.start, storage.nbytes


def _alone(spans: Ints) -> np.ndarray:
    """Whether each of some spans (file, first byte, length) meets no other. What has no bytes meets nobody."""
    alone = np.ones(len(spans), bool)
    filled = np.flatnonzero(spans[:, 2] > 0)
    if len(filled) < 2:
        return alone
    files, starts, lengths = spans[filled].T
    # Places of all files in one row of numbers: by their ranks, which are few enough for that.
    edges = np.unique(np.concatenate((starts, starts + lengths)))
    first = files * len(edges) + np.searchsorted(edges, starts)
    last = files * len(edges) + np.searchsorted(edges, starts + lengths)
    order = np.argsort(first, kind="stable")
    reach = np.maximum.accumulate(last[order])
    groups = np.cumsum(np.concatenate(([True], first[order][1:] >= reach[:-1]))) - 1
    alone[filled[order]] = np.bincount(groups)[groups] == 1
    return alone


class FileRanges:
    """The bytes of tensors in files, each one range; compared with the checksum that its file records."""

    def __init__(self, tensors: Sequence[LazyTensor], files: Sequence[tuple[Store, str]], ranges: Ints) -> None:
        self._tensors, self._files = tensors, files
        self._file, self._starts, self._nbytes, self._crcs = ranges.T

    def as_rows(self) -> TensorRows:
        """The ranges as storages, one a tensor."""
        count = len(self._tensors)
        numbers = np.arange(count)
        return TensorRows(numbers, [0] * count, [], range(count), self._nbytes, None, self.read, self.alone)

    def read(self, numbers: Sequence[int]) -> list[memoryview]:
        """The bytes of these; neighbours by one read."""
        wanted = np.array(numbers, np.int64)
        pieces: list[memoryview] = [memoryview(b"")] * len(wanted)
        order = np.lexsort((self._starts[wanted], self._file[wanted]))
        order = order[self._nbytes[wanted[order]] > 0]
        for places in np.split(order, np.flatnonzero(np.diff(self._file[wanted[order]])) + 1):
            if not len(places):
                continue
            rows = wanted[places]
            starts = self._starts[rows]
            stops = starts + self._nbytes[rows]
            heads = coalesce(starts, stops, MEMORY)
            for first, last in zip(heads.tolist(), [*heads[1:].tolist(), len(places)], strict=True):
                begin = int(starts[first])
                data = self._span(rows[first:last].tolist(), begin, int(stops[last - 1]))
                cut = zip(places[first:last].tolist(), starts[first:last].tolist(), stops[first:last].tolist(), strict=True)
                for place, start, stop in cut:
                    pieces[place] = data[start - begin : stop - begin]
        for number, piece, crc in zip(numbers, pieces, self._crcs[wanted].tolist(), strict=True):
            if crc != NO_CRC and (found := crc32(piece)) != crc:
                raise self._changed(number, crc, found)
        return pieces

    def _span(self, members: list[int], start: int, stop: int) -> memoryview:
        store, key = self._files[self._file[members[0]]]
        data = np.empty(stop - start, np.uint8).data
        try:
            store.read(key, start, data)
        except HoldfastError:
            # Each by itself, so that the error names the one that cannot be read.
            for number in members:
                begin = int(self._starts[number])
                with located(tensor=self._tensors[number].name):
                    store.read(key, begin, data[begin - start : begin - start + int(self._nbytes[number])])
        return data

    def _changed(self, number: int, expected: int, found: int) -> Corrupted:
        _, key = self._files[self._file[number]]
        return Corrupted(
            "the source does not have the checksum that it records: it changed after it was written; get it again",
            file=key,
            tensor=self._tensors[number].name,
            offset=int(self._starts[number]),
            expected=expected,
            found=found,
        )

    def alone(self, number: int, label: str) -> Data | bytes:
        """The bytes of a long one, a block at a time."""
        return Data(self._tensors[number], label) if self._nbytes[number] else b""


def segments(
    table: Table, rows: Sequence[int], nbytes: Ints, labels: Sequence[str], hashing: Mapping[str, Hashing]
) -> list[Segment]:
    """The bytes of rows that follow each other in a file: small plain ones together, a few megabytes a segment.

    `nbytes` are those of these rows. `hashing` says by name which are hashed, and how.
    """
    found: list[Segment] = []
    alone = nbytes > SMALL_NBYTES
    if table.odd:
        alone |= np.fromiter((row in table.odd for row in rows), bool, len(rows))
    stops = np.cumsum(nbytes)
    for first, stop in _runs(np.flatnonzero(alone).tolist(), stops):
        if first + 1 == stop and alone[first]:
            name = table.names[rows[first]]
            one = table.alone(rows[first], labels[first], hashing.get(name, "") if hashing else "")
            found += () if one is None else (one,)
            continue
        own, named = rows[first:stop], labels[first:stop]
        if not nbytes[first:stop].all():
            filled = np.flatnonzero(nbytes[first:stop]).tolist()
            own, named = [own[at] for at in filled], [named[at] for at in filled]
        if own:
            found.append(_gathered(table, own, named, hashing, nbytes[first:stop]))
    return found


def _runs(alone: Sequence[int], stops: Ints) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are one segment: each of those that are alone, and between them a few megabytes at a time."""
    first = 0
    for single in [*alone, len(stops)]:
        while first < single:
            before = int(stops[first - 1]) if first else 0
            # Up to the first one that passes the size, and with it.
            stop = min(int(np.searchsorted(stops, before + BLOCK_NBYTES)) + 1, single)
            yield first, stop
            first = stop
        if single < len(stops):
            yield single, single + 1
            first = single + 1


def _gathered(table: Table, rows: Sequence[int], labels: Sequence[str], hashing: Mapping[str, Hashing], nbytes: Ints) -> Gathered:

    def make() -> tuple[bytes, dict[str, int]]:
        pieces = table.read(rows)
        known = dict(zip(labels, crc32_each(pieces), strict=True))
        if hashing:
            from holdfast.core.content_hash import hash_bytes, head_bytes  # for those who save: it imports a library

            for row, label, piece in zip(rows, labels, pieces, strict=True):
                how = hashing.get(table.names[row])
                if how is not None:
                    hashed = hash_bytes(piece) if how == "hash" else head_bytes(piece)
                    known[label + HASH_KEY], known[label + HEAD_KEY] = hashed.hash or 0, hashed.head or 0
        return b"".join(pieces), known

    lengths = nbytes[nbytes > 0].tolist()
    return Gathered(sum(lengths), labels, make, lengths, lambda: [table.lazy(row) for row in rows], bool(hashing))
