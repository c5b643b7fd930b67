"""Where a checkpoint cannot go: full, read-only, forbidden, missing, or no place for a file. Nothing is left, nothing is lost."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.errors import HoldfastError, NotCommitted

NAMES = ["a.pt", "a.safetensors", "a"]
OLD, NEW = {"w": np.zeros(1000, np.float32)}, {"w": np.ones(2_000_000, np.float32)}


def is_old(path: Path) -> bool:
    with holdfast.open(path) as ckpt:
        return ckpt["w"].numpy().tolist() == [0] * 1000


def save_refused(path: Path, state: object = NEW) -> NotCommitted:
    with pytest.raises(NotCommitted) as caught:
        holdfast.save(state, path, overwrite=True)
    assert "\n" not in str(caught.value)
    return caught.value


@contextmanager
def mounted(options: str) -> Iterator[Path]:
    """A file system of its own, where this user may have one."""
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True
        ).returncode:
            pytest.skip("mounting is not allowed here")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("name", NAMES)
def test_disk_full(name):
    with mounted("size=1m") as disk:
        holdfast.save(OLD, disk / name)
        error = save_refused(disk / name)
        assert error.errno == errno.ENOSPC
        assert "disk is full" in str(error)
        assert is_old(disk / name)
        assert os.listdir(disk) == [name]


@pytest.mark.parametrize("name", NAMES)
def test_convert_looks_for_room_first(name, tmp_path):
    holdfast.save(NEW, tmp_path / "big.safetensors")
    with mounted("size=1m") as disk:
        with pytest.raises(NotCommitted, match="are free"):
            holdfast.convert(tmp_path / "big.safetensors", disk / name)
        assert (
            "NOT ENOUGH"
            in holdfast.convert(tmp_path / "big.safetensors", disk / name, dry_run=True).explain()
        )
        assert os.listdir(disk) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_file_larger_than_the_user_may_write(name, tmp_path):
    holdfast.save(OLD, tmp_path / name)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        error = save_refused(tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert error.errno == errno.EFBIG
    assert is_old(tmp_path / name)
    assert os.listdir(tmp_path) == [name]


def test_a_read_only_file_system():
    with mounted("size=1m") as disk:
        holdfast.save(OLD, disk / "a.pt")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for name in NAMES:
            assert save_refused(disk / name).errno == errno.EROFS
        assert is_old(disk / "a.pt")


@contextmanager
def nobody() -> Iterator[Path]:
    """A folder, and a user who may read it and not write to it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        else:
            os.chmod(folder, 0o555)
        try:
            yield Path(folder)
        finally:
            if root:
                os.seteuid(0)
            os.chmod(folder, 0o755)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_one_may_not_write_to(name):
    with nobody() as folder:
        error = save_refused(folder / name)
        assert error.errno == errno.EACCES
        assert "permission denied" in str(error)
        assert os.listdir(folder) == []


def test_a_file_that_is_marked_read_only(tmp_path):
    holdfast.save(OLD, tmp_path / "a.pt")
    os.chmod(tmp_path / "a.pt", 0o444)
    assert "read-only" in str(save_refused(tmp_path / "a.pt"))
    assert is_old(tmp_path / "a.pt")


def test_a_source_that_one_may_not_read(tmp_path):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        holdfast.save(OLD, Path(folder, "a.pt"))
        os.chmod(Path(folder, "a.pt"), 0)
        with nobody() as other, pytest.raises(HoldfastError, match="permission denied"):
            holdfast.convert(Path(folder, "a.pt"), other / "b.pt")


@pytest.mark.parametrize("name", NAMES)
def test_a_parent_that_is_not_there(name, tmp_path):
    assert save_refused(tmp_path / "no" / "such" / name).errno == errno.ENOENT
    (tmp_path / "file").write_text("x")
    assert save_refused(tmp_path / "file" / name).errno in (errno.ENOTDIR, errno.ENOENT)
    holdfast.save(OLD, tmp_path / "source.pt")
    for parent in ("no", "file"):
        with pytest.raises(NotCommitted):
            holdfast.convert(tmp_path / "source.pt", tmp_path / parent / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "source.pt"]


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_folder_where_a_file_should_be(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").write_text("x")
    with pytest.raises(HoldfastError):
        holdfast.save(NEW, tmp_path / name, format="torch" if name == "a.pt" else "safetensors")
    assert os.listdir(tmp_path) == [name]
    assert os.listdir(tmp_path / name) == ["mine"]


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "a").write_text("x")
    assert save_refused(tmp_path / "a").errno == errno.ENOTDIR
    assert (tmp_path / "a").read_text() == "x"


@pytest.mark.parametrize("name", NAMES)
def test_a_pipe(name, tmp_path):
    os.mkfifo(tmp_path / name)
    save_refused(tmp_path / name)
    assert stat.S_ISFIFO(os.stat(tmp_path / name).st_mode)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("format", ["torch", "safetensors", "native"])
def test_a_device(format):
    with pytest.raises(NotCommitted):
        holdfast.save(NEW, "/dev/null", format=format, overwrite=True)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert not [name for name in os.listdir("/dev") if name.startswith(".null")]


def test_names_that_no_file_can_have(tmp_path):
    for name in ("x" * 300 + ".pt", "a\0b.pt"):
        save_refused(tmp_path / name)
    with pytest.raises(NotCommitted):
        holdfast.save(NEW, "", format="torch")
    assert os.listdir(tmp_path) == []
