"""Files that a save is writing, and the thread that lets the disk begin early.

If a save waited for the disk only in the fsync at the end, the disk would be idle before. So as
soon as a block of the file is complete, the kernel is asked to start writing it to the disk
(`Writeback`). That is only a hint: errors show in the fsync. The writing threads do not send it
themselves, because the call waits while the disk is busy: this gave 0.2 to 0.7 GB/s, a thread of
its own gives 3.3 to 3.9, and no hint at all 2.6 to 2.8.
"""

from __future__ import annotations

import errno
import threading
from contextlib import suppress

from holdfast.core.runtime import make_fork_safe, start_thread
from holdfast.engine.commit.target import explain_failure
from holdfast.engine.commit.temporaries import wait_for_room
from holdfast.errors import NotCommitted
from holdfast.stores.files import Buffer, FileEntry, Files, copy_all, write_all

FULL_DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})

WRITEBACK_NBYTES = 32 << 20
"""How much the disk is asked to write at a time. Asking for less costs more than it gains."""


class Writeback:
    """Asks the disk to write the blocks of a file that are complete, on a thread of its own."""

    def __init__(self, files: Files, descriptor: int) -> None:
        self._files = files
        self._descriptor = descriptor
        self._condition = threading.Condition(make_fork_safe(threading.Lock()))
        self._written_nbytes: dict[int, int] = {}
        """How much of each block was written, by the index of the block."""
        self._complete_blocks: list[int] = []
        """The indices of complete blocks that the disk must still be asked to write."""
        self._thread: threading.Thread | None = None
        self._has_ended = False

    def add_written(self, offset: int, nbytes: int) -> None:
        """Record that a range of the file was written.

        The file is divided into blocks of `WRITEBACK_NBYTES`. Those that the range completes are
        queued for the thread, which starts with the first of them. Bytes that are written twice
        count twice. Then the disk is asked too early for a block, which does no harm.
        """
        stop = offset + nbytes
        with self._condition:
            if self._has_ended:
                return
            # Count the bytes of the range in each block that it touches.
            while offset < stop:
                block_index = offset // WRITEBACK_NBYTES
                range_stop = min((block_index + 1) * WRITEBACK_NBYTES, stop)
                nbytes_before = self._written_nbytes.get(block_index, 0)
                nbytes_now = nbytes_before + range_stop - offset
                self._written_nbytes[block_index] = nbytes_now
                # True only for the range that completes the block, so each block is queued once.
                if nbytes_before < WRITEBACK_NBYTES <= nbytes_now:
                    self._complete_blocks.append(block_index)
                offset = range_stop

            if not self._complete_blocks:
                return
            if self._thread is None:
                self._thread = start_thread(self._run, name="holdfast-writeback", daemon=True)
                # `start_thread` returns None if no thread can start. Then the fsync does all the
                # work.
                self._has_ended = self._thread is None
            self._condition.notify()

    def end(self) -> None:
        """Stop the thread and wait for it. The fsync writes the blocks that are left.

        Call this before closing the descriptor, whose number may belong to another file afterwards.
        """
        with self._condition:
            self._has_ended = True
            self._condition.notify()
        # The thread is forgotten only after the join. If an interrupt stops the join, the next call
        # waits again.
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        """Ask the disk to write complete blocks until `end` is called. The thread runs this."""
        while True:
            with self._condition:
                while not self._complete_blocks and not self._has_ended:
                    self._condition.wait()
                if self._has_ended:
                    return
                block_index = self._complete_blocks.pop(0)
            # The call is made without the lock, because it waits while the disk is busy. If the disk
            # has failed, the fsync reports it.
            with suppress(OSError):
                offset = block_index * WRITEBACK_NBYTES
                self._files.begin_sync(self._descriptor, offset, WRITEBACK_NBYTES)


