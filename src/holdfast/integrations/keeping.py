"""Which sealed folders of a trainer stay: the newest that are whole. What is torn is not counted, and is left to a person."""

from __future__ import annotations

import shutil

from holdfast.inspect.sealed import whole_steps
from holdfast.rewrite.seal import unseal

__all__ = ["keep_newest"]


def keep_newest(folder: str, count: int) -> None:
    """Remove all sealed steps in a folder but the newest so many. To be asked when a new one is sealed, and never before.

    The seal goes first, so that what is half removed never looks like a step.
    """
    for _, path in list(whole_steps(folder))[count:]:
        unseal(path)
        shutil.rmtree(path)
