"""The executor: the first failure wins and stops the rest, scratch memory is bounded, and little is read in vain."""

from __future__ import annotations

import threading
import tracemalloc

import numpy as np
import pytest

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.protocols import FILE_PROFILE
from holdfast.core.tensor import LazyTensor
from holdfast.engine.coalesce import JoinPolicy
from holdfast.engine.source import OpenSource
from holdfast.engine.threads import run_all
from holdfast.errors import StoreError
from holdfast.stores.memory import MemoryStore
from holdfast.verbs.open import read

MIB = 1 << 20


class CountingStore(MemoryStore):
    """Counts the reads and their bytes. It is read as a file: in memory that is there nothing would be read."""

    read_profile = FILE_PROFILE

    def __init__(self, content: bytes | memoryview) -> None:
        super().__init__({"f": content})
        self.lock = threading.Lock()
        self.calls = self.nbytes = 0

    def read(self, key: str, start: int, out: memoryview) -> None:
        with self.lock:
            self.calls += 1
            self.nbytes += out.nbytes
        super().read(key, start, out)


@pytest.fixture(scope="module")
def matrix() -> np.ndarray:
    """8 MiB, every element its own number."""
    return np.arange(2 * MIB, dtype=np.float32).reshape(2048, 1024)


def opened(array: np.ndarray, **options: object) -> tuple[LazyTensor, CountingStore]:
    store = CountingStore(memoryview(array).cast("B"))
    source = OpenSource(store, **options)
    dtype = DTYPES.numpy(array.dtype)
    return LazyTensor.contiguous(
        "m", dtype, array.shape, Storage("f", 0, array.nbytes, home=source.store), source
    ), store


INDICES = {
    "rows": np.s_[100:900],
    "one row": np.s_[7],
    "wide columns": np.s_[:, 256:768],
    "narrow columns": np.s_[::4, 512:640],
    "a block": np.s_[300:1300, 100:900],
    "every other row": np.s_[::2],
    "backwards": np.s_[1500:500:-3, 200:1000],
    "everything": np.s_[:],
    "turned": np.s_[None, 5:2000:7, ..., 64:960],
}


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("threads", [1, 4])
def test_at_most_a_tenth_is_read_in_vain(name, threads, matrix):
    tensor, store = opened(matrix, threads=threads)
    part = tensor[INDICES[name]]
    assert np.array_equal(part.numpy(), matrix[INDICES[name]])
    assert store.nbytes <= part.nbytes * 1.1


def test_a_single_column_is_read_through_gaps_that_are_cheaper_than_calls():
    """Rows shorter than the free gap: one pass over the file, and not one call an element."""
    array = np.arange(100_000, dtype=np.int32).reshape(1000, 100)
    tensor, store = opened(array, threads=1)
    assert np.array_equal(tensor[:, 3].numpy(), array[:, 3])
    assert store.calls == 1


def test_a_single_column_of_long_rows_reads_no_rows(matrix):
    tensor, store = opened(matrix, threads=1)
    assert np.array_equal(tensor[:, 3].numpy(), matrix[:, 3])
    assert store.nbytes == 2048 * 4


def test_ten_thousand_scattered_slices_are_joined_as_far_as_the_policy_allows(matrix):
    tensor, store = opened(matrix)
    rows = [(i % 2048, i * 7 % 1000) for i in range(10_000)]
    wanted = [tensor[r, c : c + 16] for r, c in rows]
    found = read(wanted)
    for i in range(0, 10_000, 97):
        r, c = rows[i]
        assert np.array_equal(found[i], matrix[r, c : c + 16])
    assert store.calls < 7_000
    # A tenth in vain, and gaps that are cheaper to read than to skip: at most one for each slice.
    assert store.nbytes <= 10_000 * 64 * 1.1 + 10_000 * JoinPolicy().free_gap


def test_ten_thousand_neighbours_become_very_few_reads(matrix):
    tensor, store = opened(matrix)
    flat = read([tensor[i // 8, i % 8 * 128 : i % 8 * 128 + 100] for i in range(10_000)])
    assert len(flat) == 10_000
    assert np.array_equal(flat[4321], matrix[540, 128:228])
    assert store.calls <= 4


def test_overlapping_slices_are_read_once(matrix):
    tensor, store = opened(matrix)
    found = read([tensor[i : i + 50] for i in range(0, 1000, 10)])
    assert np.array_equal(found[99], matrix[990:1040])
    assert store.nbytes <= 1040 * 4096 * 1.1


@pytest.mark.parametrize("threads", [1, 3])
def test_scratch_memory_is_bounded(threads):
    """A transposed read passes through scratch memory: a block for each thread, whatever the size of the tensor."""
    array = np.zeros((4096, 4096), np.float32)
    tensor, _ = opened(array, threads=threads)
    out = np.empty((4096, 4096), np.float32)
    tensor.T.read(out=out)
    tracemalloc.start()
    try:
        tensor.T.read(out=out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (threads + 1) * JoinPolicy().block_nbytes * 1.25


def test_contiguous_reads_need_no_scratch_at_all(matrix):
    tensor, _ = opened(matrix, threads=2)
    out = np.empty_like(matrix)
    tracemalloc.start()
    try:
        tensor.read(out=out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MIB


class FailingStore(CountingStore):
    """Fails at the n-th read."""

    def __init__(self, content: bytes, fail_at: int) -> None:
        super().__init__(content)
        self.fail_at = fail_at

    def read(self, key: str, start: int, out: memoryview) -> None:
        super().read(key, start, out)
        if self.calls >= self.fail_at:
            raise StoreError("the disk is gone", file="f")


@pytest.mark.parametrize("threads", [1, 4])
def test_a_failed_read_is_raised_with_the_tensors_name_and_stops_the_rest(threads):
    content = bytes(64 * MIB)
    store = FailingStore(content, fail_at=2)
    source = OpenSource(store, threads=threads)
    tensor = LazyTensor.contiguous(
        "layer.weight",
        DTYPES.name("uint8"),
        (64 * MIB,),
        Storage("f", 0, 64 * MIB, home=source.store),
        source,
    )
    with pytest.raises(StoreError, match="disk is gone") as caught:
        tensor.numpy()
    assert caught.value.tensor == "layer.weight"
    assert store.calls <= 1 + threads
    assert [t.name for t in threading.enumerate() if t.name.startswith("holdfast")] == []


def test_the_first_failure_wins_and_cancels_what_has_not_begun():
    begun = []
    failed = threading.Event()

    def task(i: int) -> None:
        begun.append(i)
        if i == 1:
            failed.set()
            raise StoreError("first")
        failed.wait(5)

    with pytest.raises(StoreError, match="first"):
        run_all([lambda i=i: task(i) for i in range(500)], threads=2)
    assert len(begun) < 50


def test_an_error_that_is_not_ours_is_not_lost():
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_all([broken] * 3, threads=2)


def test_every_number_of_threads_gives_the_same(matrix):
    for threads in (1, 2, 7, 16):
        tensor, _ = opened(matrix, threads=threads)
        assert np.array_equal(tensor.T[5:900:3, ::-1].numpy(), matrix.T[5:900:3, ::-1])
