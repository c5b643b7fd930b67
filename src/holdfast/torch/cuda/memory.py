"""Tensors on GPUs as lazy tensors over the memory that they have there, for saving. Nothing is moved before it is written.

A storage on a GPU is a storage like any other, known by its device and address; two tensors over one are aliases. What reads it
asks for bytes in C order and gets them in a block of page-locked memory, which it gives back (`GpuSource.lend`): the writers of a
save each hold one, so that copying, summing and writing overlap, and memory is bounded however large a tensor is.

To copy a small tensor by itself takes a call into CUDA and a wait for its answer, and its bytes take a thousandth of that. So small
tensors that are wanted together are laid behind each other on the device, by one kernel for hundreds of them, and cross the bus as
one (`read`, `copy_later`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from holdfast.core.arrays import byte_row
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DType
from holdfast.core.protocols import Request
from holdfast.core.runtime import weakly
from holdfast.core.tensor import PLAIN, LazyTensor, Traits
from holdfast.engine.blocks import contiguous_bytes, slabs
from holdfast.engine.source import OpenSource
from holdfast.errors import Unsupported
from holdfast.stores.virtual import Virtual, VirtualFile
from holdfast.torch.cuda.host import BLOCK_NBYTES, POOL, HostBlock
from holdfast.torch.cuda.pipeline import Mark
from holdfast.torch.cuda.streams import Lane, Side, refuse_capture
from holdfast.torch.tensors.from_lazy import carrier_dtype, torch_dtype
from holdfast.torch.tensors.scratch import flat
from holdfast.torch.tensors.shared_regions import BYTES

T = TypeVar("T")

MOST_BLOCKS = 16
"""Blocks that are lent at once: one for each of the threads that write a file."""

SHORT_NBYTES = 1 << 20
"""Tensors up to this length cross the bus together with others."""

PADDING_NBYTES = 64
"""Of what is copied into one room, more than this between two tensors ends a copy."""


class GpuMemory(Virtual):
    """A store whose bytes are in the memory of GPUs. Each device is read on its side stream, behind what its storages wait for."""

    def __init__(self, lane: Callable[[torch.device], Lane] = Side) -> None:
        super().__init__("<GPU memory>")
        self._make_lane = lane
        self._bytes: dict[str, torch.Tensor] = {}
        self._lanes: dict[torch.device, Lane] = {}

    @property
    def block_nbytes(self) -> int | None:
        """A block of page-locked memory."""
        return BLOCK_NBYTES

    def add(self, storage: torch.UntypedStorage) -> Storage:
        """The storage as one of ours; the same one for the same memory."""
        nbytes = storage.nbytes()
        device = storage.device
        key = f"{device}/{storage.data_ptr() if nbytes else 0:x}+{nbytes:x}"
        if key not in self._bytes:
            if device not in self._lanes:
                refuse_capture([device])
                self._lanes[device] = self._make_lane(device)
            self._bytes[key] = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            self.put(VirtualFile(nbytes, partial(weakly(self._read), key)), key)
        return Storage(key, 0, nbytes, location=str(device), home=self)

    def flat(self, key: str) -> torch.Tensor:
        """All bytes under a key, where they are."""
        self.entry(key)  # raises where it was closed, and for what is not among the storages that are saved
        return self._bytes[key]

    def lane(self, device: torch.device) -> Lane:
        """The side stream of a device, waiting for what the caller's stream has been asked to do up to now."""
        lane = self._lanes[device]
        lane.follow()
        return lane

    def close(self) -> None:
        super().close()
        self._bytes.clear()

    def _read(self, key: str, start: int, out: memoryview) -> None:
        row = self.flat(key)
        with self.lane(row.device).on():
            torch.from_numpy(np.frombuffer(out, np.uint8)).copy_(row[start : start + out.nbytes])


