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


class PickledObject(Struct, eq=False):
    title: ClassVar = "object"
    """The name of torch's class."""

    filled: bool = False

    # By identity, also to the limits on keys (`pickle.spending`): a key is never hashed by numbers of the file.
    __hash__ = object.__hash__

    def fill(self, state: object) -> None:
        """Take the state of a BUILD opcode. Raises `PickleError` for a state of another form."""
        raise PickleError(
            f"a {self.title} with a state, which it does not have", found=brief(state)
        )

    def fields(self, state: object) -> dict[object, object]:
        if type(state) is not dict:
            raise PickleError(f"the state of a {self.title} is no dict", found=brief(state))
        return state

    def wrong(self, name: str, found: object) -> PickleError:
        return PickleError(
            f"the field {name!r} of a {self.title} is missing or of another type",
            found=brief(found),
        )


class StoredBytes(PickledObject, eq=False):
    """`BytesStorageMetadata`: a value that is no tensor."""

    title: ClassVar = "BytesStorageMetadata"

    def fill(self, state: object) -> None:
        self.fields(state)


class StoredBox(PickledObject, eq=False):
    """`ChunkStorageMetadata`: the part of a tensor that one item holds."""

    title: ClassVar = "ChunkStorageMetadata"

    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    def fill(self, state: object) -> None:
        fields = self.fields(state)
        self.offsets = _ints(fields.get("offsets"), "offsets")
        self.sizes = _ints(fields.get("sizes"), "sizes")


class Properties(PickledObject, eq=False):
    """`TensorProperties`: (dtype, layout, requires_grad, memory format, pin_memory), and since torch 2.15 the strides or None."""

    title: ClassVar = "TensorProperties"

    dtype: DType | None = None
    layout: str = "strided"
    requires_grad: bool = False
    memory_format: str = MEMORY_FORMATS[0]
    pin_memory: bool = False
    strides: tuple[int, ...] | None = None

    def fill(self, state: object) -> None:
        if type(state) is not tuple or not 5 <= len(state) <= 6:
            raise PickleError(
                "the state of a TensorProperties is no tuple of 5 or 6", found=brief(state)
            )
        dtype, layout, grad, memory, pinned = state[:5]
        if not isinstance(dtype, DType):
            raise self.wrong("dtype", dtype)
        if not isinstance(layout, Global) or layout.module != "torch":
            raise self.wrong("layout", layout)
        if type(grad) is not bool or type(pinned) is not bool:
            raise self.wrong("requires_grad", grad)
        if memory not in MEMORY_FORMATS:
            raise self.wrong("memory_format", memory)
        self.dtype, self.layout, self.requires_grad, self.pin_memory = (
            dtype,
            layout.name,
            grad,
            pinned,
        )
        self.memory_format = str(memory)
        if len(state) == 6 and state[5] is not None:
            self.strides = _ints(state[5], "strides")


class StoredTensor(PickledObject, eq=False):
    """`TensorStorageMetadata`: a tensor and the boxes that it is stored as."""

    title: ClassVar = "TensorStorageMetadata"

    properties: Properties = field(default_factory=Properties)
    size: tuple[int, ...] = ()
    boxes: list[object] = field(default_factory=list)
    """Not checked: every element should be a `StoredBox`."""

    def fill(self, state: object) -> None:
        fields = self.fields(state)
        properties, boxes = fields.get("properties"), fields.get("chunks")
        if not isinstance(properties, Properties) or properties.dtype is None:
            raise self.wrong("properties", properties)
        if type(boxes) is not list:
            raise self.wrong("chunks", boxes)
        self.properties, self.boxes = properties, boxes
        self.size = _ints(fields.get("size"), "size")


