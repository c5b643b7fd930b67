"""Laying tensors into blocks, and filling targets out of them: against the bytes that torch itself would give. No GPU is needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.tensor import LazyTensor
from holdfast.engine.coalesce import PAGE_LOCKED
from holdfast.engine.source import OpenSource
from holdfast.errors import Corrupted
from holdfast.stores.memory import MemoryStore
from holdfast.torch.cuda import load as gpu_load
from holdfast.torch.cuda import plan as planning
from holdfast.torch.cuda.load import blocks_within, load_fills
from holdfast.torch.cuda.plan import Conversion, RowPlan, rows_of, strided_nbytes
from holdfast.torch.cuda.streams import CopyStream
from holdfast.torch.tensors.scratch import Fill
from tests.sampling import examples

CPU = torch.device("cpu")
BLOCK = 1 << 20
CONTENT = np.random.default_rng(0).integers(0, 256, 3 * BLOCK, dtype=np.uint8).tobytes()
KINDS = ["uint8", "bfloat16", "float32", "complex64", "float64"]


def tasks_of(source, fills, most, *, readers=1):
    return RowPlan(rows_of(source, CPU, fills, most=most), most, readers=readers).tasks()


class Drawn:
    """A file of random bytes, and tensors that lie in it anyhow."""

    def __init__(self, draw) -> None:
        self.source = OpenSource(MemoryStore({"f": CONTENT, "g": CONTENT[::-1]}))
        self.fills = [self._fill(draw, i) for i in range(draw(st.integers(1, 6)))]

    def _fill(self, draw, number: int) -> Fill:
        dtype = DTYPES.name(draw(st.sampled_from(KINDS)))
        width = dtype.bits // 8
        shape = tuple(draw(st.lists(st.integers(1, 40), max_size=3)))
        if draw(st.booleans()):
            shape = (*shape, draw(st.integers(1, 40_000 // max(1, int(np.prod(shape))) + 1)))
        order = draw(st.permutations(range(len(shape))))
        strides, room = [0] * len(shape), width * draw(st.sampled_from([1, 1, 1, 2]))
        for d in order:
            strides[d] = room * 8
            room *= shape[d]
        start = draw(st.integers(0, max(0, len(CONTENT) - room)))
        storage = Storage(
            draw(st.sampled_from("fg")), start, min(room, len(CONTENT) - start), home=None
        )
        chunk = Chunk(Box.whole(shape), storage, 0, tuple(strides))
        lazy = LazyTensor(f"t{number}", dtype, shape, (chunk,), self.source)
        return Fill(lazy, self._target(draw, lazy))

    def _target(self, draw, lazy: LazyTensor) -> torch.Tensor:
        own = getattr(torch, lazy.dtype.name)
        wider = torch.complex128 if own.is_complex else torch.float64
        dtype = draw(st.sampled_from([own, own, wider]))
        match draw(st.sampled_from(["plain", "turned", "gaps"])):
            case "turned":
                return torch.zeros(lazy.shape[::-1], dtype=dtype).permute(
                    tuple(reversed(range(lazy.ndim)))
                )
            case "gaps":
                return torch.zeros((*lazy.shape, 2), dtype=dtype)[..., 1]
        return torch.zeros(lazy.shape, dtype=dtype)


def expected(one: Fill) -> torch.Tensor:
    """Element by element what the file has."""
    return one.lazy.torch().to(one.target.dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


@settings(max_examples=examples(60))
@given(st.data())
def test_every_element_comes_to_its_place(data):
    drawn = Drawn(data.draw)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(planning, "LEAST_NBYTES", data.draw(st.sampled_from([2048, 2 << 20])))
        patched.setattr(planning, "SHORT_NBYTES", data.draw(st.sampled_from([0, 1000, 256 << 10])))
        load_fills(drawn.fills, most=2 << 20)
    for one in drawn.fills:
        assert torch.equal(bits(one.target), bits(expected(one)))


def test_the_first_blocks_and_the_last_are_not_full():
    source = OpenSource(MemoryStore({"f": bytes(64 * BLOCK)}))
    lazy = LazyTensor.contiguous(
        "t",
        DTYPES.name("uint8"),
        (64 * BLOCK,),
        Storage("f", 0, 64 * BLOCK, home=source.store),
        source,
    )
    tasks = list(
        tasks_of(
            source, [Fill(lazy, torch.zeros(64 * BLOCK, dtype=torch.uint8))], 8 * BLOCK, readers=4
        )
    )
    sizes = [task.nbytes // BLOCK for task in tasks]
    assert sizes[:4] == [2, 4, 6, 8]
    assert sizes[-1] <= 2
    assert sum(task.nbytes for task in tasks) == 64 * BLOCK


@settings(max_examples=examples(60))
@given(st.data())
def test_tasks_hold_what_was_asked_for_and_no_more_than_a_block(data):
    drawn = Drawn(data.draw)
    most = data.draw(st.sampled_from([4096, 20_000, BLOCK]))
    wanted = sum(one.lazy.nbytes for one in drawn.fills)
    found = read = reads = 0
    for task in tasks_of(
        drawn.source, drawn.fills, most, readers=data.draw(st.sampled_from([1, 3]))
    ):
        ends, plan = [], task.plan
        for one in task.reads:
            assert one.at >= max(ends, default=0), "two reads share bytes of the block"
            ends.append(one.at + one.stop - one.start)
            assert ends[-1] <= most
            pieces = [piece for row_run in one.row_runs for piece in pieces_of(plan, row_run)]
            assert one.start == min(start for start, _, _ in pieces)
            assert one.stop == max(start + nbytes for start, nbytes, _ in pieces)
            for start, nbytes, at in pieces:
                assert at - one.at == start - one.start
                found += nbytes
            read, reads = read + one.stop - one.start, reads + 1
        for one, at in task.strided:
            assert at + strided_nbytes(one) <= most
            found += one.lazy.nbytes
    assert found == wanted
    assert read <= wanted * (1 + 1 / 16) + (len(drawn.fills) + reads) * PAGE_LOCKED.free_gap


def pieces_of(plan, row_run):
    """Of each row of a run the first byte in the file, how many, and the place in the block."""
    if row_run.last == row_run.first + 1:
        return [(plan.starts.item(row_run.first) + row_run.skip, row_run.nbytes, row_run.at)]
    first = plan.starts.item(row_run.first)
    rows = range(row_run.first, row_run.last)
    return [
        (plan.starts.item(row), plan.nbytes.item(row), row_run.at + plan.starts.item(row) - first)
        for row in rows
    ]


def test_neighbours_are_read_together():
    content = bytes(range(256)) * 4096
    source = OpenSource(MemoryStore({"f": content}))
    row = DTYPES.name("float32")
    fills = [
        Fill(
            LazyTensor.contiguous(
                f"t{i}", row, (1000,), Storage("f", i * 4100, 4000, home=source.store), source
            ),
            torch.zeros(1000),
        )
        for i in range(200)
    ]
    (task,) = tasks_of(source, fills, BLOCK)
    (read,) = task.reads
    (row_run,) = read.row_runs
    assert (row_run.first, row_run.last) == (0, 200)


def test_same_dtypes_are_bytes_and_others_are_elements():
    source = OpenSource(MemoryStore({"f": bytes(400)}))
    lazy = LazyTensor.contiguous(
        "t", DTYPES.name("float32"), (100,), Storage("f", 0, 400, home=source.store), source
    )
    cast = torch.zeros(100, dtype=torch.float64)
    rows = rows_of(source, CPU, [Fill(lazy, torch.zeros(100)), Fill(lazy, cast)], most=BLOCK)
    same, other = rows.destinations
    assert isinstance(same, torch.Tensor)
    assert isinstance(other, Conversion)
    assert other.dtype is torch.float32
    plan = RowPlan(rows, BLOCK)
    assert plan.cut(next(iter(plan.odd)), 10) == 8


@pytest.mark.parametrize("kind", ["a.pt", "a.safetensors", "native"])
def test_damage_is_found_across_blocks(tmp_path, kind):
    holdfast.save({"a": torch.arange(1_000_000), "b": torch.ones(5)}, tmp_path / kind)
    file = next((tmp_path / kind).glob("data*")) if kind == "native" else tmp_path / kind
    with holdfast.open(tmp_path / kind) as checkpoint:
        where = checkpoint["a"].chunks[0].storage.start + 5_000_001
        target = torch.zeros(1_000_000, dtype=torch.int64)
        load_fills([Fill(checkpoint["a"], target)], most=2 << 20)
        assert torch.equal(target, torch.arange(1_000_000))
        with file.open("r+b") as damaged:
            damaged.seek(where)
            damaged.write(b"\xff")
        with pytest.raises(Corrupted) as raised:
            load_fills([Fill(checkpoint["a"], target)], most=2 << 20)
    assert raised.value.tensor == "a"


def test_progress_counts_every_byte(tmp_path):
    holdfast.save({"a": torch.ones(1_000_000), "b": torch.ones(7, 9)}, tmp_path / "a.safetensors")
    seen = []
    with holdfast.open(tmp_path / "a.safetensors") as checkpoint:
        fills = [
            Fill(checkpoint["a"], torch.zeros(1_000_000)),
            Fill(checkpoint["b"], torch.zeros(9, 7).T),
        ]
        load_fills(fills, progress=seen.append, most=2 << 20)
    assert sum(seen) == 4 * (1_000_000 + 63)
    assert torch.equal(fills[1].target, torch.ones(7, 9))


def test_a_budget_is_kept_or_refused():
    for most in (2 << 20, 3 << 20, 40 << 20, 1 << 30, 1 << 40):
        size = blocks_within(most, 16)
        assert size.count >= 2
        assert size.count * size.nbytes <= most
    with pytest.raises(ValueError, match="max_host_memory"):
        blocks_within(1 << 20, 16)


def test_several_loads_at_once(tmp_path):
    made = {f"t{i}": torch.full((300_000,), float(i)) for i in range(8)}
    holdfast.save(made, tmp_path / "a.safetensors")
    with holdfast.open(tmp_path / "a.safetensors") as checkpoint, ThreadPoolExecutor(4) as pool:

        def one() -> list[torch.Tensor]:
            fills = [Fill(tensor, torch.zeros(300_000)) for tensor in checkpoint.values()]
            load_fills(fills, most=4 << 20)
            return [fill.target for fill in fills]

        for found in [pool.submit(one) for _ in range(8)]:
            assert all(
                torch.equal(tensor, made[name])
                for name, tensor in zip(checkpoint, found.result(), strict=True)
            )


def test_without_a_gpu_the_memory_is_ordinary_and_a_note_says_so(tmp_path, monkeypatch):
    class Elsewhere(CopyStream):
        wants_locked = True

    monkeypatch.setattr(
        gpu_load, "copy_streams", lambda devices: {device: Elsewhere() for device in devices}
    )
    holdfast.save({"a": torch.ones(10)}, tmp_path / "a.safetensors")
    with holdfast.open(tmp_path / "a.safetensors") as checkpoint:
        notes = load_fills([Fill(checkpoint["a"], torch.zeros(10))])
    assert notes == ([] if torch.cuda.is_available() else [gpu_load.UNLOCKED])
