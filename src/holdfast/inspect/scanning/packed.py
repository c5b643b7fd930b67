"""Compressed content, unpacked within a budget: first a head, to see whether it is worth more.

joblib and pandas compress whole pickles, zip compresses records. What the standard library unpacks is unpacked; of the rest
(lz4, zstd without the package zstandard, and zip methods that nobody uses) it is said that it was not read.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Protocol, cast

from holdfast.inspect.scanning.spans import Span

__all__ = ["UNREADABLE", "Unpacked", "compression", "unpack"]

BLOCK_NBYTES = 1 << 18
"""Packed bytes that are read at a time."""

MAGICS: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"]\0\0", "lzma"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)

UNREADABLE: tuple[tuple[bytes, str], ...] = ((b"\x04\x22\x4d\x18", "lz4"),)
"""What joblib may write and nothing here unpacks."""

WINDOW_NBYTES = 8 << 20
"""How far back a zstd stream may refer, as for the items of distributed checkpoints."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What compressed bytes hold."""

    data: bytes
    whole: bool
    """Whether that is all, or all up to the problem."""
    problem: str | None


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
    found = next((name for magic, name in MAGICS if head.startswith(magic)), None)
    # zlib has no magic, but a method, a window, and a remainder of zero.
    zlib_like = (
        len(head) > 1 and head[0] & 0x0F == 8 and head[0] < 0x80 and not head[1] & 0x20 and (head[0] << 8 | head[1]) % 31 == 0
    )
    return found or ("zlib" if zlib_like else None)


def unpack(span: Span, kind: str, most: int) -> Unpacked:
    """At most `most` bytes of what a span unpacks to. What came before damage is kept: a loader that streams has read it."""
    made = bytearray()
    problem = None
    try:
        for piece in _zstd_pieces(span, most + 1) if kind == "zstd" else _pieces(span, kind, most + 1):
            made += piece
    except Unpacking as error:
        problem = str(error)
    return Unpacked(bytes(made[:most]), len(made) <= most, problem)


def _pieces(span: Span, kind: str, most: int) -> Iterator[bytes]:
    if kind not in MAKERS:
        raise Unpacking(f"compressed as {kind}, which is not unpacked here")
    at, left, waiting = 0, most, b""
    stream = MAKERS[kind]()
    starved = False
    while left > 0:
        if not waiting and not starved:
            waiting = span.read(at, at + BLOCK_NBYTES)
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
            waiting = stream.unused_data or span.read(at, at + BLOCK_NBYTES)
            at += 0 if stream.unused_data else len(waiting)
            if kind == "deflate" or not waiting.strip(b"\0") or compression(waiting[:16].ljust(16, b"\xff")) != kind:
                return
            stream = MAKERS[kind]()
        elif starved and not piece:
            raise Unpacking(f"ends too early for {kind}")


def _zstd_pieces(span: Span, most: int) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise Unpacking("compressed with zstd, which takes the package zstandard: pip install 'holdfast[zstd]'") from None
    reader = cast(IO[bytes], _Reader(span))
    stream = zstandard.ZstdDecompressor(max_window_size=WINDOW_NBYTES).stream_reader(reader, read_across_frames=True)
    try:
        while most > 0 and (piece := stream.read(min(BLOCK_NBYTES, most))):
            most -= len(piece)
            yield piece
    except zstandard.ZstdError as error:
        raise Unpacking(f"does not unpack as zstd: {error}") from None


class _Reader:
    """A span as a file that is read from its start."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        data = self._span.read(self._at, self._span.nbytes if size < 0 else self._at + size)
        self._at += len(data)
        return data
