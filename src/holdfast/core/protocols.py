"""The seams between layers: what a store, a source and a format must offer.

A `Store` holds bytes under keys. A `Source` is a store opened for reading, with the limits that hold for it and the engine that
moves its bytes. A `Format` turns a source into a `Description`, reading headers, indexes and pickles and never tensor data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from holdfast.core.limits import Limits
from holdfast.core.opaque import Global
from holdfast.errors import Corrupted

if TYPE_CHECKING:
    from holdfast.core.dtype import DType
    from holdfast.core.tensor import LazyTensor

__all__ = ["Description", "Foreign", "Format", "Gathering", "Outlined", "Request", "Source", "State", "Store"]


class Store(Protocol):
    """A place where bytes live under keys. Methods may be called from several threads at once."""

    @property
    def name(self) -> str:
        """What a person would call it: the path that was opened."""

    def list(self) -> Sequence[str]:
        """Every key, sorted."""

    def size(self, key: str) -> int:
        """Bytes under a key. Raises `StoreError` where there is no such key."""

    def read(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on. Raises `Truncated` where they end too early."""

    def map(self, key: str) -> memoryview | None:
        """The bytes under a key as memory that needs no reading, or None where this store cannot do that."""

    def close(self) -> None:
        """Give back what the store holds. Reading afterwards raises `Closed`."""


@runtime_checkable
class Gathering(Protocol):
    """What a store may offer besides: many short ranges at once."""

    def gather(self, key: str, starts: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> int:
        """Copy ranges under a key to addresses in memory. How many were copied, from the first on; the others are to be read."""


@runtime_checkable
class Outlined(Protocol):
    """What a mapping of lazy tensors may offer besides: what one looks like, without making it."""

    def outline(self, name: str) -> tuple[DType, tuple[int, ...]]:
        """Its dtype and shape."""


@dataclass(frozen=True, slots=True)
class Request:
    """Fill `out` (of the tensor's shape and numpy dtype, writable, any strides) with a tensor's elements."""

    tensor: LazyTensor
    out: np.ndarray


class Source(Protocol):
    """A store that is open for reading, under limits."""

    @property
    def store(self) -> Store:
        """Where the bytes are."""

    @property
    def limits(self) -> Limits:
        """What a file may cost."""

    @property
    def mapped(self) -> bool:
        """Whether arrays are views of mapped memory."""

    def over(self, store: Store) -> Source:
        """A source like this one that reads from another store: one that has more files, or other content in them."""

    def bytes(self, key: str, start: int, stop: int) -> bytes:
        """A small range, for headers and pickles: at once, on this thread. Raises `Truncated` past the end."""

    def read(self, requests: Sequence[Request]) -> None:
        """Fill every request, in parallel; the first failure cancels the rest and is raised."""

    def view(self, tensor: LazyTensor) -> np.ndarray | None:
        """The tensor as an array over mapped memory, or None where that cannot be (not mapped, split, packed, swapped)."""

    def digest(self, tensors: Sequence[LazyTensor]) -> list[int]:
        """The CRC-32 of each tensor's elements: as the file records it where it does, else by reading, in parallel."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A global that a pickle mentioned and that was not built, with every way in which it was used."""

    what: Global
    uses: tuple[str, ...]
    """`mention`, `call`, `new`, `build`: what the stream did with it, sorted."""
    offset: int
    """Byte of the pickle where it is mentioned first."""
    stream: str
    """Which pickle: `data.pkl`, `stream 4`."""
    paths: tuple[str, ...] = ()
    """Places in the tree where objects of it are, a few at most."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a format found: everything but the tensor data."""

    format: str
    """The format's name: `torch-zip`, `safetensors`, …"""

    tensors: Mapping[str, LazyTensor]
    """Every tensor under its dotted name, in the order of the file."""

    tree: object
    """The whole nested state, with `LazyTensor` leaves and `Opaque` nodes."""

    foreign: tuple[Foreign, ...] = ()
    """Globals that were not built."""

    notes: tuple[str, ...] = ()
    """Sentences for people: what is odd about this file."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    """Text that the file carries about itself (safetensors `__metadata__`, torch's version records)."""

    changed: tuple[Corrupted, ...] = ()
    """What is not as it was written, and is no reason to refuse the rest: another program's edit, or damage. For `verify`."""


@dataclass(frozen=True, slots=True)
class State:
    """What is to be saved: the same two views of it that a `Description` gives, made by `api.state.describe_state`."""

    tree: object
    """The nested state; every tensor in it is a `LazyTensor` (or a `Composite` of them), whatever it was before."""

    tensors: Mapping[str, LazyTensor]
    """Every tensor under its dotted name. Two names with one storage are aliases."""

    paths: Mapping[str, tuple[str | int, ...]]
    """Where each name is in the tree."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    """Text to be kept with it (safetensors `__metadata__`)."""

    notes: tuple[str, ...] = ()
    """What the tensors of the caller are, and no format is told of."""


class Format(Protocol):
    """One on-disk layout."""

    @property
    def name(self) -> str:
        """A short name: `torch-zip`, `safetensors`."""

    def matches(self, source: Source) -> bool:
        """Whether the content (never the suffix) begins like this format. Cheap, and raises nothing on bad content."""

    def describe(self, source: Source) -> Description:
        """Read headers, indexes and pickles; check everything. Raises only Holdfast errors."""
