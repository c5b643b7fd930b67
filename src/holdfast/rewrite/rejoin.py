"""Tensors that shared a storage before a format copied each of them share it again.

safetensors and native directories note where in its storage each view lay (`Traits.alias`). A format with storages can have
that back: the tensors of a group become views of one assembled storage (`engine/assembled.py`). Where copies meet they must hold
the same bytes, which is looked at; where they do not, because someone edited the file, each stays by itself, and a note says so.
"""

from __future__ import annotations

from holdfast.core.chunk import Storage
from holdfast.core.limits import DEFAULTS, Limits
from holdfast.core.protocols import State
from holdfast.core.sharing import groups, overlaps
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.assembled import Assembled, Copy
from holdfast.plan.table import table_of
from holdfast.rewrite.rows import with_odd, with_table


class Rejoined(Value, frozen=True):
    """A state with its storages back."""

    state: State
    notes: tuple[str, ...] = ()
    """What could not be shared again."""


def rejoin(state: State, limits: Limits | None = None) -> Rejoined:
    """Give the tensors of a state back the storages that they shared. Reads data only where copies of a storage overlap."""
    limits = limits or DEFAULTS
    table = table_of(state)
    kinds = {number for number, kind in enumerate(table.kinds) if kind.traits.alias is not None and not kind.traits.meta}
    if not kinds:
        return Rejoined(state)
    tensors = {row: table.view(row) for row, kind in enumerate(table.kind) if kind in kinds}
    noted = {table.names[row]: tensor for row, tensor in tensors.items()}
    assembled, storages, notes = Assembled(), dict[Storage, Storage](), list[str]()
    for storage, names in groups(noted, noted=True).items():
        made = _assemble([noted[name] for name in names], assembled, limits)
        if isinstance(made, Storage):
            storages[storage] = made
        else:
            notes.append(made)
    viewed = {row: _viewed(tensor, storages.get(tensor.shared_storages[0]), assembled) for row, tensor in tensors.items()}
    return Rejoined(with_table(state, with_odd(table, viewed)), tuple(notes))


def _viewed(tensor: LazyTensor, storage: Storage | None, assembled: Assembled) -> LazyTensor:
    """The tensor as a view of a storage; as it is where there is none."""
    traits = replace(tensor.traits, alias=None)
    if storage is None:
        return replace(tensor, traits=traits)
    (chunk,) = tensor.shared_chunks
    return replace(tensor, chunks=(chunk.over(storage),), source=assembled.source, traits=traits)


def _assemble(tensors: list[LazyTensor], assembled: Assembled, limits: Limits) -> Storage | str:
    """The storage of these tensors, or why they cannot share one."""
    views = {(tensor.chunks, tensor.traits.alias): tensor for tensor in tensors}  # names of one and the same copy count once
    shown = ", ".join(repr(t.name) for t in tensors[:3]) + (f" and {len(tensors) - 3:,} more" if len(tensors) > 3 else "")
    if any(tensor.dtype.packed for tensor in tensors):
        return f"{shown} shared a storage of elements narrower than a byte; they are written apart"
    copies = [Copy.of(tensor, tensor.traits.alias) for tensor in views.values() if tensor.traits.alias is not None]
    filled = sorted((copy for copy in copies if copy.tensor.size), key=lambda copy: copy.offset)
    nbytes = max(tensor.traits.alias.nbytes for tensor in tensors if tensor.traits.alias is not None)
    storage = assembled.storage(nbytes, filled)
    if not filled:
        return storage
    reached = max(copy.stop for copy in filled) - filled[0].offset
    kept = sum(copy.tensor.nbytes for copy in filled)
    if reached > max(limits.expansion * kept, limits.expansion_floor_nbytes):
        return (
            f"{shown} are {kept:,} bytes of a storage of {reached:,}; they are written apart "
            "(Limits(expansion=…) allows the whole of it)"
        )
    overlap = any(overlaps((copy.offset, copy.stop, None) for copy in filled)) or any(copy.repeats for copy in filled)
    if overlap and not assembled.agrees(storage.key):
        return f"{shown} shared a storage once, and differ now where they overlapped; they are written apart"
    return storage
