"""`edit`: rename, drop, keep, cast, set metadata: a new checkpoint, in place of the old one or beside it.

An edit is a conversion to the same format. In place, the old file is read while the new one is written beside it, and one rename
puts the new one there: a reader sees the old or the new, and a failure leaves the old.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.limits import Limits
from holdfast.engine.write import Progress
from holdfast.errors import CannotHold, Unsupported
from holdfast.inspect.open import open as open_checkpoint
from holdfast.rewrite.convert import Conversion, PlannedConversion, plan_conversion
from holdfast.rewrite.formats import NAMES, Options, byte_count
from holdfast.rewrite.transform import Edits, dtype_named
from holdfast.stores.paths import local_path

__all__ = ["edit", "metadata_changes", "plan_edit"]


def edit(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str] | None = None,
    *,
    keep: Sequence[str] = (),
    drop: Sequence[str] = (),
    rename: Sequence[tuple[str, str]] = (),
    dtype: str | None = None,
    set_metadata: Mapping[str, str] | None = None,
    unset_metadata: Sequence[str] = (),
    tensors_only: bool = False,
    max_memory: int | str = "1GiB",
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    durable: bool = True,
    verify: bool = True,
    explain: bool = False,
    threads: int | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Change a checkpoint: in place, or as a new one at `dst`, whose suffix may ask for another format.

    Patterns and `dtype` are as in `convert`. `set_metadata` and `unset_metadata` change the text that safetensors and native
    directories carry about themselves. `overwrite` is about `dst`; without `dst` the source is replaced, atomically. With
    `explain=True` nothing is done.

    Raises `CannotHold` with every problem where the edits do not fit, `NotCommitted` where nothing changed.
    """
    edits = Edits(tuple(keep), tuple(drop), tuple(rename), dtype_named(dtype) if dtype else None, tensors_only)
    with open_checkpoint(src, threads=1, limits=limits) as opened:
        planned = plan_edit(
            opened, None if dst is None else local_path(dst), edits=edits,
            metadata=metadata_changes(set_metadata or {}, unset_metadata),
            max_shard_size=None if max_shard_size is None else byte_count(max_shard_size), max_memory=max_memory,
            overwrite=overwrite, durable=durable, verify=verify, threads=threads, limits=limits,
        )  # fmt: skip
        return planned.report if explain else planned.run(progress)


def metadata_changes(changed: Mapping[str, str], removed: Iterable[str]) -> dict[str, str | None]:
    """What is to be set, and None for what is to go."""
    removed = tuple(removed)
    both = [key for key in removed if key in changed]
    if both:
        raise CannotHold("these edits do not fit each other", [f"the metadata {key!r} is set and taken out" for key in both])
    return {**changed, **dict.fromkeys(removed)}


def plan_edit(
    source: Checkpoint,
    target: str | None,
    *,
    edits: Edits,
    metadata: Mapping[str, str | None],
    max_shard_size: int | None = None,
    max_memory: int | str = "1GiB",
    overwrite: bool = False,
    durable: bool = True,
    verify: bool = True,
    threads: int | None = None,
    limits: Limits | None = None,
) -> PlannedConversion:
    """Lay out an edit of an open checkpoint; without a target, in its place."""
    if not edits and not metadata:
        raise Unsupported("nothing to do: say what to keep, drop, rename, cast or set", file=source.path)
    format = None
    if target is None:
        format = source.format
        if format not in NAMES.values():
            raise Unsupported(
                f"{format} can be read and not written, so it cannot be edited in place; give the edited one another path",
                file=source.path,
                found=format,
            )
        target, overwrite = source.path, True
    return plan_conversion(
        source, target, format=format, edits=edits, metadata=metadata, options=Options(max_shard_size, keep_tree=True),
        max_memory=max_memory, overwrite=overwrite, durable=durable, verify=verify, threads=threads, limits=limits,
    )  # fmt: skip
