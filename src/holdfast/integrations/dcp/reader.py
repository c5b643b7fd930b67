"""`Reader`: what `dcp.load` reads from.

It takes any format that `holdfast.open` knows and describes it to torch's planner, which decides what each rank needs. It reads
exactly those bytes, straight into the tensors, and compares checksums where a storage is read whole. No pickle of the file is run:
torch's own reader unpickles the index, and planners unpickle values. Here the index is read by the closed interpreter, and values
are plain ones written anew (`archived`). An object that is neither is refused by its name.

1. A directory of torch's format is taken as its index says, item by item. So names are those that were saved, whichever planner
   made them; chunks need not cover a tensor; and where ranks saved each for itself, a rank has its own.
2. Anything else is opened as `holdfast.open` does, and its tree gets the names that torch's planner would give it.
"""

from __future__ import annotations

import io
import os
import uuid
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, TypeVar, cast

import torch
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global, Opaque
from holdfast.core.protocols import Source
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tiling import is_shape_tiled
from holdfast.core.tree import rebuild
from holdfast.engine.source import OpenSource
from holdfast.engine.table import make_value_state
from holdfast.errors import (
    BadPath,
    DoesNotFit,
    HeaderError,
    MetadataError,
    Unsupported,
    error_context,
)
from holdfast.formats.dcp.flatten import FlatValue, flatten
from holdfast.formats.dcp.index import (
    METADATA,
    SavedChunk,
    SavedTensor,
    ranks_alone,
    read_index,
)
from holdfast.formats.dcp.inflate import ZSTD
from holdfast.formats.dcp.item import Items
from holdfast.formats.dcp.lazy import ItemStorage
from holdfast.formats.dcp.read import read_values, tensor_of
from holdfast.formats.dcp.schema import Item
from holdfast.formats.detect import detect
from holdfast.stores.paths import place_of
from holdfast.torch import versions
from holdfast.torch.ranks.dcp import archive
from holdfast.torch.ranks.wanted import read_value
from holdfast.torch.tensors.fill import fill
from holdfast.torch.tensors.from_lazy import tensor_from_composite, tensor_from_lazy, torch_dtype
from holdfast.torch.tensors.scratch import Fill
from holdfast.torch.tensors.tree import DEEPEST, torch_tree, unbuilt
from holdfast.verbs.open import open as open_checkpoint
from holdfast.verbs.open import open_with_retries

if TYPE_CHECKING:
    from torch.distributed.checkpoint._extension import (
        ExtensionRegistry,
        StreamTransformExtension,
    )

BUFFER = Global("_io", "BytesIO")
"""A class that runs nothing when it is built. Programs keep their own bytes in such."""


def open_stored(
    path: str,
    *,
    rank: int | None,
    verify: bool,
    threads: int | None,
    limits: Limits | None,
    extensions: ExtensionRegistry | None,
) -> Stored:
    """Open a checkpoint. `rank` counts where ranks saved each for itself."""
    limits = limits or Limits()

    def describe(source: OpenSource) -> Directory | None:
        store = source.store
        with error_context(file=store.name), store.reading():
            if detect(source).index == METADATA:
                return Directory(source, rank, extensions)
        store.close()
        return None

    found = open_with_retries(path, describe, limits=limits, threads=threads, verify=verify)
    return found or Tree(open_checkpoint(path, verify=verify, threads=threads, limits=limits))


class Tree:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._flat = flatten(make_value_state(checkpoint.tree))

    def metadata(self) -> m.Metadata:
        """Every tensor with its chunks, and every value. The path is added by the `Reader`."""
        entries: dict[str, m.TensorStorageMetadata | m.BytesStorageMetadata] = {}
        for name in self._flat.paths:
            if name in self._flat.values:
                entries[name] = m.BytesStorageMetadata()
            elif name in self._checkpoint:
                lazy = self._checkpoint[name]
                chunks = [_chunk(chunk.box.start, chunk.shape) for chunk in lazy.chunks] or [
                    _chunk((0,) * lazy.ndim, lazy.shape)
                ]
                properties = m.TensorProperties(
                    dtype=torch_dtype(lazy.dtype), requires_grad=lazy.traits.requires_grad
                )
                entries[name] = m.TensorStorageMetadata(properties, torch.Size(lazy.shape), chunks)
        return m.Metadata(entries, dict(self._flat.paths))

    def part(
        self, index: m.MetadataIndex, starts: Sequence[int], lengths: Sequence[int]
    ) -> LazyTensor:
        """A box of one chunk; `starts` are counted from the chunk's own corner."""
        corner = index.offset or [0] * len(lengths)
        return _box(
            self._checkpoint[index.fqn],
            [a + b for a, b in zip(corner, starts, strict=True)],
            lengths,
        )

    def values(self, names: Sequence[str]) -> Mapping[str, object]:
        """Values that are no tensors, perhaps still unread."""
        return {name: self._flat.values[name].described for name in names}

    def close(self) -> None:
        self._checkpoint.close()


