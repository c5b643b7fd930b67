"""`holdfast edit`: a checkpoint with other names, dtypes, metadata, or less in it; beside the old one or in its place."""

from __future__ import annotations

import argparse

from holdfast.cli.convert import conversion_fields, rate
from holdfast.cli.options import given
from holdfast.cli.planned import add_places, carry_out
from holdfast.core.options import EditOptions

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
    add_places(verb, EditOptions)


def run(options: argparse.Namespace) -> int:
    from holdfast.verbs.convert import plan_edit

    planned = plan_edit(options.src, options.dst, given(options, EditOptions))
    return carry_out(planned, "Editing", options, fields=conversion_fields, more=rate)
