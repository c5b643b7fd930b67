"""Stores for bytes in the memory of this process, and for seekable file objects."""

from __future__ import annotations

import io
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np

from holdfast.core.protocols import ReadProfile, Store
from holdfast.core.runtime import make_fork_safe
from holdfast.errors import Closed, HoldfastError, StoreError, Truncated, Unsupported

LARGE_COPY_NBYTES = 64 << 10
"""From this size on, a copy releases the interpreter lock, so that other threads need not wait."""


class MemoryStore(Store):
    """A store whose bytes are in memory already."""

    read_profile = ReadProfile(is_in_memory=True)

    def __init__(
        self, content: Mapping[str, bytes | bytearray | memoryview], *, name: str = "<memory>"
    ) -> None:
        """Make a store of files in memory. Their bytes are not copied.

        Args:
            content: The content of each file, by its key.
            name: The name for messages.
        """
        self.name = name
        self._content = {key: memoryview(value).cast("B") for key, value in content.items()}
        self._is_closed = False
        self._owners: list[object] = []

    @classmethod
    def from_view(cls, key: str, content: memoryview, *, name: str) -> MemoryStore:
        """Make a store of one file, whose memory is not copied."""
        store = cls({}, name=name)
        store._content[key] = content
        return store

    def add(self, key: str, content: memoryview, *, owner: object = None) -> None:
        """Add a file. The store keeps `owner` alive, which may own the memory."""
        self._content[key] = content
        self._owners.append(owner)

    def list(self) -> Sequence[str]:
        return sorted(self._content)

    def size(self, key: str) -> int:
        return self._get_content(key).nbytes

    def read(self, key: str, start: int, out: memoryview) -> None:
        """Copy the bytes of a file from the offset `start` on into `out`."""
        content = self._get_content(key)
        stop = start + out.nbytes
        if start < 0 or stop > content.nbytes:
            message = f"cannot read bytes {start} to {stop} of a file of {content.nbytes} bytes"
            raise Truncated(message, file=key, offset=content.nbytes)
        if out.nbytes < LARGE_COPY_NBYTES:
            out[:] = content[start:stop]
        else:
            # numpy releases the interpreter lock during a copy, a memoryview does not.
            np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(content[start:stop], np.uint8))

    def map(self, key: str) -> memoryview | None:
        return self._get_content(key)

    def identity(self, key: str = "") -> Hashable:
        """Return the address of a file, which is equal in two stores that share the memory."""
        content = self._get_content(key) if key else None
        # An empty file has no address. The whole store has several files.
        if not content:
            return super().identity(key)
        address = np.frombuffer(content, np.uint8).__array_interface__["data"][0]
        return "memory", address, content.nbytes

    def close(self) -> None:
        self._is_closed = True

    def __reduce__(self) -> tuple[object, ...]:
        raise Unsupported(
            "the memory of this process cannot be read lazily in another process; "
            "save the checkpoint and send the path"
        )

    def _get_content(self, key: str) -> memoryview:
        if self._is_closed:
            raise Closed("the checkpoint was closed; open it again to read from it", file=self.name)
        if key not in self._content:
            raise StoreError(f"there is no {key!r} in {self.name}", file=key)
        return self._content[key]


