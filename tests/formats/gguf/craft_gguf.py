"""GGUF files made by hand, honest and not."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

__all__ = ["array", "gguf", "info", "q8_0", "q8_0_file", "text", "texts", "value"]


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


def q8_0(array: np.ndarray) -> bytes:
    """The blocks of Q8_0 for an array: 32 elements as a 16-bit scale and 32 signed bytes."""
    rows = array.reshape(-1, 32).astype(np.float32)
    scales = (np.abs(rows).max(axis=1) / 127).astype("<f2")
    divisors = np.where(scales == 0, 1, scales).astype(np.float32)
    numbers = np.round(rows / divisors[:, None]).astype(np.int8)
    return np.concatenate([scales.reshape(-1, 1).view(np.int8), numbers], axis=1).tobytes()


def q8_0_file(path: Path, arrays: Mapping[str, np.ndarray], *, plain: Collection[str] = ()) -> Path:
    """Write arrays in blocks of Q8_0; vectors, and those named in `plain`, as 32-bit floats."""
    infos: list[bytes] = []
    data = b""
    for name, array in arrays.items():
        is_plain = array.ndim < 2 or name in plain
        content = array.astype("<f4").tobytes() if is_plain else q8_0(array)
        infos.append(info(name, array.shape[::-1], 0 if is_plain else 8, len(data)))
        data += content + bytes(-len(content) % 32)
    path.write_bytes(gguf(infos, data))
    return path
