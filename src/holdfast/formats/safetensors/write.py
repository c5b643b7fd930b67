"""Plans safetensors files for a state: one file, or a directory with a Hugging Face index.

A directory has the file names of `save_pretrained` of transformers: `model.safetensors` if one file
is enough, otherwise `model-00001-of-0000N.safetensors` and so on with an index.

The format maps names to tensors, and has nothing else. So Holdfast records the rest in
`__metadata__` of the file, or in `metadata` of the index:

1. Nested dicts become dotted names. The record has the dicts, parameters and sparse tensors.
2. The record has other names of tied tensors, and views of a storage (`formats/recorded.py`).
3. Plain values, lists, tuples and keys that are not strings are refused, unless `keep_tree=True`.

A dtype that the format lacks is refused. Every tensor is written in C order.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.crc import crc32
from holdfast.core.documents import BLANK_DIGITS, SEAL_OPENING
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
from holdfast.formats.recorded import PAIRS, Shared, share, sharing_fields
from holdfast.formats.safetensors.record import (
    CRC_DIGITS,
    RecordText,
    compute_fingerprint,
    format_crcs,
)
from holdfast.formats.safetensors.schema import METADATA, PREFIX_NBYTES, RECORD, HeaderEntry
from holdfast.formats.tree_json.encode import encode_state

STEM = "model"
"""The start of the file names in a directory."""

SHARD_NBYTES = 5_000_000_000
"""The most bytes of tensors in a file of a directory, by default, as for Hugging Face."""

DATA_ALIGNMENT = 64
"""The data starts at a multiple of this: of a cache line, and of every element size. The
safetensors library aligns it to 8 bytes. The format allows more spaces."""

HINT = "safetensors holds tensors only (keep_tree=True records it in __metadata__)"

ORDER = (
    *("BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"),
    *("F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16", "I32", "U32", "F32"),
    *("C64", "F64", "I64", "U64"),
)
"""The dtypes in the order in which version 0.8 of the safetensors library declares them. The
library writes tensors in the reverse of this order."""

SORT_KEY_OF_CODE = {code: -position for position, code in enumerate(ORDER)}


class HeaderKind(NamedTuple):
    """What a header says of a tensor of some kind: the code of its dtype, and its shape."""

    code: str
    shape: tuple[int, ...]


class PlannedFile(Value, frozen=True, eq=False):
    """A planned safetensors file, with the positions of its tensors as columns in their order."""

    plan: FilePlan
    header_nbytes: int
    names: Sequence[str]
    """The names of the tensors."""
    rows: Ints
    """Their rows in the table of the state."""
    nbytes: Ints

    @property
    def stops(self) -> Ints:
        """The offset in the file after the last byte of each tensor."""
        return self.nbytes.cumsum() + (PREFIX_NBYTES + self.header_nbytes)

    @property
    def starts(self) -> Ints:
        """The offset in the file of the first byte of each tensor."""
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
    hashing: Mapping[str, Hashing] | None = None,
) -> PlannedFile:
    """Plan one file with some rows of a table.

        length │ {"__metadata__":{…,"holdfast":"…│ checksums │"},"w":{"dtype":…},…}␠␠ │ tensors
        ─────────────── Literal ─────────────────┼── Late ───┼──────── Literal ───────┼─ Data ─

    The tensors are in the order of the safetensors library: the widest dtypes first, and by name
    among equal dtypes. So every tensor starts at a multiple of its element size.

    Args:
        key: The name of the file.
        table: The table.
        rows: The rows.
        kinds: For each kind of the table what the header says of it.
        metadata: The metadata of the state.
        fields: What the record of the file contains besides checksums.
        label: Precedes the name of a tensor in the label of its data. It tells apart the parts of
            one tensor that lie in several files.
        hashing: The tensors that get content hashes, by name.
    """
    sort_keys = [SORT_KEY_OF_CODE[kind.code] for kind in kinds]
    rows_by_name = sorted(rows, key=table.names.__getitem__)
    order = array("q", sorted(rows_by_name, key=lambda row: sort_keys[table.kind_indices[row]]))
    row_array = np.asarray(order)
    names = [table.names[row] for row in order]
    kind_indices = table.kind_index_array[row_array]
    nbytes = table.kind_nbytes[kind_indices]
    stops = nbytes.cumsum()
    starts = stops - nbytes

    # A batch at a time, since the entries of all tensors would take much more memory than the text.
    entry_texts: list[bytes] = []
    for first in range(0, len(names), BATCH_TENSOR_COUNT):
        batch = slice(first, first + BATCH_TENSOR_COUNT)
        columns = (kind_indices[batch].tolist(), starts[batch].tolist(), stops[batch].tolist())
        entries: dict[str, HeaderEntry] = {}
        for name, kind_index, start, stop in zip(names[batch], *columns, strict=True):
            code, shape = kinds[kind_index]
            entries[name] = HeaderEntry(code, shape, (start, stop))
        separator = b"," if first else b""
        entry_texts.append(separator + msgspec.json.encode(entries)[1:-1])

    labels = [label + name for name in names] if label else names
    empty_labels = [labels[position] for position in np.flatnonzero(nbytes == 0).tolist()]
    head, header_nbytes = _plan_header(
        entry_texts, labels, metadata, fields=fields, empty_labels=empty_labels
    )
    data = plan_segments(table, order, nbytes, labels, hashing or {}, stops=stops)
    return PlannedFile(FilePlan(key, (*head, *data)), header_nbytes, names, row_array, nbytes)


def _plan_header(
    entry_texts: Sequence[bytes],
    labels: Sequence[str],
    metadata: Mapping[str, str],
    *,
    fields: Mapping[str, object],
    empty_labels: Collection[str],
) -> tuple[tuple[Literal | Late, ...], int]:
    """Plan the segments before the data of a file.

    Args:
        entry_texts: The JSON of the entries of tensors, in pieces.
        labels: The labels of the tensors.
        metadata: The metadata of the state.
        fields: What the record of the file contains besides checksums.
        empty_labels: The labels of tensors without data. Their checksums are 0.

    Returns:
        The segments, and the length of the header that the file starts with.
    """

    def make_checksums(crcs: Mapping[str, int]) -> bytes:
        """Return the part of the record that depends on the data."""
        all_crcs = {**crcs, **dict.fromkeys(empty_labels, 0)} if empty_labels else crcs
        return _escape(record.middle(format_crcs(all_crcs, labels).encode()))

    entries_crc = crc32(b"{")
    for text in entry_texts:
        entries_crc = crc32(text, entries_crc)
    entries_crc = crc32(b"}", entries_crc)
    texts = {"format": "pt"}
    texts.update(metadata)
    # A file that is copied has the record of the original. The copy gets one of its own.
    texts.pop(RECORD, None)
    record = RecordText(fields, f"{entries_crc:08x}", texts, tensors=len(labels))

    metadata_json = msgspec.json.encode(texts)[:-1]
    head = b'{"%s":%s,"%s":"' % (METADATA.encode(), metadata_json, RECORD.encode())
    head += _escape(record.opening)
    checksums = Late(CRC_DIGITS * len(labels) + SEAL_NBYTES, make_checksums)
    tail = _escape(record.closing) + b'"}'
    if labels:
        tail += b","

    text_nbytes = len(head) + checksums.nbytes + len(tail) + sum(map(len, entry_texts)) + len(b"}")
    padding = b" " * (-(PREFIX_NBYTES + text_nbytes) % DATA_ALIGNMENT)
    header_nbytes = text_nbytes + len(padding)
    prefix = header_nbytes.to_bytes(PREFIX_NBYTES, "little")

    pieces = [tail, *entry_texts, b"}" + padding]
    if len(entry_texts) < 2:
        # One segment for all. Many entries are not joined, which would copy them.
        pieces = [b"".join(pieces)]
    return (Literal(prefix + head), checksums, *map(Literal, pieces)), header_nbytes


def _escape(raw: bytes) -> bytes:
    """Return JSON text as it stands inside of a JSON string: with backslashes before quotes."""
    return msgspec.json.encode(raw.decode("utf-8"))[1:-1]


SEAL_NBYTES = len(_escape(b'"' + SEAL_OPENING + BLANK_DIGITS))
"""The length of what follows the checksums of tensors in a record: the checksum of itself."""


def fill_shards(nbytes: Ints, max_nbytes: int) -> list[range]:
    """Divide tensors into shards, in their order.

    Args:
        nbytes: The size of each tensor.
        max_nbytes: The most bytes of a shard. A tensor that is larger gets a shard of its own.

    Returns:
        The positions of the tensors of each shard.
    """
    if int(nbytes.sum()) <= max_nbytes:
        return [range(len(nbytes))]
    edges = [0]
    free_nbytes = max_nbytes
    for position, tensor_nbytes in enumerate(nbytes.tolist()):
        if tensor_nbytes > free_nbytes and position > edges[-1]:
            edges.append(position)
            free_nbytes = max_nbytes
        free_nbytes -= tensor_nbytes
    return [range(start, stop) for start, stop in pairwise([*edges, len(nbytes)])]


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
    """Plan a file for a state, or a directory of files.

    Args:
        state: The state.
        keep_tree: Whether values that are not tensors are recorded. Otherwise they are refused.
        directory: Whether to plan a directory.
        max_shard_size: The most bytes of tensors in a file of a directory. It implies `directory`.
        index: Whether the directory has an index even if it has one file. Then other safetensors
            files in the directory do not belong to the checkpoint.
        stem: The start of the file names.
        save: The id of a save to an object store. It is part of the file names, and the index lists
            the files that count, so that files of two saves are never mixed.

    Raises:
        CannotHold: The format cannot hold the state. The error lists all problems.
    """
    table = state.tensors
    sharing = share(table)
    problems = find_metadata_problems(state, table)
    kinds: list[HeaderKind] = []
    problem_of_kind: dict[int, str] = {}
    for kind_index, kind in enumerate(table.kinds):
        header_kind = _find_header_kind(kind)
        if isinstance(header_kind, str):
            problem_of_kind[kind_index] = header_kind
            header_kind = HeaderKind("U8", ())
        kinds.append(header_kind)
    if problem_of_kind:
        for row in sharing.rows:
            kind_index = table.kind_indices[row]
            if kind_index in problem_of_kind:
                problems.append(f"{table.names[row]}: {problem_of_kind[kind_index]}")

    extras = _collect_extras(state, sharing, keep_tree=keep_tree)
    problems += extras.problems
    if not problems:
        rows_by_key = {"": sharing.rows}
        index_key = ""
        is_directory = directory or max_shard_size is not None
        if is_directory:
            shards = fill_shards(table.row_nbytes(sharing.rows), max_shard_size or SHARD_NBYTES)
            if len(shards) > 1 or index or save:
                index_key = f"{stem}.safetensors.index.json"
                start = f"{stem}-{save}" if save else stem
                suffix = f"of-{len(shards):05}.safetensors"
                keys = [f"{start}-{i:05}-{suffix}" for i in range(1, len(shards) + 1)]
            else:
                keys = [f"{stem}.safetensors"]
            rows_by_key = {}
            for key, shard in zip(keys, shards, strict=True):
                rows_by_key[key] = [sharing.rows[position] for position in shard]

        # The fields are in the record of the index if there is one. The files refer to it.
        fields = extras.fields
        file_fields = {"rest": index_key} if index_key else fields
        files = [
            plan_file(key, table, rows, kinds, state.metadata, fields=file_fields)
            for key, rows in rows_by_key.items()
        ]
        if all(file.header_nbytes <= DEFAULTS.header_nbytes for file in files):
            return SavePlan(
                "safetensors-dir" if is_directory else "safetensors",
                tuple(file.plan for file in files),
                tuple(extras.notes),
                directory=is_directory,
                index=_plan_index(index_key, files, fields) if index_key else (),
                expected_table=table,
            )
        problems.append(
            f"the header would be longer than {DEFAULTS.header_nbytes:,} bytes, the most that the "
            "format allows"
        )
    raise CannotHold("safetensors cannot hold this state", list(dict.fromkeys(problems)))


class _Extras(NamedTuple):
    """What a state has besides tensors."""

    fields: dict[str, object]
    """For the record of the checkpoint."""
    notes: list[str]
    """Sentences for people."""
    problems: list[str]
    """A sentence for each value that cannot be written."""


def _collect_extras(state: State, sharing: Shared, *, keep_tree: bool) -> _Extras:
    """Collect ties, dtypes and values that the format has no place for.

    Args:
        state: The state.
        sharing: Which of its tensors are tied.
        keep_tree: Whether values that are not tensors are recorded. Otherwise they are problems.
    """
    table = state.tensors
    extras = _Extras({}, [], [])
    if sharing.aliases or sharing.groups:
        extras.fields.update(sharing_fields(sharing))
        extras.notes.extend(sharing.notes())

    # A header has no dtype for pairs of 4-bit floats, so the record tells which tensors have it.
    paired_kinds = {i for i, kind in enumerate(table.kinds) if kind.dtype.name == PAIRS}
    if paired_kinds:
        paired_rows = [row for row in sharing.rows if table.kind_indices[row] in paired_kinds]
        if paired_rows:
            extras.fields["dtypes"] = {table.names[row]: PAIRS for row in paired_rows}

    if not state.leaves.is_flat:
        if not keep_tree:
            extras.problems.extend(_find_refused_values(state))
        if not extras.problems:
            encoded = encode_state(state)
            extras.problems.extend(encoded.problems)
            extras.notes.extend(encoded.notes)
            extras.fields["tree"] = encoded.value
    return extras


def _plan_index(
    key: str, files: Sequence[PlannedFile], fields: Mapping[str, object]
) -> tuple[FilePlan]:
    """Plan the index of a directory.

    Args:
        key: The name of the index.
        files: The files of the directory.
        fields: What the record in the index contains.
    """
    weight_map: dict[str, str] = {}
    for file in files:
        weight_map.update(dict.fromkeys(file.names, file.plan.key))
    total_nbytes = sum(int(file.nbytes.sum()) for file in files)
    return (plan_index_file(key, weight_map, total_nbytes, fields=fields),)


def plan_index_file(
    key: str,
    weight_map: Mapping[str, str],
    total_nbytes: int,
    *,
    fields: Mapping[str, object] | None = None,
    files: Sequence[str] | None = None,
) -> FilePlan:
    """Plan a Hugging Face index.

    Args:
        key: The name of the index.
        weight_map: The file of each tensor.
        total_nbytes: The bytes of all tensors.
        fields: What the record in its metadata contains; None for an index without a record.
        files: All files of the directory, if some of them have only parts of tensors whose first
            part is in another file.
    """
    metadata: dict[str, object] = {"total_size": total_nbytes}
    if files is not None:
        metadata[FILES] = list(files)
    if fields is not None:
        record = RecordText(fields, compute_fingerprint(weight_map), {**metadata})
        metadata[RECORD] = record.whole().decode("utf-8")
    return FilePlan(key, (format_index(metadata, weight_map),))


def format_index(metadata: Mapping[str, object], weight_map: Mapping[str, str]) -> Literal:
    """Return the text of an index, as `json.dumps` makes it with an indent of 2."""
    raw = msgspec.json.encode({"metadata": metadata, "weight_map": weight_map})
    return Literal(msgspec.json.format(raw, indent=2) + b"\n")


def find_metadata_problems(state: State, table: Table) -> list[str]:
    """Return what keeps a state from being written: its names, its metadata, and expanded views.

    Returns:
        A sentence for each problem. Names and texts must be Unicode, because JSON is.
    """
    problems: list[str] = []
    for key, text in state.metadata.items():
        if not (is_unicode(key) and is_unicode(text)):
            problems.append(f"metadata {key!r}: no Unicode text")

    # All names are checked together first, which is faster for a million of them.
    has_name_problems = METADATA in table.names or not is_unicode("".join(table.names))
    rows: Iterable[int] = range(len(table.names)) if has_name_problems else table.rows_read_singly
    for row in rows:
        name = table.names[row]
        problem = find_name_problem(name) if has_name_problems else None
        # A row that is not read singly is a range of its storage, so it is not expanded.
        if problem is None and row in table.rows_read_singly:
            problem = find_size_problem(table.lazy_tensor(row))
        if problem is not None:
            problems.append(f"{name}: {problem}")
    return problems


def find_name_problem(name: str) -> str | None:
    """Return why a tensor cannot have this name, or None if it can."""
    if name == METADATA:
        return "this name has another meaning in safetensors; rename it"
    return None if is_unicode(name) else INVALID_UNICODE


def find_size_problem(tensor: LazyTensor) -> str | None:
    """Return why a tensor should not be written, or None.

    An expanded view has a stride of 0, and takes many times the bytes that were stored. A small
    file could ask for a huge one to be written.
    """
    limits = tensor.source.limits
    nbytes = tensor.nbytes
    if nbytes <= limits.expansion_floor_nbytes:
        return None
    stored_nbytes = sum(storage.nbytes for storage in tensor.storages)
    if nbytes <= limits.expansion * stored_nbytes or tensor.traits.meta:
        return None
    return (
        f"an expanded view, {nbytes:,} bytes out of {stored_nbytes:,} stored ones; slice it, or "
        "raise Limits(expansion=…)"
    )


@lru_cache(1024)
def _find_header_kind(kind: RowKind) -> HeaderKind | str:
    """Return what a header says of tensors of a kind, or why the format cannot have them."""
    dtype = kind.dtype
    shape = kind.shape
    if dtype.name == PAIRS and shape:
        return HeaderKind("F4", (*shape[:-1], 2 * shape[-1]))
    if dtype.safetensors is None:
        return f"safetensors has no dtype {dtype}"
    size = math.prod(shape)
    if size * dtype.bits % 8:
        return f"{size:,} elements of {dtype} do not fill whole bytes"
    return HeaderKind(dtype.safetensors, shape)


def _find_refused_values(state: State) -> list[str]:
    """Return a sentence for each value of a state that the format cannot hold.

    It holds tensors, and dicts whose keys are text.
    """
    leaves = state.leaves
    plain_types = {kind for kind in leaves.tensor_types if not issubclass(kind, LazyTensor)}
    other_tensors = {*leaves.irregular_tensors, *leaves.conversions}

    def get_children(value: object) -> Iterable[tuple[object, object]] | None:
        """Return the items of a dict that must be looked at; None if a value has no children."""
        if not _has_text_keys(value):
            return None
        assert isinstance(value, dict)
        # There may be very many plain tensors, and no function is called for one of them.
        if not other_tensors and {*map(type, value.values())} <= plain_types:
            return ()
        return [
            item
            for item in value.items()
            if type(item[1]) not in plain_types or id(item[1]) in other_tensors
        ]

    problems: list[str] = []
    for path, leaf in walk(state.tree, get_children):
        match leaves.describe(leaf):
            case LazyTensor(traits=traits):
                problem = ""
                if traits.meta:
                    problem = f"a tensor without data, on the meta device; {HINT}"
            case Composite():
                problem = ""
            case value if leaves.is_tensor(value) or _has_text_keys(value):
                problem = ""
            case dict() as value if type(value) in (dict, OrderedDict):
                problem = f"a dict with keys that are not text; {HINT}"
            case Opaque() as value:
                class_name = f"{value.module}.{value.name}"
                problem = f"an object of class {class_name}; safetensors holds tensors only"
            case value:
                problem = f"{_describe_type(value)}; {HINT}"
        if problem:
            problems.append(f"{join_linked_path(path) or 'the state itself'}: {problem}")
    return problems


def _has_text_keys(value: object) -> bool:
    """Return whether a value is a dict, not of a subclass, whose keys are all text."""
    if not isinstance(value, dict) or type(value) not in (dict, OrderedDict):
        return False
    return {*map(type, value)} <= {str}


def _describe_type(value: object) -> str:
    """Return the type of a value with its article, for errors."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
