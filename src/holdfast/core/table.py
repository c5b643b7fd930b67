"""`Table`: the tensors of a checkpoint or of a state, as columns; a tensor a row.

A hundred thousand tensors are of a few kinds: a dtype, a shape, strides, traits. A kind is stored once (`Kind`). A row is a name, a
kind and the number of a storage.

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
from holdfast.core.chunk import c_strides, in_c_order
from holdfast.core.dtype import DType
from holdfast.core.protocols import Source, Store
from holdfast.core.runtime import gc_paused
from holdfast.core.tensor import NO_CRC, PLAIN, LazyTensor, Traits
from holdfast.core.value import Value
from holdfast.errors import SaveError

if TYPE_CHECKING:
    from holdfast.engine.saves import Data, Memory

IRREGULAR = -1

MOST_NBYTES = 1 << 61

Piece = bytes | memoryview


class Kind(Value, frozen=True, eq=False):
    dtype: DType
    shape: tuple[int, ...]
    traits: Traits
    nbytes: int
    strides: tuple[int, ...] = ()
    storage_nbytes: int = 0
    inside: bool = True
    """Whether rows begin with a whole byte, and would end inside of their storages if they were in C order."""
    byteorder: str = "little"
    location: str = ""
    """The device that the writer had it on, where somebody says so."""
    contiguous: bool = False
    whole: bool = False

    @classmethod
    def of(cls, tensor: LazyTensor) -> Kind:
        """The kind of a tensor. In several pieces, in none, or in those that are not made yet, it is not contiguous."""
        if tensor.later:
            return cls(tensor.dtype, tensor.shape, tensor.traits, tensor.nbytes)
        dtype, shape, traits, chunks = tensor.dtype, tensor.shape, tensor.traits, tensor.chunks
        if len(chunks) != 1 or chunks[0].shape != shape:
            return cls(dtype, shape, traits, tensor.nbytes)
        (chunk,) = chunks
        storage = chunk.storage
        return cls.strided(
            dtype, shape, chunk.strides, storage_nbytes=storage.nbytes, traits=traits, byteorder=storage.byteorder,
            location=storage.location, inside=is_inside(chunk.offset, tensor.nbytes, storage.nbytes),
        )  # fmt: skip

    @staticmethod
    @lru_cache(maxsize=4096)
    def whole_of(
        dtype: DType, shape: tuple[int, ...], traits: Traits = PLAIN, *, location: str = ""
    ) -> Kind:
        """Tensors in C order that are all of their storages."""
        nbytes = dtype.nbytes(math.prod(shape))
        strides = c_strides(shape, dtype.bits)
        return Kind.strided(
            dtype, shape, strides, storage_nbytes=nbytes, traits=traits, location=location
        )

    @classmethod
    def strided(
        cls, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], *, storage_nbytes: int, traits: Traits = PLAIN,
        byteorder: str = "little", location: str = "", inside: bool = True,
    ) -> Kind:  # fmt: skip
        """Tensors of any strides, in bits, over storages of one length."""
        nbytes = dtype.nbytes(math.prod(shape))
        contiguous = (
            dtype.bits >= 8
            and (byteorder == "little" or dtype.swap_nbytes == 1)
            and (traits is PLAIN or not (traits.conj or traits.neg or traits.meta))
            and inside
            and nbytes <= storage_nbytes
            and in_c_order(shape, strides, dtype.bits)
        )
        whole = contiguous and nbytes == storage_nbytes
        return cls(
            dtype,
            shape,
            traits,
            nbytes,
            strides,
            storage_nbytes,
            inside,
            byteorder,
            location,
            contiguous,
            whole,
        )

    def marked(self, traits: Traits, *, inside: bool = True) -> Kind:
        """This kind with other traits; not `inside`: of rows that do not begin with a whole byte, or end behind their storages."""
        return Kind.strided(
            self.dtype, self.shape, self.strides, storage_nbytes=self.storage_nbytes, traits=traits, byteorder=self.byteorder,
            location=self.location, inside=inside and self.inside,
        )  # fmt: skip


def is_inside(offset: int, nbytes: int, storage_nbytes: int) -> bool:
    """Whether so many bytes from a bit on are whole bytes of a storage."""
    return not offset % 8 and 0 <= offset // 8 <= storage_nbytes - nbytes


def with_outside(kinds: list[Kind], kind: list[int], offsets: Mapping[int, int]) -> None:
    """Give rows that reach out of their storages kinds of their own. `kinds` and `kind` are those of rows with these offsets."""
    room = [8 * (one.storage_nbytes - one.nbytes) if one.contiguous else -1 for one in kinds]
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
            kinds.append(kinds[own].marked(kinds[own].traits, inside=False))
        kind[row] = made[own]


NO_OFFSETS: Mapping[int, int] = {}


class StorageMoved(Exception):
    """A storage in memory is no longer where it was: resized, or freed."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at  # Which of the storages that were to be read.


