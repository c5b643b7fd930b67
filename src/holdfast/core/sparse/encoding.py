"""What every encoding offers, and which one a manifest means.

The elements of a chunk, in C order, are cut into groups of a fixed number; the last may be shorter. Of each group there are

    where     its marks: as many bytes for each full group, so that group i begins at i × that
    values    the elements that are kept, one group behind the other
    starts    how many values lie before each group, and in all: 64-bit integers; not where the number is always the same

so any group can be unpacked alone, from two reads whose places are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from holdfast.core.sparse.bitmap import Bitmap
from holdfast.core.sparse.blocks import Blocks
from holdfast.core.sparse.elements import Elements, Octets
from holdfast.core.sparse.nm import Pattern
from holdfast.errors import MetadataError

__all__ = ["Encoding", "encoding_of", "group_count", "matrix_shape", "spread", "where_total"]


class Encoding(Protocol):
    """How the elements of one chunk are packed."""

    @property
    def name(self) -> str:
        """`bitmap`, `nm` or `block`."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """What the manifest has to say of it beside its name."""

    @property
    def count(self) -> int:
        """Elements of the chunk."""

    @property
    def group(self) -> int:
        """Elements of a full group."""

    @property
    def counted(self) -> bool:
        """Whether groups have different numbers of values, so that there are `starts`."""

    @property
    def unit(self) -> int:
        """Values come in multiples of this."""

    def where_nbytes(self, count: int) -> int:
        """Bytes of the marks of a group of `count` elements."""

    def most(self, count: int) -> int:
        """Values that a group of `count` elements has at the most."""

    def mark(self, dense: Elements) -> Octets:
        """The marks of one group."""

    def take(self, dense: Elements) -> Elements:
        """The values of one group. Raises `MetadataError` where its elements cannot be stored in this way."""

    def count_values(self, dense: Elements) -> int:
        """How many values `take` gives."""

    def unpack(self, where: Octets, values: Elements, out: Elements) -> None:
        """Fill `out` with the elements of one group. Raises `MetadataError` for marks that are none, or not for these values."""


def encoding_of(name: str, sizes: Sequence[int], shape: Sequence[int]) -> Encoding:
    """The encoding of a chunk of some shape that has elements. Raises `MetadataError` where there is no such."""
    count = math.prod(shape)
    match name, tuple(sizes):
        case "bitmap", ():
            return Bitmap(count)
        case "nm", (int(n), int(m)):
            if not shape or m < 1 or shape[-1] % m:
                raise MetadataError(f"a last axis of {list(shape)} is not in groups of {m:,}")
            return Pattern(count, n, m)
        case "block", (int(height), int(width)):
            return Blocks(*matrix_shape(shape), height, width)
    raise MetadataError(f"there is no encoding {name[:64]!r} with {len(sizes):,} sizes")


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A shape as that of a matrix: its first axis by all others."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def group_count(encoding: Encoding) -> int:
    """How many groups a chunk has."""
    return -(-encoding.count // encoding.group)


def spread(encoding: Encoding, group: int) -> int:
    """Elements of a group: all have the same number but the last."""
    return min(encoding.group, encoding.count - group * encoding.group)


def where_total(encoding: Encoding) -> int:
    """Bytes of all marks together."""
    last = group_count(encoding) - 1
    return last * encoding.where_nbytes(encoding.group) + encoding.where_nbytes(spread(encoding, last))
