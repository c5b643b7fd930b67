"""Checkpoints written again with other places for their tensors: `tie` finds sharing again, `compact` drops bytes.

`tie`: tensors that hold the same become one again, where a conversion or a tool stored each of them by itself.

1. `alias_graph(by="content")` finds them; it compares bytes, not only checksums.
2. A tensor that is alone in its storage becomes the first one of its group, under its own name.
3. One that shares its storage with other views takes them along: where both tensors cover their storages, all views of the one
   become views of the other. Where they do not, it stays, and a note says so: no view is ever torn from its storage.

    before   base.emb [A]      tuned.emb [A']     tuned.rows ⊂ A'          A = A', byte by byte
    after    base.emb [A]      tuned.emb [A]      tuned.rows ⊂ A

`compact`: a checkpoint without the bytes that no tensor reaches, such as the 2.4 GB parent of a view of ten rows.

    storage   │ · · · · a a a a · · · · · · · · b b · · │       a and b were views of it, and have no byte in common
    compact   │ a a a a │ b b │

1. Tensors of one storage that overlap, or touch, belong together; each such island is a storage of its own.
2. The checkpoint is written again in its format, each island once. What is tied stays tied, and views of each other stay views.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.core.arguments import understood
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Chunk, Storage, in_c_order
from holdfast.core.limits import Limits
from holdfast.core.protocols import Source, State
from holdfast.core.quantities import Size
from holdfast.core.sharing import Island, Span, View, identity, islands
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.write import Progress
from holdfast.errors import Unsupported
from holdfast.formats.pt2.replace import lay_out_replaced
from holdfast.formats.pt2.write import lay_out_pt2, models_of
from holdfast.formats.strict_json import quoted
from holdfast.formats.torch.write import archive_name
from holdfast.inspect.open import Openable
from holdfast.plan.saves import SavePlan
from holdfast.rewrite.alias_graph import AliasGraph, AliasGroup, find_aliases
from holdfast.rewrite.formats import Options, format_for, plan_save
from holdfast.rewrite.models import programs_of, state_of, weights_of
from holdfast.rewrite.planned import MAX_MEMORY, Destination, Planned, Saved, planned_fields, rewritten, stores_of
from holdfast.rewrite.rejoin import rejoin
from holdfast.rewrite.state import describe_state, map_tensors
from holdfast.rewrite.writing import Writing


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


WIDEST_NBYTES = 16
"""Bytes of the widest element: islands begin at multiples of it, so that every view begins with a whole element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted(Saved):
    """What `compact` did, or would do."""

    source: str
    before_nbytes: int
    """Bytes of the files that were read."""

    @property
    def dropped_nbytes(self) -> int:
        """How much smaller it became."""
        return max(self.before_nbytes - self.nbytes, 0)

    def _told(self) -> list[str]:
        would = "went" if self.done else "would go"
        return [f"{self.source}: {self.dropped_nbytes:,} of {self.before_nbytes:,} bytes {would}", *Saved._told(self)]


@understood
def compact(
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
) -> Compacted:
    """Write a checkpoint again without what no tensor reaches: at `dst`, or in its place, atomically (`in_place=True`).

    Raises `Unsupported` for a format that can be read and not written, where no other path is given.
    """
    writing = Writing(
        overwrite=overwrite, durable=durable, threads=threads, read_back=read_back, max_memory=max_memory, dry_run=dry_run
    )
    return plan_compact(src, dst, in_place=in_place, format=format, writing=writing, limits=limits).carry_out(progress)


def plan_compact(
    src: Openable | Checkpoint,
    dst: str | os.PathLike[str] | None,
    *,
    in_place: bool,
    format: str | None = None,
    writing: Writing,
    limits: Limits | None = None,
) -> Planned[Compacted]:
    """Lay out a checkpoint without what no tensor reaches."""

    def lay_out(source: Checkpoint, where: Destination) -> Planned[Compacted]:
        described = describe_state(source, limits=limits)
        plan = plan_rewrite(source, _islands(described), where)
        report = Compacted(**planned_fields(plan, where.path), source=source.path, before_nbytes=source.stored_nbytes)
        return Planned(plan, report, where.writing, reads=stores_of(described))

    return rewritten(src, dst, lay_out, in_place=in_place, format=format, writable=("pt2",), writing=writing, limits=limits)


def _islands(state: State) -> State:
    """A state in which no storage holds more than its tensors reach without a gap."""
    reached: dict[Storage, list[Span[None]]] = {}
    for tensor in state.tensors.values():
        for chunk in tensor.chunks:
            start, stop = chunk.extent(tensor.dtype)
            if start < stop:
                reached.setdefault(chunk.storage, []).append((start - start % WIDEST_NBYTES, stop, None))
    found = {storage: islands(spans, touching=True) for storage, spans in reached.items()}

    def change(tensor: LazyTensor) -> LazyTensor:
        chunks = tuple(_on_island(chunk, tensor, found.get(chunk.storage, [])) for chunk in tensor.chunks)
        return tensor if chunks == tensor.chunks else replace(tensor, chunks=chunks)

    return changed(state, change)


def _on_island(chunk: Chunk, tensor: LazyTensor, found: Sequence[Island[None]]) -> Chunk:
    start, stop = chunk.extent(tensor.dtype)
    # A packed storage is kept whole: torch pads its rows. One island is what every writer makes of it by itself.
    if len(found) < 2 or start == stop or tensor.dtype.packed:
        return chunk
    low, high = next((island.start, island.stop) for island in found if island.start <= start and stop <= island.stop)
    storage = replace(chunk.storage, start=chunk.storage.start + low, nbytes=high - low, crc32=None)
    return replace(chunk, storage=storage, offset=chunk.offset - low * 8)


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
