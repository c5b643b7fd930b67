"""`holdfast tie`: tensors that hold the same, the bytes that tying them saves, and a checkpoint in which they are tied."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "run"]

DESCRIPTION = """\
Find tensors that hold the same, byte by byte, and say how many bytes could be saved. With -o or --in-place, write a checkpoint in
which they are tied: stored once, under all their names."""

EXAMPLES = """\
examples:
  holdfast tie model.safetensors                  what could be saved
  holdfast tie model.safetensors -o model.pt
  holdfast tie bundle.pt2 --in-place
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    verb.add_argument("path", metavar="PATH", type=Path, help="a checkpoint of any format")
    verb.add_argument("-o", "--output", metavar="OUT", help="write a checkpoint with ties here")
    verb.add_argument("--in-place", action="store_true", help="write it in place of PATH, atomically")
    verb.add_argument("--overwrite", action="store_true", help="with -o: replace what is there")
    verb.add_argument("--no-durable", action="store_true", help="do not wait until the disk has it")
    verb.add_argument("-q", "--quiet", action="store_true", help="no progress bar, no report")
    verb.add_argument("--threads", metavar="N", type=int, help="threads that read and write")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    from holdfast.api.tie import tie
    from holdfast.cli.lines import print_lines
    from holdfast.cli.package import print_saved
    from holdfast.cli.progress import bar
    from holdfast.cli.text import clip, escape
    from holdfast.errors import Unsupported

    if options.in_place and options.output:
        raise Unsupported("--in-place and -o exclude each other")
    begin = time.perf_counter()
    total = os.path.getsize(options.path) if options.path.is_file() else 0
    with bar("Comparing", total, quiet=options.quiet or not total) as progress:
        tied = tie(
            options.path, output=options.path if options.in_place else options.output, overwrite=options.overwrite,
            durable=not options.no_durable, threads=options.threads, progress=progress,
        )  # fmt: skip
    if not options.quiet:
        print_lines([(escape(clip(line, 2000)), "")] for line in str(tied).split("\n"))
        if tied.saved is not None:
            print_saved(tied.saved, time.perf_counter() - begin)
    return 0
