"""Compare a checkpoint with what it fills, a module or the state of a rank; and find what is read to where.

    match_places    places and the rows of a table    a `Match` for each memory: its places, and the row that fills it
    Outcome.check   everything that does not fit      raised, before anything is changed
    meet_places     matches and boxes                 `Fills`: ranges of files and lazy tensors, with the tensor that each fills

1. Places are matched with rows by name, and judged once for each pair of kinds (`core/match.py`). A name that no row has is looked
   up in the tree: a sparse tensor, a value, what was saved for each rank.
2. Places over one memory (tied weights) need only one name between them; the last one that is there gives its elements.
3. The tensor must have the place's shape, and a dtype that can become the place's (`plain_problem`).
4. Names on either side that have no counterpart are listed, with similar ones (`Outcome.check`).

`Rules` are those of modules (`fit`), or of the state of a rank (`torch/ranks/wanted`).
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import torch
from msgspec import Struct

from holdfast.core.box import Box
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.match import Overlaps, find_overlaps, match_rows
from holdfast.core.sharing import identify_view
from holdfast.core.table import IRREGULAR, RowKind, Table
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import Path
from holdfast.core.value import Value, replace
from holdfast.errors import DoesNotFit, Unsupported
from holdfast.torch.tensors.fill import Fills
from holdfast.torch.tensors.from_lazy import torch_dtype
from holdfast.torch.tensors.to_lazy import memory_of
from holdfast.torch.tensors.tree import ABSENT, find_value

SHOWN = 200
"""Names of each kind that a message lists; the error's attributes have all."""

SUGGESTED = 20
"""Missing names for which similar ones are found: each is compared with every name that is left over."""

COMPARED = 10_000
"""Most names that are compared."""


class Fillable(Protocol):
    """A tensor that a checkpoint fills."""

    @property
    def name(self) -> str: ...

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor; where a rank has parts of it, the one that stands for all."""


PlaceT = TypeVar("PlaceT", bound=Fillable)
RuledT = TypeVar("RuledT", bound=Fillable, contravariant=True)


class Names:
    """The names of a checkpoint under a prefix, without it, and which of them no place has taken yet."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.checkpoint = checkpoint
        self.prefix = prefix
        self.offered = [name for name in checkpoint if name.startswith(prefix)]
        """The checkpoint's names, with the prefix."""
        self.left = dict.fromkeys(name[len(prefix) :] for name in checkpoint.model_names(prefix))
        """Names that no place has taken, without those that stand beside a model."""
        self._all = frozenset(name[len(prefix) :] for name in self.offered)
        self.table: Table = checkpoint.stored

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def __iter__(self) -> Iterator[str]:
        return (name[len(self.prefix) :] for name in self.offered)

    @property
    def unexpected(self) -> list[str]:
        """Names that no place has taken, with the prefix."""
        return [self.prefix + name for name in self.left]

    def find(self, name: str, path: Path | None = None) -> object:
        """The tensor of a name, or another value of the tree; `ABSENT` where there is nothing."""
        return self.checkpoint[self.prefix + name] if name in self._all else self.value(name, path)

    def value(self, name: str, path: Path | None = None) -> object:
        """The tree's value of a name; by its path where that is known, since keys may have dots in them."""
        tree: object = self.checkpoint.tree
        if self.prefix or path is None:
            return find_value(tree, self.prefix + name)
        for step in path:
            if isinstance(tree, Mapping):
                # Integer keys of dicts are text in some formats.
                other: str | int = (
                    str(step) if isinstance(step, int) else int(step) if step.isdecimal() else step
                )
                tree = tree[step] if step in tree else tree.get(other, ABSENT)
            elif isinstance(tree, list | tuple) and isinstance(step, int) and 0 <= step < len(tree):
                tree = tree[step]
            else:
                return ABSENT
        return tree

    def take(self, name: str, found: object = None) -> None:
        """Take a name, with the parts of a composite that was found under it."""
        self.left.pop(name, None)
        for part in found.parts if isinstance(found, Composite) else ():
            self.left.pop(f"{name}.{part}", None)

    def take_under(self, prefix: str) -> None:
        """Take every name that begins so."""
        for name in [name for name in self.left if name.startswith(prefix)]:
            del self.left[name]


