"""`sparsity`: where the zeros of each tensor are, streamed, in parallel, in bounded memory.

A tensor is seen as a matrix, its first axis by all others, and read in tiles of 64 rows and columns, or multiples: groups and
blocks of up to 64 lie within one. What is counted in them stands in `numeric/zeros.py`.

- N:M is found where every group of `m` along the last axis has at most `n` that are not zero, and nearly all groups are full: a
  tensor with 90% of zeros anywhere is not called 8:16 because no group happens to have more.
- A block shape is found where nearly all zeros lie in blocks that are all zeros; the largest such shape is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast.core.arrays import matrix_shape
from holdfast.core.box import Box
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.limits import Limits
from holdfast.core.options import validate_arguments
from holdfast.core.patterns import make_matcher
from holdfast.core.quantities import Size
from holdfast.core.tensor import LazyTensor
from holdfast.engine.checksums import Progress
from holdfast.engine.scan import ElementBlock, cut_elements, scan
from holdfast.engine.threads import count_reading_threads
from holdfast.errors import error_context
from holdfast.numeric.statistics import has_numbers
from holdfast.numeric.zeros import ZeroCounter, ZeroCounts
from holdfast.verbs.open import Openable, opened_checkpoint
from holdfast.verbs.stats import TensorReport, decoded_pairs

BLOCKS = (
    (64, 64),
    (32, 32),
    (16, 16),
    (8, 8),
    (4, 4),
    (1, 64),
    (64, 1),
    (1, 16),
    (16, 1),
    (1, 8),
    (8, 1),
    (1, 4),
    (4, 1),
    (2, 2),
)
"""Block shapes that are looked for, the largest first."""

TILE_ROWS, TILE_COLUMNS = 64, 1 << 13  # half a million elements

EXPLAINED = 0.95
"""The part of the zeros that a block shape has to explain, and of the groups' places that N:M has to fill."""


@dataclass(frozen=True, slots=True)
class TensorSparsity:
    """Where the zeros of one tensor are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    zeros: int
    pattern: tuple[int, int] | None
    """N:M along the last axis: at most `n` of every `m` are not zero."""
    block: tuple[int, int] | None
    """Rows and columns of the blocks in which the zeros come."""
    dead_rows: int
    """Indices of the first axis with nothing but zeros."""
    dead_columns: int
    """Indices of the other axes, taken as one, with nothing but zeros."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class SparsityReport(TensorReport[TensorSparsity]):
    """What `sparsity` found."""

    __slots__ = ()


@validate_arguments
def sparsity(
    src: Openable | Checkpoint,
    pattern: str = "*",
    *,
    max_memory: Size | None = None,
    limits: Limits | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> SparsityReport:
    """Where the zeros of the tensors are whose names match a glob, in the order of the checkpoint.

    Tensors without data, and elements that are no numbers, are left out.
    """
    workers = count_reading_threads(max_memory, threads)
    with opened_checkpoint(src, threads=1, limits=limits) as source:
        rows = find_zeros(
            [source[name] for name in filter(make_matcher(pattern), source)],
            threads=workers,
            progress=progress,
        )
        return SparsityReport(source.path, source.format, rows, source.notes)


def find_zeros(
    tensors: Iterable[LazyTensor], *, threads: int | None = None, progress: Progress | None = None
) -> tuple[TensorSparsity, ...]:
    """The zeros of every tensor whose elements are numbers."""
    wanted: list[LazyTensor] = []
    labels: list[str] = []
    for stored, tensor in decoded_pairs(tensors):
        if has_numbers(tensor) and not tensor.dtype.paired:
            with error_context(tensor=tensor.name):
                tensor.check_expansion()
            wanted.append(tensor)
            labels.append(stored.traits.dtype_label(stored.dtype))
    counts = scan(
        wanted,
        lambda number: ZeroCounter(wanted[number].shape, BLOCKS),
        lambda number: tiles(wanted[number]),
        threads=threads,
        progress=progress,
    )
    return tuple(map(_make_row, wanted, labels, counts))


def tiles(tensor: LazyTensor) -> Iterator[ElementBlock]:
    """Whole rows, multiples of 64 of them; some columns of 64 where rows are long; parts of a vector."""
    rows, columns = matrix_shape(tensor.shape)
    if not tensor.size:
        return
    if rows == 1 or columns <= TILE_COLUMNS:
        high = max(TILE_COLUMNS // columns, 1) * TILE_ROWS
        yield from cut_elements(
            tensor.size, high * columns if rows > 1 else TILE_COLUMNS * TILE_ROWS
        )
        return
    for top in range(0, rows, TILE_ROWS):
        for left in range(0, columns, TILE_COLUMNS):
            yield Box((top, left), (min(top + TILE_ROWS, rows), min(left + TILE_COLUMNS, columns)))


def _make_row(tensor: LazyTensor, label: str, counts: ZeroCounts) -> TensorSparsity:
    nonzeros = tensor.size - counts.zeros

    # The sparsest pattern n:m, as (n / m, m, n).
    patterns: list[tuple[float, int, int]] = []
    for m, n in counts.max_group_nonzeros.items():
        if 0 < n < m and nonzeros >= EXPLAINED * tensor.size * n / m:
            patterns.append((n / m, m, n))
    pattern = None
    if patterns:
        _, m, n = min(patterns)
        pattern = n, m

    block = None
    if counts.zeros and nonzeros:
        for shape, zeros in counts.zeros_in_dead_blocks.items():
            if zeros >= EXPLAINED * counts.zeros:
                block = shape
                break
    return TensorSparsity(
        tensor.name,
        label,
        tensor.shape,
        counts.zeros,
        pattern,
        block,
        counts.dead_rows,
        counts.dead_columns,
    )
