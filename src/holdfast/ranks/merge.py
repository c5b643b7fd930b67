"""What all ranks have together: one catalogue, who writes which value, which names are one tensor, one tree, equal elements.

Nothing here looks at boxes but for aliases. Ranks mostly tell the very same; everything is a loop over what differs, not over the
ranks.

Trees (`merge_trees`): what each rank has besides the others is added, what several have must be the same. A tree is typed JSON
(`formats/tree_json`), as it stands in a native manifest. Mappings, of whatever kind, are put together key by key, and lists of one
length place by place, so that pipeline stages, each with layers of its own, make one state.

Elements (`differing`): do all ranks have the same where they have the same tensor? A rank tells one sum for each tensor that it has
whole (`torch/ranks/replica_sums`). Sums of one kind are compared; ranks of one save rarely differ in the kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from holdfast.core.arrays import Ints
from holdfast.core.documents import message_type, read_document
from holdfast.core.group import format_ranks
from holdfast.core.tree import iterate_values
from holdfast.core.value import Value
from holdfast.formats.tree_json.encode import flat_tree
from holdfast.ranks.state import Catalogue, RankState

SUMS = message_type("list of checksums of a rank", dict[str, tuple[int | bytes]])


class Merged(Value, frozen=True):
    """One catalogue for all ranks, and how theirs map to it."""

    catalogue: Catalogue
    """Names in the order in which they first occur: those of rank 0, then what rank 1 has besides, and so on."""
    places: tuple[Ints | None, ...]
    """For each rank, from its own catalogue to this one; None where they count alike."""
    conflicts: dict[int, str]
    """The tensors about which ranks disagree, and how they do."""


def merge(states: Sequence[RankState]) -> Merged:
    holders: dict[Catalogue, list[int]] = {}
    for rank, state in enumerate(states):
        holders.setdefault(state.catalogue, []).append(rank)
    positions: dict[str, int] = {}
    meanings: list[tuple[str, tuple[int, ...]]] = []
    disputed: set[int] = set()
    places: dict[Catalogue, Ints | None] = {}
    for catalogue in holders:
        means = list(zip(catalogue.dtypes, catalogue.shapes, strict=True))
        new = (
            [at for at, name in enumerate(catalogue.names) if name not in positions]
            if positions
            else range(len(means))
        )
        positions.update(
            zip(
                [catalogue.names[at] for at in new],
                range(len(meanings), len(meanings) + len(new)),
                strict=True,
            )
        )
        meanings += [means[at] for at in new]
        own = [positions[name] for name in catalogue.names]
        disputed.update(
            [place for place, meaning in zip(own, means, strict=True) if meanings[place] != meaning]
        )
        places[catalogue] = None if own == list(range(len(own))) else np.array(own, np.int64)
    if len(holders) == 1:
        merged = next(iter(holders))
    else:
        merged = Catalogue(
            tuple(positions),
            tuple(dtype for dtype, _ in meanings),
            tuple(shape for _, shape in meanings),
        )
    conflicts = {place: _dispute(merged.names[place], holders) for place in sorted(disputed)}
    return Merged(merged, tuple(places[state.catalogue] for state in states), conflicts)


def _dispute(name: str, holders: dict[Catalogue, list[int]]) -> str:
    said: dict[str, list[int]] = {}
    for catalogue, ranks in holders.items():
        if name in catalogue.positions:
            i = catalogue.positions[name]
            said.setdefault(f"{catalogue.dtypes[i]} {catalogue.shapes[i]}", []).extend(ranks)
    different = ", but ".join(f"{what} on {format_ranks(ranks)}" for what, ranks in said.items())
    return f"{name!r} is {different}; pass per_rank=[{name!r}] where each rank has its own"


class RankBoxes(Value, frozen=True):
    """The boxes of one rank, sorted by tensor."""

    tensors: Ints
    """Places in the merged catalogue, ascending."""
    order: Ints | None
    """The box of the rank that stands at each place here; None where that is the same number."""
    state: RankState

    def taken(self, columns: Ints, begin: int, stop: int) -> Ints:
        return (
            columns[..., begin:stop] if self.order is None else columns[..., self.order[begin:stop]]
        )


def hold(state: RankState, places: Ints | None) -> RankBoxes:
    """The boxes of a rank, in terms of the merged catalogue."""
    tensors = state.tensors if places is None else places[state.tensors]
    if len(tensors) < 2 or bool((tensors[1:] >= tensors[:-1]).all()):
        return RankBoxes(tensors, None, state)
    order = tensors.argsort(kind="stable")
    return RankBoxes(tensors[order], order, state)


def agreed_aliases(
    held: Sequence[RankBoxes], merged: Merged
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Pairs (name, base) that are one tensor on every rank that has any of either; and a note for each pair that is not.

    Such a rank must declare the pair, with the same boxes for both. What is stored once comes back tied on all ranks, so one rank
    on which the two differ is enough to store both.
    """
    pairs = list(dict.fromkeys(pair for h in held if h.state.aliases for pair in h.state.aliases))
    if not pairs:
        return (), ()
    positions = merged.catalogue.positions
    names, bases = (
        np.array([positions[pair[side]] for pair in pairs], np.int64) for side in (0, 1)
    )
    yes: list[list[int]] = [[] for _ in pairs]
    no: list[list[int]] = [[] for _ in pairs]
    for rank, h in enumerate(held):
        has, same = _compare(h, names, bases)
        declared = set(h.state.aliases)
        for i in has.nonzero()[0].tolist():
            (yes if same[i] and pairs[i] in declared else no)[i].append(rank)
    agreed = tuple(pair for i, pair in enumerate(pairs) if yes[i] and not no[i])
    notes = []
    for i, (name, base) in enumerate(pairs):
        if no[i]:
            where = (
                f"on {format_ranks(yes[i])} but not on {format_ranks(no[i])}"
                if yes[i]
                else "nowhere in the same boxes"
            )
            notes.append(f"{name!r} and {base!r} share memory {where}, so both are stored")
    return agreed, tuple(notes)


