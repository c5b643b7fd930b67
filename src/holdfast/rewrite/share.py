"""Which tensors are the same bytes (`alias_graph`), and checkpoints in which they are one again (`tie`). Torch-free.

By storage, nothing is read. Tensors belong together when they are views of one storage: the same record of one file, however often
and under whatever name it was opened; the same memory of this process; or, in a format that stores copies, the storage that their
file says they shared before.

By content, tensors that hold the same are found wherever they lie, so that a tie which a conversion lost is found again:

1. Views that are one and the same place are one *copy*, and are not compared with each other.
2. Copies are sorted into buckets by digest: dtype, shape, CRC-32. Where a file records the checksum, it is not read for that.
3. A CRC is no proof, and a file can be made to lie about it: within a bucket every copy is compared with the first, byte by byte.
4. Those that differ, which takes bad luck or bad intent, are sorted again by a cryptographic hash and compared once more. So the
   cost is at most four times the bytes, however many collide.

Bytes are compared in blocks, and memory is a few blocks a thread.

    3 models, 7 tensors, 412 bytes in 4 storages
    base:emb.weight = base:head.weight = tuned:emb.weight    float32 [5, 4], 2 copies, 80 bytes could be saved

`tie`: tensors that hold the same become one again, where a conversion or a tool stored each of them by itself.

1. `alias_graph(by="content")` finds them; it compares bytes, not only checksums.
2. A tensor that is alone in its storage becomes the first one of its group, under its own name.
3. One that shares its storage with other views takes them along: where both tensors cover their storages, all views of the one
   become views of the other. Where they do not, it stays, and a note says so: no view is ever torn from its storage.

    before   base.emb [A]      tuned.emb [A']     tuned.rows ⊂ A'          A = A', byte by byte
    after    base.emb [A]      tuned.emb [A]      tuned.rows ⊂ A
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from holdfast.core.arguments import understood
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Chunk, Storage, in_c_order
from holdfast.core.digest import Digest
from holdfast.core.limits import Limits
from holdfast.core.notebook import Shown
from holdfast.core.protocols import Source, State
from holdfast.core.quantities import Size
from holdfast.core.sharing import View, identity
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.blocks import contiguous_bytes, read_slab, slabs
from holdfast.engine.budget import reading_threads
from holdfast.engine.digest import tensor_crcs
from holdfast.engine.equal import same_bytes
from holdfast.engine.write import Progress
from holdfast.errors import LimitExceeded, Unsupported
from holdfast.formats.pt2.replace import lay_out_replaced
from holdfast.formats.pt2.write import lay_out_pt2, models_of
from holdfast.formats.strict_json import quoted
from holdfast.formats.torch.write import archive_name
from holdfast.inspect.open import Openable
from holdfast.inspect.open import open as open_checkpoint
from holdfast.plan.saves import SavePlan
from holdfast.rewrite.formats import Options, format_for, plan_save
from holdfast.rewrite.models import programs_of, state_of, weights_of
from holdfast.rewrite.planned import MAX_MEMORY, Destination, Planned, Saved, planned_fields, rewritten, stores_of
from holdfast.rewrite.rejoin import rejoin
from holdfast.rewrite.state import describe_state, map_tensors
from holdfast.rewrite.writing import Writing

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
        models: dict[str, object] = {}
        for model, state in several.items():
            if isinstance(state, str | os.PathLike | bytes | bytearray | memoryview):
                state = stack.enter_context(open_checkpoint(state, limits=limits, threads=threads))
            models[model] = state
        return find_aliases(models, by=by, threads=reading_threads(max_memory, threads), progress=progress)


def find_aliases(
    models: Mapping[str, object], *, by: By, threads: int | None = None, progress: Progress | None = None
) -> AliasGraph:
    """What models share that are open, or in memory."""
    if by not in ("storage", "content"):
        raise Unsupported(f"aliases are found by 'storage' or by 'content', not by {by!r}", found=by)
    search = _Search(noted=by == "storage")
    for model, state in models.items():
        search.add(model, _tensors(state))
    return search.by_storage() if by == "storage" else search.by_content(threads, progress)


def _tensors(state: object) -> Mapping[str, LazyTensor]:
    match state:
        case Checkpoint():
            return dict(state)
        case State():
            return state.tensors
    return describe_state(state).tensors


Place = tuple[object, ...]
"""What tells a storage from all others."""


class _Copy(msgspec.Struct):
    """One place that one or several names have: what is compared."""

    tensor: LazyTensor
    storage: int
    members: list[AliasMember] = msgspec.field(default_factory=list)


class _Search:
    """The tensors of all models, each at its place."""

    def __init__(self, *, noted: bool) -> None:
        self._noted = noted
        """Whether copies that shared a storage before they were saved count as sharing it."""
        self._models: list[str] = []
        self._position: dict[tuple[str, str], int] = {}
        self._storages: dict[Place, int] = {}
        self._nbytes: list[int] = []
        self._copies: dict[object, _Copy] = {}
        self._owners: dict[tuple[Source, str], object] = {}
        self._alive: list[Mapping[str, LazyTensor]] = []
        """While states are looked at, no other array may take the address of one of theirs."""

    def add(self, model: str, tensors: Mapping[str, LazyTensor]) -> None:
        self._alive.append(tensors)
        self._models.append(model)
        for name, tensor in tensors.items():
            self._position[model, name] = len(self._position)
            if tensor.traits.meta or not tensor.size or not tensor.chunks:
                continue
            chunks = tensor.shared_chunks if self._noted else tensor.chunks
            storage = self._storage(tensor.source, chunks)
            offset, strides = chunks[0].offset, chunks[0].strides
            bits = tensor.dtype.bits
            single = len(tensor.chunks) == 1 and not any(step % bits for step in (offset, *strides))
            member = AliasMember(
                model, name, tensor.dtype.name, tensor.shape, tensor.nbytes, storage,
                offset // bits if single else None, tuple(step // bits for step in strides) if single else None,
            )  # fmt: skip
            # The identity of a view, with the storage that is the same in files that were opened twice.
            boxes = tuple((chunk.box, chunk.offset, chunk.strides) for chunk in chunks)
            place = (storage, tensor.dtype, tensor.shape, boxes, tensor.traits.conj, tensor.traits.neg)
            self._copies.setdefault(place, _Copy(tensor, storage)).members.append(member)

    def _storage(self, source: Source, chunks: Sequence[Chunk]) -> int:
        storages = dict.fromkeys(chunk.storage for chunk in chunks)
        place = tuple((self._owner(source, s.key), s.start, s.nbytes) for s in storages)
        number = self._storages.setdefault(place, len(self._storages))
        if number == len(self._nbytes):
            self._nbytes.append(sum(s.nbytes for s in storages))
        return number

    def _owner(self, source: Source, key: str) -> object:
        """What a key belongs to: this process's memory, a file by its real path, or a source that is like no other."""
        known = (source, key)
        if known not in self._owners:
            self._owners[known] = source.store.place(key)
        return self._owners[known]

    def by_storage(self) -> AliasGraph:
        groups: dict[int, list[_Copy]] = {}
        for copy in self._copies.values():
            groups.setdefault(copy.storage, []).append(copy)
        made = []
        for number, copies in groups.items():
            members = sorted((m for copy in copies for m in copy.members), key=self._order)
            saved = max(sum(m.nbytes for m in members) - self._nbytes[number], 0)
            if len(members) > 1:
                made.append(AliasGroup(tuple(members), self._nbytes[number], saved, same=len(copies) == 1))
        return self._graph("storage", made, [])

    def by_content(self, threads: int | None, progress: Progress | None) -> AliasGraph:
        readable, notes = [], []
        for copy in self._copies.values():
            try:
                copy.tensor.check_expansion()
                readable.append(copy)
            except LimitExceeded as error:
                notes.append(f"{copy.members[0]}: not compared: {error.message}")
        classes = _classes(readable, threads, progress)
        freed = self._freed(classes)
        made = []
        for copies in classes:
            members = sorted((m for copy in copies for m in copy.members), key=self._order)
            if len(members) < 2:
                continue
            storages = {copy.storage for copy in copies}
            savable = sum(self._nbytes[number] for number in storages if freed.get(number) is copies)
            counts = [sum(m.nbytes for m in copy.members[1:]) for copy in copies]
            made.append(AliasGroup(tuple(members), sum(self._nbytes[n] for n in storages), sum(counts), savable))
        return self._graph("content", sorted(made, key=lambda group: self._order(group.members[0])), notes)

    def _freed(self, classes: list[list[_Copy]]) -> dict[int, list[_Copy]]:
        """The storages of which no copy is the first of its class, each with the class of its first copy."""
        first: dict[int, list[_Copy]] = {}
        # What could not be compared keeps its storage.
        compared = {id(copy) for copies in classes for copy in copies}
        needed = {copy.storage for copy in self._copies.values() if id(copy) not in compared}
        for copies in classes:
            needed.add(copies[0].storage)
            for copy in copies:
                first.setdefault(copy.storage, copies)
        return {number: copies for number, copies in first.items() if number not in needed}

    def _order(self, member: AliasMember) -> int:
        return self._position[member.model, member.name]

    def _graph(self, by: By, groups: list[AliasGroup], notes: list[str]) -> AliasGraph:
        index = {(member.model, member.name): group for group in groups for member in group.members}
        return AliasGraph(
            by, tuple(self._models), len(self._position), len(self._storages), sum(self._nbytes), tuple(groups), tuple(notes), index
        )


