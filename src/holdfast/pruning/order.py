"""The order of pruning, which stands here once: for files (`keys.py`, `select.py`) and for models (`holdfast.torch.sparsity`).

1. Every element (or block) has a key, an integer; the lowest key goes first. Of equal keys the lowest index goes first, and over
   several tensors the first tensor. So a mask depends on nothing but the values, on every device.
2. The key of a magnitude is the bits of the absolute value, which are in the order of the numbers. -0.0 is 0.0. All NaN are equal
   and come last (`nan_key`): what is broken is not hidden.
3. The key of a random order is SplitMix64 of a seed and the index, without its lowest bit.
4. The part of a level is the nearest whole number (`pruned_count`).
5. The n-th lowest key is found from histograms of 16 more bits at a time (`narrow`), until few keys are left to sort.

numpy and torch each make keys and histograms in their own way, torch on any device; `tests/pruning/test_order.py` compares them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.value import Value

INFINITY_BITS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000, "float64": 0x7FF0_0000_0000_0000}
"""The key of infinity, by the float whose bits are the keys."""

SPLITMIX = (0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB)
"""SplitMix64's step and its two factors (Steele, Lea and Flood, 2014)."""

SORTED_KEYS = 1 << 20
"""As many keys as are held and sorted directly: 8 MiB."""

SHIFTS = {15: (0,), 31: (16, 0), 63: (47, 31, 15, 0), 64: (47, 31, 15, 0)}
"""By the bits of keys: the bits below those that each histogram counts by."""

Histogram = Callable[[int, int, int], Ints]
"""From `prefix, known, shift`: of the keys whose bits from `known` upwards are `prefix`, how many there are by the bits between
`shift` and `known`."""


def nan_key(order: str) -> int:
    """The key of every NaN: above infinity, and above everything else."""
    return INFINITY_BITS[order] + 1


def pruned_count(level: float, count: int) -> int:
    """How many of `count` are pruned: rounded, half to even, and never all of them unless the level is 1.

    >>> pruned_count(0.5, 5), pruned_count(0.9, 4), pruned_count(1, 4)
    (2, 3, 4)
    """
    return count if level == 1 else max(0, min(round(level * count), count - 1))


class Narrowed(Value, frozen=True):
    """The keys among which the one is that was looked for."""

    prefix: int
    """Their common bits from `known` upwards."""
    known: int
    """0 where they are all equal."""
    rank: int
    """Which of them it is, the lowest being 1."""


def narrow(histogram: Histogram, count: int, *, total: int, width: int) -> Narrowed:
    """Close in on the `count`-th lowest of `total` keys, which have `width` bits and no sign.

    >>> keys = np.array([5, 9, 9, 2])
    >>> narrow(lambda prefix, known, shift: np.bincount(keys, minlength=1 << 15), 3, total=4, width=15)
    Narrowed(prefix=9, known=0, rank=1)
    """
    prefix, known, left = 0, width, total
    for shift in SHIFTS[width]:
        if left <= SORTED_KEYS and len(SHIFTS[width]) > 1:
            break
        bins = histogram(prefix, known, shift)
        ends = bins.cumsum()
        bucket = int(np.searchsorted(ends, count))
        count -= int(ends[bucket] - bins[bucket])
        prefix, known, left = (prefix << (known - shift)) + bucket, shift, int(bins[bucket])
    return Narrowed(prefix, known, count)
