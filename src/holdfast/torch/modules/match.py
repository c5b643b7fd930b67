"""Does a checkpoint fit a module? Everything that speaks against it is collected, before anything is changed.

1. Each slot looks for its name in the checkpoint; slots that hold one tensor (tied weights) need only one name between them.
2. What is found must have the slot's shape, and a dtype that can become the slot's.
3. Names on either side that have no counterpart are listed, with those that look like it.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import nn

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.composite import Composite
from holdfast.core.tensor import LazyTensor
from holdfast.errors import DoesNotFit, Unsupported
from holdfast.torch.modules.targets import Slot, Targets, all_slots
from holdfast.torch.tensors.allocate import CPU
from holdfast.torch.tensors.from_lazy import torch_dtype
from holdfast.torch.tensors.memory import memory_of
from holdfast.torch.tensors.shared_regions import repeats
from holdfast.torch.tensors.tree import ABSENT, find_value, opaque_inside

__all__ = ["Choice", "Fit", "Match", "Names", "different", "fit"]

SHOWN = 200
"""Names of each kind that a message lists; all of them are in the error's attributes."""

SUGGESTED = 20
"""Missing names for which similar ones are looked for: each takes a comparison with every name that is left over."""

COMPARED = 10_000
"""Names that are compared, at the most."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the caller said about the tensors that are to be."""

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    assign: bool = False

    def fresh(self, target: torch.Tensor) -> bool:
        """Whether the target is replaced, and not filled."""
        return self.assign or target.is_meta

    def dtype_for(self, target: torch.Tensor, found: torch.dtype) -> torch.dtype:
        """What the loaded tensor shall be."""
        if not self.fresh(target):
            return target.dtype
        if self.dtype is not None and target.is_floating_point():
            return self.dtype
        return found if self.assign else target.dtype

    def device_for(self, target: torch.Tensor) -> torch.device:
        """Where the loaded tensor shall be."""
        if not self.fresh(target):
            return target.device
        return self.device or (CPU if target.is_meta else target.device)


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """Slots that hold one tensor, and what goes there."""

    slots: tuple[Slot, ...]
    found: LazyTensor | Composite

    @property
    def target(self) -> torch.Tensor:
        return self.slots[0].tensor


