"""Fresh torch tensors for lazy ones: made here, filled by `fill.py`. What shared a storage in the file shares one again."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import compress

import numpy as np
import torch
from msgspec import Struct, field

from holdfast.core.chunk import c_strides
from holdfast.core.protocols import Source
from holdfast.core.runtime import resting_collector
from holdfast.core.table import ODD, Kind, Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.large_pages import wanted_in_large_pages
from holdfast.errors import HoldfastWarning, Unsupported, located
from holdfast.plan.files import FileStorages
from holdfast.torch.cuda.load import reserve
from holdfast.torch.cuda.plan import ByteKind, DeviceRows
from holdfast.torch.tensors.fill import CPU, NO_FILLS, Fills, Progress, fill, row_ranges
from holdfast.torch.tensors.from_lazy import tensor_from_array, torch_dtype
from holdfast.torch.tensors.scratch import Fill
from holdfast.torch.tensors.shared_regions import Region, plan_regions, view_of


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
        what: object = regions.ties.get(name, name)
        if region is not None:
            if region not in storages:
                storages[region] = make_storage(region, wants, fresh)
            storage, view = storages[region], region.views[name]
            if storage is not None:
                fresh.tensors[name] = view_of(storage, view, want.dtype)
                continue
            what = (region, view)
        # By itself; but two names of one tensor (tied weights) are one in any case.
        twin = apart.get((what, want.dtype, want.device))
        if twin is None:
            fresh.tensors[name] = apart[what, want.dtype, want.device] = _alone(want, fresh)
        else:
            fresh.tensors[name] = twin.detach()
    return fresh


def read_tensors(
    tensors: Mapping[str, LazyTensor],
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    max_host_memory: int | None = None,
) -> dict[str, torch.Tensor]:
    """Read many lazy tensors as torch tensors, together. `dtype` is for floating-point tensors; the others keep theirs.

    `max_host_memory` is for GPUs, as in `fill`; what it has to say is a warning here.
    """
    with resting_collector():
        wants = {name: Want(lazy, wanted_dtype(lazy, dtype), device or CPU) for name, lazy in tensors.items()}
        fresh = make_fresh(wants)
    for note in fill(_in_large_pages(NO_FILLS.with_more(fresh.fills)), progress, max_host_memory=max_host_memory):
        warnings.warn(note, HoldfastWarning, stacklevel=3)
    return fresh.tensors


def read_rows(
    table: Table,
    views: Mapping[str, LazyTensor],
    names: Sequence[str],
    device: torch.device,
    *,
    max_host_memory: int | None = None,
) -> dict[str, torch.Tensor]:
    """Read tensors of these names, in one pass over the files: rows of the table, and of the others `views`."""
    with resting_collector():
        rows, kinds = fresh_rows(table, names, device=device)
        done = [table.names[row] for row in rows]
        known = {*done}
        others = {name: views[name] for name in names if name not in known}
        fresh = make_fresh({name: Want(lazy, wanted_dtype(lazy, None), device) for name, lazy in others.items()})
        wanted, on_gpu = NO_FILLS, list[DeviceRows]()
        if _in_memory(device):
            made = [torch.empty(kind.shape, dtype=kind.dtype) for kind in kinds]
            fresh.tensors.update(zip(done, made, strict=True))
            wanted = Fills(table, rows, {}, made)
        elif rows:
            on_gpu = row_ranges(table, rows, kinds, [device] * len(rows))
    notes = fill(_in_large_pages(wanted.with_more(fresh.fills)), fresh=on_gpu, max_host_memory=max_host_memory)
    for note in notes:
        warnings.warn(note, HoldfastWarning, stacklevel=4)
    for one in on_gpu:
        fresh.tensors |= {one.name(number): tensor for number, tensor in enumerate(one.tensors) if tensor is not None}
    return fresh.tensors


def fresh_rows(table: Table, names: Sequence[str], *, device: torch.device) -> tuple[list[int], list[ByteKind]]:
    """Which tensors become fresh ones without an object each: rows of the table, and as what each is copied.

    Those are all of a storage that no other of these tensors has. What shares a storage is tied again by its regions
    (shared_regions.py), and what has another order, dtype or several pieces is copied element by element.
    """
    if not isinstance(table.storages, FileStorages):
        return [], []
    own = [row for name in names if table.storage[row := table.rows[name]] != ODD]
    numbers = np.array([table.storage[row] for row in own], np.int64)
    suited = np.array([_suits(place.source, device) for place in table.storages.files], np.bool_)
    alone = (np.bincount(numbers)[numbers] == 1) & suited[table.storages.file[numbers]] if own else []
    kinds = [_byte_kind(kind) if kind.whole and kind.traits.alias is None else None for kind in table.kinds]
    chosen = [(row, kind) for row in compress(own, alone) if (kind := kinds[table.kind[row]]) is not None]
    return [row for row, _ in chosen], [kind for _, kind in chosen]


def _suits(source: Source, device: torch.device) -> bool:
    """Whether whole storages of a source are read as they are. To the CPU a mapped file gives views, and far away or computed
    content has requests of its own."""
    store = source.store
    apart = source.mapped or store.requests or store.in_order or store.block_nbytes
    return source.limits.expansion >= 1 and not (device.type == "cpu" and apart)


def _byte_kind(kind: Kind) -> ByteKind | None:
    """As what rows of a kind are copied; None where torch has no such elements. Of quantised ones a scale is missing."""
    dtype = kind.dtype
    try:
        usual = dtype.kind != "quantized" and not dtype.packed and torch_dtype(dtype).itemsize * 8 == dtype.bits
        return ByteKind.of(torch_dtype(dtype), kind.shape) if usual else None
    except Unsupported:
        return None


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
