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
    DIRECTORY,
    NO_FOLLOW,
    NON_BLOCKING,
    OPEN_FLAGS,
    PATH_ONLY,
    UNSUPPORTED_ERRNOS,
)

Buffer = bytes | bytearray | memoryview
Kind = Literal["file", "directory", "link", "other"]
Names = list[str]

MAX_WRITE = 1 << 30  # Linux transfers at most 2 GiB − 4 KiB in one call; half of that is as fast.

COPY_BLOCK = (
    1 << 20
)  # Bytes that `copy_all` holds at a time; larger blocks leave the second-level cache.

CANNOT_COPY = UNSUPPORTED_ERRNOS | {errno.EXDEV, errno.EPERM, errno.ETXTBSY, errno.EBADF}
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
    identity: tuple[
        int, int
    ]  # Device and inode: equal for the same file, whatever its name is now.
    mode: int  # Permission bits, with those for setuid, setgid and sticky.
    nbytes: int
    owner: tuple[int, int] = (0, 0)  # User and group.
    changed_s: float = 0.0  # When the content, or of a directory the entries, changed last.


class Files:
    """The file system of this machine as a save sees it, for the process that makes it. Every method may raise `OSError`; several
    threads call `pwrite` and `copy_range`."""

    def __init__(self) -> None:
        self._process = _process

    def _check(self) -> None:
        if self._process != _process:
            # Its descriptors are closed here, and their numbers may stand for something else.
            raise OSError(
                errno.ESTALE,
                f"the save belongs to process {self._process}, of which this one is a fork",
            )

    def resolve(self, path: str) -> str:
        """An absolute path with every link followed; what does not exist yet is kept as it is."""
        return os.path.realpath(path)

    def open_directory(self, path: str, *, at: int | None = None) -> int:
        """A descriptor of a directory. With `at`, the path is a name in there and must be no link."""
        follow = NO_FOLLOW if at is not None else 0
        return self._opened(path, os.O_RDONLY | DIRECTORY | follow, at=at)

    def open(self, name: str, *, at: int) -> int:
        """A descriptor of an existing file, for looking at and locking it. A link is refused, a pipe does not wait."""
        return self._opened(name, os.O_RDONLY | NO_FOLLOW | NON_BLOCKING, at=at)

    def open_shared(self, name: str, *, at: int) -> int:
        """A descriptor, for reading and writing, of an existing file that another process writes as well."""
        return self._opened(name, os.O_RDWR | NO_FOLLOW | NON_BLOCKING, at=at)

    def hold(self, name: str, *, at: int) -> int | None:
        """A descriptor that keeps what is under a name, and is good for nothing else; None where the system has no such thing."""
        return self._opened(name, PATH_ONLY | NO_FOLLOW, at=at) if PATH_ONLY else None

    def create(self, name: str, *, at: int, private: bool = False) -> int:
        """A descriptor, for reading and writing, of a file that did not exist. Private: for this user alone."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_FOLLOW
        return self._opened(name, flags, at=at, mode=0o600 if private else 0o666)

    def _opened(self, path: str, flags: int, *, at: int | None, mode: int = 0) -> int:
        self._check()
        descriptor = os.open(path, flags | OPEN_FLAGS, mode, dir_fd=at)
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

    def copy_range(
        self, source: int, target: int, nbytes: int, *, source_offset: int, offset: int
    ) -> int:
        """Copy some bytes from file to file inside the kernel (shared on disk where that is possible), and say how many."""
        self._check()
        return platform.copy_range(
            source, target, nbytes, source_offset=source_offset, offset=offset
        )

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
        os.link(
            source,
            target,
            src_dir_fd=at if source_at is None else source_at,
            dst_dir_fd=at,
            follow_symlinks=False,
        )

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
        return platform.get_file_system_type(descriptor) not in OF_THIS_MACHINE

    def longest_name(self, descriptor: int) -> int:
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


_process = os.getpid()  # This process; a fork has another number.
_open: dict[int, bool] = {}  # The descriptors that saves have open, and whether each is locked.


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


def read_all(
    files: Files, name: str, found: FileEntry | None, *, at: int, most: int
) -> bytes | None:
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


def copy_all(
    files: Files, source: int, target: int, *, nbytes: int, source_offset: int, offset: int
) -> None:
    """Copy a range from file to file, inside the kernel where it can, through a block of memory where not. Raises `Truncated` where
    the source ends before the range does."""
    done = 0
    while done < nbytes:
        at, to = source_offset + done, offset + done
        try:
            count = files.copy_range(
                source, target, min(nbytes - done, MAX_WRITE), source_offset=at, offset=to
            )
        except OSError as error:
            if error.errno not in CANNOT_COPY:
                raise
            count = 0
        if count <= 0:
            # Also some file systems' way to say that they cannot (Linux before 5.19); reading tells whether it is the end.
            block = platform.read_block(source, min(nbytes - done, COPY_BLOCK), at)
            if not block:
                raise Truncated(
                    f"the source ends {nbytes - done} bytes before the range to copy", offset=at
                )
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
    kind, mode = status.st_mode & ~PERMISSIONS, status.st_mode & PERMISSIONS
    found = KINDS[kind] if kind in KINDS else "other"  # noqa: SIM401  # a call less
    owner = (status.st_uid, status.st_gid)
    return FileEntry(
        found, (status.st_dev, status.st_ino), mode, status.st_size, owner, status.st_mtime
    )


PERMISSIONS = 0o7777
KINDS: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}


def make_parents(path: str, *, durable: bool) -> None:
    """Make the folders that lead to a path, where they are missing; with `durable`, so that they survive a power cut."""
    is_link = False
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        is_link = stat.S_ISLNK(
            os.lstat(path).st_mode
        )  # a path that is too long says so before a part of it is made
    if not is_link and os.path.isdir(os.path.dirname(path.rstrip("/")) or os.curdir):
        return
    missing = []
    parent = os.path.dirname(os.path.realpath(path))
    while not os.path.lexists(parent) and parent != os.path.dirname(
        parent
    ):  # a drive may be missing, and leads nowhere
        missing.append(parent)
        parent = os.path.dirname(parent)
    for folder in reversed(missing):
        with suppress(FileExistsError):  # somebody else makes it as well
            os.mkdir(folder)
        if durable:
            platform.sync_directory(os.path.dirname(folder))


PAUSES_S = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
)  # Between tries to replace or remove what somebody has open.
LONGEST = 255  # Characters of a name on every file system of Windows, and no fewer bytes.
LOCK = re.compile(r"\.holdfast\.[0-9a-f]{16}\.lock")
IN_USE = "it is open in this or another program"


def system_files() -> Files:
    """The file system of this machine, for the process that asks."""
    return Files() if platform.OPENS_DIRECTORIES else PathFiles()


class OpenFile(Struct):
    path: str
    identity: tuple[int, int]
    writable: bool = False
    lock: tuple[int, str] | None = None  # The descriptor of its lock file, and where that is.


_opened: dict[
    int, OpenFile
] = {}  # What saves have open: directories under numbers below zero, files under descriptors.
_numbers = itertools.count(-2, -1)  # -1 is what a failed call of C's gives, and stands for nothing


class PathFiles(Files):
    """The file system as a save sees it where no directory can be opened, and no open file be removed: Windows.

    1. **Directories are paths**, given out as numbers below zero. Before each call the identity of the directory is compared: a
       folder that was moved or replaced is ESTALE, and is not written to. A rename by this process moves the paths along.
    2. **Open files are let go of.** A file of ours that is to be renamed or removed is closed first. Its number leads to the null
       device until whoever has it closes it.
    3. **Files of others** that are open cannot be replaced. A virus scanner lets go after a moment, so a refused step is tried
    again
       for half a second; then it is EBUSY, before anything has changed.
    4. **Locks** are files, `.holdfast.<identity>.lock` beside what is locked, and held open. Windows refuses to remove them while
       their owner lives, so who can remove one finds that it was nobody's. The identity stays with a folder that is renamed.

    A directory cannot be synced here, and there are no permission bits to keep: a new file has the access list of its folder.
    """

    def open_directory(self, path: str, *, at: int | None = None) -> int:
        self._check()
        # What is moved is known by its path, of which there shall be one.
        whole = os.path.realpath(path) if at is None else self._path(path, at)
        found = os.stat(whole, follow_symlinks=at is None)
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), whole)
        number = next(_numbers)
        _opened[number] = OpenFile(whole, entry_of(found).identity)
        return number

    def open(self, name: str, *, at: int) -> int:
        path = self._path(name, at)
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(errno.ELOOP, "no plain file", path)
        return self._open_file(path, os.O_RDONLY)

    def open_shared(self, name: str, *, at: int) -> int:
        """A descriptor, for reading and writing, of an existing file that another process writes as well."""
        return self._opened(name, os.O_RDWR | NO_FOLLOW | NON_BLOCKING, at=at)

    def hold(self, name: str, *, at: int) -> int | None:
        return None  # what is open here can be neither replaced nor removed

    def create(self, name: str, *, at: int, private: bool = False) -> int:
        return self._open_file(self._path(name, at), os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def _open_file(self, path: str, flags: int) -> int:
        self._check()
        descriptor = os.open(path, flags | OPEN_FLAGS, 0o666)
        try:
            # By path and not by descriptor: what the two say of identity is not the same in every Python. It is open, and stays.
            _opened[descriptor] = OpenFile(
                path, entry_of(os.lstat(path)).identity, bool(flags & os.O_RDWR)
            )
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def sync(self, descriptor: int) -> None:
        self._check()
        known = _opened.get(descriptor)
        if descriptor < 0:
            return  # there is no call for a directory
        if known is None or known.writable:
            platform.sync(descriptor)
            return
        # Windows flushes nothing through a descriptor that may only read.
        again = os.open(known.path, os.O_RDWR | OPEN_FLAGS)
        try:
            platform.sync(again)
        finally:
            os.close(again)

    def chmod(self, descriptor: int, mode: int) -> None:
        self._check()
        os.chmod(_known(descriptor).path, mode)

    def rename(self, source: str, target: str, *, at: int) -> None:
        self._move(os.replace, source, target, at=at)

    def rename_new(self, source: str, target: str, *, at: int) -> bool:
        if platform.REMOVES_OPEN_FILES:
            return False
        # On Windows alone it refuses what exists, be it a file or a directory.
        self._move(os.rename, source, target, at=at)
        return True

    def _move(self, call: Callable[[str, str], None], source: str, target: str, *, at: int) -> None:
        before, after = self._path(source, at), self._path(target, at)
        _let_go(before)
        _patiently(lambda: call(before, after))
        for known in _opened.values():
            if known.path == before:
                known.path = after
                with suppress(OSError):
                    known.identity = entry_of(
                        os.lstat(after)
                    ).identity  # which on FAT is where the name stands
            elif known.path.startswith(before + os.sep):
                known.path = after + known.path[len(before) :]

    def exchange(self, first: str, second: str, *, at: int) -> bool:
        return False

    def link(self, source: str, target: str, *, at: int, source_at: int | None = None) -> None:
        os.link(
            os.path.normpath(self._path(source, at if source_at is None else source_at)),
            self._path(target, at),
        )

    def mkdir(self, name: str, *, at: int, private: bool = False) -> None:
        # Never for this user alone: since Python 3.12.4 that would be an access list, which everything in it keeps for ever.
        os.mkdir(self._path(name, at))

    def unlink(self, name: str, *, at: int) -> None:
        path = self._path(name, at)
        _let_go(path)
        _patiently(lambda: os.unlink(path))

    def rmdir(self, name: str, *, at: int) -> None:
        path = self._path(name, at)
        _patiently(lambda: os.rmdir(path))

    def list(self, descriptor: int) -> Names:
        return sorted(os.listdir(self._path("", descriptor)))

    def lock(self, descriptor: int) -> bool:
        from hashlib import blake2b  # on Windows alone

        self._check()
        if platform.REMOVES_OPEN_FILES:
            raise OSError(errno.ENOTSUP, "no lock can be taken here")
        known = _known(descriptor)
        folder = os.path.dirname(known.path)
        name = blake2b(repr(known.identity).encode(), digest_size=8).hexdigest()
        path = os.path.join(folder, f".holdfast.{name}.lock")
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o666)
        except (PermissionError, FileExistsError):
            return False
        known.lock = number, path
        # Those of processes that died when they had nothing else to lose; what somebody holds is refused.
        for other in os.listdir(folder):
            if LOCK.fullmatch(other) and other != os.path.basename(path):
                with suppress(OSError):
                    os.unlink(os.path.join(folder, other))
        return True

    def stat(self, name: str, *, at: int) -> FileEntry | None:
        try:
            return entry_of(os.lstat(self._path(name, at)))
        except FileNotFoundError:
            return None

    def inspect(self, descriptor: int) -> FileEntry:
        self._check()
        return entry_of(os.lstat(_known(descriptor).path))

    def is_shared(self, descriptor: int) -> bool:
        self._check()
        return True  # nobody says

    def longest_name(self, descriptor: int) -> int:
        self._check()
        return LONGEST

    def close(self, descriptor: int) -> None:
        self._check()
        known = _opened.pop(descriptor, None)
        try:
            if descriptor >= 0:
                os.close(descriptor)
        finally:
            if known is not None and known.lock is not None:
                number, path = known.lock
                with suppress(OSError):
                    os.close(number)
                    os.unlink(path)

    def _path(self, name: str, at: int) -> str:
        """The path of a name in a directory that is still where it was."""
        self._check()
        folder = _known(at)
        if entry_of(os.stat(folder.path)).identity != folder.identity:
            raise OSError(errno.ESTALE, "the folder was moved or replaced meanwhile", folder.path)
        return os.path.join(folder.path, name) if name else folder.path


def _known(number: int) -> OpenFile:
    known = _opened.get(number)
    if known is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return known


def _let_go(path: str) -> None:
    """Close the files of ours that have this path; their numbers stand for the null device until they are closed."""
    for number in [
        number for number, known in list(_opened.items()) if number >= 0 and known.path == path
    ]:
        null = os.open(os.devnull, os.O_RDWR | OPEN_FLAGS)
        try:
            os.dup2(null, number, inheritable=False)
        finally:
            os.close(null)


def _patiently(call: Callable[[], None]) -> None:
    """Do something that Windows refuses as long as somebody has a file open."""
    for pause in (*PAUSES_S, None):
        try:
            call()
            return
        except PermissionError as error:
            if pause is None:
                raise OSError(errno.EBUSY, IN_USE, error.filename) from error
            time.sleep(pause)
