"""Exports: published steps as checkpoints of another format, written in the background.

    Run("runs/llama", export=Export("hf", dtype="bf16", every=5_000, keep="model.*", rename={"model.*": "*"}))

    runs/llama/step-00005000/  ──convert──►  hf/step-00005000/model.safetensors

One thread converts one step at a time (`holdfast.convert`). A step that waits for it, or is being read, is not deleted by a rule. A
failure is a warning at the next call on the run. The end of the run waits for what is left, and so does the end of the program.

An export replaces what this run exported there before, and nothing else. A run knows its exports by receipts in its own place,
`holdfast.exports.json`: names, lengths and times (in a bucket, etags) of the files of each target when they were published. A
target that is not as its receipt says is somebody else's: another run's, a step, or an export that somebody changed. A program
that dies between an export and its receipt leaves one that is not replaced either.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from holdfast.core.arguments import AnyDType
from holdfast.core.quantities import Size, describe_value, parse_count
from holdfast.core.runtime import make_fork_safe, start_thread
from holdfast.errors import (
    BadArgument,
    BadArgumentType,
    HoldfastError,
    HoldfastWarning,
    NotCommitted,
)
from holdfast.extras.runs.lock import LOCK
from holdfast.extras.runs.place import RunPlace
from holdfast.extras.runs.record import PINS, RECORD
from holdfast.extras.runs.steps import NAMED, Step, step_name
from holdfast.formats import format_of
from holdfast.formats.safetensors.schema import MANIFEST
from holdfast.stores.paths import place_of
from holdfast.stores.place import place_at
from holdfast.verbs.convert import convert
from holdfast.verbs.seals.document import SEAL
from holdfast.verbs.shared.formats import LayoutOptions, map_suffixes_to_formats, resolve_format

TARGET = re.compile(r"step-[0-9]+(\.\w+)?", re.ASCII)
"""The name of an exported step, if it ends with the suffix of a format."""

MARKS = (RECORD.file, PINS.file, LOCK)
"""Names that only a run's directory has."""


@dataclass(frozen=True, slots=True)
class Export:
    """Steps whose number is a multiple of `every`, converted into a folder; everything else is as for `holdfast.convert`."""

    path: str | os.PathLike[str]
    """The folder, or a URL; each step has a name of its own in it."""
    format: str = "safetensors"
    dtype: AnyDType | Mapping[str, AnyDType] | None = None
    every: int = 1
    keep: str | Sequence[str] = ()
    drop: str | Sequence[str] = ()
    rename: Mapping[str, str] | Sequence[tuple[str, str]] = ()
    max_shard_size: Size | None = None
    copy_config: bool | str | os.PathLike[str] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", place_at(place_of(self.path)).absolute)
        object.__setattr__(self, "every", parse_count(self.every, "every="))
        resolve_format("model/", self.format, LayoutOptions())

    def target(self, step: int) -> str:
        """The path of an exported step. Safetensors are a folder, as other programs look for it."""
        format = format_of(resolve_format("model/", self.format, LayoutOptions()))
        suffix = "" if format.folder else format.suffixes[0]
        return place_at(place_of(self.path)).below(step_name(step) + suffix, folder=format.folder)

    def carry_out(self, step: Step, run: RunPlace, *, durable: bool = True) -> str:
        """Convert a step of a run; what the run exported there before is replaced, and recorded anew."""
        target = self.target(step.step)
        self.check(run.path)
        if place_at(place_of(self.path)).on_disk:
            os.makedirs(self.path, exist_ok=True)
        name = place_at(target).record_name
        before = run.exported().get(name)
        own = before is not None and before == place_at(target).stamps()
        try:
            convert(
                step.path, target, dtype=self.dtype, keep=self.keep, drop=self.drop, rename=self.rename,
                format=self.format, max_shard_size=self.max_shard_size, copy_config=self.copy_config, overwrite=own,
            )  # fmt: skip
        except NotCommitted as error:
            if own or error.errno != errno.EEXIST:
                raise
            message = "what lies there is no export of this run, or changed since, and is not replaced; move it away"
            raise NotCommitted(
                f"{message}, or export elsewhere", file=target, errno=errno.EEXIST
            ) from None
        now = place_at(target).stamps()
        if now is not None:
            run.add_exported(name, now, durable=durable)
        return target

    def check(self, run: str) -> None:
        """Raise `BadArgument` where exports of the run at a place must not go to this folder."""
        why = misplaced(place_of(self.path), run)
        if why is not None:
            raise BadArgument(
                f"export= goes to {self.path!r}: {why}; give exports a folder of their own",
                found=self.path,
            )


