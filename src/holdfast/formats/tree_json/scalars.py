"""Values without parts that JSON cannot say: odd floats, long integers, text that is not Unicode, bytes, numpy's elements.

Each has one text form, and a function each way. Reading raises `ValueError` with the reason; the caller knows the place.
"""

from __future__ import annotations

import base64
import math
import re
import struct

import numpy as np

from holdfast.core.arrays import AnyDType
from holdfast.core.strict_json import is_unicode
from holdfast.formats.pickle.arrays import ML_DTYPES, wrong_character

SAFE_INTEGER = 1 << 53
"""Integers up to here are the same in every reader of JSON; many keep numbers as 64-bit floats."""

INTEGER_DIGITS = 4300
"""Python's own limit for integers in decimal, above which reading them is refused because it takes quadratic time."""

ARRAY_NBYTES = 64 << 20
"""The largest array inside of the JSON document. Larger arrays belong into tensors."""

DECIMAL = re.compile(r"-?[1-9][0-9]*\Z")

FLOATS = {"inf": math.inf, "-inf": -math.inf, "-0.0": -0.0, "nan": math.nan}
NAN_BITS = re.compile(r"nan:[0-9a-f]{16}\Z")
"""A NaN with a sign or a payload of its own, as the bits of the number."""

CODE = re.compile(
    r"[<>|][?biufcSUVmM][0-9]{1,9}(\[[0-9]{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?\Z"
)

ML_NAMES = {dtype: name for name, dtype in ML_DTYPES.items()}


def float_text(value: float) -> str | None:
    """The text of a float that JSON lacks; None for any other."""
    if math.isnan(value):
        bits = struct.pack(">d", value).hex()
        return "nan" if bits == "7ff8000000000000" else f"nan:{bits}"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return "-0.0" if value == 0 and math.copysign(1, value) < 0 else None


def float_from(text: str) -> float:
    if text in FLOATS:
        return FLOATS[text]
    if not NAN_BITS.match(text):
        raise ValueError("no float that JSON lacks")
    (value,) = struct.unpack(">d", bytes.fromhex(text[4:]))
    if not math.isnan(value):
        raise ValueError("bits that are no NaN")
    return float(value)


def integer_text(value: int) -> str | None:
    """An integer in decimal; None if it is too long to be read back."""
    # 3 bits a digit is on the safe side: `str` refuses from 4300 digits on, and so does `integer_from`.
    if value.bit_length() > INTEGER_DIGITS * 3:
        return None
    return str(value)


def integer_from(text: str) -> int:
    if len(text) > INTEGER_DIGITS or not DECIMAL.match(text):
        raise ValueError(f"no integer in decimal of at most {INTEGER_DIGITS} digits")
    return int(text)


def bytes_text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def bytes_from(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except ValueError:
        raise ValueError("no base64") from None


def dtype_form(dtype: AnyDType) -> object:
    """A numpy dtype as JSON: a text, or names, formats, offsets and size of a structured dtype; None if it has no form."""
    if dtype in ML_NAMES:
        return ML_NAMES[dtype]
    if dtype.hasobject or dtype.subdtype is not None:
        return None
    if dtype.fields is not None and dtype.names is not None:
        fields = [dtype.fields[name] for name in dtype.names]
        formats = [None if field[0].names is not None else dtype_form(field[0]) for field in fields]
        if (
            None in formats
            or any(len(field) > 2 for field in fields)
            or not all(map(is_unicode, dtype.names))
        ):
            return None
        offsets = [field[1] for field in fields]
        return {
            "names": list(dtype.names),
            "formats": formats,
            "offsets": offsets,
            "itemsize": dtype.itemsize,
        }
    return dtype.str if CODE.match(dtype.str) else None


def dtype_from(form: object) -> AnyDType:
    match form:
        case str() if form in ML_DTYPES:
            known: AnyDType = ML_DTYPES[form]
            return known
        case str() if CODE.match(form):
            try:
                plain: AnyDType = np.dtype(form)
                return plain
            except (TypeError, ValueError):
                raise ValueError("no dtype of numpy") from None
        case {
            "names": list(names),
            "formats": list(texts),
            "offsets": list(offsets),
            "itemsize": int(size),
            **rest,
        } if not rest:
            return _structured(names, texts, offsets, size=size)
        case _:
            raise ValueError("no dtype of numpy")


def _structured(
    names: list[object], texts: list[object], offsets: list[object], *, size: int
) -> AnyDType:
    if not all(isinstance(text, str) for text in texts) or not all(
        type(name) is str for name in names
    ):
        raise ValueError("a structured dtype needs texts as names and formats")
    formats = [dtype_from(text) for text in texts]
    starts = [offset for offset in offsets if type(offset) is int]
    if (
        not len(names) == len(formats) == len(starts) == len(offsets)
        or type(size) is not int
        or not 0 <= size < 1 << 31
    ):
        raise ValueError(
            "a structured dtype needs as many formats and offsets as names, and a size"
        )
    if any(not 0 <= at <= size - inner.itemsize for at, inner in zip(starts, formats, strict=True)):
        raise ValueError("a field beyond the end of its structured dtype")
    try:
        texts_of_names = [str(name) for name in names]
        made: AnyDType = np.dtype(
            {"names": texts_of_names, "formats": formats, "offsets": starts, "itemsize": size}
        )
        return made
    except (TypeError, ValueError):
        raise ValueError("a structured dtype that numpy refuses") from None


def array_from(data: bytes, dtype: AnyDType, shape: list[object], *, rank: int) -> np.ndarray:
    """A read-only array over bytes; nothing is allocated for a claimed shape."""
    if len(shape) > rank:
        raise ValueError(f"an array of {len(shape):,} dimensions")
    lengths = tuple(n for n in shape if type(n) is int and 0 <= n < 1 << 63)
    if len(lengths) != len(shape):
        raise ValueError("a shape that is no list of lengths")
    count = math.prod(lengths)
    if not dtype.itemsize or count * dtype.itemsize != len(data):
        raise ValueError(
            f"{len(data):,} bytes for an array of {count:,} elements of {dtype.itemsize} bytes"
        )
    try:
        made: np.ndarray = np.ndarray(lengths, dtype, buffer=data)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("an array that numpy refuses") from None
    if wrong_character(made) is not None:
        raise ValueError("text with characters that Unicode has not")
    return made


def scalar_from(data: bytes, dtype: AnyDType) -> np.generic:
    if dtype.kind in "US":
        raise ValueError("text and bytes of numpy have tags of their own")
    try:
        element: object = array_from(data, dtype, [], rank=0)[()]
    except (ValueError, OverflowError):
        raise ValueError("an element that numpy refuses") from None
    if not isinstance(element, np.generic):
        raise ValueError("bytes that are no element of numpy")
    return element
