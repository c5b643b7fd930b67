"""`holdfast compact`: a checkpoint without the bytes that no tensor reaches."""

from __future__ import annotations

import argparse

from holdfast.cli.options import given
from holdfast.cli.planned import add_places, carry_out
from holdfast.cli.text import fields_of
from holdfast.core.options import InPlaceOptions

DESCRIPTION = """\
Remove unused bytes from a checkpoint. For example, if a program saves a few rows of
a large tensor with torch.save, the file contains all rows. Write the smaller checkpoint to DST, or
replace SRC with --in-place. Tied tensors stay tied."""

EXAMPLES = """\
examples:
  holdfast compact rows.pt small.pt

  # See how much smaller the checkpoint becomes.
  holdfast compact rows.pt --dry-run

  # Replace the file.
  holdfast compact model.pt2 --in-place
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_places(verb, InPlaceOptions)


def run(options: argparse.Namespace) -> int:
    from holdfast.core.text import format_nbytes
    from holdfast.verbs.compact import plan_compact

    planned = plan_compact(options.src, options.dst, given(options, InPlaceOptions))
    return carry_out(
        planned, "Compacting", options, more=lambda done, seconds: f", {format_nbytes(done.dropped_nbytes)} less",
        fields=lambda done: fields_of(done, "source before_nbytes dropped_nbytes"),
    )  # fmt: skip
