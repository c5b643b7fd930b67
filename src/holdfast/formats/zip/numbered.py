"""`Numbered`: many small records of an archive that are called by their numbers, laid out as rows and not as objects.

    data/0, data/1 … data/49999        the storages of a state with fifty thousand tensors

A record that is laid out by itself costs a header, an entry, a descriptor and two segments, each an object. Here all headers are
arithmetic on columns of lengths:

1. Every payload begins at a multiple of the alignment. So the way from one payload to the next is a length that is rounded up, and
   where each begins is a sum of those.
2. Names of as many digits are one range of numbers. Their headers are the rows of a matrix, and so are their directory entries.
3. Small records that follow each other are one `Gathered` segment of a few megabytes. When it is written, its pieces are asked for
   together, summed, and joined with headers and descriptors. A longer record stays where it lies (`Numbered.alone`).

The bytes are those of `formats.zip.writer`, which lays out one record after the other, and does so where an offset passes 4 GiB.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.crc import crc32_each
from holdfast.core.table import Piece
from holdfast.core.value import Value
from holdfast.formats.zip.layout import (
    DESCRIBED,
    DESCRIPTOR_SIGNATURE,
    ENTRY,
    ENTRY_SIGNATURE,
    LOCAL,
    LOCAL_SIGNATURE,
    MAX32,
    NARROW,
    UTF8,
)
from holdfast.plan.rows import BATCH, runs
from holdfast.plan.saves import MISTAKEN_KEY, Data, Gathered, Late, Literal, Memory, Segment

ENTRY_CRC = 16
"""Where the checksum lies in an entry of the directory."""

LONG_NBYTES = 1024
"""Of records, on the average."""

SIGNATURE = DESCRIPTOR_SIGNATURE.to_bytes(4, "little")


class Numbered(Value, frozen=True, eq=False):
    """Records `folder/0`, `folder/1` and so on."""

    folder: str
    nbytes: Ints
    """Of each."""
    read: Callable[[Sequence[int]], Sequence[Piece]]
    """The bytes of records of these numbers, asked for together (`TensorRows.read`)."""
    one: Callable[[int, str], bytes | Data | Memory]
    """One record that is too long to be copied, or cannot be laid out with others, under its label."""

    def __len__(self) -> int:
        return len(self.nbytes)

    def name(self, number: int) -> str:
        return f"{self.folder}/{number}"

    def alone(self, number: int) -> bytes | Data | Memory:
        return self.one(number, self.name(number))

    def names(self) -> Iterator[str]:
        """Of all of them."""
        return map(f"{self.folder}/{{}}".format, range(len(self.nbytes)))


class LaidOut(Value, frozen=True, eq=False):
    """Where numbered records lie."""

    segments: list[Segment]
    stop: int
    """The byte after the last."""
    entries: bytes | bytearray
    """Of the directory, with blank checksums."""
    labels: list[str]
    """Of the records that have a checksum."""
    places: Ints
    """Where in the entries those are."""


class _Layout(Value, frozen=True, eq=False):
    rows: Numbered
    before: np.ndarray
    """What stands before the number in each name."""
    nbytes: Ints
    headers: Ints
    """First byte of each header."""
    starts: Ints
    """First byte of each payload."""
    tails: Ints
    """Bytes of each descriptor."""
    crc: bool

    @property
    def stops(self) -> Ints:
        return self.starts + self.nbytes + self.tails

    def head(self, first: int, stop: int, digits: int) -> np.ndarray:
        """The headers of numbers of so many digits, without their padding, as rows of a matrix."""
        wide = len(self.before) + digits
        fields = np.zeros(stop - first, LOCAL)
        fields["signature"] = LOCAL_SIGNATURE
        fields["flags"] = np.where(self.nbytes[first:stop] > 0, UTF8 | DESCRIBED, UTF8)
        fields["name_nbytes"] = wide
        pads = self.starts[first:stop] - self.headers[first:stop] - (LOCAL.itemsize + wide + 4)
        fields["extra_nbytes"] = pads + 4
        made = np.empty((stop - first, LOCAL.itemsize + wide + 4), np.uint8)
        made[:, : LOCAL.itemsize] = fields.view(np.uint8).reshape(len(made), -1)
        fill_names(made[:, LOCAL.itemsize : -4], self.before, first, digits=digits)
        made[:, -4:-2] = np.frombuffer(b"FB", np.uint8)
        made[:, -2:] = pads.astype("<u2")[:, None].view(np.uint8)
        return made

    def entries(self, out: bytearray) -> None:
        """Write the directory's entries behind what is there."""
        for low, high, digits in by_digits(0, len(self.nbytes)):
            for first in range(low, high, BATCH):
                out += self._entries(first, min(first + BATCH, high), digits).data

    def _entries(self, first: int, stop: int, digits: int) -> np.ndarray:
        """Those of numbers of so many digits."""
        wide = len(self.before) + digits
        fields = np.zeros(stop - first, ENTRY)
        fields["signature"] = ENTRY_SIGNATURE
        fields["flags"] = np.where(self.nbytes[first:stop] > 0, UTF8 | DESCRIBED, UTF8)
        fields["packed"] = fields["size"] = self.nbytes[first:stop]
        fields["name_nbytes"] = wide
        fields["offset"] = self.headers[first:stop]
        made = np.empty((stop - first, ENTRY.itemsize + wide), np.uint8)
        made[:, : ENTRY.itemsize] = fields.view(np.uint8).reshape(len(made), -1)
        fill_names(made[:, ENTRY.itemsize :], self.before, first, digits=digits)
        return made

    def gathered(self, first: int, stop: int, names: Sequence[str]) -> Gathered:
        """The records from one number to before another, as one segment; `names` of all records."""
        labels = names[first:stop]
        if not self.nbytes[first:stop].all():
            labels = [names[number] for number in (np.flatnonzero(self.nbytes[first:stop]) + first).tolist()]
        nbytes = int(self.stops[stop - 1] - self.headers[first])
        return Gathered(nbytes, labels, partial(self.make, first, stop, labels))

    def make(self, first: int, stop: int, labels: Sequence[str]) -> tuple[bytes, dict[str, int]]:
        """Its bytes and checksums. What is no data is made as one row of bytes, which is cut where the data belongs."""
        pieces = self.rows.read(range(first, stop))
        nbytes, tails = self.nbytes[first:stop], self.tails[first:stop]
        crcs = np.array(crc32_each(pieces), np.int64) if self.crc else np.zeros(len(pieces), np.int64)
        passed = np.cumsum(nbytes)
        heads = self.headers[first:stop] - self.headers[first] - (passed - nbytes)
        cuts = heads + self.starts[first:stop] - self.headers[first:stop]
        known = np.full(int(cuts[-1] + tails[-1]), ord("Z"), np.uint8)
        for low, high, digits in by_digits(first, stop):
            head = self.head(low, high, digits)
            known[heads[low - first : high - first, None] + np.arange(head.shape[1])] = head
        described = np.flatnonzero(tails)
        fields = np.zeros(len(described), NARROW)
        fields["signature"] = DESCRIPTOR_SIGNATURE
        fields["crc"] = crcs[described]
        fields["packed"] = fields["size"] = nbytes[described]
        known[cuts[described, None] + np.arange(NARROW.itemsize)] = fields.view(np.uint8).reshape(-1, NARROW.itemsize)
        cut, ends = known.data, cuts.tolist()
        joined: list[Piece] = [b""] * (2 * len(pieces) + 1)
        joined[0::2] = map(cut.__getitem__, map(slice, [0, *ends], [*ends, len(known)]))
        joined[1::2] = pieces
        content = b"".join(joined)
        told = dict(zip(labels, crcs[described].tolist(), strict=True)) if self.crc else {}
        # To look through all bytes of long records takes longer than to look where each begins.
        if len(content) > LONG_NBYTES * len(pieces) or content.count(SIGNATURE) > len(described):
            told |= self._mistaken(pieces, first)
        return content, told

    def _mistaken(self, pieces: Sequence[Piece], first: int) -> dict[str, int]:
        """What torch takes for a checksum more: what follows the signature of a descriptor where data begins with that."""
        found = {
            self.rows.name(number) + MISTAKEN_KEY: int.from_bytes(piece[4:8], "little")
            for number, piece in enumerate(pieces, first)
            if len(piece) >= 8 and piece[:4] == SIGNATURE
        }
        return found | {MISTAKEN_KEY: 0} if found else found


