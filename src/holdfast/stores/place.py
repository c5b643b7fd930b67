"""`LocalPlace`: a path with the same members as a `Url`, so callers need not tell disk and bucket
apart.

The library passes places around as text: a `str`, or a `Url`, which is a subclass of `str`. A
function that needs more calls `place_at(text)`. There are two types of places with the same
members:

    LocalPlace    a file or a folder on this machine
    Url           an object, or all objects under a prefix (`stores/remote/url`)
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING
from urllib.parse import quote

from holdfast.core.limits import Limits
from holdfast.core.protocols import Store
from holdfast.core.value import Value
from holdfast.errors import StoreError, drop_tracebacks
from holdfast.stores import platform
from holdfast.stores.local import LocalStore, store_error
from holdfast.stores.paths import is_parsed_url, is_url

if TYPE_CHECKING:
    from holdfast.stores.remote.url import FindSetAside, Problem, Stamps, Url

MAX_OPEN_ATTEMPTS = 100
"""How often `LocalPlace.open_store` looks for a missing checkpoint. Every attempt but the first two
means that one more save has replaced it since the attempt before."""


class LocalPlace(Value, frozen=True):
    """A file or a folder on this machine. The docstrings of the members also apply to `Url`."""

    path: str
    url: None = None
    """The `Url` of a place in an object store; None on this machine."""
    on_disk: bool = True
    """Whether the place is on this machine, so that a rename can replace a folder as a whole."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePath(self.path).name

    @property
    def parent(self) -> str:
        """The folder that contains this place; at the top, the place itself."""
        return os.path.dirname(self.path) or os.curdir

    @property
    def absolute(self) -> str:
        """The absolute path, which stays valid when the program changes its working directory."""
        return os.path.abspath(self.path)

    @property
    def real(self) -> str:
        """The path with all links followed (`os.path.realpath`)."""
        return os.path.realpath(self.path)

    @property
    def identity(self) -> tuple[object, ...]:
        """A key that is equal for two spellings of one place, and for its store."""
        return "file", self.real

    @property
    def record_name(self) -> str:
        """The name of this place in a record of a run or a conversion.

        It has the real folder and the name of the place itself, even if that is a link.
        """
        folder, name = os.path.split(self.path.rstrip("/"))
        return os.path.join(os.path.realpath(folder), name)

    @property
    def uri(self) -> str:
        """The path as a URI. A relative path gives a relative URI."""
        path = PurePath(self.path)
        # A drive and its colon follow the third slash (file:///C:/x), a server follows the second.
        drive = path.drive.replace("\\", "/")
        quoted_path = quote(path.as_posix()[len(drive) :].encode("utf-8", "surrogateescape"))
        if not path.is_absolute():
            return quoted_path
        if drive.startswith("//"):
            return f"file:{drive}{quoted_path}"
        if drive:
            return f"file:///{drive}{quoted_path}"
        return f"file://{quoted_path}"

    @property
    def is_marked_as_folder(self) -> bool:
        """Whether the user marked this place as a folder, with a slash at its end."""
        return self.path.endswith("/")

    @property
    def is_folder(self) -> bool:
        """Whether a folder exists here."""
        return os.path.isdir(self.path)

    @property
    def may_be_file(self) -> bool:
        """Whether a regular file exists here, or may exist. False for devices and broken links."""
        try:
            return stat.S_ISREG(os.stat(self.path).st_mode)
        except FileNotFoundError:
            return False
        except OSError:
            # The caller opens the file next, and that reports the error.
            return True

    def below(self, name: str, *, folder: bool = False) -> str:
        """Return the place of a name in this folder. With `folder`, mark it as a folder."""
        path = os.path.join(self.path, name)
        return f"{path}/" if folder else path

    def file(self, key: str) -> str:
        """Return the place of a file in the store that was opened here.

        If the store is a single file, this is the place itself.
        """
        if self.is_folder:
            return self.below(key)
        return self.path

    def is_same(self, other: Place) -> bool:
        """Return whether two places are the same, however they are spelled.

        On a file system that ignores case, paths that differ in case are the same place.
        """
        if not isinstance(other, LocalPlace):
            return False
        try:
            return self.identity == other.identity or os.path.samefile(self.path, other.path)
        except OSError:
            return False

    def free_nbytes(self) -> int | None:
        """Return how many bytes can be written at this place. None if there is no limit.

        Raises:
            StoreError: The file system does not report its free space.
        """
        folder = os.path.dirname(os.path.realpath(self.path))
        try:
            return platform.count_free_nbytes(folder)
        except OSError as error:
            raise store_error(folder, error) from None

    def normalize(self, limits: Limits) -> str:
        """Return the place in its usual spelling: `a//b/./c/` becomes `a/b/c`.

        A `Url` finds out with a request whether it is a folder, and raises an error if nothing is
        there.
        """
        return str(Path(self.path))

    def walk(self, max_files: int, on_problem: Problem) -> Iterator[tuple[str, Sequence[str]]]:
        """Yield every folder at or under this place with the names of its files.

        Links to folders are not followed.

        Args:
            max_files: The largest number of files to list in a bucket.
            on_problem: At the end, this is called for each folder that cannot be listed.
        """
        errors: list[OSError] = []
        for folder, subfolders, file_names in os.walk(self.path, onerror=errors.append):
            subfolders.sort()
            yield str(Path(folder)), file_names
        for error in errors:
            on_problem(str(error.filename), f"cannot list this folder: {error.strerror}")

    def files(self) -> dict[str, int]:
        """Return the names of the files in this folder, sorted, with their sizes."""
        entries = sorted(os.scandir(self.path), key=lambda entry: entry.name)
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    def stamps(self) -> Stamps | None:
        """Return name, size and modification time of the file here, or of every file in the folder.

        Returns:
            Sorted by name; the name of a single file is ''. None if there is anything but regular
            files, or if a file cannot be inspected: then no change can be excluded.
        """
        path = self.path.rstrip("/")
        try:
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                return [("", status.st_size, str(status.st_mtime_ns))]
            if not stat.S_ISDIR(status.st_mode):
                return None

            stamps: Stamps = []
            with os.scandir(path) as entries:
                for entry in entries:
                    file_status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(file_status.st_mode):
                        return None
                    modified_ns = str(file_status.st_mtime_ns)
                    stamps.append((entry.name, file_status.st_size, modified_ns))
        except OSError:
            return None
        return sorted(stamps)

    def open_store(self, limits: Limits, find_set_aside: FindSetAside) -> Store:
        """Open the file or the folder at this place.

        If the place is missing, a save may be replacing it, or may have been interrupted. Then the
        directory that the save has set aside is opened instead.

        Args:
            limits: The limits of the store.
            find_set_aside: Returns the path of the directory that was set aside, or None.

        Raises:
            NoSuchPath: There is neither a checkpoint here nor one that was set aside.
        """
        try:
            return LocalStore(self.path, max_files=limits.files)
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise
            missing_error = drop_tracebacks(error)

        store = self._open_during_save(limits, find_set_aside)
        if store is None:
            try:
                raise missing_error
            finally:
                # Otherwise the error and this frame would keep each other alive.
                del missing_error
        return store

    def _open_during_save(self, limits: Limits, find_set_aside: FindSetAside) -> Store | None:
        """Open a place that was missing a moment ago, because a save may be replacing it.

        Such a save renames twice: the old directory to a temporary name, which sets it aside, and
        the new directory to the name of the place. Between the two renames, and after a crash
        there, only the directory that was set aside exists. After them, the save deletes it.

        Returns:
            A store of the place or of the directory that was set aside. None if both are missing.
        """
        was_missing = False
        for _ in range(MAX_OPEN_ATTEMPTS):
            set_aside_path = find_set_aside(self.path)
            if set_aside_path is not None:
                store = _open_unless_missing(set_aside_path, limits, instead_of=self.real)
            else:
                # The name of the place may have come back before `find_set_aside` looked for the
                # other directory. So only two rounds without either of them mean that both are
                # missing.
                is_missing = not os.path.exists(self.path)
                if is_missing and was_missing:
                    return None
                was_missing = was_missing or is_missing
                store = _open_unless_missing(self.path, limits)
            if store is not None:
                return store
        return None


