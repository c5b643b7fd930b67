"""Copies of what a rank saves in memory of our own, so that the caller may change its tensors.

Buffers are kept from save to save. GPUs copy by themselves, and the caller's streams wait for that, not the caller (cuda/stage.py).
Autograd's version counters are compared before and after: a tensor that was changed meanwhile would be torn, and is an error.

A rank that copies before anybody knows who writes what copies each piece of memory once, however many tensors it is in
(`pieces_of`, `made_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter, ne
from typing import Any, cast

import numpy as np
import torch
from msgspec import field

from holdfast.core.arrays import Ints, byte_row
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, c_strides
from holdfast.core.protocols import Request, Store, group_by_source
from holdfast.core.table import IRREGULAR, RowKind, Storages, Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import get_mapping_children, join_linked_path, walk
from holdfast.core.value import Value, replace
from holdfast.engine.arrays import MemoryTensors
from holdfast.engine.blocks import find_bytes_in_memory
from holdfast.engine.saves import SMALL_NBYTES, Memory
from holdfast.engine.source import OpenSource
from holdfast.engine.table import split_into_segments
from holdfast.engine.threads import run_all
from holdfast.errors import NotCommitted
from holdfast.torch.cuda.host import HostBlock
from holdfast.torch.cuda.memory import GpuSource
from holdfast.torch.cuda.stage import ROOM, Copies
from holdfast.torch.ranks.shards import is_sharded, shards_of

ALIGNMENT = 64

PIECE_NBYTES, LEAST_NBYTES = 64 << 20, 4 << 20
"""Bytes that one thread copies at a time. From some megabytes on the C library writes past the caches: a quarter less."""


class Versions(Value, frozen=True, eq=False):
    """Tensors, and the count of changes that autograd keeps of each. Two columns: pairs would wake up the collector."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def count_changed(self) -> int:
        return sum(map(ne, map(VERSION, self.tensors), self.counts))


def versions(state: object) -> Versions:
    """The tensors in a state, each with the count of changes that autograd keeps; of sharded ones also their local parts.

    An operator on a DTensor counts for the DTensor, one on its local part for that. What torch 2.13 does to DTensors with one
    kernel for many (`foreach`, `fused`) is not counted: a thread that steps such an optimizer while another saves is not noticed.
    """
    found = Versions()
    for way, value in walk(state, _inside):
        tensors: list[torch.Tensor] = []
        if isinstance(value, torch.Tensor) or is_sharded(value):
            parts = (
                [part.tensor for part in shards_of(value, join_linked_path(way)).parts]
                if is_sharded(value)
                else []
            )
            tensors = [one for one in (value, *parts) if isinstance(one, torch.Tensor)]
        elif _all_plain(value):
            tensors = [*_values(value)]
        try:
            counts = [*map(VERSION, tensors)]
        except RuntimeError:
            # Those of inference mode have no count.
            tensors = [tensor for tensor in tensors if not tensor.is_inference()]
            counts = [*map(VERSION, tensors)]
        found.tensors.extend(tensors)
        found.counts.extend(counts)
    return found


def _inside(value: object) -> Iterable[tuple[object, object]] | None:
    if isinstance(value, torch.Tensor) or is_sharded(value):
        return None
    return () if _all_plain(value) else get_mapping_children(value)


def _all_plain(value: object) -> bool:
    """Whether this is a container of plain tensors. Nearly all are, and there may be very many; one that is marked as sharded is
    its own part."""
    return isinstance(value, Mapping | list | tuple) and PLAIN.issuperset(map(type, _values(value)))


def _values(value: Any) -> Iterable[Any]:  # noqa: ANN401  # a container of anything
    return value.values() if isinstance(value, Mapping) else value


PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

VERSION = attrgetter("_version")


class Staged(Value, frozen=True):
    table: Table
    nbytes: int
    copies: Copies
    """Copies out of GPUs, which are waited for before anything is written."""


