"""`edit`: rename, drop, keep, cast, set metadata: a new checkpoint, beside the old one or in its place.

An edit is a conversion to the same format. In place, the old file is read while the new one is written beside it, and one rename
puts the new one there: a reader sees the old or the new, and a failure leaves the old.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.limits import Limits
from holdfast.engine.budget import byte_count
from holdfast.engine.write import Progress
from holdfast.errors import CannotHold, Unsupported
from holdfast.inspect.open import Openable, opened
from holdfast.rewrite.convert import MAX_MEMORY, Conversion, lay_out_conversion
from holdfast.rewrite.formats import Options
from holdfast.rewrite.planned import Planned, Writing, destination
from holdfast.rewrite.transform import Edits, dtype_named

__all__ = ["edit", "metadata_changes", "plan_edit"]


def edit(
    src: Openable | Checkpoint,
    dst: str | os.PathLike[str] | None = None,
    *,
    in_place: bool = False,
    keep: Sequence[str] = (),
    drop: Sequence[str] = (),
    rename: Sequence[tuple[str, str]] = (),
    dtype: str | None = None,
    set_metadata: Mapping[str, str] | None = None,
    unset_metadata: Sequence[str] = (),
    tensors_only: bool = False,
    max_shard_size: int | str | None = None,
    format: str | None = None,
    overwrite: bool = False,
    durable: bool = True,
    read_back: bool = True,
    max_memory: int | str | None = MAX_MEMORY,
    dry_run: bool = False,
    limits: Limits | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Change a checkpoint: as a new one at `dst`, whose suffix may ask for another format, or in its place (`in_place=True`).

    Patterns and `dtype` are as in `convert`. `set_metadata` and `unset_metadata` change the text that safetensors and native
    directories carry about themselves. `overwrite` is about `dst`; in place, the source is replaced, atomically. With
    `dry_run=True` nothing is written.

    Raises `CannotHold` with every problem where the edits do not fit, `NotCommitted` where nothing changed.
    """
    planned = plan_edit(
        src, dst, in_place=in_place or (dst is None and dry_run), format=format,
        edits=Edits(tuple(keep), tuple(drop), tuple(rename), dtype_named(dtype) if dtype else None, tensors_only),
        metadata=metadata_changes(set_metadata or {}, unset_metadata),
        max_shard_size=None if max_shard_size is None else byte_count(max_shard_size),
        writing=Writing(overwrite, durable, threads, read_back, max_memory), limits=limits,
    )  # fmt: skip
    return planned.carry_out(dry_run=dry_run, progress=progress)


def metadata_changes(changed: Mapping[str, str], removed: Iterable[str]) -> dict[str, str | None]:
    """What is to be set, and None for what is to go."""
    removed = tuple(removed)
    both = [key for key in removed if key in changed]
    if both:
        raise CannotHold("these edits do not fit each other", [f"the metadata {key!r} is set and taken out" for key in both])
    return {**changed, **dict.fromkeys(removed)}


def plan_edit(
    src: Openable | Checkpoint,
    dst: str | os.PathLike[str] | None,
    *,
    in_place: bool,
    edits: Edits,
    metadata: Mapping[str, str | None],
    format: str | None = None,
    max_shard_size: int | None = None,
    writing: Writing,
    limits: Limits | None = None,
) -> Planned[Conversion]:
    """Lay out an edit."""
    with ExitStack() as stack:
        source = stack.enter_context(opened(src, threads=1, limits=limits))
        if not edits and not metadata:
            raise Unsupported("nothing to do: say what to keep, drop, rename, cast or set", file=source.path)
        where = destination(source, dst, in_place=in_place, format=format, writing=writing)
        planned = lay_out_conversion(
            source, where.path, format=where.format, edits=edits, metadata=metadata,
            options=Options(max_shard_size, keep_tree=True), writing=where.writing, limits=limits,
        )  # fmt: skip
        return replace(planned, sources=stack.pop_all())
