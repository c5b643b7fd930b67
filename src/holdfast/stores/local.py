"""Files on the local file system: one file, or a directory of files.

Keys and links cannot leave the checkpoint:

- A key is a relative path without `..`, backslash or NUL.
- A link in a directory may only lead to a place inside that directory. In the Hugging Face cache,
  it may also lead from `snapshots/<revision>/` to the `blobs/` folder of the same model.
- Only regular files are opened. A file is opened once, and its size and content both come from that
  descriptor.

A `Folder` stays the directory that was opened, even if another one takes its name. A save replaces
a directory by exchanging two names and then removes the old files one by one. A reader holds a
descriptor of the old directory, and lists and opens files relative to it. So it finds the old files
or none, and never files of the new checkpoint. Links are followed by path, while the path still
leads to the same directory.

A checkpoint may have more files than a process may open. Of a directory, `MAX_KEPT_FILES` files
stay open, and fewer if the process is near its limit. The other files are opened for each read, and
must be the files that were opened first. If one of them has disappeared, the read raises
`Replaced`."""

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
from holdfast.core.runtime import make_fork_safe
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

Version = tuple[int, int, int]
"""Inode, size and modification time. All hosts of a shared file system see the same values."""

READ_FLAGS = os.O_RDONLY | OPEN_FLAGS | NON_BLOCKING

OPEN_DESCRIPTORS: set[int] = set()
"""Descriptors that readers hold. It needs no lock, because adding and discarding are atomic."""

MISSING_ERRNOS = frozenset({errno.ENOENT, errno.ESTALE})
"""Errors for a file that was listed and has disappeared. NFS reports the second one."""

LINK_ERRNOS = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EMLINK})
"""Errors of open(2) for a link that must not be followed. Linux reports ENOTDIR for a link to a
folder in the middle of a path, and FreeBSD reports EMLINK."""

TOO_MANY_FILES_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE})

RANK_PREFIX = "mp_rank_"
UNIVERSAL_FOLDER = "zero"
"""Folders that are also listed at the second level: `iter_0000200/mp_rank_00` in runs of Megatron,
`zero/emb.weight` in universal checkpoints of DeepSpeed, and `global_step9/zero` in runs of
DeepSpeed."""

MAX_KEPT_FILES = 256

OPEN_FILES_DIVISOR = 2
"""Readers keep at most one part in this many of the files that the process may have open."""

MAX_READ_NBYTES = 1 << 30
"""Linux transfers at most 2 GiB − 4 KiB in one call. Half of that is as fast."""

CLOSED_MESSAGE = "the checkpoint was closed; open it again to read from it"

OTHER_CHECKPOINT_MESSAGE = (
    "this path no longer has the checkpoint that was sent to this process: it was saved again; "
    "open it again"
)


class OpenFile:
    """A descriptor that is closed when the last reference to it goes away.

    A reader keeps a reference during the read. So the descriptor cannot be closed under it, and its
    number cannot be given to another file.
    """

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        """Take ownership of a descriptor."""
        self.descriptor = descriptor
        OPEN_DESCRIPTORS.add(descriptor)

    def __del__(self) -> None:
        OPEN_DESCRIPTORS.discard(self.descriptor)
        try:  # noqa: SIM105  # `suppress` takes longer than the call, and this runs for each file
            os.close(self.descriptor)
        except OSError:
            pass


