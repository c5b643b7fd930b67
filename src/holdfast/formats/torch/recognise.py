"""How files of torch are recognised by their first bytes.

A module of its own, because detection asks of every file, and describing one needs the pickle interpreter.
"""

from __future__ import annotations

from holdfast.core.protocols import Source
from holdfast.errors import FormatError

MAGIC = 0x1950A86A20F9469CFC6C
"""The first value in the stream of `torch.save` before 1.6."""

MAGIC_BYTES, MAGIC_TEXT = MAGIC.to_bytes(10, "little"), str(MAGIC).encode()
BEFORE_MAGIC_NBYTES = 16
"""The most bytes before the magic number: PROTO, a frame, and the opcode with its length take 13."""

BLOCK_NBYTES, OCTAL = 512, b"01234567"
MEMBERS = ("storages", "tensors", "pickle")
"""The members of the tar that torch 0.1 wrote."""


def begins_like_torch(source: Source, key: str) -> bool:
    """Return whether a file begins with a record of a zip."""
    return source.first(key, 4) == b"PK\3\4"


def begins_like_legacy(source: Source, key: str) -> bool:
    """Whether the magic number is the first value, whatever protocol wrote it."""
    head = source.first(key, 64)
    # A bare pickle of a storage has a whole stream of `torch.save` in it, a little further behind.
    places = head.find(MAGIC_BYTES), head.find(MAGIC_TEXT)
    return any(0 <= place <= BEFORE_MAGIC_NBYTES for place in places)


def begins_like_torch_tar(source: Source, key: str) -> bool:
    """Whether a file begins like a tar of POSIX, or with a header of torch's own members."""
    head = source.first(key, BLOCK_NBYTES)
    if len(head) < BLOCK_NBYTES:
        return False
    if head[257:262] == b"ustar":
        return True
    return head.split(b"\0", 1)[0].decode("latin-1") in MEMBERS and has_tar_checksum(head)


def has_tar_checksum(head: bytes) -> bool:
    """Whether the checksum of a tar header is that of its bytes."""
    field = head[148:156].strip(b" \0")
    if not field or field.strip(OCTAL):
        return False
    return int(field, 8) == sum(head[:148]) + 8 * 32 + sum(head[156:])


def begins_like_tar(head: bytes) -> bool:
    """Whether CPython's tarfile takes the first block for a header: by its checksum, whatever else is in it."""
    field = head[148:156].split(b"\0", 1)[0].strip(b" ")
    if len(head) < BLOCK_NBYTES or not field or field.strip(OCTAL):
        return False
    unsigned = sum(head[:148]) + 256 + sum(head[156:BLOCK_NBYTES])
    signed = unsigned - 256 * sum(c > 127 for c in head[:148] + head[156:BLOCK_NBYTES])
    return int(field, 8) in (unsigned, signed)


def tar_error(key: str, format: str) -> FormatError:
    """Return the error for a file of another format that torch would load as a tar."""
    both = f"the file is {format} and a tar at once, and torch would load the tar"
    why = "it was made to show one thing and load another; `holdfast scan` shows what both would do"
    return FormatError(f"{both}: {why}", file=key)
