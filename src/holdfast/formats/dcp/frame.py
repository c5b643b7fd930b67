"""Items that are alike are compared, not parsed.

A checkpoint of 10,000 items has a few dozen kinds of them. Two items of one kind are the same archive, byte for byte, but for what
their records hold and the checksums of that:

    │ header, data.pkl, … header │ elements │ descriptor │ … │ serialization id │ … │ directory, end │
                                   (not looked at)   ^crc          ^free, and crc       ^crcs

So the strict zip reader and the pickle interpreter read the first item of a kind. What they accepted is kept as a `Frame`: the
fixed bytes, and where the others are. Any item whose fixed bytes are equal, and whose checksums agree with each other and with what
they cover, is one that they would have accepted as well, with the same geometry. Everything else goes through them again.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Protocol

from holdfast.core.crc import crc32
from holdfast.formats.zip.records import Archive

__all__ = ["STORAGES", "Frame", "Parts", "frame_of"]

STORAGES = "data/"
"""Records below this folder are storages."""

END_NBYTES = 22
ENTRY_NBYTES = 46
DESCRIPTOR = b"PK\7\x08"
ENTRY = b"PK\1\2"
SATURATED = 0xFFFFFFFF
"""In place of an offset that needs 64 bits. Items that large are few, and are parsed each time."""


class Parts(Protocol):
    """An item of which the ends are at hand."""

    @property
    def nbytes(self) -> int:
        """Bytes of the item."""

    def part(self, start: int, stop: int) -> bytes | None:
        """Bytes of it, or None where they are not at hand."""


@dataclass(frozen=True, slots=True)
class Summed:
    """A record whose content is free: where it lies, and where its checksum stands twice."""

    name: str
    """Without the top folder."""
    start: int
    stop: int
    descriptor: int
    entry: int


@dataclass(frozen=True, slots=True)
class Frame:
    """What all items of one kind have in common."""

    fixed: tuple[tuple[int, int, bytes], ...]
    """Ranges of bytes and what is in them."""
    free: tuple[Summed, ...]
    """Small records whose content is compared with its checksum."""
    storage: Summed | None
    """The record of the elements, whose checksum is for whoever reads them."""

    def matches(self, item: Parts) -> bool:
        """Whether an item is of this kind."""
        for start, stop, content in self.fixed:
            if item.part(start, stop) != content:
                return False
        return all(self._agrees(item, record, whole=True) for record in self.free) and (
            self.storage is None or self._agrees(item, self.storage, whole=False)
        )

    def content(self, item: Parts, name: str) -> bytes | None:
        """What a free record of an item that matches holds."""
        return next((item.part(record.start, record.stop) for record in self.free if record.name == name), None)

    def checksum(self, item: Parts) -> int | None:
        """The CRC-32 of the elements of an item that matches, or None where it was not recorded."""
        return None if self.storage is None else _number(item, self.storage.descriptor) or None

    @staticmethod
    def _agrees(item: Parts, record: Summed, *, whole: bool) -> bool:
        crc = _number(item, record.descriptor)
        if crc is None or crc != _number(item, record.entry):
            return False
        if not whole or crc == 0:  # torch writes 0 where checksums are turned off
            return True
        content = item.part(record.start, record.stop)
        return content is not None and crc32(content) == crc


def frame_of(item: Parts, archive: Archive, start: int, free: Container[str]) -> Frame | None:
    """The frame of an item that was accepted; `start` is where it begins in its file, `free` names the records that may differ.

    None where it is not as torch writes it, or where its frame is not at hand.
    """
    entries = dict(_entries(item))
    holes: list[tuple[int, int]] = []
    summed: list[Summed] = []
    storage: Summed | None = None
    for name, record in archive.records.items():
        short = name[len(archive.prefix) + 1 :]
        if short not in free and not short.startswith(STORAGES):
            continue
        if not record.nbytes:
            continue
        at, stop = record.start - start, record.stop - start
        if name not in entries or item.part(stop, stop + 4) != DESCRIPTOR:
            return None
        found = Summed(short, at, stop, stop + 4, entries[name] + 16)
        holes += [(at, stop), (stop + 4, stop + 8), (found.entry, found.entry + 4)]
        if short in free:
            summed.append(found)
        elif storage is None:
            storage = found
        else:
            return None
    fixed = []
    before = 0
    for hole_start, hole_stop in [*sorted(holes), (item.nbytes, item.nbytes)]:
        content = item.part(before, hole_start)
        if content is None:
            return None
        fixed.append((before, hole_start, content))
        before = hole_stop
    return Frame(tuple(fixed), tuple(summed), storage)


def _entries(item: Parts) -> Iterator[tuple[str, int]]:
    """Where the central directory of an archive that was accepted has the entry of each name; nothing where it is not at hand."""
    end = item.part(item.nbytes - END_NBYTES, item.nbytes)
    if end is None:
        return
    count, directory = struct.unpack_from("<H", end, 10)[0], struct.unpack_from("<I", end, 16)[0]
    raw = item.part(directory, item.nbytes) if directory < SATURATED else None
    at = 0
    for _ in range(count if raw is not None else 0):
        if raw is None or raw[at : at + 4] != ENTRY:
            return
        name, extra, comment = struct.unpack_from("<3H", raw, at + 28)
        yield raw[at + ENTRY_NBYTES : at + ENTRY_NBYTES + name].decode("utf-8"), directory + at
        at += ENTRY_NBYTES + name + extra + comment


def _number(item: Parts, at: int) -> int | None:
    raw = item.part(at, at + 4)
    return None if raw is None else int.from_bytes(raw, "little")
