"""Files on the local file system: one file, or a directory of them.

Rules (SAFETY.md, "paths stay inside"): a key is a plain relative path with no `..`, backslash or NUL; a link inside an opened
directory may only lead to a place inside it, or, in the Hugging Face cache, from `snapshots/<revision>/` to the `blobs/` of the
same model. Only plain files are opened. Each is opened once, measured through its descriptor, and read through that descriptor.

A process may have some hundreds of files open, and a checkpoint may have more. So of a directory only the first `KEPT` files stay
open; the others are opened for each read, and must be the very files that were measured.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import Closed, HoldfastError, LimitExceeded, StoreError, Truncated, UnsafePath
from holdfast.stores.files import is_temporary
from holdfast.stores.gather import Ints, gather
from holdfast.stores.paths import local_path

__all__ = ["DescriptorStore", "LocalStore", "check_key", "free_nbytes", "read_at"]

Keys = list[str]

KEPT = 256
"""Files of one checkpoint that stay open."""

MAX_READ = 1 << 30
"""Linux transfers at most 2 GiB − 4 KiB in one call; half of that is as fast."""


def check_key(key: str) -> str:
    """Give back a key that stays inside what was opened, or refuse it.

    >>> check_key("sharded/model-00001.safetensors")
    'sharded/model-00001.safetensors'
    """
    parts = key.split("/")
    if not key or "\\" in key or "\0" in key or any(p in ("", ".", "..") for p in parts):
        raise UnsafePath(f"the name {key!r} does not stay inside the checkpoint; the file that holds it is not trustworthy")
    return key


@dataclass(slots=True)
class Handle:
    """An open file."""

    descriptor: int
    """-1 where it is opened for each read."""
    nbytes: int
    changed_ns: int
    """When its content was last written, as the file system has it."""
    identity: tuple[int, int]
    """Device and inode."""
    mapped: memoryview | None = None


class Descriptor:
    """A descriptor in a `with`, closed at its end if it is `ours`."""

    __slots__ = ("_number", "_ours")

    def __init__(self, number: int, *, ours: bool) -> None:
        self._number, self._ours = number, ours

    def __enter__(self) -> int:
        return self._number

    def __exit__(self, *_: object) -> None:
        if self._ours:
            os.close(self._number)


class LocalStore:
    """A file, or a directory and what is in it."""

    def __init__(self, path: str | os.PathLike[str], *, max_files: int = 100_000) -> None:
        self.name = local_path(path)
        self._lock = threading.Lock()
        self._handles: dict[str, Handle] = {}
        self._closed = False
        self._max_files = max_files
        try:
            mode = os.stat(self.name).st_mode
        except (OSError, UnicodeEncodeError) as error:
            raise _refused(self.name, error) from None
        self._directory = stat.S_ISDIR(mode)
        self._single = os.path.basename(self.name) or self.name

    def list(self) -> Sequence[str]:
        if not self._directory:
            return [self._single]
        keys: Keys = []
        try:
            self._collect("", keys)
        except OSError as error:
            raise _refused(self.name, error) from None
        return sorted(keys)

    def _collect(self, prefix: str, keys: Keys) -> None:
        """Plain files here and one folder down. Hidden folders (`.git`) and unfinished saves are no part of a checkpoint."""
        folders = []
        with os.scandir(os.path.join(self.name, prefix)) as entries:
            for entry in entries:
                if entry.is_dir():
                    if not entry.name.startswith(".") and not prefix:
                        folders.append(entry.name + "/")
                elif entry.is_file() and not is_temporary(entry.name):
                    keys.append(prefix + entry.name)
                    if len(keys) > self._max_files:
                        raise LimitExceeded(
                            f"more files than Limits(files={self._max_files})", file=self.name, expected=self._max_files
                        )
        for folder in folders:
            self._collect(folder, keys)

    def size(self, key: str) -> int:
        return self._open(key).nbytes

    def read(self, key: str, start: int, out: memoryview) -> None:
        handle = self._open(key)
        total = out.nbytes
        if start < 0 or start + total > handle.nbytes:
            raise Truncated(
                f"wanted bytes {start} to {start + total} of {handle.nbytes}", file=self._label(key), offset=handle.nbytes
            )
        try:
            with self._descriptor(key, handle) as descriptor:
                read_at(descriptor, start, out)
        except HoldfastError as error:
            error.file = self._label(key)
            raise
        except OSError as error:
            raise _refused(self._label(key), error, self._closed) from None

    def gather(self, key: str, starts: Ints, nbytes: Ints, places: Ints) -> int:
        """Copy short ranges to addresses in memory. How many of them, from the first on, were copied; the others are yet to be."""
        handle = self._open(key)
        if int(starts.min()) < 0 or int((starts + nbytes).max()) > handle.nbytes:
            return 0
        with self._descriptor(key, handle) as descriptor:
            return gather(descriptor, starts, nbytes, places)

    def map(self, key: str) -> memoryview | None:
        handle = self._open(key)
        with self._lock:
            if handle.mapped is None:
                if handle.nbytes == 0:
                    return memoryview(b"")
                # Private: whoever writes to an array changes their copy of the page, never the checkpoint.
                flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
                with self._descriptor(key, handle) as descriptor:
                    try:
                        area = mmap.mmap(descriptor, handle.nbytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
                    except (OSError, ValueError) as error:
                        raise StoreError(f"cannot map the file into memory: {error}", file=self._label(key)) from None
                handle.mapped = memoryview(area)
            return handle.mapped

    def stamp(self, key: str) -> tuple[int, int]:
        """The length of a file, and when its content was last written."""
        handle = self._open(key)
        return handle.nbytes, handle.changed_ns

    def changed(self) -> Keys:
        """The files that someone has written to since they were opened here, as far as the file system tells."""
        with self._lock:
            handles = dict(self._handles)
        found = []
        for key, handle in handles.items():
            try:
                now = os.fstat(handle.descriptor) if handle.descriptor >= 0 else os.stat(self._resolve(key))
            except (OSError, HoldfastError):
                found.append(key)
                continue
            if (now.st_size, now.st_mtime_ns) != (handle.nbytes, handle.changed_ns):
                found.append(key)
        return sorted(found)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for handle in self._handles.values():
                # A mapping stays as long as arrays use it; Python unmaps it with the last of them.
                handle.mapped = None
                if handle.descriptor >= 0:
                    os.close(handle.descriptor)
            self._handles.clear()

    def __del__(self) -> None:
        if getattr(self, "_handles", None):
            self.close()

    def _label(self, key: str) -> str:
        return os.path.join(self.name, key) if self._directory else self.name

    def _open(self, key: str) -> Handle:
        handle = self._handles.get(key)
        if handle is not None:
            return handle
        with self._lock:
            if self._closed:
                raise Closed("the checkpoint was closed; open it again to read from it", file=self.name)
            if key not in self._handles:
                handle = self._open_new(key)
                if len(self._handles) >= KEPT:
                    os.close(handle.descriptor)
                    handle.descriptor = -1
                self._handles[key] = handle
            return self._handles[key]

    def _descriptor(self, key: str, handle: Handle) -> Descriptor:
        """To be used in a `with`: the open file, or one that is open until the block ends."""
        if handle.descriptor >= 0:
            return Descriptor(handle.descriptor, ours=False)
        again = self._open_new(key)
        if (again.identity, again.nbytes, again.changed_ns) != (handle.identity, handle.nbytes, handle.changed_ns):
            os.close(again.descriptor)
            raise StoreError("the file was changed or replaced while the checkpoint was open", file=self._label(key))
        return Descriptor(again.descriptor, ours=True)

    def _open_new(self, key: str) -> Handle:
        label = self._label(key)
        path = self._resolve(key)
        try:
            # NONBLOCK: opening a FIFO that nobody writes to must not wait.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _refused(label, error) from None
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise UnsafePath("not a plain file (a device, a pipe, a socket or a folder)", file=label)
        return Handle(descriptor, found.st_size, found.st_mtime_ns, (found.st_dev, found.st_ino))

    def _resolve(self, key: str) -> str:
        if not self._directory:
            if key != self._single:
                raise StoreError(f"there is no {key!r} in {self.name}", file=key)
            return self.name
        path = os.path.realpath(os.path.join(self.name, check_key(key)))
        root = os.path.realpath(self.name)
        allowed = [root]
        revisions = os.path.dirname(root)
        if os.path.basename(revisions) == "snapshots":
            allowed.append(os.path.join(os.path.dirname(revisions), "blobs"))
        if not any(path.startswith(place + os.sep) for place in allowed):
            raise UnsafePath(f"a link leads out of the checkpoint, to {path!r}", file=self._label(key))
        return path


class DescriptorStore:
    """One plain file that somebody else has open, under one key. Reads do not move the file's position."""

    KEY = "file"

    def __init__(self, descriptor: int, *, name: str = "<open file>") -> None:
        self.name = name
        self._descriptor = descriptor

    def list(self) -> Sequence[str]:
        return [self.KEY]

    def size(self, key: str) -> int:
        return os.fstat(self._descriptor).st_size

    def read(self, key: str, start: int, out: memoryview) -> None:
        try:
            read_at(self._descriptor, start, out)
        except OSError as error:
            raise _refused(self.name, error) from error

    def map(self, key: str) -> memoryview | None:
        return None

    def close(self) -> None:
        """The file belongs to the caller."""


def read_at(descriptor: int, start: int, out: memoryview) -> None:
    """Fill `out` from an open file, from `start` on."""
    done, total = 0, out.nbytes
    while done < total:
        got = os.preadv(descriptor, [out[done : done + MAX_READ]], start + done)
        if got == 0:
            raise Truncated(f"the file shrank while it was read: {total - done} bytes are gone", offset=start + done)
        done += got


def free_nbytes(path: str) -> int:
    """Bytes that may still be written where `path` is."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        raise _refused(path, error) from None
    return found.f_bavail * found.f_frsize


def _refused(label: str, error: OSError | UnicodeEncodeError, closed: bool = False) -> StoreError | Closed:
    if closed:
        return Closed("the checkpoint was closed while it was read", file=label)
    if isinstance(error, UnicodeEncodeError):
        return StoreError("the path has a character that the file system cannot hold", file=label)
    reason = {
        errno.ENOENT: "no such file",
        errno.EACCES: "permission denied",
        errno.EISDIR: "this is a folder",
        errno.ENAMETOOLONG: "the name is too long",
        errno.ELOOP: "links that go round in circles",
    }.get(error.errno or 0, error.strerror or str(error))
    refused = StoreError(reason, file=label)
    refused.errno = error.errno
    return refused
