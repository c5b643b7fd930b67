"""Decides which rows of a checkpoint fill which tensors of a model. Reads no data.

1. `match_rows` pairs rows with destinations by name, and checks that each pair fits.
2. `find_overlaps` cuts each pair at the boxes of its destination, which may be a shard.

A model may have very many tensors, but they are of few kinds: dtypes, shapes and strides. So it is
checked once for each pair of kinds whether they fit. If a destination takes a whole row whose bytes
are one range, no object is made for it. All other rows become lazy tensors, one for each box.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from holdfast.core.box import Box
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value

KindT = TypeVar("KindT", bound=Hashable)
"""What the caller uses as the kind of a destination."""


class RowMatches(Value, frozen=True):
    """Rows of a checkpoint, and the destinations of the same name by their indices."""

    rows: list[int]
    """The rows that fit their destination."""
    destinations: list[int]
    """The destination of each of these rows."""
    missing: list[int]
    """The destinations whose names the checkpoint does not have."""
    refused: dict[int, str]
    """The destinations that do not fit the row with their name, and the reason for each."""


class Overlaps(Value, frozen=True):
    """The boxes of destinations, and the elements of a checkpoint that belong in each of them."""

    pair_indices: list[int]
    """For each box, which pair of a row and a destination it belongs to, in ascending order."""
    box_indices: list[int]
    """For each box, its position among the boxes of its destination."""
    tensors: dict[int, LazyTensor]
    """The elements for a box, by the position of the box in the lists above. If there is no entry,
    the box is a whole destination, and its elements are a row whose bytes are one range."""


def match_rows(
    row_indices: Mapping[str, int],
    kind_indices: Sequence[int],
    destination_names: Sequence[str],
    destination_kinds: Sequence[KindT],
    find_problem: Callable[[int, KindT], str | None],
) -> RowMatches:
    """Match rows (tensors of a checkpoint) with destinations (tensors of a model) by name.

    Args:
        row_indices: The row of each name in the checkpoint.
        kind_indices: The kind of each row.
        destination_names: The name of each destination.
        destination_kinds: The kind of each destination.
        find_problem: Returns why a row of a kind does not fit a destination of a kind, or None if
            it fits. It is called once for each pair of kinds.

    >>> matches = match_rows({"a": 0, "b": 1}, [5, 6], ["b", "c"], ["x", "x"], lambda a, b: None)
    >>> matches.rows, matches.destinations, matches.missing
    ([1], [0], [1])
    """
    matched_rows: list[int] = []
    matched_destinations: list[int] = []
    missing: list[int] = []
    refused: dict[int, str] = {}
    problems: dict[tuple[int, KindT], str | None] = {}
    rows = map(row_indices.get, destination_names)
    for index, (row, kind) in enumerate(zip(rows, destination_kinds, strict=True)):
        if row is None:
            missing.append(index)
            continue

        # There are many tensors of few kinds, so the result for a pair of kinds is kept.
        kinds = kind_indices[row], kind
        if kinds not in problems:
            problems[kinds] = find_problem(*kinds)
        problem = problems[kinds]
        if problem is None:
            matched_rows.append(row)
            matched_destinations.append(index)
        else:
            refused[index] = problem
    return RowMatches(matched_rows, matched_destinations, missing, refused)


def find_overlaps(
    table: Table,
    rows: Sequence[int],
    destination_boxes: Sequence[Sequence[Box] | None],
    replacements: Mapping[int, LazyTensor] | None = None,
) -> Overlaps:
    """Find the elements of a checkpoint for each box of the destinations, the tensors of a model.

    Args:
        table: The tensors of the checkpoint.
        rows: The row of each pair of a row and a destination.
        destination_boxes: For each pair, the boxes of the tensor that the destination holds. None
            if it holds the whole tensor. Boxes without elements are left out of the result.
        replacements: Tensors to use instead of the row of a pair, by the index of the pair. They
            are rows in another shape, or tensors that are not in the table.

    Returns:
        The boxes in the order of the pairs.
    """
    if replacements is None:
        replacements = {}
    is_whole = [kind.is_whole for kind in table.kinds]
    overlaps = Overlaps([], [], {})
    for pair_index, (row, boxes) in enumerate(zip(rows, destination_boxes, strict=True)):
        tensor = replacements.get(pair_index)
        if tensor is None:
            is_one_range = is_whole[table.kind_indices[row]] and row not in table.irregular
            if boxes is None and is_one_range:
                # The bytes of the row are read straight into the destination. This is the usual
                # case, and needs no object.
                overlaps.pair_indices.append(pair_index)
                overlaps.box_indices.append(0)
                continue
            tensor = table.lazy_tensor(row)

        if boxes is None:
            boxes = [Box.whole(tensor.shape)]
        for box_index, box in enumerate(boxes):
            if box.count == 0:
                continue
            elements = tensor
            if box.shape != tensor.shape:
                elements = tensor[box.slices]
            overlaps.tensors[len(overlaps.pair_indices)] = elements
            overlaps.pair_indices.append(pair_index)
            overlaps.box_indices.append(box_index)
    return overlaps
