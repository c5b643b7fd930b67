"""The seal of a step that Holdfast saves: one more file of the plan, written last, inside of the step's transaction.

So a published step always has it. The data files stand in it with their sizes, because their checksums are in the manifest; files
of the index stand in it with a digest, which is known when they are made: the seal is a late segment, of a length that is not
late.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence

from holdfast.core.value import Value, replace
from holdfast.formats.seal import SEAL, Seal, SealedFile, encode_seal, seal_text
from holdfast.plan.saves import FilePlan, Late, Literal, SavePlan

BLANK = "sha256:" + "0" * 64


class Stamp(Value, frozen=True):
    """What a seal says beside the files."""

    step: int
    saved: float
    """Seconds since 1970."""
    metrics: Mapping[str, float]
    ran: float | None = None
    """For how many seconds the run had run."""


def stamp(step: int, metrics: Mapping[str, float] | None, ran: float | None = None) -> Stamp:
    """The stamp of a step that is saved now. A clock that is before 1970 is as wrong as can be, and says 1970."""
    return Stamp(step, max(time.time(), 0.0), metrics or {}, ran)


def digest_of(content: bytes) -> str:
    """The digest of a small file, as a seal has it."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def with_seal(plan: SavePlan, says: Stamp) -> SavePlan:
    """The same plan of a directory, sealed."""
    made: dict[str, bytes] = {}
    index = tuple(_noted(file, made) for file in plan.index)
    data = [*((file.key, file.nbytes) for file in plan.linked), *((file.key, file.nbytes) for file in plan.files)]

    def make(crcs: Mapping[str, int]) -> bytes:
        # A seal with other digests of the same length was read before.
        return seal_text(_seal(data, index, says, lambda file: digest_of(made.get(file.key) or content_of(file, crcs))))

    late = Late(len(encode_seal(_seal(data, index, says, lambda file: BLANK))), make)
    return replace(plan, index=(*index, FilePlan(SEAL, (late,))))


def seal_file(data: Sequence[tuple[str, int]], index: Sequence[FilePlan], says: Stamp) -> FilePlan:
    """The seal of data files, by name and length, and of an index that is known."""
    return FilePlan(SEAL, (Literal(encode_seal(_seal(data, index, says, lambda file: digest_of(content_of(file, {}))))),))


def _seal(data: Sequence[tuple[str, int]], index: Sequence[FilePlan], says: Stamp, digest: Callable[[FilePlan], str]) -> Seal:
    files = [SealedFile(key, nbytes, None) for key, nbytes in data]
    files += [SealedFile(file.key, file.nbytes, digest(file)) for file in index]
    return Seal(says.step, says.saved, says.metrics, tuple(files), says.ran)


def _noted(file: FilePlan, made: dict[str, bytes]) -> FilePlan:
    """The same file, whose content is noted when it is made: the manifest of a large state is not made twice."""
    if len(file.segments) != 1 or not isinstance(file.segments[0], Late):
        return file
    late = file.segments[0]

    def make(crcs: Mapping[str, int]) -> bytes:
        made[file.key] = late.make(crcs)
        return made[file.key]

    return FilePlan(file.key, (replace(late, make=make),))


def content_of(file: FilePlan, crcs: Mapping[str, int]) -> bytes:
    """The bytes of a file of an index."""
    parts = []
    for segment in file.segments:
        if isinstance(segment, Literal):
            parts.append(segment.data)
        elif isinstance(segment, Late):
            parts.append(segment.make(crcs))
        else:
            raise TypeError("files of an index are literal or late")
    return b"".join(parts)
