"""What ranks do together: steps, errors, work that is dealt and shared. The ranks are threads."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.groups import ThreadGroup, good, on_ranks

from holdfast.core.group import (
    ALONE,
    assign_evenly,
    divide_work,
    exchange,
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


def squares(group: ThreadGroup, weights: list[int], asked: dict[int, list[int]]) -> list[int]:
    def work(numbers: list[int]) -> list[int]:
        asked[group.rank] = numbers
        return [number * number for number in numbers]

    with joined_ranks(group, "square") as ranks:
        return divide_work(ranks, weights, work, int)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_work_is_done_once_and_known_to_all(size: int):
    weights = [7, 0, 3, 900, 3, 12, 12, 1, 400]
    asked: dict[int, list[int]] = {}
    found = good(on_ranks(size, lambda group: squares(group, weights, asked)))
    assert found == [[number * number for number in range(len(weights))]] * size
    assert sorted(number for numbers in asked.values() for number in numbers) == [
        *range(len(weights))
    ]


@given(st.lists(st.integers(0, 1 << 40), max_size=60), st.integers(1, 7))
def test_the_first_rank_has_the_least_work(nbytes: list[int], size: int):
    """Never more than an n-th, whatever the pieces are: it is the last that is dealt to."""
    picks = size - 1 - assign_evenly(np.array(nbytes, np.int64), np.zeros(size, np.int64))
    loads = [
        sum(n for n, rank in zip(nbytes, picks.tolist(), strict=True) if rank == r)
        for r in range(size)
    ]
    assert loads[0] * size <= sum(nbytes) + size * (max(nbytes, default=0) // 2 + 1)


def test_an_error_of_one_rank_is_raised_on_all():
    def job(group: ThreadGroup) -> None:
        with joined_ranks(group, "fail") as ranks:
            if group.rank == 2:
                raise ValueError("a bad disk")
            divide_work(ranks, [1, 1, 1], lambda numbers: numbers, int)

    found = on_ranks(3, job)
    assert all(
        isinstance(one, RanksFailed) and one.causes == {2: "ValueError: a bad disk"}
        for one in found
    ), found


def test_an_error_in_the_work_is_raised_on_all():
    def work(numbers: list[int]) -> list[int]:
        raise NoSuchPath("nothing there", file="x")

    def job(group: ThreadGroup) -> None:
        with joined_ranks(group, "fail") as ranks:
            divide_work(ranks, [1, 1], work, int)

    assert all(
        isinstance(one, RanksFoundNothing) and one.filename == "x" for one in on_ranks(2, job)
    )


def fail_with(codes: list[int | None]) -> list[object]:
    """Run a job whose ranks fail with these codes of the file system; None for a rank that succeeds."""

    def job(group: ThreadGroup) -> None:
        with joined_ranks(group, "write") as ranks, joint_phase(ranks):
            if (code := codes[group.rank]) is not None:
                raise OSError(code, os.strerror(code))

    return on_ranks(len(codes), job)


@pytest.mark.parametrize("codes", [[errno.ENOSPC, errno.ENOSPC], [None, errno.ENOSPC, None]])
def test_the_errno_that_all_causes_share_is_that_of_all_ranks(codes: list[int | None]):
    for error in fail_with(codes):
        assert isinstance(error, RanksFailed)
        assert error.errno == errno.ENOSPC


def test_causes_with_different_errnos_have_none_in_common():
    for error in fail_with([errno.ENOSPC, errno.EIO]):
        assert isinstance(error, RanksFailed)
        assert error.errno is None


def test_an_error_of_a_decision_keeps_its_errno():
    def decide(messages: list[bytes]) -> list[bytes]:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    def job(group: ThreadGroup) -> None:
        with joined_ranks(group, "write") as ranks:
            ranks.agree(b"", decide)

    for error in on_ranks(2, job):
        assert isinstance(error, RanksFailed)
        assert error.errno == errno.EDQUOT


def test_a_group_of_one_raises_its_own_error():
    own = NoSuchPath("nothing there", file="x")

    def job(group: ThreadGroup) -> None:
        with (
            joined_ranks(group, "look") as ranks,
            joint_phase(ranks, "some tensors have been changed"),
        ):
            raise own

    assert on_ranks(1, job) == [own]
    assert own.__notes__ == ["some tensors have been changed"]


def test_problems_of_all_ranks_are_listed():
    def job(group: ThreadGroup) -> None:
        with joined_ranks(group, "refuse") as ranks, joint_phase(ranks):
            raise CannotHold("no", [f"problem {group.rank}"])

    found = on_ranks(2, job)
    assert all(
        isinstance(one, RanksRefused) and one.problems == ("problem 0", "problem 1")
        for one in found
    )


def test_ranks_that_see_different_things_are_told():
    def job(group: ThreadGroup) -> None:
        with joined_ranks(group, "look") as ranks:
            divide_work(ranks, [1, 2] if group.rank == 1 else [1, 3], lambda numbers: numbers, int)

    found = on_ranks(3, job)
    assert all(
        isinstance(one, RanksFailed) and "rank 1 not that of rank 0" in str(one) for one in found
    ), found


def test_ranks_that_do_different_things_are_told():
    def job(group: ThreadGroup) -> None:
        with joined_ranks(group, "copy" if group.rank else "verify") as ranks:
            exchange(ranks, b"", common=b"")

    assert all("it was asked to copy, and rank 0 to verify" in str(one) for one in on_ranks(2, job))


def test_one_process_keeps_its_errors():
    with pytest.raises(ValueError, match="mine") as caught, joined_ranks(None, "fail"):
        raise ValueError("mine")
    assert type(caught.value) is ValueError
    with pytest.raises(Replaced), shared_errors(ALONE):
        raise Replaced("gone")
    assert ALONE.agree(b"x", lambda messages: [messages[0] * 2]) == b"xx"


def test_every_rank_has_what_all_have():
    def job(group: ThreadGroup) -> list[bytes]:
        with joined_ranks(group, "tell") as ranks:
            return exchange(ranks, b"%d" % group.rank, common=b"same")

    assert good(on_ranks(4, job)) == [[b"0", b"1", b"2", b"3"]] * 4
