"""`Run`: the steps of one training run in one directory, saved, found again and kept from filling the disk.

    run = holdfast.Run("runs/llama", keep=[Latest(3), Every(10_000), Best("val_loss", 2)], budget="4TB")
    state = run.resume(into=state) or state
    …
    run.save(step, state, metrics={"val_loss": 2.1})

A save, in order. Whatever fails before 4 leaves every old step as it was.

    1  the run's lock, by `resume(into=…)` or the first save (runs/lock.py): a second run in the directory is refused while this
       one lives
    2  the plan: every byte of the step is laid out, and its seal with step, time and metrics (seals/document.py)
    3  room for it, on the disk and in the budget: enough, or refused, or waited for, or made by the rules
    4  written beside its name and published by one rename (saving/planned.py)
    5  only now retention (runs/retention.py), over whole steps

Reading (`latest`, `best`, `run[step]`, iteration, `resume()`) takes no lock and changes nothing; it looks at the directory each
time.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeVar, Unpack, overload

from holdfast.core.arguments import check_flag, make_choice_check
from holdfast.core.opaque import AnyValue
from holdfast.core.options import OPTIONS, Option, StoreOption, validate_arguments
from holdfast.core.quantities import Size, describe_value, parse_nbytes, parse_seconds
from holdfast.core.runtime import gc_paused, make_fork_safe
from holdfast.core.value import replace
from holdfast.engine.commit.target import not_committed_on_error
from holdfast.engine.commit.temporaries import wait_for_room
from holdfast.engine.write import Progress
from holdfast.errors import (
    BadArgument,
    BadArgumentType,
    Closed,
    Corrupted,
    DoesNotFit,
    FormatError,
    HoldfastError,
    HoldfastWarning,
    NotCommitted,
    SaveError,
    Unsupported,
)
from holdfast.extras.runs.export import Export, Exports, read_exports
from holdfast.extras.runs.fill import fill, loaded, unharmed
from holdfast.extras.runs.place import Closing, Sizes
from holdfast.extras.runs.record import RunRecord
from holdfast.extras.runs.retention import retain
from holdfast.extras.runs.rules import Rule, read_rules
from holdfast.extras.runs.signals import GRACE_S, SignalGuard, read_run_signals, read_signals
from holdfast.extras.runs.steps import Step, step_name
from holdfast.extras.runs.summary import MTBF_S, SaveTimes, Summary, summarize
from holdfast.extras.runs.view import RunView, read_step
from holdfast.stores.place import join, place_at
from holdfast.verbs.save import plan_saving
from holdfast.verbs.seals.document import Stamp
from holdfast.verbs.seals.document import stamp as stamp_now
from holdfast.verbs.shared.base import NoBase
from holdfast.verbs.shared.formats import LayoutOptions
from holdfast.verbs.shared.planned import Planned, Saved, Writing

if TYPE_CHECKING:
    from holdfast.extras.runs.sweep import Swept

READ_ONLY = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""The errors of a lock in a directory that this process may only read."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The errors of a save for which there is no room after all."""

PAUSE_S = 5.0
"""Seconds between two looks whether there is room now."""

WhenFull = Literal["error", "evict", "pause"]
WhenFailed = Literal["raise", "warn"]

T = TypeVar("T")


class RunOptions(StoreOption, total=False):
    """The options of `Run`."""

    keep: Rule | str | Collection[Rule | str]
    budget: Size | None
    when_full: WhenFull
    when_failed: WhenFailed
    export: Export | Sequence[Export]
    share: bool
    durable: bool
    signals: bool | signal.Signals | Iterable[signal.Signals]
    grace: float | str | None


OPTIONS |= {
    "RunOptions.keep": Option((), "rules that select the steps to keep", read_rules),
    "RunOptions.budget": Option(None, "limit for the size of all steps together", parse_nbytes),
    "RunOptions.when_full": Option(
        "error",
        "what a save does if there is no room: 'error', 'evict' or 'pause'",
        make_choice_check("error", "evict", "pause"),
    ),
    "RunOptions.when_failed": Option(
        "raise",
        "what a save does if it fails: 'raise' or 'warn'",
        make_choice_check("raise", "warn"),
    ),
    "RunOptions.export": Option((), "conversions of published steps, in the background"),
    "RunOptions.share": Option(
        True,
        "write only what changed since the previous step",
        check_flag,
    ),
    "RunOptions.signals": Option(
        False,
        "hold SIGTERM back until `interrupted` is read",
        read_run_signals,
    ),
    "RunOptions.grace": Option(None, "the time from a signal to the kill", parse_seconds),
}


