"""What stands beside the model in the files of ranks: values as they are, in the tree of the whole."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import plainly, rebuild
from holdfast.formats.rank_files.assemble import Assembly


def moved(value: object, assembly: Assembly) -> object:
    """The same value in plain dicts; its tensors have the source that all tensors of an assembly have.

    What stands in several places is made once. No names are made on the way: the keys of a file may be long, and nest.
    """
    return rebuild(value, lambda one, _: assembly.replica("", [(0, one)]) if isinstance(one, LazyTensor) else one, make=plainly)


def free_key(wanted: str, names: Mapping[str, object]) -> str:
    """A key for what stands beside tensors of these names: the one that is wanted, unless a name begins with it."""
    while any(name == wanted or name.startswith(f"{wanted}.") for name in names):
        wanted += "#2"
    return wanted
