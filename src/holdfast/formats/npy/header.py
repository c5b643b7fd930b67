"""Parses the header of an array file.

The header is a Python dict such as `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }`. It
must have these three fields in any order, each once.

The type code in `descr` is a type of numpy. The narrow types of ml_dtypes have no code of their own,
so numpy writes a code for their size. Some of these codes are ambiguous:

    <V2     bfloat16, the only type that is written so
    <f1     float8_e5m2, the only type that is written so
    |V2     two bytes of an unknown type, read as bits16
    <V1     one of twelve types of one byte, read as bits8
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
from holdfast.formats.npy.detect import MAGIC
from holdfast.formats.safetensors.schema import is_addressable

PREFIX_NBYTES = {(1, 0): 10, (2, 0): 12, (3, 0): 12}
"""The size of magic, version and header length, by version."""

MAX_HEADER_NBYTES = 1 << 16
"""64 dimensions take 1,300 characters. Only a structured dtype takes more."""

USUAL_HEADER_NBYTES = 256
"""More than almost all headers have: numpy pads them to a multiple of 64 bytes and writes 128."""

WHITESPACE = " \t\r\n"

FIELD = re.compile(
    r"""
    [ \t\r\n]* (?P<quote>['"]) (?P<name>[^'"\\\n]*) (?P=quote)
    [ \t\r\n]* :
    [ \t\r\n]*
    (?:
        (?P<string_quote>['"]) (?P<string>[^'"\\\n]*) (?P=string_quote)
        | (?P<boolean>True|False)
        | \( (?P<tuple>[0-9L, \t\r\n]*) \)
    )
    [ \t\r\n]* (?: , | (?=\}) )
    """,
    re.VERBOSE,
)
"""A field of the header: a name in quotes, and a string, a boolean or a tuple of integers."""

VALUE_GROUPS = {"descr": "string", "fortran_order": "boolean", "shape": "tuple"}
"""The group of `FIELD` that must match the value of each field."""

STRUCTURED_DTYPE = re.compile(r"""[ \t\r\n]*['"]descr['"][ \t\r\n]*:[ \t\r\n]*[\[({]""")

TYPE_CODE = re.compile(r"([<>|=]?)([?a-zA-Z])([0-9]{0,9})(\[.*\])?")

DTYPE_NAMES = {
    "?": "bool",
    "b1": "bool",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "u1": "uint8",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "c8": "complex64",
    "c16": "complex128",
}
"""The dtypes that numpy has, by kind and size."""

GUESSED_DTYPE_NAMES = {
    "<V2": "bfloat16",
    "|V2": "bits16",
    ">V2": "bits16",
    "<V1": "bits8",
    "|V1": "bits8",
    "<f1": "float8_e5m2",
}
"""The dtypes that numpy does not have, by the codes that it writes for them."""

REASONS = {
    "O": "an array of Python objects is a pickle, which is never run; `holdfast scan` lists what it would do",
    "U": "an array of text is not a tensor",
    "S": "an array of byte strings is not a tensor",
    "a": "an array of byte strings is not a tensor",
    "M": "an array of dates is not a tensor",
    "m": "an array of durations is not a tensor",
    "f": "floats of other sizes than 16, 32 and 64 bits depend on the machine that wrote them",
    "c": "complex numbers of other sizes than 64 and 128 bits depend on the machine that wrote them",
    "V": "an array of raw bytes is not a tensor",
    "W": "two complex types have this code",
}
"""Why an array is not read, by the kind of its elements."""


class ArrayHeader(Value, frozen=True):
    """The parsed header of an array file."""

    dtype: DType
    byteorder: str
    fortran_order: bool
    """Whether the first index varies fastest."""
    shape: tuple[int, ...]
    data_start: int
    """The offset of the elements in the file."""
    guessed_code: str = ""
    """The type code, if the dtype was guessed from it, otherwise empty."""

    @property
    def data_nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.bits // 8


def read_header(head: bytes, file_nbytes: int, *, max_rank: int) -> ArrayHeader | int:
    """Parse the header of an array file, and check that the elements fill the rest of the file.

    Args:
        head: The first bytes of the file.
        file_nbytes: The size of the file.
        max_rank: The largest number of dimensions that is accepted.

    Returns:
        The header, or the size of the header if `head` has only a part of it.

    Raises:
        FormatError: The header is damaged, or the elements have another size.
        Unsupported: The version or the type of the elements is not supported.
        LimitExceeded: The header or the number of dimensions is too large.
    """
    data_start = _header_nbytes(head[:12])
    if data_start > file_nbytes:
        raise Truncated(
            f"the header ends at byte {data_start:,}, but the file has only {file_nbytes:,} bytes",
            offset=file_nbytes,
            expected=data_start,
        )
    if data_start > len(head):
        return data_start

    header = parse_header(head[:data_start], max_rank=max_rank)
    data_nbytes = file_nbytes - data_start
    if header.data_nbytes > data_nbytes:
        message = (
            f"the shape {list(header.shape)} of {header.dtype} needs {header.data_nbytes:,} bytes,"
            f" but the file has only {data_nbytes:,} bytes after the header"
        )
        raise Truncated(message, offset=file_nbytes, expected=header.data_nbytes, found=data_nbytes)
    if header.data_nbytes < data_nbytes:
        # numpy can write several arrays to one file object. No other program can tell where they end.
        raise HeaderError(
            f"{data_nbytes - header.data_nbytes:,} unexpected bytes follow the array",
            offset=data_start + header.data_nbytes,
            expected=header.data_nbytes,
            found=data_nbytes,
        )
    return header


def _header_nbytes(start: bytes) -> int:
    """Return the offset of the elements. `start` has the first twelve bytes of the file."""
    if not start.startswith(MAGIC):
        raise HeaderError("not an array file of numpy", offset=0, expected=MAGIC, found=start[:6])
    if len(start) < 12:
        message = f"the file ends after {len(start)} bytes, within the header of the array"
        raise Truncated(message, offset=len(start))
    version = (start[6], start[7])
    prefix_nbytes = PREFIX_NBYTES.get(version)
    if prefix_nbytes is None:
        raise Unsupported(
            f"version {version[0]}.{version[1]} of numpy's array format is not supported;"
            " supported versions are 1.0, 2.0 and 3.0",
            found=version,
        )
    header_nbytes = int.from_bytes(start[8:prefix_nbytes], "little")
    if header_nbytes > MAX_HEADER_NBYTES:
        raise LimitExceeded(
            f"the header has {header_nbytes:,} bytes, more than the {MAX_HEADER_NBYTES:,} bytes that"
            " an array of plain numbers can need",
            offset=8,
            expected=MAX_HEADER_NBYTES,
            found=header_nbytes,
        )
    return prefix_nbytes + header_nbytes


@lru_cache(maxsize=1024)
def parse_header(header: bytes, *, max_rank: int) -> ArrayHeader:
    """Parse a complete header. Most arrays of an archive have equal headers, so results are cached."""
    prefix_nbytes = PREFIX_NBYTES[header[6], header[7]]
    # Version 3 allows UTF-8 in the names of structured dtypes. All that is accepted here is ASCII.
    fields = _parse_fields(header[prefix_nbytes:].decode("latin-1"))

    shape = _parse_shape(fields["shape"])
    if len(shape) > max_rank:
        message = f"the array has {len(shape):,} dimensions, more than Limits(rank={max_rank})"
        raise LimitExceeded(message, expected=max_rank, found=len(shape))
    dtype, byteorder, is_guessed = _resolve_type_code(fields["descr"])
    if not is_addressable(shape, dtype.bits):
        message = f"the shape {list(shape)} of {dtype} is larger than any file"
        raise MetadataError(message, found=shape)
    return ArrayHeader(
        dtype=dtype,
        byteorder=byteorder,
        fortran_order=fields["fortran_order"] == "True",
        shape=shape,
        data_start=len(header),
        guessed_code=fields["descr"] if is_guessed else "",
    )


def _resolve_type_code(code: str) -> tuple[DType, str, bool]:
    """Return the dtype of a type code, its byte order, and whether the dtype was guessed."""
    match = TYPE_CODE.fullmatch(code)
    if match is None:
        raise HeaderError("descr is not a type code of numpy", found=code[:80])
    byte_order, kind, size, _ = match.groups()
    dtype_name = DTYPE_NAMES.get(kind + size)
    is_guessed = dtype_name is None
    if dtype_name is None:
        dtype_name = GUESSED_DTYPE_NAMES.get(byte_order + kind + size, "")

    dtype = DTYPES.name(dtype_name)
    if dtype is None:
        reason = REASONS.get(kind, "this is not the type of a tensor")
        raise Unsupported(f"the array has the type {code[:40]!r}: {reason}", found=code[:80])
    if byte_order == ">" and dtype.swap_nbytes > 1:
        return dtype, "big", is_guessed
    return dtype, "little", is_guessed


def _parse_fields(text: str) -> dict[str, str]:
    """Return the three fields of a header, with their values as text."""
    offset = len(text) - len(text.lstrip(WHITESPACE))
    if text[offset : offset + 1] != "{":
        raise _unexpected_text(text, 0, "{")
    offset += 1

    fields: dict[str, str] = {}
    while match := FIELD.match(text, offset):
        name = match["name"]
        if name not in VALUE_GROUPS or name in fields:
            message = f"unexpected field {name[:40]!r}; a header has descr, fortran_order and shape, each once"
            raise HeaderError(message)
        value: str | None = match[VALUE_GROUPS[name]]
        if value is None:
            raise _unexpected_text(text, offset, f"another type of value for {name}")
        fields[name] = value
        offset = match.end()

    if STRUCTURED_DTYPE.match(text, offset):
        elements = "structures"
        if re.search("[|<>=]?O", text):
            elements = "structures with Python objects, which are a pickle and never run"
        raise Unsupported(f"this is an array of {elements}; only arrays of numbers are tensors")
    if text[offset:].strip(WHITESPACE) != "}":
        raise _unexpected_text(text, offset, "a field or the end of the header")
    for name in VALUE_GROUPS:
        if name not in fields:
            raise HeaderError(f"the header has no field {name}")
    return fields


def _unexpected_text(text: str, offset: int, expected: str) -> FormatError:
    actual_text = text[offset : offset + 20]
    message = f"expected {expected} in the header, found {actual_text!r}"
    return HeaderError(message, expected=expected, found=actual_text)


def _parse_shape(text: str) -> tuple[int, ...]:
    """Parse the inside of a tuple such as `3, 4`. Python 2 wrote `3L, 4L`."""
    items = [item.strip(WHITESPACE) for item in text.split(",")]
    if items[-1] == "":
        # The comma at the end of `3,`, or an empty tuple.
        items.pop()
    elif len(items) == 1:
        raise HeaderError("the shape must be a tuple, got an integer", found=text[:80])

    digits = [item.removesuffix("L") for item in items]
    if not all(map(str.isdecimal, digits)):
        raise HeaderError("the shape must be a tuple of integers", found=text[:80])
    # Python needs quadratic time to convert very long digits.
    max_digit_count = max(map(len, digits), default=0)
    if max_digit_count > 19:
        raise MetadataError(f"the shape has an integer of {max_digit_count:,} digits")
    shape = tuple(map(int, digits))
    if max(shape, default=0) >= 1 << 63:
        raise HeaderError("the shape has an integer of more than 63 bits", found=str(shape)[:80])
    return shape
