"""`scan`: one pass over the elements of tensors. Every byte is read once, whatever is computed of it.

1. Each tensor is cut into blocks: ranges of its elements in C order, or rectangles, where whole rows would be too much at once.
2. Where a tensor lies in one piece of a file, a range of elements is a range of bytes. Those of small neighbours are read together.
3. Everything else (strides, several pieces, another byte order, rectangles) is read by its source.
4. The accumulator of a tensor is made when its first block is there, and asked for its result after the last.

A tensor that is read by one block has its checksum compared, where its file records one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np

from holdfast.core.arrays import matrix_shape
from holdfast.core.box import Box
from holdfast.core.crc import crc32
from holdfast.core.dtype import WIDEST_NBYTES
from holdfast.core.protocols import Store
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.checksums import Progress, build_damage_error
from holdfast.engine.coalesce import REMOTE, SUMS, Ranges
from holdfast.engine.computed import read_flat_elements
from holdfast.engine.ranges import read_to_scratch
from holdfast.engine.source import OpenSource
from holdfast.engine.threads import DEFAULT_THREADS, computing, run_reads
from holdfast.errors import error_context
from holdfast.numeric.compare import Tally, compare_elements, element_dtype, view_as_numbers
from holdfast.numeric.statistics import FLOAT4_PAIRS

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

BLOCK_ELEMENTS = (
    1 << 18
)  # Elements at a time, a multiple of eight so that packed types are cut between bytes: 2 MiB as float64.

LOCAL = replace(SUMS, separate_nbytes=256 << 10, block_nbytes=1 << 20)
"""Blocks that are computed with: what is read together stays in a core's cache until the last of it was looked at."""


ElementBlock = tuple[int, int] | Box
"""Elements [start, stop) in C order, or a rectangle of the tensor as a matrix (first axis by all others)."""


RangeKey = tuple[str, int, int]
"""A range of a file: its key, first byte and length."""


class FileBlock(Value, frozen=True):
    """A block of a tensor that is a range of a file."""

    number: int
    """Of its tensor."""
    block: tuple[int, int]
    crc: int
    """What the file records for just these bytes; `NO_CRC` if that is not to be compared."""


class Accumulator(Protocol[T_co]):
    """What is found out about one tensor while its blocks pass by, in any order and from any thread. What depends on their order is
    kept a block and put together at the end: a result never depends on which thread was quicker."""

    def add(self, start: int, values: np.ndarray) -> None:
        """Look at a block whose first element has the index `start`: of one dimension, or of two for a rectangle. The elements are
        neither changed nor kept."""

    def result(self) -> T_co:
        """What all blocks come to. Asked once, after the last of them."""


def cut_elements(count: int, block: int = BLOCK_ELEMENTS) -> Iterator[tuple[int, int]]:
    return ((start, min(start + block, count)) for start in range(0, count, block))


def find_first_index(tensor: LazyTensor, block: ElementBlock) -> int:
    if isinstance(block, Box):
        return block.start[0] * matrix_shape(tensor.shape)[1] + block.start[1]
    return block[0]


