"""Memory at an address, as Python sees memory."""

from __future__ import annotations

import ctypes

__all__ = ["memory_at"]


def memory_at(address: int, nbytes: int) -> memoryview:
    """A writable view of memory that somebody else owns, and keeps alive for as long as the view is used."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B") if nbytes else memoryview(bytearray())
