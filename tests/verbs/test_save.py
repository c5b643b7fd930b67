"""`holdfast.save`: what it takes, what it refuses, and what is at the target afterwards."""

from __future__ import annotations

import os
from collections import OrderedDict, defaultdict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import holdfast
from holdfast.core.quantities import parse_nbytes
from holdfast.errors import CannotHold, LimitExceeded, NotCommitted, Unsupported
from holdfast.verbs.shared.formats import LayoutOptions, resolve_format
from holdfast.verbs.shared.planned import Saved

TARGETS = ["a.pt", "a.safetensors", "a"]
"""One for each format."""


def nested() -> dict[str, object]:
    return {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "inner": {"half": np.ones(3, ml_dtypes.bfloat16)},
    }


@pytest.mark.parametrize("name", TARGETS)
def test_arrays_come_back(name, tmp_path):
    saved = holdfast.save(nested(), tmp_path / name)
    assert isinstance(saved, Saved)
    assert saved.nbytes == sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file())
    with holdfast.open(tmp_path / name) as ckpt:
        assert ckpt.format == saved.format
        assert ckpt["w"].numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
        assert ckpt["inner.half"].numpy().dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("name", TARGETS)
def test_a_checkpoint_is_streamed(name, tmp_path):
    holdfast.save(nested(), tmp_path / "first.pt")
    with holdfast.open(tmp_path / "first.pt") as ckpt:
        holdfast.save(ckpt, tmp_path / name)
        holdfast.save({"rows": ckpt["w"][1:], "turned": ckpt["w"].T}, tmp_path / f"part-{name}")
    with holdfast.open(tmp_path / f"part-{name}") as ckpt:
        assert ckpt["rows"].numpy().tolist() == [[3, 4, 5]]
        assert ckpt["turned"].numpy().tolist() == [[0, 3], [1, 4], [2, 5]]
    with holdfast.open(tmp_path / name) as ckpt, holdfast.open(tmp_path / "first.pt") as first:
        assert ckpt.digest() == first.digest()


def test_containers_keep_their_types_in_torch_and_native(tmp_path):
    state = {
        "t": (1, [2.5, None]),
        "o": OrderedDict(b=1, a=True),
        "d": defaultdict(list, k=[np.zeros(2)]),
        3: b"x",
        "s": {1, 2},
    }
    for name in ("a.pt", "a"):
        holdfast.save(state, tmp_path / name)
        with holdfast.open(tmp_path / name) as ckpt:
            tree = ckpt.tree
            assert isinstance(tree, dict)
            assert tree["t"] == (1, [2.5, None])
            assert type(tree["o"]) is OrderedDict
            assert list(tree["o"]) == ["b", "a"]
            assert isinstance(tree["d"], defaultdict)
            assert tree[3] == b"x"
            assert tree["s"] == {1, 2}


def test_what_safetensors_cannot_hold_is_listed_and_nothing_is_written(tmp_path):
    with pytest.raises(CannotHold) as caught:
        holdfast.save(
            {"w": np.zeros(2), "pair": (1, 2), "c": np.zeros(1, np.complex128), "n": None},
            tmp_path / "a.safetensors",
        )
    assert [p.partition(":")[0] for p in sorted(caught.value.problems)] == ["c", "n", "pair"]
    assert os.listdir(tmp_path) == []
    holdfast.save({"w": np.zeros(2), "pair": (1, 2)}, tmp_path / "a.safetensors", keep_tree=True)
    with holdfast.open(tmp_path / "a.safetensors") as ckpt:
        assert ckpt.tree["pair"] == (1, 2)


@pytest.mark.parametrize("name", TARGETS)
def test_an_object_is_refused_by_its_path(name, tmp_path):
    class Thing:
        pass

    with pytest.raises(CannotHold) as caught:
        holdfast.save({"a": [np.zeros(1), {"b": Thing()}]}, tmp_path / name, keep_tree=True)
    assert "a.1.b" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_state_that_contains_itself_is_refused(tmp_path):
    state: dict[str, object] = {"w": np.zeros(1)}
    state["self"] = state
    with pytest.raises(CannotHold, match="contains itself"):
        holdfast.save(state, tmp_path / "a.pt")