def read_metrics(value: object, argument: str = "metrics=") -> dict[str, float]:
    """Check metrics: numbers of any kind under names."""
    if not isinstance(value, Mapping):
        message = f"{argument} takes numbers under names, not {describe_value(value)}"
        raise BadArgumentType(message, found=value)
    metrics: dict[str, float] = {}
    for name, number in value.items():
        try:
            if not isinstance(name, str) or isinstance(number, str | bytes | bool):
                raise TypeError
            metrics[name] = float(number)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            message = f"{argument} takes numbers under names, and {describe_value(name)} is {describe_value(number)}"
            raise BadArgumentType(message, found=value) from None
    return metrics


class Run(RunView):
    """The steps of a training run in a directory of its own, or below a prefix of a bucket. `resume(into=…)` or the first save
    makes the directory and locks it.

    `keep` are rules (`Latest`, `Every`, `Best`, `Within`, or their texts); what any of them keeps is kept, and the rest is deleted
    after each save. Without rules nothing is ever deleted. The newest step is never deleted, nor is the one before it until the
    newest has been read back. `budget` is what all steps together may have ("4TB"). `when_full` says what a save does where the
    budget or the disk has no room: "error" refuses it, "evict" lets the rules delete before it what they would delete after it,
    "pause" waits and warns. In all cases the old steps are intact. `when_failed` says what becomes of a save that fails for any
    reason: "raise" raises the error, by the next call if the save was in the background; "warn" makes a warning of it, counts it in
    `summary()`, and the training goes on to the next save.

    What did not change since the step before is not written again: both have the file (a hard link), and each can be deleted or
    copied by itself. In a bucket, which has no links, a step names the objects that it has in common with older ones, and each can
    be deleted by the run. `share=False` writes everything anew. `export` converts published steps in the background (`Export`).

    With `signals=True` the `with` block of the run is a block of `stopping` as well: a SIGTERM is held back until `interrupted` is
    asked. `signals` may be a signal or several instead; `grace` is that of `stopping`. Saving outside of the block is refused then.

    `path` may be a URL (`s3://bucket/run`), or with `store`, an obstore store, a key in it. Two runs below one prefix are not kept
    apart by a lock: of two saves of one step one is published, and the other is told.
    """

    @validate_arguments
    def __init__(self, path: str | os.PathLike[str], **options: Unpack[RunOptions]) -> None:
        durable, grace, budget = options["durable"], options["grace"], options["budget"]
        self._signals = read_run_signals(options["signals"])
        if grace is not None and not self._signals:
            raise BadArgument(
                "grace= goes with signals=: signals=True holds SIGTERM back for that time",
                found=grace,
            )
        self._grace = GRACE_S if grace is None else grace
        super().__init__(path, read_rules(options["keep"]), durable=durable, store=options["store"])
        self.budget = None if budget is None else parse_nbytes(budget)
        self.when_full = options["when_full"]
        self.when_failed = options["when_failed"]
        self.share = options["share"]
        self.resumed: Step | None = None
        """The step that `resume` loaded."""
        self._exports = Exports(
            read_exports(options["export"], self._folder.path), self._folder, durable=durable
        )
        self._process = os.getpid()
        self._closed = False
        self._lock: Closing | None = None
        self._held = ExitStack()
        """Closed when the run is closed, or dropped, or the program ends."""
        self._finalize = weakref.finalize(self, self._held.close)
        self._times: list[SaveTimes] = []
        self._failed = self._deleted = 0
        self._turn = make_fork_safe(threading.RLock())
        """One save, deletion or end at a time, of whichever thread."""
        self._guard: SignalGuard | None = None
        self._block: SignalGuard | None = None
        """The guard of `signals`, in the block of the run."""
        self._counts = False
        """Whether the clock of the run has gone on from the newest step."""
        self._last_s: float | None = None
        """When the state of the last step was taken, by `time.monotonic`."""

    @overload
    def resume(self, into: None = None, *, deep: bool = False) -> AnyValue: ...
    @overload
    def resume(self, into: T, *, deep: bool = False) -> T | None: ...
    def resume(self, into: object = None, *, deep: bool = False) -> object:
        """Load the newest whole step into a state, and give that back; None where the run has no step yet.

        Arrays are filled in place, other values are replaced by those of the step; names, shapes and dtypes must agree. Without a
        state the step's own is given back, with new arrays. `run.resumed` is then the step. A step that another process deletes
        meanwhile is looked for again. Where bytes do not have their checksums nothing of the state is changed, and `Corrupted` is
        raised; with `deep`, such a step is passed over. Either way what is loaded is read twice.

        With a state, this is the beginning of a training: the run is locked, until it is closed. Raises `NotCommitted` where
        another run writes into the directory, before anything is loaded.
        """
        if into is not None:
            with self._turn:
                self._begin_resuming()
        looks = self._looks()
        while (found := self.latest(deep=deep)) is not None:
            try:
                with unharmed():
                    opened = found.open()
                with opened as checkpoint:
                    state = (
                        loaded(checkpoint) if into is None else fill(into, checkpoint, checked=deep)
                    )
            except HoldfastError as error:
                if isinstance(error, DoesNotFit) or not self._is_gone(found):
                    if isinstance(error, Corrupted | FormatError):
                        self._doubts.mark_damaged(found, error.message)
                    raise
                next(looks)
                continue
            self.resumed = found
            return state
        return None

    def summary(self, *, mtbf: float | str | None = None) -> Summary:
        """What saving cost so far, and how often to save where one failure is to be expected every `mtbf` ("6h")."""
        expected = MTBF_S if mtbf is None else parse_seconds(mtbf, "mtbf=")
        return summarize(
            self._times, self._failed, self._deleted, mtbf_s=expected, damaged=self._doubts.damages
        )

    # Keeping.

    def prune(self) -> tuple[Step, ...]:
        """Delete now what the rules do not keep; the steps that went. A save does that by itself."""
        with self._turn:
            self._settle()
            self._begin()
            self._folder.check()
            with not_committed_on_error("deleting steps", self.path):
                return self._let_go()

    def sweep(self, *, grace: float | str = "24h", dry_run: bool = False) -> Swept:
        """In a bucket: delete what saves left that died, data that no published manifest names and that is older than `grace`.

        No save may take longer than that. Raises `BadArgument` for a directory, which the next save cleans.
        """
        from holdfast.extras.runs.sweep import sweep

        return sweep(self.path, grace=grace, dry_run=dry_run)

    def rewind(self, step: int) -> tuple[Step, ...]:
        """Go back to a step: delete every later one, so that the run goes on from there. Gives those that went.

        Raises `NoSuchStep` where it is not there or not whole, and `NotCommitted` where a later one is pinned.
        """
        with self._turn:
            self._settle()
            self._begin()
            self._folder.check()
            number = self[step].step
            later = [one for one in self.steps() if one.step > number]
            for one in later:
                if one.step in self.pins() or one.step in self._busy():
                    message = f"step {one.step} is pinned or being exported, and later than {number}; unpin it first"
                    raise NotCommitted(message, file=self.path, errno=errno.EBUSY)
            with not_committed_on_error("deleting later steps", self.path):
                self._folder.delete(later, durable=self.durable)
            return tuple(later)

    # Saving.

    @validate_arguments(step=read_step, metrics=read_metrics)
    def save(
        self,
        step: int,
        state: object,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
        max_shard_size: Size | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> Step | None:
        """Save a state as a step, then let the rules delete what they do not keep. Gives the step back.

        The state is what `holdfast.save` takes. A step that is there already is refused, unless `overwrite=True`, or it is not
        whole. Raises `NotCommitted` where nothing was published; what was there is intact. With `when_failed="warn"` that is a
        warning, and None is given back.
        """
        with self._turn:
            began = time.perf_counter()
            self._settle()
            options = LayoutOptions(
                None if max_shard_size is None else parse_nbytes(max_shard_size)
            )

            def write(base: str | None) -> Step:
                with gc_paused():
                    planned = plan_saving(
                        state,
                        path,
                        format="native",
                        metadata=self._folder.with_stamp(metadata, stamp),
                        options=options,
                        writing=writing,
                        limits=None,
                        base=base,
                        hashes=self.share,
                    )
                    with planned.sources:
                        return self._carry_out(planned, stamp, progress)

            try:
                with self._folder.asking():
                    self._begin()
                    stamp = stamp_now(step, metrics, self._ran())
                    path, replaced, base = self._place(step, overwrite=overwrite)
                writing = Writing(overwrite=replaced, durable=self.durable, threads=threads)
                try:
                    saved = write(base)
                except (NoBase, NotCommitted) as error:
                    is_base_gone = isinstance(error, NoBase) or error.errno == errno.ESTALE
                    if base is None or not is_base_gone:
                        raise
                    # Somebody removed the step before: as it was opened, or while this one was linked to it.
                    base = None
                    saved = write(base)
            except HoldfastError as error:
                if not self._count_failure(error, self._step_path(step)):
                    raise
                return None
            published = time.perf_counter() - began
            self._exports.add(saved)
            self._follow(saved, base)
            self._record_times(saved, stalled_s=time.perf_counter() - began, took_s=published)
            return saved

    # Ending.

    @validate_arguments(signals=read_signals, grace=parse_seconds)
    def stopping(
        self,
        *,
        signals: Iterable[signal.Signals] | signal.Signals = signal.SIGTERM,
        grace: float | str = GRACE_S,
    ) -> SignalGuard:
        """A block in which a signal that asks the program to end waits for `interrupted`; after it, the signal does what it does.

        `grace` is the time from the signal until the program is killed: SIGTERM's of Slurm (KillWait) and Kubernetes is 30 s. A
        second signal is not held back. Handlers that were there are there again after the block, and are called then.
        """
        if self._block is not None:
            raise SaveError(
                "this run holds signals back already, by its signals=; leave `stopping` out",
                file=self.path,
            )
        self._guard = SignalGuard(
            read_signals(signals), parse_seconds(grace, "grace="), last=self._before_signal
        )
        return self._guard

    def interrupted(
        self, step: int, state: object, *, metrics: Mapping[str, float] | None = None
    ) -> bool:
        """Whether a signal has come, in a block of `stopping` or `signals`. Called once a step, where the state is consistent.

        It is True when the state has been saved as this step; or when that was not worth it, because the step before is younger
        than a save takes, or because the grace time is too short for one.
        """
        self._check_block()
        if self._guard is None or self._guard.came_s is None:
            return False
        if self._is_worth_saving(read_step(step)):
            self.save(step, state, metrics=metrics)
        return True

    def _check_block(self) -> None:
        if self._signals and self._block is None and not self._closed:
            message = "signals= holds signals back in the `with` block of the run, and this is outside: `with Run(…) as run:`"
            raise SaveError(message, file=self.path)

    def _is_worth_saving(self, step: int) -> bool:
        takes = sum(one.took_s for one in self._times) / len(self._times) if self._times else 0.0
        left = math.inf if self._guard is None else self._guard.left_s
        age = math.inf if self._last_s is None else time.monotonic() - self._last_s
        return age > takes and left > takes and self._folder.get(step) is None

    def _before_signal(self) -> None:
        """Nothing here; `holdfast.torch.Run` waits for its save."""

    def _follow(self, saved: Step, base: str | None) -> None:
        """Delete old steps after a save. Failures are warnings: the step is saved."""
        try:
            try:
                self._let_go()
            except (HoldfastError, OSError) as error:
                self._warn_of_retention(error)
            if base is None and saved.step not in self._sure:
                self._doubts.check_saved(saved)
            self._doubts.write()
        except (HoldfastError, OSError) as error:
            warnings.warn(
                f"{self.path}: what was read back cannot be noted: {error}",
                HoldfastWarning,
                stacklevel=4,
            )

    def _count_failure(self, error: HoldfastError, path: str, *, stacklevel: int = 4) -> bool:
        """Count a save that failed, and warn of it where the run goes on after that. False if the error is to be raised."""
        self._failed += 1
        # An argument that is wrong is wrong at the next save as well.
        if self.when_failed == "raise" or isinstance(error, BadArgument | Unsupported):
            return False
        message = f"saving {path} failed, and the next save tries again: {error}"
        warnings.warn(message, HoldfastWarning, stacklevel=stacklevel)
        return True

    def _carry_out(self, planned: Planned[Saved], stamp: Stamp, progress: Progress | None) -> Step:
        """Make room and write; where the disk is full after all, make more room as long as there is any to be made."""
        planned = self._folder.sealed(planned, stamp)
        while True:
            with self._folder.asking():
                self._make_room(planned.report.new_nbytes, stamp)
            free = self._folder.free()
            try:
                report = planned.report
                if free is not None:
                    report = replace(report, free_nbytes=free)
                replace(planned, report=report).run(progress)
                self._sure.discard(stamp.step)
                return self._folder.published(planned, stamp)
            except NotCommitted as error:
                if error.errno not in FULL:
                    raise
                if self.when_full == "pause":
                    self._wait_for_room(error.message)
                elif self.when_full == "error" or not self._evict(stamp):
                    raise

    def _make_room(self, nbytes: int, coming: Stamp) -> None:
        """Wait or delete until there is room for so many bytes. Raises `NotCommitted` if there is none."""
        while lacking := self._lacking(nbytes):
            is_too_large = self.budget is not None and nbytes > self.budget
            if self.when_full == "pause" and not is_too_large:
                self._wait_for_room(lacking)
            elif self.when_full != "evict" or not self._evict(coming):
                refused = NotCommitted(
                    f"{lacking}; nothing was written, and every old step is intact",
                    file=self._step_path(coming.step),
                    errno=errno.ENOSPC,
                )
                refused.expected = nbytes
                raise refused

    def _evict(self, coming: Stamp) -> bool:
        """Delete the oldest step that the rules do not keep, and return whether there was one."""
        try:
            return bool(self._let_go(coming, most=1))
        except (HoldfastError, OSError) as error:
            self._warn_of_retention(error)
            return False

    def _lacking(self, nbytes: int) -> str:
        """Why there is no room for so many bytes more; empty where there is. In a bucket there is the budget alone."""
        free = self._folder.free()
        if free is not None and free < nbytes and wait_for_room():
            free = self._folder.free()
        if free is not None and free < nbytes:
            return f"the disk is full: {nbytes:,} bytes are to be written and {free:,} are free"
        if self.budget is None:
            return ""
        used = self._used()
        if used + nbytes <= self.budget:
            return ""
        return f"the run's budget is used up: {used:,} of {self.budget:,} bytes, and {nbytes:,} more are to be written"

    def _used(self) -> int:
        """Return the bytes of all steps. A file that several steps share counts once."""
        sizes = Sizes()
        for step in self._folder.steps():
            sizes.update(self._folder.sizes(step))
        return sum(sizes.values())

    def _wait_for_room(self, lacking: str) -> None:
        warnings.warn(
            f"saving into {self.path} waits for room: {lacking}", HoldfastWarning, stacklevel=6
        )
        time.sleep(PAUSE_S)

    def _warn_of_retention(self, error: Exception) -> None:
        message = f"no step of {self.path} was deleted: {error}"
        warnings.warn(message, HoldfastWarning, stacklevel=5)

    def _let_go(self, coming: Stamp | None = None, *, most: int | None = None) -> tuple[Step, ...]:
        """Delete what no rule keeps, at most `most` steps; what stands in the way of one step is a warning."""
        done = retain(
            self._folder,
            self.keep,
            sure=self._sure,
            busy=self._busy,
            coming=coming,
            most=most,
            durable=self.durable,
        )
        self._deleted += len(done.steps)
        if done.read_back is not None:
            step, well = done.read_back
            if well:
                self._doubts.mark_good(step)
            else:
                self._doubts.mark_damaged(step, "it could not be read back")
        for note in done.notes:
            warnings.warn(f"{self.path}: {note}", HoldfastWarning, stacklevel=5)
        return done.steps

    def _settle(self) -> None:
        """Raise what failed in the background since the last call, and refuse a closed run and a fork."""
        if self._process != os.getpid():
            message = f"this run belongs to process {self._process}, of which this one is a fork; make a Run of its own here"
            raise SaveError(message, file=self.path)
        if self._closed:
            raise Closed("this run was closed; make a new Run to save more steps", file=self.path)
        self._check_block()
        self._exports.tell()

    def _begin(self) -> None:
        """Open the run for writing: the directory, the lock, what dead processes left, and the rules written down."""
        if self._lock is not None:
            return
        record = RunRecord(keep=[*map(str, self.keep)], budget=self.budget)
        self._lock = self._folder.begin(record, durable=self.durable)
        self._held.callback(self._lock.close)

    def _begin_resuming(self) -> None:
        """Lock the run for a program that resumes, so that it learns of another one before it trains, and not when it saves."""
        is_owner = self._process == os.getpid() and not self._closed
        if not is_owner or not place_at(self.path).on_disk:
            # A bucket has no lock. A fork and a closed run cannot save, and may load.
            return
        try:
            self._begin()
        except NotCommitted as error:
            # To load a step of somebody else's run is allowed: there, nothing can be saved anyway.
            if error.errno not in READ_ONLY:
                raise

    def _ran(self) -> float | None:
        """For how long the run has run. A run that begins to save looks for what to go on with; from then on nobody else saves."""
        if not self._counts:
            self._clock.look(self._folder)
            self._counts = True
        return self._clock.read()

    def _place(self, step: int, *, overwrite: bool) -> tuple[str, bool, str | None]:
        """Where a step goes, whether what is there may be replaced, and the newest other step that is not doubted, as its base."""
        path = self._step_path(step)
        self._folder.check()
        found = self._folder.get(step)
        base = self._folder.newest() if self.share else None
        if found is not None and not overwrite:
            message = f"step {step} is there already and whole; pass overwrite=True to replace it, or save another number"
            raise NotCommitted(message, file=found.path, errno=errno.EEXIST)
        if found is not None and found.path != path:
            raise NotCommitted(
                f"step {step} is there under the name {found.name!r}; remove that to save another one",
                file=path,
                errno=errno.EEXIST,
            )
        while base is not None and (base.step == step or self._doubts.is_doubted(base)):
            base = self._folder.newest(below=base.step)
        return path, overwrite or self._folder.replaces(step), None if base is None else base.path

    def _step_path(self, step: int) -> str:
        return join(self._folder.path, step_name(step))

    def _record_times(self, saved: Step, *, stalled_s: float, took_s: float) -> None:
        self._last_s = time.monotonic() - took_s
        self._times.append(SaveTimes(saved.step, stalled_s, took_s, saved.nbytes))

    def _busy(self) -> Mapping[int, str]:
        return self._exports.busy()

    # The end.

    def close(self) -> None:
        """Wait for what goes on in the background, and give the run's lock back. Looking goes on; saving needs a new Run.

        Raises what went wrong in the background, when the lock is given back.
        """
        if self._closed:
            return
        try:
            if self._process == os.getpid():
                self._finish()
        finally:
            self._closed = True
            self._lock = None
            self._held.close()

    def _finish(self) -> None:
        if self._lock is not None:
            # What a deep look or a resume has found since the last save is for the next process, too.
            with suppress(HoldfastError, OSError):
                self._doubts.write()
        self._exports.wait()
        self._exports.tell()

    def __enter__(self) -> Self:
        if self._signals:
            self._block = self.stopping(signals=self._signals, grace=self._grace).__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ending = ExitStack()
        ending.push(
            self._end
        )  # after the signal was sent on: whoever has it now may raise, and the run is closed all the same
        if self._block is not None:
            ending.push(self._block)
            self._block = None
        ending.__exit__(kind, error, trace)

    def _end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except HoldfastError as late:
            if error is None:
                raise
            warnings.warn(
                f"{self.path}: {late}", HoldfastWarning, stacklevel=2
            )  # what ended the block is more

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path!r}, keep {', '.join(map(str, self.keep)) or 'everything'}>"
