"""From an open checkpoint to the outline that `show` prints. Pure: nothing is read and nothing is printed.

1. `outline` walks the tree once. A container that is met again becomes a link to where it was met first, so that the
   cost is linear in what was stored, whatever the file shares or how it loops.
2. Dotted names are split: a flat state dict `{"layers.0.weight": …}` becomes the tree that its names describe.
3. Siblings that differ in a number only, and have the same structure, are folded into one (`fold`).

`LeafNode` and `Branch` hold raw text out of the file; whoever prints them escapes it.

Folding shows 32 layers of the same structure once:

    layers.0.weight  f32 [4, 4]             layers.[0-31].weight   f32  32 × [4, 4]
    layers.1.weight  f32 [4, 4]      →
    …

From the leaves up, every node gets a signature: its kind, its dtype and shape, and the labels and signatures of its children,
numbered through one table so that comparing two subtrees is comparing two integers. Siblings whose labels differ in one number
only and whose signatures are equal are merged. Plain values that differ are shown as differing. A group with one child is joined
with it: `a` → `b` → `c` is one line `a.b.c`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, cast

from msgspec import Struct, field

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.opaque import Opaque
from holdfast.core.order import sort_naturally
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import (
    FREE_CHARACTERS,
    LONE_TENSOR_NAME,
    NAME_CHARACTERS_A_BYTE,
    LinkedPath,
    Unrolled,
    list_contents,
    list_module_contents,
    rebuild,
    unroll,
    walk,
)
from holdfast.errors import LimitExceeded
from holdfast.numeric.dequantize import number_shape
from holdfast.verbs.brief import brief, scalar
from holdfast.verbs.survey import Survey

DEEPEST = 100
"""Levels that are walked. `Limits(depth=64)` holds for what was stored; this is room for that and for dotted names."""

SETTINGS = 64
"""Attributes of a module that are looked at for its sizes. `nn.Linear` has 16, of which the last three are its own."""

DIGIT = re.compile("[0-9]")

SPLITS = 32
"""Dots of one name that open levels. A name with more of them stays in one piece."""


class LeafNode(Struct):
    """A tensor, a plain value, or a link to something shown elsewhere."""

    label: str
    name: str
    kind: str
    """`tensor`, `value`, `object` (an `Opaque` with nothing but plain arguments) or `link`."""
    text: str = ""
    """A value in short; the name that a link points at."""
    type: str = ""
    tensor: LazyTensor | None = None
    role: str = ""
    """`parameter` or `buffer`, where the file says so."""
    tie: str = ""
    """How a tensor shares its storage: `= name` for the same elements, `in name` for other parts of one storage."""
    times: int = 1
    """The number of folded siblings that this one stands for."""
    value: object = None


class Branch(Struct):
    label: str
    name: str
    kind: str
    """`group` (dots in a name), `dict`, `list`, `tuple`, `object` (an `Opaque`), `module`, or the kind of a `Composite`."""
    text: str = ""
    remark: str = ""
    """The attributes of a composite."""
    children: list[Node] = field(default_factory=list)
    times: int = 1
    tensors: int = 0
    """Tensors below one of the folded siblings, and their elements and bytes; what is tied counts where it stands first."""
    elements: int = 0
    nbytes: int = 0


Node = LeafNode | Branch


def outline(checkpoint: Checkpoint, found: Survey | None = None, *, split: bool = True) -> Branch:
    """The whole checkpoint as nodes, unfolded and without totals. With `split=False` dotted names stay in one piece."""
    tree = checkpoint.tree
    room = NAME_CHARACTERS_A_BYTE * checkpoint.stored_nbytes + FREE_CHARACTERS
    outlining = _Outlining({} if found is None else found.ties, split, room=room)
    root = outlining.node(tree, "", "", depth=0)
    if isinstance(root, Branch):
        unroll(outlining.fill(root, tree, depth=0))
    else:
        root.label = root.name = LONE_TENSOR_NAME
        root = Branch("", "", "dict", children=[root])
    return root


def branches(root: Branch) -> Iterator[Branch]:
    """A branch and those below it, in reading order."""
    return (node for _, node in walk(root, _inner) if isinstance(node, Branch))


def leaves(root: Branch) -> Iterator[LeafNode]:
    below = walk(root, lambda node: enumerate(node.children) if isinstance(node, Branch) else None)
    return (node for _, node in below if isinstance(node, LeafNode))


def _inner(branch: Branch) -> Iterable[tuple[str, Branch]] | None:
    return [(child.label, child) for child in branch.children if isinstance(child, Branch)] or None


def _from_below(root: Branch, visit: Callable[[Branch, list[Any]], object]) -> None:
    """Visit every branch after those in it, with the results of their visits."""
    rebuild(
        root,
        lambda branch, _: visit(branch, []),
        get_children=_inner,
        make_container=lambda branch, inner, _: visit(branch, inner),
    )


def arrange(root: Branch) -> None:
    """Put siblings that differ in a number only in the order of their numbers, and everything below."""
    for branch in branches(root):
        if len(branch.children) > 1 and any(DIGIT.search(child.label) for child in branch.children):
            branch.children = sort_naturally(branch.children, lambda child: child.label)


def total(root: Branch) -> None:

    def add_up(branch: Branch, _: object) -> None:
        branch.tensors = branch.elements = branch.nbytes = 0
        for child in branch.children:
            if isinstance(child, Branch):
                branch.tensors += child.tensors * child.times
                branch.elements += child.elements * child.times
                branch.nbytes += child.nbytes * child.times
            elif child.tensor is not None:
                branch.tensors += child.times
                if not child.tie.startswith("="):
                    shape = number_shape(child.tensor.shape, child.tensor.traits.blocks)
                    branch.elements += math.prod(shape) * child.times
                    branch.nbytes += (
                        0 if child.tensor.traits.meta else child.tensor.nbytes * child.times
                    )

    _from_below(root, add_up)


class _Outlining(Struct):
    """One pass over a tree that remembers where each container was met."""

    ties: Mapping[str, str]
    split: bool
    room: int
    """Characters that the names may still take: a long key stands in the name of everything below it."""
    met: dict[int, str] = field(default_factory=dict)
    plain: dict[int, bool] = field(default_factory=dict)
    """Whether there are only plain values in a row, by the identity of the row."""

    def node(self, value: object, label: str, name: str, *, depth: int) -> Node:
        if isinstance(value, LazyTensor):
            traits = value.traits
            role = "parameter" if traits.parameter else "buffer" if traits.buffer else ""
            return LeafNode(
                label, name, "tensor", tensor=value, role=role, tie=self.ties.get(name, "")
            )
        if not isinstance(
            value, Mapping | list | tuple | Opaque | Composite
        ) or self._shown_in_place(value):
            kind, of = (
                ("object", "object")
                if isinstance(value, Opaque)
                else ("value", type(value).__name__)
            )
            return LeafNode(label, name, kind, brief(value), of, value=value)
        if id(value) in self.met:
            return LeafNode(label, name, "link", self.met[id(value)] or "(the root)")
        if depth >= DEEPEST:
            return LeafNode(label, name, "value", "…", type(value).__name__)
        self.met[id(value)] = name
        match value:
            case Mapping():
                return Branch(label, name, "dict")
            case Composite():
                remark = ", ".join(
                    f"{k}={brief(v, 20)}" for k, v in value.attributes.items() if scalar(v)
                )
                return Branch(label, name, value.kind, str(list(value.shape)), remark)
            case Opaque():
                return self._object(value, label, name)
            case _:
                return Branch(label, name, "list" if isinstance(value, list) else "tuple")

    def _object(self, value: Opaque, label: str, name: str) -> Branch:
        if list_module_contents(value) is None:
            return Branch(label, name, "object", brief(value.what, 80))
        settings = itertools.chain.from_iterable(
            itertools.islice(state.items(), SETTINGS) for state in value.state_dicts()
        )
        sizes = [
            f"{k}={brief(v, 20)}"
            for k, v in settings
            if isinstance(k, str) and not k.startswith("_") and _is_size(v)
        ]
        shown = f"({', '.join(sizes[:4])})" if sizes else ""
        return Branch(
            label, name, "module", brief(value.what, 80).removeprefix("torch.nn.modules.") + shown
        )

    def fill(self, branch: Branch, value: object, *, depth: int) -> Unrolled[None]:
        if isinstance(value, Opaque):
            return self._fill_object(branch, value, depth=depth)
        if isinstance(value, Mapping):
            items = ((k if isinstance(k, str) else _label(k), v) for k, v in value.items())
            return self._grow(branch, items, depth, split=self.split)
        ((_, children),) = list_contents(value) or ((None, iter(())),)
        return self._grow(branch, ((str(k), v) for k, v in children), depth, split=False)

    def _fill_object(self, branch: Branch, value: Opaque, *, depth: int) -> Unrolled[None]:
        """Add the content of an object; of a dict that is another object's as well, only where that was met first."""
        module = branch.kind == "module"
        for owner, children in list_contents(value) or ():
            if owner is not value and id(owner) in self.met:
                branch.children.append(
                    LeafNode(
                        "(shared)",
                        f"{branch.name}.(shared)",
                        "link",
                        self.met[id(owner)] or "(the root)",
                    )
                )
                continue
            if owner is not value:
                self.met[id(owner)] = branch.name
            yield self._grow(
                branch,
                ((str(k), v) for k, v in children if not (module and v is None)),
                depth,
                split=False,
            )
        for role in ("parameter", "buffer") if module else ():
            held = value.attribute(f"_{role}s")
            for child in branch.children:
                if isinstance(child, LeafNode) and isinstance(held, dict) and child.label in held:
                    child.role = role

    def _shown_in_place(self, value: object) -> bool:
        """Whether a container reads better as a value: it is empty, a list of plain values, or a call with such."""
        match value:
            case list() | tuple():
                if id(value) not in self.plain:
                    self.plain[id(value)] = all(map(scalar, value))
                return self.plain[id(value)]
            case Mapping():
                return not value
            case Opaque():
                bare = not (value.kwargs or value.items or value.entries or value.state is not None)
                return bare and self._shown_in_place(value.args)
            case _:
                return False

    def _grow(
        self, branch: Branch, items: Iterable[tuple[str, object]], depth: int, *, split: bool
    ) -> Unrolled[None]:
        """Add children; with `split`, one level for each dot in a key."""
        start = f"{branch.name}." if branch.name else ""
        groups: dict[str, Branch] = {"": branch}
        for key, value in items:
            parent, label, level = branch, key, depth + 1
            if split and "." in key and depth < DEEPEST - SPLITS and _has_levels(key):
                prefix, _, label = key.rpartition(".")
                parent = groups.get(prefix) or _open(groups, prefix, start)
                level += key.count(".")
            self.room -= len(start) + len(key)
            if self.room < 0:
                raise LimitExceeded(
                    "the names of the values are many times longer than the stored text"
                )
            node = self.node(value, label, start + key, depth=level)
            parent.children.append(node)
            if isinstance(node, Branch):
                yield self.fill(node, value, depth=level)


