"""`load_sharded`: fill the tensors of a state, whatever part of each this rank has, from any checkpoint that `open` knows.

1. Every rank opens the checkpoint and matches names (`wanted`). What is missing, unexpected, or of another shape or dtype is
   collected, all of it, and shared. If anything does not fit on any rank, no rank has changed anything.
2. Every rank reads exactly the byte ranges of its own boxes, straight into its tensors, in one batch. Which ranks wrote the file,
   how many and along which axis, does not matter: a box is a box.
3. Whether that went well is shared as well: all ranks return, or all raise the same error.

One checkpoint (`hash_checkpoint`). Each rank opens the path by itself, and another save may come between two of them: one half of a
model would be of one step, the other half of the next. So each rank's message has a hash of what it has opened.

Replicas (`replicas`). What several ranks want alike is read by one of them, and handed on when all have read. On one machine the
file is in the page cache, and reading it again is cheaper than sending it over a socket. So "auto" hands on where the ranks are on
several machines, the checkpoint in an object store, or the tensors on GPUs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, get_args

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from holdfast.core.arguments import make_choice_check
from holdfast.core.documents import (
    encode_message,
    message_type,
    read_document,
    write_document,
)
from holdfast.core.group import UNCHANGED, Ranks, check_same_checkpoint, joint_phase
from holdfast.core.notebook import NotebookResult
from holdfast.core.opaque import AnyValue
from holdfast.core.options import DEADLINE, validate_arguments
from holdfast.core.protocols import Request
from holdfast.core.runtime import gc_paused
from holdfast.core.tree import iterate_leaves, join_path
from holdfast.core.value import Value
from holdfast.engine.checksums import check_before_reading
from holdfast.engine.source import OpenSource
from holdfast.engine.threads import default_threads
from holdfast.stores.paths import place_of
from holdfast.stores.place import place_at
from holdfast.torch.arguments import device as device_given
from holdfast.torch.modules.match import Names
from holdfast.torch.ranks.group import ranks_of
from holdfast.torch.ranks.replicas import (
    NO_ASSIGNMENTS,
    NO_OFFERS,
    PART_NBYTES,
    PARTS,
    Offers,
    ReadAssignments,
    Replicas,
    Replicated,
    SharedPiece,
    deal_pieces,
    hand_on,
    offer,
    read_apart,
)
from holdfast.torch.ranks.wanted import Matching, PerRank, Wanted
from holdfast.torch.tensors.fill import NO_ARRAY, fill
from holdfast.verbs.open import apply_map, hash_checkpoint, open_for_verb
from holdfast.verbs.shared.state import Stateful, order_state_and_path

if TYPE_CHECKING:
    from holdfast.extras.maps.find import AnyMap

Guard = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class LoadedShards(NotebookResult):
    """What a load did on this rank."""

    path: str
    names: tuple[str, ...]
    """What was filled."""
    missing: tuple[str, ...]
    """What this rank asked for and the checkpoint does not have."""
    unexpected: tuple[str, ...]
    """The checkpoint's names that no rank asked for."""
    needed_nbytes: int
    """Bytes of the elements that this rank needed."""
    read_nbytes: int
    """Bytes that were read for them."""
    values: Mapping[str, AnyValue]
    """What the checkpoint holds for the leaves that are no tensors. They are in the state as well, where it can change."""
    notes: tuple[str, ...] = ()
    """What a person should know."""

    def __str__(self) -> str:
        over = self.read_nbytes / self.needed_nbytes if self.needed_nbytes else 1.0
        lines = [
            f"{len(self.names):,} tensors, {self.needed_nbytes:,} bytes from {self.path} ({over:.2f} × read)"
        ]
        lines += [f"missing: {name}" for name in self.missing[:20]]
        lines += [f"unexpected: {name}" for name in self.unexpected[:20]]
        lines += self.notes
        return "\n".join(lines)


class RankMatch(msgspec.Struct):
    """The message of a rank before anything is changed."""

    opened: bytes
    """A hash of what it has opened."""
    checkpoint: bytes
    """A hash of the names that it may want: ranks that see the same are judged together."""
    used: bytes
    """A bit for each of these names, set where this rank wants it."""
    fits: bool
    strict: bool
    offers: Offers


class Verdict(msgspec.Struct):
    """The answer of the first rank."""

    fits: bool
    used: bytes
    """The bits of all ranks that see the same checkpoint."""
    assignments: ReadAssignments


