"""`holdfast tie`: tensors that hold the same, the bytes that tying them saves, and a checkpoint in which they are tied."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from holdfast.cli import places
from holdfast.cli.planned import SCHEMA, add_writing, carry_out, say, writing

if TYPE_CHECKING:
    from holdfast.rewrite.tie import Tied

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
    verb.add_argument("path", metavar="PATH", type=places.path, help="a checkpoint of any format")
    verb.add_argument("-o", "--output", metavar="OUT", type=places.target, help="write a checkpoint with ties here")
    verb.add_argument("--in-place", action="store_true", help="write it in place of PATH, atomically")
    add_writing(verb, "with -o: replace what is there")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    from holdfast.cli.document import print_json
    from holdfast.cli.progress import bar
    from holdfast.errors import Unsupported
    from holdfast.rewrite.tie import planned_tie

    if options.in_place and options.output:
        raise Unsupported("--in-place and -o exclude each other")
    output = options.path if options.in_place else options.output
    total = os.path.getsize(options.path) if options.path.is_file() else None
    with ExitStack() as stack:
        with bar("Comparing", total, quiet=options.quiet or options.json) as progress:
            found, planned = stack.enter_context(
                planned_tie(options.path, output=output, writing=writing(options), progress=progress)
            )
        fields = found_fields(found)
        if not options.json and not options.quiet:
            say(str(found))
        if planned is not None:
            return carry_out(planned, "Tying", options, fields=fields, notes=found.notes)
    if options.json:
        print_json({"schema": SCHEMA, **fields, "done": False, "notes": list(found.notes)})
    return 0


def found_fields(found: Tied) -> dict[str, object]:
    """What holds the same, as values that JSON has."""
    return {
        "source": found.path,
        "nbytes": found.nbytes,
        "savable_nbytes": found.savable_nbytes,
        "groups": [
            {
                "names": [member.name for member in group.members],
                "dtype": str(group.members[0].dtype),
                "shape": list(group.members[0].shape),
                "storages": group.storages,
                "savable_nbytes": group.savable_nbytes,
            }
            for group in found.groups
        ],
    }
