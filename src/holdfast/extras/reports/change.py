"""`change`: two checkpoints beside each other, as columns of the document. `diff` compares them.

A row is a tensor of the first, or one that only the second has. What moved to another name stands under its new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from holdfast.core.group import ALONE, Ranks
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import clip, escape, format_count, pluralize, round_significant
from holdfast.core.value import Value, replace
from holdfast.engine.files import ViewTable
from holdfast.extras.reports.document import Document, short
from holdfast.extras.reports.measures import json_index
from holdfast.extras.reports.structure import Structure
from holdfast.numeric.compare import ContentDifference
from holdfast.verbs.diff import Comparison, Diff, TensorChange
from holdfast.verbs.side import Side

SAME, CHANGED, ADDED, REMOVED, MOVED, UNLIKE = range(6)
"""States of a tensor: the last is one of another shape, or one of which one side has no data."""

STATES = (
    "the same",
    "changed",
    "only in the second",
    "only in the first",
    "renamed",
    "not comparable",
)


def compare(
    a: Structure, b: Structure, *, threads: int | None = None, ranks: Ranks = ALONE
) -> tuple[Structure, Comparison]:
    """The first checkpoint with the tensors that only the second has behind its own, and the comparison, which is not read yet."""
    sides = [
        Side(
            one.checkpoint.path, one.checkpoint.format, ViewTable(one.tensors), {}, None, flat=True
        )
        for one in (a, b)
    ]
    union = {
        **a.tensors,
        **{name: tensor for name, tensor in b.tensors.items() if name not in a.tensors},
    }
    return replace(a, tensors=union), Comparison(sides[0], sides[1], threads=threads, ranks=ranks)


def rows_of(found: Structure, told: Diff) -> Structure:
    """The rows of the page: a renamed tensor is one row, and not two."""
    moved = {one.a for one in told.renamed}
    return replace(
        found, tensors={name: tensor for name, tensor in found.tensors.items() if name not in moved}
    )


class Counterparts(Value):
    """The tensors of the other side, for the rows of a page that both checkpoints have.

    A row stands for the tensor of the first checkpoint, or for that of the second if it was renamed.
    """

    rows: list[int]
    """The row of each tensor."""
    tensors: list[LazyTensor]
    is_different: list[bool]
    """Whether the numbers are not those of the row."""

    def by_row(self, row_count: int) -> list[LazyTensor | None]:
        """The tensor for each row; None for rows that only one checkpoint has."""
        tensors: list[LazyTensor | None] = [None] * row_count
        for row, tensor in zip(self.rows, self.tensors, strict=True):
            tensors[row] = tensor
        return tensors


def find_counterparts(
    a: Structure, b: Structure, states: Sequence[int], names: Iterable[str], told: Diff
) -> Counterparts:
    """Find the tensor of the other side for each row that both checkpoints have."""
    old_names = {one.b: one.a for one in told.renamed}
    found = Counterparts([], [], [])
    for row, (name, state) in enumerate(zip(names, states, strict=True)):
        if state in (ADDED, REMOVED):
            continue
        is_renamed = state == MOVED
        found.rows.append(row)
        found.tensors.append(a.tensors[old_names[name]] if is_renamed else b.tensors[name])
        found.is_different.append(state in (CHANGED, UNLIKE))
    return found


def columns(found: Structure, told: Diff) -> tuple[Document, list[Document]]:
    """The state of each row, and the columns that can colour the page."""
    changes = {one.name: one for one in told.changed}
    moved = {one.b: one.a for one in told.renamed}
    fates = {
        **dict.fromkeys(told.removed, REMOVED),
        **dict.fromkeys(told.added, ADDED),
        **dict.fromkeys(moved, MOVED),
    }
    states: list[int] = []
    contents: list[ContentDifference | None] = []
    for name in found.tensors:
        change = changes.get(name)
        content = None if change is None else change.content
        contents.append(content)
        if content is not None:
            states.append(CHANGED if content.changed else SAME)
        else:
            states.append(fates.get(name, SAME) if change is None else UNLIKE)
    more: Document = {
        "state": states,
        "was": {
            "at": [at for at, name in enumerate(found.tensors) if name in moved],
            "names": [short(moved[name]) for name in found.tensors if name in moved],
        },
        "appeared": _appeared(found, changes),
    }
    return more, [
        _measure(
            ("appeared", "NaN and Inf that appeared", "how many elements became NaN or infinite", "log"),
            states, contents, of=lambda content: float(content.appeared), same=0.0,
        ),
        _measure(
            ("change", "relative change",
             "the norm of the difference over that of the first, ‖Δ‖ / ‖w‖; none where NaN or Inf appeared or went", "log"),
            states, contents, of=lambda content: content.relative, same=0.0,
        ),
        _measure(
            ("cosine", "cosine", "of the angle between the two; 1 where only the size changed", "linear"),
            states, contents, of=lambda content: content.cosine, same=1.0,
        ),
        _measure(
            ("changed", "changed elements", "the share of elements that are not the same", "share"),
            states, contents, of=lambda content: content.changed / content.total if content.total else 0.0, same=0.0,
        ),
        {"key": "state", "label": "what became of it", "help": ", ".join(STATES), "scale": "category", "labels": list(STATES),
         "values": states},
    ]  # fmt: skip


def _appeared(found: Structure, changes: Mapping[str, TensorChange]) -> Document:
    """The rows in which NaN or infinities appeared, and the index of the first of each."""
    rows: list[int] = []
    first_nans: list[list[int] | None] = []
    first_infinities: list[list[int] | None] = []
    for row, name in enumerate(found.tensors):
        change = changes.get(name)
        if change is not None and change.appeared:
            rows.append(row)
            first_nans.append(json_index(change.first_nan))
            first_infinities.append(json_index(change.first_infinity))
    return {"at": rows, "nan": first_nans, "inf": first_infinities}


def _measure(
    about: tuple[str, str, str, str],
    states: list[int],
    contents: list[ContentDifference | None],
    *,
    of: Callable[[ContentDifference], float | None],
    same: float,
) -> Document:
    key, label, text, scale = about
    values = [
        round_significant(of(content))
        if content is not None
        else same
        if state in (SAME, MOVED)
        else None
        for state, content in zip(states, contents, strict=True)
    ]
    return {"key": key, "label": label, "help": text, "scale": scale, "values": values}


def sentence(first: str, second: str, told: Diff) -> str:
    kinds = {
        "changed": told.changed,
        "added": told.added,
        "removed": told.removed,
        "renamed": told.renamed,
    }
    parts = [f"{len(things):,} {word}" for word, things in kinds.items() if things]
    names = f"{escape(clip(first, 120))} and {escape(clip(second, 120))}"
    if not parts:
        return f"{names} hold the same: {pluralize(told.same, 'tensor')}, not one of them changed."
    sick = f"{told.nonfinite_summary}; " if told.nonfinite else ""
    return f"{names} differ: {sick}{', '.join(parts)}, {pluralize(told.same, 'tensor')} the same."


def facts(told: Diff) -> list[list[str]]:
    elements = sum(one.content.changed for one in told.changed if one.content is not None)
    # The label of the fact is the beginning of the summary.
    label = "NaN or Inf appeared"
    sick = [[label, told.nonfinite_summary.removeprefix(f"{label} in ")]] if told.nonfinite else []
    return [
        *sick,
        ["changed", f"{len(told.changed):,} tensors, {format_count(elements)} elements"],
        ["added", f"{len(told.added):,}"],
        ["removed", f"{len(told.removed):,}"],
        ["renamed", f"{len(told.renamed):,}"],
        ["same", f"{told.same:,}"],
        ["not read", f"{told.same_by_checksum:,} by their checksums"],
    ]
