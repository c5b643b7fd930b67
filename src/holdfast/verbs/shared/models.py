"""The models of a package that is open, and one of them as a state dict.

A package is a `.pt2`, or a native directory that `package` wrote; both say in their metadata which models they hold:

    one model in a .pt2      {"emb.weight": …, "constants": {…}, "sample_inputs": …}
    several, or native       {"base": {"emb.weight": …, "constants": {…}}, "adapter": {…}}

A state dict is the parameters and buffers of a model. What else belongs to it (constants, sample inputs, weights of compiled code)
comes along when asked for, and a note says what stayed behind: a program always does.
"""

from __future__ import annotations

from typing import cast

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.protocols import State
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.saves import SavePlan
from holdfast.errors import CannotHold
from holdfast.formats import format_of, load_function
from holdfast.verbs.shared.formats import find_archive_format, plan_save, resolve_format
from holdfast.verbs.shared.planned import Destination
from holdfast.verbs.shared.state import make_lazy_tree, replace_tree

CONSTANTS, INPUTS, COMPILED = "constants", "sample_inputs", "aotinductor"
"""Keys beside the weights in the tree of a model; `#2` is added where a weight has the name."""

Tree = dict[object, object]


class Selection(Value, frozen=True):
    model: str | None = None
    """The name of one of several models; None for the one that there is, or all of them."""
    constants: bool = False
    sample_inputs: bool = False


NOTHING_SELECTED = Selection()


def is_package(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is one that says which models it holds."""
    format = format_of(checkpoint.format)
    return format.programs or (format.packages and "models" in checkpoint.metadata)


def models_in(checkpoint: Checkpoint, tree: object) -> dict[str, Tree]:
    """Return the tree of each model of a package, taken from a tree like the package's own."""
    items: Tree = tree if isinstance(tree, dict) else {}
    models = {str(name): value for name, value in items.items() if isinstance(value, dict)}
    listed_names = checkpoint.metadata.get("models", "")
    has_several = bool(items) and len(models) == len(items) and ", ".join(models) == listed_names
    return models if has_several else {listed_names or "model": items}


def weights_of(checkpoint: Checkpoint, tree: object) -> dict[str, dict[str, LazyTensor]]:
    """The weights of each model of a `.pt2` that is open, taken from a tree like its own."""
    return {
        model: {str(name): value for name, value in values.items() if isinstance(value, LazyTensor)}
        for model, values in models_in(checkpoint, tree).items()
    }


def programs_of(checkpoint: Checkpoint) -> list[str]:
    """The names of the models that have a program."""
    where = format_of(checkpoint.format).programs_by
    return list(load_function(where)(checkpoint.source)) if where else []


def select(
    checkpoint: Checkpoint, state: State, selection: Selection
) -> tuple[State, tuple[str, ...]]:
    """The part of a package that is wanted, and notes about what is left out of it.

    Raises `CannotHold` for a model that there is not.
    """
    archive = format_of(checkpoint.format).programs
    if not is_package(checkpoint):
        raise CannotHold(
            "this checkpoint is no package",
            ["it has no models to choose from; keep= and rename= choose by name"],
        )
    models = models_in(checkpoint, state.tree)
    if selection.model is not None and selection.model not in models:
        raise CannotHold(
            "this package lacks the model",
            [f"there is no {selection.model!r}; there are {', '.join(models)}"],
        )
    chosen = {model: tree for model, tree in models.items() if selection.model in (None, model)}
    wanted = {CONSTANTS: selection.constants, INPUTS: selection.sample_inputs}
    programs = programs_of(checkpoint)
    kept: dict[str, Tree] = {}
    notes = []
    for model, tree in chosen.items():
        beside = non_weight_keys(tree, compiled=archive)
        left = [key for key in beside if not wanted.get(key.removesuffix("#2"), True)]
        kept[model] = {name: value for name, value in tree.items() if name not in left}
        parts = [key.removesuffix("#2").replace("_", " ") for key in left] + ["the program"] * (
            model in programs
        )
        if parts:
            notes.append(f"left out of model {model!r}: {', '.join(parts)}")
    if selection.model is None and (len(models) > 1 or not archive):
        return replace_tree(state, kept), tuple(notes)
    ((_, tree),) = kept.items()
    texts = {key: text for key, text in state.metadata.items() if key != "models"}
    return replace(replace_tree(state, tree), metadata=texts), tuple(notes)


def plan_rewrite(source: Checkpoint, state: State, where: Destination) -> SavePlan:
    """Lay out a state that came from an open checkpoint. A package stays one, with its programs, where a `.pt2` is asked for."""
    archive = find_archive_format(where.path, where.format)
    if archive is not None:
        return cast(
            "SavePlan",
            load_function(archive.rewritten_by)(source, make_lazy_tree(state), where.path),
        )
    options = where.layout
    plan = plan_save(
        where.path, state, resolve_format(where.path, where.format, options), options=options
    )
    left = (f"left out of model {model!r}: the program" for model in programs_of(source))
    return replace(plan, notes=(*left, *plan.notes))


def non_weight_keys(tree: Tree, *, compiled: bool = True) -> list[str]:
    """The keys of a model's tree that are no weights of it."""
    keys = (CONSTANTS, INPUTS, COMPILED) if compiled else (CONSTANTS,)
    return [
        key
        for name in keys
        for key in (name, f"{name}#2")
        if key in tree and not isinstance(tree[key], LazyTensor)
    ]