def stage(
    table: Table,
    before: Versions,
    path: str,
    *,
    values: Sequence[object] = (),
    threads: int,
    max_host_memory: int | None = None,
) -> Staged:
    """Copy the tensors of a table into our own memory, in parallel; nothing may change meanwhile.

    `values` are the caller's own tensors, a row each, where they are known: those on a GPU are copied from there without waiting.
    Each piece of memory is copied once, however many tensors it is in. Those without bytes stay what they are.
    """
    numbers, rows, storage = _each_storage(table)
    nbytes = table.storages.nbytes[numbers]
    starts = (nbytes + -nbytes % ALIGNMENT).cumsum() - nbytes - -nbytes % ALIGNMENT
    total = int(starts[-1] + nbytes[-1]) if len(numbers) else 0
    apart = {row: table.lazy_tensor(row) for row in table.rows_not_whole}
    pieces = pieces_of(apart.values())
    tensors, places = [*pieces.values()], list[int]()
    for tensor in tensors:
        total += -total % ALIGNMENT
        places.append(total)
        total += tensor.nbytes
    gpus = _gpus(table, rows, values) if len(values) == len(table) else {}
    gpu = bool(gpus) or any(isinstance(tensor.source, GpuSource) for tensor in tensors)
    room = ROOM.take(total, gpu=gpu, max_host_memory=max_host_memory)
    copies = Copies(room)
    try:
        # GPUs first: they copy by themselves while the rest is copied here.
        rest = np.ones(len(rows), np.bool_)
        for device, own in gpus.items():
            direct = own[(starts[own] + nbytes[own] <= room.locked_nbytes) & (nbytes[own] > 0)]
            on_device = cast(
                "list[torch.Tensor]", [*map(values.__getitem__, rows[direct].tolist())]
            )
            copies.begin_rows(device, on_device, starts[direct], nbytes[direct])
            copies.unlocked_nbytes += (
                int(nbytes[own].sum() - nbytes[direct].sum()) if len(direct) else 0
            )
            rest[direct] = False
        staged = _stage_pieces(tensors, places, copies, room, threads=threads)
        _copy_storages(
            table.storages, numbers[rest], starts[rest], nbytes[rest], room, threads=threads
        )
        torn = before.count_changed()
        if torn:
            raise NotCommitted(
                f"{torn} tensors were changed while they were copied for the save; nothing was written",
                file=path,
            )
    except BaseException:
        copies.wait()
        raise
    made = made_of(apart, dict(zip(pieces, staged, strict=True)))
    kinds, kind = [*table.kinds], [*table.kind_indices]
    for row, tensor in made.items():
        kind[row] = len(kinds)
        kinds.append(RowKind.from_tensor(tensor))
    storage = np.searchsorted(numbers, storage)
    storage[[*apart]] = IRREGULAR
    copied = Table(
        table.names, kinds, kind, storage.tolist(), RoomStorages(room, starts, nbytes), made
    )
    return Staged(copied, total, copies)


def _each_storage(table: Table) -> tuple[Ints, Ints, Ints]:
    """The storages that a row of a table is all of, ascending, and the first such row of each; and the storage of each row."""
    storage, whole = (
        np.fromiter(table.storage_indices, np.int64, len(table)),
        np.ones(len(table), np.bool_),
    )
    whole[[*table.rows_not_whole]] = False
    plain = whole.nonzero()[0]
    numbers, first = np.unique(storage[plain], return_index=True)
    return numbers, plain[first], storage


def _gpus(table: Table, rows: Ints, values: Sequence[object]) -> dict[torch.device, Ints]:
    """By device: the places among some rows of those whose tensors are torch's, on a GPU, and all of their storages."""
    places = [
        kind.location if kind.is_whole and kind.location.startswith("cuda") else ""
        for kind in table.kinds
    ]
    names = sorted({*places} - {""})
    if not names:
        return {}
    plain = np.fromiter(map(PLAIN.__contains__, map(type, values)), np.bool_, len(values))
    numbers = np.array([names.index(place) if place else -1 for place in places], np.int64)
    here = np.where(plain, numbers[np.fromiter(table.kind_indices, np.int64, len(table))], -1)[rows]
    found = {
        torch.device(name): np.flatnonzero(here == number) for number, name in enumerate(names)
    }
    return {device: own for device, own in found.items() if len(own)}


