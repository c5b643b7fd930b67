"""Tensors that are stored packed: they read, slice, digest, convert and reshard as the dense ones do; damage and lies are named."""

import contextlib
import copy
import json
import math
import zlib
from functools import cache, partial

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.formats.slow_save import Memory, execute, raw_bytes, reopen, state_of
from tests.sampling import examples

import holdfast
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.dtype import DTYPES
from holdfast.core.limits import Limits
from holdfast.engine.packed import choose, parse_wanted
from holdfast.engine.source import OpenSource
from holdfast.errors import (
    Closed,
    Corrupted,
    HeaderError,
    HoldfastError,
    LimitExceeded,
    MetadataError,
    StoreError,
    Unsupported,
)
from holdfast.formats.detect import detect
from holdfast.formats.native import chunks as unpacked
from holdfast.formats.native.write import lay_out_native
from holdfast.numeric import pack as encoding
from holdfast.numeric.pack import SparseStorage, encoding_of, packing_of
from holdfast.numeric.zeros import SHAPES, MarkedBlocks
from holdfast.stores.memory import MemoryStore
from holdfast.verbs.reshard import reshard
from holdfast.verbs.shared.state import tabulate_state
from holdfast.verbs.sparsity import BLOCKS

MANIFEST = "holdfast.json"
WHOLE_BYTES = [row for row in DTYPES.rows if not row.packed]


@pytest.fixture
def small_groups(monkeypatch):
    """Groups of a few elements, and few of them at a time."""
    shrink(monkeypatch)


def shrink(patch):
    patch.setattr(encoding, "BITMAP_ELEMENTS", 16)
    patch.setattr(encoding, "PACKED_GROUPS", 8)
    patch.setattr(encoding, "BLOCKS_ELEMENTS", 24)
    patch.setattr(encoding, "GROUP_ROWS", 4)
    patch.setattr(unpacked, "RUN_NBYTES", 64)
    patch.setattr(unpacked, "CACHE_NBYTES", 512)


def save(tree, sparse, **options):
    """A directory in memory; every tensor is packed that can be, unless options say otherwise."""
    asked = {"smallest": 0, "worth": 100.0, "threads": 1} | options
    return execute(
        lay_out_native(state_of(tree), pack=partial(choose, wanted=parse_wanted(sparse), **asked))
    )


