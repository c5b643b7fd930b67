"""Lay out a stored zip exactly as torch's writer does: strictly forward, never patched, every payload aligned.

    │ header  30 │ prefix/name │ zip64 │ FB pad ZZZ… │ payload │ descriptor │   for each record
    │ entry   46 │ prefix/name │ zip64 │                                        for each record: the central directory
    │ zip64 end 56 │ locator 20 │ end 22 │

1. A header says neither checksum nor sizes, since its writer does not know them yet: flags 0x0808, and a descriptor (`PK\\7\\8`,
   CRC-32, size, size) behind the payload. An empty record has flags 0x0800 and no descriptor.
2. The padding block (`F` `B`, a 16-bit length, that many `Z`) makes the payload begin at a multiple of the alignment.
3. A zip64 block appears when the size or the header's offset is 0xFFFFFFFF or more: [size, 0] if the size is, then [offset] if the
   offset is. The directory has [size, size] in its place. A record with such a block has a descriptor with 64-bit sizes.

Everything but the checksums is known here, so a record of data costs two segments: the `Data`, and a `Late` with its
descriptor and all that is known up to the next data. The last `Late` is the central directory, made beforehand with blank
checksums, which are filled in together.

Many records that are called by their numbers come as one `RecordFolder`:

    data/0, data/1 … data/49999        the storages of a state with fifty thousand tensors

A record that is laid out by itself costs a header, an entry, a descriptor and two segments, each an object. Small ones that follow
each other are laid out by arithmetic on columns of lengths (`_Stretch`):

1. Every payload begins at a multiple of the alignment. So the way from one payload to the next is a length that is rounded up, and
   where each begins is a sum of those.
2. Names of as many digits are one range of numbers. Their headers are the rows of a matrix, and so are their directory entries.
3. A few megabytes of them are one `Gathered` segment. When it is written, its pieces are asked for together, summed, and joined
   with headers and descriptors. A longer record, or one that is read by itself, stays where it lies.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Protocol

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.crc import crc32, crc32_each
from holdfast.core.value import Value
from holdfast.formats.zip.layout import (
    DESCRIBED,
    DESCRIPTOR_SIGNATURE,
    ENTRY_SIGNATURE,
    LOCAL_SIGNATURE,
    MAX16,
    MAX32,
    NARROW,
    UTF8,
    WIDE,
)
from holdfast.formats.zip.layout import ENTRY as ENTRY_FIELDS
from holdfast.formats.zip.layout import LOCAL as LOCAL_FIELDS
from holdfast.plan import saves as blocks
from holdfast.plan.saves import MISTAKEN_KEY, Data, Gathered, Hole, Late, Literal, Memory, Segment

Payload = bytes | Data | Memory | Hole | Late
"""What a record holds. A `Hole` has a checksum of 0, as torch's `skip_data` leaves it.

A `Late` one is known when the checksums of all records before it are; it stands last."""

ENTRY_CRC = 16
"""Where the checksum lies in an entry of the directory."""

LONG_NBYTES = 1024
"""Of records, on the average."""

SIGNATURE = DESCRIPTOR_SIGNATURE.to_bytes(4, "little")


class RecordBytes(Protocol):
    """The bytes of numbered records, as a table has them (`core.table.Storages`)."""

    @property
    def nbytes(self) -> Ints:
        """Of each record."""

    def read(self, numbers: Sequence[int]) -> Sequence[bytes | memoryview]:
        """The bytes of records of these numbers, all of them together."""

    def alone(self, number: int, label: str) -> bytes | Data | Memory:
        """The bytes of one record under a label, where they lie."""


class RecordFolder(Value, frozen=True, eq=False):
    """Records `folder/0`, `folder/1` and so on."""

    folder: str
    content: RecordBytes
    apart: Collection[int] = ()
    """Records that are read by themselves, however short they are."""

    def __len__(self) -> int:
        return len(self.content.nbytes)

    def name(self, number: int) -> str:
        return f"{self.folder}/{number}"

    def stands_alone(self) -> Ints:
        """The numbers of records that are laid out by themselves."""
        alone = self.content.nbytes > blocks.SMALL_NBYTES
        if self.apart:
            alone[[*self.apart]] = True
        return np.flatnonzero(alone)


Records = Sequence[tuple[str, Payload] | RecordFolder]
"""What an archive holds, in this order."""

MAX_ALIGNMENT = MAX16 - 31
"""The padding is an extra field, whose length has 16 bits; 4 bytes of it begin the block and 28 may be a zip64 block.

