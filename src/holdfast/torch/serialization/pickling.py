"""Pickling by the caller's own pickle module: any Python object into a torch file and out of one, without its storages.

The stream is CPython's own, opcode for opcode; what makes it torch's are the persistent ids. A storage becomes

    ('storage', storage class, key, location, number of elements)

and its bytes go elsewhere. Keys count from '0' in the order in which storages are first met; two Python objects over one C++
storage are one. Equal parts of those tuples are the same Python objects wherever they are in torch, because the pickler
remembers objects by identity and the bytes of the stream show it.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from msgspec import Struct, field

from holdfast.core.dtype import DTYPES
from holdfast.errors import Refused
from holdfast.torch import versions
from holdfast.torch.serialization.locations import CPU, PACKAGES, location_tag
from holdfast.torch.tensors.storages import ATTRIBUTES, TYPES

STORAGE = "storage"
CLASH = (
    "Cannot save multiple tensors or storages that view the same data as different types: one storage is seen as {0} and as {1}; "
    "clone one of the two tensors before saving"
)

CPYTHON_PICKLER = pickle.Pickler
"""The class itself: programs put another one into `pickle` for a while."""

OLDEST_DILL = (0, 3, 1)
"""Older versions cannot be subclassed with a persistent id."""


class StorageIds(Struct, eq=False):
    """The storages of one object that is being pickled, in the order in which they were met."""

    keys: dict[int, str] = field(default_factory=dict)
    """The number of each storage, by its identity. The same text object at every use, as in torch: the stream shows it."""
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    """By the identity of a storage on a GPU: a plain tensor over it."""
    dtypes: list[torch.dtype] = field(default_factory=list)
    """The dtype with which each storage was met first: no other is allowed."""
    addresses: array[int] = field(default_factory=lambda: array("Q"))
    """The address of each storage; 0 where it has none."""

    def persistent_id(self, obj: object) -> object:
        """The persistent id of a storage; None for all other objects."""
        kind = type(obj)
        if kind in OTHERS:
            return None
        if issubclass(kind, torch.storage.TypedStorage):
            # By its private names: the public ones warn that the class is deprecated.
            storage, dtype, saved = obj._untyped_storage, obj.dtype, _storage_class(obj.dtype)  # type: ignore[attr-defined]
        elif issubclass(kind, torch.UntypedStorage):
            storage, dtype, saved = obj, torch.uint8, torch.UntypedStorage
        else:
            OTHERS.add(kind)
            return None
        pretended = getattr(obj, "_fake_device", None)
        place = location_tag(storage) if pretended is None else str(pretended)
        return self.id_of(
            storage, dtype, saved, place, 0 if storage.device.type == "meta" else storage.data_ptr()
        )

    def id_of(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        saved: type,
        location: str,
        address: int,
    ) -> tuple[object, ...]:
        """The persistent id of a storage at an address, with the dtype of its elements and the class that a file names."""
        identity, elements = storage._cdata, storage.nbytes() // dtype.itemsize
        key = self.keys.get(identity)
        if key is None:
            key = self.keys[identity] = str(len(self.storages))
            self.storages.append(storage)
            self.dtypes.append(dtype)
            self.addresses.append(address)
        elif address and self.dtypes[int(key)] is not dtype:
            raise Refused(CLASH.format(self.dtypes[int(key)], dtype))
        return STORAGE, saved, key, location, elements

    def check_dtypes(self) -> None:
        """Raise `Refused` if two storages are the same memory with two dtypes."""
        seen: dict[int, torch.dtype] = {}
        for address, dtype in zip(self.addresses, self.dtypes, strict=True):
            if address and seen.setdefault(address, dtype) is not dtype:
                raise Refused(CLASH.format(seen[address], dtype))

    def tensor_over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor over a storage on a GPU: the first plain one that was met, or one of its bytes."""
        met = self.tensors.get(storage._cdata)
        return (
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            if met is None
            else met
        )


OTHERS: set[type] = set()
"""Types that are no storages. `persistent_id` is called for every object of a pickle."""


@cache
def _storage_class(dtype: torch.dtype) -> type:
    row = DTYPES.torch(str(dtype).removeprefix("torch."))
    if row is None or row.storage is None:
        raise KeyError(f"dtype {dtype} is not recognized")  # torch's words and type
    found: type = getattr(torch, row.storage)
    return found


