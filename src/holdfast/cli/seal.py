"""`holdfast seal`: say that what another trainer wrote is whole; and what a seal says, for other verbs."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli import values
from holdfast.cli.text import Line, print_lines
from holdfast.cli.values import positive
from holdfast.core.text import clip, escape, nbytes, plural

if TYPE_CHECKING:
    from holdfast.formats.seal import Seal
    from holdfast.rewrite.seal import Sealed

DESCRIPTION = """\
Seal a folder that another trainer has written to its end, or one file: holdfast.seal.json has every file with its size and digest,
the step and the metrics. It is written last and atomically, so that it is there only if all the rest is; verify compares with it,
and runs count the folder as a step. Step and metrics are taken from what the trainer left there, unless they are given. What is
torn is refused."""

EXAMPLES = """\
examples:
  holdfast seal out/checkpoint-500
  holdfast seal out/checkpoint-* --json
  holdfast seal lightning/last.ckpt                           the seal is last.ckpt.seal.json
  holdfast seal run/final --step 9000 --metric val_loss=2.1
"""

SCHEMA = 1
"""Raised when a field changes its meaning or goes away."""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    verb.add_argument("paths", metavar="PATH", nargs="+", type=values.path, help="a folder of a checkpoint, or one file")
    verb.add_argument("--step", metavar="N", type=_step, help="the step, whatever the files say")
    verb.add_argument(
        "--metric", metavar="NAME=VALUE", type=_metric, action="append", default=[], help="a metric; in place of what the files say"
    )
    verb.add_argument("--digest", choices=("xxh3-128", "sha256"), help="how files are digested (xxh3-128)")
    verb.add_argument("--overwrite", action="store_true", help="replace a seal that is there")
    verb.add_argument("--no-durable", action="store_true", help="do not wait for the disk (no fsync)")
    verb.add_argument("--threads", metavar="N", type=positive, help="how many threads")
    verb.add_argument("-n", "--dry-run", action="store_true", help="say what would be sealed, and write nothing")
    verb.add_argument("-q", "--quiet", action="store_true", help="no progress bar, no report")
    verb.add_argument("--json", action="store_true", help="print one JSON document (its schema is in docs/cli.md)")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    from holdfast.cli.progress import bar
    from holdfast.cli.verify import size_of
    from holdfast.errors import Unsupported
    from holdfast.rewrite.seal import seal

    if options.step is not None and len(options.paths) > 1:
        raise Unsupported("--step is one step, and several paths were given; seal them one by one")
    done: list[tuple[Sealed, float]] = []
    quiet = options.quiet or options.json or options.dry_run
    with bar("Sealing", sum(map(size_of, options.paths)), quiet=quiet) as progress:
        for path in options.paths:
            begin = time.perf_counter()
            sealed = seal(
                path, step=options.step, metrics=dict(options.metric) or None, digest=options.digest or "xxh3-128",
                overwrite=options.overwrite, durable=not options.no_durable, dry_run=options.dry_run, threads=options.threads,
                progress=progress,
            )  # fmt: skip
            done.append((sealed, time.perf_counter() - begin))
    if options.json:
        from holdfast.cli.document import print_json

        print_json({"schema": SCHEMA, "sealed": [_fields(sealed, seconds) for sealed, seconds in done]})
    elif not options.quiet or options.dry_run:
        print_lines(line for sealed, seconds in done for line in _lines(sealed, seconds))
    return 0


def _step(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of a step")
    return int(text)


def _metric(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        if equals and name:
            return name, float(value)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=NUMBER")


def _lines(sealed: Sealed, seconds: float) -> Iterator[Line]:
    step = "no step" if sealed.step is None else f"step {sealed.step:,}"
    said = [step, *(f"{escape(clip(name, 60))} {value:g}" for name, value in sealed.metrics.items())]
    yield [
        ("sealed " if sealed.done else "would seal ", "clean"),
        (escape(clip(sealed.path, 400)), "title"),
        (f"  {sealed.format}" if sealed.format else "", "dim"),
        (f"  {', '.join(said)}", ""),
        (f"  {nbytes(sealed.nbytes)}", "size"),
        (f" in {plural(len(sealed.files), 'file')}" + (f"  {seconds:.1f} s" if sealed.done else ""), "dim"),
    ]
    for note in sealed.notes:
        yield [("  note  ", "note"), (escape(clip(note, 600)), "")]


def _fields(sealed: Sealed, seconds: float) -> dict[str, object]:
    return {
        "path": sealed.path,
        "seal": sealed.seal,
        "format": sealed.format,
        "done": sealed.done,
        "step": sealed.step,
        "metrics": _numbers(sealed.metrics),
        "nbytes": sealed.nbytes,
        "files": [{"name": name, "nbytes": length} for name, length in sealed.files],
        "notes": list(sealed.notes),
        "seconds": round(seconds, 6) if sealed.done else None,
    }


def _numbers(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Metrics as JSON has numbers: what is not finite is text."""
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def sealed_words(seal: Seal) -> str:
    """What a seal says, in a few words."""
    step = "" if seal.step is None else f" as step {seal.step:,}"
    return f"sealed{step}, {plural(len(seal.files), 'file')}"


def seal_fields(seal: Seal) -> dict[str, object]:
    """What a seal says, as values that JSON has."""
    return {
        "step": seal.step,
        "saved": seal.saved,
        "metrics": _numbers(seal.metrics),
        "files": len(seal.files),
        "nbytes": seal.nbytes,
    }


def seal_lines(path: Path) -> Iterator[Line]:
    """What `show` says about the seal of a folder or file: what it says, and which files are not as it says. None: nothing."""
    from holdfast.errors import HoldfastError
    from holdfast.inspect.sealed import check_sizes, read_seal

    try:
        seal = read_seal(path)
    except HoldfastError as error:
        yield [(f"seal      {escape(clip(error.message, 400))}", "note")]
        return
    if seal is None:
        return
    metrics = ", ".join(f"{escape(clip(name, 60))} {value:g}" for name, value in seal.metrics.items())
    yield [(f"seal      {sealed_words(seal)}, {nbytes(seal.nbytes)}", "note"), (f"  {metrics}", "dim")]
    for name, wrong in check_sizes(path, seal):
        yield [("not whole ", "error"), (f"{escape(clip(name, 200))}: {wrong}", "")]
