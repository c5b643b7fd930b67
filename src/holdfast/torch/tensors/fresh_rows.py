"""Which tensors of a checkpoint are fresh ones on a GPU without an object each: those that are all of a storage of their own.

Their bytes in the file are those of the tensor, so a range and a kind say all. What shares a storage is tied again by its regions
(shared_regions.py), and what has another order, dtype or several pieces is copied element by element: both are lazy tensors first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from holdfast.core.arrays import Bools
from holdfast.core.chunk import Storage
from holdfast.core.columns import Columned, Columns, columns_of, ordinary_limits
from holdfast.core.dtype import DType
from holdfast.core.protocols import Noted, Outlined, Source
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.checks import damage
from holdfast.engine.memory_sink import UNKNOWN
from holdfast.engine.source import OpenSource
from holdfast.errors import Corrupted, Unsupported
from holdfast.plan.coalesce import Ranges
from holdfast.torch.cuda.plan import ByteKind, DeviceRows
from holdfast.torch.tensors.from_lazy import torch_dtype


class _Candidates(Value, frozen=True):
    """Tensors that lie in one piece of a file each."""

    source: Source
    columns: Columns
    dtypes: Sequence[DType]
    alone: Bools
    """Whether it is all of its storage, and no other tensor is there."""


def fresh_rows(
    stored: Mapping[str, LazyTensor], views: Mapping[str, LazyTensor], names: Sequence[str], *, device: torch.device
) -> tuple[DeviceRows, list[str]]:
    """Rows of what is `stored` that become fresh tensors on a device, and their names. `views` are lazy tensors of all names."""
    found = _candidates(stored, views, names)
    columns = found.columns
    kinds: dict[tuple[int, tuple[int, ...]], ByteKind | None] = {}
    destinations: list[ByteKind | None] = []
    # By identity: there is one object a dtype, and to hash it takes a call.
    for dtype, shape in zip(found.dtypes, columns.shapes, strict=True):
        key = id(dtype), shape
        if key not in kinds:
            kinds[key] = ByteKind.of(torch_dtype(dtype), shape) if _has_torch(dtype) else None
        destinations.append(kinds[key])
    usual = np.fromiter((kind is not None for kind in destinations), np.bool_, len(destinations))
    chosen = np.flatnonzero(usual & found.alone & ~_overlapping(columns))
    own = [names[columns.numbers[number]] for number in chosen.tolist()]

    def damaged(number: int, crc: int) -> Corrupted:
        return damage(views[own[number]].chunks[0].storage, own[number], crc)

    verify = isinstance(found.source, OpenSource) and found.source.verify
    crcs = columns.crcs[chosen] if verify else np.full(len(chosen), UNKNOWN, np.int64)
    ranges = Ranges(columns.keys, columns.files[chosen], columns.starts[chosen], columns.nbytes[chosen])
    made = [kind for kind in map(destinations.__getitem__, chosen.tolist()) if kind is not None]
    return DeviceRows(found.source, device, ranges, crcs, made, own.__getitem__, damaged), own


def _candidates(stored: Mapping[str, LazyTensor], views: Mapping[str, LazyTensor], names: Sequence[str]) -> _Candidates:
    if isinstance(stored, Columned) and isinstance(stored, Outlined):
        found = stored.columns(names)
        if found is not None and ordinary_limits(found[0]):
            dtypes = [stored.outline(names[number])[0] for number in found[1].numbers]
            noted = stored.is_noted if isinstance(stored, Noted) else lambda name: False
            alone = np.array([not noted(names[number]) for number in found[1].numbers], np.bool_)
            return _Candidates(*found, dtypes, alone)
    return _described([views[name] for name in names])


def _described(lazies: Sequence[LazyTensor]) -> _Candidates:
    """Lazy tensors of the first one's source."""
    source = lazies[0].source
    columns = columns_of(lazies, [number for number, lazy in enumerate(lazies) if lazy.source is source])
    users: dict[tuple[str, int], int] = {}
    for lazy in lazies:
        for storage in {chunk.storage for chunk in lazy.chunks if type(chunk.storage) is Storage}:
            place = storage.key, storage.start
            users[place] = users.get(place, 0) + 1
    alone = np.zeros(len(columns), np.bool_)
    for row, (number, nbytes) in enumerate(zip(columns.numbers, columns.nbytes.tolist(), strict=True)):
        lazy = lazies[number]
        storage = lazy.chunks[0].storage
        alone[row] = storage.nbytes == nbytes and users[storage.key, storage.start] == 1 and lazy.traits.alias is None
    return _Candidates(source, columns, [lazies[number].dtype for number in columns.numbers], alone)


def _has_torch(dtype: DType) -> bool:
    """Whether elements are what torch has under this dtype; of quantised ones a scale is missing."""
    try:
        return dtype.kind != "quantized" and not dtype.packed and torch_dtype(dtype).itemsize * 8 == dtype.bits
    except Unsupported:
        return False


def _overlapping(columns: Columns) -> Bools:
    """Which rows have bytes that another has as well: names of one tensor."""
    found = np.zeros(len(columns), np.bool_)
    order = np.lexsort((columns.starts, columns.files))
    filled = order[columns.nbytes[order] > 0]
    for own in np.split(filled, np.flatnonzero(np.diff(columns.files[filled])) + 1):
        starts = columns.starts[own]
        reach = np.maximum.accumulate(starts + columns.nbytes[own])
        # Stretches that hang together, numbered from 1 on.
        stretches = np.cumsum(np.concatenate(([True], starts[1:] >= reach[:-1]))[: len(own)])
        found[own] = np.bincount(stretches)[stretches] > 1
    return found
