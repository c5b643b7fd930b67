"""The checksum of `.metadata`, in a file beside it: torch's index is a pickle that has no room for one.

    .holdfast.json     {"version":1,"nbytes":612,"crc32":"5bb0e7a9","self":"1c291ca3"}

The items of the data files have those of their archives. torch's own reader opens the files that `.metadata` names and no others.

torch's writer saves into a folder that holds a checkpoint already, and leaves this file of the one before. Its metadata has an id
of the save, which ours has not, and so another length. So metadata of the recorded length and another checksum is damaged, and
metadata of another length is another program's, or damaged: it is used, and `verify` says so.
"""

from __future__ import annotations

import msgspec

from holdfast.core.crc import crc32
from holdfast.core.protocols import Source
from holdfast.errors import Corrupted, located
from holdfast.formats.seal import SEAL, check_seal, hexadecimal, seal

__all__ = ["BESIDE", "checksum_file", "compare_metadata"]

BESIDE = ".holdfast.json"
METADATA = ".metadata"
MOST_NBYTES = 4096
"""Of the file beside: it has four short fields."""


class Recorded(msgspec.Struct, forbid_unknown_fields=True):
    """The fields."""

    version: int
    nbytes: int
    crc32: str
    sealed: str = msgspec.field(name=SEAL)


def checksum_file(metadata: bytes) -> bytes:
    """What stands beside this metadata."""
    return seal(msgspec.json.encode({"version": 1, "nbytes": len(metadata), "crc32": f"{crc32(metadata):08x}"}))


def compare_metadata(source: Source) -> Corrupted | None:
    """What is wrong with the metadata of a directory, or with the file that says so; None where nothing is known to be.

    Raises `Corrupted` where the metadata is damaged for sure.
    """
    keys = source.store.list()
    if BESIDE not in keys or METADATA not in keys:
        return None
    try:
        recorded = _read(source)
    except Corrupted as error:
        return error
    if recorded is None:
        return None
    size = source.store.size(METADATA)
    expected = hexadecimal(recorded.crc32)
    if size != recorded.nbytes:
        return Corrupted(
            f"{METADATA} is not the one that Holdfast wrote: another program saved into this folder, or the file is damaged. If "
            f"the save was meant, delete {BESIDE}",
            file=METADATA,
            expected=recorded.nbytes,
        )
    found = crc32(source.bytes(METADATA, 0, size))
    if found != expected:
        raise Corrupted(
            f"the index does not have the checksum that {BESIDE} records ({recorded.crc32}, not {found:08x}): it changed after it "
            "was written; get it again",
            file=METADATA,
            expected=expected,
            found=found,
        )
    return None


def _read(source: Source) -> Recorded | None:
    """The file beside; None for one of a later version. Raises `Corrupted`."""
    size = source.store.size(BESIDE)
    raw = source.bytes(BESIDE, 0, min(size, MOST_NBYTES))
    with located(file=BESIDE):
        sealed = check_seal(raw, f"{BESIDE}, with the checksum of the index,")
        try:
            recorded = msgspec.json.decode(raw, type=Recorded)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            recorded = None
        if sealed and recorded is None:
            return None
        if not sealed or recorded is None:
            raise Corrupted(f"{BESIDE}, with the checksum of the index, is damaged; nothing else needs it, and it may be deleted")
    return recorded if recorded.version == 1 else None
