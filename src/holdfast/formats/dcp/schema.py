"""The records of a `.metadata` pickle: NEWOBJ makes an empty record, and BUILD fills it once.

torch pickles its dataclasses with their `__dict__` as state; `TensorProperties` alone has a tuple. A record takes the known fields
and checks their types. `index` checks what they mean together.

Records are compared by identity, so that a dict key is not hashed by numbers of the file. Filling one takes a fixed time: a pickle
can refer to one long list in a million records, so lists are read only when each element is known to have bytes of its own.

`MetadataTable` maps the globals of the pickle to records. The names moved twice: before November 2022 the package was
`torch.distributed._shard.checkpoint`, and until January 2024 (torch 2.2) the properties of a tensor were those of a
`ShardedTensor`. Every other global stays an `Opaque`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from msgspec import Struct, field

from holdfast.core.dtype import DTYPES, DType
from holdfast.core.opaque import Global, Size
from holdfast.errors import MetadataError, PickleError
from holdfast.formats.pickle.plain import PlainTable
from holdfast.formats.pickle.table import Args, Name, ReducerTable, Row
from holdfast.formats.torch.reducers import layout_name, lengths_of
from holdfast.formats.torch.tensors import MAX_ELEMENTS, brief, checked_ints

MEMORY_FORMATS = ("contiguous_format", "channels_last", "preserve_format")
"""By the number in `_MEM_FORMAT_ENCODING`. torch 2.13 always writes 0."""

RANK = 64
"""The most dimensions in torch and numpy."""

TRANSFORMS = 8
"""The most transforms of an item. torch has one."""


LENGTHS = frozenset({Size})
"""The type of sizes and offsets. Their lengths were checked when the `Size` was made."""

DICT = frozenset({dict})
OPTIONAL = frozenset({type(None)})
ANYTHING = None

Fields = Mapping[str, tuple[str, frozenset[type] | None]]


class PickledObject(Struct, eq=False):
    """An object of a class of torch, filled from its state."""

    title: ClassVar[str] = "object"
    """The name of torch's class."""
    fields: ClassVar[Fields] = {}
    """From a key of the state to our name of the field and its types."""
    keeps_state: ClassVar[bool] = False
    """Whether `state` becomes the state itself, in which other programs may have fields of their own."""

    filled: bool = False

    # By identity, also to the limits on keys (`pickle.table`): a key is never hashed by numbers of the file.
    __hash__ = object.__hash__

    def fill(self, state: object) -> None:
        """Take the state of a BUILD opcode. None in place of an optional field leaves the default.

        Raises `PickleError` for a state of another form, and for a second state.
        """
        if self.filled:
            raise PickleError(f"a BUILD of a {self.title} that has its state already")
        if type(state) is not dict:
            raise PickleError(f"the state of a {self.title} is no dict", found=brief(state))
        for key, (name, types) in self.fields.items():
            value = state.get(key)
            if types is not None and type(value) not in types:
                value = self.convert(key, value, types)
            if value is not None:
                setattr(self, name, value)
        if self.keeps_state:
            setattr(self, "state", state)  # noqa: B010  # a field of one subclass
        self.filled = True

    def convert(self, key: str, value: object, types: frozenset[type]) -> object:
        """Convert a value of another type. Raises `PickleError` if a writer never has such a one there."""
        if types >= LENGTHS and isinstance(value, tuple | list):
            if len(value) > RANK:
                message = f"the {key} of a tensor with {len(value):,} dimensions"
                raise MetadataError(message, found=len(value))
            return checked_ints(value, key)
        if types >= DICT and isinstance(value, dict):
            return value
        raise self.wrong(key, value)

    def wrong(self, key: str, value: object) -> PickleError:
        message = f"the field {key!r} of a {self.title} is missing or of another type"
        return PickleError(message, found=brief(value))


class StoredBytes(PickledObject, eq=False):
    """`BytesStorageMetadata`: a value that is no tensor."""

    title: ClassVar[str] = "BytesStorageMetadata"


