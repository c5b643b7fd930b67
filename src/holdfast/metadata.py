"""The description of a sharded checkpoint: its tensors, the boxes in which each is stored, and where.

    Metadata
      state_dict_metadata   name → TensorStorageMetadata (properties, size, chunks), or
                            BytesStorageMetadata for any other value
      planner_data          name → tree path in the nested state
      storage_data          MetadataIndex (name, offset of a chunk) → StorageInfo (file, offset, length)
      storage_meta          StorageMeta: who saved it, and when loading and saving it was requested
      version

The classes have the names, fields, argument order and defaults of torch 2.15
(`torch.distributed.checkpoint.metadata`), so that you can use them in the same way. `holdfast.torch`
converts both ways without loss. Nothing in this module needs torch:

- A dtype is a `DType` of Holdfast, or a `Global` that names a dtype of torch that Holdfast lacks.
- Layouts and memory formats are members of `Layout` and `MemoryFormat`, with the names of torch.
- A size is a tuple that equals `torch.Size` and any other tuple of the same integers. Every sequence
  of integers that you pass becomes one.

`find_chunk` finds a chunk by its offset: first at the hint of the index, then in a dictionary that is
made once for a list of chunks (`ChunkLookup`). torch searches the list from its start each time.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, SupportsIndex

import numpy as np

from holdfast.core.box import Box
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.opaque import Global, Size
from holdfast.core.tensor import LazyTensor
from holdfast.errors import Unsupported

__all__ = [
    "BytesStorageMetadata",
    "ChunkLookup",
    "ChunkStorageMetadata",
    "Layout",
    "MemoryFormat",
    "Metadata",
    "MetadataIndex",
    "StorageInfo",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "find_chunk",
]


def _make_size(lengths: Iterable[SupportsIndex]) -> Size:
    """Return integers as a tuple. Raises `TypeError` for other values, as `torch.Size` does."""
    if type(lengths) is Size:
        return lengths
    return Size(int(operator.index(length)) for length in lengths)


@dataclass(slots=True)
class ChunkStorageMetadata:
    """One box of a tensor that is stored as a unit."""

    offsets: Sequence[int]
    """The first index of the box in each dimension of the tensor."""
    sizes: Sequence[int]
    """The length of the box in each dimension."""

    def __post_init__(self) -> None:
        self.offsets = _make_size(self.offsets)
        self.sizes = _make_size(self.sizes)

    @property
    def box(self) -> Box:
        """The chunk as a `Box`. Raises `ValueError` if an offset or a size is negative."""
        return Box.from_offsets(self.offsets, self.sizes)

    @classmethod
    def from_box(cls, box: Box) -> ChunkStorageMetadata:
        """Return the chunk of a box."""
        return cls(Size(box.start), Size(box.shape))


class Layout(Enum):
    """The layouts of torch, which describe how the elements of a tensor are stored."""

    STRIDED = "strided"
    SPARSE_COO = "sparse_coo"
    SPARSE_CSR = "sparse_csr"
    SPARSE_CSC = "sparse_csc"
    SPARSE_BSR = "sparse_bsr"
    SPARSE_BSC = "sparse_bsc"
    JAGGED = "jagged"
    MKLDNN = "_mkldnn"

    def __str__(self) -> str:
        return self.value


class MemoryFormat(Enum):
    """The order of a tensor's elements in memory.

    The numbers are those that torch 2.13 pickles (`_MEM_FORMAT_ENCODING`).
    """

    CONTIGUOUS = 0
    CHANNELS_LAST = 1
    PRESERVE = 2
    CHANNELS_LAST_3D = 3
    """torch has no number for this format and cannot pickle `TensorProperties` with it."""

    def __str__(self) -> str:
        return _MEMORY_FORMAT_NAMES[self]

    @classmethod
    def from_name(cls, name: str) -> MemoryFormat:
        """Return the format with this name in torch.

        >>> MemoryFormat.from_name("channels_last").value
        1
        """
        for memory_format, torch_name in _MEMORY_FORMAT_NAMES.items():
            if torch_name == name:
                return memory_format
        raise Unsupported(f"there is no memory format called {name!r}", found=name)


_MEMORY_FORMAT_NAMES = {
    MemoryFormat.CONTIGUOUS: "contiguous_format",
    MemoryFormat.CHANNELS_LAST: "channels_last",
    MemoryFormat.PRESERVE: "preserve_format",
    MemoryFormat.CHANNELS_LAST_3D: "channels_last_3d",
}

_FLOAT32 = next(dtype for dtype in DTYPES.rows if dtype.name == "float32")

_PropertiesState = tuple[DType | Global, Layout, bool, MemoryFormat, bool, tuple[int, ...] | None]
"""What a pickle has of `TensorProperties`: the values of its fields."""


@dataclass
class TensorProperties:
    """What describes a tensor besides its size.

    It is pickled as a tuple of its fields, with the memory format as an enum, as in torch.
    """

    dtype: DType | Global = _FLOAT32
    """The dtype. The default of torch is its default dtype at that moment."""
    layout: Layout = Layout.STRIDED
    requires_grad: bool = False
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    pin_memory: bool = False
    strides: tuple[int, ...] | None = None
    """The strides in memory when the tensor was saved, in elements. torch records them since 2.15."""

    def __getstate__(self) -> _PropertiesState:
        """Return what is pickled. Raises the error of torch for an invalid memory format."""
        if not isinstance(self.memory_format, MemoryFormat):
            raise RuntimeError(f"Invalid memory format: {self.memory_format}")
        return (
            self.dtype,
            self.layout,
            self.requires_grad,
            self.memory_format,
            self.pin_memory,
            self.strides,
        )

    def __setstate__(self, state: tuple[object, ...]) -> None:
        """Set the fields from a pickle. It checks as much as torch does."""
        # Before torch 2.15 there were no strides.
        if not isinstance(state, tuple) or len(state) not in (5, 6):
            raise ValueError(
                "the state of TensorProperties must be a tuple of 5 values, or of 6 with strides"
            )
        names = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory", "strides")
        fields = {"strides": None, **dict(zip(names, state, strict=False))}

        # The enum may be the one of torch, which has the same numbers.
        encoding = fields["memory_format"]
        numbers = [memory_format.value for memory_format in MemoryFormat]
        if not isinstance(encoding, Enum) or encoding.value not in numbers:
            raise RuntimeError(f"Invalid memory format encoding: {encoding}")
        fields["memory_format"] = MemoryFormat(encoding.value)
        self.__dict__.update(fields)

    @staticmethod
    def create_from_tensor(tensor: TensorLike) -> TensorProperties:
        """Return the properties of a lazy tensor, an array, or a tensor of torch.

        The memory format is contiguous whatever the strides are: a chunk is written in C order, and
        torch returns the same.
        """
        if isinstance(tensor, LazyTensor):
            return TensorProperties(
                tensor.dtype,
                requires_grad=tensor.traits.requires_grad,
                strides=tensor.traits.strides,
            )

        layout_name = str(getattr(tensor, "layout", Layout.STRIDED)).removeprefix("torch.")
        if layout_name not in [layout.value for layout in Layout]:
            raise Unsupported(f"there is no layout called {layout_name!r}", found=layout_name)
        properties = TensorProperties(_find_dtype(tensor.dtype), Layout(layout_name))
        properties.requires_grad = bool(getattr(tensor, "requires_grad", False))

        # An array of numpy has neither of these methods.
        is_pinned = getattr(tensor, "is_pinned", None)
        if callable(is_pinned):
            properties.pin_memory = bool(is_pinned())
        stride = getattr(tensor, "stride", None)
        # A tensor in a compressed layout has no strides, and its method raises an error.
        if properties.layout in (Layout.STRIDED, Layout.SPARSE_COO) and callable(stride):
            properties.strides = tuple(stride())
        return properties


class TensorLike(Protocol):
    """Anything with a dtype. The other attributes of a tensor of torch are optional."""

    @property
    def dtype(self) -> object: ...


def _find_dtype(dtype: object) -> DType | Global:
    """Return the dtype of Holdfast for one of Holdfast, numpy or torch.

    A dtype of torch that Holdfast lacks is returned as a `Global`. torch is not imported.
    """
    if isinstance(dtype, DType | Global):
        return dtype
    if type(dtype).__module__ == "torch":
        name = str(dtype).removeprefix("torch.")
        return DTYPES.torch(name) or Global("torch", name)
    if isinstance(dtype, np.dtype):
        holdfast_dtype = DTYPES.numpy(dtype)
        if holdfast_dtype is not None:
            return holdfast_dtype
    raise Unsupported(f"no tensor has elements of type {dtype}", found=dtype)


class ChunkLike(Protocol):
    """A chunk of this module or of torch."""

    @property
    def offsets(self) -> Sequence[int]: ...
    @property
    def sizes(self) -> Sequence[int]: ...


class IndexLike(Protocol):
    """A `MetadataIndex` of this module or of torch."""

    @property
    def offset(self) -> Sequence[int] | None: ...
    @property
    def index(self) -> int | None: ...


class ChunkLookup:
    """Finds chunks in a list by their offsets.

    It makes a dictionary for the first search whose hint is wrong. It makes another one if the list
    is replaced, grows or shrinks, and before a search fails. So a list whose items were replaced
    never leads to a wrong result.

    A chunk without elements may have the same offset as another chunk. Then the other one is found.
    """

    __slots__ = ("_chunk_count", "_chunks", "_positions")

    def __init__(self) -> None:
        self._chunks: Sequence[ChunkLike] | None = None
        self._chunk_count = -1
        self._positions: dict[tuple[int, ...], int] = {}

    def find(self, chunks: Sequence[ChunkLike], index: IndexLike) -> int | None:
        """Return the position of the chunk that an index means, or None if there is none.

        This is the chunk at the hint of the index, if it has the right offset and any elements.
        Otherwise it is the first chunk with this offset.

        Args:
            chunks: All chunks of a tensor. A later call may pass the same list with other items.
            index: The offset of the chunk, and perhaps a hint.
        """
        if index.offset is None:
            return None
        offset = tuple(index.offset)
        hint = index.index
        if hint is not None and 0 <= hint < len(chunks):
            chunk = chunks[hint]
            if tuple(chunk.offsets) == offset and 0 not in chunk.sizes:
                return hint

        # The dictionary may be outdated, so its answer is checked. If it has none, it is made anew.
        is_current = self._chunks is chunks and self._chunk_count == len(chunks)
        position = self._positions.get(offset) if is_current else None
        if position is not None and tuple(chunks[position].offsets) == offset:
            return position
        self._index_chunks(chunks)
        return self._positions.get(offset)

    def _index_chunks(self, chunks: Sequence[ChunkLike]) -> None:
        """Make the dictionary of positions by offset. The first chunk at an offset counts."""
        self._chunks = chunks
        self._chunk_count = len(chunks)
        self._positions = {}
        for position, chunk in enumerate(chunks):
            offset = tuple(chunk.offsets)
            first_position = self._positions.setdefault(offset, position)
            # A chunk with elements takes the place of one without.
            if 0 in chunks[first_position].sizes and 0 not in chunk.sizes:
                self._positions[offset] = position


@dataclass
class TensorStorageMetadata:
    """A tensor and the boxes in which it is stored."""

    properties: TensorProperties
    size: Sequence[int]
    chunks: list[ChunkStorageMetadata]

    def __post_init__(self) -> None:
        self.size = _make_size(self.size)
        self._lookup = ChunkLookup()

    def __getstate__(self) -> dict[str, object]:
        """Return what is pickled: the fields without the dictionary of chunks."""
        return {"properties": self.properties, "size": self.size, "chunks": self.chunks}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _lookup=ChunkLookup())


@dataclass
class BytesStorageMetadata:
    """Marks a value that is not a tensor. Its type is only known when its bytes are read."""


@dataclass
class StorageMeta:
    """Identifies a checkpoint, the save that wrote it, and the load that reads it."""

    checkpoint_id: str | os.PathLike[str] | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, init=False)
class MetadataIndex:
    """Identifies a stored item: a value by its name, a chunk of a tensor by name and offset."""

    fqn: str
    """The dotted name of the tensor or the value."""
    offset: Sequence[int] | None = None
    """The first index of the chunk in each dimension. None for a value that is not a tensor."""
    index: int | None = field(hash=False, compare=False, default=None)
    """A hint: the probable position in the list of chunks. It does not matter for equality."""

    def __init__(
        self, fqn: str, offset: Iterable[SupportsIndex] | None = None, index: int | None = None
    ) -> None:
        # The class is frozen, so its attributes are set in this way.
        object.__setattr__(self, "fqn", fqn)
        object.__setattr__(self, "offset", None if offset is None else _make_size(offset))
        object.__setattr__(self, "index", index)


@dataclass(frozen=True, slots=True)
class StorageInfo:
    """Where the bytes of a stored item are. torch calls this class `_StorageInfo`."""

    relative_path: str
    """The key of the file in its store."""
    offset: int
    """The first byte in the file."""
    length: int
    """The number of bytes in the file."""
    transform_descriptors: Sequence[str] | None = None
    """How the bytes were transformed when they were written (`stream.zstd/1`), in this order."""


@dataclass
class Metadata:
    """The description of a whole checkpoint."""

    state_dict_metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata]
    """The tensors and other values by their dotted names."""
    planner_data: Mapping[str, tuple[str | int, ...]] | None = None
    """The tree path of each name. Planners that are not torch's may store other data here."""
    storage_data: Mapping[MetadataIndex, StorageInfo] | None = None
    """Where each chunk and value is. Writers that are not torch's may store other data here."""
    storage_meta: StorageMeta | None = None
    version: str | None = None
    """The version of the format: 1.0.0 since July 2025, None in older checkpoints."""


def find_chunk(tensor: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    """Return the chunk of a tensor that has the offset of an index.

    >>> chunks = [ChunkStorageMetadata((0,), (3,)), ChunkStorageMetadata((3,), (1,))]
    >>> tensor = TensorStorageMetadata(TensorProperties(), (4,), chunks)
    >>> find_chunk(tensor, MetadataIndex("w", (3,))).sizes
    Size([1])

    Raises:
        ValueError: No chunk has this offset.
    """
    position = tensor._lookup.find(tensor.chunks, index)
    if position is None:
        offset = "no offset" if index.offset is None else f"offset {tuple(index.offset)}"
        raise ValueError(
            f"{index.fqn!r} has {len(tensor.chunks):,} chunks, and none is at {offset}"
        )
    return tensor.chunks[position]


def __dir__() -> list[str]:
    return sorted(__all__)
