"""Which tensors of a checkpoint become fresh ones without an object each: those that are all of a storage of their own.

Their bytes in the file are those of the tensor, so a range and a kind say all. What shares a storage is tied again by its regions
(shared_regions.py), and what has another order, dtype or several pieces is copied element by element: both are lazy tensors first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from holdfast.core.protocols import Source
from holdfast.core.table import ODD, FileColumns, Kind, Table
from holdfast.core.tensor import LazyTensor
from holdfast.engine.checks import damage
from holdfast.engine.memory_sink import UNKNOWN
from holdfast.engine.source import OpenSource
from holdfast.errors import Corrupted, Unsupported
from holdfast.plan.coalesce import Ranges
from holdfast.plan.files import tabulated
from holdfast.torch.cuda.plan import ByteKind, DeviceRows
from holdfast.torch.tensors.from_lazy import torch_dtype


class FreshRows(NamedTuple):
    """Rows that become fresh tensors, and their names."""

    rows: DeviceRows
    names: list[str]


class _Place(NamedTuple):
    """A tensor that is all of a storage."""

    name: str
    source: Source
    key: str
    start: int
    nbytes: int
    crc: int
    kind: Kind


def fresh_rows(
    stored: Mapping[str, LazyTensor], views: Mapping[str, LazyTensor], names: Sequence[str], *, device: torch.device
) -> list[FreshRows]:
    """Rows of what is `stored` that become fresh tensors on a device, those of a source together. `views` has all names."""
    known = isinstance(stored, Table) and all(name in stored for name in names)
    table = stored if known and isinstance(stored, Table) else tabulated({name: views[name] for name in names})
    kinds: dict[int, ByteKind | None] = {}
    groups: dict[Source, list[_Place]] = {}
    for place in _places(table, [table.rows[name] for name in names]):
        if id(place.kind) not in kinds:
            kinds[id(place.kind)] = _byte_kind(place.kind)
        if kinds[id(place.kind)] is not None and _suits(place.source, device):
            groups.setdefault(place.source, []).append(place)
    return [_rows(source, members, kinds, views=views, device=device) for source, members in groups.items()]


def _suits(source: Source, device: torch.device) -> bool:
    """Whether whole storages of a source are read as they are. To the CPU a mapped file gives views, and far away or computed
    content has requests of its own."""
    store = source.store
    apart = source.mapped or store.requests or store.in_order or store.block_nbytes
    return source.limits.expansion >= 1 and not (device.type == "cpu" and apart)


def _rows(
    source: Source,
    places: Sequence[_Place],
    kinds: Mapping[int, ByteKind | None],
    *,
    views: Mapping[str, LazyTensor],
    device: torch.device,
) -> FreshRows:
    names = [place.name for place in places]
    verify = isinstance(source, OpenSource) and source.verify
    keys: dict[str, int] = {}
    files = np.fromiter((keys.setdefault(place.key, len(keys)) for place in places), np.int64, len(places))
    starts, nbytes, crcs = (
        np.fromiter(column, np.int64, len(places)) for column in zip(*(one[3:6] for one in places), strict=True)
    )
    made = [kind for kind in (kinds[id(place.kind)] for place in places) if kind is not None]

    def damaged(number: int, found: int) -> Corrupted:
        return damage(views[names[number]].chunks[0].storage, names[number], found)

    checked = crcs if verify else np.full(len(places), UNKNOWN, np.int64)
    rows = DeviceRows(source, device, Ranges(list(keys), files, starts, nbytes), checked, made, names.__getitem__, damaged)
    return FreshRows(rows, names)


def _places(table: Table, rows: Sequence[int]) -> Iterator[_Place]:
    """Rows that are all of a storage which no other of these rows has."""
    storages = table.storages
    if not isinstance(storages, FileColumns):
        return
    own = [row for row in rows if table.storage[row] != ODD]
    numbers = np.fromiter((table.storage[row] for row in own), np.int64, len(own))
    alone = np.bincount(numbers)[numbers] == 1
    columns = storages.file[numbers], storages.start[numbers], storages.nbytes[numbers], storages.crc[numbers], alone
    for row, file, start, nbytes, crc, single in zip(own, *(column.tolist() for column in columns), strict=True):
        kind, place = table.kind_of(row), storages.files[file]
        if single and kind.whole and kind.traits.alias is None:
            yield _Place(table.names[row], place.source, place.key, start, nbytes, crc, kind)


def _byte_kind(kind: Kind) -> ByteKind | None:
    """As what rows of a kind are copied; None where torch has no such elements. Of quantised ones a scale is missing."""
    dtype = kind.dtype
    try:
        usual = dtype.kind != "quantized" and not dtype.packed and torch_dtype(dtype).itemsize * 8 == dtype.bits
        return ByteKind.of(torch_dtype(dtype), kind.shape) if usual else None
    except Unsupported:
        return None