class Directory:
    def __init__(
        self, source: Source, rank: int | None, extensions: ExtensionRegistry | None
    ) -> None:
        alone = ranks_alone(source)
        if (
            alone and rank is None and versions.HUGGING_FACE
        ):  # such a torch asks again, with its rank
            message = "there is no .metadata, but one for each rank, which saved for itself (use_collectives=False); say which rank"
            raise HeaderError(message)
        own = rank if rank in alone else None
        self._index = read_index(source, rank=own, whole=False)
        if own is not None and (
            short := [name for name, entry in self._index.entries.items() if _has_holes(entry)]
        ):
            whole = read_index(source, whole=False).entries
            self._index.entries.update({name: whole[name] for name in short})
        entries = self._index.entries.values()
        tensors = [entry for entry in entries if isinstance(entry, SavedTensor)]
        items = [entry for entry in entries if isinstance(entry, Item)]
        items += [piece.item for tensor in tensors for piece in tensor.pieces]
        self._items = Items(source, inflate=any(item.transforms == (ZSTD,) for item in items))
        self._extensions = extensions
        self._known: dict[tuple[str, int], LazyTensor] = {}

    def metadata(self) -> m.Metadata:
        entries: dict[str, m.TensorStorageMetadata | m.BytesStorageMetadata] = {}
        for name, entry in self._index.entries.items():
            if isinstance(entry, SavedTensor):
                properties = m.TensorProperties(
                    torch_dtype(entry.dtype), requires_grad=entry.properties.requires_grad
                )
                versions.set_strides(properties, entry.properties.strides)
                chunks = [_chunk(piece.offsets, piece.sizes) for piece in entry.pieces]
                entries[name] = m.TensorStorageMetadata(properties, torch.Size(entry.size), chunks)
            elif isinstance(entry, Item):
                entries[name] = m.BytesStorageMetadata()
        # Without `storage_data`: its keys would be hashes of numbers out of the file, and nobody but a storage of torch needs it.
        storage = m.StorageMeta(save_id=self._index.texts.get("save_id"))
        made = m.Metadata(entries, _planner_data(self._index.planner), None, storage)
        if versions.VERSIONED:
            made.version = self._index.texts.get("version")
        return made

    def part(
        self, index: m.MetadataIndex, starts: Sequence[int], lengths: Sequence[int]
    ) -> LazyTensor:
        entry = self._entry(index.fqn)
        if not isinstance(entry, SavedTensor):
            raise DoesNotFit(
                f"{index.fqn}: a tensor was asked for, and this is a value that is none"
            )
        corner = (0,) * len(entry.size) if index.offset is None else tuple(index.offset)
        at = bisect_left(entry.pieces, corner, key=lambda piece: piece.offsets)
        if at == len(entry.pieces) or entry.pieces[at].offsets != corner:
            raise DoesNotFit(f"{index.fqn}: no chunk begins at {list(corner)}")
        if (index.fqn, at) not in self._known:
            self._known[index.fqn, at] = self._piece(entry, entry.pieces[at], index.fqn)
        return _box(self._known[index.fqn, at], starts, lengths)

    def values(self, names: Sequence[str]) -> Mapping[str, object]:
        plain: dict[str, Item] = {}
        transformed: dict[str, object] = {}
        for name in names:
            entry = self._entry(name)
            item = entry if isinstance(entry, Item) else entry.pieces[0].item
            if _is_foreign(item):
                transformed[name] = self._transformed(item, name)
            else:
                plain[name] = item
        return {**read_values(self._items, plain)[0], **transformed}

    def close(self) -> None:
        self._items.source.store.close()

    def _entry(self, name: str) -> SavedTensor | Item:
        entry = self._index.entries.get(name)
        if entry is None or isinstance(entry, Opaque):
            what = (
                "has nothing of this name"
                if entry is None
                else f"has something else here ({entry!r:.80})"
            )
            raise DoesNotFit(f"{name}: the index {what}")
        return entry

    def _piece(self, entry: SavedTensor, piece: SavedChunk, name: str) -> LazyTensor:
        here = SavedChunk((0,) * len(piece.sizes), piece.sizes, piece.item)
        if _is_foreign(piece.item):
            return self._as_it_lies(self._transformed(piece.item, name), piece, name)
        lazy = tensor_of(
            SavedTensor(entry.dtype, piece.sizes, entry.properties, (here,)), name, self._items
        )
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
        what = (
            f"{found.dtype} {list(found.shape)}"
            if isinstance(found, LazyTensor)
            else f"{found!r:.80}"
        )
        raise DoesNotFit(
            f"{name}: the index says a tensor of shape {list(piece.sizes)}, and the item holds {what}"
        )

    def _transformed(self, item: Item, name: str) -> object:
        """The value of an item that passed through extensions of the caller's own."""
        if self._extensions is None:
            shown = ", ".join(text[:64] for text in item.transforms)
            message = f"it was transformed by {shown} on its way to the file; give the Reader an _extension_registry that knows it"
            raise Unsupported(message, tensor=name, file=item.file)
        source = self._items.source
        stream: IO[bytes] = io.BytesIO(source.bytes(item.file, item.offset, item.stop))
        for extension in self._extensions.from_descriptor_list(item.transforms):
            stream = cast("StreamTransformExtension", extension).transform_from(stream)
        return open_checkpoint(stream.read(), limits=source.limits).tree


