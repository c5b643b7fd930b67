"""What verbs that write share: their options, and carrying out what is planned.

A dry run says what would be written and stops there. `--json` prints one document of the same fields for all of them, beside those
of the verb; see docs/cli.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from holdfast.cli import values
from holdfast.cli.options import add_options, flags_of, in_flags
from holdfast.cli.text import Line, duration, fields_of, note_lines, print_json, print_lines
from holdfast.core.options import get_options

if TYPE_CHECKING:
    from holdfast.verbs.shared.planned import Planned, Saved

    R = TypeVar("R", bound=Saved)


def add_places(
    verb: argparse.ArgumentParser, record: type, *, without: Collection[str] = ()
) -> None:
    """The source and the target of a verb, and the flags of its options. One that has `in_place` needs no target."""
    verb.add_argument(
        "src", metavar="SRC", type=values.path, help="checkpoint to read, of any format"
    )
    options = get_options(record)
    count = "?" if "in_place" in options else None
    where = "path or URL to write"
    if "format" in options:
        where += "; the suffix selects the format, and a slash at the end writes a folder"
    verb.add_argument("dst", metavar="DST", type=values.target, nargs=count, help=where)
    add_options(verb, record, without=without)


def carry_out(
    planned: Planned[R], title: str, options: argparse.Namespace, *, fields: Callable[[R], Mapping[str, object]],
    more: Callable[[R, float], str] = lambda done, seconds: "", lines: Callable[[R, float], Iterable[Line]] | None = None,
    begin: float | None = None,
) -> int:  # fmt: skip
    """Write what was planned under a bar and report it; or only report what would be written. Returns the exit code.

    `fields` begin the document of `--json`. `more` ends the line of what was written; `lines` are printed where that line is not
    enough. `begin` is when the verb began, where that was before now.
    """
    from holdfast.cli.progress import bar
    from holdfast.core.value import replace

    begin = time.perf_counter() if begin is None else begin
    dry_run = planned.writing.dry_run
    with (
        planned.sources,
        bar(
            title, None if dry_run else planned.report.nbytes, quiet=options.quiet or options.json
        ) as progress,
    ):
        done = planned.preview(progress) if dry_run else planned.run(progress)
    seconds = time.perf_counter() - begin
    if not options.json:
        done = replace(
            done, notes=tuple(in_flags(note, flags_of(options.verb)) for note in done.notes)
        )
    if options.json:
        files = [{"name": name, "nbytes": nbytes} for name, nbytes in done.files]
        written = {
            "target": done.path,
            **fields_of(done, "format folder done"),
            "write_nbytes": done.nbytes,
            "files": files,
        }
        taken = round(seconds, 6) if done.done else None
        print_json(
            {
                "schema": 1,
                **fields(done),
                **written,
                **fields_of(done, "free_nbytes notes"),
                "seconds": taken,
            }
        )
    elif options.quiet and not dry_run:
        pass
    elif lines is not None:
        print_lines(lines(done, seconds))
    elif dry_run:
        say(done.explain())
    else:
        print_lines(written_lines(done, duration(seconds) + more(done, seconds)))
    return 0


def say(text: str) -> None:
    """Print text that may have names out of a file in it."""
    from holdfast.core.text import clip, escape

    print_lines([(escape(clip(line, 2000)), "")] for line in text.split("\n"))


def written_lines(done: Saved, more: str) -> Iterable[Line]:
    from holdfast.core.text import clip, escape, format_nbytes, pluralize

    yield [
        ("wrote ", "clean"),
        (escape(clip(done.path, 400)), "title"),
        (f"  {done.format}", "dim"),
        (f"  {format_nbytes(done.nbytes)}", "size"),
        (f" in {pluralize(len(done.files), 'file')}  {more}", "dim"),
    ]
    yield from note_lines(done.notes)
