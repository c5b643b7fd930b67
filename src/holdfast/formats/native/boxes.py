"""Boxes of tensors in the data files of a native directory, by columns: what ranks of a mesh or a group write, and the manifest.

A mesh is laid out at once (`lay_out_split`). Of a group each rank lays out its own files (`box_file`), and the first one the
manifest when all of them are there (`lay_out_index`), from what the others say of theirs (`StoredBoxes`).

A file whose boxes are not whole tensors has torch's sharding metadata, so that torch's reader can join them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from msgspec import field

from holdfast.core.arrays import Bools, Ints, shape_columns
from holdfast.core.box import Box
from holdfast.core.content_hash import HASH, Hashed
from holdfast.core.limits import DEFAULTS
from holdfast.core.protocols import State
from holdfast.core.sparse.storage import SparseParts
from holdfast.core.table import ODD, Kind, Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.errors import CannotHold
from holdfast.formats.native.base import Place
from holdfast.formats.native.chunks import entries_of, hash_in, in_files, stored_chunk, without_clashes
from holdfast.formats.native.schema import (
    BESIDE_VERSION,
    FORMAT,
    HASHED_VERSION,
    VERSION,
    DataFile,
    Manifest,
    StoredChunk,
    StoredSparse,
)
from holdfast.formats.native.write import (
    CANNOT,
    DIGITS,
    INDEX,
    NO_SUMS,
    OWN,
    HashAll,
    Pack,
    carried,
    data_name,
    digits_of,
    other_files,
    tensor_opening,
    what_is_kept,
)
from holdfast.formats.safetensors.record import MANIFEST, SHARDING_INFO
from holdfast.formats.safetensors.write import FileLayout, plain_index, plan_file
from holdfast.formats.strict_json import as_keys, paid_nbytes, seal
from holdfast.plan.saves import FilePlan, Hashing, Late, Literal, SavePlan, known_later
from holdfast.plan.table import table_of


class Boxes(Value, frozen=True, eq=False):
    """Boxes of tensors on their way to data files, a row each."""

    table: Table
    """The elements of each box, under the name of its tensor: a tensor of which there are several boxes is there as often."""
    starts: Ints
    """Lowest corners: a row for each dimension of the tensor that has the most, a column for each box."""
    shapes: Sequence[tuple[int, ...]]
    """Of the whole tensors."""

    @classmethod
    def cut(cls, table: Table, rows: Sequence[int], starts: Ints, sizes: Ints) -> Boxes:
        """Boxes of the tensors of these rows. Dimensions that a tensor lacks have the start 0 and the size 1."""
        whole = [kind.shape for kind in table.kinds]
        kind, odd = [table.kind[row] for row in rows], dict[int, LazyTensor]()
        shapes, storage = [whole[one] for one in kind], [table.storage[row] for row in rows]
        kinds, known = [*table.kinds], dict[tuple[object, ...], int]()
        if table.odd:
            odd = {at: table.odd[row] for at, row in enumerate(rows) if row in table.odd}
        for at in np.flatnonzero(~_are_whole(starts, sizes, shape_columns(whole)[:, kind])).tolist():
            rank = len(shapes[at])
            box = Box.at(starts[:rank, at].tolist(), sizes[:rank, at].tolist())
            part = odd[at] = table.view(rows[at])[box.slices]
            storage[at] = ODD
            key = part.dtype, part.shape, id(part.traits)
            kind[at] = known.setdefault(key, len(kinds))
            if kind[at] == len(kinds):
                kinds.append(Kind.of(part))
        return cls(Table([table.names[row] for row in rows], kinds, kind, storage, table.storages, odd), starts, shapes)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> Ints:
        """Bytes of each box."""
        return self.table.nbytes_of(range(len(self)))

    def place(self, row: int) -> Place:
        """The name of a box, and its corners."""
        start = tuple(self.starts[: len(self.shapes[row]), row].tolist())
        return self.table.names[row], start, tuple(a + n for a, n in zip(start, self.table.kind_of(row).shape, strict=True))

    def has_parts(self, rows: Sequence[int]) -> bool:
        """Whether one of these boxes is not a whole tensor."""
        own = [kind.shape for kind in self.table.kinds]
        return any(own[self.table.kind[row]] != self.shapes[row] for row in rows)

    def sharding_texts(self, rows: Sequence[int]) -> dict[str, str]:
        """What torch's distributed reader needs to know of a file with these boxes: where the piece of each tensor begins."""
        starts, names = self.starts[:, rows].T.tolist(), self.table.names
        offsets = {names[row]: {"saved_offsets": one[: len(self.shapes[row])]} for row, one in zip(rows, starts, strict=True)}
        return {"DCP_VERSION": "1.0", SHARDING_INFO: json.dumps(offsets)}


