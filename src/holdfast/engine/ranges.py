"""Reads contiguous ranges of files into memory: the path on which elements reach a destination.

A contiguous row of a table is one range and its array the destination; so is a storage of a torch file or a tensor of a model. All
others (strided, split, swapped, packed) are made of ranges by engine/boxes.py.

Tasks of a few megabytes are shared out to threads. Each thread keeps one piece of scratch memory, as long as its longest joined
read. So memory beyond the destinations is `threads × block`.

Short neighbours are read together and copied out of scratch memory. A long range is read straight to its destination, a block of
the file at a time. A recorded CRC-32 is compared with the one of the bytes that came.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.crc import BlockCrcs, crc32, has_crcs
from holdfast.core.protocols import Store
from holdfast.core.runtime import address_of, memory_at
from holdfast.core.table import Column
from holdfast.core.tensor import NO_CRC
from holdfast.core.value import Value
from holdfast.engine.coalesce import RECORDS, JoinedReads, JoinPolicy, Ranges, join_ranges
from holdfast.engine.threads import INLINE_NBYTES, Scratch, run_reads
from holdfast.errors import Corrupted, HoldfastError, error_context

TASK_READS = 2048
"""The most joined reads that a thread takes at a time."""

FEW_RANGES = 32
"""Joining ranges takes 150 µs however few there are, and reading one of them 2 µs."""


class RangeReads(Value, frozen=True, eq=False):
    """Contiguous ranges of files, each with its destination in memory. The caller keeps the memory alive."""

    keys: Sequence[str]
    files: Column
    """The file of each range, as a position in `keys`."""
    starts: Column
    nbytes: Column
    addresses: Column
    crcs: Column
    """The CRC-32 of each range, or `NO_CRC`."""
    name: Callable[[int], str]
    """The tensor of a range, by its number, for messages."""
    damaged: Callable[[int, int], Corrupted]
    """The error for a range that has another checksum: takes its number and the checksum of its bytes."""


def read_ranges(
    store: Store, reads: RangeReads, *, threads: int, policy: JoinPolicy = RECORDS
) -> int:
    """Read every range to its destination and return how many bytes were read.

    Raises the error of a range that cannot be read, or whose checksum does not match.
    """
    # A few ranges of a local file are read sooner one by one than they are joined. Memory needs no
    # joining at all.
    profile = store.read_profile
    has_few = len(reads.starts) <= FEW_RANGES and not (
        profile.request_count or profile.is_sequential
    )
    if has_few or len(reads.starts) == 1 or profile.is_in_memory:
        total_nbytes = int(sum(reads.nbytes))
        if total_nbytes < INLINE_NBYTES:
            _read_one_by_one(store, reads)
            return total_nbytes

    columns = (reads.files, reads.starts, reads.nbytes, reads.addresses, reads.crcs)
    files, starts, nbytes, addresses, crcs = (np.asarray(column, np.int64) for column in columns)
    ranges = Ranges(reads.keys, files, starts, nbytes)
    scratch = Scratch()
    file_reads = [
        _FileReads(store, reads, ranges, parts, addresses=addresses, crcs=crcs, scratch=scratch)
        for parts in join_ranges(ranges, policy)
    ]
    total_nbytes = sum(file.parts.nbytes for file in file_reads)
    # Of a remote store each joined read is a task, so that none waits for another.
    task_nbytes = 1 if profile.request_count else policy.block_nbytes
    tasks = [
        partial(file.run, first, last, policy.block_nbytes)
        for file in file_reads
        for first, last in split_into_tasks(file.parts, task_nbytes)
    ]
    has_threads = profile.request_count or total_nbytes >= INLINE_NBYTES
    run_reads(tasks, threads if has_threads else 1, stores=[store])
    for file in file_reads:
        file.finish()
    return total_nbytes


def read_to_scratch(
    store: Store, ranges: Ranges, name: Callable[[int], str], *, policy: JoinPolicy
) -> np.ndarray:
    """Read ranges to fresh memory on this thread, one behind the other. No checksum is compared."""
    out = np.empty(int(ranges.nbytes.sum()), np.uint8)
    addresses = address_of(out) + ranges.nbytes.cumsum() - ranges.nbytes
    crcs = np.full(len(ranges), NO_CRC, np.int64)
    reads = RangeReads(
        ranges.keys, ranges.files, ranges.starts, ranges.nbytes, addresses, crcs, name, _no_checksum
    )
    read_ranges(store, reads, threads=1, policy=policy)
    return out


def _no_checksum(number: int, crc: int) -> Corrupted:
    raise AssertionError("there is no checksum to compare")


def _read_one_by_one(store: Store, reads: RangeReads) -> None:
    """Read short ranges one after the other, on this thread."""
    columns = (reads.files, reads.starts, reads.nbytes, reads.addresses, reads.crcs)
    lists = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns]
    for number, (file, start, nbytes, address, crc) in enumerate(zip(*lists, strict=True)):
        if not nbytes:
            continue
        out = memory_at(address, nbytes)
        try:
            store.read(reads.keys[file], start, out)
        except HoldfastError as error:
            with error_context(tensor=reads.name(number)):
                raise error
        if crc != NO_CRC and (found := crc32(out)) != crc:
            raise reads.damaged(number, found)


def split_into_tasks(reads: JoinedReads, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the joined reads of one file as tasks of about so many bytes: the first read, and the one behind the last."""
    reach = (reads.stops - reads.starts).cumsum()
    first = before = 0
    while first < len(reach):
        last = int(reach.searchsorted(before + nbytes, side="right"))
        last = min(max(last, first + 1), first + TASK_READS)
        yield first, last
        first, before = last, int(reach[last - 1])


