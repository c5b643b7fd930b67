"""Tensors that shared a storage before a format copied each of them share it again.

safetensors and native directories record where in its storage each view lay (`Traits.alias`). A format with storages can have
that back: the tensors of a group become views of one assembled storage (`Assembled`). Where copies overlap they must hold
the same bytes, which is compared; where they do not, because someone edited the file, each stays by itself, and a note says so.

From the copies the storage is computed again, range by range:

    storage     │ a a a b b b b c c · · │       b over a: the copies hold the same bytes where they meet
    copies        [a a a]  [b b b b]  [c c]

1. The elements of a copy that touch a range of the storage are found as boxes: they are an interval of the dimension that reaches
   furthest, of which all but the two ends lie inside whole.
2. Each box is read from its copy and put where it lay. When every byte of the range has come, the other copies are not read.
3. What no copy covers is zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from holdfast.core.arrays import byte_row
from holdfast.core.chunk import Storage, has_overlapping_elements
from holdfast.core.dtype import WIDEST_NBYTES
from holdfast.core.limits import DEFAULTS, Limits
from holdfast.core.protocols import Request, Stamp, State
from holdfast.core.sharing import find_overlapping_pairs, find_shared_rows
from holdfast.core.tensor import AliasView, LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.computed import SourcedStore
from holdfast.errors import Unsupported
from holdfast.stores.virtual import VirtualFile, tensor_stamp
from holdfast.verbs.shared.state import replace_rows, replace_table

BLOCK_NBYTES = 4 << 20
"""Bytes of a storage that `agrees` looks at together, and of a box that is read at once."""


class StoredCopy(Value, frozen=True):
    """One tensor, and where in the storage its elements lay; offset and strides in bytes."""

    tensor: LazyTensor
    offset: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: LazyTensor, view: AliasView) -> StoredCopy:
        if tensor.dtype.packed:
            raise Unsupported(
                f"elements of {tensor.dtype} share bytes and cannot be put together",
                tensor=tensor.name,
            )
        return cls(tensor, view.offset // 8, tuple(stride // 8 for stride in view.strides))

    @property
    def width(self) -> int:
        return self.tensor.dtype.bits // 8

    @property
    def stop(self) -> int:
        """The byte after the last one that it reaches."""
        last = sum(
            (n - 1) * stride for n, stride in zip(self.tensor.shape, self.strides, strict=True)
        )
        return self.offset + last + self.width if self.tensor.size else self.offset


PlacedBox = tuple[tuple[slice, ...], int]
"""A box of a copy, and the byte of the storage where its first element lies."""


class Assembled(SourcedStore):
    """A store of storages that are put together, and the source that reads them."""

    def __init__(self) -> None:
        super().__init__("<assembled>")
        self._copies: dict[str, list[StoredCopy]] = {}

    def storage(self, nbytes: int, copies: Sequence[StoredCopy], *, label: str = "") -> Storage:
        """The storage of so many bytes that these are copies of."""
        # Those that are read in long runs first: often they cover all that the others would.
        own = sorted(copies, key=lambda copy: (_strides_up(copy), -copy.tensor.nbytes))

        def read(start: int, out: memoryview) -> None:
            out[:] = _padded(own, start, start + out.nbytes)[
                WIDEST_NBYTES : WIDEST_NBYTES + out.nbytes
            ].data

        def stamp() -> Stamp:
            return tuple((copy.offset, copy.strides, tensor_stamp(copy.tensor)) for copy in own)

        key = self.put(VirtualFile(nbytes, read, stamp=stamp))
        self._copies[key] = own
        return Storage(key, 0, nbytes, label=label, home=self)

    def agrees(self, key: str) -> bool:
        """Whether every element of every copy is what the storage has in its place. Reads all of them."""
        copies = self._copies[key]
        low, high = min(copy.offset for copy in copies), max(copy.stop for copy in copies)
        for start in range(low, high, BLOCK_NBYTES):
            stop = min(start + BLOCK_NBYTES, high)
            padded = _padded(copies, start, stop)
            for copy in copies:
                for placed in _boxes(copy, start, stop):
                    values = _values(copy, placed)
                    if not np.array_equal(
                        values, _window(padded, start - WIDEST_NBYTES, copy, placed, values.shape)
                    ):
                        return False
        return True


def _padded(copies: Sequence[StoredCopy], start: int, stop: int) -> np.ndarray:
    """The bytes [start, stop), with room on both sides for elements that stick out."""
    made = np.zeros(stop - start + 2 * WIDEST_NBYTES, np.uint8)
    come = np.zeros(len(made), np.bool_)
    for copy in copies:
        if copy.offset < stop and start < copy.stop:
            for placed in _boxes(copy, start, stop, once=True):
                values = _values(copy, placed)
                _window(made, start - WIDEST_NBYTES, copy, placed, values.shape)[...] = values
                _window(come, start - WIDEST_NBYTES, copy, placed, values.shape)[...] = True
            if come[WIDEST_NBYTES:-WIDEST_NBYTES].all():
                break
    return made


def _strides_up(copy: StoredCopy) -> bool:
    strides = [stride for n, stride in zip(copy.tensor.shape, copy.strides, strict=True) if n > 1]
    return strides != sorted(strides, reverse=True)


def _boxes(copy: StoredCopy, start: int, stop: int, *, once: bool = False) -> Iterator[PlacedBox]:
    """The boxes of a copy whose elements touch bytes [start, stop), none larger than a block.

    With `once`, of elements that lie in one place because of a stride of 0 the first is enough.
    """
    strides, width = copy.strides, copy.width
    shape = [
        1 if once and not stride else n
        for n, stride in zip(copy.tensor.shape, strides, strict=True)
    ]
    waiting = [tuple(slice(0, n) for n in shape)] if copy.tensor.size else []
    while waiting:
        index = waiting.pop()
        reach = [
            (one.stop - one.start - 1) * stride for one, stride in zip(index, strides, strict=True)
        ]
        at = copy.offset + sum(
            one.start * stride for one, stride in zip(index, strides, strict=True)
        )
        end = at + sum(reach) + width
        if end <= start or at >= stop:
            continue
        inside = start - width < at and end < stop + width
        if inside and math.prod(one.stop - one.start for one in index) * width <= BLOCK_NBYTES:
            yield index, at
            continue
        # The dimension that reaches furthest is cut: to its rows that touch the range, then to those that lie inside whole.
        d = max(range(len(index)), key=lambda d: (reach[d], index[d].stop - index[d].start))
        own, stride, row = index[d], strides[d], end - at - reach[d]
        edges = {own.start, (own.start + own.stop) // 2, own.stop}
        if not inside:
            low = max(own.start + (start - at - row) // stride + 1, own.start)
            high = min(own.start - (at - stop) // stride, own.stop)
            edges = (
                {low, high} if high - low < own.stop - own.start else {low, low + 1, high - 1, high}
            )
        waiting += [(*index[:d], slice(*pair), *index[d + 1 :]) for pair in pairwise(sorted(edges))]


def _values(copy: StoredCopy, placed: PlacedBox) -> np.ndarray:
    """The elements of a box as bytes: its shape, and a last dimension for the bytes of an element."""
    index, _ = placed
    part = copy.tensor[index] if index else copy.tensor
    out = np.empty(part.shape, part.dtype.numpy)
    part.source.read([Request(part, out)])
    return byte_row(out).reshape(*part.shape, copy.width)


def _window(
    block: np.ndarray, begin: int, copy: StoredCopy, placed: PlacedBox, shape: tuple[int, ...]
) -> np.ndarray:
    """The bytes of a box's elements inside of a block that begins with byte `begin` of the storage."""
    return np.ndarray(shape, block.dtype, block.data, placed[1] - begin, (*copy.strides, 1))


