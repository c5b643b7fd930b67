"""The `holdfast` command: its verbs and options, its exit codes, and the one place where an error becomes a line on stderr.

Exit codes: 0 done (for `scan`: clean; for `diff`: the same), 1 `scan` found something suspicious, `verify` something damaged,
`diff` something different, 2 an error or wrong usage, 3 and 4 `scan` found only what is unknown, or nothing to scan, 3 `verify
--strict` nothing to compare with, 130 interrupted, 141 nobody reads our output any more. `--traceback` shows a traceback.

argparse, because it starts in 10 ms: typer takes 60, and since 0.29 another 80 for pydantic as soon as a command runs,
which together are half of what `holdfast show` may take. Each verb imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

from holdfast.cli import values
from holdfast.cli.parser import Help, Parser
from holdfast.cli.ranks import TOGETHER, add_deadline
from holdfast.cli.ranks import run as run_together
from holdfast.cli.text import print_lines
from holdfast.core.registry import (
    COMMANDS_GROUP,
    Plugin,
    find_plugins,
    get_extras_table,
    load_object,
)
from holdfast.core.text import clip, escape
from holdfast.errors import HoldfastWarning


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Nothing but the exit code comes out."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show a character shows another one, or its code (text.replace_unencodable).
            stream.reconfigure(errors="holdfast")
    # Looking for cycles among the million objects of a large checkpoint, again and again, would take half of the time.
    gc.set_threshold(200_000)
    traceback = False
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        traceback = options.traceback
        code = (
            run_together(options)
            if getattr(options, "together", False)
            else int(options.run(options))
        )
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse ends --help, --version and wrong usage this way
        return stop.code if isinstance(stop.code, int) else 2
    except BrokenPipeError:
        # The reader of our output went away, as `head` does. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, as the shell reports it for other tools
    except KeyboardInterrupt:
        sys.stderr.write("holdfast: interrupted\n")
        return 130
    except Exception as error:
        if traceback:
            raise
        lines = _sentences(error, sys.argv[1:] if arguments is None else arguments)
        print_lines(([(escape(clip(line, 2000)), "")] for line in lines), file=sys.stderr)
        return 2


def _sentences(error: Exception, arguments: Sequence[str]) -> list[str]:
    """The line of an error; where there is a list of problems, a line each. Keywords of the library are flags here."""
    from holdfast.cli.options import flags_of, in_flags
    from holdfast.errors import CannotHold, DoesNotFit, HoldfastError, LimitExceeded

    verb, commands = Parser(), find_commands()
    named = [commands[argument] for argument in arguments if argument in commands]
    verb.fill = partial(_add, named[0]) if named else None
    flags = flags_of(verb.filled())
    if isinstance(error, CannotHold | DoesNotFit) and error.shown_problems:
        lines = [
            f"holdfast: {error.summary}",
            *(f"  - {problem}" for problem in error.shown_problems),
        ]
    else:
        lines = [f"holdfast: {_sentence(error)}"]
    # The memory budget is no field of Limits, and its message says what to pass.
    if isinstance(error, LimitExceeded) and not error.message.startswith("max_memory"):
        lines[-1] += "; to raise the limit, pass limits=holdfast.Limits(…) in Python"
    return [in_flags(line, flags) for line in lines] if isinstance(error, HoldfastError) else lines


def _sentence(error: Exception) -> str:
    """The message of an error of ours or of the system; of any other that it is a bug."""
    from holdfast.errors import HoldfastError

    if isinstance(error, HoldfastError):
        return str(error)
    if isinstance(error, OSError):
        names = [
            os.fsdecode(name)
            for name in (error.filename, error.filename2)
            if isinstance(name, str | bytes)
        ]
        where = f": {', '.join(map(repr, names))}" if names else ""
        return f"{error.strerror or type(error).__name__}{where}"
    if isinstance(error, MemoryError):
        return "out of memory"
    return f"internal error, please report it: {type(error).__name__}: {error} (holdfast --traceback … shows where)"


DESCRIPTION = (
    "Inspect, check, convert and compare model checkpoints, without running the code in them."
)

EXAMPLES = """\
examples:
  # List the tensors of a checkpoint, and print one of them.
  holdfast show model.pt
  holdfast read model.pt layers.0.weight

  # List the code that would run if you loaded the downloaded files.
  holdfast scan downloads/

  # Find damaged tensors.
  holdfast verify model.pt

  # Convert to safetensors, and compare the two.
  holdfast convert model.pt model.safetensors
  holdfast diff model.pt model.safetensors

'holdfast COMMAND --help' has examples of each command.
"""


class Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        from holdfast import __version__

        sys.stdout.write(f"holdfast {__version__}\n")
        parser.exit()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; `run` is the function of the verb. Raises `SystemExit` as argparse does."""
    words = [argument for argument in arguments if not argument.startswith("-")]
    is_built_in = words[0] in find_commands() if words else "--version" in arguments
    whole = parser(plugins=not is_built_in)
    options, late = whole.parse_known_args(_with_slices_joined(arguments))
    # argparse settles an optional place as soon as an option comes: `edit SRC --drop x DST` leaves DST over.
    more = [] if any(text.startswith("-") for text in late) else late
    if more and getattr(options, "several", False):
        options.models += more
    elif len(more) == 1 and getattr(options, "dst", "") is None:
        options.dst = whole.placed(values.target, more[0])
    elif late:
        getattr(options, "verb", whole).refuse_extra(late)
    return options


