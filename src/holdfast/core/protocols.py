"""The seams between layers: what a store and a source must offer, and what a format makes of them.

A `Store` holds bytes under keys. A `Source` is a store opened for reading, with the limits that hold for it and the engine that
moves its bytes. A format turns a source into a `Description`, reading headers, indexes and pickles and never tensor data.
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

Stamp = tuple[object, ...]
"""What changes when content does: of a file its length and the time of the last write, of an object its etag. Plain values, which
JSON can hold; empty where a store cannot tell."""


class ReadProfile(Value, frozen=True):
    """How the bytes of a store are best read. A file on this machine is the plain case."""

    is_in_memory: bool = False
    """Whether the bytes are in this process's memory, so that reading them is no more than looking (`Store.map`)."""
    block_nbytes: int = 0
    """The preferred size of a read, of a GPU or a network; 0 where the reader chooses."""
    is_sequential: bool = False
    """Whether it is read by one thread, from front to back: going back may mean to begin again at the start."""
    is_exact: bool = False
    """Whether only the ranges that are needed may be read: a longer read may have zeros where a shorter one has content."""
    request_count: int = 0
    """How many reads are to be under way at once, because each waits for a network; 0 for a local store."""

    @property
    def is_file(self) -> bool:
        """Whether any range can be read at any time by one system call."""
        return not (
            self.is_in_memory or self.block_nbytes or self.is_sequential or self.request_count
        )


FILE_PROFILE = ReadProfile()


