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

import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from holdfast.core.crc import crc32
from holdfast.core.limits import Limits
from holdfast.core.opaque import Opaque
from holdfast.core.protocols import State
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import Path, dotted
from holdfast.core.value import Value
from holdfast.errors import CannotHold
from holdfast.formats.index_file import FILES
from holdfast.formats.recorded import PAIRS, find_sharing, sharing_fields
from holdfast.formats.safetensors.record import CRC_DIGITS, RECORD, RecordText, checksum_digits, fingerprint
from holdfast.formats.safetensors.schema import PREFIX_NBYTES, HeaderEntry
from holdfast.formats.tree_json.encode import encode_tree
from holdfast.formats.tree_json.scalars import NO_UNICODE, is_unicode
from holdfast.plan.saves import Data, FilePlan, Hashing, Late, Literal, SavePlan, Segment

METADATA = "__metadata__"

STEM = "model"
"""What the files of a directory are called, unless they had another name."""

DATA_ALIGNMENT = 64
"""Where the data begins: a multiple of a cache line, and of every element size. The library pads to 8; more spaces are allowed."""

ORDER = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16",
    "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
"""The dtypes as safetensors 0.8 declares them; it sorts tensors by the place in this list, last first."""

RANK = {code: -i for i, code in enumerate(ORDER)}


class HeaderTensor(Value, frozen=True):
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


class FileLayout(Value, frozen=True):
    """A file and where its tensors lie in it."""

    plan: FilePlan
    header_nbytes: int
    places: dict[str, tuple[int, int]]
    """First byte of each tensor in the file, and the byte after its last."""


NOT_HASHED: Mapping[str, Hashing] = {}


def plan_file(
    key: str,
    pieces: Iterable[HeaderTensor],
    metadata: Mapping[str, str],
    *,
    fields: Mapping[str, object],
    label: str = "",
    hashed: Mapping[str, Hashing] = NOT_HASHED,
) -> FileLayout:
    """Lay out one file; `fields` go into its record, beside the checksums. The tensors of the names `hashed` are hashed, too.

    The label of a data segment is the tensor's name, behind `label`: what keeps the pieces of one tensor in several files apart.

        length │ {"__metadata__":{…,"holdfast":"…,crc32: │ 8 digits a tensor, self: 8 digits │ "},"w":{"dtype":…},…}␠␠␠ │ tensors
        ───────┴──────── Literal ────────────────────────┴───────────── Late ───────────────┴──────── Literal ─────────┴─ Data …

    The order of the tensors is that of the safetensors library: by dtype, the widest first, then by name; so every tensor begins
    at a multiple of its element size, and the data begins at a multiple of 64 bytes.
    """
    ordered = sorted(pieces, key=lambda piece: (RANK[piece.code], piece.name))
    entries: dict[str, HeaderEntry] = {}
    position = 0
    for piece in ordered:
        entries[piece.name] = HeaderEntry(piece.code, piece.shape, (position, position + piece.nbytes))
        position += piece.nbytes
    empty = [label + piece.name for piece in ordered if not piece.nbytes]
    listed = [msgspec.json.encode(entries)[1:-1]] if entries else []
    framed = frame(listed, [label + piece.name for piece in ordered], metadata, fields=fields, empty=empty)
    segments: list[Segment] = [*framed.segments]
    segments += [Data(piece.tensor, label + piece.name, hashed.get(piece.name, "")) for piece in ordered if piece.nbytes]
    start = PREFIX_NBYTES + framed.header_nbytes
    places = {name: (start + entry.data_offsets[0], start + entry.data_offsets[1]) for name, entry in entries.items()}
    return FileLayout(FilePlan(key, tuple(segments)), framed.header_nbytes, places)


class FileHead(Value, frozen=True):
    """What stands before the data of a file."""

    segments: tuple[Literal | Late, ...]
    header_nbytes: int


