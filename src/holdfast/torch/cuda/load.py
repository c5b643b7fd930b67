"""Fill tensors on GPUs: files are read by many threads into blocks of locked memory, which the GPU empties by itself.

1. Fills become pieces, pieces become tasks of one block each, in the order of the files (runs.py).
2. Readers fill blocks and sum them; this thread starts the copies on the side stream of the device (pipeline.py).
3. Long runs are copied straight to their places. Short ones of a block cross the bus together and are spread by one kernel; so are
   those that are cast, conjugated or strided, each by its own.
4. When the last copy has arrived, checksums are compared.

Fresh tensors are carved from one large allocation: memory for all of them is asked of torch's allocator at once and given back, and
the allocator then cuts it up. The storages are as separate as always; only cudaMalloc is called once and not for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import torch

from holdfast.core.protocols import Request, Source
from holdfast.core.runtime import resting_collector
from holdfast.core.value import Value
from holdfast.engine.checks import Checks
from holdfast.engine.source import OpenSource
from holdfast.engine.strips import execute
from holdfast.engine.threads import default_threads
from holdfast.errors import BadArgument, located
from holdfast.torch.cuda.host import BLOCK_NBYTES, POOL, HostBlock
from holdfast.torch.cuda.pipeline import Mark, pump
from holdfast.torch.cuda.runs import BlockTask, FlatRun, StridedRead, Taken, tasks_of
from holdfast.torch.cuda.streams import Lane, lanes
from holdfast.torch.tensors.from_lazy import array_of, torch_dtype
from holdfast.torch.tensors.scratch import CastLosses, Fill, copy_values

DEFAULT_NBYTES = 1 << 30
"""Host memory that a load may lock where nobody says."""

FEW_BLOCKS = 8
"""Blocks that are rather smaller than fewer."""

LEAST_NBYTES = 2 << 20
"""The least that can be allowed: two blocks of 1 MiB."""

SPARE_BLOCKS = 4
"""Blocks beyond one a reader: those that are being emptied. More of them would only be out of the caches when it is their turn."""

READERS = 12
"""Threads that read, at the most: more take the interpreter lock from the one that starts the copies."""

STEP_NBYTES = 16 << 20
"""What is summed is read so many bytes at a time. Less would still be in the cache of its core, at the price of more calls."""

SHORT_NBYTES = 256 << 10
"""Runs up to this length cross the bus together with their neighbours."""

LARGE_NBYTES = 1 << 20
"""Tensors up to this size have small segments of their own in torch's allocator (CUDACachingAllocator.cpp, kSmallSize)."""

UNLOCKED = "page-locked memory was refused; ordinary memory was used, and copies were slower"

Progress = Callable[[int], None]


class Size(Value, frozen=True):
    """How many blocks there are, and of what size."""

    count: int
    nbytes: int


