"""Other systems, as far as one can be had on Linux: `become(name)` takes away what they do not have and refuses what they refuse.

It is called once, in a process of its own, when Python's and numpy's modules are imported and nothing of Holdfast is.

linux        nothing is changed
darwin       no /proc, copy_file_range, fallocate, renameat2, process_vm_readv; renameatx_np and fcntl(F_FULLFSYNC) instead;
             statfs(2) has another struct, for which Linux's buffer is too short
darwin-old   the same without preadv (macOS 10), and on a file system that knows neither of the two
win32        `os.path` is ntpath and paths are `C:\\…` (`shown`, `real`); no directory is opened, no `dir_fd`; no pread, pwrite,
             fcntl, resource or fork; a file that is open, by any process, is neither renamed, replaced nor removed; a rename
             replaces nothing; a descriptor without O_BINARY is text; fsync wants one that may write; mmap has other parameters;
             files have no permission bits, and names no colons
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import io
import mmap
import ntpath
import os
import pathlib
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

__all__ = [
    "LINUX_ALONE",
    "POSIX_ALONE",
    "POSIX_MODULES",
    "SYSTEMS",
    "become",
    "fork",
    "real",
    "shown",
    "synced",
]

SYSTEMS = ("darwin", "darwin-old", "win32")

LINUX_ALONE = [
    "copy_file_range", "posix_fadvise", "posix_fallocate", "sched_getaffinity", "memfd_create", "eventfd", "splice",
    "fdatasync", "sendfile", "getrandom", "O_TMPFILE", "O_PATH", "O_DIRECT",
]  # fmt: skip

POSIX_ALONE = [
    "pread", "preadv", "pwrite", "pwritev", "fchmod", "fchown", "chown", "lchown", "fork", "forkpty", "register_at_fork",
    "fpathconf", "pathconf", "statvfs", "fstatvfs", "getuid", "geteuid", "getgid", "getegid", "uname", "sysconf", "sync",
    "mkfifo", "mknod", "nice", "killpg", "readv", "writev", "fchdir", "lockf", "O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC",
    "O_NONBLOCK", "O_SYNC", "O_DSYNC", "O_NOCTTY", "O_ASYNC",
]  # fmt: skip

POSIX_MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty")

O_BINARY, O_NOINHERIT = 0x8000_0000, 0x4000_0000

synced: list[int] = []
"""What kind of file each sync was for, by `stat.S_IFMT`."""

_true = SimpleNamespace(
    **{name: getattr(os, name) for name in dir(os)},
    io_open=io.open,
    CDLL=ctypes.CDLL,
    mmap=mmap.mmap,
)


fork = os.fork
"""To try what a process leaves that dies; no system has it that has none."""


def become(system: str) -> None:
    """Make this process one of another system."""
    if system.startswith("darwin"):
        _become_darwin(old=system == "darwin-old")
    elif system == "win32":
        _become_windows()


def _take_away(module: Any, names: list[str]) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def _no_proc(name: str) -> None:
    def call(path: Any, *args: Any, **options: Any) -> Any:
        if isinstance(path, str) and path.startswith("/proc"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return getattr(_true, name)(path, *args, **options)

    for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if getattr(_true, name) in known:
            known.add(call)
    setattr(os, name, call)


def _become_darwin(*, old: bool) -> None:
    import fcntl

    libc = _true.CDLL(None, use_errno=True)

    class Function:
        def __init__(self, call: Callable[..., int]) -> None:
            self.call = call
            self.argtypes: list[Any] = []

        def __call__(self, *args: Any) -> int:
            return self.call(*args)

    def renameatx_np(at: int, source: bytes, to: int, target: bytes, flags: int) -> int:
        return int(libc.renameat2(at, source, to, target, {2: 2, 4: 1}[flags]))

    def fstatfs(descriptor: int, answer: Any) -> int:
        raise AssertionError(f"2,168 bytes would be written to a buffer of {len(bytes(answer))}")

    class Library:
        def __init__(self, name: str | None, **options: Any) -> None:
            assert name is None
            self.fstatfs = Function(fstatfs)
            if not old:
                self.renameatx_np = Function(renameatx_np)

    def control(descriptor: int, command: int, *more: Any) -> int:
        if command == 51:
            if old:
                raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
            synced.append(stat.S_IFMT(os.fstat(descriptor).st_mode))
            return 0
        return int(true_control(descriptor, command, *more))

    def sync(descriptor: int) -> None:
        assert old, "fsync of macOS does not reach the disk"
        synced.append(stat.S_IFMT(os.fstat(descriptor).st_mode))

    true_control, fcntl.fcntl = fcntl.fcntl, control  # type: ignore[assignment]
    fcntl.F_FULLFSYNC = 51  # type: ignore[attr-defined]
    os.fsync = sync  # type: ignore[assignment]
    ctypes.CDLL = Library  # type: ignore[assignment, misc]
    sys.platform = "darwin"
    _take_away(os, [*LINUX_ALONE, *(["preadv", "pwritev", "readv", "writev"] if old else [])])
    _take_away(mmap, ["MADV_HUGEPAGE", "MADV_DONTFORK", "MAP_POPULATE"])
    for name in ("open", "stat", "listdir", "scandir", "readlink"):
        _no_proc(name)


def real(path: Any) -> Any:
    """The path on Linux of what Windows calls so."""
    if isinstance(path, int):
        return path
    text = os.fspath(path)
    if isinstance(text, bytes):
        return text
    text = text.replace("\\", "/")
    if text[1:2] == ":":
        assert text[0] in "Cc", f"there is no drive {text[:2]}"
        text = text[2:]
    return "/dev/null" if text.lower() == "nul" else text


def shown(path: str) -> str:
    """What Windows calls a path of Linux."""
    return "C:" + path.replace("/", "\\") if path.startswith("/") else path.replace("/", "\\")


def _as_on_windows(found: os.stat_result) -> os.stat_result:
    mode = found.st_mode
    bits = 0o777 if stat.S_ISDIR(mode) else 0o666 if mode & 0o200 else 0o444
    visible = (
        stat.S_IFMT(mode) | bits,
        found.st_ino,
        found.st_dev,
        found.st_nlink,
        0,
        0,
        found.st_size,
        *found[7:10],
    )
    times = {
        name: getattr(found, name)
        for name in dir(found)
        if name.startswith(("st_atime", "st_mtime", "st_ctime"))
    }
    return os.stat_result(visible, times)


def _in_use(path: str) -> bool:
    """Whether a process has a file open, or mapped, that is this one or lies below it."""
    for process in filter(str.isdigit, _true.listdir("/proc")):
        try:
            targets = list(_targets(f"/proc/{process}/fd"))
        except OSError:  # another user's, or it has ended
            continue
        if any(target == path or target.startswith(path + "/") for target in targets):
            return True
    with _true.io_open("/proc/self/maps") as lines:
        return any(line.rstrip("\n").endswith(path) or f" {path}/" in line for line in lines)


def _targets(folder: str) -> Iterator[str]:
    for one in _true.listdir(folder):
        with suppress(FileNotFoundError):  # that of this very listing
            yield _true.readlink(f"{folder}/{one}")


def _refused(path: str) -> PermissionError:
    return PermissionError(
        errno.EACCES,
        "The process cannot access the file because it is being used by another process",
        shown(path),
    )


def _check_name(path: str) -> str:
    name = path.rpartition("/")[2]
    if any(char in name for char in '<>:"|?*') or name.endswith((" ", ".")):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), shown(path))
    return path


class Entry:
    """As `os.DirEntry`."""

    def __init__(self, entry: os.DirEntry[str], folder: str) -> None:
        self._entry = entry
        self.name, self.path = entry.name, ntpath.join(folder, entry.name)
        self.is_dir, self.is_file, self.is_symlink = entry.is_dir, entry.is_file, entry.is_symlink

    def stat(self) -> os.stat_result:
        return _as_on_windows(self._entry.stat())


class Entries:
    """As what `os.scandir` gives."""

    def __init__(self, path: Any = ".") -> None:
        assert not isinstance(path, int), "Windows lists no descriptors"
        self._folder, self._entries = os.fspath(path), _true.scandir(real(path))

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        return Entry(next(self._entries), self._folder)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *error: object) -> None:
        self._entries.close()

    def close(self) -> None:
        self._entries.close()


def _windows_calls() -> dict[str, Callable[..., Any]]:
    def without(*directories: int | None) -> None:
        if any(at is not None for at in directories):
            raise NotImplementedError("dir_fd unavailable on this platform")

    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        without(dir_fd)
        place = real(path)
        if _true.path.isdir(place):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        assert flags & O_BINARY or place == "/dev/null", f"{path} is opened as text"
        if flags & os.O_CREAT:
            _check_name(place)
        return int(
            _true.open(place, flags & ~(O_BINARY | O_NOINHERIT), 0o666 if mode & 0o200 else 0o444)
        )

    def stat_(
        path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True
    ) -> os.stat_result:
        without(dir_fd)
        return _as_on_windows(_true.stat(real(path), follow_symlinks=follow_symlinks))

    def lstat(path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        return stat_(path, dir_fd=dir_fd, follow_symlinks=False)

    def fstat(descriptor: int) -> os.stat_result:
        return _as_on_windows(_true.fstat(descriptor))

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        without(dir_fd)
        _true.mkdir(_check_name(real(path)))

    def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
        without(dir_fd)
        _true.rmdir(real(path))

    def unlink(path: Any, *, dir_fd: int | None = None) -> None:
        without(dir_fd)
        place = real(path)
        if _true.path.isfile(place) and _in_use(place):
            raise _refused(place)
        if _true.path.isdir(place):
            raise PermissionError(errno.EACCES, "Access is denied", os.fspath(path))
        _true.unlink(place)

    def rename(
        source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        without(src_dir_fd, dst_dir_fd)
        if _true.path.lexists(real(target)):
            raise FileExistsError(
                errno.EEXIST,
                "Cannot create a file when that file already exists",
                os.fspath(target),
            )
        replace(source, target)

    def replace(
        source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        without(src_dir_fd, dst_dir_fd)
        before, after = real(source), _check_name(real(target))
        if _true.path.isdir(after):
            raise PermissionError(errno.EACCES, "Access is denied", os.fspath(target))
        for place in (before, after):
            if _true.path.lexists(place) and _in_use(place):
                raise _refused(place)
        _true.rename(before, after)

    def link(
        source: Any,
        target: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        **more: Any,
    ) -> None:
        without(src_dir_fd, dst_dir_fd)
        _true.link(real(source), _check_name(real(target)))

    def listdir(path: Any = ".") -> list[str]:
        assert not isinstance(path, int), "Windows lists no descriptors"
        return list(_true.listdir(real(path)))

    def fsync(descriptor: int) -> None:
        import fcntl_of_linux

        if fcntl_of_linux.fcntl(descriptor, fcntl_of_linux.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        synced.append(stat.S_IFMT(_true.fstat(descriptor).st_mode))

    def chmod(
        path: Any, mode: int, *, dir_fd: int | None = None, follow_symlinks: bool = True
    ) -> None:
        without(dir_fd)
        assert not isinstance(path, int)
        if not _true.path.isdir(real(path)):
            _true.chmod(real(path), 0o666 if mode & 0o200 else 0o444)

    def access(path: Any, mode: int, **options: Any) -> bool:
        return bool(_true.access(real(path), mode))

    return {
        "open": open_, "stat": stat_, "lstat": lstat, "fstat": fstat, "mkdir": mkdir, "rmdir": rmdir, "unlink": unlink,
        "remove": unlink, "rename": rename, "replace": replace, "link": link, "listdir": listdir, "scandir": Entries,
        "fsync": fsync, "chmod": chmod, "access": access, "getcwd": lambda: shown(_true.getcwd()),
    }  # fmt: skip


def _become_windows() -> None:
    import fcntl

    sys.modules["fcntl_of_linux"] = fcntl
    for name in POSIX_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    os.O_ACCMODE = 3  # type: ignore[attr-defined]
    _take_away(os, [*LINUX_ALONE, *POSIX_ALONE])
    for name, call in _windows_calls().items():
        setattr(os, name, call)
    os.O_BINARY, os.O_NOINHERIT = O_BINARY, O_NOINHERIT  # type: ignore[attr-defined]
    os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks = set(), {os.stat}, {os.stat}
    os.name, sys.platform = "nt", "win32"
    os.sep, os.altsep, os.pathsep, os.devnull, os.path = "\\", "/", ";", "nul", ntpath
    sys.modules["os.path"] = ntpath

    def opened(file: Any, *args: Any, **options: Any) -> Any:
        return _true.io_open(file if isinstance(file, int) else real(file), *args, **options)

    def disk_usage(path: Any) -> SimpleNamespace:
        found = _true.statvfs(real(path))
        return SimpleNamespace(free=found.f_bavail * found.f_frsize)

    builtins.open = io.open = opened
    shutil.disk_usage = disk_usage  # type: ignore[assignment]

    class Library(_true.CDLL):  # type: ignore[misc, name-defined]
        def __init__(self, name: str | None, *args: Any, **options: Any) -> None:
            if name is None:
                raise TypeError("argument of type 'NoneType' is not iterable")
            super().__init__(name, *args, **options)

    ctypes.CDLL = Library  # type: ignore[misc]

    class Mapping(_true.mmap):  # type: ignore[misc, name-defined]
        def __new__(
            cls,
            fileno: int,
            length: int,
            tagname: str | None = None,
            access: int = 0,
            offset: int = 0,
        ) -> Any:
            assert tagname is None or isinstance(tagname, str), (
                "on Windows the third parameter is a name"
            )
            return _true.mmap.__new__(cls, fileno, length, access=access, offset=offset)

        @property
        def madvise(self) -> None:
            raise AttributeError("madvise")

    mmap.mmap = Mapping  # type: ignore[misc]
    _take_away(mmap, [name for name in dir(mmap) if name.startswith(("MAP_", "PROT_", "MADV_"))])
    if hasattr(pathlib, "_windows_flavour"):  # Python 3.11
        pathlib._windows_flavour.is_supported = True
    elif "__new__" in vars(pathlib.WindowsPath):
        del pathlib.WindowsPath.__new__