def test_a_state_with_2_to_the_20_paths_is_saved_at_the_cost_of_its_20_lists(tmp_path):
    value: object = 1.5
    for _ in range(20):
        value = [value, value]
    holdfast.save({"deep": value}, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").stat().st_size < 2000
    with holdfast.open(tmp_path / "a.pt") as ckpt:
        inner = ckpt.tree["deep"]
        assert inner[0] is inner[1]


def test_one_object_in_two_places_stays_one(tmp_path):
    weight, shared = torch.nn.Parameter(torch.ones(2)), {"x": 1}
    holdfast.save({"a": weight, "b": weight, "m": shared, "n": shared}, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert loaded["a"] is loaded["b"]
    assert loaded["m"] is loaded["n"]


def test_files_are_replaced_and_directories_are_not(tmp_path):
    for name in ("a.pt", "a.safetensors"):
        holdfast.save({"w": np.zeros(1)}, tmp_path / name)
        holdfast.save({"w": np.ones(1)}, tmp_path / name)
        with pytest.raises(NotCommitted, match="exists"):
            holdfast.save({"w": np.zeros(1)}, tmp_path / name, overwrite=False)
    holdfast.save({"w": np.zeros(1)}, tmp_path / "a")
    with pytest.raises(NotCommitted, match="exists"):
        holdfast.save({"w": np.ones(1)}, tmp_path / "a")
    holdfast.save({"w": np.ones(1)}, tmp_path / "a", overwrite=True)
    for name in TARGETS:
        with holdfast.open(tmp_path / name) as ckpt:
            assert ckpt["w"].numpy().tolist() == [1]
    assert sorted(os.listdir(tmp_path)) == ["a", "a.pt", "a.safetensors"]


def test_a_checkpoint_may_be_saved_over_itself(tmp_path):
    holdfast.save(nested(), tmp_path / "a.pt")
    with holdfast.open(tmp_path / "a.pt") as ckpt:
        holdfast.save({"w": ckpt["w"]}, tmp_path / "a.pt")
        assert ckpt["inner.half"].numpy().tolist() == [1, 1, 1]
    with holdfast.open(tmp_path / "a.pt") as ckpt:
        assert list(ckpt) == ["w"]


def test_shards(tmp_path):
    state = {f"w{i}": np.full(1000, i, np.float32) for i in range(10)}
    saved = holdfast.save(state, tmp_path / "model", format="safetensors", max_shard_size="10KB")
    assert saved.format == "safetensors-dir"
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 5
    with holdfast.open(tmp_path / "model") as ckpt:
        assert [ckpt[f"w{i}"].numpy()[0] for i in range(10)] == list(range(10))


def test_metadata_is_kept_and_torch_files_say_that_they_have_none(tmp_path):
    holdfast.save({"w": np.zeros(1)}, tmp_path / "a.safetensors", metadata={"licence": "mit"})
    with holdfast.open(tmp_path / "a.safetensors") as ckpt:
        assert ckpt.metadata["licence"] == "mit"
        holdfast.save(ckpt, tmp_path / "native")
        assert any("licence" in note for note in holdfast.save(ckpt, tmp_path / "a.pt").notes)
    with holdfast.open(tmp_path / "native") as ckpt:
        assert ckpt.metadata["licence"] == "mit"
        holdfast.save(ckpt, tmp_path / "b.safetensors")
    with holdfast.open(tmp_path / "b.safetensors") as ckpt:
        assert ckpt.metadata["licence"] == "mit"


def test_formats_by_suffix_and_by_name():
    assert resolve_format("m.PT", None, LayoutOptions()) == "torch-zip"
    assert resolve_format("m.safetensors", None, LayoutOptions()) == "safetensors"
    assert (
        resolve_format("m.safetensors", None, LayoutOptions(max_shard_size=1)) == "safetensors-dir"
    )
    assert resolve_format("step-1000", None, LayoutOptions()) == "native"
    assert resolve_format("step-0.5", None, LayoutOptions()) == "native"
    assert resolve_format("out.d/", None, LayoutOptions()) == "native"
    assert resolve_format("x", "torch", LayoutOptions()) == "torch-zip"
    for path, format in (("model.onnx", None), ("model.pt", "onnx")):
        with pytest.raises(Unsupported):
            resolve_format(path, format, LayoutOptions())


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1 XB", "nan", "inf", "1e400"])
def test_sizes_that_are_none(text):
    with pytest.raises(Unsupported):
        parse_nbytes(text)


def test_a_state_nested_too_deep_is_refused(tmp_path):
    value: object = 1
    for _ in range(100):
        value = [value]
    with pytest.raises((CannotHold, LimitExceeded), match="depth"):
        holdfast.save({"deep": value}, tmp_path / "a.pt")
    assert os.listdir(tmp_path) == []


def test_either_order_of_state_and_path(tmp_path):
    state = {"w": np.arange(3)}
    assert (
        holdfast.save(state, tmp_path / "a.pt").nbytes
        == holdfast.save(tmp_path / "b.pt", state).nbytes
    )
    with pytest.raises(holdfast.errors.BadPath):
        holdfast.save("hf://bucket/a.pt", state)
    with pytest.raises(holdfast.errors.NotAPath):
        holdfast.save(state, None)


def test_an_array_that_cannot_be_had_is_refused_by_name(tmp_path):
    """JAX's keys, and its arrays with parts on other machines, have `__array__` and raise in it."""

    class Elsewhere:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("it spans devices of other processes")

    with pytest.raises(CannotHold) as caught:
        holdfast.save({"a": {"w": Elsewhere()}, "b": np.ones(2)}, tmp_path / "x.safetensors")
    assert caught.value.problems == (
        "a.w: an Elsewhere gives no array: it spans devices of other processes",
    )
    assert not any(tmp_path.iterdir())


def test_bytes_do_not_depend_on_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "archive.safetensors").mkdir()
    (tmp_path / "archive").mkdir()
    monkeypatch.chdir(tmp_path)
    state = {"w": np.arange(4)}
    with holdfast.open(holdfast.to_bytes(state, "safetensors")) as ckpt:
        np.testing.assert_array_equal(ckpt["w"].numpy(), state["w"])


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ""])
def test_a_dimension_of_one_may_have_any_stride(tmp_path: Path, suffix: str):
    """numpy leaves it below zero where such an array was turned round; a file has none of those."""
    state = {
        "plain": np.ones((1,), np.bool_),
        "one": np.ones((1,), np.bool_)[::-1],
        "two": np.arange(6, dtype=np.int16).reshape(3, 1, 2)[:, ::-1],
        "empty": np.zeros((0, 2), np.float64)[:, ::-1],
        "turned": np.arange(3)[::-1],
    }
    for _ in range(2):
        holdfast.save(state, tmp_path / f"a{suffix}", overwrite=True)
        with holdfast.open(tmp_path / f"a{suffix}") as opened:
            assert {name: opened[name].numpy().tolist() for name in opened} == {
                name: one.tolist() for name, one in state.items()
            }
