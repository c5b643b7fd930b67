"""What the layers of Holdfast expect of each other: stores, sources, and what formats return.

A `Store` has bytes under keys: a directory, a bucket, memory. A `Source` is a store that is open for
reading, with limits. A format turns a source into a `Description`: it reads headers, indexes and
pickles, and never the data of tensors. A `State` is what a caller saves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import numpy as np
from msgspec import field

from holdfast.core.limits import Limits
from holdfast.core.opaque import Global
from holdfast.core.value import Value
from holdfast.errors import Corrupted

if TYPE_CHECKING:
    from holdfast.core.leaves import Leaves
    from holdfast.core.placement_rules import PlacementRule
    from holdfast.core.table import ContiguousRows, Table
    from holdfast.core.tensor import LazyTensor
else:
    # `help()` evaluates the annotations of a struct, so each name needs a value. The modules above
    # import this one and cannot be imported here.
    Leaves = LazyTensor = Table = object

Stamp = tuple[object, ...]
"""Identifies a version of the content: size and modification time of a file, ETag of an object.

It has plain values that JSON can store. It is empty if a store cannot identify versions."""


class ReadProfile(Value, frozen=True):
    """Describes how the bytes of a store are best read. The defaults are for a local file."""

    is_in_memory: bool = False
    """Whether the bytes are in the memory of this process, where `Store.map` returns them."""
    block_nbytes: int = 0
    """The preferred size of a read, for a GPU or a network. 0 if the reader may choose it."""
    is_sequential: bool = False
    """Whether one thread has to read front to back. Going back may mean to start over."""
    is_exact: bool = False
    """Whether a read must not contain bytes that nobody asked for. They may be zeros, although a
    read that asks for them would return their content."""
    request_count: int = 0
    """How many reads should run at once, because each waits for a network. 0 for a local store."""

    @property
    def is_file(self) -> bool:
        """Whether one system call can read any range at any time."""
        is_remote = bool(self.block_nbytes or self.request_count)
        return not (self.is_in_memory or self.is_sequential or is_remote)


FILE_PROFILE = ReadProfile()
"""The profile of a local file."""


class Store:
    """The base class of stores, which have bytes under keys.

    Other code never checks the class of a store. It calls the methods of this class, whose defaults
    are those of a file that never changes. Several threads may call methods at once.
    """

    name: str
    """The path or URL that the user opened."""
    read_profile: ReadProfile = FILE_PROFILE
    index: str = ""
    """The index file of a Hugging Face folder, if the user opened that file. Otherwise empty."""
    reading: Callable[[], AbstractContextManager[None]] = nullcontext
    """Opens a context for many reads. A store can postpone work after a read to the end of it."""

    @property
    def is_gone(self) -> bool:
        """Whether a file disappeared that was there before, so that results are not reliable."""
        return False

    @property
    def is_folder(self) -> bool:
        """Whether this is a directory, even if it has only one file."""
        return False

    @property
    def single_key(self) -> str | None:
        """The only key. None if there are several keys, or none."""
        keys = self.list()
        return keys[0] if len(keys) == 1 else None

    def get_folder_store(self) -> Store | None:
        """Return the folder that contains a single file, for formats that use its other files.

        Closing this store closes the folder as well.

        Returns:
            The folder. This store itself, if it is a folder. None if the folder is not known.
        """
        return self if self.is_folder else None

    def has_key(self, key: str) -> bool:
        """Return whether a key exists. In an object store this is cheaper than a listing."""
        return key in self.list()

    def expect_size(self, key: str, nbytes: int) -> bool:
        """Record the size that an index states for a key.

        Returns:
            True if the store will compare it when the key is first read. False if the caller has to
            compare it with `size`.
        """
        return False

    def can_read_sibling(self, key: str) -> bool:
        """Return whether a key in a folder beside this one can be read.

        Checkpoints in a bucket share files through such keys (`core.keys.parse_sibling_key`),
        because objects cannot have a second name like files.
        """
        return False

    def list(self) -> Sequence[str]:
        """Return all keys, sorted."""
        raise NotImplementedError

    def size(self, key: str) -> int:
        """Return the number of bytes under a key. Raises `StoreError` if it does not exist."""
        raise NotImplementedError

    def read(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on. Raises `Truncated` if there are too few."""
        raise NotImplementedError

    def peek(self, key: str, start: int, out: memoryview) -> None:
        """Read a few bytes of a header, an index or a pickle.

        As `read`. A store may read more and keep it, because bytes close to these follow.
        """
        self.read(key, start, out)

    def map(self, key: str) -> memoryview | None:
        """Return the bytes under a key as memory. None if this store cannot map them."""
        return None

    def stamp(self, key: str) -> Stamp:
        """Return what identifies the content under a key when it was opened."""
        return ()

    def find_changed(self) -> Sequence[str]:
        """Return the keys whose content is known to have changed since it was opened."""
        return ()

    def find_replaced(self) -> Sequence[str]:
        """Return the keys whose path no longer leads to the file that was opened.

        Reading is not affected, because an open file outlives its name. But a save to the same place
        would overwrite whatever has the path now. `find_changed` of an object store covers both.
        """
        return ()

    def identity(self, key: str = "") -> Hashable:
        """Return a value that is equal for two stores with the same bytes under a key.

        Without a key, the value stands for the whole store.
        """
        return "store", id(self), key

    def get_underlying_store(self, key: str) -> Store | None:
        """Return the store that has the content of a key, if this one only passes it on."""
        return None

    def count_read_nbytes(self, key: str, nbytes: int) -> int:
        """Return how many bytes are read for this many bytes of a key.

        The numbers differ if the content is computed from other bytes, such as compressed ones.
        """
        return nbytes

    def close(self) -> None:
        """Release files and connections. Reading raises `Closed` from then on."""


