"""The side stream of a device: copies run there while the caller's own stream goes on with what it has.

Three rules keep it right. The side stream begins by waiting for the stream that is current where the caller is: memory that it
writes to may still be in use by kernels there, and memory that it reads may not be written yet. Whoever hands results to the caller
either has waited for the side stream or makes the current stream wait for it. And nothing runs while the current stream is captured
into a graph, because a replay would copy from blocks that hold something else by then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch

from holdfast.core.runtime import make_fork_safe
from holdfast.errors import Refused
from holdfast.torch.cuda.pipeline import CopyEvent

_streams: dict[torch.device, torch.cuda.Stream] = {}
_lock = make_fork_safe(threading.Lock())


class CopyStream:
    """Where copies to and from a device run. This one is for devices without streams: copies are done when they return."""

    wants_locked = False
    """Whether copies from memory that is not locked are slower."""

    def follow(self) -> None:
        """Wait for what the caller's stream has been asked to do up to now."""

    def hold_caller(self) -> CopyEvent:
        """Have the caller's stream wait for what this stream has been asked to do up to now, and mark that point."""
        return _Done()

    def on(self) -> AbstractContextManager[object]:
        """A block in which work is put on this stream."""
        return nullcontext()

    def mark(self) -> CopyEvent:
        """The end of all work that the stream has been given."""
        return _Done()

    def lend(self, tensor: torch.Tensor) -> None:
        """Let the caller's stream use a tensor of this stream as well: its memory is not for others until that is over."""


class _Done:
    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Side(CopyStream):
    """The side stream of one GPU, which waits for the stream that is current now."""

    wants_locked = True

    def __init__(self, device: torch.device) -> None:
        with _lock:
            if device not in _streams:
                _streams[device] = torch.cuda.Stream(device)
            self.stream = _streams[device]
        self.current = torch.cuda.current_stream(device)
        self.follow()

    def follow(self) -> None:
        self.stream.wait_stream(self.current)

    def hold_caller(self) -> CopyEvent:
        event = self.stream.record_event()
        self.current.wait_event(event)
        return cast(CopyEvent, event)

    def on(self) -> AbstractContextManager[object]:
        return cast(AbstractContextManager[object], torch.cuda.stream(self.stream))

    def mark(self) -> CopyEvent:
        return cast(CopyEvent, self.stream.record_event())

    def lend(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.current)


def copy_streams(devices: Iterable[torch.device]) -> dict[torch.device, CopyStream]:
    found = dict.fromkeys(devices)
    refuse_capture(found)
    return {device: Side(device) if device.type == "cuda" else CopyStream() for device in found}


def refuse_capture(devices: Iterable[torch.device]) -> None:
    """Raise `Refused` while a CUDA graph is captured."""
    if (
        any(device.type == "cuda" for device in devices)
        and torch.cuda.is_current_stream_capturing()
    ):
        raise Refused(
            "a CUDA graph is being captured: a load or save cannot be a part of one; do it before or after the capture"
        )
