"""A sharded save: every rank writes a part, and all of it becomes a checkpoint in one step, or none of it does.

    every rank   describe: names, dtypes, shapes, boxes. No data moves
                 (in the background: copy what it has into buffers; the caller goes on)   ──► gather
    rank 0       plan: replicas dropped and spread, boxes checked to tile, files named;
                 open a hidden folder beside the target                              ──► each rank its part
    every rank   write its files there, checksums on the way, fsync                  ──► receipts
    rank 0       compare receipts with the plan, write the index, rename             ──► done, or what went wrong

An error on any rank at any step reaches every rank as the same `RanksFailed`. Before the rename nothing at the target has changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import msgspec
import torch

from holdfast.core.box import Box
from holdfast.core.protocols import State
from holdfast.core.tensor import LazyTensor
from holdfast.engine.commit.target import refusing
from holdfast.engine.commit.transactions import DirectoryTransaction, NewFile
from holdfast.engine.execute import run_all
from holdfast.engine.sparse_choice import choose, parse_wanted
from holdfast.engine.write import Progress, write_file
from holdfast.errors import CannotHold, NotCommitted
from holdfast.formats.native.chunks import stored_chunk
from holdfast.formats.native.schema import StoredSparse
from holdfast.formats.safetensors.write import is_flat
from holdfast.formats.tree_json import encode_tree
from holdfast.ranks.plan import RankPlan, plan_ranks
from holdfast.ranks.state import RankState
from holdfast.ranks.trees import one_tree
from holdfast.ranks.wire import decode_all, encode
from holdfast.rewrite.state import describe_state
from holdfast.stores.files import OsFiles, make_parents
from holdfast.torch.cuda.stage import Copies
from holdfast.torch.ranks.files import Contents, RankFile, Receipt, StoredBox, Written, index_files, is_part, rank_files
from holdfast.torch.ranks.flat_state import FlatState, common_problems, flatten
from holdfast.torch.ranks.group import Ranks
from holdfast.torch.ranks.per_rank import mark, rank_key
from holdfast.torch.ranks.pieces import little_in_common, made_of, pieces_of
from holdfast.torch.ranks.rehearse import check_folder, rehearse_contents, rehearse_value
from holdfast.torch.ranks.replica_sums import differing, replica_sums, say_different
from holdfast.torch.ranks.unkept import unkept_notes

__all__ = ["SavedShards", "ShardedSave"]

Path = tuple[str | int, ...]
Place = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A name, and the lowest and the highest corner of a box."""


@dataclass(frozen=True, slots=True)
class SavedShards:
    """What a sharded save did, as one rank saw it."""

    path: str
    format: str
    files: tuple[str, ...]
    """What this rank wrote."""
    nbytes: int
    """How much of it."""
    notes: tuple[str, ...] = ()
    """What a person should know."""


THREADS_BEHIND, BLOCK_BEHIND = 4, 16 << 20
"""Threads that write while the caller goes on, and what each writes at a time. For one file four are as fast as sixteen; and every
block takes the interpreter lock a few times, which the caller's own thread needs to feed its GPU."""

THREADS_A_FILE, FILE_NBYTES = 4, 256 << 20
"""Threads for which a rank writes one more file at once, and what a file should have at least. The kernel lets one thread at a time
write to a file: beside it others can sum, and no more."""


class Description(msgspec.Struct):
    """What a rank says beside its boxes."""

    tree: bytes | None
    """The state as typed JSON."""
    metadata: dict[str, str]
    paths: dict[str, list[str | int]]
    values: list[str]
    grads: list[str]
    """Names of the tensors that require gradients."""
    matched: list[str]
    """Those of the patterns in `per_rank` that found something."""


class Task(msgspec.Struct):
    """What a rank is told."""

    folder: str
    boxes: list[Place]
    values: list[str]


class Stored(msgspec.Struct):
    """A box in a receipt, on its way."""

    name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    first: int
    last: int
    crc: int
    sparse: StoredSparse | None = None


