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

Short records of data that follow each other are one `Gathered` segment of a few megabytes (`SmallRecord`). When it is written,
their bytes are read together, summed, and joined with headers and descriptors. A longer record is a segment of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from msgspec import Struct, field

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
from holdfast.formats.zip.layout import (
    DESCRIBED,
    DESCRIPTOR_SIGNATURE,
    ENTRY_SIGNATURE,
    LOCAL_SIGNATURE,
    MAX16,
    MAX32,
    UTF8,
    make_end,
)


class RecordBytes(Protocol):
    """The bytes of records, as a table has them (`core.table.Storages`)."""

    @property
    def nbytes(self) -> Ints:
        """The length of each record."""

    def read(self, numbers: Sequence[int]) -> Sequence[bytes | memoryview]:
        """The bytes of records of these numbers, all of them together."""

    def alone(self, number: int, label: str) -> bytes | Data | Memory:
        """The bytes of one record under a label, where they lie."""


class SmallRecord(Value, frozen=True, eq=False):
    """The content of a short record, which is read together with that of its neighbours. It is never empty."""

    storages: RecordBytes
    number: int
    nbytes: int
    read_nbytes: int
    """Bytes that are read for it: more or fewer than it has if its content is computed."""


Payload = bytes | Data | Memory | Hole | Late | SmallRecord
"""The content of a record. A `Hole` has a checksum of 0, as torch's `skip_data` leaves it.

A `Late` one is known when the checksums of all records before it are; it stands last."""

Records = Iterable[tuple[str, Payload]]
"""The names and contents of the records of an archive, in their order. The checksum of a `SmallRecord` has its name as label."""

MAX_ALIGNMENT = MAX16 - 31
"""The padding is an extra field, whose length has 16 bits; 4 bytes of it begin the block and 28 may be a zip64 block.

torch 2.13 accepts more, and writes a file that it cannot read."""

HEADER = struct.Struct("<I5H3I2H")
SHORT_ENTRY = struct.Struct("<16s3IH12sI")
"""An entry in few fields: how it begins (`FILLED`, `EMPTY`), checksum, sizes, length of the name, that of its zip64 block, zeros,
offset."""
ENTRY_END = struct.Struct("<2IH12sI")
"""What stands behind the checksum in a `SHORT_ENTRY`."""
FILLED, EMPTY = (
    struct.pack("<I6H", ENTRY_SIGNATURE, 0, 0, flags, 0, 0, 0) for flags in (UTF8 | DESCRIBED, UTF8)
)
"""The first bytes of an entry, for a record with content and without."""
NO_BLOCK = bytes(12)
"""The end of an entry but for its offset: no extra field, no comment, no disk, no attributes."""
FIXED = HEADER.size + 4
"""Bytes of a header without name and zip64 block, with how the padding begins."""
SHORT_DESCRIPTOR = struct.Struct("<IIII")
LONG_DESCRIPTOR = struct.Struct("<IIQQ")
SIGNATURE = DESCRIPTOR_SIGNATURE.to_bytes(4, "little")


def lay_out_zip(
    prefix: str, records: Records, *, alignment: int = 64, crc: bool = True
) -> tuple[Segment, ...]:
    """Lay out an archive with these records, in this order, all under the folder `prefix`.

    With `crc=False` every checksum field is 0, as torch's `set_crc32_options(False)` does. Raises `ValueError` for an alignment
    or a name that no reader would understand.
    """
    if not 1 <= alignment <= MAX_ALIGNMENT:
        raise ValueError(
            f"an alignment of {alignment}: a zip archive can pad to 1 up to {MAX_ALIGNMENT} bytes"
        )
    layout = _ArchiveLayout(prefix.encode("utf-8") + b"/", alignment, crc)
    names: set[str] = set()
    for name, payload in records:
        folded_name = name.casefold()
        if folded_name in names:
            raise ValueError("two records of one name (readers ignore case)")
        names.add(folded_name)
        layout.add(name, payload)
    return layout.finish()


