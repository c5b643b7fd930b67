"""`holdfast pin`: a step that no rule deletes. `holdfast unpin` takes the same two places."""

from __future__ import annotations

import argparse

from holdfast.cli import values
from holdfast.cli.planned import say

DESCRIPTION = """\
Protect a step of a run from deletion by the retention rules. The run may be active."""

EXAMPLES = """\
examples:
  holdfast pin runs/llama 10000 --why paper

  # List the steps, with their pins.
  holdfast runs runs/llama

  # Remove the pin.
  holdfast unpin runs/llama 10000
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_place(verb)
    verb.add_argument("--why", metavar="TEXT", default="", help="reason to record with the pin")


def add_place(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="RUN", type=values.target, help="directory or URL of a run")
    verb.add_argument("step", metavar="STEP", type=values.step, help="number of a step")


def run(options: argparse.Namespace) -> int:
    from holdfast.extras.runs.run import Run

    pin = Run(options.path).pin(options.step, options.why)
    say(f"step {pin.step} is pinned" + (f": {pin.why}" if pin.why else ""))
    return 0