def _are_whole(starts: Ints, sizes: Ints, extents: Ints) -> Bools:
    """Whether boxes are all of their tensors, whose extents may have fewer dimensions or more."""
    whole = np.ones(starts.shape[1], np.bool_)
    for start, size, extent in zip(starts, sizes, extents, strict=False):
        whole &= (start == 0) & (size == extent)
    return whole


class StoredBoxes(msgspec.Struct):
    """Where boxes lie in a data file, as a rank says it: columns of 64-bit integers, little-endian."""

    boxes: bytes
    """Which they are: positions among the boxes of the rank."""
    starts: bytes
    """The first byte of each."""
    stops: bytes
    crcs: str = ""
    """Eight digits each."""
    tails: list[str] = field(default_factory=list)
    """What the manifest says behind the checksum of each, as text: its hash, its head; nothing where there are none."""
    packed: dict[int, StoredSparse] = field(default_factory=dict)
    """How some of them are packed, by their positions here; the number of the file is 0."""

    @classmethod
    def of(cls, boxes: Sequence[int], chunks: Sequence[StoredChunk]) -> StoredBoxes:
        """The same of chunks that are all in file 0."""
        spans = np.array([chunk.bytes for chunk in chunks], np.int64).reshape(-1, 2).T
        tails = [_tail(chunk.hash, chunk.head) for chunk in chunks]
        packed = {at: chunk.sparse for at, chunk in enumerate(chunks) if chunk.sparse is not None}
        digits = "".join([chunk.crc32 for chunk in chunks])
        return cls(as_bytes(boxes), as_bytes(spans[0]), as_bytes(spans[1]), digits, tails if any(tails) else [], packed)


def as_bytes(column: Sequence[int] | Ints) -> bytes:
    """A column of integers, as it travels."""
    return np.asarray(column, "<i8").tobytes()


def as_column(raw: bytes) -> Ints:
    """The column again."""
    return np.frombuffer(raw, "<i8").astype(np.int64, copy=False)


def _tail(hash: str | None, head: str | None) -> str:
    return ("" if hash is None else f',"hash":"{hash}"') + ("" if head is None else f',"head":"{head}"')


class BoxFile(Value, frozen=True, eq=False):
    """A data file with boxes of tensors, one of each at the most."""

    layout: FileLayout
    boxes: Boxes
    rows: Sequence[int]
    """Which of the boxes are in it."""
    packed: Mapping[str, SparseParts]
    label: str
    """What stands before the names of its entries where their checksums are looked up."""
    hashing: Mapping[str, Hashing]
    """Which boxes are hashed when they are written, and how."""
    known: Mapping[str, Hashed]
    """The hashes of the boxes that are stored packed."""

    def stored(self, crcs: Mapping[str, int]) -> StoredBoxes:
        """Where its boxes lie, from the checksums of its data."""
        layout = self.layout
        if self.packed:
            return self._stored_packed(crcs)
        labels = [self.label + name for name in layout.names] if self.label else layout.names
        digits = digits_of(crcs, labels, (), ())
        tails = [self._tail_of(row, crcs) for row in layout.rows] if self.hashing else []
        return StoredBoxes(as_bytes(layout.rows), as_bytes(layout.starts), as_bytes(layout.stops), digits, tails)

    def _stored_packed(self, crcs: Mapping[str, int]) -> StoredBoxes:
        layout, names = self.layout, self.boxes.table.names
        spans = dict(zip(layout.names, zip(layout.starts.tolist(), layout.stops.tolist(), strict=True), strict=True))
        chunks = [
            stored_chunk(
                names[row],
                lambda entry: (0, spans[entry]),
                lambda entry: crcs[self.label + entry],
                parts=self.packed.get(names[row]),
                hashed=self._hash(row, crcs),
            )
            for row in self.rows
        ]
        return StoredBoxes.of(self.rows, chunks)

    def _hash(self, row: int, crcs: Mapping[str, int]) -> Hashed | None:
        table = self.boxes.table
        name = table.names[row]
        how = self.hashing.get(name)
        if how is None:
            return self.known.get(name)
        return hash_in(crcs, self.label + name, table.kind_of(row).nbytes, head_alone=how == "head")

    def _tail_of(self, row: int, crcs: Mapping[str, int]) -> str:
        found = self._hash(row, crcs)
        if found is None:
            return ""
        hash, head = found
        return _tail(None if hash is None else f"{hash:032x}", None if head is None else f"{head:08x}")


