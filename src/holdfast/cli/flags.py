"""The words of the library in the words of the command line: a message that says `overwrite=True` says `--overwrite` here.

The library's messages name keywords, because most who read them wrote a call. A person at a shell has flags, so every sentence is
translated where it is printed (`in_flags`), by one table. What stands in quotes is a name or a path, and stays as it is; so does a
keyword for which the verb has no flag, like `Limits(files=…)`: that is for a program. A number after it is no keyword's: `model=2`
is an axis of a mesh. A sentence that names another verb (`convert with model=…`) means that one's flags.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterator

from holdfast.cli.parser import Parser

FLAGS = {
    "bins": "--bins", "constants": "--constants", "copy_config": "--copy-config",
    "deduplicate": "--content", "dequantize": "--dequantize", "digest": "--digest", "drop": "--drop", "dry_run": "--dry-run",
    "dtype": "--dtype", "durable": "--no-durable", "exact": "--exact", "format": "--format", "in_place": "--in-place",
    "keep": "--keep", "masks": "--masks", "max_memory": "--max-memory", "max_shard_size": "--max-shard-size", "mesh": "--mesh",
    "metadata": "--set", "metrics": "--metric", "model": "--model", "overwrite": "--overwrite",
    "pattern": "--filter", "read_back": "--read-back",
    "rename": "--rename", "resume": "--resume", "rules": "--rule", "sample": "--sample",
    "sample_inputs": "--sample-inputs", "set_metadata": "--set",
    "sparse": "--sparse", "step": "--step", "tensors_only": "--tensors-only", "threads": "--threads", "unset_metadata": "--unset",
}  # fmt: skip
"""From a keyword of a verb to its flag."""

WORD = re.compile(
    r"""'(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*"                                           # a name or a path
      | (?P<other>\bconvert\ with\ )?                                                   # of another verb
        \b(?P<keyword>[a-z]+(?:_[a-z]+)*)=(?:(?P<value>True|False|None|'[^']*'|"[^"]*"|…)|(?!\w))  # overwrite=True, keep=
      | \b(?P<bare>[a-z]+_[a-z_]+)\b(?![.(=])                                            # max_memory is too small""",
    re.VERBOSE,
)


def in_flags(text: str, known: Collection[str]) -> str:
    """A sentence in terms of the flags that a verb has.

    >>> in_flags("'overwrite=True' exists; pass overwrite=True to replace it, or masks='only'", {"--overwrite", "--masks"})
    "'overwrite=True' exists; pass --overwrite to replace it, or --masks only"
    """

    def translated(found: re.Match[str]) -> str:
        flag = FLAGS.get(found["keyword"] or found["bare"] or "")
        other = found["other"] or ""
        if flag is None or not (other or flag in known):
            return found[0]
        value = (found["value"] or "").strip("'\"")
        if value in ("", "True", "…") or flag.startswith("--no-") or flag == "--content":
            return other + flag
        if value in ("False", "None"):
            return other + (f"--no-{flag[2:]}" if f"--no-{flag[2:]}" in known else f"no {flag}")
        return f"{other}{flag} {value}"

    return WORD.sub(translated, text)


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of a parser by their names, each with all that it takes."""
    # argparse shows its parts under private names only, to whoever writes help, completion and manuals.
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    choices = inner[0].choices if inner else {}
    return {name: verb.filled() if isinstance(verb, Parser) else verb for name, verb in choices.items()}


def options_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The options of a parser, those without a dash included, in their order."""
    yield from (action for action in parser._actions if not isinstance(action, argparse._SubParsersAction))
