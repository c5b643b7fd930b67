"""`Files`: the one small object through which every file-system call of a save goes.

A save is proved by putting something else in its place: a model that builds every state a crash may leave, a saboteur that fails
the Nth call (`tests/crash`). So each method here is one system call, or as near to it as can be, and decides nothing: an `OSError`
passes with its code as it is. What to do about it is `engine/commit/transactions.py`'s business.

Names are relative to an open directory (`at`), so a parent that is moved during a save cannot lead it elsewhere. Nothing here
follows a link but `resolve`, which is asked once, before anything is written.

What loops (on a short write, read or copy) stands beside the object and goes through it: `write_all`, `read_all`, `copy_all`.

A save belongs to the process that began it. A lock (flock) belongs to what is open, which a forked child shares, so that it would
hold a lock of its parent's for as long as it lives. Therefore a lock is given back before its descriptor is closed, a child closes
what it inherits from saves, and in a child a `Files` of its parent's refuses everything: nothing is unlinked twice.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from typing import Literal

from holdfast.core.runtime import at_fork
from holdfast.core.value import Value
from holdfast.errors import Truncated
from holdfast.stores import platform
from holdfast.stores.platform import ABSENT, ALWAYS, DIRECTORY, HOLD, NO_LINK, NO_WAIT

Buffer = bytes | bytearray | memoryview
Kind = Literal["file", "directory", "link", "other"]
Names = list[str]

MAX_WRITE = 1 << 30
"""Linux transfers at most 2 GiB − 4 KiB in one call; half of that is as fast."""

COPY_BLOCK = 1 << 20
"""Bytes that `copy_all` holds at a time where the kernel cannot copy by itself; larger blocks leave the second-level cache."""

CANNOT_COPY = ABSENT | {errno.EXDEV, errno.EPERM, errno.ETXTBSY, errno.EBADF}
"""What copy_file_range(2) answers between file systems that it cannot copy between."""

OF_THIS_MACHINE = frozenset({
    0xEF53, 0x58465342, 0x9123683E, 0x2FC12FC1, 0xF2F52010, 0xCA451A4E, 0x01021994, 0x858458F6, 0x794C7630, 0x4D44, 0x2011BAB0,
    0x5346544E, 0x7366746E,
})  # fmt: skip
"""What statfs(2) calls file systems that one machine has mounted: ext2 to 4, xfs, btrfs, zfs, f2fs, bcachefs, tmpfs, ramfs,
overlayfs, vfat, exfat, ntfs. What is not listed may be shared."""

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.(tmp|old|lock)", re.DOTALL)


class FileEntry(Value, frozen=True, gc=False):
    """What there is under a name, or behind a descriptor."""

    kind: Kind
    identity: tuple[int, int]
    """Device and inode: equal for the same file, whatever its name is now."""
    mode: int
    """Permission bits, with those for setuid, setgid and sticky."""
    nbytes: int
    owner: tuple[int, int] = (0, 0)
    """User and group."""
    changed_s: float = 0.0
    """When the content, or of a directory the entries, changed last."""


class Files:
    """The file system of this machine as a save sees it, for the process that makes it.

    Every method may raise `OSError`; several threads call `pwrite` and `copy_range`.
    """

    def __init__(self) -> None:
        self._process = _process

    def _check(self) -> None:
        if self._process != _process:
            # Its descriptors are closed here, and their numbers may stand for something else.
            raise OSError(errno.ESTALE, f"the save belongs to process {self._process}, of which this one is a fork")

    def resolve(self, path: str) -> str:
        """An absolute path with every link followed; what does not exist yet is kept as it is."""
        return os.path.realpath(path)

    def open_directory(self, path: str, *, at: int | None = None) -> int:
        """A descriptor of a directory. With `at`, the path is a name in there and must be no link."""
        follow = NO_LINK if at is not None else 0
        return self._opened(path, os.O_RDONLY | DIRECTORY | follow, at=at)

    def open(self, name: str, *, at: int) -> int:
        """A descriptor of an existing file, for looking at and locking it. A link is refused, a pipe does not wait."""
        return self._opened(name, os.O_RDONLY | NO_LINK | NO_WAIT, at=at)

    def hold(self, name: str, *, at: int) -> int | None:
        """A descriptor that keeps what is under a name, and is good for nothing else; None where the system has no such thing."""
        return self._opened(name, HOLD | NO_LINK, at=at) if HOLD else None

    def create(self, name: str, *, at: int, private: bool = False) -> int:
        """A descriptor, for reading and writing, of a file that did not exist. Private: for this user alone."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINK
        return self._opened(name, flags, at=at, mode=0o600 if private else 0o666)

    def _opened(self, path: str, flags: int, *, at: int | None, mode: int = 0) -> int:
        self._check()
        descriptor = os.open(path, flags | ALWAYS, mode, dir_fd=at)
        _open[descriptor] = False
        return descriptor

    def allocate(self, descriptor: int, nbytes: int) -> None:
        """Give a file its length, and its blocks where the file system can promise them."""
        self._check()
        os.ftruncate(descriptor, nbytes)
        if nbytes:
            platform.reserve(descriptor, nbytes)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write some of the bytes at an offset, and say how many."""
        self._check()
        return platform.write_some(descriptor, data, offset)

    def pread(self, descriptor: int, nbytes: int, offset: int) -> bytes:
        """Read some bytes from an offset on, at most so many; none at the end."""
        self._check()
        return platform.read_block(descriptor, nbytes, offset)

    def copy_range(self, source: int, target: int, nbytes: int, *, source_offset: int, offset: int) -> int:
        """Copy some bytes from file to file inside the kernel (shared on disk where that is possible), and say how many."""
        self._check()
        return platform.copy_range(source, target, nbytes, source_offset=source_offset, offset=offset)

    def begin_sync(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Have the disk begin with a range that will be synced; several threads call it. Nothing is promised."""
        self._check()
        platform.begin_sync(descriptor, offset, nbytes)

    def sync(self, descriptor: int) -> None:
        """fsync: come back when a file's bytes, or a directory's entries, would survive a power cut."""
        self._check()
        platform.sync(descriptor)

    def chmod(self, descriptor: int, mode: int) -> None:
        self._check()
        platform.change_mode(descriptor, mode)

    def chown(self, descriptor: int, user: int, group: int) -> None:
        """Set user and group; -1 leaves one as it is."""
        self._check()
        platform.change_owner(descriptor, user, group)

    def rename(self, source: str, target: str, *, at: int) -> None:
        """Give a name to what has another one, in one step; what was under it is replaced."""
        self._check()
        os.rename(source, target, src_dir_fd=at, dst_dir_fd=at)

    def rename_new(self, source: str, target: str, *, at: int) -> bool:
        """As `rename`, but an existing target is `FileExistsError`. False, and nothing done, where that is not supported."""
        self._check()
        return platform.rename_new(source, target, at=at)

    def exchange(self, first: str, second: str, *, at: int) -> bool:
        """Swap what two names stand for, in one step. False, and nothing done, where that is not supported."""
        self._check()
        return platform.exchange(first, second, at=at)

    def link(self, source: str, target: str, *, at: int, source_at: int | None = None) -> None:
        """Give a file, perhaps of another directory (`source_at`), a second name; an existing one is `FileExistsError`."""
        self._check()
        os.link(source, target, src_dir_fd=at if source_at is None else source_at, dst_dir_fd=at, follow_symlinks=False)

    def mkdir(self, name: str, *, at: int, private: bool = False) -> None:
        """Make a directory. Private: for this user alone."""
        self._check()
        os.mkdir(name, 0o700 if private else 0o777, dir_fd=at)

    def unlink(self, name: str, *, at: int) -> None:
        """Remove a name of something that is no directory. A link goes, not what it leads to."""
        self._check()
        os.unlink(name, dir_fd=at)

    def rmdir(self, name: str, *, at: int) -> None:
        self._check()
        os.rmdir(name, dir_fd=at)

    def list(self, descriptor: int) -> Names:
        """The names in a directory, sorted."""
        self._check()
        return sorted(os.listdir(descriptor))

    def lock(self, descriptor: int) -> bool:
        """Take the exclusive lock (flock) without waiting; False where someone else has it. It goes with the descriptor."""
        self._check()
        if not platform.lock(descriptor):
            return False
        if descriptor in _open:
            _open[descriptor] = True
        return True

    def stat(self, name: str, *, at: int) -> FileEntry | None:
        """What is under a name (a link is itself), or None."""
        self._check()
        try:
            return entry_of(os.stat(name, dir_fd=at, follow_symlinks=False))
        except FileNotFoundError:
            return None

    def inspect(self, descriptor: int) -> FileEntry:
        self._check()
        return entry_of(os.fstat(descriptor))

    def is_shared(self, descriptor: int) -> bool:
        """Whether other machines may write into this directory, whose locks may not be seen here."""
        self._check()
        return platform.file_system(descriptor) not in OF_THIS_MACHINE

    def longest_name(self, descriptor: int) -> int:
        """How many bytes a name in this directory may have."""
        self._check()
        return platform.longest_name(descriptor)

    def close(self, descriptor: int) -> None:
        """Give a descriptor back. It is gone even where this raises."""
        self._check()
        # Forgotten first: when it is closed, the number may be anybody's.
        if _open.pop(descriptor, False):
            with suppress(OSError):
                platform.unlock(descriptor)
        os.close(descriptor)


