"""The description of a sharded checkpoint to and from torch's classes, and the same dataclasses on both sides."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as theirs
from torch.distributed.checkpoint.filesystem import _StorageInfo

import holdfast
from holdfast import metadata as ours
from holdfast.core.dtype import DTYPES
from holdfast.core.opaque import Global
from holdfast.errors import Unsupported
from holdfast.torch import versions
from holdfast.torch.ranks.sharding_metadata import metadata_from_torch, metadata_to_torch
from tests.support import ALONE, until

CLASSES = theirs.__all__

TORCH_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
TORCH_LAYOUTS = [value for value in vars(torch).values() if isinstance(value, torch.layout)]
TORCH_FORMATS = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.memory_format)}, key=str
)


@dataclasses.dataclass
class Elsewhere:
    """What a writer of another kind notes about a file."""

    path: str
    shape: torch.Size


# The same classes on both sides.


LACKING = {
    "Metadata": [] if versions.VERSIONED else ["version"],
    "TensorProperties": [] if versions.STRIDES else ["strides"],
}
"""Fields that this torch does not have yet, by class. They are the last ones."""


@pytest.mark.parametrize("name", CLASSES)
def test_fields_and_defaults_are_torchs(name):
    here, there = inspect.signature(getattr(ours, name)), inspect.signature(getattr(theirs, name))
    lacking = LACKING.get(name, [])
    assert list(here.parameters) == [*there.parameters, *lacking]
    here = here.replace(parameters=[p for p in here.parameters.values() if p.name not in lacking])
    assert [p.kind for p in here.parameters.values()] == [p.kind for p in there.parameters.values()]
    for parameter in set(here.parameters) - {"dtype"}:
        mine, other = here.parameters[parameter].default, there.parameters[parameter].default
        assert repr(mine) == repr(other) or metadata_to_torch(mine) == other
    compared = [(f.name, f.compare) for f in dataclasses.fields(getattr(ours, name))]
    assert compared == [
        *((f.name, f.compare) for f in dataclasses.fields(getattr(theirs, name))),
        *((each, True) for each in lacking),
    ]
    hashable = getattr(theirs, name).__hash__ is not None
    assert (getattr(ours, name).__hash__ is not None) == hashable


@pytest.mark.parametrize(
    "make",
    [
        lambda m: m.TensorStorageMetadata(),
        lambda m: m.ChunkStorageMetadata((0,)),
        lambda m: m.TensorProperties(1, 2, 3, 4, 5, 6, 7),
        lambda m: m.Metadata(),
        lambda m: m.MetadataIndex("w", "ab"),
        lambda m: m.MetadataIndex("w", (1.5,)),
        lambda m: m.MetadataIndex("w", 3),
        lambda m: hash(m.ChunkStorageMetadata((0,), (1,))),
        lambda m: setattr(m.MetadataIndex("w"), "fqn", "v"),
        lambda m: m.TensorProperties(memory_format=7).__getstate__(),
        lambda m: m.TensorProperties().__setstate__((1, 2, 3, 0, 5)),
        lambda m: m.TensorProperties().__setstate__((1, 2)),
    ],
)
def test_the_same_mistakes_raise_the_same_errors(make):
    with pytest.raises(Exception) as theirs_raised:
        make(theirs)
    with pytest.raises(theirs_raised.type):
        make(ours)


def test_sizes_equal_torchs_in_both_directions():
    chunk, there = ours.ChunkStorageMetadata([1, 2], (3, 4)), torch.Size([1, 2])
    assert chunk.offsets == there
    assert there == chunk.offsets
    assert ours.ChunkStorageMetadata(there, torch.Size([3, 4])) == chunk
    assert hash(ours.MetadataIndex("w", there)) == hash(theirs.MetadataIndex("w", there))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3),
        torch.zeros(2, requires_grad=True),
        torch.zeros(2, dtype=torch.float8_e4m3fn),
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.zeros(2, 3).to_sparse(),
        pytest.param(torch.zeros(2, 3).to_sparse_csr(), marks=until(versions.STRIDES)),
        torch.zeros(2, 3, device="meta"),
        torch.nn.Parameter(torch.zeros(2)),
    ],
    ids=str,
)
def test_properties_of_a_tensor_are_those_that_torch_finds(tensor):
    assert metadata_to_torch(
        ours.TensorProperties.create_from_tensor(tensor)
    ) == theirs.TensorProperties.create_from_tensor(tensor)


# Conversion.


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype_goes_and_comes_back(dtype):
    assert metadata_to_torch(metadata_from_torch(dtype)) is dtype


@pytest.mark.parametrize("layout", TORCH_LAYOUTS, ids=str)
def test_every_layout_goes_and_comes_back(layout):
    assert metadata_to_torch(metadata_from_torch(layout)) is layout
    assert metadata_from_torch(layout) in ours.Layout


@pytest.mark.parametrize("memory_format", TORCH_FORMATS, ids=str)
def test_every_memory_format_goes_and_comes_back(memory_format):
    here = metadata_from_torch(memory_format)
    assert metadata_to_torch(here) is memory_format
    assert str(memory_format) == f"torch.{here}"
    assert ours.MemoryFormat.from_name(str(here)) is here


def test_memory_formats_have_torchs_numbers():
    for encoding in theirs._MEM_FORMAT_ENCODING:
        properties = theirs.TensorProperties()
        properties.__setstate__((torch.float32, torch.strided, False, encoding, False))
        assert metadata_from_torch(properties).memory_format.value == encoding.value


def test_torchs_pickled_state_sets_ours_and_back():
    there = theirs.TensorProperties(torch.int64, torch.strided, True, torch.channels_last, True)
    here = ours.TensorProperties()
    dtype, layout, *rest = there.__getstate__()
    here.__setstate__((metadata_from_torch(dtype), metadata_from_torch(layout), *rest))
    assert here == metadata_from_torch(there)


def test_a_dtype_without_a_row_is_kept_by_its_name(monkeypatch):
    # torch 2.13 has none; the next may. A row is taken away to stand for it.
    monkeypatch.delitem(DTYPES._by_torch, "bfloat16")
    here = metadata_from_torch(torch.bfloat16)
    assert here == Global("torch", "bfloat16")
    assert metadata_to_torch(here) is torch.bfloat16
    tensor = torch.zeros(2, dtype=torch.bfloat16)
    properties = ours.TensorProperties.create_from_tensor(tensor)
    assert metadata_to_torch(properties) == theirs.TensorProperties.create_from_tensor(tensor)


@pytest.mark.parametrize("name", ["float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"])
def test_a_dtype_that_torch_lacks_is_refused(name):
    with pytest.raises(Unsupported, match=name):
        metadata_to_torch(ours.TensorProperties(DTYPES.name(name)))


@pytest.mark.parametrize(
    "dtype", [Global("os", "system"), Global("torch", "save"), Global("torch", "nothing")]
)
def test_a_name_that_is_no_dtype_is_refused(dtype):
    with pytest.raises(Unsupported):
        metadata_to_torch(dtype)


@pytest.mark.parametrize("convert", [metadata_to_torch, metadata_from_torch])
@pytest.mark.parametrize(
    "value", [3, "text", None, object()], ids=lambda value: type(value).__name__
)
def test_what_is_neither_is_a_type_error(convert, value):
    with pytest.raises(TypeError):
        convert(value)


def properties(index: int) -> theirs.TensorProperties:
    return theirs.TensorProperties(
        TORCH_DTYPES[index], TORCH_LAYOUTS[0], True, torch.channels_last_3d, True
    )


WHOLE = theirs.Metadata(
    {
        "w": theirs.TensorStorageMetadata(
            properties(3),
            torch.Size([4, 3]),
            [theirs.ChunkStorageMetadata(torch.Size([i, 0]), torch.Size([1, 3])) for i in range(4)],
        ),
        "scalar": theirs.TensorStorageMetadata(
            properties(1),
            torch.Size([]),
            [theirs.ChunkStorageMetadata(torch.Size([]), torch.Size([]))],
        ),
        "step": theirs.BytesStorageMetadata(),
    },
    {"w": ("model", "w"), "scalar": ("list", 0), "step": ("step",)},
    {
        theirs.MetadataIndex("w", [0, 0], 0): _StorageInfo("__0_0.distcp", 1, 2, ["stream.zstd/1"]),
        theirs.MetadataIndex("w", [1, 0], 1): _StorageInfo("__1_0.distcp", 3, 4),
        theirs.MetadataIndex("step"): _StorageInfo("__0_0.distcp", 5, 6),
        theirs.MetadataIndex("hf", [0]): Elsewhere("model.safetensors", torch.Size([3])),
    },
    theirs.StorageMeta("somewhere", "save", "load", ["module"]),
    *(["1.0.0"] if versions.VERSIONED else []),
)


def test_everything_goes_and_comes_back():
    here = metadata_from_torch(WHOLE)
    assert metadata_to_torch(here) == WHOLE
    assert metadata_from_torch(metadata_to_torch(here)) == here
    assert [index.index for index in metadata_to_torch(here).storage_data] == [0, 1, None, None]
    assert {type(value) for value in here.state_dict_metadata.values()} == {
        ours.TensorStorageMetadata,
        ours.BytesStorageMetadata,
    }
    assert here.storage_data[ours.MetadataIndex("w", (1, 0))] == ours.StorageInfo(
        "__1_0.distcp", 3, 4
    )


@pytest.mark.parametrize(
    ("planner_data", "storage_data"), [(None, None), ("what it likes", ("a", "b")), ([1, 2], [3])]
)
def test_what_others_keep_there_is_handed_over(planner_data, storage_data):
    there = theirs.Metadata({}, planner_data, storage_data)
    here = metadata_from_torch(there)
    assert (here.planner_data, here.storage_data) == (planner_data, storage_data)
    assert metadata_to_torch(here) == there


def test_metadata_of_an_old_file_has_no_storage_meta():
    there = theirs.Metadata({})
    del there.__dict__["storage_meta"]
    if versions.VERSIONED:
        del there.__dict__["version"]
    assert metadata_from_torch(there).storage_meta is None


def test_a_directory_that_torch_wrote(tmp_path):
    state = {
        "w": torch.arange(6.0).view(2, 3),
        "step": 3,
        "nested": {"list": [torch.zeros(2, dtype=torch.int8), "text"]},
    }
    dcp.save(state, checkpoint_id=tmp_path, **ALONE)
    there = dcp.FileSystemReader(tmp_path).read_metadata()
    here = metadata_from_torch(there)
    assert metadata_to_torch(here) == there
    index = ours.MetadataIndex("w", (0, 0))
    assert ours.find_chunk(here.state_dict_metadata["w"], index).sizes == (2, 3)
    assert here.storage_data[index].relative_path == "__0_0.distcp"


def test_a_checkpoint_of_another_format_is_described_to_torch(tmp_path):
    state = {"w": torch.arange(6.0).view(2, 3), "p": torch.nn.Parameter(torch.zeros(2)), "step": 3}
    torch.save(state, tmp_path / "a.pt")
    with holdfast.open(tmp_path / "a.pt") as ckpt:
        there = metadata_to_torch(ckpt.describe())
    assert there.state_dict_metadata["w"].size == torch.Size([2, 3])
    for name in ("w", "p"):
        wanted = theirs.TensorProperties.create_from_tensor(state[name])
        if versions.STRIDES:
            wanted.strides = None  # those that a directory of DCP notes are kept, and no others
        assert there.state_dict_metadata[name].properties == wanted
    assert there.state_dict_metadata["step"] == theirs.BytesStorageMetadata()


def test_a_directory_that_torch_wrote_is_described_alike(tmp_path):
    state = {
        "w": torch.arange(6.0).view(2, 3),
        "step": 3,
        "nested": {"list": [torch.zeros(2, dtype=torch.int8), "text"]},
    }
    dcp.save(state, checkpoint_id=tmp_path, **ALONE)
    there = dcp.FileSystemReader(tmp_path).read_metadata()
    with holdfast.open(tmp_path) as ckpt:
        here = ckpt.describe()
    assert metadata_to_torch(here).state_dict_metadata == there.state_dict_metadata
    assert here.planner_data == there.planner_data
