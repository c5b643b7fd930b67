"""Which bytes go through one block of page-locked memory: ranges of files in columns, and the tensors that they are for.

    file     │ h │ a a a a a a │ b b │ c c c c c c c c c c c c │ gap │ d d │
    block 0      │ a a a a a a │ b b │ c c c c │                        one read
    block 1                                    │ c c c c c c c c │ gap │ d d │

1. A row is a range of a file and a destination: a fresh tensor of a kind, a tensor that is there and takes the bytes as they are,
   or one that takes elements by a copy of its own (another dtype or order, conjugated, negated).
2. Rows are sorted by their place in the file and joined (engine/coalesce.py: small gaps are read as well, because a read costs more
   than their bytes), and laid into blocks one behind the other. A task is numbers alone: readers make the next one themselves.
3. Short rows are never cut. A long one may be cut anywhere, or between elements where these are copied as such.
4. Elements that do not lie in one piece in the file (columns, another byte order, packed types) are read by the engine, a block of
   them at a time.
5. The first blocks and the last ones are not full (`BlockSizes`): the bus has something to do while most readers read, and to the
   end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from msgspec import Struct, field

from holdfast.core.arrays import Bools, Ints
from holdfast.core.chunk import Storage
from holdfast.core.protocols import Request, Source
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.core.value import Value
from holdfast.engine.blocks import find_contiguous_bytes
from holdfast.engine.checksums import StorageChecks, build_damage_error, find_whole_storages
from holdfast.engine.coalesce import PAGE_LOCKED, Ranges, coalesce
from holdfast.engine.source import OpenSource
from holdfast.errors import Corrupted
from holdfast.torch.tensors.from_lazy import torch_dtype
from holdfast.torch.tensors.scratch import Fill, ScratchPiece, flat, in_file_order, parts_of

ALIGNMENT = 64
"""A read begins in its block where it begins in the file, up to a multiple of this: what was aligned there is aligned here."""

SHORT_NBYTES = 256 << 10
"""Rows up to this length cross the bus together with their neighbours."""

TOGETHER = 32
"""Fewer short neighbours than this are copied one by one. To start such a copy takes 3 µs without the interpreter lock; to spread
what has crossed the bus together takes 100 µs with it."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by their width."""


