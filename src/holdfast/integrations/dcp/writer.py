"""`Writer`: what `dcp.save` and `dcp.async_save` write to.

1. It makes torch's own format. All ranks write into a hidden folder, and the coordinator publishes it by one rename, so what was at
   the path stays until the new one is whole. Files that are no part of a checkpoint go along into the new folder.
2. A rank learns of the hidden folder by its plan. Planners that cache plans hand out an old one: the folder is then found by name.
3. Ranks that save each for itself (`use_collectives=False`) have nothing in common to publish. Each adds files under new names to
   the folder, replaces its own index by one rename, and removes what the index before it named.
4. At a URL there is no folder: objects have names of their own, and the coordinator puts the index (engine/targets).
   Names carry the id that the coordinator has drawn, by which it gives them up, and one of the rank's own: a cached plan has an old
   id, and what was saved with that must not be written over.
"""

from __future__ import annotations

import errno
import io
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import IO, TYPE_CHECKING, cast

import torch
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast.engine.commit.target import not_committed_on_error
from holdfast.engine.commit.temporaries import list_unfinished
from holdfast.engine.commit.transactions import FileTransaction
from holdfast.engine.saves import FilePlan, Literal
from holdfast.engine.stream import Writer as Output
from holdfast.engine.stream import write_all, write_stream
from holdfast.engine.targets.target import DeliveredFile, SaveContext, Target, join_target
from holdfast.engine.threads import DEFAULT_THREADS
from holdfast.engine.write import write_file
from holdfast.errors import NotCommitted, Unsupported
from holdfast.formats import format_of
from holdfast.formats.dcp.index import BESIDE, METADATA, checksum_file
from holdfast.formats.dcp.write import lay_out_items
from holdfast.integrations.dcp.reader import CheckpointPlace, Where, finished
from holdfast.ranks.write import open_together
from holdfast.stores.files import make_parents, system_files
from holdfast.stores.place import place_at
from holdfast.torch import versions
from holdfast.torch.ranks.dcp import pickled_index
from holdfast.torch.serialization.saving import save
from holdfast.verbs.seals.document import SEAL
from holdfast.verbs.shared.formats import is_checkpoint_file
from holdfast.verbs.shared.state import tabulate_state

if TYPE_CHECKING:
    from torch.distributed.checkpoint._extension import StreamTransformExtension

EXISTS = "Checkpoint already exists; pass overwrite=True to replace it, or save elsewhere"


@dataclass(frozen=True, slots=True)
class WriteTask:
    """What the coordinator tells a rank: the hidden folder, and how its files are called."""

    folder: str
    """At a URL: the id of the save."""
    prefix: str


