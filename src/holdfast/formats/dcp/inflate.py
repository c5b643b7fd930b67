"""Items that passed through a compressor on their way to disk (torch's stream extensions), as files of their own.

    __0_0.distcp@462   the item at byte 462 of __0_0.distcp, inflated

torch knows one: `stream.zstd/1`. Such an item cannot be read by range, so it is inflated whole when any of it is wanted, and the
last few stay in memory. How large it may become is known beforehand; not a byte more is made, whatever the stream says.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from holdfast.core.protocols import Stamp, Store
from holdfast.errors import FormatError, LimitExceeded, StoreError, Truncated, Unsupported
from holdfast.formats.dcp.records import Item
from holdfast.stores.virtual import Entry, Kept, Virtual

__all__ = ["InflatedStore", "is_inflated", "virtual_key"]

ZSTD = "stream.zstd/1"

KEPT_NBYTES = 256 << 20
"""Inflated items that are kept beyond the last one, so that the blocks of one item are read from one inflation of it."""

WINDOW_NBYTES = 8 << 20
"""How far back a stream may refer: what every decoder should support, by the zstd specification. torch's streams need 2 MiB."""


def virtual_key(item: Item) -> str:
    """The name of an item as a file of its own."""
    return f"{item.file}@{item.offset}"


def is_inflated(item: Item) -> bool:
    """Whether an item must be inflated. Raises `Unsupported` for any other transform."""
    if not item.transforms:
        return False
    if item.transforms != (ZSTD,):
        shown = ", ".join(name[:64] for name in item.transforms[:4])
        raise Unsupported(f"an item that was transformed by {shown}; only {ZSTD} is known", file=item.file, offset=item.offset)
    return True


class InflatedStore(Virtual):
    """The store of a directory, with its compressed items as further files. These are not listed."""

    def __init__(self, store: Store) -> None:
        super().__init__(over=store)
        self._store = store
        self._kept = Kept(KEPT_NBYTES)

    def add(self, item: Item, most: int) -> str:
        """Make an item a file, of at most so many bytes; its name."""
        nbytes, read = partial(self._nbytes, item, most), partial(self._read, item, most)
        return self.put(Entry(nbytes, read, partial(self._stamp, item)), virtual_key(item))

    def close(self) -> None:
        self._kept.clear()
        super().close()

    def _nbytes(self, item: Item, most: int) -> int:
        return self._content(item, most).nbytes

    def _read(self, item: Item, most: int, start: int, out: memoryview) -> None:
        out[:] = self._content(item, most).data[start : start + out.nbytes]

    def _stamp(self, item: Item) -> Stamp:
        return item.file, item.offset, item.length, self._store.stamp(item.file)

    def _content(self, item: Item, most: int) -> np.ndarray:
        size = self._store.size(item.file)  # raises where the directory was closed
        with self._kept.lock:
            content = self._kept.get(item)
            if content is None:
                if item.stop > size:
                    raise Truncated(f"an item should end at byte {item.stop:,}", file=item.file, offset=size)
                packed = bytearray(item.length)
                self._store.read(item.file, item.offset, memoryview(packed))
                content = np.frombuffer(inflate(packed, most, item), np.uint8)
                self._kept.put(item, content)
            return content


def inflate(packed: bytearray, most: int, item: Item) -> bytearray:
    """What a zstd stream holds: at most `most` bytes."""
    try:
        import zstandard
    except ImportError:
        raise Unsupported(
            "items of this checkpoint are compressed with zstd, which takes the package zstandard: pip install 'holdfast[zstd]'",
            file=item.file,
        ) from None
    made = bytearray()
    try:
        with zstandard.ZstdDecompressor(max_window_size=WINDOW_NBYTES).stream_reader(packed, read_across_frames=True) as stream:
            while piece := stream.read(min(1 << 20, most + 1 - len(made))):
                made += piece
                if len(made) > most:
                    raise LimitExceeded(
                        f"a compressed item holds more than the {most:,} bytes that it should",
                        file=item.file, offset=item.offset, expected=most,
                    )  # fmt: skip
    except zstandard.ZstdError as error:
        raise FormatError(f"a compressed item is damaged: {error}", file=item.file, offset=item.offset) from None
    except MemoryError:
        raise StoreError(f"no memory for an item of {most:,} bytes, which must be inflated whole", file=item.file) from None
    return made
