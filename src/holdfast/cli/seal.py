"""`holdfast seal`: say that what another trainer wrote is whole; and what a seal says, for other verbs."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli import values
from holdfast.cli.text import (
    Line,
    duration,
    fields_of,
    note_lines,
    print_json,
    print_lines,
    shell_text,
)
from holdfast.core.text import clip, escape, format_nbytes, pluralize

if TYPE_CHECKING:
    from holdfast.verbs.seal import Sealed
    from holdfast.verbs.seals.document import Seal

DESCRIPTION = """\
Record that a checkpoint is complete. Run this command after another program, such as the Hugging
Face Trainer, has written a folder or a file. It writes holdfast.seal.json with the size and digest
of every file, the step and the metrics. Then 'holdfast verify' can check the files, and 'holdfast
runs' lists the folder as a step. An incomplete checkpoint is refused."""

EXAMPLES = """\
examples:
  holdfast seal out/checkpoint-500
  holdfast seal out/checkpoint-*

  # A single file: writes last.ckpt.seal.json.
  holdfast seal lightning/last.ckpt

  # Set the step and a metric.
  holdfast seal run/final --step 9000 --metric val_loss=2.1
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    from holdfast.cli.options import add_options
    from holdfast.core.options import SealOptions

    verb.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        type=values.path,
        help="checkpoint folder, or a single file",
    )
    add_options(verb, SealOptions)


def run(options: argparse.Namespace) -> int:
    from holdfast.cli.options import flags_of, given
    from holdfast.cli.progress import bar
    from holdfast.cli.verify import size_of
    from holdfast.core.options import SealOptions
    from holdfast.errors import Unsupported
    from holdfast.verbs.seal import seal

    if "step" in options and len(options.paths) > 1:
        raise Unsupported("--step applies to one path; seal several paths one by one")
    done: list[tuple[Sealed, float]] = []
    asked = given(options, SealOptions)
    dry_run = asked["dry_run"]
    with bar(
        "Sealing", sum(map(size_of, options.paths)), quiet=options.quiet or options.json or dry_run
    ) as progress:
        asked["progress"] = progress
        for path in options.paths:
            begin = time.perf_counter()
            sealed = seal(path, **asked)
            done.append((sealed, time.perf_counter() - begin))
    if options.json:
        print_json({"schema": 1, "sealed": [_fields(sealed, seconds) for sealed, seconds in done]})
    elif not options.quiet or dry_run:
        flags = flags_of(options.verb)
        print_lines(line for sealed, seconds in done for line in _lines(sealed, seconds, flags))
    return 0


def _lines(sealed: Sealed, seconds: float, flags: Mapping[str, str]) -> Iterator[Line]:
    from holdfast.cli.options import in_flags

    step = "no step" if sealed.step is None else f"step {sealed.step:,}"
    about = [
        step,
        *(f"{escape(clip(name, 60))} {value:g}" for name, value in sealed.metrics.items()),
    ]
    yield [
        ("sealed " if sealed.done else "would seal ", "clean"),
        (escape(clip(sealed.path, 400)), "title"),
        (f"  {sealed.format}" if sealed.format else "", "dim"),
        (f"  {', '.join(about)}", ""),
        (f"  {format_nbytes(sealed.nbytes)}", "size"),
        (
            f" in {pluralize(len(sealed.files), 'file')}"
            + (f"  {duration(seconds)}" if sealed.done else ""),
            "dim",
        ),
    ]
    yield from note_lines(in_flags(note, flags) for note in sealed.notes)


def _fields(sealed: Sealed, seconds: float) -> dict[str, object]:
    return {
        **fields_of(sealed, "path seal format done step"),
        "metrics": _numbers(sealed.metrics),
        "nbytes": sealed.nbytes,
        "files": [{"name": name, "nbytes": length} for name, length in sealed.files],
        "notes": list(sealed.notes),
        "seconds": round(seconds, 6) if sealed.done else None,
    }


def _numbers(metrics: Mapping[str, float]) -> dict[str, float | str]:
    # JSON has no NaN.
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def sealed_words(seal: Seal) -> str:
    step = "" if seal.step is None else f" as step {seal.step:,}"
    return f"sealed{step}, {pluralize(len(seal.files), 'file')}"


def seal_fields(seal: Seal) -> dict[str, object]:
    metrics = _numbers(seal.metrics)
    return fields_of(seal, "step saved") | {
        "metrics": metrics,
        "files": len(seal.files),
        "nbytes": seal.nbytes,
    }


def seal_lines(path: Path) -> Iterator[Line]:
    """The lines of `show` about the seal of a folder or file, and about files that are not as it says; none without a seal."""
    from holdfast.errors import HoldfastError
    from holdfast.verbs.seals.check import check_sizes, read_seal

    try:
        seal = read_seal(path)
    except HoldfastError as error:
        yield [(f"seal      {shell_text(error.message, 400)}", "note")]
        return
    if seal is None:
        return
    metrics = ", ".join(
        f"{escape(clip(name, 60))} {value:g}" for name, value in seal.metrics.items()
    )
    yield [
        (f"seal      {sealed_words(seal)}, {format_nbytes(seal.nbytes)}", "note"),
        (f"  {metrics}", "dim"),
    ]
    for name, wrong in check_sizes(path, seal):
        yield [("incomplete ", "error"), (f"{escape(clip(name, 200))}: {wrong}", "")]
