"""`holdfast compact`: a checkpoint without the bytes that no tensor reaches."""

from __future__ import annotations

import argparse

from holdfast.cli import places
from holdfast.cli.planned import add_writing, carry_out, writing

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "run"]

DESCRIPTION = """\
Write a checkpoint again without the bytes that no tensor reaches, such as the rest of a large tensor of which a few rows were
saved. In place, atomically, unless -o says where. What is tied stays tied."""

EXAMPLES = """\
examples:
  holdfast compact rows.pt
  holdfast compact rows.pt --dry-run              how much smaller it would become
  holdfast compact model.pt2 -o small.pt2
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    verb.add_argument("path", metavar="PATH", type=places.path, help="a checkpoint")
    verb.add_argument("-o", "--output", metavar="OUT", type=places.target, help="write here and leave PATH as it is")
    add_writing(verb, "with -o: replace what is there")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    from holdfast.cli.text import nbytes
    from holdfast.rewrite.compact import planned_compact

    with planned_compact(options.path, output=options.output, writing=writing(options)) as planned:
        dropped = max(planned.before_nbytes - planned.plan.nbytes, 0)
        fields = {"source": str(options.path), "before_nbytes": planned.before_nbytes, "dropped_nbytes": dropped}
        would = f"{options.path}: {dropped:,} of {planned.before_nbytes:,} bytes would go"
        return carry_out(planned, "Compacting", options, fields=fields, more=f", {nbytes(dropped)} less", would=would)
