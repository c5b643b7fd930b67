"""The files that one rank writes of a sharded save, in each format, and the index that is written when all of them are there.

    native        data-00001-of-00004.safetensors …       holdfast.json, and a Hugging Face index where nothing is split
    safetensors   shard-00001-model-00001-of-00001.safetensors …     no index: torch's reader looks into every file;
                                                          in an object store model.safetensors.index.json, which publishes them
    dcp           __0_0.distcp …                          .metadata, and its checksum in .holdfast.json; also by one process

A safetensors file names a tensor once. The second box of a tensor on one rank therefore goes to a second file. A rank with much to
write and many threads spreads it over several files, written at once: the kernel has one thread at a time write to a file.

A format that ranks write names one of these classes in its entry (`Format.sharded_by`).
"""

from __future__ import annotations

import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec import field

from holdfast.core.arrays import shape_columns
from holdfast.core.limits import DEFAULTS
from holdfast.core.protocols import State
from holdfast.core.sharing import find_ties
from holdfast.core.strict_json import INVALID_UNICODE, is_unicode
from holdfast.core.table import Table
from holdfast.core.tensor import Traits
from holdfast.core.tree import get_inner_containers, walk
from holdfast.core.value import Value
from holdfast.engine.saves import FilePlan, Literal, SavePlan
from holdfast.engine.table import make_value_state
from holdfast.errors import CannotHold
from holdfast.formats.dcp.flatten import flatten, root_problems
from holdfast.formats.dcp.index import BESIDE, METADATA, checksum_file
from holdfast.formats.dcp.write import joined, lay_out_items
from holdfast.formats.dcp.write_index import dcp_index
from holdfast.formats.native.base import Reuse
from holdfast.formats.native.boxes import OWN, Boxes, data_name, lay_out_box_file
from holdfast.formats.native.manifest import (
    INDEX,
    FileBoxes,
    StoredBoxes,
    as_bytes,
    as_column,
    lay_out_index,
)
from holdfast.formats.native.schema import DataFile
from holdfast.formats.native.write import SHARD_NBYTES
from holdfast.formats.recorded import order_fields
from holdfast.formats.safetensors.schema import METADATA as RESERVED
from holdfast.formats.safetensors.write import (
    fill_shards,
    find_name_problem,
    plan_index_file,
)
from holdfast.formats.torch.write import lay_out_torch_zip, unkept_texts

if TYPE_CHECKING:
    from holdfast.ranks.plan import RankWrites


NOTHING = Reuse()


class RankOutput(Value, frozen=True):
    rank: int
    size: int
    boxes: Boxes
    metadata: Mapping[str, str]
    values: Mapping[str, bytes] = field(default_factory=dict)
    """DCP: the archives of values that are no tensors, by flat names."""
    is_hashed: bool = False
    """Whether hashes of the boxes are recorded, in a native directory."""
    reuse: Reuse = NOTHING
    """The boxes that are taken over from a base, and not laid out."""


class RankFile(Value, frozen=True):
    plan: FilePlan
    stored: Callable[[Mapping[str, int]], StoredBoxes]
    """Maps the checksums of its data to the places of its boxes."""
    values: Sequence[tuple[str, int, int]] = ()
    """DCP: the values that are no tensors, each with its first byte and the byte after its last."""


class Receipt(msgspec.Struct):
    """A file that a rank has written and synced, or taken over from the base."""

    key: str
    nbytes: int
    stored: StoredBoxes
    """Its boxes, by their positions among the boxes of the rank."""
    values: list[tuple[str, int, int]] = field(default_factory=list)
    linked: bool = False
    """Whether it is a file of the base, under a second name."""


class Contents(Value, frozen=True, eq=False):
    """The contents of the whole checkpoint, for the rank that writes the index."""

    names: Sequence[str]
    """The names of tensors. `dtypes` and `shapes` have the same order, and are those of whole tensors."""
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    aliases: Mapping[str, str]
    """Other names of tensors, each with the name under which the tensor is stored."""
    values: Collection[str]
    """DCP: the names of what is not a tensor."""
    paths: Mapping[str, tuple[str | int, ...]]
    """DCP: the path of each name in the state."""
    grads: Collection[str]
    """The names of the tensors that require gradients."""
    tree: object | None = None
    """The state as typed JSON, where it is more than a flat dict of tensors."""
    metadata: Mapping[str, str] = field(default_factory=dict)


