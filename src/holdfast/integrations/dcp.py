"""`Reader` and `Writer`: storage for torch's own `dcp.load`, `dcp.save` and `dcp.async_save`.

    dcp.save(state, storage_writer=Writer("step-1000"))
    dcp.load(state, storage_reader=Reader("step-1000"))

1. The reader takes any format that `holdfast.open` knows and describes it to torch's planner, which decides what each rank needs.
   It reads exactly those bytes, straight into the tensors, and compares checksums where a storage is read whole. No pickle of the
   file is run: torch's own reader unpickles the index, and planners unpickle values. Here the index is read by the closed
   interpreter, and values are plain ones written anew. An object that is neither is refused by its name.
2. The writer makes torch's own format. All ranks write into a hidden folder, and the coordinator publishes it by one rename, so
   what was at the path stays until the new one is whole.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.limits import Limits
from holdfast.core.protocols import State
from holdfast.core.tensor import LazyTensor
from holdfast.engine.arrays import Resident
from holdfast.engine.commit.target import NewFile, refusing
from holdfast.engine.commit.transactions import DirectoryTransaction
from holdfast.engine.threads import default_threads
from holdfast.engine.write import write_file
from holdfast.errors import BadPath, DoesNotFit, Unsupported
from holdfast.formats.dcp.write import lay_out_items
from holdfast.inspect.open import open as open_checkpoint
from holdfast.plan.saves import FilePlan, Literal
from holdfast.ranks.files import is_part
from holdfast.stores.files import make_parents
from holdfast.stores.path_files import system_files
from holdfast.stores.paths import local_path
from holdfast.torch.ranks.dcp import FlatState, flatten
from holdfast.torch.ranks.wanted import read_value
from holdfast.torch.tensors.fill import Fill, fill
from holdfast.torch.tensors.from_lazy import torch_dtype
from holdfast.torch.tensors.to_lazy import torch_leaf
from holdfast.torch.tensors.tree import opaque_inside

__all__ = ["Reader", "Writer"]

Where = str | os.PathLike[str]
T = TypeVar("T")


class Reader(StorageReader):
    """What `dcp.load` reads from: a checkpoint of any format."""

    def __init__(self, path: Where, *, verify: bool = True, threads: int | None = None, limits: Limits | None = None) -> None:
        self.path = local_path(path)
        self._verify, self._threads, self._limits = verify, threads, limits
        self._checkpoint: Checkpoint | None = None
        self._flat = FlatState()

    def reset(self, checkpoint_id: Where | None = None) -> None:
        """Forget what is open; the next load reads from here, if a path is given."""
        self.close()
        if checkpoint_id is not None:
            self.path = local_path(checkpoint_id)

    def read_metadata(self, *args: object, **kwargs: object) -> m.Metadata:
        """Every tensor with its chunks, and every value, as torch's planner knows them."""
        checkpoint = self._opened()
        entries: dict[str, m.TensorStorageMetadata | m.BytesStorageMetadata] = {}
        for name in self._flat.paths:
            if name in self._flat.values:
                entries[name] = m.BytesStorageMetadata()
            elif name in checkpoint:
                entries[name] = _described(checkpoint[name])
        note = m.StorageMeta(checkpoint_id=self.path)
        return m.Metadata(entries, dict(self._flat.paths), None, note)

    def set_up_storage_reader(self, metadata: m.Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        self._opened()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the planner offers, all tensors in one batch."""
        checkpoint = self._opened()
        fills: list[Fill] = []
        done: list[Callable[[], None]] = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._value(name)))
                continue
            first = item.storage_index.offset or torch.Size([0] * len(item.lengths))
            begins = [a + b for a, b in zip(first, item.storage_offsets, strict=True)]
            part = checkpoint[name][tuple(slice(at, at + n) for at, n in zip(begins, item.lengths, strict=True))]
            target = planner.resolve_tensor(item).detach()
            if tuple(target.shape) != tuple(part.shape):
                raise DoesNotFit(f"{name}: a part of shape {list(part.shape)} for a target of {list(target.shape)}")
            fills.append(Fill(part, target))
            done.append(lambda item=item, target=target: planner.commit_tensor(item, target))  # type: ignore[misc]
        fill(fills)
        for commit in done:
            commit()
        return _finished(None)

    def close(self) -> None:
        """Close the checkpoint; a further load opens it again."""
        if self._checkpoint is not None:
            self._checkpoint.close()
        self._checkpoint, self._flat = None, FlatState()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Where) -> bool:
        return _is_local(checkpoint_id)

    def _opened(self) -> Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = open_checkpoint(self.path, verify=self._verify, threads=self._threads, limits=self._limits)
            tree = self._checkpoint.tree
            self._flat = flatten(State(tree, {}, {}), tree)
        return self._checkpoint

    def _value(self, name: str) -> bytes:
        """A value as `torch.save` would have written it. Planners unpickle it, so nothing may be in it that would run."""
        value = self._flat.values[name]
        plain = read_value(value.described)
        if opaque_inside(plain):
            message = "an object of a class that is no part of weights; torch would run code to build it. Leave it out of the state"
            raise Unsupported(f"{name}: {message}", file=self.path)
        return replace(value, raw=plain, described=plain).archive()


def _described(lazy: LazyTensor) -> m.TensorStorageMetadata:
    chunks = [m.ChunkStorageMetadata(torch.Size(chunk.box.start), torch.Size(chunk.shape)) for chunk in lazy.chunks]
    if not chunks:
        chunks = [m.ChunkStorageMetadata(torch.Size([0] * lazy.ndim), torch.Size(lazy.shape))]
    properties = m.TensorProperties(dtype=torch_dtype(lazy.dtype), requires_grad=lazy.traits.requires_grad)
    return m.TensorStorageMetadata(properties, torch.Size(lazy.shape), chunks)


@dataclass(frozen=True, slots=True)
class Share:
    """What the coordinator tells a rank: the hidden folder, and how its files are called."""

    folder: str
    prefix: str


class Writer(StorageWriter):
    """What `dcp.save` writes to: a directory in torch's format, published by one rename."""

    def __init__(self, path: Where, *, overwrite: bool = False, durable: bool = True, threads: int | None = None) -> None:
        self.path = local_path(path)
        self.overwrite, self.durable = overwrite, durable
        self._threads = threads or default_threads()
        self._transaction: DirectoryTransaction | None = None

    def reset(self, checkpoint_id: Where | None = None) -> None:
        """Give up a save that was not finished; the next one goes here, if a path is given."""
        self.close()
        if checkpoint_id is not None:
            self.path = local_path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        if not kwargs.get("use_collectives", True):
            raise Unsupported("ranks that save alone (use_collectives=False) cannot be published together", file=self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: make the hidden folder, and tell every rank of it."""
        with refusing("making the folders that lead to it", self.path):
            make_parents(self.path, durable=self.durable)
        self._transaction = DirectoryTransaction(self.path, durable=self.durable, overwrite=self.overwrite, replaceable=is_part)
        self._transaction.__enter__()
        folder = self._transaction.folder
        return [replace(plan, storage_data=Share(folder, f"__{rank}_")) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank has, in one file."""
        share = cast(Share, plan.storage_data)
        if not plan.items:
            return _finished([])
        key = f"{share.prefix}0.distcp"
        lazy = torch_leaf(Resident())
        values: list[tuple[str, tuple[Literal, ...]]] = []
        tensors: list[tuple[str, LazyTensor]] = []
        labels: dict[str, WriteItem] = {}
        for number, item in enumerate(plan.items):
            label = f"{number}"
            labels[label] = item
            data = planner.resolve_data(item)
            made = None if item.type == WriteItemType.BYTE_IO else lazy(cast(torch.Tensor, data).detach(), (item.index.fqn,))
            if isinstance(made, LazyTensor) and not made.traits.meta:
                tensors.append((label, made))
            else:
                values.append((label, (Literal(_bytes(data)),)))
        file, items = lay_out_items(key, values, tensors)
        system = system_files()
        folder = system.open_directory(share.folder)
        try:
            out = NewFile(system, system.create(key, at=folder), path=f"{self.path}/{key}")
            try:
                write_file(file, out, threads=self._threads)
                out.finish(durable=self.durable)
            except BaseException:
                out.give_up()
                raise
        finally:
            system.close(folder)
        return _finished([WriteResult(labels[at.label].index, at.nbytes, _StorageInfo(key, at.offset, at.nbytes)) for at in items])

    def finish(self, metadata: m.Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: write the index, and publish everything."""
        transaction = self._transaction
        if transaction is None:
            raise Unsupported("`finish` comes behind `prepare_global_plan`, on the same rank", file=self.path)
        metadata.storage_data = {one.index: one.storage_data for each in results for one in each}
        metadata.storage_meta = self.storage_meta()
        sizes: dict[str, int] = {}
        for info in cast("dict[m.MetadataIndex, _StorageInfo]", metadata.storage_data).values():
            sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
        for key, nbytes in sorted(sizes.items()):
            transaction.join(key, nbytes)
        transaction.seal_data()
        content = pickle.dumps(metadata)
        write_file(FilePlan(".metadata", (Literal(content),)), transaction.create(".metadata"))
        transaction.commit()
        self.close()

    def storage_meta(self) -> m.StorageMeta:
        return m.StorageMeta(checkpoint_id=self.path)

    def close(self) -> None:
        """Remove what was written and not published."""
        if self._transaction is not None:
            self._transaction.__exit__(None, None, None)
            self._transaction = None

    def __del__(self) -> None:
        with suppress(Exception):  # a collector's thread, or an interpreter that ends: the next save cleans up
            self.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Where) -> bool:
        return _is_local(checkpoint_id)


def _bytes(data: torch.Tensor | io.BytesIO) -> bytes:
    if isinstance(data, io.BytesIO):
        return data.getvalue()
    from holdfast.torch.serialization.save import save

    out = io.BytesIO()
    save(data.cpu(), out)  # sparse, quantised and the like: as torch has them
    return out.getvalue()


def _is_local(where: Where) -> bool:
    try:
        local_path(where)
    except BadPath:
        return False
    return True


def _finished(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
