"""`load_sharded`: fill the tensors of a state, whatever part of each this rank has, from any checkpoint that `open` knows.

1. Every rank opens the checkpoint and matches names: what is missing, unexpected, or of another shape or dtype is collected, all
   of it, and shared. If anything does not fit anywhere, no rank has changed anything.
2. Every rank reads exactly the byte runs of its own boxes, straight into its tensors, in one batch. Which ranks wrote the file, how
   many and along which axis, does not matter: a box is a box. What all of them want whole is read by one and handed to the others,
   where that is cheaper (replicas.py).
3. Whether that went well is shared as well: all ranks return, or all raise the same error.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from holdfast.core.checkpoint import Checkpoint
from holdfast.engine.source import OpenSource
from holdfast.errors import DoesNotFit
from holdfast.inspect.open import open as open_checkpoint
from holdfast.ranks.same_checkpoint import marked, unmarked
from holdfast.rewrite.stateful import Stateful
from holdfast.stores.paths import local_path
from holdfast.torch.modules.match import Names
from holdfast.torch.ranks.group import DEADLINE, ranks_of
from holdfast.torch.ranks.replicas import Replicated, Share, hand_on, offers, spread
from holdfast.torch.ranks.wanted import PerRank, Wanted, match
from holdfast.torch.tensors.fill import Fill, fill

__all__ = ["LoadedShards", "load_full", "load_sharded"]


@dataclass(frozen=True, slots=True)
class LoadedShards:
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
    values: Mapping[str, object]
    """What the checkpoint holds for the leaves that are no tensors. They are in the state as well, where it can change."""
    notes: tuple[str, ...] = ()
    """What a person should know."""

    def __str__(self) -> str:
        over = self.read_nbytes / self.needed_nbytes if self.needed_nbytes else 1.0
        lines = [f"{len(self.names):,} tensors, {self.needed_nbytes:,} bytes from {self.path} ({over:.2f} × read)"]
        lines += [f"missing: {name}" for name in self.missing[:20]]
        lines += [f"unexpected: {name}" for name in self.unexpected[:20]]
        lines += self.notes
        return "\n".join(lines)


class Told(msgspec.Struct):
    """What a rank tells the others before anything is changed."""

    checkpoint: bytes
    """A hash of the names that it may ask for: ranks that see the same are judged together."""
    used: bytes
    """A bit for each of them, set where this rank asks for it."""
    fits: bool
    strict: bool
    offers: bytes


class Verdict(msgspec.Struct):
    """What a rank is told."""

    fits: bool
    used: bytes
    """The bits of all ranks that see the same checkpoint."""
    shares: bytes


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
) -> LoadedShards:
    """Fill the tensors of `state` in place from a checkpoint, on every rank of a group, whatever ranks wrote it.

    `state` is a nested mapping: plain tensors get all of their elements, DTensors and their like the part that this rank has.
    Values that are no tensors are replaced by those of the checkpoint. Objects with `state_dict()` and `load_state_dict()`, in the
    state or as the state, are asked for their state dict, and handed it when it is filled. Tied tensors need one name between them.

    With `strict`, a name that a rank does not find, and one of the checkpoint that no rank asks for, are an error; another shape
    always is, and another dtype is unless `cast=True`. `prefix` selects the checkpoint's names that begin with it, and is taken off
    them. Of what was saved with `per_rank` each rank gets its own. If other numbers of ranks saved it, that is an error, unless
    `strict=False` or `per_rank="keep"`: then what the state has is kept, and a note says so.
    Raises `RanksFailed` with the same causes on every rank; before anything was changed, where something does not fit.

    What all ranks want whole is read by each of them (`replicated="read"`), or by one and then sent to the others with the group's
    own collectives (`"broadcast"`); by default the latter where they are on several machines or the tensors on GPUs. Tensors on a
    GPU are read through at most `max_host_memory` bytes of page-locked memory (1 GiB unless said otherwise).
    """
    where = local_path(path)
    for word, given, known in (("replicated", replicated, get_args(Replicated)), ("per_rank", per_rank, get_args(PerRank))):
        if given not in known:
            raise ValueError(f"{word} must be one of {', '.join(known)}, not {given!r}")
    ranks = ranks_of(group, doing=f"load (replicated={replicated})", deadline=deadline)
    checkpoint: Checkpoint | None = None
    try:
        wanted = Wanted()
        names: Names | None = None
        problem: BaseException | None = None
        local: bytes | BaseException
        try:
            checkpoint = open_checkpoint(path, verify=verify, threads=threads or ranks.threads())
            names = Names(checkpoint, prefix)
            place = {"rank": ranks.rank, "size": ranks.size}
            wanted = match(state, names, cast=cast, strict=strict, per_rank=per_rank, **place)
            seen = hashlib.blake2b(msgspec.msgpack.encode(names.offered), digest_size=16).digest()
            fits = not wanted.mismatched and not (strict and wanted.missing)
            told = Told(seen, _bits(names), fits, strict, offers(wanted.whole, group))
            local = marked(checkpoint, msgspec.msgpack.encode(told), alone=ranks.size == 1)
        except Exception as error:
            local = error
        answer = ranks.agree(local, lambda messages: _judge(unmarked(messages), replicated, machines=ranks.apart()))
        verdict = msgspec.msgpack.decode(answer, type=Verdict)
        asked = np.unpackbits(np.frombuffer(verdict.used, np.uint8))
        assert names is not None  # or this rank would have failed, and with it all of them
        unexpected = [name for name, used in zip(names.offered, asked.tolist(), strict=False) if not used]
        if not verdict.fits:
            try:
                wanted.check(names, unexpected, wanted.looked_for, strict=strict)
            except DoesNotFit as error:
                problem = error
            ranks.agree(problem or b"", lambda _: [b""] * ranks.size)
        shares = msgspec.msgpack.decode(verdict.shares, type=list[Share])
        needed = read = 0
        otherwise = "the load failed, and some tensors have been changed"
        try:
            needed = sum(one.lazy.nbytes for one in wanted.fills)
            elsewhere = {id(wanted.whole[share.name]) for share in shares if share.owner != ranks.rank}
            mine = [one for one in wanted.fills if id(one) not in elsewhere]
            wanted.notes += fill(mine, progress, max_host_memory=max_host_memory)
            read = _read_nbytes(mine)
        except Exception as error:
            problem = error
        if shares:
            # Nobody enters a broadcast that somebody else will not come to.
            ranks.agree(problem or b"", lambda _: [b""] * ranks.size, otherwise=otherwise)
        try:
            hand_on(shares, wanted.whole, group)
            if problem is None:
                wanted.finish()
        except Exception as error:
            problem = problem or error
        ranks.agree(problem or b"", lambda _: [b""] * ranks.size, otherwise=otherwise)
    finally:
        ranks.close()
        if checkpoint is not None:
            checkpoint.close()
    return LoadedShards(
        where,
        tuple(wanted.names),
        tuple(wanted.missing),
        tuple(unexpected),
        needed,
        read,
        dict(wanted.values),
        tuple(wanted.notes),
    )


def load_full(path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> object:
    """The whole state of a checkpoint in one process: its tree, with every tensor in one piece."""
    from holdfast.torch.tensors.open import open as open_torch

    with open_torch(path) as checkpoint:
        return checkpoint.read_tree(device=device)


def _read_nbytes(fills: list[Fill]) -> int:
    """Bytes that were read from the files of a checkpoint that was opened for these fills alone."""
    sources = {one.lazy.source for one in fills}
    return sum(source.read_nbytes for source in sources if isinstance(source, OpenSource))


def _judge(messages: Sequence[bytes], replicated: Replicated, *, machines: bool) -> list[bytes]:
    """On the first rank: does it all fit, what did nobody ask for, and who reads what."""
    told = [msgspec.msgpack.decode(message, type=Told) for message in messages]
    used: dict[bytes, np.ndarray] = {}
    for one in told:
        bits = np.frombuffer(one.used, np.uint8)
        used[one.checkpoint] = bits | used.get(one.checkpoint, bits)
    all_used = {checkpoint: bool((bits == 255).all()) for checkpoint, bits in used.items()}
    fits = all(one.fits and (all_used[one.checkpoint] or not one.strict) for one in told)
    shares = spread([one.offers for one in told], replicated, machines=machines)
    return [msgspec.msgpack.encode(Verdict(fits, used[one.checkpoint].tobytes(), shares)) for one in told]


def _bits(names: Names) -> bytes:
    """A bit for each name, in order, set where it was asked for; those of the last byte that stand for no name are set."""
    flags = np.ones(-(-len(names.offered) // 8) * 8, np.bool_)
    flags[: len(names.offered)] = [name not in names.left for name in names]
    return np.packbits(flags).tobytes()
