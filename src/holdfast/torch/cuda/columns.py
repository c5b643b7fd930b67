"""Many small tensors of a file to a GPU: few reads, few copies, and tensors that the device makes out of what has arrived.

    file      │ a │ b │ c │ … │        one read of some megabytes, by one of many threads
    block     │ a │ b │ c │ … │        page-locked; checksums are compared here, those of a read together
    device    │ a │ b │ c │ … │        one copy, on the side stream
              a   b   c   …            each with a storage of its own, by one kernel for a hundred of them

As an object a tensor costs a description, a fill, pieces, a target and views of both: 40 µs, and 16 KiB cross the bus in a third of
one. Here it is a row of numbers (`core.columns`) until the tensor itself is made, which is the copy: an integer plus zero. A call
into torch takes a microsecond, so many are asked for by one: tensors of a kind that are equally far from each other are cut out of
what has arrived together, in their shape (kinds.py).

1. *Ordinary* are rows that are all of their storage, which no other tensor shares. What was tied stays with the way of objects,
   which ties it again; so do large ones, those without bytes, and what is cast.
2. Nothing shares a storage that did not in the file. Views of what arrived would cost less, and one tensor that somebody keeps
   would keep the block.
3. Tensors are made on the caller's stream, which waits for the copy. Their memory belongs to that stream, as if it had made them.
4. Where a read fails or a checksum is another nothing is given, and the way of objects says what it is.

Tensors that somebody else has made are filled the same way: those of a `.pt` (`fill_small`), and those of a state that is loaded in
place (`fill_ordinary`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from msgspec import Struct, field

from holdfast.core.arrays import Ints
from holdfast.core.chunk import Storage
from holdfast.core.columns import NO_CRC, Columned, Columns, columns_of, ordinary_limits, place_of
from holdfast.core.crc import have_crcs
from holdfast.core.dtype import DType
from holdfast.core.protocols import Noted, Outlined, Source
from holdfast.core.runtime import resting_collector
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.source import OpenSource
from holdfast.errors import HoldfastError, Unsupported
from holdfast.plan.coalesce import PAGE_LOCKED, coalesce
from holdfast.torch.cuda.host import POOL, HostBlock
from holdfast.torch.cuda.kinds import Kind, views
from holdfast.torch.cuda.load import SHORT_NBYTES, UNLOCKED, blocks_within
from holdfast.torch.cuda.pipeline import Mark, pump
from holdfast.torch.cuda.streams import lanes
from holdfast.torch.tensors.from_lazy import torch_dtype
from holdfast.torch.tensors.scratch import Fill, flat

FEW = 64
"""Fewer are read as objects: nobody waits for those."""

READERS = 4
"""Threads that read, at the most. They are ahead of the one that makes the tensors, and more would only take the interpreter lock
from it."""

ALIGNMENT = 64
"""A read begins in its block where it begins in the file, up to a multiple of this: what was aligned there is aligned here."""


class Rows(Value, frozen=True):
    """Ordinary tensors, and what reads them."""

    source: OpenSource
    columns: Columns
    kinds: Ints
    """Of each row, as a position in the table."""
    table: Sequence[Kind]
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
    with resting_collector():
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
    threads = min(source.threads, READERS)
    size = blocks_within(max_host_memory, threads)
    tasks = list(_tasks(moved.rows, size.nbytes))
    count = min(size.count, len(tasks))
    blocks = POOL.lend(count, size.nbytes)
    locked = all(block.locked for block in blocks)
    try:
        with torch.no_grad():
            pump(tasks, blocks, threads=min(threads, count), read=moved.read, put=moved.put)
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
    places = [(0, row.start, row.nbytes, NO_CRC if row.crc32 is None else row.crc32) for row in rows]
    targets = [target if target.is_contiguous() else flat(target) for *_, target in rows]
    return _filled(source, [key], places, targets, verify=verify, max_host_memory=max_host_memory)


def fill_ordinary(fills: Sequence[Fill], *, max_host_memory: int | None = None) -> tuple[list[Fill], list[str]]:
    """Fill the small and ordinary ones among targets that do not overlap. The fills that are left, and notes for people."""
    groups: dict[tuple[Source, torch.device], list[int]] = {}
    for number, one in enumerate(fills if len(fills) >= FEW else ()):
        groups.setdefault((one.lazy.source, one.target.device), []).append(number)
    done: set[int] = set()
    notes: list[str] = []
    for (source, _), numbers in groups.items():
        if len(numbers) < FEW or not isinstance(source, OpenSource) or not ordinary_limits(source):
            continue
        with resting_collector():
            keys: dict[str, int] = {}
            dtypes: dict[int, torch.dtype | None] = {}
            found: list[int] = []
            places: list[tuple[int, int, int, int]] = []
            for number in numbers:
                place = _place(fills[number], dtypes)
                if place is not None:
                    found.append(number)
                    places.append((keys.setdefault(place[0], len(keys)), *place[1:]))
            targets = [fills[number].target for number in found]
            rows, said = _filled(source, list(keys), places, targets, verify=source.verify, max_host_memory=max_host_memory)
            done.update(found[row] for row in rows)
            notes += said
    return [one for number, one in enumerate(fills) if number not in done], notes


def _place(one: Fill, dtypes: dict[int, torch.dtype | None]) -> tuple[str, int, int, int] | None:
    """Where a fill lies whose bytes in the file are those that its target shall have; None for another."""
    lazy, target = one.lazy, one.target
    dtype = lazy.dtype
    if id(dtype) not in dtypes:
        dtypes[id(dtype)] = torch_dtype(dtype) if _has_torch(dtype) else None
    if target.dtype is not dtypes[id(dtype)] or not target.is_contiguous() or target.is_conj() or target.is_neg():
        return None
    place = place_of(lazy)
    if place is None or not 0 < place[2] <= SHORT_NBYTES:
        return None
    # A part of a storage: the checksum is that of all of its parts together, which the others put together.
    return None if place[3] == NO_CRC and lazy.chunks[0].storage.crc32 is not None else place


def _filled(
    source: OpenSource,
    keys: Sequence[str],
    places: Sequence[tuple[int, int, int, int]],
    targets: Sequence[torch.Tensor],
    *,
    verify: bool,
    max_host_memory: int | None,
) -> tuple[set[int], list[str]]:
    """Fill contiguous targets: of each a file, the first byte, how many, and the checksum."""
    files, starts, nbytes, crcs = np.array(places, np.int64).reshape(-1, 4).T
    columns = Columns(range(len(places)), (), (), keys, files, starts, nbytes, crcs)
    order = np.lexsort((starts, files))
    small = (nbytes > 0) & (nbytes <= SHORT_NBYTES) & ~_overlapping(columns, order)
    chosen = order[small[order]]
    if len(chosen) < FEW or source.store.requests or source.store.in_order:
        return set(), []
    positions: dict[tuple[torch.dtype, torch.Size], int] = {}
    kinds = [positions.setdefault((target.dtype, target.shape), len(positions)) for target in targets]
    table = [Kind.of(dtype, tuple(shape)) for dtype, shape in positions]
    rows = Rows(source, columns, np.array(kinds, np.int64), table, chosen, verify)
    done, notes = _pumped(_Filled(rows, targets), max_host_memory)
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
    if store.requests or store.in_order or not ordinary_limits(source):
        return None
    # By identity: there is one object a dtype, and to hash it takes a call.
    known = {id(dtype): dtype for dtype in dtypes}
    positions: dict[tuple[int, tuple[int, ...]], int] = {}
    kinds = np.array(
        [positions.setdefault(one, len(positions)) for one in zip(map(id, dtypes), columns.shapes, strict=True)], np.int64
    )
    has = {identity: _has_torch(dtype) for identity, dtype in known.items()}
    usual = np.array([has[identity] for identity, _ in positions], np.bool_)
    # What torch has no dtype for is not chosen.
    table = [Kind.of(torch_dtype(known[identity]) if has[identity] else torch.uint8, shape) for identity, shape in positions]
    short = (columns.nbytes > 0) & (columns.nbytes <= SHORT_NBYTES) & alone & usual[kinds]
    order = np.lexsort((columns.starts, columns.files))
    chosen = order[(short & ~_overlapping(columns, order))[order]]
    return Rows(source, columns, kinds, table, chosen, source.verify) if len(chosen) >= FEW else None


Found = tuple[OpenSource, Columns, list[DType], np.ndarray]
"""What reads them, where they lie, their dtypes, and which of them share their storage with no other."""


def _outlined(tensors: Columned, names: Sequence[str]) -> Found | None:
    """Of a format that knows where its tensors lie without making them. There each has a storage of its own, but for those of which
    the file notes another."""
    found = tensors.columns(names)
    if found is None or not isinstance(found[0], OpenSource) or not isinstance(tensors, Outlined):
        return None
    columns = found[1]
    dtypes = [tensors.outline(names[number])[0] for number in columns.numbers]
    alone = np.ones(len(columns), np.bool_)
    if isinstance(tensors, Noted):
        alone[:] = [not tensors.is_noted(names[number]) for number in columns.numbers]
    return found[0], columns, dtypes, alone


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
                if not have_crcs(memory, begins.tolist(), ends.tolist(), columns.crcs[checked].tolist()):
                    raise _Changed

    def put(self, full: Sequence[tuple[Task, HostBlock]]) -> Mark:
        """Bring blocks to their places. Runs on the caller's thread."""
        raise NotImplementedError

    def _arrive(self, task: Task, block: HostBlock) -> torch.Tensor:
        """The bytes of a block on the device, a whole number of integers of any width."""
        return block.tensor[: -(-task.end // ALIGNMENT) * ALIGNMENT].to(self.device, non_blocking=True)

    def _carried(self, task: Task, arrived: torch.Tensor) -> Iterable[_Carried]:
        """The rows of a block as integers on the device, those of a width together."""
        rows, members, places = self.rows, np.concatenate(task.members), np.concatenate(task.places)
        codes = rows.kinds[members]
        order = np.argsort(codes, kind="stable")
        found: dict[torch.dtype, _Carried] = {}
        for own in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
            kind = rows.table[int(codes[own[0]])]
            odd = places[own] % kind.carrier.itemsize != 0
            for one, some in ((kind, own[~odd]), (Kind.of(kind.dtype, kind.shape, octets=True), own[odd])):
                if not len(some):
                    continue
                pieces, owners = found.setdefault(one.carrier, _Carried([], []))
                pieces += views(arrived.view(one.carrier), places[some] // one.carrier.itemsize, one.carried)
                owners.append((one, members[some].tolist()))
        return found.values()


class _Carried(NamedTuple):
    """Integers of one width that have arrived."""

    pieces: list[torch.Tensor]
    """All of them, each as the integers of one row."""
    owners: list[tuple[Kind, list[int]]]
    """Their kinds, and the rows of each kind, in the same order."""


class _Made(_Moved):
    """The tensors of rows, as they come."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        super().__init__(rows, device)
        self.tensors: dict[int, torch.Tensor] = {}
        """By their rows."""

    def put(self, full: Sequence[tuple[Task, HostBlock]]) -> Mark:
        with self._lane.on():
            every = [(task, self._arrive(task, block)) for task, block in full]
        mark = self._lane.hold_caller()
        for task, arrived in every:
            self._lane.lend(arrived)
            self._make(task, arrived)
        return mark

    def _make(self, task: Task, arrived: torch.Tensor) -> None:
        for pieces, owners in self._carried(task, arrived):
            # The one operation of torch that makes many tensors by one kernel. On integers it is a copy.
            made, first = torch._foreach_add(pieces, 0), 0
            for kind, members in owners:
                self.tensors.update(zip(members, kind.typed(made[first : first + len(members)]), strict=True))
                first += len(members)


class _Filled(_Moved):
    """Rows that go to tensors which are there, and contiguous."""

    def __init__(self, rows: Rows, targets: Sequence[torch.Tensor]) -> None:
        super().__init__(rows, targets[0].device)
        self._targets = targets

    def put(self, full: Sequence[tuple[Task, HostBlock]]) -> Mark:
        targets = self._targets
        with self._lane.on():
            try:
                for task, block in full:
                    for pieces, owners in self._carried(task, self._arrive(task, block)):
                        own = [kind.integers(targets[row]) for kind, members in owners for row in members]
                        torch._foreach_copy_(own, pieces)
            except BaseException:
                # What was started must not be left behind when the block goes to somebody else.
                self._lane.mark().synchronize()
                raise
            return self._lane.mark()