def _copy_storages(
    storages: Storages, numbers: Ints, starts: Ints, nbytes: Ints, room: HostBlock, *, threads: int
) -> None:
    """Copy storages to their places: long ones each by itself, short ones some megabytes at a time."""
    filled = nbytes.nonzero()[0]
    wanted, lengths, memory = numbers[filled].tolist(), nbytes[filled], room.array.data
    ranges = [*zip(starts[filled].tolist(), (starts + nbytes)[filled].tolist(), strict=True)]

    def task(first: int, stop: int) -> Callable[[], None]:
        def run() -> None:
            pieces = storages.read(wanted[first:stop])
            if stop - first == 1:
                # Without the interpreter lock.
                np.copyto(room.array[slice(*ranges[first])], np.frombuffer(pieces[0], np.uint8))
                return
            for (start, end), piece in zip(ranges[first:stop], pieces, strict=True):
                memory[start:end] = piece

        return run

    long = (lengths > SMALL_NBYTES).nonzero()[0].tolist()
    run_all([task(*edge) for edge in split_into_segments(long, lengths.cumsum())], threads)


class RoomStorages:
    """Storages in the memory of a save, one behind the other."""

    stores: tuple[Store, ...] = ()

    def __init__(self, room: HostBlock, starts: Ints, nbytes: Ints) -> None:
        self._room, self._starts, self.nbytes = room, starts, nbytes
        self.read_nbytes = nbytes
        self._memory = room.array.data
        self._resident = MemoryTensors()

    def read(self, numbers: Sequence[int]) -> list[memoryview]:
        """The bytes of the storages of these numbers."""
        some = list(numbers)
        starts, memory = self._starts[some], self._memory
        stops = starts + self.nbytes[some]
        return [
            memory[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]

    can_read_ranges = True

    def read_ranges(
        self, numbers: Sequence[int], starts: Sequence[int], nbytes: Sequence[int]
    ) -> list[memoryview]:
        each = zip(self.read(numbers), starts, nbytes, strict=True)
        return [piece[start : start + count] for piece, start, count in each]

    def segment(self, number: int, label: str) -> bytes | Memory:
        """The bytes of one storage, where they lie."""
        (piece,) = self.read([number])
        return Memory(piece, label, self._room) if len(piece) else b""

    def lazy_tensor(self, number: int, kind: RowKind, name: str, offset: int) -> LazyTensor:
        (piece,) = self.read([number])
        storage = self._resident.add_storage(
            self._room.address + int(self._starts[number]), piece, owner=self._room
        )
        strides = tuple([stride // 8 for stride in kind.strides])
        return self._resident.make_strided(
            storage, kind.dtype, kind.shape, strides, offset // 8, kind.traits
        ).renamed(name)


def _stage_pieces(
    tensors: Sequence[LazyTensor],
    places: Sequence[int],
    copies: Copies,
    room: HostBlock,
    *,
    threads: int,
) -> list[LazyTensor]:
    resident = MemoryTensors()
    gpus: dict[GpuSource, list[tuple[LazyTensor, int]]] = {}
    requests: list[Request] = []
    for tensor, place in zip(tensors, places, strict=True):
        if not _is_copied(tensor):
            continue
        if isinstance(tensor.source, GpuSource):
            gpus.setdefault(tensor.source, []).append((tensor, place))
        else:
            out = (
                room.array[place : place + tensor.nbytes]
                .view(tensor.dtype.numpy)
                .reshape(tensor.shape)
            )
            requests.append(Request(tensor, out))
    for gpu_source, wanted in gpus.items():
        copies.begin(gpu_source, wanted)
    for source, own in group_by_source(requests).items():
        others = _copied(own, threads) if source.store.read_profile.is_in_memory else own
        if isinstance(source, OpenSource) and source.store.read_profile.is_in_memory:
            source = source.with_store(
                source.store, threads=threads
            )  # this rank shares the machine with others
        if others:
            source.read(others)
    moved = zip(tensors, places, strict=True)
    return [
        _moved(t, place, resident=resident, room=room) if _is_copied(t) else t for t, place in moved
    ]


def _copied(requests: Sequence[Request], threads: int) -> list[Request]:
    """Copy what lies in memory as it is wanted, and give back the other requests: planning a read costs more than a copy."""
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    others: list[Request] = []
    for request in requests:
        memory = find_bytes_in_memory(request.tensor)
        if memory is None:
            others.append(request)
            continue
        target, origin = byte_row(request.out), np.frombuffer(memory, np.uint8)
        pairs += [
            (target[at : at + PIECE_NBYTES], origin[at : at + PIECE_NBYTES])
            for at in range(0, len(target), PIECE_NBYTES)
        ]
    # The long ones first, and the short ones by the dozen: nobody copies at the end while the others are done.
    pairs.sort(key=lambda pair: -pair[0].nbytes)
    work: list[Callable[[], None]] = []
    at = 0
    while at < len(pairs):
        first, nbytes = at, 0
        while at < len(pairs) and nbytes < LEAST_NBYTES:
            nbytes, at = nbytes + pairs[at][0].nbytes, at + 1
        work.append(partial(_copy_all, pairs[first:at]))
    run_all(work, threads)
    return others


def _copy_all(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for target, origin in pairs:
        np.copyto(target, origin)


def _is_copied(tensor: LazyTensor) -> bool:
    """Whether a tensor has bytes to be copied. Packed elements never lie in the caller's memory: numpy and torch have none."""
    return bool(tensor.nbytes) and not tensor.dtype.packed


def _moved(
    tensor: LazyTensor, place: int, *, resident: MemoryTensors, room: HostBlock
) -> LazyTensor:
    memory = resident.add_storage(
        room.address + place, room.array.data[place : place + tensor.nbytes], owner=room
    )
    strides = c_strides(tensor.shape, tensor.dtype.numpy.itemsize)
    return resident.make_strided(memory, tensor.dtype, tensor.shape, strides, 0).renamed(
        tensor.name
    )


Piece = tuple[object, ...]
"""The key of elements in memory: dtype, traits, shape, storage, offset, strides."""

COMMON_NBYTES, COMMON_SHARE = 64 << 20, 0.1
"""Bytes of tensors that a rank has whole, in all and as a part of what it has, up to which it copies them before it is planned who
writes them: training then goes on without waiting for any other rank. Beyond that every rank would copy what one of them writes."""


def little_in_common(table: Table) -> bool:
    """Whether a rank has few tensors whole, which the others may have as well."""
    plain = int(
        table.row_nbytes(
            [row for row, number in enumerate(table.storage_indices) if number != IRREGULAR]
        ).sum()
    )
    irregular = table.irregular.values()
    sizes = [
        (tensor.nbytes, sum(tensor.dtype.nbytes(chunk.box.count) for chunk in tensor.chunks))
        for tensor in irregular
    ]
    whole = plain + sum(nbytes for nbytes, here in sizes if here == nbytes)
    return whole <= max(COMMON_NBYTES, COMMON_SHARE * (plain + sum(here for _, here in sizes)))


def pieces_of(tensors: Iterable[LazyTensor]) -> dict[Piece, LazyTensor]:
    """Every piece of memory once, however many tensors it is in, as a tensor of its own."""
    found: dict[Piece, LazyTensor] = {}
    for tensor in tensors:
        for chunk in tensor.chunks:
            key = _piece(tensor, chunk)
            if key not in found:
                whole = len(tensor.chunks) == 1 and chunk.shape == tensor.shape
                alone = (replace(chunk, box=Box.whole(chunk.shape)),)
                found[key] = tensor if whole else replace(tensor, shape=chunk.shape, chunks=alone)
    return found


def made_of(
    tensors: Mapping[int, LazyTensor], copies: Mapping[Piece, LazyTensor]
) -> dict[int, LazyTensor]:
    """The tensors again, made of copies of their pieces. A copy has resolved what was lazily conjugated or negated."""
    made = {}
    for row, tensor in tensors.items():
        found = [(chunk.box, copies[_piece(tensor, chunk)]) for chunk in tensor.chunks]
        chunks = tuple(
            [
                one.chunks[0] if one.shape == tensor.shape else replace(one.chunks[0], box=box)
                for box, one in found
            ]
        )
        source, traits = found[0][1].source if found else tensor.source, tensor.traits
        if traits.conj or traits.neg:
            traits = replace(traits, conj=False, neg=False)
        made[row] = LazyTensor(tensor.name, tensor.dtype, tensor.shape, chunks, source, traits)
    return made


def _piece(tensor: LazyTensor, chunk: Chunk) -> Piece:
    return tensor.dtype.name, tensor.traits, chunk.shape, chunk.storage, chunk.offset, chunk.strides