def _with_slices_joined(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--slice -2:` as `--slice=-2:`, because argparse takes `-2:` for an option."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in ("-s", "--slice") and "--" not in joined:
            joined[-1] = f"--slice={argument}"
        else:
            joined.append(argument)
    return joined


class Command(NamedTuple):
    """A command: its module has `DESCRIPTION`, `EXAMPLES`, `add_arguments` and `run`."""

    name: str
    summary: str
    module: str
    plugin: Plugin | None = None
    """The entry point of a command of another package."""

    def load(self) -> Any:  # noqa: ANN401  # a module
        """Import the module. Raises `Unsupported` if another package offers something else."""
        if self.plugin is None:
            return load_object(self.module)
        module = self.plugin.load()
        missing = [name for name in COMMAND_PARTS if not hasattr(module, name)]
        if missing:
            raise self.plugin.refuse(f"is not a command: it has no {missing[0]}")
        return module


COMMAND_PARTS = ("DESCRIPTION", "EXAMPLES", "add_arguments", "run")


def find_commands(*, plugins: bool = False) -> dict[str, Command]:
    """Return all commands by name: the built-in ones, those of extras, and those of plugins.

    Plugins are looked for only if `plugins` is true, because that is slow.
    """
    commands = [Command(name, summary, f"holdfast.cli.{name}") for name, summary in VERBS.items()]
    for name, (summary, module) in get_extras_table("COMMANDS").items():
        commands.append(Command(name, summary, module))
    by_name = {command.name: command for command in commands}
    for plugin in find_plugins(COMMANDS_GROUP) if plugins else ():
        if plugin.name in by_name:
            text = f"{plugin.refuse('is ignored: Holdfast has a command of this name')}"
            warnings.warn(text, HoldfastWarning, stacklevel=2)
            continue
        summary = f"a command of the package {plugin.distribution}"
        by_name[plugin.name] = Command(plugin.name, summary, plugin.object_name, plugin)
    return by_name


def parser(*, plugins: bool = False) -> Parser:
    """Make the parser of all commands. A command's own arguments are added when it is used."""
    whole = Parser(
        prog="holdfast", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=GroupedHelp
    )
    whole.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    whole.add_argument(
        "--traceback", action="store_true", help="show a traceback if an error occurs"
    )
    whole.set_defaults(run=lambda options: _help(whole))
    verbs = whole.add_subparsers(
        title="commands", metavar="COMMAND", parser_class=Parser, prog="holdfast"
    )
    for command in find_commands(plugins=plugins).values():
        verb = verbs.add_parser(command.name, help=command.summary, formatter_class=Help)
        verb.fill = partial(_add, command)
    return whole


class GroupedHelp(Help):
    """Help that lists the commands under the titles of `GROUPS`."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        entries = {entry.dest: entry for entry in action._get_subactions()}
        groups = {title: [*names] for title, names in GROUPS.items()}
        grouped = {name for names in groups.values() for name in names}
        # Commands of other packages.
        groups["other"] += entries.keys() - grouped

        lines: list[str] = []
        for title, names in groups.items():
            lines.append(f"  {title}:\n")
            self._indent()
            for name in names:
                if name in entries:
                    lines.append(super()._format_action(entries[name]))
            self._dedent()
        return "".join(lines)


def _help(whole: argparse.ArgumentParser) -> int:
    whole.print_help()
    return 0


def _add(command: Command, verb: Parser) -> None:
    """Fill the parser of a command: its texts, its arguments, and `run`, which returns the exit code."""
    module = command.load()
    verb.description, verb.epilog = module.DESCRIPTION, module.EXAMPLES
    verb._positionals.title = "arguments"
    module.add_arguments(verb)
    together = command.plugin is None and command.name in TOGETHER
    if together:
        add_deadline(verb)
    verb.set_defaults(run=module.run, verb=verb, together=together)


VERBS = {
    "show": "list the tensors and values of a checkpoint",
    "read": "print tensors, or write them to .npy or .npz files",
    "scan": "list the code that a file would run when loaded",
    "verify": "check all data against the stored checksums",
    "diff": "compare two checkpoints",
    "convert": "convert a checkpoint to another format",
    "edit": "rename, drop or cast tensors, and set metadata",
    "cp": "copy a checkpoint, for example to or from a bucket",
    "reshard": "split a checkpoint for a mesh of ranks",
    "stats": "compute statistics of tensors and find NaN",
    "compact": "remove bytes that no tensor uses",
    "seal": "record that a checkpoint is complete",
    "completion": "print a completion script for a shell",
}
"""The built-in commands: what each does in a few words. Each is a module of `holdfast.cli`."""

GROUPS = {
    "inspect and check": ("show", "read", "scan", "verify", "diff", "stats", "report", "view"),
    "convert and edit": (
        "convert",
        "edit",
        "cp",
        "reshard",
        "prune",
        "tie",
        "compact",
        "package",
        "maps",
    ),
    "training runs": ("runs", "pin", "unpin", "seal"),
    "other": ("completion",),
}
"""The commands of the kernel and of extras, as the help lists them."""
