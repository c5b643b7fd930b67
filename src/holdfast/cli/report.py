"""`holdfast report`: a checkpoint as one HTML file to look at."""

from __future__ import annotations

import argparse
import os

from holdfast.cli import values

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "run"]

DESCRIPTION = """\
Write a page to look at: what is in a checkpoint, how large, where in which file, and what is odd about it. It is one HTML file that
needs nothing else and loads nothing. No tensor data is read."""

EXAMPLES = """\
examples:
  holdfast report model.safetensors -o model.html
  holdfast report model.pt -o attention.html -f '*.attn.*'
  holdfast report checkpoints/step-1000 -o step.html --mesh 8
  holdfast report model.pt --json | jq -r .sentence
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    verb.add_argument("path", metavar="PATH", type=values.path, help="a checkpoint of any format")
    verb.add_argument("-o", "--output", metavar="FILE", type=values.file, help="where to write the page")
    verb.add_argument("-f", "--filter", metavar="GLOB", help="only names that match")
    verb.add_argument("--mesh", metavar="N", help="which files each of N ranks would read; 2x2 for a grid")
    verb.add_argument("-q", "--quiet", action="store_true", help="no progress bar, no report")
    verb.add_argument("--json", action="store_true", help="print the data behind the page (its schema is in docs/report.md)")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    from holdfast.cli.text import clip, escape, nbytes, print_lines
    from holdfast.errors import BadArgument
    from holdfast.reports.report import report

    if options.output is None and not options.json:
        raise BadArgument("say where the page shall be: -o page.html; or --json prints the data behind it")
    made = report(options.path, filter=options.filter, mesh=options.mesh)
    if options.output is not None:
        made.save(options.output)
    if options.json:
        from holdfast.cli.document import print_json

        print_json(made.document)
    elif not options.quiet:
        size = os.path.getsize(options.output)
        print_lines(
            [
                [("wrote ", "clean"), (escape(clip(str(options.output), 400)), "title"), (f"  {nbytes(size)}", "size")],
                [(escape(clip(str(made.document["sentence"]), 2000)), "dim")],
            ]
        )
    return 0
