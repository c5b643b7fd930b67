"""`NewFile`: a file that is being written, and the thread that has the disk begin with it meanwhile.

The disk is told to begin as soon as a stretch of the file is complete (`Writeback`), so that a save does not wait for it at the
end. That is a hint: what goes wrong shows in the fsync. The writers themselves never tell the disk, because the call waits where
the disk is busy: that gave 0.2 to 0.7 GB/s where a thread of its own gives 3.3 to 3.9, and no hint 2.6 to 2.8.
"""

from __future__ import annotations

import errno
import threading
from contextlib import suppress

from holdfast.core.runtime import make_fork_safe, start_thread
from holdfast.engine.commit.target import explain_failure
from holdfast.engine.commit.temporaries import wait_for_room
from holdfast.errors import NotCommitted
from holdfast.stores.files import Buffer, Files, copy_all, write_all

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

STRETCH_NBYTES = (
    32 << 20
)  # The disk is told of so much at a time: a request for less would cost more than it gains.


class Writeback:
    def __init__(self, files: Files, descriptor: int) -> None:
        self._files, self._descriptor = files, descriptor
        self._turn = threading.Condition(make_fork_safe(threading.Lock()))
        self._written: dict[
            int, int
        ] = {}  # Bytes of each stretch, by its number, as far as they are written.
        self._complete: list[int] = []  # Stretches that the disk is to be told of.
        self._thread: threading.Thread | None = None
        self._over = False

    def wrote(self, offset: int, nbytes: int) -> None:
        """Bytes that were written. What is written a second time counts twice: the disk may be told early, and of it again."""
        stop = offset + nbytes
        with self._turn:
            if self._over:
                return
            while offset < stop:
                number = offset // STRETCH_NBYTES
                end = min((number + 1) * STRETCH_NBYTES, stop)
                before = self._written.get(number, 0)
                self._written[number] = before + end - offset
                if before < STRETCH_NBYTES <= self._written[number]:
                    self._complete.append(number)
                offset = end
            if not self._complete:
                return
            if self._thread is None:
                self._thread = start_thread(self._tell, name="holdfast-writeback", daemon=True)
                # Where no thread can start nobody tells the disk, and the fsync does it all.
                self._over = self._thread is None
            self._turn.notify()

    def end(self) -> None:
        """Come back when no thread touches the descriptor any more. What the disk was not told of is left to the fsync.

        Called before the descriptor is closed, since its number may be another file's afterwards.
        """
        with self._turn:
            self._over = True
            self._turn.notify()
        # Kept until it is over: whoever is interrupted here comes again before the file is closed.
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _tell(self) -> None:
        while True:
            with self._turn:
                while not self._complete and not self._over:
                    self._turn.wait()
                if self._over:
                    return
                number = self._complete.pop(0)
            with suppress(OSError):  # the fsync reports it
                self._files.begin_sync(self._descriptor, number * STRETCH_NBYTES, STRETCH_NBYTES)