class MemoryBytes(Protocol):
    """The bytes of storages, as columns."""

    @property
    def nbytes(self) -> Ints:
        """The length of each storage."""

    def read(self, numbers: Sequence[int]) -> Sequence[Piece]:
        """The bytes of storages of these numbers, all together. Errors name the storage; `StorageMoved` for memory."""

    @property
    def divisible(self) -> bool:
        """Whether parts of storages are read together, as whole ones are."""

    def read_parts(
        self, numbers: Sequence[int], starts: Sequence[int], nbytes: Sequence[int]
    ) -> Sequence[Piece]:
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

    def view(self, number: int, kind: Kind, name: str, offset: int) -> LazyTensor:
        """A tensor of a kind over one storage, whose first element lies at a bit of it."""


class FilePlace(Value, frozen=True, eq=False):
    source: Source
    key: str
    home: object  # The store that has it, as `Storage.home`.


Column = Sequence[int] | Ints


class FileColumns:
    """Ranges of files, as columns."""

    files: Sequence[FilePlace]
    file: Ints
    """The file of each range, as a position in `files`."""
    start: Ints
    nbytes: Ints
    crc: Ints
    """The CRC-32 that the file records of each range; `NO_CRC` where it does not."""

    @property
    def read_nbytes(self) -> Ints:
        return self.nbytes


