"""A checkpoint written again with other places for its tensors, in its own format or another: what `tie` and `compact` share."""

from __future__ import annotations

import os
from dataclasses import replace

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.protocols import State
from holdfast.errors import Unsupported
from holdfast.formats.pt2.replace import lay_out_replaced
from holdfast.formats.pt2.write import lay_out_pt2, models_of
from holdfast.formats.torch.write import archive_name
from holdfast.plan.saves import SavePlan
from holdfast.rewrite.formats import NAMES, Options, format_for, plan_save
from holdfast.rewrite.models import programs_of, state_of, weights_of
from holdfast.rewrite.planned import PlannedSave, Writing
from holdfast.rewrite.save import unchanged

__all__ = ["plan_rewrite"]


def plan_rewrite(
    source: Checkpoint, state: State, target: str, *, read: State, format: str | None, writing: Writing
) -> PlannedSave:
    """Lay out a state that came from an open checkpoint; in its own format where the target is the checkpoint itself.

    `read` is the state as it was opened: its files must be the same when all is written.
    Raises `Unsupported` for a format that can be read and not written, where it is to be replaced.
    """
    inside = os.path.realpath(target) == os.path.realpath(source.path)
    if inside and format is None:
        format = source.format
        if format != "pt2" and format not in NAMES.values():
            raise Unsupported(
                f"{format} can be read and not written, so it cannot be replaced; give the new one another path",
                file=source.path,
                found=format,
            )
    if format == "pt2" or (format is None and target.lower().endswith(".pt2")):
        plan = _plan_pt2(source, state, target)
    else:
        options = Options(keep_tree=True)
        if source.format == "pt2":
            # Only its weights were looked at; what stands beside them in the tree is written as well.
            state = state_of(state.tree, dict(state.metadata))
        plan = plan_save(target, state, format_for(target, format, options), options)
        left = (f"left out of model {model!r}: the program" for model in programs_of(source))
        plan = replace(plan, notes=(*left, *plan.notes))
    writing = replace(writing, overwrite=writing.overwrite or inside)
    return PlannedSave(plan, target, writing, lambda: unchanged(read, target))


def _plan_pt2(source: Checkpoint, state: State, target: str) -> SavePlan:
    name = archive_name(target)
    if source.format != "pt2":
        return lay_out_pt2(models_of(replace(state, tree={"model": state.tree})), name=name)
    models = weights_of(source, state.tree)
    if not any(models.values()):
        raise Unsupported("this package has no weights", file=source.path)
    plain = {model: weights for model, weights in models.items() if all(t.traits.subclass is None for t in weights.values())}
    kept = [f"model {model!r} has weights that are pickled objects, and keeps them all" for model in models if model not in plain]
    plan = lay_out_replaced(source.source, plain, name=name)
    return replace(plan, notes=(*kept, *plan.notes))
