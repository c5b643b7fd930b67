"""`RunDirectory`: a run's place on this machine: folders, a lock that the kernel keeps, renames and hard links."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

from holdfast.core.value import replace
from holdfast.engine.commit.target import refusing
from holdfast.rewrite.planned import Planned, Saved
from holdfast.rewrite.step_seal import Stamp, with_seal
from holdfast.runs.delete import Hidden, clean, forget_replaced, hide
from holdfast.runs.lock import Holder, RunLock, seen_writing
from holdfast.runs.place import Choose, Sizes
from holdfast.runs.record import Kept, Pin, pin_step, read_kept, read_pins, turn, unpin_step, write_kept
from holdfast.runs.steps import RunFolder, Step
from holdfast.stores.files import make_parents
from holdfast.stores.local import free_nbytes

__all__ = ["RunDirectory", "open_for_writing"]


class RunDirectory(RunFolder):
    """A run's directory (`RunPlace`)."""

    def base_for(self, step: int) -> Step | None:
        found = self.newest()
        return self.newest(below=step) if found is not None and found.step == step else found

    def exists(self) -> bool:
        return os.path.isdir(self.path)

    def free(self) -> int | None:
        return free_nbytes(self.path)

    def sizes(self, step: Step) -> Sizes:
        """Files by device and inode."""
        found: Sizes = {}
        with suppress(OSError), self.opened() as (files, at):
            single = files.stat(step.name, at=at)
            if single is None:
                return {}
            if single.kind != "directory":
                return {single.identity: single.nbytes}
            inside = files.open_directory(step.name, at=at)
            try:
                for name in step.files:
                    entry = files.stat(name, at=inside)
                    if entry is not None:
                        found[entry.identity] = entry.nbytes
            finally:
                files.close(inside)
        return found

    def kept(self) -> Kept | None:
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

    def writer(self) -> Holder | None:
        with self.opened() as (files, at):
            return seen_writing(files, at=at)

    def asking(self) -> AbstractContextManager[None]:
        """What the file system refuses is told where it happens."""
        return nullcontext()

    def begin(self, kept: Kept, *, durable: bool) -> RunLock:
        with refusing("making the run's directory", self.path):
            make_parents(os.path.join(self.path, "step"), durable=durable)
        return open_for_writing(self, kept, durable=durable)

    def locked(self) -> RunLock:
        return RunLock.take(self.files, self.path)

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
        return replace(planned, plan=plan, report=replace(planned.report, files=files, nbytes=sum(nbytes for _, nbytes in files)))

    def attributes(self, says: Stamp, files: Sequence[tuple[str, int]]) -> Mapping[str, str] | None:
        return None

    def published(self, planned: Planned[Saved], says: Stamp) -> Step | None:
        return self.get(says.step)

    def let_go(self, choose: Choose, *, durable: bool) -> tuple[list[Step], list[str]]:
        notes: list[str] = []
        gone: list[Step] = []
        hidden: list[Hidden] = []
        with self.opened() as (files, at):
            try:
                # Names are taken while nobody pins; nobody waits while gigabytes are unlinked.
                with turn(self):
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
            forget_replaced(files, [one.name for one in steps], at=at)
            for one in reversed(steps):
                hide(files, one.name, at=at).remove(durable=durable)


def open_for_writing(folder: RunFolder, kept: Kept, *, durable: bool) -> RunLock:
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
