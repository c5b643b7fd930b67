"""Tensors in very many chunks: the manifest has these in columns, and a reader that believes no number of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import flip_bit

import holdfast
from holdfast.core.documents import seal
from holdfast.errors import HeaderError, HoldfastError, MetadataError
from holdfast.formats.native.chunks import column_of, runs_of
from holdfast.verbs.reshard import reshard

STATE = {
    "a": np.arange(64 * 6, dtype=np.float32).reshape(64, 6),
    "b": np.arange(190 * 3, dtype=np.int16).reshape(190, 3),
    "whole": np.arange(7, dtype=np.int64),
    "narrow": np.arange(5, dtype=np.float64),
}
RULES = ("a: tp=0", "b: tp=0", "*: replicate")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    holdfast.save(STATE, tmp_path / "source", format="native")
    reshard(tmp_path / "source", tmp_path / "cut", mesh="tp=64", rules=RULES)
    return tmp_path / "cut"


def manifest(folder: Path) -> dict[str, object]:
    return json.loads((folder / "holdfast.json").read_text())


def rewrite(folder: Path, document: dict[str, object]) -> None:
    document.pop("self")
    (folder / "holdfast.json").write_bytes(seal(msgspec.json.encode(document)))


def test_what_is_cut_into_many_stands_in_columns_and_reads_as_it_was(folder: Path):
    document = manifest(folder)
    assert document["version"] == 6
    assert [len(entry["chunks"]) for entry in document["tensors"].values()] == [0, 0, 1, 1]
    assert sorted(document["tensors"]["a"]) == ["chunks", "columns", "dtype", "shape"]
    with holdfast.open(folder) as found:
        for name, array in STATE.items():
            assert found[name].numpy().tobytes() == array.tobytes()
            assert found[name][3:5].numpy().tobytes() == array[3:5].tobytes()
        assert len(found["a"].chunks) == 64
        assert found["b"][128:0:-7, 1].numpy().tolist() == STATE["b"][128:0:-7, 1].tolist()
        assert found["a"][2:2].numpy().shape == (0, 6)
    assert holdfast.verify(folder).ok


def test_it_is_converted(folder: Path, tmp_path: Path):
    holdfast.convert(folder, tmp_path / "one.safetensors")
    with holdfast.open(tmp_path / "one.safetensors") as found:
        assert {name: found[name].numpy().tobytes() for name in found} == {
            name: a.tobytes() for name, a in STATE.items()
        }


def test_a_changed_byte_of_a_chunk_is_found(folder: Path):
    with holdfast.open(folder) as found:
        place = found["a"].chunks[40].storage
    flip_bit(folder / place.key, place.start)
    report = holdfast.verify(folder)
    assert not report.ok


def columns(document: dict[str, object], name: str = "a") -> dict[str, object]:
    return document["tensors"][name]["columns"]


Lie = Callable[[dict[str, object]], None]
LIES: dict[str, tuple[Lie, type[HoldfastError]]] = {
    "an older version": (lambda d: d.update(version=5), HeaderError),
    "a hash beside it": (lambda d: d.update(hash="xxh3-128/1MiB"), HeaderError),
    "fewer files": (lambda d: columns(d).update(file=[0, 1, 63]), HeaderError),
    "more than there are": (lambda d: columns(d).update(file=[0, 1, 1 << 60]), HeaderError),
    "no whole run": (lambda d: columns(d).update(file=[0, 1]), HeaderError),
    "an empty run": (lambda d: columns(d).update(file=[0, 1, 64, 0, 1, 0]), HeaderError),
    "a negative count": (lambda d: columns(d).update(file=[0, 1, 65, 0, 1, -1]), HeaderError),
    "no files": (lambda d: columns(d).update(file=[]), HeaderError),
    "negative files": (lambda d: columns(d).update(file=[-1, 1, 64]), HeaderError),
    "a file that is not there": (lambda d: columns(d).update(file=[1, 1, 64]), MetadataError),
    "a place beyond all": (lambda d: columns(d).update(bytes=[(1 << 63) - 1, 0, 64]), MetadataError),
    "a step beyond all": (lambda d: columns(d).update(bytes=[8, 1 << 62, 64]), HeaderError),
    "a place in the prefix": (lambda d: columns(d).update(bytes=[0, 0, 64]), MetadataError),
    "a hole": (lambda d: columns(d).update(stop=[[1, 1, 63, 63, 0, 1], [6, 0, 64]]), MetadataError),
    "boxes beyond the tensor": (lambda d: columns(d).update(stop=[[2, 1, 64], [6, 0, 64]]), HeaderError),
    "turned boxes": (lambda d: columns(d).update(start=[[1, 1, 64], [0, 0, 64]], stop=[[0, 1, 64], [6, 0, 64]]), MetadataError),
    "a dimension too few": (lambda d: columns(d).update(start=[[0, 1, 64]]), HeaderError),
    "another letter": (lambda d: columns(d).update(crc32="x" + columns(d)["crc32"][1:]), HeaderError),
    "digits of another script": (lambda d: columns(d).update(crc32="٣" + columns(d)["crc32"][1:]), HeaderError),
    "half a checksum": (lambda d: columns(d).update(crc32=columns(d)["crc32"][4:]), HeaderError),
    "no chunk at all": (
        lambda d: columns(d).update(file=[], bytes=[], crc32="", start=[[], []], stop=[[], []]),
        HeaderError,
    ),
    "bytes of another tensor": (lambda d: columns(d).update(bytes=columns(d, "b")["bytes"]), MetadataError),
    "bytes of another chunk": (lambda d: columns(d).update(file=[0, 0, 64]), MetadataError),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_columns_that_lie_are_refused(folder: Path, lie: str):
    document = manifest(folder)
    change, expected = LIES[lie]
    change(document)
    rewrite(folder, document)
    with pytest.raises(expected):
        holdfast.open(folder)


@given(st.lists(st.integers(0, 5) | st.integers(0, 1 << 62), min_size=1, max_size=40))
def test_a_column_is_its_runs(numbers: list[int]):
    runs = runs_of(np.array(numbers, np.int64))
    again = column_of(runs, len(numbers), 1 << 62)
    assert again is not None
    assert again.tolist() == numbers


def test_an_even_cut_is_one_run():
    assert runs_of(np.arange(5, 8192 * 3, 3)) == (5, 3, 8191)
    assert runs_of(np.array([0, 1, 2, 9, 9, 9, 4])) == (0, 1, 3, 9, 0, 3, 4, 0, 1)
