"""`measures`: the one streaming pass of `stats=True`: what can colour a page, and what a tensor's drawer shows.

Every tensor is read once, in blocks, on threads, in bounded memory (`numeric/statistics.py`); one view of several names once. A
sample reads blocks that lie evenly in each tensor instead, and the page says so. What is not countable (quantised blocks, tensors
without data, views that are expanded beyond their limit) has no numbers.

A page of ten thousand tensors has to stay small, so numbers have few digits, bars of histograms are 0 to 255 beside the largest,
and the more tensors there are, the fewer groups of rows and columns each has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from holdfast.core.sharing import View, identity
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.checksums import Progress
from holdfast.engine.scan import blocks, scan
from holdfast.errors import LimitExceeded
from holdfast.numeric.statistics import Distributed, Distribution, countable
from holdfast.reports.document import Document, rounded

SAMPLE_ELEMENTS = 1 << 14
"""Of one block of a sample: 64 KiB of float32, which a disk reads about as quickly as one byte."""

GROUPS, FEWEST_GROUPS, ROOM = 64, 6, 64_000
"""Groups of rows, and of columns, of one tensor: at most, at least, and of all tensors together."""

LARGEST_BAR, COARSE = 255, 4
"""Bars of a histogram, and the steps in which they grow: a page is 200 pixels high, and six bits are a quarter less to send."""

MANY = 4000
"""From so many tensors on, norms of rows have two digits."""


class Measured(Value, frozen=True):
    """What the pass found: one entry a tensor, None where there are no numbers."""

    found: list[Distribution | None]
    share: float | None
    """Of a sample; None where everything was read."""


def groups_for(tensors: int) -> int:
    """How many groups of rows each of so many tensors has.

    >>> groups_for(1), groups_for(4000), groups_for(100_000)
    (64, 16, 6)
    """
    return max(FEWEST_GROUPS, min(GROUPS, ROOM // max(tensors, 1)))


def sample_ranges(size: int, share: float | None) -> list[tuple[int, int]]:
    """Blocks of elements that are read: all, or evenly spaced ones, of at least this share of so many.

    >>> sample_ranges(300_000, 0.1)
    [(0, 16384), (283616, 300000)]
    """
    if share is None or share >= 1 or size <= SAMPLE_ELEMENTS:
        return [*blocks(size)]
    count = max(2, math.ceil(size * share / SAMPLE_ELEMENTS))
    if count * SAMPLE_ELEMENTS >= size:
        return [*blocks(size)]
    # A multiple of eight, so that packed types are cut between bytes; the last block ends where the tensor does.
    starts = [(size - SAMPLE_ELEMENTS) * i // (count - 1) // 8 * 8 for i in range(count)]
    return [(start, start + SAMPLE_ELEMENTS) for start in starts[:-1]] + [(starts[-1], size)]


def reading_nbytes(tensors: Iterable[LazyTensor], share: float | None) -> int:
    return sum(
        tensor.nbytes if share is None else tensor.dtype.nbytes(sum(b - a for a, b in sample_ranges(tensor.size, share)))
        for tensor in _different(tensors)
    )


def _different(tensors: Iterable[LazyTensor]) -> dict[LazyTensor, View]:
    """Those that are read: each view once, however many names it has; not what has no numbers, or is expanded beyond its limit."""
    seen: dict[View, LazyTensor] = {}
    for tensor in tensors:
        if countable(tensor) and tensor.size:
            try:
                tensor.check_expansion()
            except LimitExceeded:
                continue
            seen.setdefault(identity(tensor), tensor)
    return {tensor: view for view, tensor in seen.items()}


def measure(
    tensors: Sequence[LazyTensor],
    share: float | None = None,
    *,
    groups: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Measured:
    """Look at the numbers of all tensors. `groups` of rows and columns have norms, unless there is a sample."""
    read = _different(tensors)
    chosen = list(read)
    ranges = [sample_ranges(tensor.size, share) for tensor in chosen]
    sized = groups_for(len(chosen)) if groups is None else groups

    def make(at: int) -> Distributed:
        count = sum(stop - start for start, stop in ranges[at])
        return Distributed(chosen[at], count, sized if count == chosen[at].size else 0)

    made = scan(chosen, make, ranges.__getitem__, threads=threads, progress=progress)
    found = dict(zip(read.values(), made, strict=True))
    return Measured([found.get(identity(tensor)) if countable(tensor) else None for tensor in tensors], share)


MEASURES: tuple[tuple[str, str, str, str, Callable[[Distribution], float | None]], ...] = (
    ("rms", "root mean square", "the typical size of a number; a layer that stands out was trained or scaled differently", "log",
     lambda d: math.sqrt(d.moments.squares / d.moments.finite) if d.moments.finite else None),
    ("absmax", "largest value", "the largest absolute value", "log",
     lambda d: max(abs(d.moments.low), abs(d.moments.high)) if d.moments.finite else None),
    ("zeros", "zeros", "the share of elements that are exactly zero", "share",
     lambda d: d.moments.zeros / d.count if d.count else None),
    ("nonfinite", "NaN and Inf", "how many elements are NaN or infinite", "log",
     lambda d: float(d.moments.nans + d.moments.infinities)),
    ("kurtosis", "kurtosis", "0 for a bell curve; large where a few numbers are far out", "diverging", lambda d: d.kurtosis),
    ("mean", "mean", "the mean of the finite elements", "diverging", lambda d: d.moments.mean if d.moments.finite else None),
    ("std", "standard deviation", "of the finite elements, about their mean", "log",
     lambda d: math.sqrt(d.moments.deviations / d.moments.finite) if d.moments.finite else None),
)  # fmt: skip
"""Key, label, help, scale, and how to find it."""


def measured_columns(measured: Measured) -> tuple[list[Document], Document]:
    """What can colour the page, and the details of each tensor."""
    columns: list[Document] = [
        {
            "key": key,
            "label": label,
            "help": told,
            "scale": scale,
            "values": [None if found is None else rounded(of(found)) for found in measured.found],
        }
        for key, label, told, scale, of in MEASURES
    ]
    fine = 3 if len(measured.found) <= MANY else 2
    each = [None if found is None else detail(found, fine=fine) for found in measured.found]
    names = ("exponents", "negative", "quantiles", "rows", "columns")
    details: Document = {name: [None if one is None else one[name] for one in each] for name in names}
    return columns, {**details, "singular": None}


def detail(found: Distribution, *, fine: int = 3) -> Document:
    """What the drawer of one tensor shows; norms in so many digits."""
    top = max(found.exponents, default=0)
    bars = [_bar(n, top) for n in found.exponents]
    return {
        "exponents": [found.first_exponent, bars] if bars else None,
        "negative": rounded(found.negative, 3),
        "quantiles": [rounded(value, 3) for value in found.quantiles] or None,
        "rows": [rounded(value, fine) for value in found.rows] or None,
        "columns": [rounded(value, fine) for value in found.columns] or None,
    }


def _bar(count: int, top: int) -> int:
    """The height of a bar; what is not zero is never drawn as nothing.

    >>> [_bar(n, 1000) for n in (0, 1, 500, 999, 1000)]
    [0, 1, 128, 255, 255]
    """
    height = count * LARGEST_BAR / top if top else 0
    return 0 if not count else 1 if height < COARSE else min(round(height / COARSE) * COARSE, LARGEST_BAR)
