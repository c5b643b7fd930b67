"""Where the fields of a zip archive lie, what is found in one (`Archive`), and the one way in which this package refuses one.

    start                                                                                   stop
    │ record 0 │ record 1 │ … │ central directory │ zip64 end │ zip64 locator │ end record │
                                                     56            20              22

    record       local header   name   extra field     payload   data descriptor
                      30          n     TLV blocks                 16 (24 with zip64), only with flag bit 3

    directory    entry          name   extra field     comment      … once for each record
                      46          n     TLV blocks     (refused)

All numbers are little-endian. The two zip64 records at the end are optional: torch always writes them, CPython only
when they are needed. Every offset in the archive counts from `start`, which is not 0 for an archive inside a larger
file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from operator import eq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Bools, Ints
from holdfast.core.tensor import NO_CRC
from holdfast.core.value import Value
from holdfast.errors import ZipError

Sizes = npt.NDArray[np.uint64]

MAX16 = 0xFFFF
"""A 16-bit field that says: too large for me, see the zip64 record."""
MAX32 = 0xFFFFFFFF
"""The same for a 32-bit field."""

LOCAL_SIGNATURE = 0x04034B50
ENTRY_SIGNATURE = 0x02014B50
DESCRIPTOR_SIGNATURE = 0x08074B50

DESCRIBED = 1 << 3
"""Flag: the local header may leave crc and sizes 0; a data descriptor follows the payload."""
DEFLATE_OPTIONS = 1 << 1 | 1 << 2
"""Flags: how hard the compressor tried. Without meaning for a stored record."""
UTF8 = 1 << 11
"""Flag: the name is UTF-8 and not code page 437."""

STORED, DEFLATED = 0, 8

COMMON = [
    ("needed", "<u2"),
    ("flags", "<u2"),
    ("method", "<u2"),
    ("time", "<u2"),
    ("date", "<u2"),
    ("crc", "<u4"),
    ("packed", "<u4"),
    ("size", "<u4"),
    ("name_nbytes", "<u2"),
    ("extra_nbytes", "<u2"),
]
"""What a local header and an entry of the directory both say."""

LOCAL = np.dtype([("signature", "<u4"), *COMMON])
"""A local header, 30 bytes."""

ENTRY = np.dtype(
    [
        ("signature", "<u4"),
        ("made_by", "<u2"),
        *COMMON,
        ("comment_nbytes", "<u2"),
        ("disk", "<u2"),
        ("internal", "<u2"),
        ("attributes", "<u4"),
        ("offset", "<u4"),
    ]
)
"""An entry of the central directory, 46 bytes."""

NARROW = np.dtype([("signature", "<u4"), ("crc", "<u4"), ("packed", "<u4"), ("size", "<u4")])
"""A data descriptor, 16 bytes."""

WIDE = np.dtype([("signature", "<u4"), ("crc", "<u4"), ("packed", "<u8"), ("size", "<u8")])
"""A data descriptor of a record whose local header has a zip64 block, 24 bytes."""


def gather(raw: bytes, positions: Ints, dtype: np.dtype[np.void]) -> np.ndarray:
    """One structure for each position, all of which must lie inside `raw`."""
    # An array with a structure at every byte, which overlap; taking some of them is the only copy.
    everywhere: np.ndarray = np.ndarray(max(len(raw) - dtype.itemsize + 1, 0), dtype, raw, strides=(1,))
    return everywhere[positions]


def refused(message: str, *, key: str, offset: int, expected: object = None, found: object = None) -> ZipError:
    """The error for an archive that two readers could see differently."""
    return ZipError(
        f"zip archive: {message}; no known writer makes this, so the file is damaged or was tampered with",
        file=key,
        offset=offset,
        expected=expected,
        found=found,
    )


class FieldOffsets(Value, frozen=True):
    """Where the things in a column are in the file, so that a refusal can point at the one that breaks a rule."""

    key: str
    offsets: Ints

    def require(self, good: Bools, message: str) -> None:
        """Refuse the archive at the first thing for which `good` is false."""
        # One call, unlike `all()`: an archive of a few records is one of thousands in a DCP file.
        if good.size and not good[first := good.argmin()]:
            raise refused(message, key=self.key, offset=int(self.offsets[first]))

    def of(self, rows: Ints) -> FieldOffsets:
        """The places of some of the things."""
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
"""In one extra field. No writer comes near; it bounds the rounds of `find_zip64`."""

BLOCK = np.dtype([("id", "<u2"), ("nbytes", "<u2")])


def find_zip64(raw: bytes, starts: Ints, stops: Ints, *, known: Bools, places: FieldOffsets) -> tuple[Ints, Ints]:
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
        here.require(cursors + BLOCK.itemsize <= ends, "an extra field ends in the middle of a block")
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
    places.of(rows).require(np.zeros(len(rows), np.bool_), f"an extra field of more than {MAX_BLOCKS} blocks")
    return bodies, lengths


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
    """Where the record's local header is in the file."""
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


