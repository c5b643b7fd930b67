"""`holdfast.metadata` without torch, and what `Checkpoint.describe()` returns for each format."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from collections import OrderedDict
from enum import Enum

import ml_dtypes
import numpy as np
import pytest
from tests.hostile.craft_pickle import POP, dict_of, get, integer, list_of, put, stream, text
from tests.hostile.craft_torch import torch_zip

import holdfast
from holdfast.core.dtype import DTYPES
from holdfast.core.opaque import Size
from holdfast.errors import LimitExceeded, Unsupported
from holdfast.metadata import (
    BytesStorageMetadata,
    ChunkLookup,
    ChunkStorageMetadata,
    Layout,
    MemoryFormat,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    find_chunk,
)

F32, I64 = DTYPES.name("float32"), DTYPES.name("int64")


def make_row_chunks(count: int) -> TensorStorageMetadata:
    """Return a tensor of `count` rows, each of which is a chunk."""
    return TensorStorageMetadata(
        TensorProperties(), (count, 3), [ChunkStorageMetadata((i, 0), (1, 3)) for i in range(count)]
    )


class CountedChunk:
    """A chunk that counts how often the offsets of all such chunks are read."""

    read_count = 0

    def __init__(self, offsets, sizes):
        self.sizes, self._offsets = sizes, offsets

    @property
    def offsets(self):
        CountedChunk.read_count += 1
        return self._offsets


# Values.


def test_the_module_does_not_import_torch():
    code = "import sys, holdfast.metadata; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("numbers", [(2, 3), [2, 3], Size((2, 3)), range(2, 4), np.array([2, 3])])
def test_a_size_may_be_any_sequence_of_integers(numbers):
    chunk = ChunkStorageMetadata(numbers, numbers)
    assert chunk.offsets == (2, 3)
    assert chunk == ChunkStorageMetadata((2, 3), (2, 3))
    assert all(type(n) is int for n in chunk.sizes)
    assert TensorStorageMetadata(TensorProperties(), numbers, []).size == (2, 3)
    assert MetadataIndex("w", numbers) == MetadataIndex("w", (2, 3))


@pytest.mark.parametrize("numbers", [("2", "3"), (1.5,), 3, None])
def test_another_size_is_a_type_error(numbers):
    with pytest.raises(TypeError):
        ChunkStorageMetadata(numbers, (1,))


def test_a_chunk_converts_to_a_box_and_back():
    box = holdfast.Box((1, 2), (3, 5))
    assert ChunkStorageMetadata.from_box(box) == ChunkStorageMetadata((1, 2), (2, 3))
    assert ChunkStorageMetadata.from_box(box).box == box
    with pytest.raises(ValueError, match="start"):
        _ = ChunkStorageMetadata((-1,), (2,)).box


def test_indexes_with_different_hints_are_equal():
    index = MetadataIndex("w", (0, 3), 1)
    index_without_hint = MetadataIndex("w", (0, 3))
    assert index == index_without_hint
    assert hash(index) == hash(index_without_hint)
    assert index != MetadataIndex("w", (0, 4), 1)
    assert index != MetadataIndex("w")


def test_an_index_cannot_be_changed():
    index = MetadataIndex("w", (0, 3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        index.fqn = "v"


EVERYTHING = Metadata(
    {"w": make_row_chunks(2), "step": BytesStorageMetadata()},
    {"w": ("w",), "step": ("step",)},
    {MetadataIndex("w", (0, 0), 0): StorageInfo("__0_0.distcp", 10, 20, ["stream.zstd/1"])},
    StorageMeta("here", "a", "b", ["m"]),
    "1.0.0",
)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_can_be_pickled_and_copied(protocol):
    again = pickle.loads(pickle.dumps(EVERYTHING, protocol))
    assert again == EVERYTHING
    assert next(iter(again.storage_data)).index == 0
    assert copy.deepcopy(EVERYTHING) == EVERYTHING
    assert find_chunk(again.state_dict_metadata["w"], MetadataIndex("w", (1, 0))).offsets == (1, 0)


# Properties.


def test_properties_are_pickled_as_six_values_with_an_enum():
    properties = TensorProperties(
        I64, Layout.SPARSE_COO, True, MemoryFormat.CHANNELS_LAST, True, (3, 1)
    )
    state = properties.__getstate__()
    assert state == (I64, Layout.SPARSE_COO, True, MemoryFormat.CHANNELS_LAST, True, (3, 1))
    again = TensorProperties()
    again.__setstate__(state)
    assert again == properties


def test_properties_of_torch_before_2_15_have_no_strides():
    properties = TensorProperties(strides=(1,))
    properties.__setstate__((I64, Layout.STRIDED, True, MemoryFormat.PRESERVE, False))
    assert properties == TensorProperties(I64, Layout.STRIDED, True, MemoryFormat.PRESERVE, False)


def test_the_enum_of_torch_becomes_a_memory_format():
    theirs = Enum("_MEM_FORMAT_ENCODING", {"TORCH_CHANNELS_LAST": 1})
    properties = TensorProperties()
    properties.__setstate__((I64, Layout.STRIDED, False, theirs.TORCH_CHANNELS_LAST, False))
    assert properties.memory_format is MemoryFormat.CHANNELS_LAST


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ((F32, Layout.STRIDED, False, 1, False), RuntimeError),
        ((F32, Layout.STRIDED, False, Layout.STRIDED, False), RuntimeError),
        ((F32, Layout.STRIDED, False, MemoryFormat.CONTIGUOUS), ValueError),
        ((F32,) * 7, ValueError),
    ],
)
def test_an_invalid_pickled_state_raises_the_error_of_torch(state, error):
    with pytest.raises(error):
        TensorProperties().__setstate__(state)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, ml_dtypes.bfloat16, ">f4"])
def test_properties_of_an_array_have_its_dtype(dtype):
    array = np.zeros((2, 3), dtype)
    expected = DTYPES.numpy(array.dtype)
    assert TensorProperties.create_from_tensor(array) == TensorProperties(expected)


def test_an_array_of_objects_has_no_properties():
    with pytest.raises(Unsupported):
        TensorProperties.create_from_tensor(np.array([object()]))


def test_properties_of_a_lazy_tensor_have_its_dtype(tmp_path):
    holdfast.save({"w": np.zeros(3, np.int64)}, tmp_path / "a", format="native")
    with holdfast.open(tmp_path / "a") as ckpt:
        assert TensorProperties.create_from_tensor(ckpt["w"]) == TensorProperties(I64)


# Finding a chunk.


def test_a_chunk_is_found_by_its_offset():
    w = make_row_chunks(5)
    assert find_chunk(w, MetadataIndex("w", (3, 0))) is w.chunks[3]
    assert find_chunk(w, MetadataIndex("w", (3, 0), 3)) is w.chunks[3]


@pytest.mark.parametrize("hint", [0, 4, 5, 10**9, -1, -2])
def test_a_chunk_is_found_with_a_wrong_hint(hint):
    w = make_row_chunks(5)
    assert find_chunk(w, MetadataIndex("w", (3, 0), hint)) is w.chunks[3]


def test_a_negative_hint_is_ignored():
    # With two chunks at one offset the hint would decide; -1 is no position.
    w = TensorStorageMetadata(
        TensorProperties(),
        (2,),
        [ChunkStorageMetadata((0,), (2,)), ChunkStorageMetadata((0,), (1,))],
    )
    assert find_chunk(w, MetadataIndex("w", (0,), 1)) is w.chunks[1]
    assert find_chunk(w, MetadataIndex("w", (0,), -1)) is w.chunks[0]


@pytest.mark.parametrize("offset", [None, (9, 0), (0,), (0, 0, 0)])
def test_a_missing_chunk_is_a_value_error(offset):
    with pytest.raises(ValueError, match="'w' has 5 chunks"):
        find_chunk(make_row_chunks(5), MetadataIndex("w", offset))


@pytest.mark.parametrize("has_hint", [False, True])
def test_finding_all_chunks_takes_linear_time(has_hint):
    count = 300
    chunks = [CountedChunk((i,), (1,)) for i in range(count)]
    lookup = ChunkLookup()
    CountedChunk.read_count = 0
    for i in range(count):
        index = MetadataIndex("w", (i,), i if has_hint else None)
        assert lookup.find(chunks, index) == i
    assert CountedChunk.read_count <= 3 * count


def test_chunks_are_found_after_the_list_changed():
    w = make_row_chunks(3)
    assert find_chunk(w, MetadataIndex("w", (2, 0))).offsets == (2, 0)
    w.chunks.append(ChunkStorageMetadata((7, 0), (1, 3)))
    assert find_chunk(w, MetadataIndex("w", (7, 0))) is w.chunks[3]
    w.chunks = [ChunkStorageMetadata((i, 0), (1, 3)) for i in (8, 9, 10, 11)]
    assert find_chunk(w, MetadataIndex("w", (9, 0))) is w.chunks[1]
    with pytest.raises(ValueError, match="none is at"):
        find_chunk(w, MetadataIndex("w", (7, 0)))
    w.chunks[0], w.chunks[1] = w.chunks[1], w.chunks[0]
    assert find_chunk(w, MetadataIndex("w", (9, 0))) is w.chunks[0]
    w.chunks[0] = ChunkStorageMetadata((20, 0), (1, 3))
    assert find_chunk(w, MetadataIndex("w", (20, 0))) is w.chunks[0]


def test_a_chunk_with_elements_is_preferred_to_an_empty_one():
    w = TensorStorageMetadata(
        TensorProperties(),
        (2,),
        [ChunkStorageMetadata((0,), (0,)), ChunkStorageMetadata((0,), (2,))],
    )
    for hint in (None, 0, 1):
        assert find_chunk(w, MetadataIndex("w", (0,), hint)) is w.chunks[1]
    w.chunks.pop()
    assert find_chunk(w, MetadataIndex("w", (0,))) is w.chunks[0]


# `Checkpoint.describe()`.

STATE = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "opt": {"step": 3, "groups": [{"lr": 0.1, "params": [0, 1]}], "betas": (0.9, 0.99)},
    "pair": (np.zeros(2, np.int64), "text"),
    "nothing": {},
    "none": None,
}

NAMES = {
    "w": True,
    "opt.step": False,
    "opt.groups.0.lr": False,
    "opt.groups.0.params": False,
    "opt.betas": False,
    "pair.0": True,
    "pair.1": False,
    "nothing": False,
    "none": False,
}


@pytest.mark.parametrize("format", ["native", "torch-zip"])
def test_describe_lists_every_tensor_and_value(tmp_path, format):
    holdfast.save(STATE, tmp_path / "a", format=format)
    with holdfast.open(tmp_path / "a") as ckpt:
        metadata = ckpt.describe()
        listed = metadata.state_dict_metadata
        assert {
            name: isinstance(each, TensorStorageMetadata) for name, each in listed.items()
        } == NAMES
        w = listed["w"]
        assert (w.properties.dtype, w.size) == (F32, (3, 4))
        assert w.chunks == [ChunkStorageMetadata((0, 0), (3, 4))]
        assert metadata.planner_data["opt.groups.0.lr"] == ("opt", "groups", 0, "lr")
        assert metadata.planner_data["pair.0"] == ("pair", 0)
        assert metadata.storage_meta == StorageMeta(ckpt.path)


@pytest.mark.parametrize("format", ["native", "torch-zip", "safetensors"])
def test_described_ranges_have_the_bytes_of_the_tensors(tmp_path, format):
    tensors = {
        "w": STATE["w"],
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(7, np.int64),
    }
    path = tmp_path / "a"
    holdfast.save(tensors, path, format=format)
    with holdfast.open(path) as ckpt:
        for index, place in ckpt.describe().storage_data.items():
            file = path / place.relative_path if path.is_dir() else path
            stored = file.read_bytes()[place.offset : place.offset + place.length]
            assert stored == tensors[index.fqn].tobytes()
            assert (
                find_chunk(ckpt.describe().state_dict_metadata[index.fqn], index).offsets
                == index.offset
            )


def test_metadata_entries_of_a_file_are_a_copyable_dict(tmp_path):
    holdfast.save(
        {"w": STATE["w"]}, tmp_path / "a", format="safetensors", metadata={"licence": "mit"}
    )
    with holdfast.open(tmp_path / "a") as ckpt:
        assert ckpt.metadata["licence"] == "mit"
        assert dict(ckpt.metadata) == ckpt.metadata == {"format": "pt", "licence": "mit"}
        assert (
            copy.deepcopy(ckpt.metadata)
            == pickle.loads(pickle.dumps(ckpt.metadata))
            == ckpt.metadata
        )
        assert ckpt.describe() == ckpt.describe()


def test_equal_names_get_a_number(tmp_path):
    holdfast.save({"a.b": 1, "a": {"b": 2}}, tmp_path / "a", format="native")
    with holdfast.open(tmp_path / "a") as ckpt:
        metadata = ckpt.describe()
        assert metadata.planner_data == {"a.b": ("a.b",), "a.b#2": ("a", "b")}


def test_a_state_that_is_one_value_has_a_name(tmp_path):
    holdfast.save(5, tmp_path / "a", format="torch-zip")
    with holdfast.open(tmp_path / "a") as ckpt:
        assert ckpt.describe().state_dict_metadata == {"value": BytesStorageMetadata()}


def test_a_shared_container_is_listed_once(tmp_path):
    inner = {"x": 1}
    holdfast.save({"one": inner, "two": inner}, tmp_path / "a", format="torch-zip")
    with holdfast.open(tmp_path / "a") as ckpt:
        assert list(ckpt.describe().state_dict_metadata) == ["one.x"]


def test_ordered_dicts_are_described_like_dicts(tmp_path):
    holdfast.save(
        OrderedDict(a=OrderedDict(), b=[OrderedDict(c=1)], d=[[], [[2]]]),
        tmp_path / "a",
        format="torch-zip",
    )
    with holdfast.open(tmp_path / "a") as ckpt:
        assert list(ckpt.describe().state_dict_metadata) == ["a", "b.0.c", "d"]


def test_a_tree_with_many_paths_to_few_containers_is_described_once():
    # 2^40 paths, 41 containers.
    tree = dict_of(text("leaf"), integer(1)) + b"".join(
        put(i) + POP + list_of(get(i), get(i)) for i in range(40)
    )
    with holdfast.open(torch_zip(stream(dict_of(text("t"), tree)))) as ckpt:
        assert len(ckpt.describe().state_dict_metadata) == 1


def test_names_that_are_too_long_together_are_refused(tmp_path):
    # One long key stands in the name of everything below it.
    holdfast.save(
        {"k" * 300_000: {str(i): i for i in range(100)}}, tmp_path / "a", format="torch-zip"
    )
    with holdfast.open(tmp_path / "a") as ckpt, pytest.raises(LimitExceeded):
        ckpt.describe()


def test_golden_files_are_described(golden):
    with holdfast.open(golden) as ckpt:
        metadata = ckpt.describe()
    for name, tensor in ckpt.items():
        listed = metadata.state_dict_metadata[name]
        assert listed.size == tensor.shape
        assert [chunk.box for chunk in listed.chunks] == [chunk.box for chunk in tensor.chunks]
    assert set(metadata.planner_data) == set(metadata.state_dict_metadata)
    assert {index.fqn for index in metadata.storage_data} <= set(ckpt)