def _compare(
    h: RankBoxes, names: Ints, bases: Ints
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """For each pair: whether the rank has any of either, and whether the boxes of both are the same."""
    filled = np.flatnonzero((h.taken(h.state.sizes, 0, h.state.count) > 0).all(axis=0))
    tensors = h.tensors[filled]
    begins, counts = [], []
    for wanted in (names, bases):
        begins.append(np.searchsorted(tensors, wanted, side="left"))
        counts.append(np.searchsorted(tensors, wanted, side="right") - begins[-1])
    has, same = (counts[0] + counts[1]) > 0, counts[0] == counts[1]
    pair = np.arange(len(names)).repeat(np.where(same, counts[0], 0))
    step = np.arange(len(pair)) - np.searchsorted(pair, pair, side="left")
    one, other = (filled[b[pair] + step] for b in begins)
    if h.order is not None:
        one, other = h.order[one], h.order[other]
    for columns in (h.state.offsets, h.state.sizes):
        same[pair[(columns[:, one] != columns[:, other]).any(axis=0)]] = False
    return has, same


def share_values(
    states: Sequence[RankState], merged: Merged
) -> tuple[list[tuple[str, ...]], list[str]]:
    """For each rank the values that it writes, and the problems. A value is written by the lowest rank that has it."""
    alike: dict[tuple[tuple[str, bytes], ...], list[int]] = {}
    for rank, state in enumerate(states):
        alike.setdefault(tuple(state.values.items()), []).append(rank)
    shared: dict[str, dict[bytes, list[int]]] = {}
    for values, ranks in alike.items():
        for name, digest in values:
            shared.setdefault(name, {}).setdefault(digest, []).extend(ranks)
    problems = []
    writes: list[list[str]] = [[] for _ in states]
    for name, versions in shared.items():
        ranks = sorted(rank for holders in versions.values() for rank in holders)
        if len(versions) > 1:
            said = ", ".join(format_ranks(holders) for holders in versions.values())
            hint = f"pass values='first' to take the first, or per_rank=[{name!r}]"
            problems.append(f"the value {name!r} differs between {said}; {hint}")
        writes[ranks[0]].append(name)
    for name in [name for name in shared if name in merged.catalogue.positions]:
        tensor = format_ranks(
            rank for rank, state in enumerate(states) if name in state.catalogue.positions
        )
        value = format_ranks(rank for rank, state in enumerate(states) if name in state.values)
        problems.append(f"{name!r} is a tensor on {tensor}, but a value on {value}")
    return [tuple(names) for names in writes], problems


TAG = "$"
MAPPINGS = frozenset({"dict", "ordered_dict", "defaultdict"})
"""Kinds of nodes with `entries` (keys that are text) or `items` (pairs)."""

Pairs = dict[bytes, tuple[object, object]]
"""The entries of a mapping by their encoded keys."""


class MergedTrees(Struct):
    """One tree, and where ranks differ."""

    tree: object
    differ: dict[str, list[int]] = field(default_factory=dict)
    """By path: the ranks that have something else there than the first that has anything; the tree has that one's."""

    def problems(self) -> list[str]:
        """A sentence for each path at which ranks differ."""
        return [
            f"{at or 'the state'}: {format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} another value than the first rank; "
            f"pass values='first' to take that, or per_rank=[{at!r}] to keep one for each rank"
            for at, ranks in self.differ.items()
        ]

    def lost(self, names: Iterable[str]) -> list[str]:
        """The tensors among `names` that have no place in the tree."""
        nodes = (value for value in iterate_values(self.tree) if isinstance(value, dict))
        found = {str(node["name"]) for node in nodes if node.get(TAG) == "tensor"}
        return [name for name in names if name not in found]


def merge_trees(trees: Sequence[bytes]) -> MergedTrees:
    holders: dict[bytes, list[int]] = {}
    for rank, raw in enumerate(trees):
        holders.setdefault(raw, []).append(rank)
    decoded = [(msgspec.json.decode(raw), ranks) for raw, ranks in holders.items()]
    merged = MergedTrees(decoded[0][0])
    for tree, ranks in decoded[1:]:
        merged.tree = _merge(merged.tree, tree, at="", ranks=ranks, merged=merged)
    return merged


def _merge(one: object, other: object, *, at: str, ranks: list[int], merged: MergedTrees) -> object:
    if msgspec.json.encode(one) == msgspec.json.encode(other):
        return one
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            _merge(a, b, at=f"{at}.{i}".lstrip("."), ranks=ranks, merged=merged)
            for i, (a, b) in enumerate(zip(one, other, strict=True))
        ]
    first, second = _mapping(one), _mapping(other)
    if first is None or second is None or first[0] != second[0]:
        merged.differ.setdefault(at, []).extend(ranks)
        return one
    (kind, mine, metadata), (_, theirs, more) = first, second
    pairs = dict(mine)
    for raw, (key, value) in theirs.items():
        if raw in pairs:
            name = key if isinstance(key, str) else raw.decode()
            value = _merge(
                pairs[raw][1], value, at=f"{at}.{name}".lstrip("."), ranks=ranks, merged=merged
            )
        pairs[raw] = key, value
    node = _node(kind, pairs)
    if metadata is not None and more is not None:
        metadata = _merge(metadata, more, at=f"{at}._metadata", ranks=ranks, merged=merged)
    elif more is not None:
        metadata = more
    return node if metadata is None else {**node, "metadata": metadata}


