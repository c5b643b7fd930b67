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
descriptor and all that is known up to the next data. The last `Late` is the central directory.

Many records that are called by their numbers come as one `RecordFolder`:

    data/0, data/1 … data/49999        the storages of a state with fifty thousand tensors

A record that is laid out by itself costs a header, an entry, a descriptor and two segments, each an object. Small ones that follow
each other are laid out by arithmetic on columns of lengths (`_Stretch`):

1. Every payload begins at a multiple of the alignment, and every header where the descriptor before it ends.
2. Headers of names with as many digits are the same but for the number and the padding. Entries of the directory are made when
   the checksums are known, and packed by one call of C each.
3. A few megabytes of them are one `Gathered` segment. When it is written, its pieces are read together, summed, and joined
   with headers and descriptors. A longer record, or one that is read by itself, stays where it lies.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, compress, repeat
from operator import add, mod
from typing import Protocol

from msgspec.structs import force_setattr

from holdfast.core.arrays import Ints
from holdfast.core.crc import crc32, crc32_each
from holdfast.core.value import Value
from holdfast.engine import saves as blocks
from holdfast.engine.saves import (
    MISTAKEN_KEY,
    Data,
    Gathered,
    Hole,
    Late,
    Literal,
    Memory,
    Segment,
    put_together,
)
from holdfast.formats.zip import layout as fields
from holdfast.formats.zip.layout import (
    DESCRIBED,
    DESCRIPTOR_SIGNATURE,
    LOCAL_SIGNATURE,
    MAX16,
    MAX32,
    UTF8,
)

Payload = bytes | Data | Memory | Hole | Late
"""The content of a record. A `Hole` has a checksum of 0, as torch's `skip_data` leaves it.

A `Late` one is known when the checksums of all records before it are; it stands last."""

CRC_BEGIN, CRC_END = 16, 20
"""The position of the checksum in an entry of the directory."""

AT_ONCE = 8 * blocks.BATCH
"""Records that are laid out at a time."""

SIGNATURE = DESCRIPTOR_SIGNATURE.to_bytes(4, "little")


class RecordBytes(Protocol):
    """The bytes of numbered records, as a table has them (`core.table.Storages`)."""

    @property
    def nbytes(self) -> Ints:
        """The length of each record."""

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
    reads: Ints | None = None
    """Bytes that are read for each, where these are not its own: of records that are computed."""
    names: Sequence[str] = ()
    """The names of the records; set here, whatever is given."""
    alone: Sequence[int] = ()
    """The numbers of records that are laid out by themselves; set here, whatever is given."""

    def __post_init__(self) -> None:
        folder, alone = self.folder, self.content.nbytes > blocks.SMALL_NBYTES
        if self.apart:
            alone[[*self.apart]] = True
        force_setattr(self, "names", [f"{folder}/{number}" for number in range(len(alone))])
        force_setattr(self, "alone", alone.nonzero()[0].tolist())

    def __len__(self) -> int:
        return len(self.names)


Records = Sequence[tuple[str, Payload] | RecordFolder]
"""The records of an archive, in their order."""

MAX_ALIGNMENT = MAX16 - 31
"""The padding is an extra field, whose length has 16 bits; 4 bytes of it begin the block and 28 may be a zip64 block.

torch 2.13 accepts more, and writes a file that it cannot read."""

HEADER = struct.Struct("<I5H3I2H")
SHORT_ENTRY = struct.Struct("<16s3IH12sI")
"""An entry in few fields: how it begins (`FILLED`, `EMPTY`), checksum, sizes, length of the name, that of its zip64 block, zeros,
offset."""
FILLED, EMPTY = (
    struct.pack("<I6H", fields.ENTRY_SIGNATURE, 0, 0, flags, 0, 0, 0)
    for flags in (UTF8 | DESCRIBED, UTF8)
)
"""The first bytes of an entry, for a record with content and without."""
NO_BLOCK = bytes(12)
"""The end of an entry but for its offset: no extra field, no comment, no disk, no attributes."""
FIXED = HEADER.size + 4
"""Bytes of a header without name and zip64 block, with how the padding begins."""
SHORT_DESCRIPTOR = struct.Struct("<IIII")
LONG_DESCRIPTOR = struct.Struct("<IIQQ")

