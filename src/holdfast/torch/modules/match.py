"""Does a checkpoint fit what it is to fill, a module or the state of a rank? Names, ties, shapes and dtypes of both.

1. Each place looks for its name in the checkpoint (`Names`); places over one memory (tied weights) need only one name between them
   (`match_tied`).
2. What is found must have the place's shape, and a dtype that can become the place's (`plain_problem`).
3. Names on either side that have no counterpart are listed, with those that look like it (`Outcome.check`).

Everything that speaks against it is collected before anything is changed. What kinds of places there are, and what else one of them
asks for, is known to `fit` (modules) and to `torch/ranks/wanted` (what one rank asks for).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch
from msgspec import Struct, field

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.match import match, meet
from holdfast.core.sharing import identity
from holdfast.core.table import Table
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import Path
from holdfast.core.value import Value
from holdfast.errors import DoesNotFit, Unsupported
from holdfast.plan.table import table_of
from holdfast.torch.tensors.fill_rows import RowFills
from holdfast.torch.tensors.from_lazy import torch_dtype
from holdfast.torch.tensors.tree import ABSENT, find_value

SHOWN = 200
"""Names of each kind that a message lists; all of them are in the error's attributes."""

SUGGESTED = 20
"""Missing names for which similar ones are looked for: each takes a comparison with every name that is left over."""

COMPARED = 10_000
"""Names that are compared, at the most."""


class Fillable(Protocol):
    """Something that a checkpoint fills."""

    @property
    def name(self) -> str:
        """Its dotted name."""


PlaceT = TypeVar("PlaceT", bound=Fillable)
OfferT = TypeVar("OfferT")


