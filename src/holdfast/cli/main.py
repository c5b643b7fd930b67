"""The `holdfast` command: its verbs and options, its exit codes, and the one place where an error becomes a line on stderr.

Exit codes: 0 done (for `scan`: clean; for `diff`: the same), 1 `scan` found something suspicious, `verify` something damaged,
`diff` something different, 2 an error or wrong usage, 3 and 4 `scan` found only what is unknown, or nothing to scan, 3 `verify
--strict` nothing to compare with, 130
interrupted, 141 nobody reads our output any more. There is no traceback unless `--traceback` asks for one.

argparse, because it starts in 10 ms: typer takes 60, and since 0.29 another 80 for pydantic as soon as a command runs,
which together are half of what `holdfast show` may take. Each verb imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import NoReturn

from holdfast.cli import values
from holdfast.cli.parser import Help, Parser
from holdfast.cli.text import print_lines
from holdfast.cli.values import positive
from holdfast.core.text import clip, escape


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Nothing but the exit code comes out."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show a character shows another one, or its code (text.plainer).
            stream.reconfigure(errors="holdfast")
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
        said = _sentences(error, sys.argv[1:] if arguments is None else arguments)
        print_lines(([(escape(clip(line, 2000)), "")] for line in said), file=sys.stderr)
        return 2


def _pipe_closed() -> int:
    """The reader of our output went away, as `head` does.

    Python would complain when it flushes at exit: give it nothing to flush into.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141  # 128 + SIGPIPE, as the shell reports it for other tools


def _sentences(error: Exception, arguments: Sequence[str]) -> list[str]:
    """The line that is printed; where there is a list of problems, a line each. Keywords of the library are flags here."""
    from holdfast.cli.flags import in_flags, options_of
    from holdfast.errors import CannotHold, HoldfastError

    verb = Parser()
    verb.fill = next((VERBS[argument][1] for argument in arguments if argument in VERBS), None)
    known = [flag for action in options_of(verb.filled()) for flag in action.option_strings]
    if isinstance(error, CannotHold):
        lines = [f"holdfast: {error.what}", *(f"  - {problem}" for problem in error.shown)]
    else:
        lines = [f"holdfast: {_sentence(error)}"]
    return [in_flags(line, known) for line in lines] if isinstance(error, HoldfastError) else lines


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


DESCRIPTION = "Open any PyTorch-family checkpoint without running the code inside it."

EXAMPLES = """\
examples:
  holdfast show model.pt                     what is in it
  holdfast read model.pt layers.0.weight     one tensor, and only its bytes
  holdfast scan downloads/                   what the pickles would have done
  holdfast verify model.pt                   whether every byte is as it was written
  holdfast diff old.pt new.safetensors       what is different
  holdfast report model.pt -o page.html      a page to look at it
  holdfast convert model.pt model.safetensors
  holdfast edit model.pt small.pt --drop 'optimizer.*'
"""

SHOW = """\
Show what is in a checkpoint: names, dtypes, shapes, sizes, ties, plain values, foreign objects. No tensor data is read.
Layers of the same structure are shown once, as layers.[0-31].
"""

SHOW_EXAMPLES = """\
examples:
  holdfast show model.pt
  holdfast show model.pt --filter '*.attn.*'
  holdfast show model.pt --filter optimizer.param_groups
  holdfast show model.safetensors --depth 2
  holdfast show model.pt --json | jq '.tensors[].name'
"""

READ = """\
Read tensors: print them as numpy does, or write them to a file. Only the bytes that are asked for are read.
bfloat16 and the 8-, 6- and 4-bit floats are printed and written as float32, which holds them exactly.
The name of something that is no tensor prints that: a number, a text, all values below it.
"""

READ_EXAMPLES = """\
examples:
  holdfast read model.pt layers.0.weight
  holdfast read model.pt layers.0.weight --slice '0:2, ::2, -1'
  holdfast read model.pt layers.0.weight -o weight.npy
  holdfast read trainer.pt step optimizer.param_groups
  holdfast read model.pt 'layers.0.*' -o layer0.npz
"""

SCAN = """\
Say what files would have done if a trusting loader had loaded them: each foreign global, how bad, and where.
Nothing is loaded, imported or called to find out. In directories, what no loader would do anything with is skipped, and named.
"""

SCAN_EXAMPLES = """\
exit codes:
  0  clean: all of it was read, and nothing was found
  1  something dangerous or suspicious (with --strict: or unknown), whatever else could not be read
  2  nothing was found, but something could not be read to its end, or was refused
  3  something unknown, and nothing worse was found
  4  nothing scanned: no file that any loader would do anything with

examples:
  holdfast scan model.pt
  holdfast scan ~/.cache/huggingface --strict
  holdfast scan *.ckpt --json
"""

VERIFY = """\
Check whole checkpoints against the checksums that they record, and name every damage: file, tensors, byte.
Where none are recorded (every plain safetensors), the structure is checked, every byte is read, and the verdict is "readable,
nothing to compare": --strict makes a failure of it.
"""

