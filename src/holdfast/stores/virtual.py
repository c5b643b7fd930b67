"""`Virtual`: a store whose content is computed when it is read.

An entry of the store has a size and a function that fills a range of bytes: for a cast, a mask, a
packed part of a tensor, or a file that is not written yet. A `Virtual` over another store also
passes on all keys of that store. Its own entries are then not listed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from holdfast.core.protocols import Stamp, Store
from holdfast.core.runtime import make_fork_safe
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.errors import Closed, StoreError, Truncated, Unsupported


class VirtualFile(Value, frozen=True, eq=False):
    """An entry of a `Virtual` store."""

    nbytes: int | Callable[[], int]
    """The size, or a function that returns it."""
    read: Callable[[int, memoryview], None]
    """Fills memory with the bytes from an offset on. It is never called for bytes past the end."""
    stamp: Callable[[], Stamp] = tuple
    """Identifies the version of the data that the content is computed from."""
    read_nbytes: int | None = None
    """Bytes that are read elsewhere to compute all of the content; None if as many as `nbytes`."""

    def size(self) -> int:
        """Return the size in bytes."""
        return self.nbytes if isinstance(self.nbytes, int) else self.nbytes()


class Virtual(Store):
    """A store of computed files, alone or over another store."""

    def __init__(self, name: str = "<virtual>", *, over: Store | None = None) -> None:
        """Create a store without entries.

        Args:
            name: The name for messages. A store over another one has the name of that store.
            over: A store whose keys this store passes on.
        """
        self.name = name if over is None else over.name
        self._over = over
        if over is not None:
            self.read_profile = replace(over.read_profile, is_in_memory=False, is_sequential=False)
            self.index = over.index
        self._entries: dict[str, VirtualFile] = {}
        self._is_closed = False

    def put(self, entry: VirtualFile, key: str | None = None) -> str:
        """Add or replace an entry, and return its key.

        Without a key, the entry gets the number of entries as its key. Entries are never removed,
        so this number is new.
        """
        if key is None:
            key = str(len(self._entries))
        self._entries[key] = entry
        return key

    def entry(self, key: str) -> VirtualFile:
        """Return the entry with a key."""
        if self._is_closed:
            raise Closed("the checkpoint was closed; open it again to read from it", file=self.name)
        if key not in self._entries:
            raise StoreError(f"there is no {key!r} in {self.name}", file=key)
        return self._entries[key]

    @property
    def is_gone(self) -> bool:
        return self._over is not None and self._over.is_gone

    @property
    def is_folder(self) -> bool:
        return self._over is not None and self._over.is_folder

    @property
    def single_key(self) -> str | None:
        return super().single_key if self._over is None else self._over.single_key

    def get_folder_store(self) -> Store | None:
        return None if self._over is None else self._over.get_folder_store()

    def has_key(self, key: str) -> bool:
        return super().has_key(key) if self._over is None else self._over.has_key(key)

    def expect_size(self, key: str, nbytes: int) -> bool:
        return self._over is not None and self._over.expect_size(key, nbytes)

    def can_read_sibling(self, key: str) -> bool:
        # A save to a bucket checks its uploaded objects through a store of their keys, before it
        # publishes them. The keys of the objects that it shares with another checkpoint are among
        # them.
        return key in self._entries if self._over is None else self._over.can_read_sibling(key)

    def list(self) -> Sequence[str]:
        return sorted(self._entries) if self._over is None else self._over.list()

    def get_underlying_store(self, key: str) -> Store | None:
        return None if key in self._entries else self._over

    def size(self, key: str) -> int:
        store = self.get_underlying_store(key)
        return self.entry(key).size() if store is None else store.size(key)

    def read(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a file, starting at offset `start`.

        If the key belongs to an entry, the entry computes the bytes. All other keys are read from
        the underlying store.
        """
        store = self.get_underlying_store(key)
        if store is not None:
            store.read(key, start, out)
            return
        entry = self.entry(key)
        stop = start + out.nbytes
        nbytes = entry.size()
        if start < 0 or stop > nbytes:
            message = f"cannot read bytes {start} to {stop} of a file of {nbytes} bytes"
            raise Truncated(message, file=key, offset=nbytes)
        if out.nbytes:
            entry.read(start, out)

    def peek(self, key: str, start: int, out: memoryview) -> None:
        store = self.get_underlying_store(key)
        if store is None:
            self.read(key, start, out)
        else:
            store.peek(key, start, out)

    def map(self, key: str) -> memoryview | None:
        store = self.get_underlying_store(key)
        return None if store is None else store.map(key)

    def stamp(self, key: str) -> Stamp:
        store = self.get_underlying_store(key)
        return self.entry(key).stamp() if store is None else store.stamp(key)

    def find_changed(self) -> Sequence[str]:
        return () if self._over is None else self._over.find_changed()

    def find_replaced(self) -> Sequence[str]:
        return () if self._over is None else self._over.find_replaced()

    def identity(self, key: str = "") -> Hashable:
        """Return where the content of a key, or the whole store, comes from.

        A `Virtual` differs from every other store: another one over the same store may have other
        entries.
        """
        store = self.get_underlying_store(key) if key else None
        return super().identity(key) if store is None else store.identity(key)

    def count_read_nbytes(self, key: str, nbytes: int) -> int:
        """Return how many bytes are read somewhere to compute `nbytes` bytes of a file."""
        store = self.get_underlying_store(key)
        if store is not None:
            return store.count_read_nbytes(key, nbytes)
        entry = self.entry(key)
        file_nbytes = entry.size()
        if entry.read_nbytes is None or not file_nbytes:
            return nbytes
        # Which bytes of the sources a range needs is not known. So it gets its share of what the
        # whole file needs, rounded up.
        return -(-nbytes * entry.read_nbytes // file_nbytes)

    def close(self) -> None:
        self._is_closed = True
        self._entries.clear()
        if self._over is not None:
            self._over.close()

    def __getstate__(self) -> object:
        if self._over is None:
            # Over another store, the entries may still be functions that cannot be pickled: then
            # pickle says so.
            raise Unsupported(
                "content that this process computes cannot be read lazily in another process; "
                "save it and send the path"
            )
        return self.__dict__


class ContentCache:
    """A least-recently-used cache of computed content, for content that is read in pieces.

    The last content that was added is always kept, even if it is larger than the cache.
    """

    def __init__(self, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._content: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self._nbytes = 0
        self.lock = make_fork_safe(threading.RLock())
        """A caller holds this lock to compute content that no other thread computes meanwhile."""

    @property
    def nbytes(self) -> int:
        """The size of the cached content."""
        return self._nbytes

    def get(self, key: Hashable) -> np.ndarray | None:
        """Return cached content, or None."""
        with self.lock:
            content = self._content.get(key)
            if content is not None:
                self._content.move_to_end(key)
            return content

    def put(self, key: Hashable, content: np.ndarray) -> None:
        """Add or replace content, and drop the content that was used least recently."""
        with self.lock:
            # The size of content that is replaced must not count twice.
            self._drop(key)
            while self._content and content.nbytes + self._nbytes > self._most_nbytes:
                self._drop(next(iter(self._content)))
            self._content[key] = content
            self._nbytes += content.nbytes

    def _drop(self, key: Hashable) -> None:
        """Remove content if it is cached. The caller holds the lock."""
        content = self._content.pop(key, None)
        if content is not None:
            self._nbytes -= content.nbytes

    def clear(self) -> None:
        """Drop all content."""
        with self.lock:
            self._content.clear()
            self._nbytes = 0

    def __reduce__(self) -> tuple[object, ...]:
        return ContentCache, (self._most_nbytes,)


HASHED_NBYTES = 1 << 20
"""Bytes that `tensor_stamp` hashes at a time."""


def tensor_stamp(tensor: LazyTensor) -> Stamp:
    """Return what identifies the elements of a tensor.

    That is the position of its chunks, the stamps of their files, and the checksums that the source
    records. If a store has no stamps and the source no checksum, the bytes are read and hashed.
    """
    store = tensor.source.store
    chunk_stamps: list[Stamp] = []
    for chunk in tensor.chunks:
        storage = chunk.storage
        stamp = store.stamp(storage.key)
        if not stamp and storage.crc32 is None:
            stamp = (_hash_range(store, storage.key, storage.start, storage.nbytes),)
        chunk_stamp = (
            storage.key,
            storage.start,
            storage.nbytes,
            chunk.offset,
            chunk.strides,
            storage.crc32,
            stamp,
        )
        chunk_stamps.append(chunk_stamp)
    return tensor.dtype.name, tensor.shape, store.name, chunk_stamps


def _hash_range(store: Store, key: str, start: int, nbytes: int) -> str:
    """Read a range of a file block by block, and return a hash of its bytes."""
    # Only a conversion that can be resumed needs it.
    from hashlib import blake2b

    digest = blake2b(digest_size=16)
    block = memoryview(bytearray(min(nbytes, HASHED_NBYTES)))
    for offset in range(0, nbytes, HASHED_NBYTES):
        # The last block is shorter.
        content = block[: nbytes - offset]
        store.read(key, start + offset, content)
        digest.update(content)
    return digest.hexdigest()