class Store:
    """A place where bytes live under keys. Methods may be called from several threads at once. What others want to know of a store
    it says itself, so that nobody asks of which class it is. Here stands what one says that has nothing to say: it is a file, and
    nobody knows whether its content changes."""

    name: str
    """What a person would call it: the path that was opened."""
    read_profile: ReadProfile = FILE_PROFILE
    index: str = ""
    """The index of a Hugging Face folder by which the user opened it; empty if the user named the folder."""
    reading: Callable[[], AbstractContextManager[None]] = nullcontext
    """Opens a block of many reads. What has to be done after a read may wait for the last one."""

    @property
    def is_gone(self) -> bool:
        """Whether something was missing that had been there: what was found here is not to be relied on."""
        return False

    @property
    def is_folder(self) -> bool:
        """Whether it is a directory, be it of one file: what it lacks may lie beside what it has."""
        return False

    @property
    def single_key(self) -> str | None:
        """The only key; None where there are several, or none."""
        keys = self.list()
        return keys[0] if len(keys) == 1 else None

    def get_folder_store(self) -> Store | None:
        """The folder that a single file lies in, for formats that have further files there. None if it is not known.

        It is closed with this store.
        """
        return self if self.is_folder else None

    def has_key(self, key: str) -> bool:
        """Whether there is something under a key. To ask for one may cost less than to list all."""
        return key in self.list()

    def expect_size(self, key: str, nbytes: int) -> bool:
        """Take note of what an index says of a key. True where it is compared when the key is read first; else ask for `size`."""
        return False

    def can_read_sibling(self, key: str) -> bool:
        """Whether a key of a sibling folder (`core.keys.parse_sibling_key`) can be read. Objects have no second names, so
        a checkpoint in a bucket names what it has in common with one beside it where that is."""
        return False

    def list(self) -> Sequence[str]:
        """Every key, sorted."""
        raise NotImplementedError

    def size(self, key: str) -> int:
        """Bytes under a key. Raises `StoreError` where there is no such key."""
        raise NotImplementedError

    def read(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on. Raises `Truncated` where they end too early."""
        raise NotImplementedError

    def peek(self, key: str, start: int, out: memoryview) -> None:
        """`read`, of something short with more to be asked for around it: headers, indexes, pickles."""
        self.read(key, start, out)

    def map(self, key: str) -> memoryview | None:
        """The bytes under a key as memory that needs no reading, or None where this store cannot do that."""
        return None

    def stamp(self, key: str) -> Stamp:
        """What identifies the content under a key, as it was when it was opened."""
        return ()

    def find_changed(self) -> Sequence[str]:
        """The keys whose content is known to be another by now than when it was opened."""
        return ()

    def find_replaced(self) -> Sequence[str]:
        """Return the keys whose path no longer leads to the file that was opened.

        Reading is not affected, because an open file outlives its name. A save to the same place
        is: it would overwrite whatever has the path now. `find_changed` of an object store covers both.
        """
        return ()

    def identity(self, key: str = "") -> Hashable:
        """Where the content of a key is, or the whole store: equal for two stores over the same bytes."""
        return "store", id(self), key

    def get_underlying_store(self, key: str) -> Store | None:
        """The store that has the content of a key, where this one only passes it on."""
        return None

    def count_read_nbytes(self, key: str, nbytes: int) -> int:
        """Bytes that are read from somewhere for so many bytes of a key: other ones where these are computed."""
        return nbytes

    def close(self) -> None:
        """Give back what the store holds. Reading afterwards raises `Closed`."""


class Request(Value, frozen=True):
    """Fill `out` (of the tensor's shape and numpy dtype, writable, any strides) with a tensor's elements."""

    tensor: LazyTensor
    out: np.ndarray


def group_by_source(requests: Iterable[Request]) -> dict[Source, list[Request]]:
    """The requests of each source, which it is to be given together: sources in the order in which they are met."""
    found: dict[Source, list[Request]] = {}
    for request in requests:
        found.setdefault(request.tensor.source, []).append(request)
    return found


Content = bytes  # In the class below `bytes` is a method.


class Source(Protocol):
    """A store that is open for reading, under limits."""

    @property
    def store(self) -> Store:
        """Where the bytes are."""

    @property
    def limits(self) -> Limits:
        """What a file may cost."""

    @property
    def rules(self) -> Sequence[str | PlacementRule]:
        """How tensors were cut, by their names, for a format that does not say so itself (`open(…, rules=…)`)."""

    @property
    def mapped(self) -> bool:
        """Whether arrays are views of mapped memory."""

    def with_store(self, store: Store) -> Source:
        """A source like this one that reads from another store: one that has more files, or other content in them."""

    def bytes(self, key: str, start: int, stop: int) -> bytes:
        """A small range, for headers and pickles: at once, on this thread. Raises `Truncated` past the end."""

    def read_head(self, key: str, nbytes: int) -> Content:
        """The first bytes of a file, up to so many: formats are recognised by them."""

    def read(self, requests: Sequence[Request]) -> None:
        """Fill every request, in parallel; the first failure cancels the rest and is raised."""

    def arrays(self, tensors: Sequence[LazyTensor]) -> list[np.ndarray]:
        """Read tensors into fresh arrays."""

    def read_rows(
        self, rows: ContiguousRows, tensor: Callable[[int], LazyTensor]
    ) -> list[np.ndarray]:
        """Read contiguous rows of a table into fresh arrays. `tensor` makes the lazy tensor of a number, for messages."""

    def lend(self, tensor: LazyTensor) -> AbstractContextManager[memoryview]:
        """The bytes of a tensor in C order, little-endian, packed types packed, for as long as the block lasts."""

    def view(self, tensor: LazyTensor) -> np.ndarray | None:
        """The tensor as an array over mapped memory, or None where that cannot be (not mapped, split, packed, swapped)."""

    def digest(self, tensors: Sequence[LazyTensor]) -> list[int]:
        """The CRC-32 of each tensor's elements: as the file records it where it does, else by reading, in parallel."""


class Foreign(Value, frozen=True):
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


class Description(Value, frozen=True):
    """What a format found: everything but the tensor data."""

    format: str
    """The format's name: `torch-zip`, `safetensors`, …"""
    tensors: Table
    """Every tensor under its dotted name, in the order of the file, a row each."""
    tree: object
    """The whole nested state, with `LazyTensor` leaves and `Opaque` nodes."""
    foreign: tuple[Foreign, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences for people: what is odd about this file."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Text that the file carries about itself (safetensors `__metadata__`, torch's version records)."""
    changed: tuple[Corrupted, ...] = ()
    """What is not as it was written, and is no reason to refuse the rest: another program's edit, or damage. For `verify`."""
    check: Callable[[], Sequence[str]] | None = None
    """Reads what opening does not and no tensor depends on, and gives notes; raises where it does not fit. For `verify`."""
    archives: tuple[str, ...] = ()
    """Keys of the zips that a directory was put together from. Of equal replicas one is read, so tensors need not lie in all."""
    non_model_keys: tuple[str, ...] = ()
    """Keys at the top of the tree that are no part of the model, where a format knows: the optimizer, the state of a run. Who wants
    a model (`convert`, `load_into`, `slices`) leaves them out, unless they are named."""
    usual_format: str = ""
    """The format in which others expect these tensors, where a map knows."""
    torch_dist: bool = False
    """Whether Megatron is to load what is written of it: it looks for two small files beside the tensors."""
    notes_on_blocks: tuple[str, ...] = ()
    """Notes about quantised blocks. They mean nothing to whoever reads the numbers that the blocks stand for."""


class State(Value, frozen=True):
    """What is to be saved, made by `verbs.shared.state.tabulate_state`."""

    tree: object  # The nested state: the caller's own containers, and in them what `leaves` knows as tensors.
    tensors: Table  # Every tensor under its dotted name, a row each. Two rows with one storage are aliases.
    leaves: Leaves
    metadata: Mapping[str, str] = field(
        default_factory=dict
    )  # Text to be kept with it (safetensors `__metadata__`).
    notes: tuple[str, ...] = ()  # Facts about the caller's tensors that no format records.