def _has_levels(key: str) -> bool:
    """Whether the dots of a name make sensible levels, which those of `.weight` or `a..b` do not."""
    return key.count(".") <= SPLITS and ".." not in key and key[0] != "." and key[-1] != "."


def _open(groups: dict[str, Branch], prefix: str, start: str) -> Branch:
    """The group of a prefix, made together with those above it that are not there yet."""
    here, name = groups[""], ""
    for label in prefix.split("."):
        name = f"{name}.{label}" if name else label
        if name not in groups:
            groups[name] = Branch(label, start + name, "group")
            here.children.append(groups[name])
        here = groups[name]
    return here


def _is_size(value: object) -> bool:
    if isinstance(value, tuple):
        return 0 < len(value) <= 8 and all(type(v) is int for v in value)
    return type(value) is int


def _label(key: object) -> str:
    return str(key) if isinstance(key, int) and not isinstance(key, bool) else brief(key, 64)


NUMBER = re.compile(r"(.*?)([0-9]{1,9})([^0-9]*)\Z", re.DOTALL)
"""A label that ends in a number, or has one near its end: `3`, `layer3`, `conv3_bn`."""

FEWEST = 3
"""Labels that make a series: `ln_1` and `ln_2` are names, not numbers. Of pure numbers two are enough."""

