"""Files on the local file system: one file, or a directory of them.

Rules (SAFETY.md, "paths stay inside"): a key is a plain relative path with no `..`, backslash or NUL; a link inside an opened
directory may only lead to a place inside it, or, in the Hugging Face cache, from `snapshots/<revision>/` to the `blobs/` of the
same model. Only plain files are opened. Each is opened once, measured through its descriptor, and read through that descriptor.

A directory is the one that was opened (`Folder`), also after another has taken its name: it is replaced by exchanging two names,
and what it was is then removed file by file. So a reader holds a descriptor of it, and everything in it is listed, opened and
measured relative to that: it finds the old files, or none, and never others. Links are followed by path, as long as the path still
means this directory. A process may have some hundreds of files open, and a checkpoint may have more: of a directory
`KEPT` files stay open, fewer where the process is near its limit; the others are opened for each read, and must be the very files
that were measured. One that is gone by then is `Replaced`.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from weakref import WeakValueDictionary

from msgspec import Struct

from holdfast.core.keys import check_key
from holdfast.core.protocols import Store
from holdfast.core.runtime import renewed
from holdfast.errors import (
    Closed,
    HoldfastError,
    LimitExceeded,
    NoSuchPath,
    Replaced,
    StoreError,
    Truncated,
    UnsafePath,
    Unsupported,
)
from holdfast.stores import platform
from holdfast.stores.paths import local_path
from holdfast.stores.platform import (
    DIRECTORY,
    NO_FOLLOW,
    NON_BLOCKING,
    OPEN_FLAGS,
    OPENS_DIRECTORIES,
)

Keys = list[str]

ALIVE: set[int] = (
    set()
)  # Descriptors that readers hold. Adding and discarding are one step each, so no lock is needed.
GONE = frozenset(
    {errno.ENOENT, errno.ESTALE}
)  # Answers for a file that was listed and is gone; the second is NFS's.

A_LINK = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EMLINK})
"""What open(2) says of a link that it must not follow: Linux, of one on the way as well, and FreeBSD."""

RANK, UNIVERSAL = "mp_rank_", "zero"
"""What folders are called that are listed two folders down: `iter_0000200/mp_rank_00` of Megatron's runs, `zero/emb.weight` of
DeepSpeed's universal checkpoints, and `global_step9/zero` of their runs."""

READ = os.O_RDONLY | OPEN_FLAGS | NON_BLOCKING


