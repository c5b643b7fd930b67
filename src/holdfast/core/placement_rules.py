"""Rules that say how tensors are cut over the axes of a mesh, by globs on their names.

    *.q_proj.weight: tp=0          dimension 0 over tp
    *.o_proj.weight: tp=1, dp=0    two dimensions over two axes
    norm.*: replicate              not at all

Of several rules the first that matches a name decides. `reshard` cuts by them, and files of ranks are put together by them.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.value import Value
from holdfast.errors import BadPlacement

__all__ = ["Rule", "parse_rule"]

REPLICATE = "replicate"


class Rule(Value, frozen=True):
    """Names, and which dimension each axis of the mesh shards."""

    pattern: str
    axes: Mapping[str, int]
    """From the name of a mesh axis to the dimension of the tensor; axes that are not here replicate."""


def parse_rule(text: str) -> Rule:
    """A rule from text.

    >>> parse_rule("*.weight: tp=0, dp=1")
    Rule(pattern='*.weight', axes={'tp': 0, 'dp': 1})
    """
    pattern, colon, placed = text.rpartition(":")
    axes: dict[str, int] = {}
    if colon and placed.strip() != REPLICATE:
        for part in placed.split(","):
            name, equals, dimension = part.partition("=")
            if not equals or not dimension.strip().lstrip("-").isdecimal() or name.strip() in axes:
                colon = ""
                break
            axes[name.strip()] = int(dimension)
    if not colon or not pattern.strip():
        raise BadPlacement(f"a rule is written like '*.weight: tp=0' or 'norm.*: replicate', not {text!r}")
    return Rule(pattern.strip(), axes)
