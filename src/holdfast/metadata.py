"""The description of a sharded checkpoint: which tensors there are, in which boxes each is stored, and where each box lies.

    Metadata
      state_dict_metadata   name → TensorStorageMetadata (properties, size, chunks), or BytesStorageMetadata for any other value
      planner_data          name → path of keys and positions in the nested state
      storage_data          MetadataIndex (name, offset of a chunk) → StorageInfo (file, first byte, length)
      storage_meta          StorageMeta: who saved it, under which name
      version

The classes have the names, fields, argument order and defaults of torch 2.15 (`torch.distributed.checkpoint.metadata`), so that
code and people who know those know these; `holdfast.torch` converts both ways without loss. Nothing here needs torch:

- An element type is a row of `DTYPES`, or a `Global` that names a dtype of torch which has no row.
- A layout and a memory format are members of `Layout` and `MemoryFormat`, with torch's names.
- A size is a tuple that equals `torch.Size` and any other tuple of the same numbers. Whatever sequence of integers is given
  becomes one.

`find_chunk` finds a chunk by its offset: first where the index's hint points, then in a dictionary that is made once for a list of
chunks (`Places`). torch searches the list from its beginning each time.
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
    "BytesStorageMetadata", "ChunkStorageMetadata", "Layout", "MemoryFormat", "Metadata", "MetadataIndex", "Places",
    "StorageInfo", "StorageMeta", "TensorProperties", "TensorStorageMetadata", "find_chunk",
]  # fmt: skip


def _size(numbers: Iterable[SupportsIndex]) -> Size:
    """A tuple of integers; TypeError for anything else, as `torch.Size` says it."""
    return numbers if type(numbers) is Size else Size(map(int, map(operator.index, numbers)))


@dataclass(slots=True)
class ChunkStorageMetadata:
    """One box of a tensor that is stored as a unit."""

    offsets: Sequence[int]
    """Where in the tensor it begins."""
    sizes: Sequence[int]
    """How long it is in each dimension."""

    def __post_init__(self) -> None:
        self.offsets, self.sizes = _size(self.offsets), _size(self.sizes)

    @property
    def box(self) -> Box:
        """The chunk as a `Box`; ValueError where the numbers make none."""
        return Box.from_offsets(self.offsets, self.sizes)

    @classmethod
    def of(cls, box: Box) -> ChunkStorageMetadata:
        """Make the chunk of a box."""
        return cls(Size(box.start), Size(box.shape))


class Layout(Enum):
    """How the elements of a tensor are kept: torch's layouts, by their names."""

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
    """The order of a tensor's elements in memory, by the numbers that torch 2.13 pickles (`_MEM_FORMAT_ENCODING`)."""

    CONTIGUOUS = 0
    CHANNELS_LAST = 1
    PRESERVE = 2
    CHANNELS_LAST_3D = 3
    """torch has this format and no number for it: its `TensorProperties` cannot be pickled with it."""

    def __str__(self) -> str:
        return _MEMORY_FORMATS[self]

    @classmethod
    def named(cls, name: str) -> MemoryFormat:
        """The format that torch calls by this name.

        >>> MemoryFormat.named("channels_last").value
        1
        """
        for known, text in _MEMORY_FORMATS.items():
            if text == name:
                return known
        raise Unsupported(f"there is no memory format called {name!r}", found=name)


_MEMORY_FORMATS = {
    MemoryFormat.CONTIGUOUS: "contiguous_format",
    MemoryFormat.CHANNELS_LAST: "channels_last",
    MemoryFormat.PRESERVE: "preserve_format",
    MemoryFormat.CHANNELS_LAST_3D: "channels_last_3d",
}

_FLOAT32 = next(row for row in DTYPES.rows if row.name == "float32")

State = tuple[DType | Global, Layout, bool, MemoryFormat, bool, tuple[int, ...] | None]


