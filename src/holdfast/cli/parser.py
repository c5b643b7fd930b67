"""`Parser`, the argument parser of the command line, and `Help`, its formatter.

The arguments of a verb are added when the verb is used, so that a command imports one verb only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from holdfast.cli.text import print_lines, terminal_width
from holdfast.core.text import escape


class Help(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal: prose is filled, and lines that are indented stay lines."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=terminal_width() - 2)
        # The longest command stands in one line with its summary.
        self._action_max_length = 14

    def _format_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None,
    ) -> str:
        """Write `[OPTIONS]` for the options that may be left out. The list below has all of them."""
        shown = [action for action in actions if action.required or not action.option_strings]
        text = super()._format_usage(usage, shown, [], prefix)
        return text.replace(self._prog, f"{self._prog} [OPTIONS]", 1)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        import textwrap

        made: list[str] = []
        prose: list[str] = []

        def fill() -> None:
            made.extend(textwrap.wrap(" ".join(prose), width, break_on_hyphens=False))
            prose.clear()

        for line in text.splitlines():
            if line and not line[0].isspace() and not line.endswith(":"):
                prose.append(line)
                continue
            fill()
            lead = " " * (len(line) - len(line.lstrip()))
            made += textwrap.wrap(
                line, width, initial_indent="", subsequent_indent=f"{lead}    ", drop_whitespace=True, break_on_hyphens=False,
                break_long_words=False,
            ) if len(line) > width else [line]  # fmt: skip
        fill()
        return "\n".join(made)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, as all errors here are."""

    fill: Callable[[Parser], None] | None = None
    """Adds what it takes, where that was not done."""

    def filled(self) -> Parser:
        fill, self.fill = self.fill, None
        if fill is not None:
            fill(self)
        return self

    def parse_known_args(  # type: ignore[override]  # as argparse asks for it
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self.filled()
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Check a word that must be one of a few, and suggest the closest one."""
        if action.choices is None or value in action.choices:
            return
        words = [*map(str, action.choices)]
        hint = suggest_closest(str(value), words)
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"there is no command {value!r}{hint}")
        raise argparse.ArgumentError(action, f"{value!r} is not one of {', '.join(words)}{hint}")

    def refuse_extra(self, words: Sequence[str]) -> NoReturn:
        """Report words that are neither options nor arguments of this command."""
        unknown = next((word for word in words if word.startswith("-")), None)
        if unknown is None:
            self.error(f"too many arguments: {' '.join(words)}")
        name = unknown.partition("=")[0]
        flags = [flag for action in self._actions for flag in action.option_strings]
        self.error(f"there is no option {name}{suggest_closest(name, flags)}")

    def error(self, message: str) -> NoReturn:
        print_lines(
            [[(f"holdfast: {escape(message)} (try: {self.prog} --help)", "")]], file=sys.stderr
        )
        self.exit(2)

    def placed(self, kind: Callable[[str], str], text: str) -> str:
        """An argument of a kind, as argparse would have taken it."""
        try:
            return kind(text)
        except argparse.ArgumentTypeError as error:
            self.error(f"argument DST: {error}")


def suggest_closest(word: str, words: Sequence[str]) -> str:
    """Return a suggestion for a misspelled word, which ends its message, or an empty text.

    >>> suggest_closest("shwo", ["show", "scan"]), suggest_closest("x", ["show", "scan"])
    ("; did you mean 'show'?", '')
    """
    import difflib  # Only for misspelled words: it takes milliseconds to import.

    closest = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {closest[0]!r}?" if closest else ""


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of a parser by their names, each with all that it takes."""
    # argparse shows its parts under private names only, to whoever writes help, completion and manuals.
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    choices = inner[0].choices if inner else {}
    return {
        name: verb.filled() if isinstance(verb, Parser) else verb for name, verb in choices.items()
    }
