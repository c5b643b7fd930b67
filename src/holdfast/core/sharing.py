"""Finds tensors that share memory: those of one storage, and those that are one view. Reads nothing.

Tensors of a table share a storage if they have the same storage index. How a tensor lies in its
storage is its kind and its offset. So all of this is comparing integers.

    storage    │ · · a a a a · · · · b b · · │
                     c c c c                       c is the same view as a
                         d d                       d is the second half of a

    groups                      {a, b, c, d}       all tensors of the storage
    ties                        c → a              tensors that are the same view
    group_overlapping_ranges    {a, c, d}, {b}     tensors that have bytes in common

A format that copies every tensor may record where each lay before (`Traits.alias`). With
`stored_aliases=True` such a tensor counts as the view that it was (`LazyTensor.shared_chunks`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import count, repeat
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DType
from holdfast.core.protocols import Source
from holdfast.core.table import IRREGULAR, FileColumns, Table
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.core.value import Value
from holdfast.errors import LimitExceeded

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

ViewIdentity = tuple[DType, tuple[int, ...], tuple[Chunk, ...], bool, bool]
"""Dtype, shape, chunks, and whether the stored elements are conjugated or negated. All names of one
view have the same, and no other view has it."""

ByteRange = tuple[int, int, T]
"""The first byte of something, the byte after its last one, and what it is."""

UNKNOWN_PLACEMENT = -1
"""The placement of a tensor that is alone in its storage, so that nobody compares it."""


def identify_view(tensor: LazyTensor, *, stored_alias: bool = False) -> ViewIdentity:
    """Return what distinguishes the view of a tensor from all other views.

    Tensors with the same identity have the same elements, even if the stored bytes change.

    Args:
        tensor: The tensor.
        stored_alias: Whether a tensor that was saved as a copy counts as the view that it was.
    """
    chunks = tensor.shared_chunks if stored_alias else tensor.chunks
    return tensor.dtype, tensor.shape, chunks, tensor.traits.conj, tensor.traits.neg


def group_repeated_keys(keys: Sequence[K], values: Sequence[T]) -> dict[K, list[T]]:
    """Return the values of each key that occurs more than once, in their order.

    Args:
        keys: The key of each value.
        values: The values.
    """
    # The keys are counted first, because most of a million keys occur once and need no list.
    groups: dict[K, list[T]] = {}
    for key, occurrence_count in Counter(keys).items():
        if occurrence_count > 1:
            groups[key] = []
    if groups:
        for key, value in zip(keys, values, strict=True):
            if key in groups:
                groups[key].append(value)
    return groups


class SharedRows(Value, frozen=True, eq=False):
    """The rows of tables that have bytes, with the storages and views that they share.

    A row of several tables is its position in all of them, one table behind the other. Storages and
    views have ids, which are equal if the storages or views are.
    """

    rows: Sequence[int]
    """The rows, in ascending order."""
    storage_ids: Sequence[int]
    """The storage of each row. A row in several storages has an id that stands for all of them."""
    view_ids: Sequence[int]
    """The view of each row. Rows with one id have the same elements at the same place."""
    storage_nbytes: Mapping[int, int]
    """The size of each storage, by its id."""
    member_storages: Mapping[int, tuple[int, ...]]
    """The storages that an id stands for, if these are several."""
    stored_aliases: bool
    """Whether tensors that were saved as copies count as the views that they were."""

    def ties(self) -> dict[int, int]:
        """Map each row that repeats the view of an earlier row to the first row with that view.

        Rows have the same view if they have the same elements at the same place of one storage, as
        tied weights do.
        """
        first_row_by_view: dict[int, int] = {}
        first_row_by_repetition: dict[int, int] = {}
        for row, view_id in zip(self.rows, self.view_ids, strict=True):
            first_row = first_row_by_view.setdefault(view_id, row)
            if first_row != row:
                first_row_by_repetition[row] = first_row
        return first_row_by_repetition

    def storage_rows(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return two parallel lists, rows and storage ids, with one entry for each storage of each row.

        A row whose elements lie in several storages has an entry for each of these. In the fields
        `rows` and `storage_ids` it has only one, with an id that stands for all of its storages.
        """
        # The usual case: every row lies in one storage.
        if not self.member_storages:
            return self.rows, self.storage_ids

        rows: list[int] = []
        storage_ids: list[int] = []
        for row, storage_id in zip(self.rows, self.storage_ids, strict=True):
            member_ids = self.member_storages.get(storage_id, (storage_id,))
            for member_id in member_ids:
                rows.append(row)
                storage_ids.append(member_id)
        return rows, storage_ids

    def groups(self) -> list[tuple[int, list[int]]]:
        """Return the ids of storages that several rows share, each with its rows.

        The storages are in the order of their first rows.
        """
        rows, storage_ids = self.storage_rows()
        return list(group_repeated_keys(storage_ids, rows).items())

    def first_rows(self, row_count: int) -> list[int]:
        """Return for each row the first row that shares a storage with it, or itself.

        Args:
            row_count: How many rows the tables have, with those that have no bytes.
        """
        rows, storage_ids = self.storage_rows()
        # Rows without bytes share nothing, so they keep themselves.
        first_rows = list(range(row_count))
        first_row_by_storage: dict[int, int] = {}
        for row, storage_id in zip(rows, storage_ids, strict=True):
            first_row = first_row_by_storage.setdefault(storage_id, row)
            # A row in several storages is listed several times. The earliest row counts.
            first_rows[row] = min(first_rows[row], first_row)
        return first_rows

    def find_storage(self, storage_id: int, tensor: LazyTensor, row: int) -> Storage:
        """Return the storage with an id.

        Args:
            storage_id: The storage.
            tensor: A tensor that has elements in it.
            row: The row of this tensor.
        """
        storages = tensor.shared_storages if self.stored_aliases else tensor.storages
        if len(storages) == 1:
            return storages[0]
        # The row has the id of a group of storages, whose members are in the order of `storages`.
        group_id = self.storage_ids[bisect_left(self.rows, row)]
        storage_index = self.member_storages[group_id].index(storage_id)
        return storages[storage_index]

    def total_nbytes(self) -> int:
        """Return the size of all storages together. A shared storage counts once."""
        _, storage_ids = self.storage_rows()
        return sum([self.storage_nbytes[storage_id] for storage_id in {*storage_ids}])


