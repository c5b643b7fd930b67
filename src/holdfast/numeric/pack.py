"""The encodings of elements of which many are zero: what each offers (`Encoding`), and which one a manifest means.

The elements of a chunk, in C order, are cut into groups of a fixed number; the last may be shorter. Of each group there are

    where     its marks: as many bytes for each full group, so that group i begins at i × that
    values    the elements that are kept, one group behind the other
    starts    how many values lie before each group, and in all: 64-bit integers; not where the number is always the same

so any group can be unpacked alone, from two reads whose places are known.

Elements are worked on as patterns of bits. Zero is the pattern without a bit: minus zero, NaN, infinities and denormals are values
like any other. Branches on random bits cost more than anything else on this path: lists of positions, made from booleans, are
several times as fast as the booleans themselves as an index, in groups that stay in a cache.

A storage that is kept in such parts is a `SparseStorage`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np

from holdfast.core.chunk import Storage
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.errors import MetadataError

Elements = (
    np.ndarray
)  # One dimension of unsigned integers, or of 16-byte records; little-endian as stored.
ByteArray = np.ndarray


def element_type(nbytes: int) -> np.dtype[np.generic]:
    """What an element of so many bytes is worked on as."""
    return np.dtype(f"<u{nbytes}") if nbytes <= 8 else np.dtype(f"V{nbytes}")


def as_bits(values: np.ndarray) -> Elements:
    return values.view(element_type(values.dtype.itemsize))


def are_set(values: Elements) -> np.ndarray:
    """Which elements have any bit, as booleans."""
    if values.dtype.kind == "u":
        return np.asarray(values != 0)
    words = values.view(np.uint64).reshape(values.shape[0], values.dtype.itemsize // 8)
    return np.asarray(np.bitwise_or.reduce(words, axis=1) != 0)


def taken(values: Elements, marked: np.ndarray) -> Elements:
    """The elements that are marked. By positions: a branch for each random bit costs more, and a second thread gains something."""
    return values.take(np.flatnonzero(marked), mode="clip")


def count_set(values: Elements) -> int:
    return int(np.count_nonzero(values if values.dtype.kind == "u" else are_set(values)))


def marks_of(byte_rows: ByteArray, count: int) -> np.ndarray:
    """The first `count` bits as booleans. Raises `MetadataError` where any is set behind them."""
    if count % 8 and byte_rows[-1] >> count % 8:
        raise MetadataError("marks behind the last element of a group")
    return np.unpackbits(byte_rows, count=count, bitorder="little").view(np.bool_)


def fill(out: Elements, positions: np.ndarray, values: Elements) -> None:
    """Make everything zero but the elements at some positions, which are inside. Raises `MetadataError` for another number."""
    if len(positions) != len(values):
        raise unequal(len(positions), len(values))
    out.view(np.uint8)[:] = 0
    out[positions] = values


def unequal(marked: int, values: int) -> MetadataError:
    return MetadataError(
        f"marks for {marked:,} values, and {values:,} values", expected=marked, found=values
    )


def translate(byte_rows: ByteArray, table: bytes) -> ByteArray:
    return np.frombuffer(byte_rows.tobytes().translate(table), np.uint8)


POPULATION = bytes(byte.bit_count() for byte in range(256))


def set_bits(byte_rows: ByteArray) -> int:
    return int(translate(byte_rows, POPULATION).sum(dtype=np.int64))


BITMAP_ELEMENTS = (
    1 << 16
)  # Elements of a group: a slice unpacks hardly more than it needs, and all stays in a cache.


class Bitmap(Value, frozen=True):
    """The encoding of `count` elements by a bit each.

        elements   a 0 0 b 0 0 0 0 │ 0 c …        groups of 65,536
        where      0b00001001      │ 0b…10        the first element in the lowest bit
        values     a b c …

    The bits behind the last element are zero. The members are described here for all encodings.
    """

    count: int
    name: ClassVar[str] = "bitmap"
    counted: ClassVar[bool] = (
        True  # Whether groups have different numbers of values, so that there are `starts`.
    )
    unit: ClassVar[int] = 1  # Values come in multiples of this.

    @property
    def sizes(self) -> tuple[int, ...]:
        """What the manifest has to say of it beside its name."""
        return ()

    @property
    def group(self) -> int:
        """Elements of a full group."""
        return BITMAP_ELEMENTS

    def where_nbytes(self, count: int) -> int:
        """Bytes of the marks of a group of `count` elements."""
        return (count + 7) // 8

    def most(self, count: int) -> int:
        """Values that a group of `count` elements has at the most."""
        return count

    def mark(self, dense: Elements) -> ByteArray:
        """The marks of one group; of several where those of a full one fill bytes."""
        return np.packbits(are_set(dense), bitorder="little")

    def take(self, dense: Elements) -> Elements:
        """The values of one group, or of several. Raises `MetadataError` where its elements cannot be stored in this way."""
        return taken(dense, are_set(dense))

    def count_values(self, dense: Elements) -> int:
        """How many values `take` gives."""
        return count_set(dense)

    def unpack(self, where: ByteArray, values: Elements, out: Elements) -> None:
        """Fill `out` with the elements of one group. Raises `MetadataError` for marks that are none, or not for these values."""
        fill(out, np.flatnonzero(marks_of(where, len(out))), values)


BLOCKS_ELEMENTS = 1 << 17  # Elements that a group of bands has if it can.
BAND_ELEMENTS = (
    1 << 20
)  # Elements of the largest band: what has to be unpacked for one of its elements.
GROUP_ROWS = 64  # Rows that a group has at the least, as long as they fit: blocks up to this height then have groups of one size.


def group_rows(columns: int) -> int:
    """Rows of a group, before it is made a multiple of the block's height: a power of two, or 0 where rows are too long."""
    rows = max(BLOCKS_ELEMENTS // columns, min(GROUP_ROWS, BAND_ELEMENTS // columns))
    return 1 << (rows.bit_length() - 1) if rows else 0


class Blocks(Value, frozen=True):
    """The encoding of a matrix by blocks of `height` × `width`.

        the tensor as a matrix, its first axis by all others; blocks of 2 × 2

        a b │ 0 0 │ e        where      0b101 for this band of blocks, padded to whole bytes behind each group of bands
        c d │ 0 0 │ 0        values     a b c d  e 0 0 0        each block in C order; what lies beyond the edge is zero

    The bits behind the last block of a group are zero.
    """

    rows: int
    columns: int
    height: int
    width: int
    name: ClassVar[str] = "block"
    counted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if (
            not (1 <= self.height <= self.rows and 1 <= self.width <= self.columns)
            or self.height * self.columns > BAND_ELEMENTS
        ):
            shape = f"{self.rows:,} × {self.columns:,}"
            raise MetadataError(
                f"blocks of {self.height:,} × {self.width:,} do not fit a matrix of {shape}"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.height, self.width)

    @property
    def count(self) -> int:
        return self.rows * self.columns

    @property
    def unit(self) -> int:
        return self.height * self.width

    @property
    def group(self) -> int:
        return max(group_rows(self.columns) // self.height, 1) * self.height * self.columns

    def where_nbytes(self, count: int) -> int:
        return (self._bits(count) + 7) // 8

    def most(self, count: int) -> int:
        return self._bits(count) * self.unit

    def mark(self, dense: Elements) -> ByteArray:
        return np.packbits(self._marked(self._blocks(self._padded(dense))), bitorder="little")

    def take(self, dense: Elements) -> Elements:
        blocks = self._blocks(self._padded(dense))
        return np.asarray(blocks[self._marked(blocks)]).reshape(-1)

    def count_values(self, dense: Elements) -> int:
        return int(np.count_nonzero(self._marked(self._blocks(self._padded(dense))))) * self.unit

    def unpack(self, where: ByteArray, values: Elements, out: Elements) -> None:
        bits = self._bits(len(out))
        bands = bits // self._across
        marked = marks_of(where, bits).reshape(bands, self._across)
        wanted = int(np.count_nonzero(marked)) * self.unit
        if wanted != len(values):
            raise unequal(wanted, len(values))
        even = len(out) == bits * self.unit
        grid = out if even else np.empty(bits * self.unit, out.dtype)
        grid.view(np.uint8)[:] = 0
        self._blocks(grid.reshape(bands * self.height, -1))[marked] = values.reshape(
            -1, self.height, self.width
        )
        if not even:
            placed = out.reshape(-1, self.columns)
            placed[...] = grid.reshape(bands * self.height, -1)[: len(placed), : self.columns]

    @property
    def _across(self) -> int:
        return -(-self.columns // self.width)

    def _bits(self, count: int) -> int:
        return -(-count // (self.columns * self.height)) * self._across

    def _padded(self, dense: Elements) -> np.ndarray:
        matrix = dense.reshape(-1, self.columns)
        height, width = -len(matrix) % self.height, -self.columns % self.width
        if not height and not width:
            return matrix
        padded = np.zeros((len(matrix) + height, self.columns + width), matrix.dtype)
        padded[: len(matrix), : self.columns] = matrix
        return padded

    def _blocks(self, matrix: np.ndarray) -> np.ndarray:
        """A matrix of whole blocks as a band of them a row: four dimensions over the same memory."""
        bands = len(matrix) // self.height
        return matrix.reshape(bands, self.height, self._across, self.width).transpose(0, 2, 1, 3)

    def _marked(self, blocks: np.ndarray) -> np.ndarray:
        """Which blocks are not all zeros. Rows of a block are looked at in the widest words that divide them."""
        rows = blocks.transpose(0, 2, 1, 3)
        nbytes = self.width * rows.dtype.itemsize
        wide = next(word for word in (8, 4, 2, 1) if nbytes % word == 0)
        words = rows.reshape(-1).view(f"<u{wide}").reshape(*rows.shape[:3], nbytes // wide)
        joined = np.bitwise_or.reduce(np.bitwise_or.reduce(words, axis=1), axis=-1)
        return are_set(joined.reshape(-1)).reshape(joined.shape)


LARGEST_M = 16  # The largest `m`: a position takes half a byte at the most.
PACKED_GROUPS = 1 << 14


class Pattern(Value, frozen=True):
    """The encoding of `count` elements, a multiple of `m`, of which at most `n` of every `m` are not zero.

        elements   0 a b 0 │ c 0 0 0          2:4
        where      1 2       0 1              the positions, rising; 1, 2 or 4 bits each, the first in the lowest bits
        values     a b       c 0              as many for each group: a group with fewer has zeros among them

    Every place follows from arithmetic, so there is nothing to count and nothing to look up.
    """

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
        return position_bits(self.m)

    def where_nbytes(self, count: int) -> int:
        return (count // self.m * self.n * self.width + 7) // 8

    def most(self, count: int) -> int:
        return count // self.m * self.n

    def mark(self, dense: Elements) -> ByteArray:
        if not self._by_bytes or len(dense) % 8:
            return self._positions(np.flatnonzero(self._kept(dense)))
        return translate(
            np.packbits(are_set(dense), bitorder="little"), _tables(self.n, self.m).positions
        )

    def take(self, dense: Elements) -> Elements:
        if not self._by_bytes or len(dense) % 8:
            return taken(dense, self._kept(dense))
        marked = are_set(dense)
        byte_rows = np.packbits(marked, bitorder="little")
        stored = translate(byte_rows, _tables(self.n, self.m).stored)
        if not np.array_equal(stored, byte_rows):
            marked = np.unpackbits(stored, bitorder="little").view(np.bool_)
        values = taken(dense, marked)
        if len(values) != self.most(len(dense)):
            raise self._excess()
        return values

    def count_values(self, dense: Elements) -> int:
        return self.most(len(dense))

    def unpack(self, where: ByteArray, values: Elements, out: Elements) -> None:
        if self._by_bytes and len(out) % 8 == 0:
            # A byte that is no positions is no marks, so that there are too few.
            found = np.flatnonzero(
                marks_of(translate(where, _tables(self.n, self.m).marks), len(out))
            )
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
        rising = all(
            bool((found[k :: self.n] > found[k - 1 :: self.n]).all()) for k in range(1, self.n)
        )
        if not rising or int(found.max(initial=0)) >= self.m:
            raise self._disorder()
        fill(out, found + _origins(self.n, self.m, PACKED_GROUPS)[: len(found)], values)

    @property
    def _by_bytes(self) -> bool:
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

    def _positions(self, kept: np.ndarray) -> ByteArray:
        each = 8 // self.width
        found = np.zeros(-(-len(kept) // each) * each, np.uint8)
        np.remainder(kept, self.m, out=found[: len(kept)], casting="unsafe")
        packed = found[::each].copy()
        for k in range(1, each):
            packed |= found[k::each] << np.uint8(k * self.width)
        return packed

    def _excess(self) -> MetadataError:
        return MetadataError(f"more than {self.n} of {self.m} elements are not zero")

    def _disorder(self) -> MetadataError:
        return MetadataError(
            f"positions in a group of {self.m} that are outside of it, twice the same, or not in order"
        )


def position_bits(m: int) -> int:
    return 1 if m == 2 else 2 if m <= 4 else 4


def group_counts(marked: np.ndarray, m: int) -> np.ndarray:
    """How many of every `m` booleans are set: sums of columns, since rows are too short for numpy."""
    counts = marked[::m].astype(np.uint8)
    for k in range(1, m):
        counts += marked[k::m]
    return counts


def most_set(marked: np.ndarray, byte_rows: ByteArray, m: int) -> int:
    """The largest of the counts, from booleans and the same as bits."""
    if len(marked) % 16 or m not in (2, 4, 8, 16):
        return int(group_counts(marked, m).max(initial=0))
    counts = translate(byte_rows, _most_in_byte(min(m, 8)))
    return int((counts[::2] + counts[1::2]).max(initial=0) if m == 16 else counts.max(initial=0))


@lru_cache(maxsize=3)
def _most_in_byte(m: int) -> bytes:
    """For each byte, the largest number of bits in one of its groups of `m`."""
    return bytes(
        max((byte >> at & (1 << m) - 1).bit_count() for at in range(0, 8, m)) for byte in range(256)
    )


class Tables(Value, frozen=True):
    """What a byte of one kind is as a byte of another, for eight elements whose positions take one byte; 0 where it is nothing."""

    stored: bytes  # Which elements have bits → which are stored, `n` of each group.
    positions: bytes  # Which elements have bits → the positions of those that are stored.
    marks: bytes  # Positions → which are stored.


@lru_cache(maxsize=4)
def _tables(n: int, m: int) -> Tables:
    stored, positions, marks = bytearray(256), bytearray(256), bytearray(256)
    width = m // n
    for byte in range(256):
        groups: list[list[int]] = []
        for at in range(0, 8, m):
            found = [k for k in range(m) if byte >> at + k & 1]
            zeros = [k for k in range(m) if k not in found]
            groups.append(sorted(found + zeros[: max(n - len(found), 0)]))
        if all(len(group) == n for group in groups):
            stored[byte] = sum(1 << g * m + k for g, group in enumerate(groups) for k in group)
            positions[byte] = sum(
                k << (g * n + i) * width
                for g, group in enumerate(groups)
                for i, k in enumerate(group)
            )
            marks[positions[byte]] = stored[byte]
    return Tables(bytes(stored), bytes(positions), bytes(marks))


@lru_cache(maxsize=32)
def _origins(n: int, m: int, groups: int) -> np.ndarray:
    return np.repeat(np.arange(0, groups * m, m, dtype=np.intp), n)


Encoding = Bitmap | Blocks | Pattern


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
    return -(-encoding.count // encoding.group)


def spread(encoding: Encoding, group: int) -> int:
    """Elements of a group: all have the same number but the last."""
    return min(encoding.group, encoding.count - group * encoding.group)


def where_total(encoding: Encoding) -> int:
    last = group_count(encoding) - 1
    return last * encoding.where_nbytes(encoding.group) + encoding.where_nbytes(
        spread(encoding, last)
    )


class SparseStorage(Storage, frozen=True, kw_only=True, eq=False):
    """The dense bytes of one chunk, under a key that is no file and no other chunk's; `crc32` and `nbytes` are theirs."""

    encoding: Encoding
    width: int
    values: Storage
    where: Storage
    starts: Storage | None = None

    @property
    def parts(self) -> tuple[Storage, ...]:
        return tuple(part for part in (self.values, self.where, self.starts) if part is not None)

    @property
    def ranges(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(found for part in self.parts for found in part.ranges)

    @property
    def stored_nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class SparseParts(Value, frozen=True):
    """A tensor that is to be stored packed: what is written in its place."""

    encoding: Encoding
    crc32: int  # Of the dense elements.
    values: LazyTensor
    where: LazyTensor
    starts: LazyTensor | None


class Packing(Value, frozen=True):
    """How a tensor is stored, for people."""

    text: str  # `bitmap`, `2:4`, `16x16`; several where its chunks differ.
    stored_nbytes: int  # What it takes, chunks that are not packed included.


def packing_of(tensor: LazyTensor) -> Packing | None:
    """How a tensor is packed, or None where it lies as it is."""
    if tensor.file_range() is not None:
        return None
    texts: dict[str, None] = {}
    stored = 0
    for storage in tensor.storages:
        if isinstance(storage, SparseStorage):
            texts[_named(storage.encoding)] = None
            stored += storage.stored_nbytes
        else:
            stored += storage.nbytes
    return Packing("/".join(texts), stored) if texts else None


def _named(encoding: Encoding) -> str:
    return {"nm": ":", "block": "x"}.get(encoding.name, "").join(
        map(str, encoding.sizes)
    ) or encoding.name