def pickle_object(
    obj: object, ids: StorageIds, *, pickle_module: ModuleType, protocol: int
) -> bytes:
    """The stream of `obj`. `ids.persistent_id` is called for every object in it that is no part of a plain tensor."""
    pieces: list[bytes] = []
    is_stock = pickle_module.Pickler is CPYTHON_PICKLER
    pickler: Any
    # CPython's pickler gives all of it at once, and that is not copied. Other modules may want more of a file.
    file = SimpleNamespace(write=pieces.append) if is_stock else io.BytesIO()
    if is_stock:
        pickler = CPYTHON_PICKLER(file, protocol=protocol)
        # On the object and not in a subclass: the C pickler then calls it without looking it up, once for every object.
        pickler.persistent_id = ids.persistent_id
    else:
        pickler = _torch_pickler(pickle_module.Pickler)(file, protocol=protocol)
        pickler.ids = ids
    try:
        reduced_by = torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__
        # Our reducers are right only if no other code than torch's defines how tensors are pickled,
        # or sees all operations on tensors.
        if (
            is_stock
            and reduced_by == REDUCED_BY
            and not copyreg.dispatch_table.keys() & TYPES
            and not torch._C._len_torch_function_stack()
            and not torch._C._len_torch_dispatch_stack()
        ):
            pickler.dispatch_table = reducers(pickler, ids, protocol)
        pickler.dump(obj)
    finally:
        # A cycle, which would hold all tensors until the collector runs.
        if is_stock:
            pickler.dispatch_table = {}
    if len({*ids.addresses}) < len(ids.addresses):
        ids.check_dtypes()
    return file.getvalue() if isinstance(file, io.BytesIO) else b"".join(pieces)


class NoHooks(Struct, eq=False, gc=False):
    """Pickled as an empty OrderedDict, where torch once had backward hooks. A real one takes longer."""


class ParameterData(Struct, eq=False):
    """Pickled as the tensor `parameter.data`, which takes longer to make."""

    parameter: torch.nn.Parameter


def reducers(
    pickler: pickle.Pickler, ids: StorageIds, protocol: int
) -> dict[type, Callable[..., object]]:
    """Reducers that give for plain tensors what `__reduce_ex__` gives, in a fifth of its time. Other tensors are left to torch.

    A pickler calls for the persistent id of every object, and a tensor is fifteen. Within a plain one only its storage has an id:
    it
    is in `inside` while the tensor's parts are pickled, the last of which is `NoHooks`. A lookup in a dict takes a third of a call.
    """
    has_names, rebuild, strided = versions.has_names, torch._utils._rebuild_tensor_v2, torch.strided
    everywhere, id_of, tensors = ids.persistent_id, ids.id_of, ids.tensors
    plain_cpu = PACKAGES.ordered()[0] is CPU
    """Whether nobody registered another tag for storages on the CPU."""
    here, no_hooks, attributes = object(), (OrderedDict, ()), ATTRIBUTES
    inside: dict[object, object] = {}

    def reduce(tensor: torch.Tensor, data: bool = False) -> object:
        """Reduce a tensor; with `data`, `parameter.data`, which wants no gradient and has no hooks."""
        dtype, on_cpu, grad = tensor.dtype, tensor.is_cpu, not data and tensor.requires_grad
        saved = PLAIN_DTYPES[dtype]
        if (
            saved is None
            or tensor.layout is not strided
            or not (on_cpu or tensor.is_cuda)
            or attributes(tensor)
            or tensor.is_nested
            or tensor.is_neg()
            or tensor._is_zerotensor()
            or (grad and tensor._backward_hooks)
            or (dtype.is_complex and tensor.is_conj())
            or (has_names is not None and has_names(tensor))
        ):
            pickler.persistent_id = everywhere  # type: ignore[method-assign]
            return (tensor.data if data else tensor).__reduce_ex__(protocol)
        storage = tensor.untyped_storage()
        if not on_cpu:
            tensors.setdefault(storage._cdata, tensor)
        location = "cpu" if on_cpu and plain_cpu else location_tag(storage)
        inside[here] = id_of(storage, dtype, saved, location, storage.data_ptr())
        pickler.persistent_id = inside.get  # type: ignore[method-assign]
        return rebuild, (
            here,
            tensor.storage_offset(),
            (*tensor.shape,),
            tensor.stride(),
            grad,
            NoHooks(),
        )

    def reduce_parameter(parameter: torch.nn.Parameter) -> object:
        if attributes(parameter):
            return parameter.__reduce_ex__(protocol)
        pickler.persistent_id = inside.get  # type: ignore[method-assign]
        return torch._utils._rebuild_parameter, (
            ParameterData(parameter),
            parameter.requires_grad,
            NoHooks(),
        )

    def reduce_data(data: ParameterData) -> object:
        return reduce(data.parameter, data=True)

    def reduce_hooks(_: NoHooks) -> object:
        pickler.persistent_id = everywhere  # type: ignore[method-assign]
        return no_hooks

    return {
        **copyreg.dispatch_table,
        torch.Tensor: reduce,
        torch.nn.Parameter: reduce_parameter,
        ParameterData: reduce_data,
        NoHooks: reduce_hooks,
    }


