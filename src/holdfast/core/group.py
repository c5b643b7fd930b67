"""`Group`: the ranks that act together. `Ranks`: one thing that all of them do, from its beginning to its end.

    rank 1 ──┐
    rank 2 ──┼──► what each has goes to the first rank, which decides, and answers each                 `agree`
    rank 0 ──┘

1. A step is a gather to the first rank and an answer to each. The messages are bytes; nothing is pickled.
2. An exception on any rank comes out of every rank as the same `RanksFailed`. A rank that is gone is a `RankLost` on all others.
   A group of one process raises the exception itself.
3. Work that all ranks know, in numbered pieces, is dealt by bytes (`assign_evenly`), the least of it to the
first rank; each does its own,
   and all get all results, in order (`divide_work`). So any number of ranks finds the same as one.

One process is a group of one (`ALONE`): a step is a function call, and errors are what they are. Processes of `torch.distributed`
are made a group by `holdfast.torch.group`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

import msgspec
import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.documents import DocumentType, message_type, read_document, write_document
from holdfast.core.registry import find_hook
from holdfast.errors import (
    CannotHold,
    DurabilityUncertain,
    NoSuchPath,
    RankLost,
    RanksFailed,
    RanksFoundNothing,
    RanksRefused,
    Replaced,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from holdfast.core.options import Progress

T = TypeVar("T")

UNCHANGED = "nothing was published or changed"

CAUSES, STRETCHES = 16, 6
"""Causes that a message lists (all of them are in the error's `causes`), and stretches of successive ranks."""

LARGEST = 4
"""Pieces for each holder that are dealt one by one. The rest is then small beside what is there, and the Python loop short."""

Decide = Callable[
    [list[bytes]], list[bytes]
]  # On the first rank: from the messages of all to an answer for each.


@runtime_checkable
class Group(Protocol):
    """The ranks that act together, as one of them sees it. `holdfast.torch.group()` makes one of `torch.distributed`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def begin(self, doing: str) -> Ranks:
        """Begin something that every rank of the group begins now. `doing` is the same on all."""


AnyGroup: TypeAlias = "Group | ProcessGroup"


def begin(group: AnyGroup | None, doing: str) -> Ranks:
    """Begin something with the ranks of a group, of torch's as well; alone where there is none."""
    if group is None:
        return ALONE
    if not isinstance(group, Group):
        group = cast("Group", find_hook("group_of")(group))
    # A process alone raises its own errors: there is no other rank that must hear of them.
    return ALONE if group.size == 1 else group.begin(doing)


class Ranks:
    """One thing that the ranks of a group do. This one is a process alone."""

    rank, size = 0, 1
    is_first = True

    def agree(
        self, local: bytes | BaseException, decide: Decide, *, failure_summary: str = UNCHANGED
    ) -> bytes:
        """One step of everybody: what each rank has goes to the first one, whose decision, one a rank, goes to all. What fails on
        one rank fails on all; the message begins with what that means (`failure_summary`)."""
        try:
            if isinstance(local, BaseException):
                raise local
            return decide([local])[0]
        except Exception as error:
            if failure_summary != UNCHANGED:
                error.add_note(failure_summary)
            raise

    def count_local_ranks(self) -> int:
        """How many of the ranks share this machine, of those that have come so far."""
        return 1

    def has_several_machines(self) -> bool:
        """Whether the ranks are on several machines. Known when all have come: after a step."""
        return False

    def joint_progress(self, progress: Progress | None) -> AbstractContextManager[Progress | None]:
        """On the first rank, `progress` hears of what all ranks do; on the others of nothing."""
        return nullcontext(progress)

    def close(self) -> None:
        """The end of it. The first rank stays until the others have their answers."""


ALONE = Ranks()


class RankMessage(msgspec.Struct):
    """What a rank sends to the first rank: its document, or its error."""

    doing: str
    """What the rank does. It must be the same on all ranks."""
    content: bytes = b""
    cause: str = ""
    """The error; empty if there is none."""
    problems: list[str] | None = None
    """The problems of a `CannotHold`."""
    missing_path: str | None = None
    """The path of a `NoSuchPath`."""
    errno: int | None = None
    """The code of an `OSError`."""

    @classmethod
    def from_error(cls, doing: str, error: BaseException) -> RankMessage:
        """Make the message of a rank that failed."""
        return cls(
            doing,
            cause=f"{type(error).__name__}: {error}",
            problems=list(error.problems) if isinstance(error, CannotHold) else None,
            missing_path=error.filename or "" if isinstance(error, NoSuchPath) else None,
            errno=error.errno if isinstance(error, OSError) else None,
        )


class FailedStep(msgspec.Struct):
    """The first rank's answer to all if a rank failed."""

    causes: dict[int, str]
    """The errors by ranks."""
    problems: list[str] | None = None
    """All problems, if each error is a `CannotHold`."""
    missing_path: str | None = None
    """The path, if no rank found anything there."""
    errno: int | None = None
    """The code of all errors. A code that only some of them have says nothing about the step."""

    def make_error(self, failure_summary: str) -> RanksFailed:
        """Make the error that every rank raises."""
        message = f"{failure_summary}: {_causes(self.causes)}"
        if self.missing_path is not None:
            return RanksFoundNothing(message, self.missing_path, causes=self.causes)
        if self.problems is not None:
            return RanksRefused(message, self.problems, causes=self.causes)
        failure = RanksFailed(message, causes=self.causes)
        failure.errno = self.errno
        return failure


RANK_MESSAGE = message_type("message of a rank", RankMessage)
FAILED_STEP = message_type("list of causes", FailedStep)

DECIDED, UNCERTAIN, FAILED = b"+", b"?", b"-"
"""First byte of an answer: before the decision, the text of a `DurabilityUncertain`, or a `FailedStep`."""


class SeveralRanks(Ranks):
    """Ranks that send messages to each other. How they travel is said by whoever derives from this."""

    def __init__(self, rank: int, size: int, doing: str) -> None:
        self.rank, self.size, self.is_first = rank, size, rank == 0
        self._doing = doing

    def _gather(self, message: bytes) -> list[bytes] | None:
        """On the first rank the messages of the others; None on the others. Raises `RankLost` for a rank that is gone."""
        raise NotImplementedError

    def _answer(self, answers: list[bytes] | None) -> bytes:
        """The answer for this rank; the first rank has all of them."""
        raise NotImplementedError

    def agree(
        self, local: bytes | BaseException, decide: Decide, *, failure_summary: str = UNCHANGED
    ) -> bytes:
        """As for one process. A `DurabilityUncertain` of `decide` stays one, on every rank: something was published."""
        if isinstance(local, bytes):
            cause = None
            message = RankMessage(self._doing, local)
        else:
            cause = local
            message = RankMessage.from_error(self._doing, local)
        try:
            gathered = self._gather(b"" if self.is_first else write_document(RANK_MESSAGE, message))
        except RankLost as error:
            if self.is_first:
                lost = FailedStep({rank: str(error) for rank in error.ranks})
                self._answer([FAILED + write_document(FAILED_STEP, lost)] * self.size)
            raise

        answers: list[bytes] | None = None
        if gathered is not None:
            others = [read_document(RANK_MESSAGE, raw) for raw in gathered]
            answers, error_of_decision = self._decide([message, *others], decide)
            cause = error_of_decision or cause
        answer = self._answer(answers)
        content = answer[1:]
        if answer.startswith(DECIDED):
            return content
        if answer.startswith(UNCERTAIN):
            raise DurabilityUncertain(content.decode()) from cause
        raise read_document(FAILED_STEP, content).make_error(failure_summary) from cause

    def _decide(
        self, messages: list[RankMessage], decide: Decide
    ) -> tuple[list[bytes], Exception | None]:
        """On the first rank: return the answers for all, and the error of the decision."""
        cause: Exception | None = None
        failure = self._find_failure(messages)
        if failure is None:
            try:
                # An answer that several ranks receive is one object, and travels once.
                answers: dict[bytes, bytes] = {}
                decisions = decide([message.content for message in messages])
                return [answers.setdefault(one, DECIDED + one) for one in decisions], None
            except DurabilityUncertain as error:
                text = RankMessage.from_error("", error).cause.encode("utf-8", "replace")
                return [UNCERTAIN + text] * self.size, error
            except Exception as error:
                cause = error
                failed = RankMessage.from_error("", error)
                failure = FailedStep({0: failed.cause}, failed.problems, errno=failed.errno)
        return [FAILED + write_document(FAILED_STEP, failure)] * self.size, cause

    def _find_failure(self, messages: list[RankMessage]) -> FailedStep | None:
        """Return the errors of all ranks that failed, or do something else than the first rank."""
        causes: dict[int, str] = {}
        missing_paths: list[str] = []
        for rank, message in enumerate(messages):
            if message.doing != self._doing:
                causes[rank] = f"it was asked to {message.doing}, and rank 0 to {self._doing}"
                continue
            if message.cause:
                causes[rank] = message.cause
            if message.missing_path is not None:
                missing_paths.append(message.missing_path)
        if not causes:
            return None

        failed = [messages[rank] for rank in causes]
        problems: dict[str, None] | None = {}
        for message in failed:
            if problems is not None and message.problems is not None:
                problems |= dict.fromkeys(message.problems)
            else:
                problems = None
        errnos = {message.errno for message in failed}
        return FailedStep(
            causes,
            problems=None if problems is None else list(problems),
            missing_path=missing_paths[0] if len(missing_paths) == self.size else None,
            errno=errnos.pop() if len(errnos) == 1 else None,
        )


@contextmanager
def joint_phase(ranks: Ranks, failure_summary: str = UNCHANGED) -> Iterator[None]:
    """A step of all ranks: what fails on one of them is raised on all."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    ranks.agree(problem or b"", lambda _: [b""] * ranks.size, failure_summary=failure_summary)


@contextmanager
def joined_ranks(group: AnyGroup | None, doing: str) -> Iterator[Ranks]:
    """Do something with all ranks of a group, or alone; it begins when all have come. An error between two steps is sent with the
    next one, and so is raised on every rank."""
    ranks = begin(group, doing)
    try:
        ranks.agree(b"", _all_here)
        with shared_errors(ranks):
            yield ranks
        ranks.agree(b"", _all_here)
    finally:
        ranks.close()


def _all_here(messages: list[bytes]) -> list[bytes]:
    check_same_checkpoint(messages)
    return [b""] * len(messages)


@contextmanager
def shared_errors(ranks: Ranks) -> Iterator[None]:
    """Send what fails in the block to the other ranks, unless they have it."""
    try:
        yield
    except (RanksFailed, RankLost, DurabilityUncertain):
        raise
    except Exception as error:
        ranks.agree(error, lambda _: [b""] * ranks.size)
        raise


MARK_NBYTES = 16
SHARES = message_type("list of shares", list[bytes])


def divide_work(
    ranks: Ranks,
    nbytes: Sequence[int] | Ints,
    work: Callable[[list[int]], Sequence[T]],
    kind: type[T],
    *,
    common: bytes = b"",
) -> list[T]:
    """The results of pieces of work, in order. Each piece has a number and a weight; one rank does it, and all get its result, of
    this type (as msgspec reads it). Raises on every rank where one sees other pieces, or has something else in `common`."""
    if ranks.size == 1:
        return [*work([*range(len(nbytes))])]
    weights = np.asarray(nbytes, np.int64)
    results: DocumentType[list[T]] = message_type("list of results", list[kind])  # type: ignore[valid-type]  # one that is given
    # The fullest share comes first, and the first rank is to have the emptiest.
    picks = ranks.size - 1 - assign_evenly(weights, np.zeros(ranks.size, np.int64))
    with shared_errors(ranks):
        own = write_document(results, [*work(np.flatnonzero(picks == ranks.rank).tolist())])
    found = [
        read_document(results, one)[::-1]
        for one in exchange(ranks, own, common=weights.tobytes() + common)
    ]
    return [found[rank].pop() for rank in picks.tolist()]


def exchange(ranks: Ranks, own: bytes, *, common: bytes) -> list[bytes]:
    """What each rank has, on every rank. Raises `Replaced` where they do not have the same in `common`."""
    from hashlib import blake2b  # for those who have others to compare with

    def decide(messages: list[bytes]) -> list[bytes]:
        check_same_checkpoint([message[:MARK_NBYTES] for message in messages])
        return [write_document(SHARES, [message[MARK_NBYTES:] for message in messages])] * len(
            messages
        )

    mark = blake2b(common, digest_size=MARK_NBYTES).digest()
    return read_document(SHARES, ranks.agree(mark + own, decide))


def compare_marks(ranks: Ranks, mark: bytes) -> None:
    """Raise `Replaced` on every rank unless all of them have this mark of what they opened."""
    if ranks.size > 1:
        ranks.agree(mark, _all_here)


def check_same_checkpoint(marks: Sequence[bytes]) -> None:
    """Raise `Replaced` where the ranks have not opened one checkpoint, by what each made of its own."""
    others = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
    if others:
        message = f"the ranks have opened different checkpoints ({format_ranks(others)} not that of rank 0)"
        raise Replaced(
            f"{message}: it was saved again, or it is not on storage that all of them share",
            found=tuple(others),
        )


def assign_evenly(nbytes: Ints, loads: Ints) -> Ints:
    """For each piece the number of the holder that gets it, so that all have about as much; `loads` is what each has already.

    The largest go one by one to whoever has the least. All others are poured onto the loads, and keep their neighbours
    (`ranks/plan.py` has the reason and the bound).

    >>> assign_evenly(np.array([5, 1, 9, 3]), np.array([0, 6])).tolist()
    [1, 1, 0, 0]
    """
    picks = np.zeros(len(nbytes), np.int64)
    if len(loads) < 2:
        return picks
    heights = loads.copy()
    order = (-nbytes).argsort(kind="stable")
    for piece in order[: LARGEST * len(loads)].tolist():
        lowest = int(heights.argmin())
        picks[piece] = lowest
        heights[lowest] += nbytes[piece]
    rest = np.sort(order[LARGEST * len(loads) :])
    if len(rest):
        picks[rest] = _pour(nbytes[rest], heights)
    return picks


def _pour(nbytes: Ints, loads: Ints) -> Ints:
    ends = nbytes.cumsum()
    total = int(ends[-1])
    floor = np.sort(loads)
    # The level if only the n lowest holders got any, for each n; the true n is the last whose floor is under its level.
    levels = -(-(floor.cumsum() + total) // np.arange(1, len(loads) + 1))
    level = levels[(floor <= levels).nonzero()[0][-1]]
    rooms = np.maximum(level - loads, 0).cumsum()
    picks = np.searchsorted(rooms, ends - nbytes + nbytes // 2, side="right").astype(np.int64)
    return np.minimum(picks, len(loads) - 1)  # a piece of no bytes may lie behind all rooms


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words.

    >>> format_ranks([3]), format_ranks([0, 1, 2, 7, 5])
    ('rank 3', 'ranks 0 to 2, 5 and 7')
    """
    ordered = np.unique(np.fromiter(ranks, np.int64))
    stretches = np.split(ordered, (np.diff(ordered) != 1).nonzero()[0] + 1)
    said: list[str] = []
    for s in stretches[:STRETCHES]:
        said.extend([f"{s[0]} to {s[-1]}"] if len(s) > 2 else map(str, s))
    left = sum(map(len, stretches[STRETCHES:]))
    if left:
        said.append(f"{left} more")
    text = ", ".join(said[:-1]) + " and " + said[-1] if len(said) > 1 else said[0]
    return ("rank " if len(ordered) == 1 else "ranks ") + text


def _causes(known: dict[int, str]) -> str:
    alike: dict[str, list[int]] = {}
    for rank, text in known.items():
        alike.setdefault(text, []).append(rank)
    listed = [f"{format_ranks(ranks)}: {text}" for text, ranks in alike.items()]
    more = [f"and {len(listed) - CAUSES} other causes"] if len(listed) > CAUSES else []
    return "; ".join(listed[:CAUSES] + more)
