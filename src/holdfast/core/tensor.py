"""`LazyTensor`: a tensor that is described, and read on request.

Indexing, transposing and printing one compute with its description. `numpy()`, `torch()`,
`np.asarray` and `read(out=…)` read elements, and only those that are requested.

A tensor is described by chunks (`core/chunk.py`): the elements of a box of the tensor, in a
storage. Most tensors have one chunk. Those keep a `Position` instead, which makes the chunk on
request, because a checkpoint with 100,000 tensors is opened for a few of them. Indexing is arithmetic on
positions and chunks (`resolve_index`, `slice_chunks`).

A `Composite` is one torch tensor that is stored as several plain ones, such as a sparse tensor.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, cast

import numpy as np

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides, is_c_ordered
from holdfast.core.digest import Digest
from holdfast.core.dtype import DType
from holdfast.core.opaque import AnyValue, Global
from holdfast.core.protocols import Request, Source
from holdfast.core.registry import find_hook
from holdfast.core.value import Value, replace
from holdfast.errors import BadArgument, BadIndex, BadTarget, LimitExceeded, Unsupported

if TYPE_CHECKING:
    import torch

MAX_LISTED_FILES = 3
"""The most files that the card of a tensor in a notebook names."""


class Composite(Value, frozen=True, eq=False):
    """A tensor that is stored as several plain tensors, such as a sparse or a quantized tensor.

    A checkpoint lists its parts as separate tensors: `name.indices`, `name.values`.
    """

    kind: str
    """`sparse_coo`, `sparse_csr`, `sparse_csc`, `sparse_bsr`, `sparse_bsc`, `quantized`, `nested`
    or `jagged`."""
    shape: tuple[int, ...]
    """The shape of the whole tensor. For a nested tensor only the number of its tensors."""
    parts: Mapping[str, LazyTensor]
    """The plain tensors: `indices` and `values`; `int_repr`, `scales` and `zero_points`; `buffer`,
    `sizes`, `strides` and `offsets`; or `values`, `offsets` and `lengths`."""
    attributes: Mapping[str, object]
    """The values that are not tensors: `coalesced`, `qscheme`, `scale`, `zero_point`, `axis`,
    `ragged_idx`, `min_seqlen` and `max_seqlen`."""
    traits: Traits

    def children(self) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the name and the tensor of each part."""
        yield from self.parts.items()

    def torch(self) -> torch.Tensor:
        """Read the parts and return the whole as a torch tensor of its kind.

        This imports torch.

        Raises:
            HoldfastError: The parts cannot be read, or do not fit together. A sparse tensor, for
                example, may have indices outside its shape.
        """
        return cast("torch.Tensor", find_hook("tensor_from_composite")(self))

    def __repr__(self) -> str:
        return f"<Composite {self.kind} {list(self.shape)}>"


class AliasView(Value, frozen=True, gc=False):
    """Where a tensor lay in a storage that it shared, before a format saved it as a copy.

    Offset and strides are in bits, as in a `Chunk`.
    """

    group: int
    """The number of the storage. Tensors of one source with the same number shared it."""
    nbytes: int
    """The size of the storage. Bytes that belonged to no tensor are not stored."""
    offset: int
    """The bit of the storage where the first element of the tensor lay."""
    strides: tuple[int, ...]
    """Bits from one element to the next, for each dimension. None is negative."""


class Traits(Value, frozen=True):
    """What torch records about a tensor beyond its elements."""

    requires_grad: bool = False
    parameter: bool = False
    """Whether the tensor was an `nn.Parameter`."""
    buffer: bool = False
    """Whether the tensor was an `nn.Buffer`."""
    conj: bool = False
    """Whether the stored elements are the complex conjugates of those of the tensor."""
    neg: bool = False
    """Whether the stored elements are the negatives of those of the tensor."""
    meta: bool = False
    """Whether the tensor was on the meta device: it has a shape and no elements."""
    subclass: Global | None = None
    """The class of a tensor subclass, which is not built."""
    state: object = None
    """The attributes of a tensor subclass or a parameter."""
    alias: AliasView | None = None
    """Where the tensor lay in a storage that it shared, if its format saved it as a copy."""
    blocks: str | None = None
    """The type of quantization blocks, such as `Q4_K`, if the elements are their bytes."""
    strides: tuple[int, ...] | None = None
    """The strides in memory, in elements, if the file records them apart from those of the stored
    elements. DCP does so since torch 2.15."""

    def dtype_label(self, dtype: DType) -> str:
        """Return the name of a dtype for people. For quantization blocks it is their type."""
        return self.blocks or dtype.name


PLAIN_TRAITS = Traits()
"""The traits of most tensors. Compare with `is`, which is faster than `==`."""

NO_CRC = -1
"""Stands for a missing CRC-32 in columns and tuples of integers."""

