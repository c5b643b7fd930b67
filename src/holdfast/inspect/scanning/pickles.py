"""Pickles, one behind the other, at the start of some bytes: what a loader would do that was pointed there.

Any bytes can be tried. A loader that is handed what is no pickle fails before it has done anything, and so does the recording: no
global, no call, a break. What is called a pickle is what (a) says so by its first opcode, or (b) does something before it
breaks, or (c) is nothing but whole pickles.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.core.limits import Limits
from holdfast.formats.pickle.ahead import read_ahead
from holdfast.formats.pickle.recording import Recorded
from holdfast.inspect.scanning.spans import Span
from holdfast.inspect.severity import judge

__all__ = ["Row", "Stream", "read_pickle", "read_row"]

MOST_STREAMS = 10_000
"""Pickles one behind the other that are read. torch's old container has five."""


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
        plainly = bool(self.streams) and self.stop == nbytes and not self._odd()
        return self.declared or self.more or plainly or any(s.acts for s in everything)

    def _odd(self) -> bool:
        return any(s.last.table.notes for s in self.streams)


def read_row(span: Span, limits: Limits) -> Row:
    """Read pickles until one breaks or the span ends."""
    head = span.read(0, 2)
    row = Row(declared=len(head) == 2 and head[0] == 0x80 and head[1] <= 5)
    while row.stop < span.nbytes:
        if len(row.streams) >= MOST_STREAMS:
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
    rest = span.part(begin, span.nbytes)
    plainly = read_ahead(rest.read, rest.nbytes, limits)
    if not plainly.table.arrays:
        return Stream(begin, (plainly,))
    return Stream(begin, (read_ahead(rest.read, rest.nbytes, limits, joblib=True), plainly))


def _names_danger(found: Recorded) -> bool:
    """Whether a name that Python could import is dangerous by being imported, or by whatever comes next."""
    return any(
        judge(seen.what, seen.uses)[0] == "dangerous" and all(part.isidentifier() for part in str(seen.what).split("."))
        for seen in found.table.seen.values()
    )
