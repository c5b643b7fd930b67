"""Numbers and pairs on the command line, as `type=` of an argument."""

from __future__ import annotations

import argparse

__all__ = ["pair", "positive", "size"]


def pair(text: str) -> tuple[str, str]:
    """OLD=NEW."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form OLD=NEW")
    return key, value


def size(text: str) -> int:
    """A number of bytes, as people write it."""
    from holdfast.engine.budget import byte_count
    from holdfast.errors import Unsupported

    try:
        return byte_count(text)
    except Unsupported as error:
        raise argparse.ArgumentTypeError(error.message) from None


def positive(text: str) -> int:
    """A number from 1 on."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)
