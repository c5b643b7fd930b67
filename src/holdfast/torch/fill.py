"""Fill torch tensors with the elements of lazy ones, without a second copy of them.

1. A target on the CPU with the dtype of the file is memory like any other: the engine reads straight into it, all of them in one
   batch, so that they are read in parallel and neighbouring reads are joined.
2. Everything else (another dtype, another device, a target that overlaps one before it) passes through two blocks of scratch,
   as many pieces at a time as fit: while one block is cast and copied, the other one is read into.

         file ──► block 0 ──► cast, copy ──► target
         file ──► block 1 ──► …

Checksums are compared in both ways; in the second, blocks of one storage are collected until all have passed by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk
from holdfast.core.protocols import Request, Source
from holdfast.core.tensor import PLAIN, LazyTensor
from holdfast.engine.checks import Checks, whole_storages
from holdfast.engine.execute import execute
from holdfast.engine.source import OpenSource
from holdfast.torch.tensors import array_of, carrier_dtype, torch_dtype

__all__ = ["SCRATCH_NBYTES", "Fill", "fill"]

SCRATCH_NBYTES = 64 << 20
"""Both blocks together."""

ALIGNMENT = 64
"""Pieces in a block begin at multiples of this, so that any dtype can look at them and copies run at full speed."""

STEP_NBYTES = 256 << 20
"""What is read between two reports of progress."""

NO_ARRAY = np.empty(0, np.uint8)

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """A lazy tensor, and the torch tensor of its shape that shall have its elements."""

    lazy: LazyTensor
    target: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A piece of a fill that fits into a block of scratch."""

    lazy: LazyTensor
    target: torch.Tensor
    conj: bool
    neg: bool


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Parts that are in a block together, and where in it the elements of each are."""

    parts: list[Part]
    values: list[torch.Tensor]
    block: int

    def requests(self) -> list[Request]:
        return [
            Request(part.lazy, array_of(value, part.lazy.dtype)) for part, value in zip(self.parts, self.values, strict=True)
        ]


def fill(fills: Sequence[Fill], progress: Progress | None = None) -> None:
    """Fill every target. Where targets overlap, the last one wins. Raises the first error that reading meets."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        direct, staged = _sorted_out([f for f in fills if f.lazy.size])
        _read_in_place(direct, progress)
        _read_through_scratch(staged, progress)
    if direct:
        # The memory was written behind torch's back; autograd must know that saved tensors are not what they were.
        torch.autograd.graph.increment_version([f.target for f in direct])


def _sorted_out(fills: list[Fill]) -> tuple[list[Fill], list[Fill]]:
    """Those that can be read straight into their targets, and the others."""
    behind = _overlapping(fills)
    direct, staged = list[Fill](), list[Fill]()
    for number, one in enumerate(fills):
        target = one.target
        same = target.is_cpu and target.dtype == torch_dtype(one.lazy.dtype) and not target.is_conj() and not target.is_neg()
        (direct if same and number not in behind else staged).append(one)
    return direct, staged


def _overlapping(fills: list[Fill]) -> set[int]:
    """Numbers of the fills whose targets reach into the memory of one before them; those that only lie between count, too."""
    spans = []
    for number, one in enumerate(fills):
        if one.target.is_cpu:
            start = one.target.data_ptr()
            reach = sum((n - 1) * s for n, s in zip(one.target.shape, one.target.stride(), strict=True)) + 1
            spans.append((start, start + reach * one.target.element_size(), number))
    behind: set[int] = set()
    end, first = 0, -1
    for start, stop, number in sorted(spans):
        if start < end:
            # Of all that hang together, the one that comes first may begin; the others wait, and keep their order.
            behind.add(max(number, first))
            first = min(number, first)
        else:
            first = number
        end = max(end, stop)
    return behind


def _read_in_place(fills: list[Fill], progress: Progress | None) -> None:
    by_source: dict[int, tuple[Source, list[Request]]] = {}
    for one in fills:
        lazy, array = _in_file_order(one)
        by_source.setdefault(id(lazy.source), (lazy.source, []))[1].append(Request(lazy, array))
    for source, requests in by_source.values():
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
    """The tensor and its target, both turned so that the target is in C order where it can be: then it is read in one piece."""
    array = array_of(one.target, one.lazy.dtype)
    if array.flags.c_contiguous:
        return one.lazy, array
    order = sorted(range(array.ndim), key=lambda d: -array.strides[d])
    return one.lazy.permute(*order), array.transpose(order)


def _read_through_scratch(fills: list[Fill], progress: Progress | None) -> None:
    by_source: dict[int, list[Fill]] = {}
    for one in fills:
        by_source.setdefault(id(one.lazy.source), []).append(one)
    if not by_source:
        return
    blocks = Blocks(pinned=any(one.target.is_cuda for one in fills))
    # One thread that has the engine read; this one casts and copies meanwhile, with all of torch's threads.
    with ThreadPoolExecutor(1, thread_name_prefix="holdfast-fill") as reader:
        for members in by_source.values():
            source = members[0].lazy.source
            checks = _checks(source, members)
            before: Batch | None = None
            for parts in _batches((part for one in members for part in _parts(one, blocks.nbytes)), blocks.nbytes):
                batch = blocks.hold(parts)
                reading = reader.submit(_read, source, batch.requests(), checks)
                try:
                    if before is not None:
                        _put(before, blocks, progress)
                finally:
                    reading.result()
                before = batch
            if before is not None:
                _put(before, blocks, progress)
            checks.finish()
    blocks.wait()


