"""`sparsity`: where the zeros of each tensor are, streamed, in parallel, in bounded memory.

A tensor is seen as a matrix, its first axis by all others, and read in tiles of 64 rows and columns, or multiples: groups and
blocks of up to 64 lie within one. Of a tile stay a few counts, and which rows and columns have anything in them.

- N:M is found where every group of `m` along the last axis has at most `n` that are not zero, and nearly all groups are full: a
  tensor with 90% of zeros anywhere is not called 8:16 because no group happens to have more.
- A block shape is found where nearly all zeros lie in blocks that are all zeros; the largest such shape is told.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from msgspec import Struct, field

from holdfast.core.arguments import understood
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.limits import Limits
from holdfast.core.patterns import matcher
from holdfast.core.quantities import Size
from holdfast.core.sparse.encoding import matrix_shape
from holdfast.core.tensor import LazyTensor
from holdfast.engine.budget import reading_threads
from holdfast.engine.checksums import Progress
from holdfast.engine.computed import read_flat
from holdfast.engine.numbers import countable
from holdfast.engine.threads import default_threads
from holdfast.engine.transfer import run_reads
from holdfast.errors import located
from holdfast.inspect.open import Openable, opened
from holdfast.inspect.stats import TensorReport

GROUPS = (2, 4, 8, 16)
"""The `m` of patterns that are looked for."""

BLOCKS = ((64, 64), (32, 32), (16, 16), (8, 8), (4, 4), (1, 64), (64, 1), (1, 16), (16, 1), (1, 8), (8, 1), (1, 4), (4, 1), (2, 2))
"""Block shapes that are looked for, the largest first."""

TILE_ROWS = 64
TILE_COLUMNS = 1 << 13
"""64 rows of as many are half a million elements."""

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
    """The same of the other axes, taken as one."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class SparsityReport(TensorReport[TensorSparsity]):
    """What `sparsity` found."""

    __slots__ = ()


class ZeroCounts(Struct):
    """What is known of one tensor while its tiles are looked at."""

    rows: np.ndarray
    columns: np.ndarray
    zeros: int = 0
    most: dict[int, int] = field(default_factory=dict)
    """By `m`: how many of a group are not zero, at most."""
    explained: dict[tuple[int, int], int] = field(default_factory=dict)
    """By block shape: zeros in blocks that are all zeros."""


@understood
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
    workers = reading_threads(max_memory, threads)
    with opened(src, threads=1, limits=limits) as source:
        wanted = [source[name] for name in filter(matcher(pattern), source)]
        rows = find_zeros(wanted, threads=workers, progress=progress)
        return SparsityReport(source.path, source.format, rows, source.notes)


def find_zeros(
    tensors: Iterable[LazyTensor], *, threads: int | None = None, progress: Progress | None = None
) -> tuple[TensorSparsity, ...]:
    """Look at every tensor whose elements are numbers."""
    wanted = [tensor for tensor in tensors if countable(tensor) and not tensor.dtype.paired]
    found = []
    work: list[Callable[[], None]] = []
    lock = threading.Lock()
    for tensor in wanted:
        with located(tensor=tensor.name):
            tensor.check_expansion()
        rows, columns = matrix_shape(tensor.shape) if tensor.ndim > 1 else (0, 0)
        about = ZeroCounts(np.zeros(rows, np.bool_), np.zeros(columns, np.bool_))
        found.append(about)
        work += [_task(tensor, about, tile, lock=lock, progress=progress) for tile in _tiles(tensor)]
    if work:
        run_reads(work, threads or default_threads(), stores=[tensor.source.store for tensor in wanted])
    return tuple(_row(tensor, about) for tensor, about in zip(wanted, found, strict=True))


Tile = tuple[int, int, int, int]