class Writer(CheckpointPlace, StorageWriter):
    """What `dcp.save` writes to: a directory in torch's format, or a URL. The path may also be the `checkpoint_id` of `dcp.save`.

    As with torch's own writer, an existing checkpoint is replaced unless `overwrite=False`; it stays until the new one is whole.
    `durable` and `threads` are torch's `sync_files` and `thread_count`, and both names are understood.
    """

    def __init__(
        self,
        path: Where | None = None,
        *,
        store: object | None = None,
        overwrite: bool = True,
        durable: bool = True,
        threads: int | None = None,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        per_thread_copy_ahead: int = 0,
        cache_staged_state_dict: bool = False,
        _extensions: Sequence[StreamTransformExtension] | None = None,
    ) -> None:
        """`store` is an obstore store that `path`, or the `checkpoint_id`, is a key in.

        `per_thread_copy_ahead` has no meaning here: tensors of a GPU pass through page-locked blocks.

        With `cache_staged_state_dict`, `dcp.async_save` copies the state into the same memory each time, if the writer is kept.
        `_extensions` are torch's own: each transforms what is written, the last one first.
        """
        super().__init__(path, store)
        self.save_id = uuid.uuid4().hex
        self.overwrite, self.durable = overwrite, durable and sync_files
        self._threads = threads or thread_count or DEFAULT_THREADS
        self._single, self._extensions = single_file_per_rank, list(_extensions or ())
        self._target: Target | None = None
        self._alone: int | None = None
        if cache_staged_state_dict:
            # torch takes a writer that has these for the one that copies the state.
            stager = BlockingAsyncStager(cache_staged_state_dict=True)
            self.stage, self.synchronize_staging = stager.stage, stager.synchronize_staging
            self.should_synchronize_after_execute = self._synchronize_after_execute = False

    def reset(self, checkpoint_id: Where | None = None) -> None:
        """Give up a save that was not finished; the next one goes here, if a path is given."""
        self.close()
        self.save_id = uuid.uuid4().hex
        self._move(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """On every rank, before the plans: remember whether this rank saves by itself."""
        rank = kwargs.get("rank")
        self._alone = (
            rank if isinstance(rank, int) and not kwargs.get("use_collectives", True) else None
        )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """On every rank: the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: make the hidden folder, and tell every rank of it. On a rank alone: look whether it may save."""
        if self._alone is not None:
            self._check_alone(self._alone)
            return [
                replace(plan, storage_data=WriteTask(self.path, f"__{self._alone}_"))
                for plan in plans
            ]
        self.close()
        found = self._found()
        kept = {name for name in found or () if not is_checkpoint_file(name)}
        if not self.overwrite and kept != set(found or ()):
            raise NotCommitted(EXISTS, file=self.path, errno=errno.EEXIST)
        self._target = target = open_together(
            self.path,
            format_of("dcp"),
            durable=self.durable,
            overwrite=self.overwrite or found is not None,
            replaceable=lambda name: name in kept or (self.overwrite and is_checkpoint_file(name)),
        )
        for name in sorted(kept):
            target.link_existing(name, os.path.join(os.path.realpath(self.path), name))
        return [
            replace(plan, storage_data=WriteTask(target.join_name, f"__{rank}_"))
            for rank, plan in enumerate(plans)
        ]

    def _found(self) -> list[str] | None:
        if not place_at(self.path).on_disk:
            return None
        with not_committed_on_error("looking at the target", self.path):
            return os.listdir(self.path) if os.path.isdir(self.path) else None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank has, in one file, or one for each item."""
        task = cast(WriteTask, plan.storage_data)
        if not plan.items:
            return finished([])
        groups = [plan.items] if self._single else [[item] for item in plan.items]
        into = self._part(task)
        results: list[WriteResult] = []
        try:
            for group, key in zip(
                groups, into.generate_free_names(task.prefix, ".distcp"), strict=False
            ):
                results += self._written(group, planner, key, into)
        except BaseException:
            if into is not self._target:
                into.give_up()  # nobody has heard of it
            raise
        finally:
            into.close()
        return finished(results)

    def finish(self, metadata: m.Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, and publish everything: on the coordinator, or on each rank alone."""
        if versions.VERSIONED:
            metadata.version = "1.0.0"
        metadata.storage_data = {one.index: one.storage_data for each in results for one in each}
        metadata.storage_meta = self.storage_meta()
        sizes: dict[str, int] = {}
        for info in cast("dict[m.MetadataIndex, _StorageInfo]", metadata.storage_data).values():
            sizes[info.relative_path] = max(
                sizes.get(info.relative_path, 0), info.offset + info.length
            )
        content = pickled_index(metadata)
        if self._alone is not None:
            self._finish_alone(self._alone, content, sizes)
            return
        target = self._target
        if target is None:
            raise Unsupported(
                "`finish` comes behind `prepare_global_plan`, on the same rank", file=self.path
            )
        index = [FilePlan(METADATA, (Literal(content),))]
        if not target.save_id:
            index.append(FilePlan(BESIDE, (Literal(checksum_file(content)),)))
        target.publish(
            index,
            SaveContext(),
            [DeliveredFile(key, nbytes, is_linked=False) for key, nbytes in sorted(sizes.items())],
        )
        self.close()

    def storage_meta(self) -> m.StorageMeta:
        """The ids of the save, for torch's metadata."""
        return m.StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)

    def close(self) -> None:
        """Remove what was written and not published."""
        if self._target is not None:
            self._target.give_up()
            self._target = None

    def __del__(self) -> None:
        with suppress(
            Exception
        ):  # a collector's thread, or an interpreter that ends: the next save cleans up
            self.close()

    def __getstate__(self) -> dict[str, object]:
        """For the process that `async_save` may save in. A save that is under way stays here, and so does the copied state."""
        staging = (
            "stage",
            "synchronize_staging",
            "should_synchronize_after_execute",
            "_synchronize_after_execute",
        )
        sent = {key: value for key, value in vars(self).items() if key not in staging}
        return {**sent, "_target": None}

    # Files.

    def _part(self, task: WriteTask) -> Target:
        if not place_at(self.path).on_disk:
            return self._target or join_target(task.folder, self.path, durable=self.durable)
        return join_target(self._folder(task), self.path, durable=self.durable)

    def _folder(self, task: WriteTask) -> str:
        if self._alone is not None:
            return self.path
        if self._target is not None:
            return self._target.join_name
        there = list_unfinished(self.path)
        if task.folder in there:
            return task.folder
        if len(there) != 1:
            message = f"the coordinator's folder was not found: there are {len(there)} unfinished saves of this checkpoint"
            raise NotCommitted(message, file=self.path, errno=errno.ENOENT)
        return there[0]

    def _written(
        self, items: Sequence[WriteItem], planner: SavePlanner, key: str, into: Target
    ) -> list[WriteResult]:
        file, laid = _lay_out(key, items, planner)
        if not self._extensions:
            into.prepare_file(file)(SaveContext(threads=self._threads))
            starts = accumulate((nbytes for _, nbytes in laid), initial=0)
            return [
                WriteResult(one.index, n, _StorageInfo(key, at, n))
                for (one, n), at in zip(laid, starts, strict=False)
            ]
        results: list[WriteResult] = []
        into.stream_file(
            key,
            file.nbytes,
            lambda out: results.extend(self._transformed(items, planner, key, out)),
        )
        return results

    def _transformed(
        self, items: Iterable[WriteItem], planner: SavePlanner, key: str, out: Output
    ) -> list[WriteResult]:
        results = []
        end = Appended(out)
        for item in items:
            start = end.nbytes
            stream = cast(IO[bytes], end)
            for extension in self._extensions:
                stream = extension.transform_to(stream)
            file, _ = _lay_out(key, [item], planner)
            with closing(stream):
                write_stream(file, stream)
            # In the order in which readers undo them. torch's own writer notes several the other way round, and cannot read that.
            info = _StorageInfo(
                key, start, end.nbytes - start, [one.get_descriptor() for one in self._extensions]
            )
            results.append(WriteResult(item.index, end.nbytes - start, info))
        return results

    # A rank alone.

    def _check_alone(self, rank: int) -> None:
        if not place_at(self.path).on_disk:
            message = "ranks that save each for itself (use_collectives=False) have no index in common; save to a folder"
            raise Unsupported(message, file=self.path)
        with not_committed_on_error("making the folder", self.path):
            make_parents(os.path.join(self.path, METADATA), durable=self.durable)
            found = os.listdir(self.path)
        if METADATA in found:
            message = "the folder has a checkpoint that ranks saved together, and would still be read as that; save elsewhere"
            raise NotCommitted(message, file=self.path, errno=errno.EEXIST)
        if not self.overwrite and f"__{rank}{METADATA}" in found:
            raise NotCommitted(EXISTS, file=self.path, errno=errno.EEXIST)

    def _finish_alone(self, rank: int, content: bytes, sizes: dict[str, int]) -> None:
        system = system_files()
        name = f"__{rank}{METADATA}"
        with _opened(self.path) as folder:
            if self.durable:
                with not_committed_on_error("writing the folder to the disk (fsync)", self.path):
                    system.sync(folder)
            with suppress(
                FileNotFoundError
            ):  # it spoke of what is replaced now; another rank may have been faster
                system.unlink(SEAL, dir_fd=folder)
            with FileTransaction(
                os.path.join(self.path, name), durable=self.durable
            ) as transaction:
                write_file(FilePlan(name, (Literal(content),)), transaction.file)
                transaction.commit()
            own = re.compile(rf"__{rank}_[0-9]+\.distcp")
            for key in system.list(folder):
                if own.fullmatch(key) and key not in sizes:
                    with suppress(
                        OSError
                    ):  # nobody reads it any more, and the next save tries again
                        system.unlink(key, dir_fd=folder)


