"""What a `Reader` has before it: names, chunks and values, as torch's planner knows them.

1. A directory of torch's format is taken as its index says, item by item. So names are those that were saved, whichever planner
   made them; chunks need not cover a tensor; and where ranks saved each for itself, a rank has its own.
2. Anything else is opened as `holdfast.open` does, and its tree gets the names that torch's planner would give it.

No pickle is run here. A value comes out of the closed interpreter and is written anew (`archived`), because planners unpickle it.
"""

from __future__ import annotations

import io
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Protocol, cast

import torch
from torch.distributed.checkpoint import metadata as m

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global, Opaque
from holdfast.core.protocols import Source, Store
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tiling import covers
from holdfast.core.tree import levels
from holdfast.engine.source import OpenSource
from holdfast.errors import DoesNotFit, HeaderError, MetadataError, Unsupported, located
from holdfast.formats.dcp.index import SavedChunk, SavedTensor, compare_metadata, ranks_alone, read_index
from holdfast.formats.dcp.lazy import ZSTD, Items, ItemStorage
from holdfast.formats.dcp.read import DcpDirectory, read_values, tensor_of
from holdfast.formats.dcp.schema import Item
from holdfast.formats.detect import detect
from holdfast.inspect.open import open as open_checkpoint
from holdfast.inspect.open import steady
from holdfast.plan.table import value_state
from holdfast.torch import versions
from holdfast.torch.ranks.dcp import Value, flatten
from holdfast.torch.ranks.wanted import read_value
from holdfast.torch.tensors.from_lazy import tensor_from_composite, tensor_from_lazy, torch_dtype
from holdfast.torch.tensors.tree import DEEPEST, torch_tree, unbuilt

BUFFER = Global("_io", "BytesIO")
"""A class that runs nothing when it is built. Programs keep their own bytes in such."""


class Extension(Protocol):
    """One of torch's stream extensions, as far as reading needs it."""

    def transform_from(self, input: IO[bytes]) -> IO[bytes]: ...


class Extensions(Protocol):
    """torch's `ExtensionRegistry`."""

    def from_descriptor_list(self, descriptors: Sequence[str]) -> Sequence[Extension]: ...


class Stored(Protocol):
    """A checkpoint that is open."""

    def metadata(self) -> m.Metadata:
        """Every tensor with its chunks, and every value. The path is for whoever gives it out."""

    def part(self, index: m.MetadataIndex, starts: Sequence[int], lengths: Sequence[int]) -> LazyTensor:
        """A box of one chunk; `starts` are counted from the chunk's own corner."""

    def values(self, names: Sequence[str]) -> Mapping[str, object]:
        """Values that are no tensors, perhaps still unread."""

    def close(self) -> None: ...


def open_stored(
    path: str, *, rank: int | None, verify: bool, threads: int | None, limits: Limits | None, extensions: Extensions | None
) -> Stored:
    """Open a checkpoint. `rank` counts where ranks saved each for itself."""
    limits = limits or Limits()

    def look(store: Store) -> Directory | None:
        source = OpenSource(store, limits=limits, threads=threads, mapped=False, verify=verify)
        with located(file=store.name), store.reading():
            if isinstance(detect(source), DcpDirectory):
                return Directory(source, rank, extensions)
        store.close()
        return None

    found = steady(path, limits, look)
    return found or Tree(open_checkpoint(path, verify=verify, threads=threads, limits=limits))


