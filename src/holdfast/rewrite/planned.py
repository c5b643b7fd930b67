"""A save that is laid out and not begun: it can be looked at, explained, and run once.

    with planned_package("bundle.pt2", models) as planned:      the sources are open as long as the block lasts
        print(planned.explain())
        planned.run()

`package`, `replace_weights`, `tie` and `compact` are each such a block around `run`; a dry run is one without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.engine.write import Progress
from holdfast.errors import NotCommitted, StoreError
from holdfast.plan.saves import SavePlan
from holdfast.rewrite.save import Saved, write_plan
from holdfast.stores.local import free_nbytes

__all__ = ["PlannedSave", "Writing"]


@dataclass(frozen=True, slots=True)
class Writing:
    """How a plan is written."""

    overwrite: bool | None = None
    """None: files are replaced, directories are not."""
    durable: bool = True
    """Whether to wait for the disk."""
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """A plan, and where and how it goes."""

    plan: SavePlan
    target: str
    writing: Writing
    before_commit: Callable[[], None]
    """Has the last word before anything is published: what it raises keeps everything as it was."""

    @property
    def files(self) -> tuple[tuple[str, int], ...]:
        """Each file of the target and its length."""
        return tuple((file.key or os.path.basename(self.target), file.nbytes) for file in (*self.plan.files, *self.plan.index))

    @property
    def free_nbytes(self) -> int:
        """What is free where the target goes; the old target stays until the new one is in place."""
        parent = os.path.dirname(os.path.abspath(self.target))
        try:
            return free_nbytes(parent)
        except StoreError as error:
            refused = NotCommitted(f"the folder to save into cannot be used: {error.message} ({parent!r})", file=self.target)
            refused.errno = error.errno
            raise refused from None

    def explain(self) -> str:
        """What would be written, in words."""
        free, files = self.free_nbytes, len(self.files)
        lines = [
            f"→ {self.target} ({self.plan.format})",
            f"write  {self.plan.nbytes:,} bytes in {files:,} file{'s' if files != 1 else ''}",
            f"space  {free:,} bytes free" + ("" if free >= self.plan.nbytes else ": NOT ENOUGH"),
        ]
        return "\n".join([*lines, *(f"note   {note}" for note in self.plan.notes)])

    def run(self, progress: Progress | None = None) -> Saved:
        """Write it and publish it, while its sources are open."""
        return write_plan(
            self.plan, self.target, overwrite=self.writing.overwrite, durable=self.writing.durable, threads=self.writing.threads,
            progress=progress, before_commit=self.before_commit,
        )  # fmt: skip