class _PlainDtypes(dict[torch.dtype, type | None]):
    """By dtype: the class of its storages; None where a tensor is more than elements of a storage with a class of its own."""

    def __missing__(self, dtype: torch.dtype) -> type | None:
        row = DTYPES.torch(str(dtype).removeprefix("torch."))
        plain = (
            row is not None
            and row.storage is not None
            and not row.packed
            and row.kind != "quantized"
        )
        self[dtype] = found = _storage_class(dtype) if plain else None
        return found


PLAIN_DTYPES = _PlainDtypes()


REDUCED_BY = torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__


def check_pickle_module(pickle_module: ModuleType) -> None:
    if getattr(pickle_module, "__name__", "") != "dill":
        return
    version = str(getattr(pickle_module, "__version__", ""))
    known = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if known < OLDEST_DILL:
        least = ".".join(map(str, OLDEST_DILL))
        raise ValueError(
            f"'torch' supports dill >= {least}, and this is dill {version}: upgrade it"
        )


MOVED = {"torch.tensor": "torch._tensor"}
"""Modules that were renamed after files were written."""


class StorageClass:
    """Stands for `torch.FloatStorage` and the like while a file is read: a dtype, and no class that warns."""

    def __init__(self, name: str) -> None:
        row = DTYPES.storage(name)
        if row is None or row.torch is None:
            raise KeyError(name)
        self.name = name
        self.row = row
        self.dtype: torch.dtype = getattr(torch, row.torch)

    def __str__(self) -> str:
        return f"StorageType(dtype={self.dtype})"


def unpickle(
    pickle_module: ModuleType,
    content: bytes,
    persistent: Callable[[object], object],
    *,
    arguments: Mapping[str, object],
) -> object:
    """Load a pickle, and run what it says. Persistent ids are given to `persistent`."""
    unpickler = _torch_unpickler(pickle_module.Unpickler)(io.BytesIO(content), **arguments)
    # An attribute of the object, as in torch: up to Python 3.12 a `persistent_load` of the module's
    # own class comes before it, and lazy unpicklers such as mergekit's rely on that.
    unpickler.persistent_load = persistent
    return unpickler.load()


def _torch_unpickler(unpickler_class: type[Any]) -> type[Any]:
    """Derive a class that also finds what torch renamed.

    It is not kept: programs put another `Unpickler` into `pickle` for the time of one load.
    """

    class TorchUnpickler(unpickler_class):  # type: ignore[misc]  # the caller's class
        def find_class(self, module: str, name: str) -> object:
            if type(name) is str and "Storage" in name:
                try:
                    return StorageClass(name)
                except KeyError:
                    pass
            return super().find_class(MOVED.get(module, module), name)

    return TorchUnpickler


def _torch_pickler(pickler_class: type[Any]) -> type[Any]:
    """Derive a class with torch's persistent ids, which come before those of the caller's class."""

    class TorchPickler(pickler_class):  # type: ignore[misc]  # the caller's class
        ids: StorageIds
        """Of the object: a class stays until the collector runs, and would hold all storages."""

        def persistent_id(self, obj: object) -> object:
            return self.ids.persistent_id(obj)

    return TorchPickler