class ItemIndex(PickledObject, eq=False):
    """`MetadataIndex`: the key of an item: a name and, for a tensor, the lowest corner of its box."""

    title: ClassVar = "MetadataIndex"

    name: str = ""
    index: int | None = None
    offset: tuple[int, ...] | None = None

    def fill(self, state: object) -> None:
        fields = self.fields(state)
        name, offset, index = fields.get("fqn"), fields.get("offset"), fields.get("index")
        if type(name) is not str:
            raise self.wrong("fqn", name)
        if index is not None and type(index) is not int:
            raise self.wrong("index", index)
        self.name, self.index = name, index
        self.offset = None if offset is None else _ints(offset, "offset")


class Item(PickledObject, eq=False):
    """`_StorageInfo`: the place of an item, and the transforms that it was written through."""

    title: ClassVar = "_StorageInfo"

    file: str = ""
    offset: int = 0
    length: int = 0
    transforms: tuple[str, ...] = ()

    def fill(self, state: object) -> None:
        fields = self.fields(state)
        file, offset, length = (
            fields.get("relative_path"),
            fields.get("offset"),
            fields.get("length"),
        )
        transforms = fields.get("transform_descriptors")
        if type(file) is not str:
            raise self.wrong("relative_path", file)
        if type(offset) is not int or type(length) is not int:
            raise self.wrong("offset", offset)
        if transforms is not None:
            if not isinstance(transforms, list | tuple) or len(transforms) > TRANSFORMS:
                raise self.wrong("transform_descriptors", transforms)
            if not all(type(name) is str for name in transforms):
                raise self.wrong("transform_descriptors", transforms)
            self.transforms = tuple(transforms)
        self.file, self.offset, self.length = file, offset, length

    @property
    def stop(self) -> int:
        return self.offset + self.length


class StorageNote(PickledObject, eq=False):
    """`StorageMeta`: the writer's notes on the save, of any type. Only text is shown."""

    title: ClassVar = "StorageMeta"

    checkpoint_id: object = None
    save_id: object = None
    load_id: object = None
    modules: object = None

    def fill(self, state: object) -> None:
        fields = self.fields(state)
        self.checkpoint_id, self.save_id = fields.get("checkpoint_id"), fields.get("save_id")
        self.load_id, self.modules = fields.get("load_id"), fields.get("modules")


class Metadata(PickledObject, eq=False):
    """`Metadata`: the root of the pickle."""

    title: ClassVar = "Metadata"
    KNOWN: ClassVar = frozenset(
        {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
    )

    tensors: dict[object, object] = field(default_factory=dict)
    """`state_dict_metadata`: the entry of each name."""
    planner: object = None
    """`planner_data`: the path of each name, if the usual planner wrote it."""
    items: dict[object, object] = field(default_factory=dict)
    """`storage_data`: `ItemIndex` to `Item`."""
    note: StorageNote | None = None
    version: object = None
    state: dict[object, object] = field(default_factory=dict)

    def fill(self, state: object) -> None:
        fields = self.fields(state)
        tensors, items, note = (
            fields.get("state_dict_metadata"),
            fields.get("storage_data"),
            fields.get("storage_meta"),
        )
        if not isinstance(tensors, dict):
            raise self.wrong("state_dict_metadata", tensors)
        if items is not None and not isinstance(items, dict):
            raise self.wrong("storage_data", items)
        if note is not None and not isinstance(note, StorageNote):
            raise self.wrong("storage_meta", note)
        self.tensors, self.items, self.note = tensors, items or {}, note
        self.planner, self.version = fields.get("planner_data"), fields.get("version")
        self.state = fields

    @property
    def more(self) -> list[str]:
        """Fields that other programs put beside those of torch (Megatron's `mcore_data`)."""
        return [key for key in self.state if isinstance(key, str) and key not in self.KNOWN]


def _ints(value: object, what: str) -> tuple[int, ...]:
    if type(value) is Size:
        return value
    if isinstance(value, tuple | list) and len(value) > RANK:
        raise MetadataError(
            f"the {what} of a tensor with {len(value):,} dimensions", found=len(value)
        )
    return checked_ints(value, what)


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
        if obj.filled:
            raise PickleError(f"a BUILD of a {obj.title} that has its state already")
        obj.fill(state)
        obj.filled = True
        return obj
