"""`alias_graph` finds tensors that are the same bytes, or hold the same; `tie` stores tensors that hold the same once.

By storage, nothing is read. Tensors belong together when they are views of one storage: the same record of one file, however often
and under whatever name it was opened; the same memory of this process; or, in a format that stores copies, the storage that their
file says they shared before.

By content, tensors that hold the same are found wherever they lie, so that a tie which a conversion lost is found again:

1. Views that are one and the same place are one *copy*, and are not compared with each other.
2. Copies are sorted into buckets by digest: dtype, shape, CRC-32. Where a file records the checksum, it is not read for that.
3. A CRC is no proof, and a file can be made to lie about it: within a bucket every copy is compared with the first, byte by byte.
4. Copies that differ, which takes bad luck or bad intent, and copies that do not lie in one piece are distinguished by a
   cryptographic hash. So the cost is at most three times the bytes, however many collide.

To tie is to give rows other storages:

1. A row that is alone in its storage becomes the first one of its group, under its own name.
2. One that shares its storage with other views takes them along: where both rows are all of their storages, all views of the one
   become views of the other. Where they are not, it stays, and a note says so: no view is ever torn from its storage.

    before   base.emb [A]      tuned.emb [A']     tuned.rows ⊂ A'          A = A', byte by byte
    after    base.emb [A]      tuned.emb [A]      tuned.rows ⊂ A
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal, Unpack

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.digest import canonicalize
from holdfast.core.limits import Limits
from holdfast.core.notebook import NotebookResult
from holdfast.core.options import InPlaceOptions, Progress, validate_arguments
from holdfast.core.protocols import State
from holdfast.core.quantities import Size
from holdfast.core.sharing import find_shared_rows, group_repeated_keys
from holdfast.core.strict_json import quote
from holdfast.core.table import RowKind, Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import list_names
from holdfast.core.value import replace
from holdfast.engine.blocks import read_block, split_into_blocks
from holdfast.engine.digest import compute_crcs, find_recorded_crc
from holdfast.engine.equal import compare_bytes
from holdfast.engine.threads import count_reading_threads
from holdfast.errors import LimitExceeded, Unsupported
from holdfast.formats import format_of
from holdfast.verbs.open import Openable
from holdfast.verbs.open import open as open_checkpoint
from holdfast.verbs.shared.models import plan_rewrite, weights_of
from holdfast.verbs.shared.planned import (
    Destination,
    Planned,
    Saved,
    make_report_fields,
    plan_derived_checkpoint,
)
from holdfast.verbs.shared.rejoin import rejoin
from holdfast.verbs.shared.state import replace_rows, replace_table, tabulate_state

By = Literal["storage", "content"]

BLOCK_NBYTES = 2 << 20  # bytes that are hashed at a time

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
    """Bytes of the elements when packed."""
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
    """The tensors in the order of the models; two at least."""
    nbytes: int
    """Bytes of their storages, each once."""
    saved_nbytes: int
    """Bytes that they would take more if each were stored by itself."""
    savable_nbytes: int = 0
    """By content: bytes of storages that nothing would need if all members were views of the first."""
    same: bool = True
    """Whether all members hold the same, and not other parts of one storage."""

    @property
    def storages(self) -> int:
        """The number of their storages."""
        return len({member.storage for member in self.members})

    @property
    def models(self) -> tuple[str, ...]:
        """The models that have a member here."""
        return tuple(dict.fromkeys(member.model for member in self.members))

    def line(self, names: Sequence[str]) -> str:
        """The group in a line; `names` are those of the first members."""
        first, more = self.members[0], len(self.members) - len(names)
        what = (
            f"{first.dtype} {list(first.shape)}" if self.same else f"views of {self.nbytes:,} bytes"
        )
        if self.storages > 1:
            what += f", {self.storages:,} copies, {self.savable_nbytes:,} bytes could be saved"
        else:
            what += ", stored once" + (
                f", {self.saved_nbytes:,} bytes saved" if self.saved_nbytes else ""
            )
        every = [*names, *([f"… {more:,} more"] if more else [])]
        return f"{(' = ' if self.same else ' ~ ').join(every)}    {what}"

    def __str__(self) -> str:
        return self.line([*map(str, self.members[:LISTED])])


@dataclass(frozen=True, slots=True)
class AliasGraph(NotebookResult):
    """The storages that several models share. Print it."""

    by: By
    models: tuple[str, ...]
    tensors: int
    storages: int
    nbytes: int
    """Bytes of all storages, each once."""
    groups: tuple[AliasGroup, ...]
    notes: tuple[str, ...] = ()
    """Tensors that were not compared, and why."""
    _index: Mapping[tuple[str, str], AliasGroup] = field(
        default_factory=dict, repr=False, compare=False
    )

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
        totals = [
            f"{len(self.models):,} models, {self.tensors:,} tensors, {self.nbytes:,} bytes in {self.storages:,} storages"
        ]
        if self.savable_nbytes:
            totals.append(f"{self.savable_nbytes:,} bytes could be saved")
        groups, more = _largest(self.groups)
        return "\n".join(["; ".join(totals), *map(str, groups), *more, *self.notes])


@validate_arguments
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
    `progress` is called with the number of bytes that were read.
    """
    given = src if isinstance(src, Mapping) and not isinstance(src, Checkpoint) else {"model": src}
    with ExitStack() as stack:
        models: dict[str, Table] = {}
        for model, state in given.items():
            if isinstance(state, str | os.PathLike | bytes | bytearray | memoryview):
                state = stack.enter_context(open_checkpoint(state, limits=limits, threads=threads))
            models[model] = (
                state.stored if isinstance(state, Checkpoint) else tabulate_state(state).tensors
            )
        if by == "storage":
            return ModelRows(models, stored_aliases=True).by_storage()
        if by != "content":
            raise Unsupported(
                f"aliases are found by 'storage' or by 'content', not by {by!r}", found=by
            )
        rows = ModelRows(models)
        copies, notes = rows.equal_copies(count_reading_threads(max_memory, threads), progress)
        return rows.by_content(copies, notes, tied=True)


