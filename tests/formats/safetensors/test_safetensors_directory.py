"""Several files: with an index, without one, in pieces, and everything that does not fit together."""

from __future__ import annotations

import json

import numpy as np
import pytest
from craft_safetensors import MemorySource, craft, entry, frame, index, shards
from tests.support import needs

from holdfast.core.limits import Limits
from holdfast.errors import (
    HeaderError,
    LimitExceeded,
    MetadataError,
    StoreError,
    Truncated,
    UnknownFormat,
    UnsafePath,
    Unsupported,
)
from holdfast.formats import format_of
from holdfast.formats.safetensors.directory import describe_directory
from holdfast.formats.safetensors.read import describe as describe_safetensors
from holdfast.torch import versions

INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
A = craft({"a": entry("U8", [2], 0, 2)}, 2, {"format": "pt"})
B = craft({"b": entry("U8", [3], 0, 3), "c": entry("U8", [], 3, 4)}, 4, {"format": "pt"})
GOOD = {ONE: A, TWO: B, INDEX: index({"c": TWO, "a": ONE, "b": TWO}, metadata={"total_size": 6})}


def describe(files, limits=None):
    return describe_directory(MemorySource(files, limits))


def test_unknown_fields_of_all_files_are_in_one_note():
    fields = {"strides": [1]}
    files = {
        ONE: craft({"a": {**entry("U8", [2], 0, 2), **fields}}, 2),
        TWO: craft({"b": {**entry("U8", [2], 0, 2), **fields, "scale": 1.5}}, 2),
    }
    description = describe({**files, INDEX: index({"a": ONE, "b": TWO})})
    (note,) = description.notes
    assert '"strides", "scale"' in note


def refused(files, kind, *words):
    with pytest.raises(kind) as caught:
        describe(files)
    for word in words:
        assert word in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([ONE, TWO], True),
        ([ONE, "config.json", "README.md"], True),
        ([INDEX, "config.json"], True),
        (["config.json", "README.md"], False),
        ([ONE, ".metadata"], False),
        ([ONE, "__0_0.distcp"], False),
        (["unet/model.safetensors", "vae/model.safetensors"], False),
        (["._model.safetensors", "pytorch_model.bin"], False),
        ([ONE], False),
        ([], False),
    ],
)
def test_detection(keys, expected):
    assert format_of("safetensors-dir").matches(MemorySource(dict.fromkeys(keys, b""))) is expected


def test_a_folder_of_one_file_is_that_file():
    source = MemorySource({"model.safetensors": A})
    assert format_of("safetensors").matches(source)
    assert list(describe_safetensors(source).tensors) == ["a"]


def test_with_an_index_in_its_order():
    description = describe(
        {**GOOD, "config.json": b"{", "tokenizer.json": b"", "pytorch_model.bin": b"\x80"}
    )
    assert description.format == "safetensors-dir"
    assert list(description.tensors) == ["c", "a", "b"]
    assert len(description.tree) == 3
    assert description.metadata == {"format": "pt"}
    assert description.notes == (
        'beside them lie other weights, which are not read: "pytorch_model.bin"',
    )
    assert description.tensors["b"].numpy().tolist() == [0, 1, 2]
    assert description.tensors["c"].storages[0].key == TWO
    with pytest.raises(KeyError):
        description.tensors["d"]


def test_without_an_index_in_the_order_of_the_files():
    description = describe(
        {TWO: B, ONE: A, "config.json": b"{}", ".hidden.safetensors": b"", "old/x.safetensors": b""}
    )
    assert list(description.tensors) == ["a", "b", "c"]
    assert description.notes == ()


@pytest.mark.parametrize("size", [6, 6.0, 6.5e10, None, "6"])
def test_the_total_size_of_an_index_does_not_matter(size):
    files = {**GOOD, INDEX: index({"a": ONE}, metadata={"total_size": size})}
    assert list(describe(files).tensors) == ["a"]


def test_files_that_the_index_does_not_name_are_not_read():
    description = describe({**GOOD, "consolidated.safetensors": b"broken"})
    assert len(description.tensors) == 3
    assert "consolidated.safetensors" in description.notes[0]


def test_tensors_that_the_index_does_not_name_are_noted():
    description = describe({**GOOD, INDEX: index({"a": ONE, "b": TWO})})
    assert list(description.tensors) == ["a", "b"]
    assert '"c"' in description.notes[0]


def test_an_index_of_another_name_counts_when_it_is_the_only_one():
    files = {ONE: A, TWO: B, "diffusion_pytorch_model.safetensors.index.json": index({"a": ONE})}
    assert list(describe(files).tensors) == ["a"]


def test_of_several_indexes_the_usual_one_counts():
    files = {**GOOD, "model.fp16.safetensors.index.json": b"broken"}
    assert len(describe(files).tensors) == 3


