"""Fill torch tensors with the elements of a checkpoint's, without a second copy of them.

1. A row is one range of a file and is read as it is: to an address (engine/ranges.py), or to a GPU. No object is made for it.
2. A lazy tensor has parts, strides or a box. For a target on the CPU with the dtype of the file, the engine reads it into place.
3. A target on a GPU is filled through blocks of page-locked memory, by many readers and the GPU's own copies (cuda/load.py).
4. Everything else (another dtype, another device, a target that overlaps one before it) is read into scratch memory, and cast and
   copied from there.

Checksums are compared in all of them. A damaged tensor is named, with its file and offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from holdfast.core.arrays import Ints
from holdfast.core.chunk import has_overlapping_elements
from holdfast.core.protocols import Request, Source, group_by_source
from holdfast.core.table import IRREGULAR, Table
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.core.value import Value
from holdfast.engine.checksums import StorageChecks, build_damage_error, find_whole_storages
from holdfast.engine.coalesce import RECORDS, Ranges
from holdfast.engine.files import NO_FILES, FileStorages
from holdfast.engine.ranges import RangeReads, read_ranges
from holdfast.engine.source import OpenSource
from holdfast.errors import BadTarget, Corrupted
from holdfast.torch.cuda.load import load_fills
from holdfast.torch.cuda.plan import ByteKind, DeviceRows
from holdfast.torch.tensors.from_lazy import array_of, torch_dtype
from holdfast.torch.tensors.scratch import CastLosses, Fill, ScratchPiece, copy_values, parts_of

SCRATCH_NBYTES = 32 << 20
"""The size of the scratch memory."""

ALIGNMENT = 64
"""Pieces in a block begin at multiples of this, so that any dtype can look at them and copies run at full speed."""

STEP_NBYTES = 256 << 20
"""Bytes that are read between two reports of progress."""

NO_ARRAY = np.empty(0, np.uint8)

CPU = torch.device("cpu")

Progress = Callable[[int], None]

T = TypeVar("T")


class Fills(Value, frozen=True, eq=False):
    """Tensors of a checkpoint, and the tensor that gets the elements of each. Where targets overlap, the last one wins."""

    table: Table
    rows: Sequence[int]
    """The row of each, which is one range of a file and fills a dense target; `IRREGULAR` for what is in `lazies`."""
    lazies: Mapping[int, LazyTensor]
    """Lazy tensors by position: cut, cast or strided, in several pieces or in none."""
    targets: Sequence[torch.Tensor]

    def __len__(self) -> int:
        return len(self.rows)

    def lazy(self, position: int) -> LazyTensor:
        return (
            self.lazies[position]
            if self.rows[position] == IRREGULAR
            else self.table.lazy_tensor(self.rows[position])
        )

    @property
    def nbytes(self) -> Ints:
        lengths, kind = [kind.nbytes for kind in self.table.kinds], self.table.kind_indices
        found = [
            lengths[kind[row]] if row != IRREGULAR else self.lazies[position].nbytes
            for position, row in enumerate(self.rows)
        ]
        return np.array(found, np.int64)

    @property
    def sources(self) -> set[Source]:
        own = (
            {file.source for file in files_of(self.table).files}
            if len(self.lazies) < len(self.rows)
            else set[Source]()
        )
        return own | {lazy.source for lazy in self.lazies.values()}

    def only(self, positions: Sequence[int]) -> Fills:
        lazies = {
            at: self.lazies[position]
            for at, position in enumerate(positions)
            if position in self.lazies
        }
        return Fills(
            self.table,
            [self.rows[at] for at in positions],
            lazies,
            [self.targets[at] for at in positions],
        )

    def with_more(self, more: Sequence[Fill]) -> Fills:
        lazies = {len(self) + at: one.lazy for at, one in enumerate(more)}
        rows, targets = (
            [*self.rows, *[IRREGULAR] * len(more)],
            [*self.targets, *(one.target for one in more)],
        )
        return Fills(self.table, rows, {**self.lazies, **lazies}, targets)

    def objects(self, positions: Iterable[int]) -> list[Fill]:
        """The fills at these positions that have elements. Refuses targets on a GPU that cannot be filled."""
        found = [Fill(self.lazy(at), self.targets[at].detach()) for at in positions]
        for one in found:
            target = one.target
            if (
                target.is_cuda
                and not target.is_contiguous()
                and has_overlapping_elements(target.shape, target.stride())
            ):
                raise BadTarget(
                    "the target is expanded: several of its elements are one place on the GPU",
                    tensor=one.lazy.name,
                )
        return [one for one in found if one.lazy.size]


NO_FILLS = Fills(Table((), (), (), (), NO_FILES, {}), (), {}, ())


def files_of(table: Table) -> FileStorages:
    """The files of a table that was opened; rows elsewhere are irregular."""
    assert isinstance(table.storages, FileStorages)
    return table.storages


def row_ranges(
    table: Table,
    rows: Sequence[int],
    destinations: Sequence[torch.Tensor | ByteKind],
    devices: Sequence[torch.device],
) -> list[tuple[DeviceRows, list[int]]]:
    """Ranges of rows and what they fill, by source and device; with the positions of the rows."""
    storages, storage = files_of(table), table.storage_indices
    keys = [file.key for file in storages.files]
    numbers = np.array([storage[row] for row in rows], np.int64)
    groups: dict[tuple[int, torch.device], list[int]] = {}
    first = {id(file.source): at for at, file in reversed([*enumerate(storages.files)])}
    sources = [first[id(file.source)] for file in storages.files]
    for at, (file, device) in enumerate(
        zip(storages.file_indices[numbers].tolist(), devices, strict=True)
    ):
        groups.setdefault((sources[file], device), []).append(at)
    found = []
    for (file, device), members in groups.items():
        source, own, chosen = (
            storages.files[file].source,
            [rows[at] for at in members],
            numbers[members],
        )
        ranges = Ranges(
            keys, storages.file_indices[chosen], storages.starts[chosen], storages.nbytes[chosen]
        )
        verify = isinstance(source, OpenSource) and source.verify
        crcs = storages.crcs[chosen] if verify else np.full(len(own), NO_CRC, np.int64)
        names, targets = [table.names[row] for row in own], [destinations[at] for at in members]
        made = DeviceRows(
            source, device, ranges, crcs, targets, names.__getitem__, partial(_damaged, table, own)
        )
        found.append((made, members))
    return found


def _damaged(table: Table, rows: Sequence[int], number: int, found: int) -> Corrupted:
    row = rows[number]
    return build_damage_error(
        files_of(table).storage(table.storage_indices[row], table.row_kind(row)),
        table.names[row],
        found,
    )


ScratchBatch = list[tuple[ScratchPiece, torch.Tensor]]
"""Pieces that are in scratch memory together, and the memory of each."""


def fill(
    wanted: Fills | Sequence[Fill],
    progress: Progress | None = None,
    *,
    fresh: Sequence[DeviceRows] = (),
    max_host_memory: int | None = None,
) -> list[str]:
    """Fill every target. Where targets overlap, the last one wins. Raises the first error that reading meets.

    `fresh` rows go to GPUs in the same pass as targets there.
    `max_host_memory` bounds the page-locked memory through which targets on GPUs are filled. Gives back notes for people.
    """
    fills = wanted if isinstance(wanted, Fills) else NO_FILLS.with_more(wanted)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        later = overlapping(fills)
        rows = [at for at, row in enumerate(fills.rows) if row != IRREGULAR and at not in later]
        direct, on_gpu, staged = list[Fill](), list[Fill](), list[Fill]()
        if fills.lazies:
            direct, on_gpu, staged = _sorted_out(
                fills.objects(at for at in fills.lazies if at not in later)
            )
        if later:
            staged += fills.objects(sorted(later))
        in_rows: list[DeviceRows] = []
        if rows:
            dense = fills.only(rows) if len(rows) < len(fills.rows) else fills
            targets = [target if target.is_cpu else target.detach() for target in dense.targets]
            devices = [target.device for target in targets]
            groups = row_ranges(dense.table, dense.rows, targets, devices)
            in_rows = [ranges for ranges, _ in groups]
        _read_ranges([one for one in in_rows if one.device.type == "cpu"], progress)
        if direct:
            _read_in_place(direct, progress)
        more = [*fresh, *(one for one in in_rows if one.device.type != "cpu")]
        notes: list[str] = []
        if on_gpu or more or staged:
            losses = CastLosses()
            if on_gpu or more:
                notes += load_fills(
                    on_gpu, others=more, progress=progress, most=max_host_memory, losses=losses
                )
            if staged:
                _read_through_scratch(staged, progress, losses)
            notes += losses.notes()
    if direct:
        # The memory was written without torch; autograd must know that saved tensors have changed.
        torch.autograd.graph.increment_version([f.target for f in direct])
    return notes


def overlapping(fills: Fills) -> set[int]:
    """Positions of fills whose targets overlap one before them; targets whose ranges only interleave count, too.

    The first of a group that overlaps is filled with all others. The rest of the group comes later, in order.
    """
    reach = fills.nbytes
    for position in fills.lazies:
        reach[position] = reach_nbytes(fills.targets[position])
    (filled,) = reach.nonzero()
    # Addresses of GPUs and of the host are never the same. Other devices have none that say anything.
    starts = np.array([fills.targets[at].data_ptr() for at in filled.tolist()], np.int64)
    order = np.argsort(starts, kind="stable")
    members, starts = filled[order], starts[order]
    ends = np.maximum.accumulate(starts + reach[members])
    groups = np.cumsum(np.concatenate(([True], starts[1:] >= ends[:-1]))[: len(order)]) - 1
    if not len(groups) or groups[-1] == len(groups) - 1:
        return set()
    first = np.minimum.reduceat(members, np.flatnonzero(np.diff(groups, prepend=-1)))
    return {*members[members != first[groups]].tolist()}


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain memory with one element after the other."""
    usual = (
        (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )
    return (
        usual
        and not tensor.is_quantized
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def reach_nbytes(target: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to behind its last; 0 where it has no address."""
    if not target.numel() or not (target.is_cpu or target.is_cuda):
        return 0
    return (
        sum((n - 1) * s for n, s in zip(target.shape, target.stride(), strict=True)) + 1
    ) * target.element_size()


def _read_ranges(groups: Iterable[DeviceRows], progress: Progress | None) -> None:
    for rows in groups:
        source, targets = (
            rows.source,
            [target for target in rows.destinations if isinstance(target, torch.Tensor)],
        )
        assert isinstance(source, OpenSource)  # as all that was opened
        addresses = np.fromiter((target.data_ptr() for target in targets), np.int64, len(targets))
        ranges = rows.ranges
        reads = RangeReads(
            ranges.keys,
            ranges.files,
            ranges.starts,
            ranges.nbytes,
            addresses,
            rows.crcs,
            rows.name,
            rows.damaged,
        )
        policy = source.policy if source.store.read_profile.request_count else RECORDS
        source.read_nbytes += read_ranges(
            source.store, reads, threads=source.threads, policy=policy
        )
        torch.autograd.graph.increment_version(targets)
        if progress is not None:
            progress(int(ranges.nbytes.sum()))


def _sorted_out(fills: list[Fill]) -> tuple[list[Fill], list[Fill], list[Fill]]:
    direct, on_gpu, staged = list[Fill](), list[Fill](), list[Fill]()
    for one in fills:
        target = one.target
        if target.is_cuda:
            on_gpu.append(one)
        elif (
            target.is_cpu
            and target.dtype == torch_dtype(one.lazy.dtype)
            and not target.is_conj()
            and not target.is_neg()
        ):
            direct.append(one)
        else:
            staged.append(one)
    return direct, on_gpu, staged


def _read_in_place(fills: list[Fill], progress: Progress | None) -> None:
    for source, requests in group_by_source(Request(*_in_file_order(one)) for one in fills).items():
        if progress is None:
            source.read(requests)
            continue
        step: list[Request] = []
        nbytes = 0
        for number, request in enumerate(requests, 1):
            step.append(request)
            nbytes += request.tensor.nbytes
            if nbytes >= STEP_NBYTES or number == len(requests):
                source.read(step)
                progress(nbytes)
                step, nbytes = [], 0


def _in_file_order(one: Fill) -> tuple[LazyTensor, np.ndarray]:
    """The tensor and its target, both permuted so that the target is in C order where it can be, and is read in one piece."""
    array = array_of(one.target, one.lazy.dtype)
    if array.flags.c_contiguous:
        return one.lazy, array
    order = sorted(range(array.ndim), key=lambda d: -array.strides[d])
    return one.lazy.permute(*order), array.transpose(order)


def _read_through_scratch(fills: list[Fill], progress: Progress | None, losses: CastLosses) -> None:
    fills_of: dict[Source, list[Fill]] = {}
    for one in fills:
        fills_of.setdefault(one.lazy.source, []).append(one)
    memory = torch.empty(SCRATCH_NBYTES, dtype=torch.uint8, device="cpu")
    for source, members in fills_of.items():
        verify = isinstance(source, OpenSource) and source.verify
        checks = StorageChecks(
            find_whole_storages([Request(one.lazy, NO_ARRAY) for one in members]) if verify else {}
        )
        pieces = (part for one in members for part in parts_of(one, SCRATCH_NBYTES))
        for parts in batches(pieces, SCRATCH_NBYTES, lambda part: _room(part.lazy)):
            batch = _place(parts, memory)
            requests = [
                Request(part.lazy, array_of(value, part.lazy.dtype)) for part, value in batch
            ]
            if isinstance(source, OpenSource):
                source.read_boxes(requests, checks)
            else:
                source.read(requests)
            _put(batch, progress, losses)
        checks.finish()


def _place(parts: list[ScratchPiece], memory: torch.Tensor) -> ScratchBatch:
    """Give each piece its place in the scratch memory."""
    batch, start = [], 0
    for part in parts:
        nbytes = part.lazy.size * part.lazy.dtype.numpy.itemsize
        elements = memory[start : start + nbytes].view(torch_dtype(part.lazy.dtype))
        batch.append((part, elements.view(part.lazy.shape)))
        start += _room(part.lazy)
    return batch


def batches(items: Iterable[T], most: int, nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Lists of items, in order, of at most `most` bytes together; a larger item is alone."""
    batch: list[T] = []
    room = most
    for item in items:
        need = nbytes(item)
        if batch and need > room:
            yield batch
            batch, room = [], most
        batch.append(item)
        room -= need
    if batch:
        yield batch


def _room(lazy: LazyTensor) -> int:
    return -(-lazy.size * lazy.dtype.numpy.itemsize // ALIGNMENT) * ALIGNMENT


def _put(batch: ScratchBatch, progress: Progress | None, losses: CastLosses) -> None:
    """Copy elements out of scratch; to the device first, so that a cast happens there."""
    for part, value in batch:
        value = value.to(part.target.device)
        copy_values(value, part.target, conj=part.conj, neg=part.neg)
        losses.add(part.lazy.name, value, part.target)
    if progress is not None:
        progress(sum(part.lazy.nbytes for part, _ in batch))
