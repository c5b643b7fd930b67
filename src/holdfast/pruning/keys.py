"""The keys by which pruning orders elements and blocks, made in pieces when they are asked for.

What a key is stands in `order.py`; here they are made with numpy, as unsigned integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.sparse.encoding import matrix_shape
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.computed import read_flat
from holdfast.pruning.order import INFINITY_BITS, SPLITMIX, nan_key

__all__ = [
    "ORDERS",
    "PIECE_ELEMENTS",
    "BlockScores",
    "Keys",
    "Magnitudes",
    "RandomOrder",
    "common_order",
    "magnitude_keys",
    "pieces",
    "random_keys",
    "top_counts",
]

PIECE_ELEMENTS = 1 << 19
"""Elements at a time: 4 MiB as 64-bit numbers. With fewer, threads wait for each other's turn at the interpreter; more only take
memory."""

RUN_KEYS = 1 << 15
"""Keys at a time: a dozen steps over 256 KiB that stay in the cache."""

TOP_BITS = 15
"""Of a key, the bits by which the first histogram counts: all but the sign of the upper two bytes of a float."""

ORDERS: dict[str, tuple[np.dtype[Any], np.dtype[Any]]] = {
    "float16": (np.dtype(np.float16), np.dtype(np.uint16)),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint16)),
    "float32": (np.dtype(np.float32), np.dtype(np.uint32)),
    "float64": (np.dtype(np.float64), np.dtype(np.uint64)),
}
"""Name of a float to its numpy dtype, and the integers that hold its bits."""

STEP, *FACTORS = map(np.uint64, SPLITMIX)

CERTAIN_DEVIATIONS = 8.0
"""Standard deviations within which the threshold of random keys is looked for; outside of them, which no seed will see, it is found
as any other."""


def magnitude_keys(values: np.ndarray, order: str) -> np.ndarray:
    """The order of absolute values, as the bits of a float that holds them all."""
    floats, bits = ORDERS[order]
    with np.errstate(invalid="ignore"):  # a signalling NaN that is widened
        keys: np.ndarray = values.astype(floats, copy=False).view(bits) & bits.type((1 << (8 * bits.itemsize - 1)) - 1)
    if keys.size and keys.max() > INFINITY_BITS[order]:  # to look costs a tenth of the minimum
        np.minimum(keys, bits.type(nan_key(order)), out=keys)
    return keys


def top_counts(values: np.ndarray, order: str) -> Ints:
    """How many there are by the upper 15 bits of their keys, without making the keys; of floats up to 32 bits.

    >>> np.flatnonzero(top_counts(np.array([1.0, -1.0, np.nan], np.float16), "float16")).tolist()  # 0x3C00, and the key of NaN
    [15360, 31745]
    """
    floats, bits = ORDERS[order]
    with np.errstate(invalid="ignore"):  # a signalling NaN that is widened
        own = values.astype(floats, copy=False)
    counts = np.bincount(own.view("<u2")[bits.itemsize // 2 - 1 :: bits.itemsize // 2], minlength=2 << TOP_BITS)
    counts = counts[: 1 << TOP_BITS] + counts[1 << TOP_BITS :]
    last = nan_key(order) >> (8 * bits.itemsize - 1 - TOP_BITS)
    counts[last] += counts[last + 1 :].sum()
    counts[last + 1 :] = 0
    return counts


def random_keys(start: int, stop: int, seed: int) -> np.ndarray:
    """The keys of elements `start` to `stop` of a random order.

    >>> random_keys(0, 2, 0).tolist()
    [8147104208329303767, 3980143261097177850]
    """
    keys = np.empty(stop - start, np.uint64)
    spare = np.empty(min(RUN_KEYS, len(keys)), np.uint64)
    for at in range(0, len(keys), RUN_KEYS):
        x = keys[at : at + RUN_KEYS]
        shifted = spare[: len(x)]
        first = ((start + at + 1) * int(STEP) + seed) % (1 << 64)
        np.add(_multiples()[: len(x)], np.uint64(first), out=x)
        for shift, factor in zip((30, 27), FACTORS, strict=True):
            np.right_shift(x, np.uint64(shift), out=shifted)
            np.bitwise_xor(x, shifted, out=x)
            np.multiply(x, factor, out=x)
        np.right_shift(x, np.uint64(31), out=shifted)
        np.bitwise_xor(x, shifted, out=x)
        np.right_shift(x, np.uint64(1), out=x)
    return keys


@cache
def _multiples() -> np.ndarray:
    """0, 1, 2, … times SplitMix64's step."""
    made: np.ndarray = np.arange(RUN_KEYS, dtype=np.uint64) * STEP
    return made


def common_order(dtypes: Sequence[str]) -> str:
    """The narrowest float that holds every value of these."""
    kinds = set(dtypes)
    return kinds.pop() if len(kinds) == 1 else "float64" if "float64" in kinds else "float32"


