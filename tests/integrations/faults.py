"""A disk that is full, as the kernel says it: from a moment on no file may grow beyond a few bytes."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Every write of this process beyond so many bytes of a file fails (EFBIG; Python ignores the signal that comes with it)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
