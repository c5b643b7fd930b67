"""The native directory: every dtype, every tree, split tensors; other tools open its files; a manifest that lies is refused."""

import contextlib
import copy
import json
import zlib
from collections import OrderedDict

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.formats.slow_save import (
    Memory,
    assert_same,
    execute,
    raw_bytes,
    reopen,
    state_of,
    state_of_checkpoint,
)
from tests.formats.tree_strategies import trees
from tests.sampling import examples

import holdfast
from holdfast.core.documents import decode_canonical, decode_strictly, seal
from holdfast.core.dtype import DTYPES
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global, Opaque
from holdfast.core.strict_json import json_limits
from holdfast.core.tensor import Composite, Traits
from holdfast.errors import (
    CannotHold,
    Corrupted,
    FormatError,
    HeaderError,
    HoldfastError,
    LimitExceeded,
    MetadataError,
    StoreError,
    Truncated,
    UnsafePath,
    Unsupported,
)
from holdfast.formats.native.schema import DOCUMENT
from holdfast.formats.native.write import lay_out_native

MANIFEST = "holdfast.json"


def save(tree, metadata=None, **options):
    return execute(lay_out_native(state_of(tree, metadata), **options))


def test_every_dtype_comes_back_and_safetensors_opens_the_files():
    memory = Memory()
    tree = {f"{row.name}": memory.raw(row, (3, 4)) for row in DTYPES.rows}
    tree |= {f"{row.name}.odd": memory.raw(row, (3,)) for row in DTYPES.rows}
    tree |= {f"{row.name}.0d": memory.raw(row, ()) for row in DTYPES.rows}
    tree |= {f"{row.name}.empty": memory.raw(row, (0, 2)) for row in DTYPES.rows}
    files = save(tree)
    ckpt = reopen(files)
    assert ckpt.format == "native"
    assert list(ckpt) == list(tree)
    for name, tensor in tree.items():
        assert_same(tensor, ckpt[name], name)
        assert ckpt[name].storages[0].crc32 == zlib.crc32(raw_bytes(tensor))
    (data,) = (files[key] for key in files if key.startswith("data-"))
    opened = reopen({"": data})
    assert set(opened) == set(tree)
    for name, tensor in tree.items():
        assert raw_bytes(opened[name]) == raw_bytes(tensor)
    assert opened["complex128"].shape == (3, 4, 2)


def test_the_directory_is_what_hugging_face_loads():
    memory = Memory()
    arrays = {f"l.{i}": np.full((i + 1, 2), i, np.float32) for i in range(5)}
    plan = lay_out_native(
        state_of({name: memory.array(array) for name, array in arrays.items()}), max_shard_size=50
    )
    assert plan.directory
    assert [file.key for file in plan.index] == ["model.safetensors.index.json", MANIFEST]
    files = execute(plan)
    weight_map = json.loads(files["model.safetensors.index.json"])["weight_map"]
    assert set(weight_map) == set(arrays)
    assert len(set(weight_map.values())) > 1
    for name, array in arrays.items():
        content = files[weight_map[name]]
        assert (int.from_bytes(content[:8], "little") + 8) % 64 == 0
        assert safetensors.numpy.load(content)[name].tobytes() == array.tobytes()


def test_data_files_without_their_manifest_are_damaged_and_open_one_by_one(tmp_path):
    """They would pass for plain safetensors, and every value and second name would be lost without a word."""
    array = np.arange(4.0)
    holdfast.save({"w": array, "v": array + 1, "step": 3}, tmp_path / "d", max_shard_size=40)
    (tmp_path / "d" / MANIFEST).unlink()
    with pytest.raises(Corrupted, match="is not in the folder") as caught:
        holdfast.open(tmp_path / "d")
    assert caught.value.file == "data-00001-of-00002.safetensors"
    report = holdfast.verify(tmp_path / "d")
    assert [problem.damaged for problem in report.problems] == [True]
    with holdfast.open(tmp_path / "d" / "data-00001-of-00002.safetensors") as one:
        assert one["w"].storages[0].crc32 == zlib.crc32(array.tobytes())
    # A folder that holds one file is opened as that file, and is refused all the same.
    for name in ("data-00002-of-00002.safetensors", "model.safetensors.index.json"):
        (tmp_path / "d" / name).unlink()
    with pytest.raises(Corrupted, match="is not in the folder"):
        holdfast.open(tmp_path / "d")


