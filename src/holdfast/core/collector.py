"""Let the cyclic garbage collector rest while a large description is built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["resting_collector"]


@contextmanager
def resting_collector() -> Iterator[None]:
    """No cyclic garbage collection meanwhile.

    A description of 100,000 tensors is a million objects, none of them garbage; the collector would walk all of them again and
    again, for up to half of the time.
    """
    resting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if resting:
            gc.enable()