class Keys(Protocol):
    """The keys of one tensor."""

    @property
    def count(self) -> int:
        """How many there are."""

    @property
    def width(self) -> int:
        """Bits of a key."""

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Ranges that can be read at a time, in order."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """The keys of one of these ranges."""

    def steps(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """The same, in parts that stay in a cache, in order."""

    def tops(self, start: int, stop: int) -> Ints | None:
        """How many keys of one of these ranges there are by their upper 15 bits, where that is quicker than to make them."""

    def around(self, count: int) -> tuple[int, int] | None:
        """A range of keys that holds the `count`-th lowest almost surely, where that is known without a look."""


def pieces(count: int, align: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges that cover `count` elements and begin at multiples of `align`."""
    step = max(PIECE_ELEMENTS // align, 1) * align
    return ((start, min(start + step, count)) for start in range(0, count, step))


class Magnitudes(Value, frozen=True):
    """The keys of a tensor's elements by their absolute values."""

    tensor: LazyTensor
    order: str

    @property
    def count(self) -> int:
        return self.tensor.size

    @property
    def width(self) -> int:
        return 8 * ORDERS[self.order][1].itemsize - 1

    @property
    def most(self) -> int:
        """The largest key, of every NaN."""
        return nan_key(self.order)

    def pieces(self) -> Iterator[tuple[int, int]]:
        return pieces(self.count)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.of(read_flat(self.tensor, start, stop), start)

    def steps(self, start: int, stop: int) -> Iterator[np.ndarray]:
        values = read_flat(self.tensor, start, stop)
        return (self.of(values[at : at + RUN_KEYS], start + at) for at in range(0, len(values), RUN_KEYS))

    def tops(self, start: int, stop: int) -> Ints | None:
        return top_counts(read_flat(self.tensor, start, stop), self.order) if self.width < 32 else None

    def of(self, values: np.ndarray, start: int) -> np.ndarray:
        """The keys of values that were read."""
        return magnitude_keys(values, self.order)

    def around(self, count: int) -> None:
        return None


class RandomOrder(Value, frozen=True):
    """Keys that know nothing of the values."""

    count: int
    seed: int
    width = 63

    def pieces(self) -> Iterator[tuple[int, int]]:
        return pieces(self.count)

    def read(self, start: int, stop: int) -> np.ndarray:
        return random_keys(start, stop, self.seed)

    def steps(self, start: int, stop: int) -> Iterator[np.ndarray]:
        return (random_keys(at, min(at + RUN_KEYS, stop), self.seed) for at in range(start, stop, RUN_KEYS))

    def tops(self, start: int, stop: int) -> None:
        return None

    def of(self, values: np.ndarray, start: int) -> np.ndarray:
        """The keys of values that were read."""
        return random_keys(start, start + len(values), self.seed)

    def around(self, count: int) -> tuple[int, int]:
        part = count / self.count
        apart = CERTAIN_DEVIATIONS * math.sqrt(part * (1 - part) / self.count) + 1 / self.count
        most = 1 << self.width
        return max(int((part - apart) * most), 0), min(int((part + apart) * most), most)


class BlockScores(Value, frozen=True):
    """The keys of a tensor's blocks, by the mean square of the elements that each has, summed one after the other in float64."""

    tensor: LazyTensor
    height: int
    width_of_block: int
    width = 63

    @property
    def grid(self) -> tuple[int, int]:
        """How many blocks there are below and beside each other."""
        rows, columns = matrix_shape(self.tensor.shape)
        return -(-rows // self.height), -(-columns // self.width_of_block)

    @property
    def count(self) -> int:
        return math.prod(self.grid)

    def around(self, count: int) -> None:
        return None

    def tops(self, start: int, stop: int) -> None:
        return None

    def steps(self, start: int, stop: int) -> Iterator[np.ndarray]:
        yield self.read(start, stop)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Whole rows of blocks, or parts of one that begin at multiples of eight, so that their bits fill bytes."""
        down, across = self.grid
        size = self.height * self.width_of_block
        if not self.count:
            return
        if across * size <= PIECE_ELEMENTS:
            step = max(PIECE_ELEMENTS // (across * size), 1) * across
            yield from ((start, min(start + step, self.count)) for start in range(0, self.count, step))
            return
        step = max(PIECE_ELEMENTS // size // 8, 1) * 8
        for row in range(down):
            yield from ((row * across + at, row * across + min(at + step, across)) for at in range(0, across, step))

    def read(self, start: int, stop: int) -> np.ndarray:
        across = self.grid[1]
        rows, columns = matrix_shape(self.tensor.shape)
        top, left = divmod(start, across)
        bottom, right = (stop - 1) // across + 1, (stop - 1) % across + 1
        left, right = (left, right) if bottom - top == 1 else (0, across)
        first, last = top * self.height, min(bottom * self.height, rows)
        begin, end = left * self.width_of_block, min(right * self.width_of_block, columns)
        if (begin, end) == (0, columns):
            values = read_flat(self.tensor, first * columns, last * columns).reshape(last - first, columns)
        else:
            values = np.stack([read_flat(self.tensor, r * columns + begin, r * columns + end) for r in range(first, last)])
        return magnitude_keys(mean_squares(values, self.height, self.width_of_block).reshape(-1), "float64")


def mean_squares(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """The mean square of every block of a matrix, those at its edges smaller; squares are added row by row, one after the other.

    >>> mean_squares(np.array([[1.0, 2.0, 3.0], [1.0, 0.0, 5.0]]), 2, 2).tolist()
    [[1.5, 17.0]]
    """
    rows, columns = values.shape
    # All rows together: the parts of a step would be so short that numpy's calls take longer than what they do.
    with np.errstate(all="ignore"):
        squares = values.astype(np.float64)
        np.multiply(squares, squares, out=squares)
        sums = np.zeros((-(-rows // height), -(-columns // width)))
        for row in range(min(height, rows)):
            for column in range(min(width, columns)):
                part = squares[row::height, column::width]
                sums[: part.shape[0], : part.shape[1]] += part
        down = np.minimum(height, rows - np.arange(0, rows, height))
        across = np.minimum(width, columns - np.arange(0, columns, width))
        sums /= down[:, None] * across
    return sums
