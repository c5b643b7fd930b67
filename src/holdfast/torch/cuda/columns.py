"""Many small tensors of a file to a GPU: few reads, few copies, and tensors that the device makes out of what has arrived.

    file      │ a │ b │ c │ … │        one read of some megabytes, by one of many threads
    block     │ a │ b │ c │ … │        page-locked; each checksum is compared here
    device    │ a │ b │ c │ … │        one copy, on the side stream
              a   b   c   …            each with a storage of its own, by one kernel for a hundred of them

As an object a tensor costs a description, a fill, pieces, a target and views of both: 40 µs, and 16 KiB cross the bus in a third of
one. Here it is a row of numbers (`core.columns`) until the tensor itself is made, which is the copy: an integer plus zero.

1. *Ordinary* are rows that are all of their storage, which no other tensor shares. What was tied stays with the way of objects,
   which ties it again; so do large ones, those without bytes, and what is cast.
2. Nothing shares a storage that did not in the file. Views of what arrived would cost less, and one tensor that somebody keeps
   would keep sixteen megabytes.
3. Tensors are made on the caller's stream, which waits for the copy. Their memory belongs to that stream, as if it had made them.
4. Where a read fails or a checksum is another nothing is given, and the way of objects says what it is.

Tensors that somebody else has made, all of their storages, are filled the same way (`fill_small`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from msgspec import Struct, field

from holdfast.core.arrays import Ints
from holdfast.core.chunk import Storage
from holdfast.core.columns import NO_CRC, Columned, Columns, columns_of
from holdfast.core.crc import crc32
from holdfast.core.dtype import DType
from holdfast.core.protocols import Outlined
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.source import OpenSource
from holdfast.errors import HoldfastError, Unsupported
from holdfast.plan.coalesce import PAGE_LOCKED, coalesce
from holdfast.torch.cuda.host import POOL, HostBlock
from holdfast.torch.cuda.load import SHORT_NBYTES, UNLOCKED, blocks_within
from holdfast.torch.cuda.pipeline import Mark, pump
from holdfast.torch.cuda.streams import lanes
from holdfast.torch.tensors.from_lazy import torch_dtype
from holdfast.torch.tensors.scratch import flat

__all__ = ["FEW", "Row", "fill_small", "read_small"]

FEW = 64
"""Fewer are read as objects: nobody waits for those."""

ALIGNMENT = 64
"""A read begins in its block where it begins in the file, up to a multiple of this: what was aligned there is aligned here."""

CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""As what elements of a width are copied: integers, which any bits survive."""


class Rows(Value, frozen=True):
    """Ordinary tensors, and what reads them."""

    source: OpenSource
    columns: Columns
    dtypes: list[DType]
    """One for each row."""
    chosen: Ints
    """The rows that are read so, in the order of the files."""
    verify: bool = True
    """Whether checksums are compared."""


class Task(Struct):
    """What goes through one block at a time."""

    reads: list[tuple[str, int, int, int]] = field(default_factory=list)
    """Ranges: a file, the first byte, the byte after the last, and the place in the block."""
    members: list[Ints] = field(default_factory=list)
    """The rows in each, and"""
    places: list[Ints] = field(default_factory=list)
    """where in the block they begin."""
    end: int = 0


class _Changed(Exception):
    """Bytes that are not those of the checksum. Nobody outside sees it."""


