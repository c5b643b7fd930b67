"""What is no tensor: it passes through both formats that hold it, becomes torch's own again, and is collected from all ranks."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import holdfast
from holdfast.core.limits import Limits
from holdfast.errors import CannotHold, DoesNotFit, NotCommitted
from holdfast.formats.dcp import read as dcp_values
from holdfast.ranks.merge import flat_tree, merge_trees
from holdfast.torch.ranks.load_sharded import load_full, load_sharded
from holdfast.torch.ranks.save_sharded import save_sharded
from tests.ranks.pool import Pool, World, good
from tests.support import ALONE

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

VALUES = {
    "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]),
    "device": torch.device("cpu"),
    "complex": 1 + 2j,
    "raw": b"\x00\xff",
    "members": {1, "two"},
    "pair": (1, [2.5, None]),
    "deep": {"er": [{"x": 1}, {"x": "γ"}], "empty": {}, "list": []},
}


def blank(value: object) -> object:
    return (
        {key: blank(inner) for key, inner in value.items()}
        if isinstance(value, dict) and value
        else None
    )


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_values_come_back_as_torch_knows_them(tmp_path: Path, format: str):
    save_sharded(tmp_path / "step", {"w": torch.ones(2), **VALUES}, format=format)
    state = {"w": torch.zeros(2), **blank(VALUES)}
    loaded = load_sharded(tmp_path / "step", state)
    assert state.pop("w").tolist() == [1, 1]
    assert state == VALUES
    assert [type(state[name]) for name in VALUES] == [type(value) for value in VALUES.values()]
    assert loaded.values["size"] == torch.Size([2, 3])
    whole = load_full(tmp_path / "step")
    del whole["w"]
    assert whole == VALUES


@pytest.mark.parametrize("text", [np.str_("a\0"), np.bytes_(b"a\0")])
@pytest.mark.parametrize(
    "wrap",
    [lambda text: text, lambda text: [text], lambda text: {"k": (1, text)}, lambda text: {text}],
)
def test_text_of_numpy_that_a_pickle_would_cut_is_refused(
    tmp_path: Path, text: np.str_ | np.bytes_, wrap: Callable[[object], object]
):
    """numpy writes it whole and cuts it off when it reads it."""
    state = {"w": torch.ones(2), "values": [wrap(text)]}
    with pytest.raises(CannotHold, match="end in NUL"):
        save_sharded(tmp_path / "dcp", state, format="dcp")
    save_sharded(tmp_path / "dcp", {"w": torch.ones(2), "values": [wrap(text[:-1])]}, format="dcp")
    save_sharded(tmp_path / "native", state)


def rng_state(seed: int) -> dict[str, object]:
    """What programs keep of their generators."""
    numbers = np.random.RandomState(seed)
    numbers.rand(seed)
    return {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "python": random.Random(seed).getstate(),
        "numpy": numbers.get_state(),
        "generator": np.random.default_rng(seed).bit_generator.state,
        "twister": np.random.Generator(np.random.MT19937(seed)).bit_generator.state,
    }


def same(one: object, other: object) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return type(other) is tuple and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray | torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and bool((one == other).all())
    return one == other


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_the_state_of_random_generators(tmp_path: Path, format: str):
    save_sharded(tmp_path / "step", {"rng": rng_state(1)}, format=format)
    state = {"rng": rng_state(2)}
    load_sharded(tmp_path / "step", state)
    assert same(state["rng"], rng_state(1))
    np.random.RandomState().set_state(state["rng"]["numpy"])
    np.random.RandomState().set_state(load_full(tmp_path / "step")["rng"]["numpy"])


def test_torch_and_holdfast_exchange_the_state_of_random_generators(tmp_path: Path):
    save_sharded(tmp_path / "ours", {"rng": {"numpy": rng_state(1)["numpy"]}}, format="dcp")
    state = {"rng": {"numpy": rng_state(2)["numpy"]}}
    dcp.load(state, checkpoint_id=tmp_path / "ours")
    assert same(state["rng"]["numpy"], rng_state(1)["numpy"])
    dcp.save({"rng": rng_state(3)}, checkpoint_id=tmp_path / "torch's")
    state = {"rng": rng_state(2)}
    load_sharded(tmp_path / "torch's", state)
    assert same(state["rng"], rng_state(3))


def test_a_name_with_half_of_a_surrogate_pair_is_loaded(tmp_path: Path):
    torch.save({"w\ud800": torch.ones(2), "b": torch.ones(3)}, tmp_path / "a.pt")
    state = {"w\ud800": torch.zeros(2), "b": torch.zeros(3)}
    load_sharded(tmp_path / "a.pt", state)
    assert state["w\ud800"].tolist() == [1.0, 1.0]


def load_half(world: World, path: str) -> list[float]:
    state = {"w\ud800": torch.zeros(2), "b": torch.zeros(3)}
    load_sharded(path, state, group=world.group, replicated="broadcast")
    return state["w\ud800"].tolist()


def test_ranks_load_a_name_with_half_of_a_surrogate_pair(pool: Pool, tmp_path: Path):
    torch.save({"w\ud800": torch.ones(2), "b": torch.ones(3)}, tmp_path / "a.pt")
    assert good(pool.run(2, load_half, str(tmp_path / "a.pt"))) == [[1.0, 1.0]] * 2


def test_arrays_are_filled_in_place(tmp_path: Path):
    brain = np.arange(4).astype(ml_dtypes.bfloat16)
    save_sharded(
        tmp_path / "step",
        {"table": np.arange(6.0).reshape(2, 3), "brain": brain, "none": np.zeros((0, 2))},
    )
    table = np.zeros((2, 3), order="F")
    state = {"table": table, "brain": np.zeros_like(brain), "none": np.ones((0, 2))}
    load_sharded(tmp_path / "step", state)
    assert state["table"] is table
    assert np.array_equal(table, np.arange(6.0).reshape(2, 3))
    assert np.array_equal(state["brain"], brain)
    with pytest.raises(DoesNotFit, match=r"'table'.* float32 here, float64 in the checkpoint"):
        load_sharded(tmp_path / "step", {**state, "table": np.zeros((2, 3), np.float32)})


def test_values_beside_tensors_in_a_tuple_are_loaded(tmp_path: Path):
    save_sharded(tmp_path / "step", {"pair": (torch.ones(2), 5, [(torch.ones(1), "x")])})
    first = torch.zeros(2)
    state = {"pair": (first, 0, [(torch.zeros(1), "")])}
    load_sharded(tmp_path / "step", state)
    assert state["pair"][0] is first
    assert first.tolist() == [1, 1]
    assert state["pair"][1] == 5
    assert state["pair"][2][0][1] == "x"


def test_torch_reads_them_as_well(tmp_path: Path):
    save_sharded(tmp_path / "step", {"w": torch.ones(2), **VALUES}, format="dcp")
    state = {"w": torch.zeros(2), **VALUES, "size": None, "pair": None, "members": None}
    dcp.load(state, checkpoint_id=tmp_path / "step")
    assert state.pop("w").tolist() == [1, 1]
    assert state == VALUES


class Counting(nn.Module):
    """Has state that is no tensor, and makes it anew whenever it is asked."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(2, 2), count

    def get_extra_state(self) -> object:
        return {"count": self.count, "list": [self.count]}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_extra_state_of_modules(tmp_path: Path, format: str):
    saved, filled = nn.Sequential(Counting(3)), nn.Sequential(Counting(5))
    save_sharded(tmp_path / "step", saved, format=format)
    load_sharded(tmp_path / "step", filled)
    assert filled[0].count == 3
    assert torch.equal(filled[0].linear.weight, saved[0].linear.weight)
    assert filled[0].linear.weight.requires_grad


