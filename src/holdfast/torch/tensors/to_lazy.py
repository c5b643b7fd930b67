"""torch tensors as lazy tensors over the memory that they already have, for saving; and that memory as Python's, without a copy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch.nn.parameter import is_lazy

from holdfast.core.chunk import Chunk
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.opaque import Device, Size
from holdfast.core.runtime import memory_at
from holdfast.core.tensor import PLAIN, Composite, LazyTensor, Traits
from holdfast.core.tree import Path, dotted
from holdfast.core.value import replace
from holdfast.engine.arrays import Resident
from holdfast.errors import Unsupported
from holdfast.torch.cuda.memory import GpuSource
from holdfast.torch.ranks.shards import is_sharded, shards_of
from holdfast.torch.tensors.composites import KINDS, Elements, kind_of
from holdfast.torch.tensors.from_lazy import view_dtype


class Memories:
    """The memory of a state that is being saved: that of this process, and that of GPUs once there is a tensor on one."""

    def __init__(self, resident: Resident) -> None:
        self.resident = resident
        self._gpus: GpuSource | None = None

    @property
    def gpus(self) -> GpuSource:
        if self._gpus is None:
            self._gpus = GpuSource()
        return self._gpus


def torch_leaf(resident: Resident) -> Callable[[object, Path], object]:
    """A function that turns torch's tensors, sizes, dtypes and devices into ours, and gives everything else back."""
    memories = Memories(resident)

    def convert(value: object, path: Path) -> object:
        match value:
            case _ if is_sharded(value):
                return _sharded(cast(torch.Tensor, value), memories, name=dotted(path))
            case torch.Tensor():
                return _tensor(value, memories)
            case torch.Size():
                return Size(value)
            case torch.dtype():
                return _dtype(value)
            case torch.device():
                return Device(value.type, value.index)
            case _:
                return value

    return convert


@cache
def _dtype(dtype: torch.dtype) -> DType:
    found = DTYPES.torch(str(dtype).removeprefix("torch."))
    if found is None:
        raise Unsupported(f"Holdfast does not know {dtype}")
    return found


def _tensor(tensor: torch.Tensor, memories: Memories) -> LazyTensor | Composite:
    resident = memories.resident
    parameter = isinstance(tensor, torch.nn.Parameter)
    # Also of a view, or of what was computed: as torch.save has it, which gives back a leaf that wants a gradient.
    grad = tensor.requires_grad
    traits = Traits(requires_grad=grad, parameter=parameter) if grad or parameter else PLAIN
    if is_lazy(tensor):
        raise Unsupported("a parameter that is not initialised yet has no shape and no data; run the module once, or leave it out")
    kind = kind_of(tensor)
    if kind is not None:
        return _composite(tensor.detach(), kind, memories, traits=traits)
    if tensor.layout is not torch.strided:
        raise Unsupported(f"a tensor with layout {str(tensor.layout).removeprefix('torch.')} cannot be saved")
    plain = tensor
    if type(plain) not in (torch.Tensor, torch.nn.Parameter) and hasattr(plain, "__tensor_flatten__"):
        raise Unsupported(f"a {type(tensor).__name__} is no plain tensor; take its parts apart or make it dense first")
    if plain.is_meta:
        return resident.meta(_dtype(plain.dtype), tuple(plain.shape), replace(traits, meta=True))
    if plain.is_conj() or plain.is_neg():
        traits = replace(traits, conj=plain.is_conj(), neg=plain.is_neg())
    location = "cpu"
    if plain.is_cuda:
        return memories.gpus.tensor(plain.detach(), _dtype(plain.dtype), traits)
    if not plain.is_cpu:
        location = str(plain.device)
        plain = plain.detach().cpu()
    storage = plain.untyped_storage()
    # The storage's own memory, looked at; `owner` keeps it there for as long as anything points at it.
    place = resident.memory(storage.data_ptr(), storage_memory(storage), owner=storage, location=location)
    width = plain.element_size()
    strides = tuple(s * width for s in plain.stride())
    return resident.strided(place, _dtype(plain.dtype), tuple(plain.shape), strides, int(plain.storage_offset()) * width, traits)


