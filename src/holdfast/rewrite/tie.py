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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Storage, c_strides
from holdfast.core.limits import Limits
from holdfast.core.protocols import Source, State
from holdfast.core.tensor import LazyTensor
from holdfast.engine.write import Progress
from holdfast.formats.safetensors.strict_json import quoted
from holdfast.inspect.open import open as open_checkpoint
from holdfast.rewrite.alias_graph import AliasGraph, AliasGroup, alias_graph
from holdfast.rewrite.models import weights_of
from holdfast.rewrite.places import plan_rewrite
from holdfast.rewrite.planned import PlannedSave, Writing
from holdfast.rewrite.rejoin import rejoin
from holdfast.rewrite.save import Saved
from holdfast.rewrite.state import describe_state, map_tensors
from holdfast.stores.paths import local_path

__all__ = ["Tied", "TiedState", "planned_tie", "tie", "tie_state"]

Place = tuple[int, str, int, int]
"""A storage: source, key, start and length."""


@dataclass(frozen=True, slots=True)
class Tied:
    """What `tie` found, and what it did. Print it."""

    path: str
    groups: tuple[AliasGroup, ...]
    """Tensors that hold the same and are stored more than once."""
    nbytes: int
    """Bytes of all storages, each once."""
    savable_nbytes: int
    """Bytes of storages that nothing would need if equal tensors were tied."""
    notes: tuple[str, ...] = ()
    saved: Saved | None = None
    """The new checkpoint, where one was asked for."""

    def __str__(self) -> str:
        order = sorted(self.groups, key=lambda group: -group.savable_nbytes)
        more = [f"… {len(order) - 20:,} more groups"] if len(order) > 20 else []
        first = f"{self.path}: {self.savable_nbytes:,} of {self.nbytes:,} bytes could be saved"
        return "\n".join([first, *(_listed(group) for group in order[:20]), *more, *self.notes])


def _listed(group: AliasGroup) -> str:
    names = [quoted(member.name) for member in group.members[:20]]
    more = [f"… {len(group.members) - 20:,} more"] if len(group.members) > 20 else []
    first = group.members[0]
    told = f"{first.dtype} {list(first.shape)}, {group.storages:,} copies, {group.savable_nbytes:,} bytes could be saved"
    return f"{' = '.join([*names, *more])}    {told}"


@dataclass(frozen=True, slots=True)
class TiedState:
    """A state whose equal tensors are views of the same bytes."""

    state: State
    graph: AliasGraph
    notes: tuple[str, ...]


