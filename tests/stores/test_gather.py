"""Many short ranges in one call: the same bytes as reads one by one, and no signal where a file shrinks."""

from __future__ import annotations

import os
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import open as open_checkpoint
from holdfast import save
from holdfast.errors import Truncated
from holdfast.stores import local as gathering
from holdfast.stores.local import LocalStore, gather

NBYTES = 3 * 4096 + 123


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gather") / "file"
    content = np.random.default_rng(0).integers(0, 256, NBYTES, np.uint8)
    content.tofile(path)
    return path, content


@given(
    st.lists(st.tuples(st.integers(0, NBYTES - 1), st.integers(0, 5000)), min_size=1, max_size=40)
)
def test_every_range_is_what_the_file_has(file, ranges):
    path, content = file
    starts = np.sort(np.array([start for start, _ in ranges], np.int64))
    nbytes = np.minimum(np.array([n for _, n in ranges], np.int64), NBYTES - starts)
    places = np.concatenate(([0], np.cumsum(nbytes)))
    out = np.zeros(int(places[-1]) + 1, np.uint8)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = gather(descriptor, starts, nbytes, places[:-1] + out.ctypes.data)
    finally:
        os.close(descriptor)
    assert done == len(ranges)
    expected = [content[start : start + n] for start, n in zip(starts, nbytes, strict=True)]
    assert np.array_equal(out[:-1], np.concatenate(expected))


def test_ranges_of_more_than_one_window(file, monkeypatch):
    path, content = file
    monkeypatch.setattr(gathering, "WINDOW_NBYTES", 5000)
    starts = np.array([0, 10, 4990, 5001, 9000, 12_000], np.int64)
    out = np.zeros((6, 100), np.uint8)
    with closing(LocalStore(path)) as store:
        assert (
            store.gather(
                "file",
                starts,
                np.full(6, 100),
                out.ctypes.data + 100 * np.arange(6, dtype=np.int64),
            )
            == 6
        )
    assert all(
        np.array_equal(out[i], content[start : start + 100]) for i, start in enumerate(starts)
    )


def test_pieces_far_apart_are_not_mapped(tmp_path, monkeypatch):
    """What lies between would count as memory, and be read around each piece where the file is not in the cache."""
    asked = []
    monkeypatch.setattr(
        LocalStore,
        "gather",
        lambda self, key, starts, nbytes, places: asked.append(len(starts)) or 0,
    )
    wide = np.arange(64 * 20_000, dtype=np.float32).reshape(64, 20_000)
    save({"w": wide}, tmp_path / "w.safetensors")
    with open_checkpoint(tmp_path / "w.safetensors") as checkpoint:
        assert np.array_equal(checkpoint["w"][:, 5:9].numpy(), wide[:, 5:9])
        assert asked == []
        assert np.array_equal(checkpoint["w"][:, 5:4005].numpy(), wide[:, 5:4005])
        assert asked == [64]


def test_more_ranges_than_one_call_takes(file):
    path, content = file
    starts = np.arange(0, NBYTES - 2, 3, dtype=np.int64)
    assert len(starts) > 4 * gathering.VECTORS
    out = np.zeros((len(starts), 2), np.uint8)
    with closing(LocalStore(path)) as store:
        places = out.ctypes.data + 2 * np.arange(len(starts), dtype=np.int64)
        assert store.gather("file", starts, np.full(len(starts), 2), places) == len(starts)
    assert np.array_equal(out, np.stack((content[starts], content[starts + 1]), axis=1))


def test_a_file_that_shrank_ends_the_gathering_and_not_the_process(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    store = LocalStore(path)
    assert store.size("file") == 100_000
    os.truncate(path, 4096)
    out = np.zeros(20, np.uint8)
    starts = np.arange(20, dtype=np.int64) * 5000
    assert store.gather("file", starts, np.ones(20, np.int64), out.ctypes.data + np.arange(20)) == 0
    store.close()


def test_ranges_beyond_the_end_are_left_to_the_reader(file):
    store = LocalStore(file[0])
    out = np.zeros(2, np.uint8)
    assert (
        store.gather(
            "file", np.array([0, NBYTES]), np.ones(2, np.int64), out.ctypes.data + np.arange(2)
        )
        == 0
    )
    store.close()


@pytest.fixture(params=["allowed", "forbidden", "absent"])
def column(request, tmp_path, monkeypatch):
    """A checkpoint of which a column is read, with and without the system call."""
    if request.param == "absent":
        monkeypatch.setattr(gathering, "_process_vm_readv", lambda: None)
    if request.param == "forbidden":
        monkeypatch.setattr(gathering, "_process_vm_readv", lambda: lambda *_: -1)
    matrix = np.random.default_rng(1).standard_normal((3000, 900)).astype(np.float32)
    save({"w": matrix}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors", matrix


def test_a_column_is_the_same_with_and_without(column):
    path, matrix = column
    with open_checkpoint(path) as checkpoint:
        assert np.array_equal(checkpoint["w"][:, 100:300].numpy(), matrix[:, 100:300])
        assert np.array_equal(checkpoint["w"][::-1, 7].numpy(), matrix[::-1, 7])


def test_a_column_of_a_file_that_shrank_is_an_error(column):
    path, _ = column
    with open_checkpoint(path) as checkpoint:
        os.truncate(path, 5_000_000)
        with pytest.raises(Truncated, match="shrank"):
            checkpoint["w"][:, 100:300].numpy()
