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
from array import array
from collections.abc import Iterable, Mapping, Sequence
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
    check_length,
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

    def segment(self, number: int, label: str) -> bytes | Data | Memory:
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
ENTRY_END = struct.Struct("<3IH12sI")
"""The checksum in a `SHORT_ENTRY` and what stands behind it."""
CRC = struct.Struct("<I")
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
    directory: bytearray = field(default_factory=bytearray)
    """The central directory, with 0 for each checksum that is not known yet."""
    crc_labels: list[str | None] = field(default_factory=list)
    """The labels of the checksums that are not known; None for that of the late payload."""
    crc_positions: array[int] = field(default_factory=lambda: array("q"))
    """Where these checksums belong in the directory."""
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
        label = None
        if isinstance(payload, Data | Memory):
            label = payload.label
        elif isinstance(payload, SmallRecord):
            label = name
        if self.crc and nbytes and not isinstance(payload, bytes | Hole):
            self.crc_labels.append(label)
            self.crc_positions.append(len(self.directory) + len(FILLED))

        # The entry in the directory. The lengths of its zip64 block and of other parts follow its name's.
        size, offset, entry_block, lengths = nbytes, self.offset, b"", NO_BLOCK
        if is_wide:
            entry_block = _zip64(nbytes, nbytes, offset)
            lengths = len(entry_block).to_bytes(12, "little")
            size, offset = min(size, MAX32), min(offset, MAX32)
        self.directory += FILLED if nbytes else EMPTY
        self.directory += ENTRY_END.pack(crc, size, size, len(raw_name), lengths, offset)
        self.directory += raw_name
        self.directory += entry_block
        self.record_count += 1

        begin = self.offset
        head, payload_offset = header(raw_name, nbytes, begin, alignment=self.alignment)
        self.offset = payload_offset + nbytes + (descriptor.size if nbytes else 0)
        if isinstance(payload, SmallRecord):
            # Added to the open group, or to another one.
            if self.group is None or not self.group.takes(payload, descriptor):
                self._flush()
                self.group = _SmallGroup(self, begin, payload.storages, descriptor)
            self.group.add(name, payload, self.offset - begin)
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
            if self.crc and label is not None:
                self.described = label, nbytes, descriptor
            else:
                self.known.append(descriptor.pack(DESCRIPTOR_SIGNATURE, 0, nbytes, nbytes))

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
        end = make_end(self.record_count, self.offset, len(self.directory))
        if self.late is None and not self.crc_labels:
            self.known += (bytes(self.directory), end)
            self._flush()
            return tuple(self.segments)
        self._flush()
        nbytes = len(self.directory) + len(end)
        if self.late is not None:
            payload, descriptor = self.late
            nbytes += payload.nbytes + (descriptor.size if payload.nbytes else 0)
        self.directory += end
        make = partial(
            _finish_archive,
            self.directory,
            self.crc_labels,
            self.crc_positions,
            self.late,
            self.crc,
        )
        self.segments.append(Late(nbytes, make))
        return tuple(self.segments)


def _finish_archive(
    directory: bytearray,
    crc_labels: Sequence[str | None],
    crc_positions: Sequence[int],
    late: tuple[Late, struct.Struct] | None,
    crc: bool,
    crcs: Mapping[str, int],
) -> bytes:
    """Make the late payload, if there is one, and the directory with all checksums."""
    late_record, late_crc = b"", 0
    if late is not None:
        payload, descriptor = late
        late_record = check_length(payload.make(crcs), payload.nbytes)
        if late_record:
            nbytes = len(late_record)
            late_crc = crc32(late_record) if crc else 0
            late_record += descriptor.pack(DESCRIPTOR_SIGNATURE, late_crc, nbytes, nbytes)

    for label, position in zip(crc_labels, crc_positions, strict=True):
        CRC.pack_into(directory, position, late_crc if label is None else crcs[label])
    return late_record + directory


class _SmallGroup:
    """Small records that follow each other, all of them with the same kind of descriptor."""

    def __init__(
        self,
        layout: _ArchiveLayout,
        start: int,
        storages: RecordBytes,
        descriptor: struct.Struct,
    ) -> None:
        self.root, self.alignment, self.crc = layout.root, layout.alignment, layout.crc
        self.start = start
        """Where the first record begins in the archive."""
        self.storages = storages
        self.descriptor = descriptor
        self.labels: list[str] = []
        self.numbers = array("q")
        self.lengths = array("q")
        self.nbytes = 0
        """The length of the segment."""
        self.read_nbytes = 0

    def takes(self, payload: SmallRecord, descriptor: struct.Struct) -> bool:
        """Return whether a record may be added: the segment is read and made at once, so it is kept short."""
        has_room = (
            self.nbytes < blocks.BLOCK_NBYTES and len(self.labels) < blocks.BATCH_TENSOR_COUNT
        )
        is_alike = descriptor is self.descriptor and payload.storages is self.storages
        return has_room and is_alike

    def add(self, label: str, payload: SmallRecord, record_nbytes: int) -> None:
        self.labels.append(label)
        self.numbers.append(payload.number)
        self.lengths.append(payload.nbytes)
        self.nbytes += record_nbytes
        self.read_nbytes += payload.read_nbytes

    def segment(self) -> Gathered:
        return Gathered(
            self.nbytes,
            self.labels,
            self.make,
            overhead_nbytes=self.nbytes - sum(self.lengths),
            read_nbytes=self.read_nbytes,
        )

    def make(self) -> tuple[bytes, dict[str, int]]:
        """Return the bytes of the records and their checksums."""
        pieces = self.storages.read(self.numbers)
        crcs = crc32_each(pieces) if self.crc else [0] * len(pieces)
        pack = self.descriptor.pack
        joined: list[bytes | memoryview] = []
        offset = self.start
        # The headers are made here, because those of a million records are as large as their pickle.
        for label, piece, crc, nbytes in zip(self.labels, pieces, crcs, self.lengths, strict=True):
            raw_name = self.root + label.encode("utf-8")
            head, payload_offset = header(raw_name, nbytes, offset, alignment=self.alignment)
            joined += (head, piece, pack(DESCRIPTOR_SIGNATURE, crc, nbytes, nbytes))
            offset = payload_offset + nbytes + self.descriptor.size
        known = dict(zip(self.labels, crcs, strict=True)) if self.crc else {}
        for label, piece in zip(self.labels, pieces, strict=True):
            # torch takes what begins like a descriptor for one (`formats.torch.write.mistaken_crc`).
            if piece[0] == SIGNATURE[0] and piece[:4] == SIGNATURE and len(piece) >= 8:
                known[label + MISTAKEN_KEY] = int.from_bytes(piece[4:8], "little")
                known[MISTAKEN_KEY] = 0
        return b"".join(joined), known


def header(raw_name: bytes, nbytes: int, offset: int, *, alignment: int) -> tuple[bytes, int]:
    """Make the local header of a record that begins at an offset, with its padding.

    Returns:
        The header, and the offset of the payload.
    """
    block = _zip64(nbytes, 0, offset) if nbytes >= MAX32 or offset >= MAX32 else b""
    unpadded = offset + FIXED + len(raw_name) + len(block)
    padding_nbytes = -unpadded % alignment
    flags = UTF8 | DESCRIBED if nbytes else UTF8
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
