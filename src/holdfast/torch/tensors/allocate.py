"""Fresh torch tensors for lazy ones: made here, filled by `fill.py`. What shared a storage in the file shares one again.

    storage in the file   │ · · a a a a b b · · · · · · c c c │      a, b over a, and c are names
    region                │ · · a a a a b b · · · · · · c c c │      small, or well used: one region, the whole storage
    regions                   │ a a a a b b │                        large and hardly used: one for what overlaps; c is alone

1. Names over one storage of the file are found by comparing where they are in it; nothing is read.
2. Formats that store every tensor by itself record its place in the storage that it was saved from (`Traits.alias`). Such copies
   become views of one region, too, where they agree: `saving/rejoin.py` reads data only where copies overlap.
3. A region is the whole storage as long as `Limits(expansion=…)` allows that many bytes for the tensors that are read, so that
   offsets are those of the file. Of a larger storage only what overlaps is one region, under the same limit.

A tensor that is alone in its storage is in no region.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from msgspec import Struct, field

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides, has_overlapping_elements
from holdfast.core.dtype import WIDEST_NBYTES, DType
from holdfast.core.protocols import Source
from holdfast.core.runtime import gc_paused
from holdfast.core.sharing import (
    RangeGroup,
    check_expansion,
    find_shared_rows,
    group_overlapping_ranges,
)
from holdfast.core.table import IRREGULAR, RowKind, Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.files import FileStorages, tabulate
from holdfast.errors import HoldfastWarning, Unsupported, error_context
from holdfast.stores.platform import request_large_pages
from holdfast.torch.cuda.load import reserve
from holdfast.torch.cuda.plan import ByteKind, DeviceRows
from holdfast.torch.tensors.fill import CPU, NO_FILLS, Fills, Progress, fill, row_ranges
from holdfast.torch.tensors.from_lazy import BYTES, tensor_from_array, torch_dtype
from holdfast.torch.tensors.scratch import Fill
from holdfast.torch.tensors.tree import lazy_tensors
from holdfast.verbs.shared.rejoin import rejoin
from holdfast.verbs.shared.state import make_flat_state, replace_rows


class Want(Value, frozen=True):
    """A tensor of a file, with the dtype, device and strides that it gets in torch."""

    lazy: LazyTensor
    dtype: torch.dtype
    device: torch.device = CPU
    strides: tuple[int, ...] | None = None
    """In elements; None for the order of the file."""

    @property
    def cast(self) -> bool:
        return self.dtype != torch_dtype(self.lazy.dtype)


class Fresh(Struct):
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    fills: list[Fill] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def make_fresh(wants: Mapping[str, Want], *, keep_expanded: bool = False) -> Fresh:
    """Make a tensor for each name. A mapped file gives views of its memory where dtype, device and layout allow.

    With `keep_expanded`, a tensor whose elements share memory in the file is such a view again. Otherwise
    it gets memory for every element, as a tensor that is trained needs.
    """
    fresh = Fresh()
    reserve((want.device, want.lazy.size * want.dtype.itemsize) for want in wants.values())
    plain_tensors = {name: want.lazy for name, want in wants.items() if _plain(want.lazy)}
    regions = plan_regions(plain_tensors, keep_expanded=keep_expanded)
    fresh.notes += regions.notes
    storages: dict[Region, torch.UntypedStorage | None] = {}
    copied: dict[str, Want] = {}
    for name, want in wants.items():
        region = regions.by_name.get(name)
        if region is not None:
            if region not in storages:
                storages[region] = make_storage(region, wants, fresh)
            storage = storages[region]
            if storage is not None:
                fresh.tensors[name] = view_of(storage, region.views[name], want.dtype)
                continue
        copied[name] = want
    if keep_expanded:
        check_expansion(tabulate([*copied], [want.lazy for want in copied.values()]))
    apart: dict[object, torch.Tensor] = {}
    for name, want in copied.items():
        # Two names of one tensor (tied weights) are one tensor also here.
        what = regions.ties.get(name, name), want.dtype, want.device
        tied = apart.get(what)
        if tied is None:
            fresh.tensors[name] = apart[what] = _alone(want, fresh)
        else:
            fresh.tensors[name] = tied.detach()
    return fresh


def read_tensors(
    tensors: Mapping[str, LazyTensor],
    *,
    names: Sequence[str] | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    max_host_memory: int | None = None,
) -> dict[str, torch.Tensor]:
    """Read many tensors, all or those of these names, as torch tensors, in one pass over the files.

    `dtype` is for floating-point tensors; the others keep theirs. `max_host_memory` is for GPUs, as in `fill`; its notes are
    warnings here.
    """
    place, keys = device or CPU, [*dict.fromkeys(tensors if names is None else names)]
    with gc_paused():
        if isinstance(tensors, Table):
            rows = [tensors.row_indices[key] for key in keys]
            table = tensors.locate_rows(rows)
        else:
            views = [tensors[key] for key in keys]
            table, rows = tabulate([view.name for view in views], views), [*range(len(views))]
        kinds = fresh_kinds(table, rows, device=place, dtype=dtype)
        found = [
            (key, row, kind)
            for key, row, kind in zip(keys, rows, kinds, strict=True)
            if kind is not None
        ]
        others = {
            key: table.lazy_tensor(row)
            for key, row, kind in zip(keys, rows, kinds, strict=True)
            if kind is None
        }
        wants = {key: Want(lazy, _wanted_dtype(lazy, dtype), place) for key, lazy in others.items()}
        fresh = make_fresh(wants, keep_expanded=True)
        chosen, wanted, on_gpu = (
            [row for _, row, _ in found],
            NO_FILLS,
            list[tuple[DeviceRows, list[int]]](),
        )
        if _in_memory(place):
            own = empty_tensors([kind for _, _, kind in found], place)
            fresh.tensors.update(zip([key for key, _, _ in found], own, strict=True))
            wanted = Fills(table, chosen, {}, own)
        elif found:
            on_gpu = row_ranges(table, chosen, [kind for _, _, kind in found], [place] * len(found))
    loads = [one for one, _ in on_gpu]
    fills = wanted.with_more(fresh.fills)
    request_large_pages(
        (target.data_ptr(), target.nbytes) for target in fills.targets if target.is_cpu
    )
    notes = fill(fills, progress, fresh=loads, max_host_memory=max_host_memory)
    for note in notes:
        warnings.warn(note, HoldfastWarning, stacklevel=3)
    for one, members in on_gpu:
        fresh.tensors |= {
            found[at][0]: tensor
            for at, tensor in zip(members, one.tensors, strict=True)
            if tensor is not None
        }
    return fresh.tensors


def read_lazies(
    tree: object,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    max_host_memory: int | None = None,
) -> dict[int, torch.Tensor]:
    """Read all lazy tensors in a tree, by their identities, as `read_tensors` does."""
    lazies = {str(id(lazy)): lazy for lazy in lazy_tensors(tree)}
    made = read_tensors(
        lazies, device=device, dtype=dtype, progress=progress, max_host_memory=max_host_memory
    )
    return {int(key): tensor for key, tensor in made.items()}


def fresh_kinds(
    table: Table, rows: Sequence[int], *, device: torch.device, dtype: torch.dtype | None = None
) -> list[ByteKind | None]:
    """The kinds of fresh tensors that take rows of a table as they are, without an object each; None for a row that cannot be taken
    so.

    Such a row fills a storage that no other of these rows has. What shares a storage is tied again by its regions, and what has
    another order, dtype or several pieces is copied element by element.
    """
    storages = table.storages
    if not isinstance(storages, FileStorages):
        return [None] * len(rows)
    suited = [_suits(place.source, device) for place in storages.files]
    kinds = [
        _byte_kind(kind, dtype) if kind.is_whole and kind.traits.alias is None else None
        for kind in table.kinds
    ]
    numbers = [table.storage_indices[row] for row in rows]
    counts, file = Counter(numbers), storages.file_indices
    return [
        kinds[table.kind_indices[row]]
        if number != IRREGULAR and counts[number] == 1 and suited[file[number]]
        else None
        for row, number in zip(rows, numbers, strict=True)
    ]


def empty_tensors(kinds: Sequence[ByteKind], device: torch.device) -> list[torch.Tensor]:
    reserve((device, math.prod(kind.shape) * kind.dtype.itemsize) for kind in kinds)
    return [torch.empty(kind.shape, dtype=kind.dtype, device=device) for kind in kinds]


def _suits(source: Source, device: torch.device) -> bool:
    """Whether whole storages of a source are read as they are. To the CPU, a mapped file gives views, and computed content comes in
    blocks of its own.
    """
    apart = source.mapped or source.store.read_profile.block_nbytes
    return source.limits.expansion >= 1 and (
        not apart if device.type == "cpu" else device.type == "cuda"
    )


def _byte_kind(kind: RowKind, cast: torch.dtype | None) -> ByteKind | None:
    """The kind of tensor that takes rows of a kind as they are; None where they are cast, quantised, or unknown to torch."""
    dtype = kind.dtype
    try:
        own = torch_dtype(dtype)
    except Unsupported:
        return None
    usual = dtype.kind != "quantized" and not dtype.packed and own.itemsize * 8 == dtype.bits
    return (
        ByteKind.of(own, kind.shape)
        if usual and (cast in (None, own) or dtype.kind != "float")
        else None
    )


def _in_memory(device: torch.device) -> bool:
    return device.type == "cpu"


def _wanted_dtype(lazy: LazyTensor, dtype: torch.dtype | None) -> torch.dtype:
    with error_context(tensor=lazy.name):
        own = torch_dtype(lazy.dtype)
    return (
        dtype if dtype is not None and lazy.dtype.kind == "float" and not lazy.dtype.packed else own
    )


def _plain(lazy: LazyTensor) -> bool:
    return not lazy.traits.meta and not lazy.dtype.packed and lazy.dtype.kind != "quantized"


def make_storage(
    region: Region, wants: Mapping[str, Want], fresh: Fresh
) -> torch.UntypedStorage | None:
    """Make the storage of a region; None where its tensors go to several dtypes or devices."""
    members = [wants[name] for name in region.views]
    dtypes, devices = (
        {want.dtype for want in members if want.cast},
        {want.device for want in members},
    )
    if len(devices) > 1 or (
        dtypes
        and (len(dtypes) > 1 or not region.castable or not all(want.cast for want in members))
    ):
        shown = ", ".join(map(repr, list(region.views)[:3])) + (
            ", …" if len(region.views) > 3 else ""
        )
        fresh.notes.append(
            f"{shown} share a storage in the file; cast or moved apart, each has its own"
        )
        return None
    dtype = next(iter(dtypes), torch_dtype(region.dtype))
    (device,) = devices
    first, _ = region.pieces[0]
    if not dtypes and device == CPU and region.whole and first.source.mapped:
        mapped = first.source.view(first)
        if mapped is not None:
            return tensor_from_array(mapped, dtype).untyped_storage()
    if device != CPU and not region.castable and not region.whole:
        return None
    make = torch.empty if region.whole else torch.zeros
    storage = make(
        region.count * dtype.itemsize, dtype=torch.uint8, device=device
    ).untyped_storage()
    for tensor, view in region.pieces:
        own = dtype if dtypes else torch_dtype(view.dtype)
        fresh.fills.append(Fill(tensor, view_of(storage, view, own)))
    return storage


def _alone(want: Want, fresh: Fresh) -> torch.Tensor:
    lazy = want.lazy
    if not _plain(lazy):
        # No data, elements that share bytes, or integers without their scale: torch() makes the tensor, or raises.
        made = lazy.torch()
        return made if made.is_meta else made.to(want.device)
    if not want.cast and want.device == CPU and want.strides is None and lazy.source.mapped:
        view = lazy.source.view(lazy)
        if view is not None:
            return tensor_from_array(view, want.dtype)
    lazy.check_expansion()
    strides = want.strides or _dense_strides(lazy)
    made = torch.empty_strided(lazy.shape, strides, dtype=want.dtype, device=want.device)
    fresh.fills.append(Fill(lazy, made))
    return made


def has_no_gaps(shape: Sequence[int], strides: Sequence[int], width: int) -> bool:
    """Whether elements of a width lie one after the other, with the dimensions in any order."""
    room = width
    for n, stride in sorted(zip(shape, strides, strict=True), key=lambda pair: (pair[1], pair[0])):
        if n > 1:
            if stride != room:
                return False
            room *= n
    return True


def _dense_strides(lazy: LazyTensor) -> tuple[int, ...]:
    """The strides of the file, in elements, where they leave no gaps (channels last, a transpose); else C order."""
    order = c_strides(lazy.shape, 1)
    place = lazy.traits.alias or (lazy.chunks[0] if len(lazy.chunks) == 1 else None)
    if place is None or len(place.strides) != lazy.ndim or not lazy.size:
        return order
    bits = lazy.dtype.bits
    if not has_no_gaps(lazy.shape, place.strides, bits):
        return order
    return tuple(
        s // bits if n > 1 else c for n, s, c in zip(lazy.shape, place.strides, order, strict=True)
    )


# Regions: what one torch storage holds.


class View(Value, frozen=True):
    """The place of a tensor in a region, counted in its own elements."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    conj: bool = False
    neg: bool = False


