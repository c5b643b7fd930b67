"""`holdfast.jax.load` on a mesh of eight devices: exact slices, each byte read once; and arrays of JAX saved by `holdfast.save`."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.errors import (
    BadArgument,
    BadArgumentType,
    CannotHold,
    Corrupted,
    DoesNotFit,
    LimitExceeded,
    Unsupported,
)

jax = pytest.importorskip("jax")
# Eight of the processor, also where JAX would take the one GPU of the machine.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402  # when there are eight
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from tests.integrations.page import run_page  # noqa: E402
from tests.support import ALONE, flip_bit  # noqa: E402

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

WRITERS: dict[str, Callable[[dict[str, object], Path], object]] = {
    "torch": lambda state, path: torch.save(state, path),
    "dcp": lambda state, path: dcp.save(state, checkpoint_id=path, **ALONE),
    "native": lambda state, path: holdfast.save(state, path, format="native"),
}
DTYPES = [
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.float32,
    torch.int8,
    torch.bool,
    torch.complex64,
]


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    assert len(jax.devices()) == 8
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


@pytest.mark.parametrize("format", WRITERS)
def test_a_state_of_torch(format: str, mesh: Mesh, tmp_path: Path):
    torch.manual_seed(0)
    weights = {"a.weight": torch.randn(16, 8), "a.bias": torch.randn(16).bfloat16()}
    WRITERS[format]({"model": weights, "count": torch.tensor(7), "step": 5}, tmp_path / "x")
    rows, tiles = NamedSharding(mesh, P("data")), NamedSharding(mesh, P("model", "data"))
    state = holdfast.jax.load(
        tmp_path / "x", {"model": {"a.weight": tiles, "*": rows}, "count": None}
    )
    assert state["step"] == 5
    assert int(state["count"]) == 7
    found = state["model"]
    assert set(found) == {"a.weight", "a.bias"}
    assert found["a.weight"].sharding == tiles
    assert found["a.bias"].sharding == rows
    assert found["a.bias"].dtype == jnp.bfloat16
    for shard in found["a.weight"].addressable_shards:
        assert np.array_equal(shard.data, weights["a.weight"].numpy()[shard.index])
    assert np.array_equal(
        np.asarray(found["a.bias"]).view(np.uint16), weights["a.bias"].view(torch.uint16).numpy()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_every_dtype(dtype: torch.dtype, mesh: Mesh, tmp_path: Path):
    tensor = torch.randn(8, 4).to(dtype) if dtype is not torch.bool else torch.randn(8, 4) > 0
    torch.save({"w": tensor}, tmp_path / "x.pt")
    found = holdfast.jax.load(tmp_path / "x.pt", NamedSharding(mesh, P("data", "model")))["w"]
    assert np.asarray(found).tobytes() == bytes(tensor.contiguous().view(torch.uint8).numpy())


SPECS = [
    P(),
    P("data"),
    P("model"),
    P(None, "data"),
    P("data", "model"),
    P("model", "data"),
    P(("data", "model")),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_each_byte_is_read_once(spec: P, mesh: Mesh, tmp_path: Path):
    torch.save({"w": torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64)}, tmp_path / "x.pt")
    with holdfast.open(tmp_path / "x.pt") as checkpoint:
        found = holdfast.jax.load(checkpoint, NamedSharding(mesh, spec))["w"]
        assert checkpoint.source.read_nbytes == 64 * 64 * 4
    assert np.array_equal(found, np.arange(64 * 64, dtype=np.float32).reshape(64, 64))


def test_a_process_reads_what_its_devices_want(tmp_path: Path):
    """Two processes with four of the eight devices each: each reads half, and neither can save what it has half of."""
    torch.save({"w": torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64)}, tmp_path / "x.pt")
    code = """
        import sys, jax, numpy as np, holdfast
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        rank, port, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 4)
        jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
        mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
        with holdfast.open(path) as checkpoint:
            made = holdfast.jax.load(checkpoint, NamedSharding(mesh, P("data", "model")))["w"]
            assert checkpoint.source.read_nbytes == 64 * 64 * 4 // 2, checkpoint.source.read_nbytes
        assert not made.is_fully_addressable and made.shape == (64, 64)
        for shard in made.addressable_shards:
            assert np.array_equal(shard.data, np.arange(64 * 64, dtype=np.float32).reshape(64, 64)[shard.index])
        try:
            holdfast.save({"w": made}, path + ".safetensors")
        except holdfast.errors.CannotHold as error:
            assert "process" in str(error.problems)
        else:
            raise AssertionError("a part was saved as the whole")
        print("well")
    """
    script = tmp_path / "rank.py"
    script.write_text("\n".join(line[8:] for line in code.splitlines()))
    port = str(_free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), port, tmp_path / "x.pt"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        said, _ = rank.communicate(timeout=100)
        assert rank.returncode == 0, said.decode()
        assert b"well" in said


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_tied_tensors_are_one_array(mesh: Mesh, tmp_path: Path):
    tied = torch.randn(8, 8)
    torch.save({"a": tied, "b": tied.detach(), "c": tied.T, "d": tied}, tmp_path / "x.pt")
    rows, columns = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "data"))
    with holdfast.open(tmp_path / "x.pt") as checkpoint:
        found = holdfast.jax.load(checkpoint, rows, drop="c")
        assert checkpoint.source.read_nbytes == 8 * 8 * 4
    assert found["a"] is found["b"]
    assert found["a"] is found["d"]
    apart = holdfast.jax.load(tmp_path / "x.pt", {"a": rows, "d": columns, "*": None})
    assert (apart["a"].sharding, apart["d"].sharding) == (rows, columns)
    assert np.array_equal(apart["c"], tied.T)


def test_one_state_dict_in_two_places(mesh: Mesh, tmp_path: Path):
    """Each place has its names, and its sharding."""
    weights = {"w": torch.randn(8, 4)}
    torch.save({"model": weights, "ema": weights}, tmp_path / "x.pt")
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    found = holdfast.jax.load(tmp_path / "x.pt", {"model": rows, "ema": whole})
    assert (found["model"]["w"].sharding, found["ema"]["w"].sharding) == (rows, whole)


def test_a_state_that_is_no_tree_is_refused(tmp_path: Path):
    state: object = [torch.ones(1)]
    for _ in range(40):
        state = [state, state]
    torch.save({"a": state}, tmp_path / "x.pt")
    with pytest.raises(LimitExceeded):
        holdfast.jax.load(tmp_path / "x.pt")


def test_many_tensors_are_read_a_batch_at_a_time(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from holdfast.integrations import jax as adapter

    state = {f"w{i}": np.full((8, 8), i, np.float32) for i in range(9)}
    holdfast.save(state, tmp_path / "x.safetensors")
    batches: list[int] = []

    def read(tensors: list[holdfast.LazyTensor]) -> list[np.ndarray]:
        batches.append(sum(tensor.nbytes for tensor in tensors))
        return holdfast.read(tensors)

    monkeypatch.setattr(adapter, "read", read)
    monkeypatch.setattr(adapter, "BATCH_NBYTES", 600)
    found = holdfast.jax.load(tmp_path / "x.safetensors", NamedSharding(mesh, P("data")))
    assert batches == [512, 512, 512, 512, 256]
    for name, value in state.items():
        assert np.array_equal(found[name], value)


def test_shardings_by_a_function_and_by_a_device(tmp_path: Path):
    holdfast.save(
        {"layer": {"w": np.ones((8, 4), np.float32), "b": np.ones(4, np.float32)}},
        tmp_path / "x",
        format="native",
    )
    seen = {}

    def choose(name: str, shape: tuple[int, ...]) -> object:
        seen[name] = shape
        return jax.devices()[len(shape)]

    found = holdfast.jax.load(tmp_path / "x", choose)["layer"]
    assert seen == {"layer.w": (8, 4), "layer.b": (4,)}
    assert (found["w"].device, found["b"].device) == (jax.devices()[2], jax.devices()[1])
    assert holdfast.jax.load(tmp_path / "x", jax.devices()[3])["layer"][
        "w"
    ].sharding == SingleDeviceSharding(jax.devices()[3])
    assert holdfast.jax.load(tmp_path / "x")["layer"]["w"].device == jax.devices()[0]
    with jax.default_device(jax.devices()[5]):
        assert holdfast.jax.load(tmp_path / "x")["layer"]["w"].device == jax.devices()[5]


Layer = namedtuple("Layer", "w b")


def test_shardings_as_a_tree(mesh: Mesh, tmp_path: Path):
    """Any tree that JAX knows; what stands above a branch holds for all of it."""
    holdfast.save(
        {"net": [{"w": np.ones((8, 4)), "b": np.ones(8)}] * 2, "s": np.ones(8)},
        tmp_path / "x",
        format="native",
    )
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    found = holdfast.jax.load(tmp_path / "x", {"net": [Layer(rows, whole), whole], "s": rows})
    assert [found["net"][0][name].sharding for name in "wb"] == [rows, whole]
    assert found["net"][1]["w"].sharding == whole
    assert found["s"].sharding == rows


def test_the_first_pattern_decides(mesh: Mesh, tmp_path: Path):
    holdfast.save(
        {"z.w": np.ones(8), "z.b": np.ones(8), "a": np.ones(8)}, tmp_path / "x.safetensors"
    )
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    found = holdfast.jax.load(tmp_path / "x.safetensors", {"z.*": rows, "*": whole, "z.b": whole})
    assert {name: array.sharding for name, array in found.items()} == {
        "z.w": rows,
        "z.b": whole,
        "a": whole,
    }
    with pytest.raises(DoesNotFit, match="no tensor for the sharding at z"):
        holdfast.jax.load(tmp_path / "x.safetensors", {"*": whole, "z": rows})


def test_what_does_not_fit_is_said_before_anything_is_read(mesh: Mesh, tmp_path: Path):
    holdfast.save(
        {"w": np.ones((8, 4), np.float32), "odd": np.ones(7, np.float32)},
        tmp_path / "x.safetensors",
    )
    rows, tiles = NamedSharding(mesh, P("data")), NamedSharding(mesh, P("data", "model"))
    with holdfast.open(tmp_path / "x.safetensors") as checkpoint:
        with pytest.raises(DoesNotFit, match=r"odd \[7\]") as caught:
            holdfast.jax.load(checkpoint, rows)
        assert set(caught.value.mismatched) == {"odd"}
        with pytest.raises(DoesNotFit, match="rank"):
            holdfast.jax.load(checkpoint, tiles)
        with pytest.raises(DoesNotFit, match="no sharding for odd") as caught:
            holdfast.jax.load(checkpoint, {"w": rows})
        assert caught.value.unexpected == ("odd",)
        with pytest.raises(DoesNotFit, match="no tensor for the sharding at v"):
            holdfast.jax.load(checkpoint, {"w": rows, "odd": None, "v": rows})
        with pytest.raises(BadArgumentType, match="at 'odd', not a"):
            holdfast.jax.load(checkpoint, {"w": rows, "odd": P()})
        with pytest.raises(BadArgumentType, match="device for '"):
            holdfast.jax.load(checkpoint, lambda name, shape: P())
        assert checkpoint.source.read_nbytes == 0


def test_a_dtype_by_patterns(mesh: Mesh, tmp_path: Path):
    values = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    holdfast.save(
        {"w": values, "norm": values, "n": np.arange(8, dtype=np.int32)}, tmp_path / "x.safetensors"
    )
    rows = NamedSharding(mesh, P("data"))
    found = holdfast.jax.load(
        tmp_path / "x.safetensors", rows, dtype={"norm*": "keep", "*": "bf16"}
    )
    assert {name: str(array.dtype) for name, array in found.items()} == {
        "w": "bfloat16",
        "norm": "float32",
        "n": "int32",
    }
    assert np.array_equal(found["w"], jnp.asarray(values).astype(jnp.bfloat16))
    with pytest.raises(BadArgument, match="jax_enable_x64"):
        holdfast.jax.load(tmp_path / "x.safetensors", dtype="float64")


def test_numbers_that_jax_would_cut_are_refused(tmp_path: Path):
    torch.save(
        {"steps": torch.tensor([1, 2**31 - 1]), "seed": torch.tensor(2**40)}, tmp_path / "x.pt"
    )
    torch.save({"w": torch.tensor([1 / 3, torch.inf], dtype=torch.float64)}, tmp_path / "y.pt")
    assert holdfast.jax.load(tmp_path / "x.pt", keep="steps")["steps"].tolist() == [1, 2**31 - 1]
    with pytest.raises(Unsupported, match="32 bits") as caught:
        holdfast.jax.load(tmp_path / "x.pt")
    assert caught.value.tensor == "seed"
    assert holdfast.jax.load(tmp_path / "y.pt", keep="w")["w"].tolist() == [
        np.float32(1 / 3),
        np.inf,
    ]
    torch.save({"huge": torch.tensor([1e300], dtype=torch.float64)}, tmp_path / "y.pt")
    with pytest.raises(Unsupported, match="32 bits"):
        holdfast.jax.load(tmp_path / "y.pt")
    with jax.enable_x64(True):
        assert int(holdfast.jax.load(tmp_path / "x.pt")["seed"]) == 2**40


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_jax_does_not_have_is_refused_by_name(tmp_path: Path):
    torch.save({"a": {"w": torch.eye(3).to_sparse()}, "b": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(Unsupported, match="sparse_coo"):
        holdfast.jax.load(tmp_path / "x.pt")
    assert list(holdfast.jax.load(tmp_path / "x.pt", drop="a.w")) == ["b"]
    torch.save({"w": torch.zeros(3, dtype=torch.complex32)}, tmp_path / "y.pt")
    with pytest.raises(Unsupported, match="complex32"):
        holdfast.jax.load(tmp_path / "y.pt")


def test_a_pickled_module_is_a_tree_of_what_it_holds(tmp_path: Path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2, affine=False))
    torch.save(model, tmp_path / "x.pt")
    found = holdfast.jax.load(tmp_path / "x.pt")
    assert {name: set(inner) for name, inner in found.items()} == {
        "0": {"weight", "bias"},
        "1": {"running_mean", "running_var", "num_batches_tracked"},
    }
    assert np.array_equal(found["0"]["weight"], model[0].weight.detach())


def test_damage_is_found(mesh: Mesh, tmp_path: Path):
    torch.save({"w": torch.ones(64, 64)}, tmp_path / "x.pt")
    flip_bit(tmp_path / "x.pt", 100, after=np.ones(64, np.float32).tobytes())
    for spec in (P(), P("data"), P("data", "model")):
        with pytest.raises(Corrupted):
            holdfast.jax.load(tmp_path / "x.pt", NamedSharding(mesh, spec))
    assert holdfast.jax.load(tmp_path / "x.pt", verify=False)["w"].shape == (64, 64)


@pytest.mark.parametrize("name", ["x", "x.safetensors", "x.pt"])
def test_arrays_of_jax_are_saved(name: str, mesh: Mesh, tmp_path: Path):
    rows = NamedSharding(mesh, P("data", "model"))
    params = {
        "dense": {
            "kernel": jax.device_put(jnp.arange(32, dtype=jnp.float32).reshape(8, 4), rows),
            "bias": jnp.ones(4, jnp.bfloat16),
        },
        "scale": jnp.ones((), jnp.float8_e4m3fn),
    }
    holdfast.save(params, tmp_path / name)
    found = holdfast.jax.load(
        tmp_path / name, lambda name, shape: rows if name == "dense.kernel" else None
    )
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        assert (ours.dtype, ours.sharding) == (theirs.dtype, theirs.sharding)
        assert np.array_equal(ours, theirs)


def test_a_key_of_jax_is_refused_by_name(tmp_path: Path):
    with pytest.raises(CannotHold) as caught:
        holdfast.save({"rng": {"key": jax.random.key(0)}}, tmp_path / "x.safetensors")
    assert "rng.key" in caught.value.problems[0]
    assert "key_data" in caught.value.problems[0]
    holdfast.save({"rng": jax.random.key_data(jax.random.key(0))}, tmp_path / "x.safetensors")


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.save(
        {"model": torch.nn.Linear(8, 16).state_dict(), "head.weight": torch.ones(8), "step": 5},
        "step-1000",
    )
    names = run_page("needs JAX")
    assert names["state"]["model"]["weight"].sharding == names["by_rows"]
    assert set(holdfast.open("converted")) == {"params.weight", "params.bias"}


def test_loading_many_expanded_views_has_one_allowance(tmp_path: Path) -> None:
    base = torch.ones(40)
    state = {f"t{at}": base[at : at + 1].expand(250_000) for at in range(40)}
    torch.save(state, tmp_path / "views.pt")
    with pytest.raises(LimitExceeded, match="40,000,000 bytes out of 160 stored"):
        holdfast.jax.load(tmp_path / "views.pt")
