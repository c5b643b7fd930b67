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
import numpy.typing as npt

from holdfast.core.arrays import Bools, Ints
from holdfast.core.halves import as_float32, as_float64
from holdfast.core.sparse.encoding import matrix_shape
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.computed import read_flat
from holdfast.engine.threads import computing
from holdfast.pruning.order import INFINITY_BITS, SPLITMIX, nan_key

PIECE_ELEMENTS = 1 << 19
"""Elements at a time: 4 MiB as 64-bit numbers. With fewer, threads wait for each other's turn at the interpreter; more only take
memory."""

RUN_KEYS = 1 << 17
"""Keys at a time: a dozen steps over 1 MiB, in calls so long that threads do not wait for each other's turn at the interpreter."""

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
"""Standard deviations within which the threshold of random keys is looked for; no seed will see one outside of them."""


def magnitude_keys(values: np.ndarray, order: str) -> np.ndarray:
    """The order of absolute values, as the bits of a float that holds them all."""
    bits = ORDERS[order][1]
    keys: np.ndarray = _own(values, order).view(bits) & bits.type((1 << (8 * bits.itemsize - 1)) - 1)
    if keys.size and keys.max() > INFINITY_BITS[order]:  # to look costs a tenth of the minimum
        np.minimum(keys, bits.type(nan_key(order)), out=keys)
    return keys


def _own(values: np.ndarray, order: str) -> np.ndarray:
    """Floats as those whose bits are the keys."""
    floats = ORDERS[order][0]
    if values.dtype == floats:
        return values
    with np.errstate(invalid="ignore"):  # a signalling NaN that is widened
        return as_float32(values) if floats == np.float32 else as_float64(values)


