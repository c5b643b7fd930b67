"""What all ranks have together: one catalogue, who writes which value, which names are one tensor.

Nothing here looks at boxes but for aliases; everything is a loop over the catalogues that differ, not over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.core.arrays import Ints
from holdfast.ranks.state import Catalogue, RankState

__all__ = ["Held", "Merged", "agreed_aliases", "hold", "merge", "say_ranks", "share_values"]


SHOWN = 6
"""Stretches of successive ranks that a sentence lists."""


@dataclass(frozen=True, slots=True)
class Merged:
    """One catalogue for all ranks, and how theirs map to it."""

    catalogue: Catalogue
    """Names in the order in which they first occur: those of rank 0, then what rank 1 has besides, and so on."""
    places: tuple[Ints | None, ...]
    """For each rank, from its own catalogue to this one; None where they count alike."""
    conflicts: dict[int, str]
    """The tensors about which ranks disagree, and how they do."""


def merge(states: Sequence[RankState]) -> Merged:
    """One catalogue out of all."""
    holders: dict[Catalogue, list[int]] = {}
    for rank, state in enumerate(states):
        holders.setdefault(state.catalogue, []).append(rank)
    positions: dict[str, int] = {}
    meanings: list[tuple[str, tuple[int, ...]]] = []
    disputed: set[int] = set()
    places: dict[Catalogue, Ints | None] = {}
    for catalogue in holders:
        own = []
        for name, meaning in zip(catalogue.names, zip(catalogue.dtypes, catalogue.shapes, strict=True), strict=True):
            place = positions.setdefault(name, len(meanings))
            if place == len(meanings):
                meanings.append(meaning)
            elif meanings[place] != meaning:
                disputed.add(place)
            own.append(place)
        places[catalogue] = None if own == list(range(len(own))) else np.array(own, np.int64)
    if len(holders) == 1:
        merged = next(iter(holders))
    else:
        merged = Catalogue(tuple(positions), tuple(dtype for dtype, _ in meanings), tuple(shape for _, shape in meanings))
    conflicts = {place: _dispute(merged.names[place], holders) for place in sorted(disputed)}
    return Merged(merged, tuple(places[state.catalogue] for state in states), conflicts)


def _dispute(name: str, holders: dict[Catalogue, list[int]]) -> str:
    said: dict[str, list[int]] = {}
    for catalogue, ranks in holders.items():
        if name in catalogue.positions:
            i = catalogue.positions[name]
            said.setdefault(f"{catalogue.dtypes[i]} {catalogue.shapes[i]}", []).extend(ranks)
    different = ", but ".join(f"{what} on {say_ranks(ranks)}" for what, ranks in said.items())
    return f"{name!r} is {different}; pass per_rank=[{name!r}] where each rank has its own"


@dataclass(frozen=True, slots=True)
class Held:
    """The boxes of one rank, sorted by tensor."""

    tensors: Ints
    """Places in the merged catalogue, ascending."""
    order: Ints | None
    """The box of the rank that stands at each place here; None where that is the same number."""
    state: RankState

    def taken(self, columns: Ints, begin: int, stop: int) -> Ints:
        """A stretch of columns of the rank's own, in the order of this."""
        return columns[..., begin:stop] if self.order is None else columns[..., self.order[begin:stop]]


def hold(state: RankState, places: Ints | None) -> Held:
    """The boxes of a rank, in terms of the merged catalogue."""
    tensors = state.tensors if places is None else places[state.tensors]
    if len(tensors) < 2 or bool((tensors[1:] >= tensors[:-1]).all()):
        return Held(tensors, None, state)
    order = np.argsort(tensors, kind="stable")
    return Held(tensors[order], order, state)


def agreed_aliases(held: Sequence[Held], merged: Merged) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Pairs (name, base) that are one tensor on every rank that has any of either; and a note for each pair that is not.

    Such a rank must declare the pair, with the same boxes for both. What is stored once comes back tied on all ranks, so one rank
    on which the two differ is enough to store both.
    """
    pairs = list(dict.fromkeys(pair for h in held if h.state.aliases for pair in h.state.aliases))
    if not pairs:
        return (), ()
    positions = merged.catalogue.positions
    names, bases = (np.array([positions[pair[side]] for pair in pairs], np.int64) for side in (0, 1))
    yes: list[list[int]] = [[] for _ in pairs]
    no: list[list[int]] = [[] for _ in pairs]
    for rank, h in enumerate(held):
        has, same = _compare(h, names, bases)
        declared = set(h.state.aliases)
        for i in np.flatnonzero(has).tolist():
            (yes if same[i] and pairs[i] in declared else no)[i].append(rank)
    agreed = tuple(pair for i, pair in enumerate(pairs) if yes[i] and not no[i])
    notes = []
    for i, (name, base) in enumerate(pairs):
        if no[i]:
            where = f"on {say_ranks(yes[i])} but not on {say_ranks(no[i])}" if yes[i] else "nowhere in the same boxes"
            notes.append(f"{name!r} and {base!r} share memory {where}, so both are stored")
    return agreed, tuple(notes)


def _compare(h: Held, names: Ints, bases: Ints) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """For each pair: whether the rank has any of either, and whether the boxes of both are the same."""
    filled = np.flatnonzero((h.taken(h.state.sizes, 0, h.state.count) > 0).all(axis=0))
    tensors = h.tensors[filled]
    begins, counts = [], []
    for wanted in (names, bases):
        begins.append(np.searchsorted(tensors, wanted, side="left"))
        counts.append(np.searchsorted(tensors, wanted, side="right") - begins[-1])
    has, same = (counts[0] + counts[1]) > 0, counts[0] == counts[1]
    pair = np.repeat(np.arange(len(names)), np.where(same, counts[0], 0))
    step = np.arange(len(pair)) - np.searchsorted(pair, pair, side="left")
    one, other = (filled[b[pair] + step] for b in begins)
    if h.order is not None:
        one, other = h.order[one], h.order[other]
    for columns in (h.state.offsets, h.state.sizes):
        same[pair[(columns[:, one] != columns[:, other]).any(axis=0)]] = False
    return has, same


def share_values(states: Sequence[RankState], merged: Merged) -> tuple[list[tuple[str, ...]], list[str]]:
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
            said = ", ".join(say_ranks(holders) for holders in versions.values())
            hint = f"pass values='first' to take the first, or per_rank=[{name!r}]"
            problems.append(f"the value {name!r} differs between {said}; {hint}")
        writes[ranks[0]].append(name)
    problems += [_two_things(name, states) for name in shared if name in merged.catalogue.positions]
    return [tuple(names) for names in writes], problems


def _two_things(name: str, states: Sequence[RankState]) -> str:
    tensor = say_ranks(rank for rank, state in enumerate(states) if name in state.catalogue.positions)
    value = say_ranks(rank for rank, state in enumerate(states) if name in state.values)
    return f"{name!r} is a tensor on {tensor}, but a value on {value}"


def say_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words.

    >>> say_ranks([3]), say_ranks([0, 1, 2, 7, 5])
    ('rank 3', 'ranks 0 to 2, 5 and 7')
    """
    ordered = np.unique(np.fromiter(ranks, np.int64))
    stretches = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    said: list[str] = []
    for s in stretches[:SHOWN]:
        said.extend([f"{s[0]} to {s[-1]}"] if len(s) > 2 else map(str, s))
    left = sum(map(len, stretches[SHOWN:]))
    if left:
        said.append(f"{left} more")
    text = ", ".join(said[:-1]) + " and " + said[-1] if len(said) > 1 else said[0]
    return ("rank " if len(ordered) == 1 else "ranks ") + text
