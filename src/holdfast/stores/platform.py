"""What this system has: each call that Linux, macOS and Windows do not share, and what stands in for it where it is missing.

Nothing else that touches files asks which system it runs on. Here it is asked once, when the module is imported, and by what there
is and not by name, so that a Python built without a call is served as well. `docs/compatibility.md` says what is weaker where.

    a call                             where it is missing
    preadv                             pread through a block; without that, seek and read, one thread at a time for each descriptor
    pwrite                             seek and write, likewise
    copy_file_range, fallocate         bytes go through memory; the disk may be found full while it is written to, not before
    renameat2                          macOS has renameatx_np; else two renames, or a second name (`engine/commit/transactions`)
    fsync that reaches the disk        macOS: fcntl(F_FULLFSYNC)
    flock, openat and their kind       `stores/files.PathFiles`: paths, and files that say who is at work
    process_vm_readv                   ordinary reads
    getrlimit                          as many open files as every system allows
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

from holdfast.core.runtime import renewed

ABSENT = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What a kernel or a file system answers that does not know a call, or a flag of it (NFS and overlayfs: EINVAL)."""

ALWAYS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
"""For everything that is opened. BINARY: Windows would otherwise write two bytes where a line ends."""

DIRECTORY: int = getattr(os, "O_DIRECTORY", 0)
NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)  # Opening a FIFO that nobody writes to must not wait.

HOLD: int = getattr(
    os, "O_PATH", 0
)  # Holds a file without reading it, for as long as it is open; 0 where there is none.
READS_AT = hasattr(os, "pread")  # Whether a read leaves the position of a file alone.

OPENS_DIRECTORIES = (
    bool(DIRECTORY and NO_LINK)
    and {os.open, os.stat, os.mkdir, os.rmdir, os.unlink, os.rename} <= os.supports_dir_fd
    and {os.listdir, os.scandir} <= os.supports_fd
)
"""Whether a directory can be held by a descriptor, and names be looked up in there."""

MAP_PRIVATE: int | None = getattr(mmap, "MAP_PRIVATE", None)
MAP_SHARED: int | None = getattr(
    mmap, "MAP_SHARED", None
)  # Flags of a mapping; None where mappings have none.
REMOVES_OPEN_FILES = (
    os.name != "nt"
)  # Whether the name of a file that is open can be removed, or given to another file.
DRIVES = os.name == "nt"  # Whether `C:` begins a path, and a backslash is a slash.
BLOCK = (
    1 << 20
)  # Bytes at a time that go through memory of ours; larger blocks leave the second-level cache.
FEW_FILES = 512  # Files that every system lets a process have open: what the C library of Windows begins with.
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2  # Flags of renameat2(2), Linux 3.15.
RENAME_SWAP, RENAME_EXCL = 2, 4  # Flags of renameatx_np(2), macOS 10.12.


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_fcntl, _resource = _module("fcntl"), _module("resource")
_os: ModuleType = os
_mmap: ModuleType = (
    mmap  # For names that not every system has: a type checker on another one need not know them.
)
_FULL_SYNC: int | None = getattr(_fcntl, "F_FULLFSYNC", None)
_turns: dict[int, threading.Lock] = {}  # By descriptor: who may move its position.


@cache
def c_function(name: str) -> ctypes._NamedFuncPointer | None:
    """A function of the C library; None where there is none of this name, or no C library to ask."""
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name, None)
    except (OSError, TypeError):  # Windows wants a name
        return None


def called(result: int, *names: str) -> bool:
    """What a call through ctypes came to: True, False where it does not exist here, or its error raised."""
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in ABSENT:
        return False
    raise OSError(code, os.strerror(code), *names[:1], *([None, names[1]] if names[1:] else []))


def _read_through_block(descriptor: int, buffers: list[memoryview], start: int) -> int:
    (out,) = buffers
    block = read_block(descriptor, min(out.nbytes, BLOCK), start)
    out[: len(block)] = block
    return len(block)


