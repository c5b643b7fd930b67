"""`holdfast runs`: the steps of a run in a table; what its rules would delete and why, and doing it.

runs/llama  3 steps, 4.2 GiB  keep latest:2, best:val_loss:1
   step    age      size       new  shared  val_loss  kept by
   1000   3.1 h   1.4 GiB   1.4 GiB     0 B    2.3104  best:val_loss:1
   2000   61 min  1.4 GiB  14.1 MiB  1.4 GiB   2.4027  latest:2
   3000   2 min   …
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from holdfast.cli import values
from holdfast.cli.text import Line, fields_of, note_lines, print_json, print_lines, width
from holdfast.core.text import clip, escape, format_nbytes, list_names, pluralize

if TYPE_CHECKING:
    from holdfast.extras.runs.place import RunPlace
    from holdfast.extras.runs.retention import Deleted
    from holdfast.extras.runs.rules import Rule
    from holdfast.extras.runs.steps import Step
    from holdfast.extras.runs.sweep import Swept
    from holdfast.extras.runs.table import RunRow, RunTable

DESCRIPTION = """\
List the steps of a training run with their age, size and metrics, and the retention rules that
keep each step. If a step is incomplete, the list shows why.
A run is a folder or a bucket prefix (s3://, gs://, az://) that contains steps of holdfast.Run,
native directories, or sealed folders of other trainers.
With --prune, the command deletes the steps that no rule keeps. With --gc, it deletes orphaned data
in a bucket, left behind by interrupted saves."""

EXAMPLES = """\
rules:
  latest:3            the three newest steps
  every:10000         the steps that are multiples of 10000
  best:val_loss:2     the two steps with the lowest val_loss
  best:acc:1:max      the step with the highest acc
  within:24h          the steps of the last 24 hours of training

exit codes:
  0  done
  1  a step is incomplete (not with --plan or --prune)
  2  an error

examples:
  holdfast runs runs/llama

  # List the steps that the rules of the run would delete.
  holdfast runs runs/llama --plan

  # Delete these steps.
  holdfast runs runs/llama --prune

  # Try other rules.
  holdfast runs runs/llama --plan --keep latest:3 --keep every:10000

  # List data in a bucket that interrupted saves left behind.
  holdfast runs s3://bucket/llama --gc --dry-run
"""

METRICS = 4
"""Metrics that the table has columns for."""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="RUN", type=values.target, help="directory or URL of a run")
    verb.add_argument(
        "--keep",
        metavar="RULE",
        action="append",
        default=[],
        help="retention rule (default: the rules recorded in the run); repeatable",
    )
    do = verb.add_mutually_exclusive_group()
    do.add_argument(
        "--plan", action="store_true", help="list the steps that the rules would delete"
    )
    do.add_argument("--prune", action="store_true", help="delete the steps that no rule keeps")
    do.add_argument(
        "--gc",
        action="store_true",
        help="delete data in a bucket that interrupted saves left behind",
    )
    verb.add_argument(
        "--grace",
        metavar="TIME",
        help="with --gc: minimum age of the data to delete (default: 24h)",
    )
    verb.add_argument(
        "--dry-run", action="store_true", help="with --gc: list the data without deleting it"
    )
    verb.add_argument("--json", action="store_true", help=values.JSON_HELP)


def run(options: argparse.Namespace) -> int:
    from holdfast.errors import BadArgument, HoldfastError, NoSuchPath
    from holdfast.extras.runs.directory import place_for
    from holdfast.extras.runs.record import RECORD
    from holdfast.extras.runs.rules import read_rules
    from holdfast.extras.runs.table import look
    from holdfast.stores.paths import place_of

    if options.gc:
        return collect(options)
    if options.grace or options.dry_run:
        raise BadArgument(
            "--grace and --dry-run need --gc; --plan lists the steps that the rules would delete",
            found=options.grace,
        )
    path = place_of(options.path.rstrip("/") or "/")
    place = place_for(path)
    if not place.exists():
        raise NoSuchPath("there is no such directory", file=path)
    try:
        record = place.read_record(RECORD)
        rules, recorded = () if record is None else record.rules, record is not None
    except HoldfastError:
        if not options.keep:
            raise
        recorded = True  # The rules cannot be read, and are not needed.
    if options.keep:
        rules = read_rules(options.keep)
    if (options.plan or options.prune) and not rules:
        raise BadArgument(
            "no retention rules: the run recorded none; pass some, such as --keep latest:3",
            found=path,
        )
    done = prune(place, rules) if options.prune else None
    gone = done.steps if done is not None else ()
    table = look(place, rules, path, recorded=recorded)
    if options.json:
        print_json(document(table, gone))
    elif options.prune:
        print_lines(gone_lines(path, gone, done.notes if done is not None else ()))
    elif options.plan:
        print_lines(plan_lines(table))
    else:
        print_lines(lines(table))
    torn = any(row.step is None for row in table.rows)
    return 1 if torn and not options.plan and not options.prune else 0


def prune(place: RunPlace, rules: Collection[Rule]) -> Deleted:
    """Delete steps that the rules do not keep. Refused while a run has the directory open: it does that itself, after each save."""
    from holdfast.extras.runs.retention import retain

    lock = place.locked()
    try:
        return retain(place, rules)
    finally:
        lock.close()


def collect(options: argparse.Namespace) -> int:
    """Carry out `--gc`: delete what dead savers left in a bucket."""
    from holdfast.extras.runs.sweep import GRACE_S, sweep

    done = sweep(options.path, grace=options.grace or GRACE_S, dry_run=options.dry_run)
    if options.json:
        print_json(
            {
                "schema": 1,
                "deleted": list(done.keys),
                **fields_of(done, "path nbytes young notes done"),
            }
        )
    else:
        print_lines(swept_lines(done))
    return 0


def swept_lines(done: Swept) -> Iterator[Line]:
    yield from note_lines(done.notes)
    for key in done.keys:
        yield [
            ("deleted " if done.done else "would delete ", "error"),
            (escape(clip(key, 400)), "name"),
        ]
    objects = pluralize(len(done.keys), "object")
    deleted = "deleted" if done.done else "would be deleted"
    total = f"  {objects}, {format_nbytes(done.nbytes)} {deleted}"
    young = (
        f"; {pluralize(done.young, 'object')} without a manifest too new to delete"
        if done.young
        else ""
    )
    yield [(escape(clip(done.path, 400)), "title"), (total + young, "dim")]


def lines(table: RunTable) -> Iterator[Line]:
    """Print a table: a row for each step, or what is wrong with a folder that would be one."""
    yield from _head(table)
    steps = [row.step for row in table.rows if row.step is not None]
    counts = Counter(name for step in steps for name in step.metrics)
    # Those that most steps have.
    metrics = sorted(counts, key=lambda name: (-counts[name], name))[:METRICS]
    shares = any(row.shared_nbytes for row in table.rows)
    titles = [
        "step",
        "age",
        "size",
        *(["new", "shared"] if shares else []),
        *(escape(clip(name, 20)) for name in metrics),
    ]
    cells = [_cells(row, metrics, shares=shares, now=table.now) for row in table.rows if row.step]
    widths = [max(map(width, column)) for column in zip(titles, *cells, strict=True)]

    def align(texts: Sequence[str]) -> str:
        pairs = zip(texts, widths, strict=True)
        return "".join(f"  {' ' * (room - width(text))}{text}" for text, room in pairs)

    if table.rows:
        yield [(f"{align(titles)}  kept by", "dim")]
    whole = iter(cells)
    for row in table.rows:
        fate = row.fate
        if row.step is None:
            number = "-" if row.found.step is None else str(row.found.step)
            why = f"{escape(clip(row.found.name, 60))}: {escape(clip(row.found.why, 300))}"
            yield [
                (f"  {number:>{widths[0]}}", "name"),
                ("  incomplete", "error"),
                (f"  {why}", ""),
            ]
        elif fate is not None and fate.goes:
            yield [(align(next(whole)), ""), ("  would be deleted: no rule keeps it", "error")]
        else:
            kept_by = "" if fate is None else escape(clip(fate.why, 200))
            yield [(align(next(whole)), ""), (f"  {kept_by}", "dim")]


def _head(table: RunTable) -> Iterator[Line]:
    whole = sum(row.step is not None for row in table.rows)
    rules = ", ".join(map(str, table.rules))
    yield [
        (escape(clip(table.path, 400)), "title"),
        (f"  {pluralize(whole, 'step')}, {format_nbytes(table.total_nbytes)}", "size"),
        (
            f"  keep {escape(clip(rules, 300))}" if rules else f"  no rules: {table.without_rules}",
            "dim",
        ),
    ]
    if table.unsealed:
        names = list_names([escape(clip(name, 60)) for name in table.unsealed], 3)
        how = "run `holdfast seal PATH` to add each as a step, with `--step N` if its name and files contain no step number"
        yield [(f"  not listed, because they have no seal: {names}; {how}", "note")]
    if table.writer is not None:
        yield [(f"  open in another process: {escape(str(table.writer))}", "note")]


def _cells(row: RunRow, metrics: Sequence[str], *, shares: bool, now: float) -> list[str]:
    step = row.step
    assert step is not None  # The others have no cells.
    cells = [str(step.step), age(now - step.saved), format_nbytes(step.nbytes)]
    if shares:
        cells += [format_nbytes(row.new_nbytes), format_nbytes(row.shared_nbytes)]
    return cells + [f"{step.metrics[name]:.5g}" if name in step.metrics else "" for name in metrics]


def age(seconds: float) -> str:
    """How long ago.

    >>> age(5), age(300), age(7300), age(864000), age(-60)
    ('5 s', '5 min', '2.0 h', '10.0 d', 'in the future')
    """
    if seconds < -1:
        return "in the future"
    for unit, length, digits in (("s", 1, 0), ("min", 60, 0), ("h", 3600, 1)):
        if seconds < 120 * length or (unit == "h" and seconds < 48 * length):
            return f"{max(seconds, 0) / length:.{digits}f} {unit}"
    return f"{seconds / 86400:.1f} d"


def plan_lines(table: RunTable) -> Iterator[Line]:
    yield from _head(table)
    going = 0
    for row in table.rows:
        if row.fate is None or row.step is None:
            continue
        going += row.fate.goes
        yield [
            (
                f"  {'delete' if row.fate.goes else 'keep':<6}",
                "error" if row.fate.goes else "clean",
            ),
            (f"  step {row.step.step}", "name"),
            (f"  {format_nbytes(row.step.nbytes)}", "size"),
            (f"  {escape(clip(row.fate.why, 300))}", "dim"),
        ]
    for row in table.rows:
        if row.step is None:
            yield [
                ("  leave ", "note"),
                (
                    f"  {escape(clip(row.found.name, 60))}: {escape(clip(row.found.why, 300))}",
                    "dim",
                ),
            ]
    yield [(f"  {pluralize(going, 'step')} would be deleted", "note" if going else "dim")]


def gone_lines(path: str, gone: Sequence[Step], notes: Sequence[str]) -> Iterator[Line]:
    yield from note_lines(notes)
    for step in gone:
        yield [
            ("deleted ", "error"),
            (f"step {step.step}", "name"),
            (f"  {format_nbytes(step.nbytes)}", "size"),
        ]
    yield [(escape(clip(path, 400)), "title"), (f"  {pluralize(len(gone), 'step')} deleted", "dim")]


def document(table: RunTable, gone: Sequence[Step]) -> dict[str, object]:
    return {
        "schema": 1,
        "path": table.path,
        "keep": [str(rule) for rule in table.rules],
        "recorded": table.recorded,
        "unsealed": list(table.unsealed),
        "nbytes": table.total_nbytes,
        "writer": None
        if table.writer is None
        else {"pid": table.writer.pid, "host": table.writer.host},
        "steps": [_row_document(row) for row in table.rows],
        "deleted": [step.step for step in gone],
    }


def _row_document(row: RunRow) -> dict[str, object]:
    step, fate = row.step, row.fate
    document: dict[str, object] = {
        "name": row.found.name,
        "step": row.found.step,
        "whole": step is not None,
        "why": row.found.why,
        "saved": None,
        "nbytes": None,
        "new_nbytes": row.new_nbytes,
        "shared_nbytes": row.shared_nbytes,
        "metrics": {},
        "kept_by": [],
        "kept_also": [],
        "goes": fate is not None and fate.goes,
    }
    if step is not None:
        # JSON has no NaN.
        metrics = {k: v if math.isfinite(v) else None for k, v in step.metrics.items()}
        document |= {"saved": step.saved, "nbytes": step.nbytes, "metrics": metrics}
    if fate is not None:
        document |= {"kept_by": [*map(str, fate.rules)], "kept_also": [*fate.others]}
    return document
