"""The strict zip reader: what it accepts, every reader (torch, CPython, …) sees as the same bytes and names.

    1. tail       the last 22 to 98 bytes   where is the directory, how many records      tail.py
    2. directory  one read                  names, sizes, checksums, offsets              directory.py names.py extra.py
    3. records    headers in joined reads   each agrees with the directory, end to end    local.py

No payload is read, beyond small ones that lie between two headers. No checksum of a payload is verified here:
`Record.crc32` is for whoever reads it. Time and memory are linear in the directory and the headers; nothing is
allocated for a count before the bytes for it were seen.

Refused, with the byte where it was seen: other than one end record at the very end, several disks, zip64 records that
disagree, a directory of another size or count, names that are equal or differ in case only, names that are unsafe or
in an unknown encoding, extra fields that rename, encryption and other features, methods other than stored and
deflated, links, comments, local headers and descriptors that disagree with the directory, and any byte that belongs
to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.core.protocols import Source
from holdfast.errors import Truncated
from holdfast.formats.zip.canonical import read_canonical
from holdfast.formats.zip.directory import Entries, read_entries
from holdfast.formats.zip.layout import Ints, refused
from holdfast.formats.zip.local import locate_payloads
from holdfast.formats.zip.records import Archive, Record, Records
from holdfast.formats.zip.tail import read_tail

__all__ = ["Archive", "Record", "read_archive"]


def read_archive(source: Source, key: str, *, start: int = 0, stop: int | None = None) -> Archive:
    """Read which records the archive in bytes `start` to `stop` of a file has, and where they lie.

    Raises `ZipError` for an archive that two readers could see differently, `Truncated` for one that was cut short and
    `LimitExceeded` for one with a larger directory than the source's limits allow.
    """
    size = source.store.size(key)
    if stop is None:
        stop = size
    if not 0 <= start <= stop:
        raise refused(f"it cannot lie from byte {start} to byte {stop}", key=key, offset=start)
    if stop > size:
        raise Truncated(f"zip archive: it should end at byte {stop}, the file has {size}", file=key, offset=size)
    usual = read_canonical(source, key, start=start, stop=stop)
    if usual is not None:
        return usual
    tail = read_tail(source, key, start=start, stop=stop)
    raw = source.bytes(key, start + tail.directory, start + tail.directory + tail.nbytes)
    entries = read_entries(raw, tail, key=key, start=start)
    payloads = locate_payloads(source, entries, tail.directory, key=key, start=start)
    return _archive(entries, payloads, start)


def _archive(entries: Entries, payloads: Ints, start: int) -> Archive:
    """The answer, without folders, and with positions counted from the start of the file."""
    names = entries.names
    rows: Sequence[int] = range(len(names))
    if entries.folders.any():
        rows = np.flatnonzero(~entries.folders).tolist()
        names = [names[row] for row in rows]
    records = Records(
        dict(zip(names, rows, strict=True)),
        starts=payloads + start,
        packed=entries.packed,
        crcs=entries.crcs,
        methods=entries.methods,
        headers=entries.offsets + start,
        sizes=entries.sizes,
    )
    return Archive(records, _prefix(names))


def _prefix(names: list[str]) -> str:
    """The top folder of all names, or nothing.

    >>> _prefix(["archive/data.pkl", "archive/data/0"]), _prefix(["a/x", "b/x"]), _prefix(["x"]), _prefix([])
    ('archive', '', '', '')
    """
    top, slash, _ = names[0].partition("/") if names else ("", "", "")
    return top if slash and all(name.startswith(top + slash) for name in names) else ""
