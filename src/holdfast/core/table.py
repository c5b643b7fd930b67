"""`Table`: the tensors of a checkpoint or of a state, as columns. Each tensor is a row.

A hundred thousand tensors have few different kinds (`RowKind`: dtype, shape, strides, traits), so
each kind is stored once. The other columns have an entry for each row:

    names              "embed"    "head"    "norm"    "split"
    kind_indices          0          0         1         2         indices into `kinds`
    storage_indices       0          0         1        -1         indices into `storages`

Rows with the same storage index share their storage, here `embed` and `head`. The storages of a
table (`Storages`) are ranges of files, numpy arrays, torch tensors or memory of a GPU.

A row is *irregular* if its elements lie in several chunks, or are computed when they are read. Its
lazy tensor describes where they are, and its storage index is -1. The lazy tensors of all other
rows are made on request.

A row is *contiguous* if its bytes are one range of its storage and those of an array: in C order
without gaps, little-endian, a whole number of bytes for each element, neither conjugated nor
negated, and not on the meta device. It is *whole* if that range is all of its storage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""The storage index of an irregular row."""

MAX_KIND_NBYTES = 1 << 61
"""The largest size in a column. An expanded view may claim more bytes than an int64 can count."""

BytesLike = bytes | memoryview
"""The bytes of a row or of a storage."""

Column = Sequence[int] | Ints
"""An integer for each row, as a list, a range or an array."""

NO_OFFSETS: Mapping[int, int] = {}
NO_ARRAY = np.zeros(0)


class RowKind(Value, frozen=True, eq=False):
    """What the rows of a kind have in common: all of a tensor but its name and its place."""

    dtype: DType
    shape: tuple[int, ...]
    traits: Traits
    nbytes: int
    """The size of the elements when they are packed without gaps."""
    strides: tuple[int, ...] = ()
    """Bits from one element to the next, for each dimension. Empty for irregular rows."""
    storage_nbytes: int = 0
    """The size of the storages of these rows."""
    is_inside: bool = True
    """Whether rows start at a whole byte, and would end inside their storages in C order."""
    byteorder: str = "little"
    location: str = ""
    """The device that the writer had the tensors on, if it is recorded."""
    is_contiguous: bool = False
    """Whether the bytes of a row are one range of its storage and those of an array."""
    is_whole: bool = False
    """Whether the bytes of a row are all bytes of its storage and those of an array."""

    @classmethod
    def from_tensor(cls, tensor: LazyTensor) -> RowKind:
        """Return the kind of a lazy tensor.

        A tensor that has several chunks or none, or whose chunks are not built yet, is irregular:
        its kind has no strides and is not contiguous.
        """
        # Building very many chunks to look at them would cost more than it saves.
        if tensor.has_deferred_chunks:
            return cls(tensor.dtype, tensor.shape, tensor.traits, tensor.nbytes)
        chunks = tensor.chunks
        if len(chunks) != 1 or chunks[0].shape != tensor.shape:
            return cls(tensor.dtype, tensor.shape, tensor.traits, tensor.nbytes)

        (chunk,) = chunks
        storage = chunk.storage
        return cls.from_strides(
            tensor.dtype,
            tensor.shape,
            chunk.strides,
            storage_nbytes=storage.nbytes,
            traits=tensor.traits,
            byteorder=storage.byteorder,
            location=storage.location,
            is_inside=is_range_inside(chunk.offset, tensor.nbytes, storage.nbytes),
        )

    # A checkpoint has very many tensors of few shapes.
    @staticmethod
    @lru_cache(maxsize=4096)
    def from_shape(
        dtype: DType, shape: tuple[int, ...], traits: Traits = PLAIN_TRAITS, *, location: str = ""
    ) -> RowKind:
        """Return the kind of tensors in C order that fill their storages."""
        return RowKind.from_strides(
            dtype,
            shape,
            c_strides(shape, dtype.bits),
            storage_nbytes=dtype.nbytes(math.prod(shape)),
            traits=traits,
            location=location,
        )

    @classmethod
    def from_strides(
        cls,
        dtype: DType,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        *,
        storage_nbytes: int,
        traits: Traits = PLAIN_TRAITS,
        byteorder: str = "little",
        location: str = "",
        is_inside: bool = True,
    ) -> RowKind:
        """Return the kind of tensors with any strides, and compute whether they are contiguous.

        Args:
            dtype: The type of the elements.
            shape: The length of each dimension.
            strides: Bits from one element to the next, for each dimension.
            storage_nbytes: The size of the storage of each tensor.
            traits: What torch records about the tensors beyond their elements.
            byteorder: `little` or `big`.
            location: The device that the writer had the tensors on.
            is_inside: Whether the tensors start at a whole byte, and would end inside their
                storages if they were in C order.
        """
        nbytes = dtype.nbytes(math.prod(shape))
        # The byte order of elements of one byte does not matter.
        is_little_endian = byteorder == "little" or dtype.swap_nbytes == 1
        # Most rows have the default traits, for which one comparison is enough.
        has_plain_elements = traits is PLAIN_TRAITS or not (
            traits.conj or traits.neg or traits.meta
        )
        is_contiguous = (
            dtype.bits >= 8
            and is_little_endian
            and has_plain_elements
            and is_inside
            and nbytes <= storage_nbytes
            and is_c_ordered(shape, strides, dtype.bits)
        )
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
            is_contiguous,
            is_contiguous and nbytes == storage_nbytes,
        )

    def with_traits(self, traits: Traits, *, is_inside: bool = True) -> RowKind:
        """Return this kind with other traits.

        Args:
            traits: The new traits.
            is_inside: False for rows that do not start at a whole byte, or would end behind their
                storages.
        """
        return RowKind.from_strides(
            self.dtype,
            self.shape,
            self.strides,
            storage_nbytes=self.storage_nbytes,
            traits=traits,
            byteorder=self.byteorder,
            location=self.location,
            is_inside=is_inside and self.is_inside,
        )


