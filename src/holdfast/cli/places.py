"""Paths on the command line, as `type=` of an argument: what `holdfast.stores.paths` makes of them, or its sentence."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["path", "target"]


def path(text: str) -> Path:
    """Something to read, or a file to write."""
    return Path(target(text))


def target(text: str) -> str:
    """Where to write a checkpoint: as text, since a slash at its end says that it is a directory."""
    from holdfast.errors import BadPath
    from holdfast.stores.paths import local_path

    try:
        return local_path(text)
    except BadPath as error:
        raise argparse.ArgumentTypeError(error.message) from None
