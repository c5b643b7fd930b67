"""The fields of a zip archive, the reader of its end and of its central directory, and the records that it has (`Archive`).

    start                                                                                   stop
    │ record 0 │ record 1 │ … │ central directory │ zip64 end │ zip64 locator │ end record │
                                                     56            20              22

    record       local header   name   extra field     payload   data descriptor
                      30          n     TLV blocks                 16 (24 with zip64), only with flag bit 3

    directory    entry          name   extra field     comment      … once for each record
                      46          n     TLV blocks     (refused)

    entry        signature made-by needed flags method time date crc packed size n x c disk internal attributes offset
                     4        2      2      2      2     2    2   4    4      4  2 2 2  2      2         4        4

All numbers are little-endian. The two zip64 records at the end are optional: torch always writes them, CPython only when they are
needed. Every offset in the archive counts from `start`, which is not 0 for an archive inside a larger file. A 32-bit `size`,
`packed` or `offset` of 0xFFFFFFFF stands for the next value of the zip64 block, in that order:

    1  nbytes  [size]  [packed]  [offset]       nbytes = 8 × (saturated fields)
    2    2       8        8         8

One loop finds where entries begin (`read_entries`); all that follows works on whole columns.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from operator import eq

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Bools, Ints
from holdfast.core.protocols import Source
from holdfast.core.tensor import NO_CRC
from holdfast.core.value import Value
from holdfast.errors import LimitExceeded, Truncated, ZipError

Sizes = npt.NDArray[np.uint64]

MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF
"""A field of 16 or 32 bits that is saturated: its value is in the zip64 record."""

LOCAL_SIGNATURE, ENTRY_SIGNATURE, DESCRIPTOR_SIGNATURE = 0x04034B50, 0x02014B50, 0x08074B50
END_SIGNATURE, LOCATOR_SIGNATURE, END64_SIGNATURE = 0x06054B50, 0x07064B50, 0x06064B50

DESCRIBED = 1 << 3
"""Flag: the local header may leave crc and sizes 0; a data descriptor follows the payload."""
DEFLATE_OPTIONS = 1 << 1 | 1 << 2
"""Flags: how hard the compressor tried. Without meaning for a stored record."""
UTF8 = 1 << 11
"""Flag: the name is UTF-8 and not code page 437."""

STORED, DEFLATED = 0, 8

COMMON = [
    ("needed", "<u2"), ("flags", "<u2"), ("method", "<u2"), ("time", "<u2"), ("date", "<u2"), ("crc", "<u4"), ("packed", "<u4"),
    ("size", "<u4"), ("name_nbytes", "<u2"), ("extra_nbytes", "<u2"),
]  # fmt: skip
"""The fields that a local header and an entry of the directory have in common."""

LOCAL = np.dtype([("signature", "<u4"), *COMMON])
"""A local header, 30 bytes."""

ENTRY = np.dtype([
    ("signature", "<u4"), ("made_by", "<u2"), *COMMON, ("comment_nbytes", "<u2"), ("disk", "<u2"), ("internal", "<u2"),
    ("attributes", "<u4"), ("offset", "<u4"),
])  # fmt: skip
"""An entry of the central directory, 46 bytes."""

NARROW = np.dtype([("signature", "<u4"), ("crc", "<u4"), ("packed", "<u4"), ("size", "<u4")])
"""A data descriptor, 16 bytes."""

WIDE = np.dtype([("signature", "<u4"), ("crc", "<u4"), ("packed", "<u8"), ("size", "<u8")])
"""A data descriptor of a record whose local header has a zip64 block, 24 bytes."""

VALUE = np.dtype([("value", "<u8")])

END, LOCATOR, END64 = struct.Struct("<I4H2IH"), struct.Struct("<IIQI"), struct.Struct("<IQ2H2I4Q")
"""The three records at the end of an archive."""


def gather(raw: bytes, positions: Ints, dtype: np.dtype[np.void]) -> np.ndarray:
    """One structure for each position, all of which must lie inside `raw`."""
    # An array with a structure at every byte, which overlap; taking some of them is the only copy.
    everywhere: np.ndarray = np.ndarray(
        max(len(raw) - dtype.itemsize + 1, 0), dtype, raw, strides=(1,)
    )
    return everywhere[positions]


def refused(
    message: str, *, key: str, offset: int, expected: object = None, found: object = None
) -> ZipError:
    """The error for an archive that two readers could see differently."""
    text = f"zip archive: {message}; no known writer makes this, so the file is damaged or was tampered with"
    return ZipError(text, file=key, offset=offset, expected=expected, found=found)


class FieldOffsets(Value, frozen=True):
    """The file offsets of the fields in a column, so that an error can point at the field that breaks a rule."""

    key: str
    offsets: Ints

    def require(self, good: Bools, message: str) -> None:
        """Refuse the archive at the first field for which `good` is false."""
        # One call, unlike `all()`: an archive of a few records is one of thousands in a DCP file.
        if good.size and not good[first := good.argmin()]:
            raise refused(message, key=self.key, offset=int(self.offsets[first]))

    def of(self, rows: Ints) -> FieldOffsets:
        return FieldOffsets(self.key, self.offsets[rows])


ZIP64 = 0x0001
PADDING = 0x4246
"""`FB`, with which torch moves payloads to their alignment."""
TIMES = (0x000A, 0x5455, 0x5855, 0x7875)
"""Times and owners, which 7-Zip (NTFS) and Info-ZIP (UT, UX, ux) add when a checkpoint is packed again."""

CENTRAL_BLOCKS = np.zeros(1 << 16, np.bool_)
"""For each id, whether its block may be in a directory entry."""
CENTRAL_BLOCKS[[ZIP64, *TIMES]] = True

LOCAL_BLOCKS = CENTRAL_BLOCKS.copy()
"""For each id, whether its block may be in a local header."""
LOCAL_BLOCKS[PADDING] = True

MAX_BLOCKS = 8
"""Blocks in one extra field. No writer comes near; it bounds the rounds of `find_zip64`."""

BLOCK = np.dtype([("id", "<u2"), ("nbytes", "<u2")])


def find_zip64(
    raw: bytes, starts: Ints, stops: Ints, *, known: Bools, places: FieldOffsets
) -> tuple[Ints, Ints]:
    """Check many extra fields at once; give the start and length of each one's zip64 body, (-1, 0) where there is none.

    `starts` and `stops` are positions in `raw`.

        id  nbytes  body…    id  nbytes  body…
        2     2              2     2

    Blocks must fill the field exactly. Only blocks that no reader takes names or positions from are let through, and the
    zip64 block, whose body is given back for the caller to check. Above all 0x7075 is refused: it replaces the name for
    some readers.
    """
    bodies = np.full(len(starts), -1, np.int64)
    lengths = np.zeros(len(starts), np.int64)
    (rows,) = (starts < stops).nonzero()
    cursors = starts[rows]
    for _ in range(MAX_BLOCKS):
        if not len(rows):
            break
        here, ends = places.of(rows), stops[rows]
        here.require(
            cursors + BLOCK.itemsize <= ends, "an extra field ends in the middle of a block"
        )
        blocks = gather(raw, cursors, BLOCK)
        cursors = cursors + BLOCK.itemsize
        nbytes = blocks["nbytes"].astype(np.int64)
        here.require(cursors + nbytes <= ends, "a block is longer than the extra field it is in")
        here.require(known[blocks["id"]], "an extra field with an unknown block")
        found = blocks["id"] == ZIP64
        here.require(~found | (bodies[rows] < 0), "an extra field with two zip64 blocks")
        bodies[rows[found]] = cursors[found]
        lengths[rows[found]] = nbytes[found]
        cursors = cursors + nbytes
        going = cursors < ends
        rows, cursors = rows[going], cursors[going]
    places.of(rows).require(
        np.zeros(len(rows), np.bool_), f"an extra field of more than {MAX_BLOCKS} blocks"
    )
    return bodies, lengths


DRIVE = re.compile(r"\0[A-Za-z]:")
"""A drive letter, behind the NUL that ends the name before."""

SHOWN = 80
"""Characters of a hostile name that an error message repeats."""


def decode_names(
    raw: Sequence[bytes], flags: Sequence[int], places: FieldOffsets, *, fold_case: bool = True
) -> list[str]:
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
                message = (
                    f"two records of one name, {pair}{' (torch ignores case)' if fold_case else ''}"
                )
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
    """The message for a name that is refused; None for a good one."""
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


COMMENT_REACH = MAX16 + END.size
"""The greatest distance of an end record from the end of a file, if a comment follows it."""


def read_tail(source: Source, key: str, *, start: int, stop: int) -> tuple[int, int, int]:
    """The first byte of the central directory, counted from the archive's start, its length, and the number of records.

    Nothing that the tail claims is larger than the archive or the limits.

        … central directory │ zip64 end │ zip64 locator │ end record │
                                 56            20              22     stop

    The end record must be the very last 22 bytes. A comment after it is refused, and with that every reader finds the
    same one, whether it searches backwards for the signature or tries the last 22 bytes first. If the zip64 locator is
    there, it must point at the 56 bytes before it (CPython looks there, torch follows the pointer), and each field of the
    end record must be saturated or equal to its 64-bit twin (some readers take one, some the other).
    """
    length = stop - start
    if length < END.size:
        raise Truncated(
            f"zip archive: {length} bytes are too few for its end record", file=key, offset=stop
        )
    reach = min(length, END.size + LOCATOR.size + END64.size)
    raw = source.bytes(key, stop - reach, stop)
    at = reach - END.size
    signature, disk, first_disk, here, count, nbytes, directory, comment = END.unpack_from(raw, at)
    if signature != END_SIGNATURE or comment:
        raise _no_end(source, key, start, stop=stop)
    if disk or first_disk:
        raise refused(
            "it is one of several disks", key=key, offset=stop - END.size, found=(disk, first_disk)
        )
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
        raise refused(
            "two different counts of records",
            key=key,
            offset=stop - END.size,
            expected=count,
            found=here,
        )
    if directory + nbytes != end:
        message = f"the central directory should end at byte {end} of the archive, and ends at {directory + nbytes}"
        raise refused(message, key=key, offset=start + end, expected=end, found=directory + nbytes)
    if count * ENTRY.itemsize > nbytes:
        raise refused(
            f"{count} records in a directory of {nbytes} bytes",
            key=key,
            offset=stop - END.size,
            found=count,
        )
    for field, value in (("zip_directory_nbytes", nbytes), ("zip_records", count)):
        limit = getattr(source.limits, field)
        if value > limit:
            message = f"zip archive: {value} is more than Limits({field}={limit}); raise it if you trust the file"
            raise LimitExceeded(
                message, file=key, offset=start + directory, expected=limit, found=value
            )
    return directory, nbytes, count


def _read_wide(
    raw: bytes, claims: tuple[int, int, int, int], *, key: str, position: int, offset: int
) -> tuple[int, int, int, int]:
    """The four claims as the zip64 end record has them; `raw` starts with it, at `position` of the archive."""
    _, locator_disk, pointer, disks = LOCATOR.unpack_from(raw, END64.size)
    if locator_disk or disks != 1:
        raise refused(
            "it is one of several disks",
            key=key,
            offset=offset + END64.size,
            found=(locator_disk, disks),
        )
    if pointer != position:
        message = f"the zip64 locator points at byte {pointer} and not at byte {position}, the end record before it"
        raise refused(
            message, key=key, offset=offset + END64.size, expected=position, found=pointer
        )
    signature, rest, _, _, disk, first_disk, *wide = END64.unpack_from(raw)
    if signature != END64_SIGNATURE or rest != END64.size - 12:
        raise refused("no zip64 end record of 56 bytes before its locator", key=key, offset=offset)
    if disk or first_disk:
        raise refused(
            "it is one of several disks", key=key, offset=offset, found=(disk, first_disk)
        )
    for narrow, value, most in zip(claims, wide, (MAX16, MAX16, MAX32, MAX32), strict=True):
        if narrow not in (value, most):
            raise refused(
                "the end record and the zip64 end record disagree",
                key=key,
                offset=offset,
                expected=value,
                found=narrow,
            )
    here, count, nbytes, directory = wide
    return here, count, nbytes, directory


def _no_end(source: Source, key: str, start: int, *, stop: int) -> ZipError | Truncated:
    """Why the last 22 bytes are no end record: the two reasons ask for different things to be done."""
    begin = max(start, stop - COMMENT_REACH)
    found = source.bytes(key, begin, stop).rfind(b"PK\5\6")
    if found < 0 or begin + found > stop - END.size:  # none, or one that is cut
        message = "zip archive: there is no whole end record; the file was cut short or never finished, get or save it again"
        return Truncated(message, file=key, offset=stop)
    return refused("a comment or other bytes after the end record", key=key, offset=begin + found)


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


class Entries(Value, frozen=True):
    """The central directory, a row for each record, sorted by where the records lie."""

    raw_names: list[bytes]
    names: list[str]
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
    """The offset of each local header, counted from the archive's start."""