class Region(Value, frozen=True, eq=False):
    dtype: DType
    """The dtype of all views, or uint8 where they have several."""
    count: int
    views: Mapping[str, View]
    pieces: tuple[tuple[LazyTensor, View], ...]
    """The tensors of the file that are read into it, and their places there."""
    whole: bool
    """Whether the pieces leave no hole."""

    @property
    def castable(self) -> bool:
        """Whether the region can be cast: all views have one dtype, and nothing is written twice."""
        one = all(view.dtype is self.dtype for view in self.views.values())
        return one and not any(
            has_overlapping_elements(view.shape, view.strides) for _, view in self.pieces
        )


class Regions(Struct):
    by_name: dict[str, Region] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    """The first name of a tensor, by each later name of it."""
    notes: list[str] = field(default_factory=list)


def plan_regions(tensors: Mapping[str, LazyTensor], *, keep_expanded: bool = False) -> Regions:
    """Find the tensors that share storage, and plan the regions that hold them. Reads data only where copies overlapped.

    With `keep_expanded`, a tensor whose elements share memory with each other gets a region, too.
    """
    regions = Regions()
    if len(tensors) < 2:
        return regions
    table = _rejoined(tabulate([*tensors], [*tensors.values()]), regions.notes)
    shared, names = find_shared_rows([table]), table.names
    for number, rows in shared.groups():
        lazies = {names[row]: table.lazy_tensor(row) for row in rows}
        storage = shared.find_storage(number, lazies[names[rows[0]]], rows[0])
        members = {name: tensor for name, tensor in lazies.items() if _viewable(tensor)}
        for region in _regions(members, storage, originals=tensors, notes=regions.notes):
            regions.by_name.update(dict.fromkeys(region.views, region))
    regions.ties = {names[row]: names[first] for row, first in shared.ties().items()}
    for row in table.rows_not_whole if keep_expanded else ():
        tensor = table.lazy_tensor(row)
        if names[row] not in regions.by_name and _viewable(tensor):
            (chunk,) = tensor.chunks
            start, stop = chunk.byte_range(tensor.dtype)
            if (
                has_overlapping_elements(chunk.shape, chunk.strides)
                and stop - start < tensor.nbytes
            ):
                region = _region(
                    {names[row]: tensor},
                    tensors,
                    chunk.storage,
                    start=start - start % WIDEST_NBYTES,
                    stop=stop,
                )
                regions.by_name[names[row]] = region
    return regions