def top_counts(values: np.ndarray, order: str) -> Ints:
    """How many there are by the upper 15 bits of their keys, without making the keys; of floats up to 32 bits.

    >>> np.flatnonzero(top_counts(np.array([1.0, -1.0, np.nan], np.float16), "float16")).tolist()  # 0x3C00, and the key of NaN
    [15360, 31745]
    """
    bits = ORDERS[order][1]
    tops = _own(values, order).view("<u2")[bits.itemsize // 2 - 1 :: bits.itemsize // 2]
    counts = np.bincount(tops, minlength=2 << TOP_BITS)
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
    for at in range(0, len(keys), RUN_KEYS):
        run = keys[at : at + RUN_KEYS]
        run[:] = _finished(_mixed(start + at, start + at + len(run), seed))
    return keys


def _mixed(start: int, stop: int, seed: int) -> np.ndarray:
    """SplitMix64 of at most `RUN_KEYS` elements without its last step, which leaves the upper 31 bits as they are.

    Those are all but sure to say whether a key is below another; so the last step is taken for the few that are left.
    """
    x = _multiples()[: stop - start] + np.uint64(((start + 1) * int(STEP) + seed) % (1 << 64))
    shifted = np.empty_like(x)
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        np.right_shift(x, np.uint64(shift), out=shifted)
        np.bitwise_xor(x, shifted, out=x)
        np.multiply(x, factor, out=x)
    return x


LAST_SHIFT = 31

TOLD_BITS = LAST_SHIFT
"""Upper bits of a key that the last step does not change, and by which keys are told apart before it."""


def _finished(mixed: np.ndarray) -> np.ndarray:
    """The keys, of 63 bits."""
    keys = mixed >> np.uint64(LAST_SHIFT)
    np.bitwise_xor(keys, mixed, out=keys)
    np.right_shift(keys, np.uint64(1), out=keys)
    return keys


def _reach(mixed: np.ndarray, key: int, out: Bools) -> None:
    """Which of the keys that are yet to be finished are this one or above it."""
    unsure = 64 - TOLD_BITS
    low = key >> (unsure - 1) << unsure
    high = low + (1 << unsure)
    if low >> 64:
        out[:] = False
        return
    np.greater_equal(mixed, np.uint64(low), out=out)
    above = mixed > np.uint64(high - 1)
    if np.count_nonzero(above) < np.count_nonzero(out):
        some = np.flatnonzero(out ^ above)
        out[some] = _finished(mixed[some]) >= np.uint64(key)


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

    def count_by(self, start: int, stop: int, bits: KeyBits) -> Ints:
        """How many keys of one of these ranges there are by some of their bits."""


class KeyBits(Value, frozen=True):
    """Which keys are counted by which of their bits: those whose bits from `known` upwards are `prefix`, by the next ones."""

    prefix: int
    known: int
    shift: int
    """The lowest of the bits that they are counted by."""

    def begin(self, keys: np.ndarray, width: int) -> np.ndarray:
        """The keys, of so many bits, that begin with the prefix."""
        return keys if self.known == width else keys[(keys >> keys.dtype.type(self.known)) == self.prefix]

    def count(self, keys: np.ndarray, width: int) -> Ints:
        """How many of these keys there are by their next bits."""
        low, bins = self.begin(keys, width), 1 << (self.known - self.shift)
        if self.shift:
            low = low >> low.dtype.type(self.shift)
        if self.known < width:
            low = low & low.dtype.type(bins - 1)
        return np.bincount(low.astype(np.int64), minlength=bins)


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
        values = read_flat(self.tensor, start, stop)
        with computing():
            return self.of(values, start)

    def steps(self, start: int, stop: int) -> Iterator[np.ndarray]:
        values = read_flat(self.tensor, start, stop)
        return (self.of(values[at : at + RUN_KEYS], start + at) for at in range(0, len(values), RUN_KEYS))

    def count_by(self, start: int, stop: int, bits: KeyBits) -> Ints:
        if bits.known < self.width or self.width > 32:
            return bits.count(self.read(start, stop), self.width)
        values = read_flat(self.tensor, start, stop)
        with computing():
            return top_counts(values, self.order)  # the upper bytes of floats are enough

    def of(self, values: np.ndarray, start: int) -> np.ndarray:
        """The keys of values that were read."""
        return magnitude_keys(values, self.order)

    def reach(self, values: np.ndarray, start: int, key: int, *, out: Bools) -> None:
        """Which of values that were read have this key or one above it."""
        np.greater_equal(self.of(values, start), key, out=out)


class Parted(Value, frozen=True, eq=False):
    """Keys of a random order, on both sides of a range of keys and in it."""

    below: int
    """How many are below the range."""
    places: Ints
    """The indices of those in it."""
    keys: np.ndarray
    """These keys."""
    bits: npt.NDArray[np.uint8]
    """A bit for each, the first in the lowest bit; set for those above the range."""


class RandomOrder(Value, frozen=True):
    """Keys of 63 bits that know nothing of the values.

    So a threshold is known well enough to take out the keys around it at once.
    """

    count: int
    seed: int

    def reach(self, values: np.ndarray, start: int, key: int, *, out: Bools) -> None:
        """Which of values that were read have this key or one above it."""
        for at in range(0, len(values), RUN_KEYS):
            part = out[at : at + RUN_KEYS]
            _reach(_mixed(start + at, start + at + len(part), self.seed), key, part)

    def around(self, count: int, tries: int = 0) -> tuple[int, int]:
        """A range of keys that holds the `count`-th lowest almost surely; a wider one where it was not in so many."""
        part = count / self.count
        # Near the ends keys are few, and so far apart as their number says.
        deviation = math.sqrt(part * (1 - part) / self.count) + 4 / self.count
        apart = (CERTAIN_DEVIATIONS + tries) * 2**tries * deviation + 1 / self.count
        # Ends that the bits tell apart which are known first.
        most, unit = 1 << TOLD_BITS, 1 << (63 - TOLD_BITS)
        return max(int((part - apart) * most), 0) * unit, min(int((part + apart) * most) + 1, most) * unit

    def part(self, start: int, stop: int, low: int, *, high: int) -> Parted:
        """The keys of one of these ranges as those below, in and above [low, high), whose ends `around` has given."""
        kept = np.empty(stop - start, np.bool_)
        below, places, some = 0, [], []
        with computing():
            for at in range(start, stop, RUN_KEYS):
                mixed = _mixed(at, min(at + RUN_KEYS, stop), self.seed)
                own = kept[at - start : at - start + len(mixed)]
                np.greater_equal(mixed, np.uint64(2 * low), out=own)
                below += len(own) - int(np.count_nonzero(own))
                # One comparison for both ends: what is below wraps around.
                np.subtract(mixed, np.uint64(2 * low), out=mixed)
                inside = np.flatnonzero(mixed <= np.uint64(2 * (high - low) - 1))
                own[inside] = False
                some.append(_finished(mixed.take(inside) + np.uint64(2 * low)))
                places.append(inside + at)
            return Parted(below, np.concatenate(places), np.concatenate(some), np.packbits(kept, bitorder="little"))


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

    def count_by(self, start: int, stop: int, bits: KeyBits) -> Ints:
        return bits.count(self.read(start, stop), self.width)

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
        with computing():
            return magnitude_keys(mean_squares(values, self.height, self.width_of_block).reshape(-1), "float64")


def mean_squares(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """The mean square of every block of a matrix, those at its edges smaller; squares are added row by row, one after the other.

    >>> mean_squares(np.array([[1.0, 2.0, 3.0], [1.0, 0.0, 5.0]]), 2, 2).tolist()
    [[1.5, 17.0]]
    """
    rows, columns = values.shape
    height, width = min(height, rows), min(width, columns)
    down, across = -(-rows // height), -(-columns // width)
    if values.shape != (down * height, across * width):
        whole = np.zeros((down * height, across * width), values.dtype)
        whole[:rows, :columns] = values  # zeros behind the edge add nothing
        values = whole
    # The elements of one place in all blocks, side by side: numpy has vectors only for those, and few calls that are long.
    places = np.ascontiguousarray(values.reshape(down, height, across, width).transpose(1, 3, 0, 2))
    sums = np.zeros(down * across)
    with np.errstate(all="ignore"):
        squares = as_float64(places.reshape(-1))
        np.multiply(squares, squares, out=squares)
        for part in squares.reshape(-1, len(sums)):
            sums += part
        heights = np.minimum(height, rows - np.arange(0, rows, height))
        widths = np.minimum(width, columns - np.arange(0, columns, width))
        means: np.ndarray = sums.reshape(down, across) / (heights[:, None] * widths)
    return means