def find_shared_rows(
    tables: Iterable[Table], *, stored_aliases: bool = False, by_identity: bool = False
) -> SharedRows:
    """Find the rows of tables that share storages, and those that are the same view.

    Args:
        tables: The tables.
        stored_aliases: Whether tensors that were saved as copies count as the views that they were.
        by_identity: Whether to compare files by their real paths and memory by its address, so that
            a file that was opened twice is recognized. By default stores are compared.
    """
    search = _Search(stored_aliases=stored_aliases, by_identity=by_identity)
    for table in tables:
        search.add(table)
    return search.finish()


def find_ties(table: Table) -> dict[int, int]:
    """Map each row that repeats the view of an earlier row to the first row with that view.

    Rows have the same view if they have the same dtype and shape, lie at the same place of one
    storage, and their bytes mean the same numbers. Rows without bytes are never in the result.
    """
    # The usual case: no two rows have the same storage.
    if are_distinct(table.storage_indices):
        return {}
    return find_shared_rows([table]).ties()


def check_expansion(
    table: Table, rows: Sequence[int] | None = None, *, without_ties: bool = False
) -> None:
    """Check that rows that are copied out do not take many more bytes than the table has stored.

    `LazyTensor.check_expansion` allows a small expanded view for each tensor. A file of 200 KB can
    hold a thousand of them, or a thousand views of one storage, so together they have one allowance.

    Args:
        table: The tensors of a checkpoint.
        rows: The rows that are copied out, all of them by default.
        without_ties: Whether only the first row of each view is copied out.

    Raises:
        LimitExceeded: The copies are larger than `Limits.expansion` allows.
    """
    # The usual case: every row is all of a storage of its own, so the copies cannot be larger.
    are_whole = not table.irregular and all(kind.is_whole for kind in table.kinds)
    storage_indices = table.storage_indices
    if are_whole and len({*storage_indices}) == len(storage_indices):
        return

    shared_rows = find_shared_rows([table])
    # These are all rows that have bytes.
    copied_rows = {*shared_rows.rows}
    if without_ties:
        copied_rows.difference_update(shared_rows.ties())
    if rows is not None:
        copied_rows.intersection_update(rows)
    if not copied_rows:
        return

    row_list = sorted(copied_rows)
    copied_nbytes = int(table.row_nbytes(row_list).sum())
    stored_nbytes = shared_rows.total_nbytes()
    limits = table.lazy_tensor(row_list[0]).source.limits
    allowed_nbytes = max(limits.expansion * stored_nbytes, limits.expansion_floor_nbytes)
    if copied_nbytes > allowed_nbytes:
        raise LimitExceeded(
            f"the tensors take {copied_nbytes:,} bytes out of {stored_nbytes:,} stored ones, because"
            " they are expanded views or share storages; choose fewer tensors, or open with"
            " Limits(expansion=…)",
            expected=allowed_nbytes,
            found=copied_nbytes,
        )


