"""Which tensors share memory: those of one storage, those that are one view, those with bytes in common. Nothing is read.

A storage is equal to another when both are the same bytes (`Storage.home`), so all of this is comparing, and never reading:

    groups     by storage, the names over it: tied weights, views of one buffer
    twins      names of one and the same view: the same elements of the same bytes, with the same meaning
    tied       the same of the rows of a table, by the numbers of their storages
    shared_groups, storage_nbytes     storages with several names, and bytes of all, of the rows of a table
    islands    ranges of one storage that hang together, because they overlap or touch
    overlaps   pairs of them that have a byte in common

    storage    │ · · a a a a · · · · b b · · │     names a, c, b and d; c is a over again, d the second half of a
                     c c c c                       groups    {storage: [a, b, c, d]}
                         d d                       twins     {c: a}
                                                   islands   [a c d], [b]

A format that stores every tensor by itself may note where each lay before (`Traits.alias`). With `noted=True` such a tensor counts
as the view that it was (`LazyTensor.shared_chunks`), and not as the copy that it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Generic, TypeVar, cast

import numpy as np

from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DType
from holdfast.core.table import ODD, FileColumns, Kind, Table
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.core.value import Value

T = TypeVar("T")

View = tuple[DType, tuple[int, ...], tuple[Chunk, ...], bool, bool]
"""What all names of one and the same view have in common, and no other view: dtype, shape, chunks, and whether the elements are the
conjugates or the negatives of what is stored."""

Span = tuple[int, int, T]
"""The first byte of something, the byte after its last one, and what it is."""


class Island(Value, Generic[T], frozen=True):
    """A range without a gap, and what lies in it, in the order of first bytes."""

    start: int
    stop: int
    members: list[T]


def identity(tensor: LazyTensor, *, noted: bool = False) -> View:
    """What tells a view from all others. Two tensors with one identity hold the same, whatever becomes of the bytes."""
    chunks = tensor.shared_chunks if noted else tensor.chunks
    return tensor.dtype, tensor.shape, chunks, tensor.traits.conj, tensor.traits.neg


def groups(tensors: Mapping[str, LazyTensor], *, noted: bool = False) -> dict[Storage, list[str]]:
    """The names over each storage, storages and names in the order of the tensors. Most storages have one name."""
    found: dict[Storage, list[str]] = {}
    for name, tensor in tensors.items():
        chunks = tensor.shared_chunks if noted else tensor.chunks
        # Almost every tensor has one chunk: for 100,000 of them a dict each would be felt.
        for storage in (chunks[0].storage,) if len(chunks) == 1 else dict.fromkeys(chunk.storage for chunk in chunks):
            found.setdefault(storage, []).append(name)
    return found


StorageKey = tuple[object, ...]
"""What is equal for equal storages: the store and the file, first byte, length, checksum, byte order."""


def _storage_keys(table: Table) -> list[list[StorageKey]]:
    """The storages of each row."""
    held, orders = table.storages, [kind.byteorder for kind in table.kinds]
    if isinstance(held, FileColumns):
        files = [(id(place.home), place.key) for place in held.files]
        columns = map(files.__getitem__, held.file.tolist()), held.start.tolist(), held.nbytes.tolist(), held.crc.tolist()
        every: Sequence[StorageKey] = [*zip(*columns, strict=True)]
    else:
        every = [(None, number, nbytes, NO_CRC) for number, nbytes in enumerate(held.nbytes.tolist())]
    found = [
        [] if number == ODD else [(*every[number], orders[kind])] for number, kind in zip(table.storage, table.kind, strict=True)
    ]
    for row, tensor in table.odd.items():
        found[row] = [
            ((id(one.home), one.key), one.start, one.nbytes, NO_CRC if one.crc32 is None else one.crc32, one.byteorder)
            for one in tensor.storages
        ]
    return found


def storage_nbytes(table: Table) -> int:
    """Bytes of the storages of all rows, each once."""
    lengths = {key: cast("int", key[2]) for own in _storage_keys(table) for key in own}
    return sum(lengths.values())


def shared_groups(table: Table) -> dict[Storage, list[str]]:
    """Storages that several rows share, with their names; copies count as the views that they were."""
    keys = _storage_keys(table)
    several = {key for key, times in Counter(chain.from_iterable(keys)).items() if times > 1}
    noted = {number for number, kind in enumerate(table.kinds) if kind.traits.alias is not None}
    # Tensors are made of rows that may share something, and of no others.
    each = enumerate(zip(keys, table.kind, strict=True))
    rows = [row for row, (own, kind) in each if kind in noted or not several.isdisjoint(own)]
    found = groups({table.names[row]: table.view(row) for row in rows}, noted=True)
    return {storage: names for storage, names in found.items() if len(names) > 1 and storage.nbytes}


def twins(tensors: Mapping[str, LazyTensor]) -> dict[str, str]:
    """Names of a view that has an earlier name, each with the first of its names. What has no bytes is nobody's twin."""
    found: dict[str, str] = {}
    alone: dict[Storage, str] = {}
    firsts: dict[View, str] = {}
    for name, tensor in tensors.items():
        storage = tensor.chunks[0].storage if tensor.chunks else None
        if storage is None or not storage.nbytes:
            continue
        other = alone.setdefault(storage, name)
        if other is name:
            # Most tensors are alone in their storage, and a storage is compared faster than a view.
            continue
        firsts.setdefault(identity(tensors[other]), other)
        first = firsts.setdefault(identity(tensor), name)
        if first != name:
            found[name] = first
    return found


