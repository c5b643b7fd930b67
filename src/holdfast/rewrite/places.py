"""A checkpoint written again with other places for its tensors, in its own format or another: what `tie` and `compact` share."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.protocols import State
from holdfast.errors import Unsupported
from holdfast.formats.pt2.replace import lay_out_replaced
from holdfast.formats.pt2.write import lay_out_pt2, models_of
from holdfast.formats.torch.write import archive_name
from holdfast.plan.saves import SavePlan
from holdfast.rewrite.formats import Options, format_for, plan_save
from holdfast.rewrite.models import programs_of, state_of, weights_of
from holdfast.rewrite.planned import Destination

__all__ = ["plan_rewrite"]


def plan_rewrite(source: Checkpoint, state: State, where: Destination) -> SavePlan:
    """Lay out a state that came from an open checkpoint. A package stays one, with its programs, where a `.pt2` is asked for."""
    if where.format == "pt2" or (where.format is None and where.path.lower().endswith(".pt2")):
        return _plan_pt2(source, state, where.path)
    options = Options(keep_tree=True)
    if source.format == "pt2":
        # Only its weights were looked at; what stands beside them in the tree is written as well.
        state = state_of(state.tree, dict(state.metadata))
    plan = plan_save(where.path, state, format_for(where.path, where.format, options), options)
    left = (f"left out of model {model!r}: the program" for model in programs_of(source))
    return replace(plan, notes=(*left, *plan.notes))


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