def tie(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    format: str | None = None,
    overwrite: bool = False,
    durable: bool = True,
    threads: int | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Tied:
    """Find tensors of a checkpoint that hold the same, byte by byte; with `output`, write one in which they are tied.

    Without `output` nothing is written. `output` may be the path itself, which is then replaced, atomically; its suffix says the
    format, if `format` does not. torch files, packages and native directories hold tied tensors once; safetensors files hold them
    under the first name, and the others in their metadata, where Holdfast finds them.
    """
    writing = Writing(overwrite, durable, threads)
    with planned_tie(path, output=output, format=format, writing=writing, limits=limits, progress=progress) as (found, planned):
        return found if planned is None else replace(found, saved=planned.run(progress))


@contextmanager
def planned_tie(
    path: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    format: str | None = None,
    writing: Writing,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[Tied, PlannedSave | None]]:
    """What holds the same, which is compared here; with `output`, the checkpoint in which it is tied, laid out."""
    source = local_path(path)
    with open_checkpoint(source, threads=writing.threads, limits=limits) as opened:
        described = _weights(opened, describe_state(opened, limits=limits))
        if output is None:
            graph = alias_graph({"": described}, by="content", progress=progress)
            yield _report(source, graph, graph.notes), None
            return
        tied = tie_state(described, progress=progress)
        planned = plan_rewrite(opened, tied.state, local_path(output), read=described, format=format, writing=writing)
        yield _report(source, tied.graph, tied.notes), planned


def _weights(opened: Checkpoint, state: State) -> State:
    """What is compared: all tensors, or in a package the weights. Its constants and sample inputs are copied as they are."""
    if opened.format != "pt2":
        return state
    models = weights_of(opened, state.tree)
    several = isinstance(state.tree, dict) and len(models) > 1
    names = {f"{model}.{name}" if several else name for model, weights in models.items() for name in weights}
    return replace(state, tensors={name: tensor for name, tensor in state.tensors.items() if name in names})


def _report(path: str, graph: AliasGraph, notes: tuple[str, ...]) -> Tied:
    groups = tuple(group for group in graph.groups if group.storages > 1)
    return Tied(path, groups, graph.nbytes, graph.savable_nbytes, notes)


def tie_state(state: State, *, progress: Progress | None = None) -> TiedState:
    """Tie what holds the same. Reads what has no checksum in a file, and everything that looks equal."""
    rejoined = rejoin(state)
    graph = alias_graph({"": rejoined.state}, by="content", progress=progress)
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
        self._views: dict[Place, set[object]] = {}
        """The different views of each storage."""
        for tensor in state.tensors.values():
            for place in _places(tensor):
                self._views.setdefault(place, set()).add(_view(tensor))
        self._tensors: dict[object, LazyTensor] = {}
        """A view, and what takes its place."""
        self._storages: dict[Place, tuple[Storage, Source]] = {}
        self.notes: list[str] = []

    def add(self, members: list[LazyTensor]) -> None:
        """Tie tensors that hold the same."""
        # Where one covers its storage, others can bring their views to it.
        first = next((tensor for tensor in members if _covers(tensor)), members[0])
        stays: list[str] = []
        for tensor in members:
            if _view(tensor) == _view(first) or _places(tensor) == _places(first):
                continue
            if all(len(self._views[place]) == 1 for place in _places(tensor)):
                self._tensors[_view(tensor)] = first
            elif _covers(tensor) and _covers(first):
                (place,), (onto,) = _places(tensor), _places(first)
                if place not in self._storages and self._root(onto) != place:
                    self._storages[place] = (first.chunks[0].storage, first.source)
            else:
                stays.append(tensor.name)
        if stays:
            shown = ", ".join(map(repr, stays[:3])) + (f" and {len(stays) - 3:,} more" if len(stays) > 3 else "")
            self.notes.append(f"equal to {first.name!r}, and left where other views of their storages are: {shown}")

    def change(self, tensor: LazyTensor) -> LazyTensor:
        """A tensor at its new place, with all that is its own: its name, whether it is a parameter."""
        first = self._tensors.get(_view(tensor))
        if first is not None:
            # What was made equal to a view may have moved with that view's storage.
            moved = self._moved(first)
            traits = replace(tensor.traits, conj=first.traits.conj, neg=first.traits.neg, alias=None)
            return replace(tensor, chunks=moved.chunks, source=moved.source, traits=traits)
        return self._moved(tensor)

    def _root(self, place: Place) -> Place:
        """Where the views of a storage end up; a storage that others moved to may move itself."""
        while place in self._storages:
            storage, source = self._storages[place]
            place = (id(source), storage.key, storage.start, storage.nbytes)
        return place

    def _moved(self, tensor: LazyTensor) -> LazyTensor:
        places = _places(tensor)
        if len(places) != 1 or places[0] not in self._storages:
            return tensor
        place = places[0]
        while place in self._storages:
            storage, source = self._storages[place]
            place = (id(source), storage.key, storage.start, storage.nbytes)
        chunks = tuple(replace(chunk, storage=storage) for chunk in tensor.chunks)
        return replace(tensor, chunks=chunks, source=source, traits=replace(tensor.traits, alias=None))


def _places(tensor: LazyTensor) -> tuple[Place, ...]:
    return tuple((id(tensor.source), s.key, s.start, s.nbytes) for s in tensor.storages)


def _view(tensor: LazyTensor) -> object:
    """What tells a view from all others."""
    return (id(tensor.source), tensor.dtype, tensor.shape, tensor.chunks, tensor.traits.conj, tensor.traits.neg)


def _covers(tensor: LazyTensor) -> bool:
    """Whether it is its storage: in C order, from the first byte to the last, as the bytes are."""
    if len(tensor.chunks) != 1 or tensor.dtype.packed or tensor.traits.conj or tensor.traits.neg:
        return False
    (chunk,) = tensor.chunks
    dense = not chunk.offset and chunk.strides == c_strides(tensor.shape, tensor.dtype.bits)
    return dense and chunk.storage.nbytes == tensor.nbytes and chunk.storage.byteorder == "little"
