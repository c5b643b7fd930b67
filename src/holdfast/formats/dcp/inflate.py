"""Items that torch's stream extensions have compressed."""

from __future__ import annotations

from functools import partial

import numpy as np

from holdfast.core.protocols import Stamp, Store
from holdfast.core.runtime import PortableMethod
from holdfast.errors import FormatError, LimitExceeded, StoreError, Truncated, Unsupported
from holdfast.formats.dcp.schema import Item
from holdfast.stores.virtual import ContentCache, Virtual, VirtualFile

ZSTD = "stream.zstd/1"

CACHE_NBYTES = 256 << 20
"""Inflated items that stay in memory beyond the last one, so that the blocks of one item are read from one inflation."""

WINDOW_NBYTES = 8 << 20
"""How far back a stream may refer: what every decoder should support, by the zstd specification. torch's streams need 2 MiB."""


def virtual_key(item: Item) -> str:
    return f"{item.file}@{item.offset}"


def is_inflated(item: Item) -> bool:
    """Whether an item must be inflated. Raises `Unsupported` for any other transform."""
    if not item.transforms:
        return False
    if item.transforms != (ZSTD,):
        shown = ", ".join(name[:64] for name in item.transforms[:4])
        raise Unsupported(
            f"an item that was transformed by {shown}; only {ZSTD} is known",
            file=item.file,
            offset=item.offset,
        )
    return True


class InflatedStore(Virtual):
    """The store of a directory, with each compressed item as one more file, which is not listed.

        __0_0.distcp@462   the item at byte 462 of __0_0.distcp, inflated

    torch's stream extensions have one compressor, `stream.zstd/1`. Such an item cannot be read by range: it is inflated whole, and
    the last few stay in memory. The most bytes that it may have are known beforehand, and never exceeded.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(over=store)
        self._store = store
        self._cache = ContentCache(CACHE_NBYTES)

    def add(self, item: Item, most: int) -> str:
        """Add an item as a file of at most `most` bytes, and give its name."""
        nbytes, read = (
            partial(PortableMethod(self._nbytes), item, most),
            partial(PortableMethod(self._read), item, most),
        )
        return self.put(
            VirtualFile(nbytes, read, partial(PortableMethod(self._stamp), item)), virtual_key(item)
        )

    def close(self) -> None:
        self._cache.clear()
        super().close()

    def _nbytes(self, item: Item, most: int) -> int:
        return self._content(item, most).nbytes

    def _read(self, item: Item, most: int, start: int, out: memoryview) -> None:
        out[:] = self._content(item, most).data[start : start + out.nbytes]

    def _stamp(self, item: Item) -> Stamp:
        return item.file, item.offset, item.length, self._store.stamp(item.file)

    def _content(self, item: Item, most: int) -> np.ndarray:
        size = self._store.size(item.file)  # raises where the directory was closed
        with self._cache.lock:
            content = self._cache.get(item)
            if content is None:
                if item.stop > size:
                    raise Truncated(
                        f"an item should end at byte {item.stop:,}", file=item.file, offset=size
                    )
                packed = bytearray(item.length)
                self._store.read(item.file, item.offset, memoryview(packed))
                content = np.frombuffer(inflate(packed, most, item), np.uint8)
                self._cache.put(item, content)
            return content


def inflate(packed: bytearray, most: int, item: Item) -> bytearray:
    """The content of a zstd stream: at most `most` bytes."""
    try:
        import zstandard
    except ImportError:
        message = "items of this checkpoint are compressed with zstd, which takes the package zstandard: pip install zstandard"
        raise Unsupported(message, file=item.file) from None
    made = bytearray()
    try:
        with zstandard.ZstdDecompressor(max_window_size=WINDOW_NBYTES).stream_reader(
            packed, read_across_frames=True
        ) as stream:
            while piece := stream.read(min(1 << 20, most + 1 - len(made))):
                made += piece
                if len(made) > most:
                    message = f"a compressed item holds more than the {most:,} bytes that it should"
                    raise LimitExceeded(message, file=item.file, offset=item.offset, expected=most)
    except zstandard.ZstdError as error:
        raise FormatError(
            f"a compressed item is damaged: {error}", file=item.file, offset=item.offset
        ) from None
    except MemoryError:
        raise StoreError(
            f"no memory for an item of {most:,} bytes, which must be inflated whole", file=item.file
        ) from None
    return made
