"""`BaseSparsifier`: masks on the weights of a model, from `prepare` to `squash_mask`.

    new ── prepare ──> prepared ── squash_mask ──> squashed ── prepare ──> prepared …
     └─ load_state_dict, unpickling ──> waiting ── prepare ──┘

1. `prepare` finds the tensors that a config names, checks all of them, and only then puts a mask of ones on each.
2. `step` calls `update_mask` for each tensor. It sets elements of the mask, which stays the same tensor.
3. `state_dict` has the masks as bits and the settings, `load_state_dict` takes both, with a model or before there is one.
4. `squash_mask` multiplies the masks into the weights for good, and the model is a plain one again.

The state is dicts, lists, numbers and tensors alone, so that a `weights_only` load takes it:

    {"state": {"linear1.weight": {"mask": {"bits": …, "shape": …}, …}},
     "groups": [{"tensor_fqn": "linear1.weight", "sparsity_level": 0.5, …}]}

A mask has one bit for each element. Element i, in row-major order, is bit i % 8 of byte i // 8, counted from the lowest. The last
byte is filled with zeros. A mask with other values than 0 and 1 stays a tensor. torch saves the same two keys, with masks as dense
tensors; both kinds are read.
"""

from __future__ import annotations

import abc
import copy
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from holdfast.core.tree import (
    MAX_LEAVES,
    LinkedPath,
    get_mapping_children,
    make_plain_container,
    rebuild,
)
from holdfast.errors import DoesNotFit, NoSuchTensor, Refused
from holdfast.torch.sparsity.fake import (
    FakeSparsity,
    Mapped,
    Weight,
    Weights,
    convert_children,
    fake_of,
    original_of,
    put_mask,
    similar_names,
    take_mask_off,
)
from holdfast.torch.sparsity.masks import is_cut

Group = dict[str, Any]
"""The settings of one tensor. Any, for it has a module, names and whatever a sparsifier is set by, as torch's does."""

PLACE = ("module", "module_fqn", "tensor_name", "parametrization")
"""The keys of a group that follow from the model and `tensor_fqn`, and are not saved."""


