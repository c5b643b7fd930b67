"""On a real GPU: every way in and out, bit for bit; skipped where there is none."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import BadTarget, Corrupted, HoldfastError, HoldfastWarning, Refused, Truncated
from holdfast.torch import load, load_into, load_sharded, save
from holdfast.torch import open as torch_open
from holdfast.torch.cuda import host, memory
from holdfast.torch.cuda import load as gpu_load
from holdfast.torch.tensors import storages as row_tensors
from holdfast.torch.tensors.fill import fill
from holdfast.torch.tensors.scratch import Fill
from tests.support import flip_bit
from tests.torch.cuda.random_bits import values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FORMATS = ["zip.pt", "legacy.pt", "file.safetensors", "native"]
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.int8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16,
]  # fmt: skip
OLD = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def state() -> dict[str, torch.Tensor]:
    made = {f"d{i}": values(7 + i, 5, dtype=dtype, seed=i) for i, dtype in enumerate(DTYPES)}
    made |= {f"small.{i}": values(3, i + 1, seed=100 + i) for i in range(50)}
    made["large"] = values(40 << 20, dtype=torch.uint8, seed=1)
    made["odd"] = values(3_000_001, seed=2)
    made["number"] = torch.tensor(3.5)
    made["empty"] = torch.zeros(0, 3)
    return made


def write(path, tensors):
    if path.name == "legacy.pt":
        torch.save(tensors, path, _use_new_zipfile_serialization=False)
    elif path.suffix == ".pt":
        torch.save(tensors, path)
    else:
        holdfast.save(tensors, path)
    return path


@pytest.fixture(params=FORMATS)
def path(request, tmp_path):
    return tmp_path / request.param


@pytest.mark.parametrize("budget", [None, 2 << 20, 40 << 20], ids=["default", "2MiB", "40MiB"])
def test_read_to_a_gpu_bit_for_bit(path, budget):
    made = state()
    write(path, made)
    with torch_open(path) as checkpoint:
        found = checkpoint.read(device="cuda", max_host_memory=budget)
    assert list(found) == list(checkpoint)
    for name, tensor in made.items():
        assert found[name].is_cuda, name
        assert same(found[name], tensor), name


def test_a_cast_happens_on_the_gpu(path):
    made = {
        "a": torch.randn(1000, 33),
        "b": torch.randn(77, dtype=torch.bfloat16),
        "i": torch.arange(9),
    }
    write(path, made)
    with torch_open(path) as checkpoint:
        found = checkpoint.read(device="cuda", dtype=torch.float16)
    assert same(found["a"], made["a"].to(torch.float16))
    assert same(found["b"], made["b"].to(torch.float16))
    assert same(found["i"], made["i"])


def test_views_and_ties_share_a_storage_on_the_gpu(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    torch.save(
        {
            "base": base,
            "tied": base,
            "row": base[1],
            "turned": base.T,
            "conj": base.to(torch.complex64).conj(),
        },
        tmp_path / "a.pt",
    )
    with torch_open(tmp_path / "a.pt") as checkpoint:
        found = checkpoint.read(device="cuda")
    shared = {
        found[name].untyped_storage().data_ptr() for name in ("base", "tied", "row", "turned")
    }
    assert len(shared) == 1
    assert same(found["turned"], base.T)
    assert same(found["conj"], base.to(torch.complex64).conj())


@pytest.mark.parametrize("budget", [None, 2 << 20], ids=["default", "2MiB"])
@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
@pytest.mark.parametrize("weights_only", [True, False], ids=["weights", "code"])
def test_load_as_torch_load_does(tmp_path, kind, weights_only, budget):
    made = state()
    path = tmp_path / ("a.safetensors" if kind == "safetensors" else "a.pt")
    if kind == "safetensors":
        holdfast.save(made, path)
    else:
        torch.save(made, path, _use_new_zipfile_serialization=kind == "zip")
    found = load(path, map_location="cuda", weights_only=weights_only, max_host_memory=budget)
    for name, tensor in made.items():
        assert found[name].device == torch.device("cuda", 0), name
        assert same(found[name], tensor), name


@pytest.mark.parametrize(
    "where",
    ["cuda:0", {"cpu": "cuda:0"}, None, lambda storage, tag: storage.cuda()],
    ids=["name", "dict", "none", "code"],
)
def test_every_kind_of_map_location(tmp_path, where):
    made = {"a": values(1000), "b": values(500).cuda()}
    torch.save(made, tmp_path / "a.pt")
    found = load(tmp_path / "a.pt", map_location=where)
    expected = torch.load(tmp_path / "a.pt", map_location=where)
    for name in made:
        assert found[name].device == expected[name].device
        assert same(found[name], expected[name])


def test_mapped_and_from_a_buffer(tmp_path):
    made = {"a": values(5_000_000)}
    torch.save(made, tmp_path / "a.pt")
    assert same(load(tmp_path / "a.pt", map_location="cuda", mmap=True)["a"], made["a"])
    buffer = io.BytesIO((tmp_path / "a.pt").read_bytes())
    assert same(load(buffer, map_location="cuda")["a"], made["a"])


def test_load_into_a_model_on_the_gpu(path):
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(300, 500), nn.BatchNorm1d(500), nn.Linear(500, 700))
    write(path, source.state_dict())
    model = nn.Sequential(nn.Linear(300, 500), nn.BatchNorm1d(500), nn.Linear(500, 700)).cuda()
    before = [p.data_ptr() for p in model.parameters()]
    assert not load_into(model, path).notes
    assert [p.data_ptr() for p in model.parameters()] == before
    for name, tensor in source.state_dict().items():
        assert same(model.state_dict()[name], tensor)


def test_targets_of_every_layout(tmp_path):
    made = {
        "a": values(64, 48),
        "b": values(64, 48, seed=1),
        "c": values(64, 48, seed=2),
        "d": values(30, dtype=torch.complex64),
    }
    holdfast.save(made, tmp_path / "a.safetensors")
    room = torch.zeros(64, 96, device="cuda")
    targets = {
        "a": room[:, 1::2],
        "b": torch.zeros(48, 64, device="cuda").T,
        "c": torch.zeros(64, 48, device="cuda", dtype=torch.float64),
        "d": torch.zeros(30, device="cuda", dtype=torch.complex64).conj(),
    }
    with holdfast.open(tmp_path / "a.safetensors") as checkpoint:
        fill([Fill(checkpoint[name], target) for name, target in targets.items()])
    assert same(targets["a"].contiguous(), made["a"])
    assert not room[:, 0::2].any()
    assert same(targets["b"], made["b"])
    assert torch.equal(targets["c"].cpu().nan_to_num(), made["c"].double().nan_to_num())
    assert torch.equal(
        torch.view_as_real(targets["d"].resolve_conj()).nan_to_num(),
        torch.view_as_real(made["d"]).nan_to_num().cuda(),
    )


def test_an_expanded_target_is_refused(tmp_path):
    holdfast.save({"a": torch.ones(4, 3)}, tmp_path / "a.safetensors")
    with (
        holdfast.open(tmp_path / "a.safetensors") as checkpoint,
        pytest.raises(BadTarget, match="expanded"),
    ):
        fill([Fill(checkpoint["a"], torch.zeros(1, 3, device="cuda").expand(4, 3))])


def test_of_targets_that_overlap_the_last_one_wins(tmp_path):
    holdfast.save({"a": torch.ones(100), "b": torch.full((50,), 2.0)}, tmp_path / "a.safetensors")
    room = torch.zeros(100, device="cuda")
    with holdfast.open(tmp_path / "a.safetensors") as checkpoint:
        fill([Fill(checkpoint["a"], room), Fill(checkpoint["b"], room[25:75])])
        assert room.tolist() == [1.0] * 25 + [2.0] * 50 + [1.0] * 25
        fill([Fill(checkpoint["b"], room[25:75]), Fill(checkpoint["a"], room)])
        assert room.tolist() == [1.0] * 100


def test_a_load_comes_behind_what_the_current_stream_still_does(tmp_path):
    holdfast.save({"a": torch.ones(1 << 20)}, tmp_path / "a.safetensors")
    target = torch.zeros(1 << 20, device="cuda")
    with holdfast.open(tmp_path / "a.safetensors") as checkpoint:
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)
                target.fill_(7)
                fill([Fill(checkpoint["a"], target)])
                assert bool((target == 1).all())


def test_a_save_comes_behind_what_the_current_stream_still_does(tmp_path):
    tensor = torch.zeros(1 << 20, device="cuda")
    for number, stream in enumerate((torch.cuda.current_stream(), torch.cuda.Stream())):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            tensor.fill_(number + 5)
            save({"a": tensor}, tmp_path / "a.pt")
        assert bool((torch.load(tmp_path / "a.pt", map_location="cpu")["a"] == number + 5).all())


@pytest.mark.parametrize("kind", ["torch", "legacy", "api.pt", "a.safetensors", "native"])
def test_save_from_a_gpu(tmp_path, kind):
    base = values(1000, 64).cuda()
    made = {name: tensor.cuda() for name, tensor in state().items()}
    made |= {
        "base": base,
        "tied": base,
        "part": base[10:20, 3:7],
        "turned": base.T,
        "cpu": values(77),
    }
    path = tmp_path / kind
    if kind in ("torch", "legacy"):
        # torch 2.11 cannot read the legacy storages that it writes for unsigned integers and the small floats.
        made = {
            name: tensor for name, tensor in made.items() if kind == "torch" or tensor.dtype in OLD
        }
        save(made, path, _use_new_zipfile_serialization=kind == "torch")
        found = torch.load(path)
    else:
        holdfast.save(made, path)
        with torch_open(path) as checkpoint:
            found = checkpoint.read()
    for name, tensor in made.items():
        assert same(found[name], tensor), name
    if kind != "a.safetensors":
        assert (
            found["base"].untyped_storage().data_ptr() == found["part"].untyped_storage().data_ptr()
        )


def test_the_bytes_are_those_of_torch(tmp_path):
    made = OrderedDict(a=values(1000, 64).cuda(), b=values(3).cuda(), c=values(100_000).cuda()[::7])
    (tmp_path / "ours").mkdir()
    (tmp_path / "peer").mkdir()
    save(made, tmp_path / "ours" / "a.pt")
    torch.save(made, tmp_path / "peer" / "a.pt")
    assert (tmp_path / "ours" / "a.pt").read_bytes() == (tmp_path / "peer" / "a.pt").read_bytes()
    ours, peer = io.BytesIO(), io.BytesIO()
    save(made, ours)
    torch.save(made, peer)
    assert ours.getvalue() == peer.getvalue()


def test_views_that_only_a_gpu_has(tmp_path):
    tensor = torch.randn(30, 20, dtype=torch.complex64, device="cuda")
    made = {
        "conj": tensor.conj(),
        "neg": torch._neg_view(tensor.real.contiguous()),
        "wide": tensor[0].expand(9, 20),
        "step": tensor[::3, ::2],
    }
    holdfast.save(made, tmp_path / "native")
    with torch_open(tmp_path / "native") as checkpoint:
        found = checkpoint.read()
    for name, one in made.items():
        assert same(found[name].resolve_conj(), one.resolve_conj().resolve_neg()), name


@pytest.mark.parametrize("format", ["native", "dcp", "safetensors"])
@pytest.mark.parametrize("block", [True, False], ids=["now", "background"])
def test_sharded_saves_and_loads(tmp_path, format, block):
    from holdfast.torch import async_save_sharded, load_sharded, save_sharded

    made = {
        name: tensor.cuda()
        for name, tensor in state().items()
        if tensor.dtype is not torch.complex64
    }
    done = (save_sharded if block else async_save_sharded)(tmp_path / "a", made, format=format)
    expected = {name: tensor.clone() for name, tensor in made.items()}
    for tensor in made.values():
        # Behind the copies: the save must not see it.
        tensor.view(torch.uint8).zero_() if tensor.ndim else tensor.zero_()
    if not block:
        done.wait()
    load_sharded(tmp_path / "a", made)
    for name, tensor in expected.items():
        assert same(made[name], tensor), name


def test_damage_is_named_and_nothing_is_left(tmp_path):
    made = {"a": values(3_000_000), "b": values(2_000_000, seed=1)}
    torch.save(made, tmp_path / "a.pt")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "b.pt").write_bytes(content)
    threads = threading.active_count()
    with pytest.raises(Corrupted, match="checksum"):
        load(tmp_path / "b.pt", map_location="cuda")
    assert threading.active_count() == threads
    assert load(tmp_path / "b.pt", map_location="cuda", verify=False)["a"].is_cuda
    assert same(load(tmp_path / "a.pt", map_location="cuda")["b"], made["b"])


def test_a_fault_in_a_reader_is_one_error(tmp_path, monkeypatch):
    holdfast.save({f"t{i}": values(3 << 20, seed=i) for i in range(8)}, tmp_path / "a.safetensors")
    with holdfast.open(tmp_path / "a.safetensors", verify=False) as checkpoint:
        targets = [
            Fill(tensor, torch.empty(tensor.shape, device="cuda")) for tensor in checkpoint.values()
        ]
        kept = host.POOL.kept_nbytes
        store = type(targets[0].lazy.source.store)
        read = store.read

        def fail(self, key, start, out):
            if start > 20 << 20:
                raise Truncated("cut short here", file=key, offset=start)
            read(self, key, start, out)

        monkeypatch.setattr(store, "read", fail)
        threads = threading.active_count()
        with pytest.raises(Truncated, match="cut short here"):
            fill(targets)
        assert threading.active_count() == threads
        assert host.POOL.kept_nbytes >= kept
        monkeypatch.undo()
        fill(targets)
        assert all(same(one.target, one.lazy.torch()) for one in targets)


def test_a_fault_in_a_copy_is_one_error(tmp_path, monkeypatch):
    holdfast.save({f"t{i}": values(3 << 20, seed=i) for i in range(8)}, tmp_path / "a.safetensors")
    with holdfast.open(tmp_path / "a.safetensors") as checkpoint:
        targets = [
            Fill(tensor, torch.empty(tensor.shape, device="cuda")) for tensor in checkpoint.values()
        ]
        put, count = gpu_load.Move.put, iter(range(100))

        def fail(self, task, block, copies):
            put(self, task, block, copies)
            if next(count) == 2:
                raise RuntimeError("the copy broke")

        monkeypatch.setattr(gpu_load.Move, "put", fail)
        with pytest.raises(RuntimeError, match="the copy broke"):
            fill(targets)
        monkeypatch.undo()
        fill(targets)
        assert all(same(one.target, one.lazy.torch()) for one in targets)


def test_without_locked_memory_it_works_and_says_so(tmp_path, monkeypatch):
    made = {"a": values(5_000_000)}
    holdfast.save(made, tmp_path / "a.safetensors")
    monkeypatch.setattr(host, "lock", lambda address, nbytes: False)
    host.POOL.free()
    with (
        torch_open(tmp_path / "a.safetensors") as checkpoint,
        pytest.warns(HoldfastWarning, match="ordinary memory"),
    ):
        found = checkpoint.read(device="cuda")
    assert same(found["a"], made["a"])
    model = nn.Linear(100, 100).cuda()
    holdfast.save(model.state_dict(), tmp_path / "m.safetensors")
    assert any(
        "ordinary memory" in note for note in load_into(model, tmp_path / "m.safetensors").notes
    )
    save({"a": made["a"].cuda()}, tmp_path / "a.pt")
    assert same(torch.load(tmp_path / "a.pt", map_location="cpu")["a"], made["a"])
    host.POOL.free()


def test_a_refused_lock_leaves_no_error_behind():
    block = host.HostBlock(1 << 20)
    assert block.locked
    assert not host.lock(block.address, 1 << 20), "twice is refused"
    assert torch.ones(3, device="cuda").sum().item() == 3
    torch.cuda.synchronize()
    block.free()


def test_memory_is_kept_within_the_bound_and_can_be_freed(tmp_path):
    holdfast.save({f"t{i}": values(3 << 20, seed=i) for i in range(16)}, tmp_path / "a.safetensors")
    host.POOL.free()
    with torch_open(tmp_path / "a.safetensors") as checkpoint:
        checkpoint.read(device="cuda", max_host_memory=128 << 20)
        assert 0 < host.POOL.kept_nbytes <= 128 << 20
        checkpoint.read(device="cuda")
        assert host.POOL.kept_nbytes <= host.KEPT_NBYTES
    holdfast.torch.free_host_memory()
    assert host.POOL.kept_nbytes == 0


def test_refused_while_a_graph_is_captured(tmp_path):
    holdfast.save({"a": torch.ones(100)}, tmp_path / "a.safetensors")
    target = torch.zeros(100, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with holdfast.open(tmp_path / "a.safetensors") as checkpoint, torch.cuda.graph(graph):
        target.add_(1)
        with pytest.raises(Refused, match="captured"):
            fill([Fill(checkpoint["a"], target)])
        with pytest.raises(HoldfastError, match="captured"):
            holdfast.save({"a": target}, tmp_path / "b.safetensors")
    graph.replay()
    assert bool((target == 1).all())


def test_memory_of_a_graph_is_saved_as_any_other(tmp_path):
    source = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = source + 1
    graph.replay()
    save({"result": result}, tmp_path / "a.pt")
    assert bool((torch.load(tmp_path / "a.pt")["result"] == 1).all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_several_gpus(tmp_path):
    made = {
        "a": values(1_000_000).to("cuda:0"),
        "b": values(1_000_000, seed=1).to("cuda:1"),
        "c": values(10),
    }
    save(made, tmp_path / "a.pt")
    found = load(tmp_path / "a.pt")
    assert [found[name].device for name in made] == [tensor.device for tensor in made.values()]
    assert all(same(found[name], tensor) for name, tensor in made.items())


# What ranks have alike.


def test_sums_of_what_is_on_a_gpu():
    from holdfast.torch.ranks.replica_sums import replica_sums
    from holdfast.verbs.shared.state import tabulate_state

    def sums(tensor: torch.Tensor) -> bytes:
        return replica_sums(tabulate_state({"t": tensor}).tensors, threads=1)

    for shape in ((3,), (1000, 7), (4096, 1 << 12)):
        for dtype in (torch.float32, torch.int8, torch.bool):
            one = values(*shape, dtype=dtype).cuda()
            assert sums(one) == sums(one.clone())
            behind = torch.cat([one.reshape(-1)[:1], one.reshape(-1)])[1:].view(shape)
            assert sums(one) == sums(behind), "wherever it lies"
            assert sums(one) == sums(one.movedim(0, -1).contiguous().movedim(-1, 0)), (
                "however it lies"
            )
            other = one.clone()
            other.view(-1).view(torch.uint8)[-1] ^= 1
            assert sums(one) != sums(other)


def many() -> dict[str, torch.Tensor]:
    """More small ones than go into a block, with ties, views and what is long among them."""
    made = {
        f"t{i}": values(2 + i % 50, 33, dtype=DTYPES[i % len(DTYPES)], seed=i) for i in range(3000)
    }
    return made | {
        "tied": made["t7"],
        "view": made["t8"][1:],
        "long": values(1 << 20, seed=5),
        "one": values(1, seed=6),
    }


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "native"])
def test_many_small_ones_to_a_gpu_and_back(tmp_path, name):
    made = {key: tensor.cuda() for key, tensor in many().items()}
    made["tied"], made["view"] = made["t7"], made["t8"][1:]
    holdfast.save(made, tmp_path / name)
    with torch_open(tmp_path / name) as checkpoint:
        found = checkpoint.read(device="cuda")
    for key, tensor in made.items():
        assert found[key].is_cuda, key
        assert same(found[key], tensor), key
    assert found["tied"].untyped_storage().data_ptr() == found["t7"].untyped_storage().data_ptr()
    own = [found[f"t{i}"] for i in range(3000)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in own}) == 3000
    assert all(
        found[f"t{i}"].untyped_storage().nbytes() == found[f"t{i}"].nbytes for i in range(9, 3000)
    )


def test_what_was_made_of_a_block_belongs_to_the_callers_stream(tmp_path):
    """Used on that stream at once, freed, and its memory used again: nothing is torn."""
    made = {f"t{i}": torch.full((1000,), i, dtype=torch.int32) for i in range(2000)}
    holdfast.save(made, tmp_path / "a.safetensors")
    for _ in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            with torch_open(tmp_path / "a.safetensors") as checkpoint:
                found = checkpoint.read(device="cuda")
            sums = torch.stack([tensor.sum() for tensor in found.values()])
            del found
            torch.empty(1 << 24, device="cuda").fill_(7)
            assert sums.tolist() == [1000 * int(name[1:]) for name in checkpoint]


def bank(count: int = 700) -> dict[str, torch.Tensor]:
    """Many small ones, most on the GPU."""
    own = [dtype for dtype in DTYPES if dtype is not torch.complex64]
    made = {
        f"t{i}": values(i % 9 + 1, 3, dtype=own[i % len(own)], seed=i).to(
            "cuda" if i % 5 else "cpu"
        )
        for i in range(count)
    }
    return made | {"long": values(200, 300).cuda()}


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "native"])
def test_many_are_saved_as_rows_in_the_same_bytes(tmp_path, name, monkeypatch):
    (tmp_path / "rows").mkdir()
    (tmp_path / "objects").mkdir()
    reads: list[int] = []
    before = memory.GpuStorages.read
    monkeypatch.setattr(
        memory.GpuStorages,
        "read",
        lambda self, numbers: reads.append(len(numbers)) or before(self, numbers),
    )
    holdfast.save(bank(), tmp_path / "rows" / name)
    assert sum(reads) > 500
    monkeypatch.setattr(row_tensors, "_is_kept", lambda dtype, device: False)
    holdfast.save(bank(), tmp_path / "objects" / name)
    for path in (tmp_path / "rows").rglob("*"):
        if path.is_file():
            assert (
                path.read_bytes()
                == (tmp_path / "objects" / path.relative_to(tmp_path / "rows")).read_bytes()
            ), path


def test_many_are_pickled_as_torch_does(tmp_path):
    state = {key: tensor for key, tensor in bank().items() if tensor.dtype in OLD}
    state |= {"tied": [], "again": torch.nn.Parameter(values(4).cuda())}
    state["tied"] = [state["t1"], state["t1"].detach(), state["t2"][1:]]
    assert state["t1"].is_cuda
    save(state, tmp_path / "a.pt")
    mine = (tmp_path / "a.pt").read_bytes()
    torch.save(state, tmp_path / "a.pt")
    assert mine == (tmp_path / "a.pt").read_bytes()


def test_what_the_stream_has_still_to_do_is_saved(tmp_path):
    """Kernels that were asked for before the save count, those behind it do not."""
    state = {f"t{i}": torch.zeros(1000, device="cuda") for i in range(500)}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        torch._foreach_add_(list(state.values()), 1)
        save(state, tmp_path / "a.pt")
        torch._foreach_add_(list(state.values()), 1)
    assert all(
        (tensor == 1).all() for tensor in torch.load(tmp_path / "a.pt", map_location="cpu").values()
    )


@pytest.mark.parametrize("where", ["cuda", None])
def test_many_are_loaded_from_a_torch_file(tmp_path, where):
    state = bank() | {"turned": values(4, 6).cuda().T, "number": torch.tensor(1.5, device="cuda")}
    state["tied"] = state["t1"].reshape(-1)
    torch.save(state, tmp_path / "a.pt")
    found = load(tmp_path / "a.pt", map_location=where)
    for name, tensor in state.items():
        assert same(found[name], tensor), name
        assert found[name].stride() == tensor.stride(), name
        assert found[name].device == (
            tensor.device if where is None else torch.device("cuda", 0)
        ), name
    assert found["tied"].data_ptr() == found["t1"].data_ptr()
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == len(state) - 1


def test_damage_among_many_in_a_torch_file(tmp_path):
    torch.save(
        {f"t{i}": torch.full((50,), i, device="cuda") for i in range(200)}, tmp_path / "a.pt"
    )
    flip_bit(tmp_path / "a.pt", 9, after=torch.full((50,), 77).numpy().tobytes())
    with pytest.raises(Corrupted, match="data/77"):
        load(tmp_path / "a.pt")


@pytest.mark.parametrize("name", ["a.safetensors", "native"])
def test_many_that_are_there_are_filled_behind_the_stream(tmp_path, name):
    """What the caller's stream still writes to them comes before, and is gone."""
    state = bank() | {"long": values(300_000).cuda()}
    holdfast.save(state, tmp_path / name)
    into = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    model = nn.ParameterDict(
        {
            key: nn.Parameter(torch.zeros_like(tensor), requires_grad=False)
            for key, tensor in state.items()
        }
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        for tensor in (*into.values(), *model.values()):
            tensor.zero_()
        load_sharded(tmp_path / name, into)
        load_into(model, tmp_path / name)
    for key, tensor in state.items():
        assert same(into[key], tensor), key
        assert same(model[key], tensor), key


@pytest.mark.parametrize("dtype", [*OLD, torch.complex128, torch.float8_e5m2])
def test_many_of_one_dtype(tmp_path, dtype):
    """Gathered and spread as they are, whatever their bits mean."""
    state = {
        f"t{i:04}": values(*((), (i % 9 + 1,), (2, i % 5 + 1))[i % 3], dtype=dtype, seed=i).cuda()
        for i in range(400)
    }
    save(state, tmp_path / "a.pt")
    for found in (torch.load(tmp_path / "a.pt"), load(tmp_path / "a.pt")):
        assert all(
            same(found[name], tensor) and found[name].is_cuda for name, tensor in state.items()
        )
    with torch_open(tmp_path / "a.pt") as checkpoint:
        found = checkpoint.read(device="cuda")
    assert all(same(found[name], tensor) for name, tensor in state.items())