class Outcome(Struct):
    """Everything that does not fit, and notes for people."""

    missing: list[str] = []
    mismatched: dict[str, str] = {}
    notes: list[str] = []

    def check(
        self,
        names: Names,
        unexpected: Sequence[str],
        places: Iterable[str],
        *,
        strict: bool,
        changed: str = "nothing was",
    ) -> None:
        """Raise `DoesNotFit` with all that is wrong. `places` are the target's names; `changed` begins a sentence."""
        missing, left = (self.missing, unexpected) if strict else ((), ())
        if not (missing or left or self.mismatched):
            return
        kinds = (
            (self.missing, "missing"),
            (unexpected, "unexpected"),
            (self.mismatched, "mismatched"),
        )
        counts = [f"{len(found):,} {word}" for found, word in kinds if found]
        lines = [
            f"the checkpoint does not fit, and {changed} changed: {', '.join(counts)}",
            *_hints(names, list(places)),
        ]
        lines += _shown([f"mismatched {name!r}: {why}" for name, why in self.mismatched.items()])
        similar = _similar(missing, [name[len(names.prefix) :] for name in left])
        lines += _shown([f"missing {name!r}{similar.get(name, '')}" for name in missing])
        lines += _shown([f"unexpected {name!r}" for name in left])
        raise DoesNotFit(
            "\n  - ".join(lines),
            missing=self.missing,
            unexpected=unexpected,
            mismatched=self.mismatched,
            file=names.checkpoint.path,
        )


PlaceKind = tuple[torch.dtype, tuple[int, ...], bool, object]
"""Dtype, shape, whether a place is dense, so that it can take the bytes of a tensor as they are; and whatever else its rules
compare. Places of one kind are judged together.
"""


class Match(Value, Generic[PlaceT], eq=False):
    """Places of one memory, and what of a checkpoint fills them."""

    number: int
    """The number of the first of these places among all."""
    places: Sequence[PlaceT]
    name: str
    row: int
    """The row of the checkpoint's table; `IRREGULAR` where there is only `other`."""
    exact: bool
    """Whether the places are dense and take the row as it is."""
    other: LazyTensor | Composite | None = None
    """A tensor that is in the tree and not in the table."""

    def source(self, table: Table) -> LazyTensor | Composite:
        return table.lazy_tensor(self.row) if self.other is None else self.other


class Rules(Protocol[RuledT]):
    """The rules for places of one sort."""

    def kind(self, place: RuledT) -> PlaceKind:
        """The kind by which a place is judged."""

    def problem(self, place: RuledT, kind: RowKind) -> str | None:
        """Why a place cannot take a plain tensor of a kind. Called once for each pair of kinds."""

    def look(self, place: RuledT) -> tuple[str, LazyTensor | Composite] | str | None:
        """The tensor that is not in the table, with its name; or why it cannot be taken."""

    def absent(self, places: Sequence[RuledT]) -> None:
        """Called with places of one memory for which there is nothing."""

    def memory(self, place: RuledT) -> object:
        """A key that places of one memory share. Called for those that are not dense."""

    def parts(self, place: RuledT) -> Sequence[tuple[Box, torch.Tensor]]:
        """The boxes of the whole tensor that are filled, and the memory of each."""


def match_places(
    places: Sequence[PlaceT], names: Names, rules: Rules[PlaceT], outcome: Outcome, *, strict: bool
) -> list[Match[PlaceT]]:
    """Match places with a checkpoint, in order; the names that are found are taken. `outcome` gets what does not fit.

    Reads data only where names offer several tensors for one memory.
    """
    table, positions = names.table, dict[PlaceKind, int]()
    kinds = [*map(rules.kind, places)]
    own = [positions.setdefault(kind, len(positions)) for kind in kinds]
    samples = dict(zip(own, zip(places, kinds, strict=True), strict=True))
    exact: dict[tuple[int, int], bool] = {}

    def judge(there: int, here: int) -> str | None:
        place, kind = samples[here]
        exact[there, here] = _is_exact(kind, table.kinds[there])
        return rules.problem(place, table.kinds[there])

    found = match_rows(
        table.row_indices,
        table.kind_indices,
        [names.prefix + place.name for place in places],
        own,
        judge,
    )
    pairs, kind = zip(found.destinations, found.rows, strict=True), table.kind_indices
    matches = {
        n: Match(n, (places[n],), places[n].name, row, exact[kind[row], own[n]]) for n, row in pairs
    }
    for number in (*found.destinations, *found.refused):
        names.left.pop(places[number].name, None)
    ties = _ties(places, kinds, rules)
    tied = {number for group in ties for number in group}
    groups = [
        *ties,
        *([number] for number in (*found.missing, *found.refused) if number not in tied),
    ]

    def offered(number: int) -> Match[PlaceT] | str | None:
        if number not in found.refused and number not in matches:
            place = places[number]
            offer = rules.look(place)
            return (
                Match(number, (place,), offer[0], IRREGULAR, False, offer[1])
                if isinstance(offer, tuple)
                else offer
            )
        return found.refused.get(number) or matches.pop(number)

    for group in sorted(groups):
        taken = _match_tied(
            [places[number] for number in group],
            [offered(number) for number in group],
            names,
            rules,
            outcome,
            strict,
        )
        if taken is not None:
            matches[group[0]] = replace(
                taken, number=group[0], places=tuple(places[number] for number in group)
            )
    return [matches[number] for number in sorted(matches)]


