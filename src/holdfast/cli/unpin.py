"""`holdfast unpin`: a pinned step is left to the rules again."""

from __future__ import annotations

import argparse

from holdfast.cli.pin import add_place, say

DESCRIPTION = "Leave a pinned step to the rules again."

EXAMPLES = """\
examples:
  holdfast unpin runs/llama 10000
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    add_place(verb)
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    from holdfast.runs.run import Run

    pin = Run(options.path).unpin(options.step)
    say(f"step {pin.step} is not pinned any more" + (f" ({pin.why})" if pin.why else ""))
    return 0