def test_several_indexes_are_refused_with_advice():
    files = {ONE: A, "x.safetensors.index.json": index({}), "y.safetensors.index.json": index({})}
    refused(files, Unsupported, "2 indexes", "open one safetensors file")


def test_an_index_may_name_files_in_folders():
    assert list(
        describe({"sub/x.safetensors": A, INDEX: index({"a": "sub/x.safetensors"})}).tensors
    ) == ["a"]


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../x.safetensors",
        "a/../b",
        "a/./b",
        ".",
        "..",
        "",
        "a//b",
        "a/",
        "a\\b",
        "C:\\x",
        "x\0.safetensors",
    ],
)
def test_paths_stay_inside(name):
    error = refused({ONE: A, INDEX: index({"a": name})}, UnsafePath, "at $.weight_map.a")
    assert error.found == name


BROKEN_INDEXES = {
    "not JSON": (b"{", "not JSON"),
    "empty": (b"", "not JSON"),
    "not UTF-8": (b'{"weight_map":{"\xff":"x"}}', "not UTF-8"),
    "a list": (b"[]", "at $: expected an object"),
    "no weight map": (b'{"metadata":{}}', "weight_map is missing"),
    "weight map is a list": (b'{"weight_map":[]}', "at $.weight_map: expected an object"),
    "a number for a file": (b'{"weight_map":{"a":1}}', "at $.weight_map.a: expected text"),
    "double name": (
        f'{{"weight_map":{{"a":"{ONE}","a":"{TWO}"}}}}'.encode(),
        'the key "a" occurs twice',
    ),
    "double map": (b'{"weight_map":{},"weight_map":{}}', "occurs twice"),
    "NaN": (b'{"weight_map":{},"metadata":{"total_size":NaN}}', "at $.metadata.total_size: NaN"),
}


@pytest.mark.parametrize("case", BROKEN_INDEXES)
def test_a_broken_index_is_refused(case):
    raw, words = BROKEN_INDEXES[case]
    assert refused({ONE: A, TWO: B, INDEX: raw}, HeaderError, words).file == INDEX


def test_a_deep_index_is_refused():
    refused({ONE: A, INDEX: b'{"weight_map":' + b"[" * 100_000}, LimitExceeded, "depth")


def test_a_large_index_is_refused():
    with pytest.raises(LimitExceeded, match="index_nbytes"):
        describe(GOOD, Limits(index_nbytes=10))


def test_missing_files_are_named():
    files = {
        ONE: A,
        INDEX: index({"a": ONE, "b": TWO, **{f"x{i}": f"gone-{i}.safetensors" for i in range(9)}}),
    }
    error = refused(files, StoreError, TWO, "gone-0", "and 5 more")
    assert len(error.found) == 10


def test_a_name_that_its_file_lacks():
    refused({**GOOD, INDEX: index({"a": TWO})}, MetadataError, "at $.weight_map.a", TWO)


def test_two_files_of_the_index_that_claim_one_tensor():
    files = {ONE: A, TWO: craft({"a": entry("U8", [2], 0, 2), "b": entry("U8", [], 2, 3)}, 3)}
    refused({**files, INDEX: index({"a": ONE, "b": TWO})}, MetadataError, ONE, TWO, "'a'")
    refused(files, MetadataError, ONE, TWO, "'a'")


@pytest.mark.parametrize("with_index", [True, False])
def test_every_file_is_checked_by_content(with_index):
    files = GOOD if with_index else {ONE: A, TWO: B}
    assert refused({**files, TWO: B[:-1]}, Truncated).file == TWO
    assert (
        refused(
            {**files, TWO: b"version https://git-lfs.github.com/spec/v1\n"}, HeaderError, "git lfs"
        ).file
        == TWO
    )
    assert refused({**files, TWO: b"PK\x03\x04" + bytes(60)}, Truncated).file == TWO


def test_metadata_on_which_files_differ_is_noted():
    description = describe(
        {ONE: craft({}, 0, {"k": "1", "same": "x"}), TWO: craft({}, 0, {"k": "2", "same": "x"})}
    )
    assert description.metadata == {"same": "x"}
    assert '"k"' in description.notes[0]


def test_a_directory_without_files_is_not_described():
    refused({"a": b"", "b": b""}, UnknownFormat)


def test_pieces_are_joined():
    files = shards(
        x={"w": ((0, 0), (2, 3)), "whole": ((0,), (4,))},
        y={"w": ((0, 3), (2, 1))},
        z={"w": ((2, 0), (1, 4)), "none": ((0,), (0,))},
    )
    description = describe(files)
    tensor = description.tensors["w"]
    assert tensor.shape == (3, 4)
    assert len(tensor.chunks) == 3
    assert tensor.numpy().tolist() == [[0, 1, 2, 0], [3, 4, 5, 1], [0, 1, 2, 3]]
    assert tensor[1:, 2:].shape == (2, 2)
    assert description.tensors["whole"].numpy().tolist() == [6, 7, 8, 9]
    assert description.tensors["none"].shape == (0,)
    assert description.metadata == {"format": "pt", "DCP_VERSION": "1.0"}


