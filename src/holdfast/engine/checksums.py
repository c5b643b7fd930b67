"""Read spans of files from end to end, each byte once, for their checksums alone: a sink that sums and drops.

1. Spans are cut where blocks of the file end, and parts that touch, or almost, are read together: a gigabyte becomes 256 reads, and
   so do the hundred thousand small tensors in it.
2. A thread reads into scratch memory that it keeps, and takes the CRC-32 of each part while it is in the cache.
3. The CRCs of parts combine to those of the spans.

Nothing stops at an error: a read that fails is tried again part by part, and the error belongs to the spans whose parts fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast.core.crc import Sums
from holdfast.core.protocols import Store
from holdfast.core.value import Value, replace
from holdfast.engine.transfer import Scratch, Sink, tasks
from holdfast.errors import HoldfastError, detached, located
from holdfast.plan.coalesce import SUMS, Parts, join_files

__all__ = ["Progress", "Span", "Sweep"]

Progress = Callable[[int], None]
"""Is told how many more bytes are done; may be called from several threads at once."""


class Span(Value, frozen=True):
    """Bytes of one file."""

    key: str
    start: int
    nbytes: int
    summed: bool = True
    """Whether the CRC is wanted; without, the bytes are read and dropped, so that errors show."""

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


class Sweep:
    """The sums of spans of one store. Run every task of `tasks`, on any thread, and then ask for the outcomes."""

    def __init__(self, store: Store, spans: Iterable[Span], *, block: int = SUMS.block) -> None:
        self._store, self._spans = store, list(spans)
        self._policy = replace(SUMS, block=block)
        self._sums = [Sums() for _ in self._spans]
        self._errors: dict[int, HoldfastError] = {}

    def reads(self) -> list[Parts]:
        """The spans of each file, cut and joined; each byte of each span is in one part."""
        return join_files([(span.key, span.start, span.stop) for span in self._spans], self._policy)

    def tasks(self, progress: Progress | None = None) -> list[Callable[[], None]]:
        """What is to be done, about a block each. They raise nothing that is about the files."""
        scratch, block = Scratch(), self._policy.block
        jobs = [(parts, _Summed(self, parts, progress, scratch=scratch)) for parts in self.reads()]
        return [task for parts, sink in jobs for task in tasks(self._store, parts, sink, scratch=scratch, nbytes=block)]

    def add(self, number: int, start: int, data: memoryview) -> None:
        """Sum up a part of a span, if its sum is wanted."""
        if self._spans[number].summed:
            self._sums[number].add(start, data)

    def try_again(self, number: int, start: int, out: memoryview) -> None:
        """Read a part of a span by itself; what keeps it from being read is the outcome of the span."""
        try:
            self._store.read(self._spans[number].key, start, out)
        except HoldfastError as error:
            self._errors.setdefault(number, detached(error))
        else:
            self.add(number, start, out)

    def outcome(self, number: int) -> int | HoldfastError:
        """The CRC of a span (0 where it was not wanted), or what kept it from being read."""
        error = self._errors.get(number)
        return self._sums[number].crc32() if error is None else error

    def crc32(self, number: int, *, name: str) -> int:
        """The same; raises what kept it from being read, as an error of the tensor of this name."""
        outcome = self.outcome(number)
        if isinstance(outcome, HoldfastError):
            # Not the one that is kept: it would keep this frame, and all above it.
            del self._errors[number]
            with located(tensor=name):
                try:
                    raise outcome
                finally:
                    del outcome
        return outcome


class _Summed(Sink):
    """The parts in the reads of one file."""

    def __init__(self, sweep: Sweep, parts: Parts, progress: Progress | None, *, scratch: Scratch) -> None:
        self._sweep, self._parts, self._progress, self._scratch = sweep, parts, progress, scratch

    def take(self, number: int, data: memoryview) -> None:
        origin = int(self._parts.starts[number])
        for owner, begin, end in self._parts.of(number):
            self._sweep.add(owner, begin, data[begin - origin : end - origin])
        self._done(number)

    def failed(self, number: int, error: HoldfastError) -> None:
        for owner, begin, end in self._parts.of(number):
            self._sweep.try_again(owner, begin, self._scratch.of(end - begin))
        self._done(number)

    def _done(self, number: int) -> None:
        if self._progress is not None:
            # Without what lies between the parts: nobody expects to be told of that.
            self._progress(sum(end - begin for _, begin, end in self._parts.of(number)))