class GpuSource(OpenSource):
    """Reads tensors out of GPUs."""

    def __init__(self, memory: GpuMemory | None = None) -> None:
        self.memory = memory or GpuMemory()
        super().__init__(self.memory)
        self._turns = threading.BoundedSemaphore(MOST_BLOCKS)

    def tensor(self, tensor: torch.Tensor, dtype: DType, traits: Traits = PLAIN) -> LazyTensor:
        """A tensor on a GPU, described."""
        place = self.memory.add(tensor.untyped_storage())
        shape = tuple(tensor.shape)
        bits = tensor.element_size() * 8
        offset, strides = int(tensor.storage_offset()) * bits, tuple(s * bits for s in tensor.stride())
        if 0 in shape:
            offset, strides = 0, (0,) * len(shape)
        return LazyTensor("", dtype, shape, (Chunk(Box.whole(shape), place, offset, strides),), self, traits)

    def bytes_of(self, storage: torch.UntypedStorage, name: str) -> LazyTensor:
        """A whole storage as a row of bytes."""
        return LazyTensor.contiguous(name, BYTES, (storage.nbytes(),), self.memory.add(storage), self)

    @contextmanager
    def lend(self, tensor: LazyTensor) -> Iterator[memoryview]:
        """The bytes of a tensor in C order, for as long as the block lasts."""
        if tensor.nbytes > BLOCK_NBYTES:
            out = np.empty(tensor.nbytes, np.uint8)
            self._copy(tensor, torch.from_numpy(out)).synchronize()
            yield out.data
            return
        with self._turns:
            (block,) = POOL.lend(1)
            try:
                yield self._fetch(tensor, block)
            finally:
                POOL.take_back([block])

    def read(self, requests: Sequence[Request]) -> None:
        small = [request for request in requests if 0 < request.tensor.nbytes <= SHORT_NBYTES and not request.tensor.dtype.packed]
        if len(small) > 1:
            self._read_together(small)
            requests = [request for request in requests if request.tensor.nbytes > SHORT_NBYTES or request.tensor.dtype.packed]
        for request in requests:
            with _in_c_order(request.out) as row:
                for slab in slabs(request.tensor, BLOCK_NBYTES):
                    with self.lend(slab.tensor) as data:
                        np.copyto(row[slab.start : slab.start + slab.nbytes], np.frombuffer(data, np.uint8))

    def _read_together(self, requests: Sequence[Request]) -> None:
        """Small ones, as many at a time as go into a block."""
        for device, own in self._by_device((request.tensor, request) for request in requests).items():
            for group in _groups([tensor.nbytes for tensor, _ in own], BLOCK_NBYTES):
                members = own[group]
                total = sum(tensor.nbytes for tensor, _ in members)
                with self._turns:
                    (block,) = POOL.lend(1)
                    try:
                        lane = self.memory.lane(device)
                        with torch.no_grad(), lane.on():
                            self._join([tensor for tensor, _ in members], block.tensor[:total])
                            mark = lane.mark()
                        mark.synchronize()
                        at = 0
                        for tensor, request in members:
                            with _in_c_order(request.out) as row:
                                row[...] = block.array[at : at + tensor.nbytes]
                            at += tensor.nbytes
                    finally:
                        POOL.take_back([block])

    def copy_later(self, wanted: Sequence[tuple[LazyTensor, int]], room: torch.Tensor) -> list[Mark]:
        """Start to copy tensors, in C order, each to its place in a room of page-locked memory. The callers' streams wait for that.

        Places ascend. Fewer than `PADDING_NBYTES` between two of them are nobody's, and may be written to. Gives back marks of
        where the copies end.
        """
        marks = []
        for device, pairs in self._by_device(wanted).items():
            lane = self.memory.lane(device)
            with torch.no_grad(), lane.on():
                for group in _neighbours([(place, tensor.nbytes) for tensor, place in pairs]):
                    members = pairs[group]
                    begin, end = members[0][1], members[-1][1] + members[-1][0].nbytes
                    self._join([tensor for tensor, _ in members], room[begin:end], [place - begin for _, place in members])
            marks.append(lane.hold_caller())
        return marks

    def _by_device(self, pairs: Iterable[tuple[LazyTensor, T]]) -> dict[torch.device, list[tuple[LazyTensor, T]]]:
        found: dict[torch.device, list[tuple[LazyTensor, T]]] = {}
        for tensor, other in pairs:
            found.setdefault(self._device(tensor), []).append((tensor, other))
        return found

    def _join(self, tensors: Sequence[LazyTensor], out: torch.Tensor, places: Sequence[int] | None = None) -> None:
        """Start one copy of several tensors of one device, behind each other or at these places."""
        if len(tensors) == 1:
            self._start(tensors[0], out)
            return
        rows = [self._octets(tensor) for tensor in tensors]
        if places is not None:
            ends = [place + tensor.nbytes for place, tensor in zip(places, tensors, strict=True)]
            rows = list(_padded(rows, [place - end for place, end in zip(places, (0, *ends), strict=False)]))
        # Laid behind each other on the device, which then belongs to the side stream, and is used again behind this copy.
        out.copy_(torch.cat(rows), non_blocking=True)

    def _fetch(self, tensor: LazyTensor, block: HostBlock) -> memoryview:
        self._copy(tensor, block.tensor[: tensor.nbytes]).synchronize()
        return block.array.data[: tensor.nbytes]

    def _copy(self, tensor: LazyTensor, out: torch.Tensor) -> Mark:
        lane = self.memory.lane(self._device(tensor))
        with torch.no_grad(), lane.on():
            self._start(tensor, out)
            return lane.mark()

    def _device(self, tensor: LazyTensor) -> torch.device:
        return self.memory.flat(tensor.chunks[0].storage.key).device

    def octets(self, tensors: Sequence[LazyTensor]) -> Iterator[torch.Tensor]:
        """The bytes of tensors in C order, where they are, one after the other on the caller's stream."""
        for tensor in tensors:
            with torch.no_grad():
                yield self._octets(tensor)

    def _start(self, tensor: LazyTensor, out: torch.Tensor) -> None:
        # What is made on the way belongs to the side stream, and is used again behind this copy.
        out.copy_(self._octets(tensor), non_blocking=True)

    def _octets(self, tensor: LazyTensor) -> torch.Tensor:
        place = contiguous_bytes(tensor)
        if place is not None:
            row = self.memory.flat(place[0])
            return row if len(row) == tensor.nbytes else row[place[1] : place[1] + tensor.nbytes]
        return flat(self._value(tensor).contiguous()).view(torch.uint8)

    def _value(self, tensor: LazyTensor) -> torch.Tensor:
        """The elements of a tensor on its device, conjugated and negated as they are meant to be."""
        traits = tensor.traits
        dtype = torch_dtype(tensor.dtype) if traits.conj or traits.neg else carrier_dtype(tensor.dtype.numpy.itemsize)
        views = [self._view(chunk, dtype) for chunk in tensor.chunks]
        if len(views) == 1 and tensor.chunks[0].shape == tensor.shape:
            (value,) = views
        else:
            value = torch.empty(tensor.shape, dtype=dtype, device=views[0].device)
            for chunk, view in zip(tensor.chunks, views, strict=True):
                value[chunk.box.slices] = view
        value = value.conj().resolve_conj() if traits.conj else value
        return value.neg() if traits.neg else value

    def _view(self, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        bits = dtype.itemsize * 8
        offset = chunk.offset
        backwards = [d for d, stride in enumerate(chunk.strides) if stride < 0]
        for d in backwards:
            offset += (chunk.shape[d] - 1) * chunk.strides[d]
        if offset % bits or any(stride % bits for stride in chunk.strides):
            raise Unsupported("elements on a GPU that do not begin at a multiple of their size")
        memory = self.memory.flat(chunk.storage.key)
        strides = [abs(stride) // bits for stride in chunk.strides]
        made = torch.empty(0, dtype=dtype, device=memory.device).set_(
            memory.untyped_storage(), offset // bits, chunk.shape, strides
        )
        return made.flip(backwards) if backwards else made


@contextmanager
def _in_c_order(out: np.ndarray) -> Iterator[np.ndarray]:
    """The bytes of an array in C order, to be written; where they lie otherwise they are put there at the end."""
    made = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
    yield byte_row(made)
    if made is not out:
        out[...] = made


def _groups(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Stretches of these that are no longer than `most` together, or one by itself."""
    first = total = 0
    for number, nbytes in enumerate(sizes):
        if number > first and total + nbytes > most:
            yield slice(first, number)
            first, total = number, 0
        total += nbytes
    if sizes:
        yield slice(first, len(sizes))


def _padded(rows: Sequence[torch.Tensor], gaps: Sequence[int]) -> Iterator[torch.Tensor]:
    """Rows of bytes of one device, each behind so many zeros."""
    zeros = torch.zeros(PADDING_NBYTES, dtype=torch.uint8, device=rows[0].device) if any(gaps) else None
    for row, gap in zip(rows, gaps, strict=True):
        if gap and zeros is not None:
            yield zeros[:gap]
        yield row


def _neighbours(places: Sequence[tuple[int, int]]) -> Iterator[slice]:
    """Stretches of places (and lengths) that are filled by one copy: short ones, close to each other, at most a block of them."""
    first, begin, end = 0, 0, 0
    for number, (place, nbytes) in enumerate(places):
        joined = number > first and 0 <= place - end < PADDING_NBYTES and place + nbytes - begin <= BLOCK_NBYTES
        if number and not (joined and nbytes <= SHORT_NBYTES and places[first][1] <= SHORT_NBYTES):
            yield slice(first, number)
            first = number
        if number == first:
            begin = place
        end = place + nbytes
    if places:
        yield slice(first, len(places))
