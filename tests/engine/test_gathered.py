"""Who writes a file of many small tensors: few threads, since each of them holds the interpreter lock for a part of the time."""

from __future__ import annotations

import numpy as np
import pytest

import holdfast
from holdfast.engine import write

SMALL = {f"t{i}": np.full(2000, i, np.float32) for i in range(200)}
LARGE = {f"w{i}": np.full(600_000, i, np.float32) for i in range(2)}


@pytest.mark.parametrize(
    ("state", "asked", "expected"),
    [
        (SMALL, None, write.MAX_GATHERING_THREADS),
        (SMALL | LARGE, None, 16),
        (LARGE, None, 16),
        (SMALL, 3, 3),
        (SMALL, 7, 7),
    ],
)
@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_threads(tmp_path, monkeypatch, name, state, asked, expected):
    seen: list[int] = []
    before = write.run_reads

    def run_reads(work, threads, *, stores):
        seen.append(threads)
        before(work, threads, stores=stores)

    monkeypatch.setattr(write, "DEFAULT_THREADS", 16)
    monkeypatch.setattr(write, "run_reads", run_reads)
    holdfast.save(state, tmp_path / name, threads=asked)
    assert seen == [expected]
