"""A writer of stored zip archives laid out as torch's own C++ writer lays them out.

torch 2.13.0 cannot write what older or big-endian machines wrote, and will not write what an attacker would.
The golden files of that kind are made here, from records:

    local header | name | extra "FB" padding to the alignment | payload | data descriptor      for each record
    central directory | zip64 end | zip64 locator | end

`make.py` rewrites one of torch's own files through this module and insists that the bytes come out the same.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

__all__ = ["pack", "unpack"]

FLAGS = 0x0808
"""Bit 3, sizes follow the payload; bit 11, the name is UTF-8."""

FLAGS_EMPTY = 0x0800
"""torch writes no descriptor after an empty record."""


def pack(prefix: str, records: Iterable[tuple[str, bytes]], *, alignment: int = 64) -> bytes:
    """The archive as bytes. `records` are (name without prefix, payload), in the order of the file."""
    out = bytearray()
    directory = bytearray()
    count = 0
    for short, payload in records:
        name = f"{prefix}/{short}".encode()
        start = len(out)
        flags = FLAGS if payload else FLAGS_EMPTY
        crc = zlib.crc32(payload)
        pad = -(start + 30 + len(name) + 4) % alignment
        out += struct.pack(
            "<4s5H3I2H", b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(name), pad + 4
        )
        out += name + b"FB" + struct.pack("<H", pad) + b"Z" * pad + payload
        if payload:
            out += struct.pack("<4s3I", b"PK\x07\x08", crc, len(payload), len(payload))
        directory += struct.pack(
            "<4s6H3I5H2I",
            b"PK\x01\x02",
            0,
            0,
            flags,
            0,
            0,
            0,
            crc,
            len(payload),
            len(payload),
            len(name),
            0,
            0,
            0,
            0,
            0,
            start,
        )
        directory += name
        count += 1
    at, size = len(out), len(directory)
    out += directory
    out += struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 0x031E, 0x2D, 0, 0, count, count, size, at)
    out += struct.pack("<4sIQI", b"PK\x06\x07", 0, at + size, 1)
    out += struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, size, at, 0)
    return bytes(out)


def unpack(path: Path) -> dict[str, bytes]:
    """The records of an archive by their names without prefix, in the order of the file."""
    with zipfile.ZipFile(path) as archive:
        return {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}