def _tiles(tensor: LazyTensor) -> Iterator[Tile]:
    """First and last row, first and last column."""
    rows, columns = matrix_shape(tensor.shape)
    if not tensor.size:
        return
    high = max(TILE_COLUMNS // max(columns, 1), 1) * TILE_ROWS
    for top in range(0, rows, high):
        for left in range(0, columns, TILE_COLUMNS if rows > 1 else TILE_COLUMNS * TILE_ROWS):
            yield top, min(top + high, rows), left, min(left + (TILE_COLUMNS if rows > 1 else TILE_COLUMNS * TILE_ROWS), columns)


def _task(
    tensor: LazyTensor, about: ZeroCounts, tile: Tile, *, lock: threading.Lock, progress: Progress | None
) -> Callable[[], None]:
    def run() -> None:
        top, bottom, left, right = tile
        columns = matrix_shape(tensor.shape)[1]
        with located(tensor=tensor.name):
            if (left, right) == (0, columns):
                values = read_flat(tensor, top * columns, bottom * columns).reshape(bottom - top, columns)
            else:
                values = np.stack([read_flat(tensor, r * columns + left, r * columns + right) for r in range(top, bottom)])
        zero = np.asarray(values == 0)
        zeros = int(np.count_nonzero(zero))
        counts = BlockCounts(zero)
        groups = [m for m in GROUPS if tensor.shape and tensor.shape[-1] % m == 0]
        most = {m: m - int(counts.of(1, m).min()) if zeros else m for m in groups}
        explained = _explained(counts, matrix_shape(tensor.shape)) if zeros else {}
        with lock:
            about.zeros += zeros
            for m, n in most.items():
                about.most[m] = max(about.most.get(m, 0), n)
            for shape, count in explained.items():
                about.explained[shape] = about.explained.get(shape, 0) + count
            if about.rows.size:
                about.rows[top:bottom] |= ~zero.all(axis=1)
                about.columns[left:right] |= ~zero.all(axis=0)
        if progress is not None:
            progress(tensor.dtype.nbytes(zero.size))

    return run


class BlockCounts:
    """How many are set in each block of a tile, for sides that are powers of two; each is made of two of half its size."""

    def __init__(self, tile: np.ndarray) -> None:
        self.shape = tile.shape
        self._made = {(1, 1): tile.astype(np.uint16)}

    def of(self, height: int, width: int) -> np.ndarray:
        """The counts; blocks at the lower and right edge are smaller."""
        if (height, width) not in self._made:
            half = self.of(height // 2, width) if height > 1 else self.of(1, width // 2).T
            whole = half[::2].copy()
            whole[: len(half) // 2] += half[1::2]
            self._made[height, width] = whole if height > 1 else whole.T
        return self._made[height, width]


def _explained(counts: BlockCounts, whole: tuple[int, int]) -> dict[tuple[int, int], int]:
    """For each block shape that fits into the whole, the zeros in blocks that are all zeros."""
    rows, columns = counts.shape
    explained = {}
    for height, width in BLOCKS:
        if height <= whole[0] and width <= whole[1]:
            sides = (np.diff(np.arange(0, n, step), append=n).astype(np.uint16) for n, step in ((rows, height), (columns, width)))
            found = counts.of(height, width)
            explained[height, width] = int(found.sum(where=found == np.multiply.outer(*sides), dtype=np.int64))
    return explained


def _row(tensor: LazyTensor, about: ZeroCounts) -> TensorSparsity:
    filled = tensor.size - about.zeros
    fits = [(n / m, m, n) for m, n in about.most.items() if 0 < n < m and filled >= EXPLAINED * tensor.size * n / m]
    pattern = min(fits, default=None)
    block = None
    if about.zeros and filled:
        block = next((shape for shape in BLOCKS if about.explained.get(shape, 0) >= EXPLAINED * about.zeros), None)
    dead = [int(alive.size - np.count_nonzero(alive)) for alive in (about.rows, about.columns)]
    return TensorSparsity(
        tensor.name, tensor.dtype.name, tensor.shape, about.zeros, (pattern[2], pattern[1]) if pattern else None, block, *dead
    )
