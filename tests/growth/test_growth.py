"""Cost is linear in the file, whatever it shares: every verb on every kind of sharing, at one size and at four times that.

Four times the file may take four times as long, with a margin for noise and for sorting; what is quadratic takes sixteen times.
`make test` runs a sample of the combinations (`tests/sampling.py`), and `make test-all` all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.growth.compose import CASES, DIRECTORIES, compose, make_directory
from tests.growth.measure import VERBS, Verb, cost, scan

SMALL = 1000
TIMES = 4

SIDE = 300
"""Of a square that is cut into twice as many boxes. Its elements grow with the square of that: only what opens is measured."""

MARGIN = 2
"""Noise, and the logarithm: what grows as it should takes 4 to 5 times as much, what is quadratic 16 times."""

FREE_SECONDS = 0.25
"""Processor time that says nothing: a collection of garbage, a page that was not in the cache."""

FREE_NBYTES = 24 << 20
"""Memory that says nothing: what an allocator keeps, and what the limits allow however small a file is."""


def grows(small: Path, large: Path, verb: Verb) -> str | None:
    """What grows faster than the file does, or None."""
    for _ in range(2):
        one, four = (
            cost(verb, path, path.with_name("twin-" + path.name)) for path in (small, large)
        )
        seconds = four.seconds > TIMES * MARGIN * one.seconds + FREE_SECONDS
        nbytes = four.nbytes > TIMES * MARGIN * one.nbytes + FREE_NBYTES
        if not seconds and not nbytes:
            return None
    return f"{one} and {four}"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("case", CASES)
def test_sharing_costs_nothing(case, verb, tmp_path):
    paths = []
    for n in (SMALL, TIMES * SMALL):
        data = compose(case, n)
        for name in (f"{n}.pt", f"twin-{n}.pt"):
            (tmp_path / name).write_bytes(data)
        paths.append(tmp_path / f"{n}.pt")
    assert grows(*paths, VERBS[verb]) is None


SCANNED = 2 * SMALL
"""A scan does little with most of a file: what is quadratic stands out later."""


@pytest.mark.parametrize(
    "case", {use: case for case in reversed(CASES) for use in [case.partition("/")[2]]}.values()
)
def test_a_scan_looks_once(case, tmp_path):
    """Every way to refer, with the first thing that can be referred to so: a scan is what one does with a file of a stranger."""
    paths = [tmp_path / f"{n}.pt" for n in (SCANNED, TIMES * SCANNED)]
    for path in paths:
        path.write_bytes(compose(case, int(path.stem)))
    assert grows(*paths, scan) is None


@pytest.mark.parametrize("case", DIRECTORIES)
@pytest.mark.parametrize(
    "verb", ["open", "show", "show --json", "diff", "stats", "convert .safetensors"]
)
def test_boxes_cost_what_they_take(case, verb, tmp_path):
    paths = []
    for n in (SIDE, TIMES * SIDE):
        path = make_directory(case, tmp_path / str(n), n)
        make_directory(case, tmp_path / f"twin-{n}", n)
        paths.append(path)
    assert grows(*paths, VERBS[verb]) is None
