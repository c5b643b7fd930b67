"""The trees of all ranks as one: what each has besides the others is added, what several have must be the same.

A tree is typed JSON (`formats/tree_json`), as it stands in a native manifest. Mappings, of whatever kind, are put together key by
key, and lists of one length place by place, so that pipeline stages, each with layers of its own, make one state. Ranks mostly have
the very same tree; each different one is looked at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.ranks.merge import say_ranks
from holdfast.ranks.state import Catalogue, RankState

__all__ = ["MergedTrees", "flat_tree", "merge_trees", "one_tree"]

TAG = "$"
MAPPINGS = frozenset({"dict", "ordered_dict", "defaultdict"})
"""Kinds of nodes with `entries` (keys that are text) or `items` (pairs)."""

Pairs = dict[bytes, tuple[object, object]]
"""The entries of a mapping by their encoded keys."""


@dataclass(slots=True)
class MergedTrees:
    """One tree, and where ranks differ."""

    tree: object
    differ: dict[str, list[int]] = field(default_factory=dict)
    """By path: the ranks that have something else there than the first that has anything; the tree has that one's."""

    def problems(self) -> list[str]:
        """A sentence for each path."""
        return [
            f"{at or 'the state'}: {say_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} another value than the first rank; "
            f"pass values='first' to take that, or per_rank=[{at!r}] to keep one for each rank"
            for at, ranks in self.differ.items()
        ]

    def lost(self, names: Iterable[str]) -> list[str]:
        """The tensors among `names` that have no place in the tree."""
        found = set(_tensor_names(self.tree))
        return [name for name in names if name not in found]


def flat_tree(names: Iterable[str]) -> object:
    """The tree of a plain dict of tensors under their own names."""
    entries = {name: {TAG: "tensor", "name": name} for name in names}
    return {TAG: "dict", "entries": entries} if any(name.startswith(TAG) for name in entries) else entries


def merge_trees(trees: Sequence[bytes]) -> MergedTrees:
    """Merge the trees of the ranks, each as JSON text."""
    holders: dict[bytes, list[int]] = {}
    for rank, raw in enumerate(trees):
        holders.setdefault(raw, []).append(rank)
    decoded = [(msgspec.json.decode(raw), ranks) for raw, ranks in holders.items()]
    merged = MergedTrees(decoded[0][0])
    for tree, ranks in decoded[1:]:
        merged.tree = _merge(merged.tree, tree, "", ranks, merged)
    return merged


def _merge(one: object, other: object, at: str, ranks: list[int], merged: MergedTrees) -> object:
    if msgspec.json.encode(one) == msgspec.json.encode(other):
        return one
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_merge(a, b, f"{at}.{i}".lstrip("."), ranks, merged) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    first, second = _mapping(one), _mapping(other)
    if first is None or second is None or first[0] != second[0]:
        merged.differ.setdefault(at, []).extend(ranks)
        return one
    (kind, mine, metadata), (_, theirs, more) = first, second
    pairs = dict(mine)
    for raw, (key, value) in theirs.items():
        if raw in pairs:
            value = _merge(pairs[raw][1], value, f"{at}.{_said(key)}".lstrip("."), ranks, merged)
        pairs[raw] = key, value
    node = _node(kind, pairs)
    if metadata is not None and more is not None:
        metadata = _merge(metadata, more, f"{at}._metadata", ranks, merged)
    elif more is not None:
        metadata = more
    return node if metadata is None else {**node, "metadata": metadata}


def _mapping(node: object) -> tuple[tuple[tuple[str, object], ...], Pairs, object] | None:
    """A mapping's kind, its entries and its metadata; None for anything else."""
    if not isinstance(node, dict) or node.get(TAG, "dict") not in MAPPINGS:
        return None
    if TAG not in node:
        return ((TAG, "dict"),), _pairs(node.items()), None
    kind = tuple((name, value) for name, value in node.items() if name not in ("entries", "items", "metadata"))
    entries = node["entries"].items() if "entries" in node else node["items"]
    return kind, _pairs(entries), node.get("metadata")


def _pairs(entries: Iterable[Sequence[object]]) -> Pairs:
    return {msgspec.json.encode(key): (key, value) for key, value in entries}


def _node(kind: tuple[tuple[str, object], ...], pairs: Pairs) -> dict[str, object]:
    """The mapping in the form that the encoder would give it."""
    entries = {key: value for key, value in pairs.values() if isinstance(key, str)}
    if len(entries) < len(pairs):
        return {**dict(kind), "items": [[key, value] for key, value in pairs.values()]}
    if kind == ((TAG, "dict"),) and not any(key.startswith(TAG) for key in entries):
        return dict(entries)
    return {**dict(kind), "entries": entries}


def _said(key: object) -> str:
    return key if isinstance(key, str) else msgspec.json.encode(key).decode()


def _tensor_names(node: object) -> Iterator[str]:
    if isinstance(node, list):
        for inner in node:
            yield from _tensor_names(inner)
    elif isinstance(node, Mapping):
        if node.get(TAG) == "tensor":
            yield str(node["name"])
        for inner in node.values():
            yield from _tensor_names(inner)


def one_tree(told: Sequence[bytes | None], states: Sequence[RankState], values: str) -> tuple[object | None, list[str]]:
    """The tree of all ranks from what each told, None where it is a plain dict of tensors; and what stands in the way."""
    if all(tree is None for tree in told):
        return None, []
    flat: dict[Catalogue, bytes] = {}
    trees = []
    for own, state in zip(told, states, strict=True):
        if own is None and state.catalogue not in flat:
            flat[state.catalogue] = msgspec.json.encode(flat_tree(state.catalogue.names))
        trees.append(flat[state.catalogue] if own is None else own)
    merged = merge_trees(trees)
    problems = merged.problems() if values != "first" else []
    lost = merged.lost(dict.fromkeys(name for state in dict.fromkeys(s.catalogue for s in states) for name in state.names))
    if not problems:
        problems = [f"{name}: it stands in a list or tuple of which the first rank has another one" for name in lost]
    return merged.tree, problems
