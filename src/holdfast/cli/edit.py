"""`holdfast edit`: a checkpoint with other names, dtypes, metadata, or less in it; beside the old one or in its place."""

from __future__ import annotations

import argparse

from holdfast.cli.convert import add_edits, conversion_fields, edits_of, rate
from holdfast.cli.planned import add_place, add_writing, carry_out, copy_config, writing
from holdfast.cli.values import pair

DESCRIPTION = """\
Rename, drop, keep and cast tensors and values, and set metadata: a new checkpoint, or, with --in-place, one in
place of the old. A reader sees the old one or the new one, never a half; a failed edit leaves the old one.
"""

EXAMPLES = """\
patterns:
  globs on dotted names; * matches dots, too. Each * of a new name stands for what that * of the old one matched.

examples:
  holdfast edit model.pt renamed.pt --rename 'model.*=*'
  holdfast edit model.pt --in-place --drop 'optimizer.*'
  holdfast edit llama/ --in-place --dtype bf16                       config, tokenizer and all else stay in the folder
  holdfast edit model.safetensors small.safetensors --dtype bf16 --set licence=apache-2.0 --unset author
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    add_place(verb)
    add_edits(verb)
    verb.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], type=pair, help="set metadata")
    verb.add_argument("--unset", metavar="KEY", action="append", default=[], help="take metadata out")
    add_writing(verb)
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    from holdfast.rewrite.convert import metadata_changes, plan_edit

    planned = plan_edit(
        options.src, options.dst, in_place=options.in_place, format=options.format, edits=edits_of(options),
        metadata=metadata_changes(dict(options.set), options.unset), max_shard_size=options.max_shard_size,
        copy_config=copy_config(options), writing=writing(options),
    )  # fmt: skip
    return carry_out(planned, "Editing", options, fields=conversion_fields, more=rate)
