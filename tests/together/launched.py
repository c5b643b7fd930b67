"""Commands on ranks that are real processes, and what may happen to one of them. A program: it reads jobs, and writes what came.

1. This process imports torch and the command line once; every rank is a fork of it, with the variables that torchrun sets.
2. The store is hosted by rank 0, and dies with it; or by a process of its own, as torchrun's.
3. The victim counts its calls of the file system and of the store, and at a number of them something happens to it: `KILL`, `STOP`
   (and nobody lets it go on), `full` (its disk), `slow` (it sleeps for twice the deadline).
4. A round that takes longer than `PATIENCE` is ended from outside, and says so.

`python -m tests.together.launched jobs` runs a list of jobs from stdin, `… kills FOLDER KILLS WIDTH SEED` the kill loop.
"""

from __future__ import annotations

import errno
import filecmp
import gc
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch.distributed as dist

import holdfast
import holdfast.torch
from holdfast.cli.main import main as command
from holdfast.engine.targets import plan_save
from holdfast.stores.files import Files, is_temporary
from holdfast.stores.remote.client import Bucket
from holdfast.torch.ranks import group
from tests.ranks.kills import CALLS

__all__ = ["DEADLINE", "PATIENCE", "main"]

DEADLINE = 2.0
PATIENCE = 60.0
CUT_NBYTES = 32 << 10
"""Files from this length on are written by several ranks."""


class Fate:
    """Counts calls; at one of them something happens to this process."""

    def __init__(self, what: str, at: int | None) -> None:
        self.count = 0
        self._what, self._at = what, at
        for name in (*CALLS, "open_shared"):
            setattr(Files, name, self._counted(getattr(Files, name), name))
        for name in ("_set", "_take"):
            setattr(group, name, self._counted(getattr(group, name), name))
        for name in ("_run", "run_once"):
            setattr(Bucket, name, self._counted(getattr(Bucket, name), name))

    def _counted(self, call: Callable[..., object], name: str) -> Callable[..., object]:
        def counted(*args: object, **kwargs: object) -> object:
            self.count += 1
            if self._what == "full" and self._at is not None and name in ("pwrite", "allocate"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.count == self._at:
                if self._what == "slow":
                    time.sleep(2 * DEADLINE)
                elif self._what != "full":
                    os.kill(os.getpid(), getattr(signal, f"SIG{self._what}"))
            return call(*args, **kwargs)

        return counted


@dataclass
class Round:
    """One command on some ranks."""

    argv: list[str]
    size: int
    room: str
    agent: bool = False
    victim: int | None = None
    what: str = "KILL"
    at: int | None = None
    pids: dict[int, int] = field(default_factory=dict)
    ended: dict[int, tuple[int, float]] = field(default_factory=dict)

    def run(self) -> dict[str, object]:
        """What each rank said, its status and when it ended; when all have ended, or were ended."""
        room = Path(self.room)
        room.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        host = forked(lambda: self._host(port)) if self.agent else None
        started = time.time()
        for rank in range(self.size):
            self.pids[forked(lambda rank=rank: self._rank(rank, port))] = rank
        happened, stuck = None, []
        while len(self.ended) < self.size:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid in self.pids and os.WIFSTOPPED(status):
                happened = time.time()
            elif pid in self.pids:
                self.ended[self.pids[pid]] = os.waitstatus_to_exitcode(status), time.time()
                happened = (
                    time.time() if self.pids[pid] == self.victim and happened is None else happened
                )
            else:
                time.sleep(0.005)
            left = {rank: own for own, rank in self.pids.items() if rank not in self.ended}
            late = time.time() - started
            if self.what == "STOP" and set(left) == {self.victim}:
                os.kill(left[self.victim], signal.SIGKILL)
            if late > PATIENCE and not stuck:
                stuck = sorted(left)
                for own in left.values():
                    os.kill(own, signal.SIGKILL)
        if host is not None:
            os.kill(host, signal.SIGKILL)
            os.waitpid(host, 0)
        ranks = []
        for rank in range(self.size):
            status, end = self.ended[rank]
            texts = {name: read_if_there(room / f"{rank}.{name}") for name in ("out", "err")}
            calls = room / f"{rank}.calls"
            count = int(calls.read_text() or 0) if calls.exists() else None
            ranks.append({"status": status, "seconds": end - started, "calls": count, **texts})
        late = (
            {}
            if happened is None
            else {
                rank: end - happened for rank, (_, end) in self.ended.items() if rank != self.victim
            }
        )
        shutil.rmtree(room)
        return {
            "argv": self.argv, "size": self.size, "agent": self.agent, "victim": self.victim, "what": self.what, "at": self.at,
            "ranks": ranks, "stuck": stuck, "happened": happened is not None, "late": late,
        }  # fmt: skip

    def _host(self, port: int) -> int:
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=PATIENCE),
        )
        while store:
            signal.pause()
        return 0

    def _rank(self, rank: int, port: int) -> int:
        for name, stream in (("out", 1), ("err", 2)):
            os.dup2(
                os.open(os.path.join(self.room, f"{rank}.{name}"), os.O_WRONLY | os.O_CREAT, 0o600),
                stream,
            )
        if self.size > 1:
            os.environ.update(
                RANK=str(rank),
                WORLD_SIZE=str(self.size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "True"} if self.agent else {})
        fate = Fate(self.what, self.at if rank == self.victim else None)
        # On a busy machine ranks may start seconds apart: only where one is to be lost it is lost soon.
        deadline = 60.0 if self.victim is None else DEADLINE
        words = [*self.argv, *(["--deadline", str(deadline)] if self.size > 1 else [])]
        status = command(words)
        sys.stdout.flush()
        sys.stderr.flush()
        Path(self.room, f"{rank}.calls").write_text(str(fate.count))
        return status


