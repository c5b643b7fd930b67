"""Saving out of a GPU, with the CPU in its place: the same code, on tensors that are here, and no streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.core.dtype import DTYPES
from holdfast.core.protocols import ReadProfile, Request
from holdfast.core.tensor import Traits
from holdfast.engine.blocks import split_into_blocks
from holdfast.engine.table import make_lazy_table
from holdfast.errors import Closed, StoreError, Truncated
from holdfast.torch.cuda import host, memory
from holdfast.torch.cuda.memory import GpuMemory, GpuSource
from holdfast.torch.cuda.stage import Copies, Room
from holdfast.torch.cuda.streams import CopyStream
from holdfast.torch.tensors.open import open as torch_open
from tests.sampling import examples


def source() -> GpuSource:
    return GpuSource(GpuMemory(lambda device: CopyStream()))


def described(gpus: GpuSource, tensor: torch.Tensor):
    row = DTYPES.torch(str(tensor.dtype).removeprefix("torch."))
    return gpus.tensor(tensor, row, Traits(conj=tensor.is_conj(), neg=tensor.is_neg()))


def plain(tensor: torch.Tensor) -> bytes:
    """The elements in C order."""
    return (
        tensor.resolve_conj()
        .resolve_neg()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


BASE = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
VIEWS = {
    "whole": BASE,
    "turned": BASE.permute(3, 1, 0, 2),
    "part": BASE[1:, ::2, 1:3],
    "expanded": BASE[0, 0, 0, :1].expand(7, 1),
    "number": BASE[1, 2, 3, 4],
    "empty": BASE[:0],
    "conj": torch.complex(BASE, BASE).conj(),
    "neg": torch._neg_view(BASE[0]),
    "flags": BASE > 7,
    "half": BASE.to(torch.bfloat16)[:, 1],
    "small": BASE.to(torch.float8_e5m2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_elements_in_c_order(name):
    gpus, tensor = source(), VIEWS[name]
    lazy = described(gpus, tensor)
    assert lazy.shape == tuple(tensor.shape)
    if tensor.numel():
        with gpus.lend(lazy) as data:
            assert bytes(data) == plain(tensor)
        assert lazy.numpy().tobytes() == plain(tensor)


@settings(max_examples=examples(60))
@given(st.data())
def test_slices_of_slices(data):
    lazy, tensor = described(source(), BASE), BASE.numpy()
    for _ in range(data.draw(st.integers(0, 2))):
        index = tuple(
            slice(
                *sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))),
                data.draw(st.sampled_from([1, 2])),
            )
            if not data.draw(st.booleans())
            else slice(None, None, data.draw(st.sampled_from([1, -1])))
            for n in tensor.shape
        )
        lazy, tensor = lazy[index], tensor[index]
    if tensor.size:
        assert np.array_equal(lazy.numpy(), tensor)


def test_views_of_one_storage_are_one_storage():
    gpus = source()
    one, other, apart = (
        described(gpus, BASE),
        described(gpus, BASE.permute(1, 0, 2, 3)),
        described(gpus, BASE.clone()),
    )
    assert one.chunks[0].storage == other.chunks[0].storage
    assert one.chunks[0].storage != apart.chunks[0].storage
    assert one.source is other.source


def test_bytes_by_range():
    gpus = source()
    row = gpus.bytes_of(BASE.untyped_storage(), "data/0")
    out = bytearray(40)
    gpus.store.read(row.chunks[0].storage.key, 8, memoryview(out))
    assert bytes(out) == plain(BASE)[8:48]
    with pytest.raises(Truncated):
        gpus.store.read(row.chunks[0].storage.key, 8, memoryview(bytearray(BASE.nbytes)))
    with pytest.raises(StoreError):
        gpus.store.size("nowhere")
    gpus.store.close()
    with pytest.raises(Closed):
        gpus.store.size(row.chunks[0].storage.key)


def test_a_tensor_of_many_blocks_streams_through_them(tmp_path, monkeypatch):
    monkeypatch.setattr(GpuMemory, "read_profile", ReadProfile(block_nbytes=32768))
    lent = []
    before = memory.POOL.lend
    monkeypatch.setattr(
        memory.POOL, "lend", lambda count, *more: lent.append(count) or before(count, *more)
    )
    gpus = source()
    state = {
        "a": described(gpus, torch.randn(400, 300)),
        "b": described(gpus, torch.randn(300, 400).T),
        "c": torch.ones(3),
    }
    for name in ("a.safetensors", "a.pt", "native"):
        holdfast.save(state, tmp_path / name)
        with torch_open(tmp_path / name) as checkpoint:
            found = checkpoint.read()
        for key in "ab":
            assert np.array_equal(found[key].numpy(), state[key].numpy())
    assert len(lent) > 3 * 2 * 14
    assert set(lent) == {1}
    assert (
        max(
            piece.nbytes
            for piece in split_into_blocks(state["a"], gpus.store.read_profile.block_nbytes)
        )
        <= 32768
    )


def test_targets_of_any_layout():
    gpus = source()
    out = np.zeros((5, 4, 3, 2), np.float32).T
    gpus.read([Request(described(gpus, BASE), out)])
    assert np.array_equal(out, BASE.numpy())


@pytest.mark.parametrize("locked", ["all", "none", "half"])
def test_staging_into_locked_and_ordinary_memory(monkeypatch, locked):
    monkeypatch.setattr(host, "lock", lambda address, nbytes: True)
    monkeypatch.setattr(host, "unlock", lambda address: None)
    monkeypatch.setattr(
        memory, "POOL", host.Pool(kept_nbytes=0)
    )  # blocks that only pretend to be locked are nobody else's
    gpus = source()
    tensors = [torch.randn(64, 64) for _ in range(4)] + [torch.randn(64, 64).T]
    total = sum(tensor.nbytes for tensor in tensors)
    most = {"all": None, "none": 0, "half": total // 2}[locked]
    room = Room().take(total, gpu=True, max_host_memory=most)
    copies, wanted, at = Copies(room), [], 0
    for tensor in tensors:
        wanted.append((described(gpus, tensor), at))
        at += tensor.nbytes
    copies.begin(gpus, wanted)
    copies.wait()
    for tensor, (_, at) in zip(tensors, wanted, strict=True):
        assert np.array_equal(
            room.array[at : at + tensor.nbytes].view(np.float32).reshape(64, 64), tensor.numpy()
        )
    assert (
        copies.unlocked_nbytes == {"all": 0, "none": total, "half": 3 * tensors[0].nbytes}[locked]
    )
    assert bool(copies.notes()) == (locked != "all")


class Counted(CopyStream):
    """A stream that counts how often it is asked to wait."""

    marks = 0

    def mark(self):
        Counted.marks += 1
        return super().mark()


def many() -> dict[str, torch.Tensor]:
    made = {f"m{i}": torch.randn(3 + i % 7, 5) for i in range(400)}
    return made | {
        "large": torch.randn(700_000),
        "turned": torch.randn(5, 4).T,
        "odd": torch.arange(9, dtype=torch.int8)[1:8],
    }


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "native"])
def test_many_small_ones_cross_together_and_the_file_is_the_same(tmp_path, name):
    state = many()
    Counted.marks = 0
    gpus = GpuSource(GpuMemory(lambda device: Counted()))
    holdfast.save({key: described(gpus, tensor) for key, tensor in state.items()}, tmp_path / name)
    assert 0 < Counted.marks < 12
    (tmp_path / "other").mkdir()
    holdfast.save(state, tmp_path / "other" / name)
    files = [
        path.relative_to(tmp_path)
        for path in sorted(tmp_path.rglob("*"))
        if path.is_file() and "other" not in path.parts
    ]
    assert files
    for path in files:
        assert (tmp_path / path).read_bytes() == (tmp_path / "other" / path).read_bytes()


@pytest.mark.parametrize("block", [256, 4096, 16 << 20])
def test_requests_are_read_together(monkeypatch, block):
    monkeypatch.setattr(memory, "BLOCK_NBYTES", block)
    monkeypatch.setattr(memory, "POOL", host.Pool(make=lambda nbytes: host.HostBlock(block)))
    gpus = source()
    tensors = [*many().values(), *VIEWS.values()]
    outs = [described(gpus, tensor).empty() for tensor in tensors]
    outs[7] = np.asfortranarray(outs[7])
    gpus.read(
        [Request(described(gpus, tensor), out) for tensor, out in zip(tensors, outs, strict=True)]
    )
    for tensor, out in zip(tensors, outs, strict=True):
        assert np.ascontiguousarray(out).tobytes() == plain(tensor)


def test_staging_joins_what_is_close_and_keeps_what_lies_between(monkeypatch):
    monkeypatch.setattr(host, "lock", lambda address, nbytes: True)
    monkeypatch.setattr(host, "unlock", lambda address: None)
    gpus, others = source(), source()
    tensors = [torch.randn(n) for n in (3, 16, 5, 300_000, 1, 17, 2, 2)]
    room = Room().take(2 << 20, gpu=True)
    room.array[...] = 7
    wanted, at = [], 0
    for tensor in tensors:
        at += -at % 64
        wanted.append((described(gpus, tensor), at))
        at += tensor.nbytes
    starts = []
    before = memory._joined
    monkeypatch.setattr(
        memory,
        "_joined",
        lambda tensors, gaps: starts.append(len(tensors)) or before(tensors, gaps),
    )
    copies = Copies(room)
    copies.begin(gpus, [one for number, one in enumerate(wanted) if number != 6])
    copies.begin(others, [(described(others, tensors[6]), wanted[6][1])])
    copies.wait()
    for tensor, (_, place) in zip(tensors, wanted, strict=True):
        assert np.array_equal(
            room.array[place : place + tensor.nbytes].view(np.float32), tensor.numpy()
        )
    assert sorted(starts) == [1, 1, 1, 2, 3]  # started by several threads
    assert (room.array[at:] == 7).all()


def test_room_is_used_again_and_grows(monkeypatch):
    asked = []
    monkeypatch.setattr(host, "lock", lambda address, nbytes: asked.append(nbytes) or True)
    monkeypatch.setattr(host, "unlock", lambda address: None)
    room = Room()
    first = room.take(100_000, gpu=True)
    assert room.take(50_000, gpu=True) is first
    assert room.take(50_000, gpu=False) is first
    larger = room.take(200_000, gpu=True)
    assert larger is not first
    assert len(asked) == 2
    smaller = room.take(200_000, gpu=True, max_host_memory=8192)
    assert smaller.locked_nbytes <= 8192
    room.free()
    assert room.take(10, gpu=False) is not smaller


@pytest.mark.parametrize("short", [0, 64 << 10])
@pytest.mark.parametrize("block", [64, 1 << 20])
@pytest.mark.parametrize("name", VIEWS)
def test_sums_do_not_depend_on_how_a_tensor_lies(monkeypatch, name, block, short):
    """What a rank tells the others of a tensor that stays where it is."""
    from holdfast.torch.ranks import replica_sums

    monkeypatch.setattr(replica_sums, "BLOCK_NBYTES", block)
    monkeypatch.setattr(replica_sums, "SMALL_ROW_NBYTES", short)

    def sums(tensor: torch.Tensor) -> bytes:
        return replica_sums.replica_sums(
            make_lazy_table(["t"], [described(source(), tensor)]), threads=1
        )

    tensor = VIEWS[name]
    copy = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    assert sums(tensor) == sums(copy)
    if tensor.numel():
        copy.view(-1).view(torch.uint8)[-1] ^= 1
        assert sums(tensor) != sums(copy)


@pytest.mark.parametrize("short", [0, 64 << 10])
def test_sums_of_many_are_those_of_each(monkeypatch, short):
    from msgspec.msgpack import decode

    from holdfast.torch.ranks import replica_sums as summing
    from holdfast.torch.ranks.replica_sums import replica_sums

    monkeypatch.setattr(summing, "SMALL_ROW_NBYTES", short)

    gpus = source()
    lazies = {name: described(gpus, tensor) for name, tensor in VIEWS.items() if tensor.numel()}
    each = {
        name: decode(replica_sums(make_lazy_table([name], [lazy]), threads=1))[name]
        for name, lazy in lazies.items()
    }
    assert decode(replica_sums(make_lazy_table([*lazies], [*lazies.values()]), threads=1)) == each
    assert len({found[0] for found in each.values()}) == len(each)
