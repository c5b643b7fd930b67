"""`holdfast runs`, `pin` and `unpin`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with holdfast.Run(tmp_path / "run") as run:
        for number in range(1, 6):
            run.save(number * 100, {"w": np.ones(50)}, metrics={"val_loss": 1 / number, "bad": float("nan")})
    return tmp_path / "run"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_table(folder: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = printed(capsys, "runs", folder)
    assert code == 0
    lines = out.splitlines()
    assert "5 steps" in lines[0]
    assert "no rules" in lines[0]
    assert lines[1].split()[:3] == ["step", "age", "size"]
    assert "val_loss" in lines[1]
    assert lines[2].split()[0] == "100"
    assert "nan" in lines[2]


def test_what_is_torn_is_named(folder: Path, capsys: pytest.CaptureFixture[str]):
    data = next((folder / "step-00000500").glob("data-*"))
    os.truncate(data, 10)
    (folder / "step-\x1b[2J").mkdir()
    code, out, _ = printed(capsys, "runs", folder)
    assert code == 1
    assert "not whole" in out
    assert f"{data.name}: truncated: 10 of" in out
    assert "\x1b" not in out


def test_plan_and_prune(folder: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = printed(capsys, "pin", folder, "100", "--why", "paper")
    assert (code, out) == (0, "step 100 is pinned: paper\n")
    rules = ["--keep", "latest:1", "--keep", "best:val_loss:2", "--keep", "every:300"]
    code, out, _ = printed(capsys, "runs", folder, "--plan", *rules)
    assert code == 0
    assert [line.split()[:3] for line in out.splitlines()[1:6]] == [
        ["keep", "step", "100"],
        ["delete", "step", "200"],
        ["keep", "step", "300"],
        ["keep", "step", "400"],
        ["keep", "step", "500"],
    ]
    assert "pinned: paper" in out
    assert "1 step would be deleted" in out
    assert len(holdfast.Run(folder)) == 5
    code, out, _ = printed(capsys, "runs", folder, "--prune", *rules)
    assert code == 0
    assert "deleted step 200" in out
    assert [step.step for step in holdfast.Run(folder)] == [100, 300, 400, 500]
    assert not (folder / ".holdfast.lock").exists()
    code, out, _ = printed(capsys, "unpin", folder, "100")
    assert (code, out) == (0, "step 100 is not pinned any more (paper)\n")


def test_the_rules_of_the_run_are_those_that_it_wrote_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = holdfast.Run(tmp_path, keep=["latest:2", "best:val_loss:1"])
    for number in range(1, 4):
        run.save(number, {"w": np.ones(50)}, metrics={"val_loss": number})
    code, out, _ = printed(capsys, "runs", tmp_path, "--json")
    assert code == 0
    document = json.loads(out)
    assert document["keep"] == ["latest:2", "best:val_loss:1"]
    assert document["writer"]["pid"] == os.getpid()
    assert [(row["step"], row["whole"], row["kept_by"]) for row in document["steps"]] == [
        (1, True, ["best:val_loss:1"]),
        (2, True, ["latest:2"]),
        (3, True, ["latest:2"]),
    ]
    assert document["steps"][0]["metrics"] == {"val_loss": 1.0}
    code, _, err = printed(capsys, "runs", tmp_path, "--prune")
    assert code == 2
    assert "another Run open" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["runs", "nowhere"], "no such directory"),
        (["runs", ".", "--plan"], "no rules say which steps go"),
        (["runs", ".", "--plan", "--keep", "newest"], "is no rule"),
        (["pin", ".", "5"], "no whole step 5"),
        (["pin", ".", "x"], "is no number of a step"),
        (["unpin", ".", "5"], "not pinned"),
    ],
)
def test_what_cannot_be_done(arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = printed(capsys, *arguments)
    assert (code, out) == (2, "")
    assert says in err
