"""`Parser`: what the command line is parsed with. A verb is filled when it is asked for: a command imports one verb and not all."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from holdfast.cli.text import print_lines, terminal_width
from holdfast.core.text import escape


class Help(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal: prose is filled, and lines that are indented stay lines."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=terminal_width() - 2)

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


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of a parser by their names, each with all that it takes."""
    # argparse shows its parts under private names only, to whoever writes help, completion and manuals.
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    choices = inner[0].choices if inner else {}
    return {
        name: verb.filled() if isinstance(verb, Parser) else verb for name, verb in choices.items()
    }