def _checks(source: Source, fills: list[Fill]) -> Checks:
    verify = isinstance(source, OpenSource) and source.verify
    return Checks(whole_storages([Request(one.lazy, NO_ARRAY) for one in fills]) if verify else {})


def _read(source: Source, requests: list[Request], checks: Checks) -> None:
    if isinstance(source, OpenSource):
        # Not `source.read`: it would compare the checksum of what is whole in these requests, and a large storage never is.
        execute(source.plan(requests), source.store, source.threads, checks)
    else:
        source.read(requests)


def _parts(one: Fill, most: int) -> Iterator[Part]:
    """Cut a fill along its chunks, and each chunk into boxes that fit into `most` bytes and are in one piece in the file."""
    traits = one.lazy.traits
    for chunk in one.lazy.chunks:
        order = sorted(range(chunk.box.rank), key=lambda d: -chunk.strides[d])
        shape = tuple(chunk.shape[d] for d in order)
        moved = Chunk(Box.whole(shape), chunk.storage, chunk.offset, tuple(chunk.strides[d] for d in order))
        lazy = replace(one.lazy, shape=shape, chunks=(moved,), traits=PLAIN)
        target = (one.target[chunk.box.slices] if chunk.box.rank else one.target).permute(order)
        for box in _boxes(shape, most // lazy.dtype.numpy.itemsize):
            yield Part(lazy[box] if box else lazy, target[box] if box else target, traits.conj, traits.neg)


def _boxes(shape: tuple[int, ...], most: int) -> Iterator[tuple[slice, ...]]:
    """Boxes of at most `most` elements, in C order, that make up a shape.

    >>> list(_boxes((2, 3), 4))
    [(slice(0, 1, None), slice(0, 3, None)), (slice(1, 2, None), slice(0, 3, None))]
    """
    if math.prod(shape) <= most:
        yield tuple(slice(0, n) for n in shape)
        return
    row = math.prod(shape[1:])
    rows = max(1, most // row)
    for start in range(0, shape[0], rows):
        outer = slice(start, min(start + rows, shape[0]))
        if row <= most:
            yield (outer, *(slice(0, n) for n in shape[1:]))
        else:
            yield from ((outer, *inner) for inner in _boxes(shape[1:], most))


def _batches(parts: Iterator[Part], most: int) -> Iterator[list[Part]]:
    batch: list[Part] = []
    room = most
    for part in parts:
        need = _room(part.lazy)
        if batch and need > room:
            yield batch
            batch, room = [], most
        batch.append(part)
        room -= need
    if batch:
        yield batch


def _room(lazy: LazyTensor) -> int:
    return -(-lazy.size * lazy.dtype.numpy.itemsize // ALIGNMENT) * ALIGNMENT


def _put(batch: Batch, blocks: Blocks, progress: Progress | None) -> None:
    """Copy elements out of scratch."""
    for part, value in zip(batch.parts, batch.values, strict=True):
        _copy(part, value)
    blocks.mark(batch)
    if progress is not None:
        progress(sum(part.lazy.nbytes for part in batch.parts))


def _copy(part: Part, value: torch.Tensor) -> None:
    """To the device first, so that a cast happens there."""
    target = part.target
    if not target.is_cpu:
        value = value.to(target.device, non_blocking=target.is_cuda)
    value = value.conj() if part.conj else value
    value = value.neg() if part.neg else value
    if value.dtype == target.dtype and not (value.is_conj() or target.is_conj() or target.is_neg()):
        # As integers of the same width: there are dtypes that torch cannot copy.
        carrier = carrier_dtype(target.element_size())
        target, value = target.view(carrier), value.view(carrier)
    target.copy_(value)


class Blocks:
    """Two blocks of scratch memory in turn; one is not handed out again before what was copied from it has arrived."""

    def __init__(self, *, pinned: bool) -> None:
        self.nbytes = SCRATCH_NBYTES // 2
        self._pinned = pinned
        self._memory: list[torch.Tensor] = []
        self._marks: list[list[torch.cuda.Event]] = [[], []]
        self._turn = 1

    def hold(self, parts: list[Part]) -> Batch:
        """Room for these parts, together, in the next block."""
        self._turn = 1 - self._turn
        if len(self._memory) <= self._turn:
            self._memory.append(torch.empty(self.nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned))
        self._wait(self._turn)
        values, at = [], 0
        for part in parts:
            nbytes = part.lazy.size * part.lazy.dtype.numpy.itemsize
            flat = self._memory[self._turn][at : at + nbytes]
            values.append(flat.view(torch_dtype(part.lazy.dtype)).view(part.lazy.shape))
            at += _room(part.lazy)
        return Batch(parts, values, self._turn)

    def mark(self, batch: Batch) -> None:
        """All copies out of the block of a batch have been asked for."""
        for device in {part.target.device for part in batch.parts}:
            if device.type == "cuda":
                self._marks[batch.block].append(torch.cuda.current_stream(device).record_event())

    def wait(self) -> None:
        """Wait for both blocks."""
        self._wait(0)
        self._wait(1)

    def _wait(self, turn: int) -> None:
        for event in self._marks[turn]:
            event.synchronize()
        self._marks[turn].clear()
