"""Fresh torch tensors for lazy ones: made here, filled by `fill.py`. What shared a storage in the file shares one again."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from msgspec import Struct, field

from holdfast.core.chunk import c_strides
from holdfast.core.runtime import resting_collector
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.large_pages import wanted_in_large_pages
from holdfast.engine.memory_sink import MemoryRanges, read_to_memory
from holdfast.engine.source import OpenSource
from holdfast.errors import HoldfastWarning, located
from holdfast.torch.cuda.load import reserve
from holdfast.torch.cuda.plan import ByteKind, DeviceRows
from holdfast.torch.tensors.fill import Progress, fill
from holdfast.torch.tensors.fresh_rows import fresh_rows
from holdfast.torch.tensors.from_lazy import tensor_from_array, torch_dtype
from holdfast.torch.tensors.scratch import Fill
from holdfast.torch.tensors.shared_regions import Region, plan_regions, view_of

CPU = torch.device("cpu")


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
    _want_large_pages(fresh)
    for note in fill(fresh.fills, progress, max_host_memory=max_host_memory):
        warnings.warn(note, HoldfastWarning, stacklevel=3)
    return fresh.tensors


def read_rows(
    stored: Mapping[str, LazyTensor],
    views: Mapping[str, LazyTensor],
    names: Sequence[str],
    device: torch.device,
    *,
    max_host_memory: int | None = None,
) -> dict[str, torch.Tensor]:
    """Read tensors of these names, in one pass over the files: rows of what is `stored`, and of the others `views`."""
    with resting_collector():
        found = fresh_rows(stored, views, names, device=device)
        done = {name for one in found for name in one.names}
        others = {name: views[name] for name in names if name not in done}
        fresh = make_fresh({name: Want(lazy, wanted_dtype(lazy, None), device) for name, lazy in others.items()})
        here = _in_memory(device)
        for one in found if here else ():
            _read_to_memory(one.rows)
    _want_large_pages(fresh)
    on_gpu = [] if here else [one.rows for one in found]
    notes = fill(fresh.fills, rows=on_gpu, max_host_memory=max_host_memory)
    for note in notes:
        warnings.warn(note, HoldfastWarning, stacklevel=4)
    made = fresh.tensors
    for one in found:
        made.update((name, tensor) for name, tensor in zip(one.names, one.rows.tensors, strict=True) if tensor is not None)
    return made


def _want_large_pages(fresh: Fresh) -> None:
    wanted_in_large_pages((one.target.data_ptr(), one.target.nbytes) for one in fresh.fills if one.target.is_cpu)


def _in_memory(device: torch.device) -> bool:
    """Whether tensors of a device are in this process's memory."""
    return device.type == "cpu"


def _read_to_memory(rows: DeviceRows) -> None:
    """Make the tensors of fresh rows in this process's memory, and read them straight there."""
    source = rows.source
    made = [torch.empty(kind.shape, dtype=kind.dtype) for kind in rows.destinations if isinstance(kind, ByteKind)]
    addresses = np.fromiter((tensor.data_ptr() for tensor in made), np.int64, len(made))
    wanted_in_large_pages(zip(addresses.tolist(), rows.ranges.nbytes.tolist(), strict=True))
    threads = source.threads if isinstance(source, OpenSource) else 1
    nbytes = read_to_memory(source.store, MemoryRanges(rows.ranges, addresses, rows.crcs, rows.name, rows.damaged), threads=threads)
    if isinstance(source, OpenSource):
        source.read_nbytes += nbytes
    rows.tensors = [*made]


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