_process = os.getpid()
"""This process; a fork has another number."""

_open: dict[int, bool] = {}
"""The descriptors that saves have open, and whether each is locked."""


def _in_child() -> None:
    """Let go of what saves of the parent have open; it stays open there."""
    global _process
    _process = os.getpid()
    for descriptor in list(_open):
        with suppress(OSError):
            os.close(descriptor)
    _open.clear()


at_fork(after_in_child=_in_child)


def write_all(files: Files, descriptor: int, data: Buffer, *, offset: int) -> None:
    """Write every byte of a buffer at an offset: the loop on short writes, in one place."""
    view = memoryview(data).cast("B")
    done = 0
    while done < view.nbytes:
        count = files.pwrite(descriptor, view[done : done + MAX_WRITE], offset + done)
        if count <= 0:
            # POSIX allows 0 only for an empty buffer; a loop that believed it would never end.
            raise OSError(errno.EIO, "the file system took none of the bytes and said no reason")
        done += count


def read_all(files: Files, name: str, found: FileEntry | None, *, at: int, most: int) -> bytes | None:
    """A small file as a whole, which `found` is; None where that is no plain file, is longer than `most`, or grows meanwhile."""
    if found is None or found.kind != "file" or found.nbytes > most:
        return None
    descriptor = files.open(name, at=at)
    try:
        content = b""
        # Nothing is allocated for a length that nobody has.
        while block := files.pread(descriptor, found.nbytes + 1 - len(content), len(content)):
            content += block
        return content if len(content) == found.nbytes else None
    finally:
        files.close(descriptor)


