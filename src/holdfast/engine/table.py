"""A table on its way to a file: tables of lazy tensors, and the segments that rows become.

Contiguous rows are read many together. Every other row is written by its lazy tensor (`Table.rows_read_singly`).
Two functions make a table to be saved:
`verbs.shared.state.tabulate_state` of a caller's memory, `make_lazy_table` of lazy tensors.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np

from holdfast.core.arrays import Ints
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
from holdfast.engine.saves import HASH_KEY, HEAD_KEY, Data, Gathered, Hashing, Memory, Segment

MEASURE = 1 << 20

TOGETHER = (
    2 * saves.BATCH_TENSOR_COUNT
)  # Most rows of one segment. Reading them holds the interpreter lock: fewer would be no gain.


class TensorColumns(Value, frozen=True, eq=False):
    """Tensors of one library that are in one piece, as columns."""

    rows: Sequence[int]  # Which of the tensors that were given.
    kinds: Sequence[RowKind]
    kind: Sequence[int]  # Of each row, a position in `kinds`.
    storage: Sequence[
        int
    ]  # Of each row, the number of its storage. Rows of one storage have one number.
    storages: MemoryBytes
    addresses: Callable[
        [], Sequence[int]
    ]  # Where each storage begins in this process; 0 where that is not known.
    offsets: Mapping[int, int] = NO_OFFSETS  # By position among the rows, as `Table.offsets`.


class StateStorages:
    """The storages of a state, those of one library behind those of another. `view` makes a tensor over memory."""

    def __init__(
        self, parts: Sequence[MemoryBytes], view: Callable[[int, RowKind, str, int], LazyTensor]
    ) -> None:
        self._parts, self._view = parts, view
        self._edges = [*accumulate((len(part.nbytes) for part in parts), initial=0)]
        columns = [part.nbytes for part in parts]
        self.nbytes: Ints = (
            columns[0] if len(parts) == 1 else np.concatenate(columns or [np.zeros(0, np.int64)])
        )
        self.read_nbytes = self.nbytes
        self.stores = tuple(
            store for part in parts if isinstance(part, FileStorages) for store in part.stores
        )
        self.can_read_ranges = all(part.can_read_ranges for part in parts)

    def read(self, numbers: Sequence[int]) -> Sequence[BytesLike]:
        if len(self._parts) == 1:
            return self._parts[0].read(numbers)
        return self._read(numbers, lambda part, own, here: part.read(own))

    def read_ranges(
        self, numbers: Sequence[int], starts: Sequence[int], nbytes: Sequence[int]
    ) -> Sequence[BytesLike]:
        def read(part: MemoryBytes, own: Sequence[int], here: Sequence[int]) -> Sequence[BytesLike]:
            return part.read_ranges(own, [starts[at] for at in here], [nbytes[at] for at in here])

        return self._read(numbers, read)

    def _read(
        self,
        numbers: Sequence[int],
        read: Callable[[MemoryBytes, Sequence[int], Sequence[int]], Sequence[BytesLike]],
    ) -> Sequence[BytesLike]:
        """What each part reads: `read` is given the numbers there, and where these stand in all."""
        if len(self._parts) == 1:
            return read(self._parts[0], numbers, range(len(numbers)))
        wanted = np.array(numbers, np.int64)
        sides = np.searchsorted(self._edges, wanted, side="right") - 1
        pieces: list[BytesLike] = [b""] * len(numbers)
        for side in np.unique(sides).tolist():
            here = np.flatnonzero(sides == side)
            try:
                found = read(
                    self._parts[side], (wanted[here] - self._edges[side]).tolist(), here.tolist()
                )
            except StorageMoved as moved:
                raise StorageMoved(int(here[moved.request_index])) from None
            for place, piece in zip(here.tolist(), found, strict=True):
                pieces[place] = piece
        return pieces

    def segment(self, number: int, label: str) -> bytes | Data | Memory:
        side = bisect_right(self._edges, number) - 1
        return self._parts[side].segment(number - self._edges[side], label)

    def lazy_tensor(self, number: int, kind: RowKind, name: str, offset: int) -> LazyTensor:
        side = bisect_right(self._edges, number) - 1
        part = self._parts[side]
        if isinstance(part, FileStorages):
            return part.lazy_tensor(number - self._edges[side], kind, name, offset)
        return self._view(number, kind, name, offset)


def make_value_state(value: object) -> State:
    """A state without rows: its tensors, if there are some, are lazy ones that are written one by one."""
    return State(value, NO_TENSORS, NO_LEAVES)


def make_lazy_table(names: Sequence[str], tensors: Sequence[LazyTensor]) -> Table:
    """A table of lazy tensors for a layout; rows that are in one piece in a file have the number of their storage."""
    return mark_uncopyable_rows(tabulate(names, tensors))


def mark_uncopyable_rows(table: Table) -> Table:
    """The rows of an open checkpoint for a layout: as `describe_lazy_tensors` has them of lazy tensors, none of which is made."""
    storages = table.storages
    if not isinstance(storages, FileStorages):
        return table
    numbers, kind = (
        np.array(table.storage_indices, np.int64),
        np.array(table.kind_indices, np.int64),
    )
    rows = np.flatnonzero(numbers != IRREGULAR)
    held = numbers[rows]
    has_alias = np.array(
        [one.traits.alias is not None or one.traits.meta for one in table.kinds], np.bool_
    )
    local = np.zeros(len(storages.files), np.bool_)
    for number, place in enumerate(storages.files):
        store = place.source.store
        # Whether many short reads of a file cost what one does, and as many bytes as they give, which computed content may not.
        local[number] = (
            not store.read_profile.block_nbytes
            and store.count_read_nbytes(place.key, MEASURE) == MEASURE
        )
    left = has_alias[kind[rows]] | ~local[storages.file_indices[held]]
    taken = np.zeros(len(storages.starts), np.bool_)
    taken[held[left]] = True
    if table.irregular:
        taken[_numbers_of(table.irregular.values(), storages)] = True
    left = taken[held]
    storages = storages.with_names(table.names, rows, held)
    if not left.any():
        return Table(
            table.names,
            table.kinds,
            table.kind_indices,
            table.storage_indices,
            storages,
            table.irregular,
            offsets=table.offsets,
        )
    irregular = {**table.irregular, **{row: table.lazy_tensor(row) for row in rows[left].tolist()}}
    numbers[rows[left]] = IRREGULAR
    return Table(
        table.names,
        table.kinds,
        table.kind_indices,
        numbers.tolist(),
        storages,
        irregular,
        offsets=table.offsets,
    )


def _numbers_of(tensors: Iterable[LazyTensor], storages: FileStorages) -> list[int]:
    """The numbers of the storages of lazy tensors, as far as they are among these."""
    # By its exact class: a storage of another kind may not know its place before it is asked, and is none of these.
    places = {
        (id(one.home), one.key, one.start, one.nbytes)
        for tensor in tensors
        for one in tensor.storages
        if type(one) is Storage
    }
    alike = (
        np.flatnonzero(np.isin(storages.starts, [place[2] for place in places]))
        if places
        else np.zeros(0, np.int64)
    )
    files = [(id(place.store), place.key) for place in storages.files]
    each = (
        column.tolist()
        for column in (
            alike,
            storages.file_indices[alike],
            storages.starts[alike],
            storages.nbytes[alike],
        )
    )
    return [
        number
        for number, file, start, nbytes in zip(*each, strict=True)
        if (*files[file], start, nbytes) in places
    ]


NO_TENSORS = make_lazy_table((), ())


def describe_lazy_tensors(tensors: Sequence[LazyTensor]) -> TensorColumns:
    """The lazy tensors that are in one piece in a file, as rows over ranges of files. Left out is what a store computes or has to
    ask for, what shares a storage with a tensor that is left out, and what was a view of another storage before it was saved
    (`Traits.alias`)."""
    table = make_lazy_table([tensor.name for tensor in tensors], tensors)
    rows = [row for row, number in enumerate(table.storage_indices) if number != IRREGULAR]
    kind, storage = (
        [table.kind_indices[row] for row in rows],
        [table.storage_indices[row] for row in rows],
    )
    places = lambda: [0] * len(table.storages.nbytes)  # noqa: E731
    return TensorColumns(
        rows, table.kinds, kind, storage, table.storages, places, table.select_offsets(rows)
    )


def plan_segment(table: Table, row: int, label: str, hashed: Hashing = "") -> Segment | None:
    """The bytes of one row where they lie, as a segment; None where there are none."""
    if not table.row_kind(row).nbytes:
        return None
    if hashed or row in table.rows_not_whole:
        return Data(table.lazy_tensor(row), label, hashed)
    made = table.segment(row, label)
    return None if isinstance(made, bytes) else made


def plan_segments(
    table: Table,
    rows: Sequence[int],
    nbytes: Ints,
    labels: Sequence[str],
    hashing: Mapping[str, Hashing],
    *,
    stops: Ints,
) -> list[Segment]:
    """Return the bytes of rows that follow each other in a file.

    Small contiguous rows are together, a few megabytes a segment. `nbytes` are those
    of these rows, `stops` their sums up to each. `hashing` says by name which are hashed, and how."""
    found: list[Segment] = []
    kind, noncontiguous = table.kind_indices, table.rows_read_singly
    long = {number for number, one in enumerate(table.kinds) if one.nbytes > saves.SMALL_NBYTES}
    separate = (
        [at for at, row in enumerate(rows) if kind[row] in long or row in noncontiguous]
        if long or noncontiguous
        else []
    )
    separate_positions = {*separate}
    for first, stop in split_into_segments(separate, stops):
        if first in separate_positions:
            name = table.names[rows[first]]
            one = plan_segment(
                table, rows[first], labels[first], hashing.get(name, "") if hashing else ""
            )
            found += () if one is None else (one,)
            continue
        own, named = rows[first:stop], labels[first:stop]
        lengths = nbytes[first:stop].tolist()
        if 0 in lengths:
            filled = [at for at, length in enumerate(lengths) if length]
            own, named, lengths = (
                [own[at] for at in filled],
                [named[at] for at in filled],
                [lengths[at] for at in filled],
            )
        if own:
            found.append(_gathered(table, own, named, hashing, lengths))
    return found


def split_into_segments(separate: Sequence[int], stops: Ints) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that are one segment: each separate row, and between them a few megabytes or `TOGETHER`."""
    first = 0
    for position in [*separate, len(stops)]:
        while first < position:
            before = int(stops[first - 1]) if first else 0
            # Up to the first one that passes the size, and with it.
            stop = (
                bisect_left(
                    stops, before + saves.BLOCK_NBYTES, first, min(first + TOGETHER, position) - 1
                )
                + 1
            )
            yield first, stop
            first = stop
        if position < len(stops):
            yield position, position + 1
            first = position + 1


def _gathered(
    table: Table,
    rows: Sequence[int],
    labels: Sequence[str],
    hashing: Mapping[str, Hashing],
    lengths: Sequence[int],
) -> Gathered:

    def make() -> tuple[bytes, dict[str, int]]:
        pieces = table.read_bytes(rows)
        known = dict(zip(labels, crc32_each(pieces), strict=True))
        if hashing:
            from holdfast.core.content_hash import (
                hash_small_pieces,
            )  # for those who save: it imports a library

            # No row here is longer than a head (`SMALL_NBYTES`): it has a hash, and no head.
            known.update(
                zip([label + HASH_KEY for label in labels], hash_small_pieces(pieces), strict=True)
            )
            known.update(dict.fromkeys([label + HEAD_KEY for label in labels], 0))
        return b"".join(pieces), known

    storages, read = table.storages, None
    if storages.read_nbytes is not storages.nbytes:
        read = int(storages.read_nbytes[[table.storage_indices[row] for row in rows]].sum())
    return Gathered(
        sum(lengths),
        labels,
        make,
        lengths,
        lambda: [table.lazy_tensor(row) for row in rows],
        bool(hashing),
        read_nbytes=read,
    )
