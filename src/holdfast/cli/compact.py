"""`holdfast compact`: a checkpoint without the bytes that no tensor reaches."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "run"]

DESCRIPTION = """\
Write a checkpoint again without the bytes that no tensor reaches, such as the rest of a large tensor of which a few rows were
saved. In place, atomically, unless -o says where. What is tied stays tied."""

EXAMPLES = """\
examples:
  holdfast compact rows.pt
  holdfast compact model.pt2 -o small.pt2
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    verb.add_argument("path", metavar="PATH", type=Path, help="a checkpoint")
    verb.add_argument("-o", "--output", metavar="OUT", help="write here and leave PATH as it is")
    verb.add_argument("--overwrite", action="store_true", help="with -o: replace what is there")
    verb.add_argument("--no-durable", action="store_true", help="do not wait until the disk has it")
    verb.add_argument("-q", "--quiet", action="store_true", help="no progress bar, no report")
    verb.add_argument("--threads", metavar="N", type=int, help="threads that read and write")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    from holdfast.api.compact import compact
    from holdfast.cli.package import print_saved
    from holdfast.cli.progress import bar
    from holdfast.cli.text import nbytes

    begin = time.perf_counter()
    total = os.path.getsize(options.path) if options.path.is_file() else 0
    with bar("Compacting", total, quiet=options.quiet or not total) as progress:
        done = compact(
            options.path, output=options.output, overwrite=options.overwrite, durable=not options.no_durable,
            threads=options.threads, progress=progress,
        )  # fmt: skip
    if not options.quiet:
        print_saved(done.saved, time.perf_counter() - begin, f", {nbytes(done.dropped_nbytes)} less")
    return 0
