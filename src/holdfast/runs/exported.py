"""Where an export may go, and what there is an export of this run.

An export replaces what this run exported there before, and nothing else. A run knows its exports by receipts in its own place,
`holdfast.exports.json`: names, lengths and times (in a bucket, etags) of the files of each target when they were published. What
lies at a target and is not as its receipt says is somebody else's: another run's, a step, or an export that somebody changed. A
program that dies between an export and its receipt leaves one that is not replaced either.

`misplaced` says why a folder is none for exports at all: it is a run's directory, or lies in one. It is asked when the run is made,
and before each export, because folders come and links change.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress

from holdfast.errors import HoldfastError, StoreError
from holdfast.formats.safetensors.record import MANIFEST
from holdfast.formats.seal import SEAL
from holdfast.runs.lock import LOCK
from holdfast.runs.record import PINS, RECORD, Stamps
from holdfast.runs.steps import NAMED
from holdfast.stores.paths import same_place
from holdfast.stores.remote.url import Url

TARGET = re.compile(r"step-[0-9]+(?:\.pt)?", re.ASCII)
"""What an exported step may be called."""

MOST_OBJECTS = 100_000
"""Of an export."""

MARKS = (RECORD, PINS, LOCK)
"""What tells a run's directory."""


def place_name(target: str) -> str:
    """What a target is called in a receipt: its real folder, and its name in there."""
    if isinstance(target, Url):
        return str(target).rstrip("/")
    folder, name = os.path.split(target.rstrip("/"))
    return os.path.join(os.path.realpath(folder), name)


def look(target: str) -> Stamps | None:
    """The files of what lies at a target, by name, length and what changes with them; None for what no export is."""
    return _objects(target) if isinstance(target, Url) else _files(target.rstrip("/"))


def _files(path: str) -> Stamps | None:
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


def _objects(target: Url) -> Stamps | None:
    from holdfast.stores.remote.client import bucket_of  # for those who have a bucket

    bucket = bucket_of(target)
    found = bucket.below(f"{target.key}/", MOST_OBJECTS)
    try:
        single = bucket.head(target.key)
        found = [single, *(one for one in found if one.key != single.key)]
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
    # Without etags nobody can tell.
    if not found or any(one.etag is None for one in found):
        return None
    return sorted((one.key.removeprefix(target.key), one.nbytes, str(one.etag)) for one in found)


def misplaced(folder: str, run: str) -> str | None:
    """Why exports of the run at a place must not go to this folder; None where they may."""
    folder = folder if isinstance(folder, Url) else os.path.realpath(folder)
    if same_place(folder, run) or _same_file(folder, run):
        return "that is the directory of the run itself, and exports would take the place of its steps"
    for around in _around(folder):
        if same_place(around, run) or _same_file(around, run):
            return "that is inside of the run's own directory"
    for around in _around(run, itself=True):
        name = around.rstrip("/").rpartition("/")[2]
        if TARGET.fullmatch(name) and (same_place(_parent(around), folder) or _same_file(_parent(around), folder)):
            return f"an export would have the name {name}, which is that of the run's own directory, or of one around it"
    for around in _around(folder, itself=True):
        if mark := _mark(around, steps=around == folder):
            inside = "that is" if around == folder else "that is inside of"
            return f"{inside} the directory of another run (it has {mark})"
    return None


def _around(path: str, *, itself: bool = False) -> Iterator[str]:
    """The folders around a real place, from the inside out. A bucket is the last."""
    path = path if isinstance(path, Url) else os.path.realpath(path)
    if itself:
        yield path
    while (parent := _parent(path)) != path:
        path = parent
        yield path


def _parent(path: str) -> str:
    if isinstance(path, Url):
        return path.parent if path.key else path
    return os.path.dirname(path)


def _same_file(one: str, other: str) -> bool:
    """Whether two paths are those of one directory, however they are spelled: not all file systems tell cases apart."""
    if isinstance(one, Url) or isinstance(other, Url):
        return False
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _mark(folder: str, *, steps: bool) -> str | None:
    """What says that a folder is a run's directory: what a run writes down, or (`steps`) a step that one saved."""
    if isinstance(folder, Url):
        return _mark_in_bucket(folder) if steps else None
    found = next((name for name in MARKS if os.path.lexists(os.path.join(folder, name))), None)
    if found is not None or not steps:
        return found
    with suppress(OSError):
        for step in (entry for entry in os.scandir(folder) if NAMED.fullmatch(entry.name) and not entry.is_symlink()):
            if all(os.path.lexists(os.path.join(step.path, inner)) for inner in (MANIFEST, SEAL)):
                return step.name
    return None


def _mark_in_bucket(folder: Url) -> str | None:
    from holdfast.stores.remote.client import bucket_of

    with suppress(HoldfastError):  # what does not answer now is told by the export
        _, found = bucket_of(folder).folders(f"{folder.key}/" if folder.key else "")
        names = {one.key.rpartition("/")[2] for one in found}
        return next((name for name in MARKS if name in names), None)
    return None