class Names:
    """The names of a checkpoint under a prefix, without it, and which of them were asked for."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.checkpoint = checkpoint
        self.prefix = prefix
        self.offered = [name for name in checkpoint if name.startswith(prefix)]
        """All of them, as the checkpoint calls them."""
        self.left = dict.fromkeys(name[len(prefix) :] for name in checkpoint.model_names(prefix))
        """Those that nobody asked for yet; nobody has to ask for what stands beside a model."""
        self._all = frozenset(name[len(prefix) :] for name in self.offered)
        self._table: Table | None = None

    @property
    def table(self) -> Table:
        """The tensors of the checkpoint as rows."""
        if self._table is None:
            self._table = table_of(self.checkpoint.stored)
        return self._table

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def __iter__(self) -> Iterator[str]:
        return (name[len(self.prefix) :] for name in self.offered)

    @property
    def unexpected(self) -> list[str]:
        """Those that nobody asked for, as the checkpoint calls them."""
        return [self.prefix + name for name in self.left]

    def find(self, name: str, path: Path | None = None) -> object:
        """The tensor of a name, or whatever else the tree has there; `ABSENT` where there is nothing."""
        return self.checkpoint[self.prefix + name] if name in self._all else self.value(name, path)

    def value(self, name: str, path: Path | None = None) -> object:
        """What the tree has under a name; by its path where that is known, since keys may have dots in them."""
        tree: object = self.checkpoint.tree
        if self.prefix or path is None:
            return find_value(tree, self.prefix + name)
        for step in path:
            if isinstance(tree, Mapping):
                # Integer keys of dicts are text in some formats, so either will do.
                other: str | int = str(step) if isinstance(step, int) else int(step) if step.isdecimal() else step
                tree = tree[step] if step in tree else tree.get(other, ABSENT)
            elif isinstance(tree, list | tuple) and isinstance(step, int) and 0 <= step < len(tree):
                tree = tree[step]
            else:
                return ABSENT
        return tree

    def take(self, name: str, found: object = None) -> None:
        """Count a name as asked for, with the parts of a tensor that was found under it."""
        self.left.pop(name, None)
        for part in found.parts if isinstance(found, Composite) else ():
            self.left.pop(f"{name}.{part}", None)

    def take_all(self, names: Iterable[str]) -> None:
        """Count names of plain tensors as asked for."""
        for name in names:
            self.left.pop(name, None)

    def take_under(self, prefix: str) -> None:
        """Count every name that begins so as asked for."""
        for name in [name for name in self.left if name.startswith(prefix)]:
            del self.left[name]


class Outcome(Struct):
    """What speaks against a load, and what a person should know of it."""

    missing: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def check(
        self, names: Names, unexpected: Sequence[str], places: Iterable[str], *, strict: bool, changed: str = "nothing was"
    ) -> None:
        """Raise `DoesNotFit` with all that is wrong. `places` are all names that were looked for; `changed` begins a sentence."""
        missing, left = (self.missing, unexpected) if strict else ((), ())
        if not (missing or left or self.mismatched):
            return
        kinds = ((self.missing, "missing"), (unexpected, "unexpected"), (self.mismatched, "mismatched"))
        counts = [f"{len(found):,} {word}" for found, word in kinds if found]
        lines = [f"the checkpoint does not fit, and {changed} changed: {', '.join(counts)}", *_hints(names, list(places))]
        lines += _shown([f"mismatched {name!r}: {why}" for name, why in self.mismatched.items()])
        near = _similar(missing, [name[len(names.prefix) :] for name in left])
        lines += _shown([f"missing {name!r}{near.get(name, '')}" for name in missing])
        lines += _shown([f"unexpected {name!r}" for name in left])
        raise DoesNotFit(
            "\n  - ".join(lines),
            missing=self.missing,
            unexpected=unexpected,
            mismatched=self.mismatched,
            file=names.checkpoint.path,
        )


class DenseMatch(Value, frozen=True, eq=False):
    """What a checkpoint has for tensors that are dense memory, and share none."""

    rows: RowFills
    """Rows that are one range each."""
    taken: list[int]
    """Numbers of the tensors that they fill."""
    parts: list[tuple[int, LazyTensor]]
    """Tensors in several pieces, each with the number of the one that it fills."""
    others: list[int]
    """Numbers of the tensors that are not found, or do not get the bytes just as they are."""


def match_dense(names: Names, own: Sequence[str], tensors: Sequence[torch.Tensor]) -> DenseMatch:
    """Match tensors with rows of a checkpoint by their names, and take those names."""
    table = names.table
    kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
    found = match(table.rows, table.kind, [names.prefix + name for name in own], kinds, partial(_kind_problem, table))
    table = table.located(found.source)
    met = meet(table, found.source, [None] * len(found.source))
    taken = [found.target[pair] for pair in met.rows]
    rows = RowFills(table, [found.source[pair] for pair in met.rows], [tensors[at] for at in taken])
    parts = [(found.target[part.pair], part.tensor) for part in met.parts]
    names.take_all(own[at] for at in found.target)
    return DenseMatch(rows, taken, parts, sorted({*found.missing, *found.refused}))


def _kind_problem(table: Table, kind: int, target: tuple[torch.dtype, torch.Size]) -> str | None:
    """Why a tensor of a dtype and shape does not get the bytes of a row of a kind just as they are; None where it does."""
    own = table.kinds[kind]
    if own.traits.meta or own.dtype.packed or own.dtype.kind == "quantized" or own.shape != target[1]:
        return "another shape"
    try:
        return None if torch_dtype(own.dtype) is target[0] else "another dtype"
    except Unsupported as error:
        return error.message


def match_tied(
    places: Sequence[PlaceT],
    find: Callable[[PlaceT], OfferT | str | None],
    outcome: Outcome,
    *,
    elements: Callable[[OfferT], Sequence[LazyTensor | Composite]],
    absent: Callable[[PlaceT], None],
    strict: bool,
) -> tuple[PlaceT, OfferT] | None:
    """Places of one memory: the last name that is there gives its elements, as it would with `load_state_dict`.

    `find` says what there is for a place: an offer, None, or in words why it cannot be taken; `elements` what would be read of an
    offer. Where no name is there at all, `absent` is called for each place. Data is read only where names offer several tensors.
    """
    found = [(place, find(place)) for place in places]
    problems = {place.name: offer for place, offer in found if isinstance(offer, str)}
    offers = [(place, offer) for place, offer in found if offer is not None and not isinstance(offer, str)]
    if problems:
        outcome.mismatched |= problems
        return None
    if not offers:
        for place in places:
            absent(place)
        return None
    last, taken = offers[-1]
    for place, offer in offers[:-1]:
        if any(different(one, other) for one, other in zip(elements(offer), elements(taken), strict=True)):
            why = f"it is tied to {last.name!r} here, and the checkpoint has other elements for that"
            if strict:
                outcome.mismatched[place.name] = why
            else:
                outcome.notes.append(f"{place.name!r}: {why}; those were taken")
    followers = [place.name for place, offer in found if offer is None]
    if followers:
        outcome.notes.append(tied_note(followers, last.name))
    return last, taken


def tied_note(followers: Sequence[str], name: str) -> str:
    """What to know of places whose own names are not there."""
    return f"not in the checkpoint, and tied to {name!r}: {', '.join(map(repr, followers))}"


def different(a: LazyTensor | Composite, b: LazyTensor | Composite) -> bool:
    """Whether two tensors certainly hold different elements."""
    if not (isinstance(a, LazyTensor) and isinstance(b, LazyTensor)):
        return a is not b
    return identity(a) != identity(b) and a.digest() != b.digest()


def plain_problem(offer: LazyTensor, shape: tuple[int, ...], dtype_problem: Callable[[torch.dtype], str | None]) -> str | None:
    """Why a plain tensor of this shape cannot have the elements that are offered; `dtype_problem` judges their dtype."""
    if offer.traits.meta:
        return "the checkpoint has its shape and no data: it was saved from the meta device"
    try:
        own = torch_dtype(offer.dtype)
    except Unsupported as error:
        return error.message
    pairs = offer.dtype.name == "float4_e2m1fn" and offer.ndim
    there = (*offer.shape[:-1], offer.shape[-1] // 2) if pairs else squeezed(offer, shape).shape
    if there != shape:
        return f"{list(shape)} here, {list(there)} in the checkpoint"
    return dtype_problem(own)


def squeezed(offer: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    """A scalar was a tensor of one element before torch 0.4, and such files are still about."""
    return offer[0] if offer.shape == (1,) and not shape else offer


def short(value: object) -> str:
    """A dtype or a layout without the name of its module."""
    return str(value).removeprefix("torch.")


def _shown(lines: list[str]) -> list[str]:
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"… and {len(lines) - SHOWN:,} more like the last"]


def _similar(missing: Sequence[str], left: Sequence[str]) -> dict[str, str]:
    """For missing names, those among the names that are left over that look like them."""
    said = {}
    for name in missing[:SUGGESTED]:
        near = difflib.get_close_matches(name, left[:COMPARED], n=3, cutoff=0.6)
        if near:
            said[name] = f"; did you mean {' or '.join(map(repr, near))}?"
    return said


def _hints(names: Names, wanted: list[str]) -> list[str]:
    """What to do where every name is there, with something in front of it on one of the sides."""
    if not wanted or any(name in names for name in wanted):
        return []
    everything = set(names.checkpoint)
    for full in names.checkpoint:
        prefix = full.removesuffix(wanted[0])
        if prefix != full and (not prefix or prefix.endswith(".")) and all(prefix + name in everything for name in wanted):
            return [f"every name is there behind {prefix!r}: pass prefix={prefix!r}"]
    first = next(iter(names.left), None)
    for name in wanted if first is not None else []:
        prefix = name.removesuffix(first or "")
        if prefix != name and prefix.endswith(".") and all(other.removeprefix(prefix) in names for other in wanted):
            return [f"every name is there without {prefix!r}: load into what is called {prefix[:-1]!r} in the target"]
    return []