class Remembered(dict[str, object]):
    """The mask of one tensor, and what a sparsifier adds. Two are equal when their tensors have equal elements."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, dict):
            return NotImplemented
        return self.keys() == other.keys() and all(
            _equal(value, other[key]) for key, value in self.items()
        )

    def __ne__(self, other: object) -> bool:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    __hash__ = None  # as dict has it


State = defaultdict[str, Remembered]


def _equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.device == b.device and bool((a == b).all())
    return bool(a == b)


Config = Mapping[str, object]
Phase = Literal["new", "waiting", "prepared", "squashed"]


class BaseSparsifier(abc.ABC):
    """The base of all sparsifiers. A subclass defines in `update_mask` how a mask changes."""

    def __init__(self, defaults: Mapping[str, object] | None = None) -> None:
        self.defaults: dict[str, object] = dict(defaults or {})
        self.state: State = defaultdict(Remembered)
        """By tensor name: `mask`, and what a subclass adds."""
        self.groups: list[Group] = []
        """The settings of each tensor: the defaults, its config, and where it is."""
        self.enable_mask_update = True
        """Whether `step` does anything."""
        self.model: nn.Module | None = None
        self.config: Sequence[Config] | None = None
        self._phase: Phase = "new"
        self._steps = 0

    # For subclasses.

    @abc.abstractmethod
    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: object) -> None:
        """Update the mask of one tensor; its group is given as keywords."""

    def check_config(self, weight: Weight, config: Group) -> None:  # noqa: B027 (a subclass may have nothing to check)
        """Raise what is wrong with a tensor's settings, before anything changes."""

    def make_config_from_model(
        self,
        model: nn.Module,
        SUPPORTED_MODULES: Collection[type[nn.Module]] = (nn.Linear,),  # noqa: N803 (torch's name)
    ) -> None:
        """Take the `weight` of every module below the model that is exactly of these classes, the last branch first."""
        config: list[Config] = []
        stack = [("", model)]
        while stack:
            prefix, module = stack.pop()
            for name, child in module.named_children():
                fqn = f"{prefix}.{name}" if prefix else name
                # One with a mask counts as what it was, and will be refused; one that is parametrized otherwise is left out.
                masked = fake_of(child, "weight") is not None
                if (
                    parametrize.type_before_parametrizations(child) if masked else type(child)
                ) in SUPPORTED_MODULES:
                    config.append({"tensor_fqn": f"{fqn}.weight"})
                else:
                    stack.append((fqn, child))
        self.config = config

    def mask_shape(self, weight: Weight, config: Group) -> tuple[int, ...]:
        """Give the shape of a tensor's mask."""
        return tuple(weight.tensor.shape)

    def fresh_mask(self, weight: Weight, config: Group) -> torch.Tensor:
        """A mask that prunes nothing."""
        return torch.ones_like(weight.tensor, requires_grad=False)

    FAKE: ClassVar[type[FakeSparsity]] = FakeSparsity
    """The parametrization of a tensor whose config names none."""

    def _put(self, group: Group, fake: FakeSparsity) -> None:
        put_mask(group["module"], group["tensor_name"], fake)

    def _take_off(self, group: Group, *, apply: bool) -> None:
        take_mask_off(group["module"], group["tensor_name"], apply=apply)

    def _update(self) -> None:
        for group in self.groups:
            self.update_mask(**group)

    # The life of a mask.

    def prepare(self, model: nn.Module, config: Sequence[Config] | None = None) -> None:
        """Put a mask on each tensor that the config names; on all that `make_config_from_model` finds for None.

        A config is a list of dicts with `tensor_fqn`, settings that differ from the defaults, and perhaps a `mask` to begin with.
        After `load_state_dict` or unpickling, None stands for the tensors that were loaded, and a config has to name the same.
        Nothing has changed where this raises.
        """
        if hasattr(self, "_prepare"):
            raise Refused(
                f"{type(self).__name__} has a method _prepare, which torch.ao.pruning calls and this sparsifier does not: give the "
                "config a 'parametrization' of your own, or override fresh_mask() or prepare()"
            )
        if self._phase == "prepared":
            raise Refused(
                "this sparsifier is prepared already: squash_mask() before it is prepared again, or make another one"
            )
        waiting = (
            {group["tensor_fqn"]: group for group in self.groups}
            if self._phase == "waiting"
            else {}
        )
        if config is None and waiting:
            configs: list[Config] = list(self.groups)
        elif config is None:
            self.make_config_from_model(model)
            configs = list(self.config or ())
            if not configs:
                raise ValueError(
                    "there is nothing below the model to prune without a config; name tensors: [{'tensor_fqn': …}]"
                )
        else:
            configs = _checked(config)
        names = {str(item["tensor_fqn"]) for item in configs}
        if waiting and names != waiting.keys():
            differ = ", ".join(sorted(names ^ waiting.keys()))
            raise ValueError(f"the loaded state and the config name different tensors: {differ}")
        masks = {fqn: self.state[fqn].get("mask") for fqn in waiting}
        placed = self._place(
            model,
            [{**waiting.get(item["tensor_fqn"], {}), **item} for item in configs],
            masks=masks,
        )
        if self._phase == "squashed":
            self.state = defaultdict(Remembered)
        self.config = configs
        self._attach(model, placed)

    def step(self, use_path: bool = True) -> None:
        """Update all masks, unless `enable_mask_update` is off. `use_path` has no meaning, as in torch."""
        self._check_prepared("step")
        self._steps += 1
        if self.enable_mask_update:
            with torch.no_grad():
                self._update()
        self._remember()

    def squash_mask(
        self,
        params_to_keep: Iterable[str] | None = None,
        params_to_keep_per_layer: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        """Apply the masks for good and take them off; the sparsifier remembers them.

        The settings that are named, for all or by the name of a module, are kept as the module's attribute `sparse_params`.
        Raises ValueError when there are no masks on the model, also the second time.
        """
        if self._phase != "prepared":
            done = (
                "its masks were squashed before"
                if self._phase == "squashed"
                else "it is not prepared"
            )
            raise ValueError(f"there are no masks to squash: {done}")
        self._check_whole("squash_mask")
        self._remember()
        kept = [
            self._kept(group, params_to_keep or (), params_to_keep_per_layer or {})
            for group in self.groups
        ]
        unknown = set(params_to_keep_per_layer or ()) - {
            group["module_fqn"] for group in self.groups
        }
        if unknown:
            name, masked = min(unknown), [group["module_fqn"] for group in self.groups]
            raise NoSuchTensor(f"no module {name!r} has a mask{similar_names(name, masked)}")
        for known in self.state.values():
            if isinstance(mask := known.get("mask"), torch.Tensor):
                known["mask"] = mask.clone()
        for group, params in zip(self.groups, kept, strict=True):
            self._take_off(group, apply=True)
            if params:
                group["module"].sparse_params = params
        self._phase = "squashed"

    @staticmethod
    def _kept(
        group: Group, everywhere: Iterable[str], by_layer: Mapping[str, Iterable[str]]
    ) -> dict[str, object]:
        names = dict.fromkeys((*everywhere, *by_layer.get(group["module_fqn"], ())))
        for name in names:
            if name not in group:
                raise KeyError(
                    f"{group['tensor_fqn']!r} has no setting {name!r}{similar_names(name, group)}"
                )
        return {name: group[name] for name in names}

    def convert(
        self,
        module: nn.Module,
        mapping: Mapped | None = None,
        inplace: bool = False,
        parameterization: type[nn.Module] = FakeSparsity,
    ) -> nn.Module:
        """Exchange the modules with masks for those that a mapping makes of them (`swap_module`), in a copy unless `inplace`."""
        if mapping is None:
            raise NotImplementedError(
                "give a mapping from classes of modules to those that take their place"
            )
        module = module if inplace else copy.deepcopy(module)
        convert_children(module, mapping, parameterization)
        return module

    def _check_prepared(self, what: str) -> None:
        match self._phase:
            case "squashed":
                raise Refused(
                    f"{what}() after squash_mask(): the masks are part of the weights now; prepare() again for new ones"
                )
            case "new" | "waiting":
                raise Refused(f"{what}() before prepare(): there is no model")
        for group in self.groups:
            if fake_of(group["module"], group["tensor_name"]) is None:
                raise Refused(
                    f"the mask of {group['tensor_fqn']!r} is gone: its parametrization was removed by someone else"
                )

    def _check_whole(self, what: str) -> None:
        """Refuse a model that is cut over ranks: FSDP2 has its own list of parameters."""
        for group in self.groups:
            if is_cut(original_of(group["module"], group["tensor_name"])):
                raise Refused(
                    f"{what}() of a model that is cut over ranks ({group['tensor_fqn']!r} is a DTensor): do it before "
                    "fully_shard, or save sharded and load into a whole model"
                )

    def _place(
        self,
        model: nn.Module,
        configs: Iterable[Config],
        *,
        masks: Mapping[str, object],
        own: Collection[tuple[int, str]] = (),
    ) -> list[tuple[Group, FakeSparsity]]:
        """Find and check every tensor that gets a mask, or has one of this sparsifier. Changes nothing."""
        weights = Weights(model)
        placed: dict[tuple[int, str], tuple[Group, FakeSparsity]] = {}
        for config in configs:
            weight = weights.find(str(config["tensor_fqn"]))
            _check_agrees(config, weight)
            if weight.place in placed:
                raise ValueError(
                    f"{weight.fqn!r} is in the config twice, here and as {placed[weight.place][0]['tensor_fqn']!r}"
                )
            if weight.place not in own:
                weights.check_free(weight)
            group: Group = {
                **copy.deepcopy(self.defaults),
                **{key: config[key] for key in config if key != "mask"},
            }
            group |= {
                "module_fqn": weight.module_fqn,
                "module": weight.module,
                "tensor_name": weight.name,
            }
            try:
                self.check_config(weight, group)
            except ValueError as error:
                raise ValueError(f"{weight.fqn!r}: {error}") from None
            mask = self.fresh_mask(weight, group)
            if (given := config.get("mask")) is not None:
                mask.copy_(self._given_mask(given, weight, group))
            elif isinstance(loaded := masks.get(weight.fqn), torch.Tensor):
                mask = (
                    mask.copy_(loaded) if is_binary(loaded) else loaded.to(mask.device, copy=True)
                )
            placed[weight.place] = group, self._fake_for(weight, group, mask)
        return list(placed.values())

    def _fake_for(self, weight: Weight, group: Group, mask: torch.Tensor) -> FakeSparsity:
        return self._fake_class(weight, group)(mask)

    def _fake_class(self, weight: Weight, group: Group) -> type[FakeSparsity]:
        """The class of a tensor's parametrization; torch's setting `parametrization` may name another one."""
        found = group.get("parametrization", self.FAKE)
        if not isinstance(found, type) or not issubclass(found, self.FAKE):
            raise TypeError(
                f"the parametrization of {weight.fqn!r} has to be a class derived from holdfast.torch.sparsity."
                f"{self.FAKE.__name__}, which is made with a mask; found {found!r}"
            )
        return found

    def _given_mask(self, mask: object, weight: Weight, group: Group) -> torch.Tensor:
        if not isinstance(mask, torch.Tensor):
            raise TypeError(f"the mask of {weight.fqn!r} is a {type(mask).__name__}, not a tensor")
        shape, device = self.mask_shape(weight, group), weight.tensor.device
        if tuple(mask.shape) != shape:
            raise ValueError(
                f"the mask of {weight.fqn!r} has shape {tuple(mask.shape)}, and should have {shape}"
            )
        if mask.device != device:
            raise ValueError(
                f"the mask of {weight.fqn!r} is on {mask.device}, and the tensor on {device}"
            )
        if not mask.is_meta and not is_binary(mask):
            raise ValueError(f"the mask of {weight.fqn!r} has other values than 0 and 1")
        return mask

    def _attach(self, model: nn.Module, placed: list[tuple[Group, FakeSparsity]]) -> None:
        done: list[Group] = []
        try:
            for group, fake in placed:
                self._put(group, fake)
                done.append(group)
        except BaseException:
            for group in done:
                self._take_off(group, apply=False)
            raise
        self.model, self.groups = model, done
        self._phase = "prepared"
        self._remember()

    def _remember(self) -> None:
        """Store the present masks: moving a model to another device makes new ones."""
        for group in self.groups:
            if (fake := fake_of(group["module"], group["tensor_name"])) is not None:
                self.state[group["tensor_fqn"]]["mask"] = fake.mask

    # What is saved.

    def state_dict(self, *, packed: bool = True) -> dict[str, object]:
        """The masks and settings, as plain values that a `weights_only` load takes: a copy.

        Masks are bits; with `packed=False` they are tensors, and torch's sparsifiers take the result.
        """
        if self._phase == "prepared":
            self._remember()

        def saved(key: str, value: object) -> object:
            return (
                pack_mask(value)
                if packed and key == "mask" and isinstance(value, torch.Tensor)
                else plain(value)
            )

        return {
            "state": {
                fqn: {key: saved(key, value) for key, value in known.items()}
                for fqn, known in self.state.items()
            },
            "groups": [
                {key: plain(value) for key, value in group.items() if key not in PLACE}
                for group in self.groups
            ],
        }

    def load_state_dict(
        self,
        state_dict: Mapping[str, object],
        strict: bool = True,
        *,
        model: nn.Module | None = None,
    ) -> None:
        """Take over what another sparsifier saved, ours or torch's, and leave it as it is.

        The tensors that it names get their masks, in the model of `prepare` or in this one, prepared or not; other masks of this
        sparsifier are taken off. Without a model, everything waits for `prepare`. With `strict`, every tensor must be there and
        have a mask (torch 2.13 forgets masks in what it saves after a load); without, those that are not there are left out, and
        masks that are missing are ones. Nothing has changed where this raises.
        """
        state, groups = read_saved(state_dict)
        prepared = self._phase == "prepared"
        if prepared and model is not None and model is not self.model:
            raise Refused("this sparsifier is prepared with another model")
        model = model if model is not None else self.model
        if strict:
            _check_masks(state, groups)
        if model is None:
            self.state, self.groups, self._phase = state, groups, "waiting"
            return
        if prepared:
            self._check_whole("load_state_dict")
        # A class is not saved: those of the model's config go on.
        classes = {
            group["tensor_fqn"]: group["parametrization"]
            for group in self.groups
            if "parametrization" in group
        }
        for group in groups:
            if group["tensor_fqn"] in classes:
                group["parametrization"] = classes[group["tensor_fqn"]]
        groups = self._fitting(model, state, groups, strict=strict)
        own = (
            {(id(group["module"]), group["tensor_name"]) for group in self.groups}
            if prepared
            else ()
        )
        masks = {fqn: known.get("mask") for fqn, known in state.items()}
        placed = self._place(model, groups, masks=masks, own=own)
        for group in self.groups if prepared else ():
            self._take_off(group, apply=False)
        self.state = state
        self._attach(model, placed)

    def _fitting(
        self, model: nn.Module, state: State, groups: list[Group], *, strict: bool
    ) -> list[Group]:
        """The groups whose tensors a model has; `DoesNotFit` names all that is wrong."""
        weights = Weights(model)
        fitting, missing, mismatched = [], {}, {}
        for group in groups:
            fqn = group["tensor_fqn"]
            try:
                weight = weights.find(fqn)
            except NoSuchTensor as error:
                missing[fqn] = error.message
                if not strict:
                    state.pop(fqn, None)
                continue
            mask, shape = (
                state[fqn].get("mask"),
                self.mask_shape(weight, {**self.defaults, **group}),
            )
            if isinstance(mask, torch.Tensor) and tuple(mask.shape) != shape:
                mismatched[fqn] = (
                    f"the mask of {fqn!r} has shape {tuple(mask.shape)}, and should have {shape}"
                )
            fitting.append(group)
        if mismatched or (missing and strict):
            problems = [*missing.values(), *mismatched.values()]
            raise DoesNotFit(
                "\n  - ".join(["the sparsifier's state does not fit the model", *problems]),
                unexpected=tuple(missing),
                mismatched=mismatched,
            )
        return fitting

    def __getstate__(self) -> dict[str, object]:
        """For pickling: everything but the model, which `prepare` gives back. A model with masks cannot be pickled."""
        own = {key: value for key, value in vars(self).items() if key not in ("model", "config")}
        phase = "waiting" if self._phase == "prepared" else self._phase
        return {**own, **BaseSparsifier.state_dict(self), "_phase": phase}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        saved, groups = read_saved(state)
        vars(self).update(state)
        self.model = self.config = None
        self.state, self.groups = saved, groups

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """A copy with a copy of the model; with the copy that is there already when both are copied together."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for key, value in vars(self).items():
            setattr(made, key, copy.deepcopy(value, memo))
        return made

    def __repr__(self) -> str:
        lines = []
        for i, group in enumerate(self.groups):
            lines += [f"\n\tGroup {i}", *(f"\t    {key}: {group[key]}" for key in sorted(group))]
        return f"{type(self).__name__} (" + "\n".join(lines) + ("\n)" if lines else ")")


def _checked(config: object) -> list[Config]:
    if isinstance(config, Mapping | str) or not isinstance(config, Iterable):
        raise TypeError(
            f"a config is a list of dicts, [{{'tensor_fqn': 'layer.weight'}}, …]; found a {type(config).__name__}"
        )
    configs: list[Config] = []
    for i, item in enumerate(config):
        if not isinstance(item, Mapping):
            raise TypeError(
                f"item {i} of a config is a dict, {{'tensor_fqn': 'layer.weight', …}}; found a {type(item).__name__}"
            )
        if "tensor_fqn" not in item:
            raise ValueError(
                f"item {i} of the config does not say which tensor: 'tensor_fqn' is missing; found {sorted(item)}"
            )
        if not isinstance(item["tensor_fqn"], str):
            raise TypeError(
                f"'tensor_fqn' is the dotted name of a tensor; found a {type(item['tensor_fqn']).__name__}"
            )
        configs.append(item)
    return configs


def _check_agrees(config: Config, weight: Weight) -> None:
    """Raise where a config names another place than `tensor_fqn`."""
    known: dict[str, object] = {
        "module": weight.module,
        "module_fqn": weight.module_fqn,
        "tensor_name": weight.name,
    }
    for key, value in known.items():
        found = config.get(key, value)
        if found is not value and (key == "module" or found != value):
            what = repr(found) if key != "module" else "another module"
            raise ValueError(
                f"the config of {weight.fqn!r} has {key!r} and 'tensor_fqn', and they do not agree: {what}"
            )


def _check_masks(state: State, groups: Iterable[Group]) -> None:
    """Raise where a group has no mask, or a mask no group."""
    masked = {fqn for fqn, known in state.items() if "mask" in known}
    named = {group["tensor_fqn"] for group in groups}
    if lost := sorted(named - masked):
        raise ValueError(
            f"the state has no mask for {', '.join(lost)}: torch 2.13 loses them when it saves after a load; "
            "with strict=False they begin with ones"
        )
    if stray := sorted(masked - named):
        raise ValueError(f"the state has masks without settings: {', '.join(stray)}")


# The plain form in which a state is saved.


def plain(value: object) -> object:
    """A copy of a value, with dicts of all kinds as plain ones. Raises `LimitExceeded` for one that contains itself."""
    return rebuild(
        value,
        _copied,
        get_children=_entered,
        make_container=make_plain_container,
        max_values=MAX_LEAVES,
    )


def _copied(value: object, _: LinkedPath) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _entered(value: object) -> Iterable[tuple[object, object]] | None:
    if isinstance(value, Mapping) or type(value) in (list, tuple):
        return get_mapping_children(value)
    return enumerate(value) if type(value) is set else None


def read_saved(saved: object) -> tuple[State, list[Group]]:
    """The state and the groups of what `state_dict()` gave; the groups are in no model yet."""
    if not isinstance(saved, Mapping) or not {"state", "groups"} <= saved.keys():
        found = (
            f"a dict of {sorted(map(str, saved))[:5]}"
            if isinstance(saved, Mapping)
            else f"a {type(saved).__name__}"
        )
        raise ValueError(f"a sparsifier's state dict has 'state' and 'groups'; found {found}")
    state, groups = saved["state"], saved["groups"]
    if not isinstance(state, Mapping) or not all(
        isinstance(known, Mapping) for known in state.values()
    ):
        raise ValueError("'state' of a sparsifier's state dict is a dict of dicts, by tensor name")
    if not isinstance(groups, list | tuple) or not all(
        isinstance(group, Mapping) and "tensor_fqn" in group for group in groups
    ):
        raise ValueError(
            "'groups' of a sparsifier's state dict is a list of dicts with 'tensor_fqn'"
        )
    read: State = defaultdict(Remembered)
    for fqn, known in state.items():
        read[fqn] = Remembered(
            {
                key: unpack_mask(value) if key == "mask" else plain(value)
                for key, value in known.items()
            }
        )
    # torch also saves the mask that a config began with; the state has the present one.
    left_out = (*PLACE, "mask")
    return read, [
        {str(key): plain(value) for key, value in group.items() if key not in left_out}
        for group in groups
    ]


def is_binary(mask: torch.Tensor) -> bool:
    return mask.dtype is torch.bool or bool(((mask == 0) | (mask == 1)).all())


def pack_mask(mask: torch.Tensor) -> dict[str, object] | torch.Tensor:
    """A mask for storage: its bits and shape, or a copy where bits cannot hold it.

    >>> pack_mask(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    {'bits': tensor([13], dtype=torch.uint8), 'shape': (2, 2)}
    """
    if not is_binary(mask):
        return mask.detach().clone()
    kept = (mask.detach() != 0).cpu().reshape(-1).numpy()
    return {
        "bits": torch.from_numpy(np.packbits(kept, bitorder="little")),
        "shape": tuple(mask.shape),
    }


def unpack_mask(stored: object) -> torch.Tensor:
    """A mask from storage, of booleans; one that was stored as a tensor, as by torch, stays as it is."""
    if isinstance(stored, torch.Tensor):
        return stored.detach().clone()
    if not isinstance(stored, Mapping) or not {"bits", "shape"} <= stored.keys():
        raise ValueError(
            f"a mask is stored as a tensor, or as a dict of bits and shape; found a {type(stored).__name__}"
        )
    bits, shape = stored["bits"], stored["shape"]
    if not isinstance(shape, tuple | list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"a mask's shape is a list of whole numbers; found {shape!r}")
    count = math.prod(shape)
    if (
        not isinstance(bits, torch.Tensor)
        or bits.dtype is not torch.uint8
        or bits.shape != (-(-count // 8),)
    ):
        found = (
            f"{bits.dtype} {tuple(bits.shape)}"
            if isinstance(bits, torch.Tensor)
            else type(bits).__name__
        )
        raise ValueError(
            f"a mask of shape {tuple(shape)} has {-(-count // 8)} bytes of bits; found {found}"
        )
    kept = np.unpackbits(bits.cpu().numpy(), count=count, bitorder="little").view(np.bool_)
    return torch.from_numpy(kept).view(tuple(shape))
