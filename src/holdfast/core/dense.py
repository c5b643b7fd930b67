"""`DenseRows`: where tensors lie whose bytes in a file are those of an array, as columns.

A tensor is dense where it is one piece of one file, without gaps, in C order, little-endian, a whole number of bytes an element.
Its elements stand for themselves: they are neither conjugated nor negated, and not on the meta device. Of such a tensor a start, a
length and a checksum say all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from holdfast.core.arrays import AnyDType, Ints
from holdfast.core.protocols import Source
from holdfast.core.runtime import gc_paused
from holdfast.core.tensor import ChunkSlice, LazyTensor
from holdfast.core.value import Value


class DenseRows(Value, frozen=True):
    """Dense tensors among some that are wanted, as columns of one length."""

    numbers: Sequence[int]  # The number of each among those that are wanted.
    dtypes: Sequence[AnyDType]
    shapes: Sequence[tuple[int, ...]]
    keys: Sequence[str]
    files: Ints  # The file of each, as a position in `keys`.
    starts: Ints
    nbytes: Ints
    crcs: Ints  # CRC-32 of just these bytes as the file records it; `NO_CRC` where it does not.

    def __len__(self) -> int:
        return len(self.numbers)

    def some(self, wanted: Ints) -> DenseRows:
        numbers, dtypes, shapes = self.numbers, self.dtypes, self.shapes
        chosen = wanted.tolist()
        return DenseRows(
            [numbers[at] for at in chosen], [dtypes[at] for at in chosen], [shapes[at] for at in chosen], self.keys,
            self.files[wanted], self.starts[wanted], self.nbytes[wanted], self.crcs[wanted],
        )  # fmt: skip


NO_ARRAY = np.zeros(0)

NO_ROWS = DenseRows((), (), (), (), *[np.zeros(0, np.int64)] * 4)


def dense_rows(tensors: Sequence[LazyTensor], numbers: Sequence[int]) -> DenseRows:
    """The dense ones among the tensors of these numbers, which are of one source."""
    found: list[int] = []
    keys: dict[str, int] = {}
    files: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    crcs: list[int] = []
    like: LazyTensor | None = None
    slice_of: ChunkSlice | None = None
    file = start = nbytes = crc = first = last = 0
    for number in numbers:
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
    dense = [tensors[number] for number in found]
    dtypes, shapes = [tensor.dtype.numpy for tensor in dense], [tensor.shape for tensor in dense]
    columns = [np.array(column, np.int64) for column in (files, starts, lengths, crcs)]
    return DenseRows(found, dtypes, shapes, list(keys), *columns)


def read_tensors(tensors: Sequence[LazyTensor]) -> list[np.ndarray]:
    """Fresh arrays with the elements of all tensors: in parallel, with neighbouring reads joined."""
    by: dict[Source, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by.setdefault(tensor.source, []).append(number)
    arrays = [NO_ARRAY] * len(tensors)
    for source, numbers in by.items():
        with gc_paused():
            dense = dense_rows(tensors, numbers)
            others = [*{*numbers}.difference(dense.numbers)] if len(dense) < len(numbers) else ()
            made = source.arrays(dense, others, tensors.__getitem__)
            for number, array in zip(chain(dense.numbers, others), made, strict=True):
                arrays[number] = array
    return arrays
