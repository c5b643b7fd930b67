"""Describes an array file, or an archive of them, as a checkpoint.

An array in Fortran order becomes a view with reversed strides.

The archive has a CRC-32 of each member, over header and elements together. The CRC-32 of the elements
alone is computed from it and from the CRC-32 of the header, so a tensor is verified when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.crc import compute_second_crc, crc32
from holdfast.core.opaque import Global, Opaque
from holdfast.core.protocols import Description, Source
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import LONE_TENSOR_NAME
from holdfast.engine.files import ViewTable
from holdfast.errors import (
    Corrupted,
    FormatError,
    HeaderError,
    Unsupported,
    ZipError,
    error_context,
)
from holdfast.formats.npy.detect import EMPTY_ARCHIVE, MAGIC, SUFFIX
from holdfast.formats.npy.header import USUAL_HEADER_NBYTES, ArrayHeader, read_header
from holdfast.formats.npy.members import InflatedMembers, inflate_head
from holdfast.formats.zip.layout import ZipRecord
from holdfast.formats.zip.reader import read_archive

TORCH_RECORD_NAMES = ("data.pkl", "constants.pkl")
"""Records by which torch recognizes its own archives."""

MAX_GAP_NBYTES = 4 << 10
"""Members that are at most so far apart are read ahead."""

READ_AHEAD_NBYTES = 64 << 10

CACHED_HEADER_COUNT = 10_000

DEFLATE_MARGIN_NBYTES = 1 << 10
"""Deflated data starts with tables, so more bytes are read than the header has."""


def describe_npy(source: Source) -> Description:
    """Describe a file with one array. The tensor has the name of a lone tensor in a torch file."""
    (key,) = source.store.list()
    file_nbytes = source.store.size(key)

    def read_head(nbytes: int) -> bytes:
        return source.bytes(key, 0, min(nbytes, file_nbytes))

    with error_context(file=key):
        header, _ = _read_complete_header(read_head, file_nbytes, source)
    storage = Storage(
        key, header.data_start, header.data_nbytes, header.byteorder, home=source.store
    )
    chunk = Chunk(Box.whole(header.shape), storage, 0, _find_strides(header))
    tensor = LazyTensor(LONE_TENSOR_NAME, header.dtype, header.shape, (chunk,), source)
    table = ViewTable({tensor.name: tensor})
    return Description("npy", table, tensor, notes=_describe_guesses([header]))


def describe_npz(source: Source) -> Description:
    """Describe an archive of arrays. The names of the tensors are those of the members."""
    (key,) = source.store.list()
    if source.store.size(key) == len(EMPTY_ARCHIVE):
        return Description("npz", ViewTable({}), {})
    return ArchiveReader(source, key).describe()


class MemberHeader(NamedTuple):
    """The header of a member, and what follows from it for the tensor."""

    header: ArrayHeader
    crc32: int
    """The CRC-32 of the bytes of the header."""
    box: Box
    strides: tuple[int, ...]


class ArchiveReader:
    """Reads the headers of all members of an archive."""

    def __init__(self, source: Source, key: str) -> None:
        self._source = source
        self._key = key
        archive = read_archive(source, key, fold_case=False)
        self._records = list(archive.records.values())

        self._inflated_members: InflatedMembers | None = None
        self._member_source = source
        """The source that tensors are read from. It has compressed members as files."""
        if not all(record.stored for record in self._records):
            self._inflated_members = InflatedMembers(source.store, source.limits)
            self._member_source = source.with_store(self._inflated_members)

        self._known_headers: dict[tuple[bytes, int], MemberHeader] = {}
        self._window = b""
        """Bytes of the archive that were read ahead."""
        self._window_start = 0
        self._last_start = -MAX_GAP_NBYTES

    def describe(self) -> Description:
        """Describe all members. Members that are not tensors become notes and `Opaque` values."""
        self._check_not_torch()
        tree: dict[object, object] = {}
        tensors: dict[str, LazyTensor] = {}
        headers: list[ArrayHeader] = []
        notes: list[str] = []
        for record in self._records:
            name = record.name.removesuffix(SUFFIX)
            if name in tree:
                message = f"the archive has two members for the name {name[:80]!r}, with and without {SUFFIX}"
                raise ZipError(message, file=self._key)
            with error_context(file=self._key, tensor=name):
                member = self._read_member_header(record)
                if isinstance(member, Opaque):
                    tree[name] = member
                    notes.append(f"{name}: not read: {member.args[0]}")
                    continue
                tree[name] = tensors[name] = self._make_tensor(name, record, member)
            headers.append(member.header)

        notes += _describe_guesses(headers)
        compressed_count = sum(not record.stored for record in self._records)
        if compressed_count:
            notes.append(
                f"{compressed_count:,} members are compressed; reading a slice decompresses the whole member"
            )
        table = ViewTable(tensors)
        has_only_tensors = len(tensors) == len(tree)
        return Description("npz", table, table if has_only_tensors else tree, notes=tuple(notes))

    def _check_not_torch(self) -> None:
        """Refuse an archive that torch would load as a checkpoint with other contents."""
        for record in self._records:
            if record.name.rpartition("/")[2].lower() in TORCH_RECORD_NAMES:
                raise FormatError(
                    f"the archive has arrays of numpy and also {record.name[:80]!r}, a record of torch:"
                    " it was made to show one thing and load another; `holdfast scan` lists both",
                    file=self._key,
                )

    def _read_member_header(self, record: ZipRecord) -> MemberHeader | Opaque:
        """Read the header of a member, or return an `Opaque` with the reason why it is not a tensor."""
        head = self._read_head(record, USUAL_HEADER_NBYTES)
        if not head.startswith(MAGIC):
            reason = f"{record.content_nbytes:,} bytes that are not an array"
            return Opaque(Global("numpy", "bytes_"), (reason,))

        # Members of one shape and dtype have equal headers of 128 bytes, which are parsed once.
        header_key = head[:128], record.content_nbytes
        known = self._known_headers.get(header_key)
        if known is not None and known.header.data_start <= 128:
            return known
        try:
            header, header_bytes = _read_complete_header(
                lambda nbytes: self._read_head(record, nbytes), record.content_nbytes, self._source
            )
        except Unsupported as error:
            return Opaque(Global("numpy", "ndarray"), (error.message,))
        member = MemberHeader(
            header, crc32(header_bytes), Box.whole(header.shape), _find_strides(header)
        )
        if len(self._known_headers) < CACHED_HEADER_COUNT:
            self._known_headers[header_key] = member
        return member

    def _make_tensor(self, name: str, record: ZipRecord, member: MemberHeader) -> LazyTensor:
        header = member.header
        crc = None
        if record.crc32 is not None and header.data_nbytes:
            crc = compute_second_crc(record.crc32, member.crc32, header.data_nbytes)
        if self._inflated_members is None or record.stored:
            key = self._key
            start = record.start + header.data_start
        else:
            key = self._inflated_members.add(self._key, record)
            start = header.data_start
        storage = Storage(
            key,
            start,
            header.data_nbytes,
            header.byteorder,
            crc,
            label=record.name,
            home=self._member_source.store,
        )
        chunk = Chunk(member.box, storage, 0, member.strides)
        return LazyTensor(name, header.dtype, header.shape, (chunk,), self._member_source)

    def _read_head(self, record: ZipRecord, nbytes: int) -> bytes:
        """Read the first bytes of a member, or all bytes if it has fewer. Decompress them."""
        if record.stored:
            return self._read_ahead(record.start, record.start + min(nbytes, record.nbytes))
        stop = record.start + min(nbytes + DEFLATE_MARGIN_NBYTES, record.nbytes)
        compressed = self._read_ahead(record.start, stop)
        head_nbytes = min(nbytes, record.content_nbytes)
        head = inflate_head(compressed, head_nbytes)
        if len(head) < head_nbytes:
            message = "the compressed bytes of this member are damaged; get the file again"
            raise Corrupted(message, offset=record.start)
        return head

    def _read_ahead(self, start: int, stop: int) -> bytes:
        """Read a range of the archive. If members are close together, read the next ones with it."""
        window_stop = self._window_start + len(self._window)
        if start < self._window_start or stop > window_stop:
            read_stop = stop
            if 0 <= start - self._last_start < MAX_GAP_NBYTES:
                file_nbytes = self._source.store.size(self._key)
                read_stop = min(max(stop, start + READ_AHEAD_NBYTES), file_nbytes)
            self._window = self._source.bytes(self._key, start, read_stop)
            self._window_start = start
        self._last_start = start
        return self._window[start - self._window_start : stop - self._window_start]


def _read_complete_header(
    read_head: Callable[[int], bytes], file_nbytes: int, source: Source
) -> tuple[ArrayHeader, bytes]:
    """Read and parse a header of unknown length. Return it with its bytes.

    Args:
        read_head: Returns the first bytes of the array file, as many as it is asked for.
        file_nbytes: The size of the array file.
        source: The source, for its limits.
    """
    max_rank = source.limits.rank
    head = read_head(USUAL_HEADER_NBYTES)
    header = read_header(head, file_nbytes, max_rank=max_rank)
    if isinstance(header, int):
        head = read_head(header)
        header = read_header(head, file_nbytes, max_rank=max_rank)
    if isinstance(header, int):
        message = "the file ends within the header of the array"
        raise HeaderError(message, expected=header, found=len(head))
    return header, head[: header.data_start]


def _find_strides(header: ArrayHeader) -> tuple[int, ...]:
    """Return the strides of an array in bits."""
    if header.fortran_order:
        return tuple(reversed(c_strides(header.shape[::-1], header.dtype.bits)))
    return c_strides(header.shape, header.dtype.bits)


def _describe_guesses(headers: Iterable[ArrayHeader]) -> tuple[str, ...]:
    """Return a note for each type code whose dtype was guessed."""
    guesses = {header.guessed_code: header.dtype for header in headers if header.guessed_code}
    return tuple(
        f"numpy has no type for some elements ({code}); they are read as {dtype}"
        for code, dtype in sorted(guesses.items())
    )