Stored = Tree | Directory


def _is_foreign(item: Item) -> bool:
    return bool(item.transforms) and item.transforms != (ZSTD,)


def _has_holes(entry: object) -> bool:
    if not isinstance(entry, SavedTensor):
        return False
    return not is_shape_tiled(
        entry.size, [(piece.offsets, piece.sizes) for piece in entry.pieces if 0 not in piece.sizes]
    )


def _chunk(offsets: Iterable[int], sizes: Iterable[int]) -> m.ChunkStorageMetadata:
    return m.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _box(lazy: LazyTensor, starts: Sequence[int], lengths: Sequence[int]) -> LazyTensor:
    return lazy[tuple(slice(at, at + n) for at, n in zip(starts, lengths, strict=True))]


def _planner_data(found: object) -> object:
    """What the planner recorded for itself: paths, from torch's own. Of others, all of it or, where it must be built, the paths."""
    paths = None
    if isinstance(found, dict):
        paths = {key: path for key, path in found.items() if type(key) is str and _is_path(path)}
        if len(paths) == len(found):
            return paths
    return paths if unbuilt(found) else torch_tree(found, _tensor)


def _is_path(value: object) -> bool:
    return (
        type(value) is tuple
        and len(value) <= DEEPEST
        and all(type(step) is str or type(step) is int for step in value)
    )


def archived(value: object, name: str, path: str) -> bytes:
    """A value as `torch.save` writes it. Planners unpickle it, so nothing may be in it that would run."""
    plain = rebuild(read_value(value), lambda leaf, _: _build_buffer(leaf))
    if problem := unbuilt(plain):
        raise Unsupported(
            f"{name}: {problem}; torch would run code to build it. Leave it out of the state",
            file=path,
        )
    return archive(FlatValue(torch_tree(plain, _tensor), plain))


def _build_buffer(value: object) -> object:
    """Return the buffer that a pickled `io.BytesIO` was; any other value as it is."""
    match value:
        case Opaque(
            args=(), kwargs=None, state=(bytes(content), int(position), _), items=[], entries=[]
        ) if value.what == BUFFER and position >= 0:
            buffer = io.BytesIO(content)
            buffer.seek(position)
            return buffer
    return value


def _tensor(lazy: LazyTensor | Composite) -> torch.Tensor:
    return tensor_from_composite(lazy) if isinstance(lazy, Composite) else tensor_from_lazy(lazy)


T = TypeVar("T")

Where = str | os.PathLike[str]


