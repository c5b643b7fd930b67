"""Tensors in a torch pickle: what is common to all of a kind, the bytes that they are written by, and the records behind them.

Which storages a torch file gets: tensors that share bytes share a record `data/N`, and keep their offsets and strides in it.

    source storage   │ · · · a a a a b b · · c c · · · │      what a, b and c reach, from the first byte to the last
    data/0                 │ a a a a b b · · c c │

1. Tensors over one source storage go to one record, which holds the bytes from the first that any of them reaches to the last. A
   small view of a large buffer therefore costs what it shows, and views of each other stay views of each other.
2. torch wants one dtype a storage; dtypes without a storage class of their own count as uint8. Where tensors over one storage are
   of different classes, or lie at odd offsets, each kind gets a record, and `lost` says which sharing that cost.
   Untrimmed, a record holds its whole source storage, as torch writes it.
3. What a torch tensor cannot be (several chunks, reversed axes, steps of a fraction of an element) is written in C order, as a
   record of its own.

Offsets and lengths are known when all tensors were seen: `place` gives the record, `close` sets where it begins and ends.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache

from msgspec import Struct

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides, is_c_ordered
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.sharing import find_overlapping_pairs
from holdfast.core.table import RowKind
from holdfast.core.tensor import PLAIN_TRAITS, LazyTensor, Traits
from holdfast.core.value import Value, replace
from holdfast.formats.pickle.writer import TEXT, TUPLES, integer
from holdfast.formats.torch.composites import UTILS

BYTES = DTYPES.storage("ByteStorage")
UNTYPED = "ByteStorage"
"""The class that an untyped storage counts as, when torch looks for two dtypes over one storage."""


class StorageRecord(Struct, eq=False):
    """The record `data/N`, where N is `number`."""

    number: int
    sample: LazyTensor
    """The first tensor in it: the source, the storage and the dtype of all others."""
    name: str
    """The name of the first tensor, for messages."""
    low: int
    """First bit of the source storage that a tensor reaches."""
    high: int
    """The bit after the last one."""
    step: int
    """Bits of the widest element: tensors begin at multiples of it, counted from `odd`."""
    odd: int
    whole: bool = False
    """Whether the record is the sample alone, in C order."""
    base: int = 0
    """The bit of the source storage where the record begins. This and what follows is set by `close`."""
    nbytes: int = 0
    count: int = 0
    """Elements, as torch counts them: bytes for types that are untyped or packed."""

    def close(self) -> None:
        """Set where the record begins and ends, when all tensors were seen."""
        dtype = self.sample.dtype
        if self.whole:
            self.nbytes = self.sample.nbytes
        else:
            self.base = self.low - (self.low - self.odd) % self.step
            self.nbytes = (self.high - self.base + 7) // 8
        self.count = (
            self.nbytes if dtype.storage is None or dtype.packed else self.nbytes * 8 // dtype.bits
        )

    def reached(self) -> tuple[int, int]:
        """The range of bits of the source storage that the record holds, for tensors of one chunk."""
        if not self.whole:
            return self.base, self.high
        start, stop = self.sample.chunks[0].byte_range(self.sample.dtype)
        return start * 8, stop * 8

    @property
    def location(self) -> str:
        return (self.sample.chunks[0].storage.location if self.sample.chunks else "") or "cpu"

    def tensor(self) -> LazyTensor:
        """The tensor whose bytes are written to the record."""
        if self.whole:
            return replace(self.sample, name=self.name, traits=PLAIN_TRAITS)
        (chunk,) = self.sample.chunks
        dtype = self.sample.dtype
        if self._is_sample(chunk):
            return self.sample
        if BYTES is not None and not _swapped(chunk.storage, dtype):
            # As bytes: whatever they mean, they are copied.
            dtype = BYTES
        n = self.nbytes * 8 // dtype.bits
        view = Chunk(Box((0,), (n,)), chunk.storage, self.base, (dtype.bits,))
        return LazyTensor(self.name, dtype, (n,), (view,), self.sample.source)

    def _is_sample(self, chunk: Chunk) -> bool:
        """Whether the record is the first tensor and nothing else, so that no other view of the bytes needs to be made."""
        sample = self.sample
        bits = sample.dtype.bits
        if (
            bits < 8
            or chunk.offset != self.base
            or self.high - self.base != math.prod(sample.shape) * bits
        ):
            return False
        return is_c_ordered(sample.shape, chunk.strides, bits) and not (
            sample.traits.conj or sample.traits.neg
        )


class StorageRecords:
    """The records of one file, in the order in which tensors ask for them."""

    def __init__(self, *, trim: bool = True) -> None:
        self._trim = trim
        self.records: list[StorageRecord] = []
        self._found: dict[object, StorageRecord] = {}

    def place(
        self, tensor: LazyTensor, path: Sequence[object], number: int
    ) -> tuple[StorageRecord, int, tuple[int, ...]]:
        """Find the record of a tensor, which is not on the meta device, or begin it under this number.

        Gives the record, the bit of the source storage where the tensor begins, and its strides in elements.
        """
        shape, dtype = tensor.shape, tensor.dtype
        bits = dtype.bits
        if len(tensor.chunks) != 1:
            return self._whole(tensor, path, number)
        chunk = tensor.chunks[0]
        start, storage = chunk.offset, chunk.storage
        if 0 in shape:
            strides, start, stop = c_strides(shape, 1), 0, 0
        else:
            stop = start + bits
            steps = []
            for n, stride in zip(shape, chunk.strides, strict=True):
                step, rest = divmod(stride, bits)
                if stride < 0 or rest:
                    if n > 1:
                        return self._whole(tensor, path, number)
                    step = 0
                steps.append(step)
                stop += (n - 1) * stride
            strides = tuple(steps)
        # A packed storage begins with a whole byte, and its tensors anywhere in it.
        odd = 0 if dtype.packed else start % bits
        kind = dtype.name if _swapped(storage, dtype) else dtype.storage or UNTYPED
        key = (storage, kind, odd)
        record = self._found.get(key)
        if record is not None:
            if stop > record.high or (start < record.low and stop):
                low = min(record.low, start) if record.high else start
                record.low, record.high = low, max(record.high, stop)
            record.step = max(record.step, bits)
            return record, start, strides
        # A packed storage is written whole: torch pads rows of quint4x2 to bytes, so its last elements lie further behind.
        trimmed = odd or (self._trim and not dtype.packed)
        low, high = (start, stop) if trimmed else (0, storage.nbytes * 8)
        record = StorageRecord(
            number, tensor, ".".join(map(str, path)), low, high, max(bits, 8), odd
        )
        self._found[key] = record
        self.records.append(record)
        return record, start, strides

    def _whole(
        self, tensor: LazyTensor, path: Sequence[object], number: int
    ) -> tuple[StorageRecord, int, tuple[int, ...]]:
        # Conjugated or not: the stored elements are written, and the pickle says what they mean.
        key = (tensor.dtype, tensor.shape, tensor.chunks)
        record = self._found.get(key)
        if record is None:
            record = StorageRecord(number, tensor, ".".join(map(str, path)), 0, 0, 8, 0, whole=True)
            self._found[key] = record
            self.records.append(record)
        return record, 0, c_strides(tensor.shape, 1)

    def close(self) -> None:
        for record in self.records:
            record.close()

    def lost(self) -> list[tuple[StorageRecord, StorageRecord]]:
        """Pairs of records that had bytes in common and are now written apart."""
        over: dict[Storage, list[StorageRecord]] = {}
        for record in self.records:
            if record.nbytes and len(record.sample.chunks) == 1:
                over.setdefault(record.sample.chunks[0].storage, []).append(record)
        several = (group for group in over.values() if len(group) > 1)
        return [
            pair
            for group in several
            for pair in find_overlapping_pairs((*record.reached(), record) for record in group)
        ]


def _swapped(storage: Storage, dtype: DType) -> bool:
    """Whether the bytes of an element are swapped when they are written."""
    return storage.byteorder != "little" and dtype.swap_nbytes > 1


SHORT = 0xFF
"""The last number of the memo that takes one byte."""

KEY_TEXTS = [TEXT(b"X", length) for length in range(20)]
"""BINUNICODE and the length, for texts of up to 19 bytes."""


REMEMBER, RECORD_KEY = object(), object()
"""Marks in opcodes: here the memo takes the next number; here is the key of the record."""

STORAGE = "storage"


Opcodes = tuple[object, ...]
"""The opcodes of all tensors of a kind: bytes, names of globals (pairs), texts that are shared, `REMEMBER` and `RECORD_KEY`."""


@lru_cache(4096)
def opcodes_of(kind: RowKind) -> Opcodes | None:
    """Return the opcodes of a kind; None for a kind whose tensors are written, or refused, one by one."""
    if not is_usual(kind):
        return None
    dtype, traits, bits = kind.dtype, kind.traits, kind.dtype.bits
    shape, strides = (
        integers(kind.shape),
        integers(tuple([stride // bits for stride in kind.strides])),
    )
    # In bytes, for dtypes whose storage has no elements.
    count = kind.storage_nbytes * 8 // bits if dtype.storage else kind.storage_nbytes
    hooks = [("collections", "OrderedDict"), b")R", REMEMBER]
    made: list[object] = [
        *([(UTILS, "_rebuild_parameter")] if traits.parameter else ()),
        (UTILS, "_rebuild_tensor_v2" if dtype.storage else "_rebuild_tensor_v3"),
        b"((",
        STORAGE,
        ("torch", dtype.storage) if dtype.storage else ("torch.storage", "UntypedStorage"),
        RECORD_KEY,
        sys.intern(kind.location or "cpu"),
        integer(count) + b"t",
        REMEMBER,
        b"QK\x00" + shape,
        *([REMEMBER, strides, REMEMBER] if kind.shape else [strides]),
        b"\x88" if traits.requires_grad and not traits.parameter else b"\x89",
        *hooks,
        *(() if dtype.storage else [("torch", dtype.torch)]),
        b"t",
        REMEMBER,
        b"R",
        REMEMBER,
    ]
    if traits.parameter:
        made += [
            b"\x88" if traits.requires_grad else b"\x89",
            *hooks,
            TUPLES[3],
            REMEMBER,
            b"R",
            REMEMBER,
        ]
    return tuple(made)


def integers(values: tuple[int, ...]) -> bytes:
    """The opcodes of a tuple of integers."""
    raw = b"".join(map(integer, values))
    return raw + TUPLES[len(values)] if len(values) < 4 else b"(" + raw + b"t"


def is_usual(kind: RowKind) -> bool:
    """Whether torch has tensors of a kind, and they are nothing beyond their elements."""
    dtype = kind.dtype
    return (
        is_simple(kind.traits)
        and dtype.torch is not None
        and not dtype.packed
        and dtype.kind != "quantized"
    )


def is_simple(traits: Traits) -> bool:
    """Whether a tensor is nothing beyond its elements but a Parameter, or one that wants a gradient."""
    if traits is PLAIN_TRAITS:
        return True
    odd = traits.meta or traits.conj or traits.neg or traits.buffer
    return not odd and traits.state is None and traits.subclass is None


class PickledRows(Value, frozen=True, eq=False):
    """The tensors of a tree that are rows of a table: those of a kind have the same opcodes."""

    values: Sequence[object]
    """The leaves of the tree, in the order in which a pickle meets them."""
    kinds: Sequence[RowKind]
    kind: Sequence[int]
    """For each value, a position in `kinds`."""
    storage: Sequence[int]
    """For each value, the number of its storage; `IRREGULAR` for one that is written by itself."""
    types: frozenset[type]
    """The types of the values."""
    view: Callable[[int], object]
    """The lazy tensor or composite that is written for an irregular row."""
    described: Callable[[object], object]
    """The value that is written in the place of one that is no row: itself where a pickle can hold it."""
    others: frozenset[type] = frozenset()
    """Types of values that are no rows, and of which `described` may make something."""


NO_ROWS = PickledRows((), (), (), (), frozenset(), lambda row: row, lambda value: value)

PAIRS = DTYPES.name("float4_e2m1fn_x2")
"""torch has 4-bit floats in pairs only: an element of a byte, the first float in the low half."""


def builder_of(tensor: LazyTensor) -> str:
    """The name of torch's function that builds a tensor."""
    if tensor.traits.meta:
        return "_rebuild_meta_tensor_no_storage"
    return "_rebuild_tensor_v2" if tensor.dtype.storage else "_rebuild_tensor_v3"


