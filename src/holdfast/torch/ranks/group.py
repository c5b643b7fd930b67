"""The ranks that act together, and how they exchange messages: through the group's own store, never by a collective.

    rank 1 ──► key "…/3/1" ──┐
    rank 2 ──► key "…/3/2" ──┼──► rank 0 waits for all, decides, and sets "…/3/answer/1", "…/3/answer/2", for which they wait
    rank 0 ──────────────────┘

1. A step is a gather to the first rank and an answer to each. The messages are bytes that the caller made; nothing is pickled.
2. Every rank has a pulse: a thread of its own counts on in the store. A rank whose pulse has stopped for `deadline` seconds, or has
   not begun by then, is given up with a `RankLost` that names it. A rank that is merely slow is waited for.
3. The store is polled: its own `wait` writes to stderr whenever it times out.
4. Whoever reads a key removes it, so that a long training does not fill the store. At the end the first rank stays until the
   others have read their answers: it often hosts the store, and its process may end next.

One process without `torch.distributed` is a group of one, for which every step is a function call.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from holdfast.core.options import DEADLINE
from holdfast.core.runtime import at_fork, renewed, start
from holdfast.engine.threads import default_threads
from holdfast.errors import CannotHold, DurabilityUncertain, NoSuchPath, RankLost, RanksFailed, RanksFoundNothing, RanksRefused
from holdfast.ranks.merge import say_ranks

BEAT = 1.0
"""Seconds between two beats of a pulse, or two looks at one, at most; a tenth of the deadline where that is less."""

PAUSE = 0.1
"""Seconds between two questions to the store, at most. It begins with a fraction of a millisecond and grows with the time that was
waited, so that nobody waits for much longer than it takes, and a thousand ranks that wait do not keep the store busy."""

LINGER = 5.0
"""Seconds that the first rank stays for the others at the end, at most."""

SHOWN = 16
"""Causes that a message lists. All of them are in the error's `causes`."""

UNCHANGED = "nothing was published or changed"

_calls: dict[str, int] = {}
"""How many exchanges each group has had: every rank counts the same, since all of them make the same calls."""
_connections: dict[str, tuple[Store, Store]] = {}
"""By the name of a group: its store, and our own connection to it. Making one may take seconds where names are looked up slowly."""
_lock = renewed(threading.Lock())
_inherited: tuple[object, ...] = ()


def _in_child() -> None:
    """In a fork: the parent's connections are not its own, and it is no member of the parent's groups."""
    global _inherited
    _calls.clear()
    _connections.clear()
    if dist.is_available():
        _inherited = (*_inherited, *dist.distributed_c10d._world.pg_map)


at_fork(after_in_child=_in_child)


def ranks_of(group: dist.ProcessGroup | None = None, *, doing: str, deadline: float = DEADLINE) -> Ranks:
    """The ranks of a group, or of the default one; one rank without `torch.distributed`. `doing` must be the same on all."""
    if not dist.is_available() or not dist.is_initialized():
        return Ranks(0, 1, None, prefix="", doing=doing, deadline=deadline)
    chosen = group if group is not None else dist.distributed_c10d._get_default_group()
    if any(chosen is each for each in _inherited):
        if dist.get_world_size(chosen) == 1:
            return Ranks(0, 1, None, prefix="", doing=doing, deadline=deadline)
        raise ValueError("this process is a fork of a rank, and no member of its group; save and load in the rank itself")
    rank = dist.get_rank(chosen)
    if rank < 0:
        raise ValueError("this process is not a member of the group that it was asked to save or load with")
    store = dist.distributed_c10d._get_process_group_store(chosen)
    name, size = str(chosen.group_name), dist.get_world_size(chosen)
    with _lock:
        number = _calls[name] = _calls.get(name, 0) + 1
        own = _own_connection(name, store) if size > 1 else None
    return Ranks(rank, size, own, prefix=f"holdfast/{name}/{number}", doing=doing, deadline=deadline, host=_host_key(name))


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


Head = tuple[str, str, list[str] | None, str | None]
"""The head of a rank's message: what it does, what failed, the problems of a `CannotHold`, the path of a `NoSuchPath`."""
Message = tuple[Head, bytes]


def _read_message(raw: bytes) -> Message:
    stop = 8 + int.from_bytes(raw[:8], "little")
    doing, failed, refused, missed = json.loads(raw[8:stop])
    return (doing, failed, refused, missed), raw[stop:]