@validate_arguments(
    replicated=make_choice_check(*get_args(Replicated)),
    per_rank=make_choice_check(*get_args(PerRank)),
)
def load_sharded(
    path: str | os.PathLike[str],
    state: Stateful | Mapping[str, object],
    *,
    group: dist.ProcessGroup | None = None,
    strict: bool = True,
    prefix: str = "",
    per_rank: PerRank = "own",
    cast: bool = False,
    verify: bool = True,
    replicated: Replicated = "auto",
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
    max_host_memory: int | None = None,
    deadline: float = DEADLINE,
    store: object | None = None,
    map: AnyMap | None = None,
) -> LoadedShards:
    """Fill the tensors of `state` in place from a checkpoint, on every rank of a group, whatever ranks wrote it.

    `load_sharded(state, path)`, the order of `dcp.load`, is understood as well.
    `state` is a nested mapping: plain tensors get all of their elements, DTensors and their like the part that this rank has.
    Values that are no tensors are replaced by those of the checkpoint. Objects with `state_dict()` and `load_state_dict()`, in the
    state or as the state, are asked for their state dict, and handed it when it is filled. Tied tensors need one name between them.

    With `strict`, a name that a rank does not find, and one of the checkpoint that no rank asks for, are an error; another shape
    always is, and another dtype is unless `cast=True`. `prefix` selects the checkpoint's names that begin with it, and is taken off
    them. Of what was saved with `per_rank` each rank gets its own. If other numbers of ranks saved it, that is an error, unless
    `strict=False` or `per_rank="keep"`: then what the state has is kept, and a note says so.
    Raises `RanksFailed` with the same causes on every rank, and the error itself in one process; before anything was changed,
    where something does not fit.

    What several ranks want alike, a whole tensor or the same part of one, is read by each of them (`replicated="read"`), or by one
    and then sent to the others through the group (`"broadcast"`): each reads about as much, and nothing is read twice. By default
    the latter where they are on several machines, the checkpoint in an object store or the tensors on GPUs. Tensors on a GPU are
    read through at most `max_host_memory` bytes of page-locked memory (1 GiB unless said otherwise). `path` may be a URL
    (`s3://bucket/step-1000`), or a key in a `store` that the caller has made. `map` shows it in the layout of the state, as in
    `holdfast.open`; "auto" finds it by the names of both.
    A damaged file is found while it is read: the error says that tensors have been written to by then.
    """
    state, path = order_state_and_path(state, path)
    request = ShardedLoad(
        place_of(path, store), state, group, strict, per_rank, cast, threads, deadline, prefix, verify, replicated, progress,
        max_host_memory, map=map,
    )  # fmt: skip
    return load_together(request)


class ShardedLoad(Value, frozen=True, eq=False):
    """The arguments of one load."""

    where: str
    state: Stateful | Mapping[str, object]
    group: dist.ProcessGroup | None
    strict: bool
    per_rank: PerRank
    cast: bool
    threads: int | None
    deadline: float
    prefix: str = ""
    verify: bool = True
    replicated: Replicated = "auto"
    progress: Callable[[int], None] | None = None
    max_host_memory: int | None = None
    unharmed: Guard = nullcontext
    """A block around everything before the first change; may say more of what is raised there."""
    map: AnyMap | None = None
    check: bool = False
    """Whether nothing is changed anywhere unless all that any rank reads whole has its checksum."""


def load_together(request: ShardedLoad) -> LoadedShards:
    """Match, read and hand on: each step on all ranks, or on none."""
    ranks = ranks_of(
        request.group, doing=f"load (replicated={request.replicated})", deadline=request.deadline
    )
    changed = "the load failed, and some tensors have been changed"
    with ExitStack() as held:
        held.callback(ranks.close)
        wanted, unexpected, replicas = _match(request, ranks, held)
        mine = replicas.mine() if replicas.assignments.any else wanted.fills
        if request.check:
            with joint_phase(ranks, UNCHANGED), request.unharmed():
                check_before_reading([Request(lazy, NO_ARRAY) for lazy in replicas.checked()])

        def read() -> None:
            notes = fill(mine, request.progress, max_host_memory=request.max_host_memory)
            wanted.notes += dict.fromkeys(notes)

        # Nobody waits for a message of a rank that failed.
        damaged = (
            read_apart(ranks, replicas, read, failure_summary=changed)
            if replicas.assignments.any
            else {}
        )
        with joint_phase(ranks, changed):
            if replicas.assignments.any:
                hand_on(replicas, damaged, request.group, deadline=request.deadline)
            else:
                read()
            wanted.finish()
    return LoadedShards(
        request.where,
        tuple(wanted.names),
        tuple(wanted.missing),
        tuple(unexpected),
        int(wanted.fills.nbytes.sum()),
        sum(source.read_nbytes for source in mine.sources if isinstance(source, OpenSource)),
        dict(wanted.values),
        tuple(wanted.notes),
    )


def _match(
    request: ShardedLoad, ranks: Ranks, held: ExitStack
) -> tuple[Wanted, list[str], Replicas]:
    """Open the checkpoint and match it with the state. Raises if anything does not fit on any rank.

    Returns:
        What this rank wants, the checkpoint's names that no rank asked for, and what this rank
        shares with others.
    """
    if ranks.size == 1:
        names, wanted = _match_alone(request, ranks, held)
        unexpected = names.unexpected
        has_gaps = request.strict and bool(wanted.missing or unexpected)
        is_fit = not wanted.mismatched and not has_gaps
        replicas = Replicas(wanted.fills, (), NO_ASSIGNMENTS, ranks.rank)
    else:
        names, wanted, unexpected, is_fit, replicas = _agree(request, ranks, held)
    if not is_fit:
        with joint_phase(ranks, UNCHANGED):
            wanted.check(names, unexpected, wanted.looked_for, strict=request.strict)
    return wanted, unexpected, replicas