def blocks_within(most: int | None, threads: int) -> Size:
    """As many blocks as `threads` readers need, within a budget of `most` bytes.

    >>> blocks_within(None, 16), blocks_within(40 << 20, 16), blocks_within(2 << 20, 16)
    (Size(count=20, nbytes=8388608), Size(count=8, nbytes=5242880), Size(count=2, nbytes=1048576))
    """
    budget = DEFAULT_NBYTES if most is None else most
    if budget < LEAST_NBYTES:
        raise BadArgument(f"max_host_memory must be at least {LEAST_NBYTES:,} bytes, not {budget:,}")
    nbytes = min(BLOCK_NBYTES, max(budget // FEW_BLOCKS >> 20, 1) << 20)
    return Size(min(threads + SPARE_BLOCKS, budget // nbytes), nbytes)


def load_fills(
    fills: Sequence[Fill],
    checks_of: Callable[[Source, list[Fill]], Checks],
    progress: Progress | None,
    most: int | None,
    *,
    losses: CastLosses | None = None,
) -> list[str]:
    """Fill targets that do not overlap, on any devices, with at most `most` bytes of locked memory. Gives back notes.

    `losses` counts what casts lose.
    """
    if not fills:
        return []
    losses = losses or CastLosses()
    given = (one.lazy.source.threads for one in fills if isinstance(one.lazy.source, OpenSource))
    threads = min(max(given, default=default_threads()), READERS)
    size = blocks_within(most, threads)
    groups: dict[tuple[Source, torch.device], list[Fill]] = {}
    fills_of: dict[Source, list[Fill]] = {}
    for one in fills:
        groups.setdefault((one.lazy.source, one.target.device), []).append(one)
        fills_of.setdefault(one.lazy.source, []).append(one)
    checks = {source: checks_of(source, members) for source, members in fills_of.items()}
    found = lanes(device for _, device in groups)
    # No more blocks than would hold all, and one: what is small is not worth locking more.
    full = -(-sum(one.lazy.nbytes for one in fills) // size.nbytes) + 1
    readers = min(threads, size.count, full)
    # All of them before the first is read: made by the readers, each call into torch would wait for the interpreter lock.
    with resting_collector():
        tasks = [
            task
            for (source, device), members in groups.items()
            for task in tasks_of(source, device, members, size.nbytes, readers=readers)
        ]
    count = min(size.count, len(tasks), full)
    blocks = POOL.lend(count, size.nbytes)
    locked = all(block.locked for block in blocks)
    try:
        pump(
            tasks,
            blocks,
            threads=min(threads, count),
            read=lambda task, block: _read(task, block, checks[task.source]),
            put=lambda full: _put_all(full, found, progress, losses=losses),
        )
    finally:
        POOL.take_back(blocks)
    for check in checks.values():
        check.finish()
    return [] if locked else [UNLOCKED]


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


def _read(task: BlockTask, block: HostBlock, checks: Checks) -> None:
    """Fill a block. Runs on a reader."""
    memory = block.array.data
    store = task.source.store
    for read in task.reads:
        summed = [taken for taken in read.pieces if checks.wants(taken.piece.storage)]
        step = STEP_NBYTES if summed else read.stop - read.start
        for start in range(read.start, read.stop, step):
            at, nbytes = read.at + start - read.start, min(step, read.stop - start)
            with located(tensor=read.pieces[0].piece.name):
                store.read(read.key, start, memory[at : at + nbytes])
            # What has been read to its end by now, the rest of a long one as it comes: it is in the cache.
            for taken in summed:
                piece = taken.piece
                begin, end = max(taken.at, at), min(taken.at + piece.nbytes, at + nbytes)
                if begin < end:
                    checks.add(piece.storage, piece.start + begin - taken.at, memory[begin:end])
        task.read_nbytes += read.stop - read.start
    if task.gathered:
        requests = [Request(one.part.lazy, array_of(_value(one, at, block), one.part.lazy.dtype)) for one, at in task.gathered]
        if isinstance(task.source, OpenSource):
            # Not `source.read`: it would compare the checksum of what is whole in these requests, and a large storage never is.
            plan = task.source.plan(requests)
            execute(plan, store, 1, checks)
            task.read_nbytes += plan.read_nbytes
        else:
            task.source.read(requests)


def _value(one: StridedRead, at: int, block: HostBlock) -> torch.Tensor:
    """The elements of a gathered piece in a block."""
    lazy = one.part.lazy
    return block.tensor[at : at + one.nbytes].view(torch_dtype(lazy.dtype)).view(lazy.shape)


Full = Sequence[tuple[BlockTask, HostBlock]]
"""Blocks that are full."""


class _Marks(list[Mark]):
    """Points in the work of several devices."""

    def synchronize(self) -> None:
        for mark in self:
            mark.synchronize()

    def query(self) -> bool:
        return all(mark.query() for mark in self)


def _put_all(full: Full, found: Mapping[torch.device, Lane], progress: Progress | None, *, losses: CastLosses) -> Mark:
    """Start all copies out of blocks."""
    marks = _Marks()
    for device in dict.fromkeys(task.device for task, _ in full):
        marks.append(_put([one for one in full if one[0].device == device], device, found[device], losses=losses))
    for task, _ in full:
        if isinstance(task.source, OpenSource):
            task.source.read_nbytes += task.read_nbytes
        if progress is not None:
            progress(task.nbytes)
    return marks


def _put(full: Full, device: torch.device, lane: Lane, *, losses: CastLosses) -> Mark:
    """Those that go to one device."""
    with lane.on():
        try:
            targets: list[torch.Tensor] = []
            values: list[torch.Tensor] = []
            for task, block in full:
                for read in task.reads:
                    _put_pieces(read.pieces, block, device, targets=targets, values=values, losses=losses)
            if targets:
                # One call for all of them: it gives the interpreter lock away, for which the readers wait.
                torch._foreach_copy_(targets, values, non_blocking=True)
            for task, block in full:
                for one, at in task.gathered:
                    value = _value(one, at, block).to(device, non_blocking=True)
                    copy_values(value, one.part.target.detach(), conj=one.part.conj, neg=one.part.neg)
                    losses.add(one.part.lazy.name, value, one.part.target)
        except BaseException:
            # What was started must not be left behind when the block goes to somebody else.
            lane.mark().synchronize()
            raise
        return lane.mark()


def _put_pieces(
    pieces: Sequence[Taken],
    block: HostBlock,
    device: torch.device,
    *,
    targets: list[torch.Tensor],
    values: list[torch.Tensor],
    losses: CastLosses,
) -> None:
    """Start the copies of short runs. Long ones are added to targets and values."""
    others: list[Taken] = []
    for taken in pieces:
        piece = taken.piece
        if piece.plain and piece.nbytes > SHORT_NBYTES:
            _spread(others, block, device, losses=losses)
            others = []
            targets.append(piece.target)
            # Not a view of the block's tensor: to make one would give the interpreter lock away.
            values.append(torch.from_numpy(block.array[taken.at : taken.at + piece.nbytes]))
        else:
            others.append(taken)
    _spread(others, block, device, losses=losses)


def _spread(pieces: Sequence[Taken], block: HostBlock, device: torch.device, *, losses: CastLosses) -> None:
    """Bring neighbouring pieces to the device in one copy, and each to its place from there."""
    if not pieces:
        return
    begin = pieces[0].at
    end = max(taken.at + taken.piece.nbytes for taken in pieces)
    arrived = block.tensor[begin:end].to(device, non_blocking=True)
    targets: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for taken in pieces:
        piece = taken.piece
        value = arrived[taken.at - begin : taken.at - begin + piece.nbytes]
        if piece.plain:
            targets.append(piece.target)
            values.append(value)
        else:
            value = _typed(value, piece)
            copy_values(value, piece.target, conj=piece.conj, neg=piece.neg)
            losses.add(piece.name, value, piece.target)
    if targets:
        torch._foreach_copy_(targets, values)


def _typed(value: torch.Tensor, piece: FlatRun) -> torch.Tensor:
    """Bytes on the device as elements, in the shape of the target."""
    if value.storage_offset() % piece.dtype.itemsize:
        value = value.clone()
    return value.view(piece.dtype).view(piece.target.shape)
