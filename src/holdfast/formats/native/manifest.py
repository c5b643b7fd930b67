"""The text of a manifest, for the data files of one process, of a mesh, or of the ranks of a group.

Every part says in columns which boxes it has written and where each lies in a file (`StoredBoxes`). `lay_out_index` sorts all boxes
by tensor and makes the text by kind, a batch of tensors at a time. The length of the text does not depend on the checksums.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise, repeat

import msgspec
import numpy as np
from msgspec import field

from holdfast.core.arrays import Bools, Ints, shape_columns
from holdfast.core.content_hash import HASH
from holdfast.core.crc import crc32
from holdfast.core.documents import SEAL_NBYTES, seal_pieces
from holdfast.core.limits import DEFAULTS
from holdfast.core.strict_json import encode_keys, required_nbytes
from holdfast.core.value import Value
from holdfast.engine.saves import FilePlan, Late, Literal, join_pieces
from holdfast.errors import CannotHold
from holdfast.formats.native.chunks import hash_text, runs_of
from holdfast.formats.native.schema import (
    BESIDE_VERSION,
    COLUMNS_VERSION,
    FORMAT,
    HASHED_VERSION,
    VERSION,
    DataFile,
    Manifest,
    OtherFile,
    StoredChunk,
    StoredColumns,
    StoredTensor,
)
from holdfast.formats.safetensors.record import CRC_DIGITS
from holdfast.formats.safetensors.schema import MANIFEST
from holdfast.formats.safetensors.write import format_index

INDEX = "model.safetensors.index.json"

CANNOT = "a native checkpoint cannot hold this state"
NO_BOXES = np.zeros(0, np.int64)

BATCH = 1 << 10
"""Tensors in one batch of text: temporary objects take four times the memory of the text."""

MANY_CHUNKS = 64
"""Chunks of a tensor that stand in columns. Fewer are text that older versions read, too."""


class StoredBoxes(msgspec.Struct):
    """The places of boxes in a data file, as a rank sends them: columns of 64-bit integers, little-endian."""

    boxes: bytes
    """Positions among the boxes of the rank."""
    starts: bytes
    stops: bytes
    crcs: str = ""
    tails: list[str] = field(default_factory=list)
    """The text behind the checksum of each box, with its hash and head; empty where there are none."""

    @classmethod
    def of(cls, boxes: Sequence[int], chunks: Sequence[StoredChunk]) -> StoredBoxes:
        """The columns of chunks that are all in one file."""
        spans = np.array([chunk.bytes for chunk in chunks], np.int64).reshape(-1, 2).T
        hashed = any(chunk.hash or chunk.head for chunk in chunks)
        tails = [hash_text(chunk.hash, chunk.head) for chunk in chunks] if hashed else []
        digits = "".join([chunk.crc32 for chunk in chunks])
        return cls(as_bytes(boxes), as_bytes(spans[0]), as_bytes(spans[1]), digits, tails)


def as_bytes(column: Sequence[int] | Ints) -> bytes:
    return np.asarray(column, "<i8").tobytes()


def as_column(raw: bytes) -> Ints:
    return np.frombuffer(raw, "<i8").astype(np.int64, copy=False)


Outlines = tuple[Sequence[str], Sequence[tuple[str, tuple[int, ...]]], Sequence[int] | Ints]
"""The tensors of a manifest: names; dtype names and shapes, each pair once; for each tensor a position among the pairs."""


class FileBoxes(Value, frozen=True, eq=False):
    stored: StoredBoxes
    """For a file that is not written yet, only the places count."""
    tensors: Ints
    """For each box of the rank the position of its tensor in the outlines."""
    starts: Ints
    """For each box of the rank its lowest corner: a row for each dimension of the tensor with the most dimensions."""
    sizes: Ints
    tails_nbytes: int


def are_whole(starts: Ints, sizes: Ints, extents: Ints) -> Bools:
    """Whether each box is all of its tensor. `extents` may have fewer or more dimensions."""
    rank = min(len(starts), len(extents))
    whole: Bools = ~np.logical_or.reduce((starts[:rank] != 0) | (sizes[:rank] != extents[:rank]))
    return whole


def lay_out_index(
    files: Sequence[DataFile],
    outlines: Outlines,
    parts: Sequence[FileBoxes],
    *,
    later: Callable[[Mapping[str, int]], Sequence[StoredBoxes]] | None = None,
    fields: Mapping[str, object],
    metadata: Mapping[str, str],
    alone: bool = False,
) -> tuple[FilePlan, ...]:
    """The files that make data files a native directory, in the order of writing: the manifest is last.

    The manifest lists the tensors that have boxes. `later` maps the checksums of all data, by label, to the boxes of each file:
    with it the manifest is one late segment, whose length does not depend on checksums. `fields` are those of `formats.recorded`.

    There is an index for `transformers` where every tensor is whole and in one file. With `alone`, in an object store, there is
    none: two saves at the same time would both write its name.

    Raises `CannotHold` for a manifest that is longer than a reader takes.
    """
    chunks = _Chunks(parts, outlines)
    others: list[OtherFile] = []
    plans: list[FilePlan] = []
    if chunks.are_whole and not alone:
        index = b"".join([piece.data for piece in chunks.index_text([file.name for file in files])])
        others = [OtherFile(INDEX, len(index), f"{crc32(index):08x}")]
        plans = [FilePlan(INDEX, (Literal(index),))]

    tails_nbytes = sum(part.tails_nbytes for part in parts)
    version = HASHED_VERSION if tails_nbytes else VERSION
    if any("/" in file.name for file in files):
        version = BESIDE_VERSION
    if chunks.columns:
        version = COLUMNS_VERSION
    manifest = Manifest(
        FORMAT,
        version,
        tuple(files),
        {},
        dict(metadata),
        others=tuple(others) or msgspec.UNSET,
        hash=HASH if tails_nbytes else msgspec.UNSET,
    )
    recorded = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    raw = msgspec.json.encode(msgspec.structs.replace(manifest, **recorded))
    before, mark, behind = raw.partition(b'"tensors":{')
    text = chunks.write_text()
    containers = text.count(b"[") + text.count(b"{")
    nbytes = len(raw) - 1 + len(text) + tails_nbytes + SEAL_NBYTES
    nbytes = max(nbytes, required_nbytes(raw, containers))
    most = DEFAULTS.index_nbytes
    if nbytes > most:
        raise CannotHold(CANNOT, [f"the manifest would have {nbytes:,} bytes, more than {most:,}"])

    def make(crcs: Mapping[str, int]) -> bytes:
        stored = [part.stored for part in parts] if later is None else later(crcs)
        pieces = before, mark, *chunks.fill_text(text, stored), behind[:-1]
        return join_pieces(seal_pieces(pieces, nbytes), nbytes)

    segment = Literal(make({})) if later is None else Late(nbytes, make)
    return (*plans, FilePlan(MANIFEST, (segment,)))


class _Chunks:
    """All boxes of a manifest, sorted by tensor; those of one tensor in the order of their files."""

    def __init__(self, parts: Sequence[FileBoxes], outlines: Outlines) -> None:
        self._parts = parts
        names, self._kinds, kind = outlines
        kind_of, extents = (
            np.asarray(kind, np.int64),
            shape_columns([shape for _, shape in self._kinds]),
        )
        numbers = [as_column(part.stored.boxes) for part in parts]
        counts = [*map(len, numbers)]
        self._edges = [*accumulate(counts, initial=0)]
        boxed: dict[int, str] = {}
        tensors = np.concatenate(
            [NO_BOXES, *[part.tensors[own] for part, own in zip(parts, numbers, strict=True)]]
        )
        # Chunks with hashes have no columns.
        plain = not any(part.tails_nbytes for part in parts)
        many = (np.bincount(tensors, minlength=len(names)) >= MANY_CHUNKS) & plain
        for part, own, first in zip(parts, numbers, self._edges, strict=False):
            owners = part.tensors[own]
            corners, sizes, kinds = part.starts[:, own], part.sizes[:, own], kind_of[owners]
            for at in (
                (~(are_whole(corners, sizes, extents[:, kinds]) | many[owners]))
                .nonzero()[0]
                .tolist()
            ):
                rank = len(self._kinds[kinds[at]][1])
                box = {
                    "start": corners[:rank, at].tolist(),
                    "stop": (corners + sizes)[:rank, at].tolist(),
                }
                boxed[first + at] = "," + msgspec.json.encode(box).decode()[1:-1]
        order = self._order = tensors.argsort(kind="stable")
        owners = tensors[order]
        self._files = np.arange(len(parts)).repeat(counts)[order]
        self._starts = np.concatenate(
            [NO_BOXES, *[as_column(part.stored.starts) for part in parts]]
        )[order]
        self._stops = np.concatenate([NO_BOXES, *[as_column(part.stored.stops) for part in parts]])[
            order
        ]
        begins = np.ones(len(owners), np.bool_)
        begins[1:] = owners[1:] != owners[:-1]
        heads = begins.nonzero()[0]
        of_each = owners[heads]
        self._heads = [*heads.tolist(), len(owners)]
        """The first chunk of each tensor, and the number of all chunks."""
        self._names = (
            names if len(of_each) == len(names) else [names[tensor] for tensor in of_each.tolist()]
        )
        self._kind = kind_of[of_each]
        self._boxed: dict[int, str] = {}
        """The boxes of chunks that are not whole tensors, as text."""
        if boxed:
            place = np.empty(len(order), np.int64)
            place[order] = np.arange(len(order))
            self._boxed = dict(zip(place[[*boxed]].tolist(), boxed.values(), strict=True))
        self.columns: dict[int, bytes] = {}
        """The text of tensors in very many chunks, by their places."""
        if many.any():
            self.columns = dict(self._in_columns(numbers, many[of_each].nonzero()[0].tolist()))
        self.are_whole = not self.columns and not boxed
        """Whether every tensor lies whole in one file."""

    def _in_columns(
        self, numbers: Sequence[Ints], places: Sequence[int]
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the place of each of these tensors and its text, with blank checksums."""
        rank = max(len(part.starts) for part in self._parts)
        starts, stops = np.zeros((2, rank, len(self._order)), np.int64)
        for part, own, first in zip(self._parts, numbers, self._edges, strict=False):
            here = slice(first, first + len(own))
            starts[: len(part.starts), here] = part.starts[:, own]
            stops[: len(part.starts), here] = part.starts[:, own] + part.sizes[:, own]
        for at in places:
            dtype, shape = self._kinds[self._kind[at]]
            here = slice(self._heads[at], self._heads[at + 1])
            rows = self._order[here]
            corners = [
                [runs_of(column[d, rows]) for d in range(len(shape))] for column in (starts, stops)
            ]
            made = StoredColumns(
                runs_of(self._files[here]),
                runs_of(self._starts[here]),
                BLANK * len(rows),
                *map(tuple, corners),
            )
            tensor = StoredTensor(dtype, shape, (), made)
            yield at, msgspec.json.encode({self._names[at]: tensor})[1:-1]

    def index_text(self, files: Sequence[str]) -> Sequence[Literal]:
        """Write the Hugging Face index: all tensors in the order in which they lie in files."""
        names = self._names
        order = np.lexsort((self._stops, self._starts, self._files)).tolist()
        if (self._starts == self._stops).any():
            order.sort(
                key=lambda at: (self._files[at], self._starts[at], self._stops[at], names[at])
            )
        total = {"total_size": int((self._stops - self._starts).sum())}
        weight_map = {names[at]: files[self._files.item(at)] for at in order}
        return (format_index(total, weight_map),)

    def write_text(self) -> bytes:
        """Write all tensors, with blank checksums and without hashes."""
        edges = {*range(0, len(self._names), BATCH), len(self._names)}
        for at in self.columns:
            edges |= {at, at + 1}
        return b",".join(
            self.columns[first] if first in self.columns else self._write_batch(first, last)
            for first, last in pairwise(sorted(edges))
        )

    def _write_batch(self, first: int, last: int) -> bytes:
        """Write the tensors of a range, which has some."""
        low, high = self._heads[first], self._heads[last]
        quote, keys = encode_keys(self._names[first:last])
        openings = [f"{quote}{_opening(*kind)}" for kind in self._kinds]
        begin = f"{ENDING},{quote}"
        before = [NEXT] * (high - low)
        kinds = self._kind[first:last].tolist()
        for head, key, kind in zip(self._heads[first:last], keys, kinds, strict=True):
            before[head - low] = f"{begin}{key}{openings[kind]}"
        boxes = [self._boxed.get(at, "") for at in range(low, high)] if self._boxed else None
        columns = (column[low:high].tolist() for column in (self._files, self._starts, self._stops))
        each = zip(before, *columns, boxes or repeat("", high - low), strict=True)
        text = "".join([
            f'{opening}{file},"bytes":[{start},{stop}],"crc32":"{BLANK}"{box}'
            for opening, file, start, stop, box in each
        ])  # fmt: skip
        return f"{text[len(ENDING) + 1 :]}{ENDING}".encode()

    def fill_text(self, text: bytes, stored: Sequence[StoredBoxes]) -> Iterator[bytes]:
        """Yield the text with the checksums and hashes of the boxes in each file."""
        spans = chain.from_iterable(match.span(1) for match in CHECKSUM.finditer(text))
        places, ends = np.fromiter(spans, np.int64).reshape(-1, 2).T
        counts = (ends - places) // CRC_DIGITS
        number_in_tensor = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        places = places.repeat(counts) + CRC_DIGITS * number_in_tensor

        filled = np.frombuffer(bytearray(text), np.uint8)
        crcs = "".join([boxes.crcs for boxes in stored]).encode()
        digits = np.frombuffer(crcs, np.uint8).reshape(-1, CRC_DIGITS)[self._order]
        for digit in range(CRC_DIGITS):
            filled[places + digit] = digits[:, digit]
        content = filled.tobytes()
        if not any(boxes.tails for boxes in stored):
            yield content
            return

        tails: list[str] = []
        for boxes in stored:
            tails += boxes.tails or [""] * len(as_column(boxes.boxes))
        done = 0
        for match, row in zip(CHECKSUM.finditer(text), self._order.tolist(), strict=True):
            yield content[done : match.end()]
            yield tails[row].encode()
            done = match.end()
        yield content[done:]


CHECKSUM = re.compile(rb'"crc32":"([^"]*)[^}]*')
"""A checksum, or all checksums of a tensor in columns, and the rest of the chunk, which is at most its
box. No name looks like this, because a quote in a JSON string stands behind a backslash.
"""

BLANK = "0" * CRC_DIGITS
"""Stands for a checksum that is not known yet."""

NEXT, ENDING = '},{"file":', "}]}"
"""What stands between two chunks of a tensor, and behind the last one."""


@lru_cache(1024)
def _opening(dtype: str, shape: tuple[int, ...]) -> str:
    text = msgspec.json.encode(StoredTensor(dtype, shape, (StoredChunk(0, (0, 0), ""),))).decode()
    return ":" + text[: text.rindex('"file":') + len('"file":')]