def box_file(
    key: str,
    boxes: Boxes,
    rows: Sequence[int],
    texts: Mapping[str, str],
    *,
    fields: Mapping[str, object] = OWN,
    label: str = "",
    pack: Pack | None = None,
    hashes: HashAll | None = None,
    changed: Container[Place] = (),
) -> BoxFile:
    """Lay out one data file with these boxes. `texts` go into its metadata, `fields` into its record.

    Boxes are packed where `pack` says so. With `hashes`, they have their hashes; those that `changed`, their heads.
    Raises `CannotHold` where the header of the file would be longer than a reader takes.
    """
    table = boxes.table
    names = [table.names[row] for row in rows]
    views = {table.names[row]: table.view(row) for row in rows} if pack else {}
    packed = without_clashes(pack(views), names) if pack else {}
    known = hashes({name: views[name] for name in packed}) if hashes and packed else {}
    hashing: dict[str, Hashing] = {}
    if hashes:
        alone = {table.names[row] for row in rows if boxes.place(row) in changed} if changed else set[str]()
        hashing = {name: "head" if name in alone else "hash" for name in names if name not in packed}
    part, inside = table, rows
    if packed:
        given = zip(rows, names, strict=True)
        part = table.with_entries(rows, {row: entries_of(name, views[name], packed[name]) for row, name in given if name in packed})
        inside = range(len(part))
    kinds = [carried(kind) for kind in part.kinds]
    layout = plan_file(key, part, inside, kinds, texts, fields=fields, label=label, hashed=hashing)
    most = DEFAULTS.header_nbytes
    if layout.header_nbytes > most:
        raise CannotHold(CANNOT, [f"the header of a data file would be longer than {most:,} bytes"])
    return BoxFile(layout, boxes, rows, packed, label, hashing, known)


