"""Damage that was found in the steps of a run, and steps that are no base of the next one because of it.

Steps share files that did not change (a hard link, or an object that several manifests name), and so they share damage.

    known damage     A step that does not read back makes every step that is there doubtful. A doubted step is no base. Steps are
                     written whole, and are doubted too, until one has been read back well; that one is a base, and so is what is
                     linked to it. The doubts stand in `holdfast.proofs.json`, for the next process.
    unknown damage   Where rules read nothing back, a thread reads shared files that are old, the one whose last proof is oldest
                     first: after each save at most a `SHARE` of the step's bytes, at no more than `RATE` bytes a second, and
                     nothing that was written or read within `OLD_S`. A doubted newest step is read whole.

The thread ends when it has read its share, with `close`, and with the program. Damage is a warning at the next call. A store that
does not answer is no damage.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping

import numpy as np

from holdfast.core.runtime import renewed, start
from holdfast.core.value import Value
from holdfast.engine.checksums import Span, Sweep
from holdfast.errors import HeaderError, HoldfastError, HoldfastWarning
from holdfast.extras.runs.place import RunPlace
from holdfast.extras.runs.record import Doubt, Proofs
from holdfast.extras.runs.steps import Step
from holdfast.formats.native.chunks import CutColumns
from holdfast.formats.native.read import read_manifest
from holdfast.formats.native.schema import Parsed
from holdfast.stores.place import place_at
from holdfast.verbs.verify import verify

SHARE = 16
"""After each save, one part in so many of the step's bytes is read back: all of it in as many saves."""

RATE = 64 << 20
"""Bytes a second, at most: what a disk or a network has to spare beside a training."""

OLD_S = 3600.0
"""How long a file is left alone after it was written or read back."""

BATCH_NBYTES = 64 << 20
"""What is read between two looks whether the share is used up."""


class ReadBack(Value, frozen=True):
    """Totals of what was read back in the background; and damage, wherever that was found."""

    nbytes: int = 0
    at: float | None = None
    """The last time, in seconds since 1970."""
    damaged: tuple[str, ...] = ()


class Stopped(Exception):  # no error
    """The run was closed, or the program ends."""


class Piece(Value, frozen=True):
    """Bytes of a file that have a recorded checksum."""

    start: int
    stop: int
    crc32: int
    tensor: str


def _key(step: Step) -> tuple[int, float]:
    """The identity of a step: another one may be saved under its number later."""
    return step.step, step.saved


