"""`Place`: a path or a URL as one thing, which can be asked what differs between a disk and a bucket.

Text goes through the library: a `str`, and for a place in an object store a `Url`, which is one, too. `place_at(text)` knows more.
There are two kinds with the same members, and no other module asks which one it is:

    LocalPlace    a file or a folder of this machine
    Url           an object, or all objects below a prefix (`stores/remote/url`)
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING
from urllib.parse import quote

from holdfast.core.limits import Limits
from holdfast.core.protocols import Store
from holdfast.core.value import Value
from holdfast.errors import StoreError, detached
from holdfast.stores import platform
from holdfast.stores.local import LocalStore, store_error
from holdfast.stores.paths import is_parsed_url, is_url

if TYPE_CHECKING:
    from holdfast.stores.remote.url import Problem, Recover, Stamps, Url


class LocalPlace(Value, frozen=True):
    """A file or a folder of this machine. The members are described here for both kinds of places."""

    path: str
    url: None = None
    """What it is in an object store; None on this machine."""
    on_disk: bool = True
    """Whether it is on this machine: a folder is then replaced as a whole, by a rename."""

    @property
    def name(self) -> str:
        return PurePath(self.path).name

    @property
    def parent(self) -> str:
        """The folder in which it is; the place itself at the top."""
        return os.path.dirname(self.path) or os.curdir

    @property
    def rooted(self) -> str:
        """The path from the root on, whatever folder the program goes to."""
        return os.path.abspath(self.path)

    @property
    def real(self) -> str:
        """The path with all links followed."""
        return os.path.realpath(self.path)

    @property
    def identity(self) -> tuple[object, ...]:
        """What is equal for two places of one thing, and for stores that were opened there (`Store.place`)."""
        return "file", self.real

    @property
    def named(self) -> str:
        """What it is called in a record: its real folder, and its own name in there."""
        folder, name = os.path.split(self.path.rstrip("/"))
        return os.path.join(os.path.realpath(folder), name)

    @property
    def uri(self) -> str:
        """The path as a URI; a path that does not begin at the root gives a relative one."""
        pure = PurePath(self.path)
        # A drive stands behind a third slash, with its colon; a server behind the second.
        drive = pure.drive.replace("\\", "/")
        root = drive if drive.startswith("//") else f"///{drive}" if drive else "//"
        text = quote(pure.as_posix()[len(drive) :].encode("utf-8", "surrogateescape"))
        return f"file:{root}{text}" if pure.is_absolute() else text

    @property
    def says_folder(self) -> bool:
        """Whether it was given as a folder's, with a slash at its end."""
        return self.path.endswith("/")

    @property
    def is_folder(self) -> bool:
        return os.path.isdir(self.path)

    @property
    def may_be_file(self) -> bool:
        """Whether there is a file that can be read, or nobody knows: no device, and no link to nowhere."""
        try:
            return stat.S_ISREG(os.stat(self.path).st_mode)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # opening it says what is wrong

    def below(self, name: str, *, folder: bool = False) -> str:
        """The place of a name in this folder; `folder` where it is to say that it is one."""
        return os.path.join(self.path, name) + ("/" if folder else "")

    def file(self, key: str) -> str:
        """The place of a file of the store that was opened here: this place, where it is one file."""
        return self.below(key) if self.is_folder else self.path

    def is_same(self, other: Place) -> bool:
        """Whether two places are one, however they are spelled: not all file systems tell cases apart."""
        if not isinstance(other, LocalPlace):
            return False
        try:
            return self.identity == other.identity or os.path.samefile(self.path, other.path)
        except OSError:
            return False

    def free_nbytes(self) -> int | None:
        """What may still be written in the folder of this place; None where there is no end. Raises `StoreError`."""
        return free_nbytes(os.path.dirname(followed(self.path)) or os.curdir)

    def settled(self, limits: Limits) -> str:
        """The place in one spelling, which says whether it is a folder. Raises where it takes a request and nothing is there."""
        return str(Path(self.path))

    def walk(self, most: int, problem: Problem) -> Iterator[tuple[str, Sequence[str]]]:
        """Every folder at or below this one, with the names of its files, at most so many of them in a bucket. Links to folders are
        not followed. `problem` is called with what cannot be listed, when all else was."""
        problems: list[OSError] = []
        for folder, folders, names in os.walk(self.path, onerror=problems.append):
            folders.sort()
            yield str(Path(folder)), names
        for one in problems:
            problem(str(one.filename), f"cannot list this folder: {one.strerror}")

    def files(self) -> dict[str, int]:
        """The files right in this folder, sorted, with their lengths."""
        found = sorted(os.scandir(self.path), key=lambda entry: entry.name)
        return {entry.name: entry.stat().st_size for entry in found if entry.is_file()}

    def stamps(self) -> Stamps | None:
        """All files here, each by its name, its length and what changes with it; None where something else is there."""
        path = self.path.rstrip("/")
        try:
            found = os.lstat(path)
            if stat.S_ISREG(found.st_mode):
                return [("", found.st_size, str(found.st_mtime_ns))]
            if not stat.S_ISDIR(found.st_mode):
                return None
            inner = [(entry, entry.stat(follow_symlinks=False)) for entry in os.scandir(path)]
        except OSError:
            return None
        if not all(stat.S_ISREG(one.st_mode) for _, one in inner):
            return None
        return sorted((entry.name, one.st_size, str(one.st_mtime_ns)) for entry, one in inner)

    def store(self, limits: Limits, recover: Recover) -> Store:
        """The store of what is there; `recover` finds what a save had set aside when it was cut off, or still has."""
        absent = 0
        while True:
            try:
                return LocalStore(self.path, max_files=limits.files)
            except StoreError as error:
                if error.errno != errno.ENOENT:
                    raise
                missing = detached(error)
            kept = recover(self.path)
            # A directory that is replaced in two steps has no name between them, and may have one by the time we look.
            absent += kept is None and not os.path.exists(self.path)
            if absent > 1:
                try:
                    raise missing
                finally:
                    del missing
            if kept is not None:
                try:
                    return LocalStore(kept, max_files=limits.files, instead_of=self.real)
                except StoreError as error:
                    if error.errno != errno.ENOENT:
                        raise