DIFFERS = "(differs)"


def fold(root: Branch) -> Branch:
    """Fold a whole outline, in place; the root is returned."""
    _from_below(root, _Fold().branch)
    return root


class _Fold:
    """The table of signatures of one run."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def branch(self, branch: Branch, inner: list[int]) -> int:
        """Fold what is in a branch, where branches are folded and have these signatures; returns its own."""
        children, own = branch.children, iter(inner)
        signatures = [
            next(own) if isinstance(child, Branch) else self._leaf(child) for child in children
        ]
        if len(children) > 1:
            children, signatures = self._merge(children, signatures)
        branch.children = [_joined(child) for child in children]
        labels = tuple((child.label, child.times) for child in children)
        return self._number((branch.kind, branch.text, labels, tuple(signatures)))

    def _leaf(self, leaf: LeafNode) -> int:
        tensor = leaf.tensor
        if tensor is None:
            return self._number((leaf.kind, leaf.type))
        return self._number(
            (tensor.dtype.name, tensor.shape, leaf.role, leaf.tie[:1], tensor.traits.blocks)
        )

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _merge(self, children: list[Node], signatures: list[int]) -> tuple[list[Node], list[int]]:
        series: dict[tuple[str, str, int], list[int]] = {}
        for position, child in enumerate(children):
            found = NUMBER.match(child.label) if len(child.label) <= 256 else None
            # Plain values in a row are content, not structure: `loss1 = 0.3` stays as it is.
            if found and not (isinstance(child, LeafNode) and child.kind != "tensor"):
                series.setdefault((found[1], found[3], signatures[position]), []).append(position)
        gone: set[int] = set()
        for (before, after, _), positions in series.items():
            if len(positions) < (FEWEST if before or after else 2):
                continue
            members = [children[p] for p in positions]
            digits = [m.label[len(before) : len(m.label) - len(after)] for m in members]
            first = _blend(members)
            first.label = f"{before}[{ranges(digits)}]{after}"
            first.times *= len(members)
            gone.update(positions[1:])
        kept = [p for p in range(len(children)) if p not in gone]
        return [children[p] for p in kept], [signatures[p] for p in kept]


def ranges(digits: list[str]) -> str:
    """Numbers in short, in the order given.

    >>> ranges(["0", "1", "2", "5", "7", "8"]), ranges(["00", "01", "02"])
    ('0-2,5,7-8', '00-02')
    >>> ranges([str(i) for i in range(0, 40, 2)])
    '0,2,4,…,38'
    """
    runs: list[tuple[str, str]] = []
    for text in digits:
        if runs and int(text) == int(runs[-1][1]) + 1 and len(text) >= len(runs[-1][1]):
            runs[-1] = (runs[-1][0], text)
        else:
            runs.append((text, text))
    parts = [a if a == b else f"{a}-{b}" for a, b in runs]
    return ",".join(parts if len(parts) <= 6 else [*parts[:3], "…", parts[-1]])


def _blend(members: list[Node]) -> Node:
    """The first of several nodes with equal signatures, in which values that differ are marked."""
    for _, alike in cast(
        "Iterator[tuple[LinkedPath, tuple[Node, ...]]]", walk((*members,), _abreast)
    ):
        first = alike[0]
        if isinstance(first, Branch):
            continue
        if first.kind == "tensor":
            if any(m.tie != first.tie for m in alike if isinstance(m, LeafNode)):
                first.tie = f"{first.tie[:2].strip()} …"
        elif any(_differ(first, m) for m in alike if isinstance(m, LeafNode)):
            first.text = DIFFERS
    return members[0]


def _abreast(alike: tuple[Node, ...]) -> Iterable[tuple[int, tuple[Node, ...]]] | None:
    """The children of branches of one structure, side by side."""
    rows = [node.children for node in alike if isinstance(node, Branch)]
    return enumerate(zip(*rows, strict=True)) if rows else None


def _differ(a: LeafNode, b: LeafNode) -> bool:
    """Whether two leaves differ, by their values: texts are cut, and long ones look alike."""
    from holdfast.verbs.compare_values import compare_values

    return a.text != b.text if a.kind == "link" else bool(compare_values(a.value, b.value)[0])


def _joined(node: Node) -> Node:
    while isinstance(node, Branch) and node.kind == "group" and len(node.children) == 1:
        child = node.children[0]
        child.label = f"{node.label}.{child.label}"
        child.times *= node.times
        node = child
    return node
