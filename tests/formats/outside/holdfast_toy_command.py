"""A command of another package: `holdfast toys FILE` prints the names of the tensors in a toy."""

from __future__ import annotations

import argparse

import holdfast

DESCRIPTION = "Print the names of the tensors in a toy."

EXAMPLES = """\
examples:
  holdfast toys model.toy
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("file", metavar="FILE", help="a .toy file")


def run(options: argparse.Namespace) -> int:
    with holdfast.open(options.file) as checkpoint:
        for name in checkpoint:
            print(name)
    return 0
