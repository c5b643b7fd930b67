"""Proof 3, the process that is not killed: `python -m tests.crash.kill WRITER FOLDER KILLS SEED`.

It forks a child that saves one version after the other and reports each on a pipe, kills it with SIGKILL at a random moment, and
looks: the target must be a version that was begun, and none older than the last one that was reported as saved. Then the next child
goes on from there, on top of whatever the dead one left. In the end one more save must leave nothing but the target.

A process of its own, because forking one that runs tests (and has threads) is no foundation for a proof.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path
from typing import NoReturn

from holdfast.engine.commit.temporaries import find_recoverable
from holdfast.stores.files import Files, is_temporary
from tests.crash.writers import WRITERS, Writer, read_toy, toy


class Plain(Files):
    """A file system that can neither exchange nor refuse to replace, and takes its time between two renames."""

    pause = 0.0

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        if not is_temporary(target):
            time.sleep(self.pause)
        super().rename(source, target, dir_fd=dir_fd)

    def exchange(self, first: str, second: str, *, dir_fd: int) -> bool:
        return False

    def rename_new(self, source: str, target: str, *, dir_fd: int) -> bool:
        return False


def save_in_place(path: str, version: int, *, files: Files | None, durable: bool = True) -> None:
    """What most programs do, and what the proof must catch."""
    data = toy(version)
    with open(path, "wb", buffering=0) as file:
        for offset in range(0, len(data), 1_000):
            file.write(data[offset : offset + 1_000])


BROKEN = [Writer("in-place", False, save_in_place, read_toy)]


def save_forever(
    writer: Writer, path: Path, pipe: int, *, version: int, durable: bool, plain: bool
) -> NoReturn:
    """The child: it never ends by itself."""
    while True:
        os.write(pipe, struct.pack("<ci", b"b", version))
        writer.save(str(path), version, files=Plain() if plain else None, durable=durable)
        os.write(pipe, struct.pack("<ci", b"e", version))
        version += 1


def reports(pipe: int, *, saved: int) -> tuple[int, int]:
    """The last version that was begun, and the last one that was saved."""
    data = b""
    while block := os.read(pipe, 1 << 16):
        data += block
    begun = saved
    for word, version in struct.iter_unpack("<ci", data[: len(data) // 5 * 5]):
        begun, saved = (version, saved) if word == b"b" else (begun, version)
    return begun, saved


def kill_once(
    writer: Writer, path: Path, *, version: int, delay: float, durable: bool, plain: bool
) -> tuple[int, int]:
    """One child, one kill; the last version begun and the last one saved."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_forever(writer, path, theirs, version=version, durable=durable, plain=plain)
        finally:
            os._exit(1)
    os.close(theirs)
    os.read(ours, 5)  # it has begun
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the child ended by itself, with {status}"
    begun, saved = reports(ours, saved=version - 1)
    os.close(ours)
    return max(begun, version), saved


def main(name: str, folder: str, kills: int, seed: int) -> dict[str, object]:
    """Kill that often, and on until both kinds of moments were seen often enough; tell what was seen.

    Where a save spends little of its time with a temporary file open, few moments fall there: more kills find them, and a save that
    never has one is still found, by the bound.
    """
    writer = next(writer for writer in (*WRITERS, *BROKEN) if writer.name == name)
    chance, path = random.Random(seed), Path(folder) / "model"
    started = time.perf_counter()
    for version in range(1, 11):
        writer.save(str(path), version, files=None)
    usual = (time.perf_counter() - started) / 10
    Plain.pause = max(
        10 * usual, 0.2
    )  # long beside a save, also where the machine becomes slower meanwhile
    saved, finished, left, aside, new = 10, 0, 0, 0, 0
    number, enough = 0, kills // 20
    while number < kills or (
        number < 5 * kills and not (left > enough and finished + new > enough)
    ):
        plain = writer.directory and number % 3 == 0
        delay = chance.uniform(0, 2.5 * usual + plain * Plain.pause)
        begun, done = kill_once(
            writer, path, version=saved + 1, delay=delay, durable=number % 2 == 0, plain=plain
        )
        finished += done - saved
        # A forked child is slower than the first ten saves were, and more so where others use the machine: the moments follow it.
        usual *= 1.0 if plain else 0.9 if done > saved else 1.15
        names = [inner.name for inner in path.parent.iterdir() if inner.name != "model"]
        assert all(map(is_temporary, names)), names
        left += bool(names)
        found = path if path.exists() else find_recoverable(path)
        aside += not path.exists()
        assert found is not None, f"kill {number}: nothing is left; in the folder: {names}"
        seen = writer.read(Path(found))
        assert done <= seen <= begun, f"kill {number}: found {seen}, saved {done}, begun {begun}"
        new += seen > done
        saved = seen
        number += 1
    writer.save(str(path), saved + 1, files=None)
    assert [inner.name for inner in path.parent.iterdir()] == ["model"], (
        "the last save did not clean"
    )
    assert writer.read(path) == saved + 1
    return {
        "kills": number,
        "saves": finished,
        "left a temporary": left,
        "set aside": aside,
        "new but not reported": new,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
