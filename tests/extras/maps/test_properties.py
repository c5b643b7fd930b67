"""Random families of all primitives, between random layouts, against arrays that are cut by hand (random_families.py)."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
import holdfast.torch
from holdfast.core.checkpoint import Checkpoint
from holdfast.errors import DoesNotFit
from holdfast.extras.maps.family import Family, read_family
from holdfast.extras.maps.find import Map
from holdfast.extras.maps.mapped import MappedChunks, MappedTensors
from tests.extras.maps.random_families import LAYOUTS, Model, models
from tests.sampling import examples
from tests.support import ALONE, element_bytes

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


@settings(max_examples=examples(150))
@given(models(), WAYS)
def test_every_element_is_where_the_layout_has_it(model: Model, way: tuple[str, str]):
    source, target = way
    seen = Map(family_of(model), source, target, model.given).through(opened(model, source))
    same(seen, model.tensors(target))


@settings(max_examples=examples(100))
@given(models(), WAYS, st.data())
def test_slices(model: Model, way: tuple[str, str], data: st.DataObject):
    source, target = way
    seen = Map(family_of(model), source, target, model.given).through(opened(model, source))
    for name, values in model.tensors(target).items():
        for _ in range(3):
            index = tuple(
                data.draw(indices(count))
                for count in values.shape[: data.draw(st.integers(0, values.ndim))]
            )
            np.testing.assert_array_equal(
                seen[name][index].numpy(), values[index], err_msg=f"{name}{index}"
            )


def indices(count: int) -> st.SearchStrategy[int | slice]:
    cuts = st.slices(count)
    return cuts | st.integers(-count, count - 1) if count else cuts


@settings(max_examples=examples(60))
@given(models(ties=False), WAYS, st.data())
def test_chunks_for_a_box_are_those_that_meet_it(
    model: Model, way: tuple[str, str], data: st.DataObject
):
    source, target = way
    bound = Map(family_of(model), source, target, model.given).bind(opened(model, source))
    made = MappedTensors(bound)
    for one in bound.targets:
        met = tuple(
            (part, meeting) for part, meeting in enumerate(made.meetings(one)) if not meeting.empty
        )
        chunks = MappedChunks(one.places, one.found.rows, met, bound.table)
        low = [
            data.draw(st.integers(0, count - 1))
            for count in one.shape[: data.draw(st.integers(0, len(one.shape)))]
        ]
        high = [
            data.draw(st.integers(start + 1, count))
            for start, count in zip(low, one.shape, strict=False)
        ]
        boxes = {(chunk.box.start, chunk.box.stop) for chunk in chunks.build(low, high)}
        every = {(chunk.box.start, chunk.box.stop) for chunk in chunks.build()}
        assert boxes <= every
        missed = every - boxes
        assert not [
            box
            for box in missed
            if all(box[0][d] < high[d] and low[d] < box[1][d] for d in range(len(low)))
        ]


@settings(max_examples=examples(60))
@given(models(least=0), WAYS)
def test_axes_without_places(model: Model, way: tuple[str, str]):
    source, target = way
    stored = model.tensors(source)
    seen = Map(family_of(model), source, target, model.given).through(opened(model, source))
    # An array of which the source has no tensor at all has none in the target, whatever its shape would be.
    there = {array.id for array in model.arrays if array.tensors(source)}
    expected = {
        name: values
        for array in model.arrays
        if array.id in there
        for name, values in array.tensors(target).items()
    }
    assert stored.keys() == model.tensors(source).keys()
    same(seen, expected)


@settings(max_examples=examples(80))
@given(models(), WAYS)
def test_there_and_back(model: Model, way: tuple[str, str]):
    source, target = way
    there = Map(family_of(model), source, target, model.given)
    twice = there.invert().invert()
    assert (twice.source, twice.target, twice.sizes) == (source, target, model.given)
    same(there.compose(there.invert()).through(opened(model, source)), model.tensors(source))


@settings(max_examples=examples(80))
@given(models(), st.permutations(LAYOUTS))
def test_a_map_behind_another_is_the_direct_one(model: Model, layouts: list[str]):
    a, b, c = layouts
    family = family_of(model)
    composed = Map(family, a, b, model.given).compose(Map(family, b, c, model.given))
    same(composed.through(opened(model, a)), model.tensors(c))
    again = composed.compose(composed.invert())
    same(again.through(opened(model, a)), model.tensors(a))
    same(composed.invert().through(opened(model, c)), model.tensors(a))


def expand(arrays: dict[str, np.ndarray], dtype: str) -> dict[str, torch.Tensor]:
    """Tensors with these numbers as their bits, in an element type of torch."""
    made = {}
    for name, values in arrays.items():
        raw = torch.from_numpy(values.astype("<i8")).reshape(-1)
        kind = getattr(torch, dtype)
        wide = torch.tensor([], dtype=kind).element_size()
        if dtype == "bool":
            made[name] = (raw % 2 == 1).reshape(values.shape)
            continue
        bits = raw.to({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[wide])
        made[name] = bits.view(kind).reshape(values.shape)
    return made


def bits_of(tensor: torch.Tensor) -> list[object]:
    return [*tensor.shape, element_bytes(tensor)]


PLACES = ["shards", "out.pt", "old.pt", "native", "meshed", "dcp"]
DTYPES = ["bfloat16", "float8_e4m3fn", "int8", "bool", "float64", "int32"]


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=examples(8))
@given(
    model=models(ties=False),
    dtype=st.sampled_from(DTYPES),
    target=st.sampled_from(["two", "three"]),
    data=st.data(),
)
def test_sources_of_every_format(
    tmp_path_factory: pytest.TempPathFactory,
    place: str,
    model: Model,
    dtype: str,
    target: str,
    data: st.DataObject,
):
    state = expand(model.tensors("one"), dtype)
    path = tmp_path_factory.mktemp("source") / place
    if place == "dcp":
        dcp.save(state, checkpoint_id=path, **ALONE)
    elif place == "shards":
        holdfast.save(state, path, format="safetensors", max_shard_size=200, durable=False)
    elif place == "native":
        holdfast.save(state, path, format="native", durable=False)
    elif place == "meshed":
        holdfast.save(state, path.with_suffix(".pt"), durable=False)
        rules = [
            f"{name}: tp={data.draw(st.integers(0, t.ndim - 1))}"
            for name, t in state.items()
            if t.ndim and min(t.shape) > 1
        ]
        holdfast.reshard(
            path.with_suffix(".pt"),
            path,
            mesh="tp=3",
            rules=rules or ["*: replicate"],
            durable=False,
        )
    else:
        torch.save(state, path, _use_new_zipfile_serialization=place == "out.pt")
    cut = model.tensors(target)
    expected = expand(cut, dtype)
    with holdfast.torch.open(
        Map(family_of(model), "one", target, model.given).through(holdfast.open(path))
    ) as seen:
        assert sorted(seen) == sorted(cut)
        for name, tensor in expected.items():
            found = seen[name]
            assert found.dtype == tensor.dtype
            assert bits_of(found) == bits_of(tensor), name


TIED = """
[layouts.one]
[layouts.two]
[[array]]
id = "w"
one = ["w.a : (half[0] n) m", "w.b : (half[1] n) m"]
two = "w : m (n half)"
[[array]]
id = "twin"
tied = "w"
copies = ["two"]
one = "v : (half n) m"
two = "v : (half n) m"
[sizes]
half = "2"
"""


@pytest.mark.parametrize("own", [True, False])
def test_a_twin_is_made_of_the_other_where_it_is_not_there(own: bool):
    whole = np.arange(2 * 3 * 4, dtype="<i4").reshape(2, 3, 4)
    state = {"w.a": whole[0], "w.b": whole[1]} | ({"v": -whole.reshape(6, 4)} if own else {})
    source = holdfast.open(holdfast.to_bytes(state, format="safetensors"))
    seen = Map(read_family("tied", TIED.encode()), "one", "two").through(source)
    twin = -whole if own else whole
    same(seen, {"w": whole.transpose(2, 1, 0).reshape(4, 6), "v": twin.reshape(6, 4)})
    back = Map(read_family("tied", TIED.encode()), "one", "two").invert()
    assert sorted(back.through(seen)) == ["v", "w.a", "w.b"]


def test_an_axis_without_places_that_one_layout_lacks_is_refused():
    text = "[layouts.a]\n[layouts.b]\n[[array]]\nid = 'w'\na = 'x : n m'\nb = 'y : m'"
    source = holdfast.open(holdfast.to_bytes({"x": np.zeros((0, 3), "<i4")}, format="safetensors"))
    with pytest.raises(DoesNotFit, match="do not make the whole"):
        Map(read_family("empty", text.encode()), "a", "b").through(source)


@pytest.mark.parametrize(
    ("a", "b"), [("n m", "m n"), ("(n m)", "(m n)"), ("(n m) k", "(m n) k"), ("n (m k)", "n (k m)")]
)
def test_a_square_that_is_turned_is_no_rename(a: str, b: str):
    text = f"[sizes]\nn = '2'\nm = '2'\nk = '2'\n[layouts.a]\n[layouts.b]\n[[array]]\nid = 'w'\na = 'x : {a}'\nb = 'y : {b}'"
    family = read_family("square", text.encode())
    axes = [axis for axis in "nmk" if axis in a]
    whole = np.arange(2 ** len(axes), dtype="<i4").reshape([2] * len(axes))
    shape = [
        4 if "(" in word else 2
        for word in a.replace("m n", "mn").replace("n m)", "nm)").replace("m k)", "mk)").split()
    ]
    turned = whole.transpose([axes.index(axis) for axis in b if axis in axes]).reshape(shape)
    source = holdfast.open(holdfast.to_bytes({"x": whole.reshape(shape)}, format="safetensors"))
    np.testing.assert_array_equal(Map(family, "a", "b").through(source)["y"].numpy(), turned)
