"""`SavePlan`: every file of a save, byte by byte, before the first byte is written.

A file is a sequence of segments. Everything except checksums is known when the plan is made. So
every offset is known as well, and several threads can write the segments in any order:

    Literal    bytes that are known: headers, names, padding
    Data       the elements of one tensor, in C order and little-endian; their checksum is computed
               while they are written
    Memory     bytes in the memory of this process, such as the storages of torch
    Gathered   many small tensors with the bytes between them: a few megabytes, made when written
    Hole       bytes that are not written; they read as zeros
    Late       bytes of known length that depend on checksums, such as the directory of a zip file

A plan touches no file. `engine/write.py` carries it out, and `explain` describes it for people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec import field
from msgspec.structs import force_setattr

from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value

if TYPE_CHECKING:
    from holdfast.core.content_hash import HashAndHead  # it imports a library, for those who save

SMALL_NBYTES = 64 << 10
"""A longer tensor is a segment of its own."""

BLOCK_NBYTES = 4 << 20
"""A `Gathered` segment gets no more tensors when it has this many bytes."""

BATCH_TENSOR_COUNT = 1 << 13
"""How many tensors are described, read, or written as text at a time. Each takes up to half a
kilobyte on the way, however short it is. That memory is free again before the next batch."""

KEY_MARK = "\udc00"
"""Separates the label of data from a suffix, in the keys of a dict of checksums. It is half of a
surrogate pair, which no name that is saved contains. The label alone is the key of the CRC-32."""

HASH_SUFFIX = KEY_MARK + "hash"
"""Appended to the label of data, this is the key of its content hash in a dict of checksums."""

HEAD_SUFFIX = KEY_MARK + "head"
"""Appended to the label of data, this is the key of its head in a dict of checksums. The head is
the CRC-32 of the first 64 KiB, and 0 for data that is not longer than that."""

MISTAKEN_KEY = KEY_MARK + "mistaken"
"""Appended to the label of data, this is the key of a second checksum that torch's writer computes
for some data (`formats.torch.write.mistaken_crc`). The key without a label is present if any data
of the dict has one."""

Hashing = str
"""What is computed of data besides its CRC-32: `""` for nothing, `"head"`, or `"hash"` for both."""


def get_hash_fields(label: str, hashed: HashAndHead) -> dict[str, int]:
    """Return the content hash of data and the CRC-32 of its first 64 KiB, under their keys.

    Both values must be integers, because ranks exchange them. So 0 stands for a value that was not
    computed, and for the head of data that is too short to have one.
    """
    return {label + HASH_SUFFIX: hashed.hash or 0, label + HEAD_SUFFIX: hashed.head or 0}


def remove_hashes(crcs: dict[str, int]) -> dict[str, int]:
    """Remove everything except the CRC-32 of data from a dict of checksums, and return this dict.

    The key of a CRC-32 is the label of the data. All other keys consist of a label, `KEY_MARK` and
    the name of what they stand for, such as a content hash.
    """
    # One search in a long text is faster than one search for each of a million labels.
    if KEY_MARK in "".join(crcs):
        for key in list(crcs):
            if KEY_MARK in key:
                del crcs[key]
    return crcs


def join_pieces(pieces: Iterable[bytes], nbytes: int) -> bytes:
    """Join pieces whose total length is known, without keeping them in memory.

    `b"".join` would first collect all pieces in a list. For a million tensors the list would take
    as much memory as the result.
    """
    buffer = BytesIO()
    # Writing the last byte allocates all memory at once, instead of growing the buffer often.
    buffer.seek(max(nbytes - 1, 0))
    buffer.write(b" ")

    buffer.seek(0)
    buffer.writelines(pieces)
    # Without pieces, the byte from above is still there.
    buffer.truncate()
    return buffer.getvalue()


def check_length(content: bytes, nbytes: int) -> bytes:
    """Return the content of a segment after checking that it has the length of the plan.

    Args:
        content: The bytes of the segment, which were made after the plan.
        nbytes: The length of the segment in the plan.

    Raises:
        ValueError: The content has another length. It would overwrite the next segment of the file,
            or leave a gap before it.
    """
    if len(content) != nbytes:
        raise ValueError(f"a segment of {nbytes} bytes was made with {len(content)} bytes")
    return content


class Literal(Value, frozen=True):
    """Bytes that are known when the plan is made."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """The length of the segment."""
        return len(self.data)


class Data(Value, frozen=True):
    """The elements of a tensor, in C order and little-endian.

    Types with less than 8 bits are packed, the first element in the lowest bits.
    """

    tensor: LazyTensor
    label: str
    """What the file calls the tensor. It is unique in a plan. The checksum has this key."""
    hashing: Hashing = ""
    """What is computed besides the CRC-32. The keys are the label with `HASH_SUFFIX` and with
    `HEAD_SUFFIX`."""
    nbytes: int = -1
    """Computed from the tensor; a value that is passed is ignored."""

    def __post_init__(self) -> None:
        """Compute the length once. A property would compute it again for every use."""
        # The class is frozen, so a plain assignment would fail.
        force_setattr(self, "nbytes", self.tensor.nbytes)


class Memory(Value, frozen=True):
    """Bytes in the memory of this process, written from where they are."""

    content: memoryview
    label: str
    """As for `Data`."""
    owner: object = None
    """The object whose memory this is. The segment keeps it alive."""

    @property
    def nbytes(self) -> int:
        """The length of the segment."""
        return self.content.nbytes


class Gathered(Value, frozen=True, eq=False):
    """Consecutive bytes of a file with many small tensors, its items, and what stands between them.

    There is no object for each item, because there can be a million of them.
    """

    nbytes: int
    labels: Sequence[str]
    """The labels of all items that are not empty, each as for `Data`."""
    make: Callable[[], tuple[bytes, Mapping[str, int]]]
    """Reads the items. It returns `nbytes` bytes, and the CRC-32 of each item by its label. It may
    return more, under keys such as those of `MISTAKEN_KEY`."""
    item_nbytes: Sequence[int] | None = None
    """The size of each item, if there is nothing between them."""
    tensors: Callable[[], Sequence[LazyTensor]] = tuple
    """Returns the items as lazy tensors, if they are tensors of a table."""
    is_hashed: bool = False
    """Whether content hashes of items are computed."""
    overhead_nbytes: int = 0
    """How many of the bytes belong to no item."""
    read_nbytes: int | None = None
    """How many bytes are read to make the items, if they are computed; None if as many as they
    have."""


class Hole(Value, frozen=True):
    """Bytes that are not written, and have no checksum. Another writer may fill them later."""

    nbytes: int


class Late(Value, frozen=True):
    """Bytes that depend on the checksums of data."""

    nbytes: int
    make: Callable[[Mapping[str, int]], bytes]
    """Makes the bytes, exactly `nbytes`, from the CRC-32 of all data of the plan by label."""
    needs: str | None = None
    """The label of the only data that it depends on, if it is only one. Then the bytes can be made
    as soon as this data has been written."""


Segment = Literal | Data | Memory | Gathered | Hole | Late


def list_checksum_keys(segments: Iterable[Segment]) -> list[str]:
    """Return the keys of all checksums and hashes that are known after segments are written.

    The label of data is the key of its CRC-32. If the plan also asks for content hashes, the label
    with `HASH_SUFFIX` is the key of the hash. The label with `HEAD_SUFFIX` is the key of the head:
    the CRC-32 of the first 64 KiB, which shows most changes without reading all of the data.
    """
    keys: list[str] = []
    for segment in segments:
        # Literals, holes and late segments contain no data of tensors, so they have no keys.
        labels: Sequence[str] = ()
        is_hashed = False
        if isinstance(segment, Gathered):
            labels = segment.labels
            is_hashed = segment.is_hashed
        elif isinstance(segment, Data):
            labels = (segment.label,)
            is_hashed = bool(segment.hashing)
        elif isinstance(segment, Memory):
            labels = (segment.label,)

        keys += labels
        if is_hashed:
            keys += [label + HASH_SUFFIX for label in labels]
            keys += [label + HEAD_SUFFIX for label in labels]
    return keys


class FilePlan(Value, frozen=True):
    """One file of a save, as segments without gaps between them."""

    key: str
    """The name of the file in the checkpoint; empty if the checkpoint is this one file."""
    segments: tuple[Segment, ...]
    nbytes: int = -1
    """Computed from the segments; a value that is passed is ignored."""

    def __post_init__(self) -> None:
        """Compute the length of the file once. A file can have a hundred thousand segments."""
        # The class is frozen, so a plain assignment would fail.
        force_setattr(self, "nbytes", sum([segment.nbytes for segment in self.segments]))

    def offsets(self) -> list[int]:
        """Return the offset of each segment in the file."""
        # Each segment starts where the one before it ends. The last edge is the end of the file.
        segment_edges = [*accumulate([segment.nbytes for segment in self.segments], initial=0)]
        return segment_edges[:-1]


class LinkedFile(Value, frozen=True):
    """A file of another checkpoint that becomes a file of this one as well. No byte is written."""

    key: str
    nbytes: int
    folder: str
    """The folder of the other checkpoint."""


class SavePlan(Value, frozen=True):
    """A whole checkpoint: one file with an empty key, or the files of a directory."""

    format: str
    files: tuple[FilePlan, ...]
    notes: tuple[str, ...] = ()
    """Sentences for people, about state that the format stores in another way."""
    directory: bool = False
    index: tuple[FilePlan, ...] = ()
    """Files of a directory that are written after all others are on disk, such as the manifest."""
    expected_table: Table | None = None
    """The tensors that a reader must find; None if the plan was not made from a state."""
    linked: tuple[LinkedFile, ...] = ()
    """Files of a directory that exist already in another one."""
    is_copy: bool = False
    """Whether this copies another checkpoint as it is, with the same file names."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Attributes for the object of the manifest in an object store, which can be read without
    reading the object."""

    @property
    def nbytes(self) -> int:
        """The size of all files that are written."""
        return sum(file.nbytes for file in (*self.files, *self.index))

    @property
    def file_sizes(self) -> list[tuple[str, int]]:
        """The key and size of every file of the checkpoint.

        The list starts with the files that are linked from another checkpoint, followed by the
        files that are written.
        """
        linked_sizes = [(file.key, file.nbytes) for file in self.linked]
        return linked_sizes + [(file.key, file.nbytes) for file in (*self.files, *self.index)]

    def tensors(self) -> Sequence[LazyTensor]:
        """Return every tensor that is written, in the order of the files.

        `Memory` segments are left out, because they are bytes without a dtype and a shape.
        """
        tensors: list[LazyTensor] = []
        for file in (*self.files, *self.index):
            for segment in file.segments:
                if isinstance(segment, Data):
                    tensors.append(segment.tensor)
                elif isinstance(segment, Gathered):
                    tensors += segment.tensors()
        return tensors

    def explain(self) -> str:
        """Return a text for people with one line for each file of this plan."""
        lines = [f"{self.format}: {self.nbytes:,} bytes"]
        for file in (*self.files, *self.index):
            # A checkpoint that is one file has no directory, and so no key within it.
            name = file.key or "one file"
            lines.append(f"{name}: {file.nbytes:,} bytes in {len(file.segments):,} segments")
        for linked in self.linked:
            lines.append(f"{linked.key}: {linked.nbytes:,} bytes, linked from {linked.folder}")
        return "\n".join(lines)