class Tree:
    """A checkpoint of any other format."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._flat = flatten(value_state(checkpoint.tree), checkpoint.tree)

    def metadata(self) -> m.Metadata:
        entries: dict[str, m.TensorStorageMetadata | m.BytesStorageMetadata] = {}
        for name in self._flat.paths:
            if name in self._flat.values:
                entries[name] = m.BytesStorageMetadata()
            elif name in self._checkpoint:
                lazy = self._checkpoint[name]
                chunks = [_chunk(chunk.box.start, chunk.shape) for chunk in lazy.chunks] or [_chunk((0,) * lazy.ndim, lazy.shape)]
                properties = m.TensorProperties(dtype=torch_dtype(lazy.dtype), requires_grad=lazy.traits.requires_grad)
                entries[name] = m.TensorStorageMetadata(properties, torch.Size(lazy.shape), chunks)
        return m.Metadata(entries, dict(self._flat.paths))

    def part(self, index: m.MetadataIndex, starts: Sequence[int], lengths: Sequence[int]) -> LazyTensor:
        corner = index.offset or [0] * len(lengths)
        return _box(self._checkpoint[index.fqn], [a + b for a, b in zip(corner, starts, strict=True)], lengths)

    def values(self, names: Sequence[str]) -> Mapping[str, object]:
        return {name: self._flat.values[name].described for name in names}

    def close(self) -> None:
        self._checkpoint.close()


class Directory:
    """A directory of torch's format."""

    def __init__(self, source: Source, rank: int | None, extensions: Extensions | None) -> None:
        compare_metadata(source)
        alone = ranks_alone(source)
        if alone and rank is None and versions.HUGGING_FACE:  # such a torch asks again, with its rank
            message = "there is no .metadata, but one for each rank, which saved for itself (use_collectives=False); say which rank"
            raise HeaderError(message)
        own = rank if rank in alone else None
        self._index = read_index(source, rank=own, whole=False)
        if own is not None and (short := [name for name, entry in self._index.entries.items() if _has_holes(entry)]):
            whole = read_index(source, whole=False).entries
            self._index.entries.update({name: whole[name] for name in short})
        self._items = Items(source, inflate=any(item.transforms == (ZSTD,) for item in self._everything()))
        self._extensions = extensions
        self._known: dict[tuple[str, int], LazyTensor] = {}

    def metadata(self) -> m.Metadata:
        entries: dict[str, m.TensorStorageMetadata | m.BytesStorageMetadata] = {}
        for name, entry in self._index.entries.items():
            if isinstance(entry, SavedTensor):
                properties = m.TensorProperties(torch_dtype(entry.dtype), requires_grad=entry.properties.requires_grad)
                versions.set_strides(properties, entry.properties.strides)
                chunks = [_chunk(piece.offsets, piece.sizes) for piece in entry.pieces]
                entries[name] = m.TensorStorageMetadata(properties, torch.Size(entry.size), chunks)
            elif isinstance(entry, Item):
                entries[name] = m.BytesStorageMetadata()
        # Without `storage_data`: its keys would be hashes of numbers out of the file, and nobody but a storage of torch needs it.
        note = m.StorageMeta(save_id=self._index.texts.get("save_id"))
        made = m.Metadata(entries, _planner_data(self._index.planner), None, note)
        if versions.VERSIONED:
            made.version = self._index.texts.get("version")
        return made

    def part(self, index: m.MetadataIndex, starts: Sequence[int], lengths: Sequence[int]) -> LazyTensor:
        entry = self._entry(index.fqn)
        if not isinstance(entry, SavedTensor):
            raise DoesNotFit(f"{index.fqn}: a tensor was asked for, and this is a value that is none")
        corner = (0,) * len(entry.size) if index.offset is None else tuple(index.offset)
        at = bisect_left(entry.pieces, corner, key=lambda piece: piece.offsets)
        if at == len(entry.pieces) or entry.pieces[at].offsets != corner:
            raise DoesNotFit(f"{index.fqn}: no chunk begins at {list(corner)}")
        if (index.fqn, at) not in self._known:
            self._known[index.fqn, at] = self._piece(entry, entry.pieces[at], index.fqn)
        return _box(self._known[index.fqn, at], starts, lengths)

    def values(self, names: Sequence[str]) -> Mapping[str, object]:
        wanted = {name: self._item(name) for name in names}
        plain = {name: item for name, item in wanted.items() if not _is_foreign(item)}
        found = dict(read_values(self._items, plain).values)
        return found | {name: self._transformed(item, name) for name, item in wanted.items() if name not in plain}

    def close(self) -> None:
        self._items.source.store.close()

    def _everything(self) -> Iterator[Item]:
        for entry in self._index.entries.values():
            if isinstance(entry, SavedTensor):
                yield from (piece.item for piece in entry.pieces)
            elif isinstance(entry, Item):
                yield entry

    def _entry(self, name: str) -> SavedTensor | Item:
        entry = self._index.entries.get(name)
        if entry is None or isinstance(entry, Opaque):
            what = "has nothing of this name" if entry is None else f"has something else here ({entry!r:.80})"
            raise DoesNotFit(f"{name}: the index {what}")
        return entry

    def _item(self, name: str) -> Item:
        entry = self._entry(name)
        return entry if isinstance(entry, Item) else entry.pieces[0].item

    def _piece(self, entry: SavedTensor, piece: SavedChunk, name: str) -> LazyTensor:
        """A chunk as a tensor of its own."""
        here = SavedChunk((0,) * len(piece.sizes), piece.sizes, piece.item)
        if _is_foreign(piece.item):
            return self._as_it_lies(self._transformed(piece.item, name), piece, name)
        lazy = tensor_of(SavedTensor(entry.dtype, piece.sizes, entry.properties, (here,)), name, self._items)
        try:
            for chunk in lazy.chunks:
                if isinstance(chunk.storage, ItemStorage):
                    self._items.find(chunk.storage)
        except MetadataError:
            # A planner may have handed out something else than it had planned: another dtype, mostly. torch takes what there is.
            return self._as_it_lies(self._items.value(piece.item, name)[0], piece, name)
        return lazy

    def _as_it_lies(self, found: object, piece: SavedChunk, name: str) -> LazyTensor:
        if isinstance(found, LazyTensor) and found.shape == piece.sizes:
            return found
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, LazyTensor) else f"{found!r:.80}"
        raise DoesNotFit(f"{name}: the index says a tensor of shape {list(piece.sizes)}, and the item holds {what}")

    def _transformed(self, item: Item, name: str) -> object:
        """What an item holds that passed through extensions of the caller's own."""
        if self._extensions is None:
            shown = ", ".join(text[:64] for text in item.transforms)
            message = f"it was transformed by {shown} on its way to the file; give the Reader an _extension_registry that knows it"
            raise Unsupported(message, tensor=name, file=item.file)
        source = self._items.source
        stream: IO[bytes] = io.BytesIO(source.bytes(item.file, item.offset, item.stop))
        for extension in self._extensions.from_descriptor_list(item.transforms):
            stream = extension.transform_from(stream)
        return open_checkpoint(stream.read(), limits=source.limits).tree