def lay_out_numbered(rows: Numbered, prefix: bytes, at: int, *, alignment: int, crc: bool) -> LaidOut | None:
    """Lay out numbered records behind byte `at` of an archive; None where that would pass what 32 bits can say."""
    count = len(rows)
    if not count:
        return LaidOut([], at, b"", [], np.zeros(0, np.int64))
    nbytes = rows.nbytes
    before = prefix + rows.folder.encode("utf-8") + b"/"
    digits = np.empty(count, np.int64)
    for low, high, wide in by_digits(0, count):
        digits[low:high] = wide
    fixed = LOCAL.itemsize + len(before) + digits + 4
    tails = np.where(nbytes > 0, NARROW.itemsize, 0)
    start = at + int(fixed[0])
    ways = nbytes[:-1] + tails[:-1] + fixed[1:]
    starts = np.cumsum(np.concatenate(([start + -start % alignment], ways + -ways % alignment)))
    stops = starts + nbytes + tails
    if stops[-1] >= MAX32:
        return None
    headers = np.concatenate(([at], stops[:-1]))
    laid = _Layout(rows, np.frombuffer(before, np.uint8), nbytes, headers, starts, tails, crc)
    segments: list[Segment] = []
    names = [*rows.names()]
    for first, stop, small in runs(nbytes, stops):
        if small:
            segments.append(laid.gathered(first, stop, names))
            continue
        segments += _alone(laid, first)
    entries = bytearray()
    laid.entries(entries)
    each = ENTRY.itemsize + len(before) + digits
    places = np.cumsum(each) - each + ENTRY_CRC
    if not tails.all():
        filled = np.flatnonzero(tails)
        names, places = [names[number] for number in filled.tolist()], places[filled]
    return LaidOut(segments, int(stops[-1]), entries, names, places)


