"""Recognise an archive that torch's writer wrote, by writing it again.

The strict reader checks every rule for every field, in columns; for an archive of seven records that takes longer than all the
rest of reading it, and a DCP directory holds thousands of such archives. But torch's writer leaves no freedom: given names, sizes
and checksums, every other byte of the archive follows. So:

1. Read names, sizes and checksums from the central directory, with no check beyond what it takes to read them.
2. Lay out the archive of these records with our own writer (writer.py).
3. Compare directory, end records, and every header and descriptor with the file. If all of it is equal, the archive is the one
   that the writer makes, which the strict reader accepts; the records lie where the layout put them.

Anything else (another alignment, another writer, a lie) is `None`: the strict reader decides.
"""

from __future__ import annotations

from holdfast.core.protocols import Source
from holdfast.formats.zip.layout import DESCRIPTOR_SIGNATURE, MAX32
from holdfast.formats.zip.names import unsafe
from holdfast.formats.zip.records import Archive, Record
from holdfast.formats.zip.writer import END, ENTRY, LOCATOR, NARROW, ZIP64_END, entry, header, tail

__all__ = ["read_canonical"]

MOST_RECORDS = 64
"""Larger archives are read in columns, which is faster from about here on."""

TAIL = ZIP64_END.size + LOCATOR.size + END.size
TAIL_NBYTES = 4096
"""Bytes from the end that are read at once: the directory of about fifty records."""

WHOLE_NBYTES = 32 << 10
"""An archive up to this size is read with one call."""

ALIGNMENT = 64


def read_canonical(source: Source, key: str, *, start: int, stop: int) -> Archive | None:
    """The records of a small archive as torch writes it; None for every other one."""
    size, limits = stop - start, source.limits
    if (
        size < TAIL
        or stop > source.store.size(key)
        or limits.zip_records < MOST_RECORDS
        or limits.zip_directory_nbytes < WHOLE_NBYTES
    ):
        return None
    near = min(size, WHOLE_NBYTES if size <= WHOLE_NBYTES else TAIL_NBYTES)
    last = source.bytes(key, stop - near, stop)
    end = END.unpack_from(last, near - END.size)
    count, nbytes, at = end[3], end[5], end[6]
    behind = near - TAIL - nbytes
    if not 0 < count <= MOST_RECORDS or at + nbytes + TAIL != size or behind < 0 or size >= MAX32:
        return None
    found = _entries(last[behind : near - TAIL], count)
    if found is None:
        return None
    return _written_again(source, key, found, last if near == size else b"", last[behind:], start=start, directory=at)


def _entries(raw: bytes, count: int) -> list[tuple[bytes, int, int]] | None:
    """Name, size and checksum of each record, as far as the directory can be read at all."""
    entries, at = [], 0
    for _ in range(count):
        if at + ENTRY.size > len(raw):
            return None
        fields = ENTRY.unpack_from(raw, at)
        crc, nbytes, length = fields[7], fields[9], fields[10]
        at += ENTRY.size
        entries.append((raw[at : at + length], nbytes, crc))
        at += length
    return entries


def _written_again(
    source: Source, key: str, entries: list[tuple[bytes, int, int]], whole: bytes, ending: bytes, *, start: int, directory: int
) -> Archive | None:
    prefix, slash, _ = entries[0][0].partition(b"/")
    folder = prefix + slash
    records: dict[str, Record] = {}
    made: list[bytes] = []
    at, before = 0, b""
    for name, nbytes, crc in entries:
        head, begin = header(name, nbytes, at, ALIGNMENT)
        expected = before + head
        where = at - len(before)
        if where + len(expected) > directory:
            return None
        seen = whole[where : where + len(expected)] if whole else source.bytes(key, start + where, start + where + len(expected))
        if seen != expected:
            return None
        made.append(entry(name, nbytes, crc if nbytes else 0, at))
        if not name.startswith(folder) or not name.isascii() or b"\0" in name or name.endswith(b"/"):
            return None
        text = name.decode("ascii")
        records[text] = Record(text, start + begin, nbytes, crc if crc or not nbytes else None, 0, start + at, nbytes)
        before = NARROW.pack(DESCRIPTOR_SIGNATURE, crc, nbytes, nbytes) if nbytes else b""
        at = begin + nbytes + len(before)
    folded = {name.casefold() for name in records}
    if at != directory or len(folded) != len(entries) or not slash or unsafe("\0".join(records)):
        return None
    seen = whole[at - len(before) : at] if whole else source.bytes(key, start + at - len(before), start + at)
    joined = b"".join(made)
    if seen != before or ending != joined + tail(len(made), at, len(joined)):
        return None
    return Archive(records, prefix.decode("ascii"))
