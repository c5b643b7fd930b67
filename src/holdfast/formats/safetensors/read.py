"""One safetensors file: eight bytes of length, a JSON header, and the tensors without holes.

Opening costs one read of the header. A file of 100,000 tensors has a header of 10 MB, so it becomes columns (`core/table.py`); a
`LazyTensor` is made when it is asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain

from holdfast.core.chunk import Storage
from holdfast.core.protocols import Description, Source, Store
from holdfast.core.runtime import copy_compactly
from holdfast.core.table import RowKind, StoredFile, Table
from holdfast.core.tensor import NO_CRC
from holdfast.core.value import Value
from holdfast.engine.files import FileStorages
from holdfast.errors import (
    Corrupted,
    HeaderError,
    HoldfastError,
    LimitExceeded,
    Truncated,
    error_context,
)
from holdfast.formats.index_file import some
from holdfast.formats.safetensors.schema import (
    DTYPE_OF_CODE,
    MANIFEST,
    NO_RECORD,
    PREFIX_NBYTES,
    RECORD,
    RECORD_START,
    SHARDING_INFO,
    HeaderColumns,
    HeaderEntry,
    HeaderRecord,
    check_layout,
    parse_exact,
    parse_fast,
)

SMALLEST_NBYTES = 2

LONGEST_CLAIM = 1 << 48
"""A first word above this is not a length but text, a pickle or a zip, which have no two zero bytes there."""

LFS_POINTER = b"version https://git-lfs"
"""The first bytes of the file that Git leaves in place of a large file."""


class Header(Value, frozen=True, dict=True):
    key: str
    data_start: int
    """The byte of the file that data offsets count from."""
    names: Sequence[str]
    metadata: dict[str, str]
    """The file's `__metadata__`, without the record."""
    columns: HeaderColumns
    record: HeaderRecord
    unknown_fields: Sequence[str]
    """Fields of its entries that the format does not define, each once."""

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """The position of each tensor in the columns, for lookups one by one."""
        return dict(zip(self.names, range(len(self.names)), strict=True))

    def entry(self, name: str) -> HeaderEntry:
        at, columns = self.positions[name], self.columns
        begin = columns.starts[at] - self.data_start
        return HeaderEntry(
            *columns.kinds[columns.kind_indices[at]], (begin, begin + columns.nbytes[at])
        )

    def storage(self, name: str, home: Store) -> Storage:
        at, columns = self.positions[name], self.columns
        crc32 = self.record.crcs[at] if self.record.crcs else None
        return Storage(
            self.key, columns.starts[at], columns.nbytes[at], crc32=crc32, label=name, home=home
        )


def read_header(source: Source, key: str) -> Header:
    """Read and check the header of one file. Raises `HeaderError`, `Truncated` for a short file, or `LimitExceeded`."""
    size = source.store.size(key)
    if size < PREFIX_NBYTES:
        raise Truncated(
            f"a safetensors file begins with 8 bytes of length, this one has {size}",
            file=key,
            offset=size,
        )
    length = int.from_bytes(source.read_head(key, PREFIX_NBYTES), "little")
    if length < SMALLEST_NBYTES:
        raise HeaderError(f"a header of {length} bytes cannot be", file=key, offset=0, found=length)
    if length > size - PREFIX_NBYTES:
        if source.bytes(key, 0, min(size, len(LFS_POINTER))) == LFS_POINTER:
            raise HeaderError(
                "this is a Git LFS pointer in place of the file: run `git lfs pull`",
                file=key,
                offset=0,
            )
        message = f"the header would take {length:,} bytes, but the file ends after {size:,}"
        raise Truncated(message, file=key, offset=0, expected=PREFIX_NBYTES + length, found=size)
    if length > source.limits.header_nbytes:
        message = f"a header of {length:,} bytes is more than Limits(header_nbytes={source.limits.header_nbytes:,})"
        raise LimitExceeded(
            message, file=key, offset=0, expected=source.limits.header_nbytes, found=length
        )
    data_start = PREFIX_NBYTES + length
    raw = source.bytes(key, PREFIX_NBYTES, data_start)
    document = parse_fast(raw) or parse_exact(raw, source.limits, file=key)
    columns = check_layout(document.entries, range(data_start, size), source.limits, file=key)

    texts = document.metadata
    metadata = {name: text for name, text in texts.items() if name != RECORD}
    record = NO_RECORD
    # A record under another name has a damaged name, which `read_record` refuses.
    if RECORD in texts or any(text.startswith(RECORD_START) for text in texts.values()):
        from holdfast.formats.safetensors.record import read_record  # most files have none

        try:
            record = read_record(
                texts.get(RECORD), document.entries, metadata, header=True, limits=source.limits
            )
        except HoldfastError as error:
            error.file = error.file or key
            raise
        if record.mismatch is not None:
            record.mismatch.file = key
    return Header(
        key,
        data_start,
        copy_compactly([*document.entries]),
        metadata,
        columns,
        record,
        document.unknown_fields,
    )


