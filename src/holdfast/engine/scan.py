"""Passes over the elements of many tensors, in blocks and by several threads.

`scan` reads every byte once, whatever is computed from it:

1. Each tensor is cut into blocks: ranges of its elements in C order, or rectangles if whole rows
   would be too large.
2. If a tensor is one range of a file, so is each range of its elements. Small neighbors are read
   together.
3. All other blocks are read by the source of the tensor.
4. The blocks go to an accumulator of the tensor (`numeric/`). It is made before the first block,
   and asked for its result after the last one.

If a tensor is read as one block and its file records a checksum, the checksum is compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar, cast

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

BLOCK_ELEMENTS = 1 << 18
"""The most elements of a block: 2 MiB as float64. It is a multiple of eight, so that packed types
are cut between bytes."""

LOCAL = replace(SUMS, separate_nbytes=256 << 10, block_nbytes=1 << 20)
"""How blocks of local files are joined. What is read together stays in the cache of a core until
the last block of it has been processed."""

ElementBlock = tuple[int, int] | Box
"""The elements [start, stop) of a tensor in C order, or a rectangle of the tensor as a matrix,
whose rows are the first axis and whose columns are all others."""

FileRange = tuple[str, int, int]
"""The file, the first byte and the length of a range."""


class FileBlock(Value, frozen=True):
    """A block of a tensor that is a range of a file."""

    tensor_index: int
    elements: tuple[int, int]
    """The first element, and the one after the last element."""
    crc: int
    """The recorded CRC-32 of exactly these bytes; `NO_CRC` if it is not compared."""


class Accumulator(Protocol[T_co]):
    """Computes something from the blocks of one tensor.

    Blocks come in any order and from any thread. The result must not depend on their order. So what
    does depend on it, such as a sum of floats, is stored for each block and combined at the end.
    """

    def add(self, start: int, values: np.ndarray) -> None:
        """Process a block. Its elements must not be changed or stored.

        Args:
            start: The index of its first element in C order.
            values: The elements, in one dimension; in two for a rectangle.
        """

    def result(self) -> T_co:
        """Return the result. This is called once, after the last block."""


def cut_elements(
    element_count: int, block_elements: int = BLOCK_ELEMENTS
) -> Iterator[tuple[int, int]]:
    """Cut a row of elements into blocks.

    Args:
        element_count: The number of all elements.
        block_elements: The most elements of a block.

    Yields:
        The index of the first element of a block, and the index after its last element.
    """
    for start in range(0, element_count, block_elements):
        yield start, min(start + block_elements, element_count)


def find_first_index(tensor: LazyTensor, block: ElementBlock) -> int:
    """Return the index in the C order of a tensor of the first element of a block."""
    if isinstance(block, Box):
        # A rectangle of the tensor as a matrix: its first axis, by all other axes.
        top, left = block.start
        _, column_count = matrix_shape(tensor.shape)
        return top * column_count + left
    return block[0]


def read_elements(tensor: LazyTensor, start: int, stop: int) -> np.ndarray:
    """Read the elements [start, stop) of a tensor in C order.

    Returns:
        A 1-D array of a type that numpy can compute with.
    """
    if tensor.dtype.name != FLOAT4_PAIRS:
        return view_as_numbers(tensor, read_flat_elements(tensor, start, stop))
    # Each byte has two of these elements, so whole bytes are read: `stop // 2` is rounded up.
    pairs = read_flat_elements(tensor, start // 2, -(-stop // 2))
    numbers = view_as_numbers(tensor, pairs)
    # An odd start is the second element of its byte.
    first = start % 2
    return numbers[first : first + stop - start]


def read_block(tensor: LazyTensor, block: ElementBlock) -> np.ndarray:
    """Read a block of a tensor.

    Returns:
        An array of one dimension for a range of elements, of two dimensions for a rectangle.
    """
    if not isinstance(block, Box):
        start, stop = block
        return read_flat_elements(tensor, start, stop)

    # Each row of the rectangle is a range of elements in C order.
    top, left = block.start
    bottom, right = block.stop
    _, column_count = matrix_shape(tensor.shape)
    rows: list[np.ndarray] = []
    for row in range(top, bottom):
        row_start = row * column_count
        rows.append(read_flat_elements(tensor, row_start + left, row_start + right))
    return np.stack(rows)


def compare_block(a: LazyTensor, b: LazyTensor, start: int, stop: int) -> Tally:
    """Read the elements [start, stop) of two tensors in C order, and count their differences.

    The tensors have the same shape and dtype in canonical form.
    """
    elements_a = read_elements(a, start, stop)
    elements_b = read_elements(b, start, stop)
    with computing():
        # Elements of one type can be compared as bits, which is faster than as numbers.
        compare_bits = element_dtype(a) is element_dtype(b)
        return compare_elements(elements_a, elements_b, compare_bits=compare_bits, start=start)


def scan(
    tensors: Sequence[LazyTensor],
    make_accumulator: Callable[[int], Accumulator[T]],
    cut_tensor: Callable[[int], Iterable[ElementBlock]] | None = None,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[T]:
    """Pass the blocks of each tensor to an accumulator, and return the results.

    Every byte is read once, by several threads. Blocks of a tensor that is one range of a file are
    ranges as well, and small neighbors are read together. The source of the tensor reads all other
    blocks. Booleans are passed as bytes of 0 and 1.

    Args:
        tensors: The tensors.
        make_accumulator: Makes the accumulator of a tensor, given its index in `tensors`.
        cut_tensor: Returns the blocks of a tensor, given its index. They need not cover the tensor.
            By default they are ranges of all elements.
        threads: The number of threads.
        progress: Called with the bytes of blocks that were processed.

    Returns:
        The result of each tensor. That of a tensor without blocks comes from a new accumulator.
    """
    scan_state = _ScanState(tensors, make_accumulator, progress)
    tasks: list[Callable[[], None]] = []
    # For each store and range of a file, the blocks that have these bytes.
    file_blocks: dict[Store, dict[FileRange, list[FileBlock]]] = {}
    for tensor_index, tensor in enumerate(tensors):
        if cut_tensor is None:
            blocks: list[ElementBlock] = [*cut_elements(tensor.size)]
        else:
            blocks = [*cut_tensor(tensor_index)]
        scan_state.remaining_blocks.append(len(blocks))

        tensor_range = tensor.file_range()
        has_rectangles = any(isinstance(block, Box) for block in blocks)
        if tensor_range is None or has_rectangles:
            tasks += [partial(scan_state.read, tensor_index, block) for block in blocks]
            continue

        key, tensor_start, _, crc = tensor_range
        is_verified = isinstance(tensor.source, OpenSource) and tensor.source.verify
        itemsize = tensor.dtype.bits // 8
        # Tied tensors have the same ranges, which are read once.
        store_blocks = file_blocks.setdefault(tensor.source.store, {})
        for block in blocks:
            start, stop = cast("tuple[int, int]", block)
            block_range = (key, tensor_start + start * itemsize, (stop - start) * itemsize)
            # The file records a checksum of the whole tensor, which says nothing about a part of it.
            is_whole = stop - start == tensor.size
            block_crc = crc if is_verified and is_whole else NO_CRC
            file_block = FileBlock(tensor_index, (start, stop), block_crc)
            store_blocks.setdefault(block_range, []).append(file_block)

    for store, store_blocks in file_blocks.items():
        for ranges in _group_neighbors(store, store_blocks):
            range_blocks = [store_blocks[block_range] for block_range in ranges]
            tasks.append(partial(scan_state.read_together, store, ranges, range_blocks))
    stores = [tensor.source.store for tensor in tensors]
    run_reads(tasks, threads or DEFAULT_THREADS, stores=stores)
    return scan_state.list_results()


def _group_neighbors(store: Store, ranges: Iterable[FileRange]) -> Iterator[list[FileRange]]:
    """Sort ranges of files, and yield groups of small neighbors that are read together.

    A group has at most as many bytes as a block of the join policy. A larger range is a group of
    its own.
    """
    # Each request to a remote store takes long, so its groups are larger.
    policy = REMOTE if store.read_profile.request_count else LOCAL
    group: list[FileRange] = []
    group_nbytes = 0
    for file_range in sorted(ranges):
        _, _, nbytes = file_range
        if group and group_nbytes + nbytes > policy.block_nbytes:
            yield group
            group = []
            group_nbytes = 0
        group.append(file_range)
        group_nbytes += nbytes
    if group:
        yield group


class _ScanState(Generic[T]):
    """The accumulators of tensors with blocks that remain, and the results of finished tensors."""

    def __init__(
        self,
        tensors: Sequence[LazyTensor],
        make_accumulator: Callable[[int], Accumulator[T]],
        progress: Progress | None,
    ) -> None:
        """Start without accumulators. The caller fills `remaining_blocks` before the first block.

        Args:
            tensors: See `scan`.
            make_accumulator: See `scan`.
            progress: See `scan`.
        """
        self.tensors = tensors
        self.remaining_blocks: list[int] = []
        """How many blocks of each tensor have not been processed."""
        self._make_accumulator = make_accumulator
        self._progress = progress
        self._accumulators: dict[int, Accumulator[T]] = {}
        self._results: dict[int, T] = {}
        self._lock = threading.Lock()

    def read(self, tensor_index: int, block: ElementBlock) -> None:
        """Read one block by the source of its tensor, and process it."""
        tensor = self.tensors[tensor_index]
        with error_context(tensor=tensor.name):
            self._process(tensor_index, block, read_block(tensor, block))

    def read_together(
        self,
        store: Store,
        ranges: Sequence[FileRange],
        range_blocks: Sequence[Sequence[FileBlock]],
    ) -> None:
        """Read neighboring ranges of files, and process their blocks.

        Args:
            store: The store of the files.
            ranges: The ranges.
            range_blocks: The blocks of each range. Tied tensors have blocks of the same range.
        """

        def find_tensor_name(range_index: int) -> str:
            """Return the name of a tensor that has this range, for errors."""
            first_block = range_blocks[range_index][0]
            return self.tensors[first_block.tensor_index].name

        policy = REMOTE if store.read_profile.request_count else LOCAL
        # The ranges are one behind the other in `data`.
        data = read_to_scratch(store, Ranges.from_tuples(ranges), find_tensor_name, policy=policy)
        stop = 0
        for (_, _, nbytes), blocks in zip(ranges, range_blocks, strict=True):
            start = stop
            stop += nbytes
            content = data[start:stop]
            if start % WIDEST_NBYTES != 0:
                # numpy needs elements that are aligned to their size. The ranges before this one
                # can have any length, so its content may start anywhere. A copy is aligned.
                content = content.copy()
            for block in blocks:
                tensor = self.tensors[block.tensor_index]
                if block.crc != NO_CRC:
                    # The block is the whole tensor, which is all of its only storage.
                    crc = crc32(content.data)
                    if crc != block.crc:
                        raise build_damage_error(tensor.storages[0], tensor.name, crc)
                with error_context(tensor=tensor.name):
                    values = content.view(tensor.dtype.numpy)
                    self._process(block.tensor_index, block.elements, values)

    def _process(self, tensor_index: int, block: ElementBlock, values: np.ndarray) -> None:
        """Pass a block to the accumulator of its tensor.

        The last block of a tensor also asks the accumulator for its result and frees it, so that
        only tensors with blocks under way take memory.

        Args:
            tensor_index: The index of the tensor.
            block: Which elements of the tensor the block has.
            values: The elements.
        """
        tensor = self.tensors[tensor_index]
        if values.dtype == np.bool_:
            values = values.view(np.uint8)
        accumulator = self._accumulators.get(tensor_index)
        if accumulator is None:
            # Two threads may both get here. `setdefault` returns the accumulator of the first one
            # to both.
            new_accumulator = self._make_accumulator(tensor_index)
            accumulator = self._accumulators.setdefault(tensor_index, new_accumulator)
        with computing():
            accumulator.add(find_first_index(tensor, block), values)
            with self._lock:
                self.remaining_blocks[tensor_index] -= 1
                is_last = self.remaining_blocks[tensor_index] == 0
            if is_last:
                self._results[tensor_index] = accumulator.result()
                del self._accumulators[tensor_index]
        if self._progress is not None:
            self._progress(tensor.dtype.nbytes(values.size))

    def list_results(self) -> list[T]:
        """Return the result of each tensor, after all blocks have been processed."""
        # A tensor without blocks, such as an empty one, has no result yet.
        for tensor_index in range(len(self.tensors)):
            if tensor_index not in self._results:
                self._results[tensor_index] = self._make_accumulator(tensor_index).result()
        return [self._results[tensor_index] for tensor_index in range(len(self.tensors))]
