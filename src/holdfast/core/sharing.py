"""Which rows of tables share memory: those of one storage, those that are one view, those with bytes in common. Nothing is read.
Two rows with one storage number share it; how each lies there is its kind. So all of this is comparing numbers.
    storage    │ · · a a a a · · · · b b · · │     names a, c, b and d; c is a over again, d the second half of a
                     c c c c                       groups             a, b, c, d
                         d d                       ties               c is a
                                                   group_overlapping_ranges    a c d, b

A format that stores every tensor by itself may record where each lay before (`Traits.alias`). With `stored_aliases=True` such a
tensor counts as the view that it was (`LazyTensor.shared_chunks`), and not as the copy that it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, repeat
from typing import Generic, TypeVar

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DType
from holdfast.core.protocols import Source
from holdfast.core.table import IRREGULAR, FileColumns, RowKind, Table
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.core.value import Value
from holdfast.errors import LimitExceeded

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

ViewIdentity = tuple[DType, tuple[int, ...], tuple[Chunk, ...], bool, bool]
"""What all names of one and the same view have in common, and no other view: dtype, shape, chunks, and whether the elements are the
conjugates or the negatives of what is stored."""

ByteRange = tuple[
    int, int, T
]  # The first byte of something, the byte after its last one, and what it is.


def identify_view(tensor: LazyTensor, *, stored_alias: bool = False) -> ViewIdentity:
    """What tells a view from all others. Two tensors with one identity hold the same, whatever becomes of the bytes."""
    chunks = tensor.shared_chunks if stored_alias else tensor.chunks
    return tensor.dtype, tensor.shape, chunks, tensor.traits.conj, tensor.traits.neg


def group_repeated_keys(keys: Sequence[K], values: Sequence[T]) -> dict[K, list[T]]:
    """The values of each key that has two or more, in their order."""
    found: dict[K, list[T]] = {key: [] for key, times in Counter(keys).items() if times > 1}
    for key, value in zip(keys, values, strict=True) if found else ():
        if key in found:
            found[key].append(value)
    return found


class SharedRows(Value, frozen=True, eq=False):
    """Rows of tables that have bytes, with the storages that they lie in."""

    rows: Sequence[
        int
    ]  # Positions, ascending; those of one table behind those of the table before.
    storage_ids: Sequence[
        int
    ]  # The number of the storage of each; of a row in several storages, a number for all of them together.
    view_ids: Sequence[int]  # Rows with one number are the same elements of the same bytes.
    storage_nbytes: Mapping[int, int]  # By the number of a storage.
    member_storages: Mapping[
        int, tuple[int, ...]
    ]  # Of numbers that stand for several storages, the numbers of these.
    stored_aliases: bool  # Whether copies count as the views that they were before they were saved.

    def ties(self) -> dict[int, int]:
        """Rows that are the same view as an earlier row, in order, each with the first such row."""
        first: dict[int, int] = {}
        firsts = map(first.setdefault, self.view_ids, self.rows)
        return {row: other for row, other in zip(self.rows, firsts, strict=True) if row != other}

    def storage_rows(self) -> tuple[Sequence[int], Sequence[int]]:
        """Rows and their storages: a pair for each storage of each row, in order."""
        if not self.member_storages:
            return self.rows, self.storage_ids
        each = [self.member_storages.get(number, (number,)) for number in self.storage_ids]
        rows = [row for row, numbers in zip(self.rows, each, strict=True) for _ in numbers]
        return rows, [*chain.from_iterable(each)]

    def groups(self) -> list[tuple[int, list[int]]]:
        """Storages that several rows share, each with its rows; in the order of first rows."""
        rows, storage = self.storage_rows()
        return [*group_repeated_keys(storage, rows).items()]

    def first_rows(self, count: int) -> list[int]:
        """The first row over the same storage, or over one of the same storages, for each of `count` rows."""
        rows, storage = self.storage_rows()
        found, first = [*range(count)], dict[int, int]()
        for row, other in zip(rows, map(first.setdefault, storage, rows), strict=True):
            if other < found[row]:
                found[row] = other
        return found

    def storage_of(self, number: int, tensor: LazyTensor, row: int) -> Storage:
        """The storage of a number that a row lies in; `tensor` is that row."""
        storages = tensor.shared_storages if self.stored_aliases else tensor.storages
        return storages[
            self.member_storages[self.storage_ids[bisect_left(self.rows, row)]].index(number)
            if len(storages) > 1
            else 0
        ]

    def total_nbytes(self) -> int:
        return sum([self.storage_nbytes[number] for number in {*self.storage_rows()[1]}])


def find_shared_rows(
    tables: Iterable[Table], *, stored_aliases: bool = False, by_identity: bool = False
) -> SharedRows:
    """Compare where the rows of tables lie. `by_identity` compares files by their real paths and memory by its address, so that one
    that was opened twice is one."""
    search = _Search(stored_aliases=stored_aliases, by_identity=by_identity)
    for table in tables:
        search.add(table)
    return search.found()


def find_ties(table: Table) -> dict[int, int]:
    """Rows that are the same view of a storage as an earlier row, in order, each with the first such row. Rows of one view have one
    dtype and shape, one place in one storage, and one meaning of its bytes. What has no bytes is no view."""
    return {} if are_distinct(table.storage_indices) else find_shared_rows([table]).ties()


def check_expansion(
    table: Table, rows: Sequence[int] | None = None, *, without_ties: bool = False
) -> None:
    """Raise `LimitExceeded` if rows that are copied out take many more bytes than the table has stored.

    `LazyTensor.check_expansion` allows a small expanded view for each tensor. A file of 200 KB can hold a
    thousand of them, or a thousand views of one storage, so together they have one allowance.

    Args:
        table: The tensors of a checkpoint.
        rows: The rows that are copied out, all of them by default.
        without_ties: Whether only the first row of each view is copied out.
    """
    are_whole = not table.irregular and all(kind.is_whole for kind in table.kinds)
    if are_whole and are_distinct(table.storage_indices):
        return
    shared = find_shared_rows([table])
    ties = shared.ties() if without_ties else {}
    copied_rows = [row for row in shared.rows if row not in ties]
    if rows is not None:
        copied_rows = sorted({*copied_rows}.intersection(rows))
    if not copied_rows:
        return
    copied_nbytes = int(table.row_nbytes(copied_rows).sum())
    stored_nbytes = shared.total_nbytes()
    limits = table.lazy_tensor(copied_rows[0]).source.limits
    allowed_nbytes = max(limits.expansion * stored_nbytes, limits.expansion_floor_nbytes)
    if copied_nbytes > allowed_nbytes:
        message = (
            f"the tensors take {copied_nbytes:,} bytes out of {stored_nbytes:,} stored ones, because they"
            " are expanded views or share storages; choose fewer tensors, or open with Limits(expansion=…)"
        )
        raise LimitExceeded(message, expected=allowed_nbytes, found=copied_nbytes)


def are_distinct(numbers: Sequence[int]) -> bool:
    return isinstance(numbers, range) or len({*numbers}) == len(numbers)


class _Search:
    def __init__(self, *, stored_aliases: bool, by_identity: bool) -> None:
        self._stored_aliases, self._by_place = stored_aliases, by_identity
        self._first = 0
        self._numbers: dict[Hashable, int] = {}
        self._unused = count()
        self._nbytes: dict[int, int] = {}
        self._parts: dict[int, tuple[int, ...]] = {}
        self._views: dict[Hashable, int] = {}
        self._owners: dict[tuple[Source, str], Hashable] = {}
        self._rows: list[int] = []
        self._storage: list[int] = []
        self._lies: list[int] = []
        self._irregular: list[tuple[int, int, LazyTensor, Sequence[Chunk]]] = []

    def add(self, table: Table) -> None:
        first, self._first = self._first, self._first + len(table)
        kind, storage = table.kind_indices, table.storage_indices
        aliased = {
            at
            for at, one in enumerate(table.kinds)
            if self._stored_aliases and one.traits.alias is not None
        }
        rows: Sequence[int] = range(len(table))
        if table.irregular or aliased:
            rows = [
                row
                for row, number in enumerate(storage)
                if number != IRREGULAR and kind[row] not in aliased
            ]
            for row in sorted({*range(len(table))}.difference(rows)):
                tensor = table.lazy_tensor(row)
                chunks = tensor.shared_chunks if self._stored_aliases else tensor.chunks
                if chunks:
                    self._irregular.append(
                        (first + row, self._number(tensor, chunks), tensor, chunks)
                    )
        numbers = [storage[row] for row in rows]
        known = [*map(self._numbers.setdefault, self._keys(table, numbers, rows), self._unused)]
        self._nbytes.update(zip(known, table.storages.nbytes[numbers].tolist(), strict=True))
        views = [*map(self._view, table.kinds)]
        self._rows += [first + row for row in rows]
        self._storage += known
        lies = [views[kind[row]] for row in rows]
        if offsets := table.offsets:
            # No function is called for a row: there may be fifty thousand views of one storage.
            placed, unused = self._views, len(self._views)
            filled = [0 not in one.shape for one in table.kinds]
            for at, row in enumerate(rows):
                if row in offsets and filled[kind[row]]:
                    way = lies[at], offsets[row]
                    if way not in placed:
                        placed[way], unused = unused, unused + 1
                    lies[at] = placed[way]
        self._lies += lies

    def _keys(
        self, table: Table, numbers: Sequence[int], rows: Sequence[int]
    ) -> Iterable[Hashable]:
        storages = table.storages
        if isinstance(storages, FileColumns):
            owners = [self._owner(place.source, place.store, place.key) for place in storages.files]
            file, *columns = (
                column[numbers].tolist()
                for column in (
                    storages.file_indices,
                    storages.starts,
                    storages.nbytes,
                    storages.crcs,
                )
            )
            return zip(map(owners.__getitem__, file), *columns, strict=True)
        if not self._by_place:
            return zip(repeat(id(storages)), numbers, strict=False)
        tensors = {
            number: table.lazy_tensor(row)
            for number, row in dict(zip(numbers, rows, strict=True)).items()
        }
        return map(
            {
                number: self._key(one, one.storages[0]) for number, one in tensors.items()
            }.__getitem__,
            numbers,
        )

    def _key(self, tensor: LazyTensor, storage: Storage) -> Hashable:
        owner = self._owner(tensor.source, storage.home, storage.key)
        # By its exact class: a storage of another kind may not know its place before it is asked.
        if type(storage) is not Storage:
            return owner, type(storage), storage.ranges, storage.nbytes
        return (
            owner,
            storage.start,
            storage.nbytes,
            NO_CRC if storage.crc32 is None else storage.crc32,
        )

    def _owner(self, source: Source, home: object, key: str) -> Hashable:
        """What a key belongs to: a store; or by place this process's memory, a file by its real path, a source like no other."""
        if not self._by_place:
            return id(home), key
        if (source, key) not in self._owners:
            self._owners[source, key] = source.store.identity(key)
        return self._owners[source, key]

    def _number(self, tensor: LazyTensor, chunks: Sequence[Chunk]) -> int:
        """The number of the storage of chunks, or of all their storages together."""
        storages = {self._key(tensor, chunk.storage): chunk.storage.nbytes for chunk in chunks}
        own = tuple([self._numbers.setdefault(key, next(self._unused)) for key in storages])
        self._nbytes.update(zip(own, storages.values(), strict=True))
        if len(own) == 1:
            return own[0]
        number = self._numbers.setdefault((None, own), next(self._unused))
        self._parts[number], self._nbytes[number] = own, sum(storages.values())
        return number

    def _view(self, kind: RowKind) -> int:
        """The number of a way to lie in a storage, from its first byte on."""
        strides = () if 0 in kind.shape else kind.strides
        return self._views.setdefault(
            (kind.dtype, kind.shape, strides, kind.traits.conj, kind.traits.neg), len(self._views)
        )

    def _irregular_view(self, tensor: LazyTensor, chunks: Sequence[Chunk]) -> int:
        traits = tensor.traits
        place: Hashable = chunks[0].strides
        offset = chunks[0].offset
        if len(chunks) > 1 or chunks[0].box != Box.whole(tensor.shape):
            place, offset = (
                tuple(
                    [
                        (one.box, self._number(tensor, (one,)), one.offset, one.strides)
                        for one in chunks
                    ]
                ),
                0,
            )
        elif 0 in tensor.shape:
            place, offset = (), 0
        lies = self._views.setdefault(
            (tensor.dtype, tensor.shape, place, traits.conj, traits.neg), len(self._views)
        )
        return self._views.setdefault((lies, offset), len(self._views)) if offset else lies

    def found(self) -> SharedRows:
        rows, storage, lies = self._rows, self._storage, self._lies
        if self._irregular:
            rows = [*rows, *(position for position, *_ in self._irregular)]
            storage = [*storage, *(number for _, number, *_ in self._irregular)]
            times = Counter(storage)
            # How a tensor lies is asked only where there are others: some have to read that.
            irregular = [
                self._irregular_view(tensor, chunks) if times[number] > 1 else -1
                for _, number, tensor, chunks in self._irregular
            ]
            lies = [*lies, *irregular]
        order = (
            sorted(range(len(rows)), key=rows.__getitem__) if self._irregular else range(len(rows))
        )
        if self._irregular or 0 in self._nbytes.values():
            order = [at for at in order if self._nbytes[storage[at]]]
            rows, storage, lies = ([column[at] for at in order] for column in (rows, storage, lies))
        ways = len(self._views) + 1
        view = [number * ways + lie for number, lie in zip(storage, lies, strict=True)]
        return SharedRows(rows, storage, view, self._nbytes, self._parts, self._stored_aliases)


