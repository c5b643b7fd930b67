"""Pickles, one behind the other, at the start of some bytes: what a loader would do that was pointed there.

Any bytes can be tried. A loader that is handed what is no pickle fails before it has done anything, and so does the recording: no
global, no call, a break. What is called a pickle is what (a) says so by its first opcode, or (b) does something before it
breaks, or (c) is nothing but whole pickles.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.api.scanning.spans import Span
from holdfast.api.severity import judge
from holdfast.core.limits import Limits
from holdfast.errors import LimitExceeded
from holdfast.formats.pickle.recording import Recorded, record

__all__ = ["Row", "Stream", "read_pickle", "read_row"]

FIRST = 1 << 12
"""Bytes of a stream that are read at first; what is no pickle fails in a few of them."""

GROWTH = 8

STREAMS = 10_000
"""Pickles one behind the other that are read. torch's old container has five."""

ELISIONS = 16
"""Long texts at the start of what may be a pickle that are passed over."""

LENGTHS = {ord("B"): 4, ord("X"): 4, ord("T"): 4, 0x8D: 8, 0x8E: 8, 0x96: 8}
"""Opcodes with a length that may be large, and the bytes that it takes."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One pickle: where it begins, and what it does. Twice for one with arrays of joblib."""

    begin: int
    readings: tuple[Recorded, ...]

    @property
    def last(self) -> Recorded:
        """The reading that got furthest."""
        return next((r for r in self.readings if r.stop is not None), self.readings[-1])

    @property
    def stop(self) -> int | None:
        return None if self.last.stop is None else self.begin + self.last.stop

    @property
    def acts(self) -> bool:
        """Whether a loader would have done anything that matters by the time it is through, or fails."""
        return any(r.acts or _names_danger(r) for r in self.readings)


@dataclass(slots=True)
class Row:
    """The pickles one behind the other at the start of a span."""

    streams: list[Stream] = field(default_factory=list)
    broken: Stream | None = None
    """The one that has no end, if there is one; what is behind the others otherwise."""
    stop: int = 0
    """Behind the last whole one."""
    declared: bool = False
    """Whether the first opcode says that this is a pickle."""
    more: bool = False
    """Whether there were too many."""

    def counts(self, nbytes: int) -> bool:
        """Whether this is a pickle, as said above."""
        everything = [*self.streams, *([self.broken] if self.broken else [])]
        return self.declared or any(s.acts for s in everything) or (bool(self.streams) and self.stop == nbytes and not self._odd())

    def _odd(self) -> bool:
        return any(s.last.table.notes for s in self.streams)


def read_row(span: Span, limits: Limits) -> Row:
    """Read pickles until one breaks or the span ends."""
    head = span.read(0, 2)
    row = Row(declared=len(head) == 2 and head[0] == 0x80 and head[1] <= 5)
    while row.stop < span.nbytes:
        if len(row.streams) >= STREAMS:
            row.more = True
            break
        stream = read_pickle(span, row.stop, limits)
        if stream.stop is None:
            row.broken = stream
            break
        row.streams.append(stream)
        row.stop = stream.stop
    return row


def read_pickle(span: Span, begin: int, limits: Limits) -> Stream:
    """The pickle at one place, by pickle's reading and, where it has arrays of joblib, by joblib's as well."""
    plainly = _read(span, begin, limits, joblib=False)
    if not plainly.table.arrays:
        return Stream(begin, (plainly,))
    return Stream(begin, (_read(span, begin, limits, joblib=True), plainly))


def _read(span: Span, begin: int, limits: Limits, *, joblib: bool) -> Recorded:
    left = span.nbytes - begin
    size = min(FIRST, left)
    # One byte more than a pickle may have, so that one that is cut by the limit is told from one that ends.
    most = min(limits.pickle_nbytes + 1, left)
    while True:
        data = span.read(begin, begin + size)
        found = record(data, limits=limits, joblib=joblib)
        if not found.cut or size >= left or len(data) < size:
            return found
        need = _needed(data, found.table.reached)
        if need > left:
            return found  # beyond the end of everything: a loader breaks off there, too
        if size >= most or need > most:
            if data[:1] == b"\x80" or found.acts:
                return found if isinstance(found.error, LimitExceeded) else _too_long(found, limits)
            return _passing_over(span, begin, limits, found)
        size = min(max(size * GROWTH, need), most)


def _needed(data: bytes, at: int) -> int:
    """How far the opcode at a position reaches, where it says so."""
    width = LENGTHS.get(data[at]) if at < len(data) else None
    if width is None or at + 1 + width > len(data):
        return 0
    return at + 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")


def _too_long(found: Recorded, limits: Limits) -> Recorded:
    error = LimitExceeded(f"a pickle longer than Limits(pickle_nbytes={limits.pickle_nbytes:,})", expected=limits.pickle_nbytes)
    return Recorded(found.table, None, None, error)


def _passing_over(span: Span, begin: int, limits: Limits, found: Recorded) -> Recorded:
    """What does not say that it is a pickle and begins with a text longer than any pickle may be: look behind that text.

    The elements of a tensor begin like this once in a thousand times, and have nothing behind it.
    """
    data, skipped = span.read(begin, begin + FIRST), 0
    for _ in range(ELISIONS):
        at = found.table.reached
        need = _needed(data, at)
        if not found.cut or not need:
            return found
        skipped += need - at - 2
        # An empty text in its place.
        rest = span.read(begin + at + 2 + skipped, begin + at + 2 + skipped + FIRST)
        data = data[:at] + b"C\0" + rest
        found = record(data, limits=limits)
        if not found.cut or not rest:
            return _too_long(found, limits) if found.acts or found.stop is not None else found
    return _too_long(found, limits)


def _names_danger(found: Recorded) -> bool:
    """Whether a name that Python could import is dangerous by being imported, or by whatever comes next."""
    return any(
        judge(seen.what, seen.uses)[0] == "dangerous" and all(part.isidentifier() for part in str(seen.what).split("."))
        for seen in found.table.seen.values()
    )
