"""GGUF files made by hand, honest and not."""

from __future__ import annotations

import struct
from collections.abc import Sequence

__all__ = ["array", "gguf", "info", "text", "texts", "value"]


def text(content: str | bytes, *, length: int | None = None, order: str = "<") -> bytes:
    raw = content.encode() if isinstance(content, str) else content
    return struct.pack(order + "Q", len(raw) if length is None else length) + raw


def value(name: str | bytes, kind: int, content: bytes, *, order: str = "<") -> bytes:
    """A value of the header: 4 is a 32-bit number, 8 a text, 9 an array."""
    return text(name, order=order) + struct.pack(order + "I", kind) + content


def array(kind: int, count: int, content: bytes, *, order: str = "<") -> bytes:
    return struct.pack(order + "IQ", kind, count) + content


def texts(*contents: str) -> bytes:
    return array(8, len(contents), b"".join(map(text, contents)))


def info(
    name: str | bytes,
    dims: Sequence[int],
    kind: int = 0,
    offset: int = 0,
    *,
    rank: int | None = None,
    order: str = "<",
) -> bytes:
    """What the header says of a tensor; `dims` as they are written, the fastest first."""
    numbers = struct.pack(
        f"{order}I{len(dims)}QIQ", len(dims) if rank is None else rank, *dims, kind, offset
    )
    return text(name, order=order) + numbers


def gguf(
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    values: Sequence[bytes] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    tensors: int | None = None,
    count: int | None = None,
    order: str = "<",
) -> bytes:
    """A file. `tensors` and `count` are what is said of how many tensors and values there are."""
    numbers = (
        version,
        len(infos) if tensors is None else tensors,
        len(values) if count is None else count,
    )
    head = b"GGUF" + struct.pack(order + "I2Q", *numbers) + b"".join(values) + b"".join(infos)
    return head + bytes(-len(head) % alignment if data or infos else 0) + data
