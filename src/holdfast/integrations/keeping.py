"""Which sealed folders of another trainer's stay, and which is resumed from: as in a `Run`, without its files in that folder."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection

from holdfast.errors import HoldfastWarning
from holdfast.extras.runs.clock import clock_of
from holdfast.extras.runs.directory import RunDirectory
from holdfast.extras.runs.retention import retain
from holdfast.extras.runs.rules import Latest, Rule, read_rules
from holdfast.extras.runs.run import Run
from holdfast.stores.paths import AnyPath, local_path

Keep = int | Rule | str | Collection[Rule | str] | None
"""How many checkpoints stay, or which: `3` is `Latest(3)`; None for all."""


def rules_of(keep: Keep) -> tuple[Rule, ...]:
    return (Latest(keep),) if isinstance(keep, int) else read_rules(keep)


def keep_by(folder: AnyPath, rules: Collection[Rule], *, durable: bool = True) -> None:
    """Delete the sealed steps that no rule keeps. Call it when a new one is sealed, and never before; it warns of what stays."""
    for note in retain(
        RunDirectory(os.path.abspath(local_path(folder))), rules, durable=durable
    ).notes:
        warnings.warn(note, HoldfastWarning, stacklevel=3)


def ran_here(folder: AnyPath) -> float | None:
    """For how many seconds the training has run whose sealed folders are in this one, as `Within` counts them."""
    place = RunDirectory(os.path.abspath(local_path(folder)))
    clock = clock_of(place.path)
    clock.look(place)
    return clock.read() or None  # where nothing has been counted yet, nothing is said


def newest_whole(folder: AnyPath, *, deep: bool = False) -> str | None:
    """The path of the newest step that is whole; with `deep`, every byte is compared."""
    found = Run(folder).latest(deep=deep)
    return None if found is None else found.path