@settings(max_examples=examples(60))
@given(st.data())
def test_any_state_comes_back(data):
    memory = Memory()
    tensor = st.builds(
        lambda n, p: memory.array(np.full(n, n, np.int16), parameter=p, requires_grad=p),
        st.integers(0, 3),
        st.booleans(),
    )
    tree = data.draw(trees(tensor))
    state = state_of(tree)
    assume(
        all(
            name != "__metadata__" and name.encode("utf-8", "replace").decode() == name
            for name in state.tensors
        )
    )
    ckpt = reopen(
        execute(lay_out_native(state, max_shard_size=data.draw(st.none() | st.integers(1, 10))))
    )
    assert_same(tree, ckpt.tree)
    assert list(ckpt) == list(state.tensors)
    assert_same(ckpt.tree, reopen(execute(lay_out_native(state_of_checkpoint(ckpt)))).tree)


def test_a_training_state_with_everything_in_it():
    memory = Memory()
    w = memory.array(
        np.arange(12, dtype=np.float32).reshape(3, 4), requires_grad=True, parameter=True
    )
    meta = holdfast.LazyTensor(
        "", DTYPES.name("bfloat16"), (2, 2), (), memory.source, Traits(meta=True)
    )
    parts = {
        "int_repr": memory.raw("qint8", (2,)),
        "scales": memory.array(np.ones(2)),
        "zero_points": memory.array(np.zeros(2)),
    }
    quantized = Composite(
        "quantized", (2,), parts, {"qscheme": "per_channel_affine", "axis": 0}, Traits()
    )
    model = OrderedDict(
        {
            "w": w,
            "tied": memory.view(w, (3, 4), (4, 1)),
            "row": memory.view(w, (4,), (1,), 4),
            "q": quantized,
        }
    )
    model._metadata = OrderedDict({"": {"version": 1}})
    tree = {
        "model": model, "optimizer": {"state": {0: {"step": memory.array(np.float32(3)), "m": meta}}, "betas": (0.9, 0.999)},
        "rng": np.arange(4, dtype=np.uint32), "best": float("inf"), "path": None,
    }  # fmt: skip
    ckpt = reopen(save(tree))
    assert_same(tree, ckpt.tree)
    assert ckpt["model.tied"].storages == ckpt["model.w"].storages
    assert ckpt["model.row"].traits.alias.group == ckpt["model.w"].traits.alias.group
    assert (ckpt["model.row"].traits.alias.offset, ckpt["model.row"].traits.alias.strides) == (
        128,
        (32,),
    )
    assert "optimizer.state.0.m" in ckpt


def test_all_problems_are_listed_before_anything_is_planned():
    with pytest.raises(CannotHold) as caught:
        lay_out_native(state_of({"a": Opaque(Global("x", "Y")), "b": [..., {"c": object()}]}))
    assert [p.split(":")[0] for p in caught.value.problems] == ["a", "b.0", "b.1.c"]


def test_an_empty_state_and_none():
    for tree in ({}, None, [], OrderedDict()):
        ckpt = reopen(save(tree))
        assert_same(tree, ckpt.tree)
        assert len(ckpt) == 0


def split_directory():
    """A tensor of (4, 6) in four pieces of different files, made by hand, and one that is whole."""
    whole = np.arange(24, dtype="<i4").reshape(4, 6)
    boxes = [((0, 0), (2, 6)), ((2, 0), (4, 2)), ((2, 2), (4, 6)), ((4, 6), (4, 6))]
    files, chunks = {}, []
    for i, (start, stop) in enumerate(boxes):
        piece = np.ascontiguousarray(whole[start[0] : stop[0], start[1] : stop[1]])
        content = safetensors.numpy.save({"w": piece})
        key = f"data-{i}.safetensors"
        files[key] = content
        begin = len(content) - piece.nbytes
        crc = f"{zlib.crc32(piece.tobytes()):08x}"
        chunks.append(
            {
                "file": i,
                "bytes": [begin, len(content)],
                "crc32": crc,
                "start": list(start),
                "stop": list(stop),
            }
        )
    manifest = {
        "format": "holdfast", "version": 1, "files": [{"name": key, "nbytes": len(content)} for key, content in files.items()],
        "tensors": {"w": {"dtype": "int32", "shape": [4, 6], "chunks": chunks}}, "metadata": {},
    }  # fmt: skip
    return files, manifest, whole


