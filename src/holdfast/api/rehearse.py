"""What a writer writes, its own reader opens: a plan is opened before the first byte of it is written.

1. A store over the plan stands in for the files (`engine.planned_store`): headers, pickles and indexes as they will be, no data.
2. The reader that `open` uses describes it, under the default `Limits`.
3. What it finds is what was to be saved: the same names, dtypes and shapes.

Whatever stands in the way is a `CannotHold`, and nothing has been touched. Checksums are not known yet, and cannot change the answer:
they have a fixed width, any eight digits are accepted, and a reader compares one only with bytes of data, which opening does not read
(docs/design/013-what-is-written-opens.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.core.collector import resting_collector
from holdfast.core.limits import Limits
from holdfast.core.protocols import Description, Store
from holdfast.core.tensor import LazyTensor
from holdfast.engine.planned_store import PlannedStore
from holdfast.engine.source import OpenSource
from holdfast.errors import CannotHold, HoldfastError, located
from holdfast.formats.detect import detect
from holdfast.plan.saves import SavePlan

__all__ = ["Expected", "described", "rehearse"]

WHAT = "what would be written could not be opened again, so nothing is"

SHOWN = 8
"""Differences that a refusal lists."""

Expected = Mapping[str, LazyTensor]
"""What a checkpoint is to hold, by name; of the tensors only dtypes and shapes are looked at."""


def rehearse(plan: SavePlan, path: str) -> SavePlan:
    """The same plan, known to open. Raises `CannotHold` with the reason where it would not, or would show something else."""
    if plan.opens:
        return plan
    with resting_collector():
        found = described(PlannedStore((*plan.files, *plan.index), name=path), plan.format)
        if plan.holds is not None:
            _compare(found.tensors, plan.holds, path)
        del found
    return replace(plan, opens=True)


def described(store: Store, format: str) -> Description:
    """What the reader makes of a store that stands for files to come. Raises `CannotHold` where that is nothing."""
    try:
        with located(file=store.name):
            source = OpenSource(store, limits=Limits())
            reader = detect(source)
            if reader.name != format:
                raise CannotHold(WHAT, [f"it would be opened as {reader.name}, and is {format}"], file=store.name)
            return reader.describe(source)
    except CannotHold:
        raise
    except HoldfastError as error:
        raise CannotHold(WHAT, [error.message], file=store.name) from error


def _compare(found: Expected, holds: Expected, path: str) -> None:
    problems = [f"{name}: it would not be there" for name in holds if name not in found]
    problems += [f"{name}: nobody has saved it, and it would be there" for name in found if name not in holds]
    if not problems:
        for name, tensor in found.items():
            saved = holds[name]
            if (tensor.dtype, tensor.shape) != (saved.dtype, saved.shape):
                seen, was = (f"{t.dtype} {list(t.shape)}" for t in (tensor, saved))
                problems.append(f"{name}: it would be read as {seen}, and is {was}")
    if problems:
        more = [f"and {len(problems) - SHOWN:,} more"] if len(problems) > SHOWN else []
        raise CannotHold(WHAT, [*problems[:SHOWN], *more], file=path)
