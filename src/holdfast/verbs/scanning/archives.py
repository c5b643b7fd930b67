"""Containers as scans see them: a range of bytes (`Span`), unpacked within a budget, and every record of zip and tar that *some*
reader would find.

An archive that the strict reader accepts, all readers see alike. One that it refuses is read by the directory, as CPython and
miniz do, and by the local headers in the file besides, and the refusal is reported. Names decide nothing.
"""

from __future__ import annotations

import bz2
import lzma
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Protocol, cast

from holdfast.core.limits import Limits
from holdfast.core.value import Value
from holdfast.engine.source import OpenSource
from holdfast.errors import HoldfastError, ZipError
from holdfast.formats.detect import begins_like_tar
from holdfast.formats.zip.layout import Archive
from holdfast.formats.zip.reader import read_archive
from holdfast.stores.memory import MemoryStore


class Span(Value, frozen=True):
    source: OpenSource
    key: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def read(self, start: int, stop: int) -> bytes:
        """Bytes counted from the start of the span; fewer where it ends."""
        first, last = self.start + max(start, 0), min(self.start + stop, self.stop)
        return self.source.bytes(self.key, first, last) if last > first else b""

    def part(self, start: int, stop: int) -> Span:
        """A range of the span, cut to what is there."""
        first = min(self.start + max(start, 0), self.stop)
        return Span(self.source, self.key, first, max(first, min(self.start + stop, self.stop)))


def span_of(data: bytes, limits: Limits) -> Span:
    return Span(
        OpenSource(MemoryStore({"bytes": data}, name="<bytes>"), limits=limits, threads=1),
        "bytes",
        0,
        len(data),
    )


BLOCK_NBYTES = 1 << 18

MAGICS: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"]\0\0", "lzma"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)

UNREADABLE: tuple[tuple[bytes, str], ...] = ((b"\x04\x22\x4d\x18", "lz4"),)
"""Compressions that joblib may write and that are not unpacked here."""

WINDOW_NBYTES = 8 << 20
"""How far back a zstd stream may refer, as for the items of distributed checkpoints."""


class Unpacked(Value, frozen=True):
    data: bytes
    whole: bool
    """Whether `data` is all, or all up to the problem."""
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
"""Compression methods of zip records."""


def compression(head: bytes) -> str | None:
    """How content that begins like this is compressed, if it is."""
    if head.startswith(b"]\0\0") and (len(head) < 13 or head[12] not in (0, 0xFF)):
        return None  # an LZMA stream has its length there, or eight times 0xFF
    found = next((name for magic, name in MAGICS if head.startswith(magic)), None)
    # zlib has no magic, but a method, a window, and a remainder of zero.
    zlib_like = (
        len(head) > 1
        and head[0] & 0x0F == 8
        and head[0] < 0x80
        and not head[1] & 0x20
        and (head[0] << 8 | head[1]) % 31 == 0
    )
    return found or ("zlib" if zlib_like else None)


def unpack(span: Span, kind: str, most: int) -> Unpacked:
    """At most `most` bytes of what a span unpacks to. What came before damage is kept: a loader that streams has read it.

    joblib and pandas compress whole pickles, zip compresses records. What the standard library unpacks is unpacked; of the rest
    (lz4, zstd without the package zstandard, and zip methods that nobody uses) it is said that it was not read.
    """
    made = bytearray()
    problem = None
    try:
        for piece in (
            _zstd_pieces(span, most + 1) if kind == "zstd" else _pieces(span, kind, most + 1)
        ):
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
            if (
                kind == "deflate"
                or not waiting.strip(b"\0")
                or compression(waiting[:16].ljust(16, b"\xff")) != kind
            ):
                return
            stream = MAKERS[kind]()
        elif starved and not piece:
            raise Unpacking(f"ends too early for {kind}")


def _zstd_pieces(span: Span, most: int) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise Unpacking(
            "compressed with zstd, which takes the package zstandard: pip install zstandard"
        ) from None
    reader = cast(IO[bytes], _Reader(span))
    stream = zstandard.ZstdDecompressor(max_window_size=WINDOW_NBYTES).stream_reader(
        reader, read_across_frames=True
    )
    try:
        while most > 0 and (piece := stream.read(min(BLOCK_NBYTES, most))):
            most -= len(piece)
            yield piece
    except zstandard.ZstdError as error:
        raise Unpacking(f"does not unpack as zstd: {error}") from None


