"""The end of an archive: where is the central directory, and how many records does it claim?

    … central directory │ zip64 end │ zip64 locator │ end record │
                             56            20              22     stop

The end record must be the very last 22 bytes. A comment after it is refused, and with that every reader finds the
same one, whether it searches backwards for the signature or tries the last 22 bytes first. If the zip64 locator is
there, it must point at the 56 bytes before it (CPython looks there, torch follows the pointer), and each field of the
end record must be saturated or equal to its 64-bit twin (some readers take one, some the other).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from holdfast.core.protocols import Source
from holdfast.errors import LimitExceeded, Truncated, ZipError
from holdfast.formats.zip.layout import ENTRY, MAX16, MAX32, refused

__all__ = ["Tail", "read_tail"]

END = struct.Struct("<4s4H2IH")
LOCATOR = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQ2H2I4Q")

COMMENT_REACH = MAX16 + END.size
"""How far before the end of a file an end record can be, if a comment follows it."""


@dataclass(frozen=True, slots=True)
class Tail:
    """What the end of the archive says."""

    directory: int
    """First byte of the central directory, counted from the archive's start."""
    nbytes: int
    """Bytes of the central directory."""
    count: int
    """Records."""


def read_tail(source: Source, key: str, *, start: int, stop: int) -> Tail:
    """Find the central directory; nothing that the tail claims is larger than the archive or the limits."""
    length = stop - start
    if length < END.size:
        raise Truncated(f"zip archive: {length} bytes are too few for its end record", file=key, offset=stop)
    reach = min(length, END.size + LOCATOR.size + END64.size)
    raw = source.bytes(key, stop - reach, stop)
    at = reach - END.size
    signature, disk, first_disk, here, count, nbytes, directory, comment = END.unpack_from(raw, at)
    if signature != b"PK\5\6" or comment:
        raise _no_end(source, key, start, stop)
    if disk or first_disk:
        raise refused("it is one of several disks", key=key, offset=stop - END.size, found=(disk, first_disk))
    end = length - END.size
    claims = (here, count, nbytes, directory)
    if raw[max(at - LOCATOR.size, 0) : at].startswith(b"PK\6\7"):
        end -= LOCATOR.size + END64.size
        if end < 0:
            raise refused("no room for the zip64 end record", key=key, offset=stop - reach)
        claims = _read_wide(raw, claims, key=key, position=end, offset=stop - reach)
    elif MAX32 in (nbytes, directory):
        raise refused("the zip64 end record is missing", key=key, offset=stop - END.size)
    here, count, nbytes, directory = claims
    if here != count:
        raise refused("two different counts of records", key=key, offset=stop - END.size, expected=count, found=here)
    if directory + nbytes != end:
        raise refused(
            f"the central directory should end at byte {end} of the archive, and ends at {directory + nbytes}",
            key=key,
            offset=start + end,
            expected=end,
            found=directory + nbytes,
        )
    if count * ENTRY.itemsize > nbytes:
        raise refused(f"{count} records in a directory of {nbytes} bytes", key=key, offset=stop - END.size, found=count)
    for field, value in (("zip_directory_nbytes", nbytes), ("zip_records", count)):
        limit = getattr(source.limits, field)
        if value > limit:
            raise LimitExceeded(
                f"zip archive: {value} is more than Limits({field}={limit}); raise it if you trust the file",
                file=key,
                offset=start + directory,
                expected=limit,
                found=value,
            )
    return Tail(directory, nbytes, count)


def _read_wide(raw: bytes, claims: tuple[int, int, int, int], *, key: str, position: int, offset: int) -> tuple[int, int, int, int]:
    """The four claims as the zip64 end record has them; `raw` starts with it, at `position` of the archive."""
    _, locator_disk, pointer, disks = LOCATOR.unpack_from(raw, END64.size)
    if locator_disk or disks != 1:
        raise refused("it is one of several disks", key=key, offset=offset + END64.size, found=(locator_disk, disks))
    if pointer != position:
        raise refused(
            f"the zip64 locator points at byte {pointer} and not at byte {position}, the end record before it",
            key=key,
            offset=offset + END64.size,
            expected=position,
            found=pointer,
        )
    signature, rest, _, _, disk, first_disk, *wide = END64.unpack_from(raw)
    if signature != b"PK\6\6" or rest != END64.size - 12:
        raise refused("no zip64 end record of 56 bytes before its locator", key=key, offset=offset)
    if disk or first_disk:
        raise refused("it is one of several disks", key=key, offset=offset, found=(disk, first_disk))
    for narrow, value, most in zip(claims, wide, (MAX16, MAX16, MAX32, MAX32), strict=True):
        if narrow not in (value, most):
            raise refused("the end record and the zip64 end record disagree", key=key, offset=offset, expected=value, found=narrow)
    here, count, nbytes, directory = wide
    return here, count, nbytes, directory


def _no_end(source: Source, key: str, start: int, stop: int) -> ZipError | Truncated:
    """Why the last 22 bytes are no end record: the two reasons ask for different things to be done."""
    near = max(start, stop - COMMENT_REACH)
    found = source.bytes(key, near, stop).rfind(b"PK\5\6")
    if found < 0:
        return Truncated(
            "zip archive: there is no end record; the file was cut short or never finished, get or save it again",
            file=key,
            offset=stop,
        )
    return refused("a comment or other bytes after the end record", key=key, offset=near + found)