class NewFile:
    """A file that a save is writing.

    Call `allocate` first. Then any number of threads may call `write` and `copy`. `finish` makes
    the content durable and closes the file. The file is not visible to readers until its
    transaction commits, so every failure is a `NotCommitted`.
    """

    def __init__(self, files: Files, descriptor: int, *, path: str, durable: bool) -> None:
        """Take over an open file.

        Args:
            files: The file system.
            descriptor: The open file.
            path: What error messages call the file.
            durable: Whether `finish` waits until the content would survive a power cut.
        """
        self.descriptor = descriptor
        self.path = path
        self.has_failed = False
        """Whether a call on the file has failed. Then the file must not be published."""
        self.is_complete = False
        """Whether nothing more will be written, so that the file may be finished early."""
        self.is_open = True
        self._files = files
        self._durable = durable
        self._writeback: Writeback | None = None

    def begin_writeback(self) -> None:
        """Let the disk begin with blocks that are written from now on, if the file is durable.

        A file that is not durable has no fsync at its end whose wait this would shorten.
        """
        if self._durable:
            self._writeback = Writeback(self._files, self.descriptor)

    def allocate(self, nbytes: int) -> None:
        """Give the file its size, and reserve its blocks if the file system can.

        So a full disk usually shows here, before anything is written. If replaced files are still
        being freed in the background, this waits for them and tries once more.
        """
        try:
            try:
                self._files.allocate(self.descriptor, nbytes)
            except OSError as error:
                if error.errno not in FULL_DISK_ERRNOS or not wait_for_room():
                    raise
                self._files.allocate(self.descriptor, nbytes)
        except OSError as error:
            raise self._fail(error, f"making room for {nbytes:,} bytes") from error
        if nbytes >= WRITEBACK_NBYTES:
            self.begin_writeback()

    def write(self, offset: int, data: Buffer) -> None:
        """Write all bytes of a buffer at an offset."""
        try:
            write_all(self._files, self.descriptor, data, offset=offset)
        except OSError as error:
            raise self._fail(error, f"writing at byte {offset}") from error
        if self._writeback is not None:
            self._writeback.add_written(offset, memoryview(data).nbytes)

    def copy(self, source: int, nbytes: int, *, source_offset: int, offset: int) -> None:
        """Copy a range from another open file, in the kernel if possible.

        Raises:
            Truncated: The source ends before the range does.
        """
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
            raise self._fail(error, f"copying {nbytes:,} bytes to byte {offset}") from error
        if self._writeback is not None:
            self._writeback.add_written(offset, nbytes)

    def sync(self) -> None:
        """Wait until the content would survive a power cut (fsync).

        A failure is final. The kernel may have dropped the pages, and would report success for a
        second fsync.
        """
        if self._writeback is not None:
            # The fsync writes the blocks that are left, and the file may be closed after it.
            self._writeback.end()
        try:
            self._files.sync(self.descriptor)
        except OSError as error:
            raise self._fail(error, "writing the file to the disk (fsync)") from error

    def finish(self) -> None:
        """Sync the file if it is durable, and close it. Does nothing if it is closed already."""
        if not self.is_open:
            return
        if self._durable:
            self.sync()
        # Set before the call, since a failed close has closed the descriptor nevertheless. Its number
        # may belong to another file afterwards, so it must not be closed twice.
        self.is_open = False
        try:
            self._files.close(self.descriptor)
        except OSError as error:
            raise self._fail(error, "closing the file") from error

    def close_unfinished(self) -> None:
        """Close the file without syncing it. Does nothing if it is closed already.

        Errors of closing it are ignored: a file that is published was synced or finished before,
        and any other file is removed.
        """
        if not self.is_open:
            return
        if self._writeback is not None:
            # The thread must not use the number of a descriptor that is closed.
            self._writeback.end()
        self.is_open = False
        with suppress(OSError):
            self._files.close(self.descriptor)

    def _fail(self, error: OSError, action: str) -> NotCommitted:
        """Record that a call has failed, and return the error for it."""
        self.has_failed = True
        return explain_failure(error, action, self.path)


NO_LINKS_ERRNOS = frozenset({errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""Errors of link(2) on file systems without hard links."""

CANNOT_LINK_ERRNOS = NO_LINKS_ERRNOS | {errno.EXDEV, errno.EMLINK, errno.EACCES, errno.EINVAL}
"""Errors of link(2) for a file that cannot get a second name here, although others can: it is on
another mount, has 65,000 names, or belongs to another user (`protected_hardlinks`)."""

BASE_CHANGED = "the base changed during the save, and no longer has this file; save again"


def link_or_copy_file(
    files: Files,
    key: str,
    nbytes: int,
    *,
    source_dir_fd: int,
    dir_fd: int,
    path: str,
    durable: bool,
) -> tuple[NewFile, bool]:
    """Put a finished file of a base checkpoint into a new folder, under the same name.

    A hard link costs nothing, and each of the two folders stays complete if the other one is
    removed. If the system refuses a link, the bytes are copied in the kernel.

    A call that fails may leave a file of this name in the new folder. The caller removes it, as a
    transaction does when it removes its whole hidden folder.

    Args:
        files: The file system.
        key: The name of the file.
        nbytes: The size that it must have.
        source_dir_fd: The folder of the base.
        dir_fd: The new folder.
        path: What error messages call the file.
        durable: Whether to sync the file when it is finished.

    Returns:
        The open file, and whether it is linked and not copied.

    Raises:
        NotCommitted: The base does not have this file any more, or another file has its name.
        OSError: The file system failed in another way.
    """
    expected = files.stat(key, dir_fd=source_dir_fd)
    if expected is None or expected.kind != "file" or expected.nbytes != nbytes:
        raise NotCommitted(BASE_CHANGED, file=path, errno=errno.ESTALE)
    try:
        files.link(key, key, dir_fd=dir_fd, source_dir_fd=source_dir_fd)
    except OSError as error:
        if error.errno not in CANNOT_LINK_ERRNOS:
            raise
        is_linked = False
        descriptor = files.create(key, dir_fd=dir_fd)
    else:
        is_linked = True
        descriptor = files.open(key, dir_fd=dir_fd)

    new_file = NewFile(files, descriptor, path=path, durable=durable)
    try:
        if is_linked:
            _check_identity(files, descriptor, expected, path)
        else:
            source = files.open(key, dir_fd=source_dir_fd)
            try:
                _check_identity(files, source, expected, path)
                new_file.copy(source, nbytes, source_offset=0, offset=0)
            finally:
                files.close(source)
    except BaseException:
        new_file.close_unfinished()
        raise
    return new_file, is_linked


def _check_identity(files: Files, descriptor: int, expected: FileEntry, path: str) -> None:
    """Raise `NotCommitted` if an open file is not the one that the base had.

    Another save may have replaced the base after its file was looked up by name, and before that
    name was linked or opened. The new file can have the same size.
    """
    if files.inspect(descriptor).identity != expected.identity:
        raise NotCommitted(BASE_CHANGED, file=path, errno=errno.ESTALE)