class _ArchiveLayout(Struct):
    """The segments of an archive so far, and the bytes that are known since the last data."""

    root: bytes
    """The top folder with its slash."""
    alignment: int
    crc: bool
    offset: int = 0
    """The first byte of the next record."""
    segments: list[Segment] = field(default_factory=list)
    known: list[bytes] = field(default_factory=list)
    """Bytes that are known, since the last segment."""
    described: tuple[str, int, struct.Struct] | None = None
    """The label, length and kind of descriptor of the data whose descriptor stands before what is known."""
    group: _SmallGroup | None = None
    """Small records since the last segment; while there are some, nothing else is known."""
    directory: list[bytes | str | None] = field(default_factory=list)
    """The central directory: bytes, and in the place of a checksum its label, or None for that of the late payload."""
    directory_nbytes: int = 0
    record_count: int = 0
    late: tuple[Late, struct.Struct] | None = None
    """The payload of the last record if it is late, and its kind of descriptor."""

    def add(self, name: str, payload: Payload) -> None:
        """Add a record: its header, its payload and descriptor, and its entry in the directory."""
        if self.late is not None:
            raise ValueError("a late payload must be the last record")
        raw_name = self.root + name.encode("utf-8")
        if len(raw_name) > MAX16:
            raise ValueError(f"a record's name of {len(raw_name):,} bytes")
        nbytes = len(payload) if isinstance(payload, bytes) else payload.nbytes
        is_wide = nbytes >= MAX32 or self.offset >= MAX32
        descriptor = LONG_DESCRIPTOR if is_wide else SHORT_DESCRIPTOR
        crc = crc32(payload) if self.crc and isinstance(payload, bytes) else 0
        checksum: bytes | str | None = crc.to_bytes(4, "little")
        if self.crc and nbytes and not isinstance(payload, bytes | Hole):
            checksum = None if isinstance(payload, Late) else name
            if isinstance(payload, Data | Memory):
                checksum = payload.label

        # The entry in the directory. The lengths of its zip64 block and of other parts follow its name's.
        size, offset, entry_block, lengths = nbytes, self.offset, b"", NO_BLOCK
        if is_wide:
            entry_block = _zip64(nbytes, nbytes, offset)
            lengths = len(entry_block).to_bytes(12, "little")
            size, offset = min(size, MAX32), min(offset, MAX32)
        entry_end = ENTRY_END.pack(size, size, len(raw_name), lengths, offset)
        entry_end += raw_name + entry_block
        self.directory += (FILLED if nbytes else EMPTY, checksum, entry_end)
        self.directory_nbytes += len(FILLED) + 4 + len(entry_end)
        self.record_count += 1

        block = _zip64(nbytes, 0, self.offset) if is_wide else b""
        head, payload_offset = header(
            raw_name, nbytes > 0, self.offset, alignment=self.alignment, block=block
        )
        self.offset = payload_offset + nbytes + (descriptor.size if nbytes else 0)
        if isinstance(payload, SmallRecord):
            self._add_small(name, payload, head, descriptor)
            return
        if self.group is not None:
            self._flush()
        self.known.append(head)
        if isinstance(payload, Late):
            self.late = payload, descriptor
        elif nbytes and isinstance(payload, bytes):
            self.known += (payload, descriptor.pack(DESCRIPTOR_SIGNATURE, crc, nbytes, nbytes))
        elif nbytes:
            self._flush()
            self.segments.append(payload)  # type: ignore[arg-type]  # no bytes
            if isinstance(checksum, str):
                self.described = checksum, nbytes, descriptor
            else:
                self.known.append(descriptor.pack(DESCRIPTOR_SIGNATURE, 0, nbytes, nbytes))

    def _add_small(
        self, name: str, payload: SmallRecord, head: bytes, descriptor: struct.Struct
    ) -> None:
        """Add a small record to the open group, or begin another one."""
        if self.group is None or not self.group.takes(payload, descriptor):
            self._flush()
            self.group = _SmallGroup(payload.storages, descriptor, crc=self.crc)
        self.group.add(name, payload, head)

    def _flush(self) -> None:
        """Make a segment of the small records since the last one, or of the bytes that are known."""
        if self.group is not None:
            self.segments.append(self.group.segment())
            self.group = None
            return
        known = b"".join(self.known)
        self.known = []
        if self.described is not None:
            label, nbytes, descriptor = self.described
            self.described = None
            make = partial(_describe, label, nbytes, descriptor, known)
            self.segments.append(Late(descriptor.size + len(known), make, label))
        elif known:
            self.segments.append(Literal(known))

    def finish(self) -> tuple[Segment, ...]:
        """Add the central directory and the records at the end."""
        if self.group is not None:
            self._flush()
        end = make_end(self.record_count, self.offset, self.directory_nbytes)
        known_parts = [part for part in self.directory if isinstance(part, bytes)]
        if self.late is None and len(known_parts) == len(self.directory):
            self.known += (*known_parts, end)
            self._flush()
            return tuple(self.segments)
        self._flush()
        nbytes = self.directory_nbytes + len(end)
        if self.late is not None:
            payload, descriptor = self.late
            nbytes += payload.nbytes + (descriptor.size if payload.nbytes else 0)
        pieces = partial(_end_pieces, [*self.directory, end], self.late, self.crc)
        self.segments.append(Late(nbytes, lambda crcs: put_together(pieces(crcs), nbytes)))
        return tuple(self.segments)


