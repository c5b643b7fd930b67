"""`measures`: the one streaming pass of `stats=True`: what can colour a page, and what a tensor's drawer shows.

Every tensor is read once, in blocks, on threads, in bounded memory (`numeric/statistics.py`); one
view of several names once. Quantised blocks are decoded. A sample reads blocks that lie evenly in
each tensor instead, and the page says so. What is not countable (blocks that cannot be decoded,
tensors without data, views that are expanded beyond their limit) has no numbers.

A page of ten thousand tensors has to stay small, so numbers have few digits, bars of histograms are 0 to 255 beside the largest,
and the more tensors there are, the fewer groups of rows and columns each has.

`singular_values`: the largest singular values of a tensor, as a matrix of its rows, from a random projection, under a budget. A
matrix A of n columns is multiplied by a few random vectors, and the span of what comes out holds most of what A does (Halko,
Martinsson and Tropp, 2011). One power iteration sharpens it:

    Y = A · random        m × k     one reading
    Z = Aᵀ · orth(Y)      n × k     one more
    T = A · orth(Z)       m × k     and one more; the singular values of T are those of A, nearly: never larger

Rows are read in blocks, so memory holds the two thin matrices and a block. The random numbers begin with one seed: the same tensor
gives the same values. Where there are no more rows or columns than vectors, the values are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from holdfast.core.group import ALONE, Ranks, divide_work
from holdfast.core.sharing import ViewIdentity, identify_view
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import round_significant
from holdfast.core.value import Value
from holdfast.engine.checksums import Progress
from holdfast.engine.computed import decode_quantized
from holdfast.engine.scan import cut_elements, read_elements, scan
from holdfast.errors import LimitExceeded
from holdfast.extras.reports.document import Document
from holdfast.numeric.dequantize import number_shape
from holdfast.numeric.statistics import Distribution, DistributionBuilder, has_numbers
from holdfast.verbs.nonfinite import element_index

SAMPLE_ELEMENTS = 1 << 14
"""Elements of one block of a sample: 64 KiB of float32, which a disk reads about as quickly as one byte."""

GROUPS, FEWEST_GROUPS, ROOM = 64, 6, 64_000
"""Groups of rows, and of columns, of one tensor: at most, at least, and of all tensors together."""

LARGEST_BAR, COARSE = 255, 4
"""Bars of a histogram, and the steps in which they grow: a page is 200 pixels high, and six bits are a quarter less to send."""

MANY = 4000
"""From so many tensors on, norms of rows have two digits."""


def groups_for(tensors: int) -> int:
    """The number of groups of rows that each of so many tensors has.

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
        return [*cut_elements(size)]
    count = max(2, math.ceil(size * share / SAMPLE_ELEMENTS))
    if count * SAMPLE_ELEMENTS >= size:
        return [*cut_elements(size)]
    # A multiple of eight, so that packed types are cut between bytes; the last block ends where the tensor does.
    starts = [(size - SAMPLE_ELEMENTS) * i // (count - 1) // 8 * 8 for i in range(count)]
    return [(start, start + SAMPLE_ELEMENTS) for start in starts[:-1]] + [(starts[-1], size)]


def reading_nbytes(tensors: Iterable[LazyTensor], share: float | None) -> int:
    nbytes = 0
    for tensor in _different(tensors):
        ranges = sample_ranges(tensor.size, share)
        nbytes += tensor.dtype.nbytes(sum(stop - start for start, stop in ranges))
    return nbytes


def _different(tensors: Iterable[LazyTensor]) -> dict[LazyTensor, ViewIdentity]:
    """The tensors that are read: each view once; not what has no numbers, or is expanded beyond its limit. These are numbers, also
    where quantised blocks stand for them."""
    seen: dict[ViewIdentity, LazyTensor] = {}
    for tensor in decode_quantized(tensors):
        if has_numbers(tensor) and tensor.size:
            try:
                tensor.check_expansion()
            except LimitExceeded:
                continue
            seen.setdefault(identify_view(tensor), tensor)
    return {tensor: view for view, tensor in seen.items()}


def measure(
    tensors: Sequence[LazyTensor], share: float | None = None, *, groups: int | None = None, threads: int | None = None,
    progress: Progress | None = None, ranks: Ranks = ALONE,
) -> list[Distribution | None]:  # fmt: skip
    """Look at the numbers of all tensors; None for those that have none.

    `groups` of rows and columns have norms, unless there is a sample. Of several ranks each looks at some.
    """
    tensors = decode_quantized(tensors)
    read = _different(tensors)
    chosen = list(read)
    ranges = [sample_ranges(tensor.size, share) for tensor in chosen]
    sized = groups_for(len(chosen)) if groups is None else groups

    def make(at: int) -> DistributionBuilder:
        count = sum(stop - start for start, stop in ranges[at])
        return DistributionBuilder(chosen[at], count, sized if count == chosen[at].size else 0)

    def look(numbers: list[int]) -> list[Distribution]:
        own = [chosen[number] for number in numbers]
        return scan(
            own,
            lambda i: make(numbers[i]),
            lambda i: ranges[numbers[i]],
            threads=threads,
            progress=progress,
        )

    made = divide_work(ranks, [tensor.nbytes for tensor in chosen], look, Distribution)
    found = dict(zip(read.values(), made, strict=True))
    return [found.get(identify_view(tensor)) if has_numbers(tensor) else None for tensor in tensors]


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
"""Key, label, help, scale, and the function that computes it."""


class NonfiniteRow(Value):
    """NaN and infinities that were met in a tensor."""

    name: str
    row: int
    nans: int
    infinities: int
    first_nan: tuple[int, ...] | None
    first_infinity: tuple[int, ...] | None


def nonfinite_rows(
    tensors: Sequence[LazyTensor], measured: Sequence[Distribution | None]
) -> list[NonfiniteRow]:
    """Return the counts of NaN and infinities of every tensor that has numbers."""
    rows: list[NonfiniteRow] = []
    for row, (tensor, found) in enumerate(zip(tensors, measured, strict=True)):
        if found is None:
            continue
        moments = found.moments
        shape = number_shape(tensor.shape, tensor.traits.blocks)
        first_nan = element_index(moments.first_nan, shape)
        first_infinity = element_index(moments.first_infinity, shape)
        counts = moments.nans, moments.infinities
        rows.append(NonfiniteRow(tensor.name, row, *counts, first_nan, first_infinity))
    return rows


def nonfinite_columns(rows: Sequence[NonfiniteRow]) -> Document:
    """Return the tensors with NaN or infinities, and the index of the first of each."""
    sick = [row for row in rows if row.nans or row.infinities]
    return {
        "at": [row.row for row in sick],
        "nan": [json_index(row.first_nan) for row in sick],
        "inf": [json_index(row.first_infinity) for row in sick],
    }


def json_index(index: tuple[int, ...] | None) -> list[int] | None:
    """Return the index of an element as JSON has it."""
    return None if index is None else list(index)


def measured_columns(measured: Sequence[Distribution | None]) -> tuple[list[Document], Document]:
    """The columns that can colour the page, and the details of each tensor."""
    columns: list[Document] = []
    for key, label, text, scale, of in MEASURES:
        values = [None if found is None else round_significant(of(found)) for found in measured]
        columns.append({"key": key, "label": label, "help": text, "scale": scale, "values": values})
    fine = 3 if len(measured) <= MANY else 2
    each = [None if found is None else detail(found, fine=fine) for found in measured]
    names = ("exponents", "negative", "quantiles", "rows", "columns")
    details: Document = {
        name: [None if one is None else one[name] for one in each] for name in names
    }
    return columns, {**details, "singular": None}


def detail(found: Distribution, *, fine: int = 3) -> Document:
    """The content of one tensor's drawer; norms in so many digits."""
    top = max(found.exponents, default=0)
    bars = [_bar(n, top) for n in found.exponents]
    return {
        "exponents": [found.first_exponent, bars] if bars else None,
        "negative": round_significant(found.negative, 3),
        "quantiles": [round_significant(value, 3) for value in found.quantiles] or None,
        "rows": [round_significant(value, fine) for value in found.rows] or None,
        "columns": [round_significant(value, fine) for value in found.columns] or None,
    }


def _bar(count: int, top: int) -> int:
    """The height of a bar; what is not zero is never drawn as nothing.

    >>> [_bar(n, 1000) for n in (0, 1, 500, 999, 1000)]
    [0, 1, 128, 255, 255]
    """
    if not count:
        return 0
    steps = round(count * LARGEST_BAR / top / COARSE)
    return min(max(steps * COARSE, 1), LARGEST_BAR)


def plane(tensor: LazyTensor) -> tuple[int, int]:
    """Rows and columns of a tensor, as it is looked at: rows of its last dimension, whatever it has before that."""
    return math.prod(tensor.shape[:-1]), tensor.shape[-1] if tensor.shape else 1


VALUES, BESIDE = 32, 8
"""Singular values that are given, and vectors beyond them that make the last of them right."""

READINGS, BLOCK_ELEMENTS = 3, 1 << 20

BUDGET_NBYTES = 256 << 20
"""Memory of the thin matrices, where no other budget is given."""


def spectral(tensor: LazyTensor, budget: int = BUDGET_NBYTES) -> bool:
    """Whether a tensor is a matrix of real numbers whose thin matrices fit into the budget."""
    height, width = plane(tensor)
    thin = 8 * (VALUES + BESIDE) * 2 * (height + width)
    return (
        has_numbers(tensor)
        and tensor.dtype.kind != "complex"
        and min(height, width) > 1
        and thin + 16 * width <= budget
    )


def spectrum_nbytes(tensor: LazyTensor, budget: int = BUDGET_NBYTES) -> int:
    (tensor,) = decode_quantized([tensor])
    return READINGS * tensor.nbytes if spectral(tensor, budget) else 0


def singular_values(
    tensor: LazyTensor, *, budget: int = BUDGET_NBYTES, progress: Progress | None = None
) -> tuple[float, ...] | None:
    """The largest singular values, largest first; None of what has none, does not fit, or holds something that is not finite."""
    (tensor,) = decode_quantized([tensor])
    if not spectral(tensor, budget):
        return None
    height, width = plane(tensor)
    vectors = min(VALUES + BESIDE, height, width)
    right = np.random.default_rng(0).standard_normal((width, vectors))
    left = np.empty((height, vectors))
    for start, block in _blocks(tensor, progress):
        left[start : start + len(block)] = block @ right
    if not np.isfinite(left).all():
        return None
    left = np.linalg.qr(left)[0]
    right = np.zeros((width, vectors))
    for start, block in _blocks(tensor, progress):
        right += block.T @ left[start : start + len(block)]
    right = np.linalg.qr(right)[0]
    for start, block in _blocks(tensor, progress):
        left[start : start + len(block)] = block @ right
    values = np.linalg.svd(left, compute_uv=False)
    return tuple(values[:VALUES].tolist()) if np.isfinite(values).all() else None


def _blocks(tensor: LazyTensor, progress: Progress | None) -> Iterator[tuple[int, np.ndarray]]:
    height, width = plane(tensor)
    step = max(1, BLOCK_ELEMENTS // width)
    for start in range(0, height, step):
        stop = min(start + step, height)
        values = read_elements(tensor, start * width, stop * width)
        with np.errstate(invalid="ignore"):
            yield start, values.astype(np.float64).reshape(stop - start, width)
        if progress is not None:
            progress(tensor.dtype.nbytes(math.prod((stop - start, width))))
