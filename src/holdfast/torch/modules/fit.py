"""The places in a module, or in a nested mapping, that a checkpoint fills; and everything that does not fit them.

A place (`Slot`) is what `state_dict()` would list. A module that has its own way of loading (an overridden `_load_from_state_dict`,
hooks that run before it) loads itself: it is given its part of the checkpoint as a state dict. The overrides of `torch.nn` that
only update old state dicts are not called where the state is up to date.

A slot is filled, or replaced where the caller wants that or it is on the meta device.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from functools import cache

import torch
from msgspec import Struct, field
from torch import nn

from holdfast.core.box import Box
from holdfast.core.chunk import has_overlapping_elements
from holdfast.core.quantities import describe_value
from holdfast.core.table import RowKind, Table
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import LinkedPath, Unrolled, get_mapping_children, join_linked_path, unroll
from holdfast.core.value import Value
from holdfast.errors import BadArgumentType
from holdfast.torch.modules.match import (
    Match,
    Names,
    Outcome,
    PlaceKind,
    match_places,
    plain_problem,
    short,
    tied_note,
)
from holdfast.torch.modules.wrappers import removed_wrappers
from holdfast.torch.ranks.shards import PLAIN, is_sharded
from holdfast.torch.tensors.fill import CPU, is_dense
from holdfast.torch.tensors.from_lazy import torch_dtype
from holdfast.torch.tensors.to_lazy import memory_of
from holdfast.torch.tensors.tree import ABSENT, opaque_inside

EXTRA = "_extra_state"
"""The name of `get_extra_state()` in `state_dict()`."""

OWN = "torch.nn.modules."
"""The modules of overrides of `_load_from_state_dict` that only update old state dicts: batch and instance norm."""

IsCurrent = Callable[[str, nn.Module], bool]


class Slot(Value, eq=False):
    """A tensor under its dotted name, and the container that holds it."""

    name: str
    tensor: torch.Tensor
    owner: object
    key: object

    @property
    def open(self) -> bool:
        """Whether another tensor can be put there."""
        return isinstance(self.owner, nn.Module | MutableMapping | list)

    def put(self, tensor: torch.Tensor) -> None:
        match self.owner:
            case nn.Module():
                # Not into `_parameters`: recurrent modules update their lists of weights this way.
                setattr(self.owner, str(self.key), tensor)
            case MutableMapping():
                self.owner[self.key] = tensor
            case list() if isinstance(self.key, int):
                self.owner[self.key] = tensor


class Targets(Struct):
    slots: list[Slot] = []
    extras: dict[str, nn.Module] = {}
    self_loading: dict[str, nn.Module] = {}
    hooked: list[nn.Module] = []
    """Modules with hooks that run after loading, children first."""
    removed: frozenset[str] = frozenset()
    """Names of wrappers that the checkpoint does not have (`wrappers`)."""
    duplicates: list[str] = []
    """Names that two tensors have."""


def find_targets(
    into: nn.Module | Mapping[str, object], is_current: IsCurrent, there: Container[str]
) -> Targets:
    """List the places to fill. `is_current(prefix, module)` tells whether a versioned module of torch's needs no update.

    `there` are the names of the checkpoint. The prefixes of DDP and `torch.compile` are left out where it has none.
    """
    targets = Targets()
    if isinstance(into, nn.Module):
        targets.removed = removed_wrappers(
            into, [slot.name for slot in all_slots(into)], there.__contains__
        )
        if type(into).load_state_dict is not nn.Module.load_state_dict:
            targets.self_loading[""] = into
        else:
            _walk_module(into, "", "", targets=targets, is_current=is_current)
    elif isinstance(into, Mapping):
        unroll(_slots_in(into, None, targets.slots, set()))
    else:
        raise BadArgumentType(
            f"load_into fills an nn.Module or a mapping of tensors, not {describe_value(into)}",
            found=into,
        )
    counts = Counter(slot.name for slot in targets.slots)
    targets.duplicates = [name for name, count in counts.items() if count > 1]
    return targets


def module_slots(module: nn.Module, prefix: str) -> Iterator[Slot]:
    """The parameters and persistent buffers of a module, without those of its children."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Slot(prefix + name, parameter, module, name)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield Slot(prefix + name, buffer, module, name)


def all_slots(module: nn.Module) -> Iterator[Slot]:
    """The parameters and persistent buffers of a module and of its children, however they load."""
    for name, child in module.named_modules(remove_duplicate=False):
        yield from module_slots(child, f"{name}." if name else "")


def _walk_module(
    module: nn.Module, raw: str, prefix: str, *, targets: Targets, is_current: IsCurrent
) -> None:
    """Add the places of a module. `raw` is the prefix of its names in the target, `prefix` that without the names of wrappers."""
    if _loads_itself(module, prefix, is_current):
        targets.self_loading[prefix] = module
        return
    targets.slots += module_slots(module, prefix)
    if type(module).set_extra_state is not nn.Module.set_extra_state:
        targets.extras[prefix + EXTRA] = module
    for name, child in module._modules.items():
        if child is not None:
            inner = prefix if raw + name in targets.removed else f"{prefix}{name}."
            _walk_module(child, f"{raw}{name}.", inner, targets=targets, is_current=is_current)
    if module._load_state_dict_post_hooks:
        targets.hooked.append(module)


