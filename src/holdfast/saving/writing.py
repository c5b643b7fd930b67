"""`Writing`: how a plan is written, the same for every verb."""

from __future__ import annotations

from holdfast.core.quantities import Size, byte_count
from holdfast.core.value import Value
from holdfast.engine.budget import BASE_NBYTES, Budget, budget, reading_threads
from holdfast.stores.remote.url import PART_NBYTES, UPLOADING


class Writing(Value, frozen=True, kw_only=True):
    """How a plan is written."""

    overwrite: bool | None = False
    """Whether what is there may be replaced. None: a file may, a directory may not."""
    durable: bool = True
    """Whether to wait for the disk."""
    threads: int | None = None
    read_back: bool = False
    """Whether what was written is read again and compared before it is published."""
    max_memory: Size | None = None
    """Memory above the interpreter's own; None: a few blocks a thread."""
    resume: bool = False
    """Take over the finished files of an interrupted try at the same directory (engine/targets/folder.py)."""
    dry_run: bool = False
    """Not at all: `carry_out` only looks."""
    requests: int = 0
    """How many reads the source wants under way at once (`Medium.requests`)."""

    @property
    def budget(self) -> Budget | None:
        """What `max_memory` allows."""
        return None if self.max_memory is None else budget(self.max_memory, self.threads, requests=self.requests)

    @property
    def parts(self) -> int | None:
        """How many parts of an upload may be under way at once: half of the memory is theirs."""
        if self.max_memory is None:
            return None
        return max(1, min(UPLOADING, (byte_count(self.max_memory) - BASE_NBYTES) // 2 // PART_NBYTES))

    @property
    def reading_threads(self) -> int:
        """How many threads may read before anything is written, in blocks that are not of our choice."""
        return reading_threads(self.max_memory, self.threads)
