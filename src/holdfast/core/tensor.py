"""`LazyTensor`: a tensor that is described and not read.

Slicing, transposing and looking at one are arithmetic. `numpy()`, `torch()`, `np.asarray` and `read(out=…)` move bytes, and only
the bytes that are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.digest import Digest
from holdfast.core.dtype import DType
from holdfast.core.index import select
from holdfast.core.opaque import Global
from holdfast.core.protocols import Request, Source
from holdfast.errors import BadIndex, BadTarget, LimitExceeded, Unsupported

if TYPE_CHECKING:
    import torch

__all__ = ["AliasView", "LazyTensor", "Traits"]


@dataclass(frozen=True, slots=True)
class AliasView:
    """The storage that a tensor shared with others before it was saved in a format that copies each of them.

    Counted in bits, as in a `Chunk`: `Chunk(Box.whole(shape), storage, view.offset, view.strides)` is the view again.
    """

    group: int
    """Number of the storage; tensors of one source with the same number shared it."""
    nbytes: int
    """How long that storage was. Bytes that no tensor covers were not kept."""
    offset: int
    """Bit of the storage where the tensor's first element lay."""
    strides: tuple[int, ...]
    """Bits from one element to the next, a dimension each; never negative."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What torch knows of a tensor beyond its elements."""

    requires_grad: bool = False
    parameter: bool = False
    """It was an `nn.Parameter`."""
    buffer: bool = False
    """It was an `nn.Buffer`."""
    conj: bool = False
    """The stored elements are the complex conjugates of the tensor's."""
    neg: bool = False
    """The stored elements are the negatives of the tensor's."""
    meta: bool = False
    """It has a shape and no data."""
    subclass: Global | None = None
    """The class of a tensor subclass, which was not built."""
    state: object = None
    """Attributes that were saved with it."""
    alias: AliasView | None = None
    """Where it lay when it shared its storage, in a file whose format stores every tensor by itself."""


