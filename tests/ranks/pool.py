"""One pool of gloo processes for a whole test session, on whose first N ranks a test runs a job.

    pytest ──pipe──► worker 0 ─┐
           ──pipe──► worker 1 ─┼─ one default process group of all workers (TCPStore on the loopback), and below it one group
           …                   │  for the first N of them and for every line of every mesh that the tests use
           ──pipe──► worker 7 ─┘

1. The workers are forked from one process that has imported torch (multiprocessing's fork server), when the first job is asked for.
   Importing torch eight times would take longer than all jobs together.
2. All groups are made when the pool starts, by every worker in the same order. `new_group(use_local_synchronization=True)` would
   make them when they are needed, but torch 2.13 names such a group by how many groups its process has made so far, and that
   differs between workers that have been in different jobs: they would wait for each other under two names.
3. A job is a function at the top of a module. It is called with a `World` and its arguments on every rank; what it returns or
   raises comes back as a list, one for each rank. A job that takes longer than its deadline ends the pool, and the next job starts
   another.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.processes import fork_server

__all__ = ["SHARED", "Failure", "Pool", "World", "failures", "good"]

WORKERS = 8
WORLDS = (1, 2, 3, 4, 8)
MESHES = ((2, 2), (2, 4), (4, 2), (2, 2, 2))
"""The meshes of more than one dimension that jobs may ask for."""

DEADLINE = 60.0
"""Seconds for one job. The longest takes two on a quiet machine."""

START = 120.0
"""Seconds until the pool answers for the first time: the imports, with everything else that goes on."""


@dataclass(frozen=True)
class Failure:
    """What a job raised on one rank."""

    kinds: tuple[str, ...]
    """The names of its class and of all above it."""
    text: str
    facts: dict[str, object]
    """Its attributes that can travel."""
    trace: str = field(repr=False)

    def __str__(self) -> str:
        return f"{self.kinds[0]}: {self.text}"


class World:
    """What a job sees: its rank, how many there are, their group, and meshes of them."""

    def __init__(
        self, rank: int, size: int, groups: dict[tuple[int, ...], dist.ProcessGroup]
    ) -> None:
        self.rank, self.size = rank, size
        self._groups = groups
        self.group = groups[tuple(range(size))]

    def mesh(self, *shape: int, names: tuple[str, ...] = ()) -> DeviceMesh:
        """A mesh of all ranks of the job; of one dimension where no shape is given."""
        shape = shape or (self.size,)
        assert math.prod(shape) == self.size
        names = names or tuple("xyz"[: len(shape)])
        ranks = torch.arange(self.size).reshape(shape)
        if len(shape) == 1:
            return DeviceMesh.from_group(self.group, "cpu", mesh_dim_names=names)
        at = (ranks == self.rank).nonzero()[0].tolist()
        lines = [
            tuple(ranks[tuple(slice(None) if d == e else at[e] for e in range(len(at)))].tolist())
            for d in range(len(at))
        ]
        return DeviceMesh.from_group(
            [self._groups[line] for line in lines], "cpu", mesh=ranks, mesh_dim_names=names
        )

    def line(self, *ranks: int) -> dist.ProcessGroup:
        """The group of some of the ranks: those of a line of one of the meshes."""
        return self._groups[ranks]

    def barrier(self) -> None:
        """Come back when all ranks of the job are here."""
        dist.barrier(self.group)


Job = Callable[..., object]


class Pool:
    """The workers, which start with the first job."""

    def __init__(self) -> None:
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def run(self, size: int, job: Job, *args: object, deadline: float = DEADLINE) -> list[object]:
        """What the job returned on each of the first `size` ranks, a `Failure` where it raised; after the deadline, an error."""
        if not self._workers:
            self._start()
        for _, pipe in self._workers[:size]:
            pipe.send((size, job, args))
        return self._collect(size, deadline)

    def close(self) -> None:
        """End the workers, at once."""
        workers, self._workers = self._workers, []
        for process, pipe in workers:
            pipe.close()
            process.kill()
        for process, _ in workers:
            process.join(10)

    def _start(self) -> None:
        context = fork_server()
        for rank in range(WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work,
                args=(rank, theirs, list(sys.path)),
                daemon=True,
                name=f"rank-{rank}",
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        first = self._workers[0][1]
        if not first.poll(START):
            self.close()
            raise TimeoutError(f"no worker after {START:g} seconds")
        port = first.recv()
        for _, pipe in self._workers[1:]:
            pipe.send(port)
        self._collect(WORKERS, START)

    def _collect(self, size: int, deadline: float) -> list[object]:
        end = time.monotonic() + deadline
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:size])}
        found: dict[int, object] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            for pipe in ready:
                try:
                    found[waiting[pipe]] = pipe.recv()
                except (EOFError, OSError):
                    rank = waiting[pipe]
                    self.close()
                    raise AssertionError(
                        f"the process of rank {rank} has ended; the pool is closed"
                    ) from None
                del waiting[pipe]
            if not ready:
                missing = sorted(waiting.values())
                self.close()
                said = f"no answer from ranks {missing} within {deadline:g} seconds; the others said {found}"
                raise AssertionError(f"{said}; the pool is closed")
        return [found[rank] for rank in range(size)]


SHARED = Pool()
"""The pool of this test process, for tests in whichever folder. Whoever is last closes it; a job after that starts another."""


def good(answers: list[object]) -> list[object]:
    """What all ranks returned; an assertion with every failure where one raised."""
    wrong = [
        f"rank {rank}: {answer}\n{answer.trace}"
        for rank, answer in enumerate(answers)
        if isinstance(answer, Failure)
    ]
    assert not wrong, "\n".join(wrong)
    return answers


def failures(answers: list[object]) -> list[Failure]:
    """What all ranks raised; an assertion where one did not."""
    for rank, answer in enumerate(answers):
        assert isinstance(answer, Failure), f"rank {rank} returned {answer!r}, the others {answers}"
    return answers  # type: ignore[return-value]


def _work(rank: int, pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    timeout = datetime.timedelta(seconds=START)
    if rank == 0:
        store = dist.TCPStore(
            "127.0.0.1", 0, WORKERS, is_master=True, timeout=timeout, wait_for_workers=False
        )
        pipe.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), WORKERS, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS, timeout=timeout)
    groups = {ranks: dist.new_group(list(ranks)) for ranks in _lines()}
    mine = {ranks: group for ranks, group in groups.items() if rank in ranks}
    pipe.send("ready")
    while True:
        try:
            size, job, args = pipe.recv()
        except EOFError:
            os._exit(0)
        answer: object
        try:
            answer = job(World(rank, size, mine), *args)
        except BaseException as error:
            answer = _failure(error)
        try:
            pipe.send(answer)
        except Exception as error:
            pipe.send(_failure(error))


def _lines() -> list[tuple[int, ...]]:
    """The ranks of every group: the first N, and every line of the meshes."""
    found = {tuple(range(size)): None for size in WORLDS}
    for shape in MESHES:
        ranks = torch.arange(math.prod(shape)).reshape(shape)
        for d in range(len(shape)):
            for line in ranks.movedim(d, -1).reshape(-1, shape[d]).tolist():
                found[tuple(line)] = None
    return list(found)


def _failure(error: BaseException) -> Failure:
    facts = {}
    for name, value in vars(error).items():
        with contextlib.suppress(Exception):
            if isinstance(value, str | int | float | tuple | list | dict | None):
                facts[name] = value
    cause = error.__cause__
    facts["cause"] = None if cause is None else type(cause).__name__
    kinds = tuple(kind.__name__ for kind in type(error).__mro__)
    return Failure(kinds, str(error), facts, "".join(traceback.format_exception(error))[-4000:])