Delivered = Sequence[tuple["RankWrites", Sequence[Receipt]]]
"""For each rank the boxes that it was to write, and receipts of the files that it has written."""


RowsByFile = Sequence[Sequence[int]]
"""For each file the rows of its boxes."""


def spread(part: RankOutput, file_count: int) -> RowsByFile:
    """Return the boxes of a rank, without those that it takes over, divided among about so many files."""
    reuse, table = part.reuse, part.boxes.table
    groups: list[Sequence[int]] = [range(len(table.names))]
    if reuse.chunks or reuse.moved:
        new_rows = [row for row in groups[0] if row not in reuse.chunks]
        # As in one process: what only moved is not mixed with what changes.
        moved_rows = [row for row in new_rows if row in reuse.moved]
        changed_rows = [row for row in new_rows if row not in reuse.moved]
        groups = [rows for rows in (moved_rows, changed_rows) if rows]
    if file_count == 1:
        return groups

    rows_by_file: list[Sequence[int]] = []
    for rows in groups:
        nbytes = table.row_nbytes(rows)
        middles = nbytes.cumsum() - nbytes + nbytes // 2
        files = np.minimum(middles * file_count // max(int(nbytes.sum()), 1), file_count - 1)
        cuts = np.flatnonzero(np.diff(files)) + 1
        edges = [0, *cuts.tolist(), len(rows)]
        rows_by_file += [rows[start:stop] for start, stop in pairwise(edges)]
    return rows_by_file


class Sharded:
    """How ranks write a format: each rank its files, and the first rank the index after all files."""

    def files(self, part: RankOutput, rows_by_file: RowsByFile, save: str = "") -> list[RankFile]:
        """Lay out the files of one rank. In an object store their names carry the id of the save."""
        raise NotImplementedError

    def index(
        self, contents: Contents, delivered: Delivered, *, path: str, save: str = ""
    ) -> list[FilePlan]:
        """The files that are written last and make the others a checkpoint, which is saved under a path. In an object store
        (`save`) that is one file."""
        raise NotImplementedError

    def unkept(self, state: State) -> Iterable[str]:
        """Sentences about parts of a state that a load does not give back unchanged."""
        return ()


class NativeShards(Sharded):
    """Data files and a manifest that has the whole state."""

    def files(self, part: RankOutput, rows_by_file: RowsByFile, save: str = "") -> list[RankFile]:
        rounds = _separate_names(part.boxes.table, rows_by_file)
        if part.reuse.taken and not save:
            names = part.reuse.names_of_rank(part.rank, part.size)
            keys = [next(names) for _ in rounds]
        else:
            stem = data_name(part.rank, part.size, save).removesuffix(".safetensors")
            marks = ["", *(f"-{number:05}" for number in range(2, len(rounds) + 1))]
            keys = [f"{stem}{mark}.safetensors" for mark in marks[: len(rounds)]]
        return _lay_out_files(part, keys, rounds, strict=False)

    def index(
        self, contents: Contents, delivered: Delivered, *, path: str, save: str = ""
    ) -> list[FilePlan]:
        fields: dict[str, object] = {}
        if contents.aliases:
            fields["aliases"] = dict(contents.aliases)
        if contents.tree is not None:
            fields["tree"] = contents.tree
        else:
            fields |= order_fields(contents.names, contents.aliases)
        receipts, parts = _of_files(delivered)
        listed = [DataFile(receipt.key, receipt.nbytes) for receipt in receipts]
        every = list(zip(contents.dtypes, contents.shapes, strict=True))
        kinds = {pair: number for number, pair in enumerate(dict.fromkeys(every))}
        outlines = contents.names, [*kinds], [kinds[pair] for pair in every]
        return list(
            lay_out_index(
                listed, outlines, parts, fields=fields, metadata=contents.metadata, alone=bool(save)
            )
        )


class SafetensorsShards(Sharded):
    """Files of pieces, each of which says where it lies, for torch's reader."""

    def files(self, part: RankOutput, rows_by_file: RowsByFile, save: str = "") -> list[RankFile]:
        rounds = _separate_names(part.boxes.table, rows_by_file)
        stem = f"shard-{part.rank + 1:05}-model-{save + '-' if save else ''}"
        numbers = range(1, len(rounds) + 1)
        keys = [f"{stem}{number:05}-of-{len(rounds):05}.safetensors" for number in numbers]
        return _lay_out_files(part, keys, rounds, strict=True)

    def index(
        self, contents: Contents, delivered: Delivered, *, path: str, save: str = ""
    ) -> list[FilePlan]:
        """An index only in an object store: the file of each tensor or of its first piece, and a list of all files."""
        if not contents.names:
            # No rank writes a file, and an empty folder is not a checkpoint.
            raise CannotHold("safetensors files cannot hold this state", ["it has no tensors"])
        if not save:
            return []
        first: dict[str, str] = {}
        total = 0
        for writes, receipts in delivered:
            for receipt in receipts:
                boxes, starts, stops = (
                    as_column(c)
                    for c in (receipt.stored.boxes, receipt.stored.starts, receipt.stored.stops)
                )
                total += int((stops - starts).sum())
                for tensor in writes.tensors[np.sort(boxes)].tolist():
                    first.setdefault(contents.names[tensor], receipt.key)
        return [
            plan_index_file(
                INDEX,
                first,
                total,
                files=[receipt.key for _, receipts in delivered for receipt in receipts],
            )
        ]

    def unkept(self, state: State) -> Iterable[str]:
        table = state.tensors
        wanted = _marked(table, lambda traits: traits.requires_grad or traits.parameter)
        yield from _listed(
            wanted,
            "safetensors files of ranks do not say that {} is a Parameter or requires a gradient",
        )
        if not wanted and not state.leaves.is_flat:
            yield "safetensors files of ranks keep dotted names, and not the containers around them"


class DcpShards(Sharded):
    """Items, one behind the other, and torch's index of them."""

    def files(self, part: RankOutput, rows_by_file: RowsByFile, save: str = "") -> list[RankFile]:
        mark = f"-{save}" if save else ""
        given = [
            (f"__{part.rank}_{i}{mark}.distcp", rows, {} if i else part.values)
            for i, rows in enumerate(rows_by_file)
        ]
        return [
            _dcp_file(key, part.boxes, rows, values)
            for key, rows, values in given
            if rows or values
        ]

    def index(
        self, contents: Contents, delivered: Delivered, *, path: str, save: str = ""
    ) -> list[FilePlan]:
        save_id = str(uuid.uuid4())
        metadata = dcp_index(contents, *_of_files(delivered), path=path, save_id=save_id)
        return index_files(metadata, save)

    def unkept(self, state: State) -> Iterable[str]:
        wanted = _marked(state.tensors, lambda traits: traits.parameter)
        yield from _listed(wanted, "a DCP directory does not say that {} is a Parameter")
        dicts = [
            value for _, value in walk(state.tree, get_inner_containers) if isinstance(value, dict)
        ]
        keys = [
            str(key)[:60]
            for one in dicts
            if {*map(type, one)} - {str}
            for key in one
            if type(key) is not str
        ]
        yield from _listed(keys, "a DCP directory has text as keys: {} becomes text")
        attributes = dict.fromkeys(
            name for one in dicts if isinstance(one, OrderedDict) for name in vars(one)
        )
        yield from _listed(
            [*attributes], "a DCP directory does not keep the attributes of an OrderedDict: {}"
        )


def common_problems(table: Table, paths: Iterable[str]) -> list[str]:
    """List the problems that no message between ranks, or no format, could hold.

    Args:
        table: The tensors of the state.
        paths: The names of everything in the state, where it was flattened.
    """
    problems: list[str] = []
    most = DEFAULTS.rank
    wrong = {
        number: kind
        for number, kind in enumerate(table.kinds)
        if kind.traits.meta or len(kind.shape) > most
    }
    for name, number in zip(table.names, table.kind_indices, strict=True) if wrong else ():
        if number not in wrong:
            continue
        kind = wrong[number]
        if kind.traits.meta:
            problems.append(f"{name}: it is on the meta device, without data")
        if len(kind.shape) > most:
            problems.append(
                f"{name}: {len(kind.shape)} dimensions are more than Limits(rank={most})"
            )
    names = [*table.names, *paths]
    if not is_unicode("".join(names)):
        problems += [
            f"{name}: {INVALID_UNICODE}" for name in dict.fromkeys(names) if not is_unicode(name)
        ]
    return problems


def lay_out_dcp(state: State, *, max_shard_size: int | None = None, save: str = "") -> SavePlan:
    """The plan of a DCP directory that one process saves, as a rank that is alone, and without torch.

    Tensors are whole; those that share memory are stored once. Values are archives as `torch.save` makes them. Raises `CannotHold`
    with every problem: values that have no form in an archive, tensors that torch has no dtype for.
    """
    flat, every = flatten(state), DcpShards()
    table = flat.kept(state.tensors)
    names, kinds = table.names, [table.kinds[number] for number in table.kind_indices]
    problems = [*root_problems(state), *flat.problems, *common_problems(table, flat.paths)]
    lacking = (
        (name, kind.dtype)
        for name, kind in zip(names, kinds, strict=True)
        if kind.dtype.torch is None
    )
    problems += [f"{name}: torch has no dtype for {dtype}" for name, dtype in lacking]
    described = {name: value.described for name, value in flat.values.items()}
    try:
        lay_out_torch_zip(
            make_value_state(described)
        )  # says what is wrong by the paths of all of them
    except CannotHold as error:
        problems += error.problems
    if problems:
        raise CannotHold("a DCP directory cannot hold this state", list(dict.fromkeys(problems)))
    values = {
        name: joined(lay_out_torch_zip(make_value_state(value)).files[0].segments)
        for name, value in described.items()
    }
    ties = {row: first for row, first in find_ties(table).items() if kinds[row].nbytes}
    rows = [row for row in range(len(table)) if row not in ties]
    extents = shape_columns([kind.shape for kind in kinds])
    boxes = Boxes(table, np.zeros_like(extents), table.kind_indices)
    rows_by_file = [
        rows[some.start : some.stop]
        for some in fill_shards(table.row_nbytes(rows), max_shard_size or SHARD_NBYTES)
    ]
    files = every.files(RankOutput(0, 1, boxes, {}, values), rows_by_file, save)
    receipts = [
        Receipt(file.plan.key, file.plan.nbytes, file.stored({}), [*file.values]) for file in files
    ]
    parts = [
        FileBoxes(one.stored, np.arange(len(table)), boxes.starts, extents, 0) for one in receipts
    ]
    aliases = {names[row]: names[first] for row, first in ties.items()}
    grads = {name for name, kind in zip(names, kinds, strict=True) if kind.traits.requires_grad}
    contents = Contents(
        names,
        [kind.dtype.name for kind in kinds],
        [kind.shape for kind in kinds],
        aliases,
        values,
        flat.paths,
        grads,
    )
    # Neither a place nor a new number is in it: the same state gives the same bytes.
    known = str(
        uuid.uuid5(
            uuid.NAMESPACE_OID, repr((save, [(one.key, one.nbytes) for one in receipts], names))
        )
    )
    index = index_files(dcp_index(contents, receipts, parts, path=None, save_id=known), save)
    notes = (*every.unkept(state), *unkept_texts(state.metadata, "a DCP directory"))
    return SavePlan(
        "dcp",
        tuple(file.plan for file in files),
        notes,
        directory=True,
        index=tuple(index),
        expected_table=table,
    )


def index_files(metadata: bytes, save: str = "") -> list[FilePlan]:
    """The files that make data files a DCP directory: its index, and beside it, but in an object store, the checksum of that."""
    beside = [] if save else [FilePlan(BESIDE, (Literal(checksum_file(metadata)),))]
    return [*beside, FilePlan(METADATA, (Literal(metadata),))]


def _of_files(delivered: Delivered) -> tuple[list[Receipt], list[FileBoxes]]:
    """Every file of every rank, and the boxes in it."""
    every = [(writes, receipt) for writes, receipts in delivered for receipt in receipts]
    parts = [
        FileBoxes(
            receipt.stored,
            writes.tensors,
            writes.offsets,
            writes.sizes,
            sum(map(len, receipt.stored.tails)),
        )
        for writes, receipt in every
    ]
    return [receipt for _, receipt in every], parts


def _lay_out_files(
    part: RankOutput, keys: Sequence[str], rounds: Sequence[Sequence[int]], *, strict: bool
) -> list[RankFile]:
    """Lay out safetensors files with these names and rows. A `strict` file has no dtype of our own."""
    boxes, files = part.boxes, list[RankFile]()
    for key, rows in zip(keys, rounds, strict=True):
        _check_names(boxes.table, rows, strict=strict)
        texts = dict(part.metadata)
        if strict or boxes.has_parts(rows):
            texts |= boxes.sharding_texts(rows)
        file = lay_out_box_file(
            key,
            boxes,
            rows,
            texts,
            hashed=part.is_hashed,
            changed=part.reuse.changed,
            fields={} if strict else OWN,
        )
        files.append(RankFile(file.layout.plan, file.stored))
    return files


def _separate_names(table: Table, rows_by_file: RowsByFile) -> list[Sequence[int]]:
    """Deal the rows of each share to files in which each name occurs once."""
    files: list[Sequence[int]] = []
    for rows in rows_by_file:
        if len({table.names[row] for row in rows}) == len(rows):
            files += [rows] if rows else []
            continue
        rounds: list[list[int]] = []
        name_counts: Counter[str] = Counter()
        for row in rows:
            turn = name_counts[table.names[row]]
            name_counts[table.names[row]] += 1
            if turn == len(rounds):
                rounds.append([])
            rounds[turn].append(row)
        files += rounds
    return files


def _check_names(table: Table, rows: Sequence[int], *, strict: bool) -> None:
    names, problems = [table.names[row] for row in rows], list[str]()
    if RESERVED in names or not is_unicode("".join(names)):
        problems += [f"{name}: {problem}" for name in names if (problem := find_name_problem(name))]
    lacking = (
        {k: kind.dtype for k, kind in enumerate(table.kinds) if not kind.dtype.safetensors}
        if strict
        else {}
    )
    if lacking:
        held = ((table.names[row], lacking.get(table.kind_indices[row])) for row in rows)
        problems += [
            f"{name}: safetensors has no dtype for {dtype}"
            for name, dtype in held
            if dtype is not None
        ]
    if problems:
        raise CannotHold("safetensors files cannot hold this state", problems)


def _dcp_file(key: str, boxes: Boxes, rows: Sequence[int], values: Mapping[str, bytes]) -> RankFile:
    plan, items = lay_out_items(key, [*values.values()], boxes.table, rows)
    stops = items.cumsum()
    starts = stops - items
    of_values = [(name, int(starts[at]), int(stops[at])) for at, name in enumerate(values)]
    stored = StoredBoxes(
        as_bytes(rows), as_bytes(starts[len(values) :]), as_bytes(stops[len(values) :])
    )
    return RankFile(plan, lambda crcs: stored, of_values)


SHOWN = 3


def _marked(table: Table, wanted: Callable[[Traits], bool]) -> list[str]:
    kinds = {number for number, kind in enumerate(table.kinds) if wanted(kind.traits)}
    return (
        [name for name, kind in zip(table.names, table.kind_indices, strict=True) if kind in kinds]
        if kinds
        else []
    )


def _listed(names: Sequence[str], text: str) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return [text.format(", ".join(map(repr, names[:SHOWN])) + more)]
