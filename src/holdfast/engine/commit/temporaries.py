"""The hidden names that a save uses beside its target, whose they are, and what becomes of those that a dead process left.

    .model.pt.0123456789abcdef.tmp     a file or directory that is being written; after an exchange, the directory that it replaced
    .step-100.0123456789abcdef.old     a directory that was moved aside, on file systems that cannot exchange two names

**Whose.** Every live transaction holds flock(2) on its temporary, which the kernel drops with the process. So what can be locked
belongs to nobody, and `remove_abandoned` removes exactly that. `claim` closes the gap between
creating and locking. Where a file system has no locks, nothing is cleaned.

**How often.** To look for them means to list the folder. The first save of a file by a process in a folder does, and then again
after as many saves as a 64th of what lay there: so a save costs the same beside ten files and beside a hundred thousand. What may
not replace anything, and what replaces a directory, always looks.

**Recovery.** A target that does not exist while exactly one `.old` of it does was caught between two renames (docs/design/004).
`find_recoverable` tells where the checkpoint is, for `open`; `repair`, at the start of the next save, moves it back.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from holdfast.core.runtime import at_fork, make_fork_safe, start_thread
from holdfast.stores.files import FileEntry, Files, is_temporary, system_files
from holdfast.stores.paths import AnyPath, local_path

ATTEMPTS = 100  # How often a temporary is made again because a cleaner took it; once is already a rare accident.
OVERHEAD = len("..0123456789abcdef.tmp")

SAFE_NAME_NBYTES = (
    143  # Of a name, on every file system that we know of: eCryptfs has the shortest.
)

ABANDONED_S = (
    24 * 3600
)  # Age of an unchanged temporary that counts as nobody's where locks may not tell.

NO_LOCKS_ERRNOS = frozenset(
    {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
)
"""What flock(2) answers on a file system without locks (Lustre mounted with `noflock`, some FUSE)."""


LISTED = 64  # Names in a folder that a save may pay for. Up to so many it always looks.
MOST_FOLDERS = 256  # Folders that are remembered.
_listed: dict[
    tuple[int, int], int
] = {}  # By the identity of a folder: how many saves in it come before it is listed again.


def list_folder(files: Files, at: int, *, is_optional: bool) -> Sequence[str] | None:
    """List the folder of a target. None if `is_optional`, and earlier saves listed it not long ago.

    A count that another thread changes meanwhile is one listing more or less.
    """
    identity = files.inspect(at).identity if _listed else None
    if identity is not None and is_optional and _listed.get(identity, 0) > 0:
        _listed[identity] -= 1
        return None
    names = files.list(at)
    if identity is not None:
        _listed.pop(identity, None)
    if len(names) >= LISTED:
        while len(_listed) >= MOST_FOLDERS:
            _listed.pop(next(iter(_listed)), None)
        _listed[files.inspect(at).identity] = len(names) // LISTED
    return names


def make_temporary_name(name: str, *, suffix: str = "tmp", longest: int = 255) -> str:
    """A new hidden name for a target, of at most `longest` bytes."""
    return f".{_stem(name, longest)}.{os.urandom(8).hex()}.{suffix}"


def _stem(name: str, longest: int) -> str:
    """A target's part in its temporaries' names: the name, or where that is too long its start and a digest of all of it.

    >>> _stem("model.pt", 255)
    'model.pt'
    >>> len(_stem("x" * 255, 255))
    233
    """
    room = longest - OVERHEAD
    encoded = name.encode("utf-8", "surrogateescape")
    if len(encoded) <= room:
        return name
    # Without the digest, two long names with one start would take each other's `.old` for their own.
    digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
    start = encoded[: room - len(digest) - 1].decode("utf-8", "ignore")
    return f"{start}~{digest}"


def _ours(name: str, *, suffix: str, longest: int) -> Callable[[str], bool]:
    # A pattern with the name in it would be compiled for every save.
    prefix, rest = f".{_stem(name, longest)}.", re.compile(rf"[0-9a-f]{{16}}\.{suffix}")
    return lambda entry: entry.startswith(prefix) and rest.fullmatch(entry, len(prefix)) is not None


class LockedEntry:
    """A name in a directory, open and locked: ours for as long as the descriptor is."""

    def __init__(self, files: Files, name: str, *, at: int, descriptor: int) -> None:
        self.files = files
        self.name = name
        self.at = at
        self.descriptor = descriptor
        self.found = files.inspect(descriptor)
        self.identity = self.found.identity

    @classmethod
    def open_directory(cls, files: Files, name: str, *, at: int) -> LockedEntry:
        """Open a directory under its name; locking it is the next thing to do."""
        descriptor = files.open_directory(name, dir_fd=at)
        try:
            return cls(files, name, at=at, descriptor=descriptor)
        except BaseException:
            with suppress(OSError):
                files.close(descriptor)
            raise

    def is_in_place(self) -> bool:
        """Whether the name still stands for what is open."""
        found = self.files.stat(self.name, dir_fd=self.at)
        return found is not None and found.identity == self.identity

    def close(self) -> None:
        self.files.close(self.descriptor)


def try_lock(files: Files, descriptor: int) -> bool:
    """Take the lock of something that is ours; where there are no locks nobody cleans, and it is ours without."""
    try:
        return files.lock(descriptor)
    except OSError as error:
        if error.errno in NO_LOCKS_ERRNOS:
            return True
        raise


def claim(
    files: Files, name: str, *, at: int, directory: bool, private: bool, longest: int
) -> LockedEntry:
    """Make a temporary for a target, locked and certainly still there."""
    for _ in range(ATTEMPTS):
        temporary = make_temporary_name(name, longest=longest)
        descriptor = None
        try:
            if directory:
                files.mkdir(temporary, dir_fd=at, private=private)
                # If it is not there any more, a cleaner was faster.
                with suppress(FileNotFoundError):
                    descriptor = files.open_directory(temporary, dir_fd=at)
            else:
                descriptor = files.create(temporary, dir_fd=at, private=private)
            if descriptor is None:
                continue
            if try_lock(files, descriptor):
                claimed = LockedEntry(files, temporary, at=at, descriptor=descriptor)
                if claimed.is_in_place():
                    return claimed
            # A cleaner locked it first, and removes it or has done so already.
            files.close(descriptor)
        except BaseException:
            # Also an interrupt between a call and the next line: the name is ours alone, whatever
            # was done under it.
            with suppress(OSError):
                (files.rmdir if directory else files.unlink)(temporary, dir_fd=at)
            if descriptor is not None:
                with suppress(OSError):
                    files.close(descriptor)
            raise
    raise OSError(
        errno.EAGAIN, f"other processes removed {ATTEMPTS} temporaries while they were made"
    )


def remove_abandoned(
    files: Files, name: str, *, at: int, there: Sequence[str], directories: bool, longest: int
) -> None:
    """Remove the temporaries here that no live process holds, of all that is `there`. What cannot be removed stays.

    Those of this target, and the `.tmp` of every other: a run that was killed at one step goes on with another. An `.old` of
    another target may be the only copy of it. Where other machines may be writing here and locks may not tell, the temporary of
    another target is left until nothing has changed in it for a day.

    Only plain files, and directories that hold nothing but plain files; anything else is not our work. A directory may be the
    old content of an exchange that is not on disk yet, so the parent is synced before one is emptied. Without `directories`, as
    for a save of one file, an `.old` directory stays: a file of this name says nothing about the directory that was set aside.
    """
    with suppress(OSError):
        ours: Callable[[str], bool] | None = None
        for entry in there:
            # Of a hundred thousand names nearly all are done with here.
            if not entry.startswith(".") or not is_temporary(entry):
                continue
            ours = ours or _ours(name, suffix="(tmp|old)", longest=longest)
            own = ours(entry)
            if own or entry.endswith(".tmp"):
                with suppress(OSError):
                    _clean_one(files, entry, name=name, at=at, directories=directories, own=own)


def _clean_one(
    files: Files, entry: str, *, name: str, at: int, directories: bool, own: bool
) -> None:
    found = files.stat(entry, dir_fd=at)
    if found is None or found.kind not in ("file", "directory"):
        return
    # By the file system's own times, too: the clock of this machine may be ahead.
    if (
        not own
        and files.is_shared(at)
        and found.changed_s > min(time.time(), files.inspect(at).changed_s) - ABANDONED_S
    ):
        return
    directory = found.kind == "directory"
    if directory and not directories and not entry.endswith(".tmp"):
        return
    descriptor = (
        files.open_directory(entry, dir_fd=at) if directory else files.open(entry, dir_fd=at)
    )
    try:
        if not files.lock(descriptor):
            return
        kept = LockedEntry(files, entry, at=at, descriptor=descriptor)
        # The owner may have given it its final name between our opening and our locking.
        if not kept.is_in_place():
            return
        if not directory:
            files.unlink(entry, dir_fd=at)
        elif (names := plain_names(files, descriptor)) is not None:
            if entry.endswith(".old") and files.stat(name, dir_fd=at) is None:
                return
            files.sync(at)
            empty(files, kept, names)
    finally:
        with suppress(OSError):
            files.close(descriptor)


def list_unfinished(path: AnyPath) -> list[str]:
    """The folders in which directories for a path are being written; also those of dead processes."""
    files = system_files()
    parent, name = os.path.split(files.resolve(local_path(path).rstrip("/") or "/"))
    at = files.open_directory(parent)
    try:
        ours = _ours(name, suffix="tmp", longest=files.longest_name(at))
        found = [entry for entry in files.list(at) if ours(entry)]
        return [
            os.path.join(parent, entry)
            for entry in found
            if (there := files.stat(entry, dir_fd=at)) and there.kind == "directory"
        ]
    finally:
        files.close(at)


def plain_names(files: Files, descriptor: int) -> list[str] | None:
    """The names in a directory where all of them are plain files, else None."""
    names = list(files.list(descriptor))
    for name in names:
        found = files.stat(name, dir_fd=descriptor)
        if found is not None and found.kind != "file":
            return None
    return names


def empty(
    files: Files,
    directory: LockedEntry,
    names: list[str],
    *,
    sizes: Mapping[str, FileEntry] | None = None,
) -> None:
    """Remove files from a directory, and the directory itself where nothing else is in it. What speaks of other files (indexes)
    goes last: to a reader that comes upon it, half a checkpoint is one with missing files, and not a heap of files that are
    complete. Those whose `sizes` are known are freed behind the caller's back where they are large."""
    at = directory.descriptor
    with freed_in_background(files, sizes or {}, at=at):
        for name in sorted(names, key=lambda name: name.endswith((".json", ".metadata"))):
            with suppress(FileNotFoundError):
                files.unlink(name, dir_fd=at)
        files.rmdir(directory.name, dir_fd=directory.at)