class ModelRows:
    """The tensors of all models that have elements, by position; tensors that are one view are one *copy*."""

    def __init__(
        self,
        models: Mapping[str, Table],
        *,
        stored_aliases: bool = False,
        among: Collection[str] | None = None,
    ) -> None:
        """With `stored_aliases`, copies that shared a storage before they were saved count as sharing it. `among`: these names."""
        self._stored_aliases = stored_aliases
        self._models = tuple(models)
        self._tensors = [
            (model, table.lazy_tensor(row))
            for model, table in models.items()
            for row in range(len(table))
        ]
        self.shared = found = find_shared_rows(
            models.values(), stored_aliases=stored_aliases, by_identity=True
        )
        self.storage = dict(zip(found.rows, found.storage_ids, strict=True))
        self.view = dict(zip(found.rows, found.view_ids, strict=True))
        self._rows = [row for row in found.rows if self._is_filled(self.tensor(row), among)]
        views = [self.view[row] for row in self._rows]
        storages = dict.fromkeys(self.storage[row] for row in self._rows)
        self._numbers = {storage: number for number, storage in enumerate(storages)}
        """The number of each storage that people see."""
        self._copies = dict(zip(reversed(views), reversed(self._rows), strict=True))
        """The first row of each view, which stands for the copy."""
        self._names = {rows[0]: rows for rows in group_repeated_keys(views, self._rows).values()}
        """The rows of copies that have several."""

    @staticmethod
    def _is_filled(tensor: LazyTensor, among: Collection[str] | None) -> bool:
        is_chosen = among is None or tensor.name in among
        return is_chosen and tensor.size > 0 and not tensor.traits.meta

    def rows_of(self, copies: Sequence[int]) -> list[int]:
        return sorted([row for copy in copies for row in self._names.get(copy, (copy,))])

    def tensor(self, row: int) -> LazyTensor:
        return self._tensors[row][1]

    def member(self, row: int) -> AliasMember:
        model, tensor = self._tensors[row]
        chunks = tensor.shared_chunks if self._stored_aliases else tensor.chunks
        offset, strides = None, None
        if len(chunks) == 1:
            bits = tensor.dtype.bits
            places = [divmod(place, bits) for place in (chunks[0].offset, *chunks[0].strides)]
            if not any(rest for _, rest in places):
                offset, *steps = [place for place, _ in places]
                strides = tuple(steps)
        return AliasMember(
            model,
            tensor.name,
            tensor.dtype.name,
            tensor.shape,
            tensor.nbytes,
            self._numbers[self.storage[row]],
            offset,
            strides,
        )

    def _graph(self, by: By, groups: Sequence[AliasGroup], notes: Sequence[str] = ()) -> AliasGraph:
        index = {(member.model, member.name): group for group in groups for member in group.members}
        nbytes = sum([self.shared.storage_nbytes[storage] for storage in self._numbers])
        return AliasGraph(
            by,
            self._models,
            len(self._tensors),
            len(self._numbers),
            nbytes,
            tuple(groups),
            tuple(notes),
            index,
        )

    def by_storage(self) -> AliasGraph:
        groups = []
        storages = [self.storage[row] for row in self._rows]
        for storage, rows in group_repeated_keys(storages, self._rows).items():
            members, nbytes = tuple(map(self.member, rows)), self.shared.storage_nbytes[storage]
            saved = max(sum(member.nbytes for member in members) - nbytes, 0)
            is_same = len({self.view[row] for row in rows}) == 1
            groups.append(AliasGroup(members, nbytes, saved, same=is_same))
        return self._graph("storage", groups)

    def by_content(
        self, classes: Sequence[Sequence[int]], notes: Sequence[str], *, tied: bool
    ) -> AliasGraph:
        """Groups of copies that hold the same; `tied` says whether names of one copy are a group where it has no other."""
        freed = self._freed(classes)
        if tied:
            within = {copy for copies in classes for copy in copies}
            classes = [*classes, *([copy] for copy in self._names if copy not in within)]
        groups = {}
        for number, copies in enumerate(classes):
            storages = {self.storage[copy] for copy in copies}
            nbytes = sum(self.shared.storage_nbytes[storage] for storage in storages)
            savable = sum(
                self.shared.storage_nbytes[storage]
                for storage in storages
                if freed.get(storage) == number
            )
            members = tuple(map(self.member, self.rows_of(copies)))
            saved = members[0].nbytes * (len(members) - len(copies))
            groups[min(copies)] = AliasGroup(members, nbytes, saved, savable)
        return self._graph("content", [groups[first] for first in sorted(groups)], notes)

    def equal_copies(
        self, threads: int | None, progress: Progress | None
    ) -> tuple[list[list[int]], list[str]]:
        """Copies that hold the same, two or more each; and why some were not compared. Reads what looks equal."""
        notes: list[str] = []
        checksums: dict[int, int] = {}
        unread: dict[int, LazyTensor] = {}
        for copy in sorted(self._copies.values()):
            tensor = self.tensor(copy)
            checksum = find_recorded_crc(tensor)
            if checksum is not None:
                checksums[copy] = checksum
                continue
            try:
                tensor.check_expansion()
                unread[copy] = tensor
            except LimitExceeded as error:
                notes.append(f"{self.member(copy)}: not compared: {error.message}")
        crcs = compute_crcs([*unread.values()], threads=threads, progress=progress)
        checksums.update(zip(unread, crcs, strict=True))

        compared = sorted(checksums)
        looks = []
        for copy in compared:
            tensor = self.tensor(copy)
            looks.append((canonicalize(tensor.dtype, tensor.shape), checksums[copy]))
        alike = group_repeated_keys(looks, compared)
        return _classes([*alike.values()], self.tensor, threads, progress), notes

    def _freed(self, classes: Sequence[Sequence[int]]) -> dict[int, int]:
        """Storages of which no copy is the first of its class, each with the class of its first copy."""
        moved = {copy: number for number, copies in enumerate(classes) for copy in copies[1:]}
        left = Counter(map(self.storage.__getitem__, self._copies.values()))
        found: dict[int, int] = {}
        for copy in sorted(moved):
            left[self.storage[copy]] -= 1
            found.setdefault(self.storage[copy], moved[copy])
        return {storage: number for storage, number in found.items() if not left[storage]}


