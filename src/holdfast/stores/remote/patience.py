"""`Patience`: when has an answer taken so long that a second request is worth its price? `pauses`: and when it was a failure?

Of many requests one is always slow: its server is busy, its packets were lost. Whoever waits for all of them waits for that one.
So a request that takes several times as long as others of its size is sent again, and the first answer counts. That costs few
requests more, since few are that slow.

A request that failed and may be sent again is sent after a pause, which doubles each time.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from statistics import median

from holdfast.core.runtime import renewed

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


FIRST_S, LONGEST_S = 0.05, 10.0
"""The first pause after a failure, and the longest."""

AGAIN_S = 180.0
"""How long a request is sent again and again, in all."""


def pauses(first: float = FIRST_S) -> Iterator[float]:
    """Growing pauses. Each is shortened at random: those who failed at once do not come back at once."""
    while True:
        yield random.uniform(first / 2, first)
        first = min(2 * first, LONGEST_S)


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
