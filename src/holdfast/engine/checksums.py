"""Read spans of files from end to end, each byte once, in parallel, for their checksums alone.

1. Spans are cut into pieces of at most a block, and pieces that follow each other in a file are joined into windows of at most a
   block: a gigabyte becomes 256 reads, and so do the hundred thousand small tensors in it.
2. A thread takes a window, reads it into scratch memory that it keeps, and takes the CRC-32 of each piece. Memory is
   `threads × block`, and stays in the caches that read and CRC share.
3. The CRCs of pieces combine to those of the spans.

Nothing stops at an error: a window that cannot be read is tried again piece by piece, and the error belongs to the spans whose
pieces fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.core.crc import Sums
from holdfast.core.protocols import Store
from holdfast.errors import HoldfastError

__all__ = ["Progress", "Span", "SpanPart", "Sweep", "windows"]

Progress = Callable[[int], None]
"""Is told how many more bytes are done; may be called from several threads at once."""

BLOCK_NBYTES = 4 << 20
"""Bytes of one read: large enough to forget the call, small enough that a few of them fit into a last-level cache."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of one file."""

    key: str
    start: int
    nbytes: int
    summed: bool = True
    """Whether the CRC is wanted; without, the bytes are read and dropped, so that errors show."""

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


@dataclass(frozen=True, slots=True)
class SpanPart:
    """A part of a span: the span's number, and where the part lies in the file."""

    span: int
    start: int
    stop: int


Window = list[SpanPart]
"""Pieces of one file, by their starts, without a gap between them, at most a block long together."""


def windows(spans: Sequence[Span], block: int = BLOCK_NBYTES) -> Iterator[Window]:
    """Cut and join spans into windows; each byte of each span is in exactly one piece."""
    window: Window = []
    key, end = "", 0
    pieces = [SpanPart(i, at, min(at + block, s.stop)) for i, s in enumerate(spans) for at in range(s.start, s.stop, block)]
    for piece in sorted(pieces, key=lambda p: (spans[p.span].key, p.start)):
        own = spans[piece.span].key
        if window and (own != key or piece.start > end or piece.stop - window[0].start > block):
            yield window
            window = []
        key, end = own, max(end, piece.stop) if window else piece.stop
        window.append(piece)
    if window:
        yield window


class Sweep:
    """The sums of spans of one store. Run every task of `tasks`, on any thread, and then ask for the outcomes."""

    def __init__(self, store: Store, spans: Iterable[Span], *, block: int = BLOCK_NBYTES) -> None:
        self._store = store
        self._spans = list(spans)
        self._block = block
        self._sums = [Sums() for _ in self._spans]
        self._errors: dict[int, HoldfastError] = {}
        self._own = threading.local()

    def tasks(self, progress: Progress | None = None) -> list[Callable[[], None]]:
        """What is to be done, a read each. They raise nothing that is about the files."""
        return [self._task(window, progress) for window in windows(self._spans, self._block)]

    def outcome(self, number: int) -> int | HoldfastError:
        """The CRC of a span (0 where it was not wanted), or what kept it from being read."""
        error = self._errors.get(number)
        return self._sums[number].crc32() if error is None else error

    def _task(self, window: Window, progress: Progress | None) -> Callable[[], None]:
        def run() -> None:
            try:
                self._read(window)
            except HoldfastError:
                for piece in window:
                    try:
                        self._read([piece])
                    except HoldfastError as error:
                        self._errors.setdefault(piece.span, error)
            if progress is not None:
                progress(max(p.stop for p in window) - window[0].start)

        return run

    def _read(self, window: Window) -> None:
        start, stop = window[0].start, max(p.stop for p in window)
        data = self._scratch()[: stop - start]
        self._store.read(self._spans[window[0].span].key, start, data)
        for piece in window:
            if self._spans[piece.span].summed:
                self._sums[piece.span].add(piece.start, data[piece.start - start : piece.stop - start])

    def _scratch(self) -> memoryview:
        scratch: memoryview | None = getattr(self._own, "scratch", None)
        if scratch is None:
            scratch = self._own.scratch = np.empty(self._block, np.uint8).data
        return scratch
