"""Which zip is a `.pt2`: a record whose name only a `.pt2` has.

prefix/archive_format                     'pt2'                     what torch 2.13 writes
serialized_exported_program.json          no folder around it       what torch wrote before, and 2.13 still reads
"""

from __future__ import annotations

from holdfast.core.protocols import Source
from holdfast.errors import HoldfastError
from holdfast.formats import FIRST_NBYTES
from holdfast.formats.zip.reader import read_archive

FORMAT_RECORD = "archive_format"
OLD_PROGRAM = "serialized_exported_program.json"


def is_pt2(source: Source, key: str) -> bool:
    """Return whether a zip is the container of `torch.export.save` and `torch.export.pt2_archive`."""
    head = source.read_head(key, FIRST_NBYTES)
    first_name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if not head.startswith(b"PK\3\4"):
        return False
    try:
        archive = read_archive(source, key)
    except HoldfastError:
        # The reader of the format says what is wrong with the archive.
        return first_name.endswith((FORMAT_RECORD.encode(), OLD_PROGRAM.encode()))
    return archive.get(FORMAT_RECORD) is not None or archive.get(OLD_PROGRAM) is not None
