"""ONNX models: the golden files have what the onnx package writes; here is what depends on where things lie."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.formats.onnx.craft_onnx import (
    FLOAT,
    INT4,
    INT64,
    STRING,
    content,
    external,
    floats,
    graph,
    model,
    number,
    packed,
    tensor,
    varint,
)

import holdfast
from holdfast.core.opaque import Opaque
from holdfast.errors import (
    CannotHold,
    Closed,
    LimitExceeded,
    MetadataError,
    StoreError,
    Truncated,
    UnsafePath,
    Unsupported,
)
from holdfast.formats.onnx.read import decode_varints

BIG = np.arange(4096, dtype=np.float32)


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """A model with one tensor of its own, one of varints, and two in a file beside it."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "m.data").write_bytes(bytes(16) + BIG.tobytes())
    path = tmp_path / "m.onnx"
    path.write_bytes(
        model(
            tensor("own", (2,), FLOAT, floats(4, (1, 2))),
            tensor("shape", (3,), INT64, packed(7, (-1, 64, 1 << 40))),
            tensor("big", (64, 64), FLOAT, external("weights/m.data", 16, BIG.nbytes)),
            tensor("tied", (4096,), FLOAT, external("weights/m.data", 16, BIG.nbytes)),
        )
    )
    return path


def assert_expected(checkpoint: holdfast.Checkpoint) -> None:
    assert list(checkpoint) == ["own", "shape", "big", "tied"]
    assert checkpoint["own"].numpy().tolist() == [1, 2]
    assert checkpoint["shape"].numpy().tolist() == [-1, 64, 1 << 40]
    np.testing.assert_array_equal(checkpoint["big"].numpy(), BIG.reshape(64, 64))
    np.testing.assert_array_equal(checkpoint["big"][3:5, 7].numpy(), BIG.reshape(64, 64)[3:5, 7])


def test_tensors_in_the_model_and_beside_it(split):
    with holdfast.open(split) as checkpoint:
        assert checkpoint.format == "onnx"
        assert_expected(checkpoint)
        assert [alias.names for alias in checkpoint.aliases] == [("big", "tied")]
        assert checkpoint.metadata["producer_name"] == "craft"
        assert checkpoint.metadata["opset_import"] == "ai.onnx 21"


def test_it_opens_from_its_own_folder_and_by_a_link(split, monkeypatch):
    monkeypatch.chdir(split.parent)
    assert_expected(holdfast.open("m.onnx"))


def test_it_travels_to_another_process(split):
    with holdfast.open(split) as checkpoint:
        assert_expected(pickle.loads(pickle.dumps(checkpoint)))


def test_mapped_arrays_are_views(split):
    with holdfast.open(split, mmap=True) as checkpoint:
        assert_expected(checkpoint)


def test_a_closed_checkpoint_reads_nothing_of_the_other_file(split):
    checkpoint = holdfast.open(split)
    lazy = checkpoint["big"]
    checkpoint.close()
    with pytest.raises(Closed):
        lazy.numpy()


def test_it_opens_in_a_bucket(split):
    obstore = pytest.importorskip("obstore")
    client = obstore.store.MemoryStore()
    for file in (split, split.parent / "weights" / "m.data"):
        obstore.put(client, f"a/{file.relative_to(split.parent)}", file.read_bytes())
    with holdfast.open("a/m.onnx", store=client) as checkpoint:
        assert_expected(checkpoint)


def test_bytes_have_nothing_beside_them(split):
    with pytest.raises(Unsupported, match="open the model by its path"):
        holdfast.open(split.read_bytes())


def test_verbs_read_both_files(split, tmp_path):
    report = holdfast.verify(split)
    assert report.ok
    assert set(report.unchecked) == {"own", "shape", "big", "tied"}
    holdfast.convert(split, tmp_path / "m.safetensors")
    assert holdfast.diff(split, tmp_path / "m.safetensors", tensors_only=True).equal


def test_verify_reports_a_file_beside_that_shrank(split):
    with holdfast.open(split) as checkpoint:
        os.truncate(split.parent / "weights" / "m.data", 100)
        assert not holdfast.verify(checkpoint).ok


def test_a_copy_of_the_model_alone_is_refused(split, tmp_path):
    with pytest.raises(CannotHold, match="copy the folder"):
        holdfast.copy(split, tmp_path / "copy.onnx")
    assert not (tmp_path / "copy.onnx").exists()