def _classes(copies: Sequence[_Copy], threads: int | None, progress: Progress | None) -> list[list[_Copy]]:
    """Copies that hold the same, byte for byte; each class in the order of the models."""
    crcs = tensor_crcs([copy.tensor for copy in copies], threads=threads, progress=progress)
    buckets: dict[object, list[_Copy]] = {}
    for copy, crc in zip(copies, crcs, strict=True):
        buckets.setdefault(Digest.of(copy.tensor.dtype, copy.tensor.shape, crc), []).append(copy)
    classes, others = _compare(buckets.values(), threads, progress)
    again: dict[object, list[_Copy]] = {}
    for copy in others:
        again.setdefault((Digest.of(copy.tensor.dtype, copy.tensor.shape, None), _hash(copy.tensor)), []).append(copy)
    more, left = _compare(again.values(), threads, progress)
    return [*classes, *more, *([copy] for copy in left)]


def _compare(
    buckets: Iterable[list[_Copy]], threads: int | None, progress: Progress | None
) -> tuple[list[list[_Copy]], list[_Copy]]:
    """The first of each bucket with all that are equal to it, and those that are not."""
    classes = [[copies[0]] for copies in buckets if copies]
    rivals = [(number, copy) for number, copies in enumerate(b for b in buckets if b) for copy in copies[1:]]
    pairs = [(classes[number][0].tensor, copy.tensor) for number, copy in rivals]
    others = []
    for (number, copy), pair, quick in zip(rivals, pairs, same_bytes(pairs, progress, threads=threads), strict=True):
        if quick or (None in map(contiguous_bytes, pair) and _same_stream(*pair)):
            classes[number].append(copy)
        else:
            others.append(copy)
    return classes, others


