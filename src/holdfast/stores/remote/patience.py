"""`Patience`: when has an answer taken so long that a second request is worth its price?

Of many requests one is always slow: its server is busy, its packets were lost. Whoever waits for all of them waits for that one.
So a request that takes several times as long as others of its size is sent again, and the first answer counts. That costs few
requests more, since few are that slow.
"""

from __future__ import annotations

import threading
from collections import deque
from statistics import median

from holdfast.core.runtime import renewed

__all__ = ["Patience"]

KNOWN = 16
"""Answers that are remembered of each size."""

ENOUGH = 4
"""Answers below which nothing is known."""

AT_FIRST_S = 10.0
"""How long to wait while nothing is known."""

LEAST_S = 0.5
"""No answer is waited for less: a busy moment of this machine is no reason to ask twice."""

TIMES = 4.0
"""How many times as long as usual is too long."""


class Patience:
    """How long answers took lately, by their size."""

    def __init__(self) -> None:
        self._lock = renewed(threading.Lock())
        self._took: dict[int, deque[float]] = {}

    def answered(self, nbytes: int, seconds: float) -> None:
        """An answer of so many bytes took so long."""
        with self._lock:
            self._took.setdefault(_size(nbytes), deque(maxlen=KNOWN)).append(seconds)

    def of(self, nbytes: int) -> float:
        """Seconds to wait for an answer of so many bytes before it is asked for again."""
        with self._lock:
            took = list(self._took.get(_size(nbytes), ()))
        return max(LEAST_S, TIMES * median(took)) if len(took) >= ENOUGH else AT_FIRST_S


def _size(nbytes: int) -> int:
    """Answers whose lengths differ by less than four times are of one size."""
    return nbytes.bit_length() // 2
