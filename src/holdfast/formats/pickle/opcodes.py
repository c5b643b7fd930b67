"""The opcodes of protocol 2 that carry a number, as bytes."""

from __future__ import annotations

import struct

__all__ = ["FLOAT", "LONG_PUT", "TEXT", "TUPLES", "get", "integer", "put"]

BYTE = [bytes([i]) for i in range(256)]
PUT1, GET1, INT1 = [b"q" + b for b in BYTE], [b"h" + b for b in BYTE], [b"K" + b for b in BYTE]
WORD = struct.Struct("<cI").pack
INT2, INT4 = struct.Struct("<cH").pack, struct.Struct("<ci").pack

LONG_PUT = WORD
"""Packs `r`, LONG_BINPUT, and a number. Of every ten opcodes three are this one, so it is here without a call around it."""

TEXT = WORD
"""Packs `X`, BINUNICODE, and the length of the text, which follows."""

FLOAT = struct.Struct(">cd").pack
"""Packs `G`, BINFLOAT, and the number; the one place where a pickle has the highest byte first."""

TUPLES = (b")", b"\x85", b"\x86", b"\x87")
"""EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3: tuples without a MARK."""


def put(number: int) -> bytes:
    """BINPUT, LONG_BINPUT: remember the top of the stack under a number."""
    return PUT1[number] if number < 256 else WORD(b"r", number)


def get(number: int) -> bytes:
    """BINGET, LONG_BINGET: what was remembered under a number."""
    return GET1[number] if number < 256 else WORD(b"j", number)


def integer(value: int) -> bytes:
    """The shortest opcode for an integer: BININT1, BININT2, BININT, LONG1 or LONG4.

    >>> integer(7), integer(-1), integer(1 << 31)
    (b'K\\x07', b'J\\xff\\xff\\xff\\xff', b'\\x8a\\x05\\x00\\x00\\x00\\x80\\x00')
    """
    if 0 <= value <= 0xFFFF:
        return INT1[value] if value <= 0xFF else INT2(b"M", value)
    if -(1 << 31) <= value < 1 << 31:
        return INT4(b"J", value)
    raw = value.to_bytes((value.bit_length() >> 3) + 1, "little", signed=True)
    if raw[-1] == 0xFF and raw[-2] & 0x80:
        # -(2 ** (8 * n - 1)) fits in n bytes, and its bit length asks for one more.
        raw = raw[:-1]
    return (b"\x8a" + BYTE[len(raw)] if len(raw) < 256 else INT4(b"\x8b", len(raw))) + raw
