"""Hides the differences between Linux, macOS and Windows from the code that touches files.

This module checks once, at import, which calls exist. It checks for the call itself and not for the
name of the system, so a Python that was built without a call is served as well. No other module
that touches files checks which system it runs on. `docs/compatibility.md` lists what is weaker
where.

    a call                       without it
    preadv                       pread and a copy; without pread, seek and read under a lock
    pwrite                       seek and write under a lock
    copy_file_range              the bytes are copied through memory
    fallocate                    a full disk shows during the write, not before it
    renameat2                    renameatx_np on macOS; otherwise `engine/commit/transactions` uses
                                 two renames, or a second name
    fsync that reaches the disk  fcntl(F_FULLFSYNC) on macOS
    flock, openat and similar    `stores/files.PathFiles` uses paths and lock files
    process_vm_readv             ordinary reads
    getrlimit                    the number of open files that every system allows
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from types import ModuleType

from holdfast.core.runtime import make_fork_safe

UNSUPPORTED_ERRNOS = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})
"""Errors of a kernel or file system that lacks a call or one of its flags (NFS, overlayfs: EINVAL).
"""

OPEN_FLAGS = (
    getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
)
"""Flags for every open. Without O_BINARY, Windows writes two bytes for each newline."""

DIRECTORY: int = getattr(os, "O_DIRECTORY", 0)

NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)

NON_BLOCKING: int = getattr(os, "O_NONBLOCK", 0)
"""Without this flag, opening a FIFO that has no writer would wait forever."""

PATH_ONLY: int = getattr(os, "O_PATH", 0)
"""Opens a file only to keep its inode alive. 0 if the system has no such flag."""

HAS_PREAD = hasattr(os, "pread")
"""Whether a read leaves the position of the file unchanged."""

OPENS_DIRECTORIES = (
    bool(DIRECTORY and NO_FOLLOW)
    and {os.open, os.stat, os.mkdir, os.rmdir, os.unlink, os.rename} <= os.supports_dir_fd
    and {os.listdir, os.scandir} <= os.supports_fd
)
"""Whether a descriptor can refer to a directory, and names can be looked up relative to it."""

MAP_PRIVATE: int | None = getattr(mmap, "MAP_PRIVATE", None)
MAP_SHARED: int | None = getattr(mmap, "MAP_SHARED", None)
"""Flags of a mapping. None on Windows, whose mappings have no flags."""

REMOVES_OPEN_FILES = os.name != "nt"
"""Whether a file can be removed or replaced while it is open."""

HAS_DRIVES = os.name == "nt"
"""Whether a path may start with `C:`, and a backslash separates its parts."""

BLOCK_NBYTES = 1 << 20
"""Bytes that are copied through memory at a time. Larger blocks do not fit the second-level cache.
"""

MIN_OPEN_FILES = 512
"""Files that every system lets a process open: the initial limit of the C library of Windows."""

# Flags of renameat2(2), since Linux 3.15.
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2

# Flags of renameatx_np(2), since macOS 10.12.
RENAME_SWAP = 2
RENAME_EXCL = 4

# A flag of sync_file_range(2): start writing, and do not wait.
SYNC_FILE_RANGE_WRITE = 2


def _import_if_present(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_fcntl = _import_if_present("fcntl")
_resource = _import_if_present("resource")
_full_sync_command: int | None = getattr(_fcntl, "F_FULLFSYNC", None)

# For names that not every system has: through these, mypy does not check that they exist.
_os: ModuleType = os
_mmap: ModuleType = mmap

_position_locks: dict[int, threading.Lock] = {}
"""For each descriptor, the lock that protects its position. Used without pread or pwrite."""


@cache
def c_function(name: str) -> ctypes._NamedFuncPointer | None:
    """Return a function of the C library, or None if there is no such function or no library."""
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name, None)
    except (OSError, TypeError):
        # Windows needs the file name of a library.
        return None


def check_c_result(result: int, *paths: str) -> bool:
    """Return whether a call through ctypes succeeded, or False if the system does not support it.

    Args:
        result: What the call returned.
        paths: One or two paths for the message.

    Raises:
        OSError: The call failed for another reason.
    """
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in UNSUPPORTED_ERRNOS:
        return False
    error = OSError(code, os.strerror(code), *paths[:1])
    if len(paths) > 1:
        error.filename2 = paths[1]
    raise error


def _read_into_buffer(descriptor: int, buffers: list[memoryview], start: int) -> int:
    (out,) = buffers
    block = read_block(descriptor, min(out.nbytes, BLOCK_NBYTES), start)
    out[: len(block)] = block
    return len(block)


preadv: Callable[[int, list[memoryview], int], int] = getattr(os, "preadv", _read_into_buffer)
"""Reads from an offset into one buffer and returns the number of bytes; 0 at the end of the file.
"""


if HAS_PREAD:

    def read_block(descriptor: int, nbytes: int, start: int) -> bytes:
        """Read at most `nbytes` bytes from an offset; none at the end of the file."""
        block: bytes = _os.pread(descriptor, nbytes, start)
        return block

else:

    def read_block(descriptor: int, nbytes: int, start: int) -> bytes:
        """Read at most `nbytes` bytes from an offset; none at the end of the file."""
        with _get_position_lock(descriptor):
            position = os.lseek(descriptor, 0, os.SEEK_CUR)
            try:
                os.lseek(descriptor, start, os.SEEK_SET)
                return os.read(descriptor, nbytes)
            finally:
                # The descriptor may belong to a file object of the caller, which relies on it.
                os.lseek(descriptor, position, os.SEEK_SET)


if hasattr(os, "pwrite"):

    def write_some(descriptor: int, data: memoryview, offset: int) -> int:
        """Write some of the bytes at an offset, and return how many were written."""
        count: int = _os.pwrite(descriptor, data, offset)
        return count

else:

    def write_some(descriptor: int, data: memoryview, offset: int) -> int:
        """Write some of the bytes at an offset, and return how many were written."""
        with _get_position_lock(descriptor):
            os.lseek(descriptor, offset, os.SEEK_SET)
            return os.write(descriptor, data)


def _get_position_lock(descriptor: int) -> threading.Lock:
    lock = _position_locks.get(descriptor)
    if lock is None:
        # Another thread may do the same at this moment. `setdefault` gives both the same lock.
        lock = _position_locks.setdefault(descriptor, make_fork_safe(threading.Lock()))
    return lock


def copy_range(source: int, target: int, nbytes: int, *, source_offset: int, offset: int) -> int:
    """Copy some bytes from file to file in the kernel, and return how many.

    Raises:
        OSError: With ENOSYS if the system has no such call.
    """
    if not hasattr(os, "copy_file_range"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    count: int = os.copy_file_range(source, target, nbytes, source_offset, offset)
    return count


def sync(descriptor: int) -> None:
    """Wait until the bytes of a file would survive a power cut, as far as the system promises that."""
    if _fcntl is not None and _full_sync_command is not None:
        try:
            # fsync(2) of macOS hands the bytes to the disk, which may keep them in its own cache.
            _fcntl.fcntl(descriptor, _full_sync_command)
        except OSError as error:
            # Some file systems, such as FAT and SMB, do not have this command.
            if error.errno not in UNSUPPORTED_ERRNOS | {errno.ENOTTY}:
                raise
        else:
            return
    os.fsync(descriptor)


@cache
def _get_sync_file_range() -> ctypes._NamedFuncPointer | None:
    function = c_function("sync_file_range")
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


def begin_sync(descriptor: int, offset: int, nbytes: int) -> None:
    """Hint that the disk may start to write a range. Errors are ignored: `sync` reports them."""
    sync_file_range = _get_sync_file_range()
    if sync_file_range is not None:
        sync_file_range(descriptor, offset, nbytes, SYNC_FILE_RANGE_WRITE)


def sync_directory(path: str) -> None:
    """Do the same as `sync` for the names in a directory. Does nothing on Windows."""
    if not OPENS_DIRECTORIES:
        return
    descriptor = os.open(path, os.O_RDONLY | DIRECTORY | OPEN_FLAGS)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Take the exclusive lock (flock) of an open file without waiting.

    Returns:
        False if somebody else has the lock.

    Raises:
        OSError: With ENOTSUP if the system has no such locks.
    """
    if _fcntl is None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    try:
        _fcntl.flock(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Release the lock of an open file."""
    if _fcntl is not None:
        _fcntl.flock(descriptor, _fcntl.LOCK_UN)


def change_mode(descriptor: int, mode: int) -> None:
    """Set the permission bits of an open file."""
    if not hasattr(os, "fchmod"):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    os.fchmod(descriptor, mode)


def change_owner(descriptor: int, user: int, group: int) -> None:
    """Set the user and the group of an open file."""
    if not hasattr(os, "fchown"):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    os.fchown(descriptor, user, group)


def longest_name(descriptor: int) -> int:
    """Return how many bytes a name in an open directory may have."""
    if not hasattr(os, "fpathconf"):
        return 255
    nbytes: int = os.fpathconf(descriptor, "PC_NAME_MAX")
    return nbytes


def rename_new(source: str, target: str, *, dir_fd: int) -> bool:
    """Rename a file unless the target exists. Returns False if the system cannot do this in one
    step."""
    return _rename_with_flags(
        source, target, dir_fd=dir_fd, linux_flags=RENAME_NOREPLACE, macos_flags=RENAME_EXCL
    )


def exchange(first: str, second: str, *, dir_fd: int) -> bool:
    """Exchange two names. Returns False if the system cannot do this in one step."""
    return _rename_with_flags(
        first, second, dir_fd=dir_fd, linux_flags=RENAME_EXCHANGE, macos_flags=RENAME_SWAP
    )


def _rename_with_flags(
    source: str, target: str, *, dir_fd: int, linux_flags: int, macos_flags: int
) -> bool:
    # Python has neither function. glibc 2.28 and macOS 10.12 have one each, with equal parameters.
    for name, flags in (("renameat2", linux_flags), ("renameatx_np", macos_flags)):
        rename = c_function(name)
        if rename is not None:
            rename.argtypes = [
                ctypes.c_int,
                ctypes.c_char_p,
                ctypes.c_int,
                ctypes.c_char_p,
                ctypes.c_uint,
            ]
            result = rename(dir_fd, os.fsencode(source), dir_fd, os.fsencode(target), flags)
            return check_c_result(result, source, target)
    return False


def reserve(descriptor: int, nbytes: int) -> bool:
    """Allocate the disk blocks of a file. Returns False if the file system cannot."""
    # Not os.posix_fallocate: if the file system cannot do it, glibc writes a byte into every block.
    fallocate = c_function("fallocate")
    if fallocate is None:
        return False
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    while True:
        try:
            return check_c_result(fallocate(descriptor, 0, 0, nbytes))
        except InterruptedError:
            continue


def get_file_system_type(descriptor: int) -> int:
    """Return the type of a file system as in statfs(2) of Linux, or -1 if it is not known."""
    # On other systems the struct is different and longer than the buffer below.
    fstatfs = c_function("fstatfs") if sys.platform == "linux" else None
    if fstatfs is None:
        return -1

    # The type is the first field, a long, of a struct of 120 bytes. On s390 that field is an int:
    # there, every file system counts as shared.
    buffer = (ctypes.c_long * 64)()
    fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]
    if not check_c_result(fstatfs(descriptor, buffer)):
        return -1
    return int(buffer[0]) & 0xFFFFFFFF


def map_private(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map the first bytes of a file into memory. Writing to it changes a private copy of the page."""
    if not hasattr(mmap, "MAP_NORESERVE"):
        return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)
    flags = _mmap.MAP_PRIVATE | _mmap.MAP_NORESERVE
    return mmap.mmap(descriptor, nbytes, flags, _mmap.PROT_READ | _mmap.PROT_WRITE)


