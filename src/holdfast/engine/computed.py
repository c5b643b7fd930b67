"""Tensors whose bytes are computed when they are read: a cast, a repacking, an assembly of pieces.

A computed tensor is an ordinary lazy tensor over a storage that exists nowhere. Reading a range of that storage reads the
elements behind it from the original, applies the function, and gives the bytes of the result. So everything that moves tensors
(slices, digests, saves, under any memory budget) works on computed ones without knowing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DType
from holdfast.core.protocols import Request
from holdfast.core.tensor import LazyTensor
from holdfast.engine.source import OpenSource
from holdfast.errors import StoreError, Unsupported

__all__ = ["Computed", "flat_boxes", "read_flat"]

Compute = Callable[[np.ndarray], np.ndarray]


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """The boxes, in order, that together are the elements [start, stop) of an array in C order.

    >>> list(flat_boxes((3, 4), 2, 9))
    [(slice(0, 1, None), slice(2, 4, None)), (slice(1, 2, None), slice(0, 4, None)), (slice(2, 3, None), slice(0, 1, None))]
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        at = start // row
        yield from (_in_row(at, rest) for rest in flat_boxes(shape[1:], start - at * row, stop - at * row))
        return
    if start < first * row:
        yield from (_in_row(first - 1, rest) for rest in flat_boxes(shape[1:], start - (first - 1) * row, row))
    if first < last:
        yield (slice(first, last), *(slice(0, n) for n in shape[1:]))
    if last * row < stop:
        yield from (_in_row(last, rest) for rest in flat_boxes(shape[1:], 0, stop - last * row))


def _in_row(at: int, rest: tuple[slice, ...]) -> tuple[slice, ...]:
    return (slice(at, at + 1), *rest)


def read_flat(tensor: LazyTensor, start: int, stop: int) -> np.ndarray:
    """The elements [start, stop) of a tensor in C order, as a 1-D array."""
    out = np.empty(stop - start, tensor.dtype.numpy)
    requests, at = [], 0
    for box in flat_boxes(tensor.shape, start, stop):
        part = tensor[box] if box else tensor
        requests.append(Request(part, out[at : at + part.size].reshape(part.shape)))
        at += part.size
    tensor.source.read(requests)
    return out


class Computed:
    """A store of computed tensors, and the source that reads them."""

    name = "<computed>"

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[LazyTensor, DType, Compute]] = {}
        self._source = OpenSource(self, threads=1)

    def tensor(self, original: LazyTensor, dtype: DType, compute: Compute) -> LazyTensor:
        """The tensor of the same shape whose elements are `compute` of the original's. `compute` works element by element."""
        if dtype.packed:
            raise Unsupported(f"elements of {dtype} share bytes and cannot be computed one by one", tensor=original.name)
        key = str(len(self._tensors))
        self._tensors[key] = (original, dtype, compute)
        storage = Storage(key, 0, dtype.nbytes(original.size), label=original.name)
        made = LazyTensor.contiguous(original.name, dtype, original.shape, storage, self._source)
        # The flags for conjugated and negated elements are resolved by reading the original.
        return replace(made, traits=replace(original.traits, conj=False, neg=False))

    def original(self, key: str) -> LazyTensor:
        """What a computed tensor is computed from."""
        return self._get(key)[0]

    def list(self) -> Sequence[str]:
        return sorted(self._tensors)

    def size(self, key: str) -> int:
        tensor, dtype, _ = self._get(key)
        return dtype.nbytes(tensor.size)

    def read(self, key: str, start: int, out: memoryview) -> None:
        tensor, dtype, compute = self._get(key)
        width = dtype.bits // 8
        first, last = start // width, -(-(start + out.nbytes) // width)
        made = np.ascontiguousarray(compute(read_flat(tensor, first, last)), dtype.numpy)
        begin = start - first * width
        out[:] = made.view(np.uint8).data[begin : begin + out.nbytes]

    def map(self, key: str) -> memoryview | None:
        return None

    def close(self) -> None:
        self._tensors.clear()

    def _get(self, key: str) -> tuple[LazyTensor, DType, Compute]:
        if key not in self._tensors:
            raise StoreError(f"there is no computed tensor {key!r}")
        return self._tensors[key]
