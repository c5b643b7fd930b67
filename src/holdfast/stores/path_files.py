"""`PathFiles`: the file system as a save sees it where no directory can be opened, and no open file be removed: Windows.

1. **Directories are paths.** What is given out for one is a number below zero. Behind it stand the path and the identity that the
   directory had; before each call they are compared, so that a folder that was moved or replaced is ESTALE, and is not written to.
   A rename by this process moves the paths along.
2. **Open files are let go of.** A file of ours that is to be renamed or removed is closed first. Its number is kept from meaning
   something else until whoever has it closes it: it leads to the null device meanwhile.
3. **Files of others** that are open cannot be replaced. A virus scanner lets go after a moment, so a refused step is tried again
   for half a second; then it is EBUSY, before anything has changed.
4. **Locks** are files, `.holdfast.<identity>.lock` beside what is locked, and held open. Windows refuses to remove them while their
   owner lives, and removes nothing when it dies: who can remove one finds that it was nobody's. They are named by the identity of
   what is locked, so that a lock stays with a folder that is renamed.

A directory cannot be synced here, and there are no permission bits to keep: a new file has the access list of its folder.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import re
import stat
import time
from collections.abc import Callable
from contextlib import suppress

from msgspec import Struct

from holdfast.stores import platform
from holdfast.stores.files import FileEntry, Files, Names, entry_of
from holdfast.stores.platform import ALWAYS

PAUSES_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
"""Between tries to replace or remove what somebody has open."""

LONGEST = 255
"""Characters of a name on every file system of Windows, and no fewer bytes."""

LOCK = re.compile(r"\.holdfast\.[0-9a-f]{16}\.lock")
IN_USE = "it is open in this or another program"


def system_files() -> Files:
    """The file system of this machine, for the process that asks."""
    return Files() if platform.OPENS_DIRECTORIES else PathFiles()


class OpenFile(Struct):
    path: str
    identity: tuple[int, int]
    writable: bool = False
    lock: tuple[int, str] | None = None
    """The descriptor of its lock file, and where that is."""


_opened: dict[int, OpenFile] = {}
"""What saves of this process have open: directories under numbers below zero, files under their descriptors."""

_numbers = itertools.count(-2, -1)  # -1 is what a failed call of C's gives, and stands for nothing


class PathFiles(Files):
    """The file system of this machine by paths, for the process that makes it."""

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

    def hold(self, name: str, *, at: int) -> int | None:
        return None  # what is open here can be neither replaced nor removed

    def create(self, name: str, *, at: int, private: bool = False) -> int:
        return self._open_file(self._path(name, at), os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def _open_file(self, path: str, flags: int) -> int:
        self._check()
        descriptor = os.open(path, flags | ALWAYS, 0o666)
        try:
            # By path and not by descriptor: what the two say of identity is not the same in every Python. It is open, and stays.
            _opened[descriptor] = OpenFile(path, entry_of(os.lstat(path)).identity, bool(flags & os.O_RDWR))
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
        again = os.open(known.path, os.O_RDWR | ALWAYS)
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
                    known.identity = entry_of(os.lstat(after)).identity  # which on FAT is where the name stands
            elif known.path.startswith(before + os.sep):
                known.path = after + known.path[len(before) :]

    def exchange(self, first: str, second: str, *, at: int) -> bool:
        return False

    def link(self, source: str, target: str, *, at: int, source_at: int | None = None) -> None:
        os.link(os.path.normpath(self._path(source, at if source_at is None else source_at)), self._path(target, at))

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
        self._check()
        if platform.REMOVES_OPEN_FILES:
            raise OSError(errno.ENOTSUP, "no lock can be taken here")
        known = _known(descriptor)
        folder = os.path.dirname(known.path)
        name = hashlib.blake2b(repr(known.identity).encode(), digest_size=8).hexdigest()
        path = os.path.join(folder, f".holdfast.{name}.lock")
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | ALWAYS, 0o666)
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
    for number in [number for number, known in list(_opened.items()) if number >= 0 and known.path == path]:
        null = os.open(os.devnull, os.O_RDWR | ALWAYS)
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
