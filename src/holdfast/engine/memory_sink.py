"""Ranges of files to memory that somebody else owns: storages of a torch file, tensors of a model.

A sink with an address for each range. Short neighbours are read together and copied out; a long range is read straight to its
place, a block of the file at a time. A recorded CRC-32 is compared with the one of the bytes that came.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from holdfast.core.arrays import Ints, listed
from holdfast.core.crc import Sums, crc32, have_crcs
from holdfast.core.protocols import Store
from holdfast.core.runtime import memory_at
from holdfast.core.table import Column
from holdfast.core.value import Value
from holdfast.engine.coalesce import RECORDS, Parts, Policy, Ranges, join_files
from holdfast.engine.transfer import INLINE_NBYTES, Sink, Straight, transfer
from holdfast.errors import Corrupted, HoldfastError, located

UNKNOWN = -1  # In the place of a checksum: there is none to compare.
Place = tuple[
    int, int, int, int
]  # First byte in the file, length, address in memory, and CRC-32 or `UNKNOWN`.


class MemoryRanges(Value, frozen=True, eq=False):
    """Ranges of files, and where in memory each goes. Whoever asks keeps the memory alive."""

    keys: Sequence[str]
    columns: tuple[Column, Column, Column, Column, Column]
    """Of each range the file as a position in `keys`, the first byte, the length, the address, and the CRC-32 that the file records
    of it, or `UNKNOWN`."""
    name: Callable[[int], str]
    """What a range is called in messages, by its number."""
    damaged: Callable[[int, int], Corrupted]
    """What to raise for a range that has another checksum: its number, and the checksum that was found."""

    @classmethod
    def of_file(
        cls,
        key: str,
        places: Sequence[Place],
        name: Callable[[int], str],
        damaged: Callable[[int, int], Corrupted],
    ) -> MemoryRanges:
        starts, nbytes, addresses, crcs = zip(*places, strict=True) if places else ((),) * 4
        return cls([key], ((0,) * len(places), starts, nbytes, addresses, crcs), name, damaged)


def read_to_memory(
    store: Store,
    wanted: MemoryRanges,
    *,
    threads: int,
    verify: bool = True,
    policy: Policy = RECORDS,
) -> int:
    """Read every range to its place; how many bytes were read. Raises `damaged` for the first whose checksum does not match."""
    if store.medium.resident and (total := sum(listed(wanted.columns[2]))) < INLINE_NBYTES:
        _copy(store, wanted, verify=verify)
        return total
    files, starts, nbytes, addresses, crcs = (
        np.asarray(column, np.int64) for column in wanted.columns
    )
    ranges = Ranges(wanted.keys, files, starts, nbytes)
    compared = crcs if verify else np.full(len(crcs), UNKNOWN, np.int64)
    sinks = [
        MemorySink(wanted, ranges, parts, addresses=addresses, crcs=compared)
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


def _copy(store: Store, wanted: MemoryRanges, *, verify: bool) -> None:
    """Ranges of a store that is memory itself: each is copied as it is, and there is nothing to join."""
    keys, read = wanted.keys, store.read
    for number, (file, start, nbytes, address, crc) in enumerate(
        zip(*map(listed, wanted.columns), strict=True)
    ):
        out = memory_at(address, nbytes)
        try:
            read(keys[file], start, out)
        except HoldfastError as error:
            with located(tensor=wanted.name(number)):
                raise error
        if verify and crc != UNKNOWN and (found := crc32(out)) != crc:
            raise wanted.damaged(number, found)


class MemorySink(Sink):
    """Ranges of one file, cut where its blocks end."""

    def __init__(
        self, wanted: MemoryRanges, ranges: Ranges, parts: Parts, *, addresses: Ints, crcs: Ints
    ) -> None:
        self._wanted, self._ranges, self.parts = wanted, ranges, parts
        owners = parts.owners
        self._addresses = addresses[owners] + parts.begins - ranges.starts[owners]
        self._crcs = crcs[owners]
        self._recorded = crcs
        self._whole = parts.ends - parts.begins == ranges.nbytes[owners]
        self._sums: dict[int, Sums] = {}

    def name(self, number: int) -> str:
        return self._wanted.name(int(self.parts.owners[self.parts.heads[number]]))

    def straight(self, first: int, last: int) -> Straight:
        heads = self.parts.heads[first : last + 1]
        return Straight(
            np.where(heads[1:] - heads[:-1] == 1, self._addresses[heads[:-1]], 0),
            self._crcs[heads[:-1]] != UNKNOWN,
        )

    def passed(self, number: int, start: int, data: memoryview) -> None:
        self._sum(int(self.parts.owners[self.parts.heads[number]]), start, data)

    def take(self, number: int, data: memoryview) -> None:
        origin, parts = int(self.parts.starts[number]), self.parts
        span = slice(*parts.heads[number : number + 2].tolist())
        begins, ends, crcs = parts.begins[span], parts.ends[span], self._crcs[span]
        known = (crcs != UNKNOWN) & self._whole[span]
        # Whole ranges by one call; only where one is damaged each of them, to say which.
        good = have_crcs(
            data,
            (begins[known] - origin).tolist(),
            (ends[known] - origin).tolist(),
            crcs[known].tolist(),
        )
        for part in ((crcs != UNKNOWN) & ~(known & good)).nonzero()[0].tolist():
            begin = begins.item(part)
            self._sum(
                int(parts.owners[span][part]),
                begin,
                data[begin - origin : ends.item(part) - origin],
            )
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

    def _sum(self, owner: int, start: int, data: memoryview) -> None:
        _, first, nbytes = self._ranges.place(owner)
        if data.nbytes == nbytes:
            self._compare(owner, crc32(data))
        else:
            self._sums.setdefault(owner, Sums()).add(start - first, data)

    def finish(self) -> None:
        for owner, sums in sorted(self._sums.items()):
            self._compare(owner, sums.crc32())

    def _compare(self, owner: int, found: int) -> None:
        if found != self._recorded.item(owner):
            raise self._wanted.damaged(owner, found)
