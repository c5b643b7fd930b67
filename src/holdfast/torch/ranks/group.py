"""The ranks of `torch.distributed` as a `Group` (core/group.py): messages go through the group's own store, never by a collective.

    rank 1 ──► key "…/3/1" ──┐
    rank 2 ──► key "…/3/2" ──┼──► rank 0 waits for all, decides, and sets "…/3/answer/1", "…/3/answer/2", for which they wait
    rank 0 ──────────────────┘

1. One thread of each rank speaks to the store: it does what the rank asks of it, and in between it counts on, which is the pulse
   of the rank. A rank whose pulse has stopped for `deadline` seconds, or has not begun by then, is given up with a `RankLost` that
   names it. A rank that is merely slow is waited for.
2. A store that does not answer for so long is as good as gone, and so is its host, usually the first rank. The thread that waits
   for it is left behind: nothing else ends such a call.
3. The store is polled: its own `wait` writes to stderr whenever it times out.
4. Whoever reads a key removes it, so that a long training does not fill the store. At the end the first rank stays until the
   others have read their answers: it often hosts the store, and its process may end next.
5. How much is done is one number in the store, to which every rank adds (`joint_progress`).

One process without `torch.distributed` is a group of one, for which every step is a function call.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Generic, TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from holdfast.core.group import ALONE, Ranks, SeveralRanks
from holdfast.core.options import DEADLINE, Progress, validate_arguments
from holdfast.core.runtime import at_fork, make_fork_safe, start_thread
from holdfast.core.value import Value
from holdfast.errors import BadArgument, RankLost

T = TypeVar("T")

BEAT = 1.0
"""Seconds between two beats of a pulse, or two looks at one, at most; a tenth of the deadline where that is less."""

PAUSE = 0.1
"""Seconds between two questions to the store, at most. It begins with a fraction of a millisecond and grows with the time that was
waited, so that nobody waits for much longer than it takes, and a thousand ranks that wait do not keep the store busy."""

COUNT, COUNT_MORE = 0.1, 0.002
"""Seconds between two times that a rank says how much it has done, and how many more for each rank: the store is one."""

SHARED_NBYTES = 4096
"""Answers that are longer, and the same for all ranks, are put into the store once."""

LINGER = 5.0
"""Seconds that the first rank stays for the others at the end, at most."""

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What `torchrun` sets for each process that it starts, and what a script for Slurm sets."""

_calls: dict[str, int] = {}
"""How many exchanges each group has had: every rank counts the same, since all of them make the same calls."""
_connections: dict[str, tuple[Store, Store]] = {}
"""By the name of a group: its store, and our own connection to it. Making one may take seconds where names are looked up slowly."""
_lock = make_fork_safe(threading.Lock())
_inherited: tuple[object, ...] = ()


def _in_child() -> None:
    """In a fork: the parent's connections are not its own, and it is no member of the parent's groups."""
    global _inherited
    _calls.clear()
    _connections.clear()
    if dist.is_available():
        _inherited = (*_inherited, *dist.distributed_c10d._world.pg_map)


at_fork(after_in_child=_in_child)


class TorchGroup(Value, frozen=True, eq=False):
    """The ranks of a process group, or the processes that `torchrun` started."""

    rank: int
    size: int
    name: str = ""
    store: Store | None = None
    deadline: float = DEADLINE
    """A rank without a sign of life for so many seconds is lost."""

    def begin(self, doing: str) -> Ranks:
        if self.store is None or self.size == 1:
            return ALONE
        with _lock:
            number = _calls[self.name] = _calls.get(self.name, 0) + 1
            connection = _own_connection(self.name, self.store)
        prefix = f"holdfast/{self.name}/{number}"
        return StoreRanks(self, connection, prefix=prefix, doing=doing)


@validate_arguments
def group(
    process_group: dist.ProcessGroup | None = None, *, deadline: float = DEADLINE
) -> TorchGroup:
    """The ranks of a process group, for the verbs that take `group=`: `convert(src, dst, group=holdfast.torch.group())`.

    By default those of the default process group; where there is none, the processes that `torchrun` started, and else this
    process alone. A rank that gives no sign of life for `deadline` seconds is lost, and with it what the ranks were doing.
    """
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return _launched(deadline)
    return group_of(process_group, deadline)


