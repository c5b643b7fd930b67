"""`Span`: a range of bytes that is looked at, wherever it lies."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.limits import Limits
from holdfast.engine.source import OpenSource
from holdfast.stores.memory import MemoryStore

__all__ = ["Span", "span_of"]


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `start` to `stop` of one file of a source."""

    source: OpenSource
    key: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def read(self, start: int, stop: int) -> bytes:
        """Bytes counted from the start of the span; fewer where it ends."""
        first, last = self.start + max(start, 0), min(self.start + stop, self.stop)
        return self.source.bytes(self.key, first, last) if last > first else b""

    def part(self, start: int, stop: int) -> Span:
        """A range of it, cut to what is there."""
        first = min(self.start + max(start, 0), self.stop)
        return Span(self.source, self.key, first, max(first, min(self.start + stop, self.stop)))


def span_of(data: bytes, limits: Limits) -> Span:
    """Bytes in memory as a span."""
    return Span(OpenSource(MemoryStore({"bytes": data}, name="<bytes>"), limits=limits, threads=1), "bytes", 0, len(data))
