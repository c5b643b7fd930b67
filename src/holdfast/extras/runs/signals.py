"""A signal that asks the program to end waits until the state is saved: `Run(signals=)`, `Run.stopping`, `Run.interrupted`.

    with run.stopping(grace="60s"):
        for step in range(first, last):
            train()
            if run.interrupted(step, state):     saved by now, if it was worth it
                break

1. The handler only records that the signal came, and when: it may have come in the middle of an optimizer's step.
2. The loop calls `interrupted` where its state is consistent. A step is saved if the last one is older than a save takes, and if
   the grace time is enough for it.
3. At the end of the block the handler that was there before is restored, and the signal is sent to it now: the program ends as it
   would have, with the same status, or another library's handler requeues the job.
4. A second signal is not held back. A fork, such as a loader's worker, has nothing to save, and ends as if nothing had been
   installed.

`with Run(path, signals=True, grace="60s") as run:` is such a block, too. Handlers are Python's, so this is for the main thread.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Self

from holdfast.core.quantities import describe_value, parse_count
from holdfast.core.signals import SignalOverride
from holdfast.errors import BadArgument, SaveError

GRACE_S = 30.0
"""From SIGTERM until the program is killed: KillWait of Slurm, terminationGracePeriodSeconds of Kubernetes."""


def read_signals(
    given: object, name: str = "signals=", *, accepted: str = "signals"
) -> tuple[signal.Signals, ...]:
    """Return the signals of an argument: one signal, or any number of them."""
    several = (
        given if isinstance(given, Iterable) and not isinstance(given, str | bytes) else [given]
    )
    signals = []
    for item in several:
        try:
            if isinstance(item, str):
                signals.append(signal.Signals[item])
            else:
                signals.append(signal.Signals(parse_count(item, name)))
        except (ValueError, KeyError):  # What is no number is a ValueError, too.
            message = f"{name} takes {accepted}, such as signal.SIGTERM, not {describe_value(item)}"
            raise BadArgument(message, found=item) from None
    return tuple(dict.fromkeys(signals))


def read_run_signals(given: object, name: str = "signals=") -> tuple[signal.Signals, ...]:
    """Return the signals of a run: SIGTERM for True, none for False, or as `read_signals`."""
    if isinstance(given, bool):
        return (signal.SIGTERM,) if given else ()
    return read_signals(given, name, accepted="True, or signals")


class SignalGuard:
    """Holds signals back for as long as the block lasts."""

    def __init__(
        self, signals: tuple[signal.Signals, ...], grace_s: float, *, last: Callable[[], None]
    ) -> None:
        """`last` is called at the end of the block, before a signal that was held back is sent on."""
        self.grace_s = grace_s
        self.came_s: float | None = None
        """When the first signal came, by `time.monotonic`."""
        self._signals = signals
        self._last = last
        self._number: int | None = None
        self._within = False
        self._override = SignalOverride(self._record, is_wanted=lambda: self._within)

    @property
    def left_s(self) -> float:
        return (
            self.grace_s if self.came_s is None else self.came_s + self.grace_s - time.monotonic()
        )

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise SaveError("signals are handled by the main thread; enter the block there")
        self._within = True
        for number in self._signals:
            if signal.getsignal(number) is None:
                self._give_back()
                raise SaveError(
                    f"{number.name} has a handler that is not Python's, which could not be given back; leave it out"
                )
            self._override.install(number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_back()
        if error is None:
            self._last()
            if self._number is not None:
                signal.raise_signal(self._number)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.came_s is not None:
            self._within = False
            self._override.pass_on(number, frame)
            return
        self.came_s = time.monotonic()
        self._number = number

    def _give_back(self) -> None:
        self._within = False
        self._override.restore()