MADE_BY, NEEDED = 0x031E, 0x002D
"""Unix, version 3.0; readers need version 4.5, which has zip64. In the end record only: elsewhere torch writes 0."""


def _descriptor(
    label: str, nbytes: int, wide: bool, behind: bytes, crcs: Mapping[str, int]
) -> bytes:
    """The bytes behind a payload: its data descriptor, then what is known. Its checksum is under a label."""
    return (LONG_DESCRIPTOR if wide else SHORT_DESCRIPTOR).pack(
        DESCRIPTOR_SIGNATURE, crcs[label], nbytes, nbytes
    ) + behind


class Ending:
    """The bytes from a late last payload, or from the central directory, to the end of the file."""

    __slots__ = ("crc", "late", "nbytes", "parts")

    def __init__(
        self,
        parts: Sequence[bytes | str | _Stretch | None],
        nbytes: int,
        *,
        crc: bool,
        late: tuple[Late, bool] | None,
    ) -> None:
        """`late` is a payload before the directory, and whether its descriptor is wide."""
        self.parts = parts
        """The directory and the end records, of `nbytes`: bytes, entries of stretches, and labels in the place of checksums; None
        for the checksum of the late payload."""
        self.crc = crc
        self.late = late
        if late is not None:
            nbytes += late[0].nbytes + _descriptor_nbytes(late[0].nbytes, wide=late[1])
        self.nbytes = nbytes

    def __call__(self, crcs: Mapping[str, int]) -> bytes:
        return put_together(self._pieces(crcs), self.nbytes)

    def _pieces(self, crcs: Mapping[str, int]) -> Iterator[bytes]:
        own = 0
        if self.late is not None:
            payload, wide = self.late
            before = payload.content(crcs)
            if before:
                own = crc32(before) if self.crc else 0
                pack = (LONG_DESCRIPTOR if wide else SHORT_DESCRIPTOR).pack
                yield before
                yield pack(DESCRIPTOR_SIGNATURE, own, len(before), len(before))
        for part in self.parts:
            if isinstance(part, bytes):
                yield part
            elif isinstance(part, _Stretch):
                yield from part.entries(crcs)
            else:
                yield (own if part is None else crcs[part]).to_bytes(4, "little")


def lay_out_zip(
    prefix: str, records: Records, *, alignment: int = 64, crc: bool = True
) -> tuple[Segment, ...]:
    """The segments of an archive with these records, in this order, all under the folder `prefix`.

    A `Data` record's label is the key of its checksum. With `crc=False` every checksum field is 0, as torch's
    `set_crc32_options(False)` does. Raises `ValueError` for an alignment or a name that no reader would understand.
    """
    if not 1 <= alignment <= MAX_ALIGNMENT:
        raise ValueError(
            f"an alignment of {alignment}: a zip archive can pad to 1 up to {MAX_ALIGNMENT} bytes"
        )
    _check_names(
        tuple(
            [
                f"{record.folder}/" if isinstance(record, RecordFolder) else record[0]
                for record in records
            ]
        )
    )
    return _Forward(prefix, alignment=alignment, crc=crc).lay_out(records)


@lru_cache(16)
def _check_names(names: tuple[str, ...]) -> None:
    """Raise `ValueError` for two records of one name. Of a folder, its name and a slash are given."""
    folded = [name.casefold() for name in names]
    folders = tuple([name for name in folded if name.endswith("/")])
    if len({*folded}) != len(folded) or any(
        name.startswith(folders) and name not in folders for name in folded if folders
    ):
        raise ValueError("two records of one name (readers ignore case)")


