"""`RunDirectory`: a run's place on this machine: folders, a lock that the kernel keeps, renames and hard links.

**Steps are deleted** by a rename first, then by unlinking. A step that is half deleted never looks like a step.

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
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from holdfast.core.documents import DocumentType, write_document
from holdfast.core.value import Value, replace
from holdfast.engine.commit.target import not_committed_on_error
from holdfast.engine.commit.temporaries import (
    LockedEntry,
    TargetLocation,
    find_hidden_folders,
    make_temporary_name,
    remove_abandoned,
    remove_folder,
    try_lock,
)
from holdfast.engine.commit.transactions import replace_file
from holdfast.errors import HeaderError, HoldfastError, NoSuchPath, NotCommitted, StoreError
from holdfast.extras.runs.lock import Holder, RunLock, seen_writing
from holdfast.extras.runs.place import Change, Choose, RunPlace, Sizes
from holdfast.extras.runs.record import (
    MOST_NBYTES,
    NO_PINS,
    PINS,
    D,
    RunRecord,
    decode_document,
)
from holdfast.extras.runs.steps import (
    DirectoryLook,
    FoundStep,
    Step,
    found_steps,
    opened_folder,
    stamped,
    step_name,
)
from holdfast.stores.files import (
    FileEntry,
    Files,
    is_temporary,
    make_parents,
    read_all,
    system_files,
)
from holdfast.stores.place import place_at
from holdfast.verbs.seals.document import SEAL, Stamp, seal_name, with_seal
from holdfast.verbs.shared.planned import Planned, Saved

PREFIX = "deleted~"
"""The name of a deleted step begins so, after its dot."""

DEEPEST = 64
"""The most folders in folders that are followed. No trainer comes near; whoever does is left for a person to remove."""


class Hidden(Value, eq=False):
    """A step that has lost its name, and is ours to remove."""

    entry: LockedEntry
    is_folder: bool
    seal: str | None
    """The name of the seal beside a file."""

    def remove(self, *, durable: bool = True) -> None:
        """Remove the files. What cannot be removed keeps its hidden name, for the next `clean`."""
        files, entry = self.entry.files, self.entry
        try:
            with suppress(OSError):
                if durable:
                    files.sync(entry.dir_fd)
                if self.seal is not None:
                    with suppress(FileNotFoundError):
                        files.unlink(self.seal, dir_fd=entry.dir_fd)
                _remove_entry(entry, is_folder=self.is_folder)
        finally:
            with suppress(OSError):
                entry.close()


def forget_replaced(files: Files, names: Collection[str], *, at: int, there: Sequence[str]) -> None:
    """Remove the folders that these steps replaced and that are there still, so that a power cut does not bring them back."""
    if not any(name.endswith(".old") for name in there):
        return
    longest = files.longest_name(at)
    for name in names:
        location = TargetLocation(files, name, at, longest)
        if find_hidden_folders(location, there, suffix="old"):
            remove_abandoned(location, there, include_set_aside=True)
            files.sync(at)


def hide(files: Files, name: str, *, at: int) -> Hidden:
    """Take a step's name from it, so that `remove` can follow.

    Raises `OSError` if that is impossible, and nothing has changed then.
    """
    opened = _open_entry(files, name, at=at)
    if opened is None:
        raise FileNotFoundError(errno.ENOENT, "no step of this name", name)
    entry, is_folder = opened
    try:
        # A file needs no lock: whoever takes it for a dead process's removes what is to be removed.
        # NFS would refuse it one.
        is_ours = not is_folder or try_lock(files, entry.descriptor)
        if not is_ours or not entry.is_in_place():
            raise OSError(errno.EBUSY, "another process writes or deletes it", name)
        hidden = make_temporary_name(PREFIX + name, max_nbytes=files.longest_name(at))
        files.rename(name, hidden, dir_fd=at)
        entry.name = hidden
        return Hidden(entry, is_folder, None if is_folder else seal_name(name))
    except BaseException:
        with suppress(OSError):
            files.close(entry.descriptor)
        raise


def _open_entry(files: Files, name: str, *, at: int) -> tuple[LockedEntry, bool] | None:
    """Open a file or a folder, and return whether it is a folder; None for anything else."""
    found = files.stat(name, dir_fd=at)
    if found is None or found.kind not in ("file", "directory"):
        return None
    is_folder = found.kind == "directory"
    descriptor = files.open_directory(name, dir_fd=at) if is_folder else files.open(name, dir_fd=at)
    try:
        return LockedEntry(files, name, dir_fd=at, descriptor=descriptor), is_folder
    except BaseException:
        with suppress(OSError):
            files.close(descriptor)
        raise


def _remove_entry(entry: LockedEntry, *, is_folder: bool) -> None:
    if is_folder:
        _empty(entry.files, entry)
    else:
        entry.files.unlink(entry.name, dir_fd=entry.dir_fd)


def clean(files: Files, there: Sequence[str], *, at: int) -> None:
    """Remove what unfinished deletions left, among these names. What cannot be removed stays."""
    for name in there:
        if name.startswith(f".{PREFIX}") and is_temporary(name):
            with suppress(OSError):
                _clean_one(files, name, at=at)


def _clean_one(files: Files, name: str, *, at: int) -> None:
    opened = _open_entry(files, name, at=at)
    if opened is None:
        return
    entry, is_folder = opened
    try:
        if files.lock(entry.descriptor) and entry.is_in_place():
            files.sync(at)
            _remove_entry(entry, is_folder=is_folder)
    finally:
        with suppress(OSError):
            files.close(entry.descriptor)


def _empty(files: Files, folder: LockedEntry, depth: int = 0) -> None:
    """Remove a folder with all that is in it. A link goes, not what it leads to."""
    plain: list[str] = []
    for name in files.list(folder.descriptor):
        found = files.stat(name, dir_fd=folder.descriptor)
        if found is None or found.kind != "directory":
            plain.append(name)
            continue
        if depth == DEEPEST:
            raise OSError(errno.ELOOP, "too many folders in folders", name)
        inner = LockedEntry.open_directory(files, name, dir_fd=folder.descriptor)
        try:
            _empty(files, inner, depth + 1)
        finally:
            with suppress(OSError):
                inner.close()
    remove_folder(folder, plain)


class RunDirectory(RunPlace):
    """A run in a directory."""

    def __init__(self, path: str, files: Files | None = None) -> None:
        self.path = path
        self._files = files
        self._lock: RunLock | None = None
        """The lock of the run that opened it for writing."""

    @property
    def files(self) -> Files:
        return self._files or system_files()

    @contextmanager
    def opened(self) -> Iterator[tuple[Files, int]]:
        """The directory open. Raises `OSError` where there is none."""
        files = self.files
        with opened_folder(files, self.path) as at:
            yield files, at

    def newest(self, *, below: int | None = None) -> Step | None:
        while True:
            with self._looking() as look:
                numbers = [number for number in look.claims if below is None or number < below]
                steps = map(look.at, sorted(numbers, reverse=True))
                found = next(filter(None, steps), None)
                if not look.lost(above=found):
                    return found

    def get(self, step: int) -> Step | None:
        with self._looking() as look:
            return look.at(step)

    def survey(self) -> list[FoundStep]:
        while True:
            with self._looking() as look:
                rows = found_steps(
                    look.claims, look.examine, sealed=lambda name: not look.is_of_others(name)
                )
                newest = next((row.whole for row in reversed(rows) if row.whole), None)
                if not look.lost(above=newest):
                    break
        return rows + [FoundStep(name, None, None, why) for name, why in look.others.items()]

    def unsealed(self) -> list[str]:
        with self._looking() as look:
            return look.unsealed()

    @contextmanager
    def _looking(self) -> Iterator[DirectoryLook]:
        """List the directory, which is open meanwhile. There are no steps in one that is not there."""
        files = self.files
        with ExitStack() as stack:
            try:
                try:
                    folder = stack.enter_context(opened_folder(files, self.path))
                except FileNotFoundError:
                    folder, names = -1, list[str]()
                else:
                    # From here on, what is not found is an error: no step is passed over.
                    names = files.list(folder)
                look = DirectoryLook(self.path, files, folder, names=names)
            except HoldfastError:
                raise
            except OSError as error:
                message = f"the run's directory cannot be looked at: {error.strerror or error}"
                raise StoreError(message, file=self.path) from error
            yield look

    def check(self, at: int | None = None) -> None:
        """Compare the lock; `at` is the directory, where it is open already."""
        if self._lock is None:
            return
        with not_committed_on_error("comparing the run's lock", self.path):
            if at is not None:
                self._lock.check(self.path, at=at)
                return
            with suppress(FileNotFoundError), self.opened() as (_, opened):
                self._lock.check(self.path, at=opened)
                return
            self._lock.check(self.path, at=None)

    def exists(self) -> bool:
        return os.path.isdir(self.path)

    def free(self) -> int | None:
        return place_at(os.path.join(self.path, "step")).free_nbytes()

    def sizes(self, step: Step) -> Sizes:
        return {entry.identity: entry.nbytes for entry in self._entries(step).values()}

    def _entries(self, step: Step) -> Mapping[str, FileEntry]:
        found: dict[str, FileEntry] = {}
        with suppress(OSError), self.opened() as (files, at):
            single = files.stat(step.name, dir_fd=at)
            if single is None:
                return {}
            if single.kind != "directory":
                return {step.name: single}
            with opened_folder(files, step.name, at=at) as inside:
                for name in step.files:
                    entry = files.stat(name, dir_fd=inside)
                    if entry is not None:
                        found[name] = entry
        return found

    def read_record(self, kind: DocumentType[D]) -> D | None:
        try:
            with self.opened() as (files, at):
                return _read_record(files, kind, at=at)
        except FileNotFoundError:
            return None

    def change_record(self, kind: DocumentType[D], change: Change[D], *, durable: bool) -> None:
        try:
            with turn(self) if kind.file == PINS.file else self.opened() as (files, at):
                try:
                    found = _read_record(files, kind, at=at)
                except HeaderError:
                    if kind.file == PINS.file:
                        raise
                    found = None
                made = change(found)
                if made is not None:
                    replace_file(
                        os.path.join(self.path, kind.file),
                        write_document(kind, made),
                        durable=durable,
                        files=files,
                    )
        except FileNotFoundError:
            raise NoSuchPath("there is no such directory", file=self.path) from None

    def writer(self) -> Holder | None:
        with self.opened() as (files, at):
            return seen_writing(files, at=at)

    def begin(self, record: RunRecord, *, durable: bool) -> RunLock:
        with not_committed_on_error("making the run's directory", self.path):
            make_parents(os.path.join(self.path, "step"), durable=durable)
        self._lock = open_for_writing(self, record, durable=durable)
        return self._lock

    def locked(self) -> RunLock:
        self._lock = RunLock.take(self.files, self.path)
        return self._lock

    def sealed(self, planned: Planned[Saved], stamp: Stamp) -> Planned[Saved]:
        plan = with_seal(planned.plan, stamp)
        files = tuple(plan.file_sizes)
        report = replace(planned.report, files=files, nbytes=sum(nbytes for _, nbytes in files))
        return replace(planned, plan=plan, report=report, before_publish=self.check)

    def published(self, planned: Planned[Saved], stamp: Stamp) -> Step:
        files = {key: nbytes for key, nbytes in sorted(planned.report.files) if key != SEAL}
        name = step_name(stamp.step)
        path, nbytes = os.path.join(self.path, name), sum(files.values())
        return stamped(stamp, stamp.step, path, nbytes, name, tuple(files))

    def let_go(self, choose: Choose, *, durable: bool) -> tuple[list[Step], list[str]]:
        notes: list[str] = []
        gone: list[Step] = []
        hidden: list[Hidden] = []
        with self.opened() as (files, at):
            try:
                # Names are taken while nobody pins; nobody waits while gigabytes are unlinked.
                with turn(self):
                    self.check(at)
                    going = choose((_read_record(files, PINS, at=at) or NO_PINS).by_step())
                    there = files.list(at)
                    forget_replaced(files, [one.name for one in going], at=at, there=there)
                    for step in going:
                        try:
                            hidden.append(hide(files, step.name, at=at))
                            gone.append(step)
                        except FileNotFoundError:
                            continue  # Somebody else deleted it.
                        except OSError as error:
                            why = error.strerror or error
                            notes.append(f"step {step.step} cannot be deleted: {why}")
            finally:
                for each in hidden:
                    each.remove(durable=durable)
            clean(files, there, at=at)
        return gone, notes

    def delete(self, steps: Sequence[Step], *, durable: bool) -> None:
        with self.opened() as (files, at), turn(self):
            self.check(at)
            forget_replaced(files, [one.name for one in steps], at=at, there=files.list(at))
            for one in reversed(steps):
                hide(files, one.name, at=at).remove(durable=durable)


def open_for_writing(folder: RunDirectory, record: RunRecord, *, durable: bool) -> RunLock:
    """Take the run's lock, remove what deletions of dead processes left, and write the rules down."""
    files = folder.files
    lock = RunLock.take(files, folder.path)
    try:
        with (
            not_committed_on_error("preparing the run's directory", folder.path),
            folder.opened() as (_, at),
        ):
            with suppress(OSError):
                clean(files, files.list(at), at=at)
            folder.write_rules(record, durable=durable)
    except BaseException:
        lock.close()
        raise
    return lock


