"""`save_sharded` and `async_save_sharded`: the state of all ranks as one checkpoint, now or in the background."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Unpack

import torch.distributed as dist

from holdfast.core.arguments import make_choice_check
from holdfast.core.options import (
    AsyncShardedOptions,
    ShardedOptions,
    pick_fields,
    validate_arguments,
)
from holdfast.core.table import Table
from holdfast.engine.threads import default_threads
from holdfast.formats import rank_formats, titles
from holdfast.stores.paths import place_of
from holdfast.stores.place import place_at
from holdfast.torch.ranks.background import Course, SaveHandle, begin
from holdfast.torch.ranks.group import ranks_of
from holdfast.torch.ranks.saving import SavedShards, SaveRequest, ShardedSave
from holdfast.torch.ranks.staging import Staged, Versions, stage, versions
from holdfast.verbs.shared.base import check_shares
from holdfast.verbs.shared.state import Stateful, order_state_and_path, replace_stateful

FORMATS = make_choice_check(*titles(rank_formats()))


@validate_arguments(format=FORMATS)
def save_sharded(
    state: Stateful | Mapping[str, object],
    path: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    **options: Unpack[ShardedOptions],
) -> SavedShards:
    """Save the state of all ranks of a group as one checkpoint, which any number of ranks can load. Every rank calls it.

    The state comes first, as in `dcp.save`; `save_sharded(path, state)` is understood as well.
    Plain tensors are taken as replicated and written once, spread over the ranks by bytes; of DTensors, ShardedTensors and
    LocalShardsWrappers every rank writes what it has. Mappings of which each rank has some keys, such as pipeline stages, are put
    together; values that are no tensors must be the same on all ranks that have them (`values="first"` takes those of the first),
    and so must plain tensors, by checksums (`check_replicas=False` stores one of them unseen). What each rank is to keep for itself
    is named by `per_rank`: patterns of dotted names, such as `["rng", "loader.*"]`.

    Modules, optimizers and whatever else has `state_dict()` and `load_state_dict()` stand for their state dict, in the state and as
    the state. In a DCP checkpoint other objects are pickled, and refused where there are tensors in them.

    Raises `RanksFailed` on every rank where anything went wrong on one, and the error itself in one process. A rank that shows no
    sign of life for `deadline` seconds, or does not call this at all, is given up with `RankLost`. What was at `path` stays until
    the new one is whole.

    A save that another one of this process is in the way of waits for it, or is refused on all ranks (`when_busy`).
    `base` and `hashes` are as for `holdfast.save`: every rank decides for its boxes, in a native checkpoint.
    Where the ranks and the placements are those of the base, what did not change is linked.

    A URL (`s3://bucket/step-1000`) is a place in an object store, and so is a key with a `store` that the caller has made. Every
    rank uploads its part, and the first one publishes by one conditional put: native or DCP.
    """
    state, request = _request(state, path, options)
    return save_requested(
        state, request, group=group, deadline=options["deadline"], when_busy=options["when_busy"]
    )


@validate_arguments(format=FORMATS)
def async_save_sharded(
    state: Stateful | Mapping[str, object],
    path: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    **options: Unpack[AsyncShardedOptions],
) -> SaveHandle:
    """As `save_sharded`, and the caller trains on while it is written.

    Returns when what this rank has has been copied, without waiting for the others unless much of it is replicated: a `SaveHandle`,
    whose `wait()` comes back with the `SavedShards` when the checkpoint is there, or raises. A second save waits for the one
    before, or is refused on all ranks (`when_busy`). Tensors on a GPU are copied into page-locked memory, kept for the next save:
    up to `max_host_memory` bytes of it, or half of what the machine has to give. This returns when the copies are under way: what
    the current stream is asked to do from then on comes behind them.
    """
    state, request = _request(state, path, options)
    return begin_requested(
        state, request, group=group, deadline=options["deadline"], when_busy=options["when_busy"],
        max_host_memory=options["max_host_memory"],
    )  # fmt: skip


def _request(
    state: Stateful | Mapping[str, object], path: str | os.PathLike[str], options: ShardedOptions
) -> tuple[Stateful | Mapping[str, object], SaveRequest]:
    state, path = order_state_and_path(state, path)
    base = options["base"]
    given = {**options, "base": None if base is None else place_at(place_of(base)).absolute}
    return state, pick_fields(SaveRequest, given, path=place_of(path, options["store"]))


def save_requested(
    state: object,
    request: SaveRequest,
    *,
    group: dist.ProcessGroup | None,
    deadline: float,
    when_busy: Literal["wait", "refuse"] = "wait",
) -> SavedShards:
    """Save with all ranks of a group."""
    course = Course()
    save = _begin_save(request, course, group=group, deadline=deadline)

    def take_state() -> object:
        course.take_turn(when_busy, request.path)
        return replace_stateful(state)

    try:
        save.describe(take_state)
        return save.finish()
    finally:
        course.open.close()


def begin_requested(
    state: object,
    request: SaveRequest,
    *,
    group: dist.ProcessGroup | None,
    deadline: float,
    when_busy: Literal["wait", "refuse"] = "wait",
    max_host_memory: int | None = None,
    after: Callable[[SavedShards], None] | None = None,
) -> SaveHandle:
    """Begin a save in the background. `after` is called there, on each rank, when the checkpoint is published."""
    course = Course()
    save = _begin_save(request, course, group=group, deadline=deadline)
    before: list[Versions] = []

    def take_state() -> object:
        course.take_turn(when_busy, request.path)
        usual_state = replace_stateful(state)
        before.append(versions(usual_state))
        return usual_state

    def copy(table: Table, values: Sequence[object]) -> Staged:
        return stage(
            table,
            before[0],
            request.path,
            values=values,
            threads=request.threads or default_threads(save.ranks.count_local_ranks()),
            max_host_memory=max_host_memory,
        )

    def finish() -> SavedShards:
        saved = save.finish()
        if after is not None:
            after(saved)
        return saved

    handed = False
    try:
        save.describe(take_state)
        save.stage(copy)
        staged_nbytes = 0 if save.staged is None else save.staged.nbytes
        handle = begin(request.path, course, finish, staged_nbytes=staged_nbytes)
        handed = True  # the thread ends it from here on
        return handle
    finally:
        if not handed and course.claim():
            course.open.close()


def _begin_save(
    request: SaveRequest, course: Course, *, group: dist.ProcessGroup | None, deadline: float
) -> ShardedSave:
    """Begin a save. From here on the other ranks see a pulse of this one, and learn what goes wrong."""
    if request.base is not None or request.hashes:
        check_shares(request.path, request.format, request.base)
    ranks = ranks_of(group, doing=f"save {request.format} to {request.path!r}", deadline=deadline)
    course.open.callback(ranks.close)
    save = ShardedSave(request, ranks)
    course.open.push(save.close)
    return save
