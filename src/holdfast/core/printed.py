"""How much text a tree is when it is written out, as `print` does it: what is referred to from many places stands in each of them.

A list of ten references to one list, forty deep, takes 500 bytes in a pickle, and its `repr` more characters than there is memory.
Whoever opens a file types `print(ckpt.tree)` first, so such a tree is refused when it is opened (`Limits.tree_nbytes`).

1. Each container is looked at once, and takes what its children take together. So the cost is linear in what is stored.
2. `repr` of an object that was not built, of a tensor and of an array is bounded, and they count as that. What they hold is handed
   out as well (`args`, `state`, …), and is counted by itself; so are the attributes of an `OrderedDict`.
3. `repr` writes `[...]` where a container stands inside of itself, and writes it again everywhere else. So containers that contain
   each other are written along every path from one to the next. These paths are followed one by one, from each such container on,
   as long as an allowance of steps lasts.

Characters are estimated; what is printed may be a few times as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np
from msgspec import Struct, field

from holdfast.core.limits import Limits
from holdfast.core.opaque import Device, Global, Opaque
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.text import clip, escape
from holdfast.core.tree import Way, name_at
from holdfast.errors import LimitExceeded

SMALL = 4  # A number or a pair of brackets; or what stands between two values.
RECORD = 48  # What is written of an object, a tensor or an array besides names and elements.
NUMBERS = frozenset({int, float, bool, complex, type(None)})

ALIKE = NUMBERS | {
    str,
    LazyTensor,
}  # Values of these types are counted together, all that are in one container.
CONTAINERS = (dict, list, tuple, set, frozenset)

WHOLE, EDGES = (
    1000,
    6,
)  # numpy writes arrays of up to so many elements; of larger ones so many of every dimension.
STEP_CHARACTERS = 256  # For so many characters that are allowed, one step along containers that contain each other is followed.
PLACE_CHARACTERS = 200

Children = Iterable[tuple[object, object]]


class Counted(Struct):
    owner: object
    link: Way
    size: int  # Without those children that lead to a cycle.
    children: Iterator[tuple[object, object]]
    around: list[int] = field(default_factory=list)  # Children from which a cycle is reached.


def check_printable(tree: object, limits: Limits) -> None:
    """Raise `LimitExceeded` where a tree, or what an object in it holds, takes more than `limits.tree_nbytes` when written out."""
    sizes = Sizes(limits.tree_nbytes)
    sizes.apart.append((tree, None))
    while sizes.apart:
        sizes.count(*sizes.apart.pop())
    sizes.follow()


class Sizes:
    """What the values of one tree take, by their identity: the tree keeps all of them alive."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entered: set[int] = set()
        self._known: dict[int, int] = {}
        self._cyclic: dict[int, Counted] = {}  # Containers from which a cycle is reached.
        self.apart: list[tuple[object, Way]] = []
        """What is handed out by something that does not write it out, and is still to be counted."""

    def count(self, root: object, link: Way) -> None:
        known, entered = self._known, self._entered
        top = Counted(None, link, 0, iter([(None, root)]))
        levels = [top]
        while levels:
            for key, child in top.children:
                if not isinstance(child, CONTAINERS):
                    top.size += SMALL + self._leaf(child, top.link, key)
                elif id(child) in known:
                    top.size += SMALL + known[id(child)]
                elif id(child) in entered:
                    top.around.append(id(child))
                else:
                    place = link if top.owner is None else (top.link, key)
                    size, children = self._content(child, place)
                    if children:
                        entered.add(id(child))
                        top = Counted(child, place, size, iter(children))
                        levels.append(top)
                        break
                    self._check(size, place)
                    known[id(child)] = size
                    top.size += SMALL + size
            else:
                done = levels.pop()
                if not levels:
                    return
                top = levels[-1]
                self._check(done.size, done.link)
                if done.around:
                    self._cyclic[id(done.owner)] = done
                    top.around.append(id(done.owner))
                else:
                    known[id(done.owner)] = done.size
                    top.size += SMALL + done.size

    def follow(self) -> None:
        """Go along the containers that contain each other, as `repr` would from each of them."""
        steps = self._most // STEP_CHARACTERS
        for entry, first in self._cyclic.items():
            size = first.size
            levels = [(entry, iter(first.around))]
            above = {entry}
            while levels:
                child = next(levels[-1][1], None)
                if child is None:
                    above.remove(levels.pop()[0])
                    continue
                steps -= 1
                size += SMALL
                if child not in above:
                    size += self._cyclic[child].size
                    self._check(size if steps >= 0 else self._most + 1, first.link)
                    above.add(child)
                    levels.append((child, iter(self._cyclic[child].around)))

    def _content(self, owner: Any, link: Way) -> tuple[int, Children]:  # noqa: ANN401  # a container of anything
        """The size of a container without the children that have to be looked at one by one, and these."""
        if not isinstance(owner, dict):
            size, children = self._alike(range(len(owner)), owner, link)
            return SMALL * (1 + len(owner)) + size, children
        if type(owner) is not dict and getattr(owner, "__dict__", None):
            self.apart.append((vars(owner), link))
        size, children = self._alike(owner, owner.values(), link)
        of_keys, keys = self._alike(owner, owner, link)
        return SMALL * (1 + 2 * len(owner)) + size + of_keys, chain(
            children, keys
        ) if keys else children

    def _alike(self, keys: Any, values: Any, link: Way) -> tuple[int, Children]:  # noqa: ANN401  # collections of anything
        """What the values take that are numbers, texts or tensors; and all others, each with its key."""
        kinds = {*map(type, values)}
        size, others = 0, kinds - ALIKE
        for kind in kinds - others:
            own: Any = (
                values if len(kinds) == 1 else [value for value in values if type(value) is kind]
            )
            if kind is str:
                size += sum(map(len, own))
            elif kind is LazyTensor:
                self.apart += [
                    (tensor.traits.state, link) for tensor in own if tensor.traits.state is not None
                ]
                size += RECORD * len(own) + sum(map(len, [tensor.name for tensor in own]))
            else:
                size += SMALL * len(own)
        pairs = zip(keys, values, strict=True)
        return size, (pair for pair in pairs if type(pair[1]) in others) if others else ()

    def _leaf(self, value: object, link: Way, key: object) -> int:
        if type(value) in NUMBERS:
            return SMALL
        if isinstance(value, str | bytes | bytearray):
            return len(value)
        if isinstance(value, LazyTensor):
            if value.traits.state is not None:
                self.apart.append((value.traits.state, (link, key)))
            return RECORD + len(value.name)
        if isinstance(value, np.ndarray):
            shown = (
                value.size if value.size <= WHOLE else math.prod(min(n, EDGES) for n in value.shape)
            )
            return RECORD + shown * (SMALL + int(value.dtype.itemsize))
        known = self._known.get(id(value))
        if known is None:
            self._known[id(value)] = known = RECORD + self._rare(value, (link, key))
        return known

    def _rare(self, value: object, link: Way) -> int:
        """The names in what is left; and what these values hold is to be counted by itself."""
        if isinstance(value, Opaque):
            inside = (value.args, value.kwargs, value.state, value.items, value.entries, value.what)
            self.apart += [(inner, link) for inner in inside if inner is not None]
            return len(value.module) + len(value.name)
        if isinstance(value, Composite):
            self.apart += [
                (inner, link)
                for inner in (value.attributes, value.traits.state, *value.parts.values())
            ]
        if isinstance(value, Global | Device | PurePath | np.dtype):
            return len(str(value))
        return value.itemsize if isinstance(value, np.generic) else 0

    def _check(self, size: int, link: Way) -> None:
        if size <= self._most:
            return
        place = (
            f"what is at {escape(clip(name_at(link), PLACE_CHARACTERS))!r}"
            if link is not None
            else "the tree"
        )
        advice = "it refers to the same values again and again"
        message = f"{place} takes more than Limits(tree_nbytes={self._most:,}) characters when it is written out, as `print` does"
        raise LimitExceeded(f"{message}: {advice}", expected=self._most, found=size)
