"""No option makes a save much more expensive than the plain save of the same tensors in the same format.

Calls of functions are counted instead of seconds, so a second, slower way shows on any machine. Imports of
a first call and threads that look whether they may go on add calls to single runs. So every job runs
once with a few tensors first, and a figure that is too high is measured up to three times.
`pytest -s` prints the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import holdfast
import holdfast.torch
from tests.growth.calls import CASES, PLAIN, Case, Job, counting, tensors
from tests.ranks.pool import SHARED, Pool, World, good

Prepare = Callable[[Path, int], Job]

WARM_UP, MIDDLE, LARGE = 8, 2_000, 20_000
RANK_FORMATS = ("native", "dcp", "safetensors")

MOST_TIMES = 4
"""What an option may cost, as a multiple of the plain save."""

FEWEST_CALLS = 3
"""Calls for each tensor that are assumed for a plain save that makes fewer, because it works by columns."""

MOST_GROWTH = 1.1
"""What a tensor among 20,000 may cost, as a multiple of a tensor among 2,000."""

RUNS = 3


def count_calls(prepare: Prepare, count: int) -> int:
    """Run a job with some tensors and return the number of calls."""
    with TemporaryDirectory() as folder:
        job = prepare(Path(folder), count)
        with counting() as total:
            job()
    return total[0]


fewest_calls: dict[tuple[Prepare, int], int] = {}
"""The fewest calls of each job in all runs so far."""


def calls(prepare: Prepare, count: int, *, again: bool = False) -> int:
    key = prepare, count
    if key not in fewest_calls:
        count_calls(prepare, WARM_UP)
        fewest_calls[key] = count_calls(prepare, count)
    elif again:
        fewest_calls[key] = min(fewest_calls[key], count_calls(prepare, count))
    return fewest_calls[key]


def plain_calls(prepare: Prepare, count: int) -> int:
    return max(calls(prepare, count), FEWEST_CALLS * count)


def measure(case: Case, *, again: bool) -> tuple[float, float, float]:
    """Return the multiples of the plain save at two sizes, and the growth between them."""
    middle, large = (calls(case.prepare, count, again=again) for count in (MIDDLE, LARGE))
    plain = PLAIN[case.plain]
    least = FEWEST_CALLS * case.saves
    return (
        middle / plain_calls(plain, MIDDLE) / case.saves,
        large / plain_calls(plain, LARGE) / case.saves,
        max(large / LARGE, least) / max(middle / MIDDLE, least),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_option_costs_little(case: Case):
    for run in range(RUNS):
        figures = measure(case, again=run > 0)
        if max(figures[:2]) <= case.most_times and figures[2] <= MOST_GROWTH:
            break
    print(f"\n{case.name}: {', '.join(f'{figure:.2f}' for figure in figures)}")
    assert max(figures[:2]) <= case.most_times
    assert figures[2] <= MOST_GROWTH


def count_calls_of_a_rank(world: World, path: str, count: int, format: str) -> int:
    """Save replicated tensors and return the calls of one rank."""
    state = tensors(count)
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
    """Ranks open what they have written before they publish it, so that is allowed for as well."""
    plain = PLAIN["tensors, safetensors" if format == "safetensors" else "tensors, native"]
    for count in (WARM_UP, MIDDLE, LARGE):
        target = str(tmp_path / f"{count}")
        counts = good(pool.run(2, count_calls_of_a_rank, target, count, format))
    with counting() as calls_of_opening, holdfast.open(target):
        pass
    save_calls = max(map(int, counts)) - calls_of_opening[0]  # type: ignore[call-overload]
    assert save_calls <= MOST_TIMES * plain_calls(plain, LARGE)
