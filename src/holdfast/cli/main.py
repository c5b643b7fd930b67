"""The `holdfast` command: its exit codes, and the one place where an error becomes a line on stderr.

Exit codes: 0 done (for `scan`: clean; for `diff`: the same), 1 `scan` found something suspicious, `verify` something damaged,
`diff` something different, 2 an error or wrong usage, 3 and 4 `scan` found only what is unknown, or nothing to scan, 130
interrupted, 141 nobody reads our output any more. There is no traceback unless `--traceback` asks for one.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from holdfast.cli.arguments import parse
from holdfast.cli.text import clip, escape

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Nothing but the exit code comes out."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show a character shows its code.
            stream.reconfigure(errors="backslashreplace")
    # Looking for cycles among the million objects of a large checkpoint, again and again, would take half of the time.
    gc.set_threshold(200_000)
    traceback = False
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        traceback = options.traceback
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse ends --help, --version and wrong usage this way
        return stop.code if isinstance(stop.code, int) else 2
    except BrokenPipeError:
        return _pipe_closed()
    except KeyboardInterrupt:
        sys.stderr.write("holdfast: interrupted\n")
        return 130
    except Exception as error:
        if traceback:
            raise
        for line in _sentences(error):
            sys.stderr.write(f"{escape(clip(line, 2000))}\n")
        return 2


def _pipe_closed() -> int:
    """The reader of our output went away, as `head` does.

    Python would complain when it flushes at exit: give it nothing to flush into.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141  # 128 + SIGPIPE, as the shell reports it for other tools


def _sentences(error: Exception) -> list[str]:
    """The line that is printed; where there is a list of problems, a line each."""
    from holdfast.errors import CannotHold

    if isinstance(error, CannotHold):
        return [f"holdfast: {error.what}", *(f"  - {problem}" for problem in error.shown)]
    return [f"holdfast: {_sentence(error)}"]


def _sentence(error: Exception) -> str:
    """What to say about an error: its message where it is one of ours or of the system's; else that this is a bug."""
    from holdfast.errors import HoldfastError

    if isinstance(error, HoldfastError):
        return str(error)
    if isinstance(error, OSError):
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        where = f": {', '.join(map(repr, names))}" if names else ""
        return f"{error.strerror or type(error).__name__}{where}"
    if isinstance(error, MemoryError):
        return "out of memory"
    return f"internal error, please report it: {type(error).__name__}: {error} (holdfast --traceback … shows where)"