def _is_foreign(item: Item) -> bool:
    return bool(item.transforms) and item.transforms != (ZSTD,)


def _has_holes(entry: object) -> bool:
    if not isinstance(entry, SavedTensor):
        return False
    return not covers(entry.size, [(piece.offsets, piece.sizes) for piece in entry.pieces if 0 not in piece.sizes])


def _chunk(offsets: Iterable[int], sizes: Iterable[int]) -> m.ChunkStorageMetadata:
    return m.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _box(lazy: LazyTensor, starts: Sequence[int], lengths: Sequence[int]) -> LazyTensor:
    return lazy[tuple(slice(at, at + n) for at, n in zip(starts, lengths, strict=True))]


def _planner_data(found: object) -> object:
    """What the planner noted for itself: paths, from torch's own. Of others, all of it or, where it must be built, the paths."""
    paths = {key: path for key, path in found.items() if type(key) is str and _is_path(path)} if isinstance(found, dict) else None
    if isinstance(found, dict) and paths is not None and len(paths) == len(found):
        return paths
    return paths if unbuilt(found) else torch_tree(found, _tensor)


def _is_path(value: object) -> bool:
    return type(value) is tuple and len(value) <= DEEPEST and all(type(step) is str or type(step) is int for step in value)


def archived(value: object, name: str, path: str) -> bytes:
    """A value as `torch.save` writes it. Planners unpickle it, so nothing may be in it that would run."""
    plain = _with_buffers(read_value(value))
    if problem := unbuilt(plain):
        raise Unsupported(f"{name}: {problem}; torch would run code to build it. Leave it out of the state", file=path)
    return Value(torch_tree(plain, _tensor), plain).archive()


def _with_buffers(value: object) -> object:
    """The same with `io.BytesIO` built where one was pickled, as an element of lists, tuples and mappings."""
    if not any(_is_buffer(inner) for inner, _ in levels(value)) or any(depth > DEEPEST for _, depth in levels(value)):
        return value
    return _Buffers().walk(value)


class _Buffers:
    """One walk of `_with_buffers`."""

    def __init__(self) -> None:
        self._made: dict[int, object] = {}

    def walk(self, one: object) -> object:
        if id(one) not in self._made:
            self._made[id(one)] = one  # a container may be in itself; it is then as it was, and refused
            self._made[id(one)] = self._built(one)
        return self._made[id(one)]

    def _built(self, one: object) -> object:
        if _is_buffer(one):
            content, at, _ = cast("tuple[bytes, int, object]", cast(Opaque, one).state)
            buffer = io.BytesIO(content)
            buffer.seek(at)
            return buffer
        if isinstance(one, dict):
            copy = one.copy()
            copy.update({key: self.walk(inner) for key, inner in one.items()})
            return copy
        if type(one) is list or type(one) is tuple:
            return type(one)([self.walk(inner) for inner in one])
        return one


def _is_buffer(value: object) -> bool:
    if not isinstance(value, Opaque) or value.what != BUFFER:
        return False
    match value:
        case Opaque(args=(), kwargs=None, state=(bytes(), int(at), _), items=[], entries=[]) if at >= 0:
            return True
    return False


def _tensor(lazy: LazyTensor | Composite) -> torch.Tensor:
    return tensor_from_composite(lazy) if isinstance(lazy, Composite) else tensor_from_lazy(lazy)