def test_pieces_of_nothing():
    assert describe(shards(x={"w": ((0, 0), (0, 3))}, y={"w": ((0, 0), (0, 3))})).tensors[
        "w"
    ].shape == (0, 3)


BROKEN_PIECES = {
    "a hole": shards(x={"w": ((0,), (2,))}, y={"w": ((3,), (2,))}),
    "an overlap": shards(x={"w": ((0,), (2,))}, y={"w": ((1,), (2,))}),
    "an overlap and a hole of one size": shards(
        x={"w": ((0,), (2,))}, y={"w": ((0,), (2,))}, z={"w": ((4,), (2,))}
    ),
    "the first is missing": shards(x={"w": ((2,), (2,))}, y={"v": ((0,), (1,))}),
    "the same twice": shards(x={"w": ((0,), (2,))}, y={"w": ((0,), (2,))}),
    "other ranks": shards(x={"w": ((0,), (2,))}, y={"w": ((2, 0), (2, 1))}),
    "offsets of another rank": shards(x={"w": ((0, 0), (2,))}, y={"v": ((0,), (1,))}),
    "empty and far away": shards(x={"w": ((1 << 62, 1 << 62), (0, 0))}, y={"v": ((0,), (1,))}),
}


@pytest.mark.parametrize("case", BROKEN_PIECES)
def test_pieces_that_do_not_tile_are_refused(case):
    refused(BROKEN_PIECES[case], MetadataError, "'w'")


def test_pieces_of_several_dtypes_are_refused():
    files = shards(x={"w": ((0,), (2,))}, y={"w": ((2,), (2,))})
    files["y.safetensors"] = files["y.safetensors"].replace(b'"I32"', b'"F32"')
    refused(files, MetadataError, "int32", "float32")


def test_a_copy_that_says_nothing_of_pieces_is_refused():
    files = {
        **shards(x={"w": ((0,), (2,))}),
        "y.safetensors": craft({"w": entry("I32", [2], 0, 8)}, 8),
    }
    refused(files, MetadataError, "x.safetensors", "y.safetensors")


@pytest.mark.parametrize(
    ("info", "kind"),
    [
        ("{", HeaderError),
        ("[]", HeaderError),
        ('{"w":1}', HeaderError),
        ('{"w":{}}', HeaderError),
        ('{"w":{"saved_offsets":0}}', HeaderError),
        ('{"w":{"saved_offsets":[-1]}}', HeaderError),
        ('{"w":{"saved_offsets":[true]}}', HeaderError),
        ('{"w":{"saved_offsets":[0.0]}}', HeaderError),
        (f'{{"w":{{"saved_offsets":[{1 << 63}]}}}}', HeaderError),
        ('{"w":{"saved_offsets":[0],"saved_offsets":[1]}}', HeaderError),
        ('{"w":{"saved_offsets":[]}}', MetadataError),
        ('{"gone":{"saved_offsets":[0]}}', MetadataError),
        ("[" * 100_000, LimitExceeded),
    ],
)
def test_broken_sharding_notes_are_refused(info, kind):
    raw = frame(
        json.dumps({"__metadata__": {"DCP_SHARDING_INFO": info}, "w": entry("U8", [1], 0, 1)}), b"x"
    )
    assert refused({"x.safetensors": raw, "config.json": b""}, kind).file == "x.safetensors"
    with pytest.raises(kind):
        describe_safetensors(MemorySource(raw))


def load_folder(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@needs(versions.HUGGING_FACE)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["plain", "two files", "distributed", "consolidated"])
def test_what_torch_writes_for_hugging_face(tmp_path, form):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    options = {
        "plain": {},
        "two files": {"fqn_to_index_mapping": {"a": 1, "b.w": 2}},
        "distributed": {"save_distributed": True},
        "consolidated": {"save_distributed": True, "enable_consolidation": True},
    }[form]
    state = {"a": torch.arange(12.0).reshape(3, 4), "b.w": torch.ones(5, dtype=torch.float16)}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path), **options))
    source = MemorySource(load_folder(tmp_path))
    fmt = format_of("safetensors" if len(source.store.list()) == 1 else "safetensors-dir")
    assert fmt.matches(source)
    description = fmt.describe(source)
    assert description.notes == ()
    assert set(description.tensors) == set(state)
    for name, tensor in state.items():
        np.testing.assert_array_equal(description.tensors[name].numpy(), tensor.numpy())
