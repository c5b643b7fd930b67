"""A store over a save that has not been written: what its files will hold, as far as it is known and somebody asks.

    Literal, Memory    the bytes themselves
    Gathered           made of zeros in place of its data, and kept: it says the checksums that stand in it, and those have to be in
                       other segments, too; zeros where it is data and nothing else
    Late               made with a checksum of 0 for all data: no format refuses one when it opens a file
    Data               zeros, which cost nothing. Only a reader that looks into one segment and not past it gets its bytes: a record
                       that is copied from another archive and described, a program or sample inputs
    Hole, LinkedFile   zeros: what is linked was opened where it is

Opening a checkpoint reads no tensor data, so a reader finds in here whatever it would find in the finished files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from holdfast.core.protocols import Medium
from holdfast.engine.saves import (
    Data,
    FilePlan,
    Gathered,
    Late,
    LinkedFile,
    Literal,
    Memory,
    Segment,
    known_later,
)
from holdfast.engine.write import small_bytes
from holdfast.stores.virtual import Virtual, VirtualFile


class PlannedFile:
    def __init__(self, plan: FilePlan, crcs: dict[str, int]) -> None:
        self._segments = plan.segments
        self._offsets = plan.offsets()
        self.nbytes = self._offsets[-1] + plan.segments[-1].nbytes if plan.segments else 0
        self._crcs = crcs
        self._made: dict[int, bytes] = {}
        for number, segment in enumerate(plan.segments):
            if isinstance(segment, Gathered) and segment.zeros is not None:
                self._made[number], known = segment.zeros()
                crcs.update(known)

    def read(self, start: int, out: memoryview) -> None:
        stop = start + out.nbytes
        at = max(bisect_right(self._offsets, start) - 1, 0)
        pieces: list[bytes | memoryview] = []
        while at < len(self._segments) and self._offsets[at] < stop:
            segment, begin = self._segments[at], self._offsets[at]
            end = begin + segment.nbytes
            low, high = max(begin, start), min(end, stop)
            if isinstance(segment, Data):
                inside = begin <= start < stop <= end
                pieces.append(
                    _looked_at(segment, low - begin, high - begin) if inside else bytes(high - low)
                )
            elif isinstance(segment, Gathered) and segment.zeros is None:
                pieces.append(bytes(high - low))
            elif (low, high) == (begin, end):
                pieces.append(self._content(at, segment))
            else:
                pieces.append(memoryview(self._content(at, segment))[low - begin : high - begin])
            at += 1
        out[:] = b"".join(pieces)

    def _content(self, at: int, segment: Segment) -> bytes | memoryview:
        match segment:
            case Literal():
                return segment.data
            case Late():
                made = self._made.get(at)
                if made is None:
                    made = self._made[at] = segment.make(self._crcs)
                return made
            case Memory():
                return segment.content
            case Gathered():
                return self._made[at]
        return bytes(segment.nbytes)


def _looked_at(segment: Data, start: int, stop: int) -> memoryview:
    tensor = segment.tensor
    if tensor.dtype.bits == 8 and tensor.ndim == 1:
        return memoryview(small_bytes(Data(tensor[start:stop], segment.label)))
    return memoryview(small_bytes(segment))[start:stop]


class PlannedStore(Virtual):
    medium = Medium(exact=True)

    def __init__(
        self, files: Iterable[FilePlan], *, name: str, linked: Iterable[LinkedFile] = ()
    ) -> None:
        super().__init__(name)
        plans = list(files)
        crcs = {key: 0 for plan in plans for key in known_later(plan.segments)}
        # A checkpoint that is one file has no key for it; a store needs one.
        for plan in plans:
            file = PlannedFile(plan, crcs)
            self.put(VirtualFile(file.nbytes, file.read), plan.key or "file")
        for one in linked:
            self.put(VirtualFile(one.nbytes, _zeros), one.key)


def _zeros(start: int, out: memoryview) -> None:
    out[:] = bytes(out.nbytes)