def copy_all(files: Files, source: int, target: int, *, nbytes: int, source_offset: int, offset: int) -> None:
    """Copy a range from file to file, inside the kernel where it can, through a block of memory where not.

    Raises `Truncated` where the source ends before the range does.
    """
    done = 0
    while done < nbytes:
        at, to = source_offset + done, offset + done
        try:
            count = files.copy_range(source, target, min(nbytes - done, MAX_WRITE), source_offset=at, offset=to)
        except OSError as error:
            if error.errno not in CANNOT_COPY:
                raise
            count = 0
        if count <= 0:
            # Also some file systems' way to say that they cannot (Linux before 5.19); reading tells whether it is the end.
            block = platform.read_block(source, min(nbytes - done, COPY_BLOCK), at)
            if not block:
                raise Truncated(f"the source ends {nbytes - done} bytes before the range to copy", offset=at)
            write_all(files, target, block, offset=to)
            count = len(block)
        done += count


def is_temporary(name: str) -> bool:
    """Whether a name is one of those that saves use for what is not, or no longer, a checkpoint (`engine/commit/temporaries.py`).

    >>> is_temporary(".model.pt.0123456789abcdef.tmp"), is_temporary(".metadata")
    (True, False)
    """
    return TEMPORARY.fullmatch(name) is not None


def split_path(path: str) -> tuple[str, str]:
    """The folder and the name in it.

    >>> split_path("/data/model.pt")
    ('/data', 'model.pt')
    """
    return os.path.split(path)


def entry_of(status: os.stat_result) -> FileEntry:
    """What the system says of something, in our words."""
    kind, mode = status.st_mode & ~PERMISSIONS, status.st_mode & PERMISSIONS
    found = KINDS[kind] if kind in KINDS else "other"  # noqa: SIM401  # a call less
    owner = (status.st_uid, status.st_gid)
    return FileEntry(found, (status.st_dev, status.st_ino), mode, status.st_size, owner, status.st_mtime)


PERMISSIONS = 0o7777
KINDS: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}


def make_parents(path: str, *, durable: bool) -> None:
    """Make the folders that lead to a path, where they are missing; with `durable`, so that they survive a power cut."""
    is_link = False
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        is_link = stat.S_ISLNK(os.lstat(path).st_mode)  # a path that is too long says so before a part of it is made
    if not is_link and os.path.isdir(os.path.dirname(path.rstrip("/")) or os.curdir):
        return
    missing = []
    parent = os.path.dirname(os.path.realpath(path))
    while not os.path.lexists(parent) and parent != os.path.dirname(parent):  # a drive may be missing, and leads nowhere
        missing.append(parent)
        parent = os.path.dirname(parent)
    for folder in reversed(missing):
        with suppress(FileExistsError):  # somebody else makes it as well
            os.mkdir(folder)
        if durable:
            platform.sync_directory(os.path.dirname(folder))