def read_if_there(file: Path) -> str:
    """Return the text of a file, or nothing if a rank died before it created the file."""
    return file.read_text() if file.exists() else ""


def forked(work: Callable[[], int]) -> int:
    """Do something in a fork, whose status it gives; the fork's id."""
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


# The kill loop.

SIZE = 3


def state(number: int) -> dict[str, np.ndarray]:
    """Everything in it tells the number."""
    rng = np.random.default_rng(number)
    made = {
        f"layers.{i}.weight": rng.standard_normal((64, 40 + 8 * i), np.float32) for i in range(8)
    }
    return made | {
        "embedding": rng.standard_normal((400, 96), np.float32),
        "number": np.full(7, number, np.int64),
    }


COMMANDS = {
    "native": ["convert", "{src}.pt", "{dst}", "--overwrite"],
    "file": ["convert", "{src}.pt", "{dst}.safetensors", "--dtype", "bf16", "--overwrite"],
    "zip": ["convert", "{src}.pt", "{dst}.pt", "--overwrite"],
    "shards": [
        "convert",
        "{src}.pt",
        "{dst}",
        "--format",
        "safetensors",
        "--max-shard-size",
        "30KB",
        "--overwrite",
        "--resume",
    ],
    "copy": ["cp", "{src}-hf", "{dst}", "--overwrite"],
    "prune": [
        "prune",
        "{src}.pt",
        "{dst}",
        "--rule",
        "*weight: 0.5",
        "--rule",
        "embedding: 2:4",
        "--overwrite",
    ],
}


def words(kind: str, src: Path, dst: str) -> list[str]:
    return [word.format(src=src, dst=dst) for word in COMMANDS[kind]]


def made_by(kind: str, dst: str) -> str:
    return words(kind, Path(), dst)[2]


def same(one: Path, other: Path) -> bool:
    if one.is_file() or other.is_file():
        return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)
    names = sorted(p.name for p in one.iterdir())
    return names == sorted(p.name for p in other.iterdir()) and all(
        filecmp.cmp(one / n, other / n, shallow=False) for n in names
    )


def right(folder: Path, number: int, kind: str) -> str:
    """Where one process made it, under the name that it has elsewhere: a zip of torch repeats it inside."""
    return str(folder / f"right{number}" / kind / "out")


def prepare(folder: Path) -> None:
    """Two sources, and what one process makes of each."""
    for number in (0, 1):
        src = folder / f"src{number}"
        holdfast.save(state(number), f"{src}.pt", durable=False)
        holdfast.save(
            state(number), f"{src}-hf", format="safetensors", max_shard_size="30KB", durable=False
        )
        (folder / f"src{number}-hf" / "config.json").write_text(json.dumps({"number": number}))
        for kind in COMMANDS:
            Path(right(folder, number, kind)).parent.mkdir(parents=True)
            done = Round(
                words(kind, src, right(folder, number, kind)), 1, str(folder / "room")
            ).run()
            assert done["ranks"][0]["status"] == 0, done


def found_at(folder: Path, kind: str, dst: str) -> int | str | None:
    """Which of the two is there as a whole: its number; None for neither and nothing; a text where there is something else."""
    path = Path(made_by(kind, dst))
    if not path.exists():
        return None
    whole = [
        number for number in (0, 1) if same(Path(made_by(kind, right(folder, number, kind))), path)
    ]
    return (
        whole[0]
        if whole
        else f"neither: {sorted(p.name for p in path.iterdir()) if path.is_dir() else path.stat().st_size}"
    )