def tied(table: Table) -> dict[int, int]:
    """Rows that are the same view of a storage as an earlier row, in order, each with the first such row.

    Rows of one view have one dtype and shape, one place in one storage, and one meaning of its bytes. What has no bytes is no view.
    """
    found: dict[int, int] = {}
    if len({*table.storage}) < len(table):
        views: dict[object, int] = {}
        for kind in table.kinds:
            views.setdefault(_view(kind), len(views))
        view = np.array([views[_view(kind)] for kind in table.kinds], np.int64)
        storage = np.array(table.storage, np.int64)
        rows = np.flatnonzero(storage != ODD)
        rows = rows[table.storages.nbytes[storage[rows]] > 0]
        same = storage[rows] * len(views) + view[np.array(table.kind, np.int64)[rows]]
        _, first, place = np.unique(same, return_index=True, return_inverse=True)
        firsts = rows[first[place]]
        again = firsts != rows
        found = dict(zip(rows[again].tolist(), firsts[again].tolist(), strict=True))
    if len(table.odd) < 2:
        return found
    row_of = {table.names[row]: row for row in sorted(table.odd)}
    for name, other in twins({name: table.odd[row] for name, row in row_of.items()}).items():
        found[row_of[name]] = row_of[other]
    return dict(sorted(found.items()))


def _view(kind: Kind) -> tuple[object, ...]:
    """What all rows of one view have in common, beside their storage."""
    traits = kind.traits
    place = (0, ()) if 0 in kind.shape else (kind.offset, kind.strides)
    return kind.dtype, kind.shape, *place, traits.conj, traits.neg


def islands(spans: Iterable[Span[T]], *, touching: bool = False) -> list[Island[T]]:
    """What overlaps, as one: each with the next, and so all that hang together. With `touching`, neighbours without a gap as well.

    >>> [(island.start, island.stop, island.members) for island in islands([(8, 12, "c"), (0, 6, "a"), (4, 8, "b")])]
    [(0, 8, ['a', 'b']), (8, 12, ['c'])]
    """
    found: list[Island[T]] = []
    for start, stop, member in sorted(spans, key=lambda span: span[:2]):
        last = found[-1] if found else None
        if last is not None and (start < last.stop or (touching and start == last.stop)):
            last.members.append(member)
            found[-1] = Island(last.start, max(last.stop, stop), last.members)
        else:
            found.append(Island(start, stop, [member]))
    return found


def overlaps(spans: Iterable[Span[T]]) -> Iterator[tuple[T, T]]:
    """Pairs that have a byte in common: each with the one of those before it that reaches furthest. Linear, so not all pairs.

    >>> list(overlaps([(0, 10, "a"), (2, 4, "b"), (6, 8, "c"), (10, 12, "d")]))
    [('a', 'b'), ('a', 'c')]
    """
    furthest: Span[T] | None = None
    for span in sorted(spans, key=lambda span: span[:2]):
        if furthest is not None and span[0] < furthest[1]:
            yield furthest[2], span[2]
        if furthest is None or span[1] > furthest[1]:
            furthest = span
