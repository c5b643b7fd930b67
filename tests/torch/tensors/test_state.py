"""What `holdfast.save` makes of torch tensors."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import holdfast


@pytest.mark.parametrize("name", ["model.pt", "native"])
def test_memory_that_only_the_save_knows_stays(name: str, tmp_path: Path):
    """The integers of a quantised tensor are made for the save and belong to nobody else."""
    values = torch.arange(64.0).reshape(8, 8)
    tensors = {
        str(i): torch.quantize_per_tensor(values + i, 0.5, 3, torch.qint8) for i in range(20)
    }
    holdfast.save(tensors, tmp_path / name)
    gc.collect()
    with holdfast.open(tmp_path / name) as checkpoint:
        for key, want in tensors.items():
            assert torch.equal(checkpoint.tree[key].torch().int_repr(), want.int_repr())
