"""`save`: any state to any format, wholly or not at all.

1. The state is described: every tensor a lazy tensor, nothing copied (rewrite/state.py).
2. The format lays out every byte (rewrite/formats.py); what it cannot hold is refused now, all of it, before a file exists.
3. The reader opens the plan (`rehearse`, there); what it would refuse is refused now as well.
4. The plan is written beside the target and published by one rename (engine/write.py, engine/commit/transactions.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from holdfast.core.arguments import understood
from holdfast.core.limits import Limits
from holdfast.core.quantities import Size, byte_count
from holdfast.core.runtime import resting_collector
from holdfast.engine.write import Progress
from holdfast.rewrite.formats import DIRECTORIES, Options, format_for, plan_save
from holdfast.rewrite.planned import Planned, Saved, Writing, check_target, planned_fields, stores_of
from holdfast.rewrite.state import describe_state
from holdfast.stores.paths import content_and_path, local_path

__all__ = ["save"]


@understood
def save(
    state: object,
    dst: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: Size | None = None,
    keep_tree: bool = False,
    sparse: str = "never",
    format: str | None = None,
    overwrite: bool | None = None,
    durable: bool = True,
    read_back: bool = False,
    max_memory: Size | None = None,
    dry_run: bool = False,
    limits: Limits | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Saved:
    """Save a state: nested dicts, lists and tuples of arrays, tensors, lazy tensors and plain values; or an open checkpoint.

    `save(path, state)` is understood as well: which of the two is the path can be seen.
    The format is `format` (`torch`, `safetensors`, `native`) or what the suffix says: `.pt` and `.pth` are torch's zip,
    `.safetensors` is safetensors, a name without suffix is a native directory. `max_shard_size` ("5GB") splits safetensors
    into a directory with an index. In a native directory, `sparse="auto"` stores tensors with many zeros as marks and values, where
    that is smaller; other programs cannot read those tensors, so the default is "never". Files are replaced by default and
    directories are not (`overwrite`). With `durable=False` nothing is flushed to disk: a killed process still leaves the old or
    the new, a power cut may not.

    Raises `CannotHold` with every problem when the format cannot hold the state, `NotCommitted` when the save failed and
    nothing changed, `DurabilityUncertain` when the new content is in place but could not be flushed.
    """
    state, path = content_and_path(state, dst)
    options = Options(None if max_shard_size is None else byte_count(max_shard_size), keep_tree, sparse)
    writing = Writing(
        overwrite=overwrite, durable=durable, threads=threads, read_back=read_back, max_memory=max_memory, dry_run=dry_run
    )
    # The plan has no name here, so that it is gone before the collector wakes and would walk through it.
    with resting_collector():
        return _plan(
            state, local_path(path), format=format, metadata=metadata, options=options, writing=writing, limits=limits
        ).carry_out(progress)


def _plan(
    state: object,
    target: str,
    *,
    format: str | None,
    metadata: Mapping[str, str] | None,
    options: Options,
    writing: Writing,
    limits: Limits | None,
) -> Planned[Saved]:
    described = describe_state(state, metadata=metadata, limits=limits)
    found = format_for(target, format, options)
    if writing.overwrite is False or found in DIRECTORIES:
        check_target(target, directory=found in DIRECTORIES, writing=writing)
    plan = plan_save(target, described, found, options=options)
    plan = replace(plan, notes=(*described.notes, *plan.notes))
    return Planned(plan, Saved(**planned_fields(plan, target)), writing, reads=stores_of(described))