class ByteKind(NamedTuple):
    """What many tensors have in common, and as what their bytes are copied on a device.

    Bytes are copied as integers, which any bits survive: torch might take elements for numbers on the way, and change those that
    are none. Where integers are as wide as the elements they have the shape of the tensor as well, so that nothing is left to be
    done with a copy but to name its dtype.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    integer: torch.dtype
    counts: tuple[int, ...]
    """The shape of so many integers: that of the tensor where they are as wide as its elements."""

    @classmethod
    def of(cls, dtype: torch.dtype, shape: tuple[int, ...], *, unaligned: bool = False) -> ByteKind:
        """Tensors of a dtype and a shape. `unaligned`: what does not begin at a multiple of its width is copied byte by byte."""
        width = 1 if unaligned else min(dtype.itemsize, 8)
        whole = shape if width == dtype.itemsize else (math.prod(shape) * dtype.itemsize // width,)
        return cls(dtype, shape, INTEGERS[width], whole)


class Conversion(Value, frozen=True, eq=False):
    """A tensor that takes the elements of a range by a copy of its own."""

    dtype: torch.dtype
    """The dtype of the elements in the file."""
    target: torch.Tensor
    """Flat, or of any shape where the range is never cut."""
    conj: bool = False
    neg: bool = False
    storage: Storage | None = None
    """The storage of which the range is a part: all parts together are compared with its checksum."""

    @property
    def grain(self) -> int:
        """The range is cut at multiples of this many bytes alone; 0 where it is not cut at all."""
        return self.dtype.itemsize if self.target.ndim == 1 else 0


Destination = ByteKind | torch.Tensor | Conversion
"""What a row becomes: a fresh tensor, the content of a contiguous one, or elements of another."""


def strided_nbytes(piece: ScratchPiece) -> int:
    """Bytes in a block of elements that the engine reads, because they do not lie in one piece. A packed element takes one byte."""
    return piece.lazy.size * piece.lazy.dtype.numpy.itemsize


class DeviceRows(Struct, eq=False):
    """Ranges of the files of one source that go to one device."""

    source: Source
    device: torch.device
    ranges: Ranges
    crcs: Ints
    """CRC-32 of each range as its file records it, or `NO_CRC`."""
    destinations: Sequence[Destination]
    name: Callable[[int], str]
    """The name of a row in messages, by its number."""
    damaged: Callable[[int, int], Corrupted]
    """The error for a row that has another checksum: its number, and the checksum that was found."""
    strided: Sequence[ScratchPiece] = ()
    checks: StorageChecks = field(default_factory=lambda: StorageChecks({}))
    """The checksums of storages that come in several ranges."""
    tensors: list[torch.Tensor | None] = field(default_factory=list)
    """The tensor that each row has become, where that is one of its own."""

    @property
    def nbytes(self) -> int:
        return int(self.ranges.nbytes.sum()) + sum(map(strided_nbytes, self.strided))

    @property
    def short_nbytes(self) -> int:
        return int(self.ranges.nbytes[self.ranges.nbytes <= SHORT_NBYTES].sum())


def rows_of(
    source: Source, device: torch.device, fills: Sequence[Fill], *, most: int
) -> DeviceRows:
    """Fills of one source and device as rows, of which those that are not flat fit into `most` bytes."""
    verify = isinstance(source, OpenSource) and source.verify
    places: list[tuple[str, int, int]] = []
    crcs: list[int] = []
    destinations: list[Destination] = []
    owners: list[tuple[Storage, str]] = []
    strided: list[ScratchPiece] = []
    in_pieces: dict[Storage, str] = {}
    for one in fills:
        apart = False
        for piece in _pieces(one, most):
            if isinstance(piece, ScratchPiece):
                strided.append(piece)
                apart = True
                continue
            storage, start, nbytes, destination = piece
            crc = storage.crc32 if verify and nbytes == storage.nbytes else None
            if isinstance(destination, Conversion) and destination.storage is not None:
                apart, crc = True, None
            places.append((storage.key, start, nbytes))
            crcs.append(NO_CRC if crc is None else crc)
            destinations.append(destination)
            owners.append((storage, one.lazy.name))
        if apart and verify:
            in_pieces |= find_whole_storages([Request(one.lazy, NO_ARRAY)])

    def damaged(number: int, found: int) -> Corrupted:
        return build_damage_error(*owners[number], found)

    columns = Ranges.from_tuples(places), np.array(crcs, np.int64), destinations
    return DeviceRows(
        source,
        device,
        *columns,
        lambda number: owners[number][1],
        damaged,
        strided,
        StorageChecks(in_pieces),
    )


NO_ARRAY = np.empty(0, np.uint8)

Piece = tuple[Storage, int, int, Destination]
"""A storage, the first byte in its file, how many bytes, and what they become."""


def _pieces(one: Fill, most: int) -> Iterator[Piece | ScratchPiece]:
    lazy, target = one.lazy, one.target
    if _in_c_order(lazy, target):
        # Most tensors lie in the file as in memory: no need to look at them dimension by dimension.
        yield _flat(lazy, target)
        return
    for chunk in lazy.chunks:
        moved, part = in_file_order(one, chunk)
        if _in_c_order(moved, part):
            yield _flat(moved, part, conj=lazy.traits.conj, neg=lazy.traits.neg)
        else:
            yield from _boxes(
                Fill(
                    LazyTensor(
                        lazy.name, lazy.dtype, lazy.shape, (chunk,), lazy.source, lazy.traits
                    ),
                    target,
                ),
                most,
            )


def _in_c_order(lazy: LazyTensor, target: torch.Tensor) -> bool:
    if lazy.dtype.packed or find_contiguous_bytes(lazy) is None:
        return False
    return target.is_contiguous() and not (target.is_conj() or target.is_neg())


def _flat(
    lazy: LazyTensor, target: torch.Tensor, *, conj: bool = False, neg: bool = False
) -> Piece:
    dtype = torch_dtype(lazy.dtype)
    (chunk,) = lazy.chunks
    storage = chunk.storage
    row: Destination = target.detach()
    if target.dtype != dtype or conj or neg:
        row = Conversion(dtype, flat(target.detach()), conj, neg)
    return storage, storage.start + chunk.offset // 8, lazy.nbytes, row


def _boxes(one: Fill, most: int) -> Iterator[Piece | ScratchPiece]:
    for part in parts_of(one, most):
        lazy = part.lazy
        place = None if lazy.dtype.packed else find_contiguous_bytes(lazy)
        if place is None:
            yield part
        else:
            storage, dtype = lazy.chunks[0].storage, torch_dtype(lazy.dtype)
            # Also where it is all of the storage: what becomes of the others is noted in the same place.
            conversion = Conversion(dtype, part.target.detach(), part.conj, part.neg, storage)
            yield storage, place[1], lazy.nbytes, conversion


class RowRun(NamedTuple):
    """Rows of a read that follow each other: whole ones, or a part of one."""

    first: int
    last: int
    """Positions of the rows among those of the plan."""
    skip: int
    """Bytes of the first row that went through blocks before."""
    nbytes: int
    """Bytes of the row that are taken here, where it is one."""
    at: int
    """Where the first row begins in the block."""


class JoinedRead(Struct, eq=False):
    """A range of a file that is read at once, and the rows in it."""

    key: str
    start: int
    stop: int
    at: int
    row_runs: list[RowRun]


class BlockTask(Struct, eq=False):
    """What one block is filled with at a time."""

    plan: RowPlan
    reads: list[JoinedRead] = field(default_factory=list)
    strided: list[tuple[ScratchPiece, int]] = field(default_factory=list)
    nbytes: int = 0
    read_nbytes: int = 0
    """Bytes that were read for them."""


LEAST_NBYTES = 2 << 20
"""The least that a block takes when there is much to read."""


class BlockSizes:
    """How many bytes the next block takes.

    Readers that begin together end together: the bus waits for the first of them, all blocks are full at once, and at the end one
    of them still reads while the others are done. So each of the first has a little more than the one before, and of what is left
    nobody takes more than their share.

    >>> block_sizes = BlockSizes(100 << 20, 16 << 20, readers=4)
    >>> [block_sizes.take() >> 20 for _ in range(12)]
    [4, 8, 12, 16, 15, 11, 8, 6, 4, 3, 2, 2]
    """

    def __init__(self, total: int, most: int, *, readers: int = 1) -> None:
        self._left, self._most, self._readers = total, most, readers
        self._taken = 0

    def take(self) -> int:
        """The bytes of the next block."""
        most = self._most
        if self._readers > 1:
            self._taken += 1
            most = min(most * self._taken // self._readers, self._left // self._readers)
            most = min(max(most, LEAST_NBYTES), self._most)
        self._left = max(self._left - most, 0)
        return most


class RowPlan:
    """The rows of a device in the order of the files, and the tasks that bring them there."""

    def __init__(self, rows: DeviceRows, most: int, *, readers: int = 1) -> None:
        """`most` bytes go into a block, and so many readers fill them."""
        ranges = rows.ranges
        self.rows = rows
        self.order = np.lexsort((ranges.starts, ranges.files))
        """The number of the row at each position."""
        # What is empty is not read; it is of no position.
        self.order = self.order[ranges.nbytes[self.order] > 0]
        self.starts, self.nbytes, self.crcs = (
            ranges.starts[self.order],
            ranges.nbytes[self.order],
            rows.crcs[self.order],
        )
        self._files, self._stops = ranges.files[self.order], self.starts + self.nbytes
        self.destinations = [rows.destinations[number] for number in self.order.tolist()]
        self.straight = _few_together(self.nbytes > min(SHORT_NBYTES, most))
        """Which rows are copied from a block straight to their places."""
        grains = self.straight.astype(np.int64)
        self.odd: dict[int, Conversion] = {}
        for position, one in enumerate(self.destinations):
            if isinstance(one, Conversion):
                self.odd[position], grains[position] = one, one.grain
        self.straight[list(self.odd)] = False
        self._grains: list[int] = grains.tolist()
        """A row is cut at multiples of so many bytes alone; 0 where it is not cut at all."""
        self._most, self._block_sizes = (
            most,
            BlockSizes(int(self.nbytes.sum()), most, readers=readers),
        )

    def tasks(self) -> Iterator[BlockTask]:
        """The tasks, one block each, one after the other."""
        yield from _Layout(self, self._most, self._block_sizes).tasks(self._joined())
        yield from self._strided_tasks()

    def name(self, position: int) -> str:
        return self.rows.name(int(self.order[position]))

    def cut(self, position: int, nbytes: int) -> int:
        """How many of so many bytes of a row go into a block; 0 where it has to be whole."""
        grain = self._grains[position]
        return nbytes // grain * grain if grain else 0

    def fitting(self, first: int, last: int, limit: int) -> int:
        """The position behind those from `first` on that end at byte `limit` of the file or before."""
        if self._stops.item(first) > limit:
            return first
        last = first + int(np.searchsorted(self.starts[first:last], limit))
        behind = np.flatnonzero(self._stops[first:last] > limit)
        return first + behind.item(0) if len(behind) else last

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Where rows end in their file, and how many bytes they have."""
        return int(self._stops[first:last].max()), int(self.nbytes[first:last].sum())

    def _joined(self) -> Iterator[tuple[str, int, int]]:
        """Rows that are read together: their file, and positions of the first and behind the last."""
        for low, high in pairwise(
            [0, *(np.flatnonzero(np.diff(self._files)) + 1).tolist(), len(self.order)]
        ):
            if low < high:
                key = self.rows.ranges.keys[self._files.item(low)]
                heads = coalesce(self.starts[low:high], self._stops[low:high], PAGE_LOCKED) + low
                for first, last in pairwise([*heads.tolist(), high]):
                    yield key, first, last

    def _strided_tasks(self) -> Iterator[BlockTask]:
        task, end = BlockTask(self), 0
        for piece in self.rows.strided:
            if task.strided and end + strided_nbytes(piece) > self._most:
                yield task
                task, end = BlockTask(self), 0
            task.strided.append((piece, end))
            task.nbytes += piece.lazy.nbytes
            end = _aligned(end + strided_nbytes(piece))
        if task.strided:
            yield task