def allocate_unforked_memory(nbytes: int, *, large_pages: bool = True) -> mmap.mmap:
    """Allocate memory that forked children do not share, in large pages if `large_pages` is set."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, nbytes)
    memory = mmap.mmap(-1, nbytes, _mmap.MAP_PRIVATE | _mmap.MAP_ANONYMOUS)

    # Without DONTFORK, a child would share the pages. When the parent writes to one, the kernel
    # would give the parent a new page, and a GPU would go on to use the old one.
    advice_names = ["MADV_DONTFORK"]
    if large_pages:
        advice_names.insert(0, "MADV_HUGEPAGE")
    for name in advice_names:
        if hasattr(mmap, name) and hasattr(memory, "madvise"):
            memory.madvise(getattr(mmap, name))
    return memory


LARGE_PAGE_NBYTES = 2 << 20

STRETCH_NBYTES = 8 << 20
"""Memory for which one large page is tried. In less memory, page faults take no time worth saving.
"""

SLOW_PAGE_NS = 800_000
"""Clearing a large page takes 200 µs. It takes milliseconds if the kernel has to move other pages
for it, or if the host of a virtual machine has to give the memory back; 512 small pages take 1.2
ms."""


def request_large_pages(places: Iterable[tuple[int, int]]) -> None:
    """Ask the kernel for large pages for memory that was not touched yet and will be overwritten.

    `torch.empty` does not ask, and the page faults of a gigabyte take longer than reading it: a
    load of 1 GB takes 0.17 s of processor time with large pages and 0.5 s without.

    Args:
        places: The address and the length of each piece of memory.
    """
    madvise = c_function("madvise") if hasattr(mmap, "MADV_HUGEPAGE") else None
    if madvise is None:
        return
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for address, nbytes in places:
        if nbytes < STRETCH_NBYTES:
            continue
        first = -(-address // LARGE_PAGE_NBYTES) * LARGE_PAGE_NBYTES
        last = (address + nbytes) // LARGE_PAGE_NBYTES * LARGE_PAGE_NBYTES
        for start in range(first, last, STRETCH_NBYTES):
            stop = min(start + STRETCH_NBYTES, last)
            madvise(start, stop - start, mmap.MADV_HUGEPAGE)
            began_ns = time.thread_time_ns()
            ctypes.memset(start, 0, 1)
            if time.thread_time_ns() - began_ns > SLOW_PAGE_NS:
                # Memory is scarce or in small pieces. Small pages are faster for all that is left.
                tried = start + LARGE_PAGE_NBYTES
                madvise(tried, stop - tried, mmap.MADV_NOHUGEPAGE)
                return


def most_open_files() -> int:
    """Return how many files this process may have open."""
    if _resource is None:
        return MIN_OPEN_FILES
    soft_limit: int = _resource.getrlimit(_resource.RLIMIT_NOFILE)[0]
    if soft_limit == _resource.RLIM_INFINITY:
        return sys.maxsize
    return soft_limit


def count_free_nbytes(path: str) -> int:
    """Return how many bytes can still be written to the file system of `path`."""
    if not hasattr(os, "statvfs"):
        from shutil import disk_usage

        return disk_usage(path).free
    status = _os.statvfs(path)
    return int(status.f_bavail * status.f_frsize)
