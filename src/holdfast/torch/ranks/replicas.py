"""What several ranks want alike is read by one of them and handed on to the others: each byte is read once.

    wanted      rank 0   a b c ┐              reads a₀ c     ┐
                rank 1   a b d ├─► deal ─►    reads a₁ b     ├─► hand on: rounds of messages, from each reader to its set
                rank 2   a     ┘              reads a₂       ┘

1. A piece is a box of a tensor of the checkpoint, as elements of a dtype on a kind of device. A rank offers all that it could get
   from another (`offer`), each as a hash and a length: of 100,000 tensors 2.4 MB. What would unbalance the reading is cut.
2. The first rank finds the holders of each piece and deals the reading among them (`deal_pieces`), evenly by bytes, as the writing
   of a save is dealt (ranks/plan.py). With it the bound: an eighth above the mean, as far as pieces can be cut.
3. When all have read, the members of each set of holders send each other what they have read (`hand_on`), set after set, in
   rounds that all members know. So nobody waits for a rank that waits for him. Small pieces share a message.

Checksums. They are of whole storages, and a rank that reads a part of one cannot compare it. So a tensor that is one range of a
file is cut anywhere, and the CRCs of its parts go to all ranks, which fold and compare them before anything is handed on
(`read_apart`). Any other is cut between the storages that it is made of: each is read whole by one rank, which compares it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from holdfast.core.crc import BlockCrcs, crc32
from holdfast.core.documents import (
    encode_message,
    message_type,
    read_document,
    write_document,
)
from holdfast.core.group import (
    SHARES,
    Ranks,
    check_same_checkpoint,
    format_ranks,
    joint_phase,
    shared_errors,
)
from holdfast.core.table import IRREGULAR
from holdfast.core.tensor import NO_CRC, LazyTensor
from holdfast.core.value import Value
from holdfast.engine.checksums import build_damage_error
from holdfast.engine.source import OpenSource
from holdfast.errors import BadArgument
from holdfast.ranks.plan import deal_classes
from holdfast.torch.ranks.group import ranks_of
from holdfast.torch.tensors.allocate import Want, make_fresh
from holdfast.torch.tensors.fill import NO_FILLS, Fills, batches, files_of, fill, overlapping
from holdfast.torch.tensors.from_lazy import torch_dtype
from holdfast.torch.tensors.scratch import Fill, flat
from holdfast.torch.tensors.slices import Read, ShareBatch

Replicated = Literal["auto", "read", "broadcast"]

WORTH_NBYTES = 16 << 20
"""Bytes that must be saved, over all ranks, before "auto" hands anything on."""

PART_NBYTES = 16 << 20
"""Bytes of the smallest part that is cut off a piece."""

PARTS = 8
"""Parts for each rank that a checkpoint of one tensor is cut into."""

ROUND_NBYTES = 64 << 20
"""Bytes that the members of a set send in a round, all together: what messages with several pieces take of memory."""

LEAST_NBYTES = 1 << 20
"""Bytes of a message that are not too few, however many members there are."""

ENDS = "the stream ends here"

PieceKey = tuple[str, tuple[int, ...], tuple[int, ...]]
"""The checkpoint's name for a tensor, and the lowest and the highest corner of a box of it."""


class SharedPiece(Value, frozen=True, gc=False):
    """Rows of a fill, or all of it."""

    position: int
    start: int
    stop: int
    cut: bytes = b""
    """What the parts of a piece share; empty where it is whole."""
    crc: int = NO_CRC
    """The checksum that is recorded of all parts together, where no reader of one can compare it."""


class Offers(msgspec.Struct):
    """The pieces that a rank could get from another, as columns."""

    keys: bytes
    """16 bytes each: pieces are the same where these are."""
    nbytes: bytes
    on_cpu: bytes
    apart: int
    """Bytes of everything else that the rank reads."""


class ReadAssignments(msgspec.Struct):
    """Who reads what, as one rank needs to know it. Its pieces that it shares with others, in an order that all ranks have."""

    any: bool
    """Whether any rank shares anything: all take the same steps."""
    sets: dict[int, list[int]]
    """Sets of holders that this rank is in, by numbers that all ranks have; in order."""
    offered: list[int]
    """The number of each piece in what the rank has offered."""
    readers: list[int]
    classes: list[int]
    """The set of holders of each."""