def read_exports(given: object, run: str) -> tuple[Export, ...]:
    """The exports of `export=` of the run at a place: one, or any number of them, each with a place of its own."""
    several = (given,) if isinstance(given, Export) else given
    if several is None:
        return ()
    if not isinstance(several, Sequence) or not all(isinstance(one, Export) for one in several):
        raise BadArgumentType(
            f"export= takes holdfast.Export(…), or a list of them, not {describe_value(given)}",
            found=given,
        )
    places: set[str] = set()
    for one in several:
        one.check(run)
        place = place_at(one.target(0)).record_name
        if place in places:
            message = f"export= has two exports that write to {one.path!r} under the same names"
            raise BadArgument(f"{message}; give each a folder of its own", found=given)
        places.add(place)
    return tuple(several)


class Exports:
    """The steps that are to be exported, and the thread that does it."""

    def __init__(self, wanted: Sequence[Export], run: RunPlace, *, durable: bool = True) -> None:
        self._wanted = tuple(wanted)
        self._run, self._durable = run, durable
        self._turn = make_fork_safe(threading.Condition(threading.Lock()))
        self._queue: deque[tuple[Export, Step]] = deque()
        self._now: Step | None = None
        self._working = False
        self._failed: list[str] = []
        self._process = os.getpid()

    def add(self, step: Step) -> None:
        """Export a step that was published, where that is due."""
        due = [(export, step) for export in self._wanted if step.step % export.every == 0]
        if not due:
            return
        with self._turn:
            self._queue.extend(due)
            begin, self._working = not self._working, True
        # No daemon: Python waits for it at the end of the program. Where none can start, it is done here.
        if begin and start_thread(self._work, name="holdfast-export", daemon=False) is None:
            self._work()

    def busy(self) -> Mapping[int, str]:
        with self._turn:
            waiting = {step.step: "waits to be exported" for _, step in self._queue}
            return (
                waiting if self._now is None else {**waiting, self._now.step: "is being exported"}
            )

    def tell(self) -> None:
        """Warn of failures since the last call."""
        with self._turn:
            messages, self._failed = self._failed, []
        for text in messages:
            warnings.warn(text, HoldfastWarning, stacklevel=4)

    def wait(self) -> None:
        """Come back when nothing is left to export. A fork has nothing to wait for."""
        with self._turn:
            while self._working and self._process == os.getpid():
                self._turn.wait()

    def _work(self) -> None:
        while True:
            with self._turn:
                if not self._queue:
                    self._working, self._now = False, None
                    self._turn.notify_all()
                    return
                export, self._now = self._queue.popleft()
                step = self._now
            try:
                self._run.check()
                export.carry_out(step, self._run, durable=self._durable)
            except Exception as error:
                # Whatever it is, it is told at the next call; training does not end because of it.
                with self._turn:
                    self._failed.append(
                        f"step {step.step} could not be exported to {export.target(step.step)}: {error}"
                    )


def misplaced(folder: str, run: str) -> str | None:
    """Why exports of the run at a place must not go to this folder; None where they may. Folders come, and links change."""
    folder, own = place_at(folder).real, place_at(run)
    if own.is_same(place_at(folder)):
        return (
            "that is the directory of the run itself, and exports would take the place of its steps"
        )
    for around in _around(folder):
        if own.is_same(place_at(around)):
            return "that is inside of the run's own directory"
    for around in _around(run, itself=True):
        name = around.rstrip("/").rpartition("/")[2]
        found = TARGET.fullmatch(name)
        if (
            found
            and found[1] in (None, *map_suffixes_to_formats())
            and place_at(place_at(around).parent).is_same(place_at(folder))
        ):
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
    """The file that shows that a folder is a run's directory: what a run writes down, or (`steps`) a step that one saved."""
    place = place_at(folder)
    if not place.on_disk:
        with suppress(HoldfastError):  # what does not answer now is raised by the export
            names = place.files()
            return next((name for name in MARKS if name in names), None)
        return None
    found = next((name for name in MARKS if os.path.lexists(place.below(name))), None)
    if found is not None or not steps:
        return found
    with suppress(OSError):
        for step in (
            entry
            for entry in os.scandir(folder)
            if NAMED.fullmatch(entry.name) and not entry.is_symlink()
        ):
            if all(os.path.lexists(os.path.join(step.path, inner)) for inner in (MANIFEST, SEAL)):
                return step.name
    return None
