"""Which tensors of a state share memory, for formats that give every tensor bytes of its own.

1. Names of one and the same view (tied weights) are written once; the others are *aliases* of the first.
2. Different views of one storage (a slice, a transpose) are written as copies, and where each lay in the storage is noted, so
   that the way back to a format with storages can share it again.
3. A tensor that is alone in its storage and not in C order gets such a note, too: its strides are worth keeping.

A tensor that comes out of a file with such notes (`Traits.alias`) still belongs to its storage of old.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.core.chunk import in_c_order
from holdfast.core.sharing import groups, twins
from holdfast.core.tensor import LazyTensor

__all__ = ["Sharing", "ViewGroup", "find_sharing"]

LARGEST_STORAGE_RATIO = 2
"""A strided tensor that is alone keeps its strides where its storage has at most this many times its bytes."""


@dataclass(frozen=True, slots=True)
class ViewGroup:
    """Tensors that were views of one storage."""

    nbytes: int
    names: dict[str, tuple[int, tuple[int, ...]]]
    """Offset and strides of each, in bits of the storage."""


@dataclass(slots=True)
class Sharing:
    """What is written, and what is noted beside it."""

    written: dict[str, LazyTensor] = field(default_factory=dict)
    """The tensors that get bytes, in the order of the state. Those of the meta device have none."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names of these tensors."""
    groups: list[ViewGroup] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Sentences about it for people."""
        notes = []
        if self.aliases:
            count = len(self.aliases)
            which = "1 name is a second name of a tensor" if count == 1 else f"{count:,} names are second names of tensors"
            notes.append(f"{which}; the bytes are written once")
        shared = sum(len(group.names) for group in self.groups if len(group.names) > 1)
        if shared:
            notes.append(f"{shared:,} tensors are views of shared storages; each is written as a copy, and the views are noted")
        return notes


def find_sharing(tensors: Mapping[str, LazyTensor]) -> Sharing:
    """Compare where the tensors of a state lie. Nothing is read, and nothing is taken for shared that only looks equal."""
    found = Sharing()
    found.written = {name: tensor for name, tensor in tensors.items() if tensor.chunks}
    distinct: dict[str, LazyTensor] = {}
    """The first name of each view that may be worth a note."""
    for storage, names in groups(found.written).items():
        if not storage.nbytes or (len(names) == 1 and _plain(found.written[names[0]])):
            continue
        members = {name: found.written[name] for name in names if name in found.written}
        again = twins(members)
        found.aliases |= again
        for name in again:
            del found.written[name]
        distinct |= {name: tensor for name, tensor in members.items() if name not in again}
    for storage, names in groups(distinct, noted=True).items():
        group = _group(storage.nbytes, names, found.written)
        if group is not None:
            found.groups.append(group)
    return found


def _plain(tensor: LazyTensor) -> bool:
    """Whether a tensor that is alone in its storage needs no note; most are in C order and have none."""
    return tensor.traits.alias is None and in_c_order(tensor.shape, tensor.chunks[0].strides, tensor.dtype.bits)


def _group(nbytes: int, names: list[str], tensors: Mapping[str, LazyTensor]) -> ViewGroup | None:
    """The views of one storage, where they are worth a note."""
    views: dict[str, tuple[int, tuple[int, ...]]] = {}
    for name in names:
        tensor = tensors[name]
        if len(tensor.chunks) > 1 or tensor.traits.conj or tensor.traits.neg:
            # Conjugated elements are written as what they stand for: not the bytes of the storage any more.
            continue
        (chunk,) = tensor.chunks
        view = tensor.traits.alias or chunk
        if min(view.strides, default=0) >= 0:
            views[name] = (view.offset, view.strides)
    if len(views) == 1:
        (name,) = views
        return ViewGroup(nbytes, views) if _strided(tensors[name], views[name][1], nbytes) else None
    kinds = {tensors[name].dtype for name in views}
    if len(kinds) > 1 and any(tensors[name].chunks[0].storage.byteorder != "little" for name in views):
        # Elements of several widths over the same big-endian bytes: little-endian, no storage has them all.
        return None
    return ViewGroup(nbytes, views) if views else None


def _strided(tensor: LazyTensor, strides: tuple[int, ...], nbytes: int) -> bool:
    if tensor.size < 2 or nbytes > LARGEST_STORAGE_RATIO * tensor.nbytes:
        return False
    return not in_c_order(tensor.shape, strides, tensor.dtype.bits)
