"""Values that a pickle writes as text (protocols 0 and 1), read without `eval` and in time linear in their length.

Python 2 strings (STRING, BINSTRING, SHORT_BINSTRING) are bytes that were mostly meant as text: they become `str` where they are
UTF-8, which ASCII is, and stay `bytes` where they are not. Encoding such a `str` as UTF-8 gives the very bytes back.
"""

from __future__ import annotations

import codecs
import re

from holdfast.errors import LimitExceeded, PickleError

FLOAT = re.compile(rb"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?(?:nan|inf)")
FLOAT_NBYTES = 64
"""`repr` of a float has 24 characters at most."""

ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|[\\'\"abfnrtv\n])?", re.DOTALL)
LETTERS = {
    b"\\": b"\\", b"'": b"'", b'"': b'"', b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t",
    b"v": b"\v", b"\n": b"",
}  # fmt: skip


def decimal(text: bytes, most_nbytes: int) -> int:
    """An integer in decimal digits whose magnitude fits into `most_nbytes` bytes.

    >>> decimal(b"-12", 16)
    -12
    """
    digits = text[1:] if text[:1] == b"-" else text
    # 8 bits are 2.41 digits. Bounded before int(), whose cost is quadratic.
    if len(digits) > most_nbytes * 8 * 30103 // 100000 + 2:
        message = f"an integer of {len(digits):,} digits is larger than Limits(integer_nbytes={most_nbytes})"
        raise LimitExceeded(message, expected=most_nbytes, found=len(digits))
    if not digits.isdigit():
        raise PickleError(f"{text[:40]!r} is no decimal integer", found=text[:40])
    value = int(text)
    if value.bit_length() > 8 * most_nbytes:
        raise LimitExceeded(
            f"an integer is larger than Limits(integer_nbytes={most_nbytes})", expected=most_nbytes
        )
    return value


def signed(raw: bytes) -> int:
    """A two's-complement integer, lowest byte first; no bytes mean 0."""
    return int.from_bytes(raw, "little", signed=True)


def float_text(text: bytes) -> float:
    """A float as `repr` writes it."""
    if len(text) > FLOAT_NBYTES or not FLOAT.fullmatch(text):
        raise PickleError(f"{text[:40]!r} is no float", found=text[:40])
    return float(text)


def utf8(raw: bytes) -> str:
    """UTF-8 text; a lone surrogate, which CPython writes as three bytes, stays one."""
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise PickleError(f"text that is no UTF-8: {error.reason}") from None


def raw_unicode(raw: bytes) -> str:
    """The argument of UNICODE: Latin-1 with escapes of four and eight hexadecimal digits."""
    try:
        # The codec itself: finding it by name makes CPython import a module of `encodings`, once, because a file asked.
        return codecs.raw_unicode_escape_decode(raw)[0]
    except UnicodeDecodeError as error:
        raise PickleError(f"text with a broken escape: {error.reason}") from None


def python2_string(raw: bytes) -> str | bytes:
    """A Python 2 `str`: text where it is UTF-8, else bytes.

    >>> python2_string(b"cpu"), python2_string(b"\\xff")
    ('cpu', b'\\xff')
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def quoted(text: bytes) -> bytes:
    r"""The bytes of a quoted Python 2 literal, as `repr` wrote it.

    >>> quoted(rb"'a\x00\n'")
    b'a\x00\n'
    """
    if len(text) < 2 or text[:1] not in (b"'", b'"') or text[-1:] != text[:1]:
        raise PickleError("a STRING whose text is not in quotes", found=text[:40])
    return ESCAPE.sub(_unescape, text[1:-1])


def _unescape(match: re.Match[bytes]) -> bytes:
    code: bytes | None = match[1]
    if code is None:
        raise PickleError("a STRING with an escape that Python 2 never wrote")
    if code in LETTERS:
        return LETTERS[code]
    # Three octal digits reach 0o777; Python keeps the low eight bits.
    return bytes([int(code[1:], 16) if code[:1] == b"x" else int(code, 8) & 0xFF])
