"""Small storages on GPUs for a save: gathered on the device, and across the bus as one.

    device   a   b   c   …            each where it is
             │ a │ b │ c │ … │        one kernel, on the side stream
    block    │ a │ b │ c │ … │        one copy; page-locked
             views of it              what is asked for; with the last one the block goes back to the pool

Tensors of one dtype that are all of their storages are gathered as they are. Of others the bytes are, and the views for that are
made beforehand, by one thread: made by the writers, each call into torch would wait for the interpreter lock.
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


class GpuStorages:
    """The bytes of storages on GPUs, by their numbers. Made on the thread whose stream wrote them."""

    def __init__(self, tensors: Mapping[int, torch.Tensor], nbytes: Sequence[int], *, alike: bool = False) -> None:
        """`tensors`: one over each storage; `nbytes` of the storages. `alike`: all are of one dtype, and each is all of its storage
        in C order."""
        self._nbytes = nbytes
        with torch.no_grad():
            self._rows = tensors if alike else {number: _all_bytes(tensor, nbytes[number]) for number, tensor in tensors.items()}
        self._devices = {number: row.device for number, row in self._rows.items()}
        self._lanes = lanes(set(self._devices.values()))
        self._source = GpuSource(GpuMemory(self._lanes.__getitem__))

    def read(self, numbers: Sequence[int]) -> list[memoryview]:
        """The bytes of storages of these numbers."""
        if len(self._lanes) == 1:
            return self._fetch(next(iter(self._lanes)), numbers) if numbers else []
        pieces: dict[int, memoryview] = {}
        for device in self._lanes:
            own = [number for number in numbers if self._devices[number] == device]
            if own:
                pieces.update(zip(own, self._fetch(device, own), strict=True))
        return [pieces[number] for number in numbers]

    def alone(self, number: int, label: str) -> Data:
        """Those of one, in blocks."""
        return Data(self._source.bytes_of(self._rows[number].untyped_storage(), label), label)

    def _fetch(self, device: torch.device, numbers: Sequence[int]) -> list[memoryview]:
        edges = [*accumulate([self._nbytes[number] for number in numbers], initial=0)]
        rows = [self._rows[number] for number in numbers]
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