def find_set_aside(
    files: Files, name: str, *, at: int, there: Sequence[str], longest: int
) -> list[str]:
    """The names of directories that were moved aside for a target, of all that is `there`."""
    aside = _ours(name, suffix="old", longest=longest)
    names = [entry for entry in there if aside(entry)]
    found = [(entry, files.stat(entry, dir_fd=at)) for entry in names]
    return [entry for entry, what in found if what is not None and what.kind == "directory"]


def find_recoverable(path: AnyPath) -> str | None:
    """Where the checkpoint is that a crash caught between two renames; None where `path` exists or nothing stands in for it.
    Changes nothing. More than one candidate is nobody's choice to make here: None."""
    files = system_files()
    with suppress(OSError, ValueError):
        parent, name = os.path.split(files.resolve(local_path(path)))
        at = files.open_directory(parent)
        try:
            if name and files.stat(name, dir_fd=at) is None:
                aside = find_set_aside(
                    files, name, at=at, there=files.list(at), longest=files.longest_name(at)
                )
                return os.path.join(parent, aside[0]) if len(aside) == 1 else None
        finally:
            files.close(at)
    return None


def repair(files: Files, name: str, *, at: int, there: Sequence[str], longest: int) -> bool:
    """Move a checkpoint that was caught between two renames back to its name, which nothing has. Whether one was found."""
    aside = find_set_aside(files, name, at=at, there=there, longest=longest)
    if len(aside) != 1:
        return False
    descriptor = files.open_directory(aside[0], dir_fd=at)
    try:
        # A live transaction holds it while it is between its two renames: not ours to repair.
        if try_lock(files, descriptor):
            if not files.rename_new(aside[0], name, dir_fd=at):
                files.rename(aside[0], name, dir_fd=at)
            files.sync(at)
        return True
    finally:
        files.close(descriptor)


