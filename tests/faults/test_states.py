"""Odd states: names that collide or are forbidden, tensors of nothing and of NaN, and a great many of them."""

from __future__ import annotations

import os

import numpy as np
import pytest
import safetensors.torch
import torch

import holdfast
from holdfast.errors import CannotHold

NAMES = ["a.pt", "a.safetensors", "a"]


@pytest.mark.parametrize("name", NAMES)
def test_one_dotted_name_for_two_tensors(name, tmp_path):
    state = {"a.b": np.zeros(1), "a": {"b": np.ones(1)}}
    holdfast.save(state, tmp_path / name)
    with holdfast.open(tmp_path / name) as ckpt:
        tree = ckpt.tree
        assert isinstance(tree, dict)
        assert (tree["a.b"].numpy()[0], tree["a"]["b"].numpy()[0]) == (0, 1)
        assert len(ckpt) == 2


@pytest.mark.parametrize("name", NAMES)
def test_renames_that_collide(name, tmp_path):
    holdfast.save({"a": np.zeros(1), "b": np.ones(1)}, tmp_path / "source.pt")
    with pytest.raises(CannotHold, match="the name 'b'"):
        holdfast.convert(tmp_path / "source.pt", tmp_path / name, rename=[("a", "b")])
    assert os.listdir(tmp_path) == ["source.pt"]


@pytest.mark.parametrize("name", ["a.safetensors", "a"])
@pytest.mark.parametrize("key", ["__metadata__", "\ud800"])
def test_names_that_a_format_forbids(key, name, tmp_path):
    with pytest.raises(CannotHold) as caught:
        holdfast.save({key: np.zeros(1), "fine": np.zeros(1)}, tmp_path / name)
    assert len(caught.value.problems) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", NAMES)
def test_odd_names_that_are_allowed(name, tmp_path):
    keys = [
        "",
        ".",
        "..",
        "/",
        "a/b",
        "\0",
        "\n",
        "ü\U0001f600",
        "x" * 1000,
        " ",
        '"',
        "\\",
        "#2",
        "tensor",
    ]
    holdfast.save({key: np.full(1, i) for i, key in enumerate(keys)}, tmp_path / name)
    with holdfast.open(tmp_path / name) as ckpt:
        assert [ckpt[key].numpy()[0] for key in keys] == list(range(len(keys)))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_nan(name, tmp_path):
    bits = np.array([0x7FC00000, 0xFFC00001, 0x7F800001, 0x7FFFFFFF], np.uint32)
    holdfast.save({"n": bits.view(np.float32), "d": np.full(3, np.nan)}, tmp_path / name)
    with holdfast.open(tmp_path / name) as ckpt:
        assert ckpt["n"].numpy().view(np.uint32).tolist() == bits.tolist()
    assert holdfast.diff(tmp_path / name, tmp_path / name, exact=True).equal


@pytest.mark.parametrize("name", NAMES)
def test_nothing_and_points(name, tmp_path):
    shapes = [(), (0,), (0, 3), (3, 0, 2), (1, 1, 1)]
    state = {str(i): torch.ones(shape) for i, shape in enumerate(shapes)}
    holdfast.save(state, tmp_path / name)
    with holdfast.open(tmp_path / name) as ckpt:
        assert [t.shape for t in ckpt.values()] == shapes
        assert ckpt["0"].numpy() == 1
    if name == "a.pt":
        assert [
            tuple(t.shape) for t in torch.load(tmp_path / name, weights_only=True).values()
        ] == shapes
    if name == "a.safetensors":
        assert sorted(
            tuple(t.shape) for t in safetensors.torch.load_file(tmp_path / name).values()
        ) == sorted(shapes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "state",
    [{}, {"only": {}}, {"zero": np.empty((0,))}],
    ids=["nothing", "no tensor", "no element"],
)
def test_an_empty_state(state, name, tmp_path):
    holdfast.save(state, tmp_path / name, keep_tree=True)
    with holdfast.open(tmp_path / name) as ckpt:
        assert list(ckpt.tree) == list(state)
    holdfast.convert(tmp_path / name, tmp_path / "again.pt")
    assert list(torch.load(tmp_path / "again.pt", weights_only=True)) == list(state)


@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_thousand_tensors(name, tmp_path):
    memory = np.arange(100_000, dtype=np.float32)
    # Each in memory of its own: views of one array would be views of one storage.
    holdfast.save(
        {f"layer.{i}.weight": memory[i : i + 1].copy() for i in range(len(memory))},
        tmp_path / name,
        durable=False,
    )
    with holdfast.open(tmp_path / name) as ckpt:
        assert len(ckpt) == len(memory)
        assert ckpt["layer.99999.weight"].numpy().tolist() == [99_999]


def test_more_characters_of_names_than_tensors_have_bytes(tmp_path):
    """What a mixture of experts has: saved by rows, converted by objects, and opened again under the same names."""
    state = {f"{number:0500}": np.full(1, number, np.int32) for number in range(12_000)}
    holdfast.save(state, tmp_path / "a.pt")
    holdfast.save({"experts": state}, tmp_path / "nested.pt")
    holdfast.convert(tmp_path / "nested.pt", tmp_path / "a.safetensors")
    holdfast.convert(tmp_path / "a.pt", tmp_path / "native")
    for name, prefix in {
        "a.pt": "",
        "nested.pt": "experts.",
        "a.safetensors": "experts.",
        "native": "",
    }.items():
        with holdfast.open(tmp_path / name) as ckpt:
            assert list(ckpt) == [prefix + key for key in state]
            assert ckpt[f"{prefix}{11_999:0500}"].numpy() == 11_999
