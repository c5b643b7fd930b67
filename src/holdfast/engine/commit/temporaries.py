"""The hidden files and folders that a save uses beside its target.

    .model.pt.0123456789abcdef.tmp    A temporary: a file or folder that a save is writing. After
                                      an exchange of names, the folder that was replaced.
    .step-100.0123456789abcdef.old    A folder set aside: the old checkpoint, on file systems that
                                      cannot exchange two names. For a moment it is the only one.

**Who owns a temporary.** Every save holds a lock (flock) on its temporary until it ends. The kernel
releases the lock if the process dies. So whatever can be locked is abandoned, and
`remove_abandoned` removes exactly that. A cleaner can also lock a new temporary before its owner
does: `create_temporary` notices this and creates another one. On file systems without locks nothing
is cleaned.

**How often a folder is cleaned.** Cleaning lists the folder. In a large folder, the saves of single
files do that only now and then: after a listing of n names, the next n / 64 saves skip it. So a
save costs about the same beside ten files and beside a hundred thousand. Saves that replace a
folder, or that must not replace anything, always list it.

**Recovery.** If a target does not exist and exactly one folder was set aside for it, a crash
stopped a save between two renames (docs/design/004). `find_recoverable` finds this folder for
readers, and `restore_set_aside` gives it its name back when the next save begins.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from holdfast.core.runtime import at_fork, make_fork_safe, start_thread
from holdfast.core.value import Value
from holdfast.stores.files import FileEntry, Files, is_temporary, system_files
from holdfast.stores.paths import AnyPath, local_path

MAX_ATTEMPTS = 100
"""How often a save creates a new temporary because a cleaner removed it. Even once is rare."""

RANDOM_LENGTH = len("0123456789abcdef.tmp")
"""The length of the end of a hidden name: a random number and the suffix `tmp` or `old`."""

OVERHEAD_NBYTES = len("..") + RANDOM_LENGTH
"""How much longer the name of a temporary is than the name of its target."""

SAFE_NAME_NBYTES = 143
"""The length of a name that every known file system allows. eCryptfs has the lowest limit."""

MIN_ABANDONED_AGE_S = 24 * 3600
"""How long a temporary must be unchanged to count as abandoned where locks may not work."""

NO_LOCKS_ERRNOS = frozenset(
    {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
)
"""Errors of flock(2) on file systems without locks: Lustre mounted with `noflock`, some FUSE."""

MIN_LARGE_FOLDER = 64
"""The number of names from which on a folder is not listed by every save."""

MAX_LARGE_FOLDERS = 256
"""How many large folders a process remembers."""

_saves_until_listing: dict[tuple[int, int], int] = {}
"""How many more saves into a large folder need not list it. The key is the folder's identity.