def finished(slot: Path) -> dict[str, int]:
    """The files that a conversion which was ended has finished, with their inodes."""
    return {
        p.name.removesuffix(".receipt"): p.with_suffix("").stat().st_ino
        for p in slot.glob(".*.part/*.receipt")
    }


def kill_rounds(folder: Path, slot: Path, kills: int, seed: int) -> list[dict[str, object]]:
    """Commands of which one rank is killed, each followed by the same command without a death."""
    chance, rows, calls = random.Random(seed), list[dict[str, object]](), dict[str, list[int]]()
    kinds = [*COMMANDS]
    chance.shuffle(kinds)
    deaths = number = 0
    standing: dict[str, int | None] = {}
    while deaths < kills and number < 2 * kills + 8:
        kind, src = kinds[number % len(kinds)], folder / f"src{number // len(kinds) % 2}"
        number += 1
        place = slot / kind
        place.mkdir(exist_ok=True)
        dst, room = str(place / "out"), str(folder / "rooms" / f"{slot.name}-{number}")
        if kind not in calls:
            done = Round(words(kind, src, dst), SIZE, room).run()
            assert all(rank["status"] == 0 for rank in done["ranks"]), done
            calls[kind] = [rank["calls"] for rank in done["ranks"]]
            standing[kind] = found_at(folder, kind, dst)
            src = folder / "src1"
        victim = chance.randrange(SIZE)
        row = Round(
            words(kind, src, dst),
            SIZE,
            room,
            agent=chance.random() < 0.5,
            victim=victim,
            at=chance.randint(1, calls[kind][victim]),
        ).run()
        died = row["ranks"][victim]["status"] == -signal.SIGKILL
        deaths += died
        whole = finished(place)
        row |= {
            "kind": kind,
            "slot": slot.name,
            "died": died,
            "before": standing[kind],
            "found": found_at(folder, kind, dst),
        }
        names = {
            p.name
            for p in place.iterdir()
            if not is_temporary(p.name) and not p.name.endswith(".part")
        }
        row["beside"] = sorted(names - {Path(made_by(kind, dst)).name})
        again = Round(words(kind, src, dst), SIZE, room, agent=chance.random() < 0.5).run()
        after = Path(made_by(kind, dst))
        row["again"] = {
            "statuses": [rank["status"] for rank in again["ranks"]], "err": again["ranks"][0]["err"],
            "found": found_at(folder, kind, dst), "stuck": again["stuck"], "left": sorted(p.name for p in place.iterdir()),
            "finished": len(whole),
            "taken over": sum(after.is_dir() and (after / name).stat().st_ino == inode for name, inode in whole.items()),
        }  # fmt: skip
        row["wanted"] = int(src.name[-1])
        standing[kind] = row["again"]["found"]
        rows.append(row)
    return rows


def kill_loop(folder: Path, kills: int, width: int, seed: int) -> list[dict[str, object]]:
    """So many deaths, in `width` folders at a time."""
    plan_save.MAX_UNCUT_NBYTES = CUT_NBYTES
    prepare(folder)
    (folder / "rooms").mkdir()
    gc.freeze()  # or every fork would copy what the collector looks at

    def slot(number: int) -> int:
        path = folder / "slots" / f"slot{number}"
        path.mkdir(parents=True)
        rows = kill_rounds(folder, path, -(-kills // width), 1000 * seed + number)
        (folder / f"rows{number}").write_text(json.dumps(rows))
        return 0

    pids = [forked(lambda number=number: slot(number)) for number in range(width)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert not any(statuses), statuses
    return [
        row for number in range(width) for row in json.loads((folder / f"rows{number}").read_text())
    ]


def run_jobs(jobs: list[dict[str, object]]) -> list[dict[str, object]]:
    """Run the jobs one after the other.

    A `share` says at which part of its calls, in the last job without a victim, something happens.
    """
    rows, before = list[dict[str, object]](), dict[str, object]()
    for job in jobs:
        share = job.pop("share", None)
        if share is not None:
            job["at"] = max(1, round(share * before["ranks"][job["victim"]]["calls"]))
        rows.append(Round(**job).run())
        before = rows[-1] if job.get("victim") is None else before
    return rows


def main(how: str, *more: str) -> object:
    if how == "jobs":
        plan_save.MAX_UNCUT_NBYTES = CUT_NBYTES
        return run_jobs(json.load(sys.stdin))
    folder, kills, width, seed = more
    return kill_loop(Path(folder), int(kills), int(width), int(seed))


if __name__ == "__main__":
    json.dump(main(*sys.argv[1:]), sys.stdout)
