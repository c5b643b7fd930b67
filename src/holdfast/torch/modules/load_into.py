"""`load_into`: fill a module or a state from a checkpoint, without a second copy of the weights.

1. The places to fill are listed: what `state_dict()` of the module would name (`fit`).
2. Names, shapes and dtypes are compared, and everything that does not fit is reported at once, before anything changes.
3. Submodules with their own way of loading get their part as a state dict. Only their tensors are in memory twice, one submodule at
   a time. They also get the versions that the checkpoint records (`_metadata`).
4. Bytes are read straight into the memory of the tensors that are there, or of fresh ones for those on the meta device.
5. When all of them are filled, fresh tensors take their places.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import c_strides
from holdfast.core.dtype import DType
from holdfast.core.notebook import NotebookResult
from holdfast.core.options import validate_arguments
from holdfast.core.table import Table
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.text import list_names
from holdfast.errors import DoesNotFit, HoldfastError
from holdfast.stores.paths import order_content_and_path
from holdfast.torch import versions
from holdfast.torch.arguments import device as device_given
from holdfast.torch.arguments import dtype as float_dtype
from holdfast.torch.cuda.plan import ByteKind
from holdfast.torch.modules.fit import (
    EXTRA,
    Choice,
    Fit,
    Slot,
    SlotRules,
    all_slots,
    find_targets,
    fit,
    module_slots,
    wrapped_problem,
)
from holdfast.torch.modules.match import Match, Names, meet_places, shaped
from holdfast.torch.modules.wrappers import names_with_wrappers, plain_name, renamed
from holdfast.torch.tensors.allocate import (
    Want,
    empty_tensors,
    fresh_kinds,
    has_no_gaps,
    make_fresh,
    read_lazies,
)
from holdfast.torch.tensors.fill import Progress, fill
from holdfast.torch.tensors.from_lazy import torch_dtype
from holdfast.torch.tensors.open import TorchCheckpoint
from holdfast.torch.tensors.tree import dict_under, lazy_tensors, opaque_inside, torch_tree
from holdfast.verbs.open import Openable, apply_map, opened_checkpoint

if TYPE_CHECKING:
    from holdfast.extras.maps.find import AnyMap

COUNTER = "num_batches_tracked"
"""The buffer that batch norm has had since version 2 of its state (torch 0.4.1)."""

LISTED = 20
"""Names of a kind that a printed report lists."""


@dataclass(frozen=True, slots=True)
class Loaded(NotebookResult):
    """What was loaded. Print it."""

    path: str
    names: tuple[str, ...]
    """The target's names that were filled."""
    missing: tuple[str, ...] = ()
    """The target's names that the checkpoint does not have."""
    unexpected: tuple[str, ...] = ()
    """The checkpoint's names that the target does not have."""
    mismatched: tuple[str, ...] = ()
    """Names whose dtype is another one in the checkpoint, and that were cast. Shapes that differ are an error."""
    nbytes: int = 0
    """Bytes of the tensors that were read, as the checkpoint has them."""
    notes: tuple[str, ...] = ()
    meta: tuple[str, ...] = ()
    """The target's tensors that are still on the meta device, without elements: what the checkpoint does not have, and what no
    checkpoint has (buffers with `persistent=False`, tensors that are plain attributes). Whoever made them must make them anew."""

    def __str__(self) -> str:
        lines = [f"{len(self.names):,} tensors, {self.nbytes:,} bytes, from {self.path}"]
        for word, names in (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("cast", self.mismatched),
        ):
            if names:
                lines.append(f"  {len(names):,} {word}: {list_names(names, LISTED)}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


@validate_arguments(dtype=float_dtype, device=device_given)
def load_into(
    module_or_state: nn.Module | Mapping[str, object],
    path: Openable | Checkpoint | TorchCheckpoint,
    *,
    strict: bool = True,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    assign: bool = False,
    prefix: str = "",
    verify: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
    max_host_memory: int | None = None,
    map: AnyMap | None = None,
) -> Loaded:
    """Fill the parameters and persistent buffers of a module, or the tensors of a nested mapping, from any known checkpoint.

    Tensors are filled in place; one whose dtype differs is cast, as `load_state_dict` does, but floating-point numbers, complex
    numbers, integers and booleans do not become each other. Tensors on the meta device, and all of them with `assign=True`, are
    replaced by fresh ones: on `device`, or where they were (the CPU for those on meta); of `dtype` where they are floating-point
    and it is given, else of the checkpoint's dtype with `assign=True` and of their own without. With `dtype` given, integers may
    become floating-point numbers of that dtype. `requires_grad` is kept, and tied parameters stay tied.

    A path may come first, as for `load_sharded`.
    `prefix` selects the checkpoint's names that begin with it, and is taken off them. With `strict`, every name must be on both
    sides; without, the report lists those that are not. `DoesNotFit` names everything that is wrong, before anything changes. (A
    submodule that loads itself is asked when the rest is known to fit, and may then still refuse.) A damaged file is found while
    it is read: tensors in place may have been written to by then, and fresh ones are thrown away.

    `verify` and `threads` are as in `holdfast.open`; a checkpoint that is open already keeps its own. `progress` is called with
    the number of bytes that were read since its last call. Memory beyond the target is at most 64 MiB and what the reading
    threads hold, except for sparse and quantised tensors and for submodules that load themselves, which are built first. Tensors
    on a GPU are read through at most `max_host_memory` bytes of page-locked memory (1 GiB unless said otherwise). `map` shows the
    checkpoint in the layout of the module, as in `holdfast.open`; "auto" finds it by the names of both.
    """
    choice = Choice(None if device is None else torch.device(device), dtype, assign)
    into, source = order_content_and_path(module_or_state, path)
    module_or_state, path = (
        cast("nn.Module | Mapping[str, object]", into),
        cast("Openable | Checkpoint | TorchCheckpoint", source),
    )
    if isinstance(path, TorchCheckpoint):
        path = path.lazy
    with opened_checkpoint(path, verify=verify, threads=threads) as checkpoint:
        state = (
            module_or_state.state_dict
            if isinstance(module_or_state, nn.Module)
            else lambda: module_or_state
        )
        load = Load(
            module_or_state,
            apply_map(checkpoint, map, state),
            prefix,
            choice=choice,
            max_host_memory=max_host_memory,
        )
        return load.run(strict=strict, progress=progress)


class Load:
    """One call of `load_into`."""

    def __init__(
        self,
        into: nn.Module | Mapping[str, object],
        checkpoint: Checkpoint,
        prefix: str,
        *,
        choice: Choice,
        max_host_memory: int | None,
    ) -> None:
        self._into, self._checkpoint, self._prefix, self._choice = into, checkpoint, prefix, choice
        self._max_host_memory = max_host_memory
        self._names = Names(checkpoint, prefix)
        self._names_by_themselves: list[str] = []
        """Names that submodules loaded by themselves; their bytes are in `_nbytes_by_selves`."""
        self._nbytes_by_themselves = 0
        self._replaced: dict[int, torch.Tensor] = {}
        """New tensors by the identity of those that were there before: tied slots take them, too."""
        self._targets = find_targets(into, self._is_current, self._names)

    def run(self, *, strict: bool, progress: Progress | None) -> Loaded:
        found = fit(self._targets, self._names, self._choice, strict=strict)
        wanted = [slot.name for slot in self._targets.slots]
        found.check(self._names, found.unexpected, wanted, strict=strict)
        # What is built by itself is built before anything changes: its parts may turn out not to fit together.
        table = self._names.table
        built = {
            match.number: (match, match.source(table).torch())
            for match in found.matches
            if _is_built(match, table)
        }
        extras = self._read_extras(found)
        for prefix, module in self._targets.self_loading.items():
            self._load_self(prefix, module, found, progress)
        if self._targets.self_loading:
            changed = "only submodules that load themselves were"
            found.check(self._names, found.unexpected, wanted, strict=strict, changed=changed)
        self._fill([match for match in found.matches if match.number not in built], found, progress)
        for one in built.values():
            self._place(*one)
        for module, extra in extras.items():
            module.set_extra_state(extra)
        for module in self._targets.hooked:
            for hook in module._load_state_dict_post_hooks.values():
                hook(module, _IncompatibleKeys(list(found.missing), list(found.unexpected)))
        return self._report(found)

    @cached_property
    def _versions(self) -> Versions:
        return Versions(self._checkpoint, self._prefix)

    def _is_current(self, prefix: str, module: nn.Module) -> bool:
        """Whether the checkpoint has a module's state in the form of its present version."""
        version = self._versions.of(prefix)
        if version is None:
            # Nothing is recorded. Batch norm once had no counter, and adds it by itself; other names are missing.
            return [
                slot.name for slot in module_slots(module, prefix) if slot.name not in self._names
            ] != [prefix + COUNTER]
        return version == module._version

    def _read_extras(self, found: Fit) -> dict[nn.Module, object]:
        made = read_lazies([*found.extras.values()])
        return {
            module: torch_tree(
                value, lambda one: one.torch() if isinstance(one, Composite) else made[id(one)]
            )
            for module, value in found.extras.items()
        }

    def _load_self(
        self, prefix: str, module: nn.Module, found: Fit, progress: Progress | None
    ) -> None:
        """Let a module load its part of a checkpoint; `prefix` is its place in the target, behind the checkpoint's own prefix."""
        choice, path = self._choice, self._checkpoint.path
        before = list(all_slots(module))
        wrapped = {
            prefix + slot.name: problem
            for slot in before
            if (problem := wrapped_problem(slot.tensor)) is not None
        }
        if wrapped:
            names = ", ".join(map(repr, wrapped))
            message = f"sharded and wrapped tensors are not filled here (sharded ones by load_sharded): {names}"
            raise DoesNotFit(message, mismatched=wrapped, file=path)
        state = self._state_under(self._prefix + prefix, progress)
        back = names_with_wrappers(module, state.__contains__)
        state = renamed(state, back)
        vars(state)["_metadata"] = renamed(self._versions.under(prefix), back)
        assign = choice.assign or any(slot.tensor.is_meta for slot in before)
        # A parent loads its children without calling their `load_state_dict`; only the outermost may have one of its own.
        load = module.load_state_dict if not prefix else nn.Module.load_state_dict.__get__(module)
        try:
            result = load(state, strict=False, assign=True) if assign else load(state, strict=False)
        except RuntimeError as error:
            name = prefix.removesuffix(".")
            why = f"{name or 'the module'} loads itself, and does not take its part of the checkpoint: {error}; it may have changed"
            raise DoesNotFit(why, mismatched={name: str(error)}, file=path) from error
        plain = {raw: name for name, raw in back.items()}
        missing = {prefix + plain.get(name, name) for name in getattr(result, "missing_keys", ())}
        found.missing += [
            prefix + plain.get(name, name) for name in getattr(result, "missing_keys", ())
        ]
        unexpected = getattr(result, "unexpected_keys", ())
        found.unexpected += [self._prefix + prefix + plain.get(name, name) for name in unexpected]
        self._names_by_themselves += [
            name
            for slot in before
            if (name := prefix + plain.get(slot.name, slot.name)) not in missing
        ]
        for slot in before:
            now = getattr(slot.owner, str(slot.key), None)
            if now is slot.tensor or not isinstance(now, torch.Tensor):
                continue
            if not nn.parameter.is_lazy(slot.tensor) and choice.fresh(slot.tensor):
                now.data = now.data.to(
                    device=choice.device_for(slot.tensor),
                    dtype=choice.dtype_for(slot.tensor, now.dtype),
                )
            self._replaced[id(slot.tensor)] = now

    def _state_under(self, prefix: str, progress: Progress | None) -> OrderedDict[str, object]:
        """The state dict of the names under a prefix, read."""
        checkpoint = self._checkpoint
        state: OrderedDict[str, object] = OrderedDict(
            (name[len(prefix) :], checkpoint[name])
            for name in checkpoint
            if name.startswith(prefix)
        )
        values, left = dict_under(checkpoint.tree, prefix)
        for key, value in values.items():
            if not (isinstance(key, str) and key.startswith(left)) or isinstance(value, LazyTensor):
                continue
            name = key[len(left) :]
            # What a state dict may hold beside tensors: composites, packed parameters (tuples), dtypes, the state of a module.
            if isinstance(value, Composite | tuple | DType) or name.rpartition(".")[2] == EXTRA:
                if opaque_inside(value):
                    why = "holds objects of classes that Holdfast does not build"
                    raise DoesNotFit(
                        f"{key} {why}", mismatched={key: f"it {why}"}, file=checkpoint.path
                    )
                for part in [other for other in state if other.startswith(f"{name}.")]:
                    del state[part]
                state[name] = value
        self._nbytes_by_themselves += sum(lazy.nbytes for lazy in lazy_tensors(state))
        made = read_lazies(state, device=self._choice.device, progress=progress)
        filled = torch_tree(
            state,
            lambda value: (
                value.torch() if isinstance(value, Composite) else made[id(value)].detach()
            ),
        )
        return filled if isinstance(filled, OrderedDict) else state

    def _fill(self, matches: Sequence[Match[Slot]], found: Fit, progress: Progress | None) -> None:
        """Fill what is there, and fresh tensors for the rest; these take their places when everything is filled."""
        choice, names, replaced = self._choice, self._names, self._replaced
        there = [match for match in matches if id(match.places[0].tensor) not in replaced]
        anew = [match for match in there if choice.fresh(match.places[0].tensor)]
        made = self._make(anew)
        fresh = make_fresh(
            {match.places[0].name: self._want(match) for match in anew if match.number not in made}
        )
        found.notes += fresh.notes
        in_place = (
            [match for match in there if not choice.fresh(match.places[0].tensor)]
            if anew
            else there
        )
        filled = [*in_place, *(match for match in anew if match.number in made)]
        fills, _ = meet_places(names, filled, SlotRules(self._targets, names, choice, found), made)
        try:
            more = fill(
                fills.with_more(fresh.fills), progress, max_host_memory=self._max_host_memory
            )
            found.notes += [note for note in more if note not in found.notes]
        except HoldfastError as error:
            if in_place:
                error.add_note(
                    "tensors that were to be filled in place may have been written to in part"
                )
            raise
        for match in anew:
            target = match.places[0].tensor
            new = (
                made[match.number] if match.number in made else fresh.tensors[match.places[0].name]
            )
            replaced[id(target)] = _like(target, new)
        for slot in (
            [*(slot for match in found.matches for slot in match.places), *found.followers]
            if replaced
            else []
        ):
            if id(slot.tensor) in replaced:
                slot.put(replaced[id(slot.tensor)])

    def _make(self, anew: Sequence[Match[Slot]]) -> dict[int, torch.Tensor]:
        """Fresh tensors that take rows of the checkpoint as they are, by the numbers of their matches."""
        table, rows = self._names.table, [match for match in anew if match.other is None]
        devices = [self._choice.device_for(match.places[0].tensor) for match in rows]
        made: dict[int, torch.Tensor] = {}
        for device in dict.fromkeys(devices):
            kinds = fresh_kinds(table, [match.row for match in rows], device=device)
            own = [
                (match, kind)
                for match, kind, place in zip(rows, kinds, devices, strict=True)
                if kind and place == device
            ]
            chosen = {match.number: kind for match, kind in own if self._suits(match, kind)}
            made |= dict(zip(chosen, empty_tensors([*chosen.values()], device), strict=True))
        return made

    def _suits(self, match: Match[Slot], kind: ByteKind) -> bool:
        """Whether a fresh tensor has the dtype, the shape and the order of elements that a row has."""
        choice, target = self._choice, match.places[0].tensor
        ordered = choice.assign or target.stride() == c_strides(kind.shape, 1)
        return (
            ordered
            and kind.shape == target.shape
            and choice.dtype_for(target, kind.dtype) == kind.dtype
        )

    def _want(self, match: Match[Slot]) -> Want:
        choice, target = self._choice, match.places[0].tensor
        lazy = shaped(match, self._names.table, tuple(target.shape))
        # A tensor on meta is given in the order of elements that it has; a replaced one takes the file's.
        dense = target.numel() > 0 and has_no_gaps(target.shape, target.stride(), 1)
        strides = tuple(target.stride()) if dense and not choice.assign else None
        return Want(
            lazy,
            choice.dtype_for(target, torch_dtype(lazy.dtype)),
            choice.device_for(target),
            strides,
        )

    def _place(self, match: Match[Slot], value: torch.Tensor) -> None:
        choice, target = self._choice, match.places[0].tensor
        if not choice.fresh(target):
            with torch.no_grad():
                if value.dtype is versions.dtype("float4_e2m1fn_x2"):
                    target.view(torch.uint8).copy_(value.view(torch.uint8))
                else:
                    target.copy_(value)
            return
        value = value.to(choice.device_for(target))
        if (
            value.is_floating_point()
            and not value.is_quantized
            and isinstance(match.other, Composite)
        ):
            value = value.to(choice.dtype_for(target, value.dtype))
        made = _like(target, value)
        for slot in match.places:
            slot.put(made)

    def _report(self, found: Fit) -> Loaded:
        loaded = {slot.name for match in found.matches for slot in match.places} | {
            slot.name for slot in found.followers
        }
        names = [slot.name for slot in self._targets.slots if slot.name in loaded]
        rows = [match.row for match in found.matches if match.other is None]
        others = [match.other for match in found.matches if match.other is not None]
        lazies = [
            part
            for one in others
            for part in ([one] if isinstance(one, LazyTensor) else one.parts.values())
        ]
        nbytes = int(self._names.table.row_nbytes(rows).sum())
        notes = list(found.notes)
        for prefix in self._targets.self_loading:
            notes += [
                f"{prefix.removesuffix('.') or 'the module'} has its own way of loading, and was handed a state dict"
            ]
        meta = self._still_meta()
        if meta:
            notes.append(
                f"{len(meta):,} tensors are still on the meta device, for the checkpoint does not have them: "
                f"{list_names(meta, LISTED)}"
            )
        return Loaded(
            self._checkpoint.path,
            (*names, *self._names_by_themselves),
            tuple(found.missing),
            tuple(found.unexpected),
            tuple(found.casts),
            sum(lazy.nbytes for lazy in lazies) + nbytes + self._nbytes_by_themselves,
            tuple(notes),
            tuple(meta),
        )

    def _still_meta(self) -> list[str]:
        """Tensors that have no elements yet. In a module all tensors count, also those that a state dict would not list."""
        if not isinstance(self._into, nn.Module):
            return [
                slot.name
                for slot in find_targets(self._into, self._is_current, self._names).slots
                if slot.tensor.is_meta
            ]
        found = []
        for prefix, module in self._into.named_modules(remove_duplicate=False):
            held = {**module._parameters, **module._buffers, **vars(module)}
            tensors = [
                name
                for name, value in held.items()
                if isinstance(value, torch.Tensor) and value.is_meta
            ]
            found += [
                plain_name(f"{prefix}.{name}" if prefix else name, self._targets.removed)
                for name in tensors
            ]
        return found


def _is_built(match: Match[Slot], table: Table) -> bool:
    """Whether a tensor is built by its own `torch()`: it has several parts, or elements that share bytes."""
    if isinstance(match.other, Composite):
        return True
    return not match.exact and (match.other or table.row_kind(match.row)).dtype.packed


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The fresh tensor as a parameter, with the attributes and `requires_grad` of the one that it replaces."""
    grad = old.requires_grad and (new.is_floating_point() or new.is_complex())
    if isinstance(old, nn.Parameter):
        plain = type(old) is nn.Parameter
        made = (
            nn.Parameter(new, requires_grad=grad)
            if plain
            else torch.Tensor._make_subclass(type(old), new, grad)
        )
        vars(made).update(vars(old))
        return made
    return new.requires_grad_() if grad else new


class Versions:
    """The versions of modules that a checkpoint records beside a state dict."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        state, self._left = dict_under(checkpoint.tree, prefix)
        recorded = vars(state).get("_metadata") if isinstance(state, OrderedDict) else None
        self._recorded: Mapping[object, object] = recorded if isinstance(recorded, Mapping) else {}

    def of(self, prefix: str) -> object:
        """The version of the module under a prefix; None where none is recorded."""
        entry = self._recorded.get((self._left + prefix).removesuffix("."))
        return entry.get("version") if isinstance(entry, Mapping) else None

    def under(self, prefix: str) -> OrderedDict[str, dict[str, object]]:
        """The versions of a module and those below it, by their names inside of it."""
        root = (self._left + prefix).removesuffix(".")
        found: OrderedDict[str, dict[str, object]] = OrderedDict()
        for key, entry in self._recorded.items():
            if (
                isinstance(key, str)
                and isinstance(entry, Mapping)
                and (key == root or not root or key.startswith(f"{root}."))
            ):
                found[key[len(root) :].removeprefix(".")] = {str(k): v for k, v in entry.items()}
        return found