def zeroed(rng, dtype, shape, how):
    """Random bytes of a dtype with zeros: anywhere, 2:4 where that is possible, or in blocks; minus zero and NaN among the rest."""
    width, count = dtype.bits // 8, math.prod(shape)
    raw = rng.integers(0, 256, (count, width), np.uint8)
    raw[rng.random(count) < 0.1] = [0] * (width - 1) + [128]
    raw[rng.random(count) < 0.1] = 255
    if how == "nm" and shape and shape[-1] % 4 == 0:
        raw.reshape(-1, 4, width)[:, rng.permutation(4)[:2]] = 0
    elif how == "block" and len(shape) > 1 and count:
        raw.reshape(shape[0], -1)[: shape[0] // 2] = 0
    else:
        raw[rng.random(count) < 0.6] = 0
    return raw.tobytes()


SPARSE = ["bitmap", "nm", "block", "auto", "1:2", "3:4", "5:6", "2x3", "1x4"]


@settings(deadline=None, max_examples=examples(150))
@given(
    st.sampled_from(WHOLE_BYTES),
    st.lists(st.integers(0, 12), max_size=3).map(tuple),
    st.sampled_from(["nm", "block", "anywhere"]),
    st.sampled_from(SPARSE),
    st.data(),
)
def test_round_trips(dtype, shape, how, sparse, data):
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
        dense = Memory().raw(dtype, shape, zeroed(rng, dtype, shape, how) or None)
        ckpt = reopen(save({"w": dense}, sparse))
        tensor = ckpt["w"]
        assert (tensor.dtype, tensor.shape) == (dtype, shape)
        assert raw_bytes(tensor) == raw_bytes(dense)
        assert tensor.digest() == dense.digest()
        out = np.empty(shape, dtype.numpy, order="F")
        assert tensor.read(out=out).tobytes() == dense.numpy().tobytes()
        index = tuple(
            data.draw(
                st.one_of(st.integers(-n, n - 1) if n else st.just(slice(None)), st.slices(n))
            )
            for n in shape
        )
        assert tensor[index].numpy().tobytes() == dense[index].numpy().tobytes()
        ckpt._description.check()


def test_the_asked_encoding_is_used(small_groups):
    rng = np.random.default_rng(0)
    array = np.zeros((16, 16), np.float32)
    array[:8, ::2] = rng.standard_normal((8, 8))
    for sparse, text in [
        ("bitmap", "bitmap"),
        ("nm", "1:2"),
        ("2:4", "2:4"),
        ("3x5", "3x5"),
        ("1:4", None),
        ("1:3", None),
    ]:
        found = packing_of(reopen(save({"w": Memory().array(array)}, sparse))["w"])
        assert (found and found.text) == text, sparse


def two_of_four(rng, array):
    """Make two of every four elements zero, any two."""
    groups = array.reshape(-1, 4)
    np.put_along_axis(groups, rng.random(groups.shape).argsort(axis=1)[:, :2], 0, axis=1)
    return array


def test_patterns_and_blocks_are_found():
    rng = np.random.default_rng(1)
    full = rng.standard_normal((256, 512)).astype(ml_dtypes.bfloat16)
    tiled, anywhere = full.copy(), full.copy()
    tiled *= np.kron(rng.random((8, 16)) < 0.2, np.ones((32, 32))).astype(tiled.dtype)
    tiled[tiled == 0] = 0
    anywhere[rng.random(anywhere.shape) < 0.5] = 0
    tree = {"full": full, "2:4": two_of_four(rng, full.copy()), "32x32": tiled, "bitmap": anywhere}
    tree |= {"small": np.zeros(500), "zero": np.zeros((64, 640), np.float16)}
    ckpt = reopen(
        execute(
            lay_out_native(state_of({k: Memory().array(v) for k, v in tree.items()}), pack=auto)
        )
    )
    for name, array in tree.items():
        found = packing_of(ckpt[name])
        assert (found.text if found else None) == {"full": None, "small": None, "zero": "1x64"}.get(
            name, name
        )
        assert ckpt[name].numpy().tobytes() == array.tobytes()
    assert packing_of(ckpt["zero"]).stored_nbytes * 1024 >= tree["zero"].nbytes


auto = partial(choose, wanted=parse_wanted("auto"))


def test_a_pattern_of_the_first_block_is_not_taken_for_that_of_the_whole():
    """Five of 16 take more than a bitmap, so that nobody looks on; further back there are eight of 16."""
    groups = np.ones((4, 1 << 14, 16), np.float32)
    groups[0, :, 5:] = groups[1:, :, 8:] = 0
    for array in (groups.reshape(-1), groups.reshape(-1, 1024)):
        ckpt = reopen(
            execute(
                lay_out_native(
                    state_of({"w": Memory().array(array)}), pack=partial(auto, threads=1)
                )
            )
        )
        assert ":" not in packing_of(ckpt["w"]).text
        assert ckpt["w"].numpy().tobytes() == array.tobytes()


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(1, 70), st.integers(1, 140), st.integers(0, 1 << 32))
def test_blocks_are_counted_as_slowly(rows, columns, seed):
    rng = np.random.default_rng(seed)
    marked = rng.random((rows, columns)) < rng.choice([0.002, 0.02, 0.3])
    found = MarkedBlocks(marked)
    for height, width in {*SHAPES, *BLOCKS}:
        blocks = [
            marked[t : t + height, x : x + width]
            for t in range(0, rows, height)
            for x in range(0, columns, width)
        ]
        filled = [block.size for block in blocks if block.any()]
        assert (found.count(height, width), found.area(height, width)) == (
            len(filled),
            sum(filled),
        ), (height, width)


