"""`holdfast show` of a folder with the steps of a run points to `holdfast runs`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import holdfast
from holdfast.errors import UnknownFormat


@pytest.fixture
def trainer_folder(tmp_path: Path) -> Path:
    """The output folder of transformers' Trainer with two checkpoints."""
    folder = tmp_path / "my output"
    for step in (1000, 500):
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        save_file({"w": np.ones(3)}, checkpoint / "model.safetensors")
    return folder


def test_show_of_a_folder_of_checkpoints_points_to_runs(run, trainer_folder):
    code, out, err = run("show", trainer_folder)
    assert (code, out) == (2, "")
    assert '"checkpoint-500", "checkpoint-1000"' in err
    assert f"`holdfast runs '{trainer_folder}'` lists them" in err


def test_show_of_a_run_points_to_runs(run, tmp_path):
    steps = holdfast.Run(tmp_path / "run")
    steps.save(3, {"w": np.ones(3)})
    code, _, err = run("show", tmp_path / "run")
    assert code == 2
    assert f"`holdfast runs {tmp_path / 'run'}` lists them" in err
    assert '"step-00000003"' in err


def test_show_of_last_weights_beside_checkpoints_points_to_runs(run, trainer_folder):
    save_file({"w": np.ones(3)}, trainer_folder / "model.safetensors")
    code, out, _ = run("show", trainer_folder)
    assert code == 0
    assert out.splitlines()[-1].startswith('steps     "checkpoint-500", "checkpoint-1000"')
    assert f"`holdfast runs '{trainer_folder}'` lists them" in out


def test_show_of_one_step_does_not_mention_runs(run, trainer_folder):
    code, out, _ = run("show", trainer_folder / "checkpoint-500")
    assert code == 0
    assert "holdfast runs" not in out


def test_open_of_a_run_in_a_bucket_points_to_runs():
    obstore = pytest.importorskip("obstore")
    client = obstore.store.MemoryStore()
    obstore.put(client, "run/step-00000001/holdfast.json", b"{}")
    obstore.put(client, "run/step-00000002/holdfast.json", b"{}")
    with pytest.raises(UnknownFormat, match="holdfast runs memory://store/run"):
        holdfast.open("run", store=client)


def test_the_names_of_steps_are_escaped(run, tmp_path):
    folder = tmp_path / "run"
    for name in ("step-1\x1b[31m", "step-2"):
        (folder / name).mkdir(parents=True)
        (folder / name / "x").write_bytes(b"")
    code, _, err = run("show", folder)
    assert code == 2
    assert "\x1b" not in err
