"""Small storages on GPUs for a save: gathered on the device, and across the bus as one.

    device   a   b   c   …            each where it is
             │ a │ b │ c │ … │        one kernel, on the side stream
    block    │ a │ b │ c │ … │        one copy; page-locked
             views of it              what is asked for; with the last one the block goes back to the pool

Tensors of one dtype that are all of their storages are gathered as they are. Of others the bytes are, and the views for that are
made by one thread, all at once: made by the writers, each call into torch would wait for the interpreter lock.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter

import torch

from holdfast.core.runtime import renewed
from holdfast.plan.saves import Data
from holdfast.torch.cuda.host import BLOCK_NBYTES, POOL
from holdfast.torch.cuda.memory import GpuMemory, GpuSource
from holdfast.torch.cuda.streams import lanes

DEVICE = attrgetter("device")


class GpuStorages:
    """The bytes of storages on GPUs, by their numbers. Made on the thread whose stream wrote them."""

    def __init__(self, tensors: Mapping[int, torch.Tensor], nbytes: Sequence[int], *, alike: bool = False) -> None:
        """`tensors`: one over each storage; `nbytes` of the storages. `alike`: all are of one dtype, and each is all of its storage
        in C order."""
        self._nbytes, self._tensors = nbytes, tensors
        self._lanes = lanes({*map(DEVICE, tensors.values())})
        self._source = GpuSource(GpuMemory(self._lanes.__getitem__))
        self._making = renewed(threading.Lock())
        self._flat: Mapping[int, torch.Tensor] | None = tensors if alike else None

    @property
    def _rows(self) -> Mapping[int, torch.Tensor]:
        """What is gathered. Views are made by whoever reads first, all of them: a save that copies its tensors reads none."""
        with self._making:
            if self._flat is None:
                with torch.no_grad():
                    self._flat = {number: _all_bytes(tensor, self._nbytes[number]) for number, tensor in self._tensors.items()}
            return self._flat

    def read(self, numbers: Sequence[int]) -> list[memoryview]:
        """The bytes of storages of these numbers."""
        if len(self._lanes) == 1:
            return self._fetch(next(iter(self._lanes)), numbers) if numbers else []
        pieces: dict[int, memoryview] = {}
        for device in self._lanes:
            own = [number for number in numbers if self._tensors[number].device == device]
            if own:
                pieces.update(zip(own, self._fetch(device, own), strict=True))
        return [pieces[number] for number in numbers]

    def alone(self, number: int, label: str) -> Data:
        """Those of one, in blocks."""
        return Data(self._source.bytes_of(self._tensors[number].untyped_storage(), label), label)

    def _fetch(self, device: torch.device, numbers: Sequence[int]) -> list[memoryview]:
        edges = [*accumulate([self._nbytes[number] for number in numbers], initial=0)]
        known = self._rows
        rows = [known[number] for number in numbers]
        (block,) = POOL.lend(1, max(edges[-1], BLOCK_NBYTES))
        lane = self._lanes[device]
        try:
            lane.follow()
            with torch.no_grad(), lane.on():
                # Laid behind each other on the device, which then belongs to the side stream, and is used again behind this copy.
                # One call, without the interpreter lock, for what `torch.cat` wants flat.
                joined = torch._C._nn.flatten_dense_tensors(rows)
                block.tensor[: edges[-1]].copy_(joined.view(torch.uint8), non_blocking=True)
                mark = lane.mark()
            mark.synchronize()
        except BaseException:
            POOL.take_back([block])
            raise
        lent = block.array[: edges[-1]]
        # Nobody says when he has done with the views; they keep this array.
        weakref.finalize(lent, POOL.take_back, [block]).atexit = False
        memory = lent.data
        return [memory[begin:end] for begin, end in pairwise(edges)]


def _all_bytes(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """All bytes of a tensor's storage, where they are."""
    count, rest = divmod(nbytes, tensor.element_size())
    if rest:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    if tensor.dim() and tensor.numel() == count and tensor.is_contiguous():
        # One call where the others take two.
        return tensor.view(torch.uint8)
    return tensor.as_strided((count,), (1,), 0).view(torch.uint8)
