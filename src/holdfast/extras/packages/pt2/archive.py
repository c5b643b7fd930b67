"""Which zip is a `.pt2`: the one way to know is a record, and its name is in the directory.

    prefix/archive_format                     'pt2'                     what torch 2.13 writes
    serialized_exported_program.json          no folder around it       what torch wrote before, and 2.13 still reads

`open` asks this of every zip, before it takes it for a checkpoint of `torch.save`, whose first record is `data.pkl`; so a look at
the first header answers most times. Else the directory is searched for the name. What is found decides nothing but the format: the
strict reader has the last word about the archive.
"""

from __future__ import annotations

import struct

from holdfast.core.protocols import Source
from holdfast.formats import FIRST_NBYTES

FORMAT_RECORD = "archive_format"
OLD_PROGRAM = "serialized_exported_program.json"

END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR_NBYTES = 20
MAX32 = 0xFFFFFFFF


def is_pt2(source: Source, key: str) -> bool:
    """Whether a zip is the container of `torch.export.save` and `torch.export.pt2_archive`."""
    head = source.first(key, FIRST_NBYTES)
    if not head.startswith(b"PK\3\4") or len(head) < END.size:
        return False
    first = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if first.endswith(b"/data.pkl"):
        return False
    return first == OLD_PROGRAM.encode() or _names_it(
        _directory(source, key, source.store.size(key))
    )


def _directory(source: Source, key: str, size: int) -> bytes:
    end = END.unpack(source.bytes(key, size - END.size, size))
    nbytes, start = end[5], end[6]
    if end[0] != b"PK\5\6":
        return b""
    wide = size - END.size - LOCATOR_NBYTES - END64.size
    if MAX32 in (nbytes, start) and wide >= 0:
        *_, nbytes, start = END64.unpack(source.bytes(key, wide, wide + END64.size))
    if start + nbytes > size or nbytes > source.limits.zip_directory_nbytes:
        return b""
    return source.bytes(key, start, start + nbytes)


def _names_it(directory: bytes) -> bool:
    """Whether an entry of the directory has one of the two names.

    >>> entry = b"PK" + bytes(26) + (16).to_bytes(2, "little") + bytes(16) + b"m/archive_format"
    >>> _names_it(entry), _names_it(entry.replace(b"format", b"texts."))
    (True, False)
    """
    at = 0
    for wanted in (FORMAT_RECORD.encode(), OLD_PROGRAM.encode()):
        if wanted not in directory:
            continue
        at = 0
        while at + 46 <= len(directory):
            length, extra, comment = struct.unpack_from("<3H", directory, at + 28)
            name = directory[at + 46 : at + 46 + length]
            if name == wanted or (name.endswith(b"/" + wanted) and name.count(b"/") == 1):
                return True
            at += 46 + length + extra + comment
    return False