class _Forward:
    """Lays out one archive: the position in the file, and the bytes that are known since the last data."""

    def __init__(self, prefix: str, *, alignment: int, crc: bool) -> None:
        self.prefix = prefix.encode("utf-8") + b"/"
        self.alignment = alignment
        self.crc = crc
        self.at = 0
        self.segments: list[Segment] = []
        self.known: list[bytes] = []
        self.waiting: tuple[str, int, bool] | None = None
        """The label, length and width of the data whose descriptor begins what is known."""
        self.entries: list[bytes | str | _Stretch | None] = []
        """The directory, as `Ending` has it."""
        self.directory = 0
        """Bytes of the entries so wide."""
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
        self.entries.append(end := tail(self.count, self.at, self.directory))
        ending = Ending(self.entries, self.directory + len(end), crc=self.crc, late=self.late)
        if self.late is not None or not all(isinstance(part, bytes) for part in self.entries):
            self.segments.append(Late(ending.nbytes, ending))
        else:
            self._literal(ending({}))
        return tuple(self.segments)

    def _record(self, name: str, payload: Payload) -> None:
        """One record: its header to what is known, its payload, its entry to the directory."""
        raw = self.prefix + name.encode("utf-8")
        length = len(raw)
        if length > MAX16:
            raise ValueError(f"a record's name of {length:,} bytes")
        known = isinstance(payload, bytes)
        nbytes = len(payload) if known else payload.nbytes  # type: ignore[arg-type, union-attr]  # of bytes, and of all others
        own = crc32(payload) if known and nbytes and self.crc else 0
        at = self.at
        wide = nbytes >= MAX32 or at >= MAX32
        block, again, size, place, extra = b"", b"", nbytes, at, NO_BLOCK
        if wide:
            long_size, long_offset = nbytes >= MAX32, at >= MAX32
            block = _zip64([nbytes, 0] * long_size + [at] * long_offset)
            again = _zip64([nbytes, nbytes] * long_size + [at] * long_offset)
            size, place, extra = (
                min(nbytes, MAX32),
                min(at, MAX32),
                len(again).to_bytes(12, "little"),
            )
            at += len(block)
        begin = at + FIXED + length
        pad = -begin % self.alignment
        self.known.append(_padded(raw, nbytes > 0, pad, block))
        entry = (
            SHORT_ENTRY.pack(FILLED if nbytes else EMPTY, own, size, size, length, extra, place)
            + raw
            + again
        )
        self.directory += len(entry)
        self.count += 1
        self.at = begin + pad
        if nbytes:
            pack = LONG_DESCRIPTOR.pack if wide else SHORT_DESCRIPTOR.pack
            behind = pack(DESCRIPTOR_SIGNATURE, own, nbytes, nbytes)
            self.at += nbytes + len(behind)
            if isinstance(payload, bytes):
                self.known += (payload, behind)
            else:
                label = None if isinstance(payload, Late | Hole) else payload.label
                if self.crc and not isinstance(payload, Hole):
                    self.entries += (entry[:CRC_BEGIN], label)
                    entry = entry[CRC_END:]
                if not isinstance(payload, Late):
                    self._flush()
                    self.segments.append(payload)
                    if self.crc and label is not None:
                        self.waiting = label, nbytes, wide
                    else:
                        self.known.append(behind)
        if isinstance(payload, Late):
            self.late = payload, wide
        self.entries.append(entry)

    def _folder(self, records: RecordFolder) -> None:
        """Numbered records: each that stands alone by itself, and those between them together."""
        first = 0
        for single in [*records.alone, len(records)]:
            while first < single:
                first = self._stretch(records, first, single)
            if single < len(records):
                label = records.names[single]
                self._record(label, records.content.alone(single, label))
            first = single + 1

    def _stretch(self, records: RecordFolder, first: int, stop: int) -> int:
        """Small records that follow each other, as many as are one stretch; the number of the next one."""
        self._flush()
        laid = _Stretch.lay_out(records, first, stop, self)
        self.segments += laid.segments()
        count = len(laid.nbytes)
        self.entries.append(laid)
        self.directory += laid.entries_nbytes
        self.at = laid.stops[-1]
        self.count += count
        return first + count

    def _flush(self) -> None:
        """Make a segment of what is known since the last data."""
        known = self.known[0] if len(self.known) == 1 else b"".join(self.known)
        self.known = []
        if self.waiting is None:
            self._literal(known)
            return
        label, nbytes, wide = self.waiting
        self.waiting = None
        made = partial(_descriptor, label, nbytes, wide, known)
        self.segments.append(Late(_descriptor_nbytes(nbytes, wide=wide) + len(known), made, label))

    def _literal(self, data: bytes) -> None:
        if self.segments and isinstance(self.segments[-1], Literal):
            data = self.segments.pop().data + data  # type: ignore[union-attr]  # a Literal, as the line before says
        if data:
            self.segments.append(Literal(data))


