"""Finds by name what is built on top of the kernel.

The kernel imports neither the torch adapter nor an extra nor another package. It asks here:

    find_hook       a function of the adapter or of an extra that the kernel calls, imported on use
    extras_table    one of the tables of `holdfast.extras`; empty in a copy without that folder
    find_plugins    the entry points of other packages, for whoever has found nothing built in

An object is named "module:name", and a module by its name alone.
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
"""What lower layers call of higher ones. Extras list theirs in `holdfast.extras.HOOKS`."""

FORMATS_GROUP = "holdfast.formats"
COMMANDS_GROUP = "holdfast.commands"
"""The groups of entry points that other packages may use."""


@cache
def load_object(where: str) -> Any:  # noqa: ANN401  # whatever stands there
    """Import the module and return the object of "module:name"; of "module" the module itself."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name) if name else import_module(module)


def find_hook(name: str) -> Any:  # noqa: ANN401  # functions of many kinds
    """Return a function of a higher layer. Raises `Unsupported` if its part is not installed."""
    where = HOOKS.get(name) or extras_table("HOOKS").get(name)
    if where is None:
        raise Unsupported(f"this installation of Holdfast lacks the extra with {name}()")
    return load_object(where)


def extras_table(name: str) -> dict[str, Any]:
    """Return a table of `holdfast.extras`; an empty one if this copy has no extras."""
    try:
        extras = import_module("holdfast.extras")
    except ModuleNotFoundError:
        return {}
    table: dict[str, Any] = getattr(extras, name)
    return table


class Plugin(NamedTuple):
    """An entry point of another package. It is no struct, because help is shown without msgspec."""

    name: str
    where: str
    distribution: str

    def load(self) -> Any:  # noqa: ANN401  # the caller checks what it is
        """Import what the entry point names. Raises `Unsupported`, which names the distribution."""
        try:
            return load_object(self.where)
        except Exception as error:
            raise self.refuse(f"cannot be loaded: {type(error).__name__}: {error}") from error

    def refuse(self, problem: str) -> Unsupported:
        """Return the error for an entry point that cannot be used."""
        return Unsupported(f"the plugin {self.name!r} of the package {self.distribution} {problem}")


@cache
def find_plugins(group: str) -> tuple[Plugin, ...]:
    """Return the entry points of a group, by their names; of equal ones the first.

    `importlib.metadata` reads the metadata of every installed package. That takes about 25 ms, so it is
    only done after everything built in has declined.
    """
    from importlib.metadata import distributions

    plugins: dict[str, Plugin] = {}
    for distribution in distributions(path=_find_import_folders()):
        try:
            points = [point for point in distribution.entry_points if point.group == group]
            for point in points:
                plugin = Plugin(point.name, point.value.strip(), distribution.name)
                plugins.setdefault(plugin.name, plugin)
        except (TypeError, ValueError):
            # The metadata of this package cannot be read. That must not disturb the others.
            continue
    return tuple(plugins.values())


def _find_import_folders() -> list[str]:
    """Return the folders of `sys.path` without the current one.

    Python imports from the current folder in some cases (`python -m`). It may be the folder of a
    downloaded model, in which an attacker has put the metadata of a package.
    """
    try:
        current_folder = os.path.realpath(os.curdir)
    except OSError:
        return sys.path
    return [folder for folder in sys.path if os.path.realpath(folder) != current_folder]
