"""Reads contiguous ranges of files into memory: the path on which elements reach a destination.

A regular row of a table is one range and its array the destination; so is a storage of a torch file or a tensor of a model. What is
strided, split, swapped or packed is made of ranges by engine/boxes.py.

Short neighbours are read together and copied out of scratch memory. A long range is read straight to its destination, a block of
the file at a time. A recorded CRC-32 is compared with the one of the bytes that came.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.crc import Sums, crc32, have_crcs
from holdfast.core.protocols import Store
from holdfast.core.runtime import memory_at
from holdfast.core.table import Column
from holdfast.core.value import Value
from holdfast.engine.coalesce import RECORDS, Parts, Policy, Ranges, join_files
from holdfast.engine.transfer import INLINE_NBYTES, Sink, Straight, transfer
from holdfast.errors import Corrupted, HoldfastError, located

UNKNOWN = -1
"""In the place of a checksum: there is none to compare."""


class RangeReads(Value, frozen=True, eq=False):
    """Contiguous ranges of files, each with its destination in memory. The caller keeps the memory alive."""

    keys: Sequence[str]
    files: Column
    """The file of each range, as a position in `keys`."""
    starts: Column
    nbytes: Column
    addresses: Column
    crcs: Column
    """The CRC-32 of each range, or `UNKNOWN`."""
    name: Callable[[int], str]
    """The tensor of a range, by its number, for messages."""
    damaged: Callable[[int, int], Corrupted]
    """The error for a range that has another checksum: takes its number and the checksum of its bytes."""


def read_ranges(store: Store, reads: RangeReads, *, threads: int, policy: Policy = RECORDS) -> int:
    """Read every range to its destination and return how many bytes were read.

    Raises the error of a range that cannot be read, or whose checksum does not match.
    """
    columns = (reads.files, reads.starts, reads.nbytes, reads.addresses, reads.crcs)
    # One range, and memory that is there, have no neighbours to be joined with.
    if len(reads.starts) == 1 or store.medium.resident:
        total_nbytes = int(sum(reads.nbytes))
        if total_nbytes < INLINE_NBYTES:
            lists = [one.tolist() if isinstance(one, np.ndarray) else one for one in columns]
            _read_each(store, reads, zip(*lists, strict=True))
            return total_nbytes

    files, starts, nbytes, addresses, crcs = (np.asarray(column, np.int64) for column in columns)
    ranges = Ranges(reads.keys, files, starts, nbytes)
    sinks = [
        _RangeSink(store, reads, ranges, parts, addresses=addresses, crcs=crcs)
        for parts in join_files(ranges, policy)
    ]
    transfer(
        [(store, sink.parts, sink) for sink in sinks],
        threads,
        nbytes=policy.block,
        step=policy.block,
    )
    for sink in sinks:
        sink.finish()
    return sum(sink.parts.nbytes for sink in sinks)


def _read_each(store: Store, reads: RangeReads, rows: Iterable[tuple[int, ...]]) -> None:
    """Read short ranges one after the other, on this thread. `rows` are the columns of `reads`."""
    for number, (file, start, nbytes, address, crc) in enumerate(rows):
        if not nbytes:
            continue
        out = memory_at(address, nbytes)
        try:
            store.read(reads.keys[file], start, out)
        except HoldfastError as error:
            with located(tensor=reads.name(number)):
                raise error
        if crc != UNKNOWN and (found := crc32(out)) != crc:
            raise reads.damaged(number, found)


class _RangeSink(Sink):
    """Receives the ranges of one file, which are cut where its blocks end."""

    def __init__(
        self, store: Store, reads: RangeReads, ranges: Ranges, parts: Parts, *, addresses: Ints,
        crcs: Ints,
    ) -> None:  # fmt: skip
        self._store = store
        self._reads = reads
        self._ranges = ranges
        self.parts = parts
        owners = parts.owners
        self._addresses = addresses[owners] + parts.begins - ranges.starts[owners]
        self._crcs = crcs[owners]
        self._recorded = crcs
        self._is_whole = parts.ends - parts.begins == ranges.nbytes[owners]
        self._sums: dict[int, Sums] = {}

    def straight(self, first: int, last: int) -> Straight:
        heads = self.parts.heads[first : last + 1]
        return Straight(
            np.where(heads[1:] - heads[:-1] == 1, self._addresses[heads[:-1]], 0),
            self._crcs[heads[:-1]] != UNKNOWN,
        )

    def passed(self, number: int, start: int, data: memoryview) -> None:
        self._add_to_sum(int(self.parts.owners[self.parts.heads[number]]), start, data)

    def take(self, number: int, data: memoryview) -> None:
        origin = int(self.parts.starts[number])
        span = slice(*self.parts.heads[number : number + 2].tolist())
        begins, ends, crcs = self.parts.begins[span], self.parts.ends[span], self._crcs[span]
        has_crc = crcs != UNKNOWN
        if has_crc.any():
            # Whole ranges by one call; only where one is damaged each of them, to say which.
            is_summed = has_crc & self._is_whole[span]
            are_good = have_crcs(
                data,
                (begins[is_summed] - origin).tolist(),
                (ends[is_summed] - origin).tolist(),
                crcs[is_summed].tolist(),
            )
            left = has_crc & ~is_summed if are_good else has_crc
            for part in left.nonzero()[0].tolist():
                begin, end = begins.item(part), ends.item(part)
                owner = int(self.parts.owners[span][part])
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

    def failed(self, number: int, error: HoldfastError) -> None:
        parts = [*self.parts.of(number)]
        if len(parts) > 1:
            # Each range by itself, so that the error names a tensor that cannot be read.
            for owner, begin, end in parts:
                with located(tensor=self._reads.name(owner)):
                    self._store.read(self.parts.key, begin, memoryview(bytearray(end - begin)))
        with located(tensor=self._reads.name(parts[0][0])):
            raise error

    def _add_to_sum(self, owner: int, start: int, data: memoryview) -> None:
        _, first, nbytes = self._ranges.place(owner)
        if data.nbytes == nbytes:
            self._compare(owner, crc32(data))
        else:
            self._sums.setdefault(owner, Sums()).add(start - first, data)

    def finish(self) -> None:
        """Compare the checksums of ranges that came in parts."""
        for owner, sums in sorted(self._sums.items()):
            self._compare(owner, sums.crc32())

    def _compare(self, owner: int, crc: int) -> None:
        if crc != self._recorded.item(owner):
            raise self._reads.damaged(owner, crc)
