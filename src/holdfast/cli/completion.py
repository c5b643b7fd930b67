"""`holdfast completion`: a script that teaches a shell the commands, their options, and the words that options take.

It is made from the parser, so it knows what the command knows, and needs nothing installed. Whatever is no option and no command is
the name of a file, which shells complete by themselves.

    source <(holdfast completion bash)                                      for this shell; or in ~/.bashrc
    holdfast completion zsh > "${fpath[1]}/_holdfast"                       then start a new shell
    holdfast completion fish > ~/.config/fish/completions/holdfast.fish
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from holdfast.cli.flags import options_of, verbs_of
from holdfast.core.value import Value

DESCRIPTION = """\
Print a script that teaches a shell to complete holdfast's commands and options.
"""

EXAMPLES = """\
examples:
  source <(holdfast completion bash)
  holdfast completion zsh > "${fpath[1]}/_holdfast"
  holdfast completion fish > ~/.config/fish/completions/holdfast.fish
"""

SHELLS = ("bash", "zsh", "fish")


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """What the verb takes."""
    verb.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    from holdfast.cli.main import parser

    sys.stdout.write(script(options.shell, parser()))
    return 0


class Flag(Value, frozen=True):
    """An option of a command."""

    names: tuple[str, ...]
    help: str
    takes: bool
    """Whether a word comes behind it."""
    words: tuple[str, ...]
    """Those that it may be, where they are known."""


class Command(Value, frozen=True):
    """A verb, or what stands before any (an empty name)."""

    name: str
    help: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...]
    """What may stand at its first place, where that is known; else the name of a file."""


def script(shell: str, whole: argparse.ArgumentParser) -> str:
    """The script for one of `SHELLS`."""
    verbs = verbs_of(whole)
    helps = {action.dest: action.help or "" for action in _listed(whole)}
    commands = [_command(name, helps.get(name, ""), verb) for name, verb in verbs.items()]
    first = _command("", "", whole)
    lines = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](first, commands)
    return "".join(f"{line}\n" for line in lines)


def _listed(whole: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """What `--help` lists of the commands: their names and what they do."""
    for action in whole._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action._choices_actions


def _command(name: str, help: str, parser: argparse.ArgumentParser) -> Command:
    flags: list[Flag] = []
    words: tuple[str, ...] = ()
    for action in options_of(parser):
        choices = tuple(map(str, action.choices or ()))
        if action.option_strings:
            flags.append(Flag(tuple(action.option_strings), action.help or "", action.nargs != 0, choices))
        else:
            words = words or choices
    return Command(name, help, tuple(flags), words)


def _bash(first: Command, commands: list[Command]) -> Iterator[str]:
    yield "# Completion of holdfast for bash: source <(holdfast completion bash)"
    yield "_holdfast() {"
    yield '  local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" verb="" words="" word'
    yield "  COMPREPLY=()"
    yield '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do'
    yield f'    case "$word" in {"|".join(one.name for one in commands)}) verb="$word"; break ;; esac'
    yield "  done"
    yield '  case "$verb $before" in'
    for one in commands:
        for flag in one.flags:
            if flag.takes:
                patterns = "|".join(f'"{one.name} {name}"' for name in flag.names)
                # Of what is not known, the names of files are as good a guess as any (`-o default`).
                given = f'COMPREPLY=($(compgen -W "{" ".join(flag.words)}" -- "$current")); ' if flag.words else ""
                yield f"    {patterns}) {given}return ;;"
    yield "  esac"
    yield '  case "$verb" in'
    for one in (first, *commands):
        options = " ".join(name for flag in one.flags for name in flag.names)
        places = " ".join(other.name for other in commands) if not one.name else " ".join(one.words)
        yield f'    "{one.name}") words="{places}"; [[ "$current" == -* ]] && words="{options}" ;;'
    yield "  esac"
    yield '  [[ -n "$words" ]] && COMPREPLY=($(compgen -W "$words" -- "$current"))'
    yield "  return 0"
    yield "}"
    yield "complete -o default -o bashdefault -F _holdfast holdfast"


def _zsh(first: Command, commands: list[Command]) -> Iterator[str]:
    yield "#compdef holdfast"
    yield '# Completion of holdfast for zsh: holdfast completion zsh > "${fpath[1]}/_holdfast"'
    yield "_holdfast() {"
    yield "  local verb='' word before=${words[CURRENT-1]}"
    yield "  local -a commands options"
    yield f"  commands=({' '.join(_described(one.name, one.help) for one in commands)})"
    yield "  for word in ${words[2,CURRENT-1]}; do"
    yield f"    case $word in ({'|'.join(one.name for one in commands)}) verb=$word; break ;; esac"
    yield "  done"
    yield '  case "$verb $before" in'
    for one in commands:
        for flag in one.flags:
            if flag.takes:
                patterns = "|".join(_quoted(f"{one.name} {name}") for name in flag.names)
                given = f"compadd -- {' '.join(flag.words)}" if flag.words else "_files"
                yield f"    ({patterns}) {given}; return ;;"
    yield "  esac"
    yield "  case $verb in"
    for one in (first, *commands):
        options = " ".join(_described(name, flag.help) for flag in one.flags for name in flag.names)
        yield f"    ({_quoted(one.name)}) options=({options})"
        places = "_describe command commands" if not one.name else f"compadd -- {' '.join(one.words)}" if one.words else "_files"
        yield f"      if [[ $PREFIX == -* ]]; then _describe -o option options; else {places}; fi ;;"
    yield "  esac"
    yield "}"
    yield "if [[ $funcstack[1] == _holdfast ]]; then _holdfast; else compdef _holdfast holdfast; fi"


def _fish(first: Command, commands: list[Command]) -> Iterator[str]:
    yield "# Completion of holdfast for fish: holdfast completion fish > ~/.config/fish/completions/holdfast.fish"
    for one in commands:
        yield f"complete -c holdfast -n __fish_use_subcommand -f -a {one.name} -d {_quoted(one.help)}"
    for one in (first, *commands):
        when = f"'__fish_seen_subcommand_from {one.name}'" if one.name else "__fish_use_subcommand"
        if one.words:
            yield f"complete -c holdfast -n {when} -f -a {_quoted(' '.join(one.words))}"
        for flag in one.flags:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            words = f" -f -a {_quoted(' '.join(flag.words))}" if flag.words else ""
            yield f"complete -c holdfast -n {when} {names}{' -r' if flag.takes else ''}{words} -d {_quoted(flag.help)}"


def _quoted(text: str) -> str:
    """Text between quotes, of a shell."""
    return "'" + text.replace("'", "'\\''") + "'"


def _described(name: str, help: str) -> str:
    """A word of zsh's `_describe`, in which a colon ends the word."""
    return _quoted(f"{name}:{help}".replace("\\", ""))
