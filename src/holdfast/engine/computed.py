"""Tensors whose elements are computed when they are read: casts, and decoded quantized blocks.

A computed tensor is an ordinary lazy tensor, but no file has its storage. To read a range of this
storage means to read the elements of the original tensor that it depends on, and to apply a
function to them. So slices, checksums and saves work on computed tensors as on any others, within
the same limit of memory.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from weakref import ref

import numpy as np

from holdfast.core.arrays import Ints, byte_row
from holdfast.core.box import Box, run_boxes
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.options import validate_arguments
from holdfast.core.protocols import Request
from holdfast.core.quantities import describe_value
from holdfast.core.sharing import ViewIdentity, identify_view
from holdfast.core.table import BytesLike, RowKind, StorageMoved, Storages, Table, read_tensors
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import pluralize
from holdfast.core.value import Value, replace
from holdfast.engine.blocks import find_contiguous_bytes
from holdfast.engine.saves import Data, Memory
from holdfast.engine.source import OpenSource
from holdfast.engine.threads import computing
from holdfast.errors import BadArgumentType, Unsupported, error_context
from holdfast.numeric.dequantize import BLOCK_TYPES, BlockType
from holdfast.stores.virtual import Virtual, VirtualFile, tensor_stamp

Compute = Callable[[np.ndarray], np.ndarray]
"""Computes new elements from original ones, element by element."""

Observe = Callable[[np.ndarray, np.ndarray], None]
"""Receives original elements and what was computed from them. Any thread may call it."""

ObserveRows = Callable[[Sequence[str], Ints, np.ndarray, np.ndarray], None]
"""Receives the names of several tensors, the index of the first element of each, the elements of
all of them in one array, and what was computed from these. Any thread may call it."""

DECODED_ELEMENTS = 1 << 18
"""How many elements of quantized blocks are decoded at a time, so that all arrays that are needed
for it stay in the cache."""


def read_flat_elements(
    tensor: LazyTensor, start: int, stop: int, *, out: np.ndarray | None = None
) -> np.ndarray:
    """Read consecutive elements of a tensor in C order.

    Args:
        tensor: The tensor.
        start: The index of the first element, counted through the whole tensor.
        stop: The index after the last element.
        out: A one-dimensional array to read into. None for a new array.

    Returns:
        The elements, as a one-dimensional array.
    """
    if out is None:
        out = np.empty(stop - start, tensor.dtype.numpy)
    source = tensor.source
    itemsize = out.dtype.itemsize
    is_unpacked = itemsize * 8 == tensor.dtype.bits
    # A part of a tensor in a local file is read by one call. To plan the read of a megabyte takes
    # half as long as to copy it, and holds the interpreter lock.
    if (
        isinstance(source, OpenSource)
        and source.store.read_profile.is_file
        and is_unpacked
        and len(out) < tensor.size
    ):
        position = find_contiguous_bytes(tensor)
        if position is not None:
            key, tensor_start = position
            with error_context(tensor=tensor.name):
                source.store.read(key, tensor_start + start * itemsize, byte_row(out).data)
            source.read_nbytes += out.nbytes
            return out

    requests: list[Request] = []
    box_start = 0
    for box in run_boxes(tensor.shape, start, stop):
        box_tensor = tensor
        # A tensor without dimensions cannot be sliced.
        if box.rank:
            box_tensor = tensor[box.slices]
        box_stop = box_start + box_tensor.size
        box_out = out[box_start:box_stop].reshape(box_tensor.shape)
        requests.append(Request(box_tensor, box_out))
        box_start = box_stop
    source.read(requests)
    return out


class SeenElements:
    """Remembers which elements of a tensor were seen before. Threads may share it.

    A tensor may be read twice, in blocks that start at other elements the second time.
    """

    def __init__(self) -> None:
        """Start without any element."""
        self._starts: list[int] = []
        self._stops: list[int] = []
        """The ranges that were seen, ascending. They do not touch each other."""
        self._lock = threading.Lock()

    def add(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Add a range of elements, and return the ranges of it that were not seen before.

        >>> seen = SeenElements()
        >>> seen.add(0, 4), seen.add(6, 9), seen.add(3, 10), seen.add(1, 9)
        ([(0, 4)], [(6, 9)], [(4, 6), (9, 10)], [])
        """
        if start >= stop:
            return []
        with self._lock:
            # Both lists are ascending, so binary search finds the ranges that overlap or touch the
            # new one. They become one range with it.
            first = bisect_left(self._stops, start)
            last = bisect_right(self._starts, stop)
            merged_starts = self._starts[first:last]
            merged_stops = self._stops[first:last]
            # The gaps between these ranges are the unseen parts of the new one.
            unseen: list[tuple[int, int]] = []
            unseen_start = start
            for seen_start, seen_stop in zip(merged_starts, merged_stops, strict=True):
                if unseen_start < seen_start:
                    unseen.append((unseen_start, seen_start))
                unseen_start = max(unseen_start, seen_stop)
            if unseen_start < stop:
                unseen.append((unseen_start, stop))
            self._starts[first:last] = [min([start, *merged_starts])]
            self._stops[first:last] = [max([stop, *merged_stops])]
            return unseen