def _open_unless_missing(
    path: str, limits: Limits, *, instead_of: str | None = None
) -> LocalStore | None:
    """Open a file or a folder. Returns None if it does not exist, or not any more."""
    try:
        return LocalStore(path, max_files=limits.files, instead_of=instead_of)
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
        return None


if TYPE_CHECKING:
    Place = LocalPlace | Url


def place_at(path: str) -> Place:
    """Return the place for a text that `place_of` or a listing of files returned.

    A `Url` is a place already. Any other text is a local path, even if it looks like a URL: a local
    folder may have the name `s3:`.
    """
    # The exact type is compared first because every call with a path comes here.
    if type(path) is not str and is_parsed_url(path):
        return path
    return LocalPlace(path)


def place_from_text(text: str) -> Place:
    """Return the place of a text that a user or a report gives, without any checks.

    >>> place_from_text("runs/step-1").on_disk, place_from_text("s3://bucket/step-1").on_disk
    (True, False)
    """
    if is_url(text):
        from holdfast.stores.remote.url import Url  # only for object stores

        return Url(text)
    return LocalPlace(text)


def follow_link(path: str) -> str:
    """Return the target of a path if its last component is a link, otherwise the path.

    Links in the other components need no help: every system call follows them.
    """
    # With a slash at its end, a link would count as the directory that it leads to. The path "/" has
    # nothing else.
    path = path.rstrip("/") or path
    if os.path.islink(path):
        return os.path.realpath(path)
    return path


def is_same_place(first_path: str, second_path: str) -> bool:
    """Return whether two paths or URLs lead to the same file, directory or object.

    Two hard links of a file are two places.
    """
    first_place = place_at(first_path)
    second_place = place_at(second_path)
    if first_place.on_disk and second_place.on_disk:
        # If the system reports two different files, every link of both paths need not be followed.
        # A path where nothing exists raises OSError, and one with a NUL character ValueError. Then
        # the spellings of the paths are compared below.
        with suppress(OSError, ValueError):
            if not os.path.samefile(first_path, second_path):
                return False
    return first_place.identity == second_place.identity


def join(folder: str, name: str) -> str:
    """Return the place of a name in a folder, which may be a URL."""
    return place_at(folder).below(name)
