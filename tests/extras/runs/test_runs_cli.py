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
            run.save(
                number * 100,
                {"w": np.ones(50)},
                metrics={"val_loss": 1 / number, "bad": float("nan")},
            )
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


def test_a_run_without_rules_deletes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]):
    _, out, _ = printed(capsys, "runs", folder)
    assert out.splitlines()[0].endswith("no rules: the run deletes nothing")
    _, out, _ = printed(capsys, "runs", folder, "--json")
    assert json.loads(out)["recorded"] is True


def test_steps_of_another_trainer_may_be_deleted_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for number in (500, 1000):
        (tmp_path / f"checkpoint-{number}").mkdir()
        holdfast.save({"w": np.ones(3)}, tmp_path / f"checkpoint-{number}" / "model.safetensors")
    holdfast.seal(tmp_path / "checkpoint-500")
    code, out, _ = printed(capsys, "runs", tmp_path)
    assert code == 0
    assert "nothing is deleted" not in out
    head, hint, *_ = out.splitlines()
    assert head.endswith(
        "no rules: this is not a run of Holdfast; another program may delete steps"
    )
    assert hint.startswith(
        "  not listed, because they have no seal: checkpoint-1000; run `holdfast seal PATH` to add each as a step, with"
    )
    code, out, _ = printed(capsys, "runs", tmp_path, "--json")
    found = json.loads(out)
    assert (found["recorded"], found["unsealed"], [step["step"] for step in found["steps"]]) == (
        False,
        ["checkpoint-1000"],
        [500],
    )
    holdfast.seal(tmp_path / "checkpoint-1000")
    _, out, _ = printed(capsys, "runs", tmp_path, "--plan", "--keep", "latest:1")
    assert "seal" not in out


def test_steps_of_torchtitan_are_not_said_to_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Its Checkpointer saves native folders `step-N`, and deletes them by `keep_latest_k`."""
    holdfast.save({"w": np.ones(3)}, tmp_path / "step-500", format="native")
    _, out, _ = printed(capsys, "runs", tmp_path)
    assert "1 step," in out
    assert "another program may delete steps" in out
    code, page, _ = printed(capsys, "report", tmp_path, "--json")
    assert code == 0
    assert "another program may delete steps" in page
    assert "nothing is deleted" not in page


def test_a_step_of_dcp_without_a_seal_is_not_torn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint import save

    from tests.support import ALONE

    for number in (90, 100):
        save({"w": torch.ones(3)}, checkpoint_id=tmp_path / f"step-{number}", **ALONE)
    (tmp_path / "step-110").mkdir()
    holdfast.save(
        {"w": np.ones(3)}, tmp_path / "step-110" / "model.safetensors"
    )  # as save_pretrained leaves it
    code, out, _ = printed(capsys, "runs", tmp_path)
    assert code == 0
    assert (
        "  not listed, because they have no seal: step-90, step-100, step-110; run `holdfast seal PATH` to add each as a step"
        in out
    )
    assert "whole" not in out
    _, out, _ = printed(capsys, "runs", tmp_path, "--json")
    assert (json.loads(out)["unsealed"], json.loads(out)["steps"]) == (
        ["step-90", "step-100", "step-110"],
        [],
    )
    assert printed(capsys, "seal", tmp_path / "step-100")[0] == 0
    with holdfast.Run(tmp_path) as run:
        assert run.latest().step == 100
    # In the directory of a Run they are named as well, and what lacks its index is torn.
    (tmp_path / "step-90" / ".metadata").unlink()
    code, out, _ = printed(capsys, "runs", tmp_path)
    assert code == 1
    assert "step-90: neither a seal nor a manifest: it was not written to its end" in out
    assert "no seal: step-110; run `holdfast seal PATH`" in out


def test_files_of_lightning_without_a_seal_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    files = ["epoch=0-step=10.ckpt", "epoch=1-step=20.ckpt", "last.ckpt", "z\x1b[2J.ckpt"]
    for name in (*files, "hparams.yaml", "metrics-step-5.json"):
        (tmp_path / name).write_bytes(b"?")
    (tmp_path / "link.ckpt").symlink_to("last.ckpt")
    code, out, _ = printed(capsys, "runs", tmp_path)
    assert code == 0
    assert "0 steps" in out
    assert (
        "no seal: epoch=0-step=10.ckpt, epoch=1-step=20.ckpt, last.ckpt and 1 more; run `holdfast seal PATH`"
        in out
    )
    assert "\x1b" not in out
    assert "hparams" not in out
    _, out, _ = printed(capsys, "runs", tmp_path, "--json")
    assert json.loads(out)["unsealed"] == files


def test_numbered_files_without_a_seal_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name in (
        "model_1.pt",
        "model-2.safetensors",
        "model-00001-of-00002.safetensors",
        "rng_state_0.pth",
    ):
        holdfast.save({"w": np.ones(3)}, tmp_path / name)
    code, out, _ = printed(capsys, "runs", tmp_path)
    assert code == 0
    assert (
        "no seal: model-2.safetensors, model_1.pt; run `holdfast seal PATH` to add each as a step, with `--step N`"
        in out
    )
    assert printed(capsys, "seal", tmp_path / "model_1.pt", "--step", "1")[0] == 0
    assert "1 step," in printed(capsys, "runs", tmp_path)[1]


def test_what_is_torn_is_named(folder: Path, capsys: pytest.CaptureFixture[str]):
    data = next((folder / "step-00000500").glob("data-*"))
    os.truncate(data, 10)
    (folder / "step-\x1b[2J").mkdir()
    code, out, _ = printed(capsys, "runs", folder)
    assert code == 1
    assert "incomplete" in out
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
    assert (code, out) == (0, "step 100 is no longer pinned (paper)\n")


def test_the_rules_of_the_run_are_those_that_it_wrote_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
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
        (["runs", ".", "--plan"], "no retention rules"),
        (["runs", ".", "--plan", "--keep", "newest"], "is no rule"),
        (["pin", ".", "5"], "no whole step 5"),
        (["pin", ".", "x"], "is not a step number"),
        (["unpin", ".", "5"], "not pinned"),
    ],
)
def test_what_cannot_be_done(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.chdir(tmp_path)
    code, out, err = printed(capsys, *arguments)
    assert (code, out) == (2, "")
    assert says in err