def is_range_inside(bit_offset: int, nbytes: int, storage_nbytes: int) -> bool:
    """Return whether `nbytes` bytes from a bit of a storage on are whole bytes inside it."""
    return bit_offset % 8 == 0 and 0 <= bit_offset // 8 <= storage_nbytes - nbytes


def separate_outside_rows(
    kinds: list[RowKind], kind_indices: list[int], offsets: Mapping[int, int]
) -> None:
    """Give rows that reach outside their storages kinds of their own, which are not contiguous.

    A kind claims to be contiguous for every row, which is wrong for a row whose offset is not a
    whole byte, or so large that the row ends behind its storage.

    Args:
        kinds: The kinds of the table. New kinds are appended.
        kind_indices: The kind of each row. The entries of rows that reach outside are replaced.
        offsets: The bit of its storage where a row starts, by row. Rows without one start at 0.
    """
    # The last bit where a row of each kind can start. None for kinds that are not contiguous, whose
    # rows need no check.
    max_bit_offsets: list[int | None] = []
    for kind in kinds:
        max_bit_offset = None
        if kind.is_contiguous:
            max_bit_offset = 8 * (kind.storage_nbytes - kind.nbytes)
        max_bit_offsets.append(max_bit_offset)

    # This may run for a million rows of few kinds, so each kind is copied once.
    outside_kind_by_kind: dict[int, int] = {}
    for row, bit_offset in offsets.items():
        kind_index = kind_indices[row]
        max_bit_offset = max_bit_offsets[kind_index]
        if max_bit_offset is None:
            continue
        if 0 <= bit_offset <= max_bit_offset and bit_offset % 8 == 0:
            continue
        if kind_index not in outside_kind_by_kind:
            kind = kinds[kind_index]
            outside_kind_by_kind[kind_index] = len(kinds)
            kinds.append(kind.with_traits(kind.traits, is_inside=False))
        kind_indices[row] = outside_kind_by_kind[kind_index]


class StorageMoved(Exception):
    """A storage in memory was resized or freed after it was described.

    Attributes:
        request_index: The position of the storage among those that were requested.
    """

    def __init__(self, request_index: int) -> None:
        super().__init__(request_index)
        self.request_index = request_index


