"""Reading: the first error stops all threads, scratch memory is bounded, and few unwanted bytes are read."""

from __future__ import annotations

import threading
import tracemalloc
from functools import partial

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
    """Counts reads and their bytes. It claims to be a file, because bytes in memory are not read."""

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
    """A matrix of 8 MiB whose elements are all different."""
    return np.arange(2 * MIB, dtype=np.float32).reshape(2048, 1024)


def open_array(array: np.ndarray, **options: object) -> tuple[LazyTensor, CountingStore]:
    """Return an array as a lazy tensor of a source with these options, and its store."""
    store = CountingStore(memoryview(array).cast("B"))
    source = OpenSource(store, **options)
    dtype = DTYPES.numpy(array.dtype)
    storage = Storage("f", 0, array.nbytes, home=source.store)
    return LazyTensor.contiguous("m", dtype, array.shape, storage, source), store


INDICES = {
    "rows": np.s_[100:900],
    "one row": np.s_[7],
    "wide columns": np.s_[:, 256:768],
    "narrow columns": np.s_[::4, 512:640],
    "a block": np.s_[300:1300, 100:900],
    "every other row": np.s_[::2],
    "backwards": np.s_[1500:500:-3, 200:1000],
    "everything": np.s_[:],
    "with a new axis": np.s_[None, 5:2000:7, ..., 64:960],
}


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("threads", [1, 4])
def test_at_most_a_tenth_of_the_bytes_is_unwanted(name, threads, matrix):
    tensor, store = open_array(matrix, threads=threads)
    tensor_slice = tensor[INDICES[name]]

    array = tensor_slice.numpy()

    assert np.array_equal(array, matrix[INDICES[name]])
    assert store.nbytes <= tensor_slice.nbytes * 1.1


def test_a_column_of_short_rows_is_one_read():
    """The gaps between its elements are smaller than `free_gap`."""
    array = np.arange(100_000, dtype=np.int32).reshape(1000, 100)
    tensor, store = open_array(array, threads=1)
    assert np.array_equal(tensor[:, 3].numpy(), array[:, 3])
    assert store.calls == 1


def test_a_column_of_long_rows_reads_only_its_elements(matrix):
    tensor, store = open_array(matrix, threads=1)
    assert np.array_equal(tensor[:, 3].numpy(), matrix[:, 3])
    assert store.nbytes == 2048 * 4


def test_scattered_slices_are_joined_as_far_as_the_policy_allows(matrix):
    tensor, store = open_array(matrix)
    positions = [(index % 2048, index * 7 % 1000) for index in range(10_000)]

    arrays = read([tensor[row, column : column + 16] for row, column in positions])

    for index in range(0, 10_000, 97):
        row, column = positions[index]
        assert np.array_equal(arrays[index], matrix[row, column : column + 16])
    assert store.calls < 7_000
    # A tenth of unwanted bytes, and for each slice at most one gap that is always read through.
    assert store.nbytes <= 10_000 * 64 * 1.1 + 10_000 * JoinPolicy().free_gap


def test_ten_thousand_neighbors_become_four_reads(matrix):
    tensor, store = open_array(matrix)
    slices = []
    for index in range(10_000):
        start = index % 8 * 128
        slices.append(tensor[index // 8, start : start + 100])

    arrays = read(slices)

    assert len(arrays) == 10_000
    assert np.array_equal(arrays[4321], matrix[540, 128:228])
    assert store.calls <= 4


def test_overlapping_slices_are_read_once(matrix):
    tensor, store = open_array(matrix)

    arrays = read([tensor[row : row + 50] for row in range(0, 1000, 10)])

    assert np.array_equal(arrays[99], matrix[990:1040])
    assert store.nbytes <= 1040 * 4096 * 1.1


@pytest.mark.parametrize("threads", [1, 3])
def test_scratch_memory_is_bounded(threads):
    """A transposed tensor is read through scratch memory: a block for each thread at most."""
    array = np.zeros((4096, 4096), np.float32)
    tensor, _ = open_array(array, threads=threads)
    out = np.empty((4096, 4096), np.float32)
    tensor.T.read(out=out)
    tracemalloc.start()
    try:
        tensor.T.read(out=out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (threads + 1) * JoinPolicy().block_nbytes * 1.25


def test_contiguous_tensors_need_no_scratch_memory(matrix):
    tensor, _ = open_array(matrix, threads=2)
    out = np.empty_like(matrix)
    tracemalloc.start()
    try:
        tensor.read(out=out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MIB


class FailingStore(CountingStore):
    """Fails at one read and at all later ones."""

    def __init__(self, content: bytes, fail_at: int) -> None:
        super().__init__(content)
        self.fail_at = fail_at

    def read(self, key: str, start: int, out: memoryview) -> None:
        super().read(key, start, out)
        if self.calls >= self.fail_at:
            raise StoreError("the disk is gone", file="f")


@pytest.mark.parametrize("threads", [1, 4])
def test_a_failed_read_names_the_tensor_and_stops_all_threads(threads):
    nbytes = 64 * MIB
    store = FailingStore(bytes(nbytes), fail_at=2)
    source = OpenSource(store, threads=threads)
    storage = Storage("f", 0, nbytes, home=source.store)
    tensor = LazyTensor.contiguous("layer.weight", DTYPES.name("uint8"), (nbytes,), storage, source)

    with pytest.raises(StoreError, match="disk is gone") as caught:
        tensor.numpy()

    assert caught.value.tensor == "layer.weight"
    assert store.calls <= 1 + threads
    thread_names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("holdfast") for name in thread_names)


def test_no_task_starts_after_the_first_error():
    started_tasks = []
    has_failed = threading.Event()

    def run_task(task_index: int) -> None:
        started_tasks.append(task_index)
        if task_index == 1:
            has_failed.set()
            raise StoreError("first")
        has_failed.wait(5)

    with pytest.raises(StoreError, match="first"):
        run_all([partial(run_task, task_index) for task_index in range(500)], threads=2)
    assert len(started_tasks) < 50


def test_errors_of_other_libraries_are_raised():
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_all([fail] * 3, threads=2)


def test_the_number_of_threads_does_not_change_the_result(matrix):
    for threads in (1, 2, 7, 16):
        tensor, _ = open_array(matrix, threads=threads)
        assert np.array_equal(tensor.T[5:900:3, ::-1].numpy(), matrix.T[5:900:3, ::-1])
