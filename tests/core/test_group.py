"""What ranks do together: phases, errors, and work that is divided. The ranks are threads."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.groups import ThreadGroup, on_ranks, raise_first_error

from holdfast.core.group import (
    ALONE,
    assign_evenly,
    divide_work,
    exchange,
    format_ranks,
    joined_ranks,
    joint_phase,
    shared_errors,
)
from holdfast.errors import (
    CannotHold,
    NoSuchPath,
    RanksFailed,
    RanksFoundNothing,
    RanksRefused,
    Replaced,
)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_divide_work_does_each_piece_once_and_returns_all_results_on_every_rank(size: int):
    piece_nbytes = [7, 0, 3, 900, 3, 12, 12, 1, 400]
    pieces_by_rank: dict[int, list[int]] = {}

    def job(group: ThreadGroup) -> list[int]:
        def square(pieces: list[int]) -> list[int]:
            pieces_by_rank[group.rank] = pieces
            return [piece * piece for piece in pieces]

        with joined_ranks(group, "square") as ranks:
            return divide_work(ranks, piece_nbytes, square, int)

    results = raise_first_error(on_ranks(size, job))

    piece_count = len(piece_nbytes)
    assert results == [[piece * piece for piece in range(piece_count)]] * size
    all_pieces = [piece for pieces in pieces_by_rank.values() for piece in pieces]
    assert sorted(all_pieces) == list(range(piece_count))


@given(st.lists(st.integers(0, 1 << 40), max_size=60), st.integers(1, 7))
def test_the_last_rank_of_an_assignment_never_has_more_than_its_fair_share(
    piece_nbytes: list[int], size: int
):
    """`divide_work` gives this share to the first rank, which also handles the messages."""
    piece_ranks = assign_evenly(np.array(piece_nbytes, np.int64), np.zeros(size, np.int64))

    load = 0
    for nbytes, rank in zip(piece_nbytes, piece_ranks.tolist(), strict=True):
        if rank == size - 1:
            load += nbytes
    rounding = max(piece_nbytes, default=0) // 2 + 1
    assert load * size <= sum(piece_nbytes) + size * rounding


def test_an_exception_of_one_rank_is_raised_on_all_ranks():
    def job(group: ThreadGroup) -> None:
        with joined_ranks(group, "fail") as ranks:
            if group.rank == 2:
                raise ValueError("a bad disk")
            divide_work(ranks, [1, 1, 1], lambda pieces: pieces, int)

    for error in on_ranks(3, job):
        assert isinstance(error, RanksFailed)
        assert error.causes == {2: "ValueError: a bad disk"}


def test_a_missing_path_on_all_ranks_is_raised_as_such_on_all_ranks():
    def work(pieces: list[int]) -> list[int]:
        raise NoSuchPath("nothing there", file="x")

    def job(group: ThreadGroup) -> None:
        with joined_ranks(group, "fail") as ranks:
            divide_work(ranks, [1, 1], work, int)

    for error in on_ranks(2, job):
        assert isinstance(error, RanksFoundNothing)
        assert error.filename == "x"


def fail_with(codes: list[int | None]) -> list[object]:
    """Run a phase in which each rank raises an `OSError` with its code, or succeeds if it is None.

    Returns:
        The exception of each rank.
    """

    def job(group: ThreadGroup) -> None:
        with joined_ranks(group, "write") as ranks, joint_phase(ranks):
            code = codes[group.rank]
            if code is not None:
                raise OSError(code, os.strerror(code))

    return on_ranks(len(codes), job)


@pytest.mark.parametrize("codes", [[errno.ENOSPC, errno.ENOSPC], [None, errno.ENOSPC, None]])
def test_the_error_has_the_errno_that_all_causes_share(codes: list[int | None]):
    for error in fail_with(codes):
        assert isinstance(error, RanksFailed)
        assert error.errno == errno.ENOSPC


def test_the_error_has_no_errno_if_the_causes_have_different_ones():
    for error in fail_with([errno.ENOSPC, errno.EIO]):
        assert isinstance(error, RanksFailed)
        assert error.errno is None


def test_an_exception_of_the_decision_keeps_its_errno():
    def decide(messages: list[bytes]) -> list[bytes]:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    def job(group: ThreadGroup) -> None:
        with joined_ranks(group, "write") as ranks:
            ranks.agree(b"", decide)

    for error in on_ranks(2, job):
        assert isinstance(error, RanksFailed)
        assert error.errno == errno.EDQUOT


def test_a_group_of_one_raises_its_own_exception_with_the_summary_as_a_note():
    original_error = NoSuchPath("nothing there", file="x")
    summary = "some tensors have been changed"

    def job(group: ThreadGroup) -> None:
        with joined_ranks(group, "look") as ranks, joint_phase(ranks, summary):
            raise original_error

    assert on_ranks(1, job) == [original_error]
    assert original_error.__notes__ == [summary]


def test_the_problems_of_all_ranks_are_listed():
    def job(group: ThreadGroup) -> None:
        with joined_ranks(group, "refuse") as ranks, joint_phase(ranks):
            raise CannotHold("no", [f"problem {group.rank}"])

    for error in on_ranks(2, job):
        assert isinstance(error, RanksRefused)
        assert error.problems == ("problem 0", "problem 1")


def test_ranks_with_different_pieces_are_refused():
    def job(group: ThreadGroup) -> None:
        piece_nbytes = [1, 2] if group.rank == 1 else [1, 3]
        with joined_ranks(group, "look") as ranks:
            divide_work(ranks, piece_nbytes, lambda pieces: pieces, int)

    for error in on_ranks(3, job):
        assert isinstance(error, RanksFailed)
        assert "rank 1 opened another one than rank 0" in str(error)


def test_ranks_with_different_operations_are_refused():
    def job(group: ThreadGroup) -> None:
        operation = "copy" if group.rank else "verify"
        with joined_ranks(group, operation) as ranks:
            exchange(ranks, b"", common=b"")

    for error in on_ranks(2, job):
        assert "it was called to copy, but rank 0 to verify" in str(error)


def test_a_process_alone_raises_its_own_exceptions():
    original_error = ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught, joined_ranks(None, "fail"):
        raise original_error

    assert caught.value is original_error
    with pytest.raises(Replaced), shared_errors(ALONE):
        raise Replaced("gone")


def test_a_process_alone_decides_about_its_own_message():
    assert ALONE.agree(b"x", lambda messages: [messages[0] * 2]) == b"xx"


def test_exchange_returns_the_data_of_all_ranks_on_every_rank():
    def job(group: ThreadGroup) -> list[bytes]:
        with joined_ranks(group, "exchange") as ranks:
            return exchange(ranks, b"%d" % group.rank, common=b"same")

    results = raise_first_error(on_ranks(4, job))

    assert results == [[b"0", b"1", b"2", b"3"]] * 4


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([7], "rank 7"),
        ([1, 0], "ranks 0 and 1"),
        ([0, 1, 2], "ranks 0 to 2"),
        ([9, 0, 1, 2], "ranks 0 to 2 and 9"),
        (range(0, 20, 2), "ranks 0, 2, 4, 6, 8, 10 and 4 more"),
    ],
)
def test_format_ranks_shortens_runs_and_long_lists(ranks, text):
    assert format_ranks(ranks) == text
