"""The command line, as argparse knows it: each verb's sentence, usage, options and examples."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator

from holdfast.cli.main import GROUPS, parser
from holdfast.cli.parser import verbs_of

__all__ = ["as_markdown"]


def as_markdown() -> str:
    """A section for each command, in the order in which `holdfast --help` has them."""
    verbs = verbs_of(parser())
    names = [name for group in GROUPS.values() for name in group]
    return "\n\n".join("\n".join(_section(name, verbs[name])) for name in names)


def _section(name: str, verb: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## holdfast {name}"
    yield ""
    yield _text(verb.description or "")
    yield ""
    yield "```text"
    yield re.sub(r"^usage: ", "", verb.format_usage()).rstrip()
    yield "```"
    options = [
        action
        for action in verb._actions
        if action.help != argparse.SUPPRESS and action.dest != "help"
    ]
    if options:
        yield ""
        yield "| option | what it does |"
        yield "| --- | --- |"
        for action in options:
            yield f"| {_spelled(action)} | {_cell(_help(action))} |"
    if verb.epilog:
        yield ""
        yield "```text"
        yield textwrap.dedent(re.sub(r"^examples:\n", "", verb.epilog)).rstrip("\n")
        yield "```"


def _spelled(action: argparse.Action) -> str:
    """How an option is written: `-f GLOB`, `--filter GLOB`."""
    if action.nargs == 0:
        shown = ""
    elif action.metavar:
        shown = action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
    elif action.choices:
        shown = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        shown = action.dest.upper()
    if not action.option_strings:
        return _code(shown)
    flags = [f"{flag} {shown}".strip() for flag in action.option_strings]
    return ", ".join(_code(flag) + _unbroken(flag) for flag in flags)


def _unbroken(flag: str) -> str:
    """The class that keeps a short option on one line; choices may be longer than a phone is wide."""
    return "{: .option }" if len(flag) < 24 else ""


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%")


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|").replace("\n", " ")


def _text(text: str) -> str:
    """Words of the terminal as Markdown: what Markdown would act on is written out."""
    return re.sub(r"([*_<>\[\]])", r"\\\1", text.strip())
