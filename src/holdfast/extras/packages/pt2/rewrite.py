"""An open checkpoint as a `.pt2`: of weights alone, or with the programs that it came with."""

from __future__ import annotations

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.value import replace
from holdfast.engine.saves import SavePlan
from holdfast.errors import Unsupported
from holdfast.extras.packages.pt2.replace import lay_out_replaced
from holdfast.extras.packages.pt2.write import lay_out_pt2, models_of
from holdfast.formats import format_of
from holdfast.formats.torch.write import archive_name
from holdfast.verbs.shared.models import weights_of


def lay_out_rewritten(source: Checkpoint, tree: object, target: str) -> SavePlan:
    """Lay out the weights of a checkpoint as a `.pt2`. The programs of a `.pt2` are copied."""
    name = archive_name(target)
    if not format_of(source.format).programs:
        return lay_out_pt2(models_of({"model": tree}), name=name)
    models = weights_of(source, tree)
    if not any(models.values()):
        raise Unsupported("this package has no weights", file=source.path)
    plain = {
        model: weights
        for model, weights in models.items()
        if all(tensor.traits.subclass is None for tensor in weights.values())
    }
    notes = [
        f"model {model!r} has weights that are pickled objects, and keeps them all"
        for model in models
        if model not in plain
    ]
    plan = lay_out_replaced(source.source, plain, name=name)
    return replace(plan, notes=(*notes, *plan.notes))
