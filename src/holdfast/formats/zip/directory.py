"""The end of an archive (`read_tail`), and the central directory that it points at: one entry for each record, as columns of
numbers in the order of the file.

    signature made-by needed flags method time date crc packed size n x c disk internal attributes offset │ name extra
        4        2      2      2      2     2    2   4    4      4  2 2 2  2      2         4        4    │   n    x

A 32-bit `size`, `packed` or `offset` of 0xFFFFFFFF stands for the next value of the zip64 block, in that order:

    1  nbytes  [size]  [packed]  [offset]       nbytes = 8 × (saturated fields)
    2    2       8        8         8

One loop finds where entries begin; all that follows works on whole columns.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.protocols import Source
from holdfast.core.value import Value
from holdfast.errors import LimitExceeded, Truncated, ZipError
from holdfast.formats.zip.layout import (
    CENTRAL_BLOCKS,
    DEFLATE_OPTIONS,
    DEFLATED,
    DESCRIBED,
    ENTRY,
    ENTRY_SIGNATURE,
    MAX16,
    MAX32,
    STORED,
    UTF8,
    FieldOffsets,
    Sizes,
    find_zip64,
    gather,
    refused,
)

DRIVE = re.compile(r"\0[A-Za-z]:")
"""A drive letter, behind the NUL that ends the name before."""

SHOWN = 80
"""Characters of a hostile name that an error message repeats."""


def decode_names(raw: Sequence[bytes], flags: Sequence[int], places: FieldOffsets, *, fold_case: bool = True) -> list[str]:
    """The names as text, in the same order. A folder's name keeps its final slash.

    All names are checked together, as one text with NUL before, between and behind them: a hundred thousand names cost a
    few passes in C. Only when a pass finds something are the names visited one by one, to say which.
    """
    if not raw:
        return []
    together = b"\0".join(raw)
    try:
        text = together.decode("utf-8")
    except UnicodeDecodeError:
        text = ""
    names = text.split("\0")
    agreed = together.isascii() or all(flag & UTF8 for flag in flags)
    if len(names) != len(raw) or not agreed or unsafe(text):
        for row, name in enumerate(raw):
            problem = _problem(name, utf8=bool(flags[row] & UTF8))
            if problem:
                raise refused(problem, key=places.key, offset=int(places.offsets[row]))
    # Folding works character by character, so folding the whole is folding each. A folder must not share a file's name.
    folded = ((text.casefold() if fold_case else text) + "\0").replace("/\0", "\0").split("\0")[:-1]
    if len(set(folded)) != len(folded):
        first: dict[str, int] = {}
        for row, same in enumerate(folded):
            before = first.setdefault(same, row)
            if before != row:
                pair = f"{names[before][:SHOWN]!r} and {names[row][:SHOWN]!r}"
                message = f"two records of one name, {pair}{' (torch ignores case)' if fold_case else ''}"
                raise refused(message, key=places.key, offset=int(places.offsets[row]))
    return names


def unsafe(text: str) -> bool:
    """Whether any of NUL-separated names has a part that is empty, `.` or `..`, a backslash or a drive letter.

    >>> unsafe("archive/data.pkl"), unsafe("folder/"), unsafe("a/../b"), unsafe("/a"), unsafe("a//b"), unsafe("")
    (False, False, True, True, True, True)
    """
    padded = f"\0{text}\0"
    parts = padded.replace("/\0", "\0").replace("\0", "/")
    if "//" in parts or "/./" in parts or "/../" in parts or "\\" in parts:
        return True
    return ":" in parts and DRIVE.search(padded) is not None


def _problem(raw: bytes, *, utf8: bool) -> str | None:
    """What is wrong with one name, if anything is."""
    shown = repr(raw[:SHOWN])
    if b"\0" in raw:
        return f"a NUL in the name {shown}, where some readers end it"
    if not utf8 and not raw.isascii():
        return f"the name {shown} is neither ASCII nor marked as UTF-8"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return f"the name {shown} is marked as UTF-8 and is not"
    return f"the unsafe name {text[:SHOWN]!r}" if unsafe(text) else None


END = struct.Struct("<4s4H2IH")
LOCATOR = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQ2H2I4Q")

COMMENT_REACH = MAX16 + END.size
"""How far before the end of a file an end record can be, if a comment follows it."""


class Tail(Value, frozen=True):
    """What the end of the archive says."""

    directory: int
    """First byte of the central directory, counted from the archive's start."""
    nbytes: int
    """Bytes of the central directory."""
    count: int
    """Records."""


