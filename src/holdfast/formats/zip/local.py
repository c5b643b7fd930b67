"""Local headers and data descriptors: does each record say at its own place what the directory says about it?

    header of i         name  extra   payload of i      descriptor of i │ header of i+1 …
    │       30        │  n  │   x   │  packed (known) │   0, 16 or 24   │
    └──────────────── offset[i + 1] - offset[i] (known) ────────────────┘

The directory gives every header's offset and every payload's length. Records must lie end to end, so what is left of a
record beside its payload, its name and the 30 bytes is the room for its extra field and its descriptor. Hence:

1. Compute each record's room (they are sorted by offset); negative means overlap, more than an extra field means a gap.
2. Plan reads: for each record its header and up to 24 bytes before it, where the descriptor of the record before lies.
   Neighbours are joined into blocks. Payloads are not read, apart from small ones between joined neighbours.
3. Read block after block; when some megabytes are together, check all their headers at once, column by column.

What writers do, beside the plain case of equal fields:

    torch     described:  crc and sizes 0, descriptor after the payload; sizes 0 even beside a zip64 block of
                          [size, 0] if size >= 0xFFFFFFFF, then [offset] if offset >= 0xFFFFFFFF
              empty:      not described, no descriptor; zip64 block [offset] as above
    CPython   seekable:   true fields, or both sizes saturated and a zip64 block [size, packed]
              stream:     described, fields 0, or sizes saturated and a zip64 block [0, 0]

In all of them the descriptor is 24 bytes long if the local header has a zip64 block and 16 bytes if it has none.
"""

from __future__ import annotations

import numpy as np

from holdfast.core.protocols import Source
from holdfast.formats.zip.directory import Entries
from holdfast.formats.zip.extra import LOCAL_BLOCKS, find_zip64
from holdfast.formats.zip.layout import (
    DESCRIBED,
    DESCRIPTOR_SIGNATURE,
    LOCAL,
    LOCAL_SIGNATURE,
    MAX16,
    MAX32,
    NARROW,
    WIDE,
    Bools,
    Ints,
    Places,
    gather,
    refused,
)
from holdfast.plan.coalesce import Policy, coalesce

__all__ = ["locate_payloads"]

JOIN = Policy(free_gap=16 << 10, max_gap=16 << 10, block=1 << 20)
"""A read call from Python takes about as long as copying 16 KiB, and a disk gives them for the price of one page."""

BATCH_NBYTES = 4 << 20
"""Bytes that are checked together: enough to make the cost of a numpy call vanish, and little memory."""

VALUE = np.dtype([("value", "<u8")])


def locate_payloads(source: Source, entries: Entries, directory: int, *, key: str, start: int) -> Ints:
    """Check every local header and descriptor; give where each payload begins, counted from the archive's start.

    `directory` is where the central directory begins, counted from `start`, the archive's place in the file.
    """
    count = len(entries.offsets)
    edges = np.append(entries.offsets, directory)
    if edges[0] != 0:
        raise refused(f"{edges[0]} bytes before the first record", key=key, offset=start, found=int(edges[0]))
    fixed = LOCAL.itemsize + np.fromiter(map(len, entries.raw_names), np.int64, count)
    rooms = edges[1:] - edges[:-1] - entries.packed - fixed
    headers = Places(key, entries.offsets + start)
    headers.require(rooms >= 0, "a record that overlaps the next or the directory")
    headers.require(rooms <= MAX16 + WIDE.itemsize, "bytes that belong to no record after this one")

    # One range more than there are records: the descriptor of the last lies before the directory.
    starts = np.maximum(edges - WIDE.itemsize, 0)
    stops = edges + np.append(fixed + np.minimum(rooms, MAX16), 0)
    groups = np.append(coalesce(starts, stops, JOIN), count + 1).tolist()
    firsts, lasts = starts[groups[:-1]].tolist(), stops[np.array(groups[1:]) - 1].tolist()
    check = _Check(entries, edges, fixed, rooms, key=key, start=start)
    pieces: list[bytes] = []
    held, done = 0, 0
    for group, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
        pieces.append(source.bytes(key, start + first, start + last))
        check.shifts[groups[group] : groups[group + 1]] = held - first
        held += last - first
        if held >= BATCH_NBYTES or group == len(firsts) - 1:
            check.batch(b"".join(pieces), done, groups[group + 1])
            held, done = 0, groups[group + 1]
            pieces.clear()
    return check.payloads


