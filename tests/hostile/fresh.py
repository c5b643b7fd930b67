"""Everything that one does with a file, in a process that has imported Holdfast and opened nothing yet.

    python -m tests.hostile.fresh FILE…

Most of the package is imported when it is first needed, so the watch is told apart from it by one rule: a module of Holdfast, of
Python or of a library that Holdfast depends on may be imported by its name, out of its file, and whatever happens while that module
is being imported is the module's own doing. Outside of that nothing is imported, compiled or executed; and nothing at all when the
same is done again. Prints the events that break the rule, as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from types import FrameType

import holdfast
from holdfast.errors import HoldfastError

from .harness import FORBIDDEN, survey

__all__ = ["LIBRARIES", "broken"]

LIBRARIES = {
    "holdfast",
    "numpy",
    "ml_dtypes",
    "msgspec",
    "rich",
    "zstandard",
    "obstore",
    *sys.stdlib_module_names,
}

LOADS = "_load_unlocked"
"""What of Python's import machinery makes a module and executes its file."""


def importing() -> bool:
    """Whether a module is being imported: then what is compiled and executed is that module, or what it makes of itself."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if (
            frame.f_code.co_name == LOADS
            and frame.f_code.co_filename == "<frozen importlib._bootstrap>"
        ):
            return True
        frame = frame.f_back
    return False


def forbidden(event: str, args: tuple[object, ...]) -> bool:
    """Whether an event is one that opening a file must not cause, once all modules are there."""
    return event.startswith(FORBIDDEN)


def broken(event: str, args: tuple[object, ...]) -> bool:
    """Whether an event is one that opening a file must not cause."""
    if not forbidden(event, args) or importing():
        return False
    return event != "import" or str(args[0]).partition(".")[0] not in LIBRARIES


def look(path: str) -> None:
    """What a person does with a file."""
    from holdfast.cli.main import main

    with contextlib.suppress(HoldfastError), holdfast.open(path) as ckpt:
        survey(ckpt)
        str(ckpt._repr_html_())
        ckpt.describe()
        ckpt.read()
        ckpt.digest()
    for verb in (
        ["show"],
        ["show", "--json"],
        ["show", "--all"],
        ["show", "--ranks"],
        ["scan"],
        ["verify"],
        ["stats"],
    ):
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.suppress(SystemExit),
        ):
            main([*verb, path])


def watched(paths: list[str]) -> list[str]:
    """The events of all files that break the rule."""
    seen: list[str] = []
    rule = broken
    sys.addaudithook(
        lambda event, args: (
            seen.append(f"{event} {str(args[:2])[:200]}") if rule(event, args) else None
        )
    )
    for path in paths:
        look(path)
    rule = forbidden
    for path in paths:
        look(path)
    return list(seen)


if __name__ == "__main__":
    print(json.dumps(watched(sys.argv[1:])))
