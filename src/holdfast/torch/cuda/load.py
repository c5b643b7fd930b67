"""Bring ranges of files to GPUs: many threads read into blocks of locked memory, which the GPU empties by itself.

    file      │ a │ b │ c c c c c … │     a read of some megabytes, by one of many threads; checksums are compared here
    block     │ a │ b │ c c c c c … │     page-locked
    device    │ a │ b │                   short rows of a block cross the bus together, on the side stream;
              a   b     c c c c c …       each then has a place of its own, by one kernel for a hundred; long ones go straight

1. Rows become tasks of one block each, in the order of the files (plan.py). Readers fill blocks and sum them; this thread
   starts the copies on the side stream of the device (pipeline.py).
2. A call into torch takes a microsecond, so short fresh tensors are made many by one call: tensors of a kind that are equally far
   from each other are cut out of what has arrived together, in their shape, and copied (an integer plus zero). They are made on the
   caller's stream, which waits for the copy, so that their memory belongs to that stream as if it had made them.
3. Nothing shares a storage that did not in the file. Views of what arrived would cost less, and one tensor that somebody keeps
   would keep the block.
4. Memory for all long fresh tensors is asked of torch's allocator at once and given back, and the allocator then cuts it up: one
   cudaMalloc for all. That is done while the first blocks are read; all tasks are planned before.
5. A row whose bytes have another checksum than its file records is found in its block, or when its last piece has passed by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, pairwise, repeat

import numpy as np
import torch

from holdfast.core.arrays import Ints
from holdfast.core.chunk import c_strides
from holdfast.core.crc import BlockCrcs, crc32, has_crcs
from holdfast.core.protocols import Request, Source
from holdfast.core.runtime import gc_paused
from holdfast.core.tensor import NO_CRC
from holdfast.core.value import Value
from holdfast.engine.boxes import read_boxes
from holdfast.engine.source import OpenSource
from holdfast.engine.threads import DEFAULT_THREADS
from holdfast.engine.write import Progress
from holdfast.errors import BadArgument, HoldfastError, error_context
from holdfast.torch.cuda.host import BLOCK_NBYTES, POOL, HostBlock
from holdfast.torch.cuda.pipeline import CopyEvent, run_pipeline
from holdfast.torch.cuda.plan import (
    ALIGNMENT,
    BlockTask,
    ByteKind,
    Conversion,
    DeviceRows,
    RowPlan,
    RowRun,
    rows_of,
    strided_nbytes,
)
from holdfast.torch.cuda.streams import CopyStream, copy_streams
from holdfast.torch.tensors.from_lazy import array_of, torch_dtype
from holdfast.torch.tensors.scratch import CastLosses, Fill, ScratchPiece, copy_values, flat

DEFAULT_NBYTES = 1 << 30
"""Host memory that a load may lock, unless the caller says otherwise."""

FEW_BLOCKS = 8
"""With less memory, blocks get smaller before there are fewer than this."""

LEAST_NBYTES = 2 << 20
"""The least memory that can be allowed: two blocks of 1 MiB."""

SPARE_BLOCKS = 4
"""Blocks beyond one a reader: those that are being emptied. More of them would only be out of the caches when it is their turn."""

READERS = 12
"""Threads that read, at the most: more take the interpreter lock from the one that starts the copies."""

SHORT_READERS = 4
"""Readers where most bytes are those of short rows: the thread that makes their tensors needs the lock."""

LARGE_NBYTES = 1 << 20
"""Tensors up to this size have small segments of their own in torch's allocator (CUDACachingAllocator.cpp, kSmallSize)."""

UNLOCKED = "page-locked memory was refused; ordinary memory was used, and copies were slower"


class Size(Value, frozen=True):
    count: int
    nbytes: int