def test_a_copy_of_a_model_in_one_file_is_the_file(tmp_path):
    (tmp_path / "m.onnx").write_bytes(model(tensor("w", (1,), INT64, packed(7, (5,)))))
    holdfast.copy(tmp_path / "m.onnx", tmp_path / "copy.onnx")
    assert (tmp_path / "copy.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()


def test_a_missing_file_names_itself_and_the_tensor(split):
    (split.parent / "weights" / "m.data").unlink()
    with pytest.raises(StoreError) as caught:
        holdfast.open(split)
    assert str(caught.value.file).endswith("weights/m.data")
    assert caught.value.tensor == "big"


def test_a_snapshot_of_the_hub_cache_may_have_links_to_its_blobs(split, tmp_path):
    cache = tmp_path / "models--org--name"
    folder = cache / "snapshots" / "abc" / "onnx"
    (folder / "weights").mkdir(parents=True)
    (cache / "blobs").mkdir()
    for name in ("m.onnx", "weights/m.data"):
        blob = cache / "blobs" / name.replace("/", "-")
        (split.parent / name).rename(blob)
        target = folder / name
        target.symlink_to(os.path.relpath(blob, target.parent))
    assert_expected(holdfast.open(folder / "m.onnx"))


def test_a_link_out_of_the_folder_is_refused(split, tmp_path):
    data = split.parent / "weights" / "m.data"
    outside = tmp_path / "outside"
    outside.mkdir()
    elsewhere = outside / "m.onnx"
    elsewhere.write_bytes(split.read_bytes())
    (outside / "weights").mkdir()
    (outside / "weights" / "m.data").symlink_to(data)
    with pytest.raises(UnsafePath):
        holdfast.open(elsewhere)


def test_what_is_not_read_is_in_the_tree_and_in_a_note(tmp_path):
    path = tmp_path / "m.onnx"
    sparse = content(15, content(1, tensor("s")))
    tensors = (
        tensor("w"),
        tensor("i", (2,), INT4, raw=b"x"),
        tensor("t", (1,), STRING, content(6, b"x")),
    )
    training = content(20, content(1, graph(tensor("state"))))
    path.write_bytes(number(1, 10) + content(7, graph(*tensors, more=sparse)) + training)
    with holdfast.open(path) as checkpoint:
        assert list(checkpoint) == ["w"]
        assert isinstance(checkpoint.tree["i"], Opaque)
        assert checkpoint.notes == (
            "initializers of the type INT4 are not read: 1",
            "initializers of the type STRING are not read: 1",
            "initializers that are sparse are not read: 1",
            "the model has information for training, whose tensors are not read",
        )


def test_numbers_are_decoded_when_they_are_read(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(model(tensor("w", (1,), 3, packed(5, (300,))), tensor("v")))
    with pytest.raises(MetadataError, match="8 bits") as caught:
        holdfast.open(path)["w"].numpy()
    assert caught.value.offset is not None


def test_the_limit_of_a_header_is_about_what_is_read(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(model(tensor("w", (10_000,), FLOAT, raw=bytes(40_000))))
    assert len(holdfast.open(path, limits=holdfast.Limits(header_nbytes=200))) == 1
    path.write_bytes(model(*[tensor(str(i)) for i in range(50)]))
    with pytest.raises(LimitExceeded, match="header_nbytes"):
        holdfast.open(path, limits=holdfast.Limits(header_nbytes=200))


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_file_that_is_cut_is_truncated(tmp_path, cut):
    path = tmp_path / "m.onnx"
    whole = number(1, 10) + content(7, graph(*[tensor(str(i)) for i in range(50)]))
    path.write_bytes(whole[:-cut])
    with pytest.raises(Truncated):
        holdfast.open(path)


KINDS = [(unit, is_signed) for unit in (1, 2, 4, 8) for is_signed in (False, True)]


@given(st.data(), st.sampled_from(KINDS))
def test_varints_decode_to_the_numbers_that_were_encoded(data, kind):
    """Against a writer that knows nothing of arrays."""
    unit, is_signed = kind
    low = -(1 << 8 * unit - 1) if is_signed else 0
    high = (1 << 8 * unit - is_signed) - 1
    values = data.draw(st.lists(st.integers(low, high), max_size=20))
    raw = b"".join(map(varint, values))
    decoded = decode_varints(raw, len(values), unit, is_signed=is_signed)
    assert decoded.view(f"<{'i' if is_signed else 'u'}{unit}").tolist() == values


@given(st.binary(max_size=40), st.integers(0, 20), st.sampled_from(KINDS))
def test_varints_of_any_bytes_are_numbers_or_refused(raw, count, kind):
    unit, is_signed = kind
    try:
        decoded = decode_varints(raw, count, unit, is_signed=is_signed)
    except MetadataError:
        return
    assert decoded.nbytes == count * unit
    values, at = [], 0
    while at < len(raw):
        value = shift = 0
        while True:
            value |= (raw[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if raw[at - 1] < 0x80:
                break
        values.append(value)
    mask = (1 << 8 * unit) - 1
    code = {1: "B", 2: "H", 4: "I", 8: "Q"}[unit]
    found = struct.unpack(f"<{count}{code}", decoded.tobytes())
    assert [value & mask for value in values] == list(found)
