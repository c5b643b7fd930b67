"""A store whose bytes are already in memory, and one over a seekable file object."""

from __future__ import annotations

import io
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np

from holdfast.core.protocols import Medium, Store
from holdfast.core.runtime import renewed
from holdfast.errors import Closed, HoldfastError, StoreError, Truncated, Unsupported

LARGE = 64 << 10  # From this many bytes on, other threads should not wait for a copy.


class MemoryStore(Store):
    medium = Medium(resident=True)

    def __init__(
        self, content: Mapping[str, bytes | bytearray | memoryview], *, name: str = "<memory>"
    ) -> None:
        self.name = name
        self._content = {key: memoryview(value).cast("B") for key, value in content.items()}
        self._closed = False
        self._owners: list[object] = []

    @classmethod
    def of(cls, key: str, content: memoryview, *, name: str) -> MemoryStore:
        made = cls({}, name=name)
        made._content[key] = content
        return made

    def add(self, key: str, content: memoryview, *, owner: object = None) -> None:
        """Put more bytes under a new key. `owner` stays alive for as long as the store does: the memory may be its."""
        self._content[key] = content
        self._owners.append(owner)

    def list(self) -> Sequence[str]:
        return sorted(self._content)

    def size(self, key: str) -> int:
        return self._bytes(key).nbytes

    def read(self, key: str, start: int, out: memoryview) -> None:
        content = self._bytes(key)
        stop = start + out.nbytes
        if start < 0 or stop > content.nbytes:
            raise Truncated(
                f"wanted bytes {start} to {stop} of {content.nbytes}",
                file=key,
                offset=content.nbytes,
            )
        if out.nbytes < LARGE:
            out[:] = content[start:stop]
        else:
            # numpy lets go of the interpreter lock while it copies, a memoryview does not.
            np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(content[start:stop], np.uint8))

    def map(self, key: str) -> memoryview | None:
        return self._bytes(key)

    def place(self, key: str = "") -> Hashable:
        """The address: memory that two stores have is the same memory."""
        content = self._bytes(key) if key else None
        if not content:
            return super().place(key)
        return (
            "memory",
            np.frombuffer(content, np.uint8).__array_interface__["data"][0],
            content.nbytes,
        )

    def close(self) -> None:
        self._closed = True

    def __reduce__(self) -> tuple[object, ...]:
        raise Unsupported(
            "what lies in the memory of this process cannot be read lazily in another; save it and send the path"
        )

    def _bytes(self, key: str) -> memoryview:
        if self._closed:
            raise Closed("the checkpoint was closed; open it again to read from it", file=self.name)
        if key not in self._content:
            raise StoreError(f"there is no {key!r} in {self.name}", file=key)
        return self._content[key]


class FileObjectStore(Store):
    """One seekable binary file object under one key. Its position is put back after every read, or block of reads. Asked of the
    object: `tell`, `seek(offset)` and `seek(0, SEEK_END)`, and `read(n)` or `readinto`. Positions are those that `tell` gives. What
    `seek` gives back is not looked at: a window into another file may say where that one stands, and `mmap.mmap` says nothing
    before Python 3.13. A read may give less than it was asked for; nothing at all is the end. It is read in order, in one go: a
    member of a zip and a decompressor go back by beginning again at the start."""

    medium = Medium(in_order=True)
    KEY = "file"

    def __init__(self, file: BinaryIO) -> None:
        self.name = "<file object>"
        self._file = file
        self._lock = renewed(threading.Lock())
        self._closed = False
        self._readers = 0
        self._position = 0  # Where the caller's object stood when the first of the readers came.
        try:
            position = file.tell()
            file.seek(0, io.SEEK_END)
            self._size = file.tell()
            file.seek(position)
            text = isinstance(file.read(0), str)
        except (OSError, AttributeError, ValueError, TypeError) as error:
            raise StoreError(f"a file object must be open, binary and seekable: {error}") from None
        if text:
            raise StoreError(
                f"this {type(file).__name__} gives text; open the file in binary mode: open(path, 'rb')"
            )

    def list(self) -> Sequence[str]:
        return [self.KEY]

    def size(self, key: str) -> int:
        if key != self.KEY:
            raise StoreError(f"there is no {key!r} in {self.name}", file=key)
        return self._size

    def read(self, key: str, start: int, out: memoryview) -> None:
        if self._closed:
            raise Closed("the checkpoint was closed; open it again to read from it", file=self.name)
        if start < 0 or start + out.nbytes > self.size(key):
            raise Truncated(
                f"wanted bytes {start} to {start + out.nbytes} of {self._size}", offset=self._size
            )
        done = 0
        with self.reading(), self._exclusive():
            self._file.seek(start)
            while done < out.nbytes:
                got = self._some(out[done:])
                if not got:
                    raise Truncated(
                        f"the file object ended {out.nbytes - done} bytes early",
                        offset=start + done,
                    )
                done += got

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._exclusive():
            if not self._readers:
                self._position = self._file.tell()
            self._readers += 1
        try:
            yield
        finally:
            with self._exclusive():
                self._readers -= 1
                if not self._readers:
                    self._file.seek(self._position)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """The file object is this thread's. Its errors are a store's."""
        with self._lock:
            try:
                yield
            except (OSError, ValueError) as error:
                if isinstance(error, HoldfastError):
                    raise
                raise StoreError(f"reading from {self.name} failed: {error}") from error

    def _some(self, out: memoryview) -> int:
        """Read as much as comes at a time, straight to its place where the file object can."""
        into = getattr(self._file, "readinto", None)
        if callable(into):
            try:
                got = into(out)
                return got if isinstance(got, int) else 0
            except NotImplementedError:
                pass  # `io.RawIOBase` has the method for those who write it
        part = self._file.read(out.nbytes)
        if not part:
            return 0  # also None, which a file says that does not wait
        content = memoryview(part).cast("B")
        if content.nbytes > out.nbytes:
            raise StoreError(
                f"the file object was asked for {out.nbytes} bytes and gave {content.nbytes}"
            )
        out[: content.nbytes] = content
        return content.nbytes

    def __reduce__(self) -> tuple[object, ...]:
        raise Unsupported(
            "what is read from a file object cannot be sent to another process; open it there by its path"
        )

    def close(self) -> None:
        """Forget the file object; it belongs to the caller, who closes it."""
        self._closed = True
