"""Deleting steps: a rename first, then unlinking. A step that is half deleted never looks like a step.

    0  remove what it replaced once, where a crash brought that back (`.step-….old`): without the step it would stand in for it
    1  open the folder and take its lock: nobody who cleans takes it for a dead process's
    2  rename it to `.deleted~step-00001000.<random>.tmp`: from now on nobody finds it
    3  fsync the run's directory, so that no power cut brings the name back to what is emptied next
    4  unlink what is in it, and the folder

`forget_replaced` does 0, `hide` does 1 and 2, `Hidden.remove` the rest. What a process leaves that dies on the way is removed by
`clean`, before the next save of the run. A single file (a `.ckpt` with its seal beside it) goes the same way; then its seal.
"""

from __future__ import annotations

import errno
from collections.abc import Collection
from contextlib import suppress

from holdfast.engine.commit.temporaries import LockedName, empty, locked, set_aside, temporary_name
from holdfast.engine.commit.temporaries import clean as clean_target
from holdfast.formats.seal import beside
from holdfast.stores.files import Files, is_temporary

PREFIX = "deleted~"
"""What the name of a deleted step begins with, after its dot."""

DEEPEST = 64
"""Folders in folders that are followed. No trainer comes near; whoever does is left for a person to remove."""


class Hidden:
    """A step that has no name any more, and is ours to remove."""

    def __init__(self, kept: LockedName, *, seal: str | None, folder: bool) -> None:
        self._kept = kept
        self._seal = seal
        self._folder = folder

    def remove(self, *, durable: bool = True) -> None:
        """Remove it. What cannot be removed stays under its hidden name, for the next `clean`."""
        files, kept = self._kept.files, self._kept
        try:
            with suppress(OSError):
                if durable:
                    files.sync(kept.at)
                if self._seal is not None:
                    with suppress(FileNotFoundError):
                        files.unlink(self._seal, at=kept.at)
                if self._folder:
                    _empty(files, kept)
                else:
                    files.unlink(kept.name, at=kept.at)
        finally:
            with suppress(OSError):
                kept.close()


def forget_replaced(files: Files, names: Collection[str], *, at: int) -> None:
    """Remove the folders that these steps replaced and that are there still, so that a power cut does not bring them back."""
    longest = files.longest_name(at)
    if not any(name.endswith(".old") for name in files.list(at)):
        return
    for name in names:
        if set_aside(files, name, at=at, longest=longest):
            clean_target(files, name, at=at, directories=True, longest=longest)
            files.sync(at)


def hide(files: Files, name: str, *, at: int) -> Hidden:
    """Take a step's name from it; `remove` comes next. Raises `OSError` where it cannot be had, and nothing changed."""
    found = files.stat(name, at=at)
    if found is None or found.kind not in ("file", "directory"):
        raise FileNotFoundError(errno.ENOENT, "no step of this name", name)
    folder = found.kind == "directory"
    descriptor = files.open_directory(name, at=at) if folder else files.open(name, at=at)
    try:
        kept = LockedName(files, name, at=at, descriptor=descriptor)
        # A file needs no lock: whoever takes it for a dead process's removes what is to be removed. NFS would refuse it one.
        if (folder and not locked(files, descriptor)) or not kept.in_place():
            raise OSError(errno.EBUSY, "another process writes or deletes it", name)
        hidden = temporary_name(PREFIX + name, longest=files.longest_name(at))
        files.rename(name, hidden, at=at)
        kept.name = hidden
        return Hidden(kept, seal=None if folder else beside(name), folder=folder)
    except BaseException:
        with suppress(OSError):
            files.close(descriptor)
        raise


def clean(files: Files, *, at: int) -> None:
    """Remove what deletions left that did not come to their end. What cannot be removed stays."""
    with suppress(OSError):
        for name in files.list(at):
            if name.startswith(f".{PREFIX}") and is_temporary(name):
                with suppress(OSError):
                    _clean_one(files, name, at=at)


def _clean_one(files: Files, name: str, *, at: int) -> None:
    found = files.stat(name, at=at)
    if found is None or found.kind not in ("file", "directory"):
        return
    folder = found.kind == "directory"
    descriptor = files.open_directory(name, at=at) if folder else files.open(name, at=at)
    try:
        kept = LockedName(files, name, at=at, descriptor=descriptor)
        if not files.lock(descriptor) or not kept.in_place():
            return
        files.sync(at)
        if folder:
            _empty(files, kept)
        else:
            files.unlink(name, at=at)
    finally:
        with suppress(OSError):
            files.close(descriptor)


def _empty(files: Files, folder: LockedName, depth: int = 0) -> None:
    """Remove a folder with all that is in it. A link goes, not what it leads to."""
    plain: list[str] = []
    for name in files.list(folder.descriptor):
        found = files.stat(name, at=folder.descriptor)
        if found is None or found.kind != "directory":
            plain.append(name)
            continue
        if depth == DEEPEST:
            raise OSError(errno.ELOOP, "too many folders in folders", name)
        inner = LockedName.open(files, name, at=folder.descriptor)
        try:
            _empty(files, inner, depth + 1)
        finally:
            with suppress(OSError):
                inner.close()
    empty(files, folder, plain)
