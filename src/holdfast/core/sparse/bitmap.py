"""A bit an element, and the elements whose bit is set.

    elements   a 0 0 b 0 0 0 0 │ 0 c …        groups of 65,536
    where      0b00001001      │ 0b…10        the first element in the lowest bit
    values     a b c …

The bits behind the last element are zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from holdfast.core.sparse.elements import Elements, Octets, are_set, count_set, fill, marks_of, taken

__all__ = ["Bitmap"]

GROUP_ELEMENTS = 1 << 16
"""Elements of a group: little enough that a slice unpacks hardly more than it needs, and that all of it stays in a cache."""


@dataclass(frozen=True, slots=True)
class Bitmap:
    """The encoding of `count` elements by a bit each."""

    count: int

    name: ClassVar[str] = "bitmap"
    counted: ClassVar[bool] = True
    unit: ClassVar[int] = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return ()

    @property
    def group(self) -> int:
        return GROUP_ELEMENTS

    def where_nbytes(self, count: int) -> int:
        return (count + 7) // 8

    def most(self, count: int) -> int:
        return count

    def mark(self, dense: Elements) -> Octets:
        return np.packbits(are_set(dense), bitorder="little")

    def take(self, dense: Elements) -> Elements:
        return taken(dense, are_set(dense))

    def count_values(self, dense: Elements) -> int:
        return count_set(dense)

    def unpack(self, where: Octets, values: Elements, out: Elements) -> None:
        fill(out, np.flatnonzero(marks_of(where, len(out))), values)
