"""`tie`: tensors that hold the same become one again, where a conversion or a tool stored each of them by itself.

1. `alias_graph(by="content")` finds them; it compares bytes, not only checksums.
2. A tensor that is alone in its storage becomes the first one of its group, under its own name.
3. One that shares its storage with other views takes them along: where both tensors cover their storages, all views of the one
   become views of the other. Where they do not, it stays, and a note says so: no view is ever torn from its storage.

    before   base.emb [A]      tuned.emb [A']     tuned.rows ⊂ A'          A = A', byte by byte
    after    base.emb [A]      tuned.emb [A]      tuned.rows ⊂ A
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast.core.arguments import understood
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Storage, in_c_order
from holdfast.core.limits import Limits
from holdfast.core.protocols import Source, State
from holdfast.core.quantities import Size
from holdfast.core.sharing import View, identity
from holdfast.core.table import ODD, Table
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
from holdfast.rewrite.formats import Options, format_for, plan_save
from holdfast.rewrite.models import programs_of, weights_of
from holdfast.rewrite.planned import MAX_MEMORY, Destination, Planned, Saved, planned_fields, rewritten
from holdfast.rewrite.rejoin import rejoin
from holdfast.rewrite.rows import lazy_tree, with_odd, with_table
from holdfast.rewrite.share import AliasGraph, AliasGroup, placed
from holdfast.rewrite.state import tabulate_state
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
        described = tabulate_state(source, limits=limits)
        tied = tie_state(described, _weights(source, described), threads=writing.reading_threads, progress=progress)
        plan = plan_rewrite(source, tied.state, where)
        plan = replace(plan, notes=(*tied.notes, *plan.notes))
        groups = tuple(group for group in tied.graph.groups if group.storages > 1)
        report = Tied(
            **planned_fields(plan, where.path), source=source.path, groups=groups, storage_nbytes=tied.graph.nbytes,
            savable_nbytes=tied.graph.savable_nbytes,
        )  # fmt: skip
        return Planned(plan, report, where.writing, reads=described.tensors.stores)

    return rewritten(src, dst, lay_out, in_place=in_place, format=format, writable=("pt2",), writing=writing, limits=limits)


def _weights(opened: Checkpoint, state: State) -> Collection[str] | None:
    """What is compared of a package: its weights. Its constants and sample inputs are copied as they are. None for all tensors."""
    if opened.format != "pt2":
        return None
    models = weights_of(opened, state.tree)
    several = isinstance(state.tree, dict) and len(models) > 1
    return {f"{model}.{name}" if several else name for model, weights in models.items() for name in weights}


def tie_state(
    state: State, among: Collection[str] | None = None, *, threads: int | None = None, progress: Progress | None = None
) -> TiedState:
    """Tie what holds the same, of tensors `among` these names. Reads what has no checksum in a file, and all that looks equal."""
    rejoined = rejoin(state)
    table = rejoined.state.tensors
    compared = table if among is None else table.select([row for row, name in enumerate(table.names) if name in among])
    graph = placed({"": compared}, noted=False).by_content(threads, progress, tied=False)
    tying = _Tying(table, [[table.rows[member.name] for member in group.members] for group in graph.groups])
    made = with_table(rejoined.state, with_odd(table, tying.changed())) if graph.groups else rejoined.state
    return TiedState(made, graph, (*rejoined.notes, *graph.notes, *tying.notes))


class _Tying:
    """Which place each tensor gets; `groups` are rows that hold the same."""

    def __init__(self, table: Table, groups: Sequence[Sequence[int]]) -> None:
        storage = table.storage
        touched = {storage[row] for rows in groups for row in rows} | {ODD} if groups else set()
        self._own = {row: table.view(row) for row, number in enumerate(storage) if number in touched}
        """Every row over the storages of these groups."""
        self._views: dict[Storage, set[View]] = {}
        """The different views of each storage."""
        for tensor in self._own.values():
            for one in tensor.storages:
                self._views.setdefault(one, set()).add(identity(tensor))
        self._tensors: dict[View, LazyTensor] = {}
        """A view, and what takes its place."""
        self._storages: dict[Storage, tuple[Storage, Source]] = {}
        """A storage, and the one that its views move to."""
        self.notes: list[str] = []
        for rows in groups:
            self.add([self._own[row] for row in rows])

    def changed(self) -> dict[int, LazyTensor]:
        """Every row over a storage that has other views now, as it is then."""
        return {row: self.change(tensor) for row, tensor in self._own.items()}

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
        return _plan_pt2(source, lazy_tree(state), where.path)
    options = where.options(Options(keep_tree=True))
    plan = plan_save(where.path, state, format_for(where.path, where.format, options), options=options)
    left = (f"left out of model {model!r}: the program" for model in programs_of(source))
    return replace(plan, notes=(*left, *plan.notes))


def _plan_pt2(source: Checkpoint, tree: object, target: str) -> SavePlan:
    name = archive_name(target)
    if source.format != "pt2":
        return lay_out_pt2(models_of({"model": tree}), name=name)
    models = weights_of(source, tree)
    if not any(models.values()):
        raise Unsupported("this package has no weights", file=source.path)
    plain = {model: weights for model, weights in models.items() if all(t.traits.subclass is None for t in weights.values())}
    kept = [f"model {model!r} has weights that are pickled objects, and keeps them all" for model in models if model not in plain]
    plan = lay_out_replaced(source.source, plain, name=name)
    return replace(plan, notes=(*kept, *plan.notes))
