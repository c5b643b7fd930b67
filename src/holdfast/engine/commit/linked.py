"""A finished file of another directory, under a second name in a new one; where that cannot be had, a copy of it.

A hard link costs nothing, works on nearly every file system, and `rm -rf` of either directory leaves the other whole. Nothing of
the file changes, not its permissions either: it is one file, and whoever may read it there may read it here. Whoever edits it in
place edits it in both; Holdfast itself never does, it writes anew and renames.

Where the system refuses (another mount, 65,000 names already, a file of somebody else's) the bytes are copied inside the kernel,
which shares the blocks where the file system can (btrfs, xfs: a reflink).
"""

from __future__ import annotations

import errno

from holdfast.engine.commit.new_file import NewFile
from holdfast.engine.commit.target import refusal
from holdfast.stores.files import Files

NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What link(2) answers on a file system without hard links."""

CANNOT_LINK = NO_LINKS | {errno.EXDEV, errno.EMLINK, errno.EACCES, errno.EINVAL}
"""And where this file can have no second name here: another mount, too many names, protected_hardlinks."""

CHANGED = "the base changed while it was read: this is not the file that it had; save again"


def linked_or_copied(files: Files, key: str, nbytes: int, *, source_at: int, at: int, label: str) -> tuple[NewFile, bool]:
    """The file in `source_at`, which has this length, under the same name in `at`; and whether it is the same file or a copy.

    Raises `NotCommitted` where it is not there any more, or not as it was, and `OSError`.
    """
    found = files.stat(key, at=source_at)
    if found is None or found.kind != "file" or found.nbytes != nbytes:
        raise refusal(CHANGED, label, errno.ESTALE)
    try:
        files.link(key, key, at=at, source_at=source_at)
    except OSError as error:
        if error.errno not in CANNOT_LINK:
            raise
        return _copied(files, key, nbytes, source_at=source_at, at=at, label=label), False
    taken = NewFile(files, files.open(key, at=at), path=label)
    try:
        if files.inspect(taken.descriptor).identity != found.identity:
            raise refusal(CHANGED, label, errno.ESTALE)
    except BaseException:
        taken.give_up()
        raise
    return taken, True


def _copied(files: Files, key: str, nbytes: int, *, source_at: int, at: int, label: str) -> NewFile:
    made = NewFile(files, files.create(key, at=at), path=label)
    try:
        source = files.open(key, at=source_at)
        try:
            made.copy(source, nbytes, source_offset=0, offset=0)
        finally:
            files.close(source)
    except BaseException:
        made.give_up()
        raise
    return made
