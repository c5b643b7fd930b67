"""Array files made by hand, honest and not."""

from __future__ import annotations

import struct

from tests.formats.zip.craft import Item, build

__all__ = ["npy", "npz"]


def npy(
    descr: str = "'<f4'",
    shape: str = "(2, 3)",
    data: bytes = bytes(24),
    *,
    fortran: str = "False",
    text: str | bytes | None = None,
    version: tuple[int, int] = (1, 0),
    length: int | None = None,
) -> bytes:
    """An array file. `text` replaces the header's, `length` what is said of its length."""
    if text is None:
        text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"
    raw = text if isinstance(text, bytes) else text.encode("latin-1")
    prefix = 10 if version == (1, 0) else 12
    raw += b" " * (-(prefix + len(raw) + 1) % 64) + b"\n"
    said = len(raw) if length is None else length
    return (
        b"\x93NUMPY"
        + bytes(version)
        + struct.pack("<H" if prefix == 10 else "<I", said)
        + raw
        + data
    )


def npz(members: dict[str, bytes], *, method: int = 0) -> bytes:
    """An archive of them, as CPython writes it."""
    return build(
        [Item(name, raw, method=method, flags=0) for name, raw in members.items()],
        wide=False,
        alignment=0,
    )
