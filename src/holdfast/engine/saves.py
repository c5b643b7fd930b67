"""`SavePlan`: every file of a save, byte by byte, before the first byte is written.

A file is a row of segments. Everything but checksums is known when the plan is made, so every offset is, and the segments can be
written in any order and by several threads:

    Literal    bytes that are known now: headers, names, padding
    Data       the elements of one tensor in C order, little-endian; its CRC-32 is computed while it passes by, its hash if wanted
    Memory     bytes of this process as they lie there, with a CRC-32 like data: the storages of torch's own objects
    Gathered   many small pieces of data with what stands between them: a few megabytes, made at once when they are written
    Hole       room that is left as it is: zeros, where the file system can do it without writing them
    Late       bytes of a known length that depend on those CRCs: data descriptors, central directories, checksum fields

A plan is pure. `engine/write.py` carries it out, `explain` says it in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from msgspec import field
from msgspec.structs import force_setattr

from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value

if TYPE_CHECKING:
    from holdfast.core.content_hash import HashAndHead  # it imports a library, for those who save

SMALL_NBYTES = 64 << 10  # What is longer is written from where it lies, by itself.
BLOCK_NBYTES = 4 << 20  # Of a file, what is made at a time.

BATCH = 1 << 13
"""Tensors that are asked, read, or written as text, at a time: what is made of each on the way, up to half a kilobyte however short
it is, is gone when the next ones come."""

HASH_KEY, HEAD_KEY = "\udc00hash", "\udc00head"
"""What is put behind the label of data for its hash and its head, which stand among the checksums; the head is 0 for data that has
none (`core.content_hash`). Half of a surrogate pair: no name that is saved has one."""

MISTAKEN_KEY = "\udc00mistaken"  # For the second checksum of torch's writer (`formats.torch.write.mistaken_crc`).
SIGN = "\udc00"


def remove_hashes(sums: dict[str, int]) -> dict[str, int]:
    """The CRC-32 of all data, without its hashes: they are taken out."""
    if SIGN in "".join(sums):
        for label in [label for label in sums if SIGN in label]:
            del sums[label]
    return sums


def get_hash_fields(label: str, hashed: HashAndHead) -> dict[str, int]:
    """Return the hash and the head of data under their keys, to stand among the checksums."""
    return {label + HASH_KEY: hashed.hash or 0, label + HEAD_KEY: hashed.head or 0}


def join_pieces(pieces: Iterable[bytes], nbytes: int) -> bytes:
    """Pieces of so many bytes together. None of them stays: with a million tensors they take as much memory as the whole."""
    whole = BytesIO()
    # Room for all of them at once.
    whole.seek(max(nbytes - 1, 0))
    whole.write(b" ")
    whole.seek(0)
    whole.writelines(pieces)
    whole.truncate()
    return whole.getvalue()


def check_length(made: bytes, nbytes: int) -> bytes:
    """The bytes that were made for a segment. Raises `ValueError` for another length, which would move all that stands behind
    it."""
    if len(made) != nbytes:
        raise ValueError(f"a segment of {nbytes} bytes was made with {len(made)}")
    return made


class Literal(Value, frozen=True):
    """Bytes that are known when the plan is made."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


Hashing = str  # What is computed of data beside its CRC-32: nothing, its "head", or its "hash" with its head.


class Data(Value, frozen=True):
    """The elements of a tensor, in C order and little-endian. Packed types are packed, lowest bits first."""

    tensor: LazyTensor
    label: str
    """What the file calls it; the key under which `Late` segments find its CRC. Unique in a plan."""
    hashing: Hashing = ""
    """Whether it is hashed as well, or its head alone: known then, too, under the label and `HASH_KEY`, `HEAD_KEY`."""
    nbytes: int = -1
    """Known from the tensor, whatever is given."""

    def __post_init__(self) -> None:
        force_setattr(self, "nbytes", self.tensor.nbytes)


class Memory(Value, frozen=True):
    """Bytes that lie in this process's memory, written from where they are."""

    content: memoryview
    label: str
    owner: object = None  # Whoever has to stay alive for the memory to be there.

    @property
    def nbytes(self) -> int:
        return self.content.nbytes


