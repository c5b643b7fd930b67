"""`holdfast compact`: a checkpoint without the bytes that no tensor reaches."""

from __future__ import annotations

import argparse

from holdfast.cli.planned import add_place, add_writing, carry_out, writing

DESCRIPTION = """\
Write a checkpoint again without the bytes that no tensor reaches, such as the rest of a large tensor of which a few rows were
saved. What is tied stays tied."""

EXAMPLES = """\
examples:
  holdfast compact rows.pt small.pt
  holdfast compact rows.pt --dry-run              how much smaller it would become
  holdfast compact model.pt2 --in-place
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    add_place(verb)
    add_writing(verb)
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    from holdfast.core.text import nbytes
    from holdfast.rewrite.compact import plan_compact

    planned = plan_compact(options.src, options.dst, in_place=options.in_place, writing=writing(options))
    return carry_out(
        planned, "Compacting", options, more=lambda done, seconds: f", {nbytes(done.dropped_nbytes)} less",
        fields=lambda done: {
            "source": done.source, "before_nbytes": done.before_nbytes, "dropped_nbytes": done.dropped_nbytes,
        },
    )  # fmt: skip
