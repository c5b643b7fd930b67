"""From the options of a verb to flags, and from flags back to options.

`core/options.py` says what a verb takes. Its flags are made from that, and what was given at the shell goes to the verb under the
names of its options, to be checked where everything is. Messages of the library name options (`overwrite=True`), because most who
read them wrote a call; a person at a shell reads the flag (`in_flags`).
"""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from holdfast.cli import values
from holdfast.cli.parser import verbs_of
from holdfast.core.options import OPTIONS, Option, check_options, get_options
from holdfast.errors import Unsupported
from holdfast.formats import FORMATS, titles, written_formats

T = TypeVar("T")

NOTHING_GIVEN: Mapping[str, str] = MappingProxyType({})


class FormatNames(tuple[str, ...]):
    """The formats that help lists. `values.written_format` checks the word, which may be a plugin."""

    def __contains__(self, word: object) -> bool:
        return True


CHOICES: Mapping[str, Callable[[], Sequence[str]]] = {
    "FORMAT": lambda: FormatNames(titles(written_formats())),
    "PACKAGE": lambda: titles(one for one in FORMATS if one.packages),
}
"""The words that an option takes, by its kind, where there are few."""

WORDS: Mapping[str, Callable[[str], object]] = {
    "DIR": values.path,
    "FORMAT": values.written_format,
    "KEY=VALUE": values.pair,
    "N": values.positive,
    "NAME=VALUE": values.metric,
    "OLD=NEW": values.pair,
    "SIZE": values.size,
    "STEP": values.step,
}
"""The parser of a word, by its kind."""


def add_options(
    verb: argparse.ArgumentParser, record: type, *, without: Collection[str] = ()
) -> None:
    """Add a flag for every option of a record that has one. Only what is given will be in the namespace."""
    for name, option in get_options(record).items():
        if option.get_flag(name) and name not in without:
            _add_option(verb, name, option)
    verb.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    verb.add_argument("--json", action="store_true", help=values.JSON_HELP)


def _add_option(verb: argparse.ArgumentParser, name: str, option: Option) -> None:
    flag, absent = option.get_flag(name), argparse.SUPPRESS
    names = [option.short_flag, flag] if option.short_flag else [flag]
    if option.metavar:
        choices = CHOICES[option.metavar]() if option.metavar in CHOICES else option.choices
        verb.add_argument(
            *names,
            dest=name,
            default=absent,
            metavar=None if choices else option.metavar,
            choices=choices or None,
            action="append" if option.is_repeatable else "store",
            type=WORDS.get(option.metavar, str),
            required=option.default is ...,
            help=option.help,
        )
    elif OPTIONS[name].default is True:
        # Also for a verb whose own default is False: a flag means the same everywhere.
        verb.add_argument(
            *names,
            dest=name,
            default=absent,
            action=argparse.BooleanOptionalAction,
            help=option.help,
        )
    else:
        verb.add_argument(
            *names,
            dest=name,
            default=absent,
            action="store_const",
            const=option.flag_value,
            help=option.help,
        )
    if option.metavar and option.default is True:
        verb.add_argument(
            f"--no-{flag[2:]}",
            dest=name,
            default=absent,
            action="store_false",
            help="do not copy config and tokenizer files",
        )


def given(
    options: argparse.Namespace,
    record: Callable[..., T],
    **more: object,
) -> T:
    """All options of a record, as a verb takes them: what was given at the shell, and `more`."""
    found = {
        name: GATHERED.get(option.metavar, tuple)(vars(options)[name])
        if option.is_repeatable
        else vars(options)[name]
        for name, option in get_options(record).items()
        if name in options
    }
    return check_options(record, found | more)


def _dtypes(words: Sequence[str]) -> dict[str, str]:
    """The dtype of each `GLOB=DTYPE` in its order, and last of all the dtype without a pattern, wherever that stands."""
    dtypes: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        pattern, equals, dtype = word.rpartition("=")
        if not equals:
            rest.append(dtype)
        elif not pattern or pattern in dtypes:
            raise Unsupported(f"--dtype {word}: write GLOB=DTYPE, each GLOB once", found=word)
        else:
            dtypes[pattern] = dtype
    if len(rest) > 1 or (rest and "*" in dtypes):
        raise Unsupported(
            "--dtype is given twice for all tensors; write GLOB=DTYPE for some of them",
            found=tuple(words),
        )
    return dtypes | dict.fromkeys(("*",) * len(rest), *rest)


GATHERED: Mapping[str, Callable[[Sequence[Any]], object]] = {
    "[GLOB=]DTYPE": _dtypes,
    "KEY=VALUE": dict,
    "NAME=VALUE": dict,
}
"""The function that joins all words of a flag that may be given several times."""

WORD = re.compile(
    r"""'(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*"                                           # a name or a path
      | (?P<other>\b(?:convert|seal)\ with\ )?                                            # of another verb
        \b(?P<keyword>[a-z]+(?:_[a-z]+)*)=(?:(?P<value>True|False|None|\[?(?:'[^']*'|"[^"]*")\]?|…)|(?![\w\[]))
      | \b(?P<bare>[a-z]+_[a-z_]+)\b(?![.(=])                                            # max_memory is too small""",
    re.VERBOSE,
)


def flags_of(verb: argparse.ArgumentParser) -> dict[str, str]:
    """The flag of each option that a verb has, spelled out; and of `no_…`, where it can be denied."""
    # argparse shows its parts under private names only.
    flags = [
        (action.dest, flag)
        for action in verb._actions
        for flag in action.option_strings
        if flag.startswith("--")
    ]
    denied = {f"no_{name}": flag for name, flag in flags if flag.startswith("--no-")}
    return {name: flag for name, flag in flags if flag not in denied.values()} | denied


@functools.cache
def flags_of_commands() -> dict[str, str]:
    """Map each option of any command to the first command that has it, with its flag."""
    from holdfast.cli.main import parser

    flags: dict[str, str] = {}
    for command, verb in verbs_of(parser()).items():
        for name, flag in flags_of(verb).items():
            flags.setdefault(name, f"holdfast {command} {flag}")
    return flags


def in_flags(text: str, flags: Mapping[str, str] = NOTHING_GIVEN) -> str:
    """A sentence in terms of flags, by the names of options.

    What stands in quotes is a name or a path, and stays as it is; so does a name that has no flag, like `Limits(files=…)`,
    which is for a program. A number is no option's: `model=2` is an axis of a mesh. A sentence that names another verb (`convert
    with model=…`) means that one's flags. An option that this command does not have is given with a command that has it.

    >>> in_flags("'overwrite=True' exists; pass overwrite=True to replace it", {"overwrite": "--overwrite"})
    "'overwrite=True' exists; pass --overwrite to replace it"
    >>> in_flags("its elements are in blocks (dequantize=True)")
    'its elements are in blocks (holdfast convert --dequantize)'
    """

    def translated(found: re.Match[str]) -> str:
        name, other = found["keyword"] or found["bare"] or "", found["other"] or ""
        flag = f"--{name.replace('_', '-')}" if other else flags.get(name)
        if flag is None and found["keyword"]:
            flag = flags_of_commands().get(name)
        if flag is None:
            return found[0]
        value = (found["value"] or "").strip("'\"[]")
        if value in ("False", "None"):
            return other + flags.get(f"no_{name}", f"no {flag}")
        return other + (
            flag
            if value in ("", "True", "…") or flag == "--content"
            else f"{flag} {shlex.quote(value)}"
        )

    return WORD.sub(translated, text)