@dataclass
class TensorProperties:
    """What a tensor is, beyond its size. Pickled as a tuple of its fields, the memory format as an enum, as in torch."""

    dtype: DType | Global = _FLOAT32
    """A row of the table, or the name of a dtype of torch that has none. torch's default is its default dtype at that moment."""
    layout: Layout = Layout.STRIDED
    requires_grad: bool = False
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    pin_memory: bool = False
    strides: tuple[int, ...] | None = None
    """How the tensor lay in memory when it was saved, in elements, where that was noted: since torch 2.15, and used by nobody."""

    def __getstate__(self) -> State:
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
        # Before torch 2.15 there were no strides.
        if not isinstance(state, tuple) or len(state) not in (5, 6):
            raise ValueError(
                "the state of TensorProperties is a tuple of 5 values, or of 6 with strides"
            )
        dtype, layout, requires_grad, encoding, pin_memory = state[:5]
        strides = state[5] if len(state) == 6 else None
        # Another enum of the same numbers is torch's own.
        known = isinstance(encoding, Enum) and encoding.value in [
            each.value for each in MemoryFormat
        ]
        if not isinstance(encoding, Enum) or not known:
            raise RuntimeError(f"Invalid memory format encoding: {encoding}")
        # As torch does, whatever the tuple holds is taken: it was made by `__getstate__`.
        memory_format = MemoryFormat(encoding.value)
        self.__dict__.update(
            dtype=dtype, layout=layout, requires_grad=requires_grad, memory_format=memory_format, pin_memory=pin_memory,
            strides=strides,
        )  # fmt: skip

    @staticmethod
    def create_from_tensor(tensor: Tensorlike) -> TensorProperties:
        """The properties of a lazy tensor, an array, or a torch tensor of any kind, which is asked without importing torch.

        The memory format is contiguous whatever the strides are: a chunk is written in C order, and torch says the same.
        """
        if isinstance(tensor, LazyTensor):
            return TensorProperties(
                tensor.dtype,
                requires_grad=tensor.traits.requires_grad,
                strides=tensor.traits.strides,
            )
        dtype = _dtype(tensor.dtype)
        layout = str(getattr(tensor, "layout", Layout.STRIDED)).removeprefix("torch.")
        if layout not in [each.value for each in Layout]:
            raise Unsupported(f"there is no layout called {layout!r}", found=layout)
        pinned, stride = getattr(tensor, "is_pinned", None), getattr(tensor, "stride", None)
        # Compressed layouts have none, and raise.
        strided = Layout(layout) in (Layout.STRIDED, Layout.SPARSE_COO)
        strides = tuple(stride()) if strided and callable(stride) else None
        pin_memory, requires_grad = (
            bool(pinned()) if callable(pinned) else False,
            bool(getattr(tensor, "requires_grad", False)),
        )
        return TensorProperties(
            dtype, Layout(layout), requires_grad, pin_memory=pin_memory, strides=strides
        )


class Tensorlike(Protocol):
    """Anything with a dtype; what else it has of a torch tensor (layout, requires_grad, is_pinned) is asked for."""

    @property
    def dtype(self) -> object: ...


def _dtype(dtype: object) -> DType | Global:
    if isinstance(dtype, DType | Global):
        return dtype
    if type(dtype).__module__ == "torch":
        name = str(dtype).removeprefix("torch.")
        return DTYPES.torch(name) or Global("torch", name)
    found = DTYPES.numpy(dtype) if isinstance(dtype, np.dtype) else None
    if found is None:
        raise Unsupported(f"no tensor has elements of type {dtype}", found=dtype)
    return found


class PlacedChunk(Protocol):
    """A chunk, ours or torch's."""

    @property
    def offsets(self) -> Sequence[int]: ...
    @property
    def sizes(self) -> Sequence[int]: ...


class Sought(Protocol):
    """What is looked for: a `MetadataIndex`, ours or torch's."""

    @property
    def offset(self) -> Sequence[int] | None: ...
    @property
    def index(self) -> int | None: ...


