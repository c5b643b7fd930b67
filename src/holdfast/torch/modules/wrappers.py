"""The names of a model inside of DistributedDataParallel or `torch.compile`: a checkpoint has the model's own.

    DistributedDataParallel(model)      module.layers.0.weight          layers.0.weight
    torch.compile(model)                _orig_mod.layers.0.weight       layers.0.weight
    a compiled layer of a model         layers.0._orig_mod.weight       layers.0.weight

The prefix of a wrapper is removed when a state is saved and added again when it is loaded, as torch's `get_model_state_dict` and
`set_model_state_dict` do. A wrapper is known by its class and never by its name. A file with the names of the wrapper, as
`torch.save(ddp.state_dict())` writes them, is read by those: the naming of which the checkpoint has the most names counts.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar, cast

from torch import nn

from holdfast.verbs.shared.state import Stateful

WAYS = (
    frozenset({"module", "_orig_mod"}),
    frozenset({"module"}),
    frozenset({"_orig_mod"}),
    frozenset[str](),
)
"""The names of wrappers that are removed; of equally good choices the first."""

SILENT = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Names of wrappers that remove them in their own `state_dict()`."""

There = Callable[[str], bool]

T = TypeVar("T")


def wrapped_child(module: nn.Module) -> str | None:
    """The wrapper's name for the module that it wraps; None for any other module."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    # It takes a second to import, and is imported wherever something was compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return (
        "_orig_mod" if dynamo is not None and isinstance(module, dynamo.OptimizedModule) else None
    )


def removed_wrappers(
    module: nn.Module, names: Collection[str], there: There | None = None
) -> frozenset[str]:
    """The dotted names of all wrapped modules in a module, as its state dict has them: the last part of each is removed.

    `names` are those of its state dict. Where `there` tells what a checkpoint has, the naming is the one that fits it best.
    """
    found: dict[str, str] = {}
    for path, one in module.named_modules(remove_duplicate=False):
        child = wrapped_child(one)
        if child is not None:
            at = f"{path}.{child}".removeprefix(".")
            for silent in SILENT:
                at = at.replace(silent, "")
            found[at] = child
    if not found:
        return frozenset()
    ways = [frozenset(at for at, child in found.items() if child in way) for way in WAYS]
    return (
        ways[0]
        if there is None
        else max(ways, key=lambda way: sum(there(plain_name(name, way)) for name in names))
    )


def plain_name(name: str, removed: Collection[str]) -> str:
    """A name without the names of wrappers.

    >>> plain_name("module.layers.0._orig_mod.weight", {"module", "module.layers.0._orig_mod"})
    'layers.0.weight'
    """
    if not removed:
        return name
    steps = name.split(".")
    return ".".join(step for i, step in enumerate(steps) if ".".join(steps[: i + 1]) not in removed)


def names_with_wrappers(module: nn.Module, there: There) -> dict[str, str]:
    """By the plain name, every name of a module's state dict and of the modules in it; empty where nothing is wrapped."""
    if not has_wrappers(module):
        return {}
    names = list(module.state_dict())
    removed = removed_wrappers(module, names, there)
    paths = [path for path, _ in module.named_modules(remove_duplicate=False)]
    return {plain_name(name, removed): name for name in (*paths, *names)}


def has_wrappers(module: nn.Module) -> bool:
    return any(wrapped_child(one) for one in module.modules())


def plainly_named(
    value: Stateful,
    *,
    ask: Callable[[Stateful], object] = lambda value: value.state_dict(),
    there: There | None = None,
) -> Stateful:
    """An object whose state dict has the names of what is wrapped in it; the object itself where nothing is."""
    if not isinstance(value, nn.Module) or not has_wrappers(value):
        return value
    return PlainlyNamed(value, ask, there)


class PlainlyNamed:
    """A module with wrappers in it, which takes and gives a state dict without their names."""

    def __init__(
        self, module: nn.Module, ask: Callable[[Stateful], object], there: There | None
    ) -> None:
        self._module = module
        self._ask = ask
        self._there = there
        self._raw: dict[str, str] = {}

    def state_dict(self) -> object:
        state = self._ask(cast(Stateful, self._module))
        if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
            return state
        removed = removed_wrappers(self._module, state, self._there)
        raw = {plain_name(name, removed): name for name in state}
        if len(raw) != len(state):
            return state  # the wrapper has a tensor of its own under the same name: nothing may get lost
        self._raw = raw
        made = renamed(state, {name: plain for plain, name in raw.items()})
        versions = getattr(state, "_metadata", None)
        if isinstance(versions, Mapping):
            # A wrapper has a version as well; that of the wrapped module comes after it, and counts.
            vars(made)["_metadata"] = OrderedDict(
                (plain_name(str(name), removed), version) for name, version in versions.items()
            )
        return made

    def load_state_dict(self, state: object, /) -> object:
        """Give a state dict with plain names, such as a filled one of `state_dict`, to the module."""
        return self._module.load_state_dict(renamed(cast("dict[str, object]", state), self._raw))


def renamed(state: Mapping[str, T], names: Mapping[str, str]) -> OrderedDict[str, T]:
    """A state dict under other names, with its attributes."""
    made = OrderedDict((names.get(name, name), value) for name, value in state.items())
    vars(made).update(getattr(state, "__dict__", {}))
    return made