def _classes(
    alike: Sequence[Sequence[int]],
    tensor: Callable[[int], LazyTensor],
    threads: int | None,
    progress: Progress | None,
) -> list[list[int]]:
    """Classes of copies that hold the same, of copies that look alike; two or more each, in their order."""
    tensors = {copy: tensor(copy) for copies in alike for copy in copies}
    rivals = [(copies[0], copy) for copies in alike for copy in copies[1:]]
    same = compare_bytes(
        [(tensors[first], tensors[copy]) for first, copy in rivals], progress, threads=threads
    )
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
    digest = hashlib.blake2b(digest_size=32)
    for piece in split_into_blocks(tensor, BLOCK_NBYTES):
        digest.update(read_block(piece))
    return digest.digest()


def _largest(groups: Sequence[AliasGroup]) -> tuple[list[AliasGroup], list[str]]:
    """Return the groups to list, the largest first, and a line on the others."""
    ordered = sorted(groups, key=lambda group: -(group.savable_nbytes or group.saved_nbytes))
    rest = len(ordered) - LISTED
    return ordered[:LISTED], [f"… {rest:,} more groups"] if rest > 0 else []


def _shown(text: str) -> str:
    return text if text.isascii() and text.isprintable() and len(text) <= 80 else quote(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied(Saved):
    """The tensors that `tie` found, and the files that it wrote or would write. Print it."""

    source: str
    groups: tuple[AliasGroup, ...]
    """Tensors that hold the same and are stored more than once."""
    storage_nbytes: int
    """Bytes of all storages that were read, each once."""
    savable_nbytes: int
    """Bytes of storages that nothing needs once equal tensors are tied."""

    def listing(self) -> list[str]:
        """A line for each group of tensors that hold the same, the largest first."""
        groups, more = _largest(self.groups)
        first = f"{self.source}: {self.savable_nbytes:,} of {self.storage_nbytes:,} bytes could be saved"
        lines = [
            group.line([quote(member.name) for member in group.members[:LISTED]])
            for group in groups
        ]
        return [first, *lines, *more]

    def _lines(self) -> list[str]:
        return [*self.listing(), *Saved._lines(self)]

    def __str__(self) -> str:
        return "\n".join([*self.listing(), *self.notes])


@validate_arguments
def tie(
    src: Openable | Checkpoint,
    dst: str | os.PathLike[str] | None = None,
    **options: Unpack[InPlaceOptions],
) -> Tied:
    """Write a checkpoint in which tensors that hold the same, byte by byte, are stored once: at `dst`, or `in_place=True`.

    With `dry_run=True` they are only found, and the result says what could be saved. The suffix of `dst` says the format, if
    `format` does not. torch files, packages and native directories hold tied tensors once; safetensors files hold them under the
    first name, and the others in their metadata, where Holdfast finds them.
    """
    return plan_tie(src, dst, options).carry_out(options["progress"])


def plan_tie(
    src: Openable | Checkpoint, dst: str | os.PathLike[str] | None, options: InPlaceOptions
) -> Planned[Tied]:
    """Find tensors that hold the same, which are read and compared here, and lay out the checkpoint in which they are tied."""

    def lay_out(source: Checkpoint, where: Destination) -> Planned[Tied]:
        described = tabulate_state(source, limits=options["limits"])
        threads = where.writing.reading_threads
        among, progress = _weights(source, described), options["progress"]
        state, graph, notes = tie_state(described, among, threads=threads, progress=progress)
        plan = plan_rewrite(source, state, where)
        plan = replace(plan, notes=(*notes, *plan.notes))
        groups = tuple(group for group in graph.groups if group.storages > 1)
        report = Tied(
            **make_report_fields(plan, where.path), source=source.path, groups=groups, storage_nbytes=graph.nbytes,
            savable_nbytes=graph.savable_nbytes,
        )  # fmt: skip
        return Planned(plan, report, where.writing, reads=described.tensors.stores)

    return plan_derived_checkpoint(src, dst, lay_out, options, programs=True)


def _weights(opened: Checkpoint, state: State) -> Collection[str] | None:
    """The tensors of a package that are compared: its weights. Constants and sample inputs are copied. None for all tensors."""
    if not format_of(opened.format).programs:
        return None
    models = weights_of(opened, state.tree)
    several = isinstance(state.tree, dict) and len(models) > 1
    return {
        f"{model}.{name}" if several else name
        for model, weights in models.items()
        for name in weights
    }


def tie_state(
    state: State,
    among: Collection[str] | None = None,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> tuple[State, AliasGraph, tuple[str, ...]]:
    """The state with tensors that hold the same tied, `among` these names; the graph of what held the same; and notes.

    Reads tensors that have no checksum in a file, and all that look equal.
    """
    rejoined = rejoin(state)
    state, table = rejoined.state, rejoined.state.tensors
    found = ModelRows({"": table}, among=among)
    classes, unread = found.equal_copies(threads, progress)
    graph = found.by_content(classes, unread, tied=False)
    tying = _Tying(table, found)
    for copies in sorted(classes):
        tying.add(found.rows_of(copies))
    return (
        replace_table(state, tying.table()) if classes else state,
        graph,
        (*rejoined.notes, *unread, *tying.notes),
    )


class _Tying:
    """Gives rows that hold the same one storage."""

    def __init__(self, table: Table, found: ModelRows) -> None:
        self._table, self._storage, self._view, self._parts = (
            table,
            found.storage,
            found.view,
            found.shared.member_storages,
        )
        rows, storages = found.shared.storage_rows()
        views = {*zip(storages, map(self._view.__getitem__, rows), strict=True)}
        self._views = Counter([storage for storage, _ in views])
        """How many different views each storage has."""
        self._first: dict[int, int] = {}
        """From a view to the row that takes its place."""
        self._onto: dict[int, int] = {}
        """From a storage to a row of the storage that its views move to."""
        self.notes: list[str] = []

    def add(self, rows: Sequence[int]) -> None:
        # Where one covers its storage, others can bring their views to it.
        first = next((row for row in rows if self._covers(row)), rows[0])
        stays: list[str] = []
        for row in rows:
            own = self._storage[row]
            if own == self._storage[first]:
                continue
            if all(self._views[storage] == 1 for storage in self._parts.get(own, (own,))):
                self._first[self._view[row]] = first
            elif self._covers(row) and self._covers(first):
                if own not in self._onto and self._storage[self._holder(first)] != own:
                    self._onto[own] = first
            else:
                stays.append(repr(self._table.names[row]))
        if stays:
            name = self._table.names[first]
            self.notes.append(
                f"equal to {name!r}, and left where other views of their storages are: {list_names(stays, 3)}"
            )

    def _holder(self, row: int) -> int:
        """A row of the storage that a row ends up in; a storage that others moved to may move itself."""
        while self._storage[row] in self._onto:
            row = self._onto[self._storage[row]]
        return row

    def _covers(self, row: int) -> bool:
        """Whether a row is all of its storage: in C order, from the first byte to the last, as the bytes are."""
        kind = RowKind.from_tensor(self._table.lazy_tensor(row))
        return kind.is_whole and kind.byteorder == "little"

    def table(self) -> Table:
        """The table with rows of other storages. Each row keeps all that is its own: its name, whether it is a parameter."""
        table, moved = self._table, dict[int, LazyTensor]()
        shared_storages: set[int] = set()
        for row, view in self._view.items():
            if view not in self._first and self._storage[row] not in self._onto:
                continue
            first = self._first.get(view, row)
            holder = self._holder(first)
            shared_storages.add(self._storage[holder])
            tensor, traits, target = (
                table.lazy_tensor(first),
                table.lazy_tensor(row).traits,
                table.lazy_tensor(holder),
            )
            if first != row:
                traits = replace(traits, conj=tensor.traits.conj, neg=tensor.traits.neg)
            chunks = tensor.chunks
            if first != holder:
                chunks = tuple(chunk.with_storage(target.storages[0]) for chunk in chunks)
            moved[row] = replace(
                tensor,
                name=table.names[row],
                chunks=chunks,
                source=target.source,
                traits=traits,
            )
        # All tensors of a storage have to be stored in one way, or their storages are not recognized as one.
        for row, storage in self._storage.items():
            if storage in shared_storages:
                moved.setdefault(row, table.lazy_tensor(row))
        return replace_rows(table, moved)