def _loads_itself(module: nn.Module, prefix: str, is_current: IsCurrent) -> bool:
    if module._load_state_dict_pre_hooks:
        return True
    own = type(module)._load_from_state_dict
    if own is nn.Module._load_from_state_dict:
        return False
    return not (own.__module__.startswith(OWN) and is_current(prefix, module))


def _slots_in(value: object, way: LinkedPath, found: list[Slot], above: set[int]) -> Unrolled[None]:
    if id(value) in above:
        raise ValueError(f"{join_linked_path(way)} contains itself")
    above.add(id(value))
    for key, inner in get_mapping_children(value) or ():
        if isinstance(inner, torch.Tensor):
            found.append(Slot(join_linked_path((way, key)), inner, value, key))
        elif isinstance(inner, Mapping | list | tuple):
            yield _slots_in(inner, (way, key), found, above)
    above.remove(id(value))


class Choice(Value):
    """The caller's choice of device and dtype, and whether tensors are replaced."""

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    assign: bool = False

    def fresh(self, target: torch.Tensor) -> bool:
        return self.assign or target.is_meta

    def dtype_for(self, target: torch.Tensor, found: torch.dtype) -> torch.dtype:
        if not self.fresh(target):
            return target.dtype
        if self.dtype is not None and target.is_floating_point():
            return self.dtype
        return found if self.assign else target.dtype

    def device_for(self, target: torch.Tensor) -> torch.device:
        if not self.fresh(target):
            return target.device
        return self.device or (CPU if target.is_meta else target.device)


class Fit(Outcome):
    matches: list[Match[Slot]] = field(default_factory=list)
    extras: dict[nn.Module, object] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    followers: list[Slot] = field(default_factory=list)
    """Slots that are not in the checkpoint, and tied to a tensor of a submodule that loads itself."""
    casts: dict[str, str] = field(default_factory=dict)


class SlotRules:
    """The rules of slots. Slots that the checkpoint does not have are added to `found`."""

    def __init__(self, targets: Targets, names: Names, choice: Choice, found: Fit) -> None:
        self._names, self._choice, self._found = names, choice, found
        self._elsewhere = {
            id(slot.tensor): prefix + slot.name
            for prefix, module in targets.self_loading.items()
            for slot in all_slots(module)
            if prefix + slot.name in names
        }

    def kind(self, slot: Slot) -> PlaceKind:
        target, fresh = slot.tensor, self._choice.fresh(slot.tensor)
        if type(target) in PLAIN and not is_sharded(target):
            if not fresh and is_dense(target):
                return target.dtype, target.shape, True, target.device
            if (
                fresh
                and target.layout is torch.strided
                and not target.is_nested
                and not target.is_quantized
            ):
                return target.dtype, target.shape, False, type(slot.owner)
        shapeless = nn.parameter.is_lazy(target) or target.is_nested
        return target.dtype, () if shapeless else target.shape, False, id(slot)

    def problem(self, slot: Slot, kind: RowKind) -> str | None:
        return _problem(slot, kind, self._choice)

    def look(self, slot: Slot) -> tuple[str, LazyTensor | Composite] | str | None:
        offer = self._names.find(slot.name)
        if not isinstance(offer, LazyTensor | Composite):
            return None
        self._names.take(slot.name, offer)
        kind = offer if isinstance(offer, Composite) else RowKind.from_tensor(offer)
        return _problem(slot, kind, self._choice) or (slot.name, offer)

    def absent(self, slots: Sequence[Slot]) -> None:
        names, owner = [slot.name for slot in slots], self._elsewhere.get(id(slots[0].tensor))
        if owner is None:
            self._found.missing += names
        else:
            self._found.followers += slots
            self._found.notes.append(tied_note(names, owner))

    def memory(self, slot: Slot) -> object:
        # Tied tensors of a state dict are different objects over one memory. What is replaced is known by its object.
        return id(slot.tensor) if self._choice.fresh(slot.tensor) else memory_of(slot.tensor)

    def parts(self, slot: Slot) -> list[tuple[Box, torch.Tensor]]:
        return [(Box.whole(tuple(slot.tensor.shape)), slot.tensor)]


def fit(targets: Targets, names: Names, choice: Choice, *, strict: bool) -> Fit:
    """Match slots with the tensors of a checkpoint. Reads data only where one slot is offered two tensors."""
    found = Fit()
    for name in targets.duplicates:
        found.mismatched[name] = "two tensors of the target have this name"
    rules = SlotRules(targets, names, choice, found)
    found.matches = match_places(targets.slots, names, rules, found, strict=strict)
    for match in found.matches:
        if not match.exact:
            found.casts |= _casts(match, names.table, choice)
    for name, module in targets.extras.items():
        value = names.find(name)
        names.take(name, value)
        if value is not ABSENT and name not in names:
            names.take_under(f"{name}.")
        if value is ABSENT:
            found.missing.append(name)
        elif opaque_inside(value):
            found.mismatched[name] = "it holds objects of classes that Holdfast does not build"
        else:
            found.extras[module] = value
    for prefix in targets.self_loading:
        names.take_under(prefix)
    order = {slot.name: number for number, slot in enumerate(targets.slots)}
    found.missing.sort(key=lambda name: order.get(name, len(order)))
    found.unexpected = names.unexpected
    return found