class _Reader:
    """A span as a file that is read from its start."""

    def __init__(self, span: Span) -> None:
        self._span, self._at = span, 0

    def read(self, size: int = -1) -> bytes:
        data = self._span.read(self._at, self._span.nbytes if size < 0 else self._at + size)
        self._at += len(data)
        return data


END = b"PK\5\6"
ENTRY = b"PK\1\2"
LOCAL = b"PK\3\4"
COMMENT_NBYTES = 0xFFFF + 22
SEARCHED_NBYTES = 1 << 24

TAR_BLOCK_NBYTES = 512
MOST_MEMBERS = 1_000_000


class ZipEntry(Value, frozen=True):
    name: str
    method: int
    span: Span
    """The bytes as they are in the file."""
    nbytes: int
    """Length of the content, as the archive claims."""

    def content(self, most: int) -> Unpacked:
        if self.method == 0:
            return Unpacked(self.span.read(0, most), self.span.nbytes <= most, None)
        return unpack(self.span, METHODS.get(self.method, f"zip method {self.method}"), most)


def last_zip(span: Span, *, exact: bool) -> tuple[int, int] | None:
    """Where the archive lies that ends the span, as its end record says; `exact` where nothing may be behind that."""
    tail_start = span.nbytes - 22 if exact else max(span.nbytes - COMMENT_NBYTES, 0)
    if span.nbytes < 22:
        return None
    tail = span.read(tail_start, span.nbytes)
    found = tail.rfind(END, 0, len(tail) - 18)
    if found < 0 or (exact and tail[found + 20 : found + 22] != b"\0\0"):
        return None
    at = tail_start + found
    nbytes, offset = struct.unpack("<2I", tail[found + 12 : found + 20])
    directory_end = at
    wide = span.read(at - 76, at) if at >= 76 else b""
    if wide[:4] == b"PK\6\6" and wide[56:60] == b"PK\6\7":
        # torch writes these records always, and then says the same twice.
        nbytes, offset = struct.unpack("<2Q", wide[40:56])
        directory_end = at - 76
    comment = int.from_bytes(tail[found + 20 : found + 22], "little")
    start = directory_end - nbytes - offset
    if start < 0 or span.read(directory_end - nbytes, directory_end - nbytes + 4) not in (
        ENTRY,
        END,
        b"PK\6\6",
    ):
        start = 0  # offsets that lie, or count from elsewhere
    return start, min(at + 22 + comment, span.nbytes)


def entries_of(span: Span) -> tuple[list[ZipEntry], str | None]:
    """The records of the archive that is the whole span, and the reason why the strict reader refuses it, if it does."""
    try:
        records = _archive(span).records.values()
    except HoldfastError as error:
        # Each record that a directory or a local header names, once for each place where it may lie.
        found: dict[tuple[int, int], ZipEntry] = {}
        for entry in (*_by_directory(span), *_by_headers(span)):
            found.setdefault((entry.span.start, entry.method), entry)
        return list(found.values()), str(error)
    places = [Span(span.source, span.key, record.start, record.stop) for record in records]
    return [
        ZipEntry(one.name, one.method, place, one.content_nbytes)
        for one, place in zip(records, places, strict=True)
    ], None


def _archive(span: Span) -> Archive:
    """The archive for the strict reader. Names that differ in case alone are two arrays to numpy, and one record to torch."""
    try:
        return read_archive(span.source, span.key, start=span.start, stop=span.stop)
    except ZipError:
        archive = read_archive(
            span.source, span.key, start=span.start, stop=span.stop, fold_case=False
        )
        if not all(name.endswith(".npy") for name in archive.records):
            raise
        return archive


