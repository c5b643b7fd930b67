"""At most `n` of every `m` elements along the last axis, with their positions.

    elements   0 a b 0 │ c 0 0 0          2:4
    where      1 2       0 1              the positions, rising; 1, 2 or 4 bits each, the first in the lowest bits
    values     a b       c 0              as many for each group: a group with fewer has zeros among them

Every place follows from arithmetic, so there is nothing to count and nothing to look up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from holdfast.core.sparse.elements import Elements, Octets, are_set, fill, marks_of, taken, translate
from holdfast.errors import MetadataError

__all__ = ["LARGEST_M", "Pattern", "most_set", "position_bits"]

LARGEST_M = 16
"""The largest `m`: a position takes half a byte at the most."""

PACKED_GROUPS = 1 << 14
"""Groups of `m` that are packed together."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """The encoding of `count` elements, a multiple of `m`, of which at most `n` of every `m` are not zero."""

    count: int
    n: int
    m: int

    name: ClassVar[str] = "nm"
    counted: ClassVar[bool] = False
    unit: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 1 <= self.n < self.m <= LARGEST_M or self.count % self.m:
            raise MetadataError(f"{self.count:,} elements cannot be {self.n}:{self.m}")

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.n, self.m)

    @property
    def group(self) -> int:
        return PACKED_GROUPS * self.m

    @property
    def width(self) -> int:
        """Bits of one position."""
        return position_bits(self.m)

    def where_nbytes(self, count: int) -> int:
        return (count // self.m * self.n * self.width + 7) // 8

    def most(self, count: int) -> int:
        return count // self.m * self.n

    def mark(self, dense: Elements) -> Octets:
        if not self._by_octets or len(dense) % 8:
            return self._positions(np.flatnonzero(self._kept(dense)))
        return translate(np.packbits(are_set(dense), bitorder="little"), _tables(self.n, self.m).positions)

    def take(self, dense: Elements) -> Elements:
        if not self._by_octets or len(dense) % 8:
            return taken(dense, self._kept(dense))
        marked = are_set(dense)
        octets = np.packbits(marked, bitorder="little")
        stored = translate(octets, _tables(self.n, self.m).stored)
        if not np.array_equal(stored, octets):
            marked = np.unpackbits(stored, bitorder="little").view(np.bool_)
        values = taken(dense, marked)
        if len(values) != self.most(len(dense)):
            raise self._excess()
        return values

    def count_values(self, dense: Elements) -> int:
        return self.most(len(dense))

    def unpack(self, where: Octets, values: Elements, out: Elements) -> None:
        if self._by_octets and len(out) % 8 == 0:
            # A byte that is no positions is no marks, so that there are too few.
            found = np.flatnonzero(marks_of(translate(where, _tables(self.n, self.m).marks), len(out)))
            if len(found) != len(values):
                raise self._disorder()
            fill(out, found, values)
            return
        each, mask = 8 // self.width, np.uint8((1 << self.width) - 1)
        found = np.empty(len(where) * each, np.uint8)
        for k in range(each):
            np.bitwise_and(where >> np.uint8(k * self.width), mask, out=found[k::each])
        wanted = self.most(len(out))
        if found[wanted:].any():
            raise MetadataError("positions behind the last group")
        found = found[:wanted]
        rising = all(bool((found[k :: self.n] > found[k - 1 :: self.n]).all()) for k in range(1, self.n))
        if not rising or int(found.max(initial=0)) >= self.m:
            raise self._disorder()
        fill(out, found + _origins(self.n, self.m, PACKED_GROUPS)[: len(found)], values)

    @property
    def _by_octets(self) -> bool:
        """Whether the positions in eight elements take one byte (2:4, 2:8): then tables have all there is to know."""
        return 8 % self.m == 0 and self.n * self.width == self.m

    def _kept(self, dense: Elements) -> np.ndarray:
        """Which elements are stored: exactly `n` of each group, its first zeros where it has fewer than that."""
        marked = are_set(dense)
        counts = group_counts(marked, self.m)
        if int(counts.max(initial=0)) > self.n:
            raise self._excess()
        if int(counts.min(initial=self.n)) == self.n:
            return marked
        groups = marked.reshape(-1, self.m)
        rank = np.cumsum(~groups, axis=1, dtype=np.uint8)
        return np.asarray(groups | (rank <= (np.uint8(self.n) - counts)[:, None])).reshape(-1)

    def _positions(self, kept: np.ndarray) -> Octets:
        each = 8 // self.width
        found = np.zeros(-(-len(kept) // each) * each, np.uint8)
        np.subtract(kept, _origins(self.n, self.m, PACKED_GROUPS)[: len(kept)], out=found[: len(kept)], casting="unsafe")
        packed = found[::each].copy()
        for k in range(1, each):
            packed |= found[k::each] << np.uint8(k * self.width)
        return packed

    def _excess(self) -> MetadataError:
        return MetadataError(f"more than {self.n} of {self.m} elements are not zero")

    def _disorder(self) -> MetadataError:
        return MetadataError(f"positions in a group of {self.m} that are outside of it, twice the same, or not in order")


def position_bits(m: int) -> int:
    """Bits of a position among `m`."""
    return 1 if m == 2 else 2 if m <= 4 else 4


def group_counts(marked: np.ndarray, m: int) -> np.ndarray:
    """How many of every `m` booleans are set: sums of columns, since rows are too short for numpy."""
    counts = marked[::m].astype(np.uint8)
    for k in range(1, m):
        counts += marked[k::m]
    return counts


def most_set(marked: np.ndarray, octets: Octets, m: int) -> int:
    """The largest of the counts, from booleans and the same as bits."""
    if len(marked) % 16 or m not in (2, 4, 8, 16):
        return int(group_counts(marked, m).max(initial=0))
    counts = translate(octets, _most_in_octet(min(m, 8)))
    return int((counts[::2] + counts[1::2]).max(initial=0) if m == 16 else counts.max(initial=0))


@lru_cache(maxsize=3)
def _most_in_octet(m: int) -> bytes:
    """For each byte, the largest number of bits in one of its groups of `m`."""
    return bytes(max((octet >> at & (1 << m) - 1).bit_count() for at in range(0, 8, m)) for octet in range(256))


@dataclass(frozen=True, slots=True)
class Tables:
    """What a byte of one kind is as a byte of another, for eight elements whose positions take one byte; 0 where it is nothing."""

    stored: bytes
    """Which elements have bits → which are stored, `n` of each group."""
    positions: bytes
    """Which elements have bits → the positions of those that are stored."""
    marks: bytes
    """Positions → which are stored."""


@lru_cache(maxsize=4)
def _tables(n: int, m: int) -> Tables:
    stored, positions, marks = bytearray(256), bytearray(256), bytearray(256)
    width = m // n
    for octet in range(256):
        groups: list[list[int]] = []
        for at in range(0, 8, m):
            found = [k for k in range(m) if octet >> at + k & 1]
            zeros = [k for k in range(m) if k not in found]
            groups.append(sorted(found + zeros[: max(n - len(found), 0)]))
        if all(len(group) == n for group in groups):
            stored[octet] = sum(1 << g * m + k for g, group in enumerate(groups) for k in group)
            positions[octet] = sum(k << (g * n + i) * width for g, group in enumerate(groups) for i, k in enumerate(group))
            marks[positions[octet]] = stored[octet]
    return Tables(bytes(stored), bytes(positions), bytes(marks))


@lru_cache(maxsize=32)
def _origins(n: int, m: int, groups: int) -> np.ndarray:
    """The first element of each group, `n` times."""
    return np.repeat(np.arange(0, groups * m, m, dtype=np.intp), n)
