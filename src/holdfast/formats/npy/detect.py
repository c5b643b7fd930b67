"""Recognizes an archive of arrays.

This is a small module of its own, because every checkpoint that is opened is checked by it.
"""

from __future__ import annotations

from holdfast.core.protocols import Source
from holdfast.formats import FIRST_NBYTES

MAGIC = b"\x93NUMPY"

SUFFIX = ".npy"

EMPTY_ARCHIVE = b"PK\5\6" + bytes(18)
"""A zip archive without members. `numpy.savez` writes it if it is called without arrays."""

LOCAL_HEADER_NBYTES = 30
"""The size of the fixed part of a zip's local header. The name and the extra field follow."""


def is_npz(source: Source, key: str) -> bool:
    """Return whether the first member of a zip archive is an array.

    A stored member is recognized by the magic of its content, a compressed member by its suffix.
    """
    head = source.read_head(key, FIRST_NBYTES)
    if head == EMPTY_ARCHIVE:
        return True
    if not head.startswith(b"PK\3\4") or len(head) < LOCAL_HEADER_NBYTES:
        return False

    method = int.from_bytes(head[8:10], "little")
    name_nbytes = int.from_bytes(head[26:28], "little")
    extra_nbytes = int.from_bytes(head[28:30], "little")
    name_stop = LOCAL_HEADER_NBYTES + name_nbytes
    if method != 0:
        return head[LOCAL_HEADER_NBYTES:name_stop].endswith(SUFFIX.encode())

    start = name_stop + extra_nbytes
    stop = start + len(MAGIC)
    if stop > source.store.size(key):
        return False
    if stop <= len(head):
        return head[start:stop] == MAGIC
    return source.bytes(key, start, stop) == MAGIC
