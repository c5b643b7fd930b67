"""`Group` and `Ranks`: how the ranks of a group carry out an operation together.

    rank 1 ──┐
    rank 2 ──┼──► messages of all ranks to the first rank, which decides and answers each
    rank 0 ──┘

1. An operation consists of phases (`Ranks.agree`). In each, all ranks send a message to the first
   rank, which is rank 0, and receive an answer. Messages are bytes. Nothing is pickled.
2. If a rank raises an exception, every rank raises the same `RanksFailed`. If a rank no longer
   responds, all others raise `RankLost`.
3. Work that all ranks know is divided into pieces of similar size (`assign_evenly`). Each rank does
   its pieces, and every rank receives all results in order (`divide_work`). So the result does not
   depend on the number of ranks.

A single process is a group of one rank (`ALONE`). Then a phase is a function call, and exceptions
are not changed. `holdfast.torch.group` makes a group of processes of `torch.distributed`.
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

ResultT = TypeVar("ResultT")

UNCHANGED = "nothing was published or changed"
"""What a failure means in most phases."""

MAX_LISTED_CAUSES = 16
"""The most causes that a message lists. The error has all of them in `causes`."""

MAX_LISTED_RUNS = 6
"""The most runs of successive ranks that a message lists."""

GREEDY_PIECES_PER_RANK = 4
"""How many pieces for each rank `assign_evenly` assigns one by one, the largest ones. All others
together are then small, so they can be assigned at once, without a Python loop."""

DecideFunction = Callable[[list[bytes]], list[bytes]]
"""Called on the first rank with the messages of all ranks. Returns the answer to each of them."""


@runtime_checkable
class Group(Protocol):
    """The ranks that act together, as one of them sees it.

    `holdfast.torch.group()` makes one of processes of `torch.distributed`.
    """

    @property
    def rank(self) -> int:
        """The number of this process in the group, from 0."""

    @property
    def size(self) -> int:
        """The number of processes in the group."""

    def begin(self, operation: str, /) -> Ranks:
        """Begin an operation, which every rank of the group begins now.

        Args:
            operation: What the ranks do, such as `verify`. It must be the same on all ranks.

        Returns:
            The connection of this rank to the others during the operation.
        """


AnyGroup: TypeAlias = "Group | ProcessGroup"


def begin(group: AnyGroup | None, operation: str) -> Ranks:
    """Begin an operation with the ranks of a group, or alone.

    Args:
        group: A group of Holdfast or of torch. None for this process alone.
        operation: What the ranks do. It must be the same on all of them.
    """
    if group is None:
        return ALONE
    if not isinstance(group, Group):
        group = cast("Group", find_hook("group_of")(group))
    if group.size == 1:
        # There are no other ranks that must learn of errors, so these are raised as they are.
        return ALONE
    return group.begin(operation)


class Ranks:
    """The connection of a rank to the others during one operation. This class is for one process.

    `SeveralRanks` is for groups.
    """

    rank = 0
    size = 1
    is_first = True
    """Whether this is the first rank, which decides."""

    def agree(
        self,
        local: bytes | BaseException,
        decide: DecideFunction,
        *,
        failure_summary: str = UNCHANGED,
    ) -> bytes:
        """Carry out one phase: send a message to the first rank, and return its answer.

        Every rank of the group must call this. If one of them fails, all raise an error.

        Args:
            local: The message of this rank, or the exception that it raised instead.
            decide: Called on the first rank with the messages of all ranks, in order. Returns the
                answer to each.
            failure_summary: What a failure means for the user. The error message starts with it.

        Raises:
            RanksFailed: A rank failed. A process alone raises its own exception instead.
            RankLost: A rank no longer responds.
            DurabilityUncertain: `decide` raised it: something was published, but may be lost if
                the machine crashes now.
        """
        try:
            if isinstance(local, BaseException):
                raise local
            return decide([local])[0]
        except Exception as error:
            if failure_summary != UNCHANGED:
                error.add_note(failure_summary)
            raise

    def count_local_ranks(self) -> int:
        """Return how many ranks are on this machine, of those that have begun the operation.

        After a phase, all have begun.
        """
        return 1

    def joint_progress(self, progress: Progress | None) -> AbstractContextManager[Progress | None]:
        """Return a context whose value adds up the progress of all ranks.

        Args:
            progress: Called on the first rank with the progress of all ranks. It is not called on
                the others.
        """
        return nullcontext(progress)

    def close(self) -> None:
        """End the operation. The first rank waits until the others have read their answers."""


ALONE = Ranks()
"""The ranks of an operation that one process carries out."""


class RankMessage(msgspec.Struct):
    """What a rank sends to the first rank: its document, or its error."""

    operation: str
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
    def from_error(cls, operation: str, error: BaseException) -> RankMessage:
        """Make the message with which a rank reports an exception instead of a document."""
        message = cls(operation, cause=f"{type(error).__name__}: {error}")
        if isinstance(error, CannotHold):
            message.problems = list(error.problems)
        if isinstance(error, NoSuchPath):
            message.missing_path = error.filename or ""
        if isinstance(error, OSError):
            message.errno = error.errno
        return message


class FailedPhase(msgspec.Struct):
    """The first rank's answer to all if a rank failed."""

    causes: dict[int, str]
    """The errors by ranks."""
    problems: list[str] | None = None
    """All problems, if each error is a `CannotHold`."""
    missing_path: str | None = None
    """The path, if no rank found anything there."""
    errno: int | None = None
    """The code of all errors. A code that only some of them have says nothing about the phase."""

    def make_error(self, failure_summary: str) -> RanksFailed:
        """Make the error that every rank raises, of a class that fits the errors of all ranks.

        Args:
            failure_summary: What the failure means for the user. The message starts with it.
        """
        message = f"{failure_summary}: {_format_causes(self.causes)}"
        if self.missing_path is not None:
            return RanksFoundNothing(message, self.missing_path, causes=self.causes)
        if self.problems is not None:
            return RanksRefused(message, self.problems, causes=self.causes)
        error = RanksFailed(message, causes=self.causes)
        error.errno = self.errno
        return error