def _same_stream(a: LazyTensor, b: LazyTensor) -> bool:
    """Whether two tensors have the same bytes in C order, however they are stored."""
    left, right = _Stream(a), _Stream(b)
    for start in range(0, a.nbytes, BLOCK_NBYTES):
        count = min(BLOCK_NBYTES, a.nbytes - start)
        if left.take(count) != right.take(count):
            return False
    return a.nbytes == b.nbytes


class _Stream:
    """The bytes of a tensor in C order, so many at a time as are asked for."""

    def __init__(self, tensor: LazyTensor) -> None:
        self._blocks: Iterator[memoryview] = (read_slab(slab).cast("B") for slab in slabs(tensor, BLOCK_NBYTES))
        self._rest = memoryview(b"")

    def take(self, count: int) -> bytes:
        taken = []
        while count:
            if not self._rest.nbytes:
                self._rest = next(self._blocks, memoryview(b""))
                if not self._rest.nbytes:
                    break
            taken.append(self._rest[:count])
            count -= taken[-1].nbytes
            self._rest = self._rest[taken[-1].nbytes :]
        return b"".join(taken)


def _hash(tensor: LazyTensor) -> bytes:
    """A cryptographic hash of the bytes in C order."""
    digest = hashlib.blake2b(digest_size=32)
    for slab in slabs(tensor, BLOCK_NBYTES):
        digest.update(read_slab(slab))
    return digest.digest()