class _Check:
    """What is known about all records while the batches go by."""

    def __init__(self, entries: Entries, edges: Ints, fixed: Ints, rooms: Ints, *, key: str, start: int) -> None:
        self.entries, self.edges, self.fixed, self.rooms = entries, edges, fixed, rooms
        self.key, self.start = key, start
        self.shifts = np.zeros(len(edges), np.int64)
        """Position in the batch minus offset in the archive, for each range."""
        self.payloads = np.zeros(len(fixed), np.int64)
        self.widths = np.zeros(len(fixed), np.int64)
        """Bytes of each record's descriptor."""

    def batch(self, raw: bytes, first: int, stop: int) -> None:
        """Check the headers of ranges `first` to `stop`, and the descriptors that lie before those headers."""
        self._headers(raw, slice(first, min(stop, len(self.payloads))))
        self._descriptors(raw, np.arange(max(first, 1), stop) - 1)

    def _headers(self, raw: bytes, rows: slice) -> None:
        entries = self.entries
        offsets = entries.offsets[rows]
        headers = Places(self.key, offsets + self.start)
        positions = offsets + self.shifts[:-1][rows]
        fields = gather(raw, positions, LOCAL)
        headers.require(fields["signature"] == LOCAL_SIGNATURE, "no local header where the directory says")
        headers.require(fields["flags"] == entries.flags[rows], "two different sets of flags for one record")
        headers.require(fields["method"] == entries.methods[rows], "two different methods for one record")
        names = entries.raw_names[rows]
        same = np.fromiter(
            (raw.startswith(name, at) for name, at in zip(names, (positions + LOCAL.itemsize).tolist(), strict=True)),
            np.bool_,
            len(names),
        )
        fixed = self.fixed[rows]
        same &= fields["name_nbytes"] == fixed - LOCAL.itemsize
        headers.require(same, "two different names for one record")
        extra = fields["extra_nbytes"].astype(np.int64)
        headers.require(extra <= self.rooms[rows], "an extra field that reaches into the payload")
        starts = positions + fixed
        bodies, nbytes = find_zip64(raw, starts, starts + extra, known=LOCAL_BLOCKS, places=headers)
        described = entries.flags[rows] & DESCRIBED != 0
        good = _consistent(raw, fields, entries, rows, bodies, nbytes)
        headers.require(good, "two different checksums or sizes for one record")
        widths = np.where(described, np.where(bodies >= 0, WIDE.itemsize, NARROW.itemsize), 0)
        left = self.rooms[rows] - extra
        headers.require(left >= widths, "no room for a record's data descriptor")
        headers.require(left == widths, "bytes that belong to no record after this one")
        self.payloads[rows] = offsets + fixed + extra
        self.widths[rows] = widths

    def _descriptors(self, raw: bytes, rows: Ints) -> None:
        for dtype in (NARROW, WIDE):
            chosen = rows[self.widths[rows] == dtype.itemsize]
            ends = self.edges[chosen + 1]
            fields = gather(raw, ends + self.shifts[chosen + 1] - dtype.itemsize, dtype)
            good = (
                (fields["signature"] == DESCRIPTOR_SIGNATURE)
                & (fields["crc"] == self.entries.crcs[chosen])
                & (fields["packed"] == self.entries.packed[chosen].astype(np.uint64))
                & (fields["size"] == self.entries.sizes[chosen].astype(np.uint64))
            )
            offsets = ends - dtype.itemsize + self.start
            Places(self.key, offsets).require(good, "a data descriptor that disagrees with the directory")


def _consistent(raw: bytes, fields: np.ndarray, entries: Entries, rows: slice, bodies: Ints, nbytes: Ints) -> Bools:
    """Whether checksum and sizes of local headers are one of the forms in the module's docstring."""
    crcs, sizes, packed, offsets = entries.crcs[rows], entries.sizes[rows], entries.packed[rows], entries.offsets[rows]
    described = entries.flags[rows] & DESCRIBED != 0
    wide = bodies >= 0
    zeros = (fields["size"] == 0) & (fields["packed"] == 0)
    equal = (fields["size"] == sizes) & (fields["packed"] == packed)
    small = (sizes < MAX32) & (packed < MAX32)
    good: Bools = ~wide & small & (equal | (described & zeros))
    if wide.any():
        values = np.zeros((3, len(bodies)), np.int64)
        for column in range(3):
            there = nbytes >= 8 * (column + 1)
            # Past 2^63 these wrap to negative numbers, which equal nothing that they are compared with.
            values[column, there] = gather(raw, bodies[there] + 8 * column, VALUE)["value"].astype(np.int64)
        saturated = (fields["size"] == MAX32) & (fields["packed"] == MAX32)
        told = (values[0] == sizes) & (values[1] == packed)
        untold = described & (values[0] == 0) & (values[1] == 0)
        standard = saturated & (nbytes == 16) & (told | untold)
        large, far = sizes >= MAX32, offsets >= MAX32
        torch = zeros & (described | (sizes == 0)) & (nbytes > 0) & (nbytes == 16 * large + 8 * far)
        torch &= ~large | ((values[0] == sizes) & (values[1] == 0))
        torch &= ~far | (np.where(large, values[2], values[0]) == offsets)
        good |= wide & (standard | torch)
    good &= (fields["crc"] == crcs) | (described & (fields["crc"] == 0))
    return good