def read_tail(source: Source, key: str, *, start: int, stop: int) -> Tail:
    """Find the central directory; nothing that the tail claims is larger than the archive or the limits.

        … central directory │ zip64 end │ zip64 locator │ end record │
                                 56            20              22     stop

    The end record must be the very last 22 bytes. A comment after it is refused, and with that every reader finds the
    same one, whether it searches backwards for the signature or tries the last 22 bytes first. If the zip64 locator is
    there, it must point at the 56 bytes before it (CPython looks there, torch follows the pointer), and each field of the
    end record must be saturated or equal to its 64-bit twin (some readers take one, some the other).
    """
    length = stop - start
    if length < END.size:
        raise Truncated(f"zip archive: {length} bytes are too few for its end record", file=key, offset=stop)
    reach = min(length, END.size + LOCATOR.size + END64.size)
    raw = source.bytes(key, stop - reach, stop)
    at = reach - END.size
    signature, disk, first_disk, here, count, nbytes, directory, comment = END.unpack_from(raw, at)
    if signature != b"PK\5\6" or comment:
        raise _no_end(source, key, start, stop=stop)
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


def _no_end(source: Source, key: str, start: int, *, stop: int) -> ZipError | Truncated:
    """Why the last 22 bytes are no end record: the two reasons ask for different things to be done."""
    near = max(start, stop - COMMENT_REACH)
    found = source.bytes(key, near, stop).rfind(b"PK\5\6")
    if found < 0 or near + found > stop - END.size:  # none, or one that is cut
        return Truncated(
            "zip archive: there is no whole end record; the file was cut short or never finished, get or save it again",
            file=key,
            offset=stop,
        )
    return refused("a comment or other bytes after the end record", key=key, offset=near + found)


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


class Entries(Value, frozen=True):
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


def read_entries(raw: bytes, tail: Tail, *, key: str, start: int, fold_case: bool = True) -> Entries:
    """Parse and check a central directory; `start` is where the archive begins in the file."""
    place = start + tail.directory
    positions, raw_names = _walk(raw, tail.count, key=key, place=place)
    places = FieldOffsets(key, positions + place)
    fields = gather(raw, positions, ENTRY)
    places.require(fields["signature"] == ENTRY_SIGNATURE, "no entry where one should be in the directory")
    sizes, packed, offsets = _resolve(raw, positions, fields, places=places)
    flags, methods = fields["flags"].astype(np.int64), fields["method"].astype(np.int64)
    _check_kinds(fields, flags, methods, places=places)
    _check_sizes(fields["crc"], methods, sizes, packed=packed, places=places)
    inside = (packed <= tail.directory) & (offsets <= tail.directory)
    places.require(inside, "a record outside of the archive")
    names = decode_names(raw_names, flags.tolist(), places, fold_case=fold_case)
    folders = np.array([name[-1:] == "/" for name in names], np.bool_)
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
    known: dict[bytes, tuple[int, ...]] = {}
    """Lengths by their bytes: entries have a few."""
    position = 0
    positions: list[int] = []
    names: list[bytes] = []
    for _ in range(count):
        if position > last:
            where = place + min(position, len(raw))
            raise refused(f"fewer than {count} entries in the directory", key=key, offset=where)
        lengths = raw[position + LENGTHS_AT : position + LENGTHS_AT + LENGTHS.size]
        if lengths not in known:
            known[lengths] = LENGTHS.unpack(lengths)
        name, extra, comment = known[lengths]
        stop = position + head + name
        positions += (position,)
        names += (raw[position + head : stop],)
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


def _resolve(raw: bytes, positions: Ints, fields: np.ndarray, *, places: FieldOffsets) -> tuple[Sizes, Sizes, Sizes]:
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


def _check_kinds(fields: np.ndarray, flags: Ints, methods: Ints, *, places: FieldOffsets) -> None:
    """Flags, methods and the fields that must be empty."""
    places.require(fields["disk"] == 0, "a record on another disk")
    places.require(fields["comment_nbytes"] == 0, "a record with a comment")
    places.require(fields["needed"] <= NEWEST, f"a record that needs a zip version above {NEWEST}")
    places.require((methods == STORED) | (methods == DEFLATED), "a record that is neither stored nor deflated")
    allowed = DESCRIBED | UTF8 | np.where(methods == DEFLATED, DEFLATE_OPTIONS, 0)
    places.require(flags & ~allowed == 0, "a record with flags for encryption or other features")


def _check_sizes(crcs: np.ndarray, methods: Ints, sizes: Sizes, *, packed: Sizes, places: FieldOffsets) -> None:
    """A stored record is as long as its content; a deflated one cannot claim more than deflate can hold."""
    stored = methods == STORED
    places.require(~stored | (sizes == packed), "a stored record of two different sizes")
    possible = stored | ((packed > 0) & (sizes // DEFLATE_RATIO <= packed) & (sizes < 1 << 63))
    places.require(possible, "a deflated record that claims more than its bytes can hold")
    places.require((sizes > 0) | (crcs == 0), "an empty record with a checksum")


def _check_attributes(attributes: np.ndarray, folders: Bools, places: FieldOffsets) -> None:
    """Only plain files, and folders under a folder's name."""
    kinds = attributes >> 16 & KINDS
    plain = (kinds == 0) | (kinds == np.where(folders, FOLDER, PLAIN))
    places.require(plain, "a record that is a link, a device or otherwise no plain file")
    places.require(folders | (attributes & FOLDER_ATTRIBUTE == 0), "a file marked as a folder")
