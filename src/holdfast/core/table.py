"""`Table`: the tensors of a checkpoint or of a state, as columns; a tensor a row.

A hundred thousand tensors are of a few kinds: a dtype, a shape, strides, traits. A kind is stored once
(`RowKind`). A row is a name, a kind and the index of a storage.

The storages are one medium (`Storages`): ranges of files, arrays of numpy, tensors of torch, the memory of a GPU. Two rows of one
number share their storage.

A row is *irregular* if its elements lie in several pieces or are computed. It has a lazy tensor, which says where its elements are,
and no number of a storage. The lazy tensor of every other row is made when it is asked for.

A row is *contiguous* if its elements are one range of bytes of its storage, and these bytes are those of an array: in C order
without gaps, little-endian, a whole number of bytes each, neither conjugated nor negated, and not on the meta device. So a start, a
length and a checksum say all of it. It is *whole* if that range is all of its storage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from holdfast.core.arrays import AnyDType, Ints
from holdfast.core.chunk import c_strides, is_c_ordered
from holdfast.core.dtype import DType
from holdfast.core.protocols import Source, Store
from holdfast.core.runtime import gc_paused
from holdfast.core.tensor import NO_CRC, PLAIN_TRAITS, LazyTensor, Traits
from holdfast.core.value import Value
from holdfast.errors import SaveError

if TYPE_CHECKING:
    from holdfast.engine.saves import Data, Memory

IRREGULAR = -1

MOST_NBYTES = 1 << 61

BytesLike = bytes | memoryview


class RowKind(Value, frozen=True, eq=False):
    dtype: DType
    shape: tuple[int, ...]
    traits: Traits
    nbytes: int
    strides: tuple[int, ...] = ()
    storage_nbytes: int = 0
    is_inside: bool = True
    """Whether rows begin with a whole byte, and would end inside of their storages if they were in C order."""
    byteorder: str = "little"
    location: str = ""
    """The device that the writer had it on, where somebody says so."""
    is_contiguous: bool = False
    is_whole: bool = False

    @classmethod
    def from_tensor(cls, tensor: LazyTensor) -> RowKind:
        """The kind of a tensor. In several pieces, in none, or in those that are not made yet, it is not contiguous."""
        if tensor.has_deferred_chunks:
            return cls(tensor.dtype, tensor.shape, tensor.traits, tensor.nbytes)
        dtype, shape, traits, chunks = tensor.dtype, tensor.shape, tensor.traits, tensor.chunks
        if len(chunks) != 1 or chunks[0].shape != shape:
            return cls(dtype, shape, traits, tensor.nbytes)
        (chunk,) = chunks
        storage = chunk.storage
        return cls.from_strides(
            dtype, shape, chunk.strides, storage_nbytes=storage.nbytes, traits=traits, byteorder=storage.byteorder,
            location=storage.location, is_inside=is_range_inside(chunk.offset, tensor.nbytes, storage.nbytes),
        )  # fmt: skip

    @staticmethod
    @lru_cache(maxsize=4096)
    def from_shape(
        dtype: DType, shape: tuple[int, ...], traits: Traits = PLAIN_TRAITS, *, location: str = ""
    ) -> RowKind:
        """Tensors in C order that are all of their storages."""
        nbytes = dtype.nbytes(math.prod(shape))
        strides = c_strides(shape, dtype.bits)
        return RowKind.from_strides(
            dtype, shape, strides, storage_nbytes=nbytes, traits=traits, location=location
        )

    @classmethod
    def from_strides(
        cls, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], *, storage_nbytes: int, traits: Traits = PLAIN_TRAITS,
        byteorder: str = "little", location: str = "", is_inside: bool = True,
    ) -> RowKind:  # fmt: skip
        """Tensors of any strides, in bits, over storages of one length."""
        nbytes = dtype.nbytes(math.prod(shape))
        contiguous = (
            dtype.bits >= 8
            and (byteorder == "little" or dtype.swap_nbytes == 1)
            and (traits is PLAIN_TRAITS or not (traits.conj or traits.neg or traits.meta))
            and is_inside
            and nbytes <= storage_nbytes
            and is_c_ordered(shape, strides, dtype.bits)
        )
        whole = contiguous and nbytes == storage_nbytes
        return cls(
            dtype,
            shape,
            traits,
            nbytes,
            strides,
            storage_nbytes,
            is_inside,
            byteorder,
            location,
            contiguous,
            whole,
        )

    def with_traits(self, traits: Traits, *, is_inside: bool = True) -> RowKind:
        """This kind with other traits; not `inside`: of rows that do not begin with a whole byte, or end behind their storages."""
        return RowKind.from_strides(
            self.dtype, self.shape, self.strides, storage_nbytes=self.storage_nbytes, traits=traits, byteorder=self.byteorder,
            location=self.location, is_inside=is_inside and self.is_inside,
        )  # fmt: skip


def is_range_inside(offset: int, nbytes: int, storage_nbytes: int) -> bool:
    """Whether so many bytes from a bit on are whole bytes of a storage."""
    return not offset % 8 and 0 <= offset // 8 <= storage_nbytes - nbytes


def separate_outside_rows(
    kinds: list[RowKind], kind: list[int], offsets: Mapping[int, int]
) -> None:
    """Give rows that reach out of their storages kinds of their own. `kinds` and `kind` are those of rows with these offsets."""
    room = [8 * (one.storage_nbytes - one.nbytes) if one.is_contiguous else -1 for one in kinds]
    reach = ((row, offset, room[kind[row]]) for row, offset in offsets.items())
    out = [
        row
        for row, offset, most in reach
        if most >= 0 and not (0 <= offset <= most and not offset % 8)
    ]
    made: dict[int, int] = {}
    for row in out:
        own = kind[row]
        if own not in made:
            made[own] = len(kinds)
            kinds.append(kinds[own].with_traits(kinds[own].traits, is_inside=False))
        kind[row] = made[own]


NO_OFFSETS: Mapping[int, int] = {}


class StorageMoved(Exception):
    """A storage in memory is no longer where it was: resized, or freed."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.request_index = at  # Which of the storages that were to be read.


