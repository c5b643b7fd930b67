"""What verbs that write share: their options, and, for `package`, `tie` and `compact`, carrying out what is planned.

A dry run says what would be written and stops there. `--json` prints one document of the same fields for all three, beside those of
the verb; see docs/cli.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.rewrite.planned import PlannedSave, Writing
    from holdfast.rewrite.save import Saved

__all__ = ["SCHEMA", "add_sparse", "add_writing", "carry_out", "say", "writing"]

SCHEMA = 1
"""Raised when a field changes its meaning or goes away."""


def add_writing(verb: argparse.ArgumentParser, overwrite: str) -> None:
    """The options of every verb that writes what it planned."""
    verb.add_argument("--overwrite", action="store_true", help=overwrite)
    verb.add_argument("--no-durable", action="store_true", help="do not wait for the disk (no fsync)")
    verb.add_argument("--threads", metavar="N", type=int, help="how many threads")
    verb.add_argument("-n", "--dry-run", action="store_true", help="say what would be written, and write nothing")
    verb.add_argument("-q", "--quiet", action="store_true", help="no progress bar, no report")
    verb.add_argument("--json", action="store_true", help="print one JSON document (its schema is in docs/cli.md)")


def add_sparse(verb: argparse.ArgumentParser) -> None:
    """How a native directory stores zeros."""
    told = "native: store zeros packed where it pays: auto, bitmap, nm, block, 2:4, 16x16 (never)"
    verb.add_argument("--sparse", metavar="HOW", default="never", help=told)


def writing(options: argparse.Namespace) -> Writing:
    """Those options, for the library."""
    from holdfast.rewrite.planned import Writing

    return Writing(options.overwrite, not options.no_durable, options.threads)


def carry_out(
    planned: PlannedSave,
    title: str,
    options: argparse.Namespace,
    *,
    fields: Mapping[str, object],
    notes: Sequence[str] = (),
    more: str = "",
    would: str = "",
) -> int:
    """Write what was planned under a bar and say so; or only say what would be. Returns the exit code.

    `fields` begin the document, and `notes` those of the plan in it; `more` ends the line of what was written, `would` begins what
    a dry run says.
    """
    from holdfast.cli.progress import bar

    begin = time.perf_counter()
    free = planned.free_nbytes
    saved = None
    if not options.dry_run:
        with bar(title, planned.plan.nbytes, quiet=options.quiet or options.json) as progress:
            saved = planned.run(progress)
    seconds = time.perf_counter() - begin
    if options.json:
        from holdfast.cli.document import print_json

        print_json({"schema": SCHEMA, **fields, **_written_fields(planned, saved, notes, free, seconds)})
    elif saved is None:
        say("\n".join(filter(None, (would, planned.explain()))))
    elif not options.quiet:
        _print_saved(saved, seconds, more)
    return 0


def _written_fields(
    planned: PlannedSave, saved: Saved | None, notes: Sequence[str], free: int, seconds: float
) -> dict[str, object]:
    """What was written, or would be, as values that JSON has."""
    return {
        "target": planned.target,
        "format": planned.plan.format,
        "done": saved is not None,
        "write_nbytes": planned.plan.nbytes,
        "files": [{"name": name, "nbytes": nbytes} for name, nbytes in planned.files],
        "free_nbytes": free,
        "notes": [*notes, *planned.plan.notes],
        "seconds": None if saved is None else round(seconds, 6),
    }


def say(text: str) -> None:
    """Print text that may have names out of a file in it."""
    from holdfast.cli.lines import print_lines
    from holdfast.cli.text import clip, escape

    print_lines([(escape(clip(line, 2000)), "")] for line in text.split("\n"))


def _print_saved(saved: Saved, seconds: float, more: str) -> None:
    """What was written, in a line, and what a person should know about it."""
    from holdfast.cli.lines import print_lines
    from holdfast.cli.text import clip, escape, nbytes, plural

    print_lines(
        [
            [
                ("wrote ", "clean"),
                (escape(clip(saved.path, 400)), "title"),
                (f"  {saved.format}", "dim"),
                (f"  {nbytes(saved.nbytes)}", "size"),
                (f" in {plural(saved.files, 'file')}  {seconds:.1f} s{more}", "dim"),
            ],
            *([("  note  ", "note"), (escape(clip(note, 600)), "")] for note in saved.notes),
        ]
    )
