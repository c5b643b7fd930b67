"""One writer a run: `.holdfast.lock` in its directory, held (flock) for as long as a Run is open for writing.

The kernel releases a lock when its process dies, so a file that can be locked is a dead run's: it is removed, and a new one made.
It says who holds it, for the message that a second run gets. A reader never needs it.

Where the directory was renamed away, and perhaps made anew by another run, the path leads to no lock or to another's:
`RunLock.check` compares, before each save, publication and deletion.

A fork closes what it inherits (stores/files.py), so that it does not hold the lock of a parent that died. Where a file system has
no locks, the file alone counts: a process of this machine that is alive is believed, one of another machine is not.
"""

from __future__ import annotations

import errno
import os
import platform
import sys
import time
from contextlib import suppress

import msgspec

from holdfast.core.documents import DocumentType, read_document, write_document
from holdfast.engine.commit.target import not_committed_on_error
from holdfast.engine.commit.temporaries import NO_LOCKS_ERRNOS, LockedEntry, try_lock
from holdfast.errors import FormatError, LimitExceeded, NotCommitted
from holdfast.stores.files import Files, read_all, write_all

LOCK = ".holdfast.lock"
MOST_NBYTES = 4096

ATTEMPTS = 100
"""How often a file is made again because another run removed it, or was as quick."""

CANNOT_LOCK = NO_LOCKS_ERRNOS | {errno.EBADF}
"""EBADF: NFS refuses so to lock a file that is open for reading alone."""


class Holder(msgspec.Struct, frozen=True):
    pid: int
    host: str
    since: float

    @property
    def is_local(self) -> bool:
        """Whether the process is one of this machine."""
        return self.host == platform.node()

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {when}"


DOCUMENT = DocumentType(
    name="lock", file=LOCK, decoder=msgspec.json.Decoder(Holder), max_nbytes=MOST_NBYTES
)


class RunLock:
    """The lock, held. `close` gives it back."""

    def __init__(self, kept: LockedEntry) -> None:
        self._kept: LockedEntry | None = kept

    @classmethod
    def take(cls, files: Files, path: str) -> RunLock:
        """Take the lock of the run in this directory. Raises `NotCommitted` with the holder where another one lives."""
        with not_committed_on_error("taking the run's lock", path):
            at = files.open_directory(path)
            try:
                for _ in range(ATTEMPTS):
                    kept = _make(files, at) if _is_free(files, at, path) else None
                    if kept is not None:
                        return cls(kept)
                raise OSError(errno.EAGAIN, "other runs take it as quickly")
            except BaseException:
                with suppress(OSError):
                    files.close(at)
                raise

    def check(self, path: str, *, at: int | None) -> None:
        """Raise `NotCommitted` where the lock in this open directory (None: there is none) is not the one that is held."""
        if self._kept is None:
            return
        found = None if at is None else self._kept.files.stat(LOCK, dir_fd=at)
        if found is None or found.identity != self._kept.identity:
            holder = None if at is None else who_writes(self._kept.files, at=at)
            state = (
                f"this run's {LOCK} is gone"
                if found is None
                else f"another run has this directory now ({holder or 'nobody knows whose'})"
            )
            why = "the directory that it was opened in was renamed or removed, or the lock was"
            todo = "nothing was changed here; make a new Run, in a directory that no other run writes into"
            number = errno.ENOENT if found is None else errno.EBUSY
            raise NotCommitted(f"{state}: {why}; {todo}", file=path, errno=number)

    def close(self) -> None:
        """Release the lock. In a fork it was not ours, and is the parent's still."""
        kept, self._kept = self._kept, None
        if kept is not None:
            with suppress(OSError):
                if kept.is_in_place():
                    kept.files.unlink(LOCK, dir_fd=kept.dir_fd)
            with suppress(OSError):
                kept.close()
            with suppress(OSError):
                kept.files.close(kept.dir_fd)


def _is_free(files: Files, at: int, path: str) -> bool:
    """Whether there is no lock file now; that of a dead run is removed. Raises where the holder lives."""
    try:
        descriptor = files.open(LOCK, dir_fd=at)
    except FileNotFoundError:
        return True
    try:
        kept = LockedEntry(files, LOCK, dir_fd=at, descriptor=descriptor)
        try:
            alone = files.lock(descriptor)
        except OSError as error:
            if error.errno not in CANNOT_LOCK:
                raise
            alone = not _alive(who_writes(files, at=at))
        if not alone:
            raise _refused(who_writes(files, at=at), path)
        if kept.is_in_place():
            files.unlink(LOCK, dir_fd=at)
        return True
    finally:
        with suppress(OSError):
            files.close(descriptor)


def _make(files: Files, at: int) -> LockedEntry | None:
    """Make the lock file and lock it; None where another run was faster."""
    try:
        descriptor = files.create(LOCK, dir_fd=at)
    except FileExistsError:
        return None
    kept = None
    try:
        if not try_lock(files, descriptor):
            return None
        found = LockedEntry(files, LOCK, dir_fd=at, descriptor=descriptor)
        if found.is_in_place():
            text = write_document(DOCUMENT, Holder(os.getpid(), platform.node(), time.time()))
            write_all(files, descriptor, text, offset=0)
            kept = found
        return kept
    finally:
        if kept is None:
            with suppress(OSError):
                files.close(descriptor)


def seen_writing(files: Files, *, at: int) -> Holder | None:
    """Who has the run open, as far as can be told without touching the lock; None where it is a dead process of this machine."""
    holder = who_writes(files, at=at)
    return None if holder is not None and holder.is_local and not _alive(holder) else holder


def who_writes(files: Files, *, at: int) -> Holder | None:
    """The holder that the lock file names; None where there is none."""
    try:
        raw = read_all(files, LOCK, files.stat(LOCK, dir_fd=at), dir_fd=at, max_nbytes=MOST_NBYTES)
        return None if raw is None else read_document(DOCUMENT, raw)
    except (OSError, FormatError, LimitExceeded):
        return None


def _alive(holder: Holder | None) -> bool:
    """Whether a process of this machine is there. Of another machine nobody knows, and a run must be able to go on elsewhere."""
    if holder is None or not holder.is_local or holder.pid <= 0:
        return False
    if sys.platform == "win32":
        return True  # where a signal of 0 would end it
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # It exists, and belongs to somebody else.
    return True


def _refused(holder: Holder | None, path: str) -> NotCommitted:
    if holder is not None and holder.is_local and holder.pid == os.getpid():
        message = (
            "this process has another Run open in this directory; close that one, or go on with it"
        )
    else:
        who = "another process" if holder is None else str(holder)
        message = f"another run writes into this directory: {who}; wait for it, or give this run a directory of its own"
    return NotCommitted(message, file=path, errno=errno.EBUSY)
