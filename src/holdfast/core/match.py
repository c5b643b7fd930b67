"""`match` and `meet`: which rows of a checkpoint go to which tensors of a target, and which bytes of each. Nothing is read.

    match      names of both sides            pairs of rows; what is missing, what is left, what does not fit
    meet       boxes of both sides            whole storages as columns; parts as lazy tensors, each with its box

A target has many tensors of few kinds, as a table has. So whether one fits is judged once for each pair of kinds, and a pair
is two numbers. A tensor that is asked for whole, and is all bytes of one storage, costs no object on its way (`Met.rows`). What is
cut, on either side, is met box by box: resharding, slices and plain copies are one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from holdfast.core.box import Box
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value

T = TypeVar("T", bound=Hashable)


class Matched(Value, frozen=True):
    """Rows of a source and of a target that belong together, and those that have no counterpart."""

    source: list[int]
    """Rows of the source, one for each pair."""
    target: list[int]
    """Rows of the target, in their order."""
    missing: list[int]
    """Rows of the target whose name the source does not have."""
    refused: dict[int, str]
    """Rows of the target that cannot have what the source has under their name, each with the reason."""


class MetPart(Value, frozen=True, eq=False):
    """A box of a target, and the elements of a source that belong there."""

    pair: int
    """The number of the pair."""
    number: int
    """Which of the boxes of its target it is."""
    tensor: LazyTensor
    """Of the shape of the box; its chunks say which bytes of the source lie where in the box."""


class Met(Value, frozen=True):
    """Where both sides overlap."""

    rows: list[int]
    """Numbers of the pairs whose bytes in the source are one range, and all of the target."""
    parts: list[MetPart]
    """The rest."""


def match(
    rows: Mapping[str, int], kind: Sequence[int], names: Sequence[str], kinds: Sequence[T], judge: Callable[[int, T], str | None]
) -> Matched:
    """Match rows of a source with those of a target by name.

    `rows` gives the row of a name of the source, `kind` the kind of a row. The target has a name and a kind of its own a row;
    `judge` says why a target of a kind cannot have a source of a kind, or None, and is asked once for each pair of kinds.

    >>> match({"a": 0, "b": 1}, [5, 6], ["b", "c"], ["x", "x"], lambda source, target: None)
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
    return Matched(source, target, missing, refused)


def meet(table: Table, rows: Sequence[int], boxes: Sequence[Sequence[Box] | None]) -> Met:
    """Where rows of a source meet the boxes of their targets. `None` in the place of boxes is all of a tensor, in its own shape."""
    ranged = [kind.whole for kind in table.kinds]
    whole: list[int] = []
    parts: list[MetPart] = []
    kind, odd = table.kind, table.odd
    for pair, (row, cut) in enumerate(zip(rows, boxes, strict=True)):
        if cut is None and ranged[kind[row]] and row not in odd:
            whole.append(pair)
            continue
        tensor = table.view(row)
        met = meet_boxes(tensor, (Box.whole(tensor.shape),) if cut is None else cut)
        parts += [MetPart(pair, number, part) for number, part in met]
    return Met(whole, parts)


def meet_boxes(tensor: LazyTensor, boxes: Sequence[Box]) -> list[tuple[int, LazyTensor]]:
    """The elements of a tensor in each of some boxes, with the number of the box; boxes that have none are left out."""
    filled = [(number, box) for number, box in enumerate(boxes) if box.count]
    return [(number, tensor if box.shape == tensor.shape else tensor[box.slices]) for number, box in filled]
