"""Chooses the cases that `make test` runs of tests that are exhaustive by nature.

Most tests run completely. A few test functions take minutes, because they try every attack on every
verb, or fail every call of every writer. `costs.json` records what all cases of such a function
cost. `make test` runs as many of its cases as fit into `SECONDS_PER_FUNCTION`, and at least one.
Which ones depends on a seed, by default the date, so that every case gets its turn.

`make test-all` runs everything, and `make costs` measures the costs again.
"""

from __future__ import annotations

import datetime
import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

COSTS_FILE = Path(__file__).with_name("costs.json")

SECONDS_PER_FUNCTION = 1.5
"""The processor time that a sampled test function may take. It decides how long `make test` takes."""

SECONDS_PER_FUNCTION_IN_A_ROOM = 0.75
"""The same for `make test ROOM=…`, which is run after every change."""

LONG_CASE_SECONDS = 10.0
"""A case that takes longer needs `@pytest.mark.slow(reason)`."""

SEED_VARIABLE = "HOLDFAST_SAMPLE_SEED"
"""The environment variable that carries the seed to test processes and to programs that they start."""

EXHAUSTIVE_VARIABLE = "HOLDFAST_EXHAUSTIVE"
"""The environment variable that is set while every case runs."""


class FunctionCost(NamedTuple):
    """What all cases of a test function cost together."""

    cases: int
    seconds: float


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


def count_affordable_cases(cost: FunctionCost | None, case_count: int, budget: float) -> int:
    """Return how many of a function's cases fit into a budget of seconds, at least one."""
    if cost is None or cost.seconds <= budget:
        return case_count
    seconds_per_case = cost.seconds / cost.cases
    return max(1, min(case_count, int(budget / seconds_per_case)))


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