preadv: Callable[[int, list[memoryview], int], int] = getattr(os, "preadv", _read_through_block)
"""Reads some bytes from a place on into one buffer, and returns how many; 0 at the end."""


if hasattr(os, "pread"):

    def read_block(descriptor: int, nbytes: int, start: int) -> bytes:
        block: bytes = _os.pread(descriptor, nbytes, start)
        return block

else:

    def read_block(descriptor: int, nbytes: int, start: int) -> bytes:
        with _turn(descriptor):
            before = os.lseek(descriptor, 0, os.SEEK_CUR)
            try:
                os.lseek(descriptor, start, os.SEEK_SET)
                return os.read(descriptor, nbytes)
            finally:
                # The descriptor may be that of a caller's file, which has its own idea of where it is.
                os.lseek(descriptor, before, os.SEEK_SET)


if hasattr(os, "pwrite"):

    def write_some(descriptor: int, data: memoryview, offset: int) -> int:
        count: int = _os.pwrite(descriptor, data, offset)
        return count

else:

    def write_some(descriptor: int, data: memoryview, offset: int) -> int:
        with _turn(descriptor):
            os.lseek(descriptor, offset, os.SEEK_SET)
            return os.write(descriptor, data)


def _turn(descriptor: int) -> threading.Lock:
    found = _turns.get(descriptor)
    return found if found is not None else _turns.setdefault(descriptor, renewed(threading.Lock()))


