"""From the name of a tensor to its place in the matrix: the number of its layer, and its role, which is the rest of the name.

    model.layers.3.mlp.up_proj.weight             layer 3    model.layers.*.mlp.up_proj.weight
    model.layers.3.mlp.experts.17.up_proj.weight  layer 3    model.layers.*.mlp.experts.*.up_proj.weight    expert 17
    params.Dense_4.kernel                         layer 4    params.Dense_*.kernel
    lm_head.weight                                no layer   lm_head.weight

1. The first part of a name that is nothing but a number is the layer; behind a part that speaks of experts it is the expert, and
   the next number is the layer. Any other number stays in the role: the second block of a stage is not the second layer.
2. In a name without such a part, a part that ends in a number has it, if three names differ in it and in nothing else: `Dense_0`,
   `Dense_1`, `Dense_2` are a series, `ln_1` and `ln_2` are names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from holdfast.core.value import Value

NONE = -1

NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
ENDING = re.compile(r"(.*[^0-9])([0-9]{1,9})", re.ASCII | re.DOTALL)

FEWEST = 3
"""Names that make a series of parts that end in numbers."""

PARTS = 64
"""Parts of a name that are looked at. Real ones have a dozen."""


class MatrixCell(Value, frozen=True):
    """Where a tensor stands in the matrix."""

    layer: int
    """The number of the layer; -1 for none."""
    role: str
    """The rest of the name, with a star for each number that was taken out."""
    expert: int = NONE
    """The number of the expert; -1 for none."""


def places(names: Sequence[str]) -> list[MatrixCell]:
    """The place of each name among the others.

    >>> places(["h.0.attn.w", "h.1.attn.w"])
    [MatrixCell(layer=0, role='h.*.attn.w', expert=-1), MatrixCell(layer=1, role='h.*.attn.w', expert=-1)]
    >>> places(["h.2.experts.7.w1", "h.2.norm.1.w"])
    [MatrixCell(layer=2, role='h.*.experts.*.w1', expert=7), MatrixCell(layer=2, role='h.*.norm.1.w', expert=-1)]
    >>> [place.layer for place in places(["Dense_0.k", "Dense_1.k", "Dense_2.k", "ln_1.k", "ln_2.k"])]
    [0, 1, 2, -1, -1]
    """
    found = [_numbered(name) for name in names]
    series: dict[str, set[int]] = {}
    ends = [None if place is not None else _ending(name) for name, place in zip(names, found, strict=True)]
    for end in ends:
        if end is not None:
            series.setdefault(end.role, set()).add(end.layer)
    return [
        place or (end if end is not None and len(series[end.role]) >= FEWEST else MatrixCell(NONE, name))
        for name, place, end in zip(names, found, ends, strict=True)
    ]


def _numbered(name: str) -> MatrixCell | None:
    """By parts that are numbers; None where there is none."""
    parts = name.split(".", PARTS)
    layer = expert = NONE
    before = ""
    for at, part in enumerate(parts):
        if NUMBER.fullmatch(part):
            if "expert" in before.lower() and expert == NONE:
                expert, parts[at] = int(part), "*"
            elif layer == NONE:
                layer, parts[at] = int(part), "*"
        before = part
    return None if layer == expert == NONE else MatrixCell(layer, ".".join(parts), expert)


def _ending(name: str) -> MatrixCell | None:
    """By the first part that ends in a number; None where there is none."""
    parts = name.split(".", PARTS)
    for at, part in enumerate(parts):
        found = ENDING.fullmatch(part)
        if found is not None:
            parts[at] = f"{found[1]}*"
            return MatrixCell(int(found[2]), ".".join(parts))
    return None
