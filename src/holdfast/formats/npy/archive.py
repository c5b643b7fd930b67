"""How array files are recognised, apart from how they are read: every checkpoint that is opened is asked whether it is one."""

from __future__ import annotations

from holdfast.core.protocols import Source
from holdfast.formats import FIRST_NBYTES

MAGIC = b"\x93NUMPY"

SUFFIX = ".npy"

EMPTY = b"PK\5\6" + bytes(18)
"""An archive without members, as `numpy.savez` writes it when it is given no array."""


def is_npz(source: Source, key: str) -> bool:
    """Whether a zip begins with an array: by its bytes, or by its name if compressed."""
    head = source.read_head(key, FIRST_NBYTES)
    if head == EMPTY:
        return True
    if not head.startswith(b"PK\3\4") or len(head) < 30:
        return False
    method, name, extra = (int.from_bytes(head[at : at + 2], "little") for at in (8, 26, 28))
    if method:
        return head[30 : 30 + name].endswith(SUFFIX.encode())
    at = 30 + name + extra
    if at + len(MAGIC) > source.store.size(key):
        return False
    return (head[at : at + 6] if at + 6 <= len(head) else source.bytes(key, at, at + 6)) == MAGIC
