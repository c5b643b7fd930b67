"""`LazyTensor`: a tensor that is described and not read.

Slicing, transposing and looking at one are arithmetic. `numpy()`, `torch()`, `np.asarray` and `read(out=…)` move bytes, and only
the bytes that are asked for.

An index is arithmetic on chunks (`resolve_index`). A `Composite` is one torch tensor that is stored as several plain ones.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

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


class Composite(Value, frozen=True, eq=False):
    """A tensor made of plain parts. In a checkpoint's mapping its parts stand under `name.part`."""

    kind: str
    """`sparse_coo`, `sparse_csr`, `sparse_csc`, `sparse_bsr`, `sparse_bsc`, `quantized`, `nested` or `jagged`."""
    shape: tuple[int, ...]
    """The shape of the whole; of a nested tensor only how many tensors are in it."""
    parts: Mapping[str, LazyTensor]
    """Its plain tensors: `indices` and `values`; `int_repr`, `scales`, `zero_points`; `buffer`, `sizes`, `strides`, `offsets`;
    `values`, `offsets`, `lengths`."""
    attributes: Mapping[str, object]
    """Everything else: `coalesced`, `qscheme`, `scale`, `zero_point`, `axis`, `ragged_idx`, `min_seqlen`, `max_seqlen`."""
    traits: Traits

    def children(self) -> Iterator[tuple[str, LazyTensor]]:
        """The parts, each with its name."""
        yield from self.parts.items()

    def torch(self) -> torch.Tensor:
        """The whole as a torch tensor of its kind, its indices checked; imports torch."""
        return cast("torch.Tensor", find_hook("tensor_from_composite")(self))

    def __repr__(self) -> str:
        return f"<Composite {self.kind} {list(self.shape)}>"


class AliasView(Value, frozen=True, gc=False):
    """The storage that a tensor shared with others before it was saved in a format that copies each of them. Counted in bits, as in
    a `Chunk`: `Chunk(Box.whole(shape), storage, view.offset, view.strides)` is the view again."""

    group: int
    """Number of the storage; tensors of one source with the same number shared it."""
    nbytes: int
    """How long that storage was. Bytes that no tensor covers were not kept."""
    offset: int
    """Bit of the storage where the tensor's first element lay."""
    strides: tuple[int, ...]
    """Bits from one element to the next, a dimension each; never negative."""


class Traits(Value, frozen=True):
    """What torch knows of a tensor beyond its elements."""

    requires_grad: bool = False
    parameter: bool = False
    """Whether it was an `nn.Parameter`."""
    buffer: bool = False
    """Whether it was an `nn.Buffer`."""
    conj: bool = False
    """The stored elements are the complex conjugates of the tensor's."""
    neg: bool = False
    """The stored elements are the negatives of the tensor's."""
    meta: bool = False
    """Whether it has a shape and no data."""
    subclass: Global | None = None
    """The class of a tensor subclass, which was not built."""
    state: object = None
    alias: AliasView | None = None
    """Where it lay when it shared its storage, in a file whose format stores every tensor by itself."""
    blocks: str | None = None
    """Of bytes that are quantised blocks: their type, as `numeric/dequantize.py` has it (`Q4_K`)."""
    strides: tuple[int, ...] | None = None
    """How it lay in memory when it was saved, in elements, where a file notes that apart: DCP since torch 2.15."""

    def dtype_label(self, dtype: DType) -> str:
        """The name of the dtype as people read it: of quantised blocks, their type."""
        return self.blocks or dtype.name


PLAIN_TRAITS = Traits()


FileRange = tuple[str, int, int, int]
"""A file, the first byte, how many there are, and the CRC-32 that the file records of just these; `NO_CRC` where it does not."""

NO_CRC = -1

MAX_FILE_OFFSET = (
    1 << 61
)  # No file reaches so far. What claims to is left to arithmetic that does not overflow.


