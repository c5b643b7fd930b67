"""`metadata_of`: an open checkpoint of any format in the vocabulary of a sharded one.

1. Every tensor is listed under its name with the boxes of its chunks, and each chunk that has bytes with the range of the file
   that they lie in.
2. Everything else in the tree is listed as a value without a description of its own. What counts as one value follows torch's
   rule for distributed checkpoints: a mapping is always looked into, a list where there is a tensor or a mapping in it. A tuple
   or an object is looked into where there is a tensor in it, because Holdfast has names for those tensors. An empty mapping is
   listed as a value; torch drops it.
3. What stands in several places of the tree is listed where it is met first; its tensors have all their names.

The tree may come from a hostile file: each container is entered once, and the names are bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.opaque import Opaque
from holdfast.core.runtime import gc_paused
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import (
    FREE_CHARACTERS,
    NAME_CHARACTERS_A_BYTE,
    Path,
    expand_paths,
    join_path,
    list_contents,
    list_module_contents,
    walk,
)
from holdfast.errors import LimitExceeded
from holdfast.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

LONE_VALUE_NAME = "value"
"""The name of a value that was saved by itself, with nothing around it."""

INNER = object()
"""The kind of a dict that holds the attributes of an object: it has no name of its own."""

Children = Iterable[tuple[str | int, object]]

NOTHING = object()
"""Instead of a tree, where there is none beside the tensors; None would be a value."""


def metadata_of(checkpoint: Checkpoint, *, stored_nbytes: int, flat: bool) -> Metadata:
    """Describe a checkpoint; nothing is read.

    `stored_nbytes` is the size of its files, which bounds what the names may take. `flat`: there is nothing but its tensors.
    """
    with gc_paused():
        return _describe(checkpoint, stored_nbytes, NOTHING if flat else checkpoint.tree)


def _describe(checkpoint: Checkpoint, stored_nbytes: int, tree: object) -> Metadata:
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    paths: dict[str, Path] = {}
    places: dict[MetadataIndex, StorageInfo] = {}
    for name, tensor in checkpoint.items():
        chunks = [ChunkStorageMetadata.from_box(chunk.box) for chunk in tensor.chunks]
        tensors[name] = TensorStorageMetadata(
            TensorProperties.create_from_tensor(tensor), tensor.shape, chunks
        )
        paths[name] = (name,)
        for i, chunk in enumerate(tensor.chunks):
            index = MetadataIndex(name, chunk.box.start, i)
            first, last = chunk.byte_range(tensor.dtype)
            # An empty chunk may begin where another does: then it is the other that is found there.
            if last > first or index not in places:
                places.pop(index, None)
                places[index] = StorageInfo(
                    chunk.storage.key, chunk.storage.start + first, last - first
                )
    room = NAME_CHARACTERS_A_BYTE * stored_nbytes + FREE_CHARACTERS
    doubles: dict[str, int] = {}
    for path, value in _leaves(tree) if tree is not NOTHING else ():
        if isinstance(value, LazyTensor):
            if value.name in paths:
                paths[value.name] = path
            continue
        name = base = join_path(path) if path else LONE_VALUE_NAME
        while name in tensors:
            doubles[base] = doubles.get(base, 1) + 1
            name = f"{base}#{doubles[base]}"
        room -= len(name)
        if room < 0:
            raise LimitExceeded(
                "the names of the values are many times longer than the stored text",
                found=len(tensors),
            )
        tensors[name], paths[name] = BytesStorageMetadata(), path
    return Metadata(tensors, paths, places, StorageMeta(checkpoint.path))


def _leaves(tree: object) -> Iterator[tuple[Path, object]]:
    entered = _worth_entering(tree)
    seen: set[int] = set()
    empty: set[int] = set()  # containers with nothing in them, which are values

    def inside(value: object) -> Children | None:
        if id(value) not in entered:
            return None
        if id(value) in seen:
            return ()
        seen.add(id(value))
        # A module has None where a parameter is missing, or a buffer is not saved.
        filled, module = False, _is_module(value)
        found: list[tuple[str | int, object]] = []
        for owner, children in list_contents(value) or ():
            # What an object holds may be another's as well: it is listed where it is met first.
            if owner is value or id(owner) not in seen:
                seen.add(id(owner))
                found += [pair for pair in children if pair[1] is not None] if module else children
            else:
                filled = True
        if not found and not filled:
            empty.add(id(value))
        return found

    places = walk(tree, inside)
    return expand_paths(
        (way, value) for way, value in places if id(value) not in entered or id(value) in empty
    )


def _worth_entering(tree: object) -> set[int]:
    parents: dict[int, list[int]] = {}
    kinds: dict[int, object] = {}
    filled: list[int] = []  # containers with a tensor directly inside

    def inside(value: object) -> Children | None:
        if kinds.get(id(value), INNER) is not INNER:
            return ()
        found: list[tuple[str | int, object]] = []
        for owner, children in list_contents(value) or ():
            kinds[id(value)] = value
            if owner is not value:
                # A dict that is an object's, and perhaps another's as well: a container of its own, looked into once.
                parents.setdefault(id(owner), []).append(id(value))
                if id(owner) in kinds:
                    continue
                kinds[id(owner)] = INNER
            for key, child in children:
                if isinstance(child, LazyTensor):
                    filled.append(id(owner))
                elif isinstance(child, dict | list | tuple | Opaque | Composite):
                    parents.setdefault(id(child), []).append(id(owner))
                    found.append((key, child))
        return found

    deque(walk(tree, inside), maxlen=0)
    mappings = {each for each, kind in kinds.items() if isinstance(kind, dict) or _is_module(kind)}
    lists = {each for each, kind in kinds.items() if isinstance(kind, list)}
    holding = _upward(filled, parents, set(kinds))
    return holding | mappings | _upward(mappings | holding, parents, lists)


def _upward(start: Iterable[int], parents: dict[int, list[int]], through: set[int]) -> set[int]:
    """The members of `through` from which one of `start` is reached without leaving `through`."""
    found = {each for each in start if each in through}
    waiting = [*start]
    while waiting:
        for above in parents.get(waiting.pop(), ()):
            if above in through and above not in found:
                found.add(above)
                waiting.append(above)
    return found


def _is_module(value: object) -> bool:
    return isinstance(value, Opaque) and list_module_contents(value) is not None