PLAIN = Traits()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LazyTensor:
    """A named, immutable description (dtype, shape, chunks) that slices to another description and reads when asked."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    source: Source
    traits: Traits = PLAIN

    @classmethod
    def contiguous(cls, name: str, dtype: DType, shape: tuple[int, ...], storage: Storage, source: Source) -> LazyTensor:
        """A whole tensor in C order from the first byte of its storage on."""
        chunk = Chunk(Box.whole(shape), storage, 0, c_strides(shape, dtype.bits))
        return cls(name, dtype, shape, (chunk,), source)

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
        storage = Storage("", -1 - view.group, view.nbytes, label=f"shared/{view.group}", home=self.source.store)
        return (Chunk(Box.whole(self.shape), storage, view.offset, view.strides),)

    @property
    def shared_storages(self) -> tuple[Storage, ...]:
        """What it shares with its aliases: its storages, or the one that it was a view of before it was saved as a copy."""
        return tuple(dict.fromkeys(chunk.storage for chunk in self.shared_chunks))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __getitem__(self, index: object) -> LazyTensor:
        """A slice, as numpy's basic indexing; nothing is read."""
        selection = select(self.shape, index)
        traits = Traits(conj=self.traits.conj, neg=self.traits.neg, meta=self.traits.meta)
        return LazyTensor(self.name, self.dtype, selection.shape, selection.apply(self.chunks), self.source, traits)

    def permute(self, *axes: int) -> LazyTensor:
        """The same elements with the dimensions in another order; nothing is read."""
        order = [a + self.ndim if a < 0 else a for a in axes]
        if sorted(order) != list(range(self.ndim)):
            raise BadIndex(f"permute needs each of {self.ndim} dimensions once, got {axes}")

        def turn(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values[a] for a in order)

        chunks = tuple(Chunk(Box(turn(c.box.start), turn(c.box.stop)), c.storage, c.offset, turn(c.strides)) for c in self.chunks)
        return replace(self, shape=turn(self.shape), chunks=chunks, traits=replace(self.traits, alias=None))

    @property
    def T(self) -> LazyTensor:  # noqa: N802  # numpy's and torch's name
        """All dimensions reversed."""
        return self.permute(*reversed(range(self.ndim)))

    def renamed(self, name: str) -> LazyTensor:
        """The same tensor under another name."""
        return replace(self, name=name)

    def numpy(self) -> np.ndarray:
        """The elements as an array: over mapped memory where the checkpoint is mapped and the layout allows, else read."""
        view = self.source.view(self)
        if view is not None:
            return view
        out = self.empty()
        self.source.read([Request(self, out)])
        return out

    def read(self, *, out: np.ndarray | None = None) -> np.ndarray:
        """Read the elements into a fresh array, or into `out` (same shape and dtype; any strides), which is returned."""
        if out is None:
            out = self.empty()
        elif not isinstance(out, np.ndarray):
            raise BadTarget(f"out= must be a numpy array, not {type(out).__name__}", tensor=self.name)
        elif out.shape != self.shape or out.dtype != self.dtype.numpy or not out.flags.writeable:
            raise BadTarget(
                f"out= must be a writable {self.dtype.numpy} array of shape {self.shape}, "
                f"not {'a' if out.flags.writeable else 'a read-only'} {out.dtype} array of shape {out.shape}",
                tensor=self.name,
                expected=(self.shape, self.dtype.numpy),
                found=(out.shape, out.dtype),
            )
        self.source.read([Request(self, out)])
        return out

    def digest(self) -> Digest:
        """What the tensor holds, in a few bytes; nothing is read where the file records the checksum of exactly its bytes."""
        crc = None if self.traits.meta else self.source.digest([self])[0]
        return Digest.of(self.dtype, self.shape, crc)

    def empty(self) -> np.ndarray:
        """A fresh array that can hold the elements; refused where an expanded view would cost more than was stored."""
        self.check_expansion()
        if self.traits.meta:
            raise Unsupported("this tensor was saved on the meta device: it has a shape and no data", tensor=self.name)
        return np.empty(self.shape, self.dtype.numpy)

    def check_expansion(self) -> None:
        """Raise `LimitExceeded` where this is an expanded view whose elements are many more than were stored."""
        nbytes = self.size * self.dtype.numpy.itemsize
        limits = self.source.limits
        allowed = max(limits.expansion * sum(s.nbytes for s in self.storages), limits.expansion_floor_nbytes)
        # Packed elements take a byte each in memory: at most four to the stored byte.
        if nbytes > allowed * (8 // min(self.dtype.bits, 8)) and not self.traits.meta:
            raise LimitExceeded(
                f"reading {nbytes:,} bytes out of {sum(s.nbytes for s in self.storages):,} stored ones: this is an expanded "
                "view; slice it, or open with Limits(expansion=…)",
                tensor=self.name,
                expected=allowed,
                found=nbytes,
            )

    def __array__(self, dtype: np.dtype[np.generic] | None = None, copy: bool | None = None) -> np.ndarray:
        """What `np.asarray` calls. Reading makes the copy, so `copy=False` works over mapped memory alone, as numpy asks."""
        view = self.source.view(self)
        same = dtype is None or dtype == self.dtype.numpy
        if copy is False and (view is None or not same):
            raise ValueError("this tensor cannot be an array without a copy; open with mmap=True, or leave copy=False away")
        array = view if view is not None else self.read()
        if not same:
            return array.astype(dtype)
        return array.copy() if copy and view is not None else array

    def torch(self) -> torch.Tensor:
        """The elements as a torch tensor; imports torch, which is the one thing here that needs it."""
        from holdfast.torch.tensors.from_lazy import tensor_from_lazy

        return tensor_from_lazy(self)

    def __copy__(self) -> LazyTensor:
        return self

    def __deepcopy__(self, memo: object) -> LazyTensor:
        """Itself: a description is never changed. Pickled, it travels with its source, which says how (`Source`)."""
        return self

    def __repr__(self) -> str:
        return f"<LazyTensor {self.name!r} {self.dtype} {list(self.shape)}>"