def group_of(
    chosen: dist.ProcessGroup | TorchGroup | None, deadline: float = DEADLINE
) -> TorchGroup:
    """The ranks of a group, or of the default one; this process alone without `torch.distributed`."""
    if isinstance(chosen, TorchGroup):
        return chosen
    if not dist.is_available() or not dist.is_initialized():
        return TorchGroup(0, 1, deadline=deadline)
    chosen = chosen if chosen is not None else dist.distributed_c10d._get_default_group()
    size = dist.get_world_size(chosen)
    if any(chosen is each for each in _inherited):
        if size == 1:
            return TorchGroup(0, 1, deadline=deadline)
        raise ValueError(
            "this process is a fork of a rank, and no member of its group; save and load in the rank itself"
        )
    rank = dist.get_rank(chosen)
    if rank < 0:
        raise ValueError(
            "this process is not a member of the group that it was asked to save or load with"
        )
    store = dist.distributed_c10d._get_process_group_store(chosen)
    return TorchGroup(rank, size, str(chosen.group_name), store, deadline)


def _launched(deadline: float) -> TorchGroup:
    """The processes that were started together, by their environment. No process group is made: messages need a store alone."""
    given = [os.environ.get(name, "") for name in LAUNCHED]
    if not all(given) or given[1] == "1":
        return TorchGroup(0, 1, deadline=deadline)
    try:
        rank, size = int(given[0]), int(given[1])
        store, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=deadline)))
    except (ValueError, RuntimeError, OSError) as error:
        said = " ".join(f"{name}={value}" for name, value in zip(LAUNCHED, given, strict=True))
        advice = "unset RANK and WORLD_SIZE to work in this process alone"
        raise BadArgument(
            f"the ranks that the environment tells of ({said}) cannot be joined: {error}; {advice}"
        ) from None
    return TorchGroup(rank, size, "launched", store, deadline)


def ranks_of(
    chosen: dist.ProcessGroup | TorchGroup | None = None, *, doing: str, deadline: float = DEADLINE
) -> Ranks:
    """What the ranks of a group, or of the default one, do together; one rank without `torch.distributed`."""
    return group_of(chosen, deadline).begin(doing)


def _own_connection(name: str, store: Store) -> Store:
    """A connection of our own where the store has connections: a wait on a shared one would hold up our pulse."""
    known = _connections.get(name)
    if known is not None and known[0] is store:
        return known[1]
    try:
        made = cast(Store, store.clone())  # type: ignore[attr-defined]  # not in torch's own annotations
    except (RuntimeError, NotImplementedError, AttributeError):
        made = store
    with suppress(RuntimeError, OSError):
        made.add(_host_key(name), 1)
    _connections[name] = store, made
    return made


def _host_key(name: str) -> str:
    return f"holdfast/{name}/host/{socket.gethostname()}"


class Question(Generic[T]):
    """Something that is asked of the store, and what came of it."""

    def __init__(self, ask: Callable[[Store], T]) -> None:
        self._ask = ask
        self.done = threading.Event()
        self._found: list[T | Exception] = []

    def put(self, store: Store) -> None:
        try:
            self._found.append(self._ask(store))
        except Exception as error:
            self._found.append(error)
        self.done.set()

    def answer(self) -> T:
        (found,) = self._found
        if isinstance(found, Exception):
            raise found
        return found