def frame(
    listed: Sequence[bytes],
    labels: Sequence[str],
    metadata: Mapping[str, str],
    *,
    fields: Mapping[str, object],
    empty: Collection[str],
) -> FileHead:
    """The header over tensors that follow each other in this order.

    `listed` is its part about them in pieces, from the first name to before the last brace; each piece is a segment. Those of the
    `labels` that are `empty` have no data, and 0 for a checksum.
    """
    crc = crc32(b"{")
    for piece in listed:
        crc = crc32(piece, crc)
    about = {"format": "pt"} | {k: v for k, v in metadata.items() if k != RECORD}
    record = RecordText(fields, f"{crc32(b'}', crc):08x}", about, tensors=len(labels))
    head = b'{"%s":%s,"%s":"' % (METADATA.encode(), msgspec.json.encode(about)[:-1], RECORD.encode()) + _escaped(record.opening)
    late = Late(len(_escaped(record.middle(b"0" * (CRC_DIGITS * len(labels))))), _Checksums(record, labels, frozenset(empty)))
    tail = _escaped(record.closing) + b'"}' + (b"," if labels else b"")
    length = len(head) + late.nbytes + len(tail) + sum(map(len, listed)) + 1
    end = b"}" + b" " * (-(PREFIX_NBYTES + length) % DATA_ALIGNMENT)
    length += len(end) - 1
    head = length.to_bytes(PREFIX_NBYTES, "little") + head
    behind = [b"".join((tail, *listed, end))] if len(listed) < 2 else [tail, *listed, end]
    return FileHead((Literal(head), late, *map(Literal, behind)), length)


class _Checksums(Value, frozen=True):
    """Makes the digits of all checksums, up to those of the record itself."""

    record: RecordText
    labels: Sequence[str]
    empty: frozenset[str]

    def __call__(self, crcs: Mapping[str, int]) -> bytes:
        known = {**crcs, **dict.fromkeys(self.empty, 0)} if self.empty else crcs
        return _escaped(self.record.middle(checksum_digits(known, self.labels).encode()))


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


HINT = "safetensors holds tensors only (keep_tree=True records it in __metadata__)"


def lay_out_safetensors(
    state: State,
    *,
    keep_tree: bool = False,
    max_shard_size: int | None = None,
    index: bool = False,
    stem: str = STEM,
    save: str = "",
) -> SavePlan:
    """The plan of a single file or, with `max_shard_size` (bytes of tensors in a file), of a directory.

    `index` asks for an index even where there is one file: other safetensors files in the directory are then no part of it. `stem`
    is what the names of its files begin with. `save` is the id of a save to an object store: the data has it in its names, and an
    index says which data counts, so that two saves never mix.

    Raises `CannotHold` with every problem.
    """
    sharing = find_sharing(state.tensors)
    problems = metadata_problems(state)
    pieces: list[HeaderTensor] = []
    paired: dict[str, str] = {}
    for name, tensor in sharing.written.items():
        piece = _piece(name, tensor)
        if isinstance(piece, str):
            problems.append(f"{name}: {piece}")
            continue
        pieces.append(piece)
        if tensor.dtype.name == PAIRS:
            paired[name] = PAIRS
    notes = sharing.notes()
    fields = sharing_fields(sharing) | ({"dtypes": paired} if paired else {})
    if not is_flat(state):
        beyond = [] if keep_tree else _not_tensors(state.tree)
        problems += beyond
        if not beyond:
            encoded = encode_tree(state.tree, state.paths)
            problems += encoded.problems
            notes += encoded.notes
            fields["tree"] = encoded.value
    if not problems:
        shards = [pieces] if max_shard_size is None else fill_shards(pieces, max_shard_size)
        if max_shard_size is None:
            plan = _plan_one(state, pieces, fields, notes=notes)
        elif len(shards) == 1 and not index and not save:
            plan = _plan_one(state, pieces, fields, notes=notes, key=f"{stem}.safetensors")
        else:
            plan = _plan_directory(state, shards, fields, notes=notes, stem=stem, save=save)
        if plan is not None:
            return plan
        problems.append(f"the header would be longer than {Limits().header_nbytes:,} bytes, the most that the format allows")
    raise CannotHold("safetensors cannot hold this state", list(dict.fromkeys(problems)))


def _plan_one(
    state: State, pieces: list[HeaderTensor], fields: Mapping[str, object], *, notes: list[str], key: str = ""
) -> SavePlan | None:
    """One file that says all of itself; with a key, in a directory."""
    laid = plan_file(key, pieces, state.metadata, fields=fields)
    if laid.header_nbytes > Limits().header_nbytes:
        return None
    notes = [*notes, *_order_notes(state, [laid], fields)]
    return SavePlan("safetensors-dir" if key else "safetensors", (laid.plan,), tuple(notes), directory=bool(key))


