"""Tensors of a table in a torch pickle: what is common to all of a kind, and the bytes that they are written by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct, field

from holdfast.core.arrays import Ints
from holdfast.core.dtype import DType
from holdfast.core.table import Kind
from holdfast.core.tensor import PLAIN, Traits
from holdfast.core.value import Value


class Template(Struct, eq=False):
    """The opcodes of tensors of a kind, and those that were written by them."""

    before: bytes
    """Up to the key of the storage."""
    behind: bytes
    """From there on."""
    holes: Ints
    """Where in `behind` the numbers of the memo stand; they follow each other."""
    count: int
    """How many."""
    pieces: list[int] = field(default_factory=list)
    """Of each tensor, which of the writer's pieces is the one with the numbers."""
    numbers: list[int] = field(default_factory=list)
    """Of each tensor, the first of them."""


def fill_in(content: bytearray, made: Sequence[Template], at: Ints, numbers: Ints) -> None:
    """Fill in the memo's numbers of tensors whose `behind` begins there, from the first number of each on."""
    counts = np.array([template.count for template in made], np.int64)
    holes = np.repeat(at, counts) + np.concatenate([template.holes for template in made])
    within = np.arange(len(holes)) - np.repeat(np.cumsum(counts) - counts, counts)
    filled = (np.repeat(numbers, counts) + within).astype("<u4").view(np.uint8).reshape(-1, 4)
    np.frombuffer(content, np.uint8)[holes[:, None] + np.arange(4)] = filled


class PickledKind(Struct, eq=False):
    """What the pickle says of all tensors of a kind, where that is known beforehand."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    offset: int
    """In elements, from the begin of the record."""
    count: int
    """Elements of the record; bytes, for dtypes whose storage has none."""
    requires_grad: bool
    parameter: bool
    location: str
    new: Template | None = None
    """For tensors whose record is new."""
    known: Template | None = None
    """The same where it is not."""

    @classmethod
    def of(cls, kind: Kind) -> PickledKind | None:
        """None for tensors that are more than their elements, or none of torch's: each is written, or refused, by itself."""
        dtype, traits = kind.dtype, kind.traits
        bits = dtype.bits
        if not is_simple(traits) or dtype.torch is None or dtype.packed or dtype.kind == "quantized":
            return None
        strides = tuple([stride // bits for stride in kind.strides])
        count = kind.storage_nbytes if dtype.storage is None else kind.storage_nbytes * 8 // bits
        return cls(
            dtype, kind.shape, strides, kind.offset // bits, count, traits.requires_grad, traits.parameter, kind.location or "cpu"
        )


def is_simple(traits: Traits) -> bool:
    """Whether a tensor is nothing beyond its elements but a Parameter, or one that wants a gradient."""
    if traits is PLAIN:
        return True
    odd = traits.meta or traits.conj or traits.neg or traits.buffer
    return not odd and traits.state is None and traits.subclass is None


class PickledRows(Value, frozen=True, eq=False):
    """The tensors of a tree that are rows of a table: they are written by templates of their kinds."""

    values: Sequence[object]
    """What stands in the tree, in the order in which a pickle meets it. None of them is there twice."""
    kinds: Sequence[Kind]
    kind: Sequence[int]
    """Of each, a position in `kinds`."""
    storage: Sequence[int]
    """Of each, the number of its storage; `ODD` where `described` gives a lazy tensor to write."""
    types: frozenset[type]
    """Of the values."""
    described: Callable[[object], object]
    """What is written for an odd value, or for one of another type that is none of the pickle's; others are given back."""
    others: frozenset[type] = frozenset()
    """Types of values that are no rows, and of which `described` may make something."""


NO_ROWS = PickledRows((), (), (), (), frozenset(), lambda value: value)