def _mapping(node: object) -> tuple[tuple[tuple[str, object], ...], Pairs, object] | None:
    """A mapping's kind, its entries and its metadata; None for anything else."""
    if not isinstance(node, dict) or node.get(TAG, "dict") not in MAPPINGS:
        return None
    if TAG not in node:
        return ((TAG, "dict"),), _pairs(node.items()), None
    kind = tuple(
        (name, value)
        for name, value in node.items()
        if name not in ("entries", "items", "metadata")
    )
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


def one_tree(
    told: Sequence[bytes | None], states: Sequence[RankState], values: str
) -> tuple[object, list[str]]:
    """The tree of ranks whose trees differ, each None where it is a plain dict of tensors; and what stands in the way."""
    flat: dict[Catalogue, bytes] = {}
    trees = []
    for own, state in zip(told, states, strict=True):
        if own is None and state.catalogue not in flat:
            flat[state.catalogue] = msgspec.json.encode(flat_tree(state.catalogue.names))
        trees.append(flat[state.catalogue] if own is None else own)
    merged = merge_trees(trees)
    problems = merged.problems() if values != "first" else []
    lost = merged.lost(
        dict.fromkeys(
            name for state in dict.fromkeys(s.catalogue for s in states) for name in state.names
        )
    )
    if not problems:
        problems = [
            f"{name}: it stands in a list or tuple of which the first rank has another one"
            for name in lost
        ]
    return merged.tree, problems


def differing(sums_of_ranks: Sequence[bytes]) -> dict[str, list[list[int]]]:
    """The tensors that differ, from the sums of all ranks: for each, the groups of ranks that have the same."""
    alike: dict[bytes, list[int]] = {}
    for rank, sums in enumerate(sums_of_ranks):
        if not sums:
            continue  # replicas are not compared
        alike.setdefault(sums, []).append(rank)
    # Nearly always all ranks that have a tensor told the same of it.
    decoded = (
        [(read_document(SUMS, sums), ranks) for sums, ranks in alike.items()]
        if len(alike) > 1
        else []
    )
    first: dict[str, tuple[int | bytes]] = {}
    suspect: dict[str, None] = {}
    for own, _ in decoded:
        suspect |= dict.fromkeys(
            [name for name, one in own.items() if name in first and first[name] != one]
        )
        first |= {name: one for name, one in own.items() if name not in first}
    found: dict[str, dict[int | bytes, list[int]]] = (
        {name: {} for name in first if name in suspect} if suspect else {}
    )
    for own, ranks in decoded:
        for name in [name for name in own if name in suspect]:
            found[name].setdefault(own[name][0], []).extend(ranks)
    different: dict[str, list[list[int]]] = {}
    for name, versions in found.items():
        kinds = [type(one) for one in versions]
        if len(kinds) > len(set(kinds)):
            different[name] = list(versions.values())
    return different


def say_different(name: str, versions: Sequence[Sequence[int]]) -> str:
    """A sentence that one tensor differs between ranks."""
    return (
        f"{name!r}: its elements differ between {', '.join(map(format_ranks, versions))}; pass per_rank=[{name!r}] to keep one for "
        "each rank, or check_replicas=False to store one of them"
    )