def dumped(manifest):
    return json.dumps(manifest, separators=(",", ":")).encode()


def test_split_tensors_are_read():
    files, manifest, whole = split_directory()
    for raw in (dumped(manifest), json.dumps(manifest, indent=1).encode()):
        ckpt = reopen(files | {MANIFEST: raw})
        assert ckpt["w"].numpy().tolist() == whole.tolist()
        assert ckpt["w"][1:3, 1:5].numpy().tolist() == whole[1:3, 1:5].tolist()
        assert len(ckpt["w"].chunks) == 4
    assert decode_canonical(DOCUMENT, dumped(manifest)) is not None


def edit(*path, value=None, drop=False, change=None):
    """An edit of a manifest at a path."""

    def apply(manifest):
        inside = manifest
        for step in path[:-1]:
            inside = inside[step]
        if drop:
            del inside[path[-1]]
        else:
            inside[path[-1]] = change(inside[path[-1]]) if change else value
        return manifest

    return apply


W = ("tensors", "w")
HOSTILE = {
    "another format": (edit("format", value="safetensors"), FormatError, None),
    "no version": (edit("version", drop=True), HeaderError, "$.version"),
    "version true": (edit("version", value=True), HeaderError, "$.version"),
    "version as a float": (edit("version", value=1.0), HeaderError, "$.version"),
    "a version to come": (edit("version", value=7), Unsupported, None),
    "a hash before its time": (edit("hash", value="xxh3-128/1MiB"), HeaderError, "$.hash"),
    "a chunk's hash before its time": (edit(*W, "chunks", 0, "hash", value="0" * 32), HeaderError, "$.tensors.w.chunks[0]"),
    "a head without a hash": (edit(*W, "chunks", 0, "head", value="0" * 8), HeaderError, "$.tensors.w.chunks[0]"),
    "no files": (edit("files", drop=True), HeaderError, "$"),
    "unknown field": (edit("pickle", value="x"), HeaderError, "$.pickle"),
    "files as an object": (edit("files", value={}), HeaderError, "$.files"),
    "file that is text": (edit("files", 0, value="data-0.safetensors"), HeaderError, "$.files[0]"),
    "file with more fields": (edit("files", 0, "mode", value=1), HeaderError, "$.files[0]"),
    "file twice": (edit("files", 1, "name", value="data-0.safetensors"), HeaderError, "$.files[1].name"),
    "file that is the manifest": (edit("files", 1, "name", value=MANIFEST), HeaderError, "$.files[1].name"),
    "file above": (edit("files", 0, "name", value="../x"), UnsafePath, "$.files[0].name"),
    "absolute file": (edit("files", 0, "name", value="/etc/passwd"), UnsafePath, "$.files[0].name"),
    "file in a folder": (edit("files", 0, "name", value="a/b"), UnsafePath, "$.files[0].name"),
    "file with a backslash": (edit("files", 0, "name", value="a\\b"), UnsafePath, "$.files[0].name"),
    "file with a NUL": (edit("files", 0, "name", value="a\0"), UnsafePath, "$.files[0].name"),
    "dots": (edit("files", 0, "name", value=".."), UnsafePath, "$.files[0].name"),
    "hidden file": (edit("files", 0, "name", value=".x"), UnsafePath, "$.files[0].name"),
    "no name": (edit("files", 0, "name", value=""), UnsafePath, "$.files[0].name"),
    "missing file": (edit("files", 0, "name", value="gone.safetensors"), StoreError, None),
    "longer file": (edit("files", 0, "nbytes", change=lambda n: n + 1), Truncated, None),
    "shorter file": (edit("files", 3, "nbytes", change=lambda n: n - 1), FormatError, None),
    "length as text": (edit("files", 0, "nbytes", value="9"), HeaderError, "$.files[0].nbytes"),
    "negative length": (edit("files", 0, "nbytes", value=-1), HeaderError, "$.files[0].nbytes"),
    "tensors as a list": (edit("tensors", value=[]), HeaderError, "$.tensors"),
    "metadata that is no text": (edit("metadata", "a", value=1), HeaderError, "$.metadata.a"),
    "tensor without a dtype": (edit(*W, "dtype", drop=True), HeaderError, "$.tensors.w"),
    "unknown dtype": (edit(*W, "dtype", value="float7"), HeaderError, "$.tensors.w.dtype"),
    "dtype of safetensors": (edit(*W, "dtype", value="I32"), HeaderError, "$.tensors.w.dtype"),
    "dtype of another width": (edit(*W, "dtype", value="int64"), MetadataError, "$.tensors.w.chunks[0].bytes"),
    "shape of floats": (edit(*W, "shape", value=[4.0, 6]), HeaderError, "$.tensors.w.shape[0]"),
    "shape of booleans": (edit(*W, "shape", value=[True, 6]), HeaderError, "$.tensors.w.shape[0]"),
    "negative shape": (edit(*W, "shape", value=[-4, -6]), HeaderError, "$.tensors.w.shape[0]"),
    "shape beyond 64 bits": (edit(*W, "shape", value=[1 << 62, 1 << 62]), MetadataError, "$.tensors.w.shape"),
    "empty and beyond 64 bits": (edit(*W, "shape", value=[1 << 62, 1 << 62, 0]), MetadataError, "$.tensors.w.shape"),
    "number of 70 digits": (edit(*W, "shape", value=[10**70]), HeaderError, None),
    "rank 65": (edit(*W, "shape", value=[1] * 65), LimitExceeded, "$.tensors.w.shape"),
    "no chunks": (edit(*W, "chunks", value=[]), HeaderError, "$.tensors.w.chunks"),
    "a chunk too few": (edit(*W, "chunks", change=lambda c: c[:2]), MetadataError, "$.tensors.w.chunks"),
    "one chunk of several": (edit(*W, "chunks", change=lambda c: c[:1]), MetadataError, "$.tensors.w.chunks"),
    "a chunk twice": (edit(*W, "chunks", change=lambda c: [*c, c[0]]), MetadataError, "$.tensors.w.chunks"),
    "box beyond the shape": (edit(*W, "chunks", 0, "stop", value=[2, 7]), MetadataError, "$.tensors.w.chunks[0]"),
    "box turned around": (edit(*W, "chunks", 0, "start", value=[3, 0]), MetadataError, "$.tensors.w.chunks[0]"),
    "box of another rank": (edit(*W, "chunks", 0, "start", value=[0]), HeaderError, "$.tensors.w.chunks[0]"),
    "box without a stop": (edit(*W, "chunks", 0, "stop", drop=True), HeaderError, "$.tensors.w.chunks[0]"),
    "file number -1": (edit(*W, "chunks", 0, "file", value=-1), HeaderError, "$.tensors.w.chunks[0].file"),
    "file number 9": (edit(*W, "chunks", 0, "file", value=9), HeaderError, "$.tensors.w.chunks[0].file"),
    "file number as text": (edit(*W, "chunks", 0, "file", value="0"), HeaderError, "$.tensors.w.chunks[0].file"),
    "bytes past the end": (
        edit(*W, "chunks", 0, "bytes", change=lambda b: [b[0] + 1, b[1] + 1]), MetadataError, "$.tensors.w.chunks[0].bytes"),
    "bytes before the header": (edit(*W, "chunks", 0, "bytes", value=[0, 48]), MetadataError, "$.tensors.w.chunks[0].bytes"),
    "negative bytes": (edit(*W, "chunks", 0, "bytes", value=[-48, 0]), MetadataError, "$.tensors.w.chunks[0].bytes"),
    "too few bytes": (
        edit(*W, "chunks", 0, "bytes", change=lambda b: [b[0], b[1] - 4]), MetadataError, "$.tensors.w.chunks[0].bytes"),
    "three bytes": (edit(*W, "chunks", 0, "bytes", value=[1, 2, 3]), HeaderError, "$.tensors.w.chunks[0].bytes"),
    "checksum as a number": (edit(*W, "chunks", 0, "crc32", value=5), HeaderError, "$.tensors.w.chunks[0].crc32"),
    "checksum too short": (edit(*W, "chunks", 0, "crc32", value="abc"), HeaderError, "$.tensors.w.chunks[0].crc32"),
    "checksum in capitals": (edit(*W, "chunks", 0, "crc32", value="ABCDEF01"), HeaderError, "$.tensors.w.chunks[0].crc32"),
    "checksum with a newline": (edit(*W, "chunks", 0, "crc32", value="abcdef0\n"), HeaderError, "$.tensors.w.chunks[0].crc32"),
    "overlap": (
        lambda m: edit("tensors", "v", value={"dtype": "int8", "shape": [4], "chunks": [
            {"file": 0, "bytes": [m["tensors"]["w"]["chunks"][0]["bytes"][0] + 2, m["tensors"]["w"]["chunks"][0]["bytes"][0] + 6],
             "crc32": "00000000"}]})(m), MetadataError, "$.tensors.v.chunks[0].bytes"),
    "alias of nothing": (edit("aliases", value={"x": "y"}), HeaderError, "$.aliases.x"),
    "alias over a tensor": (edit("aliases", value={"w": "w"}), HeaderError, "$.aliases.w"),
    "aliases as text": (edit("aliases", value="w"), HeaderError, "$.aliases"),
    "views as text": (edit("views", value="w"), HeaderError, "$.views"),
    "view beyond its storage": (
        edit("views", value=[{"nbytes": 95, "names": {"w": [0, [192, 32]]}}]), MetadataError, "$.views[0].names.w"),
    "dtypes": (edit("dtypes", value={"w": "int8"}), HeaderError, "$.dtypes"),
    "tree without the tensor": (edit("tree", value={"a": 1}), HeaderError, "$.tree"),
    "tree with another tensor": (edit("tree", value={"$": "tensor", "name": "x"}), HeaderError, "$.tree.name"),
    "tree with an unknown tag": (edit("tree", value=[{"$": "os.system"}]), HeaderError, '$.tree[0]["$"]'),
    "tree 10,000 deep": (edit("tree", value="DEEP"), LimitExceeded, None),
}  # fmt: skip


