"""Sources that shrink or change while they are converted: an error that says so, and nothing at the target."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

import holdfast
from holdfast.errors import (
    Corrupted,
    FormatError,
    HoldfastError,
    NotCommitted,
    StoreError,
    Truncated,
)

TARGETS = ["b.pt", "b.safetensors", "b"]


class Meddling:
    """A progress callback that does something to the source when the first block has been written."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act: Callable[[], object] | None = act

    def __call__(self, nbytes: int) -> None:
        act, self.act = self.act, None
        if act is not None:
            act()


@pytest.fixture
def source(tmp_path) -> Path:
    """A file without checksums, of several blocks, of another library."""
    safetensors.numpy.save_file(
        {f"w{i}": np.full((1 << 20,), i, np.float32) for i in range(4)}, tmp_path / "a.safetensors"
    )
    return tmp_path / "a.safetensors"


def convert(source: Path, target: Path, act: Callable[[], object]) -> None:
    holdfast.convert(source, target, progress=Meddling(act), threads=1, overwrite=True)


@pytest.mark.parametrize("name", TARGETS)
def test_truncated_while_read(name, source, tmp_path):
    with pytest.raises(Truncated, match="shrank"):
        convert(source, tmp_path / name, lambda: os.truncate(source, 5 << 20))
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize("name", TARGETS)
def test_changed_while_read(name, source, tmp_path):
    def act() -> None:
        with open(source, "r+b") as file:
            file.seek(15 << 20)
            file.write(b"changed")

    with pytest.raises(NotCommitted, match="changed while it was read") as caught:
        convert(source, tmp_path / name, act)
    assert "a.safetensors" in str(caught.value)
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_grown_while_read(source, tmp_path):
    with pytest.raises(NotCommitted, match="changed while it was read"):
        convert(source, tmp_path / "b.pt", lambda: os.truncate(source, source.stat().st_size + 1))
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_changed_while_a_save_reads_it(source, tmp_path):
    with (
        holdfast.open(source) as ckpt,
        pytest.raises(NotCommitted, match="changed while it was read"),
    ):
        holdfast.save(
            {"w": ckpt["w0"]},
            tmp_path / "b.pt",
            progress=Meddling(lambda: os.utime(source, (1, 1))),
        )
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_changed_under_a_checksum(tmp_path):
    torch.save({f"w{i}": torch.full((1 << 20,), float(i)) for i in range(4)}, tmp_path / "a.pt")

    def act() -> None:
        with open(tmp_path / "a.pt", "r+b") as file:
            file.seek(15 << 20)
            file.write(b"changed")

    with pytest.raises((Corrupted, NotCommitted)):
        convert(tmp_path / "a.pt", tmp_path / "b.safetensors", act)
    assert os.listdir(tmp_path) == ["a.pt"]


def test_replaced_while_read_is_no_change(source, tmp_path):
    """Another file under the same name: the one that was opened is still whole."""

    def act() -> None:
        (tmp_path / "other").write_bytes(b"x")
        os.rename(tmp_path / "other", source)

    convert(source, tmp_path / "b.pt", act)
    assert torch.load(tmp_path / "b.pt", weights_only=True)["w3"][-1] == 3


def test_the_old_target_survives(source, tmp_path):
    holdfast.save({"old": np.ones(1)}, tmp_path / "b.pt")
    with pytest.raises(Truncated):
        convert(source, tmp_path / "b.pt", lambda: os.truncate(source, 5 << 20))
    assert torch.load(tmp_path / "b.pt", weights_only=True)["old"] == 1


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 100, 1 << 20])
@pytest.mark.parametrize("kind", ["a.safetensors", "a.pt"])
def test_truncated_before(kind, cut, tmp_path):
    holdfast.save({"w": np.ones(1 << 20, np.float32)}, tmp_path / kind)
    os.truncate(tmp_path / kind, cut)
    with pytest.raises(FormatError):
        holdfast.convert(tmp_path / kind, tmp_path / "b.safetensors")
    assert os.listdir(tmp_path) == [kind]


def test_no_source(tmp_path):
    with pytest.raises(StoreError, match="no such file"):
        holdfast.convert(tmp_path / "a.pt", tmp_path / "b.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(HoldfastError, match="regular file"):
        holdfast.convert(tmp_path / "pipe.pt", tmp_path / "b.pt")
    with pytest.raises(HoldfastError):
        holdfast.convert("/dev/zero", tmp_path / "b.pt")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may refuse or delay it")
@pytest.mark.parametrize("opened", ["holdfast.open", "holdfast.torch.open", "holdfast.torch.load"])
def test_a_mapped_file_that_is_truncated_ends_the_process_and_a_replaced_one_does_not(
    opened: str, tmp_path: Path
):
    """This is what the documentation of `mmap` says."""
    path = tmp_path / "a.pt"
    program = f"""
import os, sys
import numpy as np
import holdfast, holdfast.torch
path = {str(path)!r}
holdfast.save({{"w": np.ones(1 << 20, np.float32)}}, path)
loaded = {opened}(path, mmap=True)
tensor = loaded["w"]
array = tensor.numpy() if {opened == "holdfast.open"} else tensor
holdfast.save({{"w": np.zeros(1 << 20, np.float32)}}, path)
assert float(array.sum()) == 1 << 20
if "truncate" in sys.argv:
    loaded = {opened}(path, mmap=True)
    tensor = loaded["w"]
    array = tensor.numpy() if {opened == "holdfast.open"} else tensor
    os.truncate(path, 4096)
    float(array.sum())
"""
    replaced = subprocess.run([sys.executable, "-c", program], check=False)
    truncated = subprocess.run([sys.executable, "-c", program, "truncate"], check=False)
    assert replaced.returncode == 0
    assert truncated.returncode == -signal.SIGBUS