class FileObjectStore(Store):
    """A seekable binary file object, under one key.

    The store calls `tell`, `seek(offset)` and `seek(0, SEEK_END)`, and `read(n)` or `readinto`. A
    read may return fewer bytes than requested; none at all means the end.

    It uses only the positions that `tell` returns, and ignores the result of `seek`: an object that
    shows a part of another file may return the position in that file, and `mmap.mmap` returns None
    before Python 3.13.

    A tensor is read in order and at once, because members of a zip and decompressors can only go
    back by starting again. After a read, or a block of reads (`reading`), the store restores the
    position of the file object.
    """

    read_profile = ReadProfile(is_sequential=True)
    KEY = "file"

    def __init__(self, file: BinaryIO) -> None:
        """Take a file object of the caller: measure its size, and leave its position as it is.

        Raises:
            StoreError: The file object is closed, or not seekable, or returns text.
        """
        self.name = "<file object>"
        self._file = file
        self._lock = make_fork_safe(threading.Lock())
        self._is_closed = False
        self._reader_count = 0
        """How many blocks of `reading` are running, in all threads."""
        self._caller_position = 0
        """The position to restore when the last of these blocks ends."""
        try:
            position = file.tell()
            file.seek(0, io.SEEK_END)
            self._nbytes = file.tell()
            file.seek(position)
            # Even an empty result of a text file is a str.
            is_text = isinstance(file.read(0), str)
        except (OSError, AttributeError, ValueError, TypeError) as error:
            raise StoreError(f"a file object must be open, binary and seekable: {error}") from None
        if is_text:
            raise StoreError(
                f"this {type(file).__name__} returns text; open the file in binary mode: "
                "open(path, 'rb')"
            )

    def list(self) -> Sequence[str]:
        return [self.KEY]

    def size(self, key: str) -> int:
        if key != self.KEY:
            raise StoreError(f"there is no {key!r} in {self.name}", file=key)
        return self._nbytes

    def read(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of the file object from the offset `start` on.

        Raises:
            Truncated: The file object ends too early.
            StoreError: The file object is closed, or its methods raise an error.
        """
        if self._is_closed:
            raise Closed("the checkpoint was closed; open it again to read from it", file=self.name)
        stop = start + out.nbytes
        if start < 0 or stop > self.size(key):
            message = f"cannot read bytes {start} to {stop} of a file of {self._nbytes} bytes"
            raise Truncated(message, offset=self._nbytes)
        filled_nbytes = 0
        # `reading` restores the position of the file object at the end of the block.
        with self.reading(), self._locked_file():
            self._file.seek(start)
            while filled_nbytes < out.nbytes:
                block_nbytes = self._read_some(out[filled_nbytes:])
                if block_nbytes == 0:
                    raise Truncated(
                        f"the file object ended {out.nbytes - filled_nbytes} bytes early",
                        offset=start + filled_nbytes,
                    )
                filled_nbytes += block_nbytes

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Restore the position of the file object when the last of the running blocks ends."""
        with self._locked_file():
            if not self._reader_count:
                self._caller_position = self._file.tell()
            self._reader_count += 1
        try:
            yield
        finally:
            with self._locked_file():
                self._reader_count -= 1
                if not self._reader_count:
                    self._file.seek(self._caller_position)

    @contextmanager
    def _locked_file(self) -> Iterator[None]:
        """Let only this thread use the file object, and turn its errors into `StoreError`."""
        with self._lock:
            try:
                yield
            except HoldfastError:
                raise
            except (OSError, ValueError) as error:
                raise StoreError(f"reading from {self.name} failed: {error}") from error

    def _read_some(self, out: memoryview) -> int:
        """Read from the current position, directly into `out` if the file object supports that.

        Returns:
            The number of bytes, which may be less than `out` can hold; 0 at the end.

        Raises:
            StoreError: The file object has no bytes yet, or reports more bytes than requested.
        """
        readinto = getattr(self._file, "readinto", None)
        if callable(readinto):
            try:
                return _check_read_count(readinto(out), out.nbytes)
            except NotImplementedError:
                # Subclasses of `io.RawIOBase` inherit a `readinto` that only raises this. They are
                # read with `read`, as file objects without `readinto`.
                pass

        data = self._file.read(out.nbytes)
        returned_nbytes = None if data is None else memoryview(data).nbytes
        count = _check_read_count(returned_nbytes, out.nbytes)
        # The elements of a buffer may be longer than a byte.
        out[:count] = memoryview(data).cast("B")
        return count

    def __reduce__(self) -> tuple[object, ...]:
        raise Unsupported(
            "a file object cannot be sent to another process; open the file there by its path"
        )

    def close(self) -> None:
        """Stop using the file object. The caller owns it and closes it."""
        self._is_closed = True


def _check_read_count(count: int | None, max_nbytes: int) -> int:
    """Return how many bytes a file object has read, or raise an error if that is impossible.

    Args:
        count: What `readinto` of the file object returned, or the size of what `read` returned.
        max_nbytes: How many bytes were requested.

    Raises:
        StoreError: The file object has no bytes yet, or reports more bytes than requested.
    """
    # A non-blocking file returns None if it has no bytes yet. This is not the end of the file.
    if count is None:
        raise StoreError(
            "the file object is in non-blocking mode and has no bytes yet; open it in blocking mode"
        )
    if not 0 <= count <= max_nbytes:
        raise StoreError(f"the file object returned {count} bytes for a read of {max_nbytes}")
    return count