@pytest.mark.parametrize("pretty", [False, True], ids=["ours", "pretty"])
@pytest.mark.parametrize("case", HOSTILE)
def test_a_manifest_that_lies_is_refused_at_its_place(case, pretty):
    apply, error, place = HOSTILE[case]
    files, manifest, _ = split_directory()
    document = apply(copy.deepcopy(manifest))
    raw = json.dumps(document, indent=1).encode() if pretty else dumped(document)
    raw = raw.replace(b'"DEEP"', b"[" * 10_000 + b"]" * 10_000)
    with pytest.raises(HoldfastError) as caught:
        reopen(files | {MANIFEST: raw})
    assert isinstance(caught.value, error), caught.value
    if place is not None:
        assert caught.value.message.startswith(f"at {place}"), caught.value
        assert caught.value.file == MANIFEST


TEXTS = {
    "double key": lambda raw: raw.replace(b'"metadata":{}', b'"metadata":{},"metadata":{}'),
    "double tensor": lambda raw: raw.replace(
        b'"tensors":{', b'"tensors":{"w":{"dtype":"int8","shape":[0],"chunks":[]},'
    ),
    "NaN": lambda raw: raw.replace(b'"version":1', b'"version":NaN'),
    "minus zero": lambda raw: raw.replace(b'"file":0', b'"file":-0'),
    "trailing text": lambda raw: raw + b"x",
    "two documents": lambda raw: raw + raw,
    "truncated": lambda raw: raw[:-5],
    "not UTF-8": lambda raw: raw.replace(b'"w"', b'"\xff"'),
    "half a surrogate pair": lambda raw: raw.replace(b'"w"', b'"\\ud800"'),
}