def _end_pieces(
    directory: Sequence[bytes | str | None],
    late: tuple[Late, struct.Struct] | None,
    crc: bool,
    crcs: Mapping[str, int],
) -> Iterator[bytes]:
    """Yield the late payload, if there is one, and the directory with all checksums."""
    late_crc = 0
    if late is not None:
        payload, descriptor = late
        content = payload.content(crcs)
        if content:
            late_crc = crc32(content) if crc else 0
            yield content
            yield descriptor.pack(DESCRIPTOR_SIGNATURE, late_crc, len(content), len(content))
    for part in directory:
        if isinstance(part, bytes):
            yield part
        else:
            yield (late_crc if part is None else crcs[part]).to_bytes(4, "little")


class _SmallGroup:
    """Small records that follow each other, all of them with the same kind of descriptor."""

    def __init__(self, storages: RecordBytes, descriptor: struct.Struct, *, crc: bool) -> None:
        self.storages = storages
        self.descriptor = descriptor
        self.crc = crc
        self.headers: list[bytes] = []
        self.labels: list[str] = []
        self.numbers: list[int] = []
        self.lengths: list[int] = []
        self.nbytes = 0
        """The length of the segment."""
        self.read_nbytes = 0

    def takes(self, payload: SmallRecord, descriptor: struct.Struct) -> bool:
        """Return whether a record may be added: the segment is read and made at once, so it is kept short."""
        has_room = self.nbytes < blocks.BLOCK_NBYTES and len(self.labels) < blocks.BATCH
        is_alike = descriptor is self.descriptor and payload.storages is self.storages
        return has_room and is_alike

    def add(self, label: str, payload: SmallRecord, head: bytes) -> None:
        self.headers.append(head)
        self.labels.append(label)
        self.numbers.append(payload.number)
        self.lengths.append(payload.nbytes)
        self.nbytes += len(head) + payload.nbytes + self.descriptor.size
        self.read_nbytes += payload.read_nbytes

    def segment(self) -> Gathered:
        return Gathered(
            self.nbytes,
            self.labels,
            self.make,
            between=self.nbytes - sum(self.lengths),
            read_nbytes=self.read_nbytes,
        )

    def make(self) -> tuple[bytes, dict[str, int]]:
        """Return the bytes of the records and their checksums."""
        pieces = self.storages.read(self.numbers)
        crcs = crc32_each(pieces) if self.crc else [0] * len(pieces)
        pack = self.descriptor.pack
        joined: list[bytes | memoryview] = []
        for head, piece, crc, nbytes in zip(self.headers, pieces, crcs, self.lengths, strict=True):
            joined += (head, piece, pack(DESCRIPTOR_SIGNATURE, crc, nbytes, nbytes))
        known = dict(zip(self.labels, crcs, strict=True)) if self.crc else {}
        for label, piece in zip(self.labels, pieces, strict=True):
            # torch takes what begins like a descriptor for one (`formats.torch.write.mistaken_crc`).
            if piece[0] == SIGNATURE[0] and piece[:4] == SIGNATURE and len(piece) >= 8:
                known[label + MISTAKEN_KEY] = int.from_bytes(piece[4:8], "little")
                known[MISTAKEN_KEY] = 0
        return b"".join(joined), known


def header(
    raw_name: bytes, is_filled: bool, offset: int, *, alignment: int, block: bytes = b""
) -> tuple[bytes, int]:
    """Return the local header of a record that begins at an offset, with its padding; and where its payload begins.

    `block` is its zip64 block.
    """
    unpadded = offset + FIXED + len(raw_name) + len(block)
    padding_nbytes = -unpadded % alignment
    flags = UTF8 | DESCRIBED if is_filled else UTF8
    extra_nbytes = len(block) + 4 + padding_nbytes
    fixed = HEADER.pack(LOCAL_SIGNATURE, 0, flags, 0, 0, 0, 0, 0, 0, len(raw_name), extra_nbytes)
    padding = b"FB" + padding_nbytes.to_bytes(2, "little") + b"Z" * padding_nbytes
    return fixed + raw_name + block + padding, unpadded + padding_nbytes


def _describe(
    label: str, nbytes: int, descriptor: struct.Struct, behind: bytes, crcs: Mapping[str, int]
) -> bytes:
    """Return the descriptor of the data of a label, and the known bytes behind it."""
    return descriptor.pack(DESCRIPTOR_SIGNATURE, crcs[label], nbytes, nbytes) + behind


def _zip64(size: int, packed: int, offset: int) -> bytes:
    """Return a zip64 block with the sizes, if they need 64 bits, and the offset, if it does."""
    values = [size, packed] if size >= MAX32 else []
    if offset >= MAX32:
        values.append(offset)
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values)
