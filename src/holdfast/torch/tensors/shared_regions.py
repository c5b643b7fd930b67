"""Which tensors of a checkpoint are views of one storage, and what one torch storage must hold for them to be views again.

    storage in the file   │ · · a a a a b b · · · · · · c c c │      a, b over a, and c are names
    region                │ · · a a a a b b · · · · · · c c c │      small, or well used: one region, the whole storage
    regions                   │ a a a a b b │                        large and hardly used: one for what overlaps; c is alone

1. Names over one storage of the file are found by comparing where they lie; nothing is read.
2. Formats that store every tensor by itself note where it lay (`Traits.alias`). Those copies become views of one region, too,
   where they agree: `saving/rejoin.py` looks, and reads data only where copies overlap.
3. A region is the whole storage as long as `Limits(expansion=…)` allows that many bytes for the tensors that were asked for, so
   that offsets are those of the file. Of a larger storage only what overlaps is kept together, under the same limit.

A tensor that is alone in its storage is in no region: whoever reads it does so as if this module were not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from msgspec import Struct, field

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, repeats
from holdfast.core.dtype import DTYPES, WIDEST_NBYTES, DType
from holdfast.core.sharing import SpanGroup, disjoint_groups, shared_rows
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.files import tabulate
from holdfast.errors import Unsupported
from holdfast.saving.rejoin import rejoin
from holdfast.saving.rows import flat_state, with_odd
from holdfast.torch.tensors.from_lazy import torch_dtype

BYTES = next(row for row in DTYPES.rows if row.name == "uint8")


class View(Value, frozen=True):
    """How a tensor lies in a region: everything counted in its own elements."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    conj: bool = False
    neg: bool = False


class RegionRead(Value, frozen=True):
    """Elements that are read into a region: a tensor of the file, and where it goes."""

    tensor: LazyTensor
    view: View


class Region(Value, frozen=True, eq=False):
    """What one torch storage holds."""

    dtype: DType
    """That of all views, or uint8 where they have several."""
    count: int
    """Elements of that dtype."""
    views: Mapping[str, View]
    pieces: tuple[RegionRead, ...]
    """What fills it."""
    whole: bool
    """Whether the pieces leave no hole."""

    @property
    def castable(self) -> bool:
        """Whether another dtype can take the place of all views' dtype: they have one, and nothing is written twice."""
        one = all(view.dtype is self.dtype for view in self.views.values())
        return one and not any(repeats(piece.view.shape, piece.view.strides) for piece in self.pieces)


class Regions(Struct):
    """The regions of some tensors; names that stand alone are in none."""

    by_name: dict[str, Region] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    """Names that are the same tensor as an earlier one, with the first of its names."""
    notes: list[str] = field(default_factory=list)


def plan_regions(tensors: Mapping[str, LazyTensor]) -> Regions:
    """Find the tensors that share storage, and plan the regions that hold them. Reads data only where copies overlapped once."""
    regions = Regions()
    if len(tensors) < 2:
        return regions
    table = _rejoined(tabulate([*tensors], [*tensors.values()]), regions.notes)
    shared, names = shared_rows([table]), table.names
    for number, rows in shared.groups():
        lazies = {names[row]: table.view(row) for row in rows}
        storage = shared.storage_of(number, lazies[names[rows[0]]], rows[0])
        members = {name: tensor for name, tensor in lazies.items() if _viewable(tensor)}
        for region in _regions(members, storage, originals=tensors, notes=regions.notes):
            regions.by_name.update(dict.fromkeys(region.views, region))
    regions.ties = {names[row]: names[first] for row, first in shared.ties().items()}
    return regions


def view_of(storage: torch.UntypedStorage, view: View, dtype: torch.dtype) -> torch.Tensor:
    """A view as a tensor over the storage that holds its region."""
    made = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, view.offset, view.shape, view.strides)
    if view.conj:
        made = made.conj()
    return torch._neg_view(made) if view.neg else made


