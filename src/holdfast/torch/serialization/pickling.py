"""By the caller's own pickle module: any Python object into a torch file and out of one, its storages set apart.

The stream is CPython's own, opcode for opcode; what makes it torch's are the persistent ids. A storage becomes

    ('storage', storage class, key, location, number of elements)

and its bytes go elsewhere. Keys count from '0' in the order in which storages are first met; two Python objects over one C++
storage are one. The same Python objects are used for equal parts of those tuples wherever torch uses the same, because the pickler
remembers objects by identity and the bytes of the stream show it.

The way back, `unpickler`, is for `weights_only=False`. It runs what the file says.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import BinaryIO, Protocol, cast

import torch
from msgspec import Struct

from holdfast.core.dtype import DTYPES
from holdfast.core.leaves import CONTAINERS, KEYS, PLAIN
from holdfast.core.limits import Limits
from holdfast.core.table import Kind
from holdfast.errors import Refused
from holdfast.formats.pickle.table import ATTRIBUTES
from holdfast.formats.pickle.writer import PickleWriter
from holdfast.formats.torch.pickled import PickledRows
from holdfast.formats.torch.write import record_folder
from holdfast.formats.torch.writer import TorchPickle
from holdfast.formats.zip.writer import RecordFolder
from holdfast.plan.table import Tabulated
from holdfast.torch import versions
from holdfast.torch.serialization.locations import location_tag, stays_on_cpu, tags_cuda
from holdfast.torch.serialization.settings import DEFAULT_PROTOCOL
from holdfast.torch.tensors.storages import TYPES, tabulate_views

STORAGE = "storage"
CLASH = (
    "Cannot save multiple tensors or storages that view the same data as different types: one storage is seen as {0} and as {1}; "
    "clone one of the two tensors before saving"
)

OLDEST_DILL = (0, 3, 1)
"""Before, dill's pickler could not be subclassed with a persistent id."""


