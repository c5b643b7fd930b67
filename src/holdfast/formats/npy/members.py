"""Decompresses the members of an archive of arrays."""

from __future__ import annotations

import threading
import zlib
from functools import partial

import numpy as np

from holdfast.core.limits import Limits
from holdfast.core.protocols import Stamp, Store
from holdfast.core.runtime import PortableMethod, make_fork_safe
from holdfast.errors import Corrupted, LimitExceeded, StoreError
from holdfast.formats.zip.layout import ZipRecord
from holdfast.stores.virtual import ContentCache, Virtual, VirtualFile

CACHE_NBYTES = 256 << 20
"""Decompressed members that stay in memory, so that several reads of a member inflate it once."""

READ_NBYTES = 1 << 20
"""Compressed bytes that are read at a time."""

INFLATE_NBYTES = 1 << 20
"""Bytes that zlib inflates at a time. It bounds the memory that a hostile member can take."""

LOCK_COUNT = 16
"""Threads that can inflate at the same time. Each member has one of the locks, so that two threads
never inflate the same member."""

UNCHECKED_NBYTES = 16 << 20
"""Members up to this size may have any compressed size."""


def member_key(key: str, record: ZipRecord) -> str:
    """Return the key of a compressed member in the store of its archive, such as `w.npz@4711`."""
    return f"{key}@{record.start}"


class InflatedMembers(Virtual):
    """The store of an archive, to which compressed members are added as files.

    Deflate has no random access, so a member is inflated completely, and the last ones are cached.
    The added files are not listed.
    """

    def __init__(self, store: Store, limits: Limits) -> None:
        super().__init__(over=store)
        self._store = store
        self._limits = limits
        self._cache = ContentCache(CACHE_NBYTES)
        self._locks = _make_locks()

    def add(self, key: str, record: ZipRecord) -> str:
        """Add a compressed member as a file, and return its key.

        Raises:
            LimitExceeded: The member is many times as large as its compressed bytes. A zip bomb has
                a ratio of up to 1,000.
        """
        max_nbytes = max(self._limits.inflation * record.nbytes, UNCHECKED_NBYTES)
        if record.content_nbytes > max_nbytes:
            message = (
                f"{record.name!r} inflates from {record.nbytes:,} to {record.content_nbytes:,} bytes,"
                f" more than Limits(inflation={self._limits.inflation}) allows;"
                " raise the limit if you trust the file"
            )
            raise LimitExceeded(
                message,
                file=key,
                offset=record.start,
                expected=max_nbytes,
                found=record.content_nbytes,
            )
        entry = VirtualFile(
            record.content_nbytes,
            partial(PortableMethod(self._read), key, record),
            partial(PortableMethod(self._stamp), key, record),
            read_nbytes=record.nbytes,
        )
        return self.put(entry, member_key(key, record))

    def __getstate__(self) -> object:
        # Locks cannot be pickled.
        state = super().__getstate__()
        if not isinstance(state, dict):
            return state
        return {name: value for name, value in state.items() if name != "_locks"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._locks = _make_locks()

    def close(self) -> None:
        self._cache.clear()
        super().close()

    def _stamp(self, key: str, record: ZipRecord) -> Stamp:
        return key, record.start, record.nbytes, self._store.stamp(key)

    def _read(self, key: str, record: ZipRecord, start: int, out: memoryview) -> None:
        """Fill `out` with the decompressed bytes of a member from `start` on."""
        with self._locks[record.start % LOCK_COUNT]:
            content = self._cache.get(record)
            if content is None:
                content = self._inflate(key, record)
                self._cache.put(record, content)
        out[:] = content.data[start : start + out.nbytes]

    def _inflate(self, key: str, record: ZipRecord) -> np.ndarray:
        """Inflate a member.

        Raises:
            Corrupted: The compressed bytes do not end where the archive says, or they do not have
                the size that it states.
            StoreError: There is not enough memory.
        """
        try:
            content = np.empty(record.content_nbytes, np.uint8)
        except MemoryError:
            message = f"not enough memory to decompress a member of {record.content_nbytes:,} bytes"
            raise StoreError(message, file=key) from None

        stream = zlib.decompressobj(-zlib.MAX_WBITS)
        inflated_nbytes = 0
        read_offset = record.start
        compressed = b""
        while not stream.eof:
            if not compressed and read_offset < record.stop:
                block = bytearray(min(READ_NBYTES, record.stop - read_offset))
                self._store.read(key, read_offset, memoryview(block))
                compressed = bytes(block)
                read_offset += len(block)

            # One byte more than expected, to notice a member that is too long.
            max_nbytes = min(content.nbytes - inflated_nbytes + 1, INFLATE_NBYTES)
            inflated = _decompress(stream, compressed, max_nbytes)
            if inflated is None or inflated_nbytes + len(inflated) > content.nbytes:
                break
            is_stuck = not inflated and stream.unconsumed_tail == compressed
            if is_stuck and not stream.eof:
                break
            stop = inflated_nbytes + len(inflated)
            content[inflated_nbytes:stop] = np.frombuffer(inflated, np.uint8)
            inflated_nbytes = stop
            compressed = stream.unconsumed_tail

        has_expected_size = inflated_nbytes == content.nbytes and read_offset == record.stop
        if not stream.eof or not has_expected_size or stream.unused_data:
            message = (
                f"the compressed bytes of {record.name!r} do not inflate to the"
                f" {content.nbytes:,} bytes that the archive states; get the file again"
            )
            raise Corrupted(message, file=key, offset=record.start)
        return content


def inflate_head(compressed: bytes, max_nbytes: int) -> bytes:
    """Inflate the first bytes of a member. Return no bytes if they are not deflated data."""
    return _decompress(zlib.decompressobj(-zlib.MAX_WBITS), compressed, max_nbytes) or b""


def _decompress(stream: zlib._Decompress, compressed: bytes, max_nbytes: int) -> bytes | None:
    """Continue a stream. Return None if the compressed bytes are damaged."""
    try:
        return stream.decompress(compressed, max_nbytes)
    except zlib.error:
        return None


def _make_locks() -> list[threading.Lock]:
    return [make_fork_safe(threading.Lock()) for _ in range(LOCK_COUNT)]
