"""Storages that are ranges of files, as columns.

A row of a table (`core/table.py`) has the index of a storage. `FileStorages` has these storages:
storage `i` is `nbytes[i]` bytes of the file `files[file_indices[i]]`, from the byte `starts[i]` on.
An open checkpoint with a million tensors has five arrays and no object for each of its tensors.

`tabulate` makes such a table from lazy tensors. Content that is computed from a file, such as an
inflated record, is a range of a virtual file of the store that computes it.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct, field

from holdfast.core.arrays import Ints
from holdfast.core.chunk import Storage
from holdfast.core.crc import crc32_each
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.protocols import Store
from holdfast.core.table import (
    IRREGULAR,
    Column,
    FileColumns,
    RowKind,
    StoredFile,
    Table,
    is_range_inside,
)
from holdfast.core.tensor import MAX_FILE_OFFSET, NO_CRC, FileRange, LazyTensor, StridedPosition
from holdfast.core.value import Value
from holdfast.engine.coalesce import MEMORY, coalesce
from holdfast.errors import Corrupted, HoldfastError, error_context

if TYPE_CHECKING:
    from holdfast.engine.saves import Data

UINT8 = next(dtype for dtype in DTYPES.rows if dtype.name == "uint8")

COMPUTED_COLUMNS = (
    "kinds",
    "kind_indices",
    "storage_indices",
    "storages",
    "irregular",
    "offsets",
)
"""The attributes of a `ViewTable` that are computed when one of them is first used."""


class ViewTable(Table):
    """A table of lazy tensors that exist already, by name.

    Its columns are computed when one of them is first used. A tensor that is one range of a file
    becomes a row over that range. All other tensors become irregular rows.
    """

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        """Create a table of these tensors, in their order."""
        self.names = [*tensors]
        self._lazy_tensors = [*tensors.values()]

    def __getattr__(self, name: str) -> object:
        """Compute all columns. Python calls this for an attribute that does not exist yet."""
        if name not in COMPUTED_COLUMNS:
            raise AttributeError(f"a table has no {name!r}", name=name, obj=self)
        assert self._lazy_tensors is not None  # the constructor sets them
        table = tabulate(self.names, self._lazy_tensors)
        # Two threads may both get here. They compute equal columns.
        for column in COMPUTED_COLUMNS:
            setattr(self, column, getattr(table, column))
        return getattr(table, name)

    def dtype_and_shape(self, name: str) -> tuple[DType, tuple[int, ...]]:
        """Return the dtype and the shape of a tensor, without computing the columns."""
        tensor = self.lazy_tensor(self.row_indices[name])
        return tensor.dtype, tensor.shape


def tabulate(names: Sequence[str], tensors: Sequence[LazyTensor]) -> Table:
    """Describe lazy tensors as the rows of a table, without reading any data.

    A tensor that is one range of a file becomes a row over that range. All other tensors, such as
    those with several chunks, become irregular rows, which keep the lazy tensor itself.

    Args:
        names: The names of the rows.
        tensors: The tensor of each row.
    """
    # A row is irregular until the builder finds the storage of its tensor.
    builder = _TableBuilder(
        kind_indices=[0] * len(tensors), storage_indices=[IRREGULAR] * len(tensors)
    )
    remaining_rows = builder.add_file_rows(tensors)
    for row in remaining_rows:
        builder.add_row(row, tensors[row])

    if len(builder.first_storage_indices) == 1 and not builder.single_storages:
        # All tensors are rows of one open checkpoint, as they usually are.
        (storages,) = builder.first_storage_indices
    else:
        storages = builder.join_storages()
    return Table(
        names,
        builder.kinds,
        array("q", builder.kind_indices),
        array("q", builder.storage_indices),
        storages,
        builder.irregular,
        offsets=builder.offsets,
        lazy_tensors=tensors,
    )


class _TableBuilder(Struct):
    """The columns of a table while lazy tensors are added to it.

    Most tensors are rows of an open checkpoint. Its storages are taken over as they are. The
    storages of other tensors are collected one by one, and get the indices after those.
    """

    kind_indices: list[int]
    storage_indices: list[int]
    kinds: list[RowKind] = field(default_factory=list)
    irregular: dict[int, LazyTensor] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)
    kind_index_by_key: dict[object, int] = field(default_factory=dict)
    """The indices of `kinds`. A key has everything that the kind of a tensor depends on."""
    first_storage_indices: dict[FileStorages, int] = field(default_factory=dict)
    """The storages that are taken over, each with the index of its first storage."""
    column_count: int = 0
    """How many storages are taken over."""
    single_storages: dict[object, tuple[int, Storage, LazyTensor]] = field(default_factory=dict)
    """The other storages: the index, the storage, and the first tensor over it."""

    def add_file_rows(self, tensors: Sequence[LazyTensor]) -> list[int]:
        """Add the tensors that are rows of an open checkpoint.

        This fills the entries of these tensors in `storage_indices`, `offsets` and `kind_indices`,
        and adds their storages and kinds. There can be a million tensors, so everything is done in
        one loop, which calls no function for most of them.

        Args:
            tensors: All tensors of the new table. The caller keeps them alive.

        Returns:
            The indices of the tensors that were not added.
        """
        remaining_indices: list[int] = []
        storages: FileStorages | None = None
        first_storage_index = 0
        for index, tensor in enumerate(tensors):
            position = tensor.position
            # A tensor without bytes gets a storage of its own, so `add_row` adds it.
            if type(position) is not FileRow or not position.kind.storage_nbytes:
                remaining_indices.append(index)
                continue

            # Neighboring tensors usually come from the same checkpoint, so the index of its first
            # storage is looked up only when the checkpoint changes.
            if position.storages is not storages:
                storages = position.storages
                if storages not in self.first_storage_indices:
                    self.first_storage_indices[storages] = self.column_count
                    self.column_count += len(storages.starts)
                first_storage_index = self.first_storage_indices[storages]
            self.storage_indices[index] = first_storage_index + position.storage_index
            if position.offset:
                self.offsets[index] = position.offset

            # A tensor usually has the traits of its kind. If they were replaced, a kind is made
            # that has the new ones. Traits are compared by identity, which is faster: the tensors
            # keep them alive, so no two of them have the same id.
            kind = position.kind
            traits = tensor.traits
            kind_key: object = kind
            if kind.traits is not traits:
                kind_key = (kind, id(traits))
            if kind_key not in self.kind_index_by_key:
                if kind.traits is not traits:
                    kind = kind.with_traits(traits)
                self.kind_index_by_key[kind_key] = len(self.kinds)
                self.kinds.append(kind)
            self.kind_indices[index] = self.kind_index_by_key[kind_key]
        return remaining_indices

    def add_row(self, row: int, tensor: LazyTensor) -> None:
        """Add a tensor that is not a row of an open checkpoint.

        A tensor that is one range of a file becomes a row over its storage. Any other tensor
        becomes an irregular row.

        Args:
            row: The index of the tensor in the new table.
            tensor: The tensor. The caller keeps it alive.
        """
        # A kind is what all tensors of one layout share: its key is all that the kind depends on.
        # Dtypes and traits are compared by identity, which is faster. The tensors keep them alive,
        # so no two of them have the same id. Equal ones are nearly always the same object.
        kind_key: object = (id(tensor.dtype), tensor.shape, id(tensor.traits))
        position = _locate_in_file(tensor)
        if position is None:
            self.irregular[row] = tensor
        else:
            storage = position.storage
            kind_key = (
                kind_key,
                position.strides,
                is_range_inside(position.offset, tensor.nbytes, storage.nbytes),
                storage.nbytes,
                storage.byteorder,
                storage.location,
            )
            # Tied tensors have equal storages, and share an index. Tensors without bytes have
            # nothing to share, so each gets a storage of its own, with its row as key.
            storage_key: object = storage if storage.nbytes else row
            new_index = self.column_count + len(self.single_storages)
            storage_index, _, _ = self.single_storages.setdefault(
                storage_key, (new_index, storage, tensor)
            )
            self.storage_indices[row] = storage_index
            if position.offset:
                self.offsets[row] = position.offset

        if kind_key not in self.kind_index_by_key:
            if position is None:
                kind = RowKind(tensor.dtype, tensor.shape, tensor.traits, tensor.nbytes)
            else:
                kind = RowKind.from_tensor(tensor)
            self.kind_index_by_key[kind_key] = len(self.kinds)
            self.kinds.append(kind)
        self.kind_indices[row] = self.kind_index_by_key[kind_key]

    def join_storages(self) -> FileStorages:
        """Return the storages of all rows as one object, after all rows have been added.

        The storages of open checkpoints come first, followed by those that were collected one by
        one. The indices that the rows already have count in this order.
        """
        members = [*self.first_storage_indices]
        if self.single_storages:
            singles = [(storage, tensor) for _, storage, tensor in self.single_storages.values()]
            members.append(_collect_storages(singles))
        if not members:
            return NO_FILES
        if len(members) == 1:
            return members[0]

        joined = JoinedStorages(members)
        if self.single_storages:
            # A storage that was collected may be one of an open checkpoint. The rows of both must
            # have the same index, because that is how tied tensors are recognized.
            same_storages = joined.find_duplicates(self.column_count)
            self.storage_indices = [
                same_storages.get(index, index) for index in self.storage_indices
            ]
        return joined


def _locate_in_file(tensor: LazyTensor) -> StridedPosition | None:
    """Return where a tensor lies in one range of a file.

    Returns:
        None if the tensor has several chunks, is computed, or is not located yet; and if a file
        claims a position so large that arithmetic with 64 bits could overflow.
    """
    position = tensor.strided_position()
    # A subclass of `Storage` locates its bytes when its start is first used. That may need a read,
    # so such a tensor stays irregular.
    if position is None or type(position.storage) is not Storage:
        return None
    storage = position.storage
    is_addressable = (
        0 <= storage.start < MAX_FILE_OFFSET
        and storage.nbytes < MAX_FILE_OFFSET
        # The offset is counted in bits.
        and 0 <= position.offset <= 8 * storage.nbytes
        and tensor.nbytes < MAX_FILE_OFFSET
    )
    if not is_addressable:
        return None
    return position


def _collect_storages(singles: Sequence[tuple[Storage, LazyTensor]]) -> FileStorages:
    """Describe storages as columns.

    Args:
        singles: Each storage with a tensor over it. The tensor gives the storage its name.
    """
    files: list[StoredFile] = []
    file_index_by_key: dict[tuple[int, int, str], int] = {}
    storage_rows: list[tuple[int, int, int, int]] = []
    for storage, tensor in singles:
        # Files are the same if the objects that read them are the same. `files` keeps these objects
        # alive, so that no other object gets the same id.
        file_key = (id(tensor.source), id(storage.home), storage.key)
        if file_key not in file_index_by_key:
            file_index_by_key[file_key] = len(files)
            files.append(StoredFile(tensor.source, storage.key, storage.home))
        crc = NO_CRC if storage.crc32 is None else storage.crc32
        storage_rows.append((file_index_by_key[file_key], storage.start, storage.nbytes, crc))

    columns = np.array(storage_rows, np.int64).reshape(-1, 4).T
    names = [tensor.name for _, tensor in singles]
    labels = [storage.label for storage, _ in singles]
    return FileStorages(files, *columns, names=names, labels=labels)


class FileRow(Value, frozen=True, eq=False):
    """The position of a tensor that is a row of a table over files."""

    storages: FileStorages
    storage_index: int
    kind: RowKind
    offset: int = 0
    """The bit of the storage where the first element lies."""

    def strided_position(self) -> StridedPosition:
        """Return the storage as an object, with the offset and the strides of the tensor."""
        storage = self.storages.storage(self.storage_index, self.kind)
        return StridedPosition(storage, self.offset, self.kind.strides)

    def file_range(self, dtype: DType, shape: tuple[int, ...]) -> FileRange | None:
        """Return the range of the file that has the elements, None if the row is not contiguous."""
        if not self.kind.is_contiguous:
            return None
        storages = self.storages
        file = storages.files[storages.file_indices.item(self.storage_index)]
        start = storages.starts.item(self.storage_index) + self.offset // 8
        crc = NO_CRC
        if self.kind.is_whole:
            # The checksum of a storage is that of all its bytes, and says nothing about fewer.
            crc = storages.crcs.item(self.storage_index)
        return FileRange(file.key, start, self.kind.nbytes, crc)


class FileStorages(FileColumns):
    """Ranges of files as the storages of a table, each with the checksum that its file records."""

    can_read_ranges = True

    def __init__(
        self,
        files: Sequence[StoredFile],
        file_indices: Column,
        starts: Column,
        nbytes: Column,
        crcs: Column,
        *,
        names: Sequence[str],
        labels: Sequence[str] | None = None,
    ) -> None:
        """Create storages from columns of one length.

        Args:
            files: The files.
            file_indices: The index of the file of each storage.
            starts: The first byte of each storage in its file.
            nbytes: The length of each storage.
            crcs: The CRC-32 that the file records of each storage; `NO_CRC` if it records none.
            names: For each storage the name of a tensor over it, for errors.
            labels: What each file calls its storages, by default the same as `names`.
        """
        self.files = files
        self.file_indices = np.asarray(file_indices, np.int64)
        self.starts = np.asarray(starts, np.int64)
        self.nbytes = np.asarray(nbytes, np.int64)
        self.crcs = np.asarray(crcs, np.int64)
        self.names = names
        self._labels = names if labels is None else labels

    def __len__(self) -> int:
        """Return the number of storages."""
        return len(self.starts)

    def with_names(self, names: Sequence[str], rows: Ints, storage_indices: Ints) -> FileStorages:
        """Return these storages, named after the tensors of another table.

        Errors use these names. A storage of several tensors is named after the first of them.

        Args:
            names: The names of all tensors of the table.
            rows: The rows of the tensors over these storages, as positions in `names`.
            storage_indices: The index of the storage of each of these rows.
        """
        renamed = copy.copy(self)
        count = len(self.starts)
        if len(rows) == len(names) == count and (storage_indices == rows).all():
            # Each tensor has the storage with its own index, so no list has to be built.
            renamed.names = names
            return renamed
        storage_names = [""] * count
        for row, storage_index in zip(rows.tolist(), storage_indices.tolist(), strict=True):
            if not storage_names[storage_index]:
                storage_names[storage_index] = names[row]
        renamed.names = storage_names
        return renamed

    @property
    def stores(self) -> tuple[Store, ...]:
        """The stores of the files, each once."""
        return tuple(dict.fromkeys(file.source.store for file in self.files))

    def storage(self, storage_index: int, kind: RowKind) -> Storage:
        """Return a storage as an object.

        Args:
            storage_index: The index of the storage.
            kind: The kind of the tensors over it, which has their byte order and their device.
        """
        file = self.files[self.file_indices.item(storage_index)]
        crc = self.crcs.item(storage_index)
        return Storage(
            file.key,
            self.starts.item(storage_index),
            self.nbytes.item(storage_index),
            kind.byteorder,
            None if crc == NO_CRC else crc,
            kind.location,
            self._labels[storage_index],
            home=file.store,
        )

    def lazy_tensor(
        self, storage_index: int, kind: RowKind, name: str, offset: int = 0
    ) -> LazyTensor:
        """Return a tensor over a storage.

        Args:
            storage_index: The index of the storage.
            kind: The dtype, shape and layout of the tensor.
            name: The name of the tensor.
            offset: The bit of the storage where the first element lies.
        """
        source = self.files[self.file_indices.item(storage_index)].source
        # The tensor has no chunks yet. It builds them from its position when they are needed.
        position = FileRow(self, storage_index, kind, offset)
        return LazyTensor(name, kind.dtype, kind.shape, (), source, kind.traits, position)

    def read(self, storage_indices: Sequence[int]) -> list[memoryview]:
        """Read whole storages, compare their checksums, and return the bytes of each."""
        indices = np.array(storage_indices, np.int64)
        return self._read_file_ranges(indices, self.starts[indices], self.nbytes[indices])

    def read_ranges(
        self, storage_indices: Sequence[int], starts: Sequence[int], nbytes: Sequence[int]
    ) -> list[memoryview]:
        """Read a range of each of these storages, and return the bytes of each range.

        Args:
            storage_indices: The storage of each range.
            starts: The first byte of each range in its storage.
            nbytes: The length of each range.
        """
        indices = np.array(storage_indices, np.int64)
        file_starts = self.starts[indices] + np.array(starts, np.int64)
        return self._read_file_ranges(indices, file_starts, np.array(nbytes, np.int64))

    def _read_file_ranges(
        self, storage_indices: Ints, starts: Ints, nbytes: Ints
    ) -> list[memoryview]:
        """Read ranges of files. Neighbors in a file are one read.

        Args:
            storage_indices: The storage of each range.
            starts: The first byte of each range in its file.
            nbytes: The length of each range.

        Returns:
            The bytes of each range.

        Raises:
            Corrupted: A storage that was read completely does not have its recorded checksum.
        """
        # Sort the ranges by file and start. Empty ranges keep the empty content.
        contents: list[memoryview] = [memoryview(b"")] * len(storage_indices)
        file_indices = self.file_indices[storage_indices]
        order = np.lexsort((starts, file_indices))
        order = order[nbytes[order] > 0]

        file_edges = np.flatnonzero(np.diff(file_indices[order])) + 1
        for positions in np.split(order, file_edges):
            if not len(positions):
                # `np.split` returns one empty array if there are no ranges.
                continue
            # `coalesce` returns where each group of neighbors begins.
            stops = starts[positions] + nbytes[positions]
            first_positions = coalesce(starts[positions], stops, MEMORY).tolist()
            for first, last in pairwise([*first_positions, len(positions)]):
                group = positions[first:last]
                group_contents = self._read_neighbors(
                    storage_indices[group], starts[group], nbytes[group]
                )
                for position, content in zip(group.tolist(), group_contents, strict=True):
                    contents[position] = content

        # The checksum of a storage says nothing about a range that is only a part of it.
        is_complete = nbytes == self.nbytes[storage_indices]
        recorded_crcs = np.where(is_complete, self.crcs[storage_indices], NO_CRC)
        if (recorded_crcs != NO_CRC).any():
            crcs = crc32_each(contents)
            pairs = zip(storage_indices.tolist(), crcs, recorded_crcs.tolist(), strict=True)
            for storage_index, crc, recorded_crc in pairs:
                if recorded_crc not in (crc, NO_CRC):
                    raise self._build_corrupted_error(storage_index, recorded_crc, crc)
        return contents

    def _read_neighbors(
        self, storage_indices: Ints, starts: Ints, nbytes: Ints
    ) -> list[memoryview]:
        """Read neighboring ranges of one file by one call, and return the bytes of each.

        Args:
            storage_indices: The storage of each range, for the file and for errors.
            starts: The first byte of each range in the file, in ascending order.
            nbytes: The length of each range.
        """
        file = self.files[self.file_indices.item(storage_indices.item(0))]
        data_start = starts.item(0)
        data_stop = (starts + nbytes).max().item()
        data = np.empty(data_stop - data_start, np.uint8).data
        # The contents are views of `data`. So they are filled by the read below.
        contents: list[memoryview] = []
        for start, count in zip((starts - data_start).tolist(), nbytes.tolist(), strict=True):
            contents.append(data[start : start + count])
        try:
            file.source.store.read(file.key, data_start, data)
        except HoldfastError:
            # Read them one by one, so that the error names the tensor that cannot be read.
            ranges = zip(storage_indices.tolist(), starts.tolist(), contents, strict=True)
            for storage_index, start, content in ranges:
                with error_context(tensor=self.names[storage_index]):
                    file.source.store.read(file.key, start, content)
        return contents

    def _build_corrupted_error(self, storage_index: int, expected: int, found: int) -> Corrupted:
        """Return the error for a storage whose bytes do not have the recorded checksum.

        Args:
            storage_index: The index of the storage.
            expected: The recorded checksum.
            found: The checksum of the bytes that were read.
        """
        return Corrupted(
            "the source does not have the checksum that it records: it changed after it was "
            "written; download or copy it again",
            file=self.files[self.file_indices.item(storage_index)].key,
            tensor=self.names[storage_index],
            offset=self.starts.item(storage_index),
            expected=expected,
            found=found,
        )

    def segment(self, storage_index: int, label: str) -> Data | bytes:
        """Return the bytes of a storage as a segment of a save plan; `b""` if there are none."""
        # Imported here because only saves need it.
        from holdfast.engine.saves import Data

        nbytes = self.nbytes.item(storage_index)
        if not nbytes:
            return b""
        # A storage can have elements of any dtype, so it is written as a tensor of its bytes.
        kind = RowKind.from_shape(UINT8, (nbytes,))
        return Data(self.lazy_tensor(storage_index, kind, self.names[storage_index]), label)


class JoinedStorages(FileStorages):
    """The storages of several checkpoints, one after the other."""

    def __init__(self, members: Sequence[FileStorages]) -> None:
        """Join the columns of several `FileStorages`. A file of several members is listed once."""
        files: list[StoredFile] = []
        file_index_by_key: dict[tuple[int, int, str], int] = {}
        file_columns: list[Ints] = []
        for member in members:
            # The index in `files` of each file of this member.
            member_files: list[int] = []
            for file in member.files:
                # `files` keeps the source and the store alive, so their ids stay unique.
                file_key = (id(file.source), id(file.store), file.key)
                if file_key not in file_index_by_key:
                    file_index_by_key[file_key] = len(files)
                    files.append(file)
                member_files.append(file_index_by_key[file_key])
            file_columns.append(np.array(member_files, np.int64)[member.file_indices])

        names: list[str] = []
        labels: list[str] = []
        for member in members:
            names += member.names
            labels += member._labels
        super().__init__(
            files,
            np.concatenate(file_columns),
            np.concatenate([member.starts for member in members]),
            np.concatenate([member.nbytes for member in members]),
            np.concatenate([member.crcs for member in members]),
            names=names,
            labels=labels,
        )

    def find_duplicates(self, first: int) -> dict[int, int]:
        """Find storages that are equal to a storage of an earlier member.

        Args:
            first: The index of the first storage that is compared with those before it.

        Returns:
            For each storage from `first` on that has an equal storage before `first`, the index of
            that equal storage.
        """
        # Usually no two storages have the same start, and nothing else has to be compared.
        candidates = np.flatnonzero(np.isin(self.starts[:first], self.starts[first:]))
        if not len(candidates):
            return {}

        def list_ranges(storage_indices: Ints) -> Iterator[tuple[int, ...]]:
            """Yield the file, start, length and checksum of each of these storages."""
            columns = (self.file_indices, self.starts, self.nbytes, self.crcs)
            return zip(*(column[storage_indices].tolist() for column in columns), strict=True)

        index_of_range = dict(zip(list_ranges(candidates), candidates.tolist(), strict=True))
        duplicates: dict[int, int] = {}
        for index, file_range in enumerate(list_ranges(np.arange(first, len(self))), first):
            # Storages without bytes are never shared.
            if self.nbytes.item(index) and file_range in index_of_range:
                duplicates[index] = index_of_range[file_range]
        return duplicates


NO_FILES = FileStorages([], (), (), (), (), names=())
