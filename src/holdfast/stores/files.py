"""`Files`: the object through which every file-system call of a save goes.

The tests of crashes (`tests/crash`) replace this object: by a model that builds every state that a
crash can leave behind, and by a saboteur that lets the Nth call fail. Therefore each method makes
one system call, or nearly one, and makes no decisions. An `OSError` passes through with its code.
`engine/commit/transactions.py` decides what to do about it.

Names are relative to an open directory (`dir_fd`), so moving a parent during a save cannot redirect
it. Only `resolve` follows links, and a save calls it once, before it writes anything.

Loops over short writes, reads and copies are functions that use the object: `write_all`, `read_all`
and `copy_all`.

A save belongs to the process that started it. A forked child shares the open files of its parent
and thus also their locks (flock): the child would keep a lock of a parent that has died. Therefore
a lock is released before its descriptor is closed, a child closes the descriptors that it inherits
from saves, and a `Files` object of the parent raises in the child, so nothing is removed twice."""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from msgspec import Struct

from holdfast.core.runtime import at_fork
from holdfast.core.value import Value
from holdfast.errors import Truncated
from holdfast.stores import platform
from holdfast.stores.platform import (
    BLOCK_NBYTES,
    DIRECTORY,
    NO_FOLLOW,
    NON_BLOCKING,
    OPEN_FLAGS,
    PATH_ONLY,
    UNSUPPORTED_ERRNOS,
)

Buffer = bytes | bytearray | memoryview
FileKind = Literal["file", "directory", "link", "other"]
Names = list[str]

MAX_WRITE_NBYTES = 1 << 30
"""Linux transfers at most 2 GiB − 4 KiB in one call. Half of that is as fast."""

COPY_FALLBACK_ERRNOS = UNSUPPORTED_ERRNOS | {errno.EXDEV, errno.EPERM, errno.ETXTBSY, errno.EBADF}
"""Errors of copy_file_range(2) between file systems that it cannot copy between."""

LOCAL_FILE_SYSTEMS = frozenset({
    0xEF53, 0x58465342, 0x9123683E, 0x2FC12FC1, 0xF2F52010, 0xCA451A4E, 0x01021994, 0x858458F6,
    0x794C7630, 0x4D44, 0x2011BAB0, 0x5346544E, 0x7366746E,
})  # fmt: skip
"""Types, as in statfs(2), of file systems that only one machine mounts: ext2 to 4, xfs, btrfs, zfs,
f2fs, bcachefs, tmpfs, ramfs, overlayfs, vfat, exfat, ntfs. Any other type may be shared."""

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.(tmp|old|lock)", re.DOTALL)

PERMISSION_BITS = 0o7777
"""The bits of a file's mode that are permissions, including setuid, setgid and sticky."""

KINDS: dict[int, FileKind] = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}


class FileEntry(Value, frozen=True, gc=False):
    """The metadata of a file, a directory or a link."""

    kind: FileKind
    identity: tuple[int, int]
    """Device and inode. They stay the same when the file is renamed."""
    mode: int
    """The permission bits, including setuid, setgid and sticky."""
    nbytes: int
    owner: tuple[int, int] = (0, 0)
    """User and group."""
    changed_s: float = 0.0
    """The time of the last change of a file's content, or of a directory's entries."""


