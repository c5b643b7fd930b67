"""torch tensors as lazy tensors over the memory that they have, for saving; and that memory as Python's, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch.nn.parameter import is_lazy

from holdfast.core.chunk import Chunk
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.opaque import Device, Size
from holdfast.core.runtime import memory_at
from holdfast.core.tensor import PLAIN_TRAITS, Composite, LazyTensor, Traits
from holdfast.core.tree import Path, join_path
from holdfast.core.value import replace
from holdfast.engine.arrays import MemoryTensors
from holdfast.errors import Unsupported
from holdfast.torch.cuda.memory import GpuSource
from holdfast.torch.ranks.shards import is_sharded, shards_of
from holdfast.torch.tensors.composites import KINDS, Elements, kind_of
from holdfast.torch.tensors.from_lazy import view_dtype
from holdfast.torch.tensors.storages import TYPES, has_memory

Memories = tuple[MemoryTensors, Callable[[], GpuSource]]
"""The memory of a state that is being saved: that of this process, and that of GPUs, made at the first tensor on one."""


def torch_leaf(resident: MemoryTensors) -> Callable[[object, Path], object]:
    """A function that turns torch's tensors, sizes, dtypes and devices into ours, and gives everything else back."""
    memories = resident, cache(GpuSource)

    def convert(value: object, path: Path) -> object:
        match value:
            case _ if is_sharded(value):
                return _sharded(cast(torch.Tensor, value), memories, name=join_path(path))
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


def _traits(tensor: torch.Tensor) -> Traits:
    # A view, or a computed tensor, counts as well: torch.save gives back a leaf that wants a gradient.
    grad, parameter = (
        bool(getattr(tensor, "requires_grad", False)),
        isinstance(tensor, torch.nn.Parameter),
    )
    return Traits(requires_grad=grad, parameter=parameter) if grad or parameter else PLAIN_TRAITS


def _tensor(tensor: torch.Tensor, memories: Memories) -> LazyTensor | Composite:
    resident, gpus = memories
    traits = _traits(tensor)
    if is_lazy(tensor):
        raise Unsupported(
            "a parameter that is not initialised yet has no shape and no data; run the module once, or leave it out"
        )
    kind = kind_of(tensor)
    if kind is not None:
        return _composite(tensor.detach(), kind, memories, traits=traits)
    if tensor.layout is not torch.strided:
        raise Unsupported(
            f"a tensor with layout {str(tensor.layout).removeprefix('torch.')} cannot be saved"
        )
    plain = tensor
    if type(plain) not in TYPES and hasattr(plain, "__tensor_flatten__"):
        raise Unsupported(
            f"a {type(tensor).__name__} is no plain tensor; take its parts apart or make it dense first"
        )
    if plain.is_meta:
        return resident.make_meta(
            _dtype(plain.dtype), tuple(plain.shape), replace(traits, meta=True)
        )
    if not has_memory(plain):
        raise Unsupported(
            "a tensor without memory of its own, such as a ZeroTensor or one inside of torch.func, "
            "has no bytes to save; save clone() of a ZeroTensor, and any other outside of torch.func"
        )
    if plain.is_conj() or plain.is_neg():
        traits = replace(traits, conj=plain.is_conj(), neg=plain.is_neg())
    location = "cpu"
    if plain.is_cuda:
        return gpus().tensor(plain.detach(), _dtype(plain.dtype), traits)
    if not plain.is_cpu:
        location = str(plain.device)
        plain = plain.detach().cpu()
    storage = plain.untyped_storage()
    # The storage's own memory; `owner` holds it as long as anything points at it.
    place = resident.add_storage(
        storage.data_ptr(), storage_memory(storage), owner=storage, location=location
    )
    width = plain.element_size()
    strides = tuple(s * width for s in plain.stride())
    return resident.make_strided(
        place,
        _dtype(plain.dtype),
        tuple(plain.shape),
        strides,
        int(plain.storage_offset()) * width,
        traits,
    )


def _sharded(tensor: torch.Tensor, memories: Memories, *, name: str) -> LazyTensor:
    """The whole tensor, with a chunk for each part that this rank has."""
    shards = shards_of(tensor, name)
    traits, dtype = _traits(tensor), _dtype(shards.dtype)
    chunks: list[Chunk] = []
    on_gpus = all(part.tensor.is_cuda for part in shards.parts)
    for part in shards.parts:
        plain = part.tensor.detach()
        # All of them in memories of one kind, since a tensor is read by one source.
        local = _tensor(plain if on_gpus else plain.cpu(), memories)
        if not isinstance(local, LazyTensor) or local.traits.meta or local.dtype is not dtype:
            raise Unsupported("a part of a sharded tensor is no plain tensor with data")
        chunks += [
            Chunk(part.box, chunk.storage, chunk.offset, chunk.strides)
            for chunk in local.chunks
            if part.box.count
        ]
    resident, gpus = memories
    if chunks and on_gpus:
        return LazyTensor("", dtype, shards.shape, tuple(chunks), gpus(), traits)
    return resident.make_chunked(dtype, shards.shape, tuple(chunks), traits)


def _composite(tensor: torch.Tensor, kind: str, memories: Memories, *, traits: Traits) -> Composite:
    def lazy(part: torch.Tensor) -> LazyTensor:
        made = _tensor(part, memories)
        if not isinstance(made, LazyTensor):
            raise Unsupported(f"a {kind} tensor of tensors that are not plain")
        return made

    def elements(part: Elements) -> LazyTensor:
        ints = torch.empty(0, dtype=view_dtype(part.dtype.bits // 8), device=part.storage.device)
        return replace(
            lazy(ints.set_(part.storage, part.offset, part.shape, part.strides)), dtype=part.dtype
        )

    shape, parts, attributes = KINDS[kind].take_apart(tensor)
    found = {
        name: elements(part) if isinstance(part, Elements) else lazy(part)
        for name, part in parts.items()
    }
    return Composite(kind, shape, found, attributes, traits)


def unkept(value: object) -> list[str]:
    """What a tensor has beyond its elements that no format of ours stores."""
    if (
        not isinstance(value, torch.Tensor)
        or is_sharded(value)
        or (type(value) not in TYPES and kind_of(value) is not None)
    ):
        return []
    found = []
    if type(value) not in TYPES:
        found.append(f"the class {type(value).__qualname__}")
    found += [f"the attribute {name!r}" for name in vars(value) if name not in OWN]
    if value._backward_hooks:
        found.append("its hooks")
    return found


OWN = frozenset({"_is_buffer", "persistent"})
"""What `torch.nn.Buffer` sets."""


def storage_memory(storage: torch.UntypedStorage) -> memoryview:
    """A writable view of a CPU storage's own memory; the caller keeps the storage alive."""
    nbytes = storage.nbytes()
    if not nbytes:
        return memoryview(b"")
    address = storage.data_ptr()
    if not address:
        raise Unsupported("a tensor without memory of its own (a fake one?) has nothing to save")
    return memory_at(address, nbytes)


def memory_of(tensor: torch.Tensor) -> object:
    """A key that tensors over the very same elements share, and no others; the identity of the tensor where that is not known."""
    own_way = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    odd = tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided
    if own_way or odd or tensor.is_meta or not tensor.numel():
        return id(tensor)
    place = tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return (
        *place,
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