@pytest.mark.parametrize("case", TEXTS)
def test_text_that_readers_disagree_about_is_refused(case):
    files, manifest, _ = split_directory()
    with pytest.raises((HeaderError, LimitExceeded)):
        reopen(files | {MANIFEST: TEXTS[case](dumped(manifest))})


def test_a_manifest_over_the_limit_is_not_read():
    files = save({"w": Memory().array(np.ones(1))})
    with pytest.raises(LimitExceeded, match="index_nbytes"):
        reopen(files, Limits(index_nbytes=10))


def test_what_the_fast_parser_takes_the_exact_one_takes_alike():
    memory = Memory()
    w = memory.array(np.ones((2, 3)))
    tree = {
        "w": w,
        "t": memory.view(w, (3, 2), (1, 3)),
        "same": w,
        "ü\n": memory.array(np.ones(1)),
        "k": {1: (2.5, "x")},
    }
    raw = save(tree, {"ä": '"\\'})[MANIFEST]
    assert decode_canonical(DOCUMENT, raw) is not None
    assert decode_canonical(DOCUMENT, raw) == decode_strictly(DOCUMENT, raw, json_limits(Limits()))


@settings(max_examples=examples(150))
@given(st.binary(max_size=6), st.integers(0, 1 << 30), st.integers(0, 8))
def test_no_change_of_a_manifest_causes_any_other_error(noise, at, length):
    files, manifest, _ = split_directory()
    raw = dumped(
        manifest
        | {
            "aliases": {"b": "w"},
            "tree": {"x": [{"$": "tensor", "name": "w"}, {"$": "tensor", "name": "b"}]},
        }
    )
    at %= len(raw)
    with contextlib.suppress(HoldfastError):
        reopen(files | {MANIFEST: raw[:at] + noise + raw[at + length :]})


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b'{"strategy": "hold fast"}', b"\0" * 64],
    ids=["empty", "{}", "other", "zeros"],
)
def test_a_folder_with_a_holdfast_json_is_native_or_refused(content):
    data = safetensors.numpy.save({"w": np.ones(1)})
    with pytest.raises(HeaderError) as caught:
        reopen({"a.safetensors": data, "b.safetensors": data, MANIFEST: content})
    assert caught.value.file == MANIFEST