class Files:
    """The file system as a save in this process uses it.

    Every method may raise `OSError`. Several threads call `pwrite`, `copy_range` and `begin_sync`.
    """

    def __init__(self) -> None:
        self._process_id = _process_id

    def _check_process(self) -> None:
        """Raise an error in a forked child.

        The child has closed the descriptors of its parent, and their numbers may mean other files.
        """
        if self._process_id != _process_id:
            raise OSError(
                errno.ESTALE,
                f"process {self._process_id} started this save, and this process is a fork of it; "
                "start a new save here",
            )

    def resolve(self, path: str) -> str:
        """Return an absolute path with every link followed. Parts that do not exist are kept."""
        return os.path.realpath(path)

    def open_directory(self, path: str, *, dir_fd: int | None = None) -> int:
        """Open a directory.

        With `dir_fd`, the path is a name in that directory, and must not be a link.
        """
        flags = os.O_RDONLY | DIRECTORY
        if dir_fd is not None:
            flags |= NO_FOLLOW
        return self._open_descriptor(path, flags, dir_fd=dir_fd)

    def open(self, name: str, *, dir_fd: int) -> int:
        """Open an existing file to read or lock it. Refuses links, and does not wait for a pipe."""
        return self._open_descriptor(name, os.O_RDONLY | NO_FOLLOW | NON_BLOCKING, dir_fd=dir_fd)

    def open_shared(self, name: str, *, dir_fd: int) -> int:
        """Open an existing file for reading and writing that another process writes as well."""
        return self._open_descriptor(name, os.O_RDWR | NO_FOLLOW | NON_BLOCKING, dir_fd=dir_fd)

    def hold(self, name: str, *, dir_fd: int) -> int | None:
        """Open a file or directory only so that no new file gets its inode number.

        Returns:
            A descriptor, which cannot be read. None if the system has no such descriptors.
        """
        if not PATH_ONLY:
            return None
        return self._open_descriptor(name, PATH_ONLY | NO_FOLLOW, dir_fd=dir_fd)

    def create(self, name: str, *, dir_fd: int, private: bool = False) -> int:
        """Create a file and open it for reading and writing. It must not exist.

        With `private`, only this user may access it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_FOLLOW
        return self._open_descriptor(name, flags, dir_fd=dir_fd, mode=0o600 if private else 0o666)

    def _open_descriptor(self, path: str, flags: int, *, dir_fd: int | None, mode: int = 0) -> int:
        """Open a path, and record the descriptor so that a forked child closes it."""
        self._check_process()
        descriptor = os.open(path, flags | OPEN_FLAGS, mode, dir_fd=dir_fd)
        _has_lock[descriptor] = False
        return descriptor

    def allocate(self, descriptor: int, nbytes: int) -> None:
        """Set the length of a file, and allocate its disk blocks if the file system can."""
        self._check_process()
        os.ftruncate(descriptor, nbytes)
        if nbytes:
            platform.reserve(descriptor, nbytes)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write some of the bytes at an offset, and return how many."""
        self._check_process()
        return platform.write_some(descriptor, data, offset)

    def pread(self, descriptor: int, nbytes: int, offset: int) -> bytes:
        """Read at most `nbytes` bytes from an offset; none at the end of the file."""
        self._check_process()
        return platform.read_block(descriptor, nbytes, offset)

    def copy_range(
        self,
        source_descriptor: int,
        target_descriptor: int,
        nbytes: int,
        *,
        source_offset: int,
        offset: int,
    ) -> int:
        """Copy some bytes between files in the kernel, and return how many.

        If the file system supports it, the files share the blocks on the disk afterwards. `offset`
        is the position in the target.
        """
        self._check_process()
        return platform.copy_range(
            source_descriptor,
            target_descriptor,
            nbytes,
            source_offset=source_offset,
            target_offset=offset,
        )

    def begin_sync(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Hint that the disk may start to write a range. This promises nothing."""
        self._check_process()
        platform.begin_sync(descriptor, offset, nbytes)

    def sync(self, descriptor: int) -> None:
        """Wait until the bytes of a file, or the entries of a directory, are on the disk (fsync)."""
        self._check_process()
        platform.sync(descriptor)

    def chmod(self, descriptor: int, mode: int) -> None:
        """Set the permission bits."""
        self._check_process()
        platform.change_mode(descriptor, mode)

    def chown(self, descriptor: int, user: int, group: int) -> None:
        """Set the user and the group. -1 leaves either one as it is."""
        self._check_process()
        platform.change_owner(descriptor, user, group)

    def rename(self, old_name: str, new_name: str, *, dir_fd: int) -> None:
        """Rename in one step. Replaces what has the new name."""
        self._check_process()
        os.rename(old_name, new_name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def rename_new(self, old_name: str, new_name: str, *, dir_fd: int) -> bool:
        """Rename in one step. Raises `FileExistsError` if the new name exists.

        Returns:
            False, without any change, if the system does not support this.
        """
        self._check_process()
        return platform.rename_new(old_name, new_name, dir_fd=dir_fd)

    def exchange(self, first: str, second: str, *, dir_fd: int) -> bool:
        """Exchange two names in one step.

        Returns:
            False, without any change, if the system does not support this.
        """
        self._check_process()
        return platform.exchange(first, second, dir_fd=dir_fd)

    def link(
        self, name: str, new_name: str, *, dir_fd: int, source_dir_fd: int | None = None
    ) -> None:
        """Give a file a second name (a hard link). Raises `FileExistsError` if the new name exists.

        With `source_dir_fd`, the file is in that directory. The new name is always in `dir_fd`.
        """
        self._check_process()
        os.link(
            name,
            new_name,
            src_dir_fd=dir_fd if source_dir_fd is None else source_dir_fd,
            dst_dir_fd=dir_fd,
            follow_symlinks=False,
        )

    def mkdir(self, name: str, *, dir_fd: int, private: bool = False) -> None:
        """Create a directory. With `private`, only this user may access it."""
        self._check_process()
        os.mkdir(name, 0o700 if private else 0o777, dir_fd=dir_fd)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        """Remove a file or a link. The target of a link stays."""
        self._check_process()
        os.unlink(name, dir_fd=dir_fd)

    def rmdir(self, name: str, *, dir_fd: int) -> None:
        """Remove an empty directory."""
        self._check_process()
        os.rmdir(name, dir_fd=dir_fd)

    def list(self, descriptor: int) -> Names:
        """Return the names in a directory, sorted."""
        self._check_process()
        return sorted(os.listdir(descriptor))

    def lock(self, descriptor: int) -> bool:
        """Take the exclusive lock (flock) without waiting. Closing the descriptor releases it.

        Returns:
            False if somebody else has the lock.
        """
        self._check_process()
        if not platform.lock(descriptor):
            return False
        # `close` releases the lock of a descriptor that this object opened.
        if descriptor in _has_lock:
            _has_lock[descriptor] = True
        return True

    def stat(self, name: str, *, dir_fd: int) -> FileEntry | None:
        """Return the metadata of a name, or None if it does not exist. Does not follow a link."""
        self._check_process()
        try:
            return entry_from_status(os.stat(name, dir_fd=dir_fd, follow_symlinks=False))
        except FileNotFoundError:
            return None

    def inspect(self, descriptor: int) -> FileEntry:
        """Return the metadata of an open file or directory."""
        self._check_process()
        return entry_from_status(os.fstat(descriptor))

    def is_shared(self, descriptor: int) -> bool:
        """Return whether other machines may write to this directory.

        The locks of processes on other machines may be invisible here.
        """
        self._check_process()
        return platform.get_file_system_type(descriptor) not in LOCAL_FILE_SYSTEMS

    def longest_name(self, descriptor: int) -> int:
        """Return how many bytes a name in this directory may have."""
        self._check_process()
        return platform.longest_name(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor. It is closed even if this raises."""
        self._check_process()
        # Forget it first: once it is closed, another thread may get the same number.
        if _has_lock.pop(descriptor, False):
            with suppress(OSError):
                platform.unlock(descriptor)
        os.close(descriptor)


_process_id = os.getpid()

_has_lock: dict[int, bool] = {}
"""The open descriptors of all saves of this process, and whether each of them has a lock."""


def _forget_saves_of_parent() -> None:
    """Close the descriptors that this forked child inherited from saves of its parent.

    They stay open in the parent.
    """
    global _process_id
    # `Files` objects of the parent notice by this number that they are in a child.
    _process_id = os.getpid()
    for descriptor in list(_has_lock):
        with suppress(OSError):
            os.close(descriptor)
    _has_lock.clear()


at_fork(after_in_child=_forget_saves_of_parent)


def write_all(files: Files, descriptor: int, data: Buffer, *, offset: int) -> None:
    """Write all bytes of a buffer at an offset, with as many system calls as it takes.

    A system call may write fewer bytes than requested.
    """
    view = memoryview(data).cast("B")
    written_nbytes = 0
    while written_nbytes < view.nbytes:
        block = view[written_nbytes : written_nbytes + MAX_WRITE_NBYTES]
        block_written_nbytes = files.pwrite(descriptor, block, offset + written_nbytes)
        # POSIX allows 0 only for an empty buffer. Trying again could go on forever.
        if block_written_nbytes <= 0:
            raise OSError(errno.EIO, "the file system wrote nothing and gave no reason")
        written_nbytes += block_written_nbytes


def read_all(
    files: Files, name: str, entry: FileEntry | None, *, dir_fd: int, max_nbytes: int
) -> bytes | None:
    """Read a small file completely.

    Args:
        files: The file system.
        name: The name of the file in the directory `dir_fd`.
        entry: The metadata of the file, or None if it does not exist.
        dir_fd: A descriptor of the directory.
        max_nbytes: The largest length to read.

    Returns:
        The content. None if this is not a regular file, is longer than `max_nbytes`, or has another
        length by now than `entry` records.
    """
    if entry is None or entry.kind != "file" or entry.nbytes > max_nbytes:
        return None
    descriptor = files.open(name, dir_fd=dir_fd)
    try:
        content = b""
        # Try to read one byte more than the file should have, to notice if it has grown.
        wanted_nbytes = entry.nbytes + 1
        while len(content) < wanted_nbytes:
            block = files.pread(descriptor, wanted_nbytes - len(content), len(content))
            if not block:
                break
            content += block
        return content if len(content) == entry.nbytes else None
    finally:
        files.close(descriptor)


def copy_all(
    files: Files,
    source_descriptor: int,
    target_descriptor: int,
    *,
    nbytes: int,
    source_offset: int,
    offset: int,
) -> None:
    """Copy a range from file to file, in the kernel if possible, otherwise through memory.

    Args:
        files: The file system.
        source_descriptor: The file to read.
        target_descriptor: The file to write.
        nbytes: The size of the range.
        source_offset: The start of the range in the source.
        offset: The start of the range in the target.

    Raises:
        Truncated: The source ends before the range does.
    """
    copied_nbytes = 0
    while copied_nbytes < nbytes:
        missing_nbytes = nbytes - copied_nbytes
        read_offset = source_offset + copied_nbytes
        write_offset = offset + copied_nbytes
        try:
            block_nbytes = files.copy_range(
                source_descriptor,
                target_descriptor,
                min(missing_nbytes, MAX_WRITE_NBYTES),
                source_offset=read_offset,
                offset=write_offset,
            )
        except OSError as error:
            if error.errno not in COPY_FALLBACK_ERRNOS:
                raise
            block_nbytes = 0

        # Before Linux 5.19, some file systems return 0 if they cannot copy. A read shows whether
        # the source really ends here.
        if block_nbytes <= 0:
            max_nbytes = min(missing_nbytes, BLOCK_NBYTES)
            block = platform.read_block(source_descriptor, max_nbytes, read_offset)
            if not block:
                raise Truncated(
                    f"the source ends {missing_nbytes} bytes before the end of the range to copy",
                    offset=read_offset,
                )
            write_all(files, target_descriptor, block, offset=write_offset)
            block_nbytes = len(block)
        copied_nbytes += block_nbytes


def is_temporary(name: str) -> bool:
    """Return whether saves use a name for files that are not part of a published checkpoint.

    `engine/commit/temporaries.py` makes these names.

    >>> is_temporary(".model.pt.0123456789abcdef.tmp"), is_temporary(".metadata")
    (True, False)
    """
    return TEMPORARY.fullmatch(name) is not None


def entry_from_status(status: os.stat_result) -> FileEntry:
    """Return the metadata of a file as a `FileEntry`."""
    return FileEntry(
        kind=KINDS.get(stat.S_IFMT(status.st_mode), "other"),
        identity=(status.st_dev, status.st_ino),
        mode=status.st_mode & PERMISSION_BITS,
        nbytes=status.st_size,
        owner=(status.st_uid, status.st_gid),
        changed_s=status.st_mtime,
    )


def make_parents(path: str, *, durable: bool) -> None:
    """Create the missing folders above a path, before a save creates the path itself.

    If the path is a link, they are the folders above its target.

    Args:
        path: The path of the checkpoint to save.
        durable: Whether the new folders must survive a power cut.
    """
    is_link = False
    # A missing path is not a link. A path that is too long raises OSError here, before any of its
    # folders is created.
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        is_link = stat.S_ISLNK(os.lstat(path).st_mode)
    parent = os.path.dirname(path.rstrip("/")) or os.curdir
    if not is_link and os.path.isdir(parent):
        return

    missing_folders = []
    ancestor = os.path.dirname(os.path.realpath(path))
    # On Windows the drive itself may be missing. Its parent is the drive again.
    while not os.path.lexists(ancestor) and ancestor != os.path.dirname(ancestor):
        missing_folders.append(ancestor)
        ancestor = os.path.dirname(ancestor)
    for folder in reversed(missing_folders):
        # Another process may create the same folder.
        with suppress(FileExistsError):
            os.mkdir(folder)
        # The name of a new folder is an entry of its parent.
        if durable:
            platform.sync_directory(os.path.dirname(folder))


RETRY_PAUSES_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
"""Pauses between attempts to replace or remove a file that somebody has open."""

MAX_NAME_CHARACTERS = 255
"""The limit of every file system of Windows. In bytes it is no lower."""

LOCK_FILE = re.compile(r"\.holdfast\.[0-9a-f]{16}\.lock")
"""The names of the lock files of `PathFiles`."""


def system_files() -> Files:
    """Return the `Files` object for this machine and this process."""
    return Files() if platform.OPENS_DIRECTORIES else PathFiles()


class OpenEntry(Struct):
    """A file or directory that a save has open, for `PathFiles`."""

    path: str
    identity: tuple[int, int]
    is_writable: bool = False
    lock: tuple[int, str] | None = None
    """The descriptor and the path of its lock file."""


_open_entries: dict[int, OpenEntry] = {}
"""Files that saves have open, under their descriptors, and directories, under negative numbers."""

_directory_numbers = itertools.count(-2, -1)
"""-1 is left out because failed C calls return it."""


class PathFiles(Files):
    """The file system for systems that cannot open directories or remove open files: Windows.

    1. **Directories are paths** behind negative numbers. Each call first compares the identity of
       the directory: if it was moved or replaced, the call raises ESTALE and writes nothing. A
       rename by this process updates the paths.
    2. **Open files are closed early.** A file of ours is closed before it is renamed or removed.
       Until its user closes it, its number refers to the null device.
    3. **Open files of others** cannot be replaced. A virus scanner closes a file after a moment, so
       a refused step is repeated for half a second. Then it raises EBUSY, before anything has
       changed.
    4. **Locks** are open files, `.holdfast.<identity>.lock`, next to the locked file. Windows
       refuses to remove them while their owner lives, so a process that can remove one knows that
       its owner is gone. A renamed folder keeps its identity.

    Directories cannot be synced here. There are no permission bits to keep: a new file has the
    access list of its folder.
    """

    def open_directory(self, path: str, *, dir_fd: int | None = None) -> int:
        """Look up a directory, and return a negative number that stands for its path.

        Windows cannot open directories. Later calls compare the identity of the one at the path.
        """
        self._check_process()
        # Renames find open directories by their paths, so each one must have a single spelling.
        full_path = os.path.realpath(path) if dir_fd is None else self._join_path(path, dir_fd)
        status = os.stat(full_path, follow_symlinks=dir_fd is None)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), full_path)
        number = next(_directory_numbers)
        _open_entries[number] = OpenEntry(full_path, entry_from_status(status).identity)
        return number

    def open(self, name: str, *, dir_fd: int) -> int:
        """Open an existing regular file to read or lock it.

        `dir_fd` is a number of `open_directory`.
        """
        path = self._join_path(name, dir_fd)
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(errno.ELOOP, "not a regular file", path)
        return self._open_file(path, os.O_RDONLY)

    def hold(self, name: str, *, dir_fd: int) -> int | None:
        # An open file could be neither replaced nor removed here.
        return None

    def create(self, name: str, *, dir_fd: int, private: bool = False) -> int:
        return self._open_file(self._join_path(name, dir_fd), os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def _open_file(self, path: str, flags: int) -> int:
        """Open a file and record its path and identity.

        `rename` and `unlink` use them: Windows cannot move or remove a file that is open.
        """
        self._check_process()
        descriptor = os.open(path, flags | OPEN_FLAGS, 0o666)
        try:
            # Some versions of Python return different identities for a path and a descriptor. All
            # comparisons use the path. It cannot be replaced, because the file is open.
            identity = entry_from_status(os.lstat(path)).identity
            _open_entries[descriptor] = OpenEntry(path, identity, bool(flags & os.O_RDWR))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def sync(self, descriptor: int) -> None:
        """Wait until the bytes of a file are on the disk.

        For a directory this does nothing, because Windows has no call for it.
        """
        self._check_process()
        # Directories have negative numbers.
        if descriptor < 0:
            return
        entry = _open_entries.get(descriptor)
        if entry is None or entry.is_writable:
            platform.sync(descriptor)
            return
        # Windows does not flush through a read-only descriptor.
        writable_descriptor = os.open(entry.path, os.O_RDWR | OPEN_FLAGS)
        try:
            platform.sync(writable_descriptor)
        finally:
            os.close(writable_descriptor)

    def chmod(self, descriptor: int, mode: int) -> None:
        self._check_process()
        os.chmod(_get_open_entry(descriptor).path, mode)

    def rename(self, old_name: str, new_name: str, *, dir_fd: int) -> None:
        self._move(os.replace, old_name, new_name, dir_fd=dir_fd)

    def rename_new(self, old_name: str, new_name: str, *, dir_fd: int) -> bool:
        if platform.CAN_DELETE_OPEN_FILES:
            return False
        # Only on Windows, os.rename refuses an existing target, both a file and a directory.
        self._move(os.rename, old_name, new_name, dir_fd=dir_fd)
        return True

    def _move(
        self, move: Callable[[str, str], None], old_name: str, new_name: str, *, dir_fd: int
    ) -> None:
        """Rename a file or directory on Windows, even if this process has it open.

        Args:
            move: `os.replace`, or `os.rename` if the new name must not exist.
            old_name: The name in the directory `dir_fd`.
            new_name: Its new name in the same directory.
            dir_fd: The number that `open_directory` returned.
        """
        old_path = self._join_path(old_name, dir_fd)
        new_path = self._join_path(new_name, dir_fd)
        _close_early(old_path)
        _retry_while_in_use(lambda: move(old_path, new_path))

        # Entries that are open have new paths now: the entry itself, and everything below it.
        for entry in _open_entries.values():
            if entry.path == old_path:
                entry.path = new_path
                # On FAT the identity is the position of the directory entry, which has changed.
                with suppress(OSError):
                    entry.identity = entry_from_status(os.lstat(new_path)).identity
            elif entry.path.startswith(old_path + os.sep):
                entry.path = new_path + entry.path[len(old_path) :]

    def exchange(self, first: str, second: str, *, dir_fd: int) -> bool:
        # Windows cannot exchange two names.
        return False

    def link(
        self, name: str, new_name: str, *, dir_fd: int, source_dir_fd: int | None = None
    ) -> None:
        """Give a file a second name. The parameters are those of `Files.link`."""
        source_path = self._join_path(name, dir_fd if source_dir_fd is None else source_dir_fd)
        os.link(os.path.normpath(source_path), self._join_path(new_name, dir_fd))

    def mkdir(self, name: str, *, dir_fd: int, private: bool = False) -> None:
        # `private` is ignored: since Python 3.12.4 it would set an access list, which every file in
        # the folder would inherit and keep.
        os.mkdir(self._join_path(name, dir_fd))

    def unlink(self, name: str, *, dir_fd: int) -> None:
        path = self._join_path(name, dir_fd)
        _close_early(path)
        _retry_while_in_use(lambda: os.unlink(path))

    def rmdir(self, name: str, *, dir_fd: int) -> None:
        path = self._join_path(name, dir_fd)
        _retry_while_in_use(lambda: os.rmdir(path))

    def list(self, descriptor: int) -> Names:
        return sorted(os.listdir(self._join_path("", descriptor)))

    def lock(self, descriptor: int) -> bool:
        """Lock a file or directory: create a lock file beside it, and keep the lock file open.

        Windows refuses to remove a lock file while its owner lives.

        Returns:
            False if another process has the lock.
        """
        # Only Windows needs it.
        from hashlib import blake2b

        self._check_process()
        # If others could delete an open lock file, its existence would prove nothing.
        if platform.CAN_DELETE_OPEN_FILES:
            raise OSError(errno.ENOTSUP, "this system has no locks")
        entry = _get_open_entry(descriptor)
        folder = os.path.dirname(entry.path)
        digest = blake2b(repr(entry.identity).encode(), digest_size=8).hexdigest()
        lock_name = f".holdfast.{digest}.lock"
        lock_path = os.path.join(folder, lock_name)
        try:
            # This succeeds if the process that had the lock is dead.
            with suppress(FileNotFoundError):
                os.unlink(lock_path)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS
            entry.lock = os.open(lock_path, flags, 0o666), lock_path
        except (PermissionError, FileExistsError):
            return False

        # Remove the lock files of dead processes. Windows refuses those that are still held.
        for name in os.listdir(folder):
            if LOCK_FILE.fullmatch(name) and name != lock_name:
                with suppress(OSError):
                    os.unlink(os.path.join(folder, name))
        return True

    def stat(self, name: str, *, dir_fd: int) -> FileEntry | None:
        try:
            return entry_from_status(os.lstat(self._join_path(name, dir_fd)))
        except FileNotFoundError:
            return None

    def inspect(self, descriptor: int) -> FileEntry:
        self._check_process()
        return entry_from_status(os.lstat(_get_open_entry(descriptor).path))

    def is_shared(self, descriptor: int) -> bool:
        self._check_process()
        # Windows does not report whether other machines use a directory, so assume that they do.
        return True

    def longest_name(self, descriptor: int) -> int:
        self._check_process()
        return MAX_NAME_CHARACTERS

    def close(self, descriptor: int) -> None:
        """Close a file or forget a directory, and release its lock by removing the lock file."""
        self._check_process()
        entry = _open_entries.pop(descriptor, None)
        try:
            # Negative numbers stand for directories, which are not open.
            if descriptor >= 0:
                os.close(descriptor)
        finally:
            if entry is not None and entry.lock is not None:
                lock_descriptor, lock_path = entry.lock
                with suppress(OSError):
                    os.close(lock_descriptor)
                    os.unlink(lock_path)

    def _join_path(self, name: str, dir_fd: int) -> str:
        """Return the path of a name in an open directory, or of the directory itself for ''.

        Raises:
            OSError: With ESTALE if another directory has the path by now.
        """
        self._check_process()
        folder = _get_open_entry(dir_fd)
        if entry_from_status(os.stat(folder.path)).identity != folder.identity:
            message = "the folder was moved or replaced during the save"
            raise OSError(errno.ESTALE, message, folder.path)
        return os.path.join(folder.path, name) if name else folder.path


def _get_open_entry(number: int) -> OpenEntry:
    """Return the path and identity that `PathFiles` recorded for a descriptor or a number."""
    entry = _open_entries.get(number)
    if entry is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return entry


def _close_early(path: str) -> None:
    """Close the files of this process that have a path. Windows cannot move or remove open files.

    The number of such a file then means the null device, until the save that opened it closes it.
    """
    for number, entry in list(_open_entries.items()):
        # Negative numbers stand for directories, which are not open.
        if number < 0 or entry.path != path:
            continue
        # The number must stay in use. Otherwise another file could get it, and the save that opened
        # this file would then close that one.
        null_descriptor = os.open(os.devnull, os.O_RDWR | OPEN_FLAGS)
        try:
            os.dup2(null_descriptor, number, inheritable=False)
        finally:
            os.close(null_descriptor)


def _retry_while_in_use(change: Callable[[], None]) -> None:
    """Repeat a rename or a removal that Windows refuses while somebody has the file open.

    A virus scanner or an indexer closes a file after a moment.

    Raises:
        OSError: With EBUSY if the file is still open after half a second.
    """
    for pause_s in RETRY_PAUSES_S:
        try:
            change()
            return
        except PermissionError:
            time.sleep(pause_s)
    try:
        change()
    except PermissionError as error:
        message = "the file is open in this or another program; close it and try again"
        raise OSError(errno.EBUSY, message, error.filename) from error
