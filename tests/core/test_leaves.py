"""The leaves of a state have the names that the walk through an opened tree gives them."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.leaves import find_leaves
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global, Opaque
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import name_tensors
from holdfast.engine.source import OpenSource
from holdfast.errors import CannotHold
from holdfast.rewrite.rows import lazy_tree
from holdfast.rewrite.state import tabulate_state
from holdfast.stores.memory import MemoryStore

SOURCE = OpenSource(MemoryStore({}))
KEYS = st.sampled_from(["a", "b", "a.b", "", "0"]) | st.integers(0, 2) | st.booleans() | st.none()


def tensor() -> LazyTensor:
    return LazyTensor.contiguous("t", DTYPES.rows[0], (), Storage("k", 0, 8, home=SOURCE.store), SOURCE)


def opaque(state: dict[object, object]) -> Opaque:
    return Opaque(Global("m", "C"), state={str(key): value for key, value in state.items()})


def containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    dicts = st.dictionaries(KEYS, inner, max_size=3)
    lists = st.lists(inner, max_size=3)
    shared = inner.map(lambda one: {"x": one, "y": [one]})
    return (
        dicts | lists | lists.map(tuple) | shared | dicts.map(OrderedDict) | dicts.map(lambda d: defaultdict(list, d))
        | dicts.map(opaque)
    )  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.recursive(st.builds(tensor) | st.none() | st.integers() | st.text(max_size=2), containers, max_leaves=12))
def test_names_are_those_of_the_walk_that_opens_files(tree):
    leaves = find_leaves(tree, [LazyTensor], lambda value, path: value, Limits().depth)
    assert leaves.problems == []
    named = name_tensors(tree, Limits(), 1 << 20)
    assert leaves.names == [*named.tensors]
    for name, value in zip(leaves.names, leaves.values, strict=True):
        at: object = tree
        for step in () if name == "tensor" and at is value else named.paths[name]:
            at = _below(at, step)
        assert at is value


def _below(value: object, step: object) -> object:
    if isinstance(value, Opaque):
        value = {key: inner for state in value.states() for key, inner in state.items()}
    if isinstance(value, dict):
        return next(inner for key, inner in value.items() if (key if type(key) in (str, int) else repr(key)) == step)
    return value[step]


def test_containers_of_other_classes_are_saved_as_usual_ones():
    class Own(dict):
        pass

    class Ordered(OrderedDict):
        pass

    w = np.arange(3)
    state = {"m": MappingProxyType({"x": w}), "d": Own(y=w), "o": Ordered(z=w), "f": defaultdict(list, v=[w]), "c": Counter("aab")}
    described = tabulate_state(state)
    assert described.tensors.names == ["m.x", "d.y", "o.z", "f.v.0"]
    made = lazy_tree(described)
    assert [type(made[key]) for key in made] == [dict, dict, OrderedDict, defaultdict, Counter]
    assert made["f"].default_factory is list


@pytest.mark.parametrize(("alone", "names"), [(torch.eye(3), ["tensor"]), (torch.eye(3).to_sparse(), ["indices", "values"])])
def test_a_tensor_alone_has_its_own_name(alone, names):
    assert tabulate_state(alone).tensors.names == names


def test_all_that_stands_in_the_way_is_said_at_once():
    loop: list[object] = [np.ones(1)]
    loop.append(loop)
    deep: object = [np.ones(1)]
    for _ in range(Limits().depth):
        deep = {"k": deep}
    with pytest.raises(CannotHold) as caught:
        tabulate_state({"loop": loop, "deep": deep})
    assert [*caught.value.problems] == ["loop.1: a list that contains itself", "deep.k.k.k…: nested deeper than Limits(depth=64)"]
