"""`holdfast edit`: a checkpoint with other names, dtypes, metadata, or less in it; beside the old one or in its place."""

from __future__ import annotations

import argparse

from holdfast.cli.convert import conversion_fields, rate
from holdfast.cli.options import given
from holdfast.cli.planned import add_places, carry_out
from holdfast.core.options import EditOptions

DESCRIPTION = """\
Rename, drop and cast tensors, and set metadata. Write the result to DST, or replace SRC with
--in-place. If the edit fails, the old checkpoint stays as it was.
"""

EXAMPLES = """\
patterns:
  A pattern is a glob on the dotted name, and * also matches dots. In a
  rename, the first * in NEW is replaced with the text that the first * in OLD
  matched, and so on.

examples:
  # Remove a prefix from all names.
  holdfast edit model.pt renamed.pt --rename 'model.*=*'

  # Drop the optimizer, in place.
  holdfast edit trainer.pt --in-place --drop 'optimizer.*'

  # Cast a model in its folder. The config and tokenizer files stay.
  holdfast edit llama/ --in-place --dtype bf16

  # Change the metadata.
  holdfast edit model.safetensors new.safetensors \\
      --set license=apache-2.0 --unset author
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_places(verb, EditOptions)


def run(options: argparse.Namespace) -> int:
    from holdfast.verbs.convert import plan_edit

    planned = plan_edit(options.src, options.dst, given(options, EditOptions))
    return carry_out(planned, "Editing", options, fields=conversion_fields, more=rate)
