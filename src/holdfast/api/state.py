"""From whatever a caller hands to `save` to a `State`: the same tree, with a `LazyTensor` for every tensor in it.

numpy arrays and torch tensors are wrapped, not copied; lazy tensors of an open checkpoint pass through and are streamed later.
Containers keep their types. What is neither a tensor nor a container is left as it is: the target format knows whether it can
hold it, and says so with the path.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.composite import Composite
from holdfast.core.limits import Limits
from holdfast.core.opaque import Opaque
from holdfast.core.protocols import State
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import Path, dotted, name_tensors
from holdfast.engine.resident import Resident
from holdfast.errors import CannotHold, Unsupported

__all__ = ["describe_state"]

Arrays = Literal["tensors", "values"]
Leaf = Callable[[object], object]


def describe_state(
    state: object, *, arrays: Arrays = "tensors", metadata: Mapping[str, str] | None = None, limits: Limits | None = None
) -> State:
    """Describe a state without copying its data.

    `arrays="values"` leaves numpy arrays as plain values: in the tree of an opened torch file they were pickled as such.
    """
    limits = limits or Limits()
    if isinstance(state, Checkpoint):
        metadata = {**state.metadata, **(metadata or {})} if state.format.startswith("safetensors") else metadata
        state, arrays = state.tree, "values"
    walk = Walk(_leaf(arrays), limits)
    tree = walk.convert(state, (), frozenset())
    if walk.problems:
        raise CannotHold("this state cannot be saved", walk.problems)
    named = name_tensors(tree, limits, 1 << 40)
    return State(tree, named.tensors, named.paths, dict(metadata or {}))


def _leaf(arrays: Arrays) -> Leaf:
    """The function that turns a leaf into a lazy tensor, or gives it back."""
    resident = Resident()
    foreign: Leaf | None = None
    if "torch" in sys.modules:
        # Only where the caller has torch can there be a torch tensor.
        from holdfast.torch.state import torch_leaf

        foreign = torch_leaf(resident)

    def convert(value: object) -> object:
        if isinstance(value, np.ndarray):
            return resident.array(value) if arrays == "tensors" else value
        if foreign is not None:
            value = foreign(value)
        if isinstance(value, LazyTensor | Composite | np.generic):
            return value
        if hasattr(value, "__array__") and not isinstance(value, type | np.ndarray):
            return resident.array(np.asarray(value))
        return value

    return convert


PLAIN = (str, bytes, int, float, bool, complex, type(None))


class Walk:
    """Rebuilds a nested state, container by container, and collects everything that stands in the way."""

    def __init__(self, leaf: Leaf, limits: Limits) -> None:
        self._leaf = leaf
        self._limits = limits
        self.problems: list[str] = []

    def convert(self, value: object, path: Path, above: frozenset[int]) -> object:
        if isinstance(value, PLAIN):
            return value
        if id(value) in above:
            self.problems.append(f"{dotted(path) or 'the state'}: a {type(value).__name__} that contains itself")
            return value
        if len(path) > self._limits.depth:
            self.problems.append(f"{dotted(path[:4])}…: nested deeper than Limits(depth={self._limits.depth})")
            return value
        inside = above | {id(value)}
        match value:
            case dict():
                return self._dict(value, path, inside)
            case list() if type(value) is list:
                return [self.convert(v, (*path, i), inside) for i, v in enumerate(value)]
            case tuple() if type(value) is tuple:
                return tuple(self.convert(v, (*path, i), inside) for i, v in enumerate(value))
            case LazyTensor() | Composite() | Opaque():
                return value
            case Mapping():
                return {k: self.convert(v, (*path, _element(k)), inside) for k, v in value.items()}
        try:
            return self._leaf(value)
        except Unsupported as error:
            self.problems.append(f"{dotted(path) or 'the state'}: {error.message}")
            return value

    def _dict(self, value: dict[object, object], path: Path, inside: frozenset[int]) -> object:
        items = [(k, self.convert(v, (*path, _element(k)), inside)) for k, v in value.items()]
        if isinstance(value, OrderedDict):
            made: OrderedDict[object, object] = OrderedDict(items)
            # torch keeps the versions of a state_dict() here.
            vars(made).update(vars(value))
            return made
        if isinstance(value, Counter):
            return value
        if isinstance(value, defaultdict):
            copy = value.copy()
            copy.update(items)
            return copy
        return dict(items)


def _element(key: object) -> str | int:
    return key if isinstance(key, str | int) and not isinstance(key, bool) else repr(key)[:64]
