"""Elements as patterns of bits: which are zero, taking some out, putting some in.

Zero is the pattern without a bit. Minus zero, NaN, infinities and denormals are values like any other, so nothing here looks at
elements as numbers. Branches on random bits cost more than anything else on this path: lists of positions, made from booleans, are
several times as fast as the booleans themselves as an index, in groups that stay in a cache.
"""

from __future__ import annotations

import numpy as np

from holdfast.errors import MetadataError

Elements = np.ndarray
"""One dimension of unsigned integers, or of 16-byte records; little-endian as stored."""

Octets = np.ndarray
"""One dimension of uint8."""


def element_type(nbytes: int) -> np.dtype[np.generic]:
    """What an element of so many bytes is worked on as."""
    return np.dtype(f"<u{nbytes}") if nbytes <= 8 else np.dtype(f"V{nbytes}")


def are_set(values: Elements) -> np.ndarray:
    """Which elements have any bit, as booleans."""
    if values.dtype.kind == "u":
        return np.asarray(values != 0)
    words = values.view(np.uint64).reshape(values.shape[0], values.dtype.itemsize // 8)
    return np.asarray(np.bitwise_or.reduce(words, axis=1) != 0)


def taken(values: Elements, marked: np.ndarray) -> Elements:
    """The elements that are marked. By positions: a branch for each random bit costs more, and a second thread gains something."""
    return values.take(np.flatnonzero(marked), mode="clip")


def count_set(values: Elements) -> int:
    """How many elements have any bit."""
    return int(np.count_nonzero(values if values.dtype.kind == "u" else are_set(values)))


def marks_of(octets: Octets, count: int) -> np.ndarray:
    """The first `count` bits as booleans. Raises `MetadataError` where any is set behind them."""
    if count % 8 and octets[-1] >> count % 8:
        raise MetadataError("marks behind the last element of a group")
    return np.unpackbits(octets, count=count, bitorder="little").view(np.bool_)


def fill(out: Elements, positions: np.ndarray, values: Elements) -> None:
    """Make everything zero but the elements at some positions, which are inside. Raises `MetadataError` for another number."""
    if len(positions) != len(values):
        raise unequal(len(positions), len(values))
    out.view(np.uint8)[:] = 0
    out[positions] = values


def unequal(marked: int, values: int) -> MetadataError:
    """The error for marks that ask for another number of values than there are."""
    return MetadataError(f"marks for {marked:,} values, and {values:,} values", expected=marked, found=values)


def translate(octets: Octets, table: bytes) -> Octets:
    """Each byte replaced by what a table of 256 has for it."""
    return np.frombuffer(octets.tobytes().translate(table), np.uint8)


POPULATION = bytes(octet.bit_count() for octet in range(256))


def set_bits(octets: Octets) -> int:
    """How many bits are set in all."""
    return int(translate(octets, POPULATION).sum(dtype=np.int64))
