"""What a `.metadata` pickle is made of, as small records: made empty by NEWOBJ and filled once by BUILD.

torch pickles its dataclasses with their `__dict__` as state; `TensorProperties` alone has a tuple. A record takes the fields that
it knows and checks their types. What they mean together (do chunks tile their tensor, is there an item for each) is for `index`.

They are filled in place, and neither frozen nor compared: a checkpoint of 100,000 chunks has 300,000 of them, and one that is
a dict key must not be hashed by numbers out of the file. Filling one takes a fixed time: a pickle can name one long list in a
million of them, so lists are looked into when it is known that each element has bytes of its own.

`MetadataTable` maps the globals of the pickle to them. The names moved twice: before November 2022 the package was
`torch.distributed._shard.checkpoint`, and until January 2024 (torch 2.2) the properties of a tensor were those of a
`ShardedTensor`. Exact names; everything else stays an `Opaque` that nothing calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from holdfast.core.dtype import DTYPES, DType
from holdfast.core.opaque import Global, Size
from holdfast.errors import MetadataError, PickleError
from holdfast.formats.pickle.plain import PlainTable
from holdfast.formats.pickle.table import Args, Name, ReducerTable, Row
from holdfast.formats.torch.reducers import layout_name, lengths_of
from holdfast.formats.torch.tensors import MAX_ELEMENTS, brief, checked_ints

MEMORY_FORMATS = ("contiguous_format", "channels_last", "preserve_format")
"""By the number that `_MEM_FORMAT_ENCODING` gives them. torch 2.13 writes 0 whatever the tensor was."""


RANK = 64
"""Dimensions that torch and numpy allow."""

TRANSFORMS = 8
"""Steps that an item may have passed through. torch has one."""


class PickledObject:
    __slots__ = ("filled",)

    title = "object"
    """What torch calls it, for messages."""

    def __init__(self) -> None:
        self.filled = False

    def fill(self, state: object) -> None:
        """Take the state that BUILD brings. Raises `PickleError` for one of another form."""
        raise PickleError(f"a {self.title} with a state, which it does not have", found=brief(state))

    def fields(self, state: object) -> dict[object, object]:
        """The state as names and values."""
        if type(state) is not dict:
            raise PickleError(f"the state of a {self.title} is no dict", found=brief(state))
        return state

    def wrong(self, name: str, found: object) -> PickleError:
        """The error for a field that cannot be what it is."""
        return PickleError(f"the field {name!r} of a {self.title} is missing or of another type", found=brief(found))


class StoredBytes(PickledObject):
    """`BytesStorageMetadata`: a value that is no tensor."""

    __slots__ = ()
    title = "BytesStorageMetadata"

    def fill(self, state: object) -> None:
        self.fields(state)


class StoredBox(PickledObject):
    """`ChunkStorageMetadata`: the part of a tensor that one item holds."""

    __slots__ = ("offsets", "sizes")
    title = "ChunkStorageMetadata"

    def __init__(self) -> None:
        self.filled = False
        self.offsets: tuple[int, ...] = ()
        self.sizes: tuple[int, ...] = ()

    def fill(self, state: object) -> None:
        fields = self.fields(state)
        self.offsets = _ints(fields.get("offsets"), "offsets")
        self.sizes = _ints(fields.get("sizes"), "sizes")


class Properties(PickledObject):
    """`TensorProperties`: (dtype, layout, requires_grad, memory format, pin_memory), and since torch 2.15 the strides or None."""

    __slots__ = ("dtype", "layout", "memory_format", "pin_memory", "requires_grad", "strides")
    title = "TensorProperties"

    def __init__(self) -> None:
        self.filled = False
        self.dtype: DType | None = None
        self.layout = "strided"
        self.requires_grad = False
        self.memory_format = MEMORY_FORMATS[0]
        self.pin_memory = False
        self.strides: tuple[int, ...] | None = None

    def fill(self, state: object) -> None:
        if type(state) is not tuple or not 5 <= len(state) <= 6:
            raise PickleError("the state of a TensorProperties is no tuple of 5 or 6", found=brief(state))
        dtype, layout, grad, memory, pinned = state[:5]
        if not isinstance(dtype, DType):
            raise self.wrong("dtype", dtype)
        if not isinstance(layout, Global) or layout.module != "torch":
            raise self.wrong("layout", layout)
        if type(grad) is not bool or type(pinned) is not bool:
            raise self.wrong("requires_grad", grad)
        if memory not in MEMORY_FORMATS:
            raise self.wrong("memory_format", memory)
        self.dtype, self.layout, self.requires_grad, self.pin_memory = dtype, layout.name, grad, pinned
        self.memory_format = str(memory)
        if len(state) == 6 and state[5] is not None:
            self.strides = _ints(state[5], "strides")


class StoredTensor(PickledObject):
    """`TensorStorageMetadata`: a tensor and the boxes that it is stored as."""

    __slots__ = ("boxes", "properties", "size")
    title = "TensorStorageMetadata"

    def __init__(self) -> None:
        self.filled = False
        self.properties = Properties()
        self.size: tuple[int, ...] = ()
        self.boxes: list[object] = []
        """Each a `StoredBox`, which is for whoever looks into the list."""

    def fill(self, state: object) -> None:
        fields = self.fields(state)
        properties, boxes = fields.get("properties"), fields.get("chunks")
        if not isinstance(properties, Properties) or properties.dtype is None:
            raise self.wrong("properties", properties)
        if type(boxes) is not list:
            raise self.wrong("chunks", boxes)
        self.properties, self.boxes = properties, boxes
        self.size = _ints(fields.get("size"), "size")


class ItemIndex(PickledObject):
    """`MetadataIndex`: which item this is: a name and, for a tensor, the lowest corner of its box."""

    __slots__ = ("index", "name", "offset")
    title = "MetadataIndex"

    def __init__(self) -> None:
        self.filled = False
        self.name = ""
        self.offset: tuple[int, ...] | None = None
        self.index: int | None = None

    def fill(self, state: object) -> None:
        fields = self.fields(state)
        name, offset, index = fields.get("fqn"), fields.get("offset"), fields.get("index")
        if type(name) is not str:
            raise self.wrong("fqn", name)
        if index is not None and type(index) is not int:
            raise self.wrong("index", index)
        self.name, self.index = name, index
        self.offset = None if offset is None else _ints(offset, "offset")

    @classmethod
    def of(cls, name: str, index: int | None, offset: tuple[int, ...] | None) -> ItemIndex:
        """One with its state, which was checked."""
        made = cls.__new__(cls)
        made.filled, made.name, made.index, made.offset = True, name, index, offset
        return made


class Item(PickledObject):
    """`_StorageInfo`: where an item lies, and how it was transformed on its way there."""

    __slots__ = ("file", "length", "offset", "transforms")
    title = "_StorageInfo"

    def __init__(self) -> None:
        self.filled = False
        self.file = ""
        self.offset = self.length = 0
        self.transforms: tuple[str, ...] = ()

    def fill(self, state: object) -> None:
        fields = self.fields(state)
        file, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
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

    @classmethod
    def of(cls, file: str, offset: int, length: int) -> Item:
        made = cls.__new__(cls)
        made.filled, made.file, made.offset, made.length, made.transforms = True, file, offset, length, ()
        return made

    @property
    def stop(self) -> int:
        return self.offset + self.length


class StorageNote(PickledObject):
    """`StorageMeta`: what the writer noted about the save. Any of it may be anything; only text is shown."""

    __slots__ = ("checkpoint_id", "load_id", "modules", "save_id")
    title = "StorageMeta"

    def __init__(self) -> None:
        self.filled = False
        self.checkpoint_id: object = None
        self.save_id: object = None
        self.load_id: object = None
        self.modules: object = None

    def fill(self, state: object) -> None:
        fields = self.fields(state)
        self.checkpoint_id, self.save_id = fields.get("checkpoint_id"), fields.get("save_id")
        self.load_id, self.modules = fields.get("load_id"), fields.get("modules")


class Metadata(PickledObject):
    """`Metadata`: the root of the pickle."""

    __slots__ = ("items", "note", "planner", "state", "tensors", "version")
    title = "Metadata"

    KNOWN = frozenset({"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"})

    def __init__(self) -> None:
        self.filled = False
        self.tensors: dict[object, object] = {}
        """`state_dict_metadata`: what there is under each name."""
        self.planner: object = None
        """`planner_data`: the path of each name, in what the usual planner writes."""
        self.items: dict[object, object] = {}
        """`storage_data`: `ItemIndex` to `Item`."""
        self.note: StorageNote | None = None
        self.version: object = None
        self.state: dict[object, object] = {}

    def fill(self, state: object) -> None:
        fields = self.fields(state)
        tensors, items, note = fields.get("state_dict_metadata"), fields.get("storage_data"), fields.get("storage_meta")
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
    """A `torch.Size`, whose row has checked it, or any other short sequence of lengths."""
    if type(value) is Size:
        return value
    if isinstance(value, tuple | list) and len(value) > RANK:
        raise MetadataError(f"the {what} of a tensor with {len(value):,} dimensions", found=len(value))
    return checked_ints(value, what)


PACKAGES = ("torch.distributed.checkpoint", "torch.distributed._shard.checkpoint")
SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"

KINDS: tuple[type[PickledObject], ...] = (Metadata, ItemIndex, StorageNote, StoredTensor, StoredBox, StoredBytes, Properties)
"""Those that live in the module `metadata` of the package, under their titles."""


def empty(kind: type[PickledObject]) -> Row:
    """The row that makes a record without arguments, and keeps a call with arguments as it is."""
    return lambda table, args: NotImplemented if args else kind()


def size_of(args: Args) -> Size:
    """A `torch.Size`. There are three to a chunk, so what writers write is looked at here, and the rest where all sizes are."""
    if len(args) == 1 and isinstance(args[0], tuple | list):
        lengths = args[0]
        if len(lengths) > RANK:
            raise MetadataError(f"a size of {len(lengths):,} dimensions", expected=RANK, found=len(lengths))
        for n in lengths:
            if type(n) is not int or not 0 <= n < MAX_ELEMENTS:
                break
        else:
            return Size(lengths)
    return Size(lengths_of(args))


def size(table: ReducerTable, args: Args) -> object:
    return size_of(args)


def layout(table: ReducerTable, args: Args) -> object:
    """The name of a layout, in torch's module."""
    return Global("torch", layout_name(args))


def memory_format(table: ReducerTable, args: Args) -> object:
    """A number of the enum, as the name that it stands for."""
    match args:
        case (int(number),) if type(number) is int and 0 <= number < len(MEMORY_FORMATS):
            return MEMORY_FORMATS[number]
    raise PickleError("a memory format that torch does not number", found=brief(args))


def _news() -> dict[Name, Row]:
    rows: dict[Name, Row] = {}
    for package in PACKAGES:
        rows |= {(f"{package}.metadata", kind.title): empty(kind) for kind in KINDS}
        rows[f"{package}.filesystem", Item.title] = empty(Item)
    rows[SHARDED_TENSOR, Properties.title] = empty(Properties)
    return rows


NEWS = _news()

MEMORY: dict[Name, Row] = {
    **{(f"{package}.metadata", "_MEM_FORMAT_ENCODING"): memory_format for package in PACKAGES},
    (SHARDED_TENSOR, "MEM_FORMAT_ENCODING"): memory_format,
}


class MetadataTable(PlainTable):
    """Plain Python, and what a distributed checkpoint's index is made of."""

    values: ClassVar[Mapping[Name, object]] = {
        **PlainTable.values,
        **{("torch", row.torch): row for row in DTYPES.rows if row.torch},
    }
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
