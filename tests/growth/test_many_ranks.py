"""What the first rank of a save does, and what a manifest of it takes to open, when there are twice as many ranks or tensors.

Calls and bytes are counted, so that another machine finds the same. Ranks are values (`benchmarks.scale`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.scale import saved

import holdfast
from tests.growth.calls import counting

pytest.importorskip("torch")

FEW, RANKS, TENSORS = 8, 64, 40
LINEAR = 2.1
"""What twice the work may cost. A cost for each pair would be 4."""


Counted = dict[str, tuple[int, dict[str, float], int]]
"""By name: calls of a save, what it says of itself, calls of opening it."""


def calls_of_saving(folder: Path, ranks: int, tensors: int) -> tuple[int, dict[str, float]]:
    folder.mkdir()
    with counting() as total:
        found = saved("cut", ranks, tensors, "native", str(folder))
    return total[0], found


def calls_of_opening(folder: Path) -> int:
    with counting() as total:
        holdfast.open(folder).close()
    return total[0]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    made = {}
    sizes = {
        "warm": (RANKS, FEW),
        "one": (RANKS, TENSORS),
        "ranks": (2 * RANKS, TENSORS),
        "tensors": (RANKS, 2 * TENSORS),
    }
    sizes["both"] = 2 * RANKS, 2 * TENSORS
    for name, (ranks, tensors) in sizes.items():
        folder = tmp_path_factory.mktemp("growth") / name
        calls, found = calls_of_saving(folder, ranks, tensors)
        made[name] = calls, found, calls_of_opening(folder)
    return made


@pytest.mark.parametrize("more", ["ranks", "tensors"])
def test_the_first_rank_does_twice_as_much_for_twice_as_many(counted: Counted, more: str):
    (calls, one, opening), (twice, two, opening_two) = counted["one"], counted[more]
    assert twice <= LINEAR * calls
    assert opening_two <= LINEAR * opening
    assert two["boxes"] == 2 * one["boxes"]
    for nbytes in ("up", "down", "receipts", "index"):
        assert two[nbytes] <= LINEAR * one[nbytes], nbytes


def test_no_box_costs_a_call(counted: Counted):
    """Calls are so many for a rank, and so many for a tensor: a rank more costs the same, however many tensors are cut over it."""
    for of in (0, 2):  # saving, opening
        one, ranks, tensors, both = (
            counted[name][of] for name in ("one", "ranks", "tensors", "both")
        )
        assert abs((both - tensors) - (ranks - one)) < RANKS * TENSORS / 10
