"""Where an export may go, and what there is an export of this run.

An export replaces what this run exported there before, and nothing else. A run knows its exports by receipts in its own place,
`holdfast.exports.json`: names, lengths and times (in a bucket, etags) of the files of each target when they were published. What
lies at a target and is not as its receipt says is somebody else's: another run's, a step, or an export that somebody changed. A
program that dies between an export and its receipt leaves one that is not replaced either.

`misplaced` says why a folder is none for exports at all: it is a run's directory, or lies in one. It is asked when the run is made,
and before each export, because folders come and links change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

from holdfast.errors import HoldfastError
from holdfast.formats.safetensors.record import MANIFEST
from holdfast.formats.seal import SEAL
from holdfast.runs.lock import LOCK
from holdfast.runs.record import PINS, RECORD
from holdfast.runs.steps import NAMED
from holdfast.stores.place import Place, place_at

TARGET = re.compile(r"step-[0-9]+(?:\.pt)?", re.ASCII)
"""What an exported step may be called."""

MARKS = (RECORD, PINS, LOCK)
"""What tells a run's directory."""


def misplaced(folder: str, run: str) -> str | None:
    """Why exports of the run at a place must not go to this folder; None where they may."""
    folder, own = place_at(folder).real, place_at(run)
    if own.is_same(place_at(folder)):
        return "that is the directory of the run itself, and exports would take the place of its steps"
    for around in _around(folder):
        if own.is_same(place_at(around)):
            return "that is inside of the run's own directory"
    for around in _around(run, itself=True):
        name = around.rstrip("/").rpartition("/")[2]
        if TARGET.fullmatch(name) and place_at(place_at(around).parent).is_same(place_at(folder)):
            return f"an export would have the name {name}, which is that of the run's own directory, or of one around it"
    for around in _around(folder, itself=True):
        if mark := _mark(around, steps=around == folder):
            inside = "that is" if around == folder else "that is inside of"
            return f"{inside} the directory of another run (it has {mark})"
    return None


def _around(path: str, *, itself: bool = False) -> Iterator[str]:
    """The folders around a real place, from the inside out. A bucket is the last."""
    path = place_at(path).real
    if itself:
        yield path
    while (parent := place_at(path).parent) != path:
        path = parent
        yield path


def _mark(folder: str, *, steps: bool) -> str | None:
    """What says that a folder is a run's directory: what a run writes down, or (`steps`) a step that one saved."""
    place = place_at(folder)
    if not place.on_disk:
        return _mark_in_bucket(place) if steps else None
    found = next((name for name in MARKS if os.path.lexists(place.below(name))), None)
    if found is not None or not steps:
        return found
    with suppress(OSError):
        for step in (entry for entry in os.scandir(folder) if NAMED.fullmatch(entry.name) and not entry.is_symlink()):
            if all(os.path.lexists(os.path.join(step.path, inner)) for inner in (MANIFEST, SEAL)):
                return step.name
    return None


def _mark_in_bucket(folder: Place) -> str | None:
    with suppress(HoldfastError):  # what does not answer now is told by the export
        names = folder.files()
        return next((name for name in MARKS if name in names), None)
    return None