class Ranks:
    """One exchange between the ranks of a group: a save or a load. Closed at its end."""

    def __init__(
        self, rank: int, size: int, store: Store | None, *, prefix: str, doing: str, deadline: float, host: str = ""
    ) -> None:
        self.rank, self.size = rank, size
        self.deadline = deadline
        self._doing = doing
        self._store = store if size > 1 else None
        self._prefix = prefix
        self._host = host
        self._step = 0
        self._lost: set[int] = set()
        self._stop = threading.Event()
        self._process = os.getpid()
        self._beats = 0
        self._pulse: threading.Thread | None = None
        if self._store is not None:
            # Where no thread can start, this rank shows a sign of life whenever it speaks or waits, and none while it writes.
            self._pulse = start(partial(self._keep_beating, self._store), name="holdfast-pulse", daemon=True)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def threads(self) -> int:
        """How many threads this rank may use, beside the ranks on its machine that have come so far."""
        return default_threads(self._neighbours())

    def apart(self) -> bool:
        """Whether the ranks are on several machines. Known when all have come: after a step."""
        return self._neighbours() < self.size

    def _neighbours(self) -> int:
        if self._store is not None and self._host:
            with suppress(RuntimeError, OSError):
                return int(self._store.add(self._host, 0))
        return 1

    def agree(
        self, local: bytes | BaseException, decide: Callable[[list[bytes]], list[bytes]], *, otherwise: str = UNCHANGED
    ) -> bytes:
        """One step of everybody: what each rank has goes to the first one, whose decision, one a rank, goes to all.

        An exception on any rank, given as `local` or raised by `decide`, comes out of every rank as the same `RanksFailed`, which
        begins with what that means (`otherwise`). A `DurabilityUncertain` of `decide` stays one, on every rank: something was
        published.
        """
        missed = local.filename or "" if isinstance(local, NoSuchPath) else None
        head = self._doing, "" if isinstance(local, bytes) else _cause_of(local), _problems(local), missed
        content = local if isinstance(local, bytes) else b""
        cause = local if isinstance(local, BaseException) else None
        try:
            gathered = self._gather(head, content)
        except RankLost as error:
            if self.first:
                self._answer([_failure({rank: str(error) for rank in error.ranks})] * self.size)
            raise
        answers: list[bytes] | None = None
        if gathered is not None:
            causes, contents, problems, absent = self._judged([(head, content), *gathered])
            try:
                failed = [_failure(causes, problems, absent)] * self.size if causes else None
                answers = failed or [b"+" + answer for answer in decide(contents)]
            except DurabilityUncertain as error:
                cause, answers = error, [b"?" + _cause_of(error).encode("utf-8", "replace")] * self.size
            except Exception as error:
                cause, answers = error, [_failure({0: _cause_of(error)}, _problems(error))] * self.size
        answer = self._answer(answers)
        if answer[:1] == b"+":
            return answer[1:]
        if answer[:1] == b"?":
            raise DurabilityUncertain(answer[1:].decode()) from cause
        listed, problems, absent = json.loads(answer[1:])
        known = {int(rank): str(text) for rank, text in listed.items()}
        if absent is not None:
            raise RanksFoundNothing(f"{otherwise}: {_causes(known)}", absent, causes=known) from cause
        if problems is not None:
            raise RanksRefused(f"{otherwise}: {_causes(known)}", problems, causes=known) from cause
        raise RanksFailed(f"{otherwise}: {_causes(known)}", causes=known) from cause

    def close(self) -> None:
        """Stop the pulse; on the first rank, when the others have read their answers."""
        store, self._store = self._store, None
        if os.getpid() != self._process:
            return  # a fork: the connection is its parent's, which goes on
        if store is not None:
            with suppress(RankLost, RuntimeError, OSError):
                self._part(store)
        self._stop.set()
        if self._pulse is not None:
            self._pulse.join(timeout=2)

    def _judged(self, gathered: list[Message]) -> tuple[dict[int, str], list[bytes], list[str] | None, str | None]:
        """The causes of failed ranks, all contents, all problems if each is a `CannotHold`, the path if no rank found anything."""
        causes: dict[int, str] = {}
        problems: dict[str, None] | None = {}
        contents, absent = [], list[str]()
        for rank, ((doing, failed, refused, missed), content) in enumerate(gathered):
            contents.append(content)
            absent += [missed] if missed is not None and doing == self._doing else []
            if doing != self._doing:
                causes[rank] = f"it was asked to {doing}, and rank 0 to {self._doing}"
            elif failed:
                causes[rank] = failed
            if rank in causes:
                problems = None if problems is None or refused is None else problems | dict.fromkeys(refused)
        return causes, contents, None if problems is None else list(problems), absent[0] if len(absent) == self.size else None

    def _gather(self, head: Head, content: bytes) -> list[Message] | None:
        """On the first rank the messages of the others; None on the others. Raises `RankLost` for a rank that is gone."""
        self._step += 1
        keys = {rank: f"{self._prefix}/{self._step}/{rank}" for rank in range(1, self.size)}
        if not self.first:
            raw = json.dumps(head).encode("utf-8", "replace")
            self._put(keys[self.rank], len(raw).to_bytes(8, "little") + raw + content)
            return None
        found = self._collect(keys) if keys else {}
        return [_read_message(found[rank]) for rank in keys]

    def _answer(self, contents: list[bytes] | None) -> bytes:
        if self._store is None:
            assert contents is not None
            return contents[0]
        keys = [f"{self._prefix}/{self._step}/answer/{rank}" for rank in range(self.size)]
        if contents is None:
            return self._collect({0: keys[self.rank]})[0]
        for rank in range(1, self.size):
            self._put(keys[rank], contents[rank])
        return contents[0]

    def _put(self, key: str, content: bytes) -> None:
        assert self._store is not None
        try:
            self._beat_here(self._store)
            _set(self._store, key, content)
        except (RuntimeError, OSError) as error:
            raise self._broken([0], error) from error

    def _collect(self, keys: dict[int, str]) -> dict[int, bytes]:
        """The values of keys, each set by one rank, for as long as the missing ranks are alive."""
        store = self._store
        assert store is not None
        self._beat_here(store)
        waiting, found = dict(keys), dict[int, bytes]()
        seen: dict[int, tuple[bytes, float]] = {}
        began = looked = time.monotonic()
        while True:
            try:
                if store.check(list(waiting.values())):
                    found |= {rank: _take(store, key) for rank, key in waiting.items()}
                    return found
                now = time.monotonic()
                if now - looked >= self._interval:
                    looked = now
                    self._beat_here(store)
                    for rank in [r for r, key in waiting.items() if store.check([key])]:
                        found[rank] = _take(store, waiting.pop(rank))
                    self._look_for_life(store, waiting, seen)
            except (RuntimeError, OSError) as error:
                if isinstance(error, RankLost):
                    raise
                # The store itself is gone, and with it the process that hosts it: usually the first rank.
                raise self._broken(waiting, error) from error
            time.sleep(min(PAUSE, (now - began) / 32 + 0.0005))

    def _broken(self, waiting: Iterable[int], error: Exception) -> RankLost:
        ranks = tuple(waiting)
        return RankLost(f"the connection to the other ranks broke while waiting for rank {_listed(ranks)}: {error}", ranks=ranks)

    @property
    def _interval(self) -> float:
        return min(BEAT, self.deadline / 10)

    def _beat(self, store: Store) -> None:
        _set(store, f"{self._prefix}/pulse/{self.rank}", str(self._beats).encode())
        self._beats += 1

    def _keep_beating(self, store: Store) -> None:
        with suppress(Exception):
            # A store that is gone is found out by whoever waits for an answer; a pulse has nobody to tell.
            self._beat(store)
            while not self._stop.wait(self._interval):
                self._beat(store)

    def _beat_here(self, store: Store) -> None:
        if self._pulse is None:
            with suppress(RuntimeError, OSError):
                self._beat(store)

    def _look_for_life(self, store: Store, waiting: dict[int, str], seen: dict[int, tuple[bytes, float]]) -> None:
        now = time.monotonic()
        lost = []
        for rank in waiting:
            key = f"{self._prefix}/pulse/{rank}"
            # Not `get`, which waits where there is none: this puts an empty one there.
            beat = bytes(store.compare_set(key, "", ""))
            last = seen.get(rank)
            if last is None or last[0] != beat:
                seen[rank] = beat, now
            elif now - last[1] > self.deadline:
                lost.append(rank)
        if lost:
            self._lost.update(lost)
            raise RankLost(
                f"no sign of life from rank {_listed(lost)} for {self.deadline:g} seconds, while rank {self.rank} waited for "
                f"rank {_listed(waiting)}",
                ranks=tuple(lost),
            )

    def _part(self, store: Store) -> None:
        """The others say that they have read their answers, and the first rank waits for that, but not for long."""
        if not self.first:
            _set(store, f"{self._prefix}/end/{self.rank}", b"")
            return
        keys = [f"{self._prefix}/end/{rank}" for rank in range(1, self.size) if rank not in self._lost]
        began = now = time.monotonic()
        while keys and not store.check(keys) and now - began < min(LINGER, self.deadline):
            time.sleep(min(PAUSE, (now - began) / 32 + 0.0005))
            now = time.monotonic()
        for key in (*keys, *(f"{self._prefix}/pulse/{rank}" for rank in range(1, self.size))):
            store.delete_key(key)