class StoredBox(PickledObject, eq=False):
    """`ChunkStorageMetadata`: the part of a tensor that one item holds."""

    title: ClassVar[str] = "ChunkStorageMetadata"
    fields: ClassVar[Fields] = {"offsets": ("offsets", LENGTHS), "sizes": ("sizes", LENGTHS)}

    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


class Properties(PickledObject, eq=False):
    """`TensorProperties`, whose state is a tuple. torch 2.15 added the strides, which may be None."""

    title: ClassVar[str] = "TensorProperties"
    fields: ClassVar[Fields] = {
        "dtype": ("dtype", frozenset({DType})),
        "layout": ("layout", frozenset({Global})),
        "requires_grad": ("requires_grad", frozenset({bool})),
        "memory_format": ("memory_format", frozenset({str})),
        "pin_memory": ("pin_memory", frozenset({bool})),
        "strides": ("strides", LENGTHS | OPTIONAL),
    }

    dtype: DType | None = None
    layout: Global = Global("torch", "strided")
    requires_grad: bool = False
    memory_format: str = MEMORY_FORMATS[0]
    pin_memory: bool = False
    strides: tuple[int, ...] | None = None

    def fill(self, state: object) -> None:
        if type(state) is not tuple or not 5 <= len(state) <= 6:
            message = "the state of a TensorProperties is no tuple of 5 or 6"
            raise PickleError(message, found=brief(state))
        super().fill(dict(zip(self.fields, state, strict=False)))
        if self.layout.module != "torch":
            raise self.wrong("layout", self.layout)
        if self.memory_format not in MEMORY_FORMATS:
            raise self.wrong("memory_format", self.memory_format)


class StoredTensor(PickledObject, eq=False):
    """`TensorStorageMetadata`: a tensor and the boxes that it is stored as."""

    title: ClassVar[str] = "TensorStorageMetadata"
    fields: ClassVar[Fields] = {
        "properties": ("properties", frozenset({Properties})),
        "size": ("size", LENGTHS),
        "chunks": ("boxes", frozenset({list})),
    }

    properties: Properties = field(default_factory=Properties)
    size: tuple[int, ...] = ()
    boxes: list[object] = field(default_factory=list)
    """Not checked: every element should be a `StoredBox`."""
    checked: object = None
    """What `index` has found out about this record. Many names may have one record."""


class ItemIndex(PickledObject, eq=False):
    """`MetadataIndex`: the key of an item: a name and, for a tensor, the lowest corner of its box."""

    title: ClassVar[str] = "MetadataIndex"
    fields: ClassVar[Fields] = {
        "fqn": ("name", frozenset({str})),
        "offset": ("offset", LENGTHS | OPTIONAL),
        "index": ("index", OPTIONAL | {int}),
    }

    name: str = ""
    index: int | None = None
    offset: tuple[int, ...] | None = None


class Item(PickledObject, eq=False):
    """`_StorageInfo`: the place of an item, and the transforms that it was written through."""

    title: ClassVar[str] = "_StorageInfo"
    fields: ClassVar[Fields] = {
        "relative_path": ("file", frozenset({str})),
        "offset": ("offset", frozenset({int})),
        "length": ("length", frozenset({int})),
        "transform_descriptors": ("transforms", OPTIONAL),
    }

    file: str = ""
    offset: int = 0
    length: int = 0
    transforms: tuple[str, ...] = ()

    def convert(self, key: str, value: object, types: frozenset[type]) -> object:
        if (
            key != "transform_descriptors"
            or not isinstance(value, list | tuple)
            or len(value) > TRANSFORMS
            or not all(type(name) is str for name in value)
        ):
            raise self.wrong(key, value)
        return tuple(value)

    @property
    def stop(self) -> int:
        return self.offset + self.length


class StorageNote(PickledObject, eq=False):
    """`StorageMeta`: the writer's notes on the save, of any type. Only text is shown."""

    title: ClassVar[str] = "StorageMeta"
    fields: ClassVar[Fields] = {
        "checkpoint_id": ("checkpoint_id", ANYTHING),
        "save_id": ("save_id", ANYTHING),
        "load_id": ("load_id", ANYTHING),
        "modules": ("modules", ANYTHING),
    }

    checkpoint_id: object = None
    save_id: object = None
    load_id: object = None
    modules: object = None


