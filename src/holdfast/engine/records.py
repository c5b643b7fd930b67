"""Whole records to memory that somebody else owns: the storages of a torch file, thousands of small ones or a few large.

    file      │ a a │ b │ c c c c c c c c c … c c c │ d │ e │
    reads     └─ joined ─┘└── c ──┘└── c ──┘└── c ──┘└ joined ┘

A sink with an address for each record. Small neighbours are read together and copied out; a large one is read straight to its
place, a block of the file at a time. A recorded CRC-32 is compared with the one of the bytes that came.

Lighter than a read plan (strips.py): a record has no shape, and to make a tensor, a request and a strip for each of fifty thousand
would take longer than to read them.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from holdfast.core.crc import Sums, crc32, have_crcs
from holdfast.core.protocols import Store
from holdfast.core.runtime import memory_at
from holdfast.engine.transfer import Sink, Straight, transfer
from holdfast.errors import Corrupted, located
from holdfast.plan.coalesce import RECORDS, join_parts

FEW_RECORDS = 16
"""Records that are read one by one where they are short as well: to plan for them takes a tenth of a millisecond."""

FEW_NBYTES = 1 << 20
"""What such records have in all."""


UNKNOWN = -1
"""In the place of a checksum: there is none to compare."""


class RecordRead(NamedTuple):
    """One record and where it goes. A tuple, since there are tens of thousands of them."""

    start: int
    """First byte in the file."""
    nbytes: int
    address: int
    """First byte in memory. Whoever asks keeps the memory alive."""
    crc32: int | None
    """The checksum that is recorded, or None."""
    label: str


def read_records(store: Store, key: str, records: Sequence[RecordRead], *, threads: int, verify: bool = True) -> int:
    """Read every record to its place; how many bytes were read. Raises `Corrupted` for one whose checksum does not match."""
    if len(records) <= FEW_RECORDS and sum(record.nbytes for record in records) <= FEW_NBYTES:
        for record in records:
            out = memory_at(record.address, record.nbytes)
            with located(tensor=record.label):
                store.read(key, record.start, out)
            if verify and record.crc32 is not None:
                _compare(record, crc32(out), key)
        return sum(record.nbytes for record in records)
    sink = Records(key, records, verify=verify)
    transfer([(store, sink.parts, sink)], threads, nbytes=RECORDS.block, step=RECORDS.block)
    sink.finish()
    return sink.parts.nbytes


class Records(Sink):
    """Records of one file, cut where its blocks end."""

    def __init__(self, key: str, records: Sequence[RecordRead], *, verify: bool) -> None:
        self._records = records
        first, nbytes, places, crcs, _ = zip(*records, strict=True) if records else ((),) * 5
        starts, lengths, addresses = (np.array(column, np.int64) for column in (first, nbytes, places))
        sums = np.array([crc if verify and crc is not None else UNKNOWN for crc in crcs], np.int64)
        self.parts = join_parts(key, starts, starts + lengths, RECORDS)
        owners = self.parts.owners
        self._addresses = addresses[owners] + self.parts.begins - starts[owners]
        self._crcs = sums[owners]
        """Of the records that the parts are of, or `UNKNOWN`."""
        self._whole = self.parts.ends - self.parts.begins == lengths[owners]
        self._sums: dict[int, Sums] = {}
        """Of records that come in several pieces, by their number."""

    def name(self, number: int) -> str:
        return self._records[int(self.parts.owners[self.parts.heads[number]])].label

    def straight(self, first: int, last: int) -> Straight:
        heads = self.parts.heads[first : last + 1]
        return Straight(np.where(np.diff(heads) == 1, self._addresses[heads[:-1]], 0), self._crcs[heads[:-1]] != UNKNOWN)

    def passed(self, number: int, start: int, data: memoryview) -> None:
        self._sum(int(self.parts.owners[self.parts.heads[number]]), start, data)

    def take(self, number: int, data: memoryview) -> None:
        origin, parts = int(self.parts.starts[number]), self.parts
        span = slice(*parts.heads[number : number + 2].tolist())
        begins, ends, crcs = parts.begins[span], parts.ends[span], self._crcs[span]
        known = (crcs != UNKNOWN) & self._whole[span]
        # Whole records by one call; only where one is damaged each of them, to say which.
        good = have_crcs(data, (begins[known] - origin).tolist(), (ends[known] - origin).tolist(), crcs[known].tolist())
        for part in np.flatnonzero((crcs != UNKNOWN) & ~(known & good)).tolist():
            begin = begins.item(part)
            self._sum(int(parts.owners[span][part]), begin, data[begin - origin : ends.item(part) - origin])
        sources = begins + (np.frombuffer(data, np.uint8).ctypes.data - origin)
        # By a map: to copy one takes less time than a turn of a loop.
        deque(map(ctypes.memmove, self._addresses[span].tolist(), sources.tolist(), (ends - begins).tolist()), maxlen=0)

    def _sum(self, owner: int, start: int, data: memoryview) -> None:
        record = self._records[owner]
        if data.nbytes == record.nbytes:
            _compare(record, crc32(data), self.parts.key)
        else:
            self._sums.setdefault(owner, Sums()).add(start - record.start, data)

    def finish(self) -> None:
        """Compare what came in pieces."""
        for owner, sums in sorted(self._sums.items()):
            _compare(self._records[owner], sums.crc32(), self.parts.key)


def _compare(record: RecordRead, found: int, key: str) -> None:
    if found != record.crc32:
        raise Corrupted(
            f"{record.label}: the bytes do not have the checksum that the file records for them; the file is damaged",
            file=key,
            tensor=record.label,
            offset=record.start,
            expected=record.crc32,
            found=found,
        )
