"""A checkpoint through a map: another table over the same files. A tensor of it is made of chunks of theirs; nothing is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Chunk
from holdfast.core.protocols import Description
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import pluralize
from holdfast.core.value import Value
from holdfast.extras.maps.bind import Bound, MappedTensor
from holdfast.extras.maps.pieces import Meeting


class MappedTensors:
    """Makes the tensors of a bound map."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._meetings: dict[tuple[int, int], list[Meeting]] = {}

    def meetings(self, target: MappedTensor) -> list[Meeting]:
        """How the part of a target meets each part of its source."""
        key = id(target.found), target.part
        if key not in self._meetings:
            array, bound = target.found.array, self._bound
            here = bound.placed(array, bound.target.name)[target.part]
            assert here is not None  # it was proved
            first = {axis: bound.places(array, axis).start for axis in array.ranges}
            self._meetings[key] = [
                Meeting(here, one, first)
                for one in bound.placed(array, bound.source.name)
                if one is not None
            ]
        return self._meetings[key]

    def source_row(self, target: MappedTensor) -> int | None:
        """The row that a target is, under another name; None where it is made of parts."""
        found = [(part, one) for part, one in enumerate(self.meetings(target)) if not one.empty]
        if len(found) != 1 or not found[0][1].renames:
            return None
        part, meeting = found[0]
        return target.found.rows.get(
            (part, meeting.source_places(next(meeting.steps(target.places))))
        )

    def sources(self, target: MappedTensor) -> list[int]:
        """The rows that a target is made of, in the order of the checkpoint."""
        rows = set[int]()
        for part, meeting in enumerate(self.meetings(target)):
            rows |= {
                target.found.rows[part, meeting.source_places(at)]
                for at in meeting.steps(target.places)
            }
        return sorted(rows)

    def tensor(self, target: MappedTensor, row: int) -> LazyTensor:
        """A target that is made of parts, of which one is in this row."""
        first = self._bound.table.lazy_tensor(row)
        met = [(part, one) for part, one in enumerate(self.meetings(target)) if not one.empty]
        chunks = MappedChunks(target.places, target.found.rows, tuple(met), self._bound.table)
        return LazyTensor(target.name, first.dtype, target.shape, chunks, first.source)


class MappedChunks(Value, eq=False):
    """The chunks of a target, made when somebody asks for them: of a stacked tensor there may be thousands."""

    places: Mapping[str, int]
    rows: Mapping[tuple[int, tuple[int, ...]], int]
    meetings: tuple[tuple[int, Meeting], ...]
    table: Table

    def build(self, start: Sequence[int] = (), stop: Sequence[int] = ()) -> tuple[Chunk, ...]:
        found = [
            chunk
            for part, meeting in self.meetings
            for at in meeting.steps(self.places, start, stop)
            for chunk in meeting.placed(
                at, self.table.lazy_tensor(self.rows[part, meeting.source_places(at)])
            )
        ]
        return tuple(sorted(found, key=lambda chunk: chunk.box.start))


def mapped_table(bound: Bound) -> Table:
    """The table of the target layout."""
    table, made = bound.table, MappedTensors(bound)
    names = [*table.names]
    entries: dict[int, dict[str, LazyTensor]] = {}
    renamed: dict[int, str] = {}
    for target in bound.targets:
        row = made.source_row(target)
        if row is not None and row not in renamed:
            renamed[row] = target.name
            continue
        rows = (
            made.sources(target) or sorted(target.found.rows.values())[:1]
        )  # without elements it is of any
        dtypes = {table.row_kind(source).dtype.name: table.names[source] for source in rows}
        if len(dtypes) > 1:
            said = " and ".join(f"{dtype} ({name})" for dtype, name in [*dtypes.items()][:3])
            message = f"would be made of {said}: cast them to one dtype first"
            bound.problems.wrong[target.name] = message
        entries.setdefault(rows[0], {})[target.name] = made.tensor(target, rows[0])
    bound.problems.refuse(bound.what, "")
    for row, name in renamed.items():
        names[row] = name
        if row in entries:
            entries[row] = {name: table.lazy_tensor(row).renamed(name), **entries[row]}
    return table.select(range(len(table)), names).with_entries(
        sorted({*renamed, *entries}), entries
    )


def mapped(
    checkpoint: Checkpoint, bound: Bound, again: Callable[[Checkpoint], Checkpoint]
) -> Checkpoint:
    """The checkpoint as the target layout has it. `again` makes the same of one that was opened again."""
    table = mapped_table(bound)
    notes = [
        f"seen through the map {bound.what}: {pluralize(len(bound.targets), 'tensor')} of {bound.used:,}",
        *bound.left_out(),
    ]
    if not checkpoint.is_flat:
        notes.append("left out: values that are not tensors, because a map converts tensors only")
    decoded = sum(
        kind.traits.blocks is not None
        for kind in map(checkpoint.stored.row_kind, range(len(checkpoint.stored)))
    )
    if decoded:
        notes.append(f"the quantised blocks of {pluralize(decoded, 'tensor')} are decoded")
    description = Description(
        checkpoint.format, table, table, notes=(*checkpoint.notes_on_numbers, *notes), metadata=checkpoint.metadata,
        usual_format=bound.target.format, torch_dist=bound.target.torch_dist,
    )  # fmt: skip
    return checkpoint.with_description(description, again)
