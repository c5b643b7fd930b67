"""Lay out a state as safetensors: one file, or a directory of them with a Hugging Face index.

A directory is what `save_pretrained` of transformers makes: `model.safetensors` alone where all fits into one file, and otherwise
`model-00001-of-0000N.safetensors` and so on, with an index.

The format is a flat mapping of text to tensors. What a state has beyond that is recorded where Holdfast finds it again, in
`__metadata__` of the file or `metadata` of the index:

1. Nested dicts become dotted names; which dicts there were is recorded, and so are Parameters and sparse tensors.
2. Second names of a tensor and views of a storage are recorded (`formats.recorded`).
3. Plain values, lists, tuples, keys that are no text: refused, or recorded with `keep_tree=True`.

A dtype that the format lacks is refused. Every tensor is written in C order.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, starmap
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.crc import crc32
from holdfast.core.documents import BLANK, OPENING
from holdfast.core.limits import DEFAULTS
from holdfast.core.opaque import Opaque
from holdfast.core.protocols import State
from holdfast.core.strict_json import INVALID_UNICODE, is_unicode
from holdfast.core.table import RowKind, Table
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import join_linked_path, walk
from holdfast.core.value import Value
from holdfast.engine.saves import BATCH_TENSOR_COUNT, FilePlan, Hashing, Late, Literal, SavePlan
from holdfast.engine.table import plan_segments
from holdfast.errors import CannotHold
from holdfast.formats.index_file import FILES
from holdfast.formats.recorded import PAIRS, share, sharing_fields
from holdfast.formats.safetensors.record import (
    CRC_DIGITS,
    RecordText,
    checksum_digits,
    fingerprint,
)
from holdfast.formats.safetensors.schema import METADATA, PREFIX_NBYTES, RECORD, HeaderEntry
from holdfast.formats.tree_json.encode import encode_state

STEM = "model"

DATA_ALIGNMENT = 64
"""Where the data begins: a multiple of a cache line, and of every element size. The library pads to 8; more spaces are allowed."""

ORDER = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16",
    "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
"""The dtypes as safetensors 0.8 declares them; it sorts tensors by the place in this list, last first."""

RANK = {code: -i for i, code in enumerate(ORDER)}


class HeaderKind(NamedTuple):
    """Dtype code and shape of a header, for all tensors of a kind."""

    code: str
    shape: tuple[int, ...]


class FileLayout(Value, frozen=True, eq=False):
    """A file and the places of its tensors."""

    plan: FilePlan
    header_nbytes: int
    names: Sequence[str]
    """Tensors, in the order of the file. `rows`, `nbytes`, `starts` and `stops` have the same order."""
    rows: Ints
    nbytes: Ints

    @property
    def stops(self) -> Ints:
        return self.nbytes.cumsum() + (PREFIX_NBYTES + self.header_nbytes)

    @property
    def starts(self) -> Ints:
        return self.stops - self.nbytes


def plan_file(
    key: str,
    table: Table,
    rows: Sequence[int],
    kinds: Sequence[HeaderKind],
    metadata: Mapping[str, str],
    *,
    fields: Mapping[str, object],
    label: str = "",
    hashed: Mapping[str, Hashing] | None = None,
) -> FileLayout:
    """Lay out one file with these rows of a table; `kinds` has the header's text for each kind of the table.

    `fields` go into the record of the file. Tensors with names in `hashed` are hashed. The label of a tensor's data is `label` and
    its name; `label` separates pieces of one tensor in several files.

        length │ {"__metadata__":{…,"holdfast":"…,crc32: │ 8 digits a tensor, self: 8 digits │ "},"w":{"dtype":…},…}␠␠␠ │ tensors
        ───────┴──────── Literal ────────────────────────┴───────────── Late ───────────────┴──────── Literal ─────────┴─ Data …

    The order of the tensors is that of the safetensors library: by dtype, the widest first, then by name; so every tensor begins
    at a multiple of its element size, and the data begins at a multiple of 64 bytes.
    """
    ranks = [RANK[kind.code] for kind in kinds]
    by_name = sorted(rows, key=table.names.__getitem__)
    order = array("q", sorted(by_name, key=lambda row: ranks[table.kind_indices[row]]))
    placed = np.asarray(order)
    named = [table.names[row] for row in order]
    numbers = table.kind_index_array[placed]
    nbytes = table.kind_nbytes[numbers]
    stops = nbytes.cumsum()
    starts = stops - nbytes
    kind = numbers.tolist()
    listed: list[bytes] = []
    for first in range(0, len(named), BATCH_TENSOR_COUNT):
        batch = slice(first, first + BATCH_TENSOR_COUNT)
        each = zip(
            named[batch], kind[batch], starts[batch].tolist(), stops[batch].tolist(), strict=True
        )
        entries = {
            name: HeaderEntry(kinds[number].code, kinds[number].shape, (start, stop))
            for name, number, start, stop in each
        }
        listed.append(b"," * bool(first) + msgspec.json.encode(entries)[1:-1])
    labels = [label + name for name in named] if label else named
    hollow = {number for number, one in enumerate(table.kinds) if not one.nbytes}
    empty = [labels[at] for at, number in enumerate(kind) if number in hollow] if hollow else []
    head, header_nbytes = _header(listed, labels, metadata, fields=fields, empty=empty)
    plan = FilePlan(
        key, (*head, *plan_segments(table, order, nbytes, labels, hashed or {}, stops=stops))
    )
    return FileLayout(plan, header_nbytes, named, placed, nbytes)


def _header(
    listed: Sequence[bytes],
    labels: Sequence[str],
    metadata: Mapping[str, str],
    *,
    fields: Mapping[str, object],
    empty: Collection[str],
) -> tuple[tuple[Literal | Late, ...], int]:
    """The segments before the data of a file, and the length of its header.

    `listed` is the part about tensors in pieces, from the first name to before the last brace; each piece is a segment. The
    labels in `empty` have no data: their checksums are 0.
    """

    def checksums(crcs: Mapping[str, int]) -> bytes:
        known = {**crcs, **dict.fromkeys(empty, 0)} if empty else crcs
        return _escaped(record.middle(checksum_digits(known, labels).encode()))

    crc = crc32(b"{")
    for piece in listed:
        crc = crc32(piece, crc)
    about = {"format": "pt"} | {k: v for k, v in metadata.items() if k != RECORD}
    record = RecordText(fields, f"{crc32(b'}', crc):08x}", about, tensors=len(labels))
    head = b'{"%s":%s,"%s":"' % (
        METADATA.encode(),
        msgspec.json.encode(about)[:-1],
        RECORD.encode(),
    ) + _escaped(record.opening)
    late = Late(CRC_DIGITS * len(labels) + SEALED_NBYTES, checksums)
    tail = _escaped(record.closing) + b'"}' + (b"," if labels else b"")
    length = len(head) + late.nbytes + len(tail) + sum(map(len, listed)) + 1
    end = b"}" + b" " * (-(PREFIX_NBYTES + length) % DATA_ALIGNMENT)
    length += len(end) - 1
    head = length.to_bytes(PREFIX_NBYTES, "little") + head
    behind = [b"".join((tail, *listed, end))] if len(listed) < 2 else [tail, *listed, end]
    return (Literal(head), late, *map(Literal, behind)), length


def _escaped(raw: bytes) -> bytes:
    return msgspec.json.encode(raw.decode("utf-8"))[1:-1]


SEALED_NBYTES = len(_escaped(b'"' + OPENING + BLANK))
"""The text of a record behind the checksums of tensors, up to the digits of its own checksum."""


def fill_shards(nbytes: Ints, max_nbytes: int) -> list[range]:
    if int(nbytes.sum()) <= max_nbytes:
        return [range(len(nbytes))]
    edges, room = [0], max_nbytes
    for row, length in enumerate(nbytes.tolist()):
        if length > room and row > edges[-1]:
            edges.append(row)
            room = max_nbytes
        room -= length
    return list(starmap(range, pairwise([*edges, len(nbytes)])))


def name_problem(name: str) -> str | None:
    if name == METADATA:
        return "this name has another meaning in safetensors; rename it"
    return None if is_unicode(name) else INVALID_UNICODE


def size_problem(tensor: LazyTensor) -> str | None:
    """Why a tensor should not be written out, or None: an expanded view takes many times what was stored."""
    limits, nbytes = tensor.source.limits, tensor.nbytes
    if nbytes <= limits.expansion_floor_nbytes:
        return None
    stored = sum(storage.nbytes for storage in tensor.storages)
    if nbytes <= limits.expansion * stored or tensor.traits.meta:
        return None
    return f"an expanded view, {nbytes:,} bytes out of {stored:,} stored ones; slice it, or raise Limits(expansion=…)"


HINT = "safetensors holds tensors only (keep_tree=True records it in __metadata__)"


SHARD_NBYTES = 5_000_000_000
"""Bytes of tensors in a file of a directory, unless told otherwise, as Hugging Face has it."""


def lay_out_safetensors(
    state: State,
    *,
    keep_tree: bool = False,
    directory: bool = False,
    max_shard_size: int | None = None,
    index: bool = False,
    stem: str = STEM,
    save: str = "",
) -> SavePlan:
    """The plan of a single file or of a directory, which `max_shard_size` (bytes of tensors in a file) asks for as well.

    `index` asks for an index even where there is one file: other safetensors files in the directory are then no part of it. `stem`
    is what the names of its files begin with. `save` is the id of a save to an object store: the data has it in its names, and an
    index says which data counts, so that two saves never mix.

    Raises `CannotHold` with every problem.
    """
    table = state.tensors
    sharing = share(table)
    problems = metadata_problems(state, table)
    known = [_header_kind(kind) for kind in table.kinds]
    if any(isinstance(one, str) for one in known):
        words = ((table.names[row], known[table.kind_indices[row]]) for row in sharing.rows)
        problems += [f"{name}: {problem}" for name, problem in words if isinstance(problem, str)]
    kinds = [one if isinstance(one, HeaderKind) else HeaderKind("U8", ()) for one in known]
    notes: list[str] = []
    fields: dict[str, object] = {}
    if sharing.aliases or sharing.groups:
        notes, fields = sharing.notes(), sharing_fields(sharing)
    if any(kind.dtype.name == PAIRS for kind in table.kinds):
        paired = {
            table.names[row]: PAIRS
            for row in sharing.rows
            if table.kinds[table.kind_indices[row]].dtype.name == PAIRS
        }
        fields |= {"dtypes": paired} if paired else {}
    if not state.leaves.is_flat:
        beyond = [] if keep_tree else _not_tensors(state)
        problems += beyond
        if not beyond:
            encoded = encode_state(state)
            problems += encoded.problems
            notes += encoded.notes
            fields["tree"] = encoded.value
    if not problems:
        shards, listed = {"": sharing.rows}, ""
        if max_shard_size is not None or directory:
            parts = fill_shards(table.row_nbytes(sharing.rows), max_shard_size or SHARD_NBYTES)
            alone = len(parts) == 1 and not index and not save
            listed = "" if alone else f"{stem}.safetensors.index.json"
            start = f"{stem}-{save}" if save else stem
            names = [
                f"{start}-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))
            ]
            keys = [f"{stem}.safetensors"] if alone else names
            shards = {
                key: [sharing.rows[at] for at in part]
                for key, part in zip(keys, parts, strict=True)
            }
        # A file that has an index says there what it would say of itself.
        own = {"rest": listed} if listed else fields
        files = [
            plan_file(key, table, rows, kinds, state.metadata, fields=own)
            for key, rows in shards.items()
        ]
        if all(file.header_nbytes <= DEFAULTS.header_nbytes for file in files):
            return _plan(table, files, listed, fields, notes)
        problems.append(
            f"the header would be longer than {DEFAULTS.header_nbytes:,} bytes, the most that the format allows"
        )
    raise CannotHold("safetensors cannot hold this state", list(dict.fromkeys(problems)))


def _plan(
    table: Table,
    files: Sequence[FileLayout],
    index: str,
    fields: Mapping[str, object],
    notes: Sequence[str],
) -> SavePlan:
    plans, last = tuple(file.plan for file in files), list[FilePlan]()
    if index:
        weight_map = {name: file.plan.key for file in files for name in file.names}
        last.append(
            index_file(
                index, weight_map, sum(int(file.nbytes.sum()) for file in files), fields=fields
            )
        )
    folder = plans[0].key != ""
    return SavePlan(
        "safetensors-dir" if folder else "safetensors",
        plans,
        tuple(notes),
        directory=folder,
        index=tuple(last),
        expected_table=table,
    )


def index_file(
    key: str,
    weight_map: Mapping[str, str],
    total_nbytes: int,
    *,
    fields: Mapping[str, object] | None = None,
    files: Sequence[str] | None = None,
) -> FilePlan:
    """The Hugging Face index: the file of each name. `fields` go into a record in its metadata, None for an index without one.

    `files` are all of them, where some only have pieces of tensors whose first piece is in another.
    """
    metadata: dict[str, object] = {"total_size": total_nbytes} | (
        {} if files is None else {FILES: list(files)}
    )
    if fields is not None:
        metadata[RECORD] = (
            RecordText(fields, fingerprint(weight_map), {**metadata}).whole().decode("utf-8")
        )
    return FilePlan(key, (index_text(metadata, weight_map),))


def index_text(metadata: Mapping[str, object], weight_map: Mapping[str, str]) -> Literal:
    """Return the text of an index as `json.dumps` makes it with an indent of 2."""
    raw = msgspec.json.encode({"metadata": metadata, "weight_map": weight_map})
    return Literal(msgspec.json.format(raw, indent=2) + b"\n")


def metadata_problems(state: State, table: Table) -> list[str]:
    """Names and texts of a state that JSON cannot hold, and tensors that are too large when written out."""
    problems = [
        f"metadata {key!r}: no Unicode text"
        for key, text in state.metadata.items()
        if not (is_unicode(key) and is_unicode(text))
    ]
    if is_unicode("".join(table.names)) and METADATA not in table.names:
        # What is a range of its storage is no view that could be expanded.
        found = (
            (table.names[row], size_problem(table.lazy_tensor(row)))
            for row in table.rows_read_singly
        )
    else:
        found = (
            (
                name,
                name_problem(name)
                or (
                    size_problem(table.lazy_tensor(row)) if row in table.rows_read_singly else None
                ),
            )
            for row, name in enumerate(table.names)
        )
    return problems + [f"{name}: {problem}" for name, problem in found if problem is not None]


@lru_cache(1024)
def _header_kind(kind: RowKind) -> HeaderKind | str:
    dtype, shape = kind.dtype, kind.shape
    if dtype.name == PAIRS and shape:
        return HeaderKind("F4", (*shape[:-1], 2 * shape[-1]))
    if dtype.safetensors is None:
        return f"safetensors has no dtype {dtype}"
    size = math.prod(shape)
    if size * dtype.bits % 8:
        return f"{size:,} elements of {dtype} do not fill whole bytes"
    return HeaderKind(dtype.safetensors, shape)


def _not_tensors(state: State) -> list[str]:
    problems: list[str] = []
    leaves = state.leaves
    plain, more = (
        {kind for kind in leaves.tensor_types if not issubclass(kind, LazyTensor)},
        {*leaves.irregular_tensors, *leaves.conversions},
    )

    def inside(value: object) -> Iterable[tuple[object, object]] | None:
        # No function is called for a plain tensor: there may be very many.
        if not isinstance(value, dict) or not _has_texts(value):
            return None
        few = more or not {*map(type, value.values())} <= plain
        return (
            [item for item in value.items() if type(item[1]) not in plain or id(item[1]) in more]
            if few
            else ()
        )

    for way, given in walk(state.tree, inside):
        match leaves.describe(given):
            case LazyTensor(traits=traits):
                problem = (
                    f"a tensor without data, on the meta device; {HINT}" if traits.meta else ""
                )
            case Composite():
                problem = ""
            case value if leaves.is_tensor(value):
                problem = ""
            case dict() as value if type(value) in (dict, OrderedDict):
                problem = "" if _has_texts(value) else f"a dict with keys that are not text; {HINT}"
            case Opaque() as value:
                problem = f"an object of class {value.module}.{value.name}; safetensors holds tensors only"
            case value:
                problem = f"{_kind(value)}; {HINT}"
        if problem:
            problems.append(f"{join_linked_path(way) or 'the state itself'}: {problem}")
    return problems


def _has_texts(value: object) -> bool:
    return (
        isinstance(value, dict)
        and type(value) in (dict, OrderedDict)
        and {*map(type, value)} <= {str}
    )


def _kind(value: object) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
