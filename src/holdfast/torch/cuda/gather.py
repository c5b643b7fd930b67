"""Tensors on a GPU to page-locked memory: saves, reads and staging all copy this way.

    device   a   b   c   …            each where it is
             │ a │ b │ c │ … │        one kernel, on the side stream
    memory   │ a │ b │ c │ … │        one copy

To copy a small tensor by itself takes a call into CUDA, and its bytes take a thousandth of that. So short neighbours are laid
behind each other on the device, by one kernel for hundreds of them, and cross the bus as one. A long one is copied by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter

import numpy as np
import torch

from holdfast.core.arrays import Ints
from holdfast.engine.threads import run_all
from holdfast.torch.cuda.streams import CopyStream

DTYPE = attrgetter("dtype")

SHORT_NBYTES = 1 << 20
"""Tensors up to this length cross the bus together with others."""

PADDING_NBYTES = 64
"""More than this between two places ends a copy. What is less is nobody's, and is filled with zeros."""

GATHER_NBYTES = 64 << 20
"""Bytes that are laid behind each other on a GPU at a time."""

THREADS = 4
"""Threads that start copies. To lay thousands of tensors behind each other keeps a core busy for milliseconds, without the
interpreter lock."""


def gather(
    tensors: Callable[[int, int], Sequence[torch.Tensor]], starts: Ints, nbytes: Ints, room: torch.Tensor, stream: CopyStream
) -> None:
    """Start to copy tensors of one device, each to its place in a room of page-locked memory.

    Places ascend. `tensors` gives those of some places: all bytes of each are wanted, in the order of its elements. It is asked on
    the side stream, so what it makes on the device is used again behind the copy.
    """
    stops = starts + nbytes
    gaps = starts[1:] - stops[:-1]

    def copy(first: int, stop: int) -> None:
        with torch.no_grad(), stream.on():
            joined = _joined(tensors(first, stop), gaps[first : stop - 1])
            room[int(starts[first]) : int(stops[stop - 1])].copy_(joined, non_blocking=True)

    run_all([partial(copy, *stretch) for stretch in _stretches(starts, stops)], THREADS)


def _stretches(starts: Ints, stops: Ints) -> list[tuple[int, int]]:
    """Ranges of neighbours that are copied together; a long one is copied by itself."""
    first, found = 0, list[tuple[int, int]]()
    long = stops - starts > SHORT_NBYTES
    breaks = np.flatnonzero(long[1:] | long[:-1] | (starts[1:] - stops[:-1] >= PADDING_NBYTES))
    for stop in [*(breaks + 1).tolist(), len(starts)]:
        while first < stop:
            last = min(max(int(np.searchsorted(stops, starts[first] + GATHER_NBYTES, side="right")), first + 1), stop)
            found.append((first, last))
            first = last
    return found


def _joined(tensors: Sequence[torch.Tensor], gaps: Ints) -> torch.Tensor:
    """The bytes of tensors of one device behind each other, with so many zeros between them."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1).view(torch.uint8)
    rows = list(tensors) if len({*map(DTYPE, tensors)}) == 1 else [t.reshape(-1).view(torch.uint8) for t in tensors]
    if gaps.any():
        zeros = torch.zeros(PADDING_NBYTES, dtype=torch.uint8, device=rows[0].device).view(rows[0].dtype)
        width = rows[0].element_size()
        rows = [rows[0], *(one for gap, row in zip(gaps.tolist(), rows[1:], strict=True) for one in (zeros[: gap // width], row))]
    # One call, without the interpreter lock, for what `torch.cat` wants flat.
    return torch._C._nn.flatten_dense_tensors(rows).view(torch.uint8)