if TYPE_CHECKING:
    Place = LocalPlace | Url


def place_at(path: str) -> Place:
    """The place of a path or a `Url` that `place_of` gave, or that was found. Any other text is a path, be it called `s3:/x`."""
    # The usual type first: every call that has a path asks.
    return path if type(path) is not str and is_parsed_url(path) else LocalPlace(path)


def place_named(text: str) -> Place:
    """The place that a user's text, or that of a report, seems to be; nothing of it is checked.

    >>> place_named("runs/step-1").on_disk, place_named("s3://bucket/step-1").on_disk
    (True, False)
    """
    if is_url(text):
        from holdfast.stores.remote.url import Url  # for object stores

        return Url(text)
    return LocalPlace(text)


def free_nbytes(folder: str) -> int:
    """Return how many bytes may still be written in a folder. Raises `StoreError`."""
    try:
        return platform.count_free_nbytes(folder)
    except OSError as error:
        raise store_error(folder, error) from None


def followed(path: str) -> str:
    """The path of what a path means, where that is a link. Links before the last part the system follows by itself."""
    path = path.rstrip("/") or path
    return os.path.realpath(path) if os.path.islink(path) else path


def same_place(one: str, other: str) -> bool:
    """Whether two paths or URLs are those of one file, directory or object."""
    first, second = place_at(one), place_at(other)
    if first.on_disk and second.on_disk and _inode(one) != _inode(other):
        return False  # and no link of either path is followed
    return first.identity == second.identity


def _inode(path: str) -> tuple[int, int] | None:
    """Device and inode of a file; None where there is none. One file may have several names that are no links."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def join(folder: str, name: str) -> str:
    return place_at(folder).below(name)
