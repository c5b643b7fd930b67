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
"""Errors of a kernel or file system that lacks a call or a flag (NFS, overlayfs: EINVAL)."""

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

CAN_DELETE_OPEN_FILES = os.name != "nt"
"""Whether a file can be deleted or replaced while it is open. Windows refuses both."""

HAS_DRIVES = os.name == "nt"
"""Whether a path may start with `C:`, and a backslash separates its parts."""

BLOCK_NBYTES = 1 << 20
"""Bytes that are copied through memory at a time. Larger blocks do not fit the L2 cache."""

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
    """Return a module of the standard library, or None if this system does not have it."""
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
    """Read a block into one buffer, for systems without `os.preadv`, which has these parameters."""
    (out,) = buffers
    block = read_block(descriptor, min(out.nbytes, BLOCK_NBYTES), start)
    out[: len(block)] = block
    return len(block)


preadv: Callable[[int, list[memoryview], int], int] = getattr(os, "preadv", _read_into_buffer)
"""Reads from an offset into one buffer. Returns the number of bytes; 0 at the end of the file."""


def _seek_and_read(descriptor: int, nbytes: int, start: int) -> bytes:
    """Read at an offset, for systems without `os.pread`: seek, read, and seek back."""
    with _get_position_lock(descriptor):
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        try:
            os.lseek(descriptor, start, os.SEEK_SET)
            return os.read(descriptor, nbytes)
        finally:
            # The descriptor may belong to a file object of the caller, which relies on the
            # position.
            os.lseek(descriptor, position, os.SEEK_SET)


read_block: Callable[[int, int, int], bytes] = getattr(os, "pread", _seek_and_read)
"""Reads at most so many bytes from an offset; none at the end of the file."""


def _seek_and_write(descriptor: int, data: memoryview, offset: int) -> int:
    """Write at an offset, for systems without `os.pwrite`: seek and write."""
    # The position is not restored: only saves write, and they always state the offset.
    with _get_position_lock(descriptor):
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, data)


write_some: Callable[[int, memoryview, int], int] = getattr(os, "pwrite", _seek_and_write)
"""Writes some of the bytes at an offset, and returns how many were written."""


def _get_position_lock(descriptor: int) -> threading.Lock:
    """Return the lock that protects the position of an open file."""
    lock = _position_locks.get(descriptor)
    if lock is None:
        # Another thread may do the same at this moment. `setdefault` gives both the same lock.
        lock = _position_locks.setdefault(descriptor, make_fork_safe(threading.Lock()))
    return lock