def _shown(text: str) -> str:
    """A name out of a file, for people: as it is, or in quotes with everything odd written out."""
    return text if text.isascii() and text.isprintable() and len(text) <= 80 else quoted(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied(Saved):
    """What `tie` found, and what it wrote or would write. Print it."""

    source: str
    groups: tuple[AliasGroup, ...]
    """Tensors that hold the same and are stored more than once."""
    storage_nbytes: int
    """Bytes of all storages that were read, each once."""
    savable_nbytes: int
    """Bytes of storages that nothing needs once equal tensors are tied."""

    def listing(self) -> list[str]:
        """What holds the same, a line a group, the largest first."""
        order = sorted(self.groups, key=lambda group: -group.savable_nbytes)
        more = [f"… {len(order) - 20:,} more groups"] if len(order) > 20 else []
        first = f"{self.source}: {self.savable_nbytes:,} of {self.storage_nbytes:,} bytes could be saved"
        return [first, *(_listed(group) for group in order[:20]), *more]

    def _told(self) -> list[str]:
        return [*self.listing(), *Saved._told(self)]

    def __str__(self) -> str:
        return "\n".join([*self.listing(), *self.notes])


def _listed(group: AliasGroup) -> str:
    names = [quoted(member.name) for member in group.members[:20]]
    more = [f"… {len(group.members) - 20:,} more"] if len(group.members) > 20 else []
    first = group.members[0]
    told = f"{first.dtype} {list(first.shape)}, {group.storages:,} copies, {group.savable_nbytes:,} bytes could be saved"
    return f"{' = '.join([*names, *more])}    {told}"


class TiedState(Value, frozen=True):
    """A state whose equal tensors are views of the same bytes."""

    state: State
    graph: AliasGraph
    notes: tuple[str, ...]


@understood
def tie(
    src: Openable | Checkpoint,
    dst: str | os.PathLike[str] | None = None,
    *,
    in_place: bool = False,
    format: str | None = None,
    overwrite: bool = False,
    durable: bool = True,
    read_back: bool = True,
    max_memory: Size | None = MAX_MEMORY,
    dry_run: bool = False,
    limits: Limits | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Tied:
    """Write a checkpoint in which tensors that hold the same, byte by byte, are stored once: at `dst`, or `in_place=True`.

    With `dry_run=True` they are only found, and the result says what could be saved. The suffix of `dst` says the format, if
    `format` does not. torch files, packages and native directories hold tied tensors once; safetensors files hold them under the
    first name, and the others in their metadata, where Holdfast finds them.
    """
    planned = plan_tie(
        src, dst, in_place=in_place, format=format, limits=limits, progress=progress,
        writing=Writing(
            overwrite=overwrite, durable=durable, threads=threads, read_back=read_back, max_memory=max_memory, dry_run=dry_run
        ),
    )  # fmt: skip
    return planned.carry_out(progress)


def plan_tie(
    src: Openable | Checkpoint,
    dst: str | os.PathLike[str] | None,
    *,
    in_place: bool,
    format: str | None = None,
    writing: Writing,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Planned[Tied]:
    """Find what holds the same, which is read and compared here, and lay out the checkpoint in which it is tied."""

    def lay_out(source: Checkpoint, where: Destination) -> Planned[Tied]:
        described = _weights(source, describe_state(source, limits=limits))
        tied = tie_state(described, threads=writing.reading_threads, progress=progress)
        plan = plan_rewrite(source, tied.state, where)
        plan = replace(plan, notes=(*tied.notes, *plan.notes))
        groups = tuple(group for group in tied.graph.groups if group.storages > 1)
        report = Tied(
            **planned_fields(plan, where.path), source=source.path, groups=groups, storage_nbytes=tied.graph.nbytes,
            savable_nbytes=tied.graph.savable_nbytes,
        )  # fmt: skip
        return Planned(plan, report, where.writing, reads=stores_of(described))

    return rewritten(src, dst, lay_out, in_place=in_place, format=format, writable=("pt2",), writing=writing, limits=limits)


def _weights(opened: Checkpoint, state: State) -> State:
    """What is compared: all tensors, or in a package the weights. Its constants and sample inputs are copied as they are."""
    if opened.format != "pt2":
        return state
    models = weights_of(opened, state.tree)
    several = isinstance(state.tree, dict) and len(models) > 1
    names = {f"{model}.{name}" if several else name for model, weights in models.items() for name in weights}
    return replace(state, tensors={name: tensor for name, tensor in state.tensors.items() if name in names})


def tie_state(state: State, *, threads: int | None = None, progress: Progress | None = None) -> TiedState:
    """Tie what holds the same. Reads what has no checksum in a file, and everything that looks equal."""
    rejoined = rejoin(state)
    graph = find_aliases({"": rejoined.state}, by="content", threads=threads, progress=progress)
    tying = _Tying(rejoined.state)
    for group in graph.groups:
        tying.add([rejoined.state.tensors[member.name] for member in group.members])
    return TiedState(changed(rejoined.state, tying.change), graph, (*rejoined.notes, *graph.notes, *tying.notes))


def changed(state: State, change: Callable[[LazyTensor], LazyTensor]) -> State:
    """A state with every tensor changed. What was one object stays one object: torch gives it one identity."""
    made: dict[int, tuple[LazyTensor, LazyTensor]] = {}

    def once(tensor: LazyTensor) -> LazyTensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor, change(tensor)
        return made[id(tensor)][1]

    tensors = {name: once(tensor) for name, tensor in state.tensors.items()}
    return replace(state, tree=map_tensors(state.tree, once), tensors=tensors)


class _Tying:
    """Which place each tensor gets."""

    def __init__(self, state: State) -> None:
        self._views: dict[Storage, set[View]] = {}
        """The different views of each storage."""
        for tensor in state.tensors.values():
            for storage in tensor.storages:
                self._views.setdefault(storage, set()).add(identity(tensor))
        self._tensors: dict[View, LazyTensor] = {}
        """A view, and what takes its place."""
        self._storages: dict[Storage, tuple[Storage, Source]] = {}
        """A storage, and the one that its views move to."""
        self.notes: list[str] = []

    def add(self, members: list[LazyTensor]) -> None:
        """Tie tensors that hold the same."""
        # Where one covers its storage, others can bring their views to it.
        first = next((tensor for tensor in members if _covers(tensor)), members[0])
        stays: list[str] = []
        for tensor in members:
            if tensor.storages == first.storages:
                continue
            if all(len(self._views[storage]) == 1 for storage in tensor.storages):
                self._tensors[identity(tensor)] = first
            elif _covers(tensor) and _covers(first):
                (own,), (onto,) = tensor.storages, first.storages
                if own not in self._storages and self._root(onto) != own:
                    self._storages[own] = (onto, first.source)
            else:
                stays.append(tensor.name)
        if stays:
            shown = ", ".join(map(repr, stays[:3])) + (f" and {len(stays) - 3:,} more" if len(stays) > 3 else "")
            self.notes.append(f"equal to {first.name!r}, and left where other views of their storages are: {shown}")

    def change(self, tensor: LazyTensor) -> LazyTensor:
        """A tensor at its new place, with all that is its own: its name, whether it is a parameter."""
        first = self._tensors.get(identity(tensor))
        if first is not None:
            # What was made equal to a view may have moved with that view's storage.
            moved = self._moved(first)
            traits = replace(tensor.traits, conj=first.traits.conj, neg=first.traits.neg, alias=None)
            return replace(tensor, chunks=moved.chunks, source=moved.source, traits=traits)
        return self._moved(tensor)

    def _root(self, storage: Storage) -> Storage:
        """Where the views of a storage end up; a storage that others moved to may move itself."""
        while storage in self._storages:
            storage, _ = self._storages[storage]
        return storage

    def _moved(self, tensor: LazyTensor) -> LazyTensor:
        storages, source = tensor.storages, tensor.source
        if len(storages) != 1 or storages[0] not in self._storages:
            return tensor
        storage = storages[0]
        while storage in self._storages:
            storage, source = self._storages[storage]
        chunks = tuple(chunk.over(storage) for chunk in tensor.chunks)
        return replace(tensor, chunks=chunks, source=source, traits=replace(tensor.traits, alias=None))


def _covers(tensor: LazyTensor) -> bool:
    """Whether it is its storage: in C order, from the first byte to the last, as the bytes are."""
    if len(tensor.chunks) != 1 or tensor.dtype.packed or tensor.traits.conj or tensor.traits.neg:
        return False
    (chunk,) = tensor.chunks
    dense = not chunk.offset and in_c_order(tensor.shape, chunk.strides, tensor.dtype.bits)
    return dense and chunk.storage.nbytes == tensor.nbytes and chunk.storage.byteorder == "little"


def plan_rewrite(source: Checkpoint, state: State, where: Destination) -> SavePlan:
    """Lay out a state that came from an open checkpoint. A package stays one, with its programs, where a `.pt2` is asked for."""
    if where.format == "pt2" or (where.format is None and where.path.lower().endswith(".pt2")):
        return _plan_pt2(source, state, where.path)
    options = where.options(Options(keep_tree=True))
    if source.format == "pt2":
        # Only its weights were looked at; what stands beside them in the tree is written as well.
        state = state_of(state.tree, dict(state.metadata))
    plan = plan_save(where.path, state, format_for(where.path, where.format, options), options=options)
    left = (f"left out of model {model!r}: the program" for model in programs_of(source))
    return replace(plan, notes=(*left, *plan.notes))


def _plan_pt2(source: Checkpoint, state: State, target: str) -> SavePlan:
    name = archive_name(target)
    if source.format != "pt2":
        return lay_out_pt2(models_of(replace(state, tree={"model": state.tree})), name=name)
    models = weights_of(source, state.tree)
    if not any(models.values()):
        raise Unsupported("this package has no weights", file=source.path)
    plain = {model: weights for model, weights in models.items() if all(t.traits.subclass is None for t in weights.values())}
    kept = [f"model {model!r} has weights that are pickled objects, and keeps them all" for model in models if model not in plain]
    plan = lay_out_replaced(source.source, plain, name=name)
    return replace(plan, notes=(*kept, *plan.notes))
