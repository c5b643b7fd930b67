"""The central directory: one entry for each record, as columns of numbers in the order of the file.

    signature made-by needed flags method time date crc packed size n x c disk internal attributes offset │ name extra
        4        2      2      2      2     2    2   4    4      4  2 2 2  2      2         4        4    │   n    x

A 32-bit `size`, `packed` or `offset` of 0xFFFFFFFF stands for the next value of the zip64 block, in that order:

    1  nbytes  [size]  [packed]  [offset]       nbytes = 8 × (saturated fields)
    2    2       8        8         8

One loop finds where entries begin; all that follows works on whole columns.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from holdfast.formats.zip.extra import CENTRAL_BLOCKS, find_zip64
from holdfast.formats.zip.layout import (
    DEFLATE_OPTIONS,
    DEFLATED,
    DESCRIBED,
    ENTRY,
    ENTRY_SIGNATURE,
    MAX32,
    STORED,
    UTF8,
    Bools,
    Ints,
    Places,
    Sizes,
    gather,
    refused,
)
from holdfast.formats.zip.names import decode_names
from holdfast.formats.zip.tail import Tail

__all__ = ["Entries", "read_entries"]

NEWEST = 63
"""The highest "version needed" that CPython's zipfile opens. torch writes 0 or 20, CPython 20, 45 or 63."""

DEFLATE_RATIO = 1032
"""Deflate cannot do better: 258 bytes from two bits."""

FOLDER_ATTRIBUTE = 0x10
"""The DOS attribute that makes torch take a record for a folder: it then gives back memory that it never filled."""

KINDS, PLAIN, FOLDER = 0xF000, 0x8000, 0x4000
"""The file type in a unix mode. Links, devices and pipes are neither plain nor a folder."""

LENGTHS, LENGTHS_AT = struct.Struct("<3H"), 28
"""The lengths n, x, c of an entry, which say where the next one begins."""

VALUE = np.dtype([("value", "<u8")])


@dataclass(frozen=True, slots=True)
class Entries:
    """The central directory, a row for each record, sorted by where the records lie."""

    raw_names: list[bytes]
    """The names as they are stored."""
    names: list[str]
    """The names as text."""
    folders: Bools
    """Whether the record is a folder, which has no content."""
    flags: Ints
    methods: Ints
    crcs: Ints
    packed: Ints
    """Bytes in the file."""
    sizes: Ints
    """Bytes of content: more than `packed` where deflated."""
    offsets: Ints
    """Where each local header is, counted from the archive's start."""


def read_entries(raw: bytes, tail: Tail, *, key: str, start: int) -> Entries:
    """Parse and check a central directory; `start` is where the archive begins in the file."""
    place = start + tail.directory
    positions, raw_names = _walk(raw, tail.count, key=key, place=place)
    places = Places(key, positions + place)
    fields = gather(raw, positions, ENTRY)
    places.require(fields["signature"] == ENTRY_SIGNATURE, "no entry where one should be in the directory")
    sizes, packed, offsets = _resolve(raw, positions, fields, places)
    flags, methods = fields["flags"].astype(np.int64), fields["method"].astype(np.int64)
    _check_kinds(fields, flags, methods, places)
    _check_sizes(fields["crc"], methods, sizes, packed, places)
    inside = (packed <= tail.directory) & (offsets <= tail.directory)
    places.require(inside, "a record outside of the archive")
    names = decode_names(raw_names, flags.tolist(), places)
    folders = np.fromiter((name.endswith("/") for name in names), np.bool_, len(names))
    _check_attributes(fields["attributes"], folders, places)
    places.require(~folders | ((sizes == 0) & (methods == STORED)), "a folder that has content")
    order = np.argsort(offsets, kind="stable")
    rows = order.tolist()
    return Entries(
        raw_names=[raw_names[row] for row in rows],
        names=[names[row] for row in rows],
        folders=folders[order],
        flags=flags[order],
        methods=methods[order],
        crcs=fields["crc"].astype(np.int64)[order],
        packed=packed.astype(np.int64)[order],
        sizes=sizes.astype(np.int64)[order],
        offsets=offsets.astype(np.int64)[order],
    )


