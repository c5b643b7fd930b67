"""What goes through one block: byte ranges of files, and where the elements of each belong.

    file     │ h │ a a a a a a │ b b │ c c c c c c c c c c c c │ gap │ d d │
    block 0      │ a a a a a a │ b b │ c c c c │                        one read, three copies
    block 1                                    │ c c c c c c c c │ gap │ d d │

1. A tensor whose elements lie in one piece in the file and in the same order in its target is a *run*: a range of bytes. Where the
   dtype is the same it may be cut anywhere, else between elements. Everything else is cut into boxes (parts.py).
2. Pieces are sorted by their place in the file and joined (plan/coalesce.py: small gaps are read as well, because a read costs more
   than their bytes), and laid into blocks one behind the other.
3. Elements that do not lie in one piece in the file (columns, another byte order, packed types) are read by the engine, a block of
   them at a time.
4. The first blocks and the last ones are not full (`Shares`): the bus has something to do while most readers read, and to the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from msgspec import Struct, field

from holdfast.core.chunk import Chunk, Storage
from holdfast.core.protocols import Source
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.blocks import contiguous_bytes
from holdfast.plan.coalesce import PAGE_LOCKED, coalesce
from holdfast.torch.tensors.from_lazy import torch_dtype
from holdfast.torch.tensors.scratch import Fill, ScratchPiece, flat, in_file_order, parts_of

ALIGNMENT = 64
"""Where reads and gathered elements begin in a block, so that any dtype can look at the latter."""


class FlatRun(Value, frozen=True, eq=False):
    """Elements that lie in one piece in a file, and the tensor that they go to: flat, or of any shape that fits into a block."""

    storage: Storage
    start: int
    """First byte in the file."""
    nbytes: int
    dtype: torch.dtype
    """As the file has them. Bytes where the target has the same dtype and nothing is done to them."""
    target: torch.Tensor
    name: str
    conj: bool = False
    neg: bool = False

    @property
    def plain(self) -> bool:
        """Whether bytes are copied to bytes."""
        return self.dtype is torch.uint8 and self.target.dtype is torch.uint8 and self.target.ndim == 1

    def cut(self, nbytes: int) -> tuple[FlatRun, FlatRun | None]:
        """The first so many bytes, or as many as make whole elements, and the rest. Only flat targets are cut."""
        width = self.dtype.itemsize
        count = nbytes // width
        if self.nbytes <= nbytes or count <= 0:
            return self, None
        at = count * width
        head = FlatRun(self.storage, self.start, at, self.dtype, self.target[:count], self.name, self.conj, self.neg)
        tail = FlatRun(
            self.storage, self.start + at, self.nbytes - at, self.dtype, self.target[count:], self.name, self.conj, self.neg
        )
        return head, tail


class StridedRead(Value, frozen=True, eq=False):
    """Elements that the engine has to read, because they do not lie in one piece."""

    part: ScratchPiece
    source: Source

    @property
    def nbytes(self) -> int:
        """Bytes that they take in a block, where a packed element takes one."""
        return self.part.lazy.size * self.part.lazy.dtype.numpy.itemsize


class Taken(Value, frozen=True, eq=False):
    """A piece, and where its bytes are in the block."""

    piece: FlatRun
    at: int


class Read(Struct, eq=False):
    """One range of one file."""

    key: str
    start: int
    stop: int
    at: int
    """Where it begins in the block."""
    pieces: list[Taken] = field(default_factory=list)


class BlockTask(Struct, eq=False):
    """What one block is filled with at a time; all of it goes to one device."""

    source: Source
    device: torch.device
    reads: list[Read] = field(default_factory=list)
    gathered: list[tuple[StridedRead, int]] = field(default_factory=list)
    """With the place of each in the block."""
    nbytes: int = 0
    """Bytes of elements."""
    read_nbytes: int = 0
    """Bytes that were read for them."""


def pieces_of(one: Fill, most: int) -> Iterator[FlatRun | StridedRead]:
    """A fill as pieces, of which those that are not flat fit into `most` bytes."""
    lazy, target = one.lazy, one.target
    if _is_row(lazy, target):
        # Most tensors lie in the file as in memory: no need to look at them dimension by dimension.
        yield _flat(lazy, lazy.chunks[0], target)
        return
    for chunk in lazy.chunks:
        moved, part = in_file_order(one, chunk)
        if _is_row(moved, part):
            yield _flat(moved, moved.chunks[0], part, conj=lazy.traits.conj, neg=lazy.traits.neg)
        else:
            yield from _boxes(Fill(LazyTensor(lazy.name, lazy.dtype, lazy.shape, (chunk,), lazy.source, lazy.traits), target), most)


def _is_row(lazy: LazyTensor, target: torch.Tensor) -> bool:
    """Whether elements lie in C order in the file as well as in memory."""
    if lazy.dtype.packed or contiguous_bytes(lazy) is None:
        return False
    return target.is_contiguous() and not (target.is_conj() or target.is_neg())


def _flat(lazy: LazyTensor, chunk: Chunk, target: torch.Tensor, *, conj: bool = False, neg: bool = False) -> FlatRun:
    dtype = torch_dtype(lazy.dtype)
    row = flat(target.detach())
    if row.dtype == dtype and not (conj or neg):
        dtype, row = torch.uint8, row.view(torch.uint8)
    storage = chunk.storage
    return FlatRun(storage, storage.start + chunk.offset // 8, lazy.nbytes, dtype, row, lazy.name, conj, neg)


def _boxes(one: Fill, most: int) -> Iterator[FlatRun | StridedRead]:
    for part in parts_of(one, most):
        lazy = part.lazy
        place = None if lazy.dtype.packed else contiguous_bytes(lazy)
        if place is None:
            yield StridedRead(part, lazy.source)
        else:
            storage = lazy.chunks[0].storage
            yield FlatRun(
                storage, place[1], lazy.nbytes, torch_dtype(lazy.dtype), part.target.detach(), lazy.name, part.conj, part.neg
            )


LEAST_NBYTES = 2 << 20
"""What a block takes when there is much to read, at the least."""


class Shares:
    """How many bytes the next block takes.

    Readers that begin together end together: the bus waits for the first of them, all blocks are full at once, and at the end one
    of them still reads while the others are done. So each of the first has a little more than the one before, and of what is left
    nobody takes more than their share.

    >>> shares = Shares(100 << 20, 16 << 20, readers=4)
    >>> [shares.take() >> 20 for _ in range(12)]
    [4, 8, 12, 16, 15, 11, 8, 6, 4, 3, 2, 2]
    """

    def __init__(self, total: int, most: int, *, readers: int = 1) -> None:
        self._left, self._most, self._readers = total, most, readers
        self._taken = 0

    def take(self) -> int:
        """The bytes of the next block, which is taken to be filled."""
        most = self._most
        if self._readers > 1:
            self._taken += 1
            most = min(most * self._taken // self._readers, self._left // self._readers)
            most = min(max(most, LEAST_NBYTES), self._most)
        self._left = max(self._left - most, 0)
        return most


def tasks_of(source: Source, device: torch.device, fills: Iterable[Fill], most: int, *, readers: int = 1) -> Iterator[BlockTask]:
    """Lay fills of one source and device into blocks of `most` bytes, in the order of the files, for so many readers."""
    gathered: list[StridedRead] = []
    files: dict[str, list[FlatRun]] = {}
    for one in fills:
        for piece in pieces_of(one, most):
            if isinstance(piece, StridedRead):
                gathered.append(piece)
            else:
                files.setdefault(piece.storage.key, []).append(piece)
    total = sum(piece.nbytes for pieces in files.values() for piece in pieces)
    shares = Shares(total, most, readers=readers)
    rows = (row for _, pieces in sorted(files.items()) for row in _joined(pieces))
    yield from _dense_tasks(source, device, rows, most, shares=shares)
    yield from _gathered_tasks(source, device, gathered, most)


def _joined(pieces: list[FlatRun]) -> Iterator[list[FlatRun]]:
    """Pieces of one file, those together that are read together."""
    pieces.sort(key=lambda piece: piece.start)
    starts = np.fromiter((piece.start for piece in pieces), np.int64, len(pieces))
    lengths = np.fromiter((piece.nbytes for piece in pieces), np.int64, len(pieces))
    heads = coalesce(starts, starts + lengths, PAGE_LOCKED).tolist()
    return (pieces[first:last] for first, last in pairwise([*heads, len(pieces)]))


def _dense_tasks(
    source: Source, device: torch.device, rows: Iterable[list[FlatRun]], most: int, *, shares: Shares
) -> Iterator[BlockTask]:
    """Those that lie in one piece: a read for each row of them, or several where blocks end."""
    task, end, share = BlockTask(source, device), 0, shares.take()
    for row in rows:
        read: Read | None = None
        for whole in row:
            piece: FlatRun | None = whole
            while piece is not None:
                # One that began before the block did is read again.
                joined = read if read is not None and piece.start >= read.start else None
                begin = _aligned(end) if joined is None else joined.at + piece.start - joined.start
                # What must be whole may take a block for itself.
                room = (share if task.reads or piece.target.ndim == 1 else most) - begin
                head, rest = piece.cut(room) if piece.target.ndim == 1 else (piece, None)
                if head.nbytes > room:
                    # Not even one element, or a box that must be whole: it begins the next block.
                    yield task
                    task, end, read, share = BlockTask(source, device), 0, None, shares.take()
                    continue
                if joined is None:
                    joined = Read(head.storage.key, head.start, head.start + head.nbytes, begin)
                    task.reads.append(joined)
                joined.stop = max(joined.stop, head.start + head.nbytes)
                joined.pieces.append(Taken(head, begin))
                task.nbytes += head.nbytes
                read, piece, end = joined, rest, joined.at + joined.stop - joined.start
                if piece is not None:
                    yield task
                    task, end, read, share = BlockTask(source, device), 0, None, shares.take()
    if task.reads:
        yield task


def _gathered_tasks(source: Source, device: torch.device, pieces: Sequence[StridedRead], most: int) -> Iterator[BlockTask]:
    task, end = BlockTask(source, device), 0
    for piece in pieces:
        if task.gathered and end + piece.nbytes > most:
            yield task
            task, end = BlockTask(source, device), 0
        task.gathered.append((piece, end))
        task.nbytes += piece.part.lazy.nbytes
        end = _aligned(end + piece.nbytes)
    if task.gathered:
        yield task


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT
