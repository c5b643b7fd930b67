"""One pass over tensors: every element is shown once, every byte is read once, whatever looks at it."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

import holdfast
from holdfast.core.box import Box
from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.protocols import FILE_PROFILE
from holdfast.core.tensor import LazyTensor
from holdfast.engine.arrays import MemoryTensors
from holdfast.engine.scan import Accumulator, cut_elements, scan
from holdfast.engine.source import OpenSource
from holdfast.errors import Corrupted, HoldfastError, StoreError
from holdfast.numeric.statistics import DistributionBuilder, NumberStats
from holdfast.numeric.zeros import ZeroCounter
from holdfast.stores.memory import MemoryStore
from holdfast.verbs.sparsity import BLOCKS, find_zeros, tiles
from holdfast.verbs.stats import measure


class Collected:
    """All elements, and an error where one comes twice."""

    def __init__(self, tensor: LazyTensor) -> None:
        self.dtype = np.dtype(np.uint8) if tensor.dtype.kind == "bool" else tensor.dtype.numpy
        self.width = tensor.shape[-1] if tensor.shape else 1
        self.out = np.zeros(tensor.size, self.dtype)
        self.seen = np.zeros(tensor.size, np.int64)

    def add(self, start: int, values: np.ndarray) -> None:
        assert values.dtype == self.dtype
        assert values.flags.aligned
        for row in values if values.ndim == 2 else [values]:
            self.out[start : start + len(row)] = row
            self.seen[start : start + len(row)] += 1
            start += self.width

    def result(self) -> np.ndarray:
        assert (self.seen == 1).all()
        return self.out


class Together:
    """Several accumulators that look at one reading."""

    def __init__(self, every: list[Accumulator[object]]) -> None:
        self.every = every

    def add(self, start: int, values: np.ndarray) -> None:
        before = values.tobytes()
        for one in self.every:
            one.add(start, values)
        assert values.tobytes() == before

    def result(self) -> list[object]:
        return [one.result() for one in self.every]


class ReadOnce(MemoryStore):
    """A file, as far as anybody can tell, that counts how often each byte is read."""

    read_profile = FILE_PROFILE

    def __init__(self, content: dict[str, bytes]) -> None:
        super().__init__(content)
        self.lock = threading.Lock()
        self.times = {key: np.zeros(len(value), np.int64) for key, value in content.items()}
        self.calls = 0

    def read(self, key: str, start: int, out: memoryview) -> None:
        with self.lock:
            self.calls += 1
            self.times[key][start : start + out.nbytes] += 1
        super().read(key, start, out)


def stored(arrays: dict[str, np.ndarray], gap: int = 0) -> tuple[list[LazyTensor], ReadOnce]:
    """Arrays one behind the other in a file, with so many bytes between them."""
    content, starts = bytearray(), []
    for array in arrays.values():
        starts.append(len(content))
        content += array.tobytes() + bytes(gap)
    store = ReadOnce({"f": bytes(content)})
    source = OpenSource(store)
    tensors = [
        LazyTensor.contiguous(
            name,
            DTYPES.numpy(array.dtype),
            array.shape,
            Storage("f", start, array.nbytes, home=store),
            source,
        )
        for (name, array), start in zip(arrays.items(), starts, strict=True)
    ]
    return tensors, store


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(
        st.tuples(
            st.sampled_from([np.float32, np.float16, np.int8, np.bool_, np.complex128]),
            st.sampled_from([(), (0,), (3, 0), (7,), (5, 9), (2, 3, 4), (100,)]),
            st.sampled_from(["plain", "turned", "every other"]),
        ),
        max_size=6,
    ),
    st.sampled_from([8, 40, 1 << 18]),
    st.sampled_from(["flat", "tiles"]),
    st.integers(0, 5),
)
def test_every_element_is_shown_once(kinds, block, cut, gap):
    rng = np.random.default_rng(0)
    arrays = {
        f"t{i}": rng.integers(0, 2, shape).astype(dtype)
        for i, (dtype, shape, _) in enumerate(kinds)
    }
    tensors, _ = stored(arrays, gap)
    views = {
        "plain": lambda a: a,
        "turned": lambda a: a.T,
        "every other": lambda a: a[::2] if a.ndim else a,
    }
    memory = [
        MemoryTensors().wrap_array(views[how](array))
        for array, (_, _, how) in zip(arrays.values(), kinds, strict=True)
    ]
    expected = [
        *arrays.values(),
        *(views[how](array) for array, (_, _, how) in zip(arrays.values(), kinds, strict=True)),
    ]

    def pieces(tensor: LazyTensor):
        if cut == "flat" or tensor.ndim != 2:
            return cut_elements(tensor.size, block)
        rows, columns = tensor.shape
        return [
            Box((top, left), (min(top + 2, rows), min(left + 4, columns)))
            for top in range(0, rows, 2)
            for left in range(0, columns, 4)
        ]

    told: list[int] = []
    every = [*tensors, *memory]
    found = scan(
        every,
        lambda at: Collected(every[at]),
        lambda at: pieces(every[at]),
        threads=3,
        progress=told.append,
    )
    for one, array in zip(found, expected, strict=True):
        assert one.tobytes() == array.tobytes()
    assert sum(told) == sum(array.nbytes for array in expected)


def test_whatever_looks_every_byte_is_read_once():
    """Moments, the distribution, where zeros are: three accumulators, one reading."""
    rng = np.random.default_rng(0)
    arrays = {
        "half": rng.standard_normal((300, 1000)).astype(np.float16),
        "wide": rng.standard_normal((130, 700)).astype(np.float32) * (rng.random((130, 700)) < 0.5),
        "bits": rng.integers(0, 2, 999).astype(np.bool_),
    }
    tensors, store = stored(arrays)

    def make(at: int) -> Together:
        tensor = tensors[at]
        return Together(
            [
                NumberStats(tensor, 8),
                DistributionBuilder(tensor, tensor.size, 4),
                ZeroCounter(tensor.shape, BLOCKS),
            ]
        )

    found = scan(tensors, make, lambda at: tiles(tensors[at]), threads=2)
    assert (store.times["f"] == 1).all()
    alone = measure(tensors, bins=8), find_zeros(tensors)
    for (numbers, distribution, zeros), stats, sparsity in zip(found, *alone, strict=True):
        assert (
            numbers[0].zeros
            == distribution.moments.zeros
            == zeros.zeros
            == stats.zeros
            == sparsity.zeros
        )
        assert numbers[0].mean == pytest.approx(stats.mean)
        assert numbers[0].low == distribution.moments.low == stats.minimum


def test_small_neighbours_are_read_together():
    arrays = {f"t{i}": np.full(50, i, np.float32) for i in range(500)}
    tensors, store = stored(arrays, 16)
    rows = measure(tensors, bins=0)
    assert [row.mean for row in rows] == [float(i) for i in range(500)]
    assert store.calls == 1


def test_tied_tensors_are_read_once():
    (tensor,), store = stored({"w": np.arange(1000.0)})
    first, second = measure([tensor, tensor], bins=4)
    assert first == second
    assert (store.times["f"] == 1).all()


def test_only_what_is_begun_is_held():
    """An accumulator goes with the last block of its tensor: by one thread, before the next tensor is begun."""
    held, most = Counter(), []

    class Held:
        def __init__(self, at: int) -> None:
            held[at] += 1
            most.append(held.total())

        def add(self, start: int, values: np.ndarray) -> None:
            pass

        def result(self) -> None:
            held.clear()

    tensors, _ = stored({f"t{i}": np.zeros(64, np.float32) for i in range(20)})
    scan(tensors, Held, lambda at: cut_elements(64, 16), threads=1)
    assert most == [1] * 20


def test_an_error_names_the_tensor(tmp_path):
    """Also where its bytes were read with those of its neighbours, and where the accumulator fails."""
    arrays = {name: np.arange(64, dtype=np.float32) for name in "abc"}
    tensors, store = stored(arrays)
    whole = MemoryStore.read

    def read(key: str, start: int, out: memoryview) -> None:
        if start <= 300 < start + out.nbytes:
            raise StoreError("a bad sector", file=key)
        whole(store, key, start, out)

    store.read = read
    with pytest.raises(StoreError) as caught:
        measure(tensors)
    assert caught.value.tensor == "b"

    class Broken:
        def add(self, start: int, values: np.ndarray) -> None:
            raise HoldfastError("no")

    tensors, _ = stored(arrays)
    with pytest.raises(HoldfastError) as caught:
        scan(tensors, lambda at: Broken() if at == 2 else Collected(tensors[at]))
    assert caught.value.tensor == "c"


def test_a_tensor_of_one_block_has_its_checksum_compared(tmp_path):
    holdfast.save({"a": np.ones(9, np.float32), "b": np.ones(9, np.float32)}, tmp_path / "m.pt")
    content = (tmp_path / "m.pt").read_bytes()
    at = content.rindex(np.ones(9, np.float32).tobytes())
    (tmp_path / "m.pt").write_bytes(content[:at] + b"\x01" + content[at + 1 :])
    with holdfast.open(tmp_path / "m.pt") as ckpt, pytest.raises(Corrupted) as caught:
        measure(ckpt.values())
    assert caught.value.tensor == "b"
    with holdfast.open(tmp_path / "m.pt", verify=False) as ckpt:
        assert [row.minimum for row in measure(ckpt.values())] == [1.0, 1.0]
