"""`match_rows` and `find_overlaps` against dicts of names, and against slices of numpy arrays."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.dtype import DTYPES
from holdfast.core.match import find_overlaps, match_rows
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.source import OpenSource
from holdfast.engine.table import make_lazy_table
from holdfast.stores.memory import MemoryStore
from tests.sampling import examples

FLOAT32 = DTYPES.name("float32")

NAMES = st.lists(st.sampled_from([f"n{i}" for i in range(12)]), unique=True)


@given(NAMES, NAMES, st.data())
def test_rows_are_matched_by_name_and_judged_once_for_each_pair_of_kinds(
    row_names, destination_names, data
):
    kind_indices = [data.draw(st.integers(0, 2)) for _ in row_names]
    destination_kinds = [data.draw(st.integers(0, 2)) for _ in destination_names]
    judged_kinds = []

    def find_problem(kind_index: int, destination_kind: int) -> str | None:
        judged_kinds.append((kind_index, destination_kind))
        if kind_index == destination_kind:
            return None
        return f"{kind_index} is not {destination_kind}"

    row_indices = {name: row for row, name in enumerate(row_names)}
    matches = match_rows(
        row_indices, kind_indices, destination_names, destination_kinds, find_problem
    )

    expected_pairs = []
    expected_missing = []
    expected_refused = {}
    for index, name in enumerate(destination_names):
        row = row_indices.get(name)
        if row is None:
            expected_missing.append(index)
        elif kind_indices[row] == destination_kinds[index]:
            expected_pairs.append((row, index))
        else:
            problem = f"{kind_indices[row]} is not {destination_kinds[index]}"
            expected_refused[index] = problem
    assert list(zip(matches.rows, matches.destinations, strict=True)) == expected_pairs
    assert matches.missing == expected_missing
    assert matches.refused == expected_refused
    assert len(judged_kinds) == len(set(judged_kinds))


@st.composite
def edges(draw, length):
    """Draw where an axis is cut. Equal positions are dropped, so no range is empty."""
    inner_edges = draw(st.lists(st.integers(0, length), max_size=3))
    return sorted({0, length, *inner_edges})


def make_grid(edges_by_axis: list[list[int]]) -> list[Box]:
    """Return every box of a grid. An axis of length 0 has no range, so there are no boxes."""
    ranges_by_axis = [list(pairwise(axis_edges)) for axis_edges in edges_by_axis]
    return [
        Box(tuple(start for start, _ in ranges), tuple(stop for _, stop in ranges))
        for ranges in product(*ranges_by_axis)
    ]


class StoredArray(Value):
    """An array, and how it is stored: the boxes of its chunks, and the order of their elements."""

    array: np.ndarray
    boxes: list[Box]
    is_transposed: bool


@st.composite
def stored_arrays(draw):
    """Draw an array in one chunk or in several, which are stored in C or in Fortran order."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    array = np.random.default_rng(draw(st.integers(0, 99))).random(shape, np.float32)
    boxes = [Box.whole(shape)]
    if draw(st.booleans()):
        boxes = make_grid([draw(edges(length)) for length in shape])
    return StoredArray(array, boxes, is_transposed=draw(st.booleans()))


def cut(array: np.ndarray, box: Box) -> np.ndarray:
    # numpy returns a scalar, and no array, if an array without axes is indexed.
    return array[box.slices] if box.rank else array


def make_table(stored: list[StoredArray]) -> Table:
    """Store arrays in one file, and describe them as a table."""
    # A store needs its content first, so the offsets of the chunks are collected before.
    content = bytearray()
    chunk_fields = []
    for stored_array in stored:
        for box in stored_array.boxes:
            elements = cut(stored_array.array, box)
            strides = c_strides(elements.shape, 32)
            stored_bytes = elements.tobytes()
            if stored_array.is_transposed:
                strides = c_strides(elements.shape[::-1], 32)[::-1]
                stored_bytes = elements.tobytes(order="F")
            chunk_fields.append((box, len(content), len(stored_bytes), strides))
            content += stored_bytes

    store = MemoryStore({"file": bytes(content)})
    source = OpenSource(store, threads=1)
    remaining_fields = iter(chunk_fields)
    tensors = {}
    for row, stored_array in enumerate(stored):
        chunks = []
        for _ in stored_array.boxes:
            box, start, nbytes, strides = next(remaining_fields)
            chunks.append(Chunk(box, Storage("file", start, nbytes, home=store), 0, strides))
        name = f"t{row}"
        tensors[name] = LazyTensor(name, FLOAT32, stored_array.array.shape, tuple(chunks), source)
    return make_lazy_table([*tensors], [*tensors.values()])


@settings(max_examples=examples(150))
@given(st.lists(stored_arrays(), min_size=1, max_size=6), st.data())
def test_overlaps_have_the_elements_that_numpy_cuts_out(stored, data):
    table = make_table(stored)
    rows = data.draw(st.lists(st.integers(0, len(stored) - 1), max_size=8))
    destination_boxes = []
    for row in rows:
        boxes = None
        if data.draw(st.booleans()):
            boxes = make_grid([data.draw(edges(length)) for length in stored[row].array.shape])
        destination_boxes.append(boxes)

    overlaps = find_overlaps(table, rows, destination_boxes)

    assert overlaps.pair_indices == sorted(overlaps.pair_indices)
    checked_boxes = []
    for position, pair_index in enumerate(overlaps.pair_indices):
        row = rows[pair_index]
        array = stored[row].array
        box_index = overlaps.box_indices[position]
        checked_boxes.append((pair_index, box_index))
        if position in overlaps.tensors:
            boxes = destination_boxes[pair_index] or [Box.whole(array.shape)]
            expected = cut(array, boxes[box_index])
            np.testing.assert_array_equal(overlaps.tensors[position].numpy(), expected)
        else:
            # Without a tensor, the whole row is one range of bytes.
            assert destination_boxes[pair_index] is None
            (row_bytes,) = table.read_bytes([row])
            assert bytes(row_bytes) == array.tobytes()

    expected_boxes = []
    for pair_index, boxes in enumerate(destination_boxes):
        box_count = 1 if boxes is None else len(boxes)
        expected_boxes += [(pair_index, box_index) for box_index in range(box_count)]
    assert checked_boxes == expected_boxes
