"""Which tensors are the same bytes (`alias_graph`). Torch-free.

By storage, nothing is read. Tensors belong together when they are views of one storage: the same record of one file, however often
and under whatever name it was opened; the same memory of this process; or, in a format that stores copies, the storage that their
file says they shared before.

By content, tensors that hold the same are found wherever they lie, so that a tie which a conversion lost is found again:

1. Views that are one and the same place are one *copy*, and are not compared with each other.
2. Copies are sorted into buckets by digest: dtype, shape, CRC-32. Where a file records the checksum, it is not read for that.
3. A CRC is no proof, and a file can be made to lie about it: within a bucket every copy is compared with the first, byte by byte.
4. Those that differ, which takes bad luck or bad intent, and those that do not lie in one piece are told apart by a cryptographic
   hash. So the cost is at most three times the bytes, however many collide.

Bytes are compared in blocks, and memory is a few blocks a thread.

    3 models, 7 tensors, 412 bytes in 4 storages
    base:emb.weight = base:head.weight = tuned:emb.weight    float32 [5, 4], 2 copies, 80 bytes could be saved
"""

from __future__ import annotations

import hashlib
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, cast

import numpy as np

from holdfast.core.arguments import understood
from holdfast.core.arrays import Ints
from holdfast.core.box import Box
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.digest import canonical
from holdfast.core.dtype import DType
from holdfast.core.limits import Limits
from holdfast.core.notebook import Shown
from holdfast.core.protocols import Source
from holdfast.core.quantities import Size
from holdfast.core.table import ODD, Kind, Table
from holdfast.core.tensor import NO_CRC, LazyTensor, Traits
from holdfast.core.value import Value
from holdfast.engine.blocks import read_slab, slabs
from holdfast.engine.budget import reading_threads
from holdfast.engine.digest import tensor_crcs
from holdfast.engine.equal import same_bytes
from holdfast.engine.write import Progress
from holdfast.errors import LimitExceeded, Unsupported
from holdfast.formats.strict_json import quoted
from holdfast.inspect.open import Openable
from holdfast.inspect.open import open as open_checkpoint
from holdfast.plan.files import FileStorages
from holdfast.plan.table import table_of
from holdfast.rewrite.state import tabulate_state

By = Literal["storage", "content"]

ONLY = "model"
"""What the one model is called that is given without a name."""

BLOCK_NBYTES = 2 << 20
"""Bytes of each side that are compared at a time."""

LISTED = 20
"""Groups that a printed graph lists, the largest first, and members of each."""