class OpenFile:
    """A descriptor that lives as long as somebody refers to it. Whoever reads holds a reference for as long as the read takes, so
    that the number cannot come to mean another file meanwhile: closing is no more than letting go, and the last one to let go
    closes."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number
        ALIVE.add(number)

    def __del__(self) -> None:
        ALIVE.discard(self.number)
        try:  # noqa: SIM105  # each open file is closed here, and a block takes longer than the call
            os.close(self.number)
        except OSError:
            pass


class Folder:
    def __init__(self, path: str, *, instead_of: str | None = None) -> None:
        """Open a directory: the one at `path`, which may stand in for one that does not exist (`recover`)."""
        self.path = path
        self._instead_of = instead_of
        found = self._hold()
        self._identity = found.st_dev, found.st_ino

    def _hold(self) -> os.stat_result:
        self._file = OpenFile(os.open(self.path, os.O_RDONLY | DIRECTORY | OPEN_FLAGS))
        return os.fstat(self._file.number)

    def in_place(self) -> bool:
        """Whether the path still means this directory. Files are removed from one that was replaced, and from no other."""
        try:
            if self._instead_of is not None and os.path.lexists(self._instead_of):
                return False
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def list(self, most: int) -> Keys:
        """Plain files here and one folder down; those of ranks and of parameters two (`RANK`, `UNIVERSAL`). Hidden folders (`.git`)
        and unfinished saves are no part of a checkpoint. Raises `Replaced` where the directory was replaced meanwhile, since then
        some names may be gone already."""
        keys: Keys = []
        try:
            self._collect("", keys, most)
        except OSError as error:
            if error.errno not in GONE or self.in_place():
                raise
        if not self.in_place():
            raise Replaced(
                "the folder was replaced while it was looked at; open it again", file=self.path
            )
        return sorted(keys)

    def _collect(self, prefix: str, keys: Keys, most: int) -> None:
        from holdfast.stores.files import is_temporary  # for folders

        folders = []
        with self._entries(prefix) as entries:
            for entry in entries:
                if entry.is_dir():
                    if not entry.name.startswith(".") and (
                        not prefix or _is_listed(prefix, entry.name)
                    ):
                        folders.append(f"{prefix}{entry.name}/")
                elif entry.is_file() and not is_temporary(entry.name):
                    keys.append(prefix + entry.name)
                    if len(keys) > most:
                        raise LimitExceeded(
                            f"more files than Limits(files={most})", file=self.path, expected=most
                        )
        for folder in folders:
            self._collect(folder, keys, most)

    @contextmanager
    def _entries(self, prefix: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        # A descriptor of its own: the place in a listing belongs to the descriptor, which others may use.
        here = OpenFile(
            os.open(prefix or ".", os.O_RDONLY | DIRECTORY | OPEN_FLAGS, dir_fd=self._file.number)
        )
        with os.scandir(here.number) as entries:
            yield entries

    def open(self, key: str) -> OpenFile:
        """Open a file in here. Raises `OSError`, and `UnsafePath` where a link leads out."""
        *folders, name = check_key(key).split("/")
        at = self._file
        try:
            for folder in folders:
                at = OpenFile(
                    os.open(
                        folder, os.O_RDONLY | DIRECTORY | NO_FOLLOW | OPEN_FLAGS, dir_fd=at.number
                    )
                )
            return OpenFile(os.open(name, READ | NO_FOLLOW, dir_fd=at.number))
        except OSError as error:
            if error.errno not in A_LINK:
                raise
        return self._follow(key)

    def _follow(self, key: str) -> OpenFile:
        """Open what a link leads to, if it may lead there: into this directory, or from a snapshot to its `blobs`."""
        root = os.path.realpath(self.path)
        path = os.path.realpath(os.path.join(root, key))
        allowed = [root]
        # A snapshot of the Hugging Face cache, or a folder in one: a component of a pipeline, `onnx/`.
        for revision in (root, os.path.dirname(root)):
            revisions = os.path.dirname(revision)
            if os.path.basename(revisions) == "snapshots":
                allowed.append(os.path.join(os.path.dirname(revisions), "blobs"))
        if not any(path.startswith(place.rstrip(os.sep) + os.sep) for place in allowed):
            raise UnsafePath(
                f"a link leads out of the checkpoint, to {path!r}",
                file=os.path.join(self.path, key),
            )
        file = OpenFile(os.open(path, READ | NO_FOLLOW))
        if not self.in_place():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return file


class PathFolder(Folder):
    """A directory where none can be opened (Windows): known by its path, and by its identity, which is compared at every use. What
    was opened while another had the path is let go of again. Only a folder that is replaced twice within one call, and by itself,
    would not be noticed."""

    def _hold(self) -> os.stat_result:
        return os.stat(self.path)

    @contextmanager
    def _entries(self, prefix: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        with os.scandir(os.path.join(self.path, prefix)) as entries:
            yield entries

    def open(self, key: str) -> OpenFile:
        return self._follow(check_key(key))


def _is_listed(prefix: str, name: str) -> bool:
    return prefix.count("/") == 1 and (
        name.startswith(RANK) or name == UNIVERSAL or prefix == f"{UNIVERSAL}/"
    )


def open_folder(path: str, *, instead_of: str | None = None) -> Folder:
    return (Folder if OPENS_DIRECTORIES else PathFolder)(path, instead_of=instead_of)


def plain(file: OpenFile, label: str) -> os.stat_result:
    found = os.fstat(file.number)
    if not stat.S_ISREG(found.st_mode):
        raise UnsafePath("not a plain file (a device, a pipe, a socket or a folder)", file=label)
    return found


Stamp = tuple[
    int, int, int
]  # Inode, length and time of the last write: those of one file, on every host that has the file system.
KEPT = 256

SHARE = 2  # All that readers keep open is at most one part in so many of what the process may have open.

NO_MORE = frozenset(
    {errno.EMFILE, errno.ENFILE}
)  # Answers of open(2) where no more files may be open.
ELSEWHERE = "another checkpoint is here than the one that was sent to this process by its path: it was saved again; open it again"

MAX_READ = 1 << 30  # Linux transfers at most 2 GiB − 4 KiB in one call; half of that is as fast.


class Handle(Struct):
    """A file as it was when it was opened."""

    file: OpenFile | None  # None where it is opened for each read.
    status: os.stat_result
    mapped: memoryview | None = None

    @property
    def stamp(self) -> Stamp:
        return self.status.st_ino, self.status.st_size, self.status.st_mtime_ns

    def is_same_as(self, file: OpenFile) -> bool:
        """Whether an open file is the measured one, and nobody has written to it since."""
        now = Handle(file, os.fstat(file.number))
        return now.status.st_dev == self.status.st_dev and now.stamp == self.stamp


class LocalStore(Store):
    """A file, a directory and what is in it, or those files of a directory whose names fit: `actor/optim_*.pt`. `instead_of` is the
    path that a directory stands in for, where a save was cut off while it was replaced (`recover`)."""

    gone = False
    """Whether a file was missing that was there when the directory was opened."""
    folder = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_files: int = 100_000,
        instead_of: str | None = None,
    ) -> None:
        self.name = local_path(path)
        self._lock = renewed(threading.Lock())
        self._handles: dict[str, Handle] = {}
        self._closed = False
        self._max_files = max_files
        self._keys: Keys | None = None
        self._expected: Mapping[str, Stamp] = {}
        self._folder: Folder | None = None
        self._beside: LocalStore | None = None
        self._single = self.name.rpartition("/")[2] or self.name
        try:
            self._working = "" if self.name.startswith("/") else os.getcwd()
            self._root, self._only = _chosen(self.name) if "*" in self.name else (self.name, "")
            file = OpenFile(os.open(self._root, READ)) if OPENS_DIRECTORIES else None
            found = os.stat(self._root) if file is None else os.fstat(file.number)
            if stat.S_ISDIR(found.st_mode):
                self._folder = open_folder(self._root, instead_of=instead_of)
            elif file is not None and stat.S_ISREG(found.st_mode):
                self._handles[self._single] = Handle(file, found)
        except (OSError, UnicodeEncodeError) as error:
            raise store_error(self.name, error) from None
        self.folder = self._folder is not None

    @property
    def single(self) -> str | None:
        return super().single if self.folder else self._single

    def beside(self) -> Store | None:
        if self.folder:
            return self
        with self._lock:
            if self._closed:
                raise self._was_closed()
            if self._beside is None:
                folder = os.path.dirname(self.name) or os.curdir
                self._beside = LocalStore(folder, max_files=self._max_files)
            return self._beside

    def list(self) -> Sequence[str]:
        """Every key: what was there when it was asked for the first time."""
        if not self.folder:
            return [self._single]
        with self._lock:
            if self._keys is None:
                try:
                    self._keys = self._list_keys(self._bound())
                except Replaced:
                    self.gone = True
                    raise
                except OSError as error:
                    raise store_error(self.name, error) from None
                if not self._expected.keys() <= set(self._keys):
                    raise Replaced(ELSEWHERE, file=self.name)
            return list(self._keys)

    def size(self, key: str) -> int:
        return (self._handles.get(key) or self._open(key)).status.st_size

    def read(self, key: str, start: int, out: memoryview) -> None:
        handle = self._handles.get(key) or self._open(key)
        total = out.nbytes
        if start < 0 or start + total > handle.status.st_size:
            message = f"wanted bytes {start} to {start + total} of {handle.status.st_size}"
            raise Truncated(message, file=self._label(key), offset=handle.status.st_size)
        file = handle.file or self._again(key, handle)
        try:
            read_at(file.number, start, out)
        except HoldfastError as error:
            error.file = self._label(key)
            raise
        except OSError as error:
            raise self._missing(key, error) from None
        finally:
            # An exception keeps this frame alive, and should not keep the file open with it.
            del file

    peek = read

    def map(self, key: str) -> memoryview | None:
        """The bytes of a file as memory; None where the process may have no more files open, since each mapping holds one."""
        handle = self._open(key)
        with self._lock:
            if self._closed:
                raise self._was_closed()
            if handle.mapped is None and handle.status.st_size:
                try:
                    file = handle.file or self._again(key, handle)
                    handle.mapped = memoryview(
                        platform.map_private(file.number, handle.status.st_size)
                    )
                except (OSError, ValueError) as error:
                    if isinstance(error, HoldfastError):
                        raise
                    if isinstance(error, OSError) and error.errno in NO_MORE:
                        return None
                    raise StoreError(
                        f"cannot map the file into memory: {error}", file=self._label(key)
                    ) from None
            return handle.mapped if handle.status.st_size else memoryview(b"")

    def stamp(self, key: str) -> tuple[int, int, int]:
        """Length, and times of the last change of the content and of the status (`ctime`).

        Programs that restore a file set its modification time back. They cannot set the other one.
        """
        handle = self._open(key)
        return handle.status.st_size, handle.status.st_mtime_ns, handle.status.st_ctime_ns

    def place(self, key: str = "") -> Hashable:
        """The real path: what was opened by two paths is one."""
        return "file", os.path.realpath(self._label(key) if key else self.name)

    def changed(self) -> Keys:
        """The files that someone has written to since they were opened here, as far as the file system tells."""
        with self._lock:
            handles = dict(self._handles)
        found = []
        for key, handle in handles.items():
            try:
                is_same = handle.is_same_as(handle.file or self._opened(key))
            except (OSError, HoldfastError):
                is_same = False
            if not is_same:
                found.append(key)
        return sorted(found)

    def find_replaced(self) -> Keys:
        with self._lock:
            handles = dict(self._handles)
            opened_keys = self._keys
            folder = self._folder
        if folder is not None and not folder.in_place():
            return sorted(handles) or [self._single]

        replaced_keys: set[str] = set()
        for key, handle in handles.items():
            try:
                is_same = handle.is_same_as(self._opened(key))
            except (OSError, HoldfastError):
                is_same = False
            if not is_same:
                replaced_keys.add(key)

        # Files that appeared would be lost, and files that were deleted would come back.
        if folder is not None and opened_keys is not None:
            try:
                replaced_keys |= set(opened_keys) ^ set(self._list_keys(folder))
            except (OSError, HoldfastError):
                replaced_keys |= set(opened_keys)
        return sorted(replaced_keys)

    def close(self) -> None:
        """Let go of everything. Reads that are under way end as they would have; those that begin now raise `Closed`."""
        with self._lock:
            self._closed = True
            if self._beside is not None:
                self._beside.close()
            for handle in self._handles.values():
                # A mapping stays as long as arrays use it; Python unmaps it with the last of them.
                handle.mapped = handle.file = None
            self._handles.clear()
            self._folder = None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the path: what is opened where it arrives must be the files that are open here."""
        with self._lock:
            if self._closed:
                raise self._was_closed()
            stamps = {key: handle.stamp for key, handle in self._handles.items()}
        return _arrived, (
            os.path.abspath(os.path.join(self._working, self.name)),
            self._max_files,
            stamps,
            self.index,
        )

    def _label(self, key: str) -> str:
        return os.path.join(self._root, key) if self.folder else self.name

    def _was_closed(self) -> Closed:
        return Closed("the checkpoint was closed; open it again to read from it", file=self.name)

    def _list_keys(self, folder: Folder) -> Keys:
        """List the files that a folder has now, of those whose names fit."""
        keys = folder.list(self._max_files)
        if not self._only:
            return keys
        return [key for key in keys if "/" not in key and fnmatchcase(key, self._only)]

    def _bound(self) -> Folder:
        folder = self._folder
        if folder is None:
            raise self._was_closed()
        return folder

    def _open(self, key: str) -> Handle:
        """Open and measure a file, if that was not done yet."""
        with self._lock:
            if self._closed:
                raise self._was_closed()
            if key not in self._handles:
                file = self._opened(key)
                handle = Handle(file, plain(file, self._label(key)))
                if key in self._expected and self._expected[key] != handle.stamp:
                    raise Replaced(ELSEWHERE, file=self._label(key))
                if not platform.REMOVES_OPEN_FILES:
                    handle.file = None  # or nobody could replace a checkpoint that somebody reads
                elif self.folder and (
                    len(self._handles) >= KEPT or len(ALIVE) > platform.most_open_files() // SHARE
                ):
                    handle.file = None
                self._handles[key] = handle
            return self._handles[key]

    def _again(self, key: str, handle: Handle) -> OpenFile:
        """A file that is not kept open; it must be the one that was measured."""
        if self._closed:
            raise self._was_closed()
        file = self._opened(key)
        if not handle.is_same_as(file):
            raise Replaced(
                "the file was changed or replaced while the checkpoint was open; open it again",
                file=self._label(key),
            )
        return file

    def _opened(self, key: str) -> OpenFile:
        try:
            try:
                return self._open_file(key)
            except OSError as error:
                if error.errno not in NO_MORE or not self._let_go():
                    raise
                return self._open_file(key)
        except HoldfastError:
            raise
        except (OSError, UnicodeEncodeError) as error:
            raise self._missing(key, error) from None

    def _open_file(self, key: str) -> OpenFile:
        if self.folder:
            return self._bound().open(key)
        if key != self._single:
            raise StoreError(f"there is no {key!r} in {self.name}", file=key)
        return OpenFile(os.open(self.name, READ))

    def _let_go(self) -> bool:
        """Close what is kept open of a directory; False where there was nothing."""
        kept = (
            [handle for handle in list(self._handles.values()) if handle.file is not None]
            if self.folder
            else []
        )
        for handle in kept:
            handle.file = None
        return bool(kept)

    def _missing(self, key: str, error: OSError | UnicodeEncodeError) -> StoreError:
        """What to say of a file that the file system does not give: `Replaced` for one that it had."""
        label = self._label(key)
        known = (
            key in self._handles
            or key in self._expected
            or (self._keys is not None and key in self._keys)
        )
        if isinstance(error, OSError) and error.errno in GONE and known:
            self.gone = True
            gone = Replaced(
                "the file is gone: the checkpoint was replaced or removed while it was open; open it again",
                file=label,
            )
            gone.errno = error.errno
            return gone
        return store_error(label, error, inside=self.folder)


