"""What every verb says of a path where nothing is: a `FileNotFoundError` that names it."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import HoldfastError, NoSuchPath, StoreError

Call = Callable[[str, str, Path], object]
"""With what is missing, what is there, and a folder."""

VERBS: dict[str, Call] = {
    "open": lambda missing, there, folder: holdfast.open(missing),
    "convert": lambda missing, there, folder: holdfast.convert(missing, folder / "o.safetensors"),
    "copy": lambda missing, there, folder: holdfast.copy(missing, folder / "o.safetensors"),
    "diff": lambda missing, there, folder: holdfast.diff(missing, there),
    "diff, the other": lambda missing, there, folder: holdfast.diff(there, missing),
    "stats": lambda missing, there, folder: holdfast.stats(missing),
    "sparsity": lambda missing, there, folder: holdfast.sparsity(missing),
    "alias_graph": lambda missing, there, folder: holdfast.alias_graph(missing),
    "report": lambda missing, there, folder: holdfast.report(missing),
    "tie": lambda missing, there, folder: holdfast.tie(missing, folder / "o.pt"),
    "prune": lambda missing, there, folder: holdfast.prune(
        missing, folder / "o.safetensors", {"*": 0.5}
    ),
    "reshard": lambda missing, there, folder: holdfast.reshard(
        missing, folder / "o", mesh={"dp": 2}, rules={"*": "dp=0"}
    ),
    "package": lambda missing, there, folder: holdfast.package({"a": missing}, folder / "o.pt2"),
    "replace_weights": lambda missing, there, folder: holdfast.replace_weights(
        missing, folder / "o.pt2", weights=there
    ),
    "copy_config": lambda missing, there, folder: holdfast.convert(
        there, folder / "hf", format="safetensors", max_shard_size="1GB", copy_config=missing
    ),
    "torch.open": lambda missing, there, folder: holdfast.torch.open(missing),
    "torch.load_into": lambda missing, there, folder: holdfast.torch.load_into(
        torch.nn.Linear(1, 1), missing
    ),
    "torch.slices": lambda missing, there, folder: holdfast.torch.slices(missing),
    "torch.load_full": lambda missing, there, folder: holdfast.torch.load_full(missing),
}

LOCAL: dict[str, Call] = {
    **VERBS,
    "edit": lambda missing, there, folder: holdfast.edit(missing, rename={"a": "b"}),
    "compact": lambda missing, there, folder: holdfast.compact(missing),
    "seal": lambda missing, there, folder: holdfast.seal(missing, step=1),
    "pin": lambda missing, there, folder: holdfast.Run(missing).pin(1),
    "allow": lambda missing, there, folder: holdfast.scan(there, allow=missing),
    "torch.load": lambda missing, there, folder: holdfast.torch.load(missing),
}


def check_missing(call: Call, missing: str, folder: Path) -> None:
    there = str(folder / "there.safetensors")
    holdfast.save({"a": np.ones(3, np.float32)}, there)
    before = sorted(os.listdir(folder))
    with pytest.raises(FileNotFoundError) as caught:
        call(missing, there, folder)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, missing)
    assert caught.value.strerror
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("verb", LOCAL)
def test_a_missing_path(verb: str, tmp_path: Path):
    check_missing(LOCAL[verb], str(tmp_path / "missing.pt2"), tmp_path)


def test_it_is_ours_as_well_and_travels(tmp_path: Path):
    with pytest.raises(NoSuchPath) as caught:
        holdfast.open(tmp_path / "missing")
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, HoldfastError)
    assert isinstance(again, FileNotFoundError)
    assert (again.errno, again.filename, str(again)) == (
        errno.ENOENT,
        str(tmp_path / "missing"),
        str(caught.value),
    )


def test_a_checkpoint_that_lacks_a_file_is_not_missing(tmp_path: Path):
    """Who begins anew where there is none should not do so here."""
    state = {name: np.ones(1000, np.float32) for name in "abc"}
    holdfast.save(state, tmp_path / "hf", format="safetensors", max_shard_size="5KB")
    next(
        path for path in sorted((tmp_path / "hf").iterdir()) if path.suffix == ".safetensors"
    ).unlink()
    with pytest.raises(StoreError) as caught:
        holdfast.open(tmp_path / "hf")
    assert not isinstance(caught.value, FileNotFoundError)
