"""File objects that go back by beginning again: members of zips, gzip. What they go through is counted, not timed."""

from __future__ import annotations

import io

import pytest
import torch

import holdfast
import holdfast.torch


class Rewinding(io.RawIOBase):
    """A file that can only go forward, or begin again at its start, as a decompressor does."""

    def __init__(self, data: bytes) -> None:
        self._inner = io.BytesIO(data)
        self.passed = 0
        """Bytes gone through so far."""

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._inner.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        before = self._inner.tell()
        after = self._inner.seek(offset, whence)
        self.passed += after - before if after >= before else after
        return after

    def readinto(self, out) -> int:
        got = self._inner.readinto(out)
        self.passed += got
        return got


def written(count: int, **how: bool) -> bytes:
    """Many storages, some small enough to be read with their neighbours."""
    buffer = io.BytesIO()
    torch.save(
        {f"w{index}": torch.full((1 << (9 + index % 9),), float(index)) for index in range(count)},
        buffer,
        **how,
    )
    return buffer.getvalue()


def read(file, folder):
    with holdfast.open(file) as checkpoint:
        checkpoint.read()


def digest(file, folder):
    with holdfast.open(file) as checkpoint:
        checkpoint.digest()


VERBS = {
    "load": lambda file, folder: holdfast.torch.load(file),
    "load code": lambda file, folder: holdfast.torch.load(file, weights_only=False),
    "read": read,
    "digest": digest,
    "verify": lambda file, folder: holdfast.verify(file),
    "stats": lambda file, folder: holdfast.stats(file),
    "sparsity": lambda file, folder: holdfast.sparsity(file),
    "convert": lambda file, folder: holdfast.convert(file, folder / "new.pt", overwrite=True),
}

BY_NAME = ("stats", "sparsity", "convert")
"""These go from tensor to tensor."""


# The old container has its storages in no order that a checkpoint's names would follow.
@pytest.mark.parametrize(
    ("verb", "legacy"),
    [*((verb, False) for verb in VERBS), *((verb, True) for verb in VERBS if verb not in BY_NAME)],
)
def test_a_file_is_gone_through_a_few_times_however_many_tensors_it_has(verb, legacy, tmp_path):
    times = []
    for count in (72, 144):
        data = written(count, _use_new_zipfile_serialization=not legacy)
        file = Rewinding(data)
        VERBS[verb](file, tmp_path)
        times.append(file.passed / len(data))
    assert max(times) < 13  # torch.load of 2.13 goes through it nine times; ours six, verify twelve
    assert times[1] < times[0] + 0.5


@pytest.mark.parametrize("start", [0, 6])
def test_the_position_is_put_back_once_at_the_end(start):
    file = Rewinding(b"header"[:start] + written(9))
    file.seek(start)
    holdfast.torch.load(file)
    assert file.tell() == start
    with holdfast.open(io.BytesIO(file._inner.getvalue()[start:])) as checkpoint:
        assert checkpoint["w3"].numpy()[0] == 3
