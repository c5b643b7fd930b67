"""Rows of elements that are cut into tensors.

Sharded optimizers lay their parameters flat, one behind the other, and keep the row in parts:

    parts      │ a a a a b b │ b b b c · · │      files of two ranks
    tensors      a = [0, 4)   b = [4, 9)   c = [9, 10)

A part of a tensor that is a run of its elements is a few boxes of it (`core/box.run_boxes`). Each run gets a storage of its own,
which is a range of the record that has it: tensors that only lie in one row share nothing, and tied ones still do.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from holdfast.core.box import run_boxes
from holdfast.core.chunk import Chunk, Storage, c_strides, in_c_order
from holdfast.core.dtype import DType
from holdfast.core.protocols import Source, Store
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.errors import MetadataError


class FlatRow:
    """Parts that follow each other: 1-D tensors of one dtype, each in C order in one place."""

    def __init__(self, parts: Sequence[LazyTensor]) -> None:
        for part in parts:
            _check_flat(part)
            if part.dtype is not parts[0].dtype:
                raise MetadataError("the parts of a row have several dtypes", expected=parts[0].dtype.name, found=part.dtype.name)
        self._parts = parts
        self._starts = [0, *accumulate(part.size for part in parts)]

    @property
    def dtype(self) -> DType:
        return self._parts[0].dtype

    @property
    def size(self) -> int:
        """Elements of all parts."""
        return self._starts[-1]

    @property
    def starts(self) -> Sequence[int]:
        """The first element of each part, and the one after the last part."""
        return self._starts

    def storages(self, start: int, stop: int, home: Store) -> Iterator[tuple[Storage, int]]:
        """The elements [start, stop), as storages of a home that hold nothing else, each with how many it holds."""
        at = bisect_right(self._starts, start) - 1
        width = self.dtype.bits // 8
        while start < stop:
            part, until = self._parts[at], min(stop, self._starts[at + 1])
            if until > start:
                chunk = part.chunks[0]
                first = chunk.offset // 8 + (start - self._starts[at]) * width
                yield _range(chunk.storage, first, (until - start) * width, home=home), until - start
            start, at = until, at + 1


class FlatSlice(Value, frozen=True):
    """Elements of a row."""

    row: FlatRow
    start: int
    stop: int


def cut(shape: tuple[int, ...], stretches: Iterable[FlatSlice], dtype: DType, *, source: Source) -> LazyTensor:
    """The tensor whose elements, in C order, are these stretches one after the other. It has no name yet."""
    chunks: list[Chunk] = []
    strides, at = c_strides(shape, dtype.bits), 0
    for stretch in stretches:
        for storage, count in stretch.row.storages(stretch.start, stretch.stop, source.store):
            for box in run_boxes(shape, at, at + count):
                begin = sum(n * stride for n, stride in zip(box.start, strides, strict=True))
                chunks.append(Chunk(box, storage, begin - at * dtype.bits, strides))
            at += count
    if at != math.prod(shape):
        raise ValueError(f"{at} elements do not make a tensor of {shape}")
    return LazyTensor("", dtype, shape, tuple(chunks), source)


def _check_flat(part: LazyTensor) -> None:
    traits = part.traits
    plain = part.ndim == 1 and not part.dtype.packed and part.dtype.bits % 8 == 0 and not (traits.conj or traits.neg or traits.meta)
    if plain and part.size:
        chunk = part.chunks[0]
        plain = len(part.chunks) == 1 and in_c_order(chunk.shape, chunk.strides, part.dtype.bits) and chunk.offset % 8 == 0
    if not plain:
        raise MetadataError("a part of a row is not one plain row of elements", found=(part.dtype.name, part.shape))


def _range(storage: Storage, start: int, nbytes: int, *, home: Store) -> Storage:
    """A part of a storage as one of its own. All of it has the checksum that its file has."""
    crc = storage.crc32 if start == 0 and nbytes == storage.nbytes else None
    place = storage.key, storage.start + start, nbytes
    # Not `replace`: with many ranks these are 100,000.
    return Storage(*place, storage.byteorder, crc, storage.location, storage.label, home=home)