class Names:
    """The names of a checkpoint under a prefix, without it."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.checkpoint = checkpoint
        self.prefix = prefix
        self.left = dict.fromkeys(name[len(prefix) :] for name in checkpoint if name.startswith(prefix))
        """Those that nobody asked for yet."""
        self._all = frozenset(self.left)

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def take(self, name: str) -> LazyTensor | Composite | None:
        """The tensor of a name, which counts as asked for."""
        if name in self._all:
            self.left.pop(name, None)
            return self.checkpoint[self.prefix + name]
        found = find_value(self.checkpoint.tree, self.prefix + name)
        if not isinstance(found, Composite):
            return None
        for part in found.parts:
            self.left.pop(f"{name}.{part}", None)
        return found

    def take_value(self, name: str) -> object:
        """Whatever stands under a name, tensor or not."""
        if name in self._all:
            return self.take(name)
        found = find_value(self.checkpoint.tree, self.prefix + name)
        if found is not ABSENT:
            self.take_under(f"{name}.")
        return found

    def take_under(self, prefix: str) -> list[str]:
        """Every name that begins so."""
        taken = [name for name in self.left if name.startswith(prefix)]
        for name in taken:
            del self.left[name]
        return taken


@dataclass(slots=True)
class Fit:
    """What goes where, and what does not."""

    matches: list[Match] = field(default_factory=list)
    extras: dict[nn.Module, object] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    """As the checkpoint calls them."""
    followers: list[Slot] = field(default_factory=list)
    """Not in the checkpoint themselves, and tied to a tensor of a submodule that loads itself."""
    mismatched: dict[str, str] = field(default_factory=dict)
    casts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def check(self, names: Names, targets: Targets, *, strict: bool, changed: bool = False) -> None:
        """Raise `DoesNotFit` with all that is wrong."""
        if self.mismatched or (strict and (self.missing or self.unexpected)):
            raise DoesNotFit(
                self._message(names, targets, strict=strict, changed=changed),
                missing=self.missing,
                unexpected=self.unexpected,
                mismatched=self.mismatched,
                file=names.checkpoint.path,
            )

    def _message(self, names: Names, targets: Targets, *, strict: bool, changed: bool) -> str:
        counts = [
            f"{len(found):,} {word}"
            for found, word in ((self.missing, "missing"), (self.unexpected, "unexpected"), (self.mismatched, "mismatched"))
            if found
        ]
        what = "only submodules that load themselves were" if changed else "nothing was"
        lines = [f"the checkpoint does not fit, and {what} changed: {', '.join(counts)}", *_hints(names, targets)]
        lines += _shown([f"mismatched {name!r}: {why}" for name, why in self.mismatched.items()])
        if strict:
            near = _similar(self.missing, [name[len(names.prefix) :] for name in self.unexpected])
            lines += _shown([f"missing {name!r}{near.get(name, '')}" for name in self.missing])
            lines += _shown([f"unexpected {name!r}" for name in self.unexpected])
        return "\n  - ".join(lines)


def fit(targets: Targets, names: Names, choice: Choice, *, strict: bool) -> Fit:
    """Match slots with the tensors of a checkpoint. Reads data only where one slot is offered two tensors."""
    found = Fit()
    for name in targets.doubles:
        found.mismatched[name] = "two tensors of the target have this name"
    tied: dict[object, list[Slot]] = {}
    for slot in targets.slots:
        # Of a state dict, tied tensors are different objects over one memory. What is replaced is known by its object.
        tied.setdefault(id(slot.tensor) if choice.fresh(slot.tensor) else memory_of(slot.tensor), []).append(slot)
    elsewhere = {
        id(slot.tensor): prefix + slot.name
        for prefix, module in targets.selves.items()
        for slot in all_slots(module)
        if prefix + slot.name in names
    }
    for slots in tied.values():
        identity = id(slots[0].tensor)
        if identity in elsewhere and not any(slot.name in names for slot in slots):
            found.followers += slots
            found.notes.append(_tied_note(slots, elsewhere[identity]))
        else:
            _match(slots, names, choice, found, strict=strict)
    for name, module in targets.extras.items():
        value = names.take_value(name)
        if value is ABSENT:
            found.missing.append(name)
        elif opaque_inside(value):
            found.mismatched[name] = "it holds objects of classes that Holdfast does not build"
        else:
            found.extras[module] = value
    for prefix in targets.selves:
        names.take_under(prefix)
    order = {slot.name: number for number, slot in enumerate(targets.slots)}
    found.missing.sort(key=lambda name: order.get(name, len(order)))
    found.unexpected = [names.prefix + name for name in names.left]
    return found


def _match(slots: list[Slot], names: Names, choice: Choice, found: Fit, *, strict: bool) -> None:
    """Slots of one tensor: the last name that is there gives its elements, as it would with `load_state_dict`."""
    offers = [(slot, offer) for slot in slots if (offer := names.take(slot.name)) is not None]
    if not offers:
        found.missing += [slot.name for slot in slots]
        return
    problems = {slot.name: why for slot, offer in offers if (why := _problem(slot, offer, choice)) is not None}
    if problems:
        found.mismatched |= problems
        return
    last, offer = offers[-1]
    for slot, other in offers[:-1]:
        if different(other, offer):
            why = f"it is tied to {last.name!r} here, and the checkpoint has other elements for that"
            if strict:
                found.mismatched[slot.name] = why
            else:
                found.notes.append(f"{slot.name!r}: {why}; those were taken")
    absent = [slot for slot in slots if all(slot is not there for there, _ in offers)]
    if absent:
        found.notes.append(_tied_note(absent, last.name))
    if isinstance(offer, LazyTensor):
        offer = _squeezed(offer, last.tensor)
        own = torch_dtype(offer.dtype)
        wanted = choice.dtype_for(last.tensor, own)
        if wanted != own:
            found.casts |= {slot.name: f"{_short(own)} in the checkpoint, {_short(wanted)} here" for slot in slots}
    found.matches.append(Match(tuple(slots), offer))


def _tied_note(absent: Sequence[Slot], name: str) -> str:
    return f"not in the checkpoint, and tied to {name!r}: {', '.join(repr(slot.name) for slot in absent)}"


def different(a: LazyTensor | Composite, b: LazyTensor | Composite) -> bool:
    """Whether two tensors certainly hold different elements."""
    if not (isinstance(a, LazyTensor) and isinstance(b, LazyTensor)):
        return a is not b
    if a.source is b.source and a.chunks == b.chunks:
        return False
    return a.digest() != b.digest()


def _problem(slot: Slot, offer: LazyTensor | Composite, choice: Choice) -> str | None:
    """Why the slot cannot have what is offered."""
    target = slot.tensor
    if type(target).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"it is a {type(target).__name__}, which holds its elements in a way of its own; fill the tensors inside of it"
    if nn.parameter.is_lazy(target):
        return "it has no shape yet; run the module once, or load through its own load_state_dict"
    if choice.fresh(target):
        if not slot.open:
            return f"it is to be replaced, and a {type(slot.owner).__name__} cannot be changed"
    elif (why := _fixed(target, choice)) is not None:
        return why
    if isinstance(offer, Composite):
        return _composite_problem(target, offer, choice)
    if target.layout is not torch.strided or target.is_quantized:
        return f"it is {'quantised' if target.is_quantized else _short(target.layout)} here, and a plain tensor in the checkpoint"
    if offer.traits.meta:
        return "the checkpoint has its shape and no data: it was saved from the meta device"
    try:
        own = torch_dtype(offer.dtype)
    except Unsupported as error:
        return error.message
    pairs = offer.dtype.name == "float4_e2m1fn" and offer.ndim
    shape = (*offer.shape[:-1], offer.shape[-1] // 2) if pairs else _squeezed(offer, target).shape
    if shape != tuple(target.shape):
        return f"{list(target.shape)} here, {list(shape)} in the checkpoint"
    return _dtype_problem(target, own, choice)


def _fixed(target: torch.Tensor, choice: Choice) -> str | None:
    """Why a tensor that is filled in place cannot be what the caller asks for."""
    if target.layout is torch.strided and not target.is_nested and repeats(target.shape, target.stride()):
        return "its elements share memory (an expanded tensor): there is no room for those of the checkpoint; clone it first"
    if choice.dtype is not None and target.is_floating_point() and target.dtype != choice.dtype:
        return f"it is filled in place and is {_short(target.dtype)}; for {_short(choice.dtype)} pass assign=True"
    device = choice.device
    if device is not None and (device.type != target.device.type or device.index not in (None, target.device.index)):
        return f"it is filled in place, on {target.device}; for {device} pass assign=True"
    return None


def _dtype_problem(target: torch.Tensor, own: torch.dtype, choice: Choice) -> str | None:
    wanted = choice.dtype_for(target, own)
    if own == target.dtype == wanted:
        return None
    here, there = _kind(target.dtype), _kind(own)
    if here != there and not (choice.dtype == wanted and here == "floating-point" and there in ("integer", "boolean")):
        more = f"; pass dtype={wanted} to have it cast" if here == "floating-point" and there != "complex" else ""
        return f"{_short(target.dtype)} here, {_short(own)} in the checkpoint{more}"
    if wanted != own and not _castable(own, wanted):
        return f"torch cannot cast {_short(own)}, which it is in the checkpoint, to {_short(wanted)}"
    return None


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "floating-point"
    if dtype.is_complex:
        return "complex"
    return "boolean" if dtype is torch.bool else "integer"


@cache
def _castable(own: torch.dtype, wanted: torch.dtype) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that complex halves are experimental
            torch.empty(1, dtype=wanted, device="cpu").copy_(torch.empty(1, dtype=own, device="cpu"))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _composite_problem(target: torch.Tensor, offer: Composite, choice: Choice) -> str | None:
    if choice.assign:
        return None if offer.shape == tuple(target.shape) else f"{list(target.shape)} here, {list(offer.shape)} in the checkpoint"
    own = "quantized" if target.is_quantized else _short(target.layout)
    if own != offer.kind:
        return f"{own} here, {offer.kind} in the checkpoint; pass assign=True to replace it"
    if offer.shape != tuple(target.shape):
        return f"{list(target.shape)} here, {list(offer.shape)} in the checkpoint"
    values = offer.parts.get("int_repr", offer.parts.get("values"))
    if values is None:
        return f"a {offer.kind} tensor cannot be filled in place; pass assign=True to replace it"
    if torch_dtype(values.dtype) != target.dtype:
        return f"{_short(target.dtype)} here, {values.dtype} in the checkpoint; pass assign=True to replace it"
    if target.is_quantized and not target.is_meta and offer.attributes.get("qscheme") != _short(target.qscheme()):
        return f"{target.qscheme()} here, {offer.attributes.get('qscheme')} in the checkpoint"
    if own not in ("quantized", "sparse_coo") and not target.is_meta and target._nnz() != values.shape[0]:
        return f"{target._nnz():,} elements are stored here, {values.shape[0]:,} in the checkpoint; pass assign=True to replace it"
    return None


def _squeezed(offer: LazyTensor, target: torch.Tensor) -> LazyTensor:
    """A scalar was a tensor of one element before torch 0.4, and such files are still about."""
    return offer[0] if offer.shape == (1,) and target.ndim == 0 else offer


def _short(value: object) -> str:
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


def _hints(names: Names, targets: Targets) -> list[str]:
    """What to do where every name is there, with something in front of it on one of the sides."""
    wanted = [slot.name for slot in targets.slots]
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
