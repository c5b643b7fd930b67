"""Finds the target of a save on a local file system, and explains why a save cannot have it.

A path is followed through all links to the real target, once. The parent folder is opened, and from
then on every name is relative to its descriptor. So nobody can redirect a save by moving a folder
or by changing a link. Targets that no save could have are refused here, before anything is written:
a missing folder, a name that is too long, links in a circle, and names of temporaries.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from holdfast.engine.commit.temporaries import (
    OVERHEAD_NBYTES,
    SAFE_NAME_NBYTES,
    LockedEntry,
    TargetLocation,
    list_folder,
    restore_set_aside,
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
    errno.ENOENT: "the folder, or something in it, is not there; create it, or see who removes "
    "files there",
    errno.ENOTDIR: "something in the path is not a folder",
    errno.EISDIR: "there is a folder with this name",
    errno.EEXIST: "something with this name exists; pass overwrite=True to replace it",
    errno.ENAMETOOLONG: "the name is too long for this file system",
    errno.ELOOP: "the links in the path form a circle",
    errno.EFBIG: "the file is larger than the file system or the user's limit allows",
    errno.EMFILE: "too many open files; raise `ulimit -n`",
    errno.EINTR: "a signal interrupted it; save again",
    errno.EBUSY: "it is in use: a mount point or, on Windows, a file that a program has open; "
    "close that and save again",
}
"""For each error code, what is wrong and what to do about it."""

CHOWN_REFUSED_ERRNOS = frozenset(
    {errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
)
"""Errors of chown(2) for users who may not, for users that this namespace does not have, and on
file systems without owners."""


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
    """Return the error for a save that is visible, but whose last system calls failed."""
    if isinstance(error, NotCommitted) and isinstance(error.__cause__, OSError):
        # The message of a file that is not committed would be wrong now.
        error = error.__cause__
    reason = error.strerror or error
    message = f"{message}: {reason}; save again before you rely on it"
    return DurabilityUncertain(message, file=path, errno=error.errno)


@contextmanager
def not_committed_on_error(action: str, path: str) -> Iterator[None]:
    """Raise `NotCommitted` instead of an error of the file system in the block.

    Holdfast's own errors pass unchanged.

    Args:
        action: What the block does, for the message, such as "creating a file".
        path: The file or folder that the message names.
    """
    try:
        yield
    except HoldfastError:
        raise
    except OSError as error:
        raise explain_failure(error, action, path) from error
    except UnicodeError as error:
        message = "the path has a character that the file system cannot hold"
        raise NotCommitted(message, file=path, errno=errno.EINVAL) from error


def check_replaceable(
    existing: FileEntry | None, path: str, *, is_folder: bool, overwrite: bool
) -> None:
    """Raise `NotCommitted` if a save must not replace what is at its target.

    Args:
        existing: What is there. None if nothing is.
        path: The target, for messages.
        is_folder: Whether a folder is saved instead of a file.
        overwrite: Whether the caller allows to replace what exists.
    """
    if existing is None:
        return

    message = ""
    code = errno.EEXIST
    kind = "folder" if is_folder else "file"
    if is_folder and existing.kind != "directory":
        message = "a folder was to be saved and something else has this name; remove it"
        code = errno.ENOTDIR
    elif not is_folder and existing.kind == "directory":
        message = "a file was to be saved and there is a folder with this name"
        code = errno.EISDIR
    elif not is_folder and existing.kind != "file":
        message = "the target is not a regular file (a device, a pipe or a socket)"
        code = errno.EINVAL
    elif not overwrite:
        message = f"the {kind} exists; pass overwrite=True to replace it"
    elif not existing.mode & 0o222:
        # A rename would replace it nevertheless: the system checks only the folder's permissions.
        message = f"the {kind} is marked read-only; allow writing to it or save elsewhere"
        code = errno.EACCES
    if message:
        raise NotCommitted(message, file=path, errno=code)


class LocalTarget(TargetLocation, frozen=True):
    """The target of a save on a local file system, with its parent folder open."""

    path: str
    """The path as the caller wrote it, for messages."""
    existing: FileEntry | None
    """What was there when the save began. None if nothing was."""
    neighbor_names: Sequence[str] | None
    """All names in the parent folder. None if this save did not list it."""

    def may_have_become(self, temporary: LockedEntry) -> bool:
        """Return whether a temporary has the name of the target now, after a rename has failed.

        Also true if that cannot be found out: then nobody may say that the save changed nothing.
        """
        try:
            current = self.files.stat(self.name, dir_fd=self.dir_fd)
        except OSError:
            return True
        return current is not None and current.identity == temporary.identity

    def copy_access(
        self,
        descriptor: int,
        permission_source: FileEntry | None,
        *,
        current: FileEntry | None = None,
    ) -> None:
        """Give a new file the user, the group and the permission bits of the one it replaces.

        This is done as far as the process is allowed to, and such that nobody can do more with the
        new file than with the old one. If the group cannot be kept, the new group gets only the
        rights that everybody has. Folders keep their setgid and sticky bits as well.

        Args:
            descriptor: The new file or folder.
            permission_source: The metadata of what it replaces. If this is None, nothing is changed.
            current: The metadata of the new file, if it is known.
        """
        if permission_source is None:
            return
        # A setuid or setgid bit of a file would let a checkpoint run with the rights of its owner.
        # The setgid bit of a folder only passes on its group, and the sticky bit restricts removal.
        kept_bits = 0o3777 if permission_source.kind == "directory" else 0o777
        mode = permission_source.mode & kept_bits
        with not_committed_on_error("giving it the permissions of what it replaces", self.path):
            if current is None:
                current = self.files.inspect(descriptor)
            # The owner comes before the bits: otherwise the wrong group could open the file.
            has_group = current.owner == permission_source.owner or self._copy_owner(
                descriptor, current, permission_source
            )
            if not has_group:
                # 0o1707 clears the setgid bit and the bits of the group. The group then gets the
                # rights of all users, unless the old group did not have them.
                rights_of_all = mode & 0o007
                mode &= 0o1707 | rights_of_all << 3
            # File systems without permissions (vfat) refuse this call, and show equal bits for
            # all files.
            if current.mode & kept_bits != mode:
                self.files.chmod(descriptor, mode)

    def _copy_owner(
        self, descriptor: int, current: FileEntry, permission_source: FileEntry
    ) -> bool:
        """Try to give a file the user and group of another. Return whether it has the group now.

        Args:
            descriptor: The file to change.
            current: Its metadata before the change.
            permission_source: The file that has the right user and group.
        """
        user, group = permission_source.owner
        # Only root may change the user, but each member of a group may give a file to the group.
        # chown(2) leaves the user as it is if it is called with -1.
        for new_user in (user, -1):
            try:
                self.files.chown(descriptor, new_user, group)
            except OSError as error:
                if error.errno not in CHOWN_REFUSED_ERRNOS:
                    raise
            else:
                return True
        # Some systems refuse chown(2) even if it would change nothing.
        return current.owner[1] == group

    def close(self) -> None:
        """Close the parent folder."""
        with suppress(OSError):
            self.files.close(self.dir_fd)


def open_target(files: Files, path: str, *, is_listing_optional: bool = False) -> LocalTarget:
    """Open the target of a save, and repair what a crash of an earlier save left there.

    Args:
        files: The file system.
        path: The path as the caller wrote it. A link stands for the file behind it.
        is_listing_optional: Whether the parent folder need not be listed if it is large. The save
            must be one that may replace any file.

    Returns:
        The target, which the caller must close.

    Raises:
        NotCommitted: No save could end at this path.
    """
    if not path or "\0" in path:
        message = "a save needs a path without NUL characters"
        raise NotCommitted(message, file=path, errno=errno.EINVAL)

    parent, name = os.path.split(path)
    action = f"opening the folder to save into ({parent or '.'})"
    target = None
    if name not in ("", os.curdir, os.pardir):
        # The system itself follows the links on the way to the folder.
        target = _open_in_folder(
            files, path, parent or os.curdir, name, is_listing_optional=is_listing_optional
        )
    if target is None:
        # The last component is a link or not a name, so the whole path must be resolved.
        with not_committed_on_error(action, path):
            parent, name = os.path.split(files.resolve(path))
        if not name:
            message = "a checkpoint cannot be saved to the root of the file system"
            raise NotCommitted(message, file=path, errno=errno.EINVAL)
        target = _open_in_folder(files, path, parent, name, is_listing_optional=is_listing_optional)
    if target is None:
        # A resolved path ends in a link only if the links form a circle.
        circle = OSError(errno.ELOOP, "Too many levels of symbolic links")
        raise explain_failure(circle, "looking at the target", path)
    return target


def _open_in_folder(
    files: Files, path: str, parent: str, name: str, *, is_listing_optional: bool
) -> LocalTarget | None:
    """Open the parent folder of a target, and look at the target in it.

    Args:
        files: The file system.
        path: The path as the caller wrote it, for messages.
        parent: The path of the parent folder.
        name: The name of the target in it.
        is_listing_optional: Whether the parent folder need not be listed if it is large.

    Returns:
        The target, which owns the open parent folder. None if there is a link with this name: then
        the target is somewhere else.
    """
    with not_committed_on_error(f"opening the folder to save into ({parent})", path):
        dir_fd = files.open_directory(parent)
    target: LocalTarget | None = None
    try:
        with not_committed_on_error("looking at the target", path):
            name_nbytes = len(name.encode("utf-8", "surrogateescape"))
            max_name_nbytes = SAFE_NAME_NBYTES
            if name_nbytes > SAFE_NAME_NBYTES - OVERHEAD_NBYTES:
                # The name may be too long on some file systems. This asks the file system, which
                # takes time if it is on another machine.
                max_name_nbytes = files.longest_name(dir_fd)
            if name_nbytes > max_name_nbytes:
                raise OSError(errno.ENAMETOOLONG, "File name too long")
            if name.startswith(".") and is_temporary(name):
                message = (
                    "names of this form are temporaries, which saves remove; choose another name"
                )
                raise NotCommitted(message, file=path, errno=errno.EINVAL)

            existing = files.stat(name, dir_fd=dir_fd)
            if existing is not None and existing.kind == "link":
                return None

            neighbor_names: Sequence[str] | None = ()
            try:
                neighbor_names = list_folder(files, dir_fd, is_optional=is_listing_optional)
            except OSError:
                # A folder may be writable without being readable. That is no reason to refuse a
                # save that replaces an existing target.
                if existing is None:
                    raise

            location = TargetLocation(files, name, dir_fd, max_name_nbytes)
            # A crash of an earlier save may have left its old checkpoint set aside, without a
            # target. It gets its name back before this save decides whether it may replace it.
            if existing is None and restore_set_aside(location, neighbor_names or ()):
                existing = files.stat(name, dir_fd=dir_fd)
            target = LocalTarget(
                files, name, dir_fd, max_name_nbytes, path, existing, neighbor_names
            )
    finally:
        # Nobody owns the folder yet if there was an error, or if the name is that of a link.
        if target is None:
            with suppress(OSError):
                files.close(dir_fd)
    return target
