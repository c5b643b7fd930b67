"""Copy what a save will write out of GPUs, so that training can go on while it is written.

    caller's stream   │ … step │ wait for the copies │ step …          kernels that change tensors come behind the copies
    side stream                │ copy, copy, copy    │
    caller                     │ returns at once
    background thread          │ waits for the copies, then writes

The copies are in page-locked memory, up to `max_host_memory`, or half of what the machine has to give. The rest is ordinary memory,
filled through the blocks of the pool by several threads, and the caller waits for that part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from holdfast.core.arrays import Ints
from holdfast.core.runtime import at_fork
from holdfast.core.tensor import LazyTensor
from holdfast.engine.blocks import ContiguousBlock, split_into_blocks
from holdfast.engine.threads import DEFAULT_THREADS, run_all
from holdfast.torch.cuda.host import BLOCK_NBYTES, POOL, HostBlock, available_nbytes
from holdfast.torch.cuda.memory import GpuSource, gather
from holdfast.torch.cuda.pipeline import CopyEvent
from holdfast.torch.cuda.streams import copy_streams


class Room:
    """Memory that is kept from save to save. One save has it at a time."""

    def __init__(self) -> None:
        self._block: HostBlock | None = None
        self._wanted = 0

    def take(self, nbytes: int, *, gpu: bool, max_host_memory: int | None = None) -> HostBlock:
        """At least this many bytes, locked as far as allowed where `gpu` needs it; what was there before is gone."""
        most = available_nbytes() // 2 if max_host_memory is None else max_host_memory
        wanted = min(nbytes, most) if gpu else 0
        block = self._block
        # Asked for, and not what came of it: a machine that refused once is not asked again at every save.
        if (
            block is None
            or block.nbytes < nbytes
            or self._wanted < wanted
            or block.locked_nbytes > most
        ):
            self.free()  # given back before more is asked for
            block = self._block = HostBlock(nbytes, lock_nbytes=wanted)
            self._wanted = wanted
        return block

    def free(self) -> None:
        """Give the memory back; a save that is still under way keeps it until its end."""
        self._block, self._wanted = None, 0

    def forget(self) -> None:
        """In a fork: the memory is not mapped there, and what is locked is the parent's."""
        if self._block is not None:
            self._block.locked_nbytes = 0
        self.free()


ROOM = Room()

at_fork(after_in_child=ROOM.forget)


def free_host_memory() -> None:
    """Give back the page-locked memory that loads and saves have kept for the next one."""
    POOL.free()
    ROOM.free()


class Copies:
    """Copies out of GPUs that are under way."""

    def __init__(self, room: HostBlock) -> None:
        self._room = room
        self._marks: list[CopyEvent] = []
        self._kept: list[object] = []
        """Sources, whose tensors must not be freed before they are copied."""
        self.unlocked_nbytes = 0
        """Bytes that went to ordinary memory."""

    def begin(self, source: GpuSource, wanted: Sequence[tuple[LazyTensor, int]]) -> None:
        """Start to copy tensors, each to its place in the room. The caller's streams wait for what was started."""
        self._kept.append(source)
        work: list[Callable[[], None]] = []
        direct: list[tuple[LazyTensor, int]] = []
        for tensor, place in wanted:
            end = place + tensor.nbytes
            if end <= self._room.locked_nbytes:
                direct.append((tensor, place))
            else:
                self.unlocked_nbytes += tensor.nbytes
                flat = self._room.array[place:end]
                work += [
                    _block_task(source, piece, flat)
                    for piece in split_into_blocks(tensor, BLOCK_NBYTES)
                ]
        self._marks += source.copy_later(direct, self._room.tensor)
        if work:
            run_all(work, DEFAULT_THREADS)

    def begin_rows(
        self, device: torch.device, tensors: Sequence[torch.Tensor], starts: Ints, nbytes: Ints
    ) -> None:
        """Start to copy tensors of one device that are all of their storages in C order, each to its place in the locked part of
        the room. Places ascend. The caller's stream waits for that."""
        self._kept.append(tensors)
        (stream,) = copy_streams([device]).values()
        gather(lambda first, stop: tensors[first:stop], starts, nbytes, self._room.tensor, stream)
        self._marks.append(stream.hold_caller())

    def wait(self) -> None:
        marks, self._marks = self._marks, []
        for mark in marks:
            mark.synchronize()
        self._kept.clear()

    def notes(self) -> tuple[str, ...]:
        if not self.unlocked_nbytes:
            return ()
        return (
            f"{self.unlocked_nbytes:,} bytes went through ordinary memory: page-locked memory was not allowed, or refused",
        )


def _block_task(source: GpuSource, piece: ContiguousBlock, out: np.ndarray) -> Callable[[], None]:
    def run() -> None:
        with source.lend(piece.tensor) as data:
            np.copyto(out[piece.start : piece.start + piece.nbytes], np.frombuffer(data, np.uint8))

    return run