class Places:
    """Where in a list of chunks each offset is. The dictionary is made at the first search that the hint does not answer.

    It is made again when the list is another one or has another length, and before a search fails: a list whose elements were
    replaced in place gives no wrong answer. A chunk without elements may begin where another does; then the other is found.
    """

    __slots__ = ("_at", "_chunks", "_count")

    def __init__(self) -> None:
        self._chunks: Sequence[PlacedChunk] | None = None
        self._count = -1
        self._at: dict[tuple[int, ...], int] = {}

    def find(self, chunks: Sequence[PlacedChunk], index: Sought) -> int | None:
        """The position of the chunk that the index's hint points at, or of the first at its offset; None if there is none."""
        if index.offset is None:
            return None
        offset, hint = tuple(index.offset), index.index
        if (
            hint is not None
            and 0 <= hint < len(chunks)
            and tuple(chunks[hint].offsets) == offset
            and 0 not in chunks[hint].sizes
        ):
            return hint
        position = (
            self._at.get(offset) if self._chunks is chunks and self._count == len(chunks) else None
        )
        if position is not None and tuple(chunks[position].offsets) == offset:
            return position
        self._chunks, self._count = chunks, len(chunks)
        # Of several chunks at one offset the last entry stays: those with elements after those without, and the first last.
        order = sorted(range(len(chunks)), key=lambda i: (0 not in chunks[i].sizes, -i))
        self._at = {tuple(chunks[i].offsets): i for i in order}
        return self._at.get(offset)


@dataclass
class TensorStorageMetadata:
    """A tensor and the boxes that it is stored in."""

    properties: TensorProperties
    size: Sequence[int]
    chunks: list[ChunkStorageMetadata]

    def __post_init__(self) -> None:
        self.size = _size(self.size)
        self._places = Places()

    def __getstate__(self) -> dict[str, object]:
        return {"properties": self.properties, "size": self.size, "chunks": self.chunks}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _places=Places())


@dataclass
class BytesStorageMetadata:
    """Marks a value that is no tensor; what it is, its own bytes say."""


@dataclass
class StorageMeta:
    """Who saved a checkpoint, and under which name."""

    checkpoint_id: str | os.PathLike[str] | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, init=False)
class MetadataIndex:
    """The name of one stored thing: a value by its `fqn`, a chunk of a tensor by its `fqn` and its offset."""

    fqn: str
    offset: Sequence[int] | None = None
    """Where in the tensor the chunk begins; None for a value that is no tensor."""
    index: int | None = field(hash=False, compare=False, default=None)
    """A guess at the chunk's position among the tensor's chunks, to be found sooner. Two indexes that differ in it are equal."""

    def __init__(
        self, fqn: str, offset: Iterable[SupportsIndex] | None = None, index: int | None = None
    ) -> None:
        object.__setattr__(self, "fqn", fqn)
        object.__setattr__(self, "offset", None if offset is None else _size(offset))
        object.__setattr__(self, "index", index)


@dataclass(frozen=True, slots=True)
class StorageInfo:
    """Where the bytes of one stored thing lie. torch calls it `_StorageInfo`."""

    relative_path: str
    """The file, as its store names it."""
    offset: int
    """Its first byte in that file."""
    length: int
    transform_descriptors: Sequence[str] | None = None
    """What the bytes went through on their way to the file (`stream.zstd/1`), the first step first."""


@dataclass
class Metadata:
    """The description of a whole checkpoint."""

    state_dict_metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata]
    planner_data: Mapping[str, tuple[str | int, ...]] | None = None
    """The path of each name in the nested state. A planner of another kind may keep what it likes here."""
    storage_data: Mapping[MetadataIndex, StorageInfo] | None = None
    """Where the bytes of each chunk and value lie. A writer of another kind may have other records."""
    storage_meta: StorageMeta | None = None
    version: str | None = None
    """torch writes 1.0.0 since July 2025 and nothing before."""


def find_chunk(tensor: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    """The chunk of a tensor that begins at the index's offset; ValueError where there is none.

    >>> w = TensorStorageMetadata(TensorProperties(), (4,), [ChunkStorageMetadata((0,), (3,)), ChunkStorageMetadata((3,), (1,))])
    >>> find_chunk(w, MetadataIndex("w", (3,))).sizes
    Size([1])
    """
    position = tensor._places.find(tensor.chunks, index)
    if position is None:
        wanted = "no offset" if index.offset is None else f"offset {tuple(index.offset)}"
        raise ValueError(
            f"{index.fqn!r} has {len(tensor.chunks):,} chunks, and none is at {wanted}"
        )
    return tensor.chunks[position]


def __dir__() -> list[str]:
    return sorted(__all__)
