"""Open what a save has written, before it is published (docs/design/050-the-hidden-target.md).

A target gives a store over its content that nobody can find yet (`Target.written`). The reader that
`open` uses describes that store under the default `Limits`, and the tensors that it describes must
be those that were to be saved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from holdfast.core.dtype import DType
from holdfast.core.limits import DEFAULTS
from holdfast.core.protocols import Description, Store
from holdfast.core.runtime import gc_paused
from holdfast.core.table import Table
from holdfast.engine.saves import SavePlan
from holdfast.engine.source import OpenSource
from holdfast.errors import FormatError, HoldfastError, LimitExceeded, NotCommitted
from holdfast.formats import format_of
from holdfast.formats.detect import detect

Outline = tuple[DType, tuple[int, ...]]
"""The dtype and the shape of a tensor."""

SHOWN_PROBLEMS = 8

MESSAGE = "what was written cannot be opened again; nothing was published"


def check_plan_opens(plan: SavePlan, path: str, store: Store) -> None:
    """Open the files of a plan and compare their tensors with those of the plan.

    Args:
        plan: The plan of a state or of a checkpoint.
        path: The target, for messages.
        store: The files, which are not published yet.

    Raises:
        NotCommitted: The files do not open, hold other tensors, or hold objects that are not built.
    """
    # A folder of one file is opened as that file.
    is_one_file = len(plan.files) + len(plan.index) == 1
    formats = format_of(plan.format).opened_as if is_one_file else (plan.format,)

    with gc_paused():
        description = describe_unpublished(store, formats, path)
        table = plan.expected_table
        if table is None:
            return

        lost_objects = [value for value in description.foreign if value.uses != ("mention",)]
        if lost_objects:
            raise _refuse([f"{value.what}: it would not be built" for value in lost_objects], path)
        outlines = [(kind.dtype, kind.shape) for kind in table.kinds]
        row_outlines = map(outlines.__getitem__, table.kind_indices)
        check_tensors(description.tensors, zip(table.names, row_outlines, strict=True), path)


def describe_unpublished(store: Store, formats: Collection[str], path: str) -> Description:
    """Describe files that are not published yet, under the default limits.

    Args:
        store: The files.
        formats: The formats that they may be recognized as.
        path: The target, for messages.

    Raises:
        NotCommitted: The files do not open, or they open as another format.
    """
    try:
        file_count = len(store.list())
        if file_count > DEFAULTS.files:
            message = f"{file_count:,} files are more than Limits(files={DEFAULTS.files:,})"
            raise LimitExceeded(message, file=store.name)
        source = OpenSource(store, limits=DEFAULTS)
        format = detect(source)
        if format.name not in formats:
            message = f"it would be opened as {format.name}, and is {' or '.join(formats)}"
            raise FormatError(message, file=store.name)
        return format.describe(source)
    except HoldfastError as error:
        raise NotCommitted(f"{MESSAGE}: {error.message}", file=path) from error


def check_tensors(table: Table, outlines: Iterable[tuple[str, Outline]], path: str) -> None:
    """Compare the tensors that a reader describes with those that were to be saved.

    There may be a million tensors, so nothing is kept of those that are as expected.

    Raises `NotCommitted` if names, dtypes or shapes differ.
    """
    problems: list[str] = []
    expected_names: list[str] = []
    for name, expected in outlines:
        expected_names.append(name)
        if name not in table.row_indices:
            problems.append(f"{name}: it would not be there")
            continue
        dtype, shape = table.dtype_and_shape(name)
        if dtype is not expected[0] or shape != expected[1]:
            problems.append(
                f"{name}: it would be read as {dtype} {list(shape)}, "
                f"and is {expected[0]} {list(expected[1])}"
            )
    if problems or len(expected_names) != len(table.names):
        for name in set(table.names).difference(expected_names):
            problems.append(f"{name}: it was not saved, and it would be there")
    if problems:
        raise _refuse(problems, path)


def _refuse(problems: list[str], path: str) -> NotCommitted:
    """Return the error that lists the first problems."""
    shown_problems = problems[:SHOWN_PROBLEMS]
    if len(problems) > SHOWN_PROBLEMS:
        shown_problems.append(f"and {len(problems) - SHOWN_PROBLEMS:,} more")
    return NotCommitted("\n  - ".join([MESSAGE, *shown_problems]), file=path)
