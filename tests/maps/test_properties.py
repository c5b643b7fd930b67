"""Random families of all primitives, between random layouts, against arrays that are cut by hand (random_families.py)."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.core.checkpoint import Checkpoint
from holdfast.maps.family import Family, read_family
from holdfast.maps.find import Map
from tests.maps.random_families import LAYOUTS, Model, models

WAYS = st.sampled_from([*permutations(LAYOUTS, 2)])


def family_of(model: Model) -> Family:
    return read_family("random", model.toml.encode())


def opened(model: Model, layout: str) -> Checkpoint:
    state = model.tensors(layout) | (model.drops if layout == "one" else {})
    return holdfast.open(holdfast.to_bytes(state, format="safetensors"))


def same(found: Checkpoint, expected: dict[str, np.ndarray]) -> None:
    assert sorted(found) == sorted(expected)
    for name, values in expected.items():
        assert found[name].shape == values.shape
        assert found[name].dtype.name == {"i": "int32"}[values.dtype.kind]
        np.testing.assert_array_equal(found[name].numpy(), values, err_msg=name)


@settings(max_examples=150)
@given(models(), WAYS)
def test_every_element_is_where_the_layout_has_it(model: Model, way: tuple[str, str]):
    source, target = way
    seen = Map(family_of(model), source, target, model.given).through(opened(model, source))
    same(seen, model.tensors(target))


@settings(max_examples=100)
@given(models(), WAYS, st.data())
def test_slices(model: Model, way: tuple[str, str], data: st.DataObject):
    source, target = way
    seen = Map(family_of(model), source, target, model.given).through(opened(model, source))
    for name, values in model.tensors(target).items():
        for _ in range(3):
            index = tuple(data.draw(indices(count)) for count in values.shape[: data.draw(st.integers(0, values.ndim))])
            np.testing.assert_array_equal(seen[name][index].numpy(), values[index], err_msg=f"{name}{index}")


def indices(count: int) -> st.SearchStrategy[int | slice]:
    cuts = st.slices(count)
    return cuts | st.integers(-count, count - 1) if count else cuts


@settings(max_examples=60)
@given(models(least=0), WAYS)
def test_axes_without_places(model: Model, way: tuple[str, str]):
    source, target = way
    stored = model.tensors(source)
    seen = Map(family_of(model), source, target, model.given).through(opened(model, source))
    # An array of which the source has no tensor at all has none in the target, whatever its shape would be.
    there = {array.id for array in model.arrays if array.tensors(source)}
    expected = {name: values for array in model.arrays if array.id in there for name, values in array.tensors(target).items()}
    assert stored.keys() == model.tensors(source).keys()
    same(seen, expected)


@settings(max_examples=80)
@given(models(), WAYS)
def test_there_and_back(model: Model, way: tuple[str, str]):
    source, target = way
    there = Map(family_of(model), source, target, model.given)
    twice = there.invert().invert()
    assert (twice.source, twice.target, twice.sizes) == (source, target, model.given)
    same(there.compose(there.invert()).through(opened(model, source)), model.tensors(source))


@settings(max_examples=80)
@given(models(), st.permutations(LAYOUTS))
def test_a_map_behind_another_is_the_direct_one(model: Model, layouts: list[str]):
    a, b, c = layouts
    family = family_of(model)
    composed = Map(family, a, b, model.given).compose(Map(family, b, c, model.given))
    same(composed.through(opened(model, a)), model.tensors(c))
    again = composed.compose(composed.invert())
    same(again.through(opened(model, a)), model.tensors(a))
    same(composed.invert().through(opened(model, c)), model.tensors(a))