class Rejoined(Value, frozen=True):
    """A state with its storages back."""

    state: State
    notes: tuple[str, ...] = ()
    """Tensors that could not share a storage again, and why."""


def rejoin(state: State, limits: Limits | None = None) -> Rejoined:
    """Give the tensors of a state back the storages that they shared. Reads data only where copies of a storage overlap."""
    limits = limits or DEFAULTS
    table = state.tensors
    kinds = {
        number
        for number, kind in enumerate(table.kinds)
        if kind.traits.alias is not None and not kind.traits.meta
    }
    if not kinds:
        return Rejoined(state)
    tensors = {
        row: table.lazy_tensor(row) for row, kind in enumerate(table.kind_indices) if kind in kinds
    }
    groups = dict(find_shared_rows([table], stored_aliases=True).groups())
    grouped = {row for rows in groups.values() for row in rows}
    assembled, viewed, notes = Assembled(), dict[int, LazyTensor](), list[str]()
    for rows in (*groups.values(), *([row] for row in tensors if row not in grouped)):
        members = {row: tensors[row] for row in rows if row in tensors}
        made = _assemble([*members.values()], assembled, limits) if members else ""
        notes += [made] if made and isinstance(made, str) else []
        viewed |= {
            row: _viewed(one, made if isinstance(made, Storage) else None, assembled)
            for row, one in members.items()
        }
    return Rejoined(replace_table(state, replace_rows(table, viewed)), tuple(notes))


def _viewed(tensor: LazyTensor, storage: Storage | None, assembled: Assembled) -> LazyTensor:
    """The tensor as a view of a storage; without an alias where there is none."""
    traits = replace(tensor.traits, alias=None)
    if storage is None:
        return replace(tensor, traits=traits)
    (chunk,) = tensor.shared_chunks
    return replace(
        tensor, chunks=(chunk.with_storage(storage),), source=assembled.source, traits=traits
    )


def _assemble(tensors: list[LazyTensor], assembled: Assembled, limits: Limits) -> Storage | str:
    """The storage of these tensors, or the reason why they cannot share one."""
    views = {
        (tensor.chunks, tensor.traits.alias): tensor for tensor in tensors
    }  # names of one and the same copy count once
    shown = ", ".join(repr(t.name) for t in tensors[:3]) + (
        f" and {len(tensors) - 3:,} more" if len(tensors) > 3 else ""
    )
    if any(tensor.dtype.packed for tensor in tensors):
        return f"{shown} shared a storage of elements narrower than a byte; they are written apart"
    copies = [
        StoredCopy.of(tensor, tensor.traits.alias)
        for tensor in views.values()
        if tensor.traits.alias is not None
    ]
    filled = sorted((copy for copy in copies if copy.tensor.size), key=lambda copy: copy.offset)
    nbytes = max(
        tensor.traits.alias.nbytes for tensor in tensors if tensor.traits.alias is not None
    )
    storage = assembled.storage(nbytes, filled)
    if not filled:
        return storage
    reached = max(copy.stop for copy in filled) - filled[0].offset
    nbytes = sum(copy.tensor.nbytes for copy in filled)
    if reached > max(limits.expansion * nbytes, limits.expansion_floor_nbytes):
        parts = f"{shown} are {nbytes:,} bytes of a storage of {reached:,}"
        return f"{parts}; they are written apart (Limits(expansion=…) allows the whole of it)"
    overlap = any(find_overlapping_pairs((copy.offset, copy.stop, None) for copy in filled)) or any(
        has_overlapping_elements(copy.tensor.shape, copy.strides, copy.width) for copy in filled
    )
    if overlap and not assembled.agrees(storage.key):
        return f"{shown} shared a storage once, and differ now where they overlapped; they are written apart"
    return storage
