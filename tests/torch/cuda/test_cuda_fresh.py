"""Rows of a checkpoint to a GPU, with the CPU in its place: the same as what is read to the CPU, and damage by its name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.errors import Corrupted
from holdfast.torch import open as torch_open
from holdfast.torch.cuda import host
from holdfast.torch.cuda import load as gpu_load
from holdfast.torch.cuda.load import load_fills, load_rows, views
from holdfast.torch.tensors import allocate
from holdfast.torch.tensors import fill as filling
from holdfast.torch.tensors.allocate import fresh_kinds, read_tensors
from holdfast.torch.tensors.fill import fill, row_ranges
from holdfast.torch.tensors.scratch import Fill
from tests.sampling import examples
from tests.support import flip_bit
from tests.torch.cuda.random_bits import values

CPU = torch.device("cpu")
DTYPES = [
    torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def kinds(name: str) -> list[torch.dtype]:
    return (
        [dtype for dtype in DTYPES if dtype is not torch.complex128]
        if name.endswith("safetensors")
        else DTYPES
    )


def many(name: str) -> dict[str, torch.Tensor]:
    own = kinds(name)
    made = {
        f"t{i}": values(*((), (i % 9 + 1,), (2, i % 5 + 1))[i % 3], dtype=own[i % len(own)], seed=i)
        for i in range(300)
    }
    return made | {
        "zero": torch.tensor(-0.0),
        "empty": torch.zeros(0, 3),
        "large": values(300, 300),
        "turned": values(7, 9).T,
    }


def read_fresh(checkpoint, names, most=None) -> dict[str, torch.Tensor]:
    table = checkpoint.stored
    rows = [table.row_indices[name] for name in names]
    fresh = [
        (row, kind)
        for row, kind in zip(rows, fresh_kinds(table, rows, device=CPU), strict=True)
        if kind is not None
    ]
    groups = row_ranges(
        table, [row for row, _ in fresh], [kind for _, kind in fresh], [CPU] * len(fresh)
    )
    found = [rows for rows, _ in groups]
    load_rows(found, most=most)
    return {one.name(number): tensor for one in found for number, tensor in enumerate(one.tensors)}


def read_by_one(checkpoint) -> dict[str, torch.Tensor]:
    return {name: lazy.torch() for name, lazy in checkpoint.items()}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in found.items():
        other = expected[name]
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (
            other.dtype,
            other.shape,
            other.stride(),
        ), name
        assert bits(tensor) == bits(other), name
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
    filled = [tensor for tensor in found.values() if tensor.nbytes]
    assert len({tensor.untyped_storage().data_ptr() for tensor in filled}) == len(filled)


@pytest.mark.parametrize("block", [None, 2 << 20])
@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "native"])
def test_as_to_the_cpu(tmp_path, name, block):
    state = many(name)
    holdfast.save(state, tmp_path / name)
    with holdfast.open(tmp_path / name) as checkpoint:
        names = list(checkpoint)
        expected = read_by_one(checkpoint)
        found = read_fresh(checkpoint, names, block)
    check(found, expected)
    assert set(found) >= {f"t{i}" for i in range(300)} | {"zero", "large"}


@settings(max_examples=examples(40))
@given(st.data())
def test_drawn_files(tmp_path_factory, data):
    """Files of any header length, so that tensors begin anywhere; some names, in any order."""
    folder = tmp_path_factory.mktemp("drawn")
    count = data.draw(st.integers(1, 200))
    name = data.draw(st.sampled_from(["a.safetensors", "a.pt", "native"]))
    state = {
        f"{'x' * data.draw(st.integers(0, 9))}{i}": values(
            data.draw(st.integers(0, 40)), dtype=data.draw(st.sampled_from(kinds(name))), seed=i
        )
        for i in range(count)
    }
    holdfast.save(state, folder / name)
    with holdfast.open(folder / name) as checkpoint:
        names = data.draw(st.permutations(list(checkpoint)))[: data.draw(st.integers(1, count))]
        expected = read_by_one(checkpoint)
        found = read_fresh(checkpoint, names, 2 << 20)
    check(found, expected)
    assert {name for name in names if state[name].nbytes} <= set(found)


def test_what_begins_at_odd_places(tmp_path):
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}%s}'
    more = b"".join(
        b',"b%d":{"dtype":"F64","shape":[1],"data_offsets":[%d,%d]}' % (i, 8 + 8 * i, 16 + 8 * i)
        for i in range(100)
    )
    raw = header % more
    raw += b" " * (3 - len(raw) % 8)
    content = np.random.default_rng(0).integers(0, 256, 808, np.uint8).tobytes()
    (tmp_path / "odd.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + content)
    with holdfast.open(tmp_path / "odd.safetensors") as checkpoint:
        found = read_fresh(checkpoint, list(checkpoint))
        check(found, read_by_one(checkpoint))
    assert len(found) == 101


def shared() -> dict[str, torch.Tensor]:
    base, whole = values(40, 10), values(64, seed=5)
    state = {f"row{i}": base[i] for i in range(40)} | {
        f"own{i}": values(4, seed=i) for i in range(80)
    }
    return state | {"whole": whole, "part": whole[8:16], "tied": state["own3"]}


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "native"])
def test_what_shares_a_storage_is_no_fresh_row(tmp_path, name):
    holdfast.save(shared(), tmp_path / name)
    with holdfast.open(tmp_path / name) as checkpoint:
        table = checkpoint.stored
        kinds = fresh_kinds(table, range(len(table)), device=CPU)
    fresh = {name for name, kind in zip(table.names, kinds, strict=True) if kind is not None}
    assert fresh == {f"own{i}" for i in range(80)} - {"own3"}


@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize("name", ["a.safetensors", "native", "a.pt"])
def test_damage_is_named(tmp_path, name, count):
    state = {f"t{i}": values(16, seed=i) for i in range(count)}
    holdfast.save(state, tmp_path / name)
    file = (
        tmp_path / name
        if name != "native"
        else next(path for path in (tmp_path / name).iterdir() if path.suffix != ".json")
    )
    raw = bytearray(file.read_bytes())
    hurt = f"t{count - 1}"
    raw[raw.index(bits(state[hurt])) + 9] ^= 1
    file.write_bytes(raw)
    with holdfast.open(tmp_path / name) as checkpoint:
        with pytest.raises(Corrupted) as fast:
            read_fresh(checkpoint, list(checkpoint))
        with pytest.raises(Corrupted) as plain:
            read_by_one(checkpoint)
        assert (fast.value.tensor, fast.value.file, fast.value.offset) == (
            hurt,
            plain.value.file,
            plain.value.offset,
        )
        assert str(fast.value) == str(plain.value)
    with holdfast.open(tmp_path / name, verify=False) as checkpoint:
        assert len(read_fresh(checkpoint, list(checkpoint))) == count


def test_a_checkpoint_is_read_in_one_pass_and_in_order(tmp_path, monkeypatch):
    """The device is called a GPU where it is decided, and is the CPU where it is used."""
    state = many("a.pt") | {"tied": (tied := values(5)), "twin": tied}
    holdfast.save(state, tmp_path / "a.pt")
    passes: list[int] = []

    class Device:
        type = "cuda"

    from holdfast.torch.tensors import open as opened

    def small(tensors, *, names, device, dtype, max_host_memory):
        return read_tensors(
            tensors, names=names, device=CPU, dtype=dtype, max_host_memory=max_host_memory
        )

    def loaded(groups, **more):
        passes.append(len(groups))
        return load_rows(groups, **more)

    monkeypatch.setattr(opened, "read_tensors", small)
    monkeypatch.setattr(allocate, "_in_memory", lambda device: False)
    monkeypatch.setattr(gpu_load, "load_rows", loaded)
    monkeypatch.setattr(opened, "_device", lambda device: Device())
    monkeypatch.setattr(filling, "_sorted_out", lambda fills: ([], fills, []))
    with torch_open(tmp_path / "a.pt") as checkpoint:
        found = checkpoint.read(device="cpu")
        assert list(found) == list(checkpoint)
        assert passes == [2]
        assert (
            found["tied"].untyped_storage().data_ptr() == found["twin"].untyped_storage().data_ptr()
        )
        for name, tensor in state.items():
            assert bits(found[name]) == bits(tensor), name
        assert (
            checkpoint.read(["zero"] * 70, device="cpu", dtype=torch.float64)["zero"].dtype
            == torch.float64
        )
        assert passes == [2, 1]
        with pytest.raises(KeyError, match="none"):
            checkpoint.read(["zero", "none"], device="cpu")


def test_blocks_are_given_back(tmp_path, monkeypatch):
    pool = host.Pool()
    monkeypatch.setattr(gpu_load, "POOL", pool)
    holdfast.save({f"t{i}": values(64, seed=i) for i in range(500)}, tmp_path / "a.safetensors")
    with holdfast.open(tmp_path / "a.safetensors") as checkpoint:
        for _ in range(3):
            read_fresh(checkpoint, list(checkpoint))
    assert pool.kept_nbytes == host.BLOCK_NBYTES


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=12),
    st.sampled_from([(), (1,), (3,), (2, 2), (1, 3, 1)]),
)
def test_views_begin_anywhere(steps, shape):
    """Some equally far from each other, some not."""
    starts = np.cumsum([0, *(step for step, times in steps for _ in range(times))])
    row = torch.arange(int(starts[-1]) + 8)
    found = views(row, starts, shape)
    count = torch.Size(shape).numel()
    assert len(found) == len(starts)
    for view, start in zip(found, starts.tolist(), strict=True):
        assert torch.equal(view, row[start : start + count].view(shape))
        assert view.data_ptr() == row[start:].data_ptr()


def test_tensors_of_a_kind_are_cut_by_one_call(tmp_path, monkeypatch):
    """In turns with others, and behind headers: what is equally far from each other costs no call each."""
    cuts: list[int] = []
    before = torch.Tensor.as_strided

    def as_strided(self, *given):
        cuts.append(given[0][0])
        return before(self, *given)

    monkeypatch.setattr(torch.Tensor, "as_strided", as_strided)
    state = {
        f"layer.{i:04}.{name}": values(*shape, seed=i)
        for i in range(100)
        for name, shape in (("w", (8, 8)), ("b", (8,)))
    }
    for name in ("a.safetensors", "native"):
        holdfast.save(state, tmp_path / name)
        cuts.clear()
        with holdfast.open(tmp_path / name) as checkpoint:
            check(read_fresh(checkpoint, list(checkpoint)), state)
        assert cuts == [100, 100]


def targets(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """To be filled: as they were saved but for some, which are cast, turned or lie apart."""
    made = {
        name: torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        for name, tensor in state.items()
    }
    return made | {
        "t0": torch.zeros((), dtype=torch.float64),
        "t8": torch.zeros(made["t8"].shape[::-1], dtype=made["t8"].dtype).T,
        "t10": torch.zeros(len(made["t10"]), 3, dtype=made["t10"].dtype)[:, 0],
    }


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "native"])
def test_targets_are_filled_as_on_the_cpu(tmp_path, name):
    state = many(name)
    holdfast.save(state, tmp_path / name)
    made, expected = targets(state), targets(state)
    with holdfast.open(tmp_path / name) as checkpoint:
        load_fills([Fill(checkpoint[key], target) for key, target in made.items()], most=2 << 20)
        fill([Fill(checkpoint[key], target) for key, target in expected.items()])
    for key in made:
        assert bits(made[key]) == bits(expected[key]), key


@settings(max_examples=examples(25))
@given(st.data())
def test_drawn_targets(tmp_path_factory, data):
    """Parts of tensors, names that share bytes, several of them for two targets, files of several kinds."""
    folder = tmp_path_factory.mktemp("drawn")
    name = data.draw(st.sampled_from(["a.safetensors", "a.pt", "native"]))
    state = {
        f"{'x' * (i % 7)}{i}": values(i % 11 + 1, dtype=kinds(name)[i % 5], seed=i)
        for i in range(90)
    }
    base = values(30, 4)
    state |= {f"row{i}": base[i] for i in range(8)} | {"tied": state["x1"]}
    holdfast.save(state, folder / name)
    with holdfast.open(folder / name) as checkpoint:
        drawn = data.draw(
            st.lists(
                st.tuples(st.sampled_from(sorted(state)), st.integers(0, 3)),
                min_size=1,
                max_size=130,
            )
        )
        lazies = [
            checkpoint[key] if cut != 1 else checkpoint[key][: len(state[key]) // 2]
            for key, cut in drawn
        ]
        every = [
            [
                torch.zeros(lazy.shape, dtype=state[key].dtype)
                for lazy, (key, _) in zip(lazies, drawn, strict=True)
            ]
            for _ in "ab"
        ]
        load_fills([Fill(*one) for one in zip(lazies, every[0], strict=True)])
        fill([Fill(*one) for one in zip(lazies, every[1], strict=True)])
    assert [bits(one) for one in every[0]] == [bits(one) for one in every[1]]


def test_damaged_targets_are_named(tmp_path):
    state = {f"t{i}": values(16, seed=i) for i in range(100)}
    holdfast.save(state, tmp_path / "a.safetensors")
    flip_bit(tmp_path / "a.safetensors", after=bits(state["t42"]))
    with holdfast.open(tmp_path / "a.safetensors") as checkpoint:
        fills = [Fill(lazy, torch.zeros(16)) for lazy in checkpoint.values()]
        with pytest.raises(Corrupted) as fast:
            load_fills(fills)
        with pytest.raises(Corrupted) as plain:
            fill(fills)
    assert fast.value.tensor == "t42"
    assert str(fast.value) == str(plain.value)


def test_loads_in_place_go_through_blocks(tmp_path, monkeypatch):
    """What is on a GPU, where that is decided; the CPU, where it is used. Progress tells of all bytes, once."""
    state = many("native")
    holdfast.save(state, tmp_path / "native")
    told: list[int] = []
    monkeypatch.setattr(filling, "_sorted_out", lambda fills: ([], fills, []))
    made = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    holdfast.torch.load_sharded(tmp_path / "native", made, progress=told.append)
    assert sum(told) == sum(tensor.nbytes for tensor in state.values())
    assert all(bits(made[name]) == bits(tensor) for name, tensor in state.items())