class Request(Value, frozen=True):
    """Asks a source to fill an array with the elements of a tensor."""

    tensor: LazyTensor
    out: np.ndarray
    """A writable array with the shape and the numpy dtype of the tensor, and with any strides."""


def group_by_source(requests: Iterable[Request]) -> dict[Source, list[Request]]:
    """Group requests by their sources, so that each source can read its tensors together."""
    requests_by_source: dict[Source, list[Request]] = {}
    for request in requests:
        requests_by_source.setdefault(request.tensor.source, []).append(request)
    return requests_by_source


Content = bytes
"""The type `bytes`, for annotations in `Source`, where `bytes` is a method."""


class Source(Protocol):
    """A store that is open for reading, with limits. It reads tensors with several threads."""

    @property
    def store(self) -> Store:
        """The store that has the bytes."""

    @property
    def limits(self) -> Limits:
        """How much memory and time a file may cost."""

    @property
    def rules(self) -> Sequence[str | PlacementRule]:
        """How tensors were sharded, by their names (`open(…, rules=…)`).

        A format needs them if its files do not record this.
        """

    @property
    def mapped(self) -> bool:
        """Whether arrays are views of mapped files, and not copies."""

    def with_store(self, store: Store) -> Source:
        """Return a source with the same settings that reads from another store."""

    def bytes(self, key: str, start: int, stop: int) -> bytes:
        """Read a small range, such as a header, on this thread. Raises `Truncated` past the end."""

    def read_head(self, key: str, nbytes: int) -> Content:
        """Read the first bytes of a file, at most `nbytes`. Formats are detected by them."""

    def read(self, requests: Sequence[Request]) -> None:
        """Fill all requests in parallel. The first error cancels the others and is raised."""

    def arrays(self, tensors: Sequence[LazyTensor]) -> list[np.ndarray]:
        """Read tensors into new arrays."""

    def read_rows(
        self, rows: ContiguousRows, make_tensor: Callable[[int], LazyTensor]
    ) -> list[np.ndarray]:
        """Read contiguous rows of a table into new arrays.

        Args:
            rows: The rows.
            make_tensor: Returns the lazy tensor at an index of `rows`. It is called for errors.
        """

    def lend(self, tensor: LazyTensor) -> AbstractContextManager[memoryview]:
        """Open a context with the bytes of a tensor in C order, little-endian and packed."""

    def view(self, tensor: LazyTensor) -> np.ndarray | None:
        """Return a tensor as an array over mapped memory, without a copy.

        None if that is impossible: the file is not mapped, or the tensor is split, packed or in the
        other byte order.
        """

    def digest(self, tensors: Sequence[LazyTensor]) -> list[int]:
        """Return the CRC-32 of the elements of each tensor.

        Checksums that a file records are not computed. The other tensors are read in parallel.
        """


class Foreign(Value, frozen=True):
    """A global that a pickle mentions and that Holdfast does not import."""

    what: Global
    """The module and the name of the global."""
    uses: tuple[str, ...]
    """What the pickle does with it, sorted: `build`, `call`, `mention`, `new`."""
    offset: int
    """The byte of the pickle that mentions it first."""
    stream: str
    """The pickle: `data.pkl`, `stream 4`."""
    paths: tuple[str, ...] = ()
    """Tree paths of a few objects of this class."""


class Description(Value, frozen=True):
    """What a format reads from a source: everything except the data of the tensors."""

    format: str
    """The name of the format: `torch-zip`, `safetensors`, …"""
    tensors: Table
    """All tensors by their dotted names, in the order of the file."""
    tree: object
    """The nested state. Its leaves are lazy tensors, `Opaque` objects and plain values."""
    foreign: tuple[Foreign, ...] = ()
    """The globals that pickles mention and that were not imported."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about oddities of this file."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Text entries of the file: `__metadata__` of safetensors, the version records of torch."""
    changed: tuple[Corrupted, ...] = ()
    """Damage, or an edit by another program, that does not stop the other tensors from being read.
    `verify` reports it."""
    check: Callable[[], Sequence[str]] | None = None
    """Reads and checks content that opening does not read and that no tensor depends on. It returns
    notes, or raises an error. `verify` calls it."""
    archives: tuple[str, ...] = ()
    """The keys of the zip archives of a directory. Of equal replicas only one is read, so there may
    be archives that no tensor refers to."""
    non_model_keys: tuple[str, ...] = ()
    """Keys at the top of the tree that do not belong to the model, such as the optimizer, if the
    format records this. `convert`, `load_into` and `slices` leave them out unless they are named."""
    usual_format: str = ""
    """The format in which other programs expect these tensors, if a layout map states one."""
    torch_dist: bool = False
    """Whether a checkpoint that is written for Megatron needs its two small files."""
    notes_on_blocks: tuple[str, ...] = ()
    """Notes about quantized blocks. They do not apply to the numbers that are decoded from them."""


class State(Value, frozen=True):
    """What is to be saved. `verbs.shared.state.tabulate_state` makes it."""

    tree: object
    """The containers of the caller. `leaves` has the tensors in them."""
    tensors: Table
    """All tensors by their dotted names. Two rows with the same storage are aliases."""
    leaves: Leaves
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Text entries to store with the tensors."""
    notes: tuple[str, ...] = ()
    """Facts about the tensors of the caller that no format records."""
