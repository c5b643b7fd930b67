"""Fresh torch tensors for lazy ones: made here, filled by `fill.py`. What shared a storage in the file shares one again."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from msgspec import Struct, field

from holdfast.core.chunk import c_strides
from holdfast.core.protocols import Source
from holdfast.core.runtime import gc_paused
from holdfast.core.table import ODD, Kind, Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.files import FileStorages, tabulate
from holdfast.engine.large_pages import wanted_in_large_pages
from holdfast.errors import HoldfastWarning, Unsupported, located
from holdfast.torch.cuda.load import reserve
from holdfast.torch.cuda.plan import ByteKind, DeviceRows
from holdfast.torch.tensors.fill import CPU, NO_FILLS, Fills, Progress, fill, row_ranges
from holdfast.torch.tensors.from_lazy import tensor_from_array, torch_dtype
from holdfast.torch.tensors.scratch import Fill
from holdfast.torch.tensors.shared_regions import Region, plan_regions, view_of
from holdfast.torch.tensors.tree import lazy_tensors


class Want(Value, frozen=True):
    """A tensor of a file, and what it shall be in torch."""

    lazy: LazyTensor
    dtype: torch.dtype
    device: torch.device = CPU
    strides: tuple[int, ...] | None = None
    """In elements, where the order of elements in memory is given; otherwise it is that of the file."""

    @property
    def cast(self) -> bool:
        return self.dtype != torch_dtype(self.lazy.dtype)


class Fresh(Struct):
    """Tensors that were made and are still to be filled."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    fills: list[Fill] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def make_fresh(wants: Mapping[str, Want]) -> Fresh:
    """Make a tensor for each name. Those of a mapped file are the mapped memory where dtype, device and layout allow."""
    fresh = Fresh()
    reserve((want.device, want.lazy.size * want.dtype.itemsize) for want in wants.values())
    regions = plan_regions({name: want.lazy for name, want in wants.items() if _plain(want.lazy)})
    fresh.notes += regions.notes
    storages: dict[Region, torch.UntypedStorage | None] = {}
    apart: dict[object, torch.Tensor] = {}
    for name, want in wants.items():
        region = regions.by_name.get(name)
        if region is not None:
            if region not in storages:
                storages[region] = make_storage(region, wants, fresh)
            storage = storages[region]
            if storage is not None:
                fresh.tensors[name] = view_of(storage, region.views[name], want.dtype)
                continue
        # By itself; but two names of one tensor (tied weights) are one in any case.
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
    """Read many tensors, all or those of these names, as torch tensors: together, in one pass over the files.

    `dtype` is for floating-point tensors; the others keep theirs. `max_host_memory` is for GPUs, as in `fill`; what it has to
    say is a warning here.
    """
    place, keys = device or CPU, [*dict.fromkeys(tensors if names is None else names)]
    with gc_paused():
        if isinstance(tensors, Table):
            rows = [tensors.rows[key] for key in keys]
            table = tensors.located(rows)
        else:
            views = [tensors[key] for key in keys]
            table, rows = tabulate([view.name for view in views], views), [*range(len(views))]
        kinds = fresh_kinds(table, rows, device=place, dtype=dtype)
        found = [(key, row, kind) for key, row, kind in zip(keys, rows, kinds, strict=True) if kind is not None]
        others = {key: table.view(row) for key, row, kind in zip(keys, rows, kinds, strict=True) if kind is None}
        fresh = make_fresh({key: Want(lazy, wanted_dtype(lazy, dtype), place) for key, lazy in others.items()})
        chosen, wanted, on_gpu = [row for _, row, _ in found], NO_FILLS, list[tuple[DeviceRows, list[int]]]()
        if _in_memory(place):
            own = empty_tensors([kind for _, _, kind in found], place)
            fresh.tensors.update(zip([key for key, _, _ in found], own, strict=True))
            wanted = Fills(table, chosen, {}, own)
        elif found:
            on_gpu = row_ranges(table, chosen, [kind for _, _, kind in found], [place] * len(found))
    loads = [one for one, _ in on_gpu]
    notes = fill(_in_large_pages(wanted.with_more(fresh.fills)), progress, fresh=loads, max_host_memory=max_host_memory)
    for note in notes:
        warnings.warn(note, HoldfastWarning, stacklevel=3)
    for one, members in on_gpu:
        fresh.tensors |= {found[at][0]: tensor for at, tensor in zip(members, one.tensors, strict=True) if tensor is not None}
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
    made = read_tensors(lazies, device=device, dtype=dtype, progress=progress, max_host_memory=max_host_memory)
    return {int(key): tensor for key, tensor in made.items()}


def fresh_kinds(
    table: Table, rows: Sequence[int], *, device: torch.device, dtype: torch.dtype | None = None
) -> list[ByteKind | None]:
    """As what rows of a table become fresh tensors without an object each; None for a row that does not.

    Those are all of a storage that no other of these rows has. What shares a storage is tied again by its regions
    (shared_regions.py), and what has another order, dtype or several pieces is copied element by element.
    """
    storages = table.storages
    if not isinstance(storages, FileStorages):
        return [None] * len(rows)
    suited = [_suits(place.source, device) for place in storages.files]
    kinds = [_byte_kind(kind, dtype) if kind.whole and kind.traits.alias is None else None for kind in table.kinds]
    numbers = [table.storage[row] for row in rows]
    counts, file = Counter(numbers), storages.file
    return [
        kinds[table.kind[row]] if number != ODD and counts[number] == 1 and suited[file[number]] else None
        for row, number in zip(rows, numbers, strict=True)
    ]


