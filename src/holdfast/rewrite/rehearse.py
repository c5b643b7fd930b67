"""What a writer writes, its own reader opens: a plan is opened before the first byte of it is written.

1. A store over the plan stands in for the files (`engine.planned_store`): headers, pickles and indexes as they will be, no data.
2. The reader that `open` uses describes it, under the default `Limits`.
3. What it finds is what was to be saved: the same names, dtypes and shapes.

Whatever stands in the way is a `CannotHold`, and nothing has been touched. Checksums are not known yet, and cannot change the
answer: they have a fixed width, any eight digits are accepted, and a reader compares one only with bytes of data, which opening
does not read (docs/design/014-what-is-written-opens.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from holdfast.core.dtype import DType
from holdfast.core.limits import Limits
from holdfast.core.protocols import Description, Outlined, Store
from holdfast.core.runtime import resting_collector
from holdfast.core.tensor import LazyTensor
from holdfast.engine.planned_store import PlannedStore
from holdfast.engine.source import OpenSource
from holdfast.errors import CannotHold, HoldfastError, located
from holdfast.formats.detect import detect
from holdfast.plan.saves import SavePlan

__all__ = ["Outline", "check_holds", "described", "rehearse"]

Outline = tuple[DType, tuple[int, ...]]
"""The dtype and shape of a tensor."""

WHAT = "what would be written could not be opened again, so nothing is"

SHOWN = 8
"""Differences that a refusal lists."""


def rehearse(plan: SavePlan, path: str) -> SavePlan:
    """The same plan, known to open. Raises `CannotHold` with the reason where it would not, or would show something else."""
    if plan.opens:
        return plan
    with resting_collector():
        found = described(PlannedStore((*plan.files, *plan.index), name=path), (plan.format,))
        if plan.holds is not None:
            lost = [str(one.what) for one in found.foreign if one.uses != ("mention",)]
            if lost:
                raise CannotHold(WHAT, [f"{what}: it would not be built" for what in lost], file=path)
            check_holds(found.tensors, {name: (tensor.dtype, tensor.shape) for name, tensor in plan.holds.items()}, path)
        del found
    return replace(plan, opens=True)


def described(store: Store, formats: Collection[str]) -> Description:
    """What the reader makes of a store that stands for files to come. Raises `CannotHold` where it is none of these formats."""
    try:
        with located(file=store.name):
            source = OpenSource(store, limits=Limits())
            if len(store.list()) > source.limits.files:
                raise CannotHold(WHAT, [f"{len(store.list()):,} files are more than Limits(files={source.limits.files:,})"])
            reader = detect(source)
            if reader.name not in formats:
                raise CannotHold(WHAT, [f"it would be opened as {reader.name}, and is {' or '.join(formats)}"], file=store.name)
            return reader.describe(source)
    except CannotHold:
        raise
    except HoldfastError as error:
        raise CannotHold(WHAT, [error.message], file=store.name) from error


def check_holds(found: Mapping[str, LazyTensor], holds: Mapping[str, Outline], path: str) -> None:
    """Raise `CannotHold` where tensors that were found are not those that were to be saved: by name, dtype and shape."""
    problems = [f"{name}: it would not be there" for name in holds if name not in found]
    problems += [f"{name}: nobody has saved it, and it would be there" for name in found if name not in holds]
    if not problems:
        outline = found.outline if isinstance(found, Outlined) else lambda name: (found[name].dtype, found[name].shape)
        for name, (dtype, shape) in holds.items():
            seen = outline(name)
            if seen[0] is not dtype or seen[1] != shape:
                problems.append(f"{name}: it would be read as {seen[0]} {list(seen[1])}, and is {dtype} {list(shape)}")
    if problems:
        more = [f"and {len(problems) - SHOWN:,} more"] if len(problems) > SHOWN else []
        raise CannotHold(WHAT, [*problems[:SHOWN], *more], file=path)