def read_elements(tensor: LazyTensor, start: int, stop: int) -> np.ndarray:
    """Elements in C order as a 1-D array of something that numpy can compute with."""
    if tensor.dtype.name == FLOAT4_PAIRS:
        return view_as_numbers(tensor, read_flat_elements(tensor, start // 2, -(-stop // 2)))[
            start % 2 :
        ][: stop - start]
    return view_as_numbers(tensor, read_flat_elements(tensor, start, stop))


def read_block(tensor: LazyTensor, block: ElementBlock) -> np.ndarray:
    if not isinstance(block, Box):
        return read_flat_elements(tensor, *block)
    (top, left), (bottom, right), width = block.start, block.stop, matrix_shape(tensor.shape)[1]
    return np.stack(
        [
            read_flat_elements(tensor, row * width + left, row * width + right)
            for row in range(top, bottom)
        ]
    )


def compare_block(a: LazyTensor, b: LazyTensor, start: int, stop: int) -> Tally:
    """The tally of elements [start, stop), counted in C order; the tensors have one canonical shape. Reads both."""
    left, right = read_elements(a, start, stop), read_elements(b, start, stop)
    with computing():
        same_bits = element_dtype(a) is element_dtype(b)
        return compare_elements(left, right, same_bits=same_bits, start=start)


def scan(
    tensors: Sequence[LazyTensor], make: Callable[[int], Accumulator[T]],
    cut: Callable[[int], Iterable[ElementBlock]] | None = None, *, threads: int | None = None, progress: Progress | None = None,
) -> list[T]:  # fmt: skip
    """Show the blocks of each tensor to an accumulator, made of its number, and give the results in the order of the tensors. `cut`
    gives the blocks of a tensor by its number; without it they are ranges that cover the tensor. Booleans are shown as bytes of 0
    and 1. A tensor without blocks gives what its accumulator says of nothing."""
    run = _Scan(tensors, make, progress)
    tasks: list[Callable[[], None]] = []
    file_blocks: dict[Store, dict[RangeKey, list[FileBlock]]] = {}
    for number, tensor in enumerate(tensors):
        source, place = tensor.source, tensor.file_range()
        tensor_blocks = [*(cut_elements(tensor.size) if cut is None else cut(number))]
        run.left.append(len(tensor_blocks))
        flat_blocks = [block for block in tensor_blocks if not isinstance(block, Box)]
        if place is None or len(flat_blocks) < len(tensor_blocks):
            tasks += [partial(run.read, number, block) for block in tensor_blocks]
            continue
        key, first, _, crc = place
        compares = isinstance(source, OpenSource) and source.verify
        width = tensor.dtype.bits // 8
        for start, stop in flat_blocks:
            block_crc = crc if compares and stop - start == tensor.size else NO_CRC
            range_key = key, first + start * width, (stop - start) * width
            # Tied tensors have the same ranges, which are read once.
            range_keys = file_blocks.setdefault(source.store, {})
            range_keys.setdefault(range_key, []).append(FileBlock(number, (start, stop), block_crc))
    for store, range_keys in file_blocks.items():
        for batch in _cut_batches(store, range_keys):
            shown = [range_keys[range_key] for range_key in batch]
            tasks.append(partial(run.read_together, store, batch, shown))
    stores = [tensor.source.store for tensor in tensors]
    run_reads(tasks, threads or DEFAULT_THREADS, stores=stores)
    return run.results()


def _cut_batches(store: Store, range_keys: Iterable[RangeKey]) -> Iterator[list[RangeKey]]:
    """Group small neighbours, so that they are read together."""
    most_nbytes = REMOTE.block_nbytes if store.read_profile.request_count else LOCAL.block_nbytes
    batch: list[RangeKey] = []
    batch_nbytes = 0
    for range_key in sorted(range_keys):
        nbytes = range_key[2]
        if batch and batch_nbytes + nbytes > most_nbytes:
            yield batch
            batch, batch_nbytes = [], 0
        batch.append(range_key)
        batch_nbytes += nbytes
    if batch:
        yield batch


class _Scan(Generic[T]):
    """The accumulators of tensors that are begun, and the results of those that are finished."""

    def __init__(
        self,
        tensors: Sequence[LazyTensor],
        make: Callable[[int], Accumulator[T]],
        progress: Progress | None,
    ) -> None:
        self.tensors, self._make, self._progress = tensors, make, progress
        self.left: list[int] = []  # Blocks of each tensor that were not looked at yet.
        self._begun: dict[int, Accumulator[T]] = {}
        self._found: dict[int, T] = {}
        self._lock = threading.Lock()

    def read(self, number: int, block: ElementBlock) -> None:
        tensor = self.tensors[number]
        with error_context(tensor=tensor.name):
            self.show(number, block, read_block(tensor, block))

    def read_together(
        self, store: Store, batch: Sequence[RangeKey], shown: Sequence[Sequence[FileBlock]]
    ) -> None:
        """Read a batch, and show each of its ranges as the blocks that it is."""
        policy = REMOTE if store.read_profile.request_count else LOCAL
        name = lambda position: self.tensors[shown[position][0].number].name  # noqa: E731
        data = read_to_scratch(store, Ranges.from_tuples(batch), name, policy=policy)
        stop = 0
        for (_, _, nbytes), blocks in zip(batch, shown, strict=True):
            start, stop = stop, stop + nbytes
            content = data[start:stop] if start % WIDEST_NBYTES == 0 else data[start:stop].copy()
            for block in blocks:
                tensor = self.tensors[block.number]
                if block.crc != NO_CRC and (found := crc32(content.data)) != block.crc:
                    raise build_damage_error(tensor.storages[0], tensor.name, found)
                with error_context(tensor=tensor.name):
                    self.show(block.number, block.block, content.view(tensor.dtype.numpy))

    def show(self, number: int, block: ElementBlock, values: np.ndarray) -> None:
        values = values.view(np.uint8) if values.dtype == np.bool_ else values
        # Two threads may both make one; `setdefault` keeps the first.
        one = self._begun.get(number) or self._begun.setdefault(number, self._make(number))
        with computing():
            one.add(find_first_index(self.tensors[number], block), values)
            with self._lock:
                self.left[number] -= 1
                done = not self.left[number]
            if done:
                self._found[number] = self._begun.pop(number).result()
        if self._progress is not None:
            self._progress(self.tensors[number].dtype.nbytes(values.size))

    def results(self) -> list[T]:
        return [
            self._found[at] if at in self._found else self._make(at).result()
            for at in range(len(self.tensors))
        ]
