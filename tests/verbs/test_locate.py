"""Paths that stand for a checkpoint that is elsewhere: an index stands for its folder, a hub cache folder for its snapshot."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import holdfast
from holdfast.errors import (
    HeaderError,
    NoSuchPath,
    NotCommitted,
    StoreError,
    UnsafePath,
    Unsupported,
)

INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"
REVISION = "a" * 40


def write_shards(folder: Path, stem: str = "model", value: float = 1.0) -> Path:
    """Write a sharded checkpoint of two tensors, and return its index."""
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for number, name in enumerate("ab", start=1):
        file = f"{stem}-{number:05}-of-00002.safetensors"
        save_file({name: np.full(3, value, np.float32)}, folder / file)
        weight_map[name] = file
    index = folder / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 24}, "weight_map": weight_map}))
    return index


def write_cached_model(cache: Path, *, revision: str = REVISION, ref: str | None = "main") -> Path:
    """Write a folder as the hub's client does: files are links into `blobs`."""
    folder = cache / "models--org--name"
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    blob = folder / "blobs" / f"{revision}blob"
    save_file({"w": np.arange(4, dtype=np.float32)}, blob)
    (snapshot / "model.safetensors").symlink_to(os.path.relpath(blob, snapshot))
    (snapshot / "config.json").write_text("{}")
    if ref is not None:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / ref).write_text(revision)
    return folder


def test_an_index_opens_its_folder(tmp_path):
    index = write_shards(tmp_path / "m")
    with holdfast.open(index) as checkpoint:
        assert list(checkpoint) == ["a", "b"]
        assert checkpoint.format == "safetensors-dir"
        assert checkpoint.path == str(tmp_path / "m")


def test_an_index_of_torch_files_opens_its_folder_although_safetensors_lie_there(tmp_path):
    folder = tmp_path / "m"
    write_shards(folder)
    torch.save({"t": torch.ones(2)}, folder / "pytorch_model.bin")
    (folder / BIN_INDEX).write_text(json.dumps({"weight_map": {"t": "pytorch_model.bin"}}))
    with holdfast.open(folder / BIN_INDEX) as checkpoint:
        assert list(checkpoint) == ["t"]
        assert checkpoint.format == "torch-dir"
    with holdfast.open(folder / INDEX) as checkpoint:
        assert list(checkpoint) == ["a", "b"]


def test_the_index_that_was_named_counts_among_several(tmp_path):
    write_shards(tmp_path / "m", value=1.0)
    named = write_shards(tmp_path / "m", stem="model.fp16", value=2.0)
    with holdfast.open(named) as checkpoint:
        assert checkpoint["a"].numpy().tolist() == [2.0, 2.0, 2.0]
        again = pickle.loads(pickle.dumps(checkpoint))
        assert again["a"].numpy().tolist() == [2.0, 2.0, 2.0]


def test_an_index_opens_its_folder_from_the_working_directory(tmp_path, monkeypatch):
    write_shards(tmp_path / "m")
    monkeypatch.chdir(tmp_path / "m")
    with holdfast.open(INDEX) as checkpoint:
        assert list(checkpoint) == ["a", "b"]


def test_an_index_without_its_shards_names_them(tmp_path):
    index = write_shards(tmp_path / "m")
    for shard in (tmp_path / "m").glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(StoreError, match="model-00001-of-00002"):
        holdfast.open(index)


def test_an_index_that_is_not_there_is_no_such_path(tmp_path):
    write_shards(tmp_path / "m").unlink()
    with pytest.raises(NoSuchPath):
        holdfast.open(tmp_path / "m" / INDEX)


@pytest.mark.parametrize("verb", ["verify", "convert", "copy", "edit"])
def test_verbs_take_an_index_for_its_folder(tmp_path, verb):
    index = write_shards(tmp_path / "m")
    if verb == "verify":
        report = holdfast.verify(index)
        assert report.ok
        assert len(report.files) == 2
    elif verb == "convert":
        holdfast.convert(index, tmp_path / "out.safetensors")
        assert list(holdfast.open(tmp_path / "out.safetensors")) == ["a", "b"]
    elif verb == "copy":
        holdfast.copy(index, tmp_path / "copy")
        assert (tmp_path / "copy" / INDEX).is_file()
        assert list(holdfast.open(tmp_path / "copy")) == ["a", "b"]
    else:
        holdfast.edit(index, in_place=True, drop="b")
        assert list(holdfast.open(tmp_path / "m")) == ["a"]