class MemoryBytes(Protocol):
    """Storages whose bytes can be read. A storage is addressed by its index."""

    @property
    def nbytes(self) -> Ints:
        """The size of each storage."""

    def read(self, storage_indices: Sequence[int]) -> Sequence[BytesLike]:
        """Read whole storages, all together.

        Raises:
            StorageMoved: A storage in memory was resized or freed.
            HoldfastError: A storage cannot be read. The error names it.
        """

    @property
    def can_read_ranges(self) -> bool:
        """Whether `read_ranges` is available. Otherwise only whole storages can be read."""

    def read_ranges(
        self, storage_indices: Sequence[int], starts: Sequence[int], nbytes: Sequence[int]
    ) -> Sequence[BytesLike]:
        """Read a range of bytes of each storage, all together.

        Args:
            storage_indices: The storages. One may occur several times.
            starts: The first byte of each range.
            nbytes: The size of each range.
        """

    def segment(self, storage_index: int, label: str) -> bytes | Data | Memory:
        """Return one storage as a segment of a planned file, or `b""` if it is empty.

        Raises:
            StorageMoved: The storage in memory was resized or freed.
        """


class Storages(MemoryBytes, Protocol):
    """The storages of a table. They can make a lazy tensor over one of them."""

    @property
    def read_nbytes(self) -> Ints:
        """How many bytes are read to get each storage: its size, unless it is computed."""

    @property
    def stores(self) -> tuple[Store, ...]:
        """The stores that are read, apart from the memory of this process."""

    def lazy_tensor(self, storage_index: int, kind: RowKind, name: str, offset: int) -> LazyTensor:
        """Make a lazy tensor of a kind over a storage.

        Args:
            storage_index: The storage.
            kind: Dtype, shape, strides and traits of the tensor.
            name: The name of the tensor.
            offset: The bit of the storage where the first element lies.
        """


class StoredFile(Value, frozen=True, eq=False):
    """A file that has storages of a table."""

    source: Source
    key: str
    store: object
    """The store that has the file, as `Storage.home`."""


class FileColumns:
    """Storages that are ranges of files, as columns with an entry for each storage."""

    files: Sequence[StoredFile]
    file_indices: Ints
    """The file of each storage, as an index into `files`."""
    starts: Ints
    """The first byte of each storage in its file."""
    nbytes: Ints
    crcs: Ints
    """The recorded CRC-32 of each storage; `NO_CRC` if none is recorded."""

    @property
    def read_nbytes(self) -> Ints:
        """How many bytes are read to get each storage."""
        return self.nbytes


class ContiguousRows(Value, frozen=True):
    """The contiguous rows among the rows of a request, as columns with an entry for each row."""

    request_indices: Sequence[int]
    """The position of each row in the request."""
    dtypes: Sequence[AnyDType]
    shapes: Sequence[tuple[int, ...]]
    keys: Sequence[str]
    """The files. This is no column."""
    file_indices: Ints
    """The file of each row, as an index into `keys`."""
    starts: Ints
    """The first byte of each row in its file."""
    nbytes: Ints
    crcs: Ints
    """The recorded CRC-32 of exactly the bytes of each row; `NO_CRC` if none is recorded."""

    def __len__(self) -> int:
        return len(self.request_indices)

    def select(self, indices: Ints) -> ContiguousRows:
        """Return some of these rows, by their positions in the columns."""
        positions = indices.tolist()
        return ContiguousRows(
            [self.request_indices[position] for position in positions],
            [self.dtypes[position] for position in positions],
            [self.shapes[position] for position in positions],
            self.keys,
            self.file_indices[indices],
            self.starts[indices],
            self.nbytes[indices],
            self.crcs[indices],
        )


