"""Folding: 32 layers of the same structure are shown once.

    layers.0.weight  f32 [4, 4]             layers.[0-31].weight   f32  32 × [4, 4]
    layers.1.weight  f32 [4, 4]      →
    …

From the leaves up, every node gets a signature: its kind, its dtype and shape, and the labels and signatures of its
children, numbered through one table so that comparing two subtrees is comparing two integers. Siblings whose labels
differ in one number only and whose signatures are equal are merged. What a merge cannot keep (plain values that
differ) is shown as differing, never as the first one's. A group with one child is joined with it: `a` → `b` → `c` is
one line `a.b.c`.
"""

from __future__ import annotations

import re
from collections.abc import Hashable

from holdfast.cli.outline import Branch, Leaf, Node
from holdfast.core.sparse.storage import packing_of
from holdfast.inspect.compare_values import compare_values

__all__ = ["fold", "ranges"]

NUMBER = re.compile(r"(.*?)([0-9]{1,9})([^0-9]*)\Z", re.DOTALL)
"""A label that ends in a number, or has one near its end: `3`, `layer3`, `conv3_bn`."""

FEWEST = 3
"""Labels such as `ln_1` and `ln_2` are names, not numbers: three are needed to make a series.

Of pure numbers two are enough.
"""

DIFFERS = "(differs)"


def fold(root: Branch) -> Branch:
    """Fold a whole outline, in place; the root is returned."""
    _Fold().visit(root)
    return root


class _Fold:
    """The table of signatures of one run."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def visit(self, node: Node) -> int:
        """Fold below a node; returns its signature."""
        if isinstance(node, Leaf):
            return self._number(_leaf_key(node))
        children = node.children
        signatures = [self.visit(child) for child in children]
        if len(children) > 1:
            children, signatures = self._merge(children, signatures)
        node.children = [_joined(child) for child in children]
        labels = tuple((child.label, child.times) for child in children)
        return self._number((node.kind, node.text, labels, tuple(signatures)))

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _merge(self, children: list[Node], signatures: list[int]) -> tuple[list[Node], list[int]]:
        series: dict[tuple[str, str, int], list[int]] = {}
        for position, child in enumerate(children):
            found = NUMBER.match(child.label) if len(child.label) <= 256 else None
            # Plain values in a row are content, not structure: `loss1 = 0.3` stays as it is.
            if found and not (isinstance(child, Leaf) and child.kind != "tensor"):
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


def _leaf_key(leaf: Leaf) -> Hashable:
    if leaf.tensor is None:
        return (leaf.kind, leaf.type)
    packing = packing_of(leaf.tensor)
    return (leaf.tensor.dtype.name, leaf.tensor.shape, leaf.role, leaf.tie[:1], packing and packing.text)


def _blend(members: list[Node]) -> Node:
    """The first of several nodes with equal signatures, with what differs among them marked as such."""
    first = members[0]
    if isinstance(first, Branch):
        rows = [m.children for m in members if isinstance(m, Branch)]
        for children in zip(*rows, strict=True):
            _blend(list(children))
        return first
    if first.kind == "tensor":
        if any(m.tie != first.tie for m in members if isinstance(m, Leaf)):
            first.tie = f"{first.tie[:2].strip()} …"
    elif any(_differ(first, m) for m in members if isinstance(m, Leaf)):
        first.text = DIFFERS
    return first


def _differ(a: Leaf, b: Leaf) -> bool:
    """By what they are: texts are cut, and long ones look alike."""
    return a.text != b.text if a.kind == "link" else bool(compare_values(a.value, b.value)[0])


def _joined(node: Node) -> Node:
    """A group with one child is joined with it."""
    while isinstance(node, Branch) and node.kind == "group" and len(node.children) == 1:
        child = node.children[0]
        child.label = f"{node.label}.{child.label}"
        child.times *= node.times
        node = child
    return node
