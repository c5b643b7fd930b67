"""`RunDirectory`: a run's place on this machine: folders, a lock that the kernel keeps, renames and hard links."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

from holdfast.core.value import replace
from holdfast.engine.commit.target import refusing
from holdfast.formats.seal import SEAL
from holdfast.rewrite.planned import Planned, Saved
from holdfast.rewrite.step_seal import Stamp, with_seal
from holdfast.runs.delete import Hidden, clean, forget_replaced, hide
from holdfast.runs.lock import Holder, RunLock, seen_writing
from holdfast.runs.place import Choose, RunPlace, Sizes
from holdfast.runs.record import (
    Pin,
    Proofs,
    RunRules,
    pin_step,
    read_kept,
    read_pins,
    read_proofs,
    read_receipts,
    turn,
    unpin_step,
    write_kept,
    write_proofs,
    write_receipts,
)
from holdfast.runs.steps import RunFolder, Step, step_name
from holdfast.stores.files import FileEntry, make_parents
from holdfast.stores.local import free_nbytes
from holdfast.stores.place import place_at
from holdfast.stores.remote.url import Stamps


class RunDirectory(RunFolder):
    """A run's directory (`RunPlace`)."""

    _lock: RunLock | None = None
    """That of whoever opened it for writing; once it is given back, nothing is asked of it."""

    def check(self, at: int | None = None) -> None:
        """As `RunPlace.check`; `at` is the directory, where it is open already."""
        if self._lock is None:
            return
        with refusing("comparing the run's lock", self.path):
            if at is not None:
                self._lock.check(self.path, at=at)
                return
            with suppress(FileNotFoundError), self.opened() as (_, opened):
                self._lock.check(self.path, at=opened)
                return
            self._lock.check(self.path, at=None)

    def base_for(self, step: int) -> Step | None:
        found = self.newest()
        return self.newest(below=step) if found is not None and found.step == step else found

    def exists(self) -> bool:
        return os.path.isdir(self.path)

    def free(self) -> int | None:
        return free_nbytes(self.path)

    def sizes(self, step: Step) -> Sizes:
        """Files by device and inode."""
        return {entry.identity: entry.nbytes for entry in self._entries(step).values()}

    def identities(self, step: Step) -> Mapping[str, str]:
        # A device may have another number tomorrow.
        return {name: str(entry.identity[1]) for name, entry in self._entries(step).items()}

    def written(self, step: Step, names: Sequence[str]) -> Mapping[str, float]:
        found, now = self._entries(step) if names else {}, time.time()
        return {name: found[name].changed_s if name in found else now for name in names}

    def _entries(self, step: Step) -> Mapping[str, FileEntry]:
        """The files of a step, as far as they are there."""
        found: dict[str, FileEntry] = {}
        with suppress(OSError), self.opened() as (files, at):
            single = files.stat(step.name, at=at)
            if single is None:
                return {}
            if single.kind != "directory":
                return {step.name: single}
            inside = files.open_directory(step.name, at=at)
            try:
                for name in step.files:
                    entry = files.stat(name, at=inside)
                    if entry is not None:
                        found[name] = entry
            finally:
                files.close(inside)
        return found

    def kept(self) -> RunRules | None:
        with self.opened() as (files, at):
            return read_kept(files, at=at)

    def pins(self) -> Mapping[int, Pin]:
        try:
            with self.opened() as (files, at):
                return read_pins(files, at=at)
        except FileNotFoundError:
            return {}

    def pin(self, step: int, why: str, *, durable: bool = True) -> Pin:
        return pin_step(self, step, why, durable=durable)

    def unpin(self, step: int, *, durable: bool = True) -> Pin:
        return unpin_step(self, step, durable=durable)

    def proofs(self) -> Proofs:
        try:
            with self.opened() as (files, at):
                return read_proofs(files, at=at)
        except FileNotFoundError:
            return Proofs()

    def note_proofs(self, proofs: Proofs) -> None:
        write_proofs(self.files, self.path, proofs)

    def writer(self) -> Holder | None:
        with self.opened() as (files, at):
            return seen_writing(files, at=at)

    def exported(self) -> Mapping[str, Stamps]:
        with self.opened() as (files, at):
            return read_receipts(files, at=at)

    def note_exported(self, target: str, stamps: Stamps, *, durable: bool) -> None:
        rest = {name: found for name, found in self.exported().items() if name != target}
        write_receipts(self.files, self.path, {**rest, target: stamps}, durable=durable)

    def asking(self) -> AbstractContextManager[None]:
        """What the file system refuses is told where it happens."""
        return nullcontext()

    def begin(self, kept: RunRules, *, durable: bool) -> RunLock:
        with refusing("making the run's directory", self.path):
            make_parents(os.path.join(self.path, "step"), durable=durable)
        self._lock = open_for_writing(self, kept, durable=durable)
        return self._lock

    def locked(self) -> RunLock:
        self._lock = RunLock.take(self.files, self.path)
        return self._lock

    def replaces(self, step: int) -> bool:
        """What is not whole is of no use to anybody, and must not keep a run that goes on from saving this step again."""
        return True

    def noted(self, metadata: Mapping[str, str] | None, says: Stamp) -> Mapping[str, str] | None:
        """The seal says it."""
        return metadata

    def sealed(self, planned: Planned[Saved], says: Stamp) -> Planned[Saved]:
        """The same save with a seal."""
        plan = with_seal(planned.plan, says)
        files = tuple(plan.listed)
        report = replace(planned.report, files=files, nbytes=sum(nbytes for _, nbytes in files))
        return replace(planned, plan=plan, report=report, sure=self.check)

    def attributes(self, says: Stamp, files: Sequence[tuple[str, int]]) -> Mapping[str, str] | None:
        return None

    def published(self, planned: Planned[Saved], says: Stamp) -> Step:
        """The step as it was laid out, and as its seal has it: no look can make a failure of a save that is done."""
        files = sorted([(key, nbytes) for key, nbytes in planned.report.files if key != SEAL])
        name, nbytes = step_name(says.step), sum([nbytes for _, nbytes in files])
        path, names = os.path.join(self.path, name), tuple([key for key, _ in files])
        return Step(says.step, path, says.saved, says.metrics, nbytes, name, names, says.ran)

    def let_go(self, choose: Choose, *, durable: bool) -> tuple[list[Step], list[str]]:
        notes: list[str] = []
        gone: list[Step] = []
        hidden: list[Hidden] = []
        with self.opened() as (files, at):
            try:
                # Names are taken while nobody pins; nobody waits while gigabytes are unlinked.
                with turn(self):
                    self.check(at)
                    going = choose(read_pins(files, at=at))
                    forget_replaced(files, [one.name for one in going], at=at)
                    for one in going:
                        try:
                            hidden.append(hide(files, one.name, at=at))
                            gone.append(one)
                        except FileNotFoundError:
                            continue  # somebody else deleted it
                        except OSError as error:
                            notes.append(f"step {one.step} cannot be deleted: {error.strerror or error}")
            finally:
                for each in hidden:
                    each.remove(durable=durable)
            clean(files, at=at)
        return gone, notes

    def delete(self, steps: Sequence[Step], *, durable: bool) -> None:
        with self.opened() as (files, at), turn(self):
            self.check(at)
            forget_replaced(files, [one.name for one in steps], at=at)
            for one in reversed(steps):
                hide(files, one.name, at=at).remove(durable=durable)


def open_for_writing(folder: RunFolder, kept: RunRules, *, durable: bool) -> RunLock:
    """Take the run's lock, remove what deletions of dead processes left, and write the rules down."""
    files = folder.files
    lock = RunLock.take(files, folder.path)
    try:
        with refusing("preparing the run's directory", folder.path), folder.opened() as (_, at):
            clean(files, at=at)
            write_kept(files, folder.path, kept, at=at, durable=durable)
    except BaseException:
        lock.close()
        raise
    return lock


def place_for(path: str) -> RunPlace:
    """Where the run is that `place_of` gave the path or the URL of."""
    place = place_at(path)
    if place.url is not None:
        from holdfast.runs.bucket import RunBucket  # what it imports is for those who have a bucket

        return RunBucket(place.url)
    return RunDirectory(place.rooted)