class Proving:
    """The doubts about the steps of one run, and the thread that reads old files back."""

    def __init__(self, place: RunPlace, open_place: Callable[[], RunPlace]) -> None:
        """`open_place` makes another value of the same place, for the thread: a place remembers what it saw, for one caller."""
        self._place, self._open_place = place, open_place
        self._turn = renewed(threading.RLock())
        self._doubts: dict[tuple[int, float], str] | None = None
        """Why steps are no base; None before the record was read."""
        self._bad: set[tuple[int, float]] = set()
        """The doubted steps that were found damaged from here."""
        self._good: tuple[int, float] | None = None
        self._files: dict[str, float] = {}
        """When each shared file was written, or read back last."""
        self._unwritten = False
        self._warnings: list[str] = []
        self._found = ReadBack()
        self._credit = 0
        self._reading = "", 0
        """The file that is being read, and how far."""
        self._quiet_until = 0.0
        """Until then no file of the newest step is old enough to be read."""
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._process = os.getpid()

    # What is known.

    def is_doubted(self, step: Step) -> bool:
        """Whether a step may not be a base."""
        with self._turn:
            return _key(step) in self._known()

    def damaged(self, step: Step, why: str, place: RunPlace | None = None) -> None:
        """Record that a step did not read back: from now on no step is a base that is not read back well later."""
        with self._turn:
            known = self._known()
            known.update(
                {
                    _key(one): f"step {step.step} did not read back"
                    for one in (place or self._place).steps()
                }
            )
            known[_key(step)] = why
            self._bad.add(_key(step))
            self._unwritten = True
            self._found = ReadBack(
                self._found.nbytes,
                self._found.at,
                (*self._found.damaged, f"step {step.step}: {why}"),
            )

    def good(self, step: Step) -> None:
        """Record that a step was read back well."""
        with self._turn:
            self._good = _key(step)
            self._unwritten |= self._known().pop(_key(step), None) is not None

    def saved(self, step: Step, *, whole: bool) -> None:
        """Record that a step was saved, with a base or `whole`."""
        with self._turn:
            if whole and self._known():
                self._known()[_key(step)] = "it has not been read back"
                self._unwritten = True

    def found(self) -> ReadBack:
        with self._turn:
            return self._found

    def tell(self) -> None:
        """Warn of damage that was found in the background since the last call."""
        with self._turn:
            messages, self._warnings = self._warnings, []
        for text in messages:
            warnings.warn(text, HoldfastWarning, stacklevel=4)

    def write(self, place: RunPlace | None = None) -> None:
        """Write the doubts down for the next process. The caller has the run open for writing."""
        with self._turn:
            if not self._unwritten:
                return
            self._place.check()  # the directory may be another run's by now
            place, known = place or self._place, self._known()
            there = {_key(one) for one in place.steps()} if known else set()
            self._doubts = {key: why for key, why in known.items() if key in there}
            doubts = [
                Doubt(step, saved, why) for (step, saved), why in sorted(self._doubts.items())
            ]
            place.write_proofs(Proofs("holdfast.proofs", 1, doubts, dict(self._files)))
            self._unwritten = False

    def _known(self) -> dict[tuple[int, float], str]:
        if self._doubts is None:
            try:
                found = self._place.proofs()
                self._doubts = {(one.step, one.saved): one.why for one in found.doubted}
                self._files = dict(found.files)
            except HeaderError as error:
                self._doubts = {_key(one): error.message for one in self._place.steps()}
        return self._doubts

    # Reading back.

    def watch(self, step: Step, *, shares: bool) -> None:
        """Read some old files back after a step was saved, which `shares` files with another."""
        with self._turn:
            self._credit = min(self._credit + step.nbytes // SHARE, step.nbytes)
            if (
                ((shares and time.time() >= self._quiet_until) or self.is_doubted(step))
                and not self._stop.is_set()
                and (self._thread is None or not self._thread.is_alive())
            ):
                self._thread = start(self._work, name="holdfast-proof", daemon=False)

    def stop(self) -> None:
        """Stop the thread behind the block that it reads. Nobody waits: a run may be dropped on any thread, even a store's own."""
        self._stop.set()

    def close(self) -> None:
        """Stop the thread and wait for it. A fork has nothing to wait for."""
        self.stop()
        if self._thread is not None and self._process == os.getpid():
            self._thread.join()

    def _work(self) -> None:
        try:
            place = self._open_place()
            newest = place.newest()
            if newest is not None and self.is_doubted(newest) and _key(newest) not in self._bad:
                self._prove_step(newest, place)
            while newest is not None and self._credit > 0 and self._prove_file(newest, place):
                pass
            if not self._stop.is_set():
                self.write(place)
        except Stopped:
            pass
        except (HoldfastError, OSError):
            pass  # Nothing was proved, and the next save asks again.

    def _prove_step(self, step: Step, place: RunPlace) -> None:
        report = verify(step.path, threads=1, progress=self._pace)
        if report.ok:
            self.good(step)
        elif report.damaged or any(one.damaged for one in report.problems):
            wrong = [*(one.file for one in report.damaged), *(one.file for one in report.problems)]
            self._found_damage(step, f"{wrong[0]} does not have its checksums", [step.step], place)

    def _prove_file(self, step: Step, place: RunPlace) -> bool:
        """Read the shared file back whose last proof is oldest; whether there was one."""
        older, own = place.newest(below=step.step), place.identities(step)
        others = set() if older is None else set(place.identities(older).values())
        shared = {identity: name for name, identity in own.items() if identity in others}
        now = time.time()
        with self._turn:
            self._known()
            known = dict.fromkeys(shared, now) if self._good == _key(step) else self._files
        every = _times(place, step, own, known)
        times = {identity: every[identity] for identity in shared}
        with self._turn:
            self._files = times
        due = sorted((at, identity) for identity, at in times.items() if now - at >= OLD_S)
        if not due:
            self._quiet_until = min(every.values(), default=now) + OLD_S
            return False
        identity = self._reading[0] if self._reading[0] in times else due[0][1]
        wrong = self._read(step, shared[identity], identity)
        if wrong is not None:
            have = [one.step for one in place.steps() if identity in place.identities(one).values()]
            self._found_damage(step, wrong, have, place)
            return False
        return True

    def _read(self, step: Step, name: str, identity: str) -> str | None:
        at = self._reading[1] if self._reading[0] == identity else 0
        with step.open() as checkpoint:
            batch, size = list[Piece](), 0
            pieces = [
                piece
                for piece in pieces_of(read_manifest(checkpoint.source), name)
                if piece.start >= at
            ]
            for number, piece in enumerate(pieces, 1):
                batch.append(piece)
                size += piece.stop - piece.start
                if size < BATCH_NBYTES and number < len(pieces):
                    continue
                sweep = Sweep(
                    checkpoint.source.store,
                    [Span(name, one.start, one.stop - one.start) for one in batch],
                )
                for task in sweep.tasks(self._pace):
                    task()
                for place, one in enumerate(batch):
                    outcome = sweep.outcome(place)
                    if isinstance(outcome, HoldfastError):
                        if not place_at(step.path).on_disk or not os.path.exists(step.path):
                            raise outcome
                        return f"{name} cannot be read: {outcome.message}"
                    if outcome != one.crc32:
                        return f"{name} does not have the checksum that was recorded for {one.tensor!r}"
                self._reading, batch, size = (identity, piece.stop), [], 0
                if self._credit <= 0 and number < len(pieces):
                    return None
        with self._turn:
            self._reading, self._files[identity], self._unwritten = ("", 0), time.time(), True
        return None

    def _found_damage(self, step: Step, why: str, have: list[int], place: RunPlace) -> None:
        """Keep a warning for the next call: damage was found, in these steps."""
        shown = ", ".join(map(str, have[-8:]))
        message = f"{why}; it is in step {shown}, and no step is linked to it: the next one is written whole"
        with self._turn:
            self.damaged(step, why, place)
            self._warnings.append(f"{place.path}: {message}")

    def _pace(self, nbytes: int) -> None:
        """Wait until so many more bytes may be read; raises `Stopped` where nobody wants more."""
        with self._turn:
            self._credit -= nbytes
            self._found = ReadBack(self._found.nbytes + nbytes, time.time(), self._found.damaged)
        if self._stop.wait(nbytes / RATE) or not threading.main_thread().is_alive():
            raise Stopped


def _times(
    place: RunPlace, step: Step, files: Mapping[str, str], known: Mapping[str, float]
) -> dict[str, float]:
    """When each of these files of a step was written, or read back as far as that is known; by identity."""
    written = place.written(
        step, [name for name, identity in files.items() if not known.get(identity)]
    )
    return {identity: known.get(identity) or written[name] for name, identity in files.items()}


def pieces_of(manifest: Parsed, name: str) -> list[Piece]:
    """The checksummed pieces of one file, in order; each once, however many tensors it has."""
    number = next((at for at, file in enumerate(manifest.files) if file.name == name), None)
    found: dict[tuple[int, int], Piece] = {}
    for tensor, stored in manifest.tensors.items():
        if cut := CutColumns.of(stored):
            for at in np.flatnonzero((cut.file == number) & (cut.spans[0] < cut.spans[1])).tolist():
                first, last = cut.spans[:, at].tolist()
                found[first, last] = Piece(first, last, cut.crc(at), tensor)
        for chunk in stored.chunks:
            start, stop = chunk.bytes
            if chunk.file == number and start < stop:
                found[start, stop] = Piece(start, stop, int(chunk.crc32, 16), tensor)
    return [found[key] for key in sorted(found)]
