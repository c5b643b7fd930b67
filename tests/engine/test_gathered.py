"""How many threads write a file of many small tensors.

To make a `Gathered` segment takes Python code, which holds the interpreter lock. So more than a few
threads would wait for each other.
"""

from __future__ import annotations

import numpy as np
import pytest

import holdfast
from holdfast.engine import write

SMALL_TENSORS = {f"t{i}": np.full(2000, i, np.float32) for i in range(200)}
LARGE_TENSORS = {f"w{i}": np.full(600_000, i, np.float32) for i in range(2)}


@pytest.mark.parametrize(
    ("state", "requested_threads", "expected_threads"),
    [
        (SMALL_TENSORS, None, write.MAX_GATHERING_THREADS),
        (SMALL_TENSORS | LARGE_TENSORS, None, 16),
        (LARGE_TENSORS, None, 16),
        (SMALL_TENSORS, 3, 3),
        (SMALL_TENSORS, 7, 7),
    ],
)
@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_few_threads_write_a_file_of_small_tensors(
    tmp_path, monkeypatch, name, state, requested_threads, expected_threads
):
    thread_counts: list[int] = []
    run_reads = write.run_reads

    def run_reads_and_count(tasks, threads, *, stores):
        thread_counts.append(threads)
        run_reads(tasks, threads, stores=stores)

    monkeypatch.setattr(write, "DEFAULT_THREADS", 16)
    monkeypatch.setattr(write, "run_reads", run_reads_and_count)

    holdfast.save(state, tmp_path / name, threads=requested_threads)

    assert thread_counts == [expected_threads]
