"""`stats`: what the numbers of each tensor look like, streamed, in parallel, in bounded memory.

How they are looked at stands in `numeric/statistics.py`: narrow elements are counted by their patterns, in one reading; wider ones
are read twice where a histogram is wanted and they are too many to be held, for its ends are the least and the largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from holdfast.core.arrays import Ints
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.group import ALONE, AnyGroup, Ranks, divide_work, joined_ranks
from holdfast.core.limits import Limits
from holdfast.core.notebook import NotebookResult
from holdfast.core.options import validate_arguments
from holdfast.core.order import sort_naturally
from holdfast.core.patterns import make_matcher
from holdfast.core.quantities import Size
from holdfast.core.tensor import LazyTensor
from holdfast.engine.checksums import Progress
from holdfast.engine.computed import decode_quantized, describe_undecoded
from holdfast.engine.scan import BLOCK_ELEMENTS, scan
from holdfast.engine.threads import count_reading_threads
from holdfast.errors import NoSuchTensor, error_context
from holdfast.numeric.statistics import Moments, NumberStats, has_numbers, is_counted_by_pattern
from holdfast.verbs.nonfinite import describe_nonfinite, element_index
from holdfast.verbs.open import Openable, check_ranks_opened_same, opened_checkpoint

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorStats:
    """The numbers of one tensor. What there is no number for (the mean of nothing) is None."""

    name: str
    dtype: str
    """Of a tensor in quantised blocks, their type (`Q4_K`); the numbers are those that the blocks stand for."""
    shape: tuple[int, ...]
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    """Of the whole, not of a sample: divided by the count."""
    norm: float | None
    """L2. As all before, of the finite elements: `nans` and `infinities` are left out. None where nothing else is there."""
    nans: int
    infinities: int
    zeros: int
    histogram: tuple[int, ...] = ()
    """Counts in bins of one width from the minimum to the maximum, both in."""
    first_nan: tuple[int, ...] | None = None
    """The index of the first NaN in C order."""
    first_infinity: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorReport(NotebookResult, Generic[T]):
    """What was found of the tensors of a checkpoint: `path`, `format`, and a row for each, over which it iterates."""

    path: str
    format: str
    tensors: tuple[T, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[T]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, at: int) -> T:
        return self.tensors[at]


class StatsReport(TensorReport[TensorStats]):
    """What `stats` found."""

    __slots__ = ()

    @property
    def nonfinite(self) -> tuple[TensorStats, ...]:
        """The tensors with NaN or infinities, in the order in which people count."""
        return tuple(sort_naturally((row for row in self if is_nonfinite(row)), attrgetter("name")))

    @property
    def nonfinite_summary(self) -> str:
        """One line: in how many tensors NaN and infinities are, and where the first of each is."""
        return describe_nonfinite(self)

    def _list_headline_facts(self) -> Iterator[tuple[str, str]]:
        yield "NaN and Inf", self.nonfinite_summary

    def _arrange_field(self, field: str, value: object) -> object:
        return (
            tuple(listed(self))
            if field == "tensors"
            else NotebookResult._arrange_field(self, field, value)
        )


def is_nonfinite(row: TensorStats) -> bool:
    """Whether a tensor has a NaN or an infinity."""
    return row.nans > 0 or row.infinities > 0


def listed(rows: Iterable[TensorStats]) -> list[TensorStats]:
    """Return the rows as they are shown: tensors with NaN or infinities first, because lists are cut."""
    ordered = sort_naturally(rows, attrgetter("name"))
    return sorted(ordered, key=is_nonfinite, reverse=True)


@validate_arguments
def stats(
    src: Openable | Checkpoint,
    pattern: str = "*",
    *,
    bins: int = 32,
    max_memory: Size | None = None,
    limits: Limits | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    group: AnyGroup | None = None,
) -> StatsReport:
    """The statistics of the tensors whose names match a glob, in the order of the checkpoint. `bins=0` leaves out the histogram.

    Complex numbers count by their absolute values. Tensors without data, and elements that are no numbers, are left out. Of the
    ranks of a `group` each reads some of the tensors, and all get all numbers. Raises `NoSuchTensor` where no name matches.
    """
    with joined_ranks(group, "measure tensors") as ranks, ranks.joint_progress(progress) as counted:
        workers = count_reading_threads(max_memory, threads, ranks.count_local_ranks())
        with opened_checkpoint(src, threads=1, limits=limits) as source:
            check_ranks_opened_same(ranks, source)
            tensors = chosen(source, pattern)
            rows = measure(tensors, bins=bins, threads=workers, progress=counted, ranks=ranks)
            notes = (*source.notes_on_numbers, *describe_undecoded(tensors))
            return StatsReport(source.path, source.format, rows, notes)


def chosen(source: Checkpoint, pattern: str | None) -> list[LazyTensor]:
    """The tensors whose names match a glob: of None all, and of any other at least one, or `NoSuchTensor` is raised."""
    found = [
        source[name] for name in filter(make_matcher("*" if pattern is None else pattern), source)
    ]
    if not found and pattern not in (None, "*"):
        raise NoSuchTensor(
            f"no tensor in the checkpoint is called {pattern!r}", file=source.path, found=pattern
        )
    return found


def measure(
    tensors: Iterable[LazyTensor], *, bins: int = 32, threads: int | None = None, progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> tuple[TensorStats, ...]:  # fmt: skip
    """The statistics of these tensors, without those that have no numbers. Of several ranks each reads some."""
    if bins < 0:
        raise ValueError(f"a histogram has 0 bins or more; found {bins}")
    wanted: list[LazyTensor] = []
    labels: list[str] = []
    for stored, tensor in decoded_pairs(tensors):
        if has_numbers(tensor):
            with error_context(tensor=tensor.name):
                tensor.check_expansion()
            wanted.append(tensor)
            labels.append(stored.traits.dtype_label(stored.dtype))

    def rows(numbers: list[int]) -> list[TensorStats]:
        own = [wanted[number] for number in numbers]
        found = scan(own, lambda at: NumberStats(own[at], bins), threads=threads, progress=progress)
        again = [
            at
            for at, (moments, counts) in enumerate(found)
            if bins and counts is None and moments.finite
        ]
        left = [own[at] for at in again]
        drawn = scan(
            left,
            lambda at: NumberStats(left[at], bins, found[again[at]][0]),
            threads=threads,
            progress=progress,
        )
        for at, both in zip(again, drawn, strict=True):
            found[at] = both
        return [
            _row(wanted[number], labels[number], *one)
            for number, one in zip(numbers, found, strict=True)
        ]

    return tuple(divide_work(ranks, [tensor.nbytes for tensor in wanted], rows, TensorStats))


def reading_nbytes(tensors: Iterable[LazyTensor], *, bins: int) -> int:
    """Bytes that `measure` reads: twice those of a tensor where a histogram takes a second reading."""

    def once(tensor: LazyTensor) -> bool:
        return not bins or is_counted_by_pattern(tensor) or tensor.size <= BLOCK_ELEMENTS

    return sum(
        tensor.nbytes * (1 if once(tensor) else 2)
        for tensor in decode_quantized(tensors)
        if has_numbers(tensor)
    )


def decoded_pairs(tensors: Iterable[LazyTensor]) -> list[tuple[LazyTensor, LazyTensor]]:
    """Return each tensor as it is stored, and the numbers that it stands for."""
    stored = list(tensors)
    return list(zip(stored, decode_quantized(stored), strict=True))


def _row(tensor: LazyTensor, label: str, found: Moments, counts: Ints | None) -> TensorStats:
    some = found.finite > 0
    return TensorStats(
        tensor.name, label, tensor.shape, found.low if some else None, found.high if some else None,
        found.mean if some else None, math.sqrt(found.deviations / found.finite) if some else None,
        math.sqrt(found.squares) if some or not (found.nans or found.infinities) else None, found.nans, found.infinities,
        found.zeros, () if counts is None else tuple(counts.tolist()),
        element_index(found.first_nan, tensor.shape), element_index(found.first_infinity, tensor.shape),
    )  # fmt: skip