class Gathered(Value, frozen=True, eq=False):
    """A stretch of a file that has many small pieces of data in it. None of them is an object of its own."""

    nbytes: int
    labels: Sequence[str]
    """Of the pieces that are not empty, each as for `Data`."""
    make: Callable[[], tuple[bytes, Mapping[str, int]]]
    """Fetches the pieces: exactly `nbytes` bytes, and the CRC-32 of each piece by its label. It may say more (`MISTAKEN_KEY`)."""
    item_nbytes: Sequence[int] | None = None
    """Of the pieces, where there is nothing between them."""
    tensors: Callable[[], Sequence[LazyTensor]] = tuple
    """The pieces one by one, where they are tensors of a table."""
    is_hashed: bool = False
    """Whether pieces are hashed, too."""
    overhead_nbytes: int = 0
    """Bytes that are no data."""
    read_nbytes: int | None = None
    """Bytes that are read for it, where these are not its data: what is computed has others."""


class Hole(Value, frozen=True):
    """Room without content. It has no checksum: whoever fills it knows better."""

    nbytes: int


class Late(Value, frozen=True):
    """Bytes that are known when all data of the plan has been written."""

    nbytes: int
    make: Callable[[Mapping[str, int]], bytes]
    """From the CRC-32 of all data of the plan, by label, to exactly `nbytes` bytes."""
    needs: str | None = None
    """The one label that it depends on, where it is only one: it can then be made as soon as that data has passed by."""


Segment = Literal | Data | Memory | Gathered | Hole | Late


def list_sum_keys(segments: Iterable[Segment]) -> list[str]:
    """Under which keys something is known when these segments are written."""
    keys: list[str] = []
    for segment in segments:
        if isinstance(segment, Gathered):
            keys += segment.labels
            if segment.is_hashed:
                keys += [label + key for label in segment.labels for key in (HASH_KEY, HEAD_KEY)]
        elif isinstance(segment, Data | Memory):
            keys.append(segment.label)
            if isinstance(segment, Data) and segment.hashing:
                keys += (segment.label + HASH_KEY, segment.label + HEAD_KEY)
    return keys


class FilePlan(Value, frozen=True):
    key: str  # Its name inside the checkpoint; empty where the checkpoint is this one file.
    segments: tuple[Segment, ...]
    nbytes: int = -1  # The sum of its segments, whatever is given.

    def __post_init__(self) -> None:
        force_setattr(self, "nbytes", sum([segment.nbytes for segment in self.segments]))

    def offsets(self) -> list[int]:
        offsets, at = [], 0
        for segment in self.segments:
            offsets.append(at)
            at += segment.nbytes
        return offsets


class LinkedFile(Value, frozen=True):
    """A finished file of another checkpoint that gets a second name in this one: nothing of it is written."""

    key: str
    nbytes: int
    folder: str


class SavePlan(Value, frozen=True):
    """A whole checkpoint. One file with an empty key, or a directory: its data files, then its index, in that order."""

    format: str
    files: tuple[FilePlan, ...]
    notes: tuple[str, ...] = ()
    """What a person should know: state that this format keeps in another way."""
    directory: bool = False
    index: tuple[FilePlan, ...] = ()
    """Files of a directory that are written after all others are on disk: the manifest, the Hugging Face index."""
    expected_table: Table | None = None
    """What a reader is to find, by name; None where the plan is not one of a state."""
    linked: tuple[LinkedFile, ...] = ()
    """Files of a directory that are there already, in another one."""
    is_copy: bool = False
    """Whether it is a copy: names and content are those of another checkpoint, and none is made up."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """What the object of the manifest says of itself in an object store, where it can be asked without reading it."""

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in (*self.files, *self.index))

    @property
    def file_sizes(self) -> list[tuple[str, int]]:
        """Every file of the checkpoint and its length, those that are linked first."""
        return [(f.key, f.nbytes) for f in self.linked] + [
            (f.key, f.nbytes) for f in (*self.files, *self.index)
        ]

    def tensors(self) -> Sequence[LazyTensor]:
        """Every tensor that is written, in the order of the files."""
        found: list[LazyTensor] = []
        for segment in (
            segment for file in (*self.files, *self.index) for segment in file.segments
        ):
            if isinstance(segment, Data):
                found.append(segment.tensor)
            elif isinstance(segment, Gathered):
                found += segment.tensors()
        return found

    def explain(self) -> str:
        rows = [
            f"{f.key or 'one file'}: {f.nbytes:,} bytes in {len(f.segments):,} segments"
            for f in (*self.files, *self.index)
        ]
        rows += [f"{f.key}: {f.nbytes:,} bytes, linked from {f.folder}" for f in self.linked]
        return "\n".join([f"{self.format}: {self.nbytes:,} bytes", *rows])
