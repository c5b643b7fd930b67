"""Save with three ranks, kill one of them at a random moment, and look at what is left. A program: `python -m tests.ranks.kills`.

1. This process imports torch once and never starts a thread; every rank is a fork of it, with a process group of its own.
2. One rank of each round has a number. It counts its calls of the file system and of the store, and at that number it sends itself
   SIGKILL. The number is drawn from all calls that the rank makes in a save that succeeds.
3. The store is a file, or a server in rank 0 (which dies with it), or a server in a fourth process (as with torchrun), in turn.
4. When all ranks have ended, a fork opens what is at the target and reads it. It must be the checkpoint of one round as a whole.

With `run` as the last argument the folder is that of a `holdfast.torch.Run`, and every round saves one more step of it: the kills
fall on its lock, its retention and its deletions as well. What is read is the newest whole step.

Rounds mostly wait for the deadline, so several go on at once, each in a folder of its own. The outcome is a JSON document with a
row for each round, which `test_kills.py` judges.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.distributed._shard.sharded_tensor import api as _api  # noqa: F401  (imported before the forks, like all that they use)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import holdfast
from holdfast.extras.runs.ranks import Run
from holdfast.stores.files import Files, is_temporary
from holdfast.torch.ranks import group
from holdfast.torch.ranks.save_sharded import save_sharded
from holdfast.torch.tensors import to_lazy as _state_module  # noqa: F401

__all__ = ["DEADLINE", "main"]

SIZE = 3
DEADLINE = 1.5
"""What the ranks are given. A real one would be a minute; the promise is the same."""
PATIENCE = 40.0
"""Seconds until a round is ended from outside, which fails the test."""
STORES = ("file", "first", "agent")
FORMATS = ("native", "dcp", "safetensors")
LATER = 40
"""Calls that a turn of a run has more than the first one, which has nothing to delete."""
CALLS = (
    "create", "allocate", "pwrite", "sync", "chmod", "rename", "rename_new", "exchange", "mkdir", "unlink", "rmdir", "lock",
    "open_directory",
)  # fmt: skip
ROWS = 7


class Rows:
    """A rank's rows of a table, in torch's protocol. DTensor would import dynamo, and every fork would be three times as large."""

    def __init__(self, number: int, rank: int) -> None:
        self.shape, self.dtype = torch.Size((ROWS, 300)), torch.float32
        self._parts = {row: torch.full((1, 300), float(number)) for row in range(rank, ROWS, SIZE)}

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size((row, 0)), torch.Size((1, 300))) for row in self._parts
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._parts[index.offset[0]]


def _state(number: int, rank: int) -> dict[str, object]:
    """What is saved in a round: everything in it tells the round."""
    return {
        "rows": Rows(number, rank),
        **{f"plain{i}": torch.full((50 + i,), number) for i in range(6)},
    }


def _one_round_of(path: Path) -> int:
    """The round that a checkpoint was saved in. Raises where it is not all of one."""
    if not (path / "holdfast.json").exists() and (path / "holdfast.run.json").exists():
        path = Path(holdfast.Run(path).latest().path)
    assert holdfast.verify(path).ok
    with holdfast.open(path) as ckpt:
        numbers = {
            float(n) for array in ckpt.read().values() for n in set(array.reshape(-1).tolist())
        }
        assert sorted(ckpt) == [*(f"plain{i}" for i in range(6)), "rows"]
        assert ckpt["rows"].shape == (ROWS, 300)
    assert len(numbers) == 1, numbers
    return int(numbers.pop())


class Doom:
    """Counts calls, and ends the process at one of them."""

    def __init__(self, at: int | None) -> None:
        self.count = 0
        self._at = at
        for name in CALLS:
            setattr(Files, name, self._counted(getattr(Files, name)))
        for name in ("_set", "_take"):
            setattr(group, name, self._counted(getattr(group, name)))

    def _counted(self, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **kwargs: object) -> object:
            self.count += 1
            if self.count == self._at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted


def _forked(work: Callable[[], object], answer: Path) -> int:
    """Do something in a fork; what it returns, or the kind of error that it raised, is in a file when it has ended."""
    pid = os.fork()
    if pid:
        return pid
    try:
        try:
            said: dict[str, object] = {"value": work()}
        except BaseException as error:
            said = {
                "error": type(error).__name__,
                "text": str(error),
                "trace": traceback.format_exc()[-2000:],
            }
        said["at"] = time.time()
        answer.with_suffix(".part").write_text(json.dumps(said))
        answer.with_suffix(".part").rename(answer)
    finally:
        os._exit(0)


@dataclass
class Round:
    """One save, with a death in it or without."""

    slot: Path
    number: int
    store: str
    format: str
    victim: int | None = None
    at: int | None = None
    room: Path = field(init=False)
    pids: dict[int, str] = field(default_factory=dict)
    started: float = field(default_factory=time.time)
    died: float | None = None
    stuck: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.room = self.slot.parent.parent / "rooms" / f"{self.slot.name}-{self.number}"
        self.room.mkdir()
        if self.store == "agent":
            self.pids[_forked(self._agent, self.room / "agent")] = "agent"
        for rank in range(SIZE):
            self.pids[_forked(lambda rank=rank: self._rank(rank), self.room / f"{rank}")] = str(
                rank
            )

    def _agent(self) -> None:
        store = dist.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=PATIENCE),
        )
        self._say_port(store.port)
        while not (self.room / "over").exists():
            time.sleep(0.02)

    def _say_port(self, port: int) -> None:
        (self.room / "port.part").write_text(str(port))
        (self.room / "port.part").rename(self.room / "port")

    def _open_store(self, rank: int) -> dist.Store:
        timeout = timedelta(seconds=PATIENCE)
        if self.store == "file":
            return dist.FileStore(str(self.room / "store"), SIZE)
        if self.store == "first" and rank == 0:
            store = dist.TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout
            )
            self._say_port(store.port)
            return store
        while not (self.room / "port").exists():
            time.sleep(0.005)
        return dist.TCPStore(
            "127.0.0.1", int((self.room / "port").read_text()), is_master=False, timeout=timeout
        )

    def _rank(self, rank: int) -> dict[str, int]:
        torch.set_num_threads(1)
        store = self._open_store(rank)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=PATIENCE)
        )
        state = _state(self.number, rank)
        # Holdfast's connection is made now: torch asks for the name of every address, which may take longer than the deadline.
        group.ranks_of(doing="begin").close()
        dist.barrier()
        doom = Doom(self.at if rank == self.victim else None)
        if self.format == "run":
            with Run(self.slot / "step", keep="latest:2", deadline=DEADLINE) as run:
                run.save(self.number, state, metrics={"loss": 1.0})
        else:
            save_sharded(
                self.slot / "step", state, format=self.format, overwrite=True, deadline=DEADLINE
            )
        return {"calls": doom.count}

    def ended(self, pid: int) -> None:
        """Take note of the end of a process. The one that hosts the store ends after all ranks."""
        who = self.pids.pop(pid)
        if who == str(self.victim):
            self.died = time.time()
        if not [name for name in self.pids.values() if name != "agent"]:
            (self.room / "over").touch()

    def hurry(self) -> None:
        """End what has taken too long."""
        if time.time() - self.started > PATIENCE and not self.stuck:
            self.stuck = sorted(self.pids.values())
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)

    def row(self) -> dict[str, object]:
        """What came of it."""
        ranks: dict[str, object] = {}
        for rank in range(SIZE):
            file = self.room / f"{rank}"
            ranks[str(rank)] = json.loads(file.read_text()) if file.exists() else None
        beside = sorted(
            p.name for p in self.slot.iterdir() if p.name != "step" and not is_temporary(p.name)
        )
        temporaries = sorted(p.name for p in self.slot.iterdir() if is_temporary(p.name))
        return {
            "slot": self.slot.name, "round": self.number, "store": self.store, "format": self.format, "victim": self.victim,
            "at": self.at, "died": self.died, "ranks": ranks, "beside": beside, "temporaries": temporaries, "stuck": self.stuck,
        }  # fmt: skip


def _run(one: Round) -> dict[str, object]:
    """Come back when all processes of a round have ended, with what came of it and what a fork finds at the target."""
    one.start()
    while one.pids:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid:
            one.ended(pid)
        else:
            one.hurry()
            time.sleep(0.01)
    os.waitpid(_forked(lambda: _one_round_of(one.slot / "step"), one.room / "found"), 0)
    found = json.loads((one.room / "found").read_text())
    return {**one.row(), "found": found.get("value", found)}


def _run_slot(
    slot: Path, kills: int, seed: int, formats: tuple[str, ...]
) -> list[dict[str, object]]:
    """Rounds in one folder until so many ranks have died; one without a death before them and one after them."""
    chance = random.Random(seed)
    kinds = [(store, format) for store in STORES for format in formats]
    chance.shuffle(kinds)
    rows = [_run(Round(slot, 0, *kinds[0]))]
    calls = {
        rank: rows[0]["ranks"][str(rank)]["value"]["calls"]
        + LATER * (formats == ("run",) and rank == 0)
        for rank in range(SIZE)
    }
    number = deaths = 0
    while deaths < kills and number < 2 * kills + 5:
        number += 1
        victim = chance.randrange(SIZE)
        rows.append(
            _run(
                Round(
                    slot,
                    number,
                    *kinds[number % len(kinds)],
                    victim,
                    chance.randint(1, calls[victim]),
                )
            )
        )
        deaths += rows[-1]["ranks"][str(victim)] is None
    return [*rows, _run(Round(slot, number + 1, *kinds[0]))]


def main(
    folder: str, kills: int, width: int, seed: int, formats: tuple[str, ...] = FORMATS
) -> list[dict[str, object]]:
    """So many deaths, in `width` folders at a time."""
    gc.freeze()  # or every fork would copy what the collector looks at
    room = Path(folder) / "rooms"
    room.mkdir()
    slots = [Path(folder) / "slots" / f"slot{i}" for i in range(width)]
    pids = []
    for i, slot in enumerate(slots):
        slot.mkdir(parents=True)
        pids.append(
            _forked(
                lambda i=i, slot=slot: _run_slot(
                    slot, -(-kills // width), 1000 * seed + i, formats
                ),
                room / slot.name,
            )
        )
    for pid in pids:
        os.waitpid(pid, 0)
    said = [json.loads((room / slot.name).read_text()) for slot in slots]
    wrong = [answer["trace"] for answer in said if "value" not in answer]
    assert not wrong, wrong
    return [row for answer in said for row in answer["value"]]


if __name__ == "__main__":
    folder, kills, width, seed, *formats = sys.argv[1:]
    sys.stdout.write(
        json.dumps(main(folder, int(kills), int(width), int(seed), tuple(formats) or FORMATS))
    )
