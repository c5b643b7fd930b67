"""One safetensors file of a save: where every tensor goes, and the header that says so.

    length │ {"__metadata__":{…,"holdfast":"…,crc32: │ 8 digits a tensor, self: 8 digits │ "},"w":{"dtype":…},…}␠␠␠ │ tensors
    ───────┴──────── Literal ────────────────────────┴───────────── Late ───────────────┴──────── Literal ─────────┴─ Data …

The order of the tensors is that of the safetensors library: by dtype, the widest first, then by name; so every tensor begins at a
multiple of its element size, and the data begins at a multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from holdfast.core.tensor import LazyTensor
from holdfast.formats.safetensors.header import PREFIX_NBYTES, Entry
from holdfast.formats.safetensors.record import CRC_DIGITS, RECORD, About, RecordText
from holdfast.formats.tree_json.scalars import NO_UNICODE, is_unicode
from holdfast.plan.saves import Data, FilePlan, Late, Literal, Segment

__all__ = ["METADATA", "FileLayout", "HeaderTensor", "fill_shards", "name_problem", "plan_file", "size_problem"]

METADATA = "__metadata__"

DATA_ALIGNMENT = 64
"""Where the data begins: a multiple of a cache line, and of every element size. The library pads to 8; more spaces are allowed."""

ORDER = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16",
    "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
"""The dtypes as safetensors 0.8 declares them; it sorts tensors by the place in this list, last first."""

RANK = {code: -i for i, code in enumerate(ORDER)}


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """A tensor as a header names it."""

    name: str
    tensor: LazyTensor
    code: str
    """The dtype in the header."""
    shape: tuple[int, ...]
    """The shape in the header."""
    nbytes: int
    """Bytes of the tensor, which is asked for often."""

    @classmethod
    def of(cls, tensor: LazyTensor, name: str, code: str, shape: tuple[int, ...]) -> HeaderTensor:
        return cls(name, tensor, code, shape, tensor.nbytes)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A file and where its tensors lie in it."""

    plan: FilePlan
    header_nbytes: int
    places: dict[str, tuple[int, int]]
    """First byte of each tensor in the file, and the byte after its last."""


def plan_file(
    key: str, pieces: Iterable[HeaderTensor], metadata: Mapping[str, str], fields: Mapping[str, object], *, label: str = ""
) -> FileLayout:
    """Lay out one file; `fields` go into its record, beside the checksums.

    The label of a data segment is the tensor's name, behind `label`: what keeps the pieces of one tensor in several files apart.
    """
    ordered = sorted(pieces, key=lambda piece: (RANK[piece.code], piece.name))
    entries: dict[str, Entry] = {}
    position = 0
    for piece in ordered:
        end = position + piece.nbytes
        entries[piece.name] = Entry(piece.code, piece.shape, (position, end))
        position = end
    about = {"format": "pt"} | {k: v for k, v in metadata.items() if k != RECORD}
    head = b'{"%s":%s,"%s":"' % (METADATA.encode(), msgspec.json.encode(about)[:-1], RECORD.encode())
    digits = CRC_DIGITS * len(ordered)
    record = RecordText(fields, About(entries, about, entries))
    opening, closing = record.ends(digits)
    head += _escaped(opening)
    listed = msgspec.json.encode(entries)[1:]
    tail = _escaped(closing) + b'"}' + (b"," if entries else b"") + listed
    filled = [piece for piece in ordered if piece.nbytes]
    late = _checksums(
        [label + piece.name for piece in ordered],
        frozenset(label + piece.name for piece in filled),
        lambda numbers: _escaped(record.whole(numbers)[len(opening) : -len(closing)]),
    )
    length = len(head) + late.nbytes + len(tail)
    tail += b" " * (-(PREFIX_NBYTES + length) % DATA_ALIGNMENT)
    length = len(head) + late.nbytes + len(tail)
    start = PREFIX_NBYTES + length
    segments: list[Segment] = [Literal(length.to_bytes(PREFIX_NBYTES, "little") + head), late, Literal(tail)]
    segments += [Data(piece.tensor, label + piece.name) for piece in filled]
    places = {name: (start + entry.data_offsets[0], start + entry.data_offsets[1]) for name, entry in entries.items()}
    return FileLayout(FilePlan(key, tuple(segments)), length, places)


def _checksums(names: Sequence[str], filled: frozenset[str], seal: Callable[[bytes], bytes]) -> Late:
    """The digits of all checksums, up to those of the record itself. A tensor without bytes has no data segment, and 0."""

    def make(crcs: Mapping[str, int]) -> bytes:
        numbers = np.array([crcs[name] if name in filled else 0 for name in names], ">u4")
        return seal(numbers.tobytes().hex().encode())

    return Late(len(seal(b"0" * (CRC_DIGITS * len(names)))), make)


def _escaped(raw: bytes) -> bytes:
    """Text as it stands inside of a JSON string."""
    return msgspec.json.encode(raw.decode("utf-8"))[1:-1]


def fill_shards(pieces: Iterable[HeaderTensor], max_nbytes: int) -> list[list[HeaderTensor]]:
    """Pieces in files of at most `max_nbytes` of data, in order; one that is larger has a file to itself. At least one file."""
    shards: list[list[HeaderTensor]] = [[]]
    room = max_nbytes
    for piece in pieces:
        nbytes = piece.nbytes
        if nbytes > room and shards[-1]:
            shards.append([])
            room = max_nbytes
        shards[-1].append(piece)
        room -= nbytes
    return shards


def name_problem(name: str) -> str | None:
    """Why a header cannot have this name, or None."""
    if name == METADATA:
        return "this name has another meaning in safetensors; rename it"
    return None if is_unicode(name) else NO_UNICODE


def size_problem(tensor: LazyTensor) -> str | None:
    """Why a tensor should not be written out, or None: an expanded view takes many times what was stored."""
    limits, nbytes = tensor.source.limits, tensor.nbytes
    if nbytes <= limits.expansion_floor_nbytes:
        return None
    stored = sum(storage.nbytes for storage in tensor.storages)
    if nbytes <= limits.expansion * stored or tensor.traits.meta:
        return None
    return f"an expanded view, {nbytes:,} bytes out of {stored:,} stored ones; slice it, or raise Limits(expansion=…)"
