"""`stats`: what the numbers of each tensor look like, streamed, in parallel, in bounded memory.

Elements are walked in C order a block at a time, as float64. Each block gives its count, mean and sum of squared deviations, and
blocks are merged by the formula of Chan, Golub and LeVeque, which loses nothing where a mean is large beside the deviations. Blocks
merge in their order, so that a result does not depend on which thread was quicker. The histogram takes a second pass, for its ends
are the least and the largest. NaN and infinities are counted and left out of everything else.
"""

from __future__ import annotations

import fnmatch
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from holdfast.core.arguments import understood
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.limits import Limits
from holdfast.core.quantities import Size
from holdfast.core.tensor import LazyTensor
from holdfast.engine.budget import reading_threads
from holdfast.engine.checksums import Progress
from holdfast.engine.compare import blocks, elements
from holdfast.engine.threads import default_threads
from holdfast.engine.transfer import run_reads
from holdfast.errors import located
from holdfast.inspect.open import Openable, opened

__all__ = ["Moments", "StatsReport", "TensorRows", "TensorStats", "countable", "measure", "stats"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Moments:
    """What is known of some numbers; `+` is that of both together."""

    finite: int = 0
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    deviations: float = 0.0
    """The sum of the squares of the distances from the mean."""
    squares: float = 0.0
    nans: int = 0
    infinities: int = 0
    zeros: int = 0

    @classmethod
    def of(cls, values: np.ndarray) -> Moments:
        """The moments of an array of float64.

        >>> Moments.of(np.array([1.0, 3.0, np.nan])).mean
        2.0
        """
        finite = np.isfinite(values)
        nans = infinities = 0
        if not finite.all():
            nans = int(np.isnan(values).sum())
            infinities = values.size - int(finite.sum()) - nans
            values = values[finite]
        if not values.size:
            return cls(nans=nans, infinities=infinities)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(values.mean())
            apart = values - mean
            # Not np.dot: BLAS would start threads of its own for each of ours.
            deviations = float(np.einsum("i,i->", apart, apart))
            squares = float(np.einsum("i,i->", values, values))
        zeros = values.size - int(np.count_nonzero(values))
        return cls(values.size, float(values.min()), float(values.max()), mean, deviations, squares, nans, infinities, zeros)

    def __add__(self, other: Moments) -> Moments:
        count = self.finite + other.finite
        apart = other.mean - self.mean
        share = other.finite / count if count else 0.0
        return Moments(
            count,
            min(self.low, other.low),
            max(self.high, other.high),
            self.mean + apart * share,
            self.deviations + other.deviations + apart * apart * self.finite * share,
            self.squares + other.squares,
            self.nans + other.nans,
            self.infinities + other.infinities,
            self.zeros + other.zeros,
        )


@dataclass(frozen=True, slots=True)
class TensorStats:
    """The numbers of one tensor. What there is no number for (the mean of nothing) is None."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    """Of the whole, not of a sample: divided by the count."""
    norm: float
    """L2."""
    nans: int
    infinities: int
    zeros: int
    histogram: tuple[int, ...] = ()
    """Counts in bins of one width from the minimum to the maximum, both in."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorRows(Generic[T]):
    """What was found of the tensors of a checkpoint: `path`, `format`, and a row for each, over which it iterates."""

    path: str
    format: str
    tensors: tuple[T, ...]
    """In the order of the checkpoint."""
    notes: tuple[str, ...] = ()
    """What is odd in the checkpoint."""

    def __iter__(self) -> Iterator[T]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, at: int) -> T:
        return self.tensors[at]


class StatsReport(TensorRows[TensorStats]):
    """What `stats` found."""

    __slots__ = ()