def read_tensors(tensors: Sequence[LazyTensor]) -> list[np.ndarray]:
    """Read tensors of any sources into new arrays, in parallel and with joined reads."""
    # A source joins the reads of its own files, so it receives all of its tensors at once.
    tensor_indices_by_source: dict[Source, list[int]] = {}
    for tensor_index, tensor in enumerate(tensors):
        tensor_indices_by_source.setdefault(tensor.source, []).append(tensor_index)

    # Making very many arrays would start the garbage collector again and again.
    arrays = [NO_ARRAY] * len(tensors)
    with gc_paused():
        for source, tensor_indices in tensor_indices_by_source.items():
            source_arrays = source.arrays([tensors[index] for index in tensor_indices])
            for tensor_index, array in zip(tensor_indices, source_arrays, strict=True):
                arrays[tensor_index] = array
    return arrays


class Table(Mapping[str, LazyTensor]):
    """Tensors as columns, with a row for each. The module's docstring defines the terms.

    As a mapping it has the names of the tensors, and makes a lazy tensor on request.

    Attributes:
        names: The name of each row.
        kinds: The kinds of the rows, each once.
        kind_indices: The kind of each row, as an index into `kinds`.
        storages: The storages of the rows that are not irregular.
        storage_indices: The storage of each row, as an index into `storages`. It is `IRREGULAR`
            for irregular rows.
        irregular: The lazy tensors of the irregular rows, by row.
        offsets: The bit of its storage where a row starts, by row. Rows without an entry start
            with their storage.
    """

    def __init__(
        self,
        names: Sequence[str],
        kinds: Sequence[RowKind],
        kind_indices: Sequence[int],
        storage_indices: Sequence[int],
        storages: Storages,
        irregular: Mapping[int, LazyTensor],
        *,
        offsets: Mapping[int, int] = NO_OFFSETS,
        lazy_tensors: Sequence[LazyTensor] | None = None,
    ) -> None:
        """Make a table of its columns, which the class describes.

        Args:
            lazy_tensors: All rows as lazy tensors, if these exist already, as leaves of a tree.
        """
        self.names = names
        self.kinds = kinds
        self.kind_indices = kind_indices
        self.storage_indices = storage_indices
        self.storages = storages
        self.irregular = irregular
        self.offsets = offsets
        self._lazy_tensors = lazy_tensors

    @property
    def stores(self) -> tuple[Store, ...]:
        """The stores that have the elements of the rows, each once."""
        irregular_stores = [tensor.source.store for tensor in self.irregular.values()]
        return tuple(dict.fromkeys((*self.storages.stores, *irregular_stores)))

    @cached_property
    def row_indices(self) -> Mapping[str, int]:
        """The row of each name."""
        return dict(zip(self.names, range(len(self.names)), strict=True))

    @cached_property
    def kind_index_array(self) -> Ints:
        """`kind_indices` as an array."""
        return np.array(self.kind_indices, np.int64)

    @cached_property
    def rows_not_whole(self) -> Mapping[int, None]:
        """The rows that are not whole, in ascending order. The values mean nothing."""
        return self._find_rows(lambda kind: not kind.is_whole)

    @cached_property
    def rows_read_singly(self) -> Mapping[int, None]:
        """The rows that are read one by one, through their lazy tensors, in ascending order.

        All other rows are read together, by `read_bytes`. The values of the mapping mean nothing.
        """
        if not self.storages.can_read_ranges:
            return self.rows_not_whole
        return self._find_rows(lambda kind: not kind.is_contiguous)

    def _find_rows(self, is_wanted: Callable[[RowKind], bool]) -> dict[int, None]:
        """Return the rows of the wanted kinds and all irregular rows, in ascending order.

        The rows are the keys of a dict, because callers look rows up in it.
        """
        irregular = self.irregular
        wanted_kinds = {index for index, kind in enumerate(self.kinds) if is_wanted(kind)}
        # The usual case: a check of few kinds saves a check of very many rows.
        if not irregular and not wanted_kinds:
            return {}
        wanted_rows: dict[int, None] = {}
        for row, kind_index in enumerate(self.kind_indices):
            if kind_index in wanted_kinds or row in irregular:
                wanted_rows[row] = None
        return wanted_rows

    def lazy_tensor(self, row: int) -> LazyTensor:
        """Return a row as a lazy tensor."""
        # All lazy tensors exist if they are leaves of a tree. A name and its leaf in the tree must
        # be the same object.
        if self._lazy_tensors is not None:
            return self._lazy_tensors[row]
        if row in self.irregular:
            return self.irregular[row]
        kind = self.kinds[self.kind_indices[row]]
        offset = self.offsets.get(row, 0)
        return self.storages.lazy_tensor(self.storage_indices[row], kind, self.names[row], offset)

    def locate_rows(self, rows: Sequence[int]) -> Table:
        """Return a table that has the file ranges of rows that will be read.

        Formats that must ask their files where tensors lie override this method, to ask for many
        tensors at once. In every other format the ranges are in the table already.
        """
        return self

    def recorded_crcs(self) -> dict[int, int]:
        """Map each row whose CRC-32 is recorded in its file to that CRC-32."""
        if not isinstance(self.storages, FileColumns):
            return {}
        storage_crcs = self.storages.crcs.tolist()
        row_crcs: dict[int, int] = {}
        columns = zip(self.kind_indices, self.storage_indices, strict=True)
        for row, (kind_index, storage_index) in enumerate(columns):
            # A file records the checksum of a storage. It is that of a row if the row is all of it.
            if storage_index != IRREGULAR and self.kinds[kind_index].is_whole:
                crc = storage_crcs[storage_index]
                if crc != NO_CRC:
                    row_crcs[row] = crc
        return row_crcs

    def row_kind(self, row: int) -> RowKind:
        """Return the kind of a row."""
        return self.kinds[self.kind_indices[row]]

    @property
    def kind_nbytes(self) -> Ints:
        """The size of the elements of a row of each kind, at most `MAX_KIND_NBYTES`."""
        return np.array([min(kind.nbytes, MAX_KIND_NBYTES) for kind in self.kinds], np.int64)

    def row_nbytes(self, rows: Column) -> Ints:
        """Return the size of the elements of each of these rows."""
        if isinstance(rows, range):
            kind_indices = self.kind_index_array[rows.start : rows.stop]
        else:
            kind_indices = self.kind_index_array[np.asarray(rows, np.int64)]
        return self.kind_nbytes[kind_indices]

    def read_bytes(self, rows: Sequence[int]) -> Sequence[BytesLike]:
        """Read the bytes of several contiguous rows, all together.

        Args:
            rows: Rows that are not in `rows_read_singly`.

        Raises:
            SaveError: A tensor in memory was resized or freed.
        """
        # Most often each row has the storage of the same index, and nothing needs to be looked up.
        storage_indices = rows
        if self.storage_indices != range(len(self.names)):
            storage_indices = [self.storage_indices[row] for row in rows]
        try:
            # Storages are read whole if the rows are. If ranges cannot be read, all rows that come
            # here are whole, because `rows_read_singly` has the others.
            if not self.storages.can_read_ranges or all(kind.is_whole for kind in self.kinds):
                return self.storages.read(storage_indices)
            starts = [self.offsets.get(row, 0) // 8 for row in rows]
            nbytes = [self.kinds[self.kind_indices[row]].nbytes for row in rows]
            return self.storages.read_ranges(storage_indices, starts, nbytes)
        except StorageMoved as error:
            raise self._build_moved_error(rows[error.request_index]) from None

    def segment(self, row: int, label: str) -> bytes | Data | Memory:
        """Return a whole row as a segment of a planned file, or `b""` if it has no bytes.

        Args:
            row: A row that is all of its storage.
            label: What the format calls the segment.

        Raises:
            SaveError: The tensor in memory was resized or freed.
        """
        try:
            return self.storages.segment(self.storage_indices[row], label)
        except StorageMoved:
            raise self._build_moved_error(row) from None

    def _build_moved_error(self, row: int) -> SaveError:
        return SaveError(
            "its storage was resized or freed while it was saved", tensor=self.names[row]
        )

    def select(self, rows: Sequence[int], names: Sequence[str] | None = None) -> Table:
        """Return a table of some rows, in this order.

        Args:
            rows: The rows of this table.
            names: New names for the selected rows. By default they keep theirs.
        """
        if names is None:
            names = [self.names[row] for row in rows]
        irregular: dict[int, LazyTensor] = {}
        if self.irregular:
            for new_row, row in enumerate(rows):
                if row in self.irregular:
                    irregular[new_row] = self.irregular[row].renamed(names[new_row])
        return Table(
            names,
            self.kinds,
            [self.kind_indices[row] for row in rows],
            [self.storage_indices[row] for row in rows],
            self.storages,
            irregular,
            offsets=self.select_offsets(rows),
        )

    def select_offsets(self, rows: Sequence[int]) -> Mapping[int, int]:
        """Return the offsets of some rows, by their positions in `rows`."""
        offsets = self.offsets
        if not offsets:
            return offsets
        return {new_row: offsets[row] for new_row, row in enumerate(rows) if row in offsets}

    def with_entries(
        self, rows: Sequence[int], entries: Mapping[int, Mapping[str, LazyTensor]]
    ) -> Table:
        """Return a table of some rows, in which lazy tensors replace some of these.

        Args:
            rows: The rows of this table, in the order of the new one.
            entries: By row, the tensors that replace it, with their names. A row may be replaced
                by several tensors or by none.
        """
        names: list[str] = []
        kinds = [*self.kinds]
        kind_indices: list[int] = []
        storage_indices: list[int] = []
        irregular: dict[int, LazyTensor] = {}
        offsets: dict[int, int] = {}
        for row in rows:
            # A row that is not replaced. The new row has the position that comes next in the lists.
            if row not in entries:
                new_row = len(names)
                if row in self.irregular:
                    irregular[new_row] = self.irregular[row]
                if row in self.offsets:
                    offsets[new_row] = self.offsets[row]
                names.append(self.names[row])
                kind_indices.append(self.kind_indices[row])
                storage_indices.append(self.storage_indices[row])
                continue

            # The storage of a new tensor is not in `storages`, so its row is irregular.
            for name, tensor in entries[row].items():
                irregular[len(names)] = tensor
                names.append(name)
                kind_indices.append(len(kinds))
                kinds.append(RowKind.from_tensor(tensor))
                storage_indices.append(IRREGULAR)
        return Table(
            names, kinds, kind_indices, storage_indices, self.storages, irregular, offsets=offsets
        )

    def find_contiguous_rows(self, rows: Sequence[int]) -> list[tuple[Source, ContiguousRows]]:
        """Return where the contiguous ones among these rows lie in files, for each source.

        Rows that are not contiguous are left out. So the result is empty for storages in memory.
        """
        storages = self.storages
        if not isinstance(storages, FileColumns):
            return []
        contiguous_rows = self._describe_contiguous_rows(rows, storages)

        file_indices_by_source: dict[Source, list[int]] = {}
        for file_index, file in enumerate(storages.files):
            file_indices_by_source.setdefault(file.source, []).append(file_index)
        # The usual case: one source has all files, and so all rows.
        if len(file_indices_by_source) == 1:
            (source,) = file_indices_by_source
            return [(source, contiguous_rows)]

        rows_by_source: list[tuple[Source, ContiguousRows]] = []
        for source, file_indices in file_indices_by_source.items():
            is_in_source = np.isin(contiguous_rows.file_indices, file_indices)
            source_rows = contiguous_rows.select(np.flatnonzero(is_in_source))
            rows_by_source.append((source, source_rows))
        return rows_by_source

    def _describe_contiguous_rows(
        self, rows: Sequence[int], storages: FileColumns
    ) -> ContiguousRows:
        """Return the file range of each contiguous row among these rows, as columns.

        Args:
            rows: The rows that were requested, of all sources.
            storages: The storages of this table, which are ranges of files.
        """
        # Keep the contiguous rows, with their positions in the request.
        kinds = self.kinds
        request_indices: Sequence[int] = range(len(rows))
        if self.irregular or not all(kind.is_contiguous for kind in kinds):
            contiguous_indices: list[int] = []
            for index, row in enumerate(rows):
                is_irregular = self.storage_indices[row] == IRREGULAR
                if not is_irregular and kinds[self.kind_indices[row]].is_contiguous:
                    contiguous_indices.append(index)
            request_indices = contiguous_indices
            rows = [rows[index] for index in request_indices]
        kind_indices = [self.kind_indices[row] for row in rows]

        # Most often all rows of a file are read, in the order of their storages. Then the columns
        # of the storages are those of the rows, and need not be copied.
        selection: slice | Ints = slice(None)
        all_storages = range(len(storages.starts))
        if rows != all_storages or self.storage_indices != all_storages:
            selection = np.array([self.storage_indices[row] for row in rows], np.int64)
        starts = storages.starts[selection]
        nbytes = storages.nbytes[selection]
        crcs = storages.crcs[selection]

        # A row that is only a part of its storage has another start, size and checksum.
        if not all(kind.is_whole for kind in kinds if kind.is_contiguous):
            if self.offsets:
                start_in_storage = [self.offsets.get(row, 0) // 8 for row in rows]
                starts = starts + np.array(start_in_storage, np.int64)
            kind_index_array = np.array(kind_indices, np.int64)
            nbytes = self.kind_nbytes[kind_index_array]
            # The recorded checksum of a storage is that of a row only if the row is whole.
            is_whole = np.array([kind.is_whole for kind in kinds], np.bool_)
            crcs = np.where(is_whole[kind_index_array], crcs, NO_CRC)

        dtypes = [kind.dtype.numpy for kind in kinds]
        return ContiguousRows(
            request_indices,
            [dtypes[index] for index in kind_indices],
            [kinds[index].shape for index in kind_indices],
            [file.key for file in storages.files],
            storages.file_indices[selection],
            starts,
            nbytes,
            crcs,
        )

    def read_arrays(self, rows: Sequence[int]) -> list[np.ndarray]:
        """Read rows into new arrays, in parallel and with joined reads.

        Contiguous rows are read by their file ranges, without a lazy tensor for each. All other
        rows are read through their lazy tensors.
        """
        # Making very many arrays would start the garbage collector again and again.
        arrays = [NO_ARRAY] * len(rows)
        contiguous_indices: list[int] = []
        with gc_paused():
            for source, contiguous_rows in self.find_contiguous_rows(rows):
                request_indices = contiguous_rows.request_indices
                # An error message needs the tensor of a row, which is made only then.
                source_arrays = source.read_rows(
                    contiguous_rows, lambda index: self.lazy_tensor(rows[index])
                )
                for index, array in zip(request_indices, source_arrays, strict=True):
                    arrays[index] = array
                contiguous_indices += request_indices

            if len(contiguous_indices) < len(rows):
                other_indices = sorted({*range(len(rows))}.difference(contiguous_indices))
                tensors = [self.lazy_tensor(rows[index]) for index in other_indices]
                for index, array in zip(other_indices, read_tensors(tensors), strict=True):
                    arrays[index] = array
        return arrays

    def with_lazy_tensors(self) -> Table:
        """Return this table with all of its lazy tensors made once, for repeated use."""
        if self._lazy_tensors is not None:
            return self
        return self._replace_lazy_tensors(list(map(self.lazy_tensor, range(len(self.names)))))

    def without_lazy_tensors(self) -> Table:
        """Return this table without the lazy tensors that exist already, to save memory."""
        if self._lazy_tensors is None:
            return self
        return self._replace_lazy_tensors(None)

    def _replace_lazy_tensors(self, lazy_tensors: Sequence[LazyTensor] | None) -> Table:
        return Table(
            self.names,
            self.kinds,
            self.kind_indices,
            self.storage_indices,
            self.storages,
            self.irregular,
            offsets=self.offsets,
            lazy_tensors=lazy_tensors,
        )

    def __getitem__(self, name: str) -> LazyTensor:
        return self.lazy_tensor(self.row_indices[name])

    def dtype_and_shape(self, name: str) -> tuple[DType, tuple[int, ...]]:
        """Return the dtype and the shape of a tensor without making its lazy tensor."""
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