NO_OFFERS = Offers(b"", b"", b"", 0)
NO_ASSIGNMENTS = ReadAssignments(any=False, sets={}, offered=[], readers=[], classes=[])
PART_SUMS = message_type("list of checksums of parts", list[tuple[bytes, int, int, int, int]])


def offer(
    fills: Fills, keys: Sequence[PieceKey], group: dist.ProcessGroup | None, most: int
) -> tuple[list[SharedPiece], Offers]:
    """The pieces that this rank could get from another, of at most about `most` bytes where they can be cut: dense, on devices
    that the group can send between. Nothing where targets overlap, since the last one must win."""
    devices = (
        set() if overlapping(fills) else {device.type for device in _chosen(group)._device_types}
    )
    lengths, targets, pieces, nbytes = (
        fills.nbytes.tolist(),
        fills.targets,
        dict[bytes, SharedPiece](),
        list[int](),
    )
    for at in sorted(range(len(fills)), key=partial(_place, fills)):
        key, length, target = keys[at], lengths[at], targets[at]
        kind = target.device.type
        if (
            kind not in devices
            or not length
            or not target.is_contiguous()
            or target.is_conj()
            or target.is_neg()
        ):
            continue
        rows, crc = _cuts(fills.lazy(at), target, most) if length > most else ([], NO_CRC)
        raw = encode_message((key, str(target.dtype), kind, rows))
        whole = hashlib.blake2b(raw, digest_size=16).digest()
        if whole in pieces:
            continue
        if not rows:
            pieces[whole] = SharedPiece(at, 0, 0)
            nbytes.append(length)
        for number, (start, stop) in enumerate(pairwise(rows)):
            own = (
                hashlib.blake2b(raw, digest_size=16, salt=number.to_bytes(16, "little")).digest()
                if number
                else whole
            )
            pieces[own] = SharedPiece(at, start, stop, whole, crc)
            nbytes.append(length * (stop - start) // rows[-1])
    flags = bytes(targets[piece.position].is_cpu for piece in pieces.values())
    told = Offers(
        b"".join(pieces), np.array(nbytes, "<i8").tobytes(), flags, sum(lengths) - sum(nbytes)
    )
    return [*pieces.values()], told


def _place(fills: Fills, at: int) -> tuple[str, int]:
    """Where a fill lies in its file: neighbours are dealt together, so that a rank reads few gaps."""
    if (row := fills.rows[at]) != IRREGULAR:
        storages, number = files_of(fills.table), fills.table.storage_indices[row]
        file = storages.files[storages.file_indices.item(number)]
        return file.key, storages.starts.item(number)
    chunk = min(
        fills.lazies[at].chunks,
        key=lambda chunk: (chunk.storage.key, chunk.storage.start),
        default=None,
    )
    return (
        ("", 0) if chunk is None else (chunk.storage.key, chunk.storage.start + chunk.offset // 8)
    )


def _cuts(lazy: LazyTensor, target: torch.Tensor, most: int) -> tuple[list[int], int]:
    """Rows where a tensor is cut, the first and the last one included, so that no checksum is lost; none where it is not cut. With
    the checksum that is then compared for all parts together."""
    source, place = lazy.source, lazy.file_range()
    if not lazy.ndim or not isinstance(source, OpenSource):
        return [], NO_CRC
    step, rows, crc = max(lazy.shape[0] * most // lazy.nbytes, 1), [0], NO_CRC
    if place is not None and source.verify:
        crc = place[3]
    if place is not None and (crc == NO_CRC or torch_dtype(lazy.dtype) == target.dtype):
        rows = [*range(0, lazy.shape[0], step)]
    else:
        crc, spans = (
            NO_CRC,
            np.array([(chunk.box.start[0], chunk.box.stop[0]) for chunk in lazy.chunks], np.int64),
        )
        for edge in np.unique(spans[:, 0]).tolist():
            if edge - rows[-1] >= step and not ((spans[:, 0] < edge) & (edge < spans[:, 1])).any():
                rows.append(edge)
    return ([*rows, lazy.shape[0]], crc) if len(rows) > 1 else ([], NO_CRC)


def deal_pieces(
    offered: Sequence[Offers], how: Replicated, *, remote: bool
) -> list[ReadAssignments]:
    """On the first rank: who reads what is wanted by several ranks, for each rank. `remote`: not on one disk."""
    size = len(offered)
    counts = [len(one.on_cpu) for one in offered]
    ranks = np.repeat(np.arange(size), counts)
    keys = np.frombuffer(b"".join(one.keys for one in offered), "<u8").reshape(-1, 2)
    lengths = np.frombuffer(b"".join(one.nbytes for one in offered), "<i8")
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: the holders of a piece are in order
    heads = np.flatnonzero(
        np.concatenate(
            (np.ones(min(len(order), 1), np.bool_), (np.diff(keys[order], axis=0) != 0).any(1))
        )
    )
    # Pieces in the order of the first rank that has each, which is that of the file.
    pieces = np.empty(len(order), np.int64)
    pieces[order] = order[heads].argsort().argsort().repeat(np.diff(np.append(heads, len(order))))
    nbytes = np.zeros(len(heads), np.int64)
    nbytes[pieces] = lengths
    held = np.zeros((len(heads), size), np.bool_)
    held[pieces, ranks] = True
    shared = (held.sum(1) > 1) & (how != "read")
    if how == "auto":
        flags = np.frombuffer(b"".join(one.on_cpu for one in offered), np.bool_)
        shared[pieces[flags]] &= remote
        if int((nbytes * (held.sum(1) - 1))[shared].sum()) < WORTH_NBYTES:
            shared[:] = False
    loads = held[~shared].T @ nbytes[~shared] + [one.apart for one in offered]
    sets, classes = (
        np.unique(held[shared], axis=0, return_inverse=True)
        if shared.any()
        else (held[:0], held[:0])
    )
    (numbers,), classes = shared.nonzero(), classes.reshape(-1)
    holders, members = (
        [one.nonzero()[0] for one in sets],
        [np.flatnonzero(classes == c) for c in range(len(sets))],
    )
    dealt = deal_classes(
        [(h, nbytes[numbers[m]]) for h, m in zip(holders, members, strict=True)], loads
    )
    readers, class_of = np.full(len(heads), -1, np.int64), np.zeros(len(heads), np.int64)
    for c, (h, m, picks) in enumerate(zip(holders, members, dealt, strict=True)):
        readers[numbers[m]], class_of[numbers[m]] = h[picks], c
    answers = []
    for rank, mine in enumerate(np.split(pieces, np.cumsum(counts)[:-1])):
        order = mine.argsort()
        order = order[shared[mine[order]]]
        columns = (
            column.tolist() for column in (order, readers[mine[order]], class_of[mine[order]])
        )
        answers.append(
            ReadAssignments(
                bool(holders), {c: h.tolist() for c, h in enumerate(holders) if rank in h}, *columns
            )
        )
    return answers


class Replicas(Value, frozen=True, eq=False):
    """What a rank shares with others: what it reads for them, and what it gets."""

    fills: Fills
    offered: Sequence[SharedPiece]
    assignments: ReadAssignments
    rank: int

    def pieces(self) -> Iterator[tuple[SharedPiece, int, int]]:
        """In an order that all ranks have, each with its reader and its set of holders."""
        return zip(
            map(self.offered.__getitem__, self.assignments.offered),
            self.assignments.readers,
            self.assignments.classes,
            strict=True,
        )

    def own(self) -> list[SharedPiece]:
        return [piece for piece, reader, _ in self.pieces() if reader == self.rank]

    def mine(self) -> Fills:
        """What this rank reads: what it shares with nobody, and its share of the rest."""
        own, fills = self.own(), self.fills
        others = {piece.position for piece, *_ in self.pieces()} - {
            piece.position for piece in own if not piece.cut
        }
        kept = fills.only([at for at in range(len(fills)) if at not in others]) if others else fills
        parts = [(piece, slice(piece.start, piece.stop)) for piece in own if piece.cut]
        return kept.with_more(
            [
                Fill(fills.lazy(p.position)[rows], fills.targets[p.position].detach()[rows])
                for p, rows in parts
            ]
        )

    def checked(self) -> list[LazyTensor]:
        """What this rank is to compare with its checksum, where that is done before anything is read to its place."""
        mine = self.mine()
        cut = [
            self.fills.lazy(piece.position) for piece in self.own() if piece.cut and not piece.start
        ]
        return [mine.lazy(at) for at in range(len(mine))] + cut

    def bytes_of(self, piece: SharedPiece) -> torch.Tensor:
        target = self.fills.targets[piece.position].detach()
        return flat(target[piece.start : piece.stop] if piece.cut else target).view(torch.uint8)

    def sums(self) -> bytes:
        """The checksums of the parts that this rank has read, for all ranks."""
        found: list[tuple[bytes, int, int, int, int]] = []
        for piece in self.own():
            if piece.crc != NO_CRC:
                data = self.bytes_of(piece).cpu().numpy()
                found.append((piece.cut, piece.start, data.nbytes, crc32(data), piece.crc))
        return write_document(PART_SUMS, found)


def read_apart(
    ranks: Ranks, replicas: Replicas, read: Callable[[], object], *, failure_summary: str
) -> dict[bytes, int]:
    """A step of all ranks: each reads its share. What fails on one of them is raised on all. Gives the cut pieces that do not have
    their checksums, and those that they have."""
    local: bytes | BaseException
    try:
        read()
        local = replicas.sums()
    except Exception as error:
        local = error
    answer = ranks.agree(
        local,
        lambda messages: [write_document(SHARES, messages)] * ranks.size,
        failure_summary=failure_summary,
    )
    sums: dict[tuple[bytes, int], BlockCrcs] = {}
    for message in read_document(SHARES, answer):
        for cut, start, nbytes, found, recorded in read_document(PART_SUMS, message):
            sums.setdefault((cut, recorded), BlockCrcs()).add_crc(start, nbytes, found)
    return {
        cut: found for (cut, recorded), one in sums.items() if (found := one.crc32()) != recorded
    }


@contextmanager
def sharing(
    group: dist.ProcessGroup, mark: bytes, names: Sequence[str], *, doing: str, deadline: float
) -> Iterator[ShareBatch]:
    """How batches of tensors that all ranks want are read together. Raises on all ranks where one has opened another checkpoint
    (`mark`), or wants other names."""
    ranks = ranks_of(group, doing=doing, deadline=deadline)

    def check(messages: list[bytes]) -> list[bytes]:
        documents = [read_document(SHARES, message) for message in messages]
        check_same_checkpoint([document[0] for document in documents])
        others = [rank for rank, document in enumerate(documents) if document != documents[0]]
        if others:
            raise BadArgument(
                f"{format_ranks(others)} would stream other tensors than rank 0: skip= is to say the same on all ranks"
            )
        return [b""] * len(messages)

    def share(
        batch: dict[str, LazyTensor],
    ) -> tuple[Read, Callable[[Read], dict[str, torch.Tensor]]]:
        fresh = make_fresh(
            {name: Want(lazy, torch_dtype(lazy.dtype)) for name, lazy in batch.items()}
        )
        fills = NO_FILLS.with_more(fresh.fills)
        keys = [
            (str(at), (0,) * one.lazy.ndim, one.lazy.shape) for at, one in enumerate(fresh.fills)
        ]
        pieces, offers = offer(fills, keys, group, PART_NBYTES)
        # All ranks offer the same, so that each deals for itself.
        replicas = Replicas(
            fills,
            pieces,
            deal_pieces([offers] * ranks.size, "broadcast", remote=True)[ranks.rank],
            ranks.rank,
        )

        def read() -> dict[str, torch.Tensor]:
            fill(replicas.mine())
            return fresh.tensors

        def finish(read: Read) -> dict[str, torch.Tensor]:
            if batch:
                damaged = read_apart(ranks, replicas, read, failure_summary=ENDS)
                with joint_phase(ranks, ENDS):
                    hand_on(replicas, damaged, group, deadline=deadline)
            return fresh.tensors

        return read, finish

    try:
        ranks.agree(
            write_document(
                SHARES, [mark, *(name.encode("utf-8", "surrogatepass") for name in names)]
            ),
            check,
        )
        with shared_errors(ranks):
            yield share
    finally:
        ranks.close()


def hand_on(
    replicas: Replicas,
    damaged: dict[bytes, int],
    group: dist.ProcessGroup | None,
    *,
    deadline: float,
) -> None:
    """Send what this rank has read to those who want it, and get the rest. Every rank calls it, when all have read. Where a piece
    is `damaged` its holders raise, and nobody sends anything."""
    for piece, *_ in replicas.pieces():
        if piece.cut in damaged:
            lazy = replicas.fills.lazy(piece.position)
            raise build_damage_error(lazy.storages[0], lazy.name, damaged[piece.cut])
    if damaged:
        return
    timeout = timedelta(seconds=deadline)
    for ops, arrivals in rounds(replicas, group):
        for work in dist.batch_isend_irecv(ops):
            work.wait(timeout)
        for views, whole in arrivals:
            unpack(views, whole)
    got = {piece.position for piece, reader, _ in replicas.pieces() if reader != replicas.rank}
    torch.autograd.graph.increment_version(
        [replicas.fills.targets[at].detach() for at in sorted(got)]
    )


Arrival = tuple[list[torch.Tensor], torch.Tensor]
"""Where the bytes of a message go, and the message."""


def rounds(
    replicas: Replicas, group: dist.ProcessGroup | None
) -> Iterator[tuple[list[dist.P2POp], list[Arrival]]]:
    """What this rank sends and gets, and what is then to be copied to its place."""
    chosen = _chosen(group)
    for number, members in replicas.assignments.sets.items():
        found: dict[int, list[torch.Tensor]] = {}
        for piece, reader, its in replicas.pieces():
            if its == number:
                found.setdefault(reader, []).append(replicas.bytes_of(piece))
        most = max(ROUND_NBYTES // len(members), LEAST_NBYTES)
        messages = {reader: [*pack(views, most)] for reader, views in sorted(found.items())}
        for turn in range(max(map(len, messages.values()), default=0)):
            ops, arrivals = list[dist.P2POp](), list[Arrival]()
            for reader, own in messages.items():
                if turn < len(own):
                    views, sent = own[turn], reader == replicas.rank
                    whole = _message(views, _sent_from(views[0].device, chosen), sent=sent)
                    peers = [member for member in members if member != reader] if sent else [reader]
                    call = dist.isend if sent else dist.irecv
                    ops += [
                        dist.P2POp(call, whole, dist.get_global_rank(chosen, peer), chosen)
                        for peer in peers
                    ]
                    arrivals += [] if sent else [(views, whole)]
            yield ops, arrivals


def pack(views: Sequence[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Bytes as messages of at most `most`: long ones in several, short ones together, those of each kind of device apart."""
    for kind in dict.fromkeys(view.device.type for view in views):
        parts = [part for view in views if view.device.type == kind for part in view.split(most)]
        yield from batches(parts, most, torch.Tensor.numel)


def unpack(views: Sequence[torch.Tensor], message: torch.Tensor) -> None:
    for view, part in zip(views, message.split([view.numel() for view in views]), strict=True):
        if view.data_ptr() != part.data_ptr():
            view.copy_(part)


def _message(views: Sequence[torch.Tensor], device: torch.device, *, sent: bool) -> torch.Tensor:
    """The memory of a message: that of its one piece, or a copy."""
    if len(views) == 1 and views[0].device == device:
        return views[0]
    if sent:
        return torch.cat([view.to(device) for view in views])
    return torch.empty(sum(map(len, views)), dtype=torch.uint8, device=device)


def _sent_from(device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """Where messages about tensors of a device lie. Gloo sends from the memory of the CPU alone."""
    return torch.device("cpu") if group._get_backend(device).name() == "gloo" else device


def _chosen(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    return group if group is not None else dist.distributed_c10d._get_default_group()
