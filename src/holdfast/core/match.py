"""`match_rows` and `find_overlaps`: which rows of a checkpoint go to which tensors of a target, and which
bytes of each. Nothing is read.

    match      names of both sides            pairs of rows; what is missing, what is left, what does not fit
    meet       boxes of both sides            rows that are one range each; parts as lazy tensors, each with its box

A target has many tensors of few kinds, as a table has. So whether one fits is judged once for each pair of kinds. A whole tensor
that is all bytes of one storage costs no object. Anything else is met box by box (`Met.parts`): resharding, slices and copies
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from holdfast.core.box import Box
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value

T = TypeVar("T", bound=Hashable)


class RowMatches(Value, frozen=True):
    """Rows of a source and of a target that belong together, and those that have no counterpart."""

    source: list[int]
    target: list[int]
    missing: list[int]  # Rows of the target whose name the source does not have.
    refused: dict[
        int, str
    ]  # Rows of the target that cannot have what the source has under their name, each with the reason.


class Overlaps(Value, frozen=True):
    """Where both sides overlap: in each place a box of a target, and the elements of a source that belong there."""

    pairs: list[int]
    """The number of the pair of each, in order."""
    boxes: list[int]
    """Which of the boxes of its target each is."""
    parts: dict[int, LazyTensor]
    """By position, the elements as a lazy tensor of the shape of the box: its chunks say which bytes of the source lie where in it.
    Where there is none, the bytes of the source are one range, and all of the target."""


def match_rows(
    rows: Mapping[str, int],
    kind: Sequence[int],
    names: Sequence[str],
    kinds: Sequence[T],
    judge: Callable[[int, T], str | None],
) -> RowMatches:
    """Match rows of a source with those of a target by name.

    `rows` gives the row of a name of the source, `kind` the kind of a row. The target has a name and a kind of its own a row;
    `judge` says why a target of a kind cannot have a source of a kind, or None, and is asked once for each pair of kinds.

    >>> match_rows({"a": 0, "b": 1}, [5, 6], ["b", "c"], ["x", "x"], lambda source, target: None)
    Matched(source=[1], target=[0], missing=[1], refused={})
    """
    source: list[int] = []
    target: list[int] = []
    missing: list[int] = []
    refused: dict[int, str] = {}
    judged: dict[tuple[int, T], str | None] = {}
    for number, (row, own) in enumerate(zip(map(rows.get, names), kinds, strict=True)):
        if row is None:
            missing.append(number)
            continue
        pair = kind[row], own
        try:
            problem = judged[pair]
        except KeyError:
            problem = judged[pair] = judge(*pair)
        if problem is None:
            source.append(row)
            target.append(number)
        else:
            refused[number] = problem
    return RowMatches(source, target, missing, refused)


def find_overlaps(
    table: Table,
    rows: Sequence[int],
    boxes: Sequence[Sequence[Box] | None],
    given: Mapping[int, LazyTensor] | None = None,
) -> Overlaps:
    """Where rows of a source meet the boxes of their targets. `None` in the place of boxes is all of a tensor, in its own shape.
    `given` has tensors that take the place of the row of their pair: it is seen in another shape, or is no row. Boxes that have no
    elements are left out."""
    whole, kind, irregular = (
        [kind.is_whole for kind in table.kinds],
        table.kind_indices,
        table.irregular,
    )
    found, given = Overlaps([], [], {}), given or {}
    for pair, (row, cut) in enumerate(zip(rows, boxes, strict=True)):
        if cut is None and pair not in given and whole[kind[row]] and row not in irregular:
            found.pairs.append(pair)
            found.boxes.append(0)
            continue
        tensor = given[pair] if pair in given else table.lazy_tensor(row)
        for number, box in enumerate((Box.whole(tensor.shape),) if cut is None else cut):
            if box.count:
                found.parts[len(found.pairs)] = (
                    tensor if box.shape == tensor.shape else tensor[box.slices]
                )
                found.pairs.append(pair)
                found.boxes.append(number)
    return found