class MemoryBytes(Protocol):
    """The bytes of storages, as columns."""

    @property
    def nbytes(self) -> Ints:
        """The length of each storage."""

    def read(self, numbers: Sequence[int]) -> Sequence[BytesLike]:
        """The bytes of storages of these numbers, all together. Errors name the storage; `StorageMoved` for memory."""

    @property
    def can_read_ranges(self) -> bool:
        """Whether parts of storages are read together, as whole ones are."""

    def read_ranges(
        self, numbers: Sequence[int], starts: Sequence[int], nbytes: Sequence[int]
    ) -> Sequence[BytesLike]:
        """So many bytes of storages of these numbers, from these bytes on; where they are `divisible`."""

    def segment(self, number: int, label: str) -> bytes | Data | Memory:
        """The bytes of one storage under a label, as a segment; `b""` where there are none. Raises `StorageMoved` for memory."""


class Storages(MemoryBytes, Protocol):
    """The medium of a table: storages, and tensors over them."""

    @property
    def read_nbytes(self) -> Ints:
        """What is read for each: as many bytes as it has, unless it is computed."""

    @property
    def stores(self) -> tuple[Store, ...]:
        """What is read, beside this process's memory."""

    def lazy_tensor(self, number: int, kind: RowKind, name: str, offset: int) -> LazyTensor:
        """A tensor of a kind over one storage, whose first element lies at a bit of it."""


class StoredFile(Value, frozen=True, eq=False):
    source: Source
    key: str
    store: object  # The store that has it, as `Storage.home`.


Column = Sequence[int] | Ints


class FileColumns:
    """Ranges of files, as columns."""

    files: Sequence[StoredFile]
    file_indices: Ints
    """The file of each range, as a position in `files`."""
    starts: Ints
    nbytes: Ints
    crcs: Ints
    """The CRC-32 that the file records of each range; `NO_CRC` where it does not."""

    @property
    def read_nbytes(self) -> Ints:
        return self.nbytes


class ContiguousRows(Value, frozen=True):
    """Contiguous rows among some that are wanted, as columns of one length."""

    request_indices: Sequence[int]  # The number of each among those that are wanted.
    dtypes: Sequence[AnyDType]
    shapes: Sequence[tuple[int, ...]]
    keys: Sequence[str]
    file_indices: Ints  # The file of each, as a position in `keys`.
    starts: Ints
    nbytes: Ints
    crcs: Ints  # CRC-32 of just these bytes as the file records it; `NO_CRC` where it does not.

    def __len__(self) -> int:
        return len(self.request_indices)

    def select(self, wanted: Ints) -> ContiguousRows:
        numbers, dtypes, shapes = self.request_indices, self.dtypes, self.shapes
        chosen = wanted.tolist()
        return ContiguousRows(
            [numbers[at] for at in chosen], [dtypes[at] for at in chosen], [shapes[at] for at in chosen], self.keys,
            self.file_indices[wanted], self.starts[wanted], self.nbytes[wanted], self.crcs[wanted],
        )  # fmt: skip