def _find_units(start: int, nbytes: int, unit_nbytes: int) -> tuple[int, int]:
    """Find the units of a fixed size, such as elements, that a range of bytes touches.

    The range may begin and end inside of a unit.

    Args:
        start: The first byte of the range.
        nbytes: The size of the range.
        unit_nbytes: The size of a unit.

    Returns:
        The index of the first unit, and the index after the last unit.
    """
    first_unit = start // unit_nbytes
    # The double negation rounds up.
    stop_unit = -(-(start + nbytes) // unit_nbytes)
    return first_unit, stop_unit


class Computation(Value, frozen=True, eq=False):
    """How the storage of one computed tensor is read."""

    original: LazyTensor
    dtype: DType
    """The dtype of the computed elements."""
    compute: Compute
    observe: Observe | None
    seen: SeenElements
    """The elements that `observe` has received. It receives each element once."""

    def read(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of the storage from `start` on.

        The range may begin and end inside of an element. Such elements are computed completely.
        """
        itemsize = self.dtype.bits // 8
        first, stop = _find_units(start, out.nbytes, itemsize)
        elements = read_flat_elements(self.original, first, stop)
        with computing():
            computed = np.ascontiguousarray(self.compute(elements), self.dtype.numpy)
            if self.observe is not None:
                # The same elements may be read again, for example once more for a checksum.
                for unseen_start, unseen_stop in self.seen.add(first, stop):
                    unseen = slice(unseen_start - first, unseen_stop - first)
                    self.observe(elements[unseen], computed[unseen])
            skipped_nbytes = start - first * itemsize
            out[:] = byte_row(computed).data[skipped_nbytes : skipped_nbytes + out.nbytes]


class SourcedStore(Virtual):
    """A virtual store that makes lazy tensors over its own entries.

    The tensors keep their source alive, and the source keeps this store alive. The store itself
    refers to the source weakly: a cycle would keep all memory until the garbage collector runs.
    """

    _source_ref: ref[OpenSource] | None = None

    @property
    def source(self) -> OpenSource:
        """The source of the tensors. It stays the same as long as one of them exists."""
        source = None
        if self._source_ref is not None:
            source = self._source_ref()
        # No tensor exists yet, or all of them are gone, and the source with them.
        if source is None:
            source = OpenSource(self, threads=1)
            self._source_ref = ref(source)
        return source

    def add_tensor(
        self, name: str, dtype: DType, shape: tuple[int, ...], entry: VirtualFile
    ) -> LazyTensor:
        """Return a tensor whose C-ordered elements are the content of a new entry."""
        storage = Storage(self.put(entry), 0, entry.size(), label=name, home=self)
        return LazyTensor.contiguous(name, dtype, shape, storage, self.source)


class ComputedTensors(SourcedStore):
    """A store of computed tensors."""

    def __init__(self) -> None:
        """Create a store without tensors."""
        super().__init__("<computed>")

    def make_computed_tensor(
        self,
        original: LazyTensor,
        dtype: DType,
        compute: Compute,
        *,
        observe: Observe | None = None,
        seen: SeenElements | None = None,
    ) -> LazyTensor:
        """Return a tensor of the same shape whose elements are computed from the original's.

        Args:
            original: The tensor to read.
            dtype: The dtype of the computed elements.
            compute: Computes them.
            observe: Receives every element once, however often it is read.
            seen: The elements that `observe` has received before. None if there are none.

        Raises:
            Unsupported: Elements of this dtype share bytes.
        """
        if dtype.packed:
            raise Unsupported(
                f"elements of {dtype} share bytes and cannot be computed one by one",
                tensor=original.name,
            )
        if seen is None:
            seen = SeenElements()
        computation = Computation(original, dtype, compute, observe, seen)
        entry = VirtualFile(
            dtype.nbytes(original.size),
            computation.read,
            stamp=partial(tensor_stamp, original),
            read_nbytes=original.dtype.nbytes(original.size),
        )
        tensor = self.add_tensor(original.name, dtype, original.shape, entry)
        # Reading the original resolves its flags for conjugated and negated elements.
        return replace(tensor, traits=replace(original.traits, conj=False, neg=False))


class ElementwiseComputation(Value, frozen=True, eq=False):
    """A computation for many tensors of one dtype, such as a cast."""

    origin: DType
    """The dtype of the original elements."""
    dtype: DType
    """The dtype of the computed elements."""
    compute: Compute
    observe: ObserveRows


class ComputedStorages:
    """The storages of a table, followed by storages that are computed from tensors.

    A computed storage has the elements of its tensor in C order. Many short ones are computed
    together, a long one is computed a block at a time.
    """

    can_read_ranges = False

    def __init__(
        self,
        origin: Storages,
        computations: Sequence[ElementwiseComputation],
        computation_indices: Sequence[int],
        originals: Sequence[LazyTensor],
    ) -> None:
        """Append computed storages to others.

        Args:
            origin: The storages that are not computed. They keep their indices.
            computations: The computations.
            computation_indices: The computation of each original, as an index into `computations`.
            originals: The tensors that the new storages are computed from, in the same order.
        """
        self._origin = origin
        self._originals = originals
        self._computations = computations
        self._first_computed = len(origin.nbytes)
        """The index of the first computed storage."""
        not_computed = np.full(self._first_computed, -1)
        self._computation_indices: Ints = np.concatenate(
            [not_computed, np.array(computation_indices, np.int64)]
        )
        """The computation of each storage; -1 for storages that are not computed."""
        computed_nbytes: list[int] = []
        for original, index in zip(originals, computation_indices, strict=True):
            computed_nbytes.append(original.size * computations[index].dtype.numpy.itemsize)
        # To read a computed storage means to read as many bytes as its original has.
        original_nbytes = np.array([original.nbytes for original in originals], np.int64)
        self.nbytes: Ints = np.concatenate([origin.nbytes, np.array(computed_nbytes, np.int64)])
        self.read_nbytes: Ints = np.concatenate([origin.read_nbytes, original_nbytes])
        original_stores = [original.source.store for original in originals]
        self.stores = tuple(dict.fromkeys((*origin.stores, *original_stores)))

        self._store = ComputedTensors()
        self._tensors: dict[int, tuple[LazyTensor, SeenElements]] = {}
        """Computed storages that are read by lazy tensors, a block at a time. Each has the elements
        of the tensor that were observed."""
        self._is_observed = np.zeros(len(self.nbytes), np.bool_)
        """The storages of which all elements were observed, in a batch with others."""
        self._lock = threading.Lock()
        """Protects `_tensors` and `_is_observed`."""

    def read(self, storage_indices: Sequence[int]) -> Sequence[BytesLike]:
        """Read whole storages, all together.

        The originals of all computed storages are read first. Then one call computes the elements
        of all storages that have the same computation.
        """
        contents = self._read_originals(storage_indices)
        requested = np.array(storage_indices, np.int64)
        computation_indices = self._computation_indices[requested]
        for computation_index in np.unique(computation_indices).tolist():
            # -1 stands for storages that are not computed.
            if computation_index < 0:
                continue
            computation = self._computations[computation_index]
            positions = np.flatnonzero(computation_indices == computation_index)
            original_bytes = b"".join([contents[position] for position in positions.tolist()])
            elements = np.frombuffer(original_bytes, computation.origin.numpy)
            with computing():
                computed = np.ascontiguousarray(
                    computation.compute(elements), computation.dtype.numpy
                )
                self._observe(computation, requested[positions], elements, computed)

            data = byte_row(computed).data
            start = 0
            for position in positions.tolist():
                stop = start + self.nbytes.item(storage_indices[position])
                contents[position] = data[start:stop]
                start = stop
        return contents

    def read_ranges(
        self, storage_indices: Sequence[int], starts: Sequence[int], nbytes: Sequence[int]
    ) -> Sequence[BytesLike]:
        """Raise an error. `can_read_ranges` is false, so no caller reads ranges."""
        raise NotImplementedError

    def _read_originals(self, storage_indices: Sequence[int]) -> list[BytesLike]:
        """Read the bytes of storages that are not computed, and of the originals of all others."""
        stored_positions: list[int] = []
        computed_positions: list[int] = []
        for position, index in enumerate(storage_indices):
            if index < self._first_computed:
                stored_positions.append(position)
            else:
                computed_positions.append(position)

        contents: list[BytesLike] = [b""] * len(storage_indices)
        stored_indices = [storage_indices[position] for position in stored_positions]
        try:
            stored_contents = self._origin.read(stored_indices)
        except StorageMoved as moved:
            # The index in the error counts only the storages that are not computed.
            raise StorageMoved(stored_positions[moved.request_index]) from None
        for position, content in zip(stored_positions, stored_contents, strict=True):
            contents[position] = content

        # `read_tensors` reads the originals of all computed storages together.
        originals: list[LazyTensor] = []
        for position in computed_positions:
            originals.append(self._originals[storage_indices[position] - self._first_computed])
        for position, array in zip(computed_positions, read_tensors(originals), strict=True):
            contents[position] = byte_row(array).data
        return contents

    def _observe(
        self,
        computation: ElementwiseComputation,
        storage_indices: Ints,
        elements: np.ndarray,
        computed: np.ndarray,
    ) -> None:
        """Pass the elements of storages to the observer of their computation, each element once.

        An observer counts, for example, what a cast loses. A storage may be read again, in a batch
        as here or block by block, and the observer must not count its elements twice.

        Args:
            computation: The computation of these storages.
            storage_indices: The storages of one batch.
            elements: The original elements of all these storages, one storage behind the other.
            computed: The computed elements.
        """
        # Storages without elements have nothing to observe.
        counts = self.nbytes[storage_indices] // computation.dtype.numpy.itemsize
        storage_indices = storage_indices[counts > 0]
        counts = counts[counts > 0]

        # Two threads may read the same storage. Only the first of them finds it unobserved.
        with self._lock:
            was_observed = self._is_observed[storage_indices]
            # A storage with a lazy tensor may have been read block by block, in part or completely.
            has_tensor = np.isin(storage_indices, list(self._tensors))
            self._is_observed[storage_indices] = True

        # New storages are observed all together.
        is_new = ~was_observed & ~has_tensor
        if is_new.any():
            new_counts = counts[is_new]
            new_starts = np.cumsum(new_counts) - new_counts
            new_elements = elements
            new_computed = computed
            # Nearly always, all storages are new. Then the elements are not copied.
            if not is_new.all():
                is_new_element = np.repeat(is_new, counts)
                new_elements = elements[is_new_element]
                new_computed = computed[is_new_element]
            names = self._list_names(storage_indices[is_new])
            computation.observe(names, new_starts, new_elements, new_computed)

        # Storages with a lazy tensor are observed one by one, without the elements that were seen.
        starts = np.cumsum(counts) - counts
        for position in np.flatnonzero(has_tensor & ~was_observed).tolist():
            storage_index = storage_indices.item(position)
            start = starts.item(position)
            stop = start + counts.item(position)
            self._observe_unseen(
                computation, storage_index, elements[start:stop], computed[start:stop]
            )

    def _observe_unseen(
        self,
        computation: ElementwiseComputation,
        storage_index: int,
        elements: np.ndarray,
        computed: np.ndarray,
    ) -> None:
        """Pass the elements of one storage to the observer that it has not received yet."""
        name = self._originals[storage_index - self._first_computed].name
        first = np.zeros(1, np.int64)
        _, seen = self._tensors[storage_index]
        for start, stop in seen.add(0, len(elements)):
            computation.observe([name], first, elements[start:stop], computed[start:stop])

    def _list_names(self, storage_indices: Ints) -> list[str]:
        """Return the name of the original of each computed storage."""
        return [self._originals[index - self._first_computed].name for index in storage_indices]

    def _get_tensor(self, storage_index: int) -> LazyTensor:
        """Return a computed storage as a lazy tensor, which is computed a block at a time.

        The same storage has the same tensor, so that its elements are observed only once.
        """
        with self._lock:
            if storage_index not in self._tensors:
                computation = self._computations[self._computation_indices[storage_index]]
                original = self._originals[storage_index - self._first_computed]
                # `observe` must not refer to `self`, which refers to the tensor. Such a cycle would
                # keep all memory until the garbage collector runs.
                is_observed = self._is_observed

                def observe(elements: np.ndarray, computed: np.ndarray) -> None:
                    # A batch may have observed all elements of this storage before.
                    if not is_observed[storage_index]:
                        first = np.zeros(1, np.int64)
                        computation.observe([original.name], first, elements, computed)

                seen = SeenElements()
                tensor = self._store.make_computed_tensor(
                    original, computation.dtype, computation.compute, observe=observe, seen=seen
                )
                self._tensors[storage_index] = (tensor, seen)
            return self._tensors[storage_index][0]

    def segment(self, storage_index: int, label: str) -> bytes | Data | Memory:
        """Return one storage as a segment of a planned file, or `b""` if it is empty."""
        if storage_index < self._first_computed:
            return self._origin.segment(storage_index, label)
        if not self.nbytes[storage_index]:
            return b""
        return Data(self._get_tensor(storage_index), label)

    def lazy_tensor(self, storage_index: int, kind: RowKind, name: str, offset: int) -> LazyTensor:
        """Return a lazy tensor over a storage, with its first element at the bit `offset` of it."""
        if storage_index < self._first_computed:
            return self._origin.lazy_tensor(storage_index, kind, name, offset)
        # The tensor has its own dtype, shape and offset. Only the storage is the computed one.
        tensor = self._get_tensor(storage_index)
        chunk = Chunk(Box.whole(kind.shape), tensor.chunks[0].storage, offset, kind.strides)
        return LazyTensor(name, kind.dtype, kind.shape, (chunk,), tensor.source, kind.traits)


@validate_arguments
def dequantize(tensor: LazyTensor) -> LazyTensor:
    """Return a tensor of quantized blocks as float32. It is decoded when it is read.

    Slice the result and not the blocks: of these, only a whole tensor can be decoded.

    Args:
        tensor: A tensor with `tensor.traits.blocks`, as GGUF has them. Any other tensor is returned
            as it is.
    """
    if not isinstance(tensor, LazyTensor):
        raise BadArgumentType(
            f"dequantize takes a lazy tensor, not {describe_value(tensor)}", found=tensor
        )
    return DequantizedTensors().decode(tensor)


class DequantizedTensors(SourcedStore):
    """A store of tensors that are decoded from quantized blocks."""

    def __init__(self) -> None:
        """Create a store without tensors."""
        super().__init__("<dequantized>")
        self._decoded: dict[ViewIdentity, LazyTensor] = {}
        """The decoded tensors, by the elements of the originals."""

    def decode_if_known(self, tensor: LazyTensor) -> LazyTensor:
        """Return a tensor decoded, or as it is if it is not quantized or cannot be decoded.

        Tensors with the same elements share one decoded storage.
        """
        if tensor.traits.blocks is None:
            return tensor
        view = identify_view(tensor)
        if view not in self._decoded:
            # Blocks that cannot be decoded are no error here: the caller asked for all that can.
            try:
                self._decoded[view] = self.decode(tensor)
            except Unsupported:
                self._decoded[view] = tensor
        return replace(self._decoded[view], name=tensor.name)

    def copy_tensor(self, tensor: LazyTensor) -> LazyTensor:
        """Return a tensor of this store with the same elements.

        All parts of a joined tensor must be in one store, so others are read through this one.
        """
        entry = VirtualFile(
            tensor.nbytes, partial(_copy_elements, tensor), stamp=partial(tensor_stamp, tensor)
        )
        copied = self.add_tensor(tensor.name, tensor.dtype, tensor.shape, entry)
        # Reading the original resolves its flags for conjugated and negated elements.
        return replace(copied, traits=replace(tensor.traits, conj=False, neg=False))

    def decode(self, tensor: LazyTensor) -> LazyTensor:
        """Return a tensor decoded as float32, or as it is if it is not quantized.

        The last axis of a quantized tensor has the bytes of its blocks.

        Raises:
            Unsupported: The blocks cannot be decoded, or the last axis ends inside of a block.
        """
        if tensor.traits.blocks is None:
            return tensor
        block_type = _find_block_type(tensor)
        shape = block_type.decoded_shape(tensor.shape)
        float32 = DTYPES.name("float32")
        if shape is None or float32 is None:
            raise Unsupported(
                f"the last axis of {list(tensor.shape)} is not a whole number of {block_type.name} "
                "blocks; dequantize the tensor first, and slice the result",
                tensor=tensor.name,
            )
        # The decoded elements are new, so they are not a view of another storage.
        traits = replace(tensor.traits, blocks=None, alias=None)
        # A tensor of the meta device has no blocks to decode.
        if tensor.traits.meta:
            return replace(tensor, dtype=float32, shape=shape, traits=traits)
        block_count = tensor.size // block_type.nbytes
        entry = VirtualFile(
            float32.nbytes(block_count * block_type.elements),
            partial(_decode_range, tensor, block_type),
            stamp=partial(tensor_stamp, tensor),
            read_nbytes=tensor.nbytes,
        )
        return replace(self.add_tensor(tensor.name, float32, shape, entry), traits=traits)


def decode_quantized(tensors: Iterable[LazyTensor]) -> list[LazyTensor]:
    """Return tensors with quantized blocks decoded as float32. They are decoded when they are read.

    Blocks that cannot be decoded stay blocks: their tensors still have `traits.blocks`.
    """
    store = DequantizedTensors()
    return [store.decode_if_known(tensor) for tensor in tensors]


def decode_quantized_table(table: Table) -> Table:
    """Return a table with quantized blocks decoded, whose tensors can be joined with each other.

    A joined tensor is read from one store. So if a table has blocks, all its tensors are read
    through the store of the decoded ones. Blocks that cannot be decoded stay blocks.
    """
    if not any(kind.traits.blocks for kind in table.kinds):
        return table
    store = DequantizedTensors()
    entries: dict[int, dict[str, LazyTensor]] = {}
    # Some tensors stay as they are: tensors of the meta device have no elements to copy, and
    # `copy_tensor` needs elements of whole bytes.
    for row, name in enumerate(table.names):
        kind = table.row_kind(row)
        if kind.traits.blocks is not None:
            entries[row] = {name: store.decode_if_known(table.lazy_tensor(row))}
        elif not kind.traits.meta and not kind.dtype.packed:
            entries[row] = {name: store.copy_tensor(table.lazy_tensor(row))}
    return table.with_entries(range(len(table)), entries)


def describe_undecoded(tensors: Iterable[LazyTensor]) -> list[str]:
    """Return notes on the tensors whose quantized blocks cannot be decoded, one for each type."""
    counts: dict[str, int] = {}
    for tensor in decode_quantized(tensors):
        block_name = tensor.traits.blocks
        if block_name is not None:
            counts[block_name] = counts.get(block_name, 0) + 1
    notes: list[str] = []
    for block_name, count in counts.items():
        notes.append(
            f"{pluralize(count, 'tensor')} left out: {block_name} blocks cannot be decoded"
        )
    return notes


def _copy_elements(tensor: LazyTensor, start: int, out: memoryview) -> None:
    """Fill `out` with the C-ordered bytes of a tensor from the byte `start` on.

    The range may begin and end inside of an element.
    """
    itemsize = tensor.dtype.bits // 8
    first, stop = _find_units(start, out.nbytes, itemsize)
    data = byte_row(read_flat_elements(tensor, first, stop)).data
    skipped_nbytes = start - first * itemsize
    out[:] = data[skipped_nbytes : skipped_nbytes + out.nbytes]


def _decode_range(tensor: LazyTensor, block_type: BlockType, start: int, out: memoryview) -> None:
    """Fill `out` with the bytes of a decoded tensor from `start` on.

    Args:
        tensor: The tensor of quantized blocks.
        block_type: The type of its blocks.
        start: The first byte, counted in the float32 elements.
        out: The memory to fill. It may begin and end inside of a block.
    """
    if block_type.decode is None:
        raise _build_undecoded_error(block_type.name, tensor)
    decoded_nbytes = 4 * block_type.elements
    first, stop = _find_units(start, out.nbytes, decoded_nbytes)
    stored = read_flat_elements(tensor, first * block_type.nbytes, stop * block_type.nbytes)
    blocks = stored.reshape(-1, block_type.nbytes)
    blocks_per_step = max(DECODED_ELEMENTS // block_type.elements, 1)
    for index in range(0, len(blocks), blocks_per_step):
        # A scale may be infinite or NaN, which is no reason for a warning.
        with np.errstate(all="ignore"):
            elements = block_type.decode(blocks[index : index + blocks_per_step])
        decoded = byte_row(elements.astype("<f4", copy=False)).data
        # The position of these blocks in `out`. Only the first block may begin before `out`, and
        # only the last block may end behind it.
        offset = (first + index) * decoded_nbytes - start
        copy_start = max(offset, 0)
        copy_stop = min(offset + decoded.nbytes, out.nbytes)
        out[copy_start:copy_stop] = decoded[copy_start - offset : copy_stop - offset]


def _find_block_type(tensor: LazyTensor) -> BlockType:
    """Return the type of the blocks of a tensor.

    Raises:
        Unsupported: The blocks of this type cannot be decoded, or they are big-endian.
    """
    block_name = tensor.traits.blocks or ""
    block_type = BLOCK_TYPES.get(block_name)
    if block_type is None or block_type.decode is None:
        raise _build_undecoded_error(block_name, tensor)
    if any(storage.byteorder == "big" for storage in tensor.storages):
        raise Unsupported(
            "cannot decode quantized blocks in big-endian byte order; read the blocks as they are",
            tensor=tensor.name,
        )
    return block_type


def _build_undecoded_error(block_name: str, tensor: LazyTensor) -> Unsupported:
    """Return the error for blocks that cannot be decoded."""
    decodable_names: list[str] = []
    for name, block_type in BLOCK_TYPES.items():
        if block_type.decode is not None:
            decodable_names.append(name)
    return Unsupported(
        f"cannot decode {block_name} blocks, only {', '.join(decodable_names)}; read the blocks as "
        "they are",
        tensor=tensor.name,
        found=block_name,
    )
