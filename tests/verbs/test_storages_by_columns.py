"""`nbytes`, `aliases` and `digests` of a checkpoint, which are made of columns, beside those of its tensors one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.core.digest import Digest
from tests.sharing import groups


def state() -> dict[str, object]:
    base = torch.arange(64, dtype=torch.float32)
    return {
        "base": base,
        "tied": base,
        "half": base[:32],
        "strided": base[::2],
        "alone": torch.ones(3, 5, dtype=torch.bfloat16),
        "empty": torch.ones(0, 4),
        "number": torch.tensor(3.0),
        "conjugated": torch.complex(torch.ones(4), torch.ones(4)).conj(),
        "other": torch.arange(7),
    }


@pytest.mark.parametrize("suffix", ["", ".safetensors", ".pt"])
@pytest.mark.parametrize("nested", [False, True])
def test_columns_say_what_tensors_say(suffix: str, nested: bool, tmp_path: Path):
    saved = {"model": state(), "step": 3} if nested else state()
    if suffix == ".safetensors" and nested:
        holdfast.save(saved, tmp_path / f"saved{suffix}", keep_tree=True)
    else:
        holdfast.save(saved, tmp_path / f"saved{suffix}")
    with holdfast.open(tmp_path / f"saved{suffix}") as ckpt:
        tensors = dict(ckpt)
        assert ckpt.nbytes == sum(storage.nbytes for storage in groups(tensors))
        shared = {
            storage: names
            for storage, names in groups(tensors, stored_aliases=True).items()
            if len(names) > 1 and storage.nbytes
        }
        assert [(alias.storage, list(alias.names)) for alias in ckpt.aliases] == list(
            shared.items()
        )
        assert any(
            {f"{'model.' * nested}base", f"{'model.' * nested}tied"} <= set(alias.names)
            for alias in ckpt.aliases
        )
        sums = ckpt.source.digest(list(tensors.values()))
        each = zip(tensors.items(), sums, strict=True)
        assert ckpt.digests() == {
            name: Digest.from_crc32(tensor.dtype, tensor.shape, crc) for (name, tensor), crc in each
        }
