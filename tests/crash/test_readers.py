"""Readers of a path that is overwritten all the time: each read is all of one checkpoint, or says that it was replaced.

The writer is a process (`overwrite.py`) that saves two states in turn; readers are threads here. A reader that asked by path would
get one checkpoint's manifest and another's data, a checksum that does not match, or half a folder as another format.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.errors import Replaced
from holdfast.stores.local import Folder
from holdfast.verbs.open import TRIES, retry_opening
from holdfast.verbs.verify import Verification
from tests.crash.overwrite import FORMATS, KINDS, name_of, rows, save, state
from tests.sampling import count_rounds

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def overwritten(kind: str) -> Iterator[str]:
    """A path to which a process saves as long as the block lasts."""
    # In memory, so that the saves are many.
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as folder:
        path = os.path.join(folder, name_of(kind))
        command = [sys.executable, "-m", "tests.crash.overwrite", kind, path]
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as writer:
            try:
                assert writer.stdout is not None
                assert writer.stderr is not None
                assert writer.stdout.readline() == "ready\n", writer.stderr.read()
                yield path
                assert writer.poll() is None, writer.stderr.read()
            finally:
                writer.kill()


class Reader:
    """Opens a path again and again, and reads from each checkpoint a few times while others take its place."""

    def __init__(self, kind: str, path: str, checkpoints: int, *, until: Sequence[str]) -> None:
        """So many checkpoints, and more where something is yet to be seen: on a busy machine the writer may have to wait."""
        self.kind, self.path, self.checkpoints, self.until = kind, path, checkpoints, until
        self.seen: Counter[str] = Counter()
        self.failed: BaseException | None = None
        self.states = [state(kind, which) for which in (0, 1)]

    def run(self) -> None:
        try:
            while self.seen["opened"] < self.checkpoints or (
                not all(self.seen[what] for what in self.until)
                and self.seen["opened"] < 100 * self.checkpoints
            ):
                try:
                    self.open_and_read()
                except Replaced:
                    self.seen["replaced"] += 1
        except BaseException as error:
            self.failed = error

    def open_and_read(self) -> None:
        turn = self.seen["opened"]
        self.seen["opened"] += 1
        with holdfast.open(self.path, mmap=turn % 4 == 3) as c:
            assert c.format == FORMATS[self.kind]
            tree = c.tree
            assert isinstance(tree, dict)
            which = tree["step"]
            self.seen[f"step {which}"] += 1
            wanted = self.states[which]
            assert tree["words"] == wanted["words"]
            for i in range(4):
                time.sleep(0.0005 * (turn % 3))
                at = (slice(turn % rows(which), None, 3), slice(i, None, 1 + turn % 2))
                assert np.array_equal(c[f"w{i}"][at].numpy(), wanted[f"w{i}"][at])  # type: ignore[index]  # an array
                assert np.array_equal(c[f"w{3 - i}"].numpy(), wanted[f"w{3 - i}"])
                self.seen["read"] += 2


def read(kind: str, reads: int, *, until: Sequence[str] = ("step 0", "step 1")) -> Counter[str]:
    with overwritten(kind) as path:
        readers = [Reader(kind, path, reads // 16, until=until) for _ in range(2)]
        threads = [threading.Thread(target=reader.run) for reader in readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for reader in readers:
            if reader.failed is not None:
                raise reader.failed
    return sum((reader.seen for reader in readers), Counter())


@pytest.mark.parametrize("kind", KINDS)
def test_every_read_is_all_of_one_checkpoint(kind: str):
    reads = count_rounds("reads of a path that is overwritten", 400, total=10_000)
    seen = read(kind, reads)
    assert min(seen["step 0"], seen["step 1"]) > 0, "the writer did not write meanwhile"
    # Everything is open when `open` comes back: nothing but an unlucky `open` may fail.
    assert seen["replaced"] < seen["opened"] / 10
    assert seen["read"] >= 8 * (seen["opened"] - seen["replaced"])


@pytest.mark.parametrize("kind", ["native", "split-safetensors"])
def test_files_that_are_not_kept_open_are_the_same_or_gone(kind: str, monkeypatch):
    monkeypatch.setattr("holdfast.stores.local.MAX_KEPT_FILES", 1)
    reads = count_rounds("reads of files that are not kept open", 160, total=2_000)
    seen = read(kind, reads, until=["read", "replaced"])
    assert seen["read"] > 0
    assert seen["replaced"] > 0


@pytest.mark.parametrize("kind", ["native", "native-in-two-steps", "split-safetensors"])
def test_what_is_verified_is_one_checkpoint(kind: str):
    with overwritten(kind) as path:
        for _ in range(count_rounds("paths verified while overwritten", 25, total=1_000)):
            report = holdfast.verify(path)
            assert report.ok, report
            assert report.format == FORMATS[kind]


@pytest.mark.parametrize("kind", ["native", "split-safetensors", "dcp"])
@pytest.mark.parametrize("verb", [holdfast.open, holdfast.verify])
def test_a_path_is_opened_again_as_often_as_it_is_replaced(
    kind: str, verb, tmp_path: Path, monkeypatch
):
    path = os.fspath(tmp_path / "x")
    save(kind, path, 0)
    replaced = 0

    def list_and_replace(self, max_files: int) -> list[str]:
        nonlocal replaced
        keys = real(self, max_files)
        if self.path == path and replaced < 3 * TRIES:
            replaced += 1
            with monkeypatch.context() as patch:
                patch.setattr(Folder, "list", real)
                save(kind, path, replaced % 2)
        return keys

    real = Folder.list
    monkeypatch.setattr(Folder, "list", list_and_replace)
    found = verb(path)
    assert replaced == 3 * TRIES
    assert found.format == FORMATS[kind]
    if verb is holdfast.verify:
        assert found.ok, found
    else:
        found.close()


def test_a_bucket_is_not_asked_for_seconds_for_what_is_gone(monkeypatch):
    monkeypatch.setattr("holdfast.verbs.open.PATIENCE_S", 0.01)
    assert sum(1 for _ in retry_opening("x")) > TRIES
    assert sum(1 for _ in retry_opening("s3://bucket/x")) == TRIES


@pytest.mark.parametrize("kind", ["native", "split-safetensors", "dcp"])
def test_what_was_listed_is_verified_after_it_was_replaced(kind: str, tmp_path: Path, monkeypatch):
    path = os.fspath(tmp_path / "x")
    save(kind, path, 0)
    looks = 0

    def replace_and_verify(self, *arguments):
        nonlocal looks
        looks += 1
        save(kind, path, 1)
        return real(self, *arguments)

    real = Verification._checkpoint
    monkeypatch.setattr(Verification, "_checkpoint", replace_and_verify)
    report = holdfast.verify(path)
    assert report.ok, report
    assert report.format == FORMATS[kind]
    assert looks == 1


def test_a_file_that_is_mapped_is_the_one_that_was_read(tmp_path: Path, monkeypatch):
    from holdfast.torch import load

    for name, length in (("x.pt", 100), ("y.pt", 300)):
        holdfast.save({"w": np.full((length, 10), length)}, tmp_path / name)

    def read_archive(*arguments, **options):
        found = real(*arguments, **options)
        os.replace(tmp_path / "y.pt", tmp_path / "x.pt")
        return found

    module = sys.modules["holdfast.torch.serialization.loading"]
    real = module.read_archive
    monkeypatch.setattr(module, "read_archive", read_archive)
    with pytest.raises(Replaced):
        load(tmp_path / "x.pt", mmap=True)


@pytest.mark.parametrize("kind", ["native", "split-safetensors", "dcp"])
def test_half_a_checkpoint_is_one_with_missing_files(kind: str, tmp_path: Path, monkeypatch):
    """Where the removal of what was replaced is cut off, or seen by a host that does not know of the exchange yet."""
    path = os.fspath(tmp_path / "x")
    save(kind, path, 0)
    removed = []

    class Stop(OSError):
        pass

    def unlink(self, name: str, *, dir_fd: int) -> None:
        if removed:
            raise Stop
        removed.append(name)
        os.unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr("holdfast.stores.files.Files.unlink", unlink)
    save(kind, path, 1)
    monkeypatch.undo()
    (left,) = (name for name in os.listdir(tmp_path) if name != "x")
    assert removed
    with pytest.raises(holdfast.errors.StoreError, match="not there"):
        holdfast.open(tmp_path / left)
    with holdfast.open(path) as c:
        assert c.format == FORMATS[kind]