RANK_MESSAGE = message_type("message of a rank", RankMessage)
FAILED_PHASE = message_type("list of causes", FailedPhase)

DECIDED = b"+"
"""The first byte of an answer that is followed by what was decided."""

UNCERTAIN = b"?"
"""The first byte of an answer that is followed by the text of a `DurabilityUncertain`."""

FAILED = b"-"
"""The first byte of an answer that is followed by a `FailedPhase`."""


class SeveralRanks(Ranks):
    """Ranks that send messages to each other. Subclasses define how messages travel."""

    def __init__(self, rank: int, size: int, operation: str) -> None:
        self.rank = rank
        self.size = size
        self.is_first = rank == 0
        self._operation = operation

    def _gather(self, message: bytes) -> list[bytes] | None:
        """Send a message to the first rank. On the first rank, return the messages of the others.

        Returns:
            The messages of all ranks from 1 on. None on these ranks.

        Raises:
            RankLost: A rank no longer responds.
        """
        raise NotImplementedError

    def _answer(self, answers: list[bytes] | None) -> bytes:
        """Return the answer of the first rank to this rank.

        Args:
            answers: On the first rank, the answer to each rank, which this method sends. None on
                all others.
        """
        raise NotImplementedError

    def agree(
        self,
        local: bytes | BaseException,
        decide: DecideFunction,
        *,
        failure_summary: str = UNCHANGED,
    ) -> bytes:
        """Carry out one phase: send a message to the first rank, and return its answer.

        If a rank reports an exception, or `decide` raises one, all ranks raise the same error.
        The arguments are those of `Ranks.agree`.
        """
        cause: BaseException | None = None
        if isinstance(local, bytes):
            message = RankMessage(self._operation, local)
        else:
            cause = local
            message = RankMessage.from_error(self._operation, local)

        messages = self._gather_messages(message)
        answers: list[bytes] | None = None
        if messages is not None:
            answers, decision_error = self._decide(messages, decide)
            cause = decision_error or cause

        answer = self._answer(answers)
        content = answer[1:]
        if answer.startswith(DECIDED):
            return content
        if answer.startswith(UNCERTAIN):
            raise DurabilityUncertain(content.decode()) from cause
        raise read_document(FAILED_PHASE, content).make_error(failure_summary) from cause

    def _gather_messages(self, message: RankMessage) -> list[RankMessage] | None:
        """On the first rank, return the messages of all ranks. On the others, send the message."""
        if not self.is_first:
            self._gather(write_document(RANK_MESSAGE, message))
            return None
        try:
            documents = self._gather(b"")
        except RankLost as error:
            # The remaining ranks wait for an answer.
            failure = FailedPhase({rank: str(error) for rank in error.ranks})
            self._answer([FAILED + write_document(FAILED_PHASE, failure)] * self.size)
            raise
        assert documents is not None, "the first rank receives the messages of the others"
        return [message, *(read_document(RANK_MESSAGE, document) for document in documents)]

    def _decide(
        self, messages: list[RankMessage], decide: DecideFunction
    ) -> tuple[list[bytes], Exception | None]:
        """Decide a phase, on the first rank.

        Args:
            messages: The messages of all ranks. If one of them is an error, `decide` is not called.
            decide: Returns the answer to each rank.

        Returns:
            The answers to all ranks, with their first bytes. The exception that `decide` raised, to
            be the cause of the error on this rank.
        """
        decision_error: Exception | None = None
        failure = self._find_failure(messages)
        if failure is None:
            try:
                decisions = decide([message.content for message in messages])
                # Equal answers are one object, so that `_answer` can recognize and send it once.
                answers: dict[bytes, bytes] = {}
                for decision in decisions:
                    if decision not in answers:
                        answers[decision] = DECIDED + decision
                return [answers[decision] for decision in decisions], None
            except DurabilityUncertain as error:
                text = RankMessage.from_error("", error).cause.encode("utf-8", "replace")
                return [UNCERTAIN + text] * self.size, error
            except Exception as error:
                decision_error = error
                message = RankMessage.from_error("", error)
                failure = FailedPhase({0: message.cause}, message.problems, errno=message.errno)
        answer = FAILED + write_document(FAILED_PHASE, failure)
        return [answer] * self.size, decision_error

    def _find_failure(self, messages: list[RankMessage]) -> FailedPhase | None:
        """Return the errors of all ranks that failed or do another operation than the first rank.

        Returns:
            The errors, or None if there is none.
        """
        causes: dict[int, str] = {}
        missing_paths: list[str] = []
        for rank, message in enumerate(messages):
            if message.operation != self._operation:
                causes[rank] = (
                    f"it was called to {message.operation}, but rank 0 to {self._operation}"
                )
                continue
            if message.cause:
                causes[rank] = message.cause
            if message.missing_path is not None:
                missing_paths.append(message.missing_path)
        if not causes:
            return None

        # Details become part of the common error if they apply to all ranks that failed.
        failure = FailedPhase(causes)
        failed_messages = [messages[rank] for rank in causes]
        if all(message.problems is not None for message in failed_messages):
            problems: dict[str, None] = {}
            for message in failed_messages:
                problems |= dict.fromkeys(message.problems or ())
            failure.problems = list(problems)
        if len(missing_paths) == self.size:
            failure.missing_path = missing_paths[0]
        errnos = {message.errno for message in failed_messages}
        if len(errnos) == 1:
            failure.errno = errnos.pop()
        return failure


