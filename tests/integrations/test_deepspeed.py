"""Checkpoints that DeepSpeed writes on two ranks: what opens is what its own script makes of them, bit for bit, and more."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

PROGRAM = Path(__file__).with_name("write_zero.py")
STAGES = ("stage1", "stage2", "stage3", "stage3-sub")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zero")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("stage", STAGES)
def test_weights_are_those_of_deepspeeds_own_script(written: Path, stage: str) -> None:
    merged = torch.load(written / f"{stage}.merged.pt")
    with holdfast.open(written / stage) as found:
        assert found.format == "deepspeed"
        for name, tensor in merged.items():
            assert torch.equal(found[name].torch(), tensor.to(found[name].torch().dtype)), name
        # The script leaves the frozen parameters of stage 1 out.
        missing = set(found.model_names()) - set(merged)
        assert missing == ({"frozen.weight", "frozen.bias"} if stage == "stage1" else set())


@pytest.mark.parametrize("stage", STAGES)
def test_moments_are_those_of_the_ranks(written: Path, stage: str) -> None:
    """The sum over all ranks, which no cut can change: padding is zero."""
    key = "optimizer_state_dict" if stage.startswith("stage3") else "base_optimizer_state"
    step = written / stage / (written / stage / "latest").read_text().strip()
    files = sorted(step.glob("*optim_states.pt"))
    assert len(files) == 2
    with holdfast.open(written / stage) as found:
        for moment in ("exp_avg", "exp_avg_sq"):
            expected = 0.0
            for file in files:
                with holdfast.open(file) as rank:
                    names = [
                        name
                        for name in rank
                        if name.startswith(f"optimizer_state_dict.{key}.state")
                        and name.endswith(f".{moment}")
                    ]
                    expected += sum(rank[name].torch().double().sum().item() for name in names)
            own = [name for name in found if name.startswith(f"deepspeed.optimizer.{moment}.")]
            assert len(own) == 6
            assert sum(found[name].torch().double().sum().item() for name in own) == pytest.approx(
                expected, rel=1e-12
            )


@pytest.mark.parametrize("stage", ["stage2", "stage3"])
def test_a_universal_checkpoint_holds_the_same(written: Path, stage: str) -> None:
    """DeepSpeed puts moments together as well when it makes a universal checkpoint, so that each of them can be compared."""
    step = written / stage / (written / stage / "latest").read_text().strip()
    folder = written / f"{stage}-universal"
    words = ["--input_folder", step, "--output_folder", folder, "--inject_missing_state", "--num_extract_workers", "1",
             "--num_merge_workers", "1"]  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *map(str, words)], check=True, capture_output=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"}, timeout=120,
    )  # fmt: skip
    with holdfast.open(folder) as universal, holdfast.open(step) as found:
        for name in found.model_names():
            assert torch.equal(universal[name].torch().float(), found[name].torch().float()), name
        moments = [name for name in found if name.startswith("deepspeed.optimizer.exp_avg")]
        assert len(moments) == 12
        for name in moments:
            assert torch.equal(universal[name].torch(), found[name].torch()), name


def test_a_conversion_is_what_the_model_loads(written: Path) -> None:
    holdfast.convert(written / "stage3", written / "model.safetensors")
    merged = torch.load(written / "stage3.merged.pt")
    with holdfast.open(written / "model.safetensors") as found:
        assert set(found) == set(merged)
        assert torch.equal(found["head.weight"].torch(), merged["emb.weight"])
    assert holdfast.verify(written / "stage3").ok
