"""`holdfast.edit`: in place and beside, every format that can be written."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import CannotHold, NotCommitted, Unsupported


def made(path, **options) -> None:
    holdfast.save(
        {"m": {"w": np.ones((3, 2), np.float32), "b": np.zeros(3, np.float32)}}, path, **options
    )


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a"])
def test_in_place(name, tmp_path):
    made(tmp_path / name)
    done = holdfast.edit(
        tmp_path / name, in_place=True, rename=[("m.*", "*")], drop=["*.b"], dtype="f16"
    )
    assert done.path == str(tmp_path / name)
    with holdfast.open(tmp_path / name) as ckpt:
        assert {n: (t.dtype.name, t.shape) for n, t in ckpt.items()} == {"w": ("float16", (3, 2))}
    assert os.listdir(tmp_path) == [name]


def test_shards_in_place(tmp_path):
    made(tmp_path / "a", format="safetensors", max_shard_size=16)
    assert len(os.listdir(tmp_path / "a")) == 3
    holdfast.edit(tmp_path / "a", in_place=True, drop=["m.b"])
    assert os.listdir(tmp_path / "a") == ["model.safetensors"]
    with holdfast.open(tmp_path / "a") as ckpt:
        assert list(ckpt) == ["m.w"]


def test_other_files_of_a_folder_stay(tmp_path):
    made(tmp_path / "a")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    holdfast.edit(tmp_path / "a", in_place=True, drop=["m.b"])
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    with holdfast.open(tmp_path / "a") as ckpt:
        assert len(ckpt) == 1


def test_a_folder_with_folders_is_not_replaced(tmp_path):
    made(tmp_path / "a")
    (tmp_path / "a" / "runs").mkdir()
    with pytest.raises(NotCommitted, match="'runs'"):
        holdfast.edit(tmp_path / "a", in_place=True, drop=["m.b"])
    with holdfast.open(tmp_path / "a") as ckpt:
        assert len(ckpt) == 2


@pytest.mark.parametrize("name", ["a.safetensors", "a"])
def test_metadata(name, tmp_path):
    made(tmp_path / name, metadata={"author": "me", "licence": "mit"})
    holdfast.edit(
        tmp_path / name,
        in_place=True,
        set_metadata={"licence": "apache-2.0", "step": "7"},
        unset_metadata=["author"],
    )
    with holdfast.open(tmp_path / name) as ckpt:
        assert {k: v for k, v in ckpt.metadata.items() if k != "format"} == {
            "licence": "apache-2.0",
            "step": "7",
        }
        assert len(ckpt) == 2
    with pytest.raises(CannotHold, match="no metadata 'author'"):
        holdfast.edit(tmp_path / name, in_place=True, unset_metadata=["author"])
    with pytest.raises(CannotHold, match="set and taken out"):
        holdfast.edit(
            tmp_path / name, in_place=True, set_metadata={"step": "8"}, unset_metadata=["step"]
        )


def test_what_cannot_be(tmp_path):
    made(tmp_path / "a.pt")
    before = (tmp_path / "a.pt").read_bytes()
    with pytest.raises(Unsupported, match="no place for metadata"):
        holdfast.edit(tmp_path / "a.pt", in_place=True, set_metadata={"a": "b"})
    with pytest.raises(Unsupported, match="nothing to do"):
        holdfast.edit(tmp_path / "a.pt", in_place=True)
    with pytest.raises(CannotHold, match="matches nothing"):
        holdfast.edit(tmp_path / "a.pt", in_place=True, drop=["x"])
    torch.save(
        {"w": torch.ones(1), "b": torch.ones(1)},
        tmp_path / "old.pt",
        _use_new_zipfile_serialization=False,
    )
    with pytest.raises(Unsupported, match="read and not written"):
        holdfast.edit(tmp_path / "old.pt", in_place=True, drop=["w"])
    holdfast.edit(tmp_path / "old.pt", tmp_path / "new.pt", drop=["w"])
    assert list(torch.load(tmp_path / "new.pt", weights_only=True)) == ["b"]
    assert (tmp_path / "a.pt").read_bytes() == before


def test_a_link_stays_a_link(tmp_path):
    made(tmp_path / "a.pt")
    os.symlink("a.pt", tmp_path / "link.pt")
    holdfast.edit(tmp_path / "link.pt", in_place=True, drop=["m.b"])
    assert os.path.islink(tmp_path / "link.pt")
    with holdfast.open(tmp_path / "a.pt") as ckpt:
        assert list(ckpt) == ["m.w"]
