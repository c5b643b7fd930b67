"""Write a plan from front to back, to anything that has a `write`: buffers, sockets' files, compressors.

Such a target cannot be written at an offset, so there is one writer. A large piece of memory is summed by several threads, a window
ahead of the writing: the sum of a piece is needed behind it, and nobody waits for it. A format with its sums in front of the data
(safetensors) is read twice: summed first, then written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from holdfast.core.crc import Sums, crc32
from holdfast.engine.blocks import slab_block, slab_bytes, slabs
from holdfast.engine.threads import Beside, default_threads, run_all
from holdfast.errors import SaveError
from holdfast.plan.saves import Data, FilePlan, Hole, Late, Literal, Memory

__all__ = ["Told", "Writer", "write_stream"]

BLOCK_NBYTES = 4 << 20
PARALLEL_NBYTES = 32 << 20
"""From this size on several threads sum."""

ZEROS = bytes(1 << 20)


class Writer(Protocol):
    """Anything with a `write` that takes bytes and memoryviews."""

    def write(self, data: bytes | memoryview, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Told:
    """A writer that tells how much it was given."""

    file: Writer
    progress: Callable[[int], None]

    def write(self, data: bytes | memoryview, /) -> object:
        done = self.file.write(data)
        self.progress(done if type(done) is int else memoryview(data).nbytes)
        return done

    def flush(self) -> None:
        finish = getattr(self.file, "flush", None)
        if callable(finish):
            finish()


def write_stream(plan: FilePlan, target: Writer, *, known: Mapping[str, int] | None = None) -> dict[str, int]:
    """Write all segments in order, and flush the target if it can. Gives the CRC-32 of each piece of data, by its label.

    `known` are those of files that were written before. Raises `SaveError` where data changed between two readings.
    """
    foreseen = _sums(plan) if _asks_ahead(plan) else {}
    crcs = {**(known or {}), **foreseen}
    own = {segment.label for segment in plan.segments if isinstance(segment, Data | Memory)}
    texts: list[bytes] = []

    def flush() -> None:
        if texts:
            write_all(target, b"".join(texts))
            texts.clear()

    for segment in plan.segments:
        match segment:
            case Literal():
                texts.append(segment.data)
            case Late():
                made = segment.make(crcs)
                if len(made) != segment.nbytes:
                    raise ValueError(f"a late segment of {segment.nbytes} bytes was made with {len(made)}")
                texts.append(made)
            case Hole():
                flush()
                for start in range(0, segment.nbytes, len(ZEROS)):
                    write_all(target, memoryview(ZEROS)[: segment.nbytes - start])
            case Data():
                flush()
                crcs[segment.label] = _write_data(target, segment)
            case Memory():
                flush()
                crcs[segment.label] = _write_memory(target, segment.content)
    flush()
    changed = [label for label, crc in foreseen.items() if crcs[label] != crc]
    if changed:
        raise SaveError(f"{changed[0]!r} changed while it was saved; what was written is of no use", tensor=changed[0])
    finish = getattr(target, "flush", None)
    if callable(finish):
        finish()
    return {label: crcs[label] for label in own}


def _asks_ahead(plan: FilePlan) -> bool:
    """Whether a segment stands before data whose sum it holds."""
    passed: set[str] = set()
    waiting = False
    for segment in plan.segments:
        match segment:
            case Data() | Memory() if waiting:
                return True
            case Data() | Memory():
                passed.add(segment.label)
            case Late():
                waiting = waiting or (segment.needs is None or segment.needs not in passed)
    return False


def _sums(plan: FilePlan) -> dict[str, int]:
    """The sum of all data, by its label."""
    return {
        segment.label: _write_data(NOWHERE, segment) if isinstance(segment, Data) else _write_memory(NOWHERE, segment.content)
        for segment in plan.segments
        if isinstance(segment, Data | Memory)
    }


class Nowhere:
    """A target that only looks as if it were written to."""

    def write(self, data: bytes | memoryview, /) -> None:
        """Nothing."""


NOWHERE = Nowhere()


def _write_data(target: Writer, segment: Data) -> int:
    crc = 0
    for slab in slabs(segment.tensor, slab_block(segment.tensor, BLOCK_NBYTES)):
        with slab_bytes(slab) as data:
            crc = crc32(data, crc)
            write_all(target, data)
    return crc


def write_all(target: Writer, data: bytes | memoryview) -> None:
    """Write everything, where the target takes less at a time and says so (an unbuffered file stops at 2 GiB)."""
    view = memoryview(data)
    while view.nbytes:
        done = target.write(view)
        if type(done) is not int or done >= view.nbytes:
            return
        view = view[done:]


def _write_memory(target: Writer, content: memoryview) -> int:
    if content.nbytes < PARALLEL_NBYTES:
        write_all(target, content)
        return crc32(content)
    sums = Sums()

    def task(start: int) -> Callable[[], None]:
        def run() -> None:
            sums.add(start, content[start : start + BLOCK_NBYTES])

        return run

    with Beside(lambda: run_all([task(start) for start in range(0, content.nbytes, BLOCK_NBYTES)], default_threads())) as summing:
        for start in range(0, content.nbytes, 16 * BLOCK_NBYTES):
            write_all(target, content[start : start + 16 * BLOCK_NBYTES])
        summing.result()
    return sums.crc32()
