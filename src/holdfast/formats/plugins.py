"""The formats of other packages, which register them as entry points of the group `holdfast.formats`.

A plugin never replaces a built-in format, and a broken one does not disturb the others: what is
wrong with it becomes a sentence that names its package.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import asdict

from holdfast.core.protocols import Description, Source, State
from holdfast.core.registry import FORMATS_GROUP, Plugin, find_plugins
from holdfast.engine.saves import SavePlan
from holdfast.errors import HoldfastError, HoldfastWarning, Unsupported
from holdfast.formats import FORMATS, Format

T = TypeVar("T")


class PluginFormat(Format, frozen=True):
    """A format of another package. Errors that are not Holdfast's name the package."""

    distribution: str = ""

    def recognises(self, source: Source, key: str | None, head: bytes) -> bool:
        return self._call(lambda: super(PluginFormat, self).recognises(source, key, head))

    def describe(self, source: Source) -> Description:
        return self._call(lambda: super(PluginFormat, self).describe(source))

    def lay_out(self, state: State, **given: object) -> SavePlan:
        return self._call(lambda: super(PluginFormat, self).lay_out(state, **given))

    def _call(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except HoldfastError:
            raise
        except Exception as error:
            plugin = Plugin(self.name, self.read_by, self.distribution)
            raise plugin.refuse(f"failed: {type(error).__name__}: {error}") from error


def load_plugin_formats() -> tuple[list[Format], tuple[str, ...]]:
    """Import the entries of all plugins.

    Returns:
        The formats, and a sentence for each plugin that cannot be used.
    """
    formats: list[Format] = []
    problems: list[str] = []
    for plugin in find_plugins(FORMATS_GROUP):
        if any(plugin.name == entry.name or plugin.name in entry.choices for entry in FORMATS):
            warnings.warn(
                f"{plugin.refuse('is ignored: Holdfast has a format of this name')}",
                HoldfastWarning,
                stacklevel=2,
            )
            continue
        try:
            formats.append(_load_format(plugin))
        except Unsupported as error:
            problems.append(error.message)
    return formats, tuple(problems)


def _load_format(plugin: Plugin) -> Format:
    entry = plugin.load()
    if not isinstance(entry, Format) or entry.name != plugin.name:
        raise plugin.refuse(f"must name a holdfast.formats.Format called {plugin.name!r}")
    return PluginFormat(**asdict(entry), distribution=plugin.distribution)