Place = tuple[int, int, int | None, bool]
"""Of a record: its first byte, how many there are, their CRC-32 where it is known, and whether they are the content."""


class RecordColumns(NamedTuple):
    """Where records lie: the row of each name, and by rows first bytes, lengths, checksums and methods."""

    rows: Mapping[str, int]
    starts: Sequence[int]
    packed: Sequence[int]
    crcs: Sequence[int]
    """`NO_CRC` where the writer left it out."""
    methods: Sequence[int]


class Records(Mapping[str, ZipRecord]):
    """The records of an archive under their names, in the order of the file.

    A record is made when it is asked for: a million of them as columns take a quarter of the memory. The numbers in a column are
    integers of Python's. A checksum that the writer left out is `NO_CRC`.
    """

    __slots__ = ("_columns", "_known", "_names")

    def __init__(
        self,
        rows: Mapping[str, int],
        *,
        starts: Sequence[int],
        packed: Sequence[int],
        crcs: Sequence[int],
        methods: Sequence[int],
        headers: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        self._known: Mapping[str, int] | None = rows
        self._names = ""
        self._columns = (starts, packed, crcs, methods, headers, sizes)

    @property
    def _rows(self) -> Mapping[str, int]:
        """The row of each name."""
        rows = self._known
        if rows is None:
            rows = self._known = dict(zip(self._names.split("\0"), range(len(self)), strict=True))
        return rows

    def fold(self) -> None:
        """Keep the names as one text until somebody asks for one: that takes a tenth of the memory."""
        rows, count = self._known, len(self._columns[0])
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
        row = (self._known or self._rows).get(name)
        if row is None:
            return None
        starts, packed, crcs, methods, headers, sizes = self._columns
        crc = crcs[row]
        return ZipRecord(name, starts[row], packed[row], None if crc == NO_CRC else crc, methods[row], headers[row], sizes[row])

    def place(self, name: str) -> Place | None:
        """Where the record of a name lies, without making it."""
        row = self._rows.get(name)
        if row is None:
            return None
        starts, packed, crcs, methods, *_ = self._columns
        crc = crcs[row]
        return starts[row], packed[row], None if crc == NO_CRC else crc, methods[row] == STORED

    @property
    def columns(self) -> RecordColumns:
        """The columns that say where records lie."""
        starts, packed, crcs, methods, *_ = self._columns
        return RecordColumns(self._rows, starts, packed, crcs, methods)

    def besides(self, starts: Ints, nbytes: Ints) -> Iterator[ZipRecord]:
        """The records that are none of these ranges of the file."""
        rows = np.fromiter(self._rows.values(), np.int64, len(self._rows))
        own, lengths = (np.asarray(column)[rows] for column in self._columns[:2])
        order = np.argsort(starts, kind="stable")
        others = np.ones(len(rows), np.bool_)
        if len(order):
            near = order[np.minimum(np.searchsorted(starts[order], own), len(order) - 1)]
            others = (starts[near] != own) | (nbytes[near] != lengths)
        return map(self.__getitem__, compress(self._rows, others.tolist()))

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._columns[0] if self._known is None else self._known)

    def __repr__(self) -> str:
        return f"<{len(self)} zip records>"


class Archive(Value, frozen=True):
    """A zip archive in which every reader sees the same records."""

    records: Records
    """Every record but folders, under its whole name, in the order of the file."""
    prefix: str
    """The one top folder that all records share, without a slash; empty where they do not share one."""

    @property
    def names(self) -> list[str]:
        """The names without the prefix, in the order of the file."""
        cut = len(self.prefix) + 1 if self.prefix else 0
        return [name[cut:] for name in self.records]

    def get(self, name: str) -> ZipRecord | None:
        """The record of a name without the prefix, or None. Case matters here; no two names differ in case alone."""
        return self.records.find(f"{self.prefix}/{name}" if self.prefix else name)

    def besides(self, starts: Ints, nbytes: Ints) -> Iterator[ZipRecord]:
        """The records that are none of these ranges of the file."""
        return self.records.besides(starts, nbytes)

    def places(self, folder: str) -> Callable[[str], Place | None]:
        """What finds records by their names in a folder, many of them."""
        place, before = self.records.place, self.below(folder)
        return lambda name: place(before + name)

    def below(self, folder: str) -> str:
        """What the names of records in a folder begin with."""
        return f"{self.prefix}/{folder}" if self.prefix else folder
