"""Where a shard is after its shape has changed.

A shard of shape `old` at an offset is seen in another shape. The offset belongs to the whole tensor, whose shape is not known here,
so it can be carried over in four cases only:

1. The shape is the same.
2. The shard begins at the origin, and does so in every shape.
3. Dimensions of length 1 at offset 0 come or go, as in `unsqueeze`: 2 × 3 at (4, 6) is 2 × 1 × 3 at (4, 0, 6).
4. The shard consists of whole rows (its offset is 0 in every dimension but the first): then it begins after a number of
   elements, and that number is whole rows of the new shape too. 2 × 6 at (4, 0) is 12 at (24), or 4 × 3 at (8, 0).

In the last case nothing but the offset says that the rows are whole. Row-wise sharding is the only one that gives such offsets,
but for the first of several column blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.errors import Refused, Unsupported

__all__ = ["resolved_shape", "viewed_offsets"]

Shape = tuple[int, ...]


def resolved_shape(old: Sequence[int], wanted: Sequence[int]) -> Shape:
    """A wanted shape with its -1, if there is one, replaced; RuntimeError where the number of elements differs, as torch says it.

    >>> resolved_shape((2, 6), (-1, 3))
    (4, 3)
    """
    count, shape = math.prod(old), [int(n) for n in wanted]
    open_places = [i for i, n in enumerate(shape) if n == -1]
    if len(open_places) > 1:
        raise Refused("only one dimension can be inferred")
    if open_places:
        known = math.prod(n for n in shape if n != -1)
        if known <= 0 or count % known:
            raise Refused(f"shape '{list(wanted)}' is invalid for input of size {count}", expected=count, found=tuple(shape))
        shape[open_places[0]] = count // known
    if min(shape, default=0) < 0 or math.prod(shape) != count:
        raise Refused(f"shape '{list(wanted)}' is invalid for input of size {count}", expected=count, found=tuple(shape))
    return tuple(shape)


def viewed_offsets(offsets: Shape, old: Shape, new: Shape) -> Shape:
    """The offset of a shard that is seen in another shape; `Unsupported` where it cannot be known."""
    if new == old:
        return offsets
    if not any(offsets):
        return (0,) * len(new)
    kept = [(n, o) for n, o in zip(old, offsets, strict=True) if n != 1 or o]
    if [n for n, _ in kept if n != 1] == [n for n in new if n != 1] and all(n != 1 for n, _ in kept):
        places = iter(o for _, o in kept)
        return tuple(0 if n == 1 else next(places) for n in new)
    if not any(offsets[1:]) and new:
        elements, row = offsets[0] * math.prod(old[1:]), math.prod(new[1:])
        if row and elements % row == 0:
            return (elements // row, *(0 for _ in new[1:]))
    raise Unsupported(
        f"a shard of shape {list(old)} at offset {list(offsets)} has no known offset as {list(new)}; "
        "view the shards themselves, and wrap them with the offsets that they have then",
        expected=old,
        found=new,
    )
