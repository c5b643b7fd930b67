"""Every named attack: opened and looked at under watch, within bounds of time and memory, with the outcome that it must have."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from . import cases_bare, cases_onnx
from .cases import ALL, CLASSES
from .cases_rank_files import HONEST
from .cases_resources import BOMBS
from .craft_pickle import PERSID, dict_of, stream, text
from .craft_torch import legacy, state, tar, torch_zip, torchscript
from .harness import (
    MEMORY_FLOOR,
    MEMORY_PER_BYTE,
    SECONDS_FLOOR,
    SECONDS_PER_BYTE,
    WATCH,
    Executed,
    Outcome,
    run,
    warm_up,
)

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "files"

ADDRESS_SPACE = 3 << 30
"""For the process of the bombs. Python, numpy and their threads reserve about 1 GiB before anything is opened."""


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm()


def warm() -> None:
    """Open every golden file and what the cases are made from."""
    golden = [lambda path=path: path for path in sorted(GOLDEN.iterdir())]
    made = [
        torch_zip(state()),
        legacy(state(legacy_ids=True)),
        tar(stream(dict_of(text("w"), text("7"), PERSID))),
        cases_bare.HONEST,
        cases_onnx.HONEST,
    ]
    warm_up([*golden, *(lambda raw=raw: raw for raw in made)])
    with tempfile.TemporaryDirectory() as place:
        warm_up([lambda: HONEST(Path(place))])


def assert_expected(case, outcome: Outcome) -> None:
    if case.may_open and outcome.error is None:
        return
    if case.refusals:
        assert isinstance(outcome.error, case.refusals), f"{case}: {outcome.error!r}"
    else:
        assert outcome.error is None, f"{case}: {outcome.error!r}"
        assert outcome.checked, f"{case} opened as something else"


@pytest.mark.parametrize("case", ALL, ids=str)
def test_attack(case, tmp_path):
    """Nothing runs, only Holdfast errors come out, and the time is linear in the size."""
    outcome = run(case, tmp_path)
    assert_expected(case, outcome)
    bound = SECONDS_FLOOR + SECONDS_PER_BYTE * outcome.nbytes
    assert outcome.seconds <= bound, (
        f"{outcome.seconds:.2f} s of processor for {outcome.nbytes:,} bytes"
    )


@pytest.mark.parametrize("case", ALL, ids=str)
def test_memory(case, tmp_path):
    """The peak of all that Python and numpy allocate is linear in the size. Apart, since counting takes time."""
    outcome = run(case, tmp_path, memory=True)
    bound = MEMORY_FLOOR + MEMORY_PER_BYTE * outcome.nbytes
    assert outcome.peak <= bound, (
        f"{outcome.peak:,} bytes of memory for {outcome.nbytes:,} bytes of file"
    )


@pytest.mark.slow("opens every bomb, in a process with little memory")
def test_bombs_in_little_memory():
    """No bomb ends the interpreter: not by its C stack, not by freeing a deep structure, not by memory. torch stays out."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.test_attacks"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-2000:]}"
    report = json.loads(done.stdout)
    assert report["opened"] == len(BOMBS)
    assert not report["torch"]
    assert report["wrong"] == []


def test_every_class_is_there():
    names = [case.name for case in ALL]
    assert len(set(names)) == len(names) >= 200
    assert all(len(cases) >= 30 for cases in CLASSES.values())


@pytest.mark.parametrize(
    "act",
    [
        lambda _: __import__("this_module_does_not_exist"),
        lambda _: eval("1"),
        lambda _: compile("1", "", "eval"),
        lambda path: (path / "x").write_text("x"),
        lambda _: subprocess.run(["true"], check=False),
        lambda _: __import__("os").system("true"),
        lambda _: __import__("socket").socket(),
        lambda _: __import__("pickle").loads(b"cos\nsystem\n."),
    ],
    ids=["import", "eval", "compile", "write", "subprocess", "system", "socket", "pickle"],
)
def test_the_watch_would_notice(act, tmp_path):
    """The hook sees what it is there for; otherwise the tests above could not fail."""
    with pytest.raises((Executed, AssertionError)), WATCH.watching():
        act(tmp_path)


def test_the_watch_lets_reading_through(tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    with WATCH.watching():
        assert (tmp_path / "x").read_bytes() == b"x"


def test_the_scripts_of_the_base_are_honest():
    """Cases are refused for their lie: what they are made from opens."""
    for raw in (
        torch_zip(state()),
        legacy(state(legacy_ids=True)),
        tar(stream(dict_of(text("w"), text("7"), PERSID))),
    ):
        warm_up([lambda raw=raw: raw])
    warm_up([lambda: torchscript(stream(b"}"), stream(b")"))])


def _bombs() -> None:
    """Open every bomb in this process, under a limit of its address space, and print what went wrong."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    warm()
    wrong = []
    opened = 0
    for case in BOMBS:
        try:
            run(case, Path("/nonexistent"))
        except BaseException as error:  # reported, with its name, by the test that reads it
            wrong.append(f"{case.name}: {type(error).__name__}")
        opened += 1
    print(json.dumps({"opened": opened, "torch": "torch" in sys.modules, "wrong": wrong}))


if __name__ == "__main__":
    _bombs()
