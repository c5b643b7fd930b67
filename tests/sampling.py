"""Chooses the cases that `make test` runs of tests that are exhaustive by nature.

Most tests run completely. A few test functions take minutes, because they try every attack on every
verb, or fail every call of every writer. `costs.json` records what all cases of such a function
cost. `make test` runs as many of its cases as fit into a budget, and at least one. Functions of
which a single case takes seconds, such as ranks that are killed, take turns: each runs on some days
only. Which cases run depends on a seed, by default the date, so that every case gets its turn.

Some tests try many places or moments within one case: crash states, requests that fail, damaged
bytes, processes that are killed. They choose by the same seed, with `sample`, `every_nth` and
`count_rounds`.

`make test-all` runs everything, prints what a sample would leave out, and `make costs` measures the
costs again.
"""

from __future__ import annotations

import datetime
import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

Item = TypeVar("Item")

COSTS_FILE = Path(__file__).with_name("costs.json")

LONG_CASE_SECONDS = 3.0
"""Functions of which a single case takes longer than this take turns."""

REASON_SECONDS = 10.0
"""A function of which a single case takes longer than this needs `@pytest.mark.slow(reason)`."""


class Budget(NamedTuple):
    """The processor time, in seconds, that decides how large the sample is."""

    per_function: float
    """What the chosen cases of one function may take together."""
    long_cases: float
    """What all functions with long cases may take together."""


EVERYTHING = Budget(per_function=0.6, long_cases=60.0)
"""The budget of `make test`."""

ROOM = Budget(per_function=0.75, long_cases=15.0)
"""The budget of `make test ROOM=…`, which is run after every change."""

SEED_VARIABLE = "HOLDFAST_SAMPLE_SEED"
"""The environment variable that carries the seed to test processes and to programs that they start."""

EXHAUSTIVE_VARIABLE = "HOLDFAST_EXHAUSTIVE"
"""The environment variable that is set while every case runs."""


class FunctionCost(NamedTuple):
    """What all cases of a test function cost together."""

    cases: int
    seconds: float

    @property
    def is_long(self) -> bool:
        return self.seconds_per_case > LONG_CASE_SECONDS

    @property
    def seconds_per_case(self) -> float:
        return self.seconds / self.cases


def read_costs(path: Path = COSTS_FILE) -> dict[str, FunctionCost]:
    """Return the cost of every expensive test function by its node id without parameters."""
    costs: dict[str, FunctionCost] = {}
    for function, (cases, seconds) in json.loads(path.read_text()).items():
        costs[function] = FunctionCost(cases, seconds)
    return costs


def seed_of_today() -> int:
    """Return the date as a number such as 20261118."""
    return int(datetime.datetime.now(datetime.UTC).strftime("%Y%m%d"))


def current_seed() -> int:
    return int(os.environ.get(SEED_VARIABLE) or seed_of_today())


def is_exhaustive() -> bool:
    return bool(os.environ.get(EXHAUSTIVE_VARIABLE))


def examples(count: int) -> int:
    """Return how many examples Hypothesis tries: all with `make test-all`, otherwise a quarter."""
    if is_exhaustive():
        return count
    return max(10, count // 4)


def random_for(name: str) -> random.Random:
    """Return the random numbers of this run for one test, which are the same in every process."""
    return random.Random(f"{current_seed()}:{name}")


class SampleSize(NamedTuple):
    """How many cases, places or moments `make test` tries, of how many."""

    sampled: int
    total: int


SAMPLE_SIZES: dict[str, SampleSize] = {}
"""The size of every sample that a test of this process chose, by its name."""


def sample(name: str, items: Sequence[Item], count: int) -> list[Item]:
    """Return a number of random items in their order, or all of them with `make test-all`."""
    sampled_count = min(count, len(items))
    SAMPLE_SIZES[name] = SampleSize(sampled_count, len(items))
    if is_exhaustive():
        return list(items)
    indices = random_for(name).sample(range(len(items)), sampled_count)
    return [items[index] for index in sorted(indices)]


def every_nth(name: str, stop: int, step: int) -> range:
    """Return every `step`-th number from a random start, or all numbers with `make test-all`."""
    SAMPLE_SIZES[name] = SampleSize(-(-stop // step), stop)
    if is_exhaustive():
        return range(stop)
    return range(random_for(name).randrange(min(step, stop)) if stop else 0, stop, step)


def count_rounds(name: str, count: int, *, total: int) -> int:
    """Return how often a test repeats something random: `total` times with `make test-all`."""
    SAMPLE_SIZES[name] = SampleSize(count, total)
    return total if is_exhaustive() else count


def count_affordable_cases(cost: FunctionCost | None, case_count: int, budget: float) -> int:
    """Return how many of a function's cases fit into a budget of seconds, at least one."""
    if cost is None or cost.seconds <= budget:
        return case_count
    return max(1, min(case_count, int(budget / cost.seconds_per_case)))


def choose_functions_in_turn(
    costs: Mapping[str, FunctionCost], budget: float, numbers: random.Random
) -> set[str]:
    """Choose which functions with long cases run one case today, in random order, within a budget."""
    functions = sorted(costs)
    numbers.shuffle(functions)
    chosen: set[str] = set()
    seconds = 0.0
    for function in functions:
        if seconds + costs[function].seconds_per_case <= budget:
            chosen.add(function)
            seconds += costs[function].seconds_per_case
    return chosen


def choose_cases(
    cases: Sequence[Mapping[str, int]], count: int, numbers: random.Random
) -> list[int]:
    """Choose cases so that they cover as many values of every parameter as possible.

    Args:
        cases: For each case, the index of the value that each parameter has.
        count: How many cases to choose.
        numbers: Decides between cases that cover equally many new values.

    Returns:
        The indices of the chosen cases, in ascending order.
    """
    waiting = list(range(len(cases)))
    numbers.shuffle(waiting)
    covered: set[tuple[str, int]] = set()
    chosen: list[int] = []
    while waiting and len(chosen) < count:
        best = max(waiting, key=lambda index: len(cases[index].items() - covered))
        if cases[best].items() <= covered:
            # Every value occurred. Start again, so that the values go on to occur equally often.
            covered.clear()
        waiting.remove(best)
        chosen.append(best)
        covered |= cases[best].items()
    return sorted(chosen)
