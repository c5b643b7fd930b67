"""Tensors that are packed when they are written: their marks, values and starts as lazy tensors.

As in `computed.py`, these are ordinary tensors over storages that exist nowhere: reading a range of one reads the groups behind it
and packs them, so that writing them takes no more memory than writing anything else. How many values each group has is known
before, because a plan knows every length; a group that is not what it was when it was counted is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from holdfast.core.chunk import Storage
from holdfast.core.crc import Sums, crc32
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.sparse.elements import Elements, element_type
from holdfast.core.sparse.encoding import Encoding, spread, where_total
from holdfast.core.sparse.storage import SparseParts
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.blocks import contiguous_bytes, mapped_bytes
from holdfast.engine.computed import read_flat
from holdfast.engine.source import Sourced
from holdfast.engine.threads import computing
from holdfast.errors import StoreError, Unsupported
from holdfast.stores.virtual import VirtualFile, tensor_stamp

RUN_NBYTES = 1 << 19
"""Dense bytes that are read and packed at once, where groups are smaller than that: what a core's cache holds, in calls long enough
that threads do not wait for each other's turn at the interpreter."""


class Counted(Value, frozen=True):
    """What is known of a tensor that is to be packed."""

    tensor: LazyTensor
    encoding: Encoding
    starts: np.ndarray
    """Values before each group, and in all."""
    crcs: np.ndarray
    """CRC-32 of the dense bytes of each group."""

    @property
    def width(self) -> int:
        return self.tensor.dtype.bits // 8

    def crc32(self) -> int:
        """Of all dense bytes."""
        sums = Sums()
        for group, crc in enumerate(self.crcs.tolist()):
            sums.note(group * self.encoding.group * self.width, spread(self.encoding, group) * self.width, crc)
        return sums.crc32()


def read_elements(tensor: LazyTensor, start: int, stop: int) -> Elements:
    """The elements [start, stop) of a tensor in C order as patterns of bits; over its own memory where it is in this process."""
    width = tensor.dtype.bits // 8
    memory = mapped_bytes(tensor)
    if memory is not None:
        return np.frombuffer(memory[start * width : stop * width], element_type(width))
    place = contiguous_bytes(tensor)
    if place is None:
        return read_flat(tensor, start, stop).view(element_type(width))
    out = np.empty(stop - start, element_type(width))
    tensor.source.store.read(place[0], place[1] + start * width, out.view(np.uint8).data)
    return out


def groups_of(tensor: LazyTensor, encoding: Encoding, first: int, last: int) -> Iterator[tuple[int, Elements]]:
    """The dense elements of groups [first, last), several read at once."""
    for begin, dense in _runs(tensor, encoding, first, last=last):
        for at, start in enumerate(range(0, len(dense), encoding.group)):
            yield begin + at, dense[start : start + encoding.group]


def _runs(tensor: LazyTensor, encoding: Encoding, first: int, *, last: int) -> Iterator[tuple[int, Elements]]:
    """The same, in runs of groups: the first of each, and their elements."""
    run = run_length(tensor, encoding)
    for begin in range(first, last, run):
        end = min((begin + run) * encoding.group, last * encoding.group, encoding.count)
        yield begin, read_elements(tensor, begin * encoding.group, end)


def run_length(tensor: LazyTensor, encoding: Encoding) -> int:
    """Groups that are read at once."""
    return max(RUN_NBYTES // tensor.dtype.nbytes(encoding.group), 1)


ReadPart = Callable[[Counted, int, memoryview], None]


class Packed(Sourced):
    """A store of packed parts, and the source that reads them."""

    def __init__(self) -> None:
        super().__init__("<packed>")
        self._count = 0

    def parts(self, counted: Counted) -> SparseParts:
        """What is written in the place of a tensor."""
        encoding, count, crc = counted.encoding, int(counted.starts[-1]), counted.crc32()
        # With the checksum, so that a conversion that is resumed does not take a part of other elements for its own.
        number, self._count = f"{self._count} {crc:08x}", self._count + 1
        values = self._part(f"{number} values", counted, counted.tensor.dtype, count, self._read_values)
        where = self._part(f"{number} where", counted, _plain("uint8"), where_total(encoding), self._read_where)
        starts = self._part(f"{number} starts", counted, _plain("uint64"), len(counted.starts), _read_starts)
        return SparseParts(encoding, crc, values, where, starts if encoding.counted else None)

    def _part(self, key: str, counted: Counted, dtype: DType, count: int, read: ReadPart) -> LazyTensor:
        nbytes = dtype.nbytes(count)
        self.put(VirtualFile(nbytes, partial(read, counted), stamp=partial(tensor_stamp, counted.tensor)), key)
        storage = Storage(key, 0, nbytes, label=counted.tensor.name, home=self)
        return LazyTensor.contiguous(counted.tensor.name, dtype, (count,), storage, self.source)

    def _read_values(self, counted: Counted, start: int, out: memoryview) -> None:
        stop, width = start + out.nbytes, counted.width
        bounds = counted.starts * np.uint64(width)
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        last = int(np.searchsorted(bounds, stop, side="left"))
        for group, dense in _runs(counted.tensor, counted.encoding, first, last=last):
            with computing():
                _check(counted, group, dense)
                _overlap(counted.encoding.take(dense).view(np.uint8), int(bounds[group]), start, out)

    def _read_where(self, counted: Counted, start: int, out: memoryview) -> None:
        encoding = counted.encoding
        each = encoding.where_nbytes(encoding.group)
        first, last = start // each, -(-(start + out.nbytes) // each)
        # Where the marks of a group fill bytes, those of several are made at once.
        filled = encoding.where_nbytes(8 * encoding.group) == 8 * each
        for group, dense in _runs(counted.tensor, encoding, first, last=last):
            unit = len(dense) if filled else encoding.group
            with computing():
                _check(counted, group, dense)
                for at, begin in enumerate(range(0, len(dense), unit), group):
                    _overlap(encoding.mark(dense[begin : begin + unit]), at * each, start, out)


def _read_starts(counted: Counted, start: int, out: memoryview) -> None:
    out[:] = counted.starts.view(np.uint8).data[start : start + out.nbytes]


def _overlap(made: np.ndarray, at: int, start: int, out: memoryview) -> None:
    """Copy what `made`, which begins at byte `at` of a part, has of the range that `out` is from `start` on."""
    low, high = max(at, start), min(at + made.nbytes, start + out.nbytes)
    if low < high:
        out[low - start : high - start] = made[low - at : high - at].data


def _check(counted: Counted, first: int, dense: Elements) -> None:
    """Whether the elements of groups, from `first` on, are those that were counted."""
    size = counted.encoding.group
    for group, at in enumerate(range(0, len(dense), size), first):
        if crc32(dense[at : at + size].view(np.uint8).data) != int(counted.crcs[group]):
            raise StoreError(
                "the tensor changed while it was saved: it is not what it was when its zeros were counted; save when nobody writes "
                "to it",
                tensor=counted.tensor.name,
            )


def _plain(name: str) -> DType:
    dtype = DTYPES.name(name)
    if dtype is None:
        raise Unsupported(f"the table of dtypes has no {name}")
    return dtype
