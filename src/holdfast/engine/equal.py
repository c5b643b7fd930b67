"""Are these pairs of tensors the same, byte for byte? For those whose bytes lie in one piece, at the speed of reading them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from holdfast.core.digest import canonical
from holdfast.core.tensor import LazyTensor
from holdfast.engine.blocks import contiguous_bytes
from holdfast.engine.checksums import Progress
from holdfast.engine.threads import default_threads, run_all
from holdfast.errors import located

__all__ = ["same_bytes"]

BLOCK_NBYTES = 2 << 20
"""Bytes of each side at a time; small tensors are taken together until they are as many."""

Pair = tuple[LazyTensor, LazyTensor]
Part = tuple[int, int, int]
"""A pair's number, and bytes of its tensors in C order: start, stop."""


def same_bytes(pairs: Sequence[Pair], progress: Progress | None = None, *, threads: int | None = None) -> list[bool]:
    """Whether each pair has one dtype, one shape and the same bytes.

    False also where that cannot be told without looking at elements: strides, pieces, byte orders. Progress is told of pairs
    that turn out to be the same; whoever reads the others again counts those.
    """
    comparable = [_comparable(pair) for pair in pairs]
    left = [0] * len(pairs)
    lock = threading.Lock()
    own = threading.local()

    def task(parts: list[Part]) -> Callable[[], None]:
        def run() -> None:
            if not hasattr(own, "scratch"):
                own.scratch = (np.empty(BLOCK_NBYTES, np.uint8), np.empty(BLOCK_NBYTES, np.uint8))
            for number, start, stop in parts:
                if not comparable[number]:
                    continue
                if not _same_part(pairs[number], start, stop, own.scratch):
                    comparable[number] = False
                    continue
                with lock:
                    left[number] -= stop - start
                    done = left[number] == 0
                if done and progress is not None:
                    progress(2 * pairs[number][0].nbytes)

        return run

    work: list[Callable[[], None]] = []
    group: list[Part] = []
    room = BLOCK_NBYTES
    for number, (a, _) in enumerate(pairs):
        left[number] = a.nbytes
        for start in range(0, a.nbytes if comparable[number] else 0, BLOCK_NBYTES):
            part = (number, start, min(start + BLOCK_NBYTES, a.nbytes))
            if group and part[2] - part[1] > room:
                work.append(task(group))
                group, room = [], BLOCK_NBYTES
            group.append(part)
            room -= part[2] - part[1]
    if group:
        work.append(task(group))
    if work:
        run_all(work, threads or default_threads())
    return comparable


def _comparable(pair: Pair) -> bool:
    a, b = pair
    if canonical(a.dtype, a.shape) != canonical(b.dtype, b.shape):
        return False
    return a.size == 0 or (contiguous_bytes(a) is not None and contiguous_bytes(b) is not None)


def _same_part(pair: Pair, start: int, stop: int, scratch: tuple[np.ndarray, np.ndarray]) -> bool:
    sides = []
    for tensor, memory in zip(pair, scratch, strict=True):
        place = contiguous_bytes(tensor)
        if place is None:
            return False
        out = memory[: stop - start]
        with located(tensor=tensor.name):
            tensor.source.store.read(place[0], place[1] + start, out.data)
        sides.append(out)
    return bool(np.array_equal(sides[0], sides[1]))
