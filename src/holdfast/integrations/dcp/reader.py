"""`Reader`: what `dcp.load` reads from.

It takes any format that `holdfast.open` knows and describes it to torch's planner, which decides what each rank needs. It reads
exactly those bytes, straight into the tensors, and compares checksums where a storage is read whole. No pickle of the file is run:
torch's own reader unpickles the index, and planners unpickle values. Here the index is read by the closed interpreter, and values
are plain ones written anew. An object that is neither is refused by its name.
"""

from __future__ import annotations

import io
import os
import uuid
from typing import TypeVar

import torch
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.core.limits import Limits
from holdfast.errors import BadPath, DoesNotFit
from holdfast.integrations.dcp.stored import Extensions, Stored, archived, open_stored
from holdfast.stores.paths import place_of
from holdfast.torch.tensors.fill import fill
from holdfast.torch.tensors.scratch import Fill

T = TypeVar("T")

Where = str | os.PathLike[str]


class Reader(StorageReader):
    """What `dcp.load` reads from: a checkpoint of any format, at a path or a URL, which may also come as its `checkpoint_id`."""

    def __init__(
        self,
        path: Where | None = None,
        *,
        store: object | None = None,
        verify: bool = True,
        threads: int | None = None,
        limits: Limits | None = None,
        _extension_registry: Extensions | None = None,
    ) -> None:
        """`store` is an obstore store that `path`, or the `checkpoint_id`, is a key in.

        `_extension_registry` is torch's own argument: it has the classes for items that a writer transformed (zstd is known).
        """
        self._store = store
        self._path = None if path is None else place_of(path, store)
        self.load_id = uuid.uuid4().hex
        self._verify, self._threads, self._limits = verify, threads, limits
        self._extensions = _extension_registry
        self._stored: Stored | None = None
        self._rank: int | None = None

    @property
    def path(self) -> str:
        """Where the checkpoint is."""
        return named(self._path, "Reader")

    @property
    def checkpoint_id(self) -> str | None:
        """The same, as torch's own storage calls it."""
        return self._path

    def reset(self, checkpoint_id: Where | None = None) -> None:
        """Forget what is open; the next load reads from here, if a path is given."""
        self.close()
        self._rank = None
        self.load_id = uuid.uuid4().hex
        if checkpoint_id is not None:
            self._path = place_of(checkpoint_id, self._store)

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

    def set_up_storage_reader(self, metadata: m.Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """On every rank, before the plans: open the checkpoint."""
        self._opened()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """What a rank asks for, as it asks: ranges are joined when they are read."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """What all ranks ask for: each reads its own, and none waits for another."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the planner offers, all tensors in one batch."""
        stored = self._opened()
        asked = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        values = stored.values(list(dict.fromkeys(item.storage_index.fqn for item in asked)))
        for item in asked:
            name = item.storage_index.fqn
            planner.load_bytes(item, io.BytesIO(archived(values[name], name, self.path)))
        batch = FillBatch(planner)
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                batch.add(item, stored)
        batch.finish()
        return finished(None)

    def close(self) -> None:
        """Close the checkpoint; a further load opens it again."""
        if self._stored is not None:
            self._stored.close()
        self._stored = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Where) -> bool:
        """Whether this could be a place of a checkpoint: a path or a URL."""
        return is_place(checkpoint_id)

    def _opened(self) -> Stored:
        if self._stored is None:
            self._stored = open_stored(
                self.path,
                rank=self._rank,
                verify=self._verify,
                threads=self._threads,
                limits=self._limits,
                extensions=self._extensions,
            )
        return self._stored


class FillBatch:
    """Tensors that are filled together, and then given to the planner."""

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner
        self._fills: list[Fill] = []
        self._items: list[ReadItem] = []
        self._places: set[tuple[torch.device, int]] = set()

    def add(self, item: ReadItem, stored: Stored) -> None:
        """Take an item. A planner may hand out one buffer again and again: what is in it goes to the planner before that."""
        part = stored.part(item.storage_index, item.storage_offsets, item.lengths)
        target = self._planner.resolve_tensor(item).detach()
        if tuple(target.shape) != tuple(part.shape):
            name = item.storage_index.fqn
            raise DoesNotFit(f"{name}: a part of shape {list(part.shape)} for a target of {list(target.shape)}")
        place = (target.device, target.data_ptr())
        if target.numel() and place in self._places:
            self.finish()
        self._places.add(place)
        self._fills.append(Fill(part, target))
        self._items.append(item)

    def finish(self) -> None:
        """Read everything, and tell the planner."""
        fill(self._fills)
        for item, one in zip(self._items, self._fills, strict=True):
            self._planner.commit_tensor(item, one.target)
        self._fills, self._items = [], []
        self._places.clear()


def named(path: str | None, what: str) -> str:
    """A path that somebody has given."""
    if path is None:
        raise BadPath(f"this {what} has no path yet: give it one, or pass checkpoint_id to torch's save and load")
    return path


def is_place(where: Where) -> bool:
    """Whether this is a path or the URL of an object store, and not an address of something else."""
    try:
        place_of(where)
    except BadPath:
        return False
    return True


def finished(value: T) -> Future[T]:
    """A future that is done."""
    future: Future[T] = Future()
    future.set_result(value)
    return future