class RangeGroup(Value, Generic[T], frozen=True):
    """A range without a gap, and what lies in it, in the order of first bytes."""

    start: int
    stop: int
    members: list[T]


def group_overlapping_ranges(
    spans: Iterable[ByteRange[T]], *, touching: bool = False
) -> list[RangeGroup[T]]:
    """What overlaps, as one: each with the next, and so all that hang together. With `touching`, neighbours without a gap as well.

    >>> [(one.start, one.stop, one.members) for one in group_overlapping_ranges([(8, 12, "c"), (0, 6, "a"), (4, 8, "b")])]
    [(0, 8, ['a', 'b']), (8, 12, ['c'])]
    """
    found: list[RangeGroup[T]] = []
    for start, stop, member in sorted(spans, key=lambda span: span[:2]):
        last = found[-1] if found else None
        if last is not None and (start < last.stop or (touching and start == last.stop)):
            last.members.append(member)
            found[-1] = RangeGroup(last.start, max(last.stop, stop), last.members)
        else:
            found.append(RangeGroup(start, stop, [member]))
    return found


def find_reached_ranges(
    tensors: Iterable[LazyTensor], *, aligned: int = 1
) -> dict[Storage, list[RangeGroup[None]]]:
    """The bytes of storages that tensors reach: what overlaps or touches is one span, which begins at a multiple of `aligned`."""
    found: dict[Storage, list[ByteRange[None]]] = {}
    for tensor in tensors:
        for chunk in tensor.chunks:
            start, stop = chunk.byte_range(tensor.dtype)
            found.setdefault(chunk.storage, []).extend(
                [(start - start % aligned, stop, None)] if start < stop else ()
            )
    return {
        storage: group_overlapping_ranges(spans, touching=True) for storage, spans in found.items()
    }


def find_overlaps(spans: Iterable[ByteRange[T]]) -> Iterator[tuple[T, T]]:
    """Pairs that have a byte in common: each with the one of those before it that reaches furthest. Linear, so not all pairs.

    >>> list(find_overlaps([(0, 10, "a"), (2, 4, "b"), (6, 8, "c"), (10, 12, "d")]))
    [('a', 'b'), ('a', 'c')]
    """
    furthest: ByteRange[T] | None = None
    for span in sorted(spans, key=lambda span: span[:2]):
        if furthest is not None and span[0] < furthest[1]:
            yield furthest[2], span[2]
        if furthest is None or span[1] > furthest[1]:
            furthest = span
