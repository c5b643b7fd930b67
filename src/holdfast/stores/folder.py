"""`Folder`: a directory that was opened, and stays the one that was opened whatever its path comes to mean.

A directory is replaced by exchanging two names (`engine/commit`), and what it was is then removed file by file. Whoever asks by
path gets one checkpoint's index and another's data. So a reader holds a descriptor of the directory, and everything in it is
listed, opened and measured relative to that: it finds the old files, or none, and never others.

Links are the exception, since only a path can be followed to where a link leads. They are followed as long as the path still means
this directory, and only to places where they may lead. (A directory with links in it is never replaced by a save.)
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.core.keys import check_key
from holdfast.errors import LimitExceeded, Replaced, UnsafePath
from holdfast.stores.files import is_temporary
from holdfast.stores.platform import ALWAYS, DIRECTORY, NO_LINK, NO_WAIT, OPENS_DIRECTORIES

Keys = list[str]

ALIVE: set[int] = set()
"""Descriptors that readers of this process hold. Adding and discarding are one step each: no lock is needed, also in `__del__`."""

GONE = frozenset({errno.ENOENT, errno.ESTALE})
"""What a file system says of a file that was there when it was listed; the second is NFS's word."""

A_LINK = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EMLINK})
"""What open(2) says of a link that it must not follow: Linux, of one on the way as well, and FreeBSD."""

RANK, UNIVERSAL = "mp_rank_", "zero"
"""What folders are called that are listed two folders down: `iter_0000200/mp_rank_00` of Megatron's runs, `zero/emb.weight` of
DeepSpeed's universal checkpoints, and `global_step9/zero` of their runs."""

READ = os.O_RDONLY | ALWAYS | NO_WAIT


class OpenFile:
    """A descriptor that lives as long as somebody refers to it.

    Whoever reads holds a reference for as long as the read takes, so that the number cannot come to mean another file meanwhile:
    closing is no more than letting go, and the last one to let go closes.
    """

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
    """An open directory."""

    def __init__(self, path: str, *, instead_of: str | None = None) -> None:
        """Open a directory: the one at `path`, which may stand in for one that does not exist (`recover`)."""
        self.path = path
        self._instead_of = instead_of
        found = self._hold()
        self._identity = found.st_dev, found.st_ino

    def _hold(self) -> os.stat_result:
        """Bind this object to the directory, and measure that."""
        self._file = OpenFile(os.open(self.path, os.O_RDONLY | DIRECTORY | ALWAYS))
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
        and unfinished saves are no part of a checkpoint.

        Raises `Replaced` where the directory was replaced meanwhile, since then some names may be gone already.
        """
        keys: Keys = []
        try:
            self._collect("", keys, most)
        except OSError as error:
            if error.errno not in GONE or self.in_place():
                raise
        if not self.in_place():
            raise Replaced("the folder was replaced while it was looked at; open it again", file=self.path)
        return sorted(keys)

    def _collect(self, prefix: str, keys: Keys, most: int) -> None:
        folders = []
        with self._entries(prefix) as entries:
            for entry in entries:
                if entry.is_dir():
                    if not entry.name.startswith(".") and (not prefix or _is_listed(prefix, entry.name)):
                        folders.append(f"{prefix}{entry.name}/")
                elif entry.is_file() and not is_temporary(entry.name):
                    keys.append(prefix + entry.name)
                    if len(keys) > most:
                        raise LimitExceeded(f"more files than Limits(files={most})", file=self.path, expected=most)
        for folder in folders:
            self._collect(folder, keys, most)

    @contextmanager
    def _entries(self, prefix: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        # A descriptor of its own: the place in a listing belongs to the descriptor, which others may use.
        here = OpenFile(os.open(prefix or ".", os.O_RDONLY | DIRECTORY | ALWAYS, dir_fd=self._file.number))
        with os.scandir(here.number) as entries:
            yield entries

    def open(self, key: str) -> OpenFile:
        """Open a file in here. Raises `OSError`, and `UnsafePath` where a link leads out."""
        *folders, name = check_key(key).split("/")
        at = self._file
        try:
            for folder in folders:
                at = OpenFile(os.open(folder, os.O_RDONLY | DIRECTORY | NO_LINK | ALWAYS, dir_fd=at.number))
            return OpenFile(os.open(name, READ | NO_LINK, dir_fd=at.number))
        except OSError as error:
            if error.errno not in A_LINK:
                raise
        return self._follow(key)

    def _follow(self, key: str) -> OpenFile:
        """Open what a link leads to, if it may lead there: into this directory, or from `snapshots/<revision>` to its `blobs`."""
        root = os.path.realpath(self.path)
        path = os.path.realpath(os.path.join(root, key))
        allowed = [root]
        revisions = os.path.dirname(root)
        if os.path.basename(revisions) == "snapshots":
            allowed.append(os.path.join(os.path.dirname(revisions), "blobs"))
        if not any(path.startswith(place.rstrip(os.sep) + os.sep) for place in allowed):
            raise UnsafePath(f"a link leads out of the checkpoint, to {path!r}", file=os.path.join(self.path, key))
        file = OpenFile(os.open(path, READ | NO_LINK))
        if not self.in_place():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return file


class PathFolder(Folder):
    """A directory where none can be opened (Windows): known by its path, and by its identity, which is compared at every use.

    What was opened while another had the path is let go of again. Only a folder that is replaced twice within one call, and by
    itself, would not be noticed.
    """

    def _hold(self) -> os.stat_result:
        return os.stat(self.path)

    @contextmanager
    def _entries(self, prefix: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        with os.scandir(os.path.join(self.path, prefix)) as entries:
            yield entries

    def open(self, key: str) -> OpenFile:
        return self._follow(check_key(key))


def _is_listed(prefix: str, name: str) -> bool:
    return prefix.count("/") == 1 and (name.startswith(RANK) or name == UNIVERSAL or prefix == f"{UNIVERSAL}/")


def open_folder(path: str, *, instead_of: str | None = None) -> Folder:
    """Open a directory, in the way that this system has."""
    return (Folder if OPENS_DIRECTORIES else PathFolder)(path, instead_of=instead_of)


def meet(path: str) -> tuple[OpenFile | None, os.stat_result]:
    """What there is at a path, a file or a directory: opened, where this system opens both."""
    if not OPENS_DIRECTORIES:
        return None, os.stat(path)
    file = OpenFile(os.open(path, READ))
    return file, os.fstat(file.number)


def plain(file: OpenFile, label: str) -> os.stat_result:
    """What there is behind a descriptor, if it is a plain file."""
    found = os.fstat(file.number)
    if not stat.S_ISREG(found.st_mode):
        raise UnsafePath("not a plain file (a device, a pipe, a socket or a folder)", file=label)
    return found