def _read_record(files: Files, kind: DocumentType[D], *, at: int) -> D | None:
    there = files.stat(kind.file, dir_fd=at)
    if there is None:
        return None
    raw = read_all(files, kind.file, there, dir_fd=at, max_nbytes=MOST_NBYTES)
    if raw is None:
        raise HeaderError("no plain file of a length that could be", file=kind.file)
    return decode_document(raw, kind)


PATIENCE_S, PAUSE_S = 30.0, 0.02
"""How long another process's turn is waited for, and between looks. A turn is a few renames."""


@contextmanager
def turn(folder: RunDirectory) -> Iterator[tuple[Files, int]]:
    """The directory, open and locked: no other process changes pins or takes names from steps meanwhile."""
    with folder.opened() as (files, at):
        deadline = time.monotonic() + PATIENCE_S
        while not try_lock(files, at):
            if time.monotonic() > deadline:
                raise NotCommitted(
                    "another process has been deleting steps or changing pins for long; try again",
                    file=folder.path,
                )
            time.sleep(PAUSE_S)
        folder.check(at)
        yield files, at


def place_for(path: str) -> RunPlace:
    """The place of a run, from the path or the URL that `place_of` gave."""
    place = place_at(path)
    if place.url is not None:
        from holdfast.extras.runs.bucket import (
            RunBucket,  # what it imports is for those who have a bucket
        )

        return RunBucket(place.url)
    return RunDirectory(place.absolute)
