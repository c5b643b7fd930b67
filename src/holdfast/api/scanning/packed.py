"""Compressed content, unpacked within a budget: first a head, to see whether it is worth more.

joblib and pandas compress whole pickles, zip compresses records. What the standard library unpacks is unpacked; of the rest
(lz4, zstd without the package zstandard, and zip methods that nobody uses) it is said that it was not read.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Protocol, cast

from holdfast.api.scanning.spans import Span

__all__ = ["MAGICS", "UNREADABLE", "Unpacking", "compression", "unpack"]

BLOCK = 1 << 18
"""Packed bytes that are read at a time."""

MAGICS: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"]\0\0", "lzma"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"x\x01", "zlib"),
    (b"x\x5e", "zlib"),
    (b"x\x9c", "zlib"),
    (b"x\xda", "zlib"),
)

UNREADABLE: tuple[tuple[bytes, str], ...] = ((b"\x04\x22\x4d\x18", "lz4"),)
"""What joblib may write and nothing here unpacks."""

WINDOW = 8 << 20
"""How far back a zstd stream may refer, as for the items of distributed checkpoints."""


class Unpacking(Exception):
    """Compressed bytes that do not unpack, or by no method that is known here."""


class Unpacker(Protocol):
    """What zlib, bz2 and lzma have in common, near enough."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


MAKERS: dict[str, Callable[[], Unpacker]] = {
    "gzip": lambda: zlib.decompressobj(31),
    "zlib": lambda: zlib.decompressobj(15),
    "deflate": lambda: zlib.decompressobj(-15),
    "bzip2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(memlimit=1 << 28),
    "lzma": lambda: lzma.LZMADecompressor(format=lzma.FORMAT_ALONE, memlimit=1 << 28),
}

METHODS = {8: "deflate", 12: "bzip2"}
"""Of zip."""


def compression(head: bytes) -> str | None:
    """How content that begins like this is compressed, if it is."""
    if head.startswith(b"]\0\0") and (len(head) < 13 or head[12] not in (0, 0xFF)):
        return None  # an LZMA stream has its length there, or eight times 0xFF
    return next((name for magic, name in MAGICS if head.startswith(magic)), None)


def unpack(span: Span, kind: str, most: int) -> tuple[bytes, bool]:
    """At most `most` bytes of what a span unpacks to, and whether that is all. Raises `Unpacking`."""
    made = _unpack_zstd(span, most + 1) if kind == "zstd" else b"".join(_pieces(span, kind, most + 1))
    return made[:most], len(made) <= most


def _pieces(span: Span, kind: str, most: int) -> Iterator[bytes]:
    if kind not in MAKERS:
        raise Unpacking(f"compressed as {kind}, which is not unpacked here")
    at, left, waiting = 0, most, b""
    stream = MAKERS[kind]()
    starved = False
    while left > 0:
        if not waiting and not starved:
            waiting = span.read(at, at + BLOCK)
            at += len(waiting)
            starved = not waiting
        try:
            piece = stream.decompress(waiting, left)
        except (zlib.error, OSError, EOFError, lzma.LZMAError, ValueError) as error:
            raise Unpacking(f"does not unpack as {kind}: {error}") from None
        yield piece
        left -= len(piece)
        waiting = getattr(stream, "unconsumed_tail", b"")
        if stream.eof:
            # gzip, bzip2 and xz files may be several streams, one behind the other, which their readers join.
            waiting = stream.unused_data or span.read(at, at + BLOCK)
            at += 0 if stream.unused_data else len(waiting)
            if kind == "deflate" or not waiting.strip(b"\0") or compression(waiting[:16].ljust(16, b"\xff")) != kind:
                return
            stream = MAKERS[kind]()
        elif starved and not piece:
            raise Unpacking(f"ends too early for {kind}")


def _unpack_zstd(span: Span, most: int) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise Unpacking("compressed with zstd, which takes the package zstandard: pip install 'holdfast[zstd]'") from None
    made = bytearray()
    stream = zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_reader(
        cast(IO[bytes], _Reader(span)), read_across_frames=True
    )
    try:
        while len(made) < most and (piece := stream.read(min(BLOCK, most - len(made)))):
            made += piece
    except zstandard.ZstdError as error:
        raise Unpacking(f"does not unpack as zstd: {error}") from None
    return bytes(made)


class _Reader:
    """A span as a file that is read from its start."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        data = self._span.read(self._at, self._span.nbytes if size < 0 else self._at + size)
        self._at += len(data)
        return data