def by_digits(first: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of numbers that have the same number of digits, and that number."""
    while first < stop:
        digits = len(str(first))
        end = min(10**digits, stop)
        yield first, end, digits
        first = end


class _Stretch(Value, frozen=True, eq=False):
    """Small records that follow each other, laid out: all of them below 4 GiB, or all above (`wide`)."""

    records: RecordFolder
    first: int
    """The number of the first record."""
    wide: bool
    """Whether the offsets of headers need 64 bits: they have a zip64 block, and 64-bit sizes behind the payload."""
    before: bytes
    """The bytes before the number in each name."""
    digits: Sequence[tuple[int, int, int]]
    """Ranges of these records, counted from 0, and how many digits the numbers of each range have."""
    nbytes: array[int]
    filled: bool
    """Whether none of them is empty."""
    headers: array[int]
    """First byte of each header."""
    pads: list[int]
    """The padding of each header."""
    stops: array[int]
    """The byte after each descriptor."""
    crc: bool

    @classmethod
    def lay_out(cls, records: RecordFolder, first: int, stop: int, archive: _Forward) -> _Stretch:
        """Lay out records behind what an archive has so wide: as many as one stretch takes."""
        at, alignment, wide = archive.at, archive.alignment, archive.at >= MAX32
        before = archive.prefix + records.folder.encode("utf-8") + b"/"
        nbytes: list[int] = records.content.nbytes[first : min(stop, first + AT_ONCE)].tolist()
        tails = (LONG_DESCRIPTOR if wide else SHORT_DESCRIPTOR).size
        # From a payload to the byte after its descriptor. Each begins at a multiple of the alignment, so what is padded behind it
        # depends on its length alone.
        spans = {length: length and length + tails for length in {*nbytes}}
        pads: list[int] = []
        stops: list[int] = []
        ranges: list[tuple[int, int, int]] = []
        for low, high, digits in by_digits(first, first + len(nbytes)):
            fixed = FIXED + len(before) + digits + (OFFSET_BLOCK.size if wide else 0)
            padded = {length: -(span + fixed) % alignment for length, span in spans.items()}
            ways = {length: span + fixed + padded[length] for length, span in spans.items()}
            ranges.append((low - first, high - first, digits))
            own, pad = nbytes[low - first : high - first], -(at + fixed) % alignment
            pads += (pad, *map(padded.__getitem__, own[:-1]))
            starts = accumulate(map(ways.__getitem__, own[:-1]), initial=at + fixed + pad)
            stops += map(add, starts, map(spans.__getitem__, own))
            at = stops[-1]
        headers = [archive.at, *stops[:-1]]
        if not wide and headers[-1] >= MAX32:
            count = bisect_left(headers, MAX32)
            nbytes, headers, pads, stops = (
                nbytes[:count],
                headers[:count],
                pads[:count],
                stops[:count],
            )
            ranges = [
                (low, min(high, count), digits) for low, high, digits in ranges if low < count
            ]
        columns = array("q", nbytes), 0 not in nbytes, array("q", headers), pads, array("q", stops)
        return cls(records, first, wide, before, ranges, *columns, archive.crc)

    @property
    def entries_nbytes(self) -> int:
        """The length of all entries in the directory."""
        fixed = SHORT_ENTRY.size + len(self.before) + self.block_nbytes
        return sum([(high - low) * (fixed + digits) for low, high, digits in self.digits])

    @property
    def block_nbytes(self) -> int:
        """The length of the zip64 block of each."""
        return OFFSET_BLOCK.size if self.wide else 0

    def segments(self) -> Iterator[Gathered]:
        """Segments of a few megabytes each, or of `BATCH` records."""
        low, count = 0, len(self.nbytes)
        while low < count:
            # Up to the first one that passes the size, and with it.
            begin = self.headers[low]
            high = min(
                bisect_left(self.stops, begin + blocks.BLOCK_NBYTES) + 1, low + blocks.BATCH, count
            )
            lengths = self.nbytes[low:high]
            labels = self._names(low, high)
            if not self.filled:
                labels = [*compress(labels, lengths)]  # only these have a checksum
            nbytes = self.stops[high - 1] - begin
            make = partial(self.make, low, high, labels)
            reads = self.records.reads
            read = None if reads is None else int(reads[self.first + low : self.first + high].sum())
            yield Gathered(
                nbytes,
                labels,
                make,
                between=nbytes - sum(lengths),
                read_nbytes=read,
                zeros=partial(make, zeros=True),
            )
            low = high

    def _names(self, low: int, high: int) -> Sequence[str]:
        return self.records.names[self.first + low : self.first + high]

    def _numbers(self, low: int, high: int) -> Sequence[int] | list[bytes]:
        """The values for `_place` in the names of some: numbers, or bytes where zip64 blocks follow the names."""
        numbers = range(self.first + low, self.first + high)
        if not self.wide:
            return numbers
        return [
            *map(
                add,
                map(b"%d".__mod__, numbers),
                map(OFFSET_BLOCK.pack, repeat(1), repeat(8), self.headers[low:high]),
            )
        ]

    @property
    def _place(self) -> bytes:
        return b"%b" if self.wide else b"%d"

    def entries(self, crcs: Mapping[str, int]) -> Iterator[bytes]:
        """The entries of all in the directory, many at a time."""
        for begin, end, digits in self.digits:
            pack = struct.Struct(
                f"{SHORT_ENTRY.format}{len(self.before)}s{digits + self.block_nbytes}s"
            ).pack
            for low in range(begin, end, blocks.BATCH):
                high = min(low + blocks.BATCH, end)
                nbytes = self.nbytes[low:high]
                begins: Iterable[bytes] = repeat(FILLED)
                sums: Iterable[int] = (
                    map(crcs.__getitem__, self._names(low, high)) if self.crc else repeat(0)
                )
                if not self.filled:
                    begins = [FILLED if length else EMPTY for length in nbytes]
                    sums = map(crcs.get, self._names(low, high), repeat(0)) if self.crc else sums
                made = map(
                    pack, begins, sums, nbytes, nbytes, repeat(len(self.before) + digits),
                    repeat(self.block_nbytes.to_bytes(2, "little")), repeat(MAX32) if self.wide else self.headers[low:high],
                    repeat(self.before), map(mod, repeat(self._place), self._numbers(low, high)),
                )  # fmt: skip
                yield b"".join(made)

    def make(
        self, low: int, high: int, labels: Sequence[str], *, zeros: bool = False
    ) -> tuple[bytes, dict[str, int]]:
        """The bytes of some records and their checksums; with `zeros` the data is not read, and zeros stand in its place."""
        nbytes = self.nbytes[low:high]
        if zeros:
            blank = memoryview(bytes(max(nbytes)))
            pieces: Sequence[bytes | memoryview] = [blank[:count] for count in nbytes]
        else:
            pieces = self.records.content.read(range(self.first + low, self.first + high))
        crcs = crc32_each(pieces) if self.crc else [0] * len(pieces)
        pack = (LONG_DESCRIPTOR if self.wide else SHORT_DESCRIPTOR).pack
        joined: list[bytes | memoryview] = [b""] * (3 * len(pieces))
        joined[0::3] = heads = self._heads(low, high)
        joined[1::3] = pieces
        joined[2::3] = map(pack, repeat(DESCRIPTOR_SIGNATURE), crcs, nbytes, nbytes)
        if not self.filled:
            for at in [at for at, length in enumerate(nbytes) if not length]:
                joined[3 * at], joined[3 * at + 2] = (
                    heads[at][:6] + EMPTY[8:10] + heads[at][8:],
                    b"",
                )
        content = b"".join(joined)
        found = (
            dict(zip(labels, crcs if self.filled else compress(crcs, nbytes), strict=True))
            if self.crc
            else {}
        )
        signed = [
            number
            for number, piece in enumerate(pieces, self.first + low)
            if piece and piece[0] == SIGNATURE[0]
        ]
        return content, found | self._mistaken(
            signed, pieces, self.first + low
        ) if signed else found

    def _heads(self, low: int, high: int) -> list[bytes]:
        """The headers of some records, as if none were empty."""
        before, place, block = self.before, self._place, self.block_nbytes
        made: list[bytes] = []
        for begin, end, digits in self.digits:
            pads, first = self.pads[max(begin, low) : min(end, high)], max(begin, low)
            heads = {pad: _numbered(before, place, digits, block, pad) for pad in {*pads}}
            made += map(mod, map(heads.__getitem__, pads), self._numbers(first, first + len(pads)))
        return made

    def _mistaken(
        self, signed: Sequence[int], pieces: Sequence[bytes | memoryview], first: int
    ) -> dict[str, int]:
        """The bytes that torch mistakes for a checksum, where data begins with the signature of a descriptor."""
        begins = {number: bytes(pieces[number - first][:8]) for number in signed}
        found = {
            self.records.names[number] + MISTAKEN_KEY: int.from_bytes(begin[4:], "little")
            for number, begin in begins.items()
            if len(begin) == 8 and begin.startswith(SIGNATURE)
        }
        return found | {MISTAKEN_KEY: 0} if found else found


OFFSET_BLOCK = struct.Struct("<HHQ")
"""The zip64 block of a short record above 4 GiB."""


def padding(pad: int) -> bytes:
    """The block that moves a payload to a multiple of the alignment."""
    return b"FB" + pad.to_bytes(2, "little") + b"Z" * pad


def header(raw: bytes, filled: bool, at: int, *, alignment: int) -> tuple[bytes, int]:
    """The local header at `at` of a record named `raw`, with its padding; and where the payload begins."""
    begin = at + FIXED + len(raw)
    pad = -begin % alignment
    return _padded(raw, filled, pad, b""), begin + pad


@lru_cache(256)
def _padded(raw: bytes, filled: bool, pad: int, block: bytes) -> bytes:
    """A header. The few of a small archive are the same ones every time."""
    flags = UTF8 | DESCRIBED if filled else UTF8
    fixed = HEADER.pack(LOCAL_SIGNATURE, 0, flags, 0, 0, 0, 0, 0, 0, len(raw), len(block) + 4 + pad)
    return b"".join((fixed, raw, block, padding(pad)))


@lru_cache(256)
def _numbered(before: bytes, place: bytes, digits: int, block_nbytes: int, pad: int) -> bytes:
    """A header as a pattern, with a place for the number and what follows it up to the padding."""
    begin = HEADER.pack(
        LOCAL_SIGNATURE,
        0,
        UTF8 | DESCRIBED,
        0,
        0,
        0,
        0,
        0,
        0,
        len(before) + digits,
        4 + pad + block_nbytes,
    )
    return place.join([piece.replace(b"%", b"%%") for piece in (begin + before, padding(pad))])


def _descriptor_nbytes(nbytes: int, *, wide: bool) -> int:
    return 0 if not nbytes else LONG_DESCRIPTOR.size if wide else SHORT_DESCRIPTOR.size


def _zip64(values: list[int]) -> bytes:
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values)


def tail(count: int, start: int, nbytes: int) -> bytes:
    """The three records at the end, for a directory of `count` entries that begins at `start`; torch always writes all three."""
    few = min(count, MAX16)
    return b"".join(
        (
            fields.END64.pack(
                fields.END64_SIGNATURE,
                fields.END64.size - 12,
                MADE_BY,
                NEEDED,
                0,
                0,
                count,
                count,
                nbytes,
                start,
            ),
            fields.LOCATOR.pack(fields.LOCATOR_SIGNATURE, 0, start + nbytes, 1),
            fields.END.pack(
                fields.END_SIGNATURE, 0, 0, few, few, min(nbytes, MAX32), min(start, MAX32), 0
            ),
        )
    )
