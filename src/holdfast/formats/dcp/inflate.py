"""Items that passed through a compressor on their way to disk (torch's stream extensions), as files of their own.

    __0_0.distcp@462   the item at byte 462 of __0_0.distcp, inflated

torch knows one: `stream.zstd/1`. Such an item cannot be read by range, so it is inflated whole when any of it is wanted, and the
last few stay in memory. How large it may become is known beforehand; not a byte more is made, whatever the stream says.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from holdfast.core.forks import renewed
from holdfast.core.protocols import Store
from holdfast.errors import FormatError, LimitExceeded, StoreError, Truncated, Unsupported
from holdfast.formats.dcp.records import Item

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


class InflatedStore:
    """The store of a directory, with its compressed items as further files. These are not listed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._items: dict[str, tuple[Item, int]] = {}
        self._kept: OrderedDict[str, memoryview] = OrderedDict()
        self._lock = renewed(threading.Lock())

    def add(self, item: Item, most: int) -> str:
        """Make an item a file, of at most so many bytes; its name."""
        key = virtual_key(item)
        self._items[key] = (item, most)
        return key

    @property
    def name(self) -> str:
        return self._store.name

    def list(self) -> Sequence[str]:
        return self._store.list()

    def size(self, key: str) -> int:
        return self._content(key).nbytes if key in self._items else self._store.size(key)

    def read(self, key: str, start: int, out: memoryview) -> None:
        if key not in self._items:
            self._store.read(key, start, out)
            return
        content = self._content(key)
        stop = start + out.nbytes
        if start < 0 or stop > content.nbytes:
            raise Truncated(f"wanted bytes {start} to {stop} of {content.nbytes}", file=key, offset=content.nbytes)
        out[:] = content[start:stop]

    def map(self, key: str) -> memoryview | None:
        return None if key in self._items else self._store.map(key)

    def close(self) -> None:
        with self._lock:
            self._kept.clear()
        self._store.close()

    def __reduce__(self) -> tuple[object, ...]:
        return _arrived, (self._store, dict(self._items))

    def _content(self, key: str) -> memoryview:
        item, most = self._items[key]
        size = self._store.size(item.file)  # raises where the directory was closed
        with self._lock:
            content = self._kept.get(key)
            if content is None:
                if item.stop > size:
                    raise Truncated(f"an item should end at byte {item.stop:,}", file=item.file, offset=size)
                packed = bytearray(item.length)
                self._store.read(item.file, item.offset, memoryview(packed))
                content = memoryview(inflate(packed, most, item))
                while self._kept and content.nbytes + sum(kept.nbytes for kept in self._kept.values()) > KEPT_NBYTES:
                    self._kept.popitem(last=False)
                self._kept[key] = content
            self._kept.move_to_end(key)
            return content


def _arrived(store: Store, items: dict[str, tuple[Item, int]]) -> InflatedStore:
    """A store that was pickled in another process; what it had inflated stayed there."""
    made = InflatedStore(store)
    made._items = items
    return made


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
