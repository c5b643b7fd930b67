"""A save that goes on when the program ends is not lost, and one that fails unseen is told by the exit status (`exits.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.engine import threads
from holdfast.engine.threads import BackgroundCall
from tests.crash.exits import FAILS, MORE_FAILS, MORE_SAVES, SAVES
from tests.crash.programs import Program, outcomes, same


@pytest.fixture(scope="module")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, tuple[int, str]]]:
    folder = tmp_path_factory.mktemp("exits")
    return folder, outcomes(
        "tests.crash.exits", folder, *(["all"] if request.config.getoption("--exhaustive") else [])
    )


def found(
    ended: tuple[Path, dict[str, tuple[int, str]]], program: Program
) -> tuple[Path, int, str]:
    folder, said = ended
    if program.__name__ not in said:
        pytest.skip("with --exhaustive")
    return folder / program.__name__, *said[program.__name__]


@pytest.mark.parametrize(
    ("program", "status"),
    [*SAVES.items(), *MORE_SAVES.items()],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_nothing_is_lost(ended, program: Program, status: int):
    folder, code, words = found(ended, program)
    assert code == status, words
    assert same(folder / "step")
    assert not [p for p in folder.iterdir() if p.name.endswith((".tmp", ".old"))]
    assert "HoldfastWarning" not in words
    assert "process ended" not in words or "process ended with 0" in words
    if program.__name__.startswith("in_a_thread"):
        assert (folder / "all").exists(), words


@pytest.mark.parametrize(
    ("program", "status"),
    [*FAILS.items(), *MORE_FAILS.items()],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_a_failure_is_told(ended, program: Program, status: int):
    folder, code, words = found(ended, program)
    assert code == status, words
    assert not (folder / "step").exists()
    if program.__name__ == "fails":
        assert (folder / "ran").exists()  # other handlers of the program, after ours
    if "looks" in program.__name__:
        assert "seen" in words
    elif "stderr" not in program.__name__:
        assert f"the save to {folder}" in words
        assert "the disk is full" in words or "is not there" in words
    if program.__name__.startswith(("process", "spawned")):
        assert f"process ended with {1 if 'raises' in program.__name__ else 120}" in words


def test_work_is_done_without_threads(monkeypatch: pytest.MonkeyPatch):
    def none(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads.threading.Thread, "start", none)
    done: list[int] = []
    threads.run_all([lambda i=i: done.append(i) for i in range(5)], 4)
    assert done == [0, 1, 2, 3, 4]
    with BackgroundCall(lambda: 7) as call:
        assert call.result() == 7
    with BackgroundCall(lambda: done.append(9)):
        pass
    assert 9 not in done
