"""`holdfast tie`: tensors that hold the same, the bytes that tying them saves, and a checkpoint in which they are tied."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

from holdfast.cli.options import given
from holdfast.cli.planned import add_places, carry_out, say
from holdfast.cli.text import fields_of
from holdfast.core.options import InPlaceOptions

if TYPE_CHECKING:
    from holdfast.extras.packages.tie import Tied

DESCRIPTION = """\
Find tensors with identical bytes, and write a checkpoint that stores them once under all their
names. With --dry-run, only list them, with the number of bytes that tying would save."""

EXAMPLES = """\
examples:
  # See how many bytes tying would save.
  holdfast tie model.safetensors --dry-run

  holdfast tie model.safetensors model.pt
  holdfast tie bundle.pt2 --in-place
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_places(verb, InPlaceOptions)


def run(options: argparse.Namespace) -> int:
    from holdfast.cli.progress import bar
    from holdfast.extras.packages.tie import plan_tie

    begin = time.perf_counter()
    total = os.path.getsize(options.src) if options.src.is_file() else None
    with bar("Comparing", total, quiet=options.quiet or options.json) as progress:
        planned = plan_tie(
            options.src, options.dst, given(options, InPlaceOptions, progress=progress)
        )
    if not (options.json or options.quiet or planned.writing.dry_run):
        say("\n".join(planned.report.listing()))
    return carry_out(planned, "Tying", options, fields=found_fields, begin=begin)


def found_fields(found: Tied) -> dict[str, object]:
    return {
        "source": found.source,
        "nbytes": found.storage_nbytes,
        "savable_nbytes": found.savable_nbytes,
        "groups": [
            {"names": [member.name for member in group.members]}
            | fields_of(group.members[0], "dtype shape")
            | fields_of(group, "storages savable_nbytes")
            for group in found.groups
        ],
    }