def view_of(storage: torch.UntypedStorage, view: View, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty(0, dtype=dtype, device=storage.device).set_(
        storage, view.offset, view.shape, view.strides
    )
    if view.conj:
        made = made.conj()
    return torch._neg_view(made) if view.neg else made


def _rejoined(table: Table, notes: list[str]) -> Table:
    """The table with views of one storage in the place of rows that were copied out of it."""
    aliased = {
        number
        for number, kind in enumerate(table.kinds)
        if kind.traits.alias is not None and not kind.traits.meta
    }
    groups = find_shared_rows([table], stored_aliases=True).groups() if aliased else ()
    rows = [row for _, members in groups for row in members if table.kind_indices[row] in aliased]
    if not rows:
        return table
    rejoined = rejoin(
        make_flat_state(table.select(rows), {}), table.lazy_tensor(rows[0]).source.limits
    )
    notes += [note.replace("written apart", "read apart") for note in rejoined.notes]
    return replace_rows(table, dict(zip(rows, rejoined.state.tensors.values(), strict=True)))


def _viewable(tensor: LazyTensor) -> bool:
    """Whether torch can view the bytes of a tensor as they are in the file."""
    if len(tensor.chunks) != 1:
        return False
    (chunk,) = tensor.chunks
    bits = tensor.dtype.bits
    if (
        tensor.dtype.packed
        or tensor.dtype.kind == "quantized"
        or tensor.size == 0
        or chunk.shape != tensor.shape
    ):
        return False
    if chunk.offset % bits or any(s < 0 or s % bits for s in chunk.strides):
        return False
    try:
        torch_dtype(tensor.dtype)
    except Unsupported:
        return False
    return True


def _regions(
    members: Mapping[str, LazyTensor],
    storage: Storage,
    *,
    originals: Mapping[str, LazyTensor],
    notes: list[str],
) -> Iterator[Region]:
    if len(members) < 2:
        return
    limits = next(iter(members.values())).source.limits
    if storage.byteorder != "little" and len({tensor.dtype for tensor in members.values()}) > 1:
        # Elements of several widths over the same big-endian bytes: no little-endian storage has them all.
        return

    def allowed(nbytes: int, names: Iterable[str]) -> bool:
        distinct = {
            (tensor.dtype, tensor.chunks): tensor.nbytes
            for tensor in map(members.__getitem__, names)
        }
        return nbytes <= max(
            limits.expansion * sum(distinct.values()), limits.expansion_floor_nbytes
        )

    if allowed(storage.nbytes, members):
        found = [RangeGroup(0, storage.nbytes, list(members))]
    else:
        found = group_overlapping_ranges(
            (*tensor.chunks[0].byte_range(tensor.dtype), name) for name, tensor in members.items()
        )
    for group in found:
        start, stop, names = group.start, group.stop, group.members
        if len(names) < 2:
            continue
        if allowed(stop - start, names):
            own = {name: members[name] for name in names}
            yield _region(own, originals, storage, start=start - start % WIDEST_NBYTES, stop=stop)
        else:
            shown = ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")
            notes.append(
                f"{shown} lie far apart in one storage; they are read apart (Limits(expansion=…) allows all of it)"
            )


def _region(
    members: Mapping[str, LazyTensor],
    originals: Mapping[str, LazyTensor],
    storage: Storage,
    *,
    start: int,
    stop: int,
) -> Region:
    kinds = {tensor.dtype for tensor in members.values()}
    dtype = next(iter(kinds)) if len(kinds) == 1 else BYTES
    count = (stop - start) * 8 // dtype.bits
    views = {name: _view(tensor, start) for name, tensor in members.items()}
    first = next(iter(members))
    if members[first].source is originals[first].source:
        chunk = Chunk(Box((0,), (count,)), storage, start * 8, (dtype.bits,))
        row = LazyTensor(first, dtype, (count,), (chunk,), members[first].source)
        return Region(dtype, count, views, ((row, View(dtype, (count,), 0, (1,))),), True)
    return Region(dtype, count, views, tuple(_pieces(views, originals)), False)


def _view(tensor: LazyTensor, start: int) -> View:
    (chunk,) = tensor.chunks
    bits = tensor.dtype.bits
    strides = tuple(s // bits for s in chunk.strides)
    return View(
        tensor.dtype,
        tensor.shape,
        (chunk.offset - start * 8) // bits,
        strides,
        tensor.traits.conj,
        tensor.traits.neg,
    )


def _pieces(
    views: Mapping[str, View], originals: Mapping[str, LazyTensor]
) -> Iterable[tuple[LazyTensor, View]]:
    """The copies that fill a region, names of one copy once. An expanded one gives one of its equal elements."""
    seen: set[object] = set()
    for name, view in views.items():
        tensor = originals[name]
        if (tensor.chunks, view) in seen:
            continue
        seen.add((tensor.chunks, view))
        index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in view.strides)
        part = tensor[index] if index else tensor
        yield part, View(view.dtype, part.shape, view.offset, view.strides)