def test_an_index_in_a_bucket_opens_its_prefix():
    obstore = pytest.importorskip("obstore")
    client = obstore.store.MemoryStore()
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    shard = len(header).to_bytes(8, "little") + header + bytes(4)
    index = json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}).encode()
    obstore.put(client, "m/model-00001-of-00001.safetensors", shard)
    obstore.put(client, f"m/{INDEX}", index)
    obstore.put(client, "m/config.json", b"{}")
    with holdfast.open(f"m/{INDEX}", store=client) as checkpoint:
        assert list(checkpoint) == ["a"]
        assert checkpoint.format == "safetensors-dir"


def test_a_hub_cache_folder_opens_the_snapshot_of_its_ref(tmp_path):
    folder = write_cached_model(tmp_path)
    write_cached_model(tmp_path, revision="b" * 40, ref=None)
    with holdfast.open(folder) as checkpoint:
        assert checkpoint.path == str(folder / "snapshots" / REVISION)
        assert checkpoint["w"].numpy().tolist() == [0, 1, 2, 3]


def test_a_hub_cache_folder_opens_the_only_ref(tmp_path):
    folder = write_cached_model(tmp_path, ref="v1.0")
    assert list(holdfast.open(folder)) == ["w"]


def test_a_hub_cache_folder_without_refs_opens_its_only_snapshot(tmp_path):
    folder = write_cached_model(tmp_path, ref=None)
    assert list(holdfast.open(folder)) == ["w"]


def test_a_hub_cache_folder_opens_from_inside(tmp_path, monkeypatch):
    monkeypatch.chdir(write_cached_model(tmp_path))
    assert list(holdfast.open(".")) == ["w"]


def test_a_hub_cache_folder_with_several_refs_and_no_main_is_refused(tmp_path):
    write_cached_model(tmp_path, ref="v1")
    folder = write_cached_model(tmp_path, revision="b" * 40, ref="v2")
    with pytest.raises(Unsupported, match="several refs"):
        holdfast.open(folder)


def test_a_hub_cache_folder_with_several_snapshots_and_no_ref_is_refused(tmp_path):
    write_cached_model(tmp_path, ref=None)
    folder = write_cached_model(tmp_path, revision="b" * 40, ref=None)
    with pytest.raises(Unsupported, match="2 snapshots"):
        holdfast.open(folder)


def test_a_ref_to_a_missing_snapshot_says_so(tmp_path):
    folder = write_cached_model(tmp_path)
    (folder / "refs" / "main").write_text("c" * 40)
    with pytest.raises(NoSuchPath, match="download the model again"):
        holdfast.open(folder)


@pytest.mark.parametrize(
    "ref", ["../../../etc", "..", ".", "", "a/b", "a\\b", "a\0b", "x" * 1000, "\x1b[31m"]
)
def test_a_ref_that_is_no_plain_name_is_refused(tmp_path, ref):
    folder = write_cached_model(tmp_path)
    (folder / "refs" / "main").write_bytes(ref.encode())
    with pytest.raises(HeaderError, match="name of a snapshot"):
        holdfast.open(folder)


def test_a_snapshot_that_is_a_link_out_of_the_folder_is_refused(tmp_path):
    folder = write_cached_model(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    save_file({"secret": np.ones(1)}, elsewhere / "model.safetensors")
    (folder / "snapshots" / ("d" * 40)).symlink_to(elsewhere)
    (folder / "refs" / "main").write_text("d" * 40)
    with pytest.raises(UnsafePath):
        holdfast.open(folder)


def test_a_ref_that_is_a_link_out_of_the_folder_is_refused(tmp_path):
    folder = write_cached_model(tmp_path)
    (tmp_path / "elsewhere").write_text(REVISION)
    (folder / "refs" / "main").unlink()
    (folder / "refs" / "main").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePath):
        holdfast.open(folder)


def test_an_edit_in_place_of_a_hub_cache_folder_is_refused_and_changes_nothing(tmp_path):
    folder = write_cached_model(tmp_path)
    with pytest.raises(NotCommitted, match="the link"):
        holdfast.edit(folder, in_place=True, set_metadata={"k": "v"})
    assert sorted(os.listdir(folder)) == ["blobs", "refs", "snapshots"]
    with holdfast.open(folder) as checkpoint:
        assert checkpoint.metadata == {}


def test_a_scan_of_an_index_scans_the_files_of_its_folder(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    index = folder / BIN_INDEX
    index.write_text(json.dumps({"weight_map": {"t": "pytorch_model.bin"}}))
    for path in (index, folder):
        report = holdfast.scan(path)
        assert report.verdict() == "dangerous"
        assert [Path(file.path).name for file in report.reports] == ["pytorch_model.bin"]
        assert [Path(skipped).name for skipped in report.skipped_paths] == [BIN_INDEX]