class Outlines(Value, frozen=True, eq=False):
    """The tensors of a manifest: their names, dtypes by Holdfast's names, and shapes."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]


class FileBoxes(Value, frozen=True, eq=False):
    """The boxes of one data file, and what they are boxes of."""

    stored: StoredBoxes
    tensors: Ints
    """Of each box of the rank: its tensor, as a position among the outlines."""
    starts: Ints
    """Of each box of the rank: its lowest corner, as in `Boxes`."""
    sizes: Ints


Parts = Callable[[Mapping[str, int]], Sequence[FileBoxes]]
"""From the checksums of the data, by label, to the boxes in each file."""


def lay_out_index(
    files: Sequence[DataFile],
    outlines: Outlines,
    parts: Parts,
    *,
    labels: Collection[str] = (),
    fields: Mapping[str, object],
    metadata: Mapping[str, str],
    alone: bool = False,
) -> tuple[FilePlan, ...]:
    """What makes data files a native directory, in the order in which it is written: the manifest is last.

    It lists the tensors that have boxes. `labels` are those of the data whose checksums are not known yet: with any, the manifest
    is one late segment, whose length does not depend on them. `fields` are those of `formats.recorded`. There is an index for
    `transformers` where it could read the files: where every tensor is whole, in one file, and not packed; and not with `alone`, in
    an object store, where the index would be the one name that two saves at once both write.

    Raises `CannotHold` where the manifest would be longer than a reader takes.
    """
    rest = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    blank = _Chunks(parts(NO_SUMS if labels else {}), outlines)
    others = [] if alone or not blank.whole else [plain_index(INDEX, *blank.weights([file.name for file in files]))]
    version, hash = (HASHED_VERSION, HASH) if blank.hashed else (VERSION, msgspec.UNSET)
    version = BESIDE_VERSION if any("/" in file.name for file in files) else version
    manifest = Manifest(FORMAT, version, tuple(files), {}, dict(metadata), others=other_files(others), hash=hash)
    empty = msgspec.json.encode(msgspec.structs.replace(manifest, **rest))
    at = empty.index(b'"tensors":{') + len(b'"tensors":{')

    def encoded(chunks: _Chunks) -> bytes:
        raw = b"".join((empty[:at], chunks.text(), empty[at:]))
        return seal(raw, paid_nbytes(raw))

    raw = encoded(blank)
    most = DEFAULTS.index_nbytes
    if len(raw) > most:
        raise CannotHold(CANNOT, [f"the manifest would have {len(raw):,} bytes, more than {most:,}"])
    late = Late(len(raw), lambda crcs: encoded(_Chunks(parts(crcs), outlines)), blank=raw) if labels else Literal(raw)
    return (*others, FilePlan(MANIFEST, (late,)))


class _Chunks:
    """All boxes of a manifest, sorted by tensor; those of one tensor in the order of their files."""

    def __init__(self, parts: Sequence[FileBoxes], outlines: Outlines) -> None:
        self._outlines = outlines
        self._parts = parts
        numbers = [as_column(part.stored.boxes) for part in parts]
        rank = max((len(part.starts) for part in parts), default=0)
        counts = [len(own) for own in numbers]
        tensors, starts, stops = (np.zeros(sum(counts), np.int64) for _ in range(3))
        corners, sizes = np.zeros((rank, len(tensors)), np.int64), np.ones((rank, len(tensors)), np.int64)
        edges = np.cumsum([0, *counts]).tolist()
        for part, own, (first, last) in zip(parts, numbers, pairwise(edges), strict=True):
            tensors[first:last] = part.tensors[own]
            starts[first:last], stops[first:last] = as_column(part.stored.starts), as_column(part.stored.stops)
            corners[: len(part.starts), first:last], sizes[: len(part.sizes), first:last] = part.starts[:, own], part.sizes[:, own]
        order = np.argsort(tensors, kind="stable")
        self._order = order
        self._tensors = tensors[order]
        self._files = np.repeat(np.arange(len(parts)), counts)[order]
        self._starts, self._stops = starts[order], stops[order]
        self._corners, self._sizes = corners[:, order], sizes[:, order]
        self._boxed = np.flatnonzero(~_are_whole(self._corners, self._sizes, shape_columns(outlines.shapes)[:, self._tensors]))
        self._heads = np.flatnonzero(np.concatenate((np.ones(min(len(order), 1), np.bool_), np.diff(self._tensors) != 0)))

    @property
    def whole(self) -> bool:
        """Whether every tensor lies whole in one file, as it is in memory."""
        return not len(self._boxed) and not any(part.stored.packed for part in self._parts)

    @property
    def hashed(self) -> bool:
        """Whether a box has a hash."""
        return any(part.stored.tails for part in self._parts)

    def weights(self, files: Sequence[str]) -> tuple[list[str], list[str], int]:
        """The names of all tensors in the order in which they lie in files, the file of each, and the bytes of all together."""
        names = [self._outlines.names[tensor] for tensor in self._tensors.tolist()]
        order = np.lexsort((self._stops, self._starts, self._files)).tolist()
        if (self._starts == self._stops).any():
            order.sort(key=lambda at: (self._files[at], self._starts[at], self._stops[at], names[at]))
        numbers = self._files.tolist()
        return [names[at] for at in order], [files[numbers[at]] for at in order], int((self._stops - self._starts).sum())

    def text(self) -> bytes:
        """What the manifest says of its tensors."""
        columns = (self._files, self._starts, self._stops)
        digits = DIGITS("".join([part.stored.crcs for part in self._parts]))
        ordered = [digits[at] for at in self._order.tolist()]
        chunks = [
            f'{file},"bytes":[{start},{stop}],"crc32":"{crc}"'
            for file, start, stop, crc in zip(*(column.tolist() for column in columns), ordered, strict=True)
        ]
        self._add_more(chunks)
        outlines, heads = self._outlines, self._heads.tolist()
        listed = self._tensors[self._heads].tolist()
        if len(heads) < len(chunks):
            chunks = ['},{"file":'.join(chunks[first:last]) for first, last in pairwise([*heads, len(chunks)])]
        quote, keys = as_keys([outlines.names[tensor] for tensor in listed])
        pairs = [(outlines.dtypes[tensor], outlines.shapes[tensor]) for tensor in listed]
        openings = {pair: quote + tensor_opening(*pair) for pair in dict.fromkeys(pairs)}
        each = zip(keys, pairs, chunks, strict=True)
        return (
            f"}}]}},{quote}".join([f"{key}{openings[pair]}{chunk}" for key, pair, chunk in each])
            .join((quote, "}]}") if listed else ("", ""))
            .encode()
        )

    def _add_more(self, chunks: list[str]) -> None:
        """Boxes of what is not whole, how chunks are packed, their hashes."""
        ranks = [len(self._outlines.shapes[tensor]) for tensor in self._tensors[self._boxed].tolist()]
        corners, sizes = (columns[:, self._boxed].T.tolist() for columns in (self._corners, self._sizes))
        for at, rank, start, size in zip(self._boxed.tolist(), ranks, corners, sizes, strict=True):
            stop = [a + n for a, n in zip(start[:rank], size[:rank], strict=True)]
            chunks[at] += f',"start":{_listed(start[:rank])},"stop":{_listed(stop)}'
        if not any(part.stored.packed or part.stored.tails for part in self._parts):
            return
        place = np.empty(len(self._order), np.int64)
        place[self._order] = np.arange(len(self._order))
        first = 0
        for number, part in enumerate(self._parts):
            stored = part.stored
            for at, sparse in stored.packed.items():
                chunk = in_files(StoredChunk(0, (0, 0), "", sparse=sparse), {0: number})
                chunks[place[first + at]] += f',"sparse":{msgspec.json.encode(chunk.sparse).decode()}'
            for at, tail in enumerate(stored.tails):
                chunks[place[first + at]] += tail
            first += len(stored.boxes) // 8


def _listed(numbers: Sequence[int]) -> str:
    return f"[{','.join(map(str, numbers))}]"


def lay_out_split(state: State, parts: Sequence[Mapping[str, Box]], *, save: str = "") -> SavePlan:
    """The plan of a directory in which rank r of a mesh has the boxes `parts[r]`. All boxes of a tensor together tile it.

    Tensors that share memory are stored once, under the first of their names; boxes of the others are left out.
    """
    table = table_of(state)
    kept = what_is_kept(state, table)
    written = {*kept.sharing.rows}
    outlines = Outlines(table.names, [table.kind_of(row).dtype.name for row in range(len(table))], [
        table.kind_of(row).shape for row in range(len(table))
    ])  # fmt: skip
    rank = max(map(len, outlines.shapes), default=0)
    files: list[BoxFile] = []
    columns: list[tuple[Ints, Ints, Ints]] = []
    for number, given in enumerate(parts):
        own = {table.rows[name]: box for name, box in given.items() if table.rows[name] in written}
        starts, sizes = np.zeros((rank, len(own)), np.int64), np.ones((rank, len(own)), np.int64)
        for at, box in enumerate(own.values()):
            starts[: box.rank, at], sizes[: box.rank, at] = box.start, box.shape
        boxes, rows = Boxes.cut(table, [*own], starts, sizes), range(len(own))
        key = data_name(number, len(parts), save)
        files.append(box_file(key, boxes, rows, boxes.sharding_texts(rows), label=f"{number} "))
        columns.append((np.array([*own], np.int64), starts, sizes))

    def stored(crcs: Mapping[str, int]) -> list[FileBoxes]:
        return [FileBoxes(file.stored(crcs), *of) for file, of in zip(files, columns, strict=True)]

    listed = [DataFile(file.layout.plan.key, file.layout.plan.nbytes) for file in files]
    labels = [key for file in files for key in known_later(file.layout.plan.segments)]
    fields, metadata = kept.fields, state.metadata
    index = lay_out_index(listed, outlines, stored, labels=labels, fields=fields, metadata=metadata, alone=bool(save))
    plans = tuple(file.layout.plan for file in files)
    return SavePlan("native", plans, tuple(kept.notes), directory=True, index=index)
