"""What stands beside the model in the files of ranks: values as they are, in the tree of the whole."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.tensor import LazyTensor
from holdfast.formats.rank_files.assemble import Assembly


class Moving:
    """Gives tensors the source that all tensors of an assembly have. What stands in several places is made once."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._made: dict[int, tuple[object, object]] = {}
        """By identity: what was met, which is kept so that its number stays its own, and what was made of it."""

    def moved(self, value: object) -> object:
        """The same value. No names are made on the way: the keys of a file may be long, and nest."""
        if isinstance(value, LazyTensor):
            return self._assembly.replica("", [(0, value)])
        if not isinstance(value, dict) and type(value) not in (list, tuple):
            return value
        if id(value) not in self._made:
            # What contains itself meets itself as it is.
            self._made[id(value)] = value, value
            self._made[id(value)] = value, self._inside(value)
        return self._made[id(value)][1]

    def _inside(self, value: object) -> object:
        if isinstance(value, dict):
            return {key: self.moved(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.moved, value))
        return value


def free_key(wanted: str, names: Mapping[str, object]) -> str:
    """A key for what stands beside tensors of these names: the one that is wanted, unless a name begins with it."""
    while any(name == wanted or name.startswith(f"{wanted}.") for name in names):
        wanted += "#2"
    return wanted