def _plan_directory(
    state: State, shards: list[list[HeaderTensor]], fields: Mapping[str, object], *, notes: list[str], stem: str, save: str
) -> SavePlan | None:
    key = f"{stem}.safetensors.index.json"
    start = f"{stem}-{save}" if save else stem
    laid = [
        plan_file(f"{start}-{i + 1:05}-of-{len(shards):05}.safetensors", shard, state.metadata, fields={"rest": key})
        for i, shard in enumerate(shards)
    ]
    if any(file.header_nbytes > Limits().header_nbytes for file in laid):
        return None
    weight_map = {name: file.plan.key for file in laid for name in file.places}
    total = sum(stop - start for file in laid for start, stop in file.places.values())
    index = index_file(key, weight_map, total, fields=fields)
    notes = [*notes, *_order_notes(state, laid, fields)]
    return SavePlan("safetensors-dir", tuple(file.plan for file in laid), tuple(notes), directory=True, index=(index,))


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
    metadata: dict[str, object] = {"total_size": total_nbytes} | ({} if files is None else {FILES: list(files)})
    if fields is not None:
        metadata[RECORD] = RecordText(fields, fingerprint(weight_map), {**metadata}).whole().decode("utf-8")
    document = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, ensure_ascii=False)
    return FilePlan(key, (Literal(document.encode("utf-8") + b"\n"),))


def _order_notes(state: State, files: list[FileLayout], fields: Mapping[str, object]) -> list[str]:
    """Tensors lie in the order that all writers of the format have, by dtype and name; only a recorded tree remembers another."""
    if "tree" in fields:
        return []
    aliases = fields.get("aliases", ())
    assert isinstance(aliases, Mapping | tuple)  # names that a reader puts last
    return file_order_notes([*(name for file in files for name in file.places), *aliases], list(state.tensors))


def file_order_notes(written: list[str], given: list[str]) -> list[str]:
    """What to say where names lie in another order than they were given in."""
    if written == given:
        return []
    return ["names are in the order of the file (by dtype, then by name), not in that of the state"]


def is_flat(state: State) -> bool:
    """Whether a state is a plain dict of plain tensors under their own names, of which nothing needs to be recorded."""
    tree = state.tree
    if tree is state.tensors:
        return True
    if type(tree) is not dict or len(tree) != len(state.tensors):
        return False
    for name, tensor in tree.items():
        if not isinstance(tensor, LazyTensor) or state.paths.get(name) != (name,):
            return False
        traits = tensor.traits
        if traits.requires_grad or traits.parameter or traits.buffer or traits.meta:
            return False
        if traits.subclass is not None or traits.state is not None or traits.blocks is not None:
            return False
    return True


def metadata_problems(state: State) -> list[str]:
    """What in the names and texts of a state no JSON document can have, and tensors that are too large written out."""
    problems = [
        f"metadata {key!r}: no Unicode text" for key, text in state.metadata.items() if not (is_unicode(key) and is_unicode(text))
    ]
    for name, tensor in state.tensors.items():
        problem = name_problem(name) or size_problem(tensor)
        if problem is not None:
            problems.append(f"{name}: {problem}")
    return problems


def _piece(name: str, tensor: LazyTensor) -> HeaderTensor | str:
    """A tensor as the format says it, or why it cannot."""
    dtype, shape = tensor.dtype, tensor.shape
    if dtype.name == PAIRS and shape:
        return HeaderTensor.of(tensor, name, "F4", (*shape[:-1], 2 * shape[-1]))
    if dtype.safetensors is None:
        return f"safetensors has no dtype {dtype}"
    if tensor.size * dtype.bits % 8:
        return f"{tensor.size:,} elements of {dtype} do not fill whole bytes"
    return HeaderTensor.of(tensor, name, dtype.safetensors, shape)


def _not_tensors(tree: object) -> list[str]:
    """Everything that is no tensor and no dict of them, without looking inside of what is listed."""
    problems: list[str] = []
    seen: set[int] = set()
    waiting: list[tuple[Path, object]] = [((), tree)]
    while waiting:
        path, value = waiting.pop()
        place = dotted(path) or "the state itself"
        match value:
            case LazyTensor():
                if value.traits.meta:
                    problems.append(f"{place}: a tensor without data, on the meta device; {HINT}")
            case Composite():
                pass
            case dict() if type(value) in (dict, OrderedDict) and all(type(key) is str for key in value):
                if id(value) not in seen:
                    seen.add(id(value))
                    waiting += [((*path, key), inside) for key, inside in reversed(value.items())]
            case dict() if type(value) in (dict, OrderedDict):
                problems.append(f"{place}: a dict with keys that are not text; {HINT}")
            case Opaque():
                problems.append(f"{place}: an object of class {value.module}.{value.name}; safetensors holds tensors only")
            case _:
                problems.append(f"{place}: {_kind(value)}; {HINT}")
    return problems


def _kind(value: object) -> str:
    """What a value is, with its article."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
