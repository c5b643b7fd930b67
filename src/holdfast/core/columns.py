"""`Columns`: where many ordinary tensors lie, as numbers in rows and not as objects.

A `LazyTensor` is four objects, and to read one asks for a dozen more. A bank of adapters or the state of an optimizer has a hundred
thousand tensors of a few bytes, of which nobody looks at one by itself: for those a start, a length and a checksum each will do.

*Ordinary* is said in one place a producer: here of lazy tensors (`columns_of`), in a format of what its header says. It means

1. one piece of one file, without gaps, in C order, little-endian, a whole number of bytes an element: the bytes in the file are
   those that the array shall have;
2. elements that stand for themselves: neither conjugated nor negated, and not on the meta device;
3. no more elements than were stored, so that no limit on expanded views can matter.

Whatever is not ordinary is left out, and goes the way of `Request`s. So does everything where a read fails or a checksum is
another: that way says which tensor it was, and how. Nothing here raises what it would not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from holdfast.core.arrays import AnyDType, Ints
from holdfast.core.dtype import DType
from holdfast.core.protocols import Outlined, Request, Source, by_source
from holdfast.core.runtime import resting_collector
from holdfast.core.tensor import ChunkSlice, LazyTensor
from holdfast.core.value import Value

FEW = 16
"""Fewer tensors are read as objects: to make rows takes as long as they would."""


class Columns(Value, frozen=True):
    """Ordinary tensors among some that were asked for. All rows are of one length."""

    numbers: Sequence[int]
    """Which of those that were asked for it is."""
    dtypes: Sequence[AnyDType]
    """Of the array."""
    shapes: Sequence[tuple[int, ...]]
    keys: Sequence[str]
    """The files."""
    files: Ints
    """The file of each, as a position in `keys`."""
    starts: Ints
    """First byte in the file."""
    nbytes: Ints
    crcs: Ints
    """CRC-32 of just these bytes as the file records it; `NO_CRC` where it does not."""

    def __len__(self) -> int:
        return len(self.numbers)


def joined_columns(parts: Sequence[tuple[Sequence[int], Columns]]) -> Columns:
    """Columns of other files each as one, in the order of the numbers that are given with them."""
    numbers = np.array([number for given, _ in parts for number in given], np.int64)
    order = np.argsort(numbers, kind="stable")
    rows = order.tolist()
    dtypes = [dtype for _, part in parts for dtype in part.dtypes]
    shapes = [shape for _, part in parts for shape in part.shapes]
    keys: list[str] = []
    places = [np.zeros((4, 0), np.int64)]
    for _, part in parts:
        places.append(np.stack((part.files + len(keys), part.starts, part.nbytes, part.crcs)))
        keys += part.keys
    columns = np.concatenate(places, axis=1)[:, order]
    return Columns(numbers[order].tolist(), [dtypes[row] for row in rows], [shapes[row] for row in rows], keys, *columns)


@runtime_checkable
class Columned(Protocol):
    """What a mapping of lazy tensors may offer besides: where those of some names lie, without making them."""

    def columns(self, names: Sequence[str]) -> tuple[Source, Columns] | None:
        """The ordinary ones among these, and what reads them; None where a name is not there."""


@runtime_checkable
class ColumnSource(Protocol):
    """What a source may offer besides: to make arrays of columns."""

    def read_columns(self, columns: Columns) -> Mapping[int, np.ndarray]:
        """Fresh arrays, by number, of as many as it likes; none at all where one cannot be read or is not as it was written."""


def columns_of(tensors: Sequence[LazyTensor], numbers: Sequence[int]) -> Columns:
    """The ordinary ones among the tensors of these numbers, which are of one source."""
    found: list[int] = []
    keys: dict[str, int] = {}
    files: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    crcs: list[int] = []
    like: LazyTensor | None = None
    slice_of: ChunkSlice | None = None
    file = start = nbytes = crc = first = last = 0
    for number in numbers if numbers and ordinary_limits(tensors[numbers[0]].source) else ():
        tensor = tensors[number]
        position = tensor.position
        if (
            like is not None
            and slice_of is not None
            and isinstance(position, ChunkSlice)
            and position.chunk is slice_of.chunk
            and tensor.shape == like.shape
            and position.strides == slice_of.strides
            and tensor.dtype is like.dtype
            and tensor.traits is like.traits
        ):
            # Rows of one tensor come by the ten thousand. Of a slice like the one before only the place is another.
            bits = position.offset - slice_of.offset
            at = start + (bits >> 3)
            if bits & 7 or not first <= at <= last:
                continue
        else:
            place = tensor.file_range()
            like = None
            if place is None:
                continue
            key, at, nbytes, crc = place
            file = keys.setdefault(key, len(keys))
            if isinstance(position, ChunkSlice):
                like, slice_of, start, first = tensor, position, at, position.chunk.storage.start
                last = first + position.chunk.storage.nbytes - nbytes
        found.append(number)
        files.append(file)
        starts.append(at)
        lengths.append(nbytes)
        crcs.append(crc)
    ordinary = [tensors[number] for number in found]
    dtypes, shapes = [tensor.dtype.numpy for tensor in ordinary], [tensor.shape for tensor in ordinary]
    columns = [np.array(column, np.int64) for column in (files, starts, lengths, crcs)]
    return Columns(found, dtypes, shapes, list(keys), *columns)


def columns_in(tensors: Mapping[str, LazyTensor], names: Sequence[str]) -> tuple[Source, Columns] | None:
    """The ordinary ones of these names, and what reads them; None where the mapping has to make tensors to tell."""
    if isinstance(tensors, Columned):
        found = tensors.columns(names)
    elif type(tensors) is dict:
        chosen = [tensors[name] for name in names]
        sources = {id(tensor.source): tensor.source for tensor in chosen}
        found = (*sources.values(), columns_of(chosen, range(len(chosen)))) if len(sources) == 1 else None
    else:
        found = None
    return found if found is not None and ordinary_limits(found[0]) else None


def outlines(tensors: Mapping[str, LazyTensor], names: Sequence[str]) -> Iterable[tuple[DType, tuple[int, ...]]]:
    """The dtypes and shapes of tensors of these names."""
    if isinstance(tensors, Outlined):
        return map(tensors.outline, names)
    return ((tensor.dtype, tensor.shape) for tensor in map(tensors.__getitem__, names))


def ordinary_limits(source: Source) -> bool:
    """Whether what was stored may be read as it is."""
    return source.limits.expansion >= 1


def read_tensors(tensors: Sequence[LazyTensor]) -> list[np.ndarray]:
    """Fresh arrays with the elements of all tensors: in parallel, with neighbouring reads joined."""
    arrays: dict[int, np.ndarray] = {}
    if len(tensors) >= FEW:
        by: dict[Source, list[int]] = {}
        for number, tensor in enumerate(tensors):
            by.setdefault(tensor.source, []).append(number)
        for source, numbers in by.items():
            if len(numbers) >= FEW and isinstance(source, ColumnSource):
                with resting_collector():
                    arrays |= source.read_columns(columns_of(tensors, numbers))
    return _with_others(tensors, arrays)


def read_mapping(tensors: Mapping[str, LazyTensor], names: Sequence[str]) -> list[np.ndarray] | None:
    """The same of names in a mapping that knows where its tensors lie; None where it does not, or where not all are ordinary."""
    found = tensors.columns(names) if len(names) >= FEW and isinstance(tensors, Columned) else None
    if found is None or not isinstance(found[0], ColumnSource) or not ordinary_limits(found[0]):
        return None
    with resting_collector():
        arrays = found[0].read_columns(found[1])
    if not arrays:
        return None
    if len(arrays) == len(names):
        return [arrays[number] for number in range(len(names))]
    others = {number: tensors[name] for number, name in enumerate(names) if number not in arrays}
    read = iter(_with_others(list(others.values()), {}))
    return [next(read) if number in others else arrays[number] for number in range(len(names))]


def _with_others(tensors: Sequence[LazyTensor], arrays: dict[int, np.ndarray]) -> list[np.ndarray]:
    """All arrays in order: those that are there, and the others read one object each."""
    others = [number for number in range(len(tensors)) if number not in arrays]
    for number in others:
        arrays[number] = tensors[number].empty()
    for source, requests in by_source(Request(tensors[number], arrays[number]) for number in others).items():
        source.read(requests)
    return [arrays[number] for number in range(len(tensors))]
