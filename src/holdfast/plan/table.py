"""A table on its way to a file: tables of lazy tensors, and the segments that rows become.

A row is *plain* where its elements are all bytes of its storage, in C order, and no other row shares that storage. Plain rows are
read many together, by whoever made them: memory, a GPU, a file. Every other row is *odd* and has a lazy tensor, which says where
its elements are: a view, a tensor in several pieces, one that is computed, one that is tied to another.

Every layout takes a table (`core/table.py`). Two functions make one to be saved: `rewrite.state.tabulate_state` of a caller's
memory, `table_of` of lazy tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.crc import crc32_each
from holdfast.core.protocols import State, Store
from holdfast.core.table import ODD, FilePlace, Kind, Piece, Table
from holdfast.core.tensor import PLAIN, LazyTensor
from holdfast.core.value import Value
from holdfast.plan import saves
from holdfast.plan.files import FileRow, FileStorages
from holdfast.plan.saves import HASH_KEY, HEAD_KEY, Data, Gathered, Hashing, Memory, Segment

MEASURE = 1 << 20


class MemoryBytes(Protocol):
    """The bytes of storages in memory, of one library."""

    @property
    def nbytes(self) -> Ints:
        """Of each storage."""

    def read(self, numbers: Sequence[int]) -> Sequence[Piece]:
        """The bytes of storages of these numbers, all of them together."""

    def alone(self, number: int, label: str) -> bytes | Data | Memory:
        """The bytes of one storage under a label, where they lie."""


class Tabulated(Value, frozen=True, eq=False):
    """Tensors of one library that are plain, as columns."""

    rows: Sequence[int]
    """Which of the tensors that were given."""
    kinds: Sequence[Kind]
    kind: Sequence[int]
    """Of each row, a position in `kinds`."""
    storage: Sequence[int]
    """Of each row, the number of its storage."""
    storages: MemoryBytes
    addresses: Callable[[], Sequence[int]]
    """Where the storage of each row begins in this process."""


class StateStorages:
    """The storages of a state, those of one library behind those of another. `view` makes the lazy tensor of one."""

    def __init__(self, parts: Sequence[MemoryBytes], view: Callable[[int], LazyTensor]) -> None:
        self._parts, self._view = parts, view
        self._edges = [*accumulate((len(part.nbytes) for part in parts), initial=0)]
        columns = [part.nbytes for part in parts]
        self.nbytes: Ints = columns[0] if len(parts) == 1 else np.concatenate(columns or [np.zeros(0, np.int64)])
        self.stores: tuple[Store, ...] = ()

    def read(self, numbers: Sequence[int]) -> Sequence[Piece]:
        if len(self._parts) == 1:
            return self._parts[0].read(numbers)
        wanted = np.array(numbers, np.int64)
        sides = np.searchsorted(self._edges, wanted, side="right") - 1
        pieces: list[Piece] = [b""] * len(numbers)
        for side in np.unique(sides).tolist():
            here = np.flatnonzero(sides == side)
            found = self._parts[side].read((wanted[here] - self._edges[side]).tolist())
            for place, piece in zip(here.tolist(), found, strict=True):
                pieces[place] = piece
        return pieces

    def alone(self, number: int, label: str) -> bytes | Data | Memory:
        side = bisect_right(self._edges, number) - 1
        return self._parts[side].alone(number - self._edges[side], label)

    def view(self, number: int, kind: Kind, name: str) -> LazyTensor:
        return self._view(number).renamed(name)


def table_of(state: State | Mapping[str, LazyTensor]) -> Table:
    """The tensors of a state as a table."""
    tensors = state.tensors if isinstance(state, State) else state
    return tensors if isinstance(tensors, Table) else lazy_table([*tensors], [*tensors.values()])


def lazy_table(names: Sequence[str], tensors: Sequence[LazyTensor]) -> Table:
    """A table of lazy tensors; rows whose bytes are one range of a file, and nobody else's, are plain."""
    kinds: list[Kind] = []
    positions: dict[object, int] = {}
    kind: list[int] = []
    plain, storages = _file_storages(tensors)
    storage = [ODD] * len(tensors)
    for number, row in enumerate(plain):
        storage[row] = number
    for tensor, number in zip(tensors, storage, strict=True):
        place = _storage_of(tensor)[1] if number != ODD else None
        key = tensor.dtype, tensor.shape, id(tensor.traits), place
        found = positions.get(key)
        if found is None:
            found = positions[key] = len(kinds)
            kinds.append(Kind.of(tensor))
        kind.append(found)
    odd = {row: tensors[row] for row, number in enumerate(storage) if number == ODD} if len(plain) < len(tensors) else {}
    return Table(names, kinds, kind, storage, storages, odd)