def _by_directory(span: Span) -> Iterator[ZipEntry]:
    place = last_zip(span, exact=False)
    if place is None:
        return
    tail_start = max(span.nbytes - COMMENT_NBYTES, 0)
    end = tail_start + span.read(tail_start, span.nbytes).rfind(END)
    nbytes, offset = struct.unpack("<2I", span.read(end + 12, end + 20))
    for start in dict.fromkeys((offset, end - nbytes, end - 76 - nbytes)):
        directory = span.read(start, min(start + nbytes, end)) if 0 <= start < end else b""
        at = 0
        while directory[at : at + 4] == ENTRY and at + 46 <= len(directory):
            method, packed, size = struct.unpack_from("<H8x2I", directory, at + 10)
            lengths = struct.unpack_from("<3H", directory, at + 28)
            (header,) = struct.unpack_from("<I", directory, at + 42)
            name = directory[at + 46 : at + 46 + lengths[0]].decode("utf-8", "replace")
            for base in {0, place[0]}:
                payload = _payload(span, base + header)
                if payload is not None:
                    yield ZipEntry(name, method, span.part(payload, payload + packed), size)
            at += 46 + sum(lengths)


def _payload(span: Span, header: int) -> int | None:
    raw = span.read(header, header + 30)
    if len(raw) < 30 or raw[:4] != LOCAL:
        return None
    return header + 30 + int.from_bytes(raw[26:28], "little") + int.from_bytes(raw[28:30], "little")


def _by_headers(span: Span) -> Iterator[ZipEntry]:
    """Records by their local headers, as a reader finds them that repairs or streams."""
    at = 0
    budget = 2 * span.nbytes
    while at < span.nbytes and budget > 0:
        block = span.read(at, at + SEARCHED_NBYTES)
        for match in re.finditer(rb"PK\x03\x04", block):
            header = at + match.start()
            raw = span.read(header, header + 30)
            if len(raw) < 30:
                continue
            flags, method, packed, size, name_nbytes, extra = struct.unpack("<2H8x2I2H", raw[6:30])
            name = span.read(header + 30, header + 30 + min(name_nbytes, 1024)).decode(
                "utf-8", "replace"
            )
            start = header + 30 + name_nbytes + extra
            if flags & 8 or packed == 0xFFFFFFFF:
                packed = _until_signature(span, start)
            budget -= packed
            yield ZipEntry(name, method, span.part(start, start + packed), size)
        at += max(len(block) - 3, 1)


def _until_signature(span: Span, start: int) -> int:
    """Bytes up to the next header of any kind: the length of a record whose own header does not say it."""
    reach = 1 << 12
    while True:
        block = span.read(start, start + reach)
        found = re.search(rb"PK(?:\x01\x02|\x03\x04|\x05\x06|\x07\x08)", block)
        if found or len(block) < reach:
            return found.start() if found else len(block)
        reach *= 8


def members_of(span: Span) -> Iterator[tuple[str, bytes, Span] | str]:
    """The name, type and bytes of each member of a tar; text for what ends the list too early."""
    at = 0
    for _ in range(MOST_MEMBERS):
        head = span.read(at, at + TAR_BLOCK_NBYTES)
        if len(head) < TAR_BLOCK_NBYTES or head == bytes(TAR_BLOCK_NBYTES):
            return
        if not begins_like_tar(head):
            yield f"the tar breaks off at byte {at:,}: no header there"
            return
        raw = head[124:136]
        if raw[0] & 0x80:
            nbytes = int.from_bytes(raw[1:], "big")
        else:
            field = raw.split(b"\0", 1)[0].strip(b" ")
            if any(c not in b"01234567" for c in field):
                yield f"the tar breaks off at byte {at:,}: its size is no number"
                return
            nbytes = int(field or b"0", 8)
        if at + TAR_BLOCK_NBYTES + nbytes > span.nbytes:
            yield f"the tar ends inside of a member at byte {at:,}"
            nbytes = span.nbytes - at - TAR_BLOCK_NBYTES
        name = head[:100].split(b"\0", 1)[0].decode("utf-8", "replace")
        kind = head[156:157]
        yield name, kind, span.part(at + TAR_BLOCK_NBYTES, at + TAR_BLOCK_NBYTES + nbytes)
        # tarfile goes by the size of what has content, and links have none.
        at += TAR_BLOCK_NBYTES + (
            -(-nbytes // TAR_BLOCK_NBYTES) * TAR_BLOCK_NBYTES if kind not in b"1234" else 0
        )
    yield f"more than {MOST_MEMBERS:,} members"