def test_a_manifest_that_lies_under_a_right_checksum_is_refused_at_its_place():
    files = save({"w": Memory().array(np.ones(1))})
    document = json.loads(files[MANIFEST])
    del document["self"]
    document["tensors"]["w"]["dtype"] = "float7"
    with pytest.raises(HeaderError, match="there is no dtype"):
        reopen(files | {MANIFEST: seal(dumped(document))})
    document["others"] = [{"name": "../x", "nbytes": 1, "crc32": "00000000"}]
    with pytest.raises(UnsafePath, match="others"):
        reopen(files | {MANIFEST: seal(dumped(document))})


@pytest.mark.parametrize("field", ["self", "others"])
def test_fields_of_a_later_version_are_refused(field):
    files, manifest, _ = split_directory()
    raw = dumped(manifest | {field: []})
    assert decode_canonical(DOCUMENT, raw) is None
    with pytest.raises(HeaderError, match="no such field"):
        reopen(files | {MANIFEST: raw})
    with pytest.raises(HeaderError, match="no such field"):
        reopen(files | {MANIFEST: seal(dumped(manifest))})


def test_a_checkpoint_with_packed_chunks_is_refused_by_name(golden_dir):
    folder = golden_dir / "earlier" / "packed"
    with pytest.raises(Unsupported, match="stored packed") as caught:
        holdfast.open(folder)
    assert caught.value.tensor == "model.w"
    (problem,) = holdfast.verify(folder).problems
    assert "stored packed" in problem.message


def test_version_3_without_its_checksum_is_damaged():
    files, manifest, _ = split_directory()
    for raw in (
        dumped(manifest | {"version": 3}),
        dumped(manifest | {"version": 3, "self": "0" * 8, "metadata": {}}),
    ):
        with pytest.raises(Corrupted) as caught:
            reopen(files | {MANIFEST: raw})
        assert caught.value.file == MANIFEST


def test_a_check_finds_fields_that_were_added_to_a_data_file():
    files = save({"a": Memory().array(np.ones(4, np.int16))})
    (key,) = (key for key in files if key.startswith("data-"))
    # The new field takes the place of padding, so that no tensor moves.
    changed = files[key].replace(b"[0,8]}}      ", b'[0,8],"x":1}}')
    assert len(changed) == len(files[key])
    assert changed != files[key]
    with pytest.raises(Corrupted, match="another program added fields"):
        reopen(files | {key: changed})._description.check()


def test_a_data_file_that_was_exchanged_is_found_by_a_check():
    memory = Memory()
    files = save({"a": memory.array(np.ones(4, np.int16)), "b": memory.array(np.ones(4, np.int16))})
    assert reopen(files)._description.check() == []
    (key,) = (key for key in files if key.startswith("data-"))
    changed = files[key].replace(b'"a":{', b'"c":{')
    with pytest.raises(MetadataError) as caught:
        reopen(files | {key: changed})._description.check()
    assert (caught.value.file, caught.value.tensor) == (key, "a")
