"""Fill tensors with rows of a table that are one range of a file each, by columns: no object a tensor between file and memory.

    table      file, first byte, length, checksum of each row
    target     an address, for tensors on the CPU; the tensor itself, for those on a GPU

On the CPU the ranges are read straight to their addresses, short neighbours together (engine/memory_sink). On a GPU they go through
blocks of page-locked memory, as all that goes there (cuda/load). A damaged row is named, with its file and offset.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from holdfast.core.arrays import Bools, Ints
from holdfast.core.table import Table
from holdfast.core.value import Value
from holdfast.engine.checks import damage
from holdfast.engine.memory_sink import UNKNOWN, MemoryRanges, read_to_memory
from holdfast.engine.source import OpenSource
from holdfast.errors import Corrupted
from holdfast.plan.coalesce import Ranges
from holdfast.plan.files import FileStorages
from holdfast.torch import versions
from holdfast.torch.cuda.load import load_rows
from holdfast.torch.cuda.plan import DeviceRows
from holdfast.torch.tensors.fill import Progress
from holdfast.torch.tensors.scratch import Fill


class RowFills(Value, frozen=True, eq=False):
    """Rows of a table, and the contiguous tensor of its dtype and shape that each of them fills."""

    table: Table
    rows: Sequence[int]
    targets: Sequence[torch.Tensor]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> Ints:
        """Bytes of each."""
        return self.table.nbytes_of(self.rows)

    @property
    def names(self) -> list[str]:
        """What the table calls each."""
        return [self.table.names[row] for row in self.rows]

    @property
    def sources(self) -> set[OpenSource]:
        """What reads them."""
        return {place.source for place in self.storages.files if isinstance(place.source, OpenSource)} if self.rows else set()

    @property
    def storages(self) -> FileStorages:
        """Where they lie."""
        storages = self.table.storages
        assert isinstance(storages, FileStorages)  # of tables that were opened; rows in another medium are odd
        return storages

    @property
    def numbers(self) -> Ints:
        """The number of the storage of each."""
        storage = self.table.storage
        return np.fromiter((storage[row] for row in self.rows), np.int64, len(self.rows))

    @property
    def remote(self) -> Bools:
        """Which of them lie in a store that answers requests, or is read from front to back."""
        stores = [place.source.store for place in self.storages.files]
        remote = np.array([bool(store.requests or store.in_order) for store in stores], np.bool_)
        return remote[self.storages.file[self.numbers]] if self.rows else np.zeros(0, np.bool_)

    def fill(self, position: int) -> Fill:
        """One of them as an object."""
        return Fill(self.table.view(self.rows[position]), self.targets[position].detach())

    def only(self, positions: Sequence[int]) -> RowFills:
        """Those at these positions."""
        return RowFills(self.table, [self.rows[at] for at in positions], [self.targets[at] for at in positions])

    def without(self, names: Collection[str]) -> RowFills:
        """Those that the table does not call so."""
        if not names:
            return self
        return self.only([at for at, name in enumerate(self.names) if name not in names])

    def damaged(self, position: int, found: int) -> Corrupted:
        """What to raise for one that has another checksum."""
        row = self.rows[position]
        storage = self.storages.storage(self.table.storage[row], self.table.kind_of(row))
        return damage(storage, self.table.names[row], found)


def overlapping(targets: Sequence[torch.Tensor], nbytes: Ints) -> Bools:
    """Which of some contiguous tensors have memory in common with another."""
    starts = np.fromiter((target.data_ptr() for target in targets), np.int64, len(targets))
    order = np.argsort(starts, kind="stable")
    first = starts[order]
    reach = np.maximum.accumulate(first + nbytes[order])
    groups = np.cumsum(np.concatenate(([True], first[1:] >= reach[:-1]))[: len(order)]) - 1
    found = np.zeros(len(order), np.bool_)
    found[order] = np.bincount(groups)[groups] > 1
    return found


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is memory with one element behind the other, and nothing else to know of them."""
    usual = (tensor.is_cpu or tensor.is_cuda) and tensor.layout is torch.strided and not tensor.is_nested
    return usual and not tensor.is_quantized and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def reach_nbytes(target: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to behind its last."""
    if not target.numel():
        return 0
    return (sum((n - 1) * s for n, s in zip(target.shape, target.stride(), strict=True)) + 1) * target.element_size()


def apart(rows: RowFills, others: Sequence[torch.Tensor]) -> Bools:
    """Which rows are not filled by columns: those whose targets share memory with another, and those of remote stores."""
    nbytes = np.concatenate((rows.nbytes, np.array([reach_nbytes(target) for target in others], np.int64)))
    return overlapping([*rows.targets, *others], nbytes)[: len(rows)] | rows.remote


def fill_rows(fills: RowFills, progress: Progress | None = None, *, max_host_memory: int | None = None) -> list[str]:
    """Fill every target. None of them overlap. Raises for the first row that cannot be read as it was written; gives notes."""
    if not fills.rows:
        return []
    storages, numbers = fills.storages, fills.numbers
    groups: dict[tuple[OpenSource, torch.device], list[int]] = {}
    for position, (file, target) in enumerate(zip(storages.file[numbers].tolist(), fills.targets, strict=True)):
        source = storages.files[file].source
        assert isinstance(source, OpenSource)  # as all that was opened
        groups.setdefault((source, target.device), []).append(position)
    on_gpus: list[DeviceRows] = []
    for (source, device), positions in groups.items():
        own, chosen = fills.only(positions), numbers[positions]
        keys = [place.key for place in storages.files]
        ranges = Ranges(keys, storages.file[chosen], storages.start[chosen], storages.nbytes[chosen])
        crcs = storages.crc[chosen]
        if device.type != "cpu":
            checked = crcs if source.verify else np.full(len(crcs), UNKNOWN, np.int64)
            targets = [target.detach() for target in own.targets]
            on_gpus.append(DeviceRows(source, device, ranges, checked, targets, own.names.__getitem__, own.damaged))
            continue
        addresses = np.fromiter((target.data_ptr() for target in own.targets), np.int64, len(positions))
        wanted = MemoryRanges(ranges, addresses, crcs, own.names.__getitem__, own.damaged)
        source.read_nbytes += read_to_memory(source.store, wanted, threads=source.threads, verify=source.verify)
        versions.mark_changed(own.targets)
        if progress is not None:
            progress(int(ranges.nbytes.sum()))
    return load_rows(on_gpus, progress=progress, most=max_host_memory) if on_gpus else []
