"""What verbs that write share: their options, and carrying out what is planned.

A dry run says what would be written and stops there. `--json` prints one document of the same fields for all of them, beside those
of the verb; see docs/cli.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from holdfast.cli import values
from holdfast.cli.flags import in_flags
from holdfast.cli.values import positive, size

if TYPE_CHECKING:
    from holdfast.cli.text import Line
    from holdfast.rewrite.planned import Planned, Saved
    from holdfast.rewrite.writing import Writing

    R = TypeVar("R", bound=Saved)

SCHEMA = 1
"""Raised when a field changes its meaning or goes away."""

FORMATS = ("torch", "safetensors", "native")

BUDGET = "1GiB"
"""`rewrite.planned.MAX_MEMORY`, which is not imported for the sake of `--help`."""


def add_place(verb: argparse.ArgumentParser) -> None:
    """The source and the target of a verb that may replace the one with the other."""
    verb.add_argument("src", metavar="SRC", type=values.path, help="a checkpoint of any format")
    verb.add_argument("dst", metavar="DST", type=values.target, nargs="?", help="where to write; the suffix says the format")
    verb.add_argument("--in-place", action="store_true", help="write it in place of SRC, atomically")


def add_writing(verb: argparse.ArgumentParser, *, rewrites: bool = True) -> None:
    """The options of every verb that writes. One that `rewrites` a checkpoint reads back and keeps to a budget."""
    verb.add_argument("--overwrite", action="store_true", help="replace what is there")
    verb.add_argument("--no-durable", action="store_true", help="do not wait for the disk (no fsync)")
    again = verb.add_mutually_exclusive_group()
    again.add_argument("--read-back", action="store_true", default=None, help="read what was written before publishing it")
    again.add_argument("--no-read-back", action="store_false", dest="read_back", help="do not")
    told = "use no more than this" + (f" ({BUDGET})" if rewrites else "")
    verb.add_argument("--max-memory", metavar="SIZE", type=size, help=told)
    verb.add_argument("--threads", metavar="N", type=positive, help="how many threads")
    verb.add_argument("-n", "--dry-run", action="store_true", help="say what would be written, and write nothing")
    verb.add_argument("-q", "--quiet", action="store_true", help="no progress bar, no report")
    verb.add_argument("--json", action="store_true", help="print one JSON document (its schema is in docs/cli.md)")
    verb.set_defaults(rewrites=rewrites)


def add_folder(verb: argparse.ArgumentParser) -> None:
    """What is in a directory that is written: how many files, and which beside the weights."""
    verb.add_argument("--max-shard-size", metavar="SIZE", type=size, help="split into files of at most 5GB, 500MiB, …")
    beside = verb.add_mutually_exclusive_group()
    told = "to a directory: take config and tokenizer from DIR, not from SRC"
    beside.add_argument("--copy-config", metavar="DIR", type=values.path, help=told)
    beside.add_argument("--no-copy-config", action="store_true", help="leave those of SRC behind")


def copy_config(options: argparse.Namespace) -> bool | Path:
    """Those options, for the library."""
    return options.copy_config or not options.no_copy_config


def add_sparse(verb: argparse.ArgumentParser) -> None:
    """How a native directory stores zeros."""
    told = "native: store zeros packed where it pays: auto, bitmap, nm, block, 2:4, 16x16 (never)"
    verb.add_argument("--sparse", metavar="HOW", default="never", help=told)


def writing(options: argparse.Namespace, *, resume: bool = False) -> Writing:
    """Those options, for the library."""
    from holdfast.rewrite.writing import Writing

    budget = BUDGET if options.rewrites else None
    return Writing(
        overwrite=options.overwrite, durable=not options.no_durable, threads=options.threads,
        read_back=options.rewrites if options.read_back is None else options.read_back,
        max_memory=budget if options.max_memory is None else options.max_memory, resume=resume, dry_run=options.dry_run,
    )  # fmt: skip


def carry_out(
    planned: Planned[R],
    title: str,
    options: argparse.Namespace,
    *,
    fields: Callable[[R], Mapping[str, object]],
    more: Callable[[R, float], str] = lambda done, seconds: "",
    told: Callable[[R, float], Iterable[Line]] | None = None,
    begin: float | None = None,
) -> int:
    """Write what was planned under a bar and say so; or only say what would be. Closes it, and returns the exit code.

    `fields` begin the document of `--json`. `more` ends the line of what was written; `told` are all lines, where that line is not
    enough. `begin` is when the verb began, where that was before now.
    """
    from holdfast.cli.progress import bar
    from holdfast.cli.text import print_lines
    from holdfast.core.value import replace

    begin = time.perf_counter() if begin is None else begin
    with planned, bar(title, None if options.dry_run else planned.report.nbytes, quiet=options.quiet or options.json) as progress:
        done = planned.look(progress) if options.dry_run else planned.run(progress)
    seconds = time.perf_counter() - begin
    if not options.json:
        done = replace(done, notes=tuple(in_flags(note, options.flags) for note in done.notes))
    if options.json:
        from holdfast.cli.document import print_json

        print_json({"schema": SCHEMA, **fields(done), **_written_fields(done, seconds)})
    elif options.quiet and not options.dry_run:
        pass
    elif told is not None:
        print_lines(told(done, seconds))
    elif options.dry_run:
        say(done.explain())
    else:
        print_lines(written_lines(done, f"{seconds:.1f} s{more(done, seconds)}"))
    return 0


def _written_fields(done: Saved, seconds: float) -> dict[str, object]:
    """What was written, or would be, as values that JSON has."""
    return {
        "target": done.path,
        "format": done.format,
        "done": done.done,
        "write_nbytes": done.nbytes,
        "files": [{"name": name, "nbytes": nbytes} for name, nbytes in done.files],
        "free_nbytes": done.free_nbytes,
        "notes": list(done.notes),
        "seconds": round(seconds, 6) if done.done else None,
    }


def say(text: str) -> None:
    """Print text that may have names out of a file in it."""
    from holdfast.cli.text import print_lines
    from holdfast.core.text import clip, escape

    print_lines([(escape(clip(line, 2000)), "")] for line in text.split("\n"))


def written_lines(done: Saved, more: str) -> Iterable[Line]:
    """What was written, in a line, and what a person should know about it."""
    from holdfast.core.text import clip, escape, nbytes, plural

    yield [
        ("wrote ", "clean"),
        (escape(clip(done.path, 400)), "title"),
        (f"  {done.format}", "dim"),
        (f"  {nbytes(done.nbytes)}", "size"),
        (f" in {plural(len(done.files), 'file')}  {more}", "dim"),
    ]
    yield from note_lines(done)


def note_lines(done: Saved) -> Iterable[Line]:
    """What a person should know."""
    from holdfast.core.text import clip, escape

    for note in done.notes:
        yield [("  note  ", "note"), (escape(clip(note, 600)), "")]