def _is_exact(own: PlaceKind, kind: RowKind) -> bool:
    """Whether a place of a kind takes the bytes of a row as they are."""
    dtype, shape, dense, _ = own
    if (
        not dense
        or kind.traits.meta
        or kind.dtype.packed
        or kind.dtype.kind == "quantized"
        or kind.shape != shape
    ):
        return False
    try:
        return torch_dtype(kind.dtype) is dtype
    except Unsupported:
        return False


def _ties(
    places: Sequence[PlaceT], kinds: Sequence[PlaceKind], rules: Rules[PlaceT]
) -> list[list[int]]:
    """Groups of places that share one memory, by their numbers.

    Such tensors begin at one address, so for most the address is all that is compared.
    """
    memories: dict[int, object] = {}
    addresses: list[int] = []
    for number, (place, kind) in enumerate(zip(places, kinds, strict=True)):
        if kind[2]:
            addresses.append(place.tensor.data_ptr())
            continue
        memory = memories[number] = rules.memory(place)
        match memory:
            case (torch.device(), int(start), int(offset), torch.dtype(itemsize=width), *_):
                # `memory_of` elements that have an address.
                addresses.append(start + offset * width)
            case _:
                addresses.append(0)
    counts = Counter(addresses)
    tied: dict[object, list[int]] = {}
    for number, address in enumerate(addresses):
        if counts[address] > 1 or number in memories:
            tied.setdefault(memories.get(number) or memory_of(places[number].tensor), []).append(
                number
            )
    return [group for group in tied.values() if len(group) > 1]


def _match_tied(
    places: Sequence[PlaceT],
    found: Sequence[Match[PlaceT] | str | None],
    names: Names,
    rules: Rules[PlaceT],
    outcome: Outcome,
    strict: bool,
) -> Match[PlaceT] | None:
    """Match places of one memory: the last name that is there gives its elements, as with `load_state_dict`."""
    problems = {
        place.name: offer
        for place, offer in zip(places, found, strict=True)
        if isinstance(offer, str)
    }
    offers = [offer for offer in found if offer is not None and not isinstance(offer, str)]
    if problems:
        outcome.mismatched |= problems
        return None
    if not offers:
        rules.absent(places)
        return None
    (last,), taken = offers[-1].places, offers[-1]
    for offer in offers[:-1]:
        if _differ(offer, taken, names.table, rules):
            (place,) = offer.places
            why = (
                f"it is tied to {last.name!r} here, and the checkpoint has other elements for that"
            )
            if strict:
                outcome.mismatched[place.name] = why
            else:
                outcome.notes.append(f"{place.name!r}: {why}; those were taken")
    followers = [place.name for place, offer in zip(places, found, strict=True) if offer is None]
    if followers:
        outcome.notes.append(tied_note(followers, last.name))
    return taken


