"""A pickle assembler: one small function for each opcode that the attacks need, so that a case reads as what it does.

    stream(named("os", "system"), tuple_of(text("true")), REDUCE)          PROTO 2 in front, STOP behind

Nothing here uses `pickle`; the bytes are what an attacker would write and no pickler ever would.
"""

from __future__ import annotations

import struct

__all__ = [
    "ADDITEMS", "APPEND", "APPENDS", "BUILD", "DICT", "DUP", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET", "EMPTY_TUPLE",
    "FALSE", "FROZENSET", "LIST", "MARK", "MEMOIZE", "NEWOBJ", "NEWOBJ_EX", "NONE", "OBJ", "PERSID", "POP", "POP_MARK",
    "REDUCE", "SETITEM", "SETITEMS", "STACK_GLOBAL", "STOP", "TRUE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "binbytes", "call", "dict_of", "doubled", "frame", "get", "inst", "integer", "list_of", "named", "nested",
    "number", "proto", "put", "real", "short_text", "stream", "text", "tuple_of",
]  # fmt: skip

MARK, STOP, POP, POP_MARK, DUP = b"(", b".", b"0", b"1", b"2"
NONE, TRUE, FALSE = b"N", b"\x88", b"\x89"
EMPTY_TUPLE, TUPLE, TUPLE1, TUPLE2, TUPLE3 = b")", b"t", b"\x85", b"\x86", b"\x87"
EMPTY_LIST, LIST, APPEND, APPENDS = b"]", b"l", b"a", b"e"
EMPTY_DICT, DICT, SETITEM, SETITEMS = b"}", b"d", b"s", b"u"
EMPTY_SET, ADDITEMS, FROZENSET = b"\x8f", b"\x90", b"\x91"
REDUCE, BUILD, NEWOBJ, NEWOBJ_EX, OBJ = b"R", b"b", b"\x81", b"\x92", b"o"
STACK_GLOBAL, MEMOIZE, PERSID = b"\x93", b"\x94", b"Q"


def proto(version: int) -> bytes:
    return b"\x80" + bytes([version])


def stream(*parts: bytes, protocol: int = 2) -> bytes:
    """A whole pickle."""
    return proto(protocol) + b"".join(parts) + STOP


def frame(body: bytes, nbytes: int | None = None) -> bytes:
    """FRAME, with a length that may lie."""
    return b"\x95" + struct.pack("<Q", len(body) if nbytes is None else nbytes) + body


def named(module: str, name: str) -> bytes:
    """GLOBAL."""
    return f"c{module}\n{name}\n".encode()


def inst(module: str, name: str) -> bytes:
    """INST, which takes everything above the last MARK."""
    return f"i{module}\n{name}\n".encode()


def text(value: str | bytes) -> bytes:
    """BINUNICODE."""
    raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return b"X" + struct.pack("<I", len(raw)) + raw


def short_text(value: str) -> bytes:
    """SHORT_BINUNICODE."""
    raw = value.encode()
    return b"\x8c" + bytes([len(raw)]) + raw


def binbytes(value: bytes) -> bytes:
    """BINBYTES."""
    return b"B" + struct.pack("<I", len(value)) + value


def integer(value: int) -> bytes:
    """BININT1, BININT or LONG1, whichever holds the value."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return number(value, (value.bit_length() + 8) // 8)


def number(value: int, nbytes: int) -> bytes:
    """LONG1 of a given width."""
    return b"\x8a" + bytes([nbytes]) + value.to_bytes(nbytes, "little", signed=True)


def real(value: float) -> bytes:
    """BINFLOAT."""
    return b"G" + struct.pack(">d", value)


def put(index: int) -> bytes:
    """LONG_BINPUT."""
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    """BINGET or LONG_BINGET."""
    return b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)


def tuple_of(*items: bytes) -> bytes:
    return MARK + b"".join(items) + TUPLE


def list_of(*items: bytes) -> bytes:
    return EMPTY_LIST + MARK + b"".join(items) + APPENDS


def dict_of(*pairs: bytes) -> bytes:
    """Keys and values in turn."""
    return EMPTY_DICT + MARK + b"".join(pairs) + SETITEMS


def call(module: str, name: str, *args: bytes) -> bytes:
    """GLOBAL, arguments, TUPLE, REDUCE."""
    return named(module, name) + tuple_of(*args) + REDUCE


def nested(opener: bytes, closer: bytes, depth: int, core: bytes = NONE) -> bytes:
    """`core` inside `depth` layers."""
    return opener * depth + core + closer * depth


def doubled(times: int, seed: bytes, double: bytes = DUP + TUPLE2) -> bytes:
    """A value that holds itself twice, `times` over: 2^times leaves out of a few bytes."""
    return seed + double * times
