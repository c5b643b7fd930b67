"""The order of pruning, and the search for a threshold: for files (`pruning/select.py`) and for models (`torch/sparsity/order.py`).

1. Every element (or block) has a key, an integer; the lowest key goes first. Of equal keys the lowest index goes first, and over
   several tensors the first tensor. So a mask depends on nothing but the values, on every device.
2. The key of a magnitude is the bits of the absolute value, which are in the order of the numbers. -0.0 is 0.0. All NaN are equal
   and come last (`nan_key`): what is broken is not hidden.
3. The key of a random order is SplitMix64 of a seed and the index, without its lowest bit.
4. The part of a level is the nearest whole number (`pruned_count`).
5. The n-th lowest key is found from histograms of 16 more bits at a time (`search`), until few keys are left to sort.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.value import Value

INFINITY_BITS = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F80_0000,
    "float64": 0x7FF0_0000_0000_0000,
}
"""The key of infinity, by the float whose bits are the keys."""

SPLITMIX = (
    0x9E37_79B9_7F4A_7C15,
    0xBF58_476D_1CE4_E5B9,
    0x94D0_49BB_1331_11EB,
)  # Step and factors (Steele, Lea, Flood, 2014).
SORTED_KEYS = 1 << 20  # As many keys as are held and sorted directly: 8 MiB.

SHIFTS = {15: (0,), 31: (16, 0), 63: (47, 31, 15, 0), 64: (47, 31, 15, 0)}
"""By the bits of keys: the bits below those that each histogram counts by."""

RUN_KEYS = 1 << 17  # Keys at a time: a dozen steps over 1 MiB, in calls long enough for threads.

ORDERS: dict[str, tuple[np.dtype[Any], np.dtype[Any]]] = {
    "float16": (np.dtype(np.float16), np.dtype(np.uint16)),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint16)),
    "float32": (np.dtype(np.float32), np.dtype(np.uint32)),
    "float64": (np.dtype(np.float64), np.dtype(np.uint64)),
}
"""Name of a float to its numpy dtype, and the integers that hold its bits."""

STEP, *FACTORS = map(np.uint64, SPLITMIX)


def nan_key(order: str) -> int:
    """The key of every NaN: above infinity, and above everything else."""
    return INFINITY_BITS[order] + 1


def pruned_count(level: float, count: int) -> int:
    """How many of `count` are pruned: rounded, half to even, and never all of them unless the level is 1.

    >>> pruned_count(0.5, 5), pruned_count(0.9, 4), pruned_count(1, 4)
    (2, 3, 4)
    """
    return count if level == 1 else max(0, min(round(level * count), count - 1))


class KeyBits(Value, frozen=True):
    """Which keys are counted by which of their bits: those whose bits from `known` upwards are `prefix`, by the next ones."""

    prefix: int
    known: int
    shift: int  # The lowest of the bits that they are counted by; `known` where the keys themselves are wanted.

    @property
    def taken(self) -> bool:
        """Whether the keys themselves are wanted, as few are left."""
        return self.shift == self.known

    def begin(self, keys: np.ndarray, width: int) -> np.ndarray:
        """The keys, of so many bits, that begin with the prefix."""
        return (
            keys
            if self.known == width
            else keys[(keys >> keys.dtype.type(self.known)) == self.prefix]
        )

    def count(self, keys: np.ndarray, width: int) -> Ints:
        low, bins = self.begin(keys, width), 1 << (self.known - self.shift)
        if self.shift:
            low = low >> low.dtype.type(self.shift)
        if self.known < width:
            low = low & low.dtype.type(bins - 1)
        return np.bincount(low.astype(np.int64), minlength=bins)


class Threshold(Value, frozen=True):
    """What goes: every key below this one, and the first `ties` of those that are equal to it."""

    key: int
    ties: int

    @property
    def value(self) -> float:
        """The magnitude that a key of 63 bits stands for."""
        return float(np.int64(self.key).view(np.float64))


Search = Generator[KeyBits, np.ndarray, Threshold]
"""Gives what the next pass is to find out, is sent that (counts, or keys in any order), and returns the threshold."""


def search(count: int, *, total: int, width: int) -> Search:
    """Close in on the `count`-th lowest of `total` keys, which have `width` bits and no sign."""
    prefix, known, left = 0, width, total
    for shift in SHIFTS[width]:
        if left <= SORTED_KEYS and len(SHIFTS[width]) > 1:
            break
        bins = yield KeyBits(prefix, known, shift)
        ends = bins.cumsum()
        bucket = int(np.searchsorted(ends, count))
        count -= int(ends[bucket] - bins[bucket])
        prefix, known, left = (prefix << (known - shift)) + bucket, shift, int(bins[bucket])
    if not known:
        return Threshold(prefix, count)
    return lowest((yield KeyBits(prefix, known, known)), count)


def lowest(keys: np.ndarray, count: int) -> Threshold:
    """The threshold below which so many of the keys are, at least one.

    >>> lowest(np.array([5, 9, 9, 2]), 3)
    Threshold(key=9, ties=1)
    """
    key = np.partition(keys, count - 1)[count - 1]
    return Threshold(int(key), count - int(np.count_nonzero(keys < key)))


def answered(asked: Search, answer: Callable[[KeyBits], np.ndarray]) -> Threshold:
    """Run a search whose passes a function does.

    >>> keys = np.array([5, 9, 9, 2])
    >>> answered(search(3, total=4, width=15), lambda bits: bits.count(keys, 15))
    Threshold(key=9, ties=1)
    """
    try:
        bits = next(asked)
        while True:
            bits = asked.send(answer(bits))
    except StopIteration as done:
        found: Threshold = done.value
        return found


def magnitude_keys(values: np.ndarray, order: str) -> np.ndarray:
    """The order of absolute values, as the bits of a float that holds them all."""
    bits = ORDERS[order][1]
    keys: np.ndarray = _own(values, order).view(bits) & bits.type(
        (1 << (8 * bits.itemsize - 1)) - 1
    )
    if keys.size and keys.max() > INFINITY_BITS[order]:  # to look costs a tenth of the minimum
        np.minimum(keys, bits.type(nan_key(order)), out=keys)
    return keys


def _own(values: np.ndarray, order: str) -> np.ndarray:
    floats = ORDERS[order][0]
    if values.dtype == floats:
        return values
    with np.errstate(invalid="ignore"):  # a signalling NaN that is widened
        return values.astype(floats)


def random_keys(start: int, stop: int, seed: int) -> np.ndarray:
    """The keys of elements `start` to `stop` of a random order.

    >>> random_keys(0, 2, 0).tolist()
    [8147104208329303767, 3980143261097177850]
    """
    keys = np.empty(stop - start, np.uint64)
    for at in range(0, len(keys), RUN_KEYS):
        run = keys[at : at + RUN_KEYS]
        first = start + at + 1
        mixed = np.arange(first, first + len(run), dtype=np.uint64) * STEP
        mixed += np.uint64(seed % (1 << 64))
        for shift, factor in zip((30, 27), FACTORS, strict=True):
            mixed ^= mixed >> np.uint64(shift)
            mixed *= factor
        mixed ^= mixed >> np.uint64(31)
        np.right_shift(mixed, np.uint64(1), out=run)
    return keys


def common_order(dtypes: Sequence[str]) -> str:
    """The narrowest float that holds every value of these."""
    kinds = set(dtypes)
    return kinds.pop() if len(kinds) == 1 else "float64" if "float64" in kinds else "float32"


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
        squares = places.reshape(-1).astype(np.float64)
        np.multiply(squares, squares, out=squares)
        for part in squares.reshape(-1, len(sums)):
            sums += part
        heights = np.minimum(height, rows - np.arange(0, rows, height))
        widths = np.minimum(width, columns - np.arange(0, columns, width))
        means: np.ndarray = sums.reshape(down, across) / (heights[:, None] * widths)
    return means
