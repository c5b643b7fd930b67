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
    groups: dict[K, list[T]] = {}
    for key, times in Counter(keys).items():
        if times > 1:
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
        """Return the rows that are the same view as an earlier row, each with the first such row."""
        first_rows: dict[int, int] = {}
        ties: dict[int, int] = {}
        for row, view_id in zip(self.rows, self.view_ids, strict=True):
            first_row = first_rows.setdefault(view_id, row)
            if first_row != row:
                ties[row] = first_row
        return ties

    def storage_rows(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return a column of rows and one of storage ids, with an entry for every pair of them.

        A row that lies in several storages is listed with each of these. In the fields `rows` and
        `storage_ids` it is listed once, with an id that stands for all of them.
        """
        if not self.member_storages:
            return self.rows, self.storage_ids
        rows: list[int] = []
        storage_ids: list[int] = []
        for row, storage_id in zip(self.rows, self.storage_ids, strict=True):
            members = self.member_storages.get(storage_id, (storage_id,))
            rows += [row] * len(members)
            storage_ids += members
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
        first_rows = list(range(row_count))
        first_row_of_storage: dict[int, int] = {}
        for row, storage_id in zip(rows, storage_ids, strict=True):
            first_row = first_row_of_storage.setdefault(storage_id, row)
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
        id_of_all = self.storage_ids[bisect_left(self.rows, row)]
        return storages[self.member_storages[id_of_all].index(storage_id)]

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
    """Return the rows that are the same view as an earlier row, each with the first such row.

    Rows are the same view if dtype, shape, place and the meaning of the bytes are the same. A row
    without bytes is never one.
    """
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
    are_whole = not table.irregular and all(kind.is_whole for kind in table.kinds)
    storage_indices = table.storage_indices
    if are_whole and len({*storage_indices}) == len(storage_indices):
        return

    shared_rows = find_shared_rows([table])
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
    """A row that is compared by the chunks of its lazy tensor."""

    row: int
    storage_id: int
    tensor: LazyTensor
    chunks: Sequence[Chunk]


class _Search:
    """Gives equal storages and equal views of tables the same ids.

    A storage is identified by its file, range and checksum. A view is identified by its storage and
    its *placement* there: dtype, shape, strides, offset, and whether its elements are conjugated or
    negated. Both are looked up in dictionaries, which hand out the ids.
    """

    def __init__(self, *, stored_aliases: bool, by_identity: bool) -> None:
        self._stored_aliases = stored_aliases
        self._by_identity = by_identity
        self._row_count = 0
        """The rows of all tables that were added."""
        self._storage_ids: dict[Hashable, int] = {}
        self._unused_ids = count()
        self._storage_nbytes: dict[int, int] = {}
        self._member_storages: dict[int, tuple[int, ...]] = {}
        self._placement_ids: dict[Hashable, int] = {}
        self._file_identities: dict[tuple[Source, str], Hashable] = {}

        # The columns of the rows that are compared by their storage indices and kinds.
        self._rows: list[int] = []
        self._row_storage_ids: list[int] = []
        self._row_placement_ids: list[int] = []
        self._irregular_rows: list[_IrregularRow] = []

    def add(self, table: Table) -> None:
        """Add the rows of a table behind those of the tables before it."""
        first_row = self._row_count
        self._row_count += len(table)
        rows = self._find_regular_rows(table)
        if len(rows) < len(table):
            for row in sorted({*range(len(table))}.difference(rows)):
                self._add_irregular_row(first_row + row, table.lazy_tensor(row))

        storage_indices = [table.storage_indices[row] for row in rows]
        keys = self._build_storage_keys(table, storage_indices, rows)
        # A key that is new gets the next id. A known key keeps its id, and an id is skipped.
        storage_ids = [*map(self._storage_ids.setdefault, keys, self._unused_ids)]
        nbytes = table.storages.nbytes[storage_indices].tolist()
        self._storage_nbytes.update(zip(storage_ids, nbytes, strict=True))

        self._rows += [first_row + row for row in rows]
        self._row_storage_ids += storage_ids
        self._row_placement_ids += self._find_placements(table, rows)

    def _find_regular_rows(self, table: Table) -> Sequence[int]:
        """Return the rows that can be compared by their storage indices and kinds."""
        aliased_kinds: set[int] = set()
        if self._stored_aliases:
            kinds = enumerate(table.kinds)
            aliased_kinds = {index for index, kind in kinds if kind.traits.alias is not None}
        if not table.irregular and not aliased_kinds:
            return range(len(table))
        columns = zip(table.storage_indices, table.kind_indices, strict=True)
        return [
            row
            for row, (storage_index, kind_index) in enumerate(columns)
            if storage_index != IRREGULAR and kind_index not in aliased_kinds
        ]

    def _add_irregular_row(self, row: int, tensor: LazyTensor) -> None:
        chunks = tensor.shared_chunks if self._stored_aliases else tensor.chunks
        if chunks:
            storage_id = self._identify_storages(tensor, chunks)
            self._irregular_rows.append(_IrregularRow(row, storage_id, tensor, chunks))

    def _build_storage_keys(
        self, table: Table, storage_indices: Sequence[int], rows: Sequence[int]
    ) -> Iterable[Hashable]:
        """Yield what identifies the storage of each of these rows.

        Args:
            table: The table.
            storage_indices: The storage of each of the rows in the table.
            rows: The rows.
        """
        storages = table.storages
        if isinstance(storages, FileColumns):
            owners = [
                self._identify_owner(file.source, file.store, file.key) for file in storages.files
            ]
            file_indices = storages.file_indices[storage_indices].tolist()
            columns = (storages.starts, storages.nbytes, storages.crcs)
            values = [column[storage_indices].tolist() for column in columns]
            return zip(map(owners.__getitem__, file_indices), *values, strict=True)
        if not self._by_identity:
            return zip(repeat(id(storages)), storage_indices, strict=False)

        keys: dict[int, Hashable] = {}
        for storage_index, row in zip(storage_indices, rows, strict=True):
            if storage_index not in keys:
                tensor = table.lazy_tensor(row)
                keys[storage_index] = self._build_storage_key(tensor, tensor.storages[0])
        return map(keys.__getitem__, storage_indices)

    def _build_storage_key(self, tensor: LazyTensor, storage: Storage) -> Hashable:
        """Return what identifies a storage of a tensor."""
        owner = self._identify_owner(tensor.source, storage.home, storage.key)
        # Subclasses of a storage may have to search for their place in the file.
        if type(storage) is not Storage:
            return owner, type(storage), storage.ranges, storage.nbytes
        crc32 = NO_CRC if storage.crc32 is None else storage.crc32
        return owner, storage.start, storage.nbytes, crc32

    def _identify_owner(self, source: Source, store: object, key: str) -> Hashable:
        """Return what identifies the file of a key: its store, or what the store calls it."""
        if not self._by_identity:
            return id(store), key
        if (source, key) not in self._file_identities:
            self._file_identities[source, key] = source.store.identity(key)
        return self._file_identities[source, key]

    def _identify_storages(self, tensor: LazyTensor, chunks: Sequence[Chunk]) -> int:
        """Return the id of the storage of chunks. For several storages it stands for all of them."""
        nbytes_by_key: dict[Hashable, int] = {}
        for chunk in chunks:
            key = self._build_storage_key(tensor, chunk.storage)
            nbytes_by_key[key] = chunk.storage.nbytes
        storage_ids = tuple([self._identify(key) for key in nbytes_by_key])
        self._storage_nbytes.update(zip(storage_ids, nbytes_by_key.values(), strict=True))
        if len(storage_ids) == 1:
            return storage_ids[0]

        id_of_all = self._identify(("all of", storage_ids))
        self._member_storages[id_of_all] = storage_ids
        self._storage_nbytes[id_of_all] = sum(nbytes_by_key.values())
        return id_of_all

    def _identify(self, storage_key: Hashable) -> int:
        return self._storage_ids.setdefault(storage_key, next(self._unused_ids))

    def _find_placements(self, table: Table, rows: Sequence[int]) -> list[int]:
        """Return the placement of each of these rows in its storage."""
        placement_ids = self._placement_ids
        kind_placements: list[int] = []
        for kind in table.kinds:
            # All views without elements are the same, wherever they start.
            strides = () if 0 in kind.shape else kind.strides
            placement = (kind.dtype, kind.shape, strides, kind.traits.conj, kind.traits.neg)
            kind_placements.append(placement_ids.setdefault(placement, len(placement_ids)))
        kind_indices = [table.kind_indices[row] for row in rows]
        placements = [kind_placements[kind_index] for kind_index in kind_indices]
        if not table.offsets:
            return placements

        # No function is called for a row, because a storage may have fifty thousand views.
        is_empty = [0 in kind.shape for kind in table.kinds]
        for position, row in enumerate(rows):
            if row in table.offsets and not is_empty[kind_indices[position]]:
                view = placements[position], table.offsets[row]
                placements[position] = placement_ids.setdefault(view, len(placement_ids))
        return placements

    def _identify_irregular_placement(self, tensor: LazyTensor, chunks: Sequence[Chunk]) -> int:
        """Return the id of the placement of a tensor. It is the id of a regular row if possible."""
        offset = 0
        strides: Hashable = ()
        if len(chunks) > 1 or chunks[0].box != Box.whole(tensor.shape):
            chunk_placements: list[Hashable] = []
            for chunk in chunks:
                storage_id = self._identify_storages(tensor, (chunk,))
                chunk_placements.append((chunk.box, storage_id, chunk.offset, chunk.strides))
            strides = tuple(chunk_placements)
        elif 0 not in tensor.shape:
            strides = chunks[0].strides
            offset = chunks[0].offset

        placement = (tensor.dtype, tensor.shape, strides, tensor.traits.conj, tensor.traits.neg)
        placement_id = self._placement_ids.setdefault(placement, len(self._placement_ids))
        if not offset:
            return placement_id
        return self._placement_ids.setdefault((placement_id, offset), len(self._placement_ids))

    def finish(self) -> SharedRows:
        """Return all rows that have bytes, in ascending order."""
        rows = self._rows
        storage_ids = self._row_storage_ids
        for irregular in self._irregular_rows:
            rows.append(irregular.row)
            storage_ids.append(irregular.storage_id)
        placements = self._row_placement_ids
        placements += self._find_irregular_placements(Counter(storage_ids))

        # The irregular rows are not in order yet, and rows without bytes share nothing.
        order: Sequence[int] = range(len(rows))
        if self._irregular_rows:
            order = sorted(order, key=rows.__getitem__)
        if self._irregular_rows or 0 in self._storage_nbytes.values():
            order = [index for index in order if self._storage_nbytes[storage_ids[index]]]
            rows = [rows[index] for index in order]
            storage_ids = [storage_ids[index] for index in order]
            placements = [placements[index] for index in order]

        # One more than there are placements, because of `UNKNOWN_PLACEMENT`.
        placement_count = len(self._placement_ids) + 1
        pairs = zip(storage_ids, placements, strict=True)
        return SharedRows(
            rows=rows,
            storage_ids=storage_ids,
            view_ids=[storage_id * placement_count + placement for storage_id, placement in pairs],
            storage_nbytes=self._storage_nbytes,
            member_storages=self._member_storages,
            stored_aliases=self._stored_aliases,
        )

    def _find_irregular_placements(self, row_counts: Mapping[int, int]) -> list[int]:
        """Return the placement of each irregular row in its storage.

        Args:
            row_counts: How many rows each storage has, by its id.
        """
        placements: list[int] = []
        for irregular in self._irregular_rows:
            # The placement of a tensor that is alone is not computed: some tensors read for it.
            placement = UNKNOWN_PLACEMENT
            if row_counts[irregular.storage_id] > 1:
                placement = self._identify_irregular_placement(irregular.tensor, irregular.chunks)
            placements.append(placement)
        return placements


class RangeGroup(Value, Generic[T], frozen=True):
    """Bytes without a gap, and what lies in them, in the order of first bytes."""

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
    for start, stop, member in sorted(ranges, key=itemgetter(0, 1)):
        if groups:
            last = groups[-1]
            if start < last.stop or (touching and start == last.stop):
                last.members.append(member)
                groups[-1] = RangeGroup(last.start, max(last.stop, stop), last.members)
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
        By storage, the ranges in ascending order. Ranges that overlap or touch are joined.
    """
    ranges: dict[Storage, list[ByteRange[None]]] = {}
    for tensor in tensors:
        for chunk in tensor.chunks:
            storage_ranges = ranges.setdefault(chunk.storage, [])
            start, stop = chunk.byte_range(tensor.dtype)
            if start < stop:
                storage_ranges.append((start - start % aligned, stop, None))
    return {
        storage: group_overlapping_ranges(storage_ranges, touching=True)
        for storage, storage_ranges in ranges.items()
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
    longest: ByteRange[T] | None = None
    for current in sorted(ranges, key=itemgetter(0, 1)):
        start, stop, member = current
        if longest is None:
            longest = current
            continue
        _, longest_stop, longest_member = longest
        if start < longest_stop:
            yield longest_member, member
        if stop > longest_stop:
            longest = current