class Appended(io.RawIOBase):
    """The end of a file, for streams that write into it and close what they write into."""

    def __init__(self, out: Output) -> None:
        super().__init__()
        self._out = out
        self.nbytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: object, /) -> int:
        view = memoryview(cast(bytes, data)).cast("B")
        write_all(self._out, view)
        self.nbytes += view.nbytes
        return view.nbytes

    def close(self) -> None:
        """Nothing: the next item is written behind this one."""


@contextmanager
def _opened(path: str) -> Iterator[int]:
    system = system_files()
    with not_committed_on_error("opening the folder", path):
        folder = system.open_directory(path)
    try:
        yield folder
    finally:
        system.close(folder)


def _lay_out(
    key: str, items: Sequence[WriteItem], planner: SavePlanner
) -> tuple[FilePlan, list[tuple[WriteItem, int]]]:
    """A file with these items, as the planner has them now; and the items in the order of the file, each with its length."""
    values: list[tuple[WriteItem, bytes]] = []
    tensors: list[tuple[WriteItem, torch.Tensor]] = []
    for item in items:
        data = planner.resolve_data(item)
        if (
            isinstance(data, torch.Tensor)
            and item.type != WriteItemType.BYTE_IO
            and data.layout == torch.strided
            and not (data.is_quantized or data.is_nested or data.is_meta)
        ):
            tensors.append((item, data.detach()))
        else:
            values.append((item, _bytes(data, item.index.fqn)))
    table = tabulate_state(
        {f"{number}": tensor for number, (_, tensor) in enumerate(tensors)}
    ).tensors
    plan, lengths = lay_out_items(key, [archive for _, archive in values], table, range(len(table)))
    return plan, [*zip([item for item, _ in (*values, *tensors)], lengths.tolist(), strict=True)]


def _bytes(data: torch.Tensor | io.BytesIO, name: str) -> bytes:
    if isinstance(data, io.BytesIO):
        return data.getvalue()
    if data.layout != torch.strided:
        raise Unsupported(
            f"a tensor of layout {data.layout} has no form in a distributed checkpoint", tensor=name
        )
    out = io.BytesIO()
    save(data.cpu(), out)  # quantised and the like: as torch has them
    return out.getvalue()