def copy_range(
    source_descriptor: int,
    target_descriptor: int,
    nbytes: int,
    *,
    source_offset: int,
    target_offset: int,
) -> int:
    """Copy some bytes from file to file in the kernel, and return how many.

    Raises:
        OSError: With ENOSYS if the system has no such call.
    """
    if not hasattr(os, "copy_file_range"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    copied_nbytes: int = os.copy_file_range(
        source_descriptor, target_descriptor, nbytes, source_offset, target_offset
    )
    return copied_nbytes


def sync(descriptor: int) -> None:
    """Wait until the bytes of a file are on the disk, as far as the system promises that."""
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
    """Return sync_file_range(2) of the C library, or None if the system does not have it."""
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
    """Wait until the names in a directory are on the disk. Does nothing on Windows."""
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


def _refuse_call(descriptor: int, *values: int) -> None:
    """Raise `OSError` with ENOTSUP, in place of a call that the system does not have."""
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


change_mode: Callable[[int, int], None] = getattr(os, "fchmod", _refuse_call)
"""Sets the permission bits of an open file."""

change_owner: Callable[[int, int, int], None] = getattr(os, "fchown", _refuse_call)
"""Sets the user and the group of an open file."""


def longest_name(descriptor: int) -> int:
    """Return how many bytes a name in an open directory may have."""
    # Windows has no such call. Its file systems allow 255 characters, which is no fewer bytes.
    if not hasattr(os, "fpathconf"):
        return 255
    nbytes: int = os.fpathconf(descriptor, "PC_NAME_MAX")
    return nbytes


def rename_new(old_name: str, new_name: str, *, dir_fd: int) -> bool:
    """Rename a file unless the new name exists, in one step.

    Returns:
        False, without any change, if the system cannot do this.
    """
    return _rename_with_flags(
        old_name, new_name, dir_fd=dir_fd, linux_flags=RENAME_NOREPLACE, macos_flags=RENAME_EXCL
    )


def exchange(first: str, second: str, *, dir_fd: int) -> bool:
    """Exchange two names in one step.

    Returns:
        False, without any change, if the system cannot do this.
    """
    return _rename_with_flags(
        first, second, dir_fd=dir_fd, linux_flags=RENAME_EXCHANGE, macos_flags=RENAME_SWAP
    )


def _rename_with_flags(
    old_name: str, new_name: str, *, dir_fd: int, linux_flags: int, macos_flags: int
) -> bool:
    """Call the rename function of the system that takes flags, which Python does not have.

    Args:
        old_name: The name in the directory `dir_fd`.
        new_name: The other name in this directory.
        dir_fd: A descriptor of the directory.
        linux_flags: The flags of renameat2(2).
        macos_flags: The flags of renameatx_np(2).

    Returns:
        False, without any change, if the system has no such function, or not these flags.
    """
    # glibc 2.28 and macOS 10.12 have one of these functions each, with equal parameters.
    for function_name, flags in (("renameat2", linux_flags), ("renameatx_np", macos_flags)):
        rename = c_function(function_name)
        if rename is None:
            continue
        rename.argtypes = [
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_uint,
        ]
        result = rename(dir_fd, os.fsencode(old_name), dir_fd, os.fsencode(new_name), flags)
        return check_c_result(result, old_name, new_name)
    return False


def reserve(descriptor: int, nbytes: int) -> bool:
    """Allocate the disk blocks of a file. Returns False if the file system cannot do this."""
    # Not os.posix_fallocate: if the file system cannot do it, glibc writes a byte into every block.
    fallocate = c_function("fallocate")
    if fallocate is None:
        return False
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    # A signal may interrupt the call, on a large file again and again.
    while True:
        try:
            return check_c_result(fallocate(descriptor, 0, 0, nbytes))
        except InterruptedError:
            continue


def get_file_system_type(descriptor: int) -> int:
    """Return the type of the file system of an open directory, or -1 if it is unknown.

    The types are the magic numbers of statfs(2) of Linux, such as 0xEF53 for ext4.
    """
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
    """Map the first bytes of a file into memory.

    Writing to the memory does not change the file, only a private copy of the page.
    """
    if not hasattr(mmap, "MAP_NORESERVE"):
        return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)
    # Without NORESERVE, the kernel could refuse a file that is larger than the free memory, because
    # each of its pages might be written to.
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
        # macOS has madvise without these kinds of advice.
        if hasattr(mmap, name) and hasattr(memory, "madvise"):
            memory.madvise(getattr(mmap, name))
    return memory


LARGE_PAGE_NBYTES = 2 << 20

LARGE_PAGE_TEST_NBYTES = 8 << 20
"""Large pages are tested after each block of this size.

In less memory, page faults take no time worth saving.
"""

SLOW_PAGE_NS = 800_000
"""Clearing a large page takes 200 µs. It takes milliseconds if the kernel has to move other pages,
or if the host of a virtual machine has to give the memory back; 512 small pages take 1.2 ms."""


def request_large_pages(memory_ranges: Iterable[tuple[int, int]]) -> None:
    """Ask the kernel for large pages for memory that was not touched yet and will be overwritten.

    `torch.empty` does not ask, and the page faults of a gigabyte take longer than reading it: a
    load of 1 GB takes 0.17 s of processor time with large pages and 0.5 s without.

    If a large page takes long, memory is scarce or fragmented. All that is left then keeps small
    pages, which are faster.

    Args:
        memory_ranges: The address and the size of each range of memory.
    """
    madvise = c_function("madvise") if hasattr(mmap, "MADV_HUGEPAGE") else None
    if madvise is None:
        return
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for address, nbytes in memory_ranges:
        if nbytes < LARGE_PAGE_TEST_NBYTES:
            continue
        # Large pages start at multiples of their size.
        first_page = -(-address // LARGE_PAGE_NBYTES) * LARGE_PAGE_NBYTES
        stop = (address + nbytes) // LARGE_PAGE_NBYTES * LARGE_PAGE_NBYTES
        for block_start in range(first_page, stop, LARGE_PAGE_TEST_NBYTES):
            block_stop = min(block_start + LARGE_PAGE_TEST_NBYTES, stop)
            madvise(block_start, block_stop - block_start, mmap.MADV_HUGEPAGE)
            # Writing one byte makes the kernel clear the first page of the block.
            start_ns = time.thread_time_ns()
            ctypes.memset(block_start, 0, 1)
            if time.thread_time_ns() - start_ns > SLOW_PAGE_NS:
                untouched_start = block_start + LARGE_PAGE_NBYTES
                madvise(untouched_start, block_stop - untouched_start, mmap.MADV_NOHUGEPAGE)
                return


def most_open_files() -> int:
    """Return how many files this process may have open: the soft limit, `ulimit -n`."""
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