def _chosen(path: str) -> tuple[str, str]:
    """The directory that is opened, and the pattern for its files: none where all are meant, or a file has the star in its name."""
    folder, pattern = os.path.split(path)
    if "*" not in pattern or os.path.lexists(path):
        return path, ""
    with suppress(OSError), os.scandir(folder or ".") as entries:
        if any(fnmatchcase(entry.name, pattern) for entry in entries):
            return folder or ".", pattern
    return path, ""


def _arrived(path: str, max_files: int, stamps: Mapping[str, Stamp], index: str = "") -> LocalStore:
    store = LocalStore(path, max_files=max_files)
    store.index = index
    store._expected = stamps
    # What was opened here is compared with that when it is opened to be read.
    store._handles.clear()
    return store


_positions: WeakValueDictionary[tuple[int, int], threading.Lock] = WeakValueDictionary()
"""By device and inode: who may move the position of a file, where a read moves it. Descriptors of one open file share it."""


class DescriptorStore(Store):
    """One plain file that somebody else has open, under one key. Reads do not move the file's position. It has a descriptor of its
    own, so that the owner may close theirs at any time."""

    KEY = "file"

    def __init__(self, descriptor: int, *, name: str = "<open file>") -> None:
        self.name = name
        self._file: OpenFile | None = OpenFile(os.dup(descriptor))
        self._turn: threading.Lock | None = None
        if not platform.HAS_PREAD:
            found = os.fstat(descriptor)
            self._turn = _positions.setdefault(
                (found.st_dev, found.st_ino), renewed(threading.Lock())
            )

    def list(self) -> Sequence[str]:
        return [self.KEY]

    def size(self, key: str) -> int:
        return os.fstat(self._open(key).number).st_size

    def read(self, key: str, start: int, out: memoryview) -> None:
        file = self._open(key)
        if start < 0:  # which preadv takes for the file's position
            raise Truncated(f"wanted bytes from {start} on", file=self.name, offset=0)
        try:
            if self._turn is None:
                read_at(file.number, start, out)
            else:
                with self._turn:
                    read_at(file.number, start, out)
        except OSError as error:
            raise store_error(self.name, error) from error
        finally:
            del file

    def close(self) -> None:
        """Let go of it; the file belongs to the caller."""
        self._file = None

    def _open(self, key: str) -> OpenFile:
        file = self._file
        if file is None:
            raise Closed("the file was closed; open it again to read from it", file=self.name)
        if key != self.KEY:
            raise StoreError(f"there is no {key!r} in {self.name}", file=key)
        return file

    def __reduce__(self) -> tuple[object, ...]:
        raise Unsupported(
            "what is read from an open file cannot be sent to another process; open it there by its path"
        )