def _rejoined(table: Table, notes: list[str]) -> Table:
    """The same rows, with those that were copied out of one storage as views of it again."""
    aliased = {number for number, kind in enumerate(table.kinds) if kind.traits.alias is not None and not kind.traits.meta}
    groups = shared_rows([table], stored_aliases=True).groups() if aliased else ()
    rows = [row for _, members in groups for row in members if table.kind[row] in aliased]
    if not rows:
        return table
    rejoined = rejoin(flat_state(table.select(rows), {}), table.view(rows[0]).source.limits)
    notes += [note.replace("written apart", "read apart") for note in rejoined.notes]
    return with_odd(table, dict(zip(rows, rejoined.state.tensors.values(), strict=True)))


def _viewable(tensor: LazyTensor) -> bool:
    """Whether torch can have it as a view of bytes that lie as in the file."""
    if len(tensor.chunks) != 1:
        return False
    (chunk,) = tensor.chunks
    bits = tensor.dtype.bits
    if tensor.dtype.packed or tensor.dtype.kind == "quantized" or tensor.size == 0 or chunk.shape != tensor.shape:
        return False
    if chunk.offset % bits or any(s < 0 or s % bits for s in chunk.strides):
        return False
    try:
        torch_dtype(tensor.dtype)
    except Unsupported:
        return False
    return True


def _regions(
    members: Mapping[str, LazyTensor], storage: Storage, *, originals: Mapping[str, LazyTensor], notes: list[str]
) -> Iterator[Region]:
    """The regions of tensors over one storage."""
    if len(members) < 2:
        return
    limits = next(iter(members.values())).source.limits
    if storage.byteorder != "little" and len({tensor.dtype for tensor in members.values()}) > 1:
        # Elements of several widths over the same big-endian bytes: no little-endian storage has them all.
        return

    def allowed(nbytes: int, names: Iterable[str]) -> bool:
        distinct = {(tensor.dtype, tensor.chunks): tensor.nbytes for tensor in map(members.__getitem__, names)}
        return nbytes <= max(limits.expansion * sum(distinct.values()), limits.expansion_floor_nbytes)

    if allowed(storage.nbytes, members):
        found = [SpanGroup(0, storage.nbytes, list(members))]
    else:
        found = disjoint_groups((*tensor.chunks[0].extent(tensor.dtype), name) for name, tensor in members.items())
    for group in found:
        start, stop, names = group.start, group.stop, group.members
        if len(names) < 2:
            continue
        if allowed(stop - start, names):
            yield _region(
                {name: members[name] for name in names}, originals, storage, start=start - start % WIDEST_NBYTES, stop=stop
            )
        else:
            shown = ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")
            notes.append(f"{shown} lie far apart in one storage; they are read apart (Limits(expansion=…) allows all of it)")


def _region(
    members: Mapping[str, LazyTensor], originals: Mapping[str, LazyTensor], storage: Storage, *, start: int, stop: int
) -> Region:
    kinds = {tensor.dtype for tensor in members.values()}
    dtype = next(iter(kinds)) if len(kinds) == 1 else BYTES
    count = (stop - start) * 8 // dtype.bits
    views = {name: _view(tensor, start) for name, tensor in members.items()}
    first = next(iter(members))
    if members[first].source is originals[first].source:
        chunk = Chunk(Box((0,), (count,)), storage, start * 8, (dtype.bits,))
        row = LazyTensor(first, dtype, (count,), (chunk,), members[first].source)
        return Region(dtype, count, views, (RegionRead(row, View(dtype, (count,), 0, (1,))),), True)
    return Region(dtype, count, views, tuple(_pieces(views, originals)), False)


def _view(tensor: LazyTensor, start: int) -> View:
    (chunk,) = tensor.chunks
    bits = tensor.dtype.bits
    strides = tuple(s // bits for s in chunk.strides)
    return View(tensor.dtype, tensor.shape, (chunk.offset - start * 8) // bits, strides, tensor.traits.conj, tensor.traits.neg)


def _pieces(views: Mapping[str, View], originals: Mapping[str, LazyTensor]) -> Iterable[RegionRead]:
    """Copies that are put where they lay, names of one copy once. An expanded one gives one of its equal elements."""
    seen: set[object] = set()
    for name, view in views.items():
        tensor = originals[name]
        if (tensor.chunks, view) in seen:
            continue
        seen.add((tensor.chunks, view))
        index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in view.strides)
        part = tensor[index] if index else tensor
        yield RegionRead(part, View(view.dtype, part.shape, view.offset, view.strides))
