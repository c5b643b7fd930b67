"""Many small tensors saved out of a GPU, with the CPU in its place."""

from __future__ import annotations

import gc
import io
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.torch.cuda import host, memory
from holdfast.torch.cuda.streams import CopyStream
from holdfast.torch.serialization import pickling
from holdfast.torch.serialization.locations import CUDA, Packages
from holdfast.torch.tensors import storages
from tests.properties.test_torch_pickles import Plain
from tests.sampling import examples
from tests.torch.cuda.random_bits import values

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.uint8,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint16,
]


def many(count: int = 300) -> dict[str, torch.Tensor]:
    made = {
        f"t{i}": values(
            *((i % 9 + 1,), (2, i % 5 + 1))[i % 2], dtype=DTYPES[i % len(DTYPES)], seed=i
        )
        for i in range(count)
    }
    return made | {"long": values(300, 300)}


@pytest.fixture
def gpu(monkeypatch):
    """Every other tensor is said to be on a GPU, which is the CPU. What was gathered is noted."""
    seen: list[int] = []
    before = memory.GpuStorages.read

    def read(self, numbers):
        seen.append(len(numbers))
        return before(self, numbers)

    monkeypatch.setattr(storages, "DEVICE", lambda tensor: torch.device(place(tensor)))
    monkeypatch.setattr(memory.GpuStorages, "read", read)
    monkeypatch.setattr(memory, "copy_streams", no_streams)
    return seen


class NoStreams(dict[torch.device, CopyStream]):
    """No device has a stream: neither the one that is said to be there nor the one that is."""

    def __missing__(self, device: torch.device) -> CopyStream:
        return CopyStream()


def no_streams(devices: Iterable[torch.device]) -> NoStreams:
    return NoStreams(dict.fromkeys(devices, CopyStream()))


def place(tensor: torch.Tensor) -> str:
    """By its storage, so that two tensors over one agree."""
    return "cuda:0" if tensor.untyped_storage().nbytes() % 3 != 1 else "cpu"


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "native"])
def test_saved_as_from_memory(tmp_path, gpu, name):
    # What safetensors has no name for is refused in both ways.
    state = {key: tensor for key, tensor in many().items() if tensor.dtype is not torch.complex64}
    (tmp_path / "near").mkdir()
    holdfast.save(state, tmp_path / name)
    assert sum(gpu) > 100
    with mock.patch.object(storages, "DEVICE", return_value=torch.device("cpu")):
        holdfast.save(state, tmp_path / "near" / name)
    if name.endswith(".pt"):
        found = torch.load(tmp_path / name, map_location="cpu")
        assert all(torch.equal(bits(found[key]), bits(tensor)) for key, tensor in state.items())
        return
    files = [path for path in (tmp_path / name, *(tmp_path / name).rglob("*")) if path.is_file()]
    for path in files:
        assert path.read_bytes() == (tmp_path / "near" / path.relative_to(tmp_path)).read_bytes(), (
            path
        )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class Tagged(Plain):
    """CPython's pickler, with the locations that `place` gives."""

    def location(self, storage: torch.UntypedStorage) -> str:
        # Text that is new each time, and one text for the CPU: so it is in torch.
        return "cpu" if storage.nbytes() % 3 == 1 else "cuda:" + str(0)


def odd(kind: str, number: int) -> torch.Tensor:
    dtype = DTYPES[number % len(DTYPES)]
    match kind:
        case "parameter":
            return torch.nn.Parameter(values(number % 4 + 1, 3, seed=number))
        case "turned":
            return values(2, number % 7 + 1, dtype=dtype, seed=number).T
        case "part":
            return values(9, dtype=dtype, seed=number)[number % 5 :]
        case "empty":
            return torch.zeros(0)
        case "uneven":
            return torch.empty(0, dtype=torch.float32).set_(
                torch.UntypedStorage(10).fill_(7), 0, (2,), (1,)
            )
    return values(number % 11 + 1, dtype=dtype, seed=number)


