"""Defines the order in which pruning removes elements, and finds the threshold of a share of them.

`extras/pruning` uses it for files, and `torch/sparsity` for models on any device.

1. Every element (or block) has a key, which is an integer. The lowest keys are pruned first. Among
   equal keys the lowest index goes first, and the first of several tensors. So a mask depends on
   nothing but the values, on every device.
2. The key of a magnitude is the bits of the absolute value, which are in the order of the numbers.
   So -0.0 has the key of 0.0. All NaN have one key, the highest, so that pruning does not hide
   them.
3. The key of a random order is SplitMix64 of a seed and the index, without its lowest bit (Steele,
   Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
4. A level is the share of the elements to prune. It becomes a count by `pruned_count`.
5. The n-th lowest key is found by radix selection (`search_threshold`): each pass over the keys
   counts them by their next 16 bits, until few are left to be sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.value import Value

SPLITMIX = (0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB)
"""The increment of SplitMix64 and its two factors."""

INCREMENT, *FACTORS = map(np.uint64, SPLITMIX)

SORTED_KEYS = 1 << 20
"""The most keys that are held and sorted: 8 MiB."""

RUN_KEYS = 1 << 17
"""The random keys that are computed at a time: a dozen operations on 1 MiB, which stays in a core's
cache."""

BIN_SHIFTS = {15: (0,), 31: (16, 0), 63: (47, 31, 15, 0), 64: (47, 31, 15, 0)}
"""By the width of keys in bits: for each pass, how many bits are below those that it counts."""


class KeyOrder(Value, frozen=True):
    """A float type whose bits are the keys of magnitudes."""

    float_dtype: np.dtype[Any]
    bits_dtype: np.dtype[Any]
    infinity_key: int


KEY_ORDERS = {
    "float16": KeyOrder(np.dtype(np.float16), np.dtype(np.uint16), 0x7C00),
    "bfloat16": KeyOrder(np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint16), 0x7F80),
    "float32": KeyOrder(np.dtype(np.float32), np.dtype(np.uint32), 0x7F80_0000),
    "float64": KeyOrder(np.dtype(np.float64), np.dtype(np.uint64), 0x7FF0_0000_0000_0000),
}
"""The orders of magnitudes by the names of their float types."""


def nan_key(order: str) -> int:
    """Return the key of every NaN, which is above that of infinity."""
    return KEY_ORDERS[order].infinity_key + 1


def common_order(dtypes: Sequence[str]) -> str:
    """Return the narrowest order that contains every value of these float types."""
    distinct_dtypes = set(dtypes)
    if len(distinct_dtypes) == 1:
        return distinct_dtypes.pop()
    if "float64" in distinct_dtypes:
        return "float64"
    return "float32"


def pruned_count(level: float, count: int) -> int:
    """Return how many of `count` elements a level prunes, rounded half to even.

    Not all are pruned unless the level is 1.

    >>> pruned_count(0.5, 5), pruned_count(0.9, 4), pruned_count(1, 4)
    (2, 3, 4)
    """
    if level == 1:
        return count
    rounded_count = round(level * count)
    return max(0, min(rounded_count, count - 1))


class Threshold(Value, frozen=True):
    """What is pruned: every key below `key`, and the first `ties` of those that are equal to it."""

    key: int
    ties: int

    @property
    def value(self) -> float:
        """The magnitude that has this key, if it is the key of a float64."""
        bits = np.int64(self.key)
        return float(bits.view(np.float64))


class SearchPass(Value, frozen=True):
    """What a search has to learn about the keys that begin with a prefix.

    Either it needs their histogram by the next bits, or, if there are few, these keys themselves.
    """

    prefix: int
    """The highest bits of the keys, as an integer."""
    prefix_shift: int
    """The number of bits below the prefix. The width of the keys if the prefix is empty."""
    bin_shift: int
    """The number of bits below those that are counted. The same as `prefix_shift` if the keys
    themselves are needed."""

    @property
    def needs_keys(self) -> bool:
        """Whether the keys themselves are needed instead of a histogram."""
        return self.bin_shift == self.prefix_shift

    @property
    def bin_count(self) -> int:
        """The number of bins of the histogram."""
        return 1 << (self.prefix_shift - self.bin_shift)

    def select_keys(self, keys: np.ndarray, width: int) -> np.ndarray:
        """Return the keys that begin with the prefix. Keys have `width` bits."""
        if self.prefix_shift == width:
            return keys
        prefixes = keys >> keys.dtype.type(self.prefix_shift)
        return np.asarray(keys[prefixes == self.prefix])

    def count_keys(self, keys: np.ndarray, width: int) -> Ints:
        """Count the keys that begin with the prefix, grouped by the bits that follow it.

        Args:
            keys: Some of the keys.
            width: The number of bits of a key.

        Returns:
            The histogram, with `bin_count` bins.
        """
        leading_bits = self.select_keys(keys, width)
        # Operands of the dtype of the keys give results of that dtype, whatever numpy's version.
        key_type = leading_bits.dtype.type
        if self.bin_shift:
            leading_bits = leading_bits >> key_type(self.bin_shift)
        bin_indices = leading_bits
        # The number of bins is a power of two, so this mask removes the prefix, if there is one.
        if self.prefix_shift < width:
            bin_indices = leading_bits & key_type(self.bin_count - 1)
        return np.bincount(bin_indices.astype(np.int64), minlength=self.bin_count)


Search = Generator[SearchPass, np.ndarray, Threshold]
"""Yields each pass that is needed, receives its histogram (or the keys, in any order), and returns
the threshold."""


def search_threshold(count: int, *, total: int, width: int) -> Search:
    """Find the `count`-th lowest key by radix selection.

    Each pass over all keys counts those that begin with a prefix, by their next bits. The bin that
    contains the wanted key makes the prefix longer. When few keys begin with it, they are sorted.

    This is a generator, because the passes of many searches over many tensors are made together.

    Args:
        count: How many keys are pruned, at least one.
        total: How many keys there are.
        width: The number of bits of a key. Keys are not negative.
    """
    prefix = 0
    prefix_shift = width
    candidate_count = total
    bin_shifts = BIN_SHIFTS[width]
    for bin_shift in bin_shifts:
        # Keys that one histogram covers completely need one pass either way.
        if candidate_count <= SORTED_KEYS and len(bin_shifts) > 1:
            break
        histogram = yield SearchPass(prefix, prefix_shift, bin_shift)
        bin_stops = histogram.cumsum()
        bin_index = int(np.searchsorted(bin_stops, count))
        candidate_count = int(histogram[bin_index])

        # From now on, `count` counts among the keys of this bin.
        lower_count = int(bin_stops[bin_index]) - candidate_count
        count -= lower_count
        prefix_extension_bits = prefix_shift - bin_shift
        prefix = (prefix << prefix_extension_bits) + bin_index
        prefix_shift = bin_shift

    if not prefix_shift:
        return Threshold(prefix, count)
    keys = yield SearchPass(prefix, prefix_shift, prefix_shift)
    return _find_by_sorting(keys, count)


def _find_by_sorting(keys: np.ndarray, count: int) -> Threshold:
    """Return the threshold that prunes `count` keys, at least one.

    >>> _find_by_sorting(np.array([5, 9, 9, 2]), 3)
    Threshold(key=9, ties=1)
    """
    partitioned_keys = np.partition(keys, count - 1)
    key = partitioned_keys[count - 1]
    lower_count = int(np.count_nonzero(keys < key))
    return Threshold(int(key), ties=count - lower_count)


def run_search(search: Search, run_pass: Callable[[SearchPass], np.ndarray]) -> Threshold:
    """Run a search, with a function that makes a pass over all keys.

    >>> keys = np.array([5, 9, 9, 2])
    >>> search = search_threshold(3, total=4, width=15)
    >>> run_search(search, lambda search_pass: search_pass.count_keys(keys, 15))
    Threshold(key=9, ties=1)
    """
    try:
        search_pass = next(search)
        while True:
            search_pass = search.send(run_pass(search_pass))
    except StopIteration as stop:
        threshold: Threshold = stop.value
        return threshold


def magnitude_keys(values: np.ndarray, order: str) -> np.ndarray:
    """Return the keys of absolute values: their bits, which are in the order of the numbers.

    Every NaN has the highest key (`nan_key`).

    Args:
        values: Floats of any type.
        order: A float type (`KEY_ORDERS`) that contains all of them.
    """
    key_order = KEY_ORDERS[order]
    if values.dtype != key_order.float_dtype:
        # Converting a signalling NaN raises the flag for invalid operations.
        with np.errstate(invalid="ignore"):
            values = values.astype(key_order.float_dtype)

    unsigned = key_order.bits_dtype.type
    sign_bit = 1 << (8 * key_order.bits_dtype.itemsize - 1)
    magnitude_mask = unsigned(sign_bit - 1)
    keys: np.ndarray = values.view(key_order.bits_dtype) & magnitude_mask
    # Finding the maximum takes a tenth of the time of the replacement.
    if keys.size and keys.max() > key_order.infinity_key:
        np.minimum(keys, unsigned(nan_key(order)), out=keys)
    return keys


def random_keys(start: int, stop: int, seed: int) -> np.ndarray:
    """Return the keys of the elements from `start` to `stop` (exclusive) in a random order.

    The key of an element is the output of the generator SplitMix64 for its index, without the
    lowest bit. So the keys of any part of a tensor can be computed by themselves.

    >>> random_keys(0, 2, 0).tolist()
    [8147104208329303767, 3980143261097177850]
    """
    first_factor, second_factor = FACTORS
    keys = np.empty(stop - start, np.uint64)
    for offset in range(0, len(keys), RUN_KEYS):
        run = keys[offset : offset + RUN_KEYS]
        first_state = start + offset + 1
        states = np.arange(first_state, first_state + len(run), dtype=np.uint64)
        states *= INCREMENT
        states += np.uint64(seed % (1 << 64))
        states ^= states >> np.uint64(30)
        states *= first_factor
        states ^= states >> np.uint64(27)
        states *= second_factor
        states ^= states >> np.uint64(31)
        np.right_shift(states, np.uint64(1), out=run)
    return keys


def mean_squares(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the mean square of every block of a matrix. Blocks at the edges are smaller.

    The squares of a block are added one after the other in C order, so that the result does not
    depend on how the matrix is cut.

    Args:
        values: The matrix.
        height: The height of a block.
        width: The width of a block.

    >>> mean_squares(np.array([[1.0, 2.0, 3.0], [1.0, 0.0, 5.0]]), 2, 2).tolist()
    [[1.5, 17.0]]
    """
    row_count, column_count = values.shape
    height = min(height, row_count)
    width = min(width, column_count)
    # The number of blocks below each other, and side by side. The divisions round up.
    grid_height = -(-row_count // height)
    grid_width = -(-column_count // width)

    # Fill the blocks at the edges with zeros, which add nothing.
    padded_shape = (grid_height * height, grid_width * width)
    if values.shape != padded_shape:
        padded = np.zeros(padded_shape, values.dtype)
        padded[:row_count, :column_count] = values
        values = padded

    # One row for each position in a block, with the elements of all blocks at that position. So
    # each addition is one vector operation on all blocks.
    blocks = values.reshape(grid_height, height, grid_width, width)
    positions = np.ascontiguousarray(blocks.transpose(1, 3, 0, 2))
    sums = np.zeros(grid_height * grid_width)
    with np.errstate(all="ignore"):
        squares = positions.reshape(-1).astype(np.float64)
        np.multiply(squares, squares, out=squares)
        for position_squares in squares.reshape(-1, len(sums)):
            sums += position_squares
        block_heights = np.minimum(height, row_count - np.arange(0, row_count, height))
        block_widths = np.minimum(width, column_count - np.arange(0, column_count, width))
        element_counts = block_heights[:, None] * block_widths
        means: np.ndarray = sums.reshape(grid_height, grid_width) / element_counts
    return means
