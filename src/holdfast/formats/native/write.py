"""The writer of native directories: data files, the Hugging Face index, and the manifest, which comes last.

    holdfast.json                      every tensor with its boxes: file, bytes, checksum
    data-00001-of-00004.safetensors    what one process, or one rank of a mesh or a group, has written
    model.safetensors.index.json       where every tensor lies whole in one file

One process lays out everything at once (`lay_out_native`), also for a mesh (`lay_out_split`). In a group each rank lays out its own
files (`boxes.py`), and the first rank the manifest when all files exist (`manifest.py`).

Tensors that did not change since a base are taken over from it (`formats.native.base`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from holdfast.core.arrays import Ints, shape_columns
from holdfast.core.box import Box
from holdfast.core.protocols import State
from holdfast.core.table import Table
from holdfast.core.value import replace
from holdfast.engine.saves import SavePlan
from holdfast.errors import CannotHold
from holdfast.formats.native.base import Reuse
from holdfast.formats.native.boxes import Boxes, BoxFile, data_name, lay_out_box_file
from holdfast.formats.native.manifest import CANNOT, FileBoxes, StoredBoxes, lay_out_index
from holdfast.formats.native.schema import DataFile
from holdfast.formats.recorded import order_fields, share, sharing_fields
from holdfast.formats.safetensors.write import fill_shards, find_metadata_problems
from holdfast.formats.tree_json.encode import encode_state

SHARD_NBYTES = 5 << 30
"""The most bytes of tensors in a data file by default: few files, each small enough to be moved."""

TakeOver = Callable[[Table, Sequence[int]], Reuse]
"""Maps the rows of a table that would be written to the rows that a base has already."""


def lay_out_native(
    state: State,
    *,
    max_shard_size: int | None = None,
    hashed: bool = False,
    take_over: TakeOver | None = None,
    save: str = "",
) -> SavePlan:
    """The plan of a native directory, its data files with at most `max_shard_size` bytes of tensors.

    With `hashed`, every chunk has its hash in the manifest. Rows that `take_over` finds are not written: their files are linked.

    Raises `CannotHold` with every problem: Python objects that have no form in the manifest, names that are no Unicode.
    """
    table = state.tensors
    rows, fields, notes = _checked(state)
    reuse = take_over(table, rows) if take_over else Reuse()
    new = [row for row in rows if row not in reuse.chunks] if reuse.chunks else rows
    extents = shape_columns([kind.shape for kind in table.kinds])[:, table.kind_index_array]
    boxes = Boxes(table, np.broadcast_to(np.int64(0), extents.shape), table.kind_indices)
    # What only moved is expected to stay. It is not mixed with what changes, and has the lower numbers, which the next step keeps.
    moved = [row for row in new if row in reuse.moved] if reuse.moved else []
    every = [moved, [row for row in new if row not in reuse.moved]] if moved else [new]
    # A file is a group of rows: unchanged ones, or others.
    groups = [
        own[shard.start : shard.stop]
        for own in every
        if own
        for shard in fill_shards(table.row_nbytes(own), max_shard_size or SHARD_NBYTES)
    ]
    if not groups and not reuse.linked:
        groups = [()]
    count = len(groups)
    keys = [data_name(i, count, save) for i in range(count)] if save else reuse.names(count)
    files = [
        lay_out_box_file(key, boxes, group, {}, hashed=hashed, changed=reuse.changed)
        for key, group in zip(keys, groups, strict=True)
    ]
    columns = np.arange(len(table), dtype=np.int64), boxes.starts, extents
    there = [*zip(reuse.files, _taken_over(reuse, extents), strict=True)]
    plan = _directory(state, there, [(one, columns) for one in files], fields, save)
    return replace(plan, notes=(*notes, *reuse.notes), linked=reuse.linked)


def _taken_over(reuse: Reuse, extents: Ints) -> list[FileBoxes]:
    found = []
    for rows, chunks in reuse.by_file():
        starts, sizes = np.zeros((len(extents), len(rows)), np.int64), extents[:, rows]
        for at, chunk in enumerate(chunks):
            if chunk.start is not None and chunk.stop is not None:
                starts[: len(chunk.start), at], sizes[: len(chunk.start), at] = (
                    chunk.start,
                    np.subtract(chunk.stop, chunk.start),
                )
        stored = StoredBoxes.of(range(len(rows)), chunks)
        found.append(
            FileBoxes(stored, np.array(rows, np.int64), starts, sizes, sum(map(len, stored.tails)))
        )
    return found


def lay_out_split(state: State, parts: Sequence[Mapping[str, Box]], *, save: str = "") -> SavePlan:
    """The plan of a directory in which rank r of a mesh has the boxes `parts[r]`. All boxes of a tensor together tile it.

    Tensors that share memory are stored once, under their first name; boxes of their other names are left out.
    """
    table = state.tensors
    rows, fields, notes = _checked(state)
    written = {*rows}
    rank = max((len(kind.shape) for kind in table.kinds), default=0)
    files: list[tuple[BoxFile, Columns]] = []
    for number, given in enumerate(parts):
        own = {
            table.row_indices[name]: box
            for name, box in given.items()
            if table.row_indices[name] in written
        }
        starts, sizes = np.zeros((rank, len(own)), np.int64), np.ones((rank, len(own)), np.int64)
        for at, box in enumerate(own.values()):
            starts[: box.rank, at], sizes[: box.rank, at] = box.start, box.shape
        boxes, every = Boxes.cut(table, [*own], starts, sizes), range(len(own))
        key = data_name(number, len(parts), save)
        texts = boxes.sharding_texts(every)
        laid = lay_out_box_file(key, boxes, every, texts, label=f"{number} ")
        files.append((laid, (np.array([*own], np.int64), starts, sizes)))
    return replace(_directory(state, [], files, fields, save), notes=tuple(notes))


Columns = tuple[Ints, Ints, Ints]
"""For boxes: the row of each in a table of tensors, its lowest corner, its size."""


def _directory(
    state: State,
    there: Sequence[tuple[DataFile, FileBoxes]],
    files: Sequence[tuple[BoxFile, Columns]],
    fields: Mapping[str, object],
    save: str,
) -> SavePlan:
    """The plan of a directory of files that are `there`, and of new ones."""
    table = state.tensors
    outlines = (
        table.names,
        [(kind.dtype.name, kind.shape) for kind in table.kinds],
        table.kind_index_array,
    )
    plans = [file.layout.plan for file, _ in files]
    listed = [*(file for file, _ in there), *(DataFile(plan.key, plan.nbytes) for plan in plans)]
    taken_over = [part for _, part in there]
    written = [FileBoxes(file.places, *columns, file.tails_nbytes) for file, columns in files]

    def later(crcs: Mapping[str, int]) -> list[StoredBoxes]:
        stored = [file.stored(crcs) for file, _ in files]
        return [*(part.stored for part in taken_over), *stored]

    index = lay_out_index(
        listed,
        outlines,
        [*taken_over, *written],
        later=later,
        fields=fields,
        metadata=state.metadata,
        alone=bool(save),
    )
    return SavePlan(
        "native", tuple(plans), directory=True, index=index, expected_table=state.tensors
    )


def _checked(state: State) -> tuple[Sequence[int], Mapping[str, object], Sequence[str]]:
    """The rows of a state that are written, the fields of the manifest beside the tensors, and notes for the user.

    Raises `CannotHold` with everything that has no place in a native checkpoint.
    """
    table = state.tensors
    sharing, problems = share(table), find_metadata_problems(state, table)
    notes, fields = sharing.notes(), sharing_fields(sharing)
    if not state.leaves.is_flat:
        encoded = encode_state(state)
        problems += encoded.problems
        notes += encoded.notes
        fields["tree"] = encoded.value
    else:
        fields |= order_fields(table.names, sharing.aliases)
    if problems:
        raise CannotHold(CANNOT, list(dict.fromkeys(problems)))
    return sharing.rows, fields, notes