def are_distinct(numbers: Sequence[int]) -> bool:
    """Return whether no number occurs twice."""
    return isinstance(numbers, range) or len({*numbers}) == len(numbers)


class _IrregularRow(NamedTuple):
    """A row that is compared by the chunks of its lazy tensor, not by the columns of its table."""

    row: int
    storage_id: int
    tensor: LazyTensor
    chunks: Sequence[Chunk]


class _Search:
    """Gives equal storages and equal views of tables the same ids.

    A storage is identified by its file, range and checksum. A view is identified by its storage and
    its *placement* there: dtype, shape, strides, offset, and whether its elements are conjugated or
    negated. Both are looked up in dictionaries, which hand out the ids.

    Regular rows are compared by their entries in the columns of the table. Irregular rows, and rows
    that count as the views that they were before they were saved, are compared by their chunks.
    """

    def __init__(self, *, stored_aliases: bool, by_identity: bool) -> None:
        """Start without rows. `add` adds those of a table.

        Args:
            stored_aliases: Whether tensors that were saved as copies count as the views that they
                were.
            by_identity: Whether a file that was opened twice counts as one file.
        """
        self._stored_aliases = stored_aliases
        self._by_identity = by_identity
        self._row_count = 0
        """The number of rows in all tables that were added."""
        self._storage_ids: dict[Hashable, int] = {}
        """The id of each storage, by what identifies the storage."""
        self._unused_ids = count()
        self._storage_nbytes: dict[int, int] = {}
        """The size of each storage, by its id."""
        self._member_storages: dict[int, tuple[int, ...]] = {}
        """The ids of the storages in a group, by the id of the group."""
        self._placement_ids: dict[Hashable, int] = {}
        """The id of each placement, by what identifies the placement."""
        self._file_identities: dict[tuple[Source, str], Hashable] = {}
        """What identifies each file of a source, so that the store is called once for a file."""

        # The columns of the regular rows, and then the irregular rows.
        self._rows: list[int] = []
        self._row_storage_ids: list[int] = []
        self._row_placement_ids: list[int] = []
        self._irregular_rows: list[_IrregularRow] = []

    def add(self, table: Table) -> None:
        """Add the rows of a table.

        Rows are numbered through all tables: the first row of this one follows the last row of the
        table that was added before it.
        """
        first_row = self._row_count
        self._row_count += len(table)
        regular_rows = self._find_regular_rows(table)
        if len(regular_rows) < len(table):
            for row in sorted({*range(len(table))}.difference(regular_rows)):
                self._add_irregular_row(first_row + row, table.lazy_tensor(row))

        storage_indices = [table.storage_indices[row] for row in regular_rows]
        keys = self._build_storage_keys(table, storage_indices, regular_rows)
        # No function of ours is called for a row, because there may be a million rows. A new key
        # gets the next id. A known key keeps its id, and the next id remains unused.
        storage_ids = [*map(self._storage_ids.setdefault, keys, self._unused_ids)]
        nbytes = table.storages.nbytes[storage_indices].tolist()
        self._storage_nbytes.update(zip(storage_ids, nbytes, strict=True))

        self._rows += [first_row + row for row in regular_rows]
        self._row_storage_ids += storage_ids
        self._row_placement_ids += self._find_placements(table, regular_rows)

    def _find_regular_rows(self, table: Table) -> Sequence[int]:
        """Return the rows that can be compared by their storage indices and kinds.

        Irregular rows have no storage index. If tensors that were saved as copies count as the
        views that they were, the storage index of such a tensor is not that of its former storage.
        """
        former_view_kinds: set[int] = set()
        if self._stored_aliases:
            for kind_index, kind in enumerate(table.kinds):
                if kind.traits.alias is not None:
                    former_view_kinds.add(kind_index)
        if not table.irregular and not former_view_kinds:
            return range(len(table))

        regular_rows: list[int] = []
        columns = zip(table.storage_indices, table.kind_indices, strict=True)
        for row, (storage_index, kind_index) in enumerate(columns):
            if storage_index != IRREGULAR and kind_index not in former_view_kinds:
                regular_rows.append(row)
        return regular_rows

    def _add_irregular_row(self, row: int, tensor: LazyTensor) -> None:
        """Add a row that is compared by its chunks. A tensor without chunks has no bytes."""
        chunks = tensor.shared_chunks if self._stored_aliases else tensor.chunks
        if chunks:
            storage_id = self._register_storages(tensor, chunks)
            self._irregular_rows.append(_IrregularRow(row, storage_id, tensor, chunks))

    def _build_storage_keys(
        self, table: Table, storage_indices: Sequence[int], rows: Sequence[int]
    ) -> Iterable[Hashable]:
        """Return a key for the storage of each of these rows. Equal storages have equal keys.

        Args:
            table: The table.
            storage_indices: The storage of each of the rows in the table.
            rows: The rows.
        """
        storages = table.storages
        # A range of a file is identified by the file, the range and the checksum, as in
        # `_build_storage_key`.
        if isinstance(storages, FileColumns):
            file_identities: list[Hashable] = []
            for file in storages.files:
                file_identities.append(self._identify_file(file.source, file.store, file.key))
            row_file_indices = storages.file_indices[storage_indices].tolist()
            row_files = map(file_identities.__getitem__, row_file_indices)
            starts = storages.starts[storage_indices].tolist()
            nbytes = storages.nbytes[storage_indices].tolist()
            crcs = storages.crcs[storage_indices].tolist()
            return zip(row_files, starts, nbytes, crcs, strict=True)

        # A storage in memory is identified by the object that has all of them, and its index there.
        if not self._by_identity:
            return zip(repeat(id(storages)), storage_indices, strict=False)

        key_by_storage_index: dict[int, Hashable] = {}
        for storage_index, row in zip(storage_indices, rows, strict=True):
            if storage_index not in key_by_storage_index:
                tensor = table.lazy_tensor(row)
                key = self._build_storage_key(tensor, tensor.storages[0])
                key_by_storage_index[storage_index] = key
        return map(key_by_storage_index.__getitem__, storage_indices)

    def _build_storage_key(self, tensor: LazyTensor, storage: Storage) -> Hashable:
        """Return a key for a storage of a tensor, to look its id up. Equal storages have equal keys."""
        file_identity = self._identify_file(tensor.source, storage.home, storage.key)
        # To find the start of a subclass can take a read of the file. Its key has its ranges instead.
        if type(storage) is not Storage:
            return file_identity, type(storage), storage.ranges, storage.nbytes
        crc32 = storage.crc32
        if crc32 is None:
            # `_build_storage_keys` takes checksums from the columns of a table, which have `NO_CRC` in
            # place of None. The same storage must have the same key here and there.
            crc32 = NO_CRC
        return file_identity, storage.start, storage.nbytes, crc32

    def _identify_file(self, source: Source, store: object, key: str) -> Hashable:
        """Return what identifies a file: its store and key, or the identity that its store reports.

        Args:
            source: The open files.
            store: The store that has the file.
            key: The name of the file in the store.
        """
        if not self._by_identity:
            return id(store), key
        if (source, key) not in self._file_identities:
            self._file_identities[source, key] = source.store.identity(key)
        return self._file_identities[source, key]

    def _register_storages(self, tensor: LazyTensor, chunks: Sequence[Chunk]) -> int:
        """Record the ids and sizes of the storages of chunks, and return one id for all of them.

        Args:
            tensor: The tensor that has the chunks.
            chunks: At least one chunk.

        Returns:
            The id of the storage if there is only one. Otherwise the id of a group, whose members
            are recorded in `_member_storages`. Tensors have the same group if their chunks use the
            same storages in the same order.
        """
        nbytes_by_key: dict[Hashable, int] = {}
        for chunk in chunks:
            key = self._build_storage_key(tensor, chunk.storage)
            nbytes_by_key[key] = chunk.storage.nbytes

        storage_ids: list[int] = []
        for key, nbytes in nbytes_by_key.items():
            storage_id = self._assign_storage_id(key)
            self._storage_nbytes[storage_id] = nbytes
            storage_ids.append(storage_id)
        if len(storage_ids) == 1:
            return storage_ids[0]

        member_ids = tuple(storage_ids)
        group_id = self._assign_storage_id(("group", member_ids))
        self._member_storages[group_id] = member_ids
        self._storage_nbytes[group_id] = sum(nbytes_by_key.values())
        return group_id

    def _assign_storage_id(self, storage_key: Hashable) -> int:
        """Return the id of a storage, which is a new one if the key was not seen before."""
        return self._storage_ids.setdefault(storage_key, next(self._unused_ids))

    def _find_placements(self, table: Table, rows: Sequence[int]) -> list[int]:
        """Return the id of the placement of each of these regular rows.

        The placement of a row that starts with its storage follows from its kind. For all others,
        the placement is that of the kind, together with the offset.
        """
        placement_ids = self._placement_ids
        kind_placement_ids: list[int] = []
        for kind in table.kinds:
            strides = kind.strides
            if 0 in kind.shape:
                # All views without elements are the same, wherever they start.
                strides = ()
            placement = (kind.dtype, kind.shape, strides, kind.traits.conj, kind.traits.neg)
            kind_placement_ids.append(placement_ids.setdefault(placement, len(placement_ids)))

        kind_indices = [table.kind_indices[row] for row in rows]
        row_placement_ids = [kind_placement_ids[kind_index] for kind_index in kind_indices]
        if not table.offsets:
            return row_placement_ids

        # No function is called for a row, because a storage may have fifty thousand views.
        is_empty = [0 in kind.shape for kind in table.kinds]
        for position, row in enumerate(rows):
            if row in table.offsets and not is_empty[kind_indices[position]]:
                placement_with_offset = row_placement_ids[position], table.offsets[row]
                row_placement_ids[position] = placement_ids.setdefault(
                    placement_with_offset, len(placement_ids)
                )
        return row_placement_ids

    def _identify_irregular_placement(self, tensor: LazyTensor, chunks: Sequence[Chunk]) -> int:
        """Return the id of the placement of a tensor that is compared by its chunks.

        If the tensor has one chunk, it gets the same id as a regular row that lies in the same way:
        a row of a table whose storage index and kind describe it.
        """
        layout, offset = self._describe_layout(tensor, chunks)
        placement = (tensor.dtype, tensor.shape, layout, tensor.traits.conj, tensor.traits.neg)
        placement_id = self._placement_ids.setdefault(placement, len(self._placement_ids))
        if offset == 0:
            return placement_id
        # `_find_placements` adds the offset of a regular row in this way too, because a kind is
        # looked up once for all of its rows, which have different offsets.
        placement_with_offset = placement_id, offset
        return self._placement_ids.setdefault(placement_with_offset, len(self._placement_ids))

    def _describe_layout(self, tensor: LazyTensor, chunks: Sequence[Chunk]) -> tuple[Hashable, int]:
        """Return how the chunks of a tensor lie in their storages, and the bit where they start.

        The layout of one chunk is its strides. The layout of several chunks contains the offset of
        each, and the result has 0 as their start.
        """
        if len(chunks) > 1 or chunks[0].box != Box.whole(tensor.shape):
            chunk_layouts: list[Hashable] = []
            for chunk in chunks:
                storage_id = self._register_storages(tensor, (chunk,))
                chunk_layouts.append((chunk.box, storage_id, chunk.offset, chunk.strides))
            return tuple(chunk_layouts), 0
        if 0 in tensor.shape:
            # All views without elements are the same, wherever they start.
            return (), 0
        return chunks[0].strides, chunks[0].offset

    def finish(self) -> SharedRows:
        """Return all rows that have bytes, in ascending order."""
        rows = self._rows
        storage_ids = self._row_storage_ids
        for irregular in self._irregular_rows:
            rows.append(irregular.row)
            storage_ids.append(irregular.storage_id)
        placement_ids = self._row_placement_ids
        placement_ids += self._find_irregular_placements(Counter(storage_ids))

        # Regular rows are in order already. Irregular rows stand behind all of them.
        order: Sequence[int] = range(len(rows))
        if self._irregular_rows:
            order = sorted(order, key=rows.__getitem__)
        # Rows without bytes are left out, because they share nothing.
        if self._irregular_rows or 0 in self._storage_nbytes.values():
            order = [index for index in order if self._storage_nbytes[storage_ids[index]]]
            rows = [rows[index] for index in order]
            storage_ids = [storage_ids[index] for index in order]
            placement_ids = [placement_ids[index] for index in order]

        # A view is a storage and a placement. Both become one integer, as two digits of a number.
        # The base has one digit more than there are placements, for `UNKNOWN_PLACEMENT`.
        base = len(self._placement_ids) + 1
        pairs = zip(storage_ids, placement_ids, strict=True)
        view_ids = [storage_id * base + placement_id for storage_id, placement_id in pairs]
        return SharedRows(
            rows=rows,
            storage_ids=storage_ids,
            view_ids=view_ids,
            storage_nbytes=self._storage_nbytes,
            member_storages=self._member_storages,
            stored_aliases=self._stored_aliases,
        )

    def _find_irregular_placements(self, row_counts: Mapping[int, int]) -> list[int]:
        """Return the id of the placement of each irregular row.

        Args:
            row_counts: How many rows each storage has, by its id.
        """
        placement_ids: list[int] = []
        for irregular in self._irregular_rows:
            # A row that is alone in its storage is compared with no other, and some tensors would
            # have to read their file for the placement.
            placement_id = UNKNOWN_PLACEMENT
            if row_counts[irregular.storage_id] > 1:
                placement_id = self._identify_irregular_placement(
                    irregular.tensor, irregular.chunks
                )
            placement_ids.append(placement_id)
        return placement_ids


