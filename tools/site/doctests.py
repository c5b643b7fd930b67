"""An extension of griffe: the examples in docstrings (`>>> …`, and what is printed) are shown as code."""

from __future__ import annotations

import re

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)+", re.MULTILINE)
"""From a prompt to the next empty line."""


class Doctests(griffe.Extension):
    """Called for everything that griffe has read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring and ">>> " in obj.docstring.value:
            obj.docstring.value = EXAMPLE.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value
            )