NO_ARRAY = np.zeros(0)


def read_tensors(tensors: Sequence[LazyTensor]) -> list[np.ndarray]:
    """Read tensors into fresh arrays: in parallel, with neighbouring reads joined."""
    by_source: dict[Source, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_source.setdefault(tensor.source, []).append(number)
    arrays = [NO_ARRAY] * len(tensors)
    with gc_paused():
        for source, numbers in by_source.items():
            read_arrays = source.arrays([tensors[number] for number in numbers])
            for number, array in zip(numbers, read_arrays, strict=True):
                arrays[number] = array
    return arrays


class Table(Mapping[str, LazyTensor]):
    """Tensors by name, a row each. As a mapping it makes a lazy tensor when one is asked for."""

    def __init__(
        self, names: Sequence[str], kinds: Sequence[RowKind], kind: Sequence[int], storage: Sequence[int], storages: Storages,
        irregular: Mapping[int, LazyTensor], *, offsets: Mapping[int, int] = NO_OFFSETS, views: Sequence[LazyTensor] | None = None,
    ) -> None:  # fmt: skip
        """`views` are the rows as lazy tensors, where they are there already: the leaves of a tree."""
        self.names = names
        self.kinds = kinds
        self.kind_indices = kind  # `kind_indices` of each row is a position in `kinds`.
        self.storage_indices = storage
        self.storages = storages  # `storage_indices` of each row is a number in `storages`; `IRREGULAR` for an irregular row.
        self.irregular = irregular
        self.offsets = offsets
        """By row, the bit of its storage where the first element lies; of those that do not begin with their storage."""
        self._asked = False
        self._views = views

    @property
    def stores(self) -> tuple[Store, ...]:
        return tuple(
            dict.fromkeys(
                (
                    *self.storages.stores,
                    *(tensor.source.store for tensor in self.irregular.values()),
                )
            )
        )

    @cached_property
    def row_indices(self) -> Mapping[str, int]:
        return dict(zip(self.names, range(len(self.names)), strict=True))

    @cached_property
    def kind_index_array(self) -> Ints:
        return np.array(self.kind_indices, np.int64)

    @cached_property
    def rows_not_whole(self) -> Mapping[int, None]:
        """Rows that are not whole, in order."""
        return self._rows_of(
            {number for number, kind in enumerate(self.kinds) if not kind.is_whole}
        )

    @cached_property
    def rows_read_singly(self) -> Mapping[int, None]:
        """Rows that are read one by one, by their lazy tensors (`view`), in order.

        They are not contiguous, or not whole over storages that are not read in parts.
        """
        parts, kinds = self.storages.can_read_ranges, enumerate(self.kinds)
        return self._rows_of(
            {
                number
                for number, kind in kinds
                if not (kind.is_whole or (parts and kind.is_contiguous))
            }
        )

    def _rows_of(self, kinds: set[int]) -> dict[int, None]:
        irregular = self.irregular
        return dict.fromkeys(
            [row for row, one in enumerate(self.kind_indices) if one in kinds or row in irregular]
            if irregular or kinds
            else ()
        )

    def lazy_tensor(self, row: int) -> LazyTensor:
        if self._views is not None:
            return self._views[row]
        if row in self.irregular:
            return self.irregular[row]
        kind, offset = self.kinds[self.kind_indices[row]], self.offsets.get(row, 0)
        return self.storages.lazy_tensor(self.storage_indices[row], kind, self.names[row], offset)

    def locate_rows(self, rows: Sequence[int]) -> Table:
        """A table for rows that are about to be read: a format that has to ask its files where they lie asks for all at once."""
        return self

    def recorded_crcs(self) -> dict[int, int]:
        """By row, the CRC-32 of its elements, where a file records it."""
        if not isinstance(self.storages, FileColumns):
            return {}
        crcs, whole = self.storages.crcs.tolist(), [kind.is_whole for kind in self.kinds]
        rows = [
            row
            for row, (number, kind) in enumerate(
                zip(self.storage_indices, self.kind_indices, strict=True)
            )
            if number != IRREGULAR and whole[kind]
        ]
        return {row: crc for row in rows if (crc := crcs[self.storage_indices[row]]) != NO_CRC}

    def row_kind(self, row: int) -> RowKind:
        return self.kinds[self.kind_indices[row]]

    @property
    def kind_nbytes(self) -> Ints:
        """Bytes of the elements of a row of each kind."""
        # A view that repeats its elements may have more bytes than a column has room for. No layout copies it.
        return np.array([min(kind.nbytes, MOST_NBYTES) for kind in self.kinds], np.int64)

    def row_nbytes(self, rows: Column) -> Ints:
        where = (
            slice(rows.start, rows.stop) if isinstance(rows, range) else np.asarray(rows, np.int64)
        )
        return self.kind_nbytes[self.kind_index_array[where]]

    def read_bytes(self, rows: Sequence[int]) -> Sequence[BytesLike]:
        """The bytes of rows that are not `single`, all together."""
        storage, kinds, kind = self.storage_indices, self.kinds, self.kind_indices
        numbers = rows if storage == range(len(self.names)) else [storage[row] for row in rows]
        try:
            # Of storages that are not divisible, all rows but those that stand by themselves are whole.
            if not self.storages.can_read_ranges or all(one.is_whole for one in kinds):
                return self.storages.read(numbers)
            offsets, nbytes = self.offsets, [one.nbytes for one in kinds]
            starts = [offsets[row] // 8 if row in offsets else 0 for row in rows]
            return self.storages.read_ranges(numbers, starts, [nbytes[kind[row]] for row in rows])
        except StorageMoved as moved:
            raise self._moved(rows[moved.request_index]) from None

    def segment(self, row: int, label: str) -> bytes | Data | Memory:
        """The bytes of a row that is all of its storage, as a segment; `b""` where there are none."""
        try:
            return self.storages.segment(self.storage_indices[row], label)
        except StorageMoved:
            raise self._moved(row) from None

    def _moved(self, row: int) -> SaveError:
        return SaveError(
            "its storage was resized or freed while it was saved", tensor=self.names[row]
        )

    def select(self, rows: Sequence[int], names: Sequence[str] | None = None) -> Table:
        kind, storage = (
            [self.kind_indices[row] for row in rows],
            [self.storage_indices[row] for row in rows],
        )
        chosen = [self.names[row] for row in rows] if names is None else names
        irregular = {}
        if self.irregular:
            irregular = {
                at: self.irregular[row].renamed(chosen[at])
                for at, row in enumerate(rows)
                if row in self.irregular
            }
        return Table(
            chosen,
            self.kinds,
            kind,
            storage,
            self.storages,
            irregular,
            offsets=self.select_offsets(rows),
        )

    def select_offsets(self, rows: Sequence[int]) -> Mapping[int, int]:
        offsets = self.offsets
        return (
            {at: offsets[row] for at, row in enumerate(rows) if row in offsets}
            if offsets
            else offsets
        )

    def with_entries(
        self, rows: Sequence[int], entries: Mapping[int, Mapping[str, LazyTensor]]
    ) -> Table:
        """A table of these rows, with other entries in the place of some of them."""
        names: list[str] = []
        kinds, irregular, offsets = [*self.kinds], dict[int, LazyTensor](), dict[int, int]()
        kind: list[int] = []
        storage: list[int] = []
        for row in rows:
            given = entries.get(row)
            if given is None:
                if row in self.irregular:
                    irregular[len(names)] = self.irregular[row]
                if row in self.offsets:
                    offsets[len(names)] = self.offsets[row]
                names.append(self.names[row])
                kind.append(self.kind_indices[row])
                storage.append(self.storage_indices[row])
                continue
            for name, tensor in given.items():
                irregular[len(names)] = tensor
                names.append(name)
                kind.append(len(kinds))
                kinds.append(RowKind.from_tensor(tensor))
                storage.append(IRREGULAR)
        return Table(names, kinds, kind, storage, self.storages, irregular, offsets=offsets)

    def find_contiguous_rows(self, rows: Sequence[int]) -> list[tuple[Source, ContiguousRows]]:
        """Where the contiguous ones of these rows lie in files, those of a source together."""
        storages, kinds = self.storages, self.kinds
        if not isinstance(storages, FileColumns):
            return []
        kind, storage = self.kind_indices, self.storage_indices
        numbers: Sequence[int] = range(len(rows))
        if self.irregular or not all(one.is_contiguous for one in kinds):
            numbers = [
                at
                for at, row in enumerate(rows)
                if storage[row] != IRREGULAR and kinds[kind[row]].is_contiguous
            ]
            rows = [rows[at] for at in numbers]
        own = [kind[row] for row in rows]
        start = storages.starts
        everything = range(len(start))
        where: slice | Ints = slice(None)
        if rows != everything or storage != everything:
            where = np.array([storage[row] for row in rows], np.int64)
        dtypes, shapes = [one.dtype.numpy for one in kinds], [one.shape for one in kinds]
        starts, nbytes, crcs = start[where], storages.nbytes[where], storages.crcs[where]
        if not all(one.is_whole for one in kinds if one.is_contiguous):
            places = np.array(own, np.int64)
            if offsets := self.offsets:
                starts = starts + np.array(
                    [offsets[row] // 8 if row in offsets else 0 for row in rows], np.int64
                )
            nbytes = np.array([one.nbytes if one.is_contiguous else 0 for one in kinds], np.int64)[
                places
            ]
            crcs = np.where(
                np.array([one.is_whole for one in kinds], np.bool_)[places], crcs, NO_CRC
            )
        keys, files = [place.key for place in storages.files], storages.file_indices[where]
        contiguous = ContiguousRows(
            numbers,
            [dtypes[one] for one in own],
            [shapes[one] for one in own],
            keys,
            files,
            starts,
            nbytes,
            crcs,
        )
        by: dict[Source, list[int]] = {}
        for file, place in enumerate(storages.files):
            by.setdefault(place.source, []).append(file)
        if len(by) == 1:
            return [(source, contiguous) for source in by]
        return [
            (source, contiguous.select(np.flatnonzero(np.isin(files, own_files))))
            for source, own_files in by.items()
        ]

    def read_arrays(self, rows: Sequence[int]) -> list[np.ndarray]:
        """Fresh arrays of these rows: in parallel, with neighbouring reads joined."""
        arrays = [NO_ARRAY] * len(rows)
        numbers: list[int] = []
        with gc_paused():
            for source, contiguous in self.find_contiguous_rows(rows):
                read_arrays = source.read_rows(
                    contiguous, lambda number: self.lazy_tensor(rows[number])
                )
                for number, array in zip(contiguous.request_indices, read_arrays, strict=True):
                    arrays[number] = array
                numbers += contiguous.request_indices
            if len(numbers) < len(rows):
                others = sorted({*range(len(rows))}.difference(numbers))
                views = [self.lazy_tensor(rows[number]) for number in others]
                for number, array in zip(others, read_tensors(views), strict=True):
                    arrays[number] = array
        return arrays

    def with_lazy_tensors(self) -> Table:
        """This table with all lazy tensors made, each once."""
        if self._views is not None:
            return self
        views = [self.lazy_tensor(row) for row in range(len(self.names))]
        return Table(
            self.names,
            self.kinds,
            self.kind_indices,
            self.storage_indices,
            self.storages,
            self.irregular,
            offsets=self.offsets,
            views=views,
        )

    def without_lazy_tensors(self) -> Table:
        """This table without the lazy tensors that were made; they are made again when they are asked for."""
        if self._views is None:
            return self
        return Table(
            self.names,
            self.kinds,
            self.kind_indices,
            self.storage_indices,
            self.storages,
            self.irregular,
            offsets=self.offsets,
        )

    def __getitem__(self, name: str) -> LazyTensor:
        if self._asked:
            return self.lazy_tensor(self.row_indices[name])
        # One name is found before the rows of all are known by theirs.
        self._asked = True
        hash(name)
        try:
            return self.lazy_tensor(self.names.index(name))
        except ValueError:
            raise KeyError(name) from None

    def dtype_and_shape(self, name: str) -> tuple[DType, tuple[int, ...]]:
        kind = self.kinds[self.kind_indices[self.row_indices[name]]]
        return kind.dtype, kind.shape

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.row_indices

    def __repr__(self) -> str:
        return f"<{len(self):,} tensors>"
