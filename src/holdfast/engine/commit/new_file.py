"""`NewFile`: a file that is being written and that nobody sees before the commit."""

from __future__ import annotations

from contextlib import suppress

from holdfast.engine.commit.target import not_committed
from holdfast.errors import NotCommitted
from holdfast.stores.files import Buffer, Files, copy_all, write_all

__all__ = ["NewFile"]


class NewFile:
    """A file of a save. `allocate` first, then `write` and `copy` from any number of threads."""

    def __init__(self, files: Files, descriptor: int, *, path: str) -> None:
        self.descriptor = descriptor
        """Open for reading and writing."""
        self.path = path
        """What errors call it."""
        self.failed = False
        """Whether a call on it failed; it is then never published."""
        self.complete = False
        """Whether nothing more will be written to it, so that it may be finished when others need its descriptor."""
        self._files = files
        self._open = True

    def allocate(self, nbytes: int) -> None:
        """Give the file its length and, where the file system can promise them, its blocks: a full disk shows here, not later."""
        try:
            self._files.allocate(self.descriptor, nbytes)
        except OSError as error:
            raise self._refused(error, f"making room for {nbytes:,} bytes") from error

    def write(self, offset: int, data: Buffer) -> None:
        """Write all of a buffer at an offset."""
        try:
            write_all(self._files, self.descriptor, data, offset=offset)
        except OSError as error:
            raise self._refused(error, f"writing at byte {offset}") from error

    def copy(self, source: int, nbytes: int, *, source_offset: int, offset: int) -> None:
        """Copy a range from another open file, inside the kernel where it can. `Truncated` where the source ends too early."""
        try:
            copy_all(self._files, source, self.descriptor, nbytes, source_offset=source_offset, offset=offset)
        except OSError as error:
            raise self._refused(error, f"copying {nbytes:,} bytes to byte {offset}") from error

    def sync(self) -> None:
        """fsync. One failure is final: the pages may be gone, and a second fsync would say that all is well."""
        try:
            self._files.sync(self.descriptor)
        except OSError as error:
            raise self._refused(error, "writing the file to the disk (fsync)") from error

    def finish(self, *, durable: bool) -> None:
        """Sync and close, once; nothing can be written afterwards."""
        if not self._open:
            return
        if durable:
            self.sync()
        self._open = False
        try:
            self._files.close(self.descriptor)
        except OSError as error:
            raise self._refused(error, "closing the file") from error

    def give_up(self) -> None:
        """Close, whatever comes of it."""
        if self._open:
            self._open = False
            with suppress(OSError):
                self._files.close(self.descriptor)

    def _refused(self, error: OSError, doing: str) -> NotCommitted:
        self.failed = True
        return not_committed(error, doing, self.path)