@contextmanager
def together(ranks: Ranks, otherwise: str) -> Iterator[None]:
    """A step of all ranks: what fails on one of them is raised on all."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    ranks.agree(problem or b"", lambda _: [b""] * ranks.size, otherwise=otherwise)


def _set(store: Store, key: str, content: bytes) -> None:
    store.set(key, content)  # type: ignore[arg-type]  # annotated as text; it takes bytes and gives bytes back


def _take(store: Store, key: str) -> bytes:
    content = bytes(store.get(key))
    store.delete_key(key)
    return content


def _cause_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _problems(local: object) -> list[str] | None:
    return list(local.problems) if isinstance(local, CannotHold) else None


def _failure(causes: dict[int, str], problems: list[str] | None = None, absent: str | None = None) -> bytes:
    return b"-" + json.dumps([causes, problems, absent]).encode()


def _causes(known: dict[int, str]) -> str:
    alike: dict[str, list[int]] = {}
    for rank, text in known.items():
        alike.setdefault(text, []).append(rank)
    listed = [f"{say_ranks(ranks)}: {text}" for text, ranks in alike.items()]
    more = [f"and {len(listed) - SHOWN} other causes"] if len(listed) > SHOWN else []
    return "; ".join(listed[:SHOWN] + more)


def _listed(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    return ", ".join(map(str, listed[:16])) + (" …" if len(listed) > 16 else "")