def problem_of(tensor: LazyTensor) -> str | None:
    """Why torch could not have this tensor."""
    if tensor.dtype.name == "float4_e2m1fn":
        return f"4-bit floats of shape {list(tensor.shape)} that do not lie in pairs, as torch has them"
    if tensor.dtype.torch is None:
        return f"a tensor of {tensor.dtype}, which torch does not have"
    if tensor.dtype.kind == "quantized":
        return f"elements of {tensor.dtype} without their scale"
    return None


def as_pairs(tensor: LazyTensor) -> LazyTensor:
    """4-bit floats as the pairs that torch has; unchanged where they do not lie in pairs."""
    if (
        tensor.dtype.name != "float4_e2m1fn"
        or PAIRS is None
        or not tensor.shape
        or tensor.shape[-1] % 2
    ):
        return tensor
    chunks = []
    for chunk in tensor.chunks:
        start, stop, last = chunk.box.start, chunk.box.stop, chunk.strides[-1]
        if (
            start[-1] % 2
            or stop[-1] % 2
            or chunk.offset % 8
            or any(s % 8 for s in chunk.strides[:-1])
        ):
            return tensor
        if last != tensor.dtype.bits and tensor.size:
            return tensor
        box = Box((*start[:-1], start[-1] // 2), (*stop[:-1], stop[-1] // 2))
        chunks.append(Chunk(box, chunk.storage, chunk.offset, (*chunk.strides[:-1], PAIRS.bits)))
    return replace(
        tensor, dtype=PAIRS, shape=(*tensor.shape[:-1], tensor.shape[-1] // 2), chunks=tuple(chunks)
    )
