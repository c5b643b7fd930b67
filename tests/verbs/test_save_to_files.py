"""`save` to file objects and to bytes, and what is said of files of text."""

from __future__ import annotations

import functools
import gzip
import io
import tempfile

import numpy as np
import pytest
import safetensors.numpy
import torch

import holdfast
import holdfast.torch
from holdfast.errors import BadArgument, BadArgumentType, CannotHold

STATE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float16)}


def test_bytes():
    made = holdfast.to_bytes(STATE, "safetensors", metadata={"a": "b"})
    assert type(made) is bytes
    assert safetensors.numpy.load(made)["w"].tolist() == STATE["w"].tolist()
    assert holdfast.open(made).metadata["a"] == "b"
    assert (
        torch.load(io.BytesIO(holdfast.to_bytes({"w": torch.ones(2), "step": 3}, "torch")))["step"]
        == 3
    )


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_a_file_object_gets_the_bytes_of_a_file(tmp_path, format):
    told = []
    file = io.BytesIO()
    done = holdfast.save(STATE, file, format=format, progress=told.append)
    assert (done.done, done.nbytes, sum(told)) == (True, len(file.getvalue()), len(file.getvalue()))
    path = tmp_path / "archive"
    holdfast.save(STATE, path, format=format)
    assert file.getvalue() == path.read_bytes()
    assert holdfast.open(file)["w"].tolist() == STATE["w"].tolist()


def test_the_name_of_a_file_says_the_format(tmp_path):
    with open(tmp_path / "a.safetensors", "wb") as file:
        assert holdfast.save(STATE, file).format == "safetensors"
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        assert holdfast.save(STATE, file).format == "torch-zip"
    with (
        gzip.open(tmp_path / "a.pt.gz", "wb") as file,
        pytest.raises(BadArgument, match="say format='safetensors'"),
    ):
        holdfast.save(STATE, file)
    with gzip.open(tmp_path / "a.gz", "wb") as file:
        holdfast.save(STATE, file, format="safetensors")
    assert set(holdfast.open(gzip.decompress((tmp_path / "a.gz").read_bytes()))) == {"w", "b"}


def test_what_has_no_format_or_is_a_directory_is_refused_and_nothing_is_written():
    file = io.BytesIO()
    with pytest.raises(BadArgument, match="say format='safetensors' or format='torch'"):
        holdfast.save(STATE, file)
    for more in ({"format": "native"}, {"format": "safetensors", "max_shard_size": "1GB"}):
        with pytest.raises(CannotHold, match="a file object holds one file"):
            holdfast.save(STATE, file, **more)
        with pytest.raises(CannotHold, match="directory of files"):
            holdfast.to_bytes(STATE, "native")
    assert holdfast.save(STATE, file, format="torch", dry_run=True).done is False
    assert file.getvalue() == b""


class Slow:
    """A raw file: it takes some bytes at a time, and has no other method."""

    def __init__(self) -> None:
        self.content = b""

    def write(self, data):
        self.content += bytes(data[:100])
        return min(len(data), 100)


def test_anything_with_write():
    file, told = Slow(), []
    holdfast.save(STATE, file, format="torch", progress=told.append)
    assert file.content == holdfast.to_bytes(STATE, "torch")
    assert sum(told) == len(file.content)


TEXT = [io.StringIO, *(functools.partial(each, mode="w+") for each in (tempfile.TemporaryFile, tempfile.NamedTemporaryFile)),
        functools.partial(tempfile.SpooledTemporaryFile, mode="w+")]  # fmt: skip


@pytest.mark.parametrize("make", TEXT)
def test_files_of_text_are_refused_in_a_sentence(make):
    with make() as file:
        for mode, call in (
            ("wb", lambda file: holdfast.save(STATE, file, format="torch")),
            ("wb", lambda file: holdfast.torch.save({"w": torch.ones(1)}, file)),
            ("rb", holdfast.open),
            ("rb", holdfast.torch.open),
        ):
            with pytest.raises(
                BadArgumentType, match=f"is a file of text; open it in binary mode \\('{mode}'\\)"
            ):
                call(file)
        with pytest.raises(TypeError, match="must be opened in binary mode"):
            holdfast.torch.load(file)


def test_binary_files_of_all_kinds_are_none_of_text():
    for make in (
        io.BytesIO,
        tempfile.TemporaryFile,
        tempfile.NamedTemporaryFile,
        tempfile.SpooledTemporaryFile,
    ):
        with make() as file:
            holdfast.save(STATE, file, format="safetensors")
            assert set(holdfast.open(file)) == {"w", "b"}
