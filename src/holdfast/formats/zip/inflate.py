"""The checksum of a compressed record's content, in bounded memory. TorchScript compresses its `code/` records."""

from __future__ import annotations

import zlib

from holdfast.core.crc import crc32
from holdfast.core.protocols import Source

__all__ = ["inflated_crc"]

BLOCK_NBYTES = 1 << 20
"""Bytes that are read, and that are inflated, at a time."""


def inflated_crc(source: Source, key: str, place: tuple[int, int], content_nbytes: int) -> int | None:
    """The CRC-32 of what bytes `place` (start, stop) of a file inflate to; None where they do not, or to another length.

    Never inflates more than a block beyond `content_nbytes`, however well the bytes were packed.
    """
    start, stop = place
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    total = done = 0
    waiting = b""
    while not stream.eof and done <= content_nbytes:
        if not waiting and start < stop:
            waiting = source.bytes(key, start, min(start + BLOCK_NBYTES, stop))
            start += len(waiting)
        ended = not waiting
        try:
            content = stream.decompress(waiting, BLOCK_NBYTES)
        except zlib.error:
            return None
        if ended and not content:
            return None
        waiting = stream.unconsumed_tail
        total, done = crc32(content, total), done + len(content)
    return total if done == content_nbytes and start == stop and not stream.unused_data else None