def _casts(match: Match[Slot], table: Table, choice: Choice) -> dict[str, str]:
    """What is cast to what, by the names of slots whose dtype is another one in the checkpoint."""
    if isinstance(match.other, Composite):
        return {}
    own = torch_dtype(table.row_kind(match.row).dtype if match.other is None else match.other.dtype)
    wanted = choice.dtype_for(match.places[-1].tensor, own)
    if wanted == own:
        return {}
    return {
        slot.name: f"{short(own)} in the checkpoint, {short(wanted)} here" for slot in match.places
    }


def wrapped_problem(tensor: torch.Tensor) -> str | None:
    """Why a tensor of a subclass is not filled."""
    kind = type(tensor)
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return None
    if is_sharded(tensor):
        return f"it is a {kind.__name__}, of which each rank has a part: load_sharded(path, model) fills it, from any format"
    return f"it is a {kind.__name__}, which holds its elements in a way of its own; fill the tensors inside of it"


def _problem(slot: Slot, offer: RowKind | Composite, choice: Choice) -> str | None:
    target = slot.tensor
    if (wrapped := wrapped_problem(target)) is not None:
        return wrapped
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
        return f"it is {'quantised' if target.is_quantized else short(target.layout)} here, and a plain tensor in the checkpoint"
    return plain_problem(
        offer, tuple(target.shape), lambda own: _dtype_problem(target, own, choice)
    )


def _fixed(target: torch.Tensor, choice: Choice) -> str | None:
    """Why a tensor that is filled in place cannot be what the caller wants."""
    if (
        target.layout is torch.strided
        and not target.is_nested
        and has_overlapping_elements(target.shape, target.stride())
    ):
        return "its elements share memory (an expanded tensor): there is no room for those of the checkpoint; clone it first"
    if choice.dtype is not None and target.is_floating_point() and target.dtype != choice.dtype:
        return f"it is filled in place and is {short(target.dtype)}; for {short(choice.dtype)} pass assign=True"
    device = choice.device
    if device is not None and (
        device.type != target.device.type or device.index not in (None, target.device.index)
    ):
        return f"it is filled in place, on {target.device}; for {device} pass assign=True"
    return None


def _dtype_problem(target: torch.Tensor, own: torch.dtype, choice: Choice) -> str | None:
    wanted = choice.dtype_for(target, own)
    if own == target.dtype == wanted:
        return None
    here, there = _kind(target.dtype), _kind(own)
    if here != there and not (
        choice.dtype == wanted and here == "floating-point" and there in ("integer", "boolean")
    ):
        more = (
            f"; pass dtype={wanted} to have it cast"
            if here == "floating-point" and there != "complex"
            else ""
        )
        return f"{short(target.dtype)} here, {short(own)} in the checkpoint{more}"
    if wanted != own and not _castable(own, wanted):
        return f"torch cannot cast {short(own)}, which it is in the checkpoint, to {short(wanted)}"
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
            torch.empty(1, dtype=wanted, device="cpu").copy_(
                torch.empty(1, dtype=own, device="cpu")
            )
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _composite_problem(target: torch.Tensor, offer: Composite, choice: Choice) -> str | None:
    if choice.assign:
        return (
            None
            if offer.shape == tuple(target.shape)
            else f"{list(target.shape)} here, {list(offer.shape)} in the checkpoint"
        )
    own = "quantized" if target.is_quantized else short(target.layout)
    if own != offer.kind:
        return f"{own} here, {offer.kind} in the checkpoint; pass assign=True to replace it"
    if offer.shape != tuple(target.shape):
        return f"{list(target.shape)} here, {list(offer.shape)} in the checkpoint"
    values = offer.parts.get("int_repr", offer.parts.get("values"))
    if values is None:
        return f"a {offer.kind} tensor cannot be filled in place; pass assign=True to replace it"
    if torch_dtype(values.dtype) != target.dtype:
        return f"{short(target.dtype)} here, {values.dtype} in the checkpoint; pass assign=True to replace it"
    if (
        target.is_quantized
        and not target.is_meta
        and offer.attributes.get("qscheme") != short(target.qscheme())
    ):
        return f"{target.qscheme()} here, {offer.attributes.get('qscheme')} in the checkpoint"
    if (
        own not in ("quantized", "sparse_coo")
        and not target.is_meta
        and target._nnz() != values.shape[0]
    ):
        return f"{target._nnz():,} elements are stored here, {values.shape[0]:,} in the checkpoint; pass assign=True to replace it"
    return None