@dataclass(frozen=True, slots=True)
class AliasMember:
    """One tensor of one model, and where it lies in its storage."""

    model: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of its elements when packed."""
    storage: int
    """Number of its storage in the graph: members with one number are views of the same bytes."""
    offset: int | None
    """Element of the storage where it begins; None where it is stored in several pieces, or begins between elements."""
    strides: tuple[int, ...] | None
    """In elements; None as for `offset`."""

    def __str__(self) -> str:
        return f"{_shown(self.model)}:{_shown(self.name)}"


@dataclass(frozen=True, slots=True)
class AliasGroup:
    """Tensors that are views of one storage, or that hold the same."""

    members: tuple[AliasMember, ...]
    """In the order of the models; two at least."""
    nbytes: int
    """Bytes of the storages that they lie in, each once."""
    saved_nbytes: int
    """By storage: what they would take more if each were stored by itself."""
    savable_nbytes: int = 0
    """By content: bytes of storages that nothing would need if all members were views of the first."""
    same: bool = True
    """Whether all members hold the same, and not other parts of one storage."""

    @property
    def storages(self) -> int:
        """How many storages they lie in."""
        return len({member.storage for member in self.members})

    @property
    def models(self) -> tuple[str, ...]:
        """The models that have a member here."""
        return tuple(dict.fromkeys(member.model for member in self.members))

    def __str__(self) -> str:
        first = self.members[0]
        more = len(self.members) - LISTED
        names = [*map(str, self.members[:LISTED]), *([f"… {more:,} more"] if more > 0 else [])]
        what = f"{first.dtype} {list(first.shape)}" if self.same else f"views of {self.nbytes:,} bytes"
        if self.storages > 1:
            told = f"{what}, {self.storages:,} copies, {self.savable_nbytes:,} bytes could be saved"
        else:
            told = f"{what}, stored once" + (f", {self.saved_nbytes:,} bytes saved" if self.saved_nbytes else "")
        return f"{(' = ' if self.same else ' ~ ').join(names)}    {told}"


@dataclass(frozen=True, slots=True)
class AliasGraph(Shown):
    """What several models share. Print it."""

    by: By
    models: tuple[str, ...]
    tensors: int
    storages: int
    nbytes: int
    """Bytes of all storages, each once."""
    groups: tuple[AliasGroup, ...]
    notes: tuple[str, ...] = ()
    """What was not looked at, and why."""
    _index: Mapping[tuple[str, str], AliasGroup] = field(default_factory=dict, repr=False, compare=False)

    @property
    def saved_nbytes(self) -> int:
        """Bytes that are saved because storages are shared."""
        return sum(group.saved_nbytes for group in self.groups)

    @property
    def savable_nbytes(self) -> int:
        """Bytes that could be saved if tensors that hold the same were stored once."""
        return sum(group.savable_nbytes for group in self.groups)

    def of(self, model: str, name: str) -> AliasGroup | None:
        """The group of one tensor; None where it stands alone."""
        return self._index.get((model, name))

    def __str__(self) -> str:
        totals = [f"{len(self.models):,} models, {self.tensors:,} tensors, {self.nbytes:,} bytes in {self.storages:,} storages"]
        if self.savable_nbytes:
            totals.append(f"{self.savable_nbytes:,} bytes could be saved")
        order = sorted(self.groups, key=lambda group: -(group.savable_nbytes or group.saved_nbytes))
        more = [f"… {len(order) - LISTED:,} more groups"] if len(order) > LISTED else []
        return "\n".join(["; ".join(totals), *map(str, order[:LISTED]), *more, *self.notes])


@understood
def alias_graph(
    src: Openable | Checkpoint | Mapping[str, object],
    *,
    by: By = "storage",
    max_memory: Size | None = None,
    limits: Limits | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> AliasGraph:
    """Find what models share: of one checkpoint, or of several by name: paths, open checkpoints, or states in memory.

    A state is nested dicts of arrays, tensors and lazy tensors. `by="storage"` compares places and reads nothing. `by="content"`
    reads what no file has a checksum for, and everything that looks equal. Tensors without data or elements share nothing.
    `progress` is told of bytes that were read.
    """
    several = src if isinstance(src, Mapping) and not isinstance(src, Checkpoint) else {ONLY: src}
    with ExitStack() as stack:
        models: dict[str, Table] = {}
        for model, state in several.items():
            if isinstance(state, str | os.PathLike | bytes | bytearray | memoryview):
                state = stack.enter_context(open_checkpoint(state, limits=limits, threads=threads))
            models[model] = table_of(state.stored) if isinstance(state, Checkpoint) else tabulate_state(state).tensors
        if by not in ("storage", "content"):
            raise Unsupported(f"aliases are found by 'storage' or by 'content', not by {by!r}", found=by)
        found = placed(models, noted=by == "storage")
        return (
            found.by_storage() if by == "storage" else found.by_content(reading_threads(max_memory, threads), progress, tied=True)
        )


def placed(models: Mapping[str, Table], *, noted: bool) -> Placed:
    """The rows of models, each at its place; with `noted`, copies count as the views that they were."""
    search = _Search(noted=noted)
    for model, table in models.items():
        search.add(model, table)
    return search.placed()


Place = tuple[object, ...]
"""What tells a storage from all others, or a way to lie in one."""

APART, EMPTY = -1, -2
"""In the place of the number of a way to lie: tensors that are looked at one by one, and those that share nothing."""


class _Search:
    """The rows of all models, as columns: the storage of each, and how it lies there. Rows alike in both are one *copy*."""

    def __init__(self, *, noted: bool) -> None:
        self._noted = noted
        """Whether copies that shared a storage before they were saved count as sharing it."""
        self._models: list[str] = []
        self._tables: list[Table] = []
        """While states are looked at, no other array may take the address of one of theirs."""
        self._first = [0]
        """The position of the first row of each table among the rows of all."""
        self._storages: dict[Place, int] = {}
        self._lengths: dict[int, int] = {}
        """By the number of a storage."""
        self._lies: dict[Place, int] = {}
        self._owners: dict[tuple[Source, str], object] = {}
        self._found: list[Ints] = [np.zeros((4, 0), np.int64)]
        """Of rows that have something: position, number of the storage, number of the way to lie, recorded checksum."""

    def add(self, model: str, table: Table) -> None:
        storages, first = table.storages, self._first[-1]
        self._models.append(model)
        self._tables.append(table)
        self._first.append(first + len(table))
        lies = np.array([self._lie(kind) for kind in table.kinds], np.int64)[np.array(table.kind, np.int64)]
        numbers = np.array(table.storage, np.int64)
        if isinstance(storages, FileStorages):
            rows = ((numbers != ODD) & (lies >= 0)).nonzero()[0]
            which = _numbered(numbers[rows])
            held = np.empty(which.max(initial=-1) + 1, np.int64)
            held[which] = numbers[rows]
            owners = [self._owner(place.source, place.key) for place in storages.files]
            lengths = storages.nbytes[held].tolist()
            places = zip(
                [owners[file] for file in storages.file[held].tolist()], storages.start[held].tolist(), lengths, strict=True
            )
            known = [*map(self._storages.setdefault, places, count(self._unused))]
            self._lengths.update(zip(known, lengths, strict=True))
            whole = np.array([kind.whole for kind in table.kinds], np.bool_)[np.array(table.kind, np.int64)[rows]]
            crcs = np.where(whole, storages.crc[numbers[rows]], NO_CRC)
            self._found.append(np.stack((first + rows, np.array(known, np.int64)[which], lies[rows], crcs)))
            numbers[rows], lies[rows] = 0, EMPTY
        apart = ((numbers == ODD) | (lies != EMPTY)).nonzero()[0].tolist()
        placed = [(first + row, *place, NO_CRC) for row in apart if (place := self._place(table.view(row))) is not None]
        self._found.append(np.array(placed, np.int64).reshape(-1, 4).T)

    @property
    def _unused(self) -> int:
        """A number that no storage has, and none above it."""
        return max(self._lengths, default=-1) + 1

    def _lie(self, kind: Kind) -> int:
        traits = kind.traits
        if traits.meta or not math.prod(kind.shape):
            return EMPTY
        if self._noted and traits.alias is not None:
            return APART
        return self._way(kind.dtype, kind.shape, ((Box.whole(kind.shape), kind.offset, kind.strides),), traits)

    def _way(self, dtype: DType, shape: tuple[int, ...], boxes: Place, traits: Traits) -> int:
        return self._lies.setdefault((dtype, shape, boxes, traits.conj, traits.neg), len(self._lies))

    def _place(self, tensor: LazyTensor) -> tuple[int, int] | None:
        """The storage of a tensor and how it lies there; None where there is nothing of it."""
        if tensor.traits.meta or not tensor.size or not tensor.chunks:
            return None
        chunks = tensor.shared_chunks if self._noted else tensor.chunks
        storages = dict.fromkeys(chunk.storage for chunk in chunks)
        each: list[Place] = [(self._owner(tensor.source, one.key), one.start, one.nbytes) for one in storages]
        number = self._storages.setdefault(each[0] if len(each) == 1 else (*each,), self._unused)
        self._lengths[number] = sum(one.nbytes for one in storages)
        boxes = tuple((chunk.box, chunk.offset, chunk.strides) for chunk in chunks)
        return number, self._way(tensor.dtype, tensor.shape, boxes, tensor.traits)

    def _owner(self, source: Source, key: str) -> object:
        """What a key belongs to: this process's memory, a file by its real path, or a source that is like no other."""
        known = (source, key)
        if known not in self._owners:
            self._owners[known] = source.store.place(key)
        return self._owners[known]

    def placed(self) -> Placed:
        """All rows that were found, in order."""
        columns = np.concatenate(self._found, axis=1)
        positions, storages, lies, crcs = columns[:, columns[0].argsort(kind="stable")]
        own = _numbered(storages)
        lengths = np.zeros(len(self._lengths), np.int64)
        lengths[own] = [self._lengths[storage] for storage in storages.tolist()]
        return Placed(self, positions, own, _numbered(storages * (len(self._lies) + 1) + lies), lies, crcs, lengths)

    def at(self, position: int) -> tuple[str, Table, int]:
        """The model, the table and the row of a position."""
        number = bisect_right(self._first, position) - 1
        return self._models[number], self._tables[number], position - self._first[number]

    def tensor(self, position: int) -> LazyTensor:
        _, table, row = self.at(position)
        return table.view(row)

    def canonical(self) -> list[object]:
        """Of each way to lie: what tensors that can hold the same have in common."""
        return [canonical(cast("DType", key[0]), cast("tuple[int, ...]", key[1])) for key in self._lies]

    def member(self, position: int, storage: int) -> AliasMember:
        model, table, row = self.at(position)
        kind = table.kind_of(row)
        place: tuple[int, ...] | None = (kind.offset, *kind.strides)
        if row in table.odd or (self._noted and kind.traits.alias is not None):
            tensor = table.view(row)
            chunk = (tensor.shared_chunks if self._noted else tensor.chunks)[0]
            place = (chunk.offset, *chunk.strides) if len(tensor.chunks) == 1 else None
        bits = kind.dtype.bits
        if place is not None:
            place = None if any(step % bits for step in place) else tuple([step // bits for step in place])
        offset, strides = (None, None) if place is None else (place[0], place[1:])
        return AliasMember(model, table.names[row], kind.dtype.name, kind.shape, kind.nbytes, storage, offset, strides)

    def graph(self, by: By, groups: Sequence[AliasGroup], notes: Sequence[str]) -> AliasGraph:
        index = {(member.model, member.name): group for group in groups for member in group.members}
        nbytes, storages = sum(self._lengths.values()), len(self._storages)
        return AliasGraph(by, tuple(self._models), self._first[-1], storages, nbytes, tuple(groups), tuple(notes), index)


def _numbered(values: Ints) -> Ints:
    """A number for each value: 0 for the first and those that are equal to it, and so on."""
    order = values.argsort(kind="stable")
    new = _edges(values[order])
    rank, found = np.empty(len(new), np.int64), np.empty(len(values), np.int64)
    rank[order[new].argsort()] = np.arange(len(new))
    found[order] = rank.repeat(_lengths(new, len(values)))
    return found


def _edges(ordered: Ints) -> Ints:
    """Where values begin in a column that has equal ones together."""
    new = np.ones(len(ordered), np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    return new.nonzero()[0]


def _lengths(starts: Ints, count: int) -> Ints:
    return np.array([*starts[1:].tolist(), count], np.int64)[: len(starts)] - starts


class Placed(Value, frozen=True, eq=False):
    """The rows of a search that have something, in order."""

    search: _Search
    positions: Ints
    storages: Ints
    copies: Ints
    """The copy that each row is a name of."""
    lies: Ints
    crcs: Ints
    """What files record of exactly the bytes of each; `NO_CRC` where they do not."""
    lengths: Ints
    """Of each storage."""

    def members(self, rows: Ints) -> tuple[AliasMember, ...]:
        return tuple(
            [self.search.member(*one) for one in zip(self.positions[rows].tolist(), self.storages[rows].tolist(), strict=True)]
        )

    def by_storage(self) -> AliasGraph:
        made = []
        for rows in _several(self.storages):
            members, nbytes = self.members(rows), int(self.lengths[self.storages[rows[0]]])
            saved = max(sum(member.nbytes for member in members) - nbytes, 0)
            made.append(AliasGroup(members, nbytes, saved, same=len({*self.copies[rows].tolist()}) == 1))
        return self.search.graph("storage", made, ())

    def by_content(self, threads: int | None, progress: Progress | None, *, tied: bool) -> AliasGraph:
        """`tied` says whether names of one copy are a group, too, where there is no other that holds the same."""
        order = self.copies.argsort(kind="stable")
        edges = [*_edges(self.copies[order]).tolist(), len(order)]
        first = order[edges[:-1]]
        crcs, notes = self._sums(first, threads, progress)
        canon = np.array(_numbers(self.search.canonical()), np.int64)[self.lies[first]]
        alike = [one.tolist() for one in _several(canon * (1 << 33) + np.where(crcs >= 0, crcs, (1 << 32) + np.arange(len(crcs))))]
        classes = _classes(alike, lambda copy: self.search.tensor(int(self.positions[first[copy]])), threads, progress)
        freed = self._freed(classes, self.storages[first])
        if tied:
            within = {copy for copies in classes for copy in copies}
            classes = [
                *classes,
                *([int(self.copies[rows[0]])] for rows in _several(self.copies) if self.copies[rows[0]] not in within),
            ]
        made = []
        for number, copies in enumerate(classes):
            own = [order[edges[copy] : edges[copy + 1]] for copy in copies]
            held = {int(self.storages[rows[0]]) for rows in own}
            members = self.members(np.sort(np.concatenate(own)))
            again = sum(members[0].nbytes * (len(rows) - 1) for rows in own)
            savable = sum(int(self.lengths[storage]) for storage in held if freed.get(storage) == number)
            made.append((own, AliasGroup(members, sum(int(self.lengths[storage]) for storage in held), again, savable)))
        made.sort(key=lambda one: min(int(rows[0]) for rows in one[0]))
        return self.search.graph("content", [group for _, group in made], notes)

    def _sums(self, first: Ints, threads: int | None, progress: Progress | None) -> tuple[Ints, list[str]]:
        """The checksum of each copy: as files record it, or computed; below 0 where it is not compared, and notes why."""
        crcs, notes, read = self.crcs[first].copy(), list[str](), dict[int, LazyTensor]()
        for copy in np.flatnonzero(crcs == NO_CRC).tolist():
            position = int(self.positions[first[copy]])
            tensor = self.search.tensor(position)
            try:
                tensor.check_expansion()
                read[copy] = tensor
            except LimitExceeded as error:
                notes.append(f"{self.search.member(position, 0)}: not compared: {error.message}")
        crcs[[*read]] = tensor_crcs([*read.values()], threads=threads, progress=progress)
        return crcs, notes

    def _freed(self, classes: Sequence[Sequence[int]], storages: Ints) -> dict[int, int]:
        """The storages of which no copy is the first of its class, each with the class of its first copy."""
        moved = {copy: number for number, copies in enumerate(classes) for copy in copies[1:]}
        left = np.bincount(storages, minlength=len(self.lengths))
        found: dict[int, int] = {}
        for copy in sorted(moved):
            storage = int(storages[copy])
            left[storage] -= 1
            found.setdefault(storage, moved[copy])
        return {storage: number for storage, number in found.items() if not left[storage]}


def _numbers(values: Sequence[object]) -> list[int]:
    """The position of each value where it stands first."""
    first: dict[object, int] = {}
    return [first.setdefault(value, at) for at, value in enumerate(values)]


def _several(numbers: Ints) -> list[Ints]:
    """Positions of equal numbers, where there are two or more, by the first of them."""
    order = numbers.argsort(kind="stable")
    starts = _edges(numbers[order])
    stops = starts + _lengths(starts, len(numbers))
    some = (stops - starts > 1).nonzero()[0]
    some = some[order[starts[some]].argsort()]
    return [order[start:stop] for start, stop in zip(starts[some].tolist(), stops[some].tolist(), strict=True)]


def _classes(
    alike: Sequence[Sequence[int]], tensor: Callable[[int], LazyTensor], threads: int | None, progress: Progress | None
) -> list[list[int]]:
    """Copies that hold the same, of those that look alike; two or more each, in their order."""
    tensors = {copy: tensor(copy) for copies in alike for copy in copies}
    rivals = [(copies[0], copy) for copies in alike for copy in copies[1:]]
    same = same_bytes([(tensors[first], tensors[copy]) for first, copy in rivals], progress, threads=threads)
    classes = {first: [first] for first, _ in rivals}
    by_hash: dict[tuple[int, bytes], list[int]] = {}
    for (first, copy), equal in zip(rivals, same, strict=True):
        if equal:
            classes[first].append(copy)
            continue
        if (first, b"") not in by_hash:
            by_hash[first, b""] = by_hash[first, _hash(tensors[first])] = classes[first]
        by_hash.setdefault((first, _hash(tensors[copy])), []).append(copy)
    others = [copies for (first, _), copies in by_hash.items() if copies is not classes[first]]
    return [sorted(copies) for copies in (*classes.values(), *others) if len(copies) > 1]


def _hash(tensor: LazyTensor) -> bytes:
    """A cryptographic hash of the bytes in C order."""
    digest = hashlib.blake2b(digest_size=32)
    for slab in slabs(tensor, BLOCK_NBYTES):
        digest.update(read_slab(slab))
    return digest.digest()


def _shown(text: str) -> str:
    """A name out of a file, for people: as it is, or in quotes with everything odd written out."""
    return text if text.isascii() and text.isprintable() and len(text) <= 80 else quoted(text)