class StorageIds:
    """The storages of one object that is being pickled, in the order in which they were met."""

    def __init__(self) -> None:
        self.keys: dict[int, str] = {}
        """The number of each storage, by its identity. It is the same text at every use, as in torch: the stream shows it."""
        self.storages: list[torch.UntypedStorage] = []
        """By their numbers."""
        self.elements: list[int] = []
        """How many each has, of the dtype as which it was met first."""
        self.tensors: dict[int, torch.Tensor] = {}
        """A plain tensor over each storage on a GPU that one was met over, by the identity of the storage."""
        self._seen: dict[int, torch.dtype] = {}
        """By the address of the data: a storage may be seen as one dtype only."""

    def persistent_id(self, obj: object) -> object:
        """What stands for a storage; None for all other objects."""
        kind = type(obj)
        if kind in OTHERS:
            return None
        if issubclass(kind, torch.storage.TypedStorage):
            # By its private names: the public ones warn that the class is on its way out.
            storage, dtype, saved = obj._untyped_storage, obj.dtype, _storage_class(obj.dtype)  # type: ignore[attr-defined]
        elif issubclass(kind, torch.UntypedStorage):
            storage, dtype, saved = obj, torch.uint8, torch.UntypedStorage
        else:
            OTHERS.add(kind)
            return None
        pretended = getattr(obj, "_fake_device", None)
        place = location_tag(storage) if pretended is None else str(pretended)
        return self.id_of(storage, dtype, saved, place, 0 if storage.device.type == "meta" else storage.data_ptr())

    def id_of(
        self, storage: torch.UntypedStorage, dtype: torch.dtype, saved: type, location: str, address: int
    ) -> tuple[object, ...]:
        """What stands for a storage at an address that is seen as elements of a dtype, and saved as one of this class."""
        if address and self._seen.setdefault(address, dtype) is not dtype:
            raise Refused(CLASH.format(self._seen[address], dtype))
        identity, elements = storage._cdata, storage.nbytes() // dtype.itemsize
        key = self.keys.get(identity)
        if key is None:
            key = self.keys[identity] = str(len(self.storages))
            self.storages.append(storage)
            self.elements.append(elements)
        return STORAGE, saved, key, location, elements

    def tensor_over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor over a storage on a GPU: the first plain one that was met, or one of its bytes."""
        met = self.tensors.get(storage._cdata)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) if met is None else met


OTHERS: set[type] = set()
"""Types that are no storages, each asked once: this is asked about every object of a pickle."""


@cache
def _storage_class(dtype: torch.dtype) -> type:
    """The class that a file names for a storage of this dtype."""
    row = DTYPES.torch(str(dtype).removeprefix("torch."))
    if row is None or row.storage is None:
        raise KeyError(f"dtype {dtype} is not recognized")  # torch's words and type
    found: type = getattr(torch, row.storage)
    return found


def pickle_object(obj: object, ids: StorageIds, *, pickle_module: ModuleType, protocol: int) -> bytes:
    """The stream of `obj`. `ids.persistent_id` is asked about every object in it that is no part of a plain tensor."""
    buffer = io.BytesIO()
    pickler = pickle_module.Pickler(buffer, protocol=protocol)
    # On the object and not in a subclass: the C pickler then calls it without looking it up, once for every object.
    pickler.persistent_id = ids.persistent_id
    if pickle_module is not pickle or is_changed() or is_watched():
        pickler.dump(obj)
        return buffer.getvalue()
    pickler.dispatch_table = reducers(pickler, ids, protocol)
    try:
        pickler.dump(obj)
    finally:
        # They have each other: all tensors would stay until the collector comes.
        pickler.dispatch_table = {}
    return buffer.getvalue()


class NoHooks(Struct, eq=False, gc=False):
    """Pickled as an empty OrderedDict, where torch had backward hooks once. A real one takes long to say what it is."""


class Data(Struct, eq=False, gc=False):
    """Pickled as the tensor `parameter.data`, which takes longer to make."""

    parameter: torch.nn.Parameter


class Reducers(dict[type, Callable[..., object]]):
    """How objects of some classes are pickled; of all others, as Python knows it."""

    def __missing__(self, kind: type) -> Callable[..., object]:
        return copyreg.dispatch_table[kind]


def reducers(pickler: pickle.Pickler, ids: StorageIds, protocol: int) -> Reducers:
    """What `__reduce_ex__` of plain tensors answers, in a fifth of its time. Of all other tensors torch is asked.

    A pickler asks for the persistent id of every object, and a tensor is fifteen. Within a plain one only its storage has an id: it
    stands in `inside` for as long as the tensor's parts are pickled, the last of which is `NoHooks`. A look into a dict is a third
    of a call.
    """
    has_names, rebuild, strided = versions.has_names, torch._utils._rebuild_tensor_v2, torch.strided
    everywhere, id_of, tensors, plain_cpu = ids.persistent_id, ids.id_of, ids.tensors, stays_on_cpu(None, "cpu")
    here, no_hooks = object(), (OrderedDict, ())
    inside: dict[object, object] = {}

    def is_plain(tensor: torch.Tensor) -> bool:
        dtype = tensor.dtype
        return not (
            PLAIN_DTYPES[dtype] is None
            or tensor.layout is not strided
            or not (tensor.is_cpu or tensor.is_cuda)
            or tensor.__dict__
            or tensor.is_nested
            or tensor.is_neg()
            or (dtype.is_complex and tensor.is_conj())
            or (has_names is not None and has_names(tensor))
        )

    def reduce_plain(tensor: torch.Tensor, grad: bool) -> object:
        dtype, near, storage = tensor.dtype, tensor.is_cpu, tensor.untyped_storage()
        if not near:
            tensors.setdefault(storage._cdata, tensor)
        location = "cpu" if near and plain_cpu else location_tag(storage)
        inside[here] = id_of(storage, dtype, PLAIN_DTYPES[dtype], location, storage.data_ptr())  # type: ignore[arg-type]  # it is plain
        pickler.persistent_id = inside.get  # type: ignore[method-assign]
        return rebuild, (here, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), grad, NoHooks())

    def reduce(tensor: torch.Tensor) -> object:
        grad = tensor.requires_grad
        if (grad and tensor._backward_hooks) or not is_plain(tensor):
            return tensor.__reduce_ex__(protocol)
        return reduce_plain(tensor, grad)

    def reduce_parameter(parameter: torch.nn.Parameter) -> object:
        if parameter.__dict__:
            return parameter.__reduce_ex__(protocol)
        return torch._utils._rebuild_parameter, (Data(parameter), parameter.requires_grad, NoHooks())

    def reduce_data(data: Data) -> object:
        parameter = data.parameter
        return reduce_plain(parameter, False) if is_plain(parameter) else parameter.data.__reduce_ex__(protocol)

    def reduce_hooks(_: NoHooks) -> object:
        pickler.persistent_id = everywhere  # type: ignore[method-assign]
        return no_hooks

    return Reducers({torch.Tensor: reduce, torch.nn.Parameter: reduce_parameter, Data: reduce_data, NoHooks: reduce_hooks})


class _PlainDtypes(dict[torch.dtype, type | None]):
    """The class of the storages of each dtype; None where tensors are more than elements of a storage of a class of its own."""

    def __missing__(self, dtype: torch.dtype) -> type | None:
        row = DTYPES.torch(str(dtype).removeprefix("torch."))
        plain = row is not None and row.storage is not None and not row.packed and row.kind != "quantized"
        self[dtype] = found = _storage_class(dtype) if plain else None
        return found


PLAIN_DTYPES = _PlainDtypes()


def is_changed() -> bool:
    """Whether somebody else says how tensors are pickled."""
    changed = (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__) != REDUCED_BY
    return changed or not copyreg.dispatch_table.keys().isdisjoint(TYPES)


def is_watched() -> bool:
    """Whether somebody wants to be asked about everything that is done with tensors."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