def meet_places(
    names: Names,
    matches: Sequence[Match[PlaceT]],
    rules: Rules[PlaceT],
    fresh: Mapping[int, torch.Tensor] = MappingProxyType({}),
) -> tuple[Fills, Overlaps]:
    """The fills of matches, and the match and the box of each. Composites are not filled.

    `fresh` tensors, by the numbers of matches, are filled instead of the places, and take rows as they are.
    """
    table = names.table.locate_rows([one.row for one in matches if one.row != IRREGULAR])
    given: dict[int, LazyTensor] = {}
    boxes: list[list[Box] | None] = [None] * len(matches)
    targets: dict[int, Sequence[tuple[Box, torch.Tensor]]] = {}
    for pair, one in enumerate(matches):
        if not one.exact and one.number not in fresh:
            targets[pair] = rules.parts(one.places[0])
            given[pair] = shaped(one, table, rules.kind(one.places[0])[1])
            boxes[pair] = [box for box, _ in targets[pair]]
    met = find_overlaps(table, [one.row for one in matches], boxes, given)
    rows = [
        matches[pair].row if at not in met.tensors else IRREGULAR
        for at, pair in enumerate(met.pair_indices)
    ]
    whole = [fresh[one.number] if one.number in fresh else one.places[0].tensor for one in matches]
    tensors = [
        targets[pair][box][1] if pair in targets else whole[pair]
        for pair, box in zip(met.pair_indices, met.box_indices, strict=True)
    ]
    return Fills(table, rows, met.tensors, tensors), met


def shaped(one: Match[PlaceT], table: Table, shape: tuple[int, ...]) -> LazyTensor:
    """The plain tensor that fills places, in their shape.

    A scalar was a tensor of one element before torch 0.4.
    """
    found = one.source(table)
    assert isinstance(found, LazyTensor)
    return found[0] if found.shape == (1,) and not shape else found


def _differ(one: Match[PlaceT], other: Match[PlaceT], table: Table, rules: Rules[PlaceT]) -> bool:
    """Whether two names offer different elements for the parts that are filled."""
    a, b = one.source(table), other.source(table)
    if not (isinstance(a, LazyTensor) and isinstance(b, LazyTensor)):
        return a is not b
    if identify_view(a) == identify_view(b):
        return False
    boxes = [box for box, _ in rules.parts(one.places[0]) if box.count]
    cut = [
        (a, b) if box.shape == a.shape or a.dtype.packed else (a[box.slices], b[box.slices])
        for box in boxes
    ]
    return any(x.digest() != y.digest() for x, y in cut)


def tied_note(followers: Sequence[str], name: str) -> str:
    return f"not in the checkpoint, and tied to {name!r}: {', '.join(map(repr, followers))}"


def plain_problem(
    offer: RowKind, shape: tuple[int, ...], dtype_problem: Callable[[torch.dtype], str | None]
) -> str | None:
    """Why a plain tensor of this shape cannot take elements of a kind; `dtype_problem` judges their dtype."""
    if offer.traits.meta:
        return "the checkpoint has its shape and no data: it was saved from the meta device"
    try:
        own = torch_dtype(offer.dtype)
    except Unsupported as error:
        return error.message
    there = () if offer.shape == (1,) and not shape else offer.shape
    if offer.dtype.name == "float4_e2m1fn" and offer.shape:
        there = (*offer.shape[:-1], offer.shape[-1] // 2)
    if there != shape:
        return f"{list(shape)} here, {list(there)} in the checkpoint"
    return dtype_problem(own)


def short(value: object) -> str:
    return str(value).removeprefix("torch.")


def _shown(lines: list[str]) -> list[str]:
    return (
        lines
        if len(lines) <= SHOWN
        else [*lines[:SHOWN], f"… and {len(lines) - SHOWN:,} more like the last"]
    )


def _similar(missing: Sequence[str], left: Sequence[str]) -> dict[str, str]:
    """For missing names, a question with the similar ones among the names that are left over."""
    found = {}
    for name in missing[:SUGGESTED]:
        similar = difflib.get_close_matches(name, left[:COMPARED], n=3, cutoff=0.6)
        if similar:
            found[name] = f"; did you mean {' or '.join(map(repr, similar))}?"
    return found


def _hints(names: Names, wanted: list[str]) -> list[str]:
    """A hint where every name is there, with a prefix on one of the sides."""
    if not wanted or any(name in names for name in wanted):
        return []
    everything = set(names.checkpoint)
    for full in names.checkpoint:
        prefix = full.removesuffix(wanted[0])
        if (
            prefix != full
            and (not prefix or prefix.endswith("."))
            and all(prefix + name in everything for name in wanted)
        ):
            return [f"every name is there behind {prefix!r}: pass prefix={prefix!r}"]
    first = next(iter(names.left), None)
    for name in wanted if first is not None else []:
        prefix = name.removesuffix(first or "")
        if (
            prefix != name
            and prefix.endswith(".")
            and all(other.removeprefix(prefix) in names for other in wanted)
        ):
            return [
                f"every name is there without {prefix!r}: load into what is called {prefix[:-1]!r} in the target"
            ]
    return []
