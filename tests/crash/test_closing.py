"""Closing a checkpoint under its readers: the right bytes or `Closed`, and never those of a file that got the same descriptor."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.errors import Closed
from holdfast.stores.local import OPEN_DESCRIPTORS, DescriptorStore
from tests.sampling import count_rounds

OURS, THEIRS = 1, 2


class Readers:
    """Threads that read what is in `checkpoint` until they are told to stop."""

    def __init__(self, checkpoint: holdfast.Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.stop = False
        self.seen: Counter[str] = Counter()
        self.threads = [
            threading.Thread(target=self.run, args=(way,))
            for way in ("slice", "whole", "column", "map")
        ]

    def run(self, way: str) -> None:
        while not self.stop:
            try:
                lazy = self.checkpoint["w"]
                match way:
                    case "slice":
                        found = lazy[3:5].numpy()
                    case "whole":
                        found = lazy.numpy()
                    case "column":
                        found = lazy[:, 7].numpy()
                    case _:
                        storage = lazy.chunks[0].storage
                        memory = self.checkpoint.source.store.map(storage.key)
                        assert memory is not None
                        found = np.frombuffer(memory, np.uint8)[storage.start :][:4096]
            except Closed:
                self.seen["closed"] += 1
            except Exception as error:
                self.seen[f"{way}: {error!r}"] += 1
            else:
                self.seen["right" if (found == OURS).all() else f"{way}: another file's bytes"] += 1


@pytest.mark.parametrize("name", ["ours", "ours.pt", "ours.safetensors"])
def test_closing_under_readers(tmp_path: Path, name: str):
    path = tmp_path / name
    holdfast.save({"w": np.full((2048, 64), OURS, np.uint8)}, path)
    theirs = tmp_path / "theirs"
    theirs.write_bytes(bytes([THEIRS]) * path_nbytes(path))
    before = len(OPEN_DESCRIPTORS)
    readers = Readers(holdfast.open(path))
    for thread in readers.threads:
        thread.start()
    for _ in range(count_rounds("checkpoints closed under readers", 150, total=3_000)):
        readers.checkpoint.close()
        # Whatever was given back is taken at once.
        taken = [os.open(theirs, os.O_RDONLY) for _ in range(8)]
        fresh = holdfast.open(path)
        for descriptor in taken:
            os.close(descriptor)
        readers.checkpoint = fresh
    readers.stop = True
    for thread in readers.threads:
        thread.join()
    readers.checkpoint.close()
    assert set(readers.seen) <= {"right", "closed"}, readers.seen
    assert readers.seen["right"] > 0
    assert len(OPEN_DESCRIPTORS) == before, "what was closed is not open"


def path_nbytes(path: Path) -> int:
    return (
        sum(file.stat().st_size for file in path.iterdir())
        if path.is_dir()
        else path.stat().st_size
    )


def test_reads_after_close_are_refused(tmp_path: Path):
    holdfast.save({"w": np.ones(8)}, tmp_path / "x")
    checkpoint = holdfast.open(tmp_path / "x")
    lazy = checkpoint["w"]
    assert lazy.numpy().sum() == 8
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(Closed):
        lazy.numpy()


def test_an_error_that_is_kept_keeps_no_file_open(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    holdfast.save({"w": np.ones(1000)}, path)
    before = len(OPEN_DESCRIPTORS)
    checkpoint = holdfast.open(path)
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(holdfast.errors.Truncated) as kept:
        checkpoint["w"].numpy()
    checkpoint.close()
    assert len(OPEN_DESCRIPTORS) == before
    assert kept.value.offset is not None


def test_a_file_that_its_owner_closes_is_read_on(tmp_path: Path):
    (tmp_path / "ours").write_bytes(bytes([OURS]) * 100)
    (tmp_path / "theirs").write_bytes(bytes([THEIRS]) * 100)
    file = (tmp_path / "ours").open("rb")
    store = DescriptorStore(file.fileno())
    file.close()
    out = bytearray(10)
    with (tmp_path / "theirs").open("rb"):
        store.read(DescriptorStore.KEY, 5, memoryview(out))
    assert out == bytes([OURS]) * 10
    store.close()
    with pytest.raises(Closed):
        store.read(DescriptorStore.KEY, 5, memoryview(out))
