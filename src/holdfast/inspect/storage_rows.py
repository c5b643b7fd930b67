"""Where the storages of very many tensors lie, as columns: those that one tensor has each. Nothing is read, and no tensor is made.

A table says so by its columns (`core/table.py`), and so does a tensor that is a row (`plan/files.py`).
What shares a storage, is split or packed is left to objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.protocols import Source
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.plan.coalesce import Ranges
from holdfast.plan.files import FileRow, FileStorages

FEW = 64
"""Fewer tensors are objects: to make rows takes as long as they would."""


class Rows(Value, frozen=True, eq=False):
    """Storages of one name each, in the files themselves."""

    positions: Ints
    """Of their tensors among all of them, ascending."""
    ranges: Ranges
    crcs: Ints
    """As they are recorded; `NO_CRC` where they are not."""

    def __len__(self) -> int:
        return len(self.positions)

    def some(self, wanted: Bools) -> Rows:
        return Rows(self.positions[wanted], self.ranges.some(wanted), self.crcs[wanted])


NONE = Rows(np.zeros(0, np.int64), Ranges.of(()), np.zeros(0, np.int64))


def storage_rows(tensors: Mapping[str, LazyTensor], names: list[str], source: Source) -> Rows:
    """The storages of ordinary tensors that no other ordinary one has; those without bytes, too. None of few tensors."""
    if len(names) < FEW:
        return NONE
    if isinstance(tensors, Table):
        held = tensors.storages
        if not isinstance(held, FileStorages) or any(place.source is not source for place in held.files):
            return NONE
        numbers = np.asarray(tensors.storage, np.int64)
        rows = np.flatnonzero(numbers >= 0)
        numbers = numbers[rows]
        single = np.bincount(numbers, minlength=len(held.nbytes))[numbers] == 1
        rows, numbers = rows[single], numbers[single]
        ranges = Ranges([place.key for place in held.files], held.file[numbers], held.start[numbers], held.nbytes[numbers])
        made = Rows(rows, ranges, held.crc[numbers])
    elif type(tensors) is dict:
        made = _noted_rows(tensors.values(), source)
    else:
        return NONE
    ranges = made.ranges
    order = np.lexsort((ranges.nbytes, ranges.starts, ranges.files))
    same = np.ones(max(len(order) - 1, 0), np.bool_)
    for column in (ranges.files, ranges.starts, ranges.nbytes):
        same &= np.diff(column[order]) == 0
    same &= ranges.nbytes[order][1:] > 0
    alone = np.ones(len(order), np.bool_)
    alone[order[1:][same]] = alone[order[:-1][same]] = False
    return made if alone.all() else made.some(alone)


def _noted_rows(tensors: Iterable[LazyTensor], source: Source) -> Rows:
    """The storages of tensors that are rows themselves."""
    keys: dict[str, int] = {}
    positions: list[int] = []
    places: list[tuple[int, int, int, int]] = []
    for position, tensor in enumerate(tensors):
        row = tensor.position
        if isinstance(row, FileRow) and tensor.source is source:
            own, number = row.storages, row.number
            key = own.files[own.file_of(number)].key
            place = own.start_of(number), row.kind.storage_nbytes, own.crc_of(number)
            places.append((keys.setdefault(key, len(keys)), *place))
            positions.append(position)
    files, starts, nbytes, crcs = np.array(places, np.int64).reshape(-1, 4).T
    return Rows(np.array(positions, np.int64), Ranges(list(keys), files, starts, nbytes), crcs)


def among(ranges: Ranges, places: set[object]) -> Bools:
    """Which ranges are among these places (key, start, length)."""
    found = np.zeros(len(ranges), np.bool_)
    if len(ranges) and places:
        starts = np.array([place[1] for place in places if isinstance(place, tuple)], np.int64)
        for number in np.flatnonzero(np.isin(ranges.starts, starts)).tolist():
            found[number] = ranges.place(number) in places
    return found