class Position(Protocol):
    """Where a tensor in one piece lies, before somebody asks for its chunk."""

    def strided_position(self) -> StridedPosition:
        """As its chunk will say."""

    def file_range(self, dtype: DType, shape: tuple[int, ...]) -> FileRange | None:
        """The range of its file, where the bytes there are those of an array; None where they are not."""


class DeferredChunks(Protocol):
    """The chunks of a tensor in many pieces, before somebody asks for them."""

    def build(self, start: Sequence[int] = (), stop: Sequence[int] = ()) -> tuple[Chunk, ...]:
        """All chunks; or those that meet a box, which may have fewer dimensions."""


@lru_cache(maxsize=1024)
def _in_order(shape: tuple[int, ...], bits: int) -> tuple[Box, tuple[int, ...]]:
    """The box and the strides of a tensor in C order: of a hundred thousand tensors there are a dozen."""
    return Box.whole(shape), c_strides(shape, bits)


@lru_cache(maxsize=1024)
def _contiguous_nbytes(bits: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Bytes of elements that follow each other in C order and fill whole bytes each; -1 for others."""
    return (
        -1 if bits < 8 or not is_c_ordered(shape, strides, bits) else math.prod(shape) * bits // 8
    )


class StridedPosition(Value, frozen=True, eq=False):
    """The position of a slice of a tensor in one piece."""

    storage: Storage
    offset: int
    """Bit of the storage where the first element lies."""
    strides: tuple[int, ...]

    def to_chunk(self, shape: tuple[int, ...]) -> Chunk:
        return Chunk(Box.whole(shape), self.storage, self.offset, self.strides)

    def strided_position(self) -> StridedPosition:
        return self

    def file_range(self, dtype: DType, shape: tuple[int, ...]) -> FileRange | None:
        storage, offset = self.storage, self.offset
        # By its exact class: a storage of another kind may not know its place before it is asked.
        if type(storage) is not Storage:
            return None
        nbytes = _contiguous_nbytes(dtype.bits, shape, self.strides)
        first_byte, start = offset // 8, storage.start
        is_inside = 0 <= first_byte <= storage.nbytes - nbytes
        if nbytes < 0 or offset % 8 or not is_inside or not 0 <= start < MAX_FILE_OFFSET:
            return None
        if storage.byteorder != "little" and dtype.swap_nbytes > 1:
            return None
        crc = storage.crc32 if nbytes == storage.nbytes else None
        return storage.key, start + first_byte, nbytes, NO_CRC if crc is None else crc


class TensorFields(Value, frozen=True, eq=False):
    """The fields of a `LazyTensor`, which makes its chunks when they are asked for."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...] | DeferredChunks
    source: Source
    traits: Traits = PLAIN_TRAITS
    position: Position | None = (
        None  # Where it lies, where its one chunk is made when somebody asks for it.
    )


_CHUNKS: MemberDescriptorType = vars(TensorFields)["chunks"]
set_tensor_name: Callable[[LazyTensor, str], None] = vars(TensorFields)["name"].__set__
"""For a tensor that is fresh from a format and was seen by nobody yet."""


class LazyTensor(TensorFields, frozen=True, eq=False):
    """A named, immutable description (dtype, shape, chunks) that slices to another description and reads when asked."""

    @property  # type: ignore[misc]  # no field, but read-only as one
    def chunks(self) -> tuple[Chunk, ...]:
        """Where its elements lie: boxes of the tensor in storages."""
        chunks: tuple[Chunk, ...] | DeferredChunks = _CHUNKS.__get__(self)
        if not isinstance(chunks, tuple):
            chunks = chunks.build()
            _CHUNKS.__set__(self, chunks)
        elif not chunks and self.position is not None:
            chunks = (self.position.strided_position().to_chunk(self.shape),)
            _CHUNKS.__set__(self, chunks)
        return chunks

    @property
    def has_deferred_chunks(self) -> bool:
        """Whether its chunks are many, and not made yet."""
        return not isinstance(_CHUNKS.__get__(self), tuple)

    @classmethod
    def contiguous(
        cls, name: str, dtype: DType, shape: tuple[int, ...], storage: Storage, source: Source
    ) -> LazyTensor:
        """A whole tensor in C order from the first byte of its storage on."""
        box, strides = _in_order(shape, dtype.bits)
        return cls(name, dtype, shape, (Chunk(box, storage, 0, strides),), source)

    def strided_position(self) -> StridedPosition | None:
        """Return where its elements lie, if it is one piece from its first element on.

        The pieces of a tensor in many pieces are not made for this.
        """
        if self.position is not None:
            return self.position.strided_position()
        chunks: tuple[Chunk, ...] | DeferredChunks = _CHUNKS.__get__(self)
        if not isinstance(chunks, tuple):
            return None
        # By its exact class: a chunk of another kind may not know its place before it is asked.
        if (
            len(chunks) != 1
            or type(chunks[0]) is not Chunk
            or chunks[0].box.stop != self.shape
            or any(chunks[0].box.start)
        ):
            return None
        return StridedPosition(chunks[0].storage, chunks[0].offset, chunks[0].strides)

    def file_range(self) -> FileRange | None:
        """The range of a file whose bytes are those of its array; None where there is none such."""
        traits, position = self.traits, self.position
        if traits is not PLAIN_TRAITS and (traits.conj or traits.neg or traits.meta):
            return None
        if position is not None:
            return position.file_range(self.dtype, self.shape)
        position = self.strided_position()
        if position is None:
            return None
        return position.file_range(self.dtype, self.shape)

    def __replace__(self, /, **changes: Any) -> LazyTensor:  # noqa: ANN401  # those of a tensor
        if changes.keys() <= {"name", "traits"}:
            name, traits = changes.get("name", self.name), changes.get("traits", self.traits)
            return LazyTensor(
                name,
                self.dtype,
                self.shape,
                _CHUNKS.__get__(self),
                self.source,
                traits,
                self.position,
            )
        # Whoever makes another tensor of this one says where that lies.
        fields = ("name", "dtype", "shape", "chunks", "source", "traits")
        return LazyTensor(
            **{name: getattr(self, name) for name in fields if name not in changes}, **changes
        )

    def __reduce__(self) -> tuple[object, ...]:
        return LazyTensor, (
            self.name,
            self.dtype,
            self.shape,
            self.chunks,
            self.source,
            self.traits,
        )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements it has (as numpy counts, not as torch's `size()`)."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements when packed without gaps."""
        return self.dtype.nbytes(self.size)

    @property
    def storages(self) -> tuple[Storage, ...]:
        """Where its chunks lie, each storage once."""
        return tuple(dict.fromkeys(chunk.storage for chunk in self.chunks))

    @property
    def shared_chunks(self) -> tuple[Chunk, ...]:
        """How it lies in what it shares with its aliases: its chunks, or those that it had before it was saved as a copy."""
        view = self.traits.alias
        if view is None:
            return self.chunks
        # Numbers below 0 are no places in a file: the storages that a file remembers are no others.
        storage = Storage(
            "", -1 - view.group, view.nbytes, label=f"shared/{view.group}", home=self.source.store
        )
        return (Chunk(Box.whole(self.shape), storage, view.offset, view.strides),)

    @property
    def shared_storages(self) -> tuple[Storage, ...]:
        """What it shares with its aliases: its storages, or the one that it was a view of before it was saved as a copy."""
        return tuple(dict.fromkeys(chunk.storage for chunk in self.shared_chunks))

    def numel(self) -> int:
        """How many elements it has, under torch's name."""
        return self.size

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __iter__(self) -> Iterator[LazyTensor]:
        """The rows, none of which is read."""
        if not self.shape:
            raise TypeError("iteration over a 0-d tensor; item() reads its value")
        return (self[at] for at in range(self.shape[0]))

    def __getitem__(self, index: object) -> LazyTensor:
        """A slice, as numpy's basic indexing; nothing is read."""
        traits = self.traits
        if traits is not PLAIN_TRAITS:
            traits = Traits(conj=traits.conj, neg=traits.neg, meta=traits.meta)
        current = self.strided_position()
        if current is not None:
            storage = current.storage
            shape, offset, strides, _ = resolve_index(
                self.shape, current.offset, current.strides, index
            )
            position = None if 0 in shape else StridedPosition(storage, offset, strides)
            return LazyTensor(self.name, self.dtype, shape, (), self.source, traits, position)

        shape, _, _, picks = resolve_index(self.shape, 0, self.shape, index)
        chunks: tuple[Chunk, ...] | DeferredChunks = _CHUNKS.__get__(self)
        if not isinstance(chunks, tuple):
            # Of eight thousand pieces a rank wants one or two.
            chunks = chunks.build(*_bounds(picks))
        return LazyTensor(
            self.name, self.dtype, shape, slice_chunks(picks, chunks), self.source, traits
        )

    def permute(self, *axes: int | Sequence[int]) -> LazyTensor:
        """A view with the dimensions in another order, given one by one or as a tuple; nothing is read."""
        given: Sequence[object] = (
            axes[0] if len(axes) == 1 and isinstance(axes[0], Sequence) else axes
        )
        try:
            order = [at + self.ndim if at < 0 else at for at in map(operator.index, given)]  # type: ignore[arg-type]  # the TypeError is the check
        except TypeError:
            order = [-1]
        if sorted(order) != list(range(self.ndim)):
            raise BadIndex(f"permute needs each of {self.ndim} dimensions once, got {axes}")

        def turn(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values[a] for a in order)

        chunks = tuple(
            Chunk(Box(turn(c.box.start), turn(c.box.stop)), c.storage, c.offset, turn(c.strides))
            for c in self.chunks
        )
        return replace(
            self,
            shape=turn(self.shape),
            chunks=chunks,
            traits=replace(self.traits, alias=None, blocks=None),
        )

    @property
    def T(self) -> LazyTensor:  # noqa: N802  # numpy's and torch's name
        """All dimensions reversed."""
        return self.permute(*reversed(range(self.ndim)))

    def renamed(self, name: str) -> LazyTensor:
        """This tensor under another name."""
        # Nothing but the name differs, so one that has no chunks yet needs none now.
        return LazyTensor(
            name,
            self.dtype,
            self.shape,
            _CHUNKS.__get__(self),
            self.source,
            self.traits,
            self.position,
        )

    def numpy(self) -> np.ndarray:
        """The elements as an array: over mapped memory where the checkpoint is mapped and the layout allows, else read."""
        view = self.source.view(self) if self.source.mapped else None
        return self.source.arrays([self])[0] if view is None else view

    def read(self, *, out: np.ndarray | None = None) -> np.ndarray:
        """Read the elements into a fresh array, or into `out` (same shape and dtype; any strides), which is returned."""
        if out is None:
            return self.source.arrays([self])[0]
        if not isinstance(out, np.ndarray):
            raise BadTarget(
                f"out= must be a numpy array, not {type(out).__name__}", tensor=self.name
            )
        if out.shape != self.shape or out.dtype != self.dtype.numpy or not out.flags.writeable:
            given = f"{'a' if out.flags.writeable else 'a read-only'} {out.dtype} array of shape {out.shape}"
            message = f"out= must be a writable {self.dtype.numpy} array of shape {self.shape}, not {given}"
            expected, found = (self.shape, self.dtype.numpy), (out.shape, out.dtype)
            raise BadTarget(message, tensor=self.name, expected=expected, found=found)
        self.source.read([Request(self, out)])
        return out

    def item(self) -> bool | int | float | complex:
        """The one element of a tensor that has one, as a number of Python's; reads it."""
        if self.size != 1:
            raise BadArgument(
                f"item() is for tensors of one element, and this one has {self.size:,}",
                tensor=self.name,
            )
        (value,) = np.asarray(self.tolist(), dtype=object).reshape(-1)
        return value  # type: ignore[no-any-return]  # a number, as `tolist` gives them

    def tolist(self) -> AnyValue:
        """The elements as numbers of Python's in nested lists, or as one number; reads them."""
        array = self.numpy()
        if self.dtype.kind == "other" or (self.dtype.packed and self.dtype.kind == "quantized"):
            raise Unsupported(
                f"{self.dtype} has no numbers; numpy() gives the bytes", tensor=self.name
            )
        if array.dtype.names:
            # A pair of halves, which numpy has no complex numbers of.
            array = array["real"].astype(np.float32) + 1j * array["imag"].astype(np.float32)
        # What numpy lacks (bfloat16) comes as objects of its own, which float32 holds exactly.
        return (array.astype(np.float32) if array.dtype.kind == "V" else array).tolist()

    def __float__(self) -> float:
        return float(self.item())  # type: ignore[arg-type]  # of a complex number Python says what is wrong

    def __int__(self) -> int:
        return int(self.item())  # type: ignore[arg-type]  # the same

    def __complex__(self) -> complex:
        return complex(self.item())

    def __format__(self, spec: str) -> str:
        """As its one element, where it is to be written in some way: f"{ckpt['loss']:.3f}"."""
        return format(self.item(), spec) if spec else repr(self)

    def __bool__(self) -> bool:
        """Of one element, whether it is other than zero; of more, that is no question, as in numpy and torch."""
        if self.size != 1:
            message = f"whether {self.size:,} elements are true is no question; ask one (item()), or for None"
            raise BadArgument(message, tensor=self.name)
        return bool(self.item())

    def __getattr__(self, name: str) -> NoReturn:
        """What arrays have and a description has not: `mean`, `to`, `cuda`. The message says how to."""
        raise AttributeError(
            f"a lazy tensor has no {name!r}, since it is described and not read: tensor.numpy() and tensor.torch() read it",
            name=name, obj=self,
        )  # fmt: skip

    def digest(self) -> Digest:
        """What the tensor holds, in a few bytes; nothing is read where the file records the checksum of exactly its bytes."""
        crc = None if self.traits.meta else self.source.digest([self])[0]
        return Digest.from_crc32(self.dtype, self.shape, crc)

    def empty(self) -> np.ndarray:
        """A fresh array that can hold the elements; refused where an expanded view would cost more than was stored."""
        self.check_expansion()
        if self.traits.meta:
            raise Unsupported(
                "this tensor was saved on the meta device: it has a shape and no data",
                tensor=self.name,
            )
        return np.empty(self.shape, self.dtype.numpy)

    def check_expansion(self) -> None:
        """Raise `LimitExceeded` where this is an expanded view whose elements are many more than were stored."""
        nbytes, limits = self.size * self.dtype.numpy.itemsize, self.source.limits
        stored = sum(storage.nbytes for storage in self.storages)
        allowed = max(limits.expansion * stored, limits.expansion_floor_nbytes)
        # Packed elements take a byte each in memory: at most four to the stored byte.
        if nbytes > allowed * (8 // min(self.dtype.bits, 8)) and not self.traits.meta:
            advice = "this is an expanded view; slice it, or raise Limits(expansion=…)"
            message = f"reading {nbytes:,} bytes out of {stored:,} stored ones: {advice}"
            raise LimitExceeded(message, tensor=self.name, expected=allowed, found=nbytes)

    def __array__(
        self, dtype: np.dtype[np.generic] | None = None, copy: bool | None = None
    ) -> np.ndarray:
        """What `np.asarray` calls. Reading makes the copy, so `copy=False` works over mapped memory alone, as numpy asks."""
        view = self.source.view(self)
        same = dtype is None or dtype == self.dtype.numpy
        if copy is False and (view is None or not same):
            raise ValueError(
                "this tensor cannot be an array without a copy; open with mmap=True, or leave copy=False away"
            )
        array = view if view is not None else self.read()
        if not same:
            return array.astype(dtype)
        return array.copy() if copy and view is not None else array

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: object = None,
        dl_device: object = None,
        copy: object = None,
    ) -> object:
        """What `torch.as_tensor` and `torch.tensor` call: the elements, read, in the memory of the CPU."""
        if "torch" in sys.modules:
            # It has dtypes that numpy lacks.
            return self.torch().detach().__dlpack__()
        return self.read().__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        """The CPU, to which elements are read."""
        return (1, 0)

    def torch(self) -> torch.Tensor:
        """The elements as a torch tensor; imports torch, which is the one thing here that needs it."""
        return cast("torch.Tensor", find_hook("tensor_from_lazy")(self))

    def __copy__(self) -> LazyTensor:
        return self

    def __deepcopy__(self, memo: object) -> LazyTensor:
        """Itself: a description is never changed. Pickled, it travels with its source, which says how (`Source`)."""
        return self

    def _repr_html_(self) -> str:
        from holdfast.core.notebook import render_card
        from holdfast.core.text import format_nbytes

        files = list(dict.fromkeys(storage.key for storage in self.storages))
        place = ", ".join(files[:3]) + (", …" if len(files) > 3 else "")
        facts = [
            ("dtype", self.dtype.name),
            ("shape", str(list(self.shape))),
            ("elements", f"{self.size:,}"),
        ]
        facts += [
            ("size", format_nbytes(self.nbytes)),
            *([("blocks", self.traits.blocks)] if self.traits.blocks is not None else []),
        ]
        facts.append(("no data", "meta device") if self.traits.meta else ("in", place))
        return render_card(self.name, facts)

    def __repr__(self) -> str:
        return f"<LazyTensor {self.name!r} {self.dtype} {list(self.shape)}>"


# Slices. A program that gathers rows takes ten thousand of them, and each is an offset that moved. So an index is a list of plain
# tuples, and dimensions behind those that it names are not looked at.

Pick = tuple[
    int, int, int
]  # What is taken of a dimension: the first coordinate, the step to the next, and how many.
TAKEN = -1  # In the place of their number: one, and the dimension goes.
NEW_AXIS: Pick = (
    0,
    0,
    1,
)  # A dimension of length 1 that the tensor does not have. No dimension that is there has a step of 0.

Slice = tuple[tuple[int, ...], int, tuple[int, ...], list[Pick]]
"""Its shape; where it begins and its strides, of a tensor in one piece; and what it takes of the dimensions."""


def resolve_index(
    shape: tuple[int, ...], offset: int, strides: tuple[int, ...], index: object
) -> Slice:
    """Check an index against a shape, as numpy would, and follow it.

    What is taken is said of the first dimensions, and of new ones. All others are whole.

    >>> resolve_index((4, 5), 0, (40, 8), (slice(1, 3), -1))
    ((2,), 72, (40,), [(1, 1, 2), (4, 0, -1)])
    >>> resolve_index((4, 5), 0, (40, 8), (..., None, slice(None, None, -2)))
    ((4, 1, 3), 32, (40, 0, -16), [(0, 1, 4), (0, 0, 1), (4, -2, 3)])

    Advanced indexing (arrays, booleans) would gather single elements: it is refused with advice.
    """
    parts = index if type(index) is tuple else (index,)
    if len(parts) > len(shape):
        used = sum(1 for part in parts if part is not None and part is not Ellipsis)
        if used > len(shape):
            raise BadIndex(
                f"too many indices: the tensor has {len(shape)} dimensions, but {used} were indexed"
            )
    picks: list[Pick] = []
    left: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    dim = 0
    for part in parts:
        if part is None:
            picks.append(NEW_AXIS)
            left, steps = (*left, 1), (*steps, 0)
            continue
        if part is Ellipsis:
            if sum(1 for one in parts if one is Ellipsis) > 1:
                raise BadIndex("an index can only have a single ellipsis ('...')")
            after = (
                dim
                + len(shape)
                - sum(1 for one in parts if one is not None and one is not Ellipsis)
            )
            picks += [(0, 1, length) for length in shape[dim:after]]
            left, steps, dim = (*left, *shape[dim:after]), (*steps, *strides[dim:after]), after
            continue
        stride = strides[dim]
        start, step, count = pick = _pick(part, shape[dim], dim)
        offset += start * stride
        if count != TAKEN:
            left, steps = (*left, count), (*steps, step * stride)
        picks.append(pick)
        dim += 1
    return (*left, *shape[dim:]), offset, (*steps, *strides[dim:]), picks


def _pick(part: object, length: int, dim: int) -> Pick:
    if type(part) is int and 0 <= part < length:
        return part, 0, TAKEN
    if isinstance(part, slice):
        first, last = part.start, part.stop
        if (
            part.step is None
            and type(first) is int
            and type(last) is int
            and 0 <= first < last <= length
        ):
            return first, 1, last - first
        try:
            start, stop, step = part.indices(length)
        except (TypeError, ValueError) as error:
            raise BadIndex(f"bad slice in dimension {dim}: {error}") from None
        return start, step, len(range(start, stop, step))
    # A bool is an int to Python and a mask to numpy; here it is neither.
    if not isinstance(part, bool):
        try:
            at = operator.index(part)  # type: ignore[arg-type]  # anything with __index__; the TypeError is the check
        except TypeError:
            pass
        else:
            if not -length <= at < length:
                raise BadIndex(
                    f"index {at} is out of bounds for dimension {dim} with size {length}"
                )
            return at % length, 0, TAKEN
    raise BadIndex(
        f"a lazy tensor takes integers, slices, ... and None, not {type(part).__name__}; "
        "read it first (tensor.numpy()) and index the array"
    )


def _bounds(picks: Sequence[Pick]) -> tuple[list[int], list[int]]:
    """The lowest and the highest corner of what is picked."""
    ends = [
        (start, start + step * max(count - 1, 0))
        for start, step, count in picks
        if step or count == TAKEN
    ]
    return [min(pair) for pair in ends], [max(pair) + 1 for pair in ends]


def slice_chunks(picks: Sequence[Pick], chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """The chunks of a slice, in its coordinates; chunks that the index misses are left out."""
    found: list[Chunk] = []
    for chunk in chunks:
        box, dim, offset = chunk.box, 0, chunk.offset
        starts: list[int] = []
        stops: list[int] = []
        strides: list[int] = []
        for pick in picks:
            start, step, count = pick
            if pick is NEW_AXIS:
                starts, stops, strides = [*starts, 0], [*stops, 1], [*strides, 0]
                continue
            low, high, stride = box.start[dim], box.stop[dim], chunk.strides[dim]
            dim += 1
            if count == TAKEN:
                if not low <= start < high:
                    break
                offset += (start - low) * stride
                continue
            first, last = _overlap(pick, low, high)
            if first >= last:
                break
            offset += (start + first * step - low) * stride
            starts, stops, strides = [*starts, first], [*stops, last], [*strides, stride * step]
        else:
            left = Box((*starts, *box.start[dim:]), (*stops, *box.stop[dim:]))
            if left.count:
                found.append(Chunk(left, chunk.storage, offset, (*strides, *chunk.strides[dim:])))
    return tuple(found)


def _overlap(pick: Pick, low: int, high: int) -> tuple[int, int]:
    """The positions i of a pick whose coordinate `start + i·step` lies in [low, high), as a half-open range."""
    start, step, count = pick
    if step > 0:
        first = -((start - low) // step)
        last = -((start - high) // step)
    else:
        first = -((high - 1 - start) // -step)
        last = (start - low) // -step + 1
    return max(first, 0), min(last, count)
