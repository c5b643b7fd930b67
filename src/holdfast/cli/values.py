"""Numbers, pairs and paths on the command line, as `type=` of an argument.

A path is what `holdfast.stores.paths` makes of it, or its sentence.
"""

from __future__ import annotations

import argparse
from pathlib import Path

PATH_HELP = "checkpoint of any format: a file, a directory, or a URL"
JSON_HELP = "print the result as JSON"
QUIET_HELP = "do not show a progress bar"


def pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form OLD=NEW")
    return key, value


def size(text: str) -> int:
    from holdfast.core.quantities import parse_nbytes
    from holdfast.errors import Unsupported

    try:
        return parse_nbytes(text)
    except Unsupported as error:
        raise argparse.ArgumentTypeError(error.message) from None


def positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def path(text: str) -> Path:
    """Something to read, or a file to write."""
    return Path(target(text))  # of a URL it takes a slash, which `place_of` gives back


def file(text: str) -> Path:
    from holdfast.errors import BadPath
    from holdfast.stores.paths import local_path

    try:
        return Path(local_path(text))
    except BadPath as error:
        raise argparse.ArgumentTypeError(error.message) from None


def target(text: str) -> str:
    """Where to write a checkpoint: as text, since a slash at its end says that it is a directory."""
    from holdfast.errors import BadPath
    from holdfast.stores.paths import place_of

    try:
        return place_of(text)
    except BadPath as error:
        raise argparse.ArgumentTypeError(error.message) from None


def written_format(text: str) -> str:
    """Return the name of a format, or refuse it if no checkpoint can be written in it."""
    from holdfast.formats import choose_written
    from holdfast.verbs.shared.formats import explain_unwritten

    if choose_written(text) is None:
        raise argparse.ArgumentTypeError(explain_unwritten(text))
    return text


def step(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step number")
    return int(text)


def metric(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        if equals and name:
            return name, float(value)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=NUMBER")
