"""`holdfast.torch.Run`: a `holdfast.Run` whose steps are saved by all ranks of a group, now or in the background.

Every rank calls the same methods. What concerns the place (a lock, whether the step may be replaced, room, retention) the first
rank does, inside of the save, where its refusal reaches all ranks as the same error (saving.py). A background save that failed is
raised by the next call on this run, on every rank alike, and by `wait`; with `when_failed="warn"` it is a warning there.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Literal, NamedTuple, TypeVar, Unpack, overload

import torch.distributed as dist

from holdfast.core.arguments import make_choice_check
from holdfast.core.documents import message_type, read_document, write_document
from holdfast.core.group import UNCHANGED, Ranks, joint_phase
from holdfast.core.opaque import AnyValue
from holdfast.core.options import (
    DEADLINE,
    AsyncRankStepOptions,
    RankStepOptions,
    pick_fields,
    validate_arguments,
)
from holdfast.core.value import replace
from holdfast.errors import Corrupted, FormatError, HoldfastError, HoldfastWarning, RanksFailed
from holdfast.extras.runs.fill import unharmed
from holdfast.extras.runs.run import Run as PlainRun
from holdfast.extras.runs.run import RunOptions
from holdfast.extras.runs.steps import Step, stamped, step_name
from holdfast.extras.runs.view import read_step
from holdfast.ranks.write import AsStep
from holdfast.stores.place import join
from holdfast.torch.ranks.background import SaveHandle, failed_save
from holdfast.torch.ranks.group import group_of, ranks_of
from holdfast.torch.ranks.load_sharded import ShardedLoad, load_full, load_together
from holdfast.torch.ranks.save_sharded import begin_requested, save_requested
from holdfast.torch.ranks.saving import SavedShards, SaveRequest
from holdfast.torch.ranks.wanted import PerRank
from holdfast.verbs.seals.document import stamp as stamp_now
from holdfast.verbs.shared.state import Stateful

ASK_S, MOST_CALLS = 1.0, 100_000
"""How often the ranks ask each other whether a signal came, in seconds; and after how many calls at the latest."""

T = TypeVar("T", bound=Stateful | Mapping[str, object])


class Signalled(NamedTuple):
    """The first rank's answer when all ranks have been asked for signals."""

    stops: bool
    saves: bool
    calls: int
    """After how many calls to ask again."""


SIGNALLED, STEPS = (
    message_type("answer about signals", Signalled),
    message_type("list of steps", list[Step]),
)