def test_groups_have_the_sizes_of_the_document():
    """docs/formats/native.md, where they are part of the format."""
    assert encoding_of("bitmap", (), (9, 9)).group == 65_536
    assert encoding_of("nm", (2, 5), (9, 10)).group == 16_384 * 5
    for columns in (1, 3, 64, 1000, 2048, 4096, 16_384, 16_385, 40_000, 1 << 20):
        most = max(2**17 // columns, min(64, 2**20 // columns))
        power = max(2**k for k in range(21) if 2**k <= most)
        for height in (1, 3, 16, 64, 200):
            if height * columns <= 2**20:
                made = encoding_of("block", (height, 1), (500, columns))
                assert made.group == max(power // height, 1) * height * columns


def test_the_bytes_are_those_of_the_document():
    array = np.zeros((2, 70_000), np.uint8)
    array[0, 3], array[0, 65_536], array[1, 69_999] = 7, 8, 9
    parts = {}
    for sparse in ("bitmap", "1:4", "2x4"):
        files = save({"w": Memory().array(array)}, sparse)
        data = next(content for key, content in files.items() if key.startswith("data-"))
        parts[sparse] = safetensors.numpy.load(data)
        assert [name for name in parts[sparse] if not name.startswith("w.sparse.")] == []
    bits = {name.removeprefix("w.sparse."): part for name, part in parts["bitmap"].items()}
    assert bits["values"].tolist() == [7, 8, 9]
    assert bits["starts"].tolist() == [0, 1, 2, 3]
    assert {i: int(octet) for i, octet in enumerate(bits["where"]) if octet} == {
        0: 8,
        8192: 1,
        17_499: 128,
    }
    pattern = {name.removeprefix("w.sparse."): part for name, part in parts["1:4"].items()}
    assert sorted(pattern) == ["values", "where"]
    assert {i: int(value) for i, value in enumerate(pattern["values"]) if value} == {
        0: 7,
        16_384: 8,
        34_999: 9,
    }
    assert {i: int(octet) for i, octet in enumerate(pattern["where"]) if octet} == {
        0: 3,
        8749: 3 << 6,
    }
    block = {name.removeprefix("w.sparse."): part for name, part in parts["2x4"].items()}
    assert block["values"].tolist() == [
        0,
        0,
        0,
        7,
        0,
        0,
        0,
        0,
        8,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        9,
    ]
    assert block["starts"].tolist() == [0, 24]
    assert {i: int(octet) for i, octet in enumerate(block["where"]) if octet} == {
        0: 1,
        2048: 1,
        2187: 8,
    }


def test_a_slice_reads_its_groups_only(tmp_path):
    """Rows of a matrix of 4 MiB: two groups of it, and not the file."""
    rng = np.random.default_rng(2)
    array = rng.integers(1, 9, (2048, 1024), np.int16) * rng.integers(0, 2, (2048, 1024), np.int16)
    holdfast.save({"w": array}, tmp_path / "c", sparse="bitmap")
    with holdfast.open(tmp_path / "c") as ckpt:
        store, read = ckpt["w"].source.store.below("holdfast.json"), []
        original = store.read
        store.read = lambda key, start, out: (read.append(out.nbytes), original(key, start, out))[1]
        assert np.array_equal(ckpt["w"][500:600].numpy(), array[500:600])
        assert sum(read) < 3 * (65536 // 8 + 65536 * 2)
        read.clear()
        assert np.array_equal(ckpt["w"][:, 7:9].numpy(), array[:, 7:9])
        assert sum(read) < array.nbytes  # each group once, although it has 64 rows of the column


def test_a_file_per_part_and_no_hugging_face_index(tmp_path):
    array = np.zeros((64, 64), np.float32)
    array[0] = 1
    done = holdfast.save({"w": array, "step": 3}, tmp_path / "c", sparse="auto", max_shard_size=40)
    assert len(done.files) > 2
    with holdfast.open(tmp_path / "c") as ckpt:
        assert ckpt["w"].numpy().tobytes() == array.tobytes()
    assert not (tmp_path / "c" / "model.safetensors.index.json").exists()
    holdfast.save({"w": array}, tmp_path / "d", sparse="never")
    assert (tmp_path / "d" / "model.safetensors.index.json").exists()
    assert holdfast.verify(tmp_path / "c").ok


@pytest.mark.parametrize("cut", [0, 1])
def test_chunks_of_a_split_tensor_are_packed_each_for_itself(small_groups, cut):
    """One packed as a bitmap, one as blocks and one as it is; made by hand of three tensors."""
    rng = np.random.default_rng(5)
    array = rng.integers(0, 3, (30, 28), np.int16)
    memory, files, chunks = Memory(), {}, []
    for number, (low, high, sparse) in enumerate(
        [(0, 9, "bitmap"), (9, 20, "2x3"), (20, array.shape[cut], "never")]
    ):
        box = (slice(low, high), slice(None))[:: 1 - 2 * cut]
        tree = {"w": memory.array(np.ascontiguousarray(array[box]))}
        made = save(tree, sparse) if sparse != "never" else execute(lay_out_native(state_of(tree)))
        chunk = json.loads(made[MANIFEST])["tensors"]["w"]["chunks"][0]
        for part in (
            chunk,
            *(chunk["sparse"][part] for part in ("where", "starts") if "sparse" in chunk),
        ):
            part["file"] = number
        start, stop = ([0, 0], list(array.shape))
        start[cut], stop[cut] = low, high
        chunks.append(chunk | {"start": start, "stop": stop})
        files[f"{number}.safetensors"] = next(
            content for key, content in made.items() if key.startswith("data-")
        )
    manifest = {
        "format": "holdfast", "version": 2, "files": [{"name": key, "nbytes": len(content)} for key, content in files.items()],
        "tensors": {"w": {"dtype": "int16", "shape": [30, 28], "chunks": chunks}}, "metadata": {},
    }  # fmt: skip
    tensor = reopen(files | {MANIFEST: json.dumps(manifest).encode()})["w"]
    assert packing_of(tensor).text == "bitmap/2x3"
    assert tensor.numpy().tobytes() == array.tobytes()
    assert tensor[3:25:2, 5:26].numpy().tobytes() == array[3:25:2, 5:26].tobytes()
    assert tensor.digest() == memory.array(array).digest()


def test_a_name_that_is_taken_stays_dense():
    memory = Memory()
    tree = {"w": memory.array(np.zeros(4000)), "w.sparse.where": memory.array(np.zeros(4000))}
    ckpt = reopen(save(tree, "bitmap"))
    assert packing_of(ckpt["w"]) is None
    assert packing_of(ckpt["w.sparse.where"]) is not None
    assert all(raw_bytes(ckpt[name]) == bytes(32000) for name in tree)


def test_views_and_second_names_come_back(tmp_path):
    array = np.zeros((100, 100))
    array[::3, ::5] = -0.0
    holdfast.save(
        {"w": array, "same": array, "t": array.T, "rows": array[::2]}, tmp_path / "c", sparse="auto"
    )
    with holdfast.open(tmp_path / "c") as ckpt:
        assert packing_of(ckpt["w"]) is not None
        assert ckpt["t"].numpy().tobytes() == array.T.tobytes()
        assert ckpt["same"].numpy().tobytes() == ckpt["w"].numpy().tobytes() == array.tobytes()
        assert ckpt["rows"].numpy().tobytes() == array[::2].tobytes()


@pytest.mark.parametrize("sparse", ["foo", "0:4", "4:4", "1:17", "0x4", "", "AUTO", "2:4 "])
def test_what_is_no_choice_is_refused(tmp_path, sparse):
    with pytest.raises(Unsupported, match="sparse="):
        holdfast.save({"w": np.zeros(9)}, tmp_path / "c", sparse=sparse)
    assert not (tmp_path / "c").exists()


def test_other_formats_do_not_pack(tmp_path):
    with pytest.raises(Unsupported, match="native"):
        holdfast.save({"w": np.zeros(9)}, tmp_path / "c.pt", sparse="auto")
    assert not (tmp_path / "c.pt").exists()


def test_a_tensor_that_changes_while_it_is_saved_is_refused():
    """Its zeros were counted, and then it was written to: the same number of zeros, and another one."""
    for place, value in [(0, 5.0), (1, 5.0)]:
        array = np.zeros(4096)
        array[::2] = 1.0
        plan = lay_out_native(tabulate_state({"w": array}), pack=auto)
        array[place] = value
        with pytest.raises(StoreError, match="changed"):
            execute(plan)


@pytest.fixture
def packed_directory(tmp_path):
    """A directory with a tensor of each encoding and a dense one; and the arrays."""
    rng = np.random.default_rng(3)
    arrays = {
        "bitmap": rng.standard_normal((100, 100)),
        "nm": rng.standard_normal((100, 100)).astype(np.float32),
    }
    arrays["bitmap"][rng.random((100, 100)) < 0.7] = 0
    two_of_four(rng, arrays["nm"])
    arrays["block"] = np.zeros((128, 128), np.float16)
    arrays["block"][32:64, 64:96] = rng.standard_normal((32, 32))
    arrays["dense"] = rng.standard_normal((10, 10))
    holdfast.save(arrays, tmp_path / "packed", sparse="auto")
    return tmp_path / "packed", arrays


def test_convert_reshard_and_diff(packed_directory, tmp_path):
    packed, arrays = packed_directory
    with holdfast.open(packed) as ckpt:
        assert {name: packing_of(t) and packing_of(t).text for name, t in ckpt.items()} == {
            "bitmap": "bitmap", "nm": "2:4", "block": "32x32", "dense": None,
        }  # fmt: skip
        digests = {name: tensor.digest() for name, tensor in ckpt.items()}
    holdfast.save(arrays, tmp_path / "plain")
    for name in ("out.safetensors", "out.pt", "out", "again"):
        holdfast.convert(packed, tmp_path / name, sparse="auto" if name == "again" else "never")
    reshard(packed, tmp_path / "split", mesh="tp=2", rules=["bitmap: tp=0", "*: tp=1"])
    for name in ("plain", "out.safetensors", "out.pt", "out", "again", "split"):
        with holdfast.open(tmp_path / name) as ckpt:
            assert all(
                ckpt[key].numpy().tobytes() == array.tobytes() for key, array in arrays.items()
            ), name
            assert {key: tensor.digest() for key, tensor in ckpt.items()} == digests
        assert holdfast.diff(packed, tmp_path / name).equal
    assert (tmp_path / "again" / MANIFEST).read_bytes() == (packed / MANIFEST).read_bytes()


def part_range(path, name, part):
    with holdfast.open(path) as ckpt:
        storage = ckpt[name].chunks[0].storage
        assert isinstance(storage, SparseStorage)
        return getattr(storage, part)


@pytest.mark.parametrize("part", ["values", "where", "starts"])
@pytest.mark.parametrize("name", ["bitmap", "nm", "block"])
def test_a_flipped_bit_is_found_and_named(packed_directory, name, part):
    path, arrays = packed_directory
    at = part_range(path, name, part)
    if at is None:
        pytest.skip("2:4 has no starts")
    file = path / at.key
    content = bytearray(file.read_bytes())
    content[at.start + at.nbytes // 2] ^= 1
    file.write_bytes(content)
    report = holdfast.verify(path)
    assert [(damage.tensors, damage.label, damage.offset) for damage in report.damaged] == [
        ((name,), at.label, at.start)
    ]
    assert not report.problems
    with holdfast.open(path) as ckpt:
        with pytest.raises(Corrupted) as caught:
            ckpt[name].numpy()
        assert caught.value.tensor == name
        assert caught.value.file.startswith(at.key)
        assert all(
            ckpt[key].numpy().tobytes() == array.tobytes()
            for key, array in arrays.items()
            if key != name
        )
    if part == "values":
        with holdfast.open(path, verify=False) as ckpt:
            assert ckpt[name].numpy().tobytes() != arrays[name].tobytes()
    with pytest.raises(HoldfastError):
        holdfast.convert(path, path.parent / "out")
    assert not (path.parent / "out").exists()


def test_reading_after_close(packed_directory):
    path, _ = packed_directory
    ckpt = holdfast.open(path)
    tensor = ckpt["bitmap"]
    tensor[3, 3:5].numpy()
    ckpt.close()
    for index in ((3, slice(3, 5)), ()):
        with pytest.raises(Closed):
            tensor[index].numpy()
    with pytest.raises(Closed):
        tensor.source.store.size(tensor.chunks[0].storage.key)


# Manifests that lie. `w` is 40 × 40 int16 as a bitmap, in groups of 16 elements; `p` the same as 2:4; `b` as blocks of 4 × 4.


def hostile_directory(monkeypatch):
    shrink(monkeypatch)
    files, raw, array = hostile_files()
    return dict(files), json.loads(raw), array


@cache
def hostile_files():
    rng = np.random.default_rng(4)
    array = np.zeros((40, 40), np.int16)
    array.reshape(-1, 4)[:, :2] = rng.integers(0, 9, (400, 2))
    memory = Memory()
    files = {}
    documents = []
    for name, sparse in (("w", "bitmap"), ("p", "2:4"), ("b", "4x4")):
        made = save({name: memory.array(array)}, sparse)
        document = json.loads(made[MANIFEST])
        key = f"{name}.safetensors"
        files[key] = next(content for file, content in made.items() if file.startswith("data-"))
        chunk = document["tensors"][name]["chunks"][0]
        for part in (chunk, chunk["sparse"]["where"], chunk["sparse"].get("starts", {})):
            part["file"] = len(documents)
        documents.append(document)
    manifest = documents[0]
    manifest["files"] = [{"name": key, "nbytes": len(content)} for key, content in files.items()]
    for document in documents[1:]:
        manifest["tensors"] |= document["tensors"]
    # Of a version whose text may be changed: what a sealed one says is looked at by the same code.
    manifest["version"] = 2
    del manifest["self"]
    return files, json.dumps(manifest), array


def chunk_of(manifest, name="w"):
    return manifest["tensors"][name]["chunks"][0]


def change(name, *path, value=None, by=None, drop=False):
    def apply(manifest):
        inside = chunk_of(manifest, name)
        for step in path[:-1]:
            inside = inside[step]
        if drop:
            del inside[path[-1]]
        elif by is not None:
            inside[path[-1]] = by(inside[path[-1]])
        else:
            inside[path[-1]] = value

    return apply


def shape(name, *lengths):
    return lambda manifest: manifest["tensors"][name].update(shape=list(lengths))


def whole(name, value):
    return lambda manifest: manifest.update({name: value})


LIES = {
    "version 1": (whole("version", 1), HeaderError),
    "an unknown encoding": (change("w", "sparse", "encoding", value="zstd"), MetadataError),
    "another encoding": (change("w", "sparse", "encoding", value="block"), MetadataError),
    "an encoding that is a number": (change("w", "sparse", "encoding", value=3), HeaderError),
    "no encoding": (change("w", "sparse", "encoding", drop=True), HeaderError),
    "an unknown field": (change("w", "sparse", "codec", value=1), HeaderError),
    "sparse as a list": (change("w", "sparse", value=[]), HeaderError),
    "sizes": (change("w", "sparse", "sizes", value=[1]), MetadataError),
    "sizes beyond all": (change("p", "sparse", "sizes", value=[1 << 80, 1 << 90]), (MetadataError, HeaderError)),
    "3:4": (change("p", "sparse", "sizes", value=[3, 4]), MetadataError),
    "2:5": (change("p", "sparse", "sizes", value=[2, 5]), MetadataError),
    "2:0": (change("p", "sparse", "sizes", value=[2, 0]), MetadataError),
    "4:2": (change("p", "sparse", "sizes", value=[4, 2]), MetadataError),
    "blocks of nothing": (change("b", "sparse", "sizes", value=[0, 4]), MetadataError),
    "blocks below nothing": (change("b", "sparse", "sizes", value=[-4, -4]), MetadataError),
    "blocks beyond the matrix": (change("b", "sparse", "sizes", value=[41, 4]), MetadataError),
    "blocks that leave a rest": (change("b", "sparse", "sizes", value=[4, 3]), MetadataError),
    "no marks": (change("w", "sparse", "where", drop=True), HeaderError),
    "no starts": (change("w", "sparse", "starts", drop=True), HeaderError),
    "starts where there are none": (
        change("p", "sparse", by=lambda sparse: sparse | {"starts": sparse["where"]}), (HeaderError, MetadataError)),
    "fewer values": (change("w", "bytes", by=lambda span: [span[0], span[1] - 1]), MetadataError),
    "fewer values of a pattern": (change("p", "bytes", by=lambda span: [span[0], span[1] - 2]), MetadataError),
    "part of a block": (change("b", "bytes", by=lambda span: [span[0], span[1] - 2]), MetadataError),
    "fewer marks": (change("w", "sparse", "where", "bytes", by=lambda span: [span[0], span[1] - 1]), MetadataError),
    "fewer starts": (change("w", "sparse", "starts", "bytes", by=lambda span: [span[0], span[1] - 8]), MetadataError),
    "values outside of the file": (change("w", "bytes", by=lambda span: [span[0], 1 << 40]), MetadataError),
    "marks outside of the file": (change("w", "sparse", "where", "bytes", value=[1 << 62, (1 << 62) + 200]), MetadataError),
    "marks backwards": (change("w", "sparse", "where", "bytes", by=lambda span: span[::-1]), MetadataError),
    "marks in the header": (change("w", "sparse", "where", "bytes", value=[0, 200]), MetadataError),
    "marks in no file": (change("w", "sparse", "where", "file", value=9), HeaderError),
    "marks in file -1": (change("w", "sparse", "where", "file", value=-1), HeaderError),
    "marks over the values": (
        lambda m: chunk_of(m)["sparse"]["where"].update(bytes=[chunk_of(m)["bytes"][0], chunk_of(m)["bytes"][0] + 200]),
        MetadataError),
    "a checksum that is none": (change("w", "crc32", value="xyz"), HeaderError),
    "a checksum of marks that is none": (change("w", "sparse", "where", "crc32", value="0"), HeaderError),
    "a checksum of values that is none": (change("w", "sparse", "values", value="ABCDEF01"), HeaderError),
    "more elements": (shape("w", 40, 41), MetadataError),
    "a shape without elements": (shape("w", 0, 40), MetadataError),
    "a shape beyond all": (shape("w", 1 << 40, 1 << 40), MetadataError),
    "an axis that is no multiple": (shape("p", 160, 10), MetadataError),
    "a narrow dtype": (lambda m: m["tensors"]["w"].update(dtype="float4_e2m1fn"), MetadataError),
    "another dtype": (lambda m: m["tensors"]["w"].update(dtype="int32"), MetadataError),
}  # fmt: skip


@pytest.mark.parametrize("case", LIES)
def test_a_manifest_that_lies_is_refused(monkeypatch, case):
    apply, error = LIES[case]
    files, manifest, array = hostile_directory(monkeypatch)
    honest = reopen(files | {MANIFEST: json.dumps(manifest).encode()})
    assert all(honest[name].numpy().tobytes() == array.tobytes() for name in "wpb")
    lying = copy.deepcopy(manifest)
    apply(lying)
    with pytest.raises(error) as caught:
        reopen(files | {MANIFEST: json.dumps(lying).encode()})
    assert caught.value.file == MANIFEST


def with_crcs(files, manifest):
    """The manifest with the checksums of the parts as they are now, so that nothing but their content is wrong."""
    keys = [file["name"] for file in manifest["files"]]
    for stored in manifest["tensors"].values():
        chunk = stored["chunks"][0]
        sparse = chunk["sparse"]

        def crc(part, span):
            return f"{zlib.crc32(files[keys[part['file']]][slice(*span)]):08x}"

        sparse["values"] = crc(chunk, chunk["bytes"])
        for part in ("where", "starts"):
            if part in sparse:
                sparse[part]["crc32"] = crc(sparse[part], sparse[part]["bytes"])
    return json.dumps(manifest).encode()


def put(content, start, new):
    return content[:start] + new + content[start + len(new) :]


STORED = {
    "a bit more": ("w", "where", 4, b"\xff"),
    "a bit less": ("w", "where", 0, b"\x00\x00"),
    "positions twice": ("p", "where", 0, b"\x00"),
    "positions that fall": ("p", "where", 0, b"\x01"),
    "starts not from 0": ("w", "starts", 0, b"\x01"),
    "starts that fall": ("w", "starts", 8, b"\xff"),
    "starts beyond the values": ("w", "starts", 16, b"\xff" * 7),
    "starts of 2^64 - 1": ("w", "starts", 16, b"\xff" * 8),
    "starts of blocks": ("b", "starts", 8, b"\x01"),
    "another block": ("b", "where", 0, b"\x00"),
    "a block behind the last": ("b", "where", 1, b"\xff"),
}


@pytest.mark.parametrize("case", STORED)
def test_parts_that_do_not_fit_together_are_refused(monkeypatch, case):
    name, part, at, new = STORED[case]
    files, manifest, _ = hostile_directory(monkeypatch)
    chunk = chunk_of(manifest, name)
    start = chunk["sparse"][part]["bytes"][0]
    key = f"{name}.safetensors"
    damaged = files | {key: put(files[key], start + at, new)}
    with pytest.raises(Corrupted) as caught:
        reopen(damaged | {MANIFEST: json.dumps(manifest).encode()})[name].numpy()
    assert (caught.value.file, caught.value.tensor, caught.value.offset) == (key, name, start)
    lying = with_crcs(damaged, copy.deepcopy(manifest))
    for index in ((), (0, slice(1, 39))):
        with pytest.raises(MetadataError) as caught:
            reopen(damaged | {MANIFEST: lying})[name][index].numpy()
        assert (caught.value.file, caught.value.tensor) == (key, name)


def test_starts_do_not_lead_to_the_bytes_of_others(monkeypatch):
    """Two starts that fit each other, behind the last value: what lies there in the file is another part."""
    files, manifest, _ = hostile_directory(monkeypatch)
    chunk = chunk_of(manifest, "w")
    total = (chunk["bytes"][1] - chunk["bytes"][0]) // 2
    start, key = chunk["sparse"]["starts"]["bytes"][0], "w.safetensors"
    first, second = np.frombuffer(files[key][start + 8 : start + 24], "<u8").tolist()
    files[key] = put(
        files[key], start + 8, np.array([total, total + second - first], "<u8").tobytes()
    )
    tensor = reopen(files | {MANIFEST: with_crcs(files, manifest)})["w"]
    with pytest.raises(MetadataError, match="cannot be true"):
        tensor[0, 16:32].numpy()


def test_few_groups_are_kept(monkeypatch):
    files, manifest, array = hostile_directory(monkeypatch)
    tensor = reopen(files | {MANIFEST: json.dumps(manifest).encode()})["w"]
    assert [int(tensor[i, i].numpy()) for i in range(40)] == array.diagonal().tolist()
    kept = tensor.source.store._cache
    assert 0 < kept.nbytes <= unpacked.CACHE_NBYTES


def test_a_damaged_source_is_not_packed(tmp_path):
    array = np.zeros(4096, np.float32)
    array[::3] = 1.5
    holdfast.save({"w": array}, tmp_path / "a.safetensors")
    content = bytearray((tmp_path / "a.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(Corrupted) as caught:
        holdfast.convert(tmp_path / "a.safetensors", tmp_path / "b", sparse="auto")
    assert caught.value.tensor == "w"
    assert not (tmp_path / "b").exists()


@settings(deadline=None, max_examples=examples(200))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["w", "p", "b", MANIFEST]), st.integers(0, 1 << 16), st.integers(0, 255)
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_changed_bytes_are_refused_or_harmless(changes):
    """Whatever bytes change, checksums not compared: the tensors read as something, or a Holdfast error is raised."""
    with pytest.MonkeyPatch.context() as patch:
        files, manifest, _ = hostile_directory(patch)
        files[MANIFEST] = json.dumps(manifest).encode()
        for file, place, value in changes:
            key = file if file == MANIFEST else f"{file}.safetensors"
            place %= len(files[key])
            files[key] = put(files[key], place, bytes([value]))
        try:
            source = OpenSource(MemoryStore(files), verify=False)
            ckpt = Checkpoint(source, detect(source).describe(source))
        except HoldfastError:
            return
        for tensor in ckpt.values():
            for part in (tensor, tensor[1:3, 1:] if tensor.ndim == 2 else tensor):
                with contextlib.suppress(HoldfastError):
                    assert part.numpy().shape == part.shape


def test_a_small_file_does_not_stand_for_a_large_tensor(monkeypatch):
    """Blocks without values: one bit for 4 MiB of elements, if a manifest says so."""
    array = np.zeros((64, 1024), np.float64)
    files = save({"w": Memory().array(array)}, "64x256", worth=1.0)
    assert packing_of(reopen(files)["w"]) is None  # the writer does not do it
    monkeypatch.setattr("holdfast.engine.packed.pays", lambda *_: True)
    files = save({"w": Memory().array(array)}, "64x256")
    with pytest.raises(LimitExceeded, match="sparse_expansion"):
        reopen(files)
    ckpt = reopen(files, Limits(sparse_expansion=1 << 20))
    assert not ckpt["w"].numpy().any()