def read_at(descriptor: int, start: int, out: memoryview) -> None:
    """Fill `out` from an open file, from `start` on."""
    done, total = 0, out.nbytes
    while done < total:
        got = platform.preadv(descriptor, [out[done : done + MAX_READ]], start + done)
        if got == 0:
            raise Truncated(
                f"the file shrank while it was read: {total - done} bytes are gone",
                offset=start + done,
            )
        done += got


def store_error(
    label: str, error: OSError | UnicodeEncodeError, *, inside: bool = False
) -> StoreError:
    """What the file system said; `inside` is for a file of a folder that was opened."""
    if isinstance(error, UnicodeEncodeError):
        return StoreError("the path has a character that the file system cannot hold", file=label)
    reason = {
        errno.ENOENT: "no such file",
        errno.EACCES: "permission denied",
        errno.EISDIR: "this is a folder",
        errno.ENAMETOOLONG: "the name is too long",
        errno.ELOOP: "links that go round in circles",
        errno.EMFILE: "this process has as many files open as it may (ulimit -n); close some, or raise the limit",
    }.get(error.errno or 0, error.strerror or str(error))
    refused = (
        NoSuchPath(reason, file=label)
        if error.errno == errno.ENOENT and not inside
        else StoreError(reason, file=label)
    )
    refused.errno = error.errno
    return refused