def test_values_that_were_too_many_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_sharded(tmp_path / "step", {"w": torch.ones(2), **VALUES}, format="dcp")
    monkeypatch.setattr(dcp_values, "EAGER_ITEMS", 0)
    state = {"w": torch.zeros(2), **blank(VALUES)}
    load_sharded(tmp_path / "step", state)
    del state["w"]
    assert state == VALUES


def test_objects_that_are_not_built(tmp_path: Path):
    dcp.save(
        {"w": torch.ones(2), "path": tmp_path, "kind": Limits, "one": (1, [Limits()])},
        checkpoint_id=tmp_path / "step",
    )
    state = {"w": torch.zeros(2), "kind": None, "one": None}
    with pytest.raises(DoesNotFit) as caught:
        load_sharded(tmp_path / "step", state)
    for name in ("kind", "one"):
        assert f"{name!r}: an object that Holdfast does not build" in str(caught.value)
    assert state["w"].tolist() == [0, 0]
    del state["kind"], state["one"]
    load_sharded(tmp_path / "step", state)
    assert state["w"].tolist() == [1, 1]


def test_gradients_are_remembered(tmp_path: Path):
    import holdfast

    for format in ("native", "dcp"):
        save_sharded(
            tmp_path / format,
            {"w": torch.ones(2, requires_grad=True), "v": torch.ones(2)},
            format=format,
        )
        with holdfast.open(tmp_path / format) as ckpt:
            assert (ckpt["w"].traits.requires_grad, ckpt["v"].traits.requires_grad) == (True, False)


