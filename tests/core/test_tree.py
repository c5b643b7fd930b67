"""From a nested state to names: order, repeats, clashes, cycles and depth."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict

import pytest

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.leaves import find_leaves, find_tensor_paths, name_tensors
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global, Opaque
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import copy_dict_with_items, replace_children
from holdfast.engine.source import OpenSource
from holdfast.errors import LimitExceeded
from holdfast.stores.memory import MemoryStore

SOURCE = OpenSource(MemoryStore({"f": bytes(64)}))


def tensor() -> LazyTensor:
    return LazyTensor.contiguous(
        "", DTYPES.name("uint8"), (4,), Storage("f", 0, 4, home=SOURCE.store), SOURCE
    )


def names(tree: object, **limits: int) -> list[str]:
    return list(name_tensors(tree, Limits(**limits), 1000).tensors)


def test_paths_are_joined_by_dots_in_reading_order():
    tree = {
        "b": tensor(),
        "a": [tensor(), (tensor(), {"x": tensor()})],
        3: OrderedDict(y=tensor()),
        "none": None,
    }
    assert names(tree) == ["b", "a.0", "a.1.0", "a.1.1.x", "3.y"]
    assert find_tensor_paths(tree, Limits(), 100)["a.1.1.x"] == ("a", 1, 1, "x")


def test_two_paths_with_one_name_are_kept_apart_and_noted():
    named = name_tensors(
        {"a.b": tensor(), "a": {"b": tensor()}, 1: tensor(), "1": tensor()}, Limits(), 100
    )
    assert list(named.tensors) == ["a.b", "a.b#2", "1", "1#2"]
    assert len(named.notes) == 2


def test_strange_keys_have_bounded_names():
    tree = {
        None: tensor(),
        2.5: tensor(),
        (1, "a"): tensor(),
        b"x" * 1000: tensor(),
        True: tensor(),
        frozenset(): tensor(),
    }
    found = names(tree)
    assert found[:3] == ["None", "2.5", "(1, 'a')"]
    assert all(len(name) <= 64 for name in found)
    assert len(found) == 6


def test_a_bomb_of_shared_containers_is_cut_off_and_noted():
    level: object = [tensor()]
    for _ in range(40):
        level = [level] * 8
    named = name_tensors(level, Limits(), 1000)
    assert len(named.tensors) < 20_000
    assert "not listed" in named.notes[-1]


def module(**state: object) -> Opaque:
    whole = {"training": True, "_parameters": {}, "_buffers": {}, "_modules": {}, **state}
    return Opaque(Global("somewhere", "Net"), state=whole)


def test_a_module_is_walked_as_its_state_dict():
    inner = module(
        _parameters={"weight": tensor(), "bias": None},
        _buffers={"mean": tensor(), "cache": tensor()},
    )
    inner.state["_non_persistent_buffers_set"] = {"cache"}
    outer = module(
        _modules={"first": inner, "none": None}, _parameters={"scale": tensor()}, attribute=tensor()
    )
    named = name_tensors({"net": outer}, Limits(), 100)
    assert list(named.tensors) == ["net.scale", "net.first.weight", "net.first.mean"]


def test_an_opaque_shows_itself_in_bounded_space():
    hostile = Opaque(
        Global("m", "C"), ("x" * 10**6,), state={"k" * 3: 1, "b": 2, "c": 3, "d": 4, "e": 5}
    )
    hostile.items.append(hostile)
    assert repr(hostile) == "<Opaque m.C (1 args; state: kkk, b, c, d, …; 1 items)>"


def test_what_is_rebuilt_keeps_its_kind() -> None:
    ordered: OrderedDict[object, object] = OrderedDict(w=1, b=2)
    ordered.extra = "kept"  # type: ignore[attr-defined]  # as torch does to a state dict
    made = replace_children(ordered, [1, 3])
    assert type(made) is OrderedDict
    assert list(made.items()) == [("w", 1), ("b", 3)]
    assert vars(made) == {"extra": "kept"}
    default: defaultdict[object, object] = defaultdict(list, a=1)
    again = copy_dict_with_items(default, {"b": 2})
    assert isinstance(again, defaultdict)
    assert again == {"b": 2}
    assert again.default_factory is list
    counts: Counter[object] = Counter("aab")
    assert replace_children(counts, [5, 6]) == Counter(a=5, b=6)
    assert counts == Counter("aab")


def test_what_is_rebuilt_of_the_same_children_is_the_same() -> None:
    for container in ({"a": 1}, [1, 2], (1, 2)):
        children = list(container.values()) if isinstance(container, dict) else list(container)
        assert replace_children(container, children) is container


def in_memory(tree: object) -> list[str]:
    return find_leaves(tree, [LazyTensor], lambda value, path: value, Limits().depth).names


def test_names_of_a_state_in_memory_may_take_what_its_keys_take():
    """Six million characters of names that are all there as keys are no reason to refuse a state."""
    one = tensor()
    tree: dict[object, object] = {f"{i:0>60}": one for i in range(120_000)}
    assert len("".join(in_memory(tree))) == 60 * 120_000
    with pytest.raises(LimitExceeded):
        name_tensors(tree, Limits(), 100_000)
