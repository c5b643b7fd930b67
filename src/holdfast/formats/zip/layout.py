"""Where the fields of a zip archive lie, and the one way in which this package refuses one.

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

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Bools, Ints
from holdfast.errors import ZipError

__all__ = [
    "DEFLATED",
    "DEFLATE_OPTIONS",
    "DESCRIBED",
    "DESCRIPTOR_SIGNATURE",
    "ENTRY",
    "ENTRY_SIGNATURE",
    "LOCAL",
    "LOCAL_SIGNATURE",
    "MAX16",
    "MAX32",
    "NARROW",
    "STORED",
    "UTF8",
    "WIDE",
    "Bools",
    "Ints",
    "Places",
    "Sizes",
    "gather",
    "refused",
]

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

LOCAL = np.dtype(
    [
        ("signature", "<u4"),
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
)
"""A local header, 30 bytes."""

ENTRY = np.dtype(
    [
        ("signature", "<u4"),
        ("made_by", "<u2"),
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


@dataclass(frozen=True, slots=True)
class Places:
    """Where the things in a column are in the file, so that a refusal can point at the one that breaks a rule."""

    key: str
    offsets: Ints

    def require(self, good: Bools, message: str) -> None:
        """Refuse the archive at the first thing for which `good` is false."""
        # Five times faster than `all()` on a few records, and an archive of a few is one of thousands in a DCP file.
        if np.count_nonzero(good) != good.size:
            raise refused(message, key=self.key, offset=int(self.offsets[np.argmin(good)]))

    def of(self, rows: Ints) -> Places:
        """The places of some of the things."""
        return Places(self.key, self.offsets[rows])
