"""`holdfast unpin`: a pinned step is left to the rules again."""

from __future__ import annotations

import argparse

from holdfast.cli.planned import say
from holdfast.extras.runs.commands.pin import add_place

DESCRIPTION = """\
Remove the pin of a step, so that the retention rules of the run apply to it again."""

EXAMPLES = """\
examples:
  holdfast unpin runs/llama 10000
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_place(verb)


def run(options: argparse.Namespace) -> int:
    from holdfast.extras.runs.run import Run

    pin = Run(options.path).unpin(options.step)
    say(f"step {pin.step} is no longer pinned" + (f" ({pin.why})" if pin.why else ""))
    return 0