Threads change it without a lock: a lost update means one listing more or less.
"""


class TargetLocation(Value, frozen=True):
    """The name of a target in its open parent folder."""

    files: Files
    name: str
    dir_fd: int
    """The descriptor of the parent folder."""
    max_name_nbytes: int
    """How long a name may be in this folder. It may be less than the file system allows, as long as
    it is enough for the temporaries of this target."""

    def is_temporary_name(self, name: str) -> bool:
        """Return whether a save of this target gives a name of this form to a hidden entry.

        The entry is a temporary (`.tmp`) or a folder that was set aside (`.old`).
        """
        # `RANDOM_LENGTH` covers the random number and the suffix.
        prefix = f".{shorten_name(self.name, self.max_name_nbytes)}."
        return is_temporary(name) and name[:-RANDOM_LENGTH] == prefix


def list_folder(files: Files, dir_fd: int, *, is_optional: bool) -> Sequence[str] | None:
    """List the parent folder of a target, unless it is large and was listed not long ago.

    Args:
        files: The file system.
        dir_fd: The descriptor of the folder.
        is_optional: Whether the save can do without the list.

    Returns:
        The names. None if the list is optional and was skipped.
    """
    identity = files.inspect(dir_fd).identity
    saves_left = _saves_until_listing.pop(identity, 0)
    if is_optional and saves_left > 0:
        _saves_until_listing[identity] = saves_left - 1
        return None

    names = files.list(dir_fd)
    if len(names) >= MIN_LARGE_FOLDER:
        # The folders that were listed longest ago are forgotten. Another thread may have removed an
        # entry meanwhile, hence the default of `pop`.
        while len(_saves_until_listing) >= MAX_LARGE_FOLDERS:
            _saves_until_listing.pop(next(iter(_saves_until_listing)), None)
        # The more names there are, the more saves share the time of one listing.
        _saves_until_listing[identity] = len(names) // MIN_LARGE_FOLDER
    return names


def make_temporary_name(name: str, *, suffix: str = "tmp", max_nbytes: int = 255) -> str:
    """Make up a new hidden name for a target.

    Args:
        name: The name of the target.
        suffix: `tmp` for a temporary, `old` for a folder that is set aside.
        max_nbytes: The length that the hidden name may have.
    """
    return f".{shorten_name(name, max_nbytes)}.{os.urandom(8).hex()}.{suffix}"


def shorten_name(name: str, max_nbytes: int) -> str:
    """Shorten the name of a target so that the names of its temporaries are not too long.

    A long name is cut and gets a hash of the whole name. Without the hash, two targets whose names
    begin alike would take each other's set-aside folders for their own.

    >>> shorten_name("model.pt", 255)
    'model.pt'
    >>> len(shorten_name("x" * 255, 255))
    233
    """
    max_stem_nbytes = max_nbytes - OVERHEAD_NBYTES
    encoded = name.encode("utf-8", "surrogateescape")
    if len(encoded) <= max_stem_nbytes:
        return name
    digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
    beginning = encoded[: max_stem_nbytes - len(digest) - 1].decode("utf-8", "ignore")
    return f"{beginning}~{digest}"


class LockedEntry:
    """An open file or folder with the name under which it was opened.

    The caller locks it right after opening it. While the descriptor is open, the lock tells other
    processes that a save is using the entry.
    """

    def __init__(self, files: Files, name: str, *, dir_fd: int, descriptor: int) -> None:
        """Describe an entry that is already open.

        Args:
            files: The file system.
            name: The name of the entry.
            dir_fd: The descriptor of the folder that has this name.
            descriptor: The descriptor of the entry.
        """
        self.files = files
        self.name = name
        self.dir_fd = dir_fd
        self.descriptor = descriptor
        self.metadata = files.inspect(descriptor)
        self.identity = self.metadata.identity

    @classmethod
    def open_directory(cls, files: Files, name: str, *, dir_fd: int) -> LockedEntry:
        """Open a folder by its name. The caller must lock it next."""
        descriptor = files.open_directory(name, dir_fd=dir_fd)
        try:
            return cls(files, name, dir_fd=dir_fd, descriptor=descriptor)
        except BaseException:
            with suppress(OSError):
                files.close(descriptor)
            raise

    def is_in_place(self) -> bool:
        """Return whether the name still belongs to the open entry, and not to another one."""
        metadata = self.files.stat(self.name, dir_fd=self.dir_fd)
        return metadata is not None and metadata.identity == self.identity

    def close(self) -> None:
        """Close the descriptor, which releases the lock.

        Errors are ignored, because the descriptor is closed even if the system reports one.
        """
        with suppress(OSError):
            self.files.close(self.descriptor)


def try_lock(files: Files, descriptor: int) -> bool:
    """Lock a file or folder that this process created, and return whether that succeeded.

    On a file system without locks this returns True: nobody cleans there, so no lock is needed.
    """
    try:
        return files.lock(descriptor)
    except OSError as error:
        if error.errno in NO_LOCKS_ERRNOS:
            return True
        raise


def create_temporary(location: TargetLocation, *, is_folder: bool, is_private: bool) -> LockedEntry:
    """Create a temporary for a target and lock it.

    A cleaner of another process may remove a temporary before its owner has locked it. Then this
    creates another one.

    Args:
        location: The target.
        is_folder: Whether to create a folder instead of a file.
        is_private: Whether only this user may access it for now.

    Returns:
        The locked temporary. Its name has been verified after locking.
    """
    for _ in range(MAX_ATTEMPTS):
        name = make_temporary_name(location.name, max_nbytes=location.max_name_nbytes)
        temporary = _create_and_lock(location, name, is_folder=is_folder, is_private=is_private)
        if temporary is not None:
            return temporary
    raise OSError(
        errno.EAGAIN,
        f"other processes removed {MAX_ATTEMPTS} temporaries right after their creation",
    )


def _create_and_lock(
    location: TargetLocation, name: str, *, is_folder: bool, is_private: bool
) -> LockedEntry | None:
    """Create a file or folder with a new random name and lock it.

    A process that dies here leaves an empty temporary, which the next save removes. An error
    removes the temporary.

    Returns:
        The locked temporary. None if a cleaner locked or removed it first.
    """
    files = location.files
    dir_fd = location.dir_fd
    descriptor: int | None = None
    try:
        if is_folder:
            files.mkdir(name, dir_fd=dir_fd, private=is_private)
            # If the folder is missing, a cleaner has removed it already.
            with suppress(FileNotFoundError):
                descriptor = files.open_directory(name, dir_fd=dir_fd)
        else:
            descriptor = files.create(name, dir_fd=dir_fd, private=is_private)

        if descriptor is not None and try_lock(files, descriptor):
            temporary = LockedEntry(files, name, dir_fd=dir_fd, descriptor=descriptor)
            if temporary.is_in_place():
                return temporary
    except BaseException:
        # This includes an interrupt right after a call succeeded. The random name belongs to this
        # save alone, so it can be removed whatever has happened.
        with suppress(OSError):
            if is_folder:
                files.rmdir(name, dir_fd=dir_fd)
            else:
                files.unlink(name, dir_fd=dir_fd)
        if descriptor is not None:
            with suppress(OSError):
                files.close(descriptor)
        raise

    # A cleaner locked the entry first and has removed it or is about to. The descriptor is closed
    # outside of the `try` block, since a failed close must not be repeated: another thread may
    # have got the same number.
    if descriptor is not None:
        files.close(descriptor)
    return None


def remove_abandoned(
    location: TargetLocation, names: Sequence[str], *, include_set_aside: bool
) -> None:
    """Remove the temporaries in a folder that no live process holds.

    This covers the temporaries of all targets in the folder, since a run that was killed at one
    step goes on with another one. Folders that were set aside are removed only for this target: for
    another target such a folder may be the only copy. Entries that cannot be removed stay.

    A crash during this function leaves some of these entries for the next save.

    Args:
        location: The target that is about to be saved.
        names: All names in its parent folder.
        include_set_aside: Whether to remove folders that were set aside for the target. A save of a
            single file leaves them: a file of this name cannot replace such a folder.
    """
    for name in names:
        # The cheap test comes first, because a folder may have a hundred thousand names.
        if not name.startswith(".") or not is_temporary(name):
            continue
        belongs_to_this_target = location.is_temporary_name(name)
        if belongs_to_this_target or name.endswith(".tmp"):
            # What cannot be removed is left to a later save.
            with suppress(OSError):
                _remove_if_abandoned(
                    location,
                    name,
                    belongs_to_this_target=belongs_to_this_target,
                    include_set_aside=include_set_aside,
                )


def _remove_if_abandoned(
    location: TargetLocation, name: str, *, belongs_to_this_target: bool, include_set_aside: bool
) -> None:
    """Remove a temporary, or a folder that was set aside, if no live process holds its lock.

    Args:
        location: The target that is about to be saved.
        name: Its name in the parent folder.
        belongs_to_this_target: Whether it is a temporary of this target and not of another one.
        include_set_aside: Whether to remove it if it is a folder that was set aside: an old
            checkpoint that a save renamed to `.old` before it renamed the new one to the target.
    """
    files = location.files
    dir_fd = location.dir_fd
    metadata = files.stat(name, dir_fd=dir_fd)
    # Links, devices and pipes were not created by a save.
    if metadata is None or metadata.kind not in ("file", "directory"):
        return
    is_folder = metadata.kind == "directory"
    if is_folder and name.endswith(".old") and not include_set_aside:
        return
    if not belongs_to_this_target and _may_be_in_use_elsewhere(location, metadata):
        return

    if is_folder:
        descriptor = files.open_directory(name, dir_fd=dir_fd)
    else:
        descriptor = files.open(name, dir_fd=dir_fd)
    try:
        if not files.lock(descriptor):
            # A live save holds it.
            return
        entry = LockedEntry(files, name, dir_fd=dir_fd, descriptor=descriptor)
        if not entry.is_in_place():
            # Its owner published it after it was opened here and before it was locked.
            return
        if is_folder:
            _remove_abandoned_folder(location, entry)
        else:
            files.unlink(name, dir_fd=dir_fd)
    finally:
        with suppress(OSError):
            files.close(descriptor)


def _remove_abandoned_folder(location: TargetLocation, folder: LockedEntry) -> None:
    """Remove a folder that a dead save left, unless it may be the only copy of a checkpoint.

    Args:
        location: The target that is about to be saved.
        folder: The folder: a temporary of any target, or one that was set aside for this target.
    """
    files = location.files
    file_names = list_regular_files(files, folder.descriptor)
    if file_names is None:
        # No save creates folders or links in its temporary, so this is not what a save left.
        return
    is_set_aside = folder.name.endswith(".old")
    if is_set_aside and files.stat(location.name, dir_fd=location.dir_fd) is None:
        # Without its target, this folder is the only copy of the checkpoint.
        return

    # The folder may be what an exchange replaced. If the exchange is not on the disk yet, a power
    # cut brings the old names back, and with them this folder as the checkpoint.
    files.sync(location.dir_fd)
    remove_folder(folder, file_names)


def _may_be_in_use_elsewhere(location: TargetLocation, metadata: FileEntry) -> bool:
    """Return whether another machine may be writing a temporary, whose lock is invisible here."""
    if not location.files.is_shared(location.dir_fd):
        return False
    # The file system's own time counts as well, because the clock of this machine may be ahead.
    now = min(time.time(), location.files.inspect(location.dir_fd).changed_s)
    return metadata.changed_s > now - MIN_ABANDONED_AGE_S


def list_unfinished(path: AnyPath) -> list[str]:
    """Return the paths of the temporary folders of a target, including those of dead processes.

    A process that takes part in a save finds the folder that another one created for it.
    """
    files = system_files()
    parent, name = os.path.split(files.resolve(local_path(path).rstrip("/") or "/"))
    dir_fd = files.open_directory(parent)
    try:
        location = TargetLocation(files, name, dir_fd, files.longest_name(dir_fd))
        paths: list[str] = []
        for folder_name in find_hidden_folders(location, files.list(dir_fd), suffix="tmp"):
            paths.append(os.path.join(parent, folder_name))
        return paths
    finally:
        files.close(dir_fd)


def find_hidden_folders(
    location: TargetLocation, names: Sequence[str], *, suffix: str
) -> list[str]:
    """Return the names of the hidden folders of a target.

    Args:
        location: The target.
        names: All names in its parent folder.
        suffix: `tmp` to find its temporary folders, `old` to find the old checkpoints that were set
            aside.
    """
    folder_names: list[str] = []
    for name in names:
        if name.endswith(f".{suffix}") and location.is_temporary_name(name):
            metadata = location.files.stat(name, dir_fd=location.dir_fd)
            if metadata is not None and metadata.kind == "directory":
                folder_names.append(name)
    return folder_names


def list_regular_files(files: Files, descriptor: int) -> list[str] | None:
    """Return the names in an open folder. None if one of them is not a regular file."""
    names = list(files.list(descriptor))
    for name in names:
        metadata = files.stat(name, dir_fd=descriptor)
        if metadata is not None and metadata.kind != "file":
            return None
    return names


def remove_folder(
    folder: LockedEntry, names: Sequence[str], *, metadata: Mapping[str, FileEntry] | None = None
) -> None:
    """Remove files from a folder, and then the folder itself, which must be empty by then.

    Indexes are removed last. A crash in between leaves an index that names missing files, which
    every reader refuses. Without the index, the files would look like complete checkpoints.

    Args:
        folder: The open folder.
        names: The files to remove.
        metadata: The metadata of files by their names, if it is known. Large files among them are
            freed in the background.
    """
    files = folder.files
    indexes_last = sorted(names, key=lambda name: name.endswith((".json", ".metadata")))
    with freed_in_background(files, metadata or {}, dir_fd=folder.descriptor):
        for name in indexes_last:
            with suppress(FileNotFoundError):
                files.unlink(name, dir_fd=folder.descriptor)
        files.rmdir(folder.name, dir_fd=folder.dir_fd)


def find_recoverable(path: AnyPath) -> str | None:
    """Return the path of a checkpoint that a crash left set aside between two renames.

    Changes nothing on the disk.

    Returns:
        The path of the folder. None if `path` exists, or if no folder was set aside for it. Also
        None if there are several, since it is unknown which one is the newest, and if the parent
        folder cannot be read: the caller then reports that `path` does not exist.
    """
    try:
        return _find_recoverable_folder(system_files(), local_path(path))
    except (OSError, ValueError):
        # The system raises a ValueError for a path with a NUL character.
        return None


def _find_recoverable_folder(files: Files, path: str) -> str | None:
    """Return the path of the only folder that was set aside for a missing target, or None.

    This does the work of `find_recoverable`, but raises errors of the file system.
    """
    parent, name = os.path.split(files.resolve(path))
    if not name:
        # The path is the root of the file system, which no save replaces.
        return None
    dir_fd = files.open_directory(parent)
    try:
        if files.stat(name, dir_fd=dir_fd) is not None:
            return None
        location = TargetLocation(files, name, dir_fd, files.longest_name(dir_fd))
        set_aside_names = find_hidden_folders(location, files.list(dir_fd), suffix="old")
    finally:
        files.close(dir_fd)
    if len(set_aside_names) != 1:
        # If there are several, it is unknown which one is the newest.
        return None
    return os.path.join(parent, set_aside_names[0])


def restore_set_aside(location: TargetLocation, names: Sequence[str]) -> bool:
    """Rename an old checkpoint back to the target, after a crash left it set aside.

    On file systems that cannot exchange two names, a save renames the old folder to a hidden name
    with the suffix `old`, and then the new folder to the target. A crash between the two leaves no
    target. A crash during this function leaves the checkpoint under one of the two names, and
    readers find it under both.

    Args:
        location: The target, which must not exist.
        names: All names in its parent folder.

    Returns:
        Whether exactly one folder was set aside for the target. It has the target's name now, or a
        live save holds it and will give the name to the new or to the old folder.
    """
    set_aside_names = find_hidden_folders(location, names, suffix="old")
    if len(set_aside_names) != 1:
        # If there are several, it is unknown which one is the newest.
        return False
    old_name = set_aside_names[0]
    files = location.files
    dir_fd = location.dir_fd
    descriptor = files.open_directory(old_name, dir_fd=dir_fd)
    try:
        if not try_lock(files, descriptor):
            # A live save is between its two renames.
            return True
        # Nothing that another save has created at the target meanwhile may be replaced.
        if not files.rename_new(old_name, location.name, dir_fd=dir_fd):
            # This system has no rename that refuses to replace. A plain rename(2) is still safe: it
            # can replace an empty folder, and nothing else.
            files.rename(old_name, location.name, dir_fd=dir_fd)
        files.sync(dir_fd)
        return True
    finally:
        files.close(descriptor)


LARGE_NBYTES = 16 << 20
"""Files of this size are freed in the background. Freeing a smaller one takes less than 3 ms."""

MAX_HELD_FILES = 64
"""How many replaced files a save keeps open. Further ones are freed when they lose their names."""


@contextmanager
def freed_in_background(
    files: Files, metadata: Mapping[str, FileEntry], *, dir_fd: int
) -> Iterator[None]:
    """Free the space of large files on a thread, after the block has removed or replaced them.

    When a file has lost its last name and its last descriptor is closed, the kernel frees its pages
    and blocks, which takes 0.2 s for a GiB. Therefore a large file is held open in the block, and a
    thread closes it afterwards. This does not change what a crash leaves. Until then the file takes
    up space on the disk; `wait_for_room` waits for that.

    Args:
        files: The file system.
        metadata: The files that lose their names in the block, by these names.
        dir_fd: The descriptor of their folder.
    """
    held_descriptors: list[int] = []
    try:
        for name, entry in metadata.items():
            if entry.nbytes >= LARGE_NBYTES and len(held_descriptors) < MAX_HELD_FILES:
                # If a file cannot be held, it is freed in the block, which only takes longer.
                with suppress(OSError):
                    descriptor = files.hold(name, dir_fd=dir_fd)
                    if descriptor is not None:
                        held_descriptors.append(descriptor)
        yield
    finally:
        if held_descriptors:
            _free_in_background(files, held_descriptors)


def _free_in_background(files: Files, held_descriptors: list[int]) -> None:
    """Free files by closing their descriptors on a daemon thread, or here if none can start.

    It takes a thread because the kernel frees the pages and blocks of a file without a name in
    close(2): 0.2 s for a GiB, measured. A process that exits earlier frees them as well.

    Args:
        files: The file system.
        held_descriptors: The descriptors, which nobody else may close. The list is emptied.
    """

    def free_all() -> None:
        while held_descriptors:
            # After a fork, the child may already have closed these descriptors, and `Files` refuses
            # to close their numbers again.
            with suppress(OSError):
                files.close(held_descriptors.pop())

    with _freeing_lock:
        thread = start_thread(free_all, name="holdfast-free", daemon=True)
        if thread is not None:
            # `wait_for_room` joins these threads. Those that have ended are dropped here.
            _freeing_threads[:] = [other for other in _freeing_threads if other.is_alive()]
            _freeing_threads.append(thread)
    if thread is None:
        free_all()


_freeing_lock = make_fork_safe(threading.Lock())
_freeing_threads: list[threading.Thread] = []
"""The threads that free replaced files, so that a save on a full disk can wait for them."""


def wait_for_room() -> bool:
    """Wait until all replaced files are freed. Returns False if none was being freed."""
    with _freeing_lock:
        running_threads = [thread for thread in _freeing_threads if thread.is_alive()]
    for thread in running_threads:
        thread.join()
    return bool(running_threads)


# Threads do not survive a fork, so a child has none to wait for.
at_fork(after_in_child=_freeing_threads.clear)