class CheckpointPlace:
    """The path of a `Reader` or `Writer`, which torch may also give as a `checkpoint_id`."""

    def __init__(self, path: Where | None, store: object | None) -> None:
        self._store = store
        self._path = None if path is None else place_of(path, store)

    @property
    def path(self) -> str:
        """Where the checkpoint is, or will be."""
        if self._path is None:
            what = type(self).__name__
            raise BadPath(
                f"this {what} has no path yet: give it one, or pass checkpoint_id to torch's save and load"
            )
        return self._path

    @property
    def checkpoint_id(self) -> str | None:
        """The path, as torch's own storage calls it; None where none was given yet."""
        return self._path

    def _move(self, checkpoint_id: Where | None) -> None:
        if checkpoint_id is not None:
            self._path = place_of(checkpoint_id, self._store)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Where) -> bool:
        """Whether this could be a place of a checkpoint: a path or the URL of an object store."""
        try:
            place_of(checkpoint_id)
        except BadPath:
            return False
        return True


class Reader(CheckpointPlace, StorageReader):
    """What `dcp.load` reads from: a checkpoint of any format, at a path or a URL, which may also come as its `checkpoint_id`."""

    def __init__(
        self,
        path: Where | None = None,
        *,
        store: object | None = None,
        verify: bool = True,
        threads: int | None = None,
        limits: Limits | None = None,
        _extension_registry: ExtensionRegistry | None = None,
    ) -> None:
        """`store` is an obstore store that `path`, or the `checkpoint_id`, is a key in.

        `_extension_registry` is torch's own argument: it has the classes for items that a writer transformed (zstd is known).
        """
        super().__init__(path, store)
        self.load_id = uuid.uuid4().hex
        self._verify, self._threads, self._limits = verify, threads, limits
        self._extensions = _extension_registry
        self._stored: Stored | None = None
        self._rank: int | None = None

    def reset(self, checkpoint_id: Where | None = None) -> None:
        """Forget what is open; the next load reads from here, if a path is given."""
        self.close()
        self._rank = None
        self.load_id = uuid.uuid4().hex
        self._move(checkpoint_id)

    def read_metadata(self, *args: object, **kwargs: object) -> m.Metadata:
        """Every tensor with its chunks, and every value, as torch's planner knows them.

        Where ranks saved each for itself, torch asks a second time, with its `rank`.
        """
        rank = kwargs.get("rank")
        if rank != self._rank:
            self.close()
            self._rank = rank if isinstance(rank, int) else None
        metadata = self._opened().metadata()
        if metadata.storage_meta is None:
            metadata.storage_meta = m.StorageMeta()
        metadata.storage_meta.checkpoint_id = str(self.path)
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: m.Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None:
        """On every rank, before the plans: open the checkpoint."""
        self._opened()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan of a rank as it is: ranges are joined when they are read."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans of all ranks as they are: each reads its own, and none waits for another."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the planner offers, all tensors in one batch."""
        stored = self._opened()
        wanted = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        values = stored.values(list(dict.fromkeys(item.storage_index.fqn for item in wanted)))
        for item in wanted:
            name = item.storage_index.fqn
            planner.load_bytes(item, io.BytesIO(archived(values[name], name, self.path)))
        batch: list[tuple[ReadItem, Fill]] = []
        places: set[tuple[torch.device, int]] = set()

        def finish() -> None:
            fill([one for _, one in batch])
            for item, one in batch:
                planner.commit_tensor(item, one.target)
            batch.clear()
            places.clear()

        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            part = stored.part(item.storage_index, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            if tuple(target.shape) != tuple(part.shape):
                name = item.storage_index.fqn
                raise DoesNotFit(
                    f"{name}: a part of shape {list(part.shape)} for a target of {list(target.shape)}"
                )
            place = (target.device, target.data_ptr())
            if target.numel() and place in places:
                finish()  # a planner may hand out one buffer again and again: what is in it goes to the planner before that
            places.add(place)
            batch.append((item, Fill(part, target)))
        finish()
        return finished(None)

    def close(self) -> None:
        """Close the checkpoint; a further load opens it again."""
        if self._stored is not None:
            self._stored.close()
        self._stored = None

    def _opened(self) -> Stored:
        if self._stored is None:
            self._stored = open_stored(
                self.path, rank=self._rank, verify=self._verify, threads=self._threads, limits=self._limits,
                extensions=self._extensions,
            )  # fmt: skip
        return self._stored


def finished(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
