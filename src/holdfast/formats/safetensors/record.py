"""The entry `holdfast` in a file's `__metadata__`: checksums, and what the format has no other place for.

    {"version": 1, "of": "1c291ca3", …the fields of `formats.recorded`…, "crc32": "9f3a01d2" + "00c4e6b7" + …}

`crc32` holds eight hexadecimal digits a tensor, in the order of the header. `of` is the CRC-32 of the tensors' part of the header
as msgspec writes it: another tool that changes tensors and copies the metadata leaves a record about a file that is no more. Such a
record is not used, and a note says so. One that is about this file and breaks a rule is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from holdfast.core.crc import crc32
from holdfast.core.limits import Limits
from holdfast.errors import HeaderError, LimitExceeded
from holdfast.formats.recorded import FIELDS, Recorded, parse_recorded
from holdfast.formats.safetensors.strict_json import kind, parse_own, pay_for_containers, pointer
from holdfast.formats.tree_json import json_limits

__all__ = ["CRC_DIGITS", "RECORD", "Record", "fingerprint", "read_record", "record_ends"]

RECORD = "holdfast"
"""The key in `__metadata__`, and in the `metadata` of an index."""

VERSION = 1

CRC_DIGITS = 8

HEX = frozenset("0123456789abcdef")

OTHER_FILE = f"__metadata__.{RECORD} is about tensors that were there before another program changed the file; it is not used"


@dataclass(frozen=True, slots=True)
class Record:
    """A checked record."""

    crcs: Mapping[str, int] = field(default_factory=dict)
    """CRC-32 of the bytes of each tensor."""
    recorded: Recorded = field(default_factory=Recorded)
    notes: tuple[str, ...] = ()


def fingerprint(content: object) -> str:
    """What ties a record to what it is about: entries of a header, or the weight map of an index."""
    return f"{crc32(msgspec.json.encode(content)):08x}"


def record_ends(fields: Mapping[str, object], content: object) -> tuple[bytes, bytes]:
    """A record as JSON text in two parts; between them a file has its checksums.

    Spaces stand at the end where the reader would think that it has too many lists for its length.
    """
    raw = msgspec.json.encode({"version": VERSION, "of": fingerprint(content), **fields})
    spaces = len(pay_for_containers(raw)) - len(raw)
    return raw[:-1], b"}" + b" " * spaces


def read_record(text: str | None, content: object, names: Mapping[str, object] | None, limits: Limits) -> Record:
    """Check a record; `content` is what it must be about, `names` the tensors that have checksums in it, if any have.

    Raises `HeaderError`, or `LimitExceeded` for nesting.
    """
    if text is None:
        return Record()
    try:
        document = parse_own(text.encode("utf-8"), json_limits(limits))
        if not isinstance(document, dict):
            raise HeaderError(f"at $: expected an object, found {kind(document)}")
        version, of = document.get("version"), document.get("of")
        if type(version) is not int or not isinstance(of, str):
            raise HeaderError("at $: expected a version and what the record is of")
        if of != fingerprint(content):
            return Record(notes=(OTHER_FILE,))
        if version != VERSION:
            return Record(notes=(f"__metadata__.{RECORD} is of version {version:,}, which this Holdfast does not know; not used",))
        allowed = {"version", "of", *FIELDS, *(("crc32",) if names is not None else ())}
        for name in document:
            if name not in allowed:
                raise HeaderError(f"at {pointer(name)}: a record has no such field")
        crcs = {} if names is None else _checksums(document.get("crc32"), names)
        return Record(crcs, parse_recorded(document))
    except (HeaderError, LimitExceeded) as error:
        error.args = (f"in __metadata__.{RECORD}: {error.message}",)
        error.message = error.args[0]
        raise


def _checksums(digits: object, names: Mapping[str, object]) -> dict[str, int]:
    if not isinstance(digits, str) or len(digits) != CRC_DIGITS * len(names) or not HEX.issuperset(digits):
        expected = f"{CRC_DIGITS} digits for each of {len(names):,} tensors"
        raise HeaderError(f"at {pointer('crc32')}: expected {expected}, found {kind(digits)}")
    numbers = np.frombuffer(bytes.fromhex(digits), ">u4").tolist()
    return dict(zip(names, numbers, strict=True))
