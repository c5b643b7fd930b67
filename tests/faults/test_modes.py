"""Who may read a checkpoint that is replaced: nobody more than before, whichever verb replaces it."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast.torch import save_sharded


def save(path: Path) -> None:
    holdfast.save({"w": np.ones(3), "step": 1}, path, overwrite=True)


def save_sharded_native(path: Path) -> None:
    save_sharded(path, {"w": torch.ones(3), "step": 1}, overwrite=True)


def save_sharded_dcp(path: Path) -> None:
    save_sharded(path, {"w": torch.ones(3), "step": 1}, overwrite=True, format="dcp")


def split(path: Path) -> None:
    holdfast.save(
        {f"w{i}": np.ones(300) for i in range(4)},
        path,
        format="safetensors",
        max_shard_size=3000,
        overwrite=True,
    )


def convert_resumed(path: Path) -> None:
    holdfast.save({"w": np.ones(3), "step": 1}, path.with_name("source.pt"))
    holdfast.convert(path.with_name("source.pt"), path, overwrite=True, resume=True)


@pytest.mark.parametrize(
    "replace", [save, save_sharded_native, save_sharded_dcp, split, convert_resumed]
)
def test_a_private_checkpoint_stays_private(tmp_path: Path, replace: Callable[[Path], None]):
    path = tmp_path / "model"
    holdfast.save({"w": np.zeros(2)}, path)
    for file in path.iterdir():
        file.chmod(0o600)
    path.chmod(0o2750)
    replace(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o2750
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    assert holdfast.verify(path).ok
