"""`holdfast completion`: a script with which a shell completes commands, options and values of options.

shtab makes the script from the parser. The script is static: Holdfast does not run when somebody presses Tab.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping

from holdfast.cli.parser import verbs_of
from holdfast.core.registry import find_hook
from holdfast.errors import Unsupported

DESCRIPTION = """\
Print a completion script for a shell. The script completes commands, options, and the values of
options such as --format and --dtype.
"""

EXAMPLES = """\
examples:
  # bash, in this shell. Add the line to ~/.bashrc to keep it.
  source <(holdfast completion bash)

  # zsh. Then start a new shell.
  holdfast completion zsh > "${fpath[1]}/_holdfast"

  # fish
  holdfast completion fish > ~/.config/fish/completions/holdfast.fish
"""

SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(options: argparse.Namespace) -> int:
    sys.stdout.write(script(options.shell))
    return 0


def script(shell: str) -> str:
    """Return the completion script for a shell."""
    import shtab

    from holdfast.cli.main import parser

    whole = parser(plugins=True)
    for verb in verbs_of(whole).values():
        for action in verb._actions:
            if not action.choices and action.metavar in OPTION_VALUES:
                names = OPTION_VALUES[str(action.metavar)]()
                # zsh separates the parts of a specification by colons.
                action.choices = (
                    [name.replace(":", r"\:") for name in names] if shell == "zsh" else names
                )
            # Every other argument may be the name of a file.
            if not action.choices and action.nargs != 0 and not hasattr(action, "complete"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(whole, shell)


def list_dtypes() -> list[str]:
    """Return the dtypes that `--dtype` offers: short names first, then every other floating-point dtype."""
    from holdfast.core.dtype import DTYPES

    floats = [row.name for row in DTYPES.rows if row.kind == "float"]
    return ["bf16", "f16", "f32", "f64", *floats]


def list_maps() -> list[str]:
    """Return the maps that `--map` offers; none if this copy has no extras."""
    try:
        return ["auto", *find_hook("map_names")()]
    except Unsupported:
        return []


OPTION_VALUES: Mapping[str, Callable[[], list[str]]] = {
    "[GLOB=]DTYPE": list_dtypes,
    "MAP": list_maps,
}
"""Functions that list the values of an option, by its metavar. argparse does not check these values."""