FEW = 16
"""Fewer tensors are left to CPython's pickler, which writes the same bytes: three take it 160 µs, and the table 380."""

REDUCED_BY = torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__
"""How torch pickles its tensors. Whoever changed that is asked."""


def pickle_rows(obj: object) -> tuple[bytes, RecordFolder] | None:
    """What `pickle_object` gives with CPython's pickler and torch's protocol, and the storages; None where `obj` is not common.

    Nothing is raised: the pickler says what is wrong.
    """
    if type(obj) not in CONTAINERS or is_changed() or not _is_same_pickler():
        return None
    if not stays_on_cpu(None, "cpu"):
        return None
    tensors = leaves(obj, TYPES, LIMITS.depth)
    if tensors is None or len(tensors) < FEW:
        return None
    found = tabulate_views(tensors)
    if len(found.rows) < len(tensors):
        return None
    if any(kind.location != "cpu" for kind in found.kinds) and not tags_cuda():
        return None
    kinds, kind, offset = placed_kinds(found)
    rows = PickledRows(
        tensors, kinds, kind, found.storage, frozenset(TYPES), tensors.__getitem__, lambda value: value, offset=offset
    )
    pickled = TorchPickle(LIMITS, rows=rows, anew=True)
    pickled.write(obj)
    return None if pickled.problems else (pickled.finish(), record_folder(pickled, found.storages))


def placed_kinds(found: Tabulated) -> tuple[Sequence[Kind], Sequence[int], Sequence[int]]:
    """The kinds of tensors, a pickle's for each offset; the kind of each tensor; and the offset of each kind."""
    if not found.offsets:
        return found.kinds, found.kind, ()
    places = {(one, 0): one for one in range(len(found.kinds))}
    offsets = found.offsets
    each = [(one, offsets[at] if at in offsets else 0) for at, one in enumerate(found.kind)]  # noqa: SIM401  # a call each
    kind = [places.setdefault(place, len(places)) for place in each]
    return [found.kinds[one] for one, _ in places], kind, [offset for _, offset in places]


def leaves(tree: object, kinds: Collection[type], depth: int, *, beside: bool = True) -> list[object] | None:
    """The values of these types in a state, in the order in which a pickle meets them, each once; None where it is not common.

    A container that stands in two places is written once; so it is walked once. With `beside=False` it is not common to have such
    values in the attributes of a container.
    """
    walk = _Walk(kinds, depth, beside=beside)
    return list(walk.found.values()) if walk.through(tree, 1) else None


