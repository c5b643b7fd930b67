"""The header of an array file: from bytes to a dtype, a byte order, an order of elements and a shape.

    byte 0          6          8           10 (12)          10 + N
         ├──────────┼──────────┼───────────┼────────────────┼──────────────────────────┐
         │ \\x93NUMPY│ 1 0      │ N, u16 LE │ {'descr': …}␠\\n│ the elements, in C order │
         │          │ 2 0, 3 0 │ N, u32 LE │                │ or in Fortran's          │

numpy reads the text as a Python literal. Here it must be three fields in any order, each once, in the few forms that numpy writes:
`{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }`.

A type code names a type of numpy. The narrow floats of ml_dtypes have ambiguous codes, and come back as what is known:

    <V2     bfloat16, the only type that is written so          <f1     float8_e5m2, likewise
    |V2     bits16: two bytes without a meaning                 <V1     bits8: one of twelve types of one byte
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

from holdfast.core.dtype import DTYPES, DType
from holdfast.core.value import Value
from holdfast.errors import (
    FormatError,
    HeaderError,
    LimitExceeded,
    MetadataError,
    Truncated,
    Unsupported,
)
from holdfast.formats.npy.archive import MAGIC
from holdfast.formats.safetensors.schema import addressable

PREFIX_NBYTES = {(1, 0): 10, (2, 0): 12, (3, 0): 12}
"""Bytes before the text, by the version."""

LONGEST_NBYTES = 1 << 16
"""The longest text. 64 dimensions take 1,300 characters, and only a structured dtype takes more."""

USUAL_NBYTES = 256
"""Longer than almost all headers: numpy pads them to 64, and writes 128."""

FIELD = re.compile(
    r"""[ \t\r\n]*(['"])([^'"\\\n]*)\1[ \t\r\n]*:[ \t\r\n]*"""
    r"""(?:(['"])([^'"\\\n]*)\3|(True|False)|\(([0-9L, \t\r\n]*)\))[ \t\r\n]*(?:,|(?=\}))"""
)
"""A name, and a text, a truth or a row of lengths."""

STRUCTURES = re.compile(r"""[ \t\r\n]*['"]descr['"][ \t\r\n]*:[ \t\r\n]*[\[({]""")

FIELDS = {"descr": 4, "fortran_order": 5, "shape": 6}
"""The group of `FIELD` with the value of each field."""

CODE = re.compile(r"([<>|=]?)([?a-zA-Z])([0-9]{0,9})(\[.*\])?")

PLAIN = {
    "?": "bool",
    "b1": "bool",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "c8": "complex64",
    "c16": "complex128",
} | {
    f"{kind}{width // 8}": f"{name}{width}"
    for kind, name in (("i", "int"), ("u", "uint"))
    for width in (8, 16, 32, 64)
}

GUESSED = {
    "<V2": "bfloat16",
    "|V2": "bits16",
    ">V2": "bits16",
    "<V1": "bits8",
    "|V1": "bits8",
    "<f1": "float8_e5m2",
}
"""Types that numpy does not have, by the codes in the files."""

REASONS = {
    "O": "an array of Python objects, which is a pickle: it is never run; `holdfast scan` says what it would do",
    "U": "an array of text", "S": "an array of byte strings", "a": "an array of byte strings",
    "M": "an array of dates", "m": "an array of durations",
    "f": "a float of another width than 16, 32 and 64 bits: what it is depends on the machine",
    "c": "a complex number of another width than 64 and 128 bits: what it is depends on the machine",
    "V": "an array of raw bytes", "W": "one of two complex types of 16-bit halves, and the file does not say which",
}  # fmt: skip


class Layout(Value, frozen=True):
    dtype: DType
    byteorder: str
    fortran: bool
    """Whether the first index is the fastest."""
    shape: tuple[int, ...]
    data_start: int
    guessed: str = ""
    """The type code, if it is not numpy's name of the dtype."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.bits // 8


def header_nbytes(start: bytes) -> int:
    """Bytes before the elements, from the first twelve bytes. Raises `HeaderError`, `Unsupported` or `LimitExceeded`."""
    if not start.startswith(MAGIC):
        raise HeaderError(
            "no array of numpy begins here", offset=0, expected=MAGIC, found=start[:6]
        )
    if len(start) < 12:
        raise Truncated(
            f"the header of an array takes more than the {len(start)} bytes that are there",
            offset=len(start),
        )
    version = (start[6], start[7])
    prefix = PREFIX_NBYTES.get(version)
    if prefix is None:
        raise Unsupported(
            f"version {version[0]}.{version[1]} of numpy's array files; 1.0, 2.0 and 3.0 are known",
            found=version,
        )
    length = int.from_bytes(start[8:prefix], "little")
    if length > LONGEST_NBYTES:
        raise LimitExceeded(
            f"a header of {length:,} bytes; only structured dtypes, which are not read, have one of more than {LONGEST_NBYTES:,}",
            offset=8, expected=LONGEST_NBYTES, found=length,
        )  # fmt: skip
    return prefix + length


def read_layout(head: bytes, nbytes: int, *, rank: int) -> Layout | int:
    """The layout of an array file of `nbytes` that begins with `head`; if `head` is too short, the bytes that it needs."""
    whole = header_nbytes(head[:12])
    if whole > nbytes:
        raise Truncated(
            f"the header should end at byte {whole:,}, and the file has {nbytes:,}",
            offset=nbytes,
            expected=whole,
        )
    if whole > len(head):
        return whole
    layout = parse_layout(head[:whole], rank=rank)
    there = nbytes - whole
    if layout.nbytes > there:
        message = f"{list(layout.shape)} of {layout.dtype} takes {layout.nbytes:,} bytes, and {there:,} are there"
        raise Truncated(message, offset=nbytes, expected=layout.nbytes, found=there)
    if layout.nbytes < there:
        message = f"{there - layout.nbytes:,} bytes follow the array (several arrays in one file are only found by who wrote it)"
        raise HeaderError(
            message, offset=whole + layout.nbytes, expected=layout.nbytes, found=there
        )
    return layout


@lru_cache(maxsize=1024)
def parse_layout(header: bytes, *, rank: int) -> Layout:
    """The layout of a whole header. Most arrays of an archive have equal headers."""
    # Version 3 is UTF-8, for the names of fields; whatever we read is ASCII.
    found = _fields(header[PREFIX_NBYTES[header[6], header[7]] :].decode("latin-1"))
    shape = _lengths(found["shape"])
    if len(shape) > rank:
        raise LimitExceeded(
            f"an array of {len(shape):,} dimensions, above Limits(rank={rank})",
            expected=rank,
            found=len(shape),
        )
    dtype, byteorder, guessed = _dtype(found["descr"])
    if not addressable(shape, dtype.bits):
        raise MetadataError(f"{list(shape)} of {dtype} is more than any file can hold", found=shape)
    return Layout(dtype, byteorder, found["fortran_order"] == "True", shape, len(header), guessed)


def _dtype(code: str) -> tuple[DType, str, str]:
    parts = CODE.fullmatch(code)
    if parts is None:
        raise HeaderError("the type of the elements is no type code of numpy", found=code[:80])
    order, kind, width, _ = parts.groups()
    name = PLAIN.get(kind + width)
    guessed = GUESSED.get(order + kind + width, "")
    row = DTYPES.name(name or guessed)
    if row is None:
        why = REASONS.get(kind, "which is no element of a tensor")
        raise Unsupported(f"the elements are {code[:40]!r}: {why}", found=code[:80])
    return row, "big" if order == ">" and row.swap_nbytes > 1 else "little", guessed and code


def _fields(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    at = len(text) - len(text.lstrip(" \t\r\n")) + 1
    if text[at - 1 : at] != "{":
        raise _wrong(text, 0, "{")
    while field := FIELD.match(text, at):
        name = field[2]
        if name not in FIELDS or name in found:
            raise HeaderError(
                f"the header has {name[:40]!r} where it has descr, fortran_order and shape, each once"
            )
        value: str | None = field[FIELDS[name]]
        if value is None:
            raise _wrong(text, at, f"another value of {name}")
        found[name], at = value, field.end()
    if STRUCTURES.match(text, at):
        objects = (
            " with Python objects, which are a pickle and never run"
            if re.search("[|<>=]?O", text)
            else ""
        )
        raise Unsupported(
            f"an array of structures{objects}; only arrays of plain numbers are tensors"
        )
    if text[at:].strip(" \t\r\n") != "}":
        raise _wrong(text, at, "a field or the end of the header")
    for name in FIELDS:
        if name not in found:
            raise HeaderError(f"the header has no {name}")
    return found


def _wrong(text: str, at: int, expected: str) -> FormatError:
    there = text[at : at + 20]
    return HeaderError(
        f"expected {expected} in the header, found {there!r}", expected=expected, found=there
    )


def _lengths(text: str) -> tuple[int, ...]:
    """The lengths of a shape; Python 2 wrote `3L`."""
    parts = [part.strip(" \t\r\n") for part in text.split(",")]
    last = parts.pop()
    if last and not parts:
        raise HeaderError("the shape is a number, and no row of lengths", found=text[:80])
    digits = [part.removesuffix("L") for part in ((*parts, last) if last else parts)]
    if not all(map(str.isdecimal, digits)):
        raise HeaderError("the shape is no row of lengths", found=text[:80])
    longest = max(map(len, digits), default=0)
    if longest > 19:
        raise MetadataError(f"a length of {longest:,} digits")
    shape = tuple(map(int, digits))
    if max(shape, default=0) >= 1 << 63:
        raise HeaderError("the shape is no row of lengths", found=str(shape)[:80])
    return shape
