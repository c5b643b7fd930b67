"""Sealed folders of other trainers and rules by time: who seals counts, too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import holdfast
from holdfast.extras.runs.rules import Within
from holdfast.integrations.keeping import keep_by, ran_here
from holdfast.verbs.seals.check import read_seal
from tests.extras.runs.test_clocks import YEAR, Clocks, another_program


def train(
    folder: Path, clocks: Clocks, steps: range, *, between: float, jump: float = 0.0
) -> list[str]:
    """What a callback does: look when training begins, and at each save seal and let the rules delete."""
    another_program()
    with clocks.told():
        ran_here(folder)
        for step in steps:
            clocks.true += between
            clocks.wrong += jump
            made = folder / f"checkpoint-{step}"
            made.mkdir()
            (made / "weights.bin").write_bytes(bytes([step]))
            holdfast.seal(made, step=step, ran=ran_here(folder), durable=False)
            keep_by(folder, [Within(hours=1)], durable=False)
    return sorted(os.listdir(folder))


def test_what_is_older_goes(tmp_path: Path):
    clocks = Clocks()
    assert train(tmp_path, clocks, range(1, 5), between=1800.0) == [
        "checkpoint-2",
        "checkpoint-3",
        "checkpoint-4",
    ]
    clocks.true += YEAR
    assert train(tmp_path, clocks, range(5, 6), between=1800.0) == [
        "checkpoint-3",
        "checkpoint-4",
        "checkpoint-5",
    ]
    seal = read_seal(tmp_path / "checkpoint-5")
    assert seal is not None
    assert (seal.ran, seal.metrics) == (5 * 1800.0, {})


@pytest.mark.parametrize("jump", [-YEAR, 7200.0, YEAR])
def test_a_clock_that_jumps_deletes_nothing(tmp_path: Path, jump: float):
    assert len(train(tmp_path, Clocks(), range(1, 6), between=10.0, jump=jump)) == 5
