"""Small storages on GPUs for a save that writes rows (`plan.rows`): gathered on the device, and across the bus as one.

    device   a   b   c   …            each where it is
             │ a │ b │ c │ … │        one kernel, on the side stream
    block    │ a │ b │ c │ … │        one copy; page-locked
             views of it              what is asked for; with the last one the block goes back to the pool

The views of the storages are made beforehand, by one thread: made by sixteen writers, each call into torch would wait for the
interpreter lock.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from holdfast.plan.saves import Data
from holdfast.torch.cuda.host import BLOCK_NBYTES, POOL
from holdfast.torch.cuda.memory import GpuMemory, GpuSource
from holdfast.torch.cuda.streams import lanes

__all__ = ["GpuRows"]


class GpuRows:
    """The bytes of storages on GPUs, by their numbers. Made on the thread whose stream wrote them."""

    def __init__(self, tensors: Mapping[int, torch.Tensor], nbytes: Sequence[int]) -> None:
        """`tensors`: one over each storage; `nbytes` of the storages."""
        with torch.no_grad():
            self._octets = {number: _octets(tensor, nbytes[number]) for number, tensor in tensors.items()}
        self._lanes = lanes({octets.device for octets in self._octets.values()})
        self._source = GpuSource(GpuMemory(self._lanes.__getitem__))

    def read(self, numbers: Sequence[int]) -> list[memoryview]:
        """The bytes of storages of these numbers."""
        pieces: dict[int, memoryview] = {}
        for device in self._lanes:
            own = [number for number in numbers if self._octets[number].device == device] if len(self._lanes) > 1 else numbers
            if own:
                pieces.update(zip(own, self._fetch(device, [self._octets[number] for number in own]), strict=True))
        return [pieces[number] for number in numbers]

    def alone(self, number: int, label: str) -> Data:
        """Those of one, in blocks."""
        return Data(self._source.bytes_of(self._octets[number].untyped_storage(), label), label)

    def _fetch(self, device: torch.device, rows: list[torch.Tensor]) -> list[memoryview]:
        edges = [*accumulate(map(len, rows), initial=0)]
        (block,) = POOL.lend(1, max(edges[-1], BLOCK_NBYTES))
        lane = self._lanes[device]
        try:
            lane.follow()
            with torch.no_grad(), lane.on():
                # Laid behind each other on the device, which then belongs to the side stream, and is used again behind this copy.
                block.tensor[: edges[-1]].copy_(torch.cat(rows), non_blocking=True)
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


def _octets(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """All bytes of a tensor's storage, where they are."""
    count, rest = divmod(nbytes, tensor.element_size())
    if rest:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    # A third of the time that the other takes.
    return tensor.as_strided((count,), (1,), 0).view(torch.uint8)
