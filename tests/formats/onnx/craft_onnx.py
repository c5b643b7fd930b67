"""ONNX models as bytes: a writer of protobuf that writes whatever it is told, also what is wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence

FLOAT, UINT8, INT8, INT32, INT64, STRING, BOOL, FLOAT16, UINT64, INT4 = (
    1,
    2,
    3,
    6,
    7,
    8,
    9,
    10,
    13,
    22,
)


def varint(value: int) -> bytes:
    """An integer; a negative one as 64 bits of two's complement."""
    value &= (1 << 64) - 1
    raw = bytearray()
    while value >= 0x80:
        raw.append(value & 0x7F | 0x80)
        value >>= 7
    raw.append(value)
    return bytes(raw)


def tag(number: int, wire_type: int) -> bytes:
    return varint(number << 3 | wire_type)


def number(field: int, value: int) -> bytes:
    """A field with an integer."""
    return tag(field, 0) + varint(value)


def content(field: int, raw: bytes | str, *, nbytes: int | None = None) -> bytes:
    """A field with text, bytes or a message, and a length that may lie."""
    raw = raw.encode() if isinstance(raw, str) else raw
    return tag(field, 2) + varint(len(raw) if nbytes is None else nbytes) + raw


def packed(field: int, values: Sequence[int]) -> bytes:
    """A field with packed varints."""
    return content(field, b"".join(map(varint, values)))


def floats(field: int, values: Sequence[float]) -> bytes:
    return content(field, struct.pack(f"<{len(values)}f", *values))


def tensor(
    name: str | bytes,
    dims: Sequence[int] = (2,),
    data_type: int = FLOAT,
    *fields: bytes,
    raw: bytes | None = None,
) -> bytes:
    """A TensorProto; by default of two floats as raw data."""
    data = struct.pack("<2f", 1, 2) if raw is None and not fields else raw
    parts = [packed(1, dims) if dims else b"", number(2, data_type), *fields, content(8, name)]
    if data is not None:
        parts.append(content(9, data))
    return b"".join(parts)


def external(
    location: str, offset: object = None, length: object = None, *more: tuple[str, str]
) -> bytes:
    """The fields of a tensor in another file."""
    entries = [("location", location), *more]
    entries += [("offset", str(offset))] if offset is not None else []
    entries += [("length", str(length))] if length is not None else []
    made = b"".join(content(13, content(1, key) + content(2, value)) for key, value in entries)
    return made + number(14, 1)


def graph(*tensors: bytes, more: bytes = b"") -> bytes:
    """A GraphProto of a node, a name and initializers."""
    node = content(1, content(1, "x") + content(2, "y") + content(4, "Identity"))
    return node + content(2, "g") + b"".join(content(5, one) for one in tensors) + more


def model(
    *tensors: bytes, more: bytes = b"", before: bytes = number(1, 10) + content(2, "craft")
) -> bytes:
    """A ModelProto around a graph with these initializers."""
    opset = content(8, content(1, "") + number(2, 21))
    return before + content(7, graph(*tensors)) + opset + more
