"""Prepares tables to be saved, and plans the segments of a file that their rows become.

Small contiguous rows are read and written many at a time. Every other row is written by itself, by
its lazy tensor (`Table.rows_read_singly`).

There are two ways to get a table to save: `verbs.shared.state.tabulate_state` describes a state of
the caller, and `make_lazy_table` describes lazy tensors.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.chunk import Storage
from holdfast.core.crc import crc32_each
from holdfast.core.leaves import NO_LEAVES
from holdfast.core.protocols import State
from holdfast.core.table import (
    IRREGULAR,
    NO_OFFSETS,
    BytesLike,
    MemoryBytes,
    RowKind,
    StorageMoved,
    Table,
)
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine import saves
from holdfast.engine.files import FileStorages, tabulate
from holdfast.engine.saves import HASH_SUFFIX, HEAD_SUFFIX, Data, Gathered, Hashing, Memory, Segment

SAMPLE_NBYTES = 1 << 20
"""A store is asked what it costs to read this many bytes."""

MAX_SEGMENT_ROWS = 2 * saves.BATCH_TENSOR_COUNT
"""The most rows of one segment. The interpreter lock is held while they are read, so smaller
segments would not make threads faster."""


class TensorColumns(Value, frozen=True, eq=False):
    """Tensors of one library, such as numpy, as columns with an entry for each row."""

    rows: Sequence[int]
    """The indices of these tensors among all that the library has described."""
    kinds: Sequence[RowKind]
    """The kinds of the rows, each once."""
    kind_indices: Sequence[int]
    """The kind of each row, as an index into `kinds`."""
    storage_indices: Sequence[int]
    """The storage of each row, as an index into `storages`."""
    storages: MemoryBytes
    """The memory or the files that have the elements."""
    addresses: Callable[[], Sequence[int]]
    """Returns the address of each storage in this process; 0 if it is in a file."""
    offsets: Mapping[int, int] = NO_OFFSETS
    """The bit of its storage where a row starts, by the position of the row among these rows. Rows
    without an entry start with their storage."""


ReadMember = Callable[[MemoryBytes, Sequence[int], Sequence[int]], Sequence[BytesLike]]
"""Reads storages of one member of `StateStorages`. Receives the member, the indices of its
storages, and their positions in the request."""


class StateStorages:
    """The storages of a state: those of several libraries and files, one behind the other.

    A storage has one index among all of them. Its member is the library or the files that have it.
    """

    def __init__(
        self,
        members: Sequence[MemoryBytes],
        make_tensor: Callable[[int, RowKind, str, int], LazyTensor],
    ) -> None:
        """Concatenate storages.

        Args:
            members: The storages of each library or of files.
            make_tensor: Makes a lazy tensor over a storage in memory. Receives the index of the
                storage, the kind and the name of the tensor, and the bit where it starts.
        """
        self._members = members
        self._make_tensor = make_tensor
        self._first_indices = [*accumulate((len(member.nbytes) for member in members), initial=0)]
        """The index of the first storage of each member, and the number of all storages."""
        columns = [member.nbytes for member in members]
        if len(columns) == 1:
            # A million sizes are not copied.
            self.nbytes: Ints = columns[0]
        else:
            self.nbytes = np.concatenate([np.zeros(0, np.int64), *columns])
        self.read_nbytes = self.nbytes
        self.can_read_ranges = all(member.can_read_ranges for member in members)
        file_members = [member for member in members if isinstance(member, FileStorages)]
        self.stores = tuple(store for member in file_members for store in member.stores)

    def read(self, storage_indices: Sequence[int]) -> Sequence[BytesLike]:
        """Read whole storages, all together."""
        if len(self._members) == 1:
            return self._members[0].read(storage_indices)

        def read_member(
            member: MemoryBytes, member_indices: Sequence[int], positions: Sequence[int]
        ) -> Sequence[BytesLike]:
            return member.read(member_indices)

        return self._read_by_member(storage_indices, read_member)

    def read_ranges(
        self, storage_indices: Sequence[int], starts: Sequence[int], nbytes: Sequence[int]
    ) -> Sequence[BytesLike]:
        """Read a range of bytes of each storage, all together."""

        def read_member(
            member: MemoryBytes, member_indices: Sequence[int], positions: Sequence[int]
        ) -> Sequence[BytesLike]:
            member_starts = [starts[position] for position in positions]
            member_nbytes = [nbytes[position] for position in positions]
            return member.read_ranges(member_indices, member_starts, member_nbytes)

        return self._read_by_member(storage_indices, read_member)

    def _read_by_member(
        self, storage_indices: Sequence[int], read_member: ReadMember
    ) -> Sequence[BytesLike]:
        """Read storages of several members, and return them in the requested order.

        Args:
            storage_indices: The storages, by their indices among those of all members.
            read_member: Reads the requested storages of one member. It is called once for each
                member that has some of them.
        """
        if len(self._members) == 1:
            return read_member(self._members[0], storage_indices, range(len(storage_indices)))
        requested = np.array(storage_indices, np.int64)
        # Members without storages have the same first index as the next member. The search from the
        # right passes over them.
        member_numbers = np.searchsorted(self._first_indices, requested, side="right") - 1
        contents: list[BytesLike] = [b""] * len(storage_indices)
        for member_number in np.unique(member_numbers).tolist():
            positions = np.flatnonzero(member_numbers == member_number).tolist()
            member_indices = requested[positions] - self._first_indices[member_number]
            try:
                member_contents = read_member(
                    self._members[member_number], member_indices.tolist(), positions
                )
            except StorageMoved as moved:
                # The error of the member counts only the storages that were requested of it.
                raise StorageMoved(positions[moved.request_index]) from None
            for position, content in zip(positions, member_contents, strict=True):
                contents[position] = content
        return contents

    def segment(self, storage_index: int, label: str) -> bytes | Data | Memory:
        """Return one storage as a segment of a planned file, or `b""` if it is empty."""
        member_number = bisect_right(self._first_indices, storage_index) - 1
        member_index = storage_index - self._first_indices[member_number]
        return self._members[member_number].segment(member_index, label)

    def lazy_tensor(self, storage_index: int, kind: RowKind, name: str, offset: int) -> LazyTensor:
        """Return a lazy tensor over a storage, with its first element at the bit `offset` of it."""
        member_number = bisect_right(self._first_indices, storage_index) - 1
        member = self._members[member_number]
        if isinstance(member, FileStorages):
            member_index = storage_index - self._first_indices[member_number]
            return member.lazy_tensor(member_index, kind, name, offset)
        return self._make_tensor(storage_index, kind, name, offset)


def make_value_state(value: object) -> State:
    """Return a state whose table has no rows. Lazy tensors in the value are written one by one."""
    return State(value, NO_TENSORS, NO_LEAVES)


def make_lazy_table(names: Sequence[str], tensors: Sequence[LazyTensor]) -> Table:
    """Return a table of lazy tensors that can be saved."""
    return mark_uncopyable_rows(tabulate(names, tensors))


def mark_uncopyable_rows(table: Table) -> Table:
    """Return a table in which only rows that a save can copy as bytes have a storage.

    A save reads many such rows at a time, which is efficient for local files only. All other rows
    become irregular, so each of them is written by its lazy tensor: rows that are computed or in a
    remote store, rows on the meta device, rows that were views of another storage before they were
    saved (`Traits.alias`), and all rows that share a storage with one of these.

    Args:
        table: A table over files. Other tables are returned as they are.
    """
    storages = table.storages
    if not isinstance(storages, FileStorages):
        return table
    storage_indices = np.array(table.storage_indices, np.int64)
    stored_rows = np.flatnonzero(storage_indices != IRREGULAR)
    row_storages = storage_indices[stored_rows]

    # Either the kind of a row or its file can be the reason that its bytes are not copied.
    is_uncopyable_kind = np.array(
        [kind.traits.alias is not None or kind.traits.meta for kind in table.kinds], np.bool_
    )
    row_kinds = np.array(table.kind_indices, np.int64)[stored_rows]
    is_uncopyable_file = ~_find_copyable_files(storages)
    row_files = storages.file_indices[row_storages]
    is_uncopyable_row = is_uncopyable_kind[row_kinds] | is_uncopyable_file[row_files]

    # Rows that share a storage are all copied or all written by lazy tensors. Otherwise they would
    # not share it in the new file.
    is_uncopyable_storage = np.zeros(len(storages.starts), np.bool_)
    is_uncopyable_storage[row_storages[is_uncopyable_row]] = True
    if table.irregular:
        is_uncopyable_storage[_find_used_storages(table.irregular.values(), storages)] = True

    uncopyable_rows = stored_rows[is_uncopyable_storage[row_storages]]
    new_irregular = table.irregular
    new_storage_indices = table.storage_indices
    if len(uncopyable_rows):
        new_tensors = {row: table.lazy_tensor(row) for row in uncopyable_rows.tolist()}
        new_irregular = {**table.irregular, **new_tensors}
        storage_indices[uncopyable_rows] = IRREGULAR
        new_storage_indices = storage_indices.tolist()
    return Table(
        table.names,
        table.kinds,
        table.kind_indices,
        new_storage_indices,
        # Errors of a save name the tensor of a storage by its name in this table.
        storages.with_names(table.names, stored_rows, row_storages),
        new_irregular,
        offsets=table.offsets,
    )


def _find_copyable_files(storages: FileStorages) -> Bools:
    """Return for each file of a table whether a save can copy its bytes many rows at a time.

    These are local files that have the elements themselves. Remote stores prefer large reads.
    """
    is_copyable = np.zeros(len(storages.files), np.bool_)
    for file_index, file in enumerate(storages.files):
        store = file.source.store
        # A store of computed content reads another number of bytes than it returns.
        read_nbytes = store.count_read_nbytes(file.key, SAMPLE_NBYTES)
        prefers_blocks = store.read_profile.block_nbytes > 0
        is_copyable[file_index] = read_nbytes == SAMPLE_NBYTES and not prefers_blocks
    return is_copyable


def _find_used_storages(tensors: Iterable[LazyTensor], storages: FileStorages) -> list[int]:
    """Return the indices of the storages that some lazy tensors use."""
    # Stores are compared by identity. The tensors keep their stores alive, so no two of them have
    # the same id.
    used_ranges: set[tuple[int, str, int, int]] = set()
    for tensor in tensors:
        for storage in tensor.storages:
            # Subclasses of a storage may have to search for their place in the file. They are not
            # among the storages of a table.
            if type(storage) is Storage:
                used_ranges.add((id(storage.home), storage.key, storage.start, storage.nbytes))

    # A table may have a million storages. So numpy selects those with the right start, and only
    # these candidates are compared one by one.
    used_starts = np.array([start for _, _, start, _ in used_ranges], np.int64)
    candidates = np.flatnonzero(np.isin(storages.starts, used_starts)).tolist()
    used_storages: list[int] = []
    for index in candidates:
        file = storages.files[storages.file_indices.item(index)]
        start = storages.starts.item(index)
        byte_range = (id(file.store), file.key, start, storages.nbytes.item(index))
        if byte_range in used_ranges:
            used_storages.append(index)
    return used_storages


NO_TENSORS = make_lazy_table((), ())


def describe_lazy_tensors(tensors: Sequence[LazyTensor]) -> TensorColumns:
    """Describe the lazy tensors that a save can copy as bytes of a local file.

    All others are left out: tensors in several chunks, computed or remote ones, those of the meta
    device, those that were views of another storage, and those that share a storage with one of
    these.
    """
    table = make_lazy_table([tensor.name for tensor in tensors], tensors)
    storage_indices = table.storage_indices
    rows = [row for row, index in enumerate(storage_indices) if index != IRREGULAR]
    return TensorColumns(
        rows=rows,
        kinds=table.kinds,
        kind_indices=[table.kind_indices[row] for row in rows],
        storage_indices=[storage_indices[row] for row in rows],
        storages=table.storages,
        # Storages in files have no address in this process.
        addresses=lambda: [0] * len(table.storages.nbytes),
        offsets=table.select_offsets(rows),
    )


def plan_segment(table: Table, row: int, label: str, hashing: Hashing = "") -> Segment | None:
    """Return the elements of one row as a segment of a planned file.

    Args:
        table: The table.
        row: The row.
        label: The label of the segment, under which its checksum is reported.
        hashing: Which content hash is computed, if any.

    Returns:
        The segment, or None if the row has no elements.
    """
    if not table.row_kind(row).nbytes:
        return None
    # Only `Data` computes a content hash. A row that is not its whole storage in C order must be
    # rearranged by its lazy tensor.
    if hashing or row in table.rows_not_whole:
        return Data(table.lazy_tensor(row), label, hashing)
    segment = table.segment(row, label)
    # An empty storage is returned as `b""`.
    if isinstance(segment, bytes):
        return None
    return segment


def plan_segments(
    table: Table,
    rows: Sequence[int],
    nbytes: Ints,
    labels: Sequence[str],
    hashing: Mapping[str, Hashing],
    *,
    stops: Ints,
) -> list[Segment]:
    """Plan the segments of rows that follow each other in a file.

    Small contiguous rows are gathered in segments of a few megabytes. Every other row is a segment
    of its own. Rows without elements have no segment.

    Args:
        table: The table.
        rows: The rows, in the order of the file.
        nbytes: The size of each row.
        labels: The label of each row, under which its checksum is reported.
        hashing: Which content hash is computed, by the name of the tensor. Names without an entry
            are not hashed.
        stops: The sum of `nbytes` up to each row.
    """
    # These rows are segments of their own: large ones, and those that only their lazy tensor reads.
    # The loop over all rows, of which there may be a million, is skipped if there are none.
    large_kinds: set[int] = set()
    for kind_index, kind in enumerate(table.kinds):
        if kind.nbytes > saves.SMALL_NBYTES:
            large_kinds.add(kind_index)
    kind_indices = table.kind_indices
    rows_read_singly = table.rows_read_singly
    # Positions are indices of `rows`.
    separate_positions: list[int] = []
    if large_kinds or rows_read_singly:
        for position, row in enumerate(rows):
            if kind_indices[row] in large_kinds or row in rows_read_singly:
                separate_positions.append(position)

    segments: list[Segment] = []
    separate_set = set(separate_positions)
    for first, stop in split_into_segments(separate_positions, stops):
        if first in separate_set:
            row = rows[first]
            row_hashing = hashing.get(table.names[row], "")
            segment = plan_segment(table, row, labels[first], row_hashing)
        else:
            segment = _gather_rows(
                table, rows[first:stop], nbytes[first:stop], labels[first:stop], bool(hashing)
            )
        if segment is not None:
            segments.append(segment)
    return segments


def split_into_segments(
    separate_positions: Sequence[int], stops: Ints
) -> Iterator[tuple[int, int]]:
    """Divide rows that follow each other in a file into segments.

    A segment is one separate row, or several rows of a few megabytes together.

    Args:
        separate_positions: The positions of rows that are segments of their own, ascending.
        stops: The sum of the sizes of all rows up to each row.

    Yields:
        For each segment, the position of its first row and the one after its last row.
    """
    first = 0
    for separate_position in [*separate_positions, len(stops)]:
        while first < separate_position:
            start_offset = 0
            if first:
                start_offset = int(stops[first - 1])
            # A segment ends with the row that makes it large enough, or with the last row that it
            # may have.
            last_allowed = min(first + MAX_SEGMENT_ROWS, separate_position) - 1
            full_offset = start_offset + saves.BLOCK_NBYTES
            last = bisect_left(stops, full_offset, first, last_allowed)
            yield first, last + 1
            first = last + 1
        if separate_position < len(stops):
            yield separate_position, separate_position + 1
            first = separate_position + 1


def _gather_rows(
    table: Table, rows: Sequence[int], nbytes: Ints, labels: Sequence[str], is_hashed: bool
) -> Gathered | None:
    """Plan one segment of several small contiguous rows. Return None if all of them are empty.

    Args:
        table: The table.
        rows: The rows, in the order of the file.
        nbytes: The size of each row.
        labels: The label of each row.
        is_hashed: Whether the content hash of each row is computed.
    """
    row_nbytes = nbytes.tolist()
    if 0 in row_nbytes:
        positions = np.flatnonzero(nbytes).tolist()
        rows = [rows[position] for position in positions]
        labels = [labels[position] for position in positions]
        row_nbytes = [row_nbytes[position] for position in positions]
    if not rows:
        return None

    def read_rows() -> tuple[bytes, dict[str, int]]:
        """Read all rows. Return their bytes, and their checksums and hashes by key."""
        contents = table.read_bytes(rows)
        checksums = dict(zip(labels, crc32_each(contents), strict=True))
        if is_hashed:
            # Imported here because it imports a library that only saves need.
            from holdfast.core.content_hash import hash_small_pieces

            # Small rows have a hash of all their bytes, and no hash of only the first ones.
            for label, content_hash in zip(labels, hash_small_pieces(contents), strict=True):
                checksums[label + HASH_SUFFIX] = content_hash
                checksums[label + HEAD_SUFFIX] = 0
        return b"".join(contents), checksums

    # None means that as many bytes are read as are written. Computed storages are the exception.
    read_nbytes = None
    storages = table.storages
    if storages.read_nbytes is not storages.nbytes:
        storage_indices = [table.storage_indices[row] for row in rows]
        read_nbytes = int(storages.read_nbytes[storage_indices].sum())
    return Gathered(
        nbytes=sum(row_nbytes),
        labels=labels,
        make=read_rows,
        item_nbytes=row_nbytes,
        tensors=lambda: [table.lazy_tensor(row) for row in rows],
        is_hashed=is_hashed,
        read_nbytes=read_nbytes,
    )