def blocks_within(most: int | None, threads: int) -> Size:
    """As many blocks as `threads` readers need, within a budget of `most` bytes.

    >>> blocks_within(None, 16), blocks_within(40 << 20, 16), blocks_within(2 << 20, 16)
    (Size(count=20, nbytes=8388608), Size(count=8, nbytes=5242880), Size(count=2, nbytes=1048576))
    """
    budget = DEFAULT_NBYTES if most is None else most
    if budget < LEAST_NBYTES:
        raise BadArgument(
            f"max_host_memory must be at least {LEAST_NBYTES:,} bytes, not {budget:,}"
        )
    nbytes = min(BLOCK_NBYTES, max(budget // FEW_BLOCKS >> 20, 1) << 20)
    return Size(min(threads + SPARE_BLOCKS, budget // nbytes), nbytes)


def load_rows(
    groups: Sequence[DeviceRows],
    *,
    progress: Progress | None = None,
    most: int | None = None,
    losses: CastLosses | None = None,
) -> list[str]:
    """Bring rows to their devices, with at most `most` bytes of locked memory. Gives back notes.

    Targets that are there do not overlap. Fresh tensors are in `DeviceRows.tensors` afterwards, by the numbers of their rows.
    `losses` counts what casts lose.
    """
    total = sum(rows.nbytes for rows in groups)
    short = sum(rows.short_nbytes for rows in groups)
    given = max(
        (rows.source.threads for rows in groups if isinstance(rows.source, OpenSource)),
        default=DEFAULT_THREADS,
    )
    threads = min(given, SHORT_READERS if short > total // 2 else READERS)
    stores = dict.fromkeys(rows.source.store for rows in groups)
    if any(store.read_profile.is_sequential for store in stores):
        threads = 1
    size = blocks_within(most, threads)
    # No more blocks than would hold all, and one: what is small is not worth locking more.
    count = min(size.count, -(-total // size.nbytes) + (total > size.nbytes))
    found = copy_streams(rows.device for rows in groups)
    readers = min(threads, max(count, 1))
    with (
        gc_paused(),
        torch.no_grad(),
        torch._C.DisableTorchFunctionSubclass(),
        ExitStack() as open_stores,
    ):
        for store in stores:
            open_stores.enter_context(store.reading())
        plans = [RowPlan(rows, size.nbytes, readers=readers) for rows in groups]
        moves = {
            id(plan): Move(plan, found[plan.rows.device], losses or CastLosses()) for plan in plans
        }
        blocks = POOL.lend(count, size.nbytes)
        locked = all(block.locked for block in blocks)
        try:
            if blocks:
                run_pipeline(
                    chain.from_iterable(move.tasks for move in moves.values()),
                    blocks,
                    threads=readers,
                    read=lambda task, block: moves[id(task.plan)].read(task, block),
                    put=partial(_put_all, moves=moves, found=found, progress=progress),
                )
        finally:
            POOL.take_back(blocks)
        for move in moves.values():
            move.finish()
    return (
        [UNLOCKED] if not locked and any(stream.wants_locked for stream in found.values()) else []
    )


def load_fills(
    fills: Sequence[Fill],
    *,
    others: Sequence[DeviceRows] = (),
    progress: Progress | None = None,
    most: int | None = None,
    losses: CastLosses | None = None,
) -> list[str]:
    """Fill targets on any devices, and bring other rows there, as `load_rows` does."""
    groups: dict[tuple[Source, torch.device], list[Fill]] = {}
    for one in fills:
        groups.setdefault((one.lazy.source, one.target.device), []).append(one)
    size = blocks_within(most, READERS)
    rows = [rows_of(*place, members, most=size.nbytes) for place, members in groups.items()]
    return load_rows([*others, *rows], progress=progress, most=most, losses=losses)


def reserve(wanted: Iterable[tuple[torch.device, int]]) -> None:
    """Have torch's allocator take memory for tensors of these sizes in one piece a GPU, which it then cuts up for them."""
    totals: dict[torch.device, int] = {}
    for device, nbytes in wanted:
        if device.type == "cuda" and nbytes > LARGE_NBYTES:
            totals[device] = totals.get(device, 0) + -(-nbytes // LARGE_NBYTES) * LARGE_NBYTES
    for device, nbytes in totals.items():
        # Not where the allocator has as much at hand, and not where the GPU may have it in pieces only.
        at_hand = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if at_hand < nbytes <= torch.cuda.mem_get_info(device)[0]:
            with suppress(torch.OutOfMemoryError):
                torch.empty(nbytes, dtype=torch.uint8, device=device)


Full = Sequence[tuple[BlockTask, HostBlock]]
"""Blocks that are full."""


class _Events(list[CopyEvent]):
    def synchronize(self) -> None:
        for mark in self:
            mark.synchronize()

    def query(self) -> bool:
        return all(mark.query() for mark in self)


def _put_all(
    full: Full,
    *,
    moves: Mapping[int, Move],
    found: Mapping[torch.device, CopyStream],
    progress: Progress | None,
) -> CopyEvent:
    """Start all copies out of full blocks. Before the first, all tensors are made."""
    marks = _Events()
    for move in moves.values():
        move.prepare()
    for device in dict.fromkeys(task.plan.rows.device for task, _ in full):
        own = [one for one in full if one[0].plan.rows.device == device]
        marks.append(_put(own, moves, found[device]))
    for task, _ in full:
        source = task.plan.rows.source
        if isinstance(source, OpenSource):
            source.read_nbytes += task.read_nbytes
        if progress is not None:
            progress(task.nbytes)
    return marks


def _put(full: Full, moves: Mapping[int, Move], stream: CopyStream) -> CopyEvent:
    try:
        copies = Copies()
        with stream.on():
            for task, block in full:
                moves[id(task.plan)].put(task, block, copies)
            if copies.targets:
                # One call for all of them: it gives the interpreter lock away, for which the readers wait.
                torch._foreach_copy_(copies.targets, copies.values, non_blocking=True)
            if not copies.later:
                return stream.mark()
        mark = stream.hold_caller()
        for make in copies.later:
            make()
        return mark
    except BaseException:
        # What was started must not be left behind when the block goes to somebody else.
        with stream.on():
            stream.mark().synchronize()
        raise


class Copies:
    """The copies that are left to start when all rows of some blocks were looked at."""

    def __init__(self) -> None:
        self.targets: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        """In page-locked memory."""
        self.later: list[Callable[[], None]] = []
        """Make tensors, on the caller's stream."""


class Move:
    """Rows on their way to a device."""

    def __init__(self, plan: RowPlan, stream: CopyStream, losses: CastLosses) -> None:
        self.plan, self._stream, self._losses = plan, stream, losses
        self._sums: dict[int, BlockCrcs] = {}
        """Checksums of rows that come in several pieces, by their positions."""
        self._places: dict[tuple[int, int], torch.Tensor] = {}
        """The bytes that a row is copied to straight, by its position and how many of its bytes came before."""
        self._kinds: dict[tuple[torch.dtype, torch.Size], ByteKind] = {}
        self._prepared = False
        plan.rows.tensors = [None] * len(plan.rows.ranges)
        self.tasks = [*plan.tasks()]

    # On the thread of the caller.

    def prepare(self) -> None:
        """Once, while readers fill the first blocks: make long and empty tensors, and cut the long ones where blocks end."""
        if self._prepared:
            return
        self._prepared = True
        plan, rows = self.plan, self.plan.rows
        device, made = rows.device, rows.tensors
        straight = np.flatnonzero(plan.straight).tolist()
        reserve(
            (device, plan.nbytes.item(position))
            for position in straight
            if isinstance(plan.destinations[position], ByteKind)
        )
        for number in np.flatnonzero(rows.ranges.nbytes == 0).tolist():
            kind = rows.destinations[number]
            if isinstance(kind, ByteKind):
                made[number] = torch.empty(kind.shape, dtype=kind.dtype, device=device)
        for position in straight:
            target = plan.destinations[position]
            if isinstance(target, ByteKind):
                target = made[int(plan.order[position])] = torch.empty(
                    target.shape, dtype=target.dtype, device=device
                )
            if isinstance(target, torch.Tensor):
                row = flat(target)
                self._places[position, 0] = (
                    row if row.dtype is torch.uint8 else row.view(torch.uint8)
                )
        parts: dict[int, list[tuple[int, int]]] = {}
        for row_run in (
            row_run for task in self.tasks for read in task.reads for row_run in read.row_runs
        ):
            if row_run.last == row_run.first + 1 and plan.straight.item(row_run.first):
                parts.setdefault(row_run.first, []).append((row_run.skip, row_run.nbytes))
        for position, cuts in parts.items():
            if len(cuts) > 1:
                skips, lengths = zip(*cuts, strict=True)
                views = self._places[position, 0].split(lengths)
                self._places.update(
                    zip(zip([position] * len(skips), skips, strict=True), views, strict=True)
                )
        self._stream.follow()

    # On the threads of the readers.

    def read(self, task: BlockTask, block: HostBlock) -> None:
        """Fill a block, and compare its checksums."""
        plan, memory = self.plan, block.array.data
        store = plan.rows.source.store
        for read in task.reads:
            try:
                store.read(read.key, read.start, memory[read.at : read.at + read.stop - read.start])
            except HoldfastError:
                with error_context(tensor=plan.name(read.row_runs[0].first)):
                    raise
            task.read_nbytes += read.stop - read.start
            for row_run in read.row_runs:
                self._sum(row_run, memory)
        if task.strided:
            self._read_strided(task, block)

    def _sum(self, row_run: RowRun, memory: memoryview) -> None:
        """Compare the checksums of whole rows, and add up those of the others."""
        plan, (first, last, skip, nbytes, at) = self.plan, row_run
        if last == first + 1:
            odd = plan.odd.get(first)
            if odd is not None and odd.storage is not None:
                plan.rows.checks.add(
                    odd.storage, plan.starts.item(first) + skip, memory[at : at + nbytes]
                )
            elif plan.crcs.item(first) == NO_CRC:
                pass
            elif nbytes == plan.nbytes.item(first):
                self._compare(first, crc32(memory[at : at + nbytes]))
            else:
                self._sums.setdefault(first, BlockCrcs()).add(skip, memory[at : at + nbytes])
            return
        for position in plan.odd.keys() & range(first, last) if plan.odd else ():
            storage = plan.odd[position].storage
            if storage is not None:
                begin = at + plan.starts.item(position) - plan.starts.item(first)
                plan.rows.checks.add(
                    storage,
                    plan.starts.item(position),
                    memory[begin : begin + plan.nbytes.item(position)],
                )
        crcs = plan.crcs[first:last]
        known = np.flatnonzero(crcs != NO_CRC)
        begins = at + plan.starts[first:last][known] - plan.starts.item(first)
        ends = (begins + plan.nbytes[first:last][known]).tolist()
        if not has_crcs(memory, begins.tolist(), ends, crcs[known].tolist()):
            # One of them is damaged, or they overlap.
            for position, begin, end in zip(
                (first + known).tolist(), begins.tolist(), ends, strict=True
            ):
                self._compare(position, crc32(memory[begin:end]))

    def _compare(self, position: int, found: int) -> None:
        if found != self.plan.crcs.item(position):
            raise self.plan.rows.damaged(int(self.plan.order[position]), found)

    def finish(self) -> None:
        """Compare the checksums of rows that came in pieces."""
        self.prepare()
        for position, sums in sorted(self._sums.items()):
            self._compare(position, sums.crc32())
        self.plan.rows.checks.finish()

    def _read_strided(self, task: BlockTask, block: HostBlock) -> None:
        rows = self.plan.rows
        requests = [
            Request(one.lazy, array_of(_value(one, at, block), one.lazy.dtype))
            for one, at in task.strided
        ]
        if isinstance(rows.source, OpenSource):
            # Not `source.read`: it would compare the checksum of what is whole in these requests, and a large storage never is.
            task.read_nbytes += read_boxes(
                rows.source.store,
                requests,
                threads=1,
                policy=rows.source.policy,
                checks=rows.checks,
            )
        else:
            rows.source.read(requests)

    # On the thread of the caller.

    def put(self, task: BlockTask, block: HostBlock, copies: Copies) -> None:
        """Start the copies of short rows. Long ones are added to `copies`, and so is what is made later."""
        plan = self.plan
        together: list[tuple[Ints, Ints]] = []
        for read in task.reads:
            for row_run in read.row_runs:
                first, last, skip, nbytes, at = row_run
                if last == first + 1 and plan.straight.item(first):
                    self._spread(together, block, copies)
                    together = []
                    self._copy(first, skip, nbytes, at, block, copies)
                    continue
                places = plan.starts[first:last] + (at - plan.starts.item(first))
                if last == first + 1:
                    self._short(row_run, places, block, copies, together)
                    continue
                straight = plan.straight[first:last]
                edges = (
                    (np.flatnonzero(straight[1:] != straight[:-1]) + 1).tolist()
                    if straight.any()
                    else []
                )
                for low, high in pairwise([0, *edges, last - first]):
                    if not straight[low]:
                        together.append((np.arange(first + low, first + high), places[low:high]))
                        continue
                    self._spread(together, block, copies)
                    together = []
                    for position in range(first + low, first + high):
                        self._copy(
                            position,
                            0,
                            plan.nbytes.item(position),
                            places.item(position - first),
                            block,
                            copies,
                        )
        self._spread(together, block, copies)
        for one, at in task.strided:
            value = _value(one, at, block).to(plan.rows.device, non_blocking=True)
            copy_values(value, one.target.detach(), conj=one.conj, neg=one.neg)
            self._losses.add(one.lazy.name, value, one.target)

    def _short(
        self,
        row_run: RowRun,
        places: Ints,
        block: HostBlock,
        copies: Copies,
        together: list[tuple[Ints, Ints]],
    ) -> None:
        """Put a row by itself: a part of one that is converted, or a short one."""
        first, _, skip, nbytes, at = row_run
        if nbytes == self.plan.nbytes.item(first):
            together.append((np.arange(first, first + 1), places))
            return
        one = self.plan.odd[first]
        arrived = self._arrive(block, at, at + nbytes)
        width = one.dtype.itemsize
        self._convert(
            first,
            one,
            arrived[at % ALIGNMENT :][:nbytes],
            one.target[skip // width : (skip + nbytes) // width],
        )

    def _copy(
        self, position: int, skip: int, nbytes: int, at: int, block: HostBlock, copies: Copies
    ) -> None:
        copies.targets.append(self._places[position, skip])
        # Not a view of the block's tensor: to make one would give the interpreter lock away.
        copies.values.append(torch.from_numpy(block.array[at : at + nbytes]))

    def _arrive(self, block: HostBlock, begin: int, end: int) -> torch.Tensor:
        """Bytes of a block on the device: from a multiple of the alignment to another, so that they are integers of any width."""
        begin, end = begin // ALIGNMENT * ALIGNMENT, -(-end // ALIGNMENT) * ALIGNMENT
        return block.tensor[begin:end].to(self.plan.rows.device, non_blocking=True)

    def _spread(
        self, together: Sequence[tuple[Ints, Ints]], block: HostBlock, copies: Copies
    ) -> None:
        """Bring neighbours to the device in one copy, and each to its place from there."""
        if not together:
            return
        plan = self.plan
        members, places = (np.concatenate(column) for column in zip(*together, strict=True))
        begin = int(places.min()) // ALIGNMENT * ALIGNMENT
        arrived = self._arrive(block, begin, int((places + plan.nbytes[members]).max()))
        places = places - begin
        given: list[int] = []
        fresh: list[int] = []
        for number, position in enumerate(members.tolist()):
            one = plan.destinations[position]
            if isinstance(one, ByteKind):
                fresh.append(number)
            elif isinstance(one, torch.Tensor):
                given.append(number)
            else:
                at = places.item(number)
                self._convert(
                    position, one, arrived[at : at + plan.nbytes.item(position)], one.target
                )
        if given:
            self._fill(arrived, members[given].tolist(), places[given])
        if fresh:
            copies.later.append(
                partial(self._make, arrived, members[fresh].tolist(), places[fresh])
            )

    def _fill(self, arrived: torch.Tensor, members: list[int], places: Ints) -> None:
        targets = [self._target(position) for position in members]
        kinds = [self._kind(target) for target in targets]
        for pieces, owners in _cut(arrived, kinds, places):
            own = [
                _integers(kind, targets[number]) for kind, numbers in owners for number in numbers
            ]
            torch._foreach_copy_(own, pieces)

    def _target(self, position: int) -> torch.Tensor:
        target = self.plan.destinations[position]
        assert isinstance(target, torch.Tensor)
        return target if target.is_contiguous() else flat(target)

    def _kind(self, target: torch.Tensor) -> ByteKind:
        key = target.dtype, target.shape
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = ByteKind.of(target.dtype, tuple(target.shape))
        return kind

    def _make(self, arrived: torch.Tensor, members: list[int], places: Ints) -> None:
        """Make the tensors of rows that have arrived. On the caller's stream."""
        plan = self.plan
        self._stream.lend(arrived)
        made, order = plan.rows.tensors, plan.order[members].tolist()
        kinds = [plan.destinations[position] for position in members]
        for pieces, owners in _cut(
            arrived, [kind for kind in kinds if isinstance(kind, ByteKind)], places
        ):
            # The one operation of torch that makes many tensors by one kernel. On integers it is a copy.
            copied, first = torch._foreach_add(pieces, 0), 0
            for kind, numbers in owners:
                for number, tensor in zip(
                    numbers, _typed(kind, copied[first : first + len(numbers)]), strict=True
                ):
                    made[order[number]] = tensor
                first += len(numbers)

    def _convert(
        self, position: int, one: Conversion, value: torch.Tensor, target: torch.Tensor
    ) -> None:
        if value.storage_offset() % one.dtype.itemsize:
            value = value.clone()
        value = value.view(one.dtype).view(target.shape)
        copy_values(value, target, conj=one.conj, neg=one.neg)
        self._losses.add(self.plan.name(position), value, target)


def _value(one: ScratchPiece, at: int, block: HostBlock) -> torch.Tensor:
    lazy = one.lazy
    return (
        block.tensor[at : at + strided_nbytes(one)].view(torch_dtype(lazy.dtype)).view(lazy.shape)
    )


Owners = list[tuple[ByteKind, list[int]]]
"""Kinds, and the numbers of their rows."""


def _cut(
    arrived: torch.Tensor, kinds: Sequence[ByteKind], places: Ints
) -> Iterator[tuple[list[torch.Tensor], Owners]]:
    """Rows as integers where they have arrived, by the width of the integers: the pieces, and their rows in the same order."""
    known: dict[int, ByteKind] = {id(kind): kind for kind in kinds}
    codes = np.fromiter(map(id, kinds), np.int64, len(kinds))
    order = np.argsort(codes, kind="stable")
    found: dict[torch.dtype, tuple[list[torch.Tensor], Owners]] = {}
    for own in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
        kind = known[codes.item(own[0])]
        odd = places[own] % kind.integer.itemsize != 0
        for one, some in (
            (kind, own[~odd]),
            (ByteKind.of(kind.dtype, kind.shape, unaligned=True), own[odd]),
        ):
            if len(some):
                pieces, owners = found.setdefault(one.integer, ([], []))
                pieces += views(
                    arrived.view(one.integer), places[some] // one.integer.itemsize, one.counts
                )
                owners.append((one, some.tolist()))
    yield from found.values()


def _typed(kind: ByteKind, made: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    if kind.dtype is not kind.integer:
        made = map(torch.Tensor.view, made, repeat(kind.dtype))
    return made if kind.counts == kind.shape else map(torch.Tensor.view, made, repeat(kind.shape))


def _integers(kind: ByteKind, target: torch.Tensor) -> torch.Tensor:
    row = target if kind.counts == kind.shape else flat(target)
    return row if row.dtype is kind.integer else row.view(kind.integer)


def views(row: torch.Tensor, starts: Ints, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Views of a shape that begin at these elements of a row: by one call for those that are equally far from each other.

    >>> [view.tolist() for view in views(torch.arange(9), np.array([0, 3, 6, 7]), (2,))]
    [[0, 1], [3, 4], [6, 7], [7, 8]]
    """
    strides = c_strides(shape, 1)
    steps, begin = np.diff(starts), int(row.storage_offset())
    found: list[torch.Tensor] = []
    for first, last in pairwise([0, *(np.flatnonzero(np.diff(steps)) + 2).tolist(), len(starts)]):
        start = begin + int(starts[first])
        if last - first == 1:
            found.append(row.as_strided(shape, strides, start))
        else:
            found += row.as_strided(
                (last - first, *shape), (int(steps[first]), *strides), start
            ).unbind()
    return found