def _file_storages(tensors: Sequence[LazyTensor]) -> tuple[list[int], FileStorages]:
    """The rows of tensors that are all bytes of a range of a file which no other has, and those ranges."""
    files: dict[tuple[int, str], int] = {}
    places: list[FilePlace] = []
    near: dict[int, bool] = {}
    rows: list[int] = []
    ranges: list[tuple[int, int, int, int]] = []
    names: list[tuple[str, str]] = []
    others: list[LazyTensor] = []
    for row, tensor in enumerate(tensors):
        traits = tensor.traits
        source = tensor.source
        store = source.store
        if id(store) not in near:
            near[id(store)] = not (store.requests or store.in_order or store.block_nbytes)
        place = tensor.file_range() if near[id(store)] and (traits is PLAIN or traits.alias is None) else None
        if place is None or place[2] != _storage_of(tensor)[0]:
            others.append(tensor)
            continue
        key, start, nbytes, crc = place
        home = _home_of(tensor)
        file = files.get((id(home), key))
        if file is None:
            # What is computed costs other bytes than it has.
            file = len(places) if store.cost(key, MEASURE) == MEASURE else ODD
            files[id(home), key] = file
            places += [FilePlace(source, key, home)] if file >= 0 else []
        if file == ODD:
            others.append(tensor)
            continue
        rows.append(row)
        ranges.append((file, start, nbytes, crc))
        names.append((tensor.name, _storage_of(tensor)[2]))
    spans = [place[:3] for place in ranges] + [
        (files[id(storage.home), storage.key], storage.start, storage.nbytes)
        for tensor in others
        for storage in tensor.storages
        if files.get((id(storage.home), storage.key), ODD) != ODD
    ]
    own = np.flatnonzero(_alone(np.array(spans, np.int64).reshape(-1, 3))[: len(rows)])
    columns = np.array(ranges, np.int64).reshape(-1, 4)[own].T
    chosen = own.tolist()
    own_names, labels = [names[at][0] for at in chosen], [names[at][1] for at in chosen]
    return [rows[at] for at in chosen], FileStorages(places, *columns, names=own_names, labels=labels)


def _storage_of(tensor: LazyTensor) -> tuple[int, str, str]:
    """Length, location and label of the storage of a tensor in one piece."""
    row = tensor.position
    if isinstance(row, FileRow):
        return row.kind.storage_nbytes, row.kind.location, row.storages.label_of(row.number)
    storage = tensor.chunks[0].storage
    return storage.nbytes, storage.location, storage.label


def _home_of(tensor: LazyTensor) -> object:
    row = tensor.position
    if isinstance(row, FileRow):
        return row.storages.files[row.storages.file_of(row.number)].home
    return tensor.chunks[0].storage.home


def _alone(spans: Ints) -> Bools:
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


def segment_of(table: Table, row: int, label: str, hashed: Hashing = "") -> Segment | None:
    """The bytes of one row where they lie, as a segment; None where there are none."""
    if not table.kind_of(row).nbytes:
        return None
    if hashed or row in table.odd:
        return Data(table.view(row), label, hashed)
    made = table.alone(row, label)
    return None if isinstance(made, bytes) else made


def segments(
    table: Table, rows: Sequence[int], nbytes: Ints, labels: Sequence[str], hashing: Mapping[str, Hashing]
) -> list[Segment]:
    """The bytes of rows that follow each other in a file: small plain ones together, a few megabytes a segment.

    `nbytes` are those of these rows. `hashing` says by name which are hashed, and how.
    """
    found: list[Segment] = []
    alone = nbytes > saves.SMALL_NBYTES
    if table.odd:
        alone |= np.fromiter((row in table.odd for row in rows), bool, len(rows))
    for first, stop in segment_runs(alone.nonzero()[0].tolist(), nbytes.cumsum()):
        if first + 1 == stop and alone[first]:
            name = table.names[rows[first]]
            one = segment_of(table, rows[first], labels[first], hashing.get(name, "") if hashing else "")
            found += () if one is None else (one,)
            continue
        own, named = rows[first:stop], labels[first:stop]
        lengths = nbytes[first:stop].tolist()
        if 0 in lengths:
            filled = [at for at, length in enumerate(lengths) if length]
            own, named, lengths = [own[at] for at in filled], [named[at] for at in filled], [lengths[at] for at in filled]
        if own:
            found.append(_gathered(table, own, named, hashing, lengths))
    return found


def segment_runs(alone: Sequence[int], stops: Ints) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are one segment: each of those that are alone, and between them a few megabytes at a time."""
    first = 0
    for single in [*alone, len(stops)]:
        while first < single:
            before = int(stops[first - 1]) if first else 0
            # Up to the first one that passes the size, and with it.
            stop = min(int(stops.searchsorted(before + saves.BLOCK_NBYTES)) + 1, single)
            yield first, stop
            first = stop
        if single < len(stops):
            yield single, single + 1
            first = single + 1


def _gathered(
    table: Table, rows: Sequence[int], labels: Sequence[str], hashing: Mapping[str, Hashing], lengths: Sequence[int]
) -> Gathered:

    def make() -> tuple[bytes, dict[str, int]]:
        pieces = table.read(rows)
        known = dict(zip(labels, crc32_each(pieces), strict=True))
        if hashing:
            from holdfast.core.content_hash import hash_short  # for those who save: it imports a library

            # No row here is longer than a head (`SMALL_NBYTES`): it has a hash, and no head.
            known.update(zip([label + HASH_KEY for label in labels], hash_short(pieces), strict=True))
            known.update(dict.fromkeys([label + HEAD_KEY for label in labels], 0))
        return b"".join(pieces), known

    return Gathered(sum(lengths), labels, make, lengths, lambda: [table.view(row) for row in rows], bool(hashing))