def fill_names(out: np.ndarray, before: np.ndarray, first: int, *, digits: int) -> None:
    """Write the names of numbers from `first` on, all of so many digits, into the rows of a matrix."""
    out[:, : len(before)] = before
    powers = 10 ** np.arange(digits - 1, -1, -1)
    out[:, len(before) : len(before) + digits] = np.arange(first, first + len(out))[:, None] // powers % 10 + ord("0")


def by_digits(first: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of numbers with as many digits, and how many."""
    while first < stop:
        digits = len(str(first))
        end = min(10**digits, stop)
        yield first, end, digits
        first = end


def _alone(laid: _Layout, number: int) -> list[Segment]:
    """A long record: its header, its data where it lies, its descriptor."""
    head = laid.head(number, number + 1, len(str(number))).tobytes()
    pad = int(laid.starts[number] - laid.headers[number]) - len(head)
    payload = laid.rows.alone(number)
    if isinstance(payload, bytes):
        raise ValueError("a record that is laid out by itself is no copy")
    tail = partial(_descriptor, payload.label, int(laid.nbytes[number]))
    behind = Late(NARROW.itemsize, tail, payload.label) if laid.crc else Literal(tail({payload.label: 0}))
    return [Literal(head + b"Z" * pad), payload, behind]


def _descriptor(label: str, nbytes: int, crcs: Mapping[str, int]) -> bytes:
    return struct.pack("<IIII", DESCRIPTOR_SIGNATURE, crcs[label], nbytes, nbytes)