@pytest.mark.parametrize("format", ["native", "dcp", "safetensors"])
def test_much_is_written_to_several_files_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
):
    monkeypatch.setattr("holdfast.torch.ranks.saving.FILE_NBYTES", 4000)
    state = {f"w{i}": torch.full((100 * (i + 1),), float(i)) for i in range(9)} | {
        "empty": torch.zeros(0)
    }
    saved = save_sharded(tmp_path / "step", state, format=format, threads=16)
    assert len(saved.files) == 4
    sizes = [nbytes for _, nbytes in saved.files]
    assert sizes == [(tmp_path / "step" / name).stat().st_size for name, _ in saved.files]
    assert (saved.path, saved.format, saved.nbytes) == (str(tmp_path / "step"), format, sum(sizes))
    assert max(sizes) < 0.5 * sum(sizes)
    blank = {name: torch.full_like(tensor, -1) for name, tensor in state.items()}
    load_sharded(tmp_path / "step", blank)
    assert all(torch.equal(blank[name], tensor) for name, tensor in state.items())
    assert holdfast.verify(tmp_path / "step").ok
    if format == "dcp":
        again = {name: torch.full_like(tensor, -1) for name, tensor in state.items()}
        dcp.load(again, checkpoint_id=tmp_path / "step", **ALONE)
        assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("path", ["runs/7/step", "runs/7/step/"])
def test_the_folders_that_lead_to_it_are_made(tmp_path: Path, path: str):
    """As torch's own distributed checkpoint does it."""
    save_sharded(f"{tmp_path}/{path}", {"w": torch.ones(3)})
    with holdfast.open(tmp_path / "runs" / "7" / "step") as ckpt:
        assert ckpt["w"].numpy().tolist() == [1, 1, 1]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotCommitted, match="inside"):
        save_sharded(tmp_path / "file" / "inside" / "step", {"w": torch.ones(3)})


# One tree from those of all ranks.


def merged(*trees: object) -> tuple[object, dict[str, list[int]]]:
    found = merge_trees([msgspec.json.encode(tree) for tree in trees])
    return found.tree, found.differ


def test_trees_are_put_together():
    assert merged({"a": 1}, {"a": 1}, {"b": 2}) == ({"a": 1, "b": 2}, {})
    assert merged({"a": {"x": 1}}, {"a": {"y": [1]}}) == ({"a": {"x": 1, "y": [1]}}, {})
    assert merged({"l": [{"x": 1}, 2]}, {"l": [{"y": 1}, 2]}) == ({"l": [{"x": 1, "y": 1}, 2]}, {})
    numbers = {"$": "dict", "items": [[1, "one"]]}
    assert merged({}, numbers) == (numbers, {})
    assert merged(numbers, {"a": 2}) == ({"$": "dict", "items": [[1, "one"], ["a", 2]]}, {})
    ordered = [
        {"$": "ordered_dict", "entries": {key: 1}, "metadata": {key: {"version": 1}}}
        for key in "ab"
    ]
    both = {
        "$": "ordered_dict",
        "entries": {"a": 1, "b": 1},
        "metadata": {"a": {"version": 1}, "b": {"version": 1}},
    }
    assert merged(*ordered) == (both, {})


def test_trees_that_differ():
    assert merged({"a": 1}, {"a": 2}, {"a": 1}, {"a": 2}) == ({"a": 1}, {"a": [1, 3]})
    assert merged({"a": 1}, {"a": True})[1] == {"a": [1]}, "equal in Python, and not the same"
    assert merged({"a": [1]}, {"a": [1, 2]})[1] == {"a": [1]}
    assert merged({"a": {"b": 1}}, {"a": [1]})[1] == {"a": [1]}
    assert merged({"$": "ordered_dict", "entries": {}}, {})[1] == {"": [1]}
    said = merge_trees([b'{"a":{"b":1}}', b'{"a":{"b":2}}', b'{"a":{"b":2}}']).problems()
    take = "pass values='first' to take that, or per_rank=['a.b'] to keep one for each rank"
    assert said == [f"a.b: ranks 1 and 2 have another value than the first rank; {take}"]


def test_tensors_without_a_place():
    tree = msgspec.json.encode(flat_tree(["a", "b"]))
    assert merge_trees([tree]).lost(["a", "b", "c"]) == ["c"]
    assert flat_tree(["$a"]) == {"$": "dict", "entries": {"$a": {"$": "tensor", "name": "$a"}}}


def test_an_ordered_dict_stays_one(tmp_path: Path):
    state = OrderedDict(b=torch.ones(1), a=2)
    save_sharded(tmp_path / "step", state)
    whole = load_full(tmp_path / "step")
    assert type(whole) is OrderedDict
    assert list(whole) == ["b", "a"]


def tied_here_alone(world: World, path: str) -> tuple[str, ...]:
    weight = torch.arange(6.0)
    return save_sharded(
        path, {"a": weight, "b": weight if world.rank else weight.clone()}, group=world.group
    ).notes


def test_a_tie_on_some_ranks_only_is_told(pool: Pool, tmp_path: Path):
    for notes in good(pool.run(2, tied_here_alone, str(tmp_path / "step"))):
        assert notes == (
            "'b' and 'a' share memory on rank 1 but not on rank 0, so both are stored",
        )
