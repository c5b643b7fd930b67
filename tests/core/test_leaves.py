"""The leaves of a state have the names that the walk through an opened tree gives them."""

from __future__ import annotations

import tracemalloc
from collections import Counter, OrderedDict, defaultdict
from types import MappingProxyType

import numpy as np
import pytest

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.leaves import find_leaves, name_tensors
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global, Opaque
from holdfast.core.tensor import LazyTensor
from holdfast.engine.source import OpenSource
from holdfast.errors import LimitExceeded
from holdfast.stores.memory import MemoryStore
from holdfast.verbs.shared.state import make_lazy_tree, tabulate_state

SOURCE = OpenSource(MemoryStore({}))


def tensor() -> LazyTensor:
    return LazyTensor.contiguous(
        "t", DTYPES.rows[0], (), Storage("k", 0, 8, home=SOURCE.store), SOURCE
    )


def opaque(state: dict[object, object]) -> Opaque:
    return Opaque(Global("m", "C"), state={str(key): value for key, value in state.items()})


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
    made = make_lazy_tree(described)
    assert [type(made[key]) for key in made] == [dict, dict, OrderedDict, defaultdict, Counter]
    assert made["f"].default_factory is list


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
