"""Tensors whose bytes are computed when they are read: a cast, a repacking, the numbers that quantised blocks stand for.

A computed tensor is an ordinary lazy tensor over a storage that exists nowhere. Reading a range of that storage reads the
elements behind it from the original, applies the function, and gives the bytes of the result. So everything that moves tensors
(slices, digests, saves, under any memory budget) works on computed ones without knowing.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
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
Observe = Callable[
    [np.ndarray, np.ndarray], None
]  # Sees elements and what was computed of them, on any thread.


def read_flat_elements(
    tensor: LazyTensor, start: int, stop: int, *, out: np.ndarray | None = None
) -> np.ndarray:
    """The elements [start, stop) of a tensor in C order, as a 1-D array; in `out`, where there is one."""
    out = np.empty(stop - start, tensor.dtype.numpy) if out is None else out
    source = tensor.source
    # By one call, of a file on this machine with whole bytes an element.
    whole = source.store.read_profile.is_file and out.dtype.itemsize * 8 == tensor.dtype.bits
    if isinstance(source, OpenSource) and len(out) < tensor.size and whole:
        place = find_contiguous_bytes(tensor)
        if place is not None:
            # A plan for each megabyte would take half as long as to copy it, with the interpreter's lock.
            with error_context(tensor=tensor.name):
                source.store.read(
                    place[0], place[1] + start * out.dtype.itemsize, byte_row(out).data
                )
            source.read_nbytes += out.nbytes
            return out
    requests, at = [], 0
    for box in run_boxes(tensor.shape, start, stop):
        part = tensor[box.slices] if box.rank else tensor
        requests.append(Request(part, out[at : at + part.size].reshape(part.shape)))
        at += part.size
    source.read(requests)
    return out


class Seen:
    """Which elements of a row were seen before: a tensor may be read twice, in blocks that begin elsewhere."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._lock = threading.Lock()

    def add(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Mark a range, and give back the parts of it that were not marked.

        >>> seen = Seen()
        >>> seen.add(0, 4), seen.add(6, 9), seen.add(3, 10), seen.add(1, 9)
        ([(0, 4)], [(6, 9)], [(4, 6), (9, 10)], [])
        """
        if start >= stop:
            return []
        with self._lock:
            first, last = (
                bisect_left(self._stops, start),
                bisect_right(self._starts, stop),
            )  # those that it touches
            touched = list(zip(self._starts[first:last], self._stops[first:last], strict=True))
            fresh, at = [], start
            for begin, end in touched:
                if at < begin:
                    fresh.append((at, begin))
                at = max(at, end)
            if at < stop:
                fresh.append((at, stop))
            self._starts[first:last] = [min([start, *(begin for begin, _ in touched)])]
            self._stops[first:last] = [max([stop, *(end for _, end in touched)])]
            return fresh


class Computation(Value, frozen=True, eq=False):
    original: LazyTensor
    dtype: DType
    compute: Compute
    observe: Observe | None
    seen: Seen

    def read(self, start: int, out: memoryview) -> None:
        width = self.dtype.bits // 8
        first, last = start // width, -(-(start + out.nbytes) // width)
        elements = read_flat_elements(self.original, first, last)
        with computing():
            made = np.ascontiguousarray(self.compute(elements), self.dtype.numpy)
            if self.observe is not None:
                for begin, end in self.seen.add(first, last):
                    self.observe(
                        elements[begin - first : end - first], made[begin - first : end - first]
                    )
            begin = start - first * width
            out[:] = made.view(np.uint8).data[begin : begin + out.nbytes]


class SourcedStore(Virtual):
    """A virtual store that makes tensors over itself. They keep their source, and it keeps the store; nothing else keeps it."""

    _given: ref[OpenSource] | None = None

    @property
    def source(self) -> OpenSource:
        """The source of its tensors: the same one, for as long as one of them has it."""
        found = None if self._given is None else self._given()
        if found is None:
            found = OpenSource(self, threads=1)
            self._given = ref(found)
        return found


class ComputedTensors(SourcedStore):
    """A store of computed tensors, and the source that reads them."""

    def __init__(self) -> None:
        super().__init__("<computed>")

    def make_tensor(
        self,
        original: LazyTensor,
        dtype: DType,
        compute: Compute,
        *,
        observe: Observe | None = None,
        seen: Seen | None = None,
    ) -> LazyTensor:
        """The tensor of the same shape whose elements are `compute` of the original's. `compute` works element by element.
        `observe` sees every element that is computed, once, however often it is read."""
        if dtype.packed:
            raise Unsupported(
                f"elements of {dtype} share bytes and cannot be computed one by one",
                tensor=original.name,
            )
        nbytes, made = (
            dtype.nbytes(original.size),
            Computation(original, dtype, compute, observe, seen or Seen()),
        )
        # As many elements are read, of another width.
        entry = VirtualFile(
            nbytes,
            made.read,
            stamp=partial(tensor_stamp, original),
            read_nbytes=original.dtype.nbytes(original.size),
        )
        storage = Storage(self.put(entry), 0, nbytes, label=original.name, home=self)
        tensor = LazyTensor.contiguous(original.name, dtype, original.shape, storage, self.source)
        # The flags for conjugated and negated elements are resolved by reading the original.
        return replace(tensor, traits=replace(original.traits, conj=False, neg=False))


ObserveEach = Callable[[Sequence[str], Ints, np.ndarray, np.ndarray], None]
"""Sees the names of several originals, where the elements of each begin in a row, these elements, and what was computed of them."""


class ElementwiseComputation(Value, frozen=True, eq=False):
    origin: DType
    dtype: DType
    compute: Compute
    observe: ObserveEach


class ComputedStorages:
    """The storages of a medium, and behind them those that are computed of tensors: of many short ones together, of a long one a
    block at a time. The elements of each tensor are in C order there."""

    def __init__(
        self,
        origin: Storages,
        ways: Sequence[ElementwiseComputation],
        way: Sequence[int],
        tensors: Sequence[LazyTensor],
    ) -> None:
        """`way` says of each tensor how it is computed: a position in `ways`."""
        self._origin, self._ways, self._tensors = origin, ways, tensors
        self._first = len(origin.nbytes)
        self._way = np.concatenate([np.full(self._first, -1), np.array(way, np.int64)])
        sizes = [
            tensor.size * ways[number].dtype.numpy.itemsize
            for tensor, number in zip(tensors, way, strict=True)
        ]
        self.nbytes: Ints = np.concatenate([origin.nbytes, np.array(sizes, np.int64)])
        self.read_nbytes: Ints = np.concatenate(
            [origin.read_nbytes, np.array([tensor.nbytes for tensor in tensors], np.int64)]
        )
        self.stores = tuple(
            dict.fromkeys((*origin.stores, *(tensor.source.store for tensor in tensors)))
        )
        self._computed = ComputedTensors()
        self._rows: dict[int, tuple[LazyTensor, Seen]] = {}
        """Of storages that were asked for by themselves: all elements, and which of them were seen."""
        self._seen = np.zeros(len(self._way), np.bool_)  # Storages of which all elements were seen.
        self._lock = threading.Lock()

    can_read_ranges = False

    def read_ranges(
        self, numbers: Sequence[int], starts: Sequence[int], nbytes: Sequence[int]
    ) -> Sequence[BytesLike]:
        raise NotImplementedError

    def read(self, numbers: Sequence[int]) -> Sequence[BytesLike]:
        pieces = self._originals(numbers)
        wanted = np.array(numbers, np.int64)
        ways = self._way[wanted]
        for number in np.unique(ways[ways >= 0]).tolist():
            way, places = self._ways[number], np.flatnonzero(ways == number)
            elements = np.frombuffer(
                b"".join([pieces[place] for place in places.tolist()]), way.origin.numpy
            )
            with computing():
                made = np.ascontiguousarray(way.compute(elements), way.dtype.numpy)
                self._observe(way, wanted[places], elements, made)
            data, stops = made.view(np.uint8).data, np.cumsum(self.nbytes[wanted[places]])
            each = zip(places.tolist(), [0, *stops.tolist()], stops.tolist(), strict=False)
            for place, start, stop in each:
                pieces[place] = data[start:stop]
        return pieces

    def _originals(self, numbers: Sequence[int]) -> list[BytesLike]:
        first = self._first
        here = [at for at, number in enumerate(numbers) if number < first]
        try:
            found = self._origin.read([numbers[at] for at in here])
        except StorageMoved as moved:
            raise StorageMoved(here[moved.request_index]) from None
        if len(here) == len(numbers):
            return [*found]
        pieces: list[BytesLike] = [b""] * len(numbers)
        others = [at for at, number in enumerate(numbers) if number >= first]
        arrays = read_tensors([self._tensors[numbers[at] - first] for at in others])
        for at, piece in chain(
            zip(here, found, strict=True),
            zip(others, [byte_row(array).data for array in arrays], strict=True),
        ):
            pieces[at] = piece
        return pieces

    def _observe(
        self, way: ElementwiseComputation, numbers: Ints, elements: np.ndarray, made: np.ndarray
    ) -> None:
        counts = self.nbytes[numbers] // way.dtype.numpy.itemsize
        filled = counts > 0
        numbers, counts = numbers[filled], counts[filled]
        starts = np.cumsum(counts) - counts
        with self._lock:
            again, known = self._seen[numbers], np.isin(numbers, [*self._rows])
            self._seen[numbers] = True
        fresh = ~(again | known)
        if fresh.any():
            names, kept = self._named(numbers[fresh]), np.repeat(fresh, counts)
            every = fresh.all()
            own = np.cumsum(counts[fresh]) - counts[fresh]
            way.observe(
                names, own, elements if every else elements[kept], made if every else made[kept]
            )
        for at in np.flatnonzero(known & ~again).tolist():
            number = int(numbers[at])
            for low, high in self._rows[number][1].add(0, int(counts[at])):
                part = slice(int(starts[at]) + low, int(starts[at]) + high)
                way.observe(
                    self._named(numbers[at : at + 1]),
                    np.zeros(1, np.int64),
                    elements[part],
                    made[part],
                )

    def _named(self, numbers: Ints) -> list[str]:
        return [self._tensors[number - self._first].name for number in numbers.tolist()]

    def _row(self, number: int) -> LazyTensor:
        with self._lock:
            if number not in self._rows:
                way, seen = self._ways[self._way[number]], Seen()
                original = self._tensors[number - self._first]
                done = self._seen  # not `self`, which leads back here

                def observe(elements: np.ndarray, made: np.ndarray) -> None:
                    if not done[number]:
                        way.observe([original.name], np.zeros(1, np.int64), elements, made)

                self._rows[number] = (
                    self._computed.make_tensor(
                        original, way.dtype, way.compute, observe=observe, seen=seen
                    ),
                    seen,
                )
            return self._rows[number][0]

    def segment(self, number: int, label: str) -> bytes | Data | Memory:
        if self._way[number] < 0:
            return self._origin.segment(number, label)
        return Data(self._row(number), label) if self.nbytes[number] else b""

    def lazy_tensor(self, number: int, kind: RowKind, name: str, offset: int) -> LazyTensor:
        if self._way[number] < 0:
            return self._origin.lazy_tensor(number, kind, name, offset)
        row = self._row(number)
        chunk = Chunk(Box.whole(kind.shape), row.chunks[0].storage, offset, kind.strides)
        return LazyTensor(name, kind.dtype, kind.shape, (chunk,), row.source, kind.traits)


RUN_ELEMENTS = (
    1 << 18
)  # Elements that are decoded at a time: what lies between the steps stays in the cache.


@validate_arguments
def dequantize(tensor: LazyTensor) -> LazyTensor:
    """A tensor of quantised blocks (`tensor.traits.blocks`, as GGUF has them) as float32, decoded when it is read.

    One that is not quantised comes back as it is. Slice the result: of the blocks themselves, only a whole tensor can be decoded.
    """
    if not isinstance(tensor, LazyTensor):
        raise BadArgumentType(
            f"dequantize takes a lazy tensor, not {describe_value(tensor)}", found=tensor
        )
    return DequantizedTensors().decode(tensor)


class DequantizedTensors(SourcedStore):
    def __init__(self) -> None:
        super().__init__("<dequantized>")
        self._known: dict[ViewIdentity, LazyTensor] = {}

    def decode_if_known(self, stored: LazyTensor) -> LazyTensor:
        """What a tensor stands for; itself if it is in no blocks, or in blocks that cannot be decoded.

        Tensors with the same elements get the same numbers, which are stored once.
        """
        if stored.traits.blocks is None:
            return stored
        view = identify_view(stored)
        if view not in self._known:
            try:
                self._known[view] = self.decode(stored)
            except Unsupported:
                self._known[view] = stored
        return replace(self._known[view], name=stored.name)

    def copy_tensor(self, stored: LazyTensor) -> LazyTensor:
        """The same elements as a tensor of this store, so that it can be joined with decoded ones."""
        entry = VirtualFile(
            stored.nbytes, partial(_copy_elements, stored), stamp=partial(tensor_stamp, stored)
        )
        storage = Storage(self.put(entry), 0, stored.nbytes, label=stored.name, home=self)
        tensor = LazyTensor.contiguous(
            stored.name, stored.dtype, stored.shape, storage, self.source
        )
        # The flags for conjugated and negated elements are resolved by reading the original.
        return replace(tensor, traits=replace(stored.traits, conj=False, neg=False))

    def decode(self, stored: LazyTensor) -> LazyTensor:
        """What a tensor stands for; itself, where it is in no blocks."""
        if stored.traits.blocks is None:
            return stored
        blocks = _known(stored)
        shape, dtype = blocks.decoded_shape(stored.shape), DTYPES.name("float32")
        if shape is None or dtype is None:
            what = f"the last axis of {list(stored.shape)} is no row of {blocks.name} blocks"
            raise Unsupported(f"{what}: dequantize first, and slice the result", tensor=stored.name)
        traits = replace(stored.traits, blocks=None, alias=None)
        if stored.traits.meta:
            return replace(stored, dtype=dtype, shape=shape, traits=traits)
        nbytes = stored.size // blocks.nbytes * blocks.elements * 4
        read = partial(_decode, stored, blocks)
        entry = VirtualFile(
            nbytes, read, stamp=partial(tensor_stamp, stored), read_nbytes=stored.nbytes
        )
        storage = Storage(self.put(entry), 0, nbytes, label=stored.name, home=self)
        return replace(
            LazyTensor.contiguous(stored.name, dtype, shape, storage, self.source), traits=traits
        )


def decode_quantized(tensors: Iterable[LazyTensor]) -> list[LazyTensor]:
    """Return what tensors stand for: quantised blocks are decoded when they are read.

    Blocks that cannot be decoded stay blocks; their `traits.blocks` tells.
    """
    decoded = DequantizedTensors()
    return [decoded.decode_if_known(tensor) for tensor in tensors]


def decode_quantized_table(table: Table) -> Table:
    """Return a table of numbers in place of quantised blocks, whose tensors may be joined with each other.

    A joined tensor is read from one store. So if a table has blocks, its other tensors are read
    through the store of the decoded ones. Blocks that cannot be decoded stay.
    """
    if not any(kind.traits.blocks for kind in table.kinds):
        return table
    decoded = DequantizedTensors()
    entries: dict[int, dict[str, LazyTensor]] = {}
    for row, name in enumerate(table.names):
        kind = table.row_kind(row)
        if kind.traits.blocks is not None:
            entries[row] = {name: decoded.decode_if_known(table.lazy_tensor(row))}
        elif not kind.traits.meta and not kind.dtype.packed:
            entries[row] = {name: decoded.copy_tensor(table.lazy_tensor(row))}
    return table.with_entries(range(len(table)), entries)


def describe_undecoded(tensors: Iterable[LazyTensor]) -> list[str]:
    """Say which tensors have no numbers, because their blocks cannot be decoded."""
    names: dict[str, list[str]] = {}
    for tensor in decode_quantized(tensors):
        if tensor.traits.blocks is not None:
            names.setdefault(tensor.traits.blocks, []).append(tensor.name)
    notes: list[str] = []
    for blocks, members in names.items():
        count = pluralize(len(members), "tensor")
        notes.append(f"no numbers of {count} in blocks of {blocks}, which cannot be decoded here")
    return notes


def _copy_elements(stored: LazyTensor, start: int, out: memoryview) -> None:
    """Fill memory with a range of the bytes of a tensor in C order."""
    width = stored.dtype.bits // 8
    first, last = start // width, -(-(start + out.nbytes) // width)
    data = byte_row(read_flat_elements(stored, first, last)).data
    skipped = start - first * width
    out[:] = data[skipped : skipped + out.nbytes]


def _decode(stored: LazyTensor, blocks: BlockType, start: int, out: memoryview) -> None:
    if blocks.decode is None:
        raise _unknown(blocks, stored)
    width = 4 * blocks.elements
    first, last = start // width, -(-(start + out.nbytes) // width)
    raw = read_flat_elements(stored, first * blocks.nbytes, last * blocks.nbytes).reshape(
        -1, blocks.nbytes
    )
    run = max(RUN_ELEMENTS // blocks.elements, 1)
    for at in range(0, last - first, run):
        with np.errstate(all="ignore"):  # a scale may be infinite, or no number
            made = (
                blocks.decode(raw[at : at + run])
                .astype("<f4", copy=False)
                .reshape(-1)
                .view(np.uint8)
            )
        begin = (first + at) * width - start
        low, high = max(begin, 0), min(begin + made.nbytes, out.nbytes)
        out[low:high] = made.data[low - begin : high - begin]


def _known(stored: LazyTensor) -> BlockType:
    blocks = BLOCK_TYPES.get(stored.traits.blocks or "")
    if blocks is None or blocks.decode is None:
        raise _unknown(blocks, stored)
    if any(storage.byteorder == "big" for storage in stored.storages):
        message = "quantised blocks in the byte order of a big-endian machine are read as they are, and not decoded"
        raise Unsupported(message, tensor=stored.name)
    return blocks


def _unknown(blocks: BlockType | None, stored: LazyTensor) -> Unsupported:
    can = ", ".join(name for name, row in BLOCK_TYPES.items() if row.decode is not None)
    name = stored.traits.blocks if blocks is None else blocks.name
    return Unsupported(
        f"blocks of {name} are read as they are, and not decoded; {can} are",
        tensor=stored.name,
        found=name,
    )