@understood
def stats(
    src: Openable | Checkpoint,
    pattern: str = "*",
    *,
    bins: int = 32,
    max_memory: Size | None = None,
    limits: Limits | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> StatsReport:
    """The statistics of the tensors whose names match a glob, in the order of the checkpoint. `bins=0` leaves out the histogram.

    Complex numbers count by their absolute values. Tensors without data, and elements that are no numbers, are left out.
    """
    workers = reading_threads(max_memory, threads)
    with opened(src, threads=1, limits=limits) as source:
        wanted = [source[name] for name in source if fnmatch.fnmatchcase(name, pattern)]
        rows = measure(wanted, bins=bins, threads=workers, progress=progress)
        return StatsReport(source.path, source.format, rows, source.notes)


def countable(tensor: LazyTensor) -> bool:
    """Whether the elements are numbers that are there."""
    return tensor.dtype.kind in ("float", "int", "uint", "bool", "complex") and not tensor.traits.meta


def measure(
    tensors: Iterable[LazyTensor], *, bins: int = 32, threads: int | None = None, progress: Progress | None = None
) -> tuple[TensorStats, ...]:
    """The statistics of these tensors, but for those that are not countable."""
    if bins < 0:
        raise ValueError(f"a histogram has 0 bins or more; found {bins}")
    wanted = [tensor for tensor in tensors if countable(tensor)]
    for tensor in wanted:
        with located(tensor=tensor.name):
            tensor.check_expansion()
    found = _each(wanted, lambda number, values: Moments.of(values), threads, progress=progress)
    whole = [sum(parts, Moments()) for parts in found]
    counts = [np.zeros(0, np.int64) for _ in wanted]
    if bins:

        def histogram(number: int, values: np.ndarray) -> np.ndarray:
            return _counts(values, whole[number].low, whole[number].high, bins=bins)

        some = [number for number, moments in enumerate(whole) if moments.finite]
        drawn = _each(
            [wanted[number] for number in some], lambda at, values: histogram(some[at], values), threads, progress=progress
        )
        for number, rows in zip(some, drawn, strict=True):
            counts[number] = np.sum(rows, axis=0)
    return tuple(_row(*row) for row in zip(wanted, whole, counts, strict=True))


def _counts(values: np.ndarray, low: float, high: float, *, bins: int) -> np.ndarray:
    values = values[np.isfinite(values)]
    if low == high:
        counts = np.zeros(bins, np.int64)
        counts[bins // 2] = values.size
        return counts
    # Halved first: from the least to the largest float64 is farther than a float64 can say.
    place = (values / 2 - low / 2) / (high / 2 - low / 2) * bins
    return np.bincount(np.minimum(place.astype(np.int64), bins - 1), minlength=bins)


def _row(tensor: LazyTensor, found: Moments, counts: np.ndarray) -> TensorStats:
    some = found.finite > 0
    return TensorStats(
        tensor.name,
        tensor.dtype.name,
        tensor.shape,
        found.low if some else None,
        found.high if some else None,
        found.mean if some else None,
        math.sqrt(found.deviations / found.finite) if some else None,
        math.sqrt(found.squares),
        found.nans,
        found.infinities,
        found.zeros,
        tuple(counts.tolist()),
    )


def _each(
    tensors: Sequence[LazyTensor], of: Callable[[int, np.ndarray], T], threads: int | None, *, progress: Progress | None
) -> list[list[T]]:
    """A function of every block of every tensor, as float64, on threads; in order."""
    lock = threading.Lock()
    found: list[dict[int, T]] = [{} for _ in tensors]

    def task(number: int, start: int, stop: int) -> Callable[[], None]:
        tensor = tensors[number]

        def run() -> None:
            with located(tensor=tensor.name):
                made = of(number, _wide(elements(tensor, start, stop)))
            with lock:
                found[number][start] = made
            if progress is not None:
                progress(tensor.dtype.nbytes(stop - start))

        return run

    work = [task(number, start, stop) for number, tensor in enumerate(tensors) for start, stop in blocks(tensor.size)]
    if work:
        run_reads(work, threads or default_threads(), stores=[tensor.source.store for tensor in tensors])
    return [[parts[start] for start in sorted(parts)] for parts in found]


def _wide(values: np.ndarray) -> np.ndarray:
    if values.dtype.names:
        return np.hypot(values["real"].astype(np.float64), values["imag"].astype(np.float64))
    with np.errstate(invalid="ignore"):  # a signalling NaN that is widened
        return np.abs(values).astype(np.float64) if values.dtype.kind == "c" else values.astype(np.float64)
