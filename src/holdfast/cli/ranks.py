"""One command in many processes: `torchrun --nproc-per-node 8 -m holdfast convert SRC DST`.

`torchrun` starts the same command in every process, and tells each its rank in its environment. There the verb is given the group
of all of them (`holdfast.torch.group`), and shares its work out. The first rank alone prints, draws the bar, and has an exit status
that says something. The others are silent: what went wrong on one of them the first rank says. Only where that one is lost they
speak for themselves. Without these variables nothing here is imported, and torch is not either.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout

TOGETHER = frozenset(
    {"convert", "edit", "cp", "reshard", "prune", "verify", "diff", "stats", "scan", "report"}
)
"""The verbs that share their work out."""

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def add_deadline(verb: argparse.ArgumentParser) -> None:
    text = "if started by torchrun on several ranks: consider a rank lost after this many seconds without a heartbeat (default: 60)"
    verb.add_argument(
        "--deadline", metavar="SECONDS", type=_seconds, default=argparse.SUPPRESS, help=text
    )


def _seconds(text: str) -> float:
    from holdfast.core.quantities import parse_seconds
    from holdfast.errors import BadArgument

    try:
        return parse_seconds(text, "--deadline")
    except BadArgument as error:
        raise argparse.ArgumentTypeError(error.message) from None


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several that were started together.

    >>> is_launched({}), is_launched({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    (False, True)
    """
    return all(environment.get(name) for name in LAUNCHED) and environment["WORLD_SIZE"] != "1"


def run(options: argparse.Namespace) -> int:
    """Run a verb that shares its work out, in this process or in all that were started with it; its exit code."""
    options.group = None
    if not is_launched(os.environ):
        return int(options.run(options))
    import holdfast
    from holdfast.core.options import DEADLINE
    from holdfast.errors import DurabilityUncertain, RanksFailed, Unsupported

    try:
        torch = holdfast.torch
    except AttributeError as error:
        advice = "install torch, or unset RANK and WORLD_SIZE to work in this process alone"
        raise Unsupported(
            f"{error}; RANK and WORLD_SIZE say that this process is one of several ranks: {advice}"
        ) from None
    options.group = torch.group(deadline=getattr(options, "deadline", DEADLINE))
    if options.group.rank == 0:
        return int(options.run(options))
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            options.run(options)
    except (RanksFailed, DurabilityUncertain):
        pass  # the first rank says so
    return 0
