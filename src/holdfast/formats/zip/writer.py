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

Many small records that are called by their numbers come as one `Numbered` (`formats.zip.numbered`): rows instead of objects.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from holdfast.core.crc import crc32
from holdfast.formats.zip.layout import (
    DESCRIBED,
    DESCRIPTOR_SIGNATURE,
    ENTRY_SIGNATURE,
    LOCAL_SIGNATURE,
    MAX16,
    MAX32,
    UTF8,
)
from holdfast.formats.zip.numbered import ENTRY_CRC, Numbered, lay_out_numbered
from holdfast.plan.saves import Data, Hole, Late, Literal, Memory, Segment

Payload = bytes | Data | Memory | Hole | Late
"""What a record holds. A `Hole` has a checksum of 0, as torch's `skip_data` leaves it.

A `Late` one is known when the checksums of all records before it are; it stands last."""

Records = Sequence[tuple[str, Payload] | Numbered]
"""What an archive holds, in this order."""

MAX_ALIGNMENT = MAX16 - 31
"""The padding is an extra field, whose length has 16 bits; 4 bytes of it begin the block and 28 may be a zip64 block.

torch 2.13 accepts more, and writes a file that it cannot read."""

HEADER = struct.Struct("<I5H3I2H")
ENTRY = struct.Struct("<I6H3I5H2I")
SHORT_DESCRIPTOR = struct.Struct("<IIII")
LONG_DESCRIPTOR = struct.Struct("<IIQQ")
SHORT_ENTRY = struct.Struct("<16s3IH12sI")
"""An entry in fewer fields: how it begins (`FILLED`, `EMPTY`), checksum, sizes, length of the name, zeros, offset."""

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
    folders = tuple([record.folder.casefold() + "/" for record in records if isinstance(record, Numbered)])
    names = [record[0].casefold() for record in records if not isinstance(record, Numbered)]
    if len({*names, *folders}) != len(records) or (folders and any(name.startswith(folders) for name in names)):
        raise ValueError("two records of one name (readers ignore case)")
    known = [(record[0], record[1]) for record in records if isinstance(record, tuple) and isinstance(record[1], bytes)]
    if len(known) == len(records) and sum([len(name) + len(payload) for name, payload in known]) < SHORT_NBYTES:
        crcs = [crc32(payload) if crc else 0 for _, payload in known]
        return (Literal(known_archive(prefix, known, crcs, alignment=alignment)),)
    return _Forward(prefix, alignment=alignment, crc=crc).lay_out(records)


SHORT_NBYTES = 1 << 20
"""An archive of which all is known is made at once up to this size."""


def known_archive(prefix: str, records: Sequence[tuple[str, bytes]], crcs: Sequence[int], *, alignment: int) -> bytes:
    """What `_Forward` makes of a few short records, in a third of the time: whoever saves a kilobyte waits for this.

    Their names are those of one archive, and their checksums known: 0 for what is empty, and where none shall be said.
    """
    pieces: list[bytes] = []
    entries: list[bytes] = []
    at, folder = 0, prefix.encode("utf-8") + b"/"
    for (name, payload), own in zip(records, crcs, strict=True):
        raw, nbytes = folder + name.encode("utf-8"), len(payload)
        if len(raw) > MAX16:
            raise ValueError(f"a record's name of {len(raw):,} bytes")
        entries += (SHORT_ENTRY.pack(FILLED if nbytes else EMPTY, own, nbytes, nbytes, len(raw), b"", at), raw)
        head, at = header(raw, nbytes, at, alignment=alignment)
        pieces += (head, payload)
        if nbytes:
            pieces.append(SHORT_DESCRIPTOR.pack(DESCRIPTOR_SIGNATURE, own, nbytes, nbytes))
            at += nbytes + SHORT_DESCRIPTOR.size
    return b"".join((*pieces, *entries, tail(len(records), at, sum(map(len, entries)))))


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
            if isinstance(record, Numbered):
                self._numbered(record)
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

    def _numbered(self, rows: Numbered) -> None:
        """Many records at once; one by one where the archive is so long that its offsets have another form."""
        laid = lay_out_numbered(rows, self.prefix, self.at, alignment=self.alignment, crc=self.crc)
        if laid is None:
            for number in range(len(rows)):
                self._record(rows.name(number), rows.alone(number))
            return
        self._flush()
        self.segments += laid.segments
        self.entries += laid.entries
        self.labels += laid.labels if self.crc else ()
        if self.crc:
            self.places.frombytes((laid.places + self.directory).tobytes())
        self.directory += len(laid.entries)
        self.at = laid.stop
        self.count += len(rows)

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
