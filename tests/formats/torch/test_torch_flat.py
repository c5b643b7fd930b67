"""A `.pt` that is a plain dict of tensors is a flat checkpoint: verbs that take its columns let go of its lazy tensors."""

import gc
import weakref
from collections import OrderedDict

import pytest
import torch

import holdfast


def kept(tmp_path, state):
    path = tmp_path / "a.pt"
    torch.save(state, path)
    return holdfast.open(path)


def marked(**attributes):
    parameter = torch.nn.Parameter(torch.ones(2))
    vars(parameter).update(attributes)
    return parameter


@pytest.mark.parametrize("legacy", [False, True])
def test_a_plain_dict_of_tensors_is_flat(tmp_path, legacy):
    path, state = tmp_path / "a.pt", {"b": torch.ones(2), "a.c": torch.nn.Parameter(torch.zeros(3))}
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    with holdfast.open(path) as found:
        assert found.is_flat
        assert type(found.tree) is dict
        assert [*found.tree] == ["b", "a.c"]
        assert all(found.tree[name] is found[name] for name in found)


one = torch.ones(2)


@pytest.mark.parametrize(
    "state",
    [
        {"a": torch.ones(2), "b": {"c": torch.ones(2)}},
        {"a": torch.ones(2), "step": 3},
        {"a": one, "b": one},
        {1: torch.ones(2)},
        {"a": torch.ones(2).to_sparse()},
        {"a": marked(note="x")},
        OrderedDict(a=torch.ones(2)),
        [torch.ones(2)],
        torch.ones(2),
    ],
)
def test_what_is_more_than_that_keeps_its_tree(tmp_path, state):
    with kept(tmp_path, state) as found:
        assert not found.is_flat
        tree = found.tree
        found.drop_lazy_tensors()
        assert found.tree is tree


def test_a_flat_checkpoint_lets_go_of_its_tensors(tmp_path):
    found = kept(tmp_path, {f"layers.{at}.w": torch.full((4,), at) for at in range(10)})

    table = weakref.ref(found.stored)
    found.drop_lazy_tensors()
    gc.collect()
    assert table() is None
    assert {name: array.tolist() for name, array in found.read().items()} == {
        f"layers.{at}.w": [at] * 4 for at in range(10)
    }
    assert found.is_flat
    found.close()


def test_two_names_of_one_tensor_stay_one_when_converted(tmp_path):
    torch.save({"a": one, "b": one, "c": torch.ones(2)}, tmp_path / "a.pt")
    holdfast.convert(tmp_path / "a.pt", tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt")
    assert found["a"] is found["b"]
    assert found["c"] is not found["a"]