class Delivered(msgspec.Struct):
    """A file in a receipt."""

    key: str
    nbytes: int
    boxes: list[Stored]


class ShardedSave:
    """One save at work: `describe`, `plan`, `write`; and `stage`, before it is planned or after."""

    def __init__(
        self,
        path: str,
        *,
        ranks: Ranks,
        format: str = "native",
        overwrite: bool = False,
        durable: bool = True,
        threads: int | None = None,
        progress: Progress | None = None,
        max_host_memory: int | None = None,
        sparse: str = "never",
        values: Literal["agree", "first"] = "agree",
        per_rank: Sequence[str] = (),
        check_replicas: bool = True,
    ) -> None:
        self.path, self.format = path, format
        self._sparse, self._values = sparse, values
        self._per_rank, self._check_replicas = per_rank, check_replicas
        self._state: State | None = None
        self._flat = FlatState()
        self._local: bytes | BaseException = b""
        """What this rank has to say when it is planned."""
        self._planned = False
        self._archives: dict[str, bytes] = {}
        """DCP: those of all values, where the caller has gone on and may have changed them."""
        self.max_host_memory = max_host_memory
        self._copies: Copies | None = None
        """Those out of GPUs that are under way."""
        self.overwrite, self.durable = overwrite, durable
        self.threads, self.progress = threads, progress
        self._ranks = ranks
        self._transaction: DirectoryTransaction | None = None
        self._claimed = threading.Lock()
        self._boxes: list[list[Place]] = []
        """On the first rank: what each one is to write."""
        self._contents: Contents | None = None
        self._folder = ""
        self._failed: Exception | None = None
        self._notes: tuple[str, ...] = ()
        self.metadata: Mapping[str, str] = {}
        self.written: list[Written] = []
        """What this rank writes."""
        self.values: dict[str, bytes] = {}
        """DCP: the archives that it writes besides."""

    def describe(self, state: Callable[[], object], *, metadata: Mapping[str, str] | None) -> None:
        """Describe what `state` gives. A failure is told to the others when they plan."""
        try:
            raw, matched = mark(state(), self._per_rank, rank_key(self._ranks.rank, self._ranks.size))
            self._state = describe_state(raw, metadata=metadata)
            if self.format != "native":
                self._flat = flatten(self._state, raw)
            self._local = self._message(self._state, self._flat, matched)
        except Exception as error:
            self._local = error

    @property
    def stages_first(self) -> bool:
        """Whether to copy before it is planned: where ranks have little in common, of which each would copy all."""
        return self._ranks.size == 1 or self._state is None or little_in_common(self._state.tensors)

    def plan(self) -> None:
        """Plan together, and know what this rank writes; once."""
        if self._planned:
            return
        self._planned = True
        answer = self._ranks.agree(self._summed(), lambda messages: self._decide(messages, self._values))
        state = self._state
        assert state is not None
        try:
            task = msgspec.msgpack.decode(answer, type=Task)
            self._folder = task.folder
            self.metadata = state.metadata
            self.written = [_cut(state.tensors[name], name, Box(start, stop)) for name, start, stop in task.boxes]
            self.values = {name: self._archives.get(name) or self._flat.values[name].archive() for name in task.values}
            for name, archive in self.values.items():
                rehearse_value(name, archive)
        except Exception as error:
            self._failed = error

    def _summed(self) -> bytes | BaseException:
        """What this rank has to say, behind the checksums of what others may have as well: of the copies, where there are any."""
        if isinstance(self._local, BaseException):
            return self._local
        sums = b""
        try:
            if self._check_replicas and self._ranks.size > 1 and self._state is not None:
                if self._copies is not None:
                    self._copies.wait()
                sums = replica_sums(self._state.tensors, threads=self.threads or self._ranks.threads())
        except Exception as error:
            return error
        return len(sums).to_bytes(8, "little") + sums + self._local

    def stage(self, before: list[tuple[torch.Tensor, int]]) -> int:
        """Copy what this rank writes, or may come to write, so that the caller may change it. Bytes copied.

        `before` has the versions of its tensors. A failure is told to the others: when they plan, or when they come with their
        receipts.
        """
        from holdfast.torch.ranks.background import stage

        if self.failed or self._state is None:
            return 0
        pieces = {} if self._planned else pieces_of(self._state.tensors)
        tensors = [one.tensor for one in self.written] if self._planned else list(pieces.values())
        try:
            if not self._planned:
                # Before any copy is under way: a value may refuse to be pickled.
                self._archives = {name: value.archive() for name, value in self._flat.values.items()}
            threads = self.threads or self._ranks.threads()
            staged = stage(tensors, before, self.path, threads=threads, max_host_memory=self.max_host_memory)
            if self._planned:
                self.written = [replace(one, tensor=t) for one, t in zip(self.written, staged.tensors, strict=True)]
            else:
                made = made_of(self._state.tensors, dict(zip(pieces, staged.tensors, strict=True)))
                self._state = replace(self._state, tensors=made)
        except Exception as error:
            self._failed = error
            self._local = self._local if self._planned else error
            return 0
        self._copies = staged.copies
        return staged.nbytes

    @property
    def failed(self) -> bool:
        """Whether something went wrong here that the others have yet to hear of."""
        return self._failed is not None or isinstance(self._local, BaseException)

    def write(self) -> SavedShards:
        """Write this rank's part and, together, publish."""
        receipts: list[Delivered] = []
        try:
            local: bytes | BaseException = b""
            if self._failed is not None:
                raise self._failed
            if self._copies is not None:
                self._copies.wait()
            ranks, wanted = self._ranks, parse_wanted(self._sparse)
            threads = self.threads or ranks.threads()
            if self._copies is not None:
                threads = self.threads or min(threads, THREADS_BEHIND)
            pack = None if wanted is None else partial(choose, wanted=wanted, threads=threads)
            count = _file_count(self.written, threads)
            files = rank_files(
                self.format, ranks.rank, ranks.size, self.written, self.values, self.metadata, files=count, pack=pack
            )
            receipts = self._deliver(files, threads)
            local = msgspec.msgpack.encode(receipts)
        except Exception as error:
            local = error
        self._ranks.agree(local, self._publish)
        notes = (*self._notes, *(() if self._copies is None else self._copies.notes()))
        return SavedShards(self.path, self.format, tuple(r.key for r in receipts), sum(r.nbytes for r in receipts), notes)

    def claim(self) -> bool:
        """True once: for the thread that is to bring this save to its end."""
        return self._claimed.acquire(blocking=False)

    def close(self) -> None:
        """Give up what was not published."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.__exit__(None, None, None)
        self._ranks.close()

    # On every rank.

    def _message(self, state: State, flat: FlatState, matched: list[str]) -> bytes:
        tree: bytes | None = None
        digests = flat.digests() if self.format == "dcp" else {}
        self._notes = unkept_notes(state, self.format)
        problems = list(flat.problems)
        if self.format == "native" and not is_flat(state):
            encoded = encode_tree(state.tree, state.paths)
            problems += encoded.problems
            tree = msgspec.json.encode(encoded.value)
        if self.format == "safetensors":
            kinds = ((name, type(value.raw).__name__) for name, value in flat.values.items())
            problems += [f"{name}: a {kind}; safetensors files hold tensors alone" for name, kind in kinds]
        problems += common_problems(state, flat)
        if problems:
            raise CannotHold("this state cannot be saved so", problems)
        paths = {name: list(path) for name, path in flat.paths.items()}
        grads = [name for name, tensor in state.tensors.items() if tensor.traits.requires_grad]
        rows = [
            (name, tensor.dtype.name, tensor.shape, [chunk.box for chunk in tensor.chunks] or [_nothing(tensor)])
            for name, tensor in state.tensors.items()
        ]
        aliases = _aliases(state.tensors) if self.format != "safetensors" else []
        head = msgspec.msgpack.encode(Description(tree, dict(state.metadata), paths, list(flat.values), grads, matched))
        return len(head).to_bytes(8, "little") + head + encode(RankState.of(rows, values=digests, aliases=aliases))

    def _deliver(self, files: Sequence[RankFile], threads: int) -> list[Delivered]:
        """Write this rank's files, all at once."""
        if not files:
            return []
        system = OsFiles()
        folder = -1 if self._ranks.first else system.open_directory(self._folder)
        delivered: dict[str, Delivered] = {}
        each = max(threads // len(files), 1)

        def task(file: RankFile, sink: NewFile) -> Callable[[], None]:
            def run() -> None:
                block = BLOCK_BEHIND if self._copies is not None else None
                crcs = write_file(file.plan, sink, threads=each, progress=self.progress, block=block).crcs
                sink.finish(durable=self.durable)
                boxes = [_stored(box, file, crcs) for box in file.boxes]
                delivered[file.plan.key] = Delivered(file.plan.key, file.plan.nbytes, boxes)

            return run

        sinks: list[NewFile] = []
        try:
            sinks.extend(self._create(file.plan.key, system, folder) for file in files)
            run_all([task(file, sink) for file, sink in zip(files, sinks, strict=True)], threads)
        except BaseException:
            for sink in sinks:
                sink.give_up()
            raise
        finally:
            if folder >= 0:
                system.close(folder)
        return [delivered[file.plan.key] for file in files]

    def _create(self, key: str, system: OsFiles, folder: int) -> NewFile:
        if self._transaction is not None:
            return self._transaction.create(key)
        return NewFile(system, system.create(key, at=folder), path=f"{self.path}/{key}")

    # On the first rank.

    def _decide(self, messages: list[bytes], values: str) -> list[bytes]:
        heads, states, sums = [], [], []
        for message in messages:
            told, rest = _split(message)
            head, state = _split(rest)
            sums.append(told)
            heads.append(msgspec.msgpack.decode(head, type=Description))
            states.append(state)
        decoded = decode_all(states)
        if values == "first":
            seen: dict[str, bytes] = {}
            decoded = [replace(s, values={n: seen.setdefault(n, d) for n, d in s.values.items()}) for s in decoded]
        plan = plan_ranks(decoded)
        problems = list(plan.problems)
        tree, problem = one_tree([head.tree for head in heads], decoded, values)
        problems += problem
        disputed = _disputed(decoded)
        problems += [say_different(name, ranks) for name, ranks in differing(sums).items() if name not in disputed]
        useless = [pattern for pattern in self._per_rank if not any(pattern in head.matched for head in heads)]
        problems += [f"per_rank={pattern!r}: nothing in the state of any rank has such a name" for pattern in useless]
        if problems:
            raise CannotHold("the ranks' states do not make one checkpoint", problems)
        paths = {name: tuple(path) for head in heads for name, path in head.paths.items()}
        names = frozenset(name for head in heads for name in head.values)
        merged = plan.catalogue
        tensors = {n: (d, s) for n, d, s in zip(merged.names, merged.dtypes, merged.shapes, strict=True)}
        metadata = {key: text for head in reversed(heads) for key, text in head.metadata.items()}
        grads = frozenset(name for head in heads for name in head.grads)
        self._contents = Contents(tensors, dict(plan.aliases), tree, metadata, names, paths, grads)
        rehearse_contents(self.format, self._contents, self.path)
        with refusing("making the folders that lead to it", self.path):
            make_parents(self.path, durable=self.durable)
        transaction = DirectoryTransaction(self.path, durable=self.durable, overwrite=self.overwrite, replaceable=is_part)
        transaction.__enter__()
        self._transaction = transaction
        self._boxes = _boxes(plan, decoded)
        tasks = [
            Task(transaction.folder, boxes, list(writes.values)) for boxes, writes in zip(self._boxes, plan.writes, strict=True)
        ]
        return [msgspec.msgpack.encode(task) for task in tasks]

    def _publish(self, messages: list[bytes]) -> list[bytes]:
        folder, contents = self._transaction, self._contents
        assert folder is not None
        assert contents is not None
        receipts: list[Receipt] = []
        for rank, message in enumerate(messages):
            delivered = msgspec.msgpack.decode(message, type=list[Delivered])
            found = sorted((b.name, b.start, b.stop) for file in delivered for b in file.boxes if b.name not in contents.values)
            if found != sorted(self._boxes[rank]):
                raise NotCommitted(f"rank {rank} did not write what was planned for it", file=self.path)
            for file in delivered:
                if rank:
                    folder.join(file.key, file.nbytes)
                stored = [StoredBox(b.name, b.start, b.stop, b.first, b.last, None, sparse=b.sparse) for b in file.boxes]
                boxes = tuple(zip(stored, (b.crc for b in file.boxes), strict=True))
                receipts.append(Receipt(file.key, file.nbytes, boxes))
        folder.seal_data()
        for index in index_files(self.format, contents, receipts):
            write_file(index, folder.create(index.key))
        check_folder(self.format, contents, folder.folder)
        folder.commit()
        return [b""] * len(messages)


def _split(message: bytes) -> tuple[bytes, bytes]:
    """The part in front, whose length comes first, and the rest."""
    stop = 8 + int.from_bytes(message[:8], "little")
    return message[8:stop], message[stop:]


def _disputed(states: Sequence[RankState]) -> set[str]:
    """The names under which ranks have other dtypes or shapes, of which the plan speaks."""
    seen: dict[str, tuple[str, tuple[int, ...]]] = {}
    found = set()
    for own in dict.fromkeys(state.catalogue for state in states):
        for name, dtype, shape in zip(own.names, own.dtypes, own.shapes, strict=True):
            if seen.setdefault(name, (dtype, shape)) != (dtype, shape):
                found.add(name)
    return found


def _file_count(written: Sequence[Written], threads: int) -> int:
    """Files that a rank writes at once: one for every few threads, each with enough in it."""
    nbytes = sum(one.tensor.nbytes for one in written)
    return max(1, min(threads // THREADS_A_FILE, nbytes // FILE_NBYTES))


def _stored(box: StoredBox, file: RankFile, crcs: Mapping[str, int]) -> Stored:
    """A box that was written; one that is packed with the checksum of its dense elements."""
    if box.parts is None:
        return Stored(box.name, box.start, box.stop, box.first, box.last, 0 if box.label is None else crcs[box.label])
    chunk = stored_chunk(box.name, lambda entry: (0, file.places[entry]), crcs.__getitem__, parts=box.parts)
    return Stored(box.name, box.start, box.stop, box.first, box.last, box.parts.crc32, chunk.sparse)


def _nothing(tensor: LazyTensor) -> Box:
    """The box of a tensor of which this rank has no part."""
    return Box((0,) * tensor.ndim, (0,) * tensor.ndim)


def _cut(tensor: LazyTensor, name: str, box: Box) -> Written:
    if box.shape == tensor.shape:
        return Written(name, box, tensor, tensor.shape)
    return Written(name, box, tensor[box.slices], tensor.shape)


def _boxes(plan: RankPlan, states: Sequence[RankState]) -> list[list[Place]]:
    """What each rank writes. Tensors without elements, which the plan gives to nobody, go to the first rank that has them."""
    found = [[(name, box.start, box.stop) for name, box in plan.boxes(rank)] for rank in range(len(states))]
    aliases = {name for name, _ in plan.aliases}
    for name, shape in zip(plan.catalogue.names, plan.catalogue.shapes, strict=True):
        if 0 in shape and name not in aliases:
            rank = next(rank for rank, state in enumerate(states) if name in state.catalogue.positions)
            found[rank].append((name, (0,) * len(shape), shape))
    return found


def _aliases(tensors: Mapping[str, LazyTensor]) -> list[tuple[str, str]]:
    """Names of one and the same memory, each with the first of them."""
    first: dict[object, str] = {}
    found = []
    for name, tensor in tensors.items():
        if not tensor.chunks or not tensor.size:
            continue
        base = first.setdefault((tensor.dtype.name, tensor.shape, tensor.chunks, tensor.traits.conj, tensor.traits.neg), name)
        if base != name:
            found.append((name, base))
    return found