def read_entries(
    raw: bytes, count: int, directory: int, *, key: str, start: int, fold_case: bool = True
) -> Entries:
    """Parse and check the central directory at byte `directory` of an archive that begins at byte `start` of the file."""
    place = start + directory
    positions, raw_names = _walk(raw, count, key=key, place=place)
    places = FieldOffsets(key, positions + place)
    fields = gather(raw, positions, ENTRY)
    places.require(
        fields["signature"] == ENTRY_SIGNATURE, "no entry where one should be in the directory"
    )
    sizes, packed, offsets = _resolve(raw, positions, fields, places=places)
    flags, methods = fields["flags"].astype(np.int64), fields["method"].astype(np.int64)
    places.require(fields["disk"] == 0, "a record on another disk")
    places.require(fields["comment_nbytes"] == 0, "a record with a comment")
    places.require(fields["needed"] <= NEWEST, f"a record that needs a zip version above {NEWEST}")
    places.require(
        (methods == STORED) | (methods == DEFLATED), "a record that is neither stored nor deflated"
    )
    allowed = DESCRIBED | UTF8 | np.where(methods == DEFLATED, DEFLATE_OPTIONS, 0)
    places.require(flags & ~allowed == 0, "a record with flags for encryption or other features")
    stored = methods == STORED
    places.require(~stored | (sizes == packed), "a stored record of two different sizes")
    possible = stored | ((packed > 0) & (sizes // DEFLATE_RATIO <= packed) & (sizes < 1 << 63))
    places.require(possible, "a deflated record that claims more than its bytes can hold")
    places.require((sizes > 0) | (fields["crc"] == 0), "an empty record with a checksum")
    inside = (packed <= directory) & (offsets <= directory)
    places.require(inside, "a record outside of the archive")
    names = decode_names(raw_names, flags.tolist(), places, fold_case=fold_case)
    folders = np.array([name[-1:] == "/" for name in names], np.bool_)
    kinds = fields["attributes"] >> 16 & KINDS
    plain = (kinds == 0) | (kinds == np.where(folders, FOLDER, PLAIN))
    places.require(plain, "a record that is a link, a device or otherwise no plain file")
    places.require(
        folders | (fields["attributes"] & FOLDER_ATTRIBUTE == 0), "a file marked as a folder"
    )
    places.require(~folders | ((sizes == 0) & (methods == STORED)), "a folder that has content")
    order = np.argsort(offsets, kind="stable")
    rows = order.tolist()
    columns = [
        column[order].astype(np.int64)
        for column in (flags, methods, fields["crc"], packed, sizes, offsets)
    ]
    return Entries(
        [raw_names[row] for row in rows], [names[row] for row in rows], folders[order], *columns
    )


def _walk(raw: bytes, count: int, *, key: str, place: int) -> tuple[Ints, list[bytes]]:
    """The start and the name of each entry."""
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
        message, where = (
            f"the directory of {len(raw)} bytes has entries of {position} bytes",
            place + min(position, len(raw)),
        )
        raise refused(message, key=key, offset=where, expected=len(raw), found=position)
    return np.array(positions, np.int64), names


def _resolve(
    raw: bytes, positions: Ints, fields: np.ndarray, *, places: FieldOffsets
) -> tuple[Sizes, Sizes, Sizes]:
    """Sizes, packed sizes and offsets, with saturated fields taken from the zip64 blocks."""
    starts = positions + ENTRY.itemsize + fields["name_nbytes"]
    bodies, nbytes = find_zip64(
        raw, starts, starts + fields["extra_nbytes"], known=CENTRAL_BLOCKS, places=places
    )
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


class ZipRecord(Value, frozen=True, gc=False):
    """One record of a zip archive: a name, and the place of its bytes in the file."""

    name: str
    """The whole name, with the top folder."""
    start: int
    """First byte of the payload, counted from the start of the file (not of the archive)."""
    nbytes: int
    """Bytes of the payload in the file."""
    crc32: int | None
    """CRC-32 of the content, or None where the writer left it out.

    torch writes 0 with `set_crc32_options(False)` and for `skip_data`. So 0 means "not recorded" unless the record
    is empty; one honest payload in four billion has this CRC and goes unverified."""
    method: int
    """0 stored, 8 deflated."""
    header: int
    """The offset of the local header in the file."""
    content_nbytes: int
    """Bytes of content, as the directory claims: equal to `nbytes` for a stored record."""

    @property
    def stop(self) -> int:
        """The byte after the payload."""
        return self.start + self.nbytes

    @property
    def stored(self) -> bool:
        """Whether the payload is the content."""
        return self.method == 0


class Records(Mapping[str, ZipRecord]):
    """The records of an archive under their names, in the order of the file.

    A `ZipRecord` is made when it is used: a million of them as columns take a quarter of the memory. The numbers in a column are
    integers of Python's. A checksum that the writer left out is `NO_CRC`.
    """

    __slots__ = ("_known", "_names", "columns")

    def __init__(self, rows: Mapping[str, int], *columns: Sequence[int]) -> None:
        """`columns` are the starts, packed lengths, checksums, methods, headers and content lengths, by rows."""
        self._known: Mapping[str, int] | None = rows
        self._names = ""
        self.columns = columns

    @property
    def rows(self) -> Mapping[str, int]:
        """The row of each name."""
        rows = self._known
        if rows is None:
            rows = self._known = dict(zip(self._names.split("\0"), range(len(self)), strict=True))
        return rows

    def fold(self) -> None:
        """Store the names as one text until one is needed: that takes a tenth of the memory."""
        rows, count = self._known, len(self.columns[0])
        if rows is None or len(rows) != count or not all(map(eq, rows.values(), range(count))):
            return
        names = "\0".join(rows)
        if names.count("\0") == count - 1:
            self._names, self._known = names, None

    def __getitem__(self, name: str) -> ZipRecord:
        found = self.find(name)
        if found is None:
            raise KeyError(name)
        return found

    def find(self, name: str) -> ZipRecord | None:
        """The record of a name, or None."""
        row = (self._known or self.rows).get(name)
        if row is None:
            return None
        starts, packed, crcs, methods, headers, sizes = self.columns
        crc = crcs[row]
        return ZipRecord(
            name,
            starts[row],
            packed[row],
            None if crc == NO_CRC else crc,
            methods[row],
            headers[row],
            sizes[row],
        )

    def besides(self, starts: Ints, nbytes: Ints) -> Iterator[ZipRecord]:
        """The records that are none of these ranges of the file."""
        rows = np.fromiter(self.rows.values(), np.int64, len(self.rows))
        own, lengths = (np.asarray(column)[rows] for column in self.columns[:2])
        order = np.argsort(starts, kind="stable")
        others = np.ones(len(rows), np.bool_)
        if len(order):
            closest = order[np.minimum(np.searchsorted(starts[order], own), len(order) - 1)]
            others = (starts[closest] != own) | (nbytes[closest] != lengths)
        return map(self.__getitem__, compress(self.rows, others.tolist()))

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.columns[0] if self._known is None else self._known)

    def __repr__(self) -> str:
        return f"<{len(self)} zip records>"


class Archive(Value, frozen=True):
    """A zip archive in which every reader sees the same records."""

    records: Records
    """Every record but folders, under its whole name, in the order of the file."""
    root: str
    """The one top folder that all records share, with its slash; empty where they do not share one."""

    @property
    def prefix(self) -> str:
        """The top folder without its slash."""
        return self.root[:-1]

    @property
    def names(self) -> list[str]:
        """The names without the root, in the order of the file."""
        return [name[len(self.root) :] for name in self.records]

    def get(self, name: str) -> ZipRecord | None:
        """Return the record of a name without the root, or None. Case matters here; no two names differ in case alone."""
        return self.records.find(self.root + name)


END_MADE_BY, END_NEEDED = 0x031E, 0x002D
"""Unix, version 3.0; readers need version 4.5, which has zip64. In the end record only: elsewhere torch writes 0."""


def make_end(count: int, start: int, nbytes: int) -> bytes:
    """Make the three records at the end of an archive of torch, for a directory of `count` entries that begins at `start`.

    torch always writes all three.
    """
    narrow_count = min(count, MAX16)
    wide_end = END64.pack(
        END64_SIGNATURE,
        END64.size - 12,
        END_MADE_BY,
        END_NEEDED,
        0,
        0,
        count,
        count,
        nbytes,
        start,
    )
    locator = LOCATOR.pack(LOCATOR_SIGNATURE, 0, start + nbytes, 1)
    end = END.pack(
        END_SIGNATURE, 0, 0, narrow_count, narrow_count, min(nbytes, MAX32), min(start, MAX32), 0
    )
    return wide_end + locator + end
