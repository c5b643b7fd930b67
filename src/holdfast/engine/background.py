"""`BackgroundCall`: one call on a thread of its own, which is over when its block ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Generic, Self, TypeVar

from holdfast.core.runtime import start

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """One call beside what the caller does: on a thread of its own or, where none can start, when its result is asked for.

    Used in a `with`; at its end the call is over, or will never begin.
    """

    def __init__(self, call: Callable[[], T], *, name: str = "holdfast") -> None:
        self._call = call
        self._begun = threading.Lock()
        self._future: Future[T] = Future()
        self._name = name

    def __enter__(self) -> Self:
        start(self._run, name=self._name)
        return self

    def result(self) -> T:
        """What the call came to; raises what it raised."""
        self._run()
        return self._future.result()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        interrupt: BaseException | None = None
        while True:
            try:
                if not self._future.cancel():
                    self._future.exception()
                break
            except BaseException as late:
                interrupt = late
        if error is not None:
            # What was raised may be what the call came to, and holds the frames of those who have this: it is not kept twice.
            self._future = Future()
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                del interrupt

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        try:
            if self._future.set_running_or_notify_cancel():
                self._future.set_result(self._call())
        except BaseException as error:
            self._future.set_exception(error)
            # As Python's own pools do: the error holds this frame, and the frame would hold the error.
            del self
