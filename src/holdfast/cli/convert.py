"""`holdfast convert`: a conversion with a progress bar, and what it did in a line or as JSON. `edit` reports in the same way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.cli.lines import Line, print_lines
from holdfast.cli.progress import bar
from holdfast.cli.text import clip, escape, nbytes, plural
from holdfast.inspect.open import open as open_checkpoint
from holdfast.rewrite.convert import Conversion, PlannedConversion, plan_conversion
from holdfast.rewrite.formats import Options
from holdfast.rewrite.models import Selection
from holdfast.rewrite.transform import Edits

__all__ = ["carry_out", "conversion_document", "done_line", "run"]

SCHEMA = 1
"""Raised when a field changes its meaning or goes away."""


def run(
    src: Path,
    dst: str,
    *,
    format: str | None,
    selection: Selection,
    edits: Edits,
    options: Options,
    max_memory: int,
    overwrite: bool,
    durable: bool,
    verify: bool,
    threads: int | None,
    resume: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """The command; returns its exit code."""
    with open_checkpoint(src, threads=1) as source:
        planned = plan_conversion(
            source, dst, format=format, selection=selection, edits=edits, options=options, max_memory=max_memory,
            overwrite=overwrite, durable=durable, verify=verify, threads=threads,
        )  # fmt: skip
        return carry_out(planned, "Converting", resume=resume, dry_run=dry_run, quiet=quiet, as_json=as_json)


def carry_out(planned: PlannedConversion, title: str, *, resume: bool = False, dry_run: bool, quiet: bool, as_json: bool) -> int:
    """Do what was planned under a bar and say what was done; or only say what would be. Returns the exit code."""
    begin = time.perf_counter()
    done = planned.report
    if not dry_run:
        with bar(title, done.write_nbytes, quiet=quiet or as_json) as progress:
            done = planned.run(progress, resume=resume)
    seconds = time.perf_counter() - begin
    if as_json:
        from holdfast.cli.document import print_json

        print_json(conversion_document(done, seconds))
    elif dry_run:
        print_lines([(escape(clip(line, 2000)), "")] for line in done.explain().split("\n"))
    elif not quiet:
        print_lines([done_line(done, seconds), *note_lines(done)])
    return 0


def done_line(done: Conversion, seconds: float) -> Line:
    """What was written, how much, how fast."""
    rate = f"{nbytes(int(done.write_nbytes / max(seconds, 1e-3)))}/s"
    return [
        ("wrote ", "clean"),
        (escape(clip(done.target, 400)), "title"),
        (f"  {done.format}", "dim"),
        (f"  {nbytes(done.write_nbytes)}", "size"),
        (f" in {plural(len(done.files), 'file')}", "dim"),
        (f"  {seconds:.1f} s, {rate}", "dim"),
    ]


def note_lines(done: Conversion) -> Iterator[Line]:
    """What a person should know about it."""
    for note in done.notes:
        yield [("  note  ", "note"), (escape(clip(note, 600)), "")]


def conversion_document(done: Conversion, seconds: float) -> dict[str, object]:
    """The conversion as values that JSON has."""
    return {
        "schema": SCHEMA,
        "source": done.source,
        "target": done.target,
        "format": done.format,
        "done": done.saved is not None,
        "tensors": done.tensors,
        "read_nbytes": done.read_nbytes,
        "over_read_nbytes": done.over_read_nbytes,
        "write_nbytes": done.write_nbytes,
        "files": [{"name": name, "nbytes": length} for name, length in done.files],
        "peak_nbytes": done.peak_nbytes,
        "free_nbytes": done.free_nbytes,
        "notes": list(done.notes),
        "seconds": round(seconds, 6) if done.saved is not None else None,
    }