MAX_FILE_OFFSET = 1 << 61
"""No file is this large. Positions beyond it would overflow the integers of numpy."""


class FileRange(NamedTuple):
    """A range of bytes of a file that are the elements of an array."""

    key: str
    """The file."""
    start: int
    nbytes: int
    crc32: int
    """The recorded CRC-32 of exactly these bytes; `NO_CRC` if none is recorded."""


class Position(Protocol):
    """Where the elements of a tensor with one chunk lie. It makes the chunk on request."""

    def strided_position(self) -> StridedPosition:
        """Return the storage, the offset and the strides of the elements."""

    def file_range(self, dtype: DType, shape: tuple[int, ...]) -> FileRange | None:
        """Return the range of a file whose bytes are those of an array, or None."""


class DeferredChunks(Protocol):
    """The chunks of a tensor that has many. They are built on request."""

    def build(self, start: Sequence[int] = (), stop: Sequence[int] = ()) -> tuple[Chunk, ...]:
        """Build the chunks that intersect a box, by default all chunks.

        Args:
            start: The lowest corner of the box. Missing dimensions are not restricted.
            stop: The corner behind the box.
        """


@lru_cache(maxsize=1024)
def _whole_box_and_strides(shape: tuple[int, ...], bits: int) -> tuple[Box, tuple[int, ...]]:
    """Return the box and the strides of a tensor in C order.

    They are cached, because a hundred thousand tensors have a dozen different shapes.
    """
    return Box.whole(shape), c_strides(shape, bits)