class RangeGroup(Value, Generic[T], frozen=True):
    """A range of bytes that was joined from ranges, with the members of these in their order."""

    start: int
    stop: int
    members: list[T]


def group_overlapping_ranges(
    ranges: Iterable[ByteRange[T]], *, touching: bool = False
) -> list[RangeGroup[T]]:
    """Join ranges that overlap, directly or through other ranges.

    Args:
        ranges: The ranges, in any order.
        touching: Whether neighbors without a gap are joined as well.

    Examples:
        >>> groups = group_overlapping_ranges([(8, 12, "c"), (0, 6, "a"), (4, 8, "b")])
        >>> [(group.start, group.stop, group.members) for group in groups]
        [(0, 8, ['a', 'b']), (8, 12, ['c'])]
    """
    groups: list[RangeGroup[T]] = []
    # Ranges come in the order of their starts, so a range can only belong to the last group.
    for start, stop, member in sorted(ranges, key=itemgetter(0, 1)):
        if groups:
            last_group = groups[-1]
            if start < last_group.stop or (touching and start == last_group.stop):
                last_group.members.append(member)
                joined_stop = max(last_group.stop, stop)
                groups[-1] = RangeGroup(last_group.start, joined_stop, last_group.members)
                continue
        groups.append(RangeGroup(start, stop, [member]))
    return groups


