"""No verb takes another way under some condition: calls are counted, so a second, slower way shows on any machine.

Each verb that writes, under each option, makes at most `TIMES` the calls of the plain save of the same tensors in the same format:
with 64 tensors, with 2,000, and for each tensor more (from 2,000 to 4,000). A plain save
that makes fewer than `LEAST` calls a tensor is taken to make as many. Calls a tensor do not grow with their number. One odd tensor
among 20,000 costs at most a tenth more than none.

What is imported at a first call, and a thread that looks whether it may go on, add calls to one run; a second way does to each.
So the least of several runs counts: of two with 64 tensors, of one with more, and of up to three where that is too many.
`pytest -s` prints the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import holdfast
import holdfast.torch
from tests.growth.calls import CASES, ODD, PLAIN, SUFFIXES, Case, Job, counting, odd_state, tensors
from tests.ranks.pool import SHARED, Pool, World, good

WARM_UP, SMALL, MIDDLE, MORE, LARGE = 8, 64, 2_000, 4_000, 20_000
RANK_FORMATS = ("native", "dcp", "safetensors")

TIMES = 3
"""What an option may cost, in calls of the plain save."""

RUNS = 3

LEAST = 3
"""Calls a tensor that a plain save is taken to make where it makes fewer: by columns it makes none, and thrice none is none."""

GROWTH = 1.1
"""What a tensor may cost among ten times as many, and a state with one odd tensor as a multiple of one with none."""


def count_calls(prepare: Callable[[Path, int], Job], n: int) -> int:
    """The calls of a job with n tensors."""
    with TemporaryDirectory() as folder:
        job = prepare(Path(folder), n)
        with counting() as total:
            job()
    return total[0]


COUNTED: dict[tuple[Callable[[Path, int], Job], int], list[int]] = {}
"""The runs so far, of all tests."""


def calls(prepare: Callable[[Path, int], Job], n: int) -> int:
    """The least calls of the runs so far; the first run is made after one with eight tensors."""
    if n != WARM_UP:
        calls(prepare, WARM_UP)
    runs = COUNTED.setdefault((prepare, n), [])
    while len(runs) < (2 if n == SMALL else 1):
        runs.append(count_calls(prepare, n))
    return min(runs)


def least(
    measure: Callable[[], float], most: float, *parts: tuple[Callable[[Path, int], Job], int]
) -> float:
    """A figure; where it is more than it may be, that of up to `RUNS` runs of its parts."""
    figure = measure()
    while figure > most and any(len(COUNTED[part]) < RUNS for part in parts):
        for part in parts:
            COUNTED[part].append(count_calls(*part))
        figure = measure()
    return figure


def by_name(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def more(prepare: Callable[[Path, int], Job]) -> float:
    """The calls of one more tensor."""
    return (calls(prepare, MORE) - calls(prepare, MIDDLE)) / (MORE - MIDDLE)


def more_plain(plain: Callable[[Path, int], Job]) -> float:
    """Those of a plain save, `LEAST` at the least."""
    return max(more(plain), LEAST)


def plain_calls(plain: Callable[[Path, int], Job], n: int) -> float:
    """The calls of a plain save of n tensors, each of which makes `LEAST` at the least."""
    return calls(plain, n) + (more_plain(plain) - more(plain)) * n


def figure(case: Case, place: int) -> float:
    """Times the calls of the plain save: with 64 tensors, with 2,000, or for each more."""
    own, plain = case.prepare, PLAIN[case.plain]
    if place == 2:
        parts = [(job, n) for job in (own, plain) for n in (MIDDLE, MORE)]
        return least(lambda: more(own) / more_plain(plain) / case.saves, TIMES, *parts)
    n = (SMALL, MIDDLE)[place]
    return least(
        lambda: calls(own, n) / plain_calls(plain, n) / case.saves, TIMES, (own, n), (plain, n)
    )


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_an_option_costs_little(name: str):
    case = by_name(name)
    figures = [figure(case, place) for place in range(3)]
    print(f'\n    "{name}": ({", ".join(f"{one:.1f}" for one in figures)}),')
    assert max(figures) <= TIMES, figures


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_tensor_costs_the_same_among_many(name: str):
    """From 64 to 2,000 and from 2,000 to 20,000: what a save costs by itself is not counted."""
    case = by_name(name)

    def each(few: int, many: int) -> float:
        return (calls(case.prepare, many) - calls(case.prepare, few)) / (many - few)

    growth = least(
        lambda: each(MIDDLE, LARGE) / max(each(SMALL, MIDDLE), 1),
        GROWTH,
        (case.prepare, MIDDLE),
        (case.prepare, LARGE),
    )
    print(f"\n{name}: {each(SMALL, MIDDLE):.2f} and {each(MIDDLE, LARGE):.2f} calls a tensor")
    assert growth <= GROWTH
    assert calls(case.prepare, LARGE) <= TIMES * case.saves * plain_calls(PLAIN[case.plain], LARGE)


def odd_job(format: str, kind: str | None) -> Callable[[Path, int], Job]:
    def prepare(folder: Path, n: int) -> Job:
        state = odd_state(kind, n)
        if format == "sharded":
            return lambda: holdfast.torch.save_sharded(state, folder / "sharded", durable=False)
        if format == "torch.save":
            return lambda: holdfast.torch.save(state, folder / "saved.pt", durable=False)
        return lambda: holdfast.save(state, folder / f"saved{SUFFIXES[format]}", durable=False)

    return prepare


JOBS = {
    (format, kind): odd_job(format, kind)
    for format in (*SUFFIXES, "sharded", "torch.save")
    for kind in (None, *ODD)
}
UNHELD = {("safetensors", "composite")}
"""What a format cannot hold."""


@pytest.mark.parametrize(
    "name", [f"{format}, {kind}" for format, kind in JOBS if kind and (format, kind) not in UNHELD]
)
def test_one_odd_tensor_among_many(name: str):
    """What it costs beyond a save without it, as a part of that save."""
    format, _, kind = name.partition(", ")
    none, one = JOBS[format, None], JOBS[format, kind]
    most = GROWTH - 1
    beyond = least(
        lambda: (calls(one, LARGE) - calls(none, LARGE)) / max(calls(none, LARGE), LEAST * LARGE),
        most,
        (one, LARGE),
        (none, LARGE),
    )
    print(f'\n    "{name}": {1 + beyond:.2f},')
    assert beyond <= most


# Ranks.


def saved_by_a_rank(world: World, path: str, n: int, format: str) -> int:
    """The calls of one rank: all tensors are replicated."""
    state = tensors(n)
    world.barrier()
    with counting() as total:
        holdfast.torch.save_sharded(
            state, path, group=world.group, format=format, durable=False, overwrite=True
        )  # type: ignore[arg-type]
    return total[0]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    yield SHARED
    SHARED.close()


@pytest.mark.parametrize("format", RANK_FORMATS)
def test_each_of_two_ranks(pool: Pool, format: str, tmp_path: Path):
    name = f"two ranks, {format}"
    plain = PLAIN["tensors, safetensors" if format == "safetensors" else "tensors, native"]
    counts: list[list[int]] = []
    for n in (WARM_UP, MIDDLE, MORE):
        counts.append(
            [
                int(str(one))
                for one in good(pool.run(2, saved_by_a_rank, str(tmp_path / f"{n}"), n, format))
            ]
        )
    _, middle, most = counts
    figures = [max(middle) / plain_calls(plain, MIDDLE)]
    figures.append(
        max(b - a for a, b in zip(middle, most, strict=True)) / (MORE - MIDDLE) / more_plain(plain)
    )
    print(f'\n    "{name}": ({", ".join(f"{figure:.1f}" for figure in figures)}),')
    assert max(figures) <= TIMES, figures
