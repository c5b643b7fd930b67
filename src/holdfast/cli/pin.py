"""`holdfast pin` and `holdfast unpin`: steps that no rule deletes."""

from __future__ import annotations

import argparse

from holdfast.cli import values

__all__ = ["DESCRIPTION", "EXAMPLES", "UNPIN", "UNPIN_EXAMPLES", "add_arguments", "add_unpin_arguments"]

DESCRIPTION = """\
Keep a step of a run, whatever its rules say, and note why. The run may be going on."""

EXAMPLES = """\
examples:
  holdfast pin runs/llama 10000 --why paper
  holdfast runs runs/llama                      says which are pinned
  holdfast unpin runs/llama 10000
"""

UNPIN = "Leave a pinned step to the rules again."

UNPIN_EXAMPLES = """\
examples:
  holdfast unpin runs/llama 10000
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What `pin` takes."""
    _add_place(verb)
    verb.add_argument("--why", metavar="TEXT", default="", help="what it is kept for")
    verb.set_defaults(run=run)


def add_unpin_arguments(verb: argparse.ArgumentParser) -> None:
    """What `unpin` takes."""
    _add_place(verb)
    verb.set_defaults(run=run_unpin)


def _add_place(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="RUN", type=values.target, help="the directory of a run, or its URL")
    verb.add_argument("step", metavar="STEP", type=_step, help="the number of a step")


def _step(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of a step")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """`holdfast pin`."""
    from holdfast.runs.run import Run

    pin = Run(options.path).pin(options.step, options.why)
    _say(f"step {pin.step} is pinned" + (f": {pin.why}" if pin.why else ""))
    return 0


def run_unpin(options: argparse.Namespace) -> int:
    """`holdfast unpin`."""
    from holdfast.runs.run import Run

    pin = Run(options.path).unpin(options.step)
    _say(f"step {pin.step} is not pinned any more" + (f" ({pin.why})" if pin.why else ""))
    return 0


def _say(text: str) -> None:
    from holdfast.cli.text import clip, escape, print_lines

    print_lines([[(escape(clip(text, 600)), "")]])