class Folder:
    """An open directory. It stays the same directory even if another one takes its path."""

    def __init__(
        self, path: str, *, file: OpenFile | None = None, instead_of: str | None = None
    ) -> None:
        """Open a directory.

        Args:
            path: The path of the directory.
            file: The directory, if it is open already.
            instead_of: The path that this directory replaces after an interrupted save, because the
                directory with that path is missing.
        """
        self.path = path
        self._instead_of = instead_of
        status = self._open_directory(file)
        self._identity = status.st_dev, status.st_ino

    def _open_directory(self, file: OpenFile | None) -> os.stat_result:
        """Keep the directory open and return its status. Opens it unless `file` is given."""
        if file is None:
            file = OpenFile(os.open(self.path, os.O_RDONLY | DIRECTORY | OPEN_FLAGS))
        self._file = file
        return os.fstat(file.descriptor)

    def is_in_place(self) -> bool:
        """Return whether the path still leads to this directory.

        Files are only removed from a directory that was replaced. In place, all files are there.
        """
        try:
            # The path exists again, so the checkpoint there is another one by now.
            if self._instead_of is not None and os.path.lexists(self._instead_of):
                return False
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def list(self, max_files: int) -> Keys:
        """Return the keys of the regular files here and one folder down, sorted.

        Folders of ranks and of parameters are also listed at the second level (`RANK_PREFIX`,
        `UNIVERSAL_FOLDER`). Hidden folders, such as `.git`, and unfinished saves are not listed.

        Raises:
            Replaced: The directory was replaced. Some of its files may be removed already.
            LimitExceeded: There are more than `max_files` files.
        """
        keys: Keys = []
        try:
            self._collect_keys("", keys, max_files)
        except OSError as error:
            # A file that disappears during the listing is normal only if the directory was replaced.
            if error.errno not in MISSING_ERRNOS or self.is_in_place():
                raise
        if not self.is_in_place():
            raise Replaced(
                "the folder was replaced during the listing; open it again", file=self.path
            )
        return sorted(keys)

    def _collect_keys(self, prefix: str, keys: Keys, max_files: int) -> None:
        """Append the keys of the regular files in a folder and its subfolders to `keys`.

        Args:
            prefix: The relative path of the folder, with a slash at its end; '' for this directory.
            keys: Receives the keys.
            max_files: The largest number of keys.
        """
        # Only folders need this module.
        from holdfast.stores.files import is_temporary

        subfolders = []
        with self._scan(prefix) as entries:
            for entry in entries:
                if entry.is_dir():
                    if _is_listed_folder(prefix, entry.name):
                        subfolders.append(f"{prefix}{entry.name}/")
                elif entry.is_file() and not is_temporary(entry.name):
                    keys.append(prefix + entry.name)
                    if len(keys) > max_files:
                        message = f"more files than Limits(files={max_files})"
                        raise LimitExceeded(message, file=self.path, expected=max_files)
        for subfolder in subfolders:
            self._collect_keys(subfolder, keys, max_files)

    @contextmanager
    def _scan(self, prefix: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        """Open a folder below this directory for a listing. `prefix` is its relative path or ''."""
        # This needs a second descriptor: the position in a listing belongs to the descriptor, and
        # other threads may list through the first one.
        flags = os.O_RDONLY | DIRECTORY | OPEN_FLAGS
        directory = OpenFile(os.open(prefix or ".", flags, dir_fd=self._file.descriptor))
        with os.scandir(directory.descriptor) as entries:
            yield entries

    def open(self, key: str) -> OpenFile:
        """Open a file in this directory.

        If the key or one of its folders is a link, the link is followed only to allowed places.

        Raises:
            OSError: The file cannot be opened.
            UnsafePath: A link leads out of the directory.
        """
        *folder_names, name = check_key(key).split("/")
        directory = self._file
        try:
            # Open folder by folder, so that no part of the key can be a link.
            for folder_name in folder_names:
                flags = os.O_RDONLY | DIRECTORY | NO_FOLLOW | OPEN_FLAGS
                directory = OpenFile(os.open(folder_name, flags, dir_fd=directory.descriptor))
            return OpenFile(os.open(name, READ_FLAGS | NO_FOLLOW, dir_fd=directory.descriptor))
        except OSError as error:
            if error.errno not in LINK_ERRNOS:
                raise
        # A part of the key is a link.
        return self._open_link(key)

    def _open_link(self, key: str) -> OpenFile:
        """Open a file whose path contains a link.

        The target must be in this directory. In the Hugging Face cache, where a file in
        `snapshots/<revision>/` is a link, it may also be in the `blobs/` folder of the same model.

        Raises:
            UnsafePath: The link leads to another place.
        """
        root = os.path.realpath(self.path)
        path = os.path.realpath(os.path.join(root, key))

        # The directory may be a snapshot of the Hugging Face cache, or a folder in one: the
        # component of a pipeline, or `onnx/`.
        allowed_folders = [root]
        for revision in (root, os.path.dirname(root)):
            snapshots = os.path.dirname(revision)
            if os.path.basename(snapshots) == "snapshots":
                allowed_folders.append(os.path.join(os.path.dirname(snapshots), "blobs"))
        if not any(path.startswith(folder.rstrip(os.sep) + os.sep) for folder in allowed_folders):
            raise UnsafePath(
                f"a link leads out of the checkpoint, to {path!r}",
                file=os.path.join(self.path, key),
            )

        file = OpenFile(os.open(path, READ_FLAGS | NO_FOLLOW))
        # If another directory has the path by now, this may be a file of another checkpoint.
        if not self.is_in_place():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return file


class PathFolder(Folder):
    """A directory on Windows, which cannot open directories.

    Every use compares the identity of the directory at the path, and drops a file that was opened
    while another directory had the path. Only a directory that is replaced twice during one call,
    the second time by itself, would go unnoticed.
    """

    def _open_directory(self, file: OpenFile | None) -> os.stat_result:
        # Windows cannot open a directory, so only its identity is recorded.
        return os.stat(self.path)

    @contextmanager
    def _scan(self, prefix: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        with os.scandir(os.path.join(self.path, prefix)) as entries:
            yield entries

    def open(self, key: str) -> OpenFile:
        # Without descriptors of folders, every key is followed by path and then checked.
        return self._open_link(check_key(key))


def _is_listed_folder(prefix: str, name: str) -> bool:
    """Return whether the files of a subfolder belong to the checkpoint.

    Args:
        prefix: The parent of the subfolder, relative to the checkpoint: '' or `iter_0000200/`.
        name: The name of the subfolder.
    """
    if name.startswith("."):
        return False
    if not prefix:
        return True
    # At the second level, only the folders of known training frameworks count.
    is_known_name = name.startswith(RANK_PREFIX) or name == UNIVERSAL_FOLDER
    return prefix.count("/") == 1 and (is_known_name or prefix == f"{UNIVERSAL_FOLDER}/")


def open_folder(
    path: str, *, file: OpenFile | None = None, instead_of: str | None = None
) -> Folder:
    """Open a directory in the way that this system supports. The arguments are those of `Folder`."""
    folder_type = Folder if OPENS_DIRECTORIES else PathFolder
    return folder_type(path, file=file, instead_of=instead_of)


def check_regular_file(file: OpenFile, label: str) -> os.stat_result:
    """Return the status of an open file. Raises `UnsafePath` if it is not a regular file."""
    status = os.fstat(file.descriptor)
    if not stat.S_ISREG(status.st_mode):
        message = "not a regular file, but a device, a pipe, a socket or a folder"
        raise UnsafePath(message, file=label)
    return status


class FileHandle(Struct):
    """A file of a store, as it was when the store first opened it."""

    file: OpenFile | None
    """None if the file is opened for each read."""
    status: os.stat_result
    mapping: memoryview | None = None

    @property
    def version(self) -> Version:
        """What identifies the version of the file on all hosts of a shared file system."""
        # Not the device: each host gives a shared file system a device number of its own.
        return self.status.st_ino, self.status.st_size, self.status.st_mtime_ns

    def release_file(self) -> None:
        """Stop keeping the file open. It is closed when the last read that uses it has ended."""
        self.file = None

    def is_same_as(self, file: OpenFile) -> bool:
        """Return whether `file` is the file of this handle, and was not written to since."""
        status = os.fstat(file.descriptor)
        return (
            os.path.samestat(status, self.status)
            and status.st_size == self.status.st_size
            and status.st_mtime_ns == self.status.st_mtime_ns
        )


class LocalStore(Store):
    """A file, a directory, or the files of a directory that match a pattern (`dir/optim_*.pt`)."""

    is_gone = False
    is_folder = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_files: int = 100_000,
        instead_of: str | None = None,
    ) -> None:
        """Open a file or a directory.

        Args:
            path: The path, which may end with a pattern.
            max_files: The most files that a directory may have.
            instead_of: The path that the directory replaces after an interrupted save (`Folder`).
        """
        self.name = local_path(path)
        self._lock = make_fork_safe(threading.Lock())
        self._handles: dict[str, FileHandle] = {}
        """The files that were opened, by their keys."""
        self._is_closed = False
        self._max_files = max_files
        self._keys: Keys | None = None
        """The keys of a folder, from the first listing on."""
        self._expected_versions: Mapping[str, Version] = {}
        """The versions of the files that another process had open when it pickled this store."""
        self._folder: Folder | None = None
        self._folder_store: LocalStore | None = None
        self._single = self.name.rpartition("/")[2] or self.name
        """The last component of the path: the only key if the store is a single file."""
        try:
            # A pickle of this store needs the absolute path, also after the program has changed
            # its working directory.
            self._working_directory = "" if self.name.startswith("/") else os.getcwd()
            self._root = self.name
            self._pattern = ""
            if "*" in self.name:
                self._root, self._pattern = _split_pattern(self.name)

            # Where a descriptor can refer to a directory, one call opens either a directory or a
            # file, so nobody can exchange them between a check and the open. On Windows, the file
            # is opened when it is first used.
            file: OpenFile | None = None
            if OPENS_DIRECTORIES:
                file = OpenFile(os.open(self._root, READ_FLAGS))
                status = os.fstat(file.descriptor)
            else:
                status = os.stat(self._root)
            if stat.S_ISDIR(status.st_mode):
                self._folder = open_folder(self._root, file=file, instead_of=instead_of)
            elif file is not None and stat.S_ISREG(status.st_mode):
                # Anything else, such as a device, is refused when it is first used.
                self._handles[self._single] = FileHandle(file, status)
        except (OSError, UnicodeEncodeError) as error:
            raise store_error(self.name, error) from None
        self.is_folder = self._folder is not None

    @property
    def single_key(self) -> str | None:
        if self.is_folder:
            return super().single_key
        return self._single

    def get_folder_store(self) -> Store | None:
        """Return a store of the folder that contains this file. Some formats have more files there.

        If this is a folder, return this store.
        """
        if self.is_folder:
            return self
        with self._lock:
            if self._is_closed:
                raise Closed(CLOSED_MESSAGE, file=self.name)
            if self._folder_store is None:
                folder = os.path.dirname(self.name) or os.curdir
                self._folder_store = LocalStore(folder, max_files=self._max_files)
            return self._folder_store

    def list(self) -> Sequence[str]:
        """Return every key, as of the first call."""
        if not self.is_folder:
            return [self._single]
        with self._lock:
            if self._keys is None:
                try:
                    self._keys = self._list_keys(self._get_folder())
                except Replaced:
                    self.is_gone = True
                    raise
                except OSError as error:
                    raise store_error(self.name, error) from None
                # The process that pickled this store had these files open.
                if not self._expected_versions.keys() <= set(self._keys):
                    raise Replaced(OTHER_CHECKPOINT_MESSAGE, file=self.name)
            return list(self._keys)

    def size(self, key: str) -> int:
        handle = self._handles.get(key) or self._open(key)
        return handle.status.st_size

    def read(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a file from the offset `start` on.

        Raises:
            Truncated: The file ends too early.
            Replaced: The file is not the one that was opened first.
        """
        handle = self._handles.get(key) or self._open(key)
        stop = start + out.nbytes
        file_nbytes = handle.status.st_size
        if start < 0 or stop > file_nbytes:
            message = f"cannot read bytes {start} to {stop} of a file of {file_nbytes} bytes"
            raise Truncated(message, file=self._label(key), offset=file_nbytes)
        file = handle.file or self._reopen(key, handle)
        try:
            # One system call reads most ranges completely.
            block = out[:MAX_READ_NBYTES]
            block_nbytes = platform.preadv(file.descriptor, [block], start)
            if block_nbytes < out.nbytes:
                read_at(file.descriptor, start + block_nbytes, out[block_nbytes:])
        except HoldfastError as error:
            error.file = self._label(key)
            raise
        except OSError as error:
            raise self._explain_error(key, error) from None
        finally:
            # An exception keeps this frame alive. It must not keep the file open as well.
            del file

    peek = read

    def map(self, key: str) -> memoryview | None:
        """Map a file into memory.

        Returns:
            None if the process may not open more files: a mapping keeps its file open.
        """
        handle = self._open(key)
        with self._lock:
            if self._is_closed:
                raise Closed(CLOSED_MESSAGE, file=self.name)
            nbytes = handle.status.st_size
            # The system cannot map an empty range.
            if not nbytes:
                return memoryview(b"")
            if handle.mapping is None:
                file = handle.file or self._reopen(key, handle)
                try:
                    handle.mapping = memoryview(platform.map_private(file.descriptor, nbytes))
                except (OSError, ValueError) as error:
                    # The caller can still read a file that it cannot map.
                    if isinstance(error, OSError) and error.errno in TOO_MANY_FILES_ERRNOS:
                        return None
                    message = f"cannot map the file into memory: {error}"
                    raise StoreError(message, file=self._label(key)) from None
            return handle.mapping

    def stamp(self, key: str) -> tuple[int, int, int]:
        """Return the size, and the times of the last change of the content and of the status.

        Programs that restore a file can reset the time of its content (`mtime`), but not the other
        time (`ctime`).
        """
        status = self._open(key).status
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def identity(self, key: str = "") -> Hashable:
        """Return the real path, which is equal for two paths to one file."""
        path = self._label(key) if key else self.name
        return "file", os.path.realpath(path)

    def find_changed(self) -> Keys:
        """Return the keys of the files that were written to since they were opened.

        A file that cannot be checked counts as changed. On a file system that stores coarse times,
        a change soon after the file was opened may go unnoticed.
        """
        with self._lock:
            handles = dict(self._handles)
        changed_keys = []
        for key, handle in handles.items():
            try:
                is_same = handle.is_same_as(handle.file or self._open_by_key(key))
            except (OSError, HoldfastError):
                # The caller is about to publish what it read. So "changed" is the safe answer.
                is_same = False
            if not is_same:
                changed_keys.append(key)
        return sorted(changed_keys)

    def find_replaced(self) -> Keys:
        """Return the keys that were replaced, added or deleted since the store was opened.

        A key that cannot be checked counts as changed. A save to the same path checks this first,
        because it would overwrite what is there now.
        """
        with self._lock:
            handles = dict(self._handles)
            listed_keys = self._keys
            folder = self._folder
        if folder is not None and not folder.is_in_place():
            # Another directory has the path. If no file was opened yet, the name of the directory
            # stands for its files: an empty result would mean that nothing has changed.
            return sorted(handles) or [self._single]

        changed_keys: set[str] = set()
        for key, handle in handles.items():
            try:
                # This opens the file that the path leads to now. It is closed after the comparison,
                # because nothing keeps a reference to it (`OpenFile`).
                is_same = handle.is_same_as(self._open_by_key(key))
            except (OSError, HoldfastError):
                # The caller would overwrite this file. So "changed" is the safe answer.
                is_same = False
            if not is_same:
                changed_keys.add(key)

        # A save would delete the files that were added, and bring back those that were deleted.
        if folder is not None and listed_keys is not None:
            try:
                changed_keys |= set(listed_keys) ^ set(self._list_keys(folder))
            except (OSError, HoldfastError):
                changed_keys |= set(listed_keys)
        return sorted(changed_keys)

    def close(self) -> None:
        """Release all files. Running reads finish normally, and later reads raise `Closed`."""
        with self._lock:
            self._is_closed = True
            if self._folder_store is not None:
                self._folder_store.close()
            for handle in self._handles.values():
                # Arrays that use a mapping keep it alive. Python unmaps it with the last of them.
                handle.mapping = None
                handle.release_file()
            self._handles.clear()
            self._folder = None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the path. The receiver must find the same files there that are open here."""
        with self._lock:
            if self._is_closed:
                raise Closed(CLOSED_MESSAGE, file=self.name)
            versions = {key: handle.version for key, handle in self._handles.items()}
        path = os.path.abspath(os.path.join(self._working_directory, self.name))
        return _restore_store, (path, self._max_files, versions, self.index)

    def _label(self, key: str) -> str:
        """Return the path of a file for messages."""
        return os.path.join(self._root, key) if self.is_folder else self.name

    def _list_keys(self, folder: Folder) -> Keys:
        """Return the files that a folder has now and that match the pattern."""
        keys = folder.list(self._max_files)
        if not self._pattern:
            return keys
        return [key for key in keys if "/" not in key and fnmatchcase(key, self._pattern)]

    def _get_folder(self) -> Folder:
        """Return the open directory of this store, which must not have been closed."""
        folder = self._folder
        if folder is None:
            raise Closed(CLOSED_MESSAGE, file=self.name)
        return folder

    def _open(self, key: str) -> FileHandle:
        """Return the handle of a file. The first call for a key opens the file.

        The handle keeps the file open if the store can afford that (`_can_keep_file_open`).
        Otherwise each read opens the file again.

        Raises:
            Replaced: The file is not the one that another process has sent.
            UnsafePath: This is not a regular file.
        """
        with self._lock:
            if self._is_closed:
                raise Closed(CLOSED_MESSAGE, file=self.name)
            if key in self._handles:
                return self._handles[key]

            file = self._open_by_key(key)
            status = check_regular_file(file, self._label(key))
            handle = FileHandle(file, status)
            expected_version = self._expected_versions.get(key)
            if expected_version is not None and expected_version != handle.version:
                raise Replaced(OTHER_CHECKPOINT_MESSAGE, file=self._label(key))
            if not self._can_keep_file_open():
                handle.release_file()
            self._handles[key] = handle
            return handle

    def _can_keep_file_open(self) -> bool:
        """Return whether one more file of this store may stay open between reads."""
        # On Windows, a checkpoint cannot be replaced while any of its files is open.
        if not platform.CAN_DELETE_OPEN_FILES:
            return False
        if not self.is_folder:
            return True
        # A directory may have more files than the process may open, so it leaves some to others.
        has_room_in_process = (
            len(OPEN_DESCRIPTORS) <= platform.most_open_files() // OPEN_FILES_DIVISOR
        )
        return has_room_in_process and len(self._handles) < MAX_KEPT_FILES

    def _reopen(self, key: str, handle: FileHandle) -> OpenFile:
        """Open a file again that its handle does not keep open.

        The file is closed when the caller drops the last reference to the result.

        Raises:
            Replaced: The file is not the one that was opened first, or was written to since.
        """
        if self._is_closed:
            raise Closed(CLOSED_MESSAGE, file=self.name)
        file = self._open_by_key(key)
        if not handle.is_same_as(file):
            message = (
                "the file was changed or replaced while the checkpoint was open; open it again"
            )
            raise Replaced(message, file=self._label(key))
        return file

    def _open_by_key(self, key: str) -> OpenFile:
        """Open the file that a key leads to now, even if its handle has it open already.

        The caller owns the result: the file is closed when the last reference to it goes away. If
        the process has too many files open, close those that this store keeps open, and retry.
        """
        try:
            try:
                return self._open_file(key)
            except OSError as error:
                if error.errno not in TOO_MANY_FILES_ERRNOS or not self._close_kept_files():
                    raise
                return self._open_file(key)
        except HoldfastError:
            raise
        except (OSError, UnicodeEncodeError) as error:
            raise self._explain_error(key, error) from None

    def _open_file(self, key: str) -> OpenFile:
        """Open a file of the directory, or the single file of this store."""
        if self.is_folder:
            return self._get_folder().open(key)
        if key != self._single:
            raise StoreError(f"there is no {key!r} in {self.name}", file=key)
        return OpenFile(os.open(self.name, READ_FLAGS))

    def _close_kept_files(self) -> bool:
        """Close the files of a directory that are kept open. Returns False if there were none."""
        has_closed = False
        if self.is_folder:
            # Another thread may add a handle during this loop.
            for handle in list(self._handles.values()):
                if handle.file is not None:
                    handle.release_file()
                    has_closed = True
        return has_closed

    def _explain_error(self, key: str, error: OSError | UnicodeEncodeError) -> StoreError:
        """Return the error to raise for a file that cannot be opened or read.

        This is `Replaced` if the file existed when the store was opened.
        """
        label = self._label(key)
        was_there = (
            key in self._handles
            or key in self._expected_versions
            or (self._keys is not None and key in self._keys)
        )
        if isinstance(error, OSError) and error.errno in MISSING_ERRNOS and was_there:
            self.is_gone = True
            return Replaced(
                "the file is gone: the checkpoint was replaced or removed while it was open; "
                "open it again",
                file=label,
                errno=error.errno,
            )
        return store_error(label, error, inside=self.is_folder)


def _split_pattern(path: str) -> tuple[str, str]:
    """Split a path with a star into a directory and the pattern for its files.

    Returns:
        The directory and the pattern. If a file has the star in its name, or if no file matches:
        the whole path and ''.
    """
    folder, pattern = os.path.split(path)
    # A star in the name of a folder has no special meaning.
    if "*" not in pattern or os.path.lexists(path):
        return path, ""
    with suppress(OSError), os.scandir(folder or ".") as entries:
        if any(fnmatchcase(entry.name, pattern) for entry in entries):
            return folder or ".", pattern
    return path, ""


def _restore_store(
    path: str, max_files: int, versions: Mapping[str, Version], index: str = ""
) -> LocalStore:
    """Open the store that another process has pickled (`LocalStore.__reduce__`)."""
    store = LocalStore(path, max_files=max_files)
    store.index = index
    store._expected_versions = versions
    # Without its handle, a single file is opened again and then compared with its expected version.
    store._handles.clear()
    return store


_position_locks: WeakValueDictionary[tuple[int, int], threading.Lock] = WeakValueDictionary()
"""Locks by device and inode, for systems whose reads move the position of a file. Duplicates of a
descriptor share one position."""


class DescriptorStore(Store):
    """A regular file that somebody else has open, under one key.

    Reads do not move the position of the file. The store duplicates the descriptor, so the owner
    may close the original at any time.
    """

    KEY = "file"
    single_key = KEY

    def __init__(self, descriptor: int, *, name: str = "<open file>") -> None:
        """Duplicate a descriptor.

        Args:
            descriptor: The descriptor of the file.
            name: The name for messages.
        """
        self.name = name
        self._file: OpenFile | None = OpenFile(os.dup(descriptor))
        self._position_lock: threading.Lock | None = None
        # Without pread, a read moves the position of the file, which all duplicates of the
        # descriptor share. So every store of the same file takes the same lock.
        if not platform.HAS_PREAD:
            status = os.fstat(descriptor)
            identity = status.st_dev, status.st_ino
            self._position_lock = _position_locks.setdefault(
                identity, make_fork_safe(threading.Lock())
            )

    def list(self) -> Sequence[str]:
        return [self.KEY]

    def size(self, key: str) -> int:
        return os.fstat(self._get_file(key).descriptor).st_size

    def read(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of the file from the offset `start` on."""
        file = self._get_file(key)
        # preadv would take an offset of -1 for the current position of the file.
        if start < 0:
            raise Truncated(
                f"cannot read from the negative offset {start}", file=self.name, offset=0
            )
        try:
            if self._position_lock is None:
                read_at(file.descriptor, start, out)
            else:
                with self._position_lock:
                    read_at(file.descriptor, start, out)
        except OSError as error:
            raise store_error(self.name, error) from error
        finally:
            # An exception keeps this frame alive. It must not keep the file open as well.
            del file

    peek = read

    def close(self) -> None:
        """Close the duplicate. The original belongs to the caller."""
        self._file = None

    def _get_file(self, key: str) -> OpenFile:
        """Return the duplicate of the descriptor, which must not have been closed."""
        file = self._file
        if file is None:
            raise Closed("the file was closed; open it again to read from it", file=self.name)
        if key != self.KEY:
            raise StoreError(f"there is no {key!r} in {self.name}", file=key)
        return file

    def __reduce__(self) -> tuple[object, ...]:
        raise Unsupported(
            "an open file cannot be sent to another process; open it there by its path"
        )


def read_at(descriptor: int, start: int, out: memoryview) -> None:
    """Fill `out` with the bytes of an open file from the offset `start` on.

    A system call may read fewer bytes than requested.

    Raises:
        Truncated: The file ends too early.
    """
    filled_nbytes = 0
    while filled_nbytes < out.nbytes:
        block = out[filled_nbytes : filled_nbytes + MAX_READ_NBYTES]
        block_nbytes = platform.preadv(descriptor, [block], start + filled_nbytes)
        if block_nbytes == 0:
            missing_nbytes = out.nbytes - filled_nbytes
            raise Truncated(
                f"the file shrank during the read: {missing_nbytes} bytes are missing",
                offset=start + filled_nbytes,
            )
        filled_nbytes += block_nbytes


def store_error(
    label: str, error: OSError | UnicodeEncodeError, *, inside: bool = False
) -> StoreError:
    """Return the `StoreError` for an error of the file system.

    Args:
        label: The path for the message.
        error: The error. A `UnicodeEncodeError` means that the file system cannot store a character
            of the path.
        inside: Whether the file belongs to a folder that was opened. Otherwise a missing file is a
            wrong path of the user, and gives `NoSuchPath`.
    """
    if isinstance(error, UnicodeEncodeError):
        message = "the file system cannot store a character of this path; rename the file"
        return StoreError(message, file=label)

    messages = {
        errno.ENOENT: "no such file",
        errno.EACCES: "permission denied",
        errno.EISDIR: "this is a folder",
        errno.ENAMETOOLONG: "the name is too long",
        errno.ELOOP: "the links lead in circles",
        errno.EMFILE: (
            "this process has too many open files; close some of them, or raise the limit "
            "(ulimit -n)"
        ),
    }
    message = messages.get(error.errno or 0, error.strerror or str(error))
    error_type = StoreError
    if error.errno == errno.ENOENT and not inside:
        error_type = NoSuchPath
    return error_type(message, file=label, errno=error.errno)