torch 2.13 accepts more, and writes a file that it cannot read."""

HEADER = struct.Struct("<I5H3I2H")
ENTRY = struct.Struct("<I6H3I5H2I")
SHORT_DESCRIPTOR = struct.Struct("<IIII")
LONG_DESCRIPTOR = struct.Struct("<IIQQ")
ZIP64_END = struct.Struct("<IQ2H2I4Q")
LOCATOR = struct.Struct("<IIQI")
END = struct.Struct("<I4H2IH")

MADE_BY, NEEDED = 0x031E, 0x002D
"""Unix, version 3.0; readers need version 4.5, which has zip64. In the end record only: elsewhere torch writes 0."""


class Descriptor:
    """The bytes behind a payload: its data descriptor, then what is known. Called with the checksums, as a `Late` is."""

    __slots__ = ("behind", "label", "nbytes", "pack")

    def __init__(self, label: str, nbytes: int, *, wide: bool, behind: bytes) -> None:
        self.label = label
        """The one `Data` segment whose checksum is needed."""
        self.nbytes = nbytes
        self.pack = (LONG_DESCRIPTOR if wide else SHORT_DESCRIPTOR).pack
        self.behind = behind

    def __call__(self, crcs: Mapping[str, int]) -> bytes:
        return self.pack(DESCRIPTOR_SIGNATURE, crcs[self.label], self.nbytes, self.nbytes) + self.behind


class Ending:
    """The bytes from a late last payload, or from the central directory, to the end of the file."""

    __slots__ = ("blank", "crc", "labels", "payload", "places", "wide")

    def __init__(self, blank: bytes, *, labels: list[str], places: array[int], crc: bool) -> None:
        self.blank = blank
        """The directory and the end records, with checksums of 0 where data or a late payload is meant."""
        self.labels = labels
        self.places = np.array(places, np.int64)
        """Where in `blank` the checksums are, in the order of the labels; that of a late payload comes last."""
        self.crc = crc
        self.payload: Late | None = None
        self.wide = False

    @property
    def nbytes(self) -> int:
        if self.payload is None:
            return len(self.blank)
        return len(self.blank) + self.payload.nbytes + _descriptor_nbytes(self.payload.nbytes, wide=self.wide)

    def __call__(self, crcs: Mapping[str, int]) -> bytes:
        found = list(map(crcs.__getitem__, self.labels if self.crc else ()))
        before = b""
        if self.payload is not None:
            before = self.payload.make(crcs)
            if len(before) != self.payload.nbytes:
                raise ValueError(f"a late payload of {self.payload.nbytes} bytes was made with {len(before)}")
            own = crc32(before) if self.crc else 0
            if self.crc and before:
                found.append(own)
            if before:
                before += (LONG_DESCRIPTOR if self.wide else SHORT_DESCRIPTOR).pack(
                    DESCRIPTOR_SIGNATURE, own, len(before), len(before)
                )
        if not found:
            return before + self.blank
        whole = bytearray().join((before, self.blank))
        filled, sums = np.frombuffer(whole, np.uint8), np.array(found, np.int64).astype("<u4").view(np.uint8).reshape(-1, 4)
        for byte in range(4):
            filled[self.places + (len(before) + byte)] = sums[:, byte]
        return bytes(whole)


def lay_out_zip(prefix: str, records: Records, *, alignment: int = 64, crc: bool = True) -> tuple[Segment, ...]:
    """The segments of an archive with these records, in this order, all under the folder `prefix`.

    A `Data` record's label is the key of its checksum. With `crc=False` every checksum field is 0, as torch's
    `set_crc32_options(False)` does. Raises `ValueError` for an alignment or a name that no reader would understand.
    """
    if not 1 <= alignment <= MAX_ALIGNMENT:
        raise ValueError(f"an alignment of {alignment}: a zip archive can pad to 1 up to {MAX_ALIGNMENT} bytes")
    folders = tuple([record.folder.casefold() + "/" for record in records if isinstance(record, RecordFolder)])
    names = [record[0].casefold() for record in records if not isinstance(record, RecordFolder)]
    if len({*names, *folders}) != len(records) or (folders and any(name.startswith(folders) for name in names)):
        raise ValueError("two records of one name (readers ignore case)")
    return _Forward(prefix, alignment=alignment, crc=crc).lay_out(records)


class _Forward:
    """One layout at work: the position in the file, and what is known since the last data."""

    def __init__(self, prefix: str, *, alignment: int, crc: bool) -> None:
        self.prefix = prefix.encode("utf-8") + b"/"
        self.alignment = alignment
        self.crc = crc
        self.at = 0
        self.segments: list[Segment] = []
        self.known: list[bytes] = []
        self.waiting: tuple[str, int, bool] | None = None
        """The label, length and width of the data whose descriptor begins what is known."""
        self.entries = bytearray()
        self.directory = 0
        """Bytes of the entries so far."""
        self.labels: list[str] = []
        self.places = array("q")
        self.count = 0
        self.late: tuple[Late, bool] | None = None

    def lay_out(self, records: Records) -> tuple[Segment, ...]:
        for record in records:
            if self.late is not None:
                raise ValueError("a late payload must be the last record")
            if isinstance(record, RecordFolder):
                self._folder(record)
            else:
                self._record(*record)
        self._flush()
        self.entries += tail(self.count, self.at, self.directory)
        blank = bytes(self.entries)
        self.entries.clear()
        ending = Ending(blank, labels=self.labels, places=self.places, crc=self.crc)
        if self.late is not None:
            ending.payload, ending.wide = self.late
        if self.labels or self.late is not None:
            self.segments.append(Late(ending.nbytes, ending))
        else:
            self._literal(ending({}))
        return tuple(self.segments)

    def _record(self, name: str, payload: Payload) -> None:
        self.count += 1
        if isinstance(payload, bytes):
            nbytes = len(payload)
            own = crc32(payload) if self.crc and nbytes else 0
            wide = self._header(name, payload, nbytes, own=own)
            self.at += nbytes + _descriptor_nbytes(nbytes, wide=wide)
            if nbytes:
                self.known += (
                    payload,
                    (LONG_DESCRIPTOR if wide else SHORT_DESCRIPTOR).pack(DESCRIPTOR_SIGNATURE, own, nbytes, nbytes),
                )
            return
        nbytes = payload.nbytes
        wide = self._header(name, payload, nbytes, own=0)
        self.at += nbytes + _descriptor_nbytes(nbytes, wide=wide)
        if isinstance(payload, Late):
            self.late = payload, wide
        elif nbytes:
            self._flush()
            self.segments.append(payload)
            if self.crc and not isinstance(payload, Hole):
                self.waiting = payload.label, nbytes, wide
            else:
                self.known.append((LONG_DESCRIPTOR if wide else SHORT_DESCRIPTOR).pack(DESCRIPTOR_SIGNATURE, 0, nbytes, nbytes))

    def _folder(self, records: RecordFolder) -> None:
        """Numbered records: each that stands alone by itself, and those between them together."""
        first = 0
        for single in [*records.stands_alone().tolist(), len(records)]:
            if first < single:
                self._stretch(records, first, single)
            if single < len(records):
                label = records.name(single)
                self._record(label, records.content.alone(single, label))
            first = single + 1

    def _stretch(self, records: RecordFolder, first: int, stop: int) -> None:
        """Small records that follow each other."""
        self._flush()
        laid = _Stretch.lay_out(records, first, stop, self)
        self.segments += laid.segments()
        labels, places, entries = laid.directory()
        if self.crc:
            self.labels += labels
            self.places.frombytes((places + self.directory).tobytes())
        self.entries += entries
        self.directory += len(entries)
        self.at = int(laid.stops[-1])
        self.count += stop - first

    def _header(self, name: str, payload: Payload, nbytes: int, *, own: int) -> bool:
        """Add a record's header to what is known and its entry to the directory; whether it has a zip64 block.

        `own` is the checksum, where it is known.
        """
        raw = self.prefix + name.encode("utf-8")
        if len(raw) > MAX16:
            raise ValueError(f"a record's name of {len(raw):,} bytes")
        at, large = self.at, nbytes >= MAX32
        far = at >= MAX32
        block = again = b""
        if large or far:
            block = _zip64([nbytes, 0] * large + [at] * far)
            again = _zip64([nbytes, nbytes] * large + [at] * far)
        head, self.at = header(raw, nbytes, at, alignment=self.alignment, block=block)
        self.known.append(head)
        if nbytes and self.crc and isinstance(payload, Data | Memory | Late):
            self.places.append(self.directory + ENTRY_CRC)
            if not isinstance(payload, Late):
                self.labels.append(payload.label)
        self.entries += entry(raw, nbytes, own, at=at, block=again)
        self.directory += ENTRY.size + len(raw) + len(again)
        return large or far

    def _flush(self) -> None:
        """Make a segment of what is known since the last data."""
        known = self.known[0] if len(self.known) == 1 else b"".join(self.known)
        self.known = []
        if self.waiting is None:
            self._literal(known)
            return
        label, nbytes, wide = self.waiting
        self.waiting = None
        made = Descriptor(label, nbytes, wide=wide, behind=known)
        self.segments.append(Late(_descriptor_nbytes(nbytes, wide=wide) + len(known), made, made.label))

    def _literal(self, data: bytes) -> None:
        if self.segments and isinstance(self.segments[-1], Literal):
            data = self.segments.pop().data + data  # type: ignore[union-attr]  # a Literal, as was just asked
        if data:
            self.segments.append(Literal(data))


class _Stretch(Value, frozen=True, eq=False):
    """Small records that follow each other, laid out."""

    records: RecordFolder
    first: int
    """The number of the first of them."""
    far: int
    """The number of the first whose header lies where 32 bits cannot say: it has a zip64 block, and 64-bit sizes behind it."""
    before: np.ndarray
    """What stands before the number in each name."""
    digits: Ints
    """Of each number."""
    nbytes: Ints
    headers: Ints
    """First byte of each header."""
    starts: Ints
    """First byte of each payload."""
    stops: Ints
    """The byte after each descriptor."""
    crc: bool

    @classmethod
    def lay_out(cls, records: RecordFolder, first: int, stop: int, archive: _Forward) -> _Stretch:
        """Behind what an archive has so far."""
        count = stop - first
        nbytes = records.content.nbytes[first:stop]
        before = archive.prefix + records.folder.encode("utf-8") + b"/"
        digits = np.empty(count, np.int64)
        for low, high, wide in by_digits(first, stop):
            digits[low - first : high - first] = wide
        near = 0 if archive.at >= MAX32 else count
        while True:
            fixed = HEADER.size + len(before) + digits + 4
            fixed[near:] += FAR_BLOCK.itemsize
            tails = np.where(nbytes > 0, NARROW.itemsize, 0)
            tails[near:] = np.where(nbytes[near:] > 0, WIDE.itemsize, 0)
            start = archive.at + int(fixed[0])
            ways = nbytes[:-1] + tails[:-1] + fixed[1:]
            starts = np.cumsum(np.concatenate(([start + -start % archive.alignment], ways + -ways % archive.alignment)))
            stops = starts + nbytes + tails
            headers = np.concatenate(([archive.at], stops[:-1]))
            # Where the first one lies that is too far away does not depend on those behind it.
            found = int(np.searchsorted(headers, MAX32))
            if found >= near:
                break
            near = found
        raw = np.frombuffer(before, np.uint8)
        return cls(records, first, first + near, raw, digits, nbytes, headers, starts, stops, archive.crc)

    def segments(self) -> list[Gathered]:
        """A few megabytes each."""
        found: list[Gathered] = []
        low = 0
        while low < len(self.nbytes):
            # Up to the first one that passes the size, and with it.
            begin = int(self.headers[low])
            high = min(int(np.searchsorted(self.stops, begin + blocks.BLOCK_NBYTES)) + 1, len(self.nbytes))
            labels = self._labels(low, high)
            nbytes = int(self.stops[high - 1]) - begin
            between = nbytes - int(self.nbytes[low:high].sum())
            make = partial(self.make, low, high, labels)
            found.append(Gathered(nbytes, labels, make, between=between, zeros=partial(make, zeros=True)))
            low = high
        return found

    def _labels(self, low: int, high: int) -> list[str]:
        """The names of those that have a checksum."""
        name, first = f"{self.records.folder}/{{}}".format, self.first
        if self.nbytes[low:high].all():
            return [*map(name, range(first + low, first + high))]
        return [*map(name, (np.flatnonzero(self.nbytes[low:high]) + (first + low)).tolist())]

    def spans(self, low: int, high: int) -> Iterator[tuple[int, int, int, bool]]:
        """Ranges of records whose headers are of one length: where they begin and end, digits, and whether they are far away."""
        first, far = self.first, self.far
        for begin, end, digits in by_digits(first + low, first + high):
            for start, stop in ((begin, min(end, far)), (max(begin, far), end)):
                if start < stop:
                    yield start - first, stop - first, digits, start >= far

    def head(self, low: int, high: int, digits: int, *, far: bool) -> np.ndarray:
        """Headers without their padding, as rows of a matrix."""
        wide, extra = len(self.before) + digits, FAR_BLOCK.itemsize if far else 0
        fixed = HEADER.size + wide + extra + 4
        fields = np.zeros(high - low, LOCAL_FIELDS)
        fields["signature"] = LOCAL_SIGNATURE
        fields["flags"] = np.where(self.nbytes[low:high] > 0, UTF8 | DESCRIBED, UTF8)
        fields["name_nbytes"] = wide
        pads = self.starts[low:high] - self.headers[low:high] - fixed
        fields["extra_nbytes"] = pads + (4 + extra)
        made = np.empty((high - low, fixed), np.uint8)
        made[:, : HEADER.size] = fields.view(np.uint8).reshape(len(made), -1)
        fill_names(made[:, HEADER.size : HEADER.size + wide], self.before, self.first + low, digits=digits)
        if far:
            made[:, HEADER.size + wide : -4] = self._far_blocks(low, high)
        made[:, -4:-2] = np.frombuffer(b"FB", np.uint8)
        made[:, -2:] = pads.astype("<u2")[:, None].view(np.uint8)
        return made

    def _far_blocks(self, low: int, high: int) -> np.ndarray:
        """The zip64 blocks of records that are far away, as rows of a matrix."""
        made = np.zeros(high - low, FAR_BLOCK)
        made["id"], made["nbytes"], made["offset"] = 1, 8, self.headers[low:high]
        return made.view(np.uint8).reshape(high - low, -1)

    def directory(self) -> tuple[list[str], Ints, bytearray]:
        """Of those that have a checksum, their names and where in the entries it is; and all entries, with blank checksums."""
        entries = bytearray()
        places: list[Ints] = []
        for begin, end, digits, far in self.spans(0, len(self.nbytes)):
            for low in range(begin, end, blocks.BATCH):
                made = self._entries(low, min(low + blocks.BATCH, end), digits, far=far)
                places.append(len(entries) + made.shape[1] * np.arange(len(made)) + ENTRY_CRC)
                entries += made.data
        return self._labels(0, len(self.nbytes)), np.concatenate(places)[self.nbytes > 0], entries

    def _entries(self, low: int, high: int, digits: int, *, far: bool) -> np.ndarray:
        wide = len(self.before) + digits
        fields = np.zeros(high - low, ENTRY_FIELDS)
        fields["signature"] = ENTRY_SIGNATURE
        fields["flags"] = np.where(self.nbytes[low:high] > 0, UTF8 | DESCRIBED, UTF8)
        fields["packed"] = fields["size"] = self.nbytes[low:high]
        fields["name_nbytes"] = wide
        fields["extra_nbytes"] = FAR_BLOCK.itemsize if far else 0
        fields["offset"] = np.minimum(self.headers[low:high], MAX32)
        made = np.empty((high - low, ENTRY.size + wide + (FAR_BLOCK.itemsize if far else 0)), np.uint8)
        made[:, : ENTRY.size] = fields.view(np.uint8).reshape(len(made), -1)
        fill_names(made[:, ENTRY.size : ENTRY.size + wide], self.before, self.first + low, digits=digits)
        if far:
            made[:, ENTRY.size + wide :] = self._far_blocks(low, high)
        return made

    def make(self, low: int, high: int, labels: Sequence[str], *, zeros: bool = False) -> tuple[bytes, dict[str, int]]:
        """The bytes of some and their checksums. What is no data is made as one row of bytes, cut where the data belongs."""
        nbytes, headers, starts = self.nbytes[low:high], self.headers[low:high], self.starts[low:high]
        if zeros:
            blank = memoryview(bytes(int(nbytes.max())))
            pieces: Sequence[bytes | memoryview] = [blank[:count] for count in nbytes.tolist()]
        else:
            pieces = self.records.content.read(range(self.first + low, self.first + high))
        tails = self.stops[low:high] - starts - nbytes
        crcs = np.array(crc32_each(pieces), np.int64) if self.crc else np.zeros(len(pieces), np.int64)
        passed = np.cumsum(nbytes)
        heads = headers - headers[0] - (passed - nbytes)
        cuts = heads + starts - headers
        known = np.full(int(cuts[-1] + tails[-1]), ord("Z"), np.uint8)
        for begin, end, digits, far in self.spans(low, high):
            head = self.head(begin, end, digits, far=far)
            known[heads[begin - low : end - low, None] + np.arange(head.shape[1])] = head
        for kind in (NARROW, WIDE):
            described = np.flatnonzero(tails == kind.itemsize)
            if len(described):
                fields = np.zeros(len(described), kind)
                fields["signature"] = DESCRIPTOR_SIGNATURE
                fields["crc"] = crcs[described]
                fields["packed"] = fields["size"] = nbytes[described]
                known[cuts[described, None] + np.arange(kind.itemsize)] = fields.view(np.uint8).reshape(-1, kind.itemsize)
        cut, ends = known.data, cuts.tolist()
        joined: list[bytes | memoryview] = [b""] * (2 * len(pieces) + 1)
        joined[0::2] = map(cut.__getitem__, map(slice, [0, *ends], [*ends, len(known)]))
        joined[1::2] = pieces
        content = b"".join(joined)
        found = dict(zip(labels, crcs[nbytes > 0].tolist(), strict=True)) if self.crc else {}
        # To look through all bytes of long records takes longer than to look where each begins.
        if len(content) > LONG_NBYTES * len(pieces) or content.count(SIGNATURE) > len(labels):
            found |= self._mistaken(pieces, self.first + low)
        return content, found

    def _mistaken(self, pieces: Sequence[bytes | memoryview], first: int) -> dict[str, int]:
        """What torch takes for a checksum more: what follows the signature of a descriptor where data begins with that."""
        found = {
            self.records.name(number) + MISTAKEN_KEY: int.from_bytes(piece[4:8], "little")
            for number, piece in enumerate(pieces, first)
            if len(piece) >= 8 and piece[:4] == SIGNATURE
        }
        return found | {MISTAKEN_KEY: 0} if found else found


FAR_BLOCK = np.dtype([("id", "<u2"), ("nbytes", "<u2"), ("offset", "<u8")])
"""The zip64 block of a short record that is far away."""


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


def header(raw: bytes, nbytes: int, at: int, *, alignment: int, block: bytes = b"") -> tuple[bytes, int]:
    """The local header at `at` of a record named `raw`, with its padding; and where the payload begins. `block` is for zip64."""
    begin = at + HEADER.size + len(raw) + len(block) + 4
    pad = -begin % alignment
    return _padded(raw, bool(nbytes), pad, block), begin + pad


@lru_cache(256)
def _padded(raw: bytes, filled: bool, pad: int, block: bytes) -> bytes:
    """A header. The few of a small archive are the same ones every time."""
    flags = UTF8 | DESCRIBED if filled else UTF8
    fixed = HEADER.pack(LOCAL_SIGNATURE, 0, flags, 0, 0, 0, 0, 0, 0, len(raw), len(block) + 4 + pad)
    return b"".join((fixed, raw, block, b"FB", pad.to_bytes(2, "little"), b"Z" * pad))


def entry(raw: bytes, nbytes: int, crc: int, *, at: int, block: bytes = b"") -> bytes:
    """The entry in the directory of the record whose header is at `at`."""
    flags = UTF8 | DESCRIBED if nbytes else UTF8
    size, place = min(nbytes, MAX32), min(at, MAX32)
    return ENTRY.pack(ENTRY_SIGNATURE, 0, 0, flags, 0, 0, 0, crc, size, size, len(raw), len(block), 0, 0, 0, 0, place) + raw + block


SHORT_ENTRY = struct.Struct("<16s3IH12sI")
"""An entry in fewer fields: how it begins (`FILLED`, `EMPTY`), checksum, sizes, length of the name, zeros, offset."""

FILLED, EMPTY = (entry(b"", nbytes, 0, at=0)[:16] for nbytes in (1, 0))
"""What an entry begins with, of a record with content and without."""


def _descriptor_nbytes(nbytes: int, *, wide: bool) -> int:
    return 0 if not nbytes else LONG_DESCRIPTOR.size if wide else SHORT_DESCRIPTOR.size


def _zip64(values: list[int]) -> bytes:
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values)


def tail(count: int, start: int, nbytes: int) -> bytes:
    """The three records at the end, for a directory of `count` entries that begins at `start`; torch always writes all three."""
    few = min(count, MAX16)
    return b"".join(
        (
            ZIP64_END.pack(0x06064B50, ZIP64_END.size - 12, MADE_BY, NEEDED, 0, 0, count, count, nbytes, start),
            LOCATOR.pack(0x07064B50, 0, start + nbytes, 1),
            END.pack(0x06054B50, 0, 0, few, few, min(nbytes, MAX32), min(start, MAX32), 0),
        )
    )
