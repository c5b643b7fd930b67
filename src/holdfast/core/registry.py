"""Finds functions, tables and plugins that are built on top of the kernel, by their names.

The kernel imports neither the torch adapter, nor an extra, nor another package. It finds their
functions here:

    find_hook           a function of the adapter or of an extra, which is imported when it is used
    get_extras_table    a table of `holdfast.extras`; empty in an installation without extras
    find_plugins        the entry points of other packages

The name of an object is "module:name", and that of a module is "module".
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from holdfast.errors import Unsupported

HOOKS = {
    "group_of": "holdfast.torch.ranks.group:group_of",
    "metadata_of": "holdfast.verbs.describe:metadata_of",
    "plainly_named": "holdfast.torch.modules.wrappers:plainly_named",
    "tensor_from_composite": "holdfast.torch.tensors.from_lazy:tensor_from_composite",
    "tensor_from_lazy": "holdfast.torch.tensors.from_lazy:tensor_from_lazy",
    "torch_leaf": "holdfast.torch.tensors.to_lazy:torch_leaf",
    "torch_tensors": "holdfast.torch.tensors.storages",
    "unkept": "holdfast.torch.tensors.to_lazy:unkept",
}
"""Functions of higher layers that lower layers call. Those of extras are in
`holdfast.extras.HOOKS`."""

FORMATS_GROUP = "holdfast.formats"
COMMANDS_GROUP = "holdfast.commands"
"""The groups of entry points that other packages may use."""


@cache
def load_object(object_name: str) -> Any:  # noqa: ANN401  # an object of any kind
    """Import a module, and return the object "module:name" of it. For "module", return that."""
    module_name, _, name = object_name.partition(":")
    module = import_module(module_name)
    return getattr(module, name) if name else module


def find_hook(name: str) -> Any:  # noqa: ANN401  # functions of many kinds
    """Return a function of a higher layer. Raises `Unsupported` if its extra is not installed."""
    object_name = HOOKS.get(name) or get_extras_table("HOOKS").get(name)
    if object_name is None:
        raise Unsupported(f"this installation of Holdfast has no extra with {name}()")
    return load_object(object_name)


def get_extras_table(name: str) -> dict[str, Any]:
    """Return a table of `holdfast.extras`, such as its commands. Empty if it is not installed."""
    try:
        extras = import_module("holdfast.extras")
    except ModuleNotFoundError:
        return {}
    table: dict[str, Any] = getattr(extras, name)
    return table


class Plugin(NamedTuple):
    """An entry point of another package: a format or a command."""

    # This is not a `Value`, because the help of the command line works without msgspec.

    name: str
    object_name: str
    distribution: str
    """The name of the package, for messages."""

    def load(self) -> Any:  # noqa: ANN401  # the caller checks what it is
        """Import the object of the entry point. Raises `Unsupported` if that fails."""
        try:
            return load_object(self.object_name)
        except Exception as error:
            raise self.refuse(f"cannot be loaded: {type(error).__name__}: {error}") from error

    def refuse(self, problem: str) -> Unsupported:
        """Return the error for an entry point that cannot be used."""
        return Unsupported(f"the plugin {self.name!r} of the package {self.distribution} {problem}")


@cache
def find_plugins(group: str) -> tuple[Plugin, ...]:
    """Return the entry points of a group. Of several with the same name, return the first.

    `importlib.metadata` reads the metadata of every installed package, which takes about 25 ms. So
    callers look for built-in formats and commands first.
    """
    from importlib.metadata import distributions

    plugins: dict[str, Plugin] = {}
    for distribution in distributions(path=_find_import_folders()):
        try:
            for entry_point in distribution.entry_points:
                if entry_point.group == group:
                    object_name = entry_point.value.strip()
                    plugin = Plugin(entry_point.name, object_name, distribution.name)
                    plugins.setdefault(plugin.name, plugin)
        except (TypeError, ValueError):
            # The metadata of this package is broken. The other packages work all the same.
            continue
    return tuple(plugins.values())


def _find_import_folders() -> list[str]:
    """Return the folders of `sys.path`, except the current folder.

    Python adds the current folder in some cases (`python -m`). It may be the folder of a downloaded
    model, in which an attacker has put the metadata of a package.
    """
    try:
        current_folder = os.path.realpath(os.curdir)
    except OSError:
        return sys.path
    return [folder for folder in sys.path if os.path.realpath(folder) != current_folder]
