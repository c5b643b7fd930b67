"""`Virtual`: a store whose content is made when it is read.

A cast, a mask, a packed part, a file that is yet to be written: each is an entry, so many bytes and a function that fills a range
of them. Over another store, it has all that is there, and its entries as further content that is not listed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from holdfast.core.protocols import Stamp, Store
from holdfast.core.runtime import renewed
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.errors import Closed, StoreError, Truncated, Unsupported


class VirtualFile(Value, frozen=True, eq=False):
    nbytes: int | Callable[[], int]
    read: Callable[[int, memoryview], None]
    """Fills memory with the bytes from a place on. They are all there: nobody asks for more."""
    stamp: Callable[[], Stamp] = tuple
    """What identifies that of which it is made."""
    read_nbytes: int | None = None
    """Bytes that are read somewhere when all of it is, where these are not as many."""

    def size(self) -> int:
        return self.nbytes if isinstance(self.nbytes, int) else self.nbytes()


class Virtual(Store):
    def __init__(self, name: str = "<virtual>", *, over: Store | None = None) -> None:
        self.name = name if over is None else over.name
        self._over = over
        if over is not None:
            self.medium = replace(over.medium, resident=False, in_order=False)
            self.index = over.index
        self._entries: dict[str, VirtualFile] = {}
        self._closed = False

    def put(self, entry: VirtualFile, key: str | None = None) -> str:
        """Add an entry, or put another in its place. Its key: a number where none is given."""
        key = str(len(self._entries)) if key is None else key
        self._entries[key] = entry
        return key

    def entry(self, key: str) -> VirtualFile:
        if self._closed:
            raise Closed("the checkpoint was closed; open it again to read from it", file=self.name)
        if key not in self._entries:
            raise StoreError(f"there is no {key!r} in {self.name}", file=key)
        return self._entries[key]

    @property
    def gone(self) -> bool:
        return self._over is not None and self._over.gone

    @property
    def folder(self) -> bool:
        return self._over is not None and self._over.folder

    @property
    def single(self) -> str | None:
        return super().single if self._over is None else self._over.single

    def beside(self) -> Store | None:
        return None if self._over is None else self._over.beside()

    def holds(self, key: str) -> bool:
        return super().holds(key) if self._over is None else self._over.holds(key)

    def expect(self, key: str, nbytes: int) -> bool:
        return self._over is not None and self._over.expect(key, nbytes)

    def reaches(self, key: str) -> bool:
        return key in self._entries if self._over is None else self._over.reaches(key)

    def list(self) -> Sequence[str]:
        return sorted(self._entries) if self._over is None else self._over.list()

    def below(self, key: str) -> Store | None:
        return None if key in self._entries else self._over

    def size(self, key: str) -> int:
        store = self.below(key)
        return self.entry(key).size() if store is None else store.size(key)

    def read(self, key: str, start: int, out: memoryview) -> None:
        store = self.below(key)
        if store is not None:
            store.read(key, start, out)
            return
        entry, stop = self.entry(key), start + out.nbytes
        nbytes = entry.size()
        if start < 0 or stop > nbytes:
            raise Truncated(f"wanted bytes {start} to {stop} of {nbytes}", file=key, offset=nbytes)
        if out.nbytes:
            entry.read(start, out)

    def peek(self, key: str, start: int, out: memoryview) -> None:
        store = self.below(key)
        if store is None:
            self.read(key, start, out)
        else:
            store.peek(key, start, out)

    def map(self, key: str) -> memoryview | None:
        store = self.below(key)
        return None if store is None else store.map(key)

    def stamp(self, key: str) -> Stamp:
        store = self.below(key)
        return self.entry(key).stamp() if store is None else store.stamp(key)

    def changed(self) -> Sequence[str]:
        return () if self._over is None else self._over.changed()

    def find_replaced(self) -> Sequence[str]:
        return () if self._over is None else self._over.find_replaced()

    def place(self, key: str = "") -> Hashable:
        """Entries belong to this store, and the store is like no other: it may have entries that another over the same has not."""
        store = self.below(key) if key else None
        return super().place(key) if store is None else store.place(key)

    def cost(self, key: str, nbytes: int) -> int:
        store = self.below(key)
        if store is not None:
            return store.cost(key, nbytes)
        entry = self.entry(key)
        whole = entry.size()
        return (
            nbytes
            if entry.read_nbytes is None or not whole
            else -(-nbytes * entry.read_nbytes // whole)
        )

    def close(self) -> None:
        self._closed = True
        self._entries.clear()
        if self._over is not None:
            self._over.close()

    def __getstate__(self) -> object:
        if self._over is None:
            raise Unsupported(
                "what is computed in this process cannot be read lazily in another; save it and send the path"
            )
        return self.__dict__


class ContentCache:
    """Content that was made last, as much of it as fits beside the very last: what is read in pieces is made once."""

    def __init__(self, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._content: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self._nbytes = 0
        self.lock = renewed(
            threading.RLock()
        )  # Whoever holds it makes something while nobody else does.

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def get(self, key: Hashable) -> np.ndarray | None:
        with self.lock:
            found = self._content.get(key)
            if found is not None:
                self._content.move_to_end(key)
            return found

    def put(self, key: Hashable, content: np.ndarray) -> None:
        with self.lock:
            self._forget(key)
            while self._content and content.nbytes + self._nbytes > self._most_nbytes:
                self._forget(next(iter(self._content)))
            self._content[key] = content
            self._nbytes += content.nbytes

    def _forget(self, key: Hashable) -> None:
        found = self._content.pop(key, None)
        self._nbytes -= 0 if found is None else found.nbytes

    def clear(self) -> None:
        with self.lock:
            self._content.clear()
            self._nbytes = 0

    def __reduce__(self) -> tuple[object, ...]:
        return ContentCache, (self._most_nbytes,)


HASHED_NBYTES = 1 << 20


def tensor_stamp(tensor: LazyTensor) -> Stamp:
    """Return what identifies the elements of a tensor.

    That is where they lie, the stamps of what they lie in, and the checksums that the source records.
    Where a store has no stamps and the source no checksum, the bytes are read and hashed.
    """
    store = tensor.source.store
    places: list[Stamp] = []
    for chunk in tensor.chunks:
        storage = chunk.storage
        stamp = store.stamp(storage.key)
        if not stamp and storage.crc32 is None:
            stamp = (_hash_range(store, storage.key, storage.start, storage.nbytes),)
        place = (
            storage.key,
            storage.start,
            storage.nbytes,
            chunk.offset,
            chunk.strides,
            storage.crc32,
            stamp,
        )
        places.append(place)
    return tensor.dtype.name, tensor.shape, store.name, places


def _hash_range(store: Store, key: str, start: int, nbytes: int) -> str:
    """Hash a range of a file."""
    from hashlib import blake2b  # for a conversion that may be resumed

    digest = blake2b(digest_size=16)
    block = memoryview(bytearray(min(nbytes, HASHED_NBYTES)))
    for offset in range(0, nbytes, HASHED_NBYTES):
        piece = block[: nbytes - offset]
        store.read(key, start + offset, piece)
        digest.update(piece)
    return digest.hexdigest()