@contextmanager
def joint_phase(ranks: Ranks, failure_summary: str = UNCHANGED) -> Iterator[None]:
    """Carry out a phase in which every rank runs the block. If one fails, all raise an error.

    Args:
        ranks: The ranks of the operation.
        failure_summary: What a failure means for the user. The error message starts with it.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    ranks.agree(problem or b"", lambda _: [b""] * ranks.size, failure_summary=failure_summary)


@contextmanager
def joined_ranks(group: AnyGroup | None, operation: str) -> Iterator[Ranks]:
    """Begin an operation with all ranks of a group, or alone, and close it after the block.

    The block starts when all ranks have begun. If it raises an exception on one rank, all other
    ranks raise an error in their next phase, or at the end of the block.

    Args:
        group: A group of Holdfast or of torch. None for this process alone.
        operation: What the ranks do. It must be the same on all of them.
    """
    ranks = begin(group, operation)
    try:
        ranks.agree(b"", _require_equal_messages)
        with shared_errors(ranks):
            yield ranks
        ranks.agree(b"", _require_equal_messages)
    finally:
        ranks.close()


def _require_equal_messages(messages: list[bytes]) -> list[bytes]:
    """Decide a phase in which all ranks must have opened the same checkpoint."""
    check_same_checkpoint(messages)
    return [b""] * len(messages)


@contextmanager
def shared_errors(ranks: Ranks) -> Iterator[None]:
    """Send an exception of the block to the other ranks, which raise an error in their next phase.

    Errors that come from a phase are not sent, because all ranks have them already.
    """
    try:
        yield
    except (RanksFailed, RankLost, DurabilityUncertain):
        raise
    except Exception as error:
        ranks.agree(error, lambda _: [b""] * ranks.size)
        raise


MARK_NBYTES = 16
"""The size of the hash by which ranks compare what they opened."""

SHARES = message_type("list of shares", list[bytes])
"""A message from each rank, in one document."""


def divide_work(
    ranks: Ranks,
    nbytes: Sequence[int] | Ints,
    work: Callable[[list[int]], Sequence[ResultT]],
    result_type: type[ResultT],
    *,
    common: bytes = b"",
) -> list[ResultT]:
    """Divide pieces of work among all ranks, and return the results of all pieces on every rank.

    Args:
        ranks: The ranks, each of which calls this function.
        nbytes: How much there is to do for each piece, the same on all ranks.
        work: Called with the indices of the pieces for this rank. Returns a result for each.
        result_type: The type of a result. What other ranks send is checked against it.
        common: Other data that must be the same on all ranks.

    Returns:
        The result of each piece.

    Raises:
        RanksFailed: A rank failed, or has other pieces or other common data.
    """
    if ranks.size == 1:
        return [*work([*range(len(nbytes))])]

    piece_nbytes = np.asarray(nbytes, np.int64)
    # `assign_evenly` gives most to the first and least to the last. It is reversed, because the
    # first rank also handles the messages.
    no_loads = np.zeros(ranks.size, np.int64)
    piece_ranks = ranks.size - 1 - assign_evenly(piece_nbytes, no_loads)
    results_type: DocumentType[list[ResultT]] = message_type(
        "list of results",
        list[result_type],  # type: ignore[valid-type]  # a type that is only known at run time
    )
    with shared_errors(ranks):
        local_results = work(np.flatnonzero(piece_ranks == ranks.rank).tolist())
        local_document = write_document(results_type, [*local_results])

    # Each rank has its results in the order of its pieces. In reverse, `pop` returns the next one.
    results_by_rank = []
    documents = exchange(ranks, local_document, common=piece_nbytes.tobytes() + common)
    for document in documents:
        results = read_document(results_type, document)
        results.reverse()
        results_by_rank.append(results)
    return [results_by_rank[rank].pop() for rank in piece_ranks.tolist()]


def exchange(ranks: Ranks, local: bytes, *, common: bytes) -> list[bytes]:
    """Return the data of all ranks on every rank.

    Args:
        ranks: The ranks, each of which calls this function.
        local: The data of this rank.
        common: Data that must be the same on all ranks.

    Raises:
        RanksFailed: A rank failed, or has other common data.
    """
    # Imported here, because a process alone does not need it.
    from hashlib import blake2b

    def decide(messages: list[bytes]) -> list[bytes]:
        check_same_checkpoint([message[:MARK_NBYTES] for message in messages])
        answer = write_document(SHARES, [message[MARK_NBYTES:] for message in messages])
        return [answer] * len(messages)

    # The common data may be large, so only a hash of it is sent, in front of the message.
    mark = blake2b(common, digest_size=MARK_NBYTES).digest()
    return read_document(SHARES, ranks.agree(mark + local, decide))


def compare_marks(ranks: Ranks, mark: bytes) -> None:
    """Raise an error on every rank unless all ranks have opened the same checkpoint.

    Args:
        ranks: The ranks, each of which calls this function.
        mark: Identifies what this rank has opened.

    Raises:
        RanksFailed: The ranks have different marks.
    """
    if ranks.size > 1:
        ranks.agree(mark, _require_equal_messages)


def check_same_checkpoint(marks: Sequence[bytes]) -> None:
    """Raise `Replaced` unless the marks of all ranks are equal.

    Args:
        marks: What identifies the checkpoint that each rank opened, in the order of the ranks.
    """
    differing_ranks = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
    if differing_ranks:
        raise Replaced(
            f"the ranks have opened different checkpoints: {format_ranks(differing_ranks)} opened "
            "another one than rank 0; either it was saved again, or it is not on storage that all "
            "ranks share",
            found=tuple(differing_ranks),
        )


def assign_evenly(piece_nbytes: Ints, rank_loads: Ints) -> Ints:
    """Assign pieces to ranks so that the loads of the ranks become as even as possible.

    The largest pieces are assigned one by one, each to the rank with the lowest load. All others
    are assigned by water filling, which gives neighboring pieces to the same rank, so that it can
    read or write them together. `ranks/plan.py` has a bound on how uneven the loads may be.

    Args:
        piece_nbytes: The size of each piece.
        rank_loads: The load that each rank already has.

    Returns:
        For each piece, the index of its rank in `rank_loads`.

    >>> assign_evenly(np.array([5, 1, 9, 3]), np.array([0, 6])).tolist()
    [1, 1, 0, 0]
    """
    piece_ranks = np.zeros(len(piece_nbytes), np.int64)
    if len(rank_loads) < 2:
        return piece_ranks

    loads = rank_loads.copy()
    largest_first = (-piece_nbytes).argsort(kind="stable")
    greedy_count = GREEDY_PIECES_PER_RANK * len(loads)
    for piece in largest_first[:greedy_count].tolist():
        rank = int(loads.argmin())
        piece_ranks[piece] = rank
        loads[rank] += piece_nbytes[piece]

    small_pieces = np.sort(largest_first[greedy_count:])
    if len(small_pieces):
        piece_ranks[small_pieces] = _assign_by_water_filling(piece_nbytes[small_pieces], loads)
    return piece_ranks


def _assign_by_water_filling(piece_nbytes: Ints, rank_loads: Ints) -> Ints:
    """Assign pieces to ranks at once, consecutive pieces to the same rank.

    This is water filling: pour all bytes onto the current loads, and find the level that the
    surface reaches. Ranks below that level receive pieces until they reach it, ranks above it
    receive none.

    Args:
        piece_nbytes: The size of each piece. There is at least one.
        rank_loads: The load that each rank already has.

    Returns:
        For each piece, the index of its rank.
    """
    piece_stops = piece_nbytes.cumsum()
    total_nbytes = int(piece_stops[-1])

    # The level, rounded up, if only the n ranks with the lowest loads receive pieces, for every n.
    # The right n is the largest one for which the n-th load is not above the level.
    sorted_loads = np.sort(rank_loads)
    rank_counts = np.arange(1, len(rank_loads) + 1)
    levels = -(-(sorted_loads.cumsum() + total_nbytes) // rank_counts)
    level = levels[np.flatnonzero(sorted_loads <= levels)[-1]]

    # Lay the shares of the ranks end to end, and the pieces beside them. A piece goes to the rank
    # in whose share its midpoint lies.
    share_stops = np.maximum(level - rank_loads, 0).cumsum()
    piece_midpoints = piece_stops - piece_nbytes + piece_nbytes // 2
    piece_ranks = np.searchsorted(share_stops, piece_midpoints, side="right").astype(np.int64)

    # The midpoint of an empty piece may lie behind all shares.
    return np.minimum(piece_ranks, len(rank_loads) - 1)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text, for messages. Runs of successive ranks and long lists are shortened.

    Args:
        ranks: The ranks, in any order. There is at least one.

    >>> format_ranks([3]), format_ranks([0, 1, 2, 7, 5])
    ('rank 3', 'ranks 0 to 2, 5 and 7')
    """
    sorted_ranks = np.unique(np.fromiter(ranks, np.int64))
    run_starts = np.flatnonzero(np.diff(sorted_ranks) != 1) + 1
    runs = np.split(sorted_ranks, run_starts)
    texts: list[str] = []
    for run in runs[:MAX_LISTED_RUNS]:
        if len(run) > 2:
            texts.append(f"{run[0]} to {run[-1]}")
        else:
            texts.extend(map(str, run))
    omitted_count = sum(map(len, runs[MAX_LISTED_RUNS:]))
    if omitted_count:
        texts.append(f"{omitted_count} more")

    if len(sorted_ranks) == 1:
        return f"rank {texts[0]}"
    if len(texts) == 1:
        return f"ranks {texts[0]}"
    return f"ranks {', '.join(texts[:-1])} and {texts[-1]}"


def _format_causes(causes: dict[int, str]) -> str:
    """Return the errors of ranks as text. Ranks with the same error are listed together."""
    ranks_by_cause: dict[str, list[int]] = {}
    for rank, cause in causes.items():
        ranks_by_cause.setdefault(cause, []).append(rank)

    texts = [f"{format_ranks(ranks)}: {cause}" for cause, ranks in ranks_by_cause.items()]
    omitted_count = len(texts) - MAX_LISTED_CAUSES
    if omitted_count > 0:
        texts = [*texts[:MAX_LISTED_CAUSES], f"and {omitted_count} other causes"]
    return "; ".join(texts)