def _match_alone(request: ShardedLoad, ranks: Ranks, held: ExitStack) -> tuple[Names, Wanted]:
    """Open the checkpoint on this rank, and match it with the state of this rank."""
    with request.unharmed():
        threads = request.threads or default_threads(ranks.count_local_ranks())
        checkpoint = open_for_verb(request.where, verify=request.verify, threads=threads)
        held.callback(checkpoint.close)
        if request.map is not None:
            names_in_state = partial(_names_in, request.state)
            checkpoint = apply_map(checkpoint, request.map, names_in_state)
    with gc_paused():
        names = Names(checkpoint, request.prefix)
        matching = Matching(
            names,
            rank=ranks.rank,
            size=ranks.size,
            cast=request.cast,
            strict=request.strict,
            per_rank=request.per_rank,
        )
        return names, matching.run(request.state)


def _agree(
    request: ShardedLoad, ranks: Ranks, held: ExitStack
) -> tuple[Names, Wanted, list[str], bool, Replicas]:
    """Match on every rank, and compare what all ranks have found.

    Returns the results of `_match`, and whether everything fits on all ranks.
    """
    pieces, offers = list[SharedPiece](), NO_OFFERS
    local: bytes | BaseException
    try:
        names, wanted = _match_alone(request, ranks, held)
        with gc_paused():
            if request.replicated != "read":
                table = names.table
                total_nbytes = int(table.row_nbytes(range(len(table))).sum())
                most = max(total_nbytes // (PARTS * ranks.size), PART_NBYTES)
                pieces, offers = offer(wanted.fills, wanted.keys, request.group, most)
            message = RankMatch(
                opened=hash_checkpoint(names.checkpoint),
                checkpoint=hashlib.blake2b(encode_message(names.offered), digest_size=16).digest(),
                used=_bits(names),
                fits=not wanted.mismatched and not (request.strict and wanted.missing),
                strict=request.strict,
                offers=offers,
            )
            local = write_document(RANK_MATCH, message)
    except Exception as error:
        local = error

    def judge(messages: list[bytes]) -> list[bytes]:
        remote = not place_at(request.where).on_disk or ranks.count_local_ranks() < ranks.size
        return _judge(messages, request.replicated, remote=remote)

    # If this rank has failed, this raises, and `names` and `wanted` are not needed.
    verdict = read_document(VERDICT, ranks.agree(local, judge))
    used = np.unpackbits(np.frombuffer(verdict.used, np.uint8)).tolist()
    unexpected = [name for name, is_used in zip(names.offered, used, strict=False) if not is_used]
    replicas = Replicas(wanted.fills, pieces, verdict.assignments, ranks.rank)
    return names, wanted, unexpected, verdict.fits, replicas


@validate_arguments(device=device_given)
def load_full(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    store: object | None = None,
) -> AnyValue:
    """The whole state of a checkpoint in one process: its tree, with every tensor in one piece."""
    from holdfast.torch.tensors.open import open as open_torch

    with open_torch(place_of(path, store)) as checkpoint:
        return checkpoint.read_tree(device=device)


def _judge(messages: Sequence[bytes], replicated: Replicated, *, remote: bool) -> list[bytes]:
    """On the first rank: does it all fit, which names does nobody want, and who reads what."""
    with gc_paused():
        matches = [read_document(RANK_MATCH, message) for message in messages]
    check_same_checkpoint([one.opened for one in matches])
    used: dict[bytes, np.ndarray] = {}
    for one in matches:
        bits = np.frombuffer(one.used, np.uint8)
        used[one.checkpoint] = bits | used.get(one.checkpoint, bits)
    all_used = {checkpoint: bool((bits == 255).all()) for checkpoint, bits in used.items()}
    fits = all(one.fits and (all_used[one.checkpoint] or not one.strict) for one in matches)
    assignments = deal_pieces([one.offers for one in matches], replicated, remote=remote)
    verdicts = [
        Verdict(fits, used[one.checkpoint].tobytes(), own)
        for one, own in zip(matches, assignments, strict=True)
    ]
    return [write_document(VERDICT, verdict) for verdict in verdicts]


def _names_in(state: object) -> list[str]:
    """The dotted names of the leaves of a state, for "auto"."""
    return [join_path(path) for path, _ in iterate_leaves(state)]


def _bits(names: Names) -> bytes:
    """A bit for each name, in order, set where it is wanted; the bits of the last byte that stand for no name are set."""
    flags = np.ones(-(-len(names.offered) // 8) * 8, np.bool_)
    flags[: len(names.offered)] = [name not in names.left for name in names]
    return np.packbits(flags).tobytes()


RANK_MATCH, VERDICT = (
    message_type("match of a rank", RankMatch),
    message_type("verdict on a load", Verdict),
)