def read_joined(store: Store, reads: JoinedReads, number: int, scratch: Scratch) -> memoryview:
    """Return the bytes of a joined read: as they lie in memory already, or read to scratch memory."""
    start, stop = reads.starts.item(number), reads.stops.item(number)
    memory = store.map(reads.key) if store.read_profile.is_in_memory else None
    if memory is not None and stop <= memory.nbytes:
        return memory[start:stop]
    data = scratch.of(stop - start)
    store.read(reads.key, start, data)
    return data


class _FileReads:
    """The ranges of one file, which are cut where its blocks end."""

    def __init__(
        self, store: Store, reads: RangeReads, ranges: Ranges, parts: JoinedReads, *, addresses: Ints,
        crcs: Ints, scratch: Scratch,
    ) -> None:  # fmt: skip
        self._store = store
        self._reads = reads
        self._ranges = ranges
        self._scratch = scratch
        self.parts = parts
        owners = parts.pieces.range_indices
        self._addresses = addresses[owners] + parts.pieces.starts - ranges.starts[owners]
        self._crcs = crcs[owners]
        self._recorded = crcs
        self._is_whole = parts.pieces.stops - parts.pieces.starts == ranges.nbytes[owners]
        self._sums: dict[int, BlockCrcs] = {}

    def run(self, first: int, last: int, block: int) -> None:
        """Do joined reads [first, last), one after the other.

        What has a checksum is read a block at a time.
        """
        heads = self.parts.first_pieces[first : last + 1]
        parts = heads[:-1]
        is_single = np.diff(heads) == 1
        columns = (
            np.where(is_single, self._addresses[parts], 0),
            self._crcs[parts] != NO_CRC,
            self.parts.starts[first:last],
            self.parts.stops[first:last],
        )
        # A column of a matrix is a million of these, so the loop looks nothing up.
        memory, read, key = memory_at(0, sys.maxsize), self._store.read, self.parts.key
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for number, (address, has_crc, start, stop) in enumerate(rows, first):
            try:
                if not address:
                    self._spread(
                        number, read_joined(self._store, self.parts, number, self._scratch)
                    )
                elif not has_crc:
                    read(key, start, memory[address : address + stop - start])
                else:
                    owner = self.parts.pieces.range_indices.item(
                        self.parts.first_pieces.item(number)
                    )
                    for begin in range(start, stop, block):
                        nbytes = min(block, stop - begin)
                        place = address + begin - start
                        piece = memory[place : place + nbytes]
                        read(key, begin, piece)
                        self._add_to_sum(owner, begin, piece)
            except HoldfastError as error:
                # Raised here, because a function that raised its argument would be in a reference
                # cycle with it, which keeps everything alive that the caller holds.
                with error_context(tensor=self._find_failed_tensor(number, error.tensor)):
                    raise

    def _spread(self, number: int, data: memoryview) -> None:
        """Copy the ranges of a joined read to their destinations."""
        origin = int(self.parts.starts[number])
        span = slice(*self.parts.first_pieces[number : number + 2].tolist())
        begins, ends, crcs = (
            self.parts.pieces.starts[span],
            self.parts.pieces.stops[span],
            self._crcs[span],
        )
        has_crc = crcs != NO_CRC
        if has_crc.any():
            # Whole ranges by one call; only where one is damaged each of them, to say which.
            is_summed = has_crc & self._is_whole[span]
            are_good = has_crcs(
                data,
                (begins[is_summed] - origin).tolist(),
                (ends[is_summed] - origin).tolist(),
                crcs[is_summed].tolist(),
            )
            left = has_crc & ~is_summed if are_good else has_crc
            for part in left.nonzero()[0].tolist():
                begin, end = begins.item(part), ends.item(part)
                owner = int(self.parts.pieces.range_indices[span][part])
                self._add_to_sum(owner, begin, data[begin - origin : end - origin])

        sources = begins + (np.frombuffer(data, np.uint8).ctypes.data - origin)
        # By a map: to copy one takes less time than a turn of a loop.
        deque(
            map(
                ctypes.memmove,
                self._addresses[span].tolist(),
                sources.tolist(),
                (ends - begins).tolist(),
            ),
            maxlen=0,
        )

    def _find_failed_tensor(self, number: int, named_tensor: str | None) -> str:
        """Return the name of the first tensor of a joined read, which could not be read.

        If the error names no tensor, each range is read by itself first: the one that fails raises
        an error that names its tensor.
        """
        parts = [*self.parts.select_pieces(number).rows()]
        if named_tensor is None and len(parts) > 1:
            for owner, begin, end in parts:
                with error_context(tensor=self._reads.name(owner)):
                    self._store.read(self.parts.key, begin, memoryview(bytearray(end - begin)))
        return self._reads.name(parts[0][0])

    def _add_to_sum(self, owner: int, start: int, data: memoryview) -> None:
        _, first, nbytes = self._ranges.locate(owner)
        if data.nbytes == nbytes:
            self._compare(owner, crc32(data))
        else:
            self._sums.setdefault(owner, BlockCrcs()).add(start - first, data)

    def finish(self) -> None:
        """Compare the checksums of ranges that came in parts."""
        for owner, sums in sorted(self._sums.items()):
            self._compare(owner, sums.crc32())

    def _compare(self, owner: int, crc: int) -> None:
        if crc != self._recorded.item(owner):
            raise self._reads.damaged(owner, crc)
