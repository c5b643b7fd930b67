"""A JSON document that carries its own checksum, so that no byte of it can change unnoticed.

    {"format":"holdfast", …, "self":"5bb0e7a9"}␠␠␠

`self` is the last field: the CRC-32 of the whole text, the spaces behind it included, with these eight digits as zeros. It stands
at a known distance from the end, so it is compared before anything is parsed.
"""

from __future__ import annotations

from holdfast.core.crc import crc32
from holdfast.errors import Corrupted

__all__ = ["HEX", "SEAL", "SEAL_NBYTES", "check_seal", "hexadecimal", "seal"]

SEAL = "self"
"""The name of the field."""

OPENING = b',"self":"'
BLANK = b"00000000"
CLOSING = b'"}'
SEAL_NBYTES = len(OPENING) + len(BLANK) + len(CLOSING)

HEX = frozenset("0123456789abcdef")


def hexadecimal(digits: object) -> int | None:
    """A CRC-32 from its eight digits, or None for anything else."""
    return int(digits, 16) if isinstance(digits, str) and len(digits) == len(BLANK) and HEX.issuperset(digits) else None


def seal(raw: bytes, nbytes: int = 0) -> bytes:
    """A JSON object with a last field that is its checksum, filled with spaces to a length of `nbytes`."""
    blank = (raw[:-1] + OPENING + BLANK + CLOSING).ljust(nbytes)
    at = len(raw) - 1 + len(OPENING)
    return blank[:at] + b"%08x" % crc32(blank) + blank[at + len(BLANK) :]


def check_seal(raw: bytes, what: str) -> bool:
    """Whether a document has a checksum of its own. Raises `Corrupted` where it is not that of the document."""
    end = len(raw.rstrip(b" "))
    tail = raw[max(end - SEAL_NBYTES, 0) : end]
    if len(tail) != SEAL_NBYTES or not tail.startswith(OPENING) or not tail.endswith(CLOSING):
        return False
    at = end - len(CLOSING) - len(BLANK)
    digits = raw[at : at + len(BLANK)].decode("latin-1")
    expected = hexadecimal(digits)
    whole = memoryview(raw)
    found = crc32(whole[at + len(BLANK) :], crc32(BLANK, crc32(whole[:at])))
    if found != expected:
        raise Corrupted(
            f"{what} does not have the checksum that it records of itself ({digits!r}, not {found:08x}): it changed after it was "
            "written; get it again",
            expected=expected,
            found=found,
        )
    return True
