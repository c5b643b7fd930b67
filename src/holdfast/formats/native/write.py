"""The writer of native directories: data files, the Hugging Face index, and the manifest, which comes last.

    holdfast.json                      every tensor with its boxes: file, bytes, checksum
    data-00001-of-00004.safetensors    what one process, or one rank of a mesh or a group, has written
    model.safetensors.index.json       where every tensor lies whole in one file

One process lays out all of it at once (`lay_out_native`), and so does a mesh (`lay_out_split`). Of a group each rank lays out its
own files (`boxes.py`), and the first one the manifest when all of them are there (`manifest.py`).

What did not change since another directory is taken over from there (`formats.native.base`), and only the rest is laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np

from holdfast.core.arrays import Ints, shape_columns
from holdfast.core.box import Box
from holdfast.core.protocols import State
from holdfast.core.table import Table
from holdfast.core.value import Value, replace
from holdfast.engine.saves import SavePlan
from holdfast.errors import CannotHold
from holdfast.formats.native.base import Reuse
from holdfast.formats.native.boxes import BoxEntries, Boxes, BoxFiles, HashAll, Pack, data_name
from holdfast.formats.native.manifest import CANNOT, FileBoxes, Outlines, StoredBoxes, lay_out_index
from holdfast.formats.native.schema import DataFile
from holdfast.formats.recorded import Shared, order_fields, share, sharing_fields
from holdfast.formats.safetensors.write import is_flat, metadata_problems
from holdfast.formats.tree_json.encode import encode_state

SHARD_NBYTES = 5 << 30
"""Bytes of tensors in a data file where the caller does not say: few files, each small enough to be moved about."""

TakeOver = Callable[[Table, Sequence[int]], Reuse]
"""From the rows of a table that would be written to those that are there already."""


def lay_out_native(
    state: State,
    *,
    max_shard_size: int | None = None,
    pack: Pack | None = None,
    hashes: HashAll | None = None,
    take_over: TakeOver | None = None,
    save: str = "",
) -> SavePlan:
    """The plan of a native directory, its data files with at most `max_shard_size` bytes of tensors.

    With `hashes`, every chunk has its hash in the manifest. What `take_over` finds is not written: its files are linked.

    Where tensors are stored packed there is no Hugging Face index: `transformers` could not read them.

    Raises `CannotHold` with every problem: Python objects that have no form in the manifest, names that are no Unicode.
    """
    table = state.tensors
    kept = what_is_kept(state, table)
    rows = kept.sharing.rows
    reuse = take_over(table, rows) if take_over else NOTHING
    names = table.names
    new = [row for row in rows if row not in reuse.chunks] if reuse.chunks else rows
    extents = shape_columns([kind.shape for kind in table.kinds])[:, table.kind_numbers]
    boxes = Boxes(table, np.broadcast_to(np.int64(0), extents.shape), table.kind)
    # What only moved is expected to stay. It is not mixed with what changes, and has the lower numbers, which the next step keeps.
    moved = [row for row in new if row in reuse.moved] if reuse.moved else []
    every = [moved, [row for row in new if row not in reuse.moved]] if moved else [new]
    taken = [names[row] for row in rows] if pack else []
    groups = [BoxEntries.of(boxes, own, pack=pack, hashes=hashes, changed=reuse.changed, names=taken) for own in every]
    shards = [group.shards(max_shard_size or SHARD_NBYTES) for group in groups]
    if not any(shards) and not reuse.linked:
        shards = [[()]]
    count = sum(map(len, shards))
    keys = iter([data_name(i, count, save) for i in range(count)] if save else reuse.names(count))
    files = [BoxFiles.of(group, {next(keys): some for some in own}, {}) for group, own in zip(groups, shards, strict=True)]
    columns = np.arange(len(table), dtype=np.int64), boxes.starts, extents
    there = [*zip(reuse.files, _taken_over(reuse, extents), strict=True)]
    plan = _directory(kept, table, there, [(one, columns) for one in files], state.metadata, save)
    return replace(plan, notes=(*plan.notes, *reuse.notes), linked=reuse.linked)


NOTHING = Reuse()


def _taken_over(reuse: Reuse, extents: Ints) -> list[FileBoxes]:
    """What lies in the files that are taken over."""
    found = []
    for rows, chunks in reuse.by_file():
        starts, sizes = np.zeros((len(extents), len(rows)), np.int64), extents[:, rows]
        for at, chunk in enumerate(chunks):
            if chunk.start is not None and chunk.stop is not None:
                starts[: len(chunk.start), at], sizes[: len(chunk.start), at] = chunk.start, np.subtract(chunk.stop, chunk.start)
        stored = StoredBoxes.of(range(len(rows)), chunks)
        found.append(FileBoxes(stored, np.array(rows, np.int64), starts, sizes, sum(map(len, stored.tails))))
    return found


def lay_out_split(state: State, parts: Sequence[Mapping[str, Box]], *, save: str = "") -> SavePlan:
    """The plan of a directory in which rank r of a mesh has the boxes `parts[r]`. All boxes of a tensor together tile it.

    Tensors that share memory are stored once, under the first of their names; boxes of the others are left out.
    """
    table = state.tensors
    kept = what_is_kept(state, table)
    written = {*kept.sharing.rows}
    rank = max((len(kind.shape) for kind in table.kinds), default=0)
    files: list[tuple[BoxFiles, Columns]] = []
    for number, given in enumerate(parts):
        own = {table.rows[name]: box for name, box in given.items() if table.rows[name] in written}
        starts, sizes = np.zeros((rank, len(own)), np.int64), np.ones((rank, len(own)), np.int64)
        for at, box in enumerate(own.values()):
            starts[: box.rank, at], sizes[: box.rank, at] = box.start, box.shape
        boxes, rows = Boxes.cut(table, [*own], starts, sizes), range(len(own))
        key = data_name(number, len(parts), save)
        laid = BoxFiles.of(BoxEntries.of(boxes, rows), {key: rows}, boxes.sharding_texts(rows), label=f"{number} ")
        files.append((laid, (np.array([*own], np.int64), starts, sizes)))
    return _directory(kept, table, [], files, state.metadata, save)


Columns = tuple[Ints, Ints, Ints]
"""Of boxes: the row of each in a table of tensors, its lowest corner, its size."""


def _directory(
    kept: Kept,
    table: Table,
    there: Sequence[tuple[DataFile, FileBoxes]],
    files: Sequence[tuple[BoxFiles, Columns]],
    metadata: Mapping[str, str],
    save: str,
) -> SavePlan:
    """The plan of a directory of files that are `there`, and of new ones."""
    outlines = Outlines(table.names, [(kind.dtype.name, kind.shape) for kind in table.kinds], table.kind_numbers)
    plans = [plan for one, _ in files for plan in one.plans]
    listed = [*(file for file, _ in there), *(DataFile(plan.key, plan.nbytes) for plan in plans)]
    parts = [part for _, part in there]
    blank = [one.blank() for one, _ in files]
    parts += [FileBoxes(stored, *files[at][1], nbytes) for at, own in enumerate(blank) for stored, nbytes in own]

    def later(crcs: Mapping[str, int]) -> list[StoredBoxes]:
        written = zip(files, blank, strict=True)
        found = [one.stored(crcs, [stored for stored, _ in own]) for (one, _), own in written]
        return [*(part.stored for _, part in there), *chain.from_iterable(found)]

    index = lay_out_index(listed, outlines, parts, later=later, fields=kept.fields, metadata=metadata, alone=bool(save))
    return SavePlan("native", tuple(plans), tuple(kept.notes), directory=True, index=index)


class Kept(Value, frozen=True):
    """What a native directory keeps of a state beside its elements."""

    sharing: Shared
    """What is written once."""
    fields: Mapping[str, object]
    """What the manifest says beside the tensors."""
    notes: Sequence[str]
    """What a person should know."""


def what_is_kept(state: State, table: Table) -> Kept:
    """Raises `CannotHold` with everything that has no place in a native checkpoint."""
    sharing = share(table)
    problems = metadata_problems(state, table)
    notes = sharing.notes()
    fields = sharing_fields(sharing)
    if not is_flat(state):
        encoded = encode_state(state)
        problems += encoded.problems
        notes += encoded.notes
        fields["tree"] = encoded.value
    else:
        fields |= order_fields(table.names, sharing.aliases)
    if problems:
        raise CannotHold(CANNOT, list(dict.fromkeys(problems)))
    return Kept(sharing, fields, notes)