def find_reached_ranges(
    tensors: Iterable[LazyTensor], *, aligned: int = 1
) -> dict[Storage, list[RangeGroup[None]]]:
    """Return the bytes of storages from the first to the last byte of each chunk of tensors.

    Args:
        tensors: The tensors.
        aligned: Ranges start at multiples of this number of bytes.

    Returns:
        By storage, the ranges in ascending order. Ranges that overlap or touch are joined. A
        storage of which no byte is needed has an empty list.
    """
    ranges_by_storage: dict[Storage, list[ByteRange[None]]] = {}
    for tensor in tensors:
        for chunk in tensor.chunks:
            storage_ranges = ranges_by_storage.setdefault(chunk.storage, [])
            start, stop = chunk.byte_range(tensor.dtype)
            if start < stop:
                aligned_start = start - start % aligned
                # Nobody needs to know which chunk a range came from.
                storage_ranges.append((aligned_start, stop, None))
    return {
        storage: group_overlapping_ranges(storage_ranges, touching=True)
        for storage, storage_ranges in ranges_by_storage.items()
    }


def find_overlapping_pairs(ranges: Iterable[ByteRange[T]]) -> Iterator[tuple[T, T]]:
    """Yield pairs of ranges that have a byte in common.

    Each range is compared with the one before it that ends last. So there is a pair for every range
    that overlaps an earlier one, and not for every two ranges, of which there may be too many.

    Examples:
        >>> ranges = [(0, 10, "a"), (2, 4, "b"), (6, 8, "c"), (10, 12, "d")]
        >>> list(find_overlapping_pairs(ranges))
        [('a', 'b'), ('a', 'c')]
    """
    last_ending_range: ByteRange[T] | None = None
    for current_range in sorted(ranges, key=itemgetter(0, 1)):
        if last_ending_range is None:
            last_ending_range = current_range
            continue
        start, stop, member = current_range
        _, last_stop, last_member = last_ending_range
        if start < last_stop:
            yield last_member, member
        if stop > last_stop:
            last_ending_range = current_range
