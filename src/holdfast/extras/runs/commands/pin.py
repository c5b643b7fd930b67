"""`holdfast pin`: a step that no rule deletes. `holdfast unpin` takes the same two places."""

from __future__ import annotations

import argparse

from holdfast.cli import values
from holdfast.cli.planned import say

DESCRIPTION = """\
Keep a step of a run, whatever its rules say, and note why. The run may be going on."""

EXAMPLES = """\
examples:
  holdfast pin runs/llama 10000 --why paper
  holdfast runs runs/llama                      says which are pinned
  holdfast unpin runs/llama 10000
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_place(verb)
    verb.add_argument("--why", metavar="TEXT", default="", help="what it is kept for")


def add_place(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "path", metavar="RUN", type=values.target, help="the directory of a run, or its URL"
    )
    verb.add_argument("step", metavar="STEP", type=values.step, help="the number of a step")


def run(options: argparse.Namespace) -> int:
    from holdfast.extras.runs.run import Run

    pin = Run(options.path).pin(options.step, options.why)
    say(f"step {pin.step} is pinned" + (f": {pin.why}" if pin.why else ""))
    return 0
