"""Fill torch tensors with the elements of lazy ones, without a second copy of them.

1. A target on the CPU with the dtype of the file is memory like any other: the engine reads straight into it, all of them in one
   batch, so that they are read in parallel and neighbouring reads are joined.
2. A target on a GPU is filled through blocks of page-locked memory, by many readers and the GPU's own copies (cuda/load.py).
3. Everything else (another dtype, another device, a target that overlaps one before it) passes through two blocks of scratch,
   as many pieces at a time as fit: while one block is cast and copied, the other one is read into.

         file ──► block 0 ──► cast, copy ──► target
         file ──► block 1 ──► …

Checksums are compared in all ways; in the last two, blocks of one storage are collected until all have passed by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from holdfast.core.chunk import repeats
from holdfast.core.protocols import Request, Source, by_source
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.beside import Beside
from holdfast.engine.checks import Checks, whole_storages
from holdfast.engine.source import OpenSource
from holdfast.errors import BadTarget
from holdfast.torch import versions
from holdfast.torch.cuda.load import load_fills
from holdfast.torch.cuda.plan import DeviceRows
from holdfast.torch.tensors.from_lazy import array_of, torch_dtype
from holdfast.torch.tensors.scratch import CastLosses, Fill, ScratchPiece, copy_values, parts_of

SCRATCH_NBYTES = 64 << 20
"""Both blocks together."""

ALIGNMENT = 64
"""Pieces in a block begin at multiples of this, so that any dtype can look at them and copies run at full speed."""

STEP_NBYTES = 256 << 20
"""What is read between two reports of progress."""

NO_ARRAY = np.empty(0, np.uint8)

Progress = Callable[[int], None]


class ScratchBatch(Value, frozen=True, eq=False):
    """Parts that are in a block together, and where in it the elements of each are."""

    parts: list[ScratchPiece]
    values: list[torch.Tensor]

    def requests(self) -> list[Request]:
        return [Request(part.lazy, array_of(value, part.lazy.dtype)) for part, value in zip(self.parts, self.values, strict=True)]


def fill(
    fills: Sequence[Fill],
    progress: Progress | None = None,
    *,
    rows: Sequence[DeviceRows] = (),
    max_host_memory: int | None = None,
) -> list[str]:
    """Fill every target. Where targets overlap, the last one wins. Raises the first error that reading meets.

    `rows` go to GPUs in the same pass as targets there.
    `max_host_memory` bounds the page-locked memory through which targets on GPUs are filled. Gives back notes for people.
    """
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        direct, on_gpu, staged = _sorted_out([f for f in fills if f.lazy.size])
        _read_in_place(direct, progress)
        losses = CastLosses()
        notes = load_fills(on_gpu, others=rows, progress=progress, most=max_host_memory, losses=losses) if on_gpu or rows else []
        _read_through_scratch(staged, progress, losses)
        notes += losses.notes()
    if direct:
        # The memory was written behind torch's back; autograd must know that saved tensors are not what they were.
        versions.mark_changed([f.target for f in direct])
    return notes


def _sorted_out(fills: list[Fill]) -> tuple[list[Fill], list[Fill], list[Fill]]:
    """Those that can be read straight into their targets, those on GPUs, and the others."""
    behind = _overlapping(fills)
    direct, on_gpu, staged = list[Fill](), list[Fill](), list[Fill]()
    for number, one in enumerate(fills):
        target = one.target
        if target.is_cuda and not target.is_contiguous() and repeats(target.shape, target.stride()):
            raise BadTarget("the target is expanded: several of its elements are one place on the GPU", tensor=one.lazy.name)
        if number in behind:
            staged.append(one)
        elif target.is_cuda:
            on_gpu.append(one)
        elif target.is_cpu and target.dtype == torch_dtype(one.lazy.dtype) and not target.is_conj() and not target.is_neg():
            direct.append(one)
        else:
            staged.append(one)
    return direct, on_gpu, staged


def _overlapping(fills: list[Fill]) -> set[int]:
    """Numbers of the fills whose targets reach into the memory of one before them; those that only lie between count, too."""
    spans = []
    for number, one in enumerate(fills):
        if one.target.is_cpu or one.target.is_cuda:
            # Addresses of GPUs and of the host are never the same.
            start, target = one.target.data_ptr(), one.target
            if target.is_contiguous():
                reach = target.numel()
            else:
                reach = sum((n - 1) * s for n, s in zip(target.shape, target.stride(), strict=True)) + 1
            spans.append((start, start + reach * target.element_size(), number))
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
    for source, requests in by_source(Request(*_in_file_order(one)) for one in fills).items():
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


def _read_through_scratch(fills: list[Fill], progress: Progress | None, losses: CastLosses) -> None:
    fills_of: dict[Source, list[Fill]] = {}
    for one in fills:
        fills_of.setdefault(one.lazy.source, []).append(one)
    if not fills_of:
        return
    blocks = Blocks()
    for source, members in fills_of.items():
        checks = _checks(source, members)
        before: ScratchBatch | None = None
        for parts in _batches((part for one in members for part in parts_of(one, blocks.nbytes)), blocks.nbytes):
            batch = blocks.hold(parts)
            # A thread that has the engine read; this one casts and copies meanwhile, with all of torch's threads.
            with Beside(partial(_read, source, batch.requests(), checks), name="holdfast-fill") as reading:
                if before is not None:
                    _put(before, progress, losses)
                reading.result()
            before = batch
        if before is not None:
            _put(before, progress, losses)
        checks.finish()


def _checks(source: Source, fills: list[Fill]) -> Checks:
    verify = isinstance(source, OpenSource) and source.verify
    return Checks(whole_storages([Request(one.lazy, NO_ARRAY) for one in fills]) if verify else {})


def _read(source: Source, requests: list[Request], checks: Checks) -> None:
    if isinstance(source, OpenSource):
        # Not `source.read`: it would compare the checksum of what is whole in these requests, and a large storage never is.
        source.carry_out(requests, checks)
    else:
        source.read(requests)


def _batches(parts: Iterator[ScratchPiece], most: int) -> Iterator[list[ScratchPiece]]:
    batch: list[ScratchPiece] = []
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


def _put(batch: ScratchBatch, progress: Progress | None, losses: CastLosses) -> None:
    """Copy elements out of scratch; to the device first, so that a cast happens there."""
    for part, value in zip(batch.parts, batch.values, strict=True):
        value = value.to(part.target.device)
        copy_values(value, part.target, conj=part.conj, neg=part.neg)
        losses.add(part.lazy.name, value, part.target)
    if progress is not None:
        progress(sum(part.lazy.nbytes for part in batch.parts))


class Blocks:
    """Two blocks of scratch memory in turn."""

    def __init__(self) -> None:
        self.nbytes = SCRATCH_NBYTES // 2
        self._memory: list[torch.Tensor] = []
        self._turn = 1

    def hold(self, parts: list[ScratchPiece]) -> ScratchBatch:
        """Room for these parts, together, in the next block."""
        self._turn = 1 - self._turn
        if len(self._memory) <= self._turn:
            self._memory.append(torch.empty(self.nbytes, dtype=torch.uint8, device="cpu"))
        values, at = [], 0
        for part in parts:
            nbytes = part.lazy.size * part.lazy.dtype.numpy.itemsize
            flat = self._memory[self._turn][at : at + nbytes]
            values.append(flat.view(torch_dtype(part.lazy.dtype)).view(part.lazy.shape))
            at += _room(part.lazy)
        return ScratchBatch(parts, values)