@settings(max_examples=examples(25))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["plain", "plain", "parameter", "turned", "part", "empty", "uneven"]),
            st.integers(0, 40),
        )
    ),
    st.lists(st.integers(0, 20), max_size=6),
    st.booleans(),
)
def test_a_pickle_says_where_each_was_as_torch_does(drawn, again, ordered):
    tensors = [odd(kind, number) for kind, number in [*[("plain", n) for n in range(60)], *drawn]]
    tensors += [tensors[number] for number in again] + [
        tensors[number].detach() for number in again
    ]
    state = (OrderedDict if ordered else dict)(
        (f"t{i}", tensor) for i, tensor in enumerate(tensors)
    )
    theirs = io.BytesIO()
    pickler = Tagged(theirs)
    pickler.dump(state)
    with mock.patch.multiple(pickling, location_tag=pickler.location, PACKAGES=Packages([CUDA])):
        ours = pickling.pickle_object(
            state, pickling.StorageIds(), pickle_module=pickle, protocol=2
        )
    assert bytes(ours) == theirs.getvalue()


def rows_of(tensors: list[torch.Tensor]) -> memory.GpuStorages:
    nbytes = np.array([tensor.nbytes for tensor in tensors], np.int64)
    return memory.GpuStorages(
        dict(enumerate(tensors)), nbytes, {tensor.device for tensor in tensors}
    )


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "native"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.bool, torch.complex128, torch.float8_e4m3fn]
)
def test_tensors_of_one_dtype_are_gathered_as_they_are(tmp_path, gpu, name, dtype):
    if dtype is torch.complex128 and not name.endswith(".pt"):
        pytest.skip("safetensors files have no name for it")
    state = {
        f"t{i:03}": values(*((), (i % 9 + 1,), (2, i % 5 + 1))[i % 3], dtype=dtype, seed=i)
        for i in range(300)
    }
    with mock.patch.object(storages, "DEVICE", return_value=torch.device("cuda:0")):
        holdfast.save(state, tmp_path / name)
    assert sum(gpu) >= 300
    with holdfast.open(tmp_path / name) as checkpoint:
        assert all(
            checkpoint[key].numpy().tobytes() == bits(tensor).numpy().tobytes()
            for key, tensor in state.items()
        )


def test_blocks_come_back_with_the_last_view(monkeypatch):
    pool = host.Pool()
    monkeypatch.setattr(memory, "POOL", pool)
    own = rows_of([values(number + 1) for number in range(20)])
    gc.disable()
    try:
        pieces = own.read(range(3, 20))
        assert [bytes(piece) for piece in pieces] == [
            bits(values(number + 1)).numpy().tobytes() for number in range(3, 20)
        ]
        one = pieces[5]
        del pieces
        assert pool.kept_nbytes == 0
        del one
        assert pool.kept_nbytes == host.BLOCK_NBYTES
    finally:
        gc.enable()


def test_a_failure_gives_the_block_back(monkeypatch):
    pool = host.Pool()
    monkeypatch.setattr(memory, "POOL", pool)
    own = rows_of([values(number + 1) for number in range(20)])
    joining = mock.patch.object(
        torch._C._nn, "flatten_dense_tensors", side_effect=RuntimeError("no memory")
    )
    with joining, pytest.raises(RuntimeError, match="no memory"):
        own.read(range(20))
    assert pool.kept_nbytes == host.BLOCK_NBYTES


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "native"])
def test_a_save_leaves_nothing_to_the_collector(tmp_path, gpu, name):
    state = {key: tensor for key, tensor in many().items() if tensor.dtype is not torch.complex64}
    gone = [weakref.ref(tensor.untyped_storage()) for tensor in state.values()]
    gc.collect()
    gc.disable()
    try:
        holdfast.save(state, tmp_path / name)
        assert gpu
        del state
        assert not any(one() is not None for one in gone)
    finally:
        gc.enable()


def test_a_block_may_come_back_while_the_pool_is_asked():
    """The collector runs where it likes, also inside of the pool."""
    pool = host.Pool()
    (block,) = pool.lend(1)
    with pool._lock:
        pool.take_back([block])
    assert pool.kept_nbytes == host.BLOCK_NBYTES
