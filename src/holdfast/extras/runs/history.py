"""`history`: a run over time, as the page shows it: its steps, their sizes, why each is kept, and their metrics.

A directory is a run where steps are in it and it is no checkpoint itself; a bucket, where its prefix is. The norm of a step is the
one that its metrics name; with statistics it is that of all its tensors, read. Nothing is locked and nothing is changed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from holdfast.core.opaque import AnyValue
from holdfast.core.text import (
    clip,
    escape,
    format_iso_time,
    format_nbytes,
    pluralize,
    round_significant,
)
from holdfast.extras.runs.directory import place_for
from holdfast.extras.runs.record import RECORD
from holdfast.extras.runs.steps import Step
from holdfast.extras.runs.table import RunRow, RunTable, look
from holdfast.stores.paths import place_of
from holdfast.stores.place import place_at

STEPS = 5000

Document = dict[str, AnyValue]

Norm = Callable[[Step], float | None]


def is_run(path: object) -> bool:
    """Whether there is the record of a run at a path. What has none may be a checkpoint, or a run without a record."""
    if not isinstance(path, str | os.PathLike):
        return False
    place = place_at(place_of(path))
    return place.on_disk and os.path.isfile(place.below(RECORD.file))


def run_at(path: object) -> RunTable | None:
    if not isinstance(path, str | os.PathLike):
        return None
    where = place_of(path)
    if place_at(where).on_disk and not os.path.isdir(where):
        return None
    place = place_for(where)
    record = place.read_record(RECORD)
    rules = () if record is None else record.rules
    table = look(place, rules, str(where), recorded=record is not None)
    return table if table.rows or table.recorded else None


def history(table: RunTable, norm: Norm | None = None) -> Document:
    """The steps, the newest last. `norm` is called for those whose metrics have none."""
    rows = table.rows[-STEPS:]
    steps = [row.step for row in table.rows if row.step is not None]
    loss, scale = (_metric(steps, word) for word in ("loss", "norm"))
    return {
        "steps": [_step(row, table, loss=loss, scale=scale, norm=norm) for row in rows],
        "summary": sentence(table),
        "keep": [str(rule) for rule in table.rules],
    }


def _metric(steps: Sequence[Step], word: str) -> str | None:
    """The metric that most steps have whose name has a word in it; of several the shortest: `loss` before `val_loss`."""
    counts = Counter(name for step in steps for name in step.metrics if word in name.lower())
    return min(counts, key=lambda name: (-counts[name], len(name), name), default=None)


def _step(
    row: RunRow, table: RunTable, *, loss: str | None, scale: str | None, norm: Norm | None
) -> Document:
    step, fate, rules = row.step, row.fate, bool(table.rules)
    metrics: Mapping[str, float] = {} if step is None else step.metrics
    size = metrics.get(scale) if scale is not None else None
    if size is None and step is not None and norm is not None:
        size = norm(step)
    return {
        "step": -1 if row.found.step is None else row.found.step,
        "name": clip(row.found.name),
        "time": None if step is None else format_iso_time(step.saved),
        "nbytes": 0 if step is None else step.nbytes,
        "shared": row.shared_nbytes,
        "kept": step is not None and (fate is None or not rules or not fate.goes),
        "pinned": fate is not None and any(why.startswith("pinned") for why in fate.others),
        "why": clip(
            row.found.why
            if step is None
            else fate.why
            if fate is not None and rules
            else f"no rules: {table.without_rules}",
            300,
        ),
        "norm": round_significant(size, 6),
        "loss": round_significant(metrics.get(loss) if loss is not None else None, 6),
        "metrics": {
            clip(name, 80): round_significant(value, 6)
            for name, value in list(metrics.items())[:20]
        },
        "state": "torn" if step is None else "whole",
    }


def facts(table: RunTable) -> list[list[str]]:
    whole = [row for row in table.rows if row.step is not None]
    shared = sum(row.shared_nbytes for row in whole)
    return [
        ["steps", f"{len(whole):,}"],
        ["not whole", f"{len(table.rows) - len(whole):,}"],
        ["bytes on disk", format_nbytes(table.total_nbytes)],
        ["shared between steps", format_nbytes(shared) if shared else "none"],
        ["rules", ", ".join(map(str, table.rules)) or f"no rules: {table.without_rules}"],
        ["writer", str(table.writer) if table.writer is not None else "none"],
    ]


def sentence(table: RunTable) -> str:
    whole = [row.step for row in table.rows if row.step is not None]
    torn = len(table.rows) - len(whole)
    name = escape(clip(table.path.rstrip("/").rpartition("/")[2] or table.path, 120))
    newest = f", the newest is {whole[-1].step}" if whole else ""
    broken = (
        f"; {pluralize(torn, 'step')} not whole"
        if torn
        else "; all of them are whole"
        if whole
        else ""
    )
    return f"{name} is a run of {pluralize(len(whole), 'step')}{newest}, {format_nbytes(table.total_nbytes)} on disk{broken}."