def read_small(
    tensors: Mapping[str, LazyTensor], names: Sequence[str], device: torch.device, *, max_host_memory: int | None = None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Fresh tensors on a device of the small and ordinary ones among these names, and notes for people.

    The others are left to whoever asks, and so are all of them where one cannot be had as it was written.
    """
    rows = rows_of(tensors, names) if len(names) >= FEW else None
    if rows is None:
        return {}, []
    made = _Made(rows, device)
    done, notes = _pumped(made, max_host_memory)
    numbers = rows.columns.numbers
    return ({names[numbers[row]]: tensor for row, tensor in made.tensors.items()} if done else {}), notes


def _pumped(moved: _Moved, max_host_memory: int | None) -> tuple[bool, list[str]]:
    """Whether all rows were moved, and notes for people."""
    source = moved.rows.source
    size = blocks_within(max_host_memory, source.threads)
    tasks = list(_tasks(moved.rows, size.nbytes))
    count = min(size.count, len(tasks))
    blocks = POOL.lend(count, size.nbytes)
    locked = all(block.locked for block in blocks)
    try:
        with torch.no_grad():
            pump(tasks, blocks, threads=min(source.threads, count), read=moved.read, put=moved.put)
    except (HoldfastError, _Changed):
        return False, []
    finally:
        POOL.take_back(blocks)
    source.read_nbytes += sum(stop - start for task in tasks for _, start, stop, _ in task.reads)
    return True, [] if locked or moved.device.type != "cuda" else [UNLOCKED]


class Row(NamedTuple):
    """All bytes of a storage on a GPU, and where they lie in a file. A tuple, since there are tens of thousands of them."""

    start: int
    nbytes: int
    crc32: int | None
    target: torch.Tensor
    """A tensor that is all of its storage, in whatever order."""


def fill_small(
    source: OpenSource, key: str, rows: Sequence[Row], *, verify: bool = True, max_host_memory: int | None = None
) -> tuple[set[int], list[str]]:
    """Fill the small ones among tensors of one device with bytes of one file. Their numbers, and notes for people.

    The others are left to whoever asks, and so are all of them where one cannot be had as it was written.
    """
    count, nowhere = len(rows), np.zeros(len(rows), np.int64)
    starts = np.fromiter((row.start for row in rows), np.int64, count)
    nbytes = np.fromiter((row.nbytes for row in rows), np.int64, count)
    crcs = np.fromiter((NO_CRC if row.crc32 is None else row.crc32 for row in rows), np.int64, count)
    columns = Columns(range(count), (), (), [key], nowhere, starts, nbytes, crcs)
    order = np.argsort(starts, kind="stable")
    chosen = order[((nbytes > 0) & (nbytes <= SHORT_NBYTES))[order]]
    near = not (source.store.requests or source.store.in_order)
    if len(chosen) < FEW or not near or _overlapping(columns, chosen).any():
        return set(), []
    found = Rows(source, columns, [], chosen, verify)
    done, notes = _pumped(_Filled(found, rows), max_host_memory)
    return (set(chosen.tolist()) if done else set()), notes


def rows_of(tensors: Mapping[str, LazyTensor], names: Sequence[str]) -> Rows | None:
    """The small and ordinary ones among these names; None where they are few, or not of one file system."""
    found = _outlined(tensors, names) if isinstance(tensors, Columned) and isinstance(tensors, Outlined) else None
    if found is None:
        found = _described([tensors[name] for name in names] if all(name in tensors for name in names) else [])
    if found is None:
        return None
    source, columns, dtypes, alone = found
    store = source.store
    if store.requests or store.in_order or source.limits.expansion < 1:
        return None
    kinds = {dtype: _has_torch(dtype) for dtype in set(dtypes)}
    short = (columns.nbytes > 0) & (columns.nbytes <= SHORT_NBYTES) & alone
    short &= np.fromiter((kinds[dtype] for dtype in dtypes), np.bool_, len(dtypes))
    order = np.lexsort((columns.starts, columns.files))
    chosen = order[(short & ~_overlapping(columns, order))[order]]
    return Rows(source, columns, dtypes, chosen, source.verify) if len(chosen) >= FEW else None


Found = tuple[OpenSource, Columns, list[DType], np.ndarray]
"""What reads them, where they lie, their dtypes, and which of them share their storage with no other."""


def _outlined(tensors: Columned, names: Sequence[str]) -> Found | None:
    """Of a format that knows where its tensors lie without making them. There each has a storage of its own."""
    found = tensors.columns(names)
    if found is None or not isinstance(found[0], OpenSource) or not isinstance(tensors, Outlined):
        return None
    columns = found[1]
    dtypes = [tensors.outline(names[number])[0] for number in columns.numbers]
    return found[0], columns, dtypes, np.ones(len(columns), np.bool_)


def _described(lazies: Sequence[LazyTensor]) -> Found | None:
    """Of lazy tensors: those alone that are all of a storage in which there is no other."""
    source = lazies[0].source if lazies else None
    if not isinstance(source, OpenSource) or any(lazy.source is not source for lazy in lazies):
        return None
    columns = columns_of(lazies, range(len(lazies)))
    users: dict[tuple[str, int], int] = {}
    for lazy in lazies:
        for storage in {chunk.storage for chunk in lazy.chunks if type(chunk.storage) is Storage}:
            place = storage.key, storage.start
            users[place] = users.get(place, 0) + 1
    dtypes, alone = [], []
    for number, nbytes in zip(columns.numbers, columns.nbytes.tolist(), strict=True):
        lazy = lazies[number]
        storage = lazy.chunks[0].storage
        dtypes.append(lazy.dtype)
        alone.append(storage.nbytes == nbytes and users[storage.key, storage.start] == 1 and lazy.traits.alias is None)
    return source, columns, dtypes, np.array(alone, np.bool_)


def _has_torch(dtype: DType) -> bool:
    """Whether elements are what torch has under this dtype; of quantised ones a scale is missing."""
    try:
        return dtype.kind != "quantized" and not dtype.packed and torch_dtype(dtype).itemsize * 8 == dtype.bits
    except Unsupported:
        return False


def _overlapping(columns: Columns, order: Ints) -> np.ndarray:
    """Which rows have bytes that another has as well: names of one tensor."""
    found = np.zeros(len(columns), np.bool_)
    filled = order[columns.nbytes[order] > 0]
    for own in np.split(filled, np.flatnonzero(np.diff(columns.files[filled])) + 1):
        starts = columns.starts[own]
        reach = np.maximum.accumulate(starts + columns.nbytes[own])
        # Stretches that hang together, numbered from 1 on.
        stretches = np.cumsum(np.concatenate(([True], starts[1:] >= reach[:-1]))[: len(own)])
        found[own] = np.bincount(stretches)[stretches] > 1
    return found


def _tasks(rows: Rows, most: int) -> Iterator[Task]:
    """Reads that go through a block together. No row is longer than a block."""
    columns = rows.columns
    task = Task()
    for own in np.split(rows.chosen, np.flatnonzero(np.diff(columns.files[rows.chosen])) + 1):
        key = columns.keys[int(columns.files[own[0]])]
        starts = columns.starts[own]
        stops = starts + columns.nbytes[own]
        for head, last in pairwise([*coalesce(starts, stops, PAGE_LOCKED).tolist(), len(own)]):
            first = head
            while first < last:
                begin = int(starts[first])
                at = -(-task.end // ALIGNMENT) * ALIGNMENT + begin % ALIGNMENT
                end = first + int(np.searchsorted(stops[first:last], begin + most - at, side="right"))
                if end == first:
                    yield task
                    task = Task()
                    continue
                stop = int(stops[end - 1])
                task.reads.append((key, begin, stop, at))
                task.members.append(own[first:end])
                task.places.append(at + starts[first:end] - begin)
                task.end, first = at + stop - begin, end
    if task.reads:
        yield task


class _Moved:
    """Rows on their way to a device."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self.rows, self.device = rows, device
        (self._lane,) = lanes([device]).values()

    def read(self, task: Task, block: HostBlock) -> None:
        """Fill a block, and compare checksums. Runs on a reader."""
        source, columns = self.rows.source, self.rows.columns
        memory = block.array.data
        for (key, start, stop, at), members, places in zip(task.reads, task.members, task.places, strict=True):
            source.store.read(key, start, memory[at : at + stop - start])
            recorded = columns.crcs[members] != NO_CRC
            if self.rows.verify and recorded.any():
                begins, checked = places[recorded], members[recorded]
                ends = begins + columns.nbytes[checked]
                sums = [crc32(memory[begin:end]) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
                if (np.array(sums, np.int64) != columns.crcs[checked]).any():
                    raise _Changed

    def put(self, task: Task, block: HostBlock) -> Mark:
        """Bring a block to its places. Runs on the caller's thread."""
        raise NotImplementedError

    def _pieces(self, task: Task, arrived: torch.Tensor, widths: Ints) -> Iterator[tuple[Ints, tuple[torch.Tensor, ...]]]:
        """Rows, and their bytes on the device as integers: of 1, 2, 4 or 8 bytes as the elements are, or less."""
        members, places = np.concatenate(task.members), np.concatenate(task.places)
        # What does not begin at a multiple of its width is taken as bytes.
        widths[places % np.minimum(widths, 8) != 0] = 1
        for width in np.unique(widths).tolist():
            own = np.flatnonzero(widths == width)
            yield members[own], _cut(arrived, places[own], self.rows.columns.nbytes[members[own]], CARRIERS[width])


class _Made(_Moved):
    """The tensors of rows, as they come."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        super().__init__(rows, device)
        self._dtypes = {dtype: torch_dtype(dtype) for dtype in set(rows.dtypes) if _has_torch(dtype)}
        self.tensors: dict[int, torch.Tensor] = {}
        """By their rows."""

    def put(self, task: Task, block: HostBlock) -> Mark:
        with self._lane.on():
            arrived = block.tensor[: task.end].to(self.device, non_blocking=True)
        mark = self._lane.hold_caller()
        self._lane.lend(arrived)
        rows, columns = self.rows, self.rows.columns
        every = [row for members in task.members for row in members.tolist()]
        widths = np.fromiter((rows.dtypes[row].bits // 8 for row in every), np.int64, len(every))
        for members, pieces in self._pieces(task, arrived, widths):
            # The one operation of torch that makes many tensors by one kernel. On integers it is a copy.
            for row, tensor in zip(members.tolist(), torch._foreach_add(pieces, 0), strict=True):
                dtype, shape = self._dtypes[rows.dtypes[row]], columns.shapes[row]
                typed = tensor if dtype is tensor.dtype else tensor.view(dtype)
                self.tensors[row] = typed if len(shape) == 1 else typed.view(shape)
        return mark


class _Filled(_Moved):
    """Rows that go to tensors which are there."""

    def __init__(self, rows: Rows, targets: Sequence[Row]) -> None:
        super().__init__(rows, targets[0].target.device)
        self._targets = [one.target for one in targets]

    def put(self, task: Task, block: HostBlock) -> Mark:
        targets = self._targets
        every = [row for members in task.members for row in members.tolist()]
        widths = np.fromiter((targets[row].element_size() for row in every), np.int64, len(every))
        with self._lane.on():
            try:
                arrived = block.tensor[: task.end].to(self.device, non_blocking=True)
                for members, pieces in self._pieces(task, arrived, widths):
                    own = [flat(targets[row]).view(pieces[0].dtype) for row in members.tolist()]
                    torch._foreach_copy_(own, pieces)
            except BaseException:
                # What was started must not be left behind when the block goes to somebody else.
                self._lane.mark().synchronize()
                raise
            return self._lane.mark()


def _cut(arrived: torch.Tensor, places: Ints, nbytes: Ints, carrier: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Views of ranges that are in ascending order and apart."""
    width = carrier.itemsize
    begin, end = int(places[0]), int(places[-1] + nbytes[-1])
    # What is between two ranges is cut off like them, and dropped.
    edges = np.column_stack((places, places + nbytes)).reshape(-1)
    sizes = np.diff(edges) // width
    wanted = np.zeros(len(sizes), np.bool_)
    wanted[::2] = True
    kept = wanted | (sizes > 0)
    pieces: tuple[torch.Tensor, ...] = arrived[begin:end].view(carrier).split(sizes[kept].tolist())
    if not wanted[kept].all():
        pieces = tuple(piece for piece, one in zip(pieces, wanted[kept].tolist(), strict=True) if one)
    return pieces
