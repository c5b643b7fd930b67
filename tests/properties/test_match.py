"""`match_rows` and `find_overlaps` against plain oracles: dicts of names, and arrays that are cut by numpy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.dtype import DTYPES
from holdfast.core.match import find_overlaps, match_rows
from holdfast.core.tensor import LazyTensor
from holdfast.engine.source import OpenSource
from holdfast.engine.table import make_lazy_table
from holdfast.stores.memory import MemoryStore
from tests.sampling import examples

FLOAT = next(row for row in DTYPES.rows if row.name == "float32")

NAMES = st.lists(st.sampled_from([f"n{i}" for i in range(12)]), unique=True)


@given(NAMES, NAMES, st.data())
def test_pairs_are_those_of_equal_names(source, target, data):
    kind = [data.draw(st.integers(0, 2)) for _ in source]
    own = [data.draw(st.integers(0, 2)) for _ in target]
    judged = []

    def judge(there: int, here: int) -> str | None:
        judged.append((there, here))
        return None if there == here else f"{there} is not {here}"

    rows = {name: row for row, name in enumerate(source)}
    found = match_rows(rows, kind, target, own, judge)
    pairs = [(rows[name], number) for number, name in enumerate(target) if name in rows]
    fitting = [(row, number) for row, number in pairs if kind[row] == own[number]]
    assert list(zip(found.rows, found.destinations, strict=True)) == fitting
    assert found.missing == [number for number, name in enumerate(target) if name not in source]
    assert found.refused == {
        n: f"{kind[row]} is not {own[n]}" for row, n in pairs if kind[row] != own[n]
    }
    assert len(judged) == len(set(judged))


@st.composite
def cuts(draw, length):
    """Where an axis is cut."""
    inner = draw(st.lists(st.integers(0, length), max_size=3))
    return sorted({0, length, *inner})


def boxes_of(edges: list[list[int]]) -> list[Box]:
    """Every box of a grid."""
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for axis in edges:
        found = [((*a, low), (*b, high)) for a, b in found for low, high in pairwise(axis)]
    return [Box(a, b) for a, b in found]


@st.composite
def stored(draw):
    """A tensor as one storage or several, in C order or turned; and its elements."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    array = np.random.default_rng(draw(st.integers(0, 99))).random(shape, np.float32)
    edges = [draw(cuts(n)) for n in shape] if draw(st.booleans()) else [[0, n] for n in shape]
    return array, boxes_of(edges), draw(st.booleans())


@settings(max_examples=examples(150))
@given(st.lists(stored(), min_size=1, max_size=6), st.data())
def test_parts_hold_what_numpy_cuts(tensors, data):
    content = bytearray()
    placed = []
    for array, boxes, turned in tensors:
        for box in boxes:
            part = np.array(array[box.slices] if box.rank else array, order="F" if turned else "C")
            strides = (
                tuple(reversed(c_strides(part.shape[::-1], 32)))
                if turned
                else c_strides(part.shape, 32)
            )
            placed.append((len(content), part.nbytes, strides))
            content += part.tobytes(order="A")
    store = MemoryStore({"f": bytes(content)})
    source, places = OpenSource(store, threads=1), iter(placed)
    lazies = {}
    for number, (array, boxes, _) in enumerate(tensors):
        chunks = []
        for box in boxes:
            start, nbytes, strides = next(places)
            chunks.append(Chunk(box, Storage("f", start, nbytes, home=store), 0, strides))
        lazies[f"t{number}"] = LazyTensor(f"t{number}", FLOAT, array.shape, tuple(chunks), source)
    table = make_lazy_table([*lazies], [*lazies.values()])
    rows = data.draw(st.lists(st.integers(0, len(tensors) - 1), max_size=8))
    wanted = []
    for row in rows:
        shape = tensors[row][0].shape
        wanted.append(
            None if data.draw(st.booleans()) else boxes_of([data.draw(cuts(n)) for n in shape])
        )
    met = find_overlaps(table, rows, wanted)
    assert met.pair_indices == sorted(met.pair_indices)
    ranged = [pair for at, pair in enumerate(met.pair_indices) if at not in met.tensors]
    for pair in ranged:
        row = rows[pair]
        assert wanted[pair] is None
        (piece,) = table.read_bytes([row])
        assert bytes(piece) == tensors[row][0].tobytes()
    given_parts = {
        (met.pair_indices[at], met.box_indices[at]): part.numpy()
        for at, part in met.tensors.items()
    }
    for pair, row in enumerate(rows):
        if pair in ranged:
            continue
        array = tensors[row][0]
        for number, box in enumerate(
            wanted[pair] if wanted[pair] is not None else [Box.whole(array.shape)]
        ):
            if box.count:
                np.testing.assert_array_equal(
                    given_parts.pop((pair, number)), array[box.slices] if box.rank else array
                )
    assert not given_parts