LARGE_NBYTES = 16 << 20  # Less is freed in 3 ms, beside which a thread is not worth it.
MOST_HELD = (
    64  # Files that are held open at once. Further ones are freed where they lose their name.
)


@contextmanager
def freed_in_background(
    files: Files, entries: Mapping[str, FileEntry], *, at: int
) -> Iterator[None]:
    """Free large files, which lose their names in the block, on a thread of their own after it.

    When a file loses its last name the kernel frees its pages and blocks inside of the rename or the
    unlink: 0.2 s for a GiB. So a large file is held open while it loses its name, and closed by a
    thread. Nothing that a crash leaves is different. Until then its bytes take room on the disk;
    whoever finds too little room waits for that (`wait_for_room`).

    Args:
        files: The file system.
        entries: The files that lose their names, by these.
        at: The folder of the files.
    """
    held: list[int] = []
    try:
        for name, entry in entries.items():
            if entry.nbytes >= LARGE_NBYTES and len(held) < MOST_HELD:
                # If it cannot be opened, nobody misses it: the name changes all the same.
                with suppress(OSError):
                    descriptor = files.hold(name, dir_fd=at)
                    if descriptor is not None:
                        held.append(descriptor)
        yield
    finally:
        if held:
            _close_in_background(files, held)


def _close_in_background(files: Files, descriptors: list[int]) -> None:
    """Close files on a thread, if one can start. The end of the program does not wait for it."""

    def close() -> None:
        while descriptors:
            with suppress(OSError):  # also in a fork: what was inherited is closed there already
                files.close(descriptors.pop())

    with _lock:
        thread = start_thread(close, name="holdfast-free", daemon=True)
        if thread is not None:
            _freeing[:] = [other for other in _freeing if other.is_alive()]
            _freeing.append(thread)
    if thread is None:
        close()


_lock = make_fork_safe(threading.Lock())
_freeing: list[threading.Thread] = []


def wait_for_room() -> bool:
    """Come back when all that was replaced is freed. False where there was nothing to wait for."""
    with _lock:
        waiting = [thread for thread in _freeing if thread.is_alive()]
    for thread in waiting:
        thread.join()
    return bool(waiting)


at_fork(after_in_child=_freeing.clear)
