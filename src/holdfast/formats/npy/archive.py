"""How array files are recognised, apart from how they are read: every checkpoint that is opened is asked whether it is one."""

from __future__ import annotations

from holdfast.core.protocols import Description, Source

MAGIC = b"\x93NUMPY"

SUFFIX = ".npy"

EMPTY = b"PK\5\6" + bytes(18)
"""An archive without members, as `numpy.savez` writes it when it is given no array."""

FIRST_NBYTES = 30 + 512
"""Bytes of the first header that are looked at: its 30 fixed ones, a name, and what begins behind them."""


class NpyFile:
    """The format of a single array."""

    name = "npy"

    def matches(self, source: Source) -> bool:
        key = source.store.single
        return key is not None and source.first(key, len(MAGIC)) == MAGIC

    def describe(self, source: Source) -> Description:
        from holdfast.formats.npy.read import describe_npy

        return describe_npy(source)


class NpzArchive:
    """The format of a zip of arrays."""

    name = "npz"

    def matches(self, source: Source) -> bool:
        """Whether one file was opened, a zip whose first record is an array: by its bytes, or by its name if compressed."""
        key = source.store.single
        if key is None:
            return False
        head = source.first(key, FIRST_NBYTES)
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

    def describe(self, source: Source) -> Description:
        from holdfast.formats.npy.read import describe_npz

        return describe_npz(source)
