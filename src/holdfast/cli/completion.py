"""`holdfast completion`: a script that teaches a shell the commands, their options, and the words that options take.

It is made from the parser by shtab, so it knows what the command knows. It is a file: nothing runs when somebody presses Tab.
"""

from __future__ import annotations

import argparse
import sys

from holdfast.cli.parser import verbs_of

DESCRIPTION = """\
Print a script that teaches a shell to complete holdfast's commands and options.
"""

EXAMPLES = """\
examples:
  source <(holdfast completion bash)                                      for this shell; or in ~/.bashrc
  holdfast completion zsh > "${fpath[1]}/_holdfast"                       then start a new shell
  holdfast completion fish > ~/.config/fish/completions/holdfast.fish
"""

SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(options: argparse.Namespace) -> int:
    sys.stdout.write(script(options.shell))
    return 0


def script(shell: str) -> str:
    import shtab

    from holdfast.cli.main import parser

    whole = parser(plugins=True)
    for verb in verbs_of(whole).values():
        for action in verb._actions:
            # Names of files are completed wherever a word is none of a few.
            if not action.choices and action.nargs != 0 and not hasattr(action, "complete"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(whole, shell)
