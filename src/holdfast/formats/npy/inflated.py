"""Compressed members of an `.npz`, as further content of the store that they lie in.

    weights.npz@4711     the member at byte 4711, inflated

Deflate cannot be read by range, so a member is inflated whole when any of it is wanted, and the last few are kept. The archive
says how long it is; not a byte more is made, and one that is many times its packed size is refused when the archive is opened.
"""

from __future__ import annotations

import threading
import zlib
from functools import partial

import numpy as np

from holdfast.core.limits import Limits
from holdfast.core.protocols import Stamp, Store
from holdfast.core.runtime import Sent, renewed
from holdfast.errors import Corrupted, LimitExceeded, StoreError
from holdfast.formats.zip.layout import ZipRecord
from holdfast.stores.virtual import ContentCache, Virtual, VirtualFile

KEPT_NBYTES = 256 << 20
"""Inflated members that are kept beyond the last one, so that the blocks of one are read from one inflation of it."""

BLOCK_NBYTES = 1 << 20
"""Packed bytes that are read at a time."""

LOCKS = 16
"""Threads that may inflate at once. A member belongs to one of the locks, so that it is inflated once."""

MADE_NBYTES = 1 << 20
"""Bytes that are inflated at a time."""

FREE_NBYTES = 16 << 20
"""What a member may become whatever its packed size."""


def member_key(key: str, record: ZipRecord) -> str:
    """The name of a member of an archive as a file of its own."""
    return f"{key}@{record.start}"


class InflatedMembers(Virtual):
    """The store of an archive, with its compressed members as further files, which are not listed."""

    def __init__(self, store: Store, limits: Limits) -> None:
        super().__init__(over=store)
        self._store = store
        self._limits = limits
        self._kept = ContentCache(KEPT_NBYTES)
        self._locks = _locks()

    def add(self, key: str, record: ZipRecord) -> str:
        """Make a member a file; its name. Raises `LimitExceeded` for one that is many times its packed size."""
        most = max(self._limits.inflation * record.nbytes, FREE_NBYTES)
        if record.content_nbytes > most:
            raise LimitExceeded(
                f"{record.name!r} inflates from {record.nbytes:,} to {record.content_nbytes:,} bytes, more than "
                f"Limits(inflation={self._limits.inflation}) allows; raise it if you trust the file",
                file=key, offset=record.start, expected=most, found=record.content_nbytes,
            )  # fmt: skip
        nbytes, read = record.content_nbytes, partial(Sent(self._read), key, record)
        entry = VirtualFile(nbytes, read, partial(Sent(self._stamp), key, record), read_nbytes=record.nbytes)
        return self.put(entry, member_key(key, record))

    def __getstate__(self) -> object:
        state = super().__getstate__()
        return {name: part for name, part in state.items() if name != "_locks"} if isinstance(state, dict) else state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._locks = _locks()

    def close(self) -> None:
        self._kept.clear()
        super().close()

    def _stamp(self, key: str, record: ZipRecord) -> Stamp:
        return key, record.start, record.nbytes, self._store.stamp(key)

    def _read(self, key: str, record: ZipRecord, start: int, out: memoryview) -> None:
        with self._locks[record.start % LOCKS]:
            content = self._kept.get(record)
            if content is None:
                content = self._inflate(key, record)
                self._kept.put(record, content)
        out[:] = content.data[start : start + out.nbytes]

    def _inflate(self, key: str, record: ZipRecord) -> np.ndarray:
        try:
            content = np.empty(record.content_nbytes, np.uint8)
        except MemoryError:
            message = f"no memory for a member of {record.content_nbytes:,} bytes, which must be inflated whole"
            raise StoreError(message, file=key) from None
        stream = zlib.decompressobj(-zlib.MAX_WBITS)
        done, at, waiting = 0, record.start, b""
        while not stream.eof:
            if not waiting and at < record.stop:
                packed = bytearray(min(BLOCK_NBYTES, record.stop - at))
                self._store.read(key, at, memoryview(packed))
                waiting, at = bytes(packed), at + len(packed)
            made = _inflated(stream, waiting, min(content.nbytes - done + 1, MADE_NBYTES))
            stuck = not made and stream.unconsumed_tail == waiting and not stream.eof
            if made is None or stuck or done + len(made) > content.nbytes:
                break
            content[done : done + len(made)] = np.frombuffer(made, np.uint8)
            done, waiting = done + len(made), stream.unconsumed_tail
        if not stream.eof or done != content.nbytes or at != record.stop or stream.unused_data:
            message = f"the compressed bytes of {record.name!r} do not inflate to the {content.nbytes:,} bytes that they should"
            raise Corrupted(f"{message}: get the file again", file=key, offset=record.start)
        return content


def _locks() -> list[threading.Lock]:
    return [renewed(threading.Lock()) for _ in range(LOCKS)]


def _inflated(stream: zlib._Decompress, packed: bytes, most: int) -> bytes | None:
    """What comes next, at most so many bytes; None for what was never deflated."""
    try:
        return stream.decompress(packed, most)
    except zlib.error:
        return None


def inflate_head(packed: bytes, most: int) -> bytes:
    """The first bytes of what begins with these, as far as they go; none where they were never deflated."""
    return _inflated(zlib.decompressobj(-zlib.MAX_WBITS), packed, most) or b""
