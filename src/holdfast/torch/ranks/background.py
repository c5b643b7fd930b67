"""Saving while training goes on: `async_save_sharded`.

    caller            │ describe, copy what this rank has │ trains on …
    background thread │                                   │ plan together, write, fsync, publish together │
    handle                                         staged ┘                                       durable ┘

1. What this rank has is copied into buffers that are kept from save to save; after that the caller may change its tensors. It waits
   for no other rank. Only where much is replicated, and would be copied by all, the plan comes first, and each copies its share.
   GPUs copy by themselves, and the caller's streams wait for that, not the caller (cuda/stage.py).
   Autograd's version counters are compared before and after: a tensor that was changed meanwhile would be torn, and is an error.
2. The thread talks to the other ranks through the store, never through a collective, so it cannot meet the training's.
3. One save at a time: the next one waits, or is refused, as asked. SIGTERM and the end of the program wait for the save that is
   under way (handles.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from holdfast.core.forks import renewed
from holdfast.core.protocols import Request
from holdfast.core.tensor import LazyTensor
from holdfast.engine.arrays import Resident
from holdfast.engine.source import OpenSource
from holdfast.engine.threads import start
from holdfast.errors import NotCommitted
from holdfast.torch.cuda.host import HostBlock
from holdfast.torch.cuda.memory import GpuSource
from holdfast.torch.cuda.stage import ROOM, Copies
from holdfast.torch.ranks.handles import SaveHandle, ending, fail, forget, succeed, watch
from holdfast.torch.ranks.saving import SavedShards, ShardedSave
from holdfast.torch.ranks.shards import is_sharded, shards_of

__all__ = ["SaveHandle", "Staged", "begin", "busy", "give_back", "stage", "versions"]

ALIGNMENT = 64


_one_at_a_time = renewed(threading.Lock())


def busy(when_busy: Literal["wait", "refuse"], path: str) -> None:
    """Take the turn; the thread that ends the save gives it back."""
    if not _one_at_a_time.acquire(blocking=when_busy == "wait"):
        raise NotCommitted("another save is still being written; wait for its handle, or pass when_busy='wait'", file=path)


def give_back() -> None:
    """End the turn."""
    if _one_at_a_time.locked():  # not in a fork of the one who took it
        _one_at_a_time.release()


def versions(state: object) -> list[tuple[torch.Tensor, int]]:
    """The tensors in a state, each with the count of changes that autograd keeps; of sharded ones also their local parts.

    An operator on a DTensor counts for the DTensor, one on its local part for that. What torch 2.13 does to DTensors with one
    kernel for many (`foreach`, `fused`) is not counted: a thread that steps such an optimizer while another saves is not noticed.
    """
    found: list[tuple[torch.Tensor, int]] = []
    for leaf in _tensors(state):
        parts = [part.tensor for part in shards_of(leaf).parts] if is_sharded(leaf) else []
        found += [(t, t._version) for t in (leaf, *parts) if isinstance(t, torch.Tensor) and not t.is_inference()]
    return found


def _tensors(value: object) -> Iterable[object]:
    if isinstance(value, torch.Tensor) or is_sharded(value):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


@dataclass(frozen=True, slots=True)
class Staged:
    """Tensors in memory of our own."""

    tensors: list[LazyTensor]
    nbytes: int
    copies: Copies
    """Those out of GPUs, which are waited for before anything is written."""


def stage(
    tensors: Sequence[LazyTensor],
    before: list[tuple[torch.Tensor, int]],
    path: str,
    *,
    threads: int,
    max_host_memory: int | None = None,
) -> Staged:
    """Copy tensors into our own memory, in parallel; nothing may change meanwhile. Those without bytes stay what they are."""
    resident = Resident()
    places, total = [], 0
    for tensor in tensors:
        total += -total % ALIGNMENT
        places.append(total)
        total += tensor.nbytes
    gpu = any(isinstance(tensor.source, GpuSource) for tensor in tensors)
    room = ROOM.take(total, gpu=gpu, max_host_memory=max_host_memory)
    copies = Copies(room)
    outs: list[np.ndarray | None] = []
    by_source: dict[int, tuple[LazyTensor, list[Request]]] = {}
    for tensor, place in zip(tensors, places, strict=True):
        if tensor.dtype.packed or not tensor.nbytes:
            # Packed elements are never in the caller's memory: numpy and torch have none, so they come from an open checkpoint.
            outs.append(None)
            continue
        out = room.array[place : place + tensor.nbytes].view(tensor.dtype.numpy).reshape(tensor.shape)
        by_source.setdefault(id(tensor.source), (tensor, []))[1].append(Request(tensor, out))
        outs.append(out)
    try:
        # GPUs first: they copy by themselves while the rest is copied here.
        for tensor, requests in sorted(by_source.values(), key=lambda found: not isinstance(found[0].source, GpuSource)):
            if isinstance(tensor.source, GpuSource):
                copies.begin(tensor.source, requests)
            else:
                source = tensor.source
                if isinstance(source, OpenSource) and source.store.resident:
                    source = source.over(source.store, threads=threads)  # this rank shares the machine with others
                source.read(requests)
        staged = [t if out is None else _moved(t, out, resident, room) for t, out in zip(tensors, outs, strict=True)]
        torn = sum(tensor._version != version for tensor, version in before)
        if torn:
            raise NotCommitted(f"{torn} tensors were changed while they were copied for the save; nothing was written", file=path)
    except BaseException:
        copies.wait()
        raise
    return Staged(staged, total, copies)


def _moved(tensor: LazyTensor, out: np.ndarray, resident: Resident, room: HostBlock) -> LazyTensor:
    """The same tensor, with its elements where they were copied to."""
    memory = resident.memory(out.__array_interface__["data"][0], out.reshape(-1).view(np.uint8).data, owner=room)
    return resident.strided(memory, tensor.dtype, tensor.shape, out.strides, 0).renamed(tensor.name)


def begin(saving: ShardedSave) -> SaveHandle:
    """Plan, write and publish on a thread of its own; on this one where none can start, or the program is at its end.

    The turn was taken before, and ends with the save.
    """
    handle = SaveHandle(saving.path)

    def run() -> None:
        if not saving.claim():
            return
        saved: SavedShards | None = None
        failed: BaseException | None = None
        try:
            saving.plan()
            saved = saving.write()
        except BaseException as error:
            failed = error
        try:
            saving.close()
        except BaseException as error:
            failed = failed or error
        give_back()
        # Last: whoever waits may end the process, for whose store the others may still have use, or save again.
        if saved is not None and failed is None:
            succeed(handle, saved)
        else:
            assert failed is not None
            fail(handle, failed)

    try:
        watch(handle)
        # No daemon: Python waits for it at the end of the program.
        if ending() or start(run, name="holdfast-save", daemon=False) is None:
            run()
            interrupt = handle._future.exception()
            if interrupt is not None and not isinstance(interrupt, Exception):
                raise interrupt
    except BaseException:
        # Ctrl-C while it started: either the thread has it and goes on, or nobody ever will.
        if saving.claim():
            forget(handle)
            saving.close()
            give_back()
        raise
    return handle
