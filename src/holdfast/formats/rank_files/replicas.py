"""What several ranks have in common: it must be equal, or nobody could say which one is true.

Nothing is read when a folder is opened, and every replica is compared nevertheless:

1. Where each copy is all of its record, the archives know: records with the same checksum hold the same, and the first copy stands
   for all of them. `verify` holds every record against its checksum.
2. Where the checksums differ, the copies do. The tensor is listed, and reading any of it is refused, by its name.
3. Where they say nothing (views of a larger storage, a file without checksums), bytes that are read are read from every copy, and
   compared. Such a tensor lies in a store of its own (`Replicas`), over the files, so that every reader goes through it.

Bits are compared, so 0.0 is not -0.0, and a NaN is equal to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides, in_c_order
from holdfast.core.protocols import Request, Source, Stamp
from holdfast.core.tensor import PLAIN, LazyTensor
from holdfast.core.value import Value, replace
from holdfast.errors import ReplicasDiffer
from holdfast.stores.virtual import Virtual, VirtualFile, tensor_stamp

STEP_NBYTES = 1 << 20
"""Bytes that are compared at a time: what is read for that is thrown away."""


class Copy(Value, frozen=True):
    """What one rank has."""

    rank: int
    tensor: LazyTensor


class ReplicaStorage(Storage, frozen=True, kw_only=True, eq=False):
    """What several ranks have, under a key that is no file; `ranges` are those of the first."""

    originals: tuple[LazyTensor, ...]

    @property
    def ranges(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(found for storage in self.originals[0].storages for found in storage.ranges)

    @property
    def copies(self) -> int:
        return len(self.originals)


class Replicas(Virtual):
    """The files of a folder; and entries that are read from all copies at once."""

    def __init__(self, source: Source) -> None:
        super().__init__(over=source.store)
        self.source: Source = source.over(self)
        """Reads both; what is assembled has this one."""
        self._known: dict[tuple[object, ...], Storage] = {}
        self.unequal: dict[str, str] = {}
        """Tensors whose copies are known to differ, with what is known."""

    def chunks(self, name: str, copies: Sequence[Copy]) -> tuple[Chunk, ...]:
        """Where the elements of equal copies are read from, in the coordinates of the copies. There is at least one copy."""
        first = copies[0].tensor
        if len(copies) == 1 or not first.size:
            return tuple(chunk.over(chunk.storage.moved(self)) for chunk in first.chunks)
        sums = [_checksum(copy.tensor) for copy in copies]
        if None not in sums:
            other = next((copy for copy, summed in zip(copies, sums, strict=True) if summed != sums[0]), None)
            if other is None:
                return tuple(chunk.over(chunk.storage.moved(self)) for chunk in first.chunks)
            self.unequal[name] = _message(copies[0].rank, other.rank)
            return (self._entry(name, copies, partial(_refuse, name, self.unequal[name])),)
        return (self._entry(name, copies, partial(_read, name, tuple(copies))),)

    def _entry(self, name: str, copies: Sequence[Copy], read: partial[None]) -> Chunk:
        """All elements in C order, little-endian, as content that is made when it is read. Tied names have one."""
        first = copies[0].tensor
        # What other names share, they share here: equal chunks of equal ranks are one entry.
        place = (first.dtype, first.shape, *((copy.rank, copy.tensor.chunks) for copy in copies))
        storage = self._known.get(place)
        if storage is None:
            stamp = partial(_stamp, tuple(copies))
            key = self.put(
                VirtualFile(first.nbytes, read, stamp, first.nbytes * len(copies)), f"replicas/{len(self._entries)}: {name}"
            )
            label, originals = f"{len(copies)} replicas of {name}", tuple(copy.tensor for copy in copies)
            storage = self._known[place] = ReplicaStorage(key, 0, first.nbytes, label=label, home=self, originals=originals)
        return Chunk(Box.whole(first.shape), storage, 0, c_strides(first.shape, first.dtype.bits))


def _message(first: int, other: int) -> str:
    return (
        f"ranks {first} and {other} have different values for the same elements, so they are no replicas, and nobody can say which "
        "one is meant; leave the tensor out (drop=), or take it from one rank's file"
    )


def _checksum(tensor: LazyTensor) -> tuple[object, ...] | None:
    """What is equal for two tensors with equal bits that lie alike; None where it cannot be known without reading."""
    if len(tensor.chunks) != 1:
        return None
    (chunk,) = tensor.chunks
    storage = chunk.storage
    dense = chunk.box.count * tensor.dtype.bits == storage.nbytes * 8 and chunk.extent(tensor.dtype) == (0, storage.nbytes)
    if storage.crc32 is None or not dense or not in_c_order(chunk.shape, chunk.strides, tensor.dtype.bits):
        return None
    return storage.crc32, storage.nbytes, storage.byteorder


def _refuse(name: str, message: str, start: int, out: memoryview) -> None:
    raise ReplicasDiffer(message, tensor=name)


def _read(name: str, copies: Sequence[Copy], start: int, out: memoryview) -> None:
    """Fill memory from the first copy, and compare with all others."""
    target = np.frombuffer(out, np.uint8)
    for at in range(0, len(target), STEP_NBYTES):
        part = target[at : at + STEP_NBYTES]
        part[:] = _bytes_of(copies[0].tensor, start + at, len(part))
        for copy in copies[1:]:
            if not np.array_equal(part, _bytes_of(copy.tensor, start + at, len(part))):
                raise ReplicasDiffer(_message(copies[0].rank, copy.rank), tensor=name)


def _bytes_of(tensor: LazyTensor, start: int, nbytes: int) -> np.ndarray:
    """Bytes of a tensor as it would lie in C order, little-endian."""
    chunk = tensor.chunks[0]
    plain = len(tensor.chunks) == 1 and chunk.storage.byteorder == "little" and chunk.offset % 8 == 0
    if plain and in_c_order(chunk.shape, chunk.strides, tensor.dtype.bits):
        out = np.empty(nbytes, np.uint8)
        tensor.source.store.read(chunk.storage.key, chunk.storage.start + chunk.offset // 8 + start, out.data)
        return out
    rows = tensor if tensor.shape else tensor[None]
    row_nbytes = rows.nbytes // rows.shape[0]
    first = start // row_nbytes
    wanted = rows[first : -(-(start + nbytes) // row_nbytes)]
    array = np.empty(wanted.shape, wanted.dtype.numpy)
    # As it is stored: whether the elements stand for their conjugates is said of the whole.
    wanted.source.read([Request(replace(wanted, traits=PLAIN), array)])
    content = array.reshape(-1).view(np.uint8)
    return content[start - first * row_nbytes :][:nbytes]


def _stamp(copies: Sequence[Copy]) -> Stamp:
    return tuple(tensor_stamp(copy.tensor) for copy in copies)
