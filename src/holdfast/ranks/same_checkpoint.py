"""Whether all ranks of a load have opened one checkpoint.

Each rank opens the path by itself, and another save may come between two of them: one half of a model would be of one step, the
other half of the next. So each says what it has opened in four bytes, made of what opening has read anyway: names, dtypes, shapes,
the checksums that are recorded, the text that a file carries about itself (DCP's `save_id`). Not of times or inodes, since ranks on
several machines may have copies. Two checkpoints that record no checksum and no text may look alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.crc import crc32
from holdfast.errors import Replaced
from holdfast.formats.dcp.lazy import ItemStorage

__all__ = ["marked", "unmarked"]

NBYTES = 4


def mark_of(checkpoint: Checkpoint) -> bytes:
    """What was opened, in four bytes."""
    found = crc32(repr((checkpoint.format, sorted(checkpoint.metadata.items()))).encode())
    for name, tensor in checkpoint.items():
        # The checksums of DCP's items stand in the items, which are not read to be told apart.
        sums = [0 if isinstance(storage, ItemStorage) else storage.crc32 for storage in tensor.storages]
        found = crc32(repr((name, tensor.dtype.name, tensor.shape, sums)).encode(), found)
    return found.to_bytes(NBYTES, "little")


def marked(checkpoint: Checkpoint, message: bytes, *, alone: bool) -> bytes:
    """A rank's message with the mark of what it has opened; one rank alone has nobody to differ from."""
    return (bytes(NBYTES) if alone else mark_of(checkpoint)) + message


def unmarked(messages: Sequence[bytes]) -> list[bytes]:
    """The messages of all ranks; raises `Replaced` where they have not opened one checkpoint."""
    marks = [message[:NBYTES] for message in messages]
    others = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
    if others:
        shown = ", ".join(map(str, others[:8])) + (" …" if len(others) > 8 else "")
        raise Replaced(
            f"the ranks have opened different checkpoints (rank {shown} not that of rank 0): it was saved again; load it again",
            found=tuple(others),
        )
    return [message[NBYTES:] for message in messages]
