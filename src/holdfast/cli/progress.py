"""Progress bars: bytes, rate and time left, on a terminal; nothing anywhere else.

    with bar("Verifying", total) as progress:
        verify(path, progress=progress)

`progress(nbytes)` adds to what is done. It may be called from any thread and as often as one likes: the screen is updated at most
twenty times a second. A bar that would be gone again at once is never drawn.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from holdfast.core.text import escape

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE_S, INTERVAL_S = 0.4, 0.05
"""Seconds before something gets a bar, and seconds between two updates of the screen."""


@contextmanager
def bar(
    title: str, total: int | None = None, *, quiet: bool = False
) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while the block runs, if that is a terminal and `quiet` is not asked for; gone afterwards.

    `total` is in bytes; None where nobody knows, which leaves out the time left.
    """
    if quiet or not _on_terminal():
        yield _nothing
        return
    with Bar(title, total) as drawn:
        yield drawn


def _nothing(nbytes: int) -> None: ...


def _on_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Bar:
    """The callable behind `bar`. Drawing begins with the first call after some patience."""

    def __init__(self, title: str, total: int | None) -> None:
        self._title, self._total = escape(title), total
        self._lock = threading.Lock()
        self._done = 0
        self._next = time.monotonic() + PATIENCE_S
        self._drawn: Progress | None = None
        self._task: TaskID | None = None
        self._over = False

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now < self._next or self._over:
                return
            self._next = now + INTERVAL_S
            if self._drawn is None:
                self._draw()
            if self._drawn is not None and self._task is not None:
                self._drawn.update(self._task, completed=self._done)

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Also on Ctrl-C: the line goes away and the cursor comes back.
        with self._lock:
            self._over = True
            if self._drawn is not None:
                self._drawn.stop()

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._drawn = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
            TimeRemainingColumn(), console=Console(file=sys.stderr), transient=True, redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._task = self._drawn.add_task(self._title, total=self._total)
        self._drawn.start()
