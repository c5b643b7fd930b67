"""The leaves of a state have the names that the walk through an opened tree gives them."""

from __future__ import annotations

import tracemalloc
from collections import Counter, OrderedDict, defaultdict
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.leaves import find_leaves, name_tensors, tensor_paths
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global, Opaque
from holdfast.core.tensor import LazyTensor
from holdfast.engine.source import OpenSource
from holdfast.errors import CannotHold, LimitExceeded
from holdfast.saving.rows import lazy_tree
from holdfast.saving.state import tabulate_state
from holdfast.stores.memory import MemoryStore

SOURCE = OpenSource(MemoryStore({}))
KEYS = st.sampled_from(["a", "b", "a.b", "", "0"]) | st.integers(0, 2) | st.booleans() | st.none()


def tensor() -> LazyTensor:
    return LazyTensor.contiguous(
        "t", DTYPES.rows[0], (), Storage("k", 0, 8, home=SOURCE.store), SOURCE
    )


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


@settings(max_examples=examples(300), deadline=None)
@given(
    st.recursive(
        st.builds(tensor) | st.none() | st.integers() | st.text(max_size=2),
        containers,
        max_leaves=12,
    )
)
def test_names_are_those_of_the_walk_that_opens_files(tree):
    leaves = find_leaves(tree, [LazyTensor], lambda value, path: value, Limits().depth)
    assert leaves.problems == []
    assert leaves.names == [*name_tensors(tree, Limits(), 1 << 20).tensors]
    paths = tensor_paths(tree, Limits(), 1 << 20)
    for name, value in zip(leaves.names, leaves.values, strict=True):
        at: object = tree
        for step in () if name == "tensor" and at is value else paths[name]:
            at = _below(at, step)
        assert at is value


def _below(value: object, step: object) -> object:
    if isinstance(value, Opaque):
        value = {key: inner for state in value.states() for key, inner in state.items()}
    if isinstance(value, dict):
        return next(
            inner
            for key, inner in value.items()
            if (key if type(key) in (str, int) else repr(key)) == step
        )
    return value[step]


def test_containers_of_other_classes_are_saved_as_usual_ones():
    class Own(dict):
        pass

    class Ordered(OrderedDict):
        pass

    w = np.arange(3)
    state = {
        "m": MappingProxyType({"x": w}),
        "d": Own(y=w),
        "o": Ordered(z=w),
        "f": defaultdict(list, v=[w]),
        "c": Counter("aab"),
    }
    described = tabulate_state(state)
    assert described.tensors.names == ["m.x", "d.y", "o.z", "f.v.0"]
    made = lazy_tree(described)
    assert [type(made[key]) for key in made] == [dict, dict, OrderedDict, defaultdict, Counter]
    assert made["f"].default_factory is list


@pytest.mark.parametrize(
    ("alone", "names"),
    [(torch.eye(3), ["tensor"]), (torch.eye(3).to_sparse(), ["indices", "values"])],
)
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
    assert [*caught.value.problems] == [
        "loop.1: a list that contains itself",
        "deep.k.k.k…: nested deeper than Limits(depth=64)",
    ]


def test_objects_are_paid_for_where_they_are_met_again():
    """A hundred and fifty objects with a thousand attributes each, of which none stands in two places."""
    things = [
        opaque({"w": tensor(), **dict.fromkeys(map(str, range(1000)), 0)}) for _ in range(150)
    ]
    expected = [f"{number}.w" for number in range(150)]
    assert (
        find_leaves(things, [LazyTensor], lambda value, path: value, Limits().depth).names
        == expected
    )
    assert [*name_tensors(things, Limits(), 0).tensors] == expected


def test_a_container_that_is_met_too_often_is_left_out_as_a_whole():
    shared = {str(at): tensor() for at in range(4000)}
    named = name_tensors([shared] * 4, Limits(), 0)
    assert len(named.tensors) == 3 * 4000
    assert named.notes == [
        "1 further references to shared containers were not listed by name; they are in the tree"
    ]


def _names(tree: object, depth: int, *, opened: bool) -> list[str]:
    if opened:
        return [*name_tensors(tree, Limits(depth=depth), 0).tensors]
    return find_leaves(tree, [LazyTensor], lambda value, path: value, depth).names


def _peak(tree: object, depth: int, *, opened: bool) -> tuple[list[str], int]:
    """The names of a tree, or none where they are refused, and the bytes that it takes to find them."""
    tracemalloc.start()
    try:
        names = _names(tree, depth, opened=opened)
    except LimitExceeded:
        names = []
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return names, peak


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("beside", [{}, {"step": 3}, {"inner": {"w": tensor()}}, {"inner": [3]}])
def test_names_that_repeat_one_long_key_are_not_made(opened, beside):
    tree = {"k" * 100_000: {**{str(at): tensor() for at in range(2_000)}, **beside}}
    names, peak = _peak(tree, 64, opened=opened)
    assert names == []
    assert peak < 8 << 20


@pytest.mark.parametrize("opened", [True, False])
def test_what_a_name_begins_with_is_joined_where_a_tensor_is(opened):
    """A thousand levels with a key of two thousand characters: joined at each of them, they would take a gigabyte."""
    tree: object = {"w": tensor(), "v": {"x": tensor()}}
    for _ in range(1_000):
        tree = {"k" * 2_000: tree}
    names, peak = _peak(tree, 2_000, opened=opened)
    assert names == [".".join(["k" * 2_000] * 1_000 + rest) for rest in (["w"], ["v", "x"])]
    assert peak < 24 << 20