def _walk(raw: bytes, count: int, *, key: str, place: int) -> tuple[Ints, list[bytes]]:
    """Where each entry begins, and its name."""
    head, last = ENTRY.itemsize, len(raw) - ENTRY.itemsize
    unpack = LENGTHS.unpack_from
    position = 0
    positions, names = [], []
    for _ in range(count):
        if position > last:
            where = place + min(position, len(raw))
            raise refused(f"fewer than {count} entries in the directory", key=key, offset=where)
        name, extra, comment = unpack(raw, position + LENGTHS_AT)
        stop = position + head + name
        positions.append(position)
        names.append(raw[position + head : stop])
        position = stop + extra + comment
    if position != len(raw):
        raise refused(
            f"the directory of {len(raw)} bytes has entries of {position} bytes",
            key=key,
            offset=place + min(position, len(raw)),
            expected=len(raw),
            found=position,
        )
    return np.array(positions, np.int64), names


def _resolve(raw: bytes, positions: Ints, fields: np.ndarray, places: Places) -> tuple[Sizes, Sizes, Sizes]:
    """Sizes, packed sizes and offsets, with saturated fields taken from the zip64 blocks."""
    starts = positions + ENTRY.itemsize + fields["name_nbytes"]
    bodies, nbytes = find_zip64(raw, starts, starts + fields["extra_nbytes"], known=CENTRAL_BLOCKS, places=places)
    values = [fields[name].astype(np.uint64) for name in ("size", "packed", "offset")]
    wanted = np.zeros(len(positions), np.int64)
    saturated = [column == MAX32 for column in values]
    for mask in saturated:
        wanted += 8 * mask
    fits = (nbytes == wanted) & ((bodies >= 0) == (wanted > 0))
    places.require(fits, "a zip64 block that does not hold exactly the saturated fields")
    cursors = bodies.copy()
    for column, mask in zip(values, saturated, strict=True):
        column[mask] = gather(raw, cursors[mask], VALUE)["value"]
        cursors[mask] += 8
    size, packed, offset = values
    return size, packed, offset


def _check_kinds(fields: np.ndarray, flags: Ints, methods: Ints, places: Places) -> None:
    """Flags, methods and the fields that must be empty."""
    places.require(fields["disk"] == 0, "a record on another disk")
    places.require(fields["comment_nbytes"] == 0, "a record with a comment")
    places.require(fields["needed"] <= NEWEST, f"a record that needs a zip version above {NEWEST}")
    places.require((methods == STORED) | (methods == DEFLATED), "a record that is neither stored nor deflated")
    allowed = DESCRIBED | UTF8 | np.where(methods == DEFLATED, DEFLATE_OPTIONS, 0)
    places.require(flags & ~allowed == 0, "a record with flags for encryption or other features")


def _check_sizes(crcs: np.ndarray, methods: Ints, sizes: Sizes, packed: Sizes, places: Places) -> None:
    """A stored record is as long as its content; a deflated one cannot claim more than deflate can hold."""
    stored = methods == STORED
    places.require(~stored | (sizes == packed), "a stored record of two different sizes")
    possible = stored | ((packed > 0) & (sizes // DEFLATE_RATIO <= packed) & (sizes < 1 << 63))
    places.require(possible, "a deflated record that claims more than its bytes can hold")
    places.require((sizes > 0) | (crcs == 0), "an empty record with a checksum")


def _check_attributes(attributes: np.ndarray, folders: Bools, places: Places) -> None:
    """Only plain files, and folders under a folder's name."""
    kinds = attributes >> 16 & KINDS
    plain = (kinds == 0) | (kinds == np.where(folders, FOLDER, PLAIN))
    places.require(plain, "a record that is a link, a device or otherwise no plain file")
    places.require(folders | (attributes & FOLDER_ATTRIBUTE == 0), "a file marked as a folder")