class Run(PlainRun):
    """A `holdfast.Run` of all ranks of a group (the default one), or of a process without one.

    As `holdfast.Run`; `group` and `deadline` are those of `save_sharded`.
    """

    @validate_arguments
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        group: dist.ProcessGroup | None = None,
        deadline: float = DEADLINE,
        **options: Unpack[RunOptions],
    ) -> None:
        super().__init__(path, **options)
        self.group = group
        self.deadline = deadline
        self._handle: SaveHandle | None = None
        self._new_nbytes: int | None = None
        """Bytes that the last step took."""
        self._base: str | None = None
        """The name of the step whose files the last one may share."""
        self._linked_nbytes = 0
        """Bytes of the last step that its base has, too."""
        self._stops = False
        self._calls_left = self._calls_asked = 1
        self._asked_s: float | None = None

    @validate_arguments(step=read_step)
    def save(  # type: ignore[override]  # what several ranks need to say in addition, and no shards by size
        self, step: int, state: Stateful | Mapping[str, object], **options: Unpack[RankStepOptions]
    ) -> Step | None:
        """Save the state of all ranks as a step; every rank calls it. The first rank then deletes what no rule keeps.

        What a state may be, `values`, `per_rank` and `check_replicas` are as for `save_sharded`; `metrics` are the first rank's.
        A step that is there already is refused on all ranks, unless `overwrite=True`, or it is not whole.
        """
        began = time.perf_counter()
        self._settle()
        request = self._request(step, options)
        try:
            done = save_requested(state, request, group=self.group, deadline=self.deadline)
        except HoldfastError as error:
            if not self._count_failure(error, request.path):
                raise
            return None
        took = time.perf_counter() - began
        saved = self._after(request, done)
        self._record_times(saved, stalled_s=time.perf_counter() - began, took_s=took)
        return saved

    @validate_arguments(step=read_step)
    def async_save(
        self,
        step: int,
        state: Stateful | Mapping[str, object],
        **options: Unpack[AsyncRankStepOptions],
    ) -> SaveHandle:
        """As `save`, and the caller trains on while the step is written: returns when what this rank has has been copied.

        The next call on this run waits for the save before it. What went wrong is raised there, and by `wait`; with
        `when_failed="warn"` it is a warning, and only the `wait` of the handle raises it.
        """
        began = time.perf_counter()
        self._settle()
        request = self._request(step, options)
        stalled: list[float] = []

        def after(done: SavedShards) -> None:
            took = time.perf_counter() - began
            saved = self._after(request, done)
            self._record_times(saved, stalled_s=stalled[0] if stalled else took, took_s=took)

        try:
            self._handle = begin_requested(
                state,
                request,
                group=self.group,
                deadline=self.deadline,
                max_host_memory=options["max_host_memory"],
                after=after,
            )
        except HoldfastError as error:
            if not self._count_failure(error, request.path):
                raise
            return failed_save(request.path, error)
        stalled.append(time.perf_counter() - began)
        return self._handle

    def interrupted(  # type: ignore[override]  # what several ranks need to say in addition
        self,
        step: int,
        state: Stateful | Mapping[str, object],
        *,
        metrics: Mapping[str, float] | None = None,
        values: Literal["agree", "first"] = "agree",
        per_rank: str | Sequence[str] = (),
        check_replicas: bool = True,
    ) -> bool:
        """As `holdfast.Run.interrupted`, on every rank: a signal to any of them is a signal to all, which save the same step.

        Every rank calls it equally often. The ranks ask each other about once a second, and at the other calls nothing is request.
        """
        self._check_block()
        if self._guard is None:
            return False
        if not self._stops:
            self._calls_left -= 1
            if self._calls_left > 0:
                return False
            self._stops, saves, self._calls_left = self._ask_all(read_step(step))
            if saves:
                self.save(
                    step,
                    state,
                    metrics=metrics,
                    values=values,
                    per_rank=per_rank,
                    check_replicas=check_replicas,
                )
        return self._stops

    def _ask_all(self, step: int) -> Signalled:
        assert self._guard is not None  # whoever calls has looked
        guard, calls, now = self._guard, self._calls_asked, time.monotonic()

        def decide(messages: list[bytes]) -> list[bytes]:
            stops = b"1" in messages
            between = max(now - self._asked_s, 1e-6) if self._asked_s is not None else ASK_S
            # A tenth of the grace time is the most that may pass before all ranks know.
            after = int(calls * min(ASK_S, guard.grace_s / 10) / between)
            saves = stops and self._is_worth_saving(step)
            answer = Signalled(stops, saves, max(1, min(after, 2 * calls, MOST_CALLS)))
            return [write_document(SIGNALLED, answer)] * len(messages)

        with self._ranks("ask for signals in") as ranks:
            answer = read_document(
                SIGNALLED, ranks.agree(b"0" if guard.came_s is None else b"1", decide)
            )
        self._asked_s, self._calls_asked = now, answer.calls
        return answer

    def _ranks(self, doing: str) -> closing[Ranks]:
        return closing(ranks_of(self.group, doing=f"{doing} {self.path!r}", deadline=self.deadline))

    def _before_signal(self) -> None:
        try:
            self._end_of_save()
        except HoldfastError as error:
            warnings.warn(f"{self.path}: {error}", HoldfastWarning, stacklevel=3)
        self._stops, self._calls_left, self._calls_asked, self._asked_s = False, 1, 1, None

    def wait(self) -> Step | None:
        """Come back when the save in the background is over; the step that it saved. Raises what went wrong.

        With `when_failed="warn"` that is a warning, and there is no step.
        """
        failed_before = self._failed
        self._settle()
        if self._failed > failed_before:
            return None
        return None if not self._times else self._folder.get(self._times[-1].step)

    @overload  # type: ignore[override]  # what several ranks need to say in addition
    def resume(
        self, into: None = None, *, deep: bool = ..., strict: bool = ..., per_rank: PerRank = ..., cast: bool = ...,
        threads: int | None = ...,
    ) -> AnyValue: ...  # fmt: skip
    @overload
    def resume(
        self, into: T, *, deep: bool = ..., strict: bool = ..., per_rank: PerRank = ..., cast: bool = ...,
        threads: int | None = ...,
    ) -> T | None: ...  # fmt: skip
    @validate_arguments(per_rank=make_choice_check("own", "keep"))
    def resume(
        self,
        into: Stateful | Mapping[str, object] | None = None,
        *,
        deep: bool = False,
        strict: bool = True,
        per_rank: PerRank = "own",
        cast: bool = False,
        threads: int | None = None,
    ) -> object:
        """Load the newest whole step into a state, on every rank; None where the run has no step yet. Every rank calls it.

        The first rank says which step that is. It is loaded as `load_sharded` does, which says what `strict`, `per_rank` and `cast`
        mean: in place, whatever number of ranks saved it. Without a state the whole step is given back, in the memory of each rank.
        A step that is deleted meanwhile is looked for again. Where bytes do not have their checksums nothing is changed on any
        rank, and `RanksFailed` is raised, or `Corrupted` by a process alone; with `deep`, such a step is passed over. Either way
        what is loaded is read twice. With a state, the first rank locks the run, as in `holdfast.Run`.
        """
        looks = self._looks()
        while (found := self._agreed(deep=deep, locks=into is not None)) is not None:
            try:
                if into is None:
                    # What fails on one rank is raised by all of them.
                    with self._ranks("resume") as ranks, joint_phase(ranks, UNCHANGED), unharmed():
                        state = load_full(found.path)
                else:
                    request = ShardedLoad(
                        found.path, into, group=self.group, deadline=self.deadline, strict=strict, per_rank=per_rank, cast=cast,
                        threads=threads, unharmed=unharmed, check=not deep,
                    )  # fmt: skip
                    load_together(request)
                    state = into
            except HoldfastError as error:
                cause: BaseException | None = error
                if isinstance(error, RanksFailed):
                    cause = error.__cause__
                elif group_of(self.group).size > 1:
                    # Only this rank raises it, so there is nobody to look again with.
                    raise
                if not self._is_gone_for_all(found, cause):
                    raise
                next(looks)
                continue
            self.resumed = found
            return state
        return None

    def _is_gone_for_all(self, found: Step, cause: BaseException | None) -> bool:
        """Whether a step that could not be loaded is not there any more, as the first rank sees it; it records damage."""

        def decide(messages: list[bytes]) -> list[bytes]:
            gone = self._is_gone(found)
            why = next((message.decode() for message in messages if message), "")
            if why and not gone:
                self._doubts.mark_damaged(found, why)
            return [b"1" if gone else b""] * len(messages)

        damage = (
            cause.message.encode("utf-8", "replace")
            if isinstance(cause, Corrupted | FormatError)
            else b""
        )
        with self._ranks("look again in") as ranks:
            return bool(ranks.agree(damage, decide))

    def prune(self) -> tuple[Step, ...]:
        """As `holdfast.Run.prune`; every rank calls it, and the first one deletes."""
        self._settle()
        return self._from_first("prune", super().prune)

    def rewind(self, step: int) -> tuple[Step, ...]:
        """As `holdfast.Run.rewind`; every rank calls it, and the first one deletes."""
        self._settle()
        back = super().rewind
        return self._from_first(f"rewind to {step}", lambda: back(step))

    def _agreed(self, *, deep: bool, locks: bool) -> Step | None:
        def look() -> tuple[Step, ...]:
            if locks:
                self._begin_resuming()
            found = self.latest(deep=deep)
            return () if found is None else (found,)

        self._end_of_save()
        return next(iter(self._from_first("resume", look)), None)

    def _from_first(self, doing: str, work: Callable[[], Sequence[Step]]) -> tuple[Step, ...]:
        """The steps that the first rank finds or deletes, on all ranks; and what it raises."""

        def decide(messages: list[bytes]) -> list[bytes]:
            named = [
                replace(one, path=os.path.basename(one.path)) for one in work()
            ]  # each rank has its own path to the run
            return [write_document(STEPS, named)] * len(messages)

        with self._ranks(doing) as ranks:
            found = read_document(STEPS, ranks.agree(b"", decide))
        return tuple(replace(one, path=join(self._folder.path, one.path)) for one in found)

    def _request(self, step: int, options: RankStepOptions) -> SaveRequest:
        with self._folder.asking():
            stamp = stamp_now(step, options["metrics"], self._ran())

        def begin(nbytes: int) -> tuple[bool, str | None]:
            with self._folder.asking():
                self._begin()
                # Unchanged files are linked: a step takes about what the one before it took.
                last = self._new_nbytes
                expected = nbytes if last is None else min(nbytes, last + last // 8)
                _, replaced, base = self._place(step, overwrite=bool(options["overwrite"]))
                self._make_room(expected, stamp)
            self._base = None if base is None else os.path.basename(base)
            return replaced, self._base

        def linked(nbytes: int) -> None:
            self._linked_nbytes = nbytes

        # Of the stamps of all ranks, the first one's is kept.
        metadata = self._folder.with_stamp(options["metadata"], stamp)
        return pick_fields(
            SaveRequest,
            {**options, "metadata": metadata},
            path=self._step_path(step),
            format="native",
            durable=self.durable,
            hashes=self.share,
            step=AsStep(
                stamp,
                begin,
                partial(join, self._folder.path),
                partial(self._folder.attributes, stamp),
                self._folder.check,
                linked,
            ),
        )

    def _after(self, request: SaveRequest, done: SavedShards) -> Step:
        """After a step is published, the first rank lets the rules delete. On others its files may not be seen yet."""
        assert request.step is not None  # `_request` sets it
        stamp = request.step.stamp
        made = stamped(stamp, stamp.step, request.path, done.nbytes, step_name(stamp.step), ())
        saved = self._folder.get(stamp.step) or made
        if self._lock is None:
            return saved
        self._sure.discard(stamp.step)
        self._new_nbytes = saved.nbytes - self._linked_nbytes if self.share else None
        self._exports.add(saved)
        self._follow(saved, self._base)
        return saved

    def _settle(self) -> None:
        super()._settle()
        self._end_of_save()

    def _finish(self) -> None:
        try:
            self._end_of_save()
        finally:
            super()._finish()

    def _end_of_save(self) -> None:
        """Wait for the save in the background; every rank does, so that all of them raise a failure at the same call."""
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                handle.wait()
            except HoldfastError as error:
                if not self._count_failure(error, handle.path, stacklevel=6):
                    raise
