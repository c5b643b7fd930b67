"""`holdfast cp`: a checkpoint as it is, to another place."""

from __future__ import annotations

import argparse

from holdfast.cli.convert import rate
from holdfast.cli.options import given
from holdfast.cli.planned import add_places, carry_out
from holdfast.core.options import CopyOptions

DESCRIPTION = """\
Copy a checkpoint byte for byte, with all files of its folder, between disks and buckets (s3://,
gs://, az://). The command verifies the checksums of the data that it copies. Within one bucket, the
server copies the objects itself, so that no data passes through this machine and no checksums are
verified.
"""

EXAMPLES = """\
examples:
  # Upload a checkpoint, or download it.
  holdfast cp step-1000 s3://bucket/run/step-1000
  holdfast cp s3://bucket/run/step-1000 step-1000-copy

  # Copy from one cloud to another.
  holdfast cp s3://bucket/run/step-1000 gs://other/run/step-1000

  # Replace a checkpoint in a bucket.
  holdfast cp s3://bucket/run/step-1000 s3://bucket/best --overwrite
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_places(verb, CopyOptions)


def run(options: argparse.Namespace) -> int:
    from holdfast.verbs.copy import plan_copy

    planned = plan_copy(options.src, options.dst, given(options, CopyOptions))
    return carry_out(
        planned, "Copying", options, more=rate,
        fields=lambda done: {
            "source": done.source, "checked_nbytes": done.checked_nbytes, "by_store_nbytes": done.shared_nbytes,
        },
    )  # fmt: skip