@lru_cache(maxsize=1024)
def _contiguous_nbytes(bits: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Return the size in bytes of elements that lie in C order without gaps; None for all others.

    Args:
        bits: The size of an element. Elements of less than a byte return None.
        shape: The length of each dimension.
        strides: Bits from one element to the next, for each dimension.
    """
    if bits < 8 or not is_c_ordered(shape, strides, bits):
        return None
    return math.prod(shape) * bits // 8


class StridedPosition(Value, frozen=True, eq=False):
    """The position of a tensor, or of a slice of one, whose elements lie in one storage."""

    storage: Storage
    offset: int
    """The bit of the storage where the first element lies."""
    strides: tuple[int, ...]
    """Bits from one element to the next, for each dimension."""

    def strided_position(self) -> StridedPosition:
        """Return this position."""
        return self

    def file_range(self, dtype: DType, shape: tuple[int, ...]) -> FileRange | None:
        """Return the range of a file whose bytes are those of a numpy array of these elements.

        None if there is no such range: the elements lie in another order, do not start at a whole
        byte, or their bytes must be swapped.

        Args:
            dtype: The type of the elements.
            shape: The length of each dimension.
        """
        storage = self.storage
        # A subclass of `Storage` may have to read the file to find its start.
        if type(storage) is not Storage:
            return None
        nbytes = _contiguous_nbytes(dtype.bits, shape, self.strides)
        if nbytes is None or self.offset % 8:
            return None
        if storage.byteorder != "little" and dtype.swap_nbytes > 1:
            return None

        # A damaged or hostile file may describe elements outside its storage. The slower way of
        # reading refuses them with an error.
        start_in_storage = self.offset // 8
        if not 0 <= start_in_storage <= storage.nbytes - nbytes:
            return None
        if not 0 <= storage.start < MAX_FILE_OFFSET:
            return None

        # The recorded checksum covers the whole storage.
        crc32 = NO_CRC
        if nbytes == storage.nbytes and storage.crc32 is not None:
            crc32 = storage.crc32
        return FileRange(storage.key, storage.start + start_in_storage, nbytes, crc32)


class TensorFields(Value, frozen=True, eq=False):
    """The fields of a `LazyTensor`. That class overrides `chunks` by a property."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...] | DeferredChunks
    """The chunks; or what builds them; or an empty tuple, if `position` makes the only chunk."""
    source: Source
    traits: Traits = PLAIN_TRAITS
    position: Position | None = None


_CHUNKS_FIELD: MemberDescriptorType = vars(TensorFields)["chunks"]
"""The stored field `chunks`. Reading `LazyTensor.chunks` would call the property that overrides it,
and build the chunks. `_CHUNKS_FIELD.__get__(tensor)` reads what is stored, and `__set__` stores."""

set_tensor_name: Callable[[LazyTensor, str], None] = vars(TensorFields)["name"].__set__
"""Sets the name of a frozen tensor. Only for one that a format has just made."""


class LazyTensor(TensorFields, frozen=True, eq=False):
    """A tensor of a checkpoint that is described, and read on request.

    Indexing and transposing return another lazy tensor and read nothing. `numpy`, `read` and
    `torch` read exactly the elements that the lazy tensor describes.

    Attributes:
        name: The name of the tensor in its checkpoint.
        dtype: The type of its elements.
        shape: The length of each dimension.
        source: The open files that the elements are read from.
        traits: What torch records about the tensor beyond its elements.

    Examples:
        >>> weight = checkpoint["layers.0.weight"]
        >>> weight
        <LazyTensor 'layers.0.weight' float32 [4, 3]>
        >>> weight[1:3, 0]
        <LazyTensor 'layers.0.weight' float32 [2]>
        >>> weight[1:3, 0].numpy()
        array([3., 6.], dtype=float32)
    """

    @property  # type: ignore[misc]  # read-only, as the field that it covers
    def chunks(self) -> tuple[Chunk, ...]:
        """Where the elements lie: boxes of the tensor, each in a storage.

        Chunks that do not exist yet are made now, and kept for the next call.
        """
        # The stored field may have an object that builds the chunks, or be empty because `position`
        # says where the only chunk lies.
        stored_chunks: tuple[Chunk, ...] | DeferredChunks = _CHUNKS_FIELD.__get__(self)
        if not isinstance(stored_chunks, tuple):
            chunks = stored_chunks.build()
        elif not stored_chunks and self.position is not None:
            position = self.position.strided_position()
            box = Box.whole(self.shape)
            chunks = (Chunk(box, position.storage, position.offset, position.strides),)
        else:
            return stored_chunks
        _CHUNKS_FIELD.__set__(self, chunks)
        return chunks

    @property
    def has_deferred_chunks(self) -> bool:
        """Whether the tensor has many chunks that are not built yet."""
        return not isinstance(_CHUNKS_FIELD.__get__(self), tuple)

    @classmethod
    def contiguous(
        cls, name: str, dtype: DType, shape: tuple[int, ...], storage: Storage, source: Source
    ) -> LazyTensor:
        """Describe a tensor in C order that starts at the first byte of its storage.

        Args:
            name: The name of the tensor.
            dtype: The type of its elements.
            shape: The length of each dimension.
            storage: The bytes of the elements.
            source: Where the storage is read from.
        """
        box, strides = _whole_box_and_strides(shape, dtype.bits)
        return cls(name, dtype, shape, (Chunk(box, storage, 0, strides),), source)

    def strided_position(self) -> StridedPosition | None:
        """Return the storage, offset and strides of the elements.

        None if they are not one plain chunk that covers the tensor. Also None if the chunks are not
        built yet; this does not build them.
        """
        if self.position is not None:
            return self.position.strided_position()
        # `self.chunks` would build deferred chunks, which may be very many.
        chunks: tuple[Chunk, ...] | DeferredChunks = _CHUNKS_FIELD.__get__(self)
        if not isinstance(chunks, tuple) or len(chunks) != 1:
            return None
        (chunk,) = chunks
        # A subclass of `Chunk` may have to read the file to find its offset.
        if type(chunk) is not Chunk:
            return None
        if chunk.box != Box.whole(self.shape):
            return None
        return StridedPosition(chunk.storage, chunk.offset, chunk.strides)

    def file_range(self) -> FileRange | None:
        """Return the range of a file whose bytes are those of `numpy()`, or None.

        None means that the elements must be gathered, swapped or computed.
        """
        # Conjugated and negated elements are computed, and a tensor on the meta device has none.
        traits = self.traits
        if traits is not PLAIN_TRAITS and (traits.conj or traits.neg or traits.meta):
            return None
        position = self.position
        if position is None:
            position = self.strided_position()
            if position is None:
                return None
        return position.file_range(self.dtype, self.shape)

    def __replace__(self, /, **changes: Any) -> LazyTensor:  # noqa: ANN401  # those of a tensor
        """Return a copy of this tensor in which some fields have other values."""
        if changes.keys() <= {"name", "traits"}:
            # The elements stay where they are, so chunks that do not exist yet are not made.
            return LazyTensor(
                changes.get("name", self.name),
                self.dtype,
                self.shape,
                _CHUNKS_FIELD.__get__(self),
                self.source,
                changes.get("traits", self.traits),
                self.position,
            )
        # `position` is not copied, because it would be wrong for another shape or other chunks.
        # Without it the chunks say where the elements lie.
        for field in ("name", "dtype", "shape", "chunks", "source", "traits"):
            if field not in changes:
                changes[field] = getattr(self, field)
        return LazyTensor(**changes)

    def __reduce__(self) -> tuple[object, ...]:
        # A position may refer to all rows of a table. The chunks are those of this tensor alone.
        fields = (self.name, self.dtype, self.shape, self.chunks, self.source, self.traits)
        return LazyTensor, fields

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements, as in numpy. In torch, `size()` is the shape."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes, packed without gaps."""
        return self.dtype.nbytes(self.size)

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The storages that have elements of the tensor, each once."""
        return tuple(dict.fromkeys(chunk.storage for chunk in self.chunks))

    @property
    def shared_chunks(self) -> tuple[Chunk, ...]:
        """The chunks, in the storage that the tensor shares or once shared with other tensors.

        A format such as safetensors saves tensors that share a storage as copies, and records where
        each of them was in that storage (`Traits.alias`). For such a copy, the result is one chunk
        at its former place.
        """
        alias = self.traits.alias
        if alias is None:
            return self.chunks
        # The former storage is not in the file. An empty key and a negative start distinguish it
        # from all storages that are. It is only compared, and never read.
        former_storage = Storage(
            "",
            -1 - alias.group,
            alias.nbytes,
            label=f"shared/{alias.group}",
            home=self.source.store,
        )
        return (Chunk(Box.whole(self.shape), former_storage, alias.offset, alias.strides),)

    @property
    def shared_storages(self) -> tuple[Storage, ...]:
        """The storages of `shared_chunks`, each once."""
        return tuple(dict.fromkeys(chunk.storage for chunk in self.shared_chunks))

    def numel(self) -> int:
        """Return the number of elements, as in torch."""
        return self.size

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __iter__(self) -> Iterator[LazyTensor]:
        """Iterate over the first dimension. Nothing is read."""
        if not self.shape:
            raise TypeError("iteration over a 0-d tensor; item() reads its value")
        return (self[index] for index in range(self.shape[0]))

    def __getitem__(self, index: object) -> LazyTensor:
        """Return a slice, as numpy's basic indexing does. Nothing is read.

        Args:
            index: Integers, slices, `...` and `None`.

        Raises:
            BadIndex: The index is out of bounds, or an array or a boolean.
        """
        # A slice keeps the traits that decide what the stored elements mean. It drops the others: a
        # slice of a parameter is not itself a parameter, and does not have its attributes.
        traits = self.traits
        if traits is not PLAIN_TRAITS:
            traits = Traits(conj=traits.conj, neg=traits.neg, meta=traits.meta)

        # The usual case: the elements are one strided array, and so are those of the slice.
        position = self.strided_position()
        if position is not None:
            view = resolve_index(self.shape, position.offset, position.strides, index)
            view_position = None
            # A slice without elements has neither a position nor chunks.
            if 0 not in view.shape:
                view_position = StridedPosition(position.storage, view.offset, view.strides)
            return LazyTensor(
                self.name, self.dtype, view.shape, (), self.source, traits, view_position
            )

        # Each chunk has its own offset and strides, so only the shape and the picks of this view are
        # used. Its offset and strides are meaningless, because it was made with wrong strides.
        unused_strides = self.shape
        view = resolve_index(self.shape, 0, unused_strides, index)
        # `self.chunks` would build all deferred chunks. This reads what is stored.
        chunks: tuple[Chunk, ...] | DeferredChunks = _CHUNKS_FIELD.__get__(self)
        if not isinstance(chunks, tuple):
            # Only chunks that intersect the slice are built: a rank may need two of 8,000.
            start, stop = _find_bounds(view.picks)
            chunks = chunks.build(start, stop)
        view_chunks = slice_chunks(view.picks, chunks)
        return LazyTensor(self.name, self.dtype, view.shape, view_chunks, self.source, traits)

    def permute(self, *axes: int | Sequence[int]) -> LazyTensor:
        """Return a view with its dimensions in another order. Nothing is read.

        Args:
            axes: All dimensions in their new order, one by one or as one sequence. Negative
                numbers count from the last dimension.

        Raises:
            BadIndex: A dimension is missing or occurs twice.
        """
        requested_axes: Sequence[object] = axes
        if len(axes) == 1 and isinstance(axes[0], Sequence):
            requested_axes = axes[0]
        all_axes = range(self.ndim)
        try:
            # Looking an axis up in the range checks it, and resolves a negative number.
            indices = map(operator.index, requested_axes)  # type: ignore[arg-type]  # the TypeError is the check
            axis_order = [all_axes[index] for index in indices]
        except (TypeError, IndexError):
            # No dimension has this number, so the check below raises the error.
            axis_order = [-1]
        if sorted(axis_order) != list(all_axes):
            raise BadIndex(f"permute needs each of {self.ndim} dimensions once, got {axes}")

        def reorder(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values[axis] for axis in axis_order)

        chunks: list[Chunk] = []
        for chunk in self.chunks:
            box = Box(reorder(chunk.box.start), reorder(chunk.box.stop))
            chunks.append(Chunk(box, chunk.storage, chunk.offset, reorder(chunk.strides)))
        # Both traits describe the elements in the stored order of the dimensions.
        return replace(
            self,
            shape=reorder(self.shape),
            chunks=tuple(chunks),
            traits=replace(self.traits, alias=None, blocks=None),
        )

    @property
    def T(self) -> LazyTensor:  # noqa: N802  # the name in numpy and torch
        """This tensor with its dimensions in reverse order. Nothing is read."""
        return self.permute(*reversed(range(self.ndim)))

    def renamed(self, name: str) -> LazyTensor:
        """Return this tensor under another name."""
        return replace(self, name=name)

    def numpy(self) -> np.ndarray:
        """Return the elements as an array.

        Returns:
            A read-only view of mapped memory, if the checkpoint was opened with `mmap=True` and the
            elements lie there as an array. Otherwise a new array.

        Raises:
            HoldfastError: The elements cannot be read.
        """
        if self.source.mapped:
            view = self.source.view(self)
            if view is not None:
                return view
        return self.source.arrays([self])[0]

    def read(self, *, out: np.ndarray | None = None) -> np.ndarray:
        """Read the elements into an array.

        Args:
            out: A writable array of the same shape and dtype, with any strides, that receives the
                elements. By default a new array is made.

        Returns:
            The array that has the elements.

        Raises:
            BadTarget: `out` is not a writable array of the right shape and dtype.
            HoldfastError: The elements cannot be read.

        Examples:
            >>> import numpy as np
            >>> rows = np.empty((2, 3), np.float32)
            >>> checkpoint["layers.0.weight"][:2].read(out=rows)
            array([[0., 1., 2.],
                   [3., 4., 5.]], dtype=float32)
        """
        if out is None:
            return self.source.arrays([self])[0]
        if not isinstance(out, np.ndarray):
            raise BadTarget(
                f"out= must be a numpy array, not {type(out).__name__}", tensor=self.name
            )
        dtype = self.dtype.numpy
        if out.shape != self.shape or out.dtype != dtype or not out.flags.writeable:
            article = "a" if out.flags.writeable else "a read-only"
            raise BadTarget(
                f"out= must be a writable {dtype} array of shape {self.shape}, "
                f"not {article} {out.dtype} array of shape {out.shape}",
                tensor=self.name,
                expected=(self.shape, dtype),
                found=(out.shape, out.dtype),
            )
        self.source.read([Request(self, out)])
        return out

    def item(self) -> bool | int | float | complex:
        """Read a tensor of one element and return it as a Python number.

        Raises:
            BadArgument: The tensor has no element or several.
        """
        if self.size != 1:
            raise BadArgument(
                f"item() is for tensors of one element, and this one has {self.size:,}",
                tensor=self.name,
            )
        (value,) = np.asarray(self.tolist(), dtype=object).reshape(-1)
        return value  # type: ignore[no-any-return]  # `tolist` returns numbers

    def tolist(self) -> AnyValue:
        """Read the elements and return them as Python numbers.

        Returns:
            Nested lists of numbers. For a tensor without dimensions, one number.

        Raises:
            Unsupported: The elements are not numbers, such as quantization blocks.
        """
        array = self.numpy()
        if self.dtype.kind == "other" or (self.dtype.packed and self.dtype.kind == "quantized"):
            raise Unsupported(
                f"{self.dtype} has no numbers; numpy() gives the bytes", tensor=self.name
            )
        if array.dtype.names:
            # numpy has no complex numbers of two float16. They are stored as a pair of fields.
            array = array["real"].astype(np.float32) + 1j * array["imag"].astype(np.float32)
        if array.dtype.kind == "V":
            # For dtypes that numpy lacks (bfloat16), `tolist` would return objects of ml_dtypes.
            # Their values are exact in float32.
            array = array.astype(np.float32)
        return array.tolist()

    def __float__(self) -> float:
        return float(self.item())  # type: ignore[arg-type]  # Python refuses a complex number

    def __int__(self) -> int:
        return int(self.item())  # type: ignore[arg-type]  # Python refuses a complex number

    def __complex__(self) -> complex:
        return complex(self.item())

    def __format__(self, spec: str) -> str:
        """Format the only element, as in `f"{checkpoint['loss']:.3f}"`."""
        if not spec:
            return repr(self)
        return format(self.item(), spec)

    def __bool__(self) -> bool:
        """Return whether the only element is not zero."""
        if self.size != 1:
            raise BadArgument(
                f"the truth value of a tensor with {self.size:,} elements is ambiguous; "
                "compare it with None, or read one element with item()",
                tensor=self.name,
            )
        return bool(self.item())

    def __getattr__(self, name: str) -> NoReturn:
        """Explain how to read the tensor, if an attribute of an array is used: `mean`, `cuda`."""
        raise AttributeError(
            f"a lazy tensor has no attribute {name!r}; read it with numpy() or torch() first",
            name=name,
            obj=self,
        )

    def digest(self) -> Digest:
        """Return the dtype, the shape and the CRC-32 of the elements.

        Equal tensors have equal digests in every format. Nothing is read if the file records the
        checksum of exactly these elements.
        """
        crc32 = None
        if not self.traits.meta:
            crc32 = self.source.digest([self])[0]
        return Digest.from_crc32(self.dtype, self.shape, crc32)

    def empty(self) -> np.ndarray:
        """Return a new array that can receive the elements.

        Raises:
            LimitExceeded: An expanded view would take much more memory than is stored.
            Unsupported: The tensor was on the meta device and has no elements.
        """
        self.check_expansion()
        if self.traits.meta:
            raise Unsupported(
                "this tensor was saved on the meta device: it has a shape and no data",
                tensor=self.name,
            )
        return np.empty(self.shape, self.dtype.numpy)

    def check_expansion(self) -> None:
        """Check that reading this tensor takes no more memory than its stored bytes justify.

        A stride of 0 repeats an element. So a file of a few bytes can describe a tensor that fills
        the memory.

        Raises:
            LimitExceeded: The tensor is an expanded view beyond `Limits.expansion`.
        """
        limits = self.source.limits
        nbytes = self.size * self.dtype.numpy.itemsize
        stored_nbytes = sum(storage.nbytes for storage in self.storages)
        allowed_nbytes = max(limits.expansion * stored_nbytes, limits.expansion_floor_nbytes)
        # Several elements of less than a byte share a stored byte. In memory each takes a byte, and
        # that is no expansion.
        elements_per_byte = 8 // min(self.dtype.bits, 8)
        if nbytes > allowed_nbytes * elements_per_byte and not self.traits.meta:
            raise LimitExceeded(
                f"reading {nbytes:,} bytes out of {stored_nbytes:,} stored ones: "
                "this is an expanded view; slice it, or raise Limits(expansion=…)",
                tensor=self.name,
                expected=allowed_nbytes,
                found=nbytes,
            )

    def __array__(
        self, dtype: np.dtype[np.generic] | None = None, copy: bool | None = None
    ) -> np.ndarray:
        """Return the elements for `np.asarray`.

        Args:
            dtype: The dtype to cast to.
            copy: True requires a new array, and False a view of mapped memory. None returns a view
                if there is one.

        Raises:
            ValueError: `copy` is False, and the elements must be read or cast.
        """
        view = self.source.view(self)
        needs_cast = dtype is not None and dtype != self.dtype.numpy
        if copy is False and (view is None or needs_cast):
            raise ValueError(
                "this tensor cannot be an array without a copy; "
                "open with mmap=True, or leave copy=False away"
            )
        if view is None:
            array = self.read()
        elif copy and not needs_cast:
            array = view.copy()
        else:
            array = view
        # Casting makes a new array in any case.
        if needs_cast:
            return array.astype(dtype)
        return array

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: object = None,
        dl_device: object = None,
        copy: object = None,
    ) -> object:
        """Read the elements into host memory for `torch.as_tensor` and other DLPack users."""
        if "torch" in sys.modules:
            # torch has dtypes that numpy lacks, such as bfloat16.
            return self.torch().detach().__dlpack__()
        return self.read().__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's numbers for the CPU."""
        return (1, 0)

    def torch(self) -> torch.Tensor:
        """Read the elements and return them as a torch tensor on the CPU.

        This imports torch.

        Raises:
            HoldfastError: The elements cannot be read, or torch does not have the dtype.
        """
        return cast("torch.Tensor", find_hook("tensor_from_lazy")(self))

    def __copy__(self) -> LazyTensor:
        return self

    def __deepcopy__(self, memo: object) -> LazyTensor:
        """Return this tensor. It is never changed, so a copy is not needed."""
        return self

    def _repr_html_(self) -> str:
        """Return the card that a notebook shows for this tensor. Nothing is read."""
        # Imported here because only notebooks need it.
        from holdfast.core.notebook import render_card
        from holdfast.core.text import format_nbytes

        facts = [
            ("dtype", self.dtype.name),
            ("shape", str(list(self.shape))),
            ("elements", f"{self.size:,}"),
            ("size", format_nbytes(self.nbytes)),
        ]
        if self.traits.blocks is not None:
            facts.append(("blocks", self.traits.blocks))
        if self.traits.meta:
            facts.append(("no data", "meta device"))
        else:
            file_names = list(dict.fromkeys(storage.key for storage in self.storages))
            file_list = ", ".join(file_names[:MAX_LISTED_FILES])
            if len(file_names) > MAX_LISTED_FILES:
                file_list += ", …"
            facts.append(("in", file_list))
        return render_card(self.name, facts)

    def __repr__(self) -> str:
        return f"<LazyTensor {self.name!r} {self.dtype} {list(self.shape)}>"


DROPPED = -1
"""The length of a pick by an integer: it takes one index, and the dimension is dropped."""


class AxisPick(NamedTuple):
    """The indices that an index takes from one dimension: `start`, `start + step`, and so on."""

    start: int
    step: int
    length: int
    """How many indices are taken. `DROPPED` for one, whose dimension is dropped."""


NEW_AXIS = AxisPick(0, 0, 1)
"""A dimension of length 1 that the slice adds (`None` in an index). Compare with `is`."""


class IndexedView(Value, frozen=True, eq=False):
    """A slice of a strided array."""

    shape: tuple[int, ...]
    offset: int
    """Where the first element of the slice lies, in the unit of the array's strides."""
    strides: tuple[int, ...]
    picks: list[AxisPick]
    """What the slice takes of the first dimensions, and where it adds one. The dimensions behind
    those are taken whole, and are not listed: most indices are short, and slicing must be fast."""


def resolve_index(
    shape: tuple[int, ...], offset: int, strides: tuple[int, ...], index: object
) -> IndexedView:
    """Apply an index to a strided array, as numpy's basic indexing does.

    Args:
        shape: The shape of the array.
        offset: Where its first element lies, in any unit.
        strides: The distance from one element to the next, for each dimension, in the same unit.
        index: An integer, a slice, `...`, `None`, or a tuple of these.

    Raises:
        BadIndex: The index does not fit the shape, or needs advanced indexing: an array or a
            boolean would gather single elements.

    Examples:
        >>> view = resolve_index((4, 5), 0, (40, 8), (slice(1, 3), -1))
        >>> view.shape, view.offset, view.strides
        ((2,), 72, (40,))
        >>> view = resolve_index((4, 5), 0, (40, 8), (..., None, slice(None, None, -2)))
        >>> view.shape, view.offset, view.strides
        ((4, 1, 3), 32, (40, 0, -16))
    """
    # One item may stand without a tuple around it. A subclass of tuple is not an index for numpy
    # either.
    items = index if type(index) is tuple else (index,)
    # An index may be longer than the shape because of `None` and `...`. If it has too many integers
    # and slices, this raises an error.
    if len(items) > len(shape):
        _count_indexed_axes(items, len(shape))

    # `axis` is the next dimension of the array that no item has taken yet.
    picks: list[AxisPick] = []
    view_shape: tuple[int, ...] = ()
    view_strides: tuple[int, ...] = ()
    axis = 0
    for item in items:
        if item is None:
            picks.append(NEW_AXIS)
            view_shape = (*view_shape, 1)
            view_strides = (*view_strides, 0)
        elif item is Ellipsis:
            if sum(entry is Ellipsis for entry in items) > 1:
                raise BadIndex("an index can only have a single ellipsis ('...')")
            # The ellipsis takes all dimensions that the other items leave, each of them whole.
            ellipsis_stop = axis + len(shape) - _count_indexed_axes(items, len(shape))
            for length in shape[axis:ellipsis_stop]:
                picks.append(AxisPick(0, 1, length))
            view_shape = (*view_shape, *shape[axis:ellipsis_stop])
            view_strides = (*view_strides, *strides[axis:ellipsis_stop])
            axis = ellipsis_stop
        else:
            pick = _pick_indices(item, shape[axis], axis)
            picks.append(pick)
            offset += pick.start * strides[axis]
            # An integer drops its dimension.
            if pick.length != DROPPED:
                view_shape = (*view_shape, pick.length)
                view_strides = (*view_strides, pick.step * strides[axis])
            axis += 1

    # The dimensions behind the index are taken whole.
    view_shape = (*view_shape, *shape[axis:])
    view_strides = (*view_strides, *strides[axis:])
    return IndexedView(view_shape, offset, view_strides, picks)


def _count_indexed_axes(items: Sequence[object], rank: int) -> int:
    """Return how many dimensions the integers and slices of an index take.

    Args:
        items: The index.
        rank: How many dimensions the tensor has.

    Raises:
        BadIndex: The index takes more dimensions than the tensor has.
    """
    indexed_count = sum(item is not None and item is not Ellipsis for item in items)
    if indexed_count > rank:
        raise BadIndex(
            f"too many indices: the tensor has {rank} dimensions, but {indexed_count} were indexed"
        )
    return indexed_count


def _pick_indices(item: object, length: int, axis: int) -> AxisPick:
    """Return which indices of a dimension an integer or a slice takes.

    Args:
        item: The integer or the slice.
        length: The length of the dimension.
        axis: The number of the dimension, for messages.

    Raises:
        BadIndex: The item is out of bounds, or neither an integer nor a slice.
    """
    # The usual cases of an integer and of a slice are fast, because a program that gathers rows
    # takes thousands of slices. The other code handles all integers and all slices.
    if type(item) is int and 0 <= item < length:
        return AxisPick(item, 0, DROPPED)
    if isinstance(item, slice):
        start, stop = item.start, item.stop
        has_plain_bounds = item.step is None and type(start) is int and type(stop) is int
        if has_plain_bounds and 0 <= start < stop <= length:
            return AxisPick(start, 1, stop - start)
        try:
            # Python resolves negative bounds, and cuts bounds beyond the length.
            start, stop, step = item.indices(length)
        except (TypeError, ValueError) as error:
            raise BadIndex(f"bad slice in dimension {axis}: {error}") from None
        return AxisPick(start, step, len(range(start, stop, step)))

    try:
        index = operator.index(item)  # type: ignore[arg-type]  # the TypeError is the check
    except TypeError:
        index = None
    # For Python a boolean is an integer. For numpy it is a mask.
    if index is None or isinstance(item, bool):
        raise BadIndex(
            f"a lazy tensor takes integers, slices, ... and None, not {type(item).__name__}; "
            "read it first (tensor.numpy()) and index the array"
        )
    if not -length <= index < length:
        raise BadIndex(f"index {index} is out of bounds for dimension {axis} with size {length}")
    return AxisPick(index % length, 0, DROPPED)


def _find_bounds(picks: Sequence[AxisPick]) -> tuple[list[int], list[int]]:
    """Return the box that contains everything that is picked: its lowest and its end corner.

    Dimensions that the slice adds are left out, since the tensor does not have them.
    """
    starts: list[int] = []
    stops: list[int] = []
    for pick in picks:
        if pick is NEW_AXIS:
            continue
        # A pick by an integer or without indices has the length -1 or 0, and ends where it starts.
        # With a negative step, the last index is the lowest one.
        last_index = pick.start + pick.step * max(pick.length - 1, 0)
        starts.append(min(pick.start, last_index))
        stops.append(max(pick.start, last_index) + 1)
    return starts, stops


def slice_chunks(picks: Sequence[AxisPick], chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """Slice the chunks of a tensor.

    Args:
        picks: What the slice takes of each dimension (`IndexedView.picks`).
        chunks: The chunks of the tensor.

    Returns:
        The chunks of the slice, with boxes in its coordinates. Chunks that have no element of the
        slice are left out.
    """
    sliced_chunks: list[Chunk] = []
    for chunk in chunks:
        sliced_chunk = _slice_chunk(picks, chunk)
        if sliced_chunk is not None:
            sliced_chunks.append(sliced_chunk)
    return tuple(sliced_chunks)


def _slice_chunk(picks: Sequence[AxisPick], chunk: Chunk) -> Chunk | None:
    """Return the elements of a chunk that a slice takes, or None if it takes none of them.

    The box of the result is in coordinates of the slice: index 0 is the first index that the slice
    takes of a dimension, and index 1 the second one.
    """
    # `axis` is the next dimension of the tensor. The lists have an entry for each dimension of the
    # slice, which may add dimensions and drop some.
    offset = chunk.offset
    box_starts: list[int] = []
    box_stops: list[int] = []
    strides: list[int] = []
    axis = 0
    for pick in picks:
        if pick is NEW_AXIS:
            box_starts.append(0)
            box_stops.append(1)
            strides.append(0)
            continue

        chunk_start = chunk.box.start[axis]
        chunk_stop = chunk.box.stop[axis]
        stride = chunk.strides[axis]
        axis += 1
        if pick.length == DROPPED:
            if not chunk_start <= pick.start < chunk_stop:
                return None
            offset += (pick.start - chunk_start) * stride
            continue

        first_pick, pick_stop = _find_picks_between(pick, chunk_start, chunk_stop)
        if first_pick >= pick_stop:
            return None
        first_index = pick.start + first_pick * pick.step
        offset += (first_index - chunk_start) * stride
        box_starts.append(first_pick)
        box_stops.append(pick_stop)
        strides.append(stride * pick.step)

    # The dimensions behind the picks are taken whole.
    box_starts += chunk.box.start[axis:]
    box_stops += chunk.box.stop[axis:]
    strides += chunk.strides[axis:]
    box = Box(tuple(box_starts), tuple(box_stops))
    if not box.count:
        return None
    return Chunk(box, chunk.storage, offset, tuple(strides))


def _find_picks_between(pick: AxisPick, low: int, high: int) -> tuple[int, int]:
    """Return which indices of a pick lie from `low` to before `high`.

    Indices are counted in the order in which the pick takes them: number 0 is `pick.start`, number 1
    is `pick.start + pick.step`.

    Returns:
        The number of the first such index, and the number behind the last one. The first is not
        smaller than the second if there is none.
    """
    if pick.step > 0:
        # Both are the lowest number whose index is not below a bound. A division of the negative
        # value that is negated again rounds up.
        first_number = -((pick.start - low) // pick.step)
        number_stop = -((pick.start - high) // pick.step)
    else:
        # The indices descend: the first is the highest one below `high`, and the last is the lowest
        # one from `low` on.
        descent = -pick.step
        first_number = -((high - 1 - pick.start) // descent)
        number_stop = (pick.start - low) // descent + 1
    return max(first_number, 0), min(number_stop, pick.length)