VERIFY_EXAMPLES = """\
exit codes:
  0  nothing is wrong
  1  something is damaged
  2  a file could not be opened or read
  3  with --strict: nothing is wrong, but not every tensor has a checksum to be compared with

examples:
  holdfast verify model.pt
  holdfast verify checkpoints/step-*
  holdfast verify out/checkpoint-500         sealed: every file by name, size and digest
  holdfast verify model/ --strict            a gate: what has no checksums does not pass
  holdfast verify model/ --json
"""

DIFF = """\
Compare two checkpoints of any formats: tensors added, removed, renamed and changed, and plain values.
Tensors for which both files record the same checksum are not read. NaN and Inf that appeared come first, then the largest changes.
"""

DIFF_EXAMPLES = """\
exit codes, as those of diff(1):
  0  the same
  1  different
  2  trouble

examples:
  holdfast diff old.pt new.pt
  holdfast diff model.pt model.safetensors --exact
  holdfast diff trainer.ckpt model.safetensors --rename 'state_dict.*=*' --filter '*.weight' --tensors-only
  holdfast diff base/ tuned/ --top 10         the ten largest changes
  holdfast diff old.pt new.pt --json | jq '.changed[].name'
"""


class Version(argparse.Action):
    """`--version`; the version is looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        from holdfast import __version__

        sys.stdout.write(f"holdfast {__version__}\n")
        parser.exit()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; `run` is the function of the verb. Raises `SystemExit` as argparse does."""
    whole = parser()
    options, late = whole.parse_known_args(_with_slices_joined(arguments))
    # argparse settles an optional place as soon as an option comes: `edit SRC --drop x DST` leaves DST over.
    more = [] if any(text.startswith("-") for text in late) else late
    if more and getattr(options, "several", False):
        options.models += more
    elif len(more) == 1 and getattr(options, "dst", "") is None:
        options.dst = whole.placed(values.target, more[0])
    elif late:
        whole.error(f"unrecognized arguments: {' '.join(late)}")
    return options