class _Walk:
    """One walk for `leaves`. An object, because a function that calls itself is a cycle, and would keep the tensors."""

    def __init__(self, kinds: Collection[type], depth: int, *, beside: bool) -> None:
        self._kinds = frozenset(kinds)
        self._beside = beside
        self._depth = depth
        self._walked: set[int] = set()
        self.found: dict[int, object] = {}

    def through(self, value: object, depth: int) -> bool:
        """Whether all is common from here on."""
        kind = type(value)
        if kind in PLAIN:
            return True
        if kind in self._kinds:
            self.found[id(value)] = value
            return True
        if kind not in CONTAINERS or depth > self._depth:
            return False
        if id(value) in self._walked:
            return True
        self._walked.add(id(value))
        inside: Iterable[object]
        if isinstance(value, dict):
            if not KEYS.issuperset(map(type, value)):
                return False
            inside = value.values()
        else:
            inside = value  # type: ignore[assignment]  # a list or a tuple
        types = set(map(type, inside))
        if types.issubset(self._kinds):
            self.found.update(zip(map(id, inside), inside, strict=True))
        elif not types.issubset(PLAIN):
            for item in inside:
                if not self.through(item, depth + 1):
                    return False
        if kind is OrderedDict and (state := vars(value)):
            # What a module says of its versions.
            inner = self if self._beside else _Walk((), self._depth, beside=False)
            return ATTRIBUTES not in state and inner.through(state, depth + 1)
        return True


LIMITS = Limits()


@cache
def _is_same_pickler() -> bool:
    """Whether this Python pickles containers as the writer does, which is tried: another batch of items is another stream."""
    counts = (0, 1, 2, 999, 1000, 1001, 2000)
    some = [{n: n for n in range(count)} for count in counts] + [list(range(count)) for count in counts]
    some += [OrderedDict((n, None) for n in range(count)) for count in counts]  # type: ignore[misc]  # dicts and lists
    tried: list[object] = [some, tuple(some), "text", "text", -1, 1 << 40, 0.5, True, ()]
    writer = PickleWriter()
    writer.write(tried)
    return writer.finish() == pickle.dumps(tried, DEFAULT_PROTOCOL)


def check_pickle_module(pickle_module: ModuleType) -> None:
    """Refuse a dill that is too old to be asked for persistent ids."""
    if getattr(pickle_module, "__name__", "") != "dill":
        return
    version = str(getattr(pickle_module, "__version__", ""))
    known = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if known < OLDEST_DILL:
        least = ".".join(map(str, OLDEST_DILL))
        raise ValueError(f"'torch' supports dill >= {least}, and this is dill {version}: upgrade it")


MOVED = {"torch.tensor": "torch._tensor"}
"""Modules that were renamed since files mention them."""


class StorageClass:
    """Stands for `torch.FloatStorage` and its like while a file is read: a dtype, and no class that warns."""

    def __init__(self, name: str) -> None:
        row = DTYPES.storage(name)
        if row is None or row.torch is None:
            raise KeyError(name)
        self.name = name
        self.dtype: torch.dtype = getattr(torch, row.torch)

    def __str__(self) -> str:
        return f"StorageType(dtype={self.dtype})"


class _Unpickler(Protocol):
    def load(self) -> object: ...


def unpickler(
    pickle_module: ModuleType, file: BinaryIO, persistent: Callable[[object], object], *, arguments: Mapping[str, object]
) -> _Unpickler:
    """An unpickler at the position of `file`, which gives persistent ids to `persistent`."""
    made = _unpickler_class(pickle_module)(file, **arguments)
    made.ids = persistent
    return made


@cache
def _unpickler_class(pickle_module: ModuleType) -> Callable[..., _UnpicklerWithIds]:
    stock = pickle_module.Unpickler

    def find_class(self: object, module: str, name: str) -> object:
        if type(name) is str and "Storage" in name:
            try:
                return StorageClass(name)
            except KeyError:
                pass
        return stock.find_class(self, MOVED.get(module, module), name)

    def persistent_load(self: _UnpicklerWithIds, pid: object) -> object:
        return self.ids(pid)

    made = type("TorchUnpickler", (stock,), {"find_class": find_class, "persistent_load": persistent_load})
    return cast("Callable[..., _UnpicklerWithIds]", made)


class _UnpicklerWithIds(Protocol):
    ids: Callable[[object], object]

    def load(self) -> object: ...
