"""Forks during a save: they hold nothing of it, wait for nothing, and can save and read by themselves (`runtime.py`)."""

from __future__ import annotations

import pytest

from tests.crash.forks import MORE, PROGRAMS
from tests.crash.programs import Program, outcomes


@pytest.fixture(scope="module")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str]]:
    more = ["all"] if request.config.getoption("--exhaustive") else []
    return outcomes("tests.crash.forks", tmp_path_factory.mktemp("forks"), *more)


@pytest.mark.parametrize("program", [*PROGRAMS, *MORE], ids=lambda program: program.__name__)
def test_fork(ended: dict[str, tuple[int, str]], program: Program):
    if program.__name__ not in ended:
        pytest.skip("with --exhaustive")
    code, words = ended[program.__name__]
    assert code == 0, words
