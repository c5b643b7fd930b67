"""`TargetName`: the name that a save is for, and the words for why a save could not have it.

A path is followed through every link to the real place, once; its parent is opened, and from then on every name is relative to that
descriptor. What no save could ever end at (a missing folder, a name that is too long, links in a circle, a name that looks like one
of our temporaries) is refused here, before anything is written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from holdfast.core.value import Value
from holdfast.engine.commit.temporaries import (
    OVERHEAD,
    SAFE_NAME_NBYTES,
    LockedEntry,
    list_folder,
    repair,
)
from holdfast.errors import DurabilityUncertain, HoldfastError, NotCommitted
from holdfast.stores.files import FileEntry, Files, is_temporary

ADVICE = {
    errno.ENOSPC: "the disk is full; make room or save elsewhere",
    errno.EDQUOT: "the disk quota is used up; make room or save elsewhere",
    errno.EROFS: "the file system is read-only; save elsewhere",
    errno.EIO: "the disk reports an input/output error; do not trust it, save elsewhere",
    errno.EACCES: "permission denied; check who may write into the folder",
    errno.EPERM: "the operation is not permitted; check who may write into the folder",
    errno.ENOENT: "the folder, or something in it, is not there; create it, or see who removes files there",
    errno.ENOTDIR: "a part of the path is no folder",
    errno.EISDIR: "there is a folder with this name",
    errno.EEXIST: "something with this name exists; pass overwrite=True to replace it",
    errno.ENAMETOOLONG: "the name is too long for this file system",
    errno.ELOOP: "links that go round in circles",
    errno.EFBIG: "the file is larger than the file system or the user's limit allows",
    errno.EMFILE: "too many open files; raise `ulimit -n`",
    errno.EINTR: "a signal interrupted it; save again",
    errno.EBUSY: "it is in use: a mount point or, on Windows, a file that a program has open; close that and save again",
}
"""What was found and what to do about it, by error code."""


def explain_failure(error: OSError, action: str, path: str) -> NotCommitted:
    """Return the error for a save that a failed system call stopped before its visible step.

    Args:
        error: The failure.
        action: What the save was doing, such as "creating a file".
        path: The file or folder that the message names.
    """
    reason = ADVICE.get(error.errno or 0, error.strerror or str(error))
    message = f"{action}: {reason}; nothing changed at the target"
    return NotCommitted(message, file=path, errno=error.errno)


def explain_uncertainty(message: str, path: str, error: OSError) -> DurabilityUncertain:
    """Return the error for a save that is in place but perhaps not on the disk, after a failed call."""
    reason = error.strerror or error
    message = f"{message}: {reason}; save again before you rely on it"
    return DurabilityUncertain(message, file=path, errno=error.errno)


@contextmanager
def not_committed_on_error(action: str, path: str) -> Iterator[None]:
    """Turn errors of the file system in the block into `NotCommitted`; our own errors pass."""
    try:
        yield
    except HoldfastError:
        raise
    except OSError as error:
        raise explain_failure(error, action, path) from error
    except UnicodeError as error:
        message = "the path has a character that the file system cannot hold"
        raise NotCommitted(message, file=path, errno=errno.EINVAL) from error


def refuse_existing(
    found: FileEntry | None, path: str, *, directory: bool, overwrite: bool
) -> None:
    """Raise `NotCommitted` where what is there cannot be replaced: it is of another kind, may not be, or is marked read-only."""
    if found is None:
        return
    what = "folder" if directory else "file"
    if directory and found.kind != "directory":
        raise NotCommitted(
            "a folder was to be saved and something else has this name; remove it",
            file=path,
            errno=errno.ENOTDIR,
        )
    if not directory and found.kind == "directory":
        raise NotCommitted(
            "a file was to be saved and there is a folder with this name",
            file=path,
            errno=errno.EISDIR,
        )
    if not directory and found.kind != "file":
        raise NotCommitted(
            "the target is no plain file (a device, a pipe or a socket)",
            file=path,
            errno=errno.EINVAL,
        )
    if not overwrite:
        raise NotCommitted(
            f"the {what} exists; pass overwrite=True to replace it", file=path, errno=errno.EEXIST
        )
    if not found.mode & 0o222:
        raise NotCommitted(
            f"the {what} is marked read-only; allow writing to it or save elsewhere",
            file=path,
            errno=errno.EACCES,
        )


NOT_GIVEN = frozenset(
    {errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
)
"""What chown(2) answers to those who may not, for a user that this namespace does not have, and without owners at all."""


class TargetName(Value, frozen=True):
    files: Files
    path: str  # What the caller said.
    name: str
    at: int  # The parent directory, open.
    longest: int  # How many bytes a name may have there, or fewer where that is enough for this one's temporaries.
    existing: FileEntry | None  # What there was when the save began.
    neighbours: Sequence[str] | None
    """The names in the parent directory. None if this save does not look for what dead processes left there."""

    def holds(self, temporary: LockedEntry) -> bool:
        """Whether the name stands for what was to be published now, or cannot be looked at."""
        try:
            found = self.files.stat(self.name, dir_fd=self.at)
        except OSError:
            return True
        return found is not None and found.identity == temporary.identity

    def keep_access(
        self, descriptor: int, like: FileEntry | None, *, found: FileEntry | None = None
    ) -> None:
        """Give what is to replace something its user, its group and its permission bits, as far as we may. Nobody may do more with
        it than before: where the group cannot be kept, it may do what everybody may. A directory keeps the setgid and the sticky
        bit, too. `found` is what there is, where that is known."""
        if like is None:
            return
        bits = 0o3777 if like.kind == "directory" else 0o777
        wanted = like.mode & bits
        with not_committed_on_error("giving it the permissions of what it replaces", self.path):
            found = found or self.files.inspect(descriptor)
            # Before the bits: what it is opened for is then opened for the right group.
            if found.owner != like.owner and not self._give(descriptor, found, like):
                wanted &= 0o1707 | (wanted & 0o007) << 3
            # A file system without permissions (vfat) refuses to change them, and shows the same for everything.
            if found.mode & bits != wanted:
                self.files.chmod(descriptor, wanted)

    def _give(self, descriptor: int, found: FileEntry, like: FileEntry) -> bool:
        """Whether it has the group of what it replaces, after trying to give it that and the user."""
        user, group = like.owner
        for one in (user, -1):  # a user is given by root alone, a group by each of its members
            try:
                self.files.chown(descriptor, one, group)
            except OSError as error:
                if error.errno not in NOT_GIVEN:
                    raise
            else:
                return True
        return found.owner[1] == group

    def close(self) -> None:
        with suppress(OSError):
            self.files.close(self.at)


def open_target(files: Files, path: str, *, replaces: bool = False) -> TargetName:
    """Find the real target, undo what a crash left half-done there, and refuse what no save could end at. What surely `replaces` a
    file, whatever is there, need not list a large folder every time."""
    if not path or "\0" in path:
        raise NotCommitted(
            "a path is needed, without NUL characters", file=path, errno=errno.EINVAL
        )
    parent, name = os.path.split(path)
    opening = f"opening the folder to save into ({parent or '.'})"
    target = None
    if name not in ("", os.curdir, os.pardir):
        # The system itself follows the links on the way to a folder.
        folder = parent or os.curdir
        target = _look_up(files, path, folder, name=name, replaces=replaces, opening=opening)
    if target is None:
        # The name is a link, or is no name: now the whole path is followed by hand.
        with not_committed_on_error(opening, path):
            folder, name = os.path.split(files.resolve(path))
        if not name:
            raise NotCommitted(
                "the root of the file system is no place for a checkpoint",
                file=path,
                errno=errno.EINVAL,
            )
        target = _look_up(files, path, folder, name=name, replaces=replaces, opening=opening)
    if target is None:
        raise explain_failure(
            OSError(errno.ELOOP, "Too many levels of symbolic links"), "looking at the target", path
        )
    return target


def _look_up(
    files: Files, path: str, parent: str, *, name: str, replaces: bool, opening: str
) -> TargetName | None:
    """Return the target of this name in a folder, None if it is a link. `opening` names the first step in errors."""
    with not_committed_on_error(opening, path):
        at = files.open_directory(parent)
    target: TargetName | None = None
    try:
        with not_committed_on_error("looking at the target", path):
            name_nbytes = len(name.encode("utf-8", "surrogateescape"))
            # A folder on another machine takes time to answer.
            is_short = name_nbytes <= SAFE_NAME_NBYTES - OVERHEAD
            longest = SAFE_NAME_NBYTES if is_short else files.longest_name(at)
            if name_nbytes > longest:
                raise OSError(errno.ENAMETOOLONG, "File name too long")
            if name.startswith(".") and is_temporary(name):
                raise NotCommitted(
                    "names of this form are temporaries, which saves remove; choose another",
                    file=path,
                    errno=errno.EINVAL,
                )
            existing = files.stat(name, dir_fd=at)
            if existing is not None and existing.kind == "link":
                return None
            neighbours: Sequence[str] | None = ()
            try:
                neighbours = list_folder(files, at, is_optional=replaces)
            except OSError:
                # Of a target that is there, the folder need not be readable.
                if existing is None:
                    raise
            if existing is None and repair(
                files, name, at=at, there=neighbours or (), longest=longest
            ):
                existing = files.stat(name, dir_fd=at)
            target = TargetName(files, path, name, at, longest, existing, neighbours)
    finally:
        if target is None:
            with suppress(OSError):
                files.close(at)
    return target