class ContiguousRows(Value, frozen=True):
    """Contiguous rows among some that are wanted, as columns of one length."""

    numbers: Sequence[int]  # The number of each among those that are wanted.
    dtypes: Sequence[AnyDType]
    shapes: Sequence[tuple[int, ...]]
    keys: Sequence[str]
    files: Ints  # The file of each, as a position in `keys`.
    starts: Ints
    nbytes: Ints
    crcs: Ints  # CRC-32 of just these bytes as the file records it; `NO_CRC` where it does not.

    def __len__(self) -> int:
        return len(self.numbers)

    def some(self, wanted: Ints) -> ContiguousRows:
        numbers, dtypes, shapes = self.numbers, self.dtypes, self.shapes
        chosen = wanted.tolist()
        return ContiguousRows(
            [numbers[at] for at in chosen], [dtypes[at] for at in chosen], [shapes[at] for at in chosen], self.keys,
            self.files[wanted], self.starts[wanted], self.nbytes[wanted], self.crcs[wanted],
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
        self, names: Sequence[str], kinds: Sequence[Kind], kind: Sequence[int], storage: Sequence[int], storages: Storages,
        irregular: Mapping[int, LazyTensor], *, offsets: Mapping[int, int] = NO_OFFSETS, views: Sequence[LazyTensor] | None = None,
    ) -> None:  # fmt: skip
        """`views` are the rows as lazy tensors, where they are there already: the leaves of a tree."""
        self.names, self.kinds, self.kind = (
            names,
            kinds,
            kind,
        )  # `kind` of each row is a position in `kinds`.
        self.storage, self.storages = (
            storage,
            storages,
        )  # `storage` of each row is a number in `storages`; `IRREGULAR` for an irregular row.
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
    def rows(self) -> Mapping[str, int]:
        return dict(zip(self.names, range(len(self.names)), strict=True))

    @cached_property
    def kind_numbers(self) -> Ints:
        return np.array(self.kind, np.int64)

    @cached_property
    def not_whole(self) -> Mapping[int, None]:
        """Rows that are not whole, in order."""
        return self._rows_of({number for number, kind in enumerate(self.kinds) if not kind.whole})

    @cached_property
    def noncontiguous(self) -> Mapping[int, None]:
        """Rows that are read one by one, by their lazy tensors (`view`), in order.

        They are not contiguous, or not whole over storages that are not read in parts.
        """
        parts, kinds = self.storages.divisible, enumerate(self.kinds)
        return self._rows_of(
            {number for number, kind in kinds if not (kind.whole or (parts and kind.contiguous))}
        )

    def _rows_of(self, kinds: set[int]) -> dict[int, None]:
        irregular = self.irregular
        return dict.fromkeys(
            [row for row, one in enumerate(self.kind) if one in kinds or row in irregular]
            if irregular or kinds
            else ()
        )

    def view(self, row: int) -> LazyTensor:
        if self._views is not None:
            return self._views[row]
        if row in self.irregular:
            return self.irregular[row]
        kind, offset = self.kinds[self.kind[row]], self.offsets.get(row, 0)
        return self.storages.view(self.storage[row], kind, self.names[row], offset)

    def located(self, rows: Sequence[int]) -> Table:
        """A table for rows that are about to be read: a format that has to ask its files where they lie asks for all at once."""
        return self

    def recorded_crcs(self) -> dict[int, int]:
        """By row, the CRC-32 of its elements, where a file records it."""
        if not isinstance(self.storages, FileColumns):
            return {}
        crcs, whole = self.storages.crc.tolist(), [kind.whole for kind in self.kinds]
        rows = [
            row
            for row, (number, kind) in enumerate(zip(self.storage, self.kind, strict=True))
            if number != IRREGULAR and whole[kind]
        ]
        return {row: crc for row in rows if (crc := crcs[self.storage[row]]) != NO_CRC}

    def kind_of(self, row: int) -> Kind:
        return self.kinds[self.kind[row]]

    @property
    def kind_nbytes(self) -> Ints:
        """Bytes of the elements of a row of each kind."""
        # A view that repeats its elements may have more bytes than a column has room for. No layout copies it.
        return np.array([min(kind.nbytes, MOST_NBYTES) for kind in self.kinds], np.int64)

    def nbytes_of(self, rows: Column) -> Ints:
        where = (
            slice(rows.start, rows.stop) if isinstance(rows, range) else np.asarray(rows, np.int64)
        )
        return self.kind_nbytes[self.kind_numbers[where]]

    def read(self, rows: Sequence[int]) -> Sequence[Piece]:
        """The bytes of rows that are not `single`, all together."""
        storage, kinds, kind = self.storage, self.kinds, self.kind
        numbers = rows if storage == range(len(self.names)) else [storage[row] for row in rows]
        try:
            # Of storages that are not divisible, all rows but those that stand by themselves are whole.
            if not self.storages.divisible or all(one.whole for one in kinds):
                return self.storages.read(numbers)
            offsets, nbytes = self.offsets, [one.nbytes for one in kinds]
            starts = [offsets[row] // 8 if row in offsets else 0 for row in rows]
            return self.storages.read_parts(numbers, starts, [nbytes[kind[row]] for row in rows])
        except StorageMoved as moved:
            raise self._moved(rows[moved.at]) from None

    def segment(self, row: int, label: str) -> bytes | Data | Memory:
        """The bytes of a row that is all of its storage, as a segment; `b""` where there are none."""
        try:
            return self.storages.segment(self.storage[row], label)
        except StorageMoved:
            raise self._moved(row) from None

    def _moved(self, row: int) -> SaveError:
        return SaveError(
            "its storage was resized or freed while it was saved", tensor=self.names[row]
        )

    def select(self, rows: Sequence[int], names: Sequence[str] | None = None) -> Table:
        kind, storage = [self.kind[row] for row in rows], [self.storage[row] for row in rows]
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
            offsets=self.offsets_of(rows),
        )

    def offsets_of(self, rows: Sequence[int]) -> Mapping[int, int]:
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
                kind.append(self.kind[row])
                storage.append(self.storage[row])
                continue
            for name, tensor in given.items():
                irregular[len(names)] = tensor
                names.append(name)
                kind.append(len(kinds))
                kinds.append(Kind.of(tensor))
                storage.append(IRREGULAR)
        return Table(names, kinds, kind, storage, self.storages, irregular, offsets=offsets)

    def contiguous_rows(self, rows: Sequence[int]) -> list[tuple[Source, ContiguousRows]]:
        """Where the contiguous ones of these rows lie in files, those of a source together."""
        storages, kinds = self.storages, self.kinds
        if not isinstance(storages, FileColumns):
            return []
        kind, storage = self.kind, self.storage
        numbers: Sequence[int] = range(len(rows))
        if self.irregular or not all(one.contiguous for one in kinds):
            numbers = [
                at
                for at, row in enumerate(rows)
                if storage[row] != IRREGULAR and kinds[kind[row]].contiguous
            ]
            rows = [rows[at] for at in numbers]
        own = [kind[row] for row in rows]
        start = storages.start
        everything = range(len(start))
        where: slice | Ints = slice(None)
        if rows != everything or storage != everything:
            where = np.array([storage[row] for row in rows], np.int64)
        dtypes, shapes = [one.dtype.numpy for one in kinds], [one.shape for one in kinds]
        starts, nbytes, crcs = start[where], storages.nbytes[where], storages.crc[where]
        if not all(one.whole for one in kinds if one.contiguous):
            places = np.array(own, np.int64)
            if offsets := self.offsets:
                starts = starts + np.array(
                    [offsets[row] // 8 if row in offsets else 0 for row in rows], np.int64
                )
            nbytes = np.array([one.nbytes if one.contiguous else 0 for one in kinds], np.int64)[
                places
            ]
            crcs = np.where(np.array([one.whole for one in kinds], np.bool_)[places], crcs, NO_CRC)
        keys, files = [place.key for place in storages.files], storages.file[where]
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
            (source, contiguous.some(np.flatnonzero(np.isin(files, own_files))))
            for source, own_files in by.items()
        ]

    def arrays(self, rows: Sequence[int]) -> list[np.ndarray]:
        """Fresh arrays of these rows: in parallel, with neighbouring reads joined."""
        arrays = [NO_ARRAY] * len(rows)
        numbers: list[int] = []
        with gc_paused():
            for source, contiguous in self.contiguous_rows(rows):
                read_arrays = source.read_rows(contiguous, lambda number: self.view(rows[number]))
                for number, array in zip(contiguous.numbers, read_arrays, strict=True):
                    arrays[number] = array
                numbers += contiguous.numbers
            if len(numbers) < len(rows):
                others = sorted({*range(len(rows))}.difference(numbers))
                views = [self.view(rows[number]) for number in others]
                for number, array in zip(others, read_tensors(views), strict=True):
                    arrays[number] = array
        return arrays

    def made(self) -> Table:
        """This table with all lazy tensors made, each once."""
        if self._views is not None:
            return self
        views = [self.view(row) for row in range(len(self.names))]
        return Table(
            self.names,
            self.kinds,
            self.kind,
            self.storage,
            self.storages,
            self.irregular,
            offsets=self.offsets,
            views=views,
        )

    def without_views(self) -> Table:
        """This table without the lazy tensors that were made; they are made again when they are asked for."""
        if self._views is None:
            return self
        return Table(
            self.names,
            self.kinds,
            self.kind,
            self.storage,
            self.storages,
            self.irregular,
            offsets=self.offsets,
        )

    def __getitem__(self, name: str) -> LazyTensor:
        if self._asked:
            return self.view(self.rows[name])
        # One name is found before the rows of all are known by theirs.
        self._asked = True
        hash(name)
        try:
            return self.view(self.names.index(name))
        except ValueError:
            raise KeyError(name) from None

    def outline(self, name: str) -> tuple[DType, tuple[int, ...]]:
        kind = self.kinds[self.kind[self.rows[name]]]
        return kind.dtype, kind.shape

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def __repr__(self) -> str:
        return f"<{len(self):,} tensors>"