class NewFile:
    """A file of a save. `allocate` first, then `write` and `copy` from any number of threads."""

    def __init__(self, files: Files, descriptor: int, *, path: str, durable: bool = False) -> None:
        self.descriptor = descriptor
        self.path = path
        self.failed = False  # Whether a call on it failed; it is then never published.
        self.complete = False
        """Whether nothing more will be written to it, so that it may be finished when others need its descriptor."""
        self._files = files
        self.is_open = True
        self._is_durable = durable
        self._writeback: Writeback | None = None
        """In a long file that will be synced: the disk then begins while the rest is summed, hashed and written."""

    def begin_writeback(self) -> None:
        """Tell the disk of what is written from now on, before any thread writes."""
        if self._is_durable:
            self._writeback = Writeback(self._files, self.descriptor)

    def allocate(self, nbytes: int) -> None:
        """Give the file its length and, where the file system can promise them, its blocks: a full disk shows here, not later."""
        try:
            try:
                self._files.allocate(self.descriptor, nbytes)
            except OSError as error:
                if error.errno not in FULL or not wait_for_room():
                    raise
                self._files.allocate(self.descriptor, nbytes)
        except OSError as error:
            raise self._refused(error, f"making room for {nbytes:,} bytes") from error
        if nbytes >= STRETCH_NBYTES:
            self.begin_writeback()

    def write(self, offset: int, data: Buffer) -> None:
        try:
            write_all(self._files, self.descriptor, data, offset=offset)
        except OSError as error:
            raise self._refused(error, f"writing at byte {offset}") from error
        if self._writeback is not None:
            self._writeback.wrote(offset, memoryview(data).nbytes)

    def copy(self, source: int, nbytes: int, *, source_offset: int, offset: int) -> None:
        """Copy a range from another open file, inside the kernel where it can. `Truncated` where the source ends too early."""
        try:
            copy_all(
                self._files,
                source,
                self.descriptor,
                nbytes=nbytes,
                source_offset=source_offset,
                offset=offset,
            )
        except OSError as error:
            raise self._refused(error, f"copying {nbytes:,} bytes to byte {offset}") from error
        if self._writeback is not None:
            self._writeback.wrote(offset, nbytes)

    def sync(self) -> None:
        """fsync. One failure is final: the pages may be gone, and a second fsync would say that all is well."""
        if self._writeback is not None:
            self._writeback.end()
        try:
            self._files.sync(self.descriptor)
        except OSError as error:
            raise self._refused(error, "writing the file to the disk (fsync)") from error

    def finish(self, *, durable: bool) -> None:
        """Sync and close, once; nothing can be written afterwards."""
        if not self.is_open:
            return
        if durable:
            self.sync()
        self.is_open = False
        try:
            self._files.close(self.descriptor)
        except OSError as error:
            raise self._refused(error, "closing the file") from error

    def give_up(self) -> None:
        """Close, whatever comes of it."""
        if self.is_open:
            if self._writeback is not None:
                self._writeback.end()
            self.is_open = False
            with suppress(OSError):
                self._files.close(self.descriptor)

    def _refused(self, error: OSError, doing: str) -> NotCommitted:
        self.failed = True
        return explain_failure(error, doing, self.path)


NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What link(2) answers on a file system without hard links."""

CANNOT_LINK = NO_LINKS | {errno.EXDEV, errno.EMLINK, errno.EACCES, errno.EINVAL}
"""And where this file can have no second name here: another mount, too many names, protected_hardlinks."""

CHANGED = "the base changed while it was read: this is not the file that it had; save again"


def linked_or_copied(
    files: Files, key: str, nbytes: int, *, source_at: int, at: int, label: str
) -> tuple[NewFile, bool]:
    """The file in `source_at`, which has this length, under the same name in `at`; and whether it is the same file or a copy.

    A hard link costs nothing, and removing either directory leaves the other whole. Where the system refuses one (another mount,
    65,000 names already, a file of somebody else's), the bytes are copied inside the kernel, which shares the blocks where it can.

    Raises `NotCommitted` where it is not there any more, or not as it was, and `OSError`.
    """
    found = files.stat(key, dir_fd=source_at)
    if found is None or found.kind != "file" or found.nbytes != nbytes:
        raise NotCommitted(CHANGED, file=label, errno=errno.ESTALE)
    try:
        files.link(key, key, dir_fd=at, source_dir_fd=source_at)
    except OSError as error:
        if error.errno not in CANNOT_LINK:
            raise
        return _copied(files, key, nbytes, source_at=source_at, at=at, label=label), False
    taken = NewFile(files, files.open(key, dir_fd=at), path=label)
    try:
        if files.inspect(taken.descriptor).identity != found.identity:
            raise NotCommitted(CHANGED, file=label, errno=errno.ESTALE)
    except BaseException:
        taken.give_up()
        raise
    return taken, True


def _copied(files: Files, key: str, nbytes: int, *, source_at: int, at: int, label: str) -> NewFile:
    made = NewFile(files, files.create(key, dir_fd=at), path=label)
    try:
        source = files.open(key, dir_fd=source_at)
        try:
            made.copy(source, nbytes, source_offset=0, offset=0)
        finally:
            files.close(source)
    except BaseException:
        made.give_up()
        raise
    return made
