"""Record the pickle at the start of some bytes without reading more of them than it takes.

What is no pickle fails in its first bytes, so a few are read, and more only while the stream asks for more than there are.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.limits import Limits
from holdfast.errors import LimitExceeded
from holdfast.formats.pickle.recording import Recorded, record

__all__ = ["read_ahead"]

Read = Callable[[int, int], bytes]
"""Bytes from a start to a stop, fewer where they end."""

FIRST_NBYTES = 1 << 12
"""Bytes that are read at first."""

GROWTH = 8

ELISIONS = 16
"""Long texts at the start of what may be a pickle that are passed over."""

LENGTHS = {ord("B"): 4, ord("X"): 4, ord("T"): 4, 0x8D: 8, 0x8E: 8, 0x96: 8}
"""Opcodes with a length that may be large, and the bytes that it takes."""


def read_ahead(read: Read, nbytes: int, limits: Limits, *, joblib: bool = False) -> Recorded:
    """The pickle that begins these bytes. Raises nothing about the pickle: what broke it off is in the answer."""
    size = min(FIRST_NBYTES, nbytes)
    # One byte more than a pickle may have, so that one that is cut by the limit is told from one that ends.
    most = min(limits.pickle_nbytes + 1, nbytes)
    while True:
        data = read(0, size)
        found = record(data, limits=limits, joblib=joblib)
        if not found.cut or size >= nbytes or len(data) < size:
            return found
        need = _needed(data, found.table.reached)
        if need > nbytes:
            return found  # beyond the end of everything: a loader breaks off there, too
        if size >= most or need > most:
            return _too_long(found, limits) if data[:1] == b"\x80" or found.acts else _passing_over(read, limits, found)
        size = min(max(size * GROWTH, need), most)


def _needed(data: bytes, at: int) -> int:
    """How far the opcode at a position reaches, where it says so."""
    width = LENGTHS.get(data[at]) if at < len(data) else None
    if width is None or at + 1 + width > len(data):
        return 0
    return at + 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")


def _too_long(found: Recorded, limits: Limits) -> Recorded:
    error = LimitExceeded(f"a pickle longer than Limits(pickle_nbytes={limits.pickle_nbytes:,})", expected=limits.pickle_nbytes)
    return Recorded(found.table, None, None, error)


def _passing_over(read: Read, limits: Limits, found: Recorded) -> Recorded:
    """What does not say that it is a pickle and begins with a text longer than any pickle may be: look behind that text.

    The elements of a tensor begin like this once in a thousand times, and have nothing behind it.
    """
    data, skipped = read(0, FIRST_NBYTES), 0
    for _ in range(ELISIONS):
        at = found.table.reached
        need = _needed(data, at)
        if not found.cut or not need:
            return found
        # An empty text in its place.
        behind = skipped + need
        rest = read(behind, behind + FIRST_NBYTES)
        skipped = behind - at - 2
        data = data[:at] + b"C\0" + rest
        found = record(data, limits=limits)
        if not found.cut or not rest:
            return _too_long(found, limits) if found.acts or found.stop is not None else found
    return _too_long(found, limits)