class Metadata(PickledObject, eq=False):
    """`Metadata`: the root of the pickle."""

    title: ClassVar[str] = "Metadata"
    keeps_state: ClassVar[bool] = True
    fields: ClassVar[Fields] = {
        "state_dict_metadata": ("tensors", DICT),
        "planner_data": ("planner", ANYTHING),
        "storage_data": ("items", DICT | OPTIONAL),
        "storage_meta": ("note", OPTIONAL | {StorageNote}),
        "version": ("version", ANYTHING),
    }

    tensors: dict[object, object] = field(default_factory=dict)
    """`state_dict_metadata`: the entry of each name."""
    planner: object = None
    """`planner_data`: the path of each name, if the usual planner wrote it."""
    items: dict[object, object] = field(default_factory=dict)
    """`storage_data`: `ItemIndex` to `Item`."""
    note: StorageNote | None = None
    version: object = None
    state: object = None
    """All fields. Other programs put some beside those of torch (Megatron's `mcore_data`)."""


PACKAGES = ("torch.distributed.checkpoint", "torch.distributed._shard.checkpoint")
SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"

KINDS: tuple[type[PickledObject], ...] = (
    Metadata,
    ItemIndex,
    StorageNote,
    StoredTensor,
    StoredBox,
    StoredBytes,
    Properties,
)
"""The records of the module `metadata` of the package, under their titles."""


def empty(kind: type[PickledObject]) -> Row:
    return lambda table, args: NotImplemented if args else kind()


def size(table: ReducerTable, args: Args) -> object:
    """A `torch.Size`. Every chunk has three, so that the usual form is checked here, and other forms by `lengths_of`."""
    if len(args) == 1 and isinstance(args[0], tuple | list):
        lengths = args[0]
        if len(lengths) > RANK:
            raise MetadataError(
                f"a size of {len(lengths):,} dimensions", expected=RANK, found=len(lengths)
            )
        for n in lengths:
            if type(n) is not int or not 0 <= n < MAX_ELEMENTS:
                break
        else:
            return Size(lengths)
    return Size(lengths_of(args))


def layout(table: ReducerTable, args: Args) -> object:
    return Global("torch", layout_name(args))


def memory_format(table: ReducerTable, args: Args) -> object:
    match args:
        case (int(number),) if type(number) is int and 0 <= number < len(MEMORY_FORMATS):
            return MEMORY_FORMATS[number]
    raise PickleError("a memory format that torch does not number", found=brief(args))


NEWS: dict[Name, Row] = {
    **{(f"{package}.metadata", kind.title): empty(kind) for package in PACKAGES for kind in KINDS},
    **{(f"{package}.filesystem", Item.title): empty(Item) for package in PACKAGES},
    (SHARDED_TENSOR, Properties.title): empty(Properties),
}

MEMORY: dict[Name, Row] = {
    **{(f"{package}.metadata", "_MEM_FORMAT_ENCODING"): memory_format for package in PACKAGES},
    (SHARDED_TENSOR, "MEM_FORMAT_ENCODING"): memory_format,
}


TORCH_DTYPES = {("torch", row.torch): row for row in DTYPES.rows if row.torch}


class MetadataTable(PlainTable):
    """Plain Python, and what a distributed checkpoint's index is made of."""

    values: ClassVar[Mapping[Name, object]] = {**PlainTable.values, **TORCH_DTYPES}
    calls: ClassVar[Mapping[Name, Row]] = {
        **PlainTable.calls,
        ("torch", "Size"): size,
        ("torch.serialization", "_get_layout"): layout,
        **MEMORY,
    }
    news: ClassVar[Mapping[Name, Row]] = {**PlainTable.news, **NEWS}

    def build(self, obj: object, state: object) -> object:
        if not isinstance(obj, PickledObject):
            return super().build(obj, state)
        obj.fill(state)
        return obj