def _sharded(tensor: torch.Tensor, memories: Memories, *, name: str) -> LazyTensor:
    """The whole tensor, with a chunk for each part that this rank has; it is saved where the chunks of all ranks come together."""
    shards = shards_of(tensor, name)
    grad = bool(getattr(tensor, "requires_grad", False))
    parameter = isinstance(tensor, torch.nn.Parameter)
    traits = Traits(requires_grad=grad, parameter=parameter) if grad or parameter else PLAIN
    dtype = _dtype(shards.dtype)
    chunks: list[Chunk] = []
    gpus = [part.tensor.is_cuda for part in shards.parts]
    for part in shards.parts:
        plain = part.tensor.detach()
        # All of them in memories of one kind, since a tensor is read by one source.
        local = _tensor(plain if all(gpus) else plain.cpu(), memories)
        if not isinstance(local, LazyTensor) or local.traits.meta or local.dtype is not dtype:
            raise Unsupported("a part of a sharded tensor is no plain tensor with data")
        chunks += [Chunk(part.box, chunk.storage, chunk.offset, chunk.strides) for chunk in local.chunks if part.box.count]
    if chunks and all(gpus):
        return LazyTensor("", dtype, shards.shape, tuple(chunks), memories.gpus, traits)
    return memories.resident.parts(dtype, shards.shape, tuple(chunks), traits)


def _composite(tensor: torch.Tensor, kind: str, memories: Memories, *, traits: Traits) -> Composite:
    def lazy(part: torch.Tensor) -> LazyTensor:
        made = _tensor(part, memories)
        if not isinstance(made, LazyTensor):
            raise Unsupported(f"a {kind} tensor of tensors that are not plain")
        return made

    def elements(part: Elements) -> LazyTensor:
        ints = torch.empty(0, dtype=view_dtype(part.dtype.bits // 8), device=part.storage.device)
        return replace(lazy(ints.set_(part.storage, part.offset, part.shape, part.strides)), dtype=part.dtype)

    shape, parts, attributes = KINDS[kind].take_apart(tensor)
    found = {name: elements(part) if isinstance(part, Elements) else lazy(part) for name, part in parts.items()}
    return Composite(kind, shape, found, attributes, traits)


def unkept(value: object) -> list[str]:
    """What a tensor is beyond its elements, and no format of ours is told of."""
    if not isinstance(value, torch.Tensor) or is_sharded(value) or (type(value) not in KEPT and kind_of(value) is not None):
        return []
    found = []
    if type(value) not in KEPT:
        found.append(f"the class {type(value).__qualname__}")
    found += [f"the attribute {name!r}" for name in vars(value) if name not in OWN]
    if value._backward_hooks:
        found.append("its hooks")
    return found


KEPT = frozenset({torch.Tensor, torch.nn.Parameter})
OWN = frozenset({"_is_buffer", "persistent"})
"""What `torch.nn.Buffer` sets."""


NOTHING = memoryview(b"")


def storage_memory(storage: torch.UntypedStorage) -> memoryview:
    """A writable view of a CPU storage's own memory; the caller keeps the storage alive."""
    address, nbytes = _place(storage)
    return memory_at(address, nbytes) if nbytes else NOTHING


def storage_bytes(storage: torch.UntypedStorage) -> bytes:
    """A copy of a CPU storage's bytes; for small ones this costs a fifth of the view."""
    address, nbytes = _place(storage)
    return ctypes.string_at(address, nbytes) if nbytes else b""


def _place(storage: torch.UntypedStorage) -> tuple[int, int]:
    nbytes = storage.nbytes()
    address = storage.data_ptr() if nbytes else 0
    if nbytes and not address:
        raise Unsupported("a tensor without memory of its own (a fake one?) has nothing to save")
    return address, nbytes


def memory_of(tensor: torch.Tensor) -> object:
    """What two tensors over the very same elements have in common, and no others; the tensor itself where that cannot be told."""
    own_way = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    odd = tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided
    if own_way or odd or tensor.is_meta or not tensor.numel():
        return id(tensor)
    place = tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return *place, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()