def empty_tensors(kinds: Sequence[ByteKind], device: torch.device) -> list[torch.Tensor]:
    """Tensors of these kinds, to be filled."""
    reserve((device, math.prod(kind.shape) * kind.dtype.itemsize) for kind in kinds)
    return [torch.empty(kind.shape, dtype=kind.dtype, device=device) for kind in kinds]


def _suits(source: Source, device: torch.device) -> bool:
    """Whether whole storages of a source are read as they are. To the CPU a mapped file gives views, and computed content has
    blocks of its own."""
    apart = source.mapped or source.store.medium.block_nbytes
    return source.limits.expansion >= 1 and (not apart if device.type == "cpu" else device.type == "cuda")


def _byte_kind(kind: Kind, cast: torch.dtype | None) -> ByteKind | None:
    """As what rows of a kind are copied; None where they are cast, or torch has no such elements. Of quantised ones a scale is
    missing."""
    dtype = kind.dtype
    try:
        own = torch_dtype(dtype)
    except Unsupported:
        return None
    usual = dtype.kind != "quantized" and not dtype.packed and own.itemsize * 8 == dtype.bits
    return ByteKind.of(own, kind.shape) if usual and (cast in (None, own) or dtype.kind != "float") else None


def _in_large_pages(fills: Fills) -> Fills:
    """Fills whose targets were just made: memory that is filled from front to back."""
    wanted_in_large_pages((target.data_ptr(), target.nbytes) for target in fills.targets if target.is_cpu)
    return fills


def _in_memory(device: torch.device) -> bool:
    """Whether tensors of a device are in this process's memory."""
    return device.type == "cpu"


def wanted_dtype(lazy: LazyTensor, dtype: torch.dtype | None) -> torch.dtype:
    """The file's dtype, or `dtype` where that is given and the elements are floating-point numbers."""
    with located(tensor=lazy.name):
        own = torch_dtype(lazy.dtype)
    return dtype if dtype is not None and lazy.dtype.kind == "float" and not lazy.dtype.packed else own


def _plain(lazy: LazyTensor) -> bool:
    return not lazy.traits.meta and not lazy.dtype.packed and lazy.dtype.kind != "quantized"


def make_storage(region: Region, wants: Mapping[str, Want], fresh: Fresh) -> torch.UntypedStorage | None:
    """The storage of a region, or None where its tensors cannot share one: they go to several dtypes or devices."""
    members = [wants[name] for name in region.views]
    dtypes, devices = {want.dtype for want in members if want.cast}, {want.device for want in members}
    if len(devices) > 1 or (dtypes and (len(dtypes) > 1 or not region.castable or not all(want.cast for want in members))):
        shown = ", ".join(map(repr, list(region.views)[:3])) + (", …" if len(region.views) > 3 else "")
        fresh.notes.append(f"{shown} share a storage in the file; cast or moved apart, each has its own")
        return None
    dtype = next(iter(dtypes), torch_dtype(region.dtype))
    (device,) = devices
    first = region.pieces[0].tensor
    if not dtypes and device == CPU and region.whole and first.source.mapped:
        view = first.source.view(first)
        if view is not None:
            return tensor_from_array(view, dtype).untyped_storage()
    if device != CPU and not region.castable and not region.whole:
        return None
    make = torch.empty if region.whole else torch.zeros
    storage = make(region.count * dtype.itemsize, dtype=torch.uint8, device=device).untyped_storage()
    for piece in region.pieces:
        own = dtype if dtypes else torch_dtype(piece.view.dtype)
        fresh.fills.append(Fill(piece.tensor, view_of(storage, piece.view, own)))
    return storage


def _alone(want: Want, fresh: Fresh) -> torch.Tensor:
    lazy = want.lazy
    if lazy.traits.meta or not _plain(lazy):
        # No data, elements that share bytes, or integers without their scale: what torch() makes of it, or why it does not.
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


def _dense_strides(lazy: LazyTensor) -> tuple[int, ...]:
    """The order of the elements in the file where it leaves no gaps (channels last, a transpose), else C order; in elements."""
    order = c_strides(lazy.shape, 1)
    place = lazy.traits.alias or (lazy.chunks[0] if len(lazy.chunks) == 1 else None)
    if place is None or len(place.strides) != lazy.ndim or not lazy.size:
        return order
    bits = lazy.dtype.bits
    room = bits
    for n, stride in sorted(zip(lazy.shape, place.strides, strict=True), key=lambda pair: (pair[1], pair[0])):
        if n > 1:
            if stride != room:
                return order
            room *= n
    return tuple(s // bits if n > 1 else c for n, s, c in zip(lazy.shape, place.strides, order, strict=True))