def copy_range(source: int, target: int, nbytes: int, *, source_offset: int, offset: int) -> int:
    if not hasattr(os, "copy_file_range"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    copied: int = os.copy_file_range(source, target, nbytes, source_offset, offset)
    return copied


def sync(descriptor: int) -> None:
    """Come back when what was written would survive a power cut, as far as the system can promise that."""
    if _fcntl is not None and _FULL_SYNC is not None:
        try:
            # fsync(2) of macOS hands the bytes to the disk, which may keep them in its own memory.
            _fcntl.fcntl(descriptor, _FULL_SYNC)
        except OSError as error:
            if error.errno not in ABSENT | {
                errno.ENOTTY
            }:  # a file system that does not know it: FAT, SMB
                raise
        else:
            return
    os.fsync(descriptor)


_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE of Linux: begin, and do not wait.


@cache
def _sync_file_range() -> ctypes._NamedFuncPointer | None:
    found = c_function("sync_file_range")
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found


def begin_sync(descriptor: int, offset: int, nbytes: int) -> None:
    """Have the disk begin with a range that was written. A hint: nothing is promised, and what fails shows when it is synced."""
    call = _sync_file_range()
    if call is not None:
        call(descriptor, offset, nbytes, _BEGIN_WRITING)


def sync_directory(path: str) -> None:
    """As `sync`, for the names in a directory; nothing where no directory can be opened."""
    if not OPENS_DIRECTORIES:
        return
    descriptor = os.open(path, os.O_RDONLY | DIRECTORY | ALWAYS)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Take the exclusive lock (flock) of what is open, without waiting; False where someone else has it. ENOTSUP without locks."""
    if _fcntl is None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    try:
        _fcntl.flock(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    if _fcntl is not None:
        _fcntl.flock(descriptor, _fcntl.LOCK_UN)


def change_mode(descriptor: int, mode: int) -> None:
    if not hasattr(os, "fchmod"):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    os.fchmod(descriptor, mode)


def change_owner(descriptor: int, user: int, group: int) -> None:
    if not hasattr(os, "fchown"):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    os.fchown(descriptor, user, group)


def longest_name(descriptor: int) -> int:
    if not hasattr(os, "fpathconf"):
        return 255
    found: int = os.fpathconf(descriptor, "PC_NAME_MAX")
    return found


def rename_new(source: str, target: str, *, at: int) -> bool:
    return _renamed(source, target, at=at, linux=RENAME_NOREPLACE, macos=RENAME_EXCL)


def exchange(first: str, second: str, *, at: int) -> bool:
    return _renamed(first, second, at=at, linux=RENAME_EXCHANGE, macos=RENAME_SWAP)


def _renamed(source: str, target: str, *, at: int, linux: int, macos: int) -> bool:
    # Python has no name for either: glibc 2.28 and macOS 10.12 have one each, with the same parameters.
    for name, flags in (("renameat2", linux), ("renameatx_np", macos)):
        call = c_function(name)
        if call is not None:
            call.argtypes = [
                ctypes.c_int,
                ctypes.c_char_p,
                ctypes.c_int,
                ctypes.c_char_p,
                ctypes.c_uint,
            ]
            return called(
                call(at, os.fsencode(source), at, os.fsencode(target), flags), source, target
            )
    return False


def reserve(descriptor: int, nbytes: int) -> bool:
    """Have the file system promise its blocks to a file. False where it cannot."""
    # Not os.posix_fallocate: where the file system cannot, glibc writes a byte into every block.
    call = c_function("fallocate")
    if call is None:
        return False
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    while True:
        try:
            return called(call(descriptor, 0, 0, nbytes))
        except InterruptedError:
            continue


def file_system(descriptor: int) -> int:
    """The kind of a file system, as statfs(2) of Linux says it; -1 elsewhere, where the struct is another and far longer."""
    call = c_function("fstatfs") if sys.platform == "linux" else None
    if call is None:
        return -1
    # The kind is the first field, a long, of a struct of 120 bytes; s390 alone has an int there, and is taken for shared.
    answer = (ctypes.c_long * 64)()
    call.argtypes = [ctypes.c_int, ctypes.c_void_p]
    return int(answer[0]) & 0xFFFFFFFF if called(call(descriptor, answer)) else -1


def map_private(descriptor: int, nbytes: int) -> mmap.mmap:
    """The first bytes of a file as memory. Whoever writes to it changes their copy of the page, never the file."""
    if hasattr(mmap, "MAP_NORESERVE"):
        flags, access = _mmap.MAP_PRIVATE | _mmap.MAP_NORESERVE, _mmap.PROT_READ | _mmap.PROT_WRITE
        return mmap.mmap(descriptor, nbytes, flags, access)
    return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)


def own_memory(nbytes: int, *, large_pages: bool = True) -> mmap.mmap:
    """Memory, in large pages where they are wanted and can be had, which no forked child has."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, nbytes)
    area = mmap.mmap(-1, nbytes, _mmap.MAP_PRIVATE | _mmap.MAP_ANONYMOUS)
    # DONTFORK: a child would share the pages, and the first of both to write would be moved to others, away from a GPU's.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK") if large_pages else ("MADV_DONTFORK",):
        if hasattr(mmap, advice) and hasattr(area, "madvise"):
            area.madvise(getattr(mmap, advice))
    return area


LARGE_PAGE_NBYTES = 2 << 20

STRETCH_NBYTES = 8 << 20
"""Memory for which one large page is tried. In less memory, page faults take no time worth saving."""

SLOW_PAGE_NS = 800_000
"""Clearing a large page takes 200 µs. It takes milliseconds if the kernel has to move other pages for
it, or if the host of a virtual machine has to give the memory back; 512 small pages take 1.2 ms."""


def request_large_pages(places: Iterable[tuple[int, int]]) -> None:
    """Ask the kernel for large pages for memory that was not touched yet and will be overwritten.

    `torch.empty` does not ask, and the page faults of a gigabyte take longer than reading it: a load
    of 1 GB takes 0.17 s of processor time with large pages and 0.5 s without.

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
    if _resource is None:
        return FEW_FILES
    soft: int = _resource.getrlimit(_resource.RLIMIT_NOFILE)[0]
    return soft if soft != _resource.RLIM_INFINITY else sys.maxsize


def free(path: str) -> int:
    """Bytes that may still be written where `path` is."""
    if not hasattr(os, "statvfs"):
        from shutil import disk_usage

        return disk_usage(path).free
    found = _os.statvfs(path)
    return int(found.f_bavail * found.f_frsize)
