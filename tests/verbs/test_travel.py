"""Checkpoints and lazy tensors in other processes: they travel by path, and arrive as what was opened or not at all."""

from __future__ import annotations

import copy
import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.errors import Closed, Replaced, StoreError, Unsupported
from tests.crash.overwrite import KINDS, name_of, rows, save
from tests.processes import fork_server


@pytest.fixture
def path(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    made = os.fspath(tmp_path / name_of(request.param))
    save(request.param, made, 1)
    return made


def sum_of(lazy: holdfast.LazyTensor) -> float:
    return float(lazy.numpy().sum())


def describe(checkpoint: holdfast.Checkpoint) -> tuple[str, list[str], float]:
    return checkpoint.format, list(checkpoint), sum_of(checkpoint["w3"])


@pytest.mark.parametrize("path", KINDS, indirect=True)
@pytest.mark.parametrize("mmap", [False, True])
def test_they_arrive_as_they_were(path: str, mmap: bool):
    with holdfast.open(path, mmap=mmap) as checkpoint:
        for lazy in (
            checkpoint["w2"],
            checkpoint["w2"][3:9, ::2],
            checkpoint["w2"].T[1],
            checkpoint["w2"][:0],
        ):
            arrived = pickle.loads(pickle.dumps(lazy))
            assert (arrived.name, arrived.dtype, arrived.shape) == (
                lazy.name,
                lazy.dtype,
                lazy.shape,
            )
            assert np.array_equal(arrived.numpy(), lazy.numpy())
        arrived, tensor = pickle.loads(pickle.dumps((checkpoint, checkpoint["w0"])))
        assert describe(arrived) == describe(checkpoint)
        assert arrived.tree["step"] == 1
        assert arrived.source.mapped is mmap
        arrived.close()
        with pytest.raises(Closed):
            tensor.numpy()


def test_workers_in_other_processes_read(tmp_path: Path):
    save("native", os.fspath(tmp_path / "x"), 1)
    with (
        holdfast.open(tmp_path / "x") as checkpoint,
        fork_server().Pool(1) as pool,
    ):
        assert pool.map(sum_of, [checkpoint["w0"], checkpoint["w1"][2:4]]) == [rows(1) * 16, 34]
        assert pool.apply(describe, [checkpoint]) == describe(checkpoint)


def test_a_relative_path_arrives_wherever_the_other_process_is(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("native", "x", 1)
    with holdfast.open("x") as checkpoint:
        sent = pickle.dumps(checkpoint["w0"])
        monkeypatch.chdir("/")
        assert sum_of(pickle.loads(sent)) == rows(1) * 16


@pytest.mark.parametrize("path", KINDS, indirect=True)
def test_another_checkpoint_under_the_path_is_refused(path: str, request: pytest.FixtureRequest):
    kind = request.node.callspec.params["path"]
    with holdfast.open(path) as checkpoint:
        sent, whole = pickle.dumps(checkpoint["w0"]), pickle.dumps(checkpoint)
    save(kind, path, 1)  # the same values, and yet not what was opened
    with pytest.raises(Replaced, match="sent to this process"):
        pickle.loads(sent).numpy()
    with pytest.raises(Replaced, match="sent to this process"):
        pickle.loads(whole)


def test_another_format_under_the_path_is_refused(tmp_path: Path):
    path = os.fspath(tmp_path / "x")
    save("native", path, 1)
    with holdfast.open(path) as checkpoint:
        whole = pickle.dumps(checkpoint)
    os.rename(path, path + "-old")
    save("split-safetensors", path, 1)
    with pytest.raises(Replaced):
        pickle.loads(whole)
    os.rename(path, path + "-new")
    with pytest.raises(StoreError, match="no such file"):
        pickle.loads(whole)


def test_what_has_no_path_says_so():
    import torch

    content = io.BytesIO()
    torch.save({"w": torch.ones(3)}, content)
    for opened in (content.getvalue(), content):
        with holdfast.open(opened) as checkpoint:
            for what in (checkpoint, checkpoint["w"], checkpoint["w"][1:]):
                with pytest.raises(Unsupported, match="cannot be"):
                    pickle.dumps(what)
                assert copy.deepcopy(what) is what


def test_what_is_closed_does_not_travel(tmp_path: Path):
    save("native", os.fspath(tmp_path / "x"), 1)
    checkpoint = holdfast.open(tmp_path / "x")
    lazy = checkpoint["w0"]
    checkpoint.close()
    with pytest.raises(Closed):
        pickle.dumps(lazy)


def test_the_torch_face_travels(tmp_path: Path):
    import torch

    from holdfast.torch import open as open_torch

    save("native", os.fspath(tmp_path / "x"), 1)
    with (
        open_torch(tmp_path / "x") as checkpoint,
        pickle.loads(pickle.dumps(checkpoint)) as arrived,
    ):
        assert torch.equal(arrived["w1"], checkpoint["w1"])


def test_copies_are_the_same_thing(tmp_path: Path):
    save("native", os.fspath(tmp_path / "x"), 1)
    with holdfast.open(tmp_path / "x") as checkpoint:
        lazy = checkpoint["w0"]
        assert copy.copy(lazy) is lazy
        assert copy.deepcopy({"a": [lazy]})["a"][0] is lazy
        assert copy.copy(checkpoint) is checkpoint
        assert copy.deepcopy(checkpoint) is checkpoint