class ProgressCount:
    """What this rank has done since it said so, and on the first rank what all have done."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._lock = progress, threading.Lock()
        self._own = self._told = 0
        self._failed: Exception | None = None

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._own += nbytes
        if self._failed is not None:
            raise self._failed

    def say(self, store: Store, key: str) -> None:
        with self._lock:
            own, self._own = self._own, 0
        total = int(store.add(key, own))
        if self._progress is not None and total > self._told:
            try:
                self._progress(total - self._told)
            except Exception as error:
                self._failed = error  # the caller's, who hears of it where it adds
            self._told = total


class StoreRanks(SeveralRanks):
    """Something that ranks do together, by messages through a store. Closed at its end."""

    def __init__(self, group: TorchGroup, store: Store, *, prefix: str, doing: str) -> None:
        super().__init__(group.rank, group.size, doing)
        self.deadline = group.deadline
        self._store: Store | None = store
        self._prefix = prefix
        self._host = _host_key(group.name)
        self._step = 0
        self._common: list[str] = []
        """Keys of long answers that all ranks take."""
        self._lost: set[int] = set()
        self._process = os.getpid()
        self._beats = 0
        self._questions: queue.SimpleQueue[Question[object] | None] = queue.SimpleQueue()
        self._count: ProgressCount | None = None
        # Where no thread can start, this rank shows a sign of life whenever it speaks or waits, and none while it writes.
        self._voice = start_thread(partial(self._speak, store), name="holdfast-pulse", daemon=True)

    def count_local_ranks(self) -> int:
        if self._store is not None:
            with suppress(RuntimeError, OSError):
                return int(self._ask(lambda store: store.add(self._host, 0)))
        return 1

    @contextmanager
    def joint_progress(self, progress: Progress | None) -> Iterator[Progress | None]:
        count = self._count = ProgressCount(progress if self.is_first else None)
        try:
            yield count.add
        finally:
            self._count = None
            with suppress(RuntimeError, OSError):
                self._ask(partial(count.say, key=self._key("done")))

    def close(self) -> None:
        """Stop the pulse; on the first rank, when the others have read their answers."""
        if os.getpid() != self._process:
            self._store = None
            return  # a fork: the connection is its parent's, which goes on
        if self._store is not None:
            with suppress(RankLost, RuntimeError, OSError):
                self._part()
        self._store = None
        self._questions.put(None)
        if self._voice is not None:
            self._voice.join(timeout=2)

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))

    # The thread that speaks.

    def _speak(self, store: Store) -> None:
        with suppress(Exception):
            # A store that is gone is found out by whoever waits for an answer; a pulse has nobody to tell.
            beat = counted = float("-inf")
            each = COUNT + COUNT_MORE * self.size
            while True:
                now, count = time.monotonic(), self._count
                if now - beat >= self._interval:
                    beat = now
                    self._beat(store)
                if count is not None and now - counted >= each:
                    counted = now
                    count.say(store, self._key("done"))
                wait = beat + self._interval - time.monotonic()
                try:
                    question = self._questions.get(
                        timeout=max(min(wait, each) if count is not None else wait, 0.001)
                    )
                except queue.Empty:
                    continue
                if question is None:
                    return
                question.put(store)

    def _ask(self, ask: Callable[[Store], T]) -> T:
        """What the store answers. Raises `RankLost` where it does not for as long as a rank may be silent."""
        store, voice, question = self._store, self._voice, Question(ask)
        if store is None:
            raise RankLost("the connection to the other ranks is closed", ranks=())
        if voice is None:
            with suppress(RuntimeError, OSError):
                self._beat(store)
            question.put(store)
            return question.answer()
        self._questions.put(cast("Question[object]", question))
        end = time.monotonic() + self.deadline
        while not question.done.wait(min(self.deadline, BEAT)):
            if not voice.is_alive() and not question.done.is_set():
                question.put(
                    store
                )  # the thread has ended because the store is gone, and this will say so
            elif time.monotonic() > end:
                self._store = self._voice = None
                said = f"the store of the ranks did not answer for {self.deadline:g} seconds"
                raise RankLost(
                    f"{said}: its host, usually rank 0, is stopped or cannot be reached", ranks=(0,)
                )
        return question.answer()

    # Messages.

    def _gather(self, message: bytes) -> list[bytes] | None:
        self._step += 1
        if not self.is_first:
            self._put(self._key(self._step, self.rank), message)
            return None
        keys = {rank: self._key(self._step, rank) for rank in range(1, self.size)}
        found = self._collect(keys)
        return [found[rank] for rank in keys]

    def _answer(self, answers: list[bytes] | None) -> bytes:
        common = self._key(self._step, "answer")
        if answers is None:
            answer = self._collect({0: self._key(self._step, "answer", self.rank)})[0]
            return answer or self._ask(lambda store: bytes(store.get(common)))
        shared = len(answers[1]) > SHARED_NBYTES and all(
            answer is answers[1] for answer in answers[1:]
        )
        if shared:
            self._put(common, answers[1])
            self._common.append(common)
        for rank in range(1, self.size):
            self._put(self._key(self._step, "answer", rank), b"" if shared else answers[rank])
        return answers[0]

    def _put(self, key: str, content: bytes) -> None:
        try:
            self._ask(lambda store: _set(store, key, content))
        except (RuntimeError, OSError) as error:
            raise self._broken([0], error) from error

    def _collect(self, keys: dict[int, str]) -> dict[int, bytes]:
        """The values of keys, each set by one rank, for as long as the missing ranks are alive."""
        waiting, found = dict(keys), dict[int, bytes]()
        seen: dict[int, tuple[bytes, float]] = {}
        began = looked = time.monotonic()
        while True:
            try:
                if self._ask(lambda store: store.check(list(waiting.values()))):
                    return found | {
                        rank: self._ask(partial(_take, key=key)) for rank, key in waiting.items()
                    }
                now = time.monotonic()
                if now - looked >= self._interval:
                    looked = now
                    self._ask(partial(self._take_some, waiting, found))
                    self._look_for_life(waiting, seen)
            except (RuntimeError, OSError) as error:
                if isinstance(error, RankLost):
                    raise
                # The store itself is gone, and with it the process that hosts it: usually the first rank.
                raise self._broken(waiting, error) from error
            time.sleep(min(PAUSE, (now - began) / 32 + 0.0005))

    def _take_some(self, waiting: dict[int, str], found: dict[int, bytes], store: Store) -> None:
        for rank in [r for r, key in waiting.items() if store.check([key])]:
            found[rank] = _take(store, waiting.pop(rank))

    def _broken(self, waiting: Iterable[int], error: Exception) -> RankLost:
        ranks = tuple(waiting)
        return RankLost(
            f"the connection to the other ranks broke while waiting for rank {_listed(ranks)}: {error}",
            ranks=ranks,
        )

    @property
    def _interval(self) -> float:
        return min(BEAT, self.deadline / 10)

    def _beat(self, store: Store) -> None:
        _set(store, self._key("pulse", self.rank), str(self._beats).encode())
        self._beats += 1

    def _look_for_life(self, waiting: dict[int, str], seen: dict[int, tuple[bytes, float]]) -> None:
        # Not `get`, which waits where there is none: this puts an empty one there.
        pulse = {rank: self._key("pulse", rank) for rank in waiting}
        beats = self._ask(
            lambda store: {
                rank: bytes(store.compare_set(key, "", "")) for rank, key in pulse.items()
            }
        )
        now = time.monotonic()
        for rank, beat in beats.items():
            if rank not in seen or seen[rank][0] != beat:
                seen[rank] = beat, now
        lost = [rank for rank in waiting if now - seen[rank][1] > self.deadline]
        if lost:
            self._lost.update(lost)
            raise RankLost(
                f"no sign of life from rank {_listed(lost)} for {self.deadline:g} seconds, while rank {self.rank} waited for "
                f"rank {_listed(waiting)}",
                ranks=tuple(lost),
            )

    def _part(self) -> None:
        """The others say that they have read their answers, and the first rank waits for that, but not for long."""
        if not self.is_first:
            self._ask(lambda store: _set(store, self._key("end", self.rank), b""))
            return
        keys = [self._key("end", rank) for rank in range(1, self.size) if rank not in self._lost]
        began = now = time.monotonic()
        while (
            keys
            and not self._ask(lambda store: store.check(keys))
            and now - began < min(LINGER, self.deadline)
        ):
            time.sleep(min(PAUSE, (now - began) / 32 + 0.0005))
            now = time.monotonic()
        gone = (
            *keys,
            *self._common,
            *(self._key("pulse", rank) for rank in range(1, self.size)),
            self._key("done"),
        )
        self._ask(lambda store: [store.delete_key(key) for key in gone])


def _set(store: Store, key: str, content: bytes) -> None:
    store.set(key, content)  # type: ignore[arg-type]  # annotated as text; it takes bytes and gives bytes back


def _take(store: Store, key: str) -> bytes:
    content = bytes(store.get(key))
    store.delete_key(key)
    return content


def _listed(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    return ", ".join(map(str, listed[:16])) + (" …" if len(listed) > 16 else "")