def begins_like_safetensors(source: Source, key: str) -> bool:
    """Whether a file begins with a believable length and something that could be a JSON object."""
    start = source.read_head(key, PREFIX_NBYTES + 1)
    if len(start) <= PREFIX_NBYTES:
        return False
    length = int.from_bytes(start[:PREFIX_NBYTES], "little")
    if start[PREFIX_NBYTES:] == b"{":
        return SMALLEST_NBYTES <= length < LONGEST_CLAIM
    # The safetensors library opens a header that begins with blanks. We refuse it, and it takes a match to say why.
    return (
        start[PREFIX_NBYTES:].isspace()
        and SMALLEST_NBYTES <= length <= source.store.size(key) - PREFIX_NBYTES
    )


def describe(source: Source) -> Description:
    """Describe a source that is one file."""
    key = source.store.single_key
    if key is None:
        raise HeaderError("the folder must hold one safetensors file", file=source.store.name)
    header = read_header(source, key)
    record = header.record
    if source.store.is_folder:
        refuse_orphans([header])

    notes = list(record.notes)
    if header.unknown_fields:
        notes.append(describe_unknown_fields(header.unknown_fields))
    if SHARDING_INFO in header.metadata:
        notes += _describe_pieces(header, source)

    outlines, outline = header.columns.kinds, header.columns.kind_indices
    kinds = [RowKind.from_shape(DTYPE_OF_CODE[code], shape) for code, shape in outlines]
    storages = header_storages([header], source)
    tensors = Table(header.names, kinds, outline, range(len(header.names)), storages, {})
    tree: object = tensors
    if record.recorded:
        from holdfast.formats.recorded import restore  # for files with a record

        with error_context(file=header.key):
            tensors, tree = restore(tensors, record.recorded, source)
    changed = () if record.mismatch is None else (record.mismatch,)
    return Description(
        "safetensors", tensors, tree, notes=tuple(notes), metadata=header.metadata, changed=changed
    )


def header_storages(headers: Sequence[Header], source: Source) -> FileStorages:
    """Return the bytes of all tensors of checked headers, in their order, as one set of columns."""
    file, start, nbytes, crcs = array("q"), array("q"), array("q"), array("q")
    names = headers[0].names if len(headers) == 1 else [*chain(*(one.names for one in headers))]
    for number, header in enumerate(headers):
        count = len(header.names)
        file += array("q", [number]) * count
        start += header.columns.starts
        nbytes += header.columns.nbytes
        crcs.extend(header.record.crcs or array("q", [NO_CRC]) * count)
    places = [StoredFile(source, header.key, source.store) for header in headers]
    return FileStorages(places, file, start, nbytes, crcs, names=names)


def describe_unknown_fields(fields: Iterable[str]) -> str:
    """Return the note about fields that the format does not define."""
    return (
        f"tensors in the header have fields that safetensors does not define: {some([*fields])}. "
        "They are ignored, and copies of the file do not have them"
    )


def _describe_pieces(header: Header, source: Source) -> list[str]:
    """Return a note about tensors that are pieces of larger ones, or nothing if there are none."""
    from holdfast.formats.safetensors.record import saved_offsets  # for files of ranks

    count = sum(any(offsets) for offsets in saved_offsets(header, source.limits).values())
    if not count:
        return []
    return [
        f"{count:,} tensors are pieces of larger ones, as they lie in this file; open its directory"
    ]


def refuse_orphans(headers: Iterable[Header]) -> None:
    """Raise for files of a native directory whose manifest is missing."""
    for header in headers:
        if header.record.metadata_file == MANIFEST:
            message = (
                f"a data file of a native checkpoint, and its manifest {MANIFEST} is not in the folder: values and second names "
                "are lost without it. Get the manifest again; the tensors are in the data files, which open one by one"
            )
            raise Corrupted(message, file=header.key, expected=MANIFEST)
