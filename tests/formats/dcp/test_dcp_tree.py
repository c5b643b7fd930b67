"""Names and paths back to a nested state."""

from __future__ import annotations

import time

import pytest

from holdfast.core.limits import Limits
from holdfast.errors import MetadataError
from holdfast.formats.dcp.read import grow


def nested(*paths: tuple[str | int, ...], limits: Limits | None = None) -> object:
    names = {".".join(map(str, path)): path for path in paths}
    return grow({name: name for name in names}, names, limits or Limits())


def test_positions_in_any_order():
    assert nested(("a", 2), ("a", 0), ("a", 1)).tree == {"a": ["a.0", "a.1", "a.2"]}


def test_holes_are_none():
    grown = nested(("a", 0), ("a", 2))
    assert grown.tree == {"a": ["a.0", None, "a.2"]}
    assert grown.holes == 1


def test_far_positions_are_no_list():
    assert nested(("a", 900)).tree == {"a": {900: "a.900"}}


def test_positions_beside_keys_are_no_list():
    assert nested(("a", 0), ("a", "x")).tree == {"a": {0: "a.0", "x": "a.x"}}


def test_keys_with_dots():
    assert nested(("model", "layer.0.weight"), ("model", "layer.1.weight")).tree == {
        "model": {
            "layer.0.weight": "model.layer.0.weight",
            "layer.1.weight": "model.layer.1.weight",
        }
    }


def test_dicts_that_are_values_are_left_alone():
    leaf = {"x": {0: 1}}
    assert grow({"a": leaf}, {"a": ("a",)}, Limits()).tree["a"] is leaf


@pytest.mark.parametrize(
    "path",
    [None, "a", ["a"], (), (True,), (-1,), (1 << 40,), ("b",), ("a",) * 100, (("a",),), (b"a",)],
)
def test_no_path(path):
    grown = grow({"a": 1}, {"a": path}, Limits())
    assert grown.tree == {"a": 1}
    assert grown.flat == ["a"]


def test_two_values_of_one_name():
    # The path of `b` is none, so it would stand at the top, where the path of `b.c` has put a mapping of that name.
    with pytest.raises(MetadataError) as caught:
        grow({"b.c": 1, "b": 2}, {"b.c": ("b", "c"), "b": ()}, Limits())
    assert caught.value.tensor == "b"


def test_the_depth_is_limited():
    assert nested(("a",) * 64).flat == []
    assert len(nested(("a",) * 65).flat) == 1


def test_long_texts_in_every_path_are_not_joined():
    long = "x" * 1_000_000
    names = [f"n{i}" for i in range(20_000)]
    before = time.process_time()
    grown = grow(dict.fromkeys(names), dict.fromkeys(names, (long,) * 60), Limits())
    assert len(grown.flat) == len(names)
    assert time.process_time() - before < 5


def test_positions_do_not_multiply():
    """Each of many branches has one element at a far position: no list is made for it."""
    paths = [(f"b{i}", 20_000) for i in range(20_000)]
    assert nested(*paths).tree["b7"] == {20_000: "b7.20000"}