def _with_slices_joined(arguments: Sequence[str]) -> list[str]:
    """`--slice -2:` as `--slice=-2:`, because argparse takes `-2:` for an option."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in ("-s", "--slice") and "--" not in joined:
            joined[-1] = f"--slice={argument}"
        else:
            joined.append(argument)
    return joined


def parser() -> Parser:
    """All of the command line."""
    whole = Parser(
        prog="holdfast",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=Help,
    )
    whole.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    whole.add_argument("--traceback", action="store_true", help="show where in Holdfast an error came from")
    whole.set_defaults(run=lambda options: _help(whole))
    verbs = whole.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser, prog="holdfast")
    for name, (short, fill) in VERBS.items():
        verbs.add_parser(name, help=short, formatter_class=Help).fill = fill
    return whole


def _help(whole: argparse.ArgumentParser) -> int:
    whole.print_help()
    return 0


PATH_HELP = "a checkpoint: .pt, .pth, .bin, .ckpt, .safetensors, or a directory"
JSON_HELP = "print one JSON document (its schema is in docs/cli.md)"
QUIET_HELP = "no progress bar"


def _add_show(verb: Parser) -> None:
    verb.description, verb.epilog = SHOW, SHOW_EXAMPLES
    verb.add_argument("path", metavar="PATH", type=values.path, help=PATH_HELP)
    verb.add_argument("-f", "--filter", metavar="GLOB", help="only names that match; a flat table")
    verb.add_argument("-d", "--depth", metavar="N", type=positive, help="levels of the tree to show")
    verb.add_argument("-a", "--all", action="store_true", help="every line, with nothing folded or cut")
    verb.add_argument("--ranks", action="store_true", help="draw which file holds which part of each tensor")
    verb.add_argument("--sparsity", action="store_true", help="where the zeros of each tensor are; reads them all")
    verb.add_argument("--json", action="store_true", help=JSON_HELP)
    verb.set_defaults(run=_run_show)


def _add_read(verb: Parser) -> None:
    verb.description, verb.epilog = READ, READ_EXAMPLES
    verb.add_argument("path", metavar="PATH", type=values.path, help=PATH_HELP)
    verb.add_argument("names", metavar="NAME", nargs="+", help="names of tensors or values, or globs")
    verb.add_argument("-s", "--slice", metavar="INDEX", help="as in numpy: '0:2, ::2, -1', '...', 'None'")
    verb.add_argument("-o", "--output", metavar="FILE", type=values.file, help="write .npy or .npz instead of printing")
    verb.add_argument("--raw", action="store_true", help="with -o: keep the bits of types that numpy lacks, as unsigned integers")
    verb.set_defaults(run=_run_read)


def _add_scan(verb: Parser) -> None:
    verb.description, verb.epilog = SCAN, SCAN_EXAMPLES
    verb.add_argument("paths", metavar="PATH", type=values.path, nargs="+", help="files, and directories to search")
    verb.add_argument("--strict", action="store_true", help="count unknown globals as suspicious")
    verb.add_argument("-a", "--all", action="store_true", help="every finding of every file")
    verb.add_argument("--allow", metavar="FILE", type=values.file, help="patterns of module.name, one a line: shown, not counted")
    form = verb.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help=JSON_HELP)
    form.add_argument("--sarif", action="store_true", help="as SARIF 2.1.0")
    verb.set_defaults(run=_run_scan)


def _add_verify(verb: Parser) -> None:
    verb.description, verb.epilog = VERIFY, VERIFY_EXAMPLES
    verb.add_argument("paths", metavar="PATH", type=values.path, nargs="+", help="checkpoints, files or directories")
    verb.add_argument("--strict", action="store_true", help="what has no checksum to be compared with is a failure (exit code 3)")
    verb.add_argument("-a", "--all", action="store_true", help="every damage")
    verb.add_argument("-q", "--quiet", action="store_true", help=QUIET_HELP)
    verb.add_argument("--json", action="store_true", help=JSON_HELP)
    verb.set_defaults(run=_run_verify)


def _add_diff(verb: Parser) -> None:
    verb.description, verb.epilog = DIFF, DIFF_EXAMPLES
    verb.add_argument("a", metavar="A", type=values.path, help=PATH_HELP)
    verb.add_argument("b", metavar="B", type=values.path, help="another one")
    verb.add_argument("-f", "--filter", metavar="GLOB", help="only names that match, on both sides")
    verb.add_argument("--rename", metavar="OLD=NEW", action="append", default=[], type=values.pair, help="names of A: 'model.*=*'")
    verb.add_argument("--tensors-only", action="store_true", help="leave out what is no tensor")
    verb.add_argument("-e", "--exact", action="store_true", help="compare bytes even where checksums agree")
    told = "changed tensors by: change, the largest first (default); name; file"
    verb.add_argument("--sort", choices=("change", "name", "file"), help=told)
    verb.add_argument("--top", metavar="N", type=positive, help="of the changed tensors, the first N")
    verb.add_argument("-a", "--all", action="store_true", help="every difference")
    verb.add_argument("-q", "--quiet", action="store_true", help=QUIET_HELP)
    verb.add_argument("--json", action="store_true", help=JSON_HELP)
    verb.set_defaults(run=_run_diff)


def _run_show(options: argparse.Namespace) -> int:
    if options.ranks:
        from holdfast.cli.ranks import run as draw

        return draw(options.path, pattern=options.filter)
    if options.sparsity:
        from holdfast.cli.stats import run_sparsity

        return run_sparsity(options.path, pattern=options.filter, everything=options.all, as_json=options.json)
    from holdfast.cli.show import run

    return run(options.path, pattern=options.filter, depth=options.depth, everything=options.all, as_json=options.json)


def _run_read(options: argparse.Namespace) -> int:
    from holdfast.cli.read import run

    return run(options.path, options.names, index=options.slice, output=options.output, raw=options.raw)


def _run_scan(options: argparse.Namespace) -> int:
    from holdfast.cli.scan import run

    return run(
        options.paths, strict=options.strict, everything=options.all, as_json=options.json, as_sarif=options.sarif,
        allow=options.allow,
    )  # fmt: skip


def _run_verify(options: argparse.Namespace) -> int:
    from holdfast.cli.verify import run

    return run(options.paths, strict=options.strict, everything=options.all, quiet=options.quiet, as_json=options.json)


def _run_diff(options: argparse.Namespace) -> int:
    from holdfast.cli.diff import run

    return run(options)


def _add(module: str, verb: Parser) -> None:
    """What a verb with a module of its own takes."""
    of = import_module(f"holdfast.cli.{module}")
    verb.description, verb.epilog = of.DESCRIPTION, of.EXAMPLES
    of.add_arguments(verb)


VERBS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "show": ("show what is in a checkpoint", _add_show),
    "read": ("print tensors, or write them as .npy or .npz", _add_read),
    "scan": ("say what pickles would have done", _add_scan),
    "verify": ("check every byte against its checksum", _add_verify),
    "diff": ("say how two checkpoints differ", _add_diff),
    "convert": ("write a checkpoint in another format", partial(_add, "convert")),
    "edit": ("rename, drop, cast, set metadata", partial(_add, "edit")),
    "cp": ("copy a checkpoint as it is", partial(_add, "copy")),
    "reshard": ("cut a checkpoint for a mesh of ranks", partial(_add, "reshard")),
    "prune": ("set weights to zero by rules", partial(_add, "prune")),
    "stats": ("say what the numbers look like", partial(_add, "stats")),
    "report": ("write a page to look at", partial(_add, "report")),
    "view": ("look at it in the browser", partial(_add, "view")),
    "package": ("several models in one checkpoint", partial(_add, "package")),
    "tie": ("find equal tensors, and store them once", partial(_add, "tie")),
    "compact": ("drop bytes that no tensor reaches", partial(_add, "compact")),
    "runs": ("list the steps of a run", partial(_add, "runs")),
    "pin": ("keep a step of a run", partial(_add, "pin")),
    "unpin": ("leave it to the rules", partial(_add, "unpin")),
    "seal": ("say that a folder is whole", partial(_add, "seal")),
    "completion": ("teach a shell", partial(_add, "completion")),
}
"""Every verb: what it does, in a few words, and what adds the options to its parser when they are asked for."""
