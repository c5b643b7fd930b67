"""Python runs this at the start of every process of a program under test: in the ones that it starts itself as well.

With `PROGRAMS_CALLS` set, Holdfast is put in place of torch's functions before the program's first line, and each call of `save`
and `load` adds one letter to the file of that name: evidence that a program which passes did go through Holdfast.
With `PROGRAMS_SEED`, with Holdfast or without, chance starts at that number, so that what two runs leave behind can be compared.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable


def _install(calls: str) -> None:
    import torch

    import holdfast.torch

    holdfast.torch.install()

    def counted(function: Callable[..., object], letter: bytes) -> Callable[..., object]:
        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            # Opened each time: a process may have forked, or may end without a word.
            fd = os.open(calls, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(fd, letter)
            os.close(fd)
            return function(*args, **kwargs)

        return call

    torch.save = torch.serialization.save = counted(torch.save, b"s")
    torch.load = torch.serialization.load = counted(torch.load, b"l")


def _seed(number: int) -> None:
    import random

    import numpy as np
    import torch

    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


if os.environ.get("PROGRAMS_SEED"):
    _seed(int(os.environ["PROGRAMS_SEED"]))
if os.environ.get("PROGRAMS_CALLS"):
    _install(os.environ["PROGRAMS_CALLS"])