def _few_together(long: Bools) -> Bools:
    """Which rows are copied by themselves: long ones, and short ones with fewer than `TOGETHER` short neighbours.

    >>> _few_together(np.array([True, False, True])).tolist(), _few_together(np.zeros(TOGETHER, np.bool_)).any().item()
    ([True, True, True], False)
    """
    edges = np.flatnonzero(np.diff(long, prepend=True, append=True))
    lengths = edges[1::2] - edges[::2]
    straight = long.copy()
    straight[~long] = np.repeat(lengths < TOGETHER, lengths)
    return straight


class _Layout:
    """Lays rows into blocks."""

    def __init__(self, plan: RowPlan, most: int, block_sizes: BlockSizes) -> None:
        self._plan, self._most, self._block_sizes = plan, most, block_sizes
        self._task, self._end, self._block_nbytes = BlockTask(plan), 0, block_sizes.take()

    def tasks(self, joined: Iterable[tuple[str, int, int]]) -> Iterator[BlockTask]:
        for key, first, last in joined:
            yield from self._lay_out_rows(key, first, last)
        if self._task.reads:
            yield self._task

    def _lay_out_rows(self, key: str, first: int, last: int) -> Iterator[BlockTask]:
        """Lay rows that are read together: one read, or several where blocks end."""
        plan, read, skip = self._plan, None, 0
        while first < last:
            begin = plan.starts.item(first) + skip
            whole = not plan.cut(first, self._most)
            # What began before the read did, which is cut, is read again.
            own = None if read is None or begin < read.start else read
            at = (
                _aligned(self._end) + begin % ALIGNMENT
                if own is None
                else own.at + begin - own.start
            )
            most = self._block_nbytes
            if not self._task.reads:
                # What must be whole may take a block for itself; beside what fills a block nothing has to be aligned.
                most = self._most if whole else most
                at = at if at + plan.nbytes.item(first) - skip <= most else 0
            room = most - at
            end = plan.fitting(first, last, begin + room)
            if end > first:
                row_run = RowRun(
                    first, end if not skip else first + 1, skip, plan.nbytes.item(first) - skip, at
                )
                read = self._take(key, own, row_run, begin)
                first, skip = row_run.last, 0
                continue
            taken = plan.cut(first, room) if room > 0 else 0
            if taken > 0:
                self._take(key, own, RowRun(first, first + 1, skip, taken, at), begin)
                skip += taken
            if self._task.reads:
                yield self._task
            self._task, self._end, self._block_nbytes, read = (
                BlockTask(plan),
                0,
                self._block_sizes.take(),
                None,
            )

    def _take(self, key: str, read: JoinedRead | None, row_run: RowRun, begin: int) -> JoinedRead:
        """Have a task read a run of rows that begins at byte `begin` of the file, with others or by itself."""
        stop, nbytes = begin + row_run.nbytes, row_run.nbytes
        if row_run.last > row_run.first + 1:
            stop, nbytes = self._plan.span(row_run.first, row_run.last)
        if read is None:
            read = JoinedRead(key, begin, stop, row_run.at, [])
            self._task.reads.append(read)
        read.stop = max(read.stop, stop)
        read.row_runs.append(row_run)
        self._task.nbytes += nbytes
        self._end = read.at + read.stop - read.start
        return read


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT
